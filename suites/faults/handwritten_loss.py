"""Classes 13 to 17: the loss over sharded logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from suites.cases import Case
from suites.data import IGNORED, token_weights
from suites.faults.pieces import (
    EVEN_ROW,
    EVEN_VOCAB,
    GATHERED,
    ONE_RANK_GATHERED,
    ONE_RANK_VOCAB,
    ROW,
    VOCAB,
    after_sharding,
    before_micro_batch,
)
from suites.faults.table import Replacement, Table
from suites.model import Decoder
from suites.paths import handwritten as hw

TABLE = Table("handwritten")
SMOOTHED, Z, WEIGHTED = ",loss=smoothed", ",loss=z_loss", ",loss=weighted"
LARGE = ",clip=1,logit_scale=1000"


def _losses(loss: hw.VocabParallelLoss, logits: Tensor, labels: Tensor) -> Tensor:
    return loss.token_losses(logits, labels)


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


@TABLE.fault(
    13,
    needs="head=vocab, loss=smoothed, vocab not divisible by tp",
    case=VOCAB + SMOOTHED,
    invisible=EVEN_VOCAB + SMOOTHED,
    caught_by=("loss",),
)
def smoothing_over_padded_vocabulary() -> list[Replacement]:
    """Label smoothing divides by the vocabulary as padded to a multiple of the ranks."""
    original = hw.mean_logit
    broken = lambda logits, mesh, vocab: original(logits, mesh, -(-vocab // mesh.tp) * mesh.tp)  # noqa: E731
    return [(hw, "mean_logit", broken)]


@TABLE.fault(
    14,
    needs="head=vocab, loss=smoothed, tp > 1",
    case=VOCAB + SMOOTHED,
    invisible=ONE_RANK_VOCAB + SMOOTHED,
    caught_by=("replicas", "loss"),
)
def smoothing_over_own_shard() -> list[Replacement]:
    """Label smoothing takes the mean logit of each rank's own shard."""
    broken = lambda logits, mesh, vocab: logits.sum(-1) / logits.shape[-1]  # noqa: E731
    return [(hw, "mean_logit", broken)]


@TABLE.fault(
    14,
    needs="head=vocab, loss=smoothed, tp > 1",
    case=EVEN_VOCAB + SMOOTHED,
    invisible=ONE_RANK_VOCAB + SMOOTHED,
    caught_by=("loss",),
)
def smoothing_by_local_size() -> list[Replacement]:
    """Label smoothing sums over all shards and divides by the size of one: the gradient is right, the loss is not."""
    original = hw.mean_logit
    broken = lambda logits, mesh, vocab: original(logits, mesh, logits.shape[-1])  # noqa: E731
    return [(hw, "mean_logit", broken)]


@TABLE.fault(
    14,
    needs="head=vocab, loss=z_loss, tp > 1",
    case=VOCAB + Z,
    invisible=ONE_RANK_VOCAB + Z,
    caught_by=("replicas", "loss", "gradient"),
)
def z_loss_of_own_shard() -> list[Replacement]:
    """The z-loss squares the logarithm of each rank's own part of the softmax's sum."""
    cross_entropy = hw.VocabParallelCrossEntropy.forward
    original = hw.softmax_log_sum
    own: list[Tensor] = []

    def forward(ctx: Any, logits: Tensor, *rest: Any) -> Tensor:
        own[:] = [logits.logsumexp(-1)]
        return cross_entropy(ctx, logits, *rest)

    def broken(total: Tensor, maximum: Tensor, mesh: hw.Mesh) -> Tensor:
        return original(total, maximum, mesh) if mesh.tp == 1 else own[0]

    return [
        (hw.VocabParallelCrossEntropy, "forward", staticmethod(forward)),
        (hw, "softmax_log_sum", broken),
    ]


@TABLE.fault(
    14, needs="head=vocab, loss=z_loss", case=VOCAB + Z, invisible=EVEN_VOCAB + SMOOTHED, caught_by=("loss", "gradient")
)
def z_loss_without_maximum() -> list[Replacement]:
    """The z-loss takes the sum of the shifted exponentials for that of the logits' own."""
    return [(hw, "softmax_log_sum", lambda total, maximum, mesh: total.log())]


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


