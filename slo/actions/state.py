"""What the response remembers across ``kill -9``: a checkpoint, plus the audit lines written after it.

An action is done once its audit line is on disk. Each line carries its effect; live and after a restart the same
``apply`` turns effects into state, so a restart neither repeats an action nor forgets one.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

VERSION = 1
MAX_BURNS = 1000
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Degradation:
    """A degradation that holds.

    Attributes:
        dependency: Name in the policy.
        flag: ``degrade.<name>``.
        edge: ``caller -> callee``, the breaker it opens.
        cause: ``kind target`` that it answers.
        slos: SLOs that burn, or burnt, because of it.
        since_unix_nano: When it began; apps open their breaker once per ``since``.
        expires_unix_nano: When it reverts unless refreshed.
        warranted_unix_nano: When an SLO last burned because of it.
        normal_seconds: Median call time before the burn, from the attribution; None = not known.
        slow_seconds: Median call time while it burnt.
        normal_start_unix_nano: Beginning of the window that the attribution took as normal; 0 = there was none.
        normal_end_unix_nano: Its end.
    """

    dependency: str
    flag: str
    edge: str
    cause: str
    slos: list[str]
    since_unix_nano: int
    expires_unix_nano: int
    warranted_unix_nano: int
    normal_seconds: float | None = None
    slow_seconds: float | None = None
    normal_start_unix_nano: int = 0
    normal_end_unix_nano: int = 0


@dataclass(slots=True)
class ActionState:
    """Everything that must outlive the process.

    Attributes:
        seq: Last audit line that is contained.
        active: Degradations by flag.
        cooldowns: Until when a flag may not be set again, by flag.
        pins: ``{value, by, reason}`` by flag.
        seen: What was said once in a burn: keys by SLO, valid for ``burns[slo]``.
        burns: Beginning of the burn that ``seen`` belongs to, by SLO.
        pending: Notifications not yet delivered, by id.
        capture: The raised capture: ``{slo, cause, value, since_unix_nano, expires_unix_nano}``, or empty.
    """

    seq: int = 0
    active: dict[str, Degradation] = field(default_factory=dict)
    cooldowns: dict[str, int] = field(default_factory=dict)
    pins: dict[str, dict[str, Any]] = field(default_factory=dict)
    seen: dict[str, list[str]] = field(default_factory=dict)
    burns: dict[str, int] = field(default_factory=dict)
    pending: dict[str, dict[str, Any]] = field(default_factory=dict)
    capture: dict[str, Any] = field(default_factory=dict)

    def has_seen(self, slo: str, burn_unix_nano: int, key: str) -> bool:
        """Return whether this was said in this burn."""
        return self.burns.get(slo) == burn_unix_nano and key in self.seen.get(slo, ())

    def apply(self, effect: Mapping[str, Any]) -> None:
        """Apply one effect."""
        operation = effect.get("op")
        if operation == "activate":
            entry = Degradation(**effect["entry"])
            self.active[entry.flag] = entry
        elif operation == "deactivate":
            self.active.pop(effect["flag"], None)
            if effect["cooldown_until_unix_nano"]:
                self.cooldowns[effect["flag"]] = effect["cooldown_until_unix_nano"]
        elif operation == "pin":
            self.pins[effect["flag"]] = {name: effect[name] for name in ("value", "by", "reason")}
        elif operation == "unpin":
            self.pins.pop(effect["flag"], None)
        elif operation == "notify":
            self.pending[effect["id"]] = dict(effect["message"])
        elif operation == "delivered":
            self.pending.pop(effect["id"], None)
        elif operation == "capture":
            self.capture = dict(effect["held"])
        if "seen" in effect:
            self._see(**effect["seen"])

    def _see(self, slo: str, burn_unix_nano: int, key: str) -> None:
        if self.burns.get(slo) != burn_unix_nano:
            self.burns[slo], self.seen[slo] = burn_unix_nano, []
        if key not in self.seen[slo]:
            self.seen[slo].append(key)

    def to_json(self) -> dict[str, Any]:
        """Return the checkpoint."""
        return {"version": VERSION, **asdict(self)}


def from_json(document: Any) -> ActionState:
    """Return the state of a checkpoint.

    Raises:
        ValueError: Not a checkpoint of this version.
    """
    try:
        fields = dict(document)
        if fields.pop("version") != VERSION:
            raise ValueError(f"version is not {VERSION}")
        fields["active"] = {flag: Degradation(**entry) for flag, entry in fields["active"].items()}
        return ActionState(**fields)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"not a checkpoint: {error!r}") from error


class Checkpoint:
    """The state file; it may lag behind the audit, or be missing, and nothing is lost.

    Args:
        path: The file, replaced atomically.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)

    def load(self, lines: Iterable[Mapping[str, Any]]) -> ActionState:
        """Return the checkpoint with the effects of later audit lines applied; without a readable one, of all lines."""
        state = self._read()
        for line in lines:
            if line["seq"] > state.seq:
                effect = line.get("effect")
                if isinstance(effect, Mapping):
                    state.apply(effect)
                state.seq = line["seq"]
        return state

    def save(self, state: ActionState) -> None:
        """Replace the file, synced."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_name(f"{self._path.name}.new")
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(state.to_json(), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)

    def _read(self) -> ActionState:
        try:
            return from_json(json.loads(self._path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return ActionState()
        except (OSError, ValueError, RecursionError) as error:
            _log.warning("%s: %s; state is rebuilt from the audit", self._path, error)
            return ActionState()
