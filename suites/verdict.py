"""Verdict: what all oracles together say of one case, at its precision (`judge`) and at higher ones (`conclude`)."""

from __future__ import annotations

import dataclasses
import math
import statistics
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from suites.cases import Case, CaseError
from suites.evidence import Comparison, Evidence, ReferenceFailed
from suites.limits import DECISIVE, SLOPE
from suites.numerics import LIMITS, Deviation
from suites.observe import ObservationError, RankObservation
from suites.oracles import ORACLES, Finding, Oracle
from suites.precision import UNIT_ROUNDOFF, arithmetic
from suites.reference import ReferenceCache
from suites.runs import RunFailed

EXACT, ROUNDING, BUG, PRECISION, INCONCLUSIVE = "exact", "rounding", "bug", "bug: precision", "inconclusive"

# Order in which flagged oracles explain a run, and how many of them are spelled out.
EXPLAINS = (
    "complete", "tie", "layout", "start", "checkpoint", "switches", "precision", "logits", "loss", "gradient",
    "gradient_norm", "update", "replicas", "census", "collectives",
)  # fmt: skip
SHOWN = 4
FAILED = "oracle failed"  # begins the evidence of an oracle that could not ask
KIND = {oracle.name: oracle.kind for oracle in ORACLES}
# Lower precisions that a run's error may look like, finest first.
COARSER = ("float32", "tf32", "tf32_truncated", "float16", "bfloat16")
EVEN = 0.3  # share of rows that rounding of a lower precision must at least have reached
COHERENT = 0.5  # cosine between error and tensor above which the error is a factor, not rounding
INCOHERENT = 0.1  # the same cosine, of an update
ROUNDINGS = 2.0  # unit roundoffs of a lower precision by which an update may be off that was rounded to it
CONCENTRATED = 0.5  # share of an error's energy in one direction (a pattern of rows times one of columns)
FIRST_FEW = 3  # tensors whose error is looked at for such a pattern
COMPARABLE = 0.02  # rounding of a lower precision must be at least this share of what such a run shows

Again = Callable[[Case], Sequence[RankObservation]]


@dataclass(frozen=True)
class Measured:
    """The worst comparison of one tensor over all steps.

    Args:
        oracle: which check it belongs to; name: the tensor; step: from 1.
        error: relative error, root mean square; predicted: what rounding gives; sees: smallest that would be flagged.
        sigmas: deviation in predicted sigmas in its worst scope (tensor, row, element, scalar, norm); limit: of that.
        row: worst row; rows_wrong: share of rows above the row limit.
    """

    oracle: str
    name: str
    step: int
    error: float
    predicted: float
    sees: float
    sigmas: float
    limit: float
    scope: str
    row: int
    rows_wrong: float


@dataclass(frozen=True)
class Rung:
    """One run of the escalation.

    Args:
        case: what ran; arithmetic: its precision; verdict: of that run alone ("failed" where it did not end).
        error: relative error of the tensor that was worst in the first run; slope: how it scaled from there (1:
            rounding, 0: a bug).
    """

    case: str
    arithmetic: str
    verdict: str
    error: float | None = None
    slope: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Judgement:
    """Verdict (exact, rounding, bug, bug: precision or inconclusive) and the findings it rests on.

    Args:
        evidence: one paragraph for people.
        error: with `limit` and `headroom` (limit / error), of `error_of`, the numeric oracle with the least headroom.
        measured: every tensor's worst comparison.
        open: one precision alone cannot tell, a higher one could.
        resembles: the lower precision whose rounding the error looks like; empty when it does not.
        rungs: the runs of the escalation, in order.
    """

    verdict: str
    findings: tuple[Finding, ...]
    evidence: str
    error: float | None = None
    limit: float | None = None
    headroom: float | None = None
    error_of: str | None = None
    measured: tuple[Measured, ...] = ()
    open: bool = False
    resembles: str = ""
    rungs: tuple[Rung, ...] = ()

    @property
    def flagged(self) -> tuple[Finding, ...]:
        """The findings that flag."""
        return tuple(f for f in self.findings if f.flagged)


