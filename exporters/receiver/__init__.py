"""The OTLP receiver: traces and metrics by gRPC and HTTP."""

from pasta_otel.exporters.receiver.batch import Group, PointBatch, PointSink, ResourceInfo, SpanBatch, SpanSink
from pasta_otel.exporters.receiver.config import ReceiverConfig
from pasta_otel.exporters.receiver.decode import TraceDecoder
from pasta_otel.exporters.receiver.intake import Intake, Refused, Reply
from pasta_otel.exporters.receiver.server import Receiver

__all__ = [
    "Group",
    "Intake",
    "PointBatch",
    "PointSink",
    "Receiver",
    "ReceiverConfig",
    "Refused",
    "Reply",
    "ResourceInfo",
    "SpanBatch",
    "SpanSink",
    "TraceDecoder",
]
