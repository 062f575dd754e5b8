"""Changes that no oracle may call a bug: another order of sums, another layout, TF32 where fp32 was asked for."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from suites import train
from suites.faults.pieces import EVEN_ROW, ONE_RANK, ROW, VOCAB, size_of
from suites.faults.table import Replacement, Table
from suites.paths import handwritten as hw
from suites.precision import multiplying

TABLE = Table("handwritten")
NOT_BUG = 0


def _multiplying(chosen: Any) -> Replacement:
    """Let each rank multiply as ``chosen(rank, matmul)`` says."""

    def broken(matmul: str, device: torch.device) -> Any:
        return multiplying(chosen(dist.get_rank(), matmul), device)

    return (train, "multiplying", broken)


@TABLE.fault(NOT_BUG, needs="tp > 1", case=ROW, invisible=ROW + ",matmul=tf32", caught_by=("switches",))
def tf32_on_one_rank() -> list[Replacement]:
    """Rank 1 multiplies in TF32, the others in fp32."""
    return [_multiplying(lambda rank, matmul: "tf32" if rank == 1 else matmul)]


@TABLE.fault(NOT_BUG, needs="matmul=ieee", case=ROW, invisible=ROW + ",matmul=tf32", caught_by=("switches",))
def tf32_unasked() -> list[Replacement]:
    """All ranks multiply in TF32, though fp32 was asked for."""
    return [_multiplying(lambda rank, matmul: "tf32")]


@TABLE.fault(
    NOT_BUG, needs="matmul=ieee or tf32", case=VOCAB, invisible=ROW + ",matmul=tf32_truncated", caught_by=("switches",)
)
def truncation_unasked() -> list[Replacement]:
    """All ranks cut the inputs of matrix products to TF32, though fp32 was asked for."""
    return [_multiplying(lambda rank, matmul: "tf32_truncated")]


@TABLE.fault(NOT_BUG, needs="tp > 2", case=ROW + ",tp=4", invisible=ONE_RANK, caught_by=())
def reversed_sums() -> list[Replacement]:
    """Sums over ranks are gathered and added from the last rank to the first."""
    original = hw.all_reduce

    def broken(tensor: Tensor, group: dist.ProcessGroup, op: Any = dist.ReduceOp.SUM) -> Tensor:
        if op != dist.ReduceOp.SUM:
            return original(tensor, group, op)
        own = tensor.contiguous()
        parts = [torch.empty_like(own) for _ in range(size_of(group))]
        dist.all_gather(parts, own, group=group)
        total = parts.pop()
        while parts:
            total = total + parts.pop()
        return total

    return [(hw, "all_reduce", broken)]


@TABLE.fault(NOT_BUG, needs="sums long enough to be split", case=ROW, invisible="", caught_by=())
def two_threads() -> list[Replacement]:
    """The ranks compute with two threads."""
    original = train._step

    def broken(*args: Any) -> Any:
        before = torch.get_num_threads()
        torch.set_num_threads(2)
        try:
            return original(*args)
        finally:
            torch.set_num_threads(before)

    return [(train, "_step", broken)]


@TABLE.fault(
    NOT_BUG, needs="activation=transposed", case=VOCAB + ",activation=transposed", invisible=VOCAB, caught_by=()
)
def contiguous_copies() -> list[Replacement]:
    """Column-parallel layers copy a strided activation before they multiply."""
    original = hw.CopyToTP.forward
    broken = lambda ctx, x, mesh: original(ctx, x.contiguous(), mesh)  # noqa: E731
    return [(hw.CopyToTP, "forward", staticmethod(broken))]


@TABLE.fault(NOT_BUG, needs="tp > 1", case=VOCAB, invisible=ONE_RANK, caught_by=())
def larger_softmax_shift() -> list[Replacement]:
    """The softmax is shifted by one more than the maximum, which cancels."""
    original = hw.global_maximum
    broken = lambda logits, mesh: original(logits, mesh) + (1 if mesh.tp > 1 else 0)  # noqa: E731
    return [(hw, "global_maximum", broken)]


@TABLE.fault(NOT_BUG, needs="dp > 1", case=EVEN_ROW + ",dp=2", invisible=ONE_RANK, caught_by=())
def divided_before_the_sum() -> list[Replacement]:
    """The data-parallel mean divides before it sums."""

    def broken(gradient: Tensor, mesh: hw.Mesh) -> Tensor:
        return hw.all_reduce(gradient / mesh.dp, mesh.dp_group)

    return [(hw, "mean_over_dp", broken)]
