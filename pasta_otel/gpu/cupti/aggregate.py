"""All captured GPU work in histograms by class, module and device: whole batches by numpy, never one by one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pasta_otel import semconv
from pasta_otel.gpu.classes import CLASSES, KernelClasses
from pasta_otel.gpu.cupti.rows import Kind
from pasta_otel.gpu.mapping import Joined, Region
from pasta_otel.model import Exemplar, HistogramPoint

BOUNDS = tuple(base * 10.0**power for power in range(-6, 0) for base in (1, 2, 5))
"""Seconds, 1 us to 0.5 s in steps of 1, 2, 5: a GPU kernel of a few microseconds and a large copy are both resolved."""
MAX_SERIES = 2000
"""OpenTelemetry's default cardinality limit; further series go into one with ``otel.metric.overflow``."""
NODE_MASK = 0xFFFFFFFF

_BOUNDS_NS = np.array([round(bound * 1e9) for bound in BOUNDS], dtype=np.float64)
_CLASS_SLOTS, _DEVICE_SLOTS = 16, 256
_CLASS_OF_KIND = {Kind.MEMCPY: "memcpy", Kind.MEMCPY_PEER: "memcpy", Kind.MEMSET: "memset"}

_Key = tuple[str, str, int]  # class, module, device


@dataclass(slots=True)
class _Series:
    counts: NDArray[np.float64] = field(default_factory=lambda: np.zeros(len(BOUNDS) + 1))
    total_ns: float = 0.0
    minimum_ns: int = 1 << 63
    maximum_ns: int = 0
    exemplar: Exemplar | None = None


class ClassCodes:
    """Class of each name id as an array that grows with the names."""

    def __init__(self, classes: KernelClasses) -> None:
        self._classes = classes
        self._codes = np.zeros(0, np.int64)

    def of(self, names: Sequence[str]) -> NDArray[np.int64]:
        """Return an index into ``CLASSES`` by name id."""
        if len(names) > len(self._codes):
            fresh = [CLASSES.index(self._classes(name)) for name in names[len(self._codes) :]]
            self._codes = np.concatenate([self._codes, np.array(fresh, np.int64)])
        return self._codes

    def of_work(self, joined: Joined, names: Sequence[str]) -> NDArray[np.int64]:
        """Return an index into ``CLASSES`` for each row of GPU work."""
        work = joined.work
        codes = self.of(names)
        code = codes[work["name"]] if len(codes) else np.zeros(len(work), np.int64)
        for kind, name in _CLASS_OF_KIND.items():
            code[work["kind"] == kind] = CLASSES.index(name)
        return code


def module_codes(joined: Joined) -> tuple[NDArray[np.int64], list[str]]:
    """Return for each row an index into the returned module paths; path 0 is "": no module is known."""
    paths: dict[str, int] = {"": 0}
    by_region = np.array(
        [paths.setdefault(region.module or "", len(paths)) for region in joined.regions] + [0], np.int64
    )
    code = by_region[joined.region]
    for position, region in enumerate(joined.regions):
        if region.nodes:
            _graph_modules(joined, position, region, code, paths)
    return code, list(paths)


def _graph_modules(
    joined: Joined, position: int, region: Region, code: NDArray[np.int64], paths: dict[str, int]
) -> None:
    rows = np.flatnonzero(joined.region == position)
    nodes = joined.work["node"][rows] & NODE_MASK
    distinct, inverse = np.unique(nodes, return_inverse=True)
    known = region.nodes or {}
    named = [paths.setdefault(known.get(node, region.module or ""), len(paths)) for node in distinct.tolist()]
    code[rows] = np.array(named, np.int64)[inverse]


