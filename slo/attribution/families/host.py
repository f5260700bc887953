"""Host evidence by process: cgroup throttling and run delay, read from cumulative counters."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pasta_otel.model import CauseKind, Evidence, HostSample
from pasta_otel.semconv import CGROUP_PERIODS, CGROUP_THROTTLED_PERIODS, CGROUP_THROTTLED_TIME, CPU_TIME, RUN_DELAY
from pasta_otel.slo.attribution.record import SECOND_NS, Record

SHARED_BY_CGROUP = frozenset({CGROUP_PERIODS, CGROUP_THROTTLED_PERIODS, CGROUP_THROTTLED_TIME})


@dataclass(frozen=True, slots=True)
class HostPressure:
    """The machine kept a service's processes from running.

    Attributes:
        kind: How.
        strength: How clearly, 0..1.
        evidence: What shows it.
        most_delay: Seconds a second of waiting requests that this can have caused, queueing included; infinite where
            that is unknown.
    """

    kind: CauseKind
    strength: float
    evidence: tuple[Evidence, ...]
    most_delay: float = math.inf

    def explains(self, record: Record, extra_ns: float) -> bool:
        """Say whether it can have caused most of this extra time in an average request."""
        return self.most_delay >= record.limits.delay_explained * extra_ns / SECOND_NS * record.requests_per_second


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast a counter grew in one window.

    Attributes:
        per_second: Increase a second of wall time.
        n: Readings.
    """

    per_second: float
    n: int


Rates = Mapping[str, Mapping[str, Rate]]


def host_rates(samples: Sequence[HostSample]) -> Rates:
    """Return service -> metric -> rate; absent where fewer than two readings exist (absent is not zero).

    Processes of one service add up, except for cgroup counters: processes may share a cgroup, so those of the most
    throttled process stand for all.
    """
    series: dict[tuple[str, int, str], list[HostSample]] = defaultdict(list)
    for sample in samples:
        series[sample.service, sample.pid, sample.metric].append(sample)
    processes: dict[str, dict[int, dict[str, Rate]]] = defaultdict(lambda: defaultdict(dict))
    for (service, pid, metric), readings in sorted(series.items(), key=lambda item: item[0]):
        rate = _rate(readings)
        if rate is not None:
            processes[service][pid][metric] = rate
    return {service: _join(list(known.values())) for service, known in processes.items()}


def _rate(readings: Sequence[HostSample]) -> Rate | None:
    ordered = sorted(readings, key=lambda sample: sample.time_unix_nano)
    wall = (ordered[-1].time_unix_nano - ordered[0].time_unix_nano) / SECOND_NS
    if len(ordered) < 2 or wall <= 0:
        return None
    # a counter that fell started again at zero: what it shows now is its increase
    grown = sum(new.value - old.value if new.value >= old.value else new.value for old, new in pairwise(ordered))
    return Rate(grown / wall, len(ordered))


def _join(processes: Sequence[Mapping[str, Rate]]) -> dict[str, Rate]:
    worst = max(processes, key=_throttling)
    joined = {metric: rate for metric, rate in worst.items() if metric in SHARED_BY_CGROUP}
    for metric in sorted({metric for rates in processes for metric in rates} - SHARED_BY_CGROUP):
        known = [rates[metric] for rates in processes if metric in rates]
        joined[metric] = Rate(sum(rate.per_second for rate in known), sum(rate.n for rate in known))
    return joined


def _throttling(rates: Mapping[str, Rate]) -> tuple[float, float]:
    none = Rate(-1.0, 0)  # a process without counters stands behind one that was never throttled
    return rates.get(CGROUP_THROTTLED_PERIODS, none).per_second, rates.get(CGROUP_PERIODS, none).per_second


def host_pressure(record: Record) -> dict[str, HostPressure]:
    """Return, per service, why its processes did not run; throttling first, as it is the more specific reason."""
    before, after = host_rates(record.host_before), host_rates(record.host_after)
    found: dict[str, HostPressure] = {}
    for service in sorted(after):
        pressure = _throttled(record, service, before, after) or _contended(record, service, before, after)
        if pressure is not None:
            found[service] = pressure
    return found


