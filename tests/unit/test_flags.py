"""Flags in the application: snapshot, TTLs, breakers driven by flags, on a clock that the test moves."""

from __future__ import annotations

import logging

import pytest
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.trace import NoOpTracerProvider

from pasta_otel import slo
from pasta_otel.errors import InputError
from pasta_otel.slo.actions.ofrep_client import OfrepTransport, parse_flags
from pasta_otel.slo.actions.times import from_rfc3339, to_rfc3339
from pasta_otel.slo.breaker import BreakerState, CircuitOpenError
from pasta_otel.slo.flags import FlagAnswer, RemoteFlag
from pasta_otel.slo.runtime import NoTransport, Runtime, from_environment

FLAG = "degrade.recommendations"
START_UNIX_NANO = 1_800_000_000_000_000_000


class ManualClock:
    def __init__(self):
        self.seconds = 0.0

    def monotonic_ns(self):
        return int(self.seconds * 1e9)

    def unix_nano(self):
        return START_UNIX_NANO + int(self.seconds * 1e9)


class Controller:
    """A controller in memory: what it tells, or its absence."""

    def __init__(self):
        self.flags, self.etag, self.down, self.unix_nano = {}, "1", False, 0

    def tell(self, **flags):
        self.flags = {name.replace("__", "."): flag for name, flag in flags.items()}
        self.etag = str(int(self.etag) + 1)

    def fetch(self, etag):
        if self.down:
            raise ConnectionRefusedError
        return FlagAnswer(None if etag == self.etag else self.flags, self.etag, self.unix_nano)

    def close(self): ...


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def controller():
    return Controller()


@pytest.fixture
def runtime(clock, controller):
    return Runtime(
        controller,
        poll_seconds=0.5,
        ttl_seconds=10,
        tracer=NoOpTracerProvider().get_tracer("t"),
        meter=NoOpMeterProvider().get_meter("t"),
        clock=clock,
    )


def test_an_unknown_flag_is_the_callers_default(runtime):
    assert runtime.flags.get(FLAG, False) is False
    assert runtime.flags.get(FLAG, True) is True


def test_a_value_holds_without_a_controller_until_its_ttl_then_the_default_counts(runtime, controller, clock):
    controller.tell(degrade__recommendations=RemoteFlag(True))
    assert runtime.flags.poll()
    controller.down = True
    clock.seconds = 9.9
    assert not runtime.flags.poll()
    assert runtime.flags.get(FLAG, False) is True
    clock.seconds = 10
    assert runtime.flags.get(FLAG, False) is False


def test_an_unchanged_answer_renews_the_hold_but_not_the_flags_own_end(runtime, controller, clock):
    controller.tell(
        degrade__recommendations=RemoteFlag(True, expires_unix_nano=START_UNIX_NANO + 25 * 10**9),
        degrade__other=RemoteFlag(True),
    )
    for clock.seconds in (0, 8, 16, 24):
        runtime.flags.poll()
    assert (runtime.flags.get(FLAG, False), runtime.flags.get("degrade.other", False)) == (True, True)
    clock.seconds = 25
    assert (runtime.flags.get(FLAG, False), runtime.flags.get("degrade.other", False)) == (False, True)


@pytest.mark.parametrize("skew", [-3600, 0, 2, 3600])
def test_an_end_counts_by_the_controllers_clock_when_the_two_disagree(runtime, controller, clock, skew):
    controller.unix_nano = START_UNIX_NANO + skew * 10**9
    controller.tell(degrade__recommendations=RemoteFlag(True, controller.unix_nano + 8 * 10**9))
    runtime.flags.poll()
    local = skew if abs(skew) <= 3 else 0  # seconds: a small difference may be the date's resolution
    clock.seconds = 7.9 + local
    assert runtime.flags.get(FLAG, False) is True
    clock.seconds = 8 + local
    assert runtime.flags.get(FLAG, False) is False


