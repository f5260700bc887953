"""The forwarder's decisions, against a receiver that answers as a script says."""

from __future__ import annotations

import time
from contextlib import contextmanager

import pytest

from pasta_otel.errors import InputError, StateError
from pasta_otel.exporters.forward import ForwardConfig, Forwarder
from pasta_otel.exporters.ledger import POINTS, Ledger
from pasta_otel.exporters.otlp.config import OtlpConfig
from pasta_otel.exporters.otlp.transport import Reply
from pasta_otel.exporters.receiver import Intake, PointBatch
from tests.support import case, wait_for
from tests.telemetry import request, span, spans_of


class Script:
    """A transport that answers from a list, then always with success."""

    def __init__(self, *replies: Reply, delay_s: float = 0.0):
        self.replies, self.delay_s = list(replies), delay_s
        self.bodies: list[bytes] = []
        self.aborted = False

    def post(self, body: bytes, deadline: float) -> Reply:
        end = time.monotonic() + self.delay_s
        assert deadline > time.monotonic()
        while time.monotonic() < end and not self.aborted:
            time.sleep(0.005)
        if self.aborted:
            return Reply("retry", "connection")
        self.bodies.append(body)
        return self.replies.pop(0) if self.replies else Reply("ok")

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None: ...

    def after_fork(self) -> None: ...


@contextmanager
def forwarding(script: Script, **options):
    ledger = Ledger(["upstream"])
    options = {"retry_initial_s": 0.01, "retry_max_s": 0.02, **options}
    forwarder = Forwarder(ForwardConfig(OtlpConfig(), **options), ledger, transports={"traces": script})
    yield forwarder, Intake([forwarder], ledger), ledger
    forwarder.stop(1.0)
    assert ledger.snapshot().balanced
    assert ledger.snapshot().sinks["upstream"].pending == 0


def ten() -> bytes:
    return request(*(span(identifier=number + 1) for number in range(10))).SerializeToString()


def settled(ledger: Ledger):
    return wait_for(lambda: (account := ledger.snapshot().sinks["upstream"]).pending == 0 and account)


@pytest.mark.case("O08")
def test_partial_success_is_counted_and_never_sent_again():
    for entry, delivered in zip(
        case("O08", "responses.json")[:4], case("O08", "expected.json")["delivered"], strict=True
    ):
        partial = entry["body"].get("partialSuccess", {})
        script = Script(
            Reply("ok", rejected=int(partial.get("rejectedSpans", 0)), message=partial.get("errorMessage", ""))
        )
        with forwarding(script) as (forwarder, intake, ledger):
            intake.traces(ten())
            forwarder.start()
            account = settled(ledger)
        assert account.ok == delivered
        assert sum(account.dropped.values()) == 10 - delivered
        assert len(script.bodies) == 1


def test_a_transient_failure_is_sent_again_unchanged():
    script = Script(Reply("retry", "http_503"), Reply("retry", "connection"))
    with forwarding(script) as (forwarder, intake, ledger):
        body = ten()
        intake.traces(body)
        forwarder.start()
        account = settled(ledger)
    assert (account.ok, script.bodies) == (10, [body] * 3)


def test_upstream_says_how_long_to_wait():
    script = Script(Reply("retry", "http_429", retry_after_s=0.3))
    with forwarding(script) as (forwarder, intake, ledger):
        intake.traces(ten())
        forwarder.start()
        begin = time.monotonic()
        settled(ledger)
    assert time.monotonic() - begin >= 0.3


def test_a_refusal_is_dropped_at_once():
    script = Script(Reply("refused", "http_400"))
    with forwarding(script) as (forwarder, intake, ledger):
        intake.traces(ten())
        forwarder.start()
        account = settled(ledger)
    assert dict(account.dropped) == {"refused_upstream": 10}
    assert len(script.bodies) == 1