def cpu_growth(record: Record) -> dict[str, Evidence]:
    """Return, per service, that its processes use more CPU for each request than before: it works, it does not wait.

    The effect is the share of its CPU time that is new, 0..1, with growth in proportion to the requests taken out.
    """
    before, after = host_rates(record.host_before), host_rates(record.host_after)
    busier = record.request_rate_ratio
    found: dict[str, Evidence] = {}
    for service in sorted(after):
        new, old = after[service].get(CPU_TIME), before.get(service, {}).get(CPU_TIME)
        if new is None or old is None or new.per_second <= 0:
            continue
        effect = 1.0 - old.per_second * max(busier, 1.0) / new.per_second
        if effect >= record.limits.cpu_share:
            found[service] = Evidence("host", f"{CPU_TIME}_per_second", old.per_second, new.per_second, effect, new.n)
    return found


def _ratio(rates: Rates, service: str, part: str, whole: Sequence[str]) -> float | None:
    known = rates.get(service, {})
    if part not in known or any(name not in known for name in whole):
        return None
    total = sum(known[name].per_second for name in whole)
    return known[part].per_second / total if total > 0 else 0.0


def _throttled(record: Record, service: str, before: Rates, after: Rates) -> HostPressure | None:
    new = _ratio(after, service, CGROUP_THROTTLED_PERIODS, (CGROUP_PERIODS,))
    old = _ratio(before, service, CGROUP_THROTTLED_PERIODS, (CGROUP_PERIODS,)) or 0.0  # no cgroup yet: not throttled
    if new is None or new <= 0 or new - old < record.limits.throttled_share:
        return None
    share = Evidence("host", "cgroup_throttled_share", old, new, new - old, after[service][CGROUP_THROTTLED_PERIODS].n)
    evidence = [share, *_rate_evidence(CGROUP_THROTTLED_TIME, service, before, after)]
    return HostPressure("cpu_throttled", min(1.0, new - old), tuple(evidence))


def _contended(record: Record, service: str, before: Rates, after: Rates) -> HostPressure | None:
    new = _ratio(after, service, RUN_DELAY, (RUN_DELAY, CPU_TIME))
    old = _ratio(before, service, RUN_DELAY, (RUN_DELAY, CPU_TIME))
    if new is None or old is None or new <= 0 or old >= 1:
        return None
    # a share of what was left: on a machine that is busy anyway the share is near 1 before, and cannot grow by much
    grown = (new - old) / (1.0 - old)
    if grown < record.limits.wait_share:
        return None
    delay = after[service][RUN_DELAY].per_second - before[service][RUN_DELAY].per_second
    if delay < record.limits.wait_rate:
        return None
    share = Evidence("host", "run_delay_share", old, new, grown, after[service][RUN_DELAY].n)
    evidence = (share, *_rate_evidence(RUN_DELAY, service, before, after))
    return HostPressure("cpu_contention", min(1.0, grown), evidence, _with_queue(delay, after[service]))


def _with_queue(delay: float, rates: Mapping[str, Rate]) -> float:
    """Return the most waiting that run delay causes together with the queue behind it: 1 / (1 - utilisation) of it.

    Waiting for the CPU is service time to whoever queues for the process, and an M/M/1 queue holds a request for the
    service time over 1 - utilisation. A process that always runs or waits to run may explain any growth.
    """
    idle = 1.0 - rates[RUN_DELAY].per_second - rates[CPU_TIME].per_second
    return delay / idle if idle > 0 else math.inf


def _rate_evidence(metric: str, service: str, before: Rates, after: Rates) -> list[Evidence]:
    new, old = after.get(service, {}).get(metric), before.get(service, {}).get(metric)
    if new is None:
        return []
    start = old.per_second if old else 0.0
    return [Evidence("host", f"{metric}_per_second", start, new.per_second, new.per_second - start, new.n)]
