"""Protobuf wire format for the few OTLP messages whose bytes are constant over a batch.

Field numbers: opentelemetry-proto v1, common.proto, resource.proto and trace.proto.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from pasta_otel.exporters.otlp.text import clean_utf8
from pasta_otel.model import Attributes, AttributeValue

_MASK_64 = (1 << 64) - 1


def varint(value: int) -> bytes:
    """Return a base-128 varint; negative int64 values take ten bytes, as protobuf defines."""
    value &= _MASK_64
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def message(field: int, body: bytes) -> bytes:
    """Return a length-delimited field: sub-message, string or bytes."""
    return varint(field << 3 | 2) + varint(len(body)) + body


def text(field: int, value: str | bytes) -> bytes:
    """Return a string field, made valid UTF-8."""
    return message(field, clean_utf8(value).encode("utf-8"))


def integer(field: int, value: int) -> bytes:
    """Return a varint field."""
    return varint(field << 3) + varint(value)


def any_value(value: AttributeValue) -> bytes:
    """Return the body of an ``AnyValue`` (bool before int: a bool is an int in Python)."""
    if isinstance(value, bool):
        return integer(2, int(value))
    if isinstance(value, (str, bytes)):
        return text(1, value)
    if isinstance(value, int):
        return integer(3, value)
    if isinstance(value, float):
        return varint(4 << 3 | 1) + struct.pack("<d", value)
    if isinstance(value, Sequence):
        return message(5, b"".join(message(1, any_value(item)) for item in value))
    msg = f"not an OpenTelemetry attribute value: {type(value).__name__}"
    raise TypeError(msg)


def attribute(field: int, key: str, value: AttributeValue) -> bytes:
    """Return one ``KeyValue`` as a field of its parent."""
    return message(field, text(1, key) + message(2, any_value(value)))


def attributes(field: int, values: Attributes) -> bytes:
    """Return all attributes as repeated fields of their parent."""
    return b"".join(attribute(field, key, value) for key, value in values.items())


def resource(values: Attributes) -> bytes:
    """Return the body of a ``Resource``."""
    return attributes(1, values)


def scope(name: str, version: str = "") -> bytes:
    """Return the body of an ``InstrumentationScope``."""
    return text(1, name) + (text(2, version) if version else b"")
