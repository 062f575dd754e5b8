"""Diagnosis: where a deviation comes from, and which class of bug it looks like.

Symptoms are measured first (`symptoms`): what broke exactly, what is wrong with logits, loss, gradients, norm and
update in the first step that shows anything; later steps follow from it. Then the rows of one table (`RULES`) speak for
classes of suites/README.md. Nothing here raises: what cannot be measured is left out or said.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from suites import optimizers
from suites.cases import FACTORS, Case, CaseError
from suites.contributions import LOOKUP, PROJECTION, Fit, Places, Portrait, Slice, alike, places, portraits
from suites.data import IGNORED, micro_batch, token_weights
from suites.evidence import Evidence
from suites.model import COLUMN, EMBEDDING, HEAD, HEAD_BIAS, ROW, SMOOTHING, Z_LOSS, initial_weights, parameter_shapes
from suites.numerics import LIMITS
from suites.observe import bitwise_equal
from suites.oracles import Finding
from suites.precision import UNIT_ROUNDOFF
from suites.reference import DETERMINED_BY
from suites.trace import Boundary

NAMES: Mapping[int, str] = {
    1: "alias lost when materialised, wrapped or loaded",
    2: "alias lost by replacement order",
    3: "tie detector blind, or sees ties that are none",
    4: "one contribution missing from the tied gradient",
    5: "one contribution scaled",
    6: "input gradient below the head not reduced",
    7: "reduced twice",
    8: "reduction outside autograd or on a dropped copy",
    9: "data-parallel reduce missing, wrong group or divisor",
    10: "reductions in the wrong order",
    11: "uneven rows mixed, frozen or stale",
    12: "padding_idx mapped wrongly on a shard",
    13: "rows that must not count do count",
    14: "local statistics in the loss",
    15: "gathered logits taken for sharded ones, or the reverse",
    16: "softmax maximum of one shard only",
    17: "backward assumes a uniform upstream gradient",
    18: "gradient norm counts a weight twice or misses a shard",
    19: "norm local to a rank",
    20: "optimizer holds the tied weight twice, or decays it wrongly",
    21: "accumulation overwrites or counts twice",
    22: "replicas drift",
    23: "races, stale memory",
    24: "sharded initialisation wrong",
    25: "state lost over a checkpoint or a step",
    26: "resize or cast breaks the tie",
    27: "ranks issue different collectives",
    28: "precision lost",
    29: "recompute reduces twice",
    30: "another program ran, or a result went missing",
    31: "bias added on every rank",
}


@dataclass(frozen=True)
class Guess:
    """One class of bug that the symptoms look like.

    Args:
        bug_class: its number in suites/README.md; name: short.
        weight: of the rules that say so, together.
        why: what speaks for it, one sentence.
    """

    bug_class: int
    name: str
    weight: float
    why: str


@dataclass(frozen=True)
class Diagnosis:
    """Where a deviation comes from, and what it looks like.

    Args:
        sentence: for people.
        guesses: ranked; empty where nothing was flagged or nothing can be said.
        boundary: first module that leaves the noise, where a trace was made.
        tensor: the tensor that the numbers below are of; empty without one.
        worst_rows, worst_columns: up to ten of those that carry the error, the worst first.
        share_of_rows: how many rows of the tensor carry it.
        lie: what these rows have in common, for people.
    """

    sentence: str
    guesses: tuple[Guess, ...] = ()
    boundary: Boundary | None = None
    tensor: str = ""
    worst_rows: tuple[int, ...] = ()
    worst_columns: tuple[int, ...] = ()
    share_of_rows: float = 0.0
    lie: str = ""


COHERENT = 0.5  # cosine between error and tensor above which the error is a factor, not rounding
SPREAD = 0.2  # share of rows that rounding of a lower precision must at least have reached


# --- symptoms ------------------------------------------------------------------------------------------------------


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
class Moved:
    """What is wrong with the update of one weight.

    Args:
        ratio: movement over what the replay asks for, by tensor-parallel slice.
        still: slices that did not move at all; wrong: those that did not move as asked.
        cause: name of the hypothesis that explains it (`UPDATES`), empty if none does.
    """

    name: str
    ratio: tuple[float, ...]
    still: tuple[int, ...]
    wrong: tuple[int, ...]
    cause: str
    relative: float
    rows: Places


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
        "losses": lambda: _losses(e, first) if "loss" in now and "logits" not in now else (),
        "gradients": lambda: _backward_order(portraits(e, first), e.case),
        "right": lambda: _right(e, first),
        "updates": lambda: _updates(e, first) if "update" in now else (),
        "norms": lambda: _norms(e, first) if "gradient_norm" in now else _clipped_by(e, first, found.updates),
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


# --- forward and loss ----------------------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class Law:
    """A wrong way to make a loss from right logits.

    Args:
        loss: of one tensor-parallel rank, from case, full logits [n, v], labels [n] and that rank.
        kinds: values of the factor `loss` that it can befall; empty means all.
    """

    bug_class: int
    meaning: str
    loss: Callable[[Case, Tensor, Tensor, int], Tensor]
    kinds: tuple[str, ...] = ()


def _sizes(case: Case) -> list[int]:
    return [len(part) for part in torch.arange(case.vocab).tensor_split(case.tp)]


def _kept(case: Case, labels: Tensor) -> Tensor:
    counted = (labels != IGNORED).double()
    return counted * token_weights(labels).double() if case.loss == "weighted" else counted


def _mean(case: Case, losses: Tensor, labels: Tensor) -> Tensor:
    """Mean as the case asks for it."""
    kept = _kept(case, labels)
    return (losses * kept).sum() / kept.sum()


def _plain(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")


def _token_losses(case: Case, logits: Tensor, labels: Tensor) -> Tensor:
    """Right loss of each token, as the case asks for it."""
    smoothing = SMOOTHING if case.loss == "smoothed" else 0.0
    losses = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none", label_smoothing=smoothing)
    return losses + Z_LOSS * logits.logsumexp(-1).square() if case.loss == "z_loss" else losses


def _ignored_count(case: Case, logits: Tensor, labels: Tensor, rank: int) -> Tensor:
    return (_token_losses(case, logits, labels) * (labels != IGNORED)).mean()


def _padded(case: Case, logits: Tensor, labels: Tensor, rank: int) -> Tensor:
    sizes = _sizes(case)
    extra = sum(max(sizes) - size for size in sizes)
    return _mean(case, _token_losses(case, F.pad(logits, (0, extra)), labels), labels)


def _local_maximum(case: Case, logits: Tensor, labels: Tensor, rank: int) -> Tensor:
    shards = [part - part.amax(-1, keepdim=True) for part in logits.split(_sizes(case), -1)]
    return _mean(case, _token_losses(case, torch.cat(shards, -1), labels), labels)


def _own_maximum_back(case: Case, logits: Tensor, labels: Tensor, rank: int) -> Tensor:
    parts = logits.split(_sizes(case), -1)
    total = torch.stack([(part - part.amax(-1, keepdim=True)).exp().sum(-1) for part in parts]).sum(0)
    target = logits.gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return _mean(case, total.log() + parts[rank].amax(-1) - target, labels)


def _counted_by_every_rank(case: Case, logits: Tensor, labels: Tensor, rank: int) -> Tensor:
    return _mean(case, _token_losses(case, logits, labels) + math.log(case.tp), labels)


def _found(case: Case, logits: Tensor, labels: Tensor, shards: Sequence[tuple[int, int, int]]) -> Tensor:
    """Loss with the label's logit looked up on shards (begin in the logits, size, first label taken for its own).

    Shifted by the maximum, as the sharded loss does: not every label is found once.
    """
    logits = logits - logits.amax(-1, keepdim=True)
    found = torch.zeros(len(labels), dtype=logits.dtype)
    for begin, size, first in shards:
        there = (labels >= first) & (labels < first + size)
        place = torch.where(there, labels - first + begin, 0).unsqueeze(-1)
        found += torch.where(there, logits.gather(-1, place).squeeze(-1), 0)
    return _mean(case, logits.logsumexp(-1) - found, labels)


def _starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:rank]) for rank in range(len(sizes))]


def _labels_from_each_start(case: Case, logits: Tensor, labels: Tensor, rank: int) -> Tensor:
    shards = [(0, logits.shape[-1], start) for start in _starts(_sizes(case))]
    return _found(case, logits, labels, shards) + math.log(case.tp)


def _even_labels(case: Case, logits: Tensor, labels: Tensor, extent: int) -> Tensor:
    sizes = _sizes(case)
    shards = [(start, size, extent * r) for r, (start, size) in enumerate(zip(_starts(sizes), sizes, strict=True))]
    return _found(case, logits, labels, shards)


def _labels_on_short_shards(case: Case, logits: Tensor, labels: Tensor, rank: int) -> Tensor:
    return _even_labels(case, logits, labels, min(_sizes(case)))


def _labels_on_long_shards(case: Case, logits: Tensor, labels: Tensor, rank: int) -> Tensor:
    return _even_labels(case, logits, labels, max(_sizes(case)))


def _own_shard_only(case: Case, logits: Tensor, labels: Tensor, rank: int) -> Tensor:
    sizes = _sizes(case)
    start = sum(sizes[:rank])
    own = torch.where((labels >= start) & (labels < start + sizes[rank]), labels - start, IGNORED)
    return F.cross_entropy(logits[:, start : start + sizes[rank]], own, ignore_index=IGNORED)


def _local_softmax(case: Case, logits: Tensor, labels: Tensor, rank: int) -> Tensor:
    sizes = _sizes(case)
    start = sum(sizes[:rank])
    target = logits.gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return _mean(case, logits[:, start : start + sizes[rank]].logsumexp(-1) - target, labels)


def _smoothed(case: Case, logits: Tensor, labels: Tensor, mean: Tensor) -> Tensor:
    target = logits.gather(-1, labels.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return _mean(case, logits.logsumexp(-1) - (1 - SMOOTHING) * target - SMOOTHING * mean, labels)


def _local_mean_logit(case: Case, logits: Tensor, labels: Tensor, rank: int) -> Tensor:
    own = logits.split(_sizes(case), -1)[rank]
    return _smoothed(case, logits, labels, own.mean(-1))


def _local_vocabulary(case: Case, logits: Tensor, labels: Tensor, rank: int) -> Tensor:
    # shifted by the global maximum, as the sharded loss does: the sum over the vocabulary is not free of the shift
    top = logits.amax(-1)
    total = (logits - top.unsqueeze(-1)).sum(-1)
    return _smoothed(case, logits, labels, total / _sizes(case)[rank] + top)


def _z_of(case: Case, logits: Tensor, labels: Tensor, log_sum: Tensor) -> Tensor:
    return _mean(case, _plain(logits, labels) + Z_LOSS * log_sum.square(), labels)


def _padded_mean_logit(case: Case, logits: Tensor, labels: Tensor, rank: int) -> Tensor:
    top = logits.amax(-1)
    total = (logits - top.unsqueeze(-1)).sum(-1)
    return _smoothed(case, logits, labels, total / (max(_sizes(case)) * case.tp) + top)


def _local_z(case: Case, logits: Tensor, labels: Tensor, rank: int) -> Tensor:
    return _z_of(case, logits, labels, logits.split(_sizes(case), -1)[rank].logsumexp(-1))


def _z_without_maximum(case: Case, logits: Tensor, labels: Tensor, rank: int) -> Tensor:
    return _z_of(case, logits, labels, (logits - logits.amax(-1, keepdim=True)).logsumexp(-1))


def _unweighted(case: Case, logits: Tensor, labels: Tensor, rank: int) -> Tensor:
    return F.cross_entropy(logits, labels, ignore_index=IGNORED)


def _weighted_over_count(case: Case, logits: Tensor, labels: Tensor, rank: int) -> Tensor:
    return (_plain(logits, labels) * _kept(case, labels)).sum() / (labels != IGNORED).sum()


LAWS: tuple[Law, ...] = (
    Law(11, "labels are looked up as if all shards were as long as the shortest", _labels_on_short_shards),
    Law(11, "labels are looked up as if all shards were as long as the longest", _labels_on_long_shards),
    Law(13, "ignored labels count in the mean", _ignored_count),
    Law(13, "the softmax counts padding of the vocabulary as logits of zero", _padded),
    Law(13, "labels are smoothed over padding of the vocabulary too", _padded_mean_logit, ("smoothed",)),
    Law(14, "each rank smooths with the mean logit of its own shard", _local_mean_logit, ("smoothed",)),
    Law(14, "labels are smoothed over a shard's vocabulary", _local_vocabulary, ("smoothed",)),
    Law(14, "each rank's z-loss sees its own shard's softmax sum", _local_z, ("z_loss",)),
    Law(14, "the z-loss sees the softmax's sum without its maximum", _z_without_maximum, ("z_loss",)),
    Law(14, "each rank's softmax sums its own shard", _local_softmax),
    Law(15, "every rank counts all logits: the loss is higher by log(tp)", _counted_by_every_rank),
    Law(15, "whole logits are taken for shards: labels are looked up from each shard's start", _labels_from_each_start),
    Law(15, "each rank takes its shard of the logits for all of them", _own_shard_only),
    Law(16, "each shard is shifted by its own maximum", _local_maximum),
    Law(16, "each shard is shifted by its own maximum, and each rank adds its own back", _own_maximum_back),
    Law(17, "all tokens weigh the same", _unweighted, ("weighted",)),
    Law(17, "the weighted sum is divided by the number of tokens", _weighted_over_count, ("weighted",)),
)


def _losses(e: Evidence, step: int) -> tuple[str, ...]:
    """Meaning of each law that gives the run's wrong losses from the reference's logits."""
    exact = e.exact[step]
    if exact is None:
        return ()
    wrong = []
    for (tp_rank, dp_rank), seen in e.reported(step):
        for micro, value in enumerate(seen.loss):
            wrong.append((tp_rank, (dp_rank, micro), value))
    possible = [law for law in LAWS if not law.kinds or e.case.loss in law.kinds]
    return tuple(law.meaning for law in possible if _obeyed(e.case, step, law, exact.logits, exact.loss, wrong))


def _obeyed(  # noqa: PLR0917
    case: Case,
    step: int,
    law: Law,
    logits: Mapping[tuple[int, int], Tensor],
    right: Mapping[tuple[int, int], float],
    seen: Sequence[tuple[int, tuple[int, int], float]],
) -> bool:
    off = 0.0
    for tp_rank, key, value in seen:
        labels = micro_batch(case, step, key[1], key[0]).labels.flatten()
        told = float(law.loss(case, logits[key].double().flatten(0, 1), labels, tp_rank))
        off = max(off, abs(value - right[key]))
        if not (math.isfinite(value) and abs(value - told) <= 1e-2 * abs(value - right[key]) + 2e-6 * abs(right[key])):
            return False
    return off > 1e-5 * max(abs(v) for v in right.values())


# --- norm ----------------------------------------------------------------------------------------------------------


NEAR = "is right to two digits"


def _norms(e: Evidence, step: int) -> tuple[str, ...]:
    """Laws of the reported norm, from squares of the run's own gradients."""
    laws, shards, replicated, total = _squares(e, step)
    reported = {place: seen.gradient_norm for place, seen in e.reported(step) if seen.gradient_norm is not None}
    values = set(reported.values())
    own = [law for law, square in laws.items() if square != total and all(_root(v, square) for v in values)]
    if len(values) > 1:
        own.insert(0, "differs from rank to rank")
        parts = [s + (replicated if r == 0 else 0.0) for r, s in enumerate(shards)]
        if all(_root(v, parts[t]) or _root(v, shards[t] + replicated) for (t, _), v in reported.items()):
            own.insert(0, "is that of each rank's own shards")
    if not own and all(abs(v - math.sqrt(total)) <= 2 * UNIT_ROUNDOFF["bfloat16"] * v for v in values):
        own.append(NEAR)
    return tuple(own)


