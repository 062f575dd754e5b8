"""Contributions: what a gradient is a sum of, and which of its terms a wrong one lacks, doubles or holds elsewhere.

A step's gradient is the sum over data-parallel ranks, micro-batches and uses of a weight (a tied one is looked up and
projected with). Each term is computed by itself, unsharded, in fp64, at the run's own weights; a least-squares fit then
says how much of each term a run's gradient holds. Right is 1 everywhere. Where these terms do not explain a gradient, a
few other families are tried (`FAMILIES`): the parts that came through each shard of the head, the other shards'
slices, the step before, another tensor of the same shape.

Everything here works on one tensor-parallel slice, and on one rank's copy where copies differ.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from suites.cases import Case
from suites.data import IGNORED, micro_batch
from suites.evidence import Evidence
from suites.layouts import HEAD_DIM_OF
from suites.model import EMBEDDING, HEAD, HEAD_BIAS, Decoder, load_weights, trainable
from suites.numerics import LIMITS, Deviation
from suites.observe import ObservationError, Piece, assemble

LOOKUP, PROJECTION, REST = "lookup", "projection", "whole"
LARGEST = 2**24  # elements of a fit (rows times terms); more are thinned out evenly
MOST = 2**28  # elements of all terms of a model together; larger ones have no portraits
NEARLY = 30.0  # a fit explains a gradient if it leaves this many times the predicted rounding
LOOSEST = 0.2  # … but never more than this share of it
SAME = 0.01  # coefficients that differ by less, in proportion to the larger, are one


@dataclass(frozen=True, order=True)
class Term:
    """One summand of a gradient: how the weight was used, on which data-parallel rank's data, in which micro-batch."""

    part: str
    dp_rank: int
    micro: int


@dataclass(frozen=True)
class Fit:
    """``run = sum of coefficient * term`` by least squares.

    Args:
        family: what the terms are (`FAMILIES`).
        coefficients: of each term; right is 1 everywhere in the family "terms".
        residual: what the fit leaves, over the size of what should be there.
        explained: the residual is as small as rounding.
        degenerate: the terms are not linearly independent: the coefficients are one choice of many.
    """

    family: str
    coefficients: Mapping[Term, float]
    residual: float
    explained: bool
    degenerate: bool

    def along(self, axis: str) -> dict[object, list[float]]:
        """Coefficients by part, dp_rank or micro."""
        found: dict[object, list[float]] = {}
        for term, value in self.coefficients.items():
            found.setdefault(getattr(term, axis), []).append(value)
        return found

    @cached_property
    def varies(self) -> frozenset[str]:
        """The axes of the terms along which the coefficients differ."""
        return frozenset(axis for axis in ("part", "dp_rank", "micro") if self._differs(axis))

    def _differs(self, axis: str) -> bool:
        others = [name for name in ("part", "dp_rank", "micro") if name != axis]
        groups: dict[tuple[object, ...], list[float]] = {}
        for term, value in self.coefficients.items():
            groups.setdefault(tuple(getattr(term, name) for name in others), []).append(value)
        return any(not alike(values, grain=self.grain) for values in groups.values())

    @property
    def grain(self) -> float:
        """Coefficients are told apart down to this: rounding blurs them."""
        return max(SAME, 3 * self.residual)

    @property
    def factor(self) -> float | None:
        """The one coefficient that all terms have, None where they differ or do not explain the gradient."""
        values = list(self.coefficients.values())
        return sum(values) / len(values) if self.explained and values and alike(values, grain=self.grain) else None


@dataclass(frozen=True)
class Places:
    """Rows (or columns) of a tensor that carry an error, and where they lie.

    Args:
        wrong: their indices, ascending; worst: the one with the largest error; extent: how many there are in all.
        lie: what they have in common, most telling first: "the padding row", "the border of two shards", …
        shard: tensor-parallel rank that holds all of them, None if more than one does (or sharding is elsewhere).
    """

    wrong: tuple[int, ...]
    worst: int
    extent: int
    lie: tuple[str, ...] = ()
    shard: int | None = None

    @property
    def share(self) -> float:
        """Share of rows that carry the error."""
        return len(self.wrong) / self.extent if self.extent else 0.0


