"""THE table of columns: every column of the flat records table and every metric, with unit and direction (rule 6).

One row here is all that a new column needs: the loader and `tiebench records` read this table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from ci.records import Record
from reports import explain

Kind = Literal["text", "int", "float"]
Direction = Literal["lower", "higher"]
FACTOR_PREFIX = "factor_"
DTYPES: dict[Kind, str] = {"text": "string", "int": "Int64", "float": "float64"}


@dataclass(frozen=True)
class Column:
    """One column of the flat table: one value a case.

    Args:
        unit: of the numbers in it; None for text. "of the check" means that column `error_unit` names it.
        direction: which way is better, None where neither is.
        read: where the value comes from; the record's attribute of the same name if None.
    """

    name: str
    kind: Kind
    unit: str | None
    direction: Direction | None
    meaning: str
    read: Callable[[Record], Any] | None = None

    def value(self, record: Record) -> Any:
        """This column's value of one record; None where it was not measured."""
        return (self.read or attrgetter(self.name))(record)


def error_unit(record: Record) -> str | None:
    """Unit of a record's `error` and `limit`: that of the finding which they come from, None where no finding tells."""
    for finding in record.findings:
        if finding.unit and finding.limit == record.limit and finding.error == record.error:
            return finding.unit
    return next((f.unit for f in record.findings if f.unit and f.oracle == record.error_of), None)


def headroom(record: Record) -> float | None:
    """Limit over error. JSON has no infinity, so an error of exactly 0 comes back without headroom: it is infinite."""
    if record.headroom is None and record.error == 0 and record.limit is not None and record.limit > 0:
        return float("inf")
    return record.headroom


# fmt: off
COLUMNS: tuple[Column, ...] = (
    Column("case", "text", None, None, "id of the case; `tiebench run --case ID` runs it again"),
    Column("path", "text", None, None, "training path"),
    Column("target", "text", None, None, "build under test, as a pip requirement"),
    Column("status", "text", None, None, "finished, timeout, lost (killed while running), not_run or skipped"),
    Column("reason", "text", None, None, "why it was not run or was lost: budget, interrupted, error, killed or given "
           "up; running or pending while the run is going"),
    Column("verdict", "text", None, None, "exact, rounding, bug, bug: precision, inconclusive, refused, crash or hang; "
           "empty: none"),
    Column("oracle", "text", None, None, "checks that flagged, joined by a comma"),
    Column("evidence", "text", None, None, "what was seen, for people"),
    Column("expectation", "text", None, None, "refusal or known issue of the suite's tables that speaks of this case; "
           "empty: none", lambda record: record.expectation.name if record.expectation else None),
    Column("error", "float", "of the check", "lower", "largest deviation, of the check with the least headroom; empty "
           "beside a limit: not finite"),
    Column("limit", "float", "of the check", None, "largest deviation that is still rounding, of the same check"),
    Column("headroom", "float", "times", "higher", "limit / error; below 1 is beyond the limit; inf (null in "
           "JSON): the error is 0", headroom),
    Column("error_of", "text", None, None, "check that error, limit and headroom belong to"),
    Column("error_unit", "text", None, None, "unit of error and limit", error_unit),
    Column("visibility", "float", "relative", "lower", "smallest error, as a share of the tensor, that would have been "
           "flagged in every gradient; inf (null in JSON): one shows nothing", explain.visibility),
    Column("escalation", "text", None, None, "runs at higher precisions and their verdicts; empty: none was needed",
           lambda record: "; ".join(f"{rung.arithmetic}: {rung.verdict}" for rung in record.escalation) or None),
    Column("slope", "float", "ratio of logarithms", None, "how the error scaled up to the highest precision: 1 for "
           "rounding, 0 for a bug", explain.last_slope),
    Column("diagnosis", "text", None, None, "where a deviation comes from", lambda record: record.diagnosis or None),
    Column("guesses", "text", None, None, "classes of public bugs that it looks like, the likeliest first",
           lambda record: "; ".join(f"{guess.bug_class} {guess.name}".strip() for guess in record.guesses) or None),
    Column("seconds_per_step", "float", "s", "lower", "median wall clock of a step, the first step left out"),
    Column("tokens_per_second", "float", "tokens/s", "higher", "tokens of all data-parallel ranks per second"),
    Column("peak_memory_bytes", "int", "bytes", "lower", "largest over ranks: resident set on CPU, allocator on CUDA"),
    Column("startup_seconds", "float", "s", "lower", "starting the set of ranks, 0 where a running set was used"),
    Column("judge_seconds", "float", "s", "lower", "reference and oracles, runs at higher precisions included"),
    Column("verdict_seconds", "float", "s", "lower", "everything beyond training: judging, and reading the live model"),
    Column("wall_seconds", "float", "s", "lower", "the whole case"),
    Column("budget_seconds", "float", "s", None, "the case's own time limit"),
    Column("overlapped", "text", None, None, "True where another case was judged while it ran, which may cost it "
           "time"),
    Column("why", "text", None, None, "why it stands where it stands in the order", lambda record: record.why or None),
    Column("attempt", "int", "count", None, "which attempt this result is from, 1 for the first"),
    Column("started_at", "text", None, None, "UTC, ISO 8601"),
    Column("environment", "text", None, None, "fingerprint of the environment"),
    Column("fault", "text", None, None, "bug that was put in on purpose"),
    Column("harmless", "text", None, None, "True where what was put in is a harmless change"),
    Column("patch", "text", None, None, "the user's patch file, name and sha256"),
    Column("rerun", "text", None, None, "one command that runs this case again alone"),
)
# fmt: on

BY_NAME: dict[str, Column] = {column.name: column for column in COLUMNS}
METRICS: tuple[Column, ...] = tuple(column for column in COLUMNS if column.direction is not None)


def columns_of(records: Iterable[Record]) -> tuple[Column, ...]:
    """All columns of these records: the fixed ones, then one `factor_<name>` for each factor found."""
    names = dict.fromkeys(name for record in records for name in record.factors)
    return COLUMNS + tuple(_factor(name) for name in names)


def _factor(name: str) -> Column:
    meaning = f"factor {name} of the case; empty: not recorded"
    return Column(FACTOR_PREFIX + name, "text", None, None, meaning, lambda record: record.factors.get(name))


def table_markdown() -> str:
    """The table of columns for people, as reports/README.md has it."""
    rows = [f"| `{c.name}` | {c.unit or ''} | {c.direction or ''} | {c.meaning} |" for c in COLUMNS]
    rows.append(f"| `{FACTOR_PREFIX}<name>` | | | value of each factor of the case, one column a factor |")
    return "\n".join(["| column | unit | better | meaning |", "|---|---|---|---|", *rows]) + "\n"
