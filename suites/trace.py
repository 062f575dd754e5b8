"""Trace (skeleton)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Boundary:
    """The first module boundary that leaves the noise."""

    sentence: str
