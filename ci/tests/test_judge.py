"""The judge and the references that it keeps between runs."""

from __future__ import annotations

import os
import signal

import pytest

from ci import judge, records
from ci.tests.conftest import tiebench
from suites.cases import Case

ALONE = Case("handwritten", tie="untied", tp=1)
OTHER = ALONE.but(seed=1)


def written(directory):
    return {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}


def test_another_run_reads_the_references_and_says_the_same(session, tmp_path):
    place = tmp_path / "references"
    first = session(references=place).run(ALONE)
    before = written(place)
    assert len(before) >= ALONE.steps
    damaged = place / min(before)
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:100])
    second = session(references=place).run(ALONE)
    after = written(place)
    assert set(after) == set(before)
    assert {name for name in before if after[name] != before[name]} == {damaged.name}, "what could be read is read"
    assert damaged.read_bytes() == whole, "what could not is written again"
    assert second.verdict == first.verdict in records.GREEN
    assert (second.evidence, second.findings, second.measured) == (first.evidence, first.findings, first.measured)


def test_a_directory_that_cannot_be_used_is_told_once(session, tmp_path):
    place, said = tmp_path / "references", []
    place.write_text("in the way")
    s = session(references=place, say=said.append)
    assert s.run(ALONE).verdict in records.GREEN
    os.kill(s.judge.pid, signal.SIGKILL)
    assert s.run(OTHER).verdict in records.GREEN
    told = [line for line in said if "References" in line]
    assert len(told) == 1, said
    assert str(place) in told[0]


def test_without_references_none_are_kept_whatever_the_environment_says(session, tmp_path, monkeypatch):
    monkeypatch.setenv(judge.REFERENCES, str(tmp_path / "references"))
    assert session().run(ALONE).verdict in records.GREEN
    assert not (tmp_path / "references").exists()


@pytest.mark.parametrize("options", [(), ("--no-reference-cache",)])
def test_references_are_in_the_cache_unless_told_otherwise(tmp_path, monkeypatch, options):
    monkeypatch.setenv("TIEBENCH_CACHE", str(tmp_path / "cache"))
    done = tiebench("run", "--device", "cpu", "--case", ALONE.id, "--out", "run", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "cache" / "references").is_dir() == (not options)
