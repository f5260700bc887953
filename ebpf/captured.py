"""What C libraries write to the standard outputs, caught: bcc says there why it refused, and raises next to nothing."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import sys
import threading
from collections.abc import Iterator

OUTPUTS = (1, 2)
LIMIT = 1 << 20
"""Most bytes of it that are kept."""
PATIENCE_S = 2.0
"""How long the end waits for writes that are under way, or for a child that has our outputs."""
_one_at_a_time = threading.RLock()


class Captured:
    """What was written so far, also after the block has ended.

    It comes through a pipe: only its end says that no thread is still in the middle of a write.

    Args:
        fd: The pipe's end to read from.
    """

    def __init__(self, fd: int) -> None:
        self._fd, self._kept = fd, bytearray()
        self._lock, self._over, self._late = threading.Lock(), threading.Event(), False
        self._reader = threading.Thread(target=self._read, name="pasta-captured", daemon=True)
        self._reader.start()

    @property
    def text(self) -> str:
        """Return it as text."""
        with self._lock:
            while not self._over.is_set() and _readable(self._fd, 0):
                self._take()
            return self._kept.decode("utf-8", "replace")

    def end(self) -> bytes:
        """Return all of it, when nobody can write more; what comes later goes to standard error at once."""
        self._reader.join(PATIENCE_S)
        with self._lock:
            self._late = True
            return bytes(self._kept)

    def _read(self) -> None:
        while not self._over.is_set():
            _readable(self._fd, 1000)
            with self._lock:
                if not self._over.is_set() and _readable(self._fd, 0):
                    self._take()
        os.close(self._fd)

    def _take(self) -> None:
        data = os.read(self._fd, 1 << 16)
        if not data:
            self._over.set()
        elif self._late:
            _tell(data)
        else:
            self._kept += data[: LIMIT - len(self._kept)]


@contextlib.contextmanager
def captured_output() -> Iterator[Captured]:
    """Catch what is written to descriptors 1 and 2; afterwards it is on standard error, whatever the body raises.

    Standard output is the agent's JSON: libraries have no place there. Descriptors belong to all threads: what another
    one writes to standard error meanwhile comes late, and is not lost. Two captures wait for each other.
    """
    with _one_at_a_time:
        _flush()
        reading, writing = _pipe()
        captured = Captured(reading)
        kept = {number: _copy(number) for number in OUTPUTS}
        try:
            for number in OUTPUTS:
                os.dup2(writing, number)
            os.close(writing)
            yield captured
        finally:
            _flush()
            for number, copy in kept.items():
                _put_back(number, copy)
            _tell(captured.end())


def _readable(fd: int, wait_ms: int) -> bool:
    """Tell whether there is something to read, or the end; select() cannot be asked about descriptors from 1024 on."""
    asked = select.poll()
    asked.register(fd, select.POLLIN)
    return bool(asked.poll(wait_ms))


def _tell(said: bytes) -> None:
    with contextlib.suppress(OSError):  # a standard error that is closed or full
        while said:
            said = said[os.write(2, said) :]


def _pipe() -> tuple[int, int]:
    """Return a pipe; where an output is closed, not under its number."""
    ends = []
    for fd in os.pipe():
        if fd <= max(OUTPUTS):
            moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(OUTPUTS) + 1)
            os.close(fd)
            fd = moved  # noqa: PLW2901 - its new number
        ends.append(fd)
    return ends[0], ends[1]


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # there is none, or it is closed
            stream.flush()


def _copy(number: int) -> int | None:
    try:
        return os.dup(number)
    except OSError:
        return None


def _put_back(number: int, copy: int | None) -> None:
    if copy is None:
        os.close(number)
        return
    os.dup2(copy, number)
    os.close(copy)