def test_a_value_of_another_type_than_the_default_is_not_taken(runtime, controller):
    controller.tell(degrade__recommendations=RemoteFlag("yes"), pasta__capture=RemoteFlag({"tier": 3, "targets": []}))
    runtime.flags.poll()
    assert runtime.flags.get(FLAG, False) is False
    assert runtime.flags.get("pasta.capture", {}) == {"tier": 3, "targets": []}
    runtime.flags.get("pasta.capture", {})["tier"] = 0  # the caller's copy
    assert runtime.flags.get("pasta.capture", None) == {"tier": 3, "targets": []}
    controller.tell(degrade__level=RemoteFlag(1), degrade__on=RemoteFlag(True))
    runtime.flags.poll()
    assert runtime.flags.get("degrade.level", 0.5) == 1
    assert runtime.flags.get("degrade.on", 0) == 0


def test_the_flag_opens_its_breaker_once_and_only_probes_close_it(runtime, controller, clock):
    breaker = runtime.breaker("recommendations", {"open_seconds": 5, "half_open_max_calls": 2})
    controller.tell(degrade__recommendations=RemoteFlag(True, since="a"))
    runtime.flags.poll()
    assert breaker.state is BreakerState.OPEN
    with pytest.raises(CircuitOpenError):
        breaker.call(lambda: None)

    clock.seconds = 5
    with pytest.raises(ValueError), breaker.guard():
        raise ValueError
    assert breaker.state is BreakerState.OPEN  # any_failure, with a fresh timer
    clock.seconds = 9
    with pytest.raises(CircuitOpenError):
        breaker.call(lambda: None)

    clock.seconds = 10
    breaker.call(lambda: None)
    breaker.call(lambda: None)
    runtime.flags.poll()
    assert breaker.state is BreakerState.CLOSED  # the flag still holds, but its opening is spent
    controller.tell(degrade__recommendations=RemoteFlag(True, since="b"))
    runtime.flags.poll()
    assert breaker.state is BreakerState.OPEN


def test_a_cleared_flag_leaves_an_open_breaker_to_its_probes_but_a_persons_pin_closes_it(runtime, controller):
    breaker = runtime.breaker("recommendations", {})
    controller.tell(degrade__recommendations=RemoteFlag(True, since="a"))
    runtime.flags.poll()
    controller.tell(degrade__recommendations=RemoteFlag(False))
    runtime.flags.poll()
    assert breaker.state is BreakerState.OPEN
    controller.tell(degrade__recommendations=RemoteFlag(True, since="b"))
    runtime.flags.poll()
    controller.tell(degrade__recommendations=RemoteFlag(False, pinned=True))
    runtime.flags.poll()
    assert breaker.state is BreakerState.CLOSED


def drive(runtime, controller, flag):
    controller.tell(degrade__recommendations=flag)
    runtime.flags.poll()


ON, OFF = RemoteFlag(True, since="pin", pinned=True), RemoteFlag(False, since="pin", pinned=True)
DEGRADED, UNSET = RemoteFlag(True, since="a"), RemoteFlag(False)


def fail(breaker):
    while breaker.state is BreakerState.CLOSED:
        with pytest.raises(ZeroDivisionError), breaker.guard():
            1 / 0  # noqa: B018 - the failure of a call


@pytest.mark.parametrize(
    "before",
    [
        pytest.param([ON, UNSET], id="a pin that was given back"),
        pytest.param([DEGRADED, UNSET], id="a degradation that has ended"),
        pytest.param([DEGRADED], id="a degradation"),
        pytest.param([ON], id="a pin"),
        pytest.param([OFF, UNSET, ON, UNSET], id="a pin after another pin to off"),
        pytest.param([], id="its own rates"),
    ],
)
def test_a_pin_to_off_closes_whatever_opened_the_breaker(runtime, controller, before):
    breaker = runtime.breaker("recommendations", {})
    for flag in before:
        drive(runtime, controller, flag)
    if not before:
        fail(breaker)
    assert breaker.state is BreakerState.OPEN
    drive(runtime, controller, OFF)
    assert breaker.state is BreakerState.CLOSED


def test_a_pin_to_off_closes_a_half_open_breaker_too(runtime, controller, clock):
    breaker = runtime.breaker("recommendations", {"open_seconds": 5})
    drive(runtime, controller, DEGRADED)
    drive(runtime, controller, UNSET)
    clock.seconds = 6
    breaker.call(lambda: None)
    assert breaker.state is BreakerState.HALF_OPEN
    drive(runtime, controller, OFF)
    assert breaker.state is BreakerState.CLOSED


