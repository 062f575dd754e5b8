"""Reports while a run is going: they come, say so, are whole, and end with the run."""

from __future__ import annotations

import os
import time

import psutil

from ci import periodic, supervisor
from ci.periodic import Periodic
from ci.ranks import Settings
from ci.tests.conftest import wait_until
from ci.tests.earlier import write_run
from suites.cases import Case

ALONE = Case("handwritten", layers=1, tp=1)


def test_a_report_comes_while_the_run_is_going_and_the_last_one_is_the_runs_own(tmp_path, server):
    out, seen = tmp_path / "r", []

    def on_record(record):
        with_report = (out / "report.md").exists()
        seen.append((out / "report.md").read_text() if with_report else "")
        if not with_report:
            time.sleep(0.3)

    cases = [ALONE.but(seed=seed) for seed in range(30)]
    settings = Settings(device="cpu")
    run = supervisor.run(cases, out, settings=settings, on_record=on_record, report_every=0.1, server=server)
    assert run.end.reason == "complete"
    during = [text for text in seen if text]
    assert during, "no report came during the run"
    assert "going" in during[0] or "running" in during[0]
    assert not list(out.glob(".*.tmp"))
    assert not [p for p in psutil.Process().children(recursive=True) if "ci.periodic" in " ".join(p.cmdline())]


def test_a_report_that_takes_too_long_is_ended_and_what_it_left_is_taken_away(tmp_path, monkeypatch):
    directory = write_run(tmp_path / "r", {ALONE: "rounding"})
    sleeper = "import time; time.sleep(1000)"
    monkeypatch.setattr(periodic, "module_command", lambda name: (["python3", "-c", sleeper], {}))
    reports = Periodic(directory, 0.05, limit=0.3)
    wait_until(lambda: reports.poll() or reports._child is not None, "the report's process", 10.0)
    child = reports._child
    (directory / f".report.md.{child.pid}.tmp").write_text("half")
    wait_until(lambda: reports.poll() or child.poll() is not None, "its end", 10.0)
    assert child.returncode == -9
    assert reports.written == 0
    assert not list(directory.glob(".*.tmp"))


def test_none_where_nothing_is_new_and_none_after_the_end(tmp_path):
    directory = write_run(tmp_path / "r", {ALONE: "rounding"})
    reports = Periodic(directory, 0.05)
    wait_until(lambda: reports.poll() or reports.written == 1, "a report", 60.0)
    assert (directory / "report.md").stat().st_size > 100
    before = os.stat(directory / "report.md").st_mtime_ns
    for _ in range(20):
        reports.poll()
        time.sleep(0.02)
    assert reports._child is None, "nothing has been written since"
    reports.close()
    reports.poll()
    assert reports._child is None
    assert os.stat(directory / "report.md").st_mtime_ns == before


def test_a_directory_that_is_not_there_yet_and_one_that_cannot_be_reported_cost_nothing(tmp_path):
    reports = Periodic(tmp_path / "none", 0.01)
    time.sleep(0.02)
    reports.poll()
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "events.jsonl").write_text("no log\n")
    wait_until(lambda: reports.poll() or reports._child is not None, "the process", 10.0)
    child = reports._child
    child.wait(60)
    reports.poll()
    assert reports.written == 0
    reports.close()
