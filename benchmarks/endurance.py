"""Do memory, descriptors, processes and shared memory stay flat over many cases in one run?

    python -m benchmarks.endurance [--cases 1000] [--every 50]

One session runs cases of several world sizes and both paths, some of which crash or hang, and is measured every few
cases from outside: proportional set size (pages that processes share are shared out among them), descriptors and
threads of the supervisor, the fork server, the judge and the ranks; processes of the whole tree; entries of /dev/shm.
It prints a table and exits with 1 where something grows, or is left at the end.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import psutil

from ci.ranks import Settings
from ci.records import Record
from ci.session import Plan, Session
from ci.subject import Patch, Subject
from suites.cases import Case

WARM_UP = 0.2  # part of the cases in which caches fill: what is measured then does not count
MEMORY_GROWTH = 0.02  # MiB a case that each role may grow by
MEMORY = ("supervisor", "server", "judge", "rank")  # MiB
# By how much each may vary; the judge keeps references, up to a bound.
ROOM = {**dict.fromkeys(MEMORY, 30.0), "judge": 80.0, "files": 8, "threads": 6, "processes": 0, "shm": 0}
MIB = 2**20

QUICK = (
    Case("handwritten", layers=1, tp=1),
    Case("handwritten", layers=1),
    Case("handwritten", layers=1, head="row", zero=2, tp=1, dp=2),
    Case("handwritten", layers=1, head="row", hidden=35, vocab=67),
    Case("handwritten", layers=1, tie="untied", dp=2),
)
DEEPSPEED = (
    Case("deepspeed", head="row", zero=2),
    Case("deepspeed", head="row"),
    Case("deepspeed", head="vocab", zero=1),
    Case("deepspeed", head="row", zero=3),
)
# What rank 0 does in a case of this seed, before its model is built: each kind ends the ranks and starts new ones.
TROUBLE = """
import os, time
from suites import train
real = train.run_rank
def run_rank(case, *args, **options):
    kind = case.seed % 1000 if case.seed >= 1_000_000 else 0
    if kind == 1 and os.environ["RANK"] == "0":
        raise RuntimeError("on purpose")
    if kind == 2 and os.environ["RANK"] == "0":
        os._exit(3)
    if kind == 3:
        time.sleep(1000)
    return real(case, *args, **options)
train.run_rank = run_rank
"""
CRASH, EXIT, HANG = 1, 2, 3
HANG_LIMIT = 6.0  # seconds
EXPECTED = {
    0: ("finished", ("rounding", "exact")),
    CRASH: ("finished", ("crash",)),
    EXIT: ("finished", ("crash",)),
    HANG: ("timeout", ("hang",)),
}


@dataclass(frozen=True)
class Sample:
    """One look at the whole tree of processes. Which sets of ranks are up varies; so a rank stands for all.

    Args:
        supervisor, server, judge, rank: MiB of each role, proportional set size; of the largest rank.
        files, threads: most that any process has; processes: below this one; shm: entries of /dev/shm.
    """

    cases: int
    supervisor: float
    server: float
    judge: float
    rank: float
    files: int
    threads: int
    processes: int
    shm: int


def look(cases: int, session: Session) -> Sample:
    """Measure this process and everything below it."""
    own = psutil.Process()
    tree = [p for p in own.children(recursive=True) if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    ranks = {pid for ranks in session.sets.values() for pid in ranks.pids()}
    largest: defaultdict[str, float] = defaultdict(float)
    files, threads = own.num_fds(), own.num_threads()
    for process in tree:
        role = "judge" if process.pid == session.judge.pid else "rank" if process.pid in ranks else "server"
        try:
            largest[role] = max(largest[role], float(process.memory_full_info().pss) / MIB)
            files, threads = max(files, process.num_fds()), max(threads, process.num_threads())
        except psutil.Error:  # gone meanwhile
            continue
    return Sample(
        cases=cases,
        supervisor=float(own.memory_full_info().pss) / MIB,
        server=largest["server"],
        judge=largest["judge"],
        rank=largest["rank"],
        files=files,
        threads=threads,
        processes=len(tree),
        shm=shared_memory(),
    )


def shared_memory() -> int:
    """Entries of /dev/shm."""
    return len(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else 0


def cases(count: int) -> Iterator[Case]:
    """Cases of all kinds: of 40, one crashes and one ends a rank; of 200, one hangs; every tenth is DeepSpeed's."""
    quick, framework = itertools.cycle(QUICK), itertools.cycle(DEEPSPEED)
    for number in range(count):
        base = next(framework) if number % 10 == 5 else next(quick)
        kind = HANG if number % 200 == 27 else CRASH if number % 40 == 17 else EXIT if number % 40 == 37 else 0
        yield base.but(seed=1_000_000 + 1000 * number + kind if kind else number % 7)


