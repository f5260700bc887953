"""What the demo prints where it cannot draw: every number with its meaning, and no line broken in the middle."""

from __future__ import annotations

import io
from typing import Any, cast

from rich.console import Console

from pasta_otel.demo.live import LiveView
from pasta_otel.demo.sidecar import Sidecar
from pasta_otel.demo.watch import Watch

RATE = {"long": 1.6, "short": 4.4, "factor": 2.4, "long_window": "30s", "short_window": "5s"}


def printed(*states: dict[str, Any]) -> list[str]:
    watch = Watch(cast("Sidecar", None))
    watch.states = {state["name"]: state for state in states}
    console = Console(file=io.StringIO(), width=40)
    LiveView(console).update(watch, None)
    return cast("io.StringIO", console.file).getvalue().splitlines()


def test_every_slo_has_a_line_that_says_what_its_numbers_are():
    first, second = printed(
        {"name": "orders-latency", "verdict": "ok", "burn_rates": [RATE]},
        {"name": "orders-success", "verdict": "no_data", "burn_rates": []},
    )
    assert first.endswith("orders-latency ok, burn rate 1.6 over 30s, 4.4 over 5s (burning above 2.4)")
    assert second.endswith("orders-success no_data")
