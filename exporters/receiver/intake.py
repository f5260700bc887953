"""The part of the receiver that knows no transport: decode, account, hand to the sinks, say what to answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from opentelemetry.metrics import Meter, NoOpMeter
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from pasta_otel import semconv
from pasta_otel.clock import Clock, SystemClock
from pasta_otel.errors import InputError
from pasta_otel.exporters.ledger import POINTS, Ledger
from pasta_otel.exporters.receiver import wire
from pasta_otel.exporters.receiver.batch import PointSink, SpanSink
from pasta_otel.exporters.receiver.decode import TraceDecoder
from pasta_otel.exporters.receiver.otlpjson import to_protobuf
from pasta_otel.exporters.receiver.points import decode_points

RETRY_AFTER_SECONDS = 1
BAD_FIELD = "invalid_field"


class Refused(Exception):  # noqa: N818 - an answer, not an error of ours
    """A request that is answered with an error.

    Args:
        reason: Stable word for the metric.
        message: What the client reads.
        http_status: Answer over HTTP.
        grpc_code: ``google.rpc.Code`` of the Status body, and the answer over gRPC.
        retry_after_s: Seconds after which the client should try again, or None.
    """

    def __init__(
        self, reason: str, message: str, *, http_status: int, grpc_code: int, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.reason, self.message = reason, message
        self.http_status, self.grpc_code, self.retry_after_s = http_status, grpc_code, retry_after_s


class Reply(NamedTuple):
    """A success, full or partial.

    Attributes:
        signal: ``traces`` or ``metrics``.
        rejected: Items refused.
        message: Why, or empty.
    """

    signal: str
    rejected: int
    message: str

    def protobuf(self) -> bytes:
        """Return the response message; a full success leaves ``partial_success`` unset, as the protocol says."""
        if not self.rejected:
            return b""
        if self.signal == "metrics":
            metrics = metrics_service_pb2.ExportMetricsServiceResponse()
            metrics.partial_success.rejected_data_points = self.rejected
            metrics.partial_success.error_message = self.message
            return bytes(metrics.SerializeToString())
        traces = trace_service_pb2.ExportTraceServiceResponse()
        traces.partial_success.rejected_spans = self.rejected
        traces.partial_success.error_message = self.message
        return bytes(traces.SerializeToString())

    def json(self) -> dict[str, object]:
        """Return the response as OTLP/JSON (64-bit integers are text)."""
        if not self.rejected:
            return {}
        name = "rejectedDataPoints" if self.signal == "metrics" else "rejectedSpans"
        return {"partialSuccess": {name: str(self.rejected), "errorMessage": self.message}}


class Intake:
    """Take request bodies of one event loop.

    Args:
        sinks: Take every accepted span.
        ledger: Account of spans; its sinks' names must be those of ``sinks``.
        point_sinks: Take every accepted metric point; without any, points are validated, counted and let go.
        point_ledger: Account of metric points.
        clock: Wall clock.
        meter: Where refused requests are counted.
    """

    def __init__(  # noqa: PLR0913 - the parts of the world that it uses
        self,
        sinks: Sequence[SpanSink],
        ledger: Ledger,
        *,
        point_sinks: Sequence[PointSink] = (),
        point_ledger: Ledger | None = None,
        clock: Clock | None = None,
        meter: Meter | None = None,
    ) -> None:
        self._sinks, self._ledger, self._point_sinks = sinks, ledger, point_sinks
        self._point_ledger = point_ledger or Ledger([sink.name for sink in point_sinks], names=POINTS)
        self._clock = clock or SystemClock()
        self._decoder = TraceDecoder()
        spec = semconv.METRICS[semconv.RECEIVER_REFUSED]
        self._refused = (meter or NoOpMeter("")).create_counter(spec.name, spec.unit, spec.description)

    def refuse(self, refusal: Refused) -> Refused:
        """Count a refusal and return it."""
        self._refused.add(1, {"reason": refusal.reason})
        return refusal

    def traces(self, body: bytes, *, is_json: bool = False) -> Reply:
        """Take one trace request.

        Raises:
            Refused: It cannot be decoded, or a sink has no room; nothing of it was counted as received.
        """
        try:
            converted = to_protobuf(body, wire.TRACE_REQUEST) if is_json else None
            decoded = self._decoder.decode(converted.body if converted else body, self._clock.unix_nano())
        except InputError as error:
            raise self.refuse(_bad_request(error)) from error
        batch, rejected, message = decoded.batch, decoded.rejected, decoded.message
        received = decoded.received
        if converted and converted.rejected:
            received += converted.rejected
            rejected[BAD_FIELD] += converted.rejected
            message = message or converted.message
        full = next((sink.name for sink in self._sinks if not sink.has_room(len(batch))), None)
        if full is not None:
            raise self.refuse(_no_room(full))
        self._ledger.receive(received, rejected)
        if len(batch):
            for sink in self._sinks:
                sink.offer(batch)
        return Reply("traces", rejected.total(), _explain(rejected, message))

    def metrics(self, body: bytes, *, is_json: bool = False) -> Reply:
        """Take one metrics request.

        Raises:
            Refused: It cannot be decoded.
        """
        try:
            converted = to_protobuf(body, wire.METRICS_REQUEST) if is_json else None
            decoded = decode_points(converted.body if converted else body)
        except InputError as error:
            raise self.refuse(_bad_request(error)) from error
        rejected, message, received = decoded.rejected, decoded.message, decoded.received
        if converted and converted.rejected:
            received += converted.rejected
            rejected[BAD_FIELD] += converted.rejected
            message = message or converted.message
        self._point_ledger.receive(received, rejected)
        if len(decoded.batch):
            for sink in self._point_sinks:
                sink.offer_points(decoded.batch)
        return Reply("metrics", rejected.total(), _explain(rejected, message))


def _explain(rejected: Mapping[str, int] | Counter[str], first: str) -> str:
    if not rejected:
        return ""
    counts = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in sorted(rejected.items()))
    return f"{counts}; first: {first}"


def _bad_request(error: InputError) -> Refused:
    return Refused("bad_data", str(error), http_status=400, grpc_code=3)


def _no_room(sink: str) -> Refused:
    return Refused(
        "queue_full",
        f"the queue of {sink} is full",
        http_status=503,
        grpc_code=14,
        retry_after_s=RETRY_AFTER_SECONDS,
    )
