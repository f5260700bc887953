"""cgroup v1, v2 and hybrid mounts as fake trees, and a real quota where cgroups can be written."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pasta_otel.clock import SystemClock
from pasta_otel.ebpf.hostfiles import HostSampler, find_cgroup, read_cpu_stat, read_memory_events
from pasta_otel.ebpf.hostfiles.cgroup import parse_membership, parse_mounts
from pasta_otel.semconv import CGROUP_PERIODS, CGROUP_THROTTLED_PERIODS, CGROUP_THROTTLED_TIME

V1_MOUNTS = "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
V2_MOUNTS = "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
HYBRID_MOUNTS = (
    V1_MOUNTS
    + "40 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n"
    + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
)
V1_STAT = "nr_periods 20\nnr_throttled 19\nthrottled_time 1500000000\n"
V2_STAT = "usage_usec 7\nnr_periods 20\nnr_throttled 19\nthrottled_usec 1500000\nnr_bursts 0\nburst_usec 0\n"


class Tree:
    """A fake /proc and cgroup root."""

    def __init__(self, root: Path, mountinfo: str, membership: str) -> None:
        self.proc, self.cgroup = root / "proc", root / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "self" / "mountinfo").write_text(mountinfo)
        (self.proc / "7").mkdir()
        (self.proc / "7" / "cgroup").write_text(membership)

    def write(self, folder: str, **files: str) -> Path:
        path = self.cgroup / folder
        path.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (path / name.replace("__", ".")).write_text(text)
        return path

    def stat(self):
        found = find_cgroup(self.proc, self.cgroup, 7)
        return found and read_cpu_stat(found)


def numbers(stat) -> tuple[int, int, int]:
    return stat.periods, stat.throttled_periods, stat.throttled_ns


def test_version_1_gives_throttled_time_in_nanoseconds(tmp_path: Path):
    tree = Tree(tmp_path, V1_MOUNTS, "4:cpu,cpuacct:/app\n0::/\n")
    tree.write("cpu,cpuacct/app", cpu__stat=V1_STAT, cpu__cfs_quota_us="20000\n")
    assert numbers(tree.stat()) == (20, 19, 1_500_000_000)


def test_version_2_gives_throttled_time_in_microseconds(tmp_path: Path):
    tree = Tree(tmp_path, V2_MOUNTS, "0::/app\n")
    tree.write("app", cpu__stat=V2_STAT, cpu__max="20000 100000\n")
    assert numbers(tree.stat()) == (20, 19, 1_500_000_000)


def test_a_hybrid_mount_uses_the_version_that_holds_the_controller(tmp_path: Path):
    tree = Tree(tmp_path, HYBRID_MOUNTS, "9:name=systemd:/s\n1:cpu,cpuacct:/app\n0::/u\n")
    tree.write("cpu,cpuacct/app", cpu__stat=V1_STAT)
    tree.write("unified/u", cpu__stat="usage_usec 1\n")
    assert numbers(tree.stat()) == (20, 19, 1_500_000_000)


def test_a_mount_that_shows_only_the_containers_own_cgroup_is_seen_through(tmp_path: Path):
    mounts = "50 40 0:29 /docker/abc /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu\n"
    tree = Tree(tmp_path, mounts, "1:cpu:/docker/abc/worker\n")
    tree.write("cpu/worker", cpu__stat=V1_STAT)
    assert numbers(tree.stat()) == (20, 19, 1_500_000_000)


@pytest.mark.parametrize("membership", ["1:cpu:/docker/other\n", "1:cpu:/../other\n", "", "0::/\n"])
def test_a_cgroup_that_cannot_be_seen_from_here_is_absent(tmp_path: Path, membership: str):
    tree = Tree(tmp_path, "50 40 0:29 /docker/abc /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu\n", membership)
    tree.write("cpu", cpu__stat=V1_STAT)
    assert tree.stat() is None


def test_the_pods_quota_counts_for_a_container_without_one(tmp_path: Path):
    tree = Tree(tmp_path, V2_MOUNTS, "0::/pod/container\n")
    tree.write("pod", cpu__stat=V2_STAT, cpu__max="50000 100000\n")
    tree.write(
        "pod/container",
        cpu__stat="usage_usec 1\nnr_periods 0\nnr_throttled 0\nthrottled_usec 0\n",
        cpu__max="max 100000\n",
    )
    assert numbers(tree.stat()) == (20, 19, 1_500_000_000)


def test_a_cgroup_without_bandwidth_counters_gives_none_and_not_zero(tmp_path: Path):
    tree = Tree(tmp_path, V2_MOUNTS, "0::/\n")
    tree.write(".", cpu__stat="usage_usec 1\nuser_usec 1\nsystem_usec 0\n")
    assert tree.stat() is None


def test_a_process_without_cgroup_file_gives_none(tmp_path: Path):
    tree = Tree(tmp_path, V2_MOUNTS, "0::/\n")
    assert find_cgroup(tree.proc, tree.cgroup, 8) is None


def test_a_move_to_another_cgroup_continues_the_counters(tmp_path: Path):
    tree = Tree(tmp_path, V2_MOUNTS, "0::/a\n")
    (tree.proc / "7" / "stat").write_text(f"7 (x) S {' '.join(['0'] * 18)} 100 0\n")
    tree.write("a", cpu__stat=V2_STAT, cpu__max="20000 100000\n")
    tree.write("b", cpu__stat="nr_periods 1000\nnr_throttled 900\nthrottled_usec 5000000\n", cpu__max="20000 100000\n")
    sampler = HostSampler(tree.proc, tree.cgroup, SystemClock())
    first = {s.metric: s.value for s in sampler.sample({7: "x"})}
    (tree.proc / "7" / "cgroup").write_text("0::/b\n")
    moved = {s.metric: s.value for s in sampler.sample({7: "x"})}
    tree.write("b", cpu__stat="nr_periods 1010\nnr_throttled 905\nthrottled_usec 5500000\n")
    later = {s.metric: s.value for s in sampler.sample({7: "x"})}
    assert first == moved == {CGROUP_PERIODS: 20, CGROUP_THROTTLED_PERIODS: 19, CGROUP_THROTTLED_TIME: 1.5}
    assert later == {CGROUP_PERIODS: 30, CGROUP_THROTTLED_PERIODS: 24, CGROUP_THROTTLED_TIME: pytest.approx(2.0)}


def test_memory_events_of_both_versions(tmp_path: Path):
    one = Tree(tmp_path / "1", "1 1 0:1 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n", "2:memory:/m\n")
    one.write("memory/m", memory__oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 3\n", memory__failcnt="5\n")
    two = Tree(tmp_path / "2", V2_MOUNTS, "0::/m\n")
    two.write("m", memory__events="low 0\nhigh 2\nmax 5\noom 1\noom_kill 3\n")
    found = [find_cgroup(tree.proc, tree.cgroup, 7, "memory") for tree in (one, two)]
    assert [read_memory_events(cgroup) for cgroup in found if cgroup] == [
        {"oom_kill": 3, "max": 5},
        {"low": 0, "high": 2, "max": 5, "oom": 1, "oom_kill": 3},
    ]


def test_escaped_mount_points_and_deleted_cgroups_are_understood():
    mounts = parse_mounts("1 1 0:1 / /mnt/my\\040cgroup rw - cgroup cgroup rw,cpu\nnonsense\n")
    assert [mount.point for mount in mounts] == ["/mnt/my cgroup"]
    assert parse_membership("1:cpu:/gone (deleted)\n", "cpu") == ("/gone", 1)
    assert parse_membership("1:cpuset:/x\n", "cpu") is None


def writable_cpu_cgroup() -> Path | None:
    found = find_cgroup(Path("/proc"), Path("/sys/fs/cgroup"), os.getpid())
    quota = "cpu.cfs_quota_us" if found and found.version == 1 else "cpu.max"
    if found is None or os.geteuid() != 0 or not os.access(found.path, os.W_OK):
        return None
    probe = found.top / f"pasta-probe-{os.getpid()}"
    try:
        probe.mkdir()
        usable = (probe / quota).exists()
        probe.rmdir()
    except OSError:
        return None
    return found.top if usable else None


def test_a_real_quota_shows_as_throttled_periods_of_the_process():
    top = writable_cpu_cgroup()
    if top is None:
        pytest.skip("needs root and a writable cgroup with the cpu controller")
    group = top / f"pasta-test-{os.getpid()}"
    group.mkdir()
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        sampler = HostSampler("/proc", "/sys/fs/cgroup", SystemClock())
        sampler.sample({process.pid: "hog"})
        one = (group / "cpu.cfs_quota_us").exists()
        (group / ("cpu.cfs_quota_us" if one else "cpu.max")).write_text("10000" if one else "10000 100000")
        (group / "cgroup.procs").write_text(str(process.pid))
        deadline, values = time.monotonic() + 20, dict[str, float]()
        while values.get(CGROUP_THROTTLED_PERIODS, 0) < 5 and time.monotonic() < deadline:
            time.sleep(0.2)
            values = {s.metric: s.value for s in sampler.sample({process.pid: "hog"})}
        assert values[CGROUP_THROTTLED_PERIODS] >= 5
        assert values[CGROUP_PERIODS] >= values[CGROUP_THROTTLED_PERIODS]
        assert values[CGROUP_THROTTLED_TIME] > 0.1
    finally:
        process.kill()
        process.wait()
        for _ in range(100):
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.05)
