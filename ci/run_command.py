"""The command `tiebench run`: what is run, where, against what; also to go on with a run, and over several nodes."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ci import nodes, periodic, plans, records, supervisor
from ci.display import Display, Printer, process_age
from ci.exit_codes import FAILED, USAGE
from ci.forkserver import may_fork
from ci.options import (
    Launcher,
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
from ci.subject import PACKAGE, Patch, SetupError, Subject
from suites import cases as table
from suites.cases import Case, CaseError

if TYPE_CHECKING:
    pass


def run(  # noqa: PLR0917 - each is an option, given by name on the command line
    plan: Annotated[
        str | None, typer.Option(help="Plan to run (smoke, unless --case is given).", callback=given)
    ] = None,
    case: Annotated[
        list[str] | None, typer.Option(help="Run this case; may be given several times.", callback=some)
    ] = None,
    path: Annotated[
        list[str] | None, typer.Option(help="Only cases of this path; may be given several times.", callback=some)
    ] = None,
    k: Annotated[str | None, typer.Option("-k", help="Only cases whose id contains this text.", callback=given)] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="Build to test: a pip requirement, git URL or directory (default: as installed).", callback=given
        ),
    ] = None,
    patch: Annotated[
        str | None,
        typer.Option(help="Python file that every rank runs before a model is built.", metavar="FILE", callback=given),
    ] = None,
    fault: Annotated[
        str | None,
        typer.Option(
            help="Bug (or harmless change) to put in on purpose, see `tiebench faults`: a bug's run is red, caught or "
            "not.",
            callback=given,
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            help="Run directory; must be empty (default: runs/<time>-<plan>).", metavar="DIRECTORY", callback=given
        ),
    ] = None,
    launcher: Annotated[Launcher, typer.Option(help="Where the ranks come from.")] = Launcher.fork,
    host: Annotated[
        str, typer.Option(help="Address that ranks connect to; for ranks on other machines.", callback=given)
    ] = "127.0.0.1",
    device: Annotated[str, typer.Option(help="auto: CUDA and NCCL where there are enough GPUs; or cpu.")] = "auto",
    case_limit: Annotated[
        float, typer.Option(help="Seconds that a case may take on the ranks.", callback=seconds)
    ] = 60.0,
    startup_limit: Annotated[
        float, typer.Option(help="Seconds that a set of ranks may take to come up.", callback=seconds)
    ] = 300.0,
    budget: Annotated[
        float | None, typer.Option(help="Seconds for everything (default: the plan's).", callback=seconds)
    ] = None,
    spent: Annotated[
        float, typer.Option(help="Seconds of the budget that are gone already: set-up, say.", callback=seconds)
    ] = 0.0,
    shard: Annotated[str | None, typer.Option(help="I/N: only the I-th of N equal parts.", callback=given)] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            help="Go on with a run that was cut short: its cases without a result, with its target, patch and fault.",
            metavar="DIRECTORY",
            callback=given,
        ),
    ] = None,
    reference_cache: Annotated[
        bool, typer.Option(help="Keep what the reference computes, for later cases and runs, in the cache.")
    ] = True,
    recheck: Annotated[
        int | None,
        typer.Option(
            help="So many cases are run once more alone and compared bit for bit (default: the plan's).",
            min=0,
            max=10_000,
        ),
    ] = None,
    known: Annotated[
        bool,
        typer.Option(help="Refusals and known issues of the suite's tables are as expected (`tiebench known`)."),
    ] = True,
    report_every: Annotated[
        float, typer.Option(help="Seconds between two reports during the run; 0: none.", callback=seconds)
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
        chosen = part_of(chosen, shard)
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
        known=known,
        say=display.say,
    )
    others = _other_nodes(settings, subject)
    directory = before.directory if before else Path(out) if out is not None else default_out(name)
    if budget is None and not case and before is None:
        budget = plans.PLANS[plan or "smoke"].budget_seconds
    told: dict[str, Any] = {"budget": budget, "spent": spent + process_age(), "subject": subject, "nodes": others}
    told["settings"] = replace(settings, host=others.host) if others else settings
    told |= {"command": shlex.join(["tiebench", *_again(sys.argv[1:])]), "report_every": report_every or None}
    if before is None:
        check_out(directory)
        whole = len(plans.PLANS[plan or "smoke"].cases)
        name += f" ({len(chosen)} of its {whole} cases)" if not case and len(chosen) < whole else ""
        what = f"{len(chosen)} case{'s' if len(chosen) > 1 else ''}, results in {directory}"
        if recheck is None:
            recheck = 0 if case or others else plans.PLANS[plan or "smoke"].recheck
        task = partial(supervisor.run, chosen, directory, plan=name, recheck=recheck, **told)
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
            code = report_on(directory, Printer(highlight=False), code)
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
        say(f"nothing to resume in {directory}: each of its {len(before.plan.cases)} cases has its result")
        raise typer.Exit(report_on(directory, Printer(highlight=False), before.end.exit_code))
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


def _choose(plan: str | None, ids: Sequence[str] | None, paths: Sequence[str] | None, text: str | None) -> list[Case]:
    """Cases that the options select, in the order in which they run."""
    if plan and ids:
        fail("--plan and --case exclude each other")
    try:
        chosen = [Case.parse(i) for i in ids] if ids else list(plan_of(plan or "smoke").cases)
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


def _check_tested(chosen: Sequence[Case]) -> None:
    """Refuse a target that no case would use: its name would stand over a report that says nothing of it."""
    from ci.targets import KINDS  # noqa: PLC0415

    if not any(PACKAGE.get(c.path, c.path) in KINDS for c in chosen):
        paths = ", ".join(dict.fromkeys(c.path for c in chosen))
        fail(f"--target is for {', '.join(KINDS)}, and no chosen case uses it (only path {paths}): leave it out")


def _check_fault(name: str, chosen: Sequence[Case]) -> None:
    fault = fault_named(name)
    if any(c.path != fault.path for c in chosen):
        fail(f"--fault {name} is for path {fault.path} only: add --path {fault.path}")


def _install(requirement: str, subject: Subject, display: Display) -> Subject:
    from ci import targets  # noqa: PLC0415

    try:
        built = targets.install(requirement, display.say)
    except targets.TargetError as error:
        fail(str(error))
    for line in built.unmet:
        display.say(f"note: {built.label} asks for {line}")
    return replace(subject, build=built)
