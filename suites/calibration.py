"""Calibration: which runs show what rounding does and how small a bug is seen, and what can be read off them.

Five kinds of runs, each of one case and perhaps with a change to the program:

    null      the program as it is, or changed so that only sums are made in another order: must not be flagged
    harmless  TF32 where fp32 was asked for, on all ranks or on one: may be flagged, must not be called a bug
    graded    a factor 1 + s in a wrong place, from s = 1e-7 to 1: shows how small a bug is seen
    fault     every fault of `suites.faults` at every precision: none above the stated visibility may be missed
    twin      the case of a fault without it: equal bit for bit where the fault does nothing at that precision

Runs with an even seed set the limits (`suites.limits`); those with an odd seed are held out and only check them.
`ci.calibrate` runs the jobs; nothing here starts a process.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from suites.cases import Case, CaseError
from suites.evidence import Comparison, Evidence
from suites.faults import FAULTS, HARMLESS
from suites.faults.graded import GRADED, KINDS, name_of
from suites.limits import TABLE
from suites.numerics import LIMITS
from suites.observe import Piece, RankObservation
from suites.precision import UNIT_ROUNDOFF, arithmetic

ARITHMETICS = tuple(UNIT_ROUNDOFF)
LOW = ("tf32", "tf32_truncated", "float16", "bfloat16")  # at which every fault is tried
FAINTEST = 1e-4  # smallest graded fault that is tried at a low precision, none of which sees it
FINE = ("float64", "float32", "tf32")  # at which a functional fault that was seen must end as a bug
GREEN = ("exact", "rounding")
PRECISION_CLASS = 28
MARGIN = 2.0  # least ratio of a limit to the worst null run
CONFIDENCE = 0.95
PATH = "handwritten"  # the one path that has faults and graded faults of all kinds

# Values to draw a null case from; what stands there twice comes twice as often.
SMALL: Mapping[str, Sequence[Any]] = {
    "tie": ("tied", "tied", "untied"),
    "head": ("vocab", "row", "gathered"),
    "zero": (0, 0, 1, 2),
    "mesh": ((1, 1), (2, 1), (2, 1), (2, 1), (1, 2), (1, 2), (2, 2), (4, 1)),  # tp, dp
    "hidden": (4, 8, 16, 17, 32, 35, 48, 64, 67, 128),
    "vocab": (12, 16, 33, 64, 67, 101, 128, 256, 1000),
    "layers": (1, 2, 2, 2, 3, 4),
    "sequence": (4, 8, 8, 16),
    "batch": (2, 4, 4),
    "optimizer": ("sgd", "momentum", "adam", "adamw"),
    "clip": (0.0, 0.0, 0.0, 0.05, 0.5, 5.0),
    "accumulate": (1, 1, 1, 2),
    "register": ("embedding_first", "head_first"),
    "tie_when": ("construction", "construction", "after_load", "meta", "after_shard"),
    "padding": (False, False, True),
    "embedding_scale": (1.0, 1.0, 1.0, 0.1, 5.5),
    "head_bias": ("no", "no", "yes"),
    "activation": ("contiguous", "contiguous", "transposed"),
    "frozen": ("none", "none", "none", "none", "body", "embedding"),
    "steps": (3, 3, 3, 3, 5),
    "loss": ("mean", "mean", "mean", "smoothed", "z_loss", "weighted"),
    "logit_scale": (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.05, 20.0),
    "recompute": ("none", "none", "none", "blocks", "head"),
    "resume": ("none", "none", "none", "none", "reload"),
}
MEDIUM = {
    **SMALL,
    "hidden": (32, 64, 67, 128, 256),
    "vocab": (101, 256, 500, 1000, 2048),
    "layers": (2, 4, 6, 8, 12),
    "sequence": (8, 16, 32),
    "batch": (2, 4, 8),
    "accumulate": (1, 1, 2, 3),
    "steps": (3, 3, 6),
}
# Few of these: they show that the limits hold for sizes that are trained in earnest.
BIG = {
    **SMALL,
    "shape": ((512, 8192), (512, 8192), (512, 8001), (1024, 4096), (256, 16384), (128, 32768)),  # hidden, vocabulary
    "layers": (8, 10, 12),
    "sequence": (16,),
    "batch": (2, 4),
    "accumulate": (1, 1, 2),
    "steps": (3,),
    "resume": ("none",),
}
LARGEST = {"small": 2**14, "medium": 2**17, "big": 2**22}  # hidden times vocabulary: 2 GB to judge
# Odd seeds begin here: a run with one below showed that three samples of noise can be too few, and what was mended
# after a look at a run must be checked on others (2026-12-01, suites/evidence.py MANY_SAMPLES).
FRESH = 1000
CHANGED = 0.3  # share of null runs with another order of sums, another layout or more threads


@dataclass(frozen=True)
class Size:
    """How much a calibration runs.

    Args:
        small, medium, big: null runs at each precision; harmless: runs of each harmless change that may be flagged.
        seeds, sizes: of graded faults at each precision; every: one fault in so many at each lower precision.
        meshes: more ranks than this are not asked for.
    """

    small: int
    medium: int
    big: int
    harmless: int
    seeds: int
    sizes: Sequence[float]
    every: int
    framework: int = 1  # one of so many of a framework's null cases


FULL = Size(330, 24, 4, 40, 4, tuple(sorted({float(name.rpartition("_")[2]) for name in GRADED})), 1)
QUICK = Size(12, 0, 0, 3, 1, (1e-6, 1e-4, 1e-2, 1e-1, 1.0), 18, 24)


@dataclass(frozen=True)
class Job:
    """One run: kind, case id, and the change to the program (a fault or a harmless change; empty for none)."""

    kind: str
    case: str
    change: str = ""


@dataclass(frozen=True)
class Run:
    """What became of a job.

    Args:
        arithmetic: precision of the case; target: the build that ran; tiebench: version of this program.
        verdict: after escalation; flagged: oracles that flagged the case's own run.
        worst: scope -> largest deviation in sigmas (None: not finite); where: scope -> comparison that showed it.
        errors, sees: "oracle tensor" -> relative error of its worst step, and the smallest that would be flagged
            (None: not finite).
        digest: of all that the ranks saw (faults and their twins only).
        evidence: of runs that are not green.
    """

    kind: str
    case: str
    change: str
    arithmetic: str
    target: str
    tiebench: str
    verdict: str
    flagged: tuple[str, ...] = ()
    worst: Mapping[str, float | None] = field(default_factory=dict)
    where: Mapping[str, str] = field(default_factory=dict)
    errors: Mapping[str, float | None] = field(default_factory=dict)
    sees: Mapping[str, float | None] = field(default_factory=dict)
    digest: str = ""
    evidence: str = ""
    seconds: float = 0.0

    @property
    def job(self) -> Job:
        """What was to be run."""
        return Job(self.kind, self.case, self.change)

    @property
    def path(self) -> str:
        """The training path."""
        return self.case.partition(":")[0]

    @property
    def held_out(self) -> bool:
        """Its seed is odd: it checks the limits and does not set them."""
        return Case.parse(self.case).seed % 2 == 1

    @property
    def seen(self) -> bool:
        """Something was wrong with it: an oracle flagged, or the run did not end."""
        return bool(self.flagged) or self.verdict not in (*GREEN, "inconclusive")

    @property
    def refused(self) -> bool:
        """A framework refused the case, clearly and on every rank: nothing ran."""
        return self.verdict == "refused" and self.path != PATH

    @property
    def bug(self) -> bool:
        """It was called a bug, or ended as one does."""
        return self.verdict.startswith("bug") or self.verdict in ("crash", "hang")


# --- what to run ---------------------------------------------------------------------------------------------------


def at(case: Case, precision: str) -> Case:
    """The case at another arithmetic, a key of `suites.precision.UNIT_ROUNDOFF`.

    Raises:
        CaseError: its path cannot run that.
    """
    tf32 = precision.startswith("tf32")
    return case.but(dtype="float32" if tf32 else precision, matmul=precision if tf32 else "ieee")


def plan(
    size: Size, cases: Sequence[Case] = (), *, own: bool = True, precisions: Sequence[str] = ARITHMETICS, ranks: int = 4
) -> list[Job]:
    """All jobs, each once, null runs first.

    Args:
        cases: null cases of frameworks, which are run with an even and with an odd seed.
        own: run the hand-written path too.
        precisions: keys of `suites.precision.UNIT_ROUNDOFF`.
        ranks: no case of more ranks.
    """
    jobs: list[Job] = []
    if own:
        jobs += _nulls(size, precisions, ranks)
    jobs += [
        Job("null", case.but(seed=2 * case.seed + odd).id)
        for case in cases[:: size.framework]
        for odd in (0, 1)
        if arithmetic(case) in precisions
    ]
    if own:
        jobs += [*_harmless(size, precisions), *_graded(size, precisions, ranks), *_faults(size, precisions)]
    return [job for job in dict.fromkeys(jobs) if Case.parse(job.case).world_size <= ranks]


def _nulls(size: Size, precisions: Sequence[str], ranks: int) -> Iterator[Job]:
    for kind, count, values in (
        ("small", size.small, SMALL),
        ("medium", size.medium, MEDIUM),
        ("big", size.big, BIG),
    ):
        for seed in (number + FRESH * (number % 2) for number in range(count)):
            for precision in precisions:
                random_ = random.Random(f"{kind} {precision} {seed}")
                case = drawn(random_, values, precision, ranks=ranks, largest=LARGEST[kind]).but(seed=seed)
                changes = [c.name for c in HARMLESS.values() if c.path == PATH and not c.caught_by]
                yield Job("null", case.id, random_.choice(changes) if random_.random() < CHANGED else "")


def drawn(
    source: random.Random, values: Mapping[str, Sequence[Any]], precision: str, *, ranks: int, largest: int
) -> Case:
    """A case of the hand-written path: one value a factor, drawn again until the combination can be run.

    Args:
        ranks: at most so many; largest: hidden times vocabulary is at most this.
    """
    while True:
        chosen = {name: source.choice(list(of)) for name, of in values.items()}
        chosen["tp"], chosen["dp"] = chosen.pop("mesh")
        chosen["hidden"], chosen["vocab"] = chosen.pop("shape", (chosen["hidden"], chosen["vocab"]))
        if precision == "float16":
            chosen["logit_scale"] = min(1.0, chosen["logit_scale"])  # more overflows under a fixed loss scale
        edges = (0, 3, chosen["vocab"] // 2, chosen["vocab"] - 1)
        chosen["padding_idx"] = source.choice(edges) if chosen.pop("padding") else None
        if chosen["tie"] == "untied":
            chosen["tie_when"] = "construction"
        if chosen["tp"] * chosen["dp"] > ranks or chosen["hidden"] * chosen["vocab"] > largest:
            continue
        with contextlib.suppress(CaseError):
            return at(Case(PATH, **chosen), precision)


def _harmless(size: Size, precisions: Sequence[str]) -> Iterator[Job]:
    for change in HARMLESS.values():
        for seed in range(size.harmless if change.caught_by and "float32" in precisions else 0):
            yield Job("harmless", Case.parse(change.case).but(seed=seed).id, change.name)


def _graded(size: Size, precisions: Sequence[str], ranks: int) -> Iterator[Job]:
    for kind in KINDS:
        for grade in size.sizes:
            fault = GRADED[name_of(kind, grade)]
            for seed in range(size.seeds):
                case = Case.parse(fault.case).but(seed=seed)
                if case.world_size > ranks:
                    case = case.but(tp=1, dp=1)  # the factor is in the wrong place there too
                for precision in dict.fromkeys(("float64", *precisions)):  # fp64 measures the effect
                    if grade >= FAINTEST or precision not in LOW:
                        yield Job("graded", at(case, precision).id, fault.name)


def _faults(size: Size, precisions: Sequence[str]) -> Iterator[Job]:
    mine = [fault for fault in FAULTS.values() if fault.path == PATH and "hang" not in fault.caught_by]
    for number, precision in enumerate(p for p in LOW if p in precisions and p != "tf32_truncated"):
        for fault in mine[number % size.every :: size.every]:
            case = Case.parse(fault.case)
            with contextlib.suppress(CaseError):  # its case needs a range that fp16 has not
                low = at(case, precision).id
                yield from (Job("fault", case_id, fault.name) for case_id in (at(case, "float64").id, low))
                yield Job("twin", low)


def measure(evidence: Evidence) -> tuple[dict[str, float | None], dict[str, str]]:
    """Largest deviation in sigmas in every scope, and which comparison showed it."""
    worst: dict[str, float] = {}
    where: dict[str, str] = {}
    replayed = [Comparison("update", step, d) for step, d in evidence.replayed.deviations]
    for found in (*evidence.comparisons, *replayed):
        seen = found.deviation
        for scope, sigmas in (seen.scopes or {seen.scope: seen.sigmas}).items():
            if scope not in worst or not sigmas <= worst[scope]:
                worst[scope] = sigmas
                where[scope] = f"{found.oracle}: {seen.name}, step {found.step + 1}"
    return {scope: sigmas if math.isfinite(sigmas) else None for scope, sigmas in worst.items()}, where


def digest(ranks: Sequence[RankObservation]) -> str:
    """Digest of what the ranks saw of a run, equal for runs that are bit for bit the same."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, Piece):
            found.update(f"{value.start} {value.local_shape} {value.data.dtype}".encode())
            found.update(value.data.contiguous().view(torch.uint8).numpy().tobytes())
        elif isinstance(value, Mapping):
            for name, item in sorted(value.items()):
                found.update(name.encode())
                add(item)
        elif isinstance(value, tuple):
            for item in value:
                add(item)
        else:
            found.update(repr(value).encode())

    for rank in ranks:
        add((rank.rank, rank.lifecycle, rank.census, rank.zero_stage, rank.initial))
        for step in rank.steps:
            add((step.loss, step.logits, step.gradients, step.gradient_norm, step.weights, step.masters))
            add(step.collectives)
    return found.hexdigest()


