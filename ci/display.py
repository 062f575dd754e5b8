"""Progress of a run for people: a bar on a terminal, one plain line a case everywhere else."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ci.records import Record, expected
from suites.cases import Case

DAY = 86400.0
PIPED_WIDTH = 140  # columns where there is no terminal to ask: a log


def duration(seconds: float) -> str:
    """Seconds for people: ``41 s``, ``3 min 20 s``, ``2 h 5 min``."""
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    if whole < 2 * 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def process_age() -> float:
    """Seconds since this process began, imports included; 0 where that cannot be known."""
    try:
        with open("/proc/self/stat") as stream:
            begin = int(stream.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - begin
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0
    return age if 0.0 <= age < DAY else 0.0  # a time namespace has another origin


class _Patient(io.FileIO):
    """A file descriptor whose reader may go away (``| head``): what is written after that goes nowhere."""

    def write(self, data: Any, /) -> int:
        """Write bytes."""
        try:
            return super().write(data)
        except BrokenPipeError:
            discard(self.fileno())
            return len(data)


def discard(descriptor: int) -> None:
    """Send what is written to a file descriptor nowhere from now on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def prepare_output() -> None:
    """Make stdout and stderr of this process such that neither a closed or ended reader nor a character that their
    encoding lacks ends the program. A full disk still does (OSError)."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:  # closed: else the next file that is opened would get its number, and our output
            os.open(os.devnull, os.O_RDWR)
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        old = getattr(sys, name)
        with contextlib.suppress(OSError, AttributeError):
            old.flush()
        encoding = getattr(old, "encoding", None) or "utf-8"
        raw = _Patient(descriptor, "w", closefd=False)
        lines = descriptor == 2 or raw.isatty()
        buffered = io.BufferedWriter(raw)
        setattr(sys, name, io.TextIOWrapper(buffered, encoding, "backslashreplace", line_buffering=lines))


class Printer(Console):
    """A console whose reader may go away (``| head``) without ending the program, which is what rich would do."""

    def __init__(self, **options: Any):
        piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
        super().__init__(width=PIPED_WIDTH if piped else None, **options)

    def on_broken_pipe(self) -> None:
        """Print nowhere from now on."""
        self.quiet = True
        discard(sys.stdout.fileno())


class Display:
    """Hears of cases as they start and end. Trouble with printing never stops the run."""

    def __init__(self, total: int, console: Console | None = None):
        self.total, self.count = total, 0
        self.console = console or Printer(highlight=False)
        self.rest: float | None = None
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if self.console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, TextColumn("{task.fields[left]}"), console=self.console, transient=True)
            self._task = self._bar.add_task("starting", total=total, left="")

    def __enter__(self) -> Display:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar:
            with contextlib.suppress(OSError):
                self._bar.stop()

    def say(self, text: str) -> None:
        """One line of text."""
        with contextlib.suppress(OSError):
            self.console.print(text, markup=False, soft_wrap=True)

    def on_start(self, case: Case, number: int, rest: float | None) -> None:
        """A case starts; `rest`: seconds that all after it will take."""
        self.rest = rest
        if self._bar and self._task is not None:
            left = f"about {duration(rest)} left" if rest is not None else ""
            with contextlib.suppress(OSError):
                self._bar.update(self._task, description=escape(case.id), left=left)

    def on_record(self, record: Record) -> None:
        """A case has its record."""
        self.count += 1
        word = record.verdict if record.verdict and record.status in ("finished", "timeout") else record.status
        took = f" {record.wall_seconds:.2f} s" if record.wall_seconds is not None else ""
        started = f" after {record.startup_seconds:.1f} s of start-up" if record.startup_seconds else ""
        text = f"[{self.count}/{self.total}] {record.case} {word}{took}{started}"
        if self.rest is not None and self.count < self.total and not self._bar and record.status != "not_run":
            text += f", about {duration(self.rest)} left"
        if not expected(record):
            text += f"\n    {record.evidence}"
        with contextlib.suppress(OSError):
            self.console.print(text, markup=False, soft_wrap=True, style="" if expected(record) else "red")
            if self._bar and self._task is not None:
                self._bar.update(self._task, completed=self.count)
