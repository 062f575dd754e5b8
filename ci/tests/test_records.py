"""The record log: what was finished is never lost nor doubled, wherever a run is cut, and nobody writes beside it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from ci import records
from ci.records import (
    EVENTS,
    MOST_LOSSES,
    RESULTS,
    AnyRow,
    EndRow,
    FinalRow,
    Forecast,
    LogError,
    Record,
    RecordLog,
    ResumedRow,
    RunRow,
    StartedRow,
    in_use,
    read_run,
    write_whole,
)

STAMP = "2026-01-01T00:00:00+00:00"
A, B, C, D = (f"handwritten:tie=tied,head=row,zero={stage}" for stage in range(4))
PLAN = RunRow(
    schema=records.SCHEMA,
    run_id="run",
    plan="test",
    cases=(A, B, C, D),
    target="torch==2",
    budget_seconds=60.0,
    started_at=STAMP,
    tiebench="0",
    command="tiebench run",
    options="--target torch==2",
    forecast=Forecast(expected_seconds=10.0, low=5.0, high=20.0, text="about 10 s"),
    phases={"setup": 1.0, "cases": 9.0},
)
RESUMED = ResumedRow(resumed_at="2026-01-02T00:00:00+00:00", command="go on", budget_seconds=30.0, tiebench="0")


def record(case: str, **changes: object) -> Record:
    given = {"case": case, "path": "handwritten", "target": "torch==2", "status": "finished", "verdict": "exact"}
    return Record(**(given | changes))  # type: ignore[arg-type]


def started(case: str, attempt: int = 1) -> StartedRow:
    return StartedRow(case=case, attempt=attempt, started_at="2026-01-01T00:00:01+00:00")


def final(case: str, **changes: object) -> FinalRow:
    return FinalRow(record=record(case, **changes))


def end(reason: str = "complete", **changes: object) -> EndRow:
    given = {"ended_at": "2026-01-01T00:00:50+00:00", "reason": reason, "exit_code": 0}
    return EndRow(**(given | changes))  # type: ignore[arg-type]


def written(directory: Path, *rows: AnyRow, first: RunRow = PLAN) -> Path:
    """A run directory with these rows, whose writer is gone."""
    with RecordLog(directory, first) as log:
        for row in rows:
            log.append(row)
    return directory


def resumed(directory: Path, *rows: AnyRow) -> Path:
    log, _ = RecordLog.resume(directory, RESUMED)
    with log:
        for row in rows:
            log.append(row)
    return directory


def states(run: records.Run) -> list[tuple[str, str | None]]:
    return [(r.status, r.reason) for r in run.records]


# Schemas

OLD_RUN = {
    "event": "run", "run_id": "old", "plan": "smoke", "cases": [A, B], "target": "torch==2", "budget_seconds": 9.0,
    "started_at": STAMP, "tiebench": "0", "command": "tiebench run",
}  # fmt: skip
OLD_RECORD = {
    "case": A, "path": "handwritten", "target": "torch==2", "status": "finished", "verdict": "rounding",
    "findings": [{"oracle": "loss", "flagged": False, "evidence": "ok", "error": 1.0, "limit": 6.0}],
}  # fmt: skip
NEW_IN = {
    1: {},
    2: {"diagnosis": "", "measured": [], "escalation": [], "guesses": [], "dormant": [], "verdict_seconds": 0.1},
    3: {"reason": None, "why": "new", "collectives": None, "overlapped": True},
    4: {"expectation": None},
}


@pytest.mark.parametrize("schema", [1, 2, 3, 4])
def test_every_schema_so_far_is_read(tmp_path, schema):
    """As it was written then: literally, not by this version's writer."""
    fields = {key: value for number in range(1, schema + 1) for key, value in NEW_IN[number].items()}
    rows = [
        OLD_RUN | {"schema": schema},
        {"event": "started", "case": A, "attempt": 1, "started_at": STAMP},
        {"event": "final", "record": OLD_RECORD | fields},
        {"event": "end", "ended_at": "2026-01-01T00:00:10+00:00", "reason": "complete", "exit_code": 1},
    ]
    (tmp_path / EVENTS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = read_run(tmp_path)
    assert not run.damage
    assert states(run) == [("finished", None), ("not_run", "error")]
    assert (run.seconds, run.budget_seconds, len(run.segments)) == (10.0, 9.0, 1)
    assert (run.running, run.killed) == (False, False)


@pytest.mark.parametrize("schema", [0, records.SCHEMA + 1])
def test_other_schemas_are_refused_in_one_line(tmp_path, schema):
    (tmp_path / EVENTS).write_text(json.dumps(OLD_RUN | {"schema": schema}) + "\n")
    with pytest.raises(LogError, match=f"has schema {schema}; this tiebench reads schemas 1 to {records.SCHEMA}"):
        read_run(tmp_path)


def test_an_older_schema_is_not_resumed(tmp_path):
    written(tmp_path / "run", started(A), first=msgspec.structs.replace(PLAN, schema=2))
    with pytest.raises(LogError, match="written by another tiebench"):
        RecordLog.resume(tmp_path / "run", RESUMED)


def test_unknown_fields_are_damage(tmp_path):
    """A field that this version does not know may say that the verdict does not hold."""
    written(tmp_path / "run")
    line = json.dumps({"event": "final", "record": OLD_RECORD | {"retracted": True}})
    with open(tmp_path / "run" / EVENTS, "a") as stream:
        stream.write(line + "\n")
    run = read_run(tmp_path / "run")
    assert len(run.damage) == 1
    assert "retracted" in run.damage[0]
    assert run.records[0].status == "not_run"


# Resumed runs


def test_a_resumed_run_is_one_run(tmp_path):
    directory = written(tmp_path / "run", started(A), final(A), started(B))
    resumed(directory, started(C), final(C), started(B, 2), final(B, attempt=2), end("budget", seconds=12.0))
    run = read_run(directory)
    assert not run.damage
    assert states(run) == [("finished", None)] * 3 + [("not_run", "budget")]
    assert [r.attempt for r in run.records] == [1, 2, 1, 1]
    assert (run.attempts, run.losses, run.starts) == ({A: 1, B: 2, C: 1}, {B: 1}, 4)
    assert run.budget_seconds == 90.0
    assert [len(segment.records) for segment in run.segments] == [1, 2]
    assert [row.resumed_at for row in run.resumed] == [RESUMED.resumed_at]
    assert run.segments[1].seconds == 12.0
    assert run.todo == (D,)


def test_resuming_twice_and_ending(tmp_path):
    directory = written(tmp_path / "run", started(A), final(A), end("interrupted", exit_code=130))
    resumed(directory, started(B), final(B), end("budget", exit_code=1))
    resumed(directory, started(C), final(C), started(D), final(D), end())
    run = read_run(directory)
    assert states(run) == [("finished", None)] * 4
    assert run.losses == {}, "a run that ended by itself lost nothing by being killed"
    assert len(run.segments) == 3
    with pytest.raises(LogError, match="each of its 4 cases has its result"):
        RecordLog.resume(directory, RESUMED)


def test_a_killed_run_with_all_results_can_be_ended(tmp_path):
    directory = written(tmp_path / "run", *(row for case in PLAN.cases for row in (started(case), final(case))))
    assert read_run(directory).killed
    resumed(directory, end())
    assert read_run(directory).end.reason == "complete"


def test_a_row_that_was_not_run_gives_way_to_a_result(tmp_path):
    skipped = final(D, status="not_run", verdict=None, reason="budget")
    directory = written(tmp_path / "run", started(A), final(A), skipped, end("budget"))
    assert read_run(directory).todo == (B, C, D)
    resumed(directory, started(D), final(D), skipped.__class__(record=record(B, status="not_run", verdict=None)))
    run = read_run(directory)
    assert states(run)[3] == ("finished", None)
    assert not run.damage


def test_what_was_cut_off_is_taken_away_before_a_resumed_run_writes(tmp_path):
    """Else its first row would be glued to half a row, and be lost with it."""
    directory = written(tmp_path / "run", started(A), final(A))
    with open(directory / EVENTS, "ab") as stream:
        stream.write(b'{"event":"final","rec')
    assert read_run(directory).torn
    resumed(directory, started(B), final(B))
    run = read_run(directory)
    assert (run.torn, run.damage) == (False, ())
    assert states(run)[:2] == [("finished", None)] * 2


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([b"nonsense\n"], "it is damaged"),
        ([b'{"event":"started","case":"x","attempt":1}\n'], "it is damaged"),
    ],
)
def test_a_damaged_run_is_not_resumed(tmp_path, rows, why):
    directory = written(tmp_path / "run", started(A))
    with open(directory / EVENTS, "ab") as stream:
        stream.writelines(rows)
    before = (directory / EVENTS).read_bytes()
    with pytest.raises(LogError, match=why):
        RecordLog.resume(directory, RESUMED)
    assert (directory / EVENTS).read_bytes() == before
    assert not in_use(directory), "the lock is released"


