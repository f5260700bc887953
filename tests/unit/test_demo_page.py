"""What the report page draws: a waterfall that is a tree, plots that stay inside their frame, text that is escaped."""

from __future__ import annotations

import re
from importlib.resources import files

from hypothesis import given, settings
from hypothesis import strategies as st

from pasta_otel import semconv
from pasta_otel.demo import svg, waterfall


def span(span_id: str, parent: str | None, start: int, end: int, **more) -> dict:
    return {
        "span_id": span_id, "parent_span_id": parent, "service": "model", "name": span_id, "kind": 1, "status": "unset",
        "start_time_unix_nano": start, "end_time_unix_nano": end, "duration_ns": end - start, "self_time_ns": None,
        "attributes": {}, **more,
    }  # fmt: skip


def module(path: str, parent: str, start: int, end: int) -> dict:
    return span(path, parent, start, end, attributes={semconv.MODULE_PATH: path})


def test_parents_come_before_their_children_and_orphans_are_roots():
    spans = [span("b", "a", 2, 3), span("a", None, 0, 9), span("c", "gone", 1, 2), span("d", "a", 1, 2)]
    assert [(s["span_id"], depth) for s, depth in waterfall.walk(spans)] == [("a", 0), ("d", 1), ("b", 1), ("c", 0)]


def test_outer_modules_are_always_drawn_and_short_inner_ones_are_counted():
    spans = [span("root", None, 0, 1000), module("encoder.layers.3", "root", 1, 2),
             module("encoder.layers.3.attention.project_in", "root", 1, 2),
             module("encoder.layers.4.attention.project_in", "root", 10, 900)]  # fmt: skip
    drawn = waterfall.render(spans)
    assert "encoder.layers.3<" in drawn
    assert "encoder.layers.3.attention.project_in" not in drawn
    assert "encoder.layers.4.attention.project_in" in drawn
    assert "1 shorter module spans" in drawn


def test_a_path_that_does_not_fit_loses_its_beginning_and_keeps_its_layer():
    drawn = waterfall.render([span("root", None, 0, 1000), module("encoder.layers.3", "root", 1, 900)])
    assert "<bdi>encoder.layers.3</bdi>" in drawn, "isolated: from the right only where it is cut"
    css = files("pasta_otel.demo").joinpath("data", "report.css").read_text(encoding="utf-8")
    assert re.search(r"\.row\.module \.name \{[^}]*direction: rtl; text-align: left", css)


def test_a_client_span_says_whom_it_called():
    spans = [span("call", None, 0, 10, kind=3, name="POST"), span("work", "call", 1, 9, kind=2, service="payment")]
    assert ">POST to payment<" in waterfall.render(spans)


def test_names_from_spans_are_escaped():
    assert "<script>" not in waterfall.render([span("a", None, 0, 5, name="<script>alert(1)</script>")])


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 10**6)), min_size=1, max_size=20))
def test_bars_stay_inside_their_track(intervals):
    spans = [span(str(n), None, start, start + took) for n, (start, took) in enumerate(intervals)]
    for left, width in re.findall(r"left:([\d.]+)%;width:([\d.]+)%", waterfall.render(spans)):
        assert 0 <= float(left) <= 100
        assert float(left) + float(width) <= 100.011  # two roundings


@settings(deadline=None)
@given(st.lists(st.floats(0.05, 50_000), min_size=1, max_size=50))
def test_a_log_axis_holds_its_values_between_round_ticks(values):
    axis = svg.log_axis(values, " ms")
    assert axis.low <= min(values) * 1.0001
    assert axis.high >= max(values) * 0.9999
    assert axis.ticks == sorted(axis.ticks)
    assert axis.low < axis.high
    assert all(0 <= axis.share(value) <= 1 for value in values)


@settings(deadline=None)
@given(st.floats(0.1, 1000))
def test_a_linear_axis_starts_at_zero_and_reaches_its_highest_value(high):
    axis = svg.linear_axis(high)
    assert (axis.low, axis.share(0.0)) == (0.0, 0.0)
    assert axis.high >= high * 0.9999


def test_a_line_breaks_where_there_is_no_data():
    plot = svg.Plot("rates", 0, 10, svg.linear_axis(5))
    drawn = plot.render([], lines=[svg.Line([(0, 1.0), (1, 2.0), (2, None), (3, 1.0), (4, 1.0)], "slo0")])
    path = re.search(r' d="([^"]+)"', drawn)[1]
    assert (path.count("M"), path.count("L")) == (2, 2)
