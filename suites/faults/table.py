"""What a fault is, and the table that each module of this package fills with its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from suites.cases import Case

Replacement = tuple[Any, str, Any]  # owner, attribute, what stands there instead
Replacements = Callable[[], list[Replacement]]


@dataclass(frozen=True)
class Fault:
    """One change to a program on purpose.

    Args:
        path: the training path that it breaks; it changes nothing in another one.
        bug_class: number of the class of public bugs (suites/README.md has the list); 0 for a harmless change.
        meaning: what goes wrong, one line for people.
        needs: the case factors without which it is not visible, one line for people.
        case: id of a case that shows it.
        invisible: id of a case in which the run is bit for bit that of the unmodified program; empty where it depends
        on the machine.
        caught_by: oracles that must flag `case`; ``hang`` where the watchdog must end it.
        replacements: what to put in place of what; made anew at each use, in the process that trains.
    """

    name: str
    path: str
    bug_class: int
    meaning: str
    needs: str
    case: str
    invisible: str
    caught_by: tuple[str, ...]
    replacements: Replacements


class Table:
    """The faults of one module, by name. A fault is a function that gives its replacements; its docstring says in one
    line what goes wrong."""

    def __init__(self, path: str):
        self.path = path
        self.faults: dict[str, Fault] = {}

    def fault(
        self, bug_class: int, *, needs: str, case: str, invisible: str, caught_by: Iterable[str]
    ) -> Callable[[Replacements], Replacements]:
        """Decorator that enters a function; see `Fault` for the arguments.

        Raises:
            CaseError: `case` or `invisible` is no case.
            ValueError: the name stands in this table already.
        """

        def enter(function: Replacements) -> Replacements:
            name = function.__name__
            if name in self.faults:
                raise ValueError(f"two faults are called {name}")
            self.faults[name] = Fault(
                name=name,
                path=self.path,
                bug_class=bug_class,
                meaning=meaning_of(function),
                needs=needs,
                case=Case.parse(case).id,
                invisible=Case.parse(invisible).id if invisible else "",
                caught_by=tuple(caught_by),
                replacements=function,
            )
            return function

        return enter


def meaning_of(function: Replacements) -> str:
    """A function's docstring as one line without its full stop; begins with a small letter."""
    text = " ".join((function.__doc__ or "").split()).rstrip(".")
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]


def merged(*tables: Table) -> Mapping[str, Fault]:
    """All faults of several tables.

    Raises:
        ValueError: two faults have one name.
    """
    found: dict[str, Fault] = {}
    for table in tables:
        if twice := found.keys() & table.faults.keys():
            raise ValueError(f"two faults are called {', '.join(sorted(twice))}")
        found |= table.faults
    return found
