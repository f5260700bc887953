"""One request over gRPC. grpcio is in the ``sidecar`` extra and is imported only here."""

from __future__ import annotations

import os
from typing import Any, Literal
from urllib.parse import urlsplit

from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from pasta_otel.errors import MissingError
from pasta_otel.exporters.otlp.config import OtlpConfig
from pasta_otel.exporters.otlp.transport import USER_AGENT, Reply, partial_success

METHODS = {
    "traces": "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
    "metrics": "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
}
# OTLP specification, "Failures" (gRPC); RESOURCE_EXHAUSTED only with RetryInfo
RETRY_CODES = frozenset({"CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "OUT_OF_RANGE", "UNAVAILABLE", "DATA_LOSS"})


class GrpcTransport:
    """OTLP over gRPC; the channel is made by the first request, so a process that only forks never owns one."""

    def __init__(self, config: OtlpConfig, signal: Literal["traces", "metrics"] = "traces") -> None:
        self._grpc = _import_grpc()
        self._config, self._method = config, METHODS[signal]
        self._channel: Any = None
        self._call: Any = None
        self._metadata = tuple((key.lower(), value) for key, value in config.headers)

    def post(self, body: bytes, timeout_s: float) -> Reply:
        """Send one request."""
        grpc = self._grpc
        try:
            self._call = self._stub().future(body, timeout=timeout_s, metadata=self._metadata)
            answer = self._call.result()
        except grpc.RpcError as error:
            return self._failure(error)
        except grpc.FutureCancelledError:
            return Reply("retry", "grpc_cancelled")
        finally:
            self._call = None
        rejected, message = partial_success("application/x-protobuf", answer)
        return Reply("ok", rejected=rejected, message=message)

    def _failure(self, error: Any) -> Reply:
        name = error.code().name
        wait = _retry_info(error)
        retry = name in RETRY_CODES or (name == "RESOURCE_EXHAUSTED" and wait is not None)
        if name == "UNAVAILABLE":
            self.close()  # a channel can stay stuck in its own backoff after the collector came back
        return Reply(
            "retry" if retry else "refused",
            f"grpc_{name.lower()}",
            message=error.details() or "",
            retry_after_s=wait if retry else None,
        )

    def _stub(self) -> Any:
        if self._channel is None:
            self._channel = self._open()
        return self._channel.unary_unary(self._method)

    def _open(self) -> Any:
        grpc, config = self._grpc, self._config
        parts = urlsplit(config.endpoint) if "//" in config.endpoint else None
        target = parts.netloc if parts else config.endpoint
        options = [("grpc.primary_user_agent", USER_AGENT)]
        compression = grpc.Compression.Gzip if config.compression == "gzip" else grpc.Compression.NoCompression
        if (parts and parts.scheme == "http") or (not parts and config.insecure):
            return grpc.insecure_channel(target, options=options, compression=compression)
        credentials = grpc.ssl_channel_credentials(
            root_certificates=_read(config.certificate),
            private_key=_read(config.client_key),
            certificate_chain=_read(config.client_certificate),
        )
        return grpc.secure_channel(target, credentials, options=options, compression=compression)

    def abort(self) -> None:
        """Cancel a request in flight."""
        call = self._call
        if call is not None:
            call.cancel()

    def close(self) -> None:
        """Close the channel."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def after_fork(self) -> None:
        """Leave the parent's channel alone (closing it here would use threads that no longer exist)."""
        self._channel = self._call = None


def _import_grpc() -> Any:
    # must be set before grpcio starts; without it a forked child hangs in its first call
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "1")
    try:
        import grpc  # noqa: PLC0415  an optional extra
    except ImportError as error:
        raise MissingError("OTLP over gRPC needs grpcio", how="pip install 'pasta-otel[sidecar]'") from error
    return grpc


def _read(path: str | None) -> bytes | None:
    if path is None:
        return None
    with open(path, "rb") as file:  # noqa: PTH123  a plain file read needs no Path object
        return file.read()


def _retry_info(error: Any) -> float | None:
    """Return the pause in ``google.rpc.RetryInfo`` of the trailing metadata, seconds."""
    for key, value in error.trailing_metadata() or ():
        if key != "grpc-status-details-bin":
            continue
        try:
            for detail in Status.FromString(value).details:
                info = RetryInfo()
                if detail.Unpack(info):
                    return float(info.retry_delay.ToTimedelta().total_seconds())
        except DecodeError:
            return None
    return None
