"""Read other exporters' Prometheus pages: keep what is good, name every bad line, and never make a number up.

Text 0.0.4 is read leniently, because one bad line of a third party must not make every GPU go dark; OpenMetrics is
refused where its grammar says so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pasta_otel.errors import InputError

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(,|(?=\}))')
_ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_SPECIAL = {"nan": math.nan, "+inf": math.inf, "inf": math.inf, "-inf": -math.inf}
NOT_A_NUMBER, INVALID_LE, SYNTAX = "not a number", "invalid le", "syntax"


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of a page."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float

    def label(self, key: str) -> str:
        """Return a label's value, empty when it is absent."""
        return dict(self.labels).get(key, "")


@dataclass(frozen=True, slots=True)
class LineError:
    """A line that was left out."""

    line: int
    kind: str
    text: str


@dataclass(slots=True)
class Page:
    """What a page says.

    Attributes:
        samples: Good lines.
        errors: Lines left out; their number is ``parse_errors``.
    """

    samples: list[Sample] = field(default_factory=list)
    errors: list[LineError] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Histogram:
    """Cumulative counts by bound, the last one +Inf.

    Attributes:
        buckets: (bound, count), sorted.
        warnings: What had to be put right.
    """

    buckets: tuple[tuple[float, float], ...]
    warnings: tuple[str, ...] = ()

    def quantile(self, share: float) -> float | None:
        """Return a quantile by linear interpolation inside its bucket, as Prometheus does; None = unknown.

        The highest bucket has no upper bound: its quantiles are the last finite bound.
        """
        if not self.buckets or not math.isinf(self.buckets[-1][0]) or self.buckets[-1][1] <= 0:
            return None
        rank, low, below = share * self.buckets[-1][1], 0.0, 0.0
        for bound, count in self.buckets:
            if count >= rank:
                inside = count - below
                return low if math.isinf(bound) or not inside else low + (bound - low) * (rank - below) / inside
            low, below = bound, count
        return low


def read_page(text: str, *, open_metrics: bool = False) -> Page:
    """Return the samples of a page.

    Args:
        text: The page.
        open_metrics: It says that it is OpenMetrics, whose ``le`` must be a canonical number.

    Raises:
        InputError: It is OpenMetrics and breaks its grammar; names the line (kind ``invalid le`` or ``not a number``).
    """
    page = Page()
    for number, line in enumerate(text.split("\n"), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        sample, kind = _read_line(stripped)
        if sample is not None and open_metrics and _wrong_le(sample):
            kind = INVALID_LE
        if kind and open_metrics:
            raise InputError(kind, line=number, kind=kind)
        if kind or sample is None:
            page.errors.append(LineError(number, kind, stripped))
        else:
            page.samples.append(sample)
    return page


def _read_line(line: str) -> tuple[Sample | None, str]:
    name = _NAME.match(line)
    if name is None:
        return None, SYNTAX
    labels, rest = _read_labels(line[name.end() :])
    if labels is None:
        return None, SYNTAX
    words = rest.split(" # ")[0].split()
    value = _number(words[0]) if words else None
    if value is None or len(words) > 2:
        return None, NOT_A_NUMBER
    return Sample(name.group(), labels, value), ""


def _read_labels(text: str) -> tuple[tuple[tuple[str, str], ...] | None, str]:
    if not text.startswith("{"):
        return (), text
    at, labels = 1, []
    while at < len(text) and text[at] != "}":
        found = _LABEL.match(text, at)
        if found is None:
            return None, ""
        labels.append((found[1], re.sub(r"\\.", lambda match: _ESCAPES.get(match[0], match[0]), found[2])))
        at = found.end()
    return (tuple(labels), text[at + 1 :]) if at < len(text) else (None, "")


def _number(text: str) -> float | None:
    if _NUMBER.fullmatch(text):
        return float(text)
    return _SPECIAL.get(text.lower())


def _wrong_le(sample: Sample) -> bool:
    """OpenMetrics wants +Inf spelled so, and a number otherwise."""
    if not sample.name.endswith("_bucket"):
        return False
    text = sample.label("le")
    return text != "+Inf" and not _NUMBER.fullmatch(text)


def merge_histogram(pages: Iterable[Page], name: str) -> Histogram:
    """Return a histogram summed over series and pages: bounds are numbers, however they are spelled.

    A missing +Inf bucket is rebuilt from ``_count``; without both, the total is unknown and so is every quantile.
    """
    buckets: dict[float, float] = {}
    count, counted = 0.0, False
    for page in pages:
        for sample in page.samples:
            bound = _number(sample.label("le")) if sample.name == f"{name}_bucket" else None
            if bound is not None and not math.isnan(bound):
                buckets[bound] = buckets.get(bound, 0.0) + sample.value
            if sample.name == f"{name}_count":
                count, counted = count + sample.value, True
    warnings: Sequence[str] = ()
    if buckets and math.inf not in buckets and counted:
        buckets[math.inf] = count
        warnings = (f"{name}: no +Inf bucket, rebuilt from {name}_count",)
    return Histogram(tuple(sorted(buckets.items())), tuple(warnings))


def by_name(page: Page) -> Mapping[str, float]:
    """Return every sample as ``name{label="value"}``: for people and tests."""
    return {_text(sample): sample.value for sample in page.samples}


def _text(sample: Sample) -> str:
    inside = ",".join(f'{key}="{value}"' for key, value in sample.labels)
    return f"{sample.name}{{{inside}}}" if inside else sample.name
