"""Set-up, launchers, pins and the workflow linter.

What takes minutes (a whole set-up) is not made again here: `ci/test` has just made the `.venv` that these tests run in.
The steps around it run for real, in copies of the repository's set-up files.
"""

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement

from ci import actionlint, bootstrap

ROOT = Path(bootstrap.__file__).resolve().parent.parent
VENV = ROOT / ".venv"


@pytest.fixture
def copy(tmp_path):
    """The set-up files alone, in a directory with a space in its name."""
    root = tmp_path / "a copy"
    (root / "ci").mkdir(parents=True)
    for name in ("ci/setup", "ci/test", "ci/nightly", "ci/bootstrap.py", "requirements.txt", "pyproject.toml"):
        shutil.copy2(ROOT / name, root / name)
    return root


def finished(root: Path, **changes: str) -> None:
    """Make `.venv` look like that of a finished set-up: the real interpreter, nothing installed, and a stamp."""
    base = getattr(sys, "_base_executable", None) or sys.executable
    subprocess.run([base, "-I", "-m", "venv", "--without-pip", str(root / ".venv")], check=True)
    (root / ".venv" / "tiebench.lock").touch()
    bootstrap._write_stamp(root / ".venv", {**bootstrap.stamp(root), **changes})


def call(program, *arguments, **variables):
    env = {**os.environ, **variables}
    return subprocess.run([str(program), *arguments], env=env, capture_output=True, text=True, timeout=120, check=False)


# ---- an environment that is there


@pytest.mark.skipif(not (VENV / "tiebench.json").exists(), reason="not set up by ci/setup")
def test_a_good_environment_is_left_alone():
    if call(VENV / "bin" / "python", "-I", ROOT / "ci" / "bootstrap.py", "--check").returncode:
        pytest.skip("out of date: ci/setup would make it anew under the running tests")
    before = (VENV / "tiebench.json").stat().st_mtime_ns, (VENV / "setup.log").stat().st_size
    done = call(ROOT / "ci" / "setup")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert before == ((VENV / "tiebench.json").stat().st_mtime_ns, (VENV / "setup.log").stat().st_size)


def test_the_stamp_decides(copy, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "nowhere"))  # nothing for asv to write
    finished(copy)
    python = copy / ".venv" / "bin" / "python"
    check = [python, "-I", copy / "ci" / "bootstrap.py", "--check"]
    assert call(*check).returncode == 0
    assert call(copy / "ci" / "setup").returncode == 0
    for name in ("requirements.txt", "pyproject.toml"):
        text = (copy / name).read_text()
        (copy / name).write_text(text + "# changed\n")
        assert call(*check).returncode == 1
        (copy / name).write_text(text)
    assert call(*check).returncode == 0
    (copy / ".venv" / "tiebench.json").write_text('{"recipe": "1", ')  # torn
    assert call(*check).returncode == 1
    moved = copy.with_name("moved")
    finished(copy)
    copy.rename(moved)
    assert call(moved / ".venv" / "bin" / "python", "-I", moved / "ci" / "bootstrap.py", "--check").returncode == 1


def test_the_python_that_made_it_is_kept(copy, tmp_path):
    finished(copy)
    other = tmp_path / "bin" / "python3"  # first on PATH, and not to be used
    other.parent.mkdir()
    other.write_text("#!/bin/sh\necho wrong python >&2\nexit 3\n")
    other.chmod(0o755)
    (copy / "requirements.txt").write_text("torch>=2\n")
    done = call(copy / "ci" / "setup", PATH=f"{other.parent}:{os.environ['PATH']}")
    assert "cannot read 'torch>=2'" in done.stderr
    assert "wrong python" not in done.stderr


