"""DeepSpeed's checkpoints: saved and loaded through the engine, made universal by its own converter, read file by file.

A universal checkpoint has a directory for each parameter, ``zero/<name>/``, with the whole fp32 weight and each of the
optimizer's moments in a file of its own (DeepSpeed's tutorial "Universal Checkpointing").
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.checkpoint import ds_to_universal

from suites.observe import Piece
from suites.paths.handwritten_checkpoint import shared_directory

TAG = "step1"
KINDS = ("fp32", "exp_avg", "exp_avg_sq", "momentum_buffer", "step")


@contextlib.contextmanager
def shared_folder(device: torch.device) -> Iterator[Path]:
    """A temporary folder of the first rank that all ranks see, for as long as any of them needs it."""
    with contextlib.ExitStack() as stack:
        mine = stack.enter_context(tempfile.TemporaryDirectory(prefix="tiebench-")) if dist.get_rank() == 0 else ""
        yield Path(shared_directory(mine, device))
        dist.barrier()  # every file was read


def make_universal(folder: Path) -> None:
    """Convert ``saved`` to ``universal``, on the first rank; the others wait."""
    dist.barrier()  # every file is written
    if dist.get_rank() == 0:
        ds_to_universal.main(
            argparse.Namespace(
                input_folder=str(folder / "saved" / TAG),
                output_folder=str(folder / "universal" / TAG),
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,
            )
        )
        (folder / "universal" / "latest_universal").write_text(TAG)
        (folder / "universal" / "latest").write_text(TAG)
    dist.barrier()


def universal_files(folder: Path) -> dict[str, Piece]:
    """What the files of a universal checkpoint hold: ``kind:name of the parameter`` -> tensor. Nothing in a file is
    run."""
    found = {}
    for path in sorted((folder / "universal" / TAG / "zero").glob("*/*.pt")):
        if path.stem not in KINDS:
            continue
        content = torch.load(path, weights_only=True, map_location="cpu")
        value = content.get("param") if isinstance(content, dict) else content
        value = torch.as_tensor(value, dtype=None if isinstance(value, torch.Tensor) else torch.float64)
        found[f"{path.stem}:{path.parent.name}"] = Piece.whole(value)
    return found


def load(engine: Any, folder: Path, *, universal: bool) -> None:
    """Load what was saved.

    Raises:
        FileNotFoundError: the engine found nothing to load.
    """
    path, _ = engine.load_checkpoint(str(folder / ("universal" if universal else "saved")), tag=TAG)
    if path is None:
        raise FileNotFoundError(f"DeepSpeed found no checkpoint in {folder}")
