"""Classes 11, 12 and 24: rows of a shard that are mixed up, frozen or stale; the padding row; initial shards."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from suites.cases import Case
from suites.faults.pieces import (
    EVEN_ROW,
    EVEN_VOCAB,
    ONE_RANK,
    ONE_RANK_VOCAB,
    ROW,
    VOCAB,
    after_sharding,
    around_step,
)
from suites.faults.table import Replacement, Table
from suites.model import Decoder
from suites.paths import handwritten as hw

TABLE = Table("handwritten")
UNEVEN = "vocab not divisible by tp"
PADDED = ",padding_idx=3"


@TABLE.fault(
    11,
    needs=UNEVEN + ", head=vocab or gathered",
    case=VOCAB,
    invisible=EVEN_VOCAB,
    caught_by=("logits", "loss", "gradient"),
)
def shifted_boundary() -> list[Replacement]:
    """The embedding takes all shards for as long as the shortest, so the later ones start at a row too early."""
    original = hw.VocabParallelEmbedding.__init__

    def broken(self: Any, weight: nn.Parameter, mesh: hw.Mesh, vocab: int, padding_idx: int | None) -> None:
        original(self, weight, mesh, vocab, padding_idx)
        self.start = vocab // mesh.tp * mesh.tp_rank
        self.end = self.start + len(weight)

    return [(hw.VocabParallelEmbedding, "__init__", broken)]


@TABLE.fault(11, needs="tp > 1", case=VOCAB, invisible=ONE_RANK_VOCAB, caught_by=("update",))
def frozen_last_shard() -> list[Replacement]:
    """The last tensor-parallel shard of the head is never updated."""

    def before(trainer: hw.HandwrittenTrainer) -> Tensor:
        return trainer.model.lm_head.weight.detach().clone()

    def after(trainer: hw.HandwrittenTrainer, kept: Tensor) -> None:
        if trainer.tp_rank and trainer.tp_rank == trainer.mesh.tp - 1:
            trainer.model.lm_head.weight.copy_(kept)

    return [around_step(before, after)]


@TABLE.fault(11, needs=UNEVEN + ", head=vocab or gathered", case=VOCAB, invisible=EVEN_VOCAB, caught_by=("update",))
def frozen_remainder_rows() -> list[Replacement]:
    """Of a longer shard only as many rows are updated as the shortest has."""

    def before(trainer: hw.HandwrittenTrainer) -> Tensor:
        return trainer.model.lm_head.weight.detach().clone()

    def after(trainer: hw.HandwrittenTrainer, kept: Tensor) -> None:
        rows = trainer.case.vocab // trainer.mesh.tp
        trainer.model.lm_head.weight[rows:] = kept[rows:]

    return [around_step(before, after)]


@TABLE.fault(11, needs="tp > 1", case=ROW, invisible=ONE_RANK, caught_by=("update",))
def late_shard() -> list[Replacement]:
    """The second rank's shard of the head takes each update one step late."""

    def after(trainer: hw.HandwrittenTrainer, kept: None) -> None:
        if trainer.tp_rank == 1:
            weight: Any = trainer.model.lm_head.weight
            new = weight.detach().clone()
            weight.copy_(getattr(weight, "pending", new))
            weight.pending = new

    return [around_step(lambda trainer: None, after)]


@TABLE.fault(
    11,
    needs="tp = 4 and a remainder of 2",
    case=VOCAB.replace("67", "66").replace("vocab,", "gathered,") + ",tp=4",
    invisible=EVEN_ROW,
    caught_by=("logits", "loss"),
)
def padding_left_between_shards() -> list[Replacement]:
    """Uneven shards are gathered with their padding, and only the end of the whole is cut off."""

    def broken(tensor: Tensor, group: dist.ProcessGroup, sizes: list[int]) -> Tensor:
        longest = max(sizes)
        padded = F.pad(tensor, (0, longest - tensor.shape[-1])).contiguous()
        received = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(received, padded, group=group)
        return torch.cat(received, -1)[..., : sum(sizes)]

    return [(hw, "all_gather_last", broken)]


