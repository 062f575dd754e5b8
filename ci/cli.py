"""The command line. Light at the top: torch and the frameworks are imported by what needs them, when it needs them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ci import nodes, periodic, plans, records, schedule, supervisor
from ci.display import Display, Printer, discard, duration, prepare_output, process_age
from ci.exit_codes import FAILED, INTERRUPTED, OK, USAGE
from ci.forkserver import may_fork
from ci.ranks import Settings, check_seconds
from ci.session import Interrupted
from ci.subject import INSTALLED, PACKAGE, Patch, SetupError, Subject, version
from suites import cases as table
from suites.cases import Case, CaseError

if TYPE_CHECKING:
    from ci.fault_plan import Row as FaultRow
    from ci.schedule import Phases, Slot
    from suites.calibration import Result as CalibrationResult
    from suites.faults import Fault

EXIT_CODES = (
    "Exit codes: 0 all as expected; 1 something failed, is missing or was not run; 2 usage or set-up; "
    "130 interrupted by Ctrl-C, 143 by SIGTERM (the report is written all the same)."
)

app = typer.Typer(
    name="tiebench",
    help=f"Benchmark and regression suite for tied and untied output heads in distributed training.\n\n{EXIT_CODES}",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Format(str, Enum):
    """How `list` prints."""

    table = "table"
    json = "json"


class FlatFormat(str, Enum):
    """How `records` prints."""

    csv = "csv"
    json = "json"


class Launcher(str, Enum):
    """Where the ranks come from."""

    fork = "fork"
    spawn = "spawn"
    torchrun = "torchrun"
    external = "external"


def fail(message: str) -> NoReturn:
    """End with exit code 2 after one line."""
    _say(message)
    raise typer.Exit(USAGE)


def _given(param: typer.CallbackParam, value: str | None) -> str | None:
    """An option's text: an empty one, as an unset variable of a script leaves it, is no way to leave the option out."""
    if value is not None and not value.strip():
        fail(f"{param.opts[0]} is empty: give a value, or leave the option out")
    return value


def _some(param: typer.CallbackParam, values: list[str] | None) -> list[str] | None:
    for value in values or ():
        _given(param, value)
    return values


def _seconds(param: typer.CallbackParam, value: float | None) -> float | None:
    """A limit in seconds: JSON and timers know no infinity."""
    if value is None:
        return None
    try:
        return check_seconds(param.opts[0], value, 0.0 if param.name in ("budget", "spent", "report_every") else 0.1)
    except ValueError as error:
        fail(str(error))


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
    form: Annotated[Format, typer.Option("--format", help="How to print.")] = Format.table,
) -> None:
    """List a plan's cases, or explain what cases are made of."""
    found = _explained() if explain else _listed(_plan(plan))
    if form is Format.json:
        print(json.dumps(found, indent=2, ensure_ascii=False))
    elif explain:
        _print_explained(found)
    else:
        for case in found["cases"]:
            print(case["id"])


def _plan(name: str) -> plans.Plan:
    if name not in plans.PLANS:
        fail(f"unknown plan {name!r}; one of {', '.join(plans.PLANS)}")
    return plans.PLANS[name]


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
        float | None, typer.Option(help="Seconds for everything (default: the plan's).", callback=_seconds)
    ] = None,
    history: Annotated[
        str | None,
        typer.Option(help="Directory of earlier runs (default: runs).", metavar="DIRECTORY", callback=_given),
    ] = None,
    shard: Annotated[str | None, typer.Option(help="I/N: only the I-th of N equal parts.", callback=_given)] = None,
    form: Annotated[Format, typer.Option("--format", help="How to print.")] = Format.table,
) -> None:
    """Say what a plan would run, in which order and why, until when, and what its budget would leave out."""
    from ci import costs, forecast  # noqa: PLC0415
    from ci import history as past  # noqa: PLC0415

    planned = _plan(name)
    chosen = list(planned.cases)
    title = name
    if shard is not None:
        chosen = _part(chosen, shard)
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


# run


