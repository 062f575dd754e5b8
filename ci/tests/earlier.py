"""Earlier runs for tests: run directories written through the record log, and summaries of runs without a disk."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path

from ci import costs, history, records
from ci.history import Line, RunSummary
from ci.records import EndRow, FinalRow, Record, RecordLog, RunRow, StartedRow
from suites.cases import Case

HERE = "cpu, Model T, 2 cores"
BEGAN = datetime(2026, 3, 1, tzinfo=timezone.utc)
TARGET = "torch==2.13.0"


def environment(kind: str = "cpu", model: str = "Model T", cores: int = 2) -> dict[str, object]:
    return {"device": {"type": kind}, "machine": {"cpu": {"model": model}, "usable_cores": cores}}


def write_run(
    directory: Path,
    results: Mapping[Case, str],
    *,
    plan: str = "pr",
    days: float = 0.0,
    end: str | None = "complete",
    fault: str | None = None,
    target: str = TARGET,
    where: dict[str, object] | None = None,
    pace: float = 1.0,
) -> Path:
    """A run directory as a run leaves it.

    Args:
        results: case -> a verdict, "timeout", "lost" (started only), "not_run" (a row) or "never" (no row at all).
    """
    began = BEGAN + timedelta(days=days)
    now = first_case = began + timedelta(seconds=5)
    first = RunRow(
        schema=records.SCHEMA,
        run_id=directory.name,
        plan=plan,
        cases=tuple(case.id for case in results),
        target=target,
        budget_seconds=600.0,
        started_at=began.isoformat(),
        tiebench="0.1.0",
        command="",
    )
    with RecordLog(directory, first) as log:
        for case, result in results.items():
            if result == "never":
                continue
            if result != "not_run":
                log.append(StartedRow(case=case.id, attempt=1, started_at=now.isoformat()))
            if result == "lost":
                continue
            ranks, judge = (seconds * pace for seconds in costs.static(case))
            base = {"case": case.id, "path": case.path, "target": target, "factors": case.factors, "fault": fault}
            if result == "not_run":
                log.append(FinalRow(record=Record(**base, status="not_run")))
                continue
            status = "timeout" if result == "timeout" else "finished"
            record = Record(
                **base,
                status=status,
                verdict="hang" if result == "timeout" else result,
                wall_seconds=ranks + judge,
                judge_seconds=judge,
                startup_seconds=5.0 if now == first_case else 0.0,
                started_at=now.isoformat(),
            )
            log.append(FinalRow(record=record))
            now += timedelta(seconds=ranks + judge)
        if end:
            log.append(EndRow(ended_at=now.isoformat(), reason=end, exit_code=0))
    (directory / records.ENVIRONMENT).write_text(json.dumps(where or environment()))
    return directory


def summary(
    cases: Sequence[Case], *, days: float, pace: float = 1.0, noise: float = 0.1, seed: int = 0, plan: str = "pr"
) -> RunSummary:
    """What is kept of a complete run: the static model's seconds at a pace, with noise from case to case."""
    chance = random.Random(seed)
    lines = []
    for number, case in enumerate(cases):
        ranks, judge = (s * pace * chance.lognormvariate(0, noise) for s in costs.static(case))
        started = (BEGAN + timedelta(days=days, seconds=number)).isoformat()
        startup = 5.0 if not number else 0.0
        lines.append(
            Line(
                case=case.id,
                target=TARGET,
                status="finished",
                verdict="rounding",
                green=True,
                ranks=ranks,
                judge=judge,
                startup=startup,
                started_at=started,
            )
        )
    return RunSummary(
        version=history.VERSION,
        size=1,
        mtime_ns=1,
        plan=plan,
        started_at=(BEGAN + timedelta(days=days)).isoformat(),
        tiebench="0.1.0",
        budget_seconds=600.0,
        wall_seconds=5.0 + sum((line.ranks or 0) + (line.judge or 0) for line in lines),
        end="complete",
        machine=HERE,
        cases=tuple(lines),
    )
