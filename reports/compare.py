"""`tiebench compare BASE HEAD`: what a change did, as one pull-request comment and as a gate. Fails closed.

Exit code 0 needs all of it: both runs can be read and are two runs; the head ran to its end, has every case of the
base and of its own plan, and at least one that is green; no case fails that did not fail in the same way in the base;
no step time regressed. 1 is anything else, 2 means that a run could not be read, so that nothing was compared.
"""

from __future__ import annotations

import math
import shlex
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ci.records import EVENTS, LogError, Record, Run
from reports.explain import as_expected, classes, cleared, guesses, signature
from reports.load import Loaded, flatten, load, tested
from reports.noise import LEAST_SAMPLES, UNMEASURED, Speed, judge, samples, together
from reports.summary import by_severity, error_share, error_text, outcome, shown_rerun
from reports.text import MISSING, count, md, md_block, md_code, md_table, percent, seconds, times

MARKER = "<!-- tiebench compare -->"  # CI finds and edits the one comment that begins with it
FACTOR = 2.0  # error / limit changed by more than this is listed
SMALL = 0.01  # below this share of the limit no change of the error is worth a line
MOST_CHARACTERS = 65_000  # GitHub refuses comments above 65536
MOST_UNTOLD = 3  # rows of single cases where no case has enough samples for a verdict
CAPS = (100, 30, 10, 4)  # rows a table, tried until the comment fits
INCOMPLETE = ("lost", "not_run")


@dataclass(frozen=True)
class Comparison:
    """The comment and the gate."""

    markdown: str
    exit_code: int
    headline: str


@dataclass(frozen=True)
class _Pair:
    """One case on both sides; None where a side does not have it."""

    case: str
    base: Record | None
    head: Record | None

    @property
    def kind(self) -> str:
        """missing, incomplete, failed (new), known (fails in the base in the same way), fixed, new or both (green)."""
        if self.head is None:
            return "missing"
        if self.head.status in INCOMPLETE:
            return "incomplete"
        if not as_expected(self.head):
            return "known" if self.base is not None and _failure(self.base) == _failure(self.head) else "failed"
        if self.base is None:
            return "new"
        return "both" if as_expected(self.base) else "fixed"


@dataclass(frozen=True)
class _Facts:
    """All that the comment is made of."""

    base: Loaded
    head: Loaded
    pairs: tuple[_Pair, ...]
    speeds: tuple[Speed, ...]
    groups: tuple[Speed, ...]
    has_noise_runs: bool
    gaps: tuple[str, ...]  # why the head is not complete
    command: str

    def of(self, *kinds: str) -> list[_Pair]:
        return [pair for pair in self.pairs if pair.kind in kinds]

    def judged(self, verdict: str) -> list[Speed]:
        return [speed for speed in (*self.groups, *self.speeds) if speed.verdict == verdict]


def compare(base: Path, head: Path, noise: Sequence[Path] = ()) -> Comparison:
    """Compare two run directories; never raises on bad ones.

    Args:
        noise: further runs of the base, on the same machine (A/A): they measure the noise between runs.
    """
    command = shlex.join(
        ["tiebench", "compare", str(base), str(head), *(part for d in noise for part in ("--noise", str(d)))]
    )
    loaded: list[Loaded] = []
    for role, directory in [("base", base), ("head", head), *(("noise", d) for d in noise)]:
        try:
            loaded.append(load(directory))
        except LogError as error:
            return _nothing(f"the {role} run cannot be read: {error}", command)
    before, after, *again = loaded
    if base.resolve() == head.resolve() or before.run.plan == after.run.plan:
        return _nothing(f"base and head are one and the same run ({after.run.plan.run_id})", command)
    facts = _facts(before, after, again, command)
    headline, step, code = _verdict(facts)
    for cap in CAPS:
        text = _render(facts, headline, step, code, cap)
        if len(text.encode()) <= MOST_CHARACTERS:
            return Comparison(text, code, headline)
    short = [
        MARKER,
        _first_line(headline, step, code),
        "The full comparison is too long for a comment:",
        md_block(command, "sh"),
    ]
    return Comparison("\n\n".join(short) + "\n", code, headline)


def _nothing(reason: str, command: str) -> Comparison:
    headline = f"NOT COMPARED: {reason}"
    parts = [MARKER, _first_line(headline, "make the run again, then compare", 2), md_block(command, "sh")]
    return Comparison("\n\n".join(parts) + "\n", 2, headline)


