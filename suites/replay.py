"""Replay: every optimizer step done again in fp64 on the run's own gradients and weights, and what came of it instead.

It needs no reference model and multiplies no matrices: its rounding is that of the precision in which weights (or their
fp32 master copies) are kept, whatever the case's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from suites import optimizers
from suites.model import EMBEDDING, HEAD, parameter_shapes, trainable
from suites.numerics import LIMITS, TINY, Deviation, all_finite, cosine, root_mean_square, untold
from suites.observe import bitwise_equal

if TYPE_CHECKING:
    from suites.evidence import Evidence


@dataclass(frozen=True)
class Replayed:
    """What a replay found.

    Args:
        deviations: of each weight after each step (from 0), in units of the rounding of one update.
        broken: what is wrong without being measured, with its step (from 1): a frozen weight that moved, a weight that
            is not its master weight rounded; None where nothing is.
    """

    deviations: tuple[tuple[int, Deviation], ...]
    broken: tuple[int, str] | None = None


def replay(e: Evidence) -> Replayed:
    """Replay all steps of a run.

    Under a low precision the replay leads from master weight to master weight, in units of the rounding of fp32, and
    the model's weight must be the master weight rounded. Frozen parameters must not move by a bit.
    """
    replays = {n: optimizers.replay(e.case) for n in parameter_shapes(e.case) if trainable(e.case, n)}
    found: list[tuple[int, Deviation]] = []
    for step in range(e.case.steps):
        own, coefficient = e.gradients[step], _clipped(e, step)
        for name, after in e.weights[step].items():
            before = e.before(step).get(name)
            if before is None:
                continue
            if name not in replays:
                if not bitwise_equal(before.value, after.value):
                    return Replayed(tuple(found), (step + 1, f"{name} is frozen and moved in step {step + 1}"))
                continue
            if name in e.masters[step]:
                rounded = e.masters[step][name].value.to(after.value.dtype)
                if not bitwise_equal(rounded, after.value):
                    text = f"{name} is not its master weight rounded, after step {step + 1}"
                    return Replayed(tuple(found), (step + 1, text))
            old, new = _updated(e, step, name)
            if name in own and old is not None and new is not None:
                old = old.double()
                gradient = own[name].value.double()
                expected = replays[name].step(old, gradient if coefficient == 1.0 else gradient * coefficient)
                sigma = e.master_u * replays[name].roundings(old, expected)
                found.append((step, _deviation(name, old, new, expected, sigma)))
    return Replayed(tuple(found))


def first_moments(e: Evidence) -> dict[str, dict[str, Tensor]]:
    """Adam's moments after the first step, from the run's own gradients: name -> exp_avg and exp_avg_sq, fp64."""
    if not e.case.optimizer.startswith("adam"):
        return {}
    coefficient, found = _clipped(e, 0), {}
    beta1, beta2 = optimizers.SETTINGS[e.case.optimizer]["betas"]
    for name, whole in e.gradients[0].items():
        gradient = whole.value.double() * coefficient
        found[name] = {"exp_avg": (1 - beta1) * gradient, "exp_avg_sq": (1 - beta2) * gradient.square()}
    return found


def _clipped(e: Evidence, step: int) -> float:
    """Factor by which the run must clip: by the norm that it reports (an oracle of its own judges that norm)."""
    if e.case.clip <= 0:
        return 1.0
    own = e.gradients[step]
    once = [n for n in own if not (e.case.tied and n == HEAD and EMBEDDING in own)]
    norm = math.sqrt(sum(float(own[n].value.double().square().sum()) for n in once))
    norms = (seen.gradient_norm for _, seen in e.reported(step))
    return optimizers.clip_coefficient(min((n for n in norms if n is not None), default=norm), e.case.clip)


def _updated(e: Evidence, step: int, name: str) -> tuple[Tensor | None, Tensor | None]:
    """What the optimizer worked on, before and after a step: the master weight where there is one."""
    if name not in e.masters[step]:
        return e.before(step)[name].value, e.weights[step][name].value
    old = (e.masters[step - 1] if step else e.initial).get(name)
    return None if old is None else old.value, e.masters[step][name].value


def _deviation(name: str, before: Tensor, after: Tensor, expected: Tensor, sigma: Tensor) -> Deviation:
    """Deviation of the weight `after` a step from the replay's, in units of the update's own rounding `sigma`.

    Relative numbers are shares of the update, and `coherence` is that with the update or with the weight, the larger.
    """
    if not all_finite(expected):
        return untold(f"update of {name}", "replay")
    before, after = before.double(), after.double()
    moved = expected - before
    sigma = sigma + TINY
    error = after - expected
    finite = all_finite(after)
    rows = (error.abs() / sigma).reshape(error.shape[0], -1).amax(1)
    row = int(rows.argmax())
    worst = float(rows[row])  # not a number where any is
    if not math.isfinite(worst):
        row, worst = int(rows.nan_to_num(math.inf).argmax()), float(rows.max())
    clean = worst <= LIMITS["replay"]
    worst = worst if finite else math.inf
    scale = root_mean_square(moved) or 1.0
    clearest = float((moved.abs() / sigma).max())
    return Deviation(
        name=f"update of {name}",
        score=worst / LIMITS["replay"],
        scope="replay",
        sigmas=worst,
        relative=root_mean_square(error) / scale if finite else math.inf,
        predicted=root_mean_square(sigma) / scale,
        row=row,
        rows_wrong=(0.0 if clean else float((rows > LIMITS["replay"]).double().mean())) if finite else 1.0,
        sees=LIMITS["replay"] / clearest if clearest else math.inf,
        coherence=cosine(error, moved, before) if finite else 0.0,
    )
