"""The response side of controllers that share a state directory: only who leads acts, and owns the audit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pasta_otel.errors import InputError
from pasta_otel.slo.actions.engine import ActionEngine
from pasta_otel.slo.actions.response import Response
from pasta_otel.slo.evaluation import ActionRecord, Evaluation
from pasta_otel.slo.leader import Leader


class StandbyResponse:
    """A ``Response`` that is built when this process takes the lead; until then there are no flags and no actions.

    Args:
        build: Build it; takes over what the leader before us wrote.
        leader: Who acts.

    Raises:
        InputError: We lead at once, and the policy is wrong or the audit cannot be written.
        MissingError: A channel's variable is not set.
    """

    def __init__(self, build: Callable[[], Response], leader: Leader) -> None:
        self._build, self._leader = build, leader
        self._lock = threading.Lock()
        self._started = False
        self._response: Response | None = build() if leader.lead() else None

    def start(self) -> None:
        """Start delivering notifications, now or when the lead is ours."""
        with self._lock:
            self._started = True
            if self._response is not None:
                self._response.start()

    def stop(self) -> None:
        """Deliver what is queued, then give the audit file and the lead up."""
        with self._lock:
            response, self._response = self._response, None
            self._started = False
        if response is not None:
            response.stop()

    def respond(self, evaluation: Evaluation) -> Sequence[ActionRecord]:
        """Act; the controller calls this only while it leads."""
        engine = self._taken_over()
        return engine.respond(evaluation) if engine is not None else ()

    def evaluate(self, key: str) -> Mapping[str, Any] | None:
        """Return one flag, or None when there is no such flag."""
        engine = self._engine()
        return engine.evaluate(key) if engine is not None else None

    def evaluate_all(self) -> Sequence[Mapping[str, Any]]:
        """Return every flag; none while another controller leads."""
        engine = self._engine()
        return engine.evaluate_all() if engine is not None else ()

    def pin(self, key: str, value: Any, by: str, reason: str) -> Mapping[str, Any]:
        """Fix a flag by a person's hand."""
        return self._leading().pin(key, value, by, reason)

    def unpin(self, key: str, by: str) -> Mapping[str, Any]:
        """Give a flag back to the controller."""
        return self._leading().unpin(key, by)

    def recent(self, limit: int) -> list[dict[str, Any]]:
        """Return the last actions of the leader that we are."""
        engine = self._engine()
        return engine.recent(limit) if engine is not None else []

    def _engine(self) -> ActionEngine | None:
        response = self._response
        return response.engine if response is not None else None

    def _leading(self) -> ActionEngine:
        engine = self._engine()
        if engine is None:
            raise InputError("this controller only watches: another one leads", kind="conflict")
        return engine

    def _taken_over(self) -> ActionEngine | None:
        with self._lock:
            if self._response is None and self._started and self._leader.lead():
                self._response = self._build()
                self._response.start()
            return self._engine()
