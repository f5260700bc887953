"""A notification, and its form as an Alertmanager webhook (version 4), which most receivers already take.

Source: prometheus/alertmanager, docs/configuration.md, `webhook_config`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FIRING_ENDS_AT = "0001-01-01T00:00:00Z"


@dataclass(frozen=True, slots=True)
class Notification:
    """One message about one burn.

    Attributes:
        slo: SLO's name.
        service: Its service.
        summary: One line.
        cause: ``kind target``, or empty while none is known.
        starts_at: Beginning of the burn, RFC 3339.
        mode: The policy's mode, so that a dry run says that it is one.
        annotations: Owner, runbook and dashboard of the SLO.
    """

    slo: str
    service: str
    summary: str
    cause: str
    starts_at: str
    mode: str
    annotations: Mapping[str, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """Return what makes it the same message: a receiver that gets it twice can tell."""
        text = f"{self.slo}\n{self.starts_at}\n{self.cause}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_webhook(self, receiver: str) -> dict[str, Any]:
        """Return the Alertmanager webhook body."""
        labels = {"alertname": "SLOBurning", "slo": self.slo, "service": self.service}
        if self.cause:
            labels["cause"] = self.cause
        annotations = {**self.annotations, "summary": self.summary, "mode": self.mode}
        alert = {
            "status": "firing",
            "labels": labels,
            "annotations": annotations,
            "startsAt": self.starts_at,
            "endsAt": FIRING_ENDS_AT,
            "generatorURL": self.annotations.get("dashboard", ""),
            "fingerprint": self.id,
        }
        return {
            "version": "4",
            "groupKey": f"{{slo={self.slo!r}}}",
            "truncatedAlerts": 0,
            "status": "firing",
            "receiver": receiver,
            "groupLabels": {"slo": self.slo},
            "commonLabels": labels,
            "commonAnnotations": annotations,
            "externalURL": "",
            "alerts": [alert],
        }
