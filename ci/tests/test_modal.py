"""The Modal app: declarations through the client's own `info()`, bodies through `.local()`; no token, no network.

Modal itself is not here: what the service does with all this was not tested.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from ci import plans, records, schedule, shards
from ci.costs import Costs
from ci.exit_codes import USAGE
from ci.records import EVENTS, LogError, read_run
from ci.session import Flight, Session
from ci.shards import Night, Store
from ci.tests.conftest import ROOT, environment
from suites import expectations
from suites.cases import Case

SEEDS = [Case("handwritten", layers=1, tp=1, seed=seed) for seed in range(3)]
CASES = tuple(item.case for item in schedule.arrange(SEEDS, Costs()))  # in the order in which a budget has them run
RUN = "20260101T000000Z-test-1"
pytestmark = pytest.mark.filterwarnings("ignore:The .* function is executing locally:UserWarning")


@pytest.fixture(scope="module")
def modal_app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The app's module, with a client that knows no account."""
    empty = tmp_path_factory.mktemp("modal") / "modal.toml"
    empty.touch()
    with pytest.MonkeyPatch.context() as patch:
        for name in [n for n in os.environ if n.startswith("MODAL_")]:
            patch.delenv(name)
        patch.setenv("MODAL_CONFIG_PATH", str(empty))
        from ci import modal_app

        yield modal_app


def night(cases: tuple[Case, ...] = CASES, count: int = 1, **changes: Any) -> Night:
    row = records.RunRow(
        schema=records.SCHEMA,
        run_id=RUN,
        plan="test",
        cases=tuple(case.id for case in cases),
        target="deepspeed==0",
        budget_seconds=300.0,
        started_at=records.now(),
        tiebench="0",
        command="modal run",
    )
    given = {
        "run": row,
        "shards": count,
        "target": None,
        "seconds": 3600.0,
        "shard_budget": 300.0,
        "case_limit": 120.0,
        "startup_limit": 180.0,
        "device": "cpu",
    }
    return Night(**(given | changes))


