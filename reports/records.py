"""`tiebench records DIR --format csv|json`: the flat table as text, one row a case."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

from reports.columns import columns_of
from reports.load import load, rows

FORMATS = ("csv", "json")


def flat(directory: Path, form: Literal["csv", "json"]) -> str:
    """The flat table of a run directory; columns as in `reports.columns`.

    CSV: RFC 4180, UTF-8; a text cell that a spreadsheet would run as a formula has an apostrophe before it. JSON: a
    list of objects, null where a value is missing or is no finite number.

    Raises:
        ci.records.LogError: no run directory.
        ValueError: unknown format.
    """
    loaded = load(directory)
    if form == "json":
        table = [{name: _finite(value) for name, value in row.items()} for row in rows(loaded.run)]
        return json.dumps(table, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    if form == "csv":
        frame = loaded.frame.copy()
        for column in columns_of(loaded.run.records):
            if column.kind == "text":
                frame[column.name] = frame[column.name].map(_no_formula, na_action="ignore")
        return str(frame.to_csv(index=False, lineterminator="\n"))
    raise ValueError(f"format {form!r}: one of {', '.join(FORMATS)}")


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _no_formula(text: str) -> str:
    return "'" + text if text.lstrip(" \ufeff\u00a0")[:1] in ("=", "+", "-", "@", "\t", "\r", "\n") else text
