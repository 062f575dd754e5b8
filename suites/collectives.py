"""The last collectives of a rank, in a file that can be read whatever state the rank is in.

`install` wraps what Python code issues collectives with (`torch.distributed.ProcessGroup`, and the functional operators
behind DTensor), so that each call is written into a ring in a memory-mapped file *before* it is issued. `read` needs
neither torch nor the rank's help: the file's pages belong to the kernel, so they are there for a rank that is stopped,
that loops with the interpreter lock held, or that is dead.

Not seen is what C++ issues by itself (the reducer of DistributedDataParallel). A Python kernel for the dispatcher's
``c10d`` operators would see that too, but it deadlocks: it enters gloo with the interpreter lock held, while gloo's own
thread waits for that lock to let go of a tensor, holding the mutex that the first one needs.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

State = Literal["issued", "raised", "returned", "waits", "done"]
STATES: tuple[State, ...] = ("issued", "raised", "returned", "waits", "done")
_ISSUED, _RAISED, _RETURNED, _WAITS, _DONE = range(len(STATES))

MAGIC, VERSION = b"tiebcoll", 1
CAPACITY = 256  # rows of the ring
MOST_RANKS = 32  # of a group that are written down one by one
# Little-endian, without gaps. Head: magic, version, size of a row, capacity, rows written so far.
_HEAD = struct.Struct("<8sHHIQ")
# Row: index from 1, issued at (ns), elements, case, number, peer, size, state, then text, ranks, and the index again: a
# row that is being written has two different ones.
_ROW = struct.Struct(f"<QQQIIiHB1x24s12s12s40s40s{2 * MOST_RANKS}sQ")
_STATE_AT = struct.calcsize("<QQQIIiH")

POINT_TO_POINT = frozenset({"send", "recv", "recv_any_source", "batch_p2p"})
_MESSAGES = frozenset(kind.encode() for kind in POINT_TO_POINT)
_ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter", "send", "recv"})
# Method of ProcessGroup -> kind as torch.distributed calls it, and the argument whose elements count.
_METHODS = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce_coalesced", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "allgather": ("all_gather", 1),
    "allgather_coalesced": ("all_gather_coalesced", 1),
    "_allgather_base": ("all_gather_into_tensor", 1),
    "all_gather_single": ("all_gather_into_tensor", 1),
    "allgather_into_tensor_coalesced": ("all_gather_into_tensor_coalesced", 1),
    "all_gather_single_coalesced": ("all_gather_into_tensor_coalesced", 1),
    "gather": ("gather", 1),
    "scatter": ("scatter", 0),
    "reduce_scatter": ("reduce_scatter", 0),
    "_reduce_scatter_base": ("reduce_scatter_tensor", 0),
    "reduce_scatter_single": ("reduce_scatter_tensor", 0),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_tensor_coalesced", 0),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor_coalesced", 0),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all_single", 1),
    "all_to_all_single": ("all_to_all_single", 1),
    "barrier": ("barrier", None),
    "monitored_barrier": ("monitored_barrier", None),
    "send": ("send", 0),
    "recv": ("recv", 0),
    "recv_anysource": ("recv_any_source", 0),
}
# Functional operators issue theirs in C++, where the methods above are not passed: nothing is counted twice.
_OPERATORS = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce_coalesced",
    "all_reduce_coalesced_": "all_reduce_coalesced",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
    "all_gather_into_tensor": "all_gather_into_tensor",
    "all_gather_into_tensor_out": "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "reduce_scatter_tensor": "reduce_scatter_tensor",
    "reduce_scatter_tensor_out": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "all_to_all_single",
    "isend": "send",
    "irecv": "recv",
    "batch_p2p_ops": "batch_p2p",
}
KINDS = frozenset(kind for kind, _ in _METHODS.values()) | frozenset(_OPERATORS.values())


@dataclass(frozen=True)
class Collective:
    """One collective or point-to-point call of one rank, over more than one rank.

    Args:
        index: place among all that the rank issued, from 1.
        case: how many cases the rank had begun; phase: what it was doing (``step 2 update``).
        number: place among those over the same group in this case, from 1; point-to-point calls are counted apart.
        kind: as torch.distributed calls the function; op: of a reduction ("sum", …), else empty.
        elements: of the tensors that this rank gives (of those it gets, where it gets fewer); dtype: of the first.
        group: name of the process group; ranks: its global ranks, the first `MOST_RANKS` of them; size: how many.
        peer: root, source or destination within the group; -1 where there is none.
        seconds: when it was issued, on the system's monotonic clock.
        state: "issued": the call has not returned; "returned": it has, and the operation goes on; "waits": somebody
            waits for the operation; "done": the wait is over; "raised": an exception came back.
    """

    index: int
    case: int
    phase: str
    number: int
    kind: str
    elements: int
    dtype: str
    op: str
    group: str
    ranks: tuple[int, ...]
    size: int
    peer: int
    seconds: float
    state: State

    def __str__(self) -> str:
        """``all_reduce #14 of 2144 float32 (sum)``."""
        return self._told(f" #{self.number}")

    @property
    def what(self) -> str:
        """The same without its number."""
        return self._told("")

    def _told(self, number: str) -> str:
        of = f" of {self.elements} {self.dtype}" if self.dtype else ""
        op = f" ({self.op})" if self.op else ""
        way = "" if self.kind not in _ROOTED else " to" if self.kind in ("send", "reduce", "gather") else " from"
        return f"{self.kind}{number}{of}{op}{way}{f' {self.peer_rank}' if way else ''}"

    @property
    def peer_rank(self) -> str:
        """The peer as a global rank, for people."""
        return f"rank {self.ranks[self.peer]}" if 0 <= self.peer < len(self.ranks) else f"peer {self.peer}"

    @property
    def over(self) -> str:
        """``ranks 0, 1``."""
        more = ", …" if self.size > len(self.ranks) else ""
        return f"ranks {', '.join(map(str, self.ranks))}{more}" if self.ranks else f"group {self.group}"


