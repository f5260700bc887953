"""Device metrics of this machine: which sources there are, and their meters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from opentelemetry.metrics import Meter

from pasta_otel.clock import Clock
from pasta_otel.ebpf.hostfiles.container import ContainerOwner
from pasta_otel.errors import InputError, MissingError
from pasta_otel.gpu.device.amd import amd_source
from pasta_otel.gpu.device.dcgm import DcgmSource
from pasta_otel.gpu.device.meters import DeviceMeters
from pasta_otel.gpu.device.model import Owner, SourceDownError
from pasta_otel.gpu.device.nvml import nvml_source
from pasta_otel.gpu.device.sampler import DeviceSampler, DeviceSource
from pasta_otel.gpu.device.smi import smi_source
from pasta_otel.slo.sources.page import fetch_page
from pasta_otel.slo.sources.textpage import Page

NVIDIA_SIGNS = ("nvidiactl", "nvidia0", "dxg")  # under /dev; the last is the Windows Subsystem's
AMD_SIGNS = ("kfd",)
log = logging.getLogger(__name__)
Factory = Callable[[], DeviceSource]


class DeviceWatch:
    """The device metrics of one process; close it to let go of the drivers.

    Args:
        meter: Where the instruments are made.
        sources: What to observe; without any there are no instruments either.
        clock: Time.
    """

    def __init__(self, meter: Meter, sources: Sequence[DeviceSource], clock: Clock | None = None) -> None:
        self._samplers = [DeviceSampler(source, clock=clock) for source in sources]
        if self._samplers:
            DeviceMeters(meter, *self._samplers)

    def close(self) -> None:
        """Let go of the drivers."""
        for sampler in self._samplers:
            sampler.close()


def watch_devices(
    meter: Meter,
    *,
    clock: Clock | None = None,
    dcgm_url: str = "",
    proc_root: str = "/proc",
    dev_root: str = "/dev",
) -> DeviceWatch:
    """Start to observe the GPUs of this machine, if it shows any; nothing is asked of a driver before a scrape.

    Args:
        meter: Where the instruments are made.
        clock: Time.
        dcgm_url: Page of a DCGM exporter, read only where this machine shows no GPU itself; empty reads none.
        proc_root: ``/proc``, or where the host's is mounted.
        dev_root: ``/dev``.
    """
    sources = find_sources(ContainerOwner(proc_root), clock=clock, dev_root=Path(dev_root))
    if not sources and dcgm_url:  # both would say the same device twice
        sources.append(DcgmSource(lambda: _fetch(dcgm_url)))
    return DeviceWatch(meter, sources, clock)


def _fetch(url: str) -> Page:
    try:
        return fetch_page(url, field="PASTA_DCGM_URL")
    except (InputError, MissingError) as error:
        raise SourceDownError("unreachable", str(error)) from error


def find_sources(owner: Owner, *, clock: Clock | None = None, dev_root: Path = Path("/dev")) -> list[DeviceSource]:
    """Return a source for each vendor whose device files are here; one that lacks its package is logged, not fatal."""
    found: list[DeviceSource | None] = []
    if any((dev_root / name).exists() for name in NVIDIA_SIGNS):
        found.append(_first("NVIDIA", lambda: nvml_source(owner, clock=clock), smi_source))
    if any((dev_root / name).exists() for name in AMD_SIGNS):
        found.append(_first("AMD", lambda: amd_source(owner)))
    return [source for source in found if source is not None]


def _first(vendor: str, *factories: Factory) -> DeviceSource | None:
    reasons = []
    for factory in factories:
        try:
            return factory()
        except MissingError as error:
            reasons.append(str(error))
    log.warning("there are %s devices, but no way to read them: %s", vendor, "; ".join(reasons))
    return None
