"""Whether embedding and head are one weight, over the life of a model on one rank. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from suites.cases import Case

# Attribute of an exception: parts of the user's model that were no longer the user's when it was raised, tuple[str].
CHANGED = "tiebench_changed"


@dataclass(frozen=True)
class Lifecycle:
    """Aliases after one event of a model's life ("constructed", "loaded", "sharded", "step 1", …).

    Args:
        same_object: the embedding's and the head's weight are one `Parameter` object.
        same_storage: they start at the same address of one storage, with the same shape.
    """

    event: str
    same_object: bool
    same_storage: bool


def broken_tie(case: Case, rank: int, lifecycle: Sequence[Lifecycle]) -> str | None:
    """What is wrong with the tie in one rank's events, which end early where the rank crashed; None if nothing is."""
    seen = [event.event for event in lifecycle]
    if not case.tied:
        shared = [event.event for event in lifecycle if event.same_object or event.same_storage]
        return f"untied model shares one weight after {shared[0]!r} on rank {rank}" if shared else None
    if "tied" not in seen:
        return f"the tie was never made on rank {rank}" if f"step {case.steps}" in seen else None
    last = len(seen) - 1 - seen[::-1].index("tied")
    for event in lifecycle[last:]:
        if not (event.same_object or event.same_storage):
            return f"tie broken: after {event.event!r} embedding and head are separate tensors on rank {rank}"
    return None
