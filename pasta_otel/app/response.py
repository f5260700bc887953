"""The controller's hands: policy, flags, audit, notification."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from opentelemetry.metrics import Meter

from pasta_otel.app.options import SidecarOptions
from pasta_otel.clock import Clock
from pasta_otel.slo.actions.audit import AuditLog
from pasta_otel.slo.actions.engine import ActionEngine, make_flagbook
from pasta_otel.slo.actions.health import EdgeSource, ProbeHealth
from pasta_otel.slo.actions.journal import Journal
from pasta_otel.slo.actions.state import Checkpoint
from pasta_otel.slo.notify import Notifier, make_channels
from pasta_otel.slo.notify.channels import secrets_of
from pasta_otel.slo.policy import Policy, load_policy


@dataclass(frozen=True, slots=True)
class Response:
    """An engine and what it owns."""

    engine: ActionEngine
    notifier: Notifier
    audit: AuditLog

    def close(self) -> None:
        """Deliver what waits and close the audit."""
        self.notifier.stop()
        self.audit.close()


def build_response(
    options: SidecarOptions, store: EdgeSource, clock: Clock, meter: Meter, environ: Mapping[str, str]
) -> Response | None:
    """Return who acts on an evaluation; None without a directory for its audit.

    Raises:
        InputError: The policy is wrong, or the audit cannot be written.
        MissingError: A channel's variable is not set.
    """
    if options.state_dir is None:
        return None
    policy = load_policy(options.policy) if options.policy else Policy()
    options.state_dir.mkdir(parents=True, exist_ok=True)
    audit = AuditLog(options.audit or options.state_dir / "audit.jsonl", secrets_of(policy.notify, environ))
    notifier = Notifier(make_channels(policy.notify, environ), meter)
    engine = ActionEngine(
        policy,
        make_flagbook(policy, clock),
        Journal(audit, Checkpoint(options.state_dir / "actions.json")),
        clock,
        notifier=notifier,
        meter=meter,
        health=ProbeHealth(store, policy, grace_ns=int(options.grace_seconds * 1e9)),
        on_flags=_flagd_listener(options),
    )
    notifier.start()
    return Response(engine, notifier, audit)


def _flagd_listener(options: SidecarOptions) -> Any:
    if options.flagd_file is None:
        return _ignore
    from pasta_otel.exporters.flagd import FlagdFile  # noqa: PLC0415  # only where it is asked for

    return FlagdFile(options.flagd_file).write


def _ignore(flags: Sequence[Mapping[str, Any]]) -> None:
    del flags
