"""The run loop: cases in, records out, whatever happens to the ranks in between.

`Session` runs one case after the other and keeps the record log; `run` is a session over a list of cases with a budget,
an end row for every way to end, and the same exit codes as the command line.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import hashlib
import importlib.metadata
import json
import math
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from ci import channel as ch
from ci import records, schedule
from ci.ranks import Outcome, RankSet, Settings, check_seconds, check_writable, is_secondary, listen
from ci.records import EndRow, FinalRow, LogError, Record, RecordLog, Run, RunRow, StartedRow
from suites import bug_classes
from suites.cases import Case

if TYPE_CHECKING:
    from ci.targets import Target
    from suites.observe import RankObservation
    from suites.reference import ReferenceCache

OK, FAILED, USAGE, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143
KEEP_RANKS = 8  # idle ranks that may stay alive beside the set in use, in all
KEEP_OBSERVATIONS = 512 * 2**20  # bytes of observations of flagged cases to keep in a run directory
EVIDENCE_LIMIT = 900
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PACKAGE = {"handwritten": "torch"}  # path -> the package that is under test; else it is called like the path

_RowType = TypeVar("_RowType", bound=records.Row)
OnRecord = Callable[[Record], None]


class SetupError(Exception):
    """Something that is not the tested framework's doing stops the run; one line for people (exit code 2)."""


class Interrupted(BaseException):
    """SIGINT or SIGTERM; a BaseException so that no handler of a case's errors takes it for one."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


@dataclass(frozen=True)
class Patch:
    """A user's patch file, read once so that all ranks run the same bytes.

    Raises:
        SetupError: (from `read`) the file cannot be read or is no Python.
    """

    path: Path
    source: str

    @classmethod
    def read(cls, path: Path) -> Patch:
        """Read and compile (without running) a patch file."""
        try:
            source = path.read_text(encoding="utf-8")
            compile(source, str(path), "exec")
        except (OSError, UnicodeDecodeError) as error:
            raise SetupError(f"--patch {path}: {getattr(error, 'strerror', None) or error}") from None
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None)
            raise SetupError(
                f"--patch {path}{f' line {line}' if line else ''}: {type(error).__name__}: {error}"
            ) from None
        return cls(path, source)

    @property
    def name(self) -> str:
        """File name and sha256, as records have it."""
        return f"{self.path.name} sha256:{hashlib.sha256(self.source.encode()).hexdigest()[:16]}"


@dataclass(frozen=True)
class Subject:
    """What is under test: a build of a framework, perhaps with a patch or a fault.

    Args:
        build: a build that `ci.targets` installed aside; None for what is installed here.
    """

    build: Target | None = None
    patch: Patch | None = None
    fault: str | None = None

    def target(self, path: str) -> str:
        """The build that a path's cases test."""
        package = PACKAGE.get(path, path)
        if self.build and self.build.distribution == package:
            return self.build.label
        try:
            return f"{package}=={importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            return f"{package} (not installed)"

    def tests(self, case: Case) -> bool:
        """Whether a case runs the build that was named; True when none was."""
        return self.build is None or self.build.distribution == PACKAGE.get(case.path, case.path)

    def rerun(self, case: str) -> str:
        """Command that runs one case again alone."""
        return shlex.join(["tiebench", "run", "--case", case, *self.options])

    @property
    def options(self) -> list[str]:
        """Options of `tiebench run` that make this subject."""
        words = ["--target", self.build.requirement] if self.build else []
        words += ["--patch", str(self.patch.path)] if self.patch else []
        return words + (["--fault", self.fault] if self.fault else [])


# What is guessed of runs that leave no observations.
HANG = records.Guess(bug_class=27, name=bug_classes.NAMES[27], why="some ranks wait for what others never send")
LOST = records.Guess(bug_class=1, name=bug_classes.NAMES[1], why="embedding and head are no longer one weight")
BY_REPLACEMENT = records.Guess(bug_class=2, name=bug_classes.NAMES[2], why="it is lost when sharded layers are put in")
INSTALLED = Subject()
DEFAULTS = Settings()


