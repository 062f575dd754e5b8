"""Rounding or not: the size of a deviation in units of the rounding that unsharded runs of the same precision show.

For each compared tensor, the noise is what a few unsharded runs at the case's precision differ from fp64 by, at equal
weights. Its root mean square is the predicted sigma of the sharded run: sharding changes the order of sums, not their
precision. Deviations are judged as a whole tensor, row by row, and element by element, against limits in sigmas.

References: Higham & Mary 2019, "A new approach to probabilistic rounding error analysis"; TTrace, arXiv 2506.09280.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from suites.limits import TABLE

LIMITS = {scope: limit.value for scope, limit in TABLE.items()}
TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class Deviation:
    """How far one tensor is from the fp64 reference.

    Args:
        name: what was compared.
        score: the worst of tensor, row and element deviation, each over its limit; above 1 is more than rounding.
        scope: which of the three was worst.
        sigmas: that deviation in predicted sigmas.
        relative: root mean square of the error over that of the reference.
        predicted: root mean square of the predicted error over that of the reference.
        row: index of the row with the worst error.
        rows_wrong: share of rows whose error is above the row limit.
        sees: smallest relative error of the whole tensor that would have been flagged; infinite where the reference is
            zero or not finite.
        coherence: cosine of the angle between error and reference, from 0 to 1: near 0 for rounding, 1 for a factor.
        scopes: deviation in predicted sigmas in every scope that was looked at, for the calibration; empty where there
            is but one, or where the deviation is not finite.
    """

    name: str
    score: float
    scope: str
    sigmas: float
    relative: float
    predicted: float
    row: int
    rows_wrong: float
    sees: float
    coherence: float = 0.0
    scopes: Mapping[str, float] = field(default_factory=dict)


def deviation(name: str, run: Tensor, reference: Tensor, noise: Tensor, u: float) -> Deviation:
    """Compare `run` with the fp64 `reference`, given the errors `noise` of unsharded runs at unit roundoff `u`.

    `run` and `reference` have one shape, `noise` is [samples, *shape]; rows are the first dimension (all but the last,
    flattened, where there are more than two). A value that is not finite counts as an infinite deviation; but where
    the reference, or an unsharded run at this precision, is not finite either, nothing can be told.
    """
    samples = noise.double().reshape(len(noise), -1, noise.shape[-1]).contiguous()
    run, reference = _rows(run), _rows(reference)
    error = run - reference
    squared, squares, squares_of_noise = error.square(), reference.square(), samples.square()
    off, scale, spread = _root_mean(squared), _root_mean(squares), _root_mean(squares_of_noise)
    # A finite sum of squares has finite terms only; one that is not may have overflowed.
    if not (math.isfinite(scale) and math.isfinite(spread)) and not (all_finite(reference) and all_finite(samples)):
        return untold(name)
    finite = math.isfinite(off) or all_finite(run)
    sigma = max(spread, 0.5 * u * scale, TINY)
    columns = error.shape[1]
    row_error, row_scale = (squared.sum(1) / columns).sqrt(), (squares.sum(1) / columns).sqrt()
    row_noise = squares_of_noise.mean((0, 2)).sqrt()
    # Rounding of a factor that a whole row shares (one token's softmax, say) moves the row in proportion to its size.
    # One noise sample shows it in some rows and not in others, so all rows are granted the typical proportion.
    proportions = (row_noise / row_scale)[row_scale > 0.1 * scale]
    shared = _root_mean(proportions.square())
    sigma_row = torch.sqrt(row_noise**2 + (0.5 * sigma) ** 2 + (shared * row_scale) ** 2)
    sigma_element = torch.sqrt(sigma_row.unsqueeze(1) ** 2 + (shared * reference) ** 2)
    rows = row_error / sigma_row
    row = int(rows.argmax())
    worst_row = float(rows[row])  # not a number where any is
    if not math.isfinite(worst_row):
        row = int(rows.nan_to_num(math.inf).argmax())
    ratios = {
        "tensor": off / sigma / LIMITS["tensor"],
        "row": worst_row / LIMITS["row"],
        "element": float((error.abs() / sigma_element).max()) / LIMITS["element"],
    }
    scope = max(ratios, key=lambda key: ratios[key]) if finite else "tensor"
    score = ratios[scope] if finite else math.inf
    clean = worst_row <= LIMITS["row"]
    return Deviation(
        name=name,
        score=score,
        scope=scope,
        sigmas=score * LIMITS[scope],
        relative=off / scale if finite and scale else (math.inf if off else 0.0),
        predicted=sigma / scale if scale else 0.0,
        row=row,
        rows_wrong=(0.0 if clean else float((rows > LIMITS["row"]).double().mean())) if finite else 1.0,
        sees=LIMITS["tensor"] * sigma / scale if scale else math.inf,
        coherence=cosine(error, reference) if finite else 0.0,
        scopes={key: ratio * LIMITS[key] for key, ratio in ratios.items()} if finite else {},
    )


def untold(name: str, scope: str = "tensor") -> Deviation:
    """No deviation, and blind to any: there is nothing to compare with."""
    return Deviation(
        name=name,
        score=0.0,
        scope=scope,
        sigmas=0.0,
        relative=0.0,
        predicted=0.0,
        row=0,
        rows_wrong=0.0,
        sees=math.inf,
    )


def _rows(tensor: Tensor) -> Tensor:
    """[rows, columns]; a vector is one row, since a row of one element has no root mean square to speak of."""
    return tensor.double().reshape(-1, tensor.shape[-1])


def cosine(a: Tensor, *others: Tensor) -> float:
    """Cosine of the angle between two tensors, from 0 to 1; 0 where one of them is zero. The largest of several."""
    norm = norm_of(a)
    return max(_cosine(a, norm, b) for b in others)


def _cosine(a: Tensor, norm: float, b: Tensor) -> float:
    size = norm * norm_of(b)
    return abs(float((a * b).sum())) / size if size else 0.0


def norm_of(tensor: Tensor) -> float:
    """Root of the sum of all squares: what ``tensor.norm()`` is, without its way through Python."""
    return float(torch.linalg.vector_norm(tensor))


def all_finite(tensor: Tensor) -> bool:
    """No element is infinite or not a number."""
    return math.isfinite(float(tensor.sum())) or bool(torch.isfinite(tensor).all())


def root_mean_square(tensor: Tensor) -> float:
    """Root of the mean of all squares, in the tensor's own precision; 0 of none."""
    return _root_mean(tensor.square())


def _root_mean(squares: Tensor) -> float:
    """Root of the mean of a tensor; 0 of none. As ``mean().sqrt()`` has it, bit for bit, in half of the time."""
    # torch's own root: it is not always the one that `math.sqrt` rounds to.
    return float((squares.sum() / squares.numel()).sqrt()) if squares.numel() else 0.0
