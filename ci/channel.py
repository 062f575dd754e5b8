"""The control channel between supervisor and ranks: JSON lines over TCP, one message a line.

The supervisor listens; a rank connects, says `Hello`, and from then on answers each command with one event (besides
`Phase`, which tells where it is). The rank's side ends itself when the connection closes.
"""

from __future__ import annotations

import socket
import threading
from typing import Any, Generic, TypeVar

import msgspec

LONGEST_LINE = 16 * 2**20  # a longer line is no message of ours
CONTROL = "TIEBENCH_CONTROL"  # host:port of the supervisor
TOKEN = "TIEBENCH_TOKEN"  # proves that a rank was started for this set
CHECK_BUILD = "check the target"  # phase in which a rank makes sure of what it has imported
DIE_WITH_PARENT = "TIEBENCH_DIE_WITH_PARENT"  # pid of the supervisor, when the kernel should take the rank down with it


class ChannelClosed(Exception):
    """The other side has gone, or speaks something else."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Base of all messages."""


# From a rank.
class Hello(Message, frozen=True, tag="hello"):
    """First message of a rank, before torch is imported."""

    token: str
    rank: int
    world_size: int
    pid: int
    host: str


class Phase(Message, frozen=True, tag="phase"):
    """What the rank is about to do; named when it hangs or dies."""

    phase: str


class StorePort(Message, frozen=True, tag="store"):
    """Rank 0 has opened the store through which the ranks find each other, on this port."""

    port: int


class Done(Message, frozen=True, tag="done"):
    """A command is done; `value` is its result, if it has one."""

    value: Any = None


class Failed(Message, frozen=True, tag="failed"):
    """A command raised.

    Args:
        phase: phase in which it raised.
        type: class of the exception; message: its text; where: innermost line of the framework, ``file:line``.
        refusal: the exception is a deliberate NotImplementedError or ValueError (see `ci.worker.is_refusal`).
        traceback: the whole traceback.
        lifecycle: of a case, the model's events up to then: event, same object, same storage
        (`suites.lifecycle.Lifecycle`).
        changed: parts of the user's model that were no longer the user's when it was raised.
    """

    phase: str
    type: str
    message: str
    where: str
    refusal: bool
    traceback: str
    lifecycle: list[tuple[str, bool, bool]] = []
    changed: list[str] = []


# From the supervisor.
class Setup(Message, frozen=True, tag="setup"):
    """Come up: log file, device, process group, target, patch.

    Args:
        log: file that stdout and stderr go to; stacks: file for stacks on SIGUSR1.
        timeout: seconds that a collective may take before the framework itself gives up.
        target: directory to put first on the import path, or None.
        build: package and version that is under test, or None: what is imported must be it.
        patch: source of the user's patch and the name of its file, or None.
        device: "auto" (CUDA when there are enough GPUs) or "cpu".
    """

    log: str
    stacks: str
    timeout: float
    startup_limit: float
    target: str | None = None
    build: tuple[str, str] | None = None
    patch: tuple[str, str] | None = None
    device: str = "auto"


class Join(Message, frozen=True, tag="join"):
    """Where rank 0's store is."""

    host: str
    port: int


class Load(Message, frozen=True, tag="load"):
    """Import a path's framework."""

    path: str


class Collect(Message, frozen=True, tag="collect"):
    """Describe the environment."""


class RunCase(Message, frozen=True, tag="run"):
    """Run one case and save the observation."""

    case: str
    observation: str
    fault: str | None = None
    trace: int | None = None  # step (from 0) in which to keep every module's output and its gradient


class Stacks(Message, frozen=True, tag="stacks"):
    """Write the stacks of all threads to the stacks file (for ranks that no signal can reach)."""


class Stop(Message, frozen=True, tag="stop"):
    """Exit in good order."""


Event = Hello | Phase | StorePort | Done | Failed
Command = Setup | Join | Load | Collect | RunCase | Stacks | Stop
T = TypeVar("T")


class Channel(Generic[T]):
    """One end of a connection, receiving messages of the union `kind`. Sending is safe from several threads."""

    def __init__(self, connection: socket.socket, kind: Any):
        self.connection = connection
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._decoder: msgspec.json.Decoder[T] = msgspec.json.Decoder(kind)
        self._encoder = msgspec.json.Encoder()
        self._rest = b""
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Send one message.

        Raises:
            ChannelClosed: the other side has gone.
        """
        try:
            with self._lock:
                self.connection.sendall(self._encoder.encode(message) + b"\n")
        except OSError as error:
            raise ChannelClosed(str(error)) from None

    def receive(self) -> list[T]:
        """Messages made complete by one read of the socket; blocks until there is something to read.

        Raises:
            ChannelClosed: the other side has gone or sent what is no message.
        """
        try:
            data = self.connection.recv(2**16)
        except OSError as error:
            raise ChannelClosed(str(error)) from None
        if not data:
            raise ChannelClosed("closed by the other side")
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST_LINE:
            raise ChannelClosed("a line without an end")
        try:
            return [self._decoder.decode(line) for line in lines]
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ChannelClosed(f"not a message: {error}") from None

    def close(self) -> None:
        """Close the connection; the other side notices."""
        self.connection.close()
