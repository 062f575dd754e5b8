"""What commands share: kinds of options, errors for people, choosing a plan and a directory, the report at the end."""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from ci import plans, records, schedule
from ci.display import Printer
from ci.exit_codes import USAGE
from ci.ranks import check_seconds
from suites.cases import Case

if TYPE_CHECKING:
    from suites.faults import Fault


EXIT_CODES = (
    "Exit codes: 0 all as expected; 1 something failed, is missing or was not run; 2 usage or set-up; "
    "130 interrupted by Ctrl-C, 143 by SIGTERM (the report is written all the same)."
)


class Format(str, Enum):
    """How `list` prints."""

    table = "table"
    json = "json"


class FlatFormat(str, Enum):
    """How `records` prints."""

    csv = "csv"
    json = "json"


class Launcher(str, Enum):
    """Where the ranks come from."""

    fork = "fork"
    spawn = "spawn"
    torchrun = "torchrun"
    external = "external"


def fail(message: str) -> NoReturn:
    """End with exit code 2 after one line."""
    say(message)
    raise typer.Exit(USAGE)


def given(param: typer.CallbackParam, value: str | None) -> str | None:
    """An option's text: an empty one, as an unset variable of a script leaves it, is no way to leave the option out."""
    if value is not None and not value.strip():
        fail(f"{param.opts[0]} is empty: give a value, or leave the option out")
    return value


def some(param: typer.CallbackParam, values: list[str] | None) -> list[str] | None:
    """Each of an option's texts, as `given`."""
    for value in values or ():
        given(param, value)
    return values


def seconds(param: typer.CallbackParam, value: float | None) -> float | None:
    """A limit in seconds: JSON and timers know no infinity."""
    if value is None:
        return None
    try:
        return check_seconds(param.opts[0], value, 0.0 if param.name in ("budget", "spent", "report_every") else 0.1)
    except ValueError as error:
        fail(str(error))


def plan_of(name: str) -> plans.Plan:
    """A shipped plan by its name."""
    if name not in plans.PLANS:
        fail(f"unknown plan {name!r}; one of {', '.join(plans.PLANS)}")
    return plans.PLANS[name]


def part_of(chosen: list[Case], part: str) -> list[Case]:
    """The cases of one shard."""
    found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", part)
    if not found:
        fail(f"--shard {part}: write it as I/N, for example 1/4")
    try:
        kept = schedule.shard(chosen, int(found[1]), int(found[2]))
    except ValueError as error:
        fail(f"--{error}")
    return kept or fail(f"no case is left to run: --shard {part} of {len(chosen)} cases is empty")


def fault_named(name: str) -> Fault:
    """A fault or harmless change by its name."""
    from suites.faults import FAULTS, HARMLESS, fault_of  # noqa: PLC0415

    try:
        return fault_of(name)
    except KeyError:
        fail(f"unknown fault {name!r}; one of {', '.join(sorted({**FAULTS, **HARMLESS}))}")


def default_out(name: str) -> Path:
    """A directory below ``runs`` that is not taken, by time and plan."""
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    for number in range(1, 100):
        directory = Path("runs") / (f"{stamp}-{name}" + (f"-{number}" if number > 1 else ""))
        if not directory.exists():
            return directory
    fail(f"runs/{stamp}-{name} is taken: give --out")


def check_out(directory: Path) -> None:
    """Refuse a directory that is in use before anything is installed; the record log checks again."""
    try:
        if directory.is_dir() and records.is_stillborn(directory):
            return
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            holds = (directory / records.EVENTS).is_file()
            what = "already holds a run" if holds else "is not an empty directory"
            hint = f", or go on with it: --resume {shlex.quote(str(directory))}" if holds else ""
            fail(f"--out {directory} {what}: choose another one{hint}")
    except OSError as error:
        fail(f"--out {directory}: {error.strerror or error}")


def report_on(directory: Path, console: Printer, code: int) -> int:
    """Print and write the report; the exit code, which a report that cannot be written makes 2."""
    from reports.load import load  # noqa: PLC0415
    from reports.summary import summarize  # noqa: PLC0415
    from reports.terminal import print_report  # noqa: PLC0415
    from reports.write import write  # noqa: PLC0415

    try:
        summary = summarize(load(directory))
        print_report(summary, console)  # first: it needs no disk
        write(summary)
        console.print(f"Report: {directory / 'report.md'}, {directory / 'report.html'}", markup=False, soft_wrap=True)
    except records.LogError as error:
        if code != USAGE:
            print(f"tiebench: {error}", file=sys.stderr)
        return USAGE
    return code or summary.exit_code


def say(line: str) -> None:
    """One line for people, to stderr."""
    with contextlib.suppress(OSError):
        print(f"tiebench: {' '.join(line.split())}", file=sys.stderr, flush=True)
