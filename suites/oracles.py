"""Oracles: each one check over a case's observations. It flags or not, and says why in one line.

To add one: a function ``(Evidence) -> Finding`` and a row in `ORACLES`; a fault that it must catch in
`suites.faults`; the null runs of the test suite are all the unmodified cases. An oracle knows nothing of frameworks.

Two kinds: exact oracles (ties, replicas, layout, census, …) answer yes or no and decide by themselves. Numeric
oracles measure in predicted sigmas (`suites.numerics`) and leave the decision to `suites.verdict`.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from suites import layouts
from suites.evidence import Evidence, grid_of
from suites.lifecycle import broken_tie
from suites.limits import BLIND, BLIND_LOW
from suites.model import EMBEDDING, HEAD, initial_weights, parameter_shapes, trainable
from suites.numerics import LIMITS, Deviation
from suites.observe import Assembled, ObservationError, assemble, bitwise_equal
from suites.precision import AUTOCAST, LOW, MATMUL, master_dtype, measured_matmul
from suites.reference import Evaluation
from suites.replay import first_moments

MOMENT = 1e-5  # of the largest: roundings of one step in fp32, and of the clipping's norm, are a hundredth of it
FEW = 3  # numbers that lie on a coarse grid by chance once in a million billion


@dataclass(frozen=True)
class Finding:
    """What one oracle says of one case; all but the last two fields go into the record (`ci.records.Finding`).

    Args:
        oracle: its name.
        flagged: the check failed.
        evidence: one line for people.
        error: worst deviation, in `unit`; None for exact oracles.
        limit: largest deviation that is still rounding, in `unit`.
        unit: what both are measured in.
        step: first step that shows it, from 1; 0 where it holds for the whole run.
        blind: why a clean result would mean nothing; empty when it does mean something.
    """

    oracle: str
    flagged: bool
    evidence: str
    error: float | None = None
    limit: float | None = None
    unit: str | None = None
    step: int = 0
    blind: str = ""


# --- exact oracles -------------------------------------------------------------------------------------------------


def complete(e: Evidence) -> Finding:
    """Every rank, step, loss and tensor is there and fits together."""
    problems = []
    if len(e.ranks) != e.case.world_size:
        problems.append(f"{len(e.ranks)} of {e.case.world_size} ranks reported")
    for place, rank in e.ranks.items():
        if len(rank.steps) != e.case.steps:
            problems.append(f"rank {rank.rank} {place} reported {len(rank.steps)} of {e.case.steps} steps")
        for number, step in enumerate(rank.steps, 1):
            counts = (len(step.loss), len(step.logits))
            if counts != (e.case.accumulate,) * 2:
                problems.append(f"rank {rank.rank} step {number}: {counts[0]} losses and {counts[1]} logits")
            if not (math.isfinite(step.seconds) and step.seconds > 0):
                problems.append(f"rank {rank.rank} step {number} took {step.seconds} seconds")
            if step.gradient_norm is None and layouts.reports_norm(e.case):
                problems.append(f"rank {rank.rank} step {number} reports no gradient norm")
    problems += e.gaps
    more = f" (and {len(problems) - 2} more)" if len(problems) > 2 else ""
    good = f"{e.case.world_size} ranks, {e.case.steps} steps, {len(parameter_shapes(e.case))} parameters, no gap"
    return Finding("complete", bool(problems), "; ".join(problems[:2]) + more if problems else good)


def tie(e: Evidence) -> Finding:
    """Embedding and head share one weight from the tie on, at every event; an untied model's never do."""
    for rank in (e.ranks[place] for place in sorted(e.ranks)):
        seen = {event.event for event in rank.lifecycle}
        if missing := {"sharded", f"step {e.case.steps}"} - seen:
            return Finding("tie", True, f"rank {rank.rank} never reported {', '.join(sorted(missing))}")
        if found := broken_tie(e.case, rank.rank, rank.lifecycle):
            return Finding("tie", True, found)
    for step in range(e.case.steps if e.case.tied else 0):
        embedding, head = (e.weights[step].get(name) for name in (EMBEDDING, HEAD))
        if embedding and head and not bitwise_equal(embedding.value, head.value):
            gap = (embedding.value - head.value).abs().max().item()
            text = f"tie broken: embedding and head differ by up to {gap:.2g} after step {step + 1}"
            return Finding("tie", True, text)
    kind = "one weight" if e.case.tied else "two weights"
    return Finding("tie", False, f"{kind} at all {len(next(iter(e.ranks.values())).lifecycle)} events on every rank")