# --- what can be read off ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """Title, a line that explains it, and rows by column."""

    name: str
    title: str
    note: str
    rows: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Result:
    """All tables of a calibration, and what is not as it must be (one line each)."""

    tables: tuple[Table, ...]
    problems: tuple[str, ...]
    runs: int


def upper_bound(failures: int, runs: int, confidence: float = CONFIDENCE) -> float:
    """Largest true rate that is not refuted: 3 / runs where nothing failed (rule of three), else Clopper-Pearson's
    one-sided bound."""
    if failures >= runs:
        return 1.0
    if failures == 0:
        return min(1.0, 3 / runs)
    low, high = failures / runs, 1.0
    for _ in range(60):  # the binomial tail falls with the rate
        rate = (low + high) / 2
        if _at_most(failures, runs, rate) > 1 - confidence:
            low = rate
        else:
            high = rate
    return high


def _at_most(failures: int, runs: int, rate: float) -> float:
    """Probability of so many failures or fewer."""
    logs = (
        math.lgamma(runs + 1)
        - math.lgamma(k + 1)
        - math.lgamma(runs - k + 1)
        + k * math.log(rate)
        + (runs - k) * math.log1p(-rate)
        for k in range(failures + 1)
    )
    return math.fsum(math.exp(value) for value in logs) if rate < 1 else 0.0


