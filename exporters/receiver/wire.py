"""OTLP message classes that parse what Python needs and nothing more.

A sub-message and a bytes field have the same wire form. ``lenient()`` is OTLP with every string read as bytes, so that
one invalid UTF-8 byte cannot refuse a whole batch; ``lazy()`` also leaves a span's attributes, events, links and status
as bytes, which are decoded once per distinct value. Both write back exactly what they read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.metrics.v1 import metrics_pb2
from opentelemetry.proto.resource.v1 import resource_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

TRACE_REQUEST = "opentelemetry.proto.collector.trace.v1.ExportTraceServiceRequest"
METRICS_REQUEST = "opentelemetry.proto.collector.metrics.v1.ExportMetricsServiceRequest"
KEY_VALUE = "opentelemetry.proto.common.v1.KeyValue"
RESOURCE = "opentelemetry.proto.resource.v1.Resource"
SCOPE = "opentelemetry.proto.common.v1.InstrumentationScope"
EVENT = "opentelemetry.proto.trace.v1.Span.Event"
LINK = "opentelemetry.proto.trace.v1.Span.Link"
STATUS = "opentelemetry.proto.trace.v1.Status"

_OPAQUE = {
    "ResourceSpans": {"resource"},
    "ScopeSpans": {"scope"},
    "Span": {"attributes", "events", "links", "status"},
}
_Field = descriptor_pb2.FieldDescriptorProto
_Edit = Callable[[Any, Any], None]


def _read_strings_as_bytes(_message: Any, field: Any) -> None:
    if field.type == _Field.TYPE_STRING:
        field.type = _Field.TYPE_BYTES


def _leave_opaque(message: Any, field: Any) -> None:
    _read_strings_as_bytes(message, field)
    if field.name in _OPAQUE.get(message.name, ()):
        field.type = _Field.TYPE_BYTES
        field.ClearField("type_name")


def _edit_message(message: Any, edit: _Edit) -> None:
    for field in message.field:
        edit(message, field)
    for nested in message.nested_type:
        _edit_message(nested, edit)


def _build(edit: _Edit) -> Callable[[str], Any]:
    pool = descriptor_pool.DescriptorPool()
    for module in (common_pb2, resource_pb2, trace_pb2, metrics_pb2, trace_service_pb2, metrics_service_pb2):
        file = descriptor_pb2.FileDescriptorProto()
        module.DESCRIPTOR.CopyToProto(file)
        for message in file.message_type:
            _edit_message(message, edit)
        pool.Add(file)
    return cache(lambda name: message_factory.GetMessageClass(pool.FindMessageTypeByName(name)))


@cache
def lenient() -> Callable[[str], Any]:
    """Return the lookup of message classes whose strings are bytes."""
    return _build(_read_strings_as_bytes)


@cache
def lazy() -> Callable[[str], Any]:
    """Return the lookup of message classes that leave a span's sub-messages as bytes."""
    return _build(_leave_opaque)


def sanitize(body: bytes, message: str) -> bytes:
    """Return the same message with every invalid UTF-8 sequence replaced by U+FFFD (case O01)."""
    parsed = lenient()(message).FromString(body)
    _sanitize_message(parsed, _string_fields(message))
    data: bytes = parsed.SerializeToString()
    return data


@cache
def _string_fields(message: str) -> frozenset[str]:
    """Return the full names of the fields that the original declares as strings."""
    module = metrics_service_pb2 if message == METRICS_REQUEST else trace_service_pb2
    pool = module.DESCRIPTOR.pool
    found: set[str] = set()
    seen: set[str] = set()
    stack = [pool.FindMessageTypeByName(message)]
    while stack:
        descriptor = stack.pop()
        if descriptor.full_name in seen:
            continue
        seen.add(descriptor.full_name)
        found.update(field.full_name for field in descriptor.fields if field.type == _Field.TYPE_STRING)
        stack.extend(field.message_type for field in descriptor.fields if field.message_type is not None)
    return frozenset(found)


def _sanitize_message(message: Any, strings: frozenset[str]) -> None:
    for field, value in message.ListFields():
        if field.message_type is not None:
            for child in _each(field, value):
                _sanitize_message(child, strings)
        elif field.full_name in strings:
            if isinstance(value, bytes):
                setattr(message, field.name, clean(value))
            else:
                value[:] = [clean(item) for item in value]


def _each(field: Any, value: Any) -> Iterator[Any]:
    return iter(value) if field.is_repeated else iter((value,))


def clean(raw: bytes) -> bytes:
    """Return valid UTF-8: each invalid sequence becomes U+FFFD."""
    return raw.decode("utf-8", "replace").encode("utf-8")
