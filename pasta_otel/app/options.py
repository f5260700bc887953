"""What a sidecar or controller is told to do; checked when it is made, before anything listens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pasta_otel.config import Settings
from pasta_otel.errors import InputError

DAY_SECONDS = 86_400.0
# attribute -> (option, least, most, units of the attribute in one unit of the option)
RANGES: Mapping[str, tuple[str, float, float, float]] = {
    "otlp_grpc_port": ("--otlp-grpc-port", 0, 65535, 1),
    "otlp_http_port": ("--otlp-http-port", 0, 65535, 1),
    "api_port": ("--api-port", 0, 65535, 1),
    "store_max_bytes": ("--store-max-mib", 1, 2**40, 1024**2),
    "store_max_age_seconds": ("--store-max-hours", 0.001, 1e6, 3600.0),
    "tick_seconds": ("--tick", 0.001, DAY_SECONDS, 1),
    "drain_seconds": ("--drain", 0, 3600, 1),
    "grace_seconds": ("--grace", 0, 7 * DAY_SECONDS, 1),
}


@dataclass(frozen=True, slots=True)
class SidecarOptions:
    """One sidecar.

    Attributes:
        receive: Listen for OTLP; False = a controller over other sources (Prometheus).
        host: Address to bind; loopback unless told otherwise.
        otlp_grpc_port: OTLP/gRPC; 0 takes a free port.
        otlp_http_port: OTLP/HTTP; 0 takes a free port.
        api_port: API, OFREP, ``/metrics`` and ``/healthz``; 0 takes a free port.
        store: DuckDB file, or ``:memory:``.
        store_max_bytes: The oldest spans go above this size.
        store_max_age_seconds: Spans go after this long.
        slo_paths: OpenSLO files or directories; none watches nothing.
        windows: Burn-rate windows: a shipped name or a file.
        policy: Response policy file; none never acts and notifies to the log only.
        state_dir: Where the audit, the checkpoint and the verdicts lie; None keeps verdicts in memory.
        upstream: OTLP endpoint to forward to; empty forwards nothing.
        upstream_protocol: ``http/protobuf`` or ``grpc``.
        audit: The audit file; None = ``audit.jsonl`` in ``state_dir``.
        flagd_file: A flagd source file to keep written; None writes none.
        tick_seconds: Time between two evaluations.
        grace_seconds: How long a late span still counts.
        drain_seconds: How long a stop may take in all; what is not sent or stored by then is dropped and counted.
        host_metrics: Read CPU throttling and run delay of the processes that send spans.
        device_metrics: Read the state of GPUs, where there are any.
        token: Bearer token for OTLP and the API; empty asks none for OTLP, and ``PASTA_API_TOKEN`` for the API.
        tls_certificate: PEM certificate chain for everything that listens.
        tls_key: Its key.
    """

    receive: bool = True
    host: str = "127.0.0.1"
    otlp_grpc_port: int = 4317
    otlp_http_port: int = 4318
    api_port: int = 4320
    store: str = ":memory:"
    store_max_bytes: int = 4 * 1024**3
    store_max_age_seconds: float = 48 * 3600.0
    slo_paths: tuple[str, ...] = ()
    windows: str = "google-30d"
    policy: str | None = None
    state_dir: Path | None = None
    upstream: str = field(default="", repr=False)
    upstream_protocol: str = "http/protobuf"
    audit: Path | None = None
    flagd_file: Path | None = None
    tick_seconds: float = 10.0
    grace_seconds: float = 30.0
    drain_seconds: float = 10.0
    host_metrics: bool = True
    device_metrics: bool = True
    token: str = field(default="", repr=False)
    tls_certificate: str = ""
    tls_key: str = ""

    def __post_init__(self) -> None:
        """Check what would otherwise fail late; an error names the option of the command line."""
        for field_name, (option, least, most, shown_as) in RANGES.items():
            value = getattr(self, field_name) / shown_as
            if not least <= value <= most:  # NaN is in no range
                raise InputError(f"expected a number from {least:g} to {most:g}, got {value:g}", field=option)
        if not self.host.strip():
            raise InputError("expected an address to listen on", field="--host")
        if bool(self.tls_certificate) != bool(self.tls_key):
            given, lacking = ("--tls-certificate", "--tls-key")[:: 1 if self.tls_certificate else -1]
            raise InputError(f"certificate and key belong together: {lacking} is missing", field=given)
        if not self.receive and not self.slo_paths:
            raise InputError("a controller needs SLO files to watch", field="--slo")
        if self.state_dir is None:
            self._refuse_without_state()

    @property
    def bound_host(self) -> str:
        """Return the host as an address with a port needs it: IPv6 in brackets."""
        return f"[{self.host.strip('[]')}]" if ":" in self.host else self.host

    def _refuse_without_state(self) -> None:
        """Refuse what would have no effect: without a directory for the audit nothing acts."""
        for option, value, why in (
            ("--policy", self.policy, "a policy needs a directory for its audit"),
            ("--audit", self.audit, "nothing acts, so nothing is audited, without a directory for state"),
            ("--flagd-file", self.flagd_file, "there are no flags to write without a directory for state"),
        ):
            if value:
                raise InputError(f"{why}: give --state too", field=option)


def api_token(environ: Mapping[str, str], settings: Settings) -> str:
    """Return the token of ``PASTA_API_TOKEN``, from the environment or the settings file; empty = none was asked for.

    Raises:
        InputError: The variable is there but empty, as from a missing secret: an open API is not what was meant.
    """
    token = str(settings["PASTA_API_TOKEN"])
    if not token and "PASTA_API_TOKEN" in environ:
        raise InputError("is set but empty: give a token, or unset it", field="PASTA_API_TOKEN", kind="token")
    return token
