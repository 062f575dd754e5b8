"""A set of ranks: real processes, one control connection each, and the watchdog over them.

A set is used for many cases. After anything but a good answer of every rank it is killed and never used again: ranks
that have gone different ways cannot be brought back together. All limits are wall-clock seconds on the monotonic clock.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import os
import secrets
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from ci import channel as ch
from ci import hangs
from ci.forkserver import Child, ForkServer
from ci.hangs import Hang

Launcher = Literal["fork", "spawn", "torchrun", "external"]

GRACE = 5.0  # seconds that the other ranks have to answer once one has failed
EXIT_WAIT = 5.0  # seconds to wait for the exit code of a rank that closed its connection
STACKS_WAIT = 3.0
SPARE = 30.0  # a collective may take this much longer than the case limit, so that the watchdog speaks first
LOG_LIMIT, LOG_HEAD, LOG_TAIL = 8 * 2**20, 2**20, 2**18  # bytes: cut a log above LIMIT down to its head and tail
LONGEST = 1e8  # seconds, three years: what timers and sockets of all platforms still take
STACK_LIMIT = 6000  # characters a rank

# What a rank says when another one went away: the consequence of a failure, not its cause.
SECONDARY = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket closed",
    "software caused connection abort",
    "connection was likely closed",
    "no process group",
    "timed out waiting",
    "wait timeout",
    "nccl communicator was aborted",
    "remote process exited",
    "connectfullmesh failed",
)


@dataclass(frozen=True)
class Settings:
    """How ranks are started and what they get.

    Args:
        target: directory to put first on the ranks' import path, None for the installed framework.
        build: package and version that a ``--target`` named; None: whatever is installed.
        patch: source and file name of the user's patch.
        host: address to listen on and to be reached at.
        device: "auto" or "cpu".
        launcher: "fork" from a process that has imported everything (not for CUDA: there it means "spawn"), "spawn"
            fresh processes, "torchrun" on this machine, "external": by hand, anywhere.
        case_limit, startup_limit, judge_limit: seconds, above 0 and at most `LONGEST`.
        keep_observations: keep what the ranks saw of green cases too.
        references: directory in which references are kept between runs; None: they are not.
        known: refusals and known issues of the suite's tables are as expected; else only green is.
    """

    launcher: Launcher = "fork"
    target: Path | None = None
    build: tuple[str, str] | None = None
    patch: tuple[str, str] | None = None
    host: str = "127.0.0.1"
    device: str = "auto"
    case_limit: float = 60.0
    startup_limit: float = 300.0
    judge_limit: float = 300.0
    keep_observations: bool = False
    references: Path | None = None
    known: bool = True
    say: Callable[[str], None] = field(default=print, compare=False)

    def __post_init__(self) -> None:
        """Refuse limits that no clock can keep.

        Raises:
            ValueError: a limit is no number of seconds.
        """
        for name in ("case_limit", "startup_limit", "judge_limit"):
            check_seconds(name, getattr(self, name))


def check_seconds(name: str, value: float, least: float = 1e-3) -> float:
    """The value, if it is a usable number of seconds.

    Raises:
        ValueError: it is not finite (JSON has no infinity), below `least` or above `LONGEST`.
    """
    if not least <= value <= LONGEST:  # false for NaN too
        raise ValueError(f"{name} {value:g}: give seconds from {least:g} to {LONGEST:g}")
    return value


@dataclass(frozen=True)
class Outcome:
    """How a command went on all ranks.

    Args:
        values: results of the ranks that did it.
        failures: exceptions by rank, in the order in which they arrived.
        deaths: how ranks ended that went away, by rank.
        timed_out: the limit was over before every rank had answered.
        phases: where each rank was or how it ended, for people.
        last: the phase that each rank told last.
        hang: what was seen of ranks that did not answer in time, that died, or that lost the others.
        stacks: stacks of ranks that did not answer, and tracebacks of those that failed.
    """

    seconds: float
    values: dict[int, object]
    failures: dict[int, ch.Failed]
    deaths: dict[int, str]
    timed_out: bool
    phases: dict[int, str]
    stacks: str = ""
    last: Mapping[int, str] = field(default_factory=dict)
    hang: Hang | None = None

    @property
    def good(self) -> bool:
        """Every rank did what it was told."""
        return not (self.failures or self.deaths or self.timed_out)

    @property
    def primary(self) -> tuple[int, ch.Failed] | None:
        """The failure that came first and is no consequence of another one."""
        own = [(r, f) for r, f in self.failures.items() if not is_secondary(f)]
        return next(iter(own or self.failures.items()), None)

    @property
    def refused(self) -> bool:
        """Every rank refused to build the case, deliberately."""
        every = 0 < len(self.failures) == len(self.phases)
        return every and all(f.refusal and f.phase == "build" for f in self.failures.values())

    def places(self, *, but: Collection[int] = ()) -> str:
        """Where every rank is, in one line; ranks in the same place are named together, ranks in `but` not at all."""
        groups: dict[str, list[int]] = {}
        for rank, text in sorted(self.phases.items()):
            if rank not in but:
                groups.setdefault(text, []).append(rank)
        return "; ".join(_named(ranks, text) for text, ranks in groups.items())


def _named(ranks: list[int], text: str) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} {text}"
    verb, _, rest = text.partition(" ")
    return (
        f"ranks {', '.join(map(str, ranks))} { ({'is': 'are', 'has': 'have', 'was': 'were'}.get(verb, verb)) } {rest}"
    )


def is_secondary(failure: ch.Failed) -> bool:
    """True when the message says that another rank went away."""
    text = failure.message.lower()
    return any(phrase in text for phrase in SECONDARY)


@dataclass
class Rank:
    """One rank as the supervisor knows it."""

    number: int
    process: subprocess.Popen[bytes] | Child | None = None
    channel: ch.Channel[ch.Event] | None = None
    hello: ch.Hello | None = None
    phase: str = "has not started"
    done: ch.Done | None = None
    failed: ch.Failed | None = None
    death: str | None = None
    stacks: Path | None = None

    @property
    def answered(self) -> bool:
        """Nothing more is to be expected from this rank for this command."""
        return self.done is not None or self.failed is not None or self.death is not None

    @property
    def place(self) -> str:
        """Where the rank is, for people."""
        if self.death:
            return f"{self.death} (last phase: {self.phase})"
        if self.failed:
            return f"has failed with {self.failed.type} in {self.failed.phase!r}"
        if self.done:
            return "has finished"
        if self.hello is None:
            return "has not connected"
        return f"is in {self.phase!r}"


class RankSet:
    """Ranks in a process group. `launch`, `start`, then `load` and `run` while their outcomes are good, then `stop`.

    Args:
        directory: run directory; logs go to ``logs/<name>-rank<r>.log`` in it.
        listener: where the ranks connect, as `listen` makes it; this set closes it.
        servers: fork servers, one a machine, that the ranks are spread over in blocks; none: they come in another way.

    Raises:
        OSError: the directory cannot be written; so does `launch`.
    """

    def __init__(
        self,
        name: str,
        world_size: int,
        settings: Settings,
        directory: Path,
        listener: socket.socket,
        *,
        servers: Sequence[ForkServer] = (),
    ):
        self.servers = servers
        self.name, self.world_size, self.settings = name, world_size, settings
        self.directory = directory.resolve()
        self.ranks = [Rank(number) for number in range(world_size)]
        self.loaded: set[str] = set()
        self.alive = True
        self.device = ""
        self._token, self._mark = secrets.token_hex(16), secrets.token_hex(16)
        self._deaths = hangs.Deaths(hangs.memory_kills())
        self.leftovers: tuple[str, ...] = ()  # processes that outlived the set, and what became of them
        self._selector = selectors.DefaultSelector()
        self._launcher: subprocess.Popen[bytes] | None = None
        self._order: list[int] = []  # ranks in the order in which they failed
        self._listener = listener
        self._listener.settimeout(1.0)
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        (self.directory / "logs").mkdir(exist_ok=True)

    # Starting

    @property
    def address(self) -> str:
        """host:port that ranks connect to."""
        return f"{self.settings.host}:{self._listener.getsockname()[1]}"

    def log(self, who: str) -> Path:
        """Log file of a rank or of the launcher."""
        return self.directory / "logs" / f"{self.name}-{who}.log"

    def launch(self) -> None:
        """Start the processes (or say how to) and return at once."""
        command, extra = worker_command()
        environment = clean_environment() | extra
        environment |= {ch.CONTROL: self.address, ch.TOKEN: self._token, "OMP_NUM_THREADS": "1", hangs.MARK: self._mark}
        if self.settings.host.startswith("127."):
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        if self.servers:
            self._fork(environment)
            return
        if self.settings.launcher in ("fork", "spawn"):
            environment |= {
                "WORLD_SIZE": str(self.world_size),
                "LOCAL_WORLD_SIZE": str(self.world_size),
                "MASTER_ADDR": self.settings.host,
            }
            if threading.current_thread() is threading.main_thread():  # the kernel watches the thread, not the process
                environment[ch.DIE_WITH_PARENT] = str(os.getpid())
            for rank in self.ranks:
                own = {"RANK": str(rank.number), "LOCAL_RANK": str(rank.number)}
                rank.process = self._popen(command, environment | own, f"rank{rank.number}")
            return
        nodes = ["--nnodes", "1", "--standalone"] if self.settings.launcher == "torchrun" else []
        torchrun = ["-m", "torch.distributed.run", *nodes, "--nproc-per-node", str(self.world_size), "--no-python"]
        full = [sys.executable, *torchrun, *command]
        if self.settings.launcher == "torchrun":
            self._launcher = self._popen(full, environment, "launcher")
            return
        shown = {name: environment[name] for name in (ch.CONTROL, ch.TOKEN, *extra)}
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in shown.items())
        self.settings.say(
            f"waiting for {self.world_size} ranks; start them with torchrun (here on one machine; on several ones add "
            f"its --nnodes and --rdzv-endpoint):\n  {variables} {shlex.join(full)}"
        )

    def _fork(self, environment: dict[str, str]) -> None:
        """Fork the ranks, in blocks of neighbours over the machines."""
        most = -(-self.world_size // len(self.servers))
        environment |= {"WORLD_SIZE": str(self.world_size), "MASTER_ADDR": self.settings.host, "DS_ACCELERATOR": "cpu"}
        for rank in self.ranks:
            node, local = divmod(rank.number, most)
            size = min(most, self.world_size - node * most)
            own = {"RANK": str(rank.number), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(size)}
            own["GROUP_RANK"] = str(node)
            log = self.log(f"rank{rank.number}")
            rank.process = self.servers[node].fork("rank", environment | own, log, self.directory)

    def _popen(self, command: list[str], environment: dict[str, str], who: str) -> subprocess.Popen[bytes]:
        with open(self.log(who), "ab") as log:
            return subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a group of its own: a terminal's Ctrl-C reaches the supervisor only
                cwd=self.directory,
            )

    def start(self, limit: float) -> Outcome:
        """Wait until all ranks are up: connected, torch imported, process group joined, patch applied."""
        begin = time.monotonic()
        while any(r.hello is None for r in self.ranks):
            left = begin + limit - time.monotonic()
            self._reap()
            if left <= 0 or any(r.death for r in self.ranks):
                return self._outcome(begin, timed_out=left <= 0)
            self._poll(min(left, 0.1))
        for rank in self.ranks:
            rank.stacks = self.log(f"rank{rank.number}").with_suffix(".stacks")
            self._send(
                rank,
                ch.Setup(
                    log=str(self.log(f"rank{rank.number}")),
                    stacks=str(rank.stacks),
                    timeout=self.settings.case_limit + SPARE,
                    startup_limit=self.settings.startup_limit,
                    target=str(self.settings.target.resolve()) if self.settings.target else None,
                    build=self.settings.build,
                    patch=self.settings.patch,
                    device=self.settings.device,
                ),
            )
        outcome = self._gather(begin + limit - time.monotonic())
        self._deaths.watch(self._pids())
        if outcome.good:
            self.device = str(outcome.values[0])
        return outcome

    # Commands

    def load(self, path: str, limit: float) -> Outcome:
        """Import a path's framework on every rank."""
        outcome = self._command(ch.Load(path=path), limit)
        if outcome.good:
            self.loaded.add(path)
        return outcome

    def collect(self, limit: float) -> Outcome:
        """Describe the environment, seen from rank 0 (the others answer too and must agree on nothing)."""
        return self._command(ch.Collect(), limit)

    def run(self, case: str, observations: Path, fault: str | None, limit: float, trace: int | None = None) -> Outcome:
        """Run one case; rank r saves what it saw to ``observations/rank<r>.safetensors``.

        Args:
            trace: step (from 0) in which every module's output and its gradient are kept.
        """
        self._begin()
        for rank in self.ranks:
            saved = str(observations.resolve() / f"rank{rank.number}.safetensors")
            self._send(rank, ch.RunCase(case=case, observation=saved, fault=fault, trace=trace))
        return self._gather(limit)

    def well(self) -> bool:
        """Whether no rank has ended while the set was idle."""
        self._poll(0.0)
        return self.alive and not any(rank.death for rank in self.ranks)

    def _command(self, command: ch.Command, limit: float) -> Outcome:
        self._begin()
        for rank in self.ranks:
            self._send(rank, command)
        return self._gather(limit)

    def _begin(self) -> None:
        if not self.alive:
            raise RuntimeError("this set of ranks was stopped")
        self._order.clear()
        for rank in self.ranks:
            rank.done = rank.failed = None

    def _send(self, rank: Rank, message: ch.Message) -> None:
        if rank.channel and not rank.death:
            try:
                rank.channel.send(message)
            except ch.ChannelClosed:
                self._bury(rank)

    # Watching

    def _gather(self, limit: float) -> Outcome:
        """Wait until every rank has answered, one has failed and the grace is over, or the limit is over."""
        begin = time.monotonic()
        deadline, trouble, tick = begin + limit, None, begin
        while not all(r.answered for r in self.ranks):
            now = time.monotonic()
            if trouble is None and any(r.failed or r.death for r in self.ranks):
                trouble = now
            if now >= deadline or (trouble is not None and now >= trouble + GRACE):
                return self._outcome(begin, timed_out=trouble is None)
            if now >= tick:
                self._bound_logs()
                tick = now + 1.0
            wait = min(deadline, trouble + GRACE if trouble is not None else deadline, tick) - now
            self._poll(max(wait, 0.0))
        return self._outcome(begin, timed_out=False)

    @contextlib.contextmanager
    def attending(self, connection: socket.socket | None, hear: Callable[[], None]) -> Iterator[None]:
        """While this set is waited for, call `hear` whenever another connection has something to say."""
        if connection is None:
            yield
            return
        self._selector.register(connection, selectors.EVENT_READ, hear)
        try:
            yield
        finally:
            with contextlib.suppress(KeyError, ValueError, RuntimeError):  # closed in the meantime
                self._selector.unregister(connection)

    def _poll(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                self._accept()
            elif not isinstance(key.data, Rank):
                key.data()
            else:
                self._read(key.data)

    def _accept(self) -> None:
        """Take one connection; only a rank of this set with the token becomes a rank, anything else is dropped."""
        with contextlib.suppress(OSError, ch.ChannelClosed):
            connection, _ = self._listener.accept()
            connection.settimeout(10.0)
            channel: ch.Channel[ch.Event] = ch.Channel(connection, ch.Event)
            first = channel.receive()
            hello = first[0] if len(first) == 1 else None
            known = (
                isinstance(hello, ch.Hello)
                and hmac.compare_digest(hello.token, self._token)
                and hello.world_size == self.world_size
                and 0 <= hello.rank < self.world_size
                and self.ranks[hello.rank].hello is None
            )
            if not isinstance(hello, ch.Hello) or not known:
                channel.close()
                return
            rank = self.ranks[hello.rank]
            rank.channel, rank.hello, rank.phase = channel, hello, "start"
            self._selector.register(connection, selectors.EVENT_READ, rank)

    def _read(self, rank: Rank) -> None:
        assert rank.channel
        try:
            for event in rank.channel.receive():
                if isinstance(event, ch.Phase):
                    rank.phase = event.phase
                elif isinstance(event, ch.Done):
                    rank.done = event
                elif isinstance(event, ch.Failed):
                    rank.failed = event
                    self._order.append(rank.number)
                elif isinstance(event, ch.StorePort):
                    self._join(rank, event.port)
        except ch.ChannelClosed:
            self._bury(rank)

    def _join(self, first: Rank, port: int) -> None:
        host = self.settings.host
        for rank in self.ranks:
            self._send(rank, ch.Join(host=host, port=port))

    def _bury(self, rank: Rank) -> None:
        """A rank's connection is closed: find out how it ended."""
        if rank.channel:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(rank.channel.connection)
            rank.channel.close()
        code: int | None = None
        if rank.process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = rank.process.wait(EXIT_WAIT)
        rank.death = rank.death or self._deaths.ended(code)

    def _reap(self) -> None:
        """Notice processes that ended before they connected."""
        for rank in self.ranks:
            if rank.hello is None and rank.process and rank.process.poll() is not None:
                rank.death = self._deaths.ended(rank.process.returncode)
            if rank.hello is None and self._launcher and self._launcher.poll() is not None:
                rank.death = f"was not started: torchrun {ended(self._launcher.returncode)}"

    def _outcome(self, begin: float, *, timed_out: bool) -> Outcome:
        self._bound_logs()
        lost = any(r.death or not r.answered or (r.failed and is_secondary(r.failed)) for r in self.ranks)
        hang = self._look() if lost else None
        stacks = {**self._stacks(hang), **hang.stacks} if hang else {}
        for rank in self.ranks:
            if rank.failed:
                stacks[rank.number] = rank.failed.traceback.strip()
            elif rank.death:
                stacks[rank.number] = tail(self.log(f"rank{rank.number}"))
        failures = {n: f for n in dict.fromkeys(self._order) if (f := self.ranks[n].failed)}
        return Outcome(
            seconds=time.monotonic() - begin,
            values={r.number: r.done.value for r in self.ranks if r.done},
            failures=failures,
            deaths={r.number: r.death for r in self.ranks if r.death},
            timed_out=timed_out,
            phases={r.number: r.place for r in self.ranks},
            stacks="\n\n".join(f"rank {n}:\n{text}" for n, text in sorted(stacks.items()) if text),
            last={r.number: r.phase for r in self.ranks},
            hang=hang,
        )

    def recorder(self, rank: int) -> Path:
        """File that a rank's collectives are recorded in."""
        return self.log(f"rank{rank}").with_suffix(".collectives")

    def _look(self) -> Hang:
        """Look at ranks that do not answer, from outside."""
        local = self._pids()
        where = {}
        for rank in self.ranks:
            pid = rank.hello.pid if rank.hello and rank.hello.pid in local else None
            where[rank.number] = hangs.Where(pid, rank.place, rank.answered, self.recorder(rank.number))
        return hangs.look(where)

    def _stacks(self, hang: Hang) -> dict[int, str]:
        """Stacks of ranks that could not be looked at, by signal where they are ours, else by asking."""
        asked = [r for r in self.ranks if not r.answered and r.hello and r.stacks and r.number not in hang.stacks]
        local = self._pids()
        for rank in asked:
            if rank.hello and rank.hello.pid in local:
                with contextlib.suppress(OSError):
                    os.kill(rank.hello.pid, signal.SIGUSR1)
            else:
                self._send(rank, ch.Stacks())
        deadline = time.monotonic() + STACKS_WAIT
        found: dict[int, str] = {}
        before: dict[int, str] = {}
        while time.monotonic() < deadline and len(found) < len(asked):
            time.sleep(0.1)
            for rank in asked:
                text = read_text(rank.stacks)
                if text and before.get(rank.number) == text:  # it has stopped growing
                    found[rank.number] = without_control_thread(text)[-STACK_LIMIT:]
                before[rank.number] = text
        return found

    def _pids(self) -> set[int]:
        """Process ids of ranks that this process started, directly or through torchrun."""
        pids = {process.pid for process in self._processes() if _is_local(process) and process.poll() is None}
        if self._launcher:
            with contextlib.suppress(psutil.Error):
                pids |= {child.pid for child in psutil.Process(self._launcher.pid).children(recursive=True)}
        return pids

    def pids(self) -> list[int]:
        """Process id of each rank, on its own machine."""
        return [r.hello.pid for r in self.ranks if r.hello]

    def _bound_logs(self) -> None:
        for who in [*(f"rank{r.number}" for r in self.ranks), "launcher"]:
            bound(self.log(who))

    # Ending

    def stop(self) -> None:
        """Let idle ranks exit in good order; kill what is left after a moment."""
        if self.alive:
            for rank in self.ranks:
                self._send(rank, ch.Stop())
            deadline = time.monotonic() + 2.0
            while time.monotonic() < deadline and any(p.poll() is None for p in self._processes()):
                time.sleep(0.01)
            self.kill()

    def kill(self) -> None:
        """Kill every process of this set by its group, close all connections (which ends ranks elsewhere), reap."""
        if not self.alive:
            return
        self.alive = False
        pids = self._pids() if self._launcher else set()
        for process in self._processes():
            if isinstance(process, Child):
                process.kill_group()
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # also after the leader's end: its children may live on
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for rank in self.ranks:
            if rank.channel:
                rank.channel.close()
        self._selector.close()
        self._listener.close()
        self._end_leftovers()
        for process in self._processes():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10.0)
            if isinstance(process, Child):
                process.release()

    def _end_leftovers(self) -> None:
        """End processes that ranks have started and that moved out of their groups, on this machine."""
        sessions = {process.pid for process in self._processes() if _is_local(process)}
        recorders = [self.recorder(rank.number) for rank in self.ranks]
        own = {rank.hello.pid for rank in self.ranks if rank.hello} | sessions
        found = [one for one in hangs.leftovers(self._mark, sessions, recorders) if one.pid not in own]
        if found:
            alive = {one.pid for one in hangs.end(found)}
            self.leftovers = tuple(f"{one} {'lives on' if one.pid in alive else 'was ended'}" for one in found)

    def _processes(self) -> Iterator[subprocess.Popen[bytes] | Child]:
        yield from (r.process for r in self.ranks if r.process)
        if self._launcher:
            yield self._launcher