@app.command(epilog=EXIT_CODES)
def run(  # noqa: PLR0917 - each is an option, given by name on the command line
    plan: Annotated[
        str | None, typer.Option(help="Plan to run (smoke, unless --case is given).", callback=_given)
    ] = None,
    case: Annotated[
        list[str] | None, typer.Option(help="Run this case; may be given several times.", callback=_some)
    ] = None,
    path: Annotated[
        list[str] | None, typer.Option(help="Only cases of this path; may be given several times.", callback=_some)
    ] = None,
    k: Annotated[
        str | None, typer.Option("-k", help="Only cases whose id contains this text.", callback=_given)
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="Build to test: a pip requirement, git URL or directory (default: as installed).", callback=_given
        ),
    ] = None,
    patch: Annotated[
        str | None,
        typer.Option(help="Python file that every rank runs before a model is built.", metavar="FILE", callback=_given),
    ] = None,
    fault: Annotated[
        str | None,
        typer.Option(
            help="Bug (or harmless change) to put in on purpose, see `tiebench faults`: a bug's run is red, caught or "
            "not.",
            callback=_given,
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            help="Run directory; must be empty (default: runs/<time>-<plan>).", metavar="DIRECTORY", callback=_given
        ),
    ] = None,
    launcher: Annotated[Launcher, typer.Option(help="Where the ranks come from.")] = Launcher.fork,
    host: Annotated[
        str, typer.Option(help="Address that ranks connect to; for ranks on other machines.", callback=_given)
    ] = "127.0.0.1",
    device: Annotated[str, typer.Option(help="auto: CUDA and NCCL where there are enough GPUs; or cpu.")] = "auto",
    case_limit: Annotated[
        float, typer.Option(help="Seconds that a case may take on the ranks.", callback=_seconds)
    ] = 60.0,
    startup_limit: Annotated[
        float, typer.Option(help="Seconds that a set of ranks may take to come up.", callback=_seconds)
    ] = 300.0,
    budget: Annotated[
        float | None, typer.Option(help="Seconds for everything (default: the plan's).", callback=_seconds)
    ] = None,
    spent: Annotated[
        float, typer.Option(help="Seconds of the budget that are gone already: set-up, say.", callback=_seconds)
    ] = 0.0,
    shard: Annotated[str | None, typer.Option(help="I/N: only the I-th of N equal parts.", callback=_given)] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            help="Go on with a run that was cut short: its cases without a result, with its target, patch and fault.",
            metavar="DIRECTORY",
            callback=_given,
        ),
    ] = None,
    reference_cache: Annotated[
        bool, typer.Option(help="Keep what the reference computes, for later cases and runs, in the cache.")
    ] = True,
    report_every: Annotated[
        float, typer.Option(help="Seconds between two reports during the run; 0: none.", callback=_seconds)
    ] = periodic.INTERVAL,
) -> None:
    """Run cases and report on them."""
    before = None
    if resume is not None:
        chosen_by = {"--plan": plan, "--case": case, "--path": path, "-k": k, "--shard": shard, "--out": out}
        before = _begun(resume, chosen_by | {"--target": target, "--patch": patch, "--fault": fault})
        target, patch, fault = _subject_of(before)
    chosen = list(map(Case.parse, before.todo)) if before else _choose(plan, case, path, k)
    if target is not None:
        _check_tested(chosen)
    if shard is not None:
        chosen = _part(chosen, shard)
    name = before.plan.plan if before else plan or ("custom" if case else "smoke")
    if shard:
        name += f"-{shard.replace('/', 'of')}"
    if device not in ("auto", "cpu"):
        fail(f"--device {device}: one of auto, cpu")
    display = Display(len(chosen))
    subject = _subject(target, patch, fault, chosen, before=before, display=display, part=shard is not None)
    settings = Settings(
        launcher=launcher.value,
        host=host,
        device=device,
        case_limit=case_limit,
        startup_limit=startup_limit,
        references=_references() if reference_cache else None,
        say=display.say,
    )
    others = _other_nodes(settings, subject)
    directory = before.directory if before else Path(out) if out is not None else _default_out(name)
    if budget is None and not case and before is None:
        budget = plans.PLANS[plan or "smoke"].budget_seconds
    told: dict[str, Any] = {"budget": budget, "spent": spent + process_age(), "subject": subject, "nodes": others}
    told["settings"] = replace(settings, host=others.host) if others else settings
    told |= {"command": shlex.join(["tiebench", *_again(sys.argv[1:])]), "report_every": report_every or None}
    if before is None:
        _check_out(directory)
        whole = len(plans.PLANS[plan or "smoke"].cases)
        name += f" ({len(chosen)} of its {whole} cases)" if not case and len(chosen) < whole else ""
        what = f"{len(chosen)} case{'s' if len(chosen) > 1 else ''}, results in {directory}"
        task = partial(supervisor.run, chosen, directory, plan=name, **told)
    else:
        what = f"going on with {directory}: {len(chosen)} of {len(before.plan.cases)} cases have no result"
        task = partial(supervisor.resume, directory, **told)
    display.say(what)
    raise typer.Exit(_carry_out(task, directory, display, others))


