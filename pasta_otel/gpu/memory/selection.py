"""Which launches are analysed: by name, by sample, at most so many."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pasta_otel.errors import InputError
from pasta_otel.gpu.classes import report_name, spellings
from pasta_otel.gpu.memory.words import clip

DEFAULT_COUNT = 10_000
MOST_REFUSED = 20
"""Names of GPU kernels that no pattern fits, kept to say what there is to choose from."""
DEFAULT_BYTES = 64 << 20
LEAST_BYTES, MOST_BYTES = 1 << 20, 1 << 40
"""1 TiB is more than a GPU has."""
_MOST_CANDIDATES, _NAME = 8, 60
_NOT_LITERAL = re.compile(r"\[!?\]?[^\]]*\]|[*?]")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_SPELLED_OUT = """
anonymous namespace unsigned signed double float short const volatile restrict operator lambda unnamed type string
allocator basic_string char_traits basic_istream basic_ostream basic_iostream nullptr_t decltype sizeof alignof auto
new delete void bool char char8_t char16_t char32_t wchar_t int long true false half std complex imaginary __int128
__float128 vector noexcept throw typename template requires enum struct union class block_capture clone
"""
"""What a demangler writes where the mangled name has a code, not the word."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What to analyse.

    Attributes:
        names: Shell patterns for GPU kernels' names, as the driver gives them (mangled) or readable; empty = all.
        every: Of the launches of one name, every how-many-th.
        count: Most launches in one process.
        device_bytes: Most device memory for results in one process on one GPU.
        modules: Shell patterns for the torch module that launches, by its qualified name; empty = all, and none too.
    """

    names: tuple[str, ...] = ()
    every: int = 1
    count: int = DEFAULT_COUNT
    device_bytes: int = DEFAULT_BYTES
    modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check numbers and patterns.

        Raises:
            InputError: One makes no sense.
        """
        for field, patterns in (("kernel", self.names), ("module", self.modules)):
            if "" in patterns:
                raise InputError("expected a shell pattern, got an empty one, which fits nothing", field=field)
        for field, value, least, words in (
            ("every", self.every, 1, "1"),
            ("count", self.count, 1, "1"),
            ("device_bytes", self.device_bytes, LEAST_BYTES, f"1 MiB ({LEAST_BYTES:,} bytes)"),
        ):
            if not isinstance(value, int) or isinstance(value, bool):
                raise InputError(f"expected a whole number, got {value!r}", field=field)
            if value < least:
                raise InputError(f"expected at least {words}, got {value:,}", field=field)
        if self.device_bytes > MOST_BYTES:
            raise InputError(f"expected at most 1 TiB ({MOST_BYTES:,} bytes), got {value:,}", field="device_bytes")

    def matches(self, name: str) -> bool:
        """Tell whether GPU kernels of this name are analysed."""
        return not self.names or any(
            fnmatch.fnmatchcase(form, pattern) for pattern in self.names for form in spellings(name)
        )

    @property
    def texts(self) -> tuple[str, ...]:
        """Return text of which every chosen GPU kernel's mangled name has some; none = such names may have any text."""
        found = tuple(map(_literal, self.names))
        return found if all(found) else ()

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


def candidates(refused: Iterable[str]) -> str:
    """Return what there is to choose from, of GPU kernels that no pattern fits; empty = none is known."""
    names = sorted({clip(report_name(name), _NAME) for name in refused})
    more = ", ..." if len(names) > _MOST_CANDIDATES else ""
    return f"there were {', '.join(names[:_MOST_CANDIDATES])}{more}" if names else ""


def _literal(pattern: str) -> str:
    """Return an identifier, or a part of one, that stands in every mangled name that a pattern fits; empty = none."""
    parts = (word for part in _NOT_LITERAL.split(pattern) for word in _IDENTIFIER.findall(part))
    literal = (word for word in parts if word not in _SPELLED_OUT)  # nor a part of one
    return max(literal, key=len, default="")


class Chooser:
    """Applies a selection to launches in their order.

    Args:
        selection: Which are wanted.

    Attributes:
        chosen: How many were.
        of_name: Launches by name, of those that patterns fit.
        refused: Some names that no pattern fits.
    """

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self.of_name: Counter[str] = Counter()
        self.refused: dict[str, None] = {}
        self.chosen = 0

    @property
    def asks_for_modules(self) -> bool:
        """Return whether the torch module of a launch decides."""
        return bool(self._selection.modules)

    def refusal(self, name: str, module: str = "") -> str:
        """Return why a launch is not analysed; empty = it is chosen."""
        if not self._selection.matches(name):
            if len(self.refused) < MOST_REFUSED:
                self.refused[name] = None
            return "name"
        if not self._selection.matches_module(module):
            return "module"
        self.of_name[name] += 1
        if (self.of_name[name] - 1) % self._selection.every:
            return "sample"
        if self.chosen >= self._selection.count:
            return "count"
        self.chosen += 1
        return ""
