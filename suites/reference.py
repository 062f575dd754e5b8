"""The reference: the same model unsharded in this process, at any weights, in fp64 and in the case's own precision.

Evaluating at the *run's own* weights of each step (step-local, see `suites/README.md`) keeps the rounding of earlier
steps out of the comparison. Embedding and head get separate weights here even when they are tied, so that both
contributions to a tied gradient are known one by one; their sum is the tied gradient.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from suites.cases import Case
from suites.data import micro_batch
from suites.model import EMBEDDING, HEAD, Decoder, load_weights, trainable

# The factors that change what the reference computes; cases that agree in these share one. (tp is among them since
# the data reach the first and last row of every shard.)
DETERMINED_BY = (
    "tie", "tp", "dp", "hidden", "vocab", "layers", "sequence", "batch", "accumulate", "padding_idx",
    "embedding_scale", "head_bias", "activation", "frozen", "seed",
)  # fmt: skip


@dataclass(frozen=True)
class Evaluation:
    """One step's forward and backward at given weights, unsharded.

    Args:
        loss: of each (data-parallel rank, micro-batch).
        logits: of each (data-parallel rank, micro-batch), [batch, sequence, vocabulary].
        gradients: of the step's mean loss, per trainable parameter; a tied weight's is the sum of both contributions.
        lookup: the embedding's own contribution (None when frozen).
        projection: the head's own contribution (None when frozen).
    """

    loss: Mapping[tuple[int, int], float]
    logits: Mapping[tuple[int, int], Tensor]
    gradients: Mapping[str, Tensor]
    lookup: Tensor | None
    projection: Tensor | None

    @property
    def gradient_norm(self) -> float:
        """Global norm of all gradients, a tied weight counted once (callers pass tied evaluations' both names)."""
        once = {id(g): g for g in self.gradients.values()}
        return float(torch.stack([g.double().square().sum() for g in once.values()]).sum().sqrt()) if once else 0.0


def evaluate(
    case: Case, weights: Mapping[str, Tensor], step: int, dtype: torch.dtype, perturbed: int = 0
) -> Evaluation:
    """Forward and backward of one step's data at `weights` (full tensors by canonical name), in precision `dtype`.

    With `perturbed` > 0 every weight is moved by up to one unit roundoff of `dtype`, by random numbers of that seed:
    another sample of what rounding does (TTrace, arXiv 2506.09280, takes its tolerances from such runs).
    """
    model = Decoder(case, tie=False).to(dtype)
    if perturbed:
        generator = torch.Generator().manual_seed(perturbed)
        u = torch.finfo(dtype).eps / 2
        weights = {
            name: weight.double() * (1 + u * (2 * torch.rand(weight.shape, generator=generator) - 1))
            for name, weight in weights.items()
        }
        if case.tied:
            weights[HEAD] = weights[EMBEDDING]
    load_weights(model, weights)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trainable(case, name))
    loss: dict[tuple[int, int], float] = {}
    logits: dict[tuple[int, int], Tensor] = {}
    for dp_rank in range(case.dp):
        for micro in range(case.accumulate):
            batch = micro_batch(case, step, micro, dp_rank)
            value, scores = model(batch.tokens, batch.labels)
            (value / (case.dp * case.accumulate)).backward()
            loss[dp_rank, micro] = value.item()
            logits[dp_rank, micro] = scores.detach()
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    lookup, projection = gradients.get(EMBEDDING), gradients.get(HEAD)
    if case.tied and lookup is not None and projection is not None:
        gradients[EMBEDDING] = gradients[HEAD] = lookup + projection
    return Evaluation(loss, logits, gradients, lookup, projection)


def digest_of(weights: Mapping[str, Tensor]) -> bytes:
    """Digest of names and values, bit for bit."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].double().contiguous().numpy().tobytes())
    return digest.digest()


class ReferenceCache:
    """Evaluations kept by all that determines them: the factors above, step, precision, and the weights' own bits.

    The first step's weights are the initial ones, so all cases of one model share that evaluation; later steps are
    shared wherever two runs are bitwise equal.
    """

    def __init__(self, size: int = 256):
        self.size = size
        self.hits = 0
        self.misses = 0
        self._kept: OrderedDict[tuple[object, ...], Evaluation] = OrderedDict()

    def evaluate(
        self,
        case: Case,
        weights: Mapping[str, Tensor],
        step: int,
        dtype: torch.dtype,
        *,
        perturbed: int = 0,
        digest: bytes | None = None,
    ) -> Evaluation:
        """As `evaluate`, from the cache where possible; `digest` is that of `weights`, if the caller has it already."""
        known = (step, dtype, perturbed, digest or digest_of(weights))
        key = (*(getattr(case, name) for name in DETERMINED_BY), *known)
        if key in self._kept:
            self.hits += 1
            self._kept.move_to_end(key)
            return self._kept[key]
        self.misses += 1
        self._kept[key] = evaluate(case, weights, step, dtype, perturbed)
        if len(self._kept) > self.size:
            self._kept.popitem(last=False)
        return self._kept[key]
