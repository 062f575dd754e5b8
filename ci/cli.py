"""The command line. Light at the top: torch and the frameworks are imported by what needs them, when it needs them."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ci import plans, records, schedule, supervisor
from ci.display import Printer, discard, duration, prepare_output
from ci.exit_codes import FAILED, INTERRUPTED, OK, USAGE
from ci.ladder_command import ladder
from ci.matrix_command import known_command, print_cells
from ci.options import (
    EXIT_CODES,
    FlatFormat,
    Format,
    check_out,
    default_out,
    fail,
    fault_named,
    given,
    part_of,
    plan_of,
    report_on,
    say,
    seconds,
    some,
)
from ci.ranks import Settings
from ci.run_command import run
from ci.session import Interrupted
from ci.subject import INSTALLED, SetupError, version
from suites import cases as table
from suites.cases import Case

if TYPE_CHECKING:
    from ci.fault_plan import Row as FaultRow
    from ci.schedule import Phases, Slot
    from suites.calibration import Result as CalibrationResult


app = typer.Typer(
    name="tiebench",
    help=f"Benchmark and regression suite for tied and untied output heads in distributed training.\n\n{EXIT_CODES}",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"tiebench {version()}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


# list


@app.command("list")
def list_command(
    plan: Annotated[str, typer.Option(help="Plan whose cases to list.")] = "smoke",
    explain: Annotated[
        bool, typer.Option(help="Explain plans and factors instead: values, defaults, refusals.")
    ] = False,
    over: Annotated[
        str | None,
        typer.Option(
            help="Factors, separated by commas: list every combination of their values instead, and whether it runs, "
            "is refused, is known to be wrong, or makes no sense.",
            metavar="FACTORS",
            callback=given,
        ),
    ] = None,
    base: Annotated[
        str, typer.Option(help="With --over: a case whose other factors all combinations have.", metavar="CASE")
    ] = "deepspeed:head=vocab",
    form: Annotated[Format, typer.Option("--format", help="How to print.")] = Format.table,
) -> None:
    """List a plan's cases, or explain what cases are made of."""
    if over is not None:
        print_cells(over, base, form)
        return
    found = _explained() if explain else _listed(plan_of(plan))
    if form is Format.json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
    elif explain:
        _print_explained(found)
    else:
        for case in found["cases"]:
            print(case["id"])


def _listed(plan: plans.Plan) -> dict[str, Any]:
    return {
        "plan": plan.name,
        "meaning": plan.meaning,
        "budget_seconds": plan.budget_seconds,
        "cases": [
            {"id": c.id, "path": c.path, "world_size": c.world_size, "factors": c.factors}
            for c in schedule.order(plan.cases)
        ],
    }


def _explained() -> dict[str, Any]:
    return {
        "plans": [
            {
                "name": plan.name,
                "meaning": plan.meaning,
                "budget_seconds": plan.budget_seconds,
                "cases": len(plan.cases),
                "cases_by_path": {path: sum(c.path == path for c in plan.cases) for path in table.PATHS},
                "selections": [{"reason": s.reason, "cases": len(s.cases)} for s in plan.selections],
            }
            for plan in plans.PLANS.values()
        ],
        "factors": [
            {
                "name": f.name,
                "values": list(f.values) if f.values is not None else None,
                "domain": f.domain(),
                "default": f.default,
                "meaning": f.meaning,
                "unsupported": {
                    p: {f.spell(v): why for v, why in values.items()} for p, values in f.unsupported.items()
                },
            }
            for f in table.FACTORS
        ],
        "rules": [{"paths": list(r.paths or table.PATHS), "reason": r.reason} for r in table.RULES],
    }


