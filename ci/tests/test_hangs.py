"""Hangs, deaths and leftovers: named from outside real processes."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ci import hangs, stacks
from ci.hangs import Activity, Deaths, Where
from ci.stacks import Frame, Stack, Thread
from ci.tests import misbehave_seeds as seeds
from ci.tests.conftest import wait_until
from suites import collectives
from suites.cases import Case
from suites.collectives import Collective

# ---- real ranks


def _rank(rank, world, folder, seed):
    """What `ci.worker` does around a case."""
    os.setsid()
    faulthandler.disable()  # pytest's own would fill the output when gloo ends the process
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    recorder = collectives.install(folder / f"rank{rank}.collectives")
    from ci.tests import misbehave  # noqa: F401
    from suites import train

    recorder.begin()
    try:
        train.run_rank(Case("handwritten", layers=1, seed=seed), torch.device("cpu"), recorder.note)
        (folder / f"answer{rank}").write_text("has finished")
    except Exception as error:  # noqa: BLE001
        (folder / f"answer{rank}").write_text(f"has failed with {error}")
    time.sleep(1000)


class Ranks:
    """Two ranks that run one misbehaving case."""

    def __init__(self, folder: Path, seed: int):
        self.folder = folder
        context = mp.get_context("fork")
        self.processes = [context.Process(target=_rank, args=(r, 2, folder, seed), daemon=True) for r in range(2)]
        for process in self.processes:
            process.start()

    def recorder(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.collectives"

    def look(self) -> hangs.Hang:
        where = {}
        for rank, process in enumerate(self.processes):
            answer = self.folder / f"answer{rank}"
            place = answer.read_text() if answer.exists() else "is in 'step 2 update'"
            where[rank] = Where(process.pid, place, answer.exists(), self.recorder(rank))
        return hangs.look(where)

    def until(self, cause: str, text: str = "") -> hangs.Hang:
        """Look until the ranks have come to where they hang (how long that takes says nothing), and once more."""

        def there(hang: hangs.Hang) -> bool:
            return hang.cause == cause and text in hang.sentence

        deadline = time.monotonic() + 60
        while not there(self.look()) and time.monotonic() < deadline:
            time.sleep(0.2)
        hang = self.look()
        assert there(hang), f"{hang.cause}: {hang.sentence}\n{hang.table()}\n{hang.stacks}"
        return hang

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@pytest.fixture(scope="module")
def _imported() -> None:
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # imports for seconds, here once instead of in every rank


@pytest.fixture
def ranks(_imported, tmp_path: Path) -> Iterator[Callable[[int], Ranks]]:
    started: list[Ranks] = []

    def start(seed: int) -> Ranks:
        started.append(Ranks(tmp_path, seed))
        return started[-1]

    yield start
    for one in started:
        one.kill()


WAITS = (
    "rank 1 never issued all_reduce #26 of 1 float32 (sum) over ranks 0, 1, which rank 0 waits in, in 'step 2 update'"
)


@pytest.mark.skipif(stacks.find() is None, reason="py-spy is not installed")
@pytest.mark.parametrize(
    ("seed", "cause", "text"),
    [
        (seeds.STOPS, "stopped", "rank 1 is stopped (by a signal such as SIGSTOP, or a debugger) in stops (misbehave"),
        (seeds.PYTHON_LOOP, "endless Python", "of a core in python_loop (misbehave"),
        (seeds.C_LOOP, "endless native", "with the interpreter lock held: "),
        (seeds.FREE_C_LOOP, "endless native", "without the interpreter lock: "),
        (seeds.DEADLOCK, "lock", "so does its thread other in takes_one (misbehave"),
        (seeds.HANG, "sleep", "rank 1 sleeps in stuck_here (misbehave"),
    ],
)
def test_what_a_rank_does_that_others_wait_for(ranks, seed, cause, text):
    both = ranks(seed)
    hang = both.until(cause, text)
    assert hang.sentence.startswith("rank 1 "), hang.sentence
    assert WAITS in hang.sentence
    assert hang.activities[0].doing == "collective"
    assert "misbehave.py" in hang.stacks[1]
    assert "all_reduce" in hang.stacks[0]
    assert hang.first_difference is not None
    assert hang.first_difference.missing == (1,)
    stopped = psutil.Process(both.processes[1].pid).status() == psutil.STATUS_STOPPED
    assert stopped == (seed == seeds.STOPS), "looking at a process must leave it as it was"


def test_a_collective_that_one_rank_left_out_at_the_end(ranks):
    hang = ranks(seeds.SKIPS).until("collective left out")
    assert hang.sentence == (
        "rank 1 never issued all_reduce #39 of 1 float32 (sum) over ranks 0, 1, which rank 0 waits in, in "
        "'step 3 update'; rank 1 has finished"
    )
    assert "step 3 update: waits   <- first difference" in hang.table()
    assert sorted(hang.collectives) == [0, 1]


def test_two_collectives_in_another_order(ranks):
    hang = ranks(seeds.SWAPS).until("different order")
    assert hang.sentence == (
        "rank 0: all_reduce #1 of 2144 float32 (sum); rank 1: all_gather #1 of 2144 float32; over ranks 0, 1, in "
        "'step 2 update'; the same two calls come in another order"
    )


def test_two_kinds_of_collectives(ranks):
    hang = ranks(seeds.KINDS).until("different collectives")
    assert hang.sentence == (
        "rank 0: all_reduce #1 of 2144 float32 (sum); rank 1: all_gather #1 of 2144 float32; over ranks 0, 1, in "
        "'step 2 update'"
    )


@pytest.mark.parametrize(
    ("seed", "how", "text"),
    [
        (seeds.SIZES, "sizes", "rank 0: all_reduce #1 of 2144 float32 (sum); rank 1: all_reduce #1 of 2145 float32"),
        (seeds.SKIPS_ONE, "left out", "rank 1 issued all_reduce of 1024 float32 (sum) after the same calls before"),
    ],
)
def test_what_gloo_ends_the_process_for_is_told_from_the_recorders_of_the_dead(ranks, seed, how, text):
    both = ranks(seed)
    wait_until(lambda: any(p.exitcode is not None for p in both.processes), "the end of a rank", 60.0)
    differences = hangs.compare({rank: collectives.read(both.recorder(rank)) for rank in range(2)})
    assert [d.how for d in differences] == [how]
    assert text in differences[0].sentence


# ---- comparing


def row(number: int, kind: str = "all_reduce", elements: int = 8, **other: object) -> Collective:
    given = {
        "index": number, "case": 1, "phase": "step 1 update", "number": number, "kind": kind, "elements": elements,
        "dtype": "float32", "op": "sum" if "reduce" in kind else "", "group": "0", "ranks": (0, 1), "size": 2,
        "peer": -1, "seconds": float(number), "state": "done",
    }  # fmt: skip
    return Collective(**{**given, **other})  # type: ignore[arg-type]


def rows(*sizes: int, **other: object) -> tuple[Collective, ...]:
    return tuple(row(n, elements=size, **other) for n, size in enumerate(sizes, 1))


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (rows(1, 2, 3), rows(1, 2, 3), None),
        (rows(1, 2, 3, 4), rows(1, 3, 4), (2, "left out", 1)),
        (rows(1, 3, 4), rows(1, 2, 3, 4), (2, "left out", 0)),
        (rows(1, 2, 3), rows(1, 3, 2), (2, "order", None)),
        (rows(1, 2), rows(1, 5), (2, "sizes", None)),
        (rows(1, 2, 3), rows(1, 2), (3, "", None)),
        (rows(1, 2), (), (1, "", None)),
        ((), (), None),
        (rows(1, 2, kind="all_to_all"), rows(3, 4, kind="all_to_all"), None),
        (rows(2)[:1], (replace(rows(2)[0], dtype="bfloat16"),), (1, "", None)),
        # an all_reduce that came before the others in two steps, and in the third on rank 0 only
        (rows(7, 5, 6, 7, 5, 6, 7, 5), rows(7, 5, 6, 7, 5, 6, 7, 6), (8, "left out", 1)),
    ],
)
def test_first_difference(one, other, expected):
    found = hangs.compare({0: one, 1: other})
    assert [(d.number, d.how, d.left_out) for d in found] == ([expected] if expected else [])


def test_the_odd_one_out_of_four():
    four = {"ranks": (0, 1, 2, 3), "size": 4}
    recorded = {rank: rows(5, 6, **four) for rank in range(4)}
    recorded[2] = (*rows(5, **four), row(2, "all_gather", 6, **four))
    (found,) = hangs.compare(recorded)
    assert found.sentence == (
        "ranks 0, 1, 3: all_reduce #2 of 6 float32 (sum); rank 2: all_gather #2 of 6 float32; over ranks 0, 1, 2, 3, "
        "in 'step 1 update'"
    )
    del recorded[2]  # out of reach, on another machine: nothing can be said of it
    assert hangs.compare(recorded) == ()


def test_groups_are_compared_one_by_one_and_only_in_the_last_case():
    before = rows(1, 2, 3, case=1)
    pair, other = {"group": "3", "case": 2}, {"group": "4", "ranks": (2, 3), "case": 2}
    recorded = {0: (*before, *rows(4, **pair)), 1: (*rows(4, **pair), *before), 2: rows(9, **other), 3: ()}
    (found,) = hangs.compare(recorded)
    assert (found.missing, found.call.elements) == ((3,), 9)


def test_what_fell_out_of_the_ring_is_not_missing():
    assert hangs.compare({0: rows(1, 2, 3), 1: rows(1, 2, 3)[1:]}) == ()


def test_calls_of_the_same_size_are_told_apart_by_their_phase():
    late = {"phase": "step 2 update"}
    one = (*rows(1, 1, 1), row(4, elements=1, **late), row(5, elements=1, **late))
    other = (*rows(1, 1), row(3, elements=1, **late), row(4, elements=1, **late))
    (found,) = hangs.compare({0: one, 1: other})
    assert found.missing == (1,)
    assert found.sentence.endswith(
        "; already #3 was issued at different places: rank 0 in 'step 1 update', rank 1 in 'step 2 update'"
    )


def where(tmp_path: Path, *answered: int) -> dict[int, Where]:
    return {
        rank: Where(None, "has finished" if rank in answered else "is in 'build'", rank in answered, tmp_path / "none")
        for rank in range(2)
    }


def test_ranks_that_wait_for_each_other_over_two_groups(tmp_path):
    a, b = row(1, state="waits", group="1"), row(1, "broadcast", state="waits", group="2", peer=0)
    doing = {rank: Activity("collective", "waits") for rank in range(2)}
    hang = hangs.name(where(tmp_path), doing, {0: (a,), 1: (b,)}, {})
    assert hang.cause == "different collectives"
    assert (
        "rank 1 never issued all_reduce #1 of 8 float32 (sum) over ranks 0, 1, which rank 0 waits in" in hang.sentence
    )
    assert (
        "rank 0 never issued broadcast #1 of 8 float32 from rank 0 over ranks 0, 1, which rank 1 waits" in hang.sentence
    )
    assert hang.sentence.endswith("they wait for each other: one was left out, or the order differs")


def test_a_message_that_nobody_sent(tmp_path):
    receives = [row(n, "recv", peer=1, state="done" if n == 1 else "waits") for n in (1, 2)]
    sends = [row(1, "send", peer=0)]
    doing = {0: Activity("collective", "waits")}
    hang = hangs.name(where(tmp_path, 1), doing, {0: tuple(receives), 1: tuple(sends)}, {})
    assert hang.cause == "unmatched message"
    assert hang.sentence == "rank 0 waits in recv #2 of 8 float32 from rank 1; rank 1 has sent 1 of these"


def test_nothing_known_is_said_to_be_nothing(tmp_path):
    hang = hangs.look(where(tmp_path))
    assert hang.cause == "unknown"
    assert hang.sentence == "rank 0 is in 'build'; rank 1 is in 'build'"
    assert (hang.table(), hang.stacks) == ("", {})


def test_the_same_collectives_everywhere_that_do_not_end(tmp_path):
    doing = {rank: Activity("collective", "waits in it") for rank in range(2)}
    hang = hangs.name(where(tmp_path), doing, {rank: rows(1, state="waits") for rank in range(2)}, {})
    assert hang.cause == "collective does not end"
    assert "rank 1 waits in it" in hang.sentence


# ---- stacks


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time\ndef deep(): time.sleep(1000)\ndeep()"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(stacks.find() is None, reason="py-spy is not installed")
def test_stacks_of_a_process_with_native_frames(sleeper):
    def deep() -> bool:
        main = stacks.take({3: sleeper.pid})[3].main
        return main is not None and main.python is not None and main.python.name == "deep"

    wait_until(deep, "the stack")
    found = stacks.take({3: sleeper.pid})[3]
    assert found.native
    assert found.note == ""
    assert "nanosleep (libc" in found.text()


@pytest.mark.parametrize(
    ("script", "note"),
    [
        ("exec sleep 100", "no stacks: py-spy did not answer in time"),
        ("echo 'Error: Permission Denied' >&2; exit 1", "no stacks: py-spy is not permitted to look at it (ptrace)"),
        (
            "echo 'Error: x\n\nCaused by:\n    0: a\n    1: No such thing' >&2; exit 1",
            "no stacks: py-spy failed: No such",
        ),
        ("echo '{'", "no stacks: py-spy's answer cannot be read"),
        ("kill -9 $$", "no stacks: py-spy was killed by signal 9"),
    ],
)
def test_when_py_spy_does_not_work(tmp_path, sleeper, script, note):
    program = tmp_path / "py-spy"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    found = stacks.take({0: sleeper.pid}, limit=0.5, program=str(program))[0]
    assert found.note.startswith(note)
    assert found.text().startswith(f"({note}")
    assert not [
        p for p in psutil.Process().children(recursive=True) if p.pid != sleeper.pid and str(program) in p.cmdline()
    ]
    assert psutil.Process(sleeper.pid).status() != psutil.STATUS_STOPPED


def test_without_py_spy(monkeypatch, sleeper):
    monkeypatch.setattr(stacks, "find", lambda: None)
    assert stacks.take({0: sleeper.pid})[0].note == "no stacks: py-spy is not installed"


def test_a_native_loop_needs_two_looks():
    python, native = Frame("spin", "x.py", 3, None, "x.py"), Frame("builtin_len", "/l.so", 0, "/l.so", "l.so")
    stack = Stack(1, (Thread("MainThread", 1, True, True, [native, python]),))
    busy = hangs.State("R", 1.0)
    assert hangs.activity(busy, stack).doing == "endless Python", "a loop in Python calls functions written in C"
    assert hangs.activity(busy, stack, again=True).doing == "endless native"


# ---- deaths


@pytest.mark.parametrize(
    ("code", "now", "text"),
    [
        (-9, {"a": 4}, "was killed by SIGKILL for lack of memory: the kernel's count of such kills rose by 1 (a)"),
        (
            -9,
            {"a": 3},
            "was killed by SIGKILL from outside: the kernel has killed nothing for lack of memory meanwhile",
        ),
        (137, {"a": 4}, "ended with exit code 137, that of a program killed by SIGKILL for lack of memory: "),
        (-11, {"a": 4}, "was killed by SIGSEGV"),
        (3, {"a": 4}, "ended with exit code 3"),
        (None, {"a": 4}, "closed its connection"),
    ],
)
def test_how_a_rank_died(code, now, text):
    assert Deaths({"a": 3}).ended(code, now).startswith(text)


def test_without_counters_nothing_is_claimed():
    assert Deaths({}).ended(-9, {}) == "was killed by SIGKILL; the kernel does that when memory runs out"


def test_each_kill_for_memory_is_told_of_one_rank_only():
    deaths = Deaths({"/proc/vmstat": 7})
    assert "for lack of memory" in deaths.ended(-9, {"/proc/vmstat": 8})
    assert "from outside" in deaths.ended(-9, {"/proc/vmstat": 8})
    assert "for lack of memory" in deaths.ended(-9, {"/proc/vmstat": 9})


def test_a_process_that_somebody_kills():
    deaths = Deaths(hangs.memory_kills())
    process = subprocess.Popen(["sleep", "100"])
    process.kill()
    said = deaths.ended(process.wait())
    assert said.startswith("was killed by SIGKILL")
    assert "from outside" in said or not hangs.memory_kills()


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group of 64 MiB."""
    version2, version1 = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")
    if (version2 / "cgroup.controllers").exists():
        group, limit = version2 / f"tiebench-test-{os.getpid()}", "memory.max"
    else:
        group, limit = version1 / f"tiebench-test-{os.getpid()}", "memory.limit_in_bytes"
    try:
        if not (group.parent / "cgroup.procs").exists():
            pytest.skip("no control groups here")
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error.strerror}")
    try:
        if not (group / limit).exists():
            pytest.skip("control groups here do not limit memory")
        (group / limit).write_text(str(64 * 2**20))
        yield group
        wait_until(lambda: not (group / "cgroup.procs").read_text().strip(), "the end of the group's processes", 30.0)
    finally:
        group.rmdir()


