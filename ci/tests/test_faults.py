"""Faults that the run loop, and not an oracle, must catch; and ``--fault`` from the command line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ci.records import read_run
from suites.faults import FAULTS

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
