"""Kills runs at random moments: is a finished row lost or doubled, does every directory report, is anything left?

    python -m ci.tests.kill [--times 200] [--seed 1]      prints a line a moment and a table; 1 where one failed

Each moment starts a real ``tiebench run``, and sends SIGTERM or SIGKILL to its supervisor, one of its ranks, its judge
or its fork server. Whatever is left must be readable and give a report; a run whose supervisor was the victim is
resumed and must then have each case's result once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from ci.records import ENVIRONMENT, EVENTS, LogError, read_run
from ci.tests.conftest import command, environment
from reports.write import write_report
from suites.cases import Case

MARK = "TIEBENCH_KILL_TEST"  # environment variable by which all processes of a run are known
CASES = tuple(Case("handwritten", layers=1, tp=1 + seed % 2, seed=seed) for seed in range(8))
# Seconds in which moments lie: after the start of the process, and after the first ranks are up.
STARTING, WORKING = 4.0, 1.6
PATIENCE = 120.0  # seconds for a run to end
Victim = Literal["supervisor", "rank", "judge", "server"]
VICTIMS: tuple[Victim, ...] = ("supervisor", "supervisor", "rank", "judge", "server")  # the first counts most


@dataclass(frozen=True)
class Moment:
    """Whom to send which signal, and when: seconds after the start, or after the first ranks are up."""

    victim: Victim
    number: signal.Signals
    seconds: float
    working: bool = True

    @classmethod
    def draw(cls, source: random.Random) -> Moment:
        """A random one; most while cases are at work."""
        number = source.choice((signal.SIGTERM, signal.SIGKILL))
        working = source.random() < 0.75
        return cls(source.choice(VICTIMS), number, source.uniform(0.0, WORKING if working else STARTING), working)

    def __str__(self) -> str:
        """For people."""
        since = "of work" if self.working else "of the start"
        return f"{self.number.name} to the {self.victim} after {self.seconds:.2f} s {since}"


@dataclass(frozen=True)
class Result:
    """What became of a run.

    Args:
        hit: who was really there to be sent the signal; "" where the run had ended before.
        finished: rows that were finished at that moment; wrong: what must not be, in lines for people.
    """

    moment: Moment
    hit: str
    finished: int
    wrong: tuple[str, ...]


def try_moment(moment: Moment, place: Path) -> Result:
    """Start a run in an empty directory, send the signal, check what is left, resume."""
    token = secrets.token_hex(8)
    out = place / "run"
    ids = [word for case in CASES for word in ("--case", case.id)]
    told = environment() | {MARK: token, "TIEBENCH_CACHE": str(place / "cache")}
    with open(place / "output", "wb") as log:
        process = subprocess.Popen(
            command("run", "--out", "run", "--device", "cpu", *ids),
            cwd=place,
            env=told,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    wrong: list[str] = []
    try:
        deadline = time.monotonic() + PATIENCE
        while moment.working and process.poll() is None and not begun(out) and time.monotonic() < deadline:
            time.sleep(0.005)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(moment.seconds)
        before = results(out)
        hit = strike(process, moment, out)
        try:
            code = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            return Result(moment, hit, len(before), ("the run did not end",))
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    left = lingering(token)
    wrong += [f"left running: {' '.join(words)}" for words in left]
    wrong += check(out, before, whole=hit in ("judge", "server", ""))
    if hit in ("rank", "judge", "server") and code not in (0, 1):
        wrong.append(f"the run ended with {code}: {(place / 'output').read_text()[-300:]}")
    if hit == "supervisor":
        wrong += resume(place, out, before, told)
        wrong += [f"left running after resuming: {' '.join(words)}" for words in lingering(token)]
    return Result(moment, hit, len(before), tuple(wrong))


def begun(out: Path) -> bool:
    """Whether the first ranks are up."""
    return (out / ENVIRONMENT).exists()


def results(out: Path) -> Counter[str]:
    """Cases with a finished row that is whole in the log, and how many rows each has."""
    with contextlib.suppress(OSError):
        lines = (out / EVENTS).read_bytes().split(b"\n")[:-1]
        rows = [json.loads(line) for line in lines]
        return Counter(
            row["record"]["case"] for row in rows if row["event"] == "final" and row["record"]["status"] == "finished"
        )
    return Counter()


def strike(process: subprocess.Popen[bytes], moment: Moment, out: Path) -> str:
    """Send the signal; who got it."""
    if process.poll() is not None:
        return ""
    found: dict[str, list[int]] = {"supervisor": [process.pid]}
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(process.pid).children(recursive=True):
            found.setdefault(role(child, out), []).append(child.pid)
    victim = moment.victim if moment.victim in found else "supervisor"
    try:
        os.kill(found[victim][-1], moment.number)
    except ProcessLookupError:
        return ""
    return victim


def role(process: psutil.Process, out: Path) -> str:
    """Who this is, by where its output goes."""
    try:
        log = Path(os.readlink(f"/proc/{process.pid}/fd/1"))
    except OSError:
        return "other"
    if log.parent != (out / "logs").resolve():
        return "other"
    return {"judge": "judge", "forkserver": "server"}.get(log.stem, "rank" if "-rank" in log.stem else "other")


def lingering(token: str, seconds: float = 15.0) -> list[list[str]]:
    """Command lines of processes of the run that are still there after some seconds."""
    deadline = time.monotonic() + seconds
    while True:
        found = []
        for entry in os.listdir("/proc"):
            if not entry.isdigit():
                continue
            with contextlib.suppress(OSError, psutil.Error):
                marked = f"{MARK}={token}".encode() in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
                if marked and psutil.Process(int(entry)).status() != psutil.STATUS_ZOMBIE:
                    found.append(psutil.Process(int(entry)).cmdline())
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def check(out: Path, before: Counter[str], *, whole: bool) -> list[str]:
    """What must hold of a directory; `whole`: every case must have come out right."""
    if not (out / EVENTS).exists() or b"\n" not in (out / EVENTS).read_bytes():
        return ["rows are gone"] if before else []
    now = results(out)
    wrong = [f"lost: {case}" for case in before if case not in now]
    wrong += [f"doubled: {case}" for case, count in now.items() if count > 1]
    try:
        run = read_run(out)
        write_report(out)
    except LogError as error:
        return [*wrong, f"no report: {error}"]
    wrong += [f"damaged: {line}" for line in run.damage]
    wrong += [] if [r.case for r in run.records] == list(run.plan.cases) else ["not one record for each case"]
    wrong += ["still running"] if run.running else []
    ran = [r for r in run.records if r.status != "not_run"]
    troubled = [f"{r.case}: {r.status}, {r.verdict}" for r in ran if (r.status, r.verdict) not in GOOD]
    if len(troubled) > 2:  # two may be open at a time
        wrong += ["more cases are troubled than were open", *troubled]
    if whole:
        wrong += [f"{r.case}: {r.status}, {r.verdict}" for r in run.records if (r.status, r.verdict) not in GOOD]
    return wrong


GOOD = (("finished", "rounding"), ("finished", "exact"))


def resume(place: Path, out: Path, before: Counter[str], told: dict[str, str]) -> list[str]:
    """Go on with a run, or begin it anew where it had not written its first row."""
    there = (out / EVENTS).exists() and b"\n" in (out / EVENTS).read_bytes()
    ids = [word for case in CASES for word in ("--case", case.id)]
    words = ("run", "--resume", "run") if there else ("run", "--out", "run", *ids)
    done = subprocess.run(
        command(*words, "--device", "cpu"),
        cwd=place,
        env=told,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    wrong = (
        []
        if done.returncode == 0
        else [f"resumed with exit code {done.returncode}: {done.stdout[-300:]}{done.stderr[-300:]}"]
    )
    return wrong + check(out, before, whole=True)


def main(words: Sequence[str] | None = None) -> int:
    """Try many moments; a table by victim and signal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(words)
    source = random.Random(given.seed)
    tried: Counter[tuple[str, str]] = Counter()
    failed: Counter[tuple[str, str]] = Counter()
    rows = 0
    for number in range(1, given.times + 1):
        moment = Moment.draw(source)
        with tempfile.TemporaryDirectory() as directory:
            found = try_moment(moment, Path(directory))
        key = found.hit or "ended before", moment.number.name
        tried[key] += 1
        failed[key] += bool(found.wrong)
        rows += found.finished
        what = "; ".join(found.wrong) or "good"
        print(f"[{number}/{given.times}] {moment}: hit {key[0]}, {found.finished} rows; {what}", flush=True)
    for (victim, name), count in sorted(tried.items()):
        print(f"{victim:>12} {name:>8}: {count} moments, {failed[victim, name]} failed")
    print(f"{given.times} moments, {rows} rows were finished before them, {sum(failed.values())} failed")
    return 1 if failed.total() else 0


if __name__ == "__main__":
    sys.exit(main())
