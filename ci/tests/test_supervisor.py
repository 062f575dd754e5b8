"""The run loop: budget, order, interruptions, full disks, kills, and the record log that is left behind."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
from pathlib import Path

import pytest

from ci import plans, records, schedule, supervisor
from ci.ranks import Settings
from ci.records import EVENTS, LogError, RunRow, StartedRow, read_run
from ci.supervisor import Patch, Plan, Session, SetupError, Subject
from ci.tests import misbehave_seeds as seeds
from ci.tests.conftest import MISBEHAVE, assert_gone, command, environment, family, tiebench, wait_until
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


def test_a_run_within_its_budget_and_one_beyond_it(tmp_path):
    heard = []
    run = supervisor.run([ALONE, ALONE, ALONE.but(seed=1)], tmp_path / "a", settings=CPU, on_record=heard.append)
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


def test_a_failure_of_this_program_costs_one_case(session, monkeypatch):
    from suites import verdict

    s = session()
    with monkeypatch.context() as broken:
        broken.setattr(verdict, "judge", lambda *a: 1 / 0)
        record = s.run(ALONE)
    assert (record.status, record.verdict) == ("finished", "crash")
    assert record.evidence == "tiebench itself failed: ZeroDivisionError: division by zero"
    assert s.run(ALONE).verdict in records.GREEN


def test_records_of_a_run_with_patch_and_fault_can_be_run_again(tmp_path):
    fault = "dropped_copy"
    subject = Subject(fault=fault, patch=Patch.read(MISBEHAVE))
    with Session(tmp_path / "run", Plan("test", (CLEAN,)), subject, CPU) as session:
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
        return sum(row["event"] == "started" for row in rows(tmp_path / "run")) >= needed

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


def test_a_log_that_cannot_grow_stops_the_run(tmp_path, monkeypatch):
    """The record log itself is full: what was written stays whole."""
    written = records.RecordLog.append

    def append(self, row):
        if isinstance(row, StartedRow) and row.case == ALONE.but(seed=1).id:
            raise LogError("cannot append: No space left on device")
        written(self, row)

    monkeypatch.setattr(records.RecordLog, "append", append)
    with pytest.raises(LogError, match="No space left"):
        supervisor.run([ALONE, ALONE.but(seed=1)], tmp_path / "run", settings=CPU)
    run = read_run(tmp_path / "run")
    assert [r.status for r in run.records] == ["finished", "not_run"]
    assert (run.end.reason, run.end.exit_code) == ("error", 2)


def test_a_foreign_directory_is_refused(tmp_path):
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(LogError, match="not empty"):
        supervisor.run([ALONE], tmp_path, settings=CPU)
    assert [p.name for p in tmp_path.iterdir()] == ["precious"]


def test_a_torn_last_line_is_no_damage(tmp_path):
    log = records.RecordLog(tmp_path / "run", _run_row([ALONE.id, CLEAN.id]))
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


def _run_row(cases: list[str]) -> RunRow:
    return RunRow(
        schema=records.SCHEMA,
        run_id="r",
        plan="test",
        cases=tuple(cases),
        target="torch==2.13.0",
        budget_seconds=60.0,
        started_at="2026-01-01T00:00:00+00:00",
        tiebench="0",
        command="",
        options="--fault x",
    )


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


def test_the_forecast_learns():
    forecast = schedule.Forecast()
    before = forecast.case(CLEAN, starts=False)
    for seconds in (1.0, 2.0, 30.0):
        forecast.add(CLEAN, seconds, startup=0.0)
    forecast.add(Case("deepspeed"), 7.0, startup=5.0)
    assert before > 0
    assert forecast.case(CLEAN, starts=False) == 2.0
    assert forecast.case(CLEAN, starts=True) == 7.0
    assert forecast.all([CLEAN, Case("deepspeed", dp=2)], up=[2]) == 2.0 + 7.0 + 5.0
    forecast.add(CLEAN, 2.0, startup=0.0, broke=True)  # one of five
    assert forecast.all([CLEAN], up=[2]) == 2.0 + 5.0 / 5


def test_plans_are_nested_and_every_selection_has_cases():
    smaller: set[Case] = set()
    for plan in plans.PLANS.values():
        assert smaller <= set(plan.cases), f"{plan.name} lacks cases of the plan before"
        assert len(set(plan.cases)) == len(plan.cases)
        smaller = set(plan.cases)
        for selection in plan.all_selections():
            assert selection.cases, f"{plan.name}: {selection.reason}"


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
