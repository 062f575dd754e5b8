"""Oracles: each one check over a case's observations. It flags or not, and says why in one line.

To add one: a function ``(Evidence) -> Finding`` and a row in `ORACLES`; a fault that it must catch in
`suites.faults`; the null runs of the test suite are all the unmodified cases. An oracle knows nothing of frameworks.

Two kinds: exact oracles (ties, replicas, layout, census, …) answer yes or no and decide by themselves. Numeric
oracles measure in predicted sigmas (`suites.numerics`) and leave the decision to `suites.verdict`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from suites import layouts, optimizers
from suites.cases import Case
from suites.model import EMBEDDING, HEAD, initial_weights, parameter_shapes, trainable
from suites.numerics import LIMITS, Deviation, deviation, unit_roundoff
from suites.observe import (
    Assembled,
    Lifecycle,
    ObservationError,
    Piece,
    RankObservation,
    assemble,
    bitwise_equal,
    by_rank,
)
from suites.reference import Evaluation, ReferenceCache, digest_of

# Relative error that must be visible for a clean result to mean anything: of a tensor; of the largest update (replay).
BLIND = {False: 0.1, True: 0.5}
NOISE_SAMPLES = 3  # one alone is at times too lucky: its noise in one small tensor a quarter of what is usual


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


class Evidence:
    """All that the oracles look at: observations by rank, full tensors, and the reference at the run's own weights.

    What cannot be assembled is missing from the maps and stands in `gaps`; the reference is evaluated on demand.
    """

    def __init__(self, case: Case, ranks: Sequence[RankObservation], cache: ReferenceCache):
        self.case = case
        self.ranks = by_rank(ranks)
        self.cache = cache
        self.gaps: list[str] = []
        self._digests: dict[int, bytes] = {}
        self._gradient_noise: dict[tuple[int, str], Tensor] = {}
        self.dtype = getattr(torch, case.dtype)
        self.u = unit_roundoff(self.dtype)
        shapes = parameter_shapes(case)
        self.initial = self._all("initial weights", {n: self._pieces(n, "initial", None) for n in shapes})
        self.weights: list[dict[str, Assembled]] = []  # after each step
        self.gradients: list[dict[str, Assembled]] = []
        self.logits: list[dict[tuple[int, int], Assembled]] = []
        for step in range(case.steps):
            names = [n for n in shapes if trainable(case, n)]
            self.weights.append(
                self._all(f"step {step + 1} weight", {n: self._pieces(n, "weights", step) for n in shapes})
            )
            self.gradients.append(
                self._all(f"step {step + 1} gradient", {n: self._pieces(n, "gradients", step) for n in names})
            )
            self.logits.append(self._logits(step))

    def _pieces(self, name: str, kind: str, step: int | None) -> dict[tuple[int, int], Piece]:
        found = {}
        for place, rank in self.ranks.items():
            if step is not None and step >= len(rank.steps):
                continue
            holder: Mapping[str, Piece] = getattr(rank if step is None else rank.steps[step], kind)
            if name in holder:
                found[place] = holder[name]
        return found

    def _all(self, what: str, pieces: Mapping[str, Mapping[tuple[int, int], Piece]]) -> dict[str, Assembled]:
        shapes = parameter_shapes(self.case)
        whole = {}
        for name, placed in pieces.items():
            try:
                whole[name] = assemble(name, placed, shapes[name], self.case.tp, self.case.dp)
            except ObservationError as error:
                self.gaps.append(f"{what} {error}")
        return whole

    def _logits(self, step: int) -> dict[tuple[int, int], Assembled]:
        case, found = self.case, {}
        for dp_rank in range(case.dp):
            for micro in range(case.accumulate):
                placed = {
                    (tp, 0): rank.steps[step].logits[micro]
                    for (tp, dp), rank in self.ranks.items()
                    if dp == dp_rank and step < len(rank.steps) and micro < len(rank.steps[step].logits)
                }
                try:
                    shape = (case.batch, case.sequence, case.vocab)
                    # Each data-parallel rank has logits of its own: a mesh of one such rank.
                    found[dp_rank, micro] = assemble("logits", placed, shape, case.tp, 1)
                except ObservationError as error:
                    self.gaps.append(f"step {step + 1} micro-batch {micro} of data-parallel rank {dp_rank}: {error}")
        return found

    def before(self, step: int) -> dict[str, Assembled]:
        """Weights that step `step` (from 0) started from."""
        return self.initial if step == 0 else self.weights[step - 1]

    @cached_property
    def exact(self) -> list[Evaluation | None]:
        """fp64 reference of each step at the run's own weights, None where these could not be assembled."""
        return [self._evaluate(step, torch.float64) for step in range(self.case.steps)]

    @cached_property
    def rounded(self) -> list[Evaluation | None]:
        """Unsharded fp32 run of each step at the run's own weights."""
        return [self._evaluate(step, torch.float32) for step in range(self.case.steps)]

    @cached_property
    def samples(self) -> list[list[Evaluation]]:
        """What rounding looks like in each step: the unsharded fp32 run, and some with weights moved by a roundoff."""
        found = []
        for step, plain in enumerate(self.rounded):
            moved = [self._evaluate(step, torch.float32, seed) for seed in range(1, NOISE_SAMPLES)]
            found.append([evaluation for evaluation in (plain, *moved) if evaluation])
        return found

    def _evaluate(self, step: int, dtype: torch.dtype, perturbed: int = 0) -> Evaluation | None:
        weights = {name: whole.value for name, whole in self.before(step).items()}
        if set(weights) != set(parameter_shapes(self.case)):
            return None
        if step not in self._digests:
            self._digests[step] = digest_of(weights)
        digest = self._digests[step]
        return self.cache.evaluate(self.case, weights, step, dtype, perturbed=perturbed, digest=digest)

    def noise(self, step: int, exact: Tensor, pick: Callable[[Evaluation], Tensor]) -> Tensor:
        """Errors of unsharded runs at the case's precision, one sample along dimension 0.

        Measured in fp32 and scaled by the unit roundoffs.
        """
        scale = self.u / unit_roundoff(torch.float32)
        return (torch.stack([pick(sample) for sample in self.samples[step]]).double() - exact.double()) * scale

    def gradient_noise(self, step: int, name: str) -> Tensor:
        """`noise` of one parameter's gradient."""
        exact = self.exact[step]
        if exact is None:
            raise ObservationError(f"step {step + 1} has no reference")
        if (step, name) not in self._gradient_noise:
            self._gradient_noise[step, name] = self.noise(step, exact.gradients[name], _gradient_of(name))
        return self._gradient_noise[step, name]


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
            return found
    for step in range(e.case.steps if e.case.tied else 0):
        embedding, head = (e.weights[step].get(name) for name in (EMBEDDING, HEAD))
        if embedding and head and not bitwise_equal(embedding.value, head.value):
            gap = (embedding.value - head.value).abs().max().item()
            text = f"tie broken: embedding and head differ by up to {gap:.2g} after step {step + 1}"
            return Finding("tie", True, text)
    kind = "one weight" if e.case.tied else "two weights"
    return Finding("tie", False, f"{kind} at all {len(next(iter(e.ranks.values())).lifecycle)} events on every rank")


