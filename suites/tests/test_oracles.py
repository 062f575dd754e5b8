"""Every oracle: null runs that it must pass, faults that it must catch (rule 4 of the design)."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from suites import numerics
from suites.cases import Case, product
from suites.faults import FAULTS
from suites.observe import Piece, RankObservation
from suites.oracles import ORACLES
from suites.precision import unit_roundoff
from suites.reference import ReferenceCache
from suites.verdict import judge

TIES = ["tied", "untied"]
SHARDED = ["vocab", "row"]
HEADS = [*SHARDED, "gathered"]
NULL = [
    *product("handwritten", tie=TIES, head=HEADS, zero=[0, 2], hidden=35, vocab=67),
    *product("handwritten", tie=TIES, head=SHARDED, dtype="float64", optimizer="adamw", clip=0.5),
    *product("handwritten", head=SHARDED, dp=2, zero=[0, 1, 2], accumulate=2, hidden=35, clip=0.5),
    *product("handwritten", head=SHARDED, tp=4, vocab=67, hidden=35, padding_idx=50),
    *product("handwritten", head="row", optimizer=["momentum", "adam"], frozen=["none", "body", "embedding"]),
    Case("handwritten", head_bias="yes", activation="transposed", register="head_first", padding_idx=0),
    *product("handwritten", tie_when=["after_load", "meta", "after_shard"], head=HEADS, embedding_scale=5.5),
    *product("handwritten", tp=1, head=HEADS, tie=TIES),
    *product("handwritten", tp=1, dp=2, zero=[0, 2], head="row"),
    *product("handwritten", seed=[1, 2, 3], head=SHARDED, hidden=35, vocab=67),
    *product(
        "handwritten", optimizer=["momentum", "adam"], hidden=256, layers=4, steps=5
    ),  # more elements, more chances
]
NAMED = ("detached_lookup_hidden", "detached_lookup_vocab", "scaled_lookup", "global_padding_idx")


@pytest.fixture(scope="module")
def observations(run_jobs):
    jobs = [(case.id, None) for case in NULL] + [(FAULTS[name].case, name) for name in NAMED]
    return dict(zip(jobs, run_jobs(jobs), strict=True))


@pytest.fixture(scope="module")
def cached_judge():
    return functools.partial(judge, cache=ReferenceCache())


@pytest.mark.parametrize("case", NULL, ids=lambda c: c.id)
def test_null_run_is_not_flagged(case, observations, cached_judge):
    found = cached_judge(case, observations[case.id, None])
    assert [f.evidence for f in found.findings if f.flagged] == []
    assert found.verdict in ("exact", "rounding")
    assert {f.oracle for f in found.findings} == {oracle.name for oracle in ORACLES}
    assert found.headroom is None or found.headroom > 1.5


def test_missing_contribution_is_named(observations, cached_judge):
    for name in ("detached_lookup_hidden", "detached_lookup_vocab"):
        found = cached_judge(Case.parse(FAULTS[name].case), observations[FAULTS[name].case, name])
        assert "0.000 of the lookup's and 1.000 of the projection's contribution" in found.evidence
    scaled = cached_judge(
        Case.parse(FAULTS["scaled_lookup"].case), observations[FAULTS["scaled_lookup"].case, "scaled_lookup"]
    )
    assert "0.500 of the lookup's" in scaled.evidence


def test_wrong_row_is_named(observations, cached_judge):
    fault = FAULTS["global_padding_idx"]
    found = cached_judge(Case.parse(fault.case), observations[fault.case, fault.name])
    assert "worst row 37" in found.evidence  # row 3 of the second shard, which starts at row 34


CASE = Case("handwritten", head="row", hidden=35)


def scaled(ranks: list[RankObservation], factor: float) -> list[RankObservation]:
    """The run with one tensor's gradient of the second step scaled on all ranks."""

    def change(rank: RankObservation) -> RankObservation:
        steps = list(rank.steps)
        piece = steps[1].gradients["layers.0.up_proj.weight"]
        changed = {"layers.0.up_proj.weight": Piece(piece.data * factor, piece.start, piece.local_shape)}
        steps[1] = dataclasses.replace(steps[1], gradients={**steps[1].gradients, **changed})
        return dataclasses.replace(rank, steps=tuple(steps))

    return [change(rank) for rank in ranks]


