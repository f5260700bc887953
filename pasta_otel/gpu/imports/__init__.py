"""Traces that other tools wrote: which format a file is, and OTLP and Jaeger JSON."""