def _carry_out(task: Callable[..., records.Run], directory: Path, display: Display, others: nodes.Nodes | None) -> int:
    """Run, report, and let the other nodes go; exit code."""
    code = FAILED
    try:
        with supervisor.interruptible(restore=False):
            code = _run(task, display)
            supervisor.ignore_signals()  # a second SIGTERM must not cost the report
            code = _report(directory, Printer(highlight=False), code)
    finally:
        if others:
            others.close(code)
    return code


def _subject(
    target: str | None,
    patch: str | None,
    fault: str | None,
    chosen: Sequence[Case],
    *,
    before: records.Run | None,
    display: Display,
    part: bool,
) -> Subject:
    """What is to be tested, installed; `part`: the cases are those of a shard, which need not use the target."""
    applied = _patch(patch, before)
    if fault is not None:
        _check_fault(fault, chosen)
    subject = Subject(patch=applied, fault=fault)
    if target is not None:
        subject = _install(target, subject, display)
        if not part and before is None and not any(map(subject.tests, chosen)):
            fail(f"--target {target}: no chosen case tests {subject.build.distribution if subject.build else ''}")
    return subject


def _other_nodes(settings: Settings, subject: Subject) -> nodes.Nodes | None:
    """The other machines, where torchrun has started a process on each. One that is not the first lends its ranks
    until the run is over, and ends here."""
    build = subject.build.directory if subject.build else None
    try:
        where = nodes.place()
        if where is None:
            return None
        if settings.launcher != "fork" or not may_fork(settings.device):
            raise SetupError("over several nodes ranks are forked: --launcher fork, and --device cpu where GPUs are")
        if where.node:
            raise typer.Exit(nodes.serve(where, build, settings.startup_limit, settings.say))
    except SetupError as error:
        fail(str(error))
    host = where.host if settings.host == Settings().host else settings.host
    return nodes.Nodes(where, host, build, settings.startup_limit, settings.say)


def _again(words: Sequence[str]) -> list[str]:
    """The words of this command without what holds for one run only."""
    once = ("--out", "--spent")
    kept: list[str] = []
    for word in words:
        if kept and kept[-1] in once:
            kept.pop()
        elif word.partition("=")[0] not in once or word in once:
            kept.append(word)
    return kept


def _references() -> Path:
    from ci.targets import cache_directory  # noqa: PLC0415

    return cache_directory() / "references"


def _begun(resume: str, others: Mapping[str, object]) -> records.Run:
    """A run to go on with; ends the program with its report where nothing of it is left to be run.

    Args:
        others: options that cannot be given beside it, and their values.
    """
    for option, value in others.items():
        if value is not None:
            fail(f"--resume goes on with what was planned: leave {option} out")
    directory = Path(resume)
    try:
        before = records.read_run(directory)
    except records.LogError as error:
        fail(f"--resume {directory}: {error}")
    if before.end is not None and before.end.reason == "complete" and not before.todo:
        _say(f"nothing to resume in {directory}: each of its {len(before.plan.cases)} cases has its result")
        raise typer.Exit(_report(directory, Printer(highlight=False), before.end.exit_code))
    return before


def _subject_of(before: records.Run) -> tuple[str | None, str | None, str | None]:
    """Target, patch and fault of a run, as the options of `tiebench run` are spelled."""
    words = shlex.split(before.plan.options)
    given = dict(zip(words[::2], words[1::2], strict=False))
    return given.get("--target"), given.get("--patch"), given.get("--fault")


def _patch(patch: str | None, before: records.Run | None) -> Patch | None:
    """The patch to run with, which a run that is resumed has run with before."""
    try:
        applied = Patch.read(Path(patch)) if patch is not None else None
    except SetupError as error:
        fail(str(error))
    names = {record.patch for record in before.records if record.patch} if before else set()
    if applied and names - {applied.name}:
        fail(f"--resume: {applied.path} has changed since its cases ran with it")
    return applied


