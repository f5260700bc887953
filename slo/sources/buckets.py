"""Latency from a classic histogram: find the bucket bounds a server has, as numbers, and count up to a threshold.

``le="1"`` and ``le="1.0"`` are one bound (prometheus/client_js#232). A threshold inside a bucket counts the buckets
below it only, and the answer says between which bounds the truth lies.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import replace

from pasta_otel.slo.spec.model import Bucket, PrometheusSLI


def bounds_query(bucket: Bucket) -> str:
    """Return the query whose answer has one series a spelling of a bound."""
    return f"count by (le) ({bucket.histogram}_bucket{{{bucket.selector}}})"


def read_bounds(spellings: Iterable[str]) -> dict[float, list[str]]:
    """Return every bound as a number with its spellings; what is no number is left out."""
    bounds: dict[float, list[str]] = {}
    for text in spellings:
        try:
            number = float(text)
        except ValueError:
            continue
        if not math.isnan(number):
            bounds.setdefault(number, []).append(text)
    return bounds


def resolve(sli: PrometheusSLI, bucket: Bucket, bounds: dict[float, list[str]]) -> tuple[PrometheusSLI | None, str]:
    """Return the indicator with its bucket as a query and what must be said of it; None: no bound is low enough."""
    threshold = float(bucket.threshold)
    below = [bound for bound in bounds if bound <= threshold]
    if not below:
        lowest = min(bounds, default=math.inf)
        return None, f"the lowest bound of {bucket.histogram}, {lowest:g}, is above the threshold {threshold:g}"
    bound = max(below)
    above = min((other for other in bounds if other > threshold), default=math.inf)
    # label values in a regexp matcher: quoted once for RE2, once for PromQL's string
    pattern = "|".join(re.escape(text) for text in sorted(bounds[bound])).replace("\\", "\\\\")
    inside = f'{bucket.selector}, le=~"{pattern}"' if bucket.selector else f'le=~"{pattern}"'
    good = f"sum(increase({bucket.histogram}_bucket{{{inside}}}[{{{{.window}}}}]))"
    said = (
        ""
        if bound == threshold
        else (
            f"{threshold:g} lies between the bounds {bound:g} and {above:g} of {bucket.histogram}:"
            f" good events are those up to {bound:g}, a lower bound"
        )
    )
    return replace(sli, good=good, bucket=None), said
