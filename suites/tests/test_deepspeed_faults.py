"""Faults in DeepSpeed: each is caught where it must be, is not there where it says so, and is gone afterwards.

One set of live ranks for each world size runs every case, without a fault, with it, and once more without: a subprocess
that imports once and forks them.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from suites import faults
from suites.cases import Case
from suites.faults import deepspeed, deepspeed_checkpoint
from suites.observe import Piece, RankObservation, bitwise_equal
from suites.reference import ReferenceCache
from suites.verdict import Judgement, judge

FAULTS = [*deepspeed.TABLE.faults.values(), *deepspeed_checkpoint.TABLE.faults.values()]
MINE = [fault for fault in FAULTS if "hang" not in fault.caught_by]  # ci/tests has those that hang
NULL = list(dict.fromkeys(case for fault in MINE for case in (fault.case, fault.invisible)))
CLASSES = {
    1,
    2,
    3,
    4,
    5,
    6,
    7,
    8,
    9,
    10,
    11,
    12,
    13,
    14,
    15,
    16,
    17,
    18,
    19,
    20,
    21,
    22,
    23,
    24,
    25,
    26,
    27,
    28,
    30,
    31,
}
Job = tuple[str, str | None, str]  # case id, fault, "" or what tells this run from an equal one
JOBS: list[Job] = [
    *((case, None, "") for case in NULL),
    *(
        job
        for fault in MINE
        for job in (
            (fault.case, fault.name, ""),
            (fault.case, None, f"after {fault.name}"),
            (fault.invisible, fault.name, ""),
        )
    ),
]
Observe = Callable[[str, str | None, str], list[RankObservation]]


def _rank(rank: int, world: int, folder: str, jobs: Sequence[tuple[int, Job]]) -> None:
    from suites.train import run_rank

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{world}", rank=rank, world_size=world)
    for number, (case, fault, _) in jobs:
        with faults.apply(fault) if fault else contextlib.nullcontext():
            observed = run_rank(Case.parse(case), torch.device("cpu"))
        observed.save(Path(folder) / f"{number}.{rank}")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Observe:
    """What every rank saw of a job."""
    pytest.importorskip("deepspeed")
    if (version := importlib.metadata.version("deepspeed")) != "0.19.8":
        pytest.skip(f"these faults are for DeepSpeed 0.19.8, here is {version}")
    out = tmp_path_factory.mktemp("deepspeed_faults")
    root = Path(__file__).parents[2]
    environment = {
        **os.environ,
        "PYTHONPATH": str(root),
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-W", "ignore", __file__, str(out)]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    numbers = {job: number for number, job in enumerate(JOBS)}

    def read(case: str, fault: str | None, when: str = "") -> list[RankObservation]:
        number = numbers[case, fault, when]
        return [RankObservation.load(out / f"{number}.{rank}") for rank in range(Case.parse(case).world_size)]

    return read


@pytest.fixture(scope="module")
def verdict() -> Callable[[str, list[RankObservation]], Judgement]:
    cache = ReferenceCache()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield lambda case, ranks: judge(Case.parse(case), ranks, cache)
    torch.set_num_threads(before)


@pytest.mark.parametrize("fault", MINE, ids=lambda f: f.name)
def test_fault_is_caught_by_its_oracles(fault, observed, verdict) -> None:
    found = verdict(fault.case, observed(fault.case, fault.name))
    assert set(fault.caught_by) <= {f.oracle for f in found.flagged}, found.evidence
    assert found.verdict == ("bug: precision" if fault.bug_class == 28 else "bug"), found.evidence
    assert "oracle failed" not in found.evidence


@pytest.mark.parametrize("case", NULL)
def test_the_same_case_without_a_fault_is_green(case, observed, verdict) -> None:
    found = verdict(case, observed(case, None))
    assert found.verdict in ("exact", "rounding"), found.evidence


@pytest.mark.parametrize("fault", MINE, ids=lambda f: f.name)
def test_fault_is_gone_afterwards_bit_for_bit(fault, observed) -> None:
    before, after = observed(fault.case, None), observed(fault.case, None, f"after {fault.name}")
    assert differences(before, after) == []


@pytest.mark.parametrize("fault", MINE, ids=lambda f: f.name)
def test_fault_is_invisible_bit_for_bit_where_it_says_so(fault, observed) -> None:
    assert differences(observed(fault.invisible, None), observed(fault.invisible, fault.name)) == []


@pytest.mark.parametrize("fault", MINE, ids=lambda f: f.name)
def test_the_comparison_of_runs_sees_the_fault(fault, observed) -> None:
    """Or the two tests above would prove nothing."""
    assert differences(observed(fault.case, None), observed(fault.case, fault.name)) != []


def test_the_table_covers_what_deepspeed_can_get_wrong() -> None:
    assert {fault.bug_class for fault in FAULTS} == CLASSES
    assert all(fault.path == "deepspeed" and faults.FAULTS[fault.name] is fault for fault in FAULTS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_everything_is_put_back(fault) -> None:
    pytest.importorskip("deepspeed")
    replaced = [(owner, name) for owner, name, _ in fault.replacements()]
    before = [vars(owner).get(name) for owner, name in replaced]
    with faults.apply(fault.name):
        during = [vars(owner).get(name) for owner, name in replaced]
        assert all(new is not old for new, old in zip(during, before, strict=True))
    assert all(vars(owner).get(name) is old for (owner, name), old in zip(replaced, before, strict=True))


def test_a_deepspeed_without_the_piece_is_said_to_be_one() -> None:
    pytest.importorskip("deepspeed")
    from suites.faults import deepspeed

    with pytest.raises(
        NotImplementedError, match=r"for DeepSpeed 0\.19\.8: .* has no module_inject\.layers\.NoSuchLayer"
    ):
        deepspeed._layers("NoSuchLayer")


def differences(one: Sequence[RankObservation], other: Sequence[RankObservation]) -> list[str]:
    """What the ranks of one run saw and those of another did not: numbers bit by bit, events, layout, census."""
    return [found for pair in zip(one, other, strict=True) for found in _differences(*pair)]


def _differences(one: RankObservation, other: RankObservation) -> list[str]:
    names = ("rank", "tp_rank", "dp_rank", "lifecycle", "layout", "census", "zero_stage", "switches")
    found = [name for name in names if getattr(one, name) != getattr(other, name)]
    found += [f"initial {name}" for name in _unequal(one.initial, other.initial)]
    for number, (a, b) in enumerate(zip(one.steps, other.steps, strict=True), 1):
        found += [
            f"step {number} {n}" for n in ("loss", "gradient_norm", "collectives") if getattr(a, n) != getattr(b, n)
        ]
        for kind in ("gradients", "weights"):
            found += [f"step {number} {kind} {name}" for name in _unequal(getattr(a, kind), getattr(b, kind))]
        found += [f"step {number} logits {n}" for n in _unequal(dict(enumerate(a.logits)), dict(enumerate(b.logits)))]
    return found


def _unequal(one: dict[object, Piece], other: dict[object, Piece]) -> list[object]:
    return [n for n in {**one, **other} if n not in one or n not in other or not _same(one[n], other[n])]


def _same(one: Piece, other: Piece) -> bool:
    return (one.start, one.local_shape) == (other.start, other.local_shape) and bitwise_equal(one.data, other.data)


if __name__ == "__main__":
    import torch.multiprocessing as mp

    import suites.paths.deepspeed  # noqa: F401  (before the fork, so that the ranks share the import)

    gc.freeze()  # what was imported is no garbage: collections in the ranks need not look at it
    for size in sorted({Case.parse(case).world_size for case, _, _ in JOBS}):
        jobs = [(number, job) for number, job in enumerate(JOBS) if Case.parse(job[0]).world_size == size]
        mp.start_processes(_rank, (size, sys.argv[1], jobs), nprocs=size, start_method="fork")
