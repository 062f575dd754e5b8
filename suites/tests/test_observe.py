"""Assembling full tensors from pieces, and files of observations that cannot run code."""

from __future__ import annotations

import os
import pickle

import pytest
import torch
from safetensors.torch import save_file

from suites.cases import Case
from suites.observe import ObservationError, Piece, RankObservation, assemble, bitwise_equal

FULL = torch.arange(12 * 5, dtype=torch.float32).reshape(12, 5)


def zero_parts(shard: torch.Tensor, cut: int) -> list[Piece]:
    flat = shard.reshape(-1)
    return [Piece.part(flat[:cut], 0, shard.shape), Piece.part(flat[cut:], cut, shard.shape)]


def pieces(dim: int, cut: int = 7) -> dict[tuple[int, int], Piece]:
    found = {}
    for tp_rank, shard in enumerate(FULL.tensor_split(2, dim)):
        for dp_rank, piece in enumerate(zero_parts(shard.contiguous(), cut)):
            found[tp_rank, dp_rank] = piece
    return found


@pytest.mark.parametrize("dim", [0, 1])
def test_uneven_shards_in_zero_parts_make_the_full_tensor(dim):
    whole = assemble("w", pieces(dim), FULL.shape, 2, 2)
    assert torch.equal(whole.value, FULL)
    assert whole.dim == dim
    assert whole.sizes == ((6, 6) if dim == 0 else (3, 2))
    assert whole.replicas_equal


def test_a_whole_cut_over_all_ranks_is_put_together_from_all_of_them():
    whole = torch.arange(7.0)
    parts = {(t, d): (t + 2 * d) * 2 for t in range(2) for d in range(2)}
    pieces = {
        place: Piece.part(whole[start : start + 2], start, whole.shape, everywhere=True)
        for place, start in parts.items()
    }
    found = assemble("norm.weight", pieces, whole.shape, 2, 2)
    assert torch.equal(found.value, whole)
    assert (found.dim, found.partitioned) == (None, True)
    del pieces[1, 1]
    with pytest.raises(ObservationError, match="3 of 4 data-parallel pieces"):
        assemble("norm.weight", pieces, whole.shape, 2, 2)


def test_replicas_that_differ_by_one_bit_are_seen():
    copies = {(t, d): Piece.whole(FULL) for t in range(2) for d in range(2)}
    assert assemble("w", copies, FULL.shape, 2, 2).replicas_equal
    other = FULL.clone()
    other[3, 3] = torch.nextafter(other[3, 3], torch.tensor(1e9))
    for place in ((1, 0), (0, 1)):
        whole = assemble("w", copies | {place: Piece.whole(other)}, FULL.shape, 2, 2)
        assert not whole.replicas_equal
        assert "rank 1" in whole.disagreement


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: {k: v for k, v in p.items() if k != (1, 1)}, "1 of 2 data-parallel pieces"),
        (lambda p: p | {(0, 1): Piece.part(torch.zeros(3), 9, (6, 5))}, "are on no rank"),
        (lambda p: p | {(0, 1): Piece.part(torch.zeros(30), 7, (6, 5))}, "holds elements"),
        (lambda p: p | {(0, 1): Piece.part(torch.zeros(30).double(), 0, (6, 5))}, "holds elements"),
        (lambda p: p | {(0, 1): Piece.part(torch.zeros(3), 0, (6, 4))}, "different shapes"),
        (lambda p: p | {(1, d): Piece.whole(torch.zeros(5, 5)) for d in range(2)}, "do not add up"),
    ],
)
def test_gaps_and_odd_shapes_are_errors(change, message):
    with pytest.raises(ObservationError, match=message):
        assemble("w", change(pieces(0)), FULL.shape, 2, 2)


def test_bitwise_equality():
    nan = torch.tensor([float("nan")])
    assert bitwise_equal(nan, nan.clone())
    assert not bitwise_equal(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not bitwise_equal(torch.zeros(2), torch.zeros(2).double())
    assert bitwise_equal(torch.zeros(2, 3), torch.zeros(3, 2).t())


def test_observations_come_back_from_a_file(run_jobs):
    ranks = run_jobs([("handwritten:tie=tied,head=row,zero=2,hidden=35", None)])[0]
    assert [r.rank for r in ranks] == [0, 1]
    assert ranks[0].steps[0].collectives
    assert ranks[0].steps[1].collectives is None
    assert all(step.seconds > 0 for step in ranks[0].steps)
    assert ranks[0].peak_memory_bytes > 1e7


def test_peak_memory_is_that_of_the_case(run_jobs):
    large, small = "handwritten:tie=tied,head=row,zero=0,tp=1,vocab=60000,hidden=64", "handwritten:tp=1,head=row"
    peaks = [ranks[0].peak_memory_bytes for ranks in run_jobs([(large, None), (Case.parse(small).id, None)])]
    assert peaks[1] < peaks[0] - 20e6


class Attack:
    def __reduce__(self):
        return os.mkdir, (os.environ["TIEBENCH_ATTACK"],)


def test_a_file_with_code_in_it_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("TIEBENCH_ATTACK", str(tmp_path / "owned"))
    bad = tmp_path / "rank0.safetensors"
    bad.write_bytes(pickle.dumps(Attack(), protocol=2))
    with pytest.raises(ObservationError, match=r"rank0\.safetensors cannot be read"):
        RankObservation.load(bad)
    torch.save({"steps": [], "x": Attack()}, bad)
    with pytest.raises(ObservationError):
        RankObservation.load(bad)
    assert not (tmp_path / "owned").exists()


def test_missing_torn_and_foreign_files_are_errors(tmp_path, run_jobs):
    with pytest.raises(ObservationError):
        RankObservation.load(tmp_path / "missing.safetensors")
    good = tmp_path / "good.safetensors"
    run_jobs([("handwritten:tie=tied,head=row,zero=2,hidden=35", None)])[0][0].save(good)
    assert RankObservation.load(good).rank == 0
    data = good.read_bytes()
    for cut in (0, 7, 100, len(data) // 2, len(data) - 1):
        torn = tmp_path / "torn.safetensors"
        torn.write_bytes(data[:cut])
        with pytest.raises(ObservationError):
            RankObservation.load(torn)
    other = tmp_path / "other.safetensors"
    for metadata in (None, {"observation": "{}"}, {"observation": "no JSON"}, {"observation": '{"steps": [{}]}'}):
        save_file({"0": torch.zeros(1)}, other, metadata=metadata)
        with pytest.raises(ObservationError):
            RankObservation.load(other)
