"""The run loop: cases in, records out, whatever happens to the ranks in between.

`Session` runs one case after the other and keeps the record log; `run` is a session over a list of cases with a budget,
an end row for every way to end, and the same exit codes as the command line.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from ci import channel as ch
from ci import costs, forecast, forkserver, hangs, history, records, schedule
from ci.forkserver import ForkServer, ServerGone
from ci.history import History
from ci.judge import Judge, JudgeGone, Process, TooSlow
from ci.periodic import Periodic
from ci.ranks import (
    Outcome,
    RankSet,
    Settings,
    check_seconds,
    check_writable,
    clean_environment,
    is_secondary,
    listen,
    module_command,
)
from ci.records import EndRow, FinalRow, LogError, Reason, Record, RecordLog, ResumedRow, Run, RunRow, StartedRow
from suites import bug_classes
from suites.cases import Case
from suites.lifecycle import Lifecycle, broken_tie
from suites.runs import RunFailed

if TYPE_CHECKING:
    from ci.targets import Target

OK, FAILED, USAGE, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143
KEEP_RANKS = 8  # idle ranks that may stay alive beside the set in use, in all
KEEP_OBSERVATIONS = 512 * 2**20  # bytes of observations of flagged cases to keep in a run directory
EVIDENCE_LIMIT = 900
VERDICT_GRACE = 5.0  # seconds that an interrupted run gives the judge
FEW_STEPS = 6  # with fewer than seven steps, the first of which warms up, reports compare no step times
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PACKAGE = {"handwritten": "torch"}  # path -> the package that is under test; else it is called like the path

OnRecord = Callable[[Record], None]
# Hears of a case before it starts: the case, its number from 1, about how many seconds all cases after it will take.
OnStart = Callable[[Case, int, float | None], None]


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
# Causes of a hang that are of this class, by `ci.hangs`; the others are no business of any collective.
OF_COLLECTIVES = (
    "different sizes", "different order", "different collectives", "collective left out", "unmatched message",
    "collective does not end", "unknown",
)  # fmt: skip
INSTALLED = Subject()
NO_HISTORY = History()
DEFAULTS = Settings()


@dataclass(frozen=True)
class Plan:
    """What a run is to do, for its first row.

    Args:
        budget: seconds for everything, start-up of ranks included; None: what the limits of its cases add up to.
        spent: seconds of the budget that were gone before this process began.
        why: case -> why it stands where it stands.
        phases: seconds that each phase is expected to take; forecast: of the whole, from history.

    Raises:
        ValueError: the budget is no number of seconds.
    """

    name: str
    cases: tuple[Case, ...]
    budget: float | None = None
    command: str = ""
    spent: float = 0.0
    why: Mapping[Case, str] = field(default_factory=dict)
    phases: Mapping[str, float] = field(default_factory=dict)
    forecast: records.Forecast | None = None

    def __post_init__(self) -> None:
        """Check the budget."""
        if self.budget is not None:
            check_seconds("budget", self.budget, 0.0)

    def seconds(self, settings: Settings) -> float:
        """The budget as a number."""
        if self.budget is not None:
            return self.budget
        return settings.startup_limit + max(1, len(self.cases)) * (settings.startup_limit + settings.case_limit)


@dataclass(eq=False)
class Flight:
    """A case between its `started` row and its final one.

    Args:
        base: fields of its record that were known before it ran; result: those that its ranks, and the judge, gave.
        observations: where its ranks saved what they saw; None once nothing is left to be judged.
        begin: on the monotonic clock; seconds: that its ranks took, start-up included.
    """

    case: Case
    fault: str | None
    base: dict[str, Any]
    directory: Path
    begin: float
    seconds: float = 0.0
    result: dict[str, Any] = field(default_factory=dict)
    observations: Path | None = None


class Session:
    """Runs cases one by one, each to a record on disk. A context manager: its end stops ranks and closes the log.

    Args:
        directory: run directory; made, must be empty.
        plan: what is to be run; cases outside of it may be run too, but such a run is not green.
        on_record: called with every record once it is on disk.
        past: what earlier runs say of the seconds that cases take.
        server: a fork server that is up, which the session uses and does not end; None: one of its own.
        resume: go on with the run that is in the directory; the plan's cases are what is left of it.

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
        *,
        past: History = NO_HISTORY,
        server: ForkServer | None = None,
        resume: bool = False,
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
        self.begin = time.monotonic() - plan.spent
        self.first_case: float | None = None  # when it began, on the monotonic clock
        self.costs = costs.Costs(past)
        self.reserve = schedule.reserve(len(plan.cases)) if plan.budget is not None else 0.0
        self.sets: dict[int, RankSet] = {}
        self.fingerprint: str | None = None
        self.settled, self.unexpected = 0, 0  # records, and those that are not green or not of the plan
        self.startup_seconds = 0.0  # of all sets of ranks
        self.flights: list[Flight] = []
        self.judge = Judge(self._launch_judge)
        self.limits_from_history = bool(past.here)
        self._count = self._earlier_sets = 0
        self.started_sets = 0
        self._closed = False
        self._attempts: dict[str, int] = {}
        self._in_judgement: Path | None = None  # observations that the judge has at this moment
        self._given, self._own = server, list[ForkServer]()
        self._paths = tuple(sorted(dict.fromkeys(case.path for case in plan.cases), key=lambda path: path in PACKAGE))
        self._planned = {case.id for case in plan.cases}
        self._log = self._resume() if resume else self._new()
        if self._log.note:
            self.settings.say(self._log.note)

    def _new(self) -> RecordLog:
        plan = self.plan
        targets = {path: self.subject.target(path) for path in self._paths}  # a framework's own path first
        first = RunRow(
            schema=records.SCHEMA,
            run_id=self.directory.resolve().name,
            plan=plan.name,
            cases=tuple(case.id for case in plan.cases),
            target=next(iter(targets.values()), self.subject.target("deepspeed")),
            targets=targets,
            budget_seconds=self.budget,
            started_at=now(),
            tiebench=version(),
            command=plan.command,
            options=shlex.join(self.subject.options),
            forecast=plan.forecast,
            phases=dict(plan.phases),
        )
        return RecordLog(self.directory, first)

    def _resume(self) -> RecordLog:
        row = ResumedRow(
            resumed_at=now(),
            command=self.plan.command,
            budget_seconds=self.budget,
            tiebench=version(),
            forecast=self.plan.forecast,
            phases=dict(self.plan.phases),
        )
        log, before = RecordLog.resume(self.directory, row)
        self._attempts, self._count = dict(before.attempts), before.starts
        self._earlier_sets = len(list((self.directory / "logs").glob("set*-*.log")))
        kept = [r for r in before.records if r.status in records.RESULTS or r.reason == "given up"]
        self.settled, self.unexpected = len(kept), sum(not records.expected(record) for record in kept)
        self._planned = set(before.plan.cases)
        return log

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close("complete", self.exit_code)
        elif isinstance(error, (SetupError, LogError)):
            self.close("error", USAGE, str(error))
        elif isinstance(error, (Interrupted, KeyboardInterrupt)):
            number = error.number if isinstance(error, Interrupted) else signal.SIGINT
            self.close("interrupted", 128 + number, signal.Signals(number).name)
        else:
            self.close("error", FAILED, f"{kind.__name__}: {error}"[:EVIDENCE_LIMIT])

    @property
    def exit_code(self) -> int:
        """What the records so far make it."""
        return FAILED if self.unexpected or not self.settled else OK

    @property
    def left(self) -> float:
        """Seconds left of the plan's budget, without the reserve for the report."""
        return self.begin + self.budget - self.reserve - time.monotonic()

    def overlaps(self, case: Case) -> bool:
        """Whether this case may be judged while the next one runs.

        Not where a core would be missing and step times be spoilt that somebody may compare.
        """
        return cores() > case.world_size or case.steps <= FEW_STEPS

    def run(self, case: Case, fault: str | None = None) -> Record:
        """Run one case to its record, with the subject's fault or with one of its own.

        Raises:
            SetupError: the run cannot go on (patch, disk); LogError: a row cannot be written.
        """
        return self.settle(self.train(case, fault))

    def advance(self, case: Case, fault: str | None = None) -> None:
        """Run one case; its verdict may come while the next one runs. Records are told to `on_record`.

        Raises:
            SetupError, LogError: as `run`.
        """
        before = [*self.flights]
        flight = self.train(case, fault)
        self.catch_up(before)
        self.start_judging(flight)
        if not flight.observations or not self.overlaps(case):
            self.settle(flight)

    def catch_up(self, flights: Sequence[Flight] | None = None) -> None:
        """Write the records of some cases that `advance` ran, or of all, where they are still to come."""
        for flight in [*self.flights] if flights is None else flights:
            if flight in self.flights:
                self.settle(flight)

    def train(self, case: Case, fault: str | None = None) -> Flight:
        """The first half of `run`: everything that needs the ranks for the first time. `settle` must follow.

        Raises:
            SetupError, LogError: as `run`.
        """
        self._count += 1
        attempt = self._attempts[case.id] = self._attempts.get(case.id, 0) + 1
        fault = fault or self.subject.fault
        base = self._base(case, attempt, fault)
        base["overlapped"] = self._in_judgement is not None
        self.first_case = self.first_case or time.monotonic()
        self._log.append(StartedRow(case=case.id, attempt=attempt, started_at=str(base["started_at"])))
        observations = self.directory / "observations" / f"{self._count:04d}"
        flight = Flight(case, fault, base, observations, time.monotonic())
        self.flights.append(flight)
        with self._failing(flight):
            flight.result = self._attempt(flight)
        flight.seconds = time.monotonic() - flight.begin
        return flight

    def settle(self, flight: Flight) -> Record:
        """The second half of `run`: judge what the ranks saw, write the record.

        Raises:
            SetupError, LogError: as `run`.
        """
        if flight.observations:
            begin = time.monotonic()
            with self._failing(flight):
                flight.result |= self._judged(flight.case, flight.observations, flight.fault)
            flight.result.setdefault("judge_seconds", time.monotonic() - begin)
        result = flight.result
        startup = result.get("startup_seconds", 0.0)
        self.startup_seconds += startup
        result.setdefault("wall_seconds", flight.seconds - startup + (result.get("judge_seconds") or 0.0))
        flight.base["environment"] = self.fingerprint
        record = _annotated(Record(**{**flight.base, **result}))
        if record.status == "finished" and record.judge_seconds is not None:
            self.costs.learn(flight.case, (record.wall_seconds or 0.0) - record.judge_seconds, record.judge_seconds)
        self._tidy(flight.directory, record)
        self.flights.remove(flight)
        self._final(record)
        return record

    @contextlib.contextmanager
    def _failing(self, flight: Flight) -> Iterator[None]:
        """A fault of this program costs one case, not the run; whatever else is raised leaves a record of all cases."""
        try:
            yield
        except (SetupError, LogError) as error:
            self._abandon(f"the run was stopped: {error}", "error")
            raise
        except (Interrupted, KeyboardInterrupt):
            self._abandon("interrupted", "interrupted")
            raise
        except Exception as error:  # noqa: BLE001 - see above
            self._kill_all()
            text = str(error).partition("\nTraceback")[0]
            evidence = f"tiebench itself failed: {text or type(error).__name__}"[:EVIDENCE_LIMIT]
            flight.observations = None
            flight.result |= {
                "status": "finished",
                "verdict": "crash",
                "evidence": evidence,
                "stacks": traceback.format_exc()[-12000:],
            }

    def _abandon(self, why: str, reason: Reason) -> None:
        """Write a record of every case that has none; the ranks are ended.

        A verdict that is about to come is waited for: it is the result of a case that has run.
        """
        self._await_verdict()
        places = {id(flight): self._places(flight) for flight in self.flights}
        self._kill_all()
        for flight in [*self.flights]:
            self.flights.remove(flight)
            seconds = flight.seconds or time.monotonic() - flight.begin
            text = f"{why} after {seconds:.1f} s; {places[id(flight)]}"
            with contextlib.suppress(LogError):
                self._final(Record(**flight.base, status="lost", reason=reason, evidence=text, wall_seconds=seconds))

    def skip(self, case: Case, status: Literal["not_run", "skipped"], why: str, reason: Reason | None = None) -> Record:
        """Write the record of a case that is not run: why, for people and in one word."""
        base = self._base(case, self._attempts.get(case.id, 0) + 1, self.subject.fault)
        base |= {"started_at": None, "budget_seconds": None}
        return self._final(Record(**base, status=status, evidence=why, reason=reason))

    def warm(self, case: Case) -> None:
        """Start ranks for a case before anybody knows whether it fits the budget; what goes wrong, the case will say.

        Raises:
            SetupError: as `run`.
        """
        begin = time.monotonic()
        limit = min(self.settings.startup_limit, self.left)
        outcome = self._launch(case.world_size, limit).start(max(begin + limit - time.monotonic(), 0.0))
        self.startup_seconds += time.monotonic() - begin
        if not outcome.good:
            self._drop(case.world_size)

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
        self._abandon("the run ended", "interrupted" if reason == "interrupted" else "error")
        self.judge.close()
        for server in self._own:
            server.close()
        with contextlib.suppress(LogError):  # a full disk: the rows that are there tell the rest
            self._log.append(
                EndRow(
                    ended_at=now(),
                    reason=reason,
                    exit_code=exit_code,
                    message=message,
                    phases=self._phases(),
                    seconds=time.monotonic() - self.begin,
                )
            )
        self._log.close()

    def _phases(self) -> dict[str, float]:
        """Seconds used so far in each phase of the budget; the report comes after it."""
        end, begun = time.monotonic(), self.begin + self.plan.spent
        first = self.first_case or end
        used = {
            "provisioning": self.plan.spent,
            "setup": first - begun,
            "startup": self.startup_seconds,
            "cases": end - first - self.startup_seconds,
        }
        return {phase: round(max(0.0, seconds), 3) for phase, seconds in used.items()}

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
            "why": self.plan.why.get(case, ""),
        }

    def _attempt(self, flight: Flight) -> dict[str, Any]:
        """Fields of the record that the ranks' run of a case fills; observations to be judged are left in `flight`."""
        case, begin = flight.case, time.monotonic()
        limit = min(self.settings.startup_limit, self.left)
        outcome = self._ready(case, limit)
        startup = time.monotonic() - begin if outcome is not None else 0.0
        common = {"startup_seconds": round(startup, 3)}
        if outcome is not None and not outcome.good:
            left = self._drop(case.world_size)
            what = f"the ranks did not come up within {limit:.0f} s"
            bad = self._bad(case, outcome, what, cut=limit < self.settings.startup_limit)
            return common | {"wall_seconds": 0.0} | _with_leftovers(bad, left)
        ranks = self.sets[case.world_size]
        try:
            flight.directory.mkdir(parents=True)
        except OSError as error:
            raise self._unwritable(error) from None
        wanted = self.settings.case_limit
        if self.limits_from_history and not flight.fault:
            wanted = self.costs.limit(case, wanted)
        limit = min(wanted, self.left)
        with ranks.attending(self.judge.connection if self._in_judgement else None, self._hear_judge):
            outcome = ranks.run(case.id, flight.directory, flight.fault, limit)
        common["budget_seconds"] = limit
        if not outcome.good:
            left = self._drop(case.world_size)
            what = f"no result within {limit:.0f} s"
            return common | _with_leftovers(self._bad(case, outcome, what, cut=limit < wanted), left)
        flight.observations = flight.directory
        return common

    def _ready(self, case: Case, limit: float) -> Outcome | None:
        """A set of ranks for the case, with its framework imported. Returns None when it was there already."""
        begin = time.monotonic()
        outcome = None
        ranks = self.sets.get(case.world_size)
        if ranks is None:
            ranks = self._launch(case.world_size, limit)
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

    def _launch(self, size: int, limit: float) -> RankSet:
        """Processes of a new set; they have yet to connect."""
        self._make_room(size)
        self.started_sets += 1
        try:
            listener = listen(self.settings.host, size)
        except OSError as error:  # no such name, or not an address of this machine
            raise SetupError(f"--host {self.settings.host}: {error.strerror or error}") from None
        try:
            servers = self._servers(limit)
            name = f"set{self._earlier_sets + self.started_sets}"
            ranks = self.sets[size] = RankSet(name, size, self.settings, self.directory, listener, servers=servers)
            try:
                ranks.launch()
            except ServerGone:  # whatever it died of, fresh processes can tell
                self._drop_servers()
                return self._launch(size, limit)
        except OSError as error:
            raise self._unwritable(error) from None
        return ranks

    def _servers(self, limit: float) -> Sequence[ForkServer]:
        """The fork servers that ranks come from; none where ranks are started in another way."""
        if self.settings.launcher != "fork":
            return ()
        if self._given:
            return [self._given]
        if not self._own and forkserver.may_fork(self.settings.device):
            target = str(self.settings.target.resolve()) if self.settings.target else None
            command, extra = module_command("ci.forkserver")
            options = forkserver.Options(target=target, paths=self._paths)
            (self.directory / "logs").mkdir(exist_ok=True)
            log = self.directory.resolve() / "logs" / "forkserver.log"
            self._own.append(ForkServer.start(command, clean_environment() | extra, options, log))
            try:
                if not self._own[0].wait_ready(limit):
                    raise ServerGone("not ready")
            except ServerGone:
                self._drop_servers()
        return self._own

    def _drop_servers(self) -> None:
        """No fork server from now on: ranks are started as fresh processes."""
        for server in self._own:
            server.close()
        self._own, self._given = [], None
        self.settings = replace(self.settings, launcher="spawn")

    def _launch_judge(self, variables: Mapping[str, str]) -> Process:
        """Start the judge's process."""
        environment = clean_environment() | {"OMP_NUM_THREADS": "1", **variables}
        logs = self.directory.resolve() / "logs"
        logs.mkdir(exist_ok=True)
        with contextlib.suppress(ServerGone):
            for server in [self._given] if self._given else self._own:
                return server.fork("judge", environment, logs / "judge.log", logs)
        command, extra = module_command("ci.judge")
        if threading.current_thread() is threading.main_thread():
            environment[ch.DIE_WITH_PARENT] = str(os.getpid())
        with open(logs / "judge.log", "ab") as stream:
            return subprocess.Popen(
                command,
                env=environment | extra,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=logs,
            )

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

    def start_judging(self, flight: Flight) -> None:
        """Have a case judged in the background, if there is anything to judge; `settle` waits for the verdict."""
        if flight.observations and not self._in_judgement:
            with self._failing(flight):
                self.judge.start(flight.case, flight.observations)
                self._in_judgement = flight.observations

    def _hear_judge(self) -> None:
        """Write the record of a case whose verdict came while the next one runs."""
        if self._in_judgement and self.judge.ready():
            self.settle(next(f for f in self.flights if f.observations == self._in_judgement))

    def _await_verdict(self) -> None:
        """Give the judge a moment for what it judges now, unless it needs ranks for it."""
        deadline = time.monotonic() + VERDICT_GRACE
        with contextlib.suppress(LogError, SetupError):
            while self._in_judgement and self.judge.connection and not self.judge.wants_ranks:
                if self.judge.ready():
                    self._hear_judge()
                elif time.monotonic() > deadline:
                    break
                else:
                    time.sleep(0.01)

    def _judged(self, case: Case, observations: Path, fault: str | None) -> dict[str, Any]:
        """Verdict over the observations of a case that every rank finished."""

        def again(rung: Case, trace: int | None) -> Path:
            name = f"at {rung.dtype} seed {rung.seed}" if trace is None else f"trace of step {trace + 1}"
            return self._again(rung, observations / name, fault, trace)

        for attempt in (1, 2):  # a judge that was killed costs nothing: what it judged is on disk
            try:
                if self._in_judgement != observations:
                    self.judge.start(case, observations)
                judged = self.judge.finish(min(self.settings.judge_limit, max(self.left, 1.0)), again)
                break
            except TooSlow as error:
                text = str(error) if self.left > 0 else f"the run's budget ended first ({error})"
                return {"status": "timeout", "verdict": "inconclusive", "evidence": text}
            except JudgeGone as error:
                if attempt == 2:
                    return {"status": "finished", "verdict": "inconclusive", "evidence": f"not judged: {error}"}
            finally:
                self._in_judgement = None
        return {"status": "finished", **judged.fields()}

    def _again(self, case: Case, observations: Path, fault: str | None, trace: int | None = None) -> Path:
        """Run one more case on the same ranks, for a verdict that needs it; returns where its observations are.

        Raises:
            RunFailed: it did not end well, or there is no time or no rank left for it.
        """
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
        return observations

    def _bad(self, case: Case, outcome: Outcome, what: str, *, cut: bool) -> dict[str, Any]:
        """Verdict over ranks that did not all do what they were told; `cut`: the limit was the rest of the budget."""
        found: dict[str, Any] = {"status": "finished", "stacks": outcome.stacks or None}
        primary, hang = outcome.primary, outcome.hang
        if outcome.timed_out:
            found["status"] = "timeout"
            found["collectives"] = hang.table() or None if hang else None
            seen = f"{what}; {hang.sentence}; {outcome.places()}" if hang else f"{what}; {outcome.places()}"
            if cut:
                return found | {"verdict": "inconclusive", "evidence": f"the run's budget ended first ({seen})"}
            if hang and hang.cause == "slow":
                return found | {"verdict": "inconclusive", "evidence": seen}
            guesses = (HANG,) if hang is None or hang.cause in OF_COLLECTIVES else ()
            return found | {"verdict": "hang", "evidence": seen, "guesses": guesses}
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
        if hang and (parted := _parted(outcome)):
            evidence = f"{_cause(outcome)}; {parted.sentence}"
            return found | {"verdict": "crash", "evidence": evidence, "collectives": hang.table(), "guesses": (HANG,)}
        return found | {"verdict": "crash", "evidence": _cause(outcome)}

    def _unwritable(self, error: OSError) -> SetupError:
        return SetupError(f"cannot write to {self.directory}: {error.strerror or error}")

    def _places(self, flight: Flight) -> str:
        if flight.observations:
            return "its ranks had finished, and it was being judged"
        ranks = self.sets.get(flight.case.world_size)
        return "; ".join(f"rank {r.number} {r.place}" for r in ranks.ranks) if ranks else "no ranks were up"

    # House-keeping

    def _make_room(self, coming: int) -> None:
        """Stop idle sets of other sizes where they would be too many, or where they hold memory of a GPU."""
        for size, ranks in list(self.sets.items()):
            if ranks.device.startswith("cuda") or sum(self.sets) + coming > KEEP_RANKS:
                ranks.stop()
                del self.sets[size]

    def _drop(self, size: int) -> tuple[str, ...]:
        """End a set; processes that outlived it, and what became of them."""
        ranks = self.sets.pop(size, None)
        if ranks is None:
            return ()
        ranks.kill()
        return ranks.leftovers

    def _kill_all(self) -> None:
        for size in list(self.sets):
            self._drop(size)
        if self._in_judgement:  # it may wait for ranks that are gone
            self.judge.close()
            self._in_judgement = None

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
        self.settled += 1
        self.unexpected += not records.expected(record) or record.case not in self._planned
        if self.on_record:
            self.on_record(record)
        return record


