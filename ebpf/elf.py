"""Where a shared object's functions lie in its file, from its dynamic symbol table, which stripping does not remove."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Collection, Iterator
from typing import NamedTuple

PT_LOAD, SHT_DYNSYM, SHT_SYMTAB = 1, 11, 2
STT_FUNC, STT_GNU_IFUNC = 2, 10
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")


class _Section(NamedTuple):
    kind: int
    offset: int
    size: int
    link: int


class NotElfError(ValueError):
    """The file is no 64-bit little-endian ELF object."""


def function_offsets(path: str, names: Collection[str], *, static: bool = False) -> dict[str, int]:
    """Return the file offset of each named function that the object exports.

    Args:
        path: The object.
        names: Functions to find.
        static: Look at the full symbol table too (statically linked libraries, which stripping hides).

    Raises:
        NotElfError: Not an object that can be read.
        OSError: It cannot be opened.
    """
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:  # noqa: PTH123 - start time
        try:
            return _offsets(data, {name.encode(): name for name in names}, static=static)
        except (struct.error, IndexError) as error:
            raise NotElfError(path) from error


def _offsets(data: mmap.mmap, names: dict[bytes, str], *, static: bool) -> dict[str, int]:
    if data[:6] != b"\x7fELF\x02\x01":
        raise NotElfError("not a 64-bit little-endian ELF object")
    header = _HEADER.unpack_from(data, 0)
    segments = [_SEGMENT.unpack_from(data, header[5] + place * header[9]) for place in range(header[10])]
    loads = [(address, offset, size) for kind, _, offset, address, _, size, _, _ in segments if kind == PT_LOAD]
    found: dict[str, int] = {}
    for name, address in _symbols(data, header, names, static=static):
        for start, offset, size in loads:
            if start <= address < start + size:
                found[name] = address - start + offset
    return found


def _symbols(
    data: mmap.mmap, header: tuple[int, ...], names: dict[bytes, str], *, static: bool
) -> Iterator[tuple[str, int]]:
    sections = []
    for place in range(header[12]):
        _, kind, _, _, offset, size, link, _, _, _ = _SECTION.unpack_from(data, header[6] + place * header[11])
        sections.append(_Section(kind, offset, size, link))
    for section in sections:
        if section.kind == SHT_DYNSYM or (static and section.kind == SHT_SYMTAB):
            strings = sections[section.link]
            wanted = _string_offsets(data[strings.offset : strings.offset + strings.size], names)
            for symbol in _SYMBOL.iter_unpack(data[section.offset : section.offset + section.size]):
                name = wanted.get(symbol[0])
                if name and symbol[3] and symbol[1] & 15 in {STT_FUNC, STT_GNU_IFUNC}:
                    yield name, symbol[4]


def _string_offsets(table: bytes, names: dict[bytes, str]) -> dict[int, str]:
    """Return where in a string table each name stands; linkers also let one name be the tail of another."""
    found = {}
    for raw, name in names.items():
        at = table.find(raw + b"\0")
        while at >= 0:
            found[at] = name
            at = table.find(raw + b"\0", at + 1)
    return found
