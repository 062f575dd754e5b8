"""Faults in DeepSpeed's own classes, modelled on regressions that people reported: AutoTP's replacement of modules, its
autograd functions, the loss over sharded logits, ZeRO 0 to 3, norm and clipping.

Made for DeepSpeed 0.19.8. Nothing of DeepSpeed is imported before a fault is put in. DeepSpeed looks all of these
pieces up when it uses them and keeps nothing of them beyond an engine's life: later cases in the process are clean.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from suites.faults.table import Replacement, Table

TABLE = Table("deepspeed")
UNEVEN = "hidden=35,vocab=67"
ROW = f"deepspeed:head=row,{UNEVEN}"
VOCAB = f"deepspeed:head=vocab,{UNEVEN}"
EVEN_ROW = "deepspeed:head=row"
EVEN_VOCAB = "deepspeed:head=vocab"
GATHERED = f"deepspeed:tie=untied,head=gathered,{UNEVEN}"
UNTIED_ROW = f"deepspeed:tie=untied,head=row,{UNEVEN}"
UNTIED_VOCAB = f"deepspeed:tie=untied,head=vocab,{UNEVEN}"
ONE_RANK = f"deepspeed:head=row,tp=1,{UNEVEN}"
DP = f"deepspeed:head=row,tp=1,dp=2,{UNEVEN}"
ZERO1, ZERO2, ZERO3 = (DP.replace("head=row", f"head=row,zero={stage}") for stage in (1, 2, 3))
TP, MANY = "tp > 1", "dp > 1"


def _part(module: str, *names: str) -> Any:
    """A module of DeepSpeed, or a class in it.

    Raises:
        NotImplementedError: the DeepSpeed under test has no such class.
    """
    importlib.import_module("suites.paths.deepspeed")  # prepares the import of DeepSpeed
    try:
        found: Any = importlib.import_module(f"deepspeed.{module}")
        for name in names:
            found = getattr(found, name)
    except (ImportError, AttributeError):
        whole = ".".join([module, *names])
        version = importlib.import_module("deepspeed").__version__
        raise NotImplementedError(f"this fault is for DeepSpeed 0.19.8: {version} has no {whole}") from None
    return found


def _layers(name: str) -> Any:
    return _part("module_inject.layers", name)


def _engine() -> Any:
    return _part("runtime.engine", "DeepSpeedEngine")


def _zero() -> Any:
    """The optimizer of ZeRO 1 and 2."""
    return _part("runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer")


def _copied(weight: Any) -> Any:
    """A parameter of its own with a weight's values and the attributes that DeepSpeed put on it."""
    copy: Any = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
    copy.__dict__.update(weight.__dict__)
    return copy


# --- the tie -------------------------------------------------------------------------------------------------------


@TABLE.fault(1, needs="tie=tied", case=VOCAB, invisible=UNTIED_VOCAB, caught_by=("tie", "gradient", "census"))
def ds_tie_lost_in_engine() -> list[Replacement]:
    """The engine gives the sharded head a weight of its own when it prepares the model."""
    engine = _engine()
    original = engine._configure_distributed_model

    def broken(self: Any, model: Any) -> None:
        original(self, model)
        if model.lm_head.weight is model.embed_tokens.weight:
            model.lm_head.weight = _copied(model.lm_head.weight)

    return [(engine, "_configure_distributed_model", broken)]


@TABLE.fault(
    2,
    needs="tie=tied, head=row, tp > 1, register=embedding_first",
    case=ROW,
    invisible=ROW + ",register=head_first",
    caught_by=("tie", "gradient", "census"),
)
def ds_embedding_replaced_first() -> list[Replacement]:
    """The embedding, where it is registered before the row head, is sharded into a weight of its own."""
    autotp = _part("module_inject.auto_tp", "AutoTP")
    original = autotp._replace_tied_row_parallel_embeddings

    def broken(self: Any, head: Any, embeddings: Any) -> None:
        first = next(m for _, m in self.module.named_modules() if isinstance(m, (nn.Embedding, nn.Linear)))
        original(self, head, embeddings)
        for parent, name, module, _ in embeddings:
            if module is first:
                embedding = getattr(parent, name)
                embedding.weight = _copied(embedding.weight)

    return [(autotp, "_replace_tied_row_parallel_embeddings", broken)]


