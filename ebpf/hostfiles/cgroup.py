"""Where a process's cgroup is mounted, v1, v2 or hybrid, and what its counters say."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from pasta_otel.ebpf.hostfiles.files import key_values, read_text

MOUNT_ROOT = "/sys/fs/cgroup"
_ESCAPES = {"\\040": " ", "\\011": "\t", "\\012": "\n", "\\134": "\\"}  # as proc(5) writes mountinfo


class Mount(NamedTuple):
    """One cgroup mount: its root within the hierarchy, where it is mounted, version and v1 controllers."""

    root: str
    point: str
    version: Literal[1, 2]
    controllers: frozenset[str]


@dataclass(frozen=True, slots=True)
class CgroupDir:
    """A process's cgroup in one hierarchy.

    Attributes:
        path: Its directory.
        version: 1 or 2.
        top: The mount point: no limits above it can be seen.
    """

    path: Path
    version: Literal[1, 2]
    top: Path

    def upwards(self) -> Iterator[Path]:
        """Yield the directory and its ancestors up to the mount point."""
        path = self.path
        yield path
        while path not in {self.top, path.parent}:
            path = path.parent
            yield path


@dataclass(frozen=True, slots=True)
class CpuStat:
    """CFS bandwidth counters of one cgroup.

    Attributes:
        periods: Enforcement periods that elapsed.
        throttled_periods: Those in which the cgroup ran out of quota.
        throttled_ns: Time its CPUs were held back, summed over CPUs.
        path: The cgroup that they are read from: the nearest with a quota.
    """

    periods: int
    throttled_periods: int
    throttled_ns: int
    path: Path


def parse_mounts(mountinfo: str) -> list[Mount]:
    """Return the cgroup mounts of a mountinfo file."""
    mounts: list[Mount] = []
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        head, tail = left.split(), right.split()
        if len(head) >= 5 and tail and tail[0] in {"cgroup", "cgroup2"}:
            options = frozenset(tail[-1].split(",")) if tail[0] == "cgroup" else frozenset()
            version: Literal[1, 2] = 1 if tail[0] == "cgroup" else 2
            mounts.append(Mount(_unescape(head[3]), _unescape(head[4]), version, options))
    return mounts


def _unescape(text: str) -> str:
    for code, character in _ESCAPES.items():
        text = text.replace(code, character)
    return text


def parse_membership(text: str, controller: str) -> tuple[str, Literal[1, 2]] | None:
    """Return the process's path and version for a controller: a v1 hierarchy that has it, else the v2 one."""
    unified: tuple[str, Literal[1, 2]] | None = None
    for line in text.splitlines():
        hierarchy, controllers, path = [*line.split(":", 2), "", "", ""][:3]
        if controller in controllers.split(","):
            return path.removesuffix(" (deleted)"), 1
        if hierarchy == "0" and not controllers:
            unified = (path.removesuffix(" (deleted)"), 2)
    return unified


def find_cgroup(proc_root: Path, cgroup_root: Path, pid: int, controller: str = "cpu") -> CgroupDir | None:
    """Return where the process's cgroup for a controller lies, or None when it cannot be seen from here.

    Args:
        proc_root: ``/proc``, or where the host's is mounted.
        cgroup_root: What stands for ``/sys/fs/cgroup``.
        pid: Process id within ``proc_root``.
        controller: ``cpu`` or ``memory``.
    """
    text = read_text(proc_root / str(pid) / "cgroup")
    membership = parse_membership(text, controller) if text is not None else None
    if membership is None:
        return None
    path, version = membership
    mounts = parse_mounts(read_text(proc_root / "self" / "mountinfo") or "")
    for mount in mounts:
        if mount.version == version and (version == 2 or controller in mount.controllers):
            found = _within(mount, path, cgroup_root)
            if found is not None and found.path.is_dir():
                return found
    return None


def _within(mount: Mount, path: str, cgroup_root: Path) -> CgroupDir | None:
    """Return the directory of a path in a mount, unless it lies outside of what the mount shows.

    In a container the mount's root is often the container's own cgroup, and ``/..`` stands for what a cgroup namespace
    hides.
    """
    if "/.." in mount.root or "/.." in path:
        return None
    inside = posixpath.relpath(path, mount.root)
    if inside.startswith(".."):
        return None
    below = posixpath.relpath(mount.point, MOUNT_ROOT)
    top = Path(mount.point) if below.startswith("..") else cgroup_root / below
    return CgroupDir(top / inside, mount.version, top)


def read_cpu_stat(cgroup: CgroupDir) -> CpuStat | None:
    """Return the bandwidth counters of the nearest cgroup with a quota, else the process's own; None if there are none.

    A pod's quota throttles its containers without a trace in their own counters, so ancestors count.
    """
    limited = next((path for path in cgroup.upwards() if _has_quota(path, cgroup.version)), cgroup.path)
    text = read_text(limited / "cpu.stat")
    values = key_values(text) if text is not None else {}
    time = values["throttled_time"] if "throttled_time" in values else values.get("throttled_usec", -1) * 1000
    if "nr_periods" not in values or "nr_throttled" not in values or time < 0:
        return None
    return CpuStat(values["nr_periods"], values["nr_throttled"], time, limited)


def _has_quota(path: Path, version: int) -> bool:
    text = read_text(path / ("cpu.cfs_quota_us" if version == 1 else "cpu.max"))
    first = text.split()[:1] if text else []
    return bool(first) and first[0].isdigit()  # v1 says -1 and v2 says max for "no limit"


def read_memory_events(cgroup: CgroupDir) -> dict[str, int]:
    """Return the memory events there are: ``memory.events`` of v2; ``oom_kill`` and ``max`` (failcnt) of v1."""
    if cgroup.version == 2:
        return key_values(read_text(cgroup.path / "memory.events") or "")
    control = key_values(read_text(cgroup.path / "memory.oom_control") or "")
    found = {name: control[name] for name in ("oom_kill",) if name in control}
    failures = read_text(cgroup.path / "memory.failcnt")
    return found | ({"max": int(failures)} if failures and failures.strip().isdigit() else {})
