"""The trace: clean where nothing is wrong, at every precision; otherwise the module, ranks and tokens that are."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from suites import faults
from suites.cases import Case
from suites.data import micro_batch
from suites.model import Decoder, initial_weights, load_weights
from suites.observe import Piece, RankObservation
from suites.precision import to_tf32
from suites.trace import CLEAN, Tracer, boundaries, first_boundary, matmul_sigma
from suites.train import run_rank

NULL = (
    "handwritten:head=vocab,vocab=67",
    "handwritten:head=gathered,tie=untied,accumulate=2",
    "handwritten:head=row,hidden=35,dtype=bfloat16",
    "handwritten:head=vocab,dtype=float16,head_bias=yes",
    "handwritten:head=row,matmul=tf32,logit_scale=5",
    "handwritten:head=vocab,dtype=float64,recompute=head",
    "handwritten:head=row,frozen=embedding,recompute=blocks,activation=transposed",
)
# fault -> module, direction, ranks, and whether its own product is wrong
FOUND = {
    "unreduced_gradient_below_head": ("norm", "backward", (0, 1), None),
    "reduction_outside_autograd": ("layers.1.up_proj", "backward", (1,), None),
    "shifted_boundary": ("embed_tokens", "forward", (0, 1), None),
    "logits_reduced_twice": ("lm_head", "forward", (0, 1), True),
    "bf16_head_weight": ("lm_head", "forward", (0, 1), True),
    "ignored_labels_count": ("loss", "forward", (0, 1), None),
}
AFTER = ("detached_lookup_vocab", "norm_gradient_reduced", "frozen_last_shard")  # nothing is wrong at any boundary
STEP = 1
JOBS = [*((case, None) for case in NULL), *((faults.FAULTS[name].case, name) for name in (*FOUND, *AFTER))]


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for case, fault in JOBS:
        with faults.apply(fault) if fault else contextlib.nullcontext():
            seen = run_rank(Case.parse(case), torch.device("cpu"), trace=0 if fault else STEP)
            seen.save(Path(folder) / f"{fault or case}.{rank}.safetensors")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traced")
    mp.start_processes(_rank, (str(folder),), nprocs=2, start_method="fork")
    return lambda name: [RankObservation.load(folder / f"{name}.{rank}.safetensors") for rank in range(2)]


@pytest.mark.parametrize("case", NULL)
def test_a_null_run_is_clean(case, traced):
    assert first_boundary(Case.parse(case), traced(case), STEP) is CLEAN


@pytest.mark.parametrize("name", FOUND)
def test_the_first_wrong_boundary_is_named(name, traced):
    found = first_boundary(Case.parse(faults.FAULTS[name].case), traced(name), 0)
    assert found is not None
    assert (found.module, found.direction, found.ranks, found.own) == FOUND[name]
    assert found.score > 5
    assert found.module in found.sentence
    if found.ranks == (1,):
        assert "tensor-parallel rank 1" in found.sentence


@pytest.mark.parametrize("name", AFTER)
def test_what_arises_after_backward_is_told_so(name, traced):
    assert first_boundary(Case.parse(faults.FAULTS[name].case), traced(name), 0) is CLEAN


def test_tokens_are_those_of_the_wrong_shard(traced):
    case = Case.parse(faults.FAULTS["shifted_boundary"].case)
    found = first_boundary(case, traced("shifted_boundary"), 0)
    tokens = micro_batch(case, 0, 0, 0).tokens.flatten()
    assert found is not None
    assert found.tokens
    assert all(tokens[place] >= 33 for place in found.tokens)  # rank 1's rows, and the one before them
    assert 0 < found.share < 1


def test_a_wrong_shape_and_a_missing_trace_are_told(traced):
    case, ranks = Case.parse(NULL[0]), traced(NULL[0])
    assert first_boundary(case, [dataclasses.replace(rank, trace=()) for rank in ranks], STEP) is None
    broken = [dataclasses.replace(s, piece=Piece.whole(torch.zeros(4, 8, 5))) for s in ranks[1].trace]
    found = first_boundary(case, [ranks[0], dataclasses.replace(ranks[1], trace=tuple(broken))], STEP)
    assert found is not None
    assert "no part of" in found.sentence


def test_values_that_are_no_number_are_found(traced):
    case, ranks = Case.parse(NULL[0]), traced(NULL[0])
    changed = tuple(
        dataclasses.replace(s, piece=Piece(s.piece.data * float("nan"), 0, s.piece.local_shape))
        if (s.module, s.direction) == ("layers.0.q_proj", "forward")
        else s
        for s in ranks[1].trace
    )
    found = first_boundary(case, [ranks[0], dataclasses.replace(ranks[1], trace=changed)], STEP)
    assert found is not None
    assert (found.module, found.ranks) == ("layers.0.q_proj", (1,))
    assert "no number" in found.sentence


def model_and_batch(case: Case):
    model = Decoder(case, tie=False)
    load_weights(model, initial_weights(case))
    return model, micro_batch(case, 0, 0, 0)


def test_hooks_are_gone_afterwards_and_memory_is_bounded():
    case = Case("handwritten", tp=1)
    model, batch = model_and_batch(case)
    with Tracer(model, case, limit=3 * 4 * 8 * 32 * 4) as tracer:
        model(batch.tokens, batch.labels)[0].backward()
    kept = sum(s.piece.data.numel() * 4 for s in tracer.seen)
    assert 0 < kept <= 3 * 4 * 8 * 32 * 4
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    count = len(tracer.seen)
    model(batch.tokens, batch.labels)
    assert len(tracer.seen) == count


def test_every_boundary_is_kept_both_ways():
    case = Case("handwritten", tp=1)
    model, batch = model_and_batch(case)
    with Tracer(model, case) as tracer:
        model(batch.tokens, batch.labels)[0].backward()
    kept = {(s.module, s.direction) for s in tracer.seen}
    assert {(name, way) for name in boundaries(case) for way in ("forward", "backward")} <= kept
    assert ("loss", "forward") in kept


def test_nothing_is_kept_unless_asked_for(run_jobs):
    assert all(rank.trace == () for rank in run_jobs([(NULL[0], None)])[0])


@pytest.mark.parametrize(("k", "kind"), [(64, "add"), (512, "add"), (256, "tf32"), (256, "bf16")])
def test_predicted_rounding_of_a_product_is_that_of_real_products(k, kind):
    """Within a quarter, the spread that the published error analysis claims for its own predictions."""
    generator = torch.Generator().manual_seed(k)
    a, b = (torch.randn(shape, generator=generator) for shape in ((64, k), (k, 64)))
    exact = a.double() @ b.double()
    if kind == "add":  # fp32, one term after another: the order that the model assumes
        run = torch.zeros(64, 64)
        for i in range(k):
            run += (a[:, i : i + 1].double() * b[i : i + 1].double()).float()
        sigma = matmul_sigma(a, b, u_acc=2.0**-24, u_out=0.0)
    elif kind == "tf32":
        run = (to_tf32(a).double() @ to_tf32(b).double()).float()
        sigma = matmul_sigma(a, b, u_in=2.0**-11, u_acc=0.0, u_out=2.0**-24)
    else:
        run = exact.bfloat16().float()
        sigma = matmul_sigma(a, b, u_acc=0.0, u_out=2.0**-8)
    ratio = float((run - exact).square().mean().sqrt() / sigma.square().mean().sqrt())
    assert 0.75 < ratio < 1.25
