"""Covering arrays: few cases in which all pairs of factor values, and all triples of those of the head, meet.

`AXES` says what is varied, per path; `write` finds the cases (a minute or two) and keeps them in ``suites/covering/``,
one id a line, and `cases` reads them. After a change of `AXES` or of the table of factors:

    python -m suites.covering

What is found is held against the table by `uncovered`: every pair (and triple) that any case of the axes has.

Covering arrays: Kuhn, Kacker & Lei, NIST SP 800-142; most failures need two or three factors to meet.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from suites.cases import FACTORS, RULES, Case, CaseError, Rule

PLACE = Path(__file__).parent / "covering"


@dataclass(frozen=True)
class Axes:
    """What a covering array varies.

    Args:
        path: all cases are of this path.
        values: factor -> its values; all other factors have their default.
        triples: factors of which all triples must meet, not only all pairs.
        apart: rules for cases that are left out: where one pair of values fails by itself, it hides all others of its
            case. Plans have those cases apart.
    """

    path: str
    values: Mapping[str, tuple[Any, ...]]
    triples: tuple[str, ...] = ()
    apart: tuple[Rule, ...] = ()

    @property
    def rules(self) -> tuple[Rule, ...]:
        """All that refuse a case."""
        return (*(rule for rule in RULES if not rule.paths or self.path in rule.paths), *self.apart)


# fmt: off
AXES: Mapping[str, Axes] = {
    "deepspeed": Axes("deepspeed", {
        "tie": ("tied", "untied"),
        "head": ("vocab", "row", "gathered", "unmatched"),
        "zero": (0, 1, 2, 3),
        "hidden": (32, 35),
        "vocab": (64, 67),
        "tp": (2, 4),
        "dp": (1, 2),
        "register": ("embedding_first", "head_first"),
        "embedding_spec": ("none", "before_head", "after_head"),
        "embedding_cut": ("as_head", "row", "column"),
        "padding_idx": (None, 0, 20, 40, 60),  # on each of four shards
        "embedding_scale": (1.0, 6.0),
        "head_bias": ("no", "yes"),
        "optimizer": ("sgd", "adam", "adamw"),
        "clip": (0.0, 0.5),
        "accumulate": (1, 2),
        "dtype": ("float32", "bfloat16"),
        "ignored": ("unequal", "none", "rank"),
        "frozen": ("none", "body", "embedding", "head"),
        "activation": ("contiguous", "transposed", "strided", "sequence_first"),
        "recompute": ("none", "blocks", "head"),
        "init": ("device", "meta", "zero"),
        "tie_when": ("construction", "after_load", "meta"),
        "optimizer_from": ("callable", "client", "config"),
        "resume": ("none", "reload"),
    }, triples=("tie", "head", "zero", "hidden", "vocab", "tp", "register", "embedding_spec", "embedding_cut"), apart=(
        Rule(lambda c: c.head == "unmatched" and c.embedding_spec != "none", "the tie breaks, the forward fails"),
        Rule(lambda c: c.dtype == "bfloat16" and c.zero == 0, "gradients are summed in bf16"),
        Rule(lambda c: c.init == "zero" and c.dp > 1 and c.accumulate > 1, "ranks gather in different orders"),
    )),
}
# fmt: on


def cases(name: str) -> tuple[Case, ...]:
    """The cases that `write` found; those that the table of factors has come to refuse are left out."""
    found = []
    for line in (PLACE / f"{name}.txt").read_text().splitlines():
        try:
            found.append(Case.parse(line))
        except CaseError:
            continue
    return tuple(found)


def write(name: str) -> int:
    """Find the cases anew and keep them; returns how many."""
    found = [case.id for case in search(AXES[name])]
    PLACE.mkdir(exist_ok=True)
    (PLACE / f"{name}.txt").write_text("".join(f"{case}\n" for case in found))
    return len(found)


def search(axes: Axes) -> list[Case]:
    """Cases in which everything meets that can meet; a greedy search, the same every time."""
    from covertable.main import Controller  # noqa: PLC0415 - only to write, not to run

    submodels = [{"fields": list(axes.triples), "strength": 3}] if axes.triples else []
    # Triples of some factors contain the pairs of these, so pairs are asked for of all others.
    controller = Controller(
        {name: list(values) for name, values in _possible(axes).items()},
        sub_models=submodels,
        constraints=list(_constraints(axes)),
    )
    found = [Case(axes.path, **row) for row in controller.make()]
    for missing in uncovered(axes, found):
        if case := _completed(axes, missing):
            found.append(case)
    return found


def uncovered(axes: Axes, found: Iterable[Case]) -> list[dict[str, Any]]:
    """Pairs and triples of values that some case of the axes has and none of `found`."""
    met: set[tuple[tuple[str, Any], ...]] = set()
    groups = _groups(axes)
    for case in found:
        met |= {tuple((name, getattr(case, name)) for name in group) for group in groups}
    missing = []
    possible = _possible(axes)
    for group in groups:
        for point in itertools.product(*(possible[name] for name in group)):
            wanted = dict(zip(group, point, strict=True))
            if tuple(wanted.items()) not in met and _completed(axes, wanted) is not None:
                missing.append(wanted)
    return missing


def _groups(axes: Axes) -> list[tuple[str, ...]]:
    pairs = [p for p in itertools.combinations(axes.values, 2) if not set(p) <= set(axes.triples)]
    return [*itertools.combinations(axes.triples, 3), *pairs]


def _possible(axes: Axes) -> dict[str, tuple[Any, ...]]:
    """The axes' values without those that the path does not have at all."""
    factors = {factor.name: factor for factor in FACTORS}
    return {
        name: tuple(v for v in values if v not in factors[name].unsupported.get(axes.path, {}))
        for name, values in axes.values.items()
    }


