"""What a person sees: a live table on a terminal, plain lines elsewhere; always on stderr."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pasta_otel.demo.load import RequestRecord
from pasta_otel.demo.scenario import Phase
from pasta_otel.demo.watch import Watch

LINE_SECONDS = 3.0
BAR_WIDTH = 24
STYLES = {"ok": "green", "burning": "bold red", "no_data": "dim"}
PHASES: dict[Phase, str] = {
    "start": "starting",
    "baseline": "baseline",
    "fault": "fault",
    "burning": "burning",
    "recovery": "recovery",
    "stop": "stopping",
    "done": "done",
}


class LiveView:
    """Progress and burn rates.

    Args:
        console: Where to write.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=5, transient=True) if console.is_terminal else None
        self._started = time.monotonic()
        self._next_line = 0.0
        self._phase: Phase = "start"

    def __enter__(self) -> LiveView:  # noqa: PYI034 - no subclasses
        """Begin to draw."""
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End."""
        if self._live:
            self._live.stop()

    def phase(self, phase: Phase, words: str) -> None:
        """Say that a phase began."""
        self._phase = phase
        if phase != "done":
            line = Text.assemble((f"{self._elapsed():6.1f} s  ", "dim"), (f"{PHASES[phase]:<9}", "bold"), f" {words}")
            self._console.print(line, highlight=False, soft_wrap=True)

    def update(self, watch: Watch, latest: RequestRecord | None) -> None:
        """Show the latest readings: at once on a terminal, now and then elsewhere."""
        if self._live:
            self._live.update(self._table(watch, latest))
        elif self._elapsed() >= self._next_line and watch.states:
            self._next_line = self._elapsed() + LINE_SECONDS
            for line in lines(watch, latest):
                self._console.print(f"{self._elapsed():6.1f} s  {'':<9} {line}", highlight=False, soft_wrap=True)

    def _elapsed(self) -> float:
        return time.monotonic() - self._started

    def _table(self, watch: Watch, latest: RequestRecord | None) -> Table:
        table = Table(title=f"{self._elapsed():.0f} s, {PHASES[self._phase]}", title_justify="left", expand=False)
        for column in ("SLO", "verdict", "burn rate 30 s / 5 s", ""):
            table.add_column(column)
        for name, state in sorted(watch.states.items()):
            table.add_row(name, Text(state["verdict"], STYLES[state["verdict"]]), *_rates(state))
        table.add_row("latest order", _outcome(latest), f"{latest.latency_ms:.0f} ms" if latest else "", "")
        return table


def _rates(state: dict[str, Any]) -> tuple[str, Text]:
    if not state["burn_rates"]:
        return "", Text()
    rate = state["burn_rates"][0]
    shown = f"{_number(rate['long'])} / {_number(rate['short'])}, burning above {rate['factor']:.1f}"
    share = min(1.0, (rate["long"] or 0.0) / (2 * rate["factor"]))
    full = round(share * BAR_WIDTH)
    style = "red" if (rate["long"] or 0.0) > rate["factor"] else "green"
    return shown, Text.assemble(("━" * full, style), ("━" * (BAR_WIDTH - full), "grey37"))


def lines(watch: Watch, latest: RequestRecord | None) -> list[str]:
    """Return the latest readings, a line each, for where no table can be drawn."""
    found = [f"{name} {state['verdict']}{_words(state)}" for name, state in sorted(watch.states.items())]
    return [*found, f"latest order {_outcome(latest)} {latest.latency_ms:.0f} ms"] if latest else found


def _words(state: dict[str, Any]) -> str:
    if not state["burn_rates"]:
        return ""
    rate = state["burn_rates"][0]
    return (
        f", burn rate {_number(rate['long'])} over {rate['long_window']}, {_number(rate['short'])} over"
        f" {rate['short_window']} (burning above {rate['factor']:.1f})"
    )


def _outcome(latest: RequestRecord | None) -> str:
    return "" if latest is None else f"{latest.outcome}, degraded" if latest.degraded else latest.outcome


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def summary(console: Console, report: dict[str, Any], place: str) -> None:
    """Print the final table."""
    table = Table(title="pasta-otel demo", title_justify="left", show_header=False, expand=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in _rows(report):
        table.add_row(name, value)
    style = "bold green" if report["passed"] else "bold red"
    verdict = "as expected" if report["passed"] else "; ".join(report["problems"])
    table.add_row("result", Text(verdict, style))
    table.add_row("report", place)
    console.print(table)


def _rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    latency = {name: value["p50"] if value else None for name, value in report["load"]["latency_ms"].items()}
    return [
        ("fault", f"{report['fault']}: {report['injected']}"),
        ("detected", _seconds(report["detected_after_s"])),
        (
            "first cause",
            "; ".join(f"{c['kind']} {c['target']} ({c['score']:.2f})" for c in report["causes"][:1]) or "none",
        ),
        ("actions", "; ".join(_actions(report["actions"])) or "none"),
        ("recovered", _seconds(report["recovered_after_s"])),
        ("median latency", ", ".join(f"{k} {v:.0f} ms" for k, v in latency.items() if v is not None)),
        ("spans", _spans(report["spans"])),
    ]


def _actions(actions: list[dict[str, Any]]) -> list[str]:
    shown = (f"{action['action']} {action['target']} {action['outcome']}" for action in actions)
    return list(dict.fromkeys(shown))


def _seconds(value: float | None) -> str:
    return "no" if value is None else f"{value:.1f} s after the fault"


def _spans(spans: dict[str, Any]) -> str:
    sinks = (f"{name} {sink['ok']} ok, {sum(sink['dropped'].values())} dropped, {sink['pending']} pending"
             for name, sink in spans.get("sinks", {}).items())  # fmt: skip
    return f"{spans.get('received', 0)} received; " + "; ".join(sinks)
