"""Class 28: precision lost where fp32 was asked for."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from suites import train
from suites.faults.pieces import DP, EVEN_ROW, EVEN_VOCAB, ONE_RANK, ONE_RANK_VOCAB, ROW, VOCAB, size_of, using
from suites.faults.table import Replacement, Table
from suites.paths import handwritten as hw

TABLE = Table("handwritten")
LOW = torch.bfloat16


@TABLE.fault(28, needs="tp > 1", case=ROW, invisible=ONE_RANK, caught_by=("gradient", "logits"))
def bf16_reduction() -> list[Replacement]:
    """Reductions over more than one rank run in bf16."""
    original = hw.all_reduce

    def broken(tensor: Tensor, group: dist.ProcessGroup, op: Any = dist.ReduceOp.SUM) -> Tensor:
        return original(tensor.to(LOW) if size_of(group) > 1 else tensor, group, op).to(tensor.dtype)

    return [(hw, "all_reduce", broken)]


@TABLE.fault(28, needs="dp > 1, zero=0", case=DP, invisible=ONE_RANK, caught_by=("precision", "gradient"))
def bf16_dp_reduce() -> list[Replacement]:
    """Gradients are reduced over data-parallel ranks in bf16."""
    original = hw.mean_over_dp

    def broken(gradient: Tensor, mesh: hw.Mesh) -> Tensor:
        return original(gradient.to(LOW) if mesh.dp > 1 else gradient, mesh).to(gradient.dtype)

    return [(hw, "mean_over_dp", broken)]


@TABLE.fault(28, needs="tp > 1, head=vocab", case=VOCAB, invisible=ONE_RANK_VOCAB, caught_by=("gradient",))
def bf16_gradient_below_head() -> list[Replacement]:
    """Gradients below column-parallel layers and the vocabulary head are reduced in bf16; the forward is exact."""
    original = hw.all_reduce

    def broken(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.mesh.tp == 1:
            return original(gradient, ctx.mesh.tp_group), None
        return original(gradient.to(LOW), ctx.mesh.tp_group).to(gradient.dtype), None

    return [(hw.CopyToTP, "backward", staticmethod(broken))]


@TABLE.fault(28, needs="accumulate > 1", case=ROW + ",accumulate=2", invisible=ROW, caught_by=("gradient",))
def fp16_accumulation() -> list[Replacement]:
    """What earlier micro-batches left of the gradient is kept in fp16."""
    original = hw.HandwrittenTrainer.forward_backward

    def broken(self: hw.HandwrittenTrainer, micro: Any, last: bool) -> tuple[Tensor, Tensor]:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.copy_(parameter.grad.half())
        return original(self, micro, last)

    return [(hw.HandwrittenTrainer, "forward_backward", broken)]


@TABLE.fault(28, needs="head=vocab", case=EVEN_VOCAB, invisible=EVEN_ROW, caught_by=("loss", "gradient"))
def bf16_softmax() -> list[Replacement]:
    """The sharded loss takes its softmax in bf16."""
    original = hw.VocabParallelLoss.__call__

    def broken(self: Any, logits: Tensor, labels: Tensor, **others: object) -> Tensor:
        return original(self, logits.to(LOW).to(logits.dtype), labels, **others)

    return [(hw.VocabParallelLoss, "__call__", broken)]


@TABLE.fault(28, needs="head=row", case=ROW, invisible=EVEN_VOCAB, caught_by=("logits", "gradient"))
def bf16_head_weight() -> list[Replacement]:
    """The row head multiplies with a bf16 copy of its weight."""
    return [using(hw.RowParallelHead, lambda head, weight: weight.to(LOW).to(weight.dtype))]


@TABLE.fault(
    28, needs="an optimizer with moments", case=ROW + ",optimizer=momentum", invisible=ROW, caught_by=("update",)
)
def bf16_moments() -> list[Replacement]:
    """The optimizer keeps its moments in bf16."""
    original = hw.HandwrittenTrainer.step

    def broken(self: hw.HandwrittenTrainer) -> float:
        norm = original(self)
        for state in self.data_parallel.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor) and value.dim():
                    value.copy_(value.to(LOW))
        return norm

    return [(hw.HandwrittenTrainer, "step", broken)]


@TABLE.fault(28, needs="tp > 1", case=ROW, invisible=ONE_RANK, caught_by=("gradient_norm",))
def bf16_norm() -> list[Replacement]:
    """The shares of the squared gradient norm are added in bf16."""
    original = hw.all_reduce

    def broken(tensor: Tensor, group: dist.ProcessGroup, op: Any = dist.ReduceOp.SUM) -> Tensor:
        low = tensor.dim() == 0 and size_of(group) > 1
        return original(tensor.to(LOW) if low else tensor, group, op).to(tensor.dtype)

    return [(hw, "all_reduce", broken)]


BF16 = ",dtype=bfloat16"


@TABLE.fault(
    28, needs="dtype=bfloat16 or float16, zero=0", case=EVEN_ROW + BF16, invisible=EVEN_ROW, caught_by=("precision",)
)
def no_master_weights() -> list[Replacement]:
    """The optimizer updates the bf16 weights themselves."""

    def broken(parameters: Any, case: Any) -> dict[str, Any]:
        for parameter in parameters.values():
            parameter.grad_dtype = None  # takes the gradient in whatever precision it was summed
        return dict(parameters)

    return [(hw, "master_weights", broken)]


@TABLE.fault(
    28, needs="dtype=bfloat16 or float16, zero=0", case=EVEN_ROW + BF16, invisible=EVEN_ROW, caught_by=("update",)
)
def masters_from_rounded_weights() -> list[Replacement]:
    """After each step the fp32 master weights are taken from the bf16 weights again."""
    original = hw.ZeroStage0.publish

    def broken(self: hw.ZeroStage0) -> None:
        original(self)
        with torch.no_grad():
            for name, own in self.own.items():
                own.copy_(self.parameters[name])

    return [(hw.ZeroStage0, "publish", broken)]


@TABLE.fault(
    28,
    needs="dtype=bfloat16 or float16, accumulate > 1",
    case=EVEN_ROW + BF16 + ",accumulate=4",
    invisible=EVEN_ROW + ",accumulate=4",
    caught_by=("precision",),
)
def bf16_gradient_sums() -> list[Replacement]:
    """Gradients of micro-batches are summed in bf16."""
    original = hw.DataParallel.collect

    def broken(self: hw.DataParallel) -> None:
        original(self)
        self.sums = {name: total.to(LOW).float() for name, total in self.sums.items()}

    return [(hw.DataParallel, "collect", broken)]


@TABLE.fault(
    28,
    needs="dtype=bfloat16 or float16, zero=1 or 2",
    case="handwritten:head=row,zero=1,tp=1,dp=2" + BF16,
    invisible="handwritten:head=row,zero=1,tp=1,dp=2",
    caught_by=("update",),
)
def bf16_flat_part() -> list[Replacement]:
    """ZeRO's flat part is rounded to bf16 after each update, though it is held in fp32."""
    original = hw.ZeroPartitioned.publish

    def broken(self: hw.ZeroPartitioned) -> None:
        original(self)
        if self.low:
            self.own.data.copy_(self.own.data.to(LOW))

    return [(hw.ZeroPartitioned, "publish", broken)]


@TABLE.fault(
    28,
    needs="dtype=float32",
    case=ROW,
    invisible=ROW + ",dtype=float64",
    caught_by=("switches", "precision"),
)
def autocast_left_on() -> list[Replacement]:
    """Autocast to bf16 is on in every rank, left by whoever used the process before."""
    original = train.run_rank

    def broken(case: Any, device: torch.device, *args: Any, **others: Any) -> Any:
        with torch.autocast(device.type, LOW):
            return original(case, device, *args, **others)

    return [(train, "run_rank", broken)]
