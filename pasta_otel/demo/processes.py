"""Child processes of the demo: started with a ready line, logged to a file, and never left behind."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pasta_otel.errors import PastaError

PR_SET_PDEATHSIG = 1  # prctl(2)
READY_SECONDS = 60.0  # the model service imports torch, which takes long on a busy machine
STOP_SECONDS = 15.0
NOT_OURS = frozenset({"PASTA_API_TOKEN"})  # the user's own sidecar may ask for one; the demo's, on loopback, does not


class DemoError(PastaError):
    """The demo's own machinery did not work; says which process and where its log is."""

    exit_code = 3


class TooBusyError(DemoError):
    """An SLO was not fine before the fault: the machine had too little to spare for what the demo promises.

    Args:
        problem: What was seen.
    """

    def __init__(self, problem: str) -> None:
        self.problem = problem
        super().__init__(
            f"{problem}, again at the second start; end what else keeps the machine busy (see `uptime`), or send fewer "
            "orders: --rate 2"
        )


@dataclass(slots=True)
class Child:
    """A running child.

    Attributes:
        name: What it is called in messages.
        process: The process.
        log: File with its stderr.
        ready: Its ready line, as JSON; empty before ``wait_ready`` and for children that have none.
        last: The last JSON line that it wrote while it stopped; empty without one.
    """

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    ready: dict[str, Any]
    last: dict[str, Any]

    @property
    def pid(self) -> int:
        """Return its process id."""
        return self.process.pid

    def wait_ready(self, seconds: float = READY_SECONDS) -> dict[str, Any]:
        """Wait for the line ``{"event": "ready", ...}`` on its stdout, and return it.

        Raises:
            DemoError: It ended, or was not ready in time.
        """
        stdout = self.process.stdout
        if stdout is None:
            raise DemoError(f"{self.name} was started without a ready line")
        deadline = time.monotonic() + seconds
        for line in _lines(stdout.fileno(), deadline):
            if line.startswith(b"{") and (message := json.loads(line)).get("event") == "ready":
                self.ready = message
                return self.ready
        with contextlib.suppress(subprocess.TimeoutExpired):  # its stdout closes a moment before it is gone
            self.process.wait(1.0)
        state = "ended" if self.process.poll() is not None else f"was not ready after {seconds:.0f} s"
        raise DemoError(f"{self.name} {state}; see {self.log}{_tail(self.log)}")

    def check(self) -> None:
        """Raise DemoError if it has ended."""
        if (code := self.process.poll()) is not None:
            raise DemoError(f"{self.name} ended with {code}; see {self.log}{_tail(self.log)}")

    def stop(self, seconds: float = STOP_SECONDS) -> int:
        """Send SIGTERM, wait, and kill it if it does not end; return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            rest, _ = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            rest, _ = self.process.communicate()
        for line in (rest or b"").splitlines():
            if line.startswith(b"{"):
                self.last = json.loads(line)
        return self.process.returncode


def python(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs one of our modules with this interpreter."""
    return [sys.executable, "-m", module, *arguments]


def start(name: str, command: Sequence[str], log: Path, environment: Mapping[str, str], *, ready: bool = True) -> Child:
    """Start a child that gets SIGTERM when this process dies, however it dies.

    Call it from the main thread: the kernel watches the thread that started the child.
    """
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if ready else stderr,
            stderr=stderr,
            env={**{name: value for name, value in os.environ.items() if name not in NOT_OURS}, **environment},
            start_new_session=True,  # Ctrl-C reaches the demo alone, which then stops everything in order
            preexec_fn=die_with_parent(os.getpid()),  # noqa: PLW1509 - two system calls, no lock, no allocation of note
        )
    return Child(name, process, log, {}, {})


def die_with_parent(parent: int) -> Callable[[], None]:
    """Return what a new child calls to be ended with its parent."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def arrange() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it died before the call above
            os.kill(os.getpid(), signal.SIGTERM)

    return arrange


def _lines(fd: int, deadline: float) -> Any:
    buffer = b""
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([fd], [], [], left)[0]:
            return
        chunk = os.read(fd, 4096)
        if not chunk:
            return
        *lines, buffer = (buffer + chunk).split(b"\n")
        yield from lines


def _tail(log: Path, lines: int = 5) -> str:
    text = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-lines:]
    return ":\n  " + "\n  ".join(text) if text else ""
