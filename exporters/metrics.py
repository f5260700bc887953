"""Metrics out: a meter provider whose instruments cannot grow without bound, and the OTLP metric exporter.

The Python SDK has no cardinality limit (opentelemetry-python#2700; one service leaked 3.1 GB in 15 days), so the guard
sits in front of it: an attribute set beyond the limit is recorded under ``otel.metric.overflow=true``.
Source of the limit: opentelemetry-specification, metrics/sdk.md, "Cardinality limits": 2000 in all, overflow included.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Protocol, cast

from opentelemetry import metrics
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    MetricExporter,
    MetricExportResult,
    MetricReader,
    MetricsData,
    PeriodicExportingMetricReader,
)

from pasta_otel.exporters.otlp.config import OtlpConfig
from pasta_otel.exporters.otlp.resource import ProcessIdentity, build_resource, default_identity, renew_resource
from pasta_otel.exporters.otlp.sender import Sender
from pasta_otel.model import Attributes

_logger = logging.getLogger(__name__)

# the SDK's default bounds fit milliseconds; these are http.server.request.duration's and two steps at the low end
SECONDS_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
CARDINALITY_LIMIT = 2000
OVERFLOW: dict[str, bool] = {"otel.metric.overflow": True}
EXPORT_TIMEOUT_S = 5.0

_Callback = Callable[[CallbackOptions], Iterable[Observation]] | Generator[Iterable[Observation], CallbackOptions, None]


class CardinalityGuard:
    """Admit the first ``limit - 1`` attribute sets of one instrument, and fold the rest into the overflow set.

    No lock: ``dict.setdefault`` is atomic, and a race at the limit admits at most one set per thread more.
    """

    def __init__(self, limit: int = CARDINALITY_LIMIT) -> None:
        self._room = limit - 1
        self._known: dict[Any, None] = {}

    def admit(self, attributes: Any) -> Any:
        """Return the attributes to record: the same, or the overflow set."""
        if not attributes:
            return attributes
        key = _key(attributes)
        if key in self._known:
            return attributes
        if len(self._known) >= self._room:
            return OVERFLOW
        self._known[key] = None
        return attributes


def _key(attributes: Any) -> Any:
    try:
        key = frozenset(attributes.items())
        hash(key)
    except TypeError:  # a list among the values
        return frozenset((name, repr(value)) for name, value in attributes.items())
    return key


class _Recording(Protocol):
    """A synchronous SDK instrument; only one of the methods exists on each."""

    add: Callable[..., None]
    record: Callable[..., None]
    set: Callable[..., None]


class _Guarded:
    """What the four synchronous instruments share."""

    def __init__(self, inner: Any, limit: int) -> None:  # the API's own only checks names, which the SDK has done
        self._inner: _Recording = inner
        self._admit = CardinalityGuard(limit).admit


class _Counter(_Guarded, metrics.Counter):
    def add(self, amount: float, attributes: Any = None, context: Context | None = None) -> None:
        self._inner.add(amount, self._admit(attributes), context)


class _UpDownCounter(_Guarded, metrics.UpDownCounter):
    def add(self, amount: float, attributes: Any = None, context: Context | None = None) -> None:
        self._inner.add(amount, self._admit(attributes), context)


class _Histogram(_Guarded, metrics.Histogram):
    def record(self, amount: float, attributes: Any = None, context: Context | None = None) -> None:
        self._inner.record(amount, self._admit(attributes), context)


class _Gauge(_Guarded, metrics._Gauge):  # noqa: SLF001  the API exports the class under this name only
    def set(self, amount: float, attributes: Any = None, context: Context | None = None) -> None:
        self._inner.set(amount, self._admit(attributes), context)


class GuardedMeter(metrics.Meter):
    """A meter of the SDK with a guard on every instrument."""

    def __init__(self, inner: metrics.Meter, limit: int) -> None:
        super().__init__(inner.name, inner.version, inner.schema_url)
        self._inner, self._limit = inner, limit
        self._made: dict[tuple[str, str, str, str], Any] = {}
        self._observed: dict[tuple[str, str, str, str], tuple[Any, _Callbacks]] = {}
        self._lock = threading.Lock()

    def create_counter(self, name: str, unit: str = "", description: str = "") -> metrics.Counter:
        """Return a guarded counter."""
        return cast("metrics.Counter", self._wrap(_Counter, self._inner.create_counter, name, unit, description))

    def create_up_down_counter(self, name: str, unit: str = "", description: str = "") -> metrics.UpDownCounter:
        """Return a guarded up-down counter."""
        made = self._wrap(_UpDownCounter, self._inner.create_up_down_counter, name, unit, description)
        return cast("metrics.UpDownCounter", made)

    def create_histogram(
        self,
        name: str,
        unit: str = "",
        description: str = "",
        *,
        explicit_bucket_boundaries_advisory: Sequence[float] | None = None,
    ) -> metrics.Histogram:
        """Return a guarded histogram; one in seconds has bounds for seconds unless it brings its own."""
        bounds = explicit_bucket_boundaries_advisory or (SECONDS_BOUNDS if unit == "s" else None)

        def create(name: str, unit: str, description: str) -> metrics.Histogram:
            return self._inner.create_histogram(name, unit, description, explicit_bucket_boundaries_advisory=bounds)

        return cast("metrics.Histogram", self._wrap(_Histogram, create, name, unit, description))

    def create_gauge(self, name: str, unit: str = "", description: str = "") -> metrics._Gauge:
        """Return a guarded gauge."""
        made: metrics._Gauge = self._wrap(_Gauge, self._inner.create_gauge, name, unit, description)
        return made

    def create_observable_counter(
        self, name: str, callbacks: Sequence[_Callback] | None = None, unit: str = "", description: str = ""
    ) -> metrics.ObservableCounter:
        """Return an observable counter whose surplus observations are summed."""
        create = self._inner.create_observable_counter
        return cast("metrics.ObservableCounter", self._observe(create, name, callbacks, unit, description))

    def create_observable_up_down_counter(
        self, name: str, callbacks: Sequence[_Callback] | None = None, unit: str = "", description: str = ""
    ) -> metrics.ObservableUpDownCounter:
        """Return an observable up-down counter whose surplus observations are summed."""
        create = self._inner.create_observable_up_down_counter
        return cast("metrics.ObservableUpDownCounter", self._observe(create, name, callbacks, unit, description))

    def create_observable_gauge(
        self, name: str, callbacks: Sequence[_Callback] | None = None, unit: str = "", description: str = ""
    ) -> metrics.ObservableGauge:
        """Return an observable gauge; of surplus observations the last one counts."""
        create = self._inner.create_observable_gauge
        made = self._observe(create, name, callbacks, unit, description, additive=False)
        return cast("metrics.ObservableGauge", made)

    def _observe(  # noqa: PLR0913, PLR0917 - an instrument's own parts
        self,
        create: Callable[..., Any],
        name: str,
        callbacks: Sequence[_Callback] | None,
        unit: str,
        description: str,
        additive: bool = True,
    ) -> Any:
        """Make an instrument once: the SDK forgets the callbacks of a second one of the same name."""
        key = (create.__name__, name.lower(), unit, description)
        with self._lock:
            if key not in self._observed:
                every = _Callbacks(self._limit, additive=additive)
                self._observed[key] = create(name, [every], unit, description), every
            made, every = self._observed[key]
        for callback in callbacks or ():
            every.add(callback)
        return made

    def _wrap(self, kind: Any, create: Callable[[str, str, str], Any], name: str, unit: str, description: str) -> Any:
        """Make an instrument once: two guards on one instrument would admit twice the limit."""
        key = (kind.__name__, name.lower(), unit, description)
        with self._lock:
            if key not in self._made:
                self._made[key] = kind(create(name, unit, description), self._limit)
            return self._made[key]


class _Callbacks:
    """All that observes one instrument: one limit for all, and one that fails costs only itself.

    Args:
        limit: Most attribute sets, the overflow set included.
        additive: Values of one attribute set are summed, as those of the surplus are; else the last one counts.
    """

    def __init__(self, limit: int, *, additive: bool) -> None:
        self._admit, self._additive = CardinalityGuard(limit).admit, additive
        self._sources: list[Callable[[CallbackOptions], Iterable[Observation]]] = []

    def add(self, callback: _Callback) -> None:
        """Ask one more at every collection."""
        if callable(callback):
            self._sources.append(callback)
        else:
            next(callback)  # a generator waits for its first options
            self._sources.append(callback.send)

    def __call__(self, options: CallbackOptions) -> Iterable[Observation]:
        """Return one observation an attribute set."""
        found: dict[Any, Observation] = {}
        for source in list(self._sources):
            try:
                self._collect(source(options), found)
            except Exception:
                _logger.exception("a callback of an instrument failed")
        return found.values()

    def _collect(self, observations: Iterable[Observation], found: dict[Any, Observation]) -> None:
        for item in observations:
            attributes = self._admit(item.attributes)
            key = _key(attributes or {})
            before = found.get(key)
            if self._additive and before is not None:
                found[key] = Observation(before.value + item.value, before.attributes, before.context)
            elif attributes is OVERFLOW:
                found[key] = Observation(item.value, dict(OVERFLOW))
            else:
                found[key] = item


class GuardedMeterProvider(metrics.MeterProvider):
    """The SDK's meter provider with a cardinality limit on every instrument."""

    def __init__(self, inner: MeterProvider, limit: int = CARDINALITY_LIMIT) -> None:
        self._inner, self._limit = inner, limit
        self._meters: dict[tuple[Any, ...], GuardedMeter] = {}
        self._lock = threading.Lock()

    def get_meter(
        self, name: str, version: str | None = None, schema_url: str | None = None, attributes: Any = None
    ) -> GuardedMeter:
        """Return the meter of a scope."""
        key = (name, version, schema_url, _key(attributes or {}))
        with self._lock:
            if key not in self._meters:
                inner = self._inner.get_meter(name, version, schema_url, attributes)
                self._meters[key] = GuardedMeter(inner, self._limit)
            return self._meters[key]

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        """Export what was recorded."""
        return self._inner.force_flush(timeout_millis)

    def shutdown(self, timeout_millis: float = 5_000) -> None:
        """Export what was recorded and stop, within the time."""
        self._inner.shutdown(timeout_millis)


