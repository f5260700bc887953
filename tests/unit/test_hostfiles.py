"""Readers of /proc files: handed cases, fake trees, and the running kernel."""

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pasta_otel.clock import SystemClock
from pasta_otel.ebpf.hostfiles import (
    HostSampler,
    parse_netstat,
    parse_pressure,
    read_netstat,
    read_pressure,
    read_schedstat,
)
from pasta_otel.ebpf.hostfiles.schedstat import parse_schedstat, read_threads, start_time_ticks
from pasta_otel.ebpf.kallsyms import find_symbol
from pasta_otel.ebpf.start_reason import HELP, lockdown_reason, read_lockdown, start_reason
from pasta_otel.errors import InputError
from pasta_otel.semconv import CPU_TIME, RUN_DELAY

CASES = Path(__file__).parents[1] / "fixtures" / "cases"
PROC = Path("/proc")


def expected(case: str):
    return json.loads((CASES / case / "expected.json").read_text())


def fake_netstat(root: Path, text: str) -> Path:
    (root / "7" / "net").mkdir(parents=True)
    (root / "7" / "net" / "netstat").write_text(text)
    return root


@pytest.mark.case("E07")
@pytest.mark.parametrize("kernel", ["old", "new"])
def test_listen_overflows_are_found_by_name_whatever_the_columns(tmp_path: Path, kernel: str):
    root = fake_netstat(tmp_path, (CASES / "E07" / f"netstat_{kernel}.txt").read_text())
    netstat = read_netstat(root, 7)
    assert netstat is not None
    assert [netstat.listen_overflows, netstat.listen_drops] == expected("E07")[kernel]


@pytest.mark.case("E07")
def test_a_header_that_does_not_fit_its_values_gives_an_error_and_no_number(tmp_path: Path):
    root = fake_netstat(tmp_path, (CASES / "E07" / "netstat_mismatch.txt").read_text())
    with pytest.raises(InputError, match="TcpExt") as caught:
        read_netstat(root, 7)
    assert caught.value.kind == "field_count_mismatch"
    assert expected("E07")["mismatch"] == "error"


@pytest.mark.case("E07")
def test_a_kernel_that_does_not_count_overflows_gives_none_and_not_zero(tmp_path: Path):
    netstat = read_netstat(fake_netstat(tmp_path, (CASES / "E07" / "netstat_missing.txt").read_text()), 7)
    assert netstat is not None
    assert netstat.listen_overflows is expected("E07")["missing"] is None
    assert netstat.listen_drops is None


def test_this_machines_netstat_names_its_namespace():
    netstat = read_netstat(PROC, os.getpid())
    assert netstat is not None
    assert netstat.namespace.startswith("net:[")
    assert netstat.listen_overflows is not None


def test_a_value_that_is_no_number_is_refused():
    with pytest.raises(InputError, match="not a number"):
        parse_netstat("TcpExt: A\nTcpExt: x\n")


@given(st.dictionaries(st.from_regex(r"[A-Za-z][A-Za-z0-9]{0,20}", fullmatch=True), st.integers(-(2**63), 2**64)))
def test_what_a_kernel_writes_is_read_back_by_name(values: dict[str, int]):
    text = f"TcpExt: {' '.join(values)}\nTcpExt: {' '.join(map(str, values.values()))}\n"
    assert parse_netstat(text) == {"TcpExt": values}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("attaching cuda/call_return to /a/libcuda.so.1: Invalid argument", "attach_refused"),
        (
            "bpf: Failed to load program: Permission denied\n0: (b7) r0 = 0\nprocessed 1 insns (limit 1)",
            "verifier_or_version",
        ),
        (
            "bpf: Failed to load program: Invalid argument\nunknown func bpf_x#999\nprocessed 1 insns",
            "lockdown_or_helper_denied",
        ),
        ("bpf: Failed to load program: Operation not permitted", "not_privileged"),
        ("open(/sys/kernel/tracing/events/a/b/id): No such file or directory", "tracepoint_missing"),
        ("open(/sys/kernel/debug/tracing/events/a/b/id): Permission denied", "tracefs_missing"),
        ("/virtual/main.c:1:1: error: expected identifier\n3 errors generated.", "compile_failed"),
        ("libbcc.so.0: cannot open shared object file", "bcc_missing"),
    ],
)
def test_what_kernels_and_compilers_write_names_the_cause_and_not_what_follows_from_it(text, reason):
    assert start_reason(text) == reason
    assert HELP[reason]


