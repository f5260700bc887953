"""Settings: standard ``OTEL_*`` first, then ``PASTA_*``, then a YAML file; docs are tested against the table."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pasta_otel.bearer import checked_token
from pasta_otel.errors import InputError
from pasta_otel.yamldepth import check_depth


def _boolean(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in {"1", "true", "yes", "on"}:
        return True
    if lowered in {"0", "false", "no", "off", ""}:
        return False
    msg = f"expected true or false, got {text!r}"
    raise ValueError(msg)


def _share(text: str) -> float:
    value = float(text)
    if not 0.0 <= value <= 1.0:
        msg = f"expected a share between 0 and 1, got {text!r}"
        raise ValueError(msg)
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.0 <= value <= 1e6:  # NaN is in no range
        msg = f"expected seconds between 0 and 1,000,000, got {text!r}"
        raise ValueError(msg)
    return value


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting.

    Attributes:
        env: Environment variable.
        yaml: Dotted path in the YAML file.
        default: Value when nothing is set.
        parse: From text to value; raises ValueError.
        meaning: One line, with the unit.
    """

    env: str
    yaml: str
    default: Any
    parse: Callable[[str], Any]
    meaning: str


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "PASTA_SAMPLING_RATE", "sampling_rate", 1.0, _share, "Share of traces that carry module and GPU spans, 0..1."
    ),
    Setting(
        "PASTA_OVERHEAD_BUDGET", "overhead_budget", 0.01, _share, "Share of the workload's time that capture may cost."
    ),
    Setting(
        "PASTA_GPU_CAPTURE", "gpu_capture", True, _boolean, "Record GPU kernels by CUPTI when the program uses CUDA."
    ),
    Setting("PASTA_CUPTI_LIBRARY", "cupti_library", "", str, "File of libcupti; empty = the loaded or installed one."),
    Setting(
        "PASTA_SANITIZER_LIBRARY",
        "sanitizer_library",
        "",
        str,
        "File of libsanitizer-public.so for `analyze memory`; empty = the CUDA toolkit's or the installed package's.",
    ),
    Setting(
        "PASTA_SANITIZER_PATCH",
        "sanitizer_patch",
        "",
        str,
        "File of compiled device patches for `analyze memory`; empty = the built-in one, else nvcc compiles them.",
    ),
    Setting(
        "PASTA_PUBLISH_CONTEXT",
        "publish_context",
        True,
        _boolean,
        "Let host probes on this machine see which span each thread is in.",
    ),
    Setting("PASTA_DEBUG", "debug", False, _boolean, "Log what pasta-otel does, to stderr."),
    Setting(
        "PASTA_CONTROLLER_URL",
        "controller_url",
        "http://127.0.0.1:4320",
        str,
        "Where the app reads its flags (OFREP); set, it also may raise the capture tier.",
    ),
    Setting(
        "PASTA_FLAG_POLL_SECONDS",
        "flag_poll_seconds",
        0.5,
        _seconds,
        "How often the app refreshes its flag snapshot, seconds.",
    ),
    Setting(
        "PASTA_FLAG_TTL_SECONDS",
        "flag_ttl_seconds",
        10.0,
        _seconds,
        "How long a flag's last value holds when the controller is gone, seconds.",
    ),
    Setting(
        "PASTA_METRICS_ADDR", "metrics_addr", "", str, "host:port where the app serves /metrics; empty = serve nothing."
    ),
    Setting(
        "PASTA_API_TOKEN",
        "api_token",
        "",
        checked_token,
        "Bearer token of the API on port 4320, for who serves and who asks it; OTLP ports take one by `--token-env`.",
    ),
    Setting(
        "PASTA_PROMETHEUS_URL", "prometheus_url", "", str, "Prometheus server of SLOs whose DataSource names none."
    ),
    Setting("PASTA_PROMETHEUS_TOKEN", "prometheus_token", "", str, "Bearer token for Prometheus."),
    Setting("PASTA_PROMETHEUS_BASIC_AUTH", "prometheus_basic_auth", "", str, "user:password for Prometheus."),
    Setting("PASTA_PROMETHEUS_HEADERS", "prometheus_headers", "", str, "name=value,... sent to Prometheus."),
    Setting("PASTA_PROMETHEUS_CA_FILE", "prometheus_ca_file", "", str, "PEM CA certificates for Prometheus over TLS."),
    Setting(
        "PASTA_PROMETHEUS_CERT_FILE", "prometheus_cert_file", "", str, "PEM client certificate chain for Prometheus."
    ),
    Setting("PASTA_PROMETHEUS_KEY_FILE", "prometheus_key_file", "", str, "PEM key of the client certificate."),
    Setting(
        "PASTA_PROMETHEUS_TIMEOUT_SECONDS",
        "prometheus_timeout_seconds",
        10.0,
        _seconds,
        "Limit of one request, seconds.",
    ),
    Setting(
        "PASTA_MAINTENANCE_FILE", "maintenance_file", "", str, "YAML file of planned maintenance: no budget counts it."
    ),
    Setting(
        "PASTA_DCGM_URL", "dcgm_url", "", str, "Page of a DCGM exporter, read where the machine shows no GPU itself."
    ),
    Setting("PASTA_CONFIG", "", "", str, "YAML file with these settings."),
)


class Settings(dict[str, Any]):
    """Resolved settings by environment name."""


def load_settings(environ: Mapping[str, str] | None = None, file: str | None = None) -> Settings:
    """Resolve every setting from the environment, then the YAML file, then its default.

    Raises:
        InputError: A value cannot be parsed; names the variable, or the file and field.
    """
    environ = os.environ if environ is None else environ
    path = file or environ.get("PASTA_CONFIG", "")
    document = _read_yaml(path) if path else {}
    return Settings({setting.env: _resolve(setting, environ, document, path) for setting in SETTINGS})


def _resolve(setting: Setting, environ: Mapping[str, str], document: Mapping[str, Any], path: str) -> Any:
    if setting.env in environ:
        return _parse(setting, environ[setting.env], file=None, field=setting.env)
    if setting.yaml and setting.yaml in document:
        return _parse(setting, str(document[setting.yaml]), file=path, field=setting.yaml)
    return setting.default


def _parse(setting: Setting, text: str, *, file: str | None, field: str) -> Any:
    try:
        return setting.parse(text)
    except ValueError as error:
        raise InputError(str(error), file=file, field=field) from error


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
        check_depth(text)
        document = yaml.safe_load(text)
    except OSError as error:
        raise InputError(error.strerror or str(error), file=path) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        why = getattr(error, "problem", None) or "cannot be parsed"
        raise InputError(f"not valid YAML: {why}", file=path, line=mark.line + 1 if mark else None) from error
    except (ValueError, TypeError) as error:  # not UTF-8, a date that is none, a list as a key
        raise InputError(f"not valid YAML: {error}", file=path) from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise InputError("expected a mapping", file=path)
    known = {setting.yaml for setting in SETTINGS if setting.yaml}
    for key in document:
        if key not in known:
            raise InputError("unknown setting", file=path, field=str(key))
    return document
