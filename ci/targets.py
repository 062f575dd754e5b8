"""Targets: the exact build of a framework under test, installed aside.

A target is put in a directory of its own in the cache, complete or not at all, and comes before `.venv` on the ranks'
``sys.path``; `.venv` is never touched. Exact pins (``deepspeed==0.19.6``) and git URLs with a full commit are reused;
whatever else may have changed since (a branch, a range, a local checkout) is built each time, and its directory is
named by its content: the same build is the same directory, and a running test never loses its files.

The cache: ``$TIEBENCH_CACHE``, else ``$XDG_CACHE_HOME/tiebench``, else ``~/.cache/tiebench``.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from ci.bootstrap import FOREIGN_VARIABLES, die_with_parent, pip_reason

Progress = Callable[[str], None]
INSTALL_SECONDS = 1800


@dataclass(frozen=True)
class Kind:
    """One framework that can be a target.

    Args:
        build_environment: variables that its build needs.
        local_version: variable that takes the local part of the version, for builds from a checkout.
    """

    build_environment: Mapping[str, str] = field(default_factory=dict)
    local_version: str | None = None


# One row a framework, by the name of its distribution. The first is the default target.
KINDS: Mapping[str, Kind] = {
    "deepspeed": Kind(build_environment={"DS_BUILD_OPS": "0"}, local_version="DS_BUILD_STRING"),
}


class TargetError(Exception):
    """A target that cannot be installed, in one line for people."""


@dataclass(frozen=True)
class Target:
    """One installed build.

    Args:
        requirement: what was asked for.
        directory: comes first on the ranks' ``sys.path``; None: it is the one in `.venv`.
        distribution: name of the distribution.
        commit: git commit it was built from, "+dirty" where the checkout had changes; None where not known.
        source: "environment", "index", "git", "checkout" or "archive".
        unmet: its own requirements that the environment has in another version.
    """

    requirement: str
    directory: Path | None
    distribution: str
    version: str
    commit: str | None
    source: str
    unmet: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Name and version, with the commit where known, for reports."""
        commit = f" ({self.commit[:12]}{'+dirty' if self.commit.endswith('+dirty') else ''})" if self.commit else ""
        return f"{self.distribution}=={self.version}{commit}"


def default_target() -> Target:
    """The build that this Python has installed.

    Raises:
        TargetError: it has none.
    """
    name = next(iter(KINDS))
    try:
        found = distribution(name)
    except PackageNotFoundError:
        raise TargetError(f"{name} is not installed: run ci/setup, or name a build with --target") from None
    return Target(
        f"{name}=={found.version}", None, name, found.version, _vcs_commit(found), "environment", _unmet(found)
    )


def cache_directory() -> Path:
    """Where targets are kept; not made yet."""
    for variable, below in (("TIEBENCH_CACHE", "."), ("XDG_CACHE_HOME", "tiebench")):
        if os.environ.get(variable):
            return Path(os.environ[variable]).expanduser().absolute() / below
    return Path.home() / ".cache" / "tiebench"


@dataclass(frozen=True)
class _Order:
    """A requirement understood: what pip is given, and what is known of it before."""

    argument: str
    label: str  # for directory names
    source: str
    fixed: bool  # the same order is the same build for ever
    checkout: Path | None = None


def install(requirement: str, progress: Progress = lambda line: None) -> Target:
    """Install a build aside, or find it in the cache.

    Args:
        requirement: any pip requirement (``deepspeed==0.19.6``, ``deepspeed @ git+https://…@sha``), a git URL
            (``git+https://…``), or the path of a checkout or of a wheel or source archive.
        progress: hears what is being done, in lines for people.

    Raises:
        TargetError: it does not install, is no framework known here, or needs what the environment lacks.
    """
    requirement = requirement.strip()
    order = _understand(requirement)
    if order.source == "index" and order.fixed:
        with contextlib.suppress(TargetError):
            default = default_target()
            same = Requirement(requirement).specifier.contains(default.version, prereleases=True)
            if same and default.commit is None:
                return dataclasses.replace(default, requirement=requirement)
    # An installed build depends on the Python it was built for, and its record of torch on the torch it saw.
    torch = _version_of("torch")
    facts = [order.argument, sys.implementation.cache_tag, torch]
    key = hashlib.sha256("\0".join(map(str, facts)).encode()).hexdigest()[:16]
    place = cache_directory() / "targets"
    try:
        place.mkdir(parents=True, exist_ok=True)
        with _locked(place / f".{key}.lock", progress):
            entry = place / f"{order.label}-{key}"
            if order.fixed and entry.exists():
                with contextlib.suppress(TargetError, OSError, LookupError, ValueError, TypeError):
                    target = _load(entry, requirement)
                    progress(f"target {requirement}: from the cache")
                    return target
            progress(f"target {requirement}: installing")
            for left in place.glob(f".tmp-{key}-*"):  # of an install that was killed; the lock says that it is dead
                shutil.rmtree(left, ignore_errors=True)
            work = Path(tempfile.mkdtemp(prefix=f".tmp-{key}-", dir=place))
            try:
                return _build(order, requirement, work, entry, place / f"{order.label}-{key}.log")
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise TargetError(f"target {requirement}: {error.filename or place}: {error.strerror or error}") from None


