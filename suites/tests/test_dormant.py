"""The table of dormant classes against the faults: a class that a fault shows in a case is not dormant there."""

from __future__ import annotations

import pytest

from suites.cases import Case
from suites.dormant import TABLE, dormant
from suites.faults import FAULTS


def classes(case: str) -> set[int]:
    return {found.bug_class for found in dormant(Case.parse(case))}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=lambda f: f.name)
def test_a_class_that_a_fault_shows_is_not_dormant(fault):
    assert fault.bug_class not in classes(fault.case)


def test_the_table_says_something_of_invisible_cases():
    """Of the faults that cannot be seen in their `invisible` case, most are told by the table beforehand."""
    told = [f.name for f in FAULTS.values() if f.invisible and f.bug_class in classes(f.invisible)]
    assert len(told) >= len(FAULTS) / 3


def test_every_row_holds_for_a_case_and_fails_for_another():
    cases = [Case.parse(case) for fault in FAULTS.values() for case in (fault.case, fault.invisible) if case]
    cases.append(Case("deepspeed"))
    for row in TABLE:
        held = {row.holds(case) for case in cases}
        assert held == {True, False}, row.reason


def test_one_rank_alone_shows_no_reduction():
    assert {7, 9, 22, 27} <= classes("handwritten:tp=1")
    assert not {4, 5, 7} & classes("handwritten:head=row")
