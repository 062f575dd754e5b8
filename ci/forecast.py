"""How long a plan will take, how that grows, and when it will hit its budget: said before it happens.

A log-normal model of whole runs. What the cases of a run should have taken (`ci.costs`) against what it took gives one
ratio a run; their median is the centre, and their spread, with that of the cases, the width of a Student interval.
The spread starts from a prior, so that an interval from few runs is wide. Runs on the same class of machine count,
those of the same plan alone once there are `ENOUGH` of them.

The trend is the median of the slopes between all pairs of runs of the plan (Theil and Sen), with Sen's confidence
interval from Kendall's statistic; it is said only where that interval lies on one side of zero. A run that its budget
or a signal cut short counts with what its left-out cases would have taken.

    P. K. Sen, Estimates of the regression coefficient based on Kendall's tau, JASA 63 (1968) 1379-1389.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date, datetime, timedelta
from typing import Any

from ci import schedule
from ci.costs import Costs
from ci.display import duration
from ci.history import History, RunSummary
from suites.cases import Case

LEVEL = 0.9  # of the interval of the expected time, and of the trend's
ENOUGH = 3  # runs of a plan after which those of other plans no longer count
FEW_CASES = 10  # with fewer, a run tells of its start-up, not of its cases
SPREAD, WEIGHT = 0.35, 3  # prior standard deviation of the log of a ratio, and the runs that it counts for
UNKNOWN = 0.7  # standard deviation without any run: how much machines differ from the one the model was fitted on
TREND_RUNS, TREND_DAYS = 5, 2.0  # least runs, and days between first and last, for a trend
LATEST = 20  # runs that a trend looks at
HORIZON = 730  # days: what is further off is not said
_DAY = 86400.0


@dataclass(frozen=True)
class Trend:
    """Growth of a plan's wall time.

    Args:
        slope, low, high: seconds a day, and its interval; None without enough history.
        runs: that count; days: from the first to the last.
    """

    runs: int
    days: float = 0.0
    slope: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def growing(self) -> bool:
        """The whole interval lies above zero."""
        return self.low is not None and self.low > 0

    @property
    def shrinking(self) -> bool:
        """The whole interval lies below zero."""
        return self.high is not None and self.high < 0


@dataclass(frozen=True)
class Forecast:
    """Wall time of a plan, for a report and for `tiebench plan`.

    Args:
        expected_seconds, low, high: of the whole run, and where nine of ten runs lie.
        runs: that the expectation is from, of this plan or of others; trend_runs: of this plan, for the trend.
        slope_seconds_per_day: None where there is not enough history.
        budget_hit_on: day (ISO 8601) on which the expected time reaches the budget; None where it does not, or where
            that is too far off to be said.
        text: all of it in one to three sentences.
    """

    plan: str
    expected_seconds: float
    low: float
    high: float
    runs: int
    trend_runs: int
    slope_seconds_per_day: float | None
    budget_seconds: float | None
    budget_hit_on: str | None
    text: str

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def of(
    plan: str, cases: Sequence[Case], history: History, costs: Costs, *, budget: float | None, now: datetime
) -> Forecast:
    """Forecast of a run of `cases` that starts now.

    Args:
        plan: name whose earlier runs tell the trend.
        costs: from the same history, before any case of this run.
        budget: seconds; None: no limit.
    """
    expected = schedule.phases(cases, costs)
    same = [run for run in history.here if run.plan == plan]
    ratios = [found for run in same if (found := _ratio(run, costs)) is not None]
    if len(ratios) < ENOUGH:
        ratios = [found for run in history.here if (found := _ratio(run, costs)) is not None]
    count = len(ratios)
    centre = statistics.median(ratios) * count / (count + 1) if ratios else 0.0
    squares = sum((ratio - centre) ** 2 for ratio in ratios)
    variance = (WEIGHT * SPREAD**2 + squares) / (WEIGHT + count)
    variance *= 1 + 1 / (count + 1)  # the centre is not known exactly either
    if not ratios:
        variance += UNKNOWN**2
    estimates = [costs.estimate(case) for case in cases]
    total = sum(e.expected for e in estimates)
    own = sum((e.expected * e.spread) ** 2 for e in estimates) / total**2 if total else 0.0
    width = _student((1 + LEVEL) / 2, WEIGHT + count) * math.sqrt(variance + own)
    middle = expected.total * math.exp(centre)
    trend = trend_of(same, costs)
    hit = _hit(middle, trend, budget, now.date())
    forecast = Forecast(
        plan=plan,
        expected_seconds=middle,
        low=middle * math.exp(-width),
        high=middle * math.exp(width),
        runs=count,
        trend_runs=trend.runs,
        slope_seconds_per_day=trend.slope,
        budget_seconds=budget,
        budget_hit_on=hit.isoformat() if hit else None,
        text="",
    )
    return replace(forecast, text=_text(forecast, trend))


def _known(run: RunSummary, costs: Costs) -> tuple[float, float] | None:
    """Expected seconds of the cases of a run that ran, and of those that were left out; None where too few cases are
    known to this version."""
    ran = [line for line in run.cases if line.ranks is not None]
    known = [costs.known[line.case] for line in ran if line.case in costs.known]
    if len(known) < max(FEW_CASES, 0.9 * len(ran)):
        return None
    done = sum(costs.estimate(case).expected for case in known) * len(ran) / len(known)
    left = [
        costs.known[line.case] for line in run.cases if line.status in ("not_run", "lost") and line.case in costs.known
    ]
    missing = sum(line.status in ("not_run", "lost") for line in run.cases)
    rest = sum(costs.estimate(case).expected for case in left)
    return done, rest * missing / len(left) if left else missing * done / len(ran)


def _startup(run: RunSummary) -> float:
    return sum(line.startup for line in run.cases)


def _ratio(run: RunSummary, costs: Costs) -> float | None:
    """Log of what a run took, without its starts, over what its cases should have taken."""
    found = _known(run, costs)
    if found is None or run.wall_seconds is None or run.end not in ("complete", "budget"):
        return None
    cases = run.wall_seconds - _startup(run)
    return math.log(cases / (costs.share * found[0])) if cases > 0 and found[0] > 0 else None


def trend_of(runs: Sequence[RunSummary], costs: Costs) -> Trend:
    """Trend of the wall time of runs of one plan on one class of machine."""
    points = []
    for run in runs[-LATEST:]:
        found = _known(run, costs)
        if run.wall_seconds is None or (found is None and not run.complete):
            continue
        cases = max(0.0, run.wall_seconds - _startup(run))
        needed = run.wall_seconds + (cases * found[1] / found[0] if found and found[0] > 0 else 0.0)
        points.append((run.began.timestamp() / _DAY, needed))
    days = points[-1][0] - points[0][0] if points else 0.0
    if len(points) < TREND_RUNS or days < TREND_DAYS:
        return Trend(len(points), days)
    return Trend(len(points), days, *theil_sen(points))


def theil_sen(points: Sequence[tuple[float, float]], level: float = LEVEL) -> tuple[float, float, float]:
    """Median of the slopes between all pairs of points, and Sen's interval for it.

    Raises:
        ValueError: fewer than two different abscissas.
    """
    slopes = sorted(
        (y2 - y1) / (x2 - x1) for i, (x1, y1) in enumerate(points) for x2, y2 in points[i + 1 :] if x1 != x2
    )
    if not slopes:
        raise ValueError("a trend needs two points at different times")
    n = len(points)
    sigma = math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    reach = statistics.NormalDist().inv_cdf((1 + level) / 2) * sigma
    low = max(0, math.floor((len(slopes) - reach) / 2))
    return statistics.median(slopes), slopes[low], slopes[len(slopes) - 1 - low]


def _student(quantile: float, freedom: int) -> float:
    """Quantile of Student's distribution, from the normal one (Cornish and Fisher's expansion: 1 % off at 3 degrees of
    freedom, better beyond)."""
    z = statistics.NormalDist().inv_cdf(quantile)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def _hit(expected: float, trend: Trend, budget: float | None, today: date) -> date | None:
    """Day on which the expected time reaches the budget."""
    if budget is None:
        return None
    if expected >= budget:
        return today
    if not trend.growing or not trend.slope:
        return None
    days = (budget - expected) / trend.slope
    return today + timedelta(days=math.ceil(days)) if days <= HORIZON else None


def _text(found: Forecast, trend: Trend) -> str:
    budget, count = found.budget_seconds, found.runs
    source = f"from {count} run{'s' if count > 1 else ''} on this kind of machine" if count else "no run here to go by"
    said = f"{found.plan} takes about {duration(found.expected_seconds)} "
    said += f"(nine of ten runs: {duration(found.low)} to {duration(found.high)}; {source})"
    if budget:
        said += f", {found.expected_seconds / budget:.0%} of its budget of {duration(budget)}"
    sentences = [said]
    short = budget is not None and found.expected_seconds >= budget
    if short:
        sentences.append("The budget is too short for it now")
    elif budget and count and found.high > budget:
        sentences.append("A slow run may hit the budget")
    if trend.slope is None:
        sentences.append(f"Not enough history for a trend ({trend.runs} run{'' if trend.runs == 1 else 's'})")
    elif trend.growing:
        growth = f"It grows by {_rate(trend.slope)} a day ({trend.runs} runs in {trend.days:.0f} days)"
        if budget and not short:
            hit = found.budget_hit_on
            growth += f": it hits the budget about {hit}" if hit else ": the budget lasts for more than two years"
        sentences.append(growth)
    else:
        sentences.append(f"It is {'getting faster' if trend.shrinking else 'not growing'} ({trend.runs} runs)")
    return ". ".join(sentences) + "."


def _rate(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds < 60 else duration(seconds)
