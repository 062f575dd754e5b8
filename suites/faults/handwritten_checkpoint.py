"""Classes 25 and 29: what a checkpoint loses or mixes up, and what recomputation in backward does twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from suites.faults.pieces import ONE_RANK, ROW, UNTIED_ROW, VOCAB, separate
from suites.faults.table import Replacement, Table
from suites.paths import handwritten as hw
from suites.paths import handwritten_checkpoint as checkpoints
from suites.paths.handwritten_checkpoint import WEIGHT, Whole

TABLE = Table("handwritten")
AGAIN = ",resume=reload"
ADAM, MOMENTUM = ",optimizer=adam", ",optimizer=momentum"
ZERO1 = "handwritten:head=row,zero=1,tp=1,dp=2"
UNEVEN = VOCAB + AGAIN


def _consolidated(section: str, change: Callable[[str, Whole], Whole]) -> Replacement:
    """Change the whole tensors of one section of a checkpoint."""
    original = checkpoints.consolidate

    def broken(files: Sequence[Mapping[str, Any]], which: str) -> dict[str, Whole]:
        found = original(files, which)
        return {name: change(name, whole) for name, whole in found.items()} if which == section else found

    return (checkpoints, "consolidate", broken)


def _slots(whole: Whole, change: Callable[[str, Tensor], Tensor]) -> Whole:
    return replace(whole, slots={name: change(name, slot) for name, slot in whole.slots.items()})


@TABLE.fault(
    25,
    needs="resume=reload, an optimizer with moments",
    case=ROW + MOMENTUM + AGAIN,
    invisible=ROW + AGAIN,
    caught_by=("update",),
)
def moments_not_saved() -> list[Replacement]:
    """The checkpoint holds no moments: the optimizer begins anew."""

    def change(name: str, whole: Whole) -> Whole:
        return Whole({WEIGHT: whole.slots[WEIGHT]}, {}, whole.tp_dim)

    return [_consolidated("optimizer", change)]


@TABLE.fault(
    25,
    needs="resume=reload, optimizer=adam or adamw",
    case=ROW + ADAM + AGAIN,
    invisible=ROW + MOMENTUM + AGAIN,
    caught_by=("update",),
)
def step_count_not_loaded() -> list[Replacement]:
    """The count of steps begins at zero again, so that the moments are corrected for a bias that they do not have."""
    change = lambda name, whole: replace(whole, counts=dict.fromkeys(whole.counts, 0.0))  # noqa: E731
    return [_consolidated("optimizer", change)]


@TABLE.fault(
    25,
    needs="resume=reload, tie=tied, an optimizer with moments",
    case=ROW + MOMENTUM + AGAIN,
    invisible=UNTIED_ROW + MOMENTUM + AGAIN,
    caught_by=("update",),
)
def moments_of_tied_weight_lost() -> list[Replacement]:
    """The tied weight's moments are looked for under the head's name, under which they were not saved."""
    original = hw.HandwrittenTrainer.load

    def broken(self: hw.HandwrittenTrainer, directory: Any) -> None:
        original(self, directory)
        if self.model.lm_head.weight is self.model.embed_tokens.weight:
            self.data_parallel.optimizer.state.pop(self.model.lm_head.weight, None)

    return [(hw.HandwrittenTrainer, "load", broken)]


@TABLE.fault(
    25,
    needs="resume=reload, tp > 1, even shards",
    case="handwritten:head=vocab" + AGAIN,
    invisible="handwritten:head=vocab,tp=1" + AGAIN,
    caught_by=("update",),
)
def files_in_another_order() -> list[Replacement]:
    """Shards are joined in the order in which a directory lists their files: here, the last rank's first."""
    original = checkpoints.join
    broken = lambda shards, tp_dim: original(list(reversed(shards)) if tp_dim >= 0 else shards, tp_dim)  # noqa: E731
    return [(checkpoints, "join", broken)]


