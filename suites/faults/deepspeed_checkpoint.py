"""Faults in DeepSpeed's checkpoints: what is saved, made universal, and loaded.

Made for DeepSpeed 0.19.8, as `suites.faults.deepspeed`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from suites.faults.deepspeed import _engine, _part
from suites.faults.table import Replacement, Table

TABLE = Table("deepspeed")
UNEVEN = "hidden=35,vocab=67"
RELOADED = f"deepspeed:tie=untied,head=row,{UNEVEN},optimizer=adam,resume=reload"
UNIVERSAL = f"deepspeed:tie=untied,head=vocab,zero=1,{UNEVEN},optimizer=adam,resume=universal"
EVEN = "deepspeed:tie=untied,head=row,zero=2,optimizer=adamw,resume=universal"
ONE_TP = f"deepspeed:tie=untied,head=row,zero=1,tp=1,dp=2,{UNEVEN},optimizer=adam,resume=universal"
NOT_SAVED = f"deepspeed:tie=untied,head=row,zero=1,{UNEVEN},optimizer=adam"


def _merged(change: Any) -> list[Replacement]:
    """Replaces the merge of one parameter's shards by one that changes them: (state, shards) -> shards."""
    module = _part("checkpoint.ds_to_universal")
    original = module._merge_zero_shards

    def broken(path: str, state: str, tp_degree: int, *args: Any) -> list[Tensor]:
        shards = original(path, state, tp_degree, *args)
        return shards if state == "step" else change(state, shards)

    return [(module, "_merge_zero_shards", broken)]


def _after_loading(change: Any) -> list[Replacement]:
    """Replaces loading by one after which `change` is made to the engine."""
    engine = _engine()
    original = engine.load_checkpoint

    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        with torch.no_grad():
            change(self)
        return found

    return [(engine, "load_checkpoint", broken)]


@TABLE.fault(
    25, needs="resume=reload, adam", case=RELOADED, invisible=RELOADED.replace("adam", "sgd"), caught_by=("update",)
)
def ds_moments_not_loaded() -> list[Replacement]:
    """The moments are zero after loading."""

    def change(engine: Any) -> None:
        for state in engine.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor) and value.dim():
                    value.zero_()

    return _after_loading(change)


@TABLE.fault(
    25, needs="resume=reload, adam", case=RELOADED, invisible=RELOADED.replace("adam", "sgd"), caught_by=("update",)
)
def ds_step_count_lost() -> list[Replacement]:
    """The optimizer begins to count its steps anew after loading: the bias corrections are the first step's."""

    def change(engine: Any) -> None:
        for state in engine.optimizer.state.values():
            if "step" in state:
                state["step"] = torch.zeros_like(torch.as_tensor(state["step"]))

    return _after_loading(change)


@TABLE.fault(25, needs="resume=reload, zero=0", case=RELOADED, invisible=NOT_SAVED, caught_by=("replicas", "gradient"))
def ds_last_row_not_loaded() -> list[Replacement]:
    """The last rank holds other values than were saved in one row of a weight that is whole on every rank."""

    def change(engine: Any) -> None:
        weight = engine.module.embed_tokens.weight
        if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            weight[-1] += 0.5

    return _after_loading(change)


@TABLE.fault(25, needs="resume=universal, tp > 1", case=EVEN, invisible=ONE_TP, caught_by=("checkpoint", "update"))
def ds_shards_merged_backwards() -> list[Replacement]:
    """The shards of a parameter are merged from the last rank to the first."""
    return _merged(lambda state, shards: shards[::-1])


@TABLE.fault(
    25,
    needs="resume=universal, tp > 1, uneven",
    case=UNIVERSAL,
    invisible=NOT_SAVED,
    caught_by=("checkpoint", "update"),
)
def ds_last_shard_shifted() -> list[Replacement]:
    """The rows of the last rank's shard, where it is shorter than the others, stand one further down."""

    def change(state: str, shards: list[Tensor]) -> list[Tensor]:
        uneven = shards[0].shape != shards[-1].shape
        return [*shards[:-1], shards[-1].roll(1, 0)] if uneven else shards

    return _merged(change)


@TABLE.fault(
    25, needs="resume=universal, adam", case=UNIVERSAL, invisible=NOT_SAVED, caught_by=("checkpoint", "update")
)
def ds_second_moment_dropped() -> list[Replacement]:
    """The second moment of every parameter is zero in the universal checkpoint."""
    return _merged(lambda state, shards: [s * 0 for s in shards] if state == "exp_avg_sq" else shards)


@TABLE.fault(25, needs="resume=universal", case=UNIVERSAL, invisible=NOT_SAVED, caught_by=("checkpoint",))
def ds_weights_rounded_in_files() -> list[Replacement]:
    """The weights are rounded to bf16 on their way into the universal checkpoint."""
    return _merged(lambda state, shards: [s.bfloat16().float() for s in shards] if state == "fp32" else shards)
