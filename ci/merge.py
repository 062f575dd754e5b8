"""One run directory out of the pieces of a run: shards, and several attempts at one shard. Fails closed.

Every planned case gets a record. A case that no piece finished becomes `lost` (a piece says that it started) or
`not_run`; a piece that cannot be read, was damaged or tested something else, a shard that is missing, and several
builds of one path are named in the end row, and the merged run is then not green. Pieces may have
been killed, resumed, or be still going. What earlier attempts at a case left stays in the merged log, before the record
that counts. `pieces.json` says what the whole was merged from (`ci.pieces`).

Time: the phases of the end row are those of all pieces together, its seconds those of the shard that took longest.

    python -m ci.merge --plan nightly --out runs/whole runs/shard1 runs/shard2      exit codes as of `tiebench report`

Without `--plan` the planned cases are those of the pieces.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import shlex
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import msgspec

from ci import environment, pieces, plans, records, schedule
from ci.exit_codes import USAGE
from ci.pieces import Merge, Piece
from ci.records import (
    EVENTS,
    RESULTS,
    EndRow,
    FinalRow,
    LogError,
    Record,
    RecordLog,
    Run,
    RunRow,
    StartedRow,
    expected,
    read_run,
)
from ci.subject import PACKAGE

MOST_PROBLEMS = 8  # in the end row's message
MOST_NAMES = 3  # of cases or pieces in one line
# A plan's name as `tiebench run --shard` and `ci.shards` write it: plan-1of4 (3 of its 12 cases), plan-shard-1-of-4
PLAN_NAME = re.compile(
    r"(?P<plan>.*?)(?:-(?:shard-)?(?P<index>\d{1,9})-?of-?(?P<count>\d{1,9}))?(?: \(.*\))?", re.DOTALL
)
SHARD = re.compile(r"shard-(\d{1,9})-of-(\d{1,9})\b")
UNSHARDED = "unsharded"
_Reason = Literal["complete", "budget", "interrupted", "error"]


@dataclass(frozen=True)
class Merged:
    """What became of a merge.

    Args:
        directory: the merged run directory.
        notes: what there is to know of the pieces, one line each, the problems first; `pieces.json` has them too, and
            the end row those that keep the run from being green.
        exit_code: 0 all planned cases as expected and no problem, else 1.
    """

    directory: Path
    notes: tuple[str, ...]
    exit_code: int


@dataclass(frozen=True)
class Label:
    """What the name of a run's plan says: the plan, and shard `index` of `count`, both 0 for a run of all."""

    plan: str
    index: int = 0
    count: int = 0

    @classmethod
    def of(cls, run: RunRow) -> Label:
        """Read from a first row."""
        found = PLAN_NAME.fullmatch(run.plan)
        if not found or not found["index"]:
            return cls(found["plan"] if found else run.plan)
        return cls(found["plan"], int(found["index"]), int(found["count"]))

    @property
    def group(self) -> str:
        """For people; pieces of one group ran one after the other."""
        return f"shard {self.index}/{self.count}" if self.count else UNSHARDED