def layout(e: Evidence) -> Finding:
    """What was asked for is what ran, read off the live run.

    Sharded dimensions and precision of every weight before the first and after each step, no shard empty; the logits'
    sharding; the ZeRO stage, and that gradients and weights are partitioned over data-parallel ranks as it says.
    """
    wanted = layouts.expected_layout(e.case)
    classes = e.ranks[min(e.ranks)].layout
    for step, wholes in enumerate([e.initial, *e.weights]):
        for name, whole in wholes.items():
            text = ""
            if whole.dim != wanted[name]:
                text = f"({classes.get(name, '?')}) is {_cut(whole.dim)} and should be {_cut(wanted[name])}"
            elif whole.dim is not None and min(whole.sizes) == 0:
                text = f"has an empty shard: sizes {list(whole.sizes)}"
            elif whole.value.dtype != e.dtype:
                text = f"is {whole.value.dtype}, the case asks for {e.dtype}"
            elif whole.partitioned not in (None, e.case.zero == 3):
                text = f"is {_parted(whole)}, which is not ZeRO {e.case.zero}"
            if text:
                return Finding("layout", True, f"{name} {text}" + (f" (after step {step})" if step else ""), step=step)
    for step, gradients in enumerate(e.gradients, 1):
        for name, whole in gradients.items():
            if whole.partitioned not in (None, e.case.zero > 0):
                text = f"the gradient of {name} is {_parted(whole)}, which is not ZeRO {e.case.zero}"
                return Finding("layout", True, text, step=step)
    for rank in e.ranks.values():
        if rank.zero_stage != e.case.zero:
            text = f"rank {rank.rank} runs ZeRO {rank.zero_stage}, the case asks for ZeRO {e.case.zero}"
            return Finding("layout", True, text)
    for logits in (whole for step in e.logits for whole in step.values()):
        if logits.dim != layouts.expected_logits_dim(e.case):
            should = _cut(layouts.expected_logits_dim(e.case))
            return Finding("layout", True, f"logits are {_cut(logits.dim)} and should be {should}")
    sizes = {name: "/".join(map(str, e.initial[name].sizes)) for name in (EMBEDDING, HEAD) if name in e.initial}
    shown = ", ".join(f"{classes.get(n, '?')} {n} {_cut(e.initial[n].dim)} {sizes[n]}".strip() for n in sizes)
    shown += f", ZeRO {e.case.zero}"
    note = layouts.layout_note(e.case)
    return Finding("layout", False, f"{shown}; {note}" if note else shown)


def _parted(whole: Assembled) -> str:
    return "partitioned over data-parallel ranks" if whole.partitioned else "whole on every data-parallel rank"


def _cut(dim: int | None) -> str:
    return "whole on every rank" if dim is None else f"sharded over dimension {dim}"


def start(e: Evidence) -> Finding:
    """The run starts from the given initial weights, bit for bit."""
    given = initial_weights(e.case)
    for name, whole in e.initial.items():
        if not bitwise_equal(whole.value, given[name].to(e.dtype)):
            if whole.value.dtype != e.dtype:
                return Finding("start", True, f"{name} is {whole.value.dtype}, the case asks for {e.dtype}")
            gap = (whole.value.double() - given[name]).abs().max().item()
            return Finding("start", True, f"{name} starts up to {gap:.2g} away from the given initial weights")
    return Finding("start", False, "all initial weights as given, bit for bit")


