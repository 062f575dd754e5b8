"""The command `tiebench ladder`: the same cases against many builds, or over the commits of a repository."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ci import plans, records, supervisor
from ci.display import Printer
from ci.exit_codes import FAILED, OK, USAGE
from ci.options import default_out, fail, given, plan_of, say, seconds, some
from ci.ranks import Settings
from ci.subject import SetupError
from ci.targets import KINDS
from suites.cases import Case, CaseError

if TYPE_CHECKING:  # reports read with pandas, which takes a second to import
    from ci import ladder as climbing


class LadderFormat(str, Enum):
    """How a ladder is printed."""

    table = "table"
    markdown = "markdown"
    json = "json"


def ladder(  # noqa: PLR0917 - each is an option, given by name on the command line
    targets: Annotated[
        list[str] | None, typer.Argument(help="Builds, the oldest first: pip requirements, git URLs or directories.")
    ] = None,
    plan: Annotated[
        str | None, typer.Option(help="Plan to run (smoke, unless --case is given).", callback=given)
    ] = None,
    case: Annotated[
        list[str] | None, typer.Option(help="Run this case; may be given several times.", callback=some)
    ] = None,
    k: Annotated[str | None, typer.Option("-k", help="Only cases whose id contains this text.", callback=given)] = None,
    commits: Annotated[
        str | None,
        typer.Option(
            help="Commits of --repo instead of builds; only what differs is bisected.", metavar="A..B", callback=given
        ),
    ] = None,
    repo: Annotated[
        str | None,
        typer.Option(help="Git repository of --commits: a path or URL.", metavar="PATH_OR_URL", callback=given),
    ] = None,
    most_builds: Annotated[int, typer.Option(help="With --commits: builds between the ends.", min=0)] = 24,
    out: Annotated[
        str | None,
        typer.Option(
            help="Directory of all run directories; what it holds already is not run again.",
            metavar="DIRECTORY",
            callback=given,
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto: CUDA and NCCL where there are enough GPUs; or cpu.")] = "auto",
    case_limit: Annotated[
        float, typer.Option(help="Seconds that a case may take on the ranks.", callback=seconds)
    ] = 60.0,
    form: Annotated[LadderFormat, typer.Option("--format", help="How to print.")] = LadderFormat.table,
) -> None:
    """Run the same cases against many builds and print what changes between them.

    Exit code 0 when all builds could be asked, 1 when one could not.
    """
    from ci import ladder as climbing  # noqa: PLC0415

    if (commits is None) != (repo is None):
        fail("--commits and --repo go together")
    if commits is not None and targets:
        fail("give builds or --commits, not both")
    if commits is None and not targets:
        fail("give builds, the oldest first: tiebench ladder deepspeed==0.19.5 deepspeed==0.19.8")
    if device not in ("auto", "cpu"):
        fail(f"--device {device}: one of auto, cpu")
    chosen = _cases(plan, case, k)
    name = plan or ("custom" if case else "smoke")
    budget = None if case else plans.PLANS[name].budget_seconds
    directory = Path(out) if out is not None else default_out(f"{name}-ladder")
    settings = Settings(device=device, case_limit=case_limit, known=False, say=say)
    made = climbing.Ladder(chosen, directory, settings, say, f"{name} ({len(chosen)} cases)", budget)
    try:
        with supervisor.interruptible():
            if commits is None:
                raise typer.Exit(_climbed(made, targets or [], form))
            raise typer.Exit(_bisected(made, str(repo), commits, most_builds, form))
    except (climbing.LadderError, SetupError, records.LogError) as error:
        say(str(error))
        raise typer.Exit(USAGE) from None


def _cases(plan: str | None, ids: Sequence[str] | None, text: str | None) -> list[Case]:
    if plan and ids:
        fail("--plan and --case exclude each other")
    try:
        chosen = [Case.parse(i) for i in ids] if ids else list(plan_of(plan or "smoke").cases)
    except CaseError as error:
        fail(str(error))
    kept = [c for c in dict.fromkeys(chosen) if c.path in KINDS and (text is None or text in c.id)]
    return kept or fail("no case is left to run: builds can be named for " + ", ".join(KINDS) + " only")


def _climbed(made: climbing.Ladder, requirements: Sequence[str], form: LadderFormat) -> int:
    from reports import ladder as reading  # noqa: PLC0415

    rungs = made.climb(requirements)
    if form is LadderFormat.json:
        print(json.dumps(reading.as_json(rungs), indent=2, ensure_ascii=False))
    elif form is LadderFormat.markdown:
        print(reading.markdown(rungs), end="")
    else:
        reading.print_ladder(rungs, Printer(highlight=False))
    text = reading.markdown(rungs)
    records.write_whole(made.out / "ladder.md", text.encode())
    return FAILED if any(one.problem for one in rungs) else OK


def _bisected(made: climbing.Ladder, place: str, span: str, most_builds: int, form: LadderFormat) -> int:
    from ci import ladder as climbing  # noqa: PLC0415
    from reports import ladder as reading  # noqa: PLC0415
    from reports.text import md  # noqa: PLC0415

    repository = climbing.Repository.open(place, made.out, made.say)
    ends, culprits, left = climbing.bisect(made, repository, repository.commits(span), most_builds)
    lines = [
        f"{found.family}: {found.before} → {found.after} at {found.commit[:12]} ({found.subject})"
        + (f", or at one of {len(found.unsure)} commits before it that cannot be run" if found.unsure else "")
        for found in culprits
    ]
    lines += [f"{name}: not found within {most_builds} builds, raise --most-builds" for name in left]
    if form is LadderFormat.json:
        told = {**reading.as_json(ends), "commits": [asdict(found) for found in culprits], "left": left}
        print(json.dumps(told, indent=2, ensure_ascii=False))
    elif form is LadderFormat.markdown:
        print(reading.markdown(ends) + "\n" + "\n".join(f"- {line}" for line in map(md, lines)))
    else:
        console = Printer(highlight=False)
        reading.print_ladder(ends, console)
        for line in lines:
            console.print(line, markup=False, soft_wrap=True)
    return FAILED if left or any(one.problem for one in ends) else OK