def read_off(runs: Sequence[Run]) -> Result:
    """Tables and problems from all runs."""
    nulls = [run for run in runs if run.kind == "null"]
    effects = {(_twin(run), run.change): run.errors for run in runs if run.arithmetic == "float64"}
    twins = {run.case: run.digest for run in runs if run.kind == "twin" and run.digest}
    problems: list[str] = []
    tables = [
        _alarms(nulls, problems),
        _margins(nulls, problems),
        _harmless_changes([run for run in runs if run.kind == "harmless"], problems),
        *_detection([run for run in runs if run.kind == "graded"], effects, problems),
        _fault_table([run for run in runs if run.kind == "fault"], effects, twins, problems),
    ]
    return Result(tuple(table for table in tables if table.rows), tuple(problems), len(runs))


def _twin(run: Run) -> str:
    """Id of a run's case at fp64; its own where its path has none."""
    try:
        return at(Case.parse(run.case), "float64").id
    except CaseError:
        return run.case


def _by(runs: Iterable[Run], *keys: str) -> dict[tuple[Any, ...], list[Run]]:
    found: dict[tuple[Any, ...], list[Run]] = defaultdict(list)
    for run in runs:
        found[tuple(getattr(run, key) for key in keys)].append(run)
    return dict(sorted(found.items(), key=lambda item: tuple(map(_place, item[0]))))