def _clipped_by(e: Evidence, step: int, updates: Sequence[Moved]) -> tuple[str, ...]:
    """Laws of the norm that all weights were clipped by, where they moved by one factor and the norm is right."""
    ratios = [ratio for moved in updates for ratio in moved.ratio if moved.cause == RATE]
    if not e.case.clip or not ratios or not alike(ratios) or len({m.cause for m in updates}) > 1:
        return ()
    norm = e.case.clip / (_coefficient(e, step) * sum(ratios) / len(ratios))
    laws, _, _, total = _squares(e, step)
    return tuple(law for law, square in laws.items() if square != total and _root(norm, square))


def _root(norm: float, square: float) -> bool:
    return abs(norm - math.sqrt(max(square, 0.0))) <= 1e-3 * norm


def _squares(e: Evidence, step: int) -> tuple[dict[str, float], list[float], float, float]:
    """Wrong squared norms by what they do; squares of each rank's shards, of all replicated tensors, and of all."""
    shards, replicated, tied = [0.0] * e.case.tp, 0.0, 0.0
    for name, whole in e.gradients[step].items():
        if e.case.tied and name == HEAD:
            continue
        square = float(whole.value.double().square().sum())
        tied += square if e.case.tied and name == EMBEDDING else 0.0
        if whole.dim is None:
            replicated += square
        else:
            for rank, part in enumerate(whole.value.double().split(list(whole.sizes), whole.dim)):
                shards[rank] += float(part.square().sum())
    total = sum(shards) + replicated
    laws = {
        "counts replicated weights once a rank": sum(shards) + e.case.tp * replicated,
        "counts the tied weight twice": total + tied,
        "counts everything once a data-parallel rank": total * e.case.dp,
        "counts nothing sharded": replicated,
        "counts nothing replicated": sum(shards),
        "leaves the tied weight out": total - tied,
    }
    if e.case.tp > 1:
        laws |= {f"counts the shards of tensor-parallel rank {r} only": s + replicated for r, s in enumerate(shards)}
    return laws, shards, replicated, total