def run(
    cases: Sequence[Case],
    out: Path,
    *,
    plan: str = "custom",
    budget: float | None = None,
    spent: float = 0.0,
    subject: Subject = INSTALLED,
    settings: Settings = DEFAULTS,
    command: str = "",
    on_record: OnRecord | None = None,
    on_start: OnStart | None = None,
    report_every: float | None = None,
    server: ForkServer | None = None,
) -> Run:
    """Run cases within a budget and read the result back.

    Every case gets a record; the end row has the exit code. SIGINT and SIGTERM, where `interruptible` turns them into
    `Interrupted`, end the run in good order.

    Args:
        budget: seconds for everything, start-up of ranks included; None: the sum of all limits.
        spent: seconds of it that are gone already.
        on_record: hears of every record once it is on disk.
        on_start: hears of every case before it starts.
        report_every: seconds between two reports while the run is going; None: none.
        server: as of `Session`.

    Raises:
        LogError: the directory cannot be used.
        SetupError: the run had to stop; the rows so far are on disk.
    """
    ahead, past = _look_ahead(
        plan, cases, (), out, budget, spent=spent, subject=subject, settings=settings, command=command
    )
    session = Session(out, ahead, subject, settings, on_record, past=past, server=server)
    return _execute(session, ahead.cases, frozenset(), on_start, report_every)


