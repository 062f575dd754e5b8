"""Classes 9, 10, 21, 22 and 23: data-parallel reductions, accumulation, replicas that drift, stale memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from suites.faults.pieces import (
    DP,
    EVEN_ROW,
    FROZEN_ROW,
    ONE_RANK,
    ROW,
    ZERO1,
    ZERO2,
    around_step,
    before_micro_batch,
    size_of,
)
from suites.faults.table import Replacement, Table
from suites.model import RMSNorm
from suites.paths import handwritten as hw

TABLE = Table("handwritten")
MANY = "dp > 1"


@TABLE.fault(9, needs=MANY + ", zero=0", case=DP, invisible=ONE_RANK, caught_by=("replicas", "gradient"))
def missing_dp_reduce() -> list[Replacement]:
    """The data-parallel reduction is missing."""
    return [(hw, "mean_over_dp", lambda gradient, mesh: gradient)]


@TABLE.fault(9, needs=MANY + ", zero=0", case=DP, invisible=ONE_RANK, caught_by=("gradient", "gradient_norm"))
def dp_sum_for_mean() -> list[Replacement]:
    """The data-parallel reduction sums where it should average."""
    return [(hw, "mean_over_dp", lambda gradient, mesh: hw.all_reduce(gradient, mesh.dp_group))]


@TABLE.fault(9, needs="tp > 1, zero=0", case=ROW, invisible=DP, caught_by=("gradient", "gradient_norm"))
def dp_mean_over_the_world() -> list[Replacement]:
    """The data-parallel sum is divided by the number of all ranks."""
    original = hw.mean_over_dp
    return [(hw, "mean_over_dp", lambda gradient, mesh: original(gradient, mesh) / mesh.tp)]


@TABLE.fault(9, needs="tp > 1, dp > 1, zero=0", case=EVEN_ROW + ",dp=2", invisible=DP, caught_by=("gradient",))
def dp_reduce_over_the_world() -> list[Replacement]:
    """The data-parallel mean is taken over all ranks, whatever shard they hold."""
    world: Any = dist.group.WORLD

    def broken(gradient: Tensor, mesh: hw.Mesh) -> Tensor:
        return hw.all_reduce(gradient, world) / dist.get_world_size()

    return [(hw, "mean_over_dp", broken)]


@TABLE.fault(9, needs=MANY + ", zero=2", case=ZERO2, invisible=ZERO1, caught_by=("gradient", "gradient_norm"))
def scattered_sum_for_mean() -> list[Replacement]:
    """ZeRO 2's reduce-scatter is taken for a mean."""
    original = hw.ZeroPartitioned.reduce

    def broken(self: hw.ZeroPartitioned) -> None:
        original(self)
        if self.stage == 2 and self.own.grad is not None:
            self.own.grad *= self.mesh.dp

    return [(hw.ZeroPartitioned, "reduce", broken)]


@TABLE.fault(10, needs=MANY + ", tie=tied, zero=0", case=DP, invisible=ONE_RANK, caught_by=("gradient", "replicas"))
def projection_added_after_dp_reduce() -> list[Replacement]:
    """The projection's contribution to the tied gradient is added after the data-parallel reduction."""
    held: dict[str, Any] = {}

    class Hold(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: Tensor) -> Tensor:
            return weight.view_as(weight)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            held["gradient"] = held["gradient"] + gradient if "gradient" in held else gradient
            return torch.zeros_like(gradient)

    forward = hw.RowParallelHead.forward
    reduce = hw.ZeroStage0.reduce

    def projected(self: Any, x: Tensor) -> Tensor:
        weight = self._parameters.pop("weight")
        held["weight"] = weight
        self.weight = Hold.apply(weight)
        try:
            return forward(self, x)
        finally:
            del self.weight
            self._parameters["weight"] = weight

    def late(self: hw.ZeroStage0) -> None:
        reduce(self)
        held["weight"].grad = held["weight"].grad + held.pop("gradient")

    return [(hw.RowParallelHead, "forward", projected), (hw.ZeroStage0, "reduce", late)]


@TABLE.fault(10, needs="clip > 0, zero=0", case=DP + ",clip=0.5", invisible=DP, caught_by=("gradient",))
def clipped_before_dp_reduce() -> list[Replacement]:
    """Each rank clips its own gradients before they are reduced."""
    original = hw.ZeroStage0.reduce

    def broken(self: hw.ZeroStage0) -> None:
        if self.case.clip:
            torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), self.case.clip)
        original(self)

    return [(hw.ZeroStage0, "reduce", broken)]


ACCUMULATED = ROW + ",accumulate=2"
MICRO = "accumulate > 1"


@TABLE.fault(21, needs=MICRO, case=ACCUMULATED, invisible=ROW, caught_by=("gradient",))
def overwritten_accumulation() -> list[Replacement]:
    """Each micro-batch overwrites the gradient of the ones before it."""
    return [before_micro_batch(lambda trainer, last: trainer.model.zero_grad(set_to_none=True))]


@TABLE.fault(21, needs=MICRO, case=ACCUMULATED, invisible=ROW, caught_by=("gradient", "gradient_norm"))
def accumulated_twice() -> list[Replacement]:
    """Each micro-batch adds what was there before it once more."""

    def change(trainer: hw.HandwrittenTrainer, last: bool) -> None:
        for parameter in trainer.model.parameters():
            if parameter.grad is not None:
                parameter.grad *= 2

    return [before_micro_batch(change)]


@TABLE.fault(21, needs=MICRO, case=ACCUMULATED, invisible=ROW, caught_by=("gradient", "gradient_norm"))
def accumulated_sum_for_mean() -> list[Replacement]:
    """The micro-batches' losses are summed where they should be averaged."""
    return [before_micro_batch(lambda trainer, last: setattr(trainer, "case", trainer.case.but(accumulate=1)))]


