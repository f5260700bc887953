"""``report.html``: one self-contained page that shows a run of the demo; it needs no network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from pasta_otel.demo import svg, waterfall
from pasta_otel.demo.load import RequestRecord
from pasta_otel.demo.report import Run
from pasta_otel.demo.svg import Dot, Line, Mark
from pasta_otel.model import SpanSLI
from pasta_otel.slo.page import metric_words

NS = 1_000_000_000
CAUSES_MOST = 5
EVIDENCE_MOST = 4
Json = dict[str, Any]


def render(run: Run, report: Json) -> str:
    """Return the page."""
    style = files("pasta_otel.demo").joinpath("data", "report.css").read_text(encoding="utf-8")
    body = "".join((
        _head(report),
        _section("Latency of every order", _latency(run), "Log scale. Time 0 is the fault.", _latency_legend()),
        _section("Burn rates", _burn(run), "Solid: 30 s window; thin: 5 s window. An SLO burns when both are above.",
                 _burn_legend(run)),
        _section("Causes, best first", _causes(report)),
        _section("One slow order", waterfall.render(_spans(run)), "", waterfall.legend(_spans(run))),
        _section("Actions", _actions(run, report)),
        _section("SLOs", _slos(report)),
        _section("Spans", _ledger(report)),
        _section("Environment", _environment(report)),
    ))  # fmt: skip
    title = f"pasta-otel demo: {report['fault']}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body><main>{body}</main></body></html>\n"
    )


def _section(title: str, body: str, note: str = "", legend: str = "") -> str:
    if not body:
        return ""
    hint = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2>{legend}{hint}{body}</section>"


# the top of the page


def _head(report: Json) -> str:
    badge = ("good", "as expected") if report["passed"] else ("bad", "not as expected")
    problems = "".join(f"<li>{escape(problem)}</li>" for problem in report["problems"])
    tiles = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in _tiles(report)
    )
    return (
        f'<header><h1>{escape(report["fault"])} <span class="badge {badge[0]}">{badge[1]}</span></h1>'
        f"<p>{escape(_story(report))}</p>{f'<ul>{problems}</ul>' if problems else ''}"
        f'<div class="tiles">{tiles}</div></header>'
    )


def _story(report: Json) -> str:
    words = f"{report['injected'][:1].upper()}{report['injected'][1:]}."
    if report["detected_after_s"] is None:
        return f"{words} No SLO burned."
    cause = report["causes"][0] if report["causes"] else None
    found = f" The first cause found: {cause['kind']} {cause['target']}." if cause else " No cause was found."
    done = sorted({action["target"] for action in report["actions"] if action["action"] == "flag.set"})
    acted = f" {', '.join(done)} turned on." if done else " Nothing was degraded; people were notified."
    return words + found + acted + _ending(report)


def _ending(report: Json) -> str:
    if report["recovered_after_s"] is None:
        return " The SLOs did not recover."
    removed = report["removed_after_s"]
    if removed is None or removed > report["recovered_after_s"]:
        return " The SLOs recovered while the fault still ran."
    return " The SLOs recovered once the fault was removed."


def _tiles(report: Json) -> list[tuple[str, str]]:
    latency = report["load"]["latency_ms"]
    medians = {name: f"{value['p50']:.0f} ms" if value else "-" for name, value in latency.items()}
    return [
        ("fault to detection", _seconds(report["detected_after_s"])),
        ("fault to cause and action", _seconds(report["answered_after_s"])),
        ("fault to recovery", _seconds(report["recovered_after_s"])),
        ("median before", medians["before"]),
        ("median during", medians["during"]),
        ("median after", medians["after"]),
    ]


# plots


def _marks(run: Run) -> list[Mark]:
    story = run.story
    moments = [
        (story.injected, "fault", "fault"),
        (run.crossing.monotonic_ns if run.crossing else 0, "threshold crossed", "neutral"),
        (story.detected, "detected", "bad"),
        (story.answered, "cause and action", "neutral"),
        (story.removed, "fault removed", "neutral"),
        (story.recovered, "recovered", "good"),
    ]
    return [Mark(_at(run, at), label, kind) for at, label, kind in sorted(moments) if at]


def _at(run: Run, monotonic_ns: int) -> float:
    return (monotonic_ns - run.story.injected) / NS


def _range(run: Run) -> tuple[float, float]:
    ends = [_at(run, record.end_monotonic_ns) for record in run.requests] or [0.0, 1.0]
    return min(ends), max(*ends, min(ends) + 1.0)


def _latency(run: Run) -> str:
    limit_ms = min((slo.sli.threshold_ns / 1e6 for slo in run.slos if _has_threshold(slo.sli)), default=0.0)
    sent = [record for record in run.requests if record.outcome != "not_sent"]
    values = [record.latency_ms for record in sent]
    axis = svg.log_axis([*values, limit_ms or 1.0], " ms")
    limit = (limit_ms, f"objective: {limit_ms:g} ms") if limit_ms else None
    plot = svg.Plot("Latency of every order over time", *_range(run), axis, limit)
    return _scroll(plot.render(_marks(run), (_dot(run, record, limit_ms) for record in sent)))


def _has_threshold(sli: Any) -> bool:
    return isinstance(sli, SpanSLI) and sli.threshold_ns is not None


def _dot(run: Run, record: RequestRecord, limit_ms: float) -> Dot:
    kind = "slow" if limit_ms and record.latency_ms > limit_ms else "ok"
    kind = "failed" if record.outcome != "ok" else "degraded" if record.degraded else kind
    title = f"order {record.number}: {record.outcome}, {record.latency_ms:.1f} ms {record.detail}".strip()
    return Dot(_at(run, record.end_monotonic_ns), record.latency_ms, kind, title)


def _latency_legend() -> str:
    names = {"ok": "fine", "slow": "too slow", "failed": "failed", "degraded": "fine, without recommendations"}
    return _legend((f"dot {kind}", name) for kind, name in names.items())


def _burn(run: Run) -> str:
    points = run.watch.points
    if not points:
        return ""
    factor = points[-1].factor
    high = max([factor * 1.5, *(p.long or 0.0 for p in points), *(p.short or 0.0 for p in points)])
    plot = svg.Plot("Burn rates over time", *_range(run), svg.linear_axis(high), (factor, f"burning above {factor:g}"))
    lines = []
    for index, name in enumerate(_slo_names(run)):
        own = [point for point in points if point.slo == name]
        lines.append(Line([(_at(run, p.monotonic_ns), p.short) for p in own], f"slo{index} thin"))
        lines.append(Line([(_at(run, p.monotonic_ns), p.long) for p in own], f"slo{index}"))
    return _scroll(plot.render(_marks(run), lines=lines))


def _slo_names(run: Run) -> list[str]:
    return sorted({point.slo for point in run.watch.points})


def _burn_legend(run: Run) -> str:
    return _legend((f"key slo{index}", name) for index, name in enumerate(_slo_names(run)))


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    return (
        '<p class="legend">'
        + "".join(f'<span><i class="{css}"></i>{escape(name)}</span>' for css, name in entries)
        + "</p>"
    )


def _scroll(element: str) -> str:
    return f'<div class="scroll"><div class="plot">{element}</div></div>'


# tables


def _spans(run: Run) -> Sequence[Json]:
    spans: Sequence[Json] = (run.story.trace or {}).get("spans", ())
    return spans


def _causes(report: Json) -> str:
    if not report["causes"]:
        return "<p>No cause passed the thresholds.</p>"
    return "".join(_cause(rank, cause) for rank, cause in enumerate(report["causes"][:CAUSES_MOST], start=1))


def _cause(rank: int, cause: Json) -> str:
    rows = [
        [e["family"], metric_words(e), _quantity(e["metric"], e["before"]), _quantity(e["metric"], e["after"]),
         f"{e['effect']:+.2f}", str(e["n"])]
        for e in cause["evidence"][:EVIDENCE_MOST]
    ]  # fmt: skip
    evidence = _table(("from", "what", "before", "after", "effect", "n"), rows)
    score = cause["score"]
    bar = f'<span class="score"><i style="width:{100 * score:.0f}%"></i></span><small>{score:.2f}</small>'
    title = f'<span class="rank">{rank}</span> {escape(cause["target"])} <code>{escape(cause["kind"])}</code>'
    return f'<article class="cause"><h3>{title}{bar}</h3>{evidence}</article>'


def _quantity(metric: str, value: float) -> str:
    if metric.endswith("_seconds"):
        return f"{value * 1000:.3g} ms"
    return f"{100 * value:.1f} %" if metric.endswith(("_ratio", "_share")) else f"{value:.3g}"


def _actions(run: Run, report: Json) -> str:
    rows = [
        [
            action["time"][11:19],
            action["action"],
            action["target"],
            action["outcome"],
            action["cause"],
            action["reason"],
        ]
        for action in report["actions"]
    ]
    del run
    return _table(("UTC", "action", "target", "outcome", "because of", "reason"), rows) if rows else "<p>None.</p>"


def _slos(report: Json) -> str:
    names = sorted({state["name"] for part in report["slo"].values() for state in part})
    rows = []
    for name in names:
        parts = [
            next((s for s in report["slo"][part] if s["name"] == name), None) for part in ("before", "during", "after")
        ]
        rows.append([name, *(_verdict(state) for state in parts)])
    return _table(("SLO", "before", "during", "after"), rows)


def _verdict(state: Json | None) -> str:
    if state is None:
        return "-"
    rates = state["burn_rates"][:1]
    shown = ["-" if rate[key] is None else f"{rate[key]:.1f}" for rate in rates for key in ("long", "short")]
    return str(state["verdict"]) + (f", burn rates {' / '.join(shown)}" if shown else "")


def _ledger(report: Json) -> str:
    spans = report["spans"]
    rejected = sum(spans.get("rejected", {}).values())
    rows = [
        [name, str(sink["ok"]), _counts(sink["dropped"]), str(sink["pending"])]
        for name, sink in spans.get("sinks", {}).items()
    ]
    received = f"<p>{spans.get('received', 0)} received, {rejected} rejected.</p>"
    return received + _table(("sink", "ok", "dropped", "pending"), rows)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items())) or "0"


def _environment(report: Json) -> str:
    flat = {**report["environment"], **report["environment"]["packages"]}
    rows = [[name, str(value)] for name, value in flat.items() if not isinstance(value, dict)]
    return f"<details><summary>What it ran on</summary>{_table(('what', 'value'), rows)}</details>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"
