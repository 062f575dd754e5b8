"""Several nodes: two torchrun agents on loopback, and what nodes refuse each other for."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from ci import nodes
from ci.forkserver import Options
from ci.nodes import Nodes, Place, Welcome
from ci.records import read_run
from ci.subject import SetupError
from ci.tests.conftest import assert_gone, command, environment, tiebench, wait_until
from suites.cases import Case

CASES = (
    Case("handwritten", layers=1),
    Case("handwritten", layers=1, dp=2),
    Case("handwritten", layers=1, tp=1),
    Case("deepspeed", head="row", zero=2),
)
# Each rank leaves a file that says where it comes from.
WHERE = """
import os
from pathlib import Path
name = f"{os.environ['WORLD_SIZE']}-{os.environ['RANK']}"
(Path(__file__).parent / name).write_text(f"{os.environ['GROUP_RANK']} {os.environ['LOCAL_RANK']} {os.getppid()}")
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextlib.contextmanager
def agents(place: Path, *words: str, each: int = 1) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two torchrun agents with the same words, as on two machines; they write to ``agent0`` and ``agent1``."""
    port, started = free_port(), []
    for number in range(2):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(each)]
        torchrun += ["--node-rank", str(number), "--master-addr", "127.0.0.1", "--master-port", str(port)]
        with open(place / f"agent{number}", "wb") as log:
            full = [*torchrun, "--no-python", *command(*words)]
            started.append(subprocess.Popen(full, cwd=place, env=environment(), stdout=log, stderr=subprocess.STDOUT))
    try:
        yield started
    finally:
        for process in started:
            with contextlib.suppress(psutil.Error):
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
            process.kill()
            process.wait()


def run_words(*cases: Case) -> list[str]:
    return ["run", "--out", "run", "--device", "cpu", *(word for case in cases for word in ("--case", case.id))]


def test_ranks_of_one_set_come_from_two_nodes_and_there_is_one_record_log(tmp_path):
    patch = tmp_path / "where.py"
    patch.write_text(WHERE)
    with agents(tmp_path, *run_words(*CASES), "--patch", str(patch)) as both:
        codes = [process.wait(200) for process in both]
    said = (tmp_path / "agent0").read_text() + (tmp_path / "agent1").read_text()
    assert codes == [0, 0], said
    run = read_run(tmp_path / "run")
    assert [(r.case, r.verdict) for r in run.records] == [(case.id, "rounding") for case in CASES]
    found = {path.name: path.read_text().split() for path in tmp_path.glob("[124]-[0-3]")}
    assert {name: (node, local) for name, (node, local, _) in found.items()} == {
        "1-0": ("0", "0"),
        "2-0": ("0", "0"),
        "2-1": ("1", "0"),
        "4-0": ("0", "0"),
        "4-1": ("0", "1"),
        "4-2": ("1", "0"),
        "4-3": ("1", "1"),
    }
    assert len({parent for node, _, parent in found.values() if node == "0"}) == 1
    assert len({parent for _, _, parent in found.values()}) == 2, "each node forks its own ranks"


def test_a_node_that_is_lost_ends_the_run_in_good_order_and_it_can_be_resumed(tmp_path):
    many = [CASES[0].but(seed=seed, steps=20) for seed in range(40)]
    with agents(tmp_path, *run_words(*many)) as both:

        def finished() -> int:
            log = tmp_path / "run" / "events.jsonl"
            return log.read_bytes().count(b'"event":"final"') if log.exists() else 0

        wait_until(lambda: finished() > 2, "the first records", 90.0)
        servers = [
            process
            for process in psutil.Process(both[1].pid).children(recursive=True)
            if "ci.cli" in " ".join(process.cmdline()) or "tiebench" in process.name()
        ]
        below = psutil.Process(both[1].pid).children(recursive=True)
        servers[0].kill()
        assert both[0].wait(60) != 0
        assert_gone(below)
    said = (tmp_path / "agent0").read_text()
    assert "node 1 (" in said, said
    assert "is gone, and its ranks with it; tiebench run --resume goes on" in said
    run = read_run(tmp_path / "run")
    assert run.end.reason == "error"
    done = [r for r in run.records if r.status == "finished"]
    assert len(done) > 2
    assert {r.verdict for r in done} == {"rounding"}, "no case is blamed"
    resumed = tiebench("run", "--resume", "run", "--device", "cpu", "--budget", "0", cwd=tmp_path)
    assert f"going on with run: {len(many) - len(done)} of {len(many)}" in resumed.stdout


def test_several_processes_on_a_node_are_refused(tmp_path):
    told = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "a"}
    done = subprocess.run(
        command(*run_words(CASES[0])),
        cwd=tmp_path,
        env=environment() | told,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("tiebench: torchrun with --nproc-per-node 1, please")
    assert not (tmp_path / "run").exists()
    assert nodes.place({}) is None
    assert nodes.place(told | {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}) is None, "one node is as none"


class Store(dict):  # type: ignore[type-arg]
    """Torchrun's store, as far as it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.there = threading.Event()

    def set(self, key: str, value: bytes) -> None:
        self[key] = value
        self.there.set()

    def wait(self, keys: list[str], timeout: object) -> None:
        if not self.there.wait(10):
            raise RuntimeError("wait timeout")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    made = Store()
    monkeypatch.setattr(nodes, "_store", lambda limit: made)
    return made


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path


