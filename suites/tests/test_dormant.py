"""The table of dormant classes against the faults: what it says cannot be seen changes nothing."""

from __future__ import annotations

import pytest

from suites.cases import Case
from suites.dormant import TABLE, dormant
from suites.evidence import Evidence
from suites.faults import FAULTS, Fault
from suites.observe import RankObservation, bitwise_equal
from suites.reference import ReferenceCache
from suites.verdict import judge

# In these much is dormant; few ranks, so that every fault of a dormant class can be run.
ASLEEP = (
    "handwritten:tie=untied,head=row,tp=1",
    "handwritten:tie=untied,head=vocab,tp=1",
    "handwritten:tie=untied,head=gathered,tp=1",
    "handwritten:head=vocab,frozen=embedding",
    "handwritten:head=row,frozen=embedding,vocab=67",
    "handwritten:head=row,tp=1,dp=2",
)


def whole(case: Case) -> set[int]:
    return {found.bug_class for found in dormant(case) if found.whole}


def named(case: Case) -> set[int]:
    return {found.bug_class for found in dormant(case)}


def may_run(fault: Fault, case: Case) -> bool:
    """A fault patches the modules of one head, and those of classes 4 and 5 alone bear a frozen embedding; with others
    its own code may fail."""
    mine = fault.path == "handwritten" and "hang" not in fault.caught_by
    bears = case.frozen != "embedding" or fault.bug_class in (4, 5)
    return mine and bears and Case.parse(fault.case).head == case.head


JOBS = [
    (case, fault.name)
    for case in ASLEEP
    for fault in FAULTS.values()
    if may_run(fault, Case.parse(case)) and fault.bug_class in whole(Case.parse(case))
]


@pytest.fixture(scope="module")
def observed(run_jobs):
    jobs = [*((case, None) for case in ASLEEP), *JOBS]
    return dict(zip(jobs, run_jobs(jobs), strict=True))


def same(a: RankObservation, b: RankObservation) -> bool:
    """Bit for bit: losses, norms, logits, gradients, weights; and the ties at every event."""
    if a.lifecycle != b.lifecycle or a.census != b.census or len(a.steps) != len(b.steps):
        return False
    for x, y in zip(a.steps, b.steps, strict=True):
        pairs = list(zip(x.logits, y.logits, strict=True))
        for kind in ("gradients", "weights"):
            mine, theirs = getattr(x, kind), getattr(y, kind)
            if set(mine) != set(theirs):
                return False
            pairs += [(mine[name], theirs[name]) for name in mine]
        if (x.loss, x.gradient_norm, x.collectives) != (y.loss, y.gradient_norm, y.collectives):
            return False
        if not all(bitwise_equal(p.data, q.data) for p, q in pairs):
            return False
    return True


@pytest.mark.parametrize(("case", "name"), JOBS)
def test_a_fault_of_a_dormant_class_changes_nothing(case, name, observed):
    """Bit for bit; or, where another loss function runs that is right on one rank, no more than rounding."""
    equal = all(same(a, b) for a, b in zip(observed[case, name], observed[case, None], strict=True))
    if FAULTS[name].bug_class == 15:
        assert not judge(Case.parse(case), observed[case, name]).flagged
    else:
        assert equal


def test_the_cases_put_most_classes_to_sleep():
    assert len({FAULTS[name].bug_class for _, name in JOBS}) >= 20


@pytest.mark.parametrize("fault", FAULTS.values(), ids=lambda f: f.name)
def test_a_class_that_a_fault_shows_is_not_dormant(fault):
    assert fault.bug_class not in whole(Case.parse(fault.case))


def test_most_invisible_cases_are_told_beforehand():
    """By the class of the fault, as a whole or in part; the rest are cases in which one mechanism of many is absent."""
    mine = [f for f in FAULTS.values() if f.path == "handwritten"]
    told = [f.name for f in mine if f.bug_class in named(Case.parse(f.invisible))]
    assert len(told) >= 0.7 * len(mine)


def test_every_row_holds_for_a_case_and_fails_for_another():
    cases = [Case.parse(case) for fault in FAULTS.values() for case in (fault.case, fault.invisible) if case]
    cases += [Case("deepspeed"), Case("deepspeed", zero=1), Case("handwritten", optimizer="sgd", resume="reload")]
    for row in TABLE:
        assert {bool(row.when(case)) for case in cases} == {True, False}, row.reason
        assert row.whole or row.part


def test_a_class_stands_once_as_a_whole_and_parts_are_told_as_such():
    case = Case("handwritten", tp=1)
    found = dormant(case)
    asleep = [entry.bug_class for entry in found if entry.whole]
    assert len(asleep) == len(set(asleep))
    assert not {entry.bug_class for entry in found if not entry.whole} & set(asleep)
    assert all(entry.reason.startswith("in part: ") != entry.whole for entry in found)
    assert {7, 9, 22, 27} <= set(asleep)


def test_nothing_of_the_tied_gradient_sleeps_in_a_tied_model():
    assert not {4, 5, 7} & named(Case("handwritten", head="row"))


def test_evidence_of_a_sleeping_case_is_clean(observed):
    for case in ASLEEP[:2]:
        e = Evidence(Case.parse(case), observed[case, None], ReferenceCache())
        assert all(c.deviation.score <= 1 for c in e.comparisons)
