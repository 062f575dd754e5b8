"""Merging: every planned case gets a record, earlier attempts stay visible, and nothing wrong with a piece is green."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from ci import merge, pieces, plans, records, schedule
from ci.merge import Label, merge_runs
from ci.records import (
    ENVIRONMENT,
    EVENTS,
    EndRow,
    FinalRow,
    LogError,
    Record,
    RecordLog,
    ResumedRow,
    RunRow,
    StartedRow,
    read_run,
)
from reports import html, markdown
from reports.load import load
from reports.records import flat
from reports.summary import summarize

STAMP = "2026-01-01T00:00:00+00:00"
A, B, C = ("handwritten:seed=1", "deepspeed:seed=2", "handwritten:seed=3")
PLAN = RunRow(
    schema=records.SCHEMA,
    run_id="whole",
    plan="test",
    cases=(A, B, C),
    target="planned",
    budget_seconds=60.0,
    started_at=STAMP,
    tiebench="0",
    command="",
)


def record(case: str, verdict: str = "exact", **changes: object) -> Record:
    path = case.partition(":")[0]
    target = {"handwritten": "torch==2", "deepspeed": "deepspeed==1"}[path]
    given = {
        "case": case,
        "path": path,
        "target": target,
        "status": "finished",
        "verdict": verdict,
        "started_at": STAMP,
        "environment": "e1",
    }
    return Record(**(given | changes))  # type: ignore[arg-type]


@pytest.fixture
def piece(tmp_path: Path) -> Callable[..., Path]:
    """piece(planned, records, …) -> run directory of one shard's attempt."""
    count = 0

    def make(
        cases: Sequence[str],
        rows: Sequence[Record] = (),
        *,
        started: Sequence[str] = (),
        end: str | None = "complete",
        options: str = "",
        tail: bytes = b"",
        environment: dict[str, object] | None = None,
        phases: dict[str, float] | None = None,
        **of_run: object,
    ) -> Path:
        nonlocal count
        count += 1
        directory = tmp_path / "shard" / f"attempt-{count}"
        first = msgspec.structs.replace(
            PLAN,
            run_id=f"piece{count}",
            cases=tuple(cases),
            target=f"of piece {count}",
            options=options,
            **of_run,
        )
        with RecordLog(directory, first) as log:
            for row in rows:
                log.append(StartedRow(case=row.case, attempt=row.attempt, started_at=STAMP))
                log.append(FinalRow(record=row))
            for case in started:
                log.append(StartedRow(case=case, attempt=1, started_at=STAMP))
            if end:
                ended = f"2026-01-01T00:0{count}:00+00:00"
                log.append(EndRow(ended_at=ended, reason=end, exit_code=0, phases=phases or {}))  # type: ignore[arg-type]
        with (directory / EVENTS).open("ab") as stream:
            stream.write(tail)
        if environment:
            (directory / ENVIRONMENT).write_text(json.dumps(environment))
        return directory

    return make


@pytest.fixture
def merged(tmp_path: Path) -> Callable[..., tuple[merge.Merged, records.Run]]:
    def go(*pieces: Path, **options: object) -> tuple[merge.Merged, records.Run]:
        done = merge_runs(pieces, PLAN, tmp_path / "out", **options)  # type: ignore[arg-type]
        return done, read_run(done.directory)

    return go


def outcomes(run: records.Run) -> dict[str, tuple[str, str | None, int]]:
    return {r.case: (r.status, r.verdict, r.attempt) for r in run.records}


def test_whole_shards_make_a_green_run(piece, merged):
    done, run = merged(piece([A, C], [record(A), record(C)]), piece([B], [record(B)]))
    assert (done.exit_code, run.end.reason, run.end.exit_code, run.end.message) == (0, "complete", 0, "")
    assert list(outcomes(run)) == [A, B, C], "the plan's order"
    assert run.plan.target == "deepspeed==1", (
        "the framework under test, also when the first shard has none of its cases"
    )
    assert run.plan.run_id == "whole"
    assert run.end.ended_at == "2026-01-01T00:02:00+00:00"
    assert not run.damage