def reads(rule: Rule) -> frozenset[str]:
    """Factors that a rule looks at, read off its code."""
    names: set[str] = set()
    waiting = [rule.refuses.__code__]
    while waiting:
        for name in waiting.pop().co_names:
            member = getattr(Case, name, None)
            if isinstance(member, property) and member.fget:
                waiting.append(member.fget.__code__)
            names.add(name)
    return frozenset(names & {factor.name for factor in FACTORS})


def _constraints(axes: Axes) -> Iterator[dict[str, Any]]:
    for rule in axes.rules:
        varied = [name for name in axes.values if name in reads(rule)]
        if varied:
            yield {"operator": "fn", "requires": varied, "evaluate": _Allowed(axes, rule)}


@dataclass(frozen=True)
class _Allowed:
    """Whether a rule allows a row; factors that it does not read have their default."""

    axes: Axes
    rule: Rule

    def __call__(self, row: Mapping[str, Any]) -> bool:
        return not self.rule.refuses(_Point(self.axes.path, row))  # type: ignore[arg-type]


class _Point:
    """What a rule sees of a case, without a case's checks."""

    def __init__(self, path: str, row: Mapping[str, Any]):
        self.path = path
        for factor in FACTORS:
            setattr(self, factor.name, row.get(factor.name, factor.default))

    tied = Case.tied
    world_size = Case.world_size
    tokens_per_step = Case.tokens_per_step


def _completed(axes: Axes, wanted: Mapping[str, Any]) -> Case | None:
    """A case with these values: defaults else, or, where rules refuse them, what other factors must have instead."""
    possible = _possible(axes)
    rules = [(rule, [name for name in axes.values if name in reads(rule)]) for rule in axes.rules]

    def solve(row: dict[str, Any], depth: int) -> dict[str, Any] | None:
        broken = next((names for rule, names in rules if rule.refuses(_Point(axes.path, row))), None)  # type: ignore[arg-type]
        if broken is None:
            return row
        if depth == 0:
            return None
        for name in broken:
            if name in row:
                continue
            for value in possible[name]:
                if (solved := solve({**row, name: value}, depth - 1)) is not None:
                    return solved
        return None

    row = solve(dict(wanted), 4)
    return None if row is None else Case(axes.path, **row)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write all arrays, or those that are named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(AXES)}; all by default")
    names = parser.parse_args(arguments).names or list(AXES)
    for name in names:
        if name not in AXES:
            print(f"{name}: no such array; one of {', '.join(AXES)}", file=sys.stderr)
            return 2
        print(f"{name}: {write(name)} cases")
    return 0


if __name__ == "__main__":
    sys.exit(main())
