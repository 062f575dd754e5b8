"""The `deepspeed` path against an unsharded model of its own, in one set of live processes for all cases.

The set is a subprocess that imports once and forks the ranks: four ranks, then two of them again as a set of two. It
ends with a model whose lookup is broken on purpose, which the same comparison has to see.
"""

from __future__ import annotations

import datetime
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from suites import data, optimizers
from suites.cases import Case, CaseError
from suites.model import EMBEDDING, HEAD, Decoder, initial_weights, load_weights, parameter_shapes, trainable
from suites.observe import Piece, RankObservation, assemble, by_rank

UNEVEN = "hidden=35,vocab=67"
FOUR_RANKS = [
    f"deepspeed:tie=tied,head=vocab,zero=0,tp=2,dp=2,{UNEVEN},clip=0.5,accumulate=2",
    f"deepspeed:tie=tied,head=row,zero=1,tp=2,dp=2,{UNEVEN},frozen=body",
    f"deepspeed:tie=tied,head=row,zero=2,tp=2,dp=2,{UNEVEN},clip=0.5,accumulate=2,optimizer=adamw",
    f"deepspeed:tie=untied,head=gathered,zero=3,tp=2,dp=2,{UNEVEN},head_bias=yes",
    f"deepspeed:tie=tied,head=row,zero=0,tp=4,{UNEVEN}",
    f"deepspeed:tie=tied,head=vocab,zero=3,tp=2,dp=2,{UNEVEN},init=zero,ignored=rank",
]
TWO_RANKS = [
    "deepspeed:tie=tied,head=row,zero=0,embedding_spec=before_head",
    f"deepspeed:tie=tied,head=row,zero=2,{UNEVEN},register=head_first,tie_when=meta",
    f"deepspeed:tie=tied,head=row,zero=3,{UNEVEN},padding_idx=5,frozen=body",
    f"deepspeed:tie=tied,head=vocab,zero=1,{UNEVEN},embedding_spec=after_head,optimizer=momentum",
    f"deepspeed:tie=tied,head=vocab,zero=2,{UNEVEN},padding_idx=40,tie_when=after_load,activation=transposed",
    "deepspeed:tie=tied,head=vocab,zero=3,head_bias=yes,embedding_scale=5.5",
    "deepspeed:tie=tied,head=gathered,zero=0,optimizer=adam",
    "deepspeed:tie=untied,head=vocab,zero=0,frozen=embedding",
    f"deepspeed:tie=untied,head=row,zero=2,{UNEVEN},head_bias=yes",
    "deepspeed:tie=untied,head=gathered,zero=1",
    f"deepspeed:tie=tied,head=unmatched,zero=2,{UNEVEN},ignored=none",
    f"deepspeed:tie=tied,head=row,zero=3,{UNEVEN},init=zero,optimizer_from=client,optimizer=adamw",
    "deepspeed:tie=tied,head=row,zero=0,embedding_option=scale_grad_by_freq,optimizer_from=config,optimizer=adam",
    f"deepspeed:tie=untied,head=row,zero=1,{UNEVEN},frozen=head,init=meta,activation=strided",
    "deepspeed:tie=tied,head=vocab,zero=2,embedding_spec=before_head,embedding_cut=column,activation=sequence_first",
    f"deepspeed:tie=tied,head=vocab,zero=2,tp=1,dp=2,{UNEVEN},optimizer=adamw,clip=0.5",
    "deepspeed:tie=untied,head=vocab,zero=3,tp=1,dp=2,accumulate=2",
]
BROKEN = "deepspeed:tie=tied,head=row,zero=0"
CLASSES = {  # head of a sharded case -> classes that hold the embedding (tied, untied) and the head
    "vocab": (("VocabParallelEmbedding", "Embedding"), "VocabParallelLinear"),
    "row": (("HiddenParallelEmbedding", "Embedding"), "LinearAllreduceWithReplicatedInput"),
}


