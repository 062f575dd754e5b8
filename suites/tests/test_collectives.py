"""The recorder of collectives: what it sees of real ranks, and what it makes of any bytes."""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from suites import collectives
from suites.collectives import CAPACITY, Recorder, read


def _calls(rank, folder):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    recorder = collectives.install(folder / f"rank{rank}.collectives")
    assert collectives.install(folder / "another") is recorder
    alone, pair = dist.new_group([rank], use_local_synchronization=True), dist.new_group([0, 1])
    a, b, pieces = torch.ones(6), torch.ones(12), [torch.ones(6), torch.ones(6)]

    recorder.begin()
    recorder.note("methods")
    dist.all_reduce(a, dist.ReduceOp.MAX)
    dist.all_reduce(a, group=alone)
    dist.all_reduce(a.double(), group=pair)
    dist.broadcast(a, 1)
    dist.reduce(a, 1)
    dist.all_gather(pieces, a)
    dist.all_gather_into_tensor(b, a)
    dist.gather(a, pieces if rank == 0 else None, dst=0)
    dist.scatter(a, pieces if rank == 0 else None, src=0)
    dist.reduce_scatter_tensor(a, b)
    dist.reduce_scatter(a, pieces)
    dist.all_to_all_single(a, a.clone())
    dist.all_reduce_coalesced([a, b])
    dist.barrier()
    work = dist.all_reduce(a, async_op=True)
    if rank == 0:
        dist.send(a, 1)
    else:
        dist.recv(a, 0)
    work.wait()
    dist.all_reduce(a, async_op=True)  # nobody waits for it

    recorder.begin()
    recorder.note("operators")
    from torch.distributed import _functional_collectives as functional
    from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

    (functional.all_reduce(a, "sum", dist.group.WORLD) + 1).sum()
    (functional.reduce_scatter_tensor(b, "sum", 0, pair) + 1).sum()
    (functional.broadcast(a, 1, dist.group.WORLD) + 1).sum()
    mesh = init_device_mesh("cpu", (2,))
    sharded = DTensor.from_local(torch.ones(3), mesh, [Shard(0)])
    assert sharded.redistribute(placements=[Replicate()]).to_local().shape == (6,)
    assert torch.ops._c10d_functional.all_reduce.default.name() == "_c10d_functional::all_reduce"

    recorder.begin()
    recorder.note("raises")
    with pytest.raises((RuntimeError, ValueError)):
        dist.group.WORLD.allreduce([a, torch.ones(2, dtype=torch.int64)])
    dist.barrier()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    mp.start_processes(_calls, (folder,), nprocs=2, start_method="fork")
    return [read(folder / f"rank{rank}.collectives") for rank in range(2)]


def of_case(rows, case):
    return [f"{row}: {row.state}" for row in rows if row.case == case]


@pytest.mark.parametrize("rank", [0, 1])
def test_every_call_is_seen_once_and_its_end_too(recorded, rank):
    rows = [row for row in recorded[rank] if row.phase == "methods"]
    assert [f"{row}: {row.state}" for row in rows] == [
        "all_reduce #1 of 6 float32 (max): done",
        "all_reduce #1 of 6 float64 (sum): done",
        "broadcast #2 of 6 float32 from rank 1: done",
        "reduce #3 of 6 float32 (sum) to rank 1: done",
        "all_gather #4 of 6 float32: done",
        "all_gather_into_tensor #5 of 6 float32: done",
        "gather #6 of 6 float32 to rank 0: done",
        "scatter #7 of 6 float32 from rank 0: done",
        "reduce_scatter_tensor #8 of 6 float32 (sum): done",
        "reduce_scatter #9 of 6 float32 (sum): done",
        "all_to_all_single #10 of 6 float32: done",
        "all_reduce_coalesced #11 of 18 float32 (sum): done",
        "barrier #12: done",
        "all_reduce #13 of 6 float32 (sum): done",
        "send #1 of 6 float32 to rank 1: done" if rank == 0 else "recv #1 of 6 float32 from rank 0: done",
        "all_reduce #14 of 6 float32 (sum): returned",
    ]
    assert {row.over for row in rows} == {"ranks 0, 1"}
    assert len({row.group for row in rows}) == 2
    times = [row.seconds for row in rows]
    assert times == sorted(times)


