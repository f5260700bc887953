"""The status page, from a real store, as a browser and a parser see it."""

from __future__ import annotations

import json
import re
import time
from html.parser import HTMLParser

import pytest

from pasta_otel import cli
from pasta_otel.exporters.ledger import Ledger
from pasta_otel.exporters.receiver import Intake
from pasta_otel.exporters.store import DuckDBSpanStore
from pasta_otel.slo.page import page
from tests.telemetry import SERVER, request, span

SECOND = 1_000_000_000
SPEC = """
apiVersion: openslo/v1
kind: SLO
metadata:
  name: orders
  annotations: {owner: "<script>alert(1)</script>", runbook: "https://example.com/r?a=1&b=2", dashboard: "javascript:alert(1)"}
spec:
  service: order-api
  budgetingMethod: Occurrences
  timeWindow: [{duration: 1h, isRolling: true}]
  indicator:
    metadata: {name: right}
    spec: {ratioMetric: {rawType: success, raw: {metricSource: {type: spans, spec: {service: order-api}}}}}
  objectives: [{target: 0.95}]
"""


class Tags(HTMLParser):
    """Check that what is opened is closed, and collect references."""

    VOID = ("meta", "rect", "line", "path")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        self.references += [value or "" for key, value in attrs if key in {"src", "href", "xlink:href"}]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag in self.VOID:
            return
        while self.open and self.open[-1] != tag and self.open[-1] in {"html", "p"}:
            self.open.pop()
        assert self.open.pop() == tag


class ArrivalClock:
    now = 0

    def unix_nano(self) -> int:
        return self.now

    def monotonic_ns(self) -> int:
        return self.now


@pytest.fixture
def files(tmp_path):
    """A store file with ten minutes of requests, half of which fail from the eighth on."""
    now = time.time_ns()
    ledger = Ledger(["store"])
    store = DuckDBSpanStore.open(str(tmp_path / "spans.duckdb"), ledger)
    clock = ArrivalClock()
    intake = Intake([store], ledger, clock=clock)
    for number in range(1, 601):
        end = now - (600 - number) * SECOND
        fields = span(
            "POST /orders",
            identifier=number,
            kind=SERVER,
            start=end - 1000,
            end=end,
            error=number > 480 and number % 2 == 0,
        )
        clock.now = end  # it arrives when it ends
        intake.traces(request(fields, service="order-api").SerializeToString())
    assert store.flush()
    store.close()
    (tmp_path / "slo.yaml").write_text(SPEC)
    return tmp_path


def test_a_store_file_is_evaluated_once_and_drawn(capsys, files):
    with pytest.raises(SystemExit):
        cli.main(["slo", "status", "--slo", str(files / "slo.yaml"), "--store", str(files / "spans.duckdb"),
                  "--windows", "demo", "--grace", "0", "--json", "--html", str(files / "page.html")])  # fmt: skip
    document = json.loads(capsys.readouterr().out)
    (state,) = document["slos"]
    assert state["budget"]["total"] == 600
    assert state["budget"]["remaining"] == pytest.approx(1 - (60 / 600) / 0.05)
    assert len(state["history"]) == 60
    assert state["history"][-1]["remaining"] == pytest.approx(state["budget"]["remaining"], abs=0.05)
    text = (files / "page.html").read_text()
    tags = Tags()
    tags.feed(text)
    assert tags.open in ([], ["html"])
    assert "script" not in tags.seen
    assert tags.references == ["https://example.com/r?a=1&b=2"]
    assert not re.search(r"url\(|@import", text)
    for words in ("orders", "order-api", "Error budget", "Burn rate", "Over time", "above 2.4"):
        assert words in text


def state(**more):
    return {
        "name": "a<b", "service": "s", "objective": 0.9, "verdict": "no_data", "reason": "stale", "detail": "", "since": "t",
        "burn_since": None, "silenced": None, "burn_rates": [], "attribution": None, "annotations": {},
        "budget": {"remaining": None, "good": 0, "total": 0, "coverage": 1.0, "period": None, "exhausted_in_seconds": None, "degraded": False},
    } | more  # fmt: skip


def test_a_page_without_data_says_so_and_names_are_escaped():
    text = page({"time": "now", "slos": [state()]})
    assert "a&lt;b" in text
    assert "no_data (stale)" in text
    assert "Error budget: no data" in text


def test_burning_slos_come_first_and_an_overspent_budget_is_said_in_words():
    budget = state()["budget"] | {"remaining": -0.5, "total": 10, "coverage": 0.25}
    text = page(
        {"time": "now", "slos": [state(verdict="ok", name="fine"), state(verdict="burning", name="bad", budget=budget)]}
    )
    assert text.index(">bad<") < text.index(">fine<")
    assert "overspent by 50.0 %" in text
    assert "25 % of the period is covered" in text