@dataclass(frozen=True)
class Plan:
    """What a run is to do, for its first row.

    Args:
        budget: seconds for everything, start-up of ranks included; None: what the limits of its cases add up to.

    Raises:
        ValueError: the budget is no number of seconds.
    """

    name: str
    cases: tuple[Case, ...]
    budget: float | None = None
    command: str = ""

    def __post_init__(self) -> None:
        """Check the budget."""
        if self.budget is not None:
            check_seconds("budget", self.budget, 0.0)

    def seconds(self, settings: Settings) -> float:
        """The budget as a number."""
        if self.budget is not None:
            return self.budget
        return settings.startup_limit + max(1, len(self.cases)) * (settings.startup_limit + settings.case_limit)


class Session:
    """Runs cases one by one, each to a record on disk. A context manager: its end stops ranks and closes the log.

    Args:
        directory: run directory; made, must be empty.
        plan: what is to be run; cases outside of it may be run too, but such a run is not green.
        on_record: called with every record once it is on disk.

    Raises:
        LogError: the directory cannot be used (nothing was started then).
    """

    def __init__(
        self,
        directory: Path,
        plan: Plan,
        subject: Subject = INSTALLED,
        settings: Settings = DEFAULTS,
        on_record: OnRecord | None = None,
    ):
        self.directory, self.plan, self.subject = Path(directory), plan, subject
        patch = (subject.patch.source, str(subject.patch.path)) if subject.patch else None
        build = subject.build
        self.settings = replace(
            settings,
            target=build.directory if build else None,
            build=(build.distribution, build.version) if build else None,
            patch=patch,
        )
        self.on_record = on_record
        self.budget = plan.seconds(self.settings)
        self.begin = time.monotonic()
        self.forecast = schedule.Forecast()
        self.sets: dict[int, RankSet] = {}
        self.fingerprint: str | None = None
        self.records: list[Record] = []
        self._count = 0
        self._started_sets = 0
        self._closed = False
        self._references: ReferenceCache | None = None
        self._attempts: dict[str, int] = {}
        paths = sorted(dict.fromkeys(case.path for case in plan.cases), key=lambda path: path in PACKAGE)
        targets = {path: subject.target(path) for path in paths}  # a framework's own path first
        self._log = RecordLog(
            self.directory,
            RunRow(
                schema=records.SCHEMA,
                run_id=self.directory.resolve().name,
                plan=plan.name,
                cases=tuple(case.id for case in plan.cases),
                target=next(iter(targets.values()), subject.target("deepspeed")),
                targets=targets,
                budget_seconds=self.budget,
                started_at=now(),
                tiebench=version(),
                command=plan.command,
                options=shlex.join(subject.options),
            ),
        )

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            planned = {case.id for case in self.plan.cases}
            bad = [r for r in self.records if not records.expected(r) or r.case not in planned]
            self.close("complete", FAILED if bad or not self.records else OK)
        elif isinstance(error, (SetupError, LogError)):
            self.close("error", USAGE, str(error))
        elif isinstance(error, (Interrupted, KeyboardInterrupt)):
            number = error.number if isinstance(error, Interrupted) else signal.SIGINT
            self.close("interrupted", 128 + number, signal.Signals(number).name)
        else:
            self.close("error", FAILED, f"{kind.__name__}: {error}"[:EVIDENCE_LIMIT])

    @property
    def left(self) -> float:
        """Seconds left of the plan's budget."""
        return self.begin + self.budget - time.monotonic()

    def needs_start(self, case: Case) -> bool:
        """Whether a set of ranks has to be started for this case."""
        return case.world_size not in self.sets

    def run(self, case: Case, fault: str | None = None) -> Record:
        """Run one case to its record, with the subject's fault or with one of its own.

        Raises:
            SetupError: the run cannot go on (patch, disk); LogError: a row cannot be written.
        """
        self._count += 1
        attempt = self._attempts[case.id] = self._attempts.get(case.id, 0) + 1
        fault = fault or self.subject.fault
        base = self._base(case, attempt, fault)
        self._log.append(StartedRow(case=case.id, attempt=attempt, started_at=str(base["started_at"])))
        observations = self.directory / "observations" / f"{self._count:04d}"
        begin = time.monotonic()
        try:
            result = self._attempt(case, observations, fault)
        except (SetupError, LogError) as error:
            self._kill_all()
            with contextlib.suppress(LogError):
                self._final(Record(**base, status="lost", evidence=f"the run was stopped: {error}"))
            raise
        except (Interrupted, KeyboardInterrupt):
            phases = self._places(case)
            self._kill_all()
            seconds = time.monotonic() - begin
            text = f"interrupted after {seconds:.1f} s; {phases}"
            self._final(Record(**base, status="lost", evidence=text, wall_seconds=seconds))
            raise
        except Exception as error:  # noqa: BLE001 - a fault of this program must cost one case, not the run
            self._kill_all()
            evidence = f"tiebench itself failed: {type(error).__name__}: {error}"[:EVIDENCE_LIMIT]
            result = {
                "status": "finished",
                "verdict": "crash",
                "evidence": evidence,
                "stacks": traceback.format_exc()[-12000:],
            }
        base["environment"] = self.fingerprint
        result.setdefault("wall_seconds", time.monotonic() - begin - result.get("startup_seconds", 0.0))
        record = _annotated(Record(**{**base, **result}))
        broke = case.world_size not in self.sets
        self.forecast.add(case, record.wall_seconds or 0.0, record.startup_seconds or 0.0, broke=broke)
        self._tidy(observations, record)
        self._final(record)
        return record

    def skip(self, case: Case, status: Literal["not_run", "skipped"], reason: str) -> Record:
        """Write the record of a case that is not run, and why."""
        base = self._base(case, self._attempts.get(case.id, 0) + 1, self.subject.fault)
        return self._final(
            Record(**{**base, "started_at": None, "budget_seconds": None}, status=status, evidence=reason)
        )

    def fresh(self) -> None:
        """Stop all ranks: the next case starts a new set."""
        for ranks in self.sets.values():
            ranks.stop()
        self.sets.clear()

    def close(
        self, reason: Literal["complete", "budget", "interrupted", "error"], exit_code: int, message: str = ""
    ) -> None:
        """Stop the ranks, write the end row, close the log. Only the first call counts."""
        if self._closed:
            return
        self._closed = True
        if reason in ("complete", "budget"):
            self.fresh()
        self._kill_all()
        with contextlib.suppress(LogError):  # a full disk: the rows that are there tell the rest
            self._log.append(EndRow(ended_at=now(), reason=reason, exit_code=exit_code, message=message))
        self._log.close()

    # One case

    def _base(self, case: Case, attempt: int, fault: str | None = None) -> dict[str, Any]:
        return {
            "case": case.id,
            "path": case.path,
            "target": self.subject.target(case.path),
            "factors": case.factors,
            "attempt": attempt,
            "started_at": now(),
            "budget_seconds": self.settings.case_limit,
            "fault": fault,
            "harmless": _harmless(fault),
            "patch": self.subject.patch.name if self.subject.patch else None,
            "rerun": replace(self.subject, fault=fault).rerun(case.id),
        }

    def _attempt(self, case: Case, observations: Path, fault: str | None) -> dict[str, Any]:
        """Fields of the record that the run of a case fills."""
        begin = time.monotonic()
        limit = min(self.settings.startup_limit, self.left)
        outcome = self._ready(case, limit)
        startup = time.monotonic() - begin if outcome is not None else 0.0
        common = {"startup_seconds": round(startup, 3)}
        if outcome is not None and not outcome.good:
            self._drop(case.world_size)
            what = f"the ranks did not come up within {limit:.0f} s"
            return (
                common | {"wall_seconds": 0.0} | self._bad(case, outcome, what, cut=limit < self.settings.startup_limit)
            )
        ranks = self.sets[case.world_size]
        try:
            observations.mkdir(parents=True)
        except OSError as error:
            raise self._unwritable(error) from None
        limit = min(self.settings.case_limit, self.left)
        outcome = ranks.run(case.id, observations, fault, limit)
        common["budget_seconds"] = limit
        if not outcome.good:
            self._drop(case.world_size)
            what = f"no result within {limit:.0f} s"
            return common | self._bad(case, outcome, what, cut=limit < self.settings.case_limit)
        return common | self._judged(case, observations, fault)

    def _ready(self, case: Case, limit: float) -> Outcome | None:
        """A set of ranks for the case, with its framework imported. Returns None when it was there already."""
        begin = time.monotonic()
        outcome = None
        ranks = self.sets.get(case.world_size)
        if ranks is None:
            self._make_room(case.world_size)
            self._started_sets += 1
            name = f"set{self._started_sets}"
            try:
                listener = listen(self.settings.host, case.world_size)
            except OSError as error:  # no such name, or not an address of this machine
                raise SetupError(f"--host {self.settings.host}: {error.strerror or error}") from None
            try:
                ranks = RankSet(name, case.world_size, self.settings, self.directory, listener)
                self.sets[case.world_size] = ranks
                ranks.launch()
            except OSError as error:
                raise self._unwritable(error) from None
            from suites import examine  # noqa: F401, PLC0415 - imports torch, while the ranks do so too

            gc.freeze()  # what was imported never becomes garbage: no need to look through it in every case
            outcome = ranks.start(begin + limit - time.monotonic())
            self._check_patch(outcome)
            if not outcome.good:
                return outcome
        if case.path not in ranks.loaded:
            outcome = ranks.load(case.path, begin + limit - time.monotonic())
            for failed in outcome.failures.values():
                if failed.phase == ch.CHECK_BUILD:
                    raise SetupError(_first_line(failed.message))
            if not outcome.good:
                return outcome
        if self.fingerprint is None:
            collected = ranks.collect(begin + limit - time.monotonic())
            if not (collected.good or all(n in collected.failures or n in collected.values for n in collected.phases)):
                return collected
            self._save_environment(collected)
        return outcome

    def _check_patch(self, outcome: Outcome) -> None:
        for failed in outcome.failures.values():
            if failed.phase == "patch" and self.subject.patch:
                line = _patch_line(failed.traceback, str(self.subject.patch.path))
                where = f"{self.subject.patch.path}{f' line {line}' if line else ''}"
                raise SetupError(f"--patch {where}: {failed.type}: {_first_line(failed.message)}")

    def _save_environment(self, collected: Outcome) -> None:
        """Write what rank 0 found; when it could not, write why: no reason to lose a run, but no reason to hide it."""
        value = collected.values.get(0)
        if isinstance(value, dict):
            self.fingerprint, found = str(value["fingerprint"]), value["environment"]
        else:
            failed = collected.failures[0]
            self.fingerprint, found = "unknown", {"error": f"{failed.type}: {_first_line(failed.message)}"}
        data = json.dumps(found, indent=2, sort_keys=True, ensure_ascii=False).encode() + b"\n"
        records.write_whole(self.directory / records.ENVIRONMENT, data)

    def _again(
        self, case: Case, observations: Path, fault: str | None, trace: int | None = None
    ) -> list[RankObservation]:
        """Run one more case on the same ranks, for a verdict that needs it.

        Raises:
            RunFailed: it did not end well, or there is no time or no rank left for it.
        """
        from suites.observe import ObservationError, RankObservation  # noqa: PLC0415
        from suites.verdict import RunFailed  # noqa: PLC0415

        ranks, limit = self.sets.get(case.world_size), min(self.settings.case_limit, self.left)
        if ranks is None or limit <= 0:
            raise RunFailed("no ranks are left" if ranks is None else "no time is left")
        try:
            observations.mkdir(parents=True)
        except OSError as error:
            raise self._unwritable(error) from None
        outcome = ranks.run(case.id, observations, fault, limit, trace)
        if not outcome.good:
            self._drop(case.world_size)
            raise RunFailed(_cause(outcome) if outcome.failures or outcome.deaths else outcome.places())
        try:
            return [RankObservation.load(observations / f"rank{r}.safetensors") for r in range(case.world_size)]
        except ObservationError as error:
            raise RunFailed(str(error)) from None

    def _judged(self, case: Case, observations: Path, fault: str | None) -> dict[str, Any]:
        """Judge the observations of a case that every rank finished."""
        from suites.examine import examine  # noqa: PLC0415
        from suites.observe import RankObservation  # noqa: PLC0415
        from suites.reference import ReferenceCache  # noqa: PLC0415

        def again(case: Case, trace: int | None = None) -> list[RankObservation]:
            name = f"at {case.dtype} seed {case.seed}" if trace is None else f"trace of step {trace + 1}"
            return self._again(case, observations / name, fault, trace)

        begin = time.monotonic()
        seen = [RankObservation.load(observations / f"rank{r}.safetensors") for r in range(case.world_size)]
        if self._references is None:
            self._references = ReferenceCache()
        with one_thread():  # the same sums on every machine, and no threads that wait for busy cores
            examined = examine(case, seen, self._references, again)
        judged, diagnosis = examined.judgement, examined.diagnosis
        seconds = [max(steps) for steps in zip(*([s.seconds for s in r.steps] for r in seen), strict=True)]
        median = statistics.median(seconds[1:])
        return {
            "status": "finished",
            "verdict": judged.verdict,
            "oracle": ", ".join(dict.fromkeys(f.oracle for f in judged.findings if f.flagged)) or None,
            "evidence": judged.evidence,
            "findings": tuple(
                records.Finding(
                    oracle=f.oracle,
                    flagged=f.flagged,
                    evidence=f.evidence,
                    error=f.error,
                    limit=f.limit,
                    unit=f.unit,
                    step=f.step,
                )
                for f in judged.findings
            ),
            "error": judged.error,
            "limit": judged.limit,
            "headroom": judged.headroom,
            "error_of": judged.error_of,
            "seconds_per_step": median,
            "step_seconds": tuple(seconds),
            "tokens_per_second": case.tokens_per_step / median,
            "peak_memory_bytes": max(r.peak_memory_bytes for r in seen),
            "measured": tuple(_plain(records.Measured, row) for row in judged.measured),
            "escalation": tuple(_plain(records.Rung, rung) for rung in judged.rungs),
            "diagnosis": diagnosis.sentence if diagnosis else "",
            "guesses": tuple(_plain(records.Guess, guess) for guess in diagnosis.guesses) if diagnosis else (),
            "dormant": tuple(_plain(records.Dormant, found) for found in examined.dormant),
            "judge_seconds": (judging := time.monotonic() - begin),
            "verdict_seconds": judging + max(r.observing_seconds for r in seen),
        }

    def _bad(self, case: Case, outcome: Outcome, what: str, *, cut: bool) -> dict[str, Any]:
        """Verdict over ranks that did not all do what they were told; `cut`: the limit was the rest of the budget."""
        found: dict[str, Any] = {"status": "finished", "stacks": outcome.stacks or None}
        primary = outcome.primary
        if outcome.timed_out:
            found["status"] = "timeout"
            if cut:
                text = f"the run's budget ended first ({what}); {outcome.places()}"
                return found | {"verdict": "inconclusive", "evidence": text}
            return found | {"verdict": "hang", "evidence": f"{what}; {outcome.places()}", "guesses": (HANG,)}
        for rank, failed in outcome.failures.items():
            if failed.phase == "save" or _disk_full(failed):
                raise SetupError(f"rank {rank} cannot write to {self.directory}: {_first_line(failed.message)}")
        for rank, death in outcome.deaths.items():
            if outcome.last.get(rank) == "save":
                raise SetupError(f"rank {rank} {death} while it wrote to {self.directory}")
        try:
            check_writable(self.directory)
        except OSError as error:  # whatever the ranks died of: their logs cannot tell, and the target is not to blame
            raise self._unwritable(error) from None
        if outcome.refused and primary:
            _, failed = primary
            return found | {
                "verdict": "refused",
                "evidence": f"{failed.type}: {_paragraph(failed.message)} ({failed.where})",
            }
        if tie := _broken_tie(case, outcome):
            evidence = f"{tie.evidence}; then {_cause(outcome)}"
            found |= {"verdict": "bug", "oracle": tie.oracle, "findings": (tie,), "evidence": evidence}
            return found | {"guesses": (BY_REPLACEMENT if "'sharded'" in tie.evidence else LOST,)}
        return found | {"verdict": "crash", "evidence": _cause(outcome)}

    def _unwritable(self, error: OSError) -> SetupError:
        return SetupError(f"cannot write to {self.directory}: {error.strerror or error}")

    def _places(self, case: Case) -> str:
        ranks = self.sets.get(case.world_size)
        return "; ".join(f"rank {r.number} {r.place}" for r in ranks.ranks) if ranks else "no ranks were up"

    # House-keeping

    def _make_room(self, coming: int) -> None:
        """Stop idle sets of other sizes where they would be too many, or where they hold memory of a GPU."""
        for size, ranks in list(self.sets.items()):
            if ranks.device.startswith("cuda") or sum(self.sets) + coming > KEEP_RANKS:
                ranks.stop()
                del self.sets[size]

    def _drop(self, size: int) -> None:
        ranks = self.sets.pop(size, None)
        if ranks:
            ranks.kill()

    def _kill_all(self) -> None:
        for size in list(self.sets):
            self._drop(size)

    def _tidy(self, observations: Path, record: Record) -> None:
        """Keep the observations of cases that are not green, while there is room for them."""
        parent = observations.parent
        with contextlib.suppress(OSError):
            too_much = sum(f.stat().st_size for f in parent.rglob("*.safetensors")) > KEEP_OBSERVATIONS
            unwanted = records.expected(record) and not self.settings.keep_observations
            if unwanted or too_much or not any(observations.iterdir()):
                shutil.rmtree(observations)

    def _final(self, record: Record) -> Record:
        self._log.append(FinalRow(record=record))
        self.records.append(record)
        if self.on_record:
            self.on_record(record)
        return record


