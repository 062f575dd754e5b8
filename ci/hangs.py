"""What a hang was, how a rank died, and what outlived a set that was killed: all read from outside the ranks.

A hang is named from three sources, none of which needs the rank's help: its state in ``/proc`` (and how long it runs in
a short interval), its stacks (`ci.stacks`), and the last collectives that each rank issued (`suites.collectives`).
Ranks are compared group by group and call by call: the first call at which they differ, or that one of them never
issued, is where they parted. What a rank that others wait for does instead is the cause; what the others do is the
consequence.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import signal
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import psutil

from ci import stacks
from ci.stacks import Stack, Thread
from suites import collectives
from suites.collectives import POINT_TO_POINT, Collective

INTERVAL = 0.3  # seconds over which a process is watched
BUSY = 0.5  # share of them on a core, or waiting for one, above which a thread runs
MARK = "TIEBENCH_SET"  # environment variable by which a set's processes are known, whatever session they move to
UNEVEN = ("all_to_all", "all_to_all_single")  # ranks may give different numbers of elements
_FUTEX = {"x86_64": "202", "aarch64": "98"}

Cause = Literal[
    "stopped", "disk", "endless Python", "endless native", "lock", "sleep", "native wait", "gone",
    "different sizes", "different order", "different collectives", "collective left out", "unmatched message",
    "collective does not end", "slow", "unknown",
]  # fmt: skip
Doing = Literal[
    "stopped", "disk", "endless Python", "endless native", "lock", "sleep", "native wait", "gone", "collective",
    "device",
]  # fmt: skip
# What explains that others wait, the most telling first; to be in a collective or on the device explains nothing.
_CULPRITS: tuple[Doing, ...] = (
    "gone", "stopped", "disk", "endless native", "endless Python", "lock", "sleep", "native wait",
)  # fmt: skip


# Comparing the ranks' collectives


@dataclass(frozen=True)
class Habit:
    """What a rank issued the last time that it had issued the same calls before, as it does in every training step.

    Args:
        usual: the call that came then; now: the one that came this time.
        kept: they are the same; skipped: now comes what came next then.
    """

    usual: Collective
    now: Collective
    kept: bool
    skipped: bool


@dataclass(frozen=True)
class Difference:
    """The first call over one group at which its ranks are not together.

    Args:
        calls: what each rank issued; missing: ranks that never issued it.
        how: what sets the sequences apart, as far as they tell: "sizes", "order", "left out" or "".
        left_out: the rank that is one call ahead of the others; seen: they agree again from there on.
        drift: an earlier call that the ranks issued in different phases, and so not for the same purpose.
        habits: what each rank issued before, after the same calls as here.
    """

    number: int
    calls: Mapping[int, Collective]
    missing: tuple[int, ...] = ()
    how: str = ""
    left_out: int | None = None
    seen: bool = False
    drift: Mapping[int, Collective] = field(default_factory=dict)
    habits: Mapping[int, Habit] = field(default_factory=dict)

    @property
    def call(self) -> Collective:
        """What most of those that issued one did."""
        return _majority(self.calls)[1]

    @property
    def sentence(self) -> str:
        """The difference and what explains it, for people."""
        return self.plain + self.hint

    @property
    def plain(self) -> str:
        """The difference alone."""
        if self.missing:
            waits = any(call.state in ("issued", "waits") for call in self.calls.values())
            verb = ("waits in" if len(self.calls) == 1 else "wait in") if waits else "issued"
            text = f"{_ranks(self.missing)} never issued {self.call} over {self.call.over}, which "
            text += f"{_ranks(self.calls)} {verb}" + (f", in {self.call.phase!r}" if self.call.phase else "")
        else:
            groups: dict[str, list[int]] = {}
            phases = {call.phase for call in self.calls.values()}
            for rank, call in sorted(self.calls.items()):
                where = f" in {call.phase!r}" if len(phases) > 1 else ""
                groups.setdefault(f"{call}{where}", []).append(rank)
            text = "; ".join(f"{_ranks(ranks)}: {call}" for call, ranks in groups.items())
            text += f"; over {self.call.over}" + (
                f", in {self.call.phase!r}" if phases == {self.call.phase} != {""} else ""
            )
        return text

    @property
    def hint(self) -> str:
        """What the ranks did before and after tells of it."""
        text = ""
        if self.how == "order":
            text += "; the same two calls come in another order"
        elif self.how == "sizes":
            text += "; only the size differs"
        elif self.left_out is not None and self.seen:
            text += f"; rank {self.left_out} left one out, or the others have one too many: from there on they agree"
        if any(habit.kept for habit in self.habits.values()):  # else all do what they never did: that tells nothing
            for rank, habit in sorted(self.habits.items()):
                if not habit.kept:
                    text += f"; rank {rank} issued {habit.usual.what} after the same calls before, not {habit.now.what}"
                    text += ": it left that out, or issues it later" if habit.skipped else ""
        if self.drift:
            places = ", ".join(f"rank {rank} in {call.phase!r}" for rank, call in sorted(self.drift.items()))
            text += f"; already #{next(iter(self.drift.values())).number} was issued at different places: {places}"
        return text


def compare(recorded: Mapping[int, Sequence[Collective]]) -> tuple[Difference, ...]:
    """First differences of the ranks' last case, one a group at most, in the order of time.

    Ranks that are not in `recorded` are not compared; those with an empty sequence have issued nothing.
    """
    case = max((row.case for rows in recorded.values() for row in rows), default=0)
    groups: dict[tuple[str, tuple[int, ...]], dict[int, dict[int, Collective]]] = {}
    for rank, rows in recorded.items():
        for row in rows:
            if row.case == case and row.kind not in POINT_TO_POINT:
                groups.setdefault((row.group, row.ranks), {}).setdefault(rank, {})[row.number] = row
    found = []
    for (_, members), calls in groups.items():
        every = {rank: calls.get(rank, {}) for rank in {*members, *calls} if rank in recorded}
        if difference := _first(every, recorded):
            found.append(difference)
    return tuple(sorted(found, key=lambda d: min(call.seconds for call in d.calls.values())))


def _first(
    every: Mapping[int, Mapping[int, Collective]], recorded: Mapping[int, Sequence[Collective]]
) -> Difference | None:
    begin = max((min(calls) for calls in every.values() if calls), default=1)  # older ones fell out of a ring
    drift: dict[int, Collective] = {}
    for number in range(begin, max((max(calls) for calls in every.values() if calls), default=0) + 1):
        have = {rank: calls[number] for rank, calls in every.items() if number in calls}
        missing = tuple(sorted(set(every) - set(have)))
        if len({call.phase for call in have.values()}) > 1 and not drift:
            drift = dict(have)
        differ = len({_signature(call) for call in have.values()}) > 1
        if not missing and not differ:
            continue
        # Where calls are missing, what those ranks issued instead, over other groups, tells as much.
        case = next(iter(have.values())).case
        last = {rank: rows[-1] for rank in missing if (rows := recorded[rank]) and rows[-1].case == case}
        now = {rank: call for rank, call in {**have, **last}.items() if call.kind not in POINT_TO_POINT}
        habits = {rank: found for rank, call in now.items() if (found := habit(recorded[rank], call))}
        if missing:
            return Difference(number, have, missing, drift=drift, habits=habits)
        how, left_out = _how(every, have, number)
        seen = left_out is not None
        skipped = [rank for rank, h in habits.items() if h.skipped]
        if how in ("", "sizes") and len(skipped) == 1:
            how, left_out = "left out", skipped[0]
        return Difference(number, have, (), how, left_out, seen, drift if drift != have else {}, habits)
    return None


def habit(rows: Sequence[Collective], call: Collective) -> Habit | None:
    """What this rank did after the same calls before; None where there were none. The longest match counts."""
    rows = [row for row in rows if row.case == call.case and row.kind not in POINT_TO_POINT]
    at = next((i for i, row in enumerate(rows) if row.index == call.index), 0)
    # The number of a step is no part of what is done in it.
    does = [(row.ranks, re.sub(r"\d+", "", row.phase), *_signature(row)) for row in rows]
    best, length = 0, 1
    for before in range(1, at):
        same = 0
        while same < before and does[before - 1 - same] == does[at - 1 - same]:
            same += 1
        if same >= max(length, 2):
            best, length = before, same
    if not best:
        return None
    after = rows[best + 1] if best + 1 < at else None
    kept = does[best] == does[at]
    skipped = not kept and after is not None and does[best + 1] == does[at]
    return Habit(rows[best], rows[at], kept, skipped)


def _signature(call: Collective, *, sizes: bool = True) -> tuple[object, ...]:
    elements = call.elements if sizes and call.kind not in UNEVEN else None
    return call.kind, call.dtype, call.op, call.peer, elements


def _majority(calls: Mapping[int, Collective]) -> tuple[int, Collective]:
    """The first rank that does what most do, and its call."""
    common = Counter(_signature(call) for _, call in sorted(calls.items())).most_common(1)[0][0]
    return next((rank, call) for rank, call in sorted(calls.items()) if _signature(call) == common)


def _how(
    every: Mapping[int, Mapping[int, Collective]], have: Mapping[int, Collective], number: int
) -> tuple[str, int | None]:
    usual, call = _majority(have)
    odd = next(rank for rank, other in sorted(have.items()) if _signature(other) != _signature(call))

    def from_here(rank: int) -> list[tuple[object, ...]]:
        return [_signature(row) for n, row in sorted(every[rank].items()) if n >= number]

    ours, theirs = from_here(usual), from_here(odd)
    if len(ours) > 1 and len(theirs) > 1 and (ours[0], ours[1]) == (theirs[1], theirs[0]):
        return "order", None
    if ours[1:] and theirs[: len(ours) - 1] == ours[1 : 1 + len(theirs)]:
        return "left out", odd
    if theirs[1:] and ours[: len(theirs) - 1] == theirs[1 : 1 + len(ours)]:
        return "left out", usual
    if len({_signature(other, sizes=False) for other in have.values()}) == 1:
        return "sizes", None
    return "", None


def unmatched(recorded: Mapping[int, Sequence[Collective]]) -> tuple[tuple[int, Collective, int], ...]:
    """Messages that a rank still waits with: (rank, its call, how many the other side has issued the other way)."""
    case = max((row.case for rows in recorded.values() for row in rows), default=0)
    found = []
    for rank, rows in recorded.items():
        mine = [row for row in rows if row.case == case and row.kind in ("send", "recv") and rank in row.ranks]
        for row in mine:
            if row.state in ("done", "raised") or not 0 <= row.peer < len(row.ranks):
                continue
            other = row.ranks[row.peer]
            if other not in recorded:
                continue
            back, own = ("recv" if row.kind == "send" else "send"), row.ranks.index(rank)
            same = [r for r in mine if (r.group, r.kind, r.peer) == (row.group, row.kind, row.peer)]
            theirs = [r for r in recorded[other] if (r.case, r.group, r.kind, r.peer) == (case, row.group, back, own)]
            if same.index(row) >= len(theirs):
                found.append((rank, row, len(theirs)))
                break
    return tuple(found)


# What a process does


@dataclass(frozen=True)
class State:
    """A process over a short interval.

    Args:
        letter: of its main thread, as ``ps`` shows it (R, S, D, T, Z, …).
        main: share of the interval that its main thread ran, or was ready to run and had no core.
        channel: kernel function that the main thread sleeps in; call: number of the system call, as text.
    """

    letter: str
    main: float
    channel: str = ""
    call: str = ""


def states(pids: Mapping[int, int], interval: float = INTERVAL) -> dict[int, State]:
    """States of processes of this machine: key (rank) -> state; those that are gone are left out."""
    if not pids:
        return {}
    begin = time.monotonic()
    before = {key: _time(pid) for key, pid in pids.items()}
    time.sleep(interval)
    found = {}
    for key, pid in pids.items():
        after, seconds = _time(pid), time.monotonic() - begin
        text = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        if text:
            found[key] = State(
                letter=text[0],
                main=(after - before[key]) / seconds,
                channel=_read(f"/proc/{pid}/wchan").strip("0\n"),
                call=_read(f"/proc/{pid}/syscall").partition(" ")[0],
            )
    return found


def _time(pid: int) -> float:
    """Seconds that the main thread has run, or was ready to run and had no core; 0 where that cannot be read."""
    if fields := _read(f"/proc/{pid}/task/{pid}/schedstat").split():
        return (int(fields[0]) + int(fields[1])) / 1e9
    if fields := _read(f"/proc/{pid}/task/{pid}/stat").rpartition(")")[2].split():
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


@dataclass(frozen=True)
class Activity:
    """What a rank that did not answer does, in one word and for people (``sleeps in stuck (x.py:3)``)."""

    doing: Doing | None
    text: str


def activity(
    state: State | None, stack: Stack | None, calls: Sequence[Collective] = (), again: bool = False
) -> Activity:
    """Name what a process does.

    Args:
        again: a second look at the stack also found native code innermost, on the same line of Python.
    """
    main = stack.main if stack else None
    place = _place(main)
    at = f" in {place}" if place else ""
    if state is None or state.letter in "ZX":
        return Activity("gone", "has ended")
    if state.letter in "Tt":
        return Activity("stopped", f"is stopped (by a signal such as SIGSTOP, or a debugger){at}")
    if state.letter == "D":
        return Activity("disk", f"waits in the kernel for a device, such as a disk or a network file system{at}")
    names = " ".join(frame.name for frame in main.frames if frame.native) if main else ""
    modules = " ".join(frame.module or "" for frame in main.frames) if main else ""
    if "libcuda.so" in modules:  # it spins there: that it runs says nothing
        return Activity("device", f"waits for the GPU{at}")
    if state.main >= BUSY:
        share = f"at {min(state.main, 1.0):.0%} of a core"
        native = main.frames[0] if main and main.frames and main.frames[0].native else None
        if native and (again or not main or not main.owns_gil):
            lock = "with the interpreter lock held" if main and main.owns_gil else "without the interpreter lock"
            return Activity("endless native", f"runs native code {share}, {lock}: {native.place}{_from(place)}")
        return Activity("endless Python", f"runs Python code {share}{at}")
    if _in_collective(main, calls):
        last = next((c for c in reversed(calls) if c.state in ("waits", "issued")), None)
        return Activity("collective", f"waits in {last} over {last.over}" if last else f"waits in a collective{at}")
    if "nanosleep" in state.channel or "nanosleep" in names:
        return Activity("sleep", f"sleeps{at}")
    futex = "futex" in state.channel or state.call == _FUTEX.get(platform.machine())
    if futex or "acquire_lock" in names or "pthread_mutex" in names:
        others = [t for t in stack.threads if t is not main and _waits_for_lock(t)] if stack else []
        more = "".join(f"; so does its thread {t.thread_name or t.os_thread_id} in {_place(t)}" for t in others)
        return Activity("lock", f"waits for a lock or another thread{at}{more}")
    kernel = f" ({state.channel})" if state.channel else ""
    return Activity("native wait", f"waits in the kernel{kernel}{at}")


def _from(place: str) -> str:
    return f", called from {place}" if place else ""


def _waits_for_lock(thread: Thread) -> bool:
    """Whether a thread stands at a lock in the program's own code (in a library's, threads wait for work like that)."""
    inner = thread.python
    natives = " ".join(frame.name for frame in thread.frames[:6] if frame.native)
    return bool(inner) and "acquire_lock" in natives and inner is not None and not _library(inner.filename)


def _library(file: str) -> bool:
    return (
        "/site-packages/torch/" in file or bool(re.search(r"/lib/python3\.\d+/(?!site-packages)", file)) or "<" in file
    )


def _place(thread: Thread | None) -> str:
    """Innermost Python frame that is neither torch's nor the standard library's; else the innermost one at all."""
    python = [frame for frame in thread.frames if not frame.native] if thread else []
    found = next((frame for frame in python if not _library(frame.filename)), python[0] if python else None)
    return found.place if found else ""


def _in_collective(main: Thread | None, calls: Sequence[Collective]) -> bool:
    if main is None or not main.frames:
        return any(call.state in ("waits", "issued") for call in calls)
    inner = main.python
    native = any("c10d::" in frame.name for frame in main.frames if frame.native)
    return native or (inner is not None and "torch/distributed/" in inner.filename)


# Naming a hang


@dataclass(frozen=True)
class Where:
    """A rank as the watchdog knows it.

    Args:
        pid: on this machine; None where it is out of reach.
        place: for people: "has finished", "is in 'step 2 update'", ….
        answered: it has finished, failed or died.
        recorder: file that `suites.collectives` writes in the rank.
    """

    pid: int | None
    place: str
    answered: bool
    recorder: Path


@dataclass(frozen=True)
class Hang:
    """What a hang was.

    Args:
        sentence: for people, in one line.
        stacks: of the ranks that did not answer and could be looked at, or why not.
        collectives: last ones of every rank, oldest first.
    """

    cause: Cause
    sentence: str
    stacks: Mapping[int, str]
    collectives: Mapping[int, tuple[Collective, ...]]
    first_difference: Difference | None = None
    activities: Mapping[int, Activity] = field(default_factory=dict)

    def table(self, last: int = 8) -> str:
        """The last collectives of each rank, for people; the first difference is marked."""
        lines = []
        marked = self.first_difference
        for rank, rows in sorted(self.collectives.items()):
            shown = set(range(max(len(rows) - last, 0), len(rows)))
            own = marked.calls.get(rank) if marked else None
            if own in rows:  # what came around the difference too
                at = rows.index(own)
                shown |= set(range(max(at - 2, 0), min(at + 3, len(rows))))
            lines.append(f"rank {rank}:" + ("" if rows else " no collective"))
            before = -1
            for at in sorted(shown):
                if at > before + 1:
                    lines.append("    …")
                before, row = at, rows[at]
                mark = "   <- first difference" if row == own else ""
                lines.append(f"    {row} over {row.over}, {row.phase or 'no phase'}: {row.state}{mark}")
        return "\n".join(lines)


def look(ranks: Mapping[int, Where], limit: float = 10.0, hide: Collection[str] = ("control",)) -> Hang:
    """Look at ranks that hang, and name the hang; takes up to about `limit` seconds, never raises for what ranks do.

    Args:
        hide: names of threads that belong to the harness.
    """
    before = {rank: _last(where.recorder) for rank, where in ranks.items()}
    local = {rank: where.pid for rank, where in ranks.items() if where.pid is not None and not where.answered}
    seen = states(local)
    found = stacks.take({rank: pid for rank, pid in local.items() if rank in seen}, limit)
    unsure = {
        rank: local[rank]
        for rank, stack in found.items()
        if seen[rank].main >= BUSY and stack.main and stack.main.owns_gil
    }
    second = stacks.take(unsure, limit / 2) if unsure else {}
    seen = {rank: _both(seen.get(rank), state) for rank, state in states(local).items()}  # what it does, it does on
    recorded = {rank: collectives.read(where.recorder) for rank, where in ranks.items() if where.recorder.is_file()}
    doing = {}
    for rank in local:
        again = rank in second and _same_native(found[rank], second[rank])
        doing[rank] = activity(seen.get(rank), found.get(rank), recorded.get(rank, ()), again)
    texts = {rank: stack.text(hide) for rank, stack in found.items()}
    moved = {rank: rows[-1].index - before[rank] for rank, rows in recorded.items() if rows}
    moved = {rank: count for rank, count in moved.items() if count}
    hang = name(ranks, doing, recorded, texts)
    if not moved:
        return hang
    counts = ", ".join(f"rank {rank} issued {count} collectives" for rank, count in sorted(moved.items()))
    return replace(hang, cause="slow", sentence=f"too slow rather than stuck: {counts} while they were looked at")


def _last(recorder: Path) -> int:
    rows = collectives.read(recorder)
    return rows[-1].index if rows else 0


def _both(before: State | None, after: State) -> State:
    return replace(after, main=min(before.main, after.main)) if before else after


def _same_native(one: Stack, other: Stack) -> bool:
    a, b = one.main, other.main
    return bool(a and b and a.frames and b.frames and b.frames[0].native and a.python == b.python)


def name(
    ranks: Mapping[int, Where],
    doing: Mapping[int, Activity],
    recorded: Mapping[int, tuple[Collective, ...]],
    texts: Mapping[int, str],
) -> Hang:
    """Name a hang from what was seen of it."""
    differences = compare(recorded)
    hard = next((d for d in differences if not d.missing), None)
    first = hard or next(iter(differences), None)
    culprits = {rank: act for rank, act in doing.items() if act.doing in _CULPRITS}
    sentences, cause = [], "unknown"
    if hard:
        cause = {"sizes": "different sizes", "order": "different order", "left out": "collective left out"}.get(
            hard.how, "different collectives"
        )
        sentences.append(hard.sentence)
    if culprits:
        worst = min((act.doing for act in culprits.values() if act.doing), key=_CULPRITS.index)
        cause = cause if hard else worst
        sentences += [f"rank {rank} {act.text}, {_phase(ranks[rank])}" for rank, act in sorted(culprits.items())]
    waited = [d for d in differences if d.missing]
    if waited and not hard:
        sentences += [waited[0].sentence, *(d.plain for d in waited[1:3])]
        if not culprits:
            crossed = any(
                set(a.missing) & set(b.calls) and set(b.missing) & set(a.calls) for a in waited for b in waited
            )
            cause = "different collectives" if crossed else "collective left out"
            sentences += ["they wait for each other: one was left out, or the order differs"] if crossed else []
            done = [rank for d in waited for rank in d.missing if ranks[rank].answered]
            sentences += [f"rank {rank} {ranks[rank].place}" for rank in dict.fromkeys(done)]
    if not sentences:
        for rank, call, count in unmatched(recorded):
            cause = "unmatched message"
            other = "sent" if call.kind == "recv" else "received"
            sentences.append(f"rank {rank} waits in {call}; {call.peer_rank} has {other} {count} of these")
    if not sentences and any(act.doing in ("collective", "device") for act in doing.values()):
        cause = "collective does not end"
        sentences.append("every rank has issued the same collectives, and the last does not end")
        sentences += [f"rank {rank} {act.text}" for rank, act in sorted(doing.items())]
    sentences = sentences or [f"rank {rank} {where.place}" for rank, where in sorted(ranks.items())]
    return Hang(cause, "; ".join(sentences), texts, dict(recorded), first, dict(doing))  # type: ignore[arg-type]


def _phase(where: Where) -> str:
    return where.place.removeprefix("is ")


def _ranks(ranks: Collection[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


# How a rank died


def memory_kills(pids: Collection[int] = ()) -> dict[str, int]:
    """How many processes the kernel has killed for lack of memory so far, by the counter's file.

    The counters are those of the control groups of this process and of `pids` and of the groups above them (version 2
    and 1), and of the machine; those that cannot be read are left out.
    """
    found: dict[str, int] = {}
    for path in (*_group_files(("self", *map(str, pids))), Path("/proc/vmstat")):
        if match := re.search(r"^oom_kill (\d+)$", _read(str(path)), re.MULTILINE):
            found[str(path)] = int(match[1])
    return found


def _group_files(pids: Sequence[str], proc: Path = Path("/proc")) -> list[Path]:
    """``memory.events`` and ``memory.oom_control`` of the processes' control groups and all above them."""
    mounts: dict[str, tuple[str, Path]] = {}  # version -> root of the mount within the hierarchy, mount point
    for line in _read(str(proc / "self/mountinfo")).splitlines():
        own, _, rest = line.partition(" - ")
        kind, _, options = [*rest.split(" ", 2), "", ""][:3]
        fields = own.split()
        if kind == "cgroup2":
            mounts.setdefault("2", (fields[3], Path(fields[4])))
        elif kind == "cgroup" and "memory" in options.split(","):
            mounts.setdefault("1", (fields[3], Path(fields[4])))
    found: dict[Path, None] = {}
    for pid in pids:
        for line in _read(str(proc / pid / "cgroup")).splitlines():
            number, controllers, group = [*line.split(":", 2), "", ""][:3]
            version = "2" if number == "0" else "1" if "memory" in controllers.split(",") else ""
            if version not in mounts:
                continue
            root, point = mounts[version]
            inside = group.removeprefix(root.rstrip("/")) if group.startswith(root.rstrip("/")) else ""
            folder = point / inside.strip("/")
            file = "memory.events" if version == "2" else "memory.oom_control"
            for level in (folder, *folder.parents):
                found[level / file] = None
                if level == point:
                    break
    return list(found)


