"""What does the suite itself cost: reference and oracles for one case, cold and with the reference cached?"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from ci.ranks import Settings
from ci.supervisor import Plan, Session
from suites.cases import Case
from suites.observe import RankObservation
from suites.reference import ReferenceCache
from suites.verdict import judge

CASE = Case("handwritten", head="row", hidden=35, vocab=67)
FAULT_FREE = ("exact", "rounding")


class Judging:
    """Judge one case's observations."""

    version = "1"

    def setup_cache(self) -> list[RankObservation]:
        """Observations of one real run; asv hands them to every benchmark."""
        with tempfile.TemporaryDirectory() as directory:
            out = Path(directory) / "run"
            with Session(out, Plan("asv", (CASE,), budget=300), settings=Settings(keep_observations=True)) as session:
                session.run(CASE)
            files = sorted(out.glob("observations/*/rank*.safetensors"))
            return [RankObservation.load(path) for path in files]

    def setup(self, ranks: list[RankObservation]) -> None:
        """Warm the cache, and make sure that a right run is being judged."""
        torch.set_num_threads(1)
        self.cache = ReferenceCache()
        if judge(CASE, ranks, self.cache).verdict not in FAULT_FREE:
            raise RuntimeError("the run to judge is not right")

    def time_cold(self, ranks: list[RankObservation]) -> None:
        """With nothing cached."""
        judge(CASE, ranks)

    def time_cached(self, ranks: list[RankObservation]) -> None:
        """With the reference cached, as in a plan of many cases."""
        judge(CASE, ranks, self.cache)