def run(
    cases: Sequence[Case],
    out: Path,
    *,
    plan: str = "custom",
    budget: float | None = None,
    subject: Subject = INSTALLED,
    settings: Settings = DEFAULTS,
    command: str = "",
    on_record: OnRecord | None = None,
    on_start: Callable[[Case, int, float | None], None] | None = None,
) -> Run:
    """Run cases within a budget and read the result back.

    Every case gets a record; the end row has the exit code. SIGINT and SIGTERM, where `interruptible` turns them into
    `Interrupted`, end the run in good order.

    Args:
        budget: seconds for everything, start-up of ranks included; None: the sum of all limits.
        on_record: hears of every record once it is on disk.
        on_start: hears of every case before it starts: the case, its number from 1, and about how many seconds all
            cases after it will take (None while nothing was measured).

    Raises:
        LogError: the directory cannot be used.
        SetupError: the run had to stop; the rows so far are on disk.
    """
    ordered = schedule.order(cases)
    session = Session(
        out, Plan(plan, tuple(ordered), budget, command), subject=subject, settings=settings, on_record=on_record
    )
    todo = list(ordered)
    code = FAILED
    try:
        with contextlib.suppress(Interrupted, KeyboardInterrupt), session:
            short = _loop(session, todo, on_start)
            bad = short or not session.records or not all(map(records.expected, session.records))
            code = FAILED if bad else OK
            session.close("budget" if short else "complete", code)
    finally:
        session.close("error", FAILED)
    return records.read_run(out)


