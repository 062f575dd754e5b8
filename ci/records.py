"""The record log: schema of `events.jsonl`, its durable writer, and its strict, tear-tolerant reader.

Write-ahead (rule 5 of the design): one `RunRow` before anything else, a `StartedRow` before each case and one
`FinalRow` after it, an `EndRow` at the end; each row is one JSON line, flushed and fsynced before the run goes on.
Whatever is killed, the rows that are there tell which cases finished, which one was lost and which were not run.

This module needs msgspec only: reports import it too.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

import msgspec

EVENTS = "events.jsonl"
ENVIRONMENT = "environment.json"
SCHEMA = 1

Status = Literal["finished", "timeout", "lost", "not_run", "skipped"]
Verdict = Literal["exact", "rounding", "bug", "inconclusive", "refused", "crash", "hang"]
GREEN: frozenset[str] = frozenset({"exact", "rounding"})


class LogError(Exception):
    """A run directory that cannot be written or read, said in one line for people."""


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all rows."""


class Finding(Row, frozen=True):
    """What one oracle says of one case.

    Args:
        oracle: name of the check.
        flagged: True when the check failed.
        evidence: one line for people: the number, the tensor, the step, the limit.
        error: size of the worst deviation, in the unit of `limit`; None for exact (yes/no) checks.
        limit: largest deviation that is still rounding; None for exact checks.
        unit: what error and limit are measured in ("sigma", "relative", …).
    """

    oracle: str
    flagged: bool
    evidence: str
    error: float | None = None
    limit: float | None = None
    unit: str | None = None


class Record(Row, frozen=True):
    """One case's whole result: one row of every report.

    Seconds are wall clock. `seconds_per_step` is the median over the steps after the first (which warms up);
    `tokens_per_second` counts the tokens of all data-parallel ranks. `error`, `limit` and `headroom` (limit / error)
    belong to the numeric check with the least headroom, named by `error_of`.
    """

    case: str
    path: str
    target: str
    status: Status
    verdict: Verdict | None = None
    oracle: str | None = None  # names of the oracles that flagged, joined by ", "
    evidence: str = ""  # one paragraph for people
    findings: tuple[Finding, ...] = ()
    factors: dict[str, str] = {}
    error: float | None = None
    limit: float | None = None
    headroom: float | None = None
    error_of: str | None = None
    seconds_per_step: float | None = None
    step_seconds: tuple[float, ...] = ()  # one per step, the warming-up step included
    tokens_per_second: float | None = None
    peak_memory_bytes: int | None = None  # largest over ranks: resident set on CPU, allocator peak on CUDA
    startup_seconds: float | None = None  # of the set of ranks, if it was started for this case; else 0
    judge_seconds: float | None = None  # reference and oracles
    wall_seconds: float | None = None
    budget_seconds: float | None = None  # this case's own limit
    attempt: int = 1
    started_at: str | None = None  # UTC, ISO 8601
    environment: str | None = None  # fingerprint of environment.json
    fault: str | None = None
    patch: str | None = None  # name and sha256 of the user's patch file
    rerun: str | None = None  # one command that runs this case again alone
    stacks: str | None = None  # stacks of stuck ranks


class RunRow(Row, frozen=True, tag="run", tag_field="event"):
    """First row of a run: what was planned."""

    schema: int
    run_id: str
    plan: str
    cases: tuple[str, ...]
    target: str
    budget_seconds: float  # for everything, start-up of ranks included
    started_at: str
    tiebench: str  # version, and commit where known
    command: str
    options: str = ""  # target, patch and fault as `tiebench run --case ID` needs them, shell-quoted


class StartedRow(Row, frozen=True, tag="started", tag_field="event"):
    """Written before a case begins."""

    case: str
    attempt: int
    started_at: str


class FinalRow(Row, frozen=True, tag="final", tag_field="event"):
    """Written once after a case, whatever became of it."""

    record: Record


class EndRow(Row, frozen=True, tag="end", tag_field="event"):
    """Last row of a run that ended by itself (also after Ctrl-C)."""

    ended_at: str
    reason: Literal["complete", "budget", "interrupted", "error"]
    exit_code: int
    message: str = ""


AnyRow = RunRow | StartedRow | FinalRow | EndRow
_decoder = msgspec.json.Decoder(AnyRow)
_encoder = msgspec.json.Encoder()


