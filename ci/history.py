"""What earlier runs say: how long each case took here, and what became of it last time.

Read from the run directories directly under one root (`runs/`, or wherever the new run's directory is). Of each run one
short summary is derived from `events.jsonl` and kept beside it as `history.json`; it counts only while size and time of
`events.jsonl` are those that it was derived from, so that a damaged, old or foreign one is derived anew, and one that
cannot be written costs time only. Runs with a fault or a patch say nothing of an unmodified run and are left out; times
count on the same class of machine only (kind of device, CPU model, usable cores).
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from ci import environment, records
from ci.pieces import PIECES
from ci.records import CASE_ID, ENVIRONMENT, EVENTS, LogError, Run

SUMMARY = "history.json"
VERSION = 2  # of the summary's form
NEWEST = 60  # runs that count
LARGEST = 256 * 2**20  # bytes of a file that is read at all
LONGEST_ID = 1000  # characters of a case id
LONGEST = 1e7  # seconds of anything

_Seconds = Annotated[float, msgspec.Meta(ge=0, le=LONGEST)]


class Line(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One case of one run.

    Args:
        ranks: seconds on the ranks, start-up not included; None where it was not measured.
        judge: seconds of judging, runs at higher precisions included; None where there was nothing to judge.
        startup: seconds until its ranks were up; 0 where they were.
    """

    case: str
    target: str
    status: records.Status
    verdict: records.Verdict | None = None
    green: bool = False
    ranks: _Seconds | None = None
    judge: _Seconds | None = None
    startup: _Seconds = 0.0
    started_at: str = ""

    @property
    def ran(self) -> bool:
        """It came to its end: its seconds tell how long the case takes."""
        return self.status == "finished" and self.verdict not in ("crash", "hang") and self.ranks is not None

    @property
    def outcome(self) -> str:
        """What became of it, in one word or two."""
        return str(self.verdict) if self.status == "finished" else self.status.replace("_", " ")


class RunSummary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is kept of one run.

    Args:
        size, mtime_ns: of the `events.jsonl` that this was derived from.
        wall_seconds: of the run's own, all its parts together where it was resumed, or to the last thing that a killed
            run wrote; None where nothing tells, and of merged runs.
        end: why it ended; None where it was killed.
        machine: class of the machine; None where `environment.json` does not say.
        modified: with a fault or a patch.
    """

    version: int
    size: int
    mtime_ns: int
    plan: str
    started_at: str
    tiebench: str
    budget_seconds: float
    wall_seconds: _Seconds | None = None
    end: Literal["complete", "budget", "interrupted", "error"] | None = None
    machine: str | None = None
    modified: bool = False
    cases: tuple[Line, ...] = ()

    @property
    def complete(self) -> bool:
        """It ended by itself, and every planned case ran or was left out on purpose."""
        return self.end == "complete" and all(line.status in ("finished", "timeout", "skipped") for line in self.cases)

    @property
    def began(self) -> datetime:
        """When it started, in UTC."""
        return instant(self.started_at)


_decoder = msgspec.json.Decoder(RunSummary)


@dataclass(frozen=True)
class Past:
    """What became of a case when it was planned last, and the time before; None where it was not planned twice."""

    last: Line
    before: Line | None = None


@dataclass(frozen=True)
class History:
    """Unmodified runs, the oldest first.

    Args:
        machine: class of the machine that times are wanted for.
        notes: one line for each directory that could not be read.
    """

    machine: str = ""
    runs: tuple[RunSummary, ...] = ()
    notes: tuple[str, ...] = field(default=(), compare=False)

    @cached_property
    def here(self) -> tuple[RunSummary, ...]:
        """The runs on this class of machine."""
        return tuple(run for run in self.runs if run.machine == self.machine)

    @cached_property
    def times(self) -> dict[str, list[Line]]:
        """Case id -> its runs to the end on this class of machine, the oldest first; each counts once, also where a
        merged run repeats it."""
        found: dict[str, dict[str, Line]] = {}
        for run in self.here:
            for line in run.cases:
                if line.ran:
                    found.setdefault(line.case, {}).setdefault(line.started_at or run.started_at, line)
        return {case: list(lines.values()) for case, lines in found.items()}

    def past(self, targets: Mapping[str, str] | None = None) -> dict[str, Past]:
        """Case id -> what became of it last, on any machine.

        Args:
            targets: path -> build to be tested: runs of the same build go before newer ones of another.
        """
        found: dict[str, list[Line]] = {}
        for run in self.runs:
            for line in run.cases:
                if line.status != "skipped":
                    found.setdefault(line.case, []).append(line)
        result = {}
        for case, lines in found.items():
            target = (targets or {}).get(case.partition(":")[0])
            same = [line for line in lines if line.target == target] or lines
            judged = [line for line in same[:-1] if line.status == "finished"]
            result[case] = Past(same[-1], judged[-1] if judged else None)
        return result


def read(root: Path, machine: str, *, but: Path | None = None, newest: int = NEWEST) -> History:
    """The newest runs under a root. Never raises for what is in there.

    Args:
        machine: as `machine_here` gives it.
        but: run directory that does not count (the new run's own).
        newest: how many runs count, by the time when their record log was written last.
    """
    notes: list[str] = []
    found: list[RunSummary] = []
    own = _resolved(but) if but else None
    candidates = sorted(_logs(root, notes), key=lambda item: (item[1].st_mtime_ns, item[0].name), reverse=True)
    for directory, events in candidates[: 4 * newest]:
        if len(found) == newest:
            break
        if own and _resolved(directory) == own:
            continue
        try:
            summary = _cached(directory, events) or _derived(directory, events)
        except LogError as error:
            notes.append(str(error))
        else:
            if not summary.modified:
                found.append(summary)
    found.sort(key=lambda run: run.began)
    return History(machine, tuple(found), tuple(notes))


def machine_here(device: str = "auto") -> str:
    """Class of this machine, as `machine_of` says it of a run's environment; asks neither torch nor a driver.

    Args:
        device: as `tiebench run --device` has it.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count()
    kind = "cuda" if device != "cpu" and Path("/proc/driver/nvidia").exists() else "cpu"
    return _machine(kind, environment._cpu()["model"], cores)


def machine_of(found: Any) -> str | None:
    """Class of the machine that an `environment.json` tells of; None where it does not say."""
    try:
        kind, machine = found["device"]["type"], found["machine"]
        return _machine(kind, machine["cpu"]["model"], machine["usable_cores"])
    except (KeyError, TypeError):
        return None


def instant(text: str) -> datetime:
    """Time from its ISO 8601 spelling; without a zone it is UTC.

    Raises:
        ValueError: it is none.
    """
    found = datetime.fromisoformat(re.sub(r"Z$", "+00:00", text))
    return found if found.tzinfo else found.replace(tzinfo=timezone.utc)


def _machine(kind: object, model: object, cores: object) -> str:
    return " ".join(f"{kind}, {model}, {cores} cores".split())[:200]


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError):  # a loop of links
        return path.absolute()