def _ranks_of(rank: int, out: Path) -> None:
    """One process: its part in every case, then the count of what was left behind."""
    from suites.train import run_rank

    torch.set_num_threads(1)
    files = iter(range(1000))

    def train(size: int, cases: list[str]) -> None:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{out}/store-{next(files)}",
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=60),
        )
        for text in cases:
            run_rank(Case.parse(text), torch.device("cpu")).save(out / f"{_file(text)}.{rank}")
        dist.destroy_process_group()

    train(4, FOUR_RANKS)
    if rank < 2:
        train(2, TWO_RANKS)
    gc.collect()
    names = [type(o).__name__ for o in gc.get_objects()]
    left = {"engines": names.count("DeepSpeedEngine"), "models": names.count("Decoder")}
    (out / f"left.{rank}").write_text(json.dumps(left))
    if rank < 2:
        _break_the_lookup()
        (out / "broken").mkdir(exist_ok=True)
        out = out / "broken"
        train(2, [BROKEN])


def _break_the_lookup() -> None:
    import torch.nn.functional as F
    from deepspeed.module_inject import layers

    def forward(self: layers.HiddenParallelEmbedding, tokens: Tensor) -> Tensor:
        rows = F.embedding(tokens, self.weight.detach(), padding_idx=self.padding_idx)
        return layers.GatherFromTensorParallelRegion.apply(self.mp_group, rows, self._partition_sizes)

    layers.HiddenParallelEmbedding.forward = forward


def _file(case: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in case)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with every rank's observation of every case."""
    pytest.importorskip("deepspeed")
    out = tmp_path_factory.mktemp("deepspeed")
    root = Path(__file__).parents[2]
    environment = {
        **os.environ,
        "PYTHONPATH": str(root),
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-W", "ignore", __file__, str(out)]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


def _read(out: Path, text: str) -> tuple[Case, list[RankObservation]]:
    case = Case.parse(text)
    return case, [RankObservation.load(out / f"{_file(text)}.{rank}") for rank in range(case.world_size)]


def _distance(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-12)).item()


def compare(case: Case, observed: list[RankObservation]) -> list[str]:
    """What differs between the ranks' training and the unsharded fp64 model at the run's own weights, step by step."""
    wrong: list[str] = []
    ranks, shapes = by_rank(observed), parameter_shapes(case)

    def full(name: str, pick: Callable[[RankObservation], dict[str, Piece]]) -> Tensor:
        whole = assemble(name, {place: pick(o)[name] for place, o in ranks.items()}, shapes[name], case.tp, case.dp)
        if not whole.replicas_equal:
            wrong.append(whole.disagreement)
        return whole.value

    before = {name: full(name, lambda o: o.initial) for name in shapes}
    wrong += [f"initial {n}" for n, w in initial_weights(case).items() if not torch.equal(before[n], w.float())]
    replays = {name: optimizers.replay(case) for name in shapes}
    for step in range(case.steps):
        model = Decoder(case, tie=case.tied).double()
        load_weights(model, {name: weight.double() for name, weight in before.items()})
        shares = []
        for dp_rank in range(case.dp):
            for micro in range(case.accumulate):
                batch = data.micro_batch(case, step, micro, dp_rank)
                loss, _ = model(batch.tokens, batch.labels)
                shares.append(loss / (case.dp * case.accumulate))
                for tp_rank in range(case.tp):
                    seen = ranks[tp_rank, dp_rank].steps[step].loss[micro]
                    if abs(seen - loss.item()) > 1e-5:
                        wrong.append(f"step {step} loss {seen} for {loss.item()}")
        torch.stack(shares).sum().backward()
        expected = {n: p for n, p in model.named_parameters(remove_duplicate=False) if trainable(case, n)}
        norm = torch.stack([p.grad.norm() for p in set(expected.values())]).norm().item()
        wrong += [
            f"step {step} norm {o.steps[step].gradient_norm} for {norm}"
            for o in observed
            if not _close(o.steps[step].gradient_norm, norm, case)
        ]
        gradients = {}
        for name, parameter in expected.items():
            gradients[name] = full(name, lambda o, step=step: o.steps[step].gradients)
            if (error := _distance(gradients[name], parameter.grad)) > 1e-5:
                wrong.append(f"step {step} gradient of {name} off by {error:.2g}")
        after = {name: full(name, lambda o, step=step: o.steps[step].weights) for name in shapes}
        for name, weight in before.items():
            if name not in expected:
                wrong += [f"{name} is frozen and moved"] if not torch.equal(after[name], weight) else []
                continue
            gradient = gradients[name].double() * optimizers.clip_coefficient(norm, case.clip)
            target = replays[name].step(weight.double(), gradient)
            allowed = 1e-4 * (target - weight).norm() + 6e-8 * target.norm()
            if (after[name] - target).norm() > allowed:
                wrong.append(f"step {step} update of {name}")
        before = after
    return wrong


