"""The rules between findings: which end of an edge, which error in a chain, which of two explanations."""

from dataclasses import replace

import pytest

from pasta_otel.model import EdgeKey, HostSample, ModuleKey, OperationKey, Samples, SpanSLI
from pasta_otel.semconv import CGROUP_PERIODS, CGROUP_THROTTLED_PERIODS, CPU_TIME, RUN_DELAY
from pasta_otel.slo.attribution.explain import explain
from pasta_otel.slo.attribution.families.errors import edge_errors, error_ratio
from pasta_otel.slo.attribution.families.host import host_rates
from pasta_otel.slo.attribution.families.module_time import module_growth
from pasta_otel.slo.attribution.rank import rank
from pasta_otel.slo.attribution.record import Record, Snapshot, make_record
from pasta_otel.slo.attribution.thresholds import Thresholds

OWN = OperationKey("front", "GET /")
SLI = SpanSLI("front", "GET /", threshold_ns=50_000_000)
MS, SECOND = 1_000_000, 1_000_000_000
N = 100


def samples(mean_ms: float, *, errors: int = 0, count: int = N) -> Samples:
    values = tuple(int(mean_ms * MS * (0.8 + 0.4 * (i * 37 % count) / count)) for i in range(count))
    return Samples(values, count, errors=errors, requests=min(count, N))


def record(before: Snapshot, after: Snapshot, **changes: object) -> Record:
    return replace(make_record(OWN, before, after, Thresholds()), **changes)


def snapshot(
    operations: dict[str, Samples], gaps: dict[str, Samples], edges: dict[str, Samples] | None = None
) -> Snapshot:
    def key(name: str) -> EdgeKey:
        return EdgeKey(*name.split(">"))

    front = {OWN: samples(5)}
    return Snapshot(
        operations=front | {OperationKey(name, "GET /"): value for name, value in operations.items()},
        gaps={key(name): value for name, value in gaps.items()},
        edges={key(name): value for name, value in (edges if edges is not None else gaps).items()},
        modules={},
    )


def causes(record_: Record) -> list[tuple[str, str, str]]:
    return [(c.kind, c.service, c.target) for c in rank(record_, explain(record_), SLI)]


def test_one_slow_edge_of_many_belongs_to_its_callee():
    before = snapshot({}, {"front>a": samples(1), "front>b": samples(1), "front>c": samples(1)})
    after = snapshot({}, {"front>a": samples(30), "front>b": samples(1), "front>c": samples(1)})
    assert causes(record(before, after)) == [("edge_latency", "a", "front -> a")]


def test_edges_that_all_grew_belong_to_the_service_they_share():
    before = snapshot({}, {"front>a": samples(1), "front>b": samples(1), "front>c": samples(1), "x>a": samples(1)})
    after = snapshot({}, {"front>a": samples(30), "front>b": samples(29), "front>c": samples(31), "x>a": samples(1)})
    assert causes(record(before, after)) == [("edge_latency", "front", "front -> c")]


def test_a_small_common_growth_does_not_take_the_large_one_away_from_its_callee():
    before = snapshot({}, {"front>a": samples(1), "front>b": samples(1), "front>c": samples(1)})
    after = snapshot({}, {"front>a": samples(40), "front>b": samples(2), "front>c": samples(2)})
    assert causes(record(before, after))[0] == ("edge_latency", "a", "front -> a")


def test_errors_that_a_middle_service_only_passes_on_are_blamed_on_the_deepest_edge():
    calm = {"front>mid": samples(5), "mid>deep": samples(3)}
    failing = {"front>mid": samples(5, errors=40), "mid>deep": samples(3, errors=40)}
    before = snapshot({"mid": samples(2), "deep": samples(3)}, {}, calm)
    after = snapshot({"mid": samples(2, errors=40), "deep": samples(3, errors=40)}, {}, failing)
    after = replace(after, operations={**after.operations, OWN: samples(5, errors=40)})
    found = record(before, after)
    assert list(edge_errors(found)) == [EdgeKey("mid", "deep")]
    assert list(error_ratio(found)) == ["deep"]
    assert causes(found)[0] == ("edge_errors", "deep", "mid -> deep")


def test_errors_that_a_fallback_hides_from_the_slos_requests_are_no_cause():
    before = snapshot({}, {}, {"front>a": samples(5)})
    after = snapshot({}, {}, {"front>a": samples(5, errors=40)})
    assert edge_errors(record(before, after))
    assert causes(record(before, after)) == []


def test_the_services_own_errors_are_its_error_ratio():
    before, after = snapshot({}, {}), snapshot({}, {})
    after = replace(after, operations={OWN: samples(5, errors=30)})
    assert causes(record(before, after)) == [("error_ratio", "front", "front")]


