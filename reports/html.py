"""A run's report as one self-contained HTML page (`report.html`): no network, no script needed, light and dark.

All text goes through the template engine's autoescape after `clean`; a content security policy in the page forbids
everything but its own style and its one sorting script, by hash.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ci.records import EVENTS, Record, over_budget
from reports import course, explain, text
from reports.columns import headroom
from reports.explain import Group
from reports.load import flatten
from reports.summary import Summary, error_share, error_text, outcome, shown_rerun, unsaid

TEMPLATES = Path(__file__).parent / "templates"
GROUP = {
    "exact": "good",
    "rounding": "good",
    "known issue": "warn",
    "refused as expected": "warn",
    "not run": "none",
    "skipped": "warn",
    "inconclusive": "warn",
    "refused": "warn",
    "wrong environment": "warn",
    "running": "warn",
    "pending": "none",
}
MOST_STACK_CHARACTERS = 20_000
# Strip plot, in SVG user units.
LEFT, RIGHT, DOT, GAP, TOP = 112, 648, 4.0, 9.0, 26


def render(summary: Summary) -> str:
    """The whole page."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "clean": text.clean,
        "case": _breakable,
        "lines": lambda value: text.clean(value, newlines=True),
        "sentence": lambda value: text.sentence(text.clean(value)),
        "seconds": text.seconds,
        "number": text.number,
        "times": text.times,
        "size": text.size,
    }
    script = (TEMPLATES / "report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    plan = summary.plan
    return environment.get_template("report.html").render(
        s=summary,
        plan=plan,
        style=Markup((TEMPLATES / "report.css").read_text(encoding="utf-8")),  # our own file, no data in it
        script=Markup(script),  # our own file, no data in it
        script_hash=digest,
        counts=[(name, many, GROUP.get(name, "bad")) for name, many in summary.counts],
        failing=[_failing(group) for group in summary.groups],
        cleared=[(record, explain.because(record), explain.escalation(record)) for record in summary.cleared],
        headrooms=explain.headrooms(summary.green),
        known=explain.known((known.entry, known.records) for known in summary.known),
        known_cases=sum(len(known.records) for known in summary.known),
        rows=[_row(i, record) for i, record in enumerate(summary.records)],
        strip=_strip(summary),
        time=_time(summary),
        environment=flatten(summary.loaded.environment),
        count=text.count,
        headroom=headroom,
        rerun=shown_rerun,
        order=course.order,
        total=len(summary.not_run) + sum(r.status == "lost" for r in summary.records),
        raw=str(summary.loaded.run.directory / EVENTS),
    )


def _breakable(case: str) -> Markup:
    """A case id that may be broken after its commas."""
    return Markup(",<wbr>").join(text.clean(case).split(","))  # `join` escapes the parts


def _failing(group: Group) -> dict[str, Any]:
    record = group.first
    first, second = explain.leading(record)
    return {
        "r": record,
        "first": first,
        "second": second,
        "others": [(other, error_text(other), shown_rerun(other)) for other in group.others],
        "outcome": outcome(record),
        "group": GROUP.get(outcome(record), "bad"),
        "error": error_text(record) if record.limit is not None else "",
        "guesses": explain.guesses(record),
        "escalation": explain.escalation(record),
        "tensors": explain.tensors(record),
        "more": explain.beyond(record) - len(explain.worst(record)),
        "blindness": explain.blindness(record),
        "unseen": explain.unseen(record),
        "dormant": explain.dormant(record.dormant),
        "findings": unsaid(record),
        "command": shown_rerun(record),
        "collectives": course.cut(record.collectives or "", MOST_STACK_CHARACTERS),
        "stacks": course.cut(record.stacks or "", MOST_STACK_CHARACTERS),
        "order": course.order(record),
    }


def _row(index: int, record: Record) -> dict[str, Any]:
    share, wall, budget = error_share(record), record.wall_seconds, record.budget_seconds
    return {
        "r": record,
        "index": index,
        "outcome": outcome(record),
        "group": GROUP.get(outcome(record), "bad"),
        "cleared": explain.cleared(record),
        "error": error_text(record),
        "headroom": headroom(record),
        "share": None if share is None else _percent(share),
        "beyond": share is not None and share > 1,
        "used": None if wall is None or not budget else _percent(wall / budget),
        "late": over_budget(record),
    }


def _percent(share: float) -> float:
    return round(100 * min(max(share, 0.0), 1.0), 1) if not math.isnan(share) else 100.0


@dataclass(frozen=True)
class Dot:
    """One case in the strip plot."""

    x: float
    y: float
    group: str
    title: str
    index: int


@dataclass(frozen=True)
class Strip:
    """Strip plot of error as a share of its limit, one dot a case, one row a path; coordinates in SVG user units."""

    dots: list[Dot]
    rows: list[tuple[float, str]]  # y of the base line, path
    ticks: list[tuple[float, str]]
    limit: float
    width: float
    height: float
    none: int  # cases without a numeric check


def _strip(summary: Summary) -> Strip | None:
    shares = [(i, r, share) for i, r in enumerate(summary.records) if (share := error_share(r)) is not None]
    if not shares:
        return None
    finite = [s for _, _, s in shares if 0 < s < math.inf]
    low = math.floor(math.log10(min([*finite, 0.1])) - 1e-9)
    high = math.ceil(math.log10(max([*finite, 1.0])) + 0.3)
    low, high = max(low, -8), min(high, 8)  # further out, a dot sits on the edge: its title has the number

    def place(share: float) -> float:
        if share <= 0:
            return float(LEFT)
        decade = high if share == math.inf else min(max(math.log10(share), low), high)
        return LEFT + (RIGHT - LEFT) * (decade - low) / (high - low)

    by_path: dict[str, dict[int, list[tuple[int, Record, float]]]] = defaultdict(lambda: defaultdict(list))
    for index, record, share in shares:
        by_path[record.path][round((place(share) - LEFT) / GAP)].append((index, record, share))
    dots: list[Dot] = []
    rows: list[tuple[float, str]] = []
    y = float(TOP)
    for path, bins in by_path.items():
        deepest = max(len(stack) for stack in bins.values())
        step = min(GAP, 90 / deepest)
        y += (deepest - 1) * step + 2 * GAP
        rows.append((y, text.shorten(text.clean(path), 16)))
        for slot, stack in bins.items():
            for level, (index, record, _) in enumerate(sorted(stack, key=lambda item: outcome(item[1]))):
                title = (
                    f"{record.case}: {outcome(record)}, {error_text(record)}, headroom {text.times(headroom(record))}"
                )
                group = GROUP.get(outcome(record), "bad")
                dots.append(Dot(LEFT + slot * GAP, round(y - level * step, 1), group, title, index))
        y += GAP
    every = max(1, math.ceil((high - low) / 6))
    ticks = [(place(10.0**decade), _decade(decade)) for decade in range(low, high + 1) if (decade % every) == 0]
    missing = len(summary.records) - len(shares)
    return Strip(dots, rows, ticks, place(1.0), RIGHT + 24, y + 34, missing)


def _decade(power: int) -> str:
    return {0: "limit", 1: text.times(10), 2: text.times(100), -1: "1/10", -2: "1/100"}.get(power, f"1e{power}")


@dataclass(frozen=True)
class Segment:
    """One part of the time bar."""

    label: str
    seconds: float
    percent: float
    kind: str  # a class of the style sheet


def _time(summary: Summary) -> list[Segment]:
    """Where the run's time went: its cases by path, their verdicts, what lies between, and the rest of the budget."""
    spent: dict[str, float] = defaultdict(float)
    judging = 0.0
    for record in summary.records:
        if record.wall_seconds is not None and math.isfinite(record.wall_seconds):
            cost = min(max(record.verdict_seconds or 0.0, 0.0), record.wall_seconds)
            spent[record.path] += record.wall_seconds - cost
            judging += cost
    if not spent:
        return []
    parts = [(text.clean(path), total, f"part{i % 4}") for i, (path, total) in enumerate(spent.items())]
    parts.append(("verdicts", judging, "judging"))
    cases = sum(spent.values()) + judging
    whole = max(summary.elapsed_seconds or 0.0, cases)
    parts.append(("between the cases", whole - cases, "between"))
    parts.append(("unused", summary.budget_seconds - whole, "unused"))
    scale = max(whole, summary.budget_seconds) or 1.0
    return [Segment(label, total, round(100 * total / scale, 2), kind) for label, total, kind in parts if total > 0]
