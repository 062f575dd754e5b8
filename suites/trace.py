"""Trace of one step: the first module boundary, in forward and then in backward order, that leaves the noise.

`Tracer` keeps every module's output of the live, sharded model, and the gradient that comes back to it, as this rank
has them. `first_boundary` runs the unsharded model at the same weights with the same hooks and aligns both by name and
slice: an activation is whole on a rank, and each rank's copy is judged by itself, or it is cut along its last
dimension. What is allowed is what unsharded runs in the case's own arithmetic show (`suites.numerics`), as in TTrace
(arXiv 2506.09280), which stops at naming the module; ranks, tokens and, for matrix products, whether the module itself
is at fault are named here too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from suites.cases import Case
from suites.contributions import wrong_rows
from suites.data import micro_batch
from suites.evidence import NOISE_SAMPLES, Evidence, grid_of
from suites.model import COLUMN, HEAD_BIAS, ROW, Decoder, load_weights, parameter_shapes, trainable
from suites.numerics import LIMITS, Deviation, deviation
from suites.observe import Piece, RankObservation, Seen
from suites.precision import LOSS_SCALE, UNIT_ROUNDOFF, arithmetic, multiplying
from suites.reference import ReferenceCache, perturb

FORWARD, BACKWARD, INPUT = "forward", "backward", "input"
LOSS = "loss"
LARGEST = 256 * 2**20  # bytes that one rank keeps; what comes later is left out
LOCAL_LIMIT = 6.0  # root mean square of a product's error, in sigmas of `matmul_sigma`; null runs stay below 1.5
SHOWN = 10  # tokens that are named


@dataclass(frozen=True)
class Boundary:
    """The first module boundary that leaves the noise.

    Args:
        module: canonical name; empty where every boundary is within the noise.
        direction: "forward" (its output) or "backward" (the gradient that comes back to its output).
        ranks: tensor-parallel ranks whose slice or copy is wrong.
        tokens: positions in the flattened micro-batch that carry the error, the worst first, up to `SHOWN`.
        share: how many of the micro-batch's tokens carry it.
        relative: root mean square of the error over that of what should be there.
        score: deviation over its limit; above 1 is more than rounding.
        own: of a matrix product in forward: its output does not follow from its own input and weight; None: unchecked.
        sentence: all of this for people.
    """

    module: str
    direction: str
    micro: int
    dp_rank: int
    ranks: tuple[int, ...]
    tokens: tuple[int, ...]
    share: float
    relative: float
    score: float
    own: bool | None
    sentence: str


CLEAN = Boundary(
    module="",
    direction="",
    micro=0,
    dp_rank=0,
    ranks=(),
    tokens=(),
    share=0.0,
    relative=0.0,
    score=0.0,
    own=None,
    sentence="every module's output and the gradient that comes back to it are right: it arises in a weight's own "
    "gradient, its reduction or the update",
)


def boundaries(case: Case) -> tuple[str, ...]:
    """Names of the modules whose outputs are kept: all that hold a weight, and the blocks."""
    modules = dict.fromkeys(name.rpartition(".")[0] for name in parameter_shapes(case))
    return (*modules, *(f"layers.{i}" for i in range(case.layers)))


def multiplies(module: str) -> bool:
    """The module is a product with one weight, whose output can be computed again from its input."""
    return module.rpartition(".")[2] in (*COLUMN, *ROW, "lm_head")


# --- on the ranks --------------------------------------------------------------------------------------------------


class Tracer:
    """Hooks on a model for the time of a ``with`` block; `micro` says which micro-batch runs. May be entered again.

    The first output of a module in a micro-batch counts: what is computed once more in backward is not kept.
    """

    def __init__(self, model: nn.Module, case: Case, limit: int = LARGEST):
        self.model, self.case, self.limit = model, case, limit
        self.micro = 0
        self.seen: list[Seen] = []
        self._known: set[tuple[str, str, int]] = set()
        self._handles: list[Any] = []

    def __enter__(self) -> Tracer:
        modules = dict(self.model.named_modules())
        for name in boundaries(self.case):
            if name in modules:
                self._handles.append(modules[name].register_forward_hook(self._hook(name)))
        self._handles.append(self.model.register_forward_hook(self._root))
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, name: str) -> Any:
        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) else output
            if not isinstance(value, Tensor):
                return
            micro = self.micro
            if multiplies(name) and inputs and isinstance(inputs[0], Tensor):
                self._keep(name, INPUT, inputs[0], micro)
            self._keep(name, FORWARD, value, micro)
            if value.requires_grad and (name, BACKWARD, micro) not in self._known:
                value.register_hook(lambda gradient: self._keep(name, BACKWARD, gradient, micro))

        return keep

    def _root(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, tuple) and isinstance(output[0], Tensor):
            self._keep(LOSS, FORWARD, output[0].reshape(1), self.micro)

    def _keep(self, module: str, direction: str, value: Tensor, micro: int) -> None:
        key = (module, direction, micro)
        size = value.numel() * value.element_size()
        if key not in self._known and size <= self.limit:
            self._known.add(key)
            self.limit -= size
            self.seen.append(Seen(module, direction, micro, len(self.seen), Piece.whole(value)))


# --- the unsharded twin --------------------------------------------------------------------------------------------

Place = tuple[str, str]  # module and direction


@dataclass(frozen=True)
class Where:
    """One micro-batch of one data-parallel rank in a step (from 0)."""

    case: Case
    step: int
    dp_rank: int
    micro: int


def twin(where: Where, weights: Mapping[str, Tensor], name: str, perturbed: int = 0) -> dict[Place, Tensor]:
    """Every boundary's output and gradient of the unsharded model, in an arithmetic (`UNIT_ROUNDOFF`), as fp64.

    Gradients are those of this data-parallel rank's mean loss over its micro-batches, without a loss scale.
    """
    case = where.case
    matmul = name if name.startswith("tf32") else "ieee"
    model = Decoder(case, tie=False).to(torch.float32 if matmul != "ieee" else getattr(torch, name))
    load_weights(model, perturb(case, weights, UNIT_ROUNDOFF[name], perturbed) if perturbed else weights)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(trainable(case, parameter_name))
    scale = LOSS_SCALE.get(name, 1.0)
    batch = micro_batch(case, where.step, where.micro, where.dp_rank)
    with Tracer(model, case, limit=2**62) as tracer, multiplying(matmul, torch.device("cpu")):
        loss, _ = model(batch.tokens, batch.labels)
        (loss / case.accumulate * scale).backward()
    return _values(tracer.seen, 0, scale)


def _values(seen: Sequence[Seen], micro: int, scale: float) -> dict[Place, Tensor]:
    """Values of one micro-batch in the order of execution, gradients without the loss scale."""
    return {
        (s.module, s.direction): s.piece.data.reshape(s.piece.local_shape).double()
        / (scale if s.direction == BACKWARD else 1.0)
        for s in sorted(seen, key=lambda s: s.order)
        if s.micro == micro
    }


# --- judging -------------------------------------------------------------------------------------------------------

_Held = Mapping[int, Mapping[Place, Tensor]]  # tensor-parallel rank -> what it saw of a micro-batch


def first_boundary(
    case: Case, ranks: Sequence[RankObservation], step: int, cache: ReferenceCache | None = None
) -> Boundary | None:
    """The first boundary of a traced step (from 0) that leaves the noise, over all micro-batches; forward comes first.

    `CLEAN` where all are within the noise; None where nothing was traced, or the run's weights are not all there.

    Raises:
        ObservationError: two ranks claim the same place.
    """
    e = Evidence(case, ranks, cache or ReferenceCache())
    weights = {name: whole.value for name, whole in e.before(step).items()}
    if set(weights) != set(parameter_shapes(case)) or not any(rank.trace for rank in e.ranks.values()):
        return None
    found: dict[str, Boundary] = {}
    for micro in range(case.accumulate):
        for dp_rank in range(case.dp):
            search = _Search(e, weights, Where(case, step, dp_rank, micro))
            for direction in (FORWARD, BACKWARD):
                if direction not in found and (boundary := search.first(direction)):
                    found[direction] = boundary
    return found.get(FORWARD) or found.get(BACKWARD) or CLEAN


class _Search:
    """One micro-batch of one replica beside its unsharded twins."""

    def __init__(self, e: Evidence, weights: Mapping[str, Tensor], where: Where):
        self.e, self.weights, self.where = e, weights, where
        self.name = arithmetic(where.case)
        # DeepSpeed has no fp16 on CPU; it would scale the loss by itself.
        scale = LOSS_SCALE.get(where.case.dtype, 1.0) if where.case.path == "handwritten" else 1.0
        self.held: _Held = {
            tp: _values(rank.trace, where.micro, scale)
            for (tp, dp), rank in sorted(e.ranks.items())
            if dp == where.dp_rank
        }
        sampled = "float32" if self.name == "float64" else self.name  # fp64's noise is that of fp32, scaled
        self.scale = UNIT_ROUNDOFF[self.name] / UNIT_ROUNDOFF[sampled]
        self.exact = twin(where, weights, "float64")
        self.samples = [twin(where, weights, sampled, seed) for seed in range(NOISE_SAMPLES)]

    def first(self, direction: str) -> Boundary | None:
        """The first boundary in a direction that leaves the noise."""
        before = ""
        for place in self.held.get(0, {}):
            if place[1] != direction or place not in self.exact:
                continue
            if found := self._judge(place, before):
                return found
            before = place[0]
        return None

    def _judge(self, place: Place, before: str) -> Boundary | None:
        reference = self.exact[place]
        noise = torch.stack([sample[place] - reference for sample in self.samples]) * self.scale
        copies = {tp: values[place] for tp, values in self.held.items() if place in values}
        wrong: dict[int, tuple[Deviation, Tensor]] = {}
        for tp, run, cut in _aligned(copies, tuple(reference.shape)):
            if cut is None:
                return self._misfit(place, tp, run, reference)
            found = _judged(place[0], run, reference[..., cut], noise[..., cut], self.e.u)
            if not found.score <= 1:
                wrong[tp] = (found, run - reference[..., cut])
        if not wrong:
            return None
        own = self._own_product(place[0]) if place[1] == FORWARD and multiplies(place[0]) else None
        return self._boundary(place, before, wrong, own)

    def _boundary(
        self, place: Place, before: str, wrong: Mapping[int, tuple[Deviation, Tensor]], own: bool | None
    ) -> Boundary:
        worst = max(wrong, key=lambda tp: wrong[tp][0].score)
        d, error = wrong[worst][0], wrong[worst][1].reshape(-1, wrong[worst][1].shape[-1])
        rms = float(error.square().mean().sqrt())
        allowed = LIMITS["row"] * rms * d.predicted / d.relative if d.relative and math.isfinite(d.relative) else 0.0
        rows = wrong_rows(error, error, allowed)
        share = max(len(rows), 1) / len(error)
        text = f"{self._named(place, tuple(wrong))} leaves the noise"
        if not math.isfinite(d.relative):
            text += ": it is no number, or nothing should be there"
        else:
            spread = "" if place[0] == LOSS else f" in {max(len(rows), 1)} of {len(error)} tokens"
            text += f" by {d.relative:.2g} of itself{spread}"
        text += f", that of {before} is right" if before else ""
        if own is not None:
            text += "; given its own input its product is " + ("wrong" if own else "right: what enters it is not")
        if grid := self._grid(place, worst):
            text += f"; it holds nothing but {grid} values"
        return Boundary(
            module=place[0],
            direction=place[1],
            micro=self.where.micro,
            dp_rank=self.where.dp_rank,
            ranks=tuple(sorted(wrong)),
            tokens=tuple(dict.fromkeys([d.row, *rows]))[:SHOWN],
            share=share,
            relative=d.relative,
            score=d.score,
            own=own,
            sentence=text,
        )

    def _named(self, place: Place, ranks: Sequence[int]) -> str:
        case = self.where.case
        what = "the output" if place[1] == FORWARD else "forward is right, the gradient that comes back to the output"
        where = [] if len(ranks) == case.tp else [f"tensor-parallel rank {', '.join(map(str, ranks))}"]
        where += [f"data-parallel rank {self.where.dp_rank}"] if case.dp > 1 else []
        where += [f"micro-batch {self.where.micro}"] if case.accumulate > 1 else []
        return f"{what} of {place[0]}" + (f" on {', '.join(where)}" if where else "")

    def _misfit(self, place: Place, tp: int, run: Tensor, reference: Tensor) -> Boundary:
        text = f"{self._named(place, (tp,))} has the shape {tuple(run.shape)}, no part of {tuple(reference.shape)}"
        return dataclasses.replace(
            CLEAN,
            module=place[0],
            direction=place[1],
            micro=self.where.micro,
            dp_rank=self.where.dp_rank,
            ranks=(tp,),
            share=1.0,
            relative=math.inf,
            score=math.inf,
            sentence=text,
        )

    def _grid(self, place: Place, tp: int) -> str:
        """The lower precision that all values fit, where those of an unsharded run do not."""
        dtype = torch.float32 if self.name.startswith("tf32") else getattr(torch, self.name)
        found = grid_of(self.held[tp][place].to(dtype))
        return found if found and grid_of(self.samples[0][place].to(dtype)) != found else ""

    def _own_product(self, module: str) -> bool | None:
        """A product is wrong by itself: its output does not follow from its own input and the run's own weight."""
        weight = self.weights[f"{module}.weight"].double()
        inputs = {tp: values[module, INPUT] for tp, values in self.held.items() if (module, INPUT) in values}
        outputs = {tp: values[module, FORWARD] for tp, values in self.held.items() if (module, FORWARD) in values}
        x, y = _joined(inputs, weight.shape[1]), _joined(outputs, weight.shape[0])
        if x is None or y is None:
            return None
        expected = x @ weight.T
        if module == "lm_head" and HEAD_BIAS in self.weights:
            expected = expected + self.weights[HEAD_BIAS].double()
        u, single = UNIT_ROUNDOFF[self.name], UNIT_ROUNDOFF["float32"]
        tf32 = self.name.startswith("tf32")
        u_out = single if tf32 else u
        sigma = matmul_sigma(
            x, weight.T, u_in=u if tf32 else 0.0, u_acc=min(u_out, single), u_out=u_out, parts=self.where.case.tp
        )
        off = float((y - expected).square().mean().sqrt())
        return not off <= LOCAL_LIMIT * float((sigma.square() + (u_out * expected).square()).mean().sqrt())