def replicas(e: Evidence) -> Finding:
    """All copies of one element of weights, gradients and logits are bitwise equal; losses and norms agree too."""
    checked = 0
    for step in range(e.case.steps):
        stages = (("logits", e.logits), ("gradients", e.gradients), ("weights", e.weights))  # in order of cause
        for kind, wholes in stages:
            for whole in wholes[step].values():
                checked += 1
                if not whole.replicas_equal:
                    text = f"replicas drift in step {step + 1}, {kind}: {whole.disagreement}"
                    return Finding("replicas", True, text, step=step + 1)
        reported = [(place, rank.steps[step]) for place, rank in e.ranks.items() if step < len(rank.steps)]
        for dp_rank in range(e.case.dp):
            if len(losses := {seen.loss for (_, dp), seen in reported if dp == dp_rank}) > 1:
                text = f"tensor-parallel ranks disagree on the loss of step {step + 1}: {sorted(losses)}"
                return Finding("replicas", True, text, step=step + 1)
        if len(norms := {str(seen.gradient_norm) for _, seen in reported}) > 1:
            text = f"ranks disagree on the gradient norm of step {step + 1}: {', '.join(sorted(norms))}"
            return Finding("replicas", True, text, step=step + 1)
    return Finding("replicas", False, f"{checked} tensors: every copy bitwise equal")


def collectives(e: Evidence) -> Finding:
    """All ranks issue the same collectives in the same order, and at least one where there is more than one rank."""
    logs = {rank.rank: rank.steps[0].collectives or () for rank in e.ranks.values() if rank.steps}
    if not logs:
        return Finding("collectives", True, "no rank reported a step")
    first = min(logs)
    for rank, log in sorted(logs.items()):
        if log != logs[first]:
            at = next(
                (i for i, (a, b) in enumerate(zip(log, logs[first], strict=False)) if a != b),
                min(len(log), len(logs[first])),
            )
            mine, theirs = (names[at] if at < len(names) else "none" for names in (log, logs[first]))
            return Finding(
                "collectives",
                True,
                f"collective {at + 1} of the first step is {mine} on rank {rank}, {theirs} on rank {first}",
            )
    if e.case.world_size > 1 and not logs[first]:
        return Finding("collectives", True, f"{e.case.world_size} ranks trained without one collective")
    counts = ", ".join(f"{count} {name}" for name, count in sorted(Counter(logs[first]).items()))
    return Finding("collectives", False, f"in the first step, equal on all ranks: {counts or 'none'}")


def census(e: Evidence) -> Finding:
    """The optimizer was given every trainable parameter exactly once, a tied weight once, and nothing else."""
    wanted = {n for n in parameter_shapes(e.case) if trainable(e.case, n) and not (e.case.tied and n == HEAD)}
    for rank in e.ranks.values():
        counts = Counter(rank.census)
        doubled = sorted(n for n, count in counts.items() if count > 1)
        missing, strange = sorted(wanted - set(counts)), sorted(set(counts) - wanted)
        for what, names in (("holds twice", doubled), ("lacks", missing), ("should not hold", strange)):
            if names:
                return Finding("census", True, f"the optimizer on rank {rank.rank} {what} {', '.join(names[:3])}")
    return Finding("census", False, f"the optimizer holds each of {len(wanted)} parameters once")


def checkpoint(e: Evidence) -> Finding:
    """Every file of a universal checkpoint holds the whole weight or moment that the run had when it was saved.

    Weights bit for bit, under both names of a tie and frozen ones too; moments as a replay of the first step has them,
    up to their own rounding.
    """
    if e.case.resume != "universal":
        return Finding("checkpoint", False, "no universal checkpoint was made")
    saved = {
        key: piece for rank in e.ranks.values() for key, piece in rank.saved.items() if not key.startswith("held:")
    }
    problems = list(_wrong_files(e, {key: p.data.reshape(p.local_shape) for key, p in saved.items()}))
    many = f"{len(problems)} of {len(saved)} files of the universal checkpoint"
    if problems:
        return Finding("checkpoint", True, f"{many}: {problems[0]}", step=1)
    return Finding("checkpoint", False, f"all {len(saved)} files of the universal checkpoint hold what they should")


def _held(e: Evidence, name: str) -> Tensor | None:
    """The whole (master) weight as it was saved; None where it cannot be assembled."""
    pieces = {place: rank.saved[f"held:{name}"] for place, rank in e.ranks.items() if f"held:{name}" in rank.saved}
    with contextlib.suppress(ObservationError):
        return assemble(name, pieces, parameter_shapes(e.case)[name], e.case.tp, e.case.dp).value
    return None


