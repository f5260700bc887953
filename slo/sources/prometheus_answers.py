"""Read what a Prometheus-compatible server answers, trusting nothing: a wrong answer becomes a reason."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pasta_otel.model import NoDataReason
from pasta_otel.slo.sources.promql import NUMBER_LABEL

NS_PER_SECOND = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Value:
    """What a server said about one expression: a number, nothing (absent), or a reason why it says nothing."""

    number: float | None = None
    wrong: NoDataReason | None = None
    detail: str = ""
    degraded: bool = False


class RefusedError(Exception):
    """The server says that the query itself is wrong: for good (it cannot be read), or this time (too much work)."""

    def __init__(self, message: str, *, for_good: bool) -> None:
        self.for_good = for_good
        super().__init__(message)


def read_failure(document: Mapping[str, Any], status: int) -> Value:
    """Return ``absent`` for a request that failed.

    Raises:
        RefusedError: It failed because of the query.
    """
    message = str(document.get("error") or "no Prometheus answer")[:300]
    if status in {400, 422} and document.get("errorType") in {"bad_data", "execution"}:
        raise RefusedError(message, for_good=document.get("errorType") == "bad_data")
    return Value(wrong="absent", detail=f"HTTP {status}: {message}")


@dataclass(frozen=True, slots=True)
class Series:
    """What answers one expression.

    Attributes:
        entries: The entries of the result: mappings.
        degraded: The server warned.
    """

    entries: list[Mapping[str, Any]]
    degraded: bool = False

    def one(self, time_ns: int) -> Value:
        """Return the value of an instant query's expression: exactly one series, at the time asked for."""
        return _one(self.entries, time_ns, degraded=self.degraded)

    def by_time(self) -> Mapping[int, Value] | Value:
        """Return the values of a range query's expression by time in ms, or why there are none."""
        if len(self.entries) > 1:
            return _several(self.entries)
        try:
            pairs = [(round(float(at) * 1000), float(text)) for entry in self.entries for at, text in entry["values"]]
        except (KeyError, TypeError, ValueError, OverflowError):
            return Value(wrong="invalid", detail="not samples of numbers")
        return {at: _checked(at / 1000, value, at * 1_000_000, degraded=self.degraded) for at, value in pairs}


def read_answer(data: Any, n: int, *, degraded: bool) -> list[Series] | Value:
    """Return what answers each of ``n`` expressions, or why there is nothing."""
    kind = data.get("resultType") if isinstance(data, dict) else None
    series = data.get("result") if isinstance(data, dict) else None
    if kind not in {"vector", "matrix"} or not isinstance(series, list):
        return Value(wrong="invalid", detail=f"the query returns a {kind}, not a vector")
    found: list[list[Mapping[str, Any]]] = [[] for _ in range(n)]
    for entry in series:
        number = 0 if n == 1 and isinstance(entry, dict) else _number(entry, n)
        if number is not None:
            found[number].append(entry)
    return [Series(entries, degraded) for entries in found]


def labels_of(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a series' labels, whatever stands there."""
    metric = entry.get("metric")
    return metric if isinstance(metric, dict) else {}


def _number(entry: Any, n: int) -> int | None:
    try:
        number = int(entry["metric"][NUMBER_LABEL])
    except (KeyError, TypeError, ValueError):
        return None
    return number if 0 <= number < n else None


def _one(entries: list[Mapping[str, Any]], time_ns: int, *, degraded: bool) -> Value:
    if not entries:
        return Value(degraded=degraded)
    if len(entries) > 1:
        return _several(entries)
    try:
        at, number = (float(text) for text in entries[0]["value"])
    except (KeyError, TypeError, ValueError):
        return Value(wrong="invalid", detail="not a sample of a number")
    return _checked(at, number, time_ns, degraded=degraded)


def _several(entries: list[Mapping[str, Any]]) -> Value:
    labels = sorted({str(key) for entry in entries for key in labels_of(entry)} - {NUMBER_LABEL})
    detail = f"{len(entries)} series instead of one, told apart by {', '.join(labels)}: aggregate"
    return Value(wrong="invalid", detail=detail)


def _checked(at: float, number: float, time_ns: int, *, degraded: bool) -> Value:
    off = at - time_ns / NS_PER_SECOND
    if abs(off) > 1.0 and time_ns:
        return Value(
            wrong="future" if off > 0 else "stale", detail=f"a sample {abs(off):.0f} s from the time asked for"
        )
    if math.isnan(number):
        return Value(wrong="nan", detail="the server answered NaN")
    if math.isinf(number):
        return Value(wrong="invalid", detail="the server answered Inf")
    return Value(number, degraded=degraded)
