"""Runs a calibration: the jobs of `suites.calibration` on ranks, each to a row on disk, then the tables.

A directory that holds rows already is gone on with: what is there is not run again. Layout of the directory:

    runs.jsonl          one row a run (`suites.calibration.Run`)
    ranks<n>/           run directory of the n-th attempt: logs, records, environment
    calibration.json    the tables, the limits in use and the environment
    calibration.md      the same for people
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from ci import plans, records
from ci.display import duration
from ci.judge import observations
from ci.outcomes import version_of
from ci.ranks import Settings
from ci.records import LogError, Record
from ci.session import Plan, Session
from ci.subject import INSTALLED, PACKAGE, version
from suites import calibration
from suites.calibration import Job, Result, Run
from suites.cases import Case
from suites.evidence import Evidence, ReferenceFailed
from suites.expectations import expectation
from suites.observe import ObservationError, RankObservation
from suites.precision import arithmetic
from suites.reference import ReferenceCache
from suites.verdict import Judgement, conclude

RUNS, JSON, MARKDOWN = "runs.jsonl", "calibration.json", "calibration.md"
SCHEMA = 1
MOST_RANKS = 4
EVERY = 25  # runs between two lines of progress
CASE_LIMIT = 180.0  # seconds: the largest models on a busy machine


class _Session(Session):
    """A session that judges without a diagnosis, and keeps what was judged and the largest deviation in every scope."""

    judged: Judgement | None
    worst: dict[str, float | None]
    where: dict[str, str]
    digest: str

    def __init__(self, directory: Path, plan: Plan, settings: Settings):
        super().__init__(directory, plan, settings=settings)
        self.references = ReferenceCache()

    def run(self, case: Case, fault: str | None = None) -> Record:
        """As `Session.run`."""
        self.judged, self.worst, self.where, self.digest = None, {}, {}, ""
        return super().run(case, fault)

    def _judged(self, case: Case, directory: Path, fault: str | None) -> dict[str, Any]:
        seen = observations(case, directory)
        self.digest = calibration.digest(seen)

        def again(rung: Case) -> list[RankObservation]:
            return observations(rung, self._again(rung, directory / f"at {rung.dtype} seed {rung.seed}", fault))

        self.judged = conclude(case, seen, self.references, again)
        with contextlib.suppress(ReferenceFailed, ObservationError):  # said by the oracles
            self.worst, self.where = calibration.measure(Evidence(case, seen, self.references))
        return {"status": "finished", "verdict": self.judged.verdict, "evidence": self.judged.evidence}


def jobs(*, quick: bool, paths: Sequence[str], precisions: Sequence[str], device: str) -> list[Job]:
    """What a calibration runs: all null cases of plan nightly where a path is a framework's.

    A case that the installed build is known to refuse or to get wrong is no null case (`suites.expectations`).

    Args:
        precisions: keys of `suites.precision.UNIT_ROUNDOFF`.
        device: "auto" or "cpu"; on GPUs no case has more ranks than there are GPUs, and truncation is left out.
    """
    ranks = MOST_RANKS
    if device == "auto" and torch.cuda.is_available():
        ranks = min(ranks, torch.cuda.device_count())
        precisions = [precision for precision in precisions if precision != "tf32_truncated"]
    versions = {path: version_of(INSTALLED.target(path)) for path in paths if path != calibration.PATH}
    planned = (case for case in plans.PLANS["nightly"].cases if case.path in versions)
    cases = [case for case in planned if expectation(case, versions[case.path]) is None]
    size = calibration.QUICK if quick else calibration.FULL
    own = calibration.PATH in paths
    return calibration.plan(size, cases, own=own, precisions=precisions, ranks=ranks)


def read(directory: Path) -> list[Run]:
    """The runs of a directory so far; a last line that was cut off is dropped, from the file too.

    Raises:
        LogError: the directory holds something else, or a row cannot be read.
    """
    path = directory / RUNS
    try:
        if not path.exists():
            if directory.exists() and any(directory.iterdir()):
                raise LogError(f"{directory} is not empty and holds no calibration: choose another --out")
            return []
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if whole != data:
            records.write_whole(path, whole)
        decoder = msgspec.json.Decoder(Run)
        return [decoder.decode(line) for line in whole.splitlines()]
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise LogError(f"{path} has a row that cannot be read ({error}): choose another --out") from None
    except OSError as error:
        raise LogError(f"{directory}: {error.strerror or error}") from None


def run(
    wanted: Sequence[Job],
    directory: Path,
    settings: Settings,
    on_start: Callable[[int, int], None] = lambda done, left: None,
    on_run: Callable[[Run], None] = lambda found: None,
) -> None:
    """Run the jobs that the directory has no row for.

    Args:
        on_start: hears how many of the jobs are done already and how many are left.
        on_run: hears of each run once it is on disk.

    Raises:
        LogError, SetupError: as `Session`; the rows so far stay.
    """
    done = {found.job for found in read(directory)}
    todo = [job for job in wanted if job not in done]
    on_start(len(wanted) - len(todo), len(todo))
    if not todo:
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        number = 1 + sum(1 for _ in directory.glob("ranks*"))
        cases = tuple(dict.fromkeys(Case.parse(job.case) for job in todo))
        here = version()
        session = _Session(directory / f"ranks{number}", Plan("calibration", cases), settings)
        torch.set_num_threads(1)  # the same sums on every machine, and no threads that wait for busy cores
        with open(directory / RUNS, "ab", buffering=0) as rows, session:
            for job in todo:
                record = session.run(Case.parse(job.case), job.change or None)
                found = _row(job, record, session, here)
                rows.write(msgspec.json.encode(found) + b"\n")
                on_run(found)
    except OSError as error:
        raise LogError(f"cannot write to {directory}: {error.strerror or error}") from None


def _row(job: Job, record: Record, session: _Session, version: str) -> Run:
    """What became of a job; its deviations where they were measured."""
    judged = session.judged
    tried = judged.measured if judged and job.kind in ("graded", "fault") else ()
    return Run(
        kind=job.kind,
        case=job.case,
        change=job.change,
        arithmetic=arithmetic(Case.parse(job.case)),
        target=record.target,
        tiebench=version,
        verdict=record.verdict or record.status,
        flagged=tuple(f.oracle for f in judged.flagged) if judged else (),
        worst=session.worst,
        where=session.where,
        errors={f"{m.oracle} {m.name}": _finite(m.error) for m in tried},
        sees={f"{m.oracle} {m.name}": _finite(m.sees) for m in tried},
        digest=session.digest if job.kind in ("fault", "twin") else "",
        evidence="" if record.verdict in records.GREEN and not (judged and judged.flagged) else record.evidence,
        seconds=round(record.wall_seconds or 0.0, 3),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def write(directory: Path, wanted: Sequence[Job]) -> Result:
    """Write the tables of what is there of these jobs, as JSON and as Markdown.

    Raises:
        LogError: they cannot be written.
    """
    asked = set(wanted)
    runs = [found for found in read(directory) if found.job in asked]
    result = calibration.read_off(runs)
    if len(runs) < len(asked):
        missing = f"{len(asked) - len(runs)} of {len(asked)} runs are missing: give --out {directory} to go on"
        result = replace(result, problems=(missing, *result.problems))
    targets = sorted({found.target for found in runs})
    versions = sorted({found.tiebench for found in runs})
    about = {
        "schema": SCHEMA,
        "date": records.now(),
        "tiebench": versions,
        "targets": targets,
        "runs": len(runs),
        "problems": result.problems,
        "limits": calibration.limits_in_use(),
        "tables": {table.name: table.rows for table in result.tables},
        "environment": _environment(directory),
    }
    head = f"{len(runs)} runs on {', '.join(targets)}; tiebench {', '.join(versions)}; {about['date']}"
    records.write_whole(directory / JSON, json.dumps(msgspec.to_builtins(about), indent=1).encode() + b"\n")
    records.write_whole(directory / MARKDOWN, calibration.markdown(result, head).encode())
    return result


def _environment(directory: Path) -> Any:
    """Of the last attempt that got so far as to look."""
    for path in sorted(directory.glob(f"ranks*/{records.ENVIRONMENT}"), key=lambda p: p.stat().st_mtime, reverse=True):
        with contextlib.suppress(OSError, ValueError):
            return json.loads(path.read_text(encoding="utf-8"))
    return None


def installed(path: str) -> bool:
    """Whether a path's framework can be imported here."""
    return importlib.util.find_spec(PACKAGE.get(path, path)) is not None


@dataclass
class Progress:
    """A line now and then, and one for every run that is not as it must be."""

    total: int
    say: Callable[[str], None]
    done: int = 0
    ran: int = 0
    begin: float = field(default_factory=time.monotonic)

    def on_start(self, done: int, left: int) -> None:
        """So many are done already, so many are left."""
        self.done, self.begin = done, time.monotonic()
        if done:
            self.say(f"{done} runs are there already, {left} are left")

    def on_run(self, found: Run) -> None:
        """One more is done."""
        self.done += 1
        self.ran += 1
        if (found.kind == "null" and found.seen and not found.refused) or (found.kind == "harmless" and found.bug):
            self.say(f"[{self.done}/{self.total}] {found.case} {found.change} {found.verdict}\n    {found.evidence}")
        elif self.done % EVERY == 0 or self.done == self.total:
            left = (self.total - self.done) * (time.monotonic() - self.begin) / self.ran
            self.say(f"[{self.done}/{self.total}] about {duration(left)} left")
