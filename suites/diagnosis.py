"""Diagnosis: where a deviation comes from, and which class of bug it looks like, in one sentence.

Symptoms are measured (`suites.symptoms`), the rows of one table speak for classes (`suites.rules`). Nothing raises.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from suites.bug_classes import NAMES
from suites.cases import Case
from suites.contributions import Fit, Places, Portrait, alike
from suites.evidence import Evidence
from suites.oracles import Finding
from suites.rules import Guess, guesses
from suites.symptoms import Forward, Symptoms, kind_of, symptoms
from suites.trace import Boundary
from suites.updates import Moved


@dataclass(frozen=True)
class Diagnosis:
    """Where a deviation comes from, and what it looks like.

    Args:
        sentence: for people.
        guesses: ranked; empty where nothing was flagged or nothing can be said.
        boundary: first module that leaves the noise, where a trace was made.
        tensor: the tensor that the numbers below are of; empty without one.
        worst_rows, worst_columns: up to ten of those that carry the error, the worst first.
        share_of_rows: how many rows of the tensor carry it.
        lie: what these rows have in common, for people.
    """

    sentence: str
    guesses: tuple[Guess, ...] = ()
    boundary: Boundary | None = None
    tensor: str = ""
    worst_rows: tuple[int, ...] = ()
    worst_columns: tuple[int, ...] = ()
    share_of_rows: float = 0.0
    lie: str = ""


def diagnose(evidence: Evidence | None, findings: Sequence[Finding], trace: Boundary | None = None) -> Diagnosis:
    """What the findings of one case come from; `trace` is the first module out of the noise, where one was traced.

    Never raises: what goes wrong here is said in the sentence.

    Args:
        evidence: None where the observations could not be put together.
    """
    flagged = [f for f in findings if f.flagged]
    if not flagged:
        return Diagnosis("nothing is flagged")
    if evidence is None:
        guess = Guess(30, NAMES[30], 10.0, "the observations do not fit together")
        return Diagnosis(f"{flagged[0].evidence}; looks like class 30 ({guess.name}): {guess.why}", (guess,))
    try:
        found = symptoms(evidence, findings, trace)
        ranked = guesses(found)
        top = found.top
        return Diagnosis(
            sentence=_sentence(found, ranked, trace),
            guesses=ranked,
            boundary=trace,
            tensor=top.name if top else (found.updates[0].name if found.updates else ""),
            worst_rows=_listed(_rows_of(found)),
            worst_columns=_listed(top.columns) if top else (),
            share_of_rows=_rows_of(found).share if _rows_of(found) else 0.0,  # type: ignore[union-attr]
            lie=", ".join(_rows_of(found).lie) if _rows_of(found) else "",  # type: ignore[union-attr]
        )
    except Exception as error:  # noqa: BLE001 - a diagnosis that fails must not take the verdict with it
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Diagnosis(f"no diagnosis: {type(error).__name__}: {error} ({where.name}, line {where.lineno})")


def _rows_of(found: Symptoms) -> Places | None:
    return found.rows or (found.updates[0].rows if found.updates else None)


def _listed(found: Places | None) -> tuple[int, ...]:
    if found is None:
        return ()
    return tuple(dict.fromkeys([found.worst, *found.wrong]))[:10]


def _sentence(found: Symptoms, ranked: Sequence[Guess], trace: Boundary | None) -> str:
    parts = [*_facts(found)] or [next(iter(found.evidence.values()))]
    if trace:
        parts.append(trace.sentence)
    if ranked:
        best = ranked[0]
        parts.append(f"looks like class {best.bug_class} ({best.name}): {best.why}")
        if len(ranked) > 1:
            parts.append(f"else class {ranked[1].bug_class} ({ranked[1].name})")
    else:
        parts.append("looks like no known class")
    return "; ".join(parts)


def _facts(s: Symptoms) -> Iterator[str]:
    """What was measured, plainly, the most telling first."""
    if s.repeated:
        yield s.repeated
    if s.tie_lost:
        yield f"embedding and head are separate after {s.tie_lost!r}"
    if s.start:
        yield s.start
    if s.another:
        yield f"all numbers are those of {s.another}"
    if s.forward and s.forward.whose:
        yield s.forward.whose
    elif s.forward:
        yield _forward_fact(s.forward)
    yield from s.losses[:1]
    if s.norms and not s.gradients:
        yield f"the norm {'that weights are clipped by ' if s.updates else ''}{s.norms[0]}"
    if s.drift == "weights":
        more = f" (and {len(s.drift_of) - 1} more)" if len(s.drift_of) > 1 else ""
        yield f"copies of {s.drift_of[0]}{more} differ between ranks after step {s.step + 1}"
    for moved in s.updates[:1]:
        yield _update_fact(s.case, moved)
    if s.top:
        yield _gradient_fact(s, s.top)
    if not s.gradients and not s.updates and "gradient" in s.flagged:
        yield s.evidence["gradient"]


def _forward_fact(found: Forward) -> str:
    if found.factor is not None:
        return f"the logits are {found.factor:.3g} times what they should be"
    if found.constant:
        return "the logits are off by the same amount for every token"
    if found.moved:
        return f"{len(found.columns.wrong)} columns of the logits hold what belongs into others"
    if not found.everywhere:
        return f"the logits' error begins at the tokens {', '.join(map(str, sorted(found.first_tokens)[:8]))}"
    return f"the logits are off in {len(found.columns.wrong)} of {found.columns.extent} columns"


def _update_fact(case: Case, moved: Moved) -> str:
    name = "the tied weight" if kind_of(moved.name, case) == "tied" else moved.name
    few = moved.wrong if 0 < len(moved.wrong) < len(moved.ratio) else ()
    who = f" on tensor-parallel rank {', '.join(map(str, few))}" if few else ""
    rows = f" in {len(moved.rows.wrong)} of {moved.rows.extent} rows" if moved.rows.share < 1 and not few else ""
    lie = f" ({moved.rows.lie[0]})" if rows and moved.rows.lie else ""
    return f"{name} {moved.cause or 'moved otherwise than the replay says'}{who}{rows}{lie}"


def _gradient_fact(s: Symptoms, top: Portrait) -> str:
    name = "the tied weight" if s.kind(top) == "tied" else top.name
    wrong = top.wrong[0]
    copies = top.dim is None and len(top.slices) > 1  # each rank's differs
    part = name if len(top.wrong) == len(top.slices) and not copies else f"{wrong.holder}'s part of {name}"
    if not wrong.finite:
        return f"the gradient of {part} is no number"
    if wrong.zero:
        return f"{part} got no gradient"
    text = _fit_fact(wrong.fit, part) if wrong.fit.explained else ""
    if text:
        return text
    rows = f" in {len(top.rows.wrong)} of {top.rows.extent} rows" if top.rows.share < 1 else ""
    lie = f" ({', '.join(top.rows.lie)})" if rows and top.rows.lie else ""
    return f"the gradient of {part} is off by {wrong.relative:.2g} of itself{rows}{lie}"


def _fit_fact(found: Fit, part: str) -> str:
    listed = " and ".join(f"{_much(value)} of {term.part}" for term, value in found.coefficients.items())
    if found.family == "projection":
        values = list(found.coefficients.values())
        if alike(values, 1.0, grain=found.grain):
            return ""
        return f"the projection's part of {part} is {sum(values) / len(values):.3g} times what it should be"
    if found.family == "through head":
        return f"the gradient of {part} holds only what came through the head, {listed}"
    if found.family != "terms":
        return f"the gradient of {part} holds {listed}"
    if found.factor is not None:
        return f"the gradient of {part} is {found.factor:.3g} times what it should be"
    if found.varies == {"part"}:
        lost = [axis for axis, c in found.along("part").items() if alike(c, 0.0)]
        if lost:
            return f"{part} got no {lost[0]} gradient"
    off = [(axis, values) for axis, values in _grouped(found) if not alike(values, 1.0, grain=found.grain)]
    return f"the gradient of {part} holds " + " and ".join(f"{_much(sum(v) / len(v))} of {axis}" for axis, v in off)


def _much(value: float) -> str:
    return "nothing" if alike([value], 0.0) else f"{value:.3g}"


def _grouped(found: Fit) -> Iterator[tuple[str, list[float]]]:
    """Coefficients by the axes along which they vary, each with a name for people."""
    groups: dict[str, list[float]] = {}
    for term, value in found.coefficients.items():
        names = [f"the {term.part}'s part"] if "part" in found.varies else []
        names += [f"data-parallel rank {term.dp_rank}"] if "dp_rank" in found.varies else []
        names += [f"micro-batch {term.micro}"] if "micro" in found.varies else []
        groups.setdefault(" on ".join(names), []).append(value)
    yield from groups.items()
