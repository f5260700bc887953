"""The flags that the controller serves, in OFREP's words; answered from memory, from any thread."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pasta_otel import semconv
from pasta_otel.clock import Clock
from pasta_otel.errors import InputError
from pasta_otel.slo.actions.times import to_rfc3339

CAPTURE_DEFAULT: Mapping[str, Any] = {"tier": semconv.CAPTURE_DEFAULT_TIER, "targets": [], "until": ""}


@dataclass(frozen=True, slots=True)
class _Set:
    value: Any
    since_unix_nano: int
    expires_unix_nano: int


@dataclass(frozen=True, slots=True)
class _Pin:
    value: Any
    by: str
    reason: str
    from_policy: bool


class FlagBook:
    """Default, value set by the controller, and pin of each flag; a pin wins, an expired value does not count.

    Args:
        defaults: Every flag that exists, with its default.
        clock: Time.
        pins: Flags fixed by the policy file.
    """

    def __init__(self, defaults: Mapping[str, Any], clock: Clock, pins: Mapping[str, Any] | None = None) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._defaults = {**defaults, **{key: _off(key) for key in pins or {} if key not in defaults}}
        self._sets: Mapping[str, _Set] = {}
        self._pins: Mapping[str, _Pin] = {
            key: _Pin(value, "policy", "pinned in the policy file", from_policy=True)
            for key, value in (pins or {}).items()
        }

    def set(self, key: str, value: Any, since_unix_nano: int, expires_unix_nano: int) -> None:
        """Set a value until it expires."""
        with self._lock:
            self._sets = {**self._sets, key: _Set(value, since_unix_nano, expires_unix_nano)}

    def refresh(self, key: str, expires_unix_nano: int) -> None:
        """Let a value that is set live longer."""
        with self._lock:
            entry = self._sets[key]
            self._sets = {**self._sets, key: replace(entry, expires_unix_nano=expires_unix_nano)}

    def clear(self, key: str) -> None:
        """Give a flag its default again."""
        with self._lock:
            self._sets = {name: entry for name, entry in self._sets.items() if name != key}

    def value(self, key: str) -> Any:
        """Return what is served for a flag."""
        entry = self.evaluate(key)
        return None if entry is None else entry["value"]

    def evaluate(self, key: str) -> dict[str, Any] | None:
        """Return one flag as an OFREP entry, or None when there is no such flag."""
        return self._entry(key, self._clock.unix_nano()) if key in self._defaults else None

    def evaluate_all(self) -> list[dict[str, Any]]:
        """Return every flag, by name."""
        now_unix_nano = self._clock.unix_nano()
        return [self._entry(key, now_unix_nano) for key in sorted(self._defaults)]

    def pinned_by(self, key: str) -> str:
        """Return who pinned a flag, or an empty text."""
        pin = self._pins.get(key)
        return pin.by or "a person" if pin else ""

    def check_pin(self, key: str, value: Any) -> None:
        """Refuse a pin that cannot be.

        Raises:
            InputError: Unknown flag (``not_found``), wrong type, or fixed by the policy file (``conflict``).
        """
        self.check_unpin(key)
        if type(value) is not type(self._defaults[key]):
            expected = "true or false" if isinstance(self._defaults[key], bool) else "an object"
            raise InputError(f"expected {expected}, got {value!r}", field="value")

    def check_unpin(self, key: str) -> None:
        """Refuse to unpin what no request may change; raises InputError as ``check_pin`` does."""
        if key not in self._defaults:
            raise InputError("no such flag", field=key, kind="not_found")
        pin = self._pins.get(key)
        if pin is not None and pin.from_policy:
            raise InputError("pinned by the policy file: change it there", field=key, kind="conflict")

    def pin(self, key: str, value: Any, by: str, reason: str) -> None:
        """Fix a flag."""
        with self._lock:
            self._pins = {**self._pins, key: _Pin(value, by, reason, from_policy=False)}

    def unpin(self, key: str) -> None:
        """Give a flag back."""
        with self._lock:
            self._pins = {name: pin for name, pin in self._pins.items() if name != key}

    def _entry(self, key: str, now_unix_nano: int) -> dict[str, Any]:
        pin, entry = self._pins.get(key), self._sets.get(key)
        if pin is not None:
            metadata: dict[str, Any] = {"pinned": True, "by": pin.by, "reason": pin.reason, "since": "pin"}
            return _ofrep(key, pin.value, "STATIC", metadata)
        if entry is None or entry.expires_unix_nano <= now_unix_nano:
            return _ofrep(key, self._defaults[key], "DEFAULT", {})
        metadata = {"since": to_rfc3339(entry.since_unix_nano), "expires_at": to_rfc3339(entry.expires_unix_nano)}
        return _ofrep(key, entry.value, "TARGETING_MATCH", metadata)


def _ofrep(key: str, value: Any, reason: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    variant = ("on" if value else "off") if isinstance(value, bool) else reason.lower()
    return {"key": key, "value": value, "reason": reason, "variant": variant, "metadata": dict(metadata)}


def _off(key: str) -> Any:
    return CAPTURE_DEFAULT if key == semconv.FLAG_CAPTURE else False
