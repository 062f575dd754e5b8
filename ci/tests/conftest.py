"""Sessions and processes for the tests of this room. Ranks are real; only the path under test misbehaves."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from ci import records
from ci.forkserver import ForkServer, Options
from ci.ranks import Settings, clean_environment, module_command
from ci.records import RunRow
from ci.session import Plan, Session
from ci.subject import Patch, Subject

ROOT = Path(__file__).resolve().parent.parent.parent
MISBEHAVE = Path(__file__).with_name("misbehave.py")


@pytest.fixture
def misbehaving() -> Subject:
    """The hand-written path as `misbehave.py` makes it."""
    return Subject(patch=Patch.read(MISBEHAVE))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """One fork server for all tests that do not care about it: importing takes seconds."""
    command, extra = module_command("ci.forkserver")
    options = Options(paths=("deepspeed", "handwritten"))
    log = tmp_path_factory.mktemp("forkserver") / "forkserver.log"
    started = ForkServer.start(command, clean_environment() | extra, options, log)
    assert started.wait_ready(300.0), log.read_text()
    yield started
    started.close()


@pytest.fixture
def session(tmp_path: Path, misbehaving: Subject, server: ForkServer) -> Iterator[Callable[..., Session]]:
    """Opens sessions over misbehaving ranks, and ends them."""
    opened: list[Session] = []

    def open_session(**settings: object) -> Session:
        directory = tmp_path / f"run{len(opened)}"
        given = {"device": "cpu", **settings}
        opened.append(Session(directory, Plan("test", ()), misbehaving, Settings(**given), server=server))  # type: ignore[arg-type]
        return opened[-1]

    yield open_session
    for one in opened:
        one.close("complete", 0)


def command(*arguments: str) -> list[str]:
    """The command line in a process of its own."""
    return [sys.executable, "-m", "ci.cli", *arguments]


def environment() -> dict[str, str]:
    """Environment for `command`: this very source tree."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "CUDA_VISIBLE_DEVICES": ""}


def tiebench(*arguments: str, cwd: Path, **options: object) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        command(*arguments),
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        **options,
    )


def run_row(cases: list[str]) -> RunRow:
    """First row of a log made by hand."""
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


def wait_until(condition: Callable[[], bool], what: str, limit: float = 120.0) -> None:
    """Wait for something that must come; the limit is only there to end a broken test."""
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.05)


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """All descendants of a process."""
    return psutil.Process(process.pid).children(recursive=True)


def assert_gone(processes: list[psutil.Process]) -> None:
    """No process of these is left (a zombie that its new parent has yet to reap is gone)."""

    def gone(process: psutil.Process) -> bool:
        try:
            return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    wait_until(lambda: all(map(gone, processes)), "the end of all ranks", 30.0)
