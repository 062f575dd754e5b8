"""How a run went: each report says what it is, where its time went, and what was left out and why."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ci import pieces
from ci.pieces import Merge, Piece
from ci.records import SCHEMA, EndRow, FinalRow, Forecast, RecordLog, ResumedRow, RunRow, StartedRow, read_run
from reports import html, markdown
from reports.compare import compare
from reports.course import cut, gaps, lines_of
from reports.load import load
from reports.summary import Summary, outcome, summarize

A, B, C, D = (f"handwritten:tie=tied,head=row,zero={stage}" for stage in range(4))
HOSTILE = "a|b <script>alert(1)</script> [x](y) ``` @team \x1b[31m\n# heading {{ 7*7 }}"
PHASES = {"provisioning": 5.0, "setup": 1.0, "startup": 20.0, "cases": 50.0, "report": 3.0}
USED = {"provisioning": 5.0, "setup": 2.0, "startup": 18.0, "cases": 30.0}
FORECAST = Forecast(expected_seconds=80.0, low=60.0, high=100.0, runs=5, text="smoke takes about 80 s.", plan="smoke")
NOTHING: dict[str, Any] = {
    "verdict": None, "error": None, "limit": None, "headroom": None, "findings": (), "wall_seconds": None,
    "started_at": None, "evidence": "why",
}  # fmt: skip
TABLE = "rank 0:\n    #11 all_reduce over ranks 0, 1: issued   <- first difference\nrank 1: no collective"


def plan(*cases: str, **changes: Any) -> RunRow:
    given = {
        "schema": SCHEMA,
        "run_id": "run",
        "plan": "smoke",
        "cases": cases or (A, B, C, D),
        "target": "torch==2",
        "budget_seconds": 120.0,
        "started_at": "2026-01-01T00:00:00+00:00",
        "tiebench": "0",
        "command": "tiebench run --plan smoke",
        "phases": PHASES,
        "forecast": FORECAST,
    }
    return RunRow(**(given | changes))


def begun(case: str, attempt: int = 1) -> StartedRow:
    return StartedRow(case=case, attempt=attempt, started_at="2026-01-01T00:00:10+00:00")


def end(reason: str = "complete", code: int = 0, **changes: Any) -> EndRow:
    given = {"ended_at": "2026-01-01T00:01:00+00:00", "phases": USED, "seconds": 55.0}
    return EndRow(reason=reason, exit_code=code, **(given | changes))  # type: ignore[arg-type]


@pytest.fixture
def written(tmp_path: Path, record: Callable[..., Any]) -> Callable[..., Path]:
    """written(first, row, …) -> run directory; a case id stands for its rows of a green run."""

    def write(first: RunRow, *rows: Any) -> Path:
        with RecordLog(tmp_path / "run", first) as log:
            for row in rows:
                for one in [begun(row), FinalRow(record=record(row))] if isinstance(row, str) else [row]:
                    log.append(one)
        return tmp_path / "run"

    return write


def everywhere(directory: Path, terminal: Any, page: Any) -> dict[str, str]:
    """The three renderings as plain text, without Markdown's marks; white space does not count."""
    found = {
        "terminal": terminal(directory, 200),
        "markdown": markdown.render(summarize(load(directory))),
        "html": "".join(page(directory).text),
    }
    found["markdown"] = unescape(re.sub(r"[\\`*\u200b]", "", found["markdown"]))
    return {name: " ".join(text.split()) for name, text in found.items()}


def rows_of(summary: Summary) -> dict[str, tuple[str, ...]]:
    assert summary.course.phases is not None
    return {name: tuple(cells) for name, *cells in summary.course.phases.rows}


# What it is