def _wrong_files(e: Evidence, files: Mapping[str, Tensor]) -> Iterator[str]:
    moments = first_moments(e)
    if not files:
        yield "there are none"
    for name, shape in parameter_shapes(e.case).items():
        told = [key for key in files if key.partition(":")[2] == name]
        if f"fp32:{name}" not in told:
            if not (e.case.tied and name in (EMBEDDING, HEAD)):
                yield f"fp32 of {name} is missing"
            continue
        found = files[f"fp32:{name}"]
        whole = _held(e, name)
        if tuple(found.shape) != tuple(shape):
            yield f"fp32 of {name} has {list(found.shape)}, the weight has {list(shape)}"
        elif whole is None:
            yield f"what fp32 of {name} should hold is not known"
        elif not bitwise_equal(found, whole.float()):
            yield f"fp32 of {name} is not the weight after step 1"
        alias = e.case.tied and name in (EMBEDDING, HEAD)
        for kind, wanted in moments.get(name, {}).items():
            if f"{kind}:{name}" not in told:
                if not alias:
                    yield f"{kind} of {name} is missing"
                continue
            moment = files[f"{kind}:{name}"].double()
            if moment.shape != wanted.shape:
                yield f"{kind} of {name} has {list(moment.shape)}, the weight has {list(shape)}"
            elif not bool(((moment - wanted).abs() <= MOMENT * wanted.abs().amax().clamp_min(1e-30)).all()):
                far = float((moment - wanted).abs().amax() / wanted.abs().amax().clamp_min(1e-30))
                yield f"{kind} of {name} is off by {far:.1g} of the largest"
    both = [name for name in (EMBEDDING, HEAD) if {f"{kind}:{name}" for kind in ("fp32", "exp_avg")} <= set(files)]
    if e.case.tied and trainable(e.case, EMBEDDING) and not both:
        yield "neither name of the tied weight has both the weight and its moments"


# --- numeric oracles -----------------------------------------------------------------------------------------------


def _worst(oracle: str, found: Sequence[tuple[int, Deviation]], least: float, extra: str = "") -> Finding:
    """Finding of a numeric oracle from all its deviations, each with its step (from 0).

    Args:
        least: relative error that must be visible for a clean result to mean anything.
    """
    if not found:
        return Finding(oracle, False, "nothing to compare", blind="nothing to compare")
    flagged = [item for item in found if not item[1].score <= 1]  # not finite: flagged
    earliest = min((step for step, _ in flagged), default=0)  # later steps follow from the first
    first = [item for item in flagged if item[0] == earliest]
    step, worst = max(first or found, key=lambda item: item[1].score)
    limit = LIMITS[worst.scope]
    dullest_step, dullest = max(found, key=lambda item: item[1].sees)
    blind = ""
    if not dullest.sees <= least:
        blind = f"cannot see errors below {dullest.sees:.0e} of {dullest.name} (step {dullest_step + 1})"
        if math.isinf(dullest.sees):
            blind = f"has nothing to compare {dullest.name} with in step {dullest_step + 1}: zero or not finite"
    where = f"{worst.name} step {step + 1}"
    if flagged:
        rows = f", {worst.rows_wrong:.0%} of rows wrong, worst row {worst.row}" if worst.rows_wrong else ""
        there = [deviation.name for at, deviation in found if at == earliest]
        right = [name for name in there if name not in {deviation.name for _, deviation in first}]
        if len(there) > 2:
            rows += f"; {len(first)} of {len(there)} wrong in that step"
            rows += f", all but {', '.join(right)}" if 0 < len(right) <= 2 else ""
        text = (
            f"{where}: relative error {worst.relative:.2g} where rounding gives {worst.predicted:.2g} "
            f"({worst.scope} {_sigmas(worst.sigmas)} sigma, limit {limit:g}){rows}{extra}"
        )
    else:
        unit = "the largest update" if worst.scope == "replay" else "a tensor"
        seen = f"sees errors above {dullest.sees:.0e} of {unit}"
        text = f"worst {worst.sigmas:.2g} of {limit:g} sigma ({worst.scope}, {where}); {seen}"
    unit = f"sigma ({worst.scope})"
    return Finding(oracle, bool(flagged), text, worst.sigmas, limit, unit, step + 1, blind)


