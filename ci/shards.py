"""A night in shards: what is on disk, how one shard runs, and how the whole is collected. Knows nothing of Modal.

Under a root that outlives the processes (a Volume's mount, any directory):

    RUN/night.json                                   the plan, written before any shard starts
    RUN/shard-1-of-4/attempt-01-5f3a9c1e/            one run directory an attempt (events.jsonl, logs, …)
    RUN/shard-1-of-4/attempt-02-77b0d2aa/            only what attempt 1 did not finish
    RUN/report-01/                                   the merged run with report.md and report.html

A shard may be killed at any moment and started again, also twice at once: every attempt writes in a directory of its
own, and cases with a result are not run again. Cases that an attempt was killed in come last, so that one deadly case
costs itself only.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import msgspec

from ci import records, schedule, supervisor
from ci.merge import merge_runs, results
from ci.ranks import Settings
from ci.records import LogError, RunRow
from ci.subject import Subject
from suites.cases import Case

NIGHT = "night.json"
REPORT = "report"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
Say = Callable[[str], None]


class ShardInterrupted(Exception):
    """An attempt was told to stop before its cases were through: run the shard again."""


@dataclass(frozen=True)
class Store:
    """Where the night's files live.

    Args:
        root: directory of all runs.
        commit: makes what was written last beyond this machine.
        reload: makes visible what other machines committed.
    """

    root: Path
    commit: Callable[[], None] = lambda: None
    reload: Callable[[], None] = lambda: None

    def run(self, run_id: str) -> Path:
        """Directory of one night.

        Raises:
            LogError: no good name.
        """
        if not _NAME.fullmatch(run_id):
            raise LogError(f"run id {run_id!r}: letters, digits, dots, dashes and underscores only")
        return self.root / run_id


class Night(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of `night.json`.

    Args:
        run: first row of the merged run: plan, cases, target.
        shards: in how many parts the cases are run.
        target: pip requirement to install aside in every shard, None for what the image has.
        seconds: how long after `run.started_at` the night is over in any case.
        shard_budget, case_limit, startup_limit: seconds, of one call for a shard, a case, a set of ranks.
        device: "auto" or "cpu".
    """

    run: RunRow
    shards: int
    target: str | None
    seconds: float
    shard_budget: float
    case_limit: float
    startup_limit: float
    device: str

    def cases(self, index: int) -> list[Case]:
        """Cases of shard `index` (from 1)."""
        return schedule.shard([Case.parse(name) for name in self.run.cases], index, self.shards)


@dataclass(frozen=True)
class Collected:
    """The end of a night: where its report is, its headline, and the exit code (0: all planned cases as expected)."""

    directory: Path
    headline: str
    notes: tuple[str, ...]
    exit_code: int


def begin(store: Store, run_id: str, night: Night) -> None:
    """Write the plan and commit it; a night that began already goes on under the plan it has.

    Raises:
        LogError: it cannot be written.
    """
    directory = store.run(run_id)
    if (directory / NIGHT).exists():
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LogError(f"cannot make {directory}: {error.strerror or error}") from None
    records.write_whole(directory / NIGHT, msgspec.json.format(msgspec.json.encode(night), indent=1) + b"\n")
    store.commit()


