"""Ranks for the tests of this room: forked processes with gloo, without the run loop of `ci`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from suites import faults, train
from suites.cases import Case
from suites.observe import RankObservation

Job = tuple[str, str | None]  # case id, fault
RunJobs = Callable[[Sequence[Job]], list[list[RankObservation]]]


def _rank(rank: int, world: int, folder: str, jobs: Sequence[Job]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    for number, (case, fault) in enumerate(jobs):
        with faults.apply(fault) if fault else contextlib.nullcontext():
            train.run_rank(Case.parse(case), torch.device("cpu")).save(Path(folder) / f"{number}.{rank}.safetensors")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def run_jobs(tmp_path_factory: pytest.TempPathFactory) -> RunJobs:
    """Runs (case id, fault) jobs, one set of ranks for each world size; gives observations in the order of the jobs."""

    def run(jobs: Sequence[Job]) -> list[list[RankObservation]]:
        found: dict[Job, list[RankObservation]] = {}
        worlds = sorted({Case.parse(case).world_size for case, _ in jobs})
        for world in worlds:
            mine = [job for job in jobs if Case.parse(job[0]).world_size == world]
            folder = tmp_path_factory.mktemp(f"ranks{world}")
            mp.start_processes(_rank, (world, str(folder), mine), nprocs=world, start_method="fork")
            for number, job in enumerate(mine):
                found[job] = [RankObservation.load(folder / f"{number}.{rank}.safetensors") for rank in range(world)]
        return [found[job] for job in jobs]

    return run


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads change the order of sums, so compare with one, as ranks do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
