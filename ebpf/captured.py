"""What C libraries write to the standard outputs, caught: bcc says there why it refused, and raises next to nothing."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import threading
from collections.abc import Iterator

OUTPUTS = (1, 2)
LIMIT = 1 << 20
"""Most bytes of it that are read back."""
_one_at_a_time = threading.RLock()


class Captured:
    """What was written so far, also after the block has ended.

    Args:
        fd: The file that it is written to.
    """

    def __init__(self, fd: int) -> None:
        self.fd, self._kept = fd, b""

    @property
    def text(self) -> str:
        """Return it as text."""
        raw = self._kept if self.fd < 0 else os.pread(self.fd, LIMIT, 0)
        return raw.decode("utf-8", "replace")

    def end(self) -> bytes:
        """Keep what was written and let go of the file."""
        self._kept = os.pread(self.fd, LIMIT, 0)
        os.close(self.fd)
        self.fd = -1
        return self._kept


@contextlib.contextmanager
def captured_output() -> Iterator[Captured]:
    """Catch what is written to descriptors 1 and 2; afterwards it is on standard error, whatever the body raises.

    Standard output is the agent's JSON: libraries have no place there. Descriptors belong to all threads: what another
    one writes to standard error meanwhile comes late, and is not lost. Two captures wait for each other.
    """
    with _one_at_a_time:
        _flush()
        captured = Captured(_file())
        kept = {number: _copy(number) for number in OUTPUTS}
        try:
            for number in OUTPUTS:
                os.dup2(captured.fd, number)
            yield captured
        finally:
            _flush()
            for number, copy in kept.items():
                _put_back(number, copy)
            said = captured.end()
            with contextlib.suppress(OSError):  # a standard error that is closed or full
                while said:
                    said = said[os.write(2, said) :]


def _file() -> int:
    """Return a file in memory; where an output is closed, not under its number."""
    fd = os.memfd_create("pasta-captured")
    if fd > max(OUTPUTS):
        return fd
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(OUTPUTS) + 1)
    os.close(fd)
    return moved


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
