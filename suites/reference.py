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
from typing import Protocol

import torch
from torch import Tensor

from suites.cases import Case
from suites.data import MicroBatch, micro_batch
from suites.model import EMBEDDING, HEAD, Decoder, load_weights, parameter_shapes, trainable
from suites.precision import LOSS_SCALE, LOW, UNIT_ROUNDOFF, multiplying

# The factors that change what the reference computes; cases that agree in these share one. (tp is among them since
# the data reach the first and last row of every shard.)
DETERMINED_BY = (
    "tie", "tp", "dp", "hidden", "vocab", "layers", "sequence", "batch", "accumulate", "padding_idx",
    "embedding_scale", "head_bias", "activation", "frozen", "seed", "loss", "logit_scale", "embedding_class",
    "embedding_option", "ignored",
)  # fmt: skip
# Those of them that make the data of a step; the others make the model.
OF_DATA = ("tp", "dp", "vocab", "sequence", "batch", "accumulate", "padding_idx", "seed", "ignored")
OF_MODEL = tuple(name for name in DETERMINED_BY if name not in OF_DATA or name in ("vocab", "padding_idx"))

# What a cache keeps beside evaluations: building a small model takes as long as running it, a larger one's does not.
MODELS, MODEL_BYTES = 16, 4 * 2**20
STEPS_OF_DATA = 64


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
    def bytes(self) -> int:
        """Memory that the tensors take."""
        held = [*self.logits.values(), *self.gradients.values(), self.lookup, self.projection]
        return sum({id(t): t.numel() * t.element_size() for t in held if t is not None}.values())

    @property
    def gradient_norm(self) -> float:
        """Global norm of all gradients, a tied weight counted once (callers pass tied evaluations' both names)."""
        once = {id(g): g for g in self.gradients.values()}
        return float(torch.stack([g.double().square().sum() for g in once.values()]).sum().sqrt()) if once else 0.0


Batches = Mapping[tuple[int, int], MicroBatch]  # (data-parallel rank, micro-batch) -> data


def evaluate(
    case: Case,
    weights: Mapping[str, Tensor],
    step: int,
    arithmetic: str = "float64",
    perturbed: int = 0,
    *,
    model: Unsharded | None = None,
    data: Batches | None = None,
) -> Evaluation:
    """Forward and backward of one step's data at `weights` (full tensors by canonical name), in a given arithmetic.

    With `perturbed` > 0 every weight is moved by up to one unit roundoff, by random numbers of that seed: another
    sample of what rounding does (TTrace, arXiv 2506.09280, takes its tolerances from such runs). Low precisions sum
    gradients over micro-batches in fp32, as the paths do.

    Args:
        arithmetic: a key of `suites.precision.UNIT_ROUNDOFF`.
        model, data: if the caller has them already, from a case that agrees in `OF_MODEL` and `OF_DATA`.
    """
    model = model or Unsharded(case, arithmetic)
    return model.evaluate(case, weights, data or batches(case, step), perturbed)


def batches(case: Case, step: int) -> dict[tuple[int, int], MicroBatch]:
    """The data of one step, in the order in which gradients are summed."""
    return {
        (dp_rank, micro): micro_batch(case, step, micro, dp_rank)
        for dp_rank in range(case.dp)
        for micro in range(case.accumulate)
    }


class Unsharded:
    """The unsharded model in one arithmetic, built once and evaluated at any weights, on the data of any step."""

    def __init__(self, case: Case, arithmetic: str):
        self.arithmetic = arithmetic
        self.matmul = arithmetic if arithmetic.startswith("tf32") else "ieee"
        dtype = torch.float32 if self.matmul != "ieee" else getattr(torch, arithmetic)
        self.model = Decoder(case, tie=False).to(dtype)
        self.bytes = sum(p.numel() * p.element_size() for p in self.model.parameters())
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(trainable(case, name))

    def evaluate(self, case: Case, weights: Mapping[str, Tensor], data: Batches, perturbed: int = 0) -> Evaluation:
        """As the function of this name, for any case that agrees with the first in `OF_MODEL`."""
        if perturbed:
            weights = perturb(case, weights, UNIT_ROUNDOFF[self.arithmetic], perturbed)
        load_weights(self.model, weights)
        loss: dict[tuple[int, int], float] = {}
        logits: dict[tuple[int, int], Tensor] = {}
        sums = _GradientSums(self.model, case, self.arithmetic)
        try:
            with multiplying(self.matmul, torch.device("cpu")):
                for place, batch in data.items():
                    value, scores = self.model(batch.tokens, batch.labels)
                    (value / (case.dp * case.accumulate) * sums.scale).backward()
                    sums.collect()
                    loss[place] = value.item()
                    logits[place] = scores.detach()
            gradients = sums.whole()
        finally:
            self.model.zero_grad(set_to_none=True)
        lookup, projection = gradients.get(EMBEDDING), gradients.get(HEAD)
        if case.tied and lookup is not None and projection is not None:
            gradients[EMBEDDING] = gradients[HEAD] = sums.tied if sums.tied is not None else lookup + projection
        return Evaluation(loss, logits, gradients, lookup, projection)


