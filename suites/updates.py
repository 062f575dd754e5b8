"""What is wrong with a gradient norm, and with weights that did not move as the optimizer should move them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from suites import optimizers
from suites.cases import Case
from suites.contributions import Places, alike, places
from suites.evidence import Evidence
from suites.model import EMBEDDING, HEAD
from suites.numerics import LIMITS
from suites.precision import UNIT_ROUNDOFF


@dataclass(frozen=True)
class Moved:
    """What is wrong with the update of one weight.

    Args:
        ratio: movement over what the replay asks for, by tensor-parallel slice.
        still: slices that did not move at all; wrong: those that did not move as asked.
        cause: name of the hypothesis that explains it (`UPDATES`), empty if none does.
    """

    name: str
    ratio: tuple[float, ...]
    still: tuple[int, ...]
    wrong: tuple[int, ...]
    cause: str
    relative: float
    rows: Places


# --- norm ----------------------------------------------------------------------------------------------------------


NEAR = "is right to two digits"


def norms(e: Evidence, step: int) -> tuple[str, ...]:
    """Laws of the reported norm, from squares of the run's own gradients."""
    laws, shards, replicated, total = _squares(e, step)
    reported = {place: seen.gradient_norm for place, seen in e.reported(step) if seen.gradient_norm is not None}
    values = set(reported.values())
    own = [law for law, square in laws.items() if square != total and all(_root(v, square) for v in values)]
    if len(values) > 1:
        own.insert(0, "differs from rank to rank")
        parts = [s + (replicated if r == 0 else 0.0) for r, s in enumerate(shards)]
        if all(_root(v, parts[t]) or _root(v, shards[t] + replicated) for (t, _), v in reported.items()):
            own.insert(0, "is that of each rank's own shards")
    if not own and all(abs(v - math.sqrt(total)) <= 2 * UNIT_ROUNDOFF["bfloat16"] * v for v in values):
        own.append(NEAR)
    return tuple(own)


def clipped_by(e: Evidence, step: int, updates: Sequence[Moved]) -> tuple[str, ...]:
    """Laws of the norm that all weights were clipped by, where they moved by one factor and the norm is right."""
    ratios = [ratio for moved in updates for ratio in moved.ratio if moved.cause == RATE]
    if not e.case.clip or not ratios or not alike(ratios) or len({m.cause for m in updates}) > 1:
        return ()
    norm = e.case.clip / (_coefficient(e, step) * sum(ratios) / len(ratios))
    laws, _, _, total = _squares(e, step)
    return tuple(law for law, square in laws.items() if square != total and _root(norm, square))


def _root(norm: float, square: float) -> bool:
    return abs(norm - math.sqrt(max(square, 0.0))) <= 1e-3 * norm


def _squares(e: Evidence, step: int) -> tuple[dict[str, float], list[float], float, float]:
    """Wrong squared norms by what they do; squares of each rank's shards, of all replicated tensors, and of all."""
    shards, replicated, tied = [0.0] * e.case.tp, 0.0, 0.0
    for name, whole in e.gradients[step].items():
        if e.case.tied and name == HEAD:
            continue
        square = float(whole.value.double().square().sum())
        tied += square if e.case.tied and name == EMBEDDING else 0.0
        if whole.dim is None:
            replicated += square
        else:
            for rank, part in enumerate(whole.value.double().split(list(whole.sizes), whole.dim)):
                shards[rank] += float(part.square().sum())
    total = sum(shards) + replicated
    laws = {
        "counts replicated weights once a rank": sum(shards) + e.case.tp * replicated,
        "counts the tied weight twice": total + tied,
        "counts everything once a data-parallel rank": total * e.case.dp,
        "counts nothing sharded": replicated,
        "counts nothing replicated": sum(shards),
        "leaves the tied weight out": total - tied,
    }
    if e.case.tp > 1:
        laws |= {f"counts the shards of tensor-parallel rank {r} only": s + replicated for r, s in enumerate(shards)}
    return laws, shards, replicated, total


# --- updates -------------------------------------------------------------------------------------------------------

STILL, LATE, FRESH, COUNT, DECAY, OTHER, RATE, LOW = (
    "did not move",
    "moved as the step before asked",
    "moved as if its moments were new",
    "moved as if this were its first step",
    "moved as the replay asks, with another weight decay",
    "moved as another optimizer would move it",
    "moved in the right direction by another amount",
    "moved as asked, rounded to a lower precision",
)


def updates(e: Evidence, step: int) -> tuple[Moved, ...]:
    """What is wrong with each weight that did not move as the replay of the optimizer says."""
    found = []
    for name in e.gradients[step]:
        if e.case.tied and name == HEAD and EMBEDDING in e.gradients[step]:
            continue
        moved = _moved(e, step, name)
        if moved:
            found.append(moved)
    return tuple(sorted(found, key=lambda moved: (not moved.cause, -moved.relative)))


def _coefficient(e: Evidence, step: int) -> float:
    own = e.gradients[step]
    once = [n for n in own if not (e.case.tied and n == HEAD and EMBEDDING in own)]
    norm = math.sqrt(sum(float(own[n].value.double().square().sum()) for n in once))
    reported = (seen.gradient_norm for _, seen in e.reported(step))
    return optimizers.clip_coefficient(min((n for n in reported if n is not None), default=norm), e.case.clip)


