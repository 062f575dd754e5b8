"""The record log: schema of `events.jsonl`, its durable writer, and its strict, tear-tolerant reader.

Write-ahead (rule 5 of the design): one `RunRow` before anything else, a `StartedRow` before each case and one
`FinalRow` after it, an `EndRow` at the end; each row is one JSON line, flushed and fsynced before the run goes on.
Whatever is killed, the rows that are there tell which cases finished, which one was lost and which were not run.

This module needs msgspec only: reports import it too.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Literal

import msgspec

EVENTS = "events.jsonl"
ENVIRONMENT = "environment.json"
SCHEMA = 2
ENVIRONMENT_CHECK = "switches"  # the check that speaks of the environment, not of the program
READABLE = (1, 2)  # 2 added measured, escalation, diagnosis, guesses, dormant and verdict_seconds

Status = Literal["finished", "timeout", "lost", "not_run", "skipped"]
Verdict = Literal["exact", "rounding", "bug", "bug: precision", "inconclusive", "refused", "crash", "hang"]
GREEN: frozenset[str] = frozenset({"exact", "rounding"})
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # what a table's column of int64 takes
CASE_ID = re.compile(r"[a-z][\w-]*:\w+=[^,=]*(,\w+=[^,=]*)*")  # path:factor=value,…


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
        step: first step that shows it, from 1; 0 where it holds for the whole run.
    """

    oracle: str
    flagged: bool
    evidence: str
    error: float | None = None
    limit: float | None = None
    unit: str | None = None
    step: Count = 0


class Measured(Row, frozen=True):
    """The worst comparison of one tensor with the reference, over all steps; numbers that are not finite are None.

    Args:
        oracle: the check that it belongs to; name: the tensor; step: from 1.
        error: relative error, root mean square; predicted: what rounding gives.
        sees: smallest relative error of the tensor that would have been flagged.
        sigmas: deviation in predicted sigmas in its worst scope (tensor, row, element, norm, scalar); limit: of that.
        row: worst row; rows_wrong: share of rows above the row limit.
    """

    oracle: str
    name: str
    step: Count
    scope: str
    limit: float
    error: float | None = None
    predicted: float | None = None
    sees: float | None = None
    sigmas: float | None = None
    row: Count = 0
    rows_wrong: float = 0.0


class Rung(Row, frozen=True):
    """One run of the escalation to higher precisions.

    Args:
        arithmetic: float32, float64, …; verdict: of that run alone, "failed" where it did not end (`note` says how).
        error: relative error of the tensor that was worst in the case's own run.
        slope: log2 of the errors' ratio over that of the unit roundoffs: 1 for rounding, 0 for a bug.
    """

    case: str
    arithmetic: str
    verdict: str
    error: float | None = None
    slope: float | None = None
    note: str = ""


class Guess(Row, frozen=True):
    """One class of public bugs that the deviation looks like, the likeliest first."""

    bug_class: Count
    name: str
    why: str


class Dormant(Row, frozen=True):
    """A class of bugs that this case could not have shown, and why."""

    bug_class: Count
    reason: str


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
    measured: tuple[Measured, ...] = ()  # one per tensor
    escalation: tuple[Rung, ...] = ()  # runs at higher precisions, where the case's own could not tell
    diagnosis: str = ""  # where a deviation comes from: module, rank, rows
    guesses: tuple[Guess, ...] = ()
    dormant: tuple[Dormant, ...] = ()
    factors: dict[str, str] = {}
    error: float | None = None
    limit: float | None = None
    headroom: float | None = None
    error_of: str | None = None
    seconds_per_step: float | None = None
    step_seconds: tuple[float, ...] = ()  # one per step, the warming-up step included
    tokens_per_second: float | None = None
    peak_memory_bytes: Count | None = None  # largest over ranks: resident set on CPU, allocator peak on CUDA
    startup_seconds: float | None = None  # of the set of ranks, if it was started for this case; else 0
    judge_seconds: float | None = None  # reference and oracles, runs at higher precisions included
    verdict_seconds: float | None = None  # everything beyond training: judging, and reading the live model on the ranks
    wall_seconds: float | None = None
    budget_seconds: float | None = None  # this case's own limit
    attempt: Count = 1
    started_at: str | None = None  # UTC, ISO 8601
    environment: str | None = None  # fingerprint of environment.json
    fault: str | None = None
    harmless: bool = False  # what was put in changes no result for the worse: its run must be no bug
    patch: str | None = None  # name and sha256 of the user's patch file
    rerun: str | None = None  # one command that runs this case again alone
    stacks: str | None = None  # stacks of stuck ranks


class RunRow(Row, frozen=True, tag="run", tag_field="event"):
    """First row of a run: what was planned."""

    schema: int
    run_id: str
    plan: str
    cases: tuple[str, ...]
    target: str  # the framework under test
    budget_seconds: float  # for everything, start-up of ranks included
    started_at: str
    tiebench: str  # version, and commit where known
    command: str
    targets: dict[str, str] = {}  # build that each path's cases test
    options: str = ""  # target, patch and fault as `tiebench run --case ID` needs them, shell-quoted


