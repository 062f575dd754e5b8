"""Classes 13 to 17: the loss over sharded logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from suites.cases import Case
from suites.data import IGNORED
from suites.faults.pieces import (
    EVEN_ROW,
    EVEN_VOCAB,
    GATHERED,
    ONE_RANK_GATHERED,
    ONE_RANK_VOCAB,
    ROW,
    VOCAB,
    after_sharding,
)
from suites.faults.table import Replacement, Table
from suites.model import Decoder
from suites.paths import handwritten as hw

TABLE = Table("handwritten")


def _losses(loss: hw.VocabParallelLoss, logits: Tensor, labels: Tensor) -> Tensor:
    return hw.VocabParallelCrossEntropy.apply(logits.flatten(0, 1), labels.flatten(), loss.start, loss.mesh)


@TABLE.fault(13, needs="head=vocab", case=VOCAB, invisible=EVEN_ROW, caught_by=("loss", "gradient"))
def ignored_labels_count() -> list[Replacement]:
    """Ignored labels count in the mean."""
    broken = lambda self, logits, labels, **_: _losses(self, logits, labels).mean()  # noqa: E731
    return [(hw.VocabParallelLoss, "__call__", broken)]


@TABLE.fault(
    13, needs="head=vocab, vocab not divisible by tp", case=VOCAB, invisible=EVEN_VOCAB, caught_by=("loss", "gradient")
)
def padded_vocabulary_counts() -> list[Replacement]:
    """Shorter shards are padded to the longest, and the softmax counts the padding as logits of zero."""
    original = hw.VocabParallelLoss.__call__
    make = hw.VocabParallelLoss.__init__

    def begin(self: Any, mesh: hw.Mesh, vocab: int, *rest: Any) -> None:
        make(self, mesh, vocab, *rest)
        self.longest = max(hw.shard_sizes(vocab, mesh.tp))

    def broken(self: Any, logits: Tensor, labels: Tensor, **others: object) -> Tensor:
        return original(self, F.pad(logits, (0, self.longest - logits.shape[-1])), labels, **others)

    return [(hw.VocabParallelLoss, "__init__", begin), (hw.VocabParallelLoss, "__call__", broken)]


def _replace_loss(heads: tuple[str, ...], loss: Any) -> Replacement:
    def change(model: Decoder, case: Case, mesh: hw.Mesh) -> None:
        if case.head in heads:
            model.loss_function = loss(case, mesh)

    return after_sharding(change)


@TABLE.fault(15, needs="tp > 1, head=gathered", case=GATHERED, invisible=ONE_RANK_VOCAB, caught_by=("loss", "gradient"))
def gathered_logits_counted_once_a_rank() -> list[Replacement]:
    """Gathered logits are fed to the sharded loss: the softmax's sum counts each logit once a rank."""

    def loss(case: Case, mesh: hw.Mesh) -> Any:
        sharded = hw.VocabParallelLoss(mesh, case.vocab)
        sharded.start = 0 if mesh.tp_rank == 0 else case.vocab  # each label is found on one rank
        return sharded

    return [_replace_loss(("gathered",), loss)]


@TABLE.fault(15, needs="tp > 1, head=row", case=ROW, invisible=ONE_RANK_VOCAB, caught_by=("loss", "gradient"))
def reduced_logits_taken_for_sharded() -> list[Replacement]:
    """The row head's whole logits are fed to the sharded loss, which looks labels up from each shard's start."""
    return [_replace_loss(("row",), lambda case, mesh: hw.VocabParallelLoss(mesh, case.vocab))]


@TABLE.fault(
    15, needs="tp > 1, head=vocab", case=VOCAB, invisible=ONE_RANK_GATHERED, caught_by=("replicas", "loss", "gradient")
)
def sharded_logits_taken_for_gathered() -> list[Replacement]:
    """Each rank takes its shard of the logits for all of them and ignores the labels that it does not find."""

    def loss(case: Case, mesh: hw.Mesh) -> Any:
        start = sum(hw.shard_sizes(case.vocab, mesh.tp)[: mesh.tp_rank])

        def local(logits: Tensor, labels: Tensor, **others: object) -> Tensor:
            here = (labels >= start) & (labels < start + logits.shape[-1])
            mine = torch.where(here, labels - start, IGNORED)
            return F.cross_entropy(logits.flatten(0, 1), mine.flatten(), ignore_index=IGNORED)

        return local

    return [_replace_loss(("vocab",), loss)]


@TABLE.fault(16, needs="tp > 1, head=vocab", case=VOCAB, invisible=ONE_RANK_VOCAB, caught_by=("loss", "gradient"))
def local_maximum() -> list[Replacement]:
    """The softmax is shifted by each shard's own maximum."""
    original = hw.global_maximum

    def broken(logits: Tensor, mesh: hw.Mesh) -> Tensor:
        original(logits, mesh)  # made, and not used
        return logits.amax(-1)

    return [(hw, "global_maximum", broken)]
