"""Faults of graded size, for the calibration: one factor 1 + s in the wrong place, from s = 1e-7 to 1.

They are no proof that an oracle sees a class of bugs (the other modules are that) but measure how small a bug it sees.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from torch import Tensor

from suites.cases import Case
from suites.faults.pieces import ScaledGradient, using
from suites.faults.table import Fault, Replacement
from suites.model import EMBEDDING
from suites.paths import handwritten as hw

SIZES = (1e-7, 3e-7, 1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)


def _lookup(size: float) -> list[Replacement]:
    scaled = lambda module, weight: ScaledGradient.apply(weight, 1 + size)  # noqa: E731
    return [using(cls, scaled) for cls in (hw.HiddenParallelEmbedding, hw.VocabParallelEmbedding)]


def _collected(change: Callable[[hw.DataParallel, Tensor], Tensor]) -> list[Replacement]:
    """Change the embedding's gradient as it is collected, before it is reduced over data-parallel ranks."""
    original = hw.DataParallel.collected

    def broken(self: hw.DataParallel, name: str) -> Tensor | None:
        gradient = original(self, name)
        return gradient if gradient is None or name != EMBEDDING else change(self, gradient)

    return [(hw.DataParallel, "collected", broken)]


def _row(size: float) -> list[Replacement]:
    def change(of: hw.DataParallel, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        if of.case.head == "row" or of.mesh.tp_rank == 0:  # else another rank holds the vocabulary's first row
            gradient[0] *= 1 + size
        return gradient

    return _collected(change)


def _shard(size: float) -> list[Replacement]:
    def change(of: hw.DataParallel, gradient: Tensor) -> Tensor:
        return gradient * (1 + size) if of.mesh.tp_rank == of.mesh.tp - 1 else gradient

    return _collected(change)


def _mean(size: float) -> list[Replacement]:
    original = hw.mean_over_dp
    return [(hw, "mean_over_dp", lambda gradient, mesh: original(gradient, mesh) * (1 + size))]


# kind -> class of public bugs, what is wrong, a case that shows it, how.
KINDS = {
    "lookup": (5, "the lookup's contribution to the tied gradient", "handwritten:head=row,zero=0,hidden=35", _lookup),
    "row": (11, "the first row of the tied gradient", "handwritten:head=vocab,zero=0,vocab=67", _row),
    "shard": (5, "the last rank's shard of the tied gradient", "handwritten:head=vocab,zero=0,vocab=67", _shard),
    "mean": (9, "the data-parallel mean of all gradients", "handwritten:head=row,zero=0,tp=1,dp=2", _mean),
}


def name_of(kind: str, size: float) -> str:
    """Name of a graded fault."""
    return f"graded_{kind}_{size:.0e}"


GRADED: Mapping[str, Fault] = {
    name_of(kind, size): Fault(
        name=name_of(kind, size),
        path="handwritten",
        bug_class=bug_class,
        meaning=f"{what} is too large by a share of {size:.0e}",
        needs="an embedding that is trained",
        case=Case.parse(case).id,
        invisible="",
        caught_by=("gradient",),
        replacements=functools.partial(build, size),
    )
    for kind, (bug_class, what, case, build) in KINDS.items()
    for size in SIZES
}
