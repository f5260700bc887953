"""The demo's SLO file, with a latency objective that fits the machine."""

from __future__ import annotations

import math

SHIPPED_MS = 60  # as data/slo.yaml has it: three times what an order takes on a machine of 2025
TIMES_USUAL = 3.0  # an objective below this multiple of an idle order's time would burn by chance on a busy machine
STEP_MS = 10


def threshold_ms(order_ms: float) -> int:
    """Return the latency objective for a machine on which an order takes ``order_ms`` at rest, milliseconds."""
    return max(SHIPPED_MS, math.ceil(order_ms * TIMES_USUAL / STEP_MS) * STEP_MS)


def fit(text: str, limit_ms: int) -> str:
    """Return the shipped SLO file with another latency objective."""
    for shipped in (f"{SHIPPED_MS} ms", f"within-{SHIPPED_MS}-ms", f"threshold_ms: {SHIPPED_MS}"):
        text = text.replace(shipped, shipped.replace(str(SHIPPED_MS), str(limit_ms)))
    return text
