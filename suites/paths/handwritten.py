"""The hand-written path: tensor parallelism and ZeRO 0, 1, 2 in plain torch.distributed, every collective spelled out.

It states what the frameworks must do, and it is where `suites.faults` puts its bugs: each step that can go wrong is a
small function or class of its own. Notation of shapes: b batch, s sequence, h hidden, v vocabulary; a trailing "/tp"
is local.

    head=vocab     embedding and head [v/tp, h]; lookup all-reduced; logits stay [b, s, v/tp]; sharded cross-entropy
    head=gathered  the same shards; logits gathered to [b, s, v]; ordinary cross-entropy
    head=row       embedding and head [v, h/tp]; lookup all-gathered; logits all-reduced to [b, s, v]

Shards are cut as `torch.tensor_split` does, so sizes may be uneven.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from suites import model as models
from suites import optimizers, precision
from suites.cases import Case
from suites.data import IGNORED, MicroBatch, token_weights
from suites.model import COLUMN, ROW, SMOOTHING, Z_LOSS, Decoder
from suites.observe import Piece
from suites.paths import Notice
from suites.paths import handwritten_checkpoint as checkpoints


@dataclass(frozen=True)
class Mesh:
    """This rank's place: rank = dp_rank * tp + tp_rank."""

    tp: int
    dp: int
    tp_rank: int
    dp_rank: int
    tp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup

    @classmethod
    def create(cls, tp: int, dp: int) -> Mesh:
        """Make all groups on all ranks, in the same order, and keep one's own."""
        rank = dist.get_rank()
        tp_groups = [dist.new_group([d * tp + t for t in range(tp)]) for d in range(dp)]
        dp_groups = [dist.new_group([d * tp + t for d in range(dp)]) for t in range(tp)]
        return cls(tp, dp, rank % tp, rank // tp, tp_groups[rank // tp], dp_groups[rank % tp])

    def destroy(self) -> None:
        """Give the groups back."""
        dist.destroy_process_group(self.tp_group)
        dist.destroy_process_group(self.dp_group)


# --- collectives ---------------------------------------------------------------------------------------------------


def all_reduce(tensor: Tensor, group: dist.ProcessGroup, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """Reduced over `group` into a new contiguous tensor; the argument, strided or not, keeps its values."""
    reduced = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(reduced, op=op, group=group)
    return reduced


def all_gather_last(tensor: Tensor, group: dist.ProcessGroup, sizes: Sequence[int]) -> Tensor:
    """[…, sizes[rank]] -> […, sum(sizes)]; shards are padded to the longest since all ranks must send alike."""
    longest = max(sizes)
    padded = F.pad(tensor, (0, longest - tensor.shape[-1])).contiguous()
    received = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(received, padded, group=group)
    return torch.cat([part[..., :size] for part, size in zip(received, sizes, strict=True)], dim=-1)


def shard_sizes(extent: int, parts: int) -> list[int]:
    """Sizes of `extent` cut into `parts`, the longer shards first."""
    return [len(part) for part in torch.arange(extent).tensor_split(parts)]


# --- the four conjugate pairs of tensor parallelism (Megatron-LM, arXiv 1909.08053, section 3) ---------------------


class CopyToTP(torch.autograd.Function):
    """Replicated activation into a column-parallel layer: identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh) -> Tensor:
        """Identity."""
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Sum of every rank's part of the gradient."""
        return all_reduce(gradient, ctx.mesh.tp_group), None


class ReduceFromTP(torch.autograd.Function):
    """Partial sums out of a row-parallel layer: all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh) -> Tensor:
        """Sum over the tensor-parallel ranks."""
        return all_reduce(x, mesh.tp_group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Identity: every rank's partial sum has the whole gradient."""
        return gradient, None


class GatherFromTP(torch.autograd.Function):
    """Slices of the last dimension to the replicated whole: all-gather forward, own slice backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, sizes: list[int]) -> Tensor:
        """[…, sizes[rank]] -> […, sum(sizes)]."""
        ctx.mesh, ctx.sizes = mesh, sizes
        return all_gather_last(x, mesh.tp_group, sizes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Own slice of the (replicated) gradient."""
        return own_slice(gradient, ctx.mesh, ctx.sizes), None, None


class ScatterToTP(torch.autograd.Function):
    """Replicated whole to own slice of the last dimension: slice forward, all-gather backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, sizes: list[int]) -> Tensor:
        """[…, sum(sizes)] -> […, sizes[rank]]."""
        ctx.mesh, ctx.sizes = mesh, sizes
        return own_slice(x, mesh, sizes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Every rank's slice of the gradient, put together."""
        return all_gather_last(gradient, ctx.mesh.tp_group, ctx.sizes), None, None


def own_slice(x: Tensor, mesh: Mesh, sizes: Sequence[int]) -> Tensor:
    """This rank's slice of the last dimension."""
    return x.split(list(sizes), dim=-1)[mesh.tp_rank].contiguous()


# --- layers --------------------------------------------------------------------------------------------------------


class ColumnParallel(nn.Module):
    """Linear layer sharded over its output; the result stays sharded. Weight [out/tp, in]."""

    def __init__(self, weight: nn.Parameter, mesh: Mesh):
        super().__init__()
        self.weight, self.mesh = weight, mesh

    def forward(self, x: Tensor) -> Tensor:
        """[…, in] -> [..., out/tp]."""
        return F.linear(CopyToTP.apply(x, self.mesh), self.weight)


class RowParallel(nn.Module):
    """Linear layer sharded over its input. Weight [out, in/tp]."""

    def __init__(self, weight: nn.Parameter, mesh: Mesh):
        super().__init__()
        self.weight, self.mesh = weight, mesh

    def forward(self, x: Tensor) -> Tensor:
        """[…, in/tp] -> [..., out]."""
        return ReduceFromTP.apply(F.linear(x, self.weight), self.mesh)


class VocabParallelEmbedding(nn.Module):
    """Embedding sharded over the vocabulary. Weight [v/tp, h], rows `start .. end` of the whole."""

    def __init__(self, weight: nn.Parameter, mesh: Mesh, vocab: int, padding_idx: int | None):
        super().__init__()
        self.weight, self.mesh = weight, mesh
        sizes = shard_sizes(vocab, mesh.tp)
        self.start = sum(sizes[: mesh.tp_rank])
        self.end = self.start + sizes[mesh.tp_rank]
        self.padding_idx = local_padding_idx(padding_idx, self.start, self.end)

    def forward(self, tokens: Tensor) -> Tensor:
        """[b, s] -> [b, s, h]: rows of other ranks contribute zero, then all ranks' lookups are summed."""
        outside = (tokens < self.start) | (tokens >= self.end)
        local = (tokens - self.start).masked_fill(outside, 0)
        found = F.embedding(local, self.weight, padding_idx=self.padding_idx)
        return ReduceFromTP.apply(found.masked_fill(outside.unsqueeze(-1), 0), self.mesh)


def local_padding_idx(padding_idx: int | None, start: int, end: int) -> int | None:
    """The padding row's index in the shard ``start .. end``, None where another rank holds it."""
    return padding_idx - start if padding_idx is not None and start <= padding_idx < end else None


class VocabParallelHead(nn.Module):
    """Output head sharded over the vocabulary. Weight [v/tp, h]; logits are gathered if `gather` is set."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, mesh: Mesh, vocab: int, gather: bool):
        super().__init__()
        self.weight, self.bias, self.mesh, self.gather = weight, bias, mesh, gather
        self.sizes = shard_sizes(vocab, mesh.tp)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, v/tp], or [b, s, v] when gathered."""
        logits = F.linear(CopyToTP.apply(x, self.mesh), self.weight, self.bias)
        return GatherFromTP.apply(logits, self.mesh, self.sizes) if self.gather else logits


class HiddenParallelEmbedding(nn.Module):
    """Embedding sharded over the hidden dimension. Weight [v, h/tp]: every rank has a slice of every row."""

    def __init__(self, weight: nn.Parameter, mesh: Mesh, hidden: int, padding_idx: int | None):
        super().__init__()
        self.weight, self.mesh, self.padding_idx = weight, mesh, padding_idx
        self.sizes = shard_sizes(hidden, mesh.tp)

    def forward(self, tokens: Tensor) -> Tensor:
        """[b, s] -> [b, s, h]: own slice of each token's row, then all slices put together."""
        found = F.embedding(tokens, self.weight, padding_idx=self.padding_idx)
        return GatherFromTP.apply(found, self.mesh, self.sizes)


class RowParallelHead(nn.Module):
    """Output head sharded over the hidden dimension, fed with the replicated activation. Weight [v, h/tp], bias [v]."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, mesh: Mesh, hidden: int):
        super().__init__()
        self.weight, self.bias, self.mesh = weight, bias, mesh
        self.sizes = shard_sizes(hidden, mesh.tp)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, h] -> [b, s, v]: product with own slice of the hidden dimension, summed over ranks, then the bias."""
        partial = F.linear(ScatterToTP.apply(x, self.mesh, self.sizes), self.weight)
        logits = ReduceFromTP.apply(partial, self.mesh)
        return logits if self.bias is None else logits + self.bias


# --- loss over sharded logits --------------------------------------------------------------------------------------


class VocabParallelCrossEntropy(torch.autograd.Function):
    """Cross-entropy of each token from logits sharded over the vocabulary; the full logits never exist on one rank.

    With `smoothing` s the target is (1 - s) times one-hot plus s / vocabulary; with `z_loss` z each token adds z times
    the square of the logarithm of its softmax's sum.
    """

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes no keywords
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        start: int,
        mesh: Mesh,
        vocab: int,
        smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> Tensor:
        """Logits [n, v/tp] and labels [n] to losses [n]; ignored labels give zero."""
        counted = labels != IGNORED
        here = counted & (labels >= start) & (labels < start + logits.shape[-1])
        local = torch.where(here, labels - start, 0)
        ctx.dtype = logits.dtype
        logits = precision.at_least_fp32(logits)
        maximum = global_maximum(logits, mesh)
        shifted = logits - maximum.unsqueeze(-1)
        exponentials = shifted.exp()
        total = all_reduce(exponentials.sum(-1), mesh.tp_group)
        target = torch.where(here, shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1), 0)
        target = all_reduce(target, mesh.tp_group)
        losses = total.log() - target
        if smoothing:
            losses = losses + smoothing * (target - mean_logit(shifted, mesh, vocab))
        log_sum = softmax_log_sum(total, maximum, mesh)
        if z_loss:
            losses = losses + z_loss * log_sum.square()
        ctx.vocab, ctx.smoothing, ctx.z_loss = vocab, smoothing, z_loss
        ctx.save_for_backward(exponentials / total.unsqueeze(-1), local, here, counted, log_sum)
        return torch.where(counted, losses, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None, None, None]:
        """Softmax minus target, each token weighted by its own upstream gradient."""
        softmax, local, here, counted, log_sum = ctx.saved_tensors
        result = softmax * (1 + 2 * ctx.z_loss * log_sum).unsqueeze(-1) if ctx.z_loss else softmax.clone()
        one_hot = -here.unsqueeze(-1).to(result.dtype)
        result.scatter_add_(-1, local.unsqueeze(-1), one_hot * (1 - ctx.smoothing))
        if ctx.smoothing:
            result -= ctx.smoothing / ctx.vocab
        upstream = (gradient * counted).unsqueeze(-1)
        return (result * upstream).to(ctx.dtype), None, None, None, None, None, None


def global_maximum(logits: Tensor, mesh: Mesh) -> Tensor:
    """Largest logit of each token over all shards: [n, v/tp] -> [n]."""
    return all_reduce(logits.amax(-1), mesh.tp_group, dist.ReduceOp.MAX)


def mean_logit(logits: Tensor, mesh: Mesh, vocab: int) -> Tensor:
    """Mean logit of each token over the whole vocabulary: [n, v/tp] -> [n]."""
    return all_reduce(logits.sum(-1), mesh.tp_group) / vocab


def softmax_log_sum(total: Tensor, maximum: Tensor, mesh: Mesh) -> Tensor:
    """Logarithm of the softmax's sum over all shards, from the sum of the shifted exponentials; all [n]."""
    return total.log() + maximum


class VocabParallelLoss:
    """Takes the place of `suites.model.causal_loss` where logits stay sharded."""

    def __init__(self, mesh: Mesh, vocab: int, kind: str = "mean"):
        self.mesh, self.vocab, self.kind = mesh, vocab, kind
        self.start = sum(shard_sizes(vocab, mesh.tp)[: mesh.tp_rank])

    def __call__(self, logits: Tensor, labels: Tensor, **_: object) -> Tensor:
        """Logits [b, s, v/tp] and labels [b, s] to the mean over labels that count, or their weighted mean."""
        losses = self.token_losses(logits, labels)
        counted = labels.flatten() != IGNORED
        if self.kind == "weighted":
            weights = token_weights(labels) * counted
            return (losses * weights).sum() / weights.sum()
        return losses.sum() / counted.sum().clamp(min=1)  # the mean over no label is 0

    def token_losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Loss of each token, flattened; zero where the label is ignored."""
        smoothing = SMOOTHING if self.kind == "smoothed" else 0.0
        z_loss = Z_LOSS if self.kind == "z_loss" else 0.0
        flat = logits.flatten(0, 1), labels.flatten()
        return VocabParallelCrossEntropy.apply(*flat, self.start, self.mesh, self.vocab, smoothing, z_loss)


# --- sharding the model --------------------------------------------------------------------------------------------


class Sharder:
    """Cuts parameters, each one once: modules that shared a weight before share its shard after.

    Looking the original up by identity, whatever order the modules come in, is what keeps a tie (the bug of
    DeepSpeed's tied row-parallel head was to look at the tie only after one of the two modules had been replaced).
    """

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self._shards: dict[int, tuple[Tensor, nn.Parameter]] = {}  # id -> (original, kept alive; its shard)

    def cut(self, whole: Tensor, dim: int) -> nn.Parameter:
        """This rank's shard of `whole` along `dim`, marked with ``tp_dim``."""
        if id(whole) not in self._shards:
            local = whole.detach().tensor_split(self.mesh.tp, dim)[self.mesh.tp_rank].clone()
            shard = nn.Parameter(local, requires_grad=whole.requires_grad)
            shard.tp_dim = dim  # type: ignore[attr-defined]
            self._shards[id(whole)] = (whole, shard)
        return self._shards[id(whole)][1]


def shard_model(model: Decoder, case: Case, mesh: Mesh) -> None:
    """Replace the model's layers by tensor-parallel ones, in place, in the order in which they are registered."""
    cut = Sharder(mesh).cut
    for block in model.layers:
        for name in COLUMN:
            setattr(block, name, ColumnParallel(cut(getattr(block, name).weight, 0), mesh))
        for name in ROW:
            setattr(block, name, RowParallel(cut(getattr(block, name).weight, 1), mesh))

    embedding, head = model.embed_tokens, model.lm_head
    replaced: dict[str, nn.Module]
    if case.head == "row":
        replaced = {
            "embed_tokens": HiddenParallelEmbedding(cut(embedding.weight, 1), mesh, case.hidden, case.padding_idx),
            "lm_head": RowParallelHead(cut(head.weight, 1), head.bias, mesh, case.hidden),
        }
    else:
        bias = None if head.bias is None else cut(head.bias, 0)
        gather = case.head == "gathered"
        replaced = {
            "embed_tokens": VocabParallelEmbedding(cut(embedding.weight, 0), mesh, case.vocab, case.padding_idx),
            "lm_head": VocabParallelHead(cut(head.weight, 0), bias, mesh, case.vocab, gather),
        }
        if not gather:
            model.loss_function = VocabParallelLoss(mesh, case.vocab, case.loss)
    for name, module in replaced.items():
        setattr(model, name, module)
    if case.tied and case.tie_when == "after_shard":
        model.tie()


# --- data parallelism ----------------------------------------------------------------------------------------------


def squared_norm(parameter: Tensor, gradient: Tensor, mesh: Mesh) -> Tensor:
    """This rank's share of the global squared norm: sharded parameters count everywhere, replicated ones on one
    rank."""
    counts = getattr(parameter, "tp_dim", None) is not None or mesh.tp_rank == 0
    square = gradient.square().sum()
    return square if counts else torch.zeros_like(square)


class DataParallel:
    """What the ZeRO stages share: gradients of a step, summed over its micro-batches.

    Under a low precision they are summed in fp32, without the loss scale, and the optimizer works on fp32 master
    weights (Micikevicius et al., arXiv 1710.03740); else in the parameters' own ``grad``.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], case: Case, mesh: Mesh):
        self.parameters, self.case, self.mesh = parameters, case, mesh
        self.low = case.dtype in precision.LOW
        self.sums: dict[str, Tensor] = {}

    def collect(self) -> None:
        """After each micro-batch: add its gradients to the step's."""
        if not self.low:
            return
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                gradient = parameter.grad.float() / precision.LOSS_SCALE.get(self.case.dtype, 1.0)
                self.sums[name] = self.sums[name] + gradient if name in self.sums else gradient
                parameter.grad = None

    def collected(self, name: str) -> Tensor | None:
        """The step's gradient of this rank, None where backward left none."""
        return self.sums.get(name) if self.low else self.parameters[name].grad


class ZeroStage0(DataParallel):
    """Plain data parallelism: gradients all-reduced to their mean, the whole optimizer on every rank."""

    stage = 0

    def __init__(self, parameters: Mapping[str, nn.Parameter], case: Case, mesh: Mesh):
        super().__init__(parameters, case, mesh)
        self.own = master_weights(parameters, case)  # the parameters themselves, unless their precision is low
        self.optimizer = optimizers.make(case, self.own.values())

    def reduce(self) -> None:
        """Mean over the data-parallel ranks; once a step, after its last micro-batch."""
        for name, own in self.own.items():
            own.grad = mean_over_dp(self.collected(name), self.mesh)
        self.sums.clear()

    def gradients(self) -> dict[str, Piece]:
        """The whole local gradient of each parameter."""
        return {name: Piece.whole(p.grad) for name, p in self.own.items() if p.grad is not None}

    def masters(self) -> dict[str, Piece]:
        """Local master weights."""
        return {name: Piece.whole(own) for name, own in self.own.items()} if self.low else {}

    def step(self) -> float:
        """Clip by the global norm, update, clear."""
        graded = {name: own.grad for name, own in self.own.items() if own.grad is not None}
        shares = sum(squared_norm(self.parameters[name], gradient, self.mesh) for name, gradient in graded.items())
        norm = all_reduce(torch.as_tensor(shares), self.mesh.tp_group).sqrt().item()
        coefficient = optimizers.clip_coefficient(norm, self.case.clip)
        for gradient in graded.values():
            gradient *= coefficient  # noqa: PLW2901 - in place
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.publish()
        return norm

    @torch.no_grad()
    def publish(self) -> None:
        """Round the master weights into the model's parameters."""
        for name, own in self.own.items() if self.low else ():
            self.parameters[name].copy_(own)

    def saved(self) -> checkpoints.Section:
        """What a checkpoint holds of each weight that the optimizer updates: the weight and its moments."""
        found = {}
        for name, own in self.own.items():
            slots, counts = checkpoints.moments(self.optimizer.state[own])
            found[name] = checkpoints.entry(self.parameters[name], {checkpoints.WEIGHT: own, **slots}, counts)
        return found

    @torch.no_grad()
    def load(self, wholes: Mapping[str, checkpoints.Whole]) -> None:
        """Take weights and moments from a checkpoint's full tensors."""
        for name, own in self.own.items():
            slots = own_slots(wholes[name], self.mesh, own.device)
            own.copy_(slots.pop(checkpoints.WEIGHT))
            counts = {key: torch.tensor(count) for key, count in wholes[name].counts.items()}
            if slots or counts:
                self.optimizer.state[own] = slots | counts

    def optimized(self) -> list[Tensor]:
        """The model's parameter behind each weight that the optimizer holds."""
        behind = {id(own): self.parameters[name] for name, own in self.own.items()}
        return [behind.get(id(p), p) for group in self.optimizer.param_groups for p in group["params"]]


def master_weights(parameters: Mapping[str, nn.Parameter], case: Case) -> dict[str, nn.Parameter]:
    """What the optimizer updates: fp32 copies under a low precision, else the parameters themselves."""
    if case.dtype not in precision.LOW:
        return dict(parameters)
    return {name: nn.Parameter(p.detach().float().clone()) for name, p in parameters.items()}


def mean_over_dp(gradient: Tensor | None, mesh: Mesh) -> Tensor:
    """Mean of a gradient over the data-parallel ranks."""
    assert gradient is not None
    return all_reduce(gradient, mesh.dp_group) / mesh.dp


class ZeroPartitioned(DataParallel):
    """ZeRO 1 and 2: all parameters in one flat vector, each data-parallel rank updates its own equal part of it.

    Stage 1 all-reduces the gradients, stage 2 reduce-scatters them so that a rank keeps its own part only; both
    all-gather the updated parts (Rajbhandari et al., arXiv 1910.02054).
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], case: Case, mesh: Mesh):
        super().__init__(parameters, case, mesh)
        self.stage = -1  # until gradients were reduced
        self.offsets: dict[str, int] = {}
        end = 0
        for name, parameter in parameters.items():
            self.offsets[name] = end
            end += parameter.numel()
        self.part = -(-end // mesh.dp)  # elements of one rank's part; the last part is padded with zeros
        self.start = self.part * mesh.dp_rank
        weights = [p.detach().to(precision.master_dtype(case)) for p in parameters.values()]
        own = self._flatten(weights)[self.start : self.start + self.part].clone()
        self.own = nn.Parameter(own)
        self.optimizer = optimizers.make(case, [self.own])

    def _flatten(self, tensors: Sequence[Tensor]) -> Tensor:
        flat = torch.cat([t.reshape(-1) for t in tensors])
        return F.pad(flat, (0, self.part * self.mesh.dp - flat.numel()))

    def reduce(self) -> None:
        """Mean of the gradients over the data-parallel ranks, into this rank's part."""
        flat = self._flatten([zeros_for_none(self.collected(n), self.parameters[n]) for n in self.parameters])
        if self.case.zero == 1:
            total = all_reduce(flat, self.mesh.dp_group)[self.start : self.start + self.part].clone()
            self.stage = 1
        else:
            total = torch.empty_like(self.own)
            dist.reduce_scatter_single(total, flat, group=self.mesh.dp_group)
            self.stage = 2
        self.own.grad = total / self.mesh.dp
        self.sums.clear()
        for parameter in self.parameters.values():
            parameter.grad = None

    def _overlaps(self) -> dict[str, tuple[int, int, int]]:
        """Per parameter: begin and end inside its own flat tensor of what this rank's part holds, and where in the
        part."""
        found = {}
        for name, parameter in self.parameters.items():
            begin = max(self.start - self.offsets[name], 0)
            end = min(self.start + self.part - self.offsets[name], parameter.numel())
            found[name] = (begin, max(begin, end), self.offsets[name] + begin - self.start)
        return found

    def gradients(self) -> dict[str, Piece]:
        """What this rank's part holds of each parameter's gradient; empty pieces included."""
        assert self.own.grad is not None
        return self._pieces(self.own.grad)

    def masters(self) -> dict[str, Piece]:
        """What this rank's part holds of each master weight."""
        return self._pieces(self.own.detach()) if self.low else {}

    def _pieces(self, part: Tensor) -> dict[str, Piece]:
        return {
            name: Piece.part(part[at : at + end - begin], begin, self.parameters[name].shape)
            if end > begin
            else Piece.part(part[:0], 0, self.parameters[name].shape)
            for name, (begin, end, at) in self._overlaps().items()
        }

    def step(self) -> float:
        """Clip by the global norm, update the own part, all-gather all parts into the model's parameters."""
        assert self.own.grad is not None
        own = torch.zeros((), dtype=self.own.dtype, device=self.own.device)
        for name, (begin, end, at) in self._overlaps().items():
            own += squared_norm(self.parameters[name], self.own.grad[at : at + end - begin], self.mesh)
        norm = all_reduce(all_reduce(own, self.mesh.tp_group), self.mesh.dp_group).sqrt().item()
        self.own.grad *= optimizers.clip_coefficient(norm, self.case.clip)
        self.optimizer.step()
        self.own.grad = None
        self.publish()
        return norm

    @torch.no_grad()
    def publish(self) -> None:
        """All-gather the updated parts and copy them into the model's parameters."""
        flat = torch.empty(self.part * self.mesh.dp, dtype=self.own.dtype, device=self.own.device)
        dist.all_gather_single(flat, self.own.detach(), group=self.mesh.dp_group)
        for name, parameter in self.parameters.items():
            at = self.offsets[name]
            parameter.copy_(flat[at : at + parameter.numel()].view_as(parameter))

    def saved(self) -> checkpoints.Section:
        """What a checkpoint holds of this rank's part of each weight and of its moments."""
        slots, counts = checkpoints.moments(self.optimizer.state[self.own])
        slots = {checkpoints.WEIGHT: self.own, **slots}
        found = {}
        for name, (begin, end, at) in self._overlaps().items():
            parts = {k: slot[at : at + end - begin] if end > begin else slot[:0] for k, slot in slots.items()}
            found[name] = checkpoints.entry(self.parameters[name], parts, counts, begin)
        return found

    @torch.no_grad()
    def load(self, wholes: Mapping[str, checkpoints.Whole]) -> None:
        """Take the own part of weights and moments from a checkpoint's full tensors."""
        mine = [own_slots(wholes[name], self.mesh, self.own.device) for name in self.parameters]
        end = self.start + self.part
        slots = {key: self._flatten([slots[key] for slots in mine])[self.start : end].clone() for key in mine[0]}
        self.own.copy_(slots.pop(checkpoints.WEIGHT))
        counts = next(iter(wholes.values())).counts
        if slots or counts:
            self.optimizer.state[self.own] = slots | {key: torch.tensor(count) for key, count in counts.items()}

    def optimized(self) -> list[Tensor]:
        """The parameters that the flat vector was made of."""
        return list(self.parameters.values())


def zeros_for_none(gradient: Tensor | None, parameter: nn.Parameter) -> Tensor:
    """The gradient, or zeros where backward left none."""
    return torch.zeros_like(parameter) if gradient is None else gradient


def own_slots(whole: checkpoints.Whole, mesh: Mesh, device: torch.device) -> dict[str, Tensor]:
    """This rank's shard of a weight and its moments."""
    cut = lambda slot: checkpoints.own_shard(slot, whole.tp_dim, mesh.tp, mesh.tp_rank)  # noqa: E731
    return {name: cut(slot).to(device, copy=True).contiguous() for name, slot in whole.slots.items()}


# --- the trainer ---------------------------------------------------------------------------------------------------


class HandwrittenTrainer:
    """One rank of the hand-written path."""

    def __init__(self, case: Case, device: torch.device, notice: Notice):
        self.case, self.device, self.notice = case, device, notice
        self.mesh = Mesh.create(case.tp, case.dp)
        self.tp_rank, self.dp_rank = self.mesh.tp_rank, self.mesh.dp_rank
        self.steps = 0
        self.build(case)

    def build(self, case: Case) -> None:
        """Model, sharded, and optimizer."""
        self.model = models.build_model(case, self.device, getattr(torch, case.dtype), self._tell)
        shard_model(self.model, case, self.mesh)
        if case.tied and case.tie_when == "after_shard":
            self._tell("tied", self.model)
        self._tell("sharded", self.model)
        zero = ZeroStage0 if case.zero == 0 else ZeroPartitioned
        self.data_parallel = zero(trained_once(self.model), case, self.mesh)

    def _tell(self, event: str, model: Decoder) -> None:
        self.notice(event, model.embed_tokens.weight, model.lm_head.weight)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Live parameters by canonical name, both names of a tie."""
        return dict(self.model.named_parameters(remove_duplicate=False))

    def module(self) -> nn.Module:
        """The live sharded model."""
        return self.model

    def layout(self) -> dict[str, str]:
        """Class of the live module that holds each parameter."""
        return {name: type(self.model.get_submodule(name.rpartition(".")[0])).__name__ for name in self.parameters()}

    def forward_backward(self, micro: MicroBatch, last: bool) -> tuple[Tensor, Tensor]:
        """One micro-batch; gradients add up over the micro-batches of a step and are reduced after the last."""
        loss, logits = self.model(micro.tokens, micro.labels)
        scale = precision.LOSS_SCALE.get(self.case.dtype, 1.0)
        (loss / self.case.accumulate * scale).backward()
        self.data_parallel.collect()
        if last:
            self.data_parallel.reduce()
        return loss.detach(), logits.detach()

    def gradients(self) -> dict[str, Piece]:
        """Own part of every gradient, a tied one under both of its names."""
        return both_names(self.data_parallel.gradients(), self.parameters())

    def step(self) -> float:
        """Clip, update, clear; returns the global gradient norm. After the first step, resume if the case says so."""
        norm = self.data_parallel.step()
        self.steps += 1
        if self.case.resume == "reload" and self.steps == 1:
            self.resume()
        return norm

    def resume(self) -> None:
        """Save, tear down, build anew with other weights, load: as a run does that was stopped and is resumed."""
        with contextlib.ExitStack() as stack:
            made = tempfile.TemporaryDirectory(prefix="tiebench-") if dist.get_rank() == 0 else None
            path = stack.enter_context(made) if made else ""
            directory = Path(checkpoints.shared_directory(path, self.device))
            self.save(directory)
            del self.model, self.data_parallel
            self.build(self.case.but(seed=self.case.seed + 1))
            dist.barrier()  # every file is written
            self.load(directory)
            dist.barrier()  # every file was read
        self._tell("resumed", self.model)

    def save(self, directory: Path) -> None:
        """Write this rank's file of a checkpoint."""
        model = {n: checkpoints.entry(p, {checkpoints.WEIGHT: p}) for n, p in self.model.named_parameters()}
        checkpoints.save(directory, (self.tp_rank, self.dp_rank), model, self.data_parallel.saved())

    @torch.no_grad()
    def load(self, directory: Path) -> None:
        """Take weights and optimizer state from a checkpoint of as many ranks."""
        files = checkpoints.read(directory, self.case.world_size)
        wholes = checkpoints.consolidate(files, "model")
        for name, parameter in self.model.named_parameters():
            parameter.copy_(own_slots(wholes[name], self.mesh, self.device)[checkpoints.WEIGHT])
        self.data_parallel.load(checkpoints.consolidate(files, "optimizer"))

    def weights(self) -> dict[str, Piece]:
        """Whole local shard of every parameter."""
        return {name: Piece.whole(parameter) for name, parameter in self.parameters().items()}

    def optimized(self) -> list[Tensor]:
        """The parameters that the optimizer (or its flat vector) was made of."""
        return self.data_parallel.optimized()

    def masters(self) -> dict[str, Piece]:
        """Own part of every fp32 master weight; empty where the weights themselves are updated."""
        return both_names(self.data_parallel.masters(), self.parameters())

    def saved(self) -> dict[str, Piece]:
        """None: a rank's file holds its own shards."""
        return {}

    def zero_stage(self) -> int:
        """0, or by how the partitioned optimizer reduced its gradients: 1 all-reduce, 2 reduce-scatter."""
        return self.data_parallel.stage

    def close(self) -> None:
        """Destroy the groups."""
        self.mesh.destroy()


def trained_once(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every trainable parameter once (a tied weight under its first name)."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def both_names(pieces: Mapping[str, Piece], parameters: Mapping[str, nn.Parameter]) -> dict[str, Piece]:
    """Pieces under all canonical names: a shared parameter's piece stands under each of its names."""
    by_object = {id(parameters[name]): piece for name, piece in pieces.items()}
    return {name: by_object[id(p)] for name, p in parameters.items() if id(p) in by_object}


def build(case: Case, device: torch.device, notice: Notice) -> HandwrittenTrainer:
    """Builder of this path, see `suites.paths`."""
    return HandwrittenTrainer(case, device, notice)
