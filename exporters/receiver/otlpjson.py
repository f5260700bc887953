"""OTLP/JSON to OTLP protobuf, driven by the descriptors: hex ids, integers as text or number, unknown fields ignored.

``google.protobuf.json_format`` does not fit: it wants ids in base64 and refuses a whole batch for one bad span.
Source of the mapping: opentelemetry-proto docs/specification.md, "JSON Protobuf Encoding".
"""

from __future__ import annotations

import json
from base64 import b64decode
from functools import cache
from typing import Any, NamedTuple

from google.protobuf.descriptor import FieldDescriptor

from pasta_otel.errors import InputError
from pasta_otel.exporters.receiver import wire

MAX_DEPTH = 64  # of nested values; protobuf's own limit is 100 messages
_HEX_IDS = frozenset({"trace_id", "span_id", "parent_span_id"})
_ITEMS = frozenset({"spans", "data_points"})  # one bad element of these is left out, the rest is kept
_NOT_HEX = b"\x00"  # no valid id has one byte: the decoder refuses this span by its id
_DOUBLES = (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT)


class Converted(NamedTuple):
    """A request in protobuf form.

    Attributes:
        body: The serialised request, without the items that had a bad field.
        rejected: How many items were left out.
        message: Field and problem of the first one.
    """

    body: bytes
    rejected: int
    message: str


def to_protobuf(body: bytes, message_name: str) -> Converted:
    """Convert a JSON request.

    Raises:
        InputError: It is not JSON, or a field outside an item has the wrong form; names the field.
    """
    try:
        data = json.loads(body.decode("utf-8", "replace"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"not valid JSON: {error}", field="body") from error
    message = wire.lenient()(message_name)()
    filler = _Filler()
    filler.fill(message, data, "", 0)
    return Converted(message.SerializeToString(), len(filler.errors), str(filler.errors[0]) if filler.errors else "")


@cache
def _fields(descriptor: Any) -> dict[str, Any]:
    named = {field.name: field for field in descriptor.fields}
    return named | {field.json_name: field for field in descriptor.fields}


class _Filler:
    """Copy a JSON object into a message, remembering the items that could not be."""

    def __init__(self) -> None:
        self.errors: list[InputError] = []

    def fill(self, message: Any, data: Any, path: str, depth: int) -> None:
        if not isinstance(data, dict):
            raise InputError(f"expected an object, got {_shown(data)}", field=path or "body")
        if depth > MAX_DEPTH:
            raise InputError(f"nested deeper than {MAX_DEPTH} levels", field=path)
        fields = _fields(message.DESCRIPTOR)
        for key, value in data.items():
            field = fields.get(key)
            if field is not None and value is not None:
                self._field(message, field, value, f"{path}.{key}" if path else key, depth)

    def _field(self, message: Any, field: Any, value: Any, path: str, depth: int) -> None:
        if field.is_repeated:
            self._repeated(getattr(message, field.name), field, value, path, depth)
        elif field.message_type is not None:
            child = getattr(message, field.name)
            child.SetInParent()
            self.fill(child, value, path, depth + 1)
        else:
            try:
                setattr(message, field.name, _scalar(field, value))
            except (ValueError, TypeError) as error:
                raise InputError(f"{error}", field=path) from error

    def _repeated(self, container: Any, field: Any, values: Any, path: str, depth: int) -> None:
        if not isinstance(values, list):
            raise InputError(f"expected an array, got {_shown(values)}", field=path)
        for index, value in enumerate(values):
            here = f"{path}[{index}]"
            if field.message_type is None:
                try:
                    container.append(_scalar(field, value))
                except (ValueError, TypeError) as error:
                    raise InputError(f"{error}", field=here) from error
                continue
            try:
                self.fill(container.add(), value, here, depth + 1)
            except InputError as error:
                if field.name not in _ITEMS:
                    raise
                del container[-1]
                self.errors.append(error)


def _scalar(field: Any, value: Any) -> Any:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return _bytes(field, value)
    if field.type == FieldDescriptor.TYPE_BOOL:
        if not isinstance(value, bool):
            raise TypeError(f"expected true or false, got {_shown(value)}")
        return value
    if field.type in _DOUBLES:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise TypeError(f"expected a number, got {_shown(value)}")
        return float(value)
    if field.enum_type is not None and isinstance(value, str) and value in field.enum_type.values_by_name:
        return field.enum_type.values_by_name[value].number
    return _integer(value)


def _integer(value: Any) -> int:
    if isinstance(value, str) and value.strip().lstrip("-").isdecimal() and len(value) <= 24:
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"expected an integer, got {_shown(value)}")
    return value


def _bytes(field: Any, value: Any) -> bytes:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {_shown(value)}")
    if field.name in _HEX_IDS:
        try:
            return bytes.fromhex(value)
        except ValueError:
            return _NOT_HEX
    if field.name == "bytes_value":
        return b64decode(value, validate=True)
    return value.encode("utf-8", "replace")


def _shown(value: Any) -> str:
    """Return a short form of a value for an error's text."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