def test_a_killed_shard_shows_what_was_lost_and_not_run(piece, merged):
    done, run = merged(piece([A, B, C], [record(A)], started=[B], end=None, tail=b'{"event":"fin'))
    assert [r.status for r in run.records] == ["finished", "lost", "not_run"]
    assert (done.exit_code, run.end.reason, run.end.message) == (1, "error", "killed: shard/attempt-1")


def test_a_later_attempt_counts_and_the_lost_one_stays_visible(piece, merged):
    first = piece([A, B, C], [record(A)], started=[B], end=None)
    done, run = merged(first, piece([C, B], [record(C), record(B, "rounding")]))
    assert done.exit_code == 0
    assert outcomes(run)[B] == ("finished", "rounding", 2)
    assert outcomes(run)[A] == ("finished", "exact", 1)
    text = (done.directory / EVENTS).read_text()
    assert text.count('"status":"lost"') == 1


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_two_results_the_bad_one_counts(piece, merged, order):
    both = [piece([A, B, C], [record(A), record(B), record(C)]), piece([A], [record(A, "bug")])]
    done, run = merged(*(both[i] for i in order))
    assert outcomes(run)[A][:2] == ("finished", "bug")
    assert done.exit_code == 1
    assert f"{A}: attempts disagree" in run.end.message


def test_no_piece_at_all_is_all_not_run(merged):
    done, run = merged(problems=["shard-1-of-1 left nothing"])
    assert [r.status for r in run.records] == ["not_run"] * 3
    assert "no piece of this run left a row" in run.records[0].evidence
    gone = f"3 of 3 planned cases are in no piece: {A}; {B}; {C}"
    assert (done.exit_code, run.end.message) == (1, f"shard-1-of-1 left nothing; {gone}")
    assert run.plan.target == "planned"


def test_an_empty_plan_is_not_green(tmp_path):
    done = merge_runs([], msgspec.structs.replace(PLAN, cases=()), tmp_path / "out")
    assert done.exit_code == 1


@pytest.mark.parametrize(
    ("spoil", "said", "status"),
    [
        (lambda d: (d / EVENTS).write_text("not a run\n"), "cannot be read", "not_run"),
        (lambda d: (d / EVENTS).unlink(), "cannot be read", "not_run"),
        (lambda d: (d / EVENTS).open("ab").write(b'{"event":"new"}\n'), "damaged, not counted", "finished"),
    ],
)
def test_a_spoiled_piece_is_named_and_not_green(piece, merged, spoil, said, status):
    bad = piece([A], [record(A)])
    spoil(bad)
    done, run = merged(bad, piece([B, C], [record(B), record(C)]))
    assert done.exit_code == 1
    assert said in run.end.message
    assert outcomes(run)[A][0] == status


def test_a_piece_of_another_run_is_left_out(piece, merged):
    other = piece([A], [record(A)], options="--fault x")
    done, run = merged(other, piece([B, C], [record(B), record(C)]))
    assert outcomes(run)[A][0] == "not_run"
    assert "ran with '--fault x', not ''" in run.end.message
    assert done.exit_code == 1


def test_two_builds_in_one_run_and_cases_beyond_the_plan_are_not_green(piece, merged):
    done, run = merged(
        piece([A, B], [record(A), record(B)]), piece([C], [record(C, target="torch==3"), record("handwritten:seed=9")])
    )
    assert "path handwritten was run with 2 builds: torch==2, torch==3" in run.end.message
    assert "handwritten:seed=9 was run and is not in the plan" in run.end.message
    assert done.exit_code == 1
    assert len(run.records) == 4


def test_a_budget_that_was_too_short_is_said(piece, merged):
    skipped = record(C, verdict=None, status="not_run", started_at=None)
    _, run = merged(piece([A, B, C], [record(A), record(B), skipped], end="budget"))
    assert (run.end.reason, run.end.exit_code) == ("budget", 1)
    assert outcomes(run)[C][0] == "not_run"


