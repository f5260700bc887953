"""The bytes of a trace file: plain, gzip or zstd, in pieces, with every failure as one clear error."""

from __future__ import annotations

import stat
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from pasta_otel.errors import InputError, MissingError

PIECE_BYTES = 1 << 20
SLICE_BYTES = 1 << 13
GZIP_MAGIC, ZSTD_MAGIC = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_GZIP_WINDOW = 31  # zlib.decompressobj: 15 bits of window, +16 = gzip header and checksum

_STREAMS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)

Progress = Callable[[int], None]
"""Told how many bytes of the file were read since the last call."""


class TraceBytes:
    """Iterate over a file's uncompressed bytes.

    Args:
        path: The file.
        progress: Told about each piece read.

    Attributes:
        cut: True when the compressed stream ended, or broke, before its end.
    """

    def __init__(self, path: Path, progress: Progress | None = None) -> None:
        self.path, self.cut = path, False
        self._progress = progress or (lambda _: None)

    def __iter__(self) -> Iterator[bytes]:
        """Yield non-empty pieces.

        Raises:
            InputError: The file cannot be read, is empty, or is no regular file.
            MissingError: It is compressed with zstd and ``zstandard`` is not installed.
        """
        try:
            _refuse_stream(self.path)
            with self.path.open("rb") as file:
                yield from self._pieces(file)
        except OSError as error:
            raise InputError(error.strerror or "cannot be read", file=str(self.path), kind="io") from error

    def _pieces(self, file: BinaryIO) -> Iterator[bytes]:
        first = self._read(file)
        if not first:
            raise InputError("empty file", file=str(self.path), kind="trace_format")
        if first.startswith(GZIP_MAGIC):
            yield from self._gunzip(first, file)
        elif first.startswith(ZSTD_MAGIC):
            yield from self._unzstd(first, file)
        else:
            while first:
                yield first
                first = self._read(file)

    def _read(self, file: BinaryIO) -> bytes:
        piece = file.read(PIECE_BYTES)
        self._progress(len(piece))
        return piece

    def _gunzip(self, raw: bytes, file: BinaryIO) -> Iterator[bytes]:
        member = _Member()
        try:
            while raw:
                for at in range(0, len(raw), SLICE_BYTES):  # what a damaged slice held is lost: keep slices small
                    yield from member.inflate(raw[at : at + SLICE_BYTES])
                raw = self._read(file)
        except zlib.error:
            self.cut = True
        self.cut |= not member.complete

    def _unzstd(self, raw: bytes, file: BinaryIO) -> Iterator[bytes]:
        try:
            import zstandard  # noqa: PLC0415 - optional: Kineto itself writes gzip
        except ImportError as error:
            raise MissingError(f"{self.path} is compressed with zstd", how="pip install zstandard") from error
        inflate: Any = zstandard.ZstdDecompressor().decompressobj()
        try:
            while raw:
                piece: bytes = inflate.decompress(raw)
                if piece:
                    yield piece
                raw = self._read(file)
        except zstandard.ZstdError:
            self.cut = True


def _refuse_stream(path: Path) -> None:
    """Refuse what can be read only once, or never ends: a trace's format is looked at first, then it is read."""
    if str(path) == "-" and not path.exists():
        what = "standard input"
    else:
        mode = path.stat().st_mode
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):  # a folder's own error is clear
            return
        what = next((name for is_it, name in _STREAMS if is_it(mode)), "no regular file")
    raise InputError(f"{what} cannot be imported; write it to a file first", file=str(path), kind="io")


class _Member:
    """Inflates a gzip file slice by slice: several members may follow one another, zeros after the last are padding."""

    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(_GZIP_WINDOW)

    @property
    def complete(self) -> bool:
        return self._inflate.eof

    def inflate(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self._inflate.eof:
                data = data.lstrip(b"\0")
                if not data:
                    return
                self._inflate = zlib.decompressobj(_GZIP_WINDOW)
            piece = self._inflate.decompress(data, PIECE_BYTES)
            data = self._inflate.unconsumed_tail or self._inflate.unused_data
            if piece:
                yield piece
