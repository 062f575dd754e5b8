"""What the modules of faults of the hand-written path share: a few cases, and ways to get between its parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from suites.cases import Case
from suites.data import MicroBatch
from suites.faults.table import Replacement
from suites.model import Decoder
from suites.paths import handwritten as hw

# Uneven shards, so that rows that are mixed up show; one rank each of tensor and data parallelism where one is enough.
ROW = "handwritten:head=row,hidden=35"
VOCAB = "handwritten:head=vocab,vocab=67"
GATHERED = "handwritten:head=gathered,vocab=67"
DP = "handwritten:head=row,tp=1,dp=2"
ZERO1 = "handwritten:head=row,zero=1,tp=1,dp=2"
ZERO2 = "handwritten:head=row,zero=2,tp=1,dp=2"

# In these nothing is sharded, replicated, tied, …
ONE_RANK = "handwritten:head=row,tp=1"
ONE_RANK_VOCAB = "handwritten:head=vocab,tp=1"
ONE_RANK_GATHERED = "handwritten:head=gathered,tp=1"
ONE_RANK_ADAMW = "handwritten:head=row,tp=1,optimizer=adamw"
EVEN_ROW = "handwritten:head=row"
EVEN_VOCAB = "handwritten:head=vocab"
UNTIED_ROW = "handwritten:tie=untied,head=row"
UNTIED_VOCAB = "handwritten:tie=untied,head=vocab"
FROZEN_ROW = "handwritten:head=row,frozen=embedding"
FROZEN_VOCAB = "handwritten:head=vocab,frozen=embedding"


def after_sharding(change: Callable[[Decoder, Case, hw.Mesh], None]) -> Replacement:
    """Change the sharded model before the optimizer is made of it."""
    original = hw.shard_model

    def broken(model: Decoder, case: Case, mesh: hw.Mesh) -> None:
        original(model, case, mesh)
        change(model, case, mesh)

    return (hw, "shard_model", broken)


def before_sharding(change: Callable[[Decoder, Case, hw.Mesh], None]) -> Replacement:
    """Change the unsharded model, initial weights and all."""
    original = hw.shard_model

    def broken(model: Decoder, case: Case, mesh: hw.Mesh) -> None:
        change(model, case, mesh)
        original(model, case, mesh)

    return (hw, "shard_model", broken)


def around_step(
    before: Callable[[hw.HandwrittenTrainer], Any], after: Callable[[hw.HandwrittenTrainer, Any], None]
) -> Replacement:
    """Do something before each update, and something with its result after it, without a gradient."""
    original = hw.HandwrittenTrainer.step

    def broken(self: hw.HandwrittenTrainer) -> float:
        kept = before(self)
        norm = original(self)
        with torch.no_grad():
            after(self, kept)
        return norm

    return (hw.HandwrittenTrainer, "step", broken)


def before_micro_batch(change: Callable[[hw.HandwrittenTrainer, bool], None]) -> Replacement:
    """Do something before each micro-batch; the second argument says whether it is the step's last."""
    original = hw.HandwrittenTrainer.forward_backward

    def broken(self: hw.HandwrittenTrainer, micro: MicroBatch, last: bool) -> tuple[Tensor, Tensor]:
        change(self, last)
        return original(self, micro, last)

    return (hw.HandwrittenTrainer, "forward_backward", broken)


def separate(module: nn.Module) -> None:
    """Give a sharded module's weight a copy of its own."""
    weight: Any = module.weight
    copy: Any = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
    if hasattr(weight, "tp_dim"):
        copy.tp_dim = weight.tp_dim
    module.weight = copy


class ScaledGradient(torch.autograd.Function):
    """Identity whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        """Identity."""
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """The gradient times the factor."""
        return gradient * ctx.factor, None


def using(cls: type[nn.Module], change: Callable[[Any, Tensor], Tensor]) -> Replacement:
    """Let a module's forward use ``change(module, weight)`` for its weight; the parameter itself stays what it is."""
    original: Any = cls.forward

    def broken(self: Any, x: Tensor) -> Tensor:
        weight = self._parameters.pop("weight")
        self.weight = change(self, weight)
        try:
            return original(self, x)
        finally:
            del self.weight
            self._parameters["weight"] = weight

    return (cls, "forward", broken)


def size_of(group: torch.distributed.ProcessGroup) -> int:
    """Number of ranks in a group."""
    return torch.distributed.get_world_size(group)
