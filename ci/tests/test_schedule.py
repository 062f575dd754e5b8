"""What comes first and why, what fits a budget, limits of cases, shards."""

from __future__ import annotations

import itertools
import math
import random
import time

import pytest

from ci import costs, history, plans, schedule
from ci.costs import Costs
from ci.history import History, read
from ci.schedule import Coverage, arrange, next_fitting, reserve, shard, timetable
from ci.tests.earlier import HERE, summary, write_run
from suites.cases import Case

A = Case("handwritten")
B = Case("handwritten", head="row")
C = Case("handwritten", head="row", zero=2)
D = Case("deepspeed")
E = Case("deepspeed", head="row")
F = Case("deepspeed", head="row", zero=3)
NEW = Case("deepspeed", zero=1)


def arranged(root, cases):
    found = read(root, HERE)
    return arrange(cases, Costs(found), found.past())


# Order


def test_what_went_wrong_last_time_comes_first(tmp_path):
    write_run(tmp_path / "1", {**dict.fromkeys((A, C, D, E, F), "rounding"), B: "bug"}, days=1)
    write_run(
        tmp_path / "2",
        {A: "rounding", B: "rounding", C: "not_run", D: "bug", E: "timeout", F: "lost"},
        days=2,
        end=None,
    )
    found = arranged(tmp_path, [A, B, C, NEW, D, E, F])
    reasons = {item.case: item.reason for item in found}
    assert {item.case for item in found[:3]} == {D, E, F}
    assert reasons[D] == "not as expected last time (bug)"
    assert reasons[E] == "timed out last time"
    assert reasons[F] == "was lost last time"
    assert [item.case for item in found[3:]] == [B, C, NEW, A]
    assert reasons[B] == "changed last time (bug to rounding)"
    assert reasons[C] == "not run last time"
    assert reasons[NEW].startswith("new: first ")
    assert reasons[A] == "repeats pairs" or reasons[A].startswith("first ")


def test_what_a_killed_run_never_began_comes_before_what_ran(tmp_path):
    write_run(tmp_path / "1", {A: "rounding", B: "never", C: "never"}, end=None)
    found = arranged(tmp_path, [A, B, C])
    assert {item.case for item in found[:2]} == {B, C}


def test_new_cases_come_before_known_ones(tmp_path):
    write_run(tmp_path / "1", dict.fromkeys(plans.SMOKE.cases, "rounding"))
    found = arranged(tmp_path, plans.PR.cases)
    new = set(plans.PR.cases) - set(plans.SMOKE.cases)
    assert {item.case for item in found[: len(new)]} == new
    assert all(item.estimate.samples == 1 for item in found[len(new) :])


def test_the_order_is_whole_and_deterministic():
    for plan in (plans.SMOKE, plans.PR):
        first = arrange(plan.cases, Costs())
        assert sorted(item.case.id for item in first) == sorted(case.id for case in plan.cases)
        assert first == arrange(plan.cases, Costs())
    assert arrange([], Costs()) == []
    assert len(arrange([A, A], Costs())) == 1


def test_the_largest_plan_is_ordered_quickly():
    begin = time.process_time()
    arrange(plans.FULL.cases, Costs())
    assert time.process_time() - begin < 30  # takes two seconds; quadratic code would take minutes


def covered(cases):
    """Weight of the pairs of factor values that cases have: counted apart from the code under test."""
    names = [*schedule.WEIGHTS, "optimizer", "clip", "accumulate", "register", "activation", "loss"]

    def values(case):
        own = {"uneven_hidden": case.hidden % case.tp > 0, "uneven_vocab": case.vocab % case.tp > 0}
        own["padding"] = case.padding_idx is not None
        return [(name, own[name] if name in own else getattr(case, name)) for name in names]

    pairs = {pair for case in cases for pair in itertools.combinations(values(case), 2)}
    return sum(schedule.WEIGHTS.get(a, 1) * schedule.WEIGHTS.get(b, 1) for (a, _), (b, _) in pairs)


def test_half_the_time_does_the_more_informative_half():
    cost = Costs()
    for plan in (plans.PR, plans.NIGHTLY):
        found = arrange(plan.cases, cost)
        budget = schedule.phases(plan.cases, cost).total / 2
        kept = [slot.planned.case for slot in timetable(found, cost, budget) if slot.runs]
        assert 0.3 * len(found) < len(kept) < 0.7 * len(found)
        whole = covered(plan.cases)
        ours = covered(kept) / whole
        chance = random.Random(0)
        others = [covered(chance.sample(plan.cases, len(kept))) / whole for _ in range(20)]
        assert ours > 0.99, f"{ours:.3f} of the pairs"
        assert ours > max(others), (ours, max(others))


