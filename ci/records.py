"""The record log: schema of `events.jsonl`, its durable writer, and its strict, tear-tolerant reader.

Write-ahead (rule 5 of the design): one `RunRow` before anything else, a `StartedRow` before each case and one
`FinalRow` after it, an `EndRow` at the end; each row is one JSON line, flushed and fsynced before the run goes on.
Whatever is killed, the rows that are there tell which cases finished, which were lost and which were not run. Two cases
may be open at once: one is judged while the next one runs.

A run that was cut short goes on after a `ResumedRow` (`RecordLog.resume`). What one process wrote, from its first row
to its end, is a segment. The process that writes holds a lock on `events.jsonl` (flock), which the kernel releases when
it dies: so no second run writes into the directory, and a reader can tell a run that is going from one that was killed.

This module needs msgspec only: reports import it too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Annotated, Literal

import msgspec

EVENTS = "events.jsonl"
ENVIRONMENT = "environment.json"
SCHEMA = 4
ENVIRONMENT_CHECK = "switches"  # the check that speaks of the environment, not of the program
# 2 added measured, escalation, diagnosis, guesses, dormant and verdict_seconds; 3 added resumed rows, phases, forecast,
# reason, why, collectives and overlapped; 4 added expectation.
READABLE = (1, 2, 3, 4)

Status = Literal["finished", "timeout", "lost", "not_run", "skipped"]
Verdict = Literal["exact", "rounding", "bug", "bug: precision", "inconclusive", "refused", "crash", "hang"]
# Why a case was not run or was lost. Only readers say "killed", "running" (now) and "pending" (still to come); "given
# up" is said on resuming, of a case with which the whole run was killed too often.
Reason = Literal["budget", "interrupted", "error", "killed", "given up", "running", "pending"]
GREEN: frozenset[str] = frozenset({"exact", "rounding"})
RESULTS = ("finished", "timeout", "skipped")  # a case with one of these needs no further attempt
MOST_LOSSES = 2  # after so many kills of the whole run in the midst of a case, no more attempts are made at it
LOCK_WAIT = 1.0  # seconds to wait for the lock: a reader that looks whether it is held has it for a moment
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


class Expectation(Row, frozen=True):
    """What a table of the suite says that a case comes to: a refusal or a known issue.

    Args:
        kind: "refusal" or "known issue"; name, why, link, since: of the entry in that table.
        met: the case came to that; where it did not, `note` says what to do about the entry.
    """

    kind: Literal["refusal", "known issue"]
    name: str
    why: str
    met: bool
    link: str = ""
    since: str = ""
    note: str = ""


class Forecast(Row, frozen=True):
    """How long the run was expected to take when it started: what `ci.forecast` says.

    Args:
        expected_seconds, low, high: of the whole run, and where nine of ten runs lie.
        runs: that this is from; trend_runs: that the trend is from.
        budget_hit_on: day (ISO 8601) on which the expected time reaches the budget, None where it does not.
        text: all of it for people.
    """

    expected_seconds: float
    low: float
    high: float
    runs: Count = 0
    text: str = ""
    plan: str = ""
    trend_runs: Count = 0
    slope_seconds_per_day: float | None = None
    budget_seconds: float | None = None
    budget_hit_on: str | None = None


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
    expectation: Expectation | None = None
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
    collectives: str | None = None  # text table: the last collectives of each rank of a hang
    reason: Reason | None = None  # why it was not run, or was lost
    why: str = ""  # why it stands where it stands in the order, a short phrase
    overlapped: bool = False  # another case was judged while it ran


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
    forecast: Forecast | None = None
    phases: dict[str, float] = {}  # phase -> seconds of the budget, in their order
    pid: Count = 0  # of the process that writes; `RecordLog` fills it in


class ResumedRow(Row, frozen=True, tag="resumed", tag_field="event"):
    """After it the run goes on: another process works on the cases without a result."""

    resumed_at: str
    command: str
    budget_seconds: float  # for what is left, start-up of ranks included
    tiebench: str
    forecast: Forecast | None = None
    phases: dict[str, float] = {}
    pid: Count = 0  # as in `RunRow`


class StartedRow(Row, frozen=True, tag="started", tag_field="event"):
    """Written before a case begins."""

    case: str
    attempt: Count
    started_at: str


class FinalRow(Row, frozen=True, tag="final", tag_field="event"):
    """Written once after a case, whatever became of it."""

    record: Record


class EndRow(Row, frozen=True, tag="end", tag_field="event"):
    """Last row of a run that ended by itself (also after Ctrl-C); only a `ResumedRow` may follow."""

    ended_at: str
    reason: Literal["complete", "budget", "interrupted", "error"]
    exit_code: int
    message: str = ""
    phases: dict[str, float] = {}  # phase -> seconds used
    seconds: float | None = None  # since the run row, or the resumed row, by a clock that nobody sets


AnyRow = RunRow | ResumedRow | StartedRow | FinalRow | EndRow
_decoder = msgspec.json.Decoder(AnyRow)
_encoder = msgspec.json.Encoder()


class RecordLog:
    """Append-only writer of one run directory's `events.jsonl`, which it keeps locked until it is closed.

    The directory is made if it is missing. A directory that holds anything already is refused (unless a run was killed
    there before it wrote its first row): a run never mixes with foreign files or with another run. `resume` goes on
    with a run that was cut short.

    Attributes:
        note: one line for people where the file system has no locks: nothing keeps a second run away; else empty.

    Raises:
        LogError: the directory cannot be made or is not empty; a row cannot be written (full disk, …).
    """

    def __init__(self, directory: Path, first: RunRow):
        self.directory, self.note = directory, ""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            stillborn = is_stillborn(directory)
            if any(directory.iterdir()) and not stillborn:
                raise _taken(directory)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if stillborn else os.O_EXCL)
            self._file = os.open(directory / EVENTS, flags, 0o644)
        except FileExistsError:
            raise _taken(directory) from None  # a second run that began at the same moment
        except OSError as error:
            raise LogError(f"cannot write to {directory}: {error.strerror or error}") from None
        with self._closed_on_error():
            self._lock()
            if stillborn:
                if not is_stillborn(directory):  # another run was quicker, and is over
                    raise _taken(directory)
                os.ftruncate(self._file, 0)
            self.append(msgspec.structs.replace(first, pid=first.pid or os.getpid()))
            _sync_directory(directory)

    @classmethod
    def resume(cls, directory: Path, row: ResumedRow) -> tuple[RecordLog, Run]:
        """Go on with a run that was cut short: lock it, cut off a torn last line, write `row`.

        A case with which the whole run was killed `MOST_LOSSES` times gets a last record that says so.

        Returns:
            The log, and the run as it stands: `Run.todo` says what to run, `Run.attempts` how often it was tried.

        Raises:
            LogError: it cannot be written, is in use, cannot be read, is damaged, or nothing of it is left to be run.
        """
        log = cls.__new__(cls)
        log.directory, log.note = directory, ""
        try:
            log._file = os.open(directory / EVENTS, os.O_RDWR | os.O_APPEND)
        except OSError as error:
            raise LogError(f"cannot resume {directory}: {EVENTS}: {error.strerror or error}") from None
        with log._closed_on_error():
            log._lock()
            run = _read(directory, running=False)
            _check_resumable(run)
            if run.torn:
                with open(directory / EVENTS, "rb") as stream:
                    os.ftruncate(log._file, stream.read().rfind(b"\n") + 1)
            log.append(msgspec.structs.replace(row, pid=row.pid or os.getpid()))
            for case, times in run.losses.items():
                if times >= MOST_LOSSES and case in {r.case for r in run.records if r.status not in RESULTS}:
                    log._give_up(run, case, times)
            _sweep(directory)
            return log, _read(directory, running=False)

    def _give_up(self, run: Run, case: str, times: int) -> None:
        for record in run.records:
            if record.case == case and record.reason != "given up":
                text = f"given up: {times} times the whole run was killed while this case was open; run it alone"
                lost = {"status": "lost", "reason": "given up", "evidence": text, "attempt": run.attempts[case]}
                self.append(FinalRow(record=msgspec.structs.replace(record, **lost)))

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
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file)
        except OSError as error:
            raise LogError(f"cannot append to {self.directory / EVENTS}: {error.strerror or error}") from None

    def _lock(self) -> None:
        """Keep every other run away from the directory.

        The lock belongs to the open file, not to the process: what this process starts does not inherit it (the file is
        closed on exec), and a reader in this very process does not release it.
        """
        deadline = time.monotonic() + LOCK_WAIT
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise _taken(self.directory) from None
                time.sleep(0.02)
            except OSError as error:
                self.note = f"{self.directory} cannot be locked ({error.strerror or error}): run nothing else in it"
                return

    @contextlib.contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.close()
            raise LogError(f"cannot write to {self.directory}: {error.strerror or error}") from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file, which releases the lock; every row is on disk already."""
        os.close(self._file)

    def __enter__(self) -> RecordLog:
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _taken(directory: Path) -> LogError:
    """Why a directory cannot be used: what is in it, and who is at it."""
    if not (directory / EVENTS).exists():
        return LogError(f"{directory} is not empty: choose another --out")
    if not in_use(directory):
        return LogError(f"{directory} already holds a run: choose another --out")
    with contextlib.suppress(LogError):
        pid = _read(directory, running=True).pid
        return LogError(f"{directory} is in use by a run that is still going{f' (pid {pid})' if pid else ''}")
    return LogError(f"{directory} is in use by a run that is just beginning")