def test_other_environments_are_named(piece, merged):
    done, _ = merged(
        piece([A, B], [record(A), record(B)], environment={"packages": {"numpy": "1"}}),
        piece([C], [record(C, environment="e2")], environment={"packages": {"numpy": "2"}}),
    )
    assert done.exit_code == 0, "where the numbers come from is no fault of theirs"
    (note,) = done.notes
    assert note.startswith("1 cases ran in another environment (packages.numpy:")
    written = json.loads((done.directory / ENVIRONMENT).read_text())
    assert written["packages"] == {"numpy": "1"}
    assert written["other_environments"] == [note]


def test_results_of_the_attempts_so_far(piece, tmp_path):
    first = piece([A, B, C], [record(A)], started=[B], end=None)
    assert merge.results([first, tmp_path / "nothing"]) == ({A}, {B})
    assert merge.results([first, piece([B], [record(B, "bug")])]) == ({A, B}, set())


def test_an_output_that_is_taken_is_refused(piece, tmp_path):
    with pytest.raises(LogError, match="already holds a run"):
        merge_runs([], PLAN, piece([A]))
    assert not (tmp_path / "out").exists()


def test_the_command_merges_shards_of_a_plan(piece, tmp_path, capsys):
    cases = [case.id for case in schedule.order(plans.SMOKE.cases)]
    out = str(tmp_path / "whole")
    shards = [str(piece(cases[i::2], [record(c) for c in cases[i::2]])) for i in (0, 1)]
    assert merge.main(["--plan", "smoke", "--out", out, shards[0], shards[1]]) == 0
    assert (tmp_path / "whole" / "report.md").exists()
    assert merge.main(["--plan", "smoke", "--out", str(tmp_path / "half"), shards[0]]) == 1
    assert "INCOMPLETE" in capsys.readouterr().out
    for wrong in (["--plan", "weekly"], ["--plan", "smoke", str(tmp_path / "none")]):
        assert merge.main(["--out", str(tmp_path / "x"), *wrong, *([] if len(wrong) > 2 else shards)]) == 2
        assert capsys.readouterr().err.count("\n") == 1


# Gaps and duplicates


def said(done: merge.Merged, words: str) -> str:
    """The one note with these words."""
    (line,) = [note for note in done.notes if words in note]
    return line


def test_a_missing_shard_is_named(piece, merged):
    one = piece([A], [record(A)], plan="test-1of3 (1 of its 3 cases)")
    three = piece([C], [record(C)], plan="test-3of3 (1 of its 3 cases)")
    done, run = merged(one, three)
    assert said(done, "no piece of it") == "shard-2-of-3: no piece of it was given"
    assert said(done, "in no piece") == f"1 of 3 planned cases are in no piece: {B}"
    assert (done.exit_code, run.end.reason) == (1, "error")
    assert outcomes(run)[B][0] == "not_run"


def test_a_missing_shard_is_named_without_a_plan_too(piece, tmp_path):
    """Then nothing else would tell: the planned cases are those of the pieces."""
    one = piece([A], [record(A)], plan="test-1of2 (1 of its 3 cases)")
    plan = merge.planned(None, [one], tmp_path / "out")
    assert plan.cases == (A,)
    done = merge_runs([one], plan, tmp_path / "out", whole=False)
    assert said(done, "no piece of it") == "shard-2-of-2: no piece of it was given"
    assert done.exit_code == 1


def test_shards_beyond_the_cases_are_not_missed(piece, merged):
    done, _ = merged(*(piece([case], [record(case)], plan=f"test-{i}of9") for i, case in enumerate((A, B, C), 1)))
    assert (done.exit_code, done.notes) == (0, ())


def test_a_shard_that_the_caller_names_is_named_once(piece, merged):
    done, _ = merged(piece([A], [record(A)], plan="test-shard-1-of-3"), problems=["shard-2-of-3 left nothing"])
    assert said(done, "no piece of it") == "shard-3-of-3: no piece of it was given"
    assert said(done, "shard-2") == "shard-2-of-3 left nothing"


