"""Faults that the run loop, and not an oracle, must catch; and ``--fault`` from the command line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ci import fault_plan
from ci.records import Finding, Record, read_run
from suites.faults import FAULTS, HARMLESS

HANGING = [fault for fault in FAULTS.values() if "hang" in fault.caught_by]


def tiebench(*words):
    done = subprocess.run(
        [sys.executable, "-m", "ci.cli", *words], capture_output=True, text=True, timeout=300, check=False
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


@pytest.mark.parametrize("fault", HANGING, ids=lambda f: f.name)
def test_a_rank_that_skips_a_collective_hangs_and_the_phases_say_where(fault, tmp_path):
    done = tiebench(
        "run", "--case", fault.case, "--fault", fault.name, "--case-limit", "10", "--out", str(tmp_path / "r")
    )
    record = read_run(tmp_path / "r").records[0]
    assert done.returncode == 1
    assert record.fault == fault.name
    # Ranks that run out of step end in a hang, or in an error when two different collectives meet.
    assert (record.status, record.verdict) in {("timeout", "hang"), ("finished", "crash")}
    assert "step 1" in record.evidence
    assert record.stacks
    assert f"--fault {fault.name}" in (record.rerun or "")


def test_fault_by_name_gives_the_verdict_bug(tmp_path):
    fault = FAULTS["detached_lookup_hidden"]
    done = tiebench("run", "--case", fault.case, "--fault", fault.name, "--out", str(tmp_path / "r"))
    record = read_run(tmp_path / "r").records[0]
    assert (done.returncode, record.verdict, record.fault) == (1, "bug", fault.name)
    assert record.oracle is not None
    assert "gradient" in record.oracle


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--case", "handwritten:head=row", "--fault", "no_such_fault"), "no_such_fault"),
        (("--case", "deepspeed:head=row", "--fault", "copied_tie"), "hand"),
    ],
)
def test_a_fault_that_would_not_be_put_in_is_refused(options, message, tmp_path):
    done = tiebench("run", *options, "--out", str(tmp_path / "r"))
    assert done.returncode == 2
    assert message in done.stderr + done.stdout
    assert not (tmp_path / "r").exists()


def faults(tmp_path, *words):
    done = tiebench("faults", *words, "--format", "json", "--out", str(tmp_path / "f"))
    return done, json.loads(done.stdout)


def test_the_fault_plan_says_who_saw_each_fault_when_and_what_it_looks_like(tmp_path):
    names = ("detached_lookup_hidden", "copied_tie", "tf32_on_one_rank", "bf16_reduction")
    done, rows = faults(tmp_path, *(word for name in names for word in ("--fault", name)))
    assert done.returncode == 0, done.stderr
    found = {row["fault"]: row for row in rows}
    assert set(found) == set(names)
    lookup = found["detached_lookup_hidden"]
    assert (lookup["class"], lookup["caught"], lookup["oracle"], lookup["step"]) == (4, True, "gradient", 1)
    assert lookup["margin"] > 100
    assert lookup["guesses"][0] == 4
    assert found["copied_tie"]["oracle"] == "tie"
    assert found["bf16_reduction"]["verdict"] == "bug: precision"
    harmless = found["tf32_on_one_rank"]
    assert (harmless["class"], harmless["verdict"], harmless["oracle"]) == (0, "rounding", "switches")
    records = read_run(tmp_path / "f").records
    assert {record.fault for record in records} == set(names)  # two of them in one case
    assert {record.fault: record.harmless for record in records}["tf32_on_one_rank"]


def test_what_is_not_as_it_must_be_comes_first():
    caught = fault_plan.row(FAULTS["copied_tie"], made("copied_tie", "bug", "tie", "gradient"))
    missed = fault_plan.row(FAULTS["scaled_lookup"], made("scaled_lookup", "rounding"))
    unseen = fault_plan.row(FAULTS["detached_lookup_hidden"], made("detached_lookup_hidden", "bug", "loss"))
    alarm = fault_plan.row(HARMLESS["reversed_sums"], made("reversed_sums", "bug", "gradient"))
    assert [caught.good, missed.good, unseen.good, alarm.good] == [True, False, False, False]
    assert [missed.caught, unseen.caught] == [False, True]  # seen, but not by the oracle that must see it
    assert fault_plan.ordered([caught, missed, unseen, alarm])[-1] == caught


def made(fault, verdict, *oracles):
    known = {**FAULTS, **HARMLESS}[fault]
    findings = tuple(Finding(oracle=name, flagged=True, evidence="seen", step=1) for name in oracles)
    return Record(
        case=known.case,
        path=known.path,
        target="torch",
        status="finished",
        verdict=verdict,
        findings=findings,
        fault=fault,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--fault", "no_such_fault"), "unknown fault 'no_such_fault'"),
        (("--path", "no_such_path"), "unknown path 'no_such_path'"),
        (("--path", "deepspeed", "--fault", "copied_tie"), "no fault is left to run"),
    ],
)
def test_a_fault_plan_of_nothing_is_refused(options, message, tmp_path):
    done = tiebench("faults", *options, "--out", str(tmp_path / "f"))
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "f").exists()
