"""Evidence: all that the oracles look at.

Full tensors from all ranks, the reference at the run's own weights, and every numeric comparison with it, made once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from suites.cases import Case
from suites.limits import DECISIVE
from suites.model import parameter_shapes, trainable
from suites.numerics import LIMITS, Deviation, deviation, untold
from suites.observe import (
    Assembled,
    ObservationError,
    Piece,
    RankObservation,
    StepObservation,
    assemble,
    bitwise_equal,
    by_rank,
)
from suites.precision import LOW, UNIT_ROUNDOFF, arithmetic, master_dtype, unit_roundoff
from suites.reference import Evaluation, ReferenceCache, digest_of
from suites.replay import Replayed, replay

NOISE_SAMPLES = 3  # one alone is at times too lucky: its noise in one small tensor a quarter of what is usual
# Where one rounding moves all of a step's gradients (few tokens, a narrow model), three samples are too lucky in about
# one run of a thousand: what comes near a limit, and not far beyond it, is measured against more of them.
MANY_SAMPLES, SAMPLES_BYTES = 16, 2**30
DOUBTFUL = 0.5  # share of the limit
GRIDS = {"bfloat16": 7, "tf32 or float16": 10, "float32": 23}  # mantissa bits that give a lower precision away
LARGEST, FEWEST = 512, 8  # rows and columns of an error that are looked at for a pattern
VERY_FIRST, FEW_FIRST = 4, 64  # values that are looked at before all are
ENOUGH = 32  # elements below which a tensor may lie on such a grid by chance


@dataclass(frozen=True)
class Comparison:
    """One numeric comparison with the reference: which oracle asks, in which step (from 0), and how far off."""

    oracle: str
    step: int
    deviation: Deviation


class ReferenceFailed(Exception):
    """The unsharded model cannot be evaluated: nothing can be said of the run."""


class Evidence:
    """Observations by rank, full tensors, and the reference at the run's own weights.

    What cannot be assembled is missing from the maps and stands in `gaps`; the reference is evaluated on demand.

    Args:
        arithmetic: name of the case's arithmetic (`suites.precision.UNIT_ROUNDOFF`); `u` is its unit roundoff.
    """

    def __init__(self, case: Case, ranks: Sequence[RankObservation], cache: ReferenceCache):
        self.case = case
        self.ranks = by_rank(ranks)
        self.cache = cache
        self.gaps: list[str] = []
        self._digests: dict[int, bytes] = {}
        self.dtype = getattr(torch, case.dtype)
        self.arithmetic = arithmetic(case)
        self.u = UNIT_ROUNDOFF[self.arithmetic]
        self.master_u = unit_roundoff(master_dtype(case))
        shapes = parameter_shapes(case)
        self.initial = self._all("initial weights", {n: self._pieces(n, "initial", None) for n in shapes})
        self.weights: list[dict[str, Assembled]] = []  # after each step
        self.masters: list[dict[str, Assembled]] = []  # after each step; empty where weights are updated themselves
        self.gradients: list[dict[str, Assembled]] = []
        self.logits: list[dict[tuple[int, int], Assembled]] = []
        names = [n for n in shapes if trainable(case, n)]
        low = names if case.dtype in LOW else []
        for step in range(case.steps):
            self.weights.append(self._step(step, "weight", "weights", list(shapes)))
            self.masters.append(self._step(step, "master weight", "masters", low))
            self.gradients.append(self._step(step, "gradient", "gradients", names))
            self.logits.append(self._logits(step))

    def _step(self, step: int, what: str, kind: str, names: Sequence[str]) -> dict[str, Assembled]:
        return self._all(f"step {step + 1} {what}", {n: self._pieces(n, kind, step) for n in names})

    def _pieces(self, name: str, kind: str, step: int | None) -> dict[tuple[int, int], Piece]:
        found = {}
        for place, rank in self.ranks.items():
            if step is not None and step >= len(rank.steps):
                continue
            holder: Mapping[str, Piece] = getattr(rank if step is None else rank.steps[step], kind)
            if name in holder:
                found[place] = holder[name]
        return found

    def _all(self, what: str, pieces: Mapping[str, Mapping[tuple[int, int], Piece]]) -> dict[str, Assembled]:
        shapes = parameter_shapes(self.case)
        whole = {}
        for name, placed in pieces.items():
            try:
                whole[name] = assemble(name, placed, shapes[name], self.case.tp, self.case.dp)
            except ObservationError as error:
                self.gaps.append(f"{what} {error}")
        return whole

    def _logits(self, step: int) -> dict[tuple[int, int], Assembled]:
        case, found = self.case, {}
        for dp_rank in range(case.dp):
            for micro in range(case.accumulate):
                placed = {
                    (tp, 0): rank.steps[step].logits[micro]
                    for (tp, dp), rank in self.ranks.items()
                    if dp == dp_rank and step < len(rank.steps) and micro < len(rank.steps[step].logits)
                }
                try:
                    shape = (case.batch, case.sequence, case.vocab)
                    # Each data-parallel rank has logits of its own: a mesh of one such rank.
                    found[dp_rank, micro] = assemble("logits", placed, shape, case.tp, 1)
                except ObservationError as error:
                    self.gaps.append(f"step {step + 1} micro-batch {micro} of data-parallel rank {dp_rank}: {error}")
        return found

    def before(self, step: int) -> dict[str, Assembled]:
        """Weights that step `step` (from 0) started from."""
        return self.initial if step == 0 else self.weights[step - 1]

    def reported(self, step: int) -> Iterator[tuple[tuple[int, int], StepObservation]]:
        """What each rank, by (tp_rank, dp_rank), reported of a step, where it did."""
        for place, rank in sorted(self.ranks.items()):
            if step < len(rank.steps):
                yield place, rank.steps[step]

    @cached_property
    def exact(self) -> list[Evaluation | None]:
        """fp64 reference of each step at the run's own weights, None where these could not be assembled."""
        return [self.evaluate(step, "float64") for step in range(self.case.steps)]

    def evaluate(self, step: int, arithmetic: str, perturbed: int = 0) -> Evaluation | None:
        """The unsharded model at the weights that a step started from; None where these could not be assembled."""
        weights = {name: whole.value for name, whole in self.before(step).items()}
        if set(weights) != set(parameter_shapes(self.case)):
            return None
        if step not in self._digests:
            self._digests[step] = digest_of(weights)
        digest = self._digests[step]
        try:
            return self.cache.evaluate(self.case, weights, step, arithmetic, perturbed=perturbed, digest=digest)
        except Exception as error:
            text = f"the reference failed in step {step + 1}: {type(error).__name__}: {error}"
            raise ReferenceFailed(text) from error

    def samples(self, step: int, arithmetic: str, count: int = NOISE_SAMPLES) -> list[Evaluation]:
        """What rounding looks like in a step: the unsharded run as it is, and with weights moved by a roundoff."""
        found = (self.evaluate(step, arithmetic, seed) for seed in range(count))
        return [evaluation for evaluation in found if evaluation]

    @cached_property
    def comparisons(self) -> tuple[Comparison, ...]:
        """Logits, losses, gradients and gradient norm of every step against the reference."""
        return tuple(found for step in range(self.case.steps) for found in self.compare(step))

    def compare(self, step: int, arithmetic: str | None = None) -> list[Comparison]:
        """The comparisons of one step, in units of the rounding of the case's arithmetic, or as if it were another."""
        exact = self.exact[step]
        if exact is None:
            return []
        name = arithmetic or self.arithmetic
        # fp64 cannot be measured against fp64: its noise is that of fp32, scaled by the unit roundoffs.
        sampled = "float32" if name == "float64" else name
        units = UNIT_ROUNDOFF[name], UNIT_ROUNDOFF[sampled]
        found = self._against(step, _Noise(exact, self.samples(step, sampled), *units))
        many = min(MANY_SAMPLES, SAMPLES_BYTES // max(1, exact.bytes))
        worst = max((c.deviation.score for c in found), default=0.0)
        if arithmetic is None and DOUBTFUL < worst <= DECISIVE and many > NOISE_SAMPLES:
            found = self._against(step, _Noise(exact, self.samples(step, sampled, many), *units))
        return found

    def _against(self, step: int, noise: _Noise) -> list[Comparison]:
        return [*self._compare_logits(step, noise), *self._compare_losses(step, noise), *self._gradients(step, noise)]

    def _compare_logits(self, step: int, noise: _Noise) -> Iterator[Comparison]:
        for key, whole in self.logits[step].items():
            errors = noise.errors([sample.logits[key] for sample in noise.samples], noise.exact.logits[key])
            name = f"logits of {_batch(key, self.case)}"
            yield Comparison("logits", step, deviation(name, whole.value, noise.exact.logits[key], errors, noise.u))

    def _compare_losses(self, step: int, noise: _Noise) -> Iterator[Comparison]:
        reference = torch.tensor([noise.exact.loss[k] for k in sorted(noise.exact.loss)], dtype=torch.float64)
        errors = [[s.loss[k] - noise.exact.loss[k] for k in sorted(s.loss)] for s in noise.samples]
        spread = torch.tensor(errors, dtype=torch.float64) * noise.scale
        # Losses are added up in fp32 or better, whatever the precision of the logits.
        floor = min(noise.u, self.master_u) * float(reference.abs().mean())
        sigma = max(float(spread.square().mean().sqrt()) if errors else 0.0, floor)
        for (_, dp), seen in self.reported(step):
            for micro, value in enumerate(seen.loss):
                if (dp, micro) in noise.exact.loss:
                    found = _scalar(
                        f"loss of {_batch((dp, micro), self.case)}", value, noise.exact.loss[dp, micro], sigma
                    )
                    yield Comparison("loss", step, found)

    def _gradients(self, step: int, noise: _Noise) -> Iterator[Comparison]:
        spread = 0.0
        counted: set[int] = set()  # a tied weight's gradient counts once
        for name, reference in noise.exact.gradients.items():
            errors = noise.errors([sample.gradients[name] for sample in noise.samples], reference)
            if name in self.gradients[step]:
                found = deviation(name, self.gradients[step][name].value, reference, errors, noise.u)
                yield Comparison("gradient", step, found)
            if id(reference) not in counted:
                counted.add(id(reference))
                spread += float(errors.square().sum()) / max(1, len(errors))
        # Rounding moves the norm no further than the norm of the gradients' own noise.
        norm = noise.exact.gradient_norm
        sigma = max(math.sqrt(spread), 4 * self.master_u * norm, torch.finfo(torch.float64).tiny)
        for _, seen in self.reported(step):
            if seen.gradient_norm is not None:
                found = _scalar("global norm", seen.gradient_norm, norm, sigma, "norm")
                yield Comparison("gradient_norm", step, found)

    def concentration(self, oracle: str, name: str, step: int) -> float:
        """Share of an error's energy in its largest singular direction: near 1 for one wrong factor, row or column."""
        exact = self.exact[step]
        if exact is None:
            return 0.0
        if oracle == "gradient" and name in self.gradients[step]:
            error = self.gradients[step][name].value.double() - exact.gradients[name]
        elif oracle == "logits":
            batches = {f"logits of {_batch(key, self.case)}": key for key in self.logits[step]}
            error = self.logits[step][batches[name]].value.double() - exact.logits[batches[name]]
        else:
            return 0.0
        error = error.reshape(-1, error.shape[-1])[:LARGEST, :LARGEST]
        if min(error.shape) < FEWEST or not bool(torch.isfinite(error).all()):
            return 0.0
        values = torch.linalg.svdvals(error).square()
        return float(values[0] / values.sum().clamp_min(torch.finfo(torch.float64).tiny))

    @cached_property
    def replayed(self) -> Replayed:
        """Every optimizer step done again in fp64."""
        return replay(self)

    @cached_property
    def bitwise(self) -> bool:
        """Logits and gradients of every step are bit for bit those of the unsharded run in the case's arithmetic."""
        for step in range(self.case.steps):
            own = self.evaluate(step, self.arithmetic)
            if own is None or not all(bitwise_equal(w.value, own.logits[k]) for k, w in self.logits[step].items()):
                return False
            if not all(bitwise_equal(w.value, own.gradients[n]) for n, w in self.gradients[step].items()):
                return False
        return True

    def on_grid(self, step: int) -> Iterator[tuple[str, str]]:
        """Tensors of a step all of whose values a lower precision can hold, while the unsharded run's are not so.

        Yields what the tensor is, and the name of the lower precision.
        """
        own = self.evaluate(step, self.arithmetic)
        for key, whole in self.logits[step].items():
            if (grid := grid_of(whole.value)) and own and grid_of(own.logits[key]) != grid:
                yield f"logits of {_batch(key, self.case)}", grid
        for name, whole in self.gradients[step].items():
            unsharded = own.gradients.get(name) if own else None
            grid = grid_of(whole.value)
            # The sum of a few bf16 numbers fits the next finer grids often enough to do so in all of a small tensor.
            if not grid or (self.case.dtype == "bfloat16" and grid != "bfloat16"):
                continue
            if unsharded is not None and grid_of(unsharded) != grid:
                yield f"the gradient of {name}", grid
        kind = "the master weight of" if self.masters[step] else "the weight"
        before = self.masters[step - 1] if step and self.masters[step] else self.before(step)
        for name, whole in (self.masters[step] or self.weights[step]).items():
            if name in before and before[name].value.shape == whole.value.shape:
                if _ordinary(whole.value, before[name].value):
                    continue
                moved = whole.value[whole.value != before[name].value]
                if grid := grid_of(moved):
                    yield f"{kind} {name}", grid


class _Noise:
    """The errors of unsharded runs in one arithmetic: what rounding does to each tensor of one step."""

    def __init__(self, exact: Evaluation, samples: Sequence[Evaluation], u: float, sampled_u: float):
        self.exact, self.samples, self.u = exact, samples, u
        self.scale = u / sampled_u

    def errors(self, sampled: Sequence[Tensor], exact: Tensor) -> Tensor:
        """[samples, *shape], fp64."""
        found = torch.stack(list(sampled)).double() - exact
        return found if self.scale == 1.0 else found * self.scale


def _batch(key: tuple[int, int], case: Case) -> str:
    dp_rank, micro = key
    return f"micro-batch {micro}" + (f" of data-parallel rank {dp_rank}" if case.dp > 1 else "")


def _scalar(name: str, run: float, reference: float, sigma: float, scope: str = "scalar") -> Deviation:
    if not (math.isfinite(reference) and math.isfinite(sigma)):
        return untold(name, scope)
    sigmas = abs(run - reference) / sigma if math.isfinite(run) else math.inf
    scale = abs(reference) or 1.0
    limit = LIMITS[scope]
    return Deviation(
        name=name,
        score=sigmas / limit,
        scope=scope,
        sigmas=sigmas,
        relative=sigmas * sigma / scale,
        predicted=sigma / scale,
        row=0,
        rows_wrong=0.0,
        sees=limit * sigma / scale,
    )


def grid_of(tensor: Tensor, enough: int = ENOUGH) -> str:
    """The lowest precision that holds every value of a tensor, where it is lower than the tensor's own; else empty.

    Tensors with fewer than `enough` values that are not zero are no evidence.
    """
    if _ordinary(tensor):
        return ""
    flat = tensor.flatten()
    if len(flat) > FEW_FIRST and not grid_of(flat[:FEW_FIRST], 1) and bool((flat[:FEW_FIRST] != 0).any()):
        return ""  # the usual case: a few values tell
    values = flat.double()
    values = values[(values != 0) & torch.isfinite(values)]
    if len(values) < enough:
        return ""
    mantissa = torch.frexp(values).mantissa
    own = _mantissa_bits(tensor.dtype)
    for name, bits in GRIDS.items():
        if bits < own and bool((mantissa * 2.0 ** (bits + 1) % 1 == 0).all()):
            return name
    return ""


def _ordinary(tensor: Tensor, before: Tensor | None = None) -> bool:
    """One of the first values that differ from those `before` (from zero) is enough: no lower precision can hold it.

    The cheap way to the usual answer; False where these few values do not tell.
    """
    own = _mantissa_bits(tensor.dtype)
    finest = max((bits for bits in GRIDS.values() if bits < own), default=0)
    if not finest:
        return True
    values = tensor.flatten()[:VERY_FIRST].tolist()
    old = before.flatten()[:VERY_FIRST].tolist() if before is not None else [0.0] * len(values)
    return any(
        value not in (was, 0.0) and math.isfinite(value) and math.frexp(value)[0] * 2.0 ** (finest + 1) % 1 != 0
        for value, was in zip(values, old, strict=True)
    )


def _mantissa_bits(dtype: torch.dtype) -> int:
    return -int(math.log2(torch.finfo(dtype).eps))