class StartedRow(Row, frozen=True, tag="started", tag_field="event"):
    """Written before a case begins."""

    case: str
    attempt: Count
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
            if os.write(self._file, line) != len(line):  # a full disk takes a part of it
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
        with contextlib.suppress(OSError):  # a read-only directory has none to take away
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

    `damage` has one line for every row that could not be read and for everything that contradicts the rest: nothing of
    it is ever green. `torn` says that the last line was cut off, which is
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
    attempt's record replaces an earlier one's. A log that no run writes (`_contradictions`) is read and said to be
    damaged.

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
    numbers: list[int] = []
    damage: list[str] = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(_decoder.decode(line))
            numbers.append(number)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            damage.append(f"{path.name} line {number}: {error}")
    if not rows or not isinstance(rows[0], RunRow) or (damage and damage[0].startswith(f"{path.name} line 1:")):
        raise LogError(f"{path} does not start with a run row" + (f" ({damage[0]})" if damage else ""))
    plan = rows[0]
    if plan.schema not in READABLE:
        raise LogError(f"{path} has schema {plan.schema}; this tiebench reads schemas {READABLE[0]} to {SCHEMA}")
    started: dict[str, StartedRow] = {}
    final: dict[tuple[str, str | None], Record] = {}  # a fault plan runs one case with several faults
    end: EndRow | None = None
    for row in rows[1:]:
        if isinstance(row, StartedRow):
            started[row.case] = row
        elif isinstance(row, FinalRow):
            final[row.record.case, row.record.fault] = row.record
        elif isinstance(row, EndRow):
            end = row
    damage += [f"{path.name} line {number}: {text}" for number, text in _contradictions(rows, numbers)]
    found: list[Record] = []
    for name in dict.fromkeys([*plan.cases, *started, *(case for case, _ in final)]):
        whole = [record for (case, _), record in final.items() if case == name]
        found += whole or [_unfinished(name, started.get(name), plan)]
    return Run(directory=directory, plan=plan, records=tuple(found), end=end, torn=torn, damage=tuple(damage))


def _contradictions(rows: Sequence[AnyRow], numbers: Sequence[int]) -> Iterator[tuple[int, str]]:
    """What no run writes: line number and one line for people."""
    plan, begun, ended = rows[0], set[tuple[str, int]](), False
    final: dict[tuple[str, int], Record] = {}
    assert isinstance(plan, RunRow)
    for case in plan.cases:
        if not CASE_ID.fullmatch(case):
            yield numbers[0], f"{case!r} is no case id"
    for number, row in zip(numbers[1:], rows[1:], strict=True):
        if ended:
            yield number, f"a row after the end of the run ({row.__struct_config__.tag})"
        if isinstance(row, RunRow):
            yield number, "a second run row"
        elif isinstance(row, EndRow):
            ended = True
        elif isinstance(row, StartedRow):
            begun.add((row.case, row.attempt))
        else:
            record, key = row.record, (row.record.case, row.record.attempt)
            if not CASE_ID.fullmatch(record.case):
                yield number, f"{record.case!r} is no case id"
            elif record.case not in plan.cases:
                yield number, f"{record.case} is not in the plan"
            if record.path != record.case.partition(":")[0]:
                yield number, f"{record.case} says that its path is {record.path}"
            if record.status not in ("not_run", "skipped") and key not in begun:
                yield number, f"{record.case} has a result of attempt {record.attempt} and never started it"
            if final.setdefault(key, record) != record:
                yield number, f"{record.case} has two results of attempt {record.attempt} that differ"
            if why := contradiction(record):
                yield number, f"{record.case} is {record.verdict}, but {why}"


def contradiction(record: Record) -> str | None:
    """Why a record whose verdict is green cannot be; None where nothing speaks against it."""
    if record.verdict not in GREEN:
        return None
    if record.status != "finished":
        return f"its status is {record.status}"
    # A higher precision has cleared what was measured, but not what is either so or not.
    cleared = any(rung.verdict in GREEN for rung in record.escalation)
    flagged = [
        f.oracle
        for f in record.findings
        if f.flagged and f.oracle != ENVIRONMENT_CHECK and not (cleared and f.limit is not None)
    ]
    if not record.findings and record.oracle:
        flagged = [record.oracle]
    if flagged:
        return f"{', '.join(flagged)} flagged it"
    if cleared:
        return None
    beyond = [f.oracle for f in record.findings if _beyond(f)]
    if _beyond(record) or (record.limit is not None and record.error is None):
        beyond.insert(0, record.error_of or "its largest deviation")
    return f"{beyond[0]} is beyond its limit" if beyond else None


def elsewhere(record: Record) -> bool:
    """The numbers may be right, but the environment was not what the case asks for."""
    return any(finding.oracle == ENVIRONMENT_CHECK and finding.flagged for finding in record.findings)


def _beyond(measured: Finding | Record) -> bool:
    return measured.error is not None and measured.limit is not None and measured.error > measured.limit


def target_of(plan: RunRow, case: str) -> str:
    """The build that a case of this run tests."""
    return plan.targets.get(case.partition(":")[0], plan.target)


def over_budget(record: Record) -> bool:
    """The case took longer than its own limit. The watchdog ends the ranks; judging after them has no limit."""
    return (
        record.wall_seconds is not None
        and record.budget_seconds is not None
        and record.wall_seconds > record.budget_seconds
    )


def _unfinished(case: str, started: StartedRow | None, plan: RunRow) -> Record:
    path, _, rest = case.partition(":")
    record = Record(
        case=case,
        path=path,
        target=target_of(plan, case),
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
    """True when a record counts as green: finished, exact or rounding, nothing in it speaks against that, the
    environment was as asked, and no fault was put in: a fault that comes out green was not caught."""
    green = record.status == "finished" and record.verdict in GREEN
    as_asked = record.fault is None or record.harmless
    return green and as_asked and contradiction(record) is None and not elsewhere(record)
