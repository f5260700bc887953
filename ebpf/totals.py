"""Sums of what probes counted since the agent started, as metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from pasta_otel import semconv
from pasta_otel.ebpf import layout
from pasta_otel.ebpf.observer import Attachment, Harvest
from pasta_otel.ebpf.probes import Api
from pasta_otel.model import HistogramPoint

PROBE_NAMES = ("cuda", "launch", "sched", "critical", "fault", "sock")
CRITICAL_KINDS = {layout.EXEC: "exec", layout.EXIT: "exit", layout.FORK: "fork", layout.OOM: "oom"}
BOUNDS_S = tuple(bound / 1e9 for bound in layout.BOUNDS_NS)
DROP_API, RETRANSMIT_API, QUEUE_API = 98, 96, 97
_NO_NAMES: Mapping[int, str] = MappingProxyType({})
_PLAIN = frozenset({"migration", "fault", "socket"})  # these have no duration
_SIZES = {"copy": semconv.CUDA_MEMORY_COPIES, "allocation": semconv.CUDA_MEMORY_ALLOCATIONS}
_CALLS = {"launch": semconv.CUDA_LAUNCH_CALLS, "graph_launch": semconv.CUDA_GRAPH_LAUNCH_CALLS}


def event_name(api: Api) -> str:
    """Return how metrics and spans call an API's events: the function, or ``off_cpu.sleeping``."""
    return f"off_cpu.{api.name}" if api.kind == "off_cpu" else api.name


@dataclass(slots=True)
class _Series:
    """One event of one service."""

    events: float = 0.0
    total_ns: float = 0.0
    size: float = 0.0
    longest_ns: int = 0
    histogram: list[float] = field(default_factory=lambda: [0.0] * layout.HISTOGRAM)


class HostTotals:
    """Cumulative sums.

    Args:
        apis: Which number means what.
        service_of: Service name of a process, or empty.
        unix_nano: Wall time.
        drop_reasons: Why packets are dropped, by the kernel's number; numbers without a name are shown as such.
    """

    def __init__(
        self,
        apis: Mapping[int, Api],
        service_of: Callable[[int], str],
        unix_nano: Callable[[], int],
        drop_reasons: Mapping[int, str] = _NO_NAMES,
    ) -> None:
        self._apis, self._service_of, self._now = apis, service_of, unix_nano
        self._drop_reasons = drop_reasons
        self._start = unix_nano()
        self.series: dict[tuple[int, str], _Series] = {}
        self.links: Counter[str] = Counter()
        self.drops: Counter[str] = Counter()
        self.processes: Counter[str] = Counter()
        self.spans: Counter[str] = Counter()

    def add(self, harvest: Harvest, launch_weight: float = 1.0) -> None:
        """Add a harvest; launches stand for ``launch_weight`` times themselves, since only a share was recorded."""
        for event in harvest.critical:
            self.processes[CRITICAL_KINDS.get(event.kind, "other")] += 1
        for item in harvest.aggregates:
            api = self._apis.get(item.api)
            if api is None:
                continue
            if item.api == DROP_API:
                self.drops[self._drop_reasons.get(item.tgid, str(item.tgid))] += item.events
                continue
            if api.kind != "socket":
                self.links[item.link] += item.events
            self._add(item, api, launch_weight if api.kind == "launch" else 1.0)

    def _add(self, item: layout.Aggregate, api: Api, weight: float) -> None:
        key = item.api, "" if api.kind == "socket" else self._service_of(item.tgid)
        series = self.series.setdefault(key, _Series())
        series.events += item.events * weight
        series.total_ns += item.sum_ns * weight
        series.size += item.size
        series.longest_ns = max(series.longest_ns, item.max_ns)
        for place, count in enumerate(item.histogram):
            if count:
                series.histogram[place] += count * weight

    # -- metrics -------------------------------------------------------------------------------------------------------

    def observe(self, meter: Meter) -> None:
        """Export the sums through a meter."""
        _counter(meter, semconv.HOST_EVENT_COUNT, lambda: self._by_event(lambda series: series.events))
        _counter(meter, semconv.HOST_EVENT_TIME, self._times)
        _counter(meter, semconv.HOST_LINKS, lambda: _labelled(self.links, "link"))
        _counter(meter, semconv.HOST_SPANS, lambda: _labelled(self.spans, "outcome"))
        _counter(meter, semconv.PROCESS_ENDS, lambda: _labelled(self.processes, "event"))
        _counter(meter, semconv.PACKETS_DROPPED, lambda: _labelled(self.drops, "reason"))
        for kind, metric in _CALLS.items():
            _counter(meter, metric, partial(self._by_service, kind, lambda series: series.events))
        for kind, metric in _SIZES.items():
            _counter(meter, metric, partial(self._by_service, kind, lambda series: series.size))

    def points(self) -> list[HistogramPoint]:
        """Return the histograms of durations, for ``pasta.host.event.duration``."""
        now = self._now()
        return [
            HistogramPoint(
                attributes=self._labels(api, service),
                bounds=BOUNDS_S,
                counts=tuple(round(count) for count in series.histogram),
                total=series.total_ns / 1e9,
                minimum=0.0,
                maximum=series.longest_ns / 1e9,
                start_time_unix_nano=self._start,
                time_unix_nano=now,
            )
            for (api, service), series in [*self.series.items()]
            if self._apis[api].kind not in _PLAIN
        ]

    def _by_event(self, value: Callable[[_Series], float]) -> Iterator[Observation]:
        for (api, service), series in [*self.series.items()]:
            yield Observation(value(series), self._labels(api, service))

    def _times(self) -> Iterator[Observation]:
        for (api, service), series in [*self.series.items()]:
            if self._apis[api].kind not in _PLAIN:
                yield Observation(series.total_ns / 1e9, self._labels(api, service))

    def _by_service(self, kind: str, value: Callable[[_Series], float]) -> Iterator[Observation]:
        sums: Counter[str] = Counter()
        for (api, service), series in [*self.series.items()]:
            if self._apis[api].kind == kind:
                sums[service] += value(series)  # type: ignore[assignment]  # a Counter of floats
        for service, total in sums.items():
            yield Observation(total, {semconv.HOST_SERVICE: service})

    def _labels(self, api: int, service: str) -> dict[str, str]:
        return {semconv.HOST_EVENT: event_name(self._apis[api]), semconv.HOST_SERVICE: service}


