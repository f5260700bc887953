"""Which exporters ``OTEL_TRACES_EXPORTER`` and ``OTEL_METRICS_EXPORTER`` choose.

Source: opentelemetry-specification, configuration/sdk-environment-variables.md, "Exporter Selection"; the longer names
are those of the Python SDK's entry points.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Literal

log = logging.getLogger(__name__)
OTLP_NAMES = frozenset({"otlp", "otlp_proto_http", "otlp_proto_grpc"})
KNOWN = OTLP_NAMES | {"console", "none"}


def exporters(signal: Literal["traces", "metrics"], environ: Mapping[str, str]) -> frozenset[str]:
    """Return those of ``otlp`` and ``console`` that are chosen; none at all for ``none``, and where we know none.

    Args:
        signal: Whose.
        environ: The environment.
    """
    variable = f"OTEL_{signal.upper()}_EXPORTER"
    names = {name.strip().lower() for name in environ.get(variable, "").split(",") if name.strip()} or {"otlp"}
    unknown = sorted(names - KNOWN)
    if unknown:
        log.warning("%s: only otlp, console and none are known here, not %s", variable, ", ".join(unknown))
    if "none" in names:
        return frozenset()
    return frozenset("otlp" if name in OTLP_NAMES else name for name in names - set(unknown))


def exporter_environment(signal: Literal["traces", "metrics"], environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment, with the protocol that the exporter's own name says where no variable does."""
    chosen = environ.get(f"OTEL_{signal.upper()}_EXPORTER", "").split(",")
    own, general = f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"
    if "otlp_proto_grpc" in {name.strip().lower() for name in chosen} and not (
        environ.get(own) or environ.get(general)
    ):
        return {**environ, own: "grpc"}
    return environ
