"""Batches of the receiver as numpy columns, in the form of the ``spans`` table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pasta_otel.correlate import SpanFlag
from pasta_otel.exporters.receiver.batch import SpanBatch
from pasta_otel.exporters.store.dimensions import Dimensions, resource_json

Columns = dict[str, NDArray[Any]]

MAX_INT64 = 2**63 - 1
_THRESHOLD_DIGITS = 14  # of `th:` in tracestate `ot=`; right-padded with zeros to 56 bits
_UNKNOWN_PROBABILITY = 0.0
# A Jaeger client says in these attributes that it sampled; `param` is a probability for `probabilistic` only.
_SAMPLER_TYPE, _SAMPLER_PARAM = '"sampler.type":', "sampler.param"


@lru_cache(maxsize=10_000)
def adjusted_count(trace_state: str) -> float:
    """Return how many spans one sampled span stands for; 0 = a sampler is visible, its probability is not.

    Source: OpenTelemetry "TraceState: Probability Sampling" - `ot=th:T` is the rejection threshold, up to 14 hex digits
    of 56 bits; the older `ot=p:N` means 2**-N. `rv` alone: a consistent sampler took part, its threshold is unknown.
    """
    member = next((part.strip()[3:] for part in trace_state.split(",") if part.strip().startswith("ot=")), None)
    if member is None:
        return 1.0
    fields = dict(pair.split(":", 1) for pair in member.split(";") if ":" in pair)
    threshold = fields.get("th")
    if threshold is not None:
        return _from_threshold(threshold)
    if "p" in fields:
        return (
            float(2 ** int(fields["p"])) if fields["p"].isdecimal() and int(fields["p"]) < 63 else _UNKNOWN_PROBABILITY
        )
    return _UNKNOWN_PROBABILITY if {"rv", "r"} & fields.keys() else 1.0


def _from_threshold(threshold: str) -> float:
    digits = set("0123456789abcdef")
    if not 1 <= len(threshold) <= _THRESHOLD_DIGITS or not set(threshold) <= digits:
        return _UNKNOWN_PROBABILITY
    rejected = int(threshold.ljust(_THRESHOLD_DIGITS, "0"), 16)
    return float(2**56 / (2**56 - rejected))


def _weight(trace_state: str, attributes: str) -> float:
    if trace_state:
        counted = adjusted_count(trace_state)
        if counted != 1.0:
            return counted
    if _SAMPLER_TYPE in attributes:
        return _jaeger_weight(attributes)
    return 1.0


def _jaeger_weight(attributes: str) -> float:
    values: Mapping[str, Any] = json.loads(attributes)
    match values.get("sampler.type"):
        case "const" | None:
            return 1.0
        case "probabilistic":
            try:
                share = float(values[_SAMPLER_PARAM])
            except (KeyError, TypeError, ValueError):
                return _UNKNOWN_PROBABILITY
            return 1.0 / share if 0.0 < share <= 1.0 else _UNKNOWN_PROBABILITY
        case _:
            return _UNKNOWN_PROBABILITY


def ids(values: Sequence[bytes], width: int) -> NDArray[np.uint64]:
    """Return ids of 8 * width bytes as big-endian integers of shape (N, width)."""
    return np.frombuffer(b"".join(values), dtype=">u8").astype(np.uint64).reshape(-1, width)


def texts(values: Sequence[str | None]) -> NDArray[np.object_]:
    """Return an object column; numpy would otherwise guess a fixed width."""
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def span_columns(batch: SpanBatch, dimensions: Dimensions) -> Columns:
    """Return a batch in the columns of the ``spans`` table, numbering what is new."""
    counts = [group.rows for group in batch.groups]
    resources = [
        dimensions.resources.id_of((group.resource.service, resource_json(group.resource.attributes)))
        for group in batch.groups
    ]
    raw_start = np.array(batch.start_time_unix_nano, dtype=np.uint64)
    raw_end = np.array(batch.end_time_unix_nano, dtype=np.uint64)
    start, end = (np.minimum(raw, MAX_INT64).astype(np.int64) for raw in (raw_start, raw_end))
    unfinished, backwards = end == 0, (end < start) & (end != 0)
    weight = np.array([_weight(*pair) for pair in zip(batch.trace_state, batch.attributes, strict=True)])
    unknown = weight == _UNKNOWN_PROBABILITY
    weight[unknown] = 1.0
    arrived = batch.arrived_unix_nano
    trace = ids(batch.trace_id, 2)
    return {
        "end_unix_nano": end,
        "op_id": _operations(batch, counts, dimensions),
        "duration_ns": np.where(unfinished | backwards, 0, end - start),
        "status": np.array(batch.status, dtype=np.int64).astype(np.uint8),
        "flags": (
            backwards * SpanFlag.CLOCK_ANOMALY + unfinished * SpanFlag.UNFINISHED + unknown * SpanFlag.SAMPLED
        ).astype(np.uint8),
        "weight": weight,
        "lateness_ns": np.where(unfinished, 0, np.maximum(0, arrived - end) if arrived else 0),
        "resource_id": np.repeat(np.array(resources, dtype=np.int32), counts),
        "trace_hi": np.ascontiguousarray(trace[:, 0]),
        "trace_lo": np.ascontiguousarray(trace[:, 1]),
        "span_id": ids(batch.span_id, 1)[:, 0],
        "parent_span_id": ids(batch.parent_span_id, 1)[:, 0],
        "raw_start_unix_nano": raw_start,
        "raw_end_unix_nano": raw_end,
        "scope": np.repeat(texts([group.scope for group in batch.groups]), counts),
        "status_message": texts(batch.status_message),
        "trace_state": texts(batch.trace_state),
        "attributes": texts(batch.attributes),
        "events": texts(batch.events),
        "links": texts(batch.links),
    }


def _operations(batch: SpanBatch, counts: Sequence[int], dimensions: Dimensions) -> NDArray[np.int32]:
    out: list[int] = []
    number = dimensions.operations.id_of
    row = 0
    for group, rows in zip(batch.groups, counts, strict=True):
        service, end = group.resource.service, row + rows
        memo: dict[tuple[str, int], int] = {}
        for pair in zip(batch.name[row:end], batch.kind[row:end], strict=True):
            known = memo.get(pair)
            if known is None:
                name, kind = pair
                known = memo[pair] = number((service, name, kind if 1 <= kind <= 5 else 1))
            out.append(known)
        row = end
    return np.array(out, dtype=np.int32)


def concatenate(parts: Sequence[Columns]) -> Columns:
    """Return several batches as one."""
    if len(parts) == 1:
        return parts[0]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
