"""Ladders: families out of outcomes, what changed, and three renderings that escape what they are given."""

from __future__ import annotations

import io
import itertools
import json

import pytest
from rich.console import Console

from reports import ladder
from reports.ladder import Rung, changes, described, families
from reports.load import load

OLD, MIDDLE, NEW = "deepspeed==0.1", "deepspeed==0.2", "deepspeed==0.3"
HOSTILE = "<i>[red]|`x`"


def points(**axes):
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


POINTS = points(tie=("tied", "untied"), head=("row", "vocab"), zero=("0", "2", "3"))


def rung(label, word_of, problem=""):
    names = {",".join(f"{k}={v}" for k, v in point.items()): point for point in POINTS}
    return Rung(
        label,
        problem,
        {} if problem else {name: word_of(point) for name, point in names.items()},
        {} if problem else {name: f"because {HOSTILE}" for name, point in names.items() if word_of(point) != "right"},
        {} if problem else names,
    )


def story():
    """Row heads are wrong, then refused, then right; at ZeRO 3 they crash first."""
    return [
        rung(OLD, lambda p: "right" if p["head"] == "vocab" else "crash" if p["zero"] == "3" else "bug"),
        rung(MIDDLE, lambda p: "refused" if p["head"] == "row" else "right"),
        rung(NEW, lambda p: "right"),
    ]


def test_families_are_told_apart_by_the_fewest_factors():
    found = families(story())
    assert [(f.name, len(f.cases), f.outcomes) for f in found] == [
        ("head=row, but not zero=3", 4, ("bug", "refused", "right")),
        ("head=row, zero=3", 2, ("crash", "refused", "right")),
        ("head=vocab", 6, ("right", "right", "right")),
    ]
    assert [f.changes for f in found] == [True, True, False]


def test_changes_are_told_build_by_build():
    rungs = story()
    told = [(c.family.name, c.builds, c.what) for c in changes(rungs, families(rungs))]
    assert told == [
        ("head=row, but not zero=3", (OLD, MIDDLE), "is refused now, no longer wrong"),
        ("head=row, zero=3", (OLD, MIDDLE), "is refused now, no longer wrong"),
        ("head=row, but not zero=3", (MIDDLE, NEW), "became right"),
        ("head=row, zero=3", (MIDDLE, NEW), "became right"),
    ]


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        ("right", "bug", "got worse"),
        ("right", "refused", "is refused now"),
        ("crash", "bug", "got worse"),
        ("bug", "crash", "is wrong in another way"),
        ("hang", "right", "became right"),
    ],
)
def test_what_a_change_is(before, after, what):
    rungs = [rung(OLD, lambda p: before), rung(NEW, lambda p: after)]
    (change,) = changes(rungs, families(rungs))
    assert (change.what, change.family.name) == (what, "all cases")


def test_a_build_without_results_is_passed_over_and_named():
    rungs = [story()[0], rung(MIDDLE, lambda p: "", "cannot be installed: no such version"), story()[2]]
    found = families(rungs)
    assert {f.outcomes[1] for f in found} == {None}
    assert {c.builds for c in changes(rungs, found)} == {(OLD, NEW)}
    assert "cannot be installed: no such version" in ladder.markdown(rungs)


def test_a_description_is_of_all_members_and_of_no_other():
    odd = [p for p in POINTS if (p["tie"], p["zero"]) in (("tied", "0"), ("untied", "2"))]
    rest = [p for p in POINTS if p not in odd]
    assert set(described(odd, rest).split("; ")) == {"tie=tied, zero=0", "tie=untied, zero=2"}
    scattered = [p for p in POINTS if (p["tie"] == "tied") ^ (p["head"] == "row") ^ (p["zero"] == "2")]
    assert described(scattered, [p for p in POINTS if p not in scattered]).endswith("more")


def test_renderings_escape_what_they_are_given():
    rungs = story()
    text = ladder.markdown(rungs)
    assert HOSTILE not in text
    assert "head=row, but not zero=3" in text
    stream = io.StringIO()
    ladder.print_ladder(rungs, Console(file=stream, width=200, color_system=None))
    shown = stream.getvalue()
    assert "[red]" in shown  # as text: no markup
    assert f"{MIDDLE} → {NEW}: head=row, zero=3: refused → right (2 cases): became right" in shown
    assert "The same everywhere: 6 right" in shown
    told = json.loads(json.dumps(ladder.as_json(rungs)))
    assert [len(family["cases"]) for family in told["families"]] == [4, 2, 6]
    assert told["changes"][0]["from"] == OLD


def test_a_rung_is_read_off_a_run(make_run, record):
    case = "deepspeed:tie=tied,head=row,zero={}"
    refused = "pydantic_core._pydantic_core.ValidationError: 1 error for Config x Extra [type=y] (pydantic/main.py:1)"
    records = [
        record(case.format(0)),
        record(case.format(1), verdict="exact"),
        record(case.format(2), verdict="refused", evidence=refused, findings=(), limit=None, error=None),
        record(case.format(3), verdict="crash", evidence="boom", findings=(), limit=None, error=None),
    ]
    found = ladder.rung(OLD, load(make_run("r", records)).run)
    assert list(found.outcomes.values()) == ["right", "right", "refused", "crash"]
    assert found.reasons[case.format(2)] == "ValidationError: 1 error for Config x Extra"
    assert ladder.rung(OLD, None, "gone").problem == "gone"
