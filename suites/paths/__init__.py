"""Training paths. Each module here trains the case's model its framework's way behind the one interface `Trainer`.

To add a path: one module with a function ``build(case, device, notice) -> Trainer`` and one row in `load`; add its
name to `suites.cases.PATHS` and its unsupported factor values to the table of factors. A path knows nothing of oracles.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from suites.cases import Case
from suites.data import MicroBatch
from suites.observe import Piece

# notice(event, embedding_weight, head_weight): the path calls it after every event of the model's life.
Notice = Callable[[str, Tensor, Tensor], None]


class Trainer(Protocol):
    """One rank's sharded model and optimizer.

    Parameters go by the canonical names of `suites.model.parameter_shapes`; a tied weight goes by both of its names.
    """

    tp_rank: int
    dp_rank: int

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """Live parameters by canonical name, read off the live modules at each call."""
        ...

    def module(self) -> nn.Module:
        """The live sharded model."""
        ...

    def layout(self) -> Mapping[str, str]:
        """Class of the live module that holds each parameter."""
        ...

    def forward_backward(self, micro: MicroBatch, last: bool) -> tuple[Tensor, Tensor]:
        """Train on one micro-batch of this data-parallel rank; `last` of the step: gradients become complete.

        Returns:
            loss (scalar, of this micro-batch alone) and logits [batch, sequence, local or full vocabulary].
        """
        ...

    def gradients(self) -> Mapping[str, Piece]:
        """This rank's part of every trainable parameter's gradient: complete over data parallelism, before clipping."""
        ...

    def step(self) -> float | None:
        """Clip, update, clear gradients. Returns the global gradient norm before clipping where the path knows it."""
        ...

    def weights(self) -> Mapping[str, Piece]:
        """This rank's part of every parameter."""
        ...

    def masters(self) -> Mapping[str, Piece]:
        """This rank's part of every master weight; empty where the optimizer updates the parameters themselves."""
        ...

    def saved(self) -> Mapping[str, Piece]:
        """What the files of a checkpoint of whole tensors hold, ``kind:name``, on the rank that made them; and this
        rank's part of each (master) weight as it was saved, ``held:name``. Empty where there is no such checkpoint."""
        ...

    def optimized(self) -> Sequence[Tensor]:
        """Every parameter object that the optimizer was given, once per mention."""
        ...

    def zero_stage(self) -> int:
        """ZeRO stage that runs, read off the live optimizer (its class, its switches, what it did), not the case."""
        ...

    def close(self) -> None:
        """Give back what the next case in this process must not inherit."""
        ...


Build = Callable[[Case, torch.device, Notice], Trainer]

# Modules that a path's first cases import while they run: seconds, which every set of forked ranks would spend anew.
LATE_IMPORTS: Mapping[str, tuple[str, ...]] = {
    "handwritten": ("torch._dynamo",),
    "deepspeed": (
        "torch._dynamo",
        "functorch.compile",
        "torch._inductor.compile_fx",
        "deepspeed.module_inject.auto_ep_layer",
        "deepspeed.sequence.auto_sp",
        "deepspeed.runtime.superoffload",
    ),
}


def load(path: str) -> Build:
    """The builder of a path; its framework is imported here and not before.

    Raises:
        ImportError: the framework is not installed.
    """
    if path == "handwritten":
        from suites.paths import handwritten  # noqa: PLC0415

        return handwritten.build
    if path == "deepspeed":
        from suites.paths import deepspeed  # noqa: PLC0415

        return deepspeed.build
    raise ValueError(f"unknown path {path}")


def import_early(path: str) -> None:
    """Import what a path needs, and what its first cases would import; modules that a version lacks are left out.

    Raises:
        ImportError: the framework is not installed.
    """
    load(path)
    for name in LATE_IMPORTS[path]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
