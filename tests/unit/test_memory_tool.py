"""What a user's tool may return, and what becomes of the rest of the results where it returns something else."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasta_otel.errors import InputError
from pasta_otel.gpu.memory.library import source
from pasta_otel.gpu.memory.plain import Plain, strict
from pasta_otel.gpu.memory.tool import LaunchInfo, Tool
from pasta_otel.gpu.memory.tool_report import ToolReport


@dataclass(frozen=True)
class Found:
    value: Any


class Mine(Tool[Found]):
    name, source, patches, slot_bytes = "mine", source(), {3: "PastaGlobal"}, 8

    def __init__(self, tables: Any = None) -> None:
        self.said = tables

    def decode(self, record):
        return Found(record.slot)

    def tables(self):
        if isinstance(self.said, BaseException):
            raise self.said
        return {} if self.said is None else self.said

    def report(self, results):
        return f"{[one['result']['value'] for one in results]} {dict(self.process_tables)}"


class Raises(Mine):
    def as_json(self, result):
        raise result.value


def launches(*values):
    return [(LaunchInfo("k", (1, 1, 1), (32, 1, 1), 0, number=at), Found(one)) for at, one in enumerate(values, 1)]


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({1, 2}, "mine: TypeError: Object of type set is not JSON serializable in as_json()"),
        (b"raw", "mine: TypeError: Object of type bytes is not JSON serializable in as_json()"),
        ({(1, 2): 3}, "mine: TypeError: keys must be str, int, float, bool or None, not tuple in as_json()"),
    ],
)
def test_a_result_that_is_no_json_loses_its_own_launch_and_is_named(value, problem):
    plain = Plain(Mine())
    kept = plain.launches(launches(1, value, value, 3))
    assert [(one["number"], one["result"]) for one in kept] == [(1, {"value": 1}), (4, {"value": 3})]
    assert (plain.lost, plain.problems) == (2, [problem])


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), RecursionError("deep")])
def test_an_as_json_that_fails_loses_its_own_launch_and_names_its_line(error):
    plain = Plain(Raises())
    assert plain.launches(launches(error)) == []
    (problem,) = plain.problems
    assert problem.startswith(f"mine: {type(error).__name__}: {error} in as_json() ({__file__}:")


@pytest.mark.parametrize("tables", [ZeroDivisionError("x"), SystemExit(1), {"a": {1}}, ["a", "list"], "text", 7])
def test_tables_that_fail_or_are_no_dictionary_lose_nothing_else(tables):
    plain = Plain(Mine(tables))
    assert plain.tables() == {}
    (problem,) = plain.problems
    assert problem.startswith("mine: ")
    assert "tables()" in problem
    assert len(plain.launches(launches(1))) == 1


def document(values, **more):
    plain = Plain(Mine())
    counts = {"seen": len(values), "skipped": {}, "problems": [], "launches": plain.launches(launches(*values))}
    return {**counts, **more}


def test_tables_reach_json_and_the_tools_own_report_by_process():
    tables = {"launches": [], "seen": 0, "hello": 1}
    report = ToolReport(Mine(), {7: document([5], tables=tables), 8: document([6])})
    found = report.as_dict()
    assert found["tables"] == {"7": tables}
    assert [one["result"]["value"] for one in found["results"]] == [5, 6]
    assert report.as_text().endswith(f"[5, 6] {{7: {tables}}}")
    assert f"hello&#x27;: {tables['hello']}" in report.as_html()


def test_optional_instructions_that_were_not_known_are_said():
    report = ToolReport(Mine(), {7: document([5], not_counted=[43, 999]), 8: document([5], not_counted=[43])})
    assert report.as_dict()["not_counted"] == [43, 999]
    assert "not counted: TMA_LOAD, instruction 999, which this version of the Sanitizer cannot report" in (
        report.as_text()
    )


def test_a_report_that_exits_is_the_tools_fault():
    tool = Mine()
    tool.report = lambda results: (_ for _ in ()).throw(SystemExit(5))
    with pytest.raises(InputError, match="report: SystemExit: 5"):
        ToolReport(tool, {7: document([5])}).as_text()


numbers = st.floats() | st.integers() | st.text() | st.none() | st.booleans()
values = st.recursive(numbers, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


@given(values)
def test_json_reports_hold_only_what_json_knows_whatever_the_records_hold(value):
    found = ToolReport(Mine(), {7: document([value], tables={"value": value})}).as_dict()
    written = json.dumps(found, allow_nan=False)
    assert json.loads(written)["tables"]["7"] == {"value": strict(value)}


def test_numbers_that_json_does_not_know_become_words_and_all_others_stay():
    value = {"a": [math.nan, (math.inf, -math.inf)], math.nan: 1.5, 3: None}
    assert strict(value) == {"a": ["NaN", ["Infinity", "-Infinity"]], "NaN": 1.5, 3: None}
