"""The verdict in a process of its own: the supervisor stays light and awake, and judging overlaps with the ranks' work.

Judging needs torch, takes as long as the model is large, and may be killed for memory; none of that may cost the run.
The judge reads the observations that the ranks saved, keeps the references of earlier cases, and asks the supervisor
where it needs a case run once more (a higher precision, a trace). One case at a time.

    supervisor ── Judge ══ socket ══ the judge: Task ->, <- RunAgain, RanAgain ->, …, <- Judged
"""

from __future__ import annotations

import contextlib
import hmac
import math
import os
import secrets
import select
import signal
import socket
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ci import channel as ch
from ci import records
from ci.forkserver import Child
from suites.cases import Case
from suites.runs import RunFailed

if TYPE_CHECKING:
    from suites.examine import Examination
    from suites.observe import RankObservation
    from suites.reference import ReferenceCache

REFERENCES = "TIEBENCH_REFERENCES"  # variable: directory of references kept between runs; empty: none are
CONNECT = 60.0  # seconds to connect to the supervisor
_RowType = TypeVar("_RowType", bound=records.Row)


class JudgeGone(Exception):
    """The judge ended; one line that says how."""


class TooSlow(JudgeGone):
    """The judge did not finish in time, and was ended."""


# Between supervisor and judge.
class Hello(ch.Message, frozen=True, tag="hello"):
    """First message of the judge."""

    token: str


class Task(ch.Message, frozen=True, tag="task"):
    """Judge a case: rank r's observation is ``directory/rank<r>.safetensors``."""

    case: str
    directory: str


class RunAgain(ch.Message, frozen=True, tag="again"):
    """Run a case on the same ranks, perhaps with a trace of a step (from 0)."""

    case: str
    trace: int | None = None


class RanAgain(ch.Message, frozen=True, tag="ran"):
    """Where its observations are, or why there are none; and how many seconds the ranks took."""

    directory: str | None = None
    reason: str = ""
    seconds: float = 0.0


class Judged(ch.Message, frozen=True, tag="judged"):
    """The verdict. Fields as those of `ci.records.Record`."""

    verdict: records.Verdict
    evidence: str
    oracle: str | None = None
    findings: tuple[records.Finding, ...] = ()
    measured: tuple[records.Measured, ...] = ()
    escalation: tuple[records.Rung, ...] = ()
    diagnosis: str = ""
    guesses: tuple[records.Guess, ...] = ()
    dormant: tuple[records.Dormant, ...] = ()
    error: float | None = None
    limit: float | None = None
    headroom: float | None = None
    error_of: str | None = None
    seconds_per_step: float | None = None
    step_seconds: tuple[float, ...] = ()
    tokens_per_second: float | None = None
    peak_memory_bytes: int | None = None
    judge_seconds: float | None = None
    verdict_seconds: float | None = None

    def fields(self) -> dict[str, Any]:
        """For a record."""
        return {name: getattr(self, name) for name in self.__struct_fields__}


class Note(ch.Message, frozen=True, tag="note"):
    """One line for people; no answer to anything."""

    text: str


class Trouble(ch.Message, frozen=True, tag="trouble"):
    """Judging raised: a fault of this program."""

    error: str
    traceback: str


ToJudge = Task | RanAgain
FromJudge = Hello | RunAgain | Judged | Note | Trouble


Process = Child | subprocess.Popen[bytes]  # forked or spawned
Launch = Callable[[Mapping[str, str]], Process]
Again = Callable[[Case, "int | None"], Path]


