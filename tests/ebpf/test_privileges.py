"""What an unprivileged user with two capabilities can do, and what is said about the rest."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.ebpf.scenario import ROOT, App
from tests.ebpf.test_agent import RunningAgent, strip_scope
from tests.support import wait_for


def as_nobody(*capabilities: str) -> tuple[str, ...]:
    """Return the command prefix that runs as uid 65534 with just these capabilities."""
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is missing (util-linux)")
    kept = ",".join(["-all", *(f"+{name}" for name in capabilities)])
    return (
        "setpriv", "--pdeathsig", "KILL", "--reuid", "65534", "--regid", "65534", "--clear-groups",
        "--inh-caps", kept, "--ambient-caps", kept, "--bounding-set", kept,
    )  # fmt: skip


@pytest.fixture
def readable(standin, objects, tmp_path_factory):
    """Make the library, the objects and the interpreter reachable for that user, or skip."""
    top = tmp_path_factory.getbasetemp().parent
    if "PYTEST_XDIST_WORKER" in os.environ:  # whose folder is in that of the whole run
        top = top.parent
    for path in (standin, objects):
        for parent in (path, *path.parents):
            if parent.is_relative_to(top):
                parent.chmod(0o755)
    for file in objects.iterdir():
        file.chmod(0o644)
    probe = [*as_nobody(), sys.executable, "-c", "import pasta_otel, click"]
    done = subprocess.run(
        probe, check=False, capture_output=True, text=True, cwd="/", env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    if done.returncode:
        pytest.skip(f"uid 65534 cannot run this interpreter: {done.stderr.strip()[-200:]}")
    return standin


def reasons(attached: dict) -> dict[str, tuple[str, int]]:
    return {
        f"{item.get('probe', '')} {item.get('target', '')}".strip(): (item["reason"], item["errno"])
        for item in attached["refused"]
    }


def run_as(objects, capabilities: tuple[str, ...], loader: str = "core"):
    arguments = ("--port", "0", "--interval", "0.2", "--budget", "1", "--loader", loader)
    return RunningAgent(*arguments, objects=objects, prefix=as_nobody(*capabilities))


def test_bpf_and_perfmon_are_enough_for_uprobes_and_the_scheduler(make_loader, readable, objects):
    make_loader("core")
    prefix = as_nobody()  # the observed program runs as the same user, so that its map can be read
    with App(readable, "threads", prefix=prefix) as app, run_as(objects, ("bpf", "perfmon")) as agent:
        attached = {tuple(item) for item in agent.attached["attached"]}
        assert {("sched", "sched:sched_switch"), ("sched", "sched:sched_wakeup")} <= attached
        page = wait_for(lambda: (text := agent.get()) and str(readable) in text and text)
        assert "pasta_probe_attached_ratio{" in page
        app.run()
        wait_for(lambda: "gpu_cuda_kernel_launch_calls_total{" in agent.get())
        wait_for(lambda: "off_cpu.sleeping" in agent.get())


@pytest.mark.parametrize("capabilities", [(), ("bpf",), ("perfmon",)])
def test_with_less_the_agent_says_so_and_goes_on_with_files(make_loader, readable, objects, capabilities):
    make_loader("core")
    with run_as(objects, capabilities, "auto") as agent:
        assert agent.attached["loader"] == "files"
        refused = {item["target"]: item for item in agent.attached["refused"]}
        assert refused["core"]["reason"] == "not_privileged"
        assert refused["core"]["errno"] in {1, 13}
        health = wait_for(lambda: (said := json.loads(agent.get("/healthz")))["refused"] > 2 and said)
        assert (health["loader"], health["reasons"]) == ("files", ["no_ptrace", "not_privileged"])
        rows = strip_scope(agent.get())
        (unreadable,) = (row for row in rows if row.startswith('pasta_agent_processes{state="unreadable"'))
        assert float(unreadable.rsplit(" ", 1)[1]) > 0
        wait_for(lambda: "pasta_host_listen_overflows" in agent.get())


def test_a_tracepoint_in_tracefs_is_refused_by_name_while_the_rest_is_attached(make_loader, readable, objects):
    make_loader("core")
    with run_as(objects, ("bpf", "perfmon")) as agent:
        said = {name: why for name, why in reasons(agent.attached).items() if not name.startswith("cuda")}
        assert said.keys() == {"critical oom:mark_victim"}
        reason, errno = said["critical oom:mark_victim"]
        assert reason == "tracefs_missing"
        assert errno in {2, 13}
