"""The same cases over many builds: which families of cases change, where, and from what to what.

A family is all cases with the same outcomes over all builds; it is described by the fewest factor values that tell it
from the others. Nothing is known here of any framework's history.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ci.records import GREEN, Record, Run
from reports.summary import outcome
from reports.text import MISSING, clean, count, md, md_code, md_table, shorten

RIGHT = "right"
# From best to worst: an answer that is wrong without a word is worse than none.
RANKS = (RIGHT, "refused", "inconclusive", "crash", "hang", "bug: precision", "bug")
MOST_FACTORS = 3  # in one description
MOST_PARTS = 3  # descriptions that together make up a family
MOST_REASON = 110  # characters
QUALIFIED = re.compile(r"\b(?:\w+\.)+(\w+Error)\b")


@dataclass(frozen=True)
class Rung:
    """One build and what its cases came to.

    Args:
        label: of the build, or what was asked for where there is none.
        problem: why there are no results; empty where there are.
        outcomes: case -> "right", or what else came of it; reasons: why, in a few words.
        factors: case -> factor -> value, path included.
    """

    label: str
    problem: str
    outcomes: Mapping[str, str]
    reasons: Mapping[str, str]
    factors: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Family:
    """Cases with the same outcomes over all builds that have results.

    Args:
        name: the factor values that tell it from the others.
        outcomes, reasons: by build, in their order; None where a build has no results.
    """

    name: str
    cases: tuple[str, ...]
    outcomes: tuple[str | None, ...]
    reasons: tuple[str, ...]

    @property
    def changes(self) -> bool:
        """Whether any two builds differ."""
        return len({word for word in self.outcomes if word is not None}) > 1


@dataclass(frozen=True)
class Change:
    """What a family's outcome became from one build to the next that has results."""

    family: Family
    before: str
    after: str
    builds: tuple[str, str]

    @property
    def what(self) -> str:
        """In words."""
        if self.after == RIGHT:
            return "became right"
        if self.before == RIGHT:
            return "got worse" if self.after != "refused" else "is refused now"
        if self.after == "refused":
            return "is refused now, no longer wrong"
        worse = _rank(self.after) > _rank(self.before)
        return "got worse" if worse else "is wrong in another way"


def _rank(word: str) -> int:
    return RANKS.index(word) if word in RANKS else len(RANKS)


def rung(label: str, run: Run | None, problem: str = "") -> Rung:
    """A build's results as a ladder has them."""
    found = [r for r in run.records if r.status not in ("not_run", "skipped")] if run else []
    return Rung(
        label,
        problem or ("" if found else "no results"),
        {r.case: word_of(r) for r in found},
        {r.case: _reason(r) for r in found},
        {r.case: {"path": r.path, **r.factors} for r in found},
    )


def word_of(record: Record) -> str:
    """Outcome of a record; exact and rounding are both right. What tables expect is no matter here."""
    if record.verdict in GREEN and outcome(record) in GREEN:
        return RIGHT
    if record.status in ("finished", "timeout") and record.verdict:
        return record.verdict
    return outcome(record)


def _reason(record: Record) -> str:
    if record.verdict in GREEN:
        return ""
    if record.oracle and record.verdict != "refused":
        return shorten(f"by {record.oracle}", MOST_REASON)
    return shorten(QUALIFIED.sub(r"\1", record.evidence.partition(" (")[0].partition(" [")[0]), MOST_REASON)


def families(rungs: Sequence[Rung]) -> list[Family]:
    """All families, those that change first, the largest first."""
    cases = list(dict.fromkeys(case for one in rungs for case in one.outcomes))
    factors = {case: one.factors[case] for one in rungs for case in one.factors}
    groups: dict[tuple[str | None, ...], list[str]] = {}
    for case in cases:
        row = tuple(None if one.problem else one.outcomes.get(case, "no result") for one in rungs)
        groups.setdefault(row, []).append(case)
    found = []
    for row, members in groups.items():
        others = [factors[case] for case in cases if case not in set(members)]
        name = described([factors[case] for case in members], others)
        found.append(Family(name, tuple(members), row, tuple(_common(rungs, members))))
    return sorted(found, key=lambda family: (not family.changes, -len(family.cases), family.name))


def _common(rungs: Sequence[Rung], cases: Sequence[str]) -> Iterator[str]:
    """The commonest reason of each build."""
    for one in rungs:
        told = Counter(one.reasons[case] for case in cases if one.reasons.get(case))
        yield told.most_common(1)[0][0] if told else ""


def described(members: Sequence[Mapping[str, str]], others: Sequence[Mapping[str, str]]) -> str:
    """The fewest factor values that all of `members` and none of `others` have; with an exception, or as several
    alternatives, where they alone will not do."""
    if not others:
        return "all cases"
    whole = [values for values in _shared(members) if not any(_has(point, values) for point in others)]
    if whole:
        return _spelled(min(whole, key=len))
    for values in _shared(members):
        strangers = [point for point in others if _has(point, values)]
        for apart in _shared(strangers):
            if not any(_has(point, apart) for point in members):
                rest = {name: value for name, value in apart.items() if name not in values}
                return f"{_spelled(values)}, but not {_spelled(rest)}"
    left, parts = list(members), list[str]()
    while left and len(parts) < MOST_PARTS and (best := _best(left, others)):
        parts.append(_spelled(best))
        left = [point for point in left if not _has(point, best)]
    if left:
        parts.append(f"{len(left)} more" if parts else "no few factors tell them apart")
    return "; ".join(parts)


