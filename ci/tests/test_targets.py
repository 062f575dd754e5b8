"""Targets, with the real pip. Builds that pip has to fetch are installed once for the session."""

import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ci import targets, worker
from ci.targets import TargetError


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("targets")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TIEBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def git(directory, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.invalid", "-c", "init.defaultBranch=main"]
    done = subprocess.run(
        ["git", "-C", str(directory), *identity, *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def project(directory: Path, *, name="deepspeed", requires="", body="VALUE = 1\n", setup="") -> Path:
    """A tiny git checkout of a project that builds a distribution of this name."""
    (directory / name).mkdir(parents=True)
    (directory / name / "__init__.py").write_text(body)
    text = f"""
    import os
    from setuptools import setup
    {setup}
    setup(name={name!r}, version="9.9.1" + os.environ.get("DS_BUILD_STRING", ""), packages=[{name!r}],
          install_requires=[{requires}])
    """
    (directory / "setup.py").write_text(textwrap.dedent(text))
    (directory / ".gitignore").write_text("build/\n*.egg-info/\n")
    git(directory, "init")
    git(directory, "add", "-A")
    git(directory, "commit", "-m", "one")
    return directory


def site_packages() -> dict[str, float]:
    place = Path(sysconfig.get_path("purelib"))
    return {p.name: p.stat().st_mtime for p in place.iterdir() if p.name != "__pycache__"}


def left_over(cache: Path) -> list[str]:
    """What is in the cache apart from locks and logs."""
    places = (cache / "targets").iterdir() if (cache / "targets").exists() else []
    return sorted(p.name for p in places if p.suffix not in (".lock", ".log"))


def test_default_target_is_what_is_installed():
    target = targets.default_target()
    assert target.directory is None
    assert (target.distribution, target.source, target.unmet) == ("deepspeed", "environment", ())


def test_the_pin_of_the_environment_needs_no_install(cache):
    pin = f"deepspeed=={targets.default_target().version}"
    assert targets.install(pin).directory is None
    assert not cache.exists()


def test_a_release_from_the_index(shared_cache, monkeypatch):
    monkeypatch.setenv("TIEBENCH_CACHE", str(shared_cache))
    before = site_packages()
    said = []
    target = targets.install("deepspeed==0.19.6", said.append)
    assert said == ["target deepspeed==0.19.6: installing"]
    assert (target.version, target.distribution, target.commit) == ("0.19.6", "deepspeed", None)
    assert target.unmet == ()
    assert target.label == "deepspeed==0.19.6"
    find = "importlib.metadata.version('deepspeed'), importlib.util.find_spec('deepspeed').origin"
    script = f"import importlib.metadata, importlib.util; print({find})"
    env = {**os.environ, "PYTHONPATH": str(target.directory)}
    out = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True).stdout
    assert out.split() == ["0.19.6", str(target.directory / "deepspeed" / "__init__.py")]

    said.clear()
    assert targets.install("deepspeed==0.19.6", said.append) == target
    assert said == ["target deepspeed==0.19.6: from the cache"]

    (target.directory.parent / "target.json").unlink()  # a damaged entry is made anew
    assert targets.install("deepspeed == 0.19.6").directory == target.directory
    assert (target.directory.parent / "target.json").exists()
    assert site_packages() == before


def test_a_checkout_is_built_as_it_stands_and_left_alone(cache, tmp_path):
    checkout = project(tmp_path / "my check out")
    head = git(checkout, "rev-parse", "HEAD")
    (checkout / "build" / "lib" / "deepspeed").mkdir(parents=True)
    (checkout / "build" / "lib" / "deepspeed" / "stale.py").write_text("")  # of an earlier build; must not get in

    clean = targets.install(str(checkout))
    assert (clean.commit, clean.version, clean.source) == (head, f"9.9.1+{head[:12]}", "checkout")
    assert not (clean.directory / "deepspeed" / "stale.py").exists()
    assert targets.install(str(checkout)) == clean

    (checkout / "deepspeed" / "__init__.py").write_text("VALUE = 2\n")
    (checkout / "deepspeed" / "new.py").write_text("")
    dirty = targets.install(str(checkout))
    assert dirty.commit == head + "+dirty"
    assert dirty.directory != clean.directory
    assert (dirty.directory / "deepspeed" / "new.py").exists()
    assert (clean.directory / "deepspeed" / "__init__.py").read_text() == "VALUE = 1\n"
    assert sorted(p.name for p in checkout.iterdir()) == [".git", ".gitignore", "build", "deepspeed", "setup.py"]
    assert len(left_over(cache)) == 2


def test_a_directory_without_git(cache, tmp_path):
    checkout = project(tmp_path / "plain")
    subprocess.run(["rm", "-r", str(checkout / ".git")], check=True)
    target = targets.install(f"deepspeed @ file://{checkout}")
    assert (target.commit, target.version) == (None, "9.9.1")


def test_git_urls(cache, tmp_path):
    checkout = project(tmp_path / "origin")
    first = git(checkout, "rev-parse", "HEAD")
    pinned = f"deepspeed @ git+file://{checkout}@{first}"
    target = targets.install(pinned)
    assert (target.commit, target.source, target.version) == (first, "git", "9.9.1")
    assert targets.install(f"git+file://{checkout}@main").commit == first

    (checkout / "deepspeed" / "__init__.py").write_text("VALUE = 3\n")
    git(checkout, "commit", "-am", "two")
    said = []
    assert targets.install(pinned, said.append) == target
    assert said[-1].endswith("from the cache")
    moved = targets.install(f"git+file://{checkout}@main")  # a branch moves on
    assert moved.commit == git(checkout, "rev-parse", "HEAD")
    assert (moved.directory / "deepspeed" / "__init__.py").read_text() == "VALUE = 3\n"


def test_two_at_once_make_one(cache, tmp_path):
    checkout = project(tmp_path / "origin")
    pinned = f"deepspeed @ git+file://{checkout}@{git(checkout, 'rev-parse', 'HEAD')}"
    script = "import sys; from ci import targets; print(targets.install(sys.argv[1]).directory)"

    def one(_):
        root = Path(targets.__file__).parent.parent
        return subprocess.run(
            [sys.executable, "-c", script, pinned], cwd=root, capture_output=True, text=True, check=True
        ).stdout

    with ThreadPoolExecutor(3) as pool:
        assert len(set(pool.map(one, range(3)))) == 1
    assert len(left_over(cache)) == 1


def test_what_a_killed_install_left_is_removed(cache, tmp_path):
    checkout = project(tmp_path / "origin")
    pinned = f"deepspeed @ git+file://{checkout}@{git(checkout, 'rev-parse', 'HEAD')}"
    target = targets.install(pinned)
    key = target.directory.parent.name.rpartition("-")[2]
    subprocess.run(["rm", "-r", str(target.directory.parent)], check=True)
    (cache / "targets" / f".tmp-{key}-dead" / "entry").mkdir(parents=True)
    assert targets.install(pinned) == target
    assert left_over(cache) == [target.directory.parent.name]


@pytest.mark.parametrize(
    ("requirement", "words"),
    [
        ("", "give a pip requirement"),
        ("--index-url=x", "give a pip requirement"),
        ("deepspeed==1\nnumpy", "give a pip requirement"),
        ("!! what ??", "is no pip requirement"),
        ("numpy==2.2.0", "numpy cannot be a target; known: deepspeed"),
        ("./no/such/place", "no such file or directory"),
        ("/", "no checkout of a Python project"),
        ("deepspeed==99.99.99", "No matching distribution found for deepspeed==99.99.99"),
        ("git+file:///no/such/repository", "fatal:"),
        ("git+nosuch://x/y", "nosuch"),
    ],
)
def test_refusals_are_one_clear_line(cache, requirement, words):
    with pytest.raises(TargetError) as caught:
        targets.install(requirement)
    message = str(caught.value)
    assert words in message
    assert "\n" not in message
    assert left_over(cache) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "somethingelse"}, "somethingelse cannot be a target"),
        ({"requires": "'no-such-package-at-all>=2', 'numpy'"}, "needs no-such-package-at-all>=2"),
        ({"setup": "raise RuntimeError('the build is broken')"}, "RuntimeError: the build is broken"),
    ],
)
def test_builds_that_cannot_be_targets(cache, tmp_path, options, words):
    checkout = project(tmp_path / "origin", **options)
    with pytest.raises(TargetError) as caught:
        targets.install(str(checkout))
    message = str(caught.value)
    assert words in message
    assert "\n" not in message
    assert left_over(cache) == []
    if "(log: " in message:
        assert "broken" in Path(message.rpartition("(log: ")[2].rstrip(")")).read_text()