class RecordLog:
    """Append-only writer of one run directory's `events.jsonl`.

    The directory is made if it is missing. A directory that holds anything already is refused: a run never mixes with
    foreign files or with another run.

    Raises:
        LogError: the directory cannot be made or is not empty; a row cannot be written (full disk, …).
    """

    def __init__(self, directory: Path, first: RunRow):
        self.directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if any(directory.iterdir()):
                what = "already holds a run" if (directory / EVENTS).exists() else "is not empty"
                raise LogError(f"{directory} {what}: choose another --out")
            self._file = os.open(directory / EVENTS, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
            self.append(first)
            _sync_directory(directory)
        except OSError as error:
            raise LogError(f"cannot write to {directory}: {error.strerror or error}") from None

    def append(self, row: AnyRow) -> None:
        """Write one row durably, whole or not at all from a reader's view (a torn line is no row).

        Raises:
            LogError: the row could not be written; the rows before it are intact.
        """
        line = _encoder.encode(row) + b"\n"
        try:
            size = os.fstat(self._file).st_size
            if os.write(self._file, line) != len(line):
                os.ftruncate(self._file, size)
                raise OSError(28, "No space left on device")
            os.fsync(self._file)
        except OSError as error:
            raise LogError(f"cannot append to {self.directory / EVENTS}: {error.strerror or error}") from None

    def close(self) -> None:
        """Close the file; every row is on disk already."""
        os.close(self._file)

    def __enter__(self) -> RecordLog:
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old one or the whole new one, never half (temporary name, fsync, rename).

    Raises:
        LogError: it cannot be written; a file that was there is unchanged.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
        _sync_directory(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise LogError(f"cannot write {path}: {error.strerror or error}") from None


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@dataclass(frozen=True)
class Run:
    """A run directory as read back: one record for every planned case, in plan order, lost and not-run ones included.

    `damage` has one line for every row that could not be read; `torn` says that the last line was cut off, which is
    what a killed writer leaves and no damage. `end` is None when the run was killed (or is still going).
    """

    directory: Path
    plan: RunRow
    records: tuple[Record, ...]
    end: EndRow | None
    torn: bool
    damage: tuple[str, ...]


def read_run(directory: Path) -> Run:
    """Read a run directory, also that of a killed run.

    Cases that started and have no final row become `lost`; planned cases that never started become `not_run`. A later
    attempt's record replaces an earlier one's.

    Raises:
        LogError: no such directory, no `events.jsonl`, or its first row is not a run row of a schema known here.
    """
    path = directory / EVENTS
    try:
        data = path.read_bytes()
    except OSError as error:
        raise LogError(f"{directory} is no run directory: {path.name}: {error.strerror or error}") from None
    torn = bool(data) and not data.endswith(b"\n")
    lines = data.split(b"\n")[:-1]
    rows: list[AnyRow] = []
    damage: list[str] = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(_decoder.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            damage.append(f"{path.name} line {number}: {error}")
    if not rows or not isinstance(rows[0], RunRow) or (damage and damage[0].startswith(f"{path.name} line 1:")):
        raise LogError(f"{path} does not start with a run row" + (f" ({damage[0]})" if damage else ""))
    plan = rows[0]
    if plan.schema != SCHEMA:
        raise LogError(f"{path} has schema {plan.schema}; this tiebench reads schema {SCHEMA}")
    started: dict[str, StartedRow] = {}
    final: dict[str, Record] = {}
    end: EndRow | None = None
    for row in rows[1:]:
        if isinstance(row, StartedRow):
            started[row.case] = row
        elif isinstance(row, FinalRow):
            final[row.record.case] = row.record
        elif isinstance(row, EndRow):
            end = row
        else:
            damage.append(f"{path.name}: a second run row")
    names = list(dict.fromkeys([*plan.cases, *started, *final]))
    records = tuple(final.get(name) or _unfinished(name, started.get(name), plan) for name in names)
    return Run(directory=directory, plan=plan, records=records, end=end, torn=torn, damage=tuple(damage))


def _unfinished(case: str, started: StartedRow | None, plan: RunRow) -> Record:
    path, _, rest = case.partition(":")
    record = Record(
        case=case,
        path=path,
        target=plan.target,
        status="not_run",
        evidence="the run ended before this case began",
        factors=dict(part.split("=", 1) for part in rest.split(",") if "=" in part),
        rerun=f"tiebench run --case {shlex.quote(case)} {plan.options}".strip(),
    )
    if started is None:
        return record
    return msgspec.structs.replace(
        record,
        status="lost",
        attempt=started.attempt,
        started_at=started.started_at,
        evidence=f"started at {started.started_at} and has no result: the run was killed while it ran",
    )


def expected(record: Record) -> bool:
    """True when a record counts as green: finished, and exact or rounding."""
    return record.status == "finished" and record.verdict in GREEN
