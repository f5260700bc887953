"""Which launches are analysed: by name, by sample, at most so many."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from pasta_otel.errors import InputError

DEFAULT_COUNT = 10_000
DEFAULT_BYTES = 64 << 20
LEAST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Selection:
    """What to analyse.

    Attributes:
        names: Shell patterns for GPU kernels' names (as the driver gives them: mangled); empty = all.
        every: Of the launches of one name, every how-many-th.
        count: Most launches in one process.
        device_bytes: Most device memory for results in one process.
        modules: Shell patterns for the torch module that launches, by its qualified name; empty = all, and none too.
    """

    names: tuple[str, ...] = ()
    every: int = 1
    count: int = DEFAULT_COUNT
    device_bytes: int = DEFAULT_BYTES
    modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            InputError: One makes no sense.
        """
        for field, value, least in (
            ("every", self.every, 1),
            ("count", self.count, 1),
            ("device-memory", self.device_bytes, LEAST_BYTES),
        ):
            if not isinstance(value, int) or value < least:
                raise InputError(f"expected at least {least}, got {value}", field=field)

    def matches(self, name: str) -> bool:
        """Tell whether GPU kernels of this name are analysed."""
        return not self.names or any(fnmatch.fnmatchcase(name, pattern) for pattern in self.names)

    def matches_module(self, module: str) -> bool:
        """Tell whether launches of this torch module are analysed."""
        return not self.modules or any(fnmatch.fnmatchcase(module, pattern) for pattern in self.modules)

    def to_json(self) -> dict[str, object]:
        """Return a JSON-compatible form."""
        fields = {"names": list(self.names), "every": self.every, "count": self.count}
        return {**fields, "device_bytes": self.device_bytes, "modules": list(self.modules)}

    @classmethod
    def from_json(cls, document: Mapping[str, object]) -> Selection:
        """Return what ``to_json`` wrote."""
        values = dict(document)
        for field in ("names", "modules"):
            values[field] = tuple(values[field])  # type: ignore[arg-type]  # written by to_json
        return cls(**values)  # type: ignore[arg-type]


class Chooser:
    """Applies a selection to launches in their order.

    Args:
        selection: Which are wanted.
    """

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._of_name: Counter[str] = Counter()
        self.chosen = 0

    @property
    def asks_for_modules(self) -> bool:
        """Return whether the torch module of a launch decides."""
        return bool(self._selection.modules)

    def refusal(self, name: str, module: str = "") -> str:
        """Return why a launch is not analysed; empty = it is chosen."""
        if not self._selection.matches(name):
            return "name"
        if not self._selection.matches_module(module):
            return "module"
        self._of_name[name] += 1
        if (self._of_name[name] - 1) % self._selection.every:
            return "sample"
        if self.chosen >= self._selection.count:
            return "count"
        self.chosen += 1
        return ""
