"""The verdict over several precisions, and what it says of input that is no run at all."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from suites import reference
from suites.cases import Case
from suites.faults import FAULTS
from suites.observe import Piece, RankObservation
from suites.reference import ReferenceCache
from suites.runs import RunFailed
from suites.verdict import conclude, judge, ladder

CASE = Case("handwritten", head="row", hidden=35)
TENSOR = "layers.0.up_proj.weight"


@pytest.fixture(scope="module")
def runs(run_jobs):
    cases = (CASE, CASE.but(matmul="tf32"), CASE.but(dtype="float64"))
    return dict(zip(cases, run_jobs([(case.id, None) for case in cases]), strict=True))


def changed(ranks: list[RankObservation], change) -> list[RankObservation]:
    """The run with one tensor's gradient of the second step changed on all ranks."""

    def one(rank: RankObservation) -> RankObservation:
        steps = list(rank.steps)
        piece = steps[1].gradients[TENSOR]
        new = change(piece.data.clone())
        other = Piece(new.flatten(), piece.start, tuple(new.shape) if new.dim() > 1 else piece.local_shape)
        steps[1] = dataclasses.replace(steps[1], gradients={**steps[1].gradients, TENSOR: other})
        return dataclasses.replace(rank, steps=tuple(steps))

    return [one(rank) for rank in ranks]


def with_logits(ranks: list[RankObservation], factor: float) -> list[RankObservation]:
    """The run with all logits of the second step scaled: no other number follows from it."""

    def one(rank: RankObservation) -> RankObservation:
        steps = list(rank.steps)
        scaled = tuple(Piece(p.data * factor, p.start, p.local_shape) for p in steps[1].logits)
        steps[1] = dataclasses.replace(steps[1], logits=scaled)
        return dataclasses.replace(rank, steps=tuple(steps))

    return [one(rank) for rank in ranks]


def again_as(runs, **other):
    """Runs of the ladder: the ones that are there, or what is given for a precision."""

    def again(case: Case):
        found = other.get(case.dtype, runs.get(case))
        if isinstance(found, str):
            raise RunFailed(found)
        return found

    return again


def test_a_ladder_goes_to_ieee_then_to_fp64_and_to_other_seeds_where_there_is_no_fp64():
    assert ladder(CASE) == [CASE.but(dtype="float64")]
    assert ladder(CASE.but(matmul="tf32")) == [CASE, CASE.but(dtype="float64")]
    assert ladder(CASE.but(dtype="bfloat16")) == [CASE, CASE.but(dtype="float64")]
    assert ladder(CASE.but(dtype="float64")) == []
    deepspeed = Case("deepspeed", head="row")
    assert [case.seed for case in ladder(deepspeed)] == [1, 2]
    assert ladder(deepspeed.but(matmul="tf32")) == [deepspeed]


def test_a_deviation_that_a_higher_precision_clears_is_rounding(runs):
    off = changed(runs[CASE], lambda g: g * (1 + 2e-5))
    assert judge(CASE, off).open
    found = conclude(CASE, off, again=again_as(runs))
    assert found.verdict == "rounding"
    assert [(rung.arithmetic, rung.verdict) for rung in found.rungs] == [("float64", "rounding")]
    assert found.rungs[0].slope is not None
    assert found.rungs[0].slope > 0.74
    assert "gone at a higher precision" in found.evidence


def test_a_deviation_that_stays_is_a_bug_and_its_slope_says_so(runs):
    tf32 = CASE.but(matmul="tf32")
    off = {dtype: with_logits(runs[CASE.but(dtype=dtype)], 1.05) for dtype in ("float32", "float64")}
    found = conclude(tf32, with_logits(runs[tf32], 1.05), again=again_as(runs, **off))
    assert found.verdict == "bug"
    assert found.rungs[0].slope == pytest.approx(0, abs=0.1)
    assert "logits flags at float32 too" in found.evidence


def test_one_low_precision_alone_never_says_bug_but_a_broken_tie_does(runs, run_jobs):
    tf32 = CASE.but(matmul="tf32")
    assert judge(tf32, with_logits(runs[tf32], 100)).verdict == "inconclusive"
    fault = FAULTS["copied_tie"]
    broken = Case.parse(fault.case).but(matmul="tf32")
    assert judge(broken, run_jobs([(broken.id, fault.name)])[0]).verdict == "bug"


def test_a_loss_of_precision_at_one_precision_only_is_a_precision_bug(runs):
    found = conclude(CASE, changed(runs[CASE], lambda g: g.bfloat16().float()), again=again_as(runs))
    assert found.verdict == "bug: precision"