def _understand(text: str) -> _Order:
    if not text or "\n" in text or text.startswith("-"):
        raise TargetError(f"target {text!r}: give a pip requirement, a git URL or the path of a checkout")
    if text.startswith("git+"):
        return _git(text)
    path = Path(text).expanduser()
    looks_like_path = text.startswith((".", "/", "~")) or text.endswith((".whl", ".tar.gz", ".zip"))
    if path.exists() or (looks_like_path and "@" not in text.partition("/")[0]):
        return _path(text, path)
    try:
        parsed = Requirement(text)
    except InvalidRequirement as error:
        reason = str(error).splitlines()[0]
        raise TargetError(f"target {text!r} is no pip requirement, git URL or directory: {reason}") from None
    _kind(parsed.name, text)
    if parsed.url is None:
        exact = any(s.operator in ("==", "===") and not s.version.endswith(".*") for s in parsed.specifier)
        return _Order(str(parsed), _slug(str(parsed)), "index", exact)
    if parsed.url.startswith("git+"):
        return _git(parsed.url)
    if parsed.url.startswith("file:"):
        return _path(text, Path(unquote(urlsplit(parsed.url).path)))
    return _Order(text, _slug(parsed.name), "archive", False)


def _kind(name: str, text: str) -> Kind:
    kind = KINDS.get(canonicalize_name(name))
    if kind is None:
        raise TargetError(f"target {text}: {name} cannot be a target; known: {', '.join(KINDS)}")
    return kind


def _git(url: str) -> _Order:
    without_fragment = url.partition("#")[0]
    _, _, revision = urlsplit(without_fragment).path.rpartition("@")
    name = without_fragment.rpartition("/")[2].partition("@")[0].removesuffix(".git")
    # The URL alone: older pips refuse "name @ git+file:…". The name is checked after the install.
    return _Order(url, _slug(name), "git", bool(re.fullmatch(r"[0-9a-f]{40}", revision)))