def test_a_run_that_is_going_says_so_first(tmp_path, record, terminal, page) -> None:
    with RecordLog(tmp_path / "run", plan()) as log:
        for row in (begun(A), FinalRow(record=record(A)), begun(B)):
            log.append(row)
        summary = summarize(load(tmp_path / "run"))
        assert (summary.state, summary.exit_code) == ("running", 1)
        assert summary.headline == "RUNNING: 1 of 4 done, 1 open, 2 to come (1 running, 2 pending, 1 rounding)"
        assert summary.next_command == f"tiebench report {tmp_path / 'run'}"
        said = f"This run is still going: 1 of 4 done, 1 open, 2 to come, since 2026-01-01T00:00:00+00:00 ({B})"
        for name, text in everywhere(tmp_path / "run", terminal, page).items():
            assert said in text, name
            assert f"1 case running now; it is {B}" in text, name
            assert "2 cases still to come; first" in text, name
            assert "killed" not in text, name
        first = markdown.render(summary).splitlines()
        assert first[0].startswith("⏳ **RUNNING: 1 of 4 done")
        assert first[2].startswith("This run is still going")


def test_a_bad_result_shows_while_the_run_is_going(tmp_path, record) -> None:
    with RecordLog(tmp_path / "run", plan()) as log:
        for row in (begun(A), FinalRow(record=record(A, verdict="bug", error=50.0, headroom=0.1)), begun(B)):
            log.append(row)
        summary = summarize(load(tmp_path / "run"))
    assert summary.state == "red"
    assert summary.headline.startswith("RED: 1 of 1 case so far not as expected")
    assert summary.headline.endswith(", and the run is still going")


def test_a_killed_run_says_so_first_and_how_to_go_on(written, terminal, page) -> None:
    directory = written(plan(), A, begun(B))
    summary = summarize(load(directory))
    assert summary.headline.startswith("INCOMPLETE: 3 of 4 cases without a result, the run was killed (")
    assert summary.next_command == f"tiebench run --resume {directory}"
    said = "This run was killed: it has no end, and no process here has its log open; 1 of 4 done, 1 lost, 2 not run."
    for name, text in everywhere(directory, terminal, page).items():
        assert said in text, name
        assert f"1 case lost: the run was killed while it ran; it is {B}" in text, name
        assert "2 cases not run: the run was killed first; first" in text, name


def test_a_resumed_run_says_so_first(written, record, terminal, page) -> None:
    directory = written(plan(forecast=None), A, begun(B))
    row = ResumedRow(resumed_at="2026-01-02T00:00:00+00:00", command="", budget_seconds=40.0, tiebench="1")
    with RecordLog.resume(directory, row)[0] as log:
        log.append(begun(B, 2))
        log.append(FinalRow(record=record(B, attempt=2)))
        log.append(end("budget", 1, seconds=30.0))
    summary = summarize(load(directory))
    said = (
        "This run was resumed once: 11.2 s from 2026-01-01T00:00:00+00:00 (killed), "
        "then 30 s from 2026-01-02T00:00:00+00:00 (budget)."
    )
    for name, text in everywhere(directory, terminal, page).items():
        assert said in text, name
    assert summary.course.segments is not None
    assert [row[2:6] for row in summary.course.segments.rows] == [
        ("11.2 s", "2 min 00 s", "killed", "1"),
        ("30 s", "40 s", "budget", "1"),
    ]
    assert summary.budget_line == "41.2 s of 2 min 40 s budget (26%)"
    assert rows_of(summary)["cases"] == ("50 s", "31.2 s", "20%"), "of the killed part, what its records tell"
    assert "its parts were run by 2 versions of tiebench: 0, 1" in summary.notes


def test_many_resumes_are_one_line(written, record) -> None:
    directory = written(plan(), A)
    for day in range(2, 7):
        stamp = f"2026-01-0{day}T00:00:00+00:00"
        row = ResumedRow(resumed_at=stamp, command="", budget_seconds=1.0, tiebench="0")
        RecordLog.resume(directory, row)[0].close()
    summary = summarize(load(directory))
    assert "resumed 5 times: 11.2 s from 2026-01-01" in summary.course.standing
    assert "…, at last" in summary.course.standing
    assert summary.course.segments is not None
    assert len(summary.course.segments.rows) == 6


