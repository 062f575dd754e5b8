"""Merging: every planned case gets a record, earlier attempts stay visible, and nothing wrong with a piece is green."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest

from ci import merge, plans, records, schedule
from ci.merge import merge_runs
from ci.records import ENVIRONMENT, EVENTS, EndRow, FinalRow, LogError, Record, RecordLog, RunRow, StartedRow, read_run

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
    ) -> Path:
        nonlocal count
        count += 1
        directory = tmp_path / "shard" / f"attempt-{count}"
        first = msgspec.structs.replace(
            PLAN, run_id=f"piece{count}", cases=tuple(cases), target=f"of piece {count}", options=options
        )
        with RecordLog(directory, first) as log:
            for row in rows:
                log.append(StartedRow(case=row.case, attempt=row.attempt, started_at=STAMP))
                log.append(FinalRow(record=row))
            for case in started:
                log.append(StartedRow(case=case, attempt=1, started_at=STAMP))
            if end:
                log.append(EndRow(ended_at=f"2026-01-01T00:0{count}:00+00:00", reason=end, exit_code=0))  # type: ignore[arg-type]
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
    assert (done.exit_code, run.end.message) == (1, "shard-1-of-1 left nothing; 3 of 3 planned cases are in no piece")
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