def conclude(
    case: Case, ranks: Sequence[RankObservation], cache: ReferenceCache | None = None, again: Again | None = None
) -> Judgement:
    """Judge a case; where only numbers flag, run it at IEEE fp32 and at fp64 and judge all together.

    A path without fp64 is asked with other data and weights instead, where IEEE fp32 alone cannot tell: a bug shows
    again, an unlucky rounding does not.

    Args:
        again: runs a case the way this one was run (same ranks, target, patch, fault). Raises `RunFailed`.
    """
    cache = cache or ReferenceCache()
    first = judge(case, ranks, cache)
    measured_only = first.verdict == BUG and all(
        KIND[f.oracle] == "numeric" and f.error is not None and math.isfinite(f.error) for f in first.flagged
    )
    rising = [rung for rung in ladder(case) if arithmetic(rung) != arithmetic(case)]
    asked = ladder(case) if first.open else rising if measured_only else []
    if again is None or not asked:
        return first
    worst = max((m for m in first.measured if m.sigmas > m.limit), key=lambda m: m.sigmas / m.limit, default=None)
    rungs: list[Rung] = []
    higher: list[Judgement] = []
    for rung in asked:
        try:
            found = judge(rung, again(rung), cache)
        except RunFailed as error:
            rungs.append(Rung(rung.id, arithmetic(rung), "failed", note=str(error)))
            continue
        higher.append(found)
        rungs.append(_rung(case, rung, found, worst))
        if found.verdict in (BUG, PRECISION):
            break
    verdict, reason = _together(case, first, worst, rungs, higher)
    if measured_only and verdict == INCONCLUSIVE:  # it had been decided without them
        verdict, reason = BUG, ""
    said = first.evidence.removesuffix(_second_opinion(case))
    said = f"{reason.rstrip('.')}; at {arithmetic(case)} {said}" if reason else said
    return dataclasses.replace(first, verdict=verdict, evidence=said, rungs=tuple(rungs), open=False)


def ladder(case: Case) -> list[Case]:
    """The cases that escalation runs: IEEE fp32, then fp64 where the path can, else fp32 with other seeds."""
    rungs = []
    if arithmetic(case) not in ("float32", "float64"):
        rungs.append(case.but(dtype="float32", matmul="ieee"))
    try:
        return [*rungs, case.but(dtype="float64", matmul="ieee")] if case.dtype != "float64" else []
    except CaseError:
        ieee = case.but(dtype="float32", matmul="ieee")
        return rungs or [ieee.but(seed=case.seed + n) for n in (1, 2)]


def _rung(case: Case, rung: Case, found: Judgement, worst: Measured | None) -> Rung:
    name = arithmetic(rung)
    same = next((m for m in found.measured if worst and (m.oracle, m.name) == (worst.oracle, worst.name)), None)
    if same is None or worst is None:
        return Rung(rung.id, name, found.verdict)
    slope = None
    if name != arithmetic(case) and same.error > 0 and 0 < worst.error < math.inf:
        u, u_higher = UNIT_ROUNDOFF[arithmetic(case)], UNIT_ROUNDOFF[name]
        slope = math.log2(worst.error / same.error) / math.log2(u / u_higher)
    return Rung(rung.id, name, found.verdict, same.error, slope)


def _together(
    case: Case, first: Judgement, worst: Measured | None, rungs: Sequence[Rung], higher: Sequence[Judgement]
) -> tuple[str, str]:
    """Verdict over all rungs, and the reason for people."""
    if not higher:
        failed = "; ".join(f"{rung.arithmetic}: {rung.note}" for rung in rungs)
        return INCONCLUSIVE, f"no higher precision could be asked ({failed})" if failed else ""
    shown = ", ".join(_shown(case, rung) for rung in rungs)
    for found, rung in zip(higher, [r for r in rungs if r.verdict != "failed"], strict=True):
        if found.verdict in (BUG, PRECISION):
            name = next((f.oracle for f in found.flagged), "")
            return found.verdict, f"{shown}: no rounding, {name} flags at {rung.arithmetic} too"
    if all(rung.arithmetic == arithmetic(case) for rung in rungs):  # other seeds
        if first.resembles.startswith("tf32"):
            return INCONCLUSIVE, f"{shown}: it is what TF32 gives, look at the switches"
        if all(found.open for found in higher):
            kind = PRECISION if first.resembles else BUG
            return kind, f"{shown}: flagged with {1 + len(higher)} seeds of {1 + len(higher)}"
        return INCONCLUSIVE, f"{shown}: not flagged with every seed, and this path has no higher precision to ask"
    last = higher[-1]
    if last.verdict not in (EXACT, ROUNDING):
        return INCONCLUSIVE, f"{shown}: the highest precision cannot tell either"
    if any(KIND[f.oracle] == "precision" for f in first.flagged):
        return PRECISION, f"{shown}: right at a higher precision; at {arithmetic(case)} more is lost than asked"
    there = {(m.oracle, m.name) for m in last.measured}
    if unseen := [m.name for m in first.measured if m.sigmas > m.limit and (m.oracle, m.name) not in there]:
        return INCONCLUSIVE, f"{shown}: but {unseen[0]} is not measured there, so nothing clears it"
    over = worst.sigmas / worst.limit if worst else 0.0
    slopes = [rung.slope for rung in rungs if rung.slope is not None]
    told = any(KIND[f.oracle] == "environment" for f in first.flagged)
    if over > DECISIVE and not told and not first.resembles.startswith("tf32"):
        return PRECISION, (
            f"{shown}: the program is right, but loses {over:.3g} times more at {arithmetic(case)} than rounding may"
        )
    if slopes and min(slopes) < SLOPE and not told:
        return INCONCLUSIVE, f"{shown}: the error shrinks too slowly for rounding (slope below {SLOPE:g})"
    tf32 = told or first.resembles.startswith("tf32")
    like = " It comes from the switches, not from the program." if tf32 else ""
    return ROUNDING, f"{shown}: rounding, it is gone at a higher precision.{like}"