# Reading: no torch.


def read(path: Path) -> tuple[Collective, ...]:
    """What a rank wrote, oldest first; torn rows are left out, and what is no such file gives nothing."""
    try:
        if not path.is_file():
            return ()
        with open(path, "rb") as stream:
            head = stream.read(_HEAD.size)
            if len(head) < _HEAD.size:
                return ()
            magic, version, row, capacity, _ = _HEAD.unpack(head)
            if (magic, version, row, capacity) != (MAGIC, VERSION, _ROW.size, CAPACITY):
                return ()
            data = stream.read(CAPACITY * _ROW.size)
    except OSError:
        return ()
    found = [row for at in range(0, len(data) - _ROW.size + 1, _ROW.size) if (row := _parse(data, at))]
    return tuple(sorted(found, key=lambda row: row.index))


def _parse(data: bytes, at: int) -> Collective | None:
    first, *numbers, kind, dtype, op, group, phase, ranks, last = _ROW.unpack_from(data, at)
    nanoseconds, elements, case, number, peer, size, state = numbers
    name = _text(kind)
    placed = first > 0 and (first - 1) % CAPACITY == at // _ROW.size
    if first != last or not placed or name not in KINDS or state >= len(STATES) or size < 2:
        return None
    known = struct.unpack(f"<{MOST_RANKS}H", ranks)[: min(size, MOST_RANKS)]
    return Collective(
        index=first,
        case=case,
        phase=_text(phase),
        number=number,
        kind=name,
        elements=elements,
        dtype=_text(dtype),
        op=_text(op),
        group=_text(group),
        ranks=known if len(set(known)) == len(known) else (),
        size=size,
        peer=peer,
        seconds=nanoseconds / 1e9,
        state=STATES[state],
    )


def _text(raw: bytes) -> str:
    text = raw.partition(b"\0")[0].decode("utf-8", "replace")
    return "".join(c if c.isprintable() else "?" for c in text)


# Writing: in the rank.


@dataclass
class _Group:
    """A process group as its rows need it, and how many calls it has seen in this case."""

    name: bytes
    ranks: bytes
    size: int
    collectives: int = 0
    messages: int = 0


