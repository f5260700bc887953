"""A CPU quota for one running process, by cgroup v1 or v2, that can be taken back."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PERIOD_US = 100_000  # the kernel's default CFS period
QUOTA_LEAST_US = 1_000  # the kernel refuses less
PREFIX = "pasta-demo-"


@dataclass(frozen=True, slots=True)
class CpuCgroup:
    """Where a process stands in the hierarchy that holds the cpu controller.

    Attributes:
        version: 1 or 2.
        path: The group's folder.
        root: The hierarchy's mount point.
    """

    version: int
    path: Path
    root: Path


def find(pid: int, proc: Path = Path("/proc")) -> CpuCgroup | None:
    """Return the cpu cgroup of a process, or None where there is no cpu controller."""
    mounts = _mounts(proc)
    for line in (proc / str(pid) / "cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        version = 1 if "cpu" in controllers.split(",") else 2 if not controllers else 0
        root = mounts.get(version)
        if version and root and (version == 1 or _has_cpu(root)):
            return CpuCgroup(version, root / path.lstrip("/"), root)
    return None


class Quota:
    """A child group of its own for one process, with a CPU quota.

    Args:
        pid: The process.
        cores: CPU seconds it may use in a second, over 0.
        home: Its group now.
    """

    def __init__(self, pid: int, cores: float, home: CpuCgroup) -> None:
        self._pid, self._home = pid, home
        self._quota_us = max(QUOTA_LEAST_US, int(cores * PERIOD_US))
        self._group: Path | None = None
        self.method = f"cgroup_v{home.version}"
        self.detail = f"{self._quota_us} us of CPU every {PERIOD_US} us"

    def apply(self) -> None:
        """Move the process into a group with the quota.

        Raises:
            OSError: No group can be made here, or not with a quota; nothing is left behind.
        """
        # v2 keeps processes and controllers of one group apart, so there a sibling is tried after a child
        candidates = [self._home.path] if self._home.version == 1 else [self._home.path, self._home.path.parent]
        for number, parent in enumerate(candidates):
            try:
                self._apply_under(parent)
            except OSError:
                self.revert()
                if number == len(candidates) - 1:
                    raise
            else:
                return

    def tend(self) -> str:
        """Do nothing: the kernel itself sees to a quota."""
        return ""

    def revert(self) -> None:
        """Move the process back and remove the group; safe to call twice, and after the process ended."""
        group, self._group = self._group, None
        if group is None or not group.exists():
            return
        with contextlib.suppress(FileNotFoundError):
            for pid in (group / "cgroup.procs").read_text(encoding="utf-8").split():
                with contextlib.suppress(ProcessLookupError):
                    _write(self._home.path / "cgroup.procs", pid)
        group.rmdir()

    def _apply_under(self, parent: Path) -> None:
        group = parent / f"{PREFIX}{self._pid}"
        group.mkdir(exist_ok=True)
        self._group = group
        if self._home.version == 1:
            _write(group / "cpu.cfs_period_us", PERIOD_US)
            _write(group / "cpu.cfs_quota_us", self._quota_us)
        else:
            if not (group / "cpu.max").exists():
                _write(parent / "cgroup.subtree_control", "+cpu")
            _write(group / "cpu.max", f"{self._quota_us} {PERIOD_US}")
        _write(group / "cgroup.procs", self._pid)


def sweep(home: CpuCgroup) -> None:
    """Remove empty groups that a demo left behind when it was killed together with its helper."""
    for parent in {home.path, home.path.parent}:
        for group in parent.glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):  # not empty: another demo's
                group.rmdir()


def _mounts(proc: Path) -> dict[int, Path]:
    found: dict[int, Path] = {}
    for mount, kind, options in _mount_lines(proc):
        if kind == "cgroup2":
            found.setdefault(2, Path(mount))
        elif kind == "cgroup" and "cpu" in options.split(","):
            found.setdefault(1, Path(mount))
    return found


def _mount_lines(proc: Path) -> Iterator[tuple[str, str, str]]:
    for line in (proc / "self" / "mounts").read_text(encoding="utf-8").splitlines():
        _, mount, kind, options, *_ = line.split(" ")
        yield mount, kind, options


def _has_cpu(root: Path) -> bool:
    controllers = root / "cgroup.controllers"
    return controllers.exists() and "cpu" in controllers.read_text(encoding="utf-8").split()


def _write(path: Path, value: object) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, str(value).encode())
    finally:
        os.close(fd)
