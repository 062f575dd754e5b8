"""Examination of one case: the verdict, and where it is not green, where the deviation comes from.

The one entry for everybody who has observations: `examine` judges, asks higher precisions where one alone cannot tell,
traces the step that first deviates, and names the classes of bugs that it looks like.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from suites.cases import Case
from suites.diagnosis import Diagnosis, diagnose
from suites.dormant import Dormant, dormant
from suites.evidence import Evidence
from suites.observe import ObservationError, RankObservation
from suites.reference import ReferenceCache
from suites.runs import Again, RunFailed
from suites.trace import Boundary, first_boundary
from suites.verdict import BUG, EXACT, PRECISION, ROUNDING, Judgement, conclude

PRECISION_LOST = 28  # the class of bugs that `bug: precision` is
TRACEABLE = ("logits", "loss", "gradient", "gradient_norm", "replicas")  # oracles whose step a trace can show


@dataclass(frozen=True)
class Examination:
    """All that is said of one case.

    Args:
        diagnosis: None where nothing deviates.
        dormant: classes of bugs that this case could not have shown, whatever happened.
    """

    judgement: Judgement
    diagnosis: Diagnosis | None
    dormant: tuple[Dormant, ...]


def examine(
    case: Case, ranks: Sequence[RankObservation], cache: ReferenceCache | None = None, again: Again | None = None
) -> Examination:
    """Judge a case and, where something flags, find out where it comes from."""
    cache = cache or ReferenceCache()
    judgement = conclude(case, ranks, cache, again)
    diagnosis = None
    if judgement.flagged:
        try:
            evidence = Evidence(case, ranks, cache)
        except ObservationError:
            diagnosis = diagnose(None, judgement.findings)
        else:
            green = judgement.verdict in (EXACT, ROUNDING)
            boundary = None if green else _traced(case, judgement, cache, again)
            diagnosis = diagnose(evidence, judgement.findings, boundary)
            judgement = _explained(judgement, diagnosis)
    return Examination(judgement, diagnosis, dormant(case))


def _explained(judgement: Judgement, diagnosis: Diagnosis) -> Judgement:
    """The judgement, but a bug where an error only looks like rounding and another class explains it better."""
    likeness_only = judgement.verdict == PRECISION and "precision" not in {f.oracle for f in judgement.flagged}
    if not likeness_only or not diagnosis.guesses or diagnosis.guesses[0].bug_class == PRECISION_LOST:
        return judgement
    text = f"as small and even as rounding to {judgement.resembles or 'a lower precision'}, but: {diagnosis.sentence}"
    return dataclasses.replace(judgement, verdict=BUG, evidence=f"{text}; {judgement.evidence}")


def _traced(case: Case, judgement: Judgement, cache: ReferenceCache, again: Again | None) -> Boundary | None:
    """First module boundary that leaves the noise in the first step that deviates; None where no trace can tell."""
    steps = [f.step for f in judgement.flagged if f.oracle in TRACEABLE and f.step > 0]
    if again is None or not steps:
        return None
    with contextlib.suppress(RunFailed, ObservationError):
        step = min(steps) - 1
        return first_boundary(case, again(case, trace=step), step, cache)
    return None
