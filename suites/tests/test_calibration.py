"""Calibration: what is run, how the numbers are read off; faults of graded size have the size that they say."""

from __future__ import annotations

import math

import pytest
import torch

from suites import calibration
from suites.calibration import Job, Run, at, read_off, upper_bound
from suites.cases import Case, CaseError
from suites.evidence import Evidence
from suites.faults import FAULTS, HARMLESS
from suites.faults.graded import GRADED, KINDS, SIZES, name_of
from suites.limits import TABLE
from suites.model import EMBEDDING
from suites.numerics import LIMITS
from suites.observe import RankObservation
from suites.precision import UNIT_ROUNDOFF, arithmetic
from suites.reference import ReferenceCache

CASE = "handwritten:tie=tied,head=row,zero=0"
CLEAN = dict.fromkeys(LIMITS, 1.0)


def run(kind="null", case=CASE, change="", verdict="rounding", **others):
    precision = arithmetic(Case.parse(case))
    defaults = {"arithmetic": precision, "target": "torch", "tiebench": "0", "worst": CLEAN}
    return Run(kind, case, change, **{**defaults, "verdict": verdict, **others})


def table(result, name):
    return next(found.rows for found in result.tables if found.name == name)


# --- what is run


@pytest.fixture(scope="module")
def full():
    return calibration.plan(calibration.FULL)


def test_the_full_plan_holds_what_was_promised(full):
    nulls = [Case.parse(job.case) for job in full if job.kind == "null"]
    assert len(nulls) >= 2000
    assert len(set(full)) == len(full)
    for precision in UNIT_ROUNDOFF:
        mine = [case for case in nulls if arithmetic(case) == precision]
        assert sum(case.seed % 2 for case in mine) >= 0.45 * len(mine) > 100
        assert max(case.hidden * case.vocab for case in mine) >= 2**21
        assert max(case.layers for case in mine) >= 8
    assert max(case.hidden for case in nulls) == 1024
    assert max(case.vocab for case in nulls) == 32768
    assert {case.tp for case in nulls} == {1, 2, 4}
    assert {case.zero for case in nulls} == {0, 1, 2}
    assert {job.change for job in full if job.kind == "null"} == {
        "",
        *(change.name for change in HARMLESS.values() if not change.caught_by),
    }
    graded = {(job.change, arithmetic(Case.parse(job.case))) for job in full if job.kind == "graded"}
    assert graded >= {(name, precision) for name in GRADED for precision in ("float64", "float32")}
    assert graded >= {(name_of(kind, s), p) for kind in KINDS for s in SIZES if s >= 1e-4 for p in UNIT_ROUNDOFF}


def test_every_fault_is_tried_at_every_lower_precision_and_its_effect_measured(full):
    tried = {(job.change, arithmetic(Case.parse(job.case))) for job in full if job.kind == "fault"}
    changes = {change for change, _ in tried}
    assert len(changes) >= 70
    everything = {(c, precision) for c in changes for precision in ("float64", "tf32", "float16", "bfloat16")}
    assert tried <= everything
    for name, precision in everything - tried:
        with pytest.raises(CaseError):
            at(Case.parse(FAULTS[name].case), precision)
    assert len(everything - tried) <= 3


def test_plans_are_the_same_each_time_and_keep_to_what_they_are_given(full):
    assert calibration.plan(calibration.FULL) == full
    small = calibration.plan(calibration.QUICK, precisions=["float32", "tf32"], ranks=1)
    cases = [Case.parse(job.case) for job in small]
    assert {arithmetic(case) for case in cases} == {"float32", "tf32", "float64"}  # fp64 measures effects
    assert {case.world_size for case in cases} == {1}
    assert len(small) < len(calibration.plan(calibration.QUICK)) < len(full) / 5
    other = calibration.plan(calibration.FULL, [Case("deepspeed")], own=False)
    assert [job.case for job in other] == [Case("deepspeed").id, Case("deepspeed", seed=1).id]


# --- what is read off


