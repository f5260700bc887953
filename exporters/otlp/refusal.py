"""What a refused export means, in words for the person who configured it."""

from __future__ import annotations

UNAUTHORIZED = frozenset({"http_401", "http_403", "grpc_unauthenticated", "grpc_permission_denied"})
NOT_THERE = frozenset({"http_404", "http_405", "grpc_unimplemented"})


def help_for(reason: str, endpoint: str = "OTEL_EXPORTER_OTLP_ENDPOINT") -> str:
    """Return what to do about a batch that was lost for a reason.

    Args:
        reason: As the drop counter says it: ``http_401``, ``connection``, ``grpc_unauthenticated``.
        endpoint: The variable or option that named the destination.
    """
    if reason in UNAUTHORIZED:
        return "give credentials in OTEL_EXPORTER_OTLP_HEADERS, e.g. authorization=Bearer%20TOKEN"
    if reason in NOT_THERE:
        return f"no OTLP is taken there: correct {endpoint} (its path) and OTEL_EXPORTER_OTLP_PROTOCOL"
    if reason == "tls":
        return f"name the CA in OTEL_EXPORTER_OTLP_CERTIFICATE, or correct {endpoint}"
    if reason in {"connection", "timeout"}:
        return f"start it, or correct {endpoint}"
    return f"see its log, or correct {endpoint}"


def advice(reason: str) -> str:
    """Return what to append to a log line about a refusal: what to set, where that is known."""
    return f"; {help_for(reason)}" if reason in UNAUTHORIZED | NOT_THERE else ""