def _print_explained(found: dict[str, Any]) -> None:
    console = Printer(highlight=False)
    shown = Table(
        "plan", "cases", "budget", "what it is", title="Plans", title_justify="left", box=None, pad_edge=False
    )
    for plan in found["plans"]:
        shown.add_row(plan["name"], str(plan["cases"]), f"{plan['budget_seconds']:.0f} s", plan["meaning"])
    console.print(shown)
    shown = Table(
        "factor", "values", "default", "meaning", title="\nFactors", title_justify="left", box=None, pad_edge=False
    )
    for factor in found["factors"]:
        shown.add_row(factor["name"], factor["domain"], str(factor["default"]).lower(), factor["meaning"])
    console.print(shown)
    console.print("\nWhat is refused, and why", style="italic")
    for factor in found["factors"]:
        for path, values in factor["unsupported"].items():
            for value, why in values.items():
                console.print(f"{path} with {factor['name']}={value}: {why}", markup=False)
    for rule in found["rules"]:
        console.print(f"{', '.join(rule['paths'])}: {rule['reason']}", markup=False)
    console.print("\nA case id is path:factor=value,… with what differs from the defaults, for example", style="italic")
    console.print(Case("deepspeed", tie="tied", head="row", zero=2).id, markup=False)


# plan


@app.command("plan")
def plan_command(
    name: Annotated[str, typer.Argument(help="Plan to look ahead at.", show_default=False)],
    budget: Annotated[
        float | None, typer.Option(help="Seconds for everything (default: the plan's).", callback=seconds)
    ] = None,
    history: Annotated[
        str | None,
        typer.Option(help="Directory of earlier runs (default: runs).", metavar="DIRECTORY", callback=given),
    ] = None,
    shard: Annotated[str | None, typer.Option(help="I/N: only the I-th of N equal parts.", callback=given)] = None,
    form: Annotated[Format, typer.Option("--format", help="How to print.")] = Format.table,
) -> None:
    """Say what a plan would run, in which order and why, until when, and what its budget would leave out."""
    from ci import costs, forecast  # noqa: PLC0415
    from ci import history as past  # noqa: PLC0415

    planned = plan_of(name)
    chosen = list(planned.cases)
    title = name
    if shard is not None:
        chosen = part_of(chosen, shard)
        title += f"-{shard.replace('/', 'of')}"
        title += f" ({len(chosen)} of its {len(planned.cases)} cases)" if len(chosen) < len(planned.cases) else ""
    if history is not None and not Path(history).is_dir():
        fail(f"--history {history}: no such directory")
    limit = planned.budget_seconds if budget is None else budget
    known = past.read(Path(history or "runs"), past.machine_here())
    cost = costs.Costs(known)
    targets = {case.path: INSTALLED.target(case.path) for case in chosen}
    ordered = schedule.arrange(chosen, cost, known.past(targets))
    slots = schedule.timetable(ordered, cost, limit)
    ahead = forecast.of(title, chosen, known, cost, budget=limit, now=datetime.now(timezone.utc))
    phases = schedule.phases([slot.planned.case for slot in slots if slot.runs], cost)
    if form is Format.json:
        found = {
            "plan": title,
            "budget_seconds": limit,
            "reserve_seconds": schedule.reserve(len(slots)),
            "phases": {**asdict(phases), "total": phases.total},
            "history": {"runs": len(known.here), "machine": known.machine, "notes": known.notes},
            "cases": [slot.plain() for slot in slots],
            "forecast": ahead.plain(),
        }
        print(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        _print_plan(slots, phases, ahead.text, known.notes)


def _print_plan(slots: Sequence[Slot], phases: Phases, ahead: str, notes: Sequence[str]) -> None:
    from reports.text import clean  # noqa: PLC0415

    console = Printer(highlight=False)
    shown = Table("", "case", "expected", "pessimistic", "until", "why here", box=None, pad_edge=False)
    for column in (0, 2, 3, 4):
        shown.columns[column].justify = "right"
    for number, slot in enumerate(slots, 1):
        estimate = slot.planned.estimate
        until = duration(slot.until) if slot.runs else "not run"
        seconds = (f"{estimate.expected:.2f} s", f"{estimate.high:.1f} s")
        row = (str(number), escape(slot.planned.case.id), *seconds, until, escape(slot.planned.reason))
        shown.add_row(*row, style="" if slot.runs else "yellow")
    console.print(shown)
    for note in notes:
        console.print(f"not read: {clean(note)}", markup=False, soft_wrap=True)
    left_out = sum(not slot.runs for slot in slots)
    parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in asdict(phases).items() if seconds)
    console.print(
        f"{len(slots) - left_out} of {len(slots)} cases run, until about {duration(phases.total)} ({parts}); "
        + (f"{left_out} would be not_run (budget)" if left_out else "the budget leaves none out"),
        markup=False,
        soft_wrap=True,
    )
    console.print(ahead, markup=False, soft_wrap=True)


