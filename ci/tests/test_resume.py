"""A run that was cut short goes on: each case gets its result once, whatever cut it."""

from __future__ import annotations

import msgspec
import pytest

from ci import records
from ci.exit_codes import FAILED, OK
from ci.records import FinalRow, LogError, Record, RunRow, StartedRow, read_run
from ci.subject import SetupError, Subject
from ci.supervisor import resume, run
from suites.cases import Case
from suites.faults import FAULTS

ALONE = Case("handwritten", layers=1, tp=1)
FAULT = next(fault for fault in FAULTS.values() if fault.path == "handwritten" and "hang" not in fault.caught_by)
CASES = [ALONE.but(seed=seed) for seed in range(4)]


def results(directory):
    """Records as they were written, those of cases that were not run left out."""
    rows = [msgspec.json.decode(line) for line in (directory / records.EVENTS).read_bytes().splitlines()]
    return [row["record"]["case"] for row in rows if row["event"] == "final" and row["record"]["status"] != "not_run"]


def killed_run(directory, *, ran=(), opened=(), verdict="rounding"):
    """A run directory as `run` leaves it when it is killed: some cases ran, some were open."""
    first = RunRow(
        schema=records.SCHEMA,
        run_id=directory.name,
        plan="mine",
        cases=tuple(case.id for case in CASES),
        target=Subject().target("handwritten"),
        targets={"handwritten": Subject().target("handwritten")},
        budget_seconds=100.0,
        started_at="2026-01-01T00:00:00+00:00",
        tiebench="0.1.0",
        command="tiebench run",
    )
    log = records.RecordLog(directory, first)
    for case in ran:
        log.append(StartedRow(case=case.id, attempt=1, started_at="2026-01-01T00:00:01+00:00"))
        kept = {"case": case.id, "path": case.path, "target": first.target}
        done = Record(**kept, status="finished", verdict=verdict, wall_seconds=0.5)
        log.append(FinalRow(record=done))
    for case in opened:
        log.append(StartedRow(case=case.id, attempt=1, started_at="2026-01-01T00:00:02+00:00"))
    log.close()


def test_what_the_budget_left_out_is_run(tmp_path, server):
    first = run(CASES, tmp_path / "r", budget=0.0, server=server)
    assert first.end.exit_code == FAILED
    assert {(r.status, r.reason) for r in first.records} == {("not_run", "budget")}
    whole = resume(tmp_path / "r", budget=100, server=server)
    assert {(r.status, r.verdict) for r in whole.records} == {("finished", "rounding")}
    assert whole.end.exit_code == OK
    assert sorted(results(tmp_path / "r")) == sorted(case.id for case in CASES)
    assert len(whole.segments) == 2
    with pytest.raises(LogError, match="nothing to resume"):
        resume(tmp_path / "r", server=server)


def test_finished_cases_are_not_run_again_and_open_ones_come_last_and_alone(tmp_path, server):
    killed_run(tmp_path / "r", ran=CASES[:1], opened=CASES[1:2])
    before = read_run(tmp_path / "r")
    assert (before.killed, before.suspects) == (True, (CASES[1].id,))
    whole = resume(tmp_path / "r", server=server)
    assert whole.end.exit_code == OK
    assert results(tmp_path / "r")[0] == CASES[0].id
    assert results(tmp_path / "r")[-1] == CASES[1].id
    assert sorted(results(tmp_path / "r")) == sorted(case.id for case in CASES)
    again = next(record for record in whole.records if record.case == CASES[1].id)
    assert (again.attempt, again.overlapped) == (2, False)


def test_a_case_that_takes_the_whole_run_with_it_is_given_up(tmp_path, server):
    killed_run(tmp_path / "s", ran=CASES[1:], opened=CASES[:1])
    log, _ = records.RecordLog.resume(
        tmp_path / "s",
        records.ResumedRow(resumed_at="2026-01-02T00:00:00+00:00", command="", budget_seconds=1.0, tiebench="0.1.0"),
    )
    log.append(StartedRow(case=CASES[0].id, attempt=2, started_at="2026-01-02T00:00:01+00:00"))
    log.close()
    whole = resume(tmp_path / "s", server=server)
    lost = next(record for record in whole.records if record.case == CASES[0].id)
    assert (lost.status, lost.reason) == ("lost", "given up")
    assert whole.end.exit_code == FAILED, "a case without a result is never green"
    assert len(results(tmp_path / "s")) == len(CASES)


def test_an_earlier_bad_result_keeps_the_run_red(tmp_path, server):
    killed_run(tmp_path / "r", ran=CASES[1:], verdict="bug")
    whole = resume(tmp_path / "r", server=server)
    assert [r.verdict for r in whole.records] == ["rounding", "bug", "bug", "bug"]
    assert whole.end.exit_code == FAILED


def test_a_run_with_a_fault_goes_on_with_it(tmp_path, server):
    faulty = Subject(fault=FAULT.name)
    cases = [Case.parse(FAULT.case), Case.parse(FAULT.case).but(seed=1)]
    run(cases, tmp_path / "r", budget=0.0, subject=faulty, server=server)
    assert "--fault" in read_run(tmp_path / "r").plan.options
    whole = resume(tmp_path / "r", budget=60, subject=faulty, server=server)
    assert {r.fault for r in whole.records} == {FAULT.name}
    assert {r.verdict for r in whole.records} == {"bug"}


def test_another_build_is_refused(tmp_path, server, monkeypatch):
    killed_run(tmp_path / "r", ran=CASES[:1])
    monkeypatch.setattr("ci.subject.importlib.metadata.version", lambda package: "1.0")
    before = (tmp_path / "r" / records.EVENTS).read_bytes()
    with pytest.raises(SetupError, match=r"its cases ran torch==.*, and here is torch==1\.0"):
        resume(tmp_path / "r", server=server)
    assert (tmp_path / "r" / records.EVENTS).read_bytes() == before
