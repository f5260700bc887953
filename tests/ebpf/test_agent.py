"""The agent as a process: what it says, sends and serves, and what is left when it is killed."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections import Counter

import pytest

from pasta_otel.ebpf.probes import load_probes
from tests.ebpf.scenario import ROOT, App, base_names, bpf_programs, expected_calls
from tests.otlp_receiver import HttpReceiver, attributes
from tests.support import wait_for

BASE = base_names(load_probes())
LAUNCH = {"--budget": "1", "--port": "0", "--interval": "0.2"}


class RunningAgent:
    def __init__(
        self, *arguments: str, endpoint: str = "", prefix: tuple[str, ...] = (), objects, stderr=None, environ=()
    ) -> None:
        environ = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9",
            **dict(environ),
        }
        if endpoint:
            environ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] = endpoint
        # it ends when the tests do, however they end
        with_us = () if "setpriv" in prefix else ("setpriv", "--pdeathsig", "KILL")
        command = [
            *prefix,
            *with_us,
            sys.executable,
            "-m",
            "pasta_otel",
            "agent",
            "--objects",
            str(objects),
            *arguments,
        ]
        if not endpoint:
            command.append("--no-export")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environ)
        try:
            self.attached = self.next("attached")
            self.ready = self.next("ready")
        except BaseException:  # nobody else would end it
            self.__exit__()
            raise
        self.url = self.ready["metrics"]

    def next(self, event: str) -> dict:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            told = json.loads(line)
            if told["event"] == event:
                return told
        raise AssertionError(f"the agent ended before {event!r}: {self.process.wait()}")

    def get(self, path: str = "/metrics") -> str:
        with urllib.request.urlopen(self.url.replace("/metrics", path), timeout=10) as answer:
            return answer.read().decode()

    def stop(self) -> dict:
        self.process.send_signal(signal.SIGTERM)
        told = self.next("stopped")
        assert self.process.wait(20) == 0
        return told

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture
def start_agent(make_loader, objects):
    """Return a function that starts an agent; skips where eBPF cannot be tried."""
    make_loader("core")

    def start(*arguments: str, **options) -> RunningAgent:
        flags = [word for pair in LAUNCH.items() for word in pair]
        return RunningAgent(*flags, *arguments, objects=objects, **options)

    return start


def linked(receiver: HttpReceiver) -> dict[tuple[str, str], Counter]:
    found: dict[tuple[str, str], Counter] = {}
    for _, span in receiver.spans():
        values = attributes(span.attributes)
        (link,) = span.links
        assert attributes(link.attributes) == {"pasta.link.method": "slot"}
        assert span.trace_id == link.trace_id
        assert not span.parent_span_id
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        key = link.trace_id.hex(), link.span_id.hex()
        found.setdefault(key, Counter())[span.name] += values["pasta.host.events"]
    return found


def test_host_spans_link_to_the_spans_they_happened_in_within_the_same_trace(start_agent, standin):
    with (
        HttpReceiver() as receiver,
        start_agent("--slow-ms", "0.2", endpoint=receiver.endpoint) as agent,
        App(standin, "threads") as app,
    ):
        wait_for(lambda: str(standin) in agent.get())
        app.run()
        told = agent.stop()
        spans = linked(receiver)
        names = set(BASE.values())
        calls = Counter(
            {(*key, name): n for key, by_name in spans.items() for name, n in by_name.items() if name in names}
        )
        aggregated = calls_told(app)
        for key, count in aggregated.items():
            assert calls[key] >= count, key  # slow calls come alone besides their sum
        assert {key[:2] for key in calls} == {key[:2] for key in aggregated}
        assert any("off_cpu.sleeping" in by_name for by_name in spans.values())
        assert told["spans"]["ok"] == len(receiver.spans())


def calls_told(app: App) -> Counter:
    return expected_calls(BASE, app)


def test_metrics_say_what_happened_and_the_accounts_are_exact(start_agent, standin):
    with start_agent() as agent, App(standin, "threads") as app:
        wait_for(lambda: str(standin) in agent.get())
        app.run()
        launches = sum(count for (_, _, name), count in calls_told(app).items() if name == "cuLaunchKernel")
        line = f'gpu_cuda_kernel_launch_calls_total{{pasta_host_service="app-threads"}} {launches}'
        page = wait_for(
            lambda: (text := agent.get()) and any(row.startswith(line) for row in strip_scope(text)) and text
        )
        samples = dict(row.rsplit(" ", 1) for row in strip_scope(page) if not row.startswith("#") and row)
        seen = float(samples['pasta_probe_seen_total{probe="launch"}'])
        outcomes = [
            float(samples[f'pasta_probe_events_total{{outcome="{name}",probe="launch"}}'])
            for name in ("filtered", "submitted", "full", "unpaired")
        ]
        assert seen == sum(outcomes) == launches
        assert any(row.startswith("pasta_host_event_duration_seconds_bucket") for row in samples)
        assert json.loads(agent.get("/healthz"))["status"] == "ok"


def strip_scope(page: str) -> list[str]:
    """Return the page's lines without the scope's labels."""
    import re

    return [re.sub(r'otel_scope_\w+="[^"]*",?', "", line).replace(",}", "}") for line in page.splitlines()]


def test_when_the_agent_is_killed_its_probes_are_gone(start_agent, standin):
    before = bpf_programs()
    with start_agent() as agent, App(standin, "work") as app:
        wait_for(lambda: str(standin) in agent.get())
        assert bpf_programs() - before
        agent.process.send_signal(signal.SIGKILL)
        agent.process.wait()
        wait_for(lambda: not bpf_programs() - before)
        app.run()  # and the application does not mind


def test_without_ebpf_the_agent_works_on_with_files(start_agent, standin):
    with App(standin, "work") as app, start_agent("--loader", "files") as agent:
        assert agent.attached["loader"] == "files"
        page = wait_for(lambda: (text := agent.get()) and "pasta_host_listen_overflows" in text and text)
        assert "pasta_process_run_delay_seconds" in page
        assert json.loads(agent.get("/healthz")) == {"status": "ok", "loader": "files", "refused": 0}
        assert app.process.poll() is None


PROGRAM = """
struct started { u64 time_ns; u32 pid; char comm[16]; u8 trace_id[16]; u8 span_id[8]; };
BPF_RINGBUF_OUTPUT(starts, 8);
TRACEPOINT_PROBE(sched, sched_process_exec)
{
    struct started event = {};
    event.time_ns = bpf_ktime_get_ns();
    event.pid = bpf_get_current_pid_tgid() >> 32;
    bpf_get_current_comm(&event.comm, sizeof(event.comm));
    event.trace_id[0] = 1;
    event.span_id[0] = 2;
    starts.ringbuf_output(&event, sizeof(event), 0);
    return 0;
}
"""


def test_a_users_own_program_is_attached_and_its_events_become_spans(start_agent, make_loader, tmp_path):
    make_loader("bcc")
    own = tmp_path / "own.bpf.c"
    own.write_text(PROGRAM)
    broken = tmp_path / "broken.c"
    broken.write_text("int oops(")
    with HttpReceiver() as receiver:
        options = ("--loader", "files", "--probe", str(own), "--probe", str(broken))
        with start_agent(*options, endpoint=receiver.endpoint) as agent:
            assert list(agent.ready["refused_programs"]) == [str(broken)]
            done = subprocess.Popen(["true"])
            done.wait()
            spans = wait_for(
                lambda: [
                    span for _, span in receiver.spans() if attributes(span.attributes)["pasta.user.pid"] == done.pid
                ]
            )
            assert {(span.name, attributes(span.attributes)["pasta.user.comm"]) for span in spans} == {
                ("own.starts", "true")
            }
            assert spans[0].links[0].trace_id[0] == 1
            assert 'pasta_user_events_total{outcome="ok",program="own"' in "\n".join(strip_scope(agent.get()))
            agent.stop()


class Paced:
    """Clocks that tests move."""

    def __init__(self) -> None:
        self.now_ns = 10**12

    def monotonic_ns(self) -> int:
        return self.now_ns

    def unix_nano(self) -> int:
        return 17 * 10**17 + self.now_ns


@pytest.mark.case("E01")
def test_clocks_are_measured_twice_a_minute_also_where_no_probe_is_harvested():
    from pasta_otel.app.agent import Agent
    from pasta_otel.app.agent_start import AgentOptions, AgentStart

    clock = Paced()
    agent = Agent(AgentStart(AgentOptions(loader="files", exports=False, port=0), None, {}), clock)
    try:
        anchors = agent._exports._wall._anchors
        measured = []
        for _ in range(10):
            agent._exports.mark()
            measured.append(len(anchors))
            clock.now_ns += 15 * 10**9
        assert measured[-1] - measured[0] == 4
    finally:
        agent._exports.stop()
