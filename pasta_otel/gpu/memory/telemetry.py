"""Memory counters as OpenTelemetry metrics, by GPU kernel class: names of GPU kernels are too many for labels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from opentelemetry.metrics import Counter, Meter

from pasta_otel import semconv
from pasta_otel.gpu.classes import KernelClasses
from pasta_otel.gpu.memory.report import KernelMemory

INSTRUMENTS = (
    semconv.GPU_MEMORY_SECTORS,
    semconv.GPU_MEMORY_REQUESTED,
    semconv.GPU_SHARED_WAVEFRONTS,
    semconv.GPU_SHARED_CONFLICTS,
)


def record(meter: Meter, kernels: Iterable[KernelMemory]) -> None:
    """Add what GPU kernels did; kinds of access that did not occur add nothing."""
    counters: dict[str, Counter] = {}
    for name in INSTRUMENTS:
        spec = semconv.METRICS[name]
        counters[name] = meter.create_counter(spec.name, spec.unit, spec.description)
    class_of = KernelClasses()
    for kernel in kernels:
        for name, value, access in _points(kernel):
            counters[name].add(
                value, {semconv.GPU_KERNEL_CLASS: class_of(kernel.name), semconv.GPU_MEMORY_ACCESS: access}
            )


def _points(kernel: KernelMemory) -> Iterator[tuple[str, int, str]]:
    for kind, access in kernel.accesses.global_.items():
        if access.requests:
            yield semconv.GPU_MEMORY_SECTORS, access.sectors, kind
            yield semconv.GPU_MEMORY_REQUESTED, access.bytes, kind
    for kind, shared in kernel.accesses.shared.items():
        if shared.requests:
            yield semconv.GPU_SHARED_WAVEFRONTS, shared.wavefronts, kind
            yield semconv.GPU_SHARED_CONFLICTS, shared.conflicts, kind
