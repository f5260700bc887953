"""Events of the host itself, made for real: lost packets, full queues, memory kills, pages read from disk, migrations."""

import contextlib
import json
import mmap
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from pasta_otel import semconv
from pasta_otel.clock import SystemClock
from pasta_otel.ebpf.hostfiles import find_cgroup, read_memory_events
from pasta_otel.ebpf.hostmetrics import HostFiles
from pasta_otel.ebpf.loaders.btf import drop_reasons
from pasta_otel.ebpf.probes import load_probes
from pasta_otel.ebpf.totals import HostTotals
from tests.ebpf.scenario import App, assert_accounts, gather
from tests.support import wait_for

OOM = 4
PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


def only(*names: str):
    return [probe for probe in load_probes() if probe.name in names]


def counted(observer, harvest, name: str) -> int:
    return sum(item.events for item in harvest.aggregates if observer.apis[item.api].name == name)


@pytest.fixture
def in_network_namespace():
    """Return a function that runs Python in a network of its own, whose loopback is up; returns what it prints."""

    def run(code: str) -> dict:
        up = 'import json, socket, subprocess, time\nsubprocess.run(["ip", "link", "set", "lo", "up"], check=True)\n'
        command = ["unshare", "--net", sys.executable, "-c", up + code]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if "unshare failed" in done.stderr:
            pytest.skip(done.stderr.strip())
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    if shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("ip or unshare is missing (iproute2, util-linux)")
    return run


CUT_LINK = """
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
peer, _ = server.accept()
client.sendall(b"x")
peer.recv(1)
subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
client.sendall(b"y" * 1000)
time.sleep(0.4)
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
received = len(peer.recv(2000))
info = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 200)
print(json.dumps({"received": received, "sent_again": int.from_bytes(info[100:104], "little")}))
"""


def sent_again_by_others() -> int:
    """Return how many segments this network namespace has sent again, other programs' included."""
    names, values = (
        line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line.startswith("Tcp:")
    )
    return int(values[names.index("RetransSegs")])


@pytest.mark.parametrize("loader", ["core", "bcc"])
def test_segments_that_are_sent_again_after_a_cut_of_the_link_are_counted(observe, in_network_namespace, loader):
    observer = observe(loader, probes=only("sock"))
    others = sent_again_by_others()
    observer.start()
    told = in_network_namespace(CUT_LINK)
    harvest = observer.harvest()
    others = sent_again_by_others() - others
    assert told["received"] == 1000
    assert told["sent_again"] >= 1
    assert 1 <= counted(observer, harvest, "tcp_retransmit") - others <= told["sent_again"]
    assert_accounts(observer)


FULL_QUEUE = """

def refused(receiver, send):
    receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    for _ in range(200):
        send(bytes([8]) + bytes(7) + b"z" * 500)  # an echo request, to those who look
    receiver.setblocking(False)
    received = 0
    try:
        while receiver.recv(1000):
            received += 1
    except BlockingIOError:
        return 200 - received

with open("/proc/sys/net/ipv4/ping_group_range", "w") as file:
    file.write("0 0")
ping = socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP)
datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
datagrams.bind(("127.0.0.1", 0))
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
print(json.dumps({
    "ping": refused(ping, lambda text: ping.sendto(text, ("127.0.0.1", 0))),
    "udp": refused(datagrams, lambda text: sender.sendto(text, datagrams.getsockname())),
}))
"""


@pytest.mark.parametrize("loader", ["core", "bcc"])
def test_packets_that_a_full_receive_queue_refuses_are_counted_one_by_one(observe, in_network_namespace, loader):
    observer = observe(loader, probes=only("sock"))
    observer.start()
    refused = in_network_namespace(FULL_QUEUE)
    assert refused["ping"] > 0
    assert refused["udp"] > 0
    assert counted(observer, observer.harvest(), "receive_queue_full") == sum(refused.values())


NOBODY = """
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(100):
    sender.sendto(b"z", ("127.0.0.1", 9))
print(json.dumps({"sent": 100}))
"""


