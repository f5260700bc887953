"""Bodies in and out: bounded when read, strict JSON when written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request

from pasta_otel.errors import InputError

MAX_BYTES = 1 << 20


async def read_body(request: Request) -> bytes:
    """Return the body.

    Raises:
        HTTPException: 413, longer than MAX_BYTES.
    """
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BYTES:
            raise HTTPException(413, f"body longer than {MAX_BYTES} bytes")
    return bytes(body)


async def read_object(request: Request) -> Mapping[str, Any]:
    """Return the body as a JSON object; an empty body is an empty object.

    Raises:
        InputError: Not JSON, or not an object.
    """
    body = await read_body(request)
    try:
        document = json.loads(body) if body else {}
    except (ValueError, RecursionError) as error:
        raise InputError(f"not JSON: {error}", field="body") from error
    if not isinstance(document, dict):
        raise InputError("expected an object", field="body")
    return document


def dumps(document: Any) -> bytes:
    """Return strict JSON (no NaN, no Infinity) as UTF-8.

    Raises:
        ValueError: A number that JSON does not have.
    """
    return json.dumps(document, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()
