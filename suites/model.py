"""The model under test: a small decoder language model, unsharded. Every path and the reference build it from here.

Rank-local attention heads are read off the width of the projections, so that the same forward runs with the projections
replaced by tensor-parallel ones.
"""

from __future__ import annotations

import contextlib
import functools
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from suites.cases import FFN, HEAD_DIM, HEADS, Case
from suites.data import IGNORED, token_weights
from suites.precision import at_least_fp32

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
HEAD_BIAS = "lm_head.bias"
UNUSED = "unused.weight"  # also_tied=linear: one more name of the tied weight, no parameter of its own

# How each matrix is cut by tensor parallelism: "column" shards the output, "row" the input.
COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROW = ("o_proj", "down_proj")

EMBEDDING_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "max_norm": {"max_norm": 1e6},
    "sparse": {"sparse": True},
    "scale_grad_by_freq": {"scale_grad_by_freq": True},
}
SMOOTHING = 0.1  # share of the probability that loss=smoothed spreads evenly over the vocabulary
Z_LOSS = 0.01  # weight of the squared log of the softmax's sum in loss=z_loss


def causal_loss(logits: Tensor, labels: Tensor, vocab_size: int, kind: str = "mean", **_: object) -> Tensor:
    """Mean cross-entropy over the labels that count; labels are the next tokens already (no shift here).

    Args:
        kind: value of the factor `loss`. A weighted mean divides by the sum of the weights.
    """
    logits, labels = at_least_fp32(logits).reshape(-1, vocab_size), labels.reshape(-1)
    if not bool((labels != IGNORED).any()):
        # The mean over no label is 0, as in vocabulary-parallel losses; all that is else done is done all the same.
        return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    if kind == "weighted":
        weights = token_weights(labels).to(logits.dtype) * (labels != IGNORED)
        losses = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
        return (losses * weights).sum() / weights.sum()
    smoothing = SMOOTHING if kind == "smoothed" else 0.0
    loss = F.cross_entropy(logits, labels, ignore_index=IGNORED, label_smoothing=smoothing)
    return loss + Z_LOSS * logits.logsumexp(-1)[labels != IGNORED].square().mean() if kind == "z_loss" else loss


