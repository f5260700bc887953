"""Where a process stands among cgroups: version 1, version 2, both, or none."""

from __future__ import annotations

import pytest

from pasta_otel.demo.cgroup import CpuCgroup, Quota, find


def machine(tmp_path, cgroup: str, mounts: str, controllers: str = ""):
    proc = tmp_path / "proc"
    (proc / "7").mkdir(parents=True)
    (proc / "self").mkdir()
    (proc / "7" / "cgroup").write_text(cgroup)
    (proc / "self" / "mounts").write_text(mounts.format(root=tmp_path))
    if controllers:
        (tmp_path / "unified").mkdir()
        (tmp_path / "unified" / "cgroup.controllers").write_text(controllers)
    return proc


V1 = "cgroup {root}/cpu cgroup rw,relatime,cpu,cpuacct 0 0\n"
V2 = "cgroup2 {root}/unified cgroup2 rw,relatime 0 0\n"


def test_version_1_is_found_by_its_controller(tmp_path):
    proc = machine(tmp_path, "8:memory:/m\n2:cpu,cpuacct:/pod/a\n0::/\n", V1 + V2)
    assert find(7, proc) == CpuCgroup(1, tmp_path / "cpu" / "pod" / "a", tmp_path / "cpu")


def test_version_2_is_found_when_it_holds_the_cpu_controller(tmp_path):
    proc = machine(tmp_path, "0::/user.slice\n", V2, "cpuset cpu io memory\n")
    assert find(7, proc) == CpuCgroup(2, tmp_path / "unified" / "user.slice", tmp_path / "unified")


def test_a_version_2_hierarchy_without_cpu_is_not_used(tmp_path):
    assert find(7, machine(tmp_path, "0::/x\n", V2, "memory pids\n")) is None


def test_cpuset_is_not_cpu(tmp_path):
    assert find(7, machine(tmp_path, "3:cpuset:/\n", "cgroup {root}/cpuset cgroup rw,cpuset 0 0\n")) is None


def test_a_hierarchy_that_cannot_be_written_is_refused_and_left_as_it_was(tmp_path):
    home = tmp_path / "cpu"
    home.mkdir()  # an ordinary folder: groups made in it have no files to write to
    quota = Quota(7, 0.05, CpuCgroup(1, home, home))
    with pytest.raises(OSError, match="cfs"):
        quota.apply()
    assert list(home.iterdir()) == []


def test_a_quota_is_never_below_what_the_kernel_takes(tmp_path):
    assert Quota(7, 0.000001, CpuCgroup(1, tmp_path, tmp_path)).detail == "1000 us of CPU every 100000 us"