def test_dropped_packets_are_counted_under_the_kernels_own_word_for_the_reason(observe, in_network_namespace):
    observer = observe(probes=only("sock"))
    observer.start()
    sent = in_network_namespace(NOBODY)["sent"]
    totals = HostTotals(observer.apis, observer.service_of, SystemClock().unix_nano, drop_reasons())
    totals.add(observer.harvest())
    assert sent <= totals.drops["NO_SOCKET"] < 2 * sent  # others on this machine may drop some, too
    assert not any(reason.isdigit() and int(reason) < 0x10000 for reason in totals.drops)


# ---- memory

EAT = "import sys; sys.stdin.readline(); kept = bytearray(200 << 20); print(len(kept))"


@pytest.fixture
def small_cgroup():
    """Yield a memory cgroup below ours that holds 30 MB, of either version."""
    own = find_cgroup(PROC, CGROUP, os.getpid(), "memory")
    if own is None:
        pytest.skip("the memory controller's cgroup of this process cannot be seen")
    limit = "memory.max" if own.version == 2 else "memory.limit_in_bytes"
    folder = own.path / f"pasta-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(30 << 20))
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no memory limit can be set here: {error}")
    yield replace(own, path=folder)
    wait_for(lambda: not (folder / "cgroup.procs").read_text())
    folder.rmdir()