def _run(task: Callable[..., records.Run], display: Display) -> int:
    """Run the cases; exit code. A run that had to stop still gets its report, after the line that says why."""
    try:
        with display:
            done = task(on_record=display.on_record, on_start=display.on_start)
    except (SetupError, records.LogError) as error:
        print(f"tiebench: {' '.join(str(error).split())}", file=sys.stderr)
        return USAGE
    return done.end.exit_code if done.end else FAILED


def _report(directory: Path, console: Printer, code: int) -> int:
    """Print and write the report; the exit code, which a report that cannot be written makes 2."""
    from reports.load import load  # noqa: PLC0415
    from reports.summary import summarize  # noqa: PLC0415
    from reports.terminal import print_report  # noqa: PLC0415
    from reports.write import write  # noqa: PLC0415

    try:
        summary = summarize(load(directory))
        print_report(summary, console)  # first: it needs no disk
        write(summary)
        console.print(f"Report: {directory / 'report.md'}, {directory / 'report.html'}", markup=False, soft_wrap=True)
    except records.LogError as error:
        if code != USAGE:
            print(f"tiebench: {error}", file=sys.stderr)
        return USAGE
    return code or summary.exit_code


def _choose(plan: str | None, ids: Sequence[str] | None, paths: Sequence[str] | None, text: str | None) -> list[Case]:
    """Cases that the options select, in the order in which they run."""
    if plan and ids:
        fail("--plan and --case exclude each other")
    try:
        chosen = [Case.parse(i) for i in ids] if ids else list(_plan(plan or "smoke").cases)
    except CaseError as error:
        fail(str(error))
    for name in paths or ():
        if name not in table.PATHS:
            fail(f"unknown path {name!r}; one of {', '.join(table.PATHS)}")
    kept = [c for c in dict.fromkeys(chosen) if (not paths or c.path in paths) and (text is None or text in c.id)]
    if not kept:
        fail("no case is left to run: the options --path and -k exclude all of them")
    if ids and (gone := [c for c in chosen if c not in kept]):
        fail(f"--case {gone[0].id} is excluded by {'--path' if paths and gone[0].path not in paths else '-k'}")
    return kept


def _part(chosen: list[Case], part: str) -> list[Case]:
    """The cases of one shard."""
    found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", part)
    if not found:
        fail(f"--shard {part}: write it as I/N, for example 1/4")
    try:
        kept = schedule.shard(chosen, int(found[1]), int(found[2]))
    except ValueError as error:
        fail(f"--{error}")
    return kept or fail(f"no case is left to run: --shard {part} of {len(chosen)} cases is empty")


def _check_tested(chosen: Sequence[Case]) -> None:
    """Refuse a target that no case would use: its name would stand over a report that says nothing of it."""
    from ci.targets import KINDS  # noqa: PLC0415

    if not any(PACKAGE.get(c.path, c.path) in KINDS for c in chosen):
        paths = ", ".join(dict.fromkeys(c.path for c in chosen))
        fail(f"--target is for {', '.join(KINDS)}, and no chosen case uses it (only path {paths}): leave it out")


def _check_fault(name: str, chosen: Sequence[Case]) -> None:
    fault = _fault(name)
    if any(c.path != fault.path for c in chosen):
        fail(f"--fault {name} is for path {fault.path} only: add --path {fault.path}")


def _fault(name: str) -> Fault:
    from suites.faults import FAULTS, HARMLESS, fault_of  # noqa: PLC0415

    try:
        return fault_of(name)
    except KeyError:
        fail(f"unknown fault {name!r}; one of {', '.join(sorted({**FAULTS, **HARMLESS}))}")


def _default_out(name: str) -> Path:
    stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    for number in range(1, 100):
        directory = Path("runs") / (f"{stamp}-{name}" + (f"-{number}" if number > 1 else ""))
        if not directory.exists():
            return directory
    fail(f"runs/{stamp}-{name} is taken: give --out")


def _check_out(directory: Path) -> None:
    """Refuse a directory that is in use before anything is installed; the record log checks again."""
    try:
        if directory.is_dir() and records.is_stillborn(directory):
            return
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            holds = (directory / records.EVENTS).is_file()
            what = "already holds a run" if holds else "is not an empty directory"
            hint = f", or go on with it: --resume {shlex.quote(str(directory))}" if holds else ""
            fail(f"--out {directory} {what}: choose another one{hint}")
    except OSError as error:
        fail(f"--out {directory}: {error.strerror or error}")


