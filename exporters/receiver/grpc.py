"""OTLP over gRPC: generic handlers on raw bytes, so that gRPC decodes nothing."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from pasta_otel.exporters.receiver.config import ReceiverConfig
from pasta_otel.exporters.receiver.intake import Intake, Refused, Reply

TRACE_SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
METRICS_SERVICE = "opentelemetry.proto.collector.metrics.v1.MetricsService"
_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}


def grpc_server(intake: Intake, config: ReceiverConfig) -> Any:
    """Return a ``grpc.aio`` server with the trace and metrics services; the caller adds ports and starts it."""
    server = grpc.aio.server(
        options=[("grpc.max_receive_message_length", config.max_request_bytes), ("grpc.so_reuseport", 0)]
    )
    for service, take in ((TRACE_SERVICE, intake.traces), (METRICS_SERVICE, intake.metrics)):
        method = grpc.unary_unary_rpc_method_handler(_export(intake, take, config.bearer_token))
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Export": method}),))
    return server


def add_port(server: Any, address: str, config: ReceiverConfig) -> int:
    """Bind the server, with TLS where the configuration says so, and return the port (0 = it failed)."""
    if not config.tls_certificate_file or not config.tls_key_file:
        return int(server.add_insecure_port(address))
    pair = (Path(config.tls_key_file).read_bytes(), Path(config.tls_certificate_file).read_bytes())
    roots = Path(config.tls_client_ca_file).read_bytes() if config.tls_client_ca_file else None
    credentials = grpc.ssl_server_credentials([pair], roots, require_client_auth=roots is not None)
    return int(server.add_secure_port(address, credentials))


def _export(intake: Intake, take: Callable[..., Reply], token: str | None) -> Callable[[bytes, Any], Awaitable[bytes]]:
    async def export(body: bytes, context: Any) -> bytes:
        try:
            if token is not None and not _authorised(context, token):
                raise intake.refuse(
                    Refused("unauthenticated", "a valid bearer token is needed", http_status=401, grpc_code=16)
                )
            return take(body).protobuf()
        except Refused as refusal:
            trailing = _trailing(refusal)
            await context.abort(_STATUS_CODES[refusal.grpc_code], refusal.message, trailing)
            raise

    return export


def _authorised(context: Any, token: str) -> bool:
    given = next((value for key, value in context.invocation_metadata() if key == "authorization"), "")
    scheme, _, credential = str(given).partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(credential.strip().encode(), token.encode())


def _trailing(refusal: Refused) -> tuple[tuple[str, bytes], ...]:
    """Return the RetryInfo that tells an OTLP client to try again, where the refusal is for now only."""
    if refusal.retry_after_s is None:
        return ()
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=refusal.retry_after_s)))
    status = status_pb2.Status(code=refusal.grpc_code, message=refusal.message, details=[detail])
    return (("grpc-status-details-bin", status.SerializeToString()),)