def _close(norm: float | None, expected: float, case: Case) -> bool:
    if norm is None:
        return case.zero == 0  # DeepSpeed reports none there
    return abs(norm - expected) < 1e-5 * expected


@pytest.mark.parametrize("text", [*FOUR_RANKS, *TWO_RANKS])
def test_training_equals_the_unsharded_model(trained: Path, text: str) -> None:
    assert compare(*_read(trained, text)) == []


@pytest.mark.parametrize("text", [*FOUR_RANKS, *TWO_RANKS])
def test_tie_census_and_layout(trained: Path, text: str) -> None:
    case, observed = _read(trained, text)
    moving = [n for n in parameter_shapes(case) if trainable(case, n) and not (case.tied and n == HEAD)]
    for rank in observed:
        late = [e for e in rank.lifecycle if e.event == "sharded" or e.event.startswith("step")]
        assert len(late) == 1 + case.steps
        assert all(e.same_object == case.tied for e in late)
        assert sorted(rank.census) == sorted(moving)
        if case.tp > 1 and case.head in CLASSES:
            embeddings, head = CLASSES[case.head]
            assert (rank.layout[EMBEDDING], rank.layout[HEAD]) == (embeddings[not case.tied], head)
        elif case.tp == 1 or case.tied:  # AutoTP leaves a tied gathered head replicated
            assert (rank.layout[EMBEDDING], rank.layout[HEAD]) == ("Embedding", "Linear")


@pytest.mark.parametrize("text", [t for t in FOUR_RANKS if "dp=2" in t])
def test_zero_shares_the_gradient_out(trained: Path, text: str) -> None:
    """At ZeRO 1 and more each element is on one data-parallel rank: nothing was gathered to be observed."""
    case, observed = _read(trained, text)
    for tp_rank in range(case.tp):
        pieces = [o.steps[0].gradients for o in observed if o.tp_rank == tp_rank]
        within = [p for mine in pieces for p in mine.values() if not p.everywhere]
        held = sum(p.data.numel() for p in within)
        shard = sum(torch.Size(p.local_shape).numel() for p in pieces[0].values() if not p.everywhere)
        assert held == shard * (case.dp if case.zero == 0 else 1)
        weights = [o.steps[0].weights[EMBEDDING] for o in observed if o.tp_rank == tp_rank]
        parts = sum(w.data.numel() for w in weights)
        assert parts == torch.Size(weights[0].local_shape).numel() * (1 if case.zero == 3 else case.dp)


def test_nothing_is_left_in_the_processes(trained: Path) -> None:
    for rank in range(4):
        assert json.loads((trained / f"left.{rank}").read_text()) == {"engines": 0, "models": 0}


def test_a_patched_lookup_is_what_runs(trained: Path) -> None:
    case, observed = _read(trained / "broken", BROKEN)
    assert any(f"gradient of {EMBEDDING}" in line for line in compare(case, observed))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("deepspeed:tie=untied,head=row,zero=0,embedding_spec=before_head", "does not gather"),
        ("deepspeed:tie=tied,head=row,zero=0,tp=1,dp=2,embedding_spec=before_head", "without tensor parallelism"),
        ("deepspeed:tie=tied,head=row,zero=0,tie_when=after_shard", "AutoTP finds ties when it shards"),
        ("deepspeed:tie=tied,head=row,zero=0,dtype=float64", "no true fp64"),
    ],
)
def test_refused_when_the_case_is_made(text: str, reason: str) -> None:
    with pytest.raises(CaseError, match=reason):
        Case.parse(text)


if __name__ == "__main__":
    import torch.multiprocessing as mp

    import suites.paths.deepspeed  # noqa: F401  (before the fork, so that the ranks share the import)

    gc.freeze()  # what was imported is no garbage: collections in the ranks need not look at it
    mp.start_processes(_ranks_of, args=(Path(sys.argv[1]),), nprocs=4, start_method="fork")
