"""The tables of refusals and known issues: they are sound, and say what they should of results and builds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ci import plans
from suites import expectations
from suites.cases import Case, CaseError
from suites.expectations import Entry, concerning, entries, problems
from suites.matrix import cells

EVERY = tuple(dict.fromkeys(case for plan in plans.PLANS.values() for case in plan.cases))
ENTRY = Entry(
    name="an-issue",
    path="deepspeed",
    versions=">=0.19,<0.20",
    cases={"head": "row", "zero": (2, 3)},
    when=lambda case: case.tp > 1,
    verdicts=("bug",),
    oracles=("tie",),
    message="of rank [01]",
    why="it is wrong",
    link="",
    since="2026-12-01",
    minimal="deepspeed:head=row,zero=2",
    observed="a",
    right="b",
    reasoning="c",
)


def test_the_tables_are_sound_and_every_entry_is_in_a_plan():
    assert problems(EVERY) == []


@pytest.mark.parametrize(
    "version", ["0.17.6", "0.18.9", "0.19.6", "0.19.8", "0.20.0.dev1", "0.19.8+1a2b3c.dirty", "no"]
)
def test_every_case_of_every_plan_can_be_asked(version):
    for case in EVERY:
        found = concerning(case, version)
        assert not found or version != "no"


def test_an_entry_is_about_cases_and_builds():
    assert ENTRY.concerns(Case.parse("deepspeed:head=row,zero=3,dp=2"))
    for other in (
        "deepspeed:head=row",
        "deepspeed:zero=2",
        "handwritten:head=row,zero=2",
        "deepspeed:head=row,zero=2,tp=1",
    ):
        assert not ENTRY.concerns(Case.parse(other))
    assert [v for v in ("0.18.9", "0.19.0", "0.19.8+local", "0.20.0", "") if ENTRY.holds_for(v)] == [
        "0.19.0",
        "0.19.8+local",
    ]


@pytest.mark.parametrize(
    ("verdict", "oracles", "evidence", "foreseen"),
    [
        ("bug", ["tie"], "tensors of rank 1", True),
        ("bug", ["tie", "gradient"], "tensors of rank 0", True),
        ("bug", ["gradient"], "tensors of rank 1", False),
        ("bug", ["tie"], "tensors of rank 2", False),
        ("crash", ["tie"], "tensors of rank 1", False),
        (None, ["tie"], "tensors of rank 1", False),
    ],
)
def test_what_an_entry_foresees(verdict, oracles, evidence, foreseen):
    assert ENTRY.foresees(verdict, oracles, evidence) == foreseen


def test_a_refusal_that_comes_too_late_is_none_that_a_refusal_foresees():
    refusal = replace(ENTRY, kind="refusal", verdicts=("refused",), oracles=(), message="not supported")
    assert refusal.foresees("refused", [], "NotImplementedError: not supported")
    assert not refusal.foresees("refused", ["refusal"], "NotImplementedError: not supported")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cases": {"head": "row", "zero": 1}, "minimal": "deepspeed:head=row,zero=1"}, "matches no case of any plan"),
        ({"minimal": "deepspeed:head=vocab"}, "is not about its own minimal case"),
        ({"cases": {"colour": "red"}}, "no such factor: colour"),
        ({"verdicts": ("rounding",)}, "expects a green verdict"),
        ({"reasoning": ""}, "says not what was observed"),
        ({"name": "fp16-on-cpu"}, "the name stands twice"),
    ],
)
def test_an_entry_that_cannot_be_right_is_a_problem(monkeypatch, changes, said):
    both = (*entries(), replace(ENTRY, **changes))
    monkeypatch.setattr(expectations, "entries", lambda: both)
    planned = [case for case in EVERY if not (case.head == "row" and case.zero == 1)]
    assert any(said in line for line in problems(planned)), problems(planned)


def test_every_combination_comes_to_one_thing_with_a_reason():
    found = list(cells("deepspeed", ["tie", "head", "embedding_option", "register"], "0.19.8"))
    assert len(found) == 2 * 4 * 4 * 2
    assert {cell.state for cell in found} == {"runs", "refused", "known issue", "no sense"}
    for cell in found:
        assert bool(cell.why) == (cell.state != "runs")
        assert bool(cell.case) == (cell.state != "no sense")
        assert bool(cell.entry) == (cell.state in ("refused", "known issue"))
    old = {cell.state for cell in cells("deepspeed", ["tie"], "0.19.5", {"head": "row"})}
    assert old == {"known issue"}


@pytest.mark.parametrize(
    ("names", "base", "said"),
    [(["nose"], {}, "unknown factor"), (["tie", "tie"], {}, "given twice"), (["tie"], {"tie": "tied"}, "given twice")],
)
def test_factors_that_cannot_be_combined_are_refused(names, base, said):
    with pytest.raises(CaseError, match=said):
        list(cells("deepspeed", names, "0.19.8", base))
