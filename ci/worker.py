"""One rank: connects to the supervisor, comes up, runs cases until it is told to stop or the supervisor is gone.

Started as ``python -m ci.worker`` by the supervisor, by torchrun or by hand on another machine; it needs RANK,
WORLD_SIZE and LOCAL_RANK as torchrun sets them, and `TIEBENCH_CONTROL` and `TIEBENCH_TOKEN`. torch is imported after
`Hello`, so that the supervisor can tell a rank that never started from one that is slow to import.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from ci import channel as ch
from suites.lifecycle import CHANGED

if TYPE_CHECKING:
    import torch

    from suites.collectives import Recorder
    from suites.lifecycle import Lifecycle

PROJECT = Path(__file__).resolve().parent.parent
LOST_SUPERVISOR = 75  # exit code of a rank whose supervisor is gone
LONGEST_MESSAGE = 4000


class WrongBuildError(Exception):
    """What was imported is not the build under test."""


class Worker:
    """The state of one rank between commands."""

    def __init__(self, control: ch.Channel[ch.Command], rank: int, world_size: int):
        self.control = control
        self.rank, self.world_size = rank, world_size
        self.local_rank = int(os.environ.get("LOCAL_RANK", rank))
        self.commands: queue.Queue[ch.Command] = queue.Queue()
        self.phase = "start"
        self.reported = False
        self.device: torch.device | None = None
        self.target: str | None = None
        self.build: tuple[str, str] | None = None
        self.stacks: IO[str] | None = None
        self.lifecycle: list[Lifecycle] = []
        self.settled: set[str] = set()  # paths that have run a case in this process
        self.recorder: Recorder | None = None  # of collectives, once there is a process group

    def progress(self, phase: str) -> None:
        """Tell the supervisor what comes next.

        An exception on its way out of a case passes the closing of the path, which may hang or raise in its turn: what
        went wrong first is told before that.
        """
        error = sys.exc_info()[1]
        if phase == "close" and error is not None:
            self.report(error)
        self.phase = phase
        if self.recorder:
            self.recorder.note(phase)
        self.control.send(ch.Phase(phase=phase))

    def report(self, error: BaseException) -> None:
        """Tell the supervisor that the command failed; only the first telling counts."""
        if not self.reported:
            self.reported = True
            with contextlib.suppress(OSError):  # the log may be full: the supervisor must hear of it all the same
                traceback.print_exception(error)
            self.control.send(failure(error, self.phase, self.lifecycle))

    def listen(self) -> None:
        """Read commands in a thread of its own; end the process as soon as the supervisor is gone."""
        try:
            while True:
                for command in self.control.receive():
                    if isinstance(command, ch.Stacks):
                        if self.stacks:
                            faulthandler.dump_traceback(self.stacks)
                    else:
                        self.commands.put(command)
        except ch.ChannelClosed:
            end_now()

    def serve(self) -> None:
        """Carry out commands, one answer each, until `Stop`."""
        while True:
            command = self.commands.get()
            if isinstance(command, ch.Stop):
                return
            self.reported = False
            try:
                value = self.do(command)
            except Exception as error:  # noqa: BLE001 - whatever a framework raises is a result
                self.report(error)
            else:
                self.control.send(ch.Done(value=value))
            flush()

    def do(self, command: ch.Command) -> Any:
        """Carry out one command."""
        if isinstance(command, ch.Setup):
            return self.set_up(command)
        if isinstance(command, ch.Load):
            return self.load(command.path)
        if isinstance(command, ch.RunCase):
            return self.run(command)
        if isinstance(command, ch.Collect):
            from ci import environment  # noqa: PLC0415

            found = environment.collect(self.device)
            plain = json.loads(json.dumps(found, default=str))  # subclasses of str and the like are no JSON to msgspec
            return {"environment": plain, "fingerprint": environment.fingerprint(found)}
        raise TypeError(f"no such command: {command}")

    def set_up(self, setup: ch.Setup) -> dict[str, str]:
        """Log files, device, process group, target on the import path, patch."""
        redirect(Path(setup.log))
        self.stacks = open(setup.stacks, "w", encoding="utf-8")  # noqa: SIM115 - open for the life of the process
        faulthandler.register(signal.SIGUSR1, file=self.stacks, all_threads=True)
        self.target, self.build = setup.target, setup.build
        if setup.target:
            sys.path.insert(0, setup.target)
        self.progress("import torch")
        import torch  # noqa: PLC0415
        import torch.distributed as dist  # noqa: PLC0415

        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))
        gpus = setup.device == "auto" and torch.cuda.is_available() and torch.cuda.device_count() >= local_size
        self.device = torch.device("cuda", self.local_rank) if gpus else torch.device("cpu")
        if gpus:
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(1)
            os.environ["DS_ACCELERATOR"] = "cpu"
        self.progress("join the process group")
        timeout = timedelta(seconds=setup.timeout)
        backend = "nccl" if gpus else "gloo"
        if "MASTER_PORT" in os.environ:
            dist.init_process_group(backend, timeout=timeout)
        else:
            store = self.store(timedelta(seconds=setup.startup_limit))
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world_size, timeout=timeout)
        if dist.get_rank() != self.rank or dist.get_world_size() != self.world_size:
            raise RuntimeError(f"process group has rank {dist.get_rank()} of {dist.get_world_size()}")
        from suites import collectives  # noqa: PLC0415

        self.recorder = collectives.install(Path(setup.log).with_suffix(".collectives"))
        if setup.patch:
            self.progress("patch")
            source, name = setup.patch
            exec(compile(source, name, "exec"), {"__name__": "__tiebench_patch__", "__file__": name})
        return {"device": str(self.device), "backend": backend}

    def store(self, limit: timedelta) -> Any:
        """Store of the process group, on a port that rank 0's kernel chose: no port is guessed, so none is taken."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # noqa: PLC0415

        host = os.environ["MASTER_ADDR"]
        if self.rank == 0:
            store = TCPStore(host, 0, self.world_size, True, limit, wait_for_workers=False)
            self.control.send(ch.StorePort(port=store.port))
        join = self.commands.get()
        if not isinstance(join, ch.Join):
            raise TypeError(f"no place to join: {join}")
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = join.host, str(join.port)
        return store if self.rank == 0 else TCPStore(join.host, join.port, self.world_size, False, limit)

    def load(self, path: str) -> None:
        """Import what a path needs, as part of the start-up and not of the first case."""
        self.progress(f"import {path}")
        from suites import paths, train  # noqa: F401, PLC0415

        paths.load(path)
        if self.build and self.build[0] == path:
            self.progress(ch.CHECK_BUILD)
            check_build(*self.build, self.target)
        gc.collect()
        # DeepSpeed collects garbage in every case, and what was imported never becomes any: a third of a case's time.
        gc.freeze()

    def run(self, command: ch.RunCase) -> None:
        """Run one case and save what was seen."""
        from suites import train  # noqa: PLC0415
        from suites.cases import Case  # noqa: PLC0415

        if self.device is None:
            raise RuntimeError("no device: not set up")
        broken: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if command.fault:
            from suites import faults  # noqa: PLC0415

            broken = faults.apply(command.fault)
        case = Case.parse(command.case)
        self.lifecycle = []
        if self.recorder:
            self.recorder.begin()
        self.progress("begin")  # else what fails now would seem to fail where the last case ended
        with broken:
            observation = train.run_rank(case, self.device, self.progress, self.lifecycle, trace=command.trace)
        if case.path not in self.settled:
            self.settled.add(case.path)
            gc.collect()
            gc.freeze()  # the first case of a path imports and compiles more; see `load`
        self.progress("save")
        observation.save(Path(command.observation))