def test_functional_collectives_and_dtensor_are_seen_once(recorded):
    for rows in recorded:
        assert of_case(rows, 2) == [
            "all_reduce #1 of 6 float32 (sum): done",
            "reduce_scatter_tensor #1 of 6 float32 (sum): done",
            "broadcast #2 of 6 float32 from rank 1: done",
            "all_gather_into_tensor #1 of 3 float32: done"
            if _own_group(rows)
            else "all_gather_into_tensor #3 of 3 float32: done",
        ]


def _own_group(rows):
    """Whether the device mesh made a group of its own (else it uses the default one)."""
    mesh = next(row for row in rows if row.phase == "operators" and row.kind == "all_gather_into_tensor")
    return mesh.number == 1


def test_a_call_that_raises(recorded):
    assert of_case(recorded[0], 3) == ["all_reduce #1 of 8 float32: raised", "barrier #2: done"]


# ---- the file


class Group:
    """As much of a process group as the recorder asks for."""

    group_name = "a group with a name that is much longer than forty characters"

    def __init__(self, size=2):
        self._size = size

    def size(self):
        return self._size


def write(recorder: Recorder, group: object, elements: int = 5) -> int:
    return recorder.issue(b"all_reduce", group, elements, b"float32", b"sum", -1)


def test_the_ring_keeps_the_last(tmp_path):
    recorder, group = Recorder(tmp_path / "a"), Group()
    first = write(recorder, group)
    for elements in range(CAPACITY + 10):
        last = write(recorder, group, elements)
    recorder.mark(first, 4)  # fell out long ago
    recorder.mark(last, 4)
    rows = read(tmp_path / "a")
    assert [row.elements for row in rows] == list(range(10, CAPACITY + 10))
    assert [row.state for row in rows] == ["issued"] * (CAPACITY - 1) + ["done"]
    assert rows[-1].number == CAPACITY + 11
    assert rows[-1].group == Group.group_name[:40]


def test_large_groups_and_groups_of_one(tmp_path):
    recorder = Recorder(tmp_path / "a")
    assert write(recorder, Group(1)) == 0
    write(recorder, Group(1000))
    (row,) = read(tmp_path / "a")
    assert (row.size, row.ranks) == (1000, tuple(range(collectives.MOST_RANKS)))
    assert row.over.endswith(", 31, …")


def test_anything_but_a_whole_file_of_ours_reads_as_less(tmp_path):
    assert read(tmp_path / "missing") == ()
    assert read(tmp_path) == ()
    recorder, group = Recorder(tmp_path / "a"), Group()
    for _ in range(20):
        write(recorder, group)
    data = (tmp_path / "a").read_bytes()
    other = tmp_path / "b"
    chosen = random.Random(5)
    for end in [0, 1, 23, 24, 25, *chosen.sample(range(len(data)), 40)]:
        other.write_bytes(data[:end])
        rows = read(other)
        assert rows == read(tmp_path / "a")[: len(rows)]
    for _ in range(200):
        damaged = bytearray(data)
        for at in chosen.sample(range(24 + 20 * 240), 30):
            damaged[at] = chosen.randrange(256)
        other.write_bytes(damaged)
        for row in read(other):
            assert str(row).isprintable()
            assert row.over
    other.write_bytes(b"\0" * len(data))
    assert read(other) == ()


def test_a_torn_row_is_left_out(tmp_path):
    recorder, group = Recorder(tmp_path / "a"), Group()
    for _ in range(3):
        write(recorder, group)
    data = bytearray((tmp_path / "a").read_bytes())
    second = collectives._HEAD.size + collectives._ROW.size
    data[second] = 99  # its first index; the last one is the old one still
    (tmp_path / "b").write_bytes(data)
    assert [row.index for row in read(tmp_path / "b")] == [1, 3]


def test_a_file_that_cannot_be_allocated_is_an_error_and_no_signal(tmp_path):
    resource_limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    source = f"""
        import resource, sys
        from pathlib import Path
        from suites.collectives import Recorder
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, {resource_limit}))
        try:
            Recorder(Path(sys.argv[1]))
        except OSError as error:
            sys.exit("refused")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source), str(tmp_path / "a")],
        env={**os.environ, "PYTHONPATH": str(Path(collectives.__file__).parent.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "refused\n")


def test_reading_needs_no_torch():
    source = "import sys; from suites import collectives; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(collectives.__file__).parent.parent)}
    assert subprocess.run([sys.executable, "-c", source], env=environment, check=False).returncode == 0
