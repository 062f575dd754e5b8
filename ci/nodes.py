"""Several machines: torchrun starts one tiebench on each, with the same words; one supervises, the others lend ranks.

    torchrun --nnodes 2 --nproc-per-node 1 … --no-python tiebench run --plan smoke --out DIR

    node 0   tiebench run: supervisor, record log, judge ── fork server ── its ranks
      ║  the store of torchrun's rendezvous tells the others where it is, and the token
    node 1   tiebench run: connects twice, and hands the second connection to a fork server ── its ranks

The first connection is for the hand-shake and for the exit code of the run, with which every node ends, as torchrun
wants it. A node that is lost ends the run in good order, to be resumed; a node whose supervisor is gone ends itself and
all that it has forked.
"""

from __future__ import annotations

import contextlib
import hmac
import importlib.metadata
import os
import platform
import secrets
import select
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

from ci import channel as ch
from ci.exit_codes import FAILED
from ci.forkserver import ForkServer, Options, ServerGone
from ci.ranks import clean_environment, listen, module_command
from ci.subject import PACKAGE, SetupError, version
from suites.cases import PATHS

KEY = "tiebench/supervisor"  # in torchrun's store
SILENCE = (30, 10, 3)  # seconds until a silent connection is asked, between questions, and how many go unanswered


class NodeHello(ch.Message, frozen=True, tag="node"):
    """First message of a node, on each of its two connections.

    Args:
        serves: the second connection, which a fork server answers from now on.
        about: what must be the same on all nodes.
    """

    token: str
    node: int
    host: str
    serves: bool = False
    about: dict[str, str] = msgspec.field(default_factory=dict)


class Welcome(ch.Message, frozen=True, tag="welcome"):
    """What a node's fork server imports, and where the run directory is: a file in it proves that it is the same."""

    options: Options
    directory: str
    file: str
    content: str


class Refused(ch.Message, frozen=True, tag="refused"):
    """No run with this node, either side may say so; one line for people."""

    reason: str


class Bye(ch.Message, frozen=True, tag="bye"):
    """The run is over."""

    exit_code: int


FromNode = NodeHello | Refused
FromSupervisor = Welcome | Refused | Bye


@dataclass(frozen=True)
class Place:
    """Where torchrun has put this process.

    Args:
        node: number of this one, from 0; count: of all; host: address of node 0 as all others see it.
    """

    node: int
    count: int
    host: str


def place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """This process's place among several nodes; None where it is not one of several.

    Raises:
        SetupError: torchrun was told to start several processes on a node.
    """
    if "TORCHELASTIC_RUN_ID" not in environment or int(environment["WORLD_SIZE"]) < 2:
        return None
    if environment.get("LOCAL_WORLD_SIZE", "1") != "1":
        raise SetupError("torchrun with --nproc-per-node 1, please: tiebench starts the ranks of each node itself")
    return Place(int(environment["RANK"]), int(environment["WORLD_SIZE"]), environment["MASTER_ADDR"])


def about(target: Path | None) -> dict[str, str]:
    """What must be the same on all nodes."""
    found = {"tiebench": version(), "Python": platform.python_version(), "target": str(target or "as installed")}
    for package in ("torch", *(PACKAGE.get(path, path) for path in PATHS)):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


# Node 0.


@dataclass
class Nodes:
    """The other nodes, as the supervisor sees them.

    Args:
        where: this process's place; target: directory of the build under test; limit: seconds for all to come.
        host: address that ranks of all nodes connect to.
    """

    where: Place
    host: str
    target: Path | None
    limit: float
    say: Callable[[str], None] = print
    names: dict[int, str] = field(default_factory=dict)  # node -> host
    servers: dict[int, ForkServer] = field(default_factory=dict)
    _control: dict[int, ch.Channel[FromNode]] = field(default_factory=dict)

    def gather(self, directory: Path, options: Options) -> list[ForkServer]:
        """Wait for all other nodes; their fork servers, which import in their own time, in order of nodes.

        Args:
            directory: run directory, which all nodes must see; options: what the fork servers import.

        Raises:
            SetupError: one does not come, is another tiebench, or does not see the directory.
        """
        if self.servers:
            return [self.servers[node] for node in sorted(self.servers)]
        deadline = time.monotonic() + self.limit
        token = secrets.token_hex(16)
        name = f"nodes-{secrets.token_hex(8)}"
        proof = directory.resolve() / "logs" / name
        proof.write_text(token)
        welcome = Welcome(options=options, directory=str(directory.resolve()), file=str(proof), content=token)
        try:
            with listen(self.host, 2 * self.where.count) as listener:
                _store(self.limit).set(KEY, msgspec.json.encode([self.host, listener.getsockname()[1], token]))
                self.say(f"waiting for {self.where.count - 1} more nodes")
                while len(self.servers) < self.where.count - 1:
                    self._complain(deadline)
                    if select.select([listener], [], [], 0.2)[0]:
                        self._accept(listener, token, welcome)
            for server in self.servers.values():
                self._wait_ready(server, deadline)
        finally:
            proof.unlink(missing_ok=True)
        return [self.servers[node] for node in sorted(self.servers)]

    def _accept(self, listener: socket.socket, token: str, welcome: Welcome) -> None:
        with contextlib.suppress(OSError, ch.ChannelClosed):
            connection, _ = listener.accept()
            connection.settimeout(10.0)
            channel: ch.Channel[FromNode] = ch.Channel(connection, FromNode)
            first = channel.receive()
            hello = first[0] if len(first) == 1 else None
            if not isinstance(hello, NodeHello) or not hmac.compare_digest(hello.token, token):
                channel.close()
                return
            connection.settimeout(None)
            watch(connection)
            if hello.serves:
                self.servers[hello.node] = ForkServer.adopt(connection)
                return
            self.names[hello.node] = hello.host
            self._control[hello.node] = channel
            for fact, here in about(self.target).items():
                if (there := hello.about.get(fact)) != here:
                    self._refuse(f"node {hello.node} ({hello.host}) has {fact} {there}, and node 0 has {here}")
            channel.send(welcome)

    def _complain(self, deadline: float) -> None:
        """Hear of nodes that cannot take part.

        Raises:
            SetupError: one cannot, or the time is over.
        """
        channels = {channel.connection: node for node, channel in self._control.items()}
        for ready in select.select(list(channels), [], [], 0.0)[0]:
            node = channels[ready]
            try:
                messages = self._control[node].receive()
            except ch.ChannelClosed:
                self._refuse(f"node {node} ({self.names[node]}) is gone")
            for message in messages:
                if isinstance(message, Refused):
                    self._refuse(f"node {node} ({self.names[node]}): {message.reason}")
        if time.monotonic() > deadline:
            missing = sorted({*range(1, self.where.count)} - {*self.servers})
            what = ", ".join(map(str, missing))
            self._refuse(f"node {what} did not come within {self.limit:.0f} s: start the same command on all nodes")

    def _wait_ready(self, server: ForkServer, deadline: float) -> None:
        try:
            while not server.wait_ready(0.2):
                self._complain(deadline)
        except ServerGone as error:
            raise SetupError(f"a node was lost: {error}") from None

    def _refuse(self, reason: str) -> None:
        for channel in self._control.values():
            with contextlib.suppress(ch.ChannelClosed):
                channel.send(Refused(reason=reason))
        raise SetupError(reason)

    def lost(self) -> str | None:
        """The node that is gone, for people."""
        for node, server in self.servers.items():
            server.pump(0.0)
            if server.gone:
                return f"node {node} ({self.names.get(node, 'unknown host')}) is gone, and its ranks with it"
        return None

    def release(self) -> None:
        """End the fork servers, and with them all ranks of other nodes."""
        for server in self.servers.values():
            server.close()

    def close(self, exit_code: int) -> None:
        """End all nodes with the exit code of the run."""
        self.release()
        for channel in self._control.values():
            with contextlib.suppress(ch.ChannelClosed):
                channel.send(Bye(exit_code=exit_code))
            channel.close()


