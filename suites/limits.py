"""Limits: the largest deviation that is still rounding, each with the calibration that set it.

A limit is a number of predicted sigmas (of roundings of one update for `replay`). To change one, run ``tiebench
calibrate`` and write down what it found: the worst null run on the half of the seeds that sets limits, and on the half
that only checks them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limit:
    """One limit.

    Args:
        value: in sigmas; above it a comparison is flagged.
        meaning: what is compared.
        worst: largest value that null runs of the calibration showed.
        calibration: the runs behind it.
    """

    value: float
    meaning: str
    worst: float
    calibration: str


FOUNDATION = "492 null runs of 2026-11-30: hand-written path, fp32 and fp64, 13 seeds"

TABLE: dict[str, Limit] = {
    "tensor": Limit(6.0, "root mean square of a whole tensor's error", 2.7, FOUNDATION),
    "row": Limit(12.0, "root mean square of one row's error", 3.6, FOUNDATION),
    "element": Limit(40.0, "one element's error", 13.7, FOUNDATION),
    "scalar": Limit(20.0, "loss of a micro-batch", 3.8, FOUNDATION),
    "norm": Limit(
        4.0, "global gradient norm, over the norm of the gradients' noise: it can move no further", 0.5, FOUNDATION
    ),
    "replay": Limit(50.0, "one weight after the optimizer's step, in roundings of one update", 2.5, FOUNDATION),
}

# Relative error that must be visible for a clean result to mean anything. Of a tensor, a tenth; in bfloat16 half, as
# much as one of the two contributions to a tied gradient, or one of two ranks. Of the largest update (replay), half.
BLIND = {"tensor": 0.1, "replay": 0.5}
BLIND_LOW = {"bfloat16": 0.5}

# A deviation this many times over its limit is a bug by itself where the arithmetic is IEEE fp32 or fp64; between 1 and
# this, or at any lower precision, a higher precision is asked (never call something a bug from one precision alone).
DECISIVE = 10.0

# Scaling slope log2(error / error at a higher precision) / log2(u / u there): rounding shrinks with the precision (null
# runs 0.75 and more), a bug does not (0.73 and less).
SLOPE = 0.74
