"""Optimizers: the one table of their settings, and an fp64 replay on a run's own gradients.

The replay starts from the weights that the run had before a step and from moments rebuilt out of the run's own
gradients, so that rounding of earlier steps does not count and only this step's arithmetic does (step-local method).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from suites.cases import Case

# eps is large enough that rounding of near-zero gradients is not blown up (bug-hiding and alarm-raising with 1e-8).
SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.1},
    "momentum": {"lr": 0.05, "momentum": 0.9},
    "adam": {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-3},
    "adamw": {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-3, "weight_decay": 0.1},
}
CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


def make(case: Case, parameters: Iterable[nn.Parameter | Tensor]) -> torch.optim.Optimizer:
    """The case's torch optimizer over `parameters`."""
    return CLASSES[case.optimizer](list(parameters), **SETTINGS[case.optimizer])


def clip_coefficient(norm: float, clip: float) -> float:
    """Factor on all gradients for a largest norm of `clip` (0: no clipping), as in torch.nn.utils.clip_grad_norm_."""
    return min(1.0, clip / (norm + 1e-6)) if clip > 0 else 1.0


@dataclass
class Replay:
    """Moments of one parameter in fp64, rebuilt from the run's own gradients.

    `lost` bounds, element by element and in unit roundoffs, what rounding has added to the momentum.
    """

    name: str
    settings: Mapping[str, Any]
    first: Tensor | None = None
    second: Tensor | None = None
    count: int = 0
    lost: Tensor | float = 0.0

    def step(self, weight: Tensor, gradient: Tensor) -> Tensor:
        """Weight after one step from `weight` with (clipped) `gradient`; all fp64."""
        s, g = self.settings, gradient
        self.count += 1
        if self.name == "sgd":
            return weight - s["lr"] * g
        if self.name == "momentum":
            kept = 0.0 if self.first is None else s["momentum"] * (self.lost + self.first.abs())
            self.lost = kept + g.abs()
            self.first = g.clone() if self.first is None else s["momentum"] * self.first + g
            return weight - s["lr"] * self.first
        beta1, beta2 = s["betas"]
        self.first = (1 - beta1) * g if self.first is None else beta1 * self.first + (1 - beta1) * g
        self.second = (1 - beta2) * g * g if self.second is None else beta2 * self.second + (1 - beta2) * g * g
        mean = self.first / (1 - beta1**self.count)
        scale = (self.second / (1 - beta2**self.count)).sqrt() + s["eps"]
        decayed = weight * (1 - s["lr"] * s["weight_decay"]) if self.name == "adamw" else weight
        return decayed - s["lr"] * mean / scale

    def roundings(self, before: Tensor, after: Tensor) -> Tensor:
        """Size of the rounding of the step just taken, element by element, in unit roundoffs; fp64.

        Of the stored weight and of the update; and of the momentum, whose terms may cancel while their roundings, also
        those of earlier steps, stay. Adaptive optimizers divide by a root of the second moment: a full-sized update.
        """
        rate = self.settings["lr"]
        size = after.abs() + (after - before).abs()
        if self.name == "momentum":
            return size + rate * self.lost
        return size + (rate if self.name.startswith("adam") else 0.0)


def replay(case: Case) -> Replay:
    """A fresh replay for one parameter of the case."""
    return Replay(case.optimizer, SETTINGS[case.optimizer])
