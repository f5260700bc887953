"""SLIs from a Prometheus-compatible server (Prometheus, Thanos, Mimir, VictoriaMetrics) over its HTTP API.

Good and total of one SLI are asked in one request at one time, many SLIs to a request. Whatever a server does wrong
becomes ``no_data`` with a reason, never a verdict.
"""

from __future__ import annotations

import logging
import math
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

import httpx

from pasta_otel.errors import InputError
from pasta_otel.model import CountRequest, EventCounts, NoDataReason
from pasta_otel.slo.sources.buckets import bounds_query, read_bounds, resolve
from pasta_otel.slo.sources.prometheus_answers import (
    Answer,
    RefusedError,
    Value,
    read_answer,
    read_document,
    read_failure,
)
from pasta_otel.slo.sources.prometheus_questions import NS_PER_MS, Asked, Run, groups, length_ns, split_runs
from pasta_otel.slo.sources.promql import (
    COVERAGE_STEPS,
    coverage_expression,
    events_factor,
    expressions,
    join,
)
from pasta_otel.slo.spec.model import Bucket, PrometheusSLI

NS_PER_SECOND = 1_000_000_000
PARALLEL = 4
COVERAGE_ABOVE_NS = 3600 * NS_PER_SECOND  # nobody keeps less
COVERAGE_SECONDS = 600.0
RETRY_SECONDS = 10.0
LOOKUPS_PER_TICK = 40
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PrometheusConfig:
    """How to reach a server.

    Attributes:
        url: Base URL, without ``/api/v1``.
        headers: Further headers, e.g. ``X-Scope-OrgID``; values never appear in messages.
        bearer_token: Sent as ``Authorization: Bearer``.
        basic_auth: User and password.
        ca_file: CA certificates for TLS, None = the system's.
        cert: Client certificate and key files.
        timeout_seconds: For one request.
        deadline_seconds: For one tick: what has not been asked by then has no data.
        batch_characters: A request's query is at most about this long.
        batch_expressions: A request holds at most so many expressions.
        clock_tolerance_seconds: How far the server's clock may be off.
    """

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    bearer_token: str | None = field(default=None, repr=False)
    basic_auth: tuple[str, str] | None = field(default=None, repr=False)
    ca_file: str | None = None
    cert: tuple[str, str] | None = None
    timeout_seconds: float = 10.0
    deadline_seconds: float = 30.0
    batch_characters: int = 60_000
    batch_expressions: int = 120
    clock_tolerance_seconds: float = 60.0

    def __post_init__(self) -> None:
        """Check the URL."""
        if not self.url.startswith(("http://", "https://")):
            raise InputError("expected a URL with http:// or https://", field="prometheus.url")


class _Resolved(NamedTuple):
    """What became of an indicator by a histogram's buckets, and until when that is believed."""

    sli: PrometheusSLI | None
    until: float
    wrong: NoDataReason | None
    said: str


