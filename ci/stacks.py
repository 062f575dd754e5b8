"""Stacks of stuck processes, Python and native, by py-spy: from outside, so that the process need not be able to run.

What was found by trying (py-spy 0.4, Linux):
- A process that is stopped (SIGSTOP) cannot be suspended once more: py-spy reads it without, which loses the native
  frames but nothing else. It is as stopped afterwards as before.
- A loop in C that holds the interpreter lock, a lock, a sleep, a collective: 0.1 to 0.8 s a process, native frames too.
- py-spy suspends by ptrace; the kernel lets go of the process when py-spy ends, also when it is killed.

Where ``kernel.yama.ptrace_scope`` is 1 (Ubuntu), a process may be looked at by its ancestors only, or when it said so
itself: `allow`. Where py-spy is missing or not permitted all the same (a larger ptrace_scope, containers without
CAP_SYS_PTRACE), `Stack.note` says so, and faulthandler inside the rank remains (`ci.ranks`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

LONGEST = 16 * 2**20  # bytes of py-spy's answer
LONGEST_NAME = 100  # characters of a C++ function's name
MOST_FRAMES = 60  # of one thread


class Frame(msgspec.Struct, frozen=True):
    """One frame; native ones have a `module` (the library) and line 0."""

    name: str
    filename: str
    line: int = 0
    module: str | None = None
    short_filename: str | None = None

    @property
    def native(self) -> bool:
        """Compiled code."""
        return self.module is not None

    @property
    def place(self) -> str:
        """``stuck (ci/x.py:12)`` or ``sleep (libc.so.6)``."""
        file = self.short_filename or self.filename
        return f"{self.short} ({file if self.native else f'{file}:{self.line}'})"

    @property
    def short(self) -> str:
        """Name of the function; one of C++ without its arguments."""
        name = self.name.rpartition("<locals>.")[2]
        if self.native:
            name = name.replace("(anonymous namespace)::", "").partition("(")[0].partition("<")[0] or name
        return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"


class Thread(msgspec.Struct, frozen=True):
    """One thread; `frames` from the innermost outwards."""

    thread_name: str | None = None
    os_thread_id: int | None = None
    active: bool = False
    owns_gil: bool = False
    frames: list[Frame] = []

    @property
    def python(self) -> Frame | None:
        """Innermost frame of Python code."""
        return next((frame for frame in self.frames if not frame.native), None)

    def __str__(self) -> str:
        """As py-spy prints it."""
        what = ("active" if self.active else "idle") + ("+gil" if self.owns_gil else "")
        lines = [f"    {frame.place}" for frame in self.frames[:MOST_FRAMES]]
        more = [f"    … {len(self.frames) - MOST_FRAMES} more"] if len(self.frames) > MOST_FRAMES else []
        return "\n".join([f"Thread {self.thread_name or self.os_thread_id} ({what})", *lines, *more])


@dataclass(frozen=True)
class Stack:
    """Stacks of one process.

    Args:
        threads: the main thread first; empty where nothing could be read.
        native: native frames are among them.
        note: why something is missing; empty otherwise.
    """

    pid: int
    threads: tuple[Thread, ...] = ()
    native: bool = False
    note: str = ""

    @property
    def main(self) -> Thread | None:
        """The main thread."""
        named = [t for t in self.threads if t.thread_name == "MainThread" or t.os_thread_id == self.pid]
        return named[0] if named else None

    def text(self, hide: Collection[str] = ()) -> str:
        """All threads but those whose name is in `hide`, for people."""
        shown = [str(thread) for thread in self.threads if thread.thread_name not in hide]
        return "\n".join([*([f"({self.note})"] if self.note else []), *shown])


def allow() -> None:
    """Let any process of this user look into this one; where Linux has no such restriction, nothing happens."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)  # PR_SET_PTRACER, PR_SET_PTRACER_ANY


def find() -> str | None:
    """py-spy's program: that of this Python's environment, else the one on the search path."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")


def take(pids: Mapping[int, int], limit: float = 10.0, program: str | None = None) -> dict[int, Stack]:
    """Stacks of processes of this machine: key (rank) -> stack.

    All are asked at once and within `limit` seconds; never raises, leaves no process stopped and no py-spy alive.
    """
    program = program or find()
    if program is None:
        return {key: Stack(pid, note="no stacks: py-spy is not installed") for key, pid in pids.items()}
    deadline = time.monotonic() + limit
    stopped = {key for key, pid in pids.items() if _is_stopped(pid)}
    first = _ask_all(program, {key: pid for key, pid in pids.items() if key not in stopped}, True, deadline)
    again = {key: pid for key, pid in pids.items() if key in stopped or not first[key].threads}
    # Without native frames and without suspending: what works where ptrace does not suspend, and for half the time.
    second = _ask_all(program, again, False, max(deadline, time.monotonic() + limit / 2))
    return {key: second[key] if key in again and second[key].threads else first.get(key) or second[key] for key in pids}


def _ask_all(program: str, pids: Mapping[int, int], native: bool, deadline: float) -> dict[int, Stack]:
    with contextlib.ExitStack() as stack:
        asked = {}
        for key, pid in pids.items():
            out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            asked[key] = out, err, stack.enter_context(_asking(program, pid, native, out, err))
        return {key: _answer(pids[key], native, *asked[key], deadline) for key in asked}


@contextlib.contextmanager
def _asking(
    program: str, pid: int, native: bool, out: IO[bytes], err: IO[bytes]
) -> Iterator[subprocess.Popen[bytes] | OSError]:
    """A running py-spy, which does not outlive this (when it ends, the kernel lets go of the process)."""
    how = "--native" if native else "--nonblocking"
    command = [program, "dump", "--json", how, "--pid", str(pid)]
    environment = {**os.environ, "RUST_BACKTRACE": "0"}
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, start_new_session=True
        )
    except OSError as error:
        yield error
        return
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _answer(  # noqa: PLR0917
    pid: int, native: bool, out: IO[bytes], err: IO[bytes], process: subprocess.Popen[bytes] | OSError, deadline: float
) -> Stack:
    if isinstance(process, OSError):
        return Stack(pid, note=f"no stacks: py-spy cannot be started: {process.strerror}")
    try:
        code = process.wait(max(deadline - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        return Stack(pid, note="no stacks: py-spy did not answer in time")
    for stream in (out, err):
        stream.seek(0)
    if code:
        return Stack(pid, note=f"no stacks: {_reason(err.read(LONGEST).decode(errors='replace'), code)}")
    try:
        threads = msgspec.json.decode(out.read(LONGEST), type=list[Thread])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return Stack(pid, note="no stacks: py-spy's answer cannot be read")
    threads.sort(key=lambda thread: (thread.os_thread_id != pid, thread.os_thread_id or 0))
    return Stack(pid, tuple(threads), native, "" if native else "Python frames only, read without suspending")


def _reason(text: str, code: int) -> str:
    """Why py-spy failed, in one line; its own message ends with the cause."""
    if "permission" in text.lower():
        return "py-spy is not permitted to look at it (ptrace)"
    lines = [line.strip() for line in text.partition("Stack backtrace")[0].splitlines() if line.strip()]
    if code < 0:
        return f"py-spy was killed by signal {-code}"
    return (
        f"py-spy failed: {re.sub(r'^[0-9]+: ', '', lines[-1])[:200]}"
        if lines
        else f"py-spy ended with exit code {code}"
    )


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False
