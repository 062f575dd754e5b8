"""Budgets: kept by the whole process, what tells most first, and the next night starts with the rest."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from ci import costs, plans, schedule
from ci.records import EndRow, RunRow, read_run
from ci.tests.conftest import command, environment
from suites.cases import Case


@pytest.fixture(scope="module")
def nights(tmp_path_factory) -> Path:
    """A directory with one whole run of 24 cases."""
    place = tmp_path_factory.mktemp("nights")
    nightly(place, "--out", "runs/1", "--budget", "200")
    return place


def nightly(place: Path, *options: str) -> None:
    """Run hand-written cases of plan smoke in a process of their own."""
    words = command("run", "--path", "handwritten", "--device", "cpu", *options)
    done = subprocess.run(words, cwd=place, env=environment(), capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr


def test_half_the_time_ends_within_it_with_a_whole_report_and_the_next_night_starts_with_the_rest(nights):
    whole = read_run(nights / "runs/1")
    assert whole.end.reason == "complete"
    assert whole.seconds is not None
    budget = round(whole.seconds / 2, 1)
    nightly(nights, "--out", "runs/2", "--budget", str(budget))
    half = read_run(nights / "runs/2")
    assert half.seconds < budget, "start of the process included; what is reserved for the report comes after"
    assert half.end.reason == "budget"
    ran = [r.case for r in half.records if r.status != "not_run"]
    left = [r for r in half.records if r.status == "not_run"]
    assert left
    assert {r.reason for r in left} == {"budget"}
    assert all(f"budget of {budget:.0f} s" in r.evidence for r in left)
    assert {r.verdict for r in half.records if r.status != "not_run"} <= {"rounding", "exact"}, "none was cut off"
    for report in ("report.md", "report.html"):
        assert (nights / "runs/2" / report).stat().st_size > 1000
    planned = list(half.plan.cases)
    assert [planned.index(case) for case in ran] == sorted(planned.index(case) for case in ran)

    shown = subprocess.run(
        command("plan", "smoke", "--format", "json"),
        cwd=nights,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    following = [
        row["case"] for row in json.loads(shown.stdout)["cases"] if row["reason"].startswith("not run last time")
    ]
    assert set(following) == {r.case for r in left}


def test_the_end_says_what_each_phase_took(nights):
    run = read_run(nights / "runs/1")
    assert isinstance(run.end, EndRow)
    assert isinstance(run.plan, RunRow)
    assert set(run.plan.phases) == {"provisioning", "setup", "startup", "cases", "report"}
    assert set(run.end.phases) == {"provisioning", "setup", "startup", "cases"}
    assert sum(run.end.phases.values()) == pytest.approx(run.end.seconds, abs=0.5)
    assert run.end.phases["provisioning"] > 0, "the process had to start"
    assert run.plan.forecast is not None
    assert run.plan.forecast.text


@pytest.mark.parametrize("plan", plans.PLANS.values(), ids=lambda plan: plan.name)
def test_shipped_plans_fit_their_budgets_by_the_static_model(plan):
    cost = costs.Costs()
    phases = schedule.phases(plan.cases, cost)
    assert phases.total + schedule.reserve(len(plan.cases)) < 0.8 * plan.budget_seconds
    assert not [
        slot
        for slot in schedule.timetable(schedule.arrange(plan.cases, cost), cost, plan.budget_seconds)
        if not slot.runs
    ]


def test_the_first_half_of_an_arranged_plan_covers_most_pairs():
    cost = costs.Costs()
    cases = list(plans.PR.cases)

    def covered(some: list[Case]) -> float:
        all_pairs = schedule.Coverage()
        for case in cases:
            all_pairs.add(case)
        mine = schedule.Coverage()
        for case in some:
            mine.add(case)
        return sum(mine.covered) / sum(all_pairs.covered)

    arranged = [item.case for item in schedule.arrange(cases, cost)]
    half = len(cases) // 2
    assert covered(arranged[:half]) > 0.95
    assert covered(arranged[:half]) > covered(cases[:half])
