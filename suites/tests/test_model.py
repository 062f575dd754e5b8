"""Model, initial weights, the ways to tie, the optimizers' replay, the reference."""

from __future__ import annotations

import functools

import pytest
import torch

from suites import optimizers
from suites.cases import Case, product
from suites.data import IGNORED, micro_batch, token_weights
from suites.model import (
    EMBEDDING,
    HEAD,
    SMOOTHING,
    Z_LOSS,
    build_model,
    causal_loss,
    initial_weights,
    parameter_shapes,
    trainable,
)
from suites.paths import handwritten_checkpoint as checkpoints
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


@pytest.mark.parametrize("kind", ["mean", "smoothed", "z_loss", "weighted"])
def test_each_loss_is_its_formula(kind):
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(2, 5, 11, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 11, (2, 5), generator=generator)
    labels[0, 1] = labels[1, 4] = IGNORED
    total, weight = 0.0, 0.0
    for place, (row, label) in enumerate(zip(logits.flatten(0, 1), labels.flatten().tolist(), strict=True)):
        if label == IGNORED:
            continue
        log_sum = row.exp().sum().log()
        loss = log_sum - row[label]
        if kind == "smoothed":
            loss = (1 - SMOOTHING) * loss + SMOOTHING * (log_sum - row.mean())
        if kind == "z_loss":
            loss = loss + Z_LOSS * log_sum**2
        share = token_weights(labels)[place].item() if kind == "weighted" else 1.0
        total, weight = total + share * loss, weight + share
    found = causal_loss(logits, labels, 11, kind=kind)
    assert found.item() == pytest.approx((total / weight).item(), rel=1e-12)


@pytest.mark.parametrize("recompute", ["blocks", "head"])
def test_recomputation_changes_nothing(recompute):
    def note(calls, *_):  # a hook after the forward would not do: recomputing stops as soon as it has what it needs
        calls.append(1)

    gradients = []
    for case in (Case("handwritten", loss="z_loss"), Case("handwritten", loss="z_loss", recompute=recompute)):
        model = build_model(case, CPU, torch.float32, lambda e, m: None)
        batch = micro_batch(case, 0, 0, 0)
        calls = []
        module = model.layers[0] if recompute == "blocks" else model.lm_head
        module.register_forward_pre_hook(functools.partial(note, calls))
        model(batch.tokens, batch.labels)[0].backward()
        assert len(calls) == (1 if case.recompute == "none" else 2)
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_logit_scale_multiplies_the_logits():
    batch = micro_batch(Case("handwritten"), 0, 0, 0)
    one, twenty = (
        build_model(Case("handwritten", logit_scale=scale), CPU, torch.float32, lambda e, m: None)(
            batch.tokens, batch.labels
        )
        for scale in (1.0, 20.0)
    )
    assert torch.equal(one[1] * 20.0, twenty[1])


@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (2, 1), (3, 1), (2, 2), (4, 3)])
@pytest.mark.parametrize("dim", [0, 1, None])
def test_a_checkpoint_gives_back_the_whole_and_every_shard(tmp_path, tp, dp, dim):
    whole = {"weight": torch.randn(7, 5), "exp_avg": torch.randn(7, 5)}
    for tp_rank in range(tp):
        shards = {k: checkpoints.own_shard(v, dim, tp, tp_rank).contiguous() for k, v in whole.items()}
        parameter = torch.nn.Parameter(shards["weight"])
        if dim is not None:
            parameter.tp_dim = dim
        part = -(-parameter.numel() // dp)  # as ZeRO cuts
        for dp_rank in range(dp):
            slots = {k: v.flatten()[part * dp_rank : part * (dp_rank + 1)] for k, v in shards.items()}
            entry = checkpoints.entry(parameter, slots, {"step": 3.0}, part * dp_rank)
            checkpoints.save(tmp_path, (tp_rank, dp_rank), {"w": entry}, {})
    found = checkpoints.consolidate(checkpoints.read(tmp_path, tp * dp), "model")["w"]
    assert all(torch.equal(found.slots[k], whole[k]) for k in whole)
    assert (found.counts, found.tp_dim) == ({"step": 3.0}, dim)


def test_a_checkpoint_with_a_file_too_few_is_refused(tmp_path):
    checkpoints.save(tmp_path, (0, 0), {}, {})
    with pytest.raises(FileNotFoundError, match="holds the files of 1 of 2 ranks: set TMPDIR"):
        checkpoints.read(tmp_path, 2)