def perturb(case: Case, weights: Mapping[str, Tensor], u: float, seed: int) -> dict[str, Tensor]:
    """Every weight moved by up to `u` of itself, by random numbers of a seed; a tied weight alike under both names."""
    generator = torch.Generator().manual_seed(seed)
    moved = {
        name: weight.double() * (1 + u * (2 * torch.rand(weight.shape, generator=generator) - 1))
        for name, weight in weights.items()
    }
    if case.tied:
        moved[HEAD] = moved[EMBEDDING]
    return moved


class _GradientSums:
    """Gradients summed over batches: in the parameters' own ``grad``, or in fp32 where their precision is low."""

    def __init__(self, model: Decoder, case: Case, arithmetic: str):
        named = dict(model.named_parameters())
        # In one order, whichever weight a case registers first: cases that differ in this share evaluations.
        self.trained = {name: named[name] for name in parameter_shapes(case) if named[name].requires_grad}
        self.low = arithmetic in LOW
        self.scale = LOSS_SCALE.get(arithmetic, 1.0)
        self.sums: dict[str, Tensor] = {}
        self.both = case.tied and {EMBEDDING, HEAD} <= set(self.trained)
        self.tied: Tensor | None = None  # under a low precision a tied weight's own ``grad`` rounds the sum of its two

    def collect(self) -> None:
        if not self.low:
            return
        if self.both:
            both = self._taken(self.trained[EMBEDDING]) + self._taken(self.trained[HEAD])
            self.tied = self._added(self.tied, both)
        for name, parameter in self.trained.items():
            self.sums[name] = self._added(self.sums.get(name), self._taken(parameter))
            parameter.grad = None

    def _added(self, total: Tensor | None, gradient: Tensor) -> Tensor:
        gradient = gradient.float() / self.scale
        return gradient if total is None else total + gradient

    @staticmethod
    def _taken(parameter: Tensor) -> Tensor:
        return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

    def whole(self) -> dict[str, Tensor]:
        if self.low:
            return self.sums
        return {name: self._taken(parameter) for name, parameter in self.trained.items()}


def digest_of(weights: Mapping[str, Tensor]) -> bytes:
    """Digest of names and values, bit for bit."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].double().contiguous().numpy().tobytes())
    return digest.digest()


class Store(Protocol):
    """Evaluations kept beyond the life of a process (`suites.reference_store`)."""

    def get(self, key: Key) -> Evaluation | None:
        """What was put under a key, bit for bit; None where it is not there (any more)."""
        ...

    def put(self, key: Key, found: Evaluation) -> None:
        """Keep an evaluation, if that is possible and worth it."""
        ...


Key = tuple[object, ...]  # values of `DETERMINED_BY`; step, arithmetic, perturbed, digest of the weights


class ReferenceCache:
    """Evaluations kept by all that determines them: the factors above, step, arithmetic, and the weights' own bits.

    The first step's weights are the initial ones, so all cases of one model share that evaluation; later steps are
    shared wherever two runs are bitwise equal.

    Args:
        size: bytes to keep; what is larger by itself is not kept.
        store: asked for what is not in memory, and given what was computed.
    """

    def __init__(self, size: int = 512 * 2**20, store: Store | None = None):
        self.size = size
        self.store = store
        self.hits = 0
        self.misses = 0
        self.loaded = 0
        self.held = 0
        self._kept: OrderedDict[Key, Evaluation] = OrderedDict()
        self._models: OrderedDict[Key, Unsharded] = OrderedDict()
        self._data: OrderedDict[Key, Batches] = OrderedDict()

    def evaluate(
        self,
        case: Case,
        weights: Mapping[str, Tensor],
        step: int,
        arithmetic: str = "float64",
        *,
        perturbed: int = 0,
        digest: bytes | None = None,
    ) -> Evaluation:
        """As `evaluate`, from the cache where possible; `digest` is that of `weights`, if the caller has it already."""
        known = (step, arithmetic, perturbed, digest or digest_of(weights))
        key = (*(getattr(case, name) for name in DETERMINED_BY), *known)
        if key in self._kept:
            self.hits += 1
            self._kept.move_to_end(key)
            return self._kept[key]
        if self.store and (stored := self.store.get(key)):
            self.loaded += 1
            return self._keep(key, stored)
        self.misses += 1
        model, data = self._unsharded(case, arithmetic), self._batches(case, step)
        found = evaluate(case, weights, step, arithmetic, perturbed, model=model, data=data)
        if self.store:
            self.store.put(key, found)
        return self._keep(key, found)

    def _keep(self, key: Key, found: Evaluation) -> Evaluation:
        if found.bytes <= self.size:
            self._kept[key] = found
            self.held += found.bytes
        while self.held > self.size:
            self.held -= self._kept.popitem(last=False)[1].bytes
        return found

    def _unsharded(self, case: Case, arithmetic: str) -> Unsharded:
        key = (*(getattr(case, name) for name in OF_MODEL), arithmetic)
        model = self._models.pop(key, None) or Unsharded(case, arithmetic)
        if model.bytes <= MODEL_BYTES:
            self._models[key] = model
        if len(self._models) > MODELS:
            self._models.popitem(last=False)
        return model

    def _batches(self, case: Case, step: int) -> Batches:
        key = (*(getattr(case, name) for name in OF_DATA), step)
        kept = self._data.pop(key) if key in self._data else batches(case, step)
        self._data[key] = kept
        if len(self._data) > STEPS_OF_DATA:
            self._data.popitem(last=False)
        return self._data[key]
