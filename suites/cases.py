"""Cases: frozen points of the factor space. The fields of `Case` are the one table of factors.

A case id is ``path:factor=value,…``. It always spells tie, head and zero, then every other factor that differs from its
default, in the order of the table. Ids are stable over versions: never rename a factor, never change a default; add new
factors at the end with a default that means "as before".

To add a factor: one field below. To refuse a combination: one `Rule` below.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

PATHS = ("handwritten", "deepspeed")
ALWAYS_SPELLED = ("tie", "head", "zero")

HEADS = 4  # attention heads; tp must divide them
HEAD_DIM = 8
FFN = 48  # width of the MLP; tp must divide it


class CaseError(ValueError):
    """A case that does not exist: unknown factor or value, or a combination that a path does not support."""


@dataclass(frozen=True)
class Factor:
    """One axis of the factor space.

    Args:
        values: the closed list of values, or None where `low` bounds an open range.
        low: the smallest value of an open range (inclusive).
        optional: the value may be None, spelled ``none``.
        meaning: what the axis is, for people.
        unsupported: path -> value -> why this path cannot run it.
    """

    name: str
    kind: type
    default: Any
    values: tuple[Any, ...] | None
    low: float | None
    optional: bool
    meaning: str
    unsupported: Mapping[str, Mapping[Any, str]]

    def parse(self, text: str) -> Any:
        """Value of this factor from its spelling in an id.

        Raises:
            CaseError: not a value of this factor.
        """
        if self.optional and text == "none":
            return None
        try:
            value = self.kind(text)
        except ValueError:
            raise CaseError(f"{self.name}={text}: not {_article(self.kind)}; {self.domain()}") from None
        self.check(value)
        if self.spell(value) != text:
            raise CaseError(f"{self.name}={text}: write it as {self.name}={self.spell(value)}")
        return value

    def check(self, value: Any) -> None:
        """Raise `CaseError` unless `value` belongs to this factor."""
        if value is None and self.optional:
            return
        if type(value) is not self.kind:
            raise CaseError(f"{self.name}={value!r}: not {_article(self.kind)}; {self.domain()}")
        if self.values is not None and value not in self.values:
            raise CaseError(f"{self.name}={value}: unknown value; {self.domain()}")
        number: Any = value
        if self.low is not None and not self.low <= number < float("inf"):
            raise CaseError(f"{self.name}={value}: out of range; {self.domain()}")

    def spell(self, value: Any) -> str:
        """Spelling of a value in an id; `parse` reads it back."""
        if value is None:
            return "none"
        return format(value, "g") if self.kind is float and float(format(value, "g")) == value else str(value)

    def domain(self) -> str:
        """The values that this factor has, for error messages and `tiebench list --explain`."""
        if self.values is not None:
            return "one of " + ", ".join(map(str, self.values))
        kind = "whole number" if self.kind is int else "number"
        return f"any {kind} from {self.low:g}" + (", or none" if self.optional else "")


def _article(kind: type) -> str:
    return {int: "a whole number", float: "a number", str: "a word"}[kind]


def _factor(
    default: Any,
    meaning: str,
    values: Sequence[Any] | None = None,
    *,
    low: float | None = None,
    kind: type | None = None,
    unsupported: Mapping[str, Mapping[Any, str]] | None = None,
) -> Any:
    spec = {
        "kind": kind or type(default),
        "values": None if values is None else tuple(values),
        "low": low,
        "optional": default is None,
        "meaning": meaning,
        "unsupported": unsupported or {},
    }
    return field(default=default, metadata=spec)


@dataclass(frozen=True)
class Case:
    """One point of the factor space: `path` and its factors.

    Raises:
        CaseError: on creation, when a value is unknown or the path does not support the combination (with the reason).
    """

    path: str

    # fmt: off
    tie: str = _factor("tied", "embedding and output head share one weight, or have one each", ("tied", "untied"))
    head: str = _factor("vocab", "output head sharded over vocabulary (logits stay sharded), over hidden rows "
                        "(logits all-reduced), over vocabulary with gathered logits, or named by nothing in the "
                        "sharding configuration (stays whole)", ("vocab", "row", "gathered", "unmatched"), unsupported={
        "handwritten": {"unmatched": "the hand-written path has no pattern-based configuration"}})
    zero: int = _factor(0, "ZeRO stage over the data-parallel ranks", (0, 1, 2, 3), unsupported={
        "handwritten": {3: "the hand-written path spells ZeRO 0, 1 and 2 out, not 3"}})
    tp: int = _factor(2, "tensor-parallel ranks", low=1)
    dp: int = _factor(1, "data-parallel ranks", low=1)
    hidden: int = _factor(32, "width of the residual stream; not divisible by tp means uneven hidden shards", low=4)
    vocab: int = _factor(64, "rows of embedding and head; not divisible by tp means uneven vocabulary shards", low=2)
    layers: int = _factor(2, "decoder blocks", low=1)
    sequence: int = _factor(8, "tokens in a sequence", low=4)
    batch: int = _factor(4, "sequences in a micro-batch of one data-parallel rank", low=1)
    dtype: str = _factor("float32", "precision of weights and arithmetic; bfloat16 and float16 train fp32 master "
                         "weights", ("float32", "float64", "bfloat16", "float16"), unsupported={
        "deepspeed": {"float64": "DeepSpeed keeps fp32 master weights (ZeRO 1-3) or asserts (ZeRO 0): no true fp64"}})
    optimizer: str = _factor("sgd", "torch optimizer, settings in suites/optimizers.py",
                             ("sgd", "momentum", "adam", "adamw"))
    clip: float = _factor(0.0, "largest global gradient norm; 0 means no clipping", low=0.0)
    accumulate: int = _factor(1, "micro-batches that make one step", low=1)
    register: str = _factor("embedding_first", "which module the model registers first",
                            ("embedding_first", "head_first"))
    tie_when: str = _factor("construction", "when the tie is made: in the model's constructor; after the full weights "
                            "were loaded; on the meta device, remade after to_empty; after the model was sharded",
                            ("construction", "after_load", "meta", "after_shard"), unsupported={
        "deepspeed": {"after_shard": "AutoTP finds ties when it shards the model, later ones are out of its sight"}})
    embedding_spec: str = _factor("none", "the sharding configuration names the embedding too, before or after the "
                                  "head's entry", ("none", "before_head", "after_head"), unsupported={
        "handwritten": {"before_head": "the hand-written path has no pattern-based configuration",
                        "after_head": "the hand-written path has no pattern-based configuration"}})
    padding_idx: int | None = _factor(None, "embedding row that gets no gradient from the lookup", low=0, kind=int)
    embedding_scale: float = _factor(1.0, "factor on the embedding's output (Gemma: sqrt(hidden))", low=0.0,
    unsupported={})
    head_bias: str = _factor("no", "output head has a bias", ("no", "yes"))
    activation: str = _factor("contiguous", "memory layout of the activation that enters the head: contiguous, batch "
                              "and sequence swapped in memory, every second element of a larger one, or with the "
                              "sequence as first dimension", ("contiguous", "transposed", "strided", "sequence_first"))
    frozen: str = _factor("none", "parameters without gradient: none, the body (all but embedding and head), the "
                          "embedding (with a tie: the shared weight), or the head",
                          ("none", "body", "embedding", "head"))
    seed: int = _factor(0, "seed of the initial weights and of the data", low=0)
    steps: int = _factor(3, "optimizer steps; fewer than 3 would hide stale state", low=3)
    matmul: str = _factor("ieee", "how fp32 matrices are multiplied: as IEEE says, with inputs rounded to TF32 (real "
                          "on CUDA, emulated on CPU), or with inputs cut to it (emulated, CPU only)",
                          ("ieee", "tf32", "tf32_truncated"))
    loss: str = _factor("mean", "cross-entropy: its mean, with smoothed labels, with a z-loss, or with weighted tokens",
                        ("mean", "smoothed", "z_loss", "weighted"))
    logit_scale: float = _factor(1.0, "factor on the logits; large ones overflow a softmax that is shifted wrongly",
                                 low=0.0)
    recompute: str = _factor("none", "what is computed once more in backward (activation checkpointing): nothing, each "
                             "block, or head and loss", ("none", "blocks", "head"))
    resume: str = _factor("none", "after the first step save everything, tear down, build anew with other weights and "
                          "load: the same files, or a universal checkpoint made of them",
                          ("none", "reload", "universal"), unsupported={
        "handwritten": {"universal": "universal checkpoints are DeepSpeed's"}})
    embedding_cut: str = _factor("as_head", "how the sharding configuration's entry for the embedding cuts it: as the "
                                 "head's entry cuts the head, over hidden, or over the vocabulary",
                                 ("as_head", "row", "column"), unsupported={
        "handwritten": dict.fromkeys(("row", "column"), "the hand-written path has no pattern-based configuration")})
    embedding_class: str = _factor("plain", "class of the embedding: torch's, or one that multiplies by "
                                   "embedding_scale in a forward of its own (as Gemma's)",
                                   ("plain", "scaled"), unsupported={
        "handwritten": {"scaled": "the hand-written path puts embeddings of its own in place"}})
    embedding_option: str = _factor("none", "option of torch's embedding: a largest norm (so large that it never "
                                    "acts), sparse gradients, or gradients divided by how often a token stands in the "
                                    "micro-batch", ("none", "max_norm", "sparse", "scale_grad_by_freq"), unsupported={
        "handwritten": dict.fromkeys(("max_norm", "sparse", "scale_grad_by_freq"),
                                     "the hand-written path puts embeddings of its own in place")})
    also_tied: str = _factor("none", "a further module that holds the tied weight: none, or a linear layer that the "
                             "forward does not use", ("none", "linear"), unsupported={
        "handwritten": {"linear": "the hand-written path builds its ties itself"}})
    ignored: str = _factor("unequal", "labels that do not count: in numbers that differ between ranks and "
                           "micro-batches, none, or all of the last data-parallel rank",
                           ("unequal", "none", "rank"))
    init: str = _factor("device", "where the model is built: on its device, on the meta device and materialised, or "
                        "already partitioned under deepspeed.zero.Init, which takes the precision from the "
                        "configuration or is given it", ("device", "meta", "zero", "zero_dtype"), unsupported={
        "handwritten": dict.fromkeys(("zero", "zero_dtype"), "deepspeed.zero.Init is DeepSpeed's")})
    optimizer_from: str = _factor("callable", "who makes the optimizer: the framework from a callable, the user before "
                                  "the model is sharded, or the framework from its configuration",
                                  ("callable", "client", "config"), unsupported={
        "handwritten": dict.fromkeys(("client", "config"), "the hand-written path makes its optimizer itself")})
    # fmt: on

    def __post_init__(self) -> None:
        if self.path not in PATHS:
            raise CaseError(f"unknown path {self.path!r}; one of {', '.join(PATHS)}")
        for factor in FACTORS:
            value = getattr(self, factor.name)
            factor.check(value)
            reason = factor.unsupported.get(self.path, {}).get(value)
            if reason:
                raise CaseError(f"{self.path} with {factor.name}={factor.spell(value)}: {reason}")
        for rule in RULES:
            if (not rule.paths or self.path in rule.paths) and rule.refuses(self):
                raise CaseError(f"{self.id}: {rule.reason}")

    @property
    def id(self) -> str:
        """Readable id that `Case.parse` reads back."""
        spelled = (
            f"{f.name}={f.spell(getattr(self, f.name))}"
            for f in FACTORS
            if f.name in ALWAYS_SPELLED or getattr(self, f.name) != f.default
        )
        return f"{self.path}:{','.join(spelled)}"

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.dp

    @property
    def tied(self) -> bool:
        """Embedding and head share one weight."""
        return self.tie == "tied"

    @property
    def tokens_per_step(self) -> int:
        """Tokens that all ranks together train on in one optimizer step."""
        return self.batch * self.sequence * self.accumulate * self.dp

    @property
    def factors(self) -> dict[str, str]:
        """Every factor's spelling, defaults too."""
        return {f.name: f.spell(getattr(self, f.name)) for f in FACTORS}

    @classmethod
    def parse(cls, text: str) -> Case:
        """Case from its id; factors may stand in any order and defaults may be left out.

        Raises:
            CaseError: malformed id, unknown factor or value, unsupported combination.
        """
        path, _, rest = text.strip().partition(":")
        if path not in PATHS:
            raise CaseError(f"case {text!r}: unknown path {path!r}; one of {', '.join(PATHS)}")
        known = {f.name: f for f in FACTORS}
        given: dict[str, Any] = {}
        for part in filter(None, rest.split(",")):
            name, equals, value = part.partition("=")
            if not equals:
                raise CaseError(f"case {text!r}: {part!r} is not factor=value")
            if name not in known:
                raise CaseError(f"case {text!r}: unknown factor {name!r}; one of {', '.join(known)}")
            if name in given:
                raise CaseError(f"case {text!r}: factor {name} given twice")
            given[name] = known[name].parse(value)
        return cls(path, **given)

    def but(self, **changes: Any) -> Case:
        """This case with some factors changed."""
        return dataclasses.replace(self, **changes)


