"""What a user's tool may return, and what becomes of the rest of the results where it returns something else."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pasta_otel
from pasta_otel.errors import InputError
from pasta_otel.gpu.memory.library import source
from pasta_otel.gpu.memory.plain import Plain, strict
from pasta_otel.gpu.memory.tool import LaunchInfo, Tool, check, load_tool
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": ""}, "name must be a word, got ''"),
        ({"name": 7}, "name must be a word, got 7"),
        ({"source": None}, "source must be a path, got None"),
        ({"source": "/nonexistent.cu"}, "/nonexistent.cu does not exist"),
        ({"slot_bytes": "80"}, "slot_bytes must be a positive multiple of 8, got '80'"),
        ({"slot_bytes": 80.0}, "slot_bytes must be a positive multiple of 8, got 80.0"),
        ({"slot_bytes": True}, "slot_bytes must be a positive multiple of 8, got True"),
        ({"slot_bytes": -8}, "slot_bytes must be a positive multiple of 8, got -8"),
        ({"slot_bytes": 84}, "slot_bytes must be a positive multiple of 8, got 84"),
        ({"patches": {"x": "Mine"}}, "patches: 'x' is no Instruction"),
        ({"patches": {999: "Mine"}}, "patches: 999 is no Instruction"),
        ({"optional": {"x": "Mine"}}, "optional: 'x' is no Instruction"),
        ({"optional": {-1: "Mine"}}, "optional: -1 is no Instruction"),
        ({"optional": {1 << 40: "Mine"}}, "optional: 1099511627776 is no Instruction"),
        ({"patches": {3: b"Mine"}}, "patches: b'Mine' is no name of a device function"),
        ({"patches": {3: "Mine(void*)"}}, "patches: 'Mine(void*)' is no name of a device function"),
        ({"patches": ["Mine"]}, "patches must be functions by instruction, got ['Mine']"),
        ({"optional": None}, "optional must be functions by instruction, got None"),
        ({"patches": {}}, "patches and optional are empty: there is nothing to count"),
    ],
)
def test_a_tool_whose_attributes_make_no_sense_is_refused_with_one_line(changes, message):
    tool = type("Changed", (Mine,), changes)()
    with pytest.raises(InputError) as refused:
        check(tool, "m:Changed")
    assert str(refused.value) == f"tool m:Changed: {message}"


def test_instructions_of_newer_libraries_may_be_optional():
    check(type("Newer", (Mine,), {"optional": {999: "Mine"}})(), "m:Newer")
    check(type("OnlyOptional", (Mine,), {"patches": {}, "optional": {43: "Mine"}})(), "m:OnlyOptional")


def write(folder, code):
    path = folder / "printing.py"
    path.write_text(f"from pathlib import Path\nfrom pasta_otel.gpu.memory.tool import Tool\n{code}")
    return f"{path}:Printing"


PRINTS = f"""
print("imported")
class Printing(Tool):
    name, source, patches, slot_bytes = "printing", Path({str(source())!r}), {{3: "PastaGlobal"}}, 8
    def __init__(self): print("made")
    def decode(self, record): return None
"""


def test_what_a_tool_prints_while_it_loads_goes_to_stderr_unless_it_is_the_programs_own(tmp_path, capsys):
    reference = write(tmp_path, PRINTS)
    load_tool(reference)
    assert capsys.readouterr() == ("", "imported\nmade\n")
    load_tool(reference, aside=False)
    assert capsys.readouterr() == ("imported\nmade\n", "")


def test_an_attribute_that_fails_when_it_is_looked_at_is_named_with_its_line(tmp_path):
    code = PRINTS.replace(", slot_bytes", "").replace(", 8\n", "\n")
    reference = write(tmp_path, code + "    @property\n    def slot_bytes(self): return 1 / 0\n")
    with pytest.raises(InputError, match=r"printing.py:\d+: tool Printing: ZeroDivisionError"):
        load_tool(reference)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"modules": None}, "modules: expected shell patterns, got None"),
        ({"kernels": 5}, "kernels: expected shell patterns, got 5"),
        ({"kernels": b"x"}, "kernels: expected shell patterns, got b'x'"),
        ({"kernels": ["a", None]}, "kernels: expected shell patterns, got ['a', None]"),
        ({"every": "2"}, "every: expected a whole number, got '2'"),
        ({"every": True}, "every: expected a whole number, got True"),
        ({"count": 2.0}, "count: expected a whole number, got 2.0"),
        ({"count": None}, "count: expected a whole number, got None"),
        ({"count": 0}, "count: expected at least 1, got 0"),
        ({"device_bytes": 0}, "device_bytes: expected at least 1 MiB (1,048,576 bytes), got 0"),
        ({"hotness": "x"}, "hotness: expected True or False, got 'x'"),
        ({"hotness": None}, "hotness: expected True or False, got None"),
        ({"tool": 5}, "tool 5: is no subclass of pasta_otel.gpu.memory.tool.Tool"),
    ],
)
def test_an_argument_that_makes_no_sense_is_an_input_error(arguments, message):
    with pytest.raises(InputError) as refused:
        pasta_otel.analyze(**arguments)
    assert str(refused.value) == message