def test_a_plain_run_says_nothing_of_it(written) -> None:
    summary = summarize(load(written(plan(A), A, end())))
    assert summary.state == "green"
    assert summary.course.standing == ""
    assert summary.course.gaps == ()
    assert summary.course.warnings == ()
    assert "without a result" not in markdown.render(summary)


def test_a_killed_run_with_all_results_is_gone_on_with(written) -> None:
    summary = summarize(load(written(plan(A), A)))
    assert summary.state == "incomplete"
    assert summary.next_command is not None
    assert summary.next_command.startswith("tiebench run --resume ")


@pytest.mark.parametrize("first", [{"schema": 2}, {"schema": 3}])
def test_only_what_can_be_resumed_is_told_to_be(written, first) -> None:
    directory = written(plan(**first), A)
    if first["schema"] == SCHEMA:
        with open(directory / "events.jsonl", "a") as stream:
            stream.write("nonsense\n")
    summary = summarize(load(directory))
    assert summary.next_command == "tiebench run --plan smoke"


def test_comparing_with_a_run_that_is_going(tmp_path, make_run, record) -> None:
    base = make_run("base", [record(A), record(B)])
    with RecordLog(tmp_path / "head", plan(A, B)) as log:
        log.append(begun(A))
        log.append(FinalRow(record=record(A)))
        found = compare(base, tmp_path / "head")
        assert found.exit_code == 1
        assert "the head is still going" in found.markdown
        assert "the base is still going" in compare(tmp_path / "head", base).markdown
    assert "the head was killed" in compare(base, tmp_path / "head").markdown


# Budget


def test_planned_and_used_time_by_phase(written, terminal, page) -> None:
    directory = written(plan(A), A, end())
    summary = summarize(load(directory))
    assert rows_of(summary) == {
        "provisioning": ("5 s", "5 s", "4%"),
        "set-up": ("1 s", "2 s", "2%"),
        "start-up": ("20 s", "18 s", "15%"),
        "cases": ("50 s", "30 s", "25%"),
        "report": ("3 s", "–", "–"),  # noqa: RUF001
        "together": ("79 s", "55 s", "46%"),
    }
    text = markdown.render(summary)
    assert "## Budget\n\n55 s of 2 min 00 s budget (46%).\n\n**Forecast**: smoke takes about 80 s.\n\n| phase |" in text
    assert "| start-up | 20 s | 18 s | 15% |" in text
    assert "start-up 18 s (planned 20 s)" in terminal(directory)
    assert page(directory).has("smoke takes about 80 s.")


def test_an_older_log_has_no_budget_block(make_run, record, terminal, page) -> None:
    directory = make_run("old", [record(A)])
    summary = summarize(load(directory))
    assert summary.course.phases is None
    assert "## Budget" not in markdown.render(summary)
    assert "planned" not in terminal(directory)
    assert "Budget" not in page(directory).text


def test_phases_that_nobody_knows_are_shown_and_change_nothing(written) -> None:
    directory = written(plan(A, phases={HOSTILE: 1e300, "cases": -1.0}), A, end(phases={HOSTILE: 1e300, "x": 1e308}))
    summary = summarize(load(directory))
    assert list(rows_of(summary)) == ["cases", HOSTILE, "x", "together"]
    assert markdown.render(summary)
    assert "<script>alert" not in html.render(summary)


