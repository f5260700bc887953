"""Where cgroups cannot be written, the demo's ``cpu-throttle`` still takes CPU away, and it is still found."""

from __future__ import annotations

import json
import os
import shlex
import subprocess

import pytest

from tests.integration.demo.demo_runs import DEMO, RUN_SECONDS

pytestmark = pytest.mark.alone
READ_ONLY = "mount --bind /sys/fs/cgroup{0} /sys/fs/cgroup{0} && mount -o remount,bind,ro /sys/fs/cgroup{0}"


@pytest.mark.slow
def test_busy_processes_on_the_models_cpu_are_found_as_contention(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can make cgroups read-only for one process")
    below = "/cpu" if os.path.isdir("/sys/fs/cgroup/cpu") else ""  # noqa: PTH112 - a mount point, not a file of ours
    demo = shlex.join([*DEMO, "--fault", "cpu-throttle", "--out", str(tmp_path), "--json"])
    command = ["unshare", "-m", "sh", "-c", f"{READ_ONLY.format(below)} && exec {demo}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS, check=False)
    assert done.stdout, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert "busy processes" in report["injected"]
    assert report["problems"] == []
    assert (report["causes"][0]["kind"], report["causes"][0]["target"]) == ("cpu_contention", "model")
    assert {action["action"] for action in report["actions"]} == {"notify"}
