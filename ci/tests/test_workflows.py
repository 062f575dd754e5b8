"""The workflow files: linted, and held to what they promise about tokens, limits, and results that survive."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import yaml

from ci import actionlint, plans
from ci.tests.conftest import ROOT

FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())
    return found


def triggers(workflow: dict[Any, Any]) -> dict[str, Any]:
    return workflow[True]  # YAML 1.1 reads the key `on` as true


def steps(workflow: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(name, step) for name, job in workflow["jobs"].items() for step in job["steps"]]


def named(workflow: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = (step for _, step in steps(workflow) if step.get("name") == name)
    return found


def test_there_are_workflows():
    assert {f.stem for f in FILES} == {"nightly", "pull-request", "pull-request-comment"}


def test_actionlint_finds_nothing():
    if not actionlint.find():
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(actionlint.why_missing())
    assert not actionlint.problems(FILES)


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_rights_are_few_and_no_text_gets_into_a_script(file):
    workflow = load(file.stem)
    writes = {k for k, v in workflow["permissions"].items() if v == "write"}
    assert writes == ({"pull-requests"} if file.stem == "pull-request-comment" else set())
    assert "pull_request_target" not in triggers(workflow)
    assert not any("permissions" in job for job in workflow["jobs"].values())
    for _, step in steps(workflow):
        assert "${{" not in step.get("run", ""), "an expression in a script: pass it through env"
        if step.get("uses", "").startswith("actions/checkout"):
            assert step["with"]["persist-credentials"] is False
        assert re.fullmatch(r"actions/[a-z-]+@v\d+", step.get("uses", "actions/x@v1"))
    if file.stem != "pull-request-comment":
        assert "secrets." not in file.read_text()
        assert "github.token" not in file.read_text()


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_limits_nest(file):
    for name, job in load(file.stem)["jobs"].items():
        limits = [step["timeout-minutes"] for step in job["steps"] if "timeout-minutes" in step]
        assert job["timeout-minutes"] > sum(limits), f"{name}: the job's limit would cut a step off"
        assert all("timeout-minutes" in step for step in job["steps"] if "ci/" in step.get("run", "")), name


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_commands_that_are_used_exist(file):
    text = "\n".join(step.get("run", "") for _, step in steps(load(file.stem)))
    for path in set(re.findall(r"(?<![\w./])(?:\$RUNNER_TEMP/base/)?(ci/[\w.]+)", text)):
        assert (ROOT / path).is_file(), path
        assert path.endswith(".py") or os.access(ROOT / path, os.X_OK), path
    for command in set(re.findall(r"\btiebench (\w+)", text)):
        assert re.search(rf'app\.command\("{command}"|\ndef {command}\(', (ROOT / "ci" / "cli.py").read_text()), command
    for option in set(re.findall(r"ci/nightly.*?(--[\w-]+)", text)):
        assert re.search(rf"\b{option[2:]}: Annotated", (ROOT / "ci" / "cli.py").read_text()), option


def test_the_night_runs_within_the_plans_budget():
    workflow = load("nightly")
    offered = triggers(workflow)["workflow_dispatch"]["inputs"]["plan"]
    assert set(offered["options"]) == set(plans.PLANS)
    assert offered["default"] == "nightly"
    longest = max(plan.budget_seconds for plan in plans.PLANS.values()) / 60
    assert named(workflow, "Run")["timeout-minutes"] >= longest + 15, "tiebench itself must be the first to give up"
    assert triggers(workflow)["schedule"]


def test_a_night_that_fails_still_leaves_its_results():
    workflow = load("nightly")
    run = named(workflow, "Run")
    assert "continue-on-error" not in run, "the exit code decides"
    assert run["run"].startswith("exec "), "a cancelled job signals one process only: it must be ours"
    order = [step.get("name") for _, step in steps(workflow)]
    for name in ("Report", "Keep the run directory"):
        assert named(workflow, name)["if"] == "always()"
        assert order.index(name) > order.index("Run")
    assert "GITHUB_STEP_SUMMARY" in named(workflow, "Report")["run"]
    assert "strategy.job-index" in named(workflow, "Keep the run directory")["with"]["name"], "names must differ"


def test_a_pull_request_is_compared_on_one_machine_and_gated():
    workflow = load("pull-request")
    job = workflow["jobs"]["compare"]
    names = [step.get("name") for step in job["steps"]]
    assert names.index("Run the base") < names.index("Run the head") < names.index("Compare")
    smoke = plans.PLANS["smoke"].budget_seconds / 60
    for name in ("Run the base", "Run the head"):
        step = named(workflow, name)
        assert step["continue-on-error"] is True, "the comparison decides"
        assert "--plan smoke" in step["run"]
        assert step["timeout-minutes"] >= smoke + 5
    compare = named(workflow, "Compare")
    assert compare["if"] == "always()"
    assert "continue-on-error" not in compare
    assert compare["run"].rstrip().endswith('exit "$code"')
    for step in job["steps"][names.index("Compare") + 1 :]:
        assert step["if"] == "always()"


def test_the_comment_comes_from_the_run_and_not_from_the_pull_requests_code():
    from ci import comment

    workflow = load("pull-request-comment")
    assert triggers(workflow)["workflow_run"]["workflows"] == [load("pull-request")["name"]]
    (checkout, post) = (step for _, step in steps(workflow))
    assert "ref" not in checkout["with"], "only the default branch's code may run here"
    assert post["run"] == "python3 ci/comment.py"
    left = named(load("pull-request"), "Leave the comparison for the comment")["with"]
    assert left["name"] == comment.ARTIFACT
    assert comment.FILE in named(load("pull-request"), "Compare")["run"]