def flush() -> None:
    """Write out what was printed; a log that cannot be written ends no rank."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()


def check_build(name: str, version: str, directory: str | None) -> None:
    """The package that was imported is the build that was asked for: a shadowed or half deleted one must not pass.

    Args:
        directory: where its files must be; None: it is the installed one, and only its version is known.

    Raises:
        WrongBuildError: it is another one.
    """
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if file is None:
        raise WrongBuildError(f"target {name}=={version} is not what runs: {name} was not imported from a file")
    real = os.path.realpath(file)
    if directory and not real.startswith(os.path.realpath(directory) + os.sep):
        raise WrongBuildError(f"target {name}=={version} is not what runs: {name} was imported from {real}")
    found = getattr(module, "__version__", None)
    if not same_version(found, version):
        raise WrongBuildError(f"target {name}=={version} is not what runs: {real} says version {found}")


def same_version(one: object, other: str) -> bool:
    """Whether two spellings are one version."""
    from packaging.version import InvalidVersion, Version  # noqa: PLC0415

    try:
        return Version(str(one)) == Version(other)
    except InvalidVersion:
        return str(one) == other


def redirect(log: Path) -> None:
    """Send stdout and stderr of this process to a log file (appending: the supervisor may cut it short meanwhile)."""
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)


def failure(error: BaseException, phase: str, lifecycle: Sequence[Lifecycle] = ()) -> ch.Failed:
    """What the supervisor is told of an exception."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return ch.Failed(
        phase=phase,
        type=name,
        message=str(error)[:LONGEST_MESSAGE],
        where=where(error.__traceback__),
        refusal=is_refusal(error),
        traceback="".join(traceback.format_exception(error))[-4 * LONGEST_MESSAGE :],
        lifecycle=[(seen.event, seen.same_object, seen.same_storage) for seen in lifecycle],
        changed=[str(part) for part in getattr(error, CHANGED, ())],
    )


