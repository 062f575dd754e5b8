"""What `tiebench list --over` and `tiebench known` print: combinations of factor values, and the tables of refusals and
known issues."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from ci import plans
from ci.display import Printer
from ci.exit_codes import FAILED, OK
from ci.options import Format, fail
from ci.outcomes import version_of
from ci.subject import INSTALLED
from suites import expectations, matrix
from suites.cases import FACTORS, Case, CaseError

STYLES = {"runs": "green", "refused": "yellow", "known issue": "yellow", "no sense": "dim"}


def print_cells(over: str, base: str, form: Format) -> None:
    """Every combination of some factors' values, and what it comes to.

    Args:
        over: names of factors, separated by commas.
        base: id of a case whose other factors all combinations have.
    """
    names = [name.strip() for name in over.split(",") if name.strip()]
    try:
        start = Case.parse(base)
        given = {f.name: getattr(start, f.name) for f in FACTORS if getattr(start, f.name) != f.default}
        rest = {name: value for name, value in given.items() if name not in names}
        found = list(matrix.cells(start.path, names, version_of(INSTALLED.target(start.path)), rest))
    except CaseError as error:
        fail(f"--over {over}: {error}")
    if form is Format.json:
        print(json.dumps([asdict(cell) for cell in found], indent=2, ensure_ascii=False))
        return
    console = Printer(highlight=False)
    shown = Table(*names, "comes to", "why", box=None, pad_edge=False)
    for cell in found:
        why = f"{cell.entry}: {cell.why}" if cell.entry else cell.why
        shown.add_row(*map(escape, cell.values.values()), f"[{STYLES[cell.state]}]{cell.state}[/]", escape(why))
    console.print(shown)
    counts = Counter(cell.state for cell in found)
    console.print(f"{len(found)} combinations: " + ", ".join(f"{many} {state}" for state, many in counts.items()))


def known_command(
    form: Annotated[Format, typer.Option("--format", help="How to print.")] = Format.table,
) -> None:
    """Print what is known to be refused or wrong; exit code 1 when an entry matches no case of any plan."""
    every = {name: plan.cases for name, plan in plans.PLANS.items()}
    wrong = expectations.problems(case for cases in every.values() for case in cases)
    found = [_told(entry, every) for entry in expectations.entries()]
    if form is Format.json:
        print(json.dumps({"entries": found, "problems": wrong}, indent=2, ensure_ascii=False))
    else:
        console = Printer(highlight=False)
        for entry in found:
            console.print(
                f"[bold]{escape(entry['name'])}[/] ({entry['kind']}, {entry['path']}{escape(entry['versions'])})"
            )
            where = f" ({entry['link']})" if entry["link"] else ""
            console.print(f"  {entry['why']}{where}", markup=False)
            for label in ("observed", "right", "reasoning", "message"):
                if entry[label]:
                    console.print(f"  {label}: {entry[label]}", markup=False)
            matched = ", ".join(f"{many} of {name}" for name, many in entry["cases"].items() if many)
            console.print(f"  cases: {matched or 'none'}; since {entry['since']}", markup=False)
            console.print(
                f"  tiebench run --no-known --case {entry['minimal']}", style="cyan", markup=False, soft_wrap=True
            )
        for line in wrong:
            console.print(line, style="red", markup=False)
    raise typer.Exit(FAILED if wrong else OK)


def _told(entry: expectations.Entry, every: dict[str, tuple[Case, ...]]) -> dict[str, Any]:
    texts = ("name", "kind", "path", "versions", "why", "link", "since", "minimal", "observed", "right", "reasoning")
    return {
        **{name: getattr(entry, name) for name in texts},
        "verdicts": list(entry.verdicts),
        "message": entry.message,
        "cases": {name: sum(map(entry.concerns, cases)) for name, cases in every.items()},
    }