def lend(target: Path | None = None) -> tuple[threading.Thread, list[str]]:
    """Node 1, in a thread; what it raised."""
    said: list[str] = []

    def serve() -> None:
        try:
            nodes.serve(Place(1, 2, "127.0.0.1"), target, 20.0, said.append)
        except SetupError as error:
            said.append(str(error))

    thread = threading.Thread(target=serve)
    thread.start()
    return thread, said


def test_nodes_with_other_versions_are_refused_by_name(store, directory, monkeypatch):
    thread, said = lend(target=Path("/other"))
    with pytest.raises(SetupError, match=r"node 1 \(.*\) has target /other, and node 0 has as installed"):
        Nodes(Place(0, 2, "127.0.0.1"), "127.0.0.1", None, 20.0, lambda text: None).gather(directory, Options())
    thread.join(20)
    assert "has target /other" in said[0]


def test_another_disk_is_refused(store, directory, monkeypatch):
    monkeypatch.setattr(nodes, "_foreign", lambda welcome: real(Welcome(**{**fields(welcome), "file": "/no/such"})))
    thread, said = lend()
    with pytest.raises(SetupError, match=r"node 1 .*is not the same on all nodes \(No such file or directory\)"):
        Nodes(Place(0, 2, "127.0.0.1"), "127.0.0.1", None, 20.0, lambda text: None).gather(directory, Options())
    thread.join(20)
    assert "it must be on a shared disk" in said[0]
    assert not list((directory / "logs").glob("nodes-*"))


real = nodes._foreign


def fields(welcome: Welcome) -> dict[str, object]:
    return {name: getattr(welcome, name) for name in welcome.__struct_fields__}


def test_a_node_that_does_not_come(store, directory):
    with pytest.raises(SetupError, match="node 1, 2 did not come within 0 s: start the same command on all nodes"):
        Nodes(Place(0, 3, "127.0.0.1"), "127.0.0.1", None, 0.3, lambda text: None).gather(directory, Options())


def test_strangers_and_wrong_tokens_are_dropped(store, directory):
    def intrude() -> None:
        store.there.wait(10)
        host, port, _ = msgspec.json.decode(store[nodes.KEY])
        for words in (b"GET / HTTP/1.1\n", b'{"kind":"node","token":"guessed","node":1,"host":"x","serves":true}\n'):
            with socket.create_connection((host, port)) as connection:
                connection.sendall(words)
                assert connection.recv(100) == b""

    thread = threading.Thread(target=intrude)
    thread.start()
    with pytest.raises(SetupError, match="node 1 did not come"):
        Nodes(Place(0, 2, "127.0.0.1"), "127.0.0.1", None, 1.5, lambda text: None).gather(directory, Options())
    thread.join(10)
