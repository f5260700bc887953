"""What is missing on a machine is said in one line by doctor, and the agent works on with what is left."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ebpf.scenario import ROOT
from tests.ebpf.test_agent import RunningAgent
from tests.ebpf.test_privileges import as_nobody
from tests.support import wait_for

HEADERS, BTF, TRACEFS = "/lib/modules", "/sys/kernel/btf", "/sys/kernel/tracing"


def without(*folders: str) -> tuple[str, ...]:
    """Return the command prefix under which these folders are empty, for the command and nobody else."""
    hide = "".join(f"mount -t tmpfs none {folder} && " for folder in folders)
    return ("unshare", "--mount", "sh", "-c", f'{hide}exec "$@"', "sh")


def doctor(prefix: tuple[str, ...] = ()) -> dict[str, dict]:
    """Return what doctor says, by capability; each in one line."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [*prefix, sys.executable, "-m", "pasta_otel", "doctor"]
    done = subprocess.run([*command, "--json"], check=False, capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    found = {item["name"]: item for item in json.loads(done.stdout)["capabilities"]}
    assert all("\n" not in f"{item['detail']}{item.get('how', '')}" for item in found.values())
    return found


@pytest.fixture
def start(make_loader, objects):
    """Return a function that starts an agent under a prefix; skips where eBPF cannot be tried."""

    def run(loader: str, prefix: tuple[str, ...], *more: str) -> RunningAgent:
        if loader == "bcc" or more:
            make_loader("bcc")
        make_loader("core")
        flags = ("--port", "0", "--interval", "0.2", "--budget", "1", "--loader", loader)
        return RunningAgent(*flags, *more, objects=objects, prefix=prefix)

    return run


def refused(agent: RunningAgent, library: str = "") -> dict[str, str]:
    """Return what was refused and why; of driver libraries only ours, since other programs here may map some."""
    mine = [item for item in agent.attached["refused"] if item["target"] == library or "cuda" not in item["probe"]]
    return {item["target"] or item["probe"]: item["reason"] for item in mine}


def probes(agent: RunningAgent) -> set[str]:
    return {probe for probe, _ in agent.attached["attached"]}


def assert_works(agent: RunningAgent, metric: str) -> None:
    assert json.loads(agent.get("/healthz"))["status"] == "ok"
    wait_for(lambda: metric in agent.get())


def test_without_type_information_bcc_carries_the_probes(start):
    prefix = without(BTF)
    assert doctor(prefix)["btf"]["state"] == "missing"
    with start("auto", prefix) as agent:
        assert agent.attached["loader"] == "bcc"
        assert refused(agent)["core"] == "btf_missing"
        assert {"critical", "sched", "fault", "sock"} <= probes(agent)
        assert_works(agent, "pasta_host_listen_overflows")


def test_without_headers_bcc_is_refused_and_files_are_left(start):
    prefix = without(HEADERS)
    assert doctor(prefix)["kernel_headers"]["state"] == "missing"
    with start("bcc", prefix) as agent:
        assert (agent.attached["loader"], refused(agent)) == ("files", {"bcc": "kernel_headers_missing"})
        assert_works(agent, "pasta_host_listen_overflows")


def test_without_headers_the_core_loader_lacks_nothing(start):
    with start("auto", without(HEADERS)) as agent:
        assert (agent.attached["loader"], refused(agent)) == ("core", {})


def without_libbpf() -> tuple[str, ...]:
    """Return the command prefix under which libbpf does not load; bcc's own library needs it, too."""
    lines = subprocess.check_output(["ldconfig", "-p"], text=True).splitlines()
    found = [line.split()[-1] for line in lines if "libbpf.so.1 " in line]
    if not found:
        pytest.skip("libbpf is not in the loader's list")
    return ("unshare", "--mount", "sh", "-c", f'mount --bind /dev/null {Path(found[0]).resolve()} && exec "$@"', "sh")


def test_without_libbpf_neither_loader_loads_and_files_are_left(start):
    prefix = without_libbpf()
    lines = doctor(prefix)
    assert lines["libbpf"]["state"] == "missing"
    assert lines["bcc"]["state"] == "missing"
    with start("auto", prefix) as agent:
        assert agent.attached["loader"] == "files"
        assert refused(agent).keys() == {"core", "bcc"}
        assert set(refused(agent).values()) <= {"libbpf_missing", "bcc_missing"}
        assert_works(agent, "pasta_host_listen_overflows")


def test_without_libbpf_a_program_of_ones_own_is_refused_and_the_agent_works_on(start, tmp_path):
    own = tmp_path / "own.c"
    own.write_text("TRACEPOINT_PROBE(sched, sched_process_exec) { return 0; }")
    with start("files", without_libbpf(), "--probe", str(own)) as agent:
        assert agent.ready["refused_programs"][str(own)].startswith(("libbpf_missing", "bcc_missing"))
        assert_works(agent, "pasta_host_listen_overflows")


SAID = {
    "kernel_headers_missing": ('mount -t tmpfs none /lib/modules && mkdir -p "/lib/modules/$(uname -r)/build"', ()),
    "not_privileged": ("true", ("setpriv", "--bounding-set", "-all")),
}


@pytest.mark.case("E03")
@pytest.mark.parametrize("reason", SAID)
def test_what_bcc_only_writes_is_the_reason_and_not_in_the_agents_output(start, tmp_path, reason):
    script, capabilities = SAID[reason]
    own = tmp_path / "own.c"
    own.write_text("TRACEPOINT_PROBE(sched, sched_process_exec) { return 0; }")
    prefix = ("unshare", "--mount", "sh", "-c", f'{script} && exec "$@"', "sh", *capabilities)
    with start("bcc", prefix, "--probe", str(own)) as agent:
        assert refused(agent) == {"bcc": reason}
        assert agent.ready["refused_programs"][str(own)].startswith(reason)
        assert_works(agent, "pasta_host_listen_overflows")


LOCKDOWN = {
    "[none] integrity confidentiality": "core",
    "none [integrity] confidentiality": "core",
    "none integrity [confidentiality]": "files",
}


@pytest.mark.case("E03")
@pytest.mark.parametrize("state", LOCKDOWN)
def test_in_a_kernel_that_is_locked_down_for_confidentiality_nothing_is_tried(start, tmp_path, state):
    own = tmp_path / "own.c"
    own.write_text("TRACEPOINT_PROBE(sched, sched_process_exec) { return 0; }")
    folder = "/sys/kernel/security"
    script = f'mount -t tmpfs none {folder} && echo "{state}" > {folder}/lockdown && exec "$@"'
    with start("auto", ("unshare", "--mount", "sh", "-c", script, "sh"), "--probe", str(own)) as agent:
        assert agent.attached["loader"] == LOCKDOWN[state]
        if LOCKDOWN[state] == "files":
            reason = "kernel_lockdown_confidentiality"
            assert set(refused(agent).values()) == {reason}
            assert agent.ready["refused_programs"][str(own)].startswith(reason)
            assert json.loads(agent.get("/healthz"))["reasons"] == [reason]
            assert f'reason="{reason}"' in agent.get()
        else:
            assert not agent.ready["refused_programs"]
        assert_works(agent, "pasta_host_listen_overflows")


@pytest.mark.case("E05")
def test_a_program_on_a_function_that_the_kernel_does_not_let_be_probed_is_refused_by_name(start, tmp_path):
    own = tmp_path / "own.c"
    own.write_text("int kprobe__nosuch_task_switch(void *ctx) { return 0; }")
    with start("core", (), "--probe", str(own)) as agent:
        assert agent.ready["refused_programs"][str(own)].startswith("symbol_not_traceable")
        assert ["sched", "sched:sched_switch"] in agent.attached["attached"]  # ours takes the tracepoint


def test_a_program_on_a_tracepoint_is_refused_for_want_of_tracefs(start, tmp_path):
    own = tmp_path / "own.c"
    own.write_text("TRACEPOINT_PROBE(sched, sched_process_exec) { return 0; }")
    with start("files", without(TRACEFS, "/sys/kernel/debug"), "--probe", str(own)) as agent:
        assert agent.ready["refused_programs"][str(own)].startswith("tracefs_missing")


def test_in_a_pid_namespace_of_its_own_the_agent_says_that_it_does_not_see_the_others(start):
    with start("core", ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")) as agent:
        wait_for(lambda: "pid_namespace" in json.loads(agent.get("/healthz")).get("reasons", ()))
        assert 'reason="pid_namespace"' in agent.get()


def test_headers_of_another_kernel_are_named_and_bcc_works_all_the_same(start):
    line = doctor()["kernel_headers"]
    if line["state"] == "there":
        pytest.skip("the headers here are the running kernel's")
    if "but Linux" not in line["detail"]:
        pytest.skip(line["detail"])
    assert os.uname().release in line["detail"]
    with start("bcc", ()) as agent:
        assert agent.attached["loader"] == "bcc"
        assert set(refused(agent).values()) == {"loader_cannot"}


def test_without_tracefs_the_core_loader_lacks_the_kill_for_memory_alone(start):
    prefix = without(TRACEFS)
    assert doctor(prefix)["tracefs"]["state"] == "missing"
    with start("core", prefix) as agent:
        assert refused(agent) == {"oom:mark_victim": "tracefs_missing"}
        assert {"critical", "sched", "fault", "sock"} <= probes(agent)
        assert_works(agent, "pasta_host_listen_overflows")


def test_without_tracefs_bcc_has_what_is_no_tracepoint(start):
    with start("bcc", without(TRACEFS)) as agent:
        assert {refused(agent)[name] for name in ("critical", "sched", "sock")} == {"tracefs_missing"}
        assert {probe for probe in probes(agent) if "cuda" not in probe} == {"fault"}
        assert_works(agent, "pasta_host_listen_overflows")


def test_what_a_user_without_capabilities_lacks_is_named():
    line = doctor(as_nobody("bpf"))["ebpf_capabilities"]
    assert line["state"] == "missing"
    assert "CAP_PERFMON" in line["detail"]
    assert "CAP_BPF" not in line["detail"]


def compiled(folder: Path, text: str, *flags: str) -> str:
    source, target = folder / "source.c", folder / flags[-1]
    source.write_text(text)
    subprocess.run(["gcc", "-O1", "-o", target, source, *flags[:-1]], check=True)
    return str(target)


MAP_AND_WAIT = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); print(flush=True); sys.stdin.readline()"


def test_a_driver_library_without_names_is_refused_by_name_and_the_rest_is_attached(start, tmp_path):
    library = compiled(tmp_path, "int anything(void) { return 1; }", "-shared", "-fPIC", "libcuda.so.1")
    command = [sys.executable, "-c", MAP_AND_WAIT, library]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        program.stdout.readline()
        line = doctor()["driver_functions"]
        with start("core", ()) as agent:
            assert refused(agent, library)[library] == "library_stripped"
            assert {"critical", "sched", "fault", "sock"} <= probes(agent)
            page = wait_for(lambda: (text := agent.get()) and "library_stripped" in text and text)
        program.communicate(b"\n")
    assert library in line["detail"]
    assert line["state"] == "missing"
    assert library in page


STATIC_RUNTIME = """
#include <stdio.h>
int cuLaunchKernel(void);
static int cudaLaunchKernel(void) { return cuLaunchKernel(); } /* as in a program that carries its CUDA runtime */
int main(void)
{
    puts("ready");
    fflush(stdout);
    getchar();
    for (int i = 0; i < 250; i++)
        cudaLaunchKernel();
    puts("done");
    fflush(stdout);
    getchar();
    return 0;
}
"""


@pytest.mark.parametrize("loader", ["core", "bcc"])
def test_calls_of_a_statically_linked_runtime_are_seen_at_the_driver(observe, standin, tmp_path, loader):
    program = compiled(tmp_path, STATIC_RUNTIME, str(standin), "-s", "program")
    with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout.readline() == "ready\n"
        observer = observe(loader)
        observer.start()
        running.stdin.write("\n")
        running.stdin.flush()
        assert running.stdout.readline() == "done\n"
        launches = [item for item in observer.harvest().aggregates if item.tgid == running.pid and item.api == 0]
        running.communicate("\n")
    assert [(item.link, item.events) for item in launches] == [("unregistered", 250)]