@pytest.fixture
def store(tmp_path: Path, modal_app: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A directory in the place of the Volume, with counted commits, for bodies called through `.local()`."""
    commits: list[int] = []
    made = Store(tmp_path, lambda: commits.append(len(list(tmp_path.rglob(EVENTS)))))
    monkeypatch.setattr(modal_app, "store", lambda: made)
    object.__setattr__(made, "commits", commits)
    return made


@pytest.fixture
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Cases end at once, as told: a case's id -> an exception to raise instead."""

    def replace(raising: dict[str, BaseException] | None = None) -> list[str]:
        ran: list[str] = []

        def attempt(self: object, flight: Flight) -> dict[str, Any]:
            ran.append(flight.case.id)
            if raising and flight.case.id in raising:
                raise raising[flight.case.id]
            return {"status": "finished", "verdict": "exact", "wall_seconds": 0.1}

        monkeypatch.setattr(Session, "_attempt", attempt)
        monkeypatch.setattr(expectations, "entries", lambda: ())  # what ends at once is never as known
        return ran

    return replace


def statuses(directory: Path) -> list[str]:
    return [r.status for r in read_run(directory).records]


# Declarations


def test_the_shard_declares_gpus_limits_retries_and_volume(modal_app):
    config = modal_app.CONFIG
    info = modal_app.run_shard.info()
    assert info.gpus == [("H100", 4)]
    assert config.gpu == "H100:4"
    assert (info.timeout, info.startup_timeout, info.max_retries) == (3600, 1200, 2)
    assert {path: v.name for path, v in info.volumes.items()} == {modal_app.MOUNT: "tiebench-runs"}
    assert not any(v.read_only for v in info.volumes.values())
    assert info.single_use_containers
    assert not info.nonpreemptible, "Modal refuses that for GPUs"
    assert (info.cpu, info.memory_mib) == (8.0, 32 * 1024)


def test_the_others_declare_schedules_and_need_no_gpu(modal_app):
    assert modal_app.nightly.info().schedule == "Cron('17 2 * * *', UTC)"
    assert modal_app.collect_rest.info().schedule == "Cron('17 14 * * *', UTC)"
    assert modal_app.run_plan.info().schedule is None
    for function in (modal_app.nightly, modal_app.run_plan, modal_app.collect, modal_app.collect_rest):
        info = function.info()
        assert not info.gpus
        assert list(info.volumes) == [modal_app.MOUNT]


def test_the_cases_of_a_night_get_their_gpus_but_for_the_few_of_eight_ranks(modal_app):
    (_, count), *_ = modal_app.run_shard.info().gpus
    cases = plans.PLANS[modal_app.CONFIG.plan].cases
    larger = [case for case in cases if case.world_size > count]  # on the container's CPU
    assert {case.world_size for case in larger} <= {8}
    assert len(larger) < 0.03 * len(cases)


def test_limits_nest_as_declared(modal_app):
    config = modal_app.CONFIG
    shard, whole = modal_app.run_shard.info(), modal_app.nightly.info()
    assert config.case_limit < config.shard_budget < shard.timeout < whole.timeout < 24 * 3600
    assert (shard.max_retries + 1) * (shard.timeout + shard.startup_timeout) < whole.timeout
    night_begins, rest = (int(c.split()[1]) * 3600 for c in (config.cron, config.collect_cron))
    assert rest - night_begins > whole.timeout, "the second collector would come while a night may still run"


def test_the_image_gets_every_pin_once_and_the_rooms(modal_app, tmp_path, monkeypatch):
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    class Recorder:
        def __getattr__(self, name: str) -> Callable[..., Recorder]:
            def call(*args: Any, **kwargs: Any) -> Recorder:
                calls.append((name, args, kwargs))
                return self

            return call

    monkeypatch.setattr(modal_app.modal.Image, "debian_slim", lambda python_version: Recorder())
    modal_app.build_image(modal_app.CONFIG)
    local = {args[1]: Path(args[0]) for name, args, _ in calls if name.startswith("add_local")}
    assert local["/tiebench/requirements.txt"] == ROOT / "requirements.txt"
    assert {local[f"/root/{room}"] for room in ("suites", "ci", "reports")} <= set(ROOT.iterdir())
    assert all(path.exists() for path in local.values())
    (ignored,) = {tuple(kwargs["ignore"]) for name, _, kwargs in calls if name == "add_local_dir"}
    ignores = modal_app.modal.FilePatternMatcher(*ignored)
    assert not ignores(Path("templates/report.html")), "a report cannot be made without its templates"
    assert ignores(Path("paths/__pycache__/x.pyc"))
    (environment_,) = (args[0] for name, args, _ in calls if name == "env")
    assert environment_["DS_BUILD_OPS"] == "0"
    assert [name for name, _, _ in calls].index("env") < [name for name, _, _ in calls].index("add_local_dir")

    (commands,) = (args for name, args, _ in calls if name == "run_commands")
    installed = _installed_by(commands, tmp_path)
    pins = re.findall(r"^([a-z0-9-]+)==\S+", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    names = [name for step in installed for name in step]
    assert sorted(names) == sorted(pins), "a pin is installed twice, or not at all"
    assert installed[1] == ["torch"]
    assert installed[-1] == ["deepspeed"]


def _installed_by(commands: tuple[str, ...], home: Path) -> list[list[str]]:
    """Run the image's commands with a `python` that only notes what pip would have installed: names per step."""
    (home / "python").write_text(
        f'#!/bin/sh\nprintf "%s " "$@" >> {home}/calls\nprintf "\\n" >> {home}/calls\n', encoding="utf-8"
    )
    (home / "python").chmod(0o755)
    (home / "requirements.txt").write_bytes((ROOT / "requirements.txt").read_bytes())
    path = f"{home}:{os.environ['PATH']}"
    for command in commands:
        here = command.replace("/tiebench/", f"{home}/")
        subprocess.run(["sh", "-c", here], env={"PATH": path}, check=True, timeout=30)
    steps = []
    for line in (home / "calls").read_text().splitlines():
        words = line.split()
        if "install" not in words:
            continue
        assert not {"--index-url", "--extra-index-url", "--find-links"} & set(words), "CUDA torch is the default one"
        assert "--no-deps" in words or "torch" in words or any(w.startswith("pip==") for w in words)
        files = [words[i + 1] for i, word in enumerate(words) if word == "-r"]
        text = [line for f in files for line in Path(f).read_text().splitlines()]
        found = [w for w in [*words, *text] if re.match(r"[a-z0-9-]+==", w) or w == "torch"]
        steps.append([re.split("==", w)[0] for w in found])
    return steps


def test_a_container_looks_for_no_files_of_the_deploying_machine(modal_app, monkeypatch):
    monkeypatch.setattr(modal_app.modal, "is_local", lambda: False)
    monkeypatch.setattr(modal_app, "_SOURCE", Path("/nowhere"))
    modal_app.build_image(modal_app.CONFIG)
    assert modal_app.store().root == Path(modal_app.MOUNT)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gpu": "H300"}, "unknown kind 'H300'"),
        ({"gpu": "H100:9"}, "1 to 8"),
        ({"gpu": "A10:8"}, "1 to 4"),
        ({"gpu": "H100:0"}, "1 to 8"),
        ({"gpu": "H100:"}, "1 to 8"),
        ({"gpu": "h100:2"}, "unknown kind"),
        ({"night_timeout": 90000}, "night_timeout is 90000 s"),
        ({"attempt_timeout": 90000}, "at most night_timeout"),
        ({"attempt_timeout": 2500}, "at most attempt_timeout"),
        ({"shard_budget": 100.0}, "at most shard_budget"),
        ({"case_limit": 0.0}, "more than 0"),
        ({"retries": 11}, "0 to 10"),
        ({"cron": "bogus"}, "five fields"),
        ({"cron": "61 2 * * *"}, "'61' is no minute"),
        ({"cron": "0 2 * * fun"}, "'fun' is no day of the week"),
        ({"cron": "0 5-2 * * *"}, "'5-2' is no hour"),
        ({"cron": "*/0 * * * *"}, "is no minute"),
        ({"collect_cron": "0 0 0 * *"}, "is no day of the month"),
        ({"plan": "weekly"}, "unknown plan 'weekly'"),
        ({"shards": 0}, "0 shards"),
    ],
)
def test_nonsense_is_refused_in_one_line(modal_app, changes, said):
    with pytest.raises(modal_app.ConfigError) as caught:
        modal_app.Config(**changes)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("cron", ["0 4 * * *", "*/15 0-6/2 1,15 jan-mar mon-fri", "5 4 * * 7"])
