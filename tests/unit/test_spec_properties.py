"""Random specifications: what is right comes out as it went in, what is broken is named and never a crash."""

from __future__ import annotations

import copy
from decimal import Decimal

import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pasta_otel.model import SpanSLI
from pasta_otel.slo.spec import load as loading
from pasta_otel.slo.spec.document import Document, parse_documents
from pasta_otel.slo.spec.load import READERS
from pasta_otel.slo.spec.model import PrometheusSLI
from pasta_otel.slo.spec.resolve import resolve

NAMES = st.from_regex(r"\A[a-z]([-a-z0-9]{0,20}[a-z0-9])?\Z")
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=30)
RATIOS = st.integers(0, 99999).map(lambda n: Decimal(n) / 100000)
QUERIES = st.sampled_from(
    ["sum(rate(a[{{.window}}]))", 'sum(rate(b{c="1"}[{{.window}}]))', "sum(increase(d[{{.window}}]))"]
)


class Exact(yaml.SafeDumper):
    """Write decimals as plain numbers."""


Exact.add_representer(
    Decimal,
    lambda dumper, value: dumper.represent_scalar(
        "tag:yaml.org,2002:float", f"{value:f}" if "." in f"{value:f}" else f"{value:f}.0"
    ),
)


def source(kind: str, **spec) -> dict:
    return {"metricSource": {"type": kind, "spec": spec}}


@st.composite
def span_ratios(draw):
    service, operation = draw(NAMES), draw(st.none() | NAMES)
    threshold = draw(st.none() | st.integers(1, 100_000))
    status = draw(st.booleans())
    selector = {"service": service} | ({"operation": operation} if operation else {})
    condition = {"good": "status != error" if status else "any"} | ({"threshold_ms": threshold} if threshold else {})
    sli = SpanSLI(service, operation, good_status=status, threshold_ns=threshold * 1_000_000 if threshold else None)
    return {"good": source("spans", **condition), "total": source("spans", **selector)}, sli


@st.composite
def prometheus_ratios(draw):
    part, total = draw(st.permutations(["sum(rate(x[{{.window}}]))", draw(QUERIES)]))
    if part == total:
        total += " + 0"
    key = draw(st.sampled_from(["good", "bad"]))
    ratio = {key: source("Prometheus", query=part), "total": source("Prometheus", query=total)}
    return ratio, PrometheusSLI(total=total, **{key: part})


@st.composite
def slo_documents(draw):
    ratio, sli = draw(span_ratios() | prometheus_ratios())
    target, name = draw(RATIOS), draw(NAMES)
    annotations = draw(st.dictionaries(NAMES, TEXTS, max_size=3))
    document = {
        "apiVersion": "openslo/v1",
        "kind": "SLO",
        "metadata": {"name": name, "displayName": draw(TEXTS), "annotations": annotations},
        "spec": {
            "service": draw(NAMES),
            "description": draw(TEXTS),
            "budgetingMethod": "Occurrences",
            "timeWindow": [{"duration": f"{draw(st.integers(1, 90))}d", "isRolling": True}],
            "indicator": {"metadata": {"name": draw(NAMES)}, "spec": {"ratioMetric": {"counter": True, **ratio}}},
            "objectives": [{"target": target}],
        },
    }
    return document, name, target, sli, annotations


def dump(document) -> str:
    return yaml.dump(document, Dumper=Exact, allow_unicode=True)


def read(text: str):
    found: list[Document] = parse_documents(text, "random.yaml")
    placed = [item for document in found for item in loading._read(document)]
    slos, problems = resolve(placed)
    return slos, [problem for document in found for problem in document.problems] + problems


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(slo_documents())
def test_a_right_specification_comes_out_as_it_went_in(drawn):
    document, name, target, sli, annotations = drawn
    (slo,), problems = read(dump(document))
    assert problems == []
    assert (slo.name, slo.objective, slo.sli) == (name, target, sli)
    assert dict(slo.annotations) == annotations


def paths(value, at=()):
    yield at
    if isinstance(value, dict):
        for key, child in value.items():
            yield from paths(child, (*at, key))
    if isinstance(value, list):
        for number, child in enumerate(value):
            yield from paths(child, (*at, number))


JUNK = st.sampled_from(
    [None, 0, -1, 1, 10**30, True, "", "x", "\u2028", [], {}, [[]], {"a": 1}, Decimal("1.5"), "1h", "99"]
)


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(slo_documents(), st.data())
def test_a_broken_specification_is_refused_with_a_line_or_read_without_a_crash(drawn, data):
    document = copy.deepcopy(drawn[0])
    place = data.draw(st.sampled_from([path for path in paths(document) if path]))
    parent = document
    for step in place[:-1]:
        parent = parent[step]
    if data.draw(st.booleans()) and isinstance(parent, dict):
        del parent[place[-1]]
    else:
        parent[place[-1]] = data.draw(JUNK)
    slos, problems = read(dump(document))
    text = dump(document).split("\n")
    for problem in problems:
        assert problem.line is not None
        assert 1 <= problem.line <= len(text)
        assert problem.message
    if not any(problem.severity == "error" for problem in problems):
        assert all(0 <= slo.objective < 1 for slo in slos)


@settings(deadline=None, max_examples=200)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | TEXTS,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
        max_leaves=20,
    ),
    st.sampled_from([*READERS, "openslo/v9", 7]),
)
def test_any_yaml_at_all_is_read_without_a_crash(value, version):
    if isinstance(value, dict):
        value = {"apiVersion": version, "version": version, "kind": "SLO"} | value
    read(dump(value))
