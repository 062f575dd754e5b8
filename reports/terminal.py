"""A run's report as a terminal table; narrow terminals drop columns, never rows."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ci.records import Record
from reports import course, explain
from reports.columns import headroom
from reports.explain import Group
from reports.summary import Known, Summary, error_text, outcome, shown_rerun
from reports.text import clean, count, number, seconds, shorten, size, times

STYLES = {
    "exact": "green",
    "rounding": "green",
    "known issue": "yellow",
    "refused as expected": "yellow",
    "inconclusive": "yellow",
    "refused": "yellow",
    "wrong environment": "bold yellow",
    "skipped": "yellow",
    "not run": "dim",
    "running": "bold cyan",
    "pending": "dim",
    "green": "bold green",
    "incomplete": "bold yellow",
}
BAD = "bold red"
NARROW, MEDIUM, WIDE, VERY_WIDE = 72, 100, 130, 150  # columns of the terminal
MOST_FAILING = 10
MOST_EVIDENCE = 600  # characters; half of them under a diagnosis
MOST_ALIKE = 3
MOST_LINES = 14  # of a hang's collectives


def print_report(summary: Summary, console: Console | None = None) -> None:
    """Print the report: table first and verdict last, where the eye is when the run ends."""
    console = console or Console()
    if summary.records:
        console.print(_table(summary, console.width))
    for note in summary.notes:
        console.print(Text(f"note: {clean(note)}", style="yellow"))
    for record in summary.cleared[:MOST_FAILING]:
        text = f"{clean(record.case)}: {clean(explain.because(record))}: {clean(explain.chain(record))}"
        console.print(Text(f"note: {text}"))
    for group in summary.groups[:MOST_FAILING]:
        _failing(console, group)
    left = sum(len(group.records) for group in summary.groups[MOST_FAILING:])
    if left > 0:
        console.print(Text(f"and {left} more, in report.md", style="dim"))
    for known in summary.known:
        console.print(Text(clean(_known(known)), style="yellow"))
    console.print(Rule(style="dim"))
    console.print(Text(f"{clean(summary.headline)}. ", style=STYLES.get(summary.state, BAD)), soft_wrap=False)
    if summary.course.standing:
        console.print(Text(f"{clean(summary.course.standing)}.", style="bold"))
    console.print(Text(f"{clean(summary.plan.plan)} against {clean(summary.target)}, {summary.budget_line}"))
    _budget(console, summary)
    if summary.verdict_cost:
        console.print(Text(summary.verdict_cost, style="dim"))
    if summary.exit_code:
        console.print(Text(f"Next: {clean(summary.next_step)}"))
        if summary.next_command:
            console.print(
                Text(f"  {clean(summary.next_command)}", style="bold"), soft_wrap=True
            )  # one line, to be copied


def _failing(console: Console, group: Group) -> None:
    record, name = group.first, outcome(group.first)
    head = Text(f"{name} ", style=STYLES.get(name, BAD))
    head.append(clean(record.case), style="bold")
    if record.oracle:
        head.append(f"  flagged by {clean(record.oracle)}", style="default")
    console.print()
    console.print(head)
    most = MOST_EVIDENCE // 2 if record.diagnosis else MOST_EVIDENCE
    evidence = shorten(clean(record.evidence), most) or "no evidence was recorded"
    likely = explain.classes(explain.guesses(record))
    first, second = explain.leading(record)
    lines = [
        (first, "bold"),
        (f"looks like {likely}" if likely and "looks like" not in first else "", "bold"),
        (second, ""),
        (explain.chain(record), ""),
        (_worst(record), ""),
        (evidence, "dim" if record.diagnosis else ""),
        (_alike(group), ""),
    ]
    for text, style in lines:
        if text:
            console.print(Padding(Text(clean(text), style=style), (0, 0, 0, 2)))
    for line in course.lines_of(record.collectives or "", MOST_LINES):
        indent = min(len(line) - len(line.lstrip()), 4)
        console.print(Padding(Text(clean(line), style="dim"), (0, 0, 0, 4 + indent)))
    console.print(Text(f"  {clean(shown_rerun(record))}", style="cyan"), soft_wrap=True)


def _known(known: Known) -> str:
    where = f" ({known.entry.link})" if known.entry.link else ""
    cases = f"{count(len(known.records), 'case')}, first {known.records[0].case}"
    return f"{known.entry.kind} {known.entry.name}: {known.entry.why}{where}: {cases}"


def _budget(console: Console, summary: Summary) -> None:
    """Time by phase, forecast and gaps, a line each."""
    how = summary.course
    if how.phases:
        told = [f"{name} {used} (planned {planned})" for name, planned, used, _ in how.phases.rows]
        console.print(Text(clean(f"Time: {', '.join(told)}"), style="dim"))
    if how.forecast:
        console.print(Text(clean(how.forecast), style="dim"))
    for gap in how.gaps:
        console.print(Text(clean(gap.line)))


def _worst(record: Record) -> str:
    """The worst tensor in one line, where the evidence is not all that there is."""
    found = explain.worst(record)[:1]
    if not found or not (record.escalation or record.diagnosis):
        return ""
    m = found[0]
    error = "not finite" if m.error is None else number(m.error)
    return f"worst: {explain.how_far(m)}; relative error {error}, rounding gives {number(m.predicted)} (step {m.step})"


def _alike(group: Group) -> str:
    others = [record.case for record in group.others]
    if not others:
        return ""
    more = f" and {len(others) - MOST_ALIKE} more, in report.md" if len(others) > MOST_ALIKE else ""
    return f"{count(len(others), 'case')} alike: {'; '.join(others[:MOST_ALIKE])}{more}"


def _table(summary: Summary, width: int) -> Table:
    narrow, medium, wide, very_wide = (width >= least for least in (NARROW, MEDIUM, WIDE, VERY_WIDE))
    shown: list[tuple[bool, str, Callable[[Record], str]]] = [
        (narrow, "error / limit", lambda r: clean(error_text(r))),
        (medium or not narrow, "headroom", lambda r: times(headroom(r))),
        (narrow, "s/step", lambda r: seconds(r.seconds_per_step)),
        (wide, "tokens/s", lambda r: number(r.tokens_per_second)),
        (wide, "memory", lambda r: size(r.peak_memory_bytes)),
        (narrow, "wall", lambda r: seconds(r.wall_seconds)),
        (very_wide, "budget", lambda r: seconds(r.budget_seconds)),
    ]
    columns = [(title, cell) for fits, title, cell in shown if fits]
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("case", overflow="fold", ratio=1)
    table.add_column("verdict", no_wrap=True)
    for title, _ in columns:
        table.add_column(title, justify="right", no_wrap=True)
    titles = [len("verdict"), *(len(title) for title, _ in columns)]
    cells = [outcome, *(cell for _, cell in columns)]
    taken = [max(size, *(len(cell(r)) for r in summary.records)) for size, cell in zip(titles, cells, strict=True)]
    room = max(20, width - sum(size + 2 for size in taken) - 2)  # what the other columns leave to the id
    path = None
    for record in summary.records:
        name = outcome(record)
        if not medium and record.path != path:  # the path as a heading leaves the ids room
            path = record.path
            table.add_row(Text(clean(path), style="bold"))
        case = _broken(clean(record.case), room) if medium else _short(record, room)
        table.add_row(Text(case), Text(name, style=STYLES.get(name, BAD)), *(Text(cell(record)) for _, cell in columns))
    table.caption_style = "dim"
    table.caption = f"{count(len(summary.records), 'case')}: " + ", ".join(f"{n} {name}" for name, n in summary.counts)
    table.caption_justify = "left"
    return table


def _short(record: Record, room: int) -> str:
    """Id without its path, under the path's heading."""
    return " " + _broken(clean(record.case.removeprefix(record.path + ":")), room - 1).replace("\n", "\n ")


def _broken(case: str, room: int) -> str:
    """Id broken at commas where it is longer than `room`, further lines indented."""
    lines = [""]
    for part in case.split(","):
        joined = f"{lines[-1]}{part},"
        if len(joined) > room and lines[-1].strip():
            lines.append(f"  {part},")
        else:
            lines[-1] = joined
    return "\n".join(lines).removesuffix(",")
