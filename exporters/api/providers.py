"""What the HTTP API asks of the process it speaks for: plain dictionaries in and out, JSON-ready."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

Document = Mapping[str, Any]


class FlagProvider(Protocol):
    """Flags as OFREP entries: ``{key, value, reason, variant, metadata}``; answered from memory."""

    def evaluate(self, key: str) -> Document | None:
        """Return one flag, or None when there is no such flag."""

    def evaluate_all(self) -> Sequence[Document]:
        """Return every flag, in a stable order."""

    def pin(self, key: str, value: Any, by: str, reason: str) -> Document:
        """Fix a flag by a person's hand; raises InputError (kind ``not_found``, ``conflict`` or other)."""

    def unpin(self, key: str, by: str) -> Document:
        """Give a flag back to the controller; raises InputError as ``pin`` does."""


class MetricsRenderer(Protocol):
    """Render the process's metrics."""

    def __call__(self, accept: str) -> tuple[str, bytes]:
        """Return (content type, body) for an Accept header."""


Documents = Callable[[], Sequence[Document]]
RecentDocuments = Callable[[int], Sequence[Document]]
OneDocument = Callable[[], Document]
ById = Callable[[str], Document | None]
Question = Callable[[Document], Document]
Health = Callable[[], tuple[bool, Document]]