def _sigmas(value: float) -> str:
    return "not finite:" if math.isinf(value) else f"{value:.3g}"


def _least(e: Evidence) -> float:
    return BLIND_LOW.get(e.arithmetic, BLIND["tensor"])


def _compared(e: Evidence, oracle: str) -> list[tuple[int, Deviation]]:
    return [(found.step, found.deviation) for found in e.comparisons if found.oracle == oracle]


def loss(e: Evidence) -> Finding:
    """Loss of every micro-batch on every data-parallel rank against the reference."""
    return _worst("loss", _compared(e, "loss"), _least(e))


def logits(e: Evidence) -> Finding:
    """Full logits of every micro-batch against the reference."""
    return _worst("logits", _compared(e, "logits"), _least(e))


def gradient(e: Evidence) -> Finding:
    """Every full gradient against the reference at the run's own weights; a tied one sums both contributions."""
    found, parts = _compared(e, "gradient"), ""
    if e.case.tied:
        for step, wrong in found:
            exact = e.exact[step]
            if wrong.name in (EMBEDDING, HEAD) and not wrong.score <= 1 and exact:
                parts = f"; {wrong.name} holds {contributions(e.gradients[step][wrong.name].value, exact)}"
                break
    return _worst("gradient", found, _least(e), parts)


def switches(e: Evidence) -> Finding:
    """What changes numbers is as the case asks, on every rank, and was the same for the reference."""
    seen = {rank.rank: rank.switches for rank in sorted(e.ranks.values(), key=lambda rank: rank.rank)}
    problems = []
    for rank, found in seen.items():
        how = found.get(MATMUL, "unknown")
        if how != e.case.matmul and e.case.dtype == "float32":
            problems.append(f"rank {rank} multiplies in {how}, the case asks for {e.case.matmul}")
    first = min(seen)
    for rank, found in seen.items():
        for name in sorted({*found, *seen[first]}):
            mine, theirs = found.get(name, "not set"), seen[first].get(name, "not set")
            if mine != theirs and name != MATMUL:
                problems.append(f"{name} is {mine} on rank {rank}, {theirs} on rank {first}")
    here = measured_matmul(torch.device("cpu"))
    if here != "ieee":
        problems.append(f"the reference's process multiplies in {here}: its fp32 is no IEEE fp32")
    if problems:
        return Finding("switches", True, "; ".join(problems[:3]))
    shown = seen[first].get(MATMUL, "unknown")
    return Finding("switches", False, f"every rank multiplies fp32 in {shown}, as asked; all switches equal")


def precision(e: Evidence) -> Finding:
    """No precision is lost on the way: fp32 master weights and gradient sums under a low precision, and no tensor whose
    values all fit a lower precision than its own where the unsharded run's do not.
    """
    wanted = master_dtype(e.case)
    if cast := [rank.rank for rank in e.ranks.values() if rank.switches.get(AUTOCAST, "False") != "False"]:
        return Finding("precision", True, f"autocast is on, which the case does not ask for, on rank {cast[0]}")
    for what, grid in coarse_scalars(e):
        return Finding("precision", True, f"the {what} of every step is a {grid} value", step=1)
    for step in range(e.case.steps):
        for name, whole in e.gradients[step].items():
            if whole.value.dtype != wanted:
                text = f"the gradient of {name} is summed in {whole.value.dtype} and should be in {wanted}"
                return Finding("precision", True, text, step=step + 1)
            if e.case.dtype not in LOW:
                continue
            master = e.masters[step].get(name)
            if master is None or master.value.dtype != wanted:
                held = "none" if master is None else f"one in {master.value.dtype}"
                text = f"{name} has no master weight in {wanted} ({held}) in step {step + 1}"
                return Finding("precision", True, text, step=step + 1)
        for what, grid in e.on_grid(step):
            text = f"{what} in step {step + 1} holds nothing but {grid} values, in {whole_dtype(e, what)}"
            return Finding("precision", True, text, step=step + 1)
    kept = "fp32 master weights and gradient sums" if e.case.dtype in LOW else f"{e.case.dtype} throughout"
    return Finding("precision", False, kept)


