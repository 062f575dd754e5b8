"""References on disk: bit for bit what was computed, bounded, shared without locks, healed when damaged."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from suites import reference_store
from suites.cases import Case
from suites.model import EMBEDDING, HEAD, initial_weights
from suites.reference import Evaluation, ReferenceCache
from suites.reference_store import ReferenceStore, packed, unpacked

CASE = Case("handwritten", head="row", layers=1)
DiskUsage = namedtuple("DiskUsage", "total used free")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def weights() -> dict[str, Tensor]:
    return initial_weights(CASE)


def cache(directory: Path, **options: object) -> ReferenceCache:
    return ReferenceCache(store=ReferenceStore(directory, **options))  # type: ignore[arg-type]


def entries(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def same(one: Evaluation, other: Evaluation) -> bool:
    def bits(tensor: Tensor | None) -> object:
        if tensor is None:
            return None
        return tensor.dtype, tensor.shape, tensor.stride(), tensor.contiguous().view(torch.uint8).numpy().tobytes()

    def all_bits(tensors: Mapping[object, Tensor]) -> list[object]:
        return [(key, bits(tensor)) for key, tensor in tensors.items()]

    return (
        one.loss == other.loss
        and all_bits(one.logits) == all_bits(other.logits)
        and all_bits(one.gradients) == all_bits(other.gradients)
        and bits(one.lookup) == bits(other.lookup)
        and bits(one.projection) == bits(other.projection)
    )


@pytest.mark.parametrize("arithmetic", ["float64", "float32", "bfloat16", "tf32"])
@pytest.mark.parametrize("tie", ["tied", "untied"])
def test_what_is_loaded_is_what_was_computed_bit_for_bit(tmp_path, tie, arithmetic):
    case = CASE.but(tie=tie, accumulate=2)
    first, second = cache(tmp_path), cache(tmp_path)
    weights = initial_weights(case)
    computed = first.evaluate(case, weights, 0, arithmetic)
    loaded = second.evaluate(case, weights, 0, arithmetic)
    assert (first.misses, first.loaded) == (1, 0)
    assert (second.misses, second.loaded) == (0, 1)
    assert same(computed, loaded)
    assert (loaded.gradients[EMBEDDING] is loaded.gradients[HEAD]) == (tie == "tied")
    assert same(loaded, ReferenceCache().evaluate(case, weights, 0, arithmetic))


def test_whatever_decides_on_bits_decides_on_the_entry(tmp_path, weights):
    def count() -> int:
        return len(entries(tmp_path))

    cache(tmp_path).evaluate(CASE, weights, 0)
    assert count() == 1
    cache(tmp_path).evaluate(CASE.but(zero=2, optimizer="sgd"), weights, 0)
    assert count() == 1, "these factors are none of the reference's business"
    cache(tmp_path).evaluate(CASE.but(logit_scale=0.5), weights, 0)
    cache(tmp_path).evaluate(CASE, weights, 1)
    cache(tmp_path).evaluate(CASE, weights, 0, "float32")
    cache(tmp_path).evaluate(CASE, weights, 0, "float32", perturbed=1)
    other = {name: value + (name == EMBEDDING) * 1e-7 for name, value in weights.items()}
    cache(tmp_path).evaluate(CASE, other, 0)
    assert count() == 6


def test_other_sources_and_another_number_of_threads_share_nothing(tmp_path, weights, monkeypatch):
    cache(tmp_path).evaluate(CASE, weights, 0)
    monkeypatch.setattr(reference_store, "SOURCES", "other")
    changed = cache(tmp_path)
    changed.evaluate(CASE, weights, 0)
    assert changed.loaded == 0
    monkeypatch.undo()
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        threads = cache(tmp_path)
        threads.evaluate(CASE, weights, 0)
    finally:
        torch.set_num_threads(before)
    assert threads.loaded == 0
    assert len(entries(tmp_path)) == 3


@pytest.mark.parametrize("variable", ["MKL_CBWR", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"])
def test_another_choice_of_kernels_shares_nothing(tmp_path, weights, monkeypatch, variable):
    """ONEDNN_MAX_CPU_ISA=AVX2 moves bits of a bf16 gradient, for one, and none of torch's own switches shows it."""
    monkeypatch.delenv(variable, raising=False)
    cache(tmp_path).evaluate(CASE, weights, 0)
    monkeypatch.setenv(variable, "AVX2")
    other = cache(tmp_path)
    other.evaluate(CASE, weights, 0)
    assert (other.loaded, len(entries(tmp_path))) == (0, 2)


