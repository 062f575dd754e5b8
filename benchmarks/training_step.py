"""How long does one training step take, what memory and what error does it have, on each path?"""

from __future__ import annotations

import tempfile
from pathlib import Path

from ci.records import Record, expected
from ci.supervisor import run
from suites.cases import product

CASES = {
    case.id: case
    for case in product(
        ["handwritten", "deepspeed"], tie=["tied", "untied"], head=["vocab", "row"], hidden=128, vocab=512, steps=12
    )
}


class TrainingStep:
    """One run of all cases, read by every metric. A case that is not right has no numbers (asv shows it as failed)."""

    version = "1"
    params = (list(CASES),)
    param_names = ("case",)
    timeout = 900

    def setup_cache(self) -> dict[str, Record]:
        """Run every case once, each set of ranks warm; asv keeps the records for all metrics."""
        with tempfile.TemporaryDirectory() as directory:
            found = run(list(CASES.values()), Path(directory) / "run", plan="asv", budget=600)
        return {record.case: record for record in found.records}

    def track_seconds_per_step(self, records: dict[str, Record], case: str) -> dict[str, object] | float:
        """Wall clock of each step but the first, as samples: asv makes the interval."""
        return {"samples": list(_right(records, case).step_seconds[1:]), "number": 1}

    def track_peak_memory(self, records: dict[str, Record], case: str) -> int:
        """Largest peak over ranks (resident set on CPU, allocator on CUDA)."""
        return _measured(_right(records, case).peak_memory_bytes)

    def track_error(self, records: dict[str, Record], case: str) -> float:
        """Worst numeric deviation over its limit; 1 would be flagged."""
        record = _right(records, case)
        return _measured(record.error) / _measured(record.limit)

    def track_wall_seconds(self, records: dict[str, Record], case: str) -> float:
        """Wall clock of the whole case: build, train, observe, judge."""
        return _measured(_right(records, case).wall_seconds)

    track_seconds_per_step.unit = "seconds"
    track_peak_memory.unit = "bytes"
    track_error.unit = "of limit"
    track_wall_seconds.unit = "seconds"


def _right(records: dict[str, Record], case: str) -> Record:
    record = records[case]
    if not expected(record):
        raise RuntimeError(f"{case}: {record.status} {record.verdict}: {record.evidence}")
    return record


def _measured(value: float | None) -> float:
    if value is None:
        raise RuntimeError("not measured")
    return value