def is_refusal(error: BaseException) -> bool:
    """True for a NotImplementedError or ValueError that somebody meant to raise.

    The innermost line must be a ``raise`` statement: ``a, b = three_values`` is a ValueError too, and a plain bug. A
    pydantic ValidationError is raised by compiled code and counts.
    """
    if not isinstance(error, (NotImplementedError, ValueError)):
        return False
    if type(error).__name__ == "ValidationError":
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and (frames[-1].line or "").lstrip().startswith("raise")


def where(trace: TracebackType | None) -> str:
    """``file:line`` of the innermost frame of the path under test: not in torch, Python or the harness."""
    frames = traceback.extract_tb(trace)
    if not frames:
        return ""
    standard = os.path.dirname(os.__file__)
    harness = (str(PROJECT / "ci"), str(PROJECT / "suites" / "train.py"))

    def foreign(name: str) -> bool:
        packaged = "site-packages" in name or not name.startswith(standard)
        return packaged and "/site-packages/torch/" not in name and not name.startswith(harness) and name[0] != "<"

    frame = next((f for f in reversed(frames) if foreign(f.filename)), frames[-1])
    name = frame.filename
    for root in sorted([*filter(None, sys.path), str(PROJECT)], key=len, reverse=True):
        if name.startswith(root.rstrip("/") + "/"):
            name = name[len(root.rstrip("/")) + 1 :]
            break
    return f"{name}:{frame.lineno}"


def end_now() -> None:
    """End this process and whatever it started; nothing here may block or raise."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(LOST_SUPERVISOR)


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process with its parent, for the case that native code holds the interpreter lock.

    Only when the supervisor asks for it: the signal follows the thread that started this process, not its process.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(LOST_SUPERVISOR)


def main() -> None:
    """Entry point of ``python -m ci.worker``."""
    missing = [name for name in ("RANK", "WORLD_SIZE", ch.CONTROL, ch.TOKEN) if name not in os.environ]
    if missing:
        raise SystemExit(f"tiebench worker: {', '.join(missing)} not set: ranks are started by `tiebench run`")
    if ch.DIE_WITH_PARENT in os.environ:
        die_with(int(os.environ[ch.DIE_WITH_PARENT]))
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, _, port = os.environ[ch.CONTROL].rpartition(":")
    control: ch.Channel[ch.Command] = ch.Channel(socket.create_connection((host, int(port)), timeout=60), ch.Command)
    control.connection.settimeout(None)
    control.send(
        ch.Hello(
            token=os.environ.pop(ch.TOKEN),
            rank=rank,
            world_size=world_size,
            pid=os.getpid(),
            host=socket.gethostname(),
        )
    )
    worker = Worker(control, rank, world_size)
    threading.Thread(target=worker.listen, name="control", daemon=True).start()
    with contextlib.suppress(ch.ChannelClosed):
        worker.serve()
    # No clean-up of process groups: a peer may be gone already, and destroying a group can wait for it.
    flush()
    os._exit(0)


if __name__ == "__main__":
    main()