def merge_runs(
    directories: Sequence[Path], plan: RunRow, out: Path, problems: Sequence[str] = (), *, whole: bool = True
) -> Merged:
    """Merge run directories into a new one.

    Args:
        directories: pieces, earlier attempts before later ones.
        plan: first row of the merged run: it says which cases there must be, and which target.
        out: made; must be empty or missing.
        problems: what the caller knows to be wrong (a shard that left no directory), one line each.
        whole: the plan has all its cases; False where it has those of the pieces, whatever is missing.

    Raises:
        LogError: `out` cannot be used.
    """
    runs, found, notes = _read(directories, plan)
    problems = [*problems, *found]
    problems += _missing_shards(runs, len(plan.cases) if whole else None, problems)
    history: dict[str, list[Record]] = defaultdict(list)
    for run in runs:
        _add(history, run)
    gone = [name for name in plan.cases if name not in history]
    problems += [f"{len(gone)} of {len(plan.cases)} planned cases are in no piece: {_some(gone)}"] if gone else []
    beyond = [name for name in history if name not in plan.cases]
    problems += [f"{beyond[0]} was run and is not in the plan{_and_more(beyond)}"] if beyond else []
    chosen = [record for name in [*plan.cases, *beyond] for record in _choose_all(name, history.get(name, []), plan)]
    problems += [*_targets(chosen), *_disagreements(history)]
    notes += [*_duplicates(runs), *_other_plans(runs, plan), *_versions(runs)]
    unended = _unended(runs)
    notes += unended
    code = 0 if chosen and not problems and all(map(expected, chosen)) else 1
    reason = _reason(runs, chosen, problems)
    message = _message([*problems, *(unended if reason != "complete" else ())])
    ran = {r.path: r.target for r in chosen if r.status in RESULTS}
    first = msgspec.structs.replace(
        plan,
        target=_target(chosen) or plan.target,
        targets=plan.targets | ran,
        phases=plan.phases or _planned_phases(runs),
    )
    with RecordLog(out, first) as log:
        for record in chosen:
            for attempt in (*_earlier(history.get(record.case, []), record), record):
                if attempt.started_at:
                    log.append(StartedRow(case=attempt.case, attempt=attempt.attempt, started_at=attempt.started_at))
                log.append(FinalRow(record=attempt))
        notes += _environments(runs, chosen, out)
        merge = Merge(pieces=tuple(map(_piece, runs)), problems=tuple(problems), notes=tuple(notes))
        pieces.write(out, merge)  # before the end: a run that has ended is whole
        log.append(
            EndRow(
                ended_at=_ended(runs),
                reason=reason,
                exit_code=code,
                message=message,
                phases=_sum(piece.phases for piece in merge.pieces),
                seconds=merge.longest[1] if merge.longest else None,
            )
        )
    return Merged(out, (*problems, *notes), code)


def results(directories: Sequence[Path]) -> tuple[set[str], set[str]]:
    """Cases that have a result, and cases that were started and lost, in the pieces so far. Unreadable pieces count as
    nothing: their cases are run again."""
    done: set[str] = set()
    lost: set[str] = set()
    for directory in directories:
        try:
            run = read_run(directory)
        except LogError:
            continue
        done |= {r.case for r in run.records if r.status in RESULTS}
        lost |= {r.case for r in run.records if r.status == "lost"}
    return done, lost - done


def _read(directories: Sequence[Path], plan: RunRow) -> tuple[list[Run], list[str], list[str]]:
    """The pieces that belong to the plan, each once; what is wrong with any of them; what else there is to know."""
    runs: list[Run] = []
    problems: list[str] = []
    notes: list[str] = []
    for directory in directories:
        name = _name(directory)
        try:
            run = read_run(directory)
        except LogError as error:
            problems.append(f"{name} cannot be read: {error}")
            continue
        if run.plan.options != plan.options:
            problems.append(f"{name} is left out: it ran with {run.plan.options!r}, not {plan.options!r}")
            continue
        again = next((at for at, other in enumerate(runs) if other.plan == run.plan), None)
        if again is not None:  # given twice, or copied while it was going: the longer log knows more
            longer = max(runs[again], run, key=lambda r: (r.directory / EVENTS).stat().st_size)
            notes.append(f"{name} and {_name(runs[again].directory)} are one and the same run: counted once")
            runs[again] = longer
            continue
        runs.append(run)
    problems += [f"{_name(run.directory)}: damaged, not counted: {line}" for run in runs for line in run.damage]
    return runs, problems, notes


def _missing_shards(runs: Sequence[Run], cases: int | None, said: Sequence[str]) -> list[str]:
    """One line for each number of shards of which some have no piece, but for those that are named in `said`; a plan of
    few cases has fewer shards."""
    seen: dict[int, set[int]] = defaultdict(set)
    for run in runs:
        label = Label.of(run.plan)
        if label.count:
            seen[label.count].add(label.index)
    lines = [f"the pieces are shards of {' and of '.join(map(str, sorted(seen)))}"] if len(seen) > 1 else []
    for line in said:
        if (found := SHARD.match(line)) and int(found[2]) in seen:
            seen[int(found[2])].add(int(found[1]))
    for count, present in seen.items():
        last = count if cases is None else min(count, cases)
        missing = last - sum(index <= last for index in present)
        if missing > 0:
            first = (f"shard-{index}-of-{count}" for index in range(1, last + 1) if index not in present)
            named = [name for name, _ in zip(first, range(MOST_NAMES), strict=False)]
            more = f" and {missing - len(named)} more" if missing > len(named) else ""
            lines.append(f"{', '.join(named)}{more}: no piece of it was given")
    return lines