def resume(
    out: Path,
    *,
    budget: float | None = None,
    spent: float = 0.0,
    subject: Subject = INSTALLED,
    settings: Settings = DEFAULTS,
    command: str = "",
    on_record: OnRecord | None = None,
    on_start: OnStart | None = None,
    report_every: float | None = None,
    server: ForkServer | None = None,
) -> Run:
    """Go on with a run that was cut short: run its cases that have no result, and read all of it back.

    Cases in whose midst the whole run was killed come last, and alone: should one of them be the reason, it costs
    nothing but itself.

    Args:
        budget: seconds for what is left; None: as much as the run had.
        subject: what `Run.plan.options` says; others: as of `run`.

    Raises:
        LogError: nothing can be gone on with; SetupError: as `run`.
    """
    before = records.read_run(out)
    for path, target in before.plan.targets.items():
        if (here := subject.target(path)) != target:
            raise SetupError(f"cannot resume {out}: its cases ran {target}, and here is {here}")
    suspects = {Case.parse(case) for case in before.suspects}
    cases = [case for case in map(Case.parse, before.todo) if case not in suspects]
    budget = before.plan.budget_seconds if budget is None else budget
    last = sorted(suspects, key=lambda case: case.id)
    ahead, past = _look_ahead(
        before.plan.plan, cases, last, out, budget, spent=spent, subject=subject, settings=settings, command=command
    )
    session = Session(out, ahead, subject, settings, on_record, past=past, server=server, resume=True)
    return _execute(session, ahead.cases, frozenset(suspects), on_start, report_every)


