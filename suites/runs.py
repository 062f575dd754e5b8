"""Further runs of a case, which a verdict may ask for. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from suites.cases import Case

if TYPE_CHECKING:
    from suites.observe import RankObservation


class RunFailed(Exception):
    """A case that was run again did not end; the message says how."""


class Again(Protocol):
    """Runs a case the way the judged one was run: same ranks, target, patch and fault."""

    def __call__(self, case: Case, trace: int | None = None) -> Sequence[RankObservation]:
        """Observations of the case; with `trace`, of that step (from 0) every module's output and its gradient.

        Raises:
            RunFailed: it did not end well.
        """
        ...
