"""The run loop: cases in, records out, an end row for every way to end, and the same exit codes as the command line."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from types import FrameType

from ci import costs, forecast, forkserver, history, records, schedule, sticky
from ci.exit_codes import FAILED
from ci.forkserver import ForkServer
from ci.history import History
from ci.nodes import Nodes
from ci.periodic import Periodic
from ci.ranks import Settings
from ci.records import LogError, Reason, Run
from ci.session import DEFAULTS, Interrupted, OnRecord, Plan, Session
from ci.subject import INSTALLED, SetupError, Subject
from suites.cases import Case

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Hears of a case before it starts: the case, its number from 1, about how many seconds all cases after it will take.
OnStart = Callable[[Case, int, float | None], None]


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
    recheck: int = 0,
    server: ForkServer | None = None,
    nodes: Nodes | None = None,
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
        recheck: so many cases, drawn by the run's id, are run once more alone and compared bit for bit (`ci.sticky`).
        server, nodes: as of `Session`.

    Raises:
        LogError: the directory cannot be used.
        SetupError: the run had to stop; the rows so far are on disk.
    """
    ahead, past = _look_ahead(
        plan, cases, (), out, budget, spent=spent, subject=subject, settings=settings, command=command
    )
    session = Session(out, ahead, subject, settings, on_record, past=past, server=server, nodes=nodes)
    session.rechecked = sticky.sample(ahead.cases, recheck, out.resolve().name)
    return _execute(session, ahead.cases, session.rechecked, on_start, report_every)


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
    nodes: Nodes | None = None,
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
    session = Session(out, ahead, subject, settings, on_record, past=past, server=server, nodes=nodes, resume=True)
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