def _look_ahead(
    name: str,
    cases: Sequence[Case],
    last: Sequence[Case],
    out: Path,
    budget: float | None,
    *,
    spent: float,
    subject: Subject,
    settings: Settings,
    command: str,
) -> tuple[Plan, History]:
    """The plan of a run: order, expected phases, forecast; and the history that they are from. `last` come last."""
    past = history.read(out.parent, history.machine_here(settings.device), but=out)
    cost = costs.Costs(past)
    chosen = [*dict.fromkeys([*cases, *last])]
    if budget is None:  # all of them will run: in the order in which somebody named them
        ordered, why = chosen, dict[Case, str]()
    else:
        switch = 0.0 if forkserver.may_fork(settings.device) else costs.STARTUP
        known = past.past({path: subject.target(path) for path in dict.fromkeys(case.path for case in chosen)})
        planned = [item for part in (cases, last) for item in schedule.arrange(part, cost, known, switch=switch)]
        ordered = [item.case for item in planned]
        why = {item.case: item.reason for item in planned}
    limit = Plan(name, tuple(ordered), budget).seconds(settings)
    ahead = forecast.of(name, chosen, past, cost, budget=limit, now=datetime.now(timezone.utc))
    plan = Plan(
        name,
        tuple(ordered),
        budget,
        command,
        spent=spent,
        why=why,
        phases=asdict(schedule.phases(chosen, cost, provisioning=spent)),
        forecast=records.Forecast(**ahead.plain()),
    )
    return plan, past