def test_a_tenth_of_the_time_covers_far_more_than_chance():
    found = arrange(plans.NIGHTLY.cases, Costs())
    few = len(found) // 10
    chance = random.Random(0)
    others = sorted(covered(chance.sample(plans.NIGHTLY.cases, few)) for _ in range(21))
    whole = covered(plans.NIGHTLY.cases)
    missing = whole - covered([item.case for item in found[:few]])
    assert missing < (whole - others[10]) / 2


def test_lazy_greedy_is_greedy():
    cases = plans.SMOKE.cases
    found = arrange(cases, Costs())
    coverage, cost, waiting = Coverage(), Costs(), list(cases)
    for item in found:
        best = max(coverage.gain(case) / cost.estimate(case).expected for case in waiting)
        mine = coverage.gain(item.case) / cost.estimate(item.case).expected
        assert math.isclose(best, mine, rel_tol=1e-9)
        coverage.add(item.case)
        waiting.remove(item.case)


def test_where_a_change_of_sets_costs_there_are_few():
    def changes(found):
        return sum(a.case.world_size != b.case.world_size for a, b in itertools.pairwise(found))

    free = changes(arrange(plans.NIGHTLY.cases, Costs()))
    dear = changes(arrange(plans.NIGHTLY.cases, Costs(), switch=20.0))
    assert free > 50
    assert dear < free / 3


# Budget


def test_no_case_starts_that_may_not_end_in_time():
    cost = Costs()
    small, large = A, Case("handwritten", layers=64, steps=12)
    assert cost.estimate(large).high > 10 * cost.estimate(small).high
    left = cost.estimate(small).high + reserve(2) + 0.01
    up = [2]
    assert next_fitting([large, small], cost, left, reserve(2), up) == 1, "a shorter one after it fits"
    assert next_fitting([large, small], cost, left - 0.02, reserve(2), up) is None
    assert next_fitting([small], cost, left, reserve(2)) is None, "its ranks would have to start first"
    assert next_fitting([], cost, 1e9, 0.0) is None


def test_the_timetable_keeps_the_reserve():
    cost = Costs()
    found = arrange(plans.SMOKE.cases, cost)
    slots = timetable(found, cost, None)
    assert all(slot.runs for slot in slots)
    total = schedule.phases(plans.SMOKE.cases, cost)
    assert slots[-1].until == pytest.approx(total.total - total.report)
    budget = total.total / 2
    for slot in timetable(found, cost, budget):
        if slot.runs:
            assert slot.begin + slot.planned.estimate.high <= budget - reserve(len(found))
        else:
            assert slot.begin == slot.until
    assert not any(slot.runs for slot in timetable(found, cost, 1.0))
    assert all(slot.begin >= 100.0 for slot in timetable(found, cost, None, provisioning=100.0))


# Costs


def test_unknown_cases_are_taken_to_be_slow_and_history_narrows():
    cases = list(plans.SMOKE.cases)
    unknown = Costs().estimate(cases[0])
    assert unknown.high > 5 * unknown.expected
    one = Costs(History(HERE, (summary(cases[1:], days=0),)))
    many = Costs(History(HERE, tuple(summary(cases, days=i, seed=i) for i in range(10))))
    ratio = [cost.estimate(cases[0]).high / cost.estimate(cases[0]).expected for cost in (Costs(), one, many)]
    assert ratio[0] > ratio[1] > ratio[2] > 1.1
    assert many.estimate(cases[0]).samples == 10


def test_few_samples_give_wide_quantiles():
    cases = list(plans.SMOKE.cases)
    steady = tuple(summary(cases[1:], days=i, seed=i) for i in range(6))
    once = summary(cases[:1], days=7)
    cost = Costs(History(HERE, (*steady, once)))
    spread = {case: cost.estimate(case).ranks_high / cost.estimate(case).ranks for case in cases[:2]}
    assert spread[cases[0]] > 1.02 * spread[cases[1]]


