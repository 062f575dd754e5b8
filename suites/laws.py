"""Laws: wrong ways to make a loss from right logits, and which of them a run obeys."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from suites.cases import Case
from suites.data import IGNORED, micro_batch, token_weights
from suites.evidence import Evidence
from suites.model import SMOOTHING, Z_LOSS


@dataclass(frozen=True)
class Law:
    """A wrong way to make a loss from right logits.

    Args:
        loss: of one tensor-parallel rank, from case, full logits [n, v], labels [n] and that rank.
        kinds: values of the factor `loss` that it can befall; empty means all.
    """

    bug_class: int
    meaning: str
    loss: Callable[[Case, Tensor, Tensor, int], Tensor]
    kinds: tuple[str, ...] = ()


def shard_sizes(case: Case) -> list[int]:
    """Rows of the vocabulary on each tensor-parallel rank."""
    return [len(part) for part in torch.arange(case.vocab).tensor_split(case.tp)]


def _kept(case: Case, labels: Tensor) -> Tensor:
    counted = (labels != IGNORED).double()
    return counted * token_weights(labels).double() if case.loss == "weighted" else counted


def _mean(case: Case, losses: Tensor, labels: Tensor) -> Tensor:
    """Mean as the case asks for it."""
    kept = _kept(case, labels)
    return (losses * kept).sum() / kept.sum()


def _plain(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")


def _token_losses(case: Case, logits: Tensor, labels: Tensor) -> Tensor:
    """Right loss of each token, as the case asks for it."""
    smoothing = SMOOTHING if case.loss == "smoothed" else 0.0
    losses = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none", label_smoothing=smoothing)
    return losses + Z_LOSS * logits.logsumexp(-1).square() if case.loss == "z_loss" else losses


def _ignored_count(case: Case, logits: Tensor, labels: Tensor, rank: int) -> Tensor:
    return (_token_losses(case, logits, labels) * (labels != IGNORED)).mean()


def _padded(case: Case, logits: Tensor, labels: Tensor, rank: int) -> Tensor:
    sizes = shard_sizes(case)
    extra = sum(max(sizes) - size for size in sizes)
    return _mean(case, _token_losses(case, F.pad(logits, (0, extra)), labels), labels)


def _local_maximum(case: Case, logits: Tensor, labels: Tensor, rank: int) -> Tensor:
    shards = [part - part.amax(-1, keepdim=True) for part in logits.split(shard_sizes(case), -1)]
    return _mean(case, _token_losses(case, torch.cat(shards, -1), labels), labels)


def _own_maximum_back(case: Case, logits: Tensor, labels: Tensor, rank: int) -> Tensor:
    parts = logits.split(shard_sizes(case), -1)
    total = torch.stack([(part - part.amax(-1, keepdim=True)).exp().sum(-1) for part in parts]).sum(0)
    target = logits.gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return _mean(case, total.log() + parts[rank].amax(-1) - target, labels)


def _counted_by_every_rank(case: Case, logits: Tensor, labels: Tensor, rank: int) -> Tensor:
    return _mean(case, _token_losses(case, logits, labels) + math.log(case.tp), labels)


def _found(case: Case, logits: Tensor, labels: Tensor, shards: Sequence[tuple[int, int, int]]) -> Tensor:
    """Loss with the label's logit looked up on shards (begin in the logits, size, first label taken for its own).

    Shifted by the maximum, as the sharded loss does: not every label is found once.
    """
    logits = logits - logits.amax(-1, keepdim=True)
    found = torch.zeros(len(labels), dtype=logits.dtype)
    for begin, size, first in shards:
        there = (labels >= first) & (labels < first + size)
        place = torch.where(there, labels - first + begin, 0).unsqueeze(-1)
        found += torch.where(there, logits.gather(-1, place).squeeze(-1), 0)
    return _mean(case, logits.logsumexp(-1) - found, labels)


def _starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:rank]) for rank in range(len(sizes))]


def _labels_from_each_start(case: Case, logits: Tensor, labels: Tensor, rank: int) -> Tensor:
    shards = [(0, logits.shape[-1], start) for start in _starts(shard_sizes(case))]
    return _found(case, logits, labels, shards) + math.log(case.tp)


def _even_labels(case: Case, logits: Tensor, labels: Tensor, extent: int) -> Tensor:
    sizes = shard_sizes(case)
    shards = [(start, size, extent * r) for r, (start, size) in enumerate(zip(_starts(sizes), sizes, strict=True))]
    return _found(case, logits, labels, shards)


def _labels_on_short_shards(case: Case, logits: Tensor, labels: Tensor, rank: int) -> Tensor:
    return _even_labels(case, logits, labels, min(shard_sizes(case)))


def _labels_on_long_shards(case: Case, logits: Tensor, labels: Tensor, rank: int) -> Tensor:
    return _even_labels(case, logits, labels, max(shard_sizes(case)))


def _own_shard_only(case: Case, logits: Tensor, labels: Tensor, rank: int) -> Tensor:
    sizes = shard_sizes(case)
    start = sum(sizes[:rank])
    own = torch.where((labels >= start) & (labels < start + sizes[rank]), labels - start, IGNORED)
    return F.cross_entropy(logits[:, start : start + sizes[rank]], own, ignore_index=IGNORED)


def _local_softmax(case: Case, logits: Tensor, labels: Tensor, rank: int) -> Tensor:
    sizes = shard_sizes(case)
    start = sum(sizes[:rank])
    target = logits.gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return _mean(case, logits[:, start : start + sizes[rank]].logsumexp(-1) - target, labels)


def _smoothed(case: Case, logits: Tensor, labels: Tensor, mean: Tensor) -> Tensor:
    target = logits.gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return _mean(case, logits.logsumexp(-1) - (1 - SMOOTHING) * target - SMOOTHING * mean, labels)


def _local_mean_logit(case: Case, logits: Tensor, labels: Tensor, rank: int) -> Tensor:
    own = logits.split(shard_sizes(case), -1)[rank]
    return _smoothed(case, logits, labels, own.mean(-1))


def _local_vocabulary(case: Case, logits: Tensor, labels: Tensor, rank: int) -> Tensor:
    # shifted by the global maximum, as the sharded loss does: the sum over the vocabulary is not free of the shift
    top = logits.amax(-1)
    total = (logits - top.unsqueeze(-1)).sum(-1)
    return _smoothed(case, logits, labels, total / shard_sizes(case)[rank] + top)


def _z_of(case: Case, logits: Tensor, labels: Tensor, log_sum: Tensor) -> Tensor:
    return _mean(case, _plain(logits, labels) + Z_LOSS * log_sum.square(), labels)


def _padded_mean_logit(case: Case, logits: Tensor, labels: Tensor, rank: int) -> Tensor:
    top = logits.amax(-1)
    total = (logits - top.unsqueeze(-1)).sum(-1)
    return _smoothed(case, logits, labels, total / (max(shard_sizes(case)) * case.tp) + top)


def _local_z(case: Case, logits: Tensor, labels: Tensor, rank: int) -> Tensor:
    return _z_of(case, logits, labels, logits.split(shard_sizes(case), -1)[rank].logsumexp(-1))


def _z_without_maximum(case: Case, logits: Tensor, labels: Tensor, rank: int) -> Tensor:
    return _z_of(case, logits, labels, (logits - logits.amax(-1, keepdim=True)).logsumexp(-1))


def _unweighted(case: Case, logits: Tensor, labels: Tensor, rank: int) -> Tensor:
    return F.cross_entropy(logits, labels, ignore_index=IGNORED)


def _weighted_over_count(case: Case, logits: Tensor, labels: Tensor, rank: int) -> Tensor:
    return (_plain(logits, labels) * _kept(case, labels)).sum() / (labels != IGNORED).sum()


LAWS: tuple[Law, ...] = (
    Law(11, "labels are looked up as if all shards were as long as the shortest", _labels_on_short_shards),
    Law(11, "labels are looked up as if all shards were as long as the longest", _labels_on_long_shards),
    Law(13, "ignored labels count in the mean", _ignored_count),
    Law(13, "the softmax counts padding of the vocabulary as logits of zero", _padded),
    Law(13, "labels are smoothed over padding of the vocabulary too", _padded_mean_logit, ("smoothed",)),
    Law(14, "each rank smooths with the mean logit of its own shard", _local_mean_logit, ("smoothed",)),
    Law(14, "labels are smoothed over a shard's vocabulary", _local_vocabulary, ("smoothed",)),
    Law(14, "each rank's z-loss sees its own shard's softmax sum", _local_z, ("z_loss",)),
    Law(14, "the z-loss sees the softmax's sum without its maximum", _z_without_maximum, ("z_loss",)),
    Law(14, "each rank's softmax sums its own shard", _local_softmax),
    Law(15, "every rank counts all logits: the loss is higher by log(tp)", _counted_by_every_rank),
    Law(15, "whole logits are taken for shards: labels are looked up from each shard's start", _labels_from_each_start),
    Law(15, "each rank takes its shard of the logits for all of them", _own_shard_only),
    Law(16, "each shard is shifted by its own maximum", _local_maximum),
    Law(16, "each shard is shifted by its own maximum, and each rank adds its own back", _own_maximum_back),
    Law(17, "all tokens weigh the same", _unweighted, ("weighted",)),
    Law(17, "the weighted sum is divided by the number of tokens", _weighted_over_count, ("weighted",)),
)


def losses(e: Evidence, step: int) -> tuple[str, ...]:
    """Meaning of each law that gives the run's wrong losses from the reference's logits."""
    exact = e.exact[step]
    if exact is None:
        return ()
    wrong = []
    for (tp_rank, dp_rank), seen in e.reported(step):
        for micro, value in enumerate(seen.loss):
            wrong.append((tp_rank, (dp_rank, micro), value))
    possible = [law for law in LAWS if not law.kinds or e.case.loss in law.kinds]
    return tuple(law.meaning for law in possible if _obeyed(e.case, step, law, exact.logits, exact.loss, wrong))


def _obeyed(  # noqa: PLR0917
    case: Case,
    step: int,
    law: Law,
    logits: Mapping[tuple[int, int], Tensor],
    right: Mapping[tuple[int, int], float],
    seen: Sequence[tuple[int, tuple[int, int], float]],
) -> bool:
    off = 0.0
    for tp_rank, key, value in seen:
        labels = micro_batch(case, step, key[1], key[0]).labels.flatten()
        told = float(law.loss(case, logits[key].double().flatten(0, 1), labels, tp_rank))
        off = max(off, abs(value - right[key]))
        if not (math.isfinite(value) and abs(value - told) <= 1e-2 * abs(value - right[key]) + 2e-6 * abs(right[key])):
            return False
    return off > 1e-5 * max(abs(v) for v in right.values())
