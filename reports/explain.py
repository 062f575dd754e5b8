"""Rounding or bug: what a record's verdict rests on, as the three renderings tell it. They decide nothing.

All text is raw: each rendering escapes it. A record of an older schema, or of a case that did not end, lacks most of
it: then there is less to tell, and nothing breaks. A number that is None was not finite.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ci.records import GREEN, Dormant, Expectation, Guess, Measured, Record, contradiction, expected
from reports.text import MISSING, count, number, seconds, shorten, times

SWITCHES, PRECISION_ORACLE = "switches", "precision"  # oracles of the environment, of precision
SLOPE = 0.74  # as suites.limits.SLOPE, which a test compares: above it an error shrinks as rounding does
STILL = 0.25  # below it an error is as good as the same at both precisions
MOST_WORST = 5  # tensors of a failing case
MOST_GUESSES = 2
MOST_UNSEEN = 30  # tensors of one case
MOST_WORDS = 4000  # characters of a text that tell whether two are alike
ARITHMETIC = re.compile(r"\b(?:float(?:16|32|64)|bfloat16|tf32(?:_truncated)?|fp(?:16|32|64))\b")
CASE = re.compile(r"[a-z][\w-]*:\w+=\S*")
NAME = re.compile(r"\b[A-Za-z]\w*[._]\w[\w.]*")
SCOPE = re.compile(r"\b(?:tensor|row|element)(?= [\d.])")
CONTRIBUTION = re.compile(r"(-?\d+\.\d+) of the (lookup|projection)")
NUMBER = re.compile(r"[-+]?\d+(?:[.,]\d+)*(?:e[-+]?\d+)?", re.IGNORECASE)


@dataclass(frozen=True)
class Step:
    """One line of the escalation.

    Args:
        precision: arithmetic of this run; case: its id, empty for the case's own run.
        verdict: of that run alone.
        error: relative error of the tensor that was worst in the case's own run; slope: how it scaled from there, 1 for
            rounding and 0 for a bug. None: not measured, or not finite.
        reading: what that means.
    """

    precision: str
    verdict: str
    error: float | None
    slope: float | None
    reading: str
    case: str = ""


@dataclass(frozen=True)
class Group:
    """Cases that fail with the same evidence, the first of them told in full."""

    records: tuple[Record, ...]

    @property
    def first(self) -> Record:
        """The case that stands for all."""
        return self.records[0]

    @property
    def others(self) -> tuple[Record, ...]:
        """The rest."""
        return self.records[1:]


def environment_differs(record: Record) -> str:
    """What of the environment is not as the case asked, where the numbers are green; else empty.

    Such a record is not as expected: what was asked for is not what ran.
    """
    if record.status != "finished" or record.verdict not in GREEN:
        return ""
    flagged = [f for f in record.findings if f.flagged and f.oracle == SWITCHES]
    return "; ".join(f.evidence or "a switch that was not named" for f in flagged)


def as_expected(record: Record) -> bool:
    """Green, in an environment as asked."""
    return expected(record) and not environment_differs(record)


def contradicts(record: Record) -> bool:
    """A finished record is green although something in it speaks against that, other than its environment."""
    return record.status == "finished" and contradiction(record) not in (None, f"{SWITCHES} flagged it")


def cleared(record: Record) -> str:
    """The higher precision at which a green case's deviation is gone; empty where none was asked."""
    if record.verdict not in GREEN:
        return ""
    return next((rung.arithmetic for rung in reversed(record.escalation) if rung.verdict in GREEN), "")


def precision_of(record: Record) -> str:
    """Arithmetic of the case's own run; empty where the record does not tell."""
    matmul = record.factors.get("matmul", "ieee")
    return record.factors.get("dtype", "") if matmul == "ieee" else matmul


def times_over(measured: Measured) -> float:
    """Deviation over its limit; infinite where it is no finite number."""
    if measured.sigmas is None or not math.isfinite(measured.sigmas):
        return math.inf
    return measured.sigmas / measured.limit if measured.limit > 0 else math.inf


def ranked(record: Record) -> list[Measured]:
    """All tensors, the one that is furthest over its limit first."""
    return sorted(record.measured, key=lambda m: -times_over(m))


def worst(record: Record) -> list[Measured]:
    """The few worst tensors of those beyond their limit."""
    return [m for m in ranked(record) if times_over(m) > 1][:MOST_WORST]