@dataclass(frozen=True)
class Slice:
    """One tensor-parallel slice of a gradient, or one rank's copy of it where the copies differ.

    Args:
        tp_rank, dp_rank: who holds it; None: all ranks do.
        relative: root mean square of the error over that of the reference (infinite where that is zero).
        ratio: projection on the reference: 1 is right, 2 is doubled; NaN where the reference is zero.
        fit: the first family of terms that explains it, else that of the terms themselves.
    """

    tp_rank: int | None
    dp_rank: int | None
    wrong: bool
    relative: float
    ratio: float
    zero: bool
    finite: bool
    fit: Fit

    @property
    def holder(self) -> str:
        """Who holds it, for people."""
        names = [f"tensor-parallel rank {self.tp_rank}"] if self.tp_rank is not None else []
        names += [f"data-parallel rank {self.dp_rank}"] if self.dp_rank is not None else []
        return ", ".join(names) or "every rank"


@dataclass(frozen=True)
class Portrait:
    """How one tensor's gradient differs from what it should be, in one step (from 0)."""

    name: str
    step: int
    dim: int | None
    deviation: Deviation
    slices: tuple[Slice, ...]
    rows: Places
    columns: Places

    @property
    def wrong(self) -> tuple[Slice, ...]:
        """The slices that are wrong; all where none stands out."""
        return tuple(s for s in self.slices if s.wrong) or self.slices


def alike(values: Iterable[float], other: float | None = None, grain: float = SAME) -> bool:
    """All within `grain` of each other (of `other`), in proportion to the larger; next to nothing is zero."""
    values = list(values)
    middle = other if other is not None else sum(values) / len(values)
    size = max(abs(middle), *(abs(value) for value in values)) if values else 0.0
    return size <= grain or all(abs(value - middle) <= grain * size for value in values)


Terms = Mapping[Term, Tensor]


# --- terms ---------------------------------------------------------------------------------------------------------


class Twin:
    """The unsharded model in fp64 at a step's own weights, its gradients term by term; made on demand."""

    def __init__(self, case: Case, weights: Mapping[str, Tensor], step: int):
        self.case, self.step = case, step
        self.model = Decoder(case, tie=False).double()
        load_weights(self.model, weights)
        self.parameters = {name: p for name, p in self.model.named_parameters() if trainable(case, name)}
        self._terms: dict[str, dict[Term, Tensor]] = {}
        self._through: dict[str, dict[Term, Tensor]] = {}

    def terms(self, name: str) -> dict[Term, Tensor]:
        """Summands of the gradient of a weight; of a tied one both uses."""
        if not self._terms:
            for dp_rank in range(self.case.dp):
                for micro in range(self.case.accumulate):
                    self._run(dp_rank, micro)
        return self._terms.get(name, {})

    def through_head(self, name: str) -> dict[Term, Tensor]:
        """The gradient of a weight below the head, by the shard of the head that it came through (``shard 0``, …).

        The head's shards each give a part of the gradient of its input: the sum over their rows of the vocabulary, or
        their own columns of the hidden dimension.
        """
        self.terms(name)
        return self._through.get(name, {})

    def _run(self, dp_rank: int, micro: int) -> None:
        case = self.case
        seen: dict[str, Tensor] = {}
        handle = self.model.lm_head.register_forward_hook(lambda _, inputs, out: seen.update(x=inputs[0], y=out))
        batch = micro_batch(case, self.step, micro, dp_rank)
        loss, _ = self.model(batch.tokens, batch.labels)
        handle.remove()
        scaled = loss / (case.dp * case.accumulate)
        own = _gradients(scaled, self.parameters, None)
        tied = case.tied and EMBEDDING in own and HEAD in own
        for name, gradient in own.items():
            part = {EMBEDDING: LOOKUP, HEAD: PROJECTION}.get(name, REST)
            for target in (EMBEDDING, HEAD) if tied and name in (EMBEDDING, HEAD) else (name,):
                self._terms.setdefault(target, {})[Term(part, dp_rank, micro)] = gradient
        below = {n: p for n, p in self.parameters.items() if n not in (HEAD, HEAD_BIAS)}
        dim = HEAD_DIM_OF[case.head]
        if case.tp == 1 or dim is None or not below or not seen["x"].requires_grad:
            return
        (upstream,) = torch.autograd.grad(scaled, seen["y"], retain_graph=True)
        weight = self.model.lm_head.weight.detach()
        for shard, kept in enumerate(torch.arange(weight.shape[dim]).tensor_split(case.tp)):
            if dim == 0:
                part_of_x = upstream[..., kept] @ weight[kept]
            else:
                part_of_x = torch.zeros_like(seen["x"])
                part_of_x[..., kept] = upstream @ weight[:, kept]
            for name, gradient in _gradients(seen["x"], below, part_of_x).items():
                term = Term(f"shard {shard}", 0, 0)
                held = self._through.setdefault(name, {})
                held[term] = held[term] + gradient if term in held else gradient