def _is_local(process: subprocess.Popen[bytes] | Child) -> bool:
    return not isinstance(process, Child) or process.local


_FOREIGN = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
    ch.CONTROL, ch.TOKEN, ch.DIE_WITH_PARENT,
}  # fmt: skip


# Which precisions a CPU has, and the instructions that oneDNN multiplies with, are the same on every machine, unless a
# user says otherwise: with AMX-FP16 torch has fp16 on CPU, DeepSpeed does not refuse it, and no two nights compare.
_ONE_ISA = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}


def clean_environment() -> dict[str, str]:
    """This process's environment without what an outer launcher, or an outer tiebench, said of its own ranks, and with
    one set of CPU instructions where the user chose none."""
    return _ONE_ISA | {name: value for name, value in os.environ.items() if name not in _FOREIGN}


def listen(host: str, world_size: int) -> socket.socket:
    """A free port that ranks can connect to.

    Raises:
        OSError: `host` is no address of this machine.
    """
    return socket.create_server((host, 0), backlog=4 * world_size)


def worker_command() -> tuple[list[str], dict[str, str]]:
    """Command that starts a worker of this very tiebench, and the environment variables it needs."""
    return module_command("ci.worker")


@functools.cache
def module_command(module: str) -> tuple[list[str], dict[str, str]]:
    """Command that starts a module of this very tiebench, and the environment variables it needs.

    Isolated (``-I``: neither the working directory nor PYTHONPATH shadow a module) when that finds this package.
    """
    here = Path(__file__).resolve().parent
    probe = [sys.executable, "-I", "-c", "import ci, os; print(os.path.dirname(os.path.realpath(ci.__file__)))"]
    found = subprocess.run(probe, capture_output=True, text=True, check=False).stdout.strip()
    if found == str(here):
        return [sys.executable, "-I", "-m", module], {}
    inherited = [os.path.abspath(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    search = os.pathsep.join(dict.fromkeys([str(here.parent), *inherited]))
    return [sys.executable, "-m", module], {"PYTHONPATH": search, "PYTHONSAFEPATH": "1"}


def ended(code: int | None) -> str:
    """How a process ended, for people; None when its exit code is out of reach."""
    if code is None:
        return "closed its connection"
    if code < 0:
        number = -code
        name = signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"
        hint = "; the kernel does that when memory runs out" if number == signal.SIGKILL else ""
        return f"was killed by {name}{hint}"
    hint = "; 137 is what a container gives when memory runs out" if code == 137 else ""
    return f"ended with exit code {code}{hint}"


def read_text(path: Path | None) -> str:
    """Text of a file, empty when there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace") if path else ""
    except OSError:
        return ""


def tail(path: Path, size: int = STACK_LIMIT) -> str:
    """End of a log file."""
    return read_text(path)[-size:].strip()


def without_control_thread(stacks: str) -> str:
    """Stacks without those of the worker's own control thread."""
    blocks = stacks.strip().split("\n\n")
    return "\n\n".join(b for b in blocks if "worker.py" not in b or " in listen" not in b)


def bound(log: Path) -> None:
    """Cut a log that has grown too large down to its head and tail; its writers append and go on at the new end."""
    try:
        if log.stat().st_size <= LOG_LIMIT:
            return
        with open(log, "r+b") as stream:
            stream.seek(-LOG_TAIL, os.SEEK_END)
            last = stream.read(LOG_TAIL)
            stream.truncate(LOG_HEAD)
            stream.seek(0, os.SEEK_END)
            stream.write(b"\n[cut by tiebench: the log had grown too large]\n" + last)
    except OSError:
        return


def check_writable(directory: Path) -> None:
    """Write and remove 64 KiB: a full disk or a quota shows only when something is written.

    Raises:
        OSError: it does not work.
    """
    probe = directory / f".probe-{os.getpid()}"
    try:
        with open(probe, "wb") as stream:
            stream.write(bytes(2**16))
            stream.flush()
            os.fsync(stream.fileno())
    finally:
        probe.unlink(missing_ok=True)
