"""How many seconds a case will take: expected, and a time that 99 of 100 stay below.

A log-normal model with four spreads. The static model below (`static`) gives a first guess m(c) from the case's factors
alone; on a machine the log of a time is

    log t = log m(c) + pace + case effect + noise

with one pace for a run and class of machine, one effect for each case and noise for each time. History estimates pace
and effects and the spread of each; a run goes on learning its own pace. Every estimate starts from a wide prior, which
`PRIOR` times count for, so that little data gives wide limits: unknown cases, new machines and busy days are
pessimistic by themselves, without a special rule. Times on the ranks and times of judging are modelled each.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from ci.history import History
from suites.cases import FFN, HEAD_DIM, HEADS, Case

PER_LAYER = 4 * HEADS * HEAD_DIM + 3 * FFN  # parameters of a block for each hidden unit
QUANTILE = 0.99
Z = statistics.NormalDist().inv_cdf(QUANTILE)
RECENT = 20  # times of a case that count
PRIOR = 10  # times that the priors of the spreads count for
# Standard deviations of the log of seconds, before anything is known.
NOISE, EFFECT, MACHINE, RUN = 0.35, 0.4, 0.7, 0.25
LIMIT_FACTOR, LIMIT_FLOOR = 4.0, 20.0
SHARE = 1.0  # part of ranks' and judge's seconds that a run's wall time holds, before history tells
FIRST_STARTUP, STARTUP = 6.0, 0.5  # seconds: with and without the import of torch and the frameworks
STARTED = 0.05  # seconds: what takes less has started no processes
STARTUP_HIGH = 1.5  # factor on a start-up, for the pessimistic one
SMALLEST = 1e-3  # seconds; below a clock tells nothing


@dataclass(frozen=True)
class Estimate:
    """Seconds of one case, start-up of ranks not included.

    Args:
        ranks, judge: expected on the ranks, and for the verdict.
        ranks_high, high: not exceeded in 99 of 100 runs, on the ranks and in all.
        spread: standard deviation of the log of all seconds, without the run's pace.
        samples: times in the history that speak of this very case.
    """

    ranks: float
    judge: float
    ranks_high: float
    high: float
    spread: float
    samples: int

    @property
    def expected(self) -> float:
        """Ranks and judge, one after the other."""
        return self.ranks + self.judge


def static(case: Case) -> tuple[float, float]:
    """Seconds on the ranks, and for judging, by the case's factors alone: the same on every machine.

        ranks = (set-up of the path + 0.02 x micro-batches x layers + 1.4e-7 x parameters x steps) x f x world size / 2
        judge = (0.08 + 0.02 x micro-batches x layers + 1.8e-6 x parameters x steps) x g x world size / 2

    f is 2 for DeepSpeed's ZeRO 3 and 1.35 for loading again; f and g are 1.35 below IEEE fp32, where higher precisions
    may have to be asked. Fitted by hand to medians of a run of plan `pr` and one of `nightly` (778 cases), and to 57
    cases with more steps, layers, tokens, hidden units or words, on two cores with DeepSpeed 0.19.8. Ranks beyond the
    second share cores. What is unknown is taken to be slow.
    """
    setup = {"deepspeed": 0.16, "handwritten": 0.13}.get(case.path, 0.5)
    micros = case.steps * case.accumulate
    parameters = case.hidden * (case.vocab * (1 if case.tied else 2) + case.layers * PER_LAYER)
    heavy = 1.35 if case.dtype in ("bfloat16", "float16") or case.matmul != "ieee" else 1.0
    stage = 2.0 if case.path == "deepspeed" and case.zero == 3 else 1.0
    again = 1.0 if case.resume == "none" else 1.35
    world = case.world_size / 2
    ranks = (setup + 0.02 * micros * case.layers + 1.4e-7 * parameters * case.steps) * stage * again * heavy * world
    judge = (0.08 + 0.02 * micros * case.layers + 1.8e-6 * parameters * case.steps) * heavy * world
    return ranks, judge


def static_seconds(case: Case) -> float:
    """Ranks and judge of `static`."""
    return sum(static(case))


class _Part:
    """One of the two times: on the ranks, of judging."""

    def __init__(self, samples: dict[Case, list[float]], guess: dict[Case, float], known: bool) -> None:
        self.known = known
        self.logs = {case: [math.log(max(s, SMALLEST)) for s in found] for case, found in samples.items()}
        residuals = {case: statistics.median(found) - math.log(guess[case]) for case, found in self.logs.items()}
        count = len(residuals)
        self.pace = statistics.median(residuals.values()) * count / (count + 1) if count else 0.0
        self.effects = {case: residual - self.pace for case, residual in residuals.items()}
        repeated = [[s - statistics.fmean(found) for s in found] for found in self.logs.values() if len(found) > 1]
        freedom = sum(len(found) - 1 for found in repeated)
        squares = sum(r * r for found in repeated for r in found)
        self.noise = (PRIOR * NOISE**2 + squares) / (PRIOR + freedom)  # variance
        spread = sum(effect**2 for effect in self.effects.values())
        self.effect = (PRIOR * EFFECT**2 + spread) / (PRIOR + count)  # variance, noise of the medians included
        self.prior = RUN**2 if count >= PRIOR else MACHINE**2  # variance of a run's pace
        self.seen: list[float] = []  # log of measured over expected, in this run

    def log(self, case: Case, guess: float) -> tuple[float, float]:
        """Expected log of seconds, and its variance, both without the run's own pace."""
        count = len(self.logs.get(case, ()))
        weight = self.noise / self.effect  # times that the model counts for, against those of the case itself
        effect = self.effects.get(case, 0.0) * count / (count + weight)
        variance = self.noise + (self.noise / (count + weight))
        return math.log(guess) + self.pace + effect, variance

    def now(self) -> tuple[float, float]:
        """Log of the run's pace against history, and its variance."""
        if not self.seen:
            return 0.0, self.prior
        weight = (self.noise + self.effect) / self.prior
        count = len(self.seen)
        return statistics.median(self.seen) * count / (count + weight), self.prior * weight / (count + weight)