def broken_tie(case: Case, rank: int, lifecycle: Sequence[Lifecycle]) -> Finding | None:
    """What is wrong with the tie in one rank's events, which end early where the rank crashed; None if nothing is."""
    seen = [event.event for event in lifecycle]
    if not case.tied:
        shared = [event.event for event in lifecycle if event.same_object or event.same_storage]
        text = f"untied model shares one weight after {shared[0]!r} on rank {rank}" if shared else ""
        return Finding("tie", True, text) if shared else None
    if "tied" not in seen:
        never = f"the tie was never made on rank {rank}"
        return Finding("tie", True, never) if f"step {case.steps}" in seen else None
    last = len(seen) - 1 - seen[::-1].index("tied")
    for event in lifecycle[last:]:
        if not (event.same_object or event.same_storage):
            text = f"tie broken: after {event.event!r} embedding and head are separate tensors on rank {rank}"
            return Finding("tie", True, text)
    return None


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


# --- numeric oracles -----------------------------------------------------------------------------------------------


def _worst(oracle: str, found: Sequence[tuple[int, Deviation]], extra: str = "") -> Finding:
    """Finding of a numeric oracle from all its deviations, each with its step (from 0)."""
    if not found:
        return Finding(oracle, False, "nothing to compare", blind="nothing to compare")
    flagged = [item for item in found if not item[1].score <= 1]  # not finite: flagged
    earliest = min((step for step, _ in flagged), default=0)  # later steps follow from the first
    first = [item for item in flagged if item[0] == earliest]
    step, worst = max(first or found, key=lambda item: item[1].score)
    limit = LIMITS[worst.scope]
    dullest_step, dullest = max(found, key=lambda item: item[1].sees)
    blind = ""
    if not dullest.sees <= BLIND[worst.scope == "replay"]:
        blind = f"cannot see errors below {dullest.sees:.0e} of {dullest.name} (step {dullest_step + 1})"
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