@pytest.mark.case("E03")
def test_every_start_failure_gets_its_reason():
    errors = json.loads((CASES / "E03" / "errors.json").read_text())
    reasons = [start_reason(error["text"]) for error in errors]
    assert reasons == expected("E03")["map"]
    assert all(HELP[reason] for reason in reasons)
    assert start_reason("something else") == "unknown"


@pytest.mark.case("E03")
def test_only_confidentiality_lockdown_forbids_the_attempt(tmp_path: Path):
    texts = [(CASES / "E03" / f"lockdown_{name}.txt").read_text() for name in ("none", "integrity", "confidentiality")]
    assert [lockdown_reason(text) or "ok" for text in texts] == expected("E03")["lockdown"]
    assert lockdown_reason(read_lockdown(tmp_path)) is None


@pytest.mark.case("E05")
@pytest.mark.parametrize("number", ["1", "2", "3"])
def test_the_complete_copy_of_a_kernel_function_is_chosen(number: str):
    lines = (CASES / "E05" / f"kallsyms_{number}.txt").read_text().splitlines()
    assert find_symbol(lines, "finish_task_switch") == expected("E05")[number]


def test_schedstat_of_another_form_is_absent():
    assert parse_schedstat("") is None
    assert parse_schedstat("12") is None
    assert parse_schedstat("a b c") is None
    assert parse_schedstat("5 6 7\n") == (5, 6)


