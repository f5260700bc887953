"""The current context, read fast and right."""

from __future__ import annotations

import os

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.context import attach, detach, get_current

from pasta_otel.context import RowSpan, SpanIds, current_context, current_ids, mix64, selected, set_current_context


def span_context(trace_id=5, span_id=6, flags=1):
    return trace.SpanContext(trace_id, span_id, is_remote=False, trace_flags=trace.TraceFlags(flags))


def test_current_ids_are_those_of_the_current_span():
    assert current_ids() is None
    token = attach(trace.set_span_in_context(trace.NonRecordingSpan(span_context())))
    try:
        assert current_ids() == (5, 6, True)
    finally:
        detach(token)
    assert current_ids() is None


def test_an_invalid_span_has_no_ids():
    token = attach(trace.set_span_in_context(trace.INVALID_SPAN))
    try:
        assert current_ids() is None
    finally:
        detach(token)


def test_fast_reading_and_setting_is_the_api_context():
    before = current_context()
    assert before is get_current()
    inside = trace.set_span_in_context(trace.NonRecordingSpan(span_context()))
    set_current_context(inside)
    try:
        assert get_current() is inside
    finally:
        set_current_context(before)


def test_a_row_span_has_the_requests_trace_flags_and_state():
    root = trace.SpanContext(
        5, 6, is_remote=True, trace_flags=trace.TraceFlags(1), trace_state=trace.TraceState([("ot", "th:0")])
    )
    found = RowSpan(root, 77, None, None).get_span_context()
    assert (found.trace_id, found.span_id, found.trace_flags, found.is_remote) == (5, 77, 1, False)
    assert found.trace_state is root.trace_state
    assert not RowSpan(root, 77, None, None).is_recording()


@given(st.integers(1, 2**128 - 1), st.floats(0, 1), st.floats(0, 1))
def test_selection_is_monotone_in_the_rate(trace_id, one, other):
    low, high = sorted((one, other))
    assert not selected(trace_id, low) or selected(trace_id, high)
    assert selected(trace_id, 1.0)
    assert not selected(trace_id, 0.0)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_mixing_never_maps_two_ids_to_one(one, other):
    assert (mix64(one) == mix64(other)) == (one == other)


def test_selection_takes_its_share_also_of_what_a_ratio_sampler_kept():
    for kept in (range(20000), range(2**63, 2**63 + 20000), (n << 44 for n in range(20000))):
        share = sum(selected(trace_id, 0.25) for trace_id in kept) / 20000
        assert 0.235 < share < 0.265


def test_span_ids_differ_in_a_forked_child():
    ids = SpanIds()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, ids().to_bytes(8, "big"))
        os._exit(0)
    os.waitpid(pid, 0)
    child = int.from_bytes(os.read(read, 8), "big")
    os.close(read)
    os.close(write)
    assert child != ids()
    assert child != 0
