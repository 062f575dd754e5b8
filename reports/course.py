"""How a run went: still going, killed, resumed or merged; planned and used time; what was left out and why.

All text is raw: each rendering escapes it. A log of an older schema tells less of it, and nothing breaks.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timezone

from ci.pieces import Merge, used_phases
from ci.records import RESULTS, SCHEMA, Forecast, Record, ResumedRow, Run, Segment, instant
from reports.explain import Table
from reports.text import MISSING, count, seconds

PHASES = {"provisioning": "provisioning", "setup": "set-up", "startup": "start-up", "cases": "cases"}  # in their order
REPORT = "report"  # comes after the end row: nothing in the log says how long it took
FULL = 0.9  # share of the budget from which on there is a warning
SOON = 30  # days before the budget is hit from which on there is a warning
MOST_OPEN = 3
# (status, reason) -> what became of such a case, in the order in which they are told.
GAPS: dict[tuple[str, str | None], str] = {
    ("not_run", "running"): "running now",
    ("not_run", "pending"): "still to come",
    ("lost", "given up"): "given up: the whole run was killed too often while it ran",
    ("lost", "killed"): "lost: the run was killed while it ran",
    ("lost", "interrupted"): "lost: the run was interrupted while it ran",
    ("lost", "error"): "lost: the run stopped on an error while it ran",
    ("lost", "budget"): "lost: the budget ended while it ran",
    ("not_run", "budget"): "left out by the budget",
    ("not_run", "interrupted"): "not run: the run was interrupted first",
    ("not_run", "error"): "not run: the run stopped on an error first",
    ("not_run", "killed"): "not run: the run was killed first",
}
WITHOUT_REASON = {"lost": "lost", "not_run": "not run, and no reason was recorded"}


@dataclass(frozen=True)
class Gap:
    """Cases that have no result for one and the same reason, in plan order; `what` says which reason."""

    what: str
    records: tuple[Record, ...]

    @property
    def first(self) -> Record:
        """The first of them."""
        return self.records[0]

    @property
    def evidence(self) -> str:
        """What the first one's record says; empty where `what` is all there is to say."""
        return "" if self.first.reason in ("running", "pending") else self.first.evidence

    @property
    def line(self) -> str:
        """How many, why, and which first."""
        many = f"{count(len(self.records), 'case')} {self.what}"
        return f"{many}; {'first' if len(self.records) > 1 else 'it is'} {self.first.case}"


@dataclass(frozen=True)
class Course:
    """How a run went.

    Args:
        standing: what the run is, where it is not simply one that ended by itself; else empty.
        gaps: cases without a result, by reason.
        phases: planned and used time by phase; segments: one row for each process that wrote; pieces: one for each
            merged run. None where there is nothing to tell.
        forecast: how long it was expected to take, for people; empty without one.
        warnings: one line each.
    """

    standing: str
    gaps: tuple[Gap, ...]
    phases: Table | None
    segments: Table | None
    pieces: Table | None
    forecast: str
    warnings: tuple[str, ...]

    @property
    def tells(self) -> bool:
        """There is something to say beyond the time that was used."""
        return bool(self.gaps or self.phases or self.segments or self.pieces or self.forecast)


def course(run: Run, merge: Merge | None = None) -> Course:
    """How a run went."""
    found = _forecast(run)
    return Course(
        standing=_standing(run, merge),
        gaps=gaps(run.records),
        phases=_phases(run, merge),
        segments=_segments(run),
        pieces=_pieces(merge),
        forecast=found.text if found else "",
        warnings=tuple(_warnings(run, found)),
    )


def progress(run: Run) -> str:
    """How many cases are done, open, to come, lost and not run, for people."""
    counted = Counter(map(_place, run.records))
    done = f"{counted['done']} of {len(run.records)} done"
    rest = [
        f"{counted[place]} {place}" for place in ("open", "to come", "given up", "lost", "not run") if counted[place]
    ]
    return ", ".join([done, *rest])