class Deaths:
    """Tells a rank that was killed for memory from one that somebody killed.

    Args:
        counters: what `memory_kills` said before the ranks did anything.
    """

    def __init__(self, counters: Mapping[str, int]):
        self._before = dict(counters)
        self._told = 0

    def watch(self, pids: Collection[int]) -> None:
        """Count in the control groups of these processes too, from now on."""
        self._before = {**memory_kills(pids), **self._before}

    def ended(self, code: int | None, now: Mapping[str, int] | None = None) -> str:
        """How a process ended, for people; None when its exit code is out of reach.

        Each death is told once: of two ranks killed by SIGKILL while the counters moved by one, the first is taken for
        the one that the kernel killed.
        """
        if code is None:
            return "closed its connection"
        killed = code in (-signal.SIGKILL, 128 + signal.SIGKILL)
        if code < 0:
            number = -code
            name = signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"
            text = f"was killed by {name}"
        else:
            text = f"ended with exit code {code}" + (", that of a program killed by SIGKILL" if killed else "")
        return text + self._memory(memory_kills() if now is None else now) if killed else text

    def _memory(self, now: Mapping[str, int]) -> str:
        moved = {
            file: count - self._before[file] for file, count in now.items() if count > self._before.get(file, count)
        }
        if max(moved.values(), default=0) > self._told:
            self._told += 1
            file = max(moved, key=lambda name: (name != "/proc/vmstat", moved[name]))
            return f" for lack of memory: the kernel's count of such kills rose by {moved[file]} ({file})"
        if self._before:
            return " from outside: the kernel has killed nothing for lack of memory meanwhile"
        return "; the kernel does that when memory runs out"


