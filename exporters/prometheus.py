"""Metrics for Prometheus: text 0.0.4, and OpenMetrics 1.0 with exemplars.

The SDK's own Prometheus exporter drops exemplars, and client_python's multiprocess mode has none either. Here the page
is written from the collected points, and what the formats cannot say is counted on it.
"""

from __future__ import annotations

import gzip
import logging
import math
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    ExponentialHistogram,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricReader,
    MetricsData,
    NumberDataPoint,
    Sum,
)

from pasta_otel import semconv
from pasta_otel.exporters.otlp.text import clean_utf8
from pasta_otel.exporters.prometheus_names import labels, metric_name, unit_word

_logger = logging.getLogger(__name__)

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
EXEMPLAR_LIMIT = 128  # OpenMetrics 1.0: most characters of an exemplar's label set
GZIP_LEVEL = 5


class _Sample(NamedTuple):
    """One line of the page."""

    suffix: str
    labels: Mapping[str, str]
    value: float
    exemplar: Any = None


class _Family:
    """Samples under one name, with one type and help text."""

    def __init__(self, name: str, kind: str, help_text: str, unit: str) -> None:
        self.name, self.kind, self.help, self.unit = name, kind, help_text, unit
        self.samples: list[_Sample] = []


class PrometheusReader(MetricReader):
    """A metric reader that renders a page when it is asked for one."""

    def __init__(self) -> None:
        super().__init__()  # cumulative, which is what Prometheus counts in
        self._lock = threading.Lock()
        self._data: MetricsData | None = None
        self._skipped: Counter[str] = Counter()

    def render(self, accept: str = "") -> tuple[str, bytes]:
        """Collect now and return the content type and the page.

        Args:
            accept: The request's ``Accept`` header; OpenMetrics is written for who prefers it, else text 0.0.4.
        """
        open_metrics = prefers_openmetrics(accept)
        with self._lock:
            self._data = None
            self.collect()
            page = _page(self._data, self._skipped, open_metrics=open_metrics)
        return (OPENMETRICS if open_metrics else TEXT), page.encode("utf-8")

    def _receive_metrics(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **_: Any) -> None:  # noqa: ARG002  the SDK's signature
        self._data = metrics_data

    def shutdown(self, timeout_millis: float = 30_000, **_: Any) -> None:
        """Nothing is held."""


def prefers_openmetrics(accept: str) -> bool:
    """Return whether an ``Accept`` header ranks OpenMetrics at least as high as plain text (RFC 9110, 12.5.1)."""
    best = {"application/openmetrics-text": 0.0, "text/plain": 0.0}
    for entry in accept.lower().split(","):
        kind, *parameters = (part.strip() for part in entry.split(";"))
        if kind in best and (
            "version=1.0.0" in parameters or not any("version" in p for p in parameters) or kind == "text/plain"
        ):
            best[kind] = max(best[kind], _quality(parameters))
    return best["application/openmetrics-text"] > 0 and best["application/openmetrics-text"] >= best["text/plain"]