def _execute(
    session: Session,
    cases: Sequence[Case],
    alone: frozenset[Case],
    on_start: OnStart | None,
    report_every: float | None,
) -> Run:
    """Run all cases and end the session, however that ends."""
    todo = [*cases]
    reports = Periodic(session.directory, report_every)
    try:
        with contextlib.suppress(Interrupted, KeyboardInterrupt), session:
            short = _loop(session, todo, alone, on_start, reports)
            session.close("budget" if short else "complete", FAILED if short else session.exit_code)
    finally:
        session.close("error", FAILED)
        reports.close()
    return records.read_run(session.directory)


def _loop(
    session: Session, todo: list[Case], alone: frozenset[Case], on_start: OnStart | None, reports: Periodic
) -> bool:
    """Run what is to do, in order; True when the budget was too short. `todo` shrinks as cases get their records.

    A case that does not fit what is left does not end the run: shorter ones after it may.
    """
    ran, warmed = 0, set[int]()
    try:
        while todo:
            reports.poll()
            judging = sum(session.costs.estimate(flight.case).judge for flight in session.flights)
            fitting = partial(schedule.next_fitting, todo, session.costs, session.left - judging, 0.0)
            first = session.started_sets == 0
            place = fitting(session.sets, first=first)
            if place is None:
                session.catch_up()
                hope = fitting({*session.sets, *warmed}, first=first, hopeful=True)
                if hope is not None and todo[hope].world_size not in {*session.sets, *warmed}:
                    warmed.add(todo[hope].world_size)  # once: it may be in vain
                    session.warm(todo[hope])
                    continue
                _skip_all(session, todo, "", "budget")
                return True
            case = todo.pop(place)
            ran += 1
            if on_start:
                rest = session.costs.share * sum(session.costs.estimate(c).expected for c in todo)
                on_start(case, ran, rest)
            if case in alone:
                session.catch_up()
                session.run(case)
            else:
                session.advance(case)
        session.catch_up()
    except (Interrupted, KeyboardInterrupt):
        _skip_all(session, todo, "interrupted before this case began", "interrupted")
        raise
    except SetupError as error:
        with contextlib.suppress(LogError):
            _skip_all(session, todo, f"the run was stopped: {error}", "error")
        raise
    return False