def read_night(directory: Path) -> Night:
    """Read a night's plan.

    Raises:
        LogError: there is none, or it cannot be read.
    """
    path = directory / NIGHT
    try:
        return msgspec.json.decode(path.read_bytes(), type=Night)
    except OSError as error:
        raise LogError(f"{directory} holds no night: {path.name}: {error.strerror or error}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise LogError(f"{path} cannot be read: {error}") from None


def run_shard(
    store: Store, run_id: str, index: int, *, commit_seconds: float = 2.0, say: Say = print
) -> dict[str, int | str]:
    """Run what is left of one shard; the rows are in the store as they come. Returns numbers for people.

    A case that is not as expected is a result, no error.

    Raises:
        ShardInterrupted: the process was told to stop: another attempt has to go on.
        LogError, SetupError, TargetError: the shard cannot run, one line for people.
    """
    store.reload()
    directory = store.run(run_id)
    night = read_night(directory)
    home = directory / _shard_name(index, night.shards)
    cases = night.cases(index)
    done, lost = results(_attempts(home))
    fresh = [case for case in cases if case.id not in done | lost]
    suspects = [case for case in cases if case.id in lost]
    what = f"shard {index} of {night.shards} of {run_id}"
    say(f"{what}: {len(cases)} cases, {len(done)} done before, {len(fresh)} to run, {len(suspects)} to run again")
    end = time.monotonic() + night.shard_budget
    subject = _subject(night, say) if fresh or suspects else Subject()
    ran = 0
    for part in (fresh, suspects):
        if part:
            budget = max(end - time.monotonic(), 0.0)
            ran += _attempt(
                store, home, night, part, budget=budget, subject=subject, commit_seconds=commit_seconds, say=say
            )
    return {"shard": index, "cases": len(cases), "done_before": len(done), "ran": ran}


def _attempt(
    store: Store,
    home: Path,
    night: Night,
    cases: Sequence[Case],
    *,
    budget: float,
    subject: Subject,
    commit_seconds: float,
    say: Say,
) -> int:
    number = 1 + max((int(found[1]) for d in _attempts(home) if (found := _ATTEMPT.fullmatch(d.name))), default=0)
    out = home / f"attempt-{number:02d}-{uuid.uuid4().hex[:8]}"
    settings = Settings(device=night.device, case_limit=night.case_limit, startup_limit=night.startup_limit, say=say)
    with committing(store.commit, commit_seconds, say) as changed:
        run = supervisor.run(
            cases,
            out,
            plan=f"{night.run.plan}-{home.name}",
            budget=budget,
            subject=subject,
            settings=settings,
            command=night.run.command,
            on_record=lambda record: changed(),
            on_start=lambda case, count, rest: changed(),
        )
    ran = sum(r.status != "not_run" for r in run.records)
    ended = run.end.reason if run.end else "error"
    say(f"{home.name}/{out.name}: {ran} of {len(cases)} cases ran, ended: {ended}")
    if ended == "interrupted":
        raise ShardInterrupted(f"{home.name} was told to stop after {ran} of {len(cases)} cases")
    return ran


def _subject(night: Night, say: Say) -> Subject:
    if not night.target:
        return Subject()
    from ci import targets  # noqa: PLC0415

    return Subject(build=targets.install(night.target, say))


@contextlib.contextmanager
def committing(commit: Callable[[], None], seconds: float, say: Say) -> Iterator[Callable[[], None]]:
    """Commit from a thread of its own, `seconds` after something changed, so that rows are never older than that and a
    slow or failing commit costs the run nothing. Yields what is to be called after a change."""
    changed, over = threading.Event(), threading.Event()

    def once() -> None:
        try:
            commit()
        except Exception as error:  # noqa: BLE001 - whatever the store raises, the next commit has these rows too
            say(f"commit failed, going on: {type(error).__name__}: {error}")

    def loop() -> None:
        last = False
        while not last:
            changed.wait()
            over.wait(seconds)
            changed.clear()
            last = over.is_set()  # asked before the commit: nothing was written after it was set
            once()

    thread = threading.Thread(target=loop, name="commit", daemon=True)
    thread.start()
    try:
        yield changed.set
    finally:
        over.set()
        changed.set()
        thread.join(60.0)


def collect(store: Store, run_id: str) -> Collected:
    """Merge what the shards of a night left, and write the report. Never waits for a shard.

    Raises:
        LogError: there is no such night, or the report cannot be written.
    """
    from reports.write import write_report  # noqa: PLC0415 - pandas is not needed in a shard

    store.reload()
    directory = store.run(run_id)
    night = read_night(directory)
    pieces: list[Path] = []
    problems: list[str] = []
    for index in range(1, night.shards + 1):
        name = _shard_name(index, night.shards)
        found = _attempts(directory / name)
        pieces += found
        if not found and night.cases(index):
            problems.append(f"{name} left nothing")
    number = 1 + len(_reports(directory))
    out = directory / f"{REPORT}-{number:02d}"
    merged = merge_runs(pieces, night.run, out, problems)
    summary = write_report(out)
    store.commit()
    return Collected(out, summary.headline, merged.notes, summary.exit_code or merged.exit_code)


def uncollected(store: Store, at: datetime | None = None) -> list[str]:
    """Nights that are over and have no report: their own collector was killed."""
    store.reload()
    at = at or datetime.now(timezone.utc)
    due = []
    for directory in sorted(path.parent for path in store.root.glob(f"*/{NIGHT}")):
        if any((report / "report.md").exists() for report in _reports(directory)):
            continue
        try:
            night = read_night(directory)
            age = (at - datetime.fromisoformat(night.run.started_at)).total_seconds()
        except (LogError, ValueError):
            due.append(directory.name)  # collecting it says what is wrong with it
            continue
        if age > night.seconds:
            due.append(directory.name)
    return due


_ATTEMPT = re.compile(r"attempt-(\d+)-[0-9a-f]+")


def _attempts(home: Path) -> list[Path]:
    return sorted(d for d in home.glob("attempt-*") if d.is_dir())


def _reports(directory: Path) -> list[Path]:
    return sorted(d for d in directory.glob(f"{REPORT}-*") if d.is_dir())


def _shard_name(index: int, count: int) -> str:
    return f"shard-{index}-of-{count}"