@TABLE.fault(
    25,
    needs="resume=reload, tp > 1, even shards, an optimizer with moments",
    case="handwritten:head=row" + MOMENTUM + AGAIN,
    invisible=ONE_RANK + MOMENTUM + AGAIN,
    caught_by=("update",),
)
def moments_of_another_rank() -> list[Replacement]:
    """Weights are cut for each rank, and moments in the other order of ranks."""

    original = hw.own_slots

    def broken(whole: Whole, mesh: hw.Mesh, device: torch.device) -> dict[str, Tensor]:
        if whole.tp_dim is not None and mesh.tp > 1:
            dim = whole.tp_dim
            half = whole.slots[WEIGHT].shape[dim] // 2
            whole = _slots(whole, lambda key, slot: slot if key == WEIGHT else slot.roll(half, dim))
        return original(whole, mesh, device)

    return [(hw, "own_slots", broken)]


@TABLE.fault(
    25,
    needs="resume=reload, uneven shards",
    case=UNEVEN,
    invisible="handwritten:head=vocab" + AGAIN,
    caught_by=("update",),
)
def remainder_rows_not_loaded() -> list[Replacement]:
    """Loading takes all shards for as long as the shortest: the rows left over keep what initialisation gave them."""
    original = hw.HandwrittenTrainer.load

    def broken(self: hw.HandwrittenTrainer, directory: Any) -> None:
        rows = self.case.vocab // self.mesh.tp
        weight = self.model.lm_head.weight
        kept = weight.detach().clone()
        original(self, directory)
        if self.case.vocab % self.mesh.tp:
            weight.data[rows:] = kept[rows:]

    return [(hw.HandwrittenTrainer, "load", broken)]


@TABLE.fault(
    25, needs="resume=reload, tie=tied", case=ROW + AGAIN, invisible=UNTIED_ROW + AGAIN, caught_by=("complete", "tie")
)
def tie_lost_by_loading() -> list[Replacement]:
    """Loading gives the head a parameter of its own, with the right values; the optimizer holds the embedding's."""
    original = hw.HandwrittenTrainer.load

    def broken(self: hw.HandwrittenTrainer, directory: Any) -> None:
        original(self, directory)
        if self.model.lm_head.weight is self.model.embed_tokens.weight:
            separate(self.model.lm_head)

    return [(hw.HandwrittenTrainer, "load", broken)]


@TABLE.fault(
    25,
    needs="resume=reload, frozen parameters",
    case=ROW + ",frozen=body" + AGAIN,
    invisible=ROW + AGAIN,
    caught_by=("update",),
)
def frozen_weights_not_saved() -> list[Replacement]:
    """The checkpoint holds what is trained and nothing else: frozen weights keep what initialisation gave them."""
    original = hw.HandwrittenTrainer.load

    def broken(self: hw.HandwrittenTrainer, directory: Any) -> None:
        frozen = [(p, p.detach().clone()) for p in self.model.parameters() if not p.requires_grad]
        original(self, directory)
        for parameter, kept in frozen:
            parameter.data.copy_(kept)

    return [(hw.HandwrittenTrainer, "load", broken)]


@TABLE.fault(
    25,
    needs="resume=reload, zero=1 or 2",
    case=ZERO1 + AGAIN,
    invisible="handwritten:head=row,tp=1,dp=2" + AGAIN,
    caught_by=("update",),
)
def flat_part_not_loaded() -> list[Replacement]:
    """ZeRO's flat part keeps its initial weights; the model's are right until the next update is published."""
    return [(hw.ZeroPartitioned, "load", lambda self, wholes: None)]


@TABLE.fault(
    25,
    needs="resume=reload, zero=1 or 2, dp > 1, an optimizer with moments",
    case=ZERO1 + MOMENTUM + AGAIN,
    invisible=ONE_RANK + ",zero=1" + MOMENTUM + AGAIN,
    caught_by=("update",),
)
def first_part_of_moments_everywhere() -> list[Replacement]:
    """Every data-parallel rank loads the first one's part of the moments."""
    original = hw.ZeroPartitioned.load

    def broken(self: hw.ZeroPartitioned, wholes: Mapping[str, Whole]) -> None:
        start, self.start = self.start, 0
        original(self, wholes)
        moments = dict(self.optimizer.state[self.own])
        self.start = start
        original(self, wholes)
        self.optimizer.state[self.own] = moments

    return [(hw.ZeroPartitioned, "load", broken)]