def test_good_schedules_pass(modal_app, cron):
    modal_app.check_cron(cron)


def test_the_entrypoint_refuses_before_it_asks_for_anything(modal_app, capsys):
    for wrong in ({"gpu": "H300"}, {"plan": "weekly"}, {"shards": 999}):
        with pytest.raises(SystemExit) as caught:
            modal_app.main(**wrong)
        assert caught.value.code == USAGE
        error = capsys.readouterr().err
        assert error.startswith("tiebench: ")
        assert error.count("\n") == 1


# Bodies


def test_a_killed_shard_goes_on_where_it_was(modal_app, store, tmp_path):
    """Real ranks: attempt 1 is killed while its second case runs; attempt 2 runs the rest only.

    Attempt 1 has the files that a container has, and no others.
    """
    container = tmp_path / "container"
    for room in modal_app.ROOMS:
        left_out = shutil.ignore_patterns(*(pattern.removeprefix("**/") for pattern in modal_app.LEFT_OUT))
        shutil.copytree(ROOT / room, container / room, ignore=left_out)
    shutil.copy(ROOT / "ci" / "modal_app.py", container)
    shards.begin(store, RUN, night())
    child = subprocess.run(
        [sys.executable, "-c", _KILLED, RUN],
        env=environment()
        | {
            "PYTHONPATH": str(container),
            "TIEBENCH_RUNS": str(tmp_path),
            "MODAL_CONFIG_PATH": os.environ["MODAL_CONFIG_PATH"],
        },
        cwd=container,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert child.returncode == -signal.SIGKILL, child.stdout + child.stderr
    (first,) = (tmp_path / RUN / "shard-1-of-1").iterdir()
    assert statuses(first) == ["finished", "lost", "not_run"]
    before = modal_app.collect.local(RUN)
    assert before[0] == 1
    assert statuses(tmp_path / RUN / "report-01") == ["finished", "lost", "not_run"]

    store.commits.clear()
    numbers = modal_app.run_shard.local(1, RUN)
    assert numbers == {"shard": 1, "cases": 3, "done_before": 1, "ran": 2}
    assert len(store.commits) >= 2, "each attempt commits at least at its end"
    attempts = sorted((tmp_path / RUN / "shard-1-of-1").iterdir())
    ran = [[r.case for r in read_run(a).records] for a in attempts]
    assert ran == [[c.id for c in CASES], [CASES[2].id], [CASES[1].id]], "what was lost comes last"
    assert modal_app.run_shard.local(1, RUN)["ran"] == 0, "nothing is left to do"

    code, text = modal_app.collect.local(RUN)
    assert code == 0, text
    assert "GREEN" in text
    assert modal_app.UNTRIED in text
    report = tmp_path / RUN / "report-02"
    assert (report / "report.html").exists()
    assert (report / records.ENVIRONMENT).exists()
    assert [(r.case, r.attempt) for r in read_run(report).records] == list(
        zip([c.id for c in CASES], (1, 2, 1), strict=True)
    )


_KILLED = """
import os, signal, sys
import modal_app
from ci import records
assert records.__file__.startswith(os.getcwd()), records.__file__
written = records.RecordLog.append
seen = []
def append(self, row):
    written(self, row)
    seen.append(type(row))
    if seen.count(records.StartedRow) == 2 and seen.count(records.FinalRow) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
records.RecordLog.append = append
modal_app.run_shard.local(1, sys.argv[1])
"""


def test_a_cancelled_input_leaves_its_rows_committed(modal_app, store, no_ranks, tmp_path):
    from modal.exception import InputCancellation

    shards.begin(store, RUN, night())
    no_ranks({CASES[1].id: InputCancellation("cancelled")})
    with pytest.raises(InputCancellation):
        modal_app.run_shard.local(1, RUN)
    assert store.commits[-1] == 1
    (attempt,) = (tmp_path / RUN / "shard-1-of-1").iterdir()
    assert statuses(attempt) == ["finished", "lost", "not_run"]


def test_an_interrupted_shard_is_an_error_so_that_it_is_run_again(modal_app, store, no_ranks):
    shards.begin(store, RUN, night())
    no_ranks({CASES[1].id: KeyboardInterrupt()})
    with pytest.raises(shards.ShardInterrupted, match="after 2 of 3 cases"):
        modal_app.run_shard.local(1, RUN)
    ran = no_ranks()
    assert modal_app.run_shard.local(1, RUN)["ran"] == 2
    assert ran == [CASES[2].id, CASES[1].id]


def test_a_failing_commit_costs_nothing_and_rows_are_committed_as_they_come(no_ranks, tmp_path):
    seen: list[int] = []

    def commit() -> None:
        seen.append(sum(len(p.read_text().splitlines()) for p in tmp_path.rglob(EVENTS)))
        if len(seen) % 2:
            raise RuntimeError("volume busy")

    shards.begin(Store(tmp_path), RUN, night())
    said: list[str] = []
    ran = no_ranks()
    slow = Session.settle

    def settle(self: Session, flight: Flight) -> records.Record:
        record = slow(self, flight)
        deadline = time.monotonic() + 60
        while not seen or seen[-1] < 1 + 2 * len(ran):  # run row, then two rows a case
            assert time.monotonic() < deadline, f"row of {flight.case.id} was not committed while the shard ran: {seen}"
            time.sleep(0.01)
        return record

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "settle", settle)
        patch.setattr(Session, "overlaps", lambda self, case: False)
        shards.run_shard(Store(tmp_path, commit), RUN, 1, commit_seconds=0.01, say=said.append)
    assert len(ran) == 3
    assert seen[-1] == 8, "the last commit has the end row"
    assert any("commit failed, going on: RuntimeError: volume busy" in line for line in said)


