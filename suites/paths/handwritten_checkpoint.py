"""Checkpoints of the hand-written path: every rank saves its shards and moments; whole tensors are put together from
all files and cut anew.

A rank's file is a dictionary of two sections, ``model`` and ``optimizer``. Each holds entries by parameter name (a tied
weight once, under its first name), and each entry its slots: flat tensors such as the weight and its moments, of which
a data-parallel rank may hold a part only (ZeRO). Nothing in a file is code: it is read with ``weights_only=True``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

WEIGHT = "weight"  # name of the slot that holds the weight itself; the others are the optimizer's
# tp_dim (-1: whole on every rank), local_shape, start, slots: name -> flat tensor, counts: name -> number (of steps)
Entry = dict[str, Any]
Section = dict[str, Entry]


@dataclass(frozen=True)
class Whole:
    """One parameter's full tensors by slot, its counts, and how it is cut."""

    slots: Mapping[str, Tensor]
    counts: Mapping[str, float]
    tp_dim: int | None


def entry(
    parameter: Tensor, slots: Mapping[str, Tensor], counts: Mapping[str, float] | None = None, start: int = 0
) -> Entry:
    """What a file holds of one parameter: elements from `start` on of this rank's shard of it."""
    dim = getattr(parameter, "tp_dim", None)
    return {
        "tp_dim": -1 if dim is None else dim,
        "local_shape": list(parameter.shape),
        "start": start,
        "slots": {name: slot.detach().reshape(-1).clone() for name, slot in slots.items()},
        "counts": dict(counts or {}),
    }


def save(directory: Path, place: tuple[int, int], model: Section, optimizer: Section) -> None:
    """Write this rank's file; `place` is (tp_rank, dp_rank)."""
    tp_rank, dp_rank = place
    content = {"tp_rank": tp_rank, "dp_rank": dp_rank, "model": model, "optimizer": optimizer}
    torch.save(content, directory / f"tp{tp_rank}-dp{dp_rank}.pt")


def moments(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """A torch optimizer's state of one parameter as slots and counts."""
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    counts = {name: value.item() for name, value in tensors.items() if value.dim() == 0}
    return {name: value for name, value in tensors.items() if value.dim()}, counts


def read(directory: Path, ranks: int) -> list[dict[str, Any]]:
    """All ranks' files, in order of their places.

    Raises:
        FileNotFoundError: there are not as many files as ranks.
    """
    if (count := len(list(directory.glob("*.pt")))) != ranks:
        raise FileNotFoundError(
            f"{directory} holds the files of {count} of {ranks} ranks: set TMPDIR to a directory that all can reach"
        )
    files = [torch.load(path, weights_only=True, map_location="cpu") for path in sorted(directory.glob("*.pt"))]
    return sorted(files, key=lambda content: (content["tp_rank"], content["dp_rank"]))


def consolidate(files: Sequence[Mapping[str, Any]], section: str) -> dict[str, Whole]:
    """Full tensors of one section, from all ranks' files."""
    found = {}
    for name, first in files[0][section].items():
        entries: dict[int, list[Entry]] = {}
        for content in files:
            entries.setdefault(content["tp_rank"], []).append(content[section][name])
        slots = {}
        for slot in first["slots"]:
            shards = [local_shard(parts, slot) for parts in entries.values()]
            slots[slot] = join(shards, first["tp_dim"])
        found[name] = Whole(slots, first["counts"], None if first["tp_dim"] < 0 else first["tp_dim"])
    return found


def local_shard(parts: Sequence[Entry], slot: str) -> Tensor:
    """A tensor-parallel rank's whole shard, from what its data-parallel ranks hold of it."""
    shape = torch.Size(parts[0]["local_shape"])
    flat = torch.zeros(shape.numel(), dtype=parts[0]["slots"][slot].dtype)
    for part in parts:
        data = part["slots"][slot]
        flat[part["start"] : part["start"] + data.numel()] = data
    return flat.reshape(shape)


def join(shards: Sequence[Tensor], tp_dim: int) -> Tensor:
    """The whole from all tensor-parallel ranks' shards; the first one where every rank holds the whole."""
    return shards[0] if tp_dim < 0 else torch.cat(list(shards), tp_dim)


def own_shard(whole: Tensor, tp_dim: int | None, tp: int, tp_rank: int) -> Tensor:
    """This rank's shard of a whole tensor."""
    return whole if tp_dim is None else whole.tensor_split(tp, tp_dim)[tp_rank]


def shared_directory(path: str, device: torch.device) -> str:
    """The first rank's `path`, on every rank; a string of at most 4096 bytes."""
    told = torch.zeros(4096, dtype=torch.uint8)
    text = path.encode()
    told[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    told = told.to(device)
    dist.broadcast(told, 0)
    return bytes(told.cpu().tolist()).rstrip(b"\0").decode()
