"""Memory counters as OpenTelemetry metrics, by GPU kernel class and module: names of GPU kernels have no bound."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from opentelemetry.metrics import Counter, Meter

from pasta_otel import semconv
from pasta_otel.gpu.classes import KernelClasses
from pasta_otel.gpu.memory.hot import HotTensor
from pasta_otel.gpu.memory.model import Accesses, Launch, accesses
from pasta_otel.gpu.memory.results import ProcessResult
from pasta_otel.gpu.memory.slots import total
from pasta_otel.gpu.memory.spans import SpanCounts

INSTRUMENTS = (
    semconv.GPU_MEMORY_SECTORS,
    semconv.GPU_MEMORY_REQUESTED,
    semconv.GPU_SHARED_WAVEFRONTS,
    semconv.GPU_SHARED_CONFLICTS,
)
MOST_TENSORS = 30
"""Labels of tensors that become attributes: those most accessed; mere addresses differ from run to run."""


def record(meter: Meter, results: Iterable[ProcessResult], tensors: Sequence[HotTensor] = ()) -> None:
    """Add what GPU kernels did; kinds of access that did not occur add nothing."""
    counters = {name: _counter(meter, name) for name in INSTRUMENTS}
    spec = semconv.METRICS[semconv.GPU_MEMORY_WORKING_SET]
    working_set = meter.create_gauge(spec.name, spec.unit, spec.description)
    for labels, launches in _groups(results):
        for name, value, access in _points(accesses(total(launch.words for launch in launches))):
            counters[name].add(value, {**labels, semconv.GPU_MEMORY_ACCESS: access})
        sizes = [launch.working_set for launch in launches if launch.working_set is not None]
        if sizes:
            working_set.set(max(sizes), labels)
    named = [tensor for tensor in tensors if tensor.name or tensor.module or tensor.source]
    if named:
        counter = _counter(meter, semconv.GPU_TENSOR_ACCESSES)
        for tensor in named[:MOST_TENSORS]:
            counter.add(tensor.accesses, {semconv.TENSOR_LABEL: tensor.label})


def record_spans(meter: Meter, counts: SpanCounts) -> None:
    """Add what became of launches that were to be spans."""
    counter = _counter(meter, semconv.GPU_SPANS)
    for outcome, count in (("ok", counts.ok), ("capped", counts.capped)):
        if count:
            counter.add(count, {"outcome": outcome})


def _counter(meter: Meter, name: str) -> Counter:
    spec = semconv.METRICS[name]
    return meter.create_counter(spec.name, spec.unit, spec.description)


def _groups(results: Iterable[ProcessResult]) -> Iterator[tuple[Mapping[str, str], list[Launch]]]:
    """Yield the launches of each class and module, with the attributes that name them."""
    class_of = KernelClasses()
    groups: dict[tuple[str, str], list[Launch]] = defaultdict(list)
    for result in results:
        for launch in result.launches:
            groups[class_of(launch.name), launch.caller.module].append(launch)
    for (kernel_class, module), launches in groups.items():
        labels = {semconv.GPU_KERNEL_CLASS: kernel_class}
        yield labels | ({semconv.MODULE_PATH: module} if module else {}), launches


def _points(counted: Accesses) -> Iterator[tuple[str, int, str]]:
    for kind, access in counted.global_.items():
        if access.requests:
            yield semconv.GPU_MEMORY_SECTORS, access.sectors, kind
            yield semconv.GPU_MEMORY_REQUESTED, access.bytes, kind
    for kind, shared in counted.shared.items():
        if shared.requests:
            yield semconv.GPU_SHARED_WAVEFRONTS, shared.wavefronts, kind
            yield semconv.GPU_SHARED_CONFLICTS, shared.conflicts, kind