@TABLE.fault(21, needs=MICRO + ", tie=tied", case=ACCUMULATED, invisible=ROW, caught_by=("gradient",))
def tied_accumulation_overwritten() -> list[Replacement]:
    """Only the tied weight's gradient is overwritten by the next micro-batch."""
    return [before_micro_batch(lambda trainer, last: setattr(trainer.model.lm_head.weight, "grad", None))]


@TABLE.fault(22, needs=MANY, case=DP, invisible=ONE_RANK, caught_by=("replicas",))
def skipped_replica_update() -> list[Replacement]:
    """One data-parallel rank skips its update."""

    def before(trainer: hw.HandwrittenTrainer) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}

    def after(trainer: hw.HandwrittenTrainer, kept: dict[str, Tensor]) -> None:
        for name, parameter in trainer.model.named_parameters():
            if trainer.dp_rank == 1:
                parameter.copy_(kept[name])

    return [around_step(before, after)]


@TABLE.fault(22, needs="tp > 1", case=ROW, invisible=ONE_RANK, caught_by=("replicas",))
def drifting_normalisation() -> list[Replacement]:
    """The normalisations, whole on every rank, are not updated on the second tensor-parallel rank."""

    def before(trainer: hw.HandwrittenTrainer) -> list[tuple[Tensor, Tensor]]:
        norms = [m.weight for m in trainer.model.modules() if isinstance(m, RMSNorm)]
        return [(weight, weight.detach().clone()) for weight in norms]

    def after(trainer: hw.HandwrittenTrainer, kept: list[tuple[Tensor, Tensor]]) -> None:
        for weight, old in kept:
            if trainer.tp_rank == 1:
                weight.copy_(old)

    return [around_step(before, after)]


@TABLE.fault(22, needs=MANY + ", zero=0", case=DP, invisible=ONE_RANK, caught_by=("replicas",))
def other_learning_rate() -> list[Replacement]:
    """One data-parallel rank's learning rate is 1 % larger."""

    def before(trainer: hw.HandwrittenTrainer) -> None:
        for group in trainer.data_parallel.optimizer.param_groups:
            group.setdefault("first_lr", group["lr"])
            group["lr"] = group["first_lr"] * (1.01 if trainer.dp_rank == 1 else 1.0)

    return [around_step(before, lambda trainer, kept: None)]


@TABLE.fault(22, needs="tp > 1", case=ROW, invisible=ONE_RANK, caught_by=("replicas",))
def last_bit_drift() -> list[Replacement]:
    """The final normalisation's weight drifts by one unit in the last place on one rank."""

    def after(trainer: hw.HandwrittenTrainer, kept: None) -> None:
        if trainer.tp_rank == 1:
            weight = trainer.model.norm.weight
            weight[0] = torch.nextafter(weight[0], torch.full_like(weight[0], torch.inf))

    return [around_step(lambda trainer: None, after)]


@TABLE.fault(23, needs="zero=1 or 2", case=ZERO2, invisible=DP, caught_by=("update",))
def late_publish() -> list[Replacement]:
    """Updated parts reach the model one step late."""
    original = hw.ZeroPartitioned.publish

    def broken(self: Any) -> None:
        late = getattr(self, "late", None)
        self.late = self.own.detach().clone()
        if late is not None:
            now, self.own.data = self.own.data, late
            original(self)
            self.own.data = now

    return [(hw.ZeroPartitioned, "publish", broken)]


@TABLE.fault(23, needs="tp > 1", case=ROW, invisible=ONE_RANK, caught_by=("gradient",))
def reused_buffer() -> list[Replacement]:
    """All reductions of one shape write into one buffer while its last result is still in use."""
    original = hw.all_reduce
    buffers: dict[tuple[Any, ...], Tensor] = {}

    def broken(tensor: Tensor, group: dist.ProcessGroup, op: Any = dist.ReduceOp.SUM) -> Tensor:
        reduced = original(tensor, group, op)
        if size_of(group) == 1:
            return reduced
        buffer = buffers.setdefault((tuple(reduced.shape), reduced.dtype), reduced)
        buffer.data.copy_(reduced)
        return buffer.detach()

    return [(hw, "all_reduce", broken)]


@TABLE.fault(23, needs="an embedding that is trained, zero=0", case=ROW, invisible=FROZEN_ROW, caught_by=("gradient",))
def gradient_not_cleared() -> list[Replacement]:
    """The head's gradient is not cleared after the update and stays in the next step's."""

    def before(trainer: hw.HandwrittenTrainer) -> Tensor | None:
        gradient = trainer.model.lm_head.weight.grad
        return None if gradient is None else gradient.clone()

    def after(trainer: hw.HandwrittenTrainer, kept: Tensor | None) -> None:
        trainer.model.lm_head.weight.grad = kept

    return [around_step(before, after)]


@TABLE.fault(23, needs="zero=2, dp > 1", case=ZERO2, invisible=ZERO1, caught_by=("gradient",))
def unwaited_reduce_scatter() -> list[Replacement]:
    """ZeRO 2 uses its part of the gradient before the reduce-scatter into it has ended: it reads the last step's."""
    original = hw.ZeroPartitioned.reduce

    def broken(self: Any) -> None:
        original(self)
        if self.stage == 2:
            new = self.own.grad.clone()
            self.own.grad.copy_(getattr(self, "unfinished", torch.zeros_like(new)))
            self.unfinished = new

    return [(hw.ZeroPartitioned, "reduce", broken)]
