"""The gate over refusals and known issues: red only on what the tables do not say, and on what they say no longer."""

from __future__ import annotations

import json
import textwrap
from dataclasses import replace

import pytest

from ci import outcomes
from ci.records import Expectation, Finding, Record, expected, read_run
from ci.tests.conftest import tiebench
from suites import expectations
from suites.expectations import entries
from suites.tests.test_expectations import ENTRY

CASE = "deepspeed:tie=tied,head=row,zero=2"
LATE = """
    import torch
    from deepspeed.module_inject import layers

    def refuse(self, *args, **kwargs):
        layers.VocabParallelEmbedding.validate_embedding(torch.nn.Embedding(2, 2, max_norm=1.0))

    layers.HiddenParallelEmbedding.{method} = refuse
"""


@pytest.fixture(autouse=True)
def one_entry(request, monkeypatch):
    if "real" not in request.keywords:
        monkeypatch.setattr(expectations, "entries", lambda: (ENTRY,))


def record(**changes):
    given = {
        "case": CASE,
        "path": "deepspeed",
        "target": "deepspeed==0.19.8 (1a2b3c)",
        "status": "finished",
        "verdict": "bug",
        "findings": (Finding(oracle="tie", flagged=True, evidence="broken"),),
        "evidence": "two tensors of rank 0",
    }
    return Record(**(given | changes))


def test_what_is_foreseen_is_as_expected_and_says_so():
    found = outcomes.foreseen(record())
    assert expected(found)
    assert not expected(record())
    assert (found.expectation.name, found.expectation.met) == ("an-issue", True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"verdict": "rounding", "findings": ()}, "no longer holds in deepspeed==0.19.8 (1a2b3c): give its versions"),
        ({"verdict": "crash", "findings": ()}, "not what known issue an-issue foresees (bug)"),
        ({"evidence": "two tensors of rank 7"}, "not what known issue an-issue foresees (bug)"),
    ],
)
def test_another_result_is_red_and_says_what_to_do(changes, said):
    found = outcomes.foreseen(record(**changes))
    assert not expected(found)
    assert found.evidence.startswith(said) or said in found.evidence
    assert not found.expectation.met


def test_an_issue_that_chance_decides_may_come_out_green(monkeypatch):
    monkeypatch.setattr(expectations, "entries", lambda: (replace(ENTRY, always=False),))
    green = outcomes.foreseen(record(verdict="rounding", findings=()))
    assert green.expectation is None
    assert expected(green)
    assert expected(outcomes.foreseen(record()))


@pytest.mark.parametrize(
    "changes",
    [
        {"target": "deepspeed==0.18.9"},
        {"target": "deepspeed (not installed)"},
        {"case": "deepspeed:tie=tied,head=row,zero=0"},
        {"patch": "mine.py sha256:1"},
        {"fault": "a_fault"},
        {"status": "lost", "verdict": None, "findings": ()},
    ],
)
def test_other_cases_builds_and_changed_runs_are_no_business_of_an_entry(changes):
    found = outcomes.foreseen(record(**changes))
    assert found.expectation is None
    assert not expected(found)


def test_an_expectation_that_is_not_met_is_never_green():
    told = Expectation(kind="refusal", name="n", why="w", met=False)
    assert not expected(record(verdict="rounding", findings=(), expectation=told))


@pytest.mark.real
@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", ["0.19.8", "0.19.6", "0.19.5", "0.18.9"])
def test_each_entry_s_minimal_case_comes_out_as_it_says(tmp_path, version):
    mine = [entry for entry in entries() if entry.holds_for(version)]
    words = [word for entry in mine for word in ("--case", entry.minimal)]
    target = [] if version == "0.19.8" else ["--target", f"deepspeed=={version}"]
    done = tiebench("run", *words, *target, "--out", "run", cwd=tmp_path)
    found = {r.case: r for r in read_run(tmp_path / "run").records}
    for entry in mine:
        named = found[expectations.Case.parse(entry.minimal).id].expectation
        assert named is not None or not entry.always, entry.name
        assert named is None or named.met, entry.name
    assert done.returncode == 0, done.stdout
    assert "GREEN" in done.stdout


@pytest.mark.real
@pytest.mark.timeout(600)
def test_without_the_tables_the_same_case_is_red(tmp_path):
    done = tiebench("run", "--no-known", "--case", "deepspeed:dtype=float16", "--out", "run", cwd=tmp_path)
    assert done.returncode == 1
    (found,) = read_run(tmp_path / "run").records
    assert (found.verdict, found.expectation) == ("refused", None)


@pytest.mark.real
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("method", "verdict", "said"),
    [
        (
            "__init__",
            "refused",
            "refused after the model was changed: on rank 0 layers.0.q_proj (Linear -> LinearLayer)",
        ),
        ("forward", "crash", "refused only in 'step 1 forward and backward', after the model was built"),
    ],
)
def test_a_refusal_that_comes_too_late_is_a_finding(tmp_path, method, verdict, said):
    (tmp_path / "late.py").write_text(textwrap.dedent(LATE).format(method=method))
    done = tiebench("run", "--case", "deepspeed:head=row", "--patch", "late.py", "--out", "run", cwd=tmp_path)
    assert done.returncode == 1
    (found,) = read_run(tmp_path / "run").records
    assert (found.verdict, found.oracle) == (verdict, "refusal")
    assert said in found.evidence


@pytest.mark.real
def test_known_prints_the_tables_and_checks_them(tmp_path):
    done = tiebench("known", "--format", "json", cwd=tmp_path)
    told = json.loads(done.stdout)
    assert (done.returncode, told["problems"]) == (0, [])
    assert {entry["name"] for entry in told["entries"]} == {entry.name for entry in entries()}
    assert all(any(entry["cases"].values()) for entry in told["entries"])
    text = tiebench("known", cwd=tmp_path).stdout
    assert "tiebench run --no-known --case deepspeed:head=row,zero=3,init=zero_dtype" in text


@pytest.mark.real
def test_list_says_what_each_combination_comes_to(tmp_path):
    done = tiebench(
        "list", "--over", "head,dtype", "--base", "deepspeed:tie=untied,zero=2", "--format", "json", cwd=tmp_path
    )
    found = json.loads(done.stdout)
    assert len(found) == 16
    assert all("tie=untied" in cell["case"] for cell in found if cell["case"])
    assert {cell["state"] for cell in found if cell["values"]["dtype"] == "float16"} == {"refused"}
    assert {cell["state"] for cell in found if cell["values"]["dtype"] == "float64"} == {"no sense"}
    done = tiebench("list", "--over", "tie,nose", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "unknown factor 'nose'" in done.stderr
