"""``annotate("name")``: a region of the program's code as a span, where a span is being recorded anyway."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar, cast

from opentelemetry import context as context_api
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode

from pasta_otel import semconv
from pasta_otel.context import SPAN_KEY, RowSpan, current_context, set_current_context
from pasta_otel.model import AttributeValue

F = TypeVar("F", bound=Callable[..., Any])
_OPEN = context_api.create_key("pasta-annotate")


class _Tracers:
    """Our tracer of the provider in use; the SDK makes a tracer anew, with a lock, whenever it is asked for one."""

    def __init__(self) -> None:
        self.chosen: trace.TracerProvider | None = None
        self._known: tuple[trace.TracerProvider, trace.Tracer] | None = None

    def current(self) -> trace.Tracer:
        provider = self.chosen or trace.get_tracer_provider()
        known = self._known
        if known is None or known[0] is not provider:
            known = self._known = (provider, provider.get_tracer(semconv.SCOPE))
        return known[1]


_tracers = _Tracers()


def use_provider(provider: trace.TracerProvider | None) -> None:
    """Make regions with a provider that is not the global one; None = the global one."""
    _tracers.chosen = provider


class _Region(NamedTuple):
    """An entered region: who entered it, its span, and the context to go back to."""

    owner: object
    span: Span
    outer: Context


def _start(name: str, attributes: dict[str, AttributeValue]) -> Span | None:
    current = current_context().get(SPAN_KEY)
    if current is None:
        return None
    if type(current) is RowSpan:
        if not current.local_root.trace_flags.sampled:
            return None
    elif not isinstance(current, Span) or not current.is_recording():
        return None
    return _tracers.current().start_span(name, attributes=attributes)


def _finish(span: Span, error: BaseException | None) -> None:
    # An exception that ends a region on purpose (a closed generator, a cancelled task, an exit) is not its failure.
    if isinstance(error, Exception):
        kind = type(error).__qualname__
        span.record_exception(error)
        span.set_attribute(semconv.ERROR_TYPE, kind)
        span.set_status(Status(StatusCode.ERROR, f"{kind}: {error}"))
    span.end()


class annotate:  # noqa: N801 - reads as a verb: ``with annotate("rerank"):``
    """Mark a region: context manager (also ``async with``) or decorator of a function, coroutine or generator.

    Inside a recording span it makes a child span; elsewhere it does next to nothing. Exceptions pass through and are
    noted on the span.

    Args:
        name: Span name; keep it low in cardinality.
        attributes: Span attributes.
    """

    __slots__ = ("_attributes", "_name")

    def __init__(self, name: str, **attributes: AttributeValue) -> None:
        self._name, self._attributes = name, attributes

    def __enter__(self) -> Self:
        span = _start(self._name, self._attributes)
        if span is not None:
            outer = current_context()
            set_current_context(Context({**outer, SPAN_KEY: span, _OPEN: _Region(self, span, outer)}))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace_back: TracebackType | None
    ) -> None:
        del kind, trace_back
        region = current_context().get(_OPEN)
        if isinstance(region, _Region) and region.owner is self:
            set_current_context(region.outer)
            _finish(region.span, error)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace_back: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace_back)

    def __call__(self, function: F) -> F:
        """Return the function with every call marked."""
        name, attributes = self._name, self._attributes
        if inspect.isasyncgenfunction(function):
            wrapper: Any = _async_generator(function, name, attributes)
        elif inspect.isgeneratorfunction(function):
            wrapper = _generator(function, name, attributes)
        elif inspect.iscoroutinefunction(function):

            async def wrapper(*args: Any, **kwargs: Any) -> Any:
                with annotate(name, **attributes):
                    return await function(*args, **kwargs)
        else:

            def wrapper(*args: Any, **kwargs: Any) -> Any:
                with annotate(name, **attributes):
                    return function(*args, **kwargs)

        return cast("F", functools.wraps(function)(wrapper))


class _GeneratorSpan:
    """The span of a generator: current only while the generator itself runs, not while its consumer does."""

    def __init__(self, name: str, attributes: dict[str, AttributeValue]) -> None:
        self.span = _start(name, attributes)
        self._inner: Context | None = None
        self._outer: Context = current_context()
        if self.span is not None:
            self._inner = Context({**self._outer, SPAN_KEY: self.span})

    def __enter__(self) -> None:
        if self._inner is not None:
            self._outer = current_context()
            set_current_context(self._inner)

    def __exit__(self, *_: object) -> None:
        if self._inner is not None:
            set_current_context(self._outer)

    def finish(self, error: BaseException | None = None) -> None:
        if self.span is not None:
            _finish(self.span, error)


def _generator(
    function: Callable[..., Iterator[Any]], name: str, attributes: dict[str, AttributeValue]
) -> Callable[..., Generator[Any, Any, Any]]:
    def run(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        region = _GeneratorSpan(name, attributes)
        inner: Any = function(*args, **kwargs)
        step: Callable[[], Any] = functools.partial(next, inner)
        try:
            while True:
                with region:
                    value = step()
                try:
                    step = functools.partial(inner.send, (yield value))
                except GeneratorExit:
                    with region:
                        inner.close()
                    raise
                except BaseException as thrown:  # noqa: BLE001 - whatever the consumer throws belongs to the generator
                    step = functools.partial(inner.throw, thrown)
        except StopIteration as stop:
            region.finish()
            return stop.value
        except BaseException as error:
            region.finish(error)
            raise

    return run


def _async_generator(
    function: Callable[..., AsyncIterator[Any]], name: str, attributes: dict[str, AttributeValue]
) -> Callable[..., AsyncGenerator[Any, Any]]:
    async def run(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        region = _GeneratorSpan(name, attributes)
        inner: Any = function(*args, **kwargs)
        step: Callable[[], Any] = inner.__anext__
        try:
            while True:
                with region:
                    value = await step()
                try:
                    step = functools.partial(inner.asend, (yield value))
                except GeneratorExit:
                    with region:
                        await inner.aclose()
                    raise
                except BaseException as thrown:  # noqa: BLE001 - as above
                    step = functools.partial(inner.athrow, thrown)
        except StopAsyncIteration:
            region.finish()
        except BaseException as error:
            region.finish(error)
            raise

    return run
