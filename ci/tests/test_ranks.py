"""Ranks that hang, raise, die and refuse, with real processes."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from ci import ranks as ranks_module
from ci import worker
from ci.channel import Failed
from ci.ranks import Outcome, bound, ended
from ci.records import read_run
from ci.tests import misbehave_seeds as seeds
from suites.cases import Case

CLEAN = Case("handwritten", layers=1)
ALONE = Case("handwritten", layers=1, tp=1)


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "GRACE", 1.0)


def pids(session, case=CLEAN):
    return session.sets[case.world_size].pids()


def test_a_set_serves_many_cases_and_is_replaced_after_each_kind_of_failure(session):
    s = session(case_limit=60.0)
    first = s.run(CLEAN)
    assert (first.status, first.verdict) == ("finished", "rounding"), first.evidence
    assert first.startup_seconds > 0
    assert first.tokens_per_second == pytest.approx(CLEAN.tokens_per_step / first.seconds_per_step)
    before = pids(s)
    second = s.run(CLEAN.but(head="row"))
    assert second.verdict == "rounding"
    assert second.startup_seconds == 0
    assert pids(s) == before, "the set was not kept"

    old = [psutil.Process(pid) for pid in before]
    raised = s.run(CLEAN.but(seed=seeds.ONE_RAISES))
    assert (raised.status, raised.verdict) == ("finished", "crash")
    assert "rank 1 raised RuntimeError in 'step 1 update': boom on one rank only" in raised.evidence
    assert "misbehave.py:" in raised.evidence
    assert "rank 0 " in raised.evidence
    assert "Traceback" in raised.stacks
    assert not any(p.is_running() for p in old), "ranks of a failed set live on"

    killed = s.run(CLEAN.but(seed=seeds.KILLED))
    assert (killed.status, killed.verdict) == ("finished", "crash")
    assert killed.evidence.startswith("rank 1 was killed by SIGKILL"), killed.evidence

    refused = s.run(CLEAN.but(seed=seeds.REFUSES))
    assert (refused.status, refused.verdict) == ("finished", "refused")
    assert refused.evidence.startswith(
        "NotImplementedError: row-parallel heads are not supported for this model (ci/tests/misbehave.py:"
    )
    assert "second paragraph" not in refused.evidence

    one = s.run(CLEAN.but(seed=seeds.ONE_REFUSES))
    assert (one.status, one.verdict) == ("finished", "crash"), "a refusal on one rank only is none"
    assert "rank 0 raised NotImplementedError" in one.evidence

    again = s.run(CLEAN)
    assert again.verdict == "rounding"
    assert again.attempt == 2
    assert not set(pids(s)) & set(before)


def test_a_hang_is_ended_and_says_where_each_rank_was(session):
    s = session(case_limit=6.0)
    assert s.run(CLEAN).verdict == "rounding"
    record = s.run(CLEAN.but(seed=seeds.HANG))
    assert (record.status, record.verdict) == ("timeout", "hang")
    assert "no result within 6 s" in record.evidence
    assert "ranks 0, 1 are in 'step 2 update'" in record.evidence
    assert "stuck_here" in record.stacks
    assert "in listen" not in record.stacks
    assert record.wall_seconds >= 6.0
    assert s.run(CLEAN).verdict == "rounding"


def test_a_hang_in_native_code_that_holds_the_interpreter_lock(session):
    s = session(case_limit=4.0)
    record = s.run(ALONE.but(seed=seeds.NATIVE))
    assert (record.status, record.verdict) == ("timeout", "hang")
    assert "bad_step" in record.stacks, "no stacks from a rank that cannot run Python"


@pytest.mark.parametrize(
    ("seed", "text"),
    [
        (seeds.EXITS, "rank 0 ended with exit code 7"),
        (seeds.SLIP, "rank 0 raised ValueError in 'build': too many values to unpack"),
        (seeds.LATE_REFUSAL, "rank 0 raised NotImplementedError in 'step 1 update': too late to refuse"),
    ],
)
def test_what_is_a_crash(session, seed, text):
    s = session()
    record = s.run(ALONE.but(seed=seed))
    assert (record.status, record.verdict) == ("finished", "crash")
    assert text in record.evidence


def test_a_rejected_configuration_is_a_refusal(session):
    pytest.importorskip("pydantic")
    record = session().run(ALONE.but(seed=seeds.INVALID))
    assert record.verdict == "refused", record.evidence
    assert "stage" in record.evidence


def test_sets_of_two_sizes_live_side_by_side(session):
    s = session()
    assert s.run(CLEAN).verdict == "rounding"
    assert s.run(ALONE).status == "finished"
    both = pids(s), pids(s, ALONE)
    assert s.run(CLEAN).startup_seconds == 0
    assert s.run(ALONE).startup_seconds == 0
    assert (pids(s), pids(s, ALONE)) == both


def test_strangers_at_the_door_are_turned_away(session):
    s = session()
    assert s.run(ALONE).status == "finished"
    port = s.sets[1]._listener.getsockname()[1]
    for greeting in (b"GET / HTTP/1.1\r\n\r\n", json.dumps(_hello("wrong")).encode() + b"\n"):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(greeting)
            assert s.run(ALONE).status == "finished"


def _hello(token: str) -> dict[str, object]:
    return {"kind": "hello", "token": token, "rank": 0, "world_size": 1, "pid": 1, "host": "here"}


def test_the_precisions_of_a_cpu_are_the_same_everywhere_unless_the_user_chooses(monkeypatch):
    ask = [sys.executable, "-c", "import torch; print(torch.ops.mkldnn._is_mkldnn_fp16_supported())"]
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    theirs = ranks_module.clean_environment()
    assert subprocess.run(ask, env=theirs, capture_output=True, text=True, check=True).stdout == "False\n"
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert ranks_module.clean_environment()["ONEDNN_MAX_CPU_ISA"] == "AVX2"


def test_torchrun_starts_the_same_worker(session):
    s = session(launcher="torchrun", case_limit=6.0)
    assert s.run(CLEAN).verdict == "rounding"
    processes = [psutil.Process(pid) for pid in pids(s)]
    hang = s.run(CLEAN.but(seed=seeds.HANG))
    assert hang.verdict == "hang"
    assert "stuck_here" in hang.stacks
    psutil.wait_procs(processes, timeout=20)
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


def test_ranks_that_somebody_else_starts(session):
    import subprocess

    said: list[str] = []
    started: list[subprocess.Popen[bytes]] = []

    def say(text: str) -> None:
        said.append(text)
        command = text.splitlines()[-1].strip()
        started.append(subprocess.Popen(command, shell=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))

    s = session(launcher="external", say=say, case_limit=6.0)
    try:
        assert s.run(CLEAN).verdict == "rounding"
        assert "TIEBENCH_CONTROL=" in said[0]
        hang = s.run(CLEAN.but(seed=seeds.HANG))
        assert hang.verdict == "hang"
        assert "stuck_here" in hang.stacks, "stacks of ranks out of reach of signals must come by asking"
        assert started[0].wait(60) != 0, "the ranks outlived their supervisor's connection"
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_the_log_of_a_chatty_rank_is_bounded(tmp_path: Path):
    log = tmp_path / "rank0.log"
    log.write_bytes(b"first\n" + b"x" * ranks_module.LOG_LIMIT + b"\nlast\n")
    with open(log, "ab", buffering=0) as writer:
        bound(log)
        writer.write(b"after\n")
    data = log.read_bytes()
    assert len(data) < ranks_module.LOG_LIMIT / 2
    assert data.startswith(b"first\n")
    assert data.endswith(b"\nlast\nafter\n")
    assert b"cut by tiebench" in data


def test_the_first_cause_is_named_and_not_its_consequence():
    gone = _failed("torch.distributed.DistBackendError", "[gloo] Connection closed by peer [127.0.0.1]:1234")
    cause = _failed("KeyError", "'lm_head'")
    outcome = Outcome(1.0, {}, {0: gone, 1: cause}, {}, False, {0: "", 1: ""})
    assert outcome.primary == (1, cause)
    only = Outcome(1.0, {}, {0: gone}, {}, False, {0: "", 1: ""})
    assert only.primary == (0, gone)


def _failed(kind: str, message: str) -> Failed:
    return Failed(phase="build", type=kind, message=message, where="", refusal=False, traceback="")


def test_how_processes_end():
    assert "SIGKILL" in ended(-9)
    assert "memory" in ended(137)
    assert ended(3) == "ended with exit code 3"


def test_only_a_meant_exception_is_a_refusal():
    def caught(function):
        try:
            function()
        except Exception as error:  # noqa: BLE001
            return error
        raise AssertionError

    def meant():
        raise ValueError("vocabulary must divide")

    def slip():
        int("three")

    assert worker.is_refusal(caught(meant))
    assert not worker.is_refusal(caught(slip))
    assert not worker.is_refusal(caught(lambda: {}["key"]))


def test_records_of_failed_ranks_read_back(session):
    s = session()
    s.run(ALONE.but(seed=seeds.SLIP))
    s.close("complete", 1)
    run = read_run(s.directory)
    assert run.end is not None
    assert run.end.exit_code == 1
    assert run.records[0].stacks
    assert (s.directory / "environment.json").is_file()