@TABLE.fault(
    1, needs="tie=tied, head=vocab, tp > 1", case=VOCAB, invisible=UNTIED_VOCAB, caught_by=("tie", "gradient", "census")
)
def ds_cloned_vocab_shard() -> list[Replacement]:
    """The vocabulary-sharded embedding clones the head's shard where it should share it."""
    cls = _layers("VocabParallelEmbedding")
    original = cls.__init__

    def broken(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.weight = _copied(self.weight)

    return [(cls, "__init__", broken)]


@TABLE.fault(3, needs="tie=untied, head=vocab, tp > 1", case=UNTIED_VOCAB, invisible=VOCAB, caught_by=("tie",))
def ds_tie_told_by_shape() -> list[Replacement]:
    """AutoTP takes an embedding of the head's shape for a tied one and lets it share the head's shard."""
    autotp = _part("module_inject.auto_tp", "AutoTP")

    def broken(self: Any, head: Any) -> list[tuple[Any, str, Any, str]]:
        return [
            (parent, name, child, f"{place}.{name}" if place else name)
            for place, parent in self.module.named_modules()
            for name, child in parent._modules.items()
            if isinstance(child, nn.Embedding) and child.weight.shape == head.weight.shape
        ]

    return [(autotp, "_find_tied_embedding_modules", broken)]


@TABLE.fault(
    26, needs="tie=tied", case=DP, invisible=DP.replace("head=row", "tie=untied,head=row"), caught_by=("tie", "census")
)
def ds_tie_lost_in_cast() -> list[Replacement]:
    """Parameters are cast module by module into new ones: each module that shares a weight gets its own."""
    engine = _engine()
    original = engine._configure_distributed_model

    def broken(self: Any, model: nn.Module) -> None:
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    module._parameters[name] = _copied(parameter)
        original(self, model)

    return [(engine, "_configure_distributed_model", broken)]


# --- the two contributions of the tied gradient --------------------------------------------------------------------


def _using(cls: Any, change: Callable[[Tensor], Tensor]) -> Replacement:
    """Let a module's forward use a changed weight; the parameter stays what it is."""
    original = cls.forward

    def broken(self: Any, x: Tensor) -> Tensor:
        weight = self._parameters.pop("weight")
        self.weight = change(weight)
        try:
            return original(self, x)
        finally:
            del self.weight
            self._parameters["weight"] = weight

    return (cls, "forward", broken)


@TABLE.fault(4, needs="tie=tied, head=row, tp > 1", case=ROW, invisible=VOCAB, caught_by=("gradient",))
def ds_detached_lookup() -> list[Replacement]:
    """The lookup in the hidden-sharded embedding is detached: its contribution is missing."""
    return [_using(_layers("HiddenParallelEmbedding"), Tensor.detach)]


@TABLE.fault(4, needs="head=vocab, tp > 1", case=VOCAB, invisible=ROW, caught_by=("gradient",))
def ds_detached_projection() -> list[Replacement]:
    """The vocabulary-sharded head computes with a detached weight: the projection's contribution is missing."""
    return [_using(_layers("VocabParallelLinear"), Tensor.detach)]


@TABLE.fault(5, needs="tie=tied, head=row, tp > 1", case=ROW, invisible=VOCAB, caught_by=("gradient",))
def ds_gather_sums_gradients() -> list[Replacement]:
    """The gather of the hidden slices sums their gradients over the ranks, though each has the whole already."""
    cls = _layers("GatherFromTensorParallelRegion")
    original = cls.backward

    def broken(ctx: Any, gradient: Tensor) -> Any:
        summed = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=ctx.group)
        return original(ctx, summed)

    return [(cls, "backward", staticmethod(broken))]