def _shown(case: Case, rung: Rung) -> str:
    seed = f" (seed {Case.parse(rung.case).seed})" if rung.arithmetic == arithmetic(case) else ""
    error = "" if rung.error is None else f" (relative error {rung.error:.2g}"
    slope = "" if rung.slope is None else f", slope {rung.slope:.2f}"
    return f"{rung.verdict} at {rung.arithmetic}{seed}{error}{slope}{')' if error else ''}"


def judge(case: Case, ranks: Sequence[RankObservation], cache: ReferenceCache | None = None) -> Judgement:
    """Judge one case from all of its ranks' observations. Bad observations are findings, never exceptions."""
    try:
        evidence = Evidence(case, ranks, cache or ReferenceCache())
    except ObservationError as error:
        return Judgement(BUG, (Finding("complete", True, str(error)),), str(error))
    findings = tuple(_ask(oracle, evidence) for oracle in ORACLES)
    flagged = [f for f in findings if f.flagged]
    rated = [f for f in findings if f.error is not None and f.limit]
    tightest = max(rated, key=lambda f: f.error / f.limit, default=None)  # type: ignore[operator]
    blind = [f"{f.oracle} {f.blind}" for f in findings if f.blind]
    measured = _measured(evidence)
    failed = [f for f in findings if f.evidence.startswith(FAILED)]
    # What is either so or not decides also where others of the oracles failed.
    told = [f for f in flagged if f not in failed and (not failed or KIND[f.oracle] == "exact")]
    undecided = failed and not told
    verdict, resembles = (INCONCLUSIVE, "") if undecided else _verdict(evidence, told, bool(blind))
    wavering = bool(flagged) and verdict == INCONCLUSIVE and not failed
    if flagged:
        text = _explain(flagged)
        if resembles:
            text += f"; the error looks like rounding to {resembles}"
        if wavering:
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
        measured=measured,
        open=wavering,
        resembles=resembles,
    )


def _measured(evidence: Evidence) -> tuple[Measured, ...]:
    """Worst step of every tensor; nothing where the reference failed (the findings say so)."""
    worst: dict[tuple[str, str], Comparison] = {}
    sees: dict[tuple[str, str], float] = {}
    try:
        replayed = [Comparison("update", step, d) for step, d in evidence.replayed.deviations]
        comparisons = [*evidence.comparisons, *replayed]
    except Exception:  # noqa: BLE001 - told by the oracles
        return ()
    for found in comparisons:
        key = (found.oracle, found.deviation.name)
        sees[key] = max(sees.get(key, 0.0), found.deviation.sees)
        if key not in worst or not found.deviation.score <= worst[key].deviation.score:
            worst[key] = found
    return tuple(_row(found, sees[key]) for key, found in worst.items())


