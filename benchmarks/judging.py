"""What does the suite itself cost: reference and oracles for one case, cold and with the reference cached?"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from ci.ranks import Settings
from ci.records import expected
from ci.session import Plan, Session
from suites.cases import Case
from suites.observe import RankObservation
from suites.reference import ReferenceCache
from suites.reference_store import ReferenceStore
from suites.verdict import judge

CASE = Case("handwritten", head="row", hidden=35, vocab=67)
FAULT_FREE = ("exact", "rounding")


def _observed(cases: Sequence[Case], out: Path) -> list[tuple[Case, list[RankObservation]]]:
    """What the ranks see of each case in a real run."""
    with Session(out, Plan("asv", tuple(cases), budget=500), settings=Settings(keep_observations=True)) as session:
        for case in cases:
            session.run(case)
    places = sorted((out / "observations").iterdir())
    return [
        (case, [RankObservation.load(path) for path in sorted(place.glob("rank*.safetensors"))])
        for case, place in zip(cases, places, strict=True)
    ]


class Judging:
    """Judge one case's observations."""

    version = "1"

    def setup_cache(self) -> list[RankObservation]:
        """Observations of one real run; asv hands them to every benchmark."""
        with tempfile.TemporaryDirectory() as directory:
            ((_, ranks),) = _observed((CASE,), Path(directory) / "run")
            return ranks

    def setup(self, ranks: list[RankObservation]) -> None:
        """Warm the cache, and make sure that a right run is being judged."""
        torch.set_num_threads(1)
        self.directory = tempfile.TemporaryDirectory()
        self.store = Path(self.directory.name)
        self.cache = ReferenceCache(store=ReferenceStore(self.store))
        if judge(CASE, ranks, self.cache).verdict not in FAULT_FREE:
            raise RuntimeError("the run to judge is not right")

    def teardown(self, ranks: list[RankObservation]) -> None:
        """Take the store away."""
        self.directory.cleanup()

    def time_cold(self, ranks: list[RankObservation]) -> None:
        """With nothing cached."""
        judge(CASE, ranks)

    def time_from_disk(self, ranks: list[RankObservation]) -> None:
        """With the reference on disk, as in the first cases of another run."""
        judge(CASE, ranks, ReferenceCache(store=ReferenceStore(self.store)))

    def time_cached(self, ranks: list[RankObservation]) -> None:
        """With the reference cached, as in a plan of many cases."""
        judge(CASE, ranks, self.cache)


class ReferencesKept:
    """What keeping references saves: verdicts of several cases with them on disk or in memory, against none kept."""

    version = "1"
    timeout = 300

    def setup_cache(self) -> dict[str, float]:
        """Seconds of processor of one round of verdicts: the least of some rounds, taken in turn."""
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as directory:
            place = Path(directory)
            seen = _observed(CASES[:-1], place / "run")  # the last one's references are too large to be kept on disk
            memory = ReferenceCache()
            caches = {
                "cold": ReferenceCache,
                "disk": lambda: ReferenceCache(store=ReferenceStore(place / "references")),
                "memory": lambda: memory,
            }
            took: dict[str, list[float]] = {how: [] for how in caches}
            for _ in range(1 + ROUNDS):
                for how, make in caches.items():
                    cache = make()
                    begin = time.process_time()
                    for case, ranks in seen:
                        if judge(case, ranks, cache).verdict not in FAULT_FREE:
                            raise RuntimeError(f"a right run is not judged right: {case}")
                    took[how].append(time.process_time() - begin)
        return {how: min(seconds[1:]) for how, seconds in took.items()}  # the first round fills the caches

    def track_disk_over_cold(self, seconds: dict[str, float]) -> float:
        """Verdicts with the references on disk, over verdicts that compute them."""
        return seconds["disk"] / seconds["cold"]

    def track_memory_over_cold(self, seconds: dict[str, float]) -> float:
        """Verdicts with the references in memory, over verdicts that compute them."""
        return seconds["memory"] / seconds["cold"]

    track_disk_over_cold.unit = "of a verdict's time"
    track_memory_over_cold.unit = "of a verdict's time"


CASES = (
    CASE,
    Case("handwritten", head="vocab", hidden=35, vocab=67),
    Case("handwritten", head="row", hidden=35, matmul="tf32"),
    Case("handwritten", head="row", hidden=35, dtype="bfloat16"),
    Case("handwritten", head="row", hidden=256, vocab=4096, layers=8),
)
ROUNDS = 3


class VerdictCost:
    """How much of a case's time is everything beyond training it: reading the live model, reference, oracles."""

    version = "1"
    timeout = 600

    def setup_cache(self) -> list[tuple[float, float]]:
        """Of each run: seconds of its verdict, and of the whole case."""
        found = []
        plan = Plan("asv", CASES, budget=500)
        with tempfile.TemporaryDirectory() as directory, Session(Path(directory) / "run", plan) as session:
            for case in CASES * ROUNDS:
                record = session.run(case)
                if not expected(record):
                    raise RuntimeError(f"{record.verdict}: {record.evidence}")
                found.append((record.verdict_seconds or 0.0, record.wall_seconds or 0.0))
        return found[len(CASES) :]  # the first round warms up

    def track_share(self, costs: list[tuple[float, float]]) -> float:
        """Seconds of verdicts over seconds of cases."""
        return sum(verdict for verdict, _ in costs) / sum(wall for _, wall in costs)

    def track_seconds(self, costs: list[tuple[float, float]]) -> dict[str, object]:
        """Seconds of the verdict of one case, all sizes and precisions together."""
        return {"samples": [verdict for verdict, _ in costs], "number": 1}

    track_share.unit = "of a case's wall time"
    track_seconds.unit = "seconds"
