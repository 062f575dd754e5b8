"""Options of ``pytest suites``: which plan and target the regression suite runs, and where its records go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ci import schedule, targets
from ci.plans import PLANS
from ci.session import Plan, Session
from ci.subject import Subject
from reports.write import write_report
from suites.cases import Case

# Tests here fork ranks from this process. OpenMP's threads do not survive a fork: a rank that asks for some waits for
# ever in libgomp. With one thread from the beginning on there are none.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--plan``, ``--target``, ``--run-dir``."""
    group = parser.getgroup("tiebench")
    group.addoption("--plan", default="smoke", choices=sorted(PLANS), help="plan of the training-path suite")
    group.addoption("--target", default=None, help="build under test, as in tiebench run --target")
    group.addoption("--run-dir", default=None, help="run directory for records and report (default: a temporary one)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test a case of the plan, in the order that needs the fewest starts of ranks.

    A test's name is the case id with ``:`` for ``=``, which ``-k`` does not take: ``-k "row and zero:2"``.
    """
    if "training_case" in metafunc.fixturenames:
        cases = schedule.order(PLANS[metafunc.config.getoption("--plan")].cases)
        metafunc.parametrize("training_case", cases, ids=[case.id.replace("=", ":") for case in cases])


@pytest.fixture(scope="session")
def training_session(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """One session of ranks for all selected cases; writes the report at its end."""
    chosen = [case for item in request.session.items if (case := _case(item))]
    name, target = request.config.getoption("--plan"), request.config.getoption("--target")
    given = request.config.getoption("--run-dir")
    directory = Path(given) if given else tmp_path_factory.mktemp("run") / name
    plan = Plan(name, tuple(chosen), PLANS[name].budget_seconds, "pytest suites")
    installed = targets.install(target, print) if target else None
    # pytest's own KeyboardInterrupt ends the session: it would take any other exception for one failed test and go on.
    with Session(directory, plan, subject=Subject(build=installed)) as session:
        yield session
    write_report(directory)


def _case(item: pytest.Item) -> Case | None:
    found = getattr(getattr(item, "callspec", None), "params", {}).get("training_case")
    return found if isinstance(found, Case) else None
