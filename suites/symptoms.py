"""Symptoms: what broke exactly, and what is wrong with logits, loss, gradients, norm and update.

Measured in the first step that shows anything; later steps follow from it. What cannot be measured is left out.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from suites.cases import FACTORS, Case, CaseError
from suites.contributions import PROJECTION, Fit, Places, Portrait, Slice, alike, portraits
from suites.data import micro_batch
from suites.evidence import Evidence
from suites.laws import losses
from suites.model import COLUMN, EMBEDDING, HEAD, HEAD_BIAS, ROW, initial_weights, parameter_shapes
from suites.observe import bitwise_equal
from suites.oracles import Finding
from suites.precision import UNIT_ROUNDOFF
from suites.reference import DETERMINED_BY
from suites.trace import Boundary
from suites.updates import Moved, clipped_by, norms, updates

COHERENT = 0.5  # cosine between error and tensor above which the error is a factor, not rounding
SPREAD = 0.2  # share of rows that rounding of a lower precision must at least have reached


@dataclass(frozen=True)
class Forward:
    """What is wrong with the logits of the first wrong step.

    Args:
        factor: the logits are this multiple of what they should be; None if no multiple.
        constant: the error is the same for every token (a bias).
        columns: the wrong columns of the vocabulary; moved: most of them hold what belongs into other columns.
        first_tokens: token ids at which the error begins, in every sequence; everywhere: it begins with every token.
        whose: data that these logits are of, where it is other data than asked for.
    """

    factor: float | None
    constant: bool
    columns: Places
    moved: bool
    first_tokens: frozenset[int]
    everywhere: bool
    whose: str


@dataclass(frozen=True)
class Symptoms:
    """All that the rules look at. `step` is the first that shows something, from 0."""

    case: Case
    step: int
    flagged: frozenset[str]  # by exact oracles: in any step; by numeric ones: in `step`
    evidence: Mapping[str, str]  # oracle -> its line
    tie_lost: str = ""  # event after which embedding and head are no longer one, on some rank
    drift: str = ""  # first that differs between replicas: logits, gradients, weights, loss, norm
    drift_of: tuple[str, ...] = ()  # tensors that differ there
    forward: Forward | None = None
    losses: tuple[str, ...] = ()  # laws that the wrong losses obey
    gradients: tuple[Portrait, ...] = ()  # wrong ones, in the order in which backward makes them
    right: frozenset[str] = frozenset()  # tensors whose gradients are right
    norms: tuple[str, ...] = ()  # laws that the wrong norm obeys
    updates: tuple[Moved, ...] = ()
    another: str = ""  # the factor whose default ran in place of what was asked for
    repeated: str = ""  # an observation that repeats an earlier one
    rounding: str = ""  # the lower precision that all numeric deviations look like
    start: str = ""
    boundary: Boundary | None = None  # of the traced step, where one was traced

    def says(self, *oracles: str) -> bool:
        """One of these flags."""
        return bool(self.flagged & set(oracles))

    @property
    def top(self) -> Portrait | None:
        """The wrong gradient that backward makes first: the others follow from it, or from the same cause."""
        return self.gradients[0] if self.gradients else None

    @property
    def fits(self) -> tuple[Fit, ...]:
        """Of the wrong slices of `top`."""
        return tuple(s.fit for s in self.top.wrong) if self.top else ()

    def kind(self, portrait: Portrait) -> str:
        """bias, head, embedding, tied, norm, column or row: what a tensor is."""
        return kind_of(portrait.name, self.case)

    @property
    def kinds(self) -> frozenset[str]:
        """Of all wrong gradients."""
        return frozenset(self.kind(p) for p in self.gradients)

    @cached_property
    def clean_forward(self) -> bool:
        """Logits and loss are right, something behind them is not."""
        return bool(self.gradients) and not self.says("logits", "loss")

    @cached_property
    def everything(self) -> bool:
        """Every gradient is wrong."""
        return bool(self.gradients) and not self.right

    @cached_property
    def factor(self) -> float | None:
        """All wrong slices of all wrong gradients are one multiple of what they should be: this one."""
        values = [s.fit.factor for p in self.gradients for s in p.wrong]
        known = [value for value in values if value is not None]
        return known[0] if known and len(known) == len(values) and alike(known) else None

    @cached_property
    def top_factor(self) -> float | None:
        """As `factor`, of `top` alone."""
        values = [f.factor for f in self.fits]
        known = [v for v in values if v is not None]
        return known[0] if known and len(known) == len(values) and alike(known) else None

    def family(self, name: str) -> tuple[Fit, ...]:
        """Fits of a family that explains wrong slices of some gradient."""
        return tuple(s.fit for p in self.gradients for s in p.wrong if s.fit.explained and s.fit.family == name)

    @cached_property
    def varies(self) -> frozenset[str]:
        """Axes along which the coefficients of explained slices differ, over all wrong gradients."""
        return frozenset(axis for fit in self.family("terms") for axis in fit.varies)

    def coefficients(self, part: str) -> list[float]:
        """Of one contribution in the explained slices of the tied weight, right slices too."""
        ends = [p for p in self.gradients if p.name in (EMBEDDING, HEAD)]
        fits = [s.fit for p in ends[:1] for s in p.slices if s.fit.explained and s.fit.family == "terms"]
        return [value for f in fits for t, value in f.coefficients.items() if t.part == part]

    @property
    def dead(self) -> tuple[tuple[str, Slice], ...]:
        """Slices of gradients that are zero and should not be."""
        return tuple((p.name, s) for p in self.gradients for s in p.wrong if s.zero)

    @property
    def uneven(self) -> bool:
        """Some rank's copy of a weight moved by another amount than the first rank's."""
        return self.drift == "weights"

    @property
    def tiny(self) -> bool:
        """Gradients are so small that an epsilon counts."""
        return self.case.logit_scale < 0.1

    @property
    def rows(self) -> Places | None:
        """Of the first wrong gradient."""
        return self.top.rows if self.top else None

    def lie(self, text: str) -> bool:
        """The wrong rows of every wrong gradient lie as `text` says."""
        return bool(self.gradients) and all(any(text in known for known in p.rows.lie) for p in self.gradients)


def kind_of(name: str, case: Case) -> str:
    """bias, head, embedding, tied, norm, column or row."""
    if name in (EMBEDDING, HEAD):
        return "tied" if case.tied else ("head" if name == HEAD else "embedding")
    module = name.split(".")[-2]
    return "bias" if name == HEAD_BIAS else "column" if module in COLUMN else "row" if module in ROW else "norm"


def symptoms(e: Evidence, findings: Sequence[Finding], boundary: Boundary | None = None) -> Symptoms:
    """Measure everything that the rules look at."""
    flagged = [f for f in findings if f.flagged]
    numeric = {f.oracle: f.step for f in flagged if f.error is not None}
    steps = [f.step for f in flagged if f.step]
    first = min(steps, default=1) - 1
    now = frozenset(f.oracle for f in flagged if f.oracle not in numeric or numeric[f.oracle] == first + 1)
    told = {f.oracle: f.evidence for f in flagged}
    found = Symptoms(case=e.case, step=first, flagged=now, evidence=told, boundary=boundary)
    measures: Mapping[str, Callable[[], object]] = {
        "tie_lost": lambda: _tie_lost(e),
        "drift": lambda: _drift(e, first)[0],
        "drift_of": lambda: _drift(e, first)[1],
        "forward": lambda: _forward(e, first) if "logits" in now else None,
        "losses": lambda: losses(e, first) if "loss" in now and "logits" not in now else (),
        "gradients": lambda: _backward_order(portraits(e, first), e.case),
        "right": lambda: _right(e, first),
        "updates": lambda: updates(e, first) if "update" in now else (),
        "norms": lambda: norms(e, first) if "gradient_norm" in now else clipped_by(e, first, found.updates),
        "another": lambda: _another(e, first) if now & {"logits", "loss", "gradient"} else "",
        "repeated": lambda: _repeated(e),
        "rounding": lambda: _rounding(e, first),
        "start": lambda: _start(e) if "start" in now else "",
    }
    for name, measure in measures.items():
        try:
            found = dataclasses.replace(found, **{name: measure()})  # type: ignore[arg-type]
        except Exception:  # noqa: BLE001 - odd observations: the other symptoms may still say enough
            continue
    return found


def _right(e: Evidence, step: int) -> frozenset[str]:
    known = [c for c in e.comparisons if c.oracle == "gradient" and c.step == step]
    good = {c.deviation.name for c in known if c.deviation.score <= 1}
    return frozenset(n for n in good if e.gradients[step][n].replicas_equal)


def _backward_order(found: Sequence[Portrait], case: Case) -> tuple[Portrait, ...]:
    """The tied weight stands where its wrong part is made: first if that is the projection, last if the lookup."""
    order = {HEAD_BIAS: -2.0, HEAD: -1.0, "norm.weight": 0.0, EMBEDDING: math.inf}
    inside = (*ROW[1:], "up_proj", "gate_proj", "mlp_norm", ROW[0], "v_proj", "k_proj", "q_proj", "attention_norm")

    def place(portrait: Portrait) -> float:
        if portrait.name in order:
            return order[portrait.name]
        _, layer, module, _ = portrait.name.split(".")
        return (case.layers - int(layer)) * 100 + inside.index(module)

    kept = []
    for portrait in found:
        tied = case.tied and portrait.name in (EMBEDDING, HEAD)
        if not tied or (portrait.name == EMBEDDING) == _projection_is_right(portrait):
            kept.append(portrait)
    return tuple(sorted(kept, key=place))


def _projection_is_right(portrait: Portrait) -> bool:
    """Fitted so, or the error stands in rows that tokens look up alone, and not in all rows."""
    known = [s.fit for s in portrait.slices if s.fit.explained and s.fit.family in ("terms", "projection")]
    if len(known) == len(portrait.slices):
        return all(alike([c for t, c in f.coefficients.items() if t.part == PROJECTION], 1.0) for f in known)
    return portrait.rows.share < 1 and "rows that tokens look up" in portrait.rows.lie


def _tie_lost(e: Evidence) -> str:
    for _, rank in sorted(e.ranks.items()):
        events = [event.event for event in rank.lifecycle]
        if e.case.tied and "tied" in events:
            for event in rank.lifecycle[events.index("tied") :]:
                if not (event.same_object or event.same_storage):
                    return event.event
    return ""


def _drift(e: Evidence, step: int) -> tuple[str, tuple[str, ...]]:
    """In the order of cause."""
    for kind, wholes in (("logits", e.logits), ("gradients", e.gradients), ("weights", e.weights)):
        differ = [str(key) for key, whole in wholes[step].items() if not whole.replicas_equal]
        if differ:
            return kind, tuple(differ)
    seen = [(place, found) for place, found in e.reported(step)]
    for dp_rank in range(e.case.dp):
        if len({found.loss for (_, dp), found in seen if dp == dp_rank}) > 1:
            return "loss", ()
    return ("norm", ()) if len({str(found.gradient_norm) for _, found in seen}) > 1 else ("", ())


def _repeated(e: Evidence) -> str:
    """A rank whose step shows what an earlier one did, bit for bit (data and weights change from step to step)."""
    for place, rank in sorted(e.ranks.items()):
        for later in range(1, len(rank.steps)):
            for earlier in range(later):
                a, b = rank.steps[later], rank.steps[earlier]
                finite = all(math.isfinite(value) for value in a.loss)
                same = finite and a.loss == b.loss and len(a.logits) == len(b.logits)
                if same and all(bitwise_equal(x.data, y.data) for x, y in zip(a.logits, b.logits, strict=True)):
                    return f"step {later + 1} of rank {rank.rank} {place} repeats step {earlier + 1} bit for bit"
    return ""


def _another(e: Evidence, step: int) -> str:
    """The factor without which logits and gradients are right: its default ran."""
    weights = {name: whole.value for name, whole in e.before(step).items()}
    for factor in FACTORS:
        if factor.name not in DETERMINED_BY or getattr(e.case, factor.name) == factor.default:
            continue
        try:
            other = e.case.but(**{factor.name: factor.default})
        except CaseError:
            continue
        if parameter_shapes(other) != parameter_shapes(e.case) or other.dp != e.case.dp:
            continue
        there = e.cache.evaluate(other, weights, step)
        pairs = [(whole.value, there.logits.get(key)) for key, whole in e.logits[step].items()]
        pairs += [(whole.value, there.gradients.get(name)) for name, whole in e.gradients[step].items()]
        if all(right is not None and _close(run, right) for run, right in pairs):
            return f"{factor.name}={factor.spell(factor.default)}"
    return ""


def _close(run: Tensor, right: Tensor) -> bool:
    return float((run.double() - right).norm()) <= 1e-3 * float(right.norm())


def _start(e: Evidence) -> str:
    """How the initial shards differ from the given ones."""
    given = initial_weights(e.case)
    for name, whole in e.initial.items():
        if whole.dim is None or len(set(whole.sizes)) != 1 or bitwise_equal(whole.value.double(), given[name]):
            continue
        right = given[name].to(e.dtype).double().split(list(whole.sizes), whole.dim)
        held = whole.value.double().split(list(whole.sizes), whole.dim)
        places_of = [next((i for i, r in enumerate(right) if torch.equal(h, r)), None) for h in held]
        if None not in places_of:
            return f"the ranks hold shards {places_of} of {name} in place of {list(range(len(held)))}"
    return ""


def _rounding(e: Evidence, step: int) -> str:
    """Lower precision of which every wrong number of the step could be the rounding: as large, everywhere, no factor.

    A wrong loss or norm alone is no evidence: one number may have any size.
    """
    wrong = [c for c in e.comparisons if c.step == step and not c.deviation.score <= 1]
    wide = [c.deviation for c in wrong if c.oracle in ("logits", "gradient")]
    if not wide or not all(math.isfinite(c.deviation.sigmas) for c in wrong):
        return ""
    if statistics.median(d.coherence for d in wide) > COHERENT or max(d.rows_wrong for d in wide) < SPREAD:
        return ""
    for name in ("float32", "tf32", "tf32_truncated", "bfloat16"):
        if UNIT_ROUNDOFF[name] <= e.u:
            continue
        as_if = {(c.oracle, c.deviation.name): c.deviation for c in e.compare(step, name)}
        if all((key := (c.oracle, c.deviation.name)) in as_if and as_if[key].score <= 1 for c in wrong):
            return name
    return ""


# --- forward ----------------------------------------------------------------------------------------------


def _forward(e: Evidence, step: int) -> Forward | None:
    exact = e.exact[step]
    wrong = [c for c in e.comparisons if c.step == step and c.oracle == "logits" and not c.deviation.score <= 1]
    if exact is None or not wrong:
        return None
    labels = {c.deviation.name: c.deviation for c in wrong}
    keys = [key for key in e.logits[step] if any(_names(key, name, e.case) for name in labels)]
    predicted = max(d.predicted for d in labels.values())
    tokens: set[int] = set()
    everywhere, constant, factors, columns = True, True, [], torch.zeros(e.case.vocab)
    for key in keys:
        run, right = e.logits[step][key].value.double(), exact.logits[key].double()
        error = (run - right).nan_to_num(math.inf)
        scale = float(right.square().mean().sqrt())
        limit = 12 * max(predicted, torch.finfo(torch.float64).eps) * scale
        bad = error.abs().amax(-1) > 4 * limit
        for row, ids in enumerate(micro_batch(e.case, step, key[1], key[0]).tokens):
            if bool(bad[row].any()):
                tokens.add(int(ids[int(bad[row].nonzero()[0])]))
        everywhere &= bool(bad.all())
        spread = (error - error.mean((0, 1))).square().mean().sqrt()
        constant &= bool(spread < 0.05 * error.square().mean().sqrt())
        ratio = float((run * right).sum() / right.square().sum())
        factors.append(ratio if float((run - ratio * right).norm()) <= 1e-3 * float(run.norm()) else math.nan)
        columns = torch.maximum(columns, error.square().mean((0, 1)).sqrt() / max(limit, 1e-300))
    hit = tuple((columns > 1).nonzero().flatten().tolist())
    return Forward(
        factor=factors[0] if all(math.isfinite(f) for f in factors) and alike(factors) else None,
        constant=constant,
        columns=Places(hit, int(columns.argmax()), e.case.vocab),
        moved=_columns_moved(e, step, keys[0], hit),
        first_tokens=frozenset(tokens),
        everywhere=everywhere,
        whose=_whose(e, step, keys),
    )


def _names(key: tuple[int, int], name: str, case: Case) -> bool:
    dp_rank, micro = key
    return name == f"logits of micro-batch {micro}" + (f" of data-parallel rank {dp_rank}" if case.dp > 1 else "")


def _columns_moved(e: Evidence, step: int, key: tuple[int, int], wrong: Sequence[int]) -> bool:
    """Most wrong columns hold, far better than their own, what belongs into another column; or nothing."""
    exact = e.exact[step]
    if exact is None or not wrong:
        return False
    run = e.logits[step][key].value.double().flatten(0, 1)[:, list(wrong)]
    right = exact.logits[key].double().flatten(0, 1)
    gaps = torch.cdist(run.T, right.T)
    own = gaps[torch.arange(len(wrong)), torch.tensor(wrong)]
    found = (gaps.amin(1) < 0.1 * own) | (run.abs().amax(0) == 0)
    return bool(found.double().mean() > 0.5)


def _whose(e: Evidence, step: int, keys: Sequence[tuple[int, int]]) -> str:
    exact = e.exact[step]
    assert exact is not None
    for key in keys:
        run = e.logits[step][key].value.double()
        for other, right in exact.logits.items():
            if other != key and float((run - right).norm()) < 1e-2 * float(right.norm()):
                return f"data-parallel rank {key[0]}, micro-batch {key[1]} ran on the data of {other[0]}, {other[1]}"
    return ""
