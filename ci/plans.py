"""Plans: named selections of cases over the factor table, each with a time budget, each holding the one before.

To add cases: one more line in a plan's selections. To add a plan: one more row in `PLANS`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from suites import covering
from suites.cases import Case, product

BOTH = ("handwritten", "deepspeed")
TIES = ("tied", "untied")
HEADS = ("vocab", "row", "gathered")
ORDERS = ("embedding_first", "head_first")
SHARDED = ("vocab", "row")  # a tied gathered head stays replicated in DeepSpeed: it says nothing about sharding
EVEN = {"hidden": 32, "vocab": 64}
UNEVEN = {"hidden": 35, "vocab": 67}  # no dimension divides by 2 or 4
SIZES = (EVEN, UNEVEN)


@dataclass(frozen=True)
class Selection:
    """Cases picked for one reason."""

    reason: str
    cases: tuple[Case, ...]


@dataclass(frozen=True)
class Plan:
    """A named selection of cases.

    Args:
        budget_seconds: for the whole plan, start-up of ranks included, on two cores.
        selections: own cases; those of `base` come first.
        recheck: so many cases, drawn anew for each run, are run once more alone and compared bit for bit.
    """

    name: str
    meaning: str
    budget_seconds: float
    selections: tuple[Selection, ...]
    base: Plan | None = None
    recheck: int = 0

    def all_selections(self) -> Iterator[Selection]:
        """Selections of the base plans, then this plan's own."""
        if self.base:
            yield from self.base.all_selections()
        yield from self.selections

    @property
    def cases(self) -> tuple[Case, ...]:
        """All cases without doubles, in a stable order."""
        return tuple(dict.fromkeys(case for selection in self.all_selections() for case in selection.cases))


def _select(
    reason: str, path: str | tuple[str, ...], *, sizes: tuple[dict[str, int], ...] = (EVEN,), **values: object
) -> Selection:
    """Every supported case of a product, for each size of the model."""
    cases = [case for size in sizes for case in product(path, **{**size, **values})]
    return Selection(reason, tuple(cases))


SMOKE = Plan(
    name="smoke",
    meaning="the heads that break first, on both paths, and one case for every other factor",
    budget_seconds=300,
    selections=(
        _select(
            "tied and untied sharded heads, without ZeRO and with sharded gradients, even and uneven shards",
            BOTH,
            sizes=SIZES,
            tie=TIES,
            head=SHARDED,
            zero=(0, 2),
        ),
        _select("gathered head", BOTH, sizes=(UNEVEN,), tie="untied", head="gathered"),
        _select(
            "tensor and data parallelism together, gradients accumulated and clipped",
            BOTH,
            sizes=(UNEVEN,),
            tie="tied",
            head="row",
            zero=2,
            dp=2,
            accumulate=2,
            clip=0.5,
        ),
        _select("padding row", BOTH, tie="tied", head="vocab", padding_idx=3),
        _select("head registered before the embedding", "deepspeed", tie="tied", head="row", register="head_first"),
        _select(
            "decoupled weight decay, which a doubled update shows",
            BOTH,
            tie="tied",
            head="vocab",
            zero=1,
            optimizer="adamw",
        ),
        _select(
            "double precision: no rounding to hide in",
            "handwritten",
            sizes=(UNEVEN,),
            tie=TIES,
            head="row",
            dtype="float64",
        ),
        _select(
            "embedding named in the configuration before the head",
            "deepspeed",
            tie="tied",
            head="row",
            embedding_spec="before_head",
        ),
        _select("sharded parameters", "deepspeed", sizes=(UNEVEN,), tie="tied", head=SHARDED, zero=3),
        _select("transposed activation into the head", "deepspeed", tie="tied", head="row", activation="transposed"),
        _select("head with a bias", "deepspeed", tie="tied", head="vocab", head_bias="yes"),
    ),
)

