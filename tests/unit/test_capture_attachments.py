"""CUPTI counts correlation ids anew in each attachment; a program launches before, between and after its regions."""

import pytest

from pasta_otel.testing.fake_cupti import DETACHING, run_with

# A GPU kernel lasts as many ns as the id of the region it was launched in, 7 outside all regions.
JOINING = (
    """
import random, threading, time
from collections import Counter
from pasta_otel.gpu.mapping import Joiner, Regions
fake.fake_wall_clock(1)
"""
    + DETACHING
    + """
regions = Regions(_cupti, time.time_ns); regions.recording = True
joiner, OUTSIDE = Joiner(regions), 7
def launch_in(number, count=1):
    for _ in range(count): fake.fake_launch(GEMM, number, 1)
def while_running(action):
    thread = threading.Thread(target=action); thread.start()
    while thread.is_alive(): launch_in(OUTSIDE)
def join():
    joined = joiner.join(capture.drain(), capture.edges())
    owner = np.array([region.span_id for region in joined.regions] + [OUTSIDE], np.uint64)[joined.region]
    lasted = joined.work["end"] - joined.work["start"]
    assert (owner == lasted).all(), (owner[owner != lasted][:10], lasted[owner != lasted][:10])
    return Counter(owner.tolist())
"""
)


def test_launches_outside_regions_are_never_given_to_a_region_of_the_window_before(fake_cupti):
    run_with(
        fake_cupti,
        JOINING
        + """
total = Counter()
for window in range(20):
    while_running(capture.open)
    launch_in(OUTSIDE, window)
    for region in (100 + window, 200 + window):
        regions.enter(1, region); launch_in(region, 40); regions.leave(region)
        launch_in(OUTSIDE, 3)
    while_running(capture.close)
    total.update(join())
assert capture.stats()["detached"] == 20 == fake.fake_finalized()
assert all(total[first + window] == 40 for first in (100, 200) for window in range(20)), total
assert total[OUTSIDE] >= sum(range(20)) + 20 * 6
""",
    )


def test_records_that_come_with_a_late_detachment_stay_apart_from_the_next_window(fake_cupti):
    run_with(
        fake_cupti,
        JOINING
        + """
fake.fake_slow_buffers(1)
capture.open()
regions.enter(1, 100); launch_in(100, 5); regions.leave(100)
launch_in(OUTSIDE, 10)
capture.close()  # no CUDA call comes: it stays attached, and CUPTI keeps its buffer
assert capture.attached and not join()
threading.Timer(0.02, launch_in, (OUTSIDE,)).start()
assert capture.detach()  # in that call
capture.open()
launch_in(OUTSIDE, 5)
regions.enter(1, 200); launch_in(200, 10); regions.leave(200)
while_running(capture.close)
assert not capture.attached
found = join()
assert found[100] == 5 and found[200] == 10 and found[OUTSIDE] >= 15, found
""",
    )


def test_work_that_completes_after_its_window_is_joined_while_cupti_stays_attached(fake_cupti):
    run_with(
        fake_cupti,
        JOINING
        + """
capture.graphs_in_use = True
for window in range(5):
    fake.fake_slow_buffers(1)
    capture.open()
    launch_in(OUTSIDE, 3)
    regions.enter(1, 100 + window); launch_in(100 + window, 5); regions.leave(100 + window)
    capture.close()
    assert not join()
    fake.fake_slow_buffers(0)
    capture.flush()
    found = join()
    assert found == {100 + window: 5, OUTSIDE: 3}, found
assert fake.fake_finalized() == 0
""",
    )


@pytest.mark.parametrize("slow", [0, 1])
def test_threads_that_launch_in_and_outside_of_regions_over_many_attachments_are_told_apart(fake_cupti, slow):
    run_with(
        fake_cupti,
        f"slow = {slow}\n"
        + JOINING
        + """
fake.fake_slow_buffers(slow)
stop = threading.Event()
def program(seed):
    rng, number = random.Random(seed), seed * 1_000_000
    while not stop.is_set():
        number += 1
        launch_in(OUTSIDE, rng.randrange(3))
        regions.enter(1, number); launch_in(number, rng.randrange(4)); regions.leave(number)
threads = [threading.Thread(target=program, args=(1 + seed,), daemon=True) for seed in range(3)]
for thread in threads: thread.start()
rng, total = random.Random(0), Counter()
for _ in range(8 if slow else 100):
    assert capture.open(T3_WINDOW); time.sleep(rng.random() * 0.005); capture.close()
    total.update(join())
    regions.turn()
stop.set()
for thread in threads: thread.join()
assert len(total) > 100 and total[OUTSIDE] > 100, len(total)
assert capture.stats()["detached"] >= (8 if slow else 90)
""",
    )