# --- updates -------------------------------------------------------------------------------------------------------

STILL, LATE, FRESH, COUNT, DECAY, OTHER, RATE, LOW = (
    "did not move",
    "moved as the step before asked",
    "moved as if its moments were new",
    "moved as if this were its first step",
    "moved as the replay asks, with another weight decay",
    "moved as another optimizer would move it",
    "moved in the right direction by another amount",
    "moved as asked, rounded to a lower precision",
)


def _updates(e: Evidence, step: int) -> tuple[Moved, ...]:
    """What is wrong with each weight that did not move as the replay of the optimizer says."""
    found = []
    for name in e.gradients[step]:
        if e.case.tied and name == HEAD and EMBEDDING in e.gradients[step]:
            continue
        moved = _moved(e, step, name)
        if moved:
            found.append(moved)
    return tuple(sorted(found, key=lambda moved: (not moved.cause, -moved.relative)))


def _coefficient(e: Evidence, step: int) -> float:
    own = e.gradients[step]
    once = [n for n in own if not (e.case.tied and n == HEAD and EMBEDDING in own)]
    norm = math.sqrt(sum(float(own[n].value.double().square().sum()) for n in once))
    reported = (seen.gradient_norm for _, seen in e.reported(step))
    return optimizers.clip_coefficient(min((n for n in reported if n is not None), default=norm), e.case.clip)