def test_several_faults_of_one_case_are_not_resumed(tmp_path):
    rows = [row for at, name in enumerate("xy", 1) for row in (started(A, at), final(A, attempt=at, fault=name))]
    with pytest.raises(LogError, match="several faults"):
        RecordLog.resume(written(tmp_path / "run", *rows), RESUMED)


def test_a_result_stays_whatever_says_that_it_was_not_run(tmp_path):
    """That is damage, and no reason to lose the result."""
    run = read_run(written(tmp_path / "run", started(A), final(A), final(A, status="not_run", verdict=None)))
    assert states(run)[0] == ("finished", None)
    assert run.damage


def test_a_case_that_was_left_out_and_is_then_killed_is_lost(tmp_path):
    left_out = final(A, status="not_run", verdict=None, reason="budget")
    run = read_run(resumed(written(tmp_path / "run", left_out, end("budget")), started(A)))
    assert states(run)[0] == ("lost", "killed")


def test_a_resumed_run_that_is_going_has_its_cases_before_it(tmp_path):
    """What the budget left out the first time is now to come."""
    left_out = [final(case, status="not_run", verdict=None, reason="budget") for case in (B, C, D)]
    directory = written(tmp_path / "run", started(A), final(A), *left_out, end("budget"))
    log, _ = RecordLog.resume(directory, RESUMED)
    with log:
        log.append(started(B))
        assert states(read_run(directory)) == [
            ("finished", None), ("not_run", "running"), ("not_run", "pending"), ("not_run", "pending"),
        ]  # fmt: skip
    assert states(read_run(directory))[2:] == [("not_run", "budget")] * 2


