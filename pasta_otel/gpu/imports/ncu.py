"""Nsight Compute's CSV (``ncu --csv``): columns by name, values in base units, what is not there stays absent.

The tool mixes its own messages and the program's output in before the table, the set of columns changes between
versions, numbers carry thousands separators, and each row has its own scaled unit (Nsight Compute CLI manual).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from pasta_otel.errors import InputError

_NEEDED: Final = ("Kernel Name", "Metric Name", "Metric Unit", "Metric Value")
_PREFIXES: Final = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BASE: Final = {
    "byte": "By",
    "second": "s",
    "hz": "Hz",
    "cycle": "{cycle}",
    "inst": "{instruction}",
    "sector": "{sector}",
}
_UNIT = re.compile(r"(?P<prefix>[numKMGT]?)(?P<base>byte|second|hz|cycle|inst|sector)(?P<per>/.*)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class NcuKernel:
    """One profiled GPU kernel.

    Attributes:
        name: As ncu prints it, with arguments.
        metrics: Value by metric in base units (bytes, seconds, ratios); a metric without a number is absent.
        units: UCUM unit by metric.
    """

    name: str
    metrics: dict[str, float] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)


def read_ncu(text: str, file: str | None = None) -> list[NcuKernel]:
    """Return the profiled GPU kernels of ncu's output.

    Raises:
        InputError: kind ``ncu_no_table``: there is no table in it; quotes ncu's first error line if there is one.
    """
    lines = text.splitlines()
    header = next((at for at, line in enumerate(lines) if _is_header(line)), None)
    if header is None:
        error = next((line for line in lines if line.startswith("==ERROR==")), "")
        raise InputError(f"no table of ncu --csv in it{': ' + error if error else ''}", file=file, kind="ncu_no_table")
    kernels: dict[tuple[str, str], NcuKernel] = {}
    for row in _rows(lines[header:]):
        key = (row.get("ID", ""), row["Kernel Name"])
        kernel = kernels.setdefault(key, NcuKernel(row["Kernel Name"]))
        number = _number(row["Metric Value"])
        if number is not None:
            factor, unit = scale(row["Metric Unit"])
            kernel.metrics[row["Metric Name"]] = number * factor
            kernel.units[row["Metric Name"]] = unit
    return list(kernels.values())


def scale(unit: str) -> tuple[float, str]:
    """Return the factor to the base unit, and the base unit: prefixes are powers of 1000, percent becomes a ratio."""
    if unit == "%":
        return 0.01, "1"
    found = _UNIT.fullmatch(unit)
    if not found:
        return 1.0, unit or "1"
    prefix = found["prefix"]
    factor = _PREFIXES.get(prefix, _PREFIXES.get(prefix.lower(), 1.0)) if prefix else 1.0
    return factor, _BASE[found["base"].lower()] + _rate(found["per"])


def _rate(per: str | None) -> str:
    return "" if not per else per.replace("second", "s")


def _is_header(line: str) -> bool:
    return line.startswith('"') and all(f'"{name}"' in line for name in _NEEDED)


def _rows(lines: list[str]) -> Iterator[dict[str, str]]:
    """Yield rows that have all columns; the program's own output may stand between them."""
    names = next(csv.reader(lines[:1]))
    for line in lines[1:]:
        if line.startswith('"'):
            values = next(csv.reader([line]))
            if len(values) == len(names) and values != names:
                yield dict(zip(names, values, strict=True))


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None
