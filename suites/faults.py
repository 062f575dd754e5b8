"""Faults: bugs put into the hand-written path on purpose, to prove that the oracles can see them (rule 4 of the
design).

Each fault replaces one small function of `suites.paths.handwritten`, names the class of public bugs it stands for
(suites/README.md has the list), a case that shows it, and the oracles that must flag it there. ``tiebench run --case ID
--fault NAME`` runs any case with it. To add one: a function with the `_fault` decorator below.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from suites import optimizers
from suites.cases import Case
from suites.data import MicroBatch
from suites.paths import handwritten as hw

Replacement = tuple[Any, str, Any]  # owner, attribute, what stands there instead


@dataclass(frozen=True)
class Fault:
    """One bug on purpose.

    Args:
        bug_class: number of the class of public bugs.
        meaning: what goes wrong, for people.
        case: id of a case that shows it.
        caught_by: oracles that must flag that case; ``hang`` where the watchdog must end it.
        replacements: what to put in place of what; made anew at each use.
    """

    name: str
    bug_class: int
    meaning: str
    case: str
    caught_by: tuple[str, ...]
    replacements: Callable[[], list[Replacement]]


FAULTS: dict[str, Fault] = {}


@contextlib.contextmanager
def apply(name: str) -> Iterator[None]:
    """Put the fault in, in this process, until the block ends.

    Raises:
        KeyError: no such fault.
    """
    with contextlib.ExitStack() as stack:
        for owner, attribute, replacement in FAULTS[name].replacements():
            stack.enter_context(mock.patch.object(owner, attribute, replacement))
        yield


def _fault(bug_class: int, meaning: str, case: str, *caught_by: str) -> Callable[..., Any]:
    def register(function: Callable[[], list[Replacement]]) -> Callable[[], list[Replacement]]:
        name = function.__name__
        FAULTS[name] = Fault(name, bug_class, meaning, Case.parse(case).id, caught_by, function)
        return function

    return register


ROW = "handwritten:head=row,hidden=35"
VOCAB = "handwritten:head=vocab,vocab=67"
DP = "handwritten:head=row,dp=2"


@_fault(1, "the head's weight is a copy after sharding", ROW, "tie", "gradient")
def copied_tie() -> list[Replacement]:  # noqa: D103 - the decorator says it, here and below
    original = hw.shard_model

    def broken(model: Any, case: Case, mesh: hw.Mesh) -> None:
        original(model, case, mesh)
        copy = nn.Parameter(model.lm_head.weight.detach().clone())
        copy.tp_dim = model.lm_head.weight.tp_dim  # type: ignore[attr-defined]
        model.lm_head.weight = copy

    return [(hw, "shard_model", broken)]


@_fault(2, "each module cuts its own shard, so the first replacement breaks the tie", VOCAB, "tie", "gradient")
def cut_per_module() -> list[Replacement]:  # noqa: D103
    original = hw.Sharder.cut

    def broken(self: hw.Sharder, whole: Tensor, dim: int) -> nn.Parameter:
        self._shards.clear()
        return original(self, whole, dim)

    return [(hw.Sharder, "cut", broken)]


@_fault(3, "an untied model is tied by mistake", "handwritten:tie=untied,head=row", "tie", "start", "census")
def unwanted_tie() -> list[Replacement]:  # noqa: D103
    original = hw.shard_model

    def broken(model: Any, case: Case, mesh: hw.Mesh) -> None:
        original(model, case, mesh)
        model.tie()

    return [(hw, "shard_model", broken)]


def _detached(cls: type[nn.Module]) -> Replacement:
    original = cls.forward

    def broken(self: Any, tokens: Tensor) -> Tensor:
        weight = self.weight
        del self._parameters["weight"]
        self.weight = weight.detach().requires_grad_(False)
        try:
            return original(self, tokens)
        finally:
            del self.weight
            self.weight = weight

    return (cls, "forward", broken)


@_fault(4, "the lookup's contribution is missing from the tied gradient (row head)", ROW, "gradient")
def detached_lookup_hidden() -> list[Replacement]:  # noqa: D103
    return [_detached(hw.HiddenParallelEmbedding)]


@_fault(4, "the lookup's contribution is missing from the tied gradient (vocabulary head)", VOCAB, "gradient")
def detached_lookup_vocab() -> list[Replacement]:  # noqa: D103
    return [_detached(hw.VocabParallelEmbedding)]


@_fault(5, "the lookup's contribution is divided by the number of shards", ROW, "gradient")
def scaled_lookup() -> list[Replacement]:  # noqa: D103
    original = hw.GatherFromTP.backward
    broken = lambda ctx, g: (original(ctx, g)[0] / len(ctx.sizes), None, None)  # noqa: E731
    return [(hw.GatherFromTP, "backward", staticmethod(broken))]


@_fault(6, "the gradient below the vocabulary head is not reduced", VOCAB, "gradient")
def unreduced_input_gradient() -> list[Replacement]:  # noqa: D103
    return [(hw.CopyToTP, "backward", staticmethod(lambda ctx, g: (g, None)))]


@_fault(7, "a gradient is reduced twice", ROW, "gradient", "gradient_norm")
def reduced_twice() -> list[Replacement]:  # noqa: D103
    def forward(ctx: Any, x: Tensor, mesh: hw.Mesh) -> Tensor:
        ctx.mesh = mesh
        return hw.all_reduce(x, mesh.tp_group)

    backward = lambda ctx, g: (hw.all_reduce(g, ctx.mesh.tp_group), None)  # noqa: E731
    return [(hw.ReduceFromTP, "forward", staticmethod(forward)), (hw.ReduceFromTP, "backward", staticmethod(backward))]


@_fault(
    8, "reduction into a contiguous copy that is dropped", "handwritten:head=vocab,activation=transposed", "gradient"
)
def dropped_copy() -> list[Replacement]:  # noqa: D103
    def broken(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        strided = gradient.transpose(0, 1).contiguous().transpose(0, 1)
        copy = strided.contiguous()  # what was meant to be reduced in place is a copy of the strided tensor
        dist.all_reduce(copy, group=ctx.mesh.tp_group)
        return (strided if ctx.mesh.tp > 1 else copy), None

    return [(hw.CopyToTP, "backward", staticmethod(broken))]


@_fault(9, "the data-parallel reduction is missing", DP, "replicas", "gradient")
def missing_dp_reduce() -> list[Replacement]:  # noqa: D103
    return [(hw, "mean_over_dp", lambda gradient, mesh: gradient)]


@_fault(9, "the data-parallel reduction sums where it should average", DP, "gradient", "gradient_norm")
def dp_sum_for_mean() -> list[Replacement]:  # noqa: D103
    return [(hw, "mean_over_dp", lambda gradient, mesh: hw.all_reduce(gradient, mesh.dp_group))]


@_fault(11, "each shard thinks that it starts one row later", VOCAB, "logits", "loss", "gradient")
def shifted_boundary() -> list[Replacement]:  # noqa: D103
    original = hw.VocabParallelEmbedding.__init__

    def broken(self: Any, *args: Any) -> None:
        original(self, *args)
        self.start, self.end = self.start + 1, self.end + 1

    def clamped(self: Any, tokens: Tensor) -> Tensor:
        outside = (tokens < self.start) | (tokens >= self.end)
        local = (tokens - self.start).masked_fill(outside, 0)
        return hw.ReduceFromTP.apply(F.embedding(local, self.weight).masked_fill(outside.unsqueeze(-1), 0), self.mesh)

    return [(hw.VocabParallelEmbedding, "__init__", broken), (hw.VocabParallelEmbedding, "forward", clamped)]


@_fault(11, "the last tensor-parallel shard of the head is never updated", VOCAB, "update")
def frozen_last_shard() -> list[Replacement]:  # noqa: D103
    original = hw.HandwrittenTrainer.step

    def broken(self: hw.HandwrittenTrainer) -> float:
        weight = self.model.lm_head.weight
        before = weight.detach().clone()
        norm = original(self)
        if self.tp_rank == self.mesh.tp - 1:
            weight.data.copy_(before)
        return norm

    return [(hw.HandwrittenTrainer, "step", broken)]


@_fault(12, "padding_idx is the global row on every shard", VOCAB + ",padding_idx=3", "gradient")
def global_padding_idx() -> list[Replacement]:  # noqa: D103
    return [(hw, "local_padding_idx", lambda padding_idx, start, end: padding_idx)]


@_fault(13, "ignored labels count in the mean", VOCAB, "loss", "gradient")
def ignored_labels_count() -> list[Replacement]:  # noqa: D103
    def broken(self: Any, logits: Tensor, labels: Tensor, **_: object) -> Tensor:
        losses = hw.VocabParallelCrossEntropy.apply(logits.flatten(0, 1), labels.flatten(), self.start, self.mesh)
        return losses.mean()

    return [(hw.VocabParallelLoss, "__call__", broken)]


@_fault(16, "the softmax is shifted by each shard's own maximum", VOCAB, "loss", "gradient")
def local_maximum() -> list[Replacement]:  # noqa: D103
    return [
        (hw, "global_maximum", lambda logits, mesh: hw.all_reduce(logits.amax(-1), mesh.tp_group) * 0 + logits.amax(-1))
    ]


@_fault(17, "the sharded loss ignores its upstream gradient", VOCAB, "gradient")
def ignored_upstream_gradient() -> list[Replacement]:  # noqa: D103
    original = hw.VocabParallelCrossEntropy.backward
    broken = lambda ctx, g: original(ctx, torch.full_like(g, 1 / g.numel()))  # noqa: E731
    return [(hw.VocabParallelCrossEntropy, "backward", staticmethod(broken))]


@_fault(18, "the gradient norm counts replicated weights on every rank", ROW, "gradient_norm")
def norm_counts_replicas() -> list[Replacement]:  # noqa: D103
    return [(hw, "squared_norm", lambda parameter, gradient, mesh: gradient.square().sum())]


@_fault(19, "each rank clips by a norm of its own", ROW + ",clip=1", "replicas", "gradient_norm")
def local_norm() -> list[Replacement]:  # noqa: D103
    def broken(self: hw.ZeroStage0) -> float:
        norm = (
            torch.stack([p.grad.square().sum() for p in self.parameters.values() if p.grad is not None])
            .sum()
            .sqrt()
            .item()
        )
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad *= optimizers.clip_coefficient(norm, self.case.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    return [(hw.ZeroStage0, "step", broken)]


@_fault(
    20,
    "the optimizer holds the tied weight under both of its names",
    "handwritten:head=row,dp=2,zero=1",
    "census",
    "gradient_norm",
)
def weight_held_twice() -> list[Replacement]:  # noqa: D103
    both = lambda model: {n: p for n, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}  # noqa: E731
    return [(hw, "trained_once", both)]


@_fault(21, "accumulation overwrites the earlier micro-batch's gradient", ROW + ",accumulate=2", "gradient")
def overwritten_accumulation() -> list[Replacement]:  # noqa: D103
    original = hw.HandwrittenTrainer.forward_backward

    def broken(self: hw.HandwrittenTrainer, micro: MicroBatch, last: bool) -> tuple[Tensor, Tensor]:
        self.model.zero_grad(set_to_none=True)
        return original(self, micro, last)

    return [(hw.HandwrittenTrainer, "forward_backward", broken)]


@_fault(22, "one data-parallel rank skips its update", DP, "replicas")
def skipped_replica_update() -> list[Replacement]:  # noqa: D103
    original = hw.HandwrittenTrainer.step

    def broken(self: hw.HandwrittenTrainer) -> float:
        before = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        norm = original(self)
        if self.dp_rank == 1:
            for name, parameter in self.model.named_parameters():
                parameter.data.copy_(before[name])
        return norm

    return [(hw.HandwrittenTrainer, "step", broken)]


@_fault(23, "updated parts reach the model one step late", "handwritten:head=vocab,dp=2,zero=2", "update")
def late_publish() -> list[Replacement]:  # noqa: D103
    original = hw.ZeroPartitioned.publish

    def broken(self: Any) -> None:
        late = getattr(self, "late", None)
        self.late = self.own.detach().clone()
        if late is not None:
            now, self.own.data = self.own.data, late
            original(self)
            self.own.data = now

    return [(hw.ZeroPartitioned, "publish", broken)]


@_fault(24, "every rank is given the first shard", VOCAB.replace("67", "64"), "start")
def same_shard_everywhere() -> list[Replacement]:  # noqa: D103
    original = hw.Sharder.cut

    def broken(self: hw.Sharder, whole: Tensor, dim: int) -> nn.Parameter:
        shard = original(self, whole, dim)
        first = whole.detach().tensor_split(self.mesh.tp, dim)[0]
        if first.shape == shard.shape:
            shard.data.copy_(first)
        return shard

    return [(hw.Sharder, "cut", broken)]


@_fault(25, "the optimizer forgets its moments", ROW + ",optimizer=momentum", "update")
def forgotten_moments() -> list[Replacement]:  # noqa: D103
    original = hw.ZeroStage0.step

    def broken(self: hw.ZeroStage0) -> float:
        self.optimizer.state.clear()
        return original(self)

    return [(hw.ZeroStage0, "step", broken)]


@_fault(27, "one rank skips a collective", VOCAB, "hang")
def skipped_collective() -> list[Replacement]:  # noqa: D103
    original = hw.global_maximum
    broken = lambda logits, mesh: logits.amax(-1) if mesh.tp_rank == 1 else original(logits, mesh)  # noqa: E731
    return [(hw, "global_maximum", broken)]


@_fault(27, "one data-parallel replica reduces once more than the other", DP, "collectives")
def uneven_collectives() -> list[Replacement]:  # noqa: D103
    original = hw.mean_over_dp

    def broken(gradient: Tensor | None, mesh: hw.Mesh) -> Tensor:
        if mesh.dp_rank == 1 and gradient is not None:  # within one replica's own group: no hang, and the right numbers
            hw.all_reduce(gradient, mesh.tp_group)
        return original(gradient, mesh)

    return [(hw, "mean_over_dp", broken)]


@_fault(28, "tensor-parallel reductions run in bf16", ROW, "gradient", "logits")
def bf16_reduction() -> list[Replacement]:  # noqa: D103
    original = hw.all_reduce

    def broken(tensor: Tensor, group: dist.ProcessGroup, op: Any = dist.ReduceOp.SUM) -> Tensor:
        return original(tensor.to(torch.bfloat16), group, op).to(tensor.dtype)

    return [(hw, "all_reduce", broken)]


@_fault(30, "the model is not sharded at all: every rank trains all of it", ROW, "layout", "collectives")
def unsharded_fallback() -> list[Replacement]:  # noqa: D103
    return [(hw, "shard_model", lambda model, case, mesh: None), (hw.ZeroStage0, "step", _local_step)]


def _local_step(self: hw.ZeroStage0) -> float:
    norm = (
        torch.stack([p.grad.square().sum() for p in self.parameters.values() if p.grad is not None]).sum().sqrt().item()
    )
    self.optimizer.step()
    self.optimizer.zero_grad(set_to_none=True)
    return norm


@_fault(30, "ZeRO 2 was asked for and plain data parallelism runs", "handwritten:head=row,dp=2,zero=2", "layout")
def zero_fallback() -> list[Replacement]:  # noqa: D103
    return [(hw, "ZeroPartitioned", hw.ZeroStage0)]


@_fault(30, "ZeRO 2 was asked for and ZeRO 1 runs", "handwritten:head=row,dp=2,zero=2", "layout")
def zero_1_for_2() -> list[Replacement]:  # noqa: D103
    original = hw.ZeroPartitioned.reduce

    def broken(self: hw.ZeroPartitioned) -> None:
        self.case = self.case.but(zero=1)
        original(self)

    return [(hw.ZeroPartitioned, "reduce", broken)]


@_fault(30, "one parameter's gradient is not reported", ROW, "complete")
def missing_gradient() -> list[Replacement]:  # noqa: D103
    original = hw.HandwrittenTrainer.gradients
    return [
        (
            hw.HandwrittenTrainer,
            "gradients",
            lambda self: {n: p for n, p in original(self).items() if n != "norm.weight"},
        )
    ]


@_fault(
    31, "the row head adds its bias on every rank before the sum", ROW + ",head_bias=yes", "logits", "loss", "gradient"
)
def bias_on_every_rank() -> list[Replacement]:  # noqa: D103
    def broken(self: hw.RowParallelHead, x: Tensor) -> Tensor:
        partial = F.linear(hw.ScatterToTP.apply(x, self.mesh, self.sizes), self.weight, self.bias)
        return hw.ReduceFromTP.apply(partial, self.mesh)

    return [(hw.RowParallelHead, "forward", broken)]


def describe() -> Mapping[str, str]:
    """Name and meaning of every fault."""
    return {name: f"class {fault.bug_class}: {fault.meaning}" for name, fault in FAULTS.items()}
