"""The facts that every rendering of a run shares: verdict and next step first, then what went wrong. Fails closed.

Green needs all of it: at least one case, every planned case finished as expected, the end row of a complete run, and no
row that could not be read. Everything else is exit code 1.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ci.records import GREEN, Expectation, Finding, Record, RunRow, over_budget
from reports import explain
from reports.columns import error_unit
from reports.course import Course, course, progress, report_command, resumable, resume_command
from reports.explain import Group, as_expected
from reports.load import Loaded, tested
from reports.text import MISSING, count, number, percent, seconds

# Worst first: what a maintainer should look at first. The values of `outcome`.
SEVERITY = (
    "bug",
    "bug: precision",
    "fault not caught",
    "no longer as known",
    "contradictory",
    "crash",
    "hang",
    "timeout",
    "lost",
    "no verdict",
    "wrong environment",
    "inconclusive",
    "refused",
    "skipped",
    "not run",
    "running",
    "pending",
    "known issue",
    "refused as expected",
    "rounding",
    "exact",
)
MOST_BLIND_FACTORS = 12
NOTHING = "nothing to do"


@dataclass(frozen=True)
class Known:
    """Cases that came out as one entry of the suite's tables foresees."""

    entry: Expectation
    records: tuple[Record, ...]


@dataclass(frozen=True)
class Summary:
    """One run in short. All text is raw: each rendering escapes it.

    Args:
        state: green, red (something ran and is not as expected), running (still going, no bad result so far),
            incomplete (a gap, but no bad result), empty.
        headline: verdict, one line.
        next_step: what to do now, one line.
        next_command: the command of the next step, None where there is none.
        counts: number of cases per outcome, worst first.
        failing: cases that are not as expected, worst first, those that were not run left out.
        groups: the same, those that fail alike together.
        known: refusals and known issues that came out as foreseen, by entry, those with most cases first.
        green: cases that are as expected without any entry; cleared: those of them that only a higher precision made
            green.
        not_run: planned cases that never began, or have no result yet.
        course: how the run went: killed, resumed, still going, its time by phase, its gaps by reason.
        pattern: what all failing cases share and no other case does, None where there is no such thing.
        elapsed_seconds: wall clock of the whole run, None where nothing tells.
        slowest, tightest: up to five cases with the longest wall clock, with the least headroom.
        blind: what this run could not have seen, one line each.
        verdict_cost: what the verdicts cost, empty where no record tells.
        notes: damage, torn lines and oddities, one line each.
        exit_code: 0 all as expected, 1 anything else.
    """

    loaded: Loaded
    state: Literal["green", "red", "running", "incomplete", "empty"]
    headline: str
    next_step: str
    next_command: str | None
    counts: tuple[tuple[str, int], ...]
    failing: tuple[Record, ...]
    groups: tuple[Group, ...]
    known: tuple[Known, ...]
    green: tuple[Record, ...]
    not_run: tuple[Record, ...]
    course: Course
    pattern: str | None
    elapsed_seconds: float | None
    slowest: tuple[Record, ...]
    tightest: tuple[Record, ...]
    blind: tuple[str, ...]
    verdict_cost: str
    notes: tuple[str, ...]
    exit_code: int

    @property
    def cleared(self) -> tuple[Record, ...]:
        """Green cases that were beyond a limit at their own precision."""
        return tuple(r for r in self.green if explain.cleared(r))

    @property
    def plan(self) -> RunRow:
        """What was planned."""
        return self.loaded.run.plan

    @property
    def records(self) -> tuple[Record, ...]:
        """All records, in plan order."""
        return self.loaded.run.records

    @property
    def target(self) -> str:
        """The builds whose cases really ran; what was planned where none did."""
        return tested(self.loaded.run)

    @property
    def budget_seconds(self) -> float:
        """Time budget of the run, of all its parts together where it was resumed."""
        return self.loaded.run.budget_seconds

    @property
    def budget_line(self) -> str:
        """Budget used against budget, for people."""
        if self.elapsed_seconds is None:
            return f"of {seconds(self.budget_seconds)} budget, an unknown part was used"
        share = f" ({self.elapsed_seconds / self.budget_seconds:.0%})" if self.budget_seconds > 0 else ""
        return f"{seconds(self.elapsed_seconds)} of {seconds(self.budget_seconds)} budget{share}"