# The night as a whole


def test_a_shard_that_left_nothing_is_not_run_and_not_green(modal_app, store, no_ranks, tmp_path):
    shards.begin(store, RUN, night(count=2))
    no_ranks()
    modal_app.run_shard.local(1, RUN)
    code, text = modal_app.collect.local(RUN)
    assert code == 1
    assert "INCOMPLETE" in text
    assert "shard-2-of-2 left nothing" in text
    run = read_run(tmp_path / RUN / "report-01")
    assert sorted(r.status for r in run.records) == ["finished", "finished", "not_run"]
    assert "left nothing" in run.end.message
    assert "shard-2-of-2 left nothing" in (tmp_path / RUN / "report-01" / "report.md").read_text()


class Here:
    """Stands for a Function handle: runs the body here, as `map` and `remote` would there."""

    def __init__(self, function: Any, lost: tuple[int, ...] = ()):
        self.function, self.lost, self.gpu = function, lost, None

    def with_options(self, gpu: str) -> Here:
        self.gpu = gpu
        return self

    def map(self, indices: range, *, kwargs: dict[str, str], return_exceptions: bool) -> Iterator[object]:
        assert return_exceptions
        for index in indices:
            yield RuntimeError("container lost") if index in self.lost else self.function.local(index, **kwargs)

    def remote(self, *args: Any) -> Any:
        return self.function.local(*args)


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(("lost", "code"), [((), 0), ((2,), 1), ((1, 2), 1)])
def test_a_night_collects_whatever_became_of_its_shards(modal_app, no_ranks, monkeypatch, lost, code):
    monkeypatch.setattr(modal_app, "run_shard", attempt := Here(modal_app.run_shard, lost))
    monkeypatch.setattr(modal_app, "collect", Here(modal_app.collect))
    no_ranks()
    found, text = modal_app.run_plan.local("smoke", "L4:2", 2, "")
    assert found == code, text
    assert attempt.gpu == "L4:2"
    if code:
        with pytest.raises(modal_app.NotGreen, match=r"not as expected|INCOMPLETE"):
            modal_app.nightly.local()
    else:
        assert modal_app.nightly.local() is None


