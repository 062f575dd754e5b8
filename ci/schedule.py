"""Which case comes next, whether it still fits the budget, and how a plan is split over machines.

Order: information per second. First what failed, timed out or was lost last time, then what changed its verdict, then
what the budget left out, then cases without history, then the rest. Within each of these groups greedily by the pairs
of factor values that a case is the first to cover, pairs among the factors of the head weighing more, divided by the
seconds that it takes. So a run that is cut short has done the most informative part.

The order need not group cases by world size: sets of ranks of all sizes stay alive together, so that each size is
started once, whatever the order. Where they cannot (GPUs), `switch` says what a change of sets costs.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter, itemgetter
from typing import Any

from ci.costs import Costs, Estimate, static_seconds
from ci.history import Past
from suites.cases import FACTORS, Case

# Weight of a factor; that of a pair is the product. What is not here weighs 1.
WEIGHTS = {
    **dict.fromkeys(("path", "tie", "head", "zero", "uneven_hidden", "uneven_vocab"), 3.0),
    **dict.fromkeys(("tp", "dp", "dtype", "tie_when", "embedding_spec", "padding", "resume", "frozen"), 2.0),
    **dict.fromkeys(("hidden", "vocab", "padding_idx", "layers", "sequence", "batch", "steps", "seed"), 0.25),
}
NEW = "new"
REPEAT = 0.1  # what covering a pair once more is worth, in parts of the time before

# Seconds before and after the cases. A report of 48 cases took 0.7 s, one of 211 took 2.8 s on two busy cores.
SETUP = 0.2  # run directory, log, history
REPORT, REPORT_PER_CASE = 1.0, 0.006
RESERVE = 2.0  # what the budget keeps for the report, in parts of what it is expected to take


@dataclass(frozen=True)
class Planned:
    """A case in its place.

    Args:
        reason: why it stands there, one short phrase.
        estimate: seconds that it takes.
    """

    case: Case
    reason: str
    estimate: Estimate


@dataclass(frozen=True)
class Phases:
    """Seconds that a run takes: total = provisioning + set-up + start-up + cases + report.

    Args:
        provisioning: until tiebench runs: machine, image, build under test; 0 where the budget starts after it.
        setup: run directory and history; startup: sets of ranks, imports included.
        cases: share x sum of the cases' expected seconds, where share is what overlapping judging with the next case
            leaves of them; report: the report at the end.
    """

    provisioning: float
    setup: float
    startup: float
    cases: float
    report: float

    @property
    def total(self) -> float:
        """All phases together."""
        return sum(getattr(self, phase.name) for phase in fields(self))


@dataclass(frozen=True)
class Slot:
    """A place in the timetable of a run.

    Args:
        begin, until: expected seconds after the run's start; equal where the case is left out.
        runs: False where the budget leaves it out: its record will be `not_run`.
    """

    planned: Planned
    begin: float
    until: float
    runs: bool

    def plain(self) -> dict[str, Any]:
        """For JSON; seconds to the millisecond."""
        estimate = self.planned.estimate
        return {
            "case": self.planned.case.id,
            "reason": self.planned.reason,
            "expected_seconds": round(estimate.expected, 3),
            "high_seconds": round(estimate.high, 3),
            "begin_seconds": round(self.begin, 3),
            "until_seconds": round(self.until, 3),
            "runs": self.runs,
            "history": estimate.samples,
        }


# Order


def order(cases: Iterable[Case]) -> list[Case]:
    """Cases without doubles, grouped by world size, else in the order given: the same on every machine."""
    return sorted(dict.fromkeys(cases), key=lambda case: case.world_size)


def arrange(
    cases: Iterable[Case], costs: Costs, past: Mapping[str, Past] | None = None, *, switch: float = 0.0
) -> list[Planned]:
    """Cases without doubles in the order in which they tell most per second. Deterministic.

    Args:
        past: what became of them last time (`History.past`).
        switch: seconds that a change of world size costs from one case to the next; 0 where sets stay alive.
    """
    waiting: dict[int, list[tuple[Case, str]]] = defaultdict(list)
    for case in dict.fromkeys(cases):
        group, reason = _group((past or {}).get(case.id))
        waiting[group].append((case, reason))
    coverage = Coverage()
    return [found for group in sorted(waiting) for found in _greedy(waiting[group], costs, coverage, switch)]


def _group(past: Past | None) -> tuple[int, str]:
    """Rank of a case by what became of it, the most urgent 0, and how to say so."""
    if past is None:
        return 3, NEW
    last, before = past.last, past.before
    if last.status == "timeout":
        return 0, "timed out last time"
    if last.status == "lost":
        return 0, "was lost last time"
    if last.status == "not_run":
        return 2, "not run last time"
    if not last.green:
        return 0, f"not as expected last time ({last.outcome})"
    if before is not None and not before.green:
        return 1, f"changed last time ({before.outcome} to {last.outcome})"
    return 4, ""


class Coverage:
    """Pairs of factor values that cases have covered, and what one more case would add."""

    def __init__(self) -> None:
        self.worth: list[float] = []  # of covering each pair next time
        self.covered: list[bool] = []
        self._weights: list[float] = []
        self._rare: list[int] = []  # how many of a pair's two values are no defaults
        self._numbers: dict[tuple[int, object, int, object], int] = {}
        self._rows: dict[Case, tuple[int, ...]] = {}
        self._worth: dict[Case, Callable[[list[float]], tuple[float, ...]]] = {}

    def pairs(self, case: Case) -> tuple[int, ...]:
        """Numbers of the pairs that a case has."""
        if case not in self._rows:
            numbers = []
            values = [(a, x, x != _DEFAULTS[a]) for a, x in enumerate(_values(case))]
            for (a, x, odd), (b, y, rare) in itertools.combinations(values, 2):
                if a >= _MAIN and not (odd and rare):
                    continue  # two minor factors, one at its default: almost every case covers that
                key = (a, x, b, y)
                if key not in self._numbers:
                    self._numbers[key] = len(self.worth)
                    weight = _WEIGHTS[a] * _WEIGHTS[b]
                    self.worth.append(weight)
                    self._weights.append(weight)
                    self._rare.append(odd + rare)
                    self.covered.append(False)
                numbers.append(self._numbers[key])
            self._rows[case] = tuple(numbers)
        return self._rows[case]

    def gain(self, case: Case) -> float:
        """What a case would add."""
        if case not in self._worth:
            self._worth[case] = itemgetter(*self.pairs(case))  # faster than a loop: this is the inner one
        return sum(self._worth[case](self.worth))

    def add(self, case: Case) -> list[int]:
        """Cover the pairs of a case; those that are new."""
        fresh = []
        for number in self.pairs(case):
            if not self.covered[number]:
                fresh.append(number)
                self.covered[number] = True
            self.worth[number] *= REPEAT
        return fresh

    def example(self, numbers: Iterable[int]) -> str:
        """The pair that tells most, for people: the rarest values, then the greatest weight."""
        number = max(numbers, key=lambda n: (self._rare[n], self._weights[n], -n))
        a, x, b, y = next(itertools.islice(self._numbers, number, None))
        return f"{_NAMES[a]}={x} with {_NAMES[b]}={y}"


_DERIVED: dict[str, tuple[object, Callable[[Case], object]]] = {  # name -> default, value
    "path": (None, lambda case: case.path),
    "uneven_hidden": ("no", lambda case: "yes" if case.hidden % case.tp else "no"),
    "uneven_vocab": ("no", lambda case: "yes" if case.vocab % case.tp else "no"),
    "padding": ("no", lambda case: "no" if case.padding_idx is None else "yes"),
}
_MAIN_NAMES = ("path", "tie", "head", "zero", "uneven_hidden", "uneven_vocab")
_ALL: dict[str, tuple[object, Callable[[Case], object]]] = {
    **_DERIVED,
    **{factor.name: (factor.default, attrgetter(factor.name)) for factor in FACTORS},
}
_NAMES = (*_MAIN_NAMES, *(name for name in _ALL if name not in _MAIN_NAMES))  # the main ones first
_MAIN = len(_MAIN_NAMES)
_DEFAULTS = tuple(_ALL[name][0] for name in _NAMES)
_WEIGHTS = tuple(WEIGHTS.get(name, 1.0) for name in _NAMES)
_READERS = tuple(_ALL[name][1] for name in _NAMES)


def _values(case: Case) -> list[object]:
    return [read(case) for read in _READERS]


def _greedy(waiting: Sequence[tuple[Case, str]], costs: Costs, coverage: Coverage, switch: float) -> Iterable[Planned]:
    """Lazy greedy: what a case adds never grows while others are taken, so only the top of the heap is looked at
    again. One heap for each world size, for `switch`."""
    estimates = [costs.estimate(case) for case, _ in waiting]
    heaps: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for number, (case, _) in enumerate(waiting):
        heaps[case.world_size].append((-coverage.gain(case), number))
    for heap in heaps.values():
        # what is sorted by is gain / seconds, with the seconds of a case in a set that is up
        heap[:] = [(gain / estimates[number].expected, number) for gain, number in heap]
        heapq.heapify(heap)
    size = None
    while heaps:
        best: tuple[float, int, int] | None = None
        for candidate, heap in heaps.items():
            while True:  # bring the top up to date
                value, number = heap[0]
                now = -coverage.gain(waiting[number][0]) / estimates[number].expected
                if now <= value:
                    break
                heapq.heapreplace(heap, (now, number))
            seconds = estimates[number].expected
            if candidate != size:
                now *= seconds / (seconds + switch)
            if best is None or (now, number) < best[:2]:
                best = (now, number, candidate)
        assert best is not None
        _, number, size = best
        heapq.heappop(heaps[size])
        if not heaps[size]:
            del heaps[size]
        case, reason = waiting[number]
        fresh = coverage.add(case)
        yield Planned(case, _reason(reason, fresh, coverage), estimates[number])


def _reason(why: str, fresh: Sequence[int], coverage: Coverage) -> str:
    if why not in ("", NEW):
        return why
    text = "repeats pairs"
    if fresh:
        text = f"first {coverage.example(fresh)}" + (f", {len(fresh) - 1} more pairs" if len(fresh) > 2 else "")
    return ": ".join(filter(None, [why, text]))


# Budget


def reserve(cases: int) -> float:
    """Seconds at the end of a budget in which no case may run: for the report."""
    return RESERVE * _report(cases)


def _report(cases: int) -> float:
    return REPORT + REPORT_PER_CASE * cases


def phases(cases: Sequence[Case], costs: Costs, *, provisioning: float = 0.0) -> Phases:
    """What a run of these cases is expected to take."""
    return Phases(
        provisioning=provisioning,
        setup=SETUP,
        startup=sum(_starts(cases, costs)),
        cases=costs.share * sum(costs.estimate(case).expected for case in cases),
        report=_report(len(cases)),
    )


def _starts(cases: Iterable[Case], costs: Costs) -> list[float]:
    sizes = len({case.world_size for case in cases})
    return [costs.startup(first=number == 0) for number in range(sizes)]


def fits(
    case: Case,
    costs: Costs,
    left: float,
    report: float,
    *,
    starts: bool = False,
    first: bool = False,
    hopeful: bool = False,
) -> bool:
    """Whether a case may start: its pessimistic time, with the start of its ranks, ends before the report's reserve.

    Args:
        left: seconds left of the whole budget; report: its reserve.
        starts: a set of ranks has to be started for it; first: the first one, which imports everything.
        hopeful: with the expected time for that start, not the pessimistic one.
    """
    needed = costs.estimate(case).high + (costs.startup(first=first, high=not hopeful) if starts else 0.0)
    return needed <= left - report


def next_fitting(
    todo: Sequence[Case],
    costs: Costs,
    left: float,
    report: float,
    up: Iterable[int] = (),
    *,
    first: bool = False,
    hopeful: bool = False,
) -> int | None:
    """Place in `todo` of the first case that fits what is left of the budget; None where none does.

    Args:
        up: world sizes of the sets of ranks that are up; others: as of `fits`.
    """
    running = set(up)
    for place, case in enumerate(todo):
        starts = case.world_size not in running
        if fits(case, costs, left, report, starts=starts, first=first, hopeful=hopeful):
            return place
    return None


def timetable(
    planned: Sequence[Planned], costs: Costs, budget: float | None, *, provisioning: float = 0.0
) -> list[Slot]:
    """What is expected to run when, and what the budget leaves out, in the order given."""
    report = reserve(len(planned))
    now = provisioning + SETUP
    slots = []
    up: set[int] = set()
    for item in planned:
        starts, first = item.case.world_size not in up, not up
        left = float("inf") if budget is None else budget - now
        needs = {"starts": starts, "first": first}
        if not fits(item.case, costs, left, report, **needs) and fits(
            item.case, costs, left, report, **needs, hopeful=True
        ):
            now += costs.startup(first=first)  # the ranks are started first, and then it is seen
            left -= costs.startup(first=first)
            up.add(item.case.world_size)
            starts = first = False
        if not fits(item.case, costs, left, report, starts=starts, first=first):
            slots.append(Slot(item, now, now, False))
            continue
        begin = now
        now += costs.share * item.estimate.expected + (costs.startup(first=first) if starts else 0.0)
        up.add(item.case.world_size)
        slots.append(Slot(item, begin, now, True))
    return slots


# Shards


def shard(cases: Sequence[Case], index: int, count: int) -> list[Case]:
    """Shard `index` (from 1) of `count`, in the order given; together they are all cases, each once.

    Longest first onto the shard with the least to do so far. By the static cost model, never by history, so that every
    machine splits a plan in the same way.

    Raises:
        ValueError: no such shard.
    """
    if not 1 <= index <= count:
        raise ValueError(f"shard {index}/{count}: the first number goes from 1 to the second")
    # Whole milliseconds: the last bit of a sum may differ between machines.
    seconds = [round(1000 * static_seconds(case)) for case in cases]
    loads = [(0, number) for number in range(1, min(count, len(cases)) + 1)]
    mine = []
    for place in sorted(range(len(cases)), key=lambda place: (-seconds[place], cases[place].id, place)):
        load, number = heapq.heappop(loads)
        heapq.heappush(loads, (load + max(1, seconds[place]), number))
        if number == index:
            mine.append(place)
    return [cases[place] for place in sorted(mine)]
