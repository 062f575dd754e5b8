"""Class 30: another program ran than was asked for, or the harness lost, doubled or swapped what it saw."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from suites import data, train
from suites.cases import Case
from suites.data import MicroBatch
from suites.faults.pieces import (
    DP,
    EVEN_ROW,
    EVEN_VOCAB,
    ONE_RANK,
    ROW,
    VOCAB,
    ZERO1,
    ZERO2,
)
from suites.faults.table import Replacement, Table
from suites.observe import Piece, RankObservation, StepObservation
from suites.paths import handwritten as hw

TABLE = Table("handwritten")
FOUR_STEPS = ROW + ",steps=4"


@TABLE.fault(30, needs="tp > 1", case=ROW, invisible=ONE_RANK, caught_by=("layout", "collectives"))
def unsharded_fallback() -> list[Replacement]:
    """The model is not sharded at all: every rank trains all of it."""
    original = hw.all_reduce

    def alone(tensor: Tensor, group: Any, op: Any = torch.distributed.ReduceOp.SUM) -> Tensor:
        return tensor.clone() if tensor.dim() == 0 else original(tensor, group, op)

    return [(hw, "shard_model", lambda model, case, mesh: None), (hw, "all_reduce", alone)]


@TABLE.fault(30, needs="zero=1 or 2", case=ZERO2, invisible=DP, caught_by=("layout",))
def zero_fallback() -> list[Replacement]:
    """ZeRO 2 was asked for and plain data parallelism runs."""
    return [(hw, "ZeroPartitioned", hw.ZeroStage0)]


@TABLE.fault(30, needs="zero=2", case=ZERO2, invisible=ZERO1, caught_by=("layout",))
def zero_1_for_2() -> list[Replacement]:
    """ZeRO 2 was asked for and ZeRO 1 runs."""
    original = hw.ZeroPartitioned.reduce

    def broken(self: hw.ZeroPartitioned) -> None:
        self.case = self.case.but(zero=1)
        original(self)

    return [(hw.ZeroPartitioned, "reduce", broken)]


@TABLE.fault(30, needs="a head other than vocab", case=ROW, invisible=EVEN_VOCAB, caught_by=("layout",))
def other_head() -> list[Replacement]:
    """A head that was asked for is not known to the sharder, which takes the vocabulary head."""
    original = hw.shard_model
    broken = lambda model, case, mesh: original(model, case.but(head="vocab"), mesh)  # noqa: E731
    return [(hw, "shard_model", broken)]


@TABLE.fault(
    30,
    needs="any factor of the model other than its default",
    case=VOCAB + ",padding_idx=3",
    invisible=EVEN_VOCAB + ",vocab=67",
    caught_by=("gradient",),
)
def dropped_factor() -> list[Replacement]:
    """The harness loses a factor between the plan and the ranks: the padding row is not set."""
    original = train.run_rank
    broken = lambda case, *args, **others: original(case.but(padding_idx=None), *args, **others)  # noqa: E731
    return [(train, "run_rank", broken)]


@TABLE.fault(
    30, needs="optimizer other than sgd", case=ROW + ",optimizer=momentum", invisible=ROW, caught_by=("update",)
)
def default_optimizer() -> list[Replacement]:
    """The ranks run the default optimizer in place of the one that was asked for."""
    original = train.run_rank
    broken = lambda case, *args, **others: original(case.but(optimizer="sgd"), *args, **others)  # noqa: E731
    return [(train, "run_rank", broken)]


@TABLE.fault(30, needs="steps > 3", case=FOUR_STEPS, invisible=ROW, caught_by=("complete",))
def lost_step() -> list[Replacement]:
    """The harness runs three steps, however many were asked for."""
    original = train.run_rank
    broken = lambda case, *args, **others: original(case.but(steps=3), *args, **others)  # noqa: E731
    return [(train, "run_rank", broken)]


@TABLE.fault(30, needs="steps > 3", case=FOUR_STEPS, invisible=ROW, caught_by=("loss", "logits", "gradient"))
def repeated_observation() -> list[Replacement]:
    """From the fourth step on the harness reports an earlier step once more."""
    original = train._step
    seen: list[StepObservation] = []

    def broken(case: Case, trainer: Any, step: int, *rest: Any) -> StepObservation:
        seen.append(original(case, trainer, step, *rest))
        return seen[step % 3]

    return [(train, "_step", broken)]


@TABLE.fault(30, needs="tp > 1, steps > 3", case=FOUR_STEPS, invisible=ROW, caught_by=("replicas",))
def one_rank_repeats() -> list[Replacement]:
    """From the fourth step on one rank reports an earlier step once more."""
    original = train._step
    seen: list[StepObservation] = []

    def broken(case: Case, trainer: Any, step: int, *rest: Any) -> StepObservation:
        seen.append(original(case, trainer, step, *rest))
        return seen[step % 3 if trainer.tp_rank == 1 else step]

    return [(train, "_step", broken)]


@TABLE.fault(30, needs="more than one rank", case=ROW, invisible=ONE_RANK, caught_by=("complete",))
def one_rank_twice() -> list[Replacement]:
    """Every rank reports the first rank's place."""
    original = train.run_rank

    def broken(*args: Any, **others: Any) -> RankObservation:
        return dataclasses.replace(original(*args, **others), tp_rank=0, dp_rank=0)

    return [(train, "run_rank", broken)]