def test_shards_of_two_sorts_are_named(piece, merged):
    done, _ = merged(piece([A, B], [record(A), record(B)], plan="test-1of2"), piece([C], [record(C)], plan="test-2of3"))
    assert said(done, "the pieces are") == "the pieces are shards of 2 and of 3"
    assert done.exit_code == 1


def test_a_case_in_two_pieces_is_named(piece, merged):
    done, run = merged(piece([A, B], [record(A), record(B)]), piece([B, C], [record(B), record(C)]))
    assert done.notes == (
        f"1 case has a result in more than one piece, the worst counts; {B} (shard/attempt-1; shard/attempt-2)",
    )
    assert done.exit_code == 0, "they agree"
    assert outcomes(run)[B] == ("finished", "exact", 2)


def test_one_run_given_twice_counts_once(piece, merged, tmp_path):
    """Also as a copy that was made while it was going."""
    whole = piece([A, B, C], [record(A), record(B), record(C)])
    shutil.copytree(whole, tmp_path / "shard" / "copy")
    log = tmp_path / "shard" / "copy" / EVENTS
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:-3]))
    for directories in ((whole, whole, tmp_path / "shard" / "copy"), (tmp_path / "shard" / "copy", whole)):
        done, run = merged(*directories)
        assert (done.exit_code, len(outcomes(run))) == (0, 3)
        assert {attempt for _, _, attempt in outcomes(run).values()} == {1}
        assert "one and the same run" in done.notes[0]
        shutil.rmtree(done.directory)


def test_two_versions_of_tiebench_are_named(piece, merged):
    done, run = merged(piece([A, B], [record(A), record(B)]), piece([C], [record(C)], tiebench="1"))
    assert (done.exit_code, run.end.message) == (0, "")
    assert done.notes == ("the pieces were run by 2 versions of tiebench: 0 (shard/attempt-1); 1 (shard/attempt-2)",)
    assert done.notes[0] in summarize(load(done.directory)).notes


def test_another_plan_is_named_and_its_results_are_as_good(piece, merged):
    done, _ = merged(piece([A, B], [record(A), record(B)]), piece([C], [record(C)], plan="custom"))
    assert done.notes == ("shard/attempt-2: plan 'custom', not 'test'",)
    assert done.exit_code == 0


def test_a_piece_that_is_still_going(tmp_path, piece, merged):
    log = RecordLog(tmp_path / "shard" / "going", msgspec.structs.replace(PLAN, cases=(A, B), run_id="going"))
    with log:
        log.append(StartedRow(case=A, attempt=1, started_at=STAMP))
        done, run = merged(tmp_path / "shard" / "going", piece([C], [record(C)]))
    assert [(r.status, r.reason) for r in run.records] == [
        ("not_run", "running"),
        ("not_run", "pending"),
        ("finished", None),
    ]
    assert (done.exit_code, run.end.message) == (1, "still going: shard/going")
    summary = summarize(load(done.directory))
    assert summary.state == "incomplete"
    assert "still going: shard/going" in summary.headline
    assert summary.next_step == "wait for the pieces that are still going, then merge them once more"


def test_a_resumed_piece_keeps_its_attempts_and_its_time(tmp_path, piece, merged):
    first = piece([A, B, C], [record(A)], started=[B], end=None)
    row = ResumedRow(resumed_at="2026-01-01T01:00:00+00:00", command="", budget_seconds=30.0, tiebench="0")
    with RecordLog.resume(first, row)[0] as log:
        for case, attempt in ((B, 2), (C, 1)):
            log.append(StartedRow(case=case, attempt=attempt, started_at="2026-01-01T01:00:01+00:00"))
            log.append(FinalRow(record=record(case, attempt=attempt, started_at="2026-01-01T01:00:01+00:00")))
        log.append(EndRow(ended_at="2026-01-01T01:00:10+00:00", reason="complete", exit_code=0, seconds=10.0))
    done, run = merged(first)
    assert (done.exit_code, outcomes(run)[B]) == (0, ("finished", "exact", 2))
    (found,) = pieces.read(done.directory).pieces
    assert (found.segments, found.ended, found.budget_seconds, found.results) == (2, "complete", 90.0, 3)