def coarse_scalars(e: Evidence) -> Iterator[tuple[str, str]]:
    """Numbers that every rank reports and that are values of a lower precision in all steps, and of which one."""
    seen = [reported for step in range(e.case.steps) for _, reported in e.reported(step)]
    rows = {
        "gradient norm": [s.gradient_norm for s in seen if s.gradient_norm is not None],
        "loss": [value for s in seen for value in s.loss],
    }
    for what, values in rows.items():
        if len(set(values)) >= FEW and (grid := grid_of(torch.tensor(values, dtype=master_dtype(e.case)), FEW)):
            yield what, grid


def whole_dtype(e: Evidence, what: str) -> str:
    """Name of the precision that a tensor should have the values of."""
    return e.case.dtype if what.startswith("logits") else str(master_dtype(e.case)).removeprefix("torch.")


def contributions(run: Tensor, exact: Evaluation) -> str:
    """Share of each contribution in a tied gradient: least-squares fit of run = a * lookup + b * projection."""
    if exact.lookup is None or exact.projection is None:
        return "no gradient"
    parts = torch.stack([exact.lookup.double().flatten(), exact.projection.double().flatten()], 1)
    if not bool(torch.isfinite(run).all() and torch.isfinite(parts).all()):
        return "no finite gradient"
    fit = torch.linalg.lstsq(parts, run.double().flatten().unsqueeze(1)).solution.flatten().tolist()
    return f"{fit[0]:.3f} of the lookup's and {fit[1]:.3f} of the projection's contribution"


def gradient_norm(e: Evidence) -> Finding:
    """The global gradient norm that the path reports, against that of the reference gradient."""
    found = _compared(e, "gradient_norm")
    if not found:
        return Finding("gradient_norm", False, "the path reports none")
    return _worst("gradient_norm", found, _least(e))


def update(e: Evidence) -> Finding:
    """Weights after each step against an fp64 replay of the optimizer on the run's own gradients and weights."""
    found = e.replayed
    if found.broken:
        step, text = found.broken
        return Finding("update", True, text, step=step)
    return _worst("update", found.deviations, BLIND["replay"])


@dataclass(frozen=True)
class Oracle:
    """One row of the table: the check, what kind it is, and what it is for.

    Args:
        kind: exact (decides by itself), numeric (measures), precision (exact, but of precision only) or environment (of
            what the process was told, not of what the program does).
    """

    check: Callable[[Evidence], Finding]
    kind: str
    bug_classes: str

    @property
    def name(self) -> str:
        """Name in findings and reports."""
        return self.check.__name__

    @property
    def numeric(self) -> bool:
        """It measures in sigmas."""
        return self.kind == "numeric"


# In order of how much they explain: a broken tie first, then what follows from it.
ORACLES: tuple[Oracle, ...] = (
    Oracle(complete, "exact", "a rank, step or shard that is missing or doubled"),
    Oracle(tie, "exact", "1, 2, 3, 26: alias lost when built, replaced, materialised or stepped"),
    Oracle(layout, "exact", "30: another sharding ran than was asked for"),
    Oracle(start, "exact", "24: initial weights lost or sharded wrongly"),
    Oracle(census, "exact", "20: the optimizer holds a weight twice or not at all"),
    Oracle(replicas, "exact", "22: replicas drift"),
    Oracle(collectives, "exact", "27: ranks issue different collectives"),
    Oracle(checkpoint, "exact", "25: a file of a checkpoint lacks a weight or moment, or holds another one"),
    Oracle(switches, "environment", "TF32, autocast and the like: not as asked, or not the same on all ranks"),
    Oracle(precision, "precision", "28: values or master weights of a lower precision than asked"),
    Oracle(logits, "numeric", "5, 13, 15: forward of embedding, body or head"),
    Oracle(loss, "numeric", "13 to 17: sharded loss"),
    Oracle(
        gradient, "numeric", "4 to 12, 17, 21: a contribution missing, doubled, scaled, unreduced, on the wrong row"
    ),
    Oracle(gradient_norm, "numeric", "18, 19: norm counts a weight twice, misses a shard, or is local"),
    Oracle(
        update,
        "numeric",
        "9, 11, 19, 20, 23: rows that never move or move to the wrong place, wrong clipping, lost moments",
    ),
)
