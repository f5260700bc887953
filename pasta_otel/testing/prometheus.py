"""A real Prometheus for tests: from ``.cache/tools`` or the path, on a free port, filled with old samples."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from pasta_otel.errors import InputError, MissingError

TOOLS = Path(__file__).resolve().parents[2] / ".cache" / "tools" / "root" / "usr" / "bin"
READY_SECONDS = 30.0
Series = tuple[str, Mapping[str, str], Sequence[tuple[float, float]]]
"""(metric name, labels, samples of (Unix seconds, value))."""


def tool(name: str) -> str:
    """Return the path of a program.

    Raises:
        MissingError: It is not here.
    """
    found = shutil.which(name, path=str(TOOLS)) or shutil.which(name)
    if found is None:
        raise MissingError(f"{name} is not installed", how="run tests/tools.sh, or install Debian's prometheus")
    return found


def open_metrics(series: Iterable[Series]) -> str:
    """Return samples as OpenMetrics text with times, grouped by metric as the format wants."""
    groups: dict[str, list[str]] = {}
    for name, labels, samples in series:
        text = ",".join(f'{key}="{value}"' for key, value in labels.items())
        groups.setdefault(name, []).extend(f"{name}{{{text}}} {value:.17g} {at:.3f}" for at, value in samples)
    lines = [line for name, samples in groups.items() for line in (f"# TYPE {name} unknown", *samples)]
    return "\n".join([*lines, "# EOF", ""])


class PrometheusServer:
    """Run Prometheus on a free loopback port until the context ends.

    Args:
        folder: Where its data lies.
        config: Its configuration file's text.
        arguments: Further arguments.
    """

    def __init__(self, folder: Path, config: str = "{}", arguments: Sequence[str] = ()) -> None:
        self._folder, self._config, self._arguments = folder, config, arguments
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def backfill(self, series: Iterable[Series]) -> None:
        """Write old samples before the server starts."""
        text = self._folder / "samples.txt"
        text.write_text(open_metrics(series), encoding="utf-8")
        create = [
            tool("promtool"),
            "tsdb",
            "create-blocks-from",
            "--max-block-duration=2400h",
            "openmetrics",
            "--quiet",
        ]
        done = subprocess.run([*create, str(text), str(self._folder / "data")], capture_output=True, check=False)
        if done.returncode:
            raise InputError(done.stderr.decode()[-500:], kind="backfill")
        text.unlink()

    def __enter__(self) -> Self:
        """Start, and wait until it answers."""
        file = self._folder / "prometheus.yml"
        file.write_text(self._config, encoding="utf-8")
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen(
            [
                tool("prometheus"),
                f"--config.file={file}",
                f"--storage.tsdb.path={self._folder / 'data'}",
                "--storage.tsdb.retention.time=100y",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=error",
                *self._arguments,
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop it."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=20)

    def _wait(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.url}/-/ready", timeout=1):  # noqa: S310  # our own loopback server
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise MissingError("Prometheus did not become ready")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
