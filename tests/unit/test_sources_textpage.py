"""Other exporters' pages: good lines are kept, bad ones named, no number is made up."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pasta_otel.errors import InputError
from pasta_otel.slo.sources.textpage import Histogram, by_name, merge_histogram, read_page

CASES = Path(__file__).parents[1] / "fixtures" / "cases"


def text(case: str, name: str) -> str:
    return (CASES / case / name).read_text()


def expected(case: str) -> dict:
    return json.loads(text(case, "expected.json"))


@pytest.mark.case("P03")
def test_one_bound_spelled_in_two_ways_is_one_bucket():
    want = expected("P03")
    merged = merge_histogram([read_page(text("P03", f"target_{name}.prom")) for name in ("a", "b")], "lat_seconds")
    assert merged.buckets == (
        (1.0, want["merged"]["1"]),
        (2.5, want["merged"]["2.5"]),
        (math.inf, want["merged"]["+Inf"]),
    )
    for share, key in ((0.5, "p50"), (0.75, "p75"), (0.99, "p99")):
        assert merged.quantile(share) == pytest.approx(want[key])


@pytest.mark.case("P05")
def test_a_missing_or_oddly_spelled_infinite_bucket_is_put_right():
    rebuilt = merge_histogram([read_page(text("P05", "a_missing_inf.prom"))], "a")
    assert rebuilt.buckets[-1] == (math.inf, 42)
    assert rebuilt.warnings
    assert rebuilt.quantile(0.5) == pytest.approx(expected("P05")["a_p50"])
    lower = merge_histogram([read_page(text("P05", "b_lower_inf.prom"))], "a")
    assert lower.quantile(0.5) == pytest.approx(expected("P05")["b_p50"])
    assert not lower.warnings
    without_count = text("P05", "a_missing_inf.prom").replace("a_count 42", "")
    assert merge_histogram([read_page(without_count)], "a").quantile(0.5) is None


@pytest.mark.case("P05")
def test_open_metrics_with_a_wrong_bound_is_refused_at_its_line():
    with pytest.raises(InputError) as caught:
        read_page(text("P05", "b_lower_inf.openmetrics.txt"), open_metrics=True)
    assert (caught.value.kind, caught.value.line) == ("invalid le", 4)


@pytest.mark.case("P06")
def test_a_page_with_texts_for_numbers_keeps_its_good_lines():
    want = expected("P06")
    page = read_page(text("P06", "third_party.prom"))
    assert by_name(page) == want["good"]
    assert [error.line for error in page.errors] == want["bad_lines"]
    assert {error.kind for error in page.errors} == {"not a number"}


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("a 1", 1.0), ("a 1.5e3 1700000000", 1500.0), ('a{b="c\\"d\\\\e\\nf"} 2', 2.0), ("a{} 3", 3.0), ("a .5", 0.5),
        ('a{b="x}y",} 4', 4.0), ("a -Inf", -math.inf), ('a_total{x="y"} 5 # {trace_id="1"} 0.2', 5.0),
    ],
)  # fmt: skip
def test_what_the_format_allows_is_read(line, value):
    page = read_page(line)
    assert [sample.value for sample in page.samples] == [value]


@pytest.mark.parametrize(
    "line", ["{} 1", "a{b=c} 1", 'a{b="c" 1', "a", "a 1 2 3", "a 0x10", "a 1_000", "a ٣", 'a{b="c"']
)
def test_what_it_does_not_allow_is_named(line):
    page = read_page(f"ok 1\n{line}\n")
    assert [error.line for error in page.errors] == [2]
    assert len(page.samples) == 1


@settings(deadline=None)
@given(st.text())
def test_any_text_at_all_is_read_without_a_crash(page):
    found = read_page(page)
    assert len(found.samples) + len(found.errors) <= page.count("\n") + 1


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), min_size=2, max_size=6), st.floats(0, 1))
def test_a_quantile_lies_between_zero_and_the_last_finite_bound(counts, share):
    total, buckets = 0, []
    for number, count in enumerate(counts):
        total += count
        buckets.append((math.inf if number == len(counts) - 1 else float(number + 1), float(total)))
    value = Histogram(tuple(buckets)).quantile(share)
    assert value is None if not total else 0 <= value <= len(counts) - 1
