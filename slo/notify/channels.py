"""Where notifications go: the log, or a webhook."""

from __future__ import annotations

import http.client
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Protocol
from urllib.parse import urlsplit

from pasta_otel.errors import InputError, MissingError
from pasta_otel.slo.notify.message import Notification
from pasta_otel.slo.policy import Channel

TIMEOUT_SECONDS = 5.0
_log = logging.getLogger(__name__)


class NotifyChannel(Protocol):
    """One way to a person."""

    name: str

    def send(self, message: Notification) -> None:
        """Deliver one message; raises OSError when it may be tried again, ValueError when that is useless."""


class LogChannel:
    """Write to this process's log."""

    def __init__(self, name: str = "log") -> None:
        self.name = name

    def send(self, message: Notification) -> None:
        """Log the message as a warning."""
        _log.warning("%s", message.summary)


class WebhookChannel:
    """POST an Alertmanager webhook body.

    Args:
        name: As records name it.
        url: Where to; it may carry a secret, so it never stands in an error.
        timeout_seconds: Limit for each step of one delivery.
    """

    def __init__(self, name: str, url: str, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self.name, self._timeout_seconds = name, timeout_seconds
        try:
            self._parts = urlsplit(url)
            self._port = self._parts.port
        except ValueError:
            raise InputError("not a URL", field=f"notify {name}.url") from None
        if self._parts.scheme not in {"http", "https"} or not self._parts.hostname:
            raise InputError("expected http:// or https://", field=f"notify {name}.url")

    def send(self, message: Notification) -> None:
        """Deliver one message.

        Raises:
            OSError: No connection, 429 or a server error: it may be tried again.
            ValueError: The receiver refused it: trying again is useless.
        """
        body = json.dumps(message.to_webhook(self.name)).encode()
        headers = {"Content-Type": "application/json", "Idempotency-Key": message.id}
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(str(self._parts.hostname), self._port, timeout=self._timeout_seconds)
        try:
            query = f"?{self._parts.query}" if self._parts.query else ""
            connection.request("POST", (self._parts.path or "/") + query, body=body, headers=headers)
            status = connection.getresponse().status
        except http.client.HTTPException as error:
            raise ConnectionError(f"no HTTP answer: {type(error).__name__}") from None
        finally:
            connection.close()
        if status == http.client.TOO_MANY_REQUESTS or status >= http.client.INTERNAL_SERVER_ERROR:
            raise ConnectionError(f"status {status}")
        if status >= http.client.MULTIPLE_CHOICES:
            raise ValueError(f"status {status}")


def make_channels(channels: Sequence[Channel], environ: Mapping[str, str]) -> list[NotifyChannel]:
    """Return the policy's channels.

    Raises:
        MissingError: A channel's ``url_env`` is not set.
        InputError: A URL is none.
    """
    made: list[NotifyChannel] = []
    for channel in channels:
        if channel.type == "log":
            made.append(LogChannel(channel.name))
            continue
        url = channel.url or environ.get(channel.url_env, "")
        if not url:
            raise MissingError(f"notify {channel.name}: no address", how=f"set {channel.url_env}")
        made.append(WebhookChannel(channel.name, url))
    return made


def secrets_of(channels: Sequence[Channel], environ: Mapping[str, str]) -> list[str]:
    """Return the texts that the audit must never show."""
    urls = [channel.url or environ.get(channel.url_env, "") for channel in channels if channel.type == "webhook"]
    return [url for url in urls if url]