def _quality(parameters: Iterable[str]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0


# ---- from collected points to families


def _page(data: MetricsData | None, skipped: Counter[str], *, open_metrics: bool) -> str:
    families: dict[str, _Family] = {}
    for group in data.resource_metrics if data is not None else ():
        _add_target(families, group.resource.attributes)
        for scope in group.scope_metrics:
            scope_labels = _scope_labels(scope.scope)
            for metric in scope.metrics:
                _add_metric(families, metric, scope_labels, skipped)
    _add_skipped(families, skipped)
    lines = [line for family in families.values() for line in _lines(family, open_metrics=open_metrics)]
    if open_metrics:
        lines.append("# EOF")
    return "\n".join(lines) + "\n"


def _add_target(families: dict[str, _Family], attributes: Mapping[str, Any]) -> None:
    family = families.setdefault("target_info", _Family("target_info", "info", "Resource of this process.", ""))
    family.samples.append(_Sample("", labels(attributes), 1))


def _scope_labels(scope: Any) -> dict[str, str]:
    found = {
        "otel_scope_name": scope.name,
        "otel_scope_version": scope.version,
        "otel_scope_schema_url": scope.schema_url,
    }
    own = {f"otel_scope_{key}": value for key, value in (scope.attributes or {}).items()}
    return {**labels(own), **{key: value for key, value in found.items() if value}}


def _add_skipped(families: dict[str, _Family], skipped: Counter[str]) -> None:
    spec = semconv.METRICS[semconv.PROMETHEUS_SKIPPED]
    name = metric_name(spec.name, spec.unit, counter=True, gauge=False)
    family = _Family(name, "counter", spec.description, "")
    family.samples = [_Sample("", {"reason": reason}, count) for reason, count in sorted(skipped.items())]
    if family.samples:
        families[name] = family


def _add_metric(families: dict[str, _Family], metric: Metric, scope: Mapping[str, str], skipped: Counter[str]) -> None:
    described = _describe(metric)
    if isinstance(described, str):
        skipped[described] += len(metric.data.data_points)
        return
    name, kind = described
    unit = unit_word(metric.unit or "")
    family = families.setdefault(name, _Family(name, kind, metric.description or "", unit))
    if family.kind != kind:
        skipped["type_conflict"] += len(metric.data.data_points)
        return
    for point in metric.data.data_points:
        own = {**labels(point.attributes or {}), **scope}
        family.samples.extend(_samples(point, own, kind, skipped))


def _describe(metric: Metric) -> tuple[str, str] | str:
    """Return the family's name and type, or why the metric cannot be written."""
    data, unit = metric.data, metric.unit or ""
    if isinstance(data, ExponentialHistogram):
        return "exponential_histogram"  # the text formats have none; it leaves by OTLP
    if isinstance(data, (Sum, Histogram)) and data.aggregation_temporality is not AggregationTemporality.CUMULATIVE:
        return "delta"
    if isinstance(data, Histogram):
        return metric_name(metric.name, unit, counter=False, gauge=False), "histogram"
    counter = isinstance(data, Sum) and data.is_monotonic
    name = metric_name(metric.name, unit, counter=counter, gauge=isinstance(data, Gauge))
    return name, "counter" if counter else "gauge"


def _samples(point: Any, own: Mapping[str, str], kind: str, skipped: Counter[str]) -> Iterator[_Sample]:
    if isinstance(point, HistogramDataPoint):
        yield from _histogram(point, own, skipped)
    elif isinstance(point, NumberDataPoint):
        newest = max(point.exemplars, key=lambda item: item.time_unix_nano, default=None) if kind == "counter" else None
        yield _Sample("", own, point.value, newest)


def _histogram(point: HistogramDataPoint, own: Mapping[str, str], skipped: Counter[str]) -> Iterator[_Sample]:
    """Yield cumulative buckets; ``+Inf`` is written always and equals ``_count`` (their sum, by definition)."""
    counts = list(point.bucket_counts) or [point.count]
    if len(counts) != len(point.explicit_bounds) + 1 or sum(counts) != point.count:
        skipped["invalid_histogram"] += 1
        return
    bounds = [*point.explicit_bounds, math.inf]
    exemplars = _by_bucket(point, bounds)
    running = 0
    for place, (bound, count) in enumerate(zip(bounds, counts, strict=True)):
        running += count
        yield _Sample("_bucket", {**own, "le": number(bound)}, running, exemplars.get(place))
    yield _Sample("_sum", own, point.sum)
    yield _Sample("_count", own, point.count)


def _by_bucket(point: HistogramDataPoint, bounds: Sequence[float]) -> dict[int, Any]:
    """Return the newest exemplar of each bucket (a bucket holds values <= its bound)."""
    found: dict[int, Any] = {}
    for item in sorted(point.exemplars, key=lambda each: each.time_unix_nano):
        place = next((index for index, bound in enumerate(bounds) if item.value <= bound), None)
        if place is not None:
            found[place] = item
    return found


# ---- from families to text


def _lines(family: _Family, *, open_metrics: bool) -> Iterator[str]:
    name, kind = family.name, family.kind
    if open_metrics:
        base = (
            name.removesuffix("_total") if kind == "counter" else name.removesuffix("_info") if kind == "info" else name
        )
        yield f"# TYPE {base} {kind}"
        if family.unit and base.endswith(f"_{family.unit}"):
            yield f"# UNIT {base} {family.unit}"
    else:
        base = name
        yield f"# TYPE {base} {'gauge' if kind == 'info' else kind}"
    text = family.help or f"{base} (no description)."
    yield f"# HELP {base} {_escape(text, quotes=open_metrics)}"
    for sample in family.samples:
        line = f"{name}{sample.suffix}{_label_text(sample.labels)} {number(sample.value, openmetrics_le=False)}"
        yield line + (_exemplar(sample.exemplar) if open_metrics and sample.exemplar is not None else "")


def number(value: float, *, openmetrics_le: bool = True) -> str:
    """Return a number as both formats take it; bounds always as floats (``1.0``), or two targets' buckets differ."""
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if math.isnan(value):
        return "NaN"
    return repr(float(value)) if openmetrics_le or isinstance(value, float) else str(value)


def _label_text(values: Mapping[str, str]) -> str:
    if not values:
        return ""
    return "{" + ",".join(f'{key}="{_escape(value, quotes=True)}"' for key, value in values.items()) + "}"


def _escape(text: str, *, quotes: bool) -> str:
    escaped = clean_utf8(text).replace("\\", r"\\").replace("\n", r"\n")
    return escaped.replace('"', r"\"") if quotes else escaped


def _exemplar(item: Any) -> str:
    """Return an OpenMetrics exemplar: trace and span first, further attributes as far as 128 characters allow."""
    found: dict[str, str] = {}
    if item.trace_id:
        found["trace_id"] = f"{item.trace_id:032x}"
    if item.span_id:
        found["span_id"] = f"{item.span_id:016x}"
    used = sum(len(key) + len(value) for key, value in found.items())
    for key, value in labels(item.filtered_attributes or {}).items():
        used += len(key) + len(value)
        if used > EXEMPLAR_LIMIT:
            break
        found.setdefault(key, value)
    stamp = f"{item.time_unix_nano // 10**9}.{item.time_unix_nano % 10**9 // 10**6:03d}"
    return f" # {_label_text(found) or '{}'} {number(item.value, openmetrics_le=False)} {stamp}"


# ---- serving


Render = Callable[[str], tuple[str, bytes]]
_Message = dict[str, Any]


def respond(render: Render, accept: str, accept_encoding: str) -> tuple[list[tuple[str, str]], bytes]:
    """Return headers and body of an answer to ``GET /metrics``."""
    content_type, body = render(accept)
    headers = [("Content-Type", content_type), ("Vary", "Accept, Accept-Encoding")]
    if any(part.split(";")[0].strip() == "gzip" and "q=0" not in part for part in accept_encoding.lower().split(",")):
        body = gzip.compress(body, GZIP_LEVEL)
        headers.append(("Content-Encoding", "gzip"))
    return [*headers, ("Content-Length", str(len(body)))], body


def asgi_app(render: Render) -> Callable[..., Awaitable[None]]:
    """Return an ASGI application that answers ``GET`` on any path it is mounted at with the page."""

    async def app(scope: _Message, receive: Callable[[], Awaitable[_Message]], send: Any) -> None:  # noqa: ARG001  ASGI's signature
        if scope["type"] != "http":
            return
        given = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
        if scope["method"] not in {"GET", "HEAD"}:
            status, headers, body = 405, [("Allow", "GET, HEAD")], b""
        else:
            status = 200
            headers, body = respond(render, given.get("accept", ""), given.get("accept-encoding", ""))
        encoded = [(key.lower().encode(), value.encode()) for key, value in headers]
        await send({"type": "http.response.start", "status": status, "headers": encoded})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    return app


class MetricsServer:
    """``/metrics`` on a thread of its own, for an app process without a web server to mount it in.

    Args:
        render: ``PrometheusReader.render``.
        host: Address to bind; loopback unless told otherwise.
        port: Port to bind; 0 = any free one, see ``port``.
    """

    def __init__(self, render: Render, host: str = "127.0.0.1", port: int = 0) -> None:
        self._server = ThreadingHTTPServer((host, port), _handler(render))
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="pasta-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(render: Render) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            if self.path.split("?")[0] != "/metrics":
                self.send_error(404)
                return
            accept, encoding = self.headers.get("Accept", ""), self.headers.get("Accept-Encoding", "")
            headers, body = respond(render, accept, encoding)
            self.send_response(200)
            for key, value in headers:
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class's name
            _logger.debug(format, *args)

    return Handler
