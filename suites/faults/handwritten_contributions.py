"""Classes 4, 5 and 31: a contribution to a gradient is missing or scaled; a bias counts once a rank."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from suites.cases import Case
from suites.faults.pieces import (
    EVEN_ROW,
    FROZEN_ROW,
    FROZEN_VOCAB,
    ONE_RANK,
    ONE_RANK_VOCAB,
    ROW,
    VOCAB,
    ScaledGradient,
    after_sharding,
    using,
)
from suites.faults.table import Replacement, Table
from suites.model import Decoder
from suites.paths import handwritten as hw

TABLE = Table("handwritten")
TRAINED = "an embedding that is trained"
BIASED = ROW + ",head_bias=yes"


def _detached(module: Any, weight: Tensor) -> Tensor:
    return weight.detach()


@TABLE.fault(4, needs=TRAINED, case=ROW, invisible=FROZEN_ROW, caught_by=("gradient",))
def detached_lookup_hidden() -> list[Replacement]:
    """The lookup's contribution is missing from the tied gradient (row head)."""
    return [using(hw.HiddenParallelEmbedding, _detached)]


@TABLE.fault(4, needs=TRAINED, case=VOCAB, invisible=FROZEN_VOCAB, caught_by=("gradient",))
def detached_lookup_vocab() -> list[Replacement]:
    """The lookup's contribution is missing from the tied gradient (vocabulary head)."""
    return [using(hw.VocabParallelEmbedding, _detached)]


@TABLE.fault(4, needs=TRAINED, case=ROW, invisible=FROZEN_ROW, caught_by=("gradient",))
def detached_projection_hidden() -> list[Replacement]:
    """The projection's contribution is missing from the tied gradient (row head)."""
    return [using(hw.RowParallelHead, _detached)]


@TABLE.fault(4, needs=TRAINED + ", tp > 1", case=VOCAB, invisible=ONE_RANK_VOCAB, caught_by=("gradient",))
def detached_projection_on_one_rank() -> list[Replacement]:
    """The projection's contribution is missing from the last rank's part of the vocabulary."""
    change = lambda head, weight: weight.detach() if 0 < head.mesh.tp_rank == head.mesh.tp - 1 else weight  # noqa: E731
    return [using(hw.VocabParallelHead, change)]


@TABLE.fault(5, needs="tp > 1", case=ROW, invisible=ONE_RANK, caught_by=("gradient",))
def scaled_lookup() -> list[Replacement]:
    """The lookup's contribution is divided by the number of shards."""
    original = hw.GatherFromTP.backward
    broken = lambda ctx, g: (original(ctx, g)[0] / len(ctx.sizes), None, None)  # noqa: E731
    return [(hw.GatherFromTP, "backward", staticmethod(broken))]


@TABLE.fault(5, needs="tp > 1", case=VOCAB, invisible=ONE_RANK_VOCAB, caught_by=("gradient",))
def projection_divided_by_ranks() -> list[Replacement]:
    """The projection's contribution is divided by the number of ranks, as if all had computed all of it."""
    change = lambda head, weight: ScaledGradient.apply(weight, 1 / head.mesh.tp)  # noqa: E731
    return [using(hw.VocabParallelHead, change)]


@TABLE.fault(
    5, needs="embedding_scale other than 1", case=ROW + ",embedding_scale=5.5", invisible=ROW, caught_by=("gradient",)
)
def embedding_scale_twice() -> list[Replacement]:
    """The embedding's scale is applied twice to the lookup's gradient."""

    def change(model: Decoder, case: Case, mesh: hw.Mesh) -> None:
        hook = lambda module, tokens, found: ScaledGradient.apply(found, case.embedding_scale)  # noqa: E731
        model.embed_tokens.register_forward_hook(hook)

    return [after_sharding(change)]


@TABLE.fault(
    31,
    needs="head=row, head_bias=yes, tp > 1",
    case=BIASED,
    invisible=EVEN_ROW,
    caught_by=("logits", "loss", "gradient"),
)
def bias_on_every_rank() -> list[Replacement]:
    """The row head adds its bias on every rank before the sum."""

    def broken(self: hw.RowParallelHead, x: Tensor) -> Tensor:
        partial = F.linear(hw.ScatterToTP.apply(x, self.mesh, self.sizes), self.weight, self.bias)
        return hw.ReduceFromTP.apply(partial, self.mesh)

    return [(hw.RowParallelHead, "forward", broken)]


@TABLE.fault(31, needs="head=row, head_bias=yes, tp > 1", case=BIASED, invisible=EVEN_ROW, caught_by=("replicas",))
def bias_trained_on_one_rank() -> list[Replacement]:
    """The row head's bias is added on the first rank only, before the sum: right logits, and no gradient elsewhere."""

    def broken(self: hw.RowParallelHead, x: Tensor) -> Tensor:
        partial = F.linear(hw.ScatterToTP.apply(x, self.mesh, self.sizes), self.weight)
        if self.bias is not None:
            partial = partial + self.bias * (self.mesh.tp_rank == 0)
        return hw.ReduceFromTP.apply(partial, self.mesh)

    return [(hw.RowParallelHead, "forward", broken)]


@TABLE.fault(31, needs="head=row, head_bias=yes, tp > 1", case=BIASED, invisible=EVEN_ROW, caught_by=("gradient",))
def bias_gradient_reduced() -> list[Replacement]:
    """The gradient of the row head's bias, whole on every rank already, is summed over the ranks."""

    def change(model: Decoder, case: Case, mesh: hw.Mesh) -> None:
        if model.lm_head.bias is not None:
            model.lm_head.bias.register_hook(lambda g: hw.all_reduce(g, mesh.tp_group))

    return [after_sharding(change)]