def _held(e: Evidence, step: int, name: str) -> Tensor:
    """What the optimizer worked on, before a step: the master weight where there is one."""
    low = step > 0 and name in e.masters[step - 1]
    return (e.masters[step - 1] if low else e.before(step))[name].value.double()


def _moved(e: Evidence, step: int, name: str) -> Moved | None:
    replay = optimizers.replay(e.case)
    wanted, kept, before = torch.zeros(()), [], torch.zeros(())
    for past in range(step + 1):
        gradient = e.gradients[past][name].value.double() * _coefficient(e, past)
        before = _held(e, past, name)
        wanted = replay.step(before, gradient) - before
        kept.append(wanted)
    whole = e.masters[step].get(name, e.weights[step][name])
    moved = whole.value.double() - before
    rounding = LIMITS["replay"] * e.master_u * replay.roundings(before, before + wanted)
    error = moved - wanted
    bad = ~(error.abs() <= rounding)
    if not bool(bad.any()):
        return None
    dim, sizes = (whole.dim, list(whole.sizes)) if whole.dim is not None else (0, [whole.value.shape[0]])
    parts = list(zip(moved.split(sizes, dim), wanted.split(sizes, dim), strict=True))
    size = float(wanted.square().mean().sqrt())
    rows, _ = places(e, step, name, torch.where(bad, error, 0.0), torch.zeros_like(error), 0.0)
    cause = _cause(e, step, name, parts, kept, before, dim)
    if not cause and bool((moved[bad] == 0).all()):
        cause = STILL
    return Moved(
        name=name,
        ratio=tuple(float((m * w).sum() / w.square().sum().clamp_min(1e-300)) for m, w in parts),
        still=tuple(i for i, (m, w) in enumerate(parts) if not bool(m.any()) and bool(w.any())),
        wrong=tuple(i for i, part in enumerate(bad.split(sizes, dim)) if bool(part.any())),
        cause=cause,
        relative=float(error.square().mean().sqrt()) / size if size else math.inf,
        rows=rows,
    )


def _cause(  # noqa: PLR0917
    e: Evidence,
    step: int,
    name: str,
    parts: Sequence[tuple[Tensor, Tensor]],
    kept: Sequence[Tensor],
    before: Tensor,
    dim: int,
) -> str:
    moved, wanted = (torch.cat([pair[i] for pair in parts], dim) for i in (0, 1))
    near = lambda other, share=0.02: (  # noqa: E731
        float((moved - other).norm()) <= share * float((moved - wanted).norm())
    )
    gradient = e.gradients[step][name].value.double() * _coefficient(e, step)
    if not bool(torch.isfinite(moved).all() and torch.isfinite(wanted).all()):
        return ""
    if not bool(moved.any()):
        return STILL
    fresh = optimizers.replay(e.case).step(before, gradient) - before
    if step and near(fresh):
        return FRESH
    if step and near(kept[-2]):
        return LATE
    if step and e.case.optimizer.startswith("adam") and near(_replayed(e, step, name, e.case, counting=False)):
        return COUNT
    if _decayed(moved, wanted, before):
        return DECAY
    if any(near(other) for other in _other_optimizers(e, step, name)):
        return OTHER
    if all(_multiple(m, w) for m, w in parts):
        return RATE
    return LOW if _rounded(before, moved, wanted) else ""


def _decayed(moved: Tensor, wanted: Tensor, before: Tensor) -> bool:
    """What is left of the movement is a multiple of the weight itself."""
    error = moved - wanted
    share = float((error * before).sum() / before.square().sum().clamp_min(1e-300))
    return bool(torch.isfinite(error).all()) and float((error - share * before).norm()) < 0.02 * float(error.norm())


def _rounded(before: Tensor, moved: Tensor, wanted: Tensor) -> bool:
    """The error is no larger than bf16's rounding of each weight, or of its movement (kept moments), and has no
    direction."""
    error = moved - wanted
    u = UNIT_ROUNDOFF["bfloat16"]
    small = bool((error.abs() <= 1.01 * u * (before + wanted).abs() + 2 * u * wanted.abs()).all())
    aligned = abs(float((error * wanted).sum())) > 0.5 * float(error.norm() * wanted.norm())
    return small and not aligned


def _multiple(moved: Tensor, wanted: Tensor) -> bool:
    """Moved by a multiple of what was asked, not the same and not nothing."""
    ratio = float((moved * wanted).sum() / wanted.square().sum().clamp_min(1e-300))
    off = float((moved - wanted).norm())
    other = abs(ratio - 1) > 1e-5 and abs(ratio) > 1e-5
    return other and float((moved - ratio * wanted).norm()) < 0.05 * off


def _other_optimizers(e: Evidence, step: int, name: str) -> Iterator[Tensor]:
    for other in optimizers.SETTINGS:
        if other != e.case.optimizer:
            yield _replayed(e, step, name, e.case.but(optimizer=other))


def _replayed(e: Evidence, step: int, name: str, case: Case, *, counting: bool = True) -> Tensor:
    """Movement that a case's optimizer asks for; not `counting`: it takes every step for its first."""
    replay = optimizers.replay(case)
    moved = torch.zeros(())
    for past in range(step + 1):
        replay.count = replay.count if counting else 0
        weight = _held(e, past, name)
        gradient = e.gradients[past][name].value.double() * _coefficient(e, past)
        moved = replay.step(weight, gradient) - weight
    return moved


# --- rules ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """One row of the table: a symptom, for people and as a predicate, and its weight for each class it speaks for."""

    why: str
    when: Callable[[Symptoms], object]
    classes: Mapping[int, float]


def _is(value: float | None, other: float) -> bool:
    return value is not None and alike([value], other)


def _law(bug_class: int) -> Callable[[Symptoms], object]:
    mine = {law.meaning for law in LAWS if law.bug_class == bug_class}
    return lambda s: bool(mine & set(s.losses))


def _wrong_loss(s: Symptoms) -> bool:
    return s.says("loss") and not s.says("logits")


def _zeros(s: Symptoms, part: str) -> str:
    """Where a contribution is missing: on "all" slices, on "some", or "" on none."""
    values = s.coefficients(part)
    none = [_is(v, 0.0) for v in values]
    others = s.coefficients(LOOKUP if part == PROJECTION else PROJECTION)
    if s.varies != {"part"} or not any(none) or not all(_is(v, 1.0) or _is(v, 0.0) for v in [*values, *others]):
        return ""
    return "all" if all(none) else "some"


def _missing(where: str) -> Callable[[Symptoms], object]:
    return lambda s: where in (_zeros(s, LOOKUP), _zeros(s, PROJECTION))