def is_stillborn(directory: Path) -> bool:
    """Whether all that a directory holds is a record log without a whole row: a run was killed as it began.

    Raises:
        OSError: it cannot be read.
    """
    return [path.name for path in directory.iterdir()] == [EVENTS] and b"\n" not in (directory / EVENTS).read_bytes()


def in_use(directory: Path) -> bool:
    """Whether a process, which may be this one, holds a run directory's record log open for writing."""
    try:
        file = os.open(directory / EVENTS, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no locks here: nobody can tell
        return False
    finally:
        os.close(file)
    return False


def _check_resumable(run: Run) -> None:
    """Refuse what cannot be gone on with.

    Raises:
        LogError: one line that says why.
    """
    directory = run.directory
    if run.plan.schema != SCHEMA:
        raise LogError(
            f"cannot resume {directory}: written by another tiebench ({run.plan.tiebench}, schema {run.plan.schema}, "
            f"this one writes {SCHEMA}); run its missing cases in a new directory"
        )
    if run.damage:
        more = f" (and {len(run.damage) - 1} more)" if len(run.damage) > 1 else ""
        raise LogError(f"cannot resume {directory}: it is damaged: {run.damage[0]}{more}")
    faults = Counter(record.case for record in run.records)
    if faults and max(faults.values()) > 1:
        raise LogError(f"cannot resume {directory}: its cases ran with several faults each (`tiebench faults`)")
    if not run.todo and run.end is not None and run.end.reason == "complete":
        raise LogError(f"nothing to resume in {directory}: each of its {len(run.plan.cases)} cases has its result")


def _sweep(directory: Path) -> None:
    """Take away what a killed writer of reports (`write_whole`) left half done."""
    for path in directory.glob(".*.tmp"):
        number = path.name.split(".")[-2]
        if number.isdecimal() and not _alive(int(number)):
            with contextlib.suppress(OSError):
                path.unlink()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # somebody else's; no number of a process
        return True
    return True


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
class Segment:
    """What one process wrote: from the run row or a resumed row to its end.

    Args:
        first: that row.
        records: results in the order in which they were written.
        end: None where the process was killed, or is still going.
    """

    first: RunRow | ResumedRow
    records: tuple[Record, ...] = ()
    end: EndRow | None = None

    @property
    def started_at(self) -> str:
        """UTC, ISO 8601."""
        return self.first.started_at if isinstance(self.first, RunRow) else self.first.resumed_at

    @property
    def seconds(self) -> float | None:
        """How long it took: by the clock that nobody sets where its end row says so, else by time stamps as far as they
        agree, else what its cases took together; None where nothing tells."""
        if self.end is not None and self.end.seconds is not None and self.end.seconds >= 0:
            return self.end.seconds
        begin = instant(self.started_at)
        finish = instant(self.end.ended_at) if self.end is not None else None
        if begin is not None and finish is not None and finish >= begin:
            return finish - begin
        stamps = [(instant(r.started_at), r.wall_seconds or 0.0) for r in self.records]
        ends = [start + wall - begin for start, wall in stamps if start and begin and start >= begin]
        walls = [r.wall_seconds for r in self.records if r.wall_seconds is not None]
        return max(ends) if ends else sum(walls) if walls else None


@dataclass(frozen=True)
class Run:
    """A run directory as read back: one record for every planned case, in plan order, lost and not-run ones included.

    Args:
        damage: one line for every row that could not be read and for everything that contradicts the rest: nothing of
            it is ever green.
        torn: the last line was cut off, which is what a killed writer leaves and no damage.
        end: None when the run was killed, or is still going (`running`).
        running: a process has the record log open, and has not written its end.
        segments: the first one and one for each time that the run was resumed.
        attempts: case -> number of its last attempt; losses: case -> how often the whole run was killed while it was
            open; starts: how many attempts at any case there were.
    """

    directory: Path
    plan: RunRow
    records: tuple[Record, ...]
    end: EndRow | None
    torn: bool
    damage: tuple[str, ...]
    running: bool = False
    segments: tuple[Segment, ...] = ()
    attempts: Mapping[str, int] = field(default_factory=dict)
    losses: Mapping[str, int] = field(default_factory=dict)
    starts: int = 0

    @property
    def killed(self) -> bool:
        """It was killed: it did not end by itself and is not going either."""
        return self.end is None and not self.running

    @property
    def resumed(self) -> tuple[ResumedRow, ...]:
        """One row for each time that the run was gone on with."""
        return tuple(s.first for s in self.segments if isinstance(s.first, ResumedRow))

    @property
    def todo(self) -> tuple[str, ...]:
        """Planned cases without a result, in plan order, `suspects` last; without those that are given up."""
        done = {r.case for r in self.records if r.status in RESULTS or r.reason == "given up"}
        left = [c for c in self.plan.cases if c not in done and self.losses.get(c, 0) < MOST_LOSSES]
        return tuple(sorted(dict.fromkeys(left), key=lambda case: case in self.losses))

    @property
    def suspects(self) -> tuple[str, ...]:
        """Cases of `todo` that were open when the whole run was killed: a deadly one is to cost itself only, so they
        come last, and no other case should be open beside them."""
        return tuple(case for case in self.todo if case in self.losses)

    @property
    def budget_seconds(self) -> float:
        """Budgets of all segments together."""
        return sum(s.first.budget_seconds for s in self.segments) or self.plan.budget_seconds

    @property
    def seconds(self) -> float | None:
        """How long all segments took together, without the time between them; None where nothing tells."""
        known = [s.seconds for s in self.segments if s.seconds is not None]
        return sum(known) if known else None

    @property
    def pid(self) -> int:
        """Process that wrote last; 0 where it is not known."""
        return self.segments[-1].first.pid if self.segments else self.plan.pid


def read_run(directory: Path) -> Run:
    """Read a run directory, also that of a killed run and of one that is still going.

    Cases that started and have no final row become `lost`; planned cases that never started become `not_run`. Of a run
    that is still going, both become `not_run` with the reason "running" or "pending". A later attempt's record replaces
    an earlier one's. A log that no run writes (`_contradictions`) is read and said to be damaged.

    Raises:
        LogError: no such directory, no `events.jsonl`, or its first row is not a run row of a schema known here.
    """
    return _read(directory, running=in_use(directory))  # asked before: what ends meanwhile has its end row


def _read(directory: Path, *, running: bool) -> Run:
    path = directory / EVENTS
    try:
        data = path.read_bytes()
    except OSError as error:
        raise LogError(f"{directory} is no run directory: {path.name}: {error.strerror or error}") from None
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
    damage += [f"{path.name} line {number}: {text}" for number, text in _contradictions(rows, numbers)]
    state = _State(plan)
    for row in rows[1:]:
        state.take(row)
    return state.run(directory, running=running, torn=bool(data) and not data.endswith(b"\n"), damage=tuple(damage))


class _State:
    """What the rows so far say of each case."""

    def __init__(self, plan: RunRow):
        self.plan = plan
        self.segments = [Segment(plan)]
        self.written: list[Record] = []  # in this segment
        self.open: dict[tuple[str, int], StartedRow] = {}  # started in this segment, and no final row yet
        self.started: dict[str, StartedRow] = {}
        self.final: dict[tuple[str, str | None], Record] = {}  # a fault plan runs one case with several faults
        self.fresh: set[str] = set()  # cases of which this segment says something
        self.attempts: dict[str, int] = {}
        self.losses: Counter[str] = Counter()
        self.starts = 0

    def take(self, row: AnyRow) -> None:
        """One more row."""
        if isinstance(row, StartedRow):
            self.starts += 1
            self.started[row.case] = self.open[row.case, row.attempt] = row
            self.attempts[row.case] = max(row.attempt, self.attempts.get(row.case, 0))
            self.fresh.add(row.case)
            for key, record in list(self.final.items()):
                if key[0] == row.case and record.status not in RESULTS:
                    del self.final[key]  # it is tried once more
        elif isinstance(row, FinalRow):
            self._final(row.record)
        elif isinstance(row, EndRow):
            self._close(row)
        elif isinstance(row, ResumedRow):
            self._lose()
            self._close(self.segments[-1].end)
            self.segments.append(Segment(row))
            self.written = []
            self.fresh = set()

    def _final(self, record: Record) -> None:
        key = (record.case, record.fault)
        self.written.append(record)
        self.open.pop((record.case, record.attempt), None)
        self.fresh.add(record.case)
        before = self.final.get(key)
        if before is None or record.status != "not_run" or before.status not in RESULTS:
            self.final[key] = record

    def _close(self, end: EndRow | None) -> None:
        self.segments[-1] = Segment(self.segments[-1].first, tuple(self.written), end)

    def _lose(self) -> None:
        """The process of this segment is gone: what was open is lost, by its own fault unless the run still ended."""
        if self.segments[-1].end is None:
            self.losses.update({case for case, _ in self.open})
        self.open = {}

    def run(self, directory: Path, *, running: bool, torn: bool, damage: tuple[str, ...]) -> Run:
        """The whole, once all rows are taken."""
        end = self.segments[-1].end
        running = running and end is None
        live = {case for case, _ in self.open} if running else set()
        if not running:
            self._lose()
        self._close(end)
        found: list[Record] = []
        for name in dict.fromkeys([*self.plan.cases, *self.started, *(case for case, _ in self.final)]):
            whole = [record for (case, _), record in self.final.items() if case == name]
            if running:
                whole = [r for r in whole if name in self.fresh or r.status in RESULTS or r.reason == "given up"]
                found += whole or [_to_come(name, self.plan, self.started.get(name) if name in live else None)]
            else:
                found += whole or [_unfinished(name, self.started.get(name), self.plan, end)]
        return Run(
            directory=directory,
            plan=self.plan,
            records=tuple(found),
            end=end,
            torn=torn and not running,  # a reader may see half of what is being written
            damage=damage,
            running=running,
            segments=tuple(self.segments),
            attempts=self.attempts,
            losses=dict(self.losses),
            starts=self.starts,
        )


def now() -> str:
    """The time in UTC, as rows have it (ISO 8601)."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def instant(stamp: str | None) -> float | None:
    """Seconds since 1970 of a time stamp with its zone; None where it is none."""
    try:
        parsed = datetime.fromisoformat((stamp or "").replace("Z", "+00:00"))
        return parsed.timestamp() if parsed.tzinfo else None
    except (ValueError, OverflowError):
        return None


def _contradictions(rows: Sequence[AnyRow], numbers: Sequence[int]) -> Iterator[tuple[int, str]]:
    """What no run writes: line number and one line for people."""
    plan, begun, ended = rows[0], set[tuple[str, int]](), False
    final: dict[tuple[str, int], Record] = {}
    results: set[tuple[str, str | None]] = set()
    assert isinstance(plan, RunRow)
    for case in plan.cases:
        if not CASE_ID.fullmatch(case):
            yield numbers[0], f"{case!r} is no case id"
    for number, row in zip(numbers[1:], rows[1:], strict=True):
        if isinstance(row, ResumedRow):
            ended = False
            continue
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
            if record.status == "not_run":  # may come again: a run that is resumed may leave it out once more
                if (record.case, record.fault) in results:
                    yield number, f"{record.case} has a result, and yet was not run"
            elif final.setdefault(key, record) != record:
                yield number, f"{record.case} has two results of attempt {record.attempt} that differ"
            if record.status in RESULTS:
                results.add((record.case, record.fault))
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


def _nothing(case: str, plan: RunRow) -> Record:
    """Record of a case that has no row of its own."""
    path, _, rest = case.partition(":")
    return Record(
        case=case,
        path=path,
        target=target_of(plan, case),
        status="not_run",
        factors=dict(part.split("=", 1) for part in rest.split(",") if "=" in part),
        rerun=f"tiebench run --case {shlex.quote(case)} {plan.options}".strip(),
    )


def _unfinished(case: str, started: StartedRow | None, plan: RunRow, end: EndRow | None) -> Record:
    """A case without a final row, of a run that is over."""
    reason = "killed" if end is None else "error" if end.reason == "complete" else end.reason
    if started is None:
        text = "the run ended before this case began"
        return msgspec.structs.replace(_nothing(case, plan), evidence=text, reason=reason)
    return msgspec.structs.replace(
        _nothing(case, plan),
        status="lost",
        attempt=started.attempt,
        started_at=started.started_at,
        reason=reason,
        evidence=f"started at {started.started_at} and has no result: the run was killed while it ran",
    )


def _to_come(case: str, plan: RunRow, started: StartedRow | None) -> Record:
    """A case without a result, of a run that is still going; `started` where it is at work on it."""
    if started is None:
        return msgspec.structs.replace(_nothing(case, plan), evidence="still to come", reason="pending")
    return msgspec.structs.replace(
        _nothing(case, plan),
        attempt=started.attempt,
        started_at=started.started_at,
        reason="running",
        evidence=f"running since {started.started_at}",
    )


def expected(record: Record) -> bool:
    """True when a record counts as green: finished, exact or rounding, nothing in it speaks against that, the
    environment was as asked, and no fault was put in: a fault that comes out green was not caught.

    So does a refusal or a known issue that came out as a table of the suite foresees.
    """
    if record.expectation is not None:
        return record.expectation.met and record.status in ("finished", "timeout")
    green = record.status == "finished" and record.verdict in GREEN
    as_asked = record.fault is None or record.harmless
    return green and as_asked and contradiction(record) is None and not elsewhere(record)
