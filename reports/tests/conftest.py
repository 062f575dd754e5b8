"""Run directories of every kind, written by the real record log."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ci.records import (
    ENVIRONMENT,
    EVENTS,
    EndRow,
    FinalRow,
    Finding,
    Record,
    RecordLog,
    RunRow,
    StartedRow,
    write_whole,
)
from reports import html
from reports.load import load
from reports.summary import summarize
from reports.terminal import print_report

ENVIRONMENT_OF_TEST = {"python": "3.11.7", "packages": {"torch": "2.13.0"}, "switches": {"tf32": False}}
STAMP = "2026-01-01T00:00:10+00:00"


def make_record(case: str, **changes: Any) -> Record:
    """A green record of `case`, with some fields changed."""
    path, _, rest = case.partition(":")
    values: dict[str, Any] = {
        "case": case,
        "path": path,
        "target": "deepspeed==0.19.8",
        "status": "finished",
        "verdict": "rounding",
        "evidence": "all checks passed",
        "error": 0.5,
        "limit": 5.0,
        "headroom": 10.0,
        "error_of": "gradient",
        "findings": (Finding(oracle="gradient", flagged=False, evidence="ok", error=0.5, limit=5.0, unit="sigma"),),
        "factors": dict(part.split("=", 1) for part in rest.split(",") if "=" in part),
        "seconds_per_step": 0.02,
        "step_seconds": (0.2, 0.02, 0.021),
        "tokens_per_second": 1600.0,
        "peak_memory_bytes": 400 * 2**20,
        "startup_seconds": 0.0,
        "judge_seconds": 0.1,
        "wall_seconds": 1.25,
        "budget_seconds": 20.0,
        "started_at": STAMP,
        "environment": "sha256:1",
        "rerun": f"tiebench run --case '{case}' --target 'deepspeed==0.19.8'",
    }
    return Record(**(values | changes))


@pytest.fixture
def record() -> Callable[..., Record]:
    return make_record


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """make_run(name, records, ...) -> run directory."""

    def make(
        name: str,
        records: Sequence[Record] = (),
        *,
        plan: Sequence[str] | None = None,
        started: Sequence[str] = (),
        end: str | None = "complete",
        exit_code: int = 0,
        environment: dict[str, Any] | None = ENVIRONMENT_OF_TEST,
        tail: bytes = b"",
        **of_run: Any,
    ) -> Path:
        directory = tmp_path / name
        first = {
            "schema": 1,
            "run_id": f"run-{name}",
            "plan": "smoke",
            "cases": tuple(plan if plan is not None else [r.case for r in records]),
            "target": "deepspeed==0.19.8",
            "budget_seconds": 120.0,
            "started_at": "2026-01-01T00:00:00+00:00",
            "tiebench": "0.1.0",
            "command": "tiebench run --plan smoke",
        }
        with RecordLog(directory, RunRow(**(first | of_run))) as log:
            for row in records:
                log.append(StartedRow(case=row.case, attempt=row.attempt, started_at=STAMP))
                log.append(FinalRow(record=row))
            for case in started:
                log.append(StartedRow(case=case, attempt=1, started_at=STAMP))
            if end:
                log.append(EndRow(ended_at="2026-01-01T00:01:00+00:00", reason=end, exit_code=exit_code))  # type: ignore[arg-type]
        if tail:
            with (directory / EVENTS).open("ab") as stream:
                stream.write(tail)
        if environment is not None:
            write_whole(directory / ENVIRONMENT, json.dumps(environment).encode())
        return directory

    return make


def _terminal(directory: Path, width: int = 140) -> str:
    stream = io.StringIO()
    print_report(summarize(load(directory)), Console(file=stream, width=width, force_terminal=False, color_system=None))
    return stream.getvalue()


class Page(HTMLParser):
    """Tags, attributes and text of a page; a start tag without its end tag is an error."""

    VOID = frozenset({"meta", "input", "rect", "line", "br", "wbr"})

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text.append(data)

    def has(self, words: str) -> bool:
        return words in " ".join("".join(self.text).split())


def _page(directory: Path) -> Page:
    return Page(html.render(summarize(load(directory))))


@pytest.fixture
def terminal() -> Callable[..., str]:
    """terminal(directory, width=140) -> what is printed."""
    return _terminal


@pytest.fixture
def page() -> Callable[[Path], Page]:
    """page(directory) -> the HTML report."""
    return _page
