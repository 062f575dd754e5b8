"""Observations: what one rank saw of one case, and how full tensors are assembled from the ranks' pieces.

A rank writes plain values and tensors only (`RankObservation.save`, in the safetensors format). The full tensors are
put together here, from local shapes and offsets, never by a framework's own gather (rule 3 of the design).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from suites.lifecycle import Lifecycle


class ObservationError(Exception):
    """The ranks' pieces do not make up the full tensors: something is missing, doubled or of the wrong shape."""


@dataclass(frozen=True)
class Piece:
    """A contiguous part of one rank's tensor-parallel shard, as ZeRO leaves it.

    Args:
        data: 1-d tensor on CPU, elements ``start .. start + data.numel()`` of the flattened local shard.
        start: offset in the flattened local shard; 0 for a whole shard.
        local_shape: shape of this tensor-parallel rank's whole shard, read off the live tensor.
        everywhere: the parts lie on all ranks, tensor-parallel ones too, each of which computes with the whole
            (`deepspeed.zero.Init` before tensor parallelism).
    """

    data: Tensor
    start: int
    local_shape: tuple[int, ...]
    everywhere: bool = False

    @classmethod
    def whole(cls, local: Tensor) -> Piece:
        """Piece that holds a rank's whole local shard (copied to CPU)."""
        copy = local.detach().to("cpu", copy=True).contiguous()
        return cls(copy.reshape(-1), 0, tuple(local.shape))

    @classmethod
    def part(cls, flat: Tensor, start: int, local_shape: Sequence[int], *, everywhere: bool = False) -> Piece:
        """Piece that holds a flat partition of a rank's local shard (copied to CPU)."""
        return cls(flat.detach().to("cpu", copy=True).contiguous().reshape(-1), start, tuple(local_shape), everywhere)


@dataclass(frozen=True)
class StepObservation:
    """One optimizer step on one rank.

    Args:
        loss: this rank's loss of each micro-batch.
        logits: this rank's logits of each micro-batch, [batch, sequence, local vocabulary].
        gradients: per parameter, complete over data-parallel ranks, before clipping.
        gradient_norm: global norm before clipping as the path reports it, None where it reports none.
        weights: per parameter, after the step.
        masters: per parameter, the fp32 master weight after the step; empty where the weights themselves are updated.
        collectives: names of the collectives that this rank issued, in order, as ``allreduce/2`` over two ranks
        (first step only).
        seconds: wall clock of forward, backward and optimizer step, observing excluded.
    """

    loss: tuple[float, ...]
    logits: tuple[Piece, ...]
    gradients: Mapping[str, Piece]
    gradient_norm: float | None
    weights: Mapping[str, Piece]
    collectives: tuple[str, ...] | None
    seconds: float
    masters: Mapping[str, Piece] = field(default_factory=dict)


@dataclass(frozen=True)
class Seen:
    """One module's output in a traced step (`suites.trace`), its gradient, or a matrix product's input.

    Args:
        module: canonical name; direction: forward, backward or input.
        order: place among all that the rank saw, in the order of execution.
    """

    module: str
    direction: str
    micro: int
    order: int
    piece: Piece


