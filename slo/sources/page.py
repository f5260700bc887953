"""Fetch another exporter's Prometheus page."""

from __future__ import annotations

import urllib.error
import urllib.request

from pasta_otel.errors import InputError, MissingError
from pasta_otel.slo.sources.textpage import Page, read_page

PAGE_LIMIT = 16 * 1024 * 1024


def fetch_page(url: str, *, timeout_seconds: float = 2.0) -> Page:
    """Return the page's samples, and what of it could not be read.

    Raises:
        InputError: The URL is not http or https, or the page is larger than 16 MiB.
        MissingError: Nothing answers there, or not with a page.
    """
    if not url.startswith(("http://", "https://")):
        raise InputError(f"expected a URL with http:// or https://, got {url!r}")
    request = urllib.request.Request(url, headers={"Accept": "text/plain;version=0.0.4"})  # noqa: S310  # checked above
    try:
        with urllib.request.urlopen(request, timeout=timeout_seconds) as answer:  # noqa: S310
            body = answer.read(PAGE_LIMIT + 1)
    except urllib.error.HTTPError as error:
        error.close()
        raise MissingError(f"{url} answered HTTP {error.code}") from error
    except (OSError, ValueError) as error:
        raise MissingError(f"nothing answers at {url}: {getattr(error, 'reason', error)}") from error
    if len(body) > PAGE_LIMIT:
        raise InputError(f"the page at {url} is larger than {PAGE_LIMIT} bytes")
    return read_page(body.decode("utf-8", "replace"))