def _install(requirement: str, subject: Subject, display: Display) -> Subject:
    from ci import targets  # noqa: PLC0415

    try:
        built = targets.install(requirement, display.say)
    except targets.TargetError as error:
        fail(str(error))
    for line in built.unmet:
        display.say(f"note: {built.label} asks for {line}")
    return replace(subject, build=built)


# faults


@app.command("faults", epilog=EXIT_CODES)
def faults_command(  # noqa: PLR0917 - each is an option
    path: Annotated[
        list[str] | None, typer.Option(help="Only faults of this path; may be given several times.", callback=_some)
    ] = None,
    fault: Annotated[
        list[str] | None, typer.Option(help="Only this fault; may be given several times.", callback=_some)
    ] = None,
    form: Annotated[Format, typer.Option("--format", help="How to print.")] = Format.table,
    out: Annotated[
        str | None,
        typer.Option(
            help="Run directory; must be empty (default: runs/<time>-faults).", metavar="DIRECTORY", callback=_given
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto: CUDA and NCCL where there are enough GPUs; or cpu.")] = "auto",
    case_limit: Annotated[
        float, typer.Option(help="Seconds that a case may take on the ranks; a hang costs them all.", callback=_seconds)
    ] = 20.0,
) -> None:
    """Put every bug on purpose into its case and show which check sees it; exit code 1 when one is missed."""
    from ci import fault_plan  # noqa: PLC0415

    for name in path or ():
        if name not in table.PATHS:
            fail(f"unknown path {name!r}; one of {', '.join(table.PATHS)}")
    chosen = fault_plan.chosen([_fault(name).name for name in fault or ()], path or ())
    if not chosen:
        fail("no fault is left to run: the options --path and --fault exclude all of them")
    directory = Path(out) if out is not None else _default_out("faults")
    _check_out(directory)
    progress = Console(stderr=True, highlight=False) if form is Format.json else Printer(highlight=False)
    settings = Settings(device=device, case_limit=case_limit)
    rows: list[fault_plan.Row] = []

    def on_row(row: fault_plan.Row) -> None:
        rows.append(row)
        progress.print(f"[{len(rows)}/{len(chosen)}] {row.fault}: {row.verdict}", markup=False, soft_wrap=True)

    code = OK
    with supervisor.interruptible(restore=False):
        try:
            fault_plan.run(chosen, directory, settings, on_row=on_row)
        except (SetupError, records.LogError) as error:
            _say(str(error))
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
        typer.Option(help="Only this path; may be given several times (default: all installed).", callback=_some),
    ] = None,
    precision: Annotated[
        list[str] | None,
        typer.Option(help="Only this precision (float32, tf32, …); may be given several times.", callback=_some),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            help="Directory; one that holds a part of a calibration already is gone on with (default: "
            "runs/<time>-calibration).",
            metavar="DIRECTORY",
            callback=_given,
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
    directory = Path(out) if out is not None else _default_out("calibration")
    console = Printer(highlight=False)
    progress = calibrating.Progress(len(jobs), lambda text: console.print(text, markup=False, soft_wrap=True))
    code = OK
    with supervisor.interruptible(restore=False):
        try:
            progress.say(f"{len(jobs)} runs, results in {directory}")
            settings = Settings(device=device, case_limit=calibrating.CASE_LIMIT)
            calibrating.run(jobs, directory, settings, progress.on_start, progress.on_run)
        except (SetupError, records.LogError) as error:
            _say(str(error))
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
    raise typer.Exit(_report(directory, Printer(highlight=False), OK))


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
        _say(f"{text} is no text in this locale's encoding: rename it, or set LC_ALL=C.UTF-8")
        code = USAGE
    except (KeyboardInterrupt, Interrupted) as error:
        _say("interrupted")
        code = 128 + error.number if isinstance(error, Interrupted) else INTERRUPTED
    except OSError as error:
        _say(f"{error.filename or 'cannot write the output'}: {error.strerror or error}")
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
        _say(f"cannot write the output: {error.strerror or error}")
        discard(1)
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        return USAGE
    return code


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        print(f"tiebench: {' '.join(line.split())}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
