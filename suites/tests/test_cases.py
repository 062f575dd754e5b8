"""Cases: ids that parse back and stay the same, refusals with reasons."""

from __future__ import annotations

import pytest

from suites.cases import FACTORS, PATHS, Case, CaseError, product, refusals

# Written down once: an id that changes breaks every stored result. Add lines, never edit them.
STABLE = {
    "deepspeed:tie=tied,head=vocab,zero=0": Case("deepspeed"),
    "deepspeed:tie=tied,head=row,zero=2,hidden=35,vocab=67": Case("deepspeed", head="row", zero=2, hidden=35, vocab=67),
    "handwritten:tie=untied,head=gathered,zero=1,dp=2": Case(
        "handwritten", tie="untied", head="gathered", zero=1, dp=2
    ),
    "handwritten:tie=tied,head=row,zero=0,optimizer=adamw,clip=0.5,accumulate=2,padding_idx=3": Case(
        "handwritten", head="row", optimizer="adamw", clip=0.5, accumulate=2, padding_idx=3
    ),
    "handwritten:tie=tied,head=vocab,zero=0,dtype=float64,tie_when=meta,embedding_scale=5.656854249492381": Case(
        "handwritten", dtype="float64", tie_when="meta", embedding_scale=32**0.5
    ),
    "handwritten:tie=tied,head=vocab,zero=0,loss=z_loss,logit_scale=20,recompute=head,resume=reload": Case(
        "handwritten", loss="z_loss", logit_scale=20.0, recompute="head", resume="reload"
    ),
}


@pytest.mark.parametrize(("text", "case"), STABLE.items())
def test_ids_are_stable_and_parse_back(text, case):
    assert case.id == text
    assert Case.parse(text) == case
    assert len({case, Case.parse(text)}) == 1


def test_every_value_of_every_factor_parses_back():
    seen = set()
    for factor in FACTORS:
        values = factor.values or (factor.default, 5 if factor.kind is int else 0.25)
        for case in product(PATHS, **{factor.name: list(values)}):
            assert Case.parse(case.id) == case
            seen.add(case.id)
    assert len(seen) > 40


def test_defaults_are_frozen():
    assert Case("deepspeed").factors == {
        "tie": "tied", "head": "vocab", "zero": "0", "tp": "2", "dp": "1", "hidden": "32", "vocab": "64", "layers": "2",
        "sequence": "8", "batch": "4", "dtype": "float32", "optimizer": "sgd", "clip": "0", "accumulate": "1",
        "register": "embedding_first", "tie_when": "construction", "embedding_spec": "none", "padding_idx": "none",
        "embedding_scale": "1", "head_bias": "no", "activation": "contiguous", "frozen": "none", "seed": "0",
        "steps": "3", "matmul": "ieee", "loss": "mean", "logit_scale": "1", "recompute": "none", "resume": "none",
        "embedding_cut": "as_head", "embedding_class": "plain", "embedding_option": "none", "also_tied": "none",
        "ignored": "unequal", "init": "device", "optimizer_from": "callable",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("megatron:tie=tied", "unknown path 'megatron'"),
        ("", "unknown path ''"),
        ("deepspeed:tie", "not factor=value"),
        ("deepspeed:colour=red", "unknown factor 'colour'"),
        ("deepspeed:tie=maybe", "one of tied, untied"),
        ("deepspeed:zero=0,zero=2", "given twice"),
        ("deepspeed:zero=two", "not a whole number"),
        ("deepspeed:zero=02", "write it as zero=2"),
        ("deepspeed:hidden=-1", "out of range"),
        ("deepspeed:clip=nan", "out of range"),
        ("deepspeed:clip=inf", "out of range"),
        ("deepspeed:dtype=float64", "no true fp64"),
        ("deepspeed:tie_when=after_shard", "out of its sight"),
        ("handwritten:zero=3", "not 3"),
        ("handwritten:tp=3", "tp must divide 4"),
        ("handwritten:padding_idx=64", "not a row"),
        ("handwritten:tie=untied,tie_when=meta", "never makes a tie"),
        ("handwritten:steps=2", "out of range"),
        ("handwritten:batch=1,sequence=4", "too few tokens"),
        ("handwritten:logit_scale=0", "nothing of the softmax"),
        ("deepspeed:loss=smoothed", "the mean cross-entropy and nothing else"),
        ("deepspeed:resume=universal", "without ZeRO there are none"),
        ("handwritten:head=unmatched", "no pattern-based configuration"),
        ("deepspeed:frozen=head", "a tied head is the embedding"),
        ("deepspeed:init=meta", "breaks a tie"),
        ("deepspeed:init=zero,zero=2", "that is ZeRO 3"),
        ("deepspeed:ignored=rank", "nothing to learn from"),
        ("deepspeed:embedding_cut=row", "nothing names the embedding"),
        ("deepspeed:head=unmatched,embedding_spec=before_head", "no entry for the head"),
        ("deepspeed:embedding_class=scaled", "needs an embedding_scale"),
        ("deepspeed:tie=untied,embedding_option=sparse", "an optimizer of their own"),
        ("deepspeed:also_tied=linear", "only a row-parallel head"),
        ("handwritten:vocab=3,tp=4", "leaves a shard empty"),
    ],
)
def test_refused_with_the_reason(text, reason):
    with pytest.raises(CaseError, match=reason):
        Case.parse(text)


def test_wrong_types_are_refused():
    with pytest.raises(CaseError, match="not a whole number"):
        Case("deepspeed", zero=True)
    with pytest.raises(CaseError, match="not a number"):
        Case("deepspeed", clip=1)


def test_a_product_says_what_it_leaves_out():
    kept = list(product("handwritten", zero=[2, 3], head=["row", "vocab"]))
    left_out = refusals("handwritten", zero=[2, 3], head=["row", "vocab"])
    assert [case.zero for case in kept] == [2, 2]
    assert len(left_out) == 2
    assert all("not 3" in reason for reason in left_out)


def test_factor_table_is_complete():
    for factor in FACTORS:
        assert factor.meaning
        assert (factor.values is None) != (factor.low is None), factor.name
        assert set(factor.unsupported) <= set(PATHS)
