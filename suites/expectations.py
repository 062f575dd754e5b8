"""What a case is expected to come to where that is not green: refusals that are meant, and issues that are known.

The entries stand in two tables, `suites.refusals` and `suites.known_issues`. An entry names cases by their factors and
builds by a range of versions. A result that an entry foresees is as expected, and a report names the entry; any other
result of such a case is not, a green one too: an entry that no longer holds must get a bound.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from suites.cases import FACTORS, Case

Kind = Literal["refusal", "known issue"]
GREEN = ("exact", "rounding")


@dataclass(frozen=True)
class Entry:
    """One row of a table.

    Args:
        name: short, for reports; unique over both tables.
        path, versions: whose builds, as the specifier of a pip requirement (``>=0.18.9,<0.19.8``).
        cases: factor -> its value, or a tuple of values; factors that are not named may have any.
        when: what more must hold of a case, where single factors cannot say it.
        verdicts: any of them is expected.
        oracles: all of them must have flagged; with `only` no other.
        message: regular expression that must be found in the record's evidence.
        why: one sentence for reports: what is refused and why, or what is wrong.
        link: upstream's issue or pull request; "found by this suite" where there is none.
        since: day (ISO 8601) on which the entry was made.
        minimal: id of the smallest case that shows it.
        observed, right: of a known issue: what comes out, what should.
        reasoning: of a known issue: which lines of the framework cause it, and how.
        always: False where chance decides whether it shows: then a green result is no contradiction.
    """

    name: str
    path: str
    versions: str
    cases: Mapping[str, Any]
    verdicts: tuple[str, ...]
    why: str
    link: str
    since: str
    minimal: str
    when: Callable[[Case], bool] = field(default=lambda case: True)
    oracles: tuple[str, ...] = ()
    message: str = ""
    observed: str = ""
    right: str = ""
    reasoning: str = ""
    always: bool = True
    only: bool = False
    kind: Kind = "known issue"

    def concerns(self, case: Case) -> bool:
        """Whether the entry is about a case."""
        if case.path != self.path:
            return False
        named = all(getattr(case, name) in _values(value) for name, value in self.cases.items())
        return named and self.when(case)

    def holds_for(self, version: str) -> bool:
        """Whether the entry is about a build. Builds whose version is not known have no expectations."""
        try:
            return SpecifierSet(self.versions).contains(Version(version), prereleases=True)
        except InvalidVersion:
            return False

    def foresees(self, verdict: str | None, oracles: Iterable[str], evidence: str) -> bool:
        """Whether this is the result that the entry speaks of; `oracles` are those that flagged."""
        flagged = set(oracles)
        if verdict not in self.verdicts or (self.kind == "refusal" and flagged):
            return False
        if self.only and flagged != set(self.oracles):
            return False
        return set(self.oracles) <= flagged and re.search(self.message, evidence) is not None


def _values(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def entries() -> tuple[Entry, ...]:
    """Both tables; of the entries that concern a case the first that foresees its result counts."""
    from suites.known_issues import KNOWN_ISSUES  # noqa: PLC0415 - the tables import this module
    from suites.refusals import REFUSALS  # noqa: PLC0415

    return (*REFUSALS, *KNOWN_ISSUES)


def concerning(case: Case, version: str) -> tuple[Entry, ...]:
    """The entries about a case of a build, in the order of the tables."""
    return tuple(entry for entry in entries() if entry.concerns(case) and entry.holds_for(version))


def expectation(case: Case, version: str) -> Entry | None:
    """The entry that says what a case comes to; None where it should be green."""
    return next(iter(concerning(case, version)), None)


def problems(cases: Iterable[Case]) -> list[str]:
    """What is wrong with the tables, one line each: entries that no case of `cases` is about, and entries that
    contradict themselves."""
    known = {factor.name for factor in FACTORS}
    planned = set(cases)
    found = []
    names = [entry.name for entry in entries()]
    for entry in entries():
        told = f"{entry.kind} {entry.name}"
        if names.count(entry.name) > 1:
            found.append(f"{told}: the name stands twice")
        if strangers := set(entry.cases) - known:
            found.append(f"{told}: no such factor: {', '.join(sorted(strangers))}")
        elif not entry.concerns(Case.parse(entry.minimal)):
            found.append(f"{told}: is not about its own minimal case {entry.minimal}")
        elif not any(map(entry.concerns, planned)):
            found.append(f"{told}: matches no case of any plan")
        if set(entry.verdicts) & set(GREEN):
            found.append(f"{told}: expects a green verdict")
        if entry.kind == "known issue" and not (entry.observed and entry.right and entry.reasoning):
            found.append(f"{told}: says not what was observed, what is right and why")
    return found
