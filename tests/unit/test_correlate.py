"""Trace trees from disorderly spans."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pasta_otel.correlate import ROOT, SpanFlag, build_tree, edge_gap, flag_names, self_times, union_length
from pasta_otel.exporters.store.closing import resolve
from tests.support import case

SPAN = st.tuples(st.integers(1, 12), st.integers(0, 14), st.integers(0, 60), st.integers(-5, 60))
SPANS = st.lists(SPAN, min_size=1, max_size=40)


def _columns(spans):
    identifiers, parents, starts, lengths = zip(*spans, strict=True)
    return list(identifiers), list(parents), list(starts), [a + b for a, b in zip(starts, lengths, strict=True)]


@pytest.mark.case("O06")
def test_a_disorderly_trace_becomes_a_tree_with_every_span_once():
    spans = case("O06", "trace.json")["resourceSpans"][0]["scopeSpans"][0]["spans"]
    expected = case("O06", "expected.json")
    tree = build_tree(
        [int(span["spanId"], 16) for span in spans],
        [int(span.get("parentSpanId", "0"), 16) for span in spans],
        [int(span["startTimeUnixNano"]) for span in spans],
    )
    names = [span["name"] for span in spans]
    assert sorted(names[index] for index in tree.roots) == expected["roots"]
    assert {names[i]: names[up] for i, up in enumerate(tree.parent) if up != ROOT} == expected["parent"]
    flags = {names[i]: flag_names(flag) for i, flag in enumerate(tree.flags)}
    assert flags == {"A": [], "B": [], "C": [], "D": ["cycle"], "E": ["self_parent"], "F": ["orphan"]}
    for index in range(len(spans)):
        assert tree.path_to_root(index)[-1] in tree.roots


@given(SPANS)
def test_every_span_stands_exactly_once_and_every_walk_ends_at_a_root(spans):
    identifiers, parents, starts, _ = _columns(spans)
    tree = build_tree(identifiers, parents, starts)
    placed = [*tree.roots, *(child for children in tree.children for child in children)]
    assert sorted(placed) == list(range(len(spans)))
    for index in range(len(spans)):
        path = tree.path_to_root(index)
        assert len(path) == len(set(path))
        assert path[-1] in tree.roots


@given(SPANS)
def test_a_root_that_named_a_parent_says_why_it_is_a_root(spans):
    identifiers, parents, starts, _ = _columns(spans)
    tree = build_tree(identifiers, parents, starts)
    for root in tree.roots:
        assert bool(tree.flags[root]) == (parents[root] != 0)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=12), st.integers(0, 50), st.integers(0, 50))
def test_the_union_is_what_counting_every_unit_gives(intervals, low, high):
    covered = {unit for start, end in intervals for unit in range(max(start, low), min(end, high))}
    assert union_length(intervals, low, high) == len(covered)


@given(SPANS)
def test_self_time_is_between_zero_and_the_duration(spans):
    identifiers, parents, starts, ends = _columns(spans)
    tree = build_tree(identifiers, parents, starts)
    for index, value in enumerate(self_times(tree, starts, ends)):
        assert 0 <= value <= max(0, ends[index] - starts[index])


def test_overlapping_children_are_counted_once_and_only_inside_their_parent():
    tree = build_tree([1, 2, 3, 4], [0, 1, 1, 1], [0, 10, 20, 90])
    assert self_times(tree, [0, 10, 20, 90], [100, 30, 40, 150])[0] == 100 - 30 - 10


def test_an_edge_gap_is_never_negative():
    assert edge_gap(10, [4, 3]) == 3
    assert edge_gap(10, [12]) == 0
    assert edge_gap(10, []) == 10


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 3), SPAN), min_size=1, max_size=60), st.sampled_from([1, 2**54]))
def test_many_traces_at_once_give_what_each_trace_gives_alone(rows, scale):
    traces = [trace for trace, _ in rows]
    identifiers, parents, starts, ends = _columns([row for _, row in rows])
    starts, ends = [value * scale for value in starts], [value * scale for value in ends]
    forest = resolve(
        np.array(traces),
        np.array(identifiers, np.uint64),
        np.array(parents, np.uint64),
        np.array(starts),
        np.array(ends),
    )
    for trace in set(traces):
        own = [row for row, of in enumerate(traces) if of == trace]
        tree = build_tree(*([column[row] for row in own] for column in (identifiers, parents, starts)))
        assert [ROOT if up == ROOT else own[up] for up in tree.parent] == forest.parent[own].tolist()
        assert [int(flag) for flag in tree.flags] == forest.flags[own].tolist()
        expected = self_times(tree, [starts[row] for row in own], [max(starts[row], ends[row]) for row in own])
        assert expected == forest.self_ns[own].tolist()


def test_a_long_chain_is_built_without_recursion():
    size = 100_000
    tree = build_tree(range(1, size + 1), range(size), [0] * size)
    assert len(tree.path_to_root(size - 1)) == size
    cycle = build_tree(range(1, size + 1), [size, *range(1, size)], range(size))
    assert list(cycle.roots) == [0]
    assert cycle.flags[0] == SpanFlag.CYCLE