def _skip_all(session: Session, todo: list[Case], text: str, reason: Reason) -> None:
    """Records of cases that are not run; without a text it says what is left of the budget."""
    while todo:
        case = todo[0]
        why = text or (
            f"budget of {session.budget:.0f} s: {max(session.left, 0):.1f} s were left for cases, "
            f"and this one may take {session.costs.estimate(case).high:.1f} s"
        )
        session.skip(case, "not_run", why, reason)
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


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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


def _broken_tie(case: Case, outcome: Outcome) -> records.Finding | None:
    """The tie that was broken before the ranks crashed: the crash is its consequence, or hides it."""
    for rank, failed in sorted(outcome.failures.items()):
        if found := broken_tie(case, rank, [Lifecycle(*event) for event in failed.lifecycle]):
            return records.Finding(oracle="tie", flagged=True, evidence=found)
    return None


def _parted(outcome: Outcome) -> hangs.Difference | None:
    """Where the ranks parted, if that explains their end: gloo ends processes whose calls do not fit together, and a
    rank that waits for a call of one that has finished hears that the connection is closed."""
    found = outcome.hang.first_difference if outcome.hang else None
    if found is None or (outcome.deaths and found.missing):  # the dead issue nothing
        return None
    own = outcome.primary is not None and not is_secondary(outcome.primary[1])
    return None if own else found


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


def _with_leftovers(found: dict[str, Any], left: Sequence[str]) -> dict[str, Any]:
    """The fields of a record, its evidence with the processes that outlived their ranks."""
    return found | {"evidence": "; ".join([found["evidence"], *left])} if left else found


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


__all__ = ["Interrupted", "Patch", "Plan", "Session", "SetupError", "Subject", "interruptible", "resume", "run"]
