"""Bad events of an SLI by name: spans that a person can open."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from pasta_otel.exporters.store.counts import KINDS
from pasta_otel.exporters.store.questions import span_ref
from pasta_otel.model import SpanRef, SpanSLI, TimeWindow


def bad_spans(open_cursor: Callable[[], Any], sli: SpanSLI, window: TimeWindow, limit: int) -> list[SpanRef]:
    """Return bad events of a window: failed ones first, then the slowest."""
    conditions, values = _bad(sli)
    for key, value in sli.where:
        conditions += " and json_extract_string(s.attributes, ?) = ?"
        pointer = "/" + key.replace("~", "~0").replace("/", "~1")
        values += [pointer, value if isinstance(value, str) else json.dumps(value)]
    query = f"""
        select s.trace_hi, s.trace_lo, s.span_id
        from spans s join operations o using (op_id)
        where o.service = ? and (? is null or o.operation = ?) and o.kind = ?
          and s.end_unix_nano >= ? and s.end_unix_nano < ? and s.end_unix_nano > 0 and {conditions}
        order by s.status = 2 desc, s.duration_ns desc, s.end_unix_nano limit ?"""  # noqa: S608 - fixed text; values are parameters
    window_values = [window.start_unix_nano, window.end_unix_nano]
    parameters = [sli.service, sli.operation, sli.operation, KINDS[sli.kind], *window_values, *values, limit]
    with open_cursor() as cursor:
        return [span_ref(*row) for row in cursor.execute(query, parameters).fetchall()]


def _bad(sli: SpanSLI) -> tuple[str, list[Any]]:
    """Return the SQL condition for a bad event."""
    if sli.threshold_ns is None:
        return ("s.status = 2", []) if sli.good_status else ("false", [])
    if sli.good_status:
        return "(s.status = 2 or s.duration_ns > ?)", [sli.threshold_ns]
    return "s.duration_ns > ?", [sli.threshold_ns]
