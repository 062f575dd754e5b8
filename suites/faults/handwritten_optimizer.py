"""Classes 18, 19 and 20, and 25 within a run: the gradient norm, clipping, and what the optimizer holds and keeps."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from suites import optimizers
from suites.cases import Case
from suites.faults.pieces import (
    EVEN_ROW,
    ONE_RANK,
    ROW,
    UNTIED_ROW,
    ZERO1,
    after_sharding,
    around_step,
)
from suites.faults.table import Replacement, Table
from suites.model import EMBEDDING, HEAD, Decoder
from suites.paths import handwritten as hw

TABLE = Table("handwritten")
TIED_ZERO1 = "handwritten:head=row,dp=2,zero=1"


@TABLE.fault(18, needs="tp > 1", case=ROW, invisible=ONE_RANK, caught_by=("gradient_norm",))
def norm_counts_replicas() -> list[Replacement]:
    """The gradient norm counts replicated weights on every rank."""
    return [(hw, "squared_norm", lambda parameter, gradient, mesh: gradient.square().sum())]


@TABLE.fault(18, needs="tp > 1", case=ROW, invisible=ONE_RANK, caught_by=("gradient_norm",))
def norm_misses_shards() -> list[Replacement]:
    """The gradient norm counts the first rank's shards only."""
    original = hw.squared_norm
    broken = lambda parameter, gradient, mesh: original(parameter, gradient, mesh) * (mesh.tp_rank == 0)  # noqa: E731
    return [(hw, "squared_norm", broken)]


@TABLE.fault(18, needs="tie=tied", case=ROW, invisible=UNTIED_ROW, caught_by=("gradient_norm",))
def norm_counts_tied_weight_twice() -> list[Replacement]:
    """The gradient norm counts the tied weight under both of its names."""
    original = hw.squared_norm

    def change(model: Decoder, case: Case, mesh: hw.Mesh) -> None:
        weight: Any = model.lm_head.weight
        weight.names = 2 if weight is model.embed_tokens.weight else 1

    def broken(parameter: Any, gradient: Tensor, mesh: hw.Mesh) -> Tensor:
        return original(parameter, gradient, mesh) * getattr(parameter, "names", 1)

    return [after_sharding(change), (hw, "squared_norm", broken)]


def _without_scalars() -> Replacement:
    original = hw.all_reduce

    def broken(tensor: Tensor, group: dist.ProcessGroup, op: Any = dist.ReduceOp.SUM) -> Tensor:
        return tensor.clone() if tensor.dim() == 0 else original(tensor, group, op)

    return (hw, "all_reduce", broken)


@TABLE.fault(
    19, needs="tp > 1", case=ROW + ",clip=1", invisible=ONE_RANK + ",clip=1", caught_by=("replicas", "gradient_norm")
)
def local_norm() -> list[Replacement]:
    """Each tensor-parallel rank clips by the norm of its own shards."""
    return [_without_scalars()]


@TABLE.fault(
    19,
    needs="dp > 1, zero=1 or 2",
    case=ZERO1 + ",clip=1",
    invisible=ONE_RANK + ",clip=1",
    caught_by=("replicas", "gradient_norm"),
)
def norm_of_own_part() -> list[Replacement]:
    """Each data-parallel rank clips by the norm of its own part of the gradient."""
    return [_without_scalars()]


@TABLE.fault(
    19,
    needs="tp > 1, tiny gradients",
    case=ROW + ",logit_scale=0.001",
    invisible=ONE_RANK + ",logit_scale=0.001",
    caught_by=("gradient_norm",),
)
def epsilon_on_every_rank() -> list[Replacement]:
    """Every rank but the first adds the clipping's epsilon to its share of the squared norm."""
    original = hw.squared_norm

    def broken(parameter: Tensor, gradient: Tensor, mesh: hw.Mesh) -> Tensor:
        square = original(parameter, gradient, mesh)
        return square + 1e-6 if mesh.tp_rank else square

    return [(hw, "squared_norm", broken)]


@TABLE.fault(
    19,
    needs="tp > 1, clip > 0",
    case=ROW + ",clip=0.5",
    invisible=ROW,
    caught_by=("replicas", "update"),
)
def clipped_on_one_rank() -> list[Replacement]:
    """Only the first tensor-parallel rank clips; all report the right norm."""
    original = hw.ZeroStage0.step

    def broken(self: hw.ZeroStage0) -> float:
        case = self.case
        if self.mesh.tp_rank:
            self.case = case.but(clip=0.0)
        norm = original(self)
        self.case = case
        return norm

    return [(hw.ZeroStage0, "step", broken)]