def _facts(before: Loaded, after: Loaded, again: Sequence[Loaded], command: str) -> _Facts:
    old = {r.case: r for r in before.run.records}
    new = {r.case: r for r in after.run.records}
    pairs = tuple(_Pair(case, old.get(case), new.get(case)) for case in dict.fromkeys([*new, *old]))
    both = [(p.case, p.base, p.head) for p in pairs if p.kind == "both" and p.base and p.head]
    others = [{r.case: samples(r.step_seconds) for r in run.run.records if as_expected(r)} for run in again]
    speeds, ratios = [], defaultdict(list)
    noise: dict[str, list[list[float]]] = defaultdict(lambda: [[] for _ in others])
    for case, b, h in both:
        steps = samples(b.step_seconds)
        extra = [other[case] for other in others if other.get(case)]
        speed = judge(case, steps, samples(h.step_seconds), extra)
        if speed is None:
            continue
        speeds.append(speed)
        ratios[h.path].append(1 + speed.change)
        for place, other in enumerate(others):
            aa = judge(case, steps, other.get(case, []))
            if aa is not None:
                noise[h.path][place].append(1 + aa.change)
    groups = [
        together(f"all {count(len(values), 'case')} of {path}", values, noise[path]) for path, values in ratios.items()
    ]
    return _Facts(
        base=before,
        head=after,
        pairs=pairs,
        speeds=tuple(speeds),
        groups=tuple(g for g in groups if g is not None and g.n[0] >= LEAST_SAMPLES),
        has_noise_runs=bool(again),
        gaps=_gaps(after.run),
        command=command,
    )


def _gaps(run: Run) -> tuple[str, ...]:
    """Why a run is not complete; empty where it is."""
    gaps = []
    if not run.records:
        gaps.append("the head's plan has no case")
    if run.end is None:
        gaps.append("the head is still going" if run.running else "the head was killed")
    elif run.end.reason != "complete":
        gaps.append(f"the head ended early ({run.end.reason})" + (f": {run.end.message}" if run.end.message else ""))
    elif run.end.exit_code != 0 and all(map(as_expected, run.records)):
        gaps.append(f"the head's cases are green but it ended with exit code {run.end.exit_code}: {run.end.message}")
    if run.torn:
        gaps.append("the head's last line is cut off")
    if run.damage:
        gaps.append(f"the head's record log is damaged ({run.damage[0]})")
    return tuple(gaps)


def _failure(record: Record) -> tuple[str, str | None]:
    """What makes two failures the same failure."""
    return outcome(record), record.oracle


def _verdict(facts: _Facts) -> tuple[str, str, int]:
    """Headline, next step, exit code."""
    failed, missing = facts.of("failed"), facts.of("missing", "incomplete")
    slower, known = facts.judged("regression"), facts.of("known")
    problems = []
    newly = [pair for pair in failed if pair.base is None or as_expected(pair.base)]
    if newly:
        problems.append(f"{count(len(newly), 'case')} newly not as expected")
    if other := len(failed) - len(newly):
        problems.append(f"{count(other, 'case')} not as expected in another way than in the base")
    if missing:
        problems.append(f"{count(len(missing), 'case')} without a result in the head")
    if facts.gaps:
        problems.append(facts.gaps[0])
    if slower:
        problems.append(f"{count(len(slower), 'regression')} of the step time")
    if facts.pairs and not facts.of("both", "fixed", "new"):
        problems.append("no case of the head is as expected: nothing was measured")
    elif not any(pair.base and pair.head for pair in facts.pairs):
        problems.append("base and head have no case in common")
    if failed:
        step = "read the evidence of the first case and run it alone"
    elif missing or facts.gaps:
        step = "run the head again: what is missing is not green"
    elif slower:
        step = "run both sides again; if it stays slower, profile the first case"
    else:
        step = "nothing to do"
    if problems:
        return (
            "RED: " + "; ".join(problems),
            step if step != "nothing to do" else "compare against a run of the same plan",
            1,
        )
    fixed = facts.of("fixed")
    extra = [f"{len(fixed)} fixed" if fixed else "", f"{len(known)} still failing as in the base" if known else ""]
    more = f" ({', '.join(filter(None, extra))})" if any(extra) else ""
    speed = (
        "no step time regressed"
        if any(s.verdict != "insufficient data" for s in facts.speeds)
        else "insufficient data on step times"
    )
    return f"GREEN: nothing new fails in {count(len(facts.pairs), 'case')}{more}, {speed}", step, 0


def _first_line(headline: str, step: str, code: int) -> str:
    mark = {0: "✅", 1: "❌"}.get(code, "⚠️")
    return f"{mark} **{md(headline)}.** Next: {md(step)}."