PR = Plan(
    name="pr",
    meaning="smoke, and every stage and factor by itself: for a pull request",
    budget_seconds=600,
    base=SMOKE,
    selections=(
        _select("every ZeRO stage", BOTH, sizes=SIZES, tie=TIES, head=SHARDED, zero=(0, 1, 2, 3)),
        _select("gathered heads", BOTH, sizes=SIZES, tie=TIES, head="gathered", zero=(0, 2)),
        _select("order of registration", BOTH, tie="tied", head=SHARDED, register="head_first", zero=(0, 2)),
        _select(
            "when the tie is made",
            BOTH,
            sizes=(UNEVEN,),
            tie="tied",
            head=SHARDED,
            tie_when=("after_load", "meta", "after_shard"),
        ),
        _select(
            "configuration names the embedding",
            BOTH,
            tie=TIES,
            head=SHARDED,
            embedding_spec=("before_head", "after_head"),
        ),
        _select("optimizers", BOTH, sizes=(UNEVEN,), tie="tied", head=SHARDED, optimizer=("momentum", "adam", "adamw")),
        _select("clipping and accumulation", BOTH, sizes=(UNEVEN,), tie=TIES, head=SHARDED, clip=0.5, accumulate=2),
        _select("embedding scale", BOTH, tie="tied", head=SHARDED, embedding_scale=6.0),
        _select("padding row at a shard's edge", BOTH, tie=TIES, head=SHARDED, padding_idx=(0, 32)),
        _select("bias", BOTH, sizes=(UNEVEN,), tie=TIES, head=SHARDED, head_bias="yes"),
        _select("frozen parts", BOTH, tie="tied", head=SHARDED, frozen=("body", "embedding")),
        _select("layout of the activation", BOTH, sizes=(UNEVEN,), tie=TIES, head=SHARDED, activation="transposed"),
        _select(
            "lower precisions",
            "handwritten",
            sizes=(UNEVEN,),
            tie="tied",
            head=SHARDED,
            dtype=("bfloat16", "float16"),
            zero=(0, 2),
        ),
        # Not without ZeRO: DeepSpeed sums gradients in bf16 there and clips by the norm of one rank's shards.
        _select(
            "bf16 over ZeRO", "deepspeed", sizes=(UNEVEN,), tie="tied", head=SHARDED, dtype="bfloat16", zero=(1, 2, 3)
        ),
        _select("TF32", BOTH, sizes=(UNEVEN,), tie="tied", head=SHARDED, matmul="tf32"),
        _select(
            "other losses", BOTH, sizes=(UNEVEN,), tie="tied", head=SHARDED, loss=("smoothed", "z_loss", "weighted")
        ),
        _select(
            "recomputed activations", BOTH, sizes=(UNEVEN,), tie="tied", head=SHARDED, recompute=("blocks", "head")
        ),
        _select("saved, torn down, loaded", BOTH, sizes=(UNEVEN,), tie=TIES, head=SHARDED, resume="reload"),
        _select("large logits", BOTH, tie="tied", head=SHARDED, logit_scale=20.0),
    ),
)

COVERED = Selection(
    "all pairs of factor values, and all triples of those of the head (a covering array, suites/covering.py)",
    covering.cases("deepspeed"),
)
# What fails or is refused by itself, and would hide whatever else a case of the covering array has.
APART = (
    _select(
        "embeddings that cannot be sharded with the head",
        "deepspeed",
        tie="tied",
        head=SHARDED,
        embedding_option=("max_norm", "sparse", "scale_grad_by_freq"),
        zero=(0, 3),
        register=ORDERS,
    ),
    _select(
        "an embedding whose class has a forward of its own",
        "deepspeed",
        tie=TIES,
        head=SHARDED,
        embedding_class="scaled",
        embedding_scale=6.0,
        register=ORDERS,
    ),
    _select(
        "a further module that holds the tied weight",
        "deepspeed",
        tie="tied",
        head="row",
        also_tied="linear",
        register=ORDERS,
    ),
    _select("a vocabulary smaller than tp", "deepspeed", tie=TIES, head="vocab", vocab=3, tp=4, register=ORDERS),
    _select("fp16 where the device has none", "deepspeed", head=SHARDED, dtype="float16", zero=(0, 2)),
    _select(
        "the configuration names a tied embedding and no head",
        "deepspeed",
        tie="tied",
        head="unmatched",
        embedding_spec="before_head",
        embedding_cut=("row", "column"),
        zero=(0, 3),
    ),
    _select("bf16 without ZeRO", "deepspeed", tie=TIES, head=SHARDED, dtype="bfloat16", zero=0),
    _select("built under zero.Init, which is given its precision", "deepspeed", head="row", zero=3, init="zero_dtype"),
    _select(
        "built under zero.Init, two by two ranks, accumulated",
        "deepspeed",
        tie=TIES,
        head=SHARDED,
        zero=3,
        init="zero",
        dp=2,
        accumulate=2,
    ),
)

UNIVERSAL = (
    _select(
        "made universal and loaded",
        "deepspeed",
        sizes=(UNEVEN,),
        tie=TIES,
        head=("vocab", "row", "gathered", "unmatched"),
        zero=(1, 2, 3),
        optimizer="adamw",
        resume="universal",
    ),
    _select(
        "made universal and loaded, two by two ranks, clipped",
        "deepspeed",
        sizes=(UNEVEN,),
        tie=TIES,
        head=SHARDED,
        zero=(1, 3),
        dp=2,
        clip=0.5,
        optimizer="adam",
        resume="universal",
    ),
    _select(
        "made universal, in bf16",
        "deepspeed",
        tie=TIES,
        head="row",
        zero=(1, 3),
        dtype="bfloat16",
        optimizer="adamw",
        resume="universal",
    ),
    _select(
        "made universal, with frozen parts",
        "deepspeed",
        tie="untied",
        head="row",
        zero=1,
        frozen="embedding",
        optimizer="adam",
        resume="universal",
    ),
    _select(
        "made universal, without Adam",
        "deepspeed",
        tie="untied",
        head="row",
        zero=1,
        optimizer=("sgd", "momentum"),
        resume="universal",
    ),
    _select(
        "made universal, built under zero.Init",
        "deepspeed",
        head="row",
        zero=3,
        dp=2,
        init="zero",
        optimizer="adamw",
        resume="universal",
    ),
)