def test_a_process_that_the_kernel_kills_for_memory(small_group):
    source = (
        "import sys\nopen(sys.argv[1], 'w').write('0')\nprint(flush=True)\ninput()\n"
        "x = bytearray(2**28)\nx[::4096] = b'x' * len(x[::4096])\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", source, str(small_group / "cgroup.procs")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    process.stdout.readline()
    deaths = Deaths(hangs.memory_kills())
    deaths.watch([process.pid])
    process.communicate("\n", timeout=60)
    assert process.returncode == -signal.SIGKILL
    said = deaths.ended(process.returncode)
    assert said.startswith("was killed by SIGKILL for lack of memory"), said


def test_counters_of_both_versions_of_control_groups(tmp_path):
    def put(name: str, text: str) -> None:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    point = tmp_path / "sys"
    put(
        "proc/self/mountinfo",
        f"25 1 0:2 /docker/abc {point}/unified rw - cgroup2 cgroup2 rw\n"
        f"26 1 0:3 / {point}/memory rw - cgroup cgroup rw,memory\n",
    )
    put("proc/5/cgroup", "4:cpu:/other\n3:memory:/a/b\n0::/docker/abc/run/one\n")
    assert hangs._group_files(["5"], tmp_path / "proc") == [
        *(point / "memory" / level / "memory.oom_control" for level in ("a/b", "a", "")),
        *(point / "unified" / level / "memory.events" for level in ("run/one", "run", "")),
    ]
    assert hangs._group_files(["6"], tmp_path / "proc") == []


# ---- leftovers

DAEMON = """
import os, subprocess, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.environ.update(PYTHONUNBUFFERED="1")
        {do}
    os._exit(0)
os.wait()
"""


@pytest.fixture
def daemonise(tmp_path) -> Callable[[str, Mapping[str, str]], Callable[[], int]]:
    """A process that leaves another one behind, in a session of its own; gives the process id of that one."""

    def start(do: str, extra: Mapping[str, str]) -> int:
        file = tmp_path / "pid"
        source = DAEMON.format(do=do.replace("PID", repr(str(file))))
        subprocess.run([sys.executable, "-c", source], env={**os.environ, **extra}, check=True)
        wait_until(lambda: file.exists() and file.read_text().endswith("\n"), "the child")
        return int(file.read_text())

    return start


def test_a_child_that_moved_to_a_session_of_its_own_is_found_and_killed(daemonise):
    pid = daemonise('os.execvp("sh", ["sh", "-c", "echo $$ >" + PID + "; sleep 1000; true"])', {hangs.MARK: "set-a"})
    assert os.getsid(pid) != os.getsid(0)
    assert hangs.leftovers("set-b") == ()
    found = hangs.leftovers("set-a")
    assert pid in [one.pid for one in found]
    assert f"process {pid} (sh -c " in str(next(one for one in found if one.pid == pid))
    assert hangs.end([replace(one, created=0.0) for one in found]) == ()
    assert psutil.pid_exists(pid), "a process that has only inherited the number was killed"
    assert hangs.end(found) == ()
    assert hangs.leftovers("set-a") == ()


def test_a_child_that_was_only_forked_is_known_by_its_recorder(daemonise, tmp_path):
    recorder = tmp_path / "set1-rank0.collectives"
    recorder.write_bytes(bytes(4096))
    do = (
        f"import mmap; held = mmap.mmap(os.open({str(recorder)!r}, os.O_RDWR), 4096); "
        "open(PID, 'w').write(str(os.getpid()) + chr(10)); time.sleep(1000)"
    )
    pid = daemonise(do, {})
    assert hangs.leftovers("none", (), [tmp_path / "other"]) == ()
    (found,) = hangs.leftovers("none", (), [recorder])
    assert (found.pid, found.why) == (pid, "forked by a rank")
    assert hangs.end([found]) == ()


def test_the_rest_of_a_session(sleeper):
    process = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    (found,) = hangs.leftovers("none", [process.pid])
    assert (found.pid, found.why) == (process.pid, "in a rank's session or process group")
    assert hangs.end([found]) == ()
    assert process.wait() == -signal.SIGKILL
    assert sleeper.poll() is None
