"""Rule 7: data that reach every shard and tell ranks, micro-batches and steps apart."""

from __future__ import annotations

import itertools

import pytest
import torch

from suites.cases import Case, product
from suites.data import IGNORED, micro_batch, token_weights

CASES = [
    *product("handwritten", vocab=[64, 67], tp=[1, 2, 4], dp=[1, 2], accumulate=[1, 2], padding_idx=[None, 5]),
    Case("deepspeed", vocab=10, tp=4),
]


def shard_edges(case: Case) -> set[int]:
    """First and last row of each shard, cut as tensor_split cuts (ours, DeepSpeed) and as chunk does (DTensor)."""
    rows = torch.arange(case.vocab)
    return {int(part[i]) for cut in (rows.tensor_split(case.tp), rows.chunk(case.tp)) for part in cut for i in (0, -1)}


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_every_micro_batch_reaches_every_shard(case):
    for step, micro, dp_rank in itertools.product(range(3), range(case.accumulate), range(case.dp)):
        batch = micro_batch(case, step, micro, dp_rank)
        wanted = shard_edges(case) | ({case.padding_idx} - {None})
        assert wanted <= set(batch.tokens.flatten().tolist())
        assert wanted <= set(batch.labels.flatten().tolist())
        assert int((batch.labels == IGNORED).sum()) > 0
        assert batch.tokens.min() >= 0
        assert batch.tokens.max() < case.vocab


def test_ranks_micro_batches_and_steps_differ():
    case = Case("handwritten", dp=2, accumulate=2)
    batches = [micro_batch(case, s, m, d) for s, m, d in itertools.product(range(3), range(2), range(2))]
    for a, b in itertools.combinations(batches, 2):
        assert not torch.equal(a.tokens, b.tokens)
    ignored = {d: int((micro_batch(case, 0, 0, d).labels == IGNORED).sum()) for d in range(2)}
    assert ignored[0] != ignored[1]
    assert len({int((micro_batch(case, 0, m, 0).labels == IGNORED).sum()) for m in range(2)}) == 2


def test_the_same_every_time_and_by_seed():
    case = Case("handwritten")
    assert torch.equal(micro_batch(case, 1, 0, 0).tokens, micro_batch(case, 1, 0, 0).tokens)
    assert not torch.equal(micro_batch(case, 1, 0, 0).tokens, micro_batch(case.but(seed=1), 1, 0, 0).tokens)


def test_token_weights_differ_and_are_exact_in_every_precision():
    labels = micro_batch(Case("handwritten"), 0, 0, 0).labels
    weights = token_weights(labels)
    assert weights.shape == (labels.numel(),)
    assert (weights.min() > 0, len(weights.unique()) > 4) == (True, True)
    assert torch.equal(weights.bfloat16().float(), weights)


def test_ignored_labels_are_as_asked():
    case = Case("handwritten", dp=2)
    none, rank = case.but(ignored="none"), case.but(ignored="rank")
    assert not (micro_batch(none, 0, 0, 0).labels == IGNORED).any()
    assert (micro_batch(rank, 0, 0, 1).labels == IGNORED).all()
    assert not (micro_batch(rank, 0, 0, 0).labels == IGNORED).any()
    assert torch.equal(micro_batch(rank, 0, 0, 1).tokens, micro_batch(none, 0, 0, 1).tokens)
