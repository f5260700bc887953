"""``pasta-otel attribute``: say why a service's requests got slower or fail, from a running server or a store file."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

from pasta_otel.config import load_settings
from pasta_otel.errors import InputError, PastaError
from pasta_otel.slo.attribution.question import DEFAULT_BASELINE, DEFAULT_WINDOW
from pasta_otel.slo.page import metric_words
from pasta_otel.slo.sources.question import ask

KEEP_ALL_S, KEEP_ALL_BYTES = 4e9, 2**60  # asking about an old file must not make it forget: since 1970, 1 EiB
EXIT_CAUSE, EXIT_NO_CAUSE, EXIT_NO_DATA = 0, 1, 3


@click.command()
@click.option("--service", required=True, metavar="NAME", help="Whose requests: service.name.")
@click.option("--operation", default=None, metavar="NAME", help="Which of them: the server span's name.  [any]")
@click.option(
    "--window", default=DEFAULT_WINDOW, show_default=True, help="What to explain: 5m, or START/END (RFC 3339)."
)
@click.option(
    "--baseline", default=DEFAULT_BASELINE, show_default=True, help="What is normal: the time before, or START/END."
)
@click.option("--threshold-ms", default=None, type=float, help="A request that takes longer is bad.")
@click.option("--server", default=None, metavar="URL", help="Ask this sidecar or controller.  [PASTA_CONTROLLER_URL]")
@click.option("--store", default=None, metavar="FILE", help="Open this span store, when nobody holds it.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@click.pass_context
def command(  # noqa: PLR0913, PLR0917 - one parameter an option
    ctx: click.Context,
    service: str,
    operation: str | None,
    window: str,
    baseline: str,
    threshold_ms: float | None,
    server: str | None,
    store: str | None,
    *,
    as_json: bool,
) -> None:
    """Say why: exit 0 when a cause is named, 1 when none is, 3 when there are too few requests to compare."""
    if server and store:
        raise click.UsageError("give --server URL or --store FILE, not both")
    question = {
        "service": service,
        "operation": operation,
        "window": window,
        "baseline": baseline,
        "threshold_ms": threshold_ms,
    }
    question = {name: value for name, value in question.items() if value is not None}
    settings = load_settings()
    token = settings["PASTA_API_TOKEN"] or None
    url = server or settings["PASTA_CONTROLLER_URL"]
    answer = ask_store(Path(store), question) if store else ask(url, question, token=token)
    text = json.dumps(answer, indent=2, allow_nan=False) if as_json else "\n".join(lines(answer))
    click.echo(text)
    ctx.exit(exit_code(answer))


def ask_store(path: Path, question: dict[str, Any]) -> dict[str, Any]:
    """Answer from a store file.

    Raises:
        InputError: There is no such file, it is no store, or the question is wrong.
        MissingError: Another process holds the file (its pid is named), or DuckDB is not installed.
    """
    from pasta_otel.exporters.store import DuckDBSpanStore, StoreConfig  # noqa: PLC0415 - duckdb is an optional extra
    from pasta_otel.slo.attribution import AttributionEngine  # noqa: PLC0415 - as above, numpy
    from pasta_otel.slo.attribution.question import answerer  # noqa: PLC0415 - as above

    if not path.exists():
        raise InputError("no such file", file=str(path))
    store = DuckDBSpanStore.open(str(path), config=StoreConfig(max_age_s=KEEP_ALL_S, max_bytes=KEEP_ALL_BYTES))
    try:
        return answerer(AttributionEngine(store, store), time.time_ns)(question)
    except PastaError:
        raise
    except Exception as error:  # a file whose first tables can be read may be damaged further in
        raise InputError(f"cannot be read: {str(error).partition(chr(10))[0]}", file=str(path), kind="store") from error
    finally:
        store.close()


def exit_code(answer: dict[str, Any]) -> int:
    """Return 0 for a cause, 1 for none, 3 when the windows say too little."""
    if answer["causes"]:
        return EXIT_CAUSE
    return EXIT_NO_DATA if answer.get("incomplete") else EXIT_NO_CAUSE


def lines(answer: dict[str, Any]) -> list[str]:
    """Return the answer for people: a line for each cause, and under it one for each piece of evidence."""
    window, baseline = answer["window"], answer["baseline"]
    head = f"{window['start']} to {window['end']}, beside {baseline['start']} to {baseline['end']}"
    if not answer["causes"]:
        return [head, f"no cause: {answer.get('incomplete') or 'nothing shifted that explains it'}"]
    return [head, *(line for number, cause in enumerate(answer["causes"], 1) for line in _cause(number, cause))]


def _cause(number: int, cause: dict[str, Any]) -> list[str]:
    first = f"{number}. {cause['kind']}  {cause['target']}  (service {cause['service']}, score {cause['score']:.2f})"
    return [first, *(f"   {_evidence(evidence)}" for evidence in cause["evidence"])]


def _evidence(evidence: dict[str, Any]) -> str:
    change = f"{metric_words(evidence)}: {evidence['before']:.4g} before, {evidence['after']:.4g} now"
    links = f", trace {evidence['links'][0]['trace_id']}" if evidence["links"] else ""
    return f"{change} (effect {evidence['effect']:.2f}, n {evidence['n']}{links})"
