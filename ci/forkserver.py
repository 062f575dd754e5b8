"""A process that has imported torch and the frameworks, and forks ranks: a set comes up in a fraction of a second.

Importing takes seconds, forking milliseconds; the memory that was imported is shared by all ranks. The server itself
never computes, never joins a process group and never touches CUDA (which does not survive a fork: see `may_fork`), and
has one thread only, so a fork of it is a process as good as a fresh one.

    supervisor ── ForkServer ══ socket ══ python -m ci.forkserver
                                              ├── rank 0    own session, own log; dies with the server
                                              └── rank 1    …

A child that ended stays a zombie until the supervisor releases it: its process id, which is also that of its group,
cannot come to mean another process in the meantime.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from ci import channel as ch

Role = Literal["rank", "judge"]
LINGER = 5.0  # seconds that the server has for its answer to a fork, and to end


class ServerGone(Exception):
    """The fork server ended; one line that says how."""


# Between supervisor and fork server.
class Ready(ch.Message, frozen=True, tag="ready"):
    """Everything is imported. `failed`: paths whose import failed, which ranks will try again and report."""

    pid: int
    host: str
    failed: tuple[str, ...] = ()
    threads: int = 1


class Fork(ch.Message, frozen=True, tag="fork"):
    """Fork a child that runs a role's main function with this whole environment; `log` takes what it prints."""

    key: int
    role: Role
    environment: dict[str, str]
    log: str
    directory: str


class Forked(ch.Message, frozen=True, tag="forked"):
    """The child is there; or, with an error, it is not."""

    key: int
    pid: int = 0
    error: str | None = None


class Ended(ch.Message, frozen=True, tag="ended"):
    """A child ended, with an exit code as of `subprocess` (negative: the signal)."""

    key: int
    code: int


class Kill(ch.Message, frozen=True, tag="kill"):
    """Kill a child's process group."""

    key: int


class Release(ch.Message, frozen=True, tag="release"):
    """Reap a child that ended: nobody will ask for it any more."""

    key: int


ToServer = Fork | Kill | Release
FromServer = Ready | Forked | Ended


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What a server imports.

    Args:
        target: directory to put first on the import path; paths: training paths whose frameworks to import.
        failed: paths that are left out since their import failed.
    """

    target: str | None = None
    paths: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


def may_fork(device: str) -> bool:
    """Whether ranks can be forked: not where they would use GPUs, since a forked process cannot use CUDA safely once
    its parent has asked for the devices, which importing a framework may do."""
    return device == "cpu" or not Path("/proc/driver/nvidia").exists()


@dataclass(eq=False)
class Child:
    """A forked process, with the part of `subprocess.Popen` that the watchdog needs."""

    server: ForkServer
    key: int
    pid: int = 0
    returncode: int | None = None

    @property
    def local(self) -> bool:
        """Whether it runs on this machine, and its process id means something here."""
        return self.server.process is not None

    def poll(self) -> int | None:
        """Exit code, or None while it runs."""
        if self.returncode is None:
            self.server.pump(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Exit code once it has ended.

        Raises:
            subprocess.TimeoutExpired: it has not.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left = 1.0 if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self.server.pump(min(left, 1.0))
        return self.returncode

    def kill_group(self) -> None:
        """Kill the process group, also after the leader's end: its children may live on."""
        self.server.kill(self)

    def release(self) -> None:
        """Let the process id go."""
        self.server.release(self)


