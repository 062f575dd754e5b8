"""Is head slower than base? The statistics of the comparison, in numpy.

A change of the step time counts only where its whole 99 % interval lies beyond the noise floor, it is more than 1 ms a
step, and either side has at least six samples. The interval is a bootstrap of the ratio of medians: no normal
distribution is assumed, and one slow step does not move a median. The noise floor of a case is the largest of

- what two resamples of the base alone differ by (99 % of them): noise within a run,
- what further runs of the base (A/A) differ by: noise between runs; where there are none, `UNMEASURED` is assumed,
- `LEAST_CHANGE`: smaller changes are nobody's business.

Steps of one run share that run's machine, so that their number says nothing about noise between runs. The spread over
cases says nothing about it either: a slow-down of half the cases would look like noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

LEAST_SAMPLES = 6  # 6 against 6 is the least at which a rank test can reach p < 0.002
LEAST_CHANGE = 0.05  # relative
UNMEASURED = 0.25  # assumed noise between runs where no A/A run was given; shared machines reach it
LEAST_SECONDS = 1e-3  # absolute, a step
CONFIDENCE = 0.99
RESAMPLES = 4000

SpeedVerdict = Literal["regression", "improvement", "within noise", "insufficient data"]


@dataclass(frozen=True)
class Speed:
    """Step time of one case (or of one path's cases together) on either side.

    Args:
        base, head: median seconds per step; NaN for a group of cases.
        change: head / base - 1.
        low, high: 99 % interval of the change; NaN where there are too few samples.
        n: samples of base, of head.
        floor: changes up to this size are noise; NaN where it is not known.
    """

    name: str
    base: float
    head: float
    change: float
    low: float
    high: float
    n: tuple[int, int]
    floor: float
    verdict: SpeedVerdict


def samples(step_seconds: Sequence[float]) -> list[float]:
    """Usable samples: the first step warms up and is left out; a time that is no finite positive number is none."""
    return [s for s in step_seconds[1:] if s > 0 and math.isfinite(s)]


def judge(
    name: str, base: Sequence[float], head: Sequence[float], again: Sequence[Sequence[float]] = ()
) -> Speed | None:
    """Compare two sets of samples; None where one side has none.

    Args:
        again: samples of the same case in further runs of the base (A/A).
    """
    if not base or not head:
        return None
    before, after = float(np.median(base)), float(np.median(head))
    change, sizes = after / before - 1, (len(base), len(head))
    if min(sizes) < LEAST_SAMPLES:
        return Speed(name, before, after, change, math.nan, math.nan, sizes, math.nan, "insufficient data")
    low, high = _interval(_medians(head, len(head), 1) / _medians(base, len(base), 2) - 1)
    within = _medians(base, len(head), 3) / _medians(base, len(base), 4) - 1
    between = [abs(float(np.median(other)) / before - 1) for other in again if len(other) >= LEAST_SAMPLES]
    floor = max(LEAST_CHANGE, float(np.quantile(np.abs(within), CONFIDENCE)), *(between or [UNMEASURED]))
    verdict: SpeedVerdict = "within noise"
    if abs(after - before) > LEAST_SECONDS:
        verdict = "regression" if low > floor else "improvement" if high < -floor else verdict
    return Speed(name, before, after, change, low, high, sizes, floor, verdict)


def together(name: str, ratios: Sequence[float], again: Sequence[Sequence[float]]) -> Speed | None:
    """Geometric mean of many cases' head / base ratios, bootstrapped over the cases.

    It sees a slow-down that all cases share although each has few samples. A slow machine looks the same: without A/A
    runs (`again`: the ratios of further runs of the base) it gives no verdict.
    """
    if not ratios:
        return None
    logs = np.log(np.asarray(ratios, dtype=float))
    change, sizes = float(np.expm1(logs.mean())), (len(logs), len(logs))
    if len(logs) < LEAST_SAMPLES:
        return Speed(name, math.nan, math.nan, change, math.nan, math.nan, sizes, math.nan, "insufficient data")
    means = _resample(logs, len(logs), 5).mean(axis=1)
    low, high = _interval(np.expm1(means))
    between = [abs(float(np.expm1(np.mean(np.log(other))))) for other in again if len(other) >= LEAST_SAMPLES]
    if not between:
        return Speed(name, math.nan, math.nan, change, low, high, sizes, math.nan, "insufficient data")
    floor = max(LEAST_CHANGE, *between)
    verdict: SpeedVerdict = "regression" if low > floor else "improvement" if high < -floor else "within noise"
    return Speed(name, math.nan, math.nan, change, low, high, sizes, floor, verdict)


def _resample(values: np.ndarray, size: int, seed: int) -> np.ndarray:
    """[RESAMPLES, size] draws with replacement; seeded, so that a report can be made again bit by bit."""
    return np.random.default_rng(seed).choice(values, size=(RESAMPLES, size), replace=True)


def _medians(values: Sequence[float], size: int, seed: int) -> np.ndarray:
    return np.asarray(np.median(_resample(np.asarray(values, dtype=float), size, seed), axis=1))


def _interval(draws: np.ndarray) -> tuple[float, float]:
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(draws, [tail, 1 - tail])
    return float(low), float(high)
