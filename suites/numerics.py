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
    samples = torch.stack([_rows(sample) for sample in noise])
    run, reference = _rows(run), _rows(reference)
    error = run - reference
    finite = bool(torch.isfinite(run).all())
    if not bool(torch.isfinite(reference).all() and torch.isfinite(samples).all()):
        return untold(name)
    scale = _rms(reference)
    sigma = max(_rms(samples), 0.5 * u * scale, torch.finfo(torch.float64).tiny)
    row_error, row_scale = error.square().mean(1).sqrt(), reference.square().mean(1).sqrt()
    row_noise = samples.square().mean((0, 2)).sqrt()
    # Rounding of a factor that a whole row shares (one token's softmax, say) moves the row in proportion to its size.
    # One noise sample shows it in some rows and not in others, so all rows are granted the typical proportion.
    large = row_scale > 0.1 * scale
    shared = float((row_noise / row_scale)[large].square().mean().sqrt()) if bool(large.any()) else 0.0
    sigma_row = torch.sqrt(row_noise**2 + (0.5 * sigma) ** 2 + (shared * row_scale) ** 2)
    sigma_element = torch.sqrt(sigma_row.unsqueeze(1) ** 2 + (shared * reference) ** 2)
    ratios = {
        "tensor": _rms(error) / sigma / LIMITS["tensor"],
        "row": float((row_error / sigma_row).max()) / LIMITS["row"],
        "element": float((error.abs() / sigma_element).max()) / LIMITS["element"],
    }
    scope = max(ratios, key=lambda key: ratios[key]) if finite else "tensor"
    score = ratios[scope] if finite else math.inf
    wrong = row_error / sigma_row > LIMITS["row"]
    return Deviation(
        name=name,
        score=score,
        scope=scope,
        sigmas=score * LIMITS[scope],
        relative=_rms(error) / scale if finite and scale else (math.inf if _rms(error) else 0.0),
        predicted=sigma / scale if scale else 0.0,
        row=int((row_error / sigma_row).nan_to_num(math.inf).argmax()),
        rows_wrong=float(wrong.double().mean()) if finite else 1.0,
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


def cosine(a: Tensor, b: Tensor) -> float:
    """Cosine of the angle between two tensors, from 0 to 1; 0 where one of them is zero."""
    size = float(a.norm() * b.norm())
    return abs(float((a * b).sum())) / size if size else 0.0


def _rms(tensor: Tensor) -> float:
    return float(tensor.square().mean().sqrt()) if tensor.numel() else 0.0