class Judge:
    """The supervisor's side. `start` a task, do something else, `finish` it.

    Args:
        launch: starts a judge's process with some environment variables.
        references: directory of references kept between runs; None: none are.
        say: hears what the judge has to tell people.
    """

    def __init__(self, launch: Launch, references: Path | None = None, say: Callable[[str], None] = print):
        self._launch, self._references, self._say = launch, references, say
        self._process: Process | None = None
        self._channel: ch.Channel[FromJudge] | None = None
        self._events: list[FromJudge] = []
        self._said: set[str] = set()  # a judge that is started again has the same to tell

    @property
    def pid(self) -> int | None:
        """Its process id while it runs."""
        return self._process.pid if self._process else None

    def open(self) -> None:
        """Start the process; only needed where it should come up before the first task.

        Raises:
            JudgeGone: it did not come up.
        """
        token = secrets.token_hex(16)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            host, port = listener.getsockname()[:2]
            kept = str(self._references or "")  # an empty one too: the user's environment must not decide
            self._process = self._launch({ch.CONTROL: f"{host}:{port}", ch.TOKEN: token, REFERENCES: kept})
            listener.settimeout(1.0)
            deadline = time.monotonic() + CONNECT
            while self._channel is None:
                if (code := self._process.poll()) is not None or time.monotonic() > deadline:
                    self.close()
                    how = "no answer" if code is None else f"exit code {code}"
                    raise JudgeGone(f"the judge did not come up ({how})")
                with contextlib.suppress(OSError, ch.ChannelClosed):
                    connection, _ = listener.accept()
                    connection.settimeout(10.0)
                    channel: ch.Channel[FromJudge] = ch.Channel(connection, FromJudge)
                    hello = channel.receive()
                    if len(hello) == 1 and isinstance(hello[0], Hello) and hmac.compare_digest(hello[0].token, token):
                        connection.settimeout(None)
                        self._channel = channel
                    else:
                        channel.close()

    def start(self, case: Case, directory: Path) -> None:
        """Hand out a case to judge.

        Raises:
            JudgeGone: there is no judge to be had.
        """
        if self._channel is None:
            self.open()
        assert self._channel
        self._events.clear()
        try:
            self._channel.send(Task(case=case.id, directory=str(directory.resolve())))
        except ch.ChannelClosed:
            raise self._gone() from None

    @property
    def connection(self) -> socket.socket | None:
        """What becomes readable when the judge says something."""
        return self._channel.connection if self._channel else None

    @property
    def wants_ranks(self) -> bool:
        """Whether it waits for a case to be run again."""
        return bool(self._events) and isinstance(self._events[0], RunAgain)

    def ready(self) -> bool:
        """Whether `finish` would return at once: there is a verdict, or no judge. Never waits."""
        assert self._channel
        try:
            if not self._events and select.select([self._channel.connection], [], [], 0.0)[0]:
                self._take_in(self._channel.receive())
        except ch.ChannelClosed:
            return True
        return bool(self._events) and not self.wants_ranks

    def finish(self, limit: float, again: Again) -> Judged:
        """Wait for the verdict; a judge that takes longer than `limit` seconds is ended.

        The time of what it has run again does not count.

        Args:
            again: runs a case once more and returns the directory of its observations; raises `RunFailed`.

        Raises:
            JudgeGone: no verdict; RuntimeError: judging raised, with its traceback.
        """
        deadline = time.monotonic() + limit
        while True:
            event = self._next(deadline - time.monotonic(), limit)
            if isinstance(event, Judged):
                return event
            if isinstance(event, Trouble):
                raise RuntimeError(event.error + "\n" + event.traceback)
            if isinstance(event, RunAgain):
                begin = time.monotonic()
                self._answer(event, again)
                deadline += time.monotonic() - begin

    def _answer(self, event: RunAgain, again: Again) -> None:
        begin = time.monotonic()
        try:
            found = again(Case.parse(event.case), event.trace).resolve()
            answer = RanAgain(directory=str(found), seconds=time.monotonic() - begin)
        except RunFailed as error:
            answer = RanAgain(reason=str(error), seconds=time.monotonic() - begin)
        assert self._channel
        try:
            self._channel.send(answer)
        except ch.ChannelClosed:
            raise self._gone() from None

    def _next(self, seconds: float, limit: float) -> FromJudge:
        assert self._channel
        while not self._events:
            if not select.select([self._channel.connection], [], [], max(seconds, 0.0))[0]:
                self.close()
                raise TooSlow(f"judging took over {limit:.0f} s and was ended")
            try:
                self._take_in(self._channel.receive())
            except ch.ChannelClosed:
                raise self._gone() from None
        return self._events.pop(0)

    def _take_in(self, events: Sequence[FromJudge]) -> None:
        for event in events:
            if not isinstance(event, Note):
                self._events.append(event)
            elif event.text not in self._said:
                self._said.add(event.text)
                self._say(event.text)

    def _gone(self) -> JudgeGone:
        from ci.ranks import ended  # noqa: PLC0415

        code = None
        if self._process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(5.0)
        self.close()
        return JudgeGone(f"the judge {ended(code)} while it judged")

    def close(self) -> None:
        """End the process; the next task starts a new one."""
        if self._channel:
            self._channel.close()
        if self._process:
            end(self._process)
        self._process = self._channel = None


def end(process: Process) -> None:
    """Kill a process's whole group and reap it."""
    if isinstance(process, Child):
        process.kill_group()
    else:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10.0)
    if isinstance(process, Child):
        process.release()


# The judge's side.