def _gradients(output: Tensor, parameters: Mapping[str, Tensor], upstream: Tensor | None) -> dict[str, Tensor]:
    found = torch.autograd.grad(output, list(parameters.values()), upstream, retain_graph=True, allow_unused=True)
    return {
        name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(parameters.items(), found, strict=True)
    }


# --- fits ----------------------------------------------------------------------------------------------------------


def fit(run: Tensor, terms: Mapping[Term, Tensor], tolerance: float, family: str = "terms") -> Fit:
    """Least-squares coefficients of `terms` in `run`, all of one shape; a run that is not finite is not explained."""
    y = run.double().flatten()
    if not terms or not bool(torch.isfinite(y).all()):
        return Fit(family, dict.fromkeys(terms, math.nan), math.inf, False, False)
    stride = -(-y.numel() * len(terms) // LARGEST)
    y = y[::stride]
    a = torch.stack([term.flatten()[::stride] for term in terms.values()], 1)
    norms = a.norm(dim=0)
    scaled = a / norms.clamp_min(torch.finfo(torch.float64).tiny)  # terms of very different size: fit their directions
    solved = torch.linalg.lstsq(scaled, y.unsqueeze(1), rcond=1e-10, driver="gelsd")
    directions = solved.solution.flatten()
    left = float((y - scaled @ directions).norm())
    size = max(float(a.sum(1).norm()), float(y.norm()), torch.finfo(torch.float64).tiny)
    coefficients = (directions / norms.clamp_min(torch.finfo(torch.float64).tiny)).tolist()
    independent = int(solved.rank) == int((norms > 0).sum())
    known = {t: c if n > 0 else 1.0 for t, c, n in zip(terms, coefficients, norms.tolist(), strict=True)}
    return Fit(family, known, left / size, left / size <= tolerance, not independent)


def sparse_fit(run: Tensor, terms: Mapping[Term, Tensor], tolerance: float, family: str) -> Fit:
    """As `fit`, but terms whose coefficient is next to nothing are left out."""
    found = fit(run, terms, tolerance, family)
    kept = {t: v for t, v in terms.items() if abs(found.coefficients[t]) > SAME}
    return fit(run, kept, tolerance, family) if found.explained and kept else found


@dataclass(frozen=True)
class _View:
    """A part of a gradient that somebody holds, and how to cut the same part out of a full tensor."""

    tp_rank: int | None
    dp_rank: int | None
    value: Tensor
    cut: Callable[[Tensor], Tensor]


def _views(e: Evidence, step: int, name: str) -> list[_View]:
    """Every slice of a gradient; every rank's copy where copies differ."""
    whole = e.gradients[step][name]
    if whole.replicas_equal:
        if whole.dim is None:
            return [_View(None, None, whole.value.double(), lambda full: full)]
        parts = whole.value.double().split(list(whole.sizes), whole.dim)
        cuts = [_cutter(whole.sizes, whole.dim, rank) for rank in range(len(parts))]
        return [_View(rank, None, part, cuts[rank]) for rank, part in enumerate(parts)]
    views = []
    for tp_rank in range(e.case.tp):
        pieces = {dp: e.ranks[tp_rank, dp].steps[step].gradients[name] for dp in range(e.case.dp)}
        cut = (lambda full: full) if whole.dim is None else _cutter(whole.sizes, whole.dim, tp_rank)
        for dp_rank, value in _copies(name, pieces):
            views.append(_View(tp_rank, dp_rank, value.double(), cut))
    return views


def _cutter(sizes: Sequence[int], dim: int, rank: int) -> Callable[[Tensor], Tensor]:
    return lambda full: full.split(list(sizes), dim)[rank]


def _copies(name: str, pieces: Mapping[int, Piece]) -> list[tuple[int | None, Tensor]]:
    """The local shard: each data-parallel rank's copy, or the one that their parts make up."""
    size = math.prod(pieces[0].local_shape)
    if all(piece.data.numel() == size for piece in pieces.values()):
        several = len(pieces) > 1
        return [(dp if several else None, p.data.reshape(p.local_shape)) for dp, p in pieces.items()]
    placed = {(0, dp): piece for dp, piece in pieces.items()}
    return [(None, assemble(name, placed, pieces[0].local_shape, 1, len(pieces)).value)]


# --- portraits -----------------------------------------------------------------------------------------------------


class Painter:
    """Portraits of the gradients of one step."""

    def __init__(self, e: Evidence, step: int):
        self.e, self.step = e, step
        self.twin = Twin(e.case, {name: whole.value for name, whole in e.before(step).items()}, step)

    def portrait(self, name: str, deviation: Deviation) -> Portrait:
        """How the gradient of `name` differs; `deviation` is its comparison with the reference."""
        exact = self.e.exact[self.step]
        assert exact is not None
        reference, whole = exact.gradients[name], self.e.gradients[self.step][name]
        views = _views(self.e, self.step, name)
        slices = tuple(self._slice(name, view, reference, deviation) for view in views)
        error = whole.value.double() - reference
        for view in views:  # a copy that is wrong where the first one is right
            if whole.dim is None and view.value.shape == error.shape:
                error = torch.where((view.value - reference).abs() > error.abs(), view.value - reference, error)
        rows, columns = places(self.e, self.step, name, error, reference, deviation.predicted)
        return Portrait(name, self.step, whole.dim, deviation, slices, rows, columns)

    def _slice(self, name: str, view: _View, full: Tensor, deviation: Deviation) -> Slice:
        reference, run = view.cut(full), view.value
        finite = bool(torch.isfinite(run).all())
        size = float(reference.norm())
        # Rounding comes in absolute size: a slice of small gradients may have much of it.
        floor = deviation.predicted * float(full.square().mean().sqrt()) * math.sqrt(max(1, reference.numel()))
        error = float((run - reference).norm()) if finite else math.inf
        wrong = not error <= LIMITS["tensor"] * math.hypot(floor, deviation.predicted * size)
        ratio = float((run * reference).sum()) / size**2 if size and finite else math.nan
        return Slice(
            tp_rank=view.tp_rank,
            dp_rank=view.dp_rank,
            wrong=wrong,
            relative=error / size if size else (math.inf if error else 0.0),
            ratio=ratio,
            zero=not bool(run.any()),
            finite=finite,
            fit=self._explain(name, view, min(LOOSEST, max(1e-5, NEARLY * deviation.predicted)), wrong),
        )

    def _explain(self, name: str, view: _View, tolerance: float, wrong: bool) -> Fit:
        own = {term: view.cut(value) for term, value in self.twin.terms(name).items()}
        first = fit(view.value, own, tolerance)
        if first.explained or not wrong or not math.isfinite(first.residual):
            return first
        if (alone := self._projection_alone(own, view.value, tolerance)) is not None:
            return alone
        for family in FAMILIES:
            terms = FAMILIES[family](self, name, view, own)
            if len(terms) > (1 if family != "shards" else 0):
                found = sparse_fit(view.value, terms, tolerance, family)
                if found.explained and not found.degenerate:
                    return found
        return first

    @staticmethod
    def _projection_alone(own: Terms, run: Tensor, tolerance: float) -> Fit | None:
        """Of a tied weight whose lookup is not explained: the projection, from the rows that no token looks up."""
        lookups = [value for term, value in own.items() if term.part == LOOKUP]
        projections = {term: value for term, value in own.items() if term.part == PROJECTION}
        if not lookups or not projections:
            return None
        rows = torch.stack(lookups).abs().amax((0, 2)) == 0
        if int(rows.sum()) < 2 * len(projections):
            return None
        found = fit(run[rows], {term: value[rows] for term, value in projections.items()}, tolerance, "projection")
        return found if found.explained and not found.degenerate else None


def _through_head(painter: Painter, name: str, view: _View, own: Terms) -> Terms:
    """The parts that came through each shard of the head (a lookup's too, beside the projection itself)."""
    terms = {term: view.cut(value) for term, value in painter.twin.through_head(name).items()}
    if terms and name in (EMBEDDING, HEAD):
        terms[Term(PROJECTION, 0, 0)] = sum(v for t, v in own.items() if t.part == PROJECTION)  # type: ignore[assignment]
    return {t: v for t, v in terms.items() if isinstance(v, Tensor)}


def _other_shards(painter: Painter, name: str, view: _View, own: Terms) -> Terms:
    """The slices of the right gradient that all tensor-parallel ranks should hold."""
    whole = painter.e.gradients[painter.step][name]
    if whole.dim is None or len(set(whole.sizes)) != 1:
        return {}
    full = sum(painter.twin.terms(name).values())
    assert isinstance(full, Tensor)
    return {Term(f"shard {i}", 0, 0): p for i, p in enumerate(full.split(list(whole.sizes), whole.dim))}


def _step_before(painter: Painter, name: str, view: _View, own: Terms) -> Terms:
    """The right gradient, and the run's own one of the step before."""
    earlier = painter.e.gradients[painter.step - 1].get(name) if painter.step else None
    if earlier is None:
        return {}
    now = sum(own.values())
    assert isinstance(now, Tensor)
    return {Term("this step", 0, 0): now, Term("the step before", 0, 0): view.cut(earlier.value.double())}


def _other_tensor(painter: Painter, name: str, view: _View, own: Terms) -> Terms:
    """The terms of another tensor of the same shape, whichever fits best, beside the own ones."""
    best: tuple[float, Terms] = (math.inf, {})
    for other, parameter in painter.twin.parameters.items():
        if other in (name, EMBEDDING, HEAD) or parameter.shape != painter.twin.parameters[name].shape:
            continue
        theirs = {dataclasses.replace(t, part=other): view.cut(v) for t, v in painter.twin.terms(other).items()}
        found = fit(view.value, {**own, **theirs}, 0.0)
        if found.residual < best[0]:
            best = (found.residual, {**own, **theirs})
    return best[1]


# Tried in this order; each gives named terms, of the shape of the view.
FAMILIES: Mapping[str, Callable[[Painter, str, _View, Terms], Terms]] = {
    "through head": _through_head,
    "shards": _other_shards,
    "step before": _step_before,
    "other tensor": _other_tensor,
}


# --- places --------------------------------------------------------------------------------------------------------


def places(  # noqa: PLR0917
    e: Evidence, step: int, name: str, error: Tensor, reference: Tensor, predicted: float
) -> tuple[Places, Places]:
    """Rows and columns of a weight that carry an error; a vector has one column."""
    by_rows = error.reshape(error.shape[0], -1)
    scale = reference.reshape(by_rows.shape)
    sigma = predicted * float(scale.square().mean().sqrt())
    rows = _wrong(by_rows, scale, sigma, predicted)
    columns = _wrong(by_rows.T, scale.T, sigma, predicted)
    whole = e.gradients[step].get(name) or e.before(step).get(name)
    dim, sizes = (whole.dim, whole.sizes) if whole else (None, ())
    vocabulary = name in (EMBEDDING, HEAD, HEAD_BIAS)
    return (
        _described(e.case, step, rows, sizes if dim == 0 else (), vocabulary),
        _described(e.case, step, columns, sizes if dim == 1 else (), False),
    )


def _wrong(error: Tensor, reference: Tensor, sigma: float, predicted: float) -> Places:
    wrong = wrong_rows(error, reference, LIMITS["row"] * sigma, 3 * LIMITS["row"] * predicted)
    size = error.square().mean(1).nan_to_num(math.inf)
    worst = int(size.argmax()) if len(size) else 0
    return Places(tuple(wrong or [worst]), worst, len(size))


def wrong_rows(error: Tensor, reference: Tensor, limit: float, share: float = 0.0) -> list[int]:
    """Rows of `error` [rows, columns] whose root mean square is above a limit, plus a share of the reference's."""
    size = error.square().mean(1).sqrt().nan_to_num(math.inf)
    allowed = limit + share * reference.square().mean(1).sqrt()
    return [int(row) for row in (size > allowed).nonzero().flatten()]


def _described(case: Case, step: int, found: Places, sizes: Sequence[int], vocabulary: bool) -> Places:
    """What the wrong rows have in common."""
    wrong, lie = set(found.wrong), []
    starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
    if vocabulary and case.padding_idx is not None:
        if wrong == {case.padding_idx}:
            lie.append("the padding row")
        elif wrong <= {start + case.padding_idx for start in [0, *starts]}:
            lie.append("the rows with the padding row's number on their shard")
    if len(wrong) < found.extent and sizes:
        border = {row for start in starts[1:] for row in (start - 1, start)}
        if wrong <= border:
            lie.append("rows at the border of two shards")
        if max(sizes) > min(sizes):
            short = min(sizes)
            if wrong <= {s + i for s, size in zip(starts, sizes, strict=True) for i in range(short, size)}:
                lie.append("rows that longer shards have beyond the shortest")
    shard = next((r for r, s in enumerate(starts) if len(sizes) > 1 and wrong <= set(range(s, s + sizes[r]))), None)
    if shard is not None:
        lie.append(f"rows of tensor-parallel rank {shard}'s shard")
    if vocabulary and len(wrong) < found.extent:
        tokens, labels = touched(case, step)
        if not wrong & (tokens | labels):
            lie.append("rows that no token and no label touches")
        elif wrong <= tokens:
            lie.append("rows that tokens look up")
        elif wrong <= labels:
            lie.append("rows of labels")
    return dataclasses.replace(found, lie=tuple(lie), shard=shard)


def touched(case: Case, step: int) -> tuple[set[int], set[int]]:
    """Rows of the vocabulary that a step's tokens look up, and that its labels name."""
    tokens: set[int] = set()
    labels: set[int] = set()
    for dp_rank in range(case.dp):
        for micro in range(case.accumulate):
            batch = micro_batch(case, step, micro, dp_rank)
            tokens |= set(batch.tokens.flatten().tolist())
            labels |= set(batch.labels.flatten().tolist()) - {IGNORED}
    return tokens, labels


def portraits(e: Evidence, step: int) -> list[Portrait]:
    """Portraits of every gradient that is flagged in a step, in the order of the model; none where nothing can be
    said (no reference), or where the terms would take too much memory."""
    exact = e.exact[step]
    if exact is None:
        return []
    terms = e.case.dp * e.case.accumulate + e.case.tp  # by data and by shard of the head
    if terms * sum(gradient.numel() for gradient in exact.gradients.values()) > MOST:
        return []
    flagged = {
        c.deviation.name: c.deviation
        for c in e.comparisons
        if c.oracle == "gradient"
        and c.step == step
        and (not c.deviation.score <= 1 or not e.gradients[step][c.deviation.name].replicas_equal)
    }
    painter = Painter(e, step)
    found = []
    for name, deviation in flagged.items():
        try:
            found.append(painter.portrait(name, deviation))
        except (ObservationError, KeyError):  # a rank's part is missing: another oracle says so
            continue
    return found