def loss(e: Evidence) -> Finding:
    """Loss of every micro-batch on every data-parallel rank against the reference."""
    found = []
    for step, exact in enumerate(e.exact):
        if exact is None:
            continue
        keys = sorted(exact.loss)

        def pick(evaluation: Evaluation, keys: list[tuple[int, int]] = keys) -> Tensor:
            return torch.tensor([evaluation.loss[k] for k in keys], dtype=torch.float64)

        reference = pick(exact)
        noise = e.noise(step, reference, pick)
        sigma = max(float(noise.square().mean().sqrt()), e.u * float(reference.abs().mean()))
        for (_, dp_rank), rank in sorted(e.ranks.items()):
            if step >= len(rank.steps):
                continue
            for i, (dp, micro) in enumerate(keys):
                if dp == dp_rank and micro < len(rank.steps[step].loss):
                    run, name = rank.steps[step].loss[micro], f"micro-batch {micro}"
                    found.append((step, _scalar(name, run, float(reference[i]), sigma)))
    return _worst("loss", found)


def _scalar(name: str, run: float, reference: float, sigma: float) -> Deviation:
    sigmas = abs(run - reference) / sigma if math.isfinite(run) else math.inf
    scale = abs(reference) or 1.0
    limit = LIMITS["scalar"]
    return Deviation(
        name=name,
        score=sigmas / limit,
        scope="scalar",
        sigmas=sigmas,
        relative=sigmas * sigma / scale,
        predicted=sigma / scale,
        row=0,
        rows_wrong=0.0,
        sees=limit * sigma / scale,
    )


def _logits_of(key: tuple[int, int]) -> Callable[[Evaluation], Tensor]:
    return lambda evaluation: evaluation.logits[key]


def _gradient_of(name: str) -> Callable[[Evaluation], Tensor]:
    return lambda evaluation: evaluation.gradients[name]


def logits(e: Evidence) -> Finding:
    """Full logits of every micro-batch against the reference."""
    found = []
    for step, exact in enumerate(e.exact):
        if exact is None:
            continue
        for key, whole in e.logits[step].items():
            reference = exact.logits[key]
            noise = e.noise(step, reference, _logits_of(key))
            found.append((step, deviation(f"micro-batch {key[1]}", whole.value, reference, noise, e.u)))
    return _worst("logits", found)


def gradient(e: Evidence) -> Finding:
    """Every full gradient against the reference at the run's own weights; a tied one sums both contributions."""
    found, parts = [], ""
    for step, exact in enumerate(e.exact):
        if exact is None:
            continue
        for name, whole in e.gradients[step].items():
            reference = exact.gradients[name]
            found.append((step, deviation(name, whole.value, reference, e.gradient_noise(step, name), e.u)))
            if e.case.tied and name in (EMBEDDING, HEAD) and found[-1][1].score > 1 and not parts:
                parts = f"; {name} holds {contributions(whole.value, exact)}"
    return _worst("gradient", found, parts)


def contributions(run: Tensor, exact: Evaluation) -> str:
    """Share of each contribution in a tied gradient: least-squares fit of run = a * lookup + b * projection."""
    if exact.lookup is None or exact.projection is None or not bool(torch.isfinite(run).all()):
        return "no finite gradient"
    parts = torch.stack([exact.lookup.double().flatten(), exact.projection.double().flatten()], 1)
    fit = torch.linalg.lstsq(parts, run.double().flatten().unsqueeze(1)).solution.flatten().tolist()
    return f"{fit[0]:.3f} of the lookup's and {fit[1]:.3f} of the projection's contribution"


def gradient_norm(e: Evidence) -> Finding:
    """The global gradient norm that the path reports, against that of the reference gradient.

    Its predicted sigma is the norm of the gradients' own noise: rounding moves a norm no further than that.
    """
    found = []
    for step, exact in enumerate(e.exact):
        if exact is None:
            continue
        reference = exact.gradient_norm
        once = {id(g): name for name, g in exact.gradients.items()}.values()
        spread = sum(float(e.gradient_noise(step, name).square().sum()) for name in once)
        sigma = math.sqrt(spread / max(1, len(e.samples[step])))
        sigma = max(sigma, 4 * e.u * reference, torch.finfo(torch.float64).tiny)
        for rank in e.ranks.values():
            norm = rank.steps[step].gradient_norm if step < len(rank.steps) else None
            if norm is not None:
                found.append((step, _scalar("global norm", norm, reference, sigma)))
    return _worst("gradient_norm", found) if found else Finding("gradient_norm", False, "the path reports none")


