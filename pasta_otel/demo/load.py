"""The demo's load generator: an open loop at a fixed rate that checks every answer and logs every request.

It runs as a process of its own (``python -m pasta_otel.demo.load``) and is not instrumented: ``load.jsonl`` is what the
offline check and the span count are compared with, so it must not come from our spans.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

import httpx

from pasta_otel.demo.services.catalogue import PRICES_CENTS, total_cents

TIMEOUT_SECONDS = 15.0
IN_FLIGHT_MOST = 10  # beyond it orders are logged as not sent: an overloaded service keeps a bounded queue
JITTER = 0.1  # of the interval: requests of two generators do not stay in step

Outcome = Literal["ok", "failed", "invalid", "unreachable", "not_sent"]


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One line of ``load.jsonl``.

    Attributes:
        number: Counts from 0.
        start_monotonic_ns: CLOCK_MONOTONIC when the request was sent.
        end_monotonic_ns: When its answer was read.
        start_unix_nano: Wall time when it was sent.
        end_unix_nano: Wall time when its answer was read.
        latency_ms: End minus start, as the client saw it.
        status: HTTP status, or None without an answer.
        outcome: ``ok``; ``failed`` (answered with an error), ``invalid`` (a success that does not fit the order),
            ``unreachable`` (no answer), ``not_sent`` (too many in flight).
        degraded: The answer says that it came without recommendations.
        calls: Which dependencies the order API says it called for this order.
        trace_id: The trace, as the order API's answer names it.
        detail: What was wrong, in words.
    """

    number: int
    start_monotonic_ns: int
    end_monotonic_ns: int
    start_unix_nano: int
    end_unix_nano: int
    latency_ms: float
    status: int | None
    outcome: Outcome
    degraded: bool = False
    calls: tuple[str, ...] = ()
    trace_id: str = ""
    detail: str = ""

    @classmethod
    def parse(cls, line: bytes) -> RequestRecord:
        """Return the record that a line holds."""
        row = json.loads(line)
        return cls(**{**row, "calls": tuple(row["calls"])})


def make_order(random_source: random.Random, number: int) -> dict[str, Any]:
    """Return one order, the same for the same seed and number."""
    skus = random_source.sample(sorted(PRICES_CENTS), random_source.randint(1, 4))
    return {
        "order_id": f"o-{number:06d}",
        "customer": f"c-{random_source.randint(1, 500)}",
        "items": [[sku, random_source.randint(1, 5)] for sku in skus],
    }


def judge(order: Mapping[str, Any], status: int, answer: Mapping[str, Any]) -> tuple[Outcome, str]:
    """Say whether ``answer`` is a right answer to ``order``, and what is wrong otherwise."""
    if status != 201:
        return "failed", str(answer.get("error", f"HTTP {status}"))
    skus = {sku for sku, _ in order["items"]}
    recommended = answer["recommendations"]
    checks = {
        "order_id differs": answer["order_id"] == order["order_id"],
        "total_cents is wrong": answer["total_cents"] == total_cents([(sku, n) for sku, n in order["items"]]),
        "risk is not in 0..1": 0.0 <= answer["risk"] <= 1.0,
        "no authorization": bool(answer["authorization"]),
        "recommends what was ordered": not skus & set(recommended),
        "recommendations do not fit degraded": len(recommended) == (0 if answer["degraded"] else 3),
    }
    wrong = [name for name, right in checks.items() if not right]
    return ("invalid", "; ".join(wrong)) if wrong else ("ok", "")