def _place(record: Record) -> str:
    if record.status in RESULTS:
        return "done"
    if record.reason in ("running", "pending"):
        return "open" if record.reason == "running" else "to come"
    return "given up" if record.reason == "given up" else record.status.replace("_", " ")


def gaps(records: Iterable[Record]) -> tuple[Gap, ...]:
    """Cases without a result, by reason."""
    found: dict[tuple[str, str | None], list[Record]] = defaultdict(list)
    for record in records:
        if record.status not in RESULTS:
            found[record.status, record.reason].append(record)
    keys = [*(key for key in GAPS if key in found), *(key for key in found if key not in GAPS)]
    return tuple(Gap(GAPS.get(key) or _unnamed(*key), tuple(found[key])) for key in keys)


def _unnamed(status: str, reason: str | None) -> str:
    return f"{status.replace('_', ' ')} ({reason})" if reason else WITHOUT_REASON.get(status, status)


def resumable(run: Run) -> bool:
    """Whether `tiebench run --resume` takes it: the same schema, no damage, one fault a case, and something to do, be
    it only the end row."""
    many = Counter(record.case for record in run.records)
    whole = run.plan.schema == SCHEMA and not run.damage and max(many.values(), default=0) == 1
    return whole and not run.running and (bool(run.todo) or run.end is None or run.end.reason != "complete")


def resume_command(run: Run) -> str:
    """Command that goes on with a run."""
    return f"tiebench run --resume {shlex.quote(str(run.directory))}"


def report_command(run: Run) -> str:
    """Command that reports on a run once more."""
    return f"tiebench report {shlex.quote(str(run.directory))}"


def _standing(run: Run, merge: Merge | None) -> str:
    lines = []
    if run.running:
        opened = [r.case for r in run.records if r.reason == "running"]
        which = (
            f" ({'; '.join(opened[:MOST_OPEN])}{' and others' if len(opened) > MOST_OPEN else ''})" if opened else ""
        )
        since = run.segments[-1].started_at if run.segments else run.plan.started_at
        lines.append(f"This run is still going: {progress(run)}, since {since}{which}")
    elif run.killed:
        lines.append(f"This run was killed: it has no end, and no process here has its log open; {progress(run)}")
    if run.resumed:
        parts = [f"{seconds(s.seconds)} from {s.started_at} ({ending(s, run)})" for s in run.segments]
        many = len(run.resumed)
        how = "once" if many == 1 else f"{many} times"
        told = ", then ".join(parts) if len(parts) <= 3 else f"{parts[0]}, …, at last {parts[-1]}"
        lines.append(f"This run was resumed {how}: {told}")
    if merge is not None:
        lines.append(f"This run is merged from {merge.text}")
    return ". ".join(lines)


def ending(segment: Segment, run: Run) -> str:
    """How a segment ended, in one word."""
    if segment.end is not None:
        return segment.end.reason
    return "still going" if run.running and segment is run.segments[-1] else "killed"


def _segments(run: Run) -> Table | None:
    if len(run.segments) < 2:
        return None
    rows = []
    for number, segment in enumerate(run.segments, 1):
        first = segment.first
        cells = [str(number), segment.started_at, seconds(segment.seconds), seconds(first.budget_seconds)]
        done = sum(record.status in RESULTS for record in segment.records)
        rows.append((*cells, ending(segment, run), str(done), first.tiebench))
    head = ("part", "started", "took", "budget", "ended", "results", "tiebench")
    return Table(head, tuple(rows), frozenset({0, 2, 3, 5}))


def _pieces(merge: Merge | None) -> Table | None:
    if merge is None or not merge.pieces:
        return None
    rows = [
        (
            piece.name,
            piece.plan,
            piece.started_at,
            seconds(piece.seconds),
            seconds(piece.budget_seconds),
            piece.ended,
            f"{piece.results} of {piece.cases}",
            piece.tiebench,
        )
        for piece in merge.pieces
    ]
    head = ("piece", "plan", "started", "took", "budget", "ended", "results", "tiebench")
    return Table(head, tuple(rows), frozenset({3, 4, 6}), frozenset({0}))


