"""Deliver notifications from one background thread: bounded, with retries until a deadline, every loss counted."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from opentelemetry.metrics import Meter

from pasta_otel import semconv
from pasta_otel.slo.notify.channels import NotifyChannel
from pasta_otel.slo.notify.message import Notification

QUEUE_LENGTH = 256
RETRY_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0)  # five retries, half a minute: a receiver's restart
_log = logging.getLogger(__name__)
Done = Callable[[str], None]


class Notifier:
    """Send messages to channels without making the controller wait.

    Args:
        channels: Where to.
        meter: Where deliveries are counted.
        retry_seconds: Pauses before each retry.
    """

    def __init__(
        self, channels: Sequence[NotifyChannel], meter: Meter, retry_seconds: Sequence[float] = RETRY_SECONDS
    ) -> None:
        self._channels = {channel.name: channel for channel in channels}
        self._retry_seconds = tuple(retry_seconds)
        self._queue: queue.Queue[tuple[str, Notification, Done] | None] = queue.Queue(QUEUE_LENGTH)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        spec = semconv.METRICS[semconv.NOTIFICATIONS]
        self._count = meter.create_counter(spec.name, spec.unit, spec.description)

    @property
    def channels(self) -> Sequence[str]:
        """Return the channels' names."""
        return tuple(self._channels)

    def submit(self, channel: str, message: Notification, done: Done) -> None:
        """Queue one message; ``done`` hears an empty text when it arrived, else why it did not."""
        if channel not in self._channels:
            done("no such channel")
            return
        try:
            self._queue.put_nowait((channel, message, done))
        except queue.Full:
            self._count.add(1, {"channel": channel, "outcome": "dropped"})
            done("queue full")

    def start(self) -> None:
        """Start delivering."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pasta-notify", daemon=True)
            self._thread.start()

    def stop(self, seconds: float = 5.0) -> None:
        """Deliver what is queued, without retries, within a deadline."""
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            deadline = time.monotonic() + seconds
            while thread.is_alive() and time.monotonic() < deadline:
                try:
                    self._queue.put(None, timeout=0.1)
                    break
                except queue.Full:
                    continue
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            channel, message, done = item
            problem = self._deliver(self._channels[channel], message)
            if problem is None:  # stopped between two tries: it stays pending for the next start
                continue
            self._count.add(1, {"channel": channel, "outcome": "failed" if problem else "sent"})
            if problem:
                _log.error("notification to %s failed: %s", channel, problem)
            try:
                done(problem)
            except Exception:  # noqa: BLE001 - one message's bookkeeping must not stop the others
                _log.exception("notification to %s could not be noted", channel)

    def _deliver(self, channel: NotifyChannel, message: Notification) -> str | None:
        for pause in (*self._retry_seconds, None):
            try:
                channel.send(message)
            except OSError as error:
                if pause is None:
                    return str(error) or type(error).__name__
                if self._stop.wait(pause):
                    return None
            except Exception as error:  # noqa: BLE001 - a channel is not ours
                return str(error) or type(error).__name__
            else:
                return ""
        return None
