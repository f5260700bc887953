"""Pressure stall information: how long tasks waited for a CPU, memory or IO."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from pasta_otel.ebpf.hostfiles.files import read_text


class Pressure(NamedTuple):
    """Microseconds in which some task, or all that were not idle, waited; ``full`` is absent for some resources."""

    some_us: int
    full_us: int | None


def parse_pressure(text: str) -> Pressure | None:
    """Return the totals of a PSI file, or None when it has no ``some`` line."""
    totals: dict[str, int] = {}
    for line in text.splitlines():
        name, *fields = line.split()
        total = next((field.partition("=")[2] for field in fields if field.startswith("total=")), "")
        if total.isdigit():
            totals[name] = int(total)
    return Pressure(totals["some"], totals.get("full")) if "some" in totals else None


def read_pressure(folder: Path, resource: str) -> Pressure | None:
    """Return the pressure of ``cpu``, ``memory`` or ``io``: of the machine (``/proc/pressure``) or of a v2 cgroup.

    None when PSI is off: reading then fails with EOPNOTSUPP, or the file is not there.
    """
    text = read_text(folder / resource)
    if text is None:
        text = read_text(folder / f"{resource}.pressure")
    return parse_pressure(text) if text is not None else None