def _place(key: Any) -> Any:
    """For sorting: precisions go from fine to coarse."""
    return ARITHMETICS.index(key) if key in ARITHMETICS else key


def _alarms(nulls: Sequence[Run], problems: list[str]) -> Table:
    rows = []
    groups = _by(nulls, "path", "arithmetic")
    for path in dict.fromkeys(run.path for run in nulls):
        groups[path, "all"] = [run for run in nulls if run.path == path]
    for (path, precision), group in groups.items():
        ran = [run for run in group if not run.refused]
        flagged = sum(run.seen for run in ran)
        rows.append(
            {
                "path": path,
                "precision": precision,
                "null runs": len(ran),
                "held out": sum(run.held_out for run in ran),
                "flagged": flagged,
                "called a bug": sum(run.bug for run in ran),
                "blind": sum(run.verdict == "inconclusive" and not run.seen for run in ran),
                "refused": len(group) - len(ran),
                "95 % bound of the rate": upper_bound(flagged, len(ran)),
            }
        )
    problems += [f"null run flagged: {_named(run)}: {run.evidence}" for run in nulls if run.seen and not run.refused]
    note = "Unmodified runs. Bound: rule of three where none is flagged, else Clopper-Pearson. Blind: nothing flagged, "
    note += "but rounding is so large that a clean result means little."
    return Table("false_alarms", "False alarms", note, tuple(rows))