def test_another_python_is_another_environment(copy):
    wanted = bootstrap.stamp(copy)
    assert bootstrap._same_environment(wanted, wanted)
    assert bootstrap._same_environment({**wanted, "project": "x"}, wanted)
    for key in ("python", "requirements", "root", "recipe"):
        assert not bootstrap._same_environment({**wanted, key: "x"}, wanted)
    assert not bootstrap._same_environment(None, wanted)


# ---- refusals, one line each


def test_a_foreign_venv_is_not_touched(copy):
    (copy / ".venv").mkdir()
    (copy / ".venv" / "precious").write_text("mine")
    done = call(copy / "ci" / "setup")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "was not made by ci/setup" in done.stderr
    assert [p.name for p in (copy / ".venv").iterdir()] == ["precious"]


def test_an_old_python_is_refused(copy, tmp_path):
    old = tmp_path / "python3.8"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && { echo "Python 3.8.18"; exit 0; }\nexit 1\n')
    old.chmod(0o755)
    done = call(copy / "ci" / "setup", PYTHON=str(old))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "Python 3.10 or newer is needed" in done.stderr
    assert "Python 3.8.18" in done.stderr
    assert call(copy / "ci" / "setup", PYTHON="no-such-python").returncode == 2


def test_no_index_is_told_and_leaves_no_stamp(copy, tmp_path):
    nowhere = {
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",  # nobody listens on the discard port
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_FIND_LINKS": "",
        "PIP_NO_CACHE_DIR": "1",
        "PIP_RETRIES": "0",
        "HOME": str(tmp_path),
    }
    done = call(copy / "ci" / "test", "-q", **nowhere)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert "is a package index reachable?" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert bootstrap.read_stamp(copy / ".venv") is None


def test_little_disk_is_told(copy, monkeypatch):
    monkeypatch.setattr(bootstrap, "DISK_GB", 1e9)
    with pytest.raises(bootstrap.SetupError, match="GB are free"):
        bootstrap.ensure(copy)


