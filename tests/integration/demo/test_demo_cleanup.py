"""However the demo ends, nothing of it is left: no CPU quota, no busy process, no service."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pasta_otel.demo import cgroup
from pasta_otel.demo.throttle import Hogs
from tests.integration.demo.demo_runs import DEMO
from tests.support import wait_for

pytestmark = pytest.mark.alone
BUSY = "import time\nwhile True: time.sleep(0.001)"
CHILD = """
import sys, pathlib, signal
from pasta_otel.demo import processes
method, victim, folder = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
command = processes.python("pasta_otel.demo.throttle", "--pid", victim, "--cores", "0.2", "--method", method)
child = processes.start("throttle", command, folder / "throttle.log", {})
print(child.wait_ready()["method"], child.pid, flush=True)
signal.pause()
"""


@pytest.fixture
def victim():
    process = subprocess.Popen([sys.executable, "-c", BUSY])
    yield process
    process.kill()
    process.wait()


def throttled(method: str, victim: subprocess.Popen, folder: Path) -> tuple[subprocess.Popen, int]:
    """Start a parent whose helper squeezes the victim, and return it with the helper's pid."""
    command = [sys.executable, "-c", CHILD, method, str(victim.pid), str(folder)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    line = parent.stdout.readline().split()
    if not line:
        pytest.skip(f"no {method} here: {parent.communicate()[1][-300:]}")
    return parent, int(line[1])


def ended(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    return True


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_cgroup_quota_is_taken_back_when_the_demo_is_killed(victim, tmp_path, number):
    home = cgroup.find(victim.pid)
    parent, helper = throttled("cgroup", victim, tmp_path)
    group = cgroup.find(victim.pid).path
    assert group.name == f"{cgroup.PREFIX}{victim.pid}"
    parent.send_signal(number)
    parent.communicate()
    wait_for(lambda: ended(helper))
    assert cgroup.find(victim.pid) == home
    assert not group.exists()
    assert victim.poll() is None


def test_hogs_end_and_the_victim_gets_its_cpus_back_when_the_demo_is_killed(victim, tmp_path):
    cpus = os.sched_getaffinity(victim.pid)
    parent, helper = throttled("hog", victim, tmp_path)
    hogs = [int(pid) for pid in Path(f"/proc/{helper}/task/{helper}/children").read_text().split()]
    assert len(hogs) == 4
    assert len(os.sched_getaffinity(victim.pid)) == 1
    parent.kill()
    parent.communicate()
    wait_for(lambda: ended(helper) and all(ended(hog) for hog in hogs))
    assert os.sched_getaffinity(victim.pid) == cpus


def test_hogs_make_their_victim_wait_for_the_cpu():
    spin = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    hogs = Hogs(spin.pid, cores=0.2)
    try:
        hogs.apply()
        ran, waited = _schedstat(spin.pid)
        time.sleep(1.0)
        ran, waited = (after - before for after, before in zip(_schedstat(spin.pid), (ran, waited), strict=True))
        assert waited > ran, "five equal processes on one CPU: each waits four times as long as it runs"
    finally:
        hogs.revert()
        spin.kill()
        spin.wait()


def test_hogs_are_added_until_the_victim_runs_no_more_than_it_should_and_all_end(victim, tmp_path):
    seconds, stat = [0.0], tmp_path / str(victim.pid) / "task" / "1" / "schedstat"
    stat.parent.mkdir(parents=True)

    def looks(ran_seconds):
        seconds[0] += 2.0
        stat.write_text(f"{int(ran_seconds * 1e9)} 0 1\n")
        hogs.tend()
        return len(hogs._children)

    stat.write_text("5000000000 0 1\n")
    hogs = Hogs(victim.pid, cores=0.3, proc=tmp_path, now=lambda: seconds[0])  # shares: 1 / (hogs + 1) each
    try:
        hogs.apply()
        children = set(hogs._children)
        assert len(children) == 2
        assert [looks(5.5), looks(6.1), looks(7.0), looks(8.2)] == [2, 2, 4, 8], "0.25, 0.3, 0.45, 0.6 of a CPU"
        assert [looks(8.6), looks(9.2)] == [8, 8]
        assert [looks(20.0), looks(40.0), looks(60.0), looks(80.0), looks(100.0)] == [16, 32, 64, 128, 128]
        children |= set(hogs._children)
    finally:
        hogs.revert()
    assert all(ended(child) for child in children)


def test_a_victim_that_a_single_hog_leaves_half_a_cpu_is_squeezed_to_what_was_asked():
    spin = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    hogs = Hogs(spin.pid, cores=0.1)
    hogs._count = 1
    try:
        hogs.apply()
        for _ in range(20):
            time.sleep(0.5)
            hogs.tend()
            before = _schedstat(spin.pid)[0]
            time.sleep(0.5)
            if _schedstat(spin.pid)[0] - before < 0.15 * 0.5e9:
                break
        else:
            pytest.fail(f"{len(hogs._children)} hogs leave it more than 0.15 CPUs")
    finally:
        hogs.revert()
        spin.kill()
        spin.wait()


def test_a_group_left_behind_is_swept_by_the_next_demo(victim):
    home = cgroup.find(victim.pid)
    left = home.path / f"{cgroup.PREFIX}1"
    try:
        left.mkdir()
    except OSError as error:
        pytest.skip(f"cgroups are not writable here: {error}")
    cgroup.sweep(home)
    assert not left.exists()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_no_process_and_no_quota_is_left_when_a_running_demo_ends_early(tmp_path, number, code):
    with (tmp_path / "stderr").open("w") as log:
        demo = subprocess.Popen([*DEMO, "--fault", "cpu-throttle", "--out", str(tmp_path / "out")], stderr=log)
    try:
        wait_for(lambda: "  fault " in (tmp_path / "stderr").read_text(), timeout_s=90)
        children = [int(pid) for pid in Path(f"/proc/{demo.pid}/task/{demo.pid}/children").read_text().split()]
        assert len(children) >= 6
        demo.send_signal(number)
        assert demo.wait(60) == code
    finally:
        demo.kill()
        demo.wait()
    wait_for(lambda: all(ended(pid) for pid in children), timeout_s=30)
    home = cgroup.find(os.getpid())
    assert home is None or not [group for pid in children for group in home.path.glob(f"{cgroup.PREFIX}{pid}")]


def _schedstat(pid: int) -> tuple[int, int]:
    ran, waited, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    return int(ran), int(waited)