def _loop(session: Session, todo: list[Case], on_start: Callable[[Case, int, float | None], None] | None) -> bool:
    """Run what is to do, in order; True when the budget was too short. `todo` shrinks as cases get their records."""
    total = len(todo)
    try:
        while todo:
            case = todo[0]
            needed = session.forecast.case(case, starts=session.needs_start(case))
            if needed > session.left:
                reason = (
                    f"budget of {session.budget:.0f} s: {max(session.left, 0):.1f} s left, "
                    f"this case needs about {needed:.1f} s"
                )
                _skip_all(session, todo, reason)
                return True
            if on_start:
                up = {*session.sets, case.world_size}
                rest = session.forecast.all(todo[1:], up) if session.forecast.cases else None
                on_start(case, total - len(todo) + 1, rest)
            todo.pop(0)
            session.run(case)
    except (Interrupted, KeyboardInterrupt):
        _skip_all(session, todo, "interrupted before this case began")
        raise
    except SetupError as error:
        with contextlib.suppress(LogError):
            _skip_all(session, todo, f"the run was stopped: {error}")
        raise
    return False


def _skip_all(session: Session, todo: list[Case], reason: str) -> None:
    while todo:
        session.skip(todo[0], "not_run", reason)
        todo.pop(0)


def ignore_signals() -> None:
    """Let no SIGINT, SIGTERM or SIGHUP disturb what comes now."""
    for number in STOPPING:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def interruptible(*, restore: bool = True) -> Iterator[None]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into `Interrupted`; later ones are ignored until the block ends.

    For the main thread only. What must come after the first signal too (a report) belongs into the block.

    Args:
        restore: put the handlers of before back at the end; False for a process that ends then.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        ignore_signals()
        raise Interrupted(number)

    before = {number: signal.signal(number, stop) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items() if restore else ():
            signal.signal(number, handler)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread in this process until the block ends."""
    import torch  # noqa: PLC0415

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def now() -> str:
    """The time in UTC, ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def version() -> str:
    """Version of tiebench, and its commit when it runs from a git checkout."""
    if given := os.environ.get("TIEBENCH_VERSION"):  # a container has no git to ask
        return given
    try:
        number = importlib.metadata.version("tiebench")
    except importlib.metadata.PackageNotFoundError:
        number = "0.1.0"
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return number
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return f"{number} ({found.stdout.strip()})"
    return number


def _plain(kind: type[_RowType], found: Any) -> _RowType:
    """A row of the record from a dataclass of the same fields; numbers that are not finite become None."""
    values = {name: getattr(found, name) for name in kind.__struct_fields__}
    return kind(**{n: None if isinstance(v, float) and not math.isfinite(v) else v for n, v in values.items()})


def _broken_tie(case: Case, outcome: Outcome) -> records.Finding | None:
    """The tie that was broken before the ranks crashed: the crash is its consequence, or hides it."""
    from suites.observe import Lifecycle  # noqa: PLC0415
    from suites.oracles import broken_tie  # noqa: PLC0415

    for rank, failed in sorted(outcome.failures.items()):
        if found := broken_tie(case, rank, [Lifecycle(*event) for event in failed.lifecycle]):
            return records.Finding(oracle=found.oracle, flagged=True, evidence=found.evidence)
    return None


def _cause(outcome: Outcome) -> str:
    """What went wrong first, then where the other ranks were."""
    alike = {(f.type, f.phase, f.message) for f in outcome.failures.values()}
    if outcome.primary and not (outcome.deaths and is_secondary(outcome.primary[1])):
        rank, failed = outcome.primary
        every = len(outcome.failures) == len(outcome.phases) > 1 and len(alike) == 1
        text = f"{'every rank' if every else f'rank {rank}'} raised {failed.type} in {failed.phase!r}: "
        text += f"{_paragraph(failed.message)} ({failed.where})"
        named = set(outcome.phases) if every else {rank}
    else:  # a rank is gone, and what the others raised is that it is gone
        first = next(iter(outcome.deaths))
        text, named = f"rank {first} {outcome.phases[first]}", {first}
    rest = outcome.places(but=named)
    return f"{text}; {rest}"[: 2 * EVIDENCE_LIMIT] if rest else text


def _harmless(fault: str | None) -> bool:
    if fault is None:
        return False
    from suites.faults import HARMLESS  # noqa: PLC0415

    return fault in HARMLESS


def _disk_full(failed: ch.Failed) -> bool:
    codes = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
    return failed.type == "OSError" and any(f"[Errno {code}]" in failed.message for code in codes)


def _annotated(record: Record) -> Record:
    """The record with what its verdict does not say: a fault that nobody saw, a limit that was not kept."""
    notes = []
    if record.fault and not record.harmless and record.verdict in records.GREEN:
        notes.append(f"fault {record.fault} was not caught")
    if record.status == "finished" and records.over_budget(record):
        judging = f", {record.judge_seconds:.1f} s of it judging" if record.judge_seconds else ""
        notes.append(f"took {record.wall_seconds:.1f} s{judging}: over its limit of {record.budget_seconds:.0f} s")
    if not notes:
        return record
    return msgspec.structs.replace(record, evidence="; ".join(filter(None, [*notes, record.evidence])))


def _first_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[0][:EVIDENCE_LIMIT]


def _paragraph(text: str) -> str:
    """First paragraph of a message, on one line."""
    paragraph = re.split(r"\n\s*\n", text.strip())[0]
    line = " ".join(paragraph.split())
    return line if len(line) <= EVIDENCE_LIMIT else line[:EVIDENCE_LIMIT] + " …"


def _patch_line(trace: str, name: str) -> str | None:
    found = re.findall(rf'File "{re.escape(name)}", line (\d+)', trace)
    return found[-1] if found else None


__all__ = ["Interrupted", "Patch", "Plan", "Session", "SetupError", "Subject", "interruptible", "run"]