class LoadGenerator:
    """Send orders at a fixed rate, whatever becomes of the earlier ones, until told to stop."""

    def __init__(self, client: httpx.AsyncClient, url: str, rate: float, seed: int, out: TextIO) -> None:
        self._client, self._url, self._interval = client, url, 1.0 / rate
        self._random = random.Random(seed)  # noqa: S311 - repeatable on purpose
        self._out = out
        self._in_flight: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """Send nothing more."""
        self._stop.set()

    async def run(self) -> None:
        """Send until stopped, then wait for what is in flight."""
        start, number = time.monotonic(), 0
        while not self._stop.is_set():
            jitter = self._random.uniform(-JITTER, JITTER) * self._interval
            due = start + number * self._interval + jitter
            if not await self._stopped_within(due - time.monotonic()):
                self._launch(number, make_order(self._random, number))
                number += 1
        await asyncio.gather(*self._in_flight)

    async def _stopped_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._stop.wait(), max(seconds, 0.0))
        except TimeoutError:
            return False
        return True

    def _launch(self, number: int, order: dict[str, Any]) -> None:
        if len(self._in_flight) >= IN_FLIGHT_MOST:
            refusal = _Answer("not_sent", detail=f"{IN_FLIGHT_MOST} requests in flight")
            self._write(_record(number, _Moment.now(), refusal))
            return
        task = asyncio.create_task(self._send(number, order))
        self._in_flight.add(task)
        task.add_done_callback(self._in_flight.discard)

    async def _send(self, number: int, order: dict[str, Any]) -> None:
        started = _Moment.now()
        try:
            response = await self._client.post(self._url, json=order)
            body = response.json()
        except (httpx.HTTPError, ValueError) as error:
            self._write(_record(number, started, _Answer("unreachable", detail=type(error).__name__)))
            return
        outcome, detail = judge(order, response.status_code, body)
        answer = _Answer(
            outcome,
            response.status_code,
            degraded=bool(body.get("degraded")),
            calls=tuple(body.get("calls", ())),
            trace_id=body.get("trace_id", ""),
            detail=detail,
        )
        self._write(_record(number, started, answer))

    def _write(self, record: RequestRecord) -> None:
        self._out.write(json.dumps(asdict(record)) + "\n")
        self._out.flush()


@dataclass(frozen=True, slots=True)
class _Answer:
    outcome: Outcome
    status: int | None = None
    degraded: bool = False
    calls: tuple[str, ...] = ()
    trace_id: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class _Moment:
    monotonic_ns: int
    unix_nano: int

    @classmethod
    def now(cls) -> _Moment:
        return cls(time.monotonic_ns(), time.time_ns())


def _record(number: int, started: _Moment, answer: _Answer) -> RequestRecord:
    ended = _Moment.now()
    return RequestRecord(
        number=number,
        start_monotonic_ns=started.monotonic_ns,
        end_monotonic_ns=ended.monotonic_ns,
        start_unix_nano=started.unix_nano,
        end_unix_nano=ended.unix_nano,
        latency_ms=round((ended.monotonic_ns - started.monotonic_ns) / 1e6, 3),
        status=answer.status,
        outcome=answer.outcome,
        degraded=answer.degraded,
        calls=answer.calls,
        trace_id=answer.trace_id,
        detail=answer.detail,
    )


def read_log(path: Path) -> list[RequestRecord]:
    """Return the requests in a ``load.jsonl``, without a last line that is still being written."""
    lines = path.read_bytes().splitlines(keepends=True)
    return [RequestRecord.parse(line) for line in lines if line.endswith(b"\n")]


async def generate(url: str, rate: float, seed: int, out: Path) -> None:
    """Run a generator against ``url`` until SIGTERM or SIGINT."""
    limits = httpx.Limits(max_connections=IN_FLIGHT_MOST, max_keepalive_connections=32)
    with out.open("w", encoding="utf-8") as file:
        async with httpx.AsyncClient(timeout=TIMEOUT_SECONDS, limits=limits) as client:
            generator = LoadGenerator(client, url, rate, seed, file)
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, generator.stop)
            await generator.run()


def main() -> None:
    """Run the generator from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--url", required=True)
    parser.add_argument("--rate", type=float, required=True, help="requests a second")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    asyncio.run(generate(options.url, options.rate, options.seed, options.out))


if __name__ == "__main__":
    main()