# --- reductions over tensor-parallel ranks -------------------------------------------------------------------------


@TABLE.fault(6, needs=TP, case=VOCAB, invisible=ONE_RANK, caught_by=("gradient",))
def ds_column_gradient_unreduced() -> list[Replacement]:
    """Below column-parallel layers and the vocabulary head the gradient is not reduced."""
    return [(_layers("ColumnParallel"), "backward", staticmethod(lambda ctx, gradient: (None, gradient)))]


@TABLE.fault(6, needs="head=row, tp > 1", case=UNTIED_ROW, invisible=UNTIED_VOCAB, caught_by=("gradient",))
def ds_scatter_gradient_unreduced() -> list[Replacement]:
    """Below the row head each rank keeps its own slice of the gradient, with zeros for the others'."""
    cls = _layers("ScatterToTensorParallelRegion")

    def broken(ctx: Any, gradient: Tensor) -> Any:
        whole = gradient.new_zeros(ctx.input_shape)
        whole[..., ctx.offset : ctx.offset + ctx.size] = gradient
        return None, whole, None, None

    return [(cls, "backward", staticmethod(broken))]


@TABLE.fault(7, needs=TP, case=ROW, invisible=ONE_RANK, caught_by=("gradient",))
def ds_row_gradient_reduced() -> list[Replacement]:
    """The gradient into row-parallel layers, whole on every rank, is reduced once more."""

    def broken(ctx: Any, gradient: Tensor) -> Any:
        summed = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=ctx.group)
        return None, summed, None

    return [(_layers("RowParallel"), "backward", staticmethod(broken))]


@TABLE.fault(
    8,
    needs="activation=transposed, head=vocab, tp > 1",
    case=VOCAB + ",activation=transposed",
    invisible=VOCAB,
    caught_by=("gradient",),
)
def ds_dropped_copy() -> list[Replacement]:
    """The gradient of a strided activation is reduced in a contiguous copy, and the copy is dropped."""
    cls = _layers("ColumnParallel")
    forward, backward = cls.forward, cls.backward

    def remember(ctx: Any, group: Any, x: Tensor) -> Tensor:
        ctx.stride = x.stride()
        return forward(ctx, group, x)

    def broken(ctx: Any, gradient: Tensor) -> Any:
        laid_out = torch.empty_strided(gradient.shape, ctx.stride, dtype=gradient.dtype, device=gradient.device)
        return backward(ctx, laid_out.copy_(gradient))  # a gradient has its activation's layout

    return [(cls, "forward", staticmethod(remember)), (cls, "backward", staticmethod(broken))]


@TABLE.fault(
    31, needs="head=row, head_bias=yes, tp > 1", case=ROW + ",head_bias=yes", invisible=ROW, caught_by=("logits",)
)
def ds_bias_on_every_rank() -> list[Replacement]:
    """Every rank adds the row head's bias before the partial logits are summed."""
    cls, region = _layers("LinearAllreduce"), _layers("RowParallel")

    def broken(self: Any, x: Tensor) -> Tensor:
        partial = torch.matmul(x, self.weight.transpose(-1, -2))
        return region.apply(self.mp_group, partial if self.bias is None else partial + self.bias, False)

    return [(cls, "forward", broken)]


@TABLE.fault(27, needs="tp > 1, dp > 1", case=EVEN_ROW + ",dp=2", invisible=ROW, caught_by=("collectives",))
def ds_uneven_collectives() -> list[Replacement]:
    """One data-parallel replica reduces once more than the other within its own group: the numbers are right."""
    engine, groups = _engine(), _part("utils.groups")
    original = engine.allreduce_gradients

    def broken(self: Any, *args: Any, **kwargs: Any) -> None:
        if dist.get_rank(self.seq_data_parallel_group) == 1:
            dist.all_reduce(torch.zeros(1, device=self.device), group=groups.get_tensor_model_parallel_group())
        original(self, *args, **kwargs)

    return [(engine, "allreduce_gradients", broken)]


