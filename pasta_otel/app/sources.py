"""Which source answers for which SLO: the span store, Prometheus servers, OTLP metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pasta_otel.clock import Clock
from pasta_otel.errors import InputError
from pasta_otel.exporters.ledger import Ledger
from pasta_otel.headers import read_headers
from pasta_otel.model import SpanSLI
from pasta_otel.slo.maintenance import Maintenance, read_maintenance
from pasta_otel.slo.periods import length_ns
from pasta_otel.slo.ports import SLISource
from pasta_otel.slo.sources.otlp import OtlpLimits, OtlpSource
from pasta_otel.slo.sources.router import ConnectedSource, RoutedSource
from pasta_otel.slo.sources.spans import SpanCounter, SpanSource
from pasta_otel.slo.spec.model import SLO, OtlpSLI, PrometheusSLI

URL_KEYS = ("url", "address", "endpoint")
MISSING: Mapping[type, str] = {
    SpanSLI: "it counts spans, and there is no span store: give --store FILE, or --server URL of a sidecar",
    OtlpSLI: "it counts OTLP metrics, which a running sidecar alone receives: give --server URL",
}


@dataclass(frozen=True, slots=True)
class Sources:
    """What the controller asks.

    Attributes:
        source: Everything as one.
        spans: The span store's part, which also names bad traces; None without a store.
        otlp: A sink for the receiver's metric points; None when no SLO counts them.
        close: Closes connections.
    """

    source: SLISource
    spans: SpanSource | None
    otlp: OtlpSource | None
    close: Callable[[], None]


def planned_maintenance(settings: Mapping[str, Any]) -> tuple[Maintenance, ...]:
    """Return the planned interruptions of the file that the settings name.

    Raises:
        InputError: The file is wrong.
    """
    file = str(settings["PASTA_MAINTENANCE_FILE"])
    return read_maintenance(file) if file else ()


def watches_points(slos: Sequence[SLO]) -> bool:
    """Return whether an SLO counts OTLP metric points."""
    return any(isinstance(slo.sli, OtlpSLI) for slo in slos)


def build_sources(
    slos: Sequence[SLO],
    settings: Mapping[str, Any],
    clock: Clock,
    *,
    store: tuple[SpanCounter, int] | None = None,
    points: Ledger | None = None,
) -> Sources:
    """Join the sources that the SLOs need.

    Args:
        slos: What will be watched.
        settings: ``PASTA_PROMETHEUS_*``; a DataSource's own ``url`` comes first.
        clock: Both clocks.
        store: The span store and the grace for late spans in ns.
        points: Account of metric points, with a sink ``slo`` when ``watches_points``.

    Raises:
        InputError: An SLO needs a Prometheus server and none is named.
    """
    spans = SpanSource(*store) if store else None
    otlp = _otlp(slos, clock, points)
    servers = {url: _prometheus(url, settings) for url in sorted(_urls(slos, settings))}
    by_type: dict[type, SLISource] = {}
    if spans is not None:
        by_type[SpanSLI] = spans
    if otlp is not None:
        by_type[OtlpSLI] = otlp
    if servers:
        by_type[PrometheusSLI] = ConnectedSource(
            {url: source for url, (source, _) in servers.items()}, lambda sli: url_of(sli, settings)
        )

    def close() -> None:
        for _, shut in servers.values():
            shut()

    return Sources(RoutedSource(by_type, MISSING), spans, otlp, close)


def url_of(sli: PrometheusSLI, settings: Mapping[str, Any]) -> str:
    """Return the server of an indicator: its DataSource's, else the setting's."""
    connection = dict(sli.connection)
    return next((connection[key] for key in URL_KEYS if key in connection), str(settings["PASTA_PROMETHEUS_URL"]))


def _urls(slos: Sequence[SLO], settings: Mapping[str, Any]) -> set[str]:
    urls = set()
    for slo in slos:
        if isinstance(slo.sli, PrometheusSLI):
            url = url_of(slo.sli, settings)
            if not url:
                raise InputError(
                    "needs a Prometheus server: set PASTA_PROMETHEUS_URL, or url in its DataSource's connectionDetails",
                    file=slo.file,
                    field=slo.name,
                )
            urls.add(url)
    return urls


def _prometheus(url: str, settings: Mapping[str, Any]) -> tuple[SLISource, Callable[[], None]]:
    from pasta_otel.slo.sources.prometheus import (  # noqa: PLC0415 - httpx is an optional extra
        PrometheusConfig,
        PrometheusSource,
    )

    user, _, password = str(settings["PASTA_PROMETHEUS_BASIC_AUTH"]).partition(":")
    source = PrometheusSource(
        PrometheusConfig(
            url,
            headers=read_headers(str(settings["PASTA_PROMETHEUS_HEADERS"]), field="PASTA_PROMETHEUS_HEADERS"),
            bearer_token=str(settings["PASTA_PROMETHEUS_TOKEN"]) or None,
            basic_auth=(user, password) if user else None,
            ca_file=str(settings["PASTA_PROMETHEUS_CA_FILE"]) or None,
            cert=_client_certificate(settings),
            timeout_seconds=float(settings["PASTA_PROMETHEUS_TIMEOUT_SECONDS"]),
        )
    )
    return source, source.close


def _client_certificate(settings: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return certificate and key files; the key may stand in the certificate's own file."""
    certificate, key = (str(settings[f"PASTA_PROMETHEUS_{name}_FILE"]) for name in ("CERT", "KEY"))
    if key and not certificate:
        raise InputError("a key needs its certificate", field="PASTA_PROMETHEUS_CERT_FILE")
    return (certificate, key or certificate) if certificate else None


def _otlp(slos: Sequence[SLO], clock: Clock, points: Ledger | None) -> OtlpSource | None:
    slis = [slo.sli for slo in slos if isinstance(slo.sli, OtlpSLI)]
    if not slis:
        return None
    longest = max(length_ns(slo.window, clock.unix_nano()) for slo in slos if isinstance(slo.sli, OtlpSLI))
    return OtlpSource(slis, clock, points, OtlpLimits(retention_ns=longest))
