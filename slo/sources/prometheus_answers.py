"""Read what a Prometheus-compatible server answers, trusting nothing: a wrong answer becomes a reason."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

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


def read_document(answer: httpx.Response) -> Mapping[str, Any]:
    """Return the JSON object of an answer, empty when it is none."""
    try:
        document = answer.json()
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def read_failure(document: Mapping[str, Any], answer: httpx.Response) -> Value:
    """Return ``absent`` for a request that failed.

    Raises:
        RefusedError: It failed because of the query.
    """
    message = str(document.get("error") or "no Prometheus answer")[:300]
    if answer.status_code in {400, 422} and document.get("errorType") in {"bad_data", "execution"}:
        raise RefusedError(message, for_good=document.get("errorType") == "bad_data")
    return Value(wrong="absent", detail=f"HTTP {answer.status_code}: {message}")


@dataclass(frozen=True, slots=True)
class Answer:
    """Series by the expression that they answer.

    Attributes:
        series: For every expression, the entries of the result.
        degraded: The server warned.
    """

    series: tuple[list[Any], ...]
    degraded: bool

    def one(self, number: int, time_ns: int) -> Value:
        """Return the value of an instant query's expression: exactly one series, at the time asked for."""
        return _one(self.series[number], time_ns, degraded=self.degraded)

    def by_time(self, number: int) -> Mapping[int, Value] | Value:
        """Return the values of a range query's expression by time in ms, or why there are none."""
        entries = self.series[number]
        if len(entries) > 1:
            return _several(entries)
        try:
            pairs = [(round(float(at) * 1000), float(text)) for entry in entries for at, text in entry["values"]]
        except (KeyError, TypeError, ValueError):
            return Value(wrong="invalid", detail="not samples of numbers")
        return {at: _checked(at / 1000, value, at * 1_000_000, degraded=self.degraded) for at, value in pairs}


def read_answer(data: Any, n: int, *, degraded: bool) -> Answer | Value:
    """Return the series of an answer by expression, or why there are none."""
    kind = data.get("resultType") if isinstance(data, dict) else None
    series = data.get("result") if isinstance(data, dict) else None
    if kind not in {"vector", "matrix"} or not isinstance(series, list):
        return Value(wrong="invalid", detail=f"the query returns a {kind}, not a vector")
    found: tuple[list[Any], ...] = tuple([] for _ in range(n))
    for entry in series:
        number = 0 if n == 1 else _number(entry, n)
        if number is not None:
            found[number].append(entry)
    return Answer(found, degraded)


def _number(entry: Any, n: int) -> int | None:
    try:
        number = int(entry["metric"][NUMBER_LABEL])
    except (KeyError, TypeError, ValueError):
        return None
    return number if 0 <= number < n else None


def _one(entries: list[Any], time_ns: int, *, degraded: bool) -> Value:
    if not entries:
        return Value(degraded=degraded)
    if len(entries) > 1:
        return _several(entries)
    try:
        at, number = (float(text) for text in entries[0]["value"])
    except (KeyError, TypeError, ValueError):
        return Value(wrong="invalid", detail="not a sample of a number")
    return _checked(at, number, time_ns, degraded=degraded)


def _several(entries: list[Any]) -> Value:
    labels = sorted({str(key) for entry in entries for key in entry.get("metric", {})} - {NUMBER_LABEL})
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