def _spelled(values: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def _shared(points: Sequence[Mapping[str, str]]) -> Iterator[dict[str, str]]:
    """Conjunctions of a few factor values that all points have, the shortest first."""
    first = points[0]
    common = [name for name, value in first.items() if all(point.get(name) == value for point in points)]
    for size in range(1, MOST_FACTORS + 1):
        for names in itertools.combinations(common, size):
            yield {name: first[name] for name in names}


def _best(members: Sequence[Mapping[str, str]], others: Sequence[Mapping[str, str]]) -> dict[str, str] | None:
    """Of the conjunctions that no other case has, the one that most members have; of those the shortest."""
    varied = [name for name in members[0] if len({point.get(name) for point in (*members, *others)}) > 1]
    counted: Counter[tuple[tuple[str, str], ...]] = Counter()
    for point, size in itertools.product(members, range(1, MOST_FACTORS + 1)):
        for names in itertools.combinations(varied, size):
            if all(name in point for name in names):
                counted[tuple((name, point[name]) for name in names)] += 1
    alone = [found for found in counted if not any(_has(point, dict(found)) for point in others)]
    best = min(alone, key=lambda found: (-counted[found], len(found), found), default=None)
    return None if best is None else dict(best)


def _has(point: Mapping[str, str], values: Mapping[str, str]) -> bool:
    return all(point.get(name) == value for name, value in values.items())


def changes(rungs: Sequence[Rung], found: Iterable[Family]) -> list[Change]:
    """Every change from one build with results to the next, in the order of the builds."""
    told = [place for place, one in enumerate(rungs) if not one.problem]
    return [
        Change(family, str(family.outcomes[a]), str(family.outcomes[b]), (rungs[a].label, rungs[b].label))
        for a, b in itertools.pairwise(told)
        for family in found
        if family.outcomes[a] != family.outcomes[b]
    ]


def _line(change: Change) -> str:
    a, b = change.builds
    many = count(len(change.family.cases), "case")
    return f"{a} → {b}: {change.family.name}: {change.before} → {change.after} ({many}): {change.what}"


def _steady(found: Iterable[Family]) -> str:
    many = Counter({next(w for w in f.outcomes if w): 0 for f in found if not f.changes and any(f.outcomes)})
    for family in found:
        if not family.changes and any(family.outcomes):
            many[next(word for word in family.outcomes if word)] += len(family.cases)
    told = ", ".join(f"{number} {word}" for word, number in many.items() if number)
    return f"The same everywhere: {told}" if told else "No case is the same everywhere"


def print_ladder(rungs: Sequence[Rung], console: Console) -> None:
    """The table of what changes, the changes in words, and what went wrong with builds."""
    found = families(rungs)
    table = Table("family", "cases", *(escape(clean(one.label)) for one in rungs), box=None, pad_edge=False)
    for family in found:
        if family.changes:
            table.add_row(Text(clean(family.name)), str(len(family.cases)), *(Text(c) for c in _cells(family)))
    if table.row_count:
        console.print(table)
    for change in changes(rungs, found):
        console.print(Text(clean(_line(change))), soft_wrap=True)
    console.print(Text(_steady(found)))
    for one in rungs:
        if one.problem:
            console.print(Text(f"{clean(one.label)}: {clean(one.problem)}", style="red"), soft_wrap=True)


def _cells(family: Family) -> list[str]:
    return [
        MISSING if word is None else clean(word) + (f"\n{clean(reason)}" if reason and word != RIGHT else "")
        for word, reason in zip(family.outcomes, family.reasons, strict=True)
    ]


def markdown(rungs: Sequence[Rung]) -> str:
    """The same as Markdown, escaped."""
    found = families(rungs)
    rows = [
        [md(family.name), str(len(family.cases)), *(md(cell.replace("\n", ": ")) for cell in _cells(family))]
        for family in found
        if family.changes
    ]
    head = ["family", "cases", *(md(one.label) for one in rungs)]
    parts = [
        md_table(head, rows, frozenset({1})) if rows else "",
        "\n".join(f"- {md(_line(change))}" for change in changes(rungs, found)),
        md(_steady(found)) + ".",
        "\n".join(f"- {md_code(one.label)}: {md(one.problem)}" for one in rungs if one.problem),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def as_json(rungs: Sequence[Rung]) -> dict[str, object]:
    """The same for programs."""
    found = families(rungs)
    return {
        "builds": [{"label": one.label, "problem": one.problem, "cases": len(one.outcomes)} for one in rungs],
        "families": [
            {"name": f.name, "cases": list(f.cases), "outcomes": list(f.outcomes), "reasons": list(f.reasons)}
            for f in found
        ],
        "changes": [
            {
                "family": change.family.name,
                "cases": len(change.family.cases),
                "from": change.builds[0],
                "to": change.builds[1],
                "before": change.before,
                "after": change.after,
                "what": change.what,
            }
            for change in changes(rungs, found)
        ],
    }
