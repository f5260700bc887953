"""The embedded span store."""

from pasta_otel.exporters.store.store import DuckDBSpanStore, StoreConfig
from pasta_otel.exporters.store.traces import Closing

__all__ = ["Closing", "DuckDBSpanStore", "StoreConfig"]