class _Bench:
    """Judges what it is told, one case after the other."""

    def __init__(self, control: ch.Channel[ToJudge]):
        from suites.reference import ReferenceCache  # noqa: PLC0415
        from suites.reference_store import ReferenceStore  # noqa: PLC0415

        self.control = control
        self.waiting: list[ToJudge] = []
        kept = os.environ.get(REFERENCES)
        store = ReferenceStore(Path(kept), say=lambda text: control.send(Note(text=text))) if kept else None
        self.references: ReferenceCache = ReferenceCache(store=store)

    def serve(self) -> None:
        """Until the supervisor is gone."""
        while True:
            task = self.next()
            if not isinstance(task, Task):
                raise TypeError(f"not a task: {task}")
            try:
                answer: ch.Message = self.judge(task)
            except ch.ChannelClosed:
                raise
            except Exception as error:  # noqa: BLE001 - a fault of this program must cost one case
                answer = Trouble(error=f"{type(error).__name__}: {error}", traceback=traceback.format_exc()[-12000:])
            self.control.send(answer)
            sys.stdout.flush()
            sys.stderr.flush()

    def next(self) -> ToJudge:
        """The next message."""
        while not self.waiting:
            self.waiting += self.control.receive()
        return self.waiting.pop(0)

    def judge(self, task: Task) -> Judged:
        """Judge one case, asking for what it needs."""
        from suites.examine import examine  # noqa: PLC0415
        from suites.observe import ObservationError  # noqa: PLC0415

        case = Case.parse(task.case)
        waited = 0.0  # for ranks that were at work on another case

        def again(case: Case, trace: int | None = None) -> Sequence[RankObservation]:
            nonlocal waited
            asked = time.monotonic()
            self.control.send(RunAgain(case=case.id, trace=trace))
            answer = self.next()
            waited += time.monotonic() - asked - getattr(answer, "seconds", 0.0)
            if not isinstance(answer, RanAgain) or answer.directory is None:
                raise RunFailed(getattr(answer, "reason", f"not an answer: {answer}"))
            try:
                return observations(case, Path(answer.directory))
            except ObservationError as error:
                raise RunFailed(str(error)) from None

        begin = time.monotonic()
        seen = observations(case, Path(task.directory))
        examined = examine(case, seen, self.references, again)
        return told(case, seen, examined, time.monotonic() - begin - waited)


def observations(case: Case, directory: Path) -> list[RankObservation]:
    """What the ranks saved, in order of ranks.

    Raises:
        ObservationError: a file cannot be read.
    """
    from suites.observe import RankObservation  # noqa: PLC0415

    return [RankObservation.load(directory / f"rank{rank}.safetensors") for rank in range(case.world_size)]


def told(case: Case, seen: Sequence[RankObservation], examined: Examination, seconds: float) -> Judged:
    """What the record says of an examination that took some seconds."""
    judged, diagnosis = examined.judgement, examined.diagnosis
    steps = [max(ranks) for ranks in zip(*([s.seconds for s in r.steps] for r in seen), strict=True)]
    median = statistics.median(steps[1:])
    return Judged(
        verdict=judged.verdict,  # type: ignore[arg-type]  # one of the words of a record
        oracle=", ".join(dict.fromkeys(f.oracle for f in judged.findings if f.flagged)) or None,
        evidence=judged.evidence,
        findings=tuple(_plain(records.Finding, finding) for finding in judged.findings),
        measured=tuple(_plain(records.Measured, row) for row in judged.measured),
        escalation=tuple(_plain(records.Rung, rung) for rung in judged.rungs),
        diagnosis=diagnosis.sentence if diagnosis else "",
        guesses=tuple(_plain(records.Guess, guess) for guess in diagnosis.guesses) if diagnosis else (),
        dormant=tuple(_plain(records.Dormant, found) for found in examined.dormant),
        error=judged.error,
        limit=judged.limit,
        headroom=judged.headroom,
        error_of=judged.error_of,
        seconds_per_step=median,
        step_seconds=tuple(steps),
        tokens_per_second=case.tokens_per_step / median,
        peak_memory_bytes=max(r.peak_memory_bytes for r in seen),
        judge_seconds=seconds,
        verdict_seconds=seconds + max(r.observing_seconds for r in seen),
    )


def _plain(kind: type[_RowType], found: Any) -> _RowType:
    """A row of the record from a dataclass of the same fields; numbers that are not finite become None."""
    values = {name: getattr(found, name) for name in kind.__struct_fields__}
    return kind(**{n: None if isinstance(v, float) and not math.isfinite(v) else v for n, v in values.items()})


def main() -> None:
    """Entry point of the judge's process, forked or ``python -m ci.judge``."""
    from ci.worker import die_with, flush  # noqa: PLC0415

    if ch.DIE_WITH_PARENT in os.environ:
        die_with(int(os.environ[ch.DIE_WITH_PARENT]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)  # the same sums on every machine, and no threads that wait for busy cores
    host, _, port = os.environ[ch.CONTROL].rpartition(":")
    control: ch.Channel[ToJudge] = ch.Channel(socket.create_connection((host, int(port)), timeout=CONNECT), ToJudge)
    control.connection.settimeout(None)
    control.send(Hello(token=os.environ.pop(ch.TOKEN)))
    with contextlib.suppress(ch.ChannelClosed):
        _Bench(control).serve()
    flush()
    os._exit(0)


if __name__ == "__main__":
    main()