# Kills


def test_a_case_that_was_open_at_too_many_kills_is_given_up(tmp_path):
    directory = written(tmp_path / "run", started(A), final(A), started(B))
    for attempt in range(2, MOST_LOSSES + 1):
        assert read_run(directory).suspects == (B,)
        assert read_run(directory).todo == (C, D, B), "it comes last"
        resumed(directory, started(B, attempt))
    assert read_run(directory).losses == {B: MOST_LOSSES}
    log, run = RecordLog.resume(directory, RESUMED)
    log.close()
    assert run.todo == (C, D)
    for found in (run, read_run(directory)):
        lost = found.records[1]
        assert (lost.status, lost.reason, lost.attempt) == ("lost", "given up", MOST_LOSSES)
    assert not read_run(directory).damage


def test_a_run_that_still_ended_was_not_killed_by_its_open_case(tmp_path):
    """A full disk, say: there is an end row and no result."""
    directory = written(tmp_path / "run", started(A), end("error", exit_code=2))
    for run in (read_run(directory), read_run(resumed(directory, started(B), final(B)))):
        assert (run.losses, run.suspects) == ({}, ())
        assert A in run.todo


def test_two_cases_open_at_a_kill_are_both_lost(tmp_path):
    run = read_run(written(tmp_path / "run", started(A), started(B)))
    assert states(run) == [("lost", "killed")] * 2 + [("not_run", "killed")] * 2
    assert run.suspects == (A, B)


def test_a_process_that_is_killed_leaves_its_lock(tmp_path):
    """The kernel takes it: nothing has to be cleaned up before the run is resumed."""
    code = (
        "import sys, os, signal; sys.path.insert(0, sys.argv[1]); from pathlib import Path; import msgspec\n"
        "from ci.records import *; from ci.tests.test_records import PLAN, A, started\n"
        "log = RecordLog(Path(sys.argv[2]), PLAN); log.append(started(A)); print('there', flush=True)\n"
        "signal.pause()"
    )
    root = Path(__file__).resolve().parents[2]
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(root), str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "there\n"
        run = read_run(tmp_path / "run")
        assert (run.running, run.killed, run.pid) == (True, False, child.pid)
        assert states(run) == [("not_run", "running")] + [("not_run", "pending")] * 3
        for refused in (lambda: RecordLog(tmp_path / "run", PLAN), lambda: RecordLog.resume(tmp_path / "run", RESUMED)):
            with pytest.raises(LogError, match=rf"is in use by a run that is still going \(pid {child.pid}\)"):
                refused()
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()  # type: ignore[union-attr]
    run = read_run(tmp_path / "run")
    assert (run.running, run.killed) == (False, True)
    assert states(run)[0] == ("lost", "killed")
    resumed(tmp_path / "run", started(A, 2), final(A, attempt=2))


