"""Which case comes next, and whether it still fits the budget."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from suites.cases import Case

FIRST_GUESS = {"case": 2.0, "startup": 10.0}  # seconds, until something was measured


def order(cases: Iterable[Case]) -> list[Case]:
    """Cases without doubles, grouped by world size (each set of ranks is started once), else in the order given."""
    return sorted(dict.fromkeys(cases), key=lambda case: case.world_size)


def shard(cases: Sequence[Case], index: int, count: int) -> list[Case]:
    """Shard `index` (from 1) of `count`: every count-th case, so that shards are alike; together they are all cases.

    Raises:
        ValueError: no such shard.
    """
    if not 1 <= index <= count:
        raise ValueError(f"shard {index}/{count}: the first number goes from 1 to the second")
    return list(cases[index - 1 :: count])


@dataclass
class Forecast:
    """Seconds that cases will take, from the median of those that ran."""

    cases: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    startups: list[float] = field(default_factory=list)
    broken: int = 0  # cases after which the ranks had to be given up

    def add(self, case: Case, seconds: float, startup: float, *, broke: bool = False) -> None:
        """Learn from a case that ran; `startup` 0 when its ranks were up already, `broke`: they are gone now."""
        self.cases[case.path].append(seconds)
        self.broken += broke
        if startup > 0:
            self.startups.append(startup)

    def startup(self) -> float:
        """Seconds to start a set of ranks."""
        return statistics.median(self.startups) if self.startups else FIRST_GUESS["startup"]

    def case(self, case: Case, *, starts: bool) -> float:
        """Seconds for one case, start-up included when it `starts` a set."""
        seconds = self.cases.get(case.path) or [s for other in self.cases.values() for s in other]
        expected = statistics.median(seconds) if seconds else FIRST_GUESS["case"]
        return expected + (self.startup() if starts else 0.0)

    def all(self, cases: Sequence[Case], up: Iterable[int]) -> float:
        """Seconds for all of `cases`, when sets of the world sizes `up` are running and break as often as before."""
        missing = {c.world_size for c in cases} - set(up)
        again = len(cases) * self.broken / max(1, sum(map(len, self.cases.values())))
        return sum(self.case(c, starts=False) for c in cases) + (len(missing) + again) * self.startup()