def _some(names: Sequence[str]) -> str:
    return "; ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")


def _and_more(names: Sequence[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _add(history: dict[str, list[Record]], run: Run) -> None:
    """The records of one more piece, their attempts counted over all pieces: each piece counts from 1."""
    before = {name: max((r.attempt for r in found if _tried(r)), default=0) for name, found in history.items()}
    for record in run.records:
        attempt = before.get(record.case, 0) + record.attempt if _tried(record) else before.get(record.case, 0) or 1
        history[record.case].append(msgspec.structs.replace(record, attempt=attempt))


def _tried(record: Record) -> bool:
    return record.status != "not_run" or record.reason == "running"


def _versions(runs: Sequence[Run]) -> list[str]:
    """Worth a look and no fault: a run may be resumed by another version too."""
    found: dict[str, list[str]] = defaultdict(list)
    for run in runs:
        for segment in run.segments:
            if _name(run.directory) not in found[segment.first.tiebench]:
                found[segment.first.tiebench].append(_name(run.directory))
    told = "; ".join(f"{version} ({_some(names)})" for version, names in found.items())
    return [f"the pieces were run by {len(found)} versions of tiebench: {told}"] if len(found) > 1 else []


def _disagreements(history: Mapping[str, Sequence[Record]]) -> list[str]:
    found = [line for name, all_of in history.items() if (line := _disagreement(name, all_of))]
    return [found[0] + _and_more(found)] if found else []


def _duplicates(runs: Sequence[Run]) -> list[str]:
    """Cases with a result in several pieces."""
    found: dict[str, list[str]] = defaultdict(list)
    for run in runs:
        for case in dict.fromkeys(r.case for r in run.records if r.status in RESULTS):
            found[case].append(_name(run.directory))
    twice = [case for case, names in found.items() if len(names) > 1]
    if not twice:
        return []
    where = _some(found[twice[0]])
    many = f"{len(twice)} cases have" if len(twice) > 1 else "1 case has"
    return [f"{many} a result in more than one piece, the worst counts; {twice[0]} ({where}){_and_more(twice)}"]


def _other_plans(runs: Sequence[Run], plan: RunRow) -> list[str]:
    """Pieces of another plan: what they say of a planned case is as good."""
    wanted = Label.of(plan).plan
    found: dict[str, list[str]] = defaultdict(list)
    for run in runs:
        found[Label.of(run.plan).plan].append(_name(run.directory))
    others = {name: names for name, names in found.items() if name != wanted}
    return [f"{_some(names)}: plan {name!r}, not {wanted!r}" for name, names in others.items()]


def _unended(runs: Sequence[Run]) -> list[str]:
    """Pieces without an end."""
    found: dict[str, list[str]] = defaultdict(list)
    for run in runs:
        if run.end is None:
            found[pieces.GOING if run.running else pieces.KILLED].append(_name(run.directory))
    return [f"{what}: {_some(names)}" for what, names in found.items()]


def _piece(run: Run) -> Piece:
    return Piece(
        name=_name(run.directory),
        plan=run.plan.plan,
        group=Label.of(run.plan).group,
        started_at=run.plan.started_at,
        ended=run.end.reason if run.end else pieces.GOING if run.running else pieces.KILLED,
        tiebench=run.segments[-1].first.tiebench,
        cases=len(run.plan.cases),
        results=sum(r.status in RESULTS for r in run.records),
        budget_seconds=run.budget_seconds,
        seconds=run.seconds if run.seconds is not None and math.isfinite(run.seconds) else None,
        segments=len(run.segments),
        phases=_sum([pieces.used_phases(run)]),
    )


def _planned_phases(runs: Sequence[Run]) -> dict[str, float]:
    """What all shards together were expected to take: a later attempt at one plans a part of it once more."""
    first: dict[str, RunRow] = {}
    for run in runs:
        first.setdefault(Label.of(run.plan).group, run.plan)
    return _sum(row.phases for row in first.values())


def _sum(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Sums by name; without what is no finite number, which JSON cannot say."""
    total: dict[str, float] = defaultdict(float)
    for part in parts:
        for name, seconds in part.items():
            total[name] += seconds
    return {name: seconds for name, seconds in total.items() if math.isfinite(seconds)}


def _name(directory: Path) -> str:
    return f"{directory.parent.name}/{directory.name}"


def _choose_all(name: str, found: Sequence[Record], plan: RunRow) -> list[Record]:
    """The records of a case that count: one, or one a fault where a fault plan ran it with several."""
    faults = dict.fromkeys(r.fault for r in found if r.status in RESULTS)
    if len(faults) < 2:
        return [_choose(name, found, plan)]
    return [_choose(name, [r for r in found if r.fault == fault], plan) for fault in faults]


def _choose(name: str, found: Sequence[Record], plan: RunRow) -> Record:
    """The record that counts: a result before none; of several results one that is not green; else the last. Without a
    result: what is going or to come, then what was lost."""
    with_result = [r for r in found if r.status in RESULTS]
    if with_result:
        return ([r for r in with_result if not expected(r)] or with_result)[-1]
    for wanted in ("running", "pending"):
        if to_come := [r for r in found if r.reason == wanted]:
            return to_come[-1]
    lost = [r for r in found if r.status == "lost"]
    if lost or found:
        return (lost or found)[-1]
    path, _, rest = name.partition(":")
    return Record(
        case=name,
        path=path,
        target=records.target_of(plan, name),
        status="not_run",
        evidence="no piece of this run left a row for this case: its shard never began, or died before its first row",
        factors=dict(part.split("=", 1) for part in rest.split(",") if "=" in part),
        rerun=f"tiebench run --case {shlex.quote(name)} {plan.options}".strip(),
    )


def _earlier(found: Sequence[Record], chosen: Record) -> list[Record]:
    return [r for r in found if r != chosen and r.status != "not_run" and r.fault == chosen.fault]


def _disagreement(name: str, found: Sequence[Record]) -> str | None:
    verdicts = dict.fromkeys(str(r.verdict) for r in found if r.status in RESULTS)
    green = {v in records.GREEN for v in verdicts}
    return f"{name}: attempts disagree ({', '.join(verdicts)})" if len(green) > 1 else None


def _targets(chosen: Iterable[Record]) -> list[str]:
    """One line for every path of which more than one build was tested."""
    seen: dict[str, set[str]] = defaultdict(set)
    for record in chosen:
        if record.status in RESULTS:
            seen[record.path].add(record.target)
    return [
        f"path {path} was run with {len(names)} builds: {', '.join(sorted(names))}"
        for path, names in seen.items()
        if len(names) > 1
    ]


def _target(chosen: Iterable[Record]) -> str | None:
    """The build under test, as the cases of a framework's own path say it (a shard may hold none of those)."""
    named = [r for r in chosen if r.status in RESULTS]
    of_framework = [r for r in named if r.path not in PACKAGE] or named
    return of_framework[0].target if of_framework else None


def _reason(runs: Sequence[Run], chosen: Sequence[Record], problems: Sequence[str]) -> _Reason:
    if problems:
        return "error"
    if all(r.status in RESULTS for r in chosen):
        return "complete"
    ends = {run.end.reason if run.end else "error" for run in runs} or {"error"}
    for reason in ("error", "interrupted", "budget"):
        if reason in ends:
            return reason
    return "error"


def _message(problems: Sequence[str]) -> str:
    left = len(problems) - MOST_PROBLEMS
    return "; ".join([*problems[:MOST_PROBLEMS], *([f"and {left} more"] if left > 0 else [])])


def _ended(runs: Sequence[Run]) -> str:
    """When the last piece ended, where every piece says so: a merge may come hours later."""
    ends = [run.end.ended_at for run in runs if run.end]
    if ends and len(ends) == len(runs):
        return max(ends)
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def _environments(runs: Sequence[Run], chosen: Iterable[Record], out: Path) -> list[str]:
    """Write the environment that most cases ran in; one line for each other one, saying how it differs."""
    seen: dict[str, Mapping[str, Any]] = {}
    for run in runs:
        try:
            found = json.loads((run.directory / records.ENVIRONMENT).read_bytes())
        except (OSError, ValueError):
            continue
        names = {r.environment for r in run.records if r.environment}
        if isinstance(found, dict) and len(names) == 1:
            seen.setdefault(names.pop(), found)
    counted = Counter(r.environment for r in chosen if r.environment in seen)
    if not counted:
        return []
    first, *others = [name for name, _ in counted.most_common()]
    notes = []
    for name in others:
        keys = [f"{key}: {a} / {b}" for key, a, b in environment.difference(seen[first], seen[name])]
        notes.append(f"{counted[name]} cases ran in another environment ({'; '.join(keys[:5]) or 'no key differs'})")
    content = dict(seen[first]) | ({"other_environments": notes} if notes else {})
    data = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False).encode() + b"\n"
    records.write_whole(out / records.ENVIRONMENT, data)
    return notes


def planned(name: str | None, directories: Sequence[Path], out: Path) -> RunRow:
    """First row for the whole of a plan, with the target of its first readable piece.

    The budget is that of the shard that was given most, all attempts at it together.

    Args:
        name: of a plan; None: what the pieces planned.

    Raises:
        LogError: no piece can be read, or there is no such plan.
    """
    if name is not None and name not in plans.PLANS:
        raise LogError(f"unknown plan {name!r}; one of {', '.join(plans.PLANS)}")
    runs: list[Run] = []
    for directory in directories:
        with contextlib.suppress(LogError):
            runs.append(read_run(directory))
    if not runs:
        raise LogError(f"none of the {len(directories)} directories can be read as a run")
    first = runs[0].plan
    if name is not None:
        cases, whole = tuple(case.id for case in schedule.order(plans.PLANS[name].cases)), name
        command = f"tiebench run --plan {name} {first.options}".strip()
    else:
        cases = tuple(dict.fromkeys(case for run in runs for case in run.plan.cases))
        whole, command = _whole_name([Label.of(run.plan).plan for run in runs], cases), first.command
    budgets: dict[str, float] = defaultdict(float)
    for run in {run.plan.started_at + run.plan.run_id: run for run in runs}.values():
        budgets[Label.of(run.plan).group] += run.budget_seconds
    return msgspec.structs.replace(
        first,
        schema=records.SCHEMA,
        run_id=out.resolve().name,
        plan=whole,
        cases=cases,
        command=command,
        budget_seconds=max(budgets.values()),
        started_at=min(run.plan.started_at for run in runs),
        targets=dict(pair for run in reversed(runs) for pair in run.plan.targets.items()),
        forecast=None,
        phases={},
        pid=0,
    )


def _whole_name(names: Sequence[str], cases: Sequence[str]) -> str:
    """Name of what the pieces planned together."""
    name = names[0]
    if name in plans.PLANS and len(cases) < (whole := len(plans.PLANS[name].cases)):
        return f"{name} ({len(cases)} of its {whole} cases)"
    return name


def main(arguments: Sequence[str] | None = None) -> int:
    """Merge the shards of a plan and report on the whole."""
    parser = argparse.ArgumentParser(prog="python -m ci.merge", description="Merge the shards of a plan into one run.")
    parser.add_argument("--plan", help="plan that the shards together are (default: what they planned)")
    parser.add_argument("--out", required=True, type=Path, help="run directory to make")
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR", help="run directory of a shard")
    given = parser.parse_args(arguments)
    from reports.terminal import print_report  # noqa: PLC0415 - pandas takes a second to import
    from reports.write import write_report  # noqa: PLC0415

    try:
        plan = planned(given.plan, given.directories, given.out)
        merged = merge_runs(given.directories, plan, given.out, whole=given.plan is not None)
        summary = write_report(given.out)
    except LogError as error:
        print(f"merge: {error}", file=sys.stderr)
        return USAGE
    print_report(summary)  # with the notes of the merge
    return merged.exit_code or summary.exit_code


if __name__ == "__main__":
    sys.exit(main())
