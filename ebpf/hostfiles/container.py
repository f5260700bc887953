"""Which container and pod a process belongs to, as far as its cgroup's path tells."""

from __future__ import annotations

import re
from pathlib import Path

from pasta_otel import semconv
from pasta_otel.ebpf.hostfiles.files import read_text

HOST_PID_NAMESPACE = "pid:[4026531836]"  # include/linux/proc_ns.h: PROC_PID_INIT_INO
# runtimes put the 64 hex digits last, bare or between a prefix and ".scope"; a monitor's scope is not the container's
_CONTAINER = re.compile(r"(?:^|[/:-])(?P<id>[0-9a-f]{64})(?:\.scope)?(?:/|$)")
_MONITOR = re.compile(r"(?:conmon-|-conmon)")
# kubelet: pod<uid>, with _ for - where systemd names the slice; a static pod's uid is 32 hex digits
_POD = re.compile(r"pod(?P<uid>[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?:\.slice)?(?:/|$)")
DEVICE_PREFIXES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/dxg")


def parse_container(cgroup: str) -> dict[str, str]:
    """Return ``container.id`` and ``k8s.pod.uid`` from ``/proc/PID/cgroup``; what it does not tell is absent."""
    found: dict[str, str] = {}
    for line in cgroup.splitlines():
        path = line.split(":", 2)[-1]
        pod = _POD.search(path)
        if pod is not None:
            found.setdefault(semconv.K8S_POD_UID, pod["uid"].replace("_", "-"))
        ids = [] if _MONITOR.search(path) else [match["id"] for match in _CONTAINER.finditer(path)]
        if ids:
            found.setdefault(semconv.CONTAINER_ID, ids[-1])  # nested: the innermost
    return found


class ContainerOwner:
    """Tell the container and pod of a process that a GPU driver named.

    The driver counts pids in the host's namespace. Seen from inside a container the same number is another process, so
    there a process is only believed to be the one when it holds a GPU's device file open.

    Args:
        proc_root: ``/proc``, or where the host's is mounted.
    """

    def __init__(self, proc_root: str | Path = "/proc") -> None:
        self._proc = Path(proc_root)

    def __call__(self, pid: int) -> dict[str, str]:
        """Return what is known; empty when nothing is."""
        text = read_text(self._proc / str(pid) / "cgroup")
        if text is None or not (self._sees_host() or self._holds_device(pid)):
            return {}
        return parse_container(text)

    def _sees_host(self) -> bool:
        """Return whether the processes under ``proc_root`` are the host's: process 1 is in its namespace."""
        for who in ("1", "self"):
            try:
                return (self._proc / who / "ns" / "pid").readlink().name == HOST_PID_NAMESPACE
            except OSError:
                continue
        return False

    def _holds_device(self, pid: int) -> bool:
        try:
            links = [entry.readlink() for entry in (self._proc / str(pid) / "fd").iterdir()]
        except OSError:
            return False
        return any(str(link).startswith(DEVICE_PREFIXES) for link in links)
