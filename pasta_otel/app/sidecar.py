"""The sidecar: receiver, store, forwarder, SLO controller, response and API in one process."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from pasta_otel.app.devices import DeviceWatch, watch_devices
from pasta_otel.app.drain import Drain
from pasta_otel.app.health import Health, Part
from pasta_otel.app.options import SidecarOptions, api_token
from pasta_otel.app.preflight import check_files, chosen_windows, explained
from pasta_otel.app.questions import Questions
from pasta_otel.app.response import response_of
from pasta_otel.app.selfwatch import build_self_telemetry
from pasta_otel.app.sources import build_sources, planned_maintenance, watches_points
from pasta_otel.app.upstream import forward_config, refuse_loop
from pasta_otel.clock import Clock, SystemClock
from pasta_otel.config import Settings, load_settings
from pasta_otel.ebpf.hostfiles import HostSampler
from pasta_otel.errors import InputError
from pasta_otel.exporters.api.app import ApiProviders, create_app
from pasta_otel.exporters.api.server import ApiServer
from pasta_otel.exporters.forward import Forwarder
from pasta_otel.exporters.ledger import POINTS, Ledger
from pasta_otel.exporters.receiver import Receiver, ReceiverConfig
from pasta_otel.exporters.store.store import DuckDBSpanStore, StoreConfig
from pasta_otel.slo.attribution.engine import AttributionEngine
from pasta_otel.slo.attribution.question import answerer
from pasta_otel.slo.controller import Parts, SLOController
from pasta_otel.slo.leader import FileLeader
from pasta_otel.slo.periods import length_ns
from pasta_otel.slo.spec.load import load
from pasta_otel.slo.spec.model import SLO
from pasta_otel.slo.state import FileState
from pasta_otel.slo.windows import BurnRateWindows, lint

RECEIVER_GRACE_SECONDS = 2.0
FORWARD_SHARE = 0.6  # of the time of a stop; the rest is for the store, notifications and our own telemetry
HOST_SAMPLE_SECONDS = 1.0
log = logging.getLogger(__name__)
Announce = Callable[[dict[str, Any]], None]


class Sidecar:
    """One sidecar, built whole before anything listens.

    Args:
        options: What to do.
        environ: For ``OTEL_*`` and the policy's secrets.
        clock: Time.
        proc_root: Where process files lie.
        cgroup_root: Where cgroups are mounted.

    Raises:
        InputError: An SLO, policy or option is wrong; names file and field.
        MissingError: The store is held by another process, or a package is missing.
    """

    def __init__(
        self,
        options: SidecarOptions,
        *,
        environ: Mapping[str, str] | None = None,
        clock: Clock | None = None,
        proc_root: str = "/proc",
        cgroup_root: str = "/sys/fs/cgroup",
    ) -> None:
        environ = os.environ if environ is None else environ
        self._options, self._clock = options, clock or SystemClock()
        check_files(options)
        windows = chosen_windows(options.windows)
        slos = load(options.slo_paths).slos if options.slo_paths else ()
        forward = forward_config(options, environ)
        self._stop_threads = threading.Event()
        self._threads: list[threading.Thread] = []
        self._sampler = HostSampler(proc_root, cgroup_root, self._clock) if options.host_metrics else None
        with ExitStack() as undo:
            self._own = build_self_telemetry(forward)
            undo.callback(self._own.close)
            settings = load_settings(environ)
            self._devices = self._watch_devices(settings, proc_root) if options.device_metrics else None
            sinks = ["store", *(["upstream"] if forward else [])]
            self.ledger = Ledger(sinks, meter=self._own.meter)
            point_sinks = [*sinks[1:], *(["slo"] if watches_points(slos) else [])]
            points = Ledger(point_sinks, meter=self._own.meter, names=POINTS)
            self.store = self._open_store()
            undo.callback(self.store.close)
            self._forwarder = (
                Forwarder(forward, self.ledger, point_ledger=points, clock=self._clock, meter=self._own.meter)
                if forward
                else None
            )
            self._maintenance = planned_maintenance(settings)
            self._sources = build_sources(
                slos,
                settings,
                self._clock,
                store=(self.store, int(options.grace_seconds * 1e9)),
                points=points,
            )
            undo.callback(self._sources.close)
            self._receiver = self._build_receiver(points)
            self._leader = FileLeader(Path(options.state_dir) / "slo.lock") if options.state_dir else None
            if self._leader is not None:
                undo.callback(self._leader.release)
            self._response = response_of(options, self.store, self._clock, self._own.meter, environ, self._leader)
            if self._response is not None:
                undo.callback(self._response.stop)
            self._controller = self._build_controller(slos, windows)
            self._api = self._build_api(slos, options.token or api_token(environ, settings))
            undo.pop_all()

    async def run(self, stop: asyncio.Event, announce: Announce) -> None:
        """Serve until ``stop`` is set, then drain: afterwards nothing is pending.

        Args:
            stop: Set by a signal handler.
            announce: Told ``{"event": "ready", ...}`` once, and ``{"event": "stopped", "ledger": ...}`` at the end.

        Raises:
            MissingError: A port is taken.
        """
        try:
            await self._start()
            announce(self._addresses())
            await stop.wait()
        finally:
            await self._stop()
        announce({"event": "stopped", "ledger": self.ledger.snapshot().as_dict()})

    async def _start(self) -> None:
        if self._forwarder is not None:
            self._forwarder.start()
        if self._response is not None:
            self._response.start()
        await self._receiver.start()
        if self._options.upstream:  # the ports of our own choice are known only now
            ports = (self._receiver.grpc_port, self._receiver.http_port)
            await asyncio.to_thread(refuse_loop, self._options, ports)
        await asyncio.to_thread(self._api.start)
        if self._sampler is not None:
            self._spawn("pasta-host", self._watch_host)
        if self._controller is not None:
            controller = self._controller
            self._spawn("pasta-slo", lambda: controller.run(self._stop_threads, self._options.tick_seconds))

    async def _stop(self) -> None:
        """Stop what brings spans in, then what carries them, then what answers."""
        drain = Drain(self._options.drain_seconds)
        self._stop_threads.set()
        await self._receiver.stop(min(RECEIVER_GRACE_SECONDS, drain.left(0.1)))
        if self._forwarder is not None:
            forward_s = drain.left(FORWARD_SHARE)
            await drain.step("the forwarder", partial(self._forwarder.stop, forward_s), share=FORWARD_SHARE + 0.1)
        for thread in self._threads:
            await drain.step(thread.name, thread.join, share=0.3)
        await drain.step("the API", self._api.stop, share=0.3)
        if self._response is not None:
            await drain.step("notifications", self._response.stop, share=0.4)
        await drain.step("sources", self._sources.close, share=0.4)
        if self._leader is not None:
            self._leader.release()
        await drain.step("the store", partial(self.store.close, drain.left(0.5)), share=0.8)
        await drain.step("our own telemetry", self._own.close)
        if self._devices is not None:
            await drain.step("devices", self._devices.close)

    def _spawn(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _watch_host(self) -> None:
        sampler = self._sampler
        while sampler is not None and not self._stop_threads.wait(HOST_SAMPLE_SECONDS):
            try:
                self.store.write_host_samples(sampler.sample(self.store.observed_processes()))
            except Exception:  # host evidence is an extra: the sidecar goes on without it
                log.exception("host metrics")

    def _addresses(self) -> dict[str, Any]:
        receiver = self._receiver
        otlp = {"otlp_http": receiver.http_url, "otlp_grpc": receiver.grpc_target} if self._options.receive else {}
        return {"event": "ready", **otlp, "api": self._api.url}

    def _watch_devices(self, settings: Settings, proc_root: str) -> DeviceWatch:
        dcgm_url = settings["PASTA_DCGM_URL"]
        return watch_devices(self._own.meter, clock=self._clock, dcgm_url=dcgm_url, proc_root=proc_root)

    def _open_store(self) -> DuckDBSpanStore:
        options = self._options
        config = StoreConfig(
            max_bytes=options.store_max_bytes,
            max_age_s=options.store_max_age_seconds,
            grace_s=options.grace_seconds,
        )
        return DuckDBSpanStore.open(options.store, self.ledger, config, clock=self._clock, meter=self._own.meter)

    def _build_receiver(self, points: Ledger) -> Receiver:
        options = self._options
        config = ReceiverConfig(
            grpc_address=f"{options.bound_host}:{options.otlp_grpc_port}" if options.receive else None,
            http_address=f"{options.bound_host}:{options.otlp_http_port}" if options.receive else None,
            bearer_token=options.token or None,
            tls_certificate_file=options.tls_certificate or None,
            tls_key_file=options.tls_key or None,
        )
        forwarder = [self._forwarder] if self._forwarder else []
        return Receiver(
            config,
            [self.store, *forwarder],
            self.ledger,
            point_sinks=[*forwarder, *([self._sources.otlp] if self._sources.otlp else [])],
            point_ledger=points,
            clock=self._clock,
            meter=self._own.meter,
        )

    def _build_controller(self, slos: Sequence[SLO], windows: BurnRateWindows) -> SLOController | None:
        if not slos:
            return None
        grace_ns = int(self._options.grace_seconds * 1e9)
        state_dir = self._options.state_dir
        parts = Parts(
            source=self._sources.source,
            examples=self._sources.spans,
            attributor=self._attributor(),
            responder=self._response,
            state=FileState(Path(state_dir) / "slo.json") if state_dir else None,
            meter=self._own.meter,
            tracer=self._own.tracer,
            clock=self._clock,
            leader=self._leader,
            maintenance=self._maintenance,
        )
        for slo in slos:
            for message in lint(windows, slo.objective, length_ns(slo.window, self._clock.unix_nano())):
                log.warning("slo %s: %s", slo.name, message)
        try:
            return SLOController(slos, windows, parts, grace_ns=grace_ns)
        except InputError as error:
            raise explained(error) from error

    def _attributor(self) -> AttributionEngine:
        meter, tracer = self._own.meter, self._own.tracer
        return AttributionEngine(self.store, self.store, clock=self._clock, meter=meter, tracer=tracer)

    def _build_api(self, slos: Sequence[SLO], token: str) -> ApiServer:
        options = self._options
        engine = self._response
        questions = Questions(self.store, self._controller)
        providers = ApiProviders(
            flags=engine,
            slos=questions.slos,
            slo_history=questions.slo_history,
            actions=engine.recent if engine else None,
            ledger=lambda: self.ledger.snapshot().as_dict(),
            trace=questions.trace,
            attribute=answerer(self._attributor(), self._clock.unix_nano, {slo.name: slo.sli for slo in slos}),
            metrics=self._own.render,
            health=self._health(),
        )
        return ApiServer(
            create_app(providers, token=token),
            host=options.host.strip("[]"),
            port=options.api_port,
            certfile=options.tls_certificate,
            keyfile=options.tls_key,
        )

    def _health(self) -> Health:
        parts: dict[str, Part] = {"store": self.store, "receiver": self._receiver}
        if self._forwarder is not None:
            parts["upstream"] = self._forwarder
        controller = self._controller
        evaluation = (lambda: controller.evaluation) if controller is not None else None
        return Health(self._threads, parts, evaluation, self._options.tick_seconds, self._clock)


def serve(options: SidecarOptions, announce: Announce) -> None:
    """Run a sidecar until SIGTERM or SIGINT.

    Raises:
        PastaError: It could not start; see ``Sidecar``.
    """
    asyncio.run(_serve(options, announce))


async def _serve(options: SidecarOptions, announce: Announce) -> None:
    import signal  # noqa: PLC0415  # only a process of our own installs handlers

    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        sidecar = Sidecar(options)
    except OSError as error:  # a file that the options or settings name and that no check above knew to be unusable
        raise InputError(error.strerror or str(error), file=str(error.filename or "") or None) from error
    await sidecar.run(stop, announce)
