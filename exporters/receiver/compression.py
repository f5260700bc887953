"""Bounded decompression: a small body must not become a large one before anybody looks."""

from __future__ import annotations

import zlib

from pasta_otel.exporters.receiver.intake import Refused

_GZIP, _ZLIB, _RAW = 31, 15, -15  # zlib wbits


def too_large(limit: int) -> Refused:
    """Return the answer to a body over the limit."""
    return Refused("too_large", f"the body is larger than {limit} bytes", http_status=413, grpc_code=8)


def decompress(body: bytes, encoding: str, limit: int) -> bytes:
    """Return the body as it was before ``Content-Encoding``.

    Raises:
        Refused: Unknown encoding (415), not what it says (400), or larger than ``limit`` (413).
    """
    match encoding.strip().lower():
        case "" | "identity":
            return body
        case "gzip" | "x-gzip":
            return _inflate(body, _GZIP, limit)
        case "deflate":
            # RFC 9110 says zlib; some clients send raw deflate. A zlib header is 0x?8 and a multiple of 31.
            zlib_header = len(body) > 1 and body[0] & 0x0F == 8 and int.from_bytes(body[:2], "big") % 31 == 0
            return _inflate(body, _ZLIB if zlib_header else _RAW, limit)
        case _:
            raise Refused(
                "unsupported_encoding",
                f"Content-Encoding: expected gzip, deflate or identity, got {encoding[:40]!r}",
                http_status=415,
                grpc_code=3,
            )


def _inflate(body: bytes, wbits: int, limit: int) -> bytes:
    out = bytearray()
    rest = body
    while True:
        machine = zlib.decompressobj(wbits)
        try:
            out += machine.decompress(rest, limit - len(out) + 1)
        except zlib.error as error:
            raise _not_compressed(str(error)) from error
        if len(out) > limit:
            raise too_large(limit)
        if not machine.eof:
            raise _not_compressed("the stream is cut short")
        rest = machine.unused_data
        if not rest or wbits != _GZIP:  # only gzip allows several members
            return bytes(out)


def _not_compressed(why: str) -> Refused:
    return Refused("bad_compression", f"body: does not match Content-Encoding ({why})", http_status=400, grpc_code=3)
