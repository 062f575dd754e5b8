"""The regression suite: one test a case of the plan, through the same run loop as the nightly.

``pytest suites/test_training_paths.py --plan smoke -k "row and untied" --junitxml out.xml``
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ci.records import expected
from ci.session import Session
from suites.cases import Case


def test_case(training_case: Case, training_session: Session, record_property: Callable[[str, object], None]) -> None:
    """The case is exact or rounding; the failure message is the report's line and the command that runs it alone."""
    record = training_session.run(training_case)
    for name in ("status", "verdict", "oracle", "evidence", "error", "limit", "seconds_per_step", "wall_seconds"):
        record_property(name, getattr(record, name))
    if not expected(record):
        pytest.fail(f"{record.status} {record.verdict or ''}: {record.evidence}\n  {record.rerun}", pytrace=False)
