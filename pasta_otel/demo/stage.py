"""The demo's processes: sidecar, services and load generator, started in order and stopped in the other."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Self

from pasta_otel.demo import objectives, processes
from pasta_otel.demo.faults import Victims
from pasta_otel.demo.processes import Child
from pasta_otel.demo.sidecar import Sidecar

MODULES = {
    "payment": "payment",
    "recommendations": "recommendations",
    "model": "model_server",
    "order-api": "order_api",
}
SPAN_DELAY_MS = 200  # well inside the grace that late spans have
FLAG_POLL_SECONDS = 0.25
NO_PROXY = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1")  # every call stays on this machine
SIDECAR_STOP_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class StageOptions:
    """How the demo is set up.

    Attributes:
        out: Folder for everything the demo writes.
        seed: Seed of weights, orders and the choice of a layer.
        rate: Orders a second.
        upstream: OTLP endpoint to which the sidecar forwards; None = it keeps spans to itself.
        tick_seconds: How often SLOs are evaluated.
        grace_seconds: How long late spans are waited for.
        windows: Burn-rate windows by name or path.
    """

    out: Path
    seed: int = 0
    rate: float = 4.0
    upstream: str | None = None
    tick_seconds: float = 1.0
    grace_seconds: float = 2.0
    windows: str = "demo"


def data_file(name: str) -> Path:
    """Return the path of a file that ships with the demo."""
    return Path(str(files("pasta_otel.demo").joinpath("data", name)))


class Stage:
    """The running demo; use it as a context manager, so that nothing is left behind."""

    def __init__(self, options: StageOptions) -> None:
        self._options = options
        self._logs = options.out / "logs"
        self._children: dict[str, Child] = {}
        self._otlp_port, self._api_port = free_ports(2)
        self.sidecar = Sidecar(f"http://127.0.0.1:{self._api_port}")

    def __enter__(self) -> Self:
        """Make the folders."""
        self._logs.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop whatever still runs."""
        self.sidecar.close()
        for child in reversed(list(self._children.values())):
            with contextlib.suppress(OSError):
                child.stop(seconds=5.0)
        self._children.clear()

    @property
    def load_log(self) -> Path:
        """Return the load generator's log."""
        return self._options.out / "load.jsonl"

    @property
    def slo_file(self) -> Path:
        """Return the SLO file that is watched."""
        return self._options.out / "slo.yaml"

    @property
    def device(self) -> str:
        """Return where the model runs: ``cpu`` or ``cuda``."""
        return str(self._children["model"].ready.get("device", "cpu"))

    def start(self) -> None:
        """Start the services, each when what it needs is ready, then the sidecar: nothing is traced before it is there.

        The sidecar comes last because the latency objective depends on how fast the machine is.
        """
        for name in ("payment", "recommendations", "model"):
            self._start_service(name, {})
        urls = {name: self._url(name) for name in ("payment", "recommendations", "model")}
        self._start_service("order-api", {"DEMO_DEPENDENCIES": json.dumps(urls)})
        self._url("order-api")
        self._write_objectives(self._children["order-api"].ready["order"])
        self._start_sidecar()

    def start_load(self) -> None:
        """Start sending orders."""
        options = self._options
        command = processes.python(
            "pasta_otel.demo.load",
            *("--url", f"{self._url('order-api')}/orders"),
            *("--rate", str(options.rate), "--seed", str(options.seed), "--out", str(self.load_log)),
        )
        self._children["load"] = processes.start("load", command, self._logs / "load.log", NO_PROXY, ready=False)

    def victims(self, model_cores: float) -> Victims:
        """Return what faults may reach."""
        urls = {name: self._url(name) for name in MODULES}
        return Victims(urls=urls, model_pid=self._children["model"].pid, model_cores=model_cores, out=self._logs)

    def check(self) -> None:
        """Raise DemoError if any process has ended."""
        for child in self._children.values():
            child.check()

    def stop_load(self) -> None:
        """Send no more orders, and wait for the answers under way."""
        self._stop("load")

    def stop_services(self) -> None:
        """Stop the callers before the called; each flushes its spans."""
        for name in ("order-api", "model", "payment", "recommendations"):
            self._stop(name)

    def stop_sidecar(self) -> dict[str, Any]:
        """Drain and stop the sidecar; returns the last JSON line it wrote, empty without one."""
        child = self._children["sidecar"]
        self._stop("sidecar", SIDECAR_STOP_SECONDS)
        return child.last

    def _stop(self, name: str, seconds: float = processes.STOP_SECONDS) -> None:
        child = self._children.pop(name)
        code = child.stop(seconds)
        if code != 0:
            raise processes.DemoError(f"{name} did not stop in order (exit code {code}); see {child.log}")

    def _start_sidecar(self) -> None:
        options = self._options
        command = [
            *(sys.executable, "-m", "pasta_otel", "sidecar"),
            *("--otlp-grpc-port", "0", "--otlp-http-port", str(self._otlp_port), "--api-port", str(self._api_port)),
            *("--store", str(options.out / "spans.duckdb"), "--state", str(options.out / "state")),
            *("--slo", str(self.slo_file), "--policy", str(data_file("policy.yaml"))),
            *("--audit", str(options.out / "audit.jsonl"), "--windows", options.windows),
            *("--tick", str(options.tick_seconds), "--grace", str(options.grace_seconds)),
            *(("--upstream", options.upstream) if options.upstream else ()),
        ]
        child = processes.start("sidecar", command, self._logs / "sidecar.log", {})
        self._children["sidecar"] = child
        child.wait_ready()

    def _start_service(self, name: str, environment: dict[str, str]) -> None:
        command = [
            *(sys.executable, "-m", "pasta_otel", "run", "--"),
            *processes.python(f"pasta_otel.demo.services.{MODULES[name]}"),
        ]
        shared = {
            "OTEL_SERVICE_NAME": name,
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self._otlp_port}",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_TRACES_EXPORTER": "otlp",
            "OTEL_METRICS_EXPORTER": "none",
            "OTEL_LOGS_EXPORTER": "none",
            "OTEL_TRACES_SAMPLER": "parentbased_always_on",  # whatever the user's own services do
            "PASTA_SAMPLING_RATE": "1",
            "OTEL_BSP_SCHEDULE_DELAY": str(SPAN_DELAY_MS),
            "OTEL_PYTHON_EXCLUDED_URLS": "healthz,control",
            "PASTA_CONTROLLER_URL": self.sidecar.url,
            "PASTA_FLAG_POLL_SECONDS": str(FLAG_POLL_SECONDS),
            "DEMO_SEED": str(self._options.seed),
        }
        environment = {**shared, **NO_PROXY, **environment}
        self._children[name] = processes.start(name, command, self._logs / f"{name}.log", environment)

    def _write_objectives(self, order: dict[str, float]) -> None:
        text = data_file("slo.yaml").read_text(encoding="utf-8")
        self.slo_file.write_text(objectives.fit(text, objectives.threshold_ms(**order)), encoding="utf-8")

    def _url(self, name: str) -> str:
        child = self._children[name]
        ready = child.ready or child.wait_ready()
        return f"http://127.0.0.1:{ready['port']}"


def free_ports(count: int) -> list[int]:
    """Return ports of loopback that nobody listens on now."""
    with contextlib.ExitStack() as held:
        listeners = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]
