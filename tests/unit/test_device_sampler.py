"""The time limit around a source: fresh values, or none and why."""

from __future__ import annotations

import threading

import pytest

from pasta_otel.gpu.device.model import Device, DeviceReading, Reading, Snapshot, SourceDownError
from pasta_otel.gpu.device.nvml import NvmlSource
from pasta_otel.gpu.device.sampler import DeviceSampler
from pasta_otel.testing.nvml import FakeNvml, full_gpu


class StepClock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 1_000_000_000

    def unix_nano(self) -> int:
        return self.now

    def monotonic_ns(self) -> int:
        return self.now

    def step(self, seconds: float) -> None:
        self.now += int(seconds * 1e9)


class Scripted:
    """A source that says one thing after another."""

    name = "scripted"

    def __init__(self, *answers: object) -> None:
        self.answers, self.reads, self.closed = list(answers), 0, 0

    def read(self) -> Snapshot:
        self.reads += 1
        answer = self.answers.pop(0)
        if isinstance(answer, threading.Event):
            answer.wait()
            answer = good(0.99)  # what a hung call brings at last
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, Snapshot)
        return answer

    def close(self) -> None:
        self.closed += 1


def good(value: float) -> Snapshot:
    return Snapshot("scripted", (DeviceReading(Device("GPU-1"), (Reading("hw.gpu.utilization", value),)),))


def values(snapshot: Snapshot) -> list[float]:
    return [reading.value for device in snapshot.devices for reading in device.readings]


@pytest.fixture
def clock() -> StepClock:
    return StepClock()


def sampler(source: Scripted, clock: StepClock, limit_s: float = 5.0) -> DeviceSampler:
    return DeviceSampler(source, clock=clock, limit_s=limit_s)


def test_one_scrape_asks_once_and_a_later_one_asks_again(clock: StepClock):
    source = Scripted(good(0.1), good(0.2))
    sampled = sampler(source, clock)
    assert [values(sampled.sample()) for _ in range(20)] == [[0.1]] * 20
    clock.step(1)
    assert values(sampled.sample()) == [0.2]
    assert source.reads == 2


def test_a_hung_call_leaves_devices_without_values_and_no_second_call(clock: StepClock):
    release = threading.Event()
    source = Scripted(good(0.5), release, good(0.7))
    sampled = sampler(source, clock, limit_s=0.05)
    assert values(sampled.sample()) == [0.5]
    for _ in range(5):
        clock.step(1)
        hung = sampled.sample()
        assert (hung.down, values(hung)) == ("timeout", [])
        assert [(d.device.id, d.down, d.state) for d in hung.devices] == [("GPU-1", "timeout", None)]
    assert source.reads == 2  # one good, one outstanding
    release.set()
    sampled._call.wait(5)  # its late answer 0.99 must never be seen
    clock.step(1)
    after = sampled.sample()
    assert (after.down, values(after)) == ("", [0.7])


def test_a_scrape_waits_for_a_hung_call_only_once(clock: StepClock):
    release = threading.Event()
    sampled = sampler(Scripted(release), clock, limit_s=0.05)
    sampled.sample()
    waits = []
    sampled._call.wait = lambda seconds: waits.append(seconds) or False  # type: ignore[method-assign]
    clock.step(1)
    assert sampled.sample().down == "timeout"
    assert waits == [0]
    release.set()


def test_a_source_that_is_down_or_broken_is_a_state(clock: StepClock):
    source = Scripted(SourceDownError("no_driver", "not loaded"), RuntimeError("bug"), good(0.3))
    sampled = sampler(source, clock)
    assert (sampled.sample().down, sampled.sample().detail) == ("no_driver", "not loaded")
    clock.step(1)
    assert sampled.sample().down == "internal"
    clock.step(1)
    assert values(sampled.sample()) == [0.3]


def test_close_lets_go_once_and_nothing_is_asked_afterwards(clock: StepClock):
    source = Scripted(good(0.3))
    sampled = sampler(source, clock)
    sampled.sample()
    sampled.close()
    sampled.close()
    assert sampled.sample().down == "closed"
    assert (source.closed, source.reads) == (1, 1)


def test_a_hung_nvml_call_is_outstanding_once_and_the_values_come_back():
    nvml, clock = FakeNvml(full_gpu()), StepClock()
    sampled = DeviceSampler(NvmlSource(nvml, clock=clock), clock=clock, limit_s=0.1)
    assert sampled.sample().down == ""
    nvml.hang, entered = threading.Event(), nvml.entered
    for _ in range(3):
        clock.step(1)
        assert sampled.sample().down == "timeout"
    assert nvml.entered == entered + 1
    release, nvml.hang = nvml.hang, None
    release.set()
    sampled._call.wait(5)
    clock.step(1)
    assert sampled.sample().down == ""
