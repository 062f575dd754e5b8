"""The fault plan: every bug on purpose is run in the case that shows it, and every harmless change in its own.

A fault is caught when its run is called a bug, or ended by the watchdog (hang). A harmless change (TF32 on one rank,
another order of sums) must never be called a bug.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ci import schedule
from ci.exit_codes import FAILED, OK
from ci.forkserver import ForkServer
from ci.ranks import Settings
from ci.records import Record
from ci.session import Plan, Session
from suites.cases import Case
from suites.faults import FAULTS, HARMLESS, Fault, fault_of
from suites.verdict import EXPLAINS

CAUGHT = ("bug", "bug: precision", "hang")
WATCHDOG = "watchdog"  # what sees a hang
BUDGET = 1800.0  # seconds


@dataclass(frozen=True)
class Row:
    """What became of one fault.

    Args:
        fault: its name; bug_class: its class of public bugs, 0 for a harmless change.
        caught: its run was called a bug, or hung. A harmless change is not to be caught.
        oracle: the check that explains most; step: the first that shows it, from 1 (0: holds for the whole run).
        margin: how many times over its limit; None for a check that says yes or no, and where it is not finite.
        guesses: classes that the diagnosis names, the likeliest first.
        good: caught where it must be, and by the oracles that must see it; or harmless and not called a bug.
    """

    fault: str
    bug_class: int
    caught: bool
    oracle: str | None
    step: int | None
    margin: float | None
    guesses: tuple[int, ...]
    verdict: str
    case: str
    good: bool
    meaning: str
    evidence: str
    diagnosis: str

    @property
    def rank(self) -> int | None:
        """Place of the right class among the guesses, from 1; None where it is not among them."""
        return self.guesses.index(self.bug_class) + 1 if self.bug_class in self.guesses else None

    def plain(self) -> Mapping[str, object]:
        """For JSON; the class is called ``class`` there."""
        values = asdict(self)
        return {"fault": values.pop("fault"), "class": values.pop("bug_class"), **values, "rank": self.rank}


def chosen(names: Sequence[str] = (), paths: Sequence[str] = ()) -> list[Fault]:
    """The faults and harmless changes of some names, or of all; of some paths, or of all; harmless ones last.

    Raises:
        KeyError: no such fault.
    """
    found = [fault_of(name) for name in names] if names else [*FAULTS.values(), *HARMLESS.values()]
    return [fault for fault in found if not paths or fault.path in paths]


def run(
    faults: Sequence[Fault],
    directory: Path,
    settings: Settings,
    on_row: Callable[[Row], None] = lambda row: None,
    server: ForkServer | None = None,
) -> list[Row]:
    """Run each fault in its case, in an order that starts few sets of ranks; the records are in `directory`.

    Args:
        on_row: hears of each row once its record is on disk.
        server: as of `Session`.

    Raises:
        LogError, SetupError: as `Session`.
    """
    places = {case: at for at, case in enumerate(schedule.order([Case.parse(fault.case) for fault in faults]))}
    in_turn = sorted(faults, key=lambda fault: ("hang" in fault.caught_by, places[Case.parse(fault.case)]))
    rows: list[Row] = []

    def on_record(record: Record) -> None:
        if record.status != "not_run":
            rows.append(row(fault_of(str(record.fault)), record))
            on_row(rows[-1])

    plan = Plan("faults", tuple(places), budget=BUDGET)
    with Session(directory, plan, settings=settings, on_record=on_record, server=server) as session:
        for fault in in_turn:
            case = Case.parse(fault.case)
            if session.left <= 0:
                session.skip(case, "not_run", f"budget of {session.budget:.0f} s is over", "budget")
            else:
                session.advance(case, fault.name)
        session.catch_up()
        whole = len(rows) == len(faults) and all(found.good for found in rows)
        session.close("complete" if len(rows) == len(faults) else "budget", OK if whole else FAILED)
    return ordered(rows)


def ordered(rows: Sequence[Row]) -> list[Row]:
    """Those that are not as they must be first, then by class."""
    return sorted(rows, key=lambda r: (r.good, r.bug_class == 0, r.bug_class, r.fault))


def row(fault: Fault, record: Record) -> Row:
    """What a record says of the fault that was in its run."""
    flagged = sorted((f for f in record.findings if f.flagged), key=lambda f: (f.step, EXPLAINS.index(f.oracle)))
    first = flagged[0] if flagged else None
    ratios = [f.error / f.limit for f in flagged if f.error is not None and f.limit and math.isfinite(f.error)]
    margin = max(ratios, default=None)
    oracle = first.oracle if first else WATCHDOG if record.verdict == "hang" else None
    # A crash counts where ranks must run apart; elsewhere the fault did not fit the build under test.
    caught = record.verdict in CAUGHT or (record.verdict == "crash" and "hang" in fault.caught_by)
    seen = {f.oracle for f in flagged} | {str(record.verdict)}
    harmless = fault.name in HARMLESS
    return Row(
        fault=fault.name,
        bug_class=fault.bug_class,
        caught=caught,
        oracle=oracle,
        step=min((f.step for f in flagged), default=None),
        margin=margin,
        guesses=tuple(guess.bug_class for guess in record.guesses),
        verdict=record.verdict or record.status,
        case=record.case,
        good=not caught if harmless else caught and (set(fault.caught_by) <= seen or "hang" in fault.caught_by),
        meaning=fault.meaning,
        evidence=record.evidence,
        diagnosis=record.diagnosis,
    )
