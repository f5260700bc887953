"""OTLP metric points: refuse histogram points that contradict themselves (case O11), keep the rest."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from pasta_otel.errors import InputError
from pasta_otel.exporters.receiver import wire
from pasta_otel.exporters.receiver.batch import PointBatch

_NO_RECORDED_VALUE = 1  # DataPointFlags bit 0: the point says that a series ended and carries no value


@dataclass(slots=True)
class DecodedPoints:
    """What became of one metrics request; ``batch`` holds the accepted points."""

    received: int
    batch: PointBatch
    rejected: Counter[str] = field(default_factory=Counter)
    message: str = ""


def histogram_fault(count: int, bucket_counts: Sequence[int], explicit_bounds: Sequence[float]) -> str | None:
    """Return why a histogram point cannot be right, or None.

    Source of the rules: opentelemetry-proto metrics.proto, message HistogramDataPoint.
    """
    if not bucket_counts and not explicit_bounds:
        return None
    if len(bucket_counts) != len(explicit_bounds) + 1:
        return "bucket_length"
    if any(math.isinf(bound) or math.isnan(bound) for bound in explicit_bounds):
        return "bound_not_finite"
    if any(low >= high for low, high in pairwise(explicit_bounds)):
        return "bounds_not_increasing"
    return None if sum(bucket_counts) == count else "count_mismatch"


def histogram_quantile(quantile: float, bucket_counts: Sequence[int], explicit_bounds: Sequence[float]) -> float | None:
    """Return a quantile by linear interpolation inside its bucket, as Prometheus does; None without buckets."""
    total = sum(bucket_counts)
    if not total or not explicit_bounds:
        return None
    rank, below = quantile * total, 0
    for index, in_bucket in enumerate(bucket_counts):
        if in_bucket and below + in_bucket >= rank:
            if index == len(explicit_bounds):
                return explicit_bounds[-1]
            low = explicit_bounds[index - 1] if index else min(0.0, explicit_bounds[0])
            return low + (explicit_bounds[index] - low) * max(0.0, rank - below) / in_bucket
        below += in_bucket
    return explicit_bounds[-1]


def decode_points(body: bytes) -> DecodedPoints:
    """Decode a protobuf metrics request and leave out the points that break the rules.

    Raises:
        InputError: The body is not well-formed protobuf.
    """
    try:
        request = wire.lenient()(wire.METRICS_REQUEST).FromString(body)
    except DecodeError as error:
        raise InputError(f"not a well-formed protobuf {wire.METRICS_REQUEST} ({error})", field="body") from error
    result = DecodedPoints(0, PointBatch(body, 0))
    for resource_number, resource_metrics in enumerate(request.resource_metrics):
        for scope_number, scope_metrics in enumerate(resource_metrics.scope_metrics):
            place = f"resourceMetrics[{resource_number}].scopeMetrics[{scope_number}]"
            for number, metric in enumerate(scope_metrics.metrics):
                _check_metric(f"{place}.metrics[{number}]", metric, result)
    if result.rejected:
        body = request.SerializeToString()
    result.batch = PointBatch(_valid_text(body), result.received - sum(result.rejected.values()))
    return result


def _check_metric(place: str, metric: Any, result: DecodedPoints) -> None:
    which = metric.WhichOneof("data")
    if which is None:
        return
    points = getattr(metric, which).data_points
    result.received += len(points)
    if which not in {"histogram", "exponential_histogram"}:
        return
    faults = {index: fault for index, point in enumerate(points) if (fault := _fault(which, point))}
    result.rejected.update(faults.values())
    if faults and not result.message:
        index, fault = next(iter(faults.items()))
        result.message = f"{place}.{which}.dataPoints[{index}]: {fault.replace('_', ' ')}"
    for index in reversed(faults):
        del points[index]


def _fault(which: str, point: Any) -> str | None:
    if point.flags & _NO_RECORDED_VALUE:
        return None
    if which == "histogram":
        return histogram_fault(point.count, point.bucket_counts, list(point.explicit_bounds))
    buckets = sum(point.positive.bucket_counts) + sum(point.negative.bucket_counts)
    return None if point.zero_count + buckets == point.count else "count_mismatch"


def _valid_text(body: bytes) -> bytes:
    try:
        ExportMetricsServiceRequest.FromString(body)
    except DecodeError:
        return wire.sanitize(body, wire.METRICS_REQUEST)
    return body
