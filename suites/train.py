"""One rank's training of one case: the same loop over every path's `Trainer`, observing between the timed parts."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from suites import data, paths
from suites.cases import Case
from suites.lifecycle import Lifecycle
from suites.model import EMBEDDING, HEAD, parameter_shapes
from suites.observe import Piece, RankObservation, Seen, StepObservation
from suites.precision import multiplying, switches
from suites.trace import Tracer

Progress = Callable[[str], None]


class CollectiveLog(TorchDispatchMode):
    """Names of the collectives that this rank issues while the mode is on, in order, as ``allreduce/2`` (over two
    ranks).

    Collectives over a group of one rank move nothing and are left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.overloadpacket.__name__.strip("_")
            size = _group_size(args)
            if name != "wait_tensor" and size != 1:
                self.names.append(f"{name}/{size or '?'}")
        return func(*args, **(kwargs or {}))


def _group_size(args: Sequence[Any]) -> int | None:
    """Number of ranks in the process group among a c10d operator's arguments."""
    for value in args:
        if isinstance(value, torch.ScriptObject):
            with contextlib.suppress(RuntimeError):  # a reduction's operator is a script object too
                return torch.distributed.ProcessGroup.unbox(value).size()
    return None


def run_rank(
    case: Case,
    device: torch.device,
    progress: Progress = lambda phase: None,
    lifecycle: list[Lifecycle] | None = None,
    trace: int | None = None,
) -> RankObservation:
    """Build the case's path on this rank, train it, and return what was seen.

    The default process group must be up with `case.world_size` ranks. `progress` hears the name of each phase as it
    begins ("build", "step 1 forward", …): the watchdog names it when this rank hangs.

    Args:
        trace: step (from 0) in which to keep every module's output and its gradient.

    Raises:
        Exception: whatever the framework raises; the caller tells refusals from crashes.
    """
    lifecycle = [] if lifecycle is None else lifecycle

    def notice(event: str, embedding: Tensor, head: Tensor) -> None:
        lifecycle.append(Lifecycle(event, embedding is head, same_storage(embedding, head)))

    reset_peak_memory(device)
    progress("build")
    trainer = paths.load(case.path)(case, device, notice)
    observing = 0.0
    try:
        begin = time.perf_counter()
        named = dict(trainer.parameters())
        initial = dict(trainer.weights())
        observing += time.perf_counter() - begin
        steps: list[StepObservation] = []
        traced: tuple[Seen, ...] = ()
        for step in range(case.steps):
            begin = time.perf_counter()
            tracer = Tracer(trainer.module(), case) if step == trace else None
            steps.append(_step(case, trainer, step, device, progress, tracer))
            traced = tuple(tracer.seen) if tracer else traced
            observing += time.perf_counter() - begin - steps[-1].seconds
            named = dict(trainer.parameters())
            notice(f"step {step + 1}", named[EMBEDDING], named[HEAD])
        with multiplying(case.matmul, device):
            read = switches(device)
        return RankObservation(
            rank=torch.distributed.get_rank(),
            tp_rank=trainer.tp_rank,
            dp_rank=trainer.dp_rank,
            lifecycle=tuple(lifecycle),
            layout=dict(trainer.layout()),
            census=_census(case, trainer, named),
            initial=initial,
            steps=tuple(steps),
            peak_memory_bytes=peak_memory(device),
            zero_stage=trainer.zero_stage(),
            switches=read,
            observing_seconds=observing,
            trace=traced,
            saved=dict(trainer.saved()),
        )
    finally:
        progress("close")
        trainer.close()


def _step(  # noqa: PLR0917
    case: Case,
    trainer: paths.Trainer,
    step: int,
    device: torch.device,
    progress: Progress,
    tracer: Tracer | None = None,
) -> StepObservation:
    batches = [data.micro_batch(case, step, micro, trainer.dp_rank).to(device) for micro in range(case.accumulate)]
    outputs = []
    log = CollectiveLog() if step == 0 else None
    seconds = 0.0
    for micro, batch in enumerate(batches):
        progress(f"step {step + 1} forward and backward")
        start = _now(device)
        if tracer:
            tracer.micro = micro
        with tracer or contextlib.nullcontext(), multiplying(case.matmul, device), log or contextlib.nullcontext():
            loss, logits = trainer.forward_backward(batch, last=micro == len(batches) - 1)
        seconds += _now(device) - start
        outputs.append((loss.detach().double().item(), Piece.whole(logits)))
    progress(f"step {step + 1} gradients")
    gradients = dict(trainer.gradients())
    progress(f"step {step + 1} update")
    start = _now(device)
    with log or contextlib.nullcontext():
        norm = trainer.step()
    seconds += _now(device) - start
    return StepObservation(
        loss=tuple(loss for loss, _ in outputs),
        logits=tuple(logits for _, logits in outputs),
        gradients=gradients,
        gradient_norm=norm,
        weights=dict(trainer.weights()),
        masters=dict(trainer.masters()),
        collectives=tuple(log.names) if log else None,
        seconds=seconds,
    )


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def reset_peak_memory(device: torch.device) -> None:
    """Begin anew to look for the peak of `peak_memory`: ranks are kept alive over many cases."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError, AttributeError):  # give back what the last case freed and malloc kept (glibc)
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):  # where the kernel does not offer it, the peak is that of the process's life
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: torch.device) -> int:
    """Peak bytes of this rank since `reset_peak_memory`: the allocator's on CUDA, the resident set on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def same_storage(a: Tensor, b: Tensor) -> bool:
    """Same memory, start and shape: writing one is writing the other. Meta and emptied tensors have no memory to
    share."""
    if a is b:
        return True
    if a.device != b.device or a.is_meta or a.numel() == 0:
        return False
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def _census(case: Case, trainer: paths.Trainer, named: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Canonical name of each parameter that the optimizer holds, one entry a mention.

    A tied weight goes by the embedding's name, whichever of the two modules the model registers first.
    """
    names: dict[int, str] = {}
    for name in parameter_shapes(case):
        if name in named:
            names.setdefault(id(named[name]), name)
    return tuple(names.get(id(p), f"?{tuple(p.shape)}") for p in trainer.optimized())
