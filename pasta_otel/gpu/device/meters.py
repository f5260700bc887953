"""Device state as metrics: one observable instrument for each name, all of one scrape from one reading."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from pasta_otel import semconv
from pasta_otel.gpu.device.model import HW_STATES, DeviceReading, Snapshot


class Sampler(Protocol):
    """Who has the newest state."""

    def sample(self) -> Snapshot:
        """Return it; never waits long, never raises."""


class _Point(NamedTuple):
    metric: str
    value: float
    labels: dict[str, Any]


class DeviceMeters:
    """Register the device metrics with a meter; they are read when the meter's reader collects.

    What a source does not say is no point at all, so its series goes stale.

    Args:
        meter: Where the instruments are made.
        samplers: What they observe.
    """

    def __init__(self, meter: Meter, *samplers: Sampler) -> None:
        self._watched = [_Watched(sampler) for sampler in samplers]
        for metric in semconv.DEVICE_METRICS:
            _register(meter, metric, self._observer(metric))

    def _observer(self, metric: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(options: CallbackOptions) -> list[Observation]:
            del options
            return [Observation(p.value, p.labels) for p in self._points() if p.metric == metric]

        return observe

    def _points(self) -> Iterator[_Point]:
        for watched in self._watched:
            yield from watched.points()


class _Watched:
    """One sampler, and what its sources dropped so far."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._blank = self._errors = 0
        self._seen: Snapshot | None = None
        self._lock = threading.Lock()  # a page and an exporter may read at the same time

    def points(self) -> Iterator[_Point]:
        snapshot = self._sampler.sample()
        with self._lock:
            if snapshot is not self._seen:  # the same snapshot answers every instrument of a scrape
                self._seen = snapshot
                self._blank += snapshot.blank_values
                self._errors += snapshot.parse_errors
        yield from points(snapshot)
        source = {semconv.SOURCE: snapshot.source}
        yield _Point(semconv.GPU_BLANK_VALUES, self._blank, source)
        yield _Point(semconv.GPU_PARSE_ERRORS, self._errors, source)


def points(snapshot: Snapshot) -> Iterator[_Point]:
    """Yield what one snapshot says."""
    source = {semconv.SOURCE: snapshot.source}
    reason = {semconv.REASON: snapshot.down} if snapshot.down else {}
    yield _Point(semconv.GPU_COLLECTOR_UP, int(not snapshot.down), source | reason)
    if not snapshot.down:
        yield _Point(semconv.GPU_COLLECTOR_DURATION, snapshot.duration_ns / 1e9, source)
    for device in snapshot.devices:
        yield from _device_points(device)


def _device_points(read: DeviceReading) -> Iterator[_Point]:
    labels = read.device.labels()
    reason = {semconv.REASON: read.down} if read.down else {}
    yield _Point(semconv.GPU_DEVICE_UP, int(not read.down), labels | reason)
    if not read.down:
        yield _Point(semconv.GPU_DEVICE_INFO, 1, labels | dict(read.device.info))
    for state in HW_STATES if read.state is not None else ():
        yield _Point(semconv.HW_STATUS, int(state == read.state), labels | {semconv.HW_STATE: state})
    for reading in read.readings:
        yield _Point(reading.metric, reading.value, labels | dict(reading.labels))


def _register(meter: Meter, metric: str, observe: Callable[[CallbackOptions], Iterable[Observation]]) -> None:
    spec = semconv.METRICS[metric]
    make = {
        "counter": meter.create_observable_counter,
        "updowncounter": meter.create_observable_up_down_counter,
        "gauge": meter.create_observable_gauge,
    }[spec.instrument]
    make(spec.name, callbacks=[observe], unit=spec.unit, description=spec.description)