class PrometheusSource:
    """Answer the controller's requests from a server.

    Args:
        config: Where and how.
        transport: For tests; None = the network.
    """

    def __init__(self, config: PrometheusConfig, transport: httpx.BaseTransport | None = None) -> None:
        self._config = config
        headers = {"Accept": "application/json", **config.headers}
        if config.bearer_token:
            headers["Authorization"] = f"Bearer {config.bearer_token}"
        self._client = httpx.Client(
            base_url=config.url.rstrip("/"),
            headers=headers,
            auth=config.basic_auth,
            verify=_tls(config),
            timeout=config.timeout_seconds,
            transport=transport,
        )
        self._refused: dict[str, str] = {}
        self._warned: set[str] = set()
        self._resolved: dict[PrometheusSLI, _Resolved] = {}
        self._lookups = 0
        self._covered: dict[PrometheusSLI, tuple[float, float]] = {}  # covered ns, until when that is believed
        self.requests_sent = 0

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def counts(self, requests: Sequence[CountRequest], now_unix_nano: int) -> Sequence[EventCounts]:
        """Return one EventCounts a request, in order; never raises for a server that is down, slow, wrong or lying."""
        deadline = time.monotonic() + self._config.deadline_seconds
        self._lookups = 0
        given, requests = requests, [self._with_bucket(request, now_unix_nano) for request in requests]
        asked = [
            Asked(number, expression, request.window.end_unix_nano)
            for number, request in enumerate(requests)
            if isinstance(request.sli, PrometheusSLI) and request.sli.bucket is None
            for expression in expressions(request.sli, length_ns(request))
        ]
        coverage = self._ask_coverage(requests)
        asked += coverage
        runs, single = split_runs(asked, requests)
        with ThreadPoolExecutor(PARALLEL) as pool:
            tasks = [pool.submit(self._ask_run, run, now_unix_nano, deadline) for run in runs]
            tasks += [pool.submit(self._ask, batch, now_unix_nano, deadline) for batch in self._batches(single)]
            for task in tasks:
                task.result()
        self._learn_coverage(coverage, requests)
        by_request: dict[int, list[Asked]] = {}
        for item in asked:
            by_request.setdefault(item.request, []).append(item)
        return [
            self._finished(_counts(request, by_request.get(number, [])), request, given[number])
            for number, request in enumerate(requests)
        ]

    def _finished(self, counts: EventCounts, request: CountRequest, given: CountRequest) -> EventCounts:
        """Add how much of the window is covered, and what must be said about a histogram's bounds."""
        found = self._resolved.get(given.sli) if isinstance(given.sli, PrometheusSLI) and given.sli.bucket else None
        if found is not None and found.sli is None:
            return replace(counts, no_data=found.wrong, detail=found.said)
        said = found.said if found is not None else ""
        return replace(counts, coverage=self._coverage_of(request), detail=counts.detail or said)

    def _with_bucket(self, request: CountRequest, now_unix_nano: int) -> CountRequest:
        """Return the request with a histogram's threshold as a query, or as it is without such buckets."""
        sli = request.sli
        if not isinstance(sli, PrometheusSLI) or sli.bucket is None:
            return request
        known = self._resolved.get(sli)
        if (known is None or known.until < time.monotonic()) and self._lookups < LOOKUPS_PER_TICK:
            self._lookups += 1
            known = self._resolved[sli] = self._resolve(sli, sli.bucket, request.window.end_unix_nano, now_unix_nano)
        return request if known is None or known.sli is None else CountRequest(known.sli, request.window)

    def _resolve(self, sli: PrometheusSLI, bucket: Bucket, time_ns: int, now_unix_nano: int) -> _Resolved:
        """Ask which bounds the server has."""
        self.requests_sent += 1
        form = {"query": bounds_query(bucket), "time": f"{time_ns / NS_PER_SECOND:.3f}"}
        soon = time.monotonic() + RETRY_SECONDS
        try:
            answer = self._client.post("/api/v1/query", data=form)
        except httpx.HTTPError as error:
            return _Resolved(None, soon, "absent", f"{type(error).__name__}: {error}")
        clock = self._clock_problem(answer, now_unix_nano)
        if clock is not None:
            return _Resolved(None, soon, clock.wrong, clock.detail)
        data = read_document(answer).get("data")
        series = data.get("result") if isinstance(data, dict) else None
        metrics = [entry.get("metric", {}) for entry in series or () if isinstance(entry, dict)]
        bounds = read_bounds(str(metric.get("le", "")) for metric in metrics)
        if not bounds:
            return _Resolved(None, soon, "absent", f"HTTP {answer.status_code}: no series {bucket.histogram}_bucket")
        found, said = resolve(sli, bucket, bounds)
        if found is None:
            return _Resolved(None, soon, "invalid", said)
        return _Resolved(found, time.monotonic() + COVERAGE_SECONDS, None, said)

    def _ask_coverage(self, requests: Sequence[CountRequest]) -> list[Asked]:
        """Return one question for every indicator whose covered time is not known, or no longer: its longest window."""
        now = time.monotonic()
        longest: dict[PrometheusSLI, int] = {}
        for number, request in enumerate(requests):
            sli = request.sli
            if not isinstance(sli, PrometheusSLI) or self._covered.get(sli, (0.0, 0.0))[1] > now:
                continue
            length, best = length_ns(request), longest.get(sli)
            if length > COVERAGE_ABOVE_NS and (best is None or length > length_ns(requests[best])):
                longest[sli] = number
        return [
            Asked(
                len(requests) + number,
                coverage_expression(sli, length_ns(requests[number])),
                requests[number].window.end_unix_nano,
            )
            for sli, number in longest.items()
        ]

    def _learn_coverage(self, asked: Sequence[Asked], requests: Sequence[CountRequest]) -> None:
        until = time.monotonic() + COVERAGE_SECONDS
        for item in asked:
            request = requests[item.request - len(requests)]
            if item.value.wrong is None:
                share = min(1.0, (item.value.number or 0.0) / COVERAGE_STEPS)
                covered = math.inf if share == 1.0 else share * length_ns(request)
                self._covered[request.sli] = (covered, until)

    def _coverage_of(self, request: CountRequest) -> float:
        """Return the share of a window that lies within the covered time: what retention lacks is the oldest part."""
        covered = self._covered.get(request.sli, (math.inf, 0.0))[0]
        return min(1.0, covered / max(1, length_ns(request)))

    def _batches(self, asked: Sequence[Asked]) -> list[list[Asked]]:
        """Return groups of one time each, bounded in size; the parts of one request stay together."""
        batches: list[list[Asked]] = []
        open_batch: dict[int, tuple[list[Asked], int]] = {}
        for start, group in groups(asked):
            batch, size = open_batch.get(start, ([], 0))
            length = sum(len(item.expression.text) + 60 for item in group)
            full = (
                len(batch) + len(group) > self._config.batch_expressions
                or size + length > self._config.batch_characters
            )
            if not batch or full:
                batch, size = [], 0
                batches.append(batch)
            batch += group
            open_batch[start] = (batch, size + length)
        return batches

    def _ask(self, batch: list[Asked], now_unix_nano: int, deadline: float) -> None:
        """Fill the values of a batch; one that the server refuses is halved until the culprit stands alone."""
        known = [item for item in batch if item.expression.text in self._refused]
        for item in known:
            item.value = Value(wrong="invalid", detail=self._refused[item.expression.text])
        batch = [item for item in batch if item.expression.text not in self._refused]
        if not batch or time.monotonic() > deadline:
            return
        try:
            values = self._query([item.expression.text for item in batch], batch[0].time_ns, now_unix_nano)
        except RefusedError as refused:
            if len(batch) == 1:
                self._refuse(batch[0], refused)
                return
            middle = len(batch) // 2
            self._ask(batch[:middle], now_unix_nano, deadline)
            self._ask(batch[middle:], now_unix_nano, deadline)
            return
        for item, value in zip(batch, values, strict=True):
            item.value = value

    def _refuse(self, item: Asked, refused: RefusedError) -> None:
        """Remember a query that the server cannot read, so that it does not spoil its batch at every tick."""
        if refused.for_good and len(self._refused) < 10_000:
            self._refused[item.expression.text] = str(refused)
        item.value = Value(wrong="invalid", detail=str(refused))

    def _ask_run(self, run: Run, now_unix_nano: int, deadline: float) -> None:
        """Fill the values of a run: one range query for many windows of one length."""
        if time.monotonic() > deadline:
            return
        texts = list(dict.fromkeys(item.expression.text for item in run.items))
        start_ms, step_ms = run.start_ns // NS_PER_MS, run.step_ns // NS_PER_MS
        form = {"start": start_ms / 1000, "end": (start_ms + run.steps * step_ms) / 1000, "step": step_ms / 1000}
        try:
            answer = self._post("/api/v1/query_range", texts, form, now_unix_nano)
        except RefusedError as refused:
            answer = Value(wrong="invalid", detail=str(refused))
        found = {text: answer if isinstance(answer, Value) else answer.by_time(i) for i, text in enumerate(texts)}
        for item in run.items:
            values = found[item.expression.text]
            at_ms = start_ms + (item.time_ns - run.start_ns) // run.step_ns * step_ms
            item.value = values if isinstance(values, Value) else values.get(at_ms, Value())

    def _query(self, texts: Sequence[str], time_ns: int, now_unix_nano: int) -> list[Value]:
        answer = self._post("/api/v1/query", texts, {"time": time_ns / NS_PER_SECOND}, now_unix_nano)
        if isinstance(answer, Value):
            return [answer] * len(texts)
        return [answer.one(number, time_ns) for number in range(len(texts))]

    def _post(self, path: str, texts: Sequence[str], times: Mapping[str, float], now_unix_nano: int) -> Answer | Value:
        """Return an answer, or what stands for every expression because there is none.

        Raises:
            RefusedError: The server says that the query is wrong.
        """
        self.requests_sent += 1
        form = {"query": join(texts), **{key: f"{value:.3f}" for key, value in times.items()}}
        try:
            response = self._client.post(path, data=form)
        except httpx.HTTPError as error:
            return Value(wrong="absent", detail=f"{type(error).__name__}: {error}")
        clock = self._clock_problem(response, now_unix_nano)
        if clock is not None:
            return clock
        document = read_document(response)
        if document.get("status") != "success":
            return read_failure(document, response)
        warnings = [str(warning) for warning in document.get("warnings") or ()]
        for warning in set(warnings) - self._warned:
            self._warned.add(warning)
            log.warning("prometheus: %s", warning)
        return read_answer(document.get("data"), len(texts), degraded=bool(warnings))

    def _clock_problem(self, answer: httpx.Response, now_unix_nano: int) -> Value | None:
        """A server whose clock is wrong has its samples at wrong times: its windows are not ours."""
        try:
            said = parsedate_to_datetime(answer.headers["Date"]).replace(tzinfo=UTC).timestamp()
        except (KeyError, ValueError, TypeError):
            return None
        ahead = said - now_unix_nano / NS_PER_SECOND
        if abs(ahead) <= self._config.clock_tolerance_seconds:
            return None
        where = "ahead of" if ahead > 0 else "behind"
        return Value(
            wrong="future" if ahead > 0 else "stale", detail=f"the server's clock is {abs(ahead):.0f} s {where} ours"
        )