class PastaMetricExporter(MetricExporter):
    """Export metrics by OTLP: one sender with the spans' rules, and a resource that stays true after fork."""

    def __init__(
        self, config: OtlpConfig, *, identity: ProcessIdentity | None = None, sender: Sender | None = None
    ) -> None:
        super().__init__()
        self._identity, self._sender = identity, sender or Sender(config, signal="metrics")

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **_: Any) -> MetricExportResult:  # noqa: ARG002  the SDK's signature
        """Send one collection; called on the reader's thread."""
        request = encode_metrics(metrics_data)
        points = 0
        for group in request.resource_metrics:
            points += sum(_points(metric) for scope in group.scope_metrics for metric in scope.metrics)
            if self._identity is not None:
                renew_resource(group.resource, self._identity)
        outcome = self._sender.send(request.SerializeToString(), points)
        failed = outcome.dropped and outcome.reason != "rejected"
        return MetricExportResult.FAILURE if failed else MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis: float = 10_000) -> bool:  # noqa: ARG002  the SDK's signature
        """Nothing waits here."""
        return True

    def shutdown(self, timeout_millis: float = 30_000, **_: Any) -> None:  # noqa: ARG002  the SDK's signature
        """Release the connection."""
        self._sender.abort()
        self._sender.close()


def _points(metric: Any) -> int:
    data = getattr(metric, metric.WhichOneof("data") or "", None)
    return len(data.data_points) if data is not None else 0