def growth(samples: Sequence[Sample], total: int) -> list[str]:
    """What is larger in the second half of the time after the warm-up than it ever was in the first, in lines for
    people."""
    kept = [sample for sample in samples if sample.cases >= WARM_UP * total]
    early, late = kept[: len(kept) // 2], kept[len(kept) // 2 :]
    if not early:
        return []
    found = []
    for name, allowed in ROOM.items():
        room = allowed + (MEMORY_GROWTH * (late[-1].cases - early[0].cases) if name in MEMORY else 0)
        more = max(getattr(sample, name) for sample in late) - max(getattr(sample, name) for sample in early)
        if more > room:
            found.append(f"{name}: {more:.0f} more after {late[-1].cases - early[0].cases} cases")
    return found


def run(count: int, every: int, hear: Callable[[Sample], None] = lambda sample: None) -> tuple[list[Sample], list[str]]:
    """Run so many cases; samples, and what is wrong in lines for people."""
    before = psutil.Process().num_fds(), shared_memory()
    samples: list[Sample] = []
    wrong: list[str] = []
    records = 0

    def on_record(record: Record) -> None:
        nonlocal records
        records += 1
        seed = Case.parse(record.case).seed
        status, verdicts = EXPECTED[seed % 1000 if seed >= 1_000_000 else 0]
        if record.status != status or record.verdict not in verdicts:
            wrong.append(f"{record.case}: {record.status}, {record.verdict}: {record.evidence[:200]}")

    with tempfile.TemporaryDirectory() as directory:
        patch = Path(directory) / "trouble.py"
        patch.write_text(TROUBLE)
        settings = Settings(device="cpu", case_limit=HANG_LIMIT)
        plan = Plan("endurance", tuple(dict.fromkeys(cases(count))), budget=36000)
        out = Path(directory) / "run"
        with Session(out, plan, Subject(patch=Patch.read(patch)), settings, on_record) as session:
            for number, case in enumerate(cases(count), 1):
                session.advance(case)
                if number % every == 0 or number == count:
                    session.catch_up()
                    samples.append(look(number, session))
                    hear(samples[-1])
    if records != count:
        wrong.append(f"{records} records of {count} cases")
    left = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    wrong += [f"left running: {p.pid}" for p in left]
    after = psutil.Process().num_fds(), shared_memory()
    for name, now, then in zip(("descriptors", "/dev/shm entries"), after, before, strict=True):
        wrong += [f"{name} left: {now - then}"] if now > then else []
    return samples, wrong + growth(samples, count)


def main() -> int:
    """Print the table as it comes; 1 where something grows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--every", type=int, default=50, help="cases between two looks")
    given = parser.parse_args()
    names = [field.name for field in fields(Sample)]
    print(" ".join(f"{name:>10}" for name in names), "   (memory in MiB)", flush=True)

    def hear(sample: Sample) -> None:
        print(" ".join(f"{getattr(sample, name):>10.0f}" for name in names), flush=True)

    _, wrong = run(max(1, given.cases), max(1, given.every), hear)
    print("\n".join(wrong) or "flat")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
