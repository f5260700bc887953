"""SLIs from a Prometheus-compatible server (Prometheus, Thanos, Mimir, VictoriaMetrics) over its HTTP API.

Good and total of one SLI are asked in one request at one time, many SLIs to a request. Whatever a server does wrong
becomes ``no_data`` with a reason, never a verdict.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import httpx

from pasta_otel.model import CountRequest, EventCounts, NoDataReason
from pasta_otel.slo.sources.buckets import bounds_query, read_bounds, resolve
from pasta_otel.slo.sources.prometheus_answers import (
    RefusedError,
    Series,
    Value,
    labels_of,
    read_answer,
    read_failure,
)
from pasta_otel.slo.sources.prometheus_http import PrometheusClient, PrometheusConfig
from pasta_otel.slo.sources.prometheus_questions import NS_PER_MS, Asked, Run, groups, length_ns, split_runs
from pasta_otel.slo.sources.promql import (
    COVERAGE_STEPS,
    coverage_expression,
    events_factor,
    expressions,
    join,
)
from pasta_otel.slo.spec.model import Bucket, PrometheusSLI

__all__ = ["PrometheusConfig", "PrometheusSource"]

NS_PER_SECOND = 1_000_000_000
PARALLEL = 4
COVERAGE_ABOVE_NS = 3600 * NS_PER_SECOND  # nobody keeps less
COVERAGE_SECONDS = 600.0
RETRY_SECONDS = 10.0
QUARANTINE_SECONDS = 60.0
MAX_REMEMBERED = 10_000
LATE = Value(wrong="absent", detail="no time left in this tick")
log = logging.getLogger(__name__)


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
        self._client = PrometheusClient(config, transport)
        self._pool = ThreadPoolExecutor(PARALLEL, thread_name_prefix="pasta-prometheus")
        self._refused: dict[str, tuple[str, float]] = {}  # what the server said, until when it is believed
        self._warned: set[str] = set()
        self._resolved: dict[PrometheusSLI, _Resolved] = {}
        self._covered: dict[PrometheusSLI, tuple[float, float]] = {}  # covered ns, until when that is believed

    @property
    def requests_sent(self) -> int:
        """Return how many requests have been sent."""
        return self._client.requests_sent

    def close(self) -> None:
        """Close the connections; a question under way is given up."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    def counts(self, requests: Sequence[CountRequest], now_unix_nano: int) -> Sequence[EventCounts]:
        """Return one EventCounts a request, in order; never raises for a server that is down, slow, wrong or lying."""
        deadline = time.monotonic() + self._config.deadline_seconds
        self._look_up_bounds(requests, now_unix_nano, deadline)
        given, requests = requests, [self._with_bucket(request) for request in requests]
        asked = [
            Asked(number, expression, request.window.end_unix_nano)
            for number, request in enumerate(requests)
            if isinstance(request.sli, PrometheusSLI) and request.sli.bucket is None
            for expression in expressions(request.sli, length_ns(request))
        ]
        coverage = self._ask_coverage(requests)
        asked += coverage
        runs, single = split_runs(asked, requests)
        tasks: list[Callable[[], None]] = [partial(self._ask_run, run, now_unix_nano, deadline) for run in runs]
        tasks += [partial(self._ask, batch, now_unix_nano, deadline) for batch in self._batches(single)]
        self._in_parallel(tasks, deadline)
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
        found = self._resolved.get(given.sli) if isinstance(given.sli, PrometheusSLI) else None
        if found is None and isinstance(given.sli, PrometheusSLI) and given.sli.bucket is not None:
            return replace(counts, no_data=LATE.wrong, detail=LATE.detail)
        if found is not None and found.sli is None:
            return replace(counts, no_data=found.wrong, detail=found.said)
        said = found.said if found is not None else ""
        return replace(counts, coverage=self._coverage_of(request), detail=counts.detail or said)

    def _in_parallel(self, tasks: Sequence[Callable[[], None]], deadline: float) -> None:
        """Run tasks; whoever has no answer at the deadline, plus one request's time, has none at this tick."""
        futures = [self._pool.submit(task) for task in tasks]
        left = deadline - time.monotonic() + self._config.timeout_seconds
        done, late = wait(futures, timeout=max(0.0, left))
        for future in late:
            future.cancel()
        for future in done:
            future.result()

    def _with_bucket(self, request: CountRequest) -> CountRequest:
        """Return the request with a histogram's threshold as a query, or as it is without such buckets."""
        known = self._resolved.get(request.sli) if isinstance(request.sli, PrometheusSLI) else None
        return request if known is None or known.sli is None else CountRequest(known.sli, request.window)

    def _look_up_bounds(self, requests: Sequence[CountRequest], now_unix_nano: int, deadline: float) -> None:
        """Ask, many to a request, which bounds the histograms have that are not known, or no longer."""
        now = time.monotonic()
        wanted: dict[PrometheusSLI, tuple[Bucket, int]] = {}
        for request in requests:
            sli = request.sli
            if isinstance(sli, PrometheusSLI) and sli.bucket is not None:
                known = self._resolved.get(sli)
                if known is None or known.until < now:
                    wanted[sli] = (sli.bucket, request.window.end_unix_nano)
        items = list(wanted.items())
        size = self._config.batch_expressions
        parts = [items[first : first + size] for first in range(0, len(items), size)]
        self._in_parallel([partial(self._learn_bounds, part, now_unix_nano, deadline) for part in parts], deadline)

    def _learn_bounds(
        self, items: Sequence[tuple[PrometheusSLI, tuple[Bucket, int]]], now_unix_nano: int, deadline: float
    ) -> None:
        texts = [bounds_query(bucket) for _, (bucket, _) in items]
        times = {"time": items[0][1][1] / NS_PER_SECOND}
        found = self._answers("/api/v1/query", texts, times, now_unix_nano, deadline)
        for (sli, (bucket, _)), answer in zip(items, found, strict=True):
            self._resolved[sli] = _resolved(sli, bucket, answer)

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
        """Fill the values of a batch."""
        times = {"time": batch[0].time_ns / NS_PER_SECOND}
        texts = [item.expression.text for item in batch]
        for item, found in zip(
            batch, self._answers("/api/v1/query", texts, times, now_unix_nano, deadline), strict=True
        ):
            item.value = found if isinstance(found, Value) else found.one(item.time_ns)

    def _ask_run(self, run: Run, now_unix_nano: int, deadline: float) -> None:
        """Fill the values of a run: one range query for many windows of one length."""
        texts = list(dict.fromkeys(item.expression.text for item in run.items))
        start_ms, step_ms = run.start_ns // NS_PER_MS, run.step_ns // NS_PER_MS
        times = {"start": start_ms / 1000, "end": (start_ms + run.steps * step_ms) / 1000, "step": step_ms / 1000}
        answers = self._answers("/api/v1/query_range", texts, times, now_unix_nano, deadline)
        found = {
            text: answer if isinstance(answer, Value) else answer.by_time()
            for text, answer in zip(texts, answers, strict=True)
        }
        for item in run.items:
            values = found[item.expression.text]
            at_ms = start_ms + (item.time_ns - run.start_ns) // run.step_ns * step_ms
            item.value = values if isinstance(values, Value) else values.get(at_ms, Value())

    def _answers(
        self, path: str, texts: Sequence[str], times: Mapping[str, float], now_unix_nano: int, deadline: float
    ) -> list[Series | Value]:
        """Return what answers each expression; a batch that is refused is halved until the culprit stands alone.

        A query that the server cannot read is not asked again; one that it could not execute, not for a minute.
        """
        found: dict[int, Series | Value] = {}
        for number, text in enumerate(texts):
            said, until = self._refused.get(text, ("", 0.0))
            if until > time.monotonic():
                found[number] = Value(wrong="invalid", detail=said)
        open_ = [number for number in range(len(texts)) if number not in found]
        for numbers, answer in self._halved(path, texts, open_, times, now_unix_nano, deadline):
            for place, number in enumerate(numbers):
                found[number] = answer if isinstance(answer, Value) else answer[place]
        return [found[number] for number in range(len(texts))]

    def _halved(  # noqa: PLR0913, PLR0917  # a question and its bounds
        self,
        path: str,
        texts: Sequence[str],
        numbers: list[int],
        times: Mapping[str, float],
        now_unix_nano: int,
        deadline: float,
    ) -> Iterator[tuple[list[int], list[Series] | Value]]:
        if not numbers:
            return
        if time.monotonic() > deadline:
            yield numbers, LATE
            return
        try:
            yield numbers, self._post(path, [texts[number] for number in numbers], times, now_unix_nano)
        except RefusedError as refused:
            if len(numbers) == 1:
                self._refuse(texts[numbers[0]], refused)
                yield numbers, Value(wrong="invalid", detail=str(refused))
                return
            middle = len(numbers) // 2
            for half in (numbers[:middle], numbers[middle:]):
                yield from self._halved(path, texts, half, times, now_unix_nano, deadline)

    def _refuse(self, text: str, refused: RefusedError) -> None:
        """Remember a query that the server refuses, so that it does not spoil its batch at every tick."""
        if len(self._refused) < MAX_REMEMBERED or text in self._refused:
            until = math.inf if refused.for_good else time.monotonic() + QUARANTINE_SECONDS
            self._refused[text] = (str(refused), until)

    def _post(
        self, path: str, texts: Sequence[str], times: Mapping[str, float], now_unix_nano: int
    ) -> list[Series] | Value:
        """Return what answers each expression, or what stands for all of them because there is no answer.

        Raises:
            RefusedError: The server says that the query is wrong.
        """
        form = {"query": join(texts), **{key: f"{value:.3f}" for key, value in times.items()}}
        reply = self._client.post(path, form, now_unix_nano)
        if isinstance(reply, Value):
            return reply
        if reply.document.get("status") != "success":
            return read_failure(reply.document, reply.status)
        said = reply.document.get("warnings")
        warnings = {str(warning) for warning in said} if isinstance(said, list) else set()
        for warning in warnings - self._warned:
            if len(self._warned) < MAX_REMEMBERED:
                self._warned.add(warning)
                log.warning("prometheus: %s", warning)
        return read_answer(reply.document.get("data"), len(texts), degraded=bool(warnings))


def _resolved(sli: PrometheusSLI, bucket: Bucket, answer: Series | Value) -> _Resolved:
    """Return an indicator with the bounds that a server has; what it did not say is asked again soon."""
    soon = time.monotonic() + RETRY_SECONDS
    if isinstance(answer, Value):
        return _Resolved(None, soon, answer.wrong, answer.detail)
    bounds = read_bounds(str(labels_of(entry).get("le", "")) for entry in answer.entries)
    if not bounds:
        return _Resolved(None, soon, "absent", f"no series {bucket.histogram}_bucket")
    found, said = resolve(sli, bucket, bounds)
    if found is None:
        return _Resolved(None, soon, "invalid", said)
    return _Resolved(found, time.monotonic() + COVERAGE_SECONDS, None, said)


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