def _held(e: Evidence, step: int, name: str) -> Tensor:
    """What the optimizer worked on, before a step: the master weight where there is one."""
    low = step > 0 and name in e.masters[step - 1]
    return (e.masters[step - 1] if low else e.before(step))[name].value.double()


def _moved(e: Evidence, step: int, name: str) -> Moved | None:
    replay = optimizers.replay(e.case)
    wanted, kept, before = torch.zeros(()), [], torch.zeros(())
    for past in range(step + 1):
        gradient = e.gradients[past][name].value.double() * _coefficient(e, past)
        before = _held(e, past, name)
        wanted = replay.step(before, gradient) - before
        kept.append(wanted)
    whole = e.masters[step].get(name, e.weights[step][name])
    moved = whole.value.double() - before
    rounding = LIMITS["replay"] * e.master_u * replay.roundings(before, before + wanted)
    error = moved - wanted
    bad = ~(error.abs() <= rounding)
    if not bool(bad.any()):
        return None
    dim, sizes = (whole.dim, list(whole.sizes)) if whole.dim is not None else (0, [whole.value.shape[0]])
    parts = list(zip(moved.split(sizes, dim), wanted.split(sizes, dim), strict=True))
    size = float(wanted.square().mean().sqrt())
    rows, _ = places(e, step, name, torch.where(bad, error, 0.0), torch.zeros_like(error), 0.0)
    cause = _cause(e, step, name, parts, kept, before, dim)
    if not cause and bool((moved[bad] == 0).all()):
        cause = STILL
    return Moved(
        name=name,
        ratio=tuple(float((m * w).sum() / w.square().sum().clamp_min(1e-300)) for m, w in parts),
        still=tuple(i for i, (m, w) in enumerate(parts) if not bool(m.any()) and bool(w.any())),
        wrong=tuple(i for i, part in enumerate(bad.split(sizes, dim)) if bool(part.any())),
        cause=cause,
        relative=float(error.square().mean().sqrt()) / size if size else math.inf,
        rows=rows,
    )


def _cause(  # noqa: PLR0917
    e: Evidence,
    step: int,
    name: str,
    parts: Sequence[tuple[Tensor, Tensor]],
    kept: Sequence[Tensor],
    before: Tensor,
    dim: int,
) -> str:
    moved, wanted = (torch.cat([pair[i] for pair in parts], dim) for i in (0, 1))
    near = lambda other, share=0.02: (  # noqa: E731
        float((moved - other).norm()) <= share * float((moved - wanted).norm())
    )
    gradient = e.gradients[step][name].value.double() * _coefficient(e, step)
    if not bool(torch.isfinite(moved).all() and torch.isfinite(wanted).all()):
        return ""
    if not bool(moved.any()):
        return STILL
    fresh = optimizers.replay(e.case).step(before, gradient) - before
    if step and near(fresh):
        return FRESH
    if step and near(kept[-2]):
        return LATE
    if step and e.case.optimizer.startswith("adam") and near(_replayed(e, step, name, e.case, counting=False)):
        return COUNT
    if _decayed(moved, wanted, before):
        return DECAY
    if any(near(other) for other in _other_optimizers(e, step, name)):
        return OTHER
    if all(_multiple(m, w) for m, w in parts):
        return RATE
    return LOW if _rounded(before, moved, wanted) else ""


def _decayed(moved: Tensor, wanted: Tensor, before: Tensor) -> bool:
    """What is left of the movement is a multiple of the weight itself."""
    error = moved - wanted
    share = float((error * before).sum() / before.square().sum().clamp_min(1e-300))
    return bool(torch.isfinite(error).all()) and float((error - share * before).norm()) < 0.02 * float(error.norm())


def _rounded(before: Tensor, moved: Tensor, wanted: Tensor) -> bool:
    """The error is no larger than bf16's rounding of each weight, or of its movement (kept moments), and has no
    direction."""
    error = moved - wanted
    u = UNIT_ROUNDOFF["bfloat16"]
    small = bool((error.abs() <= 1.01 * u * (before + wanted).abs() + 2 * u * wanted.abs()).all())
    aligned = abs(float((error * wanted).sum())) > 0.5 * float(error.norm() * wanted.norm())
    return small and not aligned


def _multiple(moved: Tensor, wanted: Tensor) -> bool:
    """Moved by a multiple of what was asked, not the same and not nothing."""
    ratio = float((moved * wanted).sum() / wanted.square().sum().clamp_min(1e-300))
    off = float((moved - wanted).norm())
    other = abs(ratio - 1) > 1e-5 and abs(ratio) > 1e-5
    return other and float((moved - ratio * wanted).norm()) < 0.05 * off


def _other_optimizers(e: Evidence, step: int, name: str) -> Iterator[Tensor]:
    for other in optimizers.SETTINGS:
        if other != e.case.optimizer:
            yield _replayed(e, step, name, e.case.but(optimizer=other))


def _replayed(e: Evidence, step: int, name: str, case: Case, *, counting: bool = True) -> Tensor:
    """Movement that a case's optimizer asks for; not `counting`: it takes every step for its first."""
    replay = optimizers.replay(case)
    moved = torch.zeros(())
    for past in range(step + 1):
        replay.count = replay.count if counting else 0
        weight = _held(e, past, name)
        gradient = e.gradients[past][name].value.double() * _coefficient(e, past)
        moved = replay.step(weight, gradient) - weight
    return moved