@dataclass(eq=False)
class ForkServer:
    """The supervisor's side of a fork server, on this machine (`start`) or on another one (`adopt`)."""

    connection: ch.Channel[FromServer]
    process: subprocess.Popen[bytes] | None = None
    ready: Ready | None = None
    gone: str | None = None  # how it ended
    log: Path | None = None
    _children: dict[int, Child] = field(default_factory=dict)
    _count: int = 0
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def __post_init__(self) -> None:
        """Listen to the server."""
        self._selector.register(self.connection.connection, selectors.EVENT_READ)

    @classmethod
    def start(cls, command: Sequence[str], environment: Mapping[str, str], options: Options, log: Path) -> ForkServer:
        """Start a server on this machine; returns at once.

        Args:
            command: Python with its options, up to ``-m``'s argument.

        Raises:
            OSError: no process can be started, or the log cannot be written.
        """
        ours, theirs = socket.socketpair()
        try:
            environment = {**environment, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
            if threading.current_thread() is threading.main_thread():  # the kernel watches the thread, not the process
                environment[ch.DIE_WITH_PARENT] = str(os.getpid())
            with open(log, "ab") as stream:
                process = subprocess.Popen(
                    [*command, str(theirs.fileno()), msgspec.json.encode(options).decode()],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=[theirs.fileno()],
                    cwd=log.parent,
                )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        return cls(ch.Channel(ours, FromServer), process, log=log)

    @classmethod
    def adopt(cls, connection: socket.socket) -> ForkServer:
        """A server on another machine, at the other end of a connection."""
        return cls(ch.Channel(connection, FromServer))

    def wait_ready(self, limit: float) -> bool:
        """Wait until everything is imported; False when the limit was over first.

        Raises:
            ServerGone: it ended.
        """
        deadline = time.monotonic() + limit
        while self.ready is None:
            self._check()
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self.pump(min(left, 1.0))
        return True

    def fork(self, role: Role, environment: Mapping[str, str], log: Path, directory: Path) -> Child:
        """Fork a child.

        Raises:
            ServerGone: the server ended or does not answer; OSError: it could not fork.
        """
        self._check()
        self._count += 1
        child = self._children[self._count] = Child(self, self._count)
        self._send(
            Fork(key=child.key, role=role, environment=dict(environment), log=str(log), directory=str(directory))
        )
        deadline = time.monotonic() + LINGER + 25.0
        while not child.pid and child.returncode is None:
            self._check()
            if time.monotonic() > deadline:
                raise ServerGone("the fork server does not answer")
            self.pump(0.5)
        if not child.pid:
            raise OSError(f"the fork server cannot fork: see {self.log}")
        return child

    def pump(self, seconds: float) -> None:
        """Take in what the server says, waiting up to some seconds for the first word."""
        if self.gone is not None:
            return
        try:
            while self._selector.select(seconds):
                seconds = 0.0
                for event in self.connection.receive():
                    if isinstance(event, Ready):
                        self.ready = event
                    elif child := self._children.get(event.key):
                        if isinstance(event, Ended):
                            child.returncode = event.code
                        elif event.error is None:
                            child.pid = event.pid
                        else:
                            child.returncode = 1
        except ch.ChannelClosed:
            self._lost()

    def kill(self, child: Child) -> None:
        """Kill a child's process group."""
        if self.gone is None and child.key in self._children:
            self._send(Kill(key=child.key))

    def release(self, child: Child) -> None:
        """Let a child's process id go; nothing can be asked of it afterwards."""
        if self._children.pop(child.key, None) and self.gone is None:
            self._send(Release(key=child.key))

    def close(self) -> None:
        """End the server, and with it all of its children."""
        self.connection.close()
        self._selector.close()
        self.gone = self.gone or "was closed"
        if self.process:
            try:
                self.process.wait(LINGER)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()

    def _send(self, message: ch.Message) -> None:
        try:
            self.connection.send(message)
        except ch.ChannelClosed:
            self._lost()

    def _lost(self) -> None:
        """The connection is closed: so the server has ended, and the kernel has killed its children."""
        code = None
        if self.process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self.process.wait(LINGER)
        self.gone = "closed its connection" if code is None else f"ended with exit code {code}"
        for child in self._children.values():
            if child.returncode is None:
                child.returncode = -signal.SIGKILL

    def _check(self) -> None:
        if self.gone is not None:
            raise ServerGone(f"the fork server {self.gone}")


# The server's side.


class _Server:
    """Forks on request, tells of children that end; one thread, no other state."""

    def __init__(self, connection: socket.socket, options: Options):
        self.channel: ch.Channel[ToServer] = ch.Channel(connection, ToServer)
        self.options = options
        self.children: dict[int, int] = {}  # key -> process id, until released
        self.ended: set[int] = set()
        self.wake, wakes = socket.socketpair()
        self.wakes = wakes
        for end in (self.wake, wakes):
            end.setblocking(False)

    def serve(self) -> None:
        """Until the supervisor is gone."""
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self.wakes.fileno(), warn_on_full_buffer=False)
        selector = selectors.DefaultSelector()
        selector.register(self.channel.connection, selectors.EVENT_READ, "supervisor")
        selector.register(self.wake, selectors.EVENT_READ, "children")
        threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else threading.active_count()
        failed = self.options.failed
        self.channel.send(Ready(pid=os.getpid(), host=socket.gethostname(), failed=failed, threads=threads))
        try:
            while True:
                for key, _ in selector.select():
                    if key.data == "children":
                        with contextlib.suppress(BlockingIOError):
                            self.wake.recv(4096)
                        continue
                    for message in self.channel.receive():
                        self.do(message)
                self.look()
        except ch.ChannelClosed:
            for child in self.children.values():
                _kill_group(child)

    def do(self, message: ToServer) -> None:
        """Carry out one message."""
        if isinstance(message, Fork):
            self.fork(message)
        elif isinstance(message, Kill):
            if message.key in self.children:
                _kill_group(self.children[message.key])
        elif (pid := self.children.pop(message.key, None)) is not None:
            self.ended.discard(message.key)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def fork(self, message: Fork) -> None:
        """Fork one child."""
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            pid = os.fork()
        except OSError as error:
            self.channel.send(Forked(key=message.key, error=str(error)))
            return
        if pid:
            self.children[message.key] = pid
            self.channel.send(Forked(key=message.key, pid=pid))
            return
        try:
            self.become(message)
        except BaseException:  # noqa: BLE001 - nothing may return into the server's loop
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stderr.flush()
            os._exit(1)

    def become(self, message: Fork) -> None:
        """In the child: from a copy of the server to a process of its own."""
        parent = os.getppid()
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in (signal.SIGCHLD, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        for end in (self.channel.connection, self.wake, self.wakes):
            end.close()
        os.environ.clear()
        os.environ.update(message.environment)
        os.chdir(message.directory)
        from ci import worker  # noqa: PLC0415

        worker.redirect(Path(message.log))
        worker.die_with(parent)
        random.seed()
        if message.role == "judge":
            from ci import judge  # noqa: PLC0415

            judge.main()
        else:
            worker.main()

    def look(self) -> None:
        """Tell of children that ended, without reaping them."""
        for key, pid in self.children.items():
            if key not in self.ended:
                with contextlib.suppress(ChildProcessError):
                    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                    if found is not None:
                        self.ended.add(key)
                        exited = found.si_code == os.CLD_EXITED
                        self.channel.send(Ended(key=key, code=found.si_status if exited else -found.si_status))


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def load(options: Options) -> None:
    """Import what ranks and the judge need, so that forked processes have it.

    A path whose import fails may leave half of itself behind: the server starts anew without it.
    """
    if options.target:
        sys.path.insert(0, options.target)
    gc.disable()  # modules are no garbage: looking for some takes a quarter of the time
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)
    import torch.distributed  # noqa: PLC0415

    from ci import environment, judge, worker  # noqa: F401, PLC0415
    from suites import examine, paths, train  # noqa: F401, PLC0415

    for path in options.paths:
        try:
            paths.import_early(path)
        except BaseException:  # noqa: BLE001 - a framework may even exit
            traceback.print_exc()
            sys.stderr.flush()
            rest = tuple(p for p in options.paths if p != path)
            again = Options(target=options.target, paths=rest, failed=(*options.failed, path))
            words = [*sys.orig_argv[:-1], msgspec.json.encode(again).decode()]
            os.execv(sys.executable, words)
    gc.freeze()  # what was imported never becomes garbage, and stays in memory that all ranks share
    gc.enable()


def main() -> None:
    """Entry point of ``python -m ci.forkserver SOCKET OPTIONS``."""
    from ci.worker import die_with  # noqa: PLC0415

    if ch.DIE_WITH_PARENT in os.environ:
        die_with(int(os.environ[ch.DIE_WITH_PARENT]))
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    descriptor, options = int(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=Options)
    os.set_inheritable(descriptor, True)  # over an exec, see `load`
    load(options)
    connection = socket.socket(fileno=descriptor)
    os.set_inheritable(descriptor, False)
    _Server(connection, options).serve()


if __name__ == "__main__":
    main()
