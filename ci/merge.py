"""One run directory out of the pieces of a run: shards, and several attempts at one shard. Fails closed.

Every planned case gets a record. A case that no piece finished becomes `lost` (a piece says that it started) or
`not_run`; a piece that cannot be read, was damaged or tested something else is named in the end row, and the merged run
is then not green. What earlier attempts at a case left stays in the merged log, before the record that counts.

    python -m ci.merge --plan nightly --out runs/whole runs/shard1 runs/shard2      exit codes as of `tiebench report`
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import msgspec

from ci import environment, plans, records, schedule
from ci.exit_codes import USAGE
from ci.records import EndRow, FinalRow, LogError, Record, RecordLog, Run, RunRow, StartedRow, expected, read_run
from ci.subject import PACKAGE

RESULTS = ("finished", "timeout", "skipped")  # a case with one of these needs no further attempt
MOST_PROBLEMS = 8  # in the end row's message
_Reason = Literal["complete", "budget", "interrupted", "error"]


@dataclass(frozen=True)
class Merged:
    """What became of a merge.

    Args:
        directory: the merged run directory.
        notes: problems of the pieces, one line each; those that keep the run from being green are in the end row too.
        exit_code: 0 all planned cases as expected and no problem, else 1.
    """

    directory: Path
    notes: tuple[str, ...]
    exit_code: int


def merge_runs(directories: Sequence[Path], plan: RunRow, out: Path, problems: Sequence[str] = ()) -> Merged:
    """Merge run directories into a new one.

    Args:
        directories: pieces, earlier attempts before later ones.
        plan: first row of the merged run: it says which cases there must be, and which target.
        out: made; must be empty or missing.
        problems: what the caller knows to be wrong (a shard that left no directory), one line each.

    Raises:
        LogError: `out` cannot be used.
    """
    runs, found = _read(directories, plan)
    problems = [*problems, *found]
    history: dict[str, list[Record]] = defaultdict(list)
    for run in runs:
        for record in run.records:
            history[record.case].append(record)
    gone = sum(name not in history for name in plan.cases)
    problems += [f"{gone} of {len(plan.cases)} planned cases are in no piece"] if gone else []
    beyond = [name for name in history if name not in plan.cases]
    problems += [f"{name} was run and is not in the plan" for name in beyond]
    chosen = {name: _choose(name, history.get(name, []), plan) for name in [*plan.cases, *beyond]}
    problems += _targets(chosen.values())
    problems += [line for name, all_of in history.items() if (line := _disagreement(name, all_of))]
    code = 0 if chosen and not problems and all(map(expected, chosen.values())) else 1
    reason = _reason(runs, list(chosen.values()), problems)
    killed = [_name(run.directory) for run in runs if run.end is None]
    message = _message([*problems, *([f"killed: {', '.join(killed)}"] if killed and reason != "complete" else [])])
    ran = {r.path: r.target for r in chosen.values() if r.status in RESULTS}
    first = msgspec.structs.replace(plan, target=_target(chosen.values()) or plan.target, targets=plan.targets | ran)
    with RecordLog(out, first) as log:
        for name, record in chosen.items():
            for attempt in (*_earlier(history.get(name, []), record), record):
                if attempt.started_at:
                    log.append(StartedRow(case=name, attempt=attempt.attempt, started_at=attempt.started_at))
                log.append(FinalRow(record=attempt))
        log.append(EndRow(ended_at=_ended(runs), reason=reason, exit_code=code, message=message))
    notes = [*problems, *_environments(runs, chosen.values(), out)]
    return Merged(out, tuple(notes), code)


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


def _read(directories: Sequence[Path], plan: RunRow) -> tuple[list[Run], list[str]]:
    """The pieces that belong to the plan, and what is wrong with any of them."""
    runs: list[Run] = []
    problems: list[str] = []
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
        problems += [f"{name}: damaged, not counted: {line}" for line in run.damage]
        runs.append(run)
    return runs, problems


def _name(directory: Path) -> str:
    return f"{directory.parent.name}/{directory.name}"


def _choose(name: str, found: Sequence[Record], plan: RunRow) -> Record:
    """The record that counts: a result before none; of several results one that is not green; else the last."""
    numbered = _numbered(found)
    with_result = [r for r in numbered if r.status in RESULTS]
    if with_result:
        return ([r for r in with_result if not expected(r)] or with_result)[-1]
    lost = [r for r in numbered if r.status == "lost"]
    if lost:
        return lost[-1]
    if numbered:
        return numbered[-1]
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


def _numbered(found: Sequence[Record]) -> list[Record]:
    """With attempts counted over all pieces: each piece counts from 1."""
    numbered, count = [], 0
    for record in found:
        count += record.status != "not_run"
        numbered.append(msgspec.structs.replace(record, attempt=max(1, count)))
    return numbered


def _earlier(found: Sequence[Record], chosen: Record) -> list[Record]:
    return [r for r in _numbered(found) if r != chosen and r.status != "not_run"]


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


def planned(name: str, directories: Sequence[Path], out: Path) -> RunRow:
    """First row for the whole of a plan, with the target of its first readable piece.

    Raises:
        LogError: no piece can be read, or there is no such plan.
    """
    if name not in plans.PLANS:
        raise LogError(f"unknown plan {name!r}; one of {', '.join(plans.PLANS)}")
    for directory in directories:
        try:
            first = read_run(directory).plan
        except LogError:
            continue
        cases = tuple(case.id for case in schedule.order(plans.PLANS[name].cases))
        command = f"tiebench run --plan {name} {first.options}".strip()
        return msgspec.structs.replace(first, run_id=out.resolve().name, plan=name, cases=cases, command=command)
    raise LogError(f"none of the {len(directories)} directories can be read as a run")


def main(arguments: Sequence[str] | None = None) -> int:
    """Merge the shards of a plan and report on the whole."""
    parser = argparse.ArgumentParser(prog="python -m ci.merge", description="Merge the shards of a plan into one run.")
    parser.add_argument("--plan", required=True, help="plan that the shards together are")
    parser.add_argument("--out", required=True, type=Path, help="run directory to make")
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR", help="run directory of a shard")
    given = parser.parse_args(arguments)
    from reports.terminal import print_report  # noqa: PLC0415 - pandas takes a second to import
    from reports.write import write_report  # noqa: PLC0415

    try:
        merged = merge_runs(given.directories, planned(given.plan, given.directories, given.out), given.out)
        summary = write_report(given.out)
    except LogError as error:
        print(f"merge: {error}", file=sys.stderr)
        return USAGE
    print_report(summary)
    for note in merged.notes:
        print(f"note: {note}")
    return merged.exit_code or summary.exit_code


if __name__ == "__main__":
    sys.exit(main())