def _judged(module: str, run: Tensor, reference: Tensor, noise: Tensor, u: float) -> Deviation:
    found = deviation(module, run, reference, noise, u)
    if module != LOSS or not math.isfinite(found.score):
        return found
    # One number: its noise may be small by luck, but not smaller than that of any sum of its size.
    sigma = max(float(noise.square().mean().sqrt()), 2 * u * float(reference.abs()))
    sigmas = float((run - reference).abs()) / sigma
    return dataclasses.replace(found, score=sigmas / LIMITS["scalar"], sigmas=sigmas, scope="scalar")


def _aligned(copies: Mapping[int, Tensor], full: tuple[int, ...]) -> Iterator[tuple[int, Tensor, slice | None]]:
    """Each rank's value, and which part of the last dimension it is of; None where it does not fit."""
    if all(tuple(value.shape) == full for value in copies.values()):
        for tp, value in sorted(copies.items()):
            yield tp, value, slice(None)
        return
    begin, total = 0, sum(value.shape[-1] for value in copies.values())
    for tp, value in sorted(copies.items()):
        end = begin + value.shape[-1]
        fits = total == full[-1] and tuple(value.shape[:-1]) == full[:-1]
        yield tp, value, slice(begin, end) if fits else None
        begin = end


def _joined(parts: Mapping[int, Tensor], extent: int) -> Tensor | None:
    """Slices side by side, or the first of equal copies; None if they make up neither, or copies differ."""
    values = [parts[tp] for tp in sorted(parts)]
    if values and all(value.shape[-1] == extent for value in values):
        return values[0] if all(torch.equal(value, values[0]) for value in values) else None
    if len({value.shape[:-1] for value in values}) != 1:
        return None
    joined = torch.cat(values, -1)
    return joined if joined.shape[-1] == extent else None