def _scaled_part(s: Symptoms) -> bool:
    return s.varies == {"part"} and _only(s, "tied") and not _zeros(s, LOOKUP) and not _zeros(s, PROJECTION)


def _by_dp(s: Symptoms) -> bool:
    return "dp_rank" in s.varies


def _own_data_only(s: Symptoms) -> bool:
    """Somebody's copy holds one data-parallel rank's data and nothing of the others'."""
    groups = [list(f.along("dp_rank").values()) for f in s.family("terms")]
    return any(sum(all(not _is(v, 0.0) for v in g) for g in by_rank) == 1 for by_rank in groups if len(by_rank) > 1)


def _one_part_by_dp(s: Symptoms) -> bool:
    return {"part", "dp_rank"} <= s.varies


def _by_tokens(s: Symptoms) -> bool:
    """Micro-batches count in proportion to their tokens: a mean over one number of tokens for all of them."""
    counts = {
        (dp_rank, micro): int((micro_batch(s.case, s.step, micro, dp_rank).labels != IGNORED).sum())
        for dp_rank in range(s.case.dp)
        for micro in range(s.case.accumulate)
    }
    fits = [f for f in s.family("terms") if f.varies & {"dp_rank", "micro"}]
    return bool(fits) and all(
        alike([c / counts[t.dp_rank, t.micro] for t, c in f.coefficients.items()], grain=1e-4) for f in fits
    )


def _everywhere(s: Symptoms, factor: float) -> bool:
    """Every gradient is `factor` times too large or too small."""
    return factor > 1 and s.everything and (_is(s.factor, factor) or _is(s.factor, 1 / factor))


def _tp_times(s: Symptoms) -> bool:
    return s.clean_forward and _power_of_tp(s.top_factor, s.case)


def _power_of_tp(value: float | None, case: Case) -> bool:
    return value is not None and case.tp > 1 and any(_is(value, float(case.tp**n)) for n in range(1, 9))


def _below_head(s: Symptoms) -> bool:
    """The head is right, a gradient below it is wrong."""
    return s.clean_forward and s.top is not None and s.kind(s.top) != "bias" and s.top.name != HEAD


def _lost_below_head(s: Symptoms) -> bool:
    return _below_head(s) and s.case.tp > 1 and not _only(s, "tied", "embedding")


def _at_head(s: Symptoms) -> bool:
    return s.clean_forward and s.top is not None and s.top.name == HEAD and not s.top.wrong[0].fit.explained


def _through_own_shard(s: Symptoms) -> bool:
    return any(len(f.coefficients) < s.case.tp for f in s.family("through head"))


def _mixed(s: Symptoms, value: float) -> bool:
    """Slices hold `value` of every tensor-parallel rank's slice."""
    fits = [f.coefficients for f in s.family("shards") if len(f.coefficients) > 1]
    return any(all(_is(v, value) for v in found.values()) for found in fits)


def _dead_on_some_ranks(s: Symptoms) -> bool:
    return any(p.dim is not None and 0 < sum(x.zero for x in p.slices) < len(p.slices) for p in s.gradients)


def _from_the_loss_on(s: Symptoms) -> bool:
    """The gradient that the loss gives back to the head's output is the first that is wrong."""
    at = s.boundary
    return s.clean_forward and at is not None and (at.module, at.direction) == ("lm_head", "backward")


def _only(s: Symptoms, *kinds: str) -> bool:
    return bool(s.gradients) and s.kinds <= set(kinds)


def _no_number(s: Symptoms) -> bool:
    words = ("nan", "inf", "not finite")
    return any(not x.finite for p in s.gradients for x in p.slices) or any(
        word in s.evidence.get(name, "") for name in ("loss", "logits") for word in words
    )


def _resumed(s: Symptoms) -> bool:
    """The case resumes, and the first step after that (or the state right after it) is the first wrong one."""
    return s.case.resume != "none" and s.step <= 1


def _first_after(s: Symptoms) -> bool:
    """Right after the resumption, and nothing before it: weights are not those that were saved, or the next step."""
    return _resumed(s) and (s.says("update", "replicas") or s.step == 1)


def _recomputed(s: Symptoms) -> bool:
    return s.case.recompute != "none" and s.clean_forward


def _recomputed_factor(s: Symptoms) -> bool:
    return _recomputed(s) and any(f.explained and f.family in ("terms", "projection") for f in s.fits)


def _moves(*causes: str) -> Callable[[Symptoms], bool]:
    return lambda s: any(moved.cause in causes for moved in s.updates)


def _all_move(s: Symptoms, *causes: str) -> bool:
    """Every weight that moves wrongly does so for one of these causes, and it is not just one weight."""
    return len(s.updates) > 1 and all(moved.cause in causes for moved in s.updates)


def _part_of_a_weight(s: Symptoms) -> bool:
    """One shard of a weight, or some of its rows, moves wrongly, the others rightly."""
    told = [m for m in s.updates if m.cause in ("", STILL, LATE)]
    return any(0 < len(m.still) < len(m.ratio) or m.rows.share < 1 or 0 < len(m.wrong) < len(m.ratio) for m in told)


def _norm_alone(s: Symptoms) -> bool:
    return s.says("gradient_norm") and not s.gradients


def _norm(*words: str) -> Callable[[Symptoms], bool]:
    return lambda s: _norm_alone(s) and any(word in law for law in s.norms for word in words)


def _own_norm(s: Symptoms) -> bool:
    return (_norm_alone(s) and s.drift == "norm") or bool(_norm("rank to rank", "own shards")(s))


def _tokens_of_one_shard(s: Symptoms) -> bool:
    """Errors begin only at tokens whose rows one shard holds, or the row before it."""
    if not s.forward or s.forward.everywhere or s.case.head == "row" or s.case.tp == 1:
        return False
    ends = [0, *(sum(_sizes(s.case)[: i + 1]) for i in range(s.case.tp))]
    return any(
        all(begin - 1 <= token < end for token in s.forward.first_tokens) for begin, end in itertools.pairwise(ends)
    )


def _padding_token(s: Symptoms) -> bool:
    return s.forward is not None and s.case.padding_idx is not None and s.forward.first_tokens == {s.case.padding_idx}