def test_another_version_wanted_is_told_and_not_fatal(cache, tmp_path):
    target = targets.install(str(project(tmp_path / "origin", requires="'numpy<1'")))
    assert len(target.unmet) == 1
    assert target.unmet[0].startswith("numpy<1 wanted, ")


def test_an_unusable_cache_is_one_clear_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TIEBENCH_CACHE", str(tmp_path / "file"))
    with pytest.raises(TargetError, match="Not a directory"):
        targets.install("deepspeed==0.19.6")


def test_cache_directory(monkeypatch, tmp_path):
    monkeypatch.delenv("TIEBENCH_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert targets.cache_directory() == tmp_path / "tiebench"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert targets.cache_directory() == tmp_path / ".cache" / "tiebench"


def test_an_entry_of_the_cache_that_lost_or_changed_a_file_is_made_anew(cache, tmp_path):
    checkout = project(tmp_path / "origin")
    pinned = f"deepspeed @ git+file://{checkout}@{git(checkout, 'rev-parse', 'HEAD')}"
    target = targets.install(pinned)
    package = target.directory / "deepspeed"
    for damage in (lambda: shutil.rmtree(package), lambda: (package / "__init__.py").write_text("VALUE = 4\n")):
        damage()
        said = []
        assert targets.install(pinned, said.append) == target
        assert said == [f"target {pinned}: installing"]
        assert (package / "__init__.py").read_text() == "VALUE = 1\n"


def test_what_a_rank_imported_must_be_the_target(tmp_path, monkeypatch):
    for name, version in (("asked", "1.2+abc"), ("other", "9")):
        (tmp_path / name / "shadowed").mkdir(parents=True)
        (tmp_path / name / "shadowed" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    directory = str(tmp_path / "asked")
    with pytest.raises(worker.WrongBuildError, match="was not imported"):
        worker.check_build("shadowed", "1.2+abc", directory)
    monkeypatch.syspath_prepend(str(tmp_path / "other"))
    importlib.import_module("shadowed")
    with pytest.raises(worker.WrongBuildError, match=r"is not what runs: shadowed was imported from .*other"):
        worker.check_build("shadowed", "1.2+abc", directory)
    with pytest.raises(worker.WrongBuildError, match="says version 9"):
        worker.check_build("shadowed", "1.2+abc", None)
    monkeypatch.delitem(sys.modules, "shadowed")
    monkeypatch.syspath_prepend(directory)
    importlib.import_module("shadowed")
    worker.check_build("shadowed", "1.2+ABC", directory)
    monkeypatch.delitem(sys.modules, "shadowed")