def observe_attachments(meter: Meter, report: Callable[[], Sequence[Attachment]]) -> None:
    """Export what is attached, and what was refused and why."""
    spec = semconv.METRICS[semconv.PROBE_ATTACHED]
    meter.create_observable_gauge(spec.name, [lambda _: map(_attached, report())], spec.unit, spec.description)


def observe_accounts(meter: Meter, counters: Callable[[], Mapping[int, layout.Counters]]) -> None:
    """Export every probe's exact account."""

    def accounts() -> list[tuple[str, layout.Counters]]:
        return [(name, counters()[number]) for number, name in enumerate(PROBE_NAMES)]

    def outcomes(names: Sequence[str], prefix: str = "") -> Iterator[Observation]:
        for probe, account in accounts():
            for name in names:
                yield Observation(getattr(account, prefix + name), {"probe": probe, "outcome": name})

    _counter(meter, semconv.PROBE_SEEN, lambda: (Observation(a.seen, {"probe": p}) for p, a in accounts()))
    _counter(meter, semconv.PROBE_EVENTS, lambda: outcomes(("filtered", "submitted", "full", "unpaired")))
    _counter(meter, semconv.PROBE_RECORDS, lambda: outcomes(("submitted", "full"), "ring_"))


def _attached(item: Attachment) -> Observation:
    labels: dict[str, str | int] = {"probe": item.probe, "target": item.target}
    if item.refusal is not None:
        labels |= {"reason": item.refusal.reason, "errno": item.refusal.errno}
    return Observation(int(item.refusal is None), labels)


def _labelled(counts: Mapping[Any, float], label: str) -> Iterator[Observation]:
    return (Observation(value, {label: str(key)}) for key, value in [*counts.items()])


def _counter(meter: Meter, name: str, source: Callable[[], Iterable[Observation]]) -> None:
    spec = semconv.METRICS[name]

    def observe(_: CallbackOptions) -> Iterable[Observation]:
        return source()

    meter.create_observable_counter(spec.name, [observe], spec.unit, spec.description)