@TABLE.fault(20, needs="tie=tied", case=TIED_ZERO1, invisible=UNTIED_ROW, caught_by=("census", "gradient_norm"))
def weight_held_twice() -> list[Replacement]:
    """The optimizer's flat vector holds the tied weight under both of its names."""
    both = lambda model: {n: p for n, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}  # noqa: E731
    return [(hw, "trained_once", both)]


@TABLE.fault(
    20,
    needs="tie=tied",
    case=ROW + ",optimizer=adamw",
    invisible=UNTIED_ROW + ",optimizer=adamw",
    caught_by=("census",),
)
def tied_weight_in_two_groups() -> list[Replacement]:
    """A second group of the optimizer holds the tied weight again, with no learning rate and no decay of its own."""
    original = hw.HandwrittenTrainer.__init__

    def broken(self: Any, *args: Any) -> None:
        original(self, *args)
        model = self.model
        if model.lm_head.weight is model.embed_tokens.weight:
            twin: dict[str, Any] = {"params": [model.lm_head.weight], "lr": 0.0, "weight_decay": 0.0}
            optimizer = self.data_parallel.optimizer
            optimizer.param_groups.append({**optimizer.param_groups[0], **twin})

    return [(hw.HandwrittenTrainer, "__init__", broken)]


@TABLE.fault(20, needs="tie=tied, optimizer=adamw", case=ROW + ",optimizer=adamw", invisible=ROW, caught_by=("update",))
def decayed_twice() -> list[Replacement]:
    """The tied weight's decay is applied once for each of its names."""

    def before(trainer: hw.HandwrittenTrainer) -> None:
        settings = optimizers.SETTINGS[trainer.case.optimizer]
        if trainer.case.tied and (decay := settings.get("weight_decay")):
            with torch.no_grad():
                trainer.model.lm_head.weight.mul_(1 - settings["lr"] * decay)

    return [around_step(before, lambda trainer, kept: None)]


@TABLE.fault(20, needs="optimizer=adamw", case=ROW + ",optimizer=adamw", invisible=ROW, caught_by=("update",))
def embedding_not_decayed() -> list[Replacement]:
    """The tied weight falls into the group without decay because one of its names is the embedding's."""
    original = optimizers.make

    def broken(case: Case, parameters: Any) -> torch.optim.Optimizer:
        optimizer = original(case, parameters)
        (group,) = optimizer.param_groups
        if group.get("weight_decay"):
            first, *others = group["params"]
            group["params"] = others
            optimizer.param_groups.insert(0, {**group, "params": [first], "weight_decay": 0.0})
        return optimizer

    return [(optimizers, "make", broken)]


@TABLE.fault(
    20,
    needs="tie=tied, register=head_first",
    case=ROW + ",register=head_first",
    invisible=ROW,
    caught_by=("complete", "census"),
)
def head_left_out_of_optimizer() -> list[Replacement]:
    """The optimizer leaves out what is called lm_head, for it is tied; but here that is the shared weight's name."""
    original = hw.trained_once

    def broken(model: nn.Module) -> dict[str, nn.Parameter]:
        tied = model.get_parameter(HEAD) is model.get_parameter(EMBEDDING)
        return {name: p for name, p in original(model).items() if not (tied and name == HEAD)}

    return [(hw, "trained_once", broken)]


@TABLE.fault(
    25, needs="an optimizer with moments", case=ROW + ",optimizer=momentum", invisible=ROW, caught_by=("update",)
)
def forgotten_moments() -> list[Replacement]:
    """The optimizer forgets its moments before each step."""
    return [around_step(lambda trainer: trainer.data_parallel.optimizer.state.clear(), lambda trainer, kept: None)]


@TABLE.fault(
    25, needs="optimizer=adam or adamw", case=ROW + ",optimizer=adam", invisible=EVEN_ROW, caught_by=("update",)
)
def step_count_lost() -> list[Replacement]:
    """The optimizer keeps its moments and forgets how many steps they hold."""

    def before(trainer: hw.HandwrittenTrainer) -> None:
        for state in trainer.data_parallel.optimizer.state.values():
            if "step" in state:
                state["step"] = torch.zeros_like(state["step"])

    return [around_step(before, lambda trainer, kept: None)]
