"""What earlier runs say, from real run directories: also from killed, damaged, foreign and hostile ones."""

from __future__ import annotations

import json
import os
import time

import msgspec
import pytest

from ci import history, records
from ci.history import SUMMARY, read
from ci.pieces import PIECES
from ci.records import EVENTS
from ci.supervisor import resume, run
from ci.tests.earlier import HERE, environment, write_run
from suites.cases import Case

A = Case("handwritten")
B = Case("handwritten", head="row")
C = Case("deepspeed")
ALONE = Case("handwritten", layers=1, tp=1)


def test_a_real_run_is_read_back(tmp_path):
    before = time.time()
    run([ALONE, ALONE.but(seed=1)], tmp_path / "runs" / "one", plan="mine", budget=120)
    found = read(tmp_path / "runs", history.machine_here("cpu"))
    assert found.notes == ()
    assert len(found.here) == 1, "environment.json names the class of machine that is seen here without torch"
    summary = found.here[0]
    assert summary.plan == "mine"
    assert summary.complete
    assert before - 1 <= summary.began.timestamp() <= time.time()
    assert {line.case for line in summary.cases} == {ALONE.id, ALONE.but(seed=1).id}
    first, second = summary.cases
    assert first.green
    assert first.ranks > 0
    assert first.judge is not None
    assert summary.wall_seconds >= first.startup + first.ranks
    assert first.startup > 0
    assert second.startup == 0, "its ranks were up"
    assert set(found.times) == {ALONE.id, ALONE.but(seed=1).id}


def test_what_became_of_a_case(tmp_path):
    write_run(tmp_path / "1", {A: "rounding", B: "bug", C: "rounding"}, days=1)
    write_run(tmp_path / "2", {A: "bug", B: "lost", C: "never"}, days=2, end=None)
    past = read(tmp_path, HERE).past()
    assert (past[A.id].last.verdict, past[A.id].before.green) == ("bug", True)
    assert (past[B.id].last.status, past[B.id].before.verdict) == ("lost", "bug")
    assert past[C.id].last.status == "not_run"
    killed = read(tmp_path, HERE).runs[-1]
    assert not killed.complete
    assert killed.wall_seconds > 0


def test_runs_of_the_same_build_go_first(tmp_path):
    write_run(tmp_path / "1", {A: "rounding"}, days=1, target="torch==2.13.0")
    write_run(tmp_path / "2", {A: "bug"}, days=2, target="torch==2.12.0")
    found = read(tmp_path, HERE)
    assert found.past({"handwritten": "torch==2.13.0"})[A.id].last.green
    assert not found.past({"handwritten": "torch==2.14.0"})[A.id].last.green, "no run of it: the newest counts"


def test_only_unmodified_runs_and_times_of_this_kind_of_machine(tmp_path):
    write_run(tmp_path / "fault", {A: "bug"}, fault="dropped_copy")
    write_run(tmp_path / "gpu", {A: "rounding", B: "bug"}, where=environment("cuda"))
    write_run(tmp_path / "cores", {A: "rounding"}, where=environment(cores=64))
    (tmp_path / "cores" / records.ENVIRONMENT).write_text("[" * 10000)
    found = read(tmp_path, HERE)
    assert len(found.runs) == 2
    assert found.here == ()
    assert found.times == {}
    assert found.past()[B.id].last.verdict == "bug", "a failure tells on any machine"
    write_run(tmp_path / "here", {A: "rounding", B: "crash"}, days=1)
    assert list(read(tmp_path, HERE).times) == [A.id], "what crashed does not tell how long it takes"


def test_a_time_counts_once_where_a_merged_run_repeats_it(tmp_path):
    write_run(tmp_path / "shard", {A: "rounding"})
    write_run(tmp_path / "merged", {A: "rounding", B: "rounding"})
    assert len(read(tmp_path, HERE).times[A.id]) == 1


def test_the_new_runs_own_directory_does_not_count_and_the_newest_do(tmp_path):
    for number in range(6):
        directory = write_run(tmp_path / f"{number}", {A: "rounding"}, days=number)
        os.utime(directory / EVENTS, (number + 1, number + 1))
    assert len(read(tmp_path, HERE).runs) == 6
    found = read(tmp_path, HERE, but=tmp_path / "5", newest=2)
    assert [summary.began.day for summary in found.runs] == [4, 5]
    assert read(tmp_path / "none", HERE).runs == ()


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[" * 50000, b'{"version":1}', b"null", b'{"version":1e400}'],
)
def test_a_damaged_cache_heals(tmp_path, content):
    directory = write_run(tmp_path / "1", {A: "rounding", B: "bug"})
    first = read(tmp_path, HERE)
    kept = (directory / SUMMARY).read_bytes()
    (directory / SUMMARY).write_bytes(content)
    assert read(tmp_path, HERE).runs == first.runs
    assert (directory / SUMMARY).read_bytes() == kept