# What outlived a set


@dataclass(frozen=True)
class Leftover:
    """A process of a set that was killed, still there; `why` it is known to be one."""

    pid: int
    command: str
    why: str
    created: float

    def __str__(self) -> str:
        """For people."""
        return f"process {self.pid} ({self.command}): {self.why}"


def leftovers(mark: str, sessions: Collection[int] = (), recorders: Collection[Path] = ()) -> tuple[Leftover, ...]:
    """Processes of this machine that belong to a set, wherever they have moved to.

    A process that a rank started is known by its environment (`MARK`), one that a rank forked by the rank's recorder,
    which it has mapped; both hold after a double fork into a session of its own. Only processes that this user may look
    into can be told.

    Args:
        mark: value of `MARK` in the ranks' environment.
        sessions: sessions and process groups of the ranks.
        recorders: files of the ranks' recorders.
    """
    entry, files = f"{MARK}={mark}".encode(), {str(path.resolve()) for path in recorders}
    found = []
    for pid in _processes():
        why = _belongs(pid, entry, frozenset(sessions), files)
        if why:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    command = " ".join(process.cmdline())[:100] or process.name()
                    found.append(Leftover(pid, command, why, process.create_time()))
    return tuple(found)


def _processes() -> Iterator[int]:
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            yield int(entry)


def _belongs(pid: int, entry: bytes, sessions: Collection[int], files: Collection[str]) -> str:
    try:
        if os.getsid(pid) in sessions or os.getpgid(pid) in sessions:
            return "in a rank's session or process group"
        with open(f"/proc/{pid}/environ", "rb") as stream:
            if entry in stream.read().split(b"\0"):
                return "started by a rank"
        if files:
            mapped = {line.split(maxsplit=5)[5] for line in _read(f"/proc/{pid}/maps").splitlines() if "/" in line}
            if mapped & set(files):
                return "forked by a rank"
    except OSError:
        pass
    return ""


def end(found: Collection[Leftover], limit: float = 2.0) -> tuple[Leftover, ...]:
    """Kill them; those that are still there after `limit` seconds. A process id that was given away is not touched."""
    deadline = time.monotonic() + limit
    for one in found:
        if _alive(one):
            with contextlib.suppress(psutil.Error):
                psutil.Process(one.pid).kill()
    while (left := tuple(filter(_alive, found))) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def _alive(one: Leftover) -> bool:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(one.pid)
        return process.create_time() == one.created and process.status() != psutil.STATUS_ZOMBIE
    return False