def beyond(record: Record) -> int:
    """How many tensors are beyond their limit."""
    return sum(times_over(m) > 1 for m in record.measured)


def dullest(record: Record) -> Measured | None:
    """The gradient in which the largest error could have hidden; None where no gradient was compared."""
    gradients = [m for m in record.measured if m.oracle == "gradient"]
    return max(gradients, key=seen, default=None)


def seen(measured: Measured) -> float:
    """Smallest relative error that would have been flagged; infinite where none would have been."""
    return math.inf if measured.sees is None else measured.sees


def visibility(record: Record) -> float | None:
    """`seen` of the gradient in which the largest error could have hidden."""
    found = dullest(record)
    return None if found is None else seen(found)


def last_slope(record: Record) -> float | None:
    """Slope of the highest precision that was asked."""
    return next((rung.slope for rung in reversed(record.escalation) if rung.slope is not None), None)


def steps(record: Record) -> list[Step]:
    """The escalation, the case's own run first; empty where there was none."""
    if not record.escalation:
        return []
    first = next(iter(worst(record)), None)
    here = "flagged" if any(f.flagged for f in record.findings) else record.verdict or "no verdict"
    reading = "the case's own run" + (f": {how_far(first)}" if first is not None else "")
    own = precision_of(record) or "as asked"
    found = [Step(own, here, first.error if first else None, None, reading)]
    for rung in record.escalation:
        told = _reading(rung.verdict, rung.error, rung.slope, rung.note, other=rung.arithmetic == own)
        found.append(Step(rung.arithmetic, rung.verdict, rung.error, rung.slope, told, rung.case))
    return found


def how_far(measured: Measured) -> str:
    """Deviation against limit in words."""
    if measured.sigmas is None:
        return f"{measured.name} is not finite"
    return f"{measured.name} is {number(measured.sigmas)} sigma off, limit {number(measured.limit)}"


def _reading(verdict: str, error: float | None, slope: float | None, note: str, *, other: bool) -> str:
    if verdict == "failed":
        return f"did not end: {note}" if note else "did not end"
    green = verdict in GREEN
    if other:
        text = "other data and weights: " + ("not flagged" if green else "flagged again")
    elif slope is None:
        text = "no error is left" if green and error == 0 else "within rounding" if green else "flagged there too"
    elif slope >= SLOPE:
        text = "the error shrinks with the precision, as rounding does"
    elif slope < STILL:
        text = "the error does not shrink with the precision: no rounding"
    else:
        text = "the error shrinks more slowly than rounding would"
    return f"{text}; {note}" if note else text


def because(record: Record) -> str:
    """One sentence: why this verdict is what it is; empty where the evidence is all there is to say."""
    own, verdict = precision_of(record) or "the case's precision", record.verdict
    if differs := environment_differs(record):
        gone = f" (beyond their limit at {own}, within it at {cleared(record)})" if cleared(record) else ""
        return f"The numbers are {verdict}{gone}, but the environment is not what the case asks for: {differs}"
    if record.status != "finished":
        return ""
    if verdict == "bug":
        return _why_bug(record, own)
    if verdict == "bug: precision":
        seen_by = [f.evidence for f in record.findings if f.flagged and f.oracle == PRECISION_ORACLE]
        what = "; ".join(seen_by) or "something is computed or kept in a lower one than asked"
        said = f"Precision is lost where it should not be: {what}"
        if higher := next((r.arithmetic for r in reversed(record.escalation) if r.verdict in GREEN), ""):
            return f"{said}; at {higher} the same program is right"
        return said
    if verdict in GREEN and (higher := cleared(record)):
        return f"Rounding: beyond a limit at {own}, within it at {higher}"
    if verdict == "inconclusive" and record.escalation:
        return "Not decided: the higher precisions do not tell rounding from a bug either"
    return ""


def leading(record: Record) -> tuple[str, str]:
    """The two sentences that come first, either may be empty: where it comes from, and why the verdict is what it is.

    The environment goes before anything that a diagnosis makes of its consequences.
    """
    where, why = record.diagnosis, because(record)
    return (why, where) if environment_differs(record) else (where, why)