MATRIX = Plan(
    name="matrix",
    meaning="every factor of DeepSpeed's training: a covering array, and what fails or is refused by itself",
    budget_seconds=1200,
    recheck=5,
    selections=(COVERED, *APART, *UNIVERSAL),
)

NIGHTLY = Plan(
    name="nightly",
    meaning="pr, matrix, and meshes of four ranks, with the factors crossed with ZeRO",
    budget_seconds=1800,
    recheck=5,
    base=PR,
    selections=(
        *MATRIX.selections,
        _select("two by two ranks", BOTH, sizes=SIZES, tie=TIES, head=SHARDED, zero=(0, 1, 2, 3), dp=2),
        _select("four tensor-parallel ranks", BOTH, sizes=SIZES, tie=TIES, head=SHARDED, zero=(0, 2), tp=4),
        _select(
            "two by two ranks, clipped and accumulated",
            BOTH,
            sizes=(UNEVEN,),
            tie=TIES,
            head=SHARDED,
            zero=(0, 1, 2, 3),
            dp=2,
            clip=0.5,
            accumulate=2,
        ),
        _select(
            "optimizers over ZeRO",
            BOTH,
            sizes=(UNEVEN,),
            tie=TIES,
            head=SHARDED,
            zero=(0, 1, 2, 3),
            optimizer=("momentum", "adam", "adamw"),
        ),
        _select(
            "time of the tie over ZeRO",
            BOTH,
            tie="tied",
            head=SHARDED,
            zero=(1, 2, 3),
            tie_when=("after_load", "meta", "after_shard"),
        ),
        _select("frozen parts over ZeRO", BOTH, tie="tied", head=SHARDED, zero=(1, 2, 3), frozen=("body", "embedding")),
        _select(
            "lower precisions over ZeRO, two by two ranks, accumulated and clipped",
            "handwritten",
            sizes=(UNEVEN,),
            tie=TIES,
            head=SHARDED,
            dtype=("bfloat16", "float16"),
            zero=(0, 1, 2),
            dp=2,
            clip=0.5,
            accumulate=2,
            optimizer="adamw",
        ),
        _select(
            "bf16 over ZeRO, two by two ranks, accumulated and clipped",
            "deepspeed",
            sizes=(UNEVEN,),
            tie=TIES,
            head=SHARDED,
            dtype="bfloat16",
            zero=(1, 2, 3),
            dp=2,
            clip=0.5,
            accumulate=2,
            optimizer="adamw",
        ),
        _select("TF32, rounded and cut", BOTH, sizes=SIZES, tie=TIES, head=HEADS, matmul=("tf32", "tf32_truncated")),
        _select(
            "loaded over ZeRO, with moments",
            BOTH,
            sizes=(UNEVEN,),
            tie="tied",
            head=SHARDED,
            zero=(0, 1, 2),
            dp=2,
            resume="reload",
            optimizer=("momentum", "adamw"),
        ),
        _select("double precision", "handwritten", sizes=SIZES, tie=TIES, head=HEADS, zero=(0, 1, 2), dtype="float64"),
    ),
)

FULL = Plan(
    name="full",
    meaning="nightly, and the factors crossed with one another, on more seeds",
    budget_seconds=3 * 3600,
    recheck=20,
    base=NIGHTLY,
    selections=(
        _select(
            "meshes, clipping, accumulation and Adam",
            BOTH,
            sizes=SIZES,
            tie=TIES,
            head=HEADS,
            zero=(0, 1, 2, 3),
            dp=(1, 2),
            clip=(0.0, 0.5),
            accumulate=(1, 2),
            optimizer=("sgd", "adam"),
        ),
        _select(
            "registration, layout and specs crossed",
            BOTH,
            sizes=(UNEVEN,),
            tie=TIES,
            head=SHARDED,
            zero=(0, 2),
            register=("embedding_first", "head_first"),
            activation=("contiguous", "transposed"),
            embedding_spec=("none", "before_head", "after_head"),
            head_bias=("no", "yes"),
        ),
        _select(
            "scale and padding crossed",
            BOTH,
            sizes=(UNEVEN,),
            tie=TIES,
            head=SHARDED,
            zero=(0, 2),
            embedding_scale=(1.0, 6.0),
            padding_idx=(None, 0, 34),
        ),
        _select("more seeds", BOTH, sizes=SIZES, tie=TIES, head=SHARDED, zero=(0, 1, 2, 3), seed=(1, 2, 3)),
        _select("deeper and longer", BOTH, tie=TIES, head=SHARDED, zero=(0, 2), layers=4, sequence=32, steps=6),
    ),
)

PLANS: dict[str, Plan] = {plan.name: plan for plan in (SMOKE, PR, MATRIX, NIGHTLY, FULL)}
