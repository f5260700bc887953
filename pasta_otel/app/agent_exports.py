"""What leaves the agent: metrics by scrape and OTLP, host spans by OTLP, ``/metrics`` and ``/healthz``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics.export import MetricsData, PeriodicExportingMetricReader

from pasta_otel import semconv
from pasta_otel.app.devices import watch_devices
from pasta_otel.clock import Clock
from pasta_otel.context import SpanIds
from pasta_otel.ebpf.hostmetrics import HostFiles
from pasta_otel.ebpf.loaders.btf import drop_reasons
from pasta_otel.ebpf.loaders.core import CoreLoader
from pasta_otel.ebpf.ports import Refusal, RefusedError
from pasta_otel.ebpf.programs import UserProgram
from pasta_otel.ebpf.spans import HostSpans, host_columns
from pasta_otel.ebpf.totals import HostTotals, observe_accounts, observe_attachments
from pasta_otel.ebpf.user_spans import user_columns
from pasta_otel.ebpf.wall_clock import WallClock
from pasta_otel.errors import InputError
from pasta_otel.exporters.metrics import PastaMetricExporter, build_meter_provider
from pasta_otel.exporters.otlp.config import OtlpConfig
from pasta_otel.exporters.otlp.resource import default_identity
from pasta_otel.exporters.otlp.row_exporter import RowExporter
from pasta_otel.exporters.precomputed import PrecomputedExporter, with_histograms
from pasta_otel.exporters.prometheus import PrometheusReader

if TYPE_CHECKING:
    from pasta_otel.app.agent import Agent
    from pasta_otel.ebpf.observer import Harvest
    from pasta_otel.model import Attributes

SERVICE = semconv.AGENT_SERVICE
STALE_NS = 30_000_000_000
MARK_NS = 30_000_000_000
FLUSH_MS = 5_000
log = logging.getLogger(__name__)


class _Page(PrometheusReader):
    """The agent's ``/metrics``, with the histograms that were counted in the kernel."""

    def __init__(self, totals: HostTotals) -> None:
        super().__init__()
        self._totals = totals

    def _receive_metrics(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **options: Any) -> None:
        data = with_histograms(metrics_data, semconv.HOST_EVENT_DURATION, self._totals.points())
        super()._receive_metrics(data or metrics_data, timeout_millis, **options)


