"""Covering arrays: what is kept meets all that can meet, and is what the search finds."""

from __future__ import annotations

import itertools

import pytest

from suites import covering
from suites.cases import RULES, Case, Rule
from suites.covering import AXES, Axes


@pytest.mark.parametrize("name", AXES)
def test_everything_that_can_meet_meets(name):
    kept = (covering.PLACE / f"{name}.txt").read_text().splitlines()
    found = covering.cases(name)
    assert [case.id for case in found] == kept, "the table of factors has changed: python -m suites.covering"
    assert covering.uncovered(AXES[name], found) == []


def test_a_case_too_few_is_seen():
    found = covering.cases("deepspeed")
    missing = covering.uncovered(AXES["deepspeed"], found[1:])
    assert missing
    assert all(all(getattr(found[0], name) == value for name, value in point.items()) for point in missing)


@pytest.mark.parametrize("name", AXES)
def test_the_search_finds_what_is_kept(name):
    pytest.importorskip("covertable")
    assert tuple(covering.search(AXES[name])) == covering.cases(name)


def test_triples_of_some_and_pairs_of_all():
    pytest.importorskip("covertable")
    values = {"tie": ("tied", "untied"), "head": ("vocab", "row"), "zero": (0, 2), "clip": (0.0, 0.5)}
    axes = Axes("handwritten", values, triples=("tie", "head", "zero"))
    found = covering.search(axes)
    assert len({(c.tie, c.head, c.zero) for c in found}) == 8
    for name, other in itertools.combinations(values, 2):
        assert len({(getattr(c, name), getattr(c, other)) for c in found}) == 4


def test_rules_keep_cases_out():
    pytest.importorskip("covertable")
    apart = (Rule(lambda c: c.head == "row" and c.zero == 2, "fails by itself"),)
    axes = Axes("handwritten", {"head": ("vocab", "row"), "zero": (0, 2, 3), "tp": (1, 2)}, apart=apart)
    found = covering.search(axes)
    assert ("row", 2) not in {(c.head, c.zero) for c in found}
    assert {c.zero for c in found} == {0, 2}  # the path has no 3
    assert covering.uncovered(axes, found) == []


def test_what_a_rule_reads_is_read_off_its_code():
    assert covering.reads(Rule(lambda c: not c.tied and c.world_size > 2, "")) == {"tie", "tp", "dp"}
    names = {name for rule in RULES for name in covering.reads(rule)}
    assert {"tie", "tie_when", "vocab", "logit_scale", "embedding_spec"} <= names
    assert all(covering.reads(rule) for rule in RULES)


def test_a_pair_that_needs_other_factors_is_completed():
    axes = AXES["deepspeed"]
    assert {"ignored": "rank", "tp": 2} not in covering.uncovered(axes, covering.cases("deepspeed"))
    case = covering._completed(axes, {"ignored": "rank", "tp": 4})
    assert isinstance(case, Case)
    assert case.dp == 2
    assert covering._completed(axes, {"tie": "tied", "frozen": "head"}) is None
