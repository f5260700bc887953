"""The audit: one JSON line per action, appended, synced, redacted; also the journal that state is rebuilt from."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pasta_otel.errors import InputError

KEEP_IN_MEMORY = 1000
MASK = "***"
_SECRETS = re.compile(
    r"(?i)(?P<lead>bearer\s+|[?&;](?:key|token|secret|password|api_key|access_token|sig)=|://[^/\s:@]+:)[^\s&;\"'@]+"
)


class AuditLog:
    """An append-only JSONL file that one process owns.

    Args:
        path: The file; made if missing.
        secrets: Texts that never stand in it.

    Raises:
        InputError: It cannot be appended to, or another process owns it: without an audit nothing may act.
    """

    def __init__(self, path: Path | str, secrets: Sequence[str] = ()) -> None:
        self.path = Path(path)
        self._redact = redactor(secrets)
        try:
            self._lock = self._own()
            self._end_torn_line()
        except OSError as error:
            raise InputError(f"cannot append: {error.strerror or error}", file=str(path), kind="audit") from error
        self.damaged_lines = 0
        self.sequence = 0
        self._recent: deque[Mapping[str, Any]] = deque(maxlen=KEEP_IN_MEMORY)
        for line in self.lines():
            self._recent.append(line)
            self.sequence = max(self.sequence, line["seq"])

    def continue_after(self, sequence: int) -> None:
        """Number the next entry after this one: the file may have been rotated away."""
        self.sequence = max(self.sequence, sequence)

    def append(self, entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Write entries in one write and sync it; each gets the next ``seq``.

        Raises:
            OSError: They are not safely on disk: what they say must not be done.
        """
        lines = [{"seq": self.sequence + 1 + index, **self._redact(entry)} for index, entry in enumerate(entries)]
        data = "".join(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in lines).encode()
        self.sequence += len(lines)  # a number that failed is not used again: it may be on disk after all
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640)
        try:
            _write(descriptor, data)
        finally:
            os.close(descriptor)
        self._recent.extend(lines)
        return list(lines)

    def recent(self, limit: int) -> list[Mapping[str, Any]]:
        """Return the last entries, newest last."""
        return list(self._recent)[-limit:]

    def lines(self) -> Iterator[Mapping[str, Any]]:
        """Yield every entry on disk; a line that is none is counted and passed over."""
        try:
            with self.path.open(encoding="utf-8", errors="replace") as file:
                for text in file:
                    entry = _parse(text)
                    if entry is None:
                        self.damaged_lines += 1
                    else:
                        yield entry
        except FileNotFoundError:
            return

    def close(self) -> None:
        """Give the file up."""
        os.close(self._lock)

    def _own(self) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640))
        lock = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT, 0o640)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            raise OSError(error.errno, "another process owns it") from error
        return lock

    def _end_torn_line(self) -> None:
        """End a line that a power failure cut, so that the next entry stands on its own."""
        with self.path.open("rb+") as file:
            if file.seek(0, os.SEEK_END) == 0:
                return
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")


def _write(descriptor: int, data: bytes) -> None:
    """Write and sync all of it, or take back what was written of it."""
    size = os.fstat(descriptor).st_size
    try:
        written = os.write(descriptor, data)
        if written != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # noqa: TRY301 - both failures end alike
        os.fsync(descriptor)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, size)
        raise


def _parse(text: str) -> Mapping[str, Any] | None:
    if not text.strip():
        return None
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("seq"), int) else None


def redactor(secrets: Sequence[str]) -> Callable[[Any], Any]:
    """Return a function that masks the secrets, and whatever looks like one, in every text of a JSON value."""
    known = [secret for secret in secrets if secret]

    def redact(value: Any) -> Any:
        if isinstance(value, str):
            for secret in known:
                value = value.replace(secret, MASK)
            return _SECRETS.sub(rf"\g<lead>{MASK}", value)
        if isinstance(value, Mapping):
            return {key: redact(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [redact(item) for item in value]
        return value

    return redact
