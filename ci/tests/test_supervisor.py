"""The run loop: budget, order, interruptions, full disks, kills, and the record log that is left behind."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import time
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import psutil
import pytest

from ci import history, outcomes, plans, records, schedule, stacks, supervisor
from ci.ranks import Settings
from ci.records import EVENTS, EndRow, FinalRow, Finding, LogError, Record, StartedRow, read_run
from ci.session import Plan, Session
from ci.subject import Patch, SetupError, Subject
from ci.targets import Target
from ci.tests import misbehave_seeds as seeds
from ci.tests.conftest import (
    MISBEHAVE,
    assert_gone,
    command,
    environment,
    family,
    run_row,
    tiebench,
    wait_until,
)
from reports.load import load
from reports.summary import summarize
from suites.cases import Case

CLEAN = Case("handwritten", layers=1)
ALONE = Case("handwritten", layers=1, tp=1)
CPU = Settings(device="cpu")


def rows(directory: Path) -> list[dict]:
    path = directory / EVENTS
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def start_run(cwd: Path, *ids: str, patched: bool = True) -> subprocess.Popen[str]:
    """`tiebench run` in the background, writing to ``cwd/run``."""
    arguments = ["run", "--out", "run", "--device", "cpu"]
    for case in ids:
        arguments += ["--case", case]
    if patched:
        arguments += ["--patch", str(MISBEHAVE)]
    log = open(cwd / "output", "w")  # noqa: SIM115 - the process outlives this function
    return subprocess.Popen(
        command(*arguments), cwd=cwd, env=environment(), stdout=log, stderr=subprocess.STDOUT, text=True
    )


def test_a_run_within_its_budget_and_one_beyond_it(tmp_path, server):
    heard = []
    cases = [ALONE, ALONE, ALONE.but(seed=1)]
    run = supervisor.run(cases, tmp_path / "a", settings=CPU, on_record=heard.append, server=server)
    assert [r.case for r in run.records] == [ALONE.id, ALONE.but(seed=1).id], "doubles run once"
    assert [r.case for r in heard] == [r.case for r in run.records]
    assert (run.end.reason, run.end.exit_code) == ("complete", 0), [r.evidence for r in run.records]
    assert not list((tmp_path / "a" / "observations").iterdir()), "observations of green cases are kept"

    run = supervisor.run([ALONE, CLEAN], tmp_path / "b", settings=CPU, budget=0.5)
    assert [r.status for r in run.records] == ["not_run", "not_run"]
    assert "budget" in run.records[0].evidence
    assert (run.end.reason, run.end.exit_code) == ("budget", 1)


def test_a_case_cut_off_by_the_budget_is_no_hang(session, monkeypatch):
    s = session(case_limit=60.0)
    assert s.run(CLEAN).verdict == "rounding"
    monkeypatch.setattr(type(s), "left", property(lambda self: 3.0))
    record = s.run(CLEAN.but(seed=seeds.HANG))
    assert (record.status, record.verdict) == ("timeout", "inconclusive")
    assert "budget" in record.evidence
    assert record.budget_seconds == 3.0


@pytest.mark.parametrize(
    ("seed", "said", "guessed"),
    [
        (seeds.SWAPS, "rank 0: all_reduce #1 of 2144 float32 (sum); rank 1: all_gather #1 of 2144 float32", [27]),
        (seeds.C_LOOP, "rank 1 runs native code", []),
        (seeds.STOPS, "rank 1 is stopped (by a signal such as SIGSTOP, or a debugger)", []),
    ],
)
def test_the_record_of_a_hang_names_it(session, seed, said, guessed):
    if seed in (seeds.C_LOOP, seeds.STOPS) and stacks.find() is None:
        pytest.skip("py-spy is not installed")
    s = session(case_limit=6.0)
    record = s.run(CLEAN.but(layers=2, seed=seed))
    assert (record.status, record.verdict) == ("timeout", "hang"), record.evidence
    assert said in record.evidence
    assert [guess.bug_class for guess in record.guesses] == guessed
    assert "rank 0:" in record.collectives
    assert "rank 1:" in record.collectives
    assert "first difference" in record.collectives
    assert "misbehave.py" in record.stacks
    assert s.run(CLEAN).verdict in records.GREEN, "the next case has ranks of its own"


@pytest.mark.parametrize(
    ("seed", "said"),
    [
        (seeds.SIZES, ["rank 1: all_reduce #1 of 2145 float32", "only the size differs"]),
        (seeds.SKIPS, ["rank 1 never issued all_reduce #60 of 1 float32 (sum)", "Connection closed by peer"]),
    ],
)
def test_the_record_of_ranks_that_gloo_ended_names_the_collective(session, seed, said):
    record = session(case_limit=20.0).run(CLEAN.but(layers=2, seed=seed))
    assert record.verdict == "crash", record.evidence
    for text in said:
        assert text in record.evidence
    assert [guess.bug_class for guess in record.guesses] == [27]
    assert "<- first difference" in record.collectives


def test_a_process_that_outlives_its_rank_is_ended_and_named(session):
    s = session(case_limit=20.0)
    record = s.run(CLEAN.but(seed=seeds.DAEMON))
    assert record.verdict == "crash"
    found = re.search(r"process (\d+) \(sleep 1234\): started by a rank was ended", record.evidence)
    assert found, record.evidence
    if psutil.pid_exists(int(found[1])):
        assert_gone([psutil.Process(int(found[1]))])


def test_a_failure_of_this_program_costs_one_case(session):
    s = session()
    flight = s.train(ALONE)
    (flight.directory / "rank0.safetensors").write_bytes(b"no tensors")
    record = s.settle(flight)
    assert (record.status, record.verdict) == ("finished", "crash")
    assert record.evidence.startswith("tiebench itself failed: ObservationError: observation rank0.safetensors")
    assert "Traceback" in record.stacks
    assert s.run(ALONE).verdict in records.GREEN


def test_a_verdict_that_fails_while_the_next_case_runs_costs_that_one_nothing(session):
    s = session()
    s.run(CLEAN)
    flight = s.train(ALONE)
    (flight.directory / "rank0.safetensors").write_bytes(b"no tensors")
    s.start_judging(flight)
    longer = s.train(CLEAN.but(layers=4, steps=8))
    assert flight.result["verdict"] == "crash"  # it came meanwhile
    assert s.settle(longer).verdict in records.GREEN


def test_a_verdict_that_needs_ranks_gets_new_ones_where_the_next_case_has_cost_the_old_ones(session):
    s = session()
    case = Case("handwritten", layers=1, head="row", hidden=35, matmul="tf32")
    flight = s.train(case, "detached_lookup_hidden")
    s._drop(case.world_size)  # as a case that crashes does
    record = s.settle(flight)
    assert record.verdict == "bug"
    assert [rung.arithmetic for rung in record.escalation] == ["float32"]


def test_a_judge_that_is_killed_costs_nothing_and_one_that_takes_too_long_is_ended(session):
    s = session()
    flight = s.train(ALONE)
    s.start_judging(flight)
    os.kill(s.judge.pid, signal.SIGKILL)
    assert s.settle(flight).verdict in records.GREEN
    flight = s.train(ALONE)
    s.start_judging(flight)
    judge = psutil.Process(s.judge.pid)
    judge.suspend()
    s.settings = replace(s.settings, judge_limit=0.2)
    record = s.settle(flight)
    assert (record.status, record.verdict) == ("timeout", "inconclusive")
    assert record.evidence == "judging took over 0 s and was ended"
    assert_gone([judge])
    s.settings = replace(s.settings, judge_limit=60.0)
    assert s.run(ALONE).verdict in records.GREEN


def test_records_of_a_run_with_patch_and_fault_can_be_run_again(tmp_path, server):
    fault = "unreduced_input_gradient"
    subject = Subject(fault=fault, patch=Patch.read(MISBEHAVE))
    with Session(tmp_path / "run", Plan("test", (CLEAN,)), subject, CPU, server=server) as session:
        record = session.run(CLEAN)
        assert record.verdict == "bug", record.evidence
        assert record.fault == fault
        assert record.patch.startswith("misbehave.py sha256:")
        assert record.rerun == f"tiebench run --case {CLEAN.id} --patch {MISBEHAVE} --fault {fault}"
        assert list((tmp_path / "run" / "observations").rglob("*.safetensors")), "observations of a bug are not kept"
    assert read_run(tmp_path / "run").end.exit_code == 1


def test_a_patch_that_raises_stops_the_run(tmp_path):
    patch = tmp_path / "p.py"
    patch.write_text("import os\n\nraise KeyError('no such layer')\n")
    done = tiebench(
        *(
            "run",
            "--device",
            "cpu",
            "--case",
            ALONE.id,
            "--case",
            ALONE.but(seed=1).id,
            "--patch",
            "p.py",
            "--out",
            "run",
        ),
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert "tiebench: --patch p.py line 3: KeyError: 'no such layer'" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    run = read_run(tmp_path / "run")
    assert [r.status for r in run.records] == ["lost", "not_run"]
    assert (run.end.reason, run.end.exit_code) == ("error", 2)


@pytest.mark.parametrize("moment", ["start-up", "second case", "native code"])
def test_sigkill_leaves_a_readable_run_and_no_ranks(tmp_path, moment):
    second = CLEAN.but(seed=seeds.HANG)
    cases = [CLEAN.id, second.id, CLEAN.but(seed=1).id]
    if moment == "native code":
        cases = [ALONE.id, ALONE.but(seed=seeds.NATIVE).id, ALONE.but(seed=1).id]
    process = start_run(tmp_path, *cases)
    needed = {"start-up": 1, "second case": 2, "native code": 2}[moment]

    def reached() -> bool:
        assert process.poll() is None, (tmp_path / "output").read_text()
        events = [row["event"] for row in rows(tmp_path / "run")]
        return events.count("started") >= needed and events.count("final") >= needed - 1

    wait_until(reached, moment)
    wait_until(lambda: len(family(process)) >= 1, "ranks")
    if moment == "native code":
        wait_until((tmp_path / "run" / "observations" / "0002").is_dir, "the native call")
    ranks = family(process)
    process.kill()
    process.wait()
    assert_gone(ranks)
    run = read_run(tmp_path / "run")
    assert run.end is None
    assert [r.case for r in run.records] == cases
    expected = ["lost", "not_run", "not_run"] if needed == 1 else ["finished", "lost", "not_run"]
    assert [r.status for r in run.records] == expected
    assert str(MISBEHAVE) in run.records[1].rerun
    report = tiebench("report", "run", cwd=tmp_path)
    assert report.returncode == 1
    assert "Traceback" not in report.stderr
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_ends_in_good_order(tmp_path, number, code):
    cases = [CLEAN.id, CLEAN.but(seed=seeds.HANG).id, CLEAN.but(seed=1).id]
    process = start_run(tmp_path, *cases)
    wait_until((tmp_path / "run" / "observations" / "0002").is_dir, "the second case")
    ranks = family(process)
    process.send_signal(number)
    assert process.wait(60) == code
    assert_gone(ranks)
    run = read_run(tmp_path / "run")
    assert [r.status for r in run.records] == ["finished", "lost", "not_run"]
    assert "interrupted after" in run.records[1].evidence
    assert (run.end.reason, run.end.exit_code) == ("interrupted", code)
    assert (tmp_path / "run" / "report.md").is_file()
    assert "Traceback" not in (tmp_path / "output").read_text()


def test_a_full_disk_is_one_line_and_keeps_the_rows(tmp_path):
    arguments = ["run", "--out", "run", "--device", "cpu"]
    for seed in range(4):
        arguments += ["--case", ALONE.but(seed=seed).id]
    limit = 12_000  # bytes of one file: room for some rows, not for an observation
    done = tiebench(
        *arguments, cwd=tmp_path, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    )
    assert done.returncode == 2, done.stdout + done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("tiebench:")]
    assert len(said) == 1, done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    run = read_run(tmp_path / "run")
    assert [r.case for r in run.records] == [ALONE.but(seed=seed).id for seed in range(4)]
    assert run.records[0].status == "lost"
    assert not run.damage


def test_a_log_that_cannot_grow_stops_the_run(tmp_path, monkeypatch, server):
    """The record log itself is full: what was written stays whole."""
    written = records.RecordLog.append

    def append(self, row):
        if isinstance(row, StartedRow) and row.case == ALONE.but(seed=1).id:
            raise LogError("cannot append: No space left on device")
        written(self, row)

    monkeypatch.setattr(records.RecordLog, "append", append)
    with pytest.raises(LogError, match="No space left"):
        supervisor.run([ALONE, ALONE.but(seed=1)], tmp_path / "run", settings=CPU, server=server)
    run = read_run(tmp_path / "run")
    assert [r.status for r in run.records] == ["finished", "not_run"]
    assert (run.end.reason, run.end.exit_code) == ("error", 2)


def test_a_foreign_directory_is_refused(tmp_path):
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(LogError, match="not empty"):
        supervisor.run([ALONE], tmp_path, settings=CPU)
    assert [p.name for p in tmp_path.iterdir()] == ["precious"]


def test_a_torn_last_line_is_no_damage(tmp_path):
    log = records.RecordLog(tmp_path / "run", run_row([ALONE.id, CLEAN.id]))
    log.append(StartedRow(case=ALONE.id, attempt=1, started_at="2026-01-01T00:00:00+00:00"))
    log.close()
    path = tmp_path / "run" / EVENTS
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"event":"final","record":{"case":"hand')
    run = read_run(tmp_path / "run")
    assert run.torn
    assert not run.damage
    assert [r.status for r in run.records] == ["lost", "not_run"]
    assert run.records[0].rerun == f"tiebench run --case {ALONE.id} --fault x"


STAMP = "2026-01-01T00:00:00+00:00"
BEGUN = StartedRow(case=ALONE.id, attempt=1, started_at=STAMP)
DONE = EndRow(ended_at=STAMP, reason="complete", exit_code=0)


def right(**changes: object) -> Record:
    """A green record of `ALONE`, with some fields changed."""
    given = {"case": ALONE.id, "path": "handwritten", "target": "t", "status": "finished", "verdict": "rounding"}
    return Record(**{**given, "error": 1.0, "limit": 6.0, **changes})  # type: ignore[arg-type]


FINAL = FinalRow(record=right())
FLAGGED = (Finding(oracle="tie", flagged=True, evidence="broken"),)
BEYOND = (Finding(oracle="loss", flagged=False, evidence="", error=9.0, limit=6.0),)


@pytest.mark.parametrize(
    ("rows_of", "said"),
    [
        ([BEGUN, FINAL, DONE], None),
        ([BEGUN, FinalRow(record=right(verdict="bug")), FINAL, DONE], "two results of attempt 1 that differ"),
        ([FINAL, DONE], "never started it"),
        ([BEGUN, FINAL, DONE, DONE], "a row after the end"),
        ([DONE, BEGUN, FINAL], "a row after the end"),
        ([BEGUN, FinalRow(record=right(findings=FLAGGED)), DONE], "tie flagged it"),
        ([BEGUN, FinalRow(record=right(oracle="tie")), DONE], "tie flagged it"),
        ([BEGUN, FinalRow(record=right(findings=BEYOND)), DONE], "loss is beyond its limit"),
        ([BEGUN, FinalRow(record=right(error=7.0)), DONE], "beyond its limit"),
        ([BEGUN, FinalRow(record=right(error=None)), DONE], "beyond its limit"),
        ([BEGUN, FinalRow(record=right(status="timeout")), DONE], "its status is timeout"),
        ([BEGUN, FinalRow(record=right(path="deepspeed")), DONE], "its path is deepspeed"),
        ([BEGUN, FinalRow(record=right(peak_memory_bytes=2**63)), DONE], "peak_memory_bytes"),
        ([BEGUN, FinalRow(record=right(attempt=-1)), DONE], "attempt"),
    ],
)
def test_a_log_that_contradicts_itself_is_damaged_and_never_green(tmp_path, rows_of, said):
    with records.RecordLog(tmp_path / "run", run_row([ALONE.id])) as log:
        for row in rows_of:
            log.append(row)
    run = read_run(tmp_path / "run")
    assert summarize(load(tmp_path / "run")).exit_code == (0 if said is None else 1)
    if said is None:
        assert not run.damage
    else:
        assert any(said in line for line in run.damage), run.damage


@pytest.mark.parametrize(("planned", "said"), [([], "is not in the plan"), ([ALONE.id, "foo"], "'foo' is no case id")])
def test_a_plan_that_is_not_what_ran_is_damage(tmp_path, planned, said):
    with records.RecordLog(tmp_path / "run", run_row(planned)) as log:
        for row in (BEGUN, FINAL, DONE):
            log.append(row)
    assert any(said in line for line in read_run(tmp_path / "run").damage)
    assert summarize(load(tmp_path / "run")).exit_code == 1


def test_limits_are_numbers_of_seconds():
    for bad in (float("inf"), float("nan"), -1.0):
        with pytest.raises(ValueError, match="budget"):
            Plan("test", (), bad)
        with pytest.raises(ValueError, match="case_limit"):
            Settings(case_limit=bad)


def test_a_fault_that_nobody_sees_and_a_slow_judge_are_told(session, monkeypatch):
    s = session(case_limit=60.0)
    monkeypatch.setattr(s, "subject", Subject(patch=s.subject.patch, fault="dropped_copy"))
    record = s.run(ALONE)
    assert record.verdict in records.GREEN, "no copy to drop in an untied case on one rank"
    assert record.evidence.startswith("fault dropped_copy was not caught; ")
    assert not records.expected(record)

    slow = outcomes.annotated(right(wall_seconds=82.0, judge_seconds=76.0, budget_seconds=60.0, evidence="so"))
    assert slow.evidence == "took 82.0 s, 76.0 s of it judging: over its limit of 60 s; so"
    assert records.expected(slow)


def test_a_rank_that_dies_while_it_saves_is_no_crash_of_the_target(tmp_path, misbehaving):
    with pytest.raises(SetupError, match=r"rank 0 ended with exit code 9 while it wrote to .*run"):
        supervisor.run([ALONE.but(seed=seeds.DIES_SAVING)], tmp_path / "run", subject=misbehaving, settings=CPU)
    assert [r.status for r in read_run(tmp_path / "run").records] == ["lost"]


def test_a_rank_that_somebody_kills_while_it_saves_costs_its_case_only(session):
    s = session()
    record = s.run(ALONE.but(seed=seeds.KILLED_SAVING))
    assert (record.status, record.verdict) == ("finished", "crash")
    assert "was killed by SIGKILL" in record.evidence
    assert s.run(ALONE).verdict in records.GREEN


def test_a_full_file_system_is_no_crash_of_the_target(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(small)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("may not mount a small file system here")
    try:
        ids = [word for seed in range(3) for word in ("--case", CLEAN.but(seed=seed, vocab=512).id)]
        done = tiebench("run", "--out", "small/run", "--device", "cpu", *ids, cwd=tmp_path)
        assert done.returncode == 2, done.stdout + done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
        assert "small/run" in done.stderr
        assert "crash" not in done.stdout
        assert "Traceback" not in done.stdout
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_a_second_signal_does_not_cost_the_report(tmp_path):
    process = start_run(tmp_path, CLEAN.id, CLEAN.but(seed=seeds.HANG).id)
    wait_until((tmp_path / "run" / "observations" / "0002").is_dir, "the second case")
    while process.poll() is None:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
    assert process.returncode == 143
    assert (tmp_path / "run" / "report.html").is_file()


def test_a_target_that_is_not_what_runs_stops_the_run(tmp_path):
    """A patch that takes the target off the import path: the installed build must not pass for it."""
    pytest.importorskip("deepspeed")
    patch = tmp_path / "p.py"
    patch.write_text(f"import sys\nsys.path.remove({str(tmp_path / 'site')!r})\n")
    (tmp_path / "site").mkdir()
    build = Target("deepspeed==0.0.1", tmp_path / "site", "deepspeed", "0.0.1", None, "index")
    subject = Subject(build=build, patch=Patch.read(patch))
    with pytest.raises(SetupError, match=r"target deepspeed==0.0.1 is not what runs: deepspeed was imported from"):
        supervisor.run([Case("deepspeed")], tmp_path / "run", subject=subject, settings=CPU)


def test_the_headline_names_what_really_ran(tmp_path):
    build = Target("deepspeed==0.0.1", tmp_path, "deepspeed", "0.0.1", None, "index")
    cases = (ALONE, Case("deepspeed"))
    with Session(tmp_path / "run", Plan("test", cases), Subject(build=build), CPU) as session:
        session.skip(cases[1], "not_run", "no need")
        session._final(right(target="torch==2.13.0"))
    summary = summarize(load(tmp_path / "run"))
    assert summary.plan.target == "deepspeed==0.0.1"
    assert list(summary.plan.targets) == ["deepspeed", "handwritten"]
    assert summary.target == "torch==2.13.0"


def test_a_patch_that_is_no_python_is_refused_before_anything_starts(tmp_path):
    (tmp_path / "p.py").write_text("def f(:\n")
    with pytest.raises(SetupError, match=r"p.py line 1: SyntaxError"):
        Patch.read(tmp_path / "p.py")
    with pytest.raises(SetupError, match="No such file"):
        Patch.read(tmp_path / "q.py")


def test_order_and_shards():
    cases = [Case("handwritten", dp=2), CLEAN, CLEAN, ALONE, Case("deepspeed")]
    ordered = schedule.order(cases)
    assert [c.world_size for c in ordered] == [1, 2, 2, 4]
    assert ordered[1:3] == [CLEAN, Case("deepspeed")]
    parts = [schedule.shard(ordered, i, 3) for i in (1, 2, 3)]
    assert sorted(c.id for part in parts for c in part) == sorted(c.id for c in ordered)
    with pytest.raises(ValueError, match="shard 4/3"):
        schedule.shard(ordered, 4, 3)


def test_plans_are_nested_and_every_selection_has_cases():
    for plan in plans.PLANS.values():
        assert set(plan.base.cases if plan.base else ()) <= set(plan.cases)
        assert len(set(plan.cases)) == len(plan.cases)
        for selection in plan.all_selections():
            assert selection.cases, f"{plan.name}: {selection.reason}"


def test_the_nightly_covers_the_matrix():
    assert set(plans.MATRIX.cases) <= set(plans.NIGHTLY.cases)
    for wanted in ({"init": "zero"}, {"head": "unmatched"}, {"ignored": "rank"}, {"embedding_option": "sparse"}):
        assert any(all(getattr(c, k) == v for k, v in wanted.items()) for c in plans.MATRIX.cases), wanted


def test_smoke_covers_what_it_must():
    cases = set(plans.SMOKE.cases)
    assert len(cases) >= 32
    for path in plans.BOTH:
        for tie in plans.TIES:
            for head in ("vocab", "row"):
                for zero in (0, 2):
                    for size in plans.SIZES:
                        assert Case(path, tie=tie, head=head, zero=zero, **size) in cases
    for wanted in ({"dp": 2}, {"head": "gathered"}, {"optimizer": "adamw"}, {"dtype": "float64"}, {"zero": 3}):
        assert any(all(getattr(c, k) == v for k, v in wanted.items()) for c in cases), wanted
    assert sum(c.world_size > 2 for c in cases) <= 2, "sets of four ranks are dear on two cores"


def test_a_clock_that_jumps_changes_nothing_but_time_stamps(tmp_path, server, monkeypatch):
    jumps = iter([0, 86400 * 400, -86400 * 400, 3600, -7200] * 20)

    def jumping() -> str:
        return (datetime(2026, 3, 1, tzinfo=timezone.utc) + timedelta(seconds=next(jumps))).isoformat()

    monkeypatch.setattr(records, "now", jumping)
    run = supervisor.run(
        [ALONE, CLEAN, ALONE.but(seed=1)], tmp_path / "runs" / "a", settings=CPU, budget=200, server=server
    )
    assert (run.end.reason, run.end.exit_code) == ("complete", 0)
    assert {r.verdict for r in run.records} == {"rounding"}
    assert 0 < run.seconds < 100
    assert summarize(load(run.directory)).exit_code == 0
    (seen,) = history.read(tmp_path / "runs", history.machine_here("cpu")).runs
    assert 0 < seen.wall_seconds < 100


def test_a_second_run_in_the_same_directory_is_refused_while_the_first_one_is_going(tmp_path):
    seeds = [ALONE.but(seed=seed).id for seed in range(1, 100)]  # work for longer than the other two take to start
    first = start_run(tmp_path, ALONE.id, CLEAN.id, *seeds, patched=False)
    wait_until(lambda: bool(rows(tmp_path / "run")), "the first row")
    for words in (("--out", "run", "--case", ALONE.id), ("--resume", "run")):
        second = tiebench("run", *words, "--device", "cpu", cwd=tmp_path)
        assert second.returncode == 2, second.stdout
        assert ("is still going" if words[0] == "--resume" else "already holds a run") in second.stderr
    assert first.wait(240) == 0
    assert [r.verdict for r in read_run(tmp_path / "run").records] == ["rounding"] * (len(seeds) + 2)
