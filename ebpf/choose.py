"""Which loader carries the probes here: CO-RE, else bcc, else none and only files are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from pasta_otel.ebpf.loaders.core import CoreLoader
from pasta_otel.ebpf.observer import HostObserver
from pasta_otel.ebpf.ports import Loader, Refusal, RefusedError
from pasta_otel.ebpf.probes import OBJECT_FOLDER
from pasta_otel.ebpf.start_reason import HELP, lockdown_reason, read_lockdown


def make_loader(name: str, folder: Path) -> Loader:
    """Return a loader by name."""
    if name == "core":
        return CoreLoader(folder)
    from pasta_otel.ebpf.loaders.bcc import BccLoader  # noqa: PLC0415 - its imports cost time before attaching

    return BccLoader(folder)


def start_observer(
    make: Callable[[Loader], HostObserver],
    wanted: Sequence[str] = ("core", "bcc"),
    *,
    folder: Path = OBJECT_FOLDER,
    sys_root: Path = Path("/sys"),
) -> tuple[HostObserver | None, dict[str, Refusal]]:
    """Return an observer over the first loader that loads, and why the others did not; None = read files only.

    Args:
        make: Makes the observer over a loader.
        wanted: Names of loaders, best first.
        folder: Where the objects lie.
        sys_root: ``/sys``.
    """
    refusals: dict[str, Refusal] = {}
    locked = lockdown_reason(read_lockdown(sys_root))
    if locked is not None:
        return None, {name: Refusal(locked, 0, HELP[locked]) for name in wanted}
    for name in wanted:
        if name == "core" and not (sys_root / "kernel" / "btf" / "vmlinux").exists():
            refusals[name] = Refusal("btf_missing", 0, f"no {sys_root}/kernel/btf/vmlinux")
            continue
        if refusals and {refusal.reason for refusal in refusals.values()} == {"not_privileged"}:
            refusals[name] = Refusal("not_privileged", 0, f"{name} needs more than the loader before it")
            continue
        try:
            return make(make_loader(name, folder)), refusals
        except RefusedError as error:
            refusals[name] = error.refusal
    return None, refusals
