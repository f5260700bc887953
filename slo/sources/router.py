"""Several sources as one: every request goes to the source that knows its kind of indicator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pasta_otel.model import CountRequest, EventCounts
from pasta_otel.slo.ports import SLISource
from pasta_otel.urls import shown


class RoutedSource:
    """Answer from several sources.

    Args:
        sources: Source by type of indicator, e.g. ``{SpanSLI: ..., PrometheusSLI: ...}``.
        missing: What to say of a type that has none, in the user's words.
    """

    def __init__(self, sources: Mapping[type, SLISource], missing: Mapping[type, str] | None = None) -> None:
        self._sources, self._missing = dict(sources), dict(missing or {})

    def counts(self, requests: Sequence[CountRequest], now_unix_nano: int) -> Sequence[EventCounts]:
        """Return one EventCounts a request, in order; one call a source, and a source that fails fails alone."""
        answers = [
            EventCounts(0.0, 0.0, no_data="absent", detail=self._missing.get(type(request.sli), "nothing counts it"))
            for request in requests
        ]
        for kind, source in self._sources.items():
            mine = [number for number, request in enumerate(requests) if isinstance(request.sli, kind)]
            if not mine:
                continue
            try:
                found = list(source.counts([requests[number] for number in mine], now_unix_nano))
            except Exception as error:  # noqa: BLE001  # one source's failure is no data for its own SLOs only
                found = [EventCounts(0.0, 0.0, no_data="absent", detail=f"{type(error).__name__}: {error}")] * len(mine)
            for number, counts in zip(mine, found, strict=False):
                answers[number] = counts
        return answers


class ConnectedSource:
    """Several servers of one kind: every request goes to the one that its indicator names.

    Args:
        sources: Source by URL.
        url_of: Return the URL of an indicator.
    """

    def __init__(self, sources: Mapping[str, SLISource], url_of: Callable[[Any], str]) -> None:
        self._sources, self._url_of = dict(sources), url_of

    def counts(self, requests: Sequence[CountRequest], now_unix_nano: int) -> Sequence[EventCounts]:
        """Return one EventCounts a request, in order; one call a server."""
        urls = [self._url_of(request.sli) for request in requests]
        answers = [EventCounts(0.0, 0.0, no_data="absent", detail=f"no server {shown(url)}") for url in urls]
        for url, source in self._sources.items():
            mine = [number for number, wanted in enumerate(urls) if wanted == url]
            found = source.counts([requests[number] for number in mine], now_unix_nano) if mine else ()
            for number, counts in zip(mine, found, strict=True):
                answers[number] = counts
        return answers