# Weights: 8 and more, a cause by itself, whatever follows from it; 6 to 7, a signature that hardly anything else has; 3
# to 5, fits; below, possible. A class has its best row's weight, and a tenth of its other rows'.
RULES: tuple[Rule, ...] = (
    # what ran
    Rule("a part of the run is missing, or was not the one asked for", lambda s: s.says("complete"), {30: 10}),
    Rule("the optimizer lacks a parameter", lambda s: s.says("complete") and s.says("census"), {20: 10.5}),
    Rule("the live model is not sharded as the case says", lambda s: s.says("layout"), {30: 10}),
    Rule("an observation repeats an earlier one", lambda s: s.repeated, {30: 11}),
    Rule("a rank ran on other data than it was given", lambda s: s.forward and s.forward.whose, {30: 10, 9: 3}),
    Rule("all numbers are those of a case with another factor", lambda s: s.another, {30: 9}),
    Rule("weights move as another optimizer would move them", lambda s: _all_move(s, OTHER), {30: 8}),
    # the tie
    Rule("an untied model has one weight", lambda s: s.says("tie") and not s.case.tied, {3: 10}),
    Rule("the tie was never made", lambda s: s.says("tie") and s.case.tied and not s.tie_lost, {1: 8, 2: 6}),
    Rule("embedding and head are no longer one weight", lambda s: s.tie_lost, {1: 8, 26: 2}),
    Rule("the tie is lost when sharded layers are put in", lambda s: s.tie_lost == "sharded", {2: 9}),
    Rule("the tie is made, and lost at once", lambda s: s.tie_lost == "tied", {2: 5}),
    Rule("the tie is lost before anything is sharded", lambda s: s.tie_lost == "loaded", {26: 7}),
    Rule("the tie is lost when a checkpoint is loaded", lambda s: s.tie_lost == "resumed", {25: 10}),
    # where it starts, and what it resumes from
    Rule("a shard does not start from the given weights", lambda s: s.says("start") and not s.says("tie"), {24: 9}),
    Rule("ranks hold each other's shards, and compute with others", lambda s: s.start and s.says("logits"), {30: 10}),
    Rule("ranks hold each other's shards", lambda s: s.start, {30: 3}),
    Rule("it is wrong right after a checkpoint was loaded, and not before", _first_after, {25: 9}),
    Rule("a frozen weight moved", lambda s: "frozen" in s.evidence.get("update", ""), {20: 3, 25: 3, 11: 2}),
    # copies and collectives
    Rule("the optimizer does not hold each parameter once", lambda s: s.says("census") and not s.says("tie"), {20: 9}),
    Rule("ranks issue different collectives", lambda s: s.says("collectives") and not s.says("layout"), {27: 9}),
    Rule("… and gradients were not reduced", lambda s: s.says("collectives") and _own_data_only(s), {9: 9.5}),
    Rule("gradients agree, copies of weights do not", lambda s: s.drift == "weights" and not s.gradients, {22: 8}),
    Rule("… and one rank clips by itself", lambda s: s.drift == "weights" and s.case.clip > 0 and s.uneven, {19: 8.5}),
    Rule("… which are gathered from ZeRO's parts", lambda s: s.drift == "weights" and s.case.zero in (1, 2), {23: 8}),
    Rule("copies differ", lambda s: s.says("replicas"), {22: 2}),
    Rule("only the head's bias is wrong", lambda s: _only(s, "bias") or s.drift_of == (HEAD_BIAS,), {31: 6}),
    # precision
    Rule("values or master weights of a lower precision than asked", lambda s: s.says("precision"), {28: 8}),
    Rule("a rank multiplies in another precision than asked", lambda s: s.says("switches"), {28: 7}),
    Rule("the error looks like rounding to a lower precision", lambda s: s.rounding, {28: 7}),
    Rule("weights are rounded to a lower precision", _moves(LOW), {28: 9.5}),
    Rule("the norm alone is off, and only a little", _norm(NEAR), {28: 6}),
    # forward
    Rule("the error of the logits is the same for every token", lambda s: s.forward and s.forward.constant, {31: 9}),
    Rule("the logits are tp times too large", lambda s: s.forward and _power_of_tp(s.forward.factor, s.case), {7: 8}),
    Rule("the logits have a factor", lambda s: s.forward and s.forward.factor is not None, {5: 5}),
    Rule("columns of the logits stand in other places", lambda s: s.forward and s.forward.moved, {11: 7}),
    Rule("errors begin at tokens of one shard", _tokens_of_one_shard, {11: 7}),
    Rule("errors begin at the padding row's token", _padding_token, {12: 6}),
    Rule("the logits are wrong", lambda s: s.forward, {23: 2, 8: 1.5, 11: 1}),
    # loss
    Rule("the loss looks labels up on other shards than there are", _law(11), {11: 8}),
    Rule("the loss counts what must not count", _law(13), {13: 8}),
    Rule("the loss takes statistics of one shard", _law(14), {14: 8}),
    Rule("the loss takes its logits for what they are not", _law(15), {15: 8}),
    Rule("the softmax is shifted by each shard's own maximum", _law(16), {16: 8}),
    Rule("the loss loses the weights of the tokens", _law(17), {17: 8}),
    Rule("large logits, and the loss is wrong", lambda s: _wrong_loss(s) and s.case.logit_scale > 1, {16: 6}),
    Rule("the logits are right, the loss is no number", lambda s: _wrong_loss(s) and _no_number(s), {16: 5}),
    Rule("the loss is wrong, with a term beside the softmax", lambda s: _wrong_loss(s) and _extra_term(s), {14: 4}),
    Rule("the logits are right, the loss is not", _wrong_loss, {13: 2, 15: 1.9, 17: 1.5, 16: 1.2}),
    # uses of the tied weight
    Rule("a contribution to the tied gradient is missing", _missing("all"), {4: 6, 8: 3}),
    Rule("a contribution to the tied gradient is missing on some slices", _missing("some"), {8: 6, 4: 5}),
    Rule("one contribution to the tied gradient is scaled", _scaled_part, {5: 6}),
    Rule("one end of the model has a factor", lambda s: _ends(s) and s.factor is not None, {5: 4}),
    # data parallelism and accumulation
    Rule("a copy holds one data-parallel rank's data only", lambda s: _by_dp(s) and _own_data_only(s), {9: 6.5}),
    Rule("one contribution is reduced over data-parallel ranks, the other not", _one_part_by_dp, {10: 7.5, 9: 3}),
    Rule(
        "data-parallel ranks count by factors of their own",
        lambda s: _by_dp(s) and not _own_data_only(s),
        {10: 6, 9: 4},
    ),
    Rule("micro-batches do not count alike", lambda s: "micro" in s.varies, {21: 7}),
    Rule("micro-batches count by their number of tokens", _by_tokens, {17: 7.5}),
    Rule("every gradient is dp times off", lambda s: _everywhere(s, s.case.dp), {9: 6}),
    Rule(
        "every gradient is off by the number of micro-batches", lambda s: _everywhere(s, s.case.accumulate), {21: 6.5}
    ),
    Rule("every gradient is tp times off", lambda s: _everywhere(s, s.case.tp), {9: 5}),
    Rule("every gradient has one factor", lambda s: s.clean_forward and s.everything and s.factor, {17: 3, 10: 2}),
    Rule("slices of tensor-parallel ranks are averaged", lambda s: s.case.tp > 1 and _mixed(s, 1 / s.case.tp), {9: 6}),
    Rule("slices of tensor-parallel ranks are summed", lambda s: _mixed(s, 1.0), {7: 6}),
    # reductions over tensor-parallel ranks
    Rule("what is recomputed counts otherwise", _recomputed_factor, {29: 7}),
    Rule("gradients are wrong where something is recomputed", _recomputed, {29: 6.2}),
    Rule("gradients are tp times too large", _tp_times, {7: 6}),
    Rule("below the head each rank has its own shard's part only", _through_own_shard, {6: 6.5, 8: 5.5}),
    Rule("some ranks' shards have no gradient", _dead_on_some_ranks, {8: 6}),
    Rule("the head is right, gradients below it are not", _lost_below_head, {6: 3, 8: 2.5}),
    Rule("… without a pattern", lambda s: _below_head(s) and s.top_factor is None, {23: 2.9}),
    # rows
    Rule("only the padding row is wrong, or its number on another shard", lambda s: s.lie("padding row"), {12: 7}),
    Rule("only rows at the border of shards are wrong", lambda s: s.lie("border"), {11: 6}),
    Rule("only rows beyond the shortest shard are wrong", lambda s: s.lie("beyond the shortest"), {11: 6}),
    Rule("only rows of one shard are wrong", lambda s: s.lie("shard") and not s.lie("padding row"), {11: 2}),
    Rule("only rows that nothing touches are wrong", lambda s: s.lie("no token"), {23: 3}),
    # stale and strange
    Rule("the gradient holds that of the step before", lambda s: s.family("step before"), {23: 7}),
    Rule("every gradient is zero", lambda s: s.everything and _is(s.factor, 0.0), {23: 6.5}),
    Rule("a gradient is zero", lambda s: s.dead, {4: 4}),
    Rule("a gradient holds terms of another tensor", lambda s: s.family("other tensor"), {27: 7}),
    Rule("the head's gradient is wrong, loss and logits are not", _at_head, {17: 4}),
    Rule(
        "a gradient is explained by nothing",
        lambda s: s.clean_forward and not any(f.explained for f in s.fits),
        {23: 3},
    ),
    Rule("something is no number", _no_number, {23: 3, 16: 2}),
    Rule("the loss is right, and what comes back from it is not", _from_the_loss_on, {17: 7.2}),
    # norm
    Rule("the norm counts something twice or not at all", _norm("counts", "leaves"), {18: 7}),
    Rule("the norm is each rank's own", _own_norm, {19: 8}),
    Rule("the norm grows where gradients are tiny", lambda s: _norm_alone(s) and s.tiny, {19: 5}),
    Rule("gradients are right, the norm is not", _norm_alone, {18: 4, 19: 3}),
    # update
    Rule("a part of a weight moves otherwise than asked", _part_of_a_weight, {11: 6}),
    Rule("a part of a weight does not move", lambda s: _part_of_a_weight(s) and _moves(STILL)(s), {11: 7}),
    Rule("a weight does not move", _moves(STILL), {25: 5, 11: 3}),
    Rule("no weight moves in a step", lambda s: _all_move(s, STILL), {23: 6.5}),
    Rule("weights move as the step before asked", _moves(LATE), {23: 7, 11: 5}),
    Rule("weights move as if the optimizer's state were new", _moves(FRESH, COUNT), {25: 8}),
    Rule("weights decay otherwise than asked", _moves(DECAY), {20: 7}),
    Rule(
        "weights move by another amount, with clipping", lambda s: _moves(RATE)(s) and s.case.clip > 0, {19: 6, 18: 4}
    ),
    Rule("weights are clipped by another norm than the right one", lambda s: s.updates and s.norms, {18: 7}),
    Rule("weights move by another amount", _moves(RATE), {25: 5, 20: 2}),
    Rule("gradients are right, updates are not", lambda s: s.updates, {20: 2}),
    Rule("… and the optimizer keeps moments", lambda s: s.updates and s.case.optimizer != "sgd", {25: 3}),
)


