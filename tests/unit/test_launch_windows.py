"""Windows of launch probes: soon enough for a short job, within the budget, and right in the sum."""

import pytest
from opentelemetry.sdk.metrics import MeterProvider

from pasta_otel.app.launches import LAUNCH_NS, LAUNCH_PROBE, LaunchWindows
from pasta_otel.ebpf.layout import Counters


class Program:
    """A program that launches steadily, its probes, and the time that passes while they are waited for."""

    def __init__(self, rate: float) -> None:
        self.now_ns, self.rate, self.targets = 10**12, rate, 1
        self.recorded = 0.0
        self.timing, self.windows = "off", []

    def monotonic_ns(self) -> int:
        return self.now_ns

    def wait(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)
        if self.timing != "off":
            self.recorded += self.rate * seconds

    def time_launches(self, timing: str) -> None:
        self.timing = timing
        self.now_ns += 5_000_000

    def counters(self) -> dict[int, Counters]:
        return {LAUNCH_PROBE: Counters(seen=int(self.recorded))}


def watch(rate: float, seconds: float, budget: float = 0.01) -> tuple[Program, float, list[float]]:
    """Return the program, how many launches the windows stand for, and when they opened, seconds."""
    program = Program(rate)
    windows = LaunchWindows(program, budget, program, MeterProvider().get_meter("test"))
    began, total, opened = program.now_ns, 0.0, []
    while program.now_ns - began < seconds * 1e9:
        if windows.due():
            opened.append((program.now_ns - began) / 1e9)
            before = int(program.recorded)
            weight = windows.record(program.wait)
            total += (int(program.recorded) - before) * weight
        else:
            program.wait(min(windows.wait_s(), 0.2))
    return program, total, opened


@pytest.mark.parametrize("rate", [100, 10_000, 100_000])
def test_a_job_of_ten_seconds_has_several_windows_whatever_it_launches(rate):
    for _ in range(20):  # windows open at random times
        program, _, opened = watch(rate, 10)
        assert opened[0] < 3
        assert len(opened) >= 3
        assert program.recorded > 0


@pytest.mark.parametrize("rate", [1_000, 10_000, 200_000])
def test_windows_cost_no_more_than_half_of_the_budget_and_use_it(rate):
    program, total, opened = watch(rate, 300)
    cost = program.recorded * LAUNCH_NS / 300e9
    assert cost <= 0.005 * 1.05
    assert cost >= min(0.005, rate * LAUNCH_NS / 1e9) * 0.3
    assert total == pytest.approx(rate * 300, rel=0.05)
    assert opened[-1] > 290


def test_the_period_does_not_grow_with_the_number_of_windows():
    _, _, opened = watch(1_000, 4_000)
    late = [after - before for before, after in zip(opened[-20:], opened[-19:], strict=False)]
    assert max(late) < 2 * 1.25 + 1.0 + 0.3  # the period and its jitter, the longest window, a wait and the switches


def test_launches_of_a_program_that_comes_late_stand_for_its_own_time_and_not_for_the_agents():
    program = Program(10_000)
    program.targets = 0
    windows = LaunchWindows(program, 0.01, program, MeterProvider().get_meter("test"))
    for _ in range(600):
        assert not windows.due()
        program.wait(min(windows.wait_s(), 0.2))
    program.targets, began, total = 1, program.now_ns, 0.0
    while program.now_ns - began < 20e9:
        if windows.due():
            before = int(program.recorded)
            weight = windows.record(program.wait)
            total += (int(program.recorded) - before) * weight
        else:
            program.wait(min(windows.wait_s(), 0.2))
    assert total == pytest.approx(10_000 * 20, rel=0.2)
