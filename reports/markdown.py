"""A run's report as Markdown (`report.md`): readable as text, safe to post."""

from __future__ import annotations

from collections.abc import Sequence

from ci.records import EVENTS, Guess, Record
from reports import course, explain
from reports.columns import headroom
from reports.explain import Group, Table
from reports.load import flatten
from reports.summary import Summary, error_text, outcome, rerun_command, shown_rerun, unsaid
from reports.text import count, md, md_block, md_code, md_table, seconds, sentence, size, times
from reports.text import number as plain

MOST_STACK_CHARACTERS = 4000
FOLD_FROM = 6  # not-run cases beyond this many are folded
MOST_COLLECTIVES = 8000  # characters
MARK = {"green": "✅", "red": "❌", "running": "⏳", "incomplete": "⚠️", "empty": "⚠️"}
CASE_MARK = {
    "exact": "✅",
    "rounding": "✅",
    "known issue": "🔶",
    "refused as expected": "🔶",
    "inconclusive": "⚠️",
    "wrong environment": "⚠️",
    "refused": "⛔",
    "skipped": "⏭️",
    "not run": "⬜",
    "running": "⏳",
    "pending": "⬜",
}


def render(summary: Summary) -> str:
    """The whole report; first line is verdict and next step."""
    parts = [
        f"{MARK[summary.state]} **{md(summary.headline)}.** Next: {md(summary.next_step)}.",
        sentence(md(summary.course.standing)),
        md_block(summary.next_command, "sh") if summary.next_command else "",
        _facts(summary),
        _list([md(note) for note in summary.notes]),
        _failing(summary),
        _known(summary),
        _not_run(summary),
        _budget(summary),
        _cleared(summary),
        _cases(summary),
        _headrooms(summary),
        _blind(summary),
        _environment(summary),
        _raw(summary),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _facts(summary: Summary) -> str:
    plan = summary.plan
    return (
        f"Plan {md_code(plan.plan)} against {md_code(summary.target)} · {md(summary.budget_line)} · "
        f"{', '.join(f'{many} {md(name)}' for name, many in summary.counts) or 'no case'} · "
        + (f"{md(summary.verdict_cost)} · " if summary.verdict_cost else "")
        + f"started {md(plan.started_at)}"
    )


def _failing(summary: Summary) -> str:
    if not summary.failing:
        return ""
    kinds = f", of {len(summary.groups)} kinds" if 1 < len(summary.groups) < len(summary.failing) else ""
    head = f"## {count(len(summary.failing), 'case')} not as expected{kinds}"
    shared = f"All of them, and no green case, have {md_code(summary.pattern)}." if summary.pattern else ""
    return "\n\n".join(filter(None, [head, shared, *map(_group, summary.groups)]))


def _group(group: Group) -> str:
    record, others = group.first, group.others
    name = outcome(record)
    alike = f" and {count(len(others), 'case')} alike" if others else ""
    first, second = map(md, explain.leading(record))
    evidence = f"> {md(record.evidence) or 'no evidence was recorded'}"
    parts = [
        f"### {CASE_MARK.get(name, '❌')} {md(name)}: {md_code(record.case)}{alike}",
        f"**{sentence(first)}**" if first else "",
        _list([f"looks like {_guess(guess)}" for guess in explain.guesses(record)]),
        sentence(second),
        "" if record.diagnosis else evidence,  # it says where, if nothing else does
        _table(explain.escalation(record)),
        _table(explain.tensors(record)),
        _more(record),
        evidence if record.diagnosis else "",
        " · ".join(filter(None, _facts_of(record))),
        _list([f"**{md(f.oracle)}**: {md(f.evidence)}" for f in unsaid(record)]),
        md_block(shown_rerun(record), "sh"),
        _alike(others),
        _unseen(record),
    ]
    if record.collectives:
        block = md_block(course.cut(record.collectives, MOST_COLLECTIVES))
        parts.append(_fold("Last collectives of each rank", block))
    if record.stacks:
        parts.append(_fold("Stacks of the ranks", md_block(course.cut(record.stacks, MOST_STACK_CHARACTERS))))
    return "\n\n".join(filter(None, parts))


def _facts_of(record: Record) -> list[str]:
    facts = [f"flagged by {md(record.oracle)}" if record.oracle else ""]
    if record.limit is not None:
        of = f" ({md(record.error_of)})" if record.error_of else ""
        facts.append(f"error / limit {md(error_text(record))}{of}")
    if record.wall_seconds is not None:
        facts.append(f"{md(_wall(record))}")
    return [
        *facts,
        f"fault {md_code(record.fault)}" if record.fault else "",
        f"patch {md_code(record.patch)}" if record.patch else "",
        md(course.order(record)),
    ]


def _guess(guess: Guess) -> str:
    named = f" ({md(guess.name)})" if guess.name else ""
    return f"**class {guess.bug_class}**{named}" + (f": {md(guess.why)}" if guess.why else "")


def _more(record: Record) -> str:
    left = explain.beyond(record) - len(explain.worst(record))
    return f"… and {count(left, 'tensor')} more beyond the limit, of {len(record.measured)}" if left > 0 else ""


def _alike(others: Sequence[Record]) -> str:
    if not others:
        return ""
    rows = [[md_code(r.case, table=True), md(error_text(r)), md_code(shown_rerun(r), table=True)] for r in others]
    table = md_table(["case", "error / limit", "run it alone"], rows, frozenset({1}))
    title = f"The same words, other numbers: {count(len(rows), 'case')}"
    return _fold(title, table) if len(rows) > FOLD_FROM else f"{title}\n\n{table}"


def _unseen(record: Record) -> str:
    """What this case could not have seen, folded: smallest visible error by tensor, dormant classes."""
    table, asleep = explain.unseen(record), explain.dormant(record.dormant)
    said = explain.blindness(record)
    parts = [sentence(md(said)), _table(table)]
    parts.append(_list([f"{md(classes)} of bugs: {md(reason)}" for reason, classes in asleep]))
    body = "\n\n".join(filter(None, parts))
    return _fold("What this case could not have seen", body) if body else ""


def _cleared(summary: Summary) -> str:
    """Green cases that were beyond a limit at their own precision: why they are green all the same."""
    if not summary.cleared:
        return ""
    parts = []
    for record in summary.cleared:
        parts += [
            f"{md_code(record.case)}: {sentence(md(explain.because(record)))}",
            _table(explain.escalation(record)),
        ]
    body = "\n\n".join(parts)
    title = f"{count(len(summary.cleared), 'case')} beyond a limit and rounding all the same"
    return f"## {title}\n\n" + (_fold("Show them", body) if len(summary.cleared) > FOLD_FROM else body)


def _known(summary: Summary) -> str:
    """What is not green and yet as expected: never hidden, by entry of the suite's tables."""
    table = explain.known((known.entry, known.records) for known in summary.known)
    many = sum(len(known.records) for known in summary.known)
    return f"## {count(many, 'case')} as known: refused, or known to be wrong\n\n{_table(table)}" if table else ""


def _headrooms(summary: Summary) -> str:
    table = explain.headrooms(summary.green)
    title = f"Headroom and visibility of {count(len(table.rows), 'green case')}" if table else ""
    return _fold(title, _table(table)) if table else ""


def _table(table: Table | None) -> str:
    if table is None:
        return ""
    cells = [
        [md_code(cell, table=True) if place in table.code else md(cell) for place, cell in enumerate(row)]
        for row in table.rows
    ]
    return md_table([md(name) for name in table.head], cells, table.right)


def _not_run(summary: Summary) -> str:
    """Cases without a result, by reason; the commands of those that never ran."""
    if not summary.course.gaps:
        return ""
    many = sum(len(gap.records) for gap in summary.course.gaps)
    parts = [f"## {count(many, 'case')} without a result"]
    for gap in summary.course.gaps:
        first, more = gap.first, len(gap.records) > 1
        said = f"**{count(len(gap.records), 'case')} {md(gap.what)}**; "
        said += f"{'first' if more else 'it is'} {md_code(first.case)}"
        said += f": {md(gap.evidence)}" if gap.evidence else ""
        parts.append(said + (f" ({md(course.order(first))})" if first.why else ""))
        if first.status == "not_run":  # the others have a section of their own
            rows = [[md_code(r.case, table=True), md_code(rerun_command(r), table=True)] for r in gap.records]
            table = md_table(["case", "run it alone"], rows)
            parts.append(_fold(f"Show {count(len(rows), 'case')}", table) if len(rows) > FOLD_FROM else table)
    return "\n\n".join(parts)


def _budget(summary: Summary) -> str:
    """Planned and used time by phase, the forecast, and what the run is made of."""
    how = summary.course
    parts = [f"**Forecast**: {sentence(md(how.forecast))}" if how.forecast else "", _table(how.phases)]
    parts += [_table(how.segments), _table(how.pieces)]
    body = "\n\n".join(filter(None, parts))
    return f"## Budget\n\n{sentence(md(summary.budget_line))}\n\n{body}" if body else ""


def _wall(record: Record) -> str:
    if record.budget_seconds is None:
        return seconds(record.wall_seconds)
    return f"{seconds(record.wall_seconds)} of {seconds(record.budget_seconds)}"


def _cost(record: Record) -> str:
    return seconds(record.verdict_seconds)


def _cases(summary: Summary) -> str:
    if not summary.records:
        return ""
    rows = []
    for record in summary.records:
        name, higher = outcome(record), explain.cleared(record)
        rows.append(
            [
                md_code(record.case, table=True),
                f"{CASE_MARK.get(name, '❌')} {md(name)}" + (f" at {md(higher)}" if higher else ""),
                md(error_text(record)),
                times(headroom(record)),
                seconds(record.seconds_per_step),
                plain(record.tokens_per_second),
                size(record.peak_memory_bytes),
                _wall(record),
                _cost(record),
            ]
        )
    head = [
        "case",
        "verdict",
        "error / limit",
        "headroom",
        "s/step",
        "tokens/s",
        "peak memory",
        "wall of budget",
        "judging",
    ]
    return "## All cases\n\n" + md_table(head, rows, frozenset(range(2, len(head))))


def _blind(summary: Summary) -> str:
    return (
        "## What this run could not have seen\n\n" + _list([md(line) for line in summary.blind])
        if summary.blind
        else ""
    )


def _environment(summary: Summary) -> str:
    flat = flatten(summary.loaded.environment)
    if not flat:
        return ""
    rows = [[md_code(key, table=True), md_code(value, table=True)] for key, value in flat.items()]
    return "## Environment\n\n" + _fold(f"{count(len(rows), 'setting')}", md_table(["setting", "value"], rows))


def _raw(summary: Summary) -> str:
    directory = summary.loaded.run.directory
    return (
        f"## Raw data\n\n{md_code(str(directory / EVENTS))} · run {md_code(summary.plan.run_id)} · "
        f"tiebench {md_code(summary.plan.tiebench)} · the whole run again:\n\n" + md_block(summary.plan.command, "sh")
    )


def _fold(title: str, body: str) -> str:
    return f"<details><summary>{md(title)}</summary>\n\n{body}\n\n</details>"


def _list(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
