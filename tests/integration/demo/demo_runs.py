"""Run the demo as a user would, and what a run must have produced, counted without pasta-otel."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pasta_otel.demo.load import RequestRecord, read_log

DEMO = [sys.executable, "-m", "pasta_otel", "demo"]
RUN_SECONDS = 170  # the demo's own limit is 3 minutes


@dataclass(frozen=True)
class DemoRun:
    fault: str
    seed: int
    out: Path
    code: int
    report: dict[str, Any]
    log: str

    @property
    def requests(self) -> list[RequestRecord]:
        return read_log(self.out / "load.jsonl")

    @property
    def applied(self) -> set[tuple[str, str]]:
        return {(a["action"], a["target"]) for a in self.report["actions"] if a["outcome"] == "applied"}


def run_demo(out: Path, fault: str, seed: int = 0, *more: str) -> DemoRun:
    command = [*DEMO, "--fault", fault, "--seed", str(seed), "--out", str(out), "--json", *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS, check=False)
    assert done.stdout, f"the demo said nothing on stdout; on stderr: {done.stderr[-3000:]}"
    return DemoRun(fault, seed, out, done.returncode, json.loads(done.stdout), done.stderr)


def module_calls_per_order() -> int:
    """Count with hooks of our own how many modules one pass through the model calls."""
    import torch

    from pasta_otel.demo.services import encoder

    model, calls = encoder.build(0, "cpu"), []
    for module in model.modules():
        module.register_forward_hook(lambda *_: calls.append(1))
    with torch.inference_mode():
        model(torch.tensor([encoder.tokenize("an order")]))
    return len(calls)


def spans_due(requests: Sequence[RequestRecord], breaker_transitions: int) -> int:
    """Return how many spans a run must make, from the load generator's log.

    One server span an order, a client and a server span a call, a span a module that a call of the model runs, and one a
    change of the breaker's state.
    """
    calls = [name for request in requests for name in request.calls]
    sent = sum(request.outcome != "not_sent" for request in requests)
    return sent + 2 * len(calls) + module_calls_per_order() * calls.count("model") + breaker_transitions
