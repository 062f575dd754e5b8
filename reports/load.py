"""Run directory -> records, pandas table, environment. Strict about content, tolerant of killed runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd

from ci import pieces
from ci.pieces import Merge
from ci.records import ENVIRONMENT, LogError, Run, read_run
from reports.columns import DTYPES, columns_of


@dataclass(frozen=True)
class Loaded:
    """One run as the reports read it.

    Args:
        frame: one row a case in plan order, columns and units as in `reports.columns`; a missing value is NA (text,
            int) or NaN (float).
        environment: `environment.json`, empty where it is missing or damaged (then `notes` says so).
        notes: one line for everything that could not be read.
        merge: what the run was merged from; None for a run of its own.
    """

    run: Run
    frame: pd.DataFrame
    environment: dict[str, Any]
    notes: tuple[str, ...]
    merge: Merge | None = None


def load(directory: Path) -> Loaded:
    """Read a run directory, also that of a killed run.

    Raises:
        ci.records.LogError: it is no run directory.
    """
    run = read_run(directory)
    environment, notes = _environment(directory / ENVIRONMENT)
    if run.torn:
        notes.append("the last line of events.jsonl is cut off: the run was killed while writing it")
    notes += [f"damaged, not counted: {line}" for line in run.damage]
    merge = None
    try:
        merge = pieces.read(directory)
    except LogError as error:
        notes.append(str(error))
    return Loaded(run, frame_of(run), environment, tuple(notes), merge)


def tested(run: Run) -> str:
    """The builds whose cases really ran, the framework first; what was planned where none did."""
    ran = dict.fromkeys(r.target for r in run.records if r.status in ("finished", "timeout") and r.target)
    planned = [run.plan.target, *run.plan.targets.values()]
    order = sorted(ran, key=lambda name: planned.index(name) if name in planned else len(planned))
    return ", ".join(order) or run.plan.target


def rows(run: Run) -> list[dict[str, Any]]:
    """One plain dictionary a case, keyed by column; None where a value is missing."""
    columns = columns_of(run.records)
    return [{column.name: column.value(record) for column in columns} for record in run.records]


def frame_of(run: Run) -> pd.DataFrame:
    """The flat table; an empty run has the fixed columns and no row."""
    columns = columns_of(run.records)
    table = rows(run)
    return pd.DataFrame(
        {c.name: pd.Series([row[c.name] for row in table], dtype=DTYPES[c.kind]) for c in columns},
        columns=[c.name for c in columns],
    )


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested dictionary as one level of dotted keys and text values; lists are joined where they hold plain values."""
    flat: dict[str, str] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            flat |= flatten(value, name + ".")
        elif isinstance(value, list):
            flat[name] = ", ".join(v if isinstance(v, str) else msgspec.json.encode(v).decode() for v in value)
        else:
            flat[name] = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return flat


def _environment(path: Path) -> tuple[dict[str, Any], list[str]]:
    try:
        found = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        return {}, [f"{path.name} is missing: what this run ran on is not known"]
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return {}, [f"{path.name} cannot be read: {error}"]
    if not isinstance(found, dict):
        return {}, [f"{path.name} holds no object"]
    return found, []