def test_upper_bound():
    assert upper_bound(0, 2000) == pytest.approx(0.0015)  # rule of three
    assert upper_bound(0, 2) == 1.0
    assert upper_bound(1, 10) == pytest.approx(0.3942, abs=1e-4)  # Clopper-Pearson, one-sided
    assert upper_bound(3, 100) == pytest.approx(0.0757, abs=1e-4)
    assert upper_bound(5, 5) == 1.0


def test_clean_runs_give_no_problem():
    result = read_off([run(), run(case=CASE + ",seed=1", worst={**CLEAN, "tensor": 2.5})])
    assert result.problems == ()
    (row,) = [row for row in table(result, "false_alarms") if row["precision"] == "float32"]
    assert (row["null runs"], row["held out"], row["flagged"]) == (2, 1, 0)
    (row,) = [row for row in table(result, "limits") if row["scope"] == "tensor"]
    assert (row["setting half"], row["held-out half"], row["worst"]) == (1.0, 2.5, 2.5)
    assert row["margin"] == pytest.approx(LIMITS["tensor"] / 2.5)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (run(verdict="inconclusive", flagged=("gradient",)), "null run flagged"),
        (run(verdict="crash"), "null run flagged"),
        (run(verdict="refused"), "null run flagged"),
        (run(worst={**CLEAN, "row": 0.6 * LIMITS["row"]}), "limit row"),
        (run(worst={**CLEAN, "row": None}), "limit row"),  # not finite
        (run("harmless", change="tf32_unasked", verdict="bug", flagged=("logits",)), "harmless change called a bug"),
    ],
)
def test_what_must_not_be_is_a_problem(bad, says):
    assert any(text.startswith(says) for text in read_off([run(), bad]).problems)


def test_a_blind_run_and_a_framework_that_refuses_are_no_alarm():
    refused = run(case="deepspeed:tie=tied,head=row,zero=0", verdict="refused", worst={})
    result = read_off([run(verdict="inconclusive"), refused])
    assert result.problems == ()
    rows = {row["path"]: row for row in table(result, "false_alarms") if row["precision"] == "all"}
    assert rows["handwritten"]["blind"] == 1
    assert (rows["deepspeed"]["null runs"], rows["deepspeed"]["refused"]) == (0, 1)


def graded(precision, size, *, effect, sees, seen, verdict="rounding"):
    name, case = name_of("row", size), at(Case.parse(CASE), precision).id
    flagged = ("gradient",) if seen else ()
    key = f"gradient {EMBEDDING}"
    return run("graded", case, name, verdict, flagged=flagged, errors={key: effect}, sees={key: sees})


@pytest.mark.parametrize(
    ("sees", "seen", "verdict", "says"),
    [
        (1e-3, False, "rounding", "graded fault above the stated visibility was missed"),
        (1e-1, False, "rounding", None),
        (1e-3, True, "rounding", "graded fault was seen and not called a bug"),
        (1e-1, True, "rounding", None),
        (1e-3, True, "bug", None),
        (None, False, "rounding", None),  # sees nothing, and says so
    ],
)
def test_faults_are_held_against_the_visibility_that_the_run_states(sees, seen, verdict, says):
    exact = graded("float64", 1e-2, effect=1e-2, sees=1e-14, seen=True, verdict="bug")
    tried = graded("tf32", 1e-2, effect=5e-3, sees=sees, seen=seen, verdict=verdict)
    problems = read_off([exact, tried]).problems
    assert [text.partition(":")[0] for text in problems] == ([says] if says else [])


def test_a_fault_of_the_table_above_visibility_must_not_be_missed():
    key = f"gradient {EMBEDDING}"
    exact = run("fault", at(Case.parse(CASE), "float64").id, "scaled_lookup", "bug", errors={key: 0.5})
    missed = run("fault", at(Case.parse(CASE), "bfloat16").id, "scaled_lookup", "inconclusive", sees={key: 0.1})
    result = read_off([exact, missed])
    assert result.problems == (f"fault above the stated visibility was missed: {missed.case} with scaled_lookup",)
    assert table(result, "faults")[0]["missed above it"] == 1
    text = calibration.markdown(result, "two runs")
    assert "**1 not as they must be**" in text
    assert "| bfloat16 | 1 | 0 | 0 | 1 | 1 |" in text


