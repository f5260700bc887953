"""OpenTelemetry names to Prometheus names.

Source: opentelemetry-specification, compatibility/prometheus_and_openmetrics.md, with the translation strategy
"UnderscoreEscapingWithSuffixes".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

_UNITS = {
    "d": "days", "h": "hours", "min": "minutes", "s": "seconds", "ms": "milliseconds", "us": "microseconds",
    "ns": "nanoseconds", "By": "bytes", "KiBy": "kibibytes", "MiBy": "mebibytes", "GiBy": "gibibytes",
    "TiBy": "tebibytes", "KBy": "kilobytes", "MBy": "megabytes", "GBy": "gigabytes", "TBy": "terabytes",
    "bit": "bits", "m": "meters", "V": "volts", "A": "amperes", "J": "joules", "W": "watts", "g": "grams",
    "Cel": "celsius", "Hz": "hertz", "%": "percent",
}  # fmt: skip
_PER = {"s": "second", "m": "minute", "min": "minute", "h": "hour", "d": "day", "w": "week", "mo": "month", "y": "year"}
_BRACES = re.compile(r"\{[^}]*\}")
_NOT_METRIC = re.compile(r"[^a-zA-Z0-9_:]+")
_NOT_LABEL = re.compile(r"[^a-zA-Z0-9_]")
_RUNS = re.compile(r"_{2,}")


@lru_cache(maxsize=4096)
def metric_name(name: str, unit: str, *, counter: bool, gauge: bool) -> str:
    """Return the metric family's name with its unit suffix and, for counters, ``_total``.

    Args:
        name: OpenTelemetry name.
        unit: UCUM unit.
        counter: A monotonic sum.
        gauge: A gauge; the dimensionless unit ``1`` becomes ``ratio`` only there.
    """
    base = _RUNS.sub("_", _NOT_METRIC.sub("_", name)).strip("_") or "_"
    if base[0].isdigit():
        base = f"_{base}"
    if counter:
        base = base.removesuffix("_total")
    word = unit_word(unit) or ("ratio" if unit == "1" and gauge else "")
    if word and not _has_suffix(base, word):
        base = f"{base}_{word}"
    return f"{base}_total" if counter else base


def unit_word(unit: str) -> str:
    """Return a UCUM unit in words, or an empty text for none, ``1`` and annotations such as ``{span}``."""
    text = _BRACES.sub("", unit).strip()
    amount, _, per = text.partition("/")
    amount_word = "" if amount in {"", "1"} else _UNITS.get(amount, _clean_unit(amount))
    per_word = _PER.get(per, _clean_unit(per)) if per else ""
    return "_".join(part for part in (amount_word, f"per_{per_word}" if per_word else "") if part)


def _clean_unit(unit: str) -> str:
    return _RUNS.sub("_", _NOT_METRIC.sub("_", unit)).strip("_")


def _has_suffix(name: str, word: str) -> bool:
    return name == word or name.endswith(f"_{word}")


@lru_cache(maxsize=4096)
def label_name(key: str) -> str:
    """Return a valid label name; names that start with a digit get the prefix ``key_``."""
    cleaned = _RUNS.sub("_", _NOT_LABEL.sub("_", key))
    return f"key_{cleaned}" if cleaned[:1].isdigit() else cleaned or "_"


def labels(attributes: Iterable[tuple[str, Any]] | Mapping[str, Any]) -> dict[str, str]:
    """Return labels; attributes that fall on one label name are joined with ``;`` in the order of their keys."""
    pairs = attributes.items() if isinstance(attributes, Mapping) else attributes
    out: dict[str, str] = {}
    for key, value in sorted(pairs, key=lambda pair: pair[0]):
        name, text = label_name(key), label_value(value)
        out[name] = f"{out[name]};{text}" if name in out else text
    return out


def label_value(value: Any) -> str:
    """Return an attribute value as text: booleans and sequences as JSON would write them."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(f'"{item}"' if isinstance(item, str) else label_value(item) for item in value) + "]"
    return str(value)