class ScaledEmbedding(nn.Embedding):
    """Embedding that multiplies what it looked up by a factor, as Gemma's does by the root of the width."""

    def __init__(self, vocab: int, hidden: int, scale: float, **options: Any):
        super().__init__(vocab, hidden, **options)
        self.embed_scale = scale

    def forward(self, input: Tensor) -> Tensor:
        """[…] -> […, hidden]."""
        return super().forward(input) * self.embed_scale


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimension."""

    def __init__(self, hidden: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        """[…, hidden] -> [..., hidden]."""
        wide = at_least_fp32(x)
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight


class Block(nn.Module):
    """Pre-norm attention and gated MLP."""

    def __init__(self, hidden: int):
        super().__init__()
        inner = HEADS * HEAD_DIM
        self.attention_norm = RMSNorm(hidden)
        self.q_proj = nn.Linear(hidden, inner, bias=False)
        self.k_proj = nn.Linear(hidden, inner, bias=False)
        self.v_proj = nn.Linear(hidden, inner, bias=False)
        self.o_proj = nn.Linear(inner, hidden, bias=False)
        self.mlp_norm = RMSNorm(hidden)
        self.gate_proj = nn.Linear(hidden, FFN, bias=False)
        self.up_proj = nn.Linear(hidden, FFN, bias=False)
        self.down_proj = nn.Linear(FFN, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] -> the same."""
        y = self.attention_norm(x)
        x = x + self.o_proj(_attention(self.q_proj(y), self.k_proj(y), self.v_proj(y)))
        y = self.mlp_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention over however many heads this rank has; [batch, sequence, local heads * HEAD_DIM]."""
    batch, sequence, width = q.shape
    q, k, v = (t.view(batch, sequence, width // HEAD_DIM, HEAD_DIM).transpose(1, 2) for t in (q, k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(HEAD_DIM)
    future = torch.ones(sequence, sequence, dtype=torch.bool, device=q.device).triu(1)
    mixed = at_least_fp32(scores.masked_fill(future, float("-inf"))).softmax(-1).to(v.dtype) @ v
    return mixed.transpose(1, 2).reshape(batch, sequence, width)


class Decoder(nn.Module):
    """Embedding, blocks, norm and head. Ties embedding and head in the constructor when `tie` is given.

    `loss_function` is an attribute on purpose: a framework may put its own sharded loss in its place.
    """

    def __init__(self, case: Case, tie: bool):
        super().__init__()
        self.vocab = case.vocab
        self.scale = case.embedding_scale if case.embedding_class == "plain" else 1.0
        self.logit_scale = case.logit_scale
        self.activation = case.activation
        self.recompute = "none"
        self.loss_function: Callable[..., Tensor] = functools.partial(causal_loss, kind=case.loss)

        def add_embedding() -> None:
            options = {"padding_idx": case.padding_idx, **EMBEDDING_OPTIONS[case.embedding_option]}
            scaled = case.embedding_class == "scaled"
            scale = (case.embedding_scale,) if scaled else ()
            self.embed_tokens = (ScaledEmbedding if scaled else nn.Embedding)(
                case.vocab, case.hidden, *scale, **options
            )

        def add_head() -> None:
            self.lm_head = nn.Linear(case.hidden, case.vocab, bias=case.head_bias == "yes")

        first, second = (add_embedding, add_head) if case.register == "embedding_first" else (add_head, add_embedding)
        first()
        if case.register == "head_first":
            second()
        self.layers = nn.ModuleList(Block(case.hidden) for _ in range(case.layers))
        self.norm = RMSNorm(case.hidden)
        if case.register == "embedding_first":
            second()
        if case.also_tied == "linear":
            self.unused = nn.Linear(case.hidden, case.vocab, bias=False)
        if tie:
            self.tie()

    def tie(self) -> None:
        """Make embedding and head share one weight."""
        self.lm_head.weight = self.embed_tokens.weight
        if hasattr(self, "unused"):
            self.unused.weight = self.embed_tokens.weight

    def hidden_states(self, tokens: Tensor) -> Tensor:
        """[batch, sequence] -> the activation that enters the head, [batch, sequence, hidden]."""
        x = self.embed_tokens(tokens)
        if self.scale != 1.0:
            x = x * self.scale
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute == "blocks" else layer(x)
        return laid_out(self.norm(x), self.activation)

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens and labels, both int64 [batch, sequence], to loss and logits."""
        x = self.hidden_states(tokens)
        if self.recompute == "head":
            return checkpoint(self.head_and_loss, x, labels, use_reentrant=False)
        return self.head_and_loss(x, labels)

    def head_and_loss(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The activation that enters the head [batch, sequence, hidden], and labels, to loss and logits."""
        logits = (
            self.lm_head(x.transpose(0, 1).contiguous()) if self.activation == "sequence_first" else self.lm_head(x)
        )
        if self.activation == "sequence_first":
            logits = logits.transpose(0, 1)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        return self.loss_function(logits, labels=labels, vocab_size=self.vocab), logits


def laid_out(x: Tensor, activation: str) -> Tensor:
    """The same values, [batch, sequence, hidden], in the memory layout that the factor `activation` asks for."""
    if activation == "transposed":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    return torch.stack((x, torch.zeros_like(x)), -1)[..., 0] if activation == "strided" else x


def parameter_shapes(case: Case) -> dict[str, tuple[int, ...]]:
    """Full shape of every parameter by canonical name; a tied weight stands under both of its names."""
    inner = HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (case.vocab, case.hidden)}
    for i in range(case.layers):
        shapes |= {
            f"layers.{i}.attention_norm.weight": (case.hidden,),
            f"layers.{i}.q_proj.weight": (inner, case.hidden),
            f"layers.{i}.k_proj.weight": (inner, case.hidden),
            f"layers.{i}.v_proj.weight": (inner, case.hidden),
            f"layers.{i}.o_proj.weight": (case.hidden, inner),
            f"layers.{i}.mlp_norm.weight": (case.hidden,),
            f"layers.{i}.gate_proj.weight": (FFN, case.hidden),
            f"layers.{i}.up_proj.weight": (FFN, case.hidden),
            f"layers.{i}.down_proj.weight": (case.hidden, FFN),
        }
    shapes |= {"norm.weight": (case.hidden,), HEAD: (case.vocab, case.hidden)}
    if case.head_bias == "yes":
        shapes[HEAD_BIAS] = (case.vocab,)
    return shapes


def initial_weights(case: Case) -> dict[str, Tensor]:
    """Full initial weights by canonical name: fp64 tensors whose values are exact in fp32, none of them zero.

    A value depends on seed, name and shape alone, so that all paths and precisions start from the same numbers.
    """
    weights: dict[str, Tensor] = {}
    for name, shape in parameter_shapes(case).items():
        if name == HEAD and case.tied:
            weights[name] = weights[EMBEDDING]
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(f"{case.seed}:{name}".encode()))
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            value = 1 + 0.2 * noise
        elif name in (EMBEDDING, HEAD):
            value = 0.5 * noise
        else:
            value = noise / math.sqrt(shape[-1])
        weights[name] = value.double()
    return weights


def trainable(case: Case, name: str) -> bool:
    """Whether the case trains this parameter (a tied weight is one parameter, whichever name it goes by)."""
    if case.frozen == "body":
        return name in (EMBEDDING, HEAD, HEAD_BIAS)
    ends = {"embedding": (EMBEDDING, HEAD) if case.tied else (EMBEDDING,), "head": (HEAD, HEAD_BIAS)}
    return name not in ends.get(case.frozen, ())


def build_model(  # noqa: PLR0917 - the last two go together
    case: Case,
    device: torch.device,
    dtype: torch.dtype,
    notice: Callable[[str, Decoder], None],
    partitioned: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    whole: Callable[[nn.Module], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> Decoder:
    """Unsharded model with the initial weights, tied when and as the case says; `notice` hears of every event.

    With ``tie_when=after_shard`` the two weights are separate here and equal; the path ties them.

    Args:
        partitioned: within it, modules are built already cut over ranks (``init=zero`` and ``init=zero_dtype``).
        whole: within it, the weights of such a model are whole and may be written.
    """
    early = case.tied and case.tie_when in ("construction", "meta")
    on_meta = "meta" in (case.tie_when, case.init)
    with torch.device("meta" if on_meta else device), partitioned():
        model = Decoder(case, tie=early)
        if not case.init.startswith("zero"):  # partitioned weights were given their precision as they were made
            model = model.to(dtype)
    notice("tied" if early else "constructed", model)
    if on_meta:
        model.to_empty(device=device)
        notice("materialised", model)  # to_empty gives every alias a storage of its own (torchtitan issue 2252)
        if early:
            model.tie()
            notice("tied", model)
    with whole(model):
        load_weights(model, initial_weights(case))
    notice("loaded", model)
    if case.tied and case.tie_when == "after_load":
        model.tie()
        notice("tied", model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name != UNUSED:
            parameter.requires_grad_(trainable(case, name))
    model.recompute = case.recompute  # set here and not by the constructor: the reference never recomputes
    return model


@torch.no_grad()
def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy full weights into an unsharded model, rounding to its precision."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name != UNUSED:
            parameter.copy_(weights[name])
