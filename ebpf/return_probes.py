"""Whether return probes are safe on this kernel."""

from __future__ import annotations

import platform
import re

from pasta_otel.ebpf.ports import Refusal

UNSAFE_SINCE, SAFE_SINCE = (6, 11, 0), (6, 14, 0)


def return_probes_refusal(release: str | None = None, machine: str | None = None) -> Refusal | None:
    """Return why return probes must not be used, or None.

    From Linux 6.11 a return probe on x86-64 ends in a system call of its own; seccomp filters that do not know it, as
    Docker's default, kill the traced process, until the kernel lets it pass (commit cf6cb56ef244, in 6.14).
    """
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", release or platform.release())
    version = (int(match[1]), int(match[2]), int(match[3] or 0)) if match else (0, 0, 0)
    if (machine or platform.machine()) != "x86_64" or not UNSAFE_SINCE <= version < SAFE_SINCE:
        return None
    return Refusal("return_probes_unsafe", 0, f"Linux {release or platform.release()}")
