"""``POST /api/v1/attribute``: a question as JSON in, the answer as JSON out; the command line asks the same."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Protocol

from pasta_otel.errors import InputError
from pasta_otel.model import Attribution, SpanSLI, TimeWindow
from pasta_otel.slo.report import attribution_to_json

SECOND_NS = 1_000_000_000
_UNITS_NS = {
    "ms": SECOND_NS // 1000,
    "s": SECOND_NS,
    "m": 60 * SECOND_NS,
    "h": 3600 * SECOND_NS,
    "d": 86400 * SECOND_NS,
}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
DEFAULT_WINDOW, DEFAULT_BASELINE = "5m", "30m"
FIELDS = ("slo", "service", "operation", "window", "baseline", "threshold_ms", "good_status")


class Attributor(Protocol):
    """What answers."""

    def attribute(self, sli: Any, baseline: TimeWindow, window: TimeWindow) -> Attribution:
        """Return ranked causes, or none."""


def answerer(
    attributor: Attributor, now_unix_nano: Callable[[], int], slis: Mapping[str, Any] | None = None
) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return what the HTTP API calls with the body of ``POST /api/v1/attribute``.

    Args:
        attributor: Answers.
        now_unix_nano: Wall time, where durations end.
        slis: By the names of SLOs, to be asked about by name.
    """

    def answer(document: Mapping[str, Any]) -> dict[str, Any]:
        sli, baseline, window = parse_question(document, now_unix_nano(), slis)
        return attribution_to_json(attributor.attribute(sli, baseline, window))

    return answer


def parse_question(
    document: Mapping[str, Any], now_unix_nano: int, slis: Mapping[str, Any] | None = None
) -> tuple[Any, TimeWindow, TimeWindow]:
    """Return SLI, baseline and window of a question.

    It names an ``slo``, or a ``service`` with, if wanted, ``operation``, ``threshold_ms`` and ``good_status``.
    ``window`` is a duration that ends now (default 5m) or ``START/END`` in RFC 3339; ``baseline`` is a duration that
    ends where the window starts (default 30m) or ``START/END``.

    Raises:
        InputError: Names the field; kind ``not_found`` for an SLO that is not known.
    """
    for name in document:
        if name not in FIELDS:
            raise InputError(f"unknown field; known are {', '.join(FIELDS)}", field=str(name))
    sli = _sli(document, slis or {})
    window = parse_window(_text(document, "window") or DEFAULT_WINDOW, now_unix_nano, "window")
    baseline = parse_window(_text(document, "baseline") or DEFAULT_BASELINE, window.start_unix_nano, "baseline")
    if baseline.end_unix_nano > window.start_unix_nano:
        raise InputError("the baseline must end before the window starts", field="baseline")
    return sli, baseline, window


def _sli(document: Mapping[str, Any], slis: Mapping[str, Any]) -> Any:
    slo = _text(document, "slo")
    if slo is None:
        return SpanSLI(
            service=_text(document, "service", required=True) or "",
            operation=_text(document, "operation"),
            good_status=_boolean(document, "good_status"),
            threshold_ns=_threshold(document),
        )
    if slo not in slis:
        raise InputError(f"no such SLO: {slo!r}", field="slo", kind="not_found")
    if "service" in document:
        raise InputError("give an slo or a service, not both", field="service")
    return slis[slo]


def _text(document: Mapping[str, Any], field: str, *, required: bool = False) -> str | None:
    value = document.get(field)
    if value is None and not required:
        return None
    if not isinstance(value, str) or not value:
        raise InputError("expected a text that is not empty", field=field)
    return value


def _boolean(document: Mapping[str, Any], field: str) -> bool:
    value = document.get(field, True)
    if not isinstance(value, bool):
        raise InputError("expected true or false", field=field)
    return value


def _threshold(document: Mapping[str, Any]) -> int | None:
    value = document.get("threshold_ms")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise InputError("expected a number of milliseconds above 0", field="threshold_ms")
    return int(value * 1_000_000)


def parse_window(text: str, end_unix_nano: int, field: str) -> TimeWindow:
    """Return ``START/END``, or the duration that ends at ``end_unix_nano``.

    Raises:
        InputError: The text is neither; names the field.
    """
    if "/" in text:
        start, end = (_instant(part, field) for part in text.split("/", 1))
        if end <= start:
            raise InputError("the end must come after the start", field=field)
        return TimeWindow(start, end)
    match = _DURATION.fullmatch(text)
    length = int(float(match[1]) * _UNITS_NS[match[2]]) if match else 0
    if length <= 0:
        raise InputError(f"expected a duration such as 5m, or START/END in RFC 3339, got {text!r}", field=field)
    return TimeWindow(end_unix_nano - length, end_unix_nano)


def _instant(text: str, field: str) -> int:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise InputError(f"not an RFC 3339 time: {text!r}", field=field) from error
    if moment.tzinfo is None:
        raise InputError(f"a time needs its zone, e.g. {text}Z", field=field)
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86400 + since.seconds) * SECOND_NS + since.microseconds * 1000