@pytest.mark.parametrize(
    ("forecast", "said"),
    [
        ({"expected_seconds": 200.0}, "expected to take 3 min 20 s, more than its budget of 2 min 00 s: raise"),
        ({"budget_hit_on": "2026-01-11"}, "the budget will be hit about 2026-01-11, 10 days after this run: raise it"),
        ({"budget_hit_on": "2025-12-01"}, "the budget will be hit about 2025-12-01, 0 days after this run"),
        ({"high": 54.0}, "it took 55 s, longer than nine of ten runs should (54 s)"),
        ({"budget_hit_on": "2026-12-01"}, None),
        ({"budget_hit_on": HOSTILE}, None),
        ({}, None),
    ],
    ids=str,
)
def test_warnings(written, terminal, page, forecast, said) -> None:
    row = plan(A, forecast=msgspec.structs.replace(FORECAST, **forecast))
    directory = written(row, A, end())
    warnings = summarize(load(directory)).course.warnings
    if said is None:
        assert warnings == ()
        return
    assert len(warnings) == 1
    assert said in warnings[0]
    for name, text in everywhere(directory, terminal, page).items():
        assert said in text, name


def test_a_budget_that_is_nearly_used_up_is_a_warning(written) -> None:
    summary = summarize(load(written(plan(A, budget_seconds=60.0, forecast=None), A, end())))
    assert summary.course.warnings == ("92% of the budget was used: a little more, and cases are left out",)
    assert summary.exit_code == 0


# Gaps


def test_gaps_by_reason(written, record, terminal, page) -> None:
    def row(case: str, status: str, reason: str | None, why: str = "") -> FinalRow:
        return FinalRow(record=record(case, **NOTHING | {"status": status, "reason": reason, "why": why}))

    cases = [f"handwritten:seed={number}" for number in range(9)]
    directory = written(
        plan(*cases),
        cases[0],
        row(cases[1], "not_run", "budget", why="repeats pairs"),
        row(cases[2], "not_run", "budget"),
        row(cases[3], "not_run", "interrupted"),
        row(cases[4], "not_run", "error"),
        row(cases[5], "not_run", None),
        begun(cases[6]),
        row(cases[6], "lost", "interrupted"),
        begun(cases[7]),
        row(cases[7], "lost", "given up"),
        end("interrupted", 130),
    )
    lines = (
        "1 case given up: the whole run was killed too often while it ran; it is handwritten:seed=7",
        "1 case lost: the run was interrupted while it ran; it is handwritten:seed=6",
        "2 cases left out by the budget; first handwritten:seed=1",
        "2 cases not run: the run was interrupted first; first handwritten:seed=3",
        "1 case not run: the run stopped on an error first; it is handwritten:seed=4",
        "1 case not run, and no reason was recorded; it is handwritten:seed=5",
    )
    assert tuple(gap.line for gap in summarize(load(directory)).course.gaps) == lines
    for name, text in everywhere(directory, terminal, page).items():
        for line in lines:
            assert line in text, name
    text = markdown.render(summarize(load(directory)))
    assert "## 8 cases without a result" in text
    assert "first `handwritten:seed=1`: why (its place in the order: repeats pairs)" in text


def test_every_case_without_a_result_is_in_one_gap(record) -> None:
    """Whatever status and reason there are."""
    reasons = ("budget", "interrupted", "error", "killed", "given up", "running", "pending", None)
    every = [
        record(f"handwritten:seed={10 * i + j}", **NOTHING | {"status": status, "reason": reason})
        for i, status in enumerate(("lost", "not_run"))
        for j, reason in enumerate(reasons)
    ]
    found = [r.case for gap in gaps([*every, record(A)]) for r in gap.records]
    assert sorted(found) == sorted(r.case for r in every)
    assert {outcome(r) for r in every} == {"lost", "not run", "running", "pending"}


# Hangs


