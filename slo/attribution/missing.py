"""Why there is nothing to compare: a name that nobody has, or a time without requests."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from pasta_otel.model import OperationKey, TimeWindow
from pasta_otel.slo.actions.times import to_rfc3339
from pasta_otel.slo.attribution.record import ANY_OPERATION, Record

MOST_NAMES = 5


def incomplete(record: Record) -> str:
    """Say which window is too small to compare, or nothing."""
    for name, requests in (("baseline", record.requests_before), ("window", record.requests_after)):
        if requests < record.limits.min_requests:
            return f"{name} holds {requests} requests of {_name(record.own)}, fewer than {record.limits.min_requests}"
    return ""


def advice(own: OperationKey, known: Mapping[OperationKey, TimeWindow]) -> str:
    """Say what there is instead: services, operations, or the time that requests are from.

    Args:
        own: Whose requests are too few.
        known: Every (service, operation) with requests, and from when to when.
    """
    if not known:
        return "there are no requests at all: only server spans are requests"
    operations = {key.operation: window for key, window in known.items() if key.service == own.service}
    if not operations:
        services = {key.service for key in known}
        return f"no requests of {own.service} are known; there are those of {_listed(own.service, services)}"
    if own.operation != ANY_OPERATION and own.operation not in operations:
        return f"{own.service} has no operation {own.operation!r}; it has {_listed(own.operation, operations)}"
    windows = [window for name, window in operations.items() if own.operation in {name, ANY_OPERATION}]
    first, last = min(window.start_unix_nano for window in windows), max(window.end_unix_nano for window in windows)
    return f"they are from {to_rfc3339(first)} to {to_rfc3339(last)}"


def _name(own: OperationKey) -> str:
    return own.service if own.operation == ANY_OPERATION else f"{own.service} {own.operation!r}"


def _listed(asked: str, names: Mapping[str, object] | set[str]) -> str:
    """Return a few names, those most like what was asked first."""
    near = get_close_matches(asked, names, n=MOST_NAMES)
    ordered = [*near, *sorted(name for name in names if name not in near)]
    more = f" and {len(ordered) - MOST_NAMES} more" if len(ordered) > MOST_NAMES else ""
    return ", ".join(repr(name) for name in ordered[:MOST_NAMES]) + more
