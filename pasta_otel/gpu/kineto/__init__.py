"""PyTorch profiler (Kineto) traces: read as a stream, whatever their dialect, into the rows of the live capture."""

from pasta_otel.gpu.kineto.ranks import read_job
from pasta_otel.gpu.kineto.read import KinetoTrace, ReadOptions, read_trace

__all__ = ["KinetoTrace", "ReadOptions", "read_job", "read_trace"]
