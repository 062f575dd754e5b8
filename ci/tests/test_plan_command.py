"""`tiebench plan`: what would run, in which order, until when, and what is left out."""

from __future__ import annotations

import json

import pytest

from ci import plans
from ci.tests.conftest import tiebench
from ci.tests.earlier import write_run

SMOKE = plans.SMOKE.cases


def plan(*words, cwd):
    done = tiebench("plan", *words, "--format", "json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_without_history(tmp_path):
    found = plan("smoke", cwd=tmp_path)
    assert found["budget_seconds"] == plans.SMOKE.budget_seconds
    assert found["history"]["runs"] == 0
    assert {row["case"] for row in found["cases"]} == {case.id for case in SMOKE}
    assert all(row["runs"] for row in found["cases"])
    assert all(row["reason"].startswith("new") for row in found["cases"])
    times = [row["until_seconds"] for row in found["cases"]]
    assert times == sorted(times)
    assert set(found["phases"]) == {"provisioning", "setup", "startup", "cases", "report", "total"}
    assert found["phases"]["total"] == pytest.approx(sum(found["phases"].values()) - found["phases"]["total"])
    assert found["forecast"]["runs"] == 0
    assert not (tmp_path / "runs").exists(), "it only looks"


def test_a_budget_that_is_too_small_names_what_it_leaves_out(tmp_path):
    found = plan("smoke", "--budget", "20", cwd=tmp_path)
    left = [row for row in found["cases"] if not row["runs"]]
    assert 0 < len(left) < len(SMOKE)
    assert max(row["until_seconds"] for row in found["cases"]) <= 20
    shown = tiebench("plan", "smoke", "--budget", "20", cwd=tmp_path)
    assert f"{len(left)} would be not_run (budget)" in shown.stdout
    assert shown.stdout.count("not run ") >= len(left)


def test_what_failed_last_time_comes_first_and_the_class_of_machine_counts(tmp_path):
    results = dict.fromkeys(SMOKE, "rounding") | {SMOKE[7]: "bug", SMOKE[20]: "not_run"}
    write_run(tmp_path / "runs" / "one", results)
    found = plan("smoke", cwd=tmp_path)
    assert found["cases"][0]["case"] == SMOKE[7].id
    assert found["cases"][0]["reason"] == "not as expected last time (bug)"
    assert found["cases"][1]["case"] == SMOKE[20].id
    assert found["history"]["runs"] == 0, "it ran on another machine: its times do not count, its verdicts do"
    elsewhere = plan("smoke", "--history", "runs", cwd=tmp_path)
    assert elsewhere["cases"] == found["cases"]


def test_shards_are_disjoint_and_whole(tmp_path):
    parts = [plan("smoke", "--shard", f"{i}/3", cwd=tmp_path) for i in (1, 2, 3)]
    ids = [row["case"] for part in parts for row in part["cases"]]
    assert sorted(ids) == sorted(case.id for case in SMOKE)
    totals = [part["phases"]["cases"] for part in parts]
    assert max(totals) < 1.2 * min(totals)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["none"], "unknown plan 'none'; one of smoke"),
        (["smoke", "--budget", "-1"], "--budget -1: give seconds"),
        (["smoke", "--history", "nowhere"], "--history nowhere: no such directory"),
        (["smoke", "--shard", "5/4"], "--shard 5/4"),
    ],
)
def test_bad_input(words, said, tmp_path):
    done = tiebench("plan", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
