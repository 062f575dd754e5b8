"""Expected wall time, its interval, the trend, and the day on which the budget is hit."""

from __future__ import annotations

import json
import random
from datetime import date, timedelta

import pytest

from ci import costs, forecast, plans, schedule
from ci.costs import Costs
from ci.history import History
from ci.tests.earlier import BEGAN, HERE, summary
from suites.cases import Case

CASES = plans.SMOKE.cases


def ahead(runs, *, budget=600.0, days=30.0, cases=CASES, plan="pr"):
    found = History(HERE, tuple(runs))
    now = BEGAN + timedelta(days=days)
    return forecast.of(plan, cases, found, Costs(found), budget=budget, now=now)


def test_without_history_it_says_so_and_is_wide():
    found = ahead([])
    assert found.runs == 0
    assert found.high > 5 * found.expected_seconds
    assert found.budget_hit_on is None
    assert found.slope_seconds_per_day is None
    assert "no run here to go by" in found.text
    assert "Not enough history for a trend (0 runs)" in found.text
    json.dumps(found.plain(), allow_nan=False)


def test_the_interval_narrows_and_covers():
    """Nine of ten, from runs whose pace differs from day to day by a quarter; few runs must do better, not worse."""
    for count in (1, 3, 10):
        chance = random.Random(count)
        inside = 0
        for trial in range(60):
            paces = [chance.lognormvariate(0.3, 0.25) for _ in range(count + 1)]
            runs = [summary(CASES, days=i, pace=pace, seed=trial * 100 + i) for i, pace in enumerate(paces)]
            found = ahead(runs[:-1])
            report = schedule.phases(CASES, Costs()).report + schedule.SETUP
            inside += found.low <= runs[-1].wall_seconds + report <= found.high
        assert inside >= 51, (count, inside)  # nine of ten of 60, less one in a hundred's bad luck
    assert ahead(runs).high / ahead(runs).low < 4, "an interval that holds everything says nothing"
    assert ahead(runs).high / ahead(runs).low < ahead(runs[:1]).high / ahead(runs[:1]).low


def test_runs_of_other_plans_count_while_there_are_few_of_this_one():
    other = [summary(CASES, days=i, pace=3.0, plan="nightly") for i in range(4)]
    assert ahead(other).runs == 4
    own = [summary(CASES, days=10 + i, pace=3.0) for i in range(3)]
    assert ahead(other + own).runs == 3
    far = [summary(CASES, days=i, pace=3.0) for i in range(4)]
    elsewhere = History("cuda, H, 8 cores", tuple(far))
    now = BEGAN + timedelta(days=9)
    found = forecast.of("pr", CASES, elsewhere, Costs(elsewhere), budget=600.0, now=now)
    assert found.runs == 0, "another kind of machine tells no times"


def test_the_trend_finds_the_day():
    many = [Case("handwritten", seed=seed) for seed in range(200)]
    runs = [summary(many[: 40 + 10 * night], days=night, seed=night) for night in range(12)]
    now = many[:160]
    found = ahead(runs, budget=150.0, days=12, cases=now)
    one = costs.static_seconds(many[0])
    assert found.slope_seconds_per_day == pytest.approx(10 * one, rel=0.1)
    hit = date.fromisoformat(found.budget_hit_on)
    days = (150.0 - found.expected_seconds) / (10 * one)
    assert abs((hit - (BEGAN + timedelta(days=12)).date()).days - days) < 0.15 * days + 2
    assert f"hits the budget about {hit}" in found.text
    later = ahead(runs, budget=1e6, days=12, cases=now)
    assert later.budget_hit_on is None
    assert "more than two years" in later.text
    over = ahead(runs, budget=60.0, days=12, cases=now)
    assert over.budget_hit_on == "2026-03-13"
    assert "too short for it now" in over.text


def test_no_growth_is_no_alarm():
    """Noise from night to night must not be called growth more often than the level says, one side of nine in ten."""
    chance = random.Random(1)
    alarms = 0
    for trial in range(60):
        paces = [chance.lognormvariate(0, 0.2) for _ in range(12)]
        runs = [summary(CASES[:12], days=i, pace=p, seed=trial * 50 + i) for i, p in enumerate(paces)]
        alarms += ahead(runs, days=12, cases=CASES[:12]).budget_hit_on is not None
    assert alarms <= 9
    flat = ahead([summary(CASES, days=i, seed=i) for i in range(8)])
    assert flat.budget_hit_on is None
    assert "not growing (8 runs)" in flat.text
    faster = ahead([summary(CASES, days=i, pace=2.0 - 0.1 * i, seed=i) for i in range(8)])
    assert "getting faster (8 runs)" in faster.text


def test_few_runs_or_one_evening_are_no_trend():
    few = ahead([summary(CASES, days=i, pace=1 + i) for i in range(4)])
    assert few.slope_seconds_per_day is None
    assert "Not enough history for a trend (4 runs)" in few.text
    evening = ahead([summary(CASES, days=i / 24, pace=1 + i / 10) for i in range(10)])
    assert evening.slope_seconds_per_day is None


def test_a_run_cut_short_by_its_budget_counts_with_what_it_left_out():
    whole = summary(CASES, days=0)
    half = len(CASES) // 2
    kept = whole.cases[:half]
    left = tuple(type(line)(case=line.case, target=line.target, status="not_run") for line in whole.cases[half:])
    seconds = 5.0 + sum(line.ranks + line.judge for line in kept)
    runs = [summary(CASES, days=i, seed=i) for i in range(6)]
    fields = {"days": 7.0, "seed": 7}
    cut = type(whole)(
        **{
            **{name: getattr(summary(CASES, **fields), name) for name in whole.__struct_fields__},
            "cases": kept + left,
            "wall_seconds": seconds,
            "end": "budget",
        }
    )
    found = Costs(History(HERE, tuple(runs)))
    trend = forecast.trend_of([*runs, cut], found)
    assert trend.runs == 7
    assert not trend.shrinking
    assert abs(trend.slope) < 1.0


def test_theil_sen():
    line = [(x, 3.0 + 2.0 * x) for x in range(10)]
    assert forecast.theil_sen(line) == (2.0, 2.0, 2.0)
    wild = [*line[:-1], (9, 1000.0)]
    assert forecast.theil_sen(wild)[0] == 2.0, "one bad night moves nothing"
    with pytest.raises(ValueError, match="two points"):
        forecast.theil_sen([(1.0, 2.0), (1.0, 3.0)])
    noise = random.Random(3)
    flat = [(x, noise.gauss(100, 5)) for x in range(15)]
    _, low, high = forecast.theil_sen(flat)
    assert low < 0 < high


def test_the_shipped_plans_fit_their_budgets():
    """By the static model, times two for a machine that is half as fast: to add cases may mean a larger budget."""
    for plan in plans.PLANS.values():
        needed = schedule.phases(plan.cases, Costs())
        assert 2 * needed.total <= plan.budget_seconds, f"{plan.name} needs {needed.total:.0f} s"