def _margins(nulls: Sequence[Run], problems: list[str]) -> Table:
    rows = []
    for scope, limit in LIMITS.items():
        found: dict[tuple[str, bool], tuple[float, Run]] = {}
        for run in nulls:
            sigmas = run.worst.get(scope, 0.0)
            value = math.inf if sigmas is None else sigmas
            key = (run.arithmetic, run.held_out)
            if value > found.get(key, (-1.0, run))[0]:
                found[key] = (value, run)
        if not found:
            continue
        worst, run = max(found.values(), key=lambda item: item[0])
        row: dict[str, Any] = {
            "scope": scope,
            "limit": limit,
            "worst": worst,
            "margin": limit / worst if worst else None,
        }
        for half, name in ((False, "setting half"), (True, "held-out half")):
            row[name] = max((value for (_, held), (value, _) in found.items() if held is half), default=None)
        for precision in ARITHMETICS:
            row[precision] = max((v for (p, _), (v, _) in found.items() if p == precision), default=None)
        row["worst run"] = f"{_named(run)} ({run.where.get(scope, '')})"
        rows.append(row)
        if worst * MARGIN > limit:
            text = (
                f"limit {scope} {limit:g} is less than {MARGIN:g} times the worst null run ({worst:.3g}, {_named(run)})"
            )
            problems.append(text)
    note = "Largest deviation of all null runs in predicted sigmas, over both halves of the seeds and by precision."
    return Table("limits", "Limits and margins", note, tuple(rows))


def _harmless_changes(runs: Sequence[Run], problems: list[str]) -> Table:
    rows = []
    for (change,), group in _by(runs, "change").items():
        verdicts = Counter(run.verdict for run in group)
        bugs = [run for run in group if run.bug]
        problems += [f"harmless change called a bug: {_named(run)}: {run.evidence}" for run in bugs]
        rows.append(
            {
                "change": change,
                "runs": len(group),
                "called a bug": len(bugs),
                "95 % bound of the rate": upper_bound(len(bugs), len(group)),
                "verdicts": _counted(verdicts),
            }
        )
    return Table("harmless", "TF32 where fp32 was asked for", "Must never be called a bug.", tuple(rows))


Effects = Mapping[tuple[str, str], Mapping[str, float | None]]


def visible(run: Run, effects: Effects) -> bool:
    """Whether the change's effect, as measured at fp64, is above what this run says that it sees, in any tensor."""
    effect = effects.get((_twin(run), run.change), {})
    return any(
        _number(effect.get(key)) > _number(sees) for key, sees in run.sees.items() if effect.get(key, 0.0) != 0.0
    )


def _number(value: float | None) -> float:
    return math.inf if value is None else value


