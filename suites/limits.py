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
        worst: largest value that null runs with even seeds showed, which set the limits.
        held_out: the same of odd seeds, which only check them.
        calibration: the runs behind both.
    """

    value: float
    meaning: str
    worst: float
    held_out: float
    calibration: str


CALIBRATION = (
    "2026-12-01, torch 2.13.0, CPU, gloo: 2148 null runs of the hand-written path in all six arithmetics, 538 of "
    "deepspeed 0.19.8 in fp32, TF32 and bf16"
)

TABLE: dict[str, Limit] = {
    "tensor": Limit(6.0, "root mean square of a whole tensor's error", 2.99, 2.81, CALIBRATION),
    "row": Limit(12.0, "root mean square of one row's error", 4.35, 4.53, CALIBRATION),
    "element": Limit(40.0, "one element's error", 14.62, 11.76, CALIBRATION),
    "scalar": Limit(20.0, "loss of a micro-batch", 7.29, 4.97, CALIBRATION),
    "norm": Limit(
        4.0,
        "global gradient norm, over the norm of the gradients' noise: it can move no further",
        1.24,
        1.42,
        CALIBRATION,
    ),
    "replay": Limit(50.0, "one weight after the optimizer's step, in roundings of one update", 3.1, 2.67, CALIBRATION),
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
