"""SLOs: what an application uses of them. The controller's parts are in the submodules.

```python
from pasta_otel import slo

recommendations = slo.breaker("recommendations", slow_call_seconds=0.2)

@slo.handler("recommendations")
def degraded(on: bool) -> None: ...

if slo.flag("degrade.recommendations", default=False): ...
items = recommendations.call(fetch, user)
```
"""

from __future__ import annotations

import os
import ssl
import threading
from collections.abc import Callable
from typing import Any, TypeVar, overload

from opentelemetry.metrics import Meter, get_meter
from opentelemetry.trace import Tracer, get_tracer

from pasta_otel import semconv
from pasta_otel.clock import Clock
from pasta_otel.slo.breaker import BreakerConfig, BreakerState, CircuitBreaker, CircuitOpenError
from pasta_otel.slo.runtime import Runtime, from_environment

__all__ = [
    "BreakerConfig",
    "BreakerState",
    "CircuitBreaker",
    "CircuitOpenError",
    "breaker",
    "configure",
    "flag",
    "handler",
    "shutdown",
    "wait_ready",
]

T = TypeVar("T")
C = TypeVar("C", bound=Callable[..., Any])
_runtime: Runtime | None = None
_making = threading.Lock()


@overload
def flag(name: str) -> bool: ...
@overload
def flag(name: str, default: T) -> T: ...
def flag(name: str, default: Any = False) -> Any:
    """Return a flag's value from the in-process snapshot; never does I/O, never waits, never raises.

    The first call starts the background poller and returns the default; ``wait_ready`` waits for real values.

    Args:
        name: The flag, e.g. ``degrade.recommendations``.
        default: What counts while the flag is unknown, expired or of another type than this default.
    """
    runtime = _runtime
    return (runtime if runtime is not None else _started()).flags.get(name, default)


def handler(name: str, default: Any = False) -> Callable[[C], C]:
    """Register the decorated function (sync or async) to be called with the new value whenever the flag changes.

    It runs on a thread of its own, or, if it is a coroutine function registered inside a running loop, on that loop.

    Args:
        name: A dependency (``recommendations`` means ``degrade.recommendations``) or a flag with its dot.
        default: Value while the flag is unknown or expired.
    """
    key = name if "." in name else semconv.FLAG_DEGRADE_PREFIX + name

    def register(callback: C) -> C:
        _started().handlers.register(key, callback, default)
        return callback

    return register


def breaker(name: str, **config: Any) -> CircuitBreaker:
    """Return this process's breaker of that name, which the flag ``degrade.<name>`` opens.

    Args:
        name: The dependency.
        config: Fields of ``BreakerConfig``, given by the first caller.

    Raises:
        InputError: A threshold is bad, or differs from what the breaker was made with.
    """
    return _started().breaker(name, config)


def wait_ready(seconds: float = 3.0) -> bool:
    """Wait until the controller has answered, for start-up code that wants to begin with real values.

    Polls that fail meanwhile are repeated.

    Args:
        seconds: Longest wait; all of it passes when there is no controller.

    Returns:
        Whether it answered; if not, flags are their callers' defaults until it does.
    """
    return _started().flags.wait_ready(seconds)


def configure(  # noqa: PLR0913 - keyword settings, all optional
    *,
    url: str | None = None,
    token: str | None = None,
    poll_seconds: float | None = None,
    ttl_seconds: float | None = None,
    tls: ssl.SSLContext | None = None,
    tracer: Tracer | None = None,
    meter: Meter | None = None,
    clock: Clock | None = None,
) -> None:
    """Set up by arguments; what is not given comes from the ``PASTA_*`` variables, the token too.

    Breakers and handlers made before stay in use and follow the new controller. ``token=""`` sends none.

    Raises:
        InputError: A time is not above 0 s.
    """
    global _runtime  # noqa: PLW0603 - as in _install
    made = from_environment(
        os.environ,
        tracer or get_tracer(semconv.SCOPE),
        meter or get_meter(semconv.SCOPE),
        url=url,
        token=token,
        poll_seconds=poll_seconds,
        ttl_seconds=ttl_seconds,
        tls=tls,
        clock=clock,
    )
    with _making:
        before = _runtime
        if before is not None:
            before.stop()
            made.adopt(before)
        _runtime = made
        made.start()


def shutdown() -> None:
    """Stop the background threads and forget flags, handlers and breakers; the next use starts afresh."""
    global _runtime
    with _making:
        runtime, _runtime = _runtime, None
    if runtime is not None:
        runtime.stop()


def _started() -> Runtime:
    return _runtime or _install()


def _install() -> Runtime:
    global _runtime  # noqa: PLW0603 - one runtime a process, behind three functions
    with _making:
        if _runtime is None:
            _runtime = from_environment(os.environ, get_tracer(semconv.SCOPE), get_meter(semconv.SCOPE))
            _runtime.start()
        return _runtime
