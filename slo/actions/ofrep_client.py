"""Fetch all flags by OFREP's bulk evaluation, over one kept connection of the standard library's HTTP client."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any

from pasta_otel.slo.actions.times import SECOND_NS, from_rfc3339
from pasta_otel.slo.flags import FlagAnswer, RemoteFlag
from pasta_otel.urls import read_url

PATH = "/ofrep/v1/evaluate/flags"
MAX_BYTES = 1 << 20  # a flag document is a few kilobytes; more is not one
BODY = b'{"context":{}}'


class OfrepTransport:
    """Poll one OFREP server; not for concurrent use.

    Args:
        url: Base URL, ``http`` or ``https``.
        token: Bearer token, or empty.
        timeout_seconds: Limit for one poll, all of it.
        tls: TLS settings for https; None = the system's.
        monotonic: Clock for the limit, seconds.

    Raises:
        InputError: The URL is none.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str = "",
        timeout_seconds: float = 1.0,
        tls: ssl.SSLContext | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        parts = read_url(url, field="PASTA_CONTROLLER_URL", expected="http://host:port or https://host:port")
        self._scheme, self._host, self._port, self._prefix = (
            parts.scheme,
            parts.host,
            parts.port,
            parts.path.rstrip("/"),
        )
        self._timeout_seconds, self._tls, self._monotonic = timeout_seconds, tls, monotonic
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if token or parts.authorization:
            self._headers["Authorization"] = f"Bearer {token}" if token else parts.authorization
        self._connection: http.client.HTTPConnection | None = None

    def fetch(self, etag: str) -> FlagAnswer:
        """Return the server's flags, or that nothing changed.

        Raises:
            OSError: No connection, a timeout, or a status that is no answer.
            ValueError: An answer that is no OFREP document.
        """
        try:
            return self._fetch(etag)
        except http.client.HTTPException as error:
            self.close()
            raise ConnectionError(f"no HTTP answer: {type(error).__name__}") from error
        except BaseException:
            self.close()  # what is left on the connection belongs to nobody
            raise

    def close(self) -> None:
        """Close the connection; the next poll opens a new one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _fetch(self, etag: str) -> FlagAnswer:
        deadline = self._monotonic() + self._timeout_seconds
        connection = self._connection or self._connect()
        headers = {**self._headers, "If-None-Match": etag} if etag else self._headers
        connection.request("POST", f"{self._prefix}{PATH}", body=BODY, headers=headers)
        response = connection.getresponse()
        body = self._read(response, deadline)
        server_unix_nano = _date(response.headers.get("Date"))
        if response.status == http.client.NOT_MODIFIED:
            return FlagAnswer(None, etag, server_unix_nano)
        if response.status != http.client.OK:
            raise ConnectionError(self._refusal(response.status))
        return FlagAnswer(parse_flags(json.loads(body)), response.headers.get("ETag", ""), server_unix_nano)

    def _refusal(self, status: int) -> str:
        """Return what a status means, and what to set."""
        if status in {http.client.UNAUTHORIZED, http.client.FORBIDDEN}:
            asked = (
                "it does not take this PASTA_API_TOKEN" if "Authorization" in self._headers else "set PASTA_API_TOKEN"
            )
            return f"status {status}: {asked}"
        if status == http.client.NOT_FOUND:
            return f"status {status}: no flags are served there; give the sidecar or controller --slo and --state"
        return f"status {status}"

    def _connect(self) -> http.client.HTTPConnection:
        if self._scheme == "https":
            self._connection = http.client.HTTPSConnection(
                self._host, self._port, timeout=self._timeout_seconds, context=self._tls
            )
        else:
            self._connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_seconds)
        return self._connection

    def _read(self, response: http.client.HTTPResponse, deadline: float) -> bytes:
        body = bytearray()
        while chunk := response.read1(65_536):  # a server that drips byte by byte meets the deadline too
            body += chunk
            if len(body) > MAX_BYTES:
                raise ValueError(f"answer longer than {MAX_BYTES} bytes")
            if self._monotonic() > deadline:
                raise TimeoutError("answer took too long")
        response.close()  # read1 leaves it open at its end, and the kept connection then takes no further request
        return bytes(body)


def parse_flags(document: Any) -> Mapping[str, RemoteFlag]:
    """Return the flags of a bulk answer; a flag that the server could not evaluate, or that is malformed, is left out.

    Raises:
        ValueError: Not a bulk answer.
    """
    if not isinstance(document, dict) or not isinstance(document.get("flags"), list):
        raise ValueError("expected an object with a list `flags`")  # noqa: TRY004 - the peer's bytes, not our types
    flags: dict[str, RemoteFlag] = {}
    for entry in document["flags"]:
        if isinstance(entry, dict) and isinstance(entry.get("key"), str) and "value" in entry:
            flag = _parse(entry)
            if flag is not None:
                flags[entry["key"]] = flag
    return flags


def _parse(entry: Mapping[str, Any]) -> RemoteFlag | None:
    metadata = entry.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    expires = metadata.get("expires_at")
    try:
        expires_unix_nano = from_rfc3339(expires) if expires else 0
    except (TypeError, ValueError):
        return None  # a degradation whose end is unreadable might never end
    return RemoteFlag(entry["value"], expires_unix_nano, str(metadata.get("since", "")), metadata.get("pinned") is True)


def _date(text: str | None) -> int:
    try:
        return int(parsedate_to_datetime(text).timestamp()) * SECOND_NS if text else 0
    except (ValueError, OverflowError):
        return 0
