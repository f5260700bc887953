"""Publishes this process's trace context for host probes: pure Python, no privilege, nothing leaves the process."""

from pasta_otel.publish.publication import Publication, publish_context, withdraw_context

__all__ = ["Publication", "publish_context", "withdraw_context"]