app.command(epilog=EXIT_CODES)(run)
app.command("known", epilog=EXIT_CODES)(known_command)
app.command(epilog=EXIT_CODES)(ladder)


# faults


@app.command("faults", epilog=EXIT_CODES)
def faults_command(  # noqa: PLR0917 - each is an option
    path: Annotated[
        list[str] | None, typer.Option(help="Only faults of this path; may be given several times.", callback=some)
    ] = None,
    fault: Annotated[
        list[str] | None, typer.Option(help="Only this fault; may be given several times.", callback=some)
    ] = None,
    form: Annotated[Format, typer.Option("--format", help="How to print.")] = Format.table,
    out: Annotated[
        str | None,
        typer.Option(
            help="Run directory; must be empty (default: runs/<time>-faults).", metavar="DIRECTORY", callback=given
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto: CUDA and NCCL where there are enough GPUs; or cpu.")] = "auto",
    case_limit: Annotated[
        float, typer.Option(help="Seconds that a case may take on the ranks; a hang costs them all.", callback=seconds)
    ] = 20.0,
) -> None:
    """Put every bug on purpose into its case and show which check sees it; exit code 1 when one is missed."""
    from ci import fault_plan  # noqa: PLC0415

    for name in path or ():
        if name not in table.PATHS:
            fail(f"unknown path {name!r}; one of {', '.join(table.PATHS)}")
    chosen = fault_plan.chosen([fault_named(name).name for name in fault or ()], path or ())
    if not chosen:
        fail("no fault is left to run: the options --path and --fault exclude all of them")
    directory = Path(out) if out is not None else default_out("faults")
    check_out(directory)
    progress = Console(stderr=True, highlight=False) if form is Format.json else Printer(highlight=False)
    settings = Settings(device=device, case_limit=case_limit, known=False)
    rows: list[fault_plan.Row] = []

    def on_row(row: fault_plan.Row) -> None:
        rows.append(row)
        progress.print(f"[{len(rows)}/{len(chosen)}] {row.fault}: {row.verdict}", markup=False, soft_wrap=True)

    code = OK
    with supervisor.interruptible(restore=False):
        try:
            fault_plan.run(chosen, directory, settings, on_row=on_row)
        except (SetupError, records.LogError) as error:
            say(str(error))
            code = USAGE
        except Interrupted as error:
            code = 128 + error.number
        supervisor.ignore_signals()
        _print_faults(fault_plan.ordered(rows), len(chosen), form)
    raise typer.Exit(code or (OK if len(rows) == len(chosen) and all(row.good for row in rows) else FAILED))


def _print_faults(rows: Sequence[FaultRow], wanted: int, form: Format) -> None:
    if form is Format.json:
        print(json.dumps([row.plain() for row in rows], indent=2, ensure_ascii=False))
        return
    console = Printer(highlight=False)
    shown = Table(
        "fault", "class", "caught", "seen by", "step", "margin", "guesses", "verdict", box=None, pad_edge=False
    )
    for row in rows:
        margin = "" if row.margin is None else f"{row.margin:.3g}"
        step = str(row.step or "") if row.step is not None else ""
        caught = ("yes" if row.caught else "no") + ("" if row.good else "  ← not as it must be")
        guesses = ", ".join(map(str, row.guesses))
        style = "" if row.good else "bold red"
        kind = str(row.bug_class or "harmless")
        shown.add_row(row.fault, kind, caught, row.oracle or "", step, margin, guesses, row.verdict, style=style)
    console.print(shown)
    bugs = [row for row in rows if row.bug_class]
    named = sum(row.rank in (1, 2) for row in bugs)
    console.print(
        f"{sum(row.caught for row in bugs)} of {len(bugs)} faults caught, the right class among the first two guesses "
        f"for {named}; "
        f"{sum(row.good for row in rows) - sum(row.good for row in bugs)} of {len(rows) - len(bugs)} harmless changes "
        f"not called a bug; {wanted - len(rows)} not run"
    )


# calibrate


@app.command(epilog=EXIT_CODES)
def calibrate(
    quick: Annotated[bool, typer.Option("--quick", help="A sample that takes a few minutes.")] = False,
    path: Annotated[
        list[str] | None,
        typer.Option(help="Only this path; may be given several times (default: all installed).", callback=some),
    ] = None,
    precision: Annotated[
        list[str] | None,
        typer.Option(help="Only this precision (float32, tf32, …); may be given several times.", callback=some),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            help="Directory; one that holds a part of a calibration already is gone on with (default: "
            "runs/<time>-calibration).",
            metavar="DIRECTORY",
            callback=given,
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto: CUDA and NCCL where there are enough GPUs; or cpu.")] = "auto",
) -> None:
    """Measure false alarms and how small a bug is seen; exit code 1 when a null run is flagged, a limit has less than
    twice the room that null runs need, or a bug above the stated visibility is missed."""
    if device not in ("auto", "cpu"):
        fail(f"--device {device}: one of auto, cpu")
    for name in path or ():
        if name not in table.PATHS:
            fail(f"unknown path {name!r}; one of {', '.join(table.PATHS)}")
    from ci import calibrate as calibrating  # noqa: PLC0415
    from suites.calibration import ARITHMETICS  # noqa: PLC0415

    for name in precision or ():
        if name not in ARITHMETICS:
            fail(f"--precision {name}: one of {', '.join(ARITHMETICS)}")
    paths = path or [name for name in table.PATHS if calibrating.installed(name)]
    if gone := [name for name in paths if not calibrating.installed(name)]:
        fail(f"--path {gone[0]}: {gone[0]} is not installed, see `tiebench doctor`")
    jobs = calibrating.jobs(quick=quick, paths=paths, precisions=precision or ARITHMETICS, device=device)
    if not jobs:
        fail("no run is left: no chosen path has the chosen precision")
    directory = Path(out) if out is not None else default_out("calibration")
    console = Printer(highlight=False)
    progress = calibrating.Progress(len(jobs), lambda text: console.print(text, markup=False, soft_wrap=True))
    code = OK
    with supervisor.interruptible(restore=False):
        try:
            progress.say(f"{len(jobs)} runs, results in {directory}")
            settings = Settings(device=device, case_limit=calibrating.CASE_LIMIT, known=False)
            calibrating.run(jobs, directory, settings, progress.on_start, progress.on_run)
        except (SetupError, records.LogError) as error:
            say(str(error))
            code = USAGE
        except Interrupted as error:
            code = 128 + error.number
        supervisor.ignore_signals()
        try:
            result = calibrating.write(directory, jobs) if directory.exists() else None
        except records.LogError as error:
            fail(str(error))
        if result:
            _print_calibration(result, console)
            where = f"Tables: {directory / calibrating.MARKDOWN}, {directory / calibrating.JSON}"
            console.print(where, markup=False, soft_wrap=True)
    raise typer.Exit(code or (FAILED if result is None or result.problems else OK))


def _print_calibration(result: CalibrationResult, console: Console) -> None:
    from suites.calibration import shown  # noqa: PLC0415

    for found in result.tables:
        columns = list(dict.fromkeys(column for row in found.rows for column in row))
        printed = Table(*columns, title=f"\n{found.title}", title_justify="left", box=None, pad_edge=False)
        for row in found.rows:
            printed.add_row(*(escape(shown(row.get(column))) for column in columns))
        console.print(printed)
        console.print(found.note, style="italic", markup=False)
    for problem in result.problems:
        console.print(problem, style="red", markup=False, soft_wrap=True)
    end = f"{len(result.problems)} things are not" if result.problems else "everything is"
    console.print(f"{result.runs} runs: {end} as it must be")


# report, records, compare, doctor

Directory = Annotated[Path, typer.Argument(help="Run directory.", show_default=False)]


@app.command(epilog=EXIT_CODES)
def report(directory: Directory) -> None:
    """Print a run's report and write it as report.md and report.html; also of a run that was killed."""
    raise typer.Exit(report_on(directory, Printer(highlight=False), OK))


@app.command("records")
def records_command(
    directory: Directory,
    form: Annotated[FlatFormat, typer.Option("--format", help="How to print.")] = FlatFormat.csv,
) -> None:
    """Print one flat row a case."""
    from reports.records import flat  # noqa: PLC0415

    try:
        sys.stdout.write(flat(directory, form.value))
    except records.LogError as error:
        fail(str(error))


@app.command(epilog=EXIT_CODES)
def compare(
    base: Annotated[Path, typer.Argument(help="Run directory to compare with.", show_default=False)],
    head: Annotated[Path, typer.Argument(help="Run directory of the change.", show_default=False)],
    output: Annotated[Path | None, typer.Option(help="Write the Markdown here instead of printing it.")] = None,
    noise: Annotated[
        list[Path] | None, typer.Option(help="One more run of the base on the same machine: measures the noise.")
    ] = None,
) -> None:
    """Compare two runs: the Markdown of a pull-request report; exit code 1 when the change must not go in."""
    from reports import compare as comparing  # noqa: PLC0415

    try:
        result = comparing.compare(base, head, noise or ())
        if output:
            records.write_whole(output, result.markdown.encode())
        else:
            print(result.markdown)
    except records.LogError as error:
        fail(str(error))
    raise typer.Exit(result.exit_code)


@app.command()
def doctor() -> None:
    """Say what this machine can run, what is missing and how to get it; exit code 2 when no case can run."""
    from ci import doctor as examine  # noqa: PLC0415

    console = Printer(highlight=False)
    shown = Table("", "state", "meaning", "how to get it", box=None, pad_edge=False)
    found = examine.checks()
    for check in found:
        style = {"ok": "green", "limited": "yellow", "missing": "red"}[check.state]
        row = (escape(check.name), f"[{style}]{check.state}[/]", escape(check.meaning), escape(check.remedy))
        shown.add_row(*row)
    console.print(shown)
    raise typer.Exit(USAGE if any(check.state == "missing" for check in found) else OK)


def main() -> None:
    """Entry point of the console script: no traceback for anything that the user can put right."""
    prepare_output()
    code: str | int | None = OK
    try:
        for word in [*sys.argv[1:], os.getcwd()]:
            word.encode()  # records, reports and messages to ranks are UTF-8
        app()
    except UnicodeEncodeError as error:
        text = error.object.encode(errors="backslashreplace").decode()
        say(f"{text} is no text in this locale's encoding: rename it, or set LC_ALL=C.UTF-8")
        code = USAGE
    except (KeyboardInterrupt, Interrupted) as error:
        say("interrupted")
        code = 128 + error.number if isinstance(error, Interrupted) else INTERRUPTED
    except OSError as error:
        say(f"{error.filename or 'cannot write the output'}: {error.strerror or error}")
        discard(1)  # what is left in the buffer has nowhere to go
        code = USAGE
    except SystemExit as end:
        code = end.code
    sys.exit(_flushed(code))


def _flushed(code: str | int | None) -> str | int | None:
    """The exit code once all output is out; 2 where it cannot be written."""
    try:
        sys.stdout.flush()
    except OSError as error:
        say(f"cannot write the output: {error.strerror or error}")
        discard(1)
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        return USAGE
    return code


if __name__ == "__main__":
    main()