def _detection(runs: Sequence[Run], effects: Effects, problems: list[str]) -> tuple[Table, Table]:
    """Share of graded faults seen, size by size; and the smallest one that is always seen beside what runs state."""
    curves, sights = [], []
    groups: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        groups[run.arithmetic, run.change.split("_")[1]].append(run)
    for (precision, kind), group in sorted(groups.items(), key=lambda item: (_place(item[0][0]), item[0][1])):
        by_size: dict[float, list[Run]] = defaultdict(list)
        for run in group:
            by_size[float(run.change.rpartition("_")[2])].append(run)
        curve: dict[str, Any] = {"precision": precision, "fault": kind}
        for size, same in sorted(by_size.items()):
            curve[f"{size:.0e}"] = f"{sum(r.seen for r in same)}/{sum(r.bug for r in same)}/{len(same)}"
        curves.append(curve)
        missed = [run for run in group if visible(run, effects) and not run.seen]
        problems += [f"graded fault above the stated visibility was missed: {_named(run)}" for run in missed]
        fine = [run for run in group if precision in FINE and visible(run, effects) and run.seen and not run.bug]
        problems += [f"graded fault was seen and not called a bug: {_named(run)}: {run.verdict}" for run in fine]
        unseen = [size for size, same in by_size.items() if not all(run.seen for run in same)]
        always = [size for size in by_size if size > max(unseen, default=0.0)]
        bugs = [size for size in by_size if all(r.bug for s, same in by_size.items() if s >= size for r in same)]
        stated = [size for size, same in by_size.items() if all(visible(run, effects) for run in same)]
        sights.append(
            {
                "precision": precision,
                "fault": kind,
                "runs": len(group),
                "stated visible from": min(stated, default=None),
                "always seen from": min(always, default=None),
                "always a bug from": min(bugs, default=None),
                "missed above visibility": len(missed),
            }
        )
    note = (
        "A factor 1 + s in a wrong place. In each cell: seen at that precision / called a bug after escalation / runs."
    )
    seen_note = (
        "The same by size s: from where on the runs themselves say that they would see it, and from where on they do."
    )
    return (
        Table("visibility", "Smallest fault seen", seen_note, tuple(sights)),
        Table("detection", "Detection by size of the fault", note, tuple(curves)),
    )


def _fault_table(runs: Sequence[Run], effects: Effects, twins: Mapping[str, str], problems: list[str]) -> Table:
    rows = []
    tried = [run for run in runs if run.arithmetic != "float64"]
    for (precision,), every in _by(tried, "arithmetic").items():
        group = [run for run in every if run.seen or not run.digest or run.digest != twins.get(run.case)]
        above = [run for run in group if visible(run, effects)]
        missed = [run for run in above if not run.seen]
        problems += [f"fault above the stated visibility was missed: {_named(run)}" for run in missed]
        below = [run for run in group if run not in above and not run.seen]
        functional = [run for run in group if run.seen and FAULTS[run.change].bug_class != PRECISION_CLASS]
        undecided = [run for run in functional if not run.bug]
        if precision in FINE:
            problems += [f"fault was seen and not called a bug: {_named(run)}: {run.verdict}" for run in undecided]
        rows.append(
            {
                "precision": precision,
                "faults": len(every),
                "do nothing": len(every) - len(group),
                "seen": sum(run.seen for run in group),
                "above visibility": len(above),
                "missed above it": len(missed),
                "functional and seen": len(functional),
                "called a bug": len(functional) - len(undecided),
                "not seen": ", ".join(sorted(run.change for run in below)) or "none",
                "seen and not a bug": ", ".join(sorted(f"{r.change} ({r.verdict})" for r in undecided)) or "none",
            }
        )
    note = "Every fault of the suite in its own case at a lower precision; its effect is measured at fp64. "
    note += "Do nothing: the run is bit for bit that of the unmodified program."
    return Table("faults", "Faults at lower precisions", note, tuple(rows))


def _named(run: Run) -> str:
    return f"{run.case}{f' with {run.change}' if run.change else ''}"


def _counted(verdicts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))


def markdown(result: Result, head: str) -> str:
    """All tables and problems as Markdown, below a line that says what ran."""
    parts = ["# Calibration", head]
    if result.problems:
        parts.append(
            "\n".join([f"**{len(result.problems)} not as they must be**", "", *(f"- {p}" for p in result.problems)])
        )
    else:
        parts.append("Everything is as it must be.")
    for table in result.tables:
        columns = list(dict.fromkeys(column for row in table.rows for column in row))
        lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
        lines += [f"| {' | '.join(shown(row.get(column)) for column in columns)} |" for row in table.rows]
        parts.append("\n".join([f"## {table.title}", "", table.note, "", *lines]))
    return "\n\n".join(parts) + "\n"


def shown(value: Any) -> str:
    """A cell as text: three digits of a number, nothing for None."""
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value).replace("|", "\\|")


def limits_in_use() -> list[Mapping[str, Any]]:
    """The limits and the calibrations that set them, for `calibration.json`."""
    return [{"scope": scope, **vars(limit)} for scope, limit in TABLE.items()]