def outcome(record: Record) -> str:
    """One word for a record: its verdict if it finished, else what became of it. One of `SEVERITY`."""
    if record.expectation is not None and record.expectation.met and as_expected(record):
        return "known issue" if record.expectation.kind == "known issue" else "refused as expected"
    if record.expectation is not None and record.verdict in GREEN:
        return "no longer as known"
    if explain.environment_differs(record) and not explain.contradicts(record):
        return "wrong environment"
    if record.verdict in GREEN and record.fault:
        return "fault not caught"
    if explain.contradicts(record):
        return "contradictory"
    if record.status == "finished":
        return record.verdict or "no verdict"
    if record.status == "timeout":
        return record.verdict if record.verdict in ("hang", "crash") else "timeout"
    if record.reason in ("running", "pending"):
        return record.reason
    return record.status.replace("_", " ")


def by_severity(record: Record) -> int:
    """Sort key, worst first."""
    name = outcome(record)
    return SEVERITY.index(name) if name in SEVERITY else 0  # what nobody knows is looked at first


def rerun_command(record: Record) -> str:
    """The one command that runs this case again alone."""
    if record.rerun:
        return record.rerun
    target = f" --target {shlex.quote(record.target)}" if record.target else ""
    return f"tiebench run --case {shlex.quote(record.case)}{target}"


def shown_rerun(record: Record) -> str:
    """`rerun_command`, said to be incomplete where it would run without the fault that this record was made with."""
    command = rerun_command(record)
    patch = (record.patch or "").split(" ")[0]
    return f"{command}  # and the patch {patch}" if patch and "--patch" not in command else command


def unsaid(record: Record) -> list[Finding]:
    """Findings that flagged and are not in the record's evidence word for word."""
    return [f for f in record.findings if f.flagged and f.evidence not in record.evidence]


def error_text(record: Record) -> str:
    """Error against limit with unit, for people."""
    unit = f" {name}" if (name := error_unit(record)) else ""
    if record.limit is None:
        return MISSING if record.error is None else f"{number(record.error)}{unit}"
    return f"{'not finite' if record.error is None else number(record.error)} / {number(record.limit)}{unit}"


def error_share(record: Record) -> float | None:
    """Error as a share of its limit, below 1 for rounding; inf where it is no finite number; None without limit."""
    if record.limit is None:
        return None
    if record.error is None or not math.isfinite(record.error):
        return math.inf
    if record.limit <= 0:
        return 0.0 if record.error <= 0 else math.inf
    return record.error / record.limit


def summarize(loaded: Loaded) -> Summary:
    """Reduce one run to the facts that all renderings share."""
    run, records = loaded.run, loaded.run.records
    counted = Counter(map(outcome, records))
    known = dict.fromkeys([*SEVERITY, *counted])
    counts = tuple((name, counted[name]) for name in known if counted[name])
    bad = sorted((r for r in records if not as_expected(r)), key=by_severity)
    failing = tuple(r for r in bad if r.status != "not_run")
    not_run = tuple(r for r in bad if r.status == "not_run")
    how = course(run, loaded.merge)
    notes = [*how.warnings, *_oddities(loaded), *loaded.notes]
    whole = (
        run.end is not None
        and run.end.reason == "complete"
        and run.end.exit_code == 0
        and not run.torn
        and not run.damage
    )
    if not records:
        state: Literal["green", "red", "running", "incomplete", "empty"] = "empty"
    elif any(r.status != "lost" for r in failing):
        state = "red"
    elif run.running:
        state = "running"
    else:
        state = "incomplete" if bad or not whole else "green"
    pattern = _pattern(records)
    headline, step, command = _headline(
        loaded, state=state, counts=counts, failing=failing, not_run=not_run, pattern=pattern
    )
    timed = sorted((r for r in records if r.wall_seconds is not None), key=lambda r: -(r.wall_seconds or 0))
    measured = sorted((r for r in records if error_share(r) is not None), key=lambda r: -(error_share(r) or 0))
    return Summary(
        loaded=loaded,
        state=state,
        headline=headline,
        next_step=step,
        next_command=command,
        counts=counts,
        failing=failing,
        groups=explain.grouped(failing),
        known=_known(records),
        green=tuple(r for r in records if as_expected(r) and r.expectation is None),
        not_run=not_run,
        course=how,
        pattern=pattern,
        elapsed_seconds=run.seconds,
        slowest=tuple(timed[:5]),
        tightest=tuple(measured[:5]),
        blind=_blind(loaded, records),
        verdict_cost=explain.verdict_cost(records),
        notes=tuple(notes),
        exit_code=0 if state == "green" else 1,
    )


