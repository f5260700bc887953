"""The response side of a controller, joined: policy, flags, audit, notifications."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from opentelemetry.metrics import Meter

from pasta_otel.clock import Clock
from pasta_otel.slo.actions.audit import AuditLog
from pasta_otel.slo.actions.engine import ActionEngine, FlagsListener, make_flagbook
from pasta_otel.slo.actions.health import DependencyHealth
from pasta_otel.slo.actions.journal import Journal
from pasta_otel.slo.actions.state import Checkpoint
from pasta_otel.slo.notify import Notifier, make_channels
from pasta_otel.slo.notify.channels import secrets_of
from pasta_otel.slo.policy import Policy


@dataclass(frozen=True, slots=True)
class Response:
    """What ``build_response`` joined; ``engine`` is the controller's Responder and the API's FlagProvider."""

    engine: ActionEngine
    notifier: Notifier
    audit: AuditLog

    def start(self) -> None:
        """Start delivering notifications."""
        self.notifier.start()

    def stop(self) -> None:
        """Deliver what is queued, then give the audit file up; flags stay until their TTL."""
        self.notifier.stop()
        self.audit.close()


def build_response(  # noqa: PLR0913 - the world as keyword parameters
    policy: Policy,
    audit_file: Path | str,
    *,
    clock: Clock,
    meter: Meter,
    environ: Mapping[str, str],
    state_file: Path | str | None = None,
    health: DependencyHealth | None = None,
    on_flags: FlagsListener = lambda _: None,
) -> Response:
    """Join the response side.

    Args:
        policy: What may be done.
        audit_file: Append-only JSONL.
        clock: Time.
        meter: Where actions and notifications are counted.
        environ: Where ``url_env`` of a channel is looked up.
        state_file: Checkpoint of what the audit says; None = ``<audit>.state.json``. Both belong together: a checkpoint
            whose audit was deleted still holds its degradations.
        health: Evidence that a degraded dependency is well again; None = there is none.
        on_flags: Told of all flags after every change.

    Raises:
        InputError: The audit cannot be appended to, or a channel's address is none.
        MissingError: A channel's ``url_env`` is not set.
    """
    notifier = Notifier(make_channels(policy.notify, environ), meter)
    audit = AuditLog(audit_file, secrets_of(policy.notify, environ))
    engine = ActionEngine(
        policy,
        make_flagbook(policy, clock),
        Journal(audit, Checkpoint(state_file or f"{audit_file}.state.json")),
        clock,
        notifier=notifier,
        meter=meter,
        health=health,
        on_flags=on_flags,
    )
    return Response(engine, notifier, audit)