def test_a_cache_is_used_and_goes_stale(tmp_path):
    directory = write_run(tmp_path / "1", {A: "rounding", B: "never"}, end=None)
    read(tmp_path, HERE)
    told = json.loads((directory / SUMMARY).read_text())
    told["plan"] = "from the cache"
    (directory / SUMMARY).write_text(json.dumps(told))
    assert read(tmp_path, HERE).runs[0].plan == "from the cache"
    for change in ({"size": told["size"] + 1}, {"mtime_ns": told["mtime_ns"] + 1}, {"version": 0}):
        (directory / SUMMARY).write_text(json.dumps({**told, **change}))
        assert read(tmp_path, HERE).runs[0].plan == "pr", change
    for case in ("../../etc/passwd", "handwritten", "x:" + "a=b," * 400 + "a=b"):
        forged = {**told, "cases": [{**told["cases"][0], "case": case}]}
        (directory / SUMMARY).write_text(json.dumps(forged))
        assert read(tmp_path, HERE).runs[0].plan == "pr", case
    forged = {**told, "cases": [{**told["cases"][0], "ranks": 1e300}]}
    (directory / SUMMARY).write_text(json.dumps(forged))
    assert read(tmp_path, HERE).runs[0].plan == "pr"
    with open(directory / EVENTS, "ab") as stream:  # the run goes on
        stream.write(b'{"event":"end","ended_at":"2026-03-01T00:01:00+00:00","reason":"budget","exit_code":1}\n')
    assert read(tmp_path, HERE).runs[0].end == "budget"


def test_hostile_directories_are_named_and_cost_nothing(tmp_path):
    write_run(tmp_path / "good", {A: "rounding"})
    (tmp_path / "a file").write_text("")
    (tmp_path / "empty").mkdir()
    for name in ("fifo", "folder", "torn", "loop", "big", "clock"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "fifo" / EVENTS)
    (tmp_path / "folder" / EVENTS).mkdir()
    (tmp_path / "torn" / EVENTS).write_bytes(b'{"event":"run","sch')
    (tmp_path / "loop" / EVENTS).symlink_to(EVENTS)
    with open(tmp_path / "big" / EVENTS, "wb") as stream:
        stream.truncate(history.LARGEST + 1)
    row = (tmp_path / "good" / EVENTS).read_bytes().replace(b"2026-03-01T00:00:00+00:00", b"yesterday")
    (tmp_path / "clock" / EVENTS).write_bytes(row)
    os.mkfifo(tmp_path / "good" / SUMMARY)  # must not be waited for
    found = read(tmp_path, HERE)
    assert [summary.plan for summary in found.runs] == ["pr"]
    text = "\n".join(found.notes)
    for name in ("fifo", "folder", "torn", "loop", "big", "clock"):
        assert f"/{name}" in text, text
    assert len(found.notes) == 6
    assert all("\n" not in note for note in found.notes)


def test_foreign_case_ids_are_left_out(tmp_path):
    directory = write_run(tmp_path / "1", {A: "rounding"})
    data = (directory / EVENTS).read_bytes()
    row = json.loads(data.splitlines()[0])
    row["cases"] += ["\x1b[31mred", "handwritten:" + "a=" + "b" * 2000, "handwritten:no=such,factor=1"]
    (directory / EVENTS).write_bytes(b"\n".join([msgspec.json.encode(row), *data.splitlines()[1:]]) + b"\n")
    found = read(tmp_path, HERE)
    assert [line.case for line in found.runs[0].cases] == [A.id, "handwritten:no=such,factor=1"]


def test_a_directory_that_cannot_be_written_is_read_all_the_same(tmp_path, monkeypatch):
    write_run(tmp_path / "1", {A: "rounding"})

    def full(path, data):
        raise records.LogError("no space")

    monkeypatch.setattr(records, "write_whole", full)
    assert len(read(tmp_path, HERE).runs) == 1
    assert not (tmp_path / "1" / SUMMARY).exists()


def test_a_merged_run_tells_of_cases_and_not_how_long_a_plan_takes(tmp_path):
    write_run(tmp_path / "merged", {A: "rounding", B: "bug"}, days=1)
    (tmp_path / "merged" / PIECES).write_text("{}")
    found = read(tmp_path, HERE)
    assert found.runs[0].wall_seconds is None
    assert found.past()[B.id].last.verdict == "bug"


def test_the_pause_before_a_resumed_run_goes_on_and_what_came_before_it_do_not_count(tmp_path):
    run([ALONE], tmp_path / "runs" / "one", budget=0.0)
    time.sleep(2.0)
    whole = resume(tmp_path / "runs" / "one", budget=100.0, spent=50.0)
    assert whole.end.reason == "complete"
    (summary,) = read(tmp_path / "runs", HERE).runs
    assert summary.wall_seconds == pytest.approx(whole.seconds - 50.0)
    assert 0 < summary.wall_seconds < (summary_end(whole) - summary.began).total_seconds() - 1.5


def summary_end(whole):
    return history.instant(whole.end.ended_at)