def test_a_preempted_night_goes_on_under_its_name(modal_app, store, monkeypatch):
    monkeypatch.setattr(modal_app.modal, "current_function_call_id", lambda: "fc-01ABCDEFGH")
    first = modal_app.night_id(store, "smoke")
    assert first.endswith("-smoke-fc01ABCDEFGH")
    shards.begin(store, first, modal_app.plan_night(first, "smoke", "H100:2", 2, ""))
    monkeypatch.setattr(modal_app, "datetime", None)  # the clock is not asked again
    assert modal_app.night_id(store, "smoke") == first
    begun = shards.read_night(store.run(first))
    shards.begin(store, first, night())
    assert shards.read_night(store.run(first)) == begun, "the shards may be at work on the first plan"


def test_nights_whose_end_was_killed_are_collected_later(modal_app, store, no_ranks, tmp_path):
    old = night()
    started = (datetime.now(timezone.utc) - timedelta(seconds=old.seconds + 60)).isoformat()
    old = msgspec.structs.replace(old, run=msgspec.structs.replace(old.run, started_at=started))
    shards.begin(store, "old", old)
    shards.begin(store, "running", night())
    shards.begin(store, "broken", old)
    (tmp_path / "broken" / shards.NIGHT).write_text("{")
    no_ranks()
    modal_app.run_shard.local(1, "old")
    with pytest.raises(modal_app.NotGreen) as caught:
        modal_app.collect_rest.local()
    assert "broken: " in str(caught.value)
    assert "GREEN" in str(caught.value)
    assert not (tmp_path / "running" / "report-01").exists()
    assert shards.uncollected(store) == ["broken"]


def test_names_and_missing_nights_are_refused(store):
    with pytest.raises(LogError, match=r"run id '\.\./x'"):
        shards.collect(store, "../x")
    with pytest.raises(LogError, match="holds no night"):
        shards.collect(store, "none")


def test_only_the_app_imports_modal():
    importing = re.compile(r"^\s*(import|from) modal\b", re.MULTILINE)
    files = [f for room in ("ci", "suites", "reports", "benchmarks") for f in (ROOT / room).rglob("*.py")]
    found = {str(f.relative_to(ROOT)) for f in files if importing.search(f.read_text()) and "tests" not in f.parts}
    assert found == {"ci/modal_app.py"}