def _path(text: str, path: Path) -> _Order:
    path = path.resolve()
    if path.is_file():
        return _Order(str(path), _slug(path.name), "archive", False)
    if not path.is_dir():
        raise TargetError(f"target {text}: no such file or directory")
    if not any((path / name).exists() for name in ("pyproject.toml", "setup.py")):
        raise TargetError(f"target {text}: has no pyproject.toml or setup.py, so it is no checkout of a Python project")
    return _Order(str(path), _slug(path.name), "checkout", False, checkout=path)


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.")[:60] or "target"


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Alone among all processes that install this target. The kernel frees the lock when its holder dies."""
    with open(path, "w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another install of this target")
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _build(order: _Order, requirement: str, work: Path, entry: Path, log: Path) -> Target:
    argument, commit = order.argument, None
    environment: dict[str, str] = {}
    for kind in KINDS.values():
        environment.update(kind.build_environment)
    if order.checkout:
        # A build writes into its source tree, and takes up what earlier builds left there: build a clean copy.
        argument = str(work / "source")
        commit = _copy_checkout(order.checkout, work / "source")
        if commit:
            local = "+" + commit[:12] + (".dirty" if commit.endswith("+dirty") else "")
            environment.update({k.local_version: local for k in KINDS.values() if k.local_version})
    site = work / "entry" / "site"
    _pip(argument, site, environment, requirement, log)
    found = _installed(site, requirement)
    name = canonicalize_name(found.metadata["Name"])
    problems, missing = _unmet(found), _missing(found)
    if missing:
        wanted = " ".join(f"'{m}'" for m in missing)
        raise TargetError(f"target {requirement} needs {', '.join(missing)}: {sys.executable} -m pip install {wanted}")
    target = Target(requirement, site, name, found.version, commit or _vcs_commit(found), order.source, problems)
    if not order.fixed:
        entry = entry.with_name(f"{entry.name}-{_content(site)}")
    facts = {"distribution": name, "version": target.version, "commit": target.commit, "source": target.source}
    (work / "entry" / "target.json").write_text(json.dumps(facts, indent=1) + "\n")
    log.unlink(missing_ok=True)
    if entry.exists():
        with contextlib.suppress(TargetError, OSError, LookupError, ValueError, TypeError):
            return _load(entry, requirement)
        os.rename(entry, work / "damaged")  # somebody deleted a part of it
    os.rename(work / "entry", entry)
    return _load(entry, requirement)


def _load(entry: Path, requirement: str) -> Target:
    """A build that is in the cache.

    Raises:
        TargetError, OSError, LookupError, ValueError, TypeError: it is not whole.
    """
    facts = json.loads((entry / "target.json").read_text())
    found = _installed(entry / "site", requirement)
    _check_whole(found, requirement)
    if found.version != facts["version"]:
        raise TargetError(f"target {requirement}: {entry} holds {found.version}, not {facts['version']}")
    problems = _unmet(found)
    return Target(requirement=requirement, directory=entry / "site", unmet=problems, **facts)


def _pip(argument: str, site: Path, extra: Mapping[str, str], requirement: str, log: Path) -> None:
    options = ["--no-deps", "--no-build-isolation", "--no-input", "--no-color", "--disable-pip-version-check"]
    command = [sys.executable, "-I", "-m", "pip", "install", *options, "--progress-bar", "off"]
    env = {name: value for name, value in os.environ.items() if name not in FOREIGN_VARIABLES}
    env.update(extra, GIT_TERMINAL_PROMPT="0")
    with open(log, "wb") as stream:
        try:
            code = subprocess.run(
                [*command, "--target", str(site), argument],
                env=env,
                cwd=log.parent,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                timeout=INSTALL_SECONDS,
                check=False,
                preexec_fn=die_with_parent,  # pip must not outlive the lock
            ).returncode
        except subprocess.TimeoutExpired:
            raise TargetError(f"target {requirement}: pip took over {INSTALL_SECONDS} s (log: {log})") from None
    if code:
        raise TargetError(f"target {requirement}: {pip_reason(log.read_text(errors='replace'))} (log: {log})")


def _installed(site: Path, requirement: str) -> Distribution:
    found = list(distributions(path=[str(site)]))
    if len(found) != 1:
        raise TargetError(f"target {requirement}: pip installed {len(found)} distributions, not one")
    _kind(found[0].metadata["Name"], requirement)
    return found[0]


def _check_whole(found: Distribution, requirement: str) -> None:
    """Every file that pip recorded is there with its content: where one is missing, ranks import another build.

    Raises:
        TargetError: one is not; OSError: one cannot be read.
    """
    code = [f for f in found.files or () if f.suffix != ".pyc" and ".." not in f.parts and f.hash]
    if not any(f.suffix == ".py" for f in code):
        raise TargetError(f"target {requirement}: {found.metadata['Name']} has no file of Python")
    for file in code:
        assert file.hash
        digest = hashlib.new(file.hash.mode, file.read_binary()).digest()
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
            raise TargetError(f"target {requirement}: {file} was changed after the install")


def _copy_checkout(source: Path, to: Path) -> str | None:
    """Copy what the checkout's owner would commit; returns its commit, or None where there is no git."""
    top = _git_output(source, "rev-parse", "HEAD")
    listed = _git_output(source, "ls-files", "-z", "--cached", "--others", "--exclude-standard") if top else None
    names = [name for name in (listed or "").split("\0") if name]
    if not any(name in ("pyproject.toml", "setup.py") for name in names):
        ignored = shutil.ignore_patterns(".git", ".venv", "build", "dist", "__pycache__", "*.egg-info")
        shutil.copytree(source, to, symlinks=True, ignore=ignored)
        return None
    for name in names:
        if not os.path.lexists(source / name):
            continue  # deleted in the checkout
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        if (source / name).is_dir() and not (source / name).is_symlink():  # a submodule
            shutil.copytree(source / name, to / name, symlinks=True, ignore=shutil.ignore_patterns(".git"))
        else:
            shutil.copy2(source / name, to / name, follow_symlinks=False)
    changed = _git_output(source, "status", "--porcelain", "--", ".")
    return (top or "").strip() + ("+dirty" if changed else "")


def _git_output(directory: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments], capture_output=True, text=True, timeout=120, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def _content(site: Path) -> str:
    """Hash of an installed tree: names and bytes of its code, not what pip wrote about where it came from."""
    digest = hashlib.sha256()
    for path in sorted(site.rglob("*")):
        name = path.relative_to(site).as_posix()
        if not path.is_file() or "__pycache__" in name or path.name in ("RECORD", "direct_url.json"):
            continue
        digest.update(name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _vcs_commit(found: Distribution) -> str | None:
    try:
        facts = json.loads(found.read_text("direct_url.json") or "{}")
    except ValueError:
        return None
    return facts.get("vcs_info", {}).get("commit_id")


def _needs(found: Distribution) -> Iterator[tuple[Requirement, str | None]]:
    """What a distribution requires without extras, with the version that is there."""
    for text in found.requires or ():
        needed = Requirement(text)
        if needed.marker is None or needed.marker.evaluate({"extra": ""}):
            yield needed, _version_of(needed.name)


def _missing(found: Distribution) -> tuple[str, ...]:
    return tuple(str(needed).partition(";")[0].strip() for needed, version in _needs(found) if version is None)


def _unmet(found: Distribution) -> tuple[str, ...]:
    problems = []
    for needed, version in _needs(found):
        if version is None:
            problems.append(f"{needed.name}{needed.specifier} is not installed")
        elif not _fits(needed, version):
            problems.append(f"{needed.name}{needed.specifier} wanted, {version} is there")
    return tuple(problems)


def _fits(needed: Requirement, version: str) -> bool:
    try:
        return needed.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def _version_of(name: str) -> str | None:
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return None