def test_a_fault_that_does_nothing_at_a_precision_is_told_by_its_twin():
    key, case = f"gradient {EMBEDDING}", at(Case.parse(CASE), "bfloat16").id
    exact = run("fault", at(Case.parse(CASE), "float64").id, "scaled_lookup", "bug", errors={key: 0.5})
    idle = run("fault", case, "scaled_lookup", sees={key: 0.1}, digest="a")
    assert read_off([exact, idle, run("twin", case, digest="a")]).problems == ()
    assert read_off([exact, idle, run("twin", case, digest="b")]).problems != ()
    assert read_off([exact, idle]).problems != ()


def test_the_digest_tells_runs_apart(run_jobs):
    low = at(Case.parse(CASE), "bfloat16").id
    jobs = [(low, None), (low, "gradient_not_cleared"), (low, "scaled_lookup"), (low + ",seed=1", None)]
    plain, idle, broken, other = map(calibration.digest, run_jobs(jobs))
    assert plain == idle, "sums of low gradients live elsewhere: there is nothing to clear"
    assert len({plain, broken, other}) == 3


def test_nothing_ran():
    assert read_off([]) == calibration.Result((), (), 0)


def test_every_limit_has_its_calibration():
    for scope, limit in TABLE.items():
        assert limit.calibration, scope
        assert limit.value >= calibration.MARGIN * limit.worst, scope


LUCKY = (
    "handwritten:tie=tied,head=vocab,zero=0,hidden=4,batch=2,dtype=float16,optimizer=adamw,clip=0.05,accumulate=2,"
    "register=head_first,seed=127,loss=z_loss,logit_scale=0.05,recompute=head"
)


def test_where_three_samples_of_noise_are_too_lucky_more_are_taken(run_jobs, monkeypatch):
    case = Case.parse(LUCKY)
    (ranks,) = run_jobs([(case.id, None)])
    worst = max(found.deviation.score for found in evidence(case, ranks).comparisons)
    monkeypatch.setattr("suites.evidence.MANY_SAMPLES", 0)
    assert max(found.deviation.score for found in evidence(case, ranks).comparisons) > 1
    assert worst < 0.5


# --- faults of graded size


@pytest.mark.parametrize("kind", KINDS)
def test_a_graded_fault_is_as_large_as_it_says(kind, run_jobs, monkeypatch):
    monkeypatch.setattr("suites.faults.FAULTS", {**calibration.FAULTS, **GRADED})
    case = at(Case.parse(GRADED[name_of(kind, 0.1)].case), "float64")
    jobs = [(case.id, None), *((case.id, name_of(kind, size)) for size in (1e-3, 0.1))]
    clean, faint, strong = (evidence(case, ranks) for ranks in run_jobs(jobs))
    off = [e.gradients[0][EMBEDDING].value - clean.gradients[0][EMBEDDING].value for e in (faint, strong)]
    assert float(off[1].norm() / off[0].norm()) == pytest.approx(100, rel=1e-6)
    worst, where = calibration.measure(clean)
    assert set(worst) == set(where) == set(LIMITS)
    assert all(value is not None and value < LIMITS[scope] for scope, value in worst.items())
    assert (calibration.measure(faint)[0]["tensor"] or 0) > LIMITS["tensor"]
    if kind == "mean":
        assert torch.allclose(off[1], 0.1 * clean.gradients[0][EMBEDDING].value)


def evidence(case: Case, ranks: list[RankObservation]) -> Evidence:
    return Evidence(case, ranks, ReferenceCache())


def test_graded_faults_have_names_and_sizes_of_their_own():
    assert len(GRADED) == len(KINDS) * len(SIZES)
    assert all(math.isclose(float(name.rpartition("_")[2]), size) for size in SIZES for name in [name_of("row", size)])
    assert Job("graded", CASE, "graded_row_1e-03") == Job("graded", CASE, name_of("row", 1e-3))
