"""The numbers that decide what counts as a cause, each with its source; tests and deployments pass their own."""

from __future__ import annotations

from dataclasses import dataclass

from pasta_otel.errors import InputError


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Gates of the attribution. Every one must be passed: significant, large enough, and relevant to the SLO.

    Attributes:
        min_count: Observations of a key needed in each window. Ours: at 10 only a Cliff's delta above 0.79 reaches
            min_z (sd of delta under equality is sqrt((n + m + 1) / (3 n m)), 0.26 at n = m = 10).
        min_requests: Requests of the SLO's own operation needed in each window.
        min_z: Mann-Whitney or two-proportion z that a shift must reach. Ours: one-sided p = 0.0013 a key; what then
            passes by chance must still explain a tenth of the SLO's trouble.
        min_delta: Cliff's delta of a shift: "small" is 0.147, "medium" 0.33, "large" 0.474 (Romano et al. 2006).
        min_tail: Instead of min_delta: extra share of observations above the baseline's 95th percentile. A quota stalls
            few calls for long, which the median and delta hardly see.
        min_share: Share of the SLO's extra time or bad events that a cause must explain.
        min_growth: That cause's extra time as a share of the whole baseline request.
        min_net_growth: Growth of the whole request, improvements taken off, below which latency explains nothing.
            Ours: benchmarks/attribution.py; with it normal PetShop data has no cause in 90 % of pairs (78 % without),
            and one of fifteen OnlineBoutique faults is lost.
        min_error_shift: Increase of an error ratio; below the error budget of a 99.5 % objective nothing burns.
        min_errors: Errors needed in the burning window.
        module_delta: Cliff's delta of one module ("large"): a module that got slower did so at nearly every call,
            while a stalled process delays random calls of all modules.
        module_share: Share of its service's growth that one module must carry to be the reason for the rest (queueing
            amplifies: waiting grows when service time grows).
        throttled_share: Increase of throttled / elapsed CFS periods. kubernetes-mixin alerts (CPUThrottlingHigh) at
            0.25 by itself; here the service's own slowdown must be shown too, so less is enough.
        wait_share: Increase of run delay / (run delay + CPU time), both of /proc/PID/schedstat, as a share of what it
            could still increase. Ours: two equal tasks on one CPU give 0.5, an idle machine about 0.01.
        wait_rate: Increase of run delay in seconds a second. Ours: a process that mostly sleeps has a high share from a
            few wake-ups; one that waited less than a twentieth of the time did not stall its requests.
        delay_explained: Share of a service's extra time that its run delay and the queue behind it must be able to
            cause. Ours: most of it; less is a busy machine beside another reason.
        cpu_share: Share of a service's CPU time that must be new to count as evidence: a third is half again as much.
        calls_ratio: Factor by which calls a request must grow for ``call_structure``.
    """

    min_count: int = 10
    min_requests: int = 10
    min_z: float = 3.0
    min_delta: float = 0.147
    min_tail: float = 0.05
    min_share: float = 0.10
    min_growth: float = 0.03
    min_net_growth: float = 0.01
    min_error_shift: float = 0.005
    min_errors: int = 5
    module_delta: float = 0.474
    module_share: float = 0.20
    throttled_share: float = 0.10
    wait_share: float = 0.15
    wait_rate: float = 0.05
    delay_explained: float = 0.5
    cpu_share: float = 0.33
    calls_ratio: float = 1.25

    def __post_init__(self) -> None:
        """Refuse a negative gate.

        Raises:
            InputError: Names the field.
        """
        for name in self.__slots__:
            if getattr(self, name) < 0 and name != "min_net_growth":
                raise InputError("expected a number >= 0", field=f"thresholds.{name}")


UNGATED = Thresholds(
    min_count=1,
    min_requests=1,
    min_z=0.0,
    min_delta=0.0,
    min_tail=0.0,
    min_share=0.0,
    min_growth=0.0,
    min_net_growth=float("-inf"),
    min_error_shift=0.0,
    min_errors=0,
    throttled_share=0.0,
    wait_share=0.0,
    wait_rate=0.0,
    delay_explained=0.0,
)
"""Rank everything that grew at all; for benchmarks that score the order, never for acting."""