def test_a_hang_shows_sentence_collectives_and_stacks(written, record, terminal, page) -> None:
    evidence = "no result within 60 s; rank 1 never issued all_reduce #11; rank 0 is in 'step 2'"
    told = NOTHING | {"status": "timeout", "verdict": "hang", "evidence": evidence, "why": "timed out last time"}
    hang = record(A, **told, collectives=TABLE, stacks="rank 0:\nThread 1\n    all_reduce")
    directory = written(plan(A), begun(A), FinalRow(record=hang), end(code=1))
    text = markdown.render(summarize(load(directory)))
    folded = "<details><summary>Last collectives of each rank</summary>\n\n```\n" + TABLE + "\n```\n\n</details>"
    assert folded in text
    assert text.index("rank 1 never issued") < text.index(folded) < text.index("Stacks of the ranks")
    shown = page(directory)
    at = [name for name, _ in shown.tags]
    assert at.count("details") >= 2
    assert TABLE in shown.text, "line by line, as it is"
    for name, said in everywhere(directory, terminal, page).items():
        assert "rank 1 never issued all_reduce #11" in said, name
        assert "<- first difference" in said, name
        assert ("its place in the order: timed out last time" in said) == (name != "terminal"), name


def test_hostile_collectives(written, record, terminal, page) -> None:
    told = NOTHING | {"status": "timeout", "verdict": "hang", "why": HOSTILE, "evidence": HOSTILE}
    hang = record(A, **told, collectives=f"{HOSTILE}\n" + " " * 300 + "x", stacks=HOSTILE)
    row = plan(A, phases={HOSTILE: 1.0}, forecast=msgspec.structs.replace(FORECAST, text=HOSTILE), tiebench=HOSTILE)
    directory = written(row, begun(A), FinalRow(record=hang), begun(A, 2))
    again = ResumedRow(resumed_at=HOSTILE, command=HOSTILE, budget_seconds=1.0, tiebench=HOSTILE)
    RecordLog.resume(directory, again)[0].close()
    printed = terminal(directory, 80)
    assert "\x1b" not in printed
    text = markdown.render(summarize(load(directory)))
    prose = re.sub(r"^(`{3,})[a-z]*\n.*?\n\1$", "", text, flags=re.S | re.M)
    prose = re.sub(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", "", prose)
    assert "<script" not in prose
    assert "@team" not in prose
    assert not re.search(r"^# heading", prose, re.M)
    shown = page(directory)
    assert [tag for tag, _ in shown.tags].count("script") == 1
    assert not any("\x1b" in part for part in shown.text)


def test_a_long_table_is_cut_at_a_line() -> None:
    text = "\n".join(f"line {number}" for number in range(1000))
    short = cut(text, 100)
    assert short.splitlines()[-2].startswith("line ")
    assert re.fullmatch(r"… \d+ more characters, in the record log", short.splitlines()[-1])
    assert text.startswith("\n".join(short.splitlines()[:-1]))
    assert cut("x" * 50, 10).startswith("x" * 10)
    assert cut(text, len(text)) == text
    assert list(lines_of(text, 2)) == ["line 0", "line 1", "… 998 more lines, in report.md"]
    assert list(lines_of("", 2)) == []


# Merged runs


def test_a_merged_run_says_of_what(written, terminal, page) -> None:
    directory = written(plan(A), A, end(seconds=70.0))
    piece = {
        "plan": "smoke",
        "started_at": "2026-01-01",
        "ended": "complete",
        "tiebench": "0",
        "cases": 1,
        "results": 1,
    }
    found = tuple(
        Piece(name=f"runs/{n}", group=f"shard {n}/2", seconds=35.0 * n, budget_seconds=120.0, **piece)  # type: ignore[arg-type]
        for n in (1, 2)
    )
    pieces.write(directory, Merge(pieces=found, notes=(f"something to know {HOSTILE}",)))
    summary = summarize(load(directory))
    said = "This run is merged from 2 runs, 2 at the same time: 70.0 s in the longest (shard 2/2), 105.0 s in all"
    for name, text in everywhere(directory, terminal, page).items():
        assert said in text, name
        assert "something to know" in text, name
    assert rows_of(summary)["together"][2] == "23%", "of the budgets of all shards"
    assert summary.budget_line == "70 s of 2 min 00 s budget (58%)", "the longest shard, of the budget of one"
    assert read_run(directory).end is not None