def test_neither_ensurepip_nor_pip(copy, monkeypatch):
    monkeypatch.setattr(bootstrap.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(bootstrap.SetupError, match="neither ensurepip nor pip"):
        bootstrap._make_venv(copy / ".venv", "pip==1", 0, {})


# ---- two at once, and killed ones


def test_a_second_set_up_waits_for_the_first(copy):
    finished(copy)
    with open(copy / ".venv" / "tiebench.lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        command = [sys.executable, "-I", str(copy / "ci" / "bootstrap.py")]
        second = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert second.stdout is not None
        assert "waiting for another set-up" in second.stdout.readline()
        assert second.poll() is None
    assert second.wait(timeout=60) == 0


def test_a_killed_set_up_takes_its_step_along_and_frees_the_lock(copy):
    script = """
import sys, time
sys.path.insert(0, sys.argv[1])
import bootstrap
from pathlib import Path
venv = Path(sys.argv[2])
with bootstrap._lock(venv) as lock:
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    bootstrap._run("a long step", [sys.executable, "-c", child], venv, lock, dict())
"""
    command = [sys.executable, "-c", script, str(copy / "ci"), str(copy / ".venv")]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    log = copy / ".venv" / "setup.log"
    while not (log.exists() and log.read_text().endswith("\n")):
        assert first.poll() is None
        time.sleep(0.05)
    child = int(log.read_text())
    first.send_signal(signal.SIGKILL)
    first.wait()
    with open(copy / ".venv" / "tiebench.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # comes only when the child, which has the lock as well, is dead
    deadline = time.monotonic() + 60  # files are closed a moment before a dying process is gone
    while Path(f"/proc/{child}").exists() and _state(child) not in "ZX":
        assert time.monotonic() < deadline, "the step outlives its set-up"
        time.sleep(0.05)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


# ---- pins


@pytest.mark.skipif(not (VENV / "tiebench.json").exists(), reason="not set up by ci/setup")
def test_what_is_installed_is_what_is_pinned_and_torch_is_there_once():
    done = call(VENV / "bin" / "python", "-I", "-c", bootstrap._VERIFY, ROOT / "requirements.txt", bootstrap.TORCH)
    assert (done.returncode, done.stderr) == (0, "")


def test_torch_is_there_once_for_these_tests():
    assert len({str(d.locate_file("")) for d in distributions() if d.metadata["Name"] == "torch"}) == 1


def requirements():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def test_everything_is_pinned_once_for_every_python():
    for version in ("3.10.0", "3.11.9", "3.12.1", "3.13.0"):
        environment = {"python_full_version": version, "python_version": version.rpartition(".")[0]}
        names = [r.name for r in requirements() if r.marker is None or r.marker.evaluate(environment)]
        assert len(names) == len(set(names)), version
        assert {"torch", "deepspeed", "asv", "modal", "pandas", "pytest", "numpy"} <= set(names)
    assert all(len(r.specifier) == 1 and str(r.specifier).startswith("==") for r in requirements())


def test_all_that_requirements_in_names_is_pinned_to_it():
    pinned = {r.name: r for r in requirements()}
    for line in (ROOT / "requirements.in").read_text().splitlines():
        text = line.partition("#")[0].strip()
        if text:
            wanted = Requirement(text)
            assert wanted.name in pinned
            assert wanted.specifier.contains(str(pinned[wanted.name].specifier).removeprefix("=="), prereleases=True)
    assert str(pinned["torch"].specifier) == f"=={bootstrap.TORCH}"


def test_the_set_up_reads_markers_as_pip_does():
    markers = {str(r.marker).replace('"', "'") for r in requirements() if r.marker}
    markers |= {"python_version >= '3.9'", "python_full_version == '3.11.*'", "python_full_version != '3.11.*'"}
    markers |= {"sys_platform == 'win32' or python_version < '4'", "sys_platform == 'linux' and python_version < '3'"}
    for marker in markers:
        assert bootstrap.marker_holds(marker) == Marker(marker).evaluate(), marker
    with pytest.raises(bootstrap.SetupError, match="ci/lock"):
        bootstrap.marker_holds("extra == 'x'")


def test_a_line_that_is_no_pin_is_refused(tmp_path):
    file = tmp_path / "requirements.txt"
    file.write_text("torch>=2\n")
    with pytest.raises(bootstrap.SetupError, match="cannot read 'torch>=2'"):
        bootstrap._pins(file)


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (
            "WARNING: Retrying\nERROR: No matching distribution found for x==1\n",
            "No matching distribution found for x==1",
        ),
        ("a\nOSError: [Errno 28] No space left on device\nERROR: x", "the disk is full"),
        (
            "error: subprocess-exited-with-error\n  Traceback:\n  ValueError: boom\n  [end of output]\n",
            "ValueError: boom",
        ),
        ("\x1b[31mERROR: Invalid thing\x1b[0m\nmore", "Invalid thing"),
        ("", "no reason given"),
        (
            "WARNING: Failed to establish a new connection: refused\nERROR: No matching distribution found for x",
            "the package index cannot be reached (Failed to establish a new connection)",
        ),
    ],
)
def test_pip_reason(log, reason):
    assert bootstrap.pip_reason(log) == reason


# ---- launchers


@pytest.fixture
def launched(copy, monkeypatch, tmp_path):
    """A set-up copy whose programs print what they were called with; `fail` lists those that fail."""
    monkeypatch.setenv("HOME", str(tmp_path / "nowhere"))
    finished(copy)
    script = '#!/bin/sh\necho "$(basename "$0") [$PWD] $*"\ncase " $FAIL " in *" $(basename "$0") "*) exit 1;; esac\n'
    for name in ("ruff", "mypy", "tiebench"):
        (copy / ".venv" / "bin" / name).write_text(script)
        (copy / ".venv" / "bin" / name).chmod(0o755)
    pytest_module = next((copy / ".venv" / "lib").glob("python3*")) / "site-packages" / "pytest.py"
    pytest_module.write_text(
        "import os, sys; print('pytest', os.getcwd(), sys.argv[1:]); sys.exit(int(os.environ['RC']))"
    )
    return copy


def test_ci_test_runs_everything_and_names_what_failed(launched, tmp_path):
    link = tmp_path / "linked"
    link.symlink_to(launched / "ci" / "test")
    done = call(link, RC="1", FAIL="mypy")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "failed: mypy, pytest"
    assert [line for line in done.stdout.splitlines() if line.startswith("==")] == [
        *("== ruff check", "== ruff format", "== mypy", "== pytest")
    ]
    assert call(launched / "ci" / "test", RC="0").returncode == 0
    assert call(launched / "ci" / "test", RC="0", FAIL="ruff").returncode == 1


def test_ci_test_with_options_is_pytest_alone(launched, tmp_path):
    elsewhere = launched / "some" / "where"
    elsewhere.mkdir(parents=True)
    (elsewhere / "test_x.py").touch()
    env = {**os.environ, "RC": "5"}
    command = [str(launched / "ci" / "test"), "-k", "a b", "test_x.py::one", "ci/tests", "-x"]
    done = subprocess.run(command, cwd=elsewhere, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 5
    wanted = ["-k", "a b", f"{elsewhere}/test_x.py::one", "ci/tests", "-x"]
    assert done.stdout == f"pytest {launched} {wanted}\n"


def test_nightly_hands_its_options_on(launched, tmp_path):
    command = [str(launched / "ci" / "nightly"), "--case", "a b", "--plan", "smoke"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    told = re.sub(r"--spent \d+ ", "--spent N ", done.stdout)
    assert told == f"tiebench [{tmp_path}] run --spent N --case a b --plan smoke\n"


# ---- workflow files

GOOD = """
name: nightly
on:
  schedule:
    - cron: "17 2 * * *"
permissions:
  contents: read
jobs:
  run:
    runs-on: ubuntu-24.04
    timeout-minutes: 30
    steps:
      - uses: actions/checkout@v4
      - run: ci/nightly
"""


@pytest.fixture(scope="module")
def linter(request):
    command = actionlint.find()
    if command is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(actionlint.why_missing())
    print(f"actionlint: {' '.join(command)}")
    return command


def test_actionlint_passes_a_right_workflow(linter, tmp_path):
    file = tmp_path / "good (1) [x].yml"
    file.write_text(GOOD)
    assert actionlint.problems([file], linter) == []


@pytest.mark.parametrize(
    ("right", "wrong", "word"),
    [
        ("timeout-minutes", "timeout-minute", "timeout-minute"),
        ("17 2 * * *", "17 2 * *", "cron"),
        ("actions/checkout@v4", "actions/checkout", "checkout"),
        ("ci/nightly", "ci/nightly ${{ github.reff }}", "reff"),
    ],
)
def test_actionlint_catches_a_wrong_workflow(linter, tmp_path, right, wrong, word):
    good, bad = tmp_path / "good.yml", tmp_path / "bad.yml"
    good.write_text(GOOD)
    bad.write_text(GOOD.replace(right, wrong))
    found = actionlint.problems([good, bad], linter)
    assert len(found) == 1, found
    assert word in found[0].lower()
    assert "bad.yml:" in found[0]


def test_a_linter_that_does_not_work_is_no_clean_bill(linter, tmp_path):
    with pytest.raises(actionlint.LinterMissing):
        actionlint.problems([tmp_path / "missing.yml"], linter)
    with pytest.raises(actionlint.LinterMissing):
        actionlint.problems([tmp_path / "missing.yml"], ["false"])


def test_the_workflows_of_this_repository(linter):
    files = sorted((ROOT / ".github" / "workflows").glob("*.y*ml"))
    assert files, "no workflow files in .github/workflows"
    assert actionlint.problems(files, linter) == []
