"""What the controller remembers across a crash: one small file, replaced atomically whenever something changed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from pasta_otel.errors import InputError
from pasta_otel.slo.alerts import AlertMemory
from pasta_otel.slo.verdict import Memory

VERSION = 1
VERDICTS = ("ok", "burning", "no_data")
PHASES = ("inactive", "pending", "firing")


class StateStore(Protocol):
    """Where the controller's memory lies."""

    def load(self) -> dict[str, Memory]:
        """Return the memory by SLO name; empty when there is none."""

    def save(self, memories: Mapping[str, Memory]) -> None:
        """Replace what was remembered: after this returns, a crash forgets nothing."""


class NoState:
    """Forget everything at exit: for one-shot commands and tests."""

    def load(self) -> dict[str, Memory]:
        """Return nothing."""
        return {}

    def save(self, memories: Mapping[str, Memory]) -> None:
        """Keep nothing."""
        del memories


class FileState:
    """A JSON file; as large as the number of SLOs, so it needs no other bound.

    Args:
        path: The file; its folder is made if missing.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)

    def load(self) -> dict[str, Memory]:
        """Return the memory by SLO name; a file that is not ours, or newer, is refused.

        Raises:
            InputError: Naming the file and what is wrong with it.
        """
        try:
            document = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"not a state file: {error}", file=str(self._path), kind="state") from error
        if not isinstance(document, dict) or document.get("version") != VERSION:
            found = document.get("version") if isinstance(document, dict) else None
            raise InputError(f"state version {found!r}, expected {VERSION}", file=str(self._path), kind="state")
        try:
            return {str(name): _from_json(entry) for name, entry in document["slos"].items()}
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise InputError(f"damaged state: {error!r}", file=str(self._path), kind="state") from error

    def save(self, memories: Mapping[str, Memory]) -> None:
        """Write a new file beside the old one, sync it, and swap them."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"version": VERSION, "slos": {name: _to_json(memories[name]) for name in sorted(memories)}})
        temporary = self._path.with_name(self._path.name + ".new")
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _to_json(memory: Memory) -> dict[str, Any]:
    return {
        "verdict": memory.verdict,
        "since_unix_nano": memory.since_unix_nano,
        "burn_since_unix_nano": memory.burn_since_unix_nano,
        "active": dict(memory.active),
        "alerts": {key: [alert.phase, alert.since_unix_nano] for key, alert in memory.alerts.items()},
    }


def _from_json(entry: Any) -> Memory:
    verdict, burn = entry["verdict"], entry["burn_since_unix_nano"]
    if verdict not in VERDICTS:
        msg = f"verdict {verdict!r}"
        raise ValueError(msg)
    return Memory(
        verdict=verdict,
        since_unix_nano=int(entry["since_unix_nano"]),
        burn_since_unix_nano=None if burn is None else int(burn),
        active={str(key): int(below) for key, below in entry["active"].items()},
        alerts={str(key): _alert(*pair) for key, pair in entry.get("alerts", {}).items()},
    )


def _alert(phase: Any, since: Any) -> AlertMemory:
    if phase not in PHASES:
        msg = f"alert {phase!r}"
        raise ValueError(msg)
    return AlertMemory(phase, int(since))
