"""Write flags as a flagd file, so that any OpenFeature SDK with a flagd provider reads them without our API.

Sources: open-feature/flagd docs/reference/flag-definitions.md and syncs.md. flagd watches a path; a symbolic link that
is replaced never shows half a file. A degradation carries its end as a targeting rule on ``$flagd.timestamp`` too: it
reverts even when nobody is left to rewrite the file.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from pasta_otel.errors import InputError

SCHEMA = "https://flagd.dev/schema/v0/flags.json"
STATES = ("ENABLED", "DISABLED")


class FlagdFile:
    """A flagd file at ``path``, which is a symbolic link to the present version beside it.

    Args:
        path: What flagd is given; an ordinary file of that name is replaced by the link.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._versions = itertools.count(1)
        self._last = b""

    def write(self, flags: Sequence[Mapping[str, Any]]) -> bool:
        """Write OFREP entries as flagd definitions; returns False when nothing changed.

        Raises:
            InputError: The result would not be a flagd file.
            OSError: It cannot be written; the old version stays.
        """
        document = to_flagd(flags)
        validate(document)
        data = json.dumps(document, indent=2, sort_keys=True, allow_nan=False).encode()
        if data == self._last and self._path.exists():
            return False
        self._swap(data)
        self._last = data
        return True

    def _swap(self, data: bytes) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        before = self._path.readlink().name if self._path.is_symlink() else ""
        version = self._free_name()
        with version.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        link = self._path.with_name(f".{self._path.name}.link")
        link.unlink(missing_ok=True)
        link.symlink_to(version.name)
        link.replace(self._path)
        for old in self._path.parent.glob(f".{self._path.name}.v*"):
            if old.name not in {version.name, before}:  # a reader may stand between the link and the file it named
                old.unlink(missing_ok=True)

    def _free_name(self) -> Path:
        names = (self._path.with_name(f".{self._path.name}.v{number}") for number in self._versions)
        return next(name for name in names if not name.exists())


def to_flagd(flags: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a flagd document of OFREP entries."""
    return {"$schema": SCHEMA, "flags": {entry["key"]: _definition(entry) for entry in flags}}


def _definition(entry: Mapping[str, Any]) -> dict[str, Any]:
    value, metadata = entry["value"], dict(entry.get("metadata", {}))
    definition: dict[str, Any] = {"state": "ENABLED", "metadata": metadata}
    if not isinstance(value, bool):
        return {**definition, "variants": {"value": value}, "defaultVariant": "value"}
    definition["variants"] = {"on": True, "off": False}
    expires_at = metadata.get("expires_at")
    if value and expires_at:
        seconds = int(datetime.fromisoformat(expires_at).timestamp())
        rule = {"if": [{"<": [{"var": "$flagd.timestamp"}, seconds]}, "on", "off"]}
        return {**definition, "defaultVariant": "off", "targeting": rule}
    return {**definition, "defaultVariant": "on" if value else "off"}


def validate(document: Any) -> None:
    """Check what flagd's schema asks of a document: flags with a state, variants of one type, flat metadata.

    Raises:
        InputError: Names the field.
    """
    flags = document.get("flags") if isinstance(document, dict) else None
    if not isinstance(flags, dict):
        raise InputError("expected a mapping", field="flags")
    for key, flag in flags.items():
        path = f"flags.{key}"
        if not key or not isinstance(flag, dict):
            raise InputError("expected a named mapping", field=path)
        if flag.get("state") not in STATES:
            raise InputError(f"expected one of {', '.join(STATES)}", field=f"{path}.state")
        _validate_variants(flag, path)
        _validate_metadata(flag.get("metadata", {}), path)


def _validate_variants(flag: Mapping[str, Any], path: str) -> None:
    variants = flag.get("variants")
    if not isinstance(variants, dict) or not variants:
        raise InputError("expected at least one variant", field=f"{path}.variants")
    kinds = {_kind(value) for value in variants.values()}
    if len(kinds) != 1 or kinds == {""}:
        raise InputError("expected booleans, texts, numbers or objects, all of one type", field=f"{path}.variants")
    default = flag.get("defaultVariant")
    if default is not None and default not in variants:
        raise InputError(f"{default!r} is not a variant", field=f"{path}.defaultVariant")
    if not isinstance(flag.get("targeting", {}), dict):
        raise InputError("expected an object", field=f"{path}.targeting")


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "text"
    if isinstance(value, (int, float)):
        return "number"
    return "object" if isinstance(value, dict) else ""


def _validate_metadata(metadata: Any, path: str) -> None:
    if not isinstance(metadata, dict):
        raise InputError("expected a mapping", field=f"{path}.metadata")
    for name, value in metadata.items():
        if _kind(value) not in {"boolean", "text", "number"}:
            raise InputError("expected true or false, a text or a number", field=f"{path}.metadata.{name}")
