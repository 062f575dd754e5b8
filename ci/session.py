"""Runs cases one after the other, each to a record on disk, whatever happens to the ranks in between."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from ci import channel as ch
from ci import costs, forkserver, outcomes, records, schedule, sticky
from ci.exit_codes import FAILED, OK, USAGE
from ci.forkserver import ForkServer, ServerGone
from ci.history import History
from ci.judge import Judge, JudgeGone, Process, TooSlow
from ci.nodes import Nodes
from ci.ranks import (
    Outcome,
    RankSet,
    Settings,
    check_seconds,
    clean_environment,
    listen,
    module_command,
)
from ci.records import EndRow, FinalRow, LogError, Reason, Record, RecordLog, ResumedRow, RunRow, StartedRow
from ci.subject import INSTALLED, PACKAGE, SetupError, Subject, harmless, version
from suites.cases import Case
from suites.runs import RunFailed

KEEP_RANKS = 8  # idle ranks that may stay alive beside the set in use, in all
KEEP_OBSERVATIONS = 512 * 2**20  # bytes of observations of flagged cases to keep in a run directory
VERDICT_GRACE = 5.0  # seconds that an interrupted run gives the judge
FEW_STEPS = 6  # with fewer than seven steps, the first of which warms up, reports compare no step times
NO_HISTORY = History()
DEFAULTS = Settings()

OnRecord = Callable[[Record], None]


class Interrupted(BaseException):
    """SIGINT or SIGTERM; a BaseException so that no handler of a case's errors takes it for one."""

    def __init__(self, number: int):
        super().__init__(signal.Signals(number).name)
        self.number = number


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
        nodes: other machines that ranks are spread over; whoever made it closes it.
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
        nodes: Nodes | None = None,
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
        self.judge = Judge(self._launch_judge, self.settings.references, self.settings.say)
        self.limits_from_history = bool(past.here)
        self._count = self._earlier_sets = 0
        self.started_sets = 0
        self._closed = False
        self._attempts: dict[str, int] = {}
        self._in_judgement: Path | None = None  # observations that the judge has at this moment
        self.rechecked: frozenset[Case] = frozenset()  # cases that are run once more alone, and compared
        self._at_work: int | None = None  # size of the set that runs a case at this moment
        self._given, self._own = server, list[ForkServer]()
        self._lost_servers, self._nodes = 0, nodes
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
            started_at=records.now(),
            tiebench=version(),
            command=plan.command,
            options=shlex.join(self.subject.options),
            forecast=plan.forecast,
            phases=dict(plan.phases),
        )
        return RecordLog(self.directory, first)

    def _resume(self) -> RecordLog:
        row = ResumedRow(
            resumed_at=records.now(),
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
            self.close("error", FAILED, f"{kind.__name__}: {error}"[: outcomes.EVIDENCE_LIMIT])

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
            if flight.case in self.rechecked and flight.observations:
                with self._failing(flight):
                    self._recheck(flight)
        result = flight.result
        startup = result.get("startup_seconds", 0.0)
        self.startup_seconds += startup
        result.setdefault("wall_seconds", flight.seconds - startup + (result.get("judge_seconds") or 0.0))
        flight.base["environment"] = self.fingerprint
        record = outcomes.annotated(Record(**{**flight.base, **result}))
        if self.settings.known:
            record = outcomes.foreseen(record)
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
            # A verdict that fails while the next case runs must not cost that one its ranks.
            self._kill_all(but=self._at_work if flight.observations else None)
            text = str(error).partition("\nTraceback")[0]
            evidence = f"tiebench itself failed: {text or type(error).__name__}"[: outcomes.EVIDENCE_LIMIT]
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
        if self._nodes:
            self._nodes.release()
        with contextlib.suppress(LogError):  # a full disk: the rows that are there tell the rest
            self._log.append(
                EndRow(
                    ended_at=records.now(),
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
            "started_at": records.now(),
            "budget_seconds": self.settings.case_limit,
            "fault": fault,
            "harmless": harmless(fault),
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
        if outcome is not None and not outcome.good and self._server_is_gone():
            return self._attempt(flight)
        if outcome is not None and not outcome.good:
            left = self._drop(case.world_size)
            what = f"the ranks did not come up within {limit:.0f} s"
            bad = outcomes.failed(case, outcome, what, self.directory, cut=limit < self.settings.startup_limit)
            return common | {"wall_seconds": 0.0} | outcomes.with_leftovers(bad, left)
        ranks = self.sets[case.world_size]
        try:
            flight.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise outcomes.unwritable(self.directory, error) from None
        wanted = self.settings.case_limit
        if self.limits_from_history and not flight.fault:
            wanted = self.costs.limit(case, wanted)
        limit = min(wanted, self.left)
        self._at_work = case.world_size
        try:
            with ranks.attending(self.judge.connection if self._in_judgement else None, self._hear_judge):
                outcome = ranks.run(case.id, flight.directory, flight.fault, limit)
        finally:
            self._at_work = None
        common["budget_seconds"] = limit
        if not outcome.good and self._server_is_gone():
            return self._attempt(flight)
        if not outcome.good:
            left = self._drop(case.world_size)
            what = f"no result within {limit:.0f} s"
            return common | outcomes.with_leftovers(
                outcomes.failed(case, outcome, what, self.directory, cut=limit < wanted), left
            )
        flight.observations = flight.directory
        return common

    def _ready(self, case: Case, limit: float) -> Outcome | None:
        """A set of ranks for the case, with its framework imported. Returns None when it was there already."""
        begin = time.monotonic()
        outcome = None
        ranks = self.sets.get(case.world_size)
        if ranks is not None and not ranks.well():  # somebody killed them meanwhile: no business of this case
            self._drop(case.world_size)
            ranks = None
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
                    raise SetupError(outcomes.first_line(failed.message))
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
            except ServerGone:
                self._drop_servers()
                return self._launch(size, limit)
        except OSError as error:
            raise outcomes.unwritable(self.directory, error) from None
        return ranks

    def _servers(self, limit: float) -> Sequence[ForkServer]:
        """The fork servers that ranks come from; none where ranks are started in another way."""
        if self.settings.launcher != "fork":
            return ()
        if self._given:
            return [self._given]
        target = str(self.settings.target.resolve()) if self.settings.target else None
        options = forkserver.Options(target=target, paths=self._paths)
        if not self._own and forkserver.may_fork(self.settings.device):
            command, extra = module_command("ci.forkserver")
            (self.directory / "logs").mkdir(exist_ok=True)
            log = self.directory.resolve() / "logs" / "forkserver.log"
            self._own.append(ForkServer.start(command, clean_environment() | extra, options, log))
            if self._nodes:
                self._nodes.gather(self.directory, options)  # they import while this one does
            try:
                if not self._own[0].wait_ready(limit):
                    raise ServerGone("not ready")
            except ServerGone:
                self._drop_servers()
        if self._nodes and self._own:
            return [*self._own, *self._nodes.gather(self.directory, options)]
        return self._own

    def _server_is_gone(self) -> bool:
        """Whether the fork server has ended, and all of its ranks with it: no business of any case, which is tried
        again. What was left of the sets is cleared away then."""
        if self._nodes and (lost := self._nodes.lost()):
            raise SetupError(f"{lost}; tiebench run --resume goes on")
        servers = [self._given] if self._given else self._own
        for server in servers:
            server.pump(0.0)
        if not any(server.gone for server in servers):
            return False
        self.settings.say("note: the fork server was lost, and its ranks with it; the case is tried again")
        for size in list(self.sets):
            self._drop(size)
        self._drop_servers()
        return True

    def _drop_servers(self) -> None:
        """The fork server is gone. A new one may come once; should that be lost too, ranks are fresh processes, which
        can tell what it died of."""
        for server in self._own:
            server.close()
        self._own, self._given = [], None
        self._lost_servers += 1
        if self._lost_servers > 1:
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
                line = outcomes.patch_line(failed.traceback, str(self.subject.patch.path))
                where = f"{self.subject.patch.path}{f' line {line}' if line else ''}"
                raise SetupError(f"--patch {where}: {failed.type}: {outcomes.first_line(failed.message)}")

    def _save_environment(self, collected: Outcome) -> None:
        """Write what rank 0 found; when it could not, write why: no reason to lose a run, but no reason to hide it."""
        value = collected.values.get(0)
        if isinstance(value, dict):
            self.fingerprint, found = str(value["fingerprint"]), value["environment"]
        else:
            failed = collected.failures[0]
            self.fingerprint, found = "unknown", {"error": f"{failed.type}: {outcomes.first_line(failed.message)}"}
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
        """Run one more case for a verdict that needs it; returns where its observations are.

        Where the next case has cost the ranks, on new ones.

        Raises:
            RunFailed: it did not end well, or there is no time left for it.
        """
        limit = min(self.settings.case_limit, self.left)
        if limit <= 0:
            raise RunFailed("no time is left")
        started = self._ready(case, min(self.settings.startup_limit, self.left))
        if started is not None and not started.good:
            self._drop(case.world_size)
            raise RunFailed(f"new ranks did not come up: {started.places()}")
        ranks = self.sets[case.world_size]
        try:
            observations.mkdir(parents=True)
        except OSError as error:
            raise outcomes.unwritable(self.directory, error) from None
        outcome = ranks.run(case.id, observations, fault, limit, trace)
        if not outcome.good:
            self._drop(case.world_size)
            raise RunFailed(outcomes.cause(outcome) if outcome.failures or outcome.deaths else outcome.places())
        return observations

    def _recheck(self, flight: Flight) -> None:
        """Run a case once more, on ranks that have run none before, and compare; the finding goes into its result."""
        assert flight.observations
        alone, warm = flight.observations / "alone", self.sets
        self.sets = {}
        try:
            self._again(flight.case, alone, flight.fault)
            found = sticky.difference(flight.observations, alone)
        except RunFailed as error:
            found = f"alone it did not end well: {error}"
        finally:
            self._kill_all(keep_judge=True)
            self.sets = warm
        told = f"alone it comes to something else, first in {found}" if found else "alone it is the same, bit for bit"
        finding = records.Finding(oracle="sticky", flagged=bool(found), evidence=told)
        result = flight.result
        result["findings"] = (*result.get("findings", ()), finding)
        if found:
            before = result.get("oracle")
            evidence = f"sticky: {told}; {result.get('evidence', '')}"
            result |= {"verdict": "bug", "oracle": f"{before}, sticky" if before else "sticky", "evidence": evidence}

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

    def _kill_all(self, but: int | None = None, *, keep_judge: bool = False) -> None:
        """End all sets, but for that of one size."""
        for size in list(self.sets):
            if size != but:
                self._drop(size)
        if self._in_judgement and not keep_judge:  # it may wait for ranks that are gone
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


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
