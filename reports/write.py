"""`tiebench report DIR`: write `report.md` and `report.html` into a run directory."""

from __future__ import annotations

from pathlib import Path

from ci.records import write_whole
from reports import html, markdown
from reports.load import load
from reports.summary import Summary, summarize

MARKDOWN, HTML = "report.md", "report.html"


def write_report(directory: Path) -> Summary:
    """Read a run directory and write both reports into it, each whole or not at all.

    Raises:
        ci.records.LogError: no run directory, or a report cannot be written (a report that was there is unchanged).
    """
    summary = summarize(load(directory))
    write(summary)
    return summary


def write(summary: Summary) -> None:
    """Write both reports of a run into its directory, each whole or not at all.

    Raises:
        ci.records.LogError: one cannot be written (a report that was there is unchanged).
    """
    directory = summary.loaded.run.directory
    write_whole(directory / MARKDOWN, markdown.render(summary).encode())
    write_whole(directory / HTML, html.render(summary).encode())
