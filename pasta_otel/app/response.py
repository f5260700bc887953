"""The response side of one sidecar, from its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from opentelemetry.metrics import Meter

from pasta_otel.app.options import SidecarOptions
from pasta_otel.app.standby import StandbyResponse
from pasta_otel.clock import Clock
from pasta_otel.slo.actions.engine import FlagsListener
from pasta_otel.slo.actions.health import EdgeSource, ProbeHealth
from pasta_otel.slo.actions.response import build_response
from pasta_otel.slo.leader import Leader
from pasta_otel.slo.policy import Policy, load_policy


def response_of(  # noqa: PLR0913, PLR0917  # the parts of a sidecar, in their order
    options: SidecarOptions,
    store: EdgeSource,
    clock: Clock,
    meter: Meter,
    environ: Mapping[str, str],
    leader: Leader | None = None,
) -> StandbyResponse | None:
    """Return who acts on an evaluation, as soon as ``leader`` says so; None without a directory for its audit.

    Raises:
        InputError: The policy is wrong, or the audit cannot be written.
        MissingError: A channel's variable is not set.
    """
    if options.state_dir is None or leader is None:
        return None
    policy = load_policy(options.policy) if options.policy else Policy()
    options.state_dir.mkdir(parents=True, exist_ok=True)
    build = partial(
        build_response,
        policy,
        options.audit or options.state_dir / "audit.jsonl",
        clock=clock,
        meter=meter,
        environ=environ,
        state_file=options.state_dir / "actions.json",
        health=ProbeHealth(store, policy, grace_ns=int(options.grace_seconds * 1e9)),
        on_flags=_flagd_writer(options),
    )
    return StandbyResponse(build, leader)


def _flagd_writer(options: SidecarOptions) -> FlagsListener:
    if options.flagd_file is None:
        return _ignore
    from pasta_otel.exporters.flagd import FlagdFile  # noqa: PLC0415  # only where it is asked for

    write = FlagdFile(options.flagd_file).write

    def listener(flags: Sequence[Mapping[str, Any]]) -> None:
        write(flags)

    return listener


def _ignore(flags: Sequence[Mapping[str, Any]]) -> None:
    del flags