def _known(records: Sequence[Record]) -> tuple[Known, ...]:
    found: dict[str, list[Record]] = {}
    for record in records:
        if record.expectation is not None and as_expected(record):
            found.setdefault(record.expectation.name, []).append(record)
    groups = [Known(e, tuple(members)) for members in found.values() if (e := members[0].expectation)]
    return tuple(sorted(groups, key=lambda known: (known.entry.kind, -len(known.records), known.entry.name)))


def _headline(
    loaded: Loaded,
    *,
    state: str,
    counts: Sequence[tuple[str, int]],
    failing: Sequence[Record],
    not_run: Sequence[Record],
    pattern: str | None,
) -> tuple[str, str, str | None]:
    run, total = loaded.run, len(loaded.run.records)
    spelled = ", ".join(f"{many} {name}" for name, many in counts)
    if late := sum(r.status == "finished" and over_budget(r) for r in run.records):
        spelled += f"; {late} over the time limit of a case"
    again = run.plan.command or None
    if state == "empty":
        return "NOTHING MEASURED: the plan has no case", "check the plan's name and its filters", again
    if state == "green":
        return f"GREEN: {_all(total)} as expected ({spelled})", NOTHING, None
    if state == "red":
        bad = [r for r in (*failing, *not_run) if r.reason not in ("running", "pending")]
        of = f"{count(sum(r.reason not in ('running', 'pending') for r in run.records), 'case')}"
        first = failing[0]
        cut = ", and the run is still going" if run.running else ", and the run was killed" if run.killed else ""
        shared = f": all have {pattern}, no green case does" if pattern else ""
        return (
            f"RED: {len(bad)} of {of}{' so far' if run.running else ''} not as expected ({spelled}){shared}{cut}",
            _step(first),
            shown_rerun(first),
        )
    if run.running:
        return f"RUNNING: {progress(run)} ({spelled})", "wait, then report on it once more", report_command(run)
    missing = len(failing) + len(not_run)
    lost = f" ({spelled})"
    if run.end is None:
        why = "the run was killed"
    elif run.end.reason == "complete" and not missing and not (run.torn or run.damage):
        why = f"the run ended with exit code {run.end.exit_code}" + (f": {run.end.message}" if run.end.message else "")
    elif run.end.reason == "complete":
        why = (
            "the record log is damaged"
            if run.torn or run.damage
            else "cases have no result although the run ended by itself"
        )
    elif loaded.merge is not None and run.end.message:
        why = run.end.message
    else:
        said = {
            "budget": "the budget was too short for the rest",
            "interrupted": "it was interrupted",
            "error": "it ended with an error",
        }
        why = said[run.end.reason] + (f": {run.end.message}" if run.end.message else "")
    if missing:
        text = f"INCOMPLETE: {missing} of {count(total, 'case')} without a result, {why}{lost}"
        if resumable(run) and loaded.merge is None:
            return text, "go on with what is left", resume_command(run)
        if loaded.merge is not None and loaded.merge.going:
            return text, "wait for the pieces that are still going, then merge them once more", None
        larger = run.end is not None and run.end.reason == "budget"
        return text, "run it again with a larger budget" if larger else "run the missing cases again", again
    if resumable(run) and loaded.merge is None:
        step, again = "go on with it: that writes its end", resume_command(run)
    else:
        step = "run it again"
    return f"INCOMPLETE: no bad result among {count(total, 'case')}, but {why}{lost}", step, again