def _ends(s: Symptoms) -> bool:
    return s.clean_forward and s.kinds in ({"embedding"}, {"head"})


def _extra_term(s: Symptoms) -> bool:
    return s.case.loss in ("smoothed", "z_loss")


def guesses(found: Symptoms) -> tuple[Guess, ...]:
    """Classes that the rules speak for, best first."""
    votes: dict[int, list[tuple[float, str]]] = {}
    for rule in RULES:
        if _holds(rule, found):
            for bug_class, weight in rule.classes.items():
                votes.setdefault(bug_class, []).append((weight, rule.why.removeprefix("… and ").removeprefix("… ")))
    ranked = []
    for bug_class, spoken in votes.items():
        weight, why = max(spoken, key=lambda vote: vote[0])
        total = weight + 0.1 * (sum(vote[0] for vote in spoken) - weight)
        ranked.append(Guess(bug_class, NAMES[bug_class], round(total, 2), why))
    return tuple(sorted(ranked, key=lambda guess: (-guess.weight, guess.bug_class)))


def _holds(rule: Rule, found: Symptoms) -> bool:
    try:
        return bool(rule.when(found))
    except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError):
        return False  # a symptom that could not be measured speaks for nothing


def diagnose(evidence: Evidence | None, findings: Sequence[Finding], trace: Boundary | None = None) -> Diagnosis:
    """What the findings of one case come from; `trace` is the first module out of the noise, where one was traced.

    Never raises: what goes wrong here is said in the sentence.

    Args:
        evidence: None where the observations could not be put together.
    """
    flagged = [f for f in findings if f.flagged]
    if not flagged:
        return Diagnosis("nothing is flagged")
    if evidence is None:
        guess = Guess(30, NAMES[30], 10.0, "the observations do not fit together")
        return Diagnosis(f"{flagged[0].evidence}; looks like class 30 ({guess.name}): {guess.why}", (guess,))
    try:
        found = symptoms(evidence, findings, trace)
        ranked = guesses(found)
        top = found.top
        return Diagnosis(
            sentence=_sentence(found, ranked, trace),
            guesses=ranked,
            boundary=trace,
            tensor=top.name if top else (found.updates[0].name if found.updates else ""),
            worst_rows=_listed(_rows_of(found)),
            worst_columns=_listed(top.columns) if top else (),
            share_of_rows=_rows_of(found).share if _rows_of(found) else 0.0,  # type: ignore[union-attr]
            lie=", ".join(_rows_of(found).lie) if _rows_of(found) else "",  # type: ignore[union-attr]
        )
    except Exception as error:  # noqa: BLE001 - a diagnosis that fails must not take the verdict with it
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Diagnosis(f"no diagnosis: {type(error).__name__}: {error} ({where.name}, line {where.lineno})")


