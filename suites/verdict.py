"""Verdict: what all oracles together say of one case."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from suites.cases import Case
from suites.observe import ObservationError, RankObservation, bitwise_equal
from suites.oracles import ORACLES, Evidence, Finding, Oracle
from suites.reference import ReferenceCache

# A numeric deviation this many times over its limit is a bug by itself; between 1 and this, one precision alone
# cannot tell (numerics: never call something a bug from one precision alone).
DECISIVE = 10.0

# Order in which flagged oracles explain a run, and how many of them are spelled out.
EXPLAINS = (
    "complete", "tie", "layout", "start", "logits", "loss", "gradient", "gradient_norm", "update", "replicas", "census",
    "collectives",
)  # fmt: skip
SHOWN = 4


@dataclass(frozen=True)
class Judgement:
    """Verdict (exact, rounding, bug or inconclusive) and the findings it rests on.

    `error`, `limit` and `headroom` (limit / error) belong to `error_of`, the numeric oracle with the least
    headroom.
    """

    verdict: str
    findings: tuple[Finding, ...]
    evidence: str  # one paragraph for people
    error: float | None = None
    limit: float | None = None
    headroom: float | None = None
    error_of: str | None = None


def judge(case: Case, ranks: Sequence[RankObservation], cache: ReferenceCache | None = None) -> Judgement:
    """Judge one case from all of its ranks' observations. Bad observations are findings, never exceptions."""
    try:
        evidence = Evidence(case, ranks, cache or ReferenceCache(1))
    except ObservationError as error:
        return Judgement("bug", (Finding("complete", True, str(error)),), str(error))
    findings = tuple(_ask(oracle, evidence) for oracle in ORACLES)
    numeric = {oracle.name for oracle in ORACLES if oracle.numeric}
    flagged = [f for f in findings if f.flagged]
    measured = [f for f in findings if f.error is not None and f.limit]
    tightest = max(measured, key=lambda f: f.error / f.limit, default=None)  # type: ignore[operator]
    blind = [f"{f.oracle} {f.blind}" for f in findings if f.blind]
    verdict = _verdict(case, evidence, flagged, numeric, bool(blind))
    if flagged:
        text = _explain(flagged)
        if verdict == "inconclusive":
            text += f"; within {DECISIVE:g} times the limit, so one precision alone cannot tell"
            text += _second_opinion(case)
    elif blind:
        text = "blind: " + "; ".join(blind)
    else:
        text = _named(tightest) if tightest else "nothing was measured"
        notes = [f.evidence.split("; ", 1)[1] for f in findings if f.oracle == "layout" and "; " in f.evidence]
        text = "; ".join([text, *notes])
    return Judgement(
        verdict=verdict,
        findings=findings,
        evidence=text,
        error=tightest.error if tightest else None,
        limit=tightest.limit if tightest else None,
        headroom=tightest.limit / tightest.error if tightest and tightest.error and tightest.limit else None,
        error_of=tightest.oracle if tightest else None,
    )


def _explain(flagged: Sequence[Finding]) -> str:
    """The findings that explain most, first: what holds for the whole run, then step by step; the rest by name."""
    ordered = sorted(flagged, key=lambda f: (f.step, EXPLAINS.index(f.oracle)))
    text = "; ".join(_named(f) for f in ordered[:SHOWN])
    rest = ", ".join(f.oracle for f in ordered[SHOWN:])
    return f"{text}; also flagged by {rest}" if rest else text


def _named(finding: Finding) -> str:
    """Evidence after the oracle's name, unless it begins with it."""
    named = finding.evidence.startswith(finding.oracle)
    return finding.evidence if named else f"{finding.oracle}: {finding.evidence}"


def _ask(oracle: Oracle, evidence: Evidence) -> Finding:
    try:
        return oracle.check(evidence)
    except Exception as error:  # noqa: BLE001 - an oracle that breaks on odd observations must not pass for a clean one
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"oracle failed: {type(error).__name__}: {error} ({where.name}, line {where.lineno})"
        return Finding(oracle.name, True, text)


def _verdict(case: Case, evidence: Evidence, flagged: Sequence[Finding], numeric: set[str], blind: bool) -> str:
    if any(f.evidence.startswith("oracle failed") for f in flagged):
        return "inconclusive"
    if not flagged:
        if blind or not any(evidence.exact):
            return "inconclusive"
        return "exact" if _bitwise(case, evidence) else "rounding"
    # "not <=": an error that is no number decides too.
    decided = any(
        f.oracle not in numeric or f.error is None or not f.error <= DECISIVE * (f.limit or 0) for f in flagged
    )
    return "bug" if decided else "inconclusive"


def _second_opinion(case: Case) -> str:
    try:
        return f"; ask fp64: tiebench run --case '{case.but(dtype='float64').id}'" if case.dtype != "float64" else ""
    except ValueError:
        return "; this path has no higher precision to ask"


def _bitwise(case: Case, evidence: Evidence) -> bool:
    """Logits and gradients of every step are bit for bit those of the unsharded run at the case's own precision."""
    for step in range(case.steps):
        own = (evidence.exact if case.dtype == "float64" else evidence.rounded)[step]
        if own is None or not all(bitwise_equal(w.value, own.logits[k]) for k, w in evidence.logits[step].items()):
            return False
        if not all(bitwise_equal(w.value, own.gradients[n]) for n, w in evidence.gradients[step].items()):
            return False
    return True
