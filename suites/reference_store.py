"""References kept on disk between runs: the evaluations of `suites.reference`, by all that determines their bits.

A directory of small files in the safetensors format (no pickle), bounded in bytes: those used least recently go first.
It may be shared by runs at the same time and, on a shared file system, by machines: an entry is written under a
temporary name and renamed, so that a reader sees it whole or not at all; no one locks; who loses a race computes anew.
An entry that is damaged, of another layout or not what its name says is deleted. Nothing here ever fails a run: where
the directory cannot be used, it goes on without and says so once.

The name of an entry is a digest of the case's factors, step, arithmetic and weights, and of all else that decides on
bits: the source of the reference, torch's build, the processor, the number of threads, the switches of the process.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import platform
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from suites import cases, data, model, precision, reference
from suites.reference import DETERMINED_BY, Evaluation, Key

LAYOUT = 1  # of an entry; part of its name
SIZE = 2**30  # bytes of all entries
SLACK = 0.1  # share of the size by which one writer may exceed it; and that is freed beyond what must be
# Bytes of one entry. Up to here it is read 7 to 40 times faster than computed (0.3 ms to 4 ms and more), and writing it
# adds a sixth to computing it; from there on reading is but twice as fast, and writing takes as long as computing.
LARGEST = 2**20
ALIGNED = 64  # bytes; as torch allocates, so that the same kernels see the same alignment
# Bytes left free on the disk, where a run's own records may lie too: more than a writer writes between two looks.
FREE = 2**28
STALE = 3600.0  # seconds after which a temporary file is a dead writer's, and after which a use is noted again
NAME = re.compile(r"[0-9a-f]{64}\.safetensors")
TEMPORARY = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{16}\.tmp")
ABOUT, DIGEST = "about", "digest"  # what an entry holds beside its tensors
# Variables by which the libraries below torch choose their kernels, by the beginning of their names.
LIBRARIES = ("ATEN_", "DNNL_", "MKL_", "ONEDNN_", "TORCH_MKLDNN_")
BAD = (SafetensorError, KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError)


def _digest_of_sources() -> str:
    digest = hashlib.sha256()
    for module in (model, data, reference, precision):
        digest.update(Path(str(module.__file__)).read_bytes())
    return digest.hexdigest()


# Read as this module is imported, with the code that runs: the files may change while it does.
try:
    SOURCES: str | None = _digest_of_sources()
except OSError:  # not in files: nothing tells which code computed an entry
    SOURCES = None


class ReferenceStore:
    """Evaluations on disk (`suites.reference.Store`).

    Args:
        directory: made on the first write.
        size: bytes of all entries; every writer may exceed it by `SLACK` of it.
        say: hears once, in a line for people, why it goes on without the directory.
    """

    def __init__(self, directory: Path, size: int = SIZE, say: Callable[[str], None] = print):
        self.directory, self.size, self.say = directory, size, say
        self.reading = self.writing = True
        self._environment: str | None = None
        self._written: float | None = None  # bytes since the directory was last measured; None: never
        if SOURCES is None:
            self.reading = False
            self._give_up("the source of the reference cannot be read")

    def get(self, key: Key) -> Evaluation | None:
        """What was put under a key, bit for bit; None where it is not there."""
        if not self.reading:
            return None
        name = self._name(key)
        path = self._path(name)
        try:
            raw = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            self.reading = False
            self._give_up(_reason(error))
            return None
        try:
            found = unpacked(raw, name)
        except BAD:
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        self._note_use(path)
        return found

    def put(self, key: Key, found: Evaluation) -> None:
        """Keep an evaluation, unless computing it takes hardly longer than reading it."""
        if not self.writing or found.bytes > LARGEST:
            return
        name = self._name(key)
        temporary = self.directory / f"{name}.{secrets.token_hex(8)}.tmp"
        try:
            if self._written is None:
                self.directory.mkdir(parents=True, exist_ok=True)
                self._shrink()
            raw = packed(found, name)
            try:
                temporary.write_bytes(raw)
                temporary.replace(self._path(name))
            except OSError:
                with contextlib.suppress(OSError):
                    temporary.unlink()
                raise
            self._written = (self._written or 0.0) + len(raw)
            if self._written > SLACK * self.size:
                self._shrink()
        except OSError as error:
            self._give_up(_reason(error))

    def _path(self, name: str) -> Path:
        return self.directory / f"{name}.safetensors"

    def _name(self, key: Key) -> str:
        if self._environment is None:
            self._environment = environment()
        factors = dict(zip(DETERMINED_BY, key, strict=False))
        known = (self._environment, torch.get_num_threads(), factors, key[len(DETERMINED_BY) :])
        return hashlib.sha256(repr(known).encode()).hexdigest()

    def _note_use(self, path: Path) -> None:
        """Make it the entry used last; not each time, which a shared file system would feel."""
        with contextlib.suppress(OSError):  # evicted meanwhile, or another user's
            if time.time() - path.stat().st_mtime > STALE:
                os.utime(path)

    def _shrink(self) -> None:
        """Delete the entries used least recently down to the size, and what dead writers left.

        Raises:
            OSError: the disk is nearly full.
        """
        entries = sorted(self._entries())
        held = sum(size for _, size, _ in entries)
        goal = self.size * (1 - SLACK) if held > self.size else self.size
        for _, size, path in entries:
            if held <= goal:
                break
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
                held -= size
        if shutil.disk_usage(self.directory).free < FREE:
            raise OSError(errno.ENOSPC, f"less than {FREE >> 20} MiB are free on its disk")
        self._written = 0.0

    def _entries(self) -> Iterator[tuple[float, int, Path]]:
        """Time of the last use, bytes and path of every entry; files of other names are none of ours."""
        now = time.time()
        with os.scandir(self.directory) as files:
            for file in files:
                with contextlib.suppress(OSError):  # gone meanwhile
                    if NAME.fullmatch(file.name):
                        yield file.stat().st_mtime, file.stat().st_size, Path(file.path)
                    elif TEMPORARY.fullmatch(file.name) and now - file.stat().st_mtime > STALE:
                        os.unlink(file.path)

    def _give_up(self, reason: str) -> None:
        """Write no more; what is there may still be read."""
        if self.writing:
            self.say(f"References are not kept in {self.directory}: {reason}. The run goes on without.")
        self.writing = False


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


def environment() -> str:
    """Digest of all that decides on an evaluation's bits in this process, beside its arguments and the threads."""
    facts = {
        "layout": LAYOUT,
        "sources": SOURCES,
        "model": (cases.HEADS, cases.HEAD_DIM, cases.FFN),
        "torch": (torch.__version__, torch.version.git_version, torch.__config__.show()),
        "processor": (torch.backends.cpu.get_cpu_capability(), platform.machine(), _processor()),
        "switches": sorted(precision.switches(torch.device("cpu")).items()),
        "libraries": (
            torch.backends.mkldnn.enabled,
            sorted(kv for kv in os.environ.items() if kv[0].startswith(LIBRARIES)),
        ),
    }
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _processor() -> object:
    """Libraries choose their kernels and blocks by model, features and size of the caches."""
    wanted = (
        "vendor_id",
        "cpu family",
        "model",
        "model name",
        "stepping",
        "cache size",
        "flags",
        "Features",
        "CPU implementer",
        "CPU variant",
        "CPU part",
    )
    try:
        first = Path("/proc/cpuinfo").read_text(errors="replace").split("\n\n", 1)[0]
    except OSError:
        return platform.processor()
    lines = (line.partition(":") for line in first.splitlines())
    return [(name.strip(), value.strip()) for name, _, value in lines if name.strip() in wanted]