class Costs:
    """Seconds that cases take here, from history and from the run so far."""

    def __init__(self, history: History | None = None) -> None:
        history = history or History()
        self.known = {case.id: case for case in _parsed(history.times)}
        lines = {case: history.times[name][-RECENT:] for name, case in self.known.items()}
        ranks = {case: [line.ranks for line in found if line.ranks is not None] for case, found in lines.items()}
        judge = {case: [line.judge for line in found if line.judge is not None] for case, found in lines.items()}
        guesses = {case: static(case) for case in lines}
        self._ranks = _Part({c: s for c, s in ranks.items() if s}, {c: g[0] for c, g in guesses.items()}, bool(lines))
        self._judge = _Part({c: s for c, s in judge.items() if s}, {c: g[1] for c, g in guesses.items()}, bool(lines))
        self._largest = {case: max(found) for case, found in ranks.items() if found}
        self._slow = {
            name for name, past in history.past().items() if past.last.status in ("timeout", "lost")
        }  # their true time is not known
        starts = [[line.startup for line in run.cases if line.startup > STARTED] for run in history.here]
        self._first = _median([found[0] for found in starts if found], FIRST_STARTUP)
        self._later = _median([s for found in starts for s in found[1:]], STARTUP)
        self.share = _share(history)
        self._cache: dict[Case, Estimate] = {}

    def estimate(self, case: Case) -> Estimate:
        """Seconds of a case, at the pace of this run so far."""
        if case not in self._cache:
            ranks, judge = static(case)
            log, variance = self._ranks.log(case, ranks)
            pace, doubt = self._ranks.now()
            judge_log, judge_variance = self._judge.log(case, judge)
            judge_pace, judge_doubt = self._judge.now()
            expected, judging = math.exp(log + pace), math.exp(judge_log + judge_pace)
            high = expected * math.exp(Z * math.sqrt(variance + doubt))
            high = max(high, self._largest.get(case, 0.0) * math.exp(max(0.0, pace)))
            judge_high = judging * math.exp(Z * math.sqrt(judge_variance + judge_doubt))
            share = expected / (expected + judging)
            self._cache[case] = Estimate(
                ranks=expected,
                judge=judging,
                ranks_high=high,
                high=high + judge_high,
                spread=math.sqrt(share**2 * variance + (1 - share) ** 2 * judge_variance),
                samples=len(self._ranks.logs.get(case, ())),
            )
        return self._cache[case]

    def learn(self, case: Case, ranks: float, judge: float | None = None) -> None:
        """Learn this run's pace from a case that came to its end (no crash, no timeout), in seconds."""
        guess = static(case)
        self._ranks.seen.append(math.log(max(ranks, SMALLEST)) - self._ranks.log(case, guess[0])[0])
        del self._ranks.seen[:-RECENT]
        if judge is not None:
            self._judge.seen.append(math.log(max(judge, SMALLEST)) - self._judge.log(case, guess[1])[0])
            del self._judge.seen[:-RECENT]
        self._cache.clear()

    @property
    def pace(self) -> float:
        """How many times slower than expected the ranks are in this run."""
        return math.exp(self._ranks.now()[0])

    def startup(self, *, first: bool = False, high: bool = False) -> float:
        """Seconds until a set of ranks is up.

        Args:
            first: the first of the run, which imports torch and the frameworks.
            high: a pessimistic time.
        """
        return (self._first if first else self._later) * (STARTUP_HIGH if high else 1.0)

    def limit(self, case: Case, ceiling: float) -> float:
        """Seconds after which a case on the ranks is stuck and is ended.

            limit = min(ceiling, max(20 s, 4 x time that 99 of 100 stay below at the pace of this run))

        and the ceiling itself for a case that ended by its limit, or was lost, last time: how long it takes is not
        known then, and a limit that came from times it never reached would end it for ever.

        Args:
            ceiling: `--case-limit`.
        """
        if case.id in self._slow:
            return ceiling
        return min(ceiling, max(LIMIT_FLOOR, LIMIT_FACTOR * self.estimate(case).ranks_high))


def _parsed(names: Iterable[str]) -> list[Case]:
    """The cases that exist in this version of tiebench and are spelled as it spells them."""
    found = []
    for name in names:
        try:
            case = Case.parse(name)
        except (ValueError, OverflowError):
            continue
        if case.id == name:
            found.append(case)
    return found


def _median(values: list[float], otherwise: float) -> float:
    return statistics.median(values) if values else otherwise


def _share(history: History) -> float:
    """Part of ranks' and judge's seconds that is left of them in a run's wall time, since they overlap."""
    found = []
    for run in history.here:
        busy = sum((line.ranks or 0.0) + (line.judge or 0.0) for line in run.cases)
        wall = (run.wall_seconds or 0.0) - sum(line.startup for line in run.cases)
        if run.complete and len(run.cases) >= PRIOR and busy > 0 and wall > 0:
            found.append(min(1.5, wall / busy))
    return statistics.median(found) if found else SHARE
