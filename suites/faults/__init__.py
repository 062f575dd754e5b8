"""Faults: bugs put in on purpose, to prove that the oracles can see them (rule 4 of the design).

Each fault replaces a small piece of a training path or of the harness, names the class of public bugs that it stands
for (suites/README.md has the list), a case that shows it, a case in which nobody can see it, and the oracles that must
flag the first. ``tiebench run --case ID --fault NAME`` runs any case with it.

To add one: a function in the module of its area with that module's ``@TABLE.fault`` decorator (see `table`). A module
that patches a framework imports it inside the function, so that this package can be read without the framework.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from unittest import mock

from suites.faults import (
    deepspeed,
    deepspeed_checkpoint,
    graded,
    handwritten_alias,
    handwritten_checkpoint,
    handwritten_contributions,
    handwritten_data_parallel,
    handwritten_loss,
    handwritten_optimizer,
    handwritten_precision,
    handwritten_reductions,
    handwritten_rows,
    harmless,
    harness,
)
from suites.faults.table import Fault, Replacement, Table, merged

__all__ = ["FAULTS", "HARMLESS", "Fault", "Replacement", "Table", "apply", "fault_of"]

FAULTS: Mapping[str, Fault] = merged(
    handwritten_alias.TABLE,
    handwritten_contributions.TABLE,
    handwritten_reductions.TABLE,
    handwritten_data_parallel.TABLE,
    handwritten_rows.TABLE,
    handwritten_loss.TABLE,
    handwritten_optimizer.TABLE,
    handwritten_checkpoint.TABLE,
    handwritten_precision.TABLE,
    harness.TABLE,
    deepspeed.TABLE,
    deepspeed_checkpoint.TABLE,
)
HARMLESS: Mapping[str, Fault] = merged(harmless.TABLE)


@contextlib.contextmanager
def apply(name: str) -> Iterator[None]:
    """Put a fault, graded or not, or a harmless change in, in this process, until the block ends.

    Raises:
        KeyError: no such fault.
    """
    with contextlib.ExitStack() as stack:
        for owner, attribute, replacement in fault_of(name).replacements():
            stack.enter_context(mock.patch.object(owner, attribute, replacement))
        yield


def fault_of(name: str) -> Fault:
    """The fault, harmless change or fault of graded size of a name.

    Raises:
        KeyError: no such fault.
    """
    return {**graded.GRADED, **HARMLESS, **FAULTS}[name]
