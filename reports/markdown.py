"""A run's report as Markdown (`report.md`): readable as text, safe to post."""

from __future__ import annotations

from ci.records import EVENTS, Record
from reports.columns import headroom
from reports.load import flatten
from reports.summary import Summary, error_text, outcome, rerun_command, shown_rerun, unsaid
from reports.text import count, md, md_block, md_code, md_table, seconds, size, times
from reports.text import number as plain

MOST_STACK_CHARACTERS = 4000
FOLD_FROM = 6  # not-run cases beyond this many are folded
MARK = {"green": "✅", "red": "❌", "incomplete": "⚠️", "empty": "⚠️"}
CASE_MARK = {"exact": "✅", "rounding": "✅", "inconclusive": "⚠️", "refused": "⛔", "skipped": "⏭️", "not run": "⬜"}


def render(summary: Summary) -> str:
    """The whole report; first line is verdict and next step."""
    parts = [
        f"{MARK[summary.state]} **{md(summary.headline)}.** Next: {md(summary.next_step)}.",
        md_block(summary.next_command, "sh") if summary.next_command else "",
        _facts(summary),
        _list([md(note) for note in summary.notes]),
        _failing(summary),
        _not_run(summary),
        _cases(summary),
        _blind(summary),
        _environment(summary),
        _raw(summary),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _facts(summary: Summary) -> str:
    plan = summary.plan
    return (
        f"Plan {md_code(plan.plan)} against {md_code(summary.target)} · {md(summary.budget_line)} · "
        f"{', '.join(f'{many} {name}' for name, many in summary.counts) or 'no case'} · started {md(plan.started_at)}"
    )


def _failing(summary: Summary) -> str:
    if not summary.failing:
        return ""
    head = f"## {count(len(summary.failing), 'case')} not as expected"
    shared = f"All of them, and no green case, have {md_code(summary.pattern)}." if summary.pattern else ""
    return "\n\n".join(filter(None, [head, shared, *map(_one, summary.failing)]))


def _one(record: Record) -> str:
    name = outcome(record)
    facts = [f"flagged by {md(record.oracle)}" if record.oracle else ""]
    if record.limit is not None:
        of = f" ({md(record.error_of)})" if record.error_of else ""
        facts.append(f"error / limit {md(error_text(record))}{of}")
    if record.wall_seconds is not None:
        facts.append(f"{md(_wall(record))}")
    facts += [
        f"fault {md_code(record.fault)}" if record.fault else "",
        f"patch {md_code(record.patch)}" if record.patch else "",
    ]
    parts = [
        f"### {CASE_MARK.get(name, '❌')} {md(name)}: {md_code(record.case)}",
        " · ".join(filter(None, facts)),
        f"> {md(record.evidence) or 'no evidence was recorded'}",
        _list([f"**{md(f.oracle)}**: {md(f.evidence)}" for f in unsaid(record)]),
        md_block(shown_rerun(record), "sh"),
    ]
    if record.stacks:
        parts.append(_fold("Stacks of the ranks", md_block(record.stacks[:MOST_STACK_CHARACTERS])))
    return "\n\n".join(filter(None, parts))


def _not_run(summary: Summary) -> str:
    if not summary.not_run:
        return ""
    rows = [[md_code(r.case, table=True), md_code(rerun_command(r), table=True)] for r in summary.not_run]
    table = md_table(["case", "run it alone"], rows)
    reasons = {r.evidence for r in summary.not_run}
    why = f"Reason: {md('; '.join(sorted(filter(None, reasons))))}." if any(reasons) else ""
    title = f"{count(len(rows), 'case')} not run"
    body = _fold(f"Show the {len(rows)} cases", table) if len(rows) > FOLD_FROM else table
    return "\n\n".join(filter(None, [f"## {title}", why, body]))


def _wall(record: Record) -> str:
    if record.budget_seconds is None:
        return seconds(record.wall_seconds)
    return f"{seconds(record.wall_seconds)} of {seconds(record.budget_seconds)}"


def _cases(summary: Summary) -> str:
    if not summary.records:
        return ""
    rows = []
    for record in summary.records:
        name = outcome(record)
        rows.append(
            [
                md_code(record.case, table=True),
                f"{CASE_MARK.get(name, '❌')} {md(name)}",
                md(error_text(record)),
                times(headroom(record)),
                seconds(record.seconds_per_step),
                plain(record.tokens_per_second),
                size(record.peak_memory_bytes),
                _wall(record),
            ]
        )
    head = ["case", "verdict", "error / limit", "headroom", "s/step", "tokens/s", "peak memory", "wall of budget"]
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
