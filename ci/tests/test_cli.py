"""The command line as people use it: what it prints, its exit codes, and that bad input never gives a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from ci import plans
from ci.records import RecordLog, read_run
from ci.tests.conftest import ROOT, environment, run_row, tiebench
from suites.cases import FACTORS, Case

ALONE = Case("handwritten", layers=1, tp=1)


def test_a_run_prints_progress_and_report(tmp_path):
    ids = ["--case", ALONE.id, "--case", ALONE.but(seed=1).id]
    done = tiebench("run", "--device", "cpu", "--out", "out dir", *ids, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"[1/2] {ALONE.id} rounding" in done.stdout or f"[1/2] {ALONE.id} exact" in done.stdout
    assert "[2/2]" in done.stdout
    assert "GREEN" in done.stdout
    for name in ("events.jsonl", "environment.json", "report.md", "report.html"):
        assert (tmp_path / "out dir" / name).is_file(), name
    flat = tiebench("records", "out dir", "--format", "json", cwd=tmp_path)
    assert [row["case"] for row in json.loads(flat.stdout)] == [ALONE.id, ALONE.but(seed=1).id]
    assert tiebench("report", "out dir", cwd=tmp_path).returncode == 0
    again = tiebench("run", "--out", "out dir", *ids, cwd=tmp_path)
    assert again.returncode == 2
    assert (
        again.stderr
        == "tiebench: --out out dir already holds a run: choose another one, or go on with it: --resume 'out dir'\n"
    )
    same = tiebench("compare", "out dir", "out dir", "--output", "pr.md", cwd=tmp_path)
    assert same.returncode == 2, "a run compared with itself says nothing"
    assert "one and the same run" in (tmp_path / "pr.md").read_text()
    none = tiebench("compare", "nowhere", "out dir", cwd=tmp_path)
    assert none.returncode == 2
    assert "nowhere is no run directory" in none.stdout
    assert "Traceback" not in none.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["run", "--case", "nanogpt:tie=tied"], "unknown path 'nanogpt'"),
        (["run", "--case", "handwritten:colour=red"], "unknown factor 'colour'"),
        (["run", "--case", "handwritten:zero=3"], "spells ZeRO 0, 1 and 2 out, not 3"),
        (["run", "--case", "handwritten:tp=3"], "attention heads"),
        (["run", "--plan", "weekly"], "unknown plan 'weekly'; one of smoke, pr, matrix, nightly, full"),
        (["run", "--plan", "smoke", "--case", ALONE.id], "exclude each other"),
        (["run", "-k", "no such text"], "no case is left"),
        (["run", "--path", "megatron"], "unknown path 'megatron'"),
        (["run", "--shard", "5/4"], "shard 5/4"),
        (["run", "--shard", "half"], "write it as I/N"),
        (["run", "--fault", "gremlin", "--path", "handwritten"], "unknown fault 'gremlin'"),
        (["run", "--fault", "dropped_copy"], "add --path handwritten"),
        (["run", "--case", ALONE.id, "--patch", "missing.py"], "missing.py: No such file"),
        (["run", "--case", ALONE.id, "--out", "taken"], "taken is not an empty directory"),
        (["run", "--case", ALONE.id, "--out", "taken/file"], "taken/file is not an empty directory"),
        (["run", "--case", ALONE.id, "--out", "taken/file/below"], "taken/file/below: Not a directory"),
        (["run", "--case", "deepspeed:head=row", "--target", "no such thing =="], "no such thing =="),
        (["run", "--budget", "inf"], "--budget inf"),
        (["run", "--budget", "nan"], "--budget nan"),
        (["run", "--case-limit", "1e400"], "--case-limit inf"),
        (["run", "--startup-limit", "-inf"], "--startup-limit -inf"),
        (["run", "--case-limit", "0"], "--case-limit 0"),
        *[(["run", o, ""], f"{o} is empty") for o in ("--target", "--fault", "--shard", "--patch", "-k", "--out")],
        (["run", "--path", "handwritten", "--target", "deepspeed==0.19.5"], "no chosen case uses it"),
        (["run", "--case", ALONE.id, "--path", "deepspeed"], "exclude all"),
        (
            ["run", "--case", "deepspeed:head=row", "--case", ALONE.id, "--path", "deepspeed"],
            f"--case {ALONE.id} is excluded by --path",
        ),
        (["run", "--case", ALONE.id, "--out", "x\udcff"], "no text in this locale's encoding"),
        (["list", "--plan", "weekly"], "unknown plan"),
        (["report", "nowhere"], "nowhere is no run directory"),
        (["records", "nowhere"], "nowhere is no run directory"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, arguments, text):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    before = sorted(p.name for p in tmp_path.iterdir())
    done = tiebench(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("tiebench: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert text in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == before, "something was left behind"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_directory(tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    done = tiebench("run", "--case", ALONE.id, "--out", "locked/run", cwd=tmp_path)
    assert done.returncode == 2
    assert "Permission denied" in done.stderr


def test_unwritable_for_root_too(tmp_path):
    done = tiebench("run", "--case", ALONE.id, "--out", "/proc/tiebench", cwd=tmp_path)
    assert done.returncode == 2, done.stdout
    assert done.stderr.startswith("tiebench: cannot write to /proc/tiebench")
    assert "Traceback" not in done.stderr


def test_list_names_every_case_of_a_plan(tmp_path):
    done = tiebench("list", "--plan", "smoke", cwd=tmp_path)
    assert done.returncode == 0
    listed = [Case.parse(line) for line in done.stdout.split()]
    assert set(listed) == set(plans.SMOKE.cases)
    data = json.loads(tiebench("list", "--format", "json", cwd=tmp_path).stdout)
    assert [c["id"] for c in data["cases"]] == [c.id for c in listed]


def test_explain_tells_all_factors(tmp_path):
    text = tiebench("list", "--explain", cwd=tmp_path).stdout
    data = json.loads(tiebench("list", "--explain", "--format", "json", cwd=tmp_path).stdout)
    for factor in FACTORS:
        assert factor.name in text
    assert [f["name"] for f in data["factors"]] == [f.name for f in FACTORS]
    assert {p["name"]: p["cases"] for p in data["plans"]} == {p.name: len(p.cases) for p in plans.PLANS.values()}
    assert "spells ZeRO 0, 1 and 2 out, not 3" in text


def test_listing_imports_no_torch(tmp_path):
    script = "import sys\nfrom ci.cli import app\ntry: app(['list', '--explain'])\nexcept SystemExit: pass\n"
    script += "assert 'torch' not in sys.modules and 'pandas' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_version_and_help(tmp_path):
    assert tiebench("--version", cwd=tmp_path).stdout.startswith("tiebench 0.")
    text = tiebench("run", "--help", cwd=tmp_path).stdout
    assert "Exit codes" in text
    assert "--case-limit" in text


def test_a_reader_that_goes_away_does_not_stop_the_run(tmp_path):
    command = [sys.executable, "-m", "ci.cli", "run", "--device", "cpu", "--out", "run", "--case", ALONE.id]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()
        process.stdout = None
        _, said = process.communicate(timeout=240)
    assert "Traceback" not in said
    assert (tmp_path / "run" / "report.md").is_file()
    assert process.returncode == 0, said


def shell(line: str, cwd) -> subprocess.CompletedProcess[str]:
    """Run a shell line in which $T is the command line."""
    return subprocess.run(
        ["bash", "-c", line],
        cwd=cwd,
        env={**environment(), "T": f"{sys.executable} -m ci.cli"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("words", ["list --plan full", "list --explain"])
def test_output_that_goes_nowhere(tmp_path, words):
    gone = shell(f"$T {words} | head -1; exit ${{PIPESTATUS[0]}}", tmp_path)
    assert (gone.returncode, gone.stderr) == (0, "")
    closed = shell(f"$T {words} >&-", tmp_path)
    assert (closed.returncode, closed.stderr) == (0, "")
    full = shell(f"$T {words} > /dev/full", tmp_path)
    assert (full.returncode, full.stderr) == (2, "tiebench: cannot write the output: No space left on device\n")
    ascii_only = shell(f"PYTHONIOENCODING=ascii $T {words} | cat; exit ${{PIPESTATUS[0]}}", tmp_path)
    assert (ascii_only.returncode, ascii_only.stderr) == (0, "")


def test_a_host_that_is_not_this_machine_is_no_crash_of_the_target(tmp_path):
    done = tiebench("run", "--case", ALONE.id, "--host", "no.such.host.invalid", "--out", "run", cwd=tmp_path)
    assert done.returncode == 2, done.stdout
    assert done.stderr.startswith("tiebench: --host no.such.host.invalid: ")
    assert done.stderr.count("\n") == 1
    assert [r.status for r in read_run(tmp_path / "run").records] == ["lost"]


def test_a_report_that_cannot_be_written_is_printed_all_the_same(tmp_path):
    log = RecordLog(tmp_path / "run", run_row([ALONE.id]))
    log.close()
    (tmp_path / "run" / "report.md").mkdir()
    done = tiebench("report", "run", cwd=tmp_path)
    assert done.returncode == 2
    assert "INCOMPLETE" in done.stdout
    assert done.stderr == "tiebench: cannot write run/report.md: Is a directory\n"
