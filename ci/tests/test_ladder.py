"""Ladders over real builds and real commits."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from ci import ladder
from ci.ladder import LadderError, Repository
from ci.records import EVENTS
from ci.tests.conftest import tiebench

ROW, VOCAB = "deepspeed:tie=tied,head=row,zero=0", "deepspeed:tie=tied,head=vocab,zero=0"
INDENT = "\n" + " " * 29
RIGHT = f"self.weight,{INDENT}padding_idx=self.padding_idx,{INDENT}scale_grad_by_freq"


def git(repository: Path, *words: str) -> str:
    command = ["git", "-C", str(repository), "-c", "user.name=t", "-c", "user.email=t@example.org", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.strip()


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """DeepSpeed in a repository of five commits: the third cannot be built, the fourth loses the gradient of
    the hidden-parallel lookup."""
    spec = importlib.util.find_spec("deepspeed")
    assert spec
    assert spec.origin
    root = tmp_path_factory.mktemp("upstream")
    ignored = shutil.ignore_patterns("csrc", "__pycache__", "*.so")
    shutil.copytree(Path(spec.origin).parent, root / "deepspeed", ignore=ignored)
    project = root / "pyproject.toml"
    good = (
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "deepspeed"\nversion = "0.19.8"\n'
        '[tool.setuptools.packages.find]\ninclude = ["deepspeed*"]\n[tool.setuptools.package-data]\n"*" = ["*.json"]\n'
    )
    project.write_text(good)
    layers = root / "deepspeed" / "module_inject" / "layers.py"
    right = layers.read_text()
    assert right.count(RIGHT) == 1
    wrong = right.replace(RIGHT, RIGHT.replace("self.weight,", "self.weight.detach(),", 1))
    git(root, "init", "--quiet")
    commits = []
    for headline, path, text in (
        ("import", project, good),
        ("a note", root / "NOTE", "x"),
        ("half a release", project, "[nonsense"),
        ("faster embeddings", layers, wrong),
        ("another note", root / "NOTE", "y"),
    ):
        path.write_text(text)
        if headline == "faster embeddings":
            project.write_text(good)
        git(root, "add", "-A")
        git(root, "commit", "--quiet", "-m", headline)
        commits.append(git(root, "rev-parse", "HEAD"))
    return root, commits


@pytest.mark.timeout(900)
def test_the_story_of_row_heads_and_a_build_that_is_not_there(tmp_path):
    words = ("ladder", "deepspeed==0.19.5", "deepspeed==0.19.6", "deepspeed==0.0.0.1", "deepspeed==0.19.8")
    words += ("--case", ROW, "--case", VOCAB, "--case", "deepspeed:head=unmatched", "--out", "l", "--format", "json")
    done = tiebench(*words, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    assert {family["name"]: family["outcomes"] for family in told["families"]} == {
        "head=row": ["bug", "refused", None, "right"],
        "head=vocab": ["refused", "refused", None, "right"],
        "head=unmatched": ["right", "right", None, "right"],
    }
    problems = {build["label"]: build["problem"] for build in told["builds"]}
    assert problems["deepspeed==0.0.0.1"].startswith("cannot be installed: target deepspeed==0.0.0.1: No matching")
    assert [label for label, problem in problems.items() if problem] == ["deepspeed==0.0.0.1"]
    assert "Traceback" not in done.stderr
    assert "head=row" in (tmp_path / "l" / "ladder.md").read_text()

    logs = {path: path.read_bytes() for path in (tmp_path / "l").glob(f"*/{EVENTS}")}
    assert len(logs) == 3
    cut = logs.pop(tmp_path / "l" / "deepspeed-0.19.8" / EVENTS)  # as if killed after its first case
    lines = cut.splitlines(keepends=True)
    kept = next(i for i, line in enumerate(lines) if b'"event":"final"' in line) + 1
    (tmp_path / "l" / "deepspeed-0.19.8" / EVENTS).write_bytes(b"".join(lines[:kept]))
    again = tiebench(*words, cwd=tmp_path)
    assert json.loads(again.stdout)["families"] == told["families"]
    assert all(path.read_bytes() == content for path, content in logs.items())

    other = tiebench(*words[:2], "--case", ROW, "--out", "l", cwd=tmp_path)
    assert "holds a run of other cases" in other.stdout + other.stderr
    assert other.returncode == 1


@pytest.mark.timeout(1200)
def test_the_commit_that_lost_a_gradient_is_found_past_one_that_cannot_be_built(tmp_path, upstream):
    root, commits = upstream
    words = ("ladder", "--repo", str(root), "--commits", f"{commits[0]}..{commits[-1]}")
    done = tiebench(*words, "--case", ROW, "--case", VOCAB, "--out", "l", "--format", "json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["commits"]
    assert (found["family"], found["before"], found["after"]) == ("head=row", "right", "bug")
    assert (found["commit"], found["subject"]) == (commits[3], "faster embeddings")
    assert found["unsure"] == [commits[2]]


@pytest.mark.parametrize(
    ("span", "said"),
    [
        ("HEAD", "write it as A..B"),
        ("HEAD..", "write it as A..B"),
        ("nothing..HEAD", "fatal"),
        ("HEAD..HEAD", "no ancestor"),
        ("--all..HEAD", "fatal"),
    ],
)
def test_commits_that_are_none_are_one_line(tmp_path, span, said):
    source = tmp_path / "source"
    source.mkdir()
    git(source, "init", "--quiet")
    (source / "a").write_text("a")
    git(source, "add", "-A")
    git(source, "commit", "--quiet", "-m", "one")
    repository = Repository.open(str(source), tmp_path / "work", lambda line: None)
    with pytest.raises(LadderError, match=said):
        repository.commits(span)
    assert repository.requirement("0" * 40).startswith("git+file://")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give builds, the oldest first"),
        (("deepspeed==0.19.8", "--commits", "a..b", "--repo", "."), "give builds or --commits, not both"),
        (("--commits", "a..b"), "--commits and --repo go together"),
        (("deepspeed==0.19.8", "--case", "handwritten:zero=0"), "builds can be named for deepspeed only"),
        (("--commits", "a..b", "--repo", "nowhere", "--out", "l"), "--repo nowhere"),
    ],
)
def test_bad_input_is_one_line(tmp_path, words, said):
    done = tiebench("ladder", *words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_slug_is_a_plain_directory_name():
    assert ladder._slug("deepspeed @ git+https://x/../../y@1") == "deepspeed-git-https-x-..-..-y-1"
