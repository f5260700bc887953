"""Spans older than the store keeps any: said in the log, because they are gone as soon as they came."""

from __future__ import annotations

import logging
import time

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)
SAID_EVERY_NS = 60_000_000_000
HOW = "--store-max-hours of the sidecar keeps spans longer"


class Aged:
    """Count what arrives too old to be kept.

    Args:
        max_age_ns: Spans that ended longer ago are deleted.
    """

    def __init__(self, max_age_ns: int) -> None:
        self._max_age_ns = max_age_ns
        self._spans = 0
        self._said_ns: int | None = None

    def note(self, ends: NDArray[np.int64], now_unix_nano: int, monotonic_ns: int) -> None:
        """Take note of written spans: logs the first at once, then once a minute how many they are.

        Args:
            ends: When they ended; 0 = unfinished.
            now_unix_nano: Wall time.
            monotonic_ns: Monotonic time.
        """
        old = (ends != 0) & (ends < now_unix_nano - self._max_age_ns)
        if not old.any():
            return
        self._spans += int(old.sum())
        if self._said_ns is None or monotonic_ns - self._said_ns >= SAID_EVERY_NS:
            self._said_ns = monotonic_ns
            oldest = time.strftime("%Y-%m-%d %H:%M", time.gmtime(int(ends[old].min()) // 10**9))
            hours = self._max_age_ns / 3.6e12
            logger.warning(
                "%d spans so far ended more than %g h before they came and are deleted again, one at %s; %s",
                self._spans, hours, oldest, HOW,
            )  # fmt: skip


def say_opened(path: str, spans: int, max_age_ns: int) -> None:
    """Say that a file holds spans that will be deleted now."""
    hours = max_age_ns / 3.6e12
    logger.warning("%s: %d spans in it are older than %g h and will be deleted; %s", path, spans, hours, HOW)