class Recorder:
    """Writes the rows of this process. `install` makes it.

    Raises:
        OSError: the file cannot be made. It is allocated whole: a disk that fills up later cannot kill the process.
    """

    def __init__(self, path: Path):
        size = _HEAD.size + CAPACITY * _ROW.size
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            os.posix_fallocate(handle, 0, size)
            self._map = mmap.mmap(handle, size)
        finally:
            os.close(handle)
        _HEAD.pack_into(self._map, 0, MAGIC, VERSION, _ROW.size, CAPACITY, 0)
        self.path = path
        self._count = 0
        self._case = 0
        self._phase = b""
        self._lock = threading.Lock()
        self._groups: weakref.WeakKeyDictionary[Any, _Group] = weakref.WeakKeyDictionary()
        self._waited: dict[int, int] = {}  # id of what somebody may wait for -> index of its row

    def begin(self) -> None:
        """A case begins: count every group's calls from 1 again."""
        with self._lock:
            self._case += 1
            self._groups = weakref.WeakKeyDictionary()
            self._waited.clear()

    def note(self, phase: str) -> None:
        """What the rank does from now on."""
        self._phase = phase.encode()[:40]

    def issue(self, kind: bytes, group: Any, elements: int, dtype: bytes, op: bytes, peer: int) -> int:  # noqa: PLR0917
        """Write a row; its index, or 0 where the group has one rank only (nothing moves)."""
        known = self._groups.get(group)
        if known is None:
            known = self._groups[group] = _describe(group)
        if known.size < 2:
            return 0
        with self._lock:
            self._count = index = self._count + 1
            if kind in _MESSAGES:
                known.messages = number = known.messages + 1
            else:
                known.collectives = number = known.collectives + 1
            _ROW.pack_into(
                self._map, _HEAD.size + (index - 1) % CAPACITY * _ROW.size,
                index, time.monotonic_ns(), elements, self._case, number, peer, known.size, _ISSUED,
                kind, dtype, op, known.name, self._phase, known.ranks, index,
            )  # fmt: skip
        return index

    def mark(self, index: int, state: int) -> None:
        """Set a row's state, unless the ring has gone past it."""
        with self._lock:
            if self._count - index < CAPACITY:
                self._map[_HEAD.size + (index - 1) % CAPACITY * _ROW.size + _STATE_AT] = state

    def returned(self, index: int, result: Any) -> None:
        """The call has come back with something to wait for, or with nothing: then the operation is over."""
        if result is None:
            self.mark(index, _DONE)
            return
        if len(self._waited) >= CAPACITY:  # of operations that nobody waited for
            self._waited.clear()
        self._waited[id(result)] = index
        self.mark(index, _RETURNED)

    def wait(self, original: Callable[..., Any], result: Any, *args: Any, **kwargs: Any) -> Any:
        """Wait for what a call gave back."""
        index = self._waited.pop(id(result), 0)
        if not index:
            return original(result, *args, **kwargs)
        self.mark(index, _WAITS)
        try:
            return original(result, *args, **kwargs)
        finally:
            self.mark(index, _DONE)


def install(path: Path) -> Recorder:
    """Record this process's collectives from now on; once a process, a second call gives the first one's recorder.

    Raises:
        OSError: the file cannot be made.
    """
    import torch  # noqa: PLC0415
    from torch.distributed import ProcessGroup, Work  # noqa: PLC0415

    there = getattr(ProcessGroup.allreduce, "recorder", None)
    if isinstance(there, Recorder):
        return there
    recorder = Recorder(path)
    for name, (kind, which) in _METHODS.items():
        if original := getattr(ProcessGroup, name, None):
            setattr(ProcessGroup, name, _method(recorder, original, kind, which))
    wait = Work.wait
    setattr(Work, "wait", functools.wraps(wait)(lambda work, *a, **k: recorder.wait(wait, work, *a, **k)))  # noqa: B010
    for space in (torch.ops._c10d_functional, torch.ops._c10d_functional_autograd):
        for name, kind in _OPERATORS.items():
            if (operator := getattr(space, name, None)) is not None:
                setattr(space, name, _Operator(operator, functools.partial(_issue_operator, recorder, operator, kind)))
    functional: Any = torch.ops._c10d_functional
    tensor = functional.wait_tensor
    functional.wait_tensor = _Operator(tensor, functools.partial(recorder.wait, tensor))
    return recorder