# Lock and writer


def test_a_reader_neither_takes_nor_releases_the_lock(tmp_path):
    with RecordLog(tmp_path / "run", PLAN) as log:
        for _ in range(3):
            assert in_use(tmp_path / "run")
            assert read_run(tmp_path / "run").running
        log.append(end())
        assert not read_run(tmp_path / "run").running, "its end row counts, whoever still has the file open"
    assert not in_use(tmp_path / "run")


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch):
    def flock(file: int, how: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("ci.records.fcntl.flock", flock)
    with RecordLog(tmp_path / "run", PLAN) as log:
        assert "cannot be locked (Operation not supported)" in log.note
        assert not in_use(tmp_path / "run")


def test_a_torn_tail_of_a_run_that_is_going_is_not_told(tmp_path):
    """A reader may see half of what is being written just now."""
    with RecordLog(tmp_path / "run", PLAN):
        with open(tmp_path / "run" / EVENTS, "ab") as stream:
            stream.write(b'{"event"')
        assert not read_run(tmp_path / "run").torn
    assert read_run(tmp_path / "run").torn


def test_half_a_write_is_taken_back(tmp_path, monkeypatch):
    """A disk that is full takes a part of a row."""
    real = os.write
    with RecordLog(tmp_path / "run", PLAN) as log:
        log.append(started(A))
        before = (tmp_path / "run" / EVENTS).read_bytes()
        monkeypatch.setattr("ci.records.os.write", lambda file, data: real(file, data[: len(data) // 2]))
        with pytest.raises(LogError, match="No space left on device"):
            log.append(final(A))
        assert (tmp_path / "run" / EVENTS).read_bytes() == before
        monkeypatch.undo()
        log.append(final(A))
    assert states(read_run(tmp_path / "run"))[0] == ("finished", None)


def test_a_directory_that_is_taken_is_refused(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").touch()
    with pytest.raises(LogError, match="is not empty"):
        RecordLog(tmp_path / "mine", PLAN)
    written(tmp_path / "run")
    with pytest.raises(LogError, match="already holds a run"):
        RecordLog(tmp_path / "run", PLAN)
    with pytest.raises(LogError, match="cannot resume"):
        RecordLog.resume(tmp_path / "mine", RESUMED)


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "report.md"
    write_whole(path, b"old")
    (tmp_path / f".report.md.{os.getpid()}.tmp").mkdir()  # in the way
    with pytest.raises(LogError, match="cannot write"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"


def test_what_a_killed_writer_of_reports_left_is_swept(tmp_path):
    directory = written(tmp_path / "run", started(A))
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for number in (dead.pid, os.getpid()):
        (directory / f".report.md.{number}.tmp").touch()
    resumed(directory)
    assert [p.name for p in directory.glob(".*.tmp")] == [f".report.md.{os.getpid()}.tmp"]


# Contradictions


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([started(A), end(), final(A)], "a row after the end of the run (final)"),
        ([PLAN], "a second run row"),
        ([final(A)], f"{A} has a result of attempt 1 and never started it"),
        ([started(A), final(A), started(A), final(A, verdict="bug")], f"{A} has two results of attempt 1 that differ"),
        ([started(A), final(A), final(A, status="not_run", verdict=None)], f"{A} has a result, and yet was not run"),
        ([started(A), final(A, path="deepspeed")], f"{A} says that its path is deepspeed"),
        ([started("handwritten:zero=9"), final("handwritten:zero=9")], "handwritten:zero=9 is not in the plan"),
        ([started(A), final(A, status="lost")], f"{A} is exact, but its status is lost"),
        ([started(A), final(A, error=9.0, limit=6.0)], f"{A} is exact, but its largest deviation is beyond its limit"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_no_run_writes_is_damage(tmp_path, rows, said):
    run = read_run(written(tmp_path / "run", *rows))
    assert any(line.endswith(said) for line in run.damage), run.damage


def test_a_resumed_row_after_the_end_is_no_damage_and_other_rows_are(tmp_path):
    directory = written(tmp_path / "run", end("budget"))
    resumed(directory, end("budget"))
    assert not read_run(directory).damage
    with open(directory / EVENTS, "ab") as stream:
        stream.write(msgspec.json.encode(started(A)) + b"\n")
    assert any("a row after the end" in line for line in read_run(directory).damage)


# Wherever it is cut


def whole_log(directory: Path) -> bytes:
    """A run that was killed, interrupted and resumed, with rows of every kind, and text of more than one byte."""
    written(directory, started(A), started(B), final(A, evidence='größer als 3 µm\n\\ "x"'))
    refused = final(C, status="skipped", verdict=None, evidence="no CUDA")
    resumed(directory, refused, final(D, status="not_run", verdict=None, reason="interrupted"), end("interrupted"))
    resumed(directory, started(D), final(D, verdict="bug"), started(B, 2), final(B, attempt=2), end())
    return (directory / EVENTS).read_bytes()


def results_in(data: bytes) -> dict[str, Record]:
    """Results in whole lines, found without the reader under test."""
    rows = [json.loads(line) for line in data.split(b"\n")[:-1]]
    found = [row["record"] for row in rows if row["event"] == "final" and row["record"]["status"] in RESULTS]
    return {row["case"]: msgspec.convert(row, Record) for row in found}


def test_cut_at_every_byte_no_result_is_lost_or_doubled(tmp_path):
    data = whole_log(tmp_path / "run")
    head = data.index(b"\n") + 1
    cut = tmp_path / "cut"
    cut.mkdir()
    for size in range(len(data) + 1):
        (cut / EVENTS).write_bytes(data[:size])
        if size < head:
            with pytest.raises(LogError, match="does not start with a run row"):
                read_run(cut)
            continue
        run = read_run(cut)
        assert not run.damage, size
        assert run.torn == (data[size - 1 : size] != b"\n"), size
        assert [r.case for r in run.records] == list(PLAN.cases), size
        assert {r.case: r for r in run.records if r.status in RESULTS} == results_in(data[:size]), size
        hopeless = {case for case, times in run.losses.items() if times >= MOST_LOSSES}
        assert set(run.todo) == set(PLAN.cases) - set(results_in(data[:size])) - hopeless, size
        assert len(run.todo) == len(set(run.todo)), size
        assert run.killed == (run.end is None), size


def work(log: RecordLog, run: records.Run, chance: random.Random) -> None:
    """What a run does: cases in order, up to two open at once, and some that the budget leaves out."""
    held: FinalRow | None = None
    for case in run.todo:
        if chance.random() < 0.1:
            log.append(final(case, status="not_run", verdict=None, reason="budget"))
            continue
        attempt = run.attempts.get(case, 0) + 1
        log.append(started(case, attempt))
        if held is not None:
            log.append(held)
        held = final(case, attempt=attempt, wall_seconds=chance.random())
        if case in run.suspects or chance.random() < 0.5:
            log.append(held)
            held = None
    if held is not None:
        log.append(held)
    log.append(end())


@pytest.mark.parametrize("seed", range(40))
def test_killed_anywhere_and_resumed_until_it_is_done(tmp_path, seed):
    """Each kill leaves some bytes of what the process wrote; what was finished is there at the end, and ran once."""
    chance = random.Random(seed)
    plan = msgspec.structs.replace(PLAN, cases=tuple(f"handwritten:seed={number}" for number in range(8)))
    directory = written(tmp_path / "run", first=plan)
    path = directory / EVENTS
    kept: dict[str, Record] = {}
    for _ in range(100):
        begin = path.stat().st_size
        try:
            log, run = RecordLog.resume(directory, RESUMED)
        except LogError as error:
            assert "nothing to resume" in str(error)  # noqa: PT017 - every other error is none that is expected
            break
        with log:
            work(log, run, chance)
        if chance.random() < 0.85:
            with open(path, "rb+") as stream:
                stream.truncate(chance.randint(begin, path.stat().st_size))
        run = read_run(directory)
        assert not run.damage
        now = {r.case: r for r in run.records if r.status in RESULTS}
        assert kept.items() <= now.items()
        kept = now
    run = read_run(directory)
    assert run.end is not None
    assert {r.case for r in run.records} == set(plan.cases)
    assert all(r.status in RESULTS or r.reason == "given up" for r in run.records)
    rows = [json.loads(line) for line in path.read_bytes().splitlines()]
    twice = Counter(r["record"]["case"] for r in rows if r["event"] == "final" and r["record"]["status"] in RESULTS)
    assert set(twice.values()) <= {1}, "a case with a result is never run again"
    assert max(run.losses.values(), default=0) <= MOST_LOSSES