def _why_bug(record: Record, own: str) -> str:
    same = [rung for rung in record.escalation if rung.verdict == "bug"]
    if same:
        rung = same[-1]
        how = f" (slope {slope_text(rung.slope)}; rounding has 1)" if rung.slope is not None else ""
        if rung.arithmetic == own:
            return "No rounding: it is flagged with other data and weights too"
        return f"No rounding: at {rung.arithmetic} it is still there{how}"
    flagged = [f for f in record.findings if f.flagged]
    exact = [f.oracle for f in flagged if f.limit is None and f.oracle not in (SWITCHES, PRECISION_ORACLE)]
    if exact:
        names = ", ".join(dict.fromkeys(exact))
        return f"No rounding: {names} {'asks' if ',' not in names else 'ask'} yes or no, whatever the precision"
    found = ranked(record)[:1]
    if found and times_over(found[0]) > 1:
        far = times_over(found[0])
        if math.isinf(far):
            return f"No rounding: {found[0].name} is not finite"
        return f"No rounding: {found[0].name} is {times(far)} over its limit at {own}"
    return ""


@dataclass(frozen=True)
class Table:
    """Cells of raw text for a rendering to escape; columns in `code` are ids, those in `right` numbers."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: frozenset[int] = frozenset()
    code: frozenset[int] = frozenset()


def escalation(record: Record) -> Table | None:
    """The escalation, one line a run; None where there was none."""
    rows = tuple(
        (step.precision, step.verdict, number(step.error), slope_text(step.slope), step.reading)
        for step in steps(record)
    )
    head = ("precision", "verdict there", "relative error", "slope", "what that means")
    return Table(head, rows, frozenset({2, 3})) if rows else None


def tensors(record: Record) -> Table | None:
    """The few worst tensors beyond their limit; None where none is.

    The escalation follows one tensor, the worst: only that one has an error at a higher precision.
    """
    found = worst(record)
    if not found:
        return None
    higher = next((rung for rung in reversed(record.escalation) if rung.error is not None), None)
    rows = []
    for place, m in enumerate(found):
        cells = [m.name, str(m.step), _error(m.error), number(m.predicted), f"{_error(m.sigmas)} ({m.scope})"]
        cells += [number(m.limit), *_rows(m)]
        if higher is not None:
            cells += [number(higher.error), slope_text(higher.slope)] if place == 0 else [MISSING, MISSING]
        rows.append(tuple(cells))
    head = ["tensor", "step", "relative error", "rounding gives", "sigma", "limit", "worst row", "rows wrong"]
    if higher is not None:
        head += [f"error at {higher.arithmetic}", "slope"]
    return Table(tuple(head), tuple(rows), frozenset(range(1, len(head))))


def unseen(record: Record) -> Table | None:
    """Smallest error that would have been flagged, the dullest tensors first; None where nothing tells."""
    rows = tuple(
        (m.name, m.oracle, "nothing" if math.isinf(seen(m)) else number(seen(m)), number(m.sigmas), number(m.limit))
        for m in sorted(record.measured, key=lambda m: -seen(m))[:MOST_UNSEEN]
    )
    head = ("tensor", "check", "relative error from which it is flagged", "sigma", "limit")
    return Table(head, rows, frozenset({2, 3, 4})) if rows else None


def known(found: Iterable[tuple[Expectation, Sequence[Record]]]) -> Table | None:
    """Refusals and known issues that came out as foreseen, a line an entry; None where there are none."""
    rows = tuple(
        (entry.name, entry.kind, str(len(records)), entry.why, entry.link or MISSING, records[0].case)
        for entry, records in found
    )
    head = ("name", "kind", "cases", "what", "where", "first case")
    return Table(head, rows, frozenset({2}), frozenset({5})) if rows else None


def headrooms(green: Iterable[Record]) -> Table | None:
    """Headroom and visibility of green cases, the least headroom first; None where no tensor was recorded."""
    rows = []
    for record in green:
        closest, dull = next(iter(ranked(record)), None), dullest(record)
        if closest is None:
            continue
        over = times_over(closest)
        sees = MISSING if dull is None else "nothing" if math.isinf(seen(dull)) else number(seen(dull))
        told = (closest.name, sees, dull.name if dull else MISSING)
        cells = (record.case, precision_of(record) or MISSING, times(1 / over if over > 0 else math.inf), *told)
        rows.append((over, cells))
    rows.sort(key=lambda row: -row[0])
    head = ("case", "precision", "headroom", "of", "gradient errors seen from", "dullest gradient")
    return Table(head, tuple(cells for _, cells in rows), frozenset({2, 4}), frozenset({0})) if rows else None


def _error(value: float | None) -> str:
    return "not finite" if value is None else number(value)


def slope_text(slope: float | None) -> str:
    """Slope with two digits."""
    return MISSING if slope is None else f"{slope + 0.0:.2f}".replace("-0.00", "0.00")


def blindness(record: Record) -> str:
    """What of its gradients a case could not have seen, one line; empty where nothing tells."""
    dull = dullest(record)
    if dull is None:
        return ""
    if math.isinf(seen(dull)):
        return f"Nothing could have been seen in {dull.name}"
    return f"Errors below {number(seen(dull))} of {dull.name} could not have been seen"


def chain(record: Record) -> str:
    """The escalation as one line: ``tf32 0.84 → float32 0.84 (bug, slope 0.00)``; empty where there was none."""
    parts = []
    for step in steps(record):
        error = f" {number(step.error)}" if step.error is not None else ""
        slope = f", slope {slope_text(step.slope)}" if step.slope is not None else ""
        parts.append(f"{step.precision}{error} ({step.verdict}{slope})")
    return " → ".join(parts)


def guesses(record: Record) -> Sequence[Guess]:
    """The likeliest classes of bugs."""
    return record.guesses[:MOST_GUESSES]


def classes(found: Iterable[Guess]) -> str:
    """Guesses as one line."""
    return "; ".join(f"class {g.bug_class} ({g.name})" if g.name else f"class {g.bug_class}" for g in found)


def dormant(found: Iterable[Dormant]) -> list[tuple[str, str]]:
    """Classes that could not have shown, by reason: the reason, and the classes in order."""
    by_reason: dict[str, set[int]] = {}
    for item in found:
        by_reason.setdefault(item.reason, set()).add(item.bug_class)
    ordered = sorted(by_reason.items(), key=lambda item: min(item[1]))
    return [
        (reason or "no reason was given", f"class{'es' * (len(numbers) > 1)} {', '.join(map(str, sorted(numbers)))}")
        for reason, numbers in ordered
    ]


def share(value: float) -> str:
    """Share of rows, for people."""
    if 0 < value < 0.005:
        return "<1%"
    return f"{value:.0%}" if 0 <= value <= 1 else number(value)


def _rows(measured: Measured) -> tuple[str, str]:
    """Worst row and share of wrong rows, where the tensor has rows."""
    if measured.scope in ("scalar", "norm"):
        return MISSING, MISSING
    return str(measured.row), share(measured.rows_wrong)


def verdict_cost(records: Iterable[Record]) -> str:
    """What the verdicts themselves cost, against the wall clock of the same cases; empty where no record tells."""
    ran = [r for r in records if r.wall_seconds]
    told = [(r.verdict_seconds, r.wall_seconds) for r in ran if r.verdict_seconds is not None and r.wall_seconds]
    whole = sum(wall for _, wall in told)
    cost = sum(spent for spent, _ in told)
    if not told or whole <= 0:
        return ""
    of = "" if len(told) == len(ran) else f" ({len(told)} of {count(len(ran), 'case')} tell)"
    return f"verdicts took {seconds(cost)}, {cost / whole:.0%} of the wall time{of}"


def grouped(records: Iterable[Record]) -> tuple[Group, ...]:
    """Records with the same outcome, oracles and words, in the order of their first ones."""
    found: dict[tuple[str, ...], list[Record]] = {}
    for record in records:
        found.setdefault(signature(record), []).append(record)
    return tuple(Group(tuple(members)) for members in found.values())


def signature(record: Record) -> tuple[str, ...]:
    """What makes two failures look alike: outcome, oracles, likeliest class, and words but for numbers and names."""
    words = record.diagnosis or "\n".join(f.evidence for f in record.findings if f.flagged) or record.evidence
    likeliest = str(record.guesses[0].bug_class) if record.guesses else ""
    return (record.status, record.verdict or "", record.oracle or "", record.fault or "", likeliest, template(words))


def template(text: str) -> str:
    """Text without case ids, precisions, names of tensors, scopes and numbers; contributions as none, all or some."""
    text = CASE.sub("<case>", shorten(text, MOST_WORDS))
    text = CONTRIBUTION.sub(_contribution, text)
    for pattern, name in ((ARITHMETIC, "<precision>"), (NAME, "<name>"), (SCOPE, "<scope>"), (NUMBER, "<number>")):
        text = pattern.sub(name, text)
    return " ".join(text.split())


def _contribution(found: re.Match[str]) -> str:
    value = abs(float(found[1]))
    return f"{'none' if value < 0.05 else 'all' if abs(value - 1) < 0.05 else 'some'} of the {found[2]}"
