"""A burning SLO raises the capture tier of an instrumented application, and gives it back."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from pasta_otel import slo
from pasta_otel.app.capture_flag import follow_capture_flag
from pasta_otel.clock import SystemClock
from pasta_otel.exporters.api.app import ApiProviders, create_app
from pasta_otel.exporters.api.server import ApiServer
from pasta_otel.pipeline import CaptureState
from pasta_otel.slo.actions.flagbook import CAPTURE_DEFAULT, FlagBook
from tests.support import wait_for

KEY = "pasta.capture"


class Flags:
    """The API's flag provider over a book; nobody pins here."""

    def __init__(self, book: FlagBook) -> None:
        self.evaluate, self.evaluate_all = book.evaluate, book.evaluate_all

    def pin(self, key: str, value: Any, by: str, reason: str) -> Any:
        raise NotImplementedError

    def unpin(self, key: str, by: str) -> Any:
        raise NotImplementedError


@pytest.fixture
def served():
    clock = SystemClock()
    book = FlagBook({KEY: CAPTURE_DEFAULT}, clock)
    server = ApiServer(create_app(ApiProviders(flags=Flags(book))), port=0)
    server.start()
    yield book, server.url, clock
    slo.shutdown()
    server.stop()


def test_the_tier_follows_the_controllers_flag_and_goes_back(served) -> None:
    book, url, clock = served
    capture = CaptureState(service="model")
    slo.configure(url=url, poll_seconds=0.05)
    assert follow_capture_flag(capture, {"PASTA_CONTROLLER_URL": url})
    now = clock.unix_nano()
    value = {"tier": 3, "targets": [{"service": "model", "operation": "POST /risk"}], "until": None}
    book.set(KEY, value, now, now + 60_000_000_000)
    wait_for(lambda: capture.tier("POST /risk") == 3)
    assert capture.tier("GET /healthz") == 2
    book.clear(KEY)
    wait_for(lambda: capture.tier("POST /risk") == 2)


def test_the_controller_serves_the_tier_that_an_application_works_at_by_itself(served) -> None:
    book, _, _ = served
    assert book.value(KEY)["tier"] == CaptureState().tier()


def test_without_a_named_controller_nobody_is_asked() -> None:
    before = threading.active_count()
    assert not follow_capture_flag(CaptureState(), {})
    assert threading.active_count() == before
