"""The way in which DeepSpeed's own test harness runs a distributed test, for comparison: fresh processes for each test.

What it does there (``tests/unit/common.py``, `DistributedTest` without ``reuse_dist_env``), and here: the test process
makes a new pool of as many processes as the test has ranks, with the start method "forkserver" and nothing preloaded;
each of them imports torch and DeepSpeed, joins a process group on a port of its own, runs the test's body and destroys
the group; then the pool is ended. The body is the same training of the same case as in tiebench, without its verdict.

Nothing of torch is imported here before a pool's processes do it.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time

LIMIT = 600.0  # seconds for one test, as there


def run_case(case: str, world_size: int) -> float:
    """Run one case in fresh processes; seconds from nothing to nothing.

    Raises:
        Exception: what a rank raised; multiprocessing.TimeoutError: it took over `LIMIT`.
    """
    begin = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    pool = context.Pool(world_size)
    try:
        given = [(case, rank, world_size, port) for rank in range(world_size)]
        pool.starmap_async(train, given, chunksize=1).get(LIMIT)
        pool.close()
        pool.join()
    finally:
        pool.terminate()
    return time.monotonic() - begin


def train(case: str, rank: int, world_size: int, port: int) -> None:
    """One rank: everything from imports to the end of the process group."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
    }
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):  # pytest captures it there
        os.dup2(nowhere, descriptor)
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    from suites import paths, train  # noqa: PLC0415
    from suites.cases import Case  # noqa: PLC0415

    torch.set_num_threads(1)
    parsed = Case.parse(case)
    paths.load(parsed.path)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    train.run_rank(parsed, torch.device("cpu"), lambda phase: None, [])
    dist.barrier()
    dist.destroy_process_group()
