"""The account of one sink: ``received = ok + dropped by reason + pending``, exactly, at every moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from pasta_otel import semconv


class SinkCounts(NamedTuple):
    """Spans that were offered to a sink, and what became of them."""

    received: int
    ok: int
    dropped: Mapping[str, int]
    pending: int


def observe(meter: Meter, sink: str, counts: Callable[[], SinkCounts]) -> None:
    """Export a sink's account as ``pasta.sink.spans.*``.

    Args:
        meter: Where to record.
        sink: The ``sink`` attribute.
        counts: Asked at every collection.
    """

    def ok(_: CallbackOptions) -> Iterable[Observation]:
        return [Observation(counts().ok, {"sink": sink})]

    def dropped(_: CallbackOptions) -> Iterable[Observation]:
        return [Observation(value, {"sink": sink, "reason": key}) for key, value in counts().dropped.items()]

    def pending(_: CallbackOptions) -> Iterable[Observation]:
        return [Observation(counts().pending, {"sink": sink})]

    for name, create, callback in (
        (semconv.SINK_OK, meter.create_observable_counter, ok),
        (semconv.SINK_DROPPED, meter.create_observable_counter, dropped),
        (semconv.SINK_PENDING, meter.create_observable_up_down_counter, pending),
    ):
        spec = semconv.METRICS[name]
        create(name, callbacks=[callback], unit=spec.unit, description=spec.description)
