"""What a combination of factor values comes to: it runs, the framework refuses it, it is known to be wrong, or it makes
no sense."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from suites.cases import FACTORS, Case, CaseError
from suites.covering import AXES
from suites.expectations import expectation

State = Literal["runs", "refused", "known issue", "no sense"]


@dataclass(frozen=True)
class Cell:
    """One combination.

    Args:
        values: factor -> spelling of its value, of the factors that were varied.
        case: id of the case; empty where there is none.
        why: of all but what runs: what the framework says, what is wrong, or why it makes no sense.
        entry: name in the tables of refusals and known issues.
    """

    values: Mapping[str, str]
    state: State
    case: str = ""
    why: str = ""
    entry: str = ""


def cells(path: str, names: Sequence[str], version: str, base: Mapping[str, Any] | None = None) -> Iterator[Cell]:
    """Every combination of the values of some factors, in their order.

    Args:
        version: of the path's framework, for what is refused and known.
        base: values of other factors that are not the defaults.

    Raises:
        CaseError: there is no such factor, or it is given twice.
    """
    factors = {factor.name: factor for factor in FACTORS}
    for name in names:
        if name not in factors:
            raise CaseError(f"unknown factor {name!r}; one of {', '.join(factors)}")
        if list(names).count(name) > 1 or name in (base or {}):
            raise CaseError(f"factor {name} given twice")
    for point in itertools.product(*(_values(path, name) for name in names)):
        values = dict(zip(names, point, strict=True))
        spelled = {name: factors[name].spell(value) for name, value in values.items()}
        try:
            case = Case(path, **{**(base or {}), **values})
        except CaseError as error:
            yield Cell(spelled, "no sense", why=str(error).partition(": ")[2] or str(error))
            continue
        entry = expectation(case, version)
        if entry is None:
            yield Cell(spelled, "runs", case.id)
        else:
            state: State = "refused" if entry.kind == "refusal" else "known issue"
            yield Cell(spelled, state, case.id, entry.why, entry.name)


def _values(path: str, name: str) -> Sequence[Any]:
    """Values of a factor: all of a closed list, those of the path's covering array of an open range."""
    factor = next(factor for factor in FACTORS if factor.name == name)
    varied = AXES[path].values.get(name, ()) if path in AXES else ()
    return factor.values or tuple(dict.fromkeys((factor.default, *varied)))
