"""A known rate of GPU kernels, captured one twentieth of the time, for a minute."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from gpu_process import run

pytestmark = pytest.mark.gpu


def test_totals_scaled_from_a_twentieth_of_a_minute_are_right():
    """The program keeps its rate as a server does: what a stall holds up is launched afterwards, perhaps in the window."""
    facts = run(
        """
        import random
        from pasta_otel.gpu.cupti.devices import device_uuid
        from pasta_otel.gpu.cupti.service import GpuCapture
        from pasta_otel.gpu.governor import Governor
        RATE, SECONDS = 2000, 60
        launched, marks = 0, []
        class Counted(GpuCapture):
            def deliver(self, joined, weight, offset):
                marks.append((launched, joined.counts.work, weight))
                super().deliver(joined, weight, offset)
        governor = Governor(1.0, time.monotonic_ns, headroom=1.0, window_ns=500_000_000, min_period_ns=9_500_000_000,
                            random_unit=random.Random(3).random)
        service = Counted(capture_of(), Regions(_cupti, time.time_ns), governor, device_id=device_uuid)
        for _ in range(200): x.add_(y)
        torch.cuda.synchronize()
        service.start()
        began = time.perf_counter()
        while (now := time.perf_counter() - began) < SECONDS:
            while launched < now * RATE: x.add_(y); launched += 1
            time.sleep(0.0005)
        before = marks[-1][0]
        duty = governor.duty
        scaled = sum(sum(point.counts) for point in service.points())
        while_running(service.stop)
        facts.update(launched=before, scaled=scaled, duty=duty, windows=len(marks), marks=marks,
                     failed=service.windows["failed"])
        """
    )
    assert facts["failed"] == 0
    assert 0.03 < facts["duty"] < 0.08
    assert facts["windows"] >= 4
    assert facts["scaled"] == pytest.approx(facts["launched"], rel=0.05)