def _rows_of(found: Symptoms) -> Places | None:
    return found.rows or (found.updates[0].rows if found.updates else None)


def _listed(found: Places | None) -> tuple[int, ...]:
    if found is None:
        return ()
    return tuple(dict.fromkeys([found.worst, *found.wrong]))[:10]


def _sentence(found: Symptoms, ranked: Sequence[Guess], trace: Boundary | None) -> str:
    parts = [*_facts(found)] or [next(iter(found.evidence.values()))]
    if trace:
        parts.append(trace.sentence)
    if ranked:
        best = ranked[0]
        parts.append(f"looks like class {best.bug_class} ({best.name}): {best.why}")
        if len(ranked) > 1:
            parts.append(f"else class {ranked[1].bug_class} ({ranked[1].name})")
    else:
        parts.append("looks like no known class")
    return "; ".join(parts)


def _facts(s: Symptoms) -> Iterator[str]:
    """What was measured, plainly, the most telling first."""
    if s.repeated:
        yield s.repeated
    if s.tie_lost:
        yield f"embedding and head are separate after {s.tie_lost!r}"
    if s.start:
        yield s.start
    if s.another:
        yield f"all numbers are those of {s.another}"
    if s.forward and s.forward.whose:
        yield s.forward.whose
    elif s.forward:
        yield _forward_fact(s.forward)
    yield from s.losses[:1]
    if s.norms and not s.gradients:
        yield f"the norm {'that weights are clipped by ' if s.updates else ''}{s.norms[0]}"
    if s.drift == "weights":
        more = f" (and {len(s.drift_of) - 1} more)" if len(s.drift_of) > 1 else ""
        yield f"copies of {s.drift_of[0]}{more} differ between ranks after step {s.step + 1}"
    for moved in s.updates[:1]:
        yield _update_fact(s.case, moved)
    if s.top:
        yield _gradient_fact(s, s.top)
    if not s.gradients and not s.updates and "gradient" in s.flagged:
        yield s.evidence["gradient"]


def _forward_fact(found: Forward) -> str:
    if found.factor is not None:
        return f"the logits are {found.factor:.3g} times what they should be"
    if found.constant:
        return "the logits are off by the same amount for every token"
    if found.moved:
        return f"{len(found.columns.wrong)} columns of the logits hold what belongs into others"
    if not found.everywhere:
        return f"the logits' error begins at the tokens {', '.join(map(str, sorted(found.first_tokens)[:8]))}"
    return f"the logits are off in {len(found.columns.wrong)} of {found.columns.extent} columns"


def _update_fact(case: Case, moved: Moved) -> str:
    name = "the tied weight" if kind_of(moved.name, case) == "tied" else moved.name
    few = moved.wrong if 0 < len(moved.wrong) < len(moved.ratio) else ()
    who = f" on tensor-parallel rank {', '.join(map(str, few))}" if few else ""
    rows = f" in {len(moved.rows.wrong)} of {moved.rows.extent} rows" if moved.rows.share < 1 and not few else ""
    lie = f" ({moved.rows.lie[0]})" if rows and moved.rows.lie else ""
    return f"{name} {moved.cause or 'moved otherwise than the replay says'}{who}{rows}{lie}"


def _gradient_fact(s: Symptoms, top: Portrait) -> str:
    name = "the tied weight" if s.kind(top) == "tied" else top.name
    wrong = top.wrong[0]
    copies = top.dim is None and len(top.slices) > 1  # each rank's differs
    part = name if len(top.wrong) == len(top.slices) and not copies else f"{wrong.holder}'s part of {name}"
    if not wrong.finite:
        return f"the gradient of {part} is no number"
    if wrong.zero:
        return f"{part} got no gradient"
    text = _fit_fact(wrong.fit, part) if wrong.fit.explained else ""
    if text:
        return text
    rows = f" in {len(top.rows.wrong)} of {top.rows.extent} rows" if top.rows.share < 1 else ""
    lie = f" ({', '.join(top.rows.lie)})" if rows and top.rows.lie else ""
    return f"the gradient of {part} is off by {wrong.relative:.2g} of itself{rows}{lie}"


def _fit_fact(found: Fit, part: str) -> str:
    listed = " and ".join(f"{_much(value)} of {term.part}" for term, value in found.coefficients.items())
    if found.family == "projection":
        values = list(found.coefficients.values())
        if alike(values, 1.0, grain=found.grain):
            return ""
        return f"the projection's part of {part} is {sum(values) / len(values):.3g} times what it should be"
    if found.family == "through head":
        return f"the gradient of {part} holds only what came through the head, {listed}"
    if found.family != "terms":
        return f"the gradient of {part} holds {listed}"
    if found.factor is not None:
        return f"the gradient of {part} is {found.factor:.3g} times what it should be"
    if found.varies == {"part"}:
        lost = [axis for axis, c in found.along("part").items() if all(_is(x, 0.0) for x in c)]
        if lost:
            return f"{part} got no {lost[0]} gradient"
    off = [(axis, values) for axis, values in _grouped(found) if not alike(values, 1.0, grain=found.grain)]
    return f"the gradient of {part} holds " + " and ".join(f"{_much(sum(v) / len(v))} of {axis}" for axis, v in off)


def _much(value: float) -> str:
    return "nothing" if _is(value, 0.0) else f"{value:.3g}"


def _grouped(found: Fit) -> Iterator[tuple[str, list[float]]]:
    """Coefficients by the axes along which they vary, each with a name for people."""
    groups: dict[str, list[float]] = {}
    for term, value in found.coefficients.items():
        names = [f"the {term.part}'s part"] if "part" in found.varies else []
        names += [f"data-parallel rank {term.dp_rank}"] if "dp_rank" in found.varies else []
        names += [f"micro-batch {term.micro}"] if "micro" in found.varies else []
        groups.setdefault(" on ".join(names), []).append(value)
    yield from groups.items()