def test_a_quantile_of_99_covers():
    cases = plans.SMOKE.cases
    cost = Costs(History(HERE, tuple(summary(cases, days=i, noise=0.3, seed=i) for i in range(8))))
    inside = total = 0
    for trial in range(10):
        for line in summary(cases, days=20, noise=0.3, seed=100 + trial).cases:
            inside += line.ranks + line.judge <= cost.estimate(cost.known[line.case]).high
            total += 1
    assert inside / total > 0.98


def test_a_run_learns_the_pace_of_its_machine():
    cases = list(plans.SMOKE.cases)
    cost = Costs(History(HERE, tuple(summary(cases, days=i, seed=i) for i in range(5))))
    before = cost.estimate(cases[-1])
    for case in cases[:20]:
        ranks, judge = costs.static(case)
        cost.learn(case, 4 * ranks, 4 * judge)
    after = cost.estimate(cases[-1])
    assert 2.5 < cost.pace < 4.1
    assert after.expected > 2.5 * before.expected
    cold = Costs()
    wide = cold.estimate(cases[-1])
    for case in cases[:20]:
        cold.learn(case, *costs.static(case))
    assert cold.estimate(cases[-1]).high < 0.6 * wide.high, "the machine is no longer unknown"


def test_limits(tmp_path):
    cost = Costs()
    assert cost.limit(A, 60.0) == costs.LIMIT_FLOOR, "a short case gets no short limit: machines get busy"
    assert cost.limit(A, 5.0) == 5.0, "never above the ceiling"
    large = Case("handwritten", vocab=30000, hidden=64, layers=30, steps=30)
    assert cost.limit(large, 60.0) == 60.0
    found = cost.limit(large, 1e6)
    assert found == pytest.approx(costs.LIMIT_FACTOR * cost.estimate(large).ranks_high)
    write_run(tmp_path / "1", {A: "timeout", B: "rounding", C: "lost"}, end=None)
    cost = Costs(read(tmp_path, HERE))
    assert cost.limit(A, 60.0) == cost.limit(C, 60.0) == 60.0, "how long it takes is not known"
    assert cost.limit(B, 60.0) == costs.LIMIT_FLOOR


def test_history_of_cases_that_are_gone_does_no_harm():
    line = history.Line(case="handwritten:gone=1,tie=x", target="t", status="finished", verdict="exact", ranks=1.0)
    odd = history.Line(case="handwritten:zero=0,tie=tied,head=vocab", target="t", status="finished", ranks=0.0)
    run = summary([A], days=0)
    fields = {name: getattr(run, name) for name in run.__struct_fields__} | {"cases": (line, odd, *run.cases)}
    cost = Costs(History(HERE, (type(run)(**fields),)))
    assert list(cost.known) == [A.id]
    assert cost.estimate(A).expected > 0


def test_the_overlap_of_judging_is_learned():
    run = summary(plans.SMOKE.cases, days=0)
    busy = run.wall_seconds - 5.0
    fields = {name: getattr(run, name) for name in run.__struct_fields__} | {"wall_seconds": 5.0 + 0.6 * busy}
    assert Costs(History(HERE, (type(run)(**fields),))).share == pytest.approx(0.6)
    assert Costs().share == 1.0


# Shards


def test_shards_are_disjoint_complete_and_even():
    chance = random.Random(0)
    for _ in range(60):
        cases = chance.choices(plans.FULL.cases, k=chance.randrange(120))
        count = chance.randrange(1, 14)
        parts = [shard(cases, index, count) for index in range(1, count + 1)]
        together = [case.id for part in parts for case in part]
        assert sorted(together) == sorted(case.id for case in cases)
        loads = [sum(costs.static_seconds(case) for case in part) for part in parts]
        longest = max(map(costs.static_seconds, cases), default=0.0)
        assert max(loads) - min(loads) <= longest + 0.001 * len(cases) + 1e-9


def test_shards_do_not_depend_on_the_order_and_keep_it():
    cases = list(plans.PR.cases)
    for index in (1, 2, 3):
        mine = shard(cases, index, 3)
        assert [case for case in cases if case in set(mine)] == mine
        assert {*shard(cases[::-1], index, 3)} == {*mine}
    assert [len(shard([A], index, 3)) for index in (1, 2, 3)] == [1, 0, 0]
    for index, count in ((0, 3), (4, 3), (1, 0)):
        with pytest.raises(ValueError, match=f"shard {index}/{count}"):
            shard(cases, index, count)
