"""Classes 6, 7, 8 and 27: reductions over tensor-parallel ranks that are missing, doubled, of the wrong tensor, outside
autograd, or not the same on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from suites.cases import Case
from suites.faults.pieces import (
    DP,
    EVEN_VOCAB,
    ONE_RANK,
    ONE_RANK_VOCAB,
    ROW,
    VOCAB,
    after_sharding,
)
from suites.faults.table import Replacement, Table
from suites.model import Decoder, RMSNorm
from suites.paths import handwritten as hw

TABLE = Table("handwritten")
TP = "tp > 1"


@TABLE.fault(6, needs=TP, case=VOCAB, invisible=ONE_RANK_VOCAB, caught_by=("gradient",))
def unreduced_input_gradient() -> list[Replacement]:
    """The gradient below every column-parallel layer and the vocabulary head is not reduced."""
    return [(hw.CopyToTP, "backward", staticmethod(lambda ctx, g: (g, None)))]


@TABLE.fault(6, needs=TP + ", head=vocab", case=EVEN_VOCAB, invisible=ONE_RANK_VOCAB, caught_by=("gradient",))
def unreduced_gradient_below_head() -> list[Replacement]:
    """The gradient below the vocabulary head alone is not reduced."""
    broken = lambda self, x: F.linear(x, self.weight, self.bias)  # noqa: E731
    return [(hw.VocabParallelHead, "forward", broken)]


@TABLE.fault(6, needs=TP + ", head=row", case=ROW, invisible=ONE_RANK, caught_by=("gradient",))
def ungathered_gradient_below_head() -> list[Replacement]:
    """Below the row head each rank keeps its own slice of the gradient, with zeros for the others'."""

    def broken(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        before = sum(ctx.sizes[: ctx.mesh.tp_rank])
        return F.pad(gradient, (before, sum(ctx.sizes) - before - gradient.shape[-1])), None, None

    return [(hw.ScatterToTP, "backward", staticmethod(broken))]


@TABLE.fault(7, needs=TP, case=ROW, invisible=ONE_RANK, caught_by=("gradient", "gradient_norm"))
def reduced_twice() -> list[Replacement]:
    """The gradient into every row-parallel layer and the head is reduced once more."""
    broken = lambda ctx, g: (hw.all_reduce(g, ctx.mesh.tp_group), None)  # noqa: E731
    original = hw.ReduceFromTP.forward

    def forward(ctx: Any, x: Tensor, mesh: hw.Mesh) -> Tensor:
        ctx.mesh = mesh
        return original(ctx, x, mesh)

    return [(hw.ReduceFromTP, "forward", staticmethod(forward)), (hw.ReduceFromTP, "backward", staticmethod(broken))]


@TABLE.fault(7, needs=TP + ", head=vocab", case=VOCAB, invisible=ONE_RANK_VOCAB, caught_by=("gradient",))
def gradient_below_head_reduced_twice() -> list[Replacement]:
    """The gradient below the vocabulary head is reduced by the head and by the layer that calls it."""
    original = hw.VocabParallelHead.forward
    broken = lambda self, x: original(self, hw.CopyToTP.apply(x, self.mesh))  # noqa: E731
    return [(hw.VocabParallelHead, "forward", broken)]


@TABLE.fault(7, needs=TP + ", even shards", case=EVEN_VOCAB, invisible=ONE_RANK_VOCAB, caught_by=("gradient",))
def tied_gradient_reduced_over_shards() -> list[Replacement]:
    """The tied weight's gradient is summed over tensor-parallel ranks, though each holds other rows."""

    def change(model: Decoder, case: Case, mesh: hw.Mesh) -> None:
        weight = model.lm_head.weight
        weight.register_hook(lambda g: hw.all_reduce(g, mesh.tp_group))

    return [after_sharding(change)]


@TABLE.fault(7, needs=TP, case=ROW, invisible=ONE_RANK, caught_by=("gradient", "gradient_norm"))
def norm_gradient_reduced() -> list[Replacement]:
    """The gradients of the normalisations, whole on every rank, are summed as sequence parallelism would need it."""

    def change(model: Decoder, case: Case, mesh: hw.Mesh) -> None:
        for module in model.modules():
            if isinstance(module, RMSNorm) and module.weight.requires_grad:
                module.weight.register_hook(lambda g: hw.all_reduce(g, mesh.tp_group))

    return [after_sharding(change)]


@TABLE.fault(7, needs=TP + ", head=row", case=ROW, invisible=ONE_RANK, caught_by=("logits", "loss"))
def logits_reduced_twice() -> list[Replacement]:
    """The row head's logits are summed over the ranks twice."""
    original = hw.RowParallelHead.forward
    broken = lambda self, x: hw.ReduceFromTP.apply(original(self, x), self.mesh)  # noqa: E731
    return [(hw.RowParallelHead, "forward", broken)]


@TABLE.fault(
    8,
    needs=TP + ", activation=transposed",
    case=VOCAB + ",activation=transposed",
    invisible=VOCAB,
    caught_by=("gradient",),
)
def dropped_copy() -> list[Replacement]:
    """The gradient of a strided activation is reduced in a contiguous copy, and the copy is dropped."""

    def forward(ctx: Any, x: Tensor, mesh: hw.Mesh) -> Tensor:
        ctx.mesh, ctx.stride = mesh, x.stride()
        return x.view_as(x)

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        laid_out = torch.empty_strided(gradient.shape, ctx.stride, dtype=gradient.dtype, device=gradient.device)
        laid_out.copy_(gradient)  # a gradient has its activation's layout
        dist.all_reduce(laid_out.contiguous(), group=ctx.mesh.tp_group)
        return laid_out, None

    return [(hw.CopyToTP, "forward", staticmethod(forward)), (hw.CopyToTP, "backward", staticmethod(backward))]


@TABLE.fault(8, needs=TP + ", head=row", case=ROW, invisible=ONE_RANK, caught_by=("gradient",))
def lookup_gathered_outside_autograd() -> list[Replacement]:
    """The hidden slices of the lookup are put together by a collective that autograd does not know."""

    def broken(self: hw.HiddenParallelEmbedding, tokens: Tensor) -> Tensor:
        found = F.embedding(tokens, self.weight, padding_idx=self.padding_idx)
        return found if self.mesh.tp == 1 else hw.all_gather_last(found.detach(), self.mesh.tp_group, self.sizes)

    return [(hw.HiddenParallelEmbedding, "forward", broken)]


@TABLE.fault(8, needs=TP, case=ROW, invisible=ONE_RANK, caught_by=("gradient",))
def reduction_outside_autograd() -> list[Replacement]:
    """Partial sums are reduced outside autograd: of the row-parallel layers only the first rank's has a gradient."""
    original = hw.RowParallel.forward

    def broken(self: hw.RowParallel, x: Tensor) -> Tensor:
        if self.mesh.tp == 1:
            return original(self, x)
        partial = F.linear(x, self.weight)
        own = partial * (1.0 if self.mesh.tp_rank == 0 else 0.0)
        return hw.all_reduce(partial.detach(), self.mesh.tp_group) + (own - own.detach())

    return [(hw.RowParallel, "forward", broken)]


@TABLE.fault(27, needs=TP + ", head=vocab", case=VOCAB, invisible=ONE_RANK_VOCAB, caught_by=("hang",))
def skipped_collective() -> list[Replacement]:
    """One rank skips a collective."""
    original = hw.global_maximum
    broken = lambda logits, mesh: logits.amax(-1) if mesh.tp_rank == 1 else original(logits, mesh)  # noqa: E731
    return [(hw, "global_maximum", broken)]


@TABLE.fault(27, needs="dp > 1, tp > 1", case=DP.replace("tp=1,", ""), invisible=ONE_RANK, caught_by=("collectives",))
def uneven_collectives() -> list[Replacement]:
    """One data-parallel replica reduces once more than the other, within a group of its own: the numbers are right."""
    original = hw.mean_over_dp

    def broken(gradient: Tensor | None, mesh: hw.Mesh) -> Tensor:
        if mesh.dp_rank == 1 and gradient is not None:
            hw.all_reduce(gradient, mesh.tp_group)
        return original(gradient, mesh)

    return [(hw, "mean_over_dp", broken)]


@TABLE.fault(27, needs="dp > 1", case=DP, invisible=ONE_RANK, caught_by=("gradient", "replicas"))
def crossed_collectives() -> list[Replacement]:
    """One rank reduces two gradients of equal shape in the other order: each is added to the other rank's other one."""
    original = hw.ZeroStage0.reduce
    gate, up = "layers.0.gate_proj.weight", "layers.0.up_proj.weight"

    def broken(self: hw.ZeroStage0) -> None:
        kept = self.own
        if self.mesh.dp_rank == 1:
            order = [{gate: up, up: gate}.get(name, name) for name in kept]
            self.own = {name: kept[name] for name in order}
        original(self)
        self.own = kept

    return [(hw.ZeroStage0, "reduce", broken)]