def _phases(run: Run, merge: Merge | None) -> Table | None:
    """Planned at the start, used in all parts together, and the share of their budgets."""
    planned = run.plan.phases
    used = used_phases(run)
    if not planned and not any(s.end is not None and s.end.phases for s in run.segments):
        return None  # an older log
    names = [*PHASES, *(n for n in (*planned, *used) if n not in PHASES and n != REPORT)]
    if REPORT in planned or REPORT in used:
        names.append(REPORT)
    budget = sum(piece.budget_seconds for piece in merge.pieces) if merge is not None else run.budget_seconds
    rows = []
    for name in dict.fromkeys(names):
        if name in planned or name in used:
            told = (PHASES.get(name, name), planned.get(name), used.get(name))
            rows.append(_row(*told, budget))
    whole = sum(planned.values()) if planned else None
    rows.append(_row("together", whole, sum(used.values()) if used else None, budget))
    return Table(("phase", "planned", "used", "of the budget"), tuple(rows), frozenset({1, 2, 3}))


def _row(name: str, planned: float | None, used: float | None, budget: float) -> tuple[str, ...]:
    share = f"{used / budget:.0%}" if used is not None and math.isfinite(used) and budget > 0 else MISSING
    return name, seconds(planned), seconds(used), share


def _forecast(run: Run) -> Forecast | None:
    """The latest one: that of a resumed part speaks of what was left."""
    return next((s.first.forecast for s in reversed(run.segments) if s.first.forecast is not None), None)


def _warnings(run: Run, found: Forecast | None) -> Iterable[str]:
    if found is not None:
        owner = next(s for s in reversed(run.segments) if s.first.forecast is found)
        budget = found.budget_seconds or owner.first.budget_seconds
        what = "what was left" if isinstance(owner.first, ResumedRow) else "the run"
        if 0 < budget < found.expected_seconds:
            yield (
                f"{what} was expected to take {seconds(found.expected_seconds)}, more than its budget of "
                f"{seconds(budget)}: raise the budget, split the plan (--shard), or take cases out"
            )
        elif (days := _days(found.budget_hit_on, owner.started_at)) is not None and days <= SOON:
            yield (
                f"the budget will be hit about {found.budget_hit_on}, {count(days, 'day')} after this run: raise it, "
                "split the plan (--shard), or take cases out"
            )
        took = owner.seconds
        if owner.end is not None and owner.end.reason == "complete" and took is not None and took > found.high > 0:
            yield f"it took {seconds(took)}, longer than nine of ten runs should ({seconds(found.high)})"
    used, budget = run.seconds, run.budget_seconds
    if used is not None and FULL * budget <= used <= budget:
        yield f"{used / budget:.0%} of the budget was used: a little more, and cases are left out"


def _days(day: str | None, start: str) -> int | None:
    """Days from a run's start to a day; None where one of them cannot be read."""
    begin = instant(start)
    try:
        hit = date.fromisoformat(day or "")
    except ValueError:
        return None
    if begin is None:
        return None
    try:
        return max((hit - datetime.fromtimestamp(begin, timezone.utc).date()).days, 0)
    except (OverflowError, OSError, ValueError):
        return None


def order(record: Record) -> str:
    """Why a case stood where it stood in the order; empty where that is not recorded."""
    return f"its place in the order: {record.why}" if record.why else ""


def cut(text: str, most: int) -> str:
    """Whole lines of a block, at most so many characters, with its end marked."""
    if len(text) <= most:
        return text
    lines = text[:most].splitlines(keepends=True)
    kept = "".join(lines[:-1]) if len(lines) > 1 else text[:most]
    return f"{kept.rstrip()}\n… {len(text) - len(kept)} more characters, in the record log"


def lines_of(text: str, most: int) -> Sequence[str]:
    """The first lines of a block, with its end marked."""
    found = text.splitlines()
    return found if len(found) <= most else [*found[:most], f"… {count(len(found) - most, 'more line')}, in report.md"]
