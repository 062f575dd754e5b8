"""What a merged run directory says of the runs that it was made of: `pieces.json`, written by `ci.merge`; and the time
that a run used, by phase.

This module needs msgspec only: reports import it too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ci.records import Count, LogError, Run, Segment, instant, write_whole

PIECES = "pieces.json"
GOING, KILLED = "still going", "killed"  # how a piece without an end row "ended"
LARGEST = 16 * 2**20  # bytes that are read


class Piece(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One run directory that went into a merged one.

    Args:
        name: of its directory, for people; plan: as its own first row has it.
        group: pieces of one group ran one after the other (attempts at one shard), those of several at the same time.
        seconds: that all its segments took together, None where nothing tells; budget_seconds: of all of them.
        ended: reason of its end row; `KILLED`, or `GOING` when it was merged.
        cases: that it planned; results: of them; segments: 1, and 1 for each time that it was resumed.
        phases: used, in seconds.
    """

    name: str
    plan: str
    group: str
    started_at: str
    ended: str
    tiebench: str
    cases: Count
    results: Count
    budget_seconds: float
    seconds: float | None = None
    segments: Count = 1
    phases: dict[str, float] = {}


class Merge(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Content of `pieces.json`.

    Args:
        problems: what keeps the merged run from being green, one line each; notes: what else there is to know.
    """

    pieces: tuple[Piece, ...] = ()
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def groups(self) -> dict[str, float | None]:
        """Group -> seconds of all its pieces; None where nothing tells."""
        found: dict[str, float | None] = {}
        for piece in self.pieces:
            before = found.setdefault(piece.group, None)
            if piece.seconds is not None:
                found[piece.group] = (before or 0.0) + piece.seconds
        return found

    @property
    def longest(self) -> tuple[str, float] | None:
        """The group that took longest; None where nothing tells."""
        known = [(group, spent) for group, spent in self.groups.items() if spent is not None and math.isfinite(spent)]
        return max(known, key=lambda item: item[1], default=None)

    @property
    def seconds(self) -> float | None:
        """All pieces together; None where nothing tells."""
        known = [spent for spent in self.groups.values() if spent is not None]
        return sum(known) if known else None

    @property
    def going(self) -> bool:
        """A piece was still going when it was merged."""
        return any(piece.ended == GOING for piece in self.pieces)

    @property
    def text(self) -> str:
        """For people: how many pieces, the longest, and all together."""
        many = len(self.pieces)
        said = f"{many} run{'' if many == 1 else 's'}"
        if len(self.groups) > 1 and self.longest and self.seconds is not None:
            group, spent = self.longest
            said += f", {len(self.groups)} at the same time: {spent:.1f} s in the longest ({group}), "
            said += f"{self.seconds:.1f} s in all together"
        elif self.seconds is not None:
            said += f", {self.seconds:.1f} s in all together"
        return said


_decoder = msgspec.json.Decoder(Merge)


def write(directory: Path, merge: Merge) -> None:
    """Write `pieces.json`.

    Raises:
        LogError: it cannot be written.
    """
    write_whole(directory / PIECES, msgspec.json.format(msgspec.json.encode(merge), indent=1) + b"\n")


def read(directory: Path) -> Merge | None:
    """Read `pieces.json`; None where the run is no merged one.

    Raises:
        LogError: it cannot be read.
    """
    path = directory / PIECES
    try:
        if path.stat().st_size > LARGEST:
            raise LogError(f"{PIECES} has more than {LARGEST} bytes")
        return _decoder.decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise LogError(f"{PIECES} cannot be read: {error.strerror or error}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise LogError(f"{PIECES} cannot be read: {error}") from None


def used_phases(run: Run) -> dict[str, float]:
    """Seconds by phase over all segments of a run; what a segment without an end used is from its records."""
    used: dict[str, float] = defaultdict(float)
    for segment in run.segments:
        found = segment.end.phases if segment.end is not None else {}
        for name, spent in (found or _from_records(segment)).items():
            used[name] += spent
    return dict(used)


def _from_records(segment: Segment) -> Mapping[str, float]:
    if segment.seconds is None or not segment.records:
        return {}
    startup = sum(max(record.startup_seconds or 0.0, 0.0) for record in segment.records)
    begin = instant(segment.started_at)
    first = min((at for record in segment.records if (at := instant(record.started_at)) is not None), default=None)
    setup = max(first - begin, 0.0) if first is not None and begin is not None else 0.0
    return {"setup": setup, "startup": startup, "cases": max(segment.seconds - startup - setup, 0.0)}
