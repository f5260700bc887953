"""The demo's order service, written as a user of pasta-otel would: public API and standard instrumentations only."""