def test_a_higher_precision_clears_only_what_is_measured_there_and_no_lost_precision(runs):
    tf32 = CASE.but(matmul="tf32")
    silent = [
        dataclasses.replace(r, steps=tuple(dataclasses.replace(s, gradient_norm=None) for s in r.steps))
        for r in runs[CASE]
    ]
    norms = [
        dataclasses.replace(r, steps=tuple(dataclasses.replace(s, gradient_norm=s.gradient_norm * 2) for s in r.steps))
        for r in runs[tf32]
    ]
    case = tf32.but(path="deepspeed")  # reports no norm at fp32 without ZeRO, and has no fp64
    found = conclude(case, norms, again=lambda rung: silent)
    assert found.verdict == "inconclusive"
    assert "global norm is not measured there" in found.evidence
    coarse = changed(runs[tf32], lambda g: g.bfloat16().float())
    assert conclude(tf32, coarse, again=again_as(runs)).verdict == "bug: precision"


def test_where_no_higher_precision_ran_nothing_is_decided(runs):
    off = changed(runs[CASE], lambda g: g * (1 + 2e-5))
    found = conclude(CASE, off, again=again_as(runs, float64="rank 0 exited with code 1"))
    assert found.verdict == "inconclusive"
    assert "rank 0 exited with code 1" in found.evidence
    assert found.rungs[0].verdict == "failed"


def test_deviations_with_every_seed_are_a_bug_where_there_is_no_fp64(runs):
    case = CASE.but(path="deepspeed")
    off = changed(runs[CASE], lambda g: g * (1 + 2e-5))
    cache = ReferenceCache()
    seeds = iter([off, off])
    # The same observations stand for those of the other seeds; each is judged against its own data and weights.
    assert conclude(case, off, cache, again=lambda rung: next(seeds)).verdict == "bug"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda g: g.fill_(float("nan")), "not finite"),
        (lambda g: g.index_fill_(0, torch.tensor([3]), float("inf")), "not finite"),
        (lambda g: g.zero_(), "relative error 1 "),
        (lambda g: g.reshape(-1, 5), "do not add up"),
    ],
    ids=["nan", "infinity", "all zero", "wrong shape"],
)
def test_a_gradient_that_is_none_is_a_bug_with_its_own_sentence(change, text, runs):
    double = changed(runs[CASE.but(dtype="float64")], change)
    found = conclude(CASE, changed(runs[CASE], change), again=again_as(runs, float64=double))
    assert found.verdict == "bug"
    assert text in found.evidence


def test_a_reference_that_fails_is_no_green(runs, monkeypatch):
    def broken(*args, **options):
        raise MemoryError("no room for the reference")

    monkeypatch.setattr(reference, "evaluate", broken)
    found = conclude(CASE, runs[CASE], again=again_as(runs))
    assert found.verdict == "inconclusive"
    assert "the reference failed in step 1: MemoryError: no room for the reference" in found.evidence


def test_a_run_that_diverges_as_the_unsharded_one_does_is_no_bug_and_no_green(run_jobs):
    case = Case(
        "handwritten", tie="untied", head="gathered", optimizer="momentum", logit_scale=1000.0, loss="z_loss", steps=6
    )
    ranks = run_jobs([(case.id, None)])[0]
    assert not all(bool(torch.isfinite(p.data).all()) for p in ranks[0].steps[-1].weights.values())
    found = judge(case, ranks)
    assert (found.verdict, found.flagged) == ("inconclusive", ())
    assert "blind: " in found.evidence
    assert "not finite" in found.evidence


def test_a_broken_tie_is_a_bug_even_where_the_reference_fails(run_jobs, monkeypatch):
    fault = FAULTS["copied_tie"]
    ranks = run_jobs([(fault.case, fault.name)])[0]

    def broken(*args, **options):
        raise MemoryError("no room for the reference")

    monkeypatch.setattr(reference, "evaluate", broken)
    found = judge(Case.parse(fault.case), ranks)
    assert found.verdict == "bug"
    assert found.evidence.startswith("tie broken")
    assert "the reference failed" in found.evidence


def test_every_tensor_says_what_it_would_have_seen(runs):
    found = judge(CASE, runs[CASE])
    names = {m.name for m in found.measured if m.oracle == "gradient"}
    assert {TENSOR, "embed_tokens.weight", "lm_head.weight"} <= names
    assert all(0 < m.sees < 1e-3 for m in found.measured if m.oracle == "gradient")
    low = judge(CASE.but(matmul="tf32"), runs[CASE.but(matmul="tf32")])
    finest = {m.name: m.sees for m in found.measured}
    assert all(m.sees > 100 * finest[m.name] for m in low.measured if m.oracle == "gradient")