def _logs(root: Path, notes: list[str]) -> Iterator[tuple[Path, os.stat_result]]:
    """Directories under the root that have a record log, with its size and time."""
    try:
        directories = sorted(entry.name for entry in os.scandir(root))
    except FileNotFoundError:
        return
    except OSError as error:
        notes.append(f"{root}: {error.strerror or error}")
        return
    for name in directories:
        directory = root / name
        try:
            events = (directory / EVENTS).stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            notes.append(f"{directory}: {error.strerror or error}")
            continue
        if not stat.S_ISREG(events.st_mode):  # a FIFO would never answer
            notes.append(f"{directory}: {EVENTS} is no file")
        elif events.st_size > LARGEST:
            notes.append(f"{directory}: {EVENTS} has {events.st_size / 2**20:.0f} MiB, more than is read")
        else:
            yield directory, events


def _read(path: Path) -> bytes | None:
    """Content of a file of bearable size; None where there is none."""
    try:
        found = path.stat()
        return path.read_bytes() if stat.S_ISREG(found.st_mode) and found.st_size <= LARGEST else None
    except OSError:
        return None


def _cached(directory: Path, events: os.stat_result) -> RunSummary | None:
    data = _read(directory / SUMMARY)
    if data is None:
        return None
    try:
        found = _decoder.decode(data)
        good = all(_sound(line) for line in found.cases) and found.began is not None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError, OverflowError):
        return None
    same = (found.version, found.size, found.mtime_ns) == (VERSION, events.st_size, events.st_mtime_ns)
    return found if good and same else None


def _sound(line: Line) -> bool:
    return len(line.case) <= LONGEST_ID and CASE_ID.fullmatch(line.case) is not None


def _derived(directory: Path, events: os.stat_result) -> RunSummary:
    """Summary of a run from its record log.

    Raises:
        LogError: the log cannot be read.
    """
    run = records.read_run(directory)
    data = _read(directory / ENVIRONMENT)
    try:
        found = msgspec.json.decode(data) if data else None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        found = None
    try:
        summary = summarize(run, machine_of(found), size=events.st_size, mtime_ns=events.st_mtime_ns)
    except ValueError as error:
        raise LogError(f"{directory}: {error}") from None
    with contextlib.suppress(LogError):  # somebody else's directory, a full disk: derived anew next time
        records.write_whole(directory / SUMMARY, msgspec.json.encode(summary))
    return summary


def summarize(run: Run, machine: str | None, *, size: int = 0, mtime_ns: int = 0) -> RunSummary:
    """Summary of a run as read back.

    Raises:
        ValueError: it does not say when it started.
    """
    lines = tuple(_line(record) for record in run.records)
    instant(run.plan.started_at)
    before = sum(s.end.phases.get("provisioning", 0.0) for s in run.segments if s.end)
    merged = (run.directory / PIECES).exists()  # its parts ran at the same time, perhaps on several machines
    wall = None if merged or run.seconds is None else _seconds(run.seconds - before)
    return RunSummary(
        version=VERSION,
        size=size,
        mtime_ns=mtime_ns,
        plan=run.plan.plan,
        started_at=run.plan.started_at,
        tiebench=run.plan.tiebench,
        budget_seconds=run.plan.budget_seconds,
        wall_seconds=wall,
        end=run.end.reason if run.end else None,
        machine=machine,
        modified=any(record.fault or record.patch for record in run.records) or _modified(run.plan.options),
        cases=tuple(line for line in lines if _sound(line)),
    )


def _modified(options: str) -> bool:
    """The options of a run that has no record yet name a fault or a patch."""
    return any(word.partition("=")[0] in ("--fault", "--patch") for word in options.split())


def _line(record: records.Record) -> Line:
    judge = _seconds(record.judge_seconds)
    wall = _seconds(record.wall_seconds)
    ran = record.status in ("finished", "timeout") and wall is not None
    return Line(
        case=record.case,
        target=record.target,
        status=record.status,
        verdict=record.verdict,
        green=records.expected(record),
        ranks=max(0.0, wall - (judge or 0.0)) if ran and wall is not None else None,
        judge=judge,
        startup=_seconds(record.startup_seconds) or 0.0,
        started_at=record.started_at or "",
    )


def _seconds(value: float | None) -> float | None:
    """A time that can be one."""
    return value if value is not None and math.isfinite(value) and 0 <= value <= LONGEST else None
