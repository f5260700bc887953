"""Fetch another exporter's Prometheus page."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request

from pasta_otel.errors import InputError, MissingError
from pasta_otel.slo.sources.textpage import Page, read_page
from pasta_otel.urls import read_url, shown

PAGE_LIMIT = 16 * 1024 * 1024


def fetch_page(url: str, *, timeout_seconds: float = 2.0, field: str = "url") -> Page:
    """Return the page's samples, and what of it could not be read.

    Args:
        url: Where it is; user and password in it are sent as basic authentication.
        timeout_seconds: Limit for each step.
        field: What an error about the URL names.

    Raises:
        InputError: The URL is not http or https, or the page is larger than 16 MiB.
        MissingError: Nothing answers there, or not with a page.
    """
    parts = read_url(url, field=field, expected="a URL with http:// or https://")
    where = shown(url)
    headers = {"Accept": "text/plain;version=0.0.4"}
    if parts.authorization:
        headers["Authorization"] = parts.authorization
    request = urllib.request.Request(parts.plain, headers=headers)  # noqa: S310  # checked above
    try:
        with urllib.request.urlopen(request, timeout=timeout_seconds) as answer:  # noqa: S310
            body = answer.read(PAGE_LIMIT + 1)
    except urllib.error.HTTPError as error:
        error.close()
        raise MissingError(f"{where} answered HTTP {error.code}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise MissingError(f"nothing answers at {where}: {getattr(error, 'reason', error)}") from error
    if len(body) > PAGE_LIMIT:
        raise InputError(f"the page at {where} is larger than {PAGE_LIMIT} bytes")
    return read_page(body.decode("utf-8", "replace"))