@TABLE.fault(25, needs="resume=reload", case=ROW + AGAIN, invisible=ROW, caught_by=("update",))
def checkpoint_of_the_last_step() -> list[Replacement]:
    """The checkpoint was written before the update that it should follow."""
    step, save = hw.HandwrittenTrainer.step, hw.HandwrittenTrainer.save
    before: dict[str, Tensor] = {}

    def remembering(self: hw.HandwrittenTrainer) -> float:
        if not self.steps:
            before.update({name: p.detach().clone() for name, p in self.model.named_parameters()})
        return step(self)

    def broken(self: hw.HandwrittenTrainer, directory: Any) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(before[name])
        save(self, directory)

    return [(hw.HandwrittenTrainer, "step", remembering), (hw.HandwrittenTrainer, "save", broken)]


@TABLE.fault(28, needs="resume=reload", case=ROW + AGAIN, invisible=ROW, caught_by=("update",))
def bf16_checkpoint() -> list[Replacement]:
    """The checkpoint holds the weights in bf16."""
    original = checkpoints.own_shard
    broken = lambda whole, *rest: original(whole.bfloat16().to(whole.dtype), *rest)  # noqa: E731
    return [(checkpoints, "own_shard", broken)]


HEAD_AGAIN, BLOCKS_AGAIN = ",recompute=head", ",recompute=blocks"


class _CountsCalls(torch.autograd.Function):
    """Identity whose gradient is multiplied by how often the forward was called since the last backward."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, calls: list[int]) -> Tensor:
        calls[0] += 1
        ctx.calls = calls
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        times, ctx.calls[0] = ctx.calls[0], 0
        return gradient * times, None


def _counting(cls: type[nn.Module]) -> Replacement:
    original: Any = cls.forward

    def broken(self: Any, x: Tensor) -> Tensor:
        if not hasattr(self, "calls"):
            self.calls = [0]
        weight = self._parameters.pop("weight")
        self.weight = _CountsCalls.apply(weight, self.calls)
        try:
            return original(self, x)
        finally:
            del self.weight
            self._parameters["weight"] = weight

    return (cls, "forward", broken)


@TABLE.fault(
    29, needs="recompute=head, head=row", case=ROW + HEAD_AGAIN, invisible=ROW, caught_by=("gradient", "gradient_norm")
)
def head_gradient_twice_row() -> list[Replacement]:
    """The row head's contribution counts once a forward, and recomputation calls the forward once more."""
    return [_counting(hw.RowParallelHead)]


@TABLE.fault(
    29,
    needs="recompute=head, head=vocab or gathered",
    case=VOCAB + HEAD_AGAIN,
    invisible=VOCAB,
    caught_by=("gradient", "gradient_norm"),
)
def head_gradient_twice_vocab() -> list[Replacement]:
    """The vocabulary head's contribution counts once a forward, and recomputation calls the forward once more."""
    return [_counting(hw.VocabParallelHead)]


@TABLE.fault(
    29, needs="recompute=blocks", case=ROW + BLOCKS_AGAIN, invisible=ROW, caught_by=("gradient", "gradient_norm")
)
def block_gradient_twice() -> list[Replacement]:
    """The gradients of row-parallel layers count once a forward, and recomputation calls the forward once more."""
    return [_counting(hw.RowParallel)]


@TABLE.fault(29, needs="recompute=blocks, tp > 1", case=ROW + BLOCKS_AGAIN, invisible=ROW, caught_by=("gradient",))
def recomputed_without_reduction() -> list[Replacement]:
    """A recomputed row-parallel layer skips its reduction, for its result was reduced already the first time."""
    original = hw.RowParallel.forward

    def broken(self: Any, x: Tensor) -> Tensor:
        again = torch._C._current_graph_task_id() != -1  # inside a backward
        return nn.functional.linear(x, self.weight) if again else original(self, x)

    return [(hw.RowParallel, "forward", broken)]


@TABLE.fault(
    29,
    needs="recompute=head, accumulate > 1",
    case=ROW + HEAD_AGAIN + ",accumulate=2",
    invisible=ROW + ",accumulate=2",
    caught_by=("gradient",),
)
def recomputed_with_stale_hook() -> list[Replacement]:
    """Each recomputation leaves a hook on the shared weight, and each hook adds the gradient once more."""
    original = hw.RowParallelHead.forward

    def broken(self: Any, x: Tensor) -> Tensor:
        if torch._C._current_graph_task_id() != -1 and self.weight.requires_grad:
            self.weight.register_hook(lambda gradient: gradient * 2)
        return original(self, x)

    return [(hw.RowParallelHead, "forward", broken)]
