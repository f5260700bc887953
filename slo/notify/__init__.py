"""Tell people that an SLO burns and why: once per burn and once per new cause."""

from pasta_otel.slo.notify.channels import LogChannel, WebhookChannel, make_channels
from pasta_otel.slo.notify.message import Notification
from pasta_otel.slo.notify.notifier import Notifier

__all__ = ["LogChannel", "Notification", "Notifier", "WebhookChannel", "make_channels"]