def watch(connection: socket.socket) -> None:
    """Notice that the other machine is dead, which closes no connection."""
    if connection.family != socket.AF_UNIX and hasattr(socket, "TCP_KEEPIDLE"):
        for option, value in zip(("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT"), SILENCE, strict=True):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _store(limit: float) -> Any:
    """Torchrun's store; its agents host it, or node 0 does."""
    from torch.distributed import rendezvous  # type: ignore[attr-defined]  # noqa: PLC0415

    store, _, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=limit))))
    return store


# The other nodes.


def serve(where: Place, target: Path | None, limit: float, say: Callable[[str], None] = print) -> int:
    """Lend ranks until the run is over; its exit code.

    Raises:
        SetupError: the supervisor is not to be found, refuses this node, or its run directory is not to be seen here.
    """
    try:
        store = _store(limit)
        store.wait([KEY], timedelta(seconds=limit))
        host, port, token = msgspec.json.decode(store.get(KEY), type=tuple[str, int, str])
        control = ch.Channel[FromSupervisor](socket.create_connection((host, port), timeout=limit), FromSupervisor)
    except (RuntimeError, OSError) as error:  # what torch's store raises is a RuntimeError
        raise SetupError(f"node {where.node} finds no node 0: {str(error).splitlines()[0]}") from None
    control.connection.settimeout(None)
    watch(control.connection)
    own = socket.gethostname()
    server: subprocess.Popen[bytes] | None = None
    try:
        control.send(NodeHello(token=token, node=where.node, host=own, about=about(target)))
        while True:
            for message in control.receive():
                if isinstance(message, Bye):
                    return message.exit_code
                if isinstance(message, Refused):
                    raise SetupError(message.reason)
                reason = _foreign(message)
                if reason:
                    control.send(Refused(reason=reason))
                    raise SetupError(reason)
                say(f"node {where.node} of {where.count} lends ranks to a run in {message.directory}")
                server = _start_server(message, where, (host, port), token, own)
    except ch.ChannelClosed:
        say("the supervisor is gone")
        return FAILED
    finally:
        control.close()
        if server:
            server.wait()


def _foreign(welcome: Welcome) -> str:
    """Why the run directory is not the supervisor's; empty where it is."""
    try:
        if Path(welcome.file).read_text() == welcome.content:
            return ""
        why = "another file is there"
    except OSError as error:
        why = error.strerror or str(error)
    return f"the run directory {welcome.directory} is not the same on all nodes ({why}): it must be on a shared disk"


def _start_server(
    welcome: Welcome, where: Place, address: tuple[str, int], token: str, own: str
) -> subprocess.Popen[bytes]:
    """A fork server of this node, on a connection of its own; it ends with that, and with this process."""
    connection = socket.create_connection(address, timeout=60.0)
    connection.settimeout(None)
    watch(connection)
    hello = NodeHello(token=token, node=where.node, host=own, serves=True)
    connection.sendall(msgspec.json.encode(hello) + b"\n")
    command, extra = module_command("ci.forkserver")
    logs = Path(welcome.directory) / "logs"
    environment = clean_environment() | extra | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    environment[ch.DIE_WITH_PARENT] = str(os.getpid())
    with connection, open(logs / f"forkserver-node{where.node}.log", "ab") as stream:
        return subprocess.Popen(
            [*command, str(connection.fileno()), msgspec.json.encode(welcome.options).decode()],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=[connection.fileno()],
            cwd=logs,
        )
