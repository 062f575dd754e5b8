"""What is as expected without being green: told in a block of its own in every rendering, and never hidden."""

from __future__ import annotations

import pytest

from ci.records import Expectation, Finding
from reports import html, markdown
from reports.load import load
from reports.summary import outcome, summarize

HOSTILE = "<b>|`x`"
ISSUE = Expectation(kind="known issue", name="an-issue", why=f"it is wrong {HOSTILE}", link="found here", met=True)
REFUSAL = Expectation(kind="refusal", name="a-refusal", why="not supported", met=True)
A, B, C, D = (f"deepspeed:tie=tied,head=row,zero={zero}" for zero in range(4))
BROKEN = (Finding(oracle="tie", flagged=True, evidence="broken"),)


@pytest.fixture
def known(make_run, record):
    records = [
        record(A, verdict="bug", findings=BROKEN, oracle="tie", limit=None, error=None, expectation=ISSUE),
        record(B, verdict="bug", findings=BROKEN, oracle="tie", limit=None, error=None, expectation=ISSUE),
        record(C, verdict="refused", findings=(), limit=None, error=None, expectation=REFUSAL),
        record(D),
    ]
    return summarize(load(make_run("known", records)))


def test_known_cases_do_not_make_a_run_red_and_are_not_counted_as_green(known):
    assert (known.state, known.exit_code) == ("green", 0)
    assert known.counts == (("known issue", 2), ("refused as expected", 1), ("rounding", 1))
    assert [(k.entry.name, len(k.records)) for k in known.known] == [("an-issue", 2), ("a-refusal", 1)]
    assert [r.case for r in known.green] == [D]
    assert known.groups == ()


def test_every_rendering_has_the_block(known, terminal):
    text = markdown.render(known)
    assert "## 3 cases as known: refused, or known to be wrong" in text
    assert "an-issue" in text
    assert HOSTILE not in text
    page = html.render(known)
    assert "3 cases as known" in page
    assert "<b>|" not in page
    shown = terminal(known.loaded.run.directory)
    assert "known issue an-issue: it is wrong" in shown
    assert "2 cases, first" in shown


def test_an_entry_that_no_longer_holds_is_red_and_names_the_mend(make_run, record):
    note = "known issue an-issue no longer holds in deepspeed==0.20: give its versions an upper bound there"
    told = Expectation(kind="known issue", name="an-issue", why="w", met=False, note=note)
    found = summarize(load(make_run("stale", [record(A, evidence=note, expectation=told), record(B)])))
    assert outcome(found.records[0]) == "no longer as known"
    assert (found.state, found.exit_code) == ("red", 1)
    assert "upper bound" in found.next_step
    assert note in markdown.render(found)


def test_another_failure_of_a_known_case_is_told_as_any_other(make_run, record):
    told = Expectation(kind="known issue", name="an-issue", why="w", met=False, note="not what it foresees")
    crash = record(A, verdict="crash", findings=(), limit=None, error=None, expectation=told, evidence="not what; x")
    found = summarize(load(make_run("other", [crash])))
    assert (outcome(found.records[0]), found.state, found.known) == ("crash", "red", ())