def build_meter_provider(  # noqa: PLR0913  keyword-only: everything it touches is a parameter
    *,
    config: OtlpConfig | None = None,
    readers: Sequence[MetricReader] = (),
    attributes: Attributes | None = None,
    identity: ProcessIdentity | None = None,
    limit: int = CARDINALITY_LIMIT,
    interval_s: float | None = None,
) -> GuardedMeterProvider:
    """Return a meter provider with a cardinality limit; nothing global is set.

    Args:
        config: OTLP destination, sent to periodically; None = no push.
        readers: Further readers, e.g. a PrometheusReader.
        attributes: Resource attributes that the caller knows.
        identity: Shared with the process's tracer provider and RowExporter.
        limit: Most attribute sets of one instrument, the overflow set included.
        interval_s: Time between pushes; ``OTEL_METRIC_EXPORT_INTERVAL`` if not given.
    """
    identity = identity or default_identity()
    every = list(readers)
    if config is not None:
        exporter = PastaMetricExporter(config, identity=identity)
        interval = None if interval_s is None else interval_s * 1000
        every.append(PeriodicExportingMetricReader(exporter, export_interval_millis=interval))
    inner = MeterProvider(every, resource=build_resource(identity, attributes), shutdown_on_exit=False)
    return GuardedMeterProvider(inner, limit)
