"""What one application process holds of the SLO side: flags, handlers and named breakers, made on first use."""

from __future__ import annotations

import logging
import math
import os
import ssl
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from opentelemetry.metrics import Meter
from opentelemetry.trace import Tracer

from pasta_otel import semconv
from pasta_otel.clock import Clock, SystemClock
from pasta_otel.errors import InputError
from pasta_otel.slo.breaker import BreakerConfig, BreakerState, BreakerTelemetry, CircuitBreaker
from pasta_otel.slo.flags import FlagAnswer, FlagClient, FlagTransport
from pasta_otel.slo.handlers import HandlerDispatcher

_log = logging.getLogger(__name__)


class NoTransport:
    """Stand in for a controller URL that is unusable: every poll fails, every flag is its default."""

    def fetch(self, etag: str) -> FlagAnswer:
        """Raise: there is nobody to ask."""
        raise ConnectionError(f"no controller URL, etag {etag!r}")

    def close(self) -> None:
        """Do nothing."""


class Runtime:
    """Flags, handlers and breakers of one process, joined.

    Args:
        transport: Where flags come from.
        poll_seconds: Pause between two polls.
        ttl_seconds: How long values hold without a controller.
        tracer: Where breaker transitions are reported.
        meter: Where breakers and polls are counted.
        clock: Time.
    """

    def __init__(  # noqa: PLR0913 - the world as keyword parameters
        self,
        transport: FlagTransport,
        *,
        poll_seconds: float,
        ttl_seconds: float,
        tracer: Tracer,
        meter: Meter,
        clock: Clock | None = None,
    ) -> None:
        clock = clock or SystemClock()
        self._clock = clock
        self._telemetry = BreakerTelemetry(tracer, meter)
        self._breakers: dict[str, CircuitBreaker] = {}
        self._opened_by: dict[str, str] = {}  # breaker name -> `since` of the flag that last opened it
        self._closed_by_pin: set[str] = set()  # breakers that the pin of this moment has closed
        self._lock = threading.Lock()
        self.flags = FlagClient(
            transport,
            clock,
            poll_seconds=poll_seconds,
            ttl_seconds=ttl_seconds,
            meter=meter,
            on_view=self._on_view,
        )
        self.handlers = HandlerDispatcher(self.flags, clock.monotonic_ns)

    def start(self) -> None:
        """Start the poller, and again in every forked child."""
        self.flags.start()
        self.handlers.start()
        reference = weakref.ref(self)

        def in_child() -> None:
            runtime = reference()
            if runtime is not None:
                runtime.restart_after_fork()

        os.register_at_fork(after_in_child=in_child)

    def adopt(self, before: Runtime) -> None:
        """Take over the breakers and handlers of a runtime that was stopped: the program holds on to them."""
        with self._lock:
            self._breakers = {**before._breakers, **self._breakers}
            self._opened_by, self._closed_by_pin = dict(before._opened_by), set(before._closed_by_pin)
        for breaker in self._breakers.values():
            breaker.report_to(self._telemetry)
        self.handlers.adopt(before.handlers)

    def stop(self) -> None:
        """Stop both threads."""
        self.flags.stop()
        self.handlers.stop()

    def restart_after_fork(self) -> None:
        """Renew locks and threads in the child."""
        self._lock = threading.Lock()
        for breaker in self._breakers.values():
            breaker.reset_after_fork()
        self.flags.restart_after_fork()
        self.handlers.restart_after_fork()

    def breaker(self, name: str, config: Mapping[str, Any]) -> CircuitBreaker:
        """Return the process's breaker of that name, made by the first caller's configuration.

        Raises:
            InputError: A threshold is bad, or differs from what the breaker was made with.
        """
        with self._lock:
            breaker = self._breakers.get(name)
            if breaker is None:
                breaker = CircuitBreaker(
                    name, _configure(name, config), monotonic_ns=self._clock.monotonic_ns, telemetry=self._telemetry
                )
                self._breakers = {**self._breakers, name: breaker}
            elif config and _configure(name, config) != breaker.config:
                raise InputError("already made with other thresholds", field=f"breaker {name}")
        self._drive(name, breaker)
        return breaker

    def breakers(self) -> Mapping[str, CircuitBreaker]:
        """Return the breakers by name."""
        return dict(self._breakers)

    def _on_view(self) -> None:
        for name, breaker in self._breakers.items():
            self._drive(name, breaker)
        self.handlers.wake()

    def _drive(self, name: str, breaker: CircuitBreaker) -> None:
        """Open the breaker once per degradation; close it once per pin to off, else let probes decide."""
        flag = self.flags.flag(semconv.FLAG_DEGRADE_PREFIX + name)
        if flag is None:
            return
        if flag.value is True and self._opened_by.get(name) != flag.since:
            self._opened_by[name] = flag.since
            breaker.open(f"{semconv.FLAG_DEGRADE_PREFIX}{name} is on", half_open_policy="any_failure")
        elif flag.value is False:
            self._opened_by.pop(name, None)
        if not (flag.value is False and flag.pinned):
            self._closed_by_pin.discard(name)
        elif name not in self._closed_by_pin:
            self._closed_by_pin.add(name)
            if breaker.state in {BreakerState.OPEN, BreakerState.HALF_OPEN}:  # else closed, or a person's by its call
                breaker.close(f"{semconv.FLAG_DEGRADE_PREFIX}{name} is pinned to off")


