"""How much cheaper is a case in ranks that are kept alive than in a fresh pair of processes? (Aim: 20 times.)"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from ci.records import expected
from ci.session import Plan, Session
from suites.cases import Case

CASE = Case("deepspeed", head="row", zero=2)
FRESH, WARM = 3, 15


class WarmAgainstFresh:
    """The same DeepSpeed case in fresh and in warm ranks, in turns within one run."""

    version = "1"
    timeout = 900

    def setup_cache(self) -> dict[str, list[float]]:
        """Seconds of each run of the case, start-up of its ranks included."""
        fresh, warm = [], []
        with tempfile.TemporaryDirectory() as directory:
            plan = Plan("asv", (CASE,), budget=800)
            with Session(Path(directory) / "run", plan) as session:
                for _ in range(FRESH):
                    session.fresh()
                    for seconds in [fresh, *[warm] * (WARM // FRESH)]:
                        record = session.run(CASE)
                        if not expected(record):
                            raise RuntimeError(f"{record.verdict}: {record.evidence}")
                        seconds.append((record.startup_seconds or 0.0) + (record.wall_seconds or 0.0))
        return {"fresh": fresh, "warm": warm}

    def track_fresh_seconds(self, seconds: dict[str, list[float]]) -> dict[str, object]:
        """A fresh pair of processes and one case."""
        return {"samples": seconds["fresh"], "number": 1}

    def track_warm_seconds(self, seconds: dict[str, list[float]]) -> dict[str, object]:
        """One more case in ranks that are up."""
        return {"samples": seconds["warm"], "number": 1}

    def track_warm_share(self, seconds: dict[str, list[float]]) -> float:
        """Median warm over median fresh: 0.05 is 20 times cheaper."""
        return statistics.median(seconds["warm"]) / statistics.median(seconds["fresh"])

    track_fresh_seconds.unit = "seconds"
    track_warm_seconds.unit = "seconds"
    track_warm_share.unit = "of a fresh start"
