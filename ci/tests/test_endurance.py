"""The short form of `benchmarks.endurance`, and that it sees what grows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import endurance
from benchmarks.endurance import Sample

FLAT = Sample(cases=0, supervisor=20.0, server=100.0, judge=150.0, rank=80.0, files=28, threads=9, processes=9, shm=0)


def test_nothing_grows_over_cases_that_end_well_crash_and_hang():
    samples, wrong = endurance.run(48, 6)
    assert wrong == []
    assert [sample.cases for sample in samples] == list(range(6, 49, 6))
    assert all(sample.rank > 10 for sample in samples)


@pytest.mark.parametrize(
    ("name", "step"), [("supervisor", 10.0), ("judge", 30.0), ("rank", 10.0), ("files", 2), ("threads", 1), ("shm", 1)]
)
def test_growth_is_seen(name, step):
    def grown(number: int) -> Sample:
        return replace(FLAT, cases=50 * number, **{name: getattr(FLAT, name) + step * number})

    found = endurance.growth([grown(number) for number in range(1, 21)], 1000)
    assert [line.partition(":")[0] for line in found] == [name]


def test_what_varies_and_what_fills_at_first_is_no_growth():
    rising = [replace(FLAT, cases=50 * n, judge=100.0 + min(n, 4) * 20, rank=80.0 + 20 * (n % 2)) for n in range(1, 21)]
    assert endurance.growth(rising, 1000) == []