@TABLE.fault(27, needs=TP, case=ROW, invisible=DP, caught_by=("hang",))
def ds_collective_of_one_rank() -> list[Replacement]:
    """The second rank waits in a reduction over all ranks that no other rank issues."""
    engine = _engine()
    original = engine.allreduce_gradients

    def broken(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.autotp_size() > 1 and dist.get_rank() == 1:
            dist.all_reduce(torch.zeros(1, device=self.device))
        original(self, *args, **kwargs)

    return [(engine, "allreduce_gradients", broken)]


# --- rows, shards, layout ------------------------------------------------------------------------------------------


@TABLE.fault(
    11, needs="tie=tied, head=vocab, vocab not divisible by tp", case=VOCAB, invisible=EVEN_VOCAB, caught_by=("logits",)
)
def ds_lookup_assumes_even_shards() -> list[Replacement]:
    """The vocabulary-sharded lookup takes every shard to begin at rank times the quotient of vocabulary and ranks."""
    cls = _layers("VocabParallelEmbedding")
    original = cls.__init__

    def broken(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        size = self.vocab_end_index - self.vocab_start_index
        self.vocab_start_index = self.tp_index * (self.vocab_size // self.tp_world_size)
        self.vocab_end_index = self.vocab_start_index + size

    return [(cls, "__init__", broken)]


@TABLE.fault(
    11, needs="head=vocab, vocab not divisible by tp", case=VOCAB, invisible=EVEN_VOCAB, caught_by=("loss", "gradient")
)
def ds_labels_assume_even_shards() -> list[Replacement]:
    """The sharded loss looks labels up as if shards were cut evenly: one row too early, and the last label nowhere."""
    module = _part("sequence.cross_entropy")
    original = module.vocab_parallel_cross_entropy

    def broken(*args: Any, **kwargs: Any) -> Tensor:
        group, begin, end = (kwargs[name] for name in ("tp_group", "vocab_start_index", "vocab_end_index"))
        even = dist.get_rank(group) * (kwargs["global_vocab_size"] // dist.get_world_size(group))
        return original(*args, **{**kwargs, "vocab_start_index": even, "vocab_end_index": even + end - begin})

    return [(module, "vocab_parallel_cross_entropy", broken)]


@TABLE.fault(
    12,
    needs="padding_idx, tie=tied, head=vocab, tp > 1",
    case=VOCAB + ",padding_idx=0",
    invisible=VOCAB,
    caught_by=("gradient",),
)
def ds_global_padding_idx() -> list[Replacement]:
    """Every vocabulary shard of the embedding leaves its own row number padding_idx without a gradient."""
    cls = _layers("VocabParallelEmbedding")
    original = cls.__init__

    def broken(self: Any, module: nn.Embedding, *args: Any, **kwargs: Any) -> None:
        original(self, module, *args, **kwargs)
        self.padding_idx = module.padding_idx

    return [(cls, "__init__", broken)]


@TABLE.fault(
    12,
    needs="padding_idx, tie=tied, head=row, tp > 1",
    case=ROW + ",padding_idx=5",
    invisible=ROW,
    caught_by=("gradient",),
)
def ds_padding_idx_dropped() -> list[Replacement]:
    """The hidden-sharded embedding forgets padding_idx."""
    cls = _layers("HiddenParallelEmbedding")
    original = cls.__init__

    def broken(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.padding_idx = None

    return [(cls, "__init__", broken)]


@TABLE.fault(24, needs="tp > 1, even shards", case=EVEN_VOCAB, invisible=ONE_RANK, caught_by=("start",))
def ds_first_shard_everywhere() -> list[Replacement]:
    """Every rank cuts the first rank's shard out of column-parallel weights."""
    cls = _layers("LinearLayer")
    original = cls.uneven_partition

    def broken(self: Any, parameters: Any) -> None:
        place, self.tp_index = self.tp_index, 0
        try:
            original(self, parameters)
        finally:
            self.tp_index = place

    return [(cls, "uneven_partition", broken)]


@TABLE.fault(30, needs="head=row, tp > 1", case=ROW, invisible=VOCAB, caught_by=("layout",))
def ds_head_left_whole() -> list[Replacement]:
    """AutoTP leaves a row head and its embedding whole on every rank without a word."""
    autotp = _part("module_inject.auto_tp", "AutoTP")
    original = autotp._create_row_parallel_layer

    def broken(self: Any, module: nn.Module, spec: Any, name: str) -> nn.Module:
        return module if self._is_lm_head_name(name) else original(self, module, spec, name)

    return [(autotp, "_create_row_parallel_layer", broken)]


# --- the loss over sharded logits ----------------------------------------------------------------------------------


@TABLE.fault(13, needs="head=vocab, tp > 1", case=VOCAB, invisible=ROW, caught_by=("loss", "gradient"))
def ds_ignored_labels_count() -> list[Replacement]:
    """Ignored labels count in the mean of the sharded loss."""
    module = _part("sequence.cross_entropy")
    original = module.vocab_parallel_cross_entropy

    def broken(*args: Any, **kwargs: Any) -> Tensor:
        return original(*args, **{**kwargs, "reduction": "none"}).mean()

    return [(module, "vocab_parallel_cross_entropy", broken)]


def _loss_reductions(change: Callable[[int, Tensor, Any, Callable[[], None]], None]) -> Replacement:
    """Change the reductions of the sharded loss: 0 the maximum, 1 the sum of exponentials, 2 the label's logit."""
    module = _part("sequence.cross_entropy")
    original = module.dist
    place = [2]

    def all_reduce(tensor: Tensor, **kwargs: Any) -> None:
        place[0] = 0 if kwargs["op"] == original.ReduceOp.MAX else place[0] + 1
        change(place[0], tensor, kwargs["group"], lambda: original.all_reduce(tensor, **kwargs))

    return (module, "dist", types.SimpleNamespace(**{**vars(original), "all_reduce": all_reduce}))


@TABLE.fault(14, needs="head=vocab, tp > 1", case=VOCAB, invisible=ROW, caught_by=("loss", "gradient", "replicas"))
def ds_local_sum_of_exponentials() -> list[Replacement]:
    """Each rank divides by the sum of the exponentials of its own part of the vocabulary."""
    return [_loss_reductions(lambda place, tensor, group, reduce: None if place == 1 else reduce())]


@TABLE.fault(15, needs="head=vocab, tp > 1", case=VOCAB, invisible=ROW, caught_by=("loss", "gradient"))
def ds_gathered_logits_in_sharded_loss() -> list[Replacement]:
    """The softmax's sum is that of gathered logits, and is summed over the ranks again: log(tp) too much loss."""

    def change(place: int, tensor: Tensor, group: Any, reduce: Callable[[], None]) -> None:
        reduce()
        if place == 1:
            tensor.mul_(dist.get_world_size(group))

    return [_loss_reductions(change)]


@TABLE.fault(16, needs="head=vocab, tp > 1", case=VOCAB, invisible=ROW, caught_by=("loss", "gradient"))
def ds_local_maximum() -> list[Replacement]:
    """Each rank shifts its exponentials by the maximum of its own part of the vocabulary."""
    return [_loss_reductions(lambda place, tensor, group, reduce: None if place == 0 else reduce())]


@TABLE.fault(
    17,
    needs="head=vocab, tp > 1, accumulate > 1",
    case=VOCAB + ",accumulate=2",
    invisible=VOCAB,
    caught_by=("gradient",),
)
def ds_upstream_gradient_ignored() -> list[Replacement]:
    """The backward of the sharded loss takes its upstream gradient to be that of the plain mean over counted labels."""
    cls = _part("sequence.cross_entropy", "_VocabParallelCrossEntropy")
    original = cls.backward

    def broken(ctx: Any, gradient: Tensor) -> Any:
        counted = ctx.saved_tensors[-1].sum().to(gradient.dtype)
        return original(ctx, torch.ones_like(gradient) / counted)

    return [(cls, "backward", staticmethod(broken))]


# --- data parallelism, accumulation, ZeRO --------------------------------------------------------------------------


@TABLE.fault(9, needs="zero=0, dp > 1", case=DP, invisible=ONE_RANK, caught_by=("replicas", "gradient"))
def ds_missing_dp_reduce() -> list[Replacement]:
    """Without ZeRO the engine skips the data-parallel reduction."""
    return [(_engine(), "buffered_allreduce_fallback", lambda self, grads=None, elements_per_buffer=0: None)]


@TABLE.fault(9, needs="zero=0, tp > 1", case=ROW, invisible=DP, caught_by=("gradient",))
def ds_divisor_is_the_world() -> list[Replacement]:
    """Without ZeRO the data-parallel sum is divided by the number of all ranks."""
    engine = _engine()
    original = engine.allreduce_bucket

    def broken(self: Any, bucket: Any, dp_group: Any, dp_world_size: Any = None) -> Tensor:
        return original(self, bucket, dp_group, dist.get_world_size())

    return [(engine, "allreduce_bucket", broken)]


@TABLE.fault(9, needs="zero=2, dp > 1", case=ZERO2, invisible=DP, caught_by=("gradient", "gradient_norm"))
def ds_zero2_sum_for_mean() -> list[Replacement]:
    """ZeRO 2 sums over data-parallel ranks where it should average."""
    zero = _zero()
    original = zero.average_tensor

    def broken(self: Any, tensor: Tensor, *args: Any) -> None:
        original(self, tensor.mul_(dist.get_world_size(self.dp_process_group)), *args)

    return [(zero, "average_tensor", broken)]


@TABLE.fault(9, needs="zero=2, dp > 1", case=ZERO2, invisible=DP, caught_by=("gradient", "gradient_norm"))
def ds_zero2_keeps_its_own() -> list[Replacement]:
    """ZeRO 2 skips the reduction: each rank's part holds the gradient of its own data only."""

    def broken(self: Any, bucket: Any, *args: Any, **kwargs: Any) -> Tensor:
        return self.flatten(bucket)

    return [(_zero(), "allreduce_bucket", broken)]


@TABLE.fault(9, needs="zero=3, dp > 1", case=ZERO3, invisible=ZERO2, caught_by=("gradient", "gradient_norm"))
def ds_zero3_sum_for_mean() -> list[Replacement]:
    """ZeRO 3's scattered gradients are sums over data-parallel ranks where they should be means."""
    zero = _part("runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3")
    original = zero.partition_grads

    def broken(self: Any, parameters: Any, parts: list[Tensor]) -> Any:
        return original(self, parameters, [part * dist.get_world_size(self.dp_process_group) for part in parts])

    return [(zero, "partition_grads", broken)]


@TABLE.fault(10, needs="clip > 0, zero=0, dp > 1", case=DP + ",clip=0.5", invisible=DP, caught_by=("gradient",))
def ds_clipped_before_dp_reduce() -> list[Replacement]:
    """Without ZeRO each rank clips its own gradients before they are reduced."""
    engine = _engine()
    original = engine.allreduce_gradients

    def broken(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.gradient_clipping() > 0:
            self.clip_fp32_gradients()
        original(self, *args, **kwargs)

    return [(engine, "allreduce_gradients", broken)]


@TABLE.fault(21, needs="zero=2, accumulate > 1", case=ZERO2 + ",accumulate=2", invisible=ZERO2, caught_by=("gradient",))
def ds_zero2_accumulation_overwritten() -> list[Replacement]:
    """ZeRO 2 starts its sum of gradients anew with every micro-batch."""
    zero = _zero()
    original = zero.independent_gradient_partition_epilogue

    def broken(self: Any) -> None:
        self.all_grad_tensors = dict.fromkeys(self.all_grad_tensors)
        original(self)

    return [(zero, "independent_gradient_partition_epilogue", broken)]


@TABLE.fault(21, needs="zero=3, accumulate > 1", case=ZERO3 + ",accumulate=2", invisible=ZERO3, caught_by=("gradient",))
def ds_zero3_accumulation_overwritten() -> list[Replacement]:
    """ZeRO 3 takes every micro-batch for the first of its step and copies where it should add."""
    zero = _part("runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3")
    original = zero.partition_grads

    def broken(self: Any, *args: Any) -> Any:
        self.micro_step_id = 0
        return original(self, *args)

    return [(zero, "partition_grads", broken)]


@TABLE.fault(22, needs="zero=0, dp > 1", case=DP, invisible=ONE_RANK, caught_by=("replicas",))
def ds_replica_not_updated() -> list[Replacement]:
    """Without ZeRO the second data-parallel rank does not update its weights."""
    engine = _engine()
    original = engine._take_model_step

    def broken(self: Any, *args: Any) -> None:
        kept = [p.detach().clone() for p in self.module.parameters()]
        original(self, *args)
        if dist.get_rank(self.seq_data_parallel_group) == 1:
            for parameter, before in zip(self.module.parameters(), kept, strict=True):
                parameter.data.copy_(before)

    return [(engine, "_take_model_step", broken)]


@TABLE.fault(11, needs="zero=1, dp > 1", case=ZERO1, invisible=ZERO3, caught_by=("update",))
def ds_part_never_updated() -> list[Replacement]:
    """The second data-parallel rank never updates its part of the weights, and every rank gathers it so."""
    zero = _zero()
    original = zero._optimizer_step

    def broken(self: Any, group: int) -> None:
        if dist.get_rank(self.dp_process_group) != 1:
            original(self, group)

    return [(zero, "_optimizer_step", broken)]


@TABLE.fault(23, needs="zero=1 or 2, dp > 1", case=ZERO2, invisible=ZERO3, caught_by=("replicas",))
def ds_updated_parts_not_gathered() -> list[Replacement]:
    """The updated parts are not gathered: each rank goes on with the other ranks' old ones."""
    return [(_part("runtime.zero.stage_1_and_2"), "all_gather_dp_groups", lambda **kwargs: None)]


@TABLE.fault(23, needs="zero=1 or 2, dp > 1", case=ZERO1, invisible=ZERO3, caught_by=("update",))
def ds_gathered_a_step_late() -> list[Replacement]:
    """The parts that are gathered are those of the step before: the update is not waited for."""
    module = _part("runtime.zero.stage_1_and_2")
    original = module.all_gather_dp_groups
    old: dict[int, Tensor] = {}

    def broken(*, groups_flat: Any, partitioned_param_groups: Any, dp_process_group: Any, **kwargs: Any) -> None:
        for number, parts in enumerate(partitioned_param_groups):
            mine = parts[dist.get_rank(dp_process_group[number])]
            new = mine.detach().clone()
            if number in old:
                mine.data.copy_(old[number])
            old[number] = new
        original(
            groups_flat=groups_flat,
            partitioned_param_groups=partitioned_param_groups,
            dp_process_group=dp_process_group,
            **kwargs,
        )

    return [(module, "all_gather_dp_groups", broken)]


# --- norm, clipping, optimizer, precision --------------------------------------------------------------------------


@TABLE.fault(18, needs="zero=1 or 2, tp > 1", case=ROW + ",zero=1", invisible=ZERO1, caught_by=("gradient_norm",))
def ds_norm_counts_replicas() -> list[Replacement]:
    """ZeRO's gradient norm counts weights that are whole on every tensor-parallel rank once a rank."""
    return [(_part("runtime.zero.stage_1_and_2"), "is_model_parallel_parameter", lambda parameter: True)]


@TABLE.fault(18, needs="zero=3, tp > 1", case=ROW + ",zero=3", invisible=ZERO3, caught_by=("gradient_norm",))
def ds_norm_misses_shards() -> list[Replacement]:
    """ZeRO 3's gradient norm counts the first tensor-parallel rank's shards only."""
    return [(_part("runtime.zero.stage3"), "is_model_parallel_parameter", lambda parameter: False)]


@TABLE.fault(18, needs="zero=0, clip > 0, tp > 1", case=ROW + ",clip=0.5", invisible=ROW, caught_by=("update",))
def ds_clip_counts_replicas() -> list[Replacement]:
    """Without ZeRO the norm that clips counts weights that are whole on every tensor-parallel rank once a rank."""
    return [(_part("runtime.utils"), "is_model_parallel_parameter", lambda parameter: True)]


@TABLE.fault(
    19,
    needs="zero=1 or 2, clip > 0, tp > 1",
    case=ROW + ",zero=2,clip=0.5",
    invisible=ZERO2 + ",clip=0.5",
    caught_by=("gradient_norm", "replicas", "update"),
)
def ds_clip_is_local() -> list[Replacement]:
    """Each tensor-parallel rank clips by the norm of its own shards."""
    return [(_zero(), "_model_parallel_all_reduce", lambda self, tensor, op: None)]


@TABLE.fault(20, needs="tie=tied, zero=0", case=ROW, invisible=UNTIED_ROW, caught_by=("census", "update"))
def ds_optimizer_holds_tied_weight_twice() -> list[Replacement]:
    """The optimizer is given every name's parameter, the tied weight twice, and nobody checks."""
    engine = _engine()
    original = engine._configure_optimizer

    def broken(self: Any, optimizer: Any, parameters: Any) -> None:
        original(self, optimizer, [p for _, p in self.module.named_parameters(remove_duplicate=False)])

    return [(engine, "_configure_optimizer", broken), (engine, "_check_for_duplicates", lambda self, optimizer: None)]


@TABLE.fault(28, needs="zero=0, dp > 1", case=DP, invisible=ZERO2, caught_by=("precision",))
def ds_bf16_dp_reduce() -> list[Replacement]:
    """Without ZeRO fp32 gradients are reduced in bf16."""
    engine = _engine()
    original = engine.allreduce_bucket

    def broken(self: Any, *args: Any) -> Tensor:
        before = self._config.communication_data_type
        self.communication_data_type = torch.bfloat16
        try:
            return original(self, *args)
        finally:
            self.communication_data_type = before

    return [(engine, "allreduce_bucket", broken)]


@TABLE.fault(28, needs="zero=1 or 2, dp > 1", case=ZERO2, invisible=DP, caught_by=("precision",))
def ds_bf16_zero_reduce() -> list[Replacement]:
    """ZeRO 1 and 2 reduce fp32 gradients in bf16."""
    zero = _zero()
    original = zero.allreduce_bucket

    def broken(self: Any, bucket: Any, kind: torch.dtype, *args: Any, **kwargs: Any) -> Tensor:
        return original(self, bucket, torch.bfloat16, *args, **kwargs)

    return [(zero, "allreduce_bucket", broken)]


@TABLE.fault(28, needs="head=row, tp > 1", case=ROW, invisible=ONE_RANK, caught_by=("precision", "logits"))
def ds_bf16_partial_sums() -> list[Replacement]:
    """Row-parallel layers and the row head sum their partial results in bf16."""
    cls = _layers("RowParallel")
    original = cls.forward

    def broken(ctx: Any, group: Any, x: Tensor, inference: bool) -> Tensor:
        return original(ctx, group, x.bfloat16(), inference).to(x.dtype)

    return [(cls, "forward", staticmethod(broken))]