def test_without_onednn_nothing_is_shared(tmp_path, weights, monkeypatch):
    cache(tmp_path).evaluate(CASE, weights, 0)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    other = cache(tmp_path)
    other.evaluate(CASE, weights, 0)
    assert (other.loaded, len(entries(tmp_path))) == (0, 2)


def _truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _flipped(data: bytes) -> bytes:
    return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]


@pytest.mark.parametrize(
    "damage",
    [_truncated, _flipped, lambda data: b"", lambda data: b"no tensors", lambda data: pickle.dumps({"a": 1})],
    ids=["truncated", "one bit", "empty", "foreign", "pickle"],
)
def test_a_damaged_entry_is_computed_anew(tmp_path, weights, damage):
    right = cache(tmp_path).evaluate(CASE, weights, 0)
    (entry,) = entries(tmp_path)
    whole = entry.read_bytes()
    entry.write_bytes(damage(whole))
    healed = cache(tmp_path)
    assert same(healed.evaluate(CASE, weights, 0), right)
    assert (healed.loaded, healed.misses) == (0, 1)
    assert entry.read_bytes() == whole


def test_an_entry_under_another_ones_name_is_not_believed(tmp_path, weights):
    cache(tmp_path).evaluate(CASE, weights, 0)
    (first,) = entries(tmp_path)
    right = cache(tmp_path).evaluate(CASE, weights, 1)
    (second,) = set(entries(tmp_path)) - {first}
    second.write_bytes(first.read_bytes())
    healed = cache(tmp_path)
    assert same(healed.evaluate(CASE, weights, 1), right)
    assert healed.loaded == 0


def test_bounded_and_what_was_used_last_stays(tmp_path, weights):
    cache(tmp_path).evaluate(CASE, weights, 0)
    size = entries(tmp_path)[0].stat().st_size
    for path in entries(tmp_path):
        path.unlink()
    store = ReferenceStore(tmp_path, size=4 * size)
    for step in range(12):
        ReferenceCache(store=store).evaluate(CASE, weights, step)
        for age, path in enumerate(sorted(entries(tmp_path), key=lambda p: p.stat().st_mtime_ns)):
            os.utime(path, (time.time() - 1000 + age, time.time() - 1000 + age))
    held = sum(path.stat().st_size for path in entries(tmp_path))
    assert held <= 4 * size * (1 + reference_store.SLACK) + size
    last = ReferenceCache(store=ReferenceStore(tmp_path))
    last.evaluate(CASE, weights, 11)
    assert last.loaded == 1
    first = ReferenceCache(store=ReferenceStore(tmp_path))
    first.evaluate(CASE, weights, 0)
    assert first.loaded == 0


def test_an_entry_that_is_used_outlives_younger_ones(tmp_path, weights):
    for step in range(4):
        cache(tmp_path).evaluate(CASE, weights, step)
        (new,) = (path for path in entries(tmp_path) if path.stat().st_mtime > time.time() - reference_store.STALE)
        written = time.time() - (10 - step) * reference_store.STALE
        os.utime(new, (written, written))
    oldest = cache(tmp_path)
    oldest.evaluate(CASE, weights, 0)
    assert oldest.loaded == 1
    size = max(path.stat().st_size for path in entries(tmp_path))
    cache(tmp_path, size=3 * size).evaluate(CASE, weights, 4)  # makes room before it writes
    left = cache(tmp_path)
    for step in range(5):
        left.evaluate(CASE, weights, step)
        assert (left.loaded, left.misses) == [(1, 0), (1, 1), (1, 2), (2, 2), (3, 2)][step]


def test_left_over_temporary_files_go_and_foreign_files_stay(tmp_path, weights):
    foreign, dead, young = (
        tmp_path / name for name in ("notes.txt", f"{'a' * 64}.{'b' * 16}.tmp", f"{'c' * 64}.{'d' * 16}.tmp")
    )
    for path in (foreign, dead, young):
        path.write_bytes(b"x")
    old = time.time() - 2 * reference_store.STALE
    for path in (foreign, dead):
        os.utime(path, (old, old))
    cache(tmp_path).evaluate(CASE, weights, 0)
    assert foreign.exists()
    assert young.exists()
    assert not dead.exists()


