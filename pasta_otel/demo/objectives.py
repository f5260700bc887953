"""The demo's SLO file, with a latency objective that fits the machine."""

from __future__ import annotations

import math

SHIPPED_MS = 80  # as data/slo.yaml has it: four times what an order takes on a machine of 2025
TIMES_USUAL = 4.0  # an objective below this multiple of the usual order would burn by chance
TIMES_FASTEST = 7.0  # and one above this multiple of an order without company would hardly ever: faults cost about ten
STEP_MS = 10


def threshold_ms(median_ms: float, fastest_ms: float) -> int:
    """Return the latency objective for a machine on which an order takes this long, milliseconds.

    Args:
        median_ms: The usual order now; on a machine that others use as well it is far above the fastest.
        fastest_ms: The fastest of some tens of orders: what the machine can do.
    """
    fitting = min(median_ms * TIMES_USUAL, fastest_ms * TIMES_FASTEST)
    return max(SHIPPED_MS, math.ceil(fitting / STEP_MS) * STEP_MS)


def fit(text: str, limit_ms: int) -> str:
    """Return the shipped SLO file with another latency objective."""
    for shipped in (f"{SHIPPED_MS} ms", f"within-{SHIPPED_MS}-ms", f"threshold_ms: {SHIPPED_MS}"):
        text = text.replace(shipped, shipped.replace(str(SHIPPED_MS), str(limit_ms)))
    return text