def test_time_is_that_of_all_and_of_the_longest_shard(piece, merged):
    """Attempts at one shard come one after the other, shards at the same time."""
    used = {"startup": 5.0, "cases": 15.0}
    done, run = merged(
        piece([A, B], [record(A)], end="budget", plan="test-1of2", phases=used),  # 1 minute
        piece([B], [record(B)], plan="test-1of2", phases=used),  # 2 minutes
        piece([C], [record(C)], plan="test-2of2", phases={"cases": 100.0}),  # 3 minutes
    )
    assert run.end.phases == {"startup": 10.0, "cases": 130.0}
    assert run.end.seconds == 180.0
    merge_of = pieces.read(done.directory)
    assert merge_of.groups == {"shard 1/2": 180.0, "shard 2/2": 180.0}
    assert merge_of.text.startswith("3 runs, 2 at the same time: 180.0 s in the longest (shard 1/2), 360.0 s in all")


def test_planned_of_the_pieces(piece, tmp_path):
    first = piece([A], plan="smoke-1of2 (1 of its 48 cases)", budget_seconds=10.0, phases={"cases": 1.0})
    again = piece([A], plan="smoke-1of2 (1 of its 48 cases)", budget_seconds=10.0)
    other = piece(
        [B], plan="smoke-2of2 (1 of its 48 cases)", budget_seconds=15.0, started_at="2025-12-31T00:00:00+00:00"
    )
    plan = merge.planned(None, [first, again, other, tmp_path / "none"], tmp_path / "out")
    assert (plan.plan, plan.cases) == ("smoke (2 of its 48 cases)", (A, B))
    assert (plan.budget_seconds, plan.started_at[:4]) == (20.0, "2025")
    assert (plan.forecast, plan.pid) == (None, 0)


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("smoke", Label("smoke")),
        ("smoke (13 of its 48 cases)", Label("smoke")),
        ("smoke-1of4", Label("smoke", 1, 4)),
        ("smoke-2of4 (3 of its 48 cases)", Label("smoke", 2, 4)),
        ("nightly-shard-3-of-16", Label("nightly", 3, 16)),
        ("my-2of", Label("my-2of")),
    ],
)
def test_a_plan_s_name_says_the_shard(name, label):
    assert Label.of(msgspec.structs.replace(PLAN, plan=name)) == label


def test_several_faults_of_one_case_all_stay(piece, merged):
    faulty = [record(A, "bug", fault=name, attempt=number) for number, name in enumerate(("x", "y"), 1)]
    _, run = merged(piece([A], faulty), piece([B, C], [record(B), record(C)]))
    assert [(r.case, r.fault) for r in run.records] == [(A, "x"), (A, "y"), (B, None), (C, None)]
    assert not run.damage


def test_every_report_reads_a_merged_run(piece, merged):
    hostile = "<script>alert(1)</script> \x1b[31m|`"
    done, run = merged(
        piece([A, B], [record(A)], started=[B], end=None, plan=f"{hostile}-1of2"),
        piece([C], [record(C)], tiebench=hostile),
    )
    assert not run.damage
    summary = summarize(load(done.directory))
    assert summary.course.pieces is not None
    text, page = markdown.render(summary), html.render(summary)
    assert text.count("This run is merged from 2 runs") == 1
    assert "<script>alert" not in page
    assert "\x1b" not in text + page
    assert len(json.loads(flat(done.directory, "json"))) == 3


def test_damaged_pieces_json_is_a_note(piece, merged):
    done, _ = merged(piece([A, B, C], [record(A), record(B), record(C)]))
    (done.directory / pieces.PIECES).write_text('{"pieces": 3}')
    loaded = load(done.directory)
    assert loaded.merge is None
    assert any(pieces.PIECES in note for note in loaded.notes)
