"""What is under test: a build of a framework, perhaps with a user's patch or with a fault that is put in on purpose."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from suites.cases import Case

if TYPE_CHECKING:
    from ci.targets import Target

PACKAGE = {"handwritten": "torch"}  # path -> the package that is under test; else it is called like the path


class SetupError(Exception):
    """Something that is not the tested framework's doing stops the run; one line for people (exit code 2)."""


@dataclass(frozen=True)
class Patch:
    """A user's patch file, read once so that all ranks run the same bytes.

    Raises:
        SetupError: (from `read`) the file cannot be read or is no Python.
    """

    path: Path
    source: str

    @classmethod
    def read(cls, path: Path) -> Patch:
        """Read and compile (without running) a patch file."""
        try:
            source = path.read_text(encoding="utf-8")
            compile(source, str(path), "exec")
        except (OSError, UnicodeDecodeError) as error:
            raise SetupError(f"--patch {path}: {getattr(error, 'strerror', None) or error}") from None
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None)
            raise SetupError(
                f"--patch {path}{f' line {line}' if line else ''}: {type(error).__name__}: {error}"
            ) from None
        return cls(path, source)

    @property
    def name(self) -> str:
        """File name and sha256, as records have it."""
        return f"{self.path.name} sha256:{hashlib.sha256(self.source.encode()).hexdigest()[:16]}"


@dataclass(frozen=True)
class Subject:
    """What is under test: a build of a framework, perhaps with a patch or a fault.

    Args:
        build: a build that `ci.targets` installed aside; None for what is installed here.
    """

    build: Target | None = None
    patch: Patch | None = None
    fault: str | None = None

    def target(self, path: str) -> str:
        """The build that a path's cases test."""
        package = PACKAGE.get(path, path)
        if self.build and self.build.distribution == package:
            return self.build.label
        try:
            return f"{package}=={importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            return f"{package} (not installed)"

    def tests(self, case: Case) -> bool:
        """Whether a case runs the build that was named; True when none was."""
        return self.build is None or self.build.distribution == PACKAGE.get(case.path, case.path)

    def rerun(self, case: str) -> str:
        """Command that runs one case again alone."""
        return shlex.join(["tiebench", "run", "--case", case, *self.options])

    @property
    def options(self) -> list[str]:
        """Options of `tiebench run` that make this subject."""
        words = ["--target", self.build.requirement] if self.build else []
        words += ["--patch", str(self.patch.path)] if self.patch else []
        return words + (["--fault", self.fault] if self.fault else [])


INSTALLED = Subject()


def version() -> str:
    """Version of tiebench, and its commit when it runs from a git checkout."""
    if given := os.environ.get("TIEBENCH_VERSION"):  # a container has no git to ask
        return given
    try:
        number = importlib.metadata.version("tiebench")
    except importlib.metadata.PackageNotFoundError:
        number = "0.1.0"
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return number
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return f"{number} ({found.stdout.strip()})"
    return number


def harmless(fault: str | None) -> bool:
    """Whether what is put in changes no result for the worse."""
    if fault is None:
        return False
    from suites.faults import HARMLESS  # noqa: PLC0415

    return fault in HARMLESS