def test_a_pin_to_off_closes_once_and_the_rates_may_open_it_again(runtime, controller):
    breaker = runtime.breaker("recommendations", {})
    drive(runtime, controller, OFF)
    fail(breaker)
    drive(runtime, controller, OFF)
    assert breaker.state is BreakerState.OPEN
    drive(runtime, controller, UNSET)
    drive(runtime, controller, OFF)
    assert breaker.state is BreakerState.CLOSED


@pytest.mark.parametrize("mode", ["disable", "force_open", "metrics_only"])
def test_no_flag_undoes_what_a_person_set_on_the_breaker_itself(runtime, controller, mode):
    breaker = runtime.breaker("recommendations", {})
    getattr(breaker, mode)()
    before = breaker.state
    for flag in (DEGRADED, UNSET, ON, OFF):
        drive(runtime, controller, flag)
        assert breaker.state is before


def test_a_breaker_made_while_the_flag_is_on_starts_open(runtime, controller):
    controller.tell(degrade__recommendations=RemoteFlag(True, since="a"))
    runtime.flags.poll()
    assert runtime.breaker("recommendations", {}).state is BreakerState.OPEN


def test_one_name_is_one_breaker_with_one_configuration(runtime):
    first = runtime.breaker("recommendations", {"open_seconds": 5})
    assert runtime.breaker("recommendations", {}) is first
    with pytest.raises(InputError, match="breaker recommendations: already made with other thresholds"):
        runtime.breaker("recommendations", {"open_seconds": 6})
    with pytest.raises(InputError, match="unexpected keyword argument 'open_secs'"):
        runtime.breaker("x", {"open_secs": 6})


def test_bad_settings_are_named_and_the_service_goes_on(caplog):
    environ = {"PASTA_CONTROLLER_URL": "ftp://nowhere", "PASTA_FLAG_POLL_SECONDS": "often"}
    tracer, meter = NoOpTracerProvider().get_tracer("t"), NoOpMeterProvider().get_meter("t")
    with caplog.at_level(logging.ERROR):
        runtime = from_environment(environ, tracer, meter)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "PASTA_FLAG_POLL_SECONDS",
        "PASTA_CONTROLLER_URL",
    ]
    assert not runtime.flags.poll()
    assert runtime.flags.get(FLAG, False) is False
    with pytest.raises(ConnectionError):
        NoTransport().fetch("")


def test_a_missing_controller_is_logged_once_not_once_a_poll(runtime, controller, caplog):
    controller.down = True
    with caplog.at_level(logging.INFO):
        for _ in range(5):
            runtime.flags.poll()
        controller.down = False
        runtime.flags.poll()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


@pytest.mark.parametrize("document", [None, [], {}, {"flags": {}}, {"flags": None}])
def test_an_answer_that_is_no_ofrep_document_is_refused(document):
    with pytest.raises(ValueError, match="list `flags`"):
        parse_flags(document)


def test_one_bad_flag_does_not_cost_the_others():
    good = {"key": "degrade.a", "value": True, "metadata": {"expires_at": "2027-01-15T08:00:00Z", "since": "x"}}
    bad = [
        3,
        {"key": 7, "value": True},
        {"key": "degrade.b", "errorCode": "GENERAL"},
        {"key": "degrade.c", "value": True, "metadata": {"expires_at": "soon"}},
        {"key": "degrade.d", "value": True, "metadata": {"expires_at": 12}},
        {"key": "degrade.e", "value": True, "metadata": {"expires_at": "2027-01-15T08:00:00"}},
    ]
    assert parse_flags({"flags": [*bad, good]}) == {"degrade.a": RemoteFlag(True, START_UNIX_NANO, "x", False)}


@pytest.mark.parametrize("url", ["", "localhost:4320", "ftp://x", "http://", "http://h:port"])
def test_a_bad_controller_url_is_refused_by_name(url):
    with pytest.raises(InputError, match="PASTA_CONTROLLER_URL"):
        OfrepTransport(url)


def test_times_survive_the_trip_through_text():
    for unix_nano in (0, 1_000, START_UNIX_NANO, START_UNIX_NANO + 123_456_000):
        assert from_rfc3339(to_rfc3339(unix_nano)) == unix_nano


def test_the_public_names_are_those_of_the_reference():
    assert sorted(slo.__all__) == slo.__all__
    assert all(hasattr(slo, name) for name in slo.__all__)