@pytest.mark.parametrize("loader", ["core", "bcc"])
def test_a_kill_for_memory_is_in_the_critical_ring_and_in_the_cgroups_file(observe, small_cgroup, loader):
    observer = observe(loader, probes=only("critical"))
    observer.start()
    refused = {item.target: item.refusal for item in observer.report() if item.refusal}
    if "oom:mark_victim" in refused:
        pytest.skip(str(refused["oom:mark_victim"]))
    with subprocess.Popen([sys.executable, "-c", EAT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as victim:
        (small_cgroup.path / "cgroup.procs").write_text(str(victim.pid))
        told, _ = victim.communicate(b"\n")
        assert (victim.returncode, told) == (-9, b"")
        kills = [event for event in observer.harvest().critical if event.kind == OOM]
        assert victim.pid in {event.tgid for event in kills}
    assert read_memory_events(small_cgroup)["oom_kill"] == len(kills) == 1


# ---- threads


def events_of(observer, harvest, app: App) -> dict[str, tuple[int, int]]:
    """Return number and time of what happened within the program's one span."""
    (span,) = app.spans
    return {
        observer.apis[item.api].name: (item.events, item.sum_ns)
        for item in harvest.aggregates
        if (item.link, item.trace_id.hex(), item.span_id.hex()) == ("slot", span["trace_id"], span["span_id"])
    }


PAGES = 64


@pytest.mark.parametrize("loader", ["core", "bcc"])
def test_pages_read_from_disk_are_major_faults_and_waits_of_the_span_that_touched_them(
    observe, standin, tmp_path, loader
):
    path = tmp_path / "pages"
    with path.open("wb") as file:
        file.write(os.urandom(PAGES * mmap.PAGESIZE))
        os.fsync(file.fileno())
    with App(standin, "fault", str(path)) as app:
        observer = observe(loader, probes=only("fault", "sched"))
        observer.start()
        found = events_of(observer, gather(observer, app), app)
        if "major_fault" not in found:
            pytest.skip(f"no page of {tmp_path} left the memory: is it a file system in memory?")
        assert found["major_fault"][0] >= PAGES
        waits = "block_io" if loader == "core" else "uninterruptible"  # bcc cannot tell one from the other
        assert found[waits][0] > 0
        assert found[waits][1] > 0


def test_moves_to_another_cpu_are_counted_in_their_span(observe, standin):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one CPU")
    with App(standin, "migrate") as app:
        observer = observe(probes=only("sched"))
        observer.start()
        assert events_of(observer, gather(observer, app), app)["migration"][0] >= 9


BUSY = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); print(flush=True)\nwhile True: pass"


@pytest.mark.parametrize("loader", ["core", "bcc"])
def test_waiting_for_a_cpu_that_another_program_uses_is_run_queue_delay_of_the_span(observe, standin, loader):
    cpu = str(min(os.sched_getaffinity(0)))
    with (
        subprocess.Popen([sys.executable, "-c", BUSY, cpu], stdout=subprocess.PIPE) as other,
        App(standin, "spin", cpu) as app,
    ):
        try:
            other.stdout.readline()
            observer = observe(loader, probes=only("sched"))
            observer.start()
            found = events_of(observer, gather(observer, app), app)
        finally:
            other.kill()
        assert found["preempted"][0] > 0
        assert found["run_queue"][0] >= found["preempted"][0]
        assert found["run_queue"][1] > 50_000_000  # the other one gets as much of the CPU, which is 250 ms


# ---- files


def metric_values(reader: InMemoryMetricReader, name: str) -> dict[tuple[str, ...], float]:
    """Return a metric's values by the values of its labels, in the labels' order."""
    data = reader.get_metrics_data()
    scopes = [scope for resource in data.resource_metrics for scope in resource.scope_metrics] if data else []
    points = [
        point
        for scope in scopes
        for metric in scope.metrics
        if metric.name == name
        for point in metric.data.data_points
    ]
    return {tuple(str(point.attributes[key]) for key in sorted(point.attributes)): point.value for point in points}


@pytest.fixture
def unified_cgroup():
    """Yield a cgroup of the v2 hierarchy, below the topmost."""
    own = find_cgroup(PROC, CGROUP, os.getpid(), "pressure")
    if own is None or not (own.path / "cpu.pressure").exists():
        pytest.skip("no v2 hierarchy with pressure files is mounted")
    folder = own.path / f"pasta-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "cpu.pressure").read_text()
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no cgroup can be made here, or pressure is off (psi=1): {error}")
    yield folder
    wait_for(lambda: not (folder / "cgroup.procs").read_text())
    folder.rmdir()


def test_the_pressure_within_a_services_cgroup_is_told_beside_the_machines(unified_cgroup):
    reader = InMemoryMetricReader()
    files = HostFiles(PROC, CGROUP, SystemClock(), MeterProvider([reader]).get_meter("files"))
    cpu = str(min(os.sched_getaffinity(0)))
    busy = [subprocess.Popen([sys.executable, "-c", BUSY, cpu], stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for program in busy:
            program.stdout.readline()
            (unified_cgroup / "cgroup.procs").write_text(str(program.pid))
        pid = busy[0].pid

        def stalled() -> float:
            files.poll({pid: "busy"})
            return metric_values(reader, semconv.CGROUP_PRESSURE)["some", "busy", str(pid), "cpu"]

        before = stalled()
        wait_for(lambda: stalled() > before)  # two programs, one CPU
        assert metric_values(reader, semconv.PRESSURE_TIME)["some", "cpu"] > 0
        assert ("some", "busy", str(os.getpid()), "cpu") not in metric_values(reader, semconv.CGROUP_PRESSURE)
    finally:
        for program in busy:
            program.kill()
            program.communicate()


def test_a_network_namespace_is_told_once_also_where_the_name_of_process_1s_cannot_be_read(tmp_path):
    for pid in (1, 5):
        (tmp_path / str(pid) / "net").mkdir(parents=True)
        (tmp_path / str(pid) / "ns").mkdir()
    text = "TcpExt: ListenOverflows ListenDrops\nTcpExt: 3 4\n"
    (tmp_path / "1" / "net" / "netstat").write_text(text)
    (tmp_path / "5" / "net" / "netstat").hardlink_to(
        tmp_path / "1" / "net" / "netstat"
    )  # one inode, as in one namespace
    (tmp_path / "5" / "ns" / "net").symlink_to("net:[7]")
    (tmp_path / "6").symlink_to("5")
    reader = InMemoryMetricReader()
    files = HostFiles(tmp_path, CGROUP, SystemClock(), MeterProvider([reader]).get_meter("files"))
    files.poll({5: "a", 6: "b"})
    assert metric_values(reader, semconv.NETSTAT_OVERFLOWS) == {("net:[7]",): 3}