def test_retrying_ends_at_its_deadline():
    script = Script(*[Reply("retry", "http_503")] * 1000)
    with forwarding(script, retry_deadline_s=0.1) as (forwarder, intake, ledger):
        intake.traces(ten())
        forwarder.start()
        account = settled(ledger)
    assert dict(account.dropped) == {"retry_deadline": 10}


def test_waiting_batches_travel_together():
    script = Script()
    with forwarding(script) as (forwarder, intake, ledger):
        for _ in range(5):
            intake.traces(ten())
        forwarder.start()
        settled(ledger)
    assert len(script.bodies) == 1
    assert len(spans_of(script.bodies)) == 50


def test_joining_stops_at_the_size_limit():
    script = Script()
    with forwarding(script, request_bytes=len(ten()) * 2) as (forwarder, intake, ledger):
        for _ in range(5):
            intake.traces(ten())
        forwarder.start()
        settled(ledger)
    assert [len(spans_of([body])) for body in script.bodies] == [20, 20, 10]


def test_the_queue_is_bounded_in_bytes_and_the_application_is_not_pushed_back():
    script = Script()
    with forwarding(script, queue_bytes=len(ten()) * 2) as (forwarder, intake, ledger):
        for _ in range(5):
            assert forwarder.has_room(10)
            intake.traces(ten())
        forwarder.start()
        account = settled(ledger)
    assert (account.ok, dict(account.dropped)) == (20, {"queue_full": 30})


def test_a_hung_upstream_does_not_hold_the_stop():
    script = Script(delay_s=30)
    with forwarding(script) as (forwarder, intake, ledger):
        intake.traces(ten())
        forwarder.start()
        wait_for(lambda: forwarder._in_hand is not None)
        intake.traces(ten())
        begin = time.monotonic()
        forwarder.stop(0.2)
        assert time.monotonic() - begin < 5
    assert dict(ledger.snapshot().sinks["upstream"].dropped) == {"shutdown": 20}


def test_a_forwarder_that_never_started_drops_what_it_holds():
    with forwarding(Script()) as (forwarder, intake, ledger):
        intake.traces(ten())
        forwarder.stop()
    assert dict(ledger.snapshot().sinks["upstream"].dropped) == {"shutdown": 10}


def test_points_have_their_own_account_and_destination():
    spans, points, script = Ledger(["upstream"]), Ledger(["upstream"], names=POINTS), Script()
    forwarder = Forwarder(
        ForwardConfig(OtlpConfig()), spans, point_ledger=points, transports={"traces": Script(), "metrics": script}
    )
    points.receive(3)
    assert forwarder.offer_points(PointBatch(b"", 3))
    forwarder.start()
    wait_for(lambda: points.snapshot().sinks["upstream"].ok == 3)
    forwarder.stop()
    nowhere = Forwarder(ForwardConfig(OtlpConfig()), spans, point_ledger=points, transports={"traces": Script()})
    points.receive(2)
    assert not nowhere.offer_points(PointBatch(b"", 2))
    nowhere.stop()
    assert dict(points.snapshot().sinks["upstream"].dropped) == {"no_destination": 2}


def test_it_starts_once():
    with forwarding(Script()) as (forwarder, _, _):
        forwarder.start()
        with pytest.raises(StateError):
            forwarder.start()


def test_a_bound_that_makes_no_sense_names_its_field():
    with pytest.raises(InputError) as error:
        ForwardConfig(OtlpConfig(), queue_bytes=0)
    assert error.value.field == "forward.queue_bytes"


def test_a_transport_that_raises_costs_its_batch_only():
    class Broken(Script):
        def post(self, body: bytes, deadline: float) -> Reply:
            if not self.bodies:
                self.bodies.append(body)
                raise RuntimeError("broken")
            return super().post(body, deadline)

    with forwarding(Broken()) as (forwarder, intake, ledger):
        intake.traces(ten())
        forwarder.start()
        settled(ledger)
        intake.traces(ten())
        account = settled(ledger)
    assert (account.ok, dict(account.dropped)) == (10, {"refused_upstream": 10})