def _method(recorder: Recorder, original: Callable[..., Any], kind: str, which: int | None) -> Callable[..., Any]:
    """A method of ProcessGroup that writes before it calls."""
    name, reduces, rooted = kind.encode(), "reduce" in kind, kind in _ROOTED

    @functools.wraps(original)
    def method(group: Any, *args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values()) if kwargs else args
        elements, dtype = (0, b"") if which is None or which >= len(values) else _elements(values[which])
        op = _reduction(values) if reduces else b""
        index = recorder.issue(name, group, elements, dtype, op, _peer(values) if rooted else -1)
        return _carry_out(recorder, index, original, (group, *args), kwargs)

    method.recorder = recorder  # type: ignore[attr-defined]
    return method


def _issue_operator(recorder: Recorder, original: Callable[..., Any], kind: str, *args: Any, **kwargs: Any) -> Any:
    """A functional operator: tensors, reduction or peer, and at last the group."""
    values = (*args, *(value for name, value in kwargs.items() if name != "out"))
    index = 0
    with contextlib.suppress(RuntimeError, TypeError, IndexError):  # a group that does not exist: torch says so itself
        group = _resolve(values[-1])
        elements, dtype = _elements(values[3] if kind == "batch_p2p" else values[0])
        if kind.startswith("reduce_scatter"):
            elements //= group.size()
        op = values[1].encode() if isinstance(values[1], str) else b""
        peer = values[1] if kind in _ROOTED else -1
        index = recorder.issue(kind.encode(), group, elements, dtype, op, peer)
    return _carry_out(recorder, index, original, args, kwargs)


def _carry_out(
    recorder: Recorder, index: int, original: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    if not index:
        return original(*args, **kwargs)
    try:
        result = original(*args, **kwargs)
    except BaseException:
        recorder.mark(index, _RAISED)
        raise
    recorder.returned(index, result)
    return result


class _Operator:
    """An operator of torch that is called through a function; all else about it (``.default``, …) is its own."""

    def __init__(self, operator: Any, call: Callable[..., Any]):
        self._operator, self._call = operator, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operator, name)


def _resolve(group: Any) -> Any:
    """The process group that an operator names, by its name or as a boxed object."""
    from torch.distributed import ProcessGroup, distributed_c10d  # noqa: PLC0415

    if isinstance(group, ProcessGroup):
        return group
    resolve: Callable[[Any], Any] = getattr(distributed_c10d, "_resolve_process_group")  # noqa: B009 - not exported
    return resolve(group) if isinstance(group, str) else ProcessGroup.unbox(group)


def _describe(group: Any) -> _Group:
    from torch.distributed import get_process_group_ranks  # noqa: PLC0415

    try:
        ranks = get_process_group_ranks(group)
    except (RuntimeError, ValueError, KeyError):  # not registered with torch.distributed
        ranks = list(range(group.size()))
    few = [rank & 0xFFFF for rank in ranks[:MOST_RANKS]]
    return _Group(group.group_name.encode()[:40], struct.pack(f"<{len(few)}H", *few), min(len(ranks), 0xFFFF))


def _elements(given: Any) -> tuple[int, bytes]:
    """Number of elements of a tensor or of nested lists of tensors, and the type of the first."""
    if isinstance(given, (list, tuple)):
        if len(given) == 1:
            return _elements(given[0])
        found = [_elements(item) for item in given]
        return sum(count for count, _ in found), found[0][1] if found else b""
    try:
        return given.numel(), _dtype(given.dtype)
    except AttributeError:
        return 0, b""


@functools.cache
def _dtype(dtype: Any) -> bytes:
    return str(dtype).removeprefix("torch.").encode()


def _reduction(values: Sequence[Any]) -> bytes:
    """Name of the reduction among a method's arguments: in the options, or by itself, as the overload wants it."""
    for value in values[1:]:
        reduction = getattr(value, "reduceOp", value)
        if hasattr(reduction, "op"):  # ReduceOp holds a RedOpType
            reduction = reduction.op
        if type(reduction).__name__ == "RedOpType":
            return _name(reduction)
    return b""


@functools.cache
def _name(reduction: Any) -> bytes:
    return reduction.name.lower().encode()


def _peer(values: Sequence[Any]) -> int:
    """Root, source or destination within the group among a method's arguments."""
    for value in values[1:]:
        peer = getattr(value, "rootRank", value)
        if type(peer) is int:
            return peer
    return -1