@TABLE.fault(
    16,
    needs="head=vocab, large logits",
    case=VOCAB + LARGE,
    invisible=VOCAB + ",clip=1",
    caught_by=("loss", "gradient"),
)
def bounded_maximum() -> list[Replacement]:
    """The shift of the softmax is bounded, so that logits far above the bound overflow."""
    original = hw.global_maximum
    return [(hw, "global_maximum", lambda logits, mesh: original(logits, mesh).clamp(max=60))]


@TABLE.fault(
    16,
    needs="head=vocab, tp > 1, large logits",
    case=VOCAB + LARGE,
    invisible=ONE_RANK_VOCAB + LARGE,
    caught_by=("loss", "gradient"),
)
def first_shard_maximum() -> list[Replacement]:
    """The softmax is shifted by the first shard's maximum: right until another shard's logits are far above it."""
    original = hw.global_maximum

    def broken(logits: Tensor, mesh: hw.Mesh) -> Tensor:
        return original(logits if mesh.tp_rank == 0 else torch.full_like(logits, -torch.inf), mesh)

    return [(hw, "global_maximum", broken)]


@TABLE.fault(
    16,
    needs="head=vocab, loss=weighted or large logits",
    case=VOCAB + LARGE,
    invisible=EVEN_ROW + LARGE,
    caught_by=("loss",),
)
def probability_before_logarithm() -> list[Replacement]:
    """The loss takes the logarithm of the label's probability, which large logits round to zero."""
    original = hw.VocabParallelLoss.token_losses

    def broken(self: Any, logits: Tensor, labels: Tensor) -> Tensor:
        losses = original(self, logits, labels)
        return -torch.log(torch.exp(-losses))

    return [(hw.VocabParallelLoss, "token_losses", broken)]


def _backward(change: Any) -> Replacement:
    original = hw.VocabParallelCrossEntropy.backward
    broken = lambda ctx, gradient: original(ctx, change(ctx, gradient))  # noqa: E731
    return (hw.VocabParallelCrossEntropy, "backward", staticmethod(broken))


@TABLE.fault(17, needs="head=vocab, loss=weighted", case=VOCAB + WEIGHTED, invisible=VOCAB, caught_by=("gradient",))
def uniform_upstream_gradient() -> list[Replacement]:
    """The sharded loss takes the first token's upstream gradient for that of all."""

    def change(ctx: Any, gradient: Tensor) -> Tensor:
        counted = ctx.saved_tensors[3]
        return torch.full_like(gradient, float(gradient[counted][0]))

    return [_backward(change)]


@TABLE.fault(17, needs="head=vocab", case=VOCAB, invisible=EVEN_ROW, caught_by=("gradient",))
def ignored_upstream_gradient() -> list[Replacement]:
    """The sharded loss ignores its upstream gradient and divides by the number of all tokens."""
    return [_backward(lambda ctx, gradient: torch.full_like(gradient, 1 / gradient.numel()))]


@TABLE.fault(
    17, needs="head=vocab, loss=weighted", case=VOCAB + WEIGHTED, invisible=VOCAB, caught_by=("loss", "gradient")
)
def weighted_sum_over_count() -> list[Replacement]:
    """The weighted losses are divided by the number of tokens in place of the sum of the weights."""
    original = hw.VocabParallelLoss.__call__

    def broken(self: Any, logits: Tensor, labels: Tensor, **others: object) -> Tensor:
        loss = original(self, logits, labels, **others)
        if self.kind != "weighted":
            return loss
        counted = labels.flatten() != IGNORED
        return loss * (token_weights(labels) * counted).sum() / counted.sum()

    return [(hw.VocabParallelLoss, "__call__", broken)]


@TABLE.fault(
    17,
    needs="head=vocab, accumulate > 1",
    case=VOCAB + ",accumulate=2",
    invisible=VOCAB,
    caught_by=("loss", "gradient"),
)
def first_micro_batch_divides_all() -> list[Replacement]:
    """All micro-batches of a step are divided by the number of tokens that count in the first."""
    counts: list[Tensor] = []

    def change(trainer: hw.HandwrittenTrainer, last: bool) -> None:
        if len(counts) == trainer.case.accumulate:
            counts.clear()

    def broken(self: Any, logits: Tensor, labels: Tensor, **others: object) -> Tensor:
        counts.append((labels != IGNORED).sum())
        return self.token_losses(logits, labels).sum() / counts[0]

    return [before_micro_batch(change), (hw.VocabParallelLoss, "__call__", broken)]