def update(e: Evidence) -> Finding:
    """Weights after each step against an fp64 replay of the optimizer on the run's own gradients and weights.

    Frozen parameters must not move by a bit. Deviations are in units of the rounding of one update.
    """
    replays = {n: optimizers.replay(e.case) for n in parameter_shapes(e.case) if trainable(e.case, n)}
    found = []
    for step in range(e.case.steps):
        own = e.gradients[step]
        once = [n for n in own if not (e.case.tied and n == HEAD and EMBEDDING in own)]
        norm = math.sqrt(sum(float(own[n].value.double().square().sum()) for n in once))
        # The norm is judged by an oracle of its own; here, that the run clips by the norm that it reports.
        norms = (rank.steps[step].gradient_norm for rank in e.ranks.values() if step < len(rank.steps))
        coefficient = optimizers.clip_coefficient(min((n for n in norms if n is not None), default=norm), e.case.clip)
        for name, after in e.weights[step].items():
            before = e.before(step).get(name)
            if before is None:
                continue
            if name not in replays:
                if not bitwise_equal(before.value, after.value):
                    return Finding("update", True, f"{name} is frozen and moved in step {step + 1}")
                continue
            if name in own:
                expected = replays[name].step(before.value.double(), own[name].value.double() * coefficient)
                roundings = replays[name].roundings(before.value.double(), expected)
                found.append((step, _replayed(name, before.value, after.value, expected, e.u * roundings)))
    return _worst("update", found)


def _replayed(name: str, before: Tensor, after: Tensor, expected: Tensor, sigma: Tensor) -> Deviation:
    """Deviation of the weight `after` a step from the replay's, in units of the update's own rounding `sigma`."""
    moved = (expected - before.double()).abs()
    sigma = sigma + torch.finfo(torch.float64).tiny
    error = after.double() - expected
    finite = bool(torch.isfinite(after).all())
    rows = (error.abs() / sigma).reshape(error.shape[0], -1).amax(1)
    worst = float(rows.max()) if finite else math.inf
    scale = float(moved.square().mean().sqrt()) or 1.0
    clearest = float((moved / sigma).max())
    return Deviation(
        name=f"update of {name}",
        score=worst / LIMITS["replay"],
        scope="replay",
        sigmas=worst,
        relative=float(error.square().mean().sqrt()) / scale if finite else math.inf,
        predicted=float(sigma.square().mean().sqrt()) / scale,
        row=int(rows.nan_to_num(math.inf).argmax()),
        rows_wrong=float((rows > LIMITS["replay"]).double().mean()) if finite else 1.0,
        sees=LIMITS["replay"] / clearest if clearest else math.inf,
    )


@dataclass(frozen=True)
class Oracle:
    """One row of the table: the check, whether it measures (numeric) or decides by itself, and what it is for."""

    check: Callable[[Evidence], Finding]
    numeric: bool
    bug_classes: str

    @property
    def name(self) -> str:
        """Name in findings and reports."""
        return self.check.__name__


# In order of how much they explain: a broken tie first, then what follows from it.
ORACLES: tuple[Oracle, ...] = (
    Oracle(complete, False, "a rank, step or shard that is missing or doubled"),
    Oracle(tie, False, "1, 2, 3, 26: alias lost when built, replaced, materialised or stepped"),
    Oracle(layout, False, "30: another sharding ran than was asked for"),
    Oracle(start, False, "24: initial weights lost or sharded wrongly"),
    Oracle(census, False, "20: the optimizer holds a weight twice or not at all"),
    Oracle(replicas, False, "22: replicas drift"),
    Oracle(collectives, False, "27: ranks issue different collectives"),
    Oracle(logits, True, "5, 13, 15: forward of embedding, body or head"),
    Oracle(loss, True, "13 to 17: sharded loss"),
    Oracle(gradient, True, "4 to 12, 17, 21: a contribution missing, doubled, scaled, unreduced, on the wrong row"),
    Oracle(gradient_norm, True, "18, 19: norm counts a weight twice, misses a shard, or is local"),
    Oracle(
        update, True, "9, 11, 19, 20, 23: rows that never move or move to the wrong place, wrong clipping, lost moments"
    ),
)
