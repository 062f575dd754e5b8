"""A report at regular intervals while a run is going, so that there is one whatever becomes of the run.

Each is written by a process of its own, at the lowest priority: the run neither waits for it nor suffers from what goes
wrong in it. At most one is under way; it is bounded in time, dies with the run, and is never the last to write: `close`
ends it before the run writes its own.

    python -m ci.periodic DIR       writes the reports of a run directory and prints nothing
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from ci import channel as ch
from ci.ranks import clean_environment, module_command
from ci.records import EVENTS, LogError

INTERVAL = 60.0  # seconds
LIMIT = 120.0  # seconds that one report may take
SHARE = 10.0  # after a report, wait at least so many times as long as it took


class Periodic:
    """Writes a run directory's reports now and then. Nothing here raises: a report is worth less than the run.

    Args:
        directory: run directory; need not exist yet.
        seconds: between two reports, and before the first; None or 0: none are written.
        limit: seconds that one may take.

    Attributes:
        written: how many reports were written.
    """

    def __init__(self, directory: Path, seconds: float | None = INTERVAL, *, limit: float = LIMIT):
        self.directory, self.seconds, self.limit = Path(directory), seconds or 0.0, limit
        self.written = 0
        self._child: subprocess.Popen[bytes] | None = None
        self._begin = 0.0  # of the child, on the monotonic clock
        self._due = time.monotonic() + self.seconds
        self._size = 0  # of the record log, as the last report found it

    def poll(self) -> None:
        """Start a report where one is due and there is news; look after the one that is under way.

        To be called from the main thread, as often as is convenient: the kernel ends the child with the thread that
        started it.
        """
        now = time.monotonic()
        if self._child is not None:
            if self._child.poll() is None:
                if now - self._begin > self.limit:
                    self._end()
                return
            self.written += self._child.returncode == 0
            self._child = None
            self._due = max(self._due, now + SHARE * (now - self._begin))
        if not self.seconds or now < self._due:
            return
        self._due = now + self.seconds
        try:
            size = (self.directory / EVENTS).stat().st_size
            if size != self._size:
                self._start()
                self._size = size
        except OSError:  # no directory yet, no process to be had: next time
            return

    def close(self) -> None:
        """End a report that is under way; none comes after it."""
        self.seconds = 0.0
        self._end()

    def _start(self) -> None:
        command, extra = module_command("ci.periodic")
        environment = clean_environment() | extra
        if threading.current_thread() is threading.main_thread():
            environment[ch.DIE_WITH_PARENT] = str(os.getpid())
        self._begin = time.monotonic()
        self._child = subprocess.Popen(
            [*command, str(self.directory.resolve()), str(self.limit)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        with contextlib.suppress(OSError):  # not reaped yet, so the number is still its own
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        for half in self.directory.glob(f".*.{child.pid}.tmp"):  # what it was writing
            with contextlib.suppress(OSError):
                half.unlink()


def main() -> int:
    """Entry point of the child: directory, and after how many seconds to give up."""
    directory, limit = Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else LIMIT
    if ch.DIE_WITH_PARENT in os.environ:
        from ci.worker import die_with  # noqa: PLC0415

        die_with(int(os.environ[ch.DIE_WITH_PARENT]))
    signal.setitimer(signal.ITIMER_REAL, limit)  # whoever started this may be gone
    with contextlib.suppress(OSError):
        os.nice(19)
    from reports.write import write_report  # noqa: PLC0415 - pandas takes a second

    try:
        write_report(directory)
    except LogError as error:
        print(f"tiebench: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
