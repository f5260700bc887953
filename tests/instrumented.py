"""Shared by the tests of module spans: a program with its own TracerProvider, and its rows."""

from __future__ import annotations

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from torch import nn

import pasta_otel


class Rows(list):
    def offer(self, row):
        self.append(row)

    def names(self):
        return [row.site.name for row in self]

    def named(self, name):
        return [row for row in self if row.site.name == name]

    def one(self, name):
        (row,) = self.named(name)
        return row


class App:
    """A program with its own provider and its own exporter."""

    def __init__(self, **options):
        self.rows = Rows()
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False, sampler=options.pop("sampler", None))
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.running = pasta_otel.instrument(sink=self.rows, tracer_provider=self.provider, **options)
        self.tracer = self.provider.get_tracer("the program")

    def request(self, name="request"):
        return self.tracer.start_as_current_span(name)

    def spans(self):
        return {span.name: span for span in self.exporter.get_finished_spans()}

    def close(self):
        pasta_otel.uninstrument()
        self.provider.shutdown()


class Block(nn.Module):
    def __init__(self, inner=None):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.inner = inner

    def forward(self, x):
        return self.linear(x) if self.inner is None else self.inner(self.linear(x))