def _render(facts: _Facts, headline: str, step: str, code: int, cap: int) -> str:
    base, head = facts.base.run.plan, facts.head.run.plan
    notes = [*facts.gaps[1:], *(f"base: {n}" for n in facts.base.notes), *(f"head: {n}" for n in facts.head.notes)]
    if base.plan != head.plan:
        notes.append(f"base ran plan {base.plan}, head ran plan {head.plan}")
    if facts.base.run.end is None:
        what = "is still going" if facts.base.run.running else "was killed"
        notes.append(f"the base {what}: what it lacks cannot be compared")
    parts = [
        MARKER,
        _first_line(headline, step, code),
        f"Plan {md_code(head.plan)}: base {md_code(tested(facts.base.run))} (run {md_code(base.run_id)}), "
        f"head {md_code(tested(facts.head.run))} (run {md_code(head.run_id)})",
        "\n".join(f"- {md(note)}" for note in notes[:cap]),
        _failures(facts, cap),
        _numerics(facts, cap),
        _speed(facts, cap),
        _environments(facts, cap),
        _unchanged(facts, cap),
        _raw(facts),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _failures(facts: _Facts, cap: int) -> str:
    worst = sorted(facts.of("failed"), key=lambda p: by_severity(p.head) if p.head else 0)
    gone = facts.of("missing", "incomplete")
    known = facts.of("known")
    parts = []
    if worst or gone:
        alike: dict[tuple[str, ...], list[_Pair]] = defaultdict(list)
        for pair in [*worst, *gone]:
            looks = signature(pair.head) if pair.head else ()
            alike[(pair.kind, _said(pair.base), *looks)].append(pair)
        rows = [_failed_row(pairs[0], len(pairs) - 1) for pairs in alike.values()]
        parts.append(
            "### Failed, timed out, lost, skipped or missing\n\n"
            + _capped(["case", "base", "head", "evidence"], rows, cap)
        )
        rest = [
            [md_code(pair.case, table=True), _said(pair.base), _said(pair.head), md_code(pairs[0].case, table=True)]
            for pairs in alike.values()
            for pair in pairs[1:]
        ]
        if rest:
            title = f"{count(len(rest), 'case')} like one of these"
            parts.append(_fold(title, _capped(["case", "base", "head", "like"], rest, cap)))
        first, *others = [_command(pair, facts.head.run.plan.options) for pair in [*worst, *gone][:cap]]
        parts.append("The first one alone:\n\n" + md_block(first, "sh"))
        if others:
            parts.append(_fold("Commands for the others", md_block("\n".join(others), "sh")))
    if known:
        rows = [
            [md_code(p.case, table=True), _said(p.head), md(p.head.diagnosis or p.head.evidence, 200)]
            for p in known
            if p.head
        ]
        title = f"{count(len(rows), 'case')} still failing as in the base"
        parts.append(_fold(title, _capped(["case", "head", "evidence"], rows, cap)))
    return "\n\n".join(parts)


def _failed_row(pair: _Pair, alike: int) -> list[str]:
    """One failure and, where `alike` others look the same, their number."""
    shown = pair.head or pair.base
    assert shown is not None
    evidence = "the head has no such case" if pair.head is None else shown.diagnosis or shown.evidence
    flagged = f"**{md(shown.oracle)}**: " if pair.head is not None and shown.oracle else ""
    likely = f" Looks like {md(classes(guesses(shown)), 200)}." if pair.head is not None and shown.guesses else ""
    case = md_code(pair.case, table=True) + (f" and {alike} alike" if alike else "")
    return [case, _said(pair.base), _said(pair.head), flagged + md(evidence, 400) + likely]


def _command(pair: _Pair, options: str) -> str:
    """One line that runs the case alone with the head's target and patch, which a missing case has no record of."""
    if pair.head is not None:
        return shown_rerun(pair.head).replace("\n", " ")
    return f"tiebench run --case {shlex.quote(pair.case)} {options}".strip().replace("\n", " ")


def _said(record: Record | None) -> str:
    return MISSING if record is None else md(outcome(record))


def _numerics(facts: _Facts, cap: int) -> str:
    rows: list[tuple[float, list[str]]] = []
    for pair in facts.of("fixed", "both"):
        old, new = pair.base, pair.head
        assert old is not None
        assert new is not None
        factor = _factor(old, new)
        if pair.kind == "fixed":
            change = "fixed"
        elif old.verdict != new.verdict:
            change = f"{old.verdict} → {new.verdict}"
        elif factor is not None and old.error_of != new.error_of:
            change = f"{times(factor)} (was {old.error_of}, now {new.error_of})"
        elif factor is not None:
            change = times(factor)
        else:
            continue
        cells = [md_code(pair.case, table=True), _number(old), _number(new), md(change)]
        rows.append((-(error_share(new) or 0.0), cells))
    if not rows:
        return ""
    rows.sort(key=lambda row: row[0])
    table = _capped(
        ["case", "base: error / limit", "head: error / limit", "error / limit, factor"],
        [cells for _, cells in rows],
        cap,
    )
    return f"### Numerics that changed\n\n{table}"


def _number(record: Record) -> str:
    said = md(outcome(record)) + (f" at {md(higher)}" if (higher := cleared(record)) else "")
    return f"{said}, {md(error_text(record))}" if record.limit is not None else said


def _factor(old: Record, new: Record) -> float | None:
    """Factor on the error's share of its limit, None where it is not worth a line."""
    before, after = error_share(old), error_share(new)
    if before is None or after is None or max(before, after) < SMALL or before == after:
        return None
    factor = after / before if before > 0 and math.isfinite(before) else math.inf
    return factor if factor > FACTOR or factor < 1 / FACTOR else None


def _speed(facts: _Facts, cap: int) -> str:
    head = ["case", "base", "head", "change", "99% interval, n", "noise floor", "verdict"]
    slower = sorted(facts.judged("regression"), key=lambda s: -s.change)
    faster = sorted(facts.judged("improvement"), key=lambda s: s.change)
    parts = []
    for title, speeds in (("Slower", slower), ("Faster", faster)):
        if speeds:
            parts.append(f"### {title}\n\n" + _capped(head, [_speed_row(s) for s in speeds], cap))
    rest = [s for s in (*facts.groups, *facts.speeds) if s.verdict in ("within noise", "insufficient data")]
    if rest:
        few = [s for s in facts.speeds if s.verdict == "insufficient data"]
        quiet = [s for s in facts.speeds if s.verdict == "within noise"]
        said = []
        if quiet:
            said.append(f"{count(len(quiet), 'case')} within noise")
        if few:
            most = max(min(s.n) for s in few)
            said.append(
                f"{count(len(few), 'case')} with insufficient data ({most} samples a side, {LEAST_SAMPLES} needed)"
            )
        shown = min(cap, len(rest) - len(few) + MOST_UNTOLD) if len(few) == len(facts.speeds) else cap
        table = _capped(head, [_speed_row(s) for s in rest], shown)
        parts.append(_fold("Step times: " + "; ".join(said or ["groups only"]), table))
    if parts and not facts.has_noise_runs:
        parts.append(
            f"<sub>Noise between runs was not measured: {UNMEASURED:.0%} is assumed. "
            "Further runs of the base, on this machine, measure it.</sub>"
        )
    return "\n\n".join(parts)


def _speed_row(speed: Speed) -> list[str]:
    name = md(speed.name) if math.isnan(speed.base) else md_code(speed.name, table=True)
    n = f"n = {speed.n[0]}" if speed.n[0] == speed.n[1] else f"n = {speed.n[0]}, {speed.n[1]}"
    interval = n if math.isnan(speed.low) else f"{percent(speed.low)} to {percent(speed.high)}, {n}"
    floor = MISSING if math.isnan(speed.floor) else f"{speed.floor * 100:.1f}%"
    return [name, seconds(speed.base), seconds(speed.head), percent(speed.change), interval, floor, speed.verdict]


def _environments(facts: _Facts, cap: int) -> str:
    base, head = flatten(facts.base.environment), flatten(facts.head.environment)
    if not base or not head:
        whose = "neither side's" if not base and not head else "the head's" if base else "the base's"
        return f"### Environment\n\nNot compared: {whose} environment could{'' if whose[0] == 'n' else ' not'} be read."
    keys = [key for key in dict.fromkeys([*base, *head]) if base.get(key) != head.get(key)]
    if not keys:
        return "Environments are equal."
    rows = [
        [md_code(key, table=True), md_code(base.get(key), table=True), md_code(head.get(key), table=True)]
        for key in keys
    ]
    return "### Difference of the environments\n\n" + _capped(["setting", "base", "head"], rows, cap)


def _unchanged(facts: _Facts, cap: int) -> str:
    same = [
        p
        for p in facts.of("both")
        if p.base and p.head and p.base.verdict == p.head.verdict and _factor(p.base, p.head) is None
    ]
    fresh = facts.of("new")
    parts = []
    for title, pairs in (("unchanged", same), ("new and green", fresh)):
        if pairs:
            rows = [[md_code(p.case, table=True), _number(p.head)] for p in pairs if p.head]
            parts.append(_fold(f"{count(len(rows), 'case')} {title}", _capped(["case", "head"], rows, cap)))
    return "\n\n".join(parts)


def _raw(facts: _Facts) -> str:
    files = ", ".join(md_code(str(side.run.directory / EVENTS)) for side in (facts.base, facts.head))
    command = f"{facts.head.run.plan.command}\n{facts.command}"
    return f"Raw data: {files}. The head's run and this comparison again:\n\n{md_block(command, 'sh')}"


def _capped(head: list[str], rows: list[list[str]], cap: int) -> str:
    left = len(rows) - cap
    return md_table(head, rows[:cap]) + (f"\n\n… and {left} more" if left > 0 else "")


def _fold(title: str, body: str) -> str:
    return f"<details><summary>{md(title)}</summary>\n\n{body}\n\n</details>"
