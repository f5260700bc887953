"""What the host observer needs of a loader: load probes, attach their programs, give out their maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from pasta_otel.ebpf.probes import Probe
from pasta_otel.ebpf.start_reason import StartReason, start_reason


class Site(NamedTuple):
    """A place in a file to probe, and the cookie its program is told."""

    symbol: str
    offset: int
    cookie: int


class Refusal(NamedTuple):
    """Why something was not loaded or attached.

    Attributes:
        reason: Stable word.
        errno: The kernel's error number; 0 where it is not the kernel's refusal.
        text: The error in words.
    """

    reason: StartReason
    errno: int
    text: str


class RefusedError(Exception):
    """Loading or attaching was refused; ``refusal`` says why."""

    def __init__(self, refusal: Refusal) -> None:
        self.refusal = refusal
        super().__init__(f"{refusal.reason}: {refusal.text}")


def refused(error: OSError, what: str, log: str = "") -> RefusedError:
    """Return the refusal for an error of the kernel or of a loader's library.

    Args:
        error: What was raised.
        what: What was tried.
        log: What the verifier or the compiler wrote.
    """
    text = f"{what}: {error.strerror or error}"
    reason = start_reason(log) if log else "unknown"
    if reason == "unknown":
        reason = start_reason(text)
    last = log.strip().splitlines()[-2:]
    return RefusedError(Refusal(reason, error.errno or 0, "; ".join([text, *last])))


class Link(Protocol):
    """One attachment; it ends when it is closed or when the process ends."""

    def close(self) -> None:
        """Detach."""


class Loaded(Protocol):
    """Loaded programs and their maps."""

    @property
    def loader(self) -> str:
        """Return the loader's name."""

    @property
    def refusals(self) -> Mapping[str, Refusal]:
        """Return, by program (``probe/program``) or probe, what was not taken."""

    def map_fd(self, name: str) -> int:
        """Return a map's descriptor; it stays the loader's."""

    def program_fds(self) -> Mapping[str, int]:
        """Return the loaded programs' descriptors by ``probe/program``."""

    def attach_uprobes(self, probe: str, program: str, path: str, sites: Sequence[Site]) -> Link:
        """Attach an entry program to functions of a file, for all processes. Raises RefusedError."""

    def attach_uretprobes(self, probe: str, program: str, path: str, sites: Sequence[Site]) -> Link:
        """Attach a return program. Raises RefusedError."""

    def attach_tracepoint(self, probe: str, program: str, tracepoint: str) -> Link:
        """Attach to a tracepoint ``category:event``. Raises RefusedError."""

    def attach_perf(self, probe: str, program: str, event: str) -> Link:
        """Attach to a software event of perf. Raises RefusedError."""

    def close(self) -> None:
        """Detach and unload everything."""


class Loader(Protocol):
    """Loads probes into the kernel."""

    @property
    def name(self) -> str:
        """Return its name."""

    def load(self, probes: Sequence[Probe]) -> Loaded:
        """Load; what the kernel refuses is in ``refusals``. Raises RefusedError when nothing can be loaded."""