@pytest.fixture(scope="module")
def row_run(run_jobs):
    return run_jobs([(CASE.id, None)])[0]


def test_from_rounding_over_inconclusive_to_bug(row_run):
    gradient_only = [judge(CASE, scaled(row_run, 1 + size)) for size in (0, 2e-5, 1e-2)]
    assert [j.verdict for j in gradient_only] == ["rounding", "inconclusive", "bug"]
    assert "one precision alone cannot tell" in gradient_only[1].evidence
    assert (
        "tiebench run --case 'handwritten:tie=tied,head=row,zero=0,hidden=35,dtype=float64'"
        in gradient_only[1].evidence
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_bugs(row_run, value):
    found = judge(CASE, scaled(row_run, value))
    assert found.verdict == "bug"
    assert "not finite" in found.evidence


def test_lost_ranks_steps_and_places_are_bugs(row_run):
    assert judge(CASE, row_run[:1]).verdict == "bug"
    assert judge(CASE, []).verdict != "rounding"
    short = [dataclasses.replace(r, steps=r.steps[:2]) for r in row_run]
    found = judge(CASE, short)
    assert (found.verdict, "2 of 3 steps" in found.evidence) == ("bug", True)
    twice = [row_run[0], dataclasses.replace(row_run[0], rank=1)]
    assert "same place" in judge(CASE, twice).evidence


def test_a_run_that_could_not_show_a_missing_update_is_not_green(run_jobs):
    case = Case("handwritten", clip=1e-9)
    found = judge(case, run_jobs([(case.id, None)])[0])
    assert found.verdict == "inconclusive"
    assert "blind: update cannot see" in found.evidence


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"loss": ()}, "0 losses and 1 logits"),
        ({"logits": ()}, "1 losses and 0 logits"),
        ({"seconds": float("nan")}, "took nan seconds"),
        ({"gradient_norm": None}, "reports no gradient norm"),
        ({"gradient_norm": float("nan")}, "not finite"),
        ({"loss": (float("nan"),)}, "not finite"),
    ],
)
def test_incomplete_observations_are_bugs(row_run, change, text):
    ranks = [dataclasses.replace(r, steps=(*r.steps[:2], dataclasses.replace(r.steps[2], **change))) for r in row_run]
    found = judge(CASE, ranks)
    assert found.verdict == "bug"
    assert text in found.evidence


def test_a_reference_that_is_no_number_makes_no_green():
    zero = torch.zeros(4, 4)
    u = unit_roundoff(torch.float32)
    assert numerics.deviation("w", zero, zero, torch.stack([zero]), u).sees == float("inf")
    nan = torch.full((1, 4, 4), float("nan"))
    found = numerics.deviation("w", zero + 1, zero.double() + 1, nan, u)
    assert found.sees == float("inf")


def test_exact_where_nothing_is_sharded(run_jobs):
    case = Case("handwritten", tp=1, head="row")
    assert judge(case, run_jobs([(case.id, None)])[0]).verdict == "exact"


def test_deviation_sees_one_wrong_row_and_one_wrong_element():
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(200, 50, generator=generator, dtype=torch.float64)
    noise = 1e-7 * torch.randn(3, 200, 50, generator=generator, dtype=torch.float64)
    run = reference + 1e-7 * torch.randn(200, 50, generator=generator, dtype=torch.float64)
    u = unit_roundoff(torch.float32)
    assert numerics.deviation("w", run, reference, noise, u).score < 0.5
    row = run.clone()
    row[17] += 3e-6
    assert (found := numerics.deviation("w", row, reference, noise, u)).score > 1
    assert (found.row, found.rows_wrong) == (17, 1 / 200)
    element = run.clone()
    element[3, 4] += 1e-5
    assert (found := numerics.deviation("w", element, reference, noise, u)).score > 1
    assert (found.scope, found.row) == ("element", 3)
