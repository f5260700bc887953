"""The load generator: orders repeat with their seed, every answer is checked, every request is logged."""

from __future__ import annotations

import asyncio
import json
import random

import httpx
import pytest

from pasta_otel.demo.load import LoadGenerator, judge, make_order, read_log
from pasta_otel.demo.services.catalogue import PRICES_CENTS, total_cents


def right_answer(order: dict) -> dict:
    have = {sku for sku, _ in order["items"]}
    return {
        "order_id": order["order_id"],
        "total_cents": total_cents([(sku, n) for sku, n in order["items"]]),
        "risk": 0.4,
        "authorization": "a1",
        "recommendations": [sku for sku in PRICES_CENTS if sku not in have][:3],
        "degraded": False,
        "calls": ["model", "payment", "recommendations"],
        "trace_id": "0" * 31 + "1",
    }


def test_a_seed_gives_the_same_orders_again():
    def orders(seed):
        return [make_order(random.Random(seed), n) for n in range(20)]

    assert orders(7) == orders(7)
    assert orders(7) != orders(8)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ""),
        ({"order_id": "o-9"}, "order_id differs"),
        ({"total_cents": 1}, "total_cents is wrong"),
        ({"risk": 1.5}, "risk is not in 0..1"),
        ({"authorization": ""}, "no authorization"),
        ({"recommendations": []}, "recommendations do not fit degraded"),
        ({"degraded": True}, "recommendations do not fit degraded"),
    ],
)
def test_an_answer_must_fit_its_order(change, words):
    order = make_order(random.Random(1), 1)
    outcome = judge(order, 201, {**right_answer(order), **change})
    assert outcome == (("invalid", words) if words else ("ok", ""))


def test_recommending_what_was_ordered_is_invalid():
    order = make_order(random.Random(1), 1)
    answer = right_answer(order)
    answer["recommendations"] = [order["items"][0][0], *answer["recommendations"][:2]]
    assert judge(order, 201, answer) == ("invalid", "recommends what was ordered")


async def test_every_request_is_logged_with_its_outcome(tmp_path):
    def shop(request: httpx.Request) -> httpx.Response:
        order = json.loads(request.content)
        number = int(order["order_id"][2:])
        if number % 4 == 1:
            return httpx.Response(502, json={"error": "payment answered 500", "calls": ["model", "payment"]})
        if number % 4 == 2:
            raise httpx.ConnectError("refused")
        return httpx.Response(201, json=right_answer(order))

    path = tmp_path / "load.jsonl"
    with path.open("w") as file:
        async with httpx.AsyncClient(transport=httpx.MockTransport(shop)) as client:
            generator = LoadGenerator(client, "http://shop/orders", 200.0, 3, file)
            asyncio.get_running_loop().call_later(0.2, generator.stop)
            await generator.run()
    records = sorted(read_log(path), key=lambda record: record.number)
    assert [record.number for record in records] == list(range(len(records)))
    assert len(records) >= 4
    assert {(r.outcome, r.status, r.detail) for r in records} == {
        ("ok", 201, ""),
        ("failed", 502, "payment answered 500"),
        ("unreachable", None, "ConnectError"),
    }
    assert all(r.calls == ("model", "payment") for r in records if r.outcome == "failed")
    assert all(r.end_monotonic_ns >= r.start_monotonic_ns for r in records)


async def test_a_service_that_never_answers_bounds_what_is_in_flight(tmp_path, monkeypatch):
    monkeypatch.setattr("pasta_otel.demo.load.IN_FLIGHT_MOST", 3)
    release = asyncio.Event()

    async def hang(_: httpx.Request) -> httpx.Response:
        await release.wait()
        return httpx.Response(503, json={"error": "late"})

    path = tmp_path / "load.jsonl"
    with path.open("w") as file:
        async with httpx.AsyncClient(transport=httpx.MockTransport(hang)) as client:
            generator = LoadGenerator(client, "http://shop/orders", 500.0, 0, file)
            loop = asyncio.get_running_loop()
            loop.call_later(0.1, generator.stop)
            loop.call_later(0.15, release.set)
            await generator.run()
    outcomes = [record.outcome for record in read_log(path)]
    assert outcomes.count("failed") == 3
    assert outcomes.count("not_sent") > 0


def test_a_line_that_is_still_being_written_is_left_for_later(tmp_path):
    path = tmp_path / "load.jsonl"
    whole = json.dumps({"number": 0, "start_monotonic_ns": 1, "end_monotonic_ns": 2, "start_unix_nano": 3,
                        "end_unix_nano": 4, "latency_ms": 0.0, "status": 201, "outcome": "ok", "degraded": False,
                        "calls": ["model"], "trace_id": "", "detail": ""})  # fmt: skip
    path.write_text(whole + "\n" + whole[:40])
    assert [record.calls for record in read_log(path)] == [("model",)]
