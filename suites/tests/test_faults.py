"""Faults: each is caught where it must be, and is not there where it says so; together they cover the classes."""

from __future__ import annotations

import functools
import subprocess
import sys

import pytest

from suites import faults
from suites.cases import Case
from suites.faults.table import Table, merged
from suites.observe import Piece, RankObservation, bitwise_equal
from suites.oracles import ORACLES
from suites.reference import ReferenceCache
from suites.verdict import judge

MINE = [fault for fault in faults.FAULTS.values() if fault.path == "handwritten"]
CATCHABLE = [fault for fault in MINE if "hang" not in fault.caught_by]  # ci/tests has those that hang
HARMLESS = [change for change in faults.HARMLESS.values() if change.path == "handwritten"]
CLASSES = range(1, 32)
# What shows a fault must be green without it; so must what hides it.
NULL = list(dict.fromkeys(case for fault in [*MINE, *HARMLESS] for case in (fault.case, fault.invisible) if case))


@pytest.fixture(scope="module")
def observations(run_jobs):
    jobs = [(fault.case, fault.name) for fault in [*CATCHABLE, *HARMLESS]]
    jobs += [(fault.invisible, name) for fault in [*MINE, *HARMLESS] if fault.invisible for name in (None, fault.name)]
    jobs += [(case, None) for case in NULL]
    jobs = list(dict.fromkeys(jobs))
    return dict(zip(jobs, run_jobs(jobs), strict=True))


@pytest.fixture(scope="module")
def cached_judge():
    return functools.partial(judge, cache=ReferenceCache())


@pytest.mark.parametrize("fault", CATCHABLE, ids=lambda f: f.name)
def test_fault_is_caught_by_its_oracles(fault, observations, cached_judge):
    found = cached_judge(Case.parse(fault.case), observations[fault.case, fault.name])
    assert set(fault.caught_by) <= {f.oracle for f in found.findings if f.flagged}, found.evidence
    assert found.verdict.startswith("bug") or found.open, found.evidence  # open: a higher precision is asked
    assert "oracle failed" not in found.evidence


@pytest.mark.parametrize("case", NULL)
def test_the_same_case_without_a_fault_is_green(case, observations, cached_judge):
    found = cached_judge(Case.parse(case), observations[case, None])
    assert found.verdict in ("exact", "rounding"), found.evidence


@pytest.mark.parametrize("change", HARMLESS, ids=lambda f: f.name)
def test_harmless_change_is_no_bug(change, observations, cached_judge):
    found = cached_judge(Case.parse(change.case), observations[change.case, change.name])
    assert not found.verdict.startswith("bug"), found.evidence
    assert {f.oracle for f in found.findings if f.flagged} >= set(change.caught_by)


@pytest.mark.parametrize("fault", [f for f in [*MINE, *HARMLESS] if f.invisible], ids=lambda f: f.name)
def test_fault_is_invisible_bit_for_bit_where_it_says_so(fault, observations):
    clean, broken = observations[fault.invisible, None], observations[fault.invisible, fault.name]
    assert [difference for pair in zip(clean, broken, strict=True) for difference in differences(*pair)] == []


def differences(clean: RankObservation, broken: RankObservation) -> list[str]:
    """What one rank of one run saw and of the other did not: numbers bit by bit, events, census, places."""
    found = [
        name
        for name in ("rank", "tp_rank", "dp_rank", "lifecycle", "census", "zero_stage")
        if getattr(clean, name) != getattr(broken, name)
    ]
    found += [f"initial {name}" for name in unequal(clean.initial, broken.initial)]
    for number, (one, other) in enumerate(zip(clean.steps, broken.steps, strict=True), 1):
        found += [f"step {number} {n}" for n in ("loss", "gradient_norm") if getattr(one, n) != getattr(other, n)]
        for kind in ("gradients", "weights", "masters"):
            found += [f"step {number} {kind} {name}" for name in unequal(getattr(one, kind), getattr(other, kind))]
        logits = (dict(enumerate(one.logits)), dict(enumerate(other.logits)))
        found += [f"step {number} logits {name}" for name in unequal(*logits)]
    return found


def unequal(one: dict[object, Piece], other: dict[object, Piece]) -> list[object]:
    return [n for n in {**one, **other} if n not in one or n not in other or not same(one[n], other[n])]


def same(one: Piece, other: Piece) -> bool:
    return (one.start, one.local_shape) == (other.start, other.local_shape) and bitwise_equal(one.data, other.data)


def test_every_class_has_two_faults():
    classes = [fault.bug_class for fault in MINE]
    assert {n: classes.count(n) for n in CLASSES if classes.count(n) < 2} == {}
    assert set(classes) <= set(CLASSES)
    assert len(MINE) >= 70


def test_every_entry_says_what_a_reader_needs():
    known = {oracle.name for oracle in ORACLES} | {"hang"}
    for name, fault in {**faults.FAULTS, **faults.HARMLESS}.items():
        assert fault.name == name
        assert fault.meaning, name
        assert "\n" not in fault.meaning
        assert fault.needs, name
        assert Case.parse(fault.case).path == fault.path
        assert fault.case != fault.invisible
        assert set(fault.caught_by) <= known
    for fault in MINE:
        assert Case.parse(fault.invisible).path == "handwritten"
        assert fault.caught_by, fault.name
    assert not faults.FAULTS.keys() & faults.HARMLESS.keys()
    assert faults.fault_of("copied_tie").meaning == "the head's weight is a copy after sharding"
    assert faults.fault_of("graded_lookup_1e-01").bug_class == 5
    assert faults.fault_of("reversed_sums").bug_class == 0
    with pytest.raises(KeyError):
        faults.fault_of("gremlin")


def test_every_oracle_has_a_fault_that_it_must_catch():
    caught = {name for fault in [*faults.FAULTS.values(), *HARMLESS] for name in fault.caught_by}
    assert {oracle.name for oracle in ORACLES} <= caught


def test_a_fault_is_gone_after_its_block():
    for fault in MINE:
        replaced = [(owner, attribute) for owner, attribute, _ in fault.replacements()]
        before = [vars(owner).get(attribute) for owner, attribute in replaced]
        with faults.apply(fault.name):
            assert [vars(owner).get(attribute) for owner, attribute in replaced] != before, fault.name
        assert [vars(owner).get(attribute) for owner, attribute in replaced] == before, fault.name


def test_unknown_and_doubled_names_are_refused():
    with pytest.raises(KeyError, match="no_such_fault"), faults.apply("no_such_fault"):
        pass
    table, other = Table("handwritten"), Table("handwritten")

    def twice() -> list[faults.Replacement]:
        """Nothing."""
        return []

    options = {"needs": "x", "case": "handwritten:", "invisible": "handwritten:tp=1", "caught_by": ("tie",)}
    table.fault(1, **options)(twice)
    other.fault(1, **options)(twice)
    with pytest.raises(ValueError, match="two faults are called twice"):
        table.fault(1, **options)(twice)
    with pytest.raises(ValueError, match="two faults are called twice"):
        merged(table, other)


def test_the_table_of_faults_needs_no_framework():
    code = "import sys, suites.faults; sys.exit('deepspeed' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
