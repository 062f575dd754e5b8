"""What one rank holds of a DeepSpeed parameter: its part of gradient and weight, with offset and local shape.

Only the rank's own memory is read here, no collective is issued: the full tensors are assembled by `suites.observe`
(rule 3 of the design). Where a DeepSpeed lacks the attributes that this needs, its public `safe_get_full_grad` stands
in, a gather over the data-parallel ranks only.

A parameter is an `nn.Parameter` to which DeepSpeed has added attributes; hence `Any`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import groups, safe_get_full_grad, safe_get_local_grad

from suites.observe import Piece


def gradient_piece(parameter: Any, zero: int, dp_rank: int) -> Piece:
    """This rank's part of the gradient: averaged over micro-batches and data-parallel ranks, before clipping.

    A parameter that no gradient reached has a gradient of zeros. Call it between
    the last backward pass and the step.
    """
    if zero == 0:
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        return Piece.whole(gradient)
    if zero == 3:
        return _partition(parameter, safe_get_local_grad(parameter), dp_rank)
    if not hasattr(parameter, "_hp_mapping"):
        return Piece.whole(safe_get_full_grad(parameter))
    mapping = parameter._hp_mapping
    if mapping is None:  # all of it belongs to other ranks
        return Piece.part(torch.empty(0, dtype=torch.float32), 0, parameter.shape)
    fragment = mapping.get_lp_grad_fragment(parameter._index_in_param_group).reshape(-1)
    address = mapping.lp_fragment_address
    return Piece.part(fragment, address.start, parameter.shape)


def low_gradient_piece(parameter: Any, dp_rank: int) -> Piece:
    """As `gradient_piece`, where the model trains in bf16 with fp32 master weights: the fp32 sum where there is one."""
    if hasattr(parameter, "ds_id"):  # ZeRO 3
        optimizer = parameter._z3_optimizer
        sums = optimizer._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
        return _partition(parameter, sums[parameter.ds_id], dp_rank)
    if hasattr(parameter, "_hp_mapping"):  # ZeRO 1 and 2
        mapping = parameter._hp_mapping
        if mapping is None:  # all of it belongs to other ranks
            return Piece.part(torch.empty(0, dtype=torch.float32), 0, parameter.shape)
        address = mapping.lp_fragment_address
        found = mapping.get_lp_grad_fragment(parameter._index_in_param_group).reshape(-1)
        if found.numel() == parameter.numel():  # all of it, though only a part is this rank's
            found = found[address.start : address.start + address.numel]
        return Piece.part(found, address.start, parameter.shape)
    return Piece.whole(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)


def master_piece(parameter: Any, optimizer: Any, dp_rank: int) -> Piece | None:
    """This rank's part of the fp32 master weight of a bf16 parameter; None where the optimizer holds none."""
    if hasattr(parameter, "ds_id"):
        return _partition(parameter, parameter._z3_optimizer.get_local_fp32_param(parameter), dp_rank)
    if hasattr(parameter, "_hp_mapping"):
        mapping = parameter._hp_mapping
        if mapping is None:
            return Piece.part(torch.empty(0, dtype=torch.float32), 0, parameter.shape)
        return Piece.part(mapping.hp_fragment, mapping.lp_fragment_address.start, parameter.shape)
    groups = zip(getattr(optimizer, "fp16_groups", ()), getattr(optimizer, "fp32_groups", ()), strict=True)
    pairs = (pair for low, high in groups for pair in zip(low, high, strict=True))
    return next((Piece.whole(high) for low, high in pairs if low is parameter), None)


def weight_piece(parameter: Any, dp_rank: int) -> Piece:
    """This rank's part of the weight that the model computes with."""
    if not hasattr(parameter, "ds_tensor") or parameter.ds_status == ZeroParamStatus.AVAILABLE:
        return Piece.whole(parameter)
    return _partition(parameter, parameter.ds_tensor, dp_rank)


def _partition(parameter: Any, flat: torch.Tensor, dp_rank: int) -> Piece:
    """ZeRO 3: equal flat partitions in the order of the ranks, the last ones padded; the padding is cut off.

    Parameters that `deepspeed.zero.Init` made and AutoTP left whole stay cut over all ranks.
    """
    group = getattr(parameter, "ds_process_group", None)
    rank = dp_rank if group is None else dist.get_rank(group)
    everywhere = group is not None and dist.get_world_size(group) > groups._get_data_parallel_world_size()
    start = min(rank * parameter.partition_numel(), parameter.ds_numel)
    held = min(parameter.partition_numel(), parameter.ds_numel - start)
    return Piece.part(flat.reshape(-1)[:held], start, parameter.ds_shape, everywhere=everywhere)