@pytest.mark.parametrize("kind", ["a file", "read-only", "full", "nearly full", "unreadable"])
def test_a_directory_that_cannot_be_used_costs_nothing_but_a_line(tmp_path, weights, kind, monkeypatch):
    place, said = tmp_path / "references", []
    if kind == "a file":
        place.write_text("in the way")
    elif kind == "nearly full":
        monkeypatch.setattr(reference_store.shutil, "disk_usage", lambda _: DiskUsage(2**40, 2**40 - 2**20, 2**20))
    elif kind == "unreadable":

        def deny(self: Path) -> bytes:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "read_bytes", deny)
    else:

        def refuse(self: Path, data: bytes) -> int:
            if kind == "read-only":
                raise OSError(30, "Read-only file system")
            with self.open("wb") as stream:
                stream.write(data[: len(data) // 2])
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "write_bytes", refuse)
    found = cache(place, say=said.append)
    for step in range(3):
        assert same(found.evaluate(CASE, weights, step), ReferenceCache().evaluate(CASE, weights, step))
    assert len(said) == 1
    assert str(place) in said[0]
    assert not list(tmp_path.rglob("*.tmp"))
    assert not entries(place)


_WRITER = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from suites.cases import Case
from suites.model import initial_weights
from suites.reference import ReferenceCache
from suites.reference_store import ReferenceStore
case = Case("handwritten", head="row", layers=1)
weights = initial_weights(case)
print("ready", flush=True)
sys.stdin.readline()
loaded = same = 0
for step in range(int(sys.argv[2])):
    cache = ReferenceCache(store=ReferenceStore(Path(sys.argv[1])))
    found, right = cache.evaluate(case, weights, step), ReferenceCache().evaluate(case, weights, step)
    loaded += cache.loaded
    same += all(torch.equal(found.gradients[name], right.gradients[name]) for name in right.gradients)
print(loaded, same, flush=True)
"""


def writer(directory: Path, steps: int, before: str = "") -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", before + _WRITER, str(directory), str(steps)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    return process


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin
    process.stdin.write("\n")
    process.stdin.flush()


def end(process: subprocess.Popen[str]) -> list[str]:
    """What it printed last."""
    said, _ = process.communicate(timeout=60)
    return said.split()


def test_two_processes_may_write_the_same_entries_and_one_may_be_killed(tmp_path, weights):
    both = [writer(tmp_path, 12), writer(tmp_path, 12), writer(tmp_path, 1000)]
    for process in both:
        go(process)
    while len(entries(tmp_path)) < 3 and both[2].poll() is None:
        time.sleep(0.01)
    both[2].kill()
    for process in both[:2]:
        assert end(process)[1] == "12", "each got what is right"
    end(both[2])
    last = writer(tmp_path, 12)
    go(last)
    assert end(last) == ["12", "12"], "whole entries, all of them"


_KILLED = """
import os, signal
from pathlib import Path
def half(self, data):
    with self.open("wb") as stream:
        stream.write(data[: len(data) // 2])
    os.kill(os.getpid(), signal.SIGKILL)
Path.write_bytes = half
"""


def test_what_a_killed_writer_leaves_is_never_an_entry(tmp_path, weights):
    process = writer(tmp_path, 1, _KILLED)
    go(process)
    assert end(process) == []
    assert process.returncode == -signal.SIGKILL
    assert [path.suffix for path in tmp_path.iterdir()] == [".tmp"]
    after = cache(tmp_path)
    assert same(after.evaluate(CASE, weights, 0), ReferenceCache().evaluate(CASE, weights, 0))
    assert (after.loaded, after.misses) == (0, 1)


def test_an_entry_holds_no_more_than_tensors_and_json(weights):
    raw = packed(ReferenceCache().evaluate(CASE, weights, 0), "a" * 64)
    assert b"__main__" not in raw
    assert not raw.startswith(b"\x80"), "no pickle"
    with pytest.raises(reference_store.BAD):
        unpacked(raw, "b" * 64)


def test_large_evaluations_are_not_kept(tmp_path):
    case = Case("handwritten", hidden=64, vocab=4096, layers=1)
    cache(tmp_path).evaluate(case, initial_weights(case), 0)
    assert not entries(tmp_path)