def matmul_sigma(a: Tensor, b: Tensor, *, u_in: float = 0.0, u_acc: float, u_out: float, parts: int = 1) -> Tensor:
    """Predicted standard deviation of the rounding in ``a @ b``; a [..., n, k], b [k, m] -> fp64 [..., n, m].

    One rounding to nearest with unit roundoff u has a relative variance of ``u**2 / 3 * E[1 / m**2]`` = 0.18 u**2 for
    mantissas m of logarithmic distribution in [1, 2). So each of a term's two rounded inputs gives 0.18 u_in**2 of its
    square; the k partial sums, which grow like a random walk, give 0.09 k u_acc**2 together, and the result gives
    0.18 u_out**2 of its own square (Higham & Mary 2019: roundings as independent random variables: variances add).

    Args:
        u_in: of inputs that are rounded before they are multiplied (TF32); 0 for inputs taken as they are.
        parts: partial sums that are rounded to u_out before they are added (row-parallel layers).
    """
    a, b = a.double(), b.double()
    squares = a.square() @ b.square()
    variance = (0.36 * u_in**2 + 0.09 * a.shape[-1] * u_acc**2) * squares + 0.18 * u_out**2 * (a @ b).square()
    return (variance + (0.18 * u_out**2 * squares if parts > 1 else 0.0)).sqrt()
