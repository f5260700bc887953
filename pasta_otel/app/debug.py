"""``PASTA_DEBUG``: what pasta-otel does, on stderr."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from pasta_otel.config import load_settings

FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


def log_when_debugging(environ: Mapping[str, str] | None = None) -> None:
    """Give our own loggers a handler and the level DEBUG when ``PASTA_DEBUG`` says so; the root logger is untouched."""
    ours = logging.getLogger("pasta_otel")
    if not load_settings(environ)["PASTA_DEBUG"] or ours.level == logging.DEBUG:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(FORMAT))
    ours.addHandler(handler)
    ours.setLevel(logging.DEBUG)
    ours.propagate = False