def test_growth_in_a_module_is_measured_against_the_pace_of_its_siblings():
    before = {ModuleKey("m", f"layers.{i}"): samples(2) for i in range(8)}
    after = {key: samples(4) for key in before} | {ModuleKey("m", "layers.5"): samples(20)}
    calm = replace(snapshot({"m": samples(1)}, {}), modules=before)
    slow = replace(snapshot({"m": samples(1)}, {}), modules=after)
    growth = module_growth(record(calm, slow))["m"]
    assert growth.pace == 2.0
    assert growth.excess[0].target == "layers.5"
    assert growth.excess[0].extra_ns == pytest.approx(16 * sum(samples(1).values_ns) / N)
    assert len(growth.excess) == 1


def test_more_cpu_work_is_evidence_for_the_service_that_does_it():
    before = snapshot({"a": samples(5)}, {}, {"front>a": samples(6)})
    after = snapshot({"a": samples(20)}, {}, {"front>a": samples(21)})
    plain = record(before, after)
    cpu = [HostSample("a", 1, CPU_TIME, t * SECOND, t * 0.1) for t in (0, 10)]
    busy = [HostSample("a", 1, CPU_TIME, t * SECOND, t * 0.4) for t in (0, 10)]
    with_cpu = record(before, after, host_before=cpu, host_after=busy)
    (quiet,), (loud,) = rank(plain, explain(plain), SLI), rank(with_cpu, explain(with_cpu), SLI)
    assert loud.score > quiet.score
    assert loud.evidence[-1].metric == "cpu_time_seconds_per_second"


def test_counters_that_restart_count_from_zero_and_processes_add_up():
    readings = [
        HostSample("a", 1, RUN_DELAY, 0, 5.0),
        HostSample("a", 1, RUN_DELAY, 10 * SECOND, 1.0),
        HostSample("a", 2, RUN_DELAY, 0, 0.0),
        HostSample("a", 2, RUN_DELAY, 10 * SECOND, 2.0),
        HostSample("a", 1, CGROUP_PERIODS, 0, 0.0),
        HostSample("a", 1, CGROUP_PERIODS, 10 * SECOND, 100.0),
        HostSample("a", 2, CGROUP_PERIODS, 0, 0.0),
        HostSample("a", 2, CGROUP_PERIODS, 10 * SECOND, 100.0),
        HostSample("b", 3, RUN_DELAY, 0, 1.0),
    ]
    rates = host_rates(readings)
    assert rates["a"][RUN_DELAY].per_second == pytest.approx(0.3)
    assert rates["a"][CGROUP_PERIODS].per_second == 10.0
    assert "b" not in rates


def test_the_most_throttled_process_stands_for_its_service_with_its_own_periods():
    readings = [
        HostSample("a", pid, metric, t * SECOND, t * rate)
        for pid, periods, throttled in ((1, 50.0, 0.0), (2, 10.0, 8.0))
        for metric, rate in ((CGROUP_PERIODS, periods), (CGROUP_THROTTLED_PERIODS, throttled))
        for t in (0, 10)
    ]
    rates = host_rates(readings)["a"]
    assert (rates[CGROUP_PERIODS].per_second, rates[CGROUP_THROTTLED_PERIODS].per_second) == (10.0, 8.0)


def host(cpu: float, delay: float) -> list[HostSample]:
    """Return ten seconds of one process that uses and waits for this many CPU seconds a second."""
    rates = {CPU_TIME: cpu, RUN_DELAY: delay}
    return [HostSample("a", 1, name, t * SECOND, t * rate) for name, rate in rates.items() for t in (0, 10)]


def slower_by(extra_ms: float, before: list[HostSample], after: list[HostSample]) -> Record:
    """Return four requests a second to a service that takes this much longer, with these host readings."""
    calm = snapshot({"a": samples(5)}, {}, {"front>a": samples(6)})
    slow = snapshot({"a": samples(5 + extra_ms)}, {}, {"front>a": samples(6 + extra_ms)})
    return record(calm, slow, host_before=before, host_after=after, requests_per_second=4.0)


def test_run_delay_that_is_too_short_for_the_growth_leaves_it_to_the_edge():
    neighbours = slower_by(140, host(0.009, 0.012), host(0.009, 0.105))  # 0.56 s/s more waiting, 0.09 of it for a CPU
    assert causes(neighbours)[0] == ("edge_latency", "a", "front -> a")


def test_run_delay_that_is_as_long_as_the_growth_explains_it():
    assert causes(slower_by(24, host(0.009, 0.012), host(0.009, 0.105)))[0] == ("cpu_contention", "a", "a")


def test_run_delay_of_a_process_that_is_always_runnable_explains_the_queue_behind_it():
    assert causes(slower_by(1400, host(0.03, 0.02), host(0.03, 0.98)))[0] == ("cpu_contention", "a", "a")


def test_contention_is_seen_on_a_machine_that_was_busy_before():
    assert causes(slower_by(400, host(0.03, 0.2), host(0.03, 1.7)))[0] == ("cpu_contention", "a", "a")