@TABLE.fault(30, needs="tp > 1", case=EVEN_VOCAB, invisible=ONE_RANK, caught_by=("start",))
def swapped_ranks() -> list[Replacement]:
    """Two tensor-parallel ranks report each other's place."""
    original = train.run_rank

    def broken(case: Case, *args: Any, **others: Any) -> RankObservation:
        seen = original(case, *args, **others)
        return dataclasses.replace(seen, tp_rank=case.tp - 1 - seen.tp_rank)

    return [(train, "run_rank", broken)]


@TABLE.fault(30, needs="dp > 1", case=DP, invisible=ONE_RANK, caught_by=("loss", "logits", "gradient"))
def same_data_everywhere() -> list[Replacement]:
    """Every data-parallel rank trains on the first one's data."""
    original = data.micro_batch

    def broken(case: Case, step: int, micro: int, dp_rank: int) -> MicroBatch:
        return original(case, step, micro, 0)

    return [(data, "micro_batch", broken)]


@TABLE.fault(
    30, needs="accumulate > 1", case=ROW + ",accumulate=2", invisible=ROW, caught_by=("loss", "logits", "gradient")
)
def same_micro_batch() -> list[Replacement]:
    """The first micro-batch is trained on again in place of the others."""
    original = data.micro_batch

    def broken(case: Case, step: int, micro: int, dp_rank: int) -> MicroBatch:
        return original(case, step, 0, dp_rank)

    return [(data, "micro_batch", broken)]


@TABLE.fault(30, needs="a body that is trained", case=ROW, invisible=EVEN_ROW + ",frozen=body", caught_by=("complete",))
def missing_gradient() -> list[Replacement]:
    """One parameter's gradient is not reported."""
    original = hw.HandwrittenTrainer.gradients
    broken = lambda self: {n: p for n, p in original(self).items() if n != "norm.weight"}  # noqa: E731
    return [(hw.HandwrittenTrainer, "gradients", broken)]


@TABLE.fault(30, needs="tp > 1", case=ROW, invisible=ONE_RANK, caught_by=("complete",))
def shard_reported_as_whole() -> list[Replacement]:
    """The harness takes a shard of the head for the whole weight and reports the first rank's on every rank."""
    original = hw.HandwrittenTrainer.weights

    def broken(self: hw.HandwrittenTrainer) -> dict[str, Piece]:
        found = original(self)
        if self.mesh.tp > 1:
            found["lm_head.weight"] = Piece.whole(self.model.lm_head.weight[: len(self.model.lm_head.weight) // 2])
        return found

    return [(hw.HandwrittenTrainer, "weights", broken)]
