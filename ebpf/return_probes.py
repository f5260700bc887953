"""Whether return probes are safe on this kernel."""

from __future__ import annotations

import os

from pasta_otel.ebpf.ports import Refusal
from pasta_otel.ebpf.uname import host_machine, linux_version

UNSAFE_SINCE, SAFE_SINCE = (6, 11, 0), (6, 14, 0)


def return_probes_refusal(release: str | None = None, machine: str | None = None) -> Refusal | None:
    """Return why return probes must not be used, or None.

    From Linux 6.11 a return probe on x86-64 ends in a system call of its own; seccomp filters that do not know it, as
    Docker's default, kill the traced process, until the kernel lets it pass (commit cf6cb56ef244, in 6.14).
    """
    unsafe = UNSAFE_SINCE <= linux_version(release) < SAFE_SINCE
    if (machine or host_machine()) != "x86_64" or not unsafe:
        return None
    return Refusal("return_probes_unsafe", 0, f"Linux {release or os.uname().release}")