FACTORS: tuple[Factor, ...] = tuple(
    Factor(name=f.name, default=f.default, **f.metadata) for f in fields(Case) if f.metadata
)


@dataclass(frozen=True)
class Rule:
    """A combination of factors that cannot be run, and why. Empty `paths` means every path."""

    refuses: Callable[[Case], bool]
    reason: str
    paths: tuple[str, ...] = ()


RULES: tuple[Rule, ...] = (
    Rule(lambda c: HEADS % c.tp != 0, f"the model has {HEADS} attention heads; tp must divide {HEADS}"),
    Rule(
        lambda c: c.padding_idx is not None and c.padding_idx >= c.vocab,
        "padding_idx is not a row of the embedding",
    ),
    Rule(
        lambda c: c.vocab < 2 * c.tp + 2 and not (c.vocab < c.tp and c.head == "vocab"),
        "vocabulary too small: every shard needs a first and a last row of its own",
    ),
    Rule(lambda c: c.vocab < c.tp, "a vocabulary smaller than tp leaves a shard empty", ("handwritten",)),
    Rule(lambda c: c.hidden < c.tp, "hidden is smaller than tp: some shard would be empty"),
    Rule(
        lambda c: c.batch * c.sequence < 4 * c.tp + 8,
        "too few tokens in a micro-batch to reach every shard's first and last row",
    ),
    Rule(
        lambda c: not 1e-3 <= c.embedding_scale <= 1e3,
        "an embedding_scale outside 0.001 to 1000 leaves one part of the model below the rounding of the other",
    ),
    Rule(
        lambda c: not 1e-3 <= c.logit_scale <= 1e3,
        "a logit_scale outside 0.001 to 1000 leaves nothing of the softmax but rounding",
    ),
    Rule(lambda c: not c.tied and c.tie_when != "construction", "an untied model never makes a tie"),
    Rule(
        lambda c: c.tied and c.frozen == "head",
        "a tied head is the embedding: frozen=embedding freezes the weight that they share",
    ),
    Rule(
        lambda c: c.tied and c.init == "meta",
        "to_empty breaks a tie that was made on the meta device: tie_when=meta makes it anew",
    ),
    Rule(lambda c: c.init != "device" and c.tie_when != "construction", "built under init, a tie is made there"),
    Rule(
        lambda c: c.init.startswith("zero") and c.zero != 3, "deepspeed.zero.Init partitions parameters: that is ZeRO 3"
    ),
    Rule(lambda c: c.ignored == "rank" and c.dp == 1, "the only data-parallel rank would have nothing to learn from"),
    Rule(
        lambda c: c.ignored == "rank" and c.loss != "mean",
        "the mean over no label is defined for the plain mean only",
    ),
    Rule(
        lambda c: c.embedding_class == "scaled" and c.embedding_scale == 1,
        "a scaled embedding needs an embedding_scale",
    ),
    Rule(
        lambda c: c.embedding_cut != "as_head" and c.embedding_spec == "none",
        "nothing names the embedding: embedding_cut needs an embedding_spec",
    ),
    Rule(
        lambda c: c.embedding_cut == "as_head" and c.embedding_spec != "none" and c.head == "unmatched",
        "there is no entry for the head that the embedding's could be like",
    ),
    Rule(
        lambda c: c.embedding_option == "sparse" and (not c.tied or c.frozen == "embedding"),
        "sparse gradients need an optimizer of their own, and a frozen weight has none",
    ),
    Rule(
        lambda c: c.resume == "universal" and c.zero == 0,
        "a universal checkpoint is made of ZeRO's files, and without ZeRO there are none",
    ),
    Rule(lambda c: c.also_tied != "none" and not c.tied, "an untied model has no tied weight"),
    Rule(
        lambda c: c.also_tied == "linear" and c.head != "row",
        "a layer that is not used shows nothing; only a row-parallel head asks for it",
    ),
    Rule(
        lambda c: c.dtype == "float16" and c.logit_scale > 1,
        "larger logits have larger gradients, which overflow fp16 under the fixed loss scale",
    ),
    Rule(lambda c: c.matmul != "ieee" and c.dtype != "float32", "TF32 is a way to multiply fp32 matrices"),
    Rule(
        lambda c: not c.tied and c.embedding_spec != "none",
        "AutoTP cuts an untied embedding that an entry names over hidden and does not gather its output (meant for "
        "per-head tables): the model cannot compute with it",
        ("deepspeed",),
    ),
    Rule(
        lambda c: c.head == "vocab" and c.tp > 1 and c.loss != "mean",
        "DeepSpeed's loss over sharded logits is the mean cross-entropy and nothing else",
        ("deepspeed",),
    ),
    Rule(
        lambda c: c.tp == 1 and c.embedding_spec != "none",
        "without tensor parallelism nothing reads the sharding configuration",
        ("deepspeed",),
    ),
)


def product(path: str | Sequence[str], **values: Any) -> Iterator[Case]:
    """Every supported case of a product of factor values; a value that is no list stands for itself.

    Combinations that a path does not support are left out: a product is a selection, not a demand. `refusals` lists
    what was left out.
    """
    for case in _combinations(path, values):
        if isinstance(case, Case):
            yield case


def refusals(path: str | Sequence[str], **values: Any) -> list[str]:
    """The reasons for which `product` with the same arguments leaves combinations out."""
    return [str(c) for c in _combinations(path, values) if isinstance(c, CaseError)]


def _combinations(path: str | Sequence[str], values: Mapping[str, Any]) -> Iterator[Case | CaseError]:
    paths = [path] if isinstance(path, str) else list(path)
    axes = [v if isinstance(v, (list, tuple)) else [v] for v in values.values()]
    for chosen, *point in itertools.product(paths, *axes):
        try:
            yield Case(chosen, **dict(zip(values, point, strict=True)))
        except CaseError as error:
            yield error
