"""Is a case's result the same alone as after other cases? What its ranks saw, compared bit for bit.

Ranks are kept over many cases, and a framework may remember something of an earlier one. A sample of cases is run once
more on ranks that have never run any; every number but times and memory must be equal.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from suites.cases import Case

MEASURED = frozenset({"seconds", "observing_seconds", "peak_memory_bytes"})  # no two runs agree in these
HEADER = 8  # bytes of the length that a safetensors file begins with


def sample(cases: Sequence[Case], many: int, seed: str) -> frozenset[Case]:
    """Some of the cases, by a text that decides."""
    return frozenset(random.Random(seed).sample(list(dict.fromkeys(cases)), min(many, len(cases))))


def difference(warm: Path, alone: Path) -> str:
    """The first thing that two runs of a case disagree in, rank by rank; empty where they agree in everything.

    Args:
        warm, alone: directories with one observation file a rank.

    Raises:
        OSError, ValueError, KeyError: a file cannot be read.
    """
    names = sorted(path.name for path in warm.glob("*.safetensors"))
    others = sorted(path.name for path in alone.glob("*.safetensors"))
    if names != others or not names:
        return f"{len(names)} ranks reported after other cases, {len(others)} alone"
    for name in names:
        (tree, tensors), (other, others_tensors) = _read(warm / name), _read(alone / name)
        if found := next(_differ(tree, other, tensors, others_tensors, ""), None):
            return f"{name.partition('.')[0]}: {found}"
    return ""


def _read(path: Path) -> tuple[Any, Mapping[str, bytes]]:
    """What an observation file holds: its tree, and the bytes of its tensors."""
    content = path.read_bytes()
    end = HEADER + int.from_bytes(content[:HEADER], "little")
    header = json.loads(content[HEADER:end])
    tree = json.loads(header.pop("__metadata__")["observation"])
    spans = {name: (facts["dtype"], *facts["data_offsets"]) for name, facts in header.items()}
    return tree, {name: dtype.encode() + content[end + a : end + b] for name, (dtype, a, b) in spans.items()}


def _differ(a: Any, b: Any, mine: Mapping[str, bytes], others: Mapping[str, bytes], place: str) -> Iterator[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        if set(a) == set(b) and "data" in a and "local_shape" in a:
            rest = {key: value for key, value in a.items() if key != "data"}
            if (
                rest != {key: value for key, value in b.items() if key != "data"}
                or mine[a["data"]] != others[b["data"]]
            ):
                yield place
            return
        for key in [*a, *(key for key in b if key not in a)]:
            if key in MEASURED:
                continue
            if key not in a or key not in b:
                yield f"{place}.{key}".lstrip(".")
            else:
                yield from _differ(a[key], b[key], mine, others, f"{place}.{key}".lstrip("."))
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for number, (x, y) in enumerate(zip(a, b, strict=True)):
            step = f" of step {number + 1}" if place == "steps" else f"[{number}]"
            yield from _differ(x, y, mine, others, place + step)
    elif a != b:
        yield place