def _configure(name: str, config: Mapping[str, Any]) -> BreakerConfig:
    try:
        return BreakerConfig(**config)
    except TypeError as error:
        raise InputError(str(error).replace("BreakerConfig.__init__() ", ""), field=f"breaker {name}") from error


def from_environment(  # noqa: PLR0913 - settings, each of which may be given instead
    environ: Mapping[str, str],
    tracer: Tracer,
    meter: Meter,
    *,
    url: str | None = None,
    token: str | None = None,
    poll_seconds: float | None = None,
    ttl_seconds: float | None = None,
    tls: ssl.SSLContext | None = None,
    clock: Clock | None = None,
) -> Runtime:
    """Return a runtime by the ``PASTA_*`` variables, as far as nothing else is given.

    A bad variable is logged by name and its default taken.

    Raises:
        InputError: A time that was given is not above 0 s.
    """
    poll = _checked("poll_seconds", poll_seconds) or _seconds(environ, "PASTA_FLAG_POLL_SECONDS", 0.5)
    ttl = _checked("ttl_seconds", ttl_seconds) or _seconds(environ, "PASTA_FLAG_TTL_SECONDS", 10.0)
    url = environ.get("PASTA_CONTROLLER_URL", "http://127.0.0.1:4320") if url is None else url
    token = environ.get("PASTA_API_TOKEN", "").strip() if token is None else token
    transport = make_transport(url, token, tls)
    return Runtime(transport, poll_seconds=poll, ttl_seconds=ttl, tracer=tracer, meter=meter, clock=clock)


def _checked(name: str, seconds: float | None) -> float | None:
    if seconds is not None and not 0 < seconds < math.inf:
        raise InputError(f"expected seconds above 0, got {seconds!r}", field=name)
    return seconds


def make_transport(
    url: str, token: str = "", tls: ssl.SSLContext | None = None, fallback: Callable[[], FlagTransport] = NoTransport
) -> FlagTransport:
    """Return a transport for the URL; a bad URL is logged and gives the fallback: it must not stop the service."""
    if not url:  # set to nothing on purpose: there is no controller
        return fallback()
    from pasta_otel.slo.actions.ofrep_client import OfrepTransport  # noqa: PLC0415 - http.client loads on first use

    try:
        return OfrepTransport(url, token=token, tls=tls)
    except InputError as error:
        _log.error("%s; flags keep their defaults", error)
        return fallback()


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if 0 < value < math.inf:
        return value
    _log.error("%s: expected seconds above 0, got %r; using %s", name, text, default)
    return default