def _all(total: int) -> str:
    return "the one case is" if total == 1 else f"all {total} cases are"


def _step(record: Record) -> str:
    name = outcome(record)
    oracle = f" by {record.oracle}" if record.oracle else ""
    told = "the diagnosis" if record.diagnosis else "the evidence"
    return {
        "fault not caught": f"fault {record.fault} changes nothing in this case, or no oracle sees it: find out which",
        "no longer as known": "give the entry's versions an upper bound: what it says no longer holds",
        "contradictory": "the record contradicts itself (see the notes): run the first case again",
        "bug": f"read {told} (flagged{oracle}), then run the first case alone",
        "bug: precision": f"find where precision is lost (flagged{oracle}), then run the first case alone",
        "wrong environment": "set the environment as the case asks, then run the first case again",
        "crash": "read the error, then run the first case alone",
        "hang": "read the stacks, then run the first case alone",
        "timeout": "see whether the first case hangs or is only slow: run it alone",
        "refused": "the target refuses this on purpose: choose another target, or take the case out of the plan",
        "skipped": "see the reasons: a skipped case is not green",
        "inconclusive": "run the first case alone at a higher precision",
    }.get(name, "run the first case alone")


def _pattern(records: Sequence[Record]) -> str | None:
    """Factor values that all failing cases have and no green one has; two cases on either side are needed."""
    bad = [r for r in records if not as_expected(r) and r.status not in ("not_run", "lost", "skipped")]
    good = [r for r in records if as_expected(r) and r.expectation is None]
    if len(bad) < 2 or len(good) < 2:
        return None
    points = {r.case: {"path": r.path, **r.factors} for r in [*bad, *good]}
    first = points[bad[0].case]
    shared = {k: v for k, v in first.items() if all(points[r.case].get(k) == v for r in bad)}
    telling = {k: v for k, v in shared.items() if any(points[r.case].get(k) != v for r in good)}
    if not telling or any(all(points[r.case].get(k) == v for k, v in telling.items()) for r in good):
        return None
    for key in list(telling):  # drop what is not needed to tell them apart
        rest = {k: v for k, v in telling.items() if k != key}
        if rest and not any(all(points[r.case].get(k) == v for k, v in rest.items()) for r in good):
            telling = rest
    return ", ".join(f"{k}={v}" for k, v in telling.items())


def _blind(loaded: Loaded, records: Sequence[Record]) -> tuple[str, ...]:
    """What a bug could hide behind in this run."""
    lines: list[str] = []
    silent = [r for r in records if r.verdict is None or r.status != "finished"]
    if silent:
        lines.append(f"{count(len(silent), 'case')} without a verdict: nothing is known of them")
    green = [r for r in records if as_expected(r) and r.expectation is None]
    numberless = [r for r in green if r.limit is None]
    if numberless:
        lines.append(f"{count(len(numberless), 'green case')} had no numeric check, only yes/no ones")
    lines += [*_invisible(green), *_loosest(green), *_dormant(green)]
    fixed = []
    for name in dict.fromkeys(n for r in records for n in r.factors):
        values = {r.factors.get(name) for r in records if r.verdict is not None}
        if len(values) == 1:
            fixed.append(f"{name}={values.pop()}")
    if fixed and len(records) > 1:
        more = f" and {len(fixed) - MOST_BLIND_FACTORS} more" if len(fixed) > MOST_BLIND_FACTORS else ""
        lines.append(f"anything that shows only at another value of {', '.join(fixed[:MOST_BLIND_FACTORS])}{more}")
    return tuple(lines)


