"""Cases after other cases against the same cases alone."""

from __future__ import annotations

import textwrap

import pytest

from ci import records, sticky
from ci.records import read_run
from ci.tests.conftest import tiebench
from suites.cases import Case

CASES = [Case("handwritten", layers=1, seed=seed) for seed in range(6)]
LEAK = """
    from suites.paths import handwritten

    build, built = handwritten.build, []

    def remembering(case, device, notice):
        trainer = build(case, device, notice)
        built.append(case)
        for parameter in trainer.model.parameters():
            parameter.data.mul_(1 + 1e-7 * (len(built) > 2))
        return trainer

    handwritten.build = remembering
"""


def run(tmp_path, *words):
    ids = [word for case in CASES for word in ("--case", case.id)]
    return tiebench("run", *ids, "--recheck", "6", "--out", "run", *words, cwd=tmp_path)


def findings(tmp_path):
    return {r.case: next(f for f in r.findings if f.oracle == "sticky") for r in read_run(tmp_path / "run").records}


def test_what_remembers_nothing_is_the_same_alone(tmp_path):
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout
    told = findings(tmp_path)
    assert len(told) == len(CASES)
    assert {f.evidence for f in told.values()} == {"alone it is the same, bit for bit"}
    assert not (tmp_path / "run" / "observations").exists() or not list(tmp_path.glob("run/observations/*/*"))


def test_state_that_leaks_from_case_to_case_is_named(tmp_path):
    (tmp_path / "leak.py").write_text(textwrap.dedent(LEAK))
    done = run(tmp_path, "--patch", "leak.py")
    assert done.returncode == 1
    told = findings(tmp_path)
    flagged = [case for case, finding in told.items() if finding.flagged]
    assert 0 < len(flagged) <= len(CASES) - 2  # the first two found nothing to be remembered
    assert all("rank0: initial." in told[case].evidence for case in flagged)
    for record in read_run(tmp_path / "run").records:
        if record.case in flagged:
            assert record.verdict == "bug"
            assert "sticky" in record.oracle
            assert not records.expected(record)


@pytest.mark.timeout(600)
def test_deepspeed_is_the_same_alone(tmp_path):
    chosen = (
        "head=row,zero=0",
        "head=vocab,zero=2,hidden=35",
        "head=row,zero=3,optimizer=adamw",
        "head=vocab,zero=1,dp=2",
    )
    ids = [word for case in chosen for word in ("--case", f"deepspeed:{case}")]
    done = tiebench("run", *ids, "--recheck", "4", "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert {f.flagged for f in findings(tmp_path).values()} == {False}


def test_a_sample_is_drawn_by_its_seed():
    drawn = sticky.sample(CASES, 3, "a night")
    assert len(drawn) == 3
    assert drawn == sticky.sample(CASES, 3, "a night")
    assert len({sticky.sample(CASES, 3, str(night)) for night in range(20)}) > 5
    assert sticky.sample(CASES, 99, "x") == frozenset(CASES)
    assert sticky.sample(CASES, 0, "x") == frozenset()


@pytest.fixture
def observed(session):
    s = session()
    flights = [s.train(case) for case in CASES[:2]]
    yield [flight.directory for flight in flights]
    for flight in flights:
        s.settle(flight)


def test_differences_are_named_and_times_are_none(observed, tmp_path):
    first, second = observed
    assert sticky.difference(first, first) == ""
    assert "rank0: initial." in sticky.difference(first, second)
    assert sticky.difference(first, tmp_path) == "2 ranks reported after other cases, 0 alone"
    assert sticky.difference(tmp_path, tmp_path) == "0 ranks reported after other cases, 0 alone"