@TABLE.fault(
    12,
    needs="padding_idx, tp > 1, head=vocab or gathered",
    case=VOCAB + PADDED,
    invisible=VOCAB,
    caught_by=("gradient",),
)
def global_padding_idx() -> list[Replacement]:
    """The padding row's number in the whole vocabulary is used on every shard."""
    return [(hw, "local_padding_idx", lambda padding_idx, start, end: padding_idx)]


@TABLE.fault(
    12, needs="padding_idx, head=vocab or gathered", case=VOCAB + PADDED, invisible=VOCAB, caught_by=("gradient",)
)
def lost_padding_idx() -> list[Replacement]:
    """The sharded embedding is made without a padding row: the lookup trains it."""
    return [(hw, "local_padding_idx", lambda padding_idx, start, end: None)]


@TABLE.fault(12, needs="padding_idx, tp > 1, head=row", case=ROW + PADDED, invisible=ROW, caught_by=("gradient",))
def padding_idx_on_one_rank() -> list[Replacement]:
    """Of the padding row only the first rank's slice of the hidden dimension is spared."""
    original = hw.HiddenParallelEmbedding.__init__

    def broken(self: Any, weight: nn.Parameter, mesh: hw.Mesh, hidden: int, padding_idx: int | None) -> None:
        original(self, weight, mesh, hidden, padding_idx if mesh.tp_rank == 0 else None)

    return [(hw.HiddenParallelEmbedding, "__init__", broken)]


@TABLE.fault(12, needs="padding_idx, tie=tied, head=row", case=ROW + PADDED, invisible=ROW, caught_by=("gradient",))
def padding_row_never_trained() -> list[Replacement]:
    """The padding row of the tied weight gets no gradient at all, though the head trains it."""

    def change(model: Decoder, case: Case, mesh: hw.Mesh) -> None:
        def hook(gradient: Tensor) -> Tensor:
            kept = gradient.clone()
            kept[case.padding_idx] = 0
            return kept

        if case.padding_idx is not None:
            model.lm_head.weight.register_hook(hook)

    return [after_sharding(change)]


def _cut(change: Any) -> Replacement:
    original = hw.Sharder.cut

    def broken(self: hw.Sharder, whole: Tensor, dim: int) -> nn.Parameter:
        known = id(whole) in self._shards
        shard = original(self, whole, dim)
        if not known:
            with torch.no_grad():
                change(self.mesh, whole.detach(), dim, shard)
        return shard

    return (hw.Sharder, "cut", broken)


@TABLE.fault(24, needs="tp > 1, even shards", case=EVEN_VOCAB, invisible=ONE_RANK_VOCAB, caught_by=("start",))
def same_shard_everywhere() -> list[Replacement]:
    """Every rank is given the first shard, as by one seed on all of them."""

    def change(mesh: hw.Mesh, whole: Tensor, dim: int, shard: Tensor) -> None:
        first = whole.tensor_split(mesh.tp, dim)[0]
        if first.shape == shard.shape:
            shard.copy_(first)

    return [_cut(change)]


@TABLE.fault(24, needs="tp > 1, even shards", case=EVEN_ROW, invisible=ONE_RANK, caught_by=("start",))
def shards_in_reverse() -> list[Replacement]:
    """The shards are handed out from the last rank to the first."""

    def change(mesh: hw.Mesh, whole: Tensor, dim: int, shard: Tensor) -> None:
        other = whole.tensor_split(mesh.tp, dim)[mesh.tp - 1 - mesh.tp_rank]
        if other.shape == shard.shape:
            shard.copy_(other)

    return [_cut(change)]


@TABLE.fault(24, needs="tp > 1", case=ROW, invisible=ONE_RANK, caught_by=("start",))
def spread_by_local_size() -> list[Replacement]:
    """Shards of row-parallel layers are initialised with the spread that suits the local, shorter input."""

    def change(mesh: hw.Mesh, whole: Tensor, dim: int, shard: Tensor) -> None:
        if dim == 1:
            shard.mul_(mesh.tp**0.5)

    return [_cut(change)]
