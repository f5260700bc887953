"""One process's publication: process context, thread slots, and the hooks that keep them true, also after fork."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from typing import Any

from pasta_otel.publish.process_context import ProcessContext, Value
from pasta_otel.publish.runtime import ContextWatcher
from pasta_otel.publish.slots import SCHEMA, SlotTable

ADDRESS, COUNT, VERSION = "pasta.thread_slots.address", "pasta.thread_slots.count", "threadlocal.schema_version"
_log = logging.getLogger(__name__)
_lock = threading.Lock()
_current: Publication | None = None
_fork_hook = False


class Publication:
    """A running publication.

    Attributes:
        table: The thread slots.
    """

    def __init__(self, resource: Mapping[str, Any]) -> None:
        self.table = SlotTable()
        self._resource = _plain(resource)
        self._watcher = ContextWatcher(self.table)
        self._context: ProcessContext | None = None

    def start(self) -> None:
        """Publish and follow."""
        self._announce()
        self._watcher.install()

    def update(self, resource: Mapping[str, Any]) -> None:
        """Publish other resource attributes."""
        self._resource = _plain(resource)
        if self._context is not None:
            self._context.update(self._resource)

    def stop(self) -> None:
        """Stop following and take the process context back."""
        self._watcher.remove()
        context, self._context = self._context, None
        if context is not None:
            context.withdraw()

    def after_fork(self) -> None:
        """Publish a child's own context: it has neither its parent's mapping nor its threads."""
        parents, self._context = self._context, None
        if parents is None:
            return
        parents.abandon()
        self.table.forget_threads()
        self._announce()
        self._watcher.publish_current()

    def _announce(self) -> None:
        own: dict[str, Value] = {VERSION: SCHEMA, ADDRESS: self.table.address, COUNT: self.table.slots}
        self._context = ProcessContext(self._resource, own)


def publish_context(resource: Mapping[str, Any]) -> Publication | None:
    """Publish this process's context and follow it, or update the resource when that is done already.

    Args:
        resource: Resource attributes, as the process's spans carry them.

    Returns:
        The publication, or None where the system cannot do it (no memfd: not Linux).
    """
    global _current, _fork_hook  # noqa: PLW0603 - one per process, as its memory map is
    with _lock:
        if _current is not None:
            _current.update(resource)
            return _current
        publication = Publication(resource)
        try:
            publication.start()
        except (OSError, AttributeError) as error:
            _log.warning("the trace context is not published: %s", error)
            return None
        if not _fork_hook:
            os.register_at_fork(after_in_child=_after_fork)
            _fork_hook = True
        _current = publication
        return publication


def withdraw_context() -> None:
    """Stop publishing; does nothing when nothing is published."""
    global _current
    with _lock:
        publication, _current = _current, None
        if publication is not None:
            publication.stop()


def _after_fork() -> None:
    global _lock  # noqa: PLW0603 - another thread of the parent may have held it
    _lock = threading.Lock()
    if _current is not None:
        try:
            _current.after_fork()
        except OSError as error:
            _log.warning("the trace context is not published in this child: %s", error)


def _plain(resource: Mapping[str, Any]) -> dict[str, Value]:
    """Return the attributes that readers use, the service's own first."""
    first = sorted(resource, key=lambda key: (not key.startswith("service."), key))
    return {key: value if isinstance(value, int) else str(value) for key in first for value in (resource[key],)}