def burn(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        hashlib.sha256(b"x" * 100_000).digest()


def test_cpu_time_counts_all_threads_and_not_only_the_main_one():
    thread = threading.Thread(target=burn, args=(0.3,))
    thread.start()
    time.sleep(0.25)
    whole = read_schedstat(PROC, os.getpid())
    main = parse_schedstat((PROC / str(os.getpid()) / "schedstat").read_text())
    worker = read_threads(PROC, os.getpid())[thread.native_id or 0]
    thread.join()
    assert whole is not None
    assert main is not None
    assert worker.cpu_time_ns > 0
    assert whole.cpu_time_ns >= main.cpu_time_ns + worker.cpu_time_ns * 0.5


def test_the_sampler_keeps_the_time_of_threads_that_ended():
    sampler, me = HostSampler(PROC, "/sys/fs/cgroup", SystemClock()), os.getpid()
    thread = threading.Thread(target=burn, args=(0.2,))
    thread.start()
    time.sleep(0.1)
    during = {s.metric: s.value for s in sampler.sample({me: "tests"})}
    thread.join()
    after = {s.metric: s.value for s in sampler.sample({me: "tests"})}
    assert after[CPU_TIME] >= during[CPU_TIME] > 0
    assert after[RUN_DELAY] >= during[RUN_DELAY]


def test_the_time_of_threads_that_came_and_went_between_two_readings_counts():
    code = f"import threading, time\n{BURN}\nprint(time.process_time(), flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        used = float(program.stdout.readline())
        sampler = HostSampler(PROC, "/sys/fs/cgroup", SystemClock())
        found = {s.metric: s.value for s in sampler.sample({program.pid: "burns"})}[CPU_TIME]
        program.communicate(b"\n")
    assert used >= 0.4
    assert found >= used - 0.05


BURN = """def burn():
    begin = time.thread_time()
    while time.thread_time() - begin < 0.2:
        pass

for _ in range(2):
    thread = threading.Thread(target=burn)
    thread.start()
    thread.join()
"""


def test_cpu_time_never_falls_whichever_file_tells_more(tmp_path: Path):
    sampler = HostSampler(tmp_path, tmp_path / "cgroup", SystemClock())
    shown = []
    for ticks, thread_ns in ((50, 400_000_000), (50, 900_000_000), (80, 900_000_000), (200, 900_000_000)):
        fake_process(tmp_path, 5, 100, {5: f"{thread_ns} 0 1"})
        fields = ["0"] * 18
        fields[10], fields[11] = str(ticks // 2), str(ticks - ticks // 2)
        (tmp_path / "5" / "stat").write_text(f"5 (a) S {' '.join(fields)} 100 0 0\n")
        shown.append({s.metric: s.value for s in sampler.sample({5: "a"})}[CPU_TIME])
    second = os.sysconf("SC_CLK_TCK")
    assert shown == pytest.approx([max(50 / second, 0.4), 0.9, 0.9, 200 / second])


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity")
def test_a_hog_pinned_to_the_same_cpu_shows_as_run_delay():
    cpu = min(os.sched_getaffinity(0))
    code = f"import os\nos.sched_setaffinity(0, {{{cpu}}})\nprint(flush=True)\nwhile True: pass"
    hogs = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for hog in hogs:
            assert hog.stdout is not None
            hog.stdout.readline()
        sampler = HostSampler(PROC, "/sys/fs/cgroup", SystemClock())
        before = {s.metric: s.value for s in sampler.sample({hogs[0].pid: "victim"})}
        deadline, grown = time.monotonic() + 20, 0.0
        while grown < 0.1 and time.monotonic() < deadline:
            time.sleep(0.2)
            after = {s.metric: s.value for s in sampler.sample({hogs[0].pid: "victim"})}
            grown = after[RUN_DELAY] - before[RUN_DELAY]
        share = grown / (grown + after[CPU_TIME] - before[CPU_TIME])
    finally:
        for hog in hogs:
            hog.kill()
            hog.communicate()
    assert grown >= 0.1
    assert share > 0.2


def fake_process(root: Path, pid: int, started: int, threads: dict[int, str]) -> None:
    (root / str(pid)).mkdir(parents=True, exist_ok=True)
    (root / str(pid) / "stat").write_text(f"{pid} (a (b) c) S {' '.join(['0'] * 18)} {started} 0 0\n")
    for tid, text in threads.items():
        (root / str(pid) / "task" / str(tid)).mkdir(parents=True, exist_ok=True)
        (root / str(pid) / "task" / str(tid) / "schedstat").write_text(text)


def test_a_reused_pid_starts_anew_and_a_vanished_one_is_skipped(tmp_path: Path):
    sampler = HostSampler(tmp_path, tmp_path / "cgroup", SystemClock())
    fake_process(tmp_path, 5, 100, {5: "9000000000 1000000000 3"})
    assert {s.metric: s.value for s in sampler.sample({5: "a", 6: "gone"})} == {CPU_TIME: 9.0, RUN_DELAY: 1.0}
    fake_process(tmp_path, 5, 200, {5: "1000000000 0 1"})
    assert {s.metric: s.value for s in sampler.sample({5: "b"})} == {CPU_TIME: 1.0, RUN_DELAY: 0.0}
    assert start_time_ticks(tmp_path, 5) == 200


def test_a_reused_thread_id_adds_to_what_its_predecessor_used(tmp_path: Path):
    sampler = HostSampler(tmp_path, tmp_path / "cgroup", SystemClock())
    fake_process(tmp_path, 5, 100, {5: "1000000000 0 1", 6: "4000000000 0 1"})
    sampler.sample({5: "a"})
    fake_process(tmp_path, 5, 100, {5: "1000000000 0 1", 6: "500000000 0 1"})
    assert {s.metric: s.value for s in sampler.sample({5: "a"})}[CPU_TIME] == pytest.approx(5.5)


def test_a_kernel_without_schedstat_gives_no_reading(tmp_path: Path):
    fake_process(tmp_path, 5, 100, {})
    assert HostSampler(tmp_path, tmp_path / "cgroup", SystemClock()).sample({5: "a"}) == []
    assert read_schedstat(tmp_path, 5) is None


def test_pressure_totals_are_read_and_absence_is_none(tmp_path: Path):
    text = "some avg10=3.16 avg60=1.36 avg300=0.38 total=4146305\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=7\n"
    assert parse_pressure(text) == (4146305, 7)
    assert parse_pressure("some avg10=0.0 total=1\n") == (1, None)
    assert parse_pressure("") is None
    assert read_pressure(tmp_path, "cpu") is None
    (tmp_path / "memory.pressure").write_text(text)
    assert read_pressure(tmp_path, "memory") == (4146305, 7)
