"""Model, initial weights, the ways to tie, the optimizers' replay, the reference."""

from __future__ import annotations

import pytest
import torch

from suites import optimizers
from suites.cases import Case, product
from suites.data import micro_batch
from suites.model import EMBEDDING, HEAD, build_model, initial_weights, parameter_shapes, trainable
from suites.reference import ReferenceCache, evaluate

CPU = torch.device("cpu")


@pytest.mark.parametrize("case", list(product("handwritten", tie=["tied", "untied"], head_bias=["no", "yes"])), ids=str)
def test_initial_weights_are_exact_in_fp32_and_nowhere_zero(case):
    weights = initial_weights(case)
    assert {n: tuple(w.shape) for n, w in weights.items()} == parameter_shapes(case)
    for weight in weights.values():
        assert torch.equal(weight.float().double(), weight)
        assert (weight != 0).all()
        assert weight.std() > 0.05
    assert torch.equal(weights[EMBEDDING], weights[HEAD]) == case.tied


@pytest.mark.parametrize("when", ["construction", "after_load", "meta", "after_shard"])
@pytest.mark.parametrize("order", ["embedding_first", "head_first"])
def test_each_way_to_tie(when, order):
    events = []
    case = Case("handwritten", tie_when=when, register=order)
    model = build_model(
        case, CPU, torch.float32, lambda e, m: events.append((e, m.lm_head.weight is m.embed_tokens.weight))
    )
    assert dict(events)["loaded"] is (when in ("construction", "meta"))
    assert (model.lm_head.weight is model.embed_tokens.weight) is (when != "after_shard")
    assert torch.equal(model.lm_head.weight, initial_weights(case)[HEAD].float())
    first = next(name for name, _ in model.named_children())
    assert first == ("embed_tokens" if order == "embedding_first" else "lm_head")
    if when == "meta":  # torchtitan issue 2252: to_empty gives each alias a storage of its own
        assert ("materialised", False) in events


@pytest.mark.parametrize("name", list(optimizers.SETTINGS))
def test_replay_is_the_torch_optimizer_in_fp64(name):
    case = Case("handwritten", optimizer=name)
    weight = torch.nn.Parameter(torch.randn(7, 5, dtype=torch.float64))
    optimizer, replay = optimizers.make(case, [weight]), optimizers.replay(case)
    for _ in range(4):
        gradient = torch.randn(7, 5, dtype=torch.float64)
        expected = replay.step(weight.detach().clone(), gradient)
        weight.grad = gradient
        optimizer.step()
        assert torch.allclose(weight, expected, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("clip", [0.0, 0.5, 100.0])
def test_clip_coefficient_is_torch_s(clip):
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    parameter.grad = torch.tensor([1.0, 2.0, 2.0], dtype=torch.float64)
    if clip:
        torch.nn.utils.clip_grad_norm_([parameter], clip)
    assert parameter.grad[0].item() == pytest.approx(optimizers.clip_coefficient(3.0, clip), abs=1e-12)


@pytest.mark.parametrize("frozen", ["none", "body", "embedding"])
@pytest.mark.parametrize("tie", ["tied", "untied"])
def test_reference_gradient_is_autograd_s_on_the_tied_model(tie, frozen):
    case = Case("handwritten", tie=tie, frozen=frozen, dp=2, accumulate=2, padding_idx=3, head_bias="yes")
    model = build_model(case, CPU, torch.float64, lambda e, m: None)
    for dp_rank in range(2):
        for micro in range(2):
            batch = micro_batch(case, 1, micro, dp_rank)
            (model(batch.tokens, batch.labels)[0] / 4).backward()
    found = evaluate(case, initial_weights(case), 1, "float64")
    named = dict(model.named_parameters(remove_duplicate=False))
    assert (
        set(found.gradients) == {n for n in named if trainable(case, n)} == {n for n in named if named[n].requires_grad}
    )
    for name, gradient in found.gradients.items():
        assert torch.allclose(gradient, named[name].grad, rtol=1e-12, atol=1e-14), name
    once = {id(p): p.grad for p in named.values() if p.grad is not None}
    norm = torch.stack([g.square().sum() for g in once.values()]).sum().sqrt().item()
    assert found.gradient_norm == pytest.approx(norm, rel=1e-12)


def test_reference_is_shared_by_all_that_determines_it():
    cache = ReferenceCache()
    case = Case("handwritten")
    weights = initial_weights(case)
    first = cache.evaluate(case, weights, 0, "float64")
    for same in (case.but(head="row"), case.but(zero=2), case.but(path="deepspeed", optimizer="adamw", clip=1.0)):
        assert cache.evaluate(same, initial_weights(same), 0, "float64") is first
    moved = {n: w.clone() for n, w in weights.items()}
    moved["norm.weight"][0] += 1e-7
    others = [
        (case, weights, 1, "float64"),
        (case, weights, 0, "float32"),
        (case, moved, 0, "float64"),
        (case.but(padding_idx=1), weights, 0, "float64"),
        (case.but(seed=1), weights, 0, "float64"),
        (case.but(tp=4), weights, 0, "float64"),  # data reach other edge rows
    ]
    for other in others:
        assert cache.evaluate(*other) is not first
    assert (cache.hits, cache.misses) == (3, 7)