@dataclass(frozen=True)
class RankObservation:
    """All that one rank saw of one case.

    Args:
        layout: per parameter, class of the live module that holds it.
        census: name of each parameter that the optimizer updates, once per mention; ``?shape`` for a stranger.
        initial: weights before the first step.
        peak_memory_bytes: resident-set peak on CPU, allocator peak on CUDA; of this case alone.
        zero_stage: ZeRO stage that ran, read off the live optimizer.
        switches: what changes numbers in this process (`suites.precision.switches`), read while the case ran.
        observing_seconds: wall clock of reading all this off the live model.
        trace: what was kept of a traced step; empty unless one was asked for.
        saved: what the files of a checkpoint of whole tensors hold, ``kind:name`` (fp32, exp_avg, …), on one rank; and
            this rank's part of each (master) weight as it was saved, ``held:name``.
    """

    rank: int
    tp_rank: int
    dp_rank: int
    lifecycle: tuple[Lifecycle, ...]
    layout: Mapping[str, str]
    census: tuple[str, ...]
    initial: Mapping[str, Piece]
    steps: tuple[StepObservation, ...]
    peak_memory_bytes: int
    zero_stage: int
    switches: Mapping[str, str] = field(default_factory=dict)
    observing_seconds: float = 0.0
    trace: tuple[Seen, ...] = ()
    saved: Mapping[str, Piece] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write to `path` in the safetensors format: the tensors, and all else as JSON beside them."""
        tensors: dict[str, Tensor] = {}
        keys: dict[int, str] = {}  # by identity: both names of a tied gradient may hold one tensor

        def plain(value: Any) -> Any:
            if isinstance(value, Piece):
                key = keys.setdefault(id(value.data), f"{len(keys)}")
                tensors[key] = value.data
                placed = {"start": value.start, "local_shape": value.local_shape, "everywhere": value.everywhere}
                return {"data": key, **placed}
            if isinstance(value, Mapping):
                return {name: plain(item) for name, item in value.items()}
            if isinstance(value, tuple):
                return [plain(item) for item in value]
            return {f.name: plain(getattr(value, f.name)) for f in fields(value)} if is_dataclass(value) else value

        save_file(tensors, path, metadata={"observation": json.dumps(plain(self))})

    @classmethod
    def load(cls, path: Path) -> RankObservation:
        """Read what `save` wrote; nothing in the file is code.

        Raises:
            ObservationError: the file is missing, damaged or of another layout.
        """
        try:
            with safe_open(path, framework="pt") as stream:
                raw = json.loads(stream.metadata()["observation"])
                tensors = {key: stream.get_tensor(key) for key in stream.keys()}  # noqa: SIM118 - no mapping
            return _rank(raw, tensors)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise ObservationError(f"observation {path.name} cannot be read: {error}") from None


def _rank(raw: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> RankObservation:
    def piece(found: Mapping[str, Any]) -> Piece:
        data, start = tensors[found["data"]], int(found["start"])
        return Piece(data, start, tuple(found["local_shape"]), bool(found["everywhere"]))

    def pieces(found: Mapping[str, Any]) -> dict[str, Piece]:
        return {name: piece(item) for name, item in found.items()}

    steps = [
        StepObservation(
            **{
                **step,
                "loss": tuple(step["loss"]),
                "logits": tuple(piece(item) for item in step["logits"]),
                "gradients": pieces(step["gradients"]),
                "weights": pieces(step["weights"]),
                "masters": pieces(step["masters"]),
                "collectives": None if step["collectives"] is None else tuple(step["collectives"]),
            }
        )
        for step in raw["steps"]
    ]
    return RankObservation(
        **{
            **raw,
            "steps": tuple(steps),
            "lifecycle": tuple(Lifecycle(**event) for event in raw["lifecycle"]),
            "census": tuple(raw["census"]),
            "initial": pieces(raw["initial"]),
            "saved": pieces(raw["saved"]),
            "trace": tuple(Seen(**{**seen, "piece": piece(seen["piece"])}) for seen in raw["trace"]),
        }
    )


@dataclass(frozen=True)
class Assembled:
    """A full tensor put together from all ranks' pieces.

    Args:
        value: the full tensor, on CPU, in the precision that the ranks hold it in.
        dim: dimension over which the tensor-parallel shards lie side by side, None when every rank holds all of it.
        sizes: extent of each tensor-parallel shard along `dim`.
        partitioned: no element stands on two data-parallel ranks (None where there is one such rank only).
        replicas_equal: all copies of one and the same element, on any rank, are bitwise equal.
        disagreement: which ranks disagree and by how much; empty when they agree.
    """

    value: Tensor
    dim: int | None
    sizes: tuple[int, ...]
    partitioned: bool | None
    replicas_equal: bool
    disagreement: str = ""


def assemble(
    name: str, pieces: Mapping[tuple[int, int], Piece], full_shape: Sequence[int], tp: int, dp: int
) -> Assembled:
    """Full tensor of `name` from the pieces of ranks ``(tp_rank, dp_rank)`` of a mesh of `tp` times `dp`.

    Within a tensor-parallel rank the data-parallel ranks' pieces must cover the local shard; where they overlap they
    are compared bit by bit. Across tensor-parallel ranks the shards are either all full (then compared bit by bit) or
    lie side by side along the one dimension whose extents add up. Where all pieces are parts of one whole
    (`everywhere`), all ranks' together must cover it.

    Raises:
        ObservationError: pieces missing, gaps, or shapes that do not add up to `full_shape`.
    """
    shards: list[Tensor] = []
    disagreements: list[str] = []
    if tp > 1 and all(piece.everywhere for piece in pieces.values()):
        # Cut over all ranks as if all were data-parallel ones.
        pieces, tp, dp = {(0, t + tp * d): piece for (t, d), piece in pieces.items()}, 1, tp * dp
    for tp_rank in range(tp):
        mine = {dp: piece for (tp, dp), piece in pieces.items() if tp == tp_rank}
        if len(mine) != dp:
            raise ObservationError(
                f"{name}: {len(mine)} of {dp} data-parallel pieces on tensor-parallel rank {tp_rank}"
            )
        shards.append(_cover(name, tp_rank, mine, disagreements))
    held = sum(piece.data.numel() for piece in pieces.values())
    partitioned = held == sum(shard.numel() for shard in shards) if dp > 1 else None
    shape = tuple(full_shape)
    if all(tuple(s.shape) == shape for s in shards):
        for tp_rank, shard in enumerate(shards[1:], 1):
            if not bitwise_equal(shard, shards[0]):
                disagreements.append(
                    f"{name}: tensor-parallel rank {tp_rank} differs from rank 0 by {_gap(shard, shards[0])}"
                )
        return Assembled(shards[0], None, (), partitioned, not disagreements, "; ".join(disagreements))
    dims = [d for d in range(len(shape)) if sum(s.shape[d] for s in shards if s.dim() == len(shape)) == shape[d]]
    fits = [d for d in dims if all(_fits(s, shape, d) for s in shards)]
    if not fits:
        shown = ", ".join(str(tuple(s.shape)) for s in shards)
        raise ObservationError(f"{name}: local shapes {shown} do not add up to {shape}")
    dim = fits[0]
    sizes = tuple(s.shape[dim] for s in shards)
    return Assembled(torch.cat(shards, dim), dim, sizes, partitioned, not disagreements, "; ".join(disagreements))


def _cover(name: str, tp_rank: int, mine: Mapping[int, Piece], disagreements: list[str]) -> Tensor:
    first = mine[min(mine)]
    if any(piece.local_shape != first.local_shape for piece in mine.values()):
        raise ObservationError(f"{name}: data-parallel ranks of tensor-parallel rank {tp_rank} hold different shapes")
    size = int(torch.Size(first.local_shape).numel())
    if len(mine) == 1 and first.start == 0 and first.data.numel() == size:
        return first.data.reshape(first.local_shape)
    flat = torch.empty(size, dtype=first.data.dtype)
    filled = torch.zeros(size, dtype=torch.bool)
    for dp_rank, piece in sorted(mine.items()):
        end = piece.start + piece.data.numel()
        if piece.start < 0 or end > size or piece.data.dtype != flat.dtype:
            raise ObservationError(
                f"{name}: rank tp {tp_rank} dp {dp_rank} holds elements {piece.start}..{end} of {size}"
            )
        old, seen = flat[piece.start : end], filled[piece.start : end]
        if bool(seen.any()) and not bitwise_equal(old[seen], piece.data[seen]):
            gap = _gap(piece.data[seen], old[seen])
            disagreements.append(
                f"{name}: data-parallel rank {dp_rank} of tensor-parallel rank {tp_rank} differs by {gap}"
            )
        flat[piece.start : end] = torch.where(seen, old, piece.data)
        filled[piece.start : end] = True
    if not bool(filled.all()):
        raise ObservationError(
            f"{name}: {int((~filled).sum())} of {size} elements of tensor-parallel rank {tp_rank} are on no rank"
        )
    return flat.reshape(first.local_shape)


def _fits(shard: Tensor, shape: tuple[int, ...], dim: int) -> bool:
    return shard.dim() == len(shape) and all(
        s == f for d, (s, f) in enumerate(zip(shard.shape, shape, strict=True)) if d != dim
    )


def bitwise_equal(a: Tensor, b: Tensor) -> bool:
    """Same shape and the same bits (NaN equals the same NaN, 0.0 differs from -0.0)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _gap(a: Tensor, b: Tensor) -> str:
    if a.shape != b.shape:
        return f"shape {tuple(a.shape)} against {tuple(b.shape)}"
    return f"{(a.double() - b.double()).abs().max().item():.3g}"


def by_rank(ranks: Sequence[RankObservation]) -> dict[tuple[int, int], RankObservation]:
    """Observations keyed by ``(tp_rank, dp_rank)``.

    Raises:
        ObservationError: two ranks claim the same place.
    """
    placed = {(r.tp_rank, r.dp_rank): r for r in ranks}
    if len(placed) != len(ranks):
        raise ObservationError("two ranks claim the same place in the mesh")
    return placed