class KernelHistograms:
    """``gpu.cuda.kernel.duration``, counted here and handed out as points.

    Args:
        classes: Class by name.
        device_id: ``hw.id`` by CUDA device.
        now_unix_nano: Wall time.
        limit: Most series.
    """

    def __init__(
        self,
        classes: KernelClasses,
        device_id: Callable[[int], str],
        now_unix_nano: Callable[[], int],
        limit: int = MAX_SERIES,
    ) -> None:
        self.codes = ClassCodes(classes)
        self._device_id, self._now, self._limit = device_id, now_unix_nano, limit
        self._start, self._lock = now_unix_nano(), threading.Lock()
        self._series: dict[_Key | None, _Series] = {}

    def add(self, joined: Joined, names: Sequence[str], weight: float, offset_ns: int = 0) -> None:
        """Count a window's work.

        Args:
            joined: The work.
            names: GPU kernel names by id.
            weight: How many times the window's work stands for: 1 / sampled share.
            offset_ns: Unix time minus CUPTI's, for exemplars.
        """
        work = joined.work
        if not len(work):
            return
        duration = (work["end"] - work["start"]).astype(np.float64)
        module, paths = module_codes(joined)
        key = (module * _CLASS_SLOTS + self.codes.of_work(joined, names)) * _DEVICE_SLOTS + work[
            "device"
        ] % _DEVICE_SLOTS
        distinct, inverse = np.unique(key, return_inverse=True)
        width = len(BOUNDS) + 1
        bucket = np.searchsorted(_BOUNDS_NS, duration, side="left")
        counts = np.bincount(inverse * width + bucket, minlength=len(distinct) * width).reshape(-1, width)
        total = np.bincount(inverse, weights=duration, minlength=len(distinct))
        order = np.lexsort((duration, inverse))
        last = np.append(np.flatnonzero(np.diff(inverse[order])), len(order) - 1)
        longest, shortest = order[last], order[np.append(0, last[:-1] + 1)]
        with self._lock:
            for at, code in enumerate(distinct.tolist()):
                rest, device = divmod(code, _DEVICE_SLOTS)
                path, class_code = divmod(rest, _CLASS_SLOTS)
                series = self._of((CLASSES[class_code], paths[path], device))
                series.counts += counts[at] * weight
                series.total_ns += total[at] * weight
                series.minimum_ns = min(series.minimum_ns, int(duration[shortest[at]]))
                series.maximum_ns = max(series.maximum_ns, int(duration[longest[at]]))
                series.exemplar = _exemplar(joined, int(longest[at]), offset_ns) or series.exemplar

    def _of(self, key: _Key) -> _Series:
        found = self._series.get(key)
        if found is None:
            place: _Key | None = key if len(self._series) < self._limit else None
            found = self._series.setdefault(place, _Series())
        return found

    def points(self) -> list[HistogramPoint]:
        """Return the cumulative histograms."""
        with self._lock:
            now = self._now()
            return [self._point(key, series, now) for key, series in self._series.items()]

    def _point(self, key: _Key | None, series: _Series, now: int) -> HistogramPoint:
        return HistogramPoint(
            attributes={"otel.metric.overflow": True} if key is None else self._labels(key),
            bounds=BOUNDS,
            counts=tuple(np.rint(series.counts).astype(int).tolist()),
            total=series.total_ns / 1e9,
            minimum=series.minimum_ns / 1e9,
            maximum=series.maximum_ns / 1e9,
            start_time_unix_nano=self._start,
            time_unix_nano=now,
            exemplars=() if series.exemplar is None else (series.exemplar,),
        )

    def _labels(self, key: _Key) -> dict[str, str]:
        kernel_class, module, device = key
        labels = {semconv.GPU_KERNEL_CLASS: kernel_class, semconv.HW_ID: self._device_id(device)}
        if module:
            labels[semconv.MODULE_PATH] = module
        return labels


def _exemplar(joined: Joined, row: int, offset_ns: int) -> Exemplar | None:
    position = int(joined.region[row])
    if position < 0:
        return None
    region, work = joined.regions[position], joined.work[row]
    value = (int(work["end"]) - int(work["start"])) / 1e9
    return Exemplar(value, int(work["end"]) + offset_ns, region.trace_id, region.span_id)