class AgentExports:
    """The agent's exporters and its server.

    Args:
        agent: Whose.
        clock: Time.
    """

    def __init__(self, agent: Agent, clock: Clock) -> None:
        self._agent, self._clock = agent, clock
        options = agent.options
        observer = agent.observer
        service_of = observer.service_of if observer is not None else lambda _: ""
        apis = observer.apis if observer is not None else {}
        by_core = observer is not None and observer.loaded.loader == CoreLoader.name  # bcc cannot count drops
        self.totals = HostTotals(apis, service_of, clock.unix_nano, drop_reasons() if by_core else {})
        self._spans = HostSpans(apis, service_of, outcomes=self.totals.spans)
        self._wall, self._ids = WallClock(clock), SpanIds()
        self._mark_due_ns = 0
        self._identity = default_identity()
        self._page = _Page(self.totals)
        self._provider = self._build_provider()
        self.meter = self._provider.get_meter(semconv.SCOPE)
        self.totals.observe(self.meter)
        observe_attachments(self.meter, agent.report)
        if observer is not None:
            observe_accounts(self.meter, observer.counters)
        self._files = HostFiles(options.proc_root, options.cgroup_root, clock, self.meter)
        self._devices = watch_devices(self.meter, clock=clock, proc_root=str(options.proc_root))
        self._programs: list[UserProgram] = []
        self._observe()
        wanted = options.exports and (observer is not None or options.programs)
        self._rows = self._build_rows() if wanted else None
        self._server = self._build_server()

    @property
    def url(self) -> str:
        """Return where ``/metrics`` is."""
        return f"{self._server.url}/metrics"

    def start(self) -> None:
        """Serve. Raises MissingError when the port is taken."""
        self._server.start()

    def take(self, harvest: Harvest, launch_weight: float) -> None:
        """Add a harvest to the sums, and send its spans."""
        self._wall.mark()
        self.totals.add(harvest, launch_weight)
        spans = self._spans.take(harvest) if self._rows is not None else []
        if spans and self._rows is not None:
            self._rows.offer_columns(host_columns(spans, self._wall, self._ids))

    def mark(self) -> None:
        """Measure the clocks, if that was long ago: a harvest may be a day away, and clocks drift apart."""
        if self._clock.monotonic_ns() >= self._mark_due_ns:
            self._mark_due_ns = self._clock.monotonic_ns() + MARK_NS
            self._wall.mark()

    def load_programs(self) -> None:
        """Load users' own programs; one that is refused is said and counted, and the agent goes on."""
        for path in self._agent.options.programs:
            try:
                program = UserProgram(path)
            except RefusedError as error:
                self._agent.took(str(path), error.refusal)
            except InputError as error:
                self._agent.took(str(path), Refusal("input_invalid", 0, str(error)))
            else:
                self._agent.took(str(path), None)
                self._programs.append(program)
                program.start()

    def poll_programs(self) -> None:
        """Send what users' own programs submitted; what one of them sends cannot stop the agent."""
        for program in self._programs:
            try:
                self._send_events(program)
            except Exception:
                log.exception("events of --probe %s", program.name)
                program.counts["", "failed"] += 1

    def _send_events(self, program: UserProgram) -> None:
        events = program.poll(self._clock.monotonic_ns)
        if self._rows is None or not events:
            return
        self._wall.mark()
        for columns in user_columns(events, self._wall, self._clock.monotonic_ns(), self._ids):
            self._rows.offer_columns(columns)

    def _user_counts(self, _: CallbackOptions) -> Iterator[Observation]:
        for program in self._programs:
            for (table, outcome), count in [*program.counts.items()]:
                yield Observation(count, {"program": program.name, "table": table, "outcome": outcome})

    def _process_counts(self, _: CallbackOptions) -> Iterator[Observation]:
        known = [*self._agent.processes.processes.values()]
        yield Observation(len(known), {"state": "seen"})
        yield Observation(sum(process.context is not None for process in known), {"state": "publishing"})
        yield Observation(sum(process.unreadable for process in known), {"state": "unreadable"})

    def poll_files(self) -> None:
        """Read the host's files; what cannot be read is left out."""
        known = self._agent.processes.processes.values()
        self._files.poll({process.pid: process.service for process in known if process.context is not None})

    def flush(self) -> None:
        """Send what there is now."""
        self._provider.force_flush(FLUSH_MS)

    def stop(self) -> None:
        """Send what is left, and stop."""
        self._server.stop()
        for program in self._programs:
            program.stop()
        self.poll_programs()
        for program in self._programs:
            program.close()
        if self._rows is not None:
            self._rows.shutdown()
        self._provider.shutdown()
        self._devices.close()

    def account(self) -> dict[str, Any]:
        """Return what became of the spans: how many were made by outcome, and of those the sink's account."""
        counts = self._rows.counts()._asdict() if self._rows is not None else {}
        return {"made": dict(self.totals.spans), "spans": {**counts}}

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Return whether harvests still come, and what is attached."""
        refused = [item.refusal.reason for item in self._agent.report() if item.refusal is not None]
        loaded = self._agent.observer.loaded.loader if self._agent.observer is not None else "files"
        silent = self._clock.monotonic_ns() - self._agent.last_harvest_ns
        working = self._agent.observer is None or self._agent.last_harvest_ns == 0 or silent < STALE_NS
        details: dict[str, Any] = {"loader": loaded, "refused": len(refused)}
        if refused:
            details["reasons"] = sorted(set(refused))
        return working, details if working else {**details, "silent_seconds": silent // 1_000_000_000}

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _observe(self) -> None:
        events, processes = semconv.METRICS[semconv.USER_EVENTS], semconv.METRICS[semconv.AGENT_PROCESSES]
        self.meter.create_observable_counter(events.name, [self._user_counts], events.unit, events.description)
        gauge = self.meter.create_observable_gauge
        gauge(processes.name, [self._process_counts], processes.unit, processes.description)

    def _build_provider(self) -> Any:
        readers: list[Any] = [self._page]
        if self._agent.options.exports:
            inner = PastaMetricExporter(OtlpConfig.from_env(signal="metrics"), identity=self._identity)
            exporter = PrecomputedExporter(inner, semconv.HOST_EVENT_DURATION, self.totals.points)
            readers.append(PeriodicExportingMetricReader(exporter))
        return build_meter_provider(
            readers=readers, attributes={semconv.SERVICE_NAME: SERVICE}, identity=self._identity
        )  # fmt: skip

    def _build_rows(self) -> RowExporter:
        from pasta_otel.exporters.otlp.resource import build_resource  # noqa: PLC0415 - only an agent with spans

        resource = build_resource(self._identity, {semconv.SERVICE_NAME: SERVICE})
        return RowExporter(
            OtlpConfig.from_env(),
            resource=lambda: cast("Attributes", resource.attributes),
            identity=self._identity,
            meter=self.meter,
            sink="otlp_host_spans",
        )

    def _build_server(self) -> Any:
        from pasta_otel.exporters.api.app import ApiProviders, create_app  # noqa: PLC0415 - 7 MB, and last
        from pasta_otel.exporters.api.server import ApiServer  # noqa: PLC0415 - as above

        options = self._agent.options
        app = create_app(ApiProviders(metrics=self._page.render, health=self.health), token=options.token)
        return ApiServer(app, host=options.host, port=options.port)
