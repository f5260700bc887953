"""Build CUPTI activity buffers without a GPU: the bytes that CUPTI of a given version would hand over."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from pasta_otel._native import _cupti

Fields = tuple[tuple[int, str, int], ...]


class BufferBuilder:
    """Append records field by field; sizes come from the layout of ``api_version``."""

    def __init__(self, api_version: int = 130001) -> None:
        layout = _cupti.layout(api_version)
        if layout is None:
            msg = f"unknown CUPTI API version {api_version}"
            raise ValueError(msg)
        self.api_version, self._sizes = api_version, layout
        self._parts: list[bytes] = []
        self.names: dict[int, bytes] = {}

    def bytes(self) -> bytes:
        """Return the buffer so far."""
        return b"".join(self._parts)

    def _add(self, kind: int, fields: Iterable[tuple[int, str, int]]) -> BufferBuilder:
        record = bytearray(self._sizes[kind])
        struct.pack_into("<I", record, 0, kind)
        for offset, form, value in fields:
            struct.pack_into("<" + form, record, offset, value)
        self._parts.append(bytes(record))
        return self

    def _pointer(self, name: str) -> int:
        encoded = name.encode()
        for pointer, known in self.names.items():
            if known == encoded:
                return pointer
        pointer = 0x7F0000000000 + 64 * len(self.names)
        self.names[pointer] = encoded
        return pointer

    def kernel(  # noqa: PLR0913 - one parameter for each field of the record
        self,
        name: str,
        start: int,
        end: int,
        correlation: int,
        *,
        device: int = 0,
        context: int = 1,
        stream: int = 7,
        node: int = 0,
        graph: int = 0,
    ) -> BufferBuilder:
        """Append a CONCURRENT_KERNEL record."""
        fields = ((16, "Q", start), (24, "Q", end), (40, "I", device), (44, "I", context), (48, "I", stream))
        more = ((92, "I", correlation), (104, "Q", self._pointer(name)), (144, "Q", node), (156, "I", graph))
        return self._add(10, (*fields, *more))

    def copy(self, start: int, end: int, correlation: int, size: int, *, copy_kind: int = 1) -> BufferBuilder:
        """Append a MEMCPY record."""
        fields = ((4, "B", copy_kind), (8, "Q", size), (16, "Q", start), (24, "Q", end), (36, "I", 1), (40, "I", 7))
        return self._add(1, (*fields, (44, "I", correlation)))

    def memset(self, start: int, end: int, correlation: int, size: int) -> BufferBuilder:
        """Append a MEMSET record."""
        fields = ((8, "Q", size), (16, "Q", start), (24, "Q", end), (36, "I", 1), (40, "I", 7), (44, "I", correlation))
        return self._add(2, fields)

    def call(self, callback_id: int, start: int, end: int, correlation: int, *, thread: int = 1) -> BufferBuilder:
        """Append a RUNTIME record."""
        fields = ((4, "I", callback_id), (8, "Q", start), (16, "Q", end), (28, "I", thread), (32, "I", correlation))
        return self._add(5, fields)

    def external(self, external_id: int, correlation: int, *, kind: int = 5) -> BufferBuilder:
        """Append an EXTERNAL_CORRELATION record."""
        return self._add(39, ((4, "I", kind), (8, "Q", external_id), (16, "I", correlation)))

    def synchronization(self, start: int, end: int, correlation: int) -> BufferBuilder:
        """Append a SYNCHRONIZATION record of a stream."""
        fields = ((4, "I", 3), (8, "Q", start), (16, "Q", end), (24, "I", correlation), (28, "I", 1), (32, "I", 7))
        return self._add(38, fields)

    def overhead(self, start: int, end: int) -> BufferBuilder:
        """Append an OVERHEAD record (buffer flush)."""
        return self._add(17, ((4, "I", 1 << 16), (24, "Q", start), (32, "Q", end)))

    def graph(self, start: int, end: int, correlation: int, graph: int) -> BufferBuilder:
        """Append a GRAPH_TRACE record."""
        return self._add(51, ((4, "I", correlation), (8, "Q", start), (16, "Q", end), (28, "I", graph), (32, "I", 1)))