# --- entries -------------------------------------------------------------------------------------------------------


def packed(found: Evaluation, name: str) -> bytes:
    """An evaluation in the safetensors format: one flat tensor a precision, and what they are made of as JSON."""
    parts: dict[str, list[Tensor]] = {}
    filled: dict[str, int] = {}
    places: list[tuple[str, int, Sequence[int], Sequence[int]]] = []
    known: dict[int, int] = {}  # both names of a tied weight hold one tensor

    def place(tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        if id(tensor) not in known:
            known[id(tensor)] = len(places)
            dtype = str(tensor.dtype).removeprefix("torch.")
            places.append((dtype, filled.get(dtype, 0), tuple(tensor.shape), tensor.stride()))
            padding = -tensor.numel() % (ALIGNED // tensor.element_size())
            parts.setdefault(dtype, []).append(tensor.reshape(-1))
            if padding:
                parts[dtype].append(tensor.new_zeros(padding))
            filled[dtype] = filled.get(dtype, 0) + tensor.numel() + padding
        return known[id(tensor)]

    about = {
        "name": name,
        "loss": [(*batch, value) for batch, value in found.loss.items()],
        "logits": [(*batch, place(tensor)) for batch, tensor in found.logits.items()],
        "gradients": [(parameter, place(tensor)) for parameter, tensor in found.gradients.items()],
        "lookup": place(found.lookup),
        "projection": place(found.projection),
        "places": places,
    }
    held = {dtype: torch.cat(tensors) for dtype, tensors in parts.items()}
    text = json.dumps(about).encode()
    held[ABOUT] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    held[DIGEST] = torch.frombuffer(bytearray(_digest(held)), dtype=torch.uint8)
    return save(held, metadata={"format": f"tiebench reference {LAYOUT}"})


def unpacked(raw: bytes, name: str) -> Evaluation:
    """What `packed` made under that name.

    Raises:
        any of `BAD`: it is damaged, or another's.
    """
    held = load(raw)
    digest = held.pop(DIGEST)
    if bytes(digest.tolist()) != _digest(held):
        raise ValueError("damaged")
    about: Mapping[str, Any] = json.loads(bytes(held[ABOUT].numpy()))
    if about["name"] != name:
        raise ValueError("another entry")
    flat = {dtype: tensor.clone() for dtype, tensor in held.items() if dtype != ABOUT}  # aligned
    tensors = [_part(flat[dtype], start, shape, stride) for dtype, start, shape, stride in about["places"]]

    def at(place: int | None) -> Tensor | None:
        return None if place is None else tensors[place]

    return Evaluation(
        loss={(dp_rank, micro): value for dp_rank, micro, value in about["loss"]},
        logits={(dp_rank, micro): tensors[place] for dp_rank, micro, place in about["logits"]},
        gradients={parameter: tensors[place] for parameter, place in about["gradients"]},
        lookup=at(about["lookup"]),
        projection=at(about["projection"]),
    )


def _part(flat: Tensor, start: int, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    count = math.prod(shape)
    if _contiguous(shape, stride) and start + count <= flat.numel():
        return flat.as_strided(shape, stride, start)
    found = flat[start : start + count].reshape(shape)
    return torch.empty_strided(shape, stride, dtype=flat.dtype).copy_(found)


def _contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if step != expected:
            return False
        expected *= size
    return True


def _digest(held: Mapping[str, Tensor]) -> bytes:
    digest = hashlib.sha256()
    for dtype in sorted(held):
        digest.update(f"{dtype} {held[dtype].numel()} ".encode())
        digest.update(held[dtype].view(torch.uint8).numpy().data)
    return digest.digest()