def _row(found: Comparison, sees: float) -> Measured:
    d: Deviation = found.deviation
    return Measured(
        oracle=found.oracle,
        name=d.name,
        step=found.step + 1,
        error=d.relative,
        predicted=d.predicted,
        sees=sees,
        sigmas=d.sigmas,
        limit=LIMITS[d.scope],
        scope=d.scope,
        row=d.row,
        rows_wrong=d.rows_wrong,
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
    except ReferenceFailed as error:
        return Finding(oracle.name, True, f"{FAILED}: {error}")
    except Exception as error:  # noqa: BLE001 - an oracle that breaks on odd observations must not pass for a clean one
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{FAILED}: {type(error).__name__}: {error} ({where.name}, line {where.lineno})"
        return Finding(oracle.name, True, text)


def _verdict(evidence: Evidence, flagged: Sequence[Finding], blind: bool) -> tuple[str, str]:
    """Verdict of one run alone, and the lower precision that its error looks like."""
    by_kind: dict[str, list[Finding]] = {}
    for finding in flagged:
        by_kind.setdefault(KIND[finding.oracle], []).append(finding)
    if "exact" in by_kind:
        return BUG, ""
    numeric = by_kind.get("numeric", [])
    if not numeric:
        if "precision" in by_kind:
            return PRECISION, ""
        if blind or not any(evidence.exact):
            return INCONCLUSIVE, ""
        return (EXACT if evidence.bitwise else ROUNDING), ""
    resembles = _resembles(evidence)
    if "precision" in by_kind and (resembles or all(f.oracle == "update" for f in numeric)):
        return PRECISION, resembles
    # The optimizer's replay multiplies no matrices: it is IEEE fp32 or fp64 whatever the case's precision.
    ieee = evidence.arithmetic in ("float32", "float64") and "environment" not in by_kind
    if any(_decisive(f) and f.oracle == "update" for f in numeric):
        rounded = "" if evidence.replayed.broken else _rounded_updates(evidence)
        return PRECISION if rounded and len(numeric) == 1 else BUG, rounded
    if not (ieee and any(_decisive(f) for f in numeric)):
        return INCONCLUSIVE, resembles
    # What looks like a lower precision is put to a higher one first; in fp64 nothing else is left that it could be.
    at_the_top = evidence.arithmetic == "float64"
    return (PRECISION if at_the_top else INCONCLUSIVE) if resembles else BUG, resembles


def _decisive(finding: Finding) -> bool:
    # "not <=": an error that is no number decides too.
    return finding.error is None or not finding.error <= DECISIVE * (finding.limit or 0)


def _resembles(evidence: Evidence) -> str:
    """The lower precision of which every deviation of the first flagged step could be the rounding, the likeliest.

    As large as what an unsharded run at that precision shows, spread over the rows, and no factor of the tensor itself.
    """
    lower = [name for name in COARSER if UNIT_ROUNDOFF[name] > evidence.u]
    flagged = [c for c in evidence.comparisons if not c.deviation.score <= 1]
    if not flagged or any(not math.isfinite(c.deviation.sigmas) for c in flagged):
        return ""
    first = min(c.step for c in flagged)
    early = {(c.oracle, c.deviation.name): c.deviation for c in flagged if c.step == first}
    wide = [d for d in early.values() if d.scope not in ("scalar", "norm")]
    if not wide or max(d.rows_wrong for d in wide) < EVEN:
        return ""
    if statistics.median(d.coherence for d in wide) > COHERENT:
        return ""
    if max(evidence.concentration(*key, first) for key in early if early[key] in wide[:FIRST_FEW]) > CONCENTRATED:
        return ""
    fitting: dict[str, float] = {}  # how far from what such a run shows, in powers of two
    tiny = torch.finfo(torch.float64).tiny
    for name in lower:
        as_if = {(c.oracle, c.deviation.name): c.deviation for c in evidence.compare(first, name)}
        if all(key in as_if and as_if[key].score <= 1 for key in early):
            ratios = [d.relative / as_if[key].predicted for key, d in early.items() if as_if[key].predicted > 0]
            fitting[name] = abs(math.log2(max(statistics.median(ratios), tiny))) if ratios else math.inf
    best = min(fitting, key=lambda name: fitting[name], default="")
    return best if best and fitting[best] <= -math.log2(COMPARABLE) else ""


def _rounded_updates(evidence: Evidence) -> str:
    """As `_resembles`, of updates whose gradients are right: moments or weights kept in a lower precision."""
    flagged = [(step, d) for step, d in evidence.replayed.deviations if not d.score <= 1]
    first = [d for step, d in flagged if step == flagged[0][0]]
    even = all(d.rows_wrong >= EVEN for d in first) and statistics.median(d.coherence for d in first) < INCOHERENT
    worst = max(d.relative for d in first)
    lower = [name for name in COARSER if UNIT_ROUNDOFF[name] > evidence.master_u]
    return next((name for name in lower if even and worst <= ROUNDINGS * UNIT_ROUNDOFF[name]), "")


def _second_opinion(case: Case) -> str:
    text = "; one precision alone cannot tell"
    try:
        return f"{text}; ask fp64: tiebench run --case '{case.but(dtype='float64', matmul='ieee').id}'"
    except ValueError:
        return f"{text}; this path has no higher precision to ask"
