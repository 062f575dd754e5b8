"""The way in which DeepSpeed's own test harness runs a distributed test, for comparison: fresh processes for each test.

What it does there (``tests/unit/common.py``, `DistributedTest` without ``reuse_dist_env``), and here: the test process
makes a new pool of as many processes as the test has ranks, with the start method "forkserver" and nothing preloaded;
each of them imports torch and DeepSpeed, joins a process group on a port of its own, runs the test's body and destroys
the group; then the pool is ended. The body is the same training of the same case as in tiebench, without its verdict.

The test process is one of its own, as pytest's is: `Harness`. Nothing of torch is imported in it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

LIMIT = 600.0  # seconds for one test, as there


class Harness:
    """A test process that runs one case after the other."""

    def __init__(self, process: subprocess.Popen[str]):
        self._process = process

    def run(self, case: str, world_size: int) -> float:
        """Run one case in fresh processes; seconds.

        Raises:
            RuntimeError: a rank raised, or the test process ended.
        """
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{world_size} {case}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        try:
            return float(answer)
        except ValueError:
            raise RuntimeError(f"{case} in fresh processes: {answer or 'the test process ended'}") from None


@contextlib.contextmanager
def running() -> Iterator[Harness]:
    """A test process, for as long as it is needed."""
    words = [sys.executable, os.path.abspath(__file__)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Harness(process)
        finally:
            process.kill()


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


def main() -> None:
    """The test process: cases in, one a line; seconds out, or what went wrong."""
    for line in sys.stdin:
        world_size, case = line.split()
        try:
            answer = repr(run_case(case, int(world_size)))
        except Exception as error:  # noqa: BLE001 - the other side says it
            answer = f"{type(error).__name__}: {' '.join(str(error).split())}"
        print(answer, flush=True)


if __name__ == "__main__":
    main()