def _invisible(green: Sequence[Record]) -> Iterator[str]:
    """Per precision, the largest relative error that could have hidden in a green case."""
    largest: dict[str, dict[str, tuple[float, str]]] = {}
    for record in green:
        oracles = largest.setdefault(explain.precision_of(record), {})
        for measured in record.measured:
            size = explain.seen(measured)
            if size > oracles.get(measured.oracle, (-1.0, ""))[0]:
                oracles[measured.oracle] = (size, measured.name)
    for precision, oracles in largest.items():
        parts = [
            f"{oracle} below {number(size)} ({name})" if math.isfinite(size) else f"{oracle}: anything in {name}"
            for oracle, (size, name) in oracles.items()
        ]
        if parts:
            yield f"relative errors{' at ' + precision if precision else ''}: {', '.join(parts)}"


def _loosest(green: Sequence[Record]) -> Iterator[str]:
    """The loosest limit of each check of which no tensor was recorded."""
    loosest: dict[tuple[str, str], float] = {}
    for record in green:
        told = {measured.oracle for measured in record.measured}
        for finding in record.findings:
            if finding.limit is not None and finding.oracle not in told:
                key = (finding.oracle, finding.unit or "")
                loosest[key] = max(loosest.get(key, 0.0), finding.limit)
    for (oracle, unit), limit in sorted(loosest.items()):
        yield f"{oracle}: nothing below {number(limit)}{' ' + unit if unit else ''} (the loosest limit of a green case)"


def _dormant(green: Sequence[Record]) -> Iterator[str]:
    """Classes of bugs that no green case could have shown."""
    if not green:
        return
    always = set.intersection(*({d.bug_class for d in r.dormant} for r in green))
    for reason, classes in explain.dormant(d for d in green[0].dormant if d.bug_class in always):
        yield f"{classes} of bugs in any case: {reason}"


def _oddities(loaded: Loaded) -> list[str]:
    run = loaded.run
    notes: list[str] = []
    if loaded.merge is not None:
        notes += [*loaded.merge.problems, *loaded.merge.notes]
    if run.end is not None and (
        run.end.reason != "complete" or (run.end.exit_code != 0 and all(map(as_expected, run.records)))
    ):
        message = f": {run.end.message}" if run.end.message and loaded.merge is None else ""
        notes.append(f"the run ended with reason {run.end.reason}, exit code {run.end.exit_code}{message}")
    versions = dict.fromkeys(segment.first.tiebench for segment in run.segments)
    if len(versions) > 1:
        notes.append(f"its parts were run by {len(versions)} versions of tiebench: {', '.join(versions)}")
    strangers = len(run.records) - len(run.plan.cases)
    if strangers > 0:
        notes.append(f"{count(strangers, 'case')} ran without being planned")
    prints = {r.environment for r in run.records if r.environment}
    if len(prints) > 1:
        notes.append(f"the cases ran in {len(prints)} different environments: {', '.join(sorted(prints))}")
    for path in sorted({r.path for r in run.records}):
        builds = {r.target for r in run.records if r.path == path}
        if len(builds) > 1:
            notes.append(f"the cases of {path} ran against {len(builds)} targets: {', '.join(sorted(builds))}")
    faults = [r for r in run.records if r.fault]
    if faults:
        notes.append(f"{count(len(faults), 'case')} ran with a bug put in on purpose: never green")
    patches = {r.patch for r in run.records if r.patch}
    if patches:
        notes.append(f"patched by the user: {', '.join(sorted(patches))}")
    late = [r for r in run.records if over_budget(r)]
    if late:
        names = ", ".join(r.case for r in late[:3]) + (" and others" if len(late) > 3 else "")
        notes.append(f"{count(len(late), 'case')} took longer than the case's own limit: {names}")
    used, budget = run.seconds, run.budget_seconds
    if used is not None and budget > 0 and used > budget:
        notes.append(f"the run went over its budget by {percent(used / budget - 1)}")
    again = [r for r in run.records if r.attempt > 1 and r.status != "not_run"]
    if again:
        notes.append(f"{count(len(again), 'case')} needed more than one attempt; the last one counts")
    return notes