def _tls(config: PrometheusConfig) -> ssl.SSLContext | bool:
    if config.ca_file is None and config.cert is None:
        return True
    try:
        context = ssl.create_default_context(cafile=config.ca_file)
        if config.cert is not None:
            context.load_cert_chain(*config.cert)
    except OSError as error:
        raise InputError(f"cannot load TLS files: {error}", field="prometheus.tls") from error
    return context


def _counts(request: CountRequest, asked: Sequence[Asked]) -> EventCounts:
    """Return the counts that the parts of one request make up."""
    if not asked:
        return EventCounts(0.0, 0.0, no_data="absent", detail="not a Prometheus indicator")
    values = {item.expression.part: item.value for item in asked}
    degraded = any(value.degraded for value in values.values())
    for value in values.values():
        if value.wrong is not None:
            return EventCounts(0.0, 0.0, no_data=value.wrong, detail=value.detail, degraded=degraded)
    window_ns = request.window.end_unix_nano - request.window.start_unix_nano
    if "raw" in values:
        return _raw(request.sli, values["raw"], degraded=degraded)
    return _ratio(values, lambda part: _events(asked, part, window_ns), degraded=degraded)


def _events(asked: Sequence[Asked], part: str, window_ns: int) -> float:
    item = next(item for item in asked if item.expression.part == part)
    return events_factor(item.expression.text, window_ns)


def _raw(sli: PrometheusSLI, value: Value, *, degraded: bool) -> EventCounts:
    if value.number is None:
        return EventCounts(0.0, 0.0, no_data="absent", detail="the query returned nothing", degraded=degraded)
    good = 1.0 - value.number if sli.raw_failure else value.number
    return EventCounts(good, 1.0, degraded=degraded, ratio_only=True)


def _ratio(values: Mapping[Any, Value], factor: Callable[[str], float], *, degraded: bool) -> EventCounts:
    """A part that does not exist yet is 0 while the total exists: a service that never failed has no error series."""
    total = values["total"].number
    if total is None:
        return EventCounts(0.0, 0.0, no_data="absent", detail="no series for the total", degraded=degraded)
    events = total * factor("total")
    if "bad" in values:
        return EventCounts(events - (values["bad"].number or 0.0) * factor("bad"), events, degraded=degraded)
    return EventCounts((values["good"].number or 0.0) * factor("good"), events, degraded=degraded)
