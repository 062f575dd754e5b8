"""`tiebench calibrate`: real runs on ranks, going on where it was stopped, tables, exit codes."""

from __future__ import annotations

import json
import subprocess

import msgspec
import pytest

from ci import calibrate, plans
from ci.ranks import Settings
from ci.records import LogError
from ci.tests.conftest import ROOT, tiebench
from suites.calibration import ARITHMETICS, Job, Run
from suites.cases import Case
from suites.numerics import LIMITS
from suites.precision import arithmetic

CASE = Case("handwritten", layers=1, head="row", hidden=35)
JOBS = [
    Job("null", CASE.id),
    Job("null", CASE.but(seed=1, dtype="bfloat16").id, "reversed_sums"),
    Job("harmless", CASE.id, "tf32_unasked"),
    Job("graded", CASE.but(dtype="float64").id, "graded_lookup_1e-01"),
    Job("graded", CASE.but(matmul="tf32").id, "graded_lookup_1e-01"),
    Job("fault", CASE.but(dtype="float64").id, "detached_lookup_hidden"),
    Job("fault", CASE.but(dtype="float16").id, "detached_lookup_hidden"),
]
SETTINGS = Settings(device="cpu")


def test_jobs_run_on_ranks_and_are_gone_on_with(tmp_path):
    out = tmp_path / "calibration"
    calibrate.run(JOBS[:3], out, SETTINGS)
    with open(out / calibrate.RUNS, "ab") as rows:
        rows.write(b'{"kind":"null","case":"handw')  # killed while it wrote
    ran: list[Run] = []
    told: list[tuple[int, int]] = []
    calibrate.run(JOBS, out, SETTINGS, lambda done, left: told.append((done, left)), ran.append)
    assert told == [(3, 4)]
    assert [found.job for found in ran] == JOBS[3:]
    runs = {found.job: found for found in calibrate.read(out)}
    assert list(runs) == JOBS
    clean, low, switched, exact, tf32, _, fp16 = runs.values()
    assert (clean.seen, low.seen, low.held_out) == (False, False, True)
    assert set(clean.worst) == set(LIMITS)
    assert "switches" in switched.flagged
    assert not switched.bug
    assert exact.bug
    assert tf32.bug, "seen at tf32, then asked at fp32"
    assert fp16.seen
    assert 0 < (exact.errors["gradient embed_tokens.weight"] or 0) < 0.1
    assert 1e-5 < (tf32.sees["gradient embed_tokens.weight"] or 0) < 0.1
    result = calibrate.write(out, JOBS)
    assert result.problems == ()
    saved = json.loads((out / calibrate.JSON).read_text())
    assert saved["runs"] == len(JOBS)
    assert {row["scope"] for row in saved["limits"]} == set(LIMITS)
    assert saved["environment"]
    assert "Everything is as it must be." in (out / calibrate.MARKDOWN).read_text()
    part = calibrate.write(out, [*JOBS, Job("null", CASE.but(seed=2).id)])
    assert "1 of 8 runs are missing" in part.problems[0]


def test_what_a_framework_is_known_to_get_wrong_is_no_null_case():
    found = calibrate.jobs(quick=False, paths=["deepspeed"], precisions=["bfloat16"], device="cpu")
    cases = [Case.parse(job.case) for job in found]
    assert {case.zero for case in cases} == {1, 2, 3}, "without ZeRO, DeepSpeed sums in bf16"
    assert any(case.zero == 0 and case.dtype == "bfloat16" for case in plans.PLANS["nightly"].cases)


def test_a_directory_of_something_else_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(LogError, match="holds no calibration"):
        calibrate.run(JOBS, tmp_path, SETTINGS)
    (tmp_path / calibrate.RUNS).write_text("{}\n")
    with pytest.raises(LogError, match="cannot be read"):
        calibrate.read(tmp_path)


def done(job: Job, **others: object) -> bytes:
    """A row as a good run leaves it: faults are seen, null runs are not flagged."""
    clean = job.kind in ("null", "harmless")
    found = {
        "verdict": "rounding" if clean else "bug",
        "flagged": () if clean else ("gradient",),
        "worst": dict.fromkeys(LIMITS, 0.5),
        **others,
    }
    precision = arithmetic(Case.parse(job.case))
    return msgspec.json.encode(Run(job.kind, job.case, job.change, precision, "torch", "0", **found)) + b"\n"


@pytest.mark.parametrize(
    ("others", "code", "says"),
    [
        ({}, 0, "everything is as it must be"),
        ({"verdict": "bug", "flagged": ("gradient",)}, 1, "null run flagged"),
        ({"worst": {"tensor": LIMITS["tensor"]}}, 1, "limit tensor"),
    ],
)
def test_exit_code_says_whether_all_is_as_it_must_be(others, code, says, tmp_path):
    jobs = calibrate.jobs(quick=True, paths=["handwritten"], precisions=ARITHMETICS, device="cpu")
    (tmp_path / "c").mkdir()
    rows = [done(jobs[0], **others), *map(done, jobs[1:])]
    (tmp_path / "c" / calibrate.RUNS).write_bytes(b"".join(rows))
    words = ("calibrate", "--quick", "--path", "handwritten", "--device", "cpu", "--out", "c")
    ended = tiebench(*words, cwd=tmp_path)
    assert ended.returncode == code, ended.stdout + ended.stderr
    assert f"{len(jobs)} runs are there already, 0 are left" in ended.stdout
    assert "False alarms" in ended.stdout
    assert says in ended.stdout
    assert (tmp_path / "c" / calibrate.MARKDOWN).is_file()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--path", "megatron"], "unknown path 'megatron'"),
        (["--precision", "fp8"], "--precision fp8: one of float64"),
        (["--device", "tpu"], "--device tpu: one of auto, cpu"),
        (["--path", "deepspeed", "--precision", "float64"], "no run is left"),
        (["--quick", "--out", "taken"], "taken is not empty and holds no calibration"),
    ],
)
def test_bad_input_is_one_line(words, says, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("mine")
    ended = tiebench("calibrate", *words, cwd=tmp_path)
    assert ended.returncode == 2
    assert says in ended.stderr
    assert "Traceback" not in ended.stderr


def test_cuda_tables_is_a_script_that_runs_the_same_command():
    script = ROOT / "ci" / "cuda-tables"
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    assert script.stat().st_mode & 0o111
    assert "calibrate --path handwritten --precision float32 --precision tf32" in script.read_text()
