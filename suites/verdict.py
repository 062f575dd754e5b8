"""Verdict: what all oracles together say of one case. (Interface first; filled in with the oracles.)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from suites.cases import Case
from suites.observe import RankObservation


@dataclass(frozen=True)
class Finding:
    """What one oracle says of one case; the fields are those of `ci.records.Finding`."""

    oracle: str
    flagged: bool
    evidence: str
    error: float | None = None
    limit: float | None = None
    unit: str | None = None


@dataclass(frozen=True)
class Judgement:
    """Verdict (exact, rounding, bug or inconclusive) and the findings it rests on."""

    verdict: str
    findings: tuple[Finding, ...]
    evidence: str  # one paragraph for people
    error: float | None = None
    limit: float | None = None
    headroom: float | None = None
    error_of: str | None = None


def judge(case: Case, ranks: Sequence[RankObservation]) -> Judgement:
    """Judge one case from all of its ranks' observations. Never raises on bad observations: they are findings."""
    raise NotImplementedError
