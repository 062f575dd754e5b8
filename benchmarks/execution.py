"""How many cases a minute, against the way in which DeepSpeed's own test harness works; how much of it is training?

    python -m benchmarks.execution [--cases 24]     prints the table once; takes about two minutes

Both run the same DeepSpeed cases, the session between the two halves of the harness's, so that a machine that gets
busier or quieter changes both. The harness (`benchmarks.harness`) trains and compares nothing; tiebench's time includes
all verdicts, the record log and, unless it is said otherwise, the import of torch and the frameworks.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import harness
from ci import plans
from ci.ranks import Settings
from ci.records import Record, expected
from ci.session import Plan, Session
from suites.cases import Case

CASES = tuple(case for case in plans.PR.cases if case.path == "deepspeed")[:24]
SAMPLE = 6  # cases under asv, where a minute counts


@dataclass(frozen=True)
class Measured:
    """Seconds of both ways.

    Args:
        harness: of each case in fresh processes.
        session: of all cases in one session, end of its processes included; startup: of its first set of ranks.
        training: that the ranks spent in the training path: without reading the live model, verdicts and start-up.
    """

    harness: tuple[float, ...]
    session: float
    startup: float
    training: float

    @property
    def ratio(self) -> float:
        """How many times more cases a minute."""
        return sum(self.harness) / self.session

    @property
    def warm_ratio(self) -> float:
        """The same without the first start-up, which a plan of any size has once."""
        return sum(self.harness) / (self.session - self.startup)

    @property
    def share(self) -> float:
        """Part of the wall time, first start-up left out, in which ranks were in the training path."""
        return self.training / (self.session - self.startup)


def measure(cases: Sequence[Case]) -> Measured:
    """Run the cases in both ways.

    Raises:
        RuntimeError: a case is not right.
    """
    found: list[Record] = []
    half = len(cases) // 2
    with tempfile.TemporaryDirectory() as directory, harness.running() as fresh:
        alone = [fresh.run(case.id, case.world_size) for case in cases[:half]]
        plan = Plan("benchmark", tuple(cases), budget=3600)
        begin = time.monotonic()
        with Session(Path(directory) / "run", plan, settings=Settings(device="cpu"), on_record=found.append) as session:
            for case in cases:
                session.advance(case)
            session.catch_up()
        spent = time.monotonic() - begin
        alone += [fresh.run(case.id, case.world_size) for case in cases[half:]]
    if wrong := [record for record in found if not expected(record)]:
        raise RuntimeError(f"{wrong[0].case}: {wrong[0].verdict}: {wrong[0].evidence}")
    starts = [record.startup_seconds for record in found if record.startup_seconds]
    training = sum((record.wall_seconds or 0.0) - (record.verdict_seconds or 0.0) for record in found)
    return Measured(tuple(alone), spent, starts[0], training)


class CasesPerMinute:
    """The same DeepSpeed cases in one session and in fresh processes each."""

    version = "1"
    timeout = 900

    def setup_cache(self) -> dict[str, float]:
        """Both ways, once."""
        found = measure(CASES[:SAMPLE])
        return {"warm share": 1 / found.warm_ratio, "overhead": 1 - found.share}

    def track_share_of_harness(self, found: dict[str, float]) -> float:
        """Seconds in a session over seconds in the harness, first start-up left out: 0.04 is 25 times faster."""
        return found["warm share"]

    def track_overhead(self, found: dict[str, float]) -> float:
        """Part of the wall time in which no ranks were in the training path."""
        return found["overhead"]

    track_share_of_harness.unit = "of fresh processes"
    track_overhead.unit = "of the wall time"


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=len(CASES), help=f"how many, 1 to {len(CASES)}")
    cases = CASES[: max(1, parser.parse_args().cases)]
    found = measure(cases)
    minutes = sum(found.harness) / 60, found.session / 60, (found.session - found.startup) / 60
    print(
        f"{len(cases)} cases in fresh processes each: {60 * minutes[0]:.1f} s, {len(cases) / minutes[0]:.1f} a minute"
    )
    print(f"   (median {statistics.median(found.harness):.2f} s a case, no verdict)")
    print(f"{len(cases)} cases in one session: {60 * minutes[1]:.1f} s, {len(cases) / minutes[1]:.1f} a minute")
    print(f"   without its first start-up: {60 * minutes[2]:.1f} s, {len(cases) / minutes[2]:.1f} a minute")
    print(f"times more cases a minute: {found.ratio:.1f}, without the first start-up {found.warm_ratio:.1f}")
    print(f"share of the wall time in training paths, without the first start-up: {found.share:.0%}")


if __name__ == "__main__":
    main()
