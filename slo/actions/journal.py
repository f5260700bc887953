"""Audit and checkpoint as one: what is committed here has happened, and happens once."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from pasta_otel.slo.actions.audit import AuditLog
from pasta_otel.slo.actions.records import record_to_json
from pasta_otel.slo.actions.state import ActionState, Checkpoint
from pasta_otel.slo.evaluation import ActionRecord

Effect = Mapping[str, Any]
_log = logging.getLogger(__name__)


class Journal:
    """Commit records with their effects; not for concurrent use.

    Args:
        audit: The append-only file.
        checkpoint: The state file.
    """

    def __init__(self, audit: AuditLog, checkpoint: Checkpoint) -> None:
        self._audit, self._checkpoint = audit, checkpoint
        self.state: ActionState = checkpoint.load(audit.lines())
        audit.continue_after(self.state.seq)

    def commit(self, entries: Sequence[tuple[ActionRecord, Effect | None]]) -> None:
        """Write the records, then apply their effects.

        Raises:
            OSError: Nothing is written and nothing applied.
        """
        self._audit.append([record_to_json(record, effect) for record, effect in entries])
        for _, effect in entries:
            if effect is not None:
                self.state.apply(effect)
        self.state.seq = self._audit.sequence
        self.save()

    def save(self) -> None:
        """Write the checkpoint; if that fails the audit still holds everything but refreshed times."""
        try:
            self._checkpoint.save(self.state)
        except OSError as error:
            _log.error("checkpoint: %s", error)

    def recent(self, limit: int) -> list[Mapping[str, Any]]:
        """Return the last audit lines, newest last."""
        return self._audit.recent(limit)
