"""The demo: a small order service in separate processes, real load, one real fault, and what pasta-otel makes of it."""
