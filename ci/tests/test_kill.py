"""A few of the moments of `ci.tests.kill`, and that its checks see what they are for."""

from __future__ import annotations

import random
import signal
from collections import Counter

import pytest

from ci.records import EVENTS
from ci.tests import kill
from ci.tests.kill import Moment

SOURCE = random.Random(20261201)
MOMENTS = [
    Moment("supervisor", signal.SIGKILL, SOURCE.uniform(0.2, kill.WORKING)),
    Moment("supervisor", signal.SIGTERM, SOURCE.uniform(0.2, kill.WORKING)),
    Moment("rank", signal.SIGKILL, SOURCE.uniform(0.2, kill.WORKING)),
    Moment("server", signal.SIGKILL, SOURCE.uniform(0.2, kill.WORKING)),
    Moment("judge", signal.SIGTERM, SOURCE.uniform(0.2, kill.WORKING)),
    Moment("supervisor", signal.SIGKILL, SOURCE.uniform(0.0, kill.STARTING), working=False),
]


@pytest.mark.parametrize("moment", MOMENTS, ids=str)
def test_nothing_is_lost_doubled_or_left(moment, tmp_path):
    assert kill.try_moment(moment, tmp_path).wrong == ()


def test_a_row_that_is_gone_or_comes_twice_is_seen(tmp_path):
    ids = [word for case in kill.CASES[:2] for word in ("--case", case.id)]
    from ci.tests.conftest import tiebench

    done = tiebench("run", "--out", "run", "--device", "cpu", *ids, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "run"
    before = kill.results(out)
    assert before == Counter({case.id: 1 for case in kill.CASES[:2]})
    assert kill.check(out, before, whole=True) == []
    log = (out / EVENTS).read_bytes()
    lines = log.splitlines(keepends=True)
    final = next(i for i, line in enumerate(lines) if b'"final"' in line[:20])
    (out / EVENTS).write_bytes(b"".join(lines[:final] + lines[final + 1 :]))
    assert any(text.startswith("lost: ") for text in kill.check(out, before, whole=True))
    (out / EVENTS).write_bytes(b"".join([*lines[: final + 1], lines[final], *lines[final + 1 :]]))
    assert any(text.startswith("doubled: ") for text in kill.check(out, before, whole=True))
