"""A user's own programs: whatever they send, lose or lack is said, and none of it stops the agent."""

import ctypes
import json
import time
from pathlib import Path

import pytest

from pasta_otel.ebpf.programs import READ_EVERY_S, UserProgram
from pasta_otel.ebpf.user_spans import user_columns
from pasta_otel.ebpf.wall_clock import WallClock
from pasta_otel.errors import InputError
from tests.ebpf.test_agent import RunningAgent, strip_scope
from tests.otlp_receiver import HttpReceiver, attributes
from tests.support import wait_for

GETPPID = ctypes.CDLL(None).getppid


@pytest.fixture
def start(make_loader, objects):
    """Return a function that starts an agent with a program of that text, and nothing else."""
    make_loader("bcc")

    def run(*programs: Path, endpoint: str = "", **options) -> RunningAgent:
        probes = [word for path in programs for word in ("--probe", str(path))]
        flags = ("--loader", "files", "--port", "0", "--interval", "0.2")
        return RunningAgent(*flags, *probes, endpoint=endpoint, objects=objects, **options)

    return run


def written(folder: Path, name: str, text: str, yaml: str = "") -> Path:
    path = folder / f"{name}.c"
    path.write_text(text)
    if yaml:
        path.with_suffix(".yaml").write_text(yaml)
    return path


def counts(agent: RunningAgent) -> dict[tuple[str, str], float]:
    """Return the agent's count of users' events by program and outcome."""
    rows = [row for row in strip_scope(agent.get()) if row.startswith("pasta_user_events_total{")]
    found = {}
    for row in rows:
        labels = dict(pair.split("=") for pair in row.partition("{")[2].partition("}")[0].replace('"', "").split(","))
        found[labels["program"], labels["outcome"]] = float(row.rsplit(" ", 1)[1])
    return found


ODD = """
struct ev { u64 start_ns; u64 end_ns; u32 place; };
BPF_RINGBUF_OUTPUT(odd, 8);
BPF_PERF_OUTPUT(oddp);
TRACEPOINT_PROBE(syscalls, sys_enter_getppid)
{
    struct ev e = {};
    e.end_ns = ~0ULL;
    oddp.perf_submit(args, &e, sizeof(e));
    e.start_ns = ~0ULL;
    e.end_ns = 1;
    odd.ringbuf_output(&e, sizeof(e), 0);
    e.start_ns = bpf_ktime_get_ns();
    e.end_ns = e.start_ns - 5000000000ULL;
    e.place = 7;
    odd.ringbuf_output(&e, sizeof(e), 0);
    return 0;
}
"""
TEXT_TIME = """
struct ev { char ts[16]; u32 n; };
BPF_PERF_OUTPUT(o);
TRACEPOINT_PROBE(syscalls, sys_enter_getppid)
{ struct ev e = {}; e.ts[0] = 'x'; o.perf_submit(args, &e, sizeof(e)); return 0; }
"""


@pytest.mark.case("E01")
def test_events_with_impossible_times_are_counted_and_the_others_go_on(start, tmp_path):
    odd, text = written(tmp_path, "odd", ODD), written(tmp_path, "text", TEXT_TIME)
    with HttpReceiver() as receiver, start(odd, text, endpoint=receiver.endpoint) as agent:
        GETPPID()
        wait_for(lambda: {("odd", "invalid"), ("odd", "ok"), ("text", "invalid")} <= counts(agent).keys())
        spans = wait_for(lambda: [span for _, span in receiver.spans() if span.name == "odd.odd"])
        assert attributes(spans[0].attributes)["pasta.user.place"] == 7
        assert abs(spans[0].start_time_unix_nano - time.time_ns()) < 60e9  # wall time, not time since boot
        assert spans[0].end_time_unix_nano >= spans[0].start_time_unix_nano
        assert json.loads(agent.get("/healthz"))["status"] == "ok"
        told = agent.stop()
        assert told["spans"]["ok"] == len(receiver.spans())
        assert {span.name for _, span in receiver.spans()} == {"odd.odd"}


FLOOD = """
struct ev { u64 time_ns; u64 n; };
BPF_RINGBUF_OUTPUT(r, 1);
TRACEPOINT_PROBE(syscalls, sys_enter_getppid)
{ struct ev e = {}; e.time_ns = bpf_ktime_get_ns(); r.ringbuf_output(&e, sizeof(e), 0); return 0; }
"""


def test_a_ring_that_was_found_full_is_counted_since_the_kernel_says_nothing_of_what_it_lost(make_loader, tmp_path):
    make_loader("bcc")
    program = UserProgram(written(tmp_path, "loss", FLOOD))
    try:
        for _ in range(1000):  # a page holds 4096 / 24 of them
            GETPPID()
        program.start()
        program.stop()
        events = program.poll(time.monotonic_ns)
        assert 100 < len(events) < 1000
        assert program.counts["r", "full"] == 1
    finally:
        program.close()


def test_what_comes_steadily_is_read_before_the_ring_is_full(make_loader, tmp_path):
    make_loader("bcc")
    program = UserProgram(written(tmp_path, "steady", FLOOD))
    try:
        program.start()
        for _ in range(30):  # more than one ring holds
            for _ in range(20):
                GETPPID()
            time.sleep(3 * READ_EVERY_S)
        program.stop()
        assert len(program.poll(time.monotonic_ns)) >= 600
        assert not program.counts["r", "full"]
    finally:
        program.close()


def test_events_until_the_agents_end_are_sent(start, tmp_path):
    with HttpReceiver() as receiver, start(written(tmp_path, "last", FLOOD), endpoint=receiver.endpoint) as agent:
        for _ in range(50):
            GETPPID()
        assert agent.stop()["spans"]["ok"] >= 50
        assert len(receiver.spans()) >= 50


def test_ids_that_are_no_ids_make_no_link():
    from pasta_otel.ebpf.programs import UserEvent
    from tests.ebpf.test_records import Frozen

    rows = [{"trace_id": "ab" * 16, "span_id": "cd" * 8}, {"trace_id": "zz" * 16, "span_id": 1234567812345678}]
    rows += [{"trace_id": " " * 32, "span_id": "12 34 56 78 90 a"}]
    (columns,) = user_columns(
        [UserEvent("p", "t", row) for row in rows], WallClock(Frozen(0, 0)), 5, iter(range(1, 99)).__next__
    )
    assert [bytes(row).hex() for row in columns.links.trace_id] == ["ab" * 16, "00" * 16, "00" * 16]
    assert [bytes(row).hex() for row in columns.links.span_id] == ["cd" * 8, "00" * 8, "00" * 8]


REFUSED = {
    "compile_failed": ("int oops(", ""),
    "tracepoint_missing": ("TRACEPOINT_PROBE(nosuch, event) { return 0; }", ""),
    "verifier_or_version": (
        "TRACEPOINT_PROBE(sched, sched_process_exec) { char b[8]; return bpf_probe_read_kernel(b, 1 << 20, (void *)8); }",
        "",
    ),
    "symbol_not_found": (
        "int f(struct pt_regs *ctx) { return 0; }",
        "programs: [{program: f, uprobe: /bin/true, symbol: nosuch}]",
    ),
    "input_invalid": ("int f(void *ctx) { return 0; }", "programs: [{program: f, kprobe: foo}]"),
}


def test_a_program_that_is_refused_is_named_with_its_true_reason_in_health_and_metrics(start, tmp_path):
    paths = {reason: written(tmp_path, reason, *texts) for reason, texts in REFUSED.items()}
    good = written(tmp_path, "good", FLOOD)
    with start(*paths.values(), good) as agent:
        told = {Path(name).stem: text.partition(":")[0] for name, text in agent.ready["refused_programs"].items()}
        assert told == {reason: reason for reason in REFUSED}
        health = json.loads(agent.get("/healthz"))
        assert (health["refused"], set(health["reasons"])) == (len(REFUSED), set(REFUSED))
        rows = [row for row in strip_scope(agent.get()) if row.startswith("pasta_probe_attached")]
        assert any(str(good) in row and row.endswith(" 1") for row in rows)
        for reason, path in paths.items():
            assert any(str(path) in row and f'reason="{reason}"' in row and row.endswith(" 0") for row in rows)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("programs: [{program: f, kprobe: foo}]", "programs[0].kprobe"),
        ("programs: [{program: f}]", "programs[0].uprobe"),
        ("programs: [{program: f, uprobe: /bin/true}]", "programs[0].symbol"),
        ("programs: [{program: 5, tracepoint: a:b}]", "programs[0].program"),
        ("programs: [{tracepoint: a:b}]", "programs[0].program"),
        ("programs: [{program: f, tracepoint: a:b, uprobe: x}]", "programs[0]"),
        ("programs: [{program: f, uprobe: x, symbol: y, return: often}]", "programs[0].return"),
        ("programs: [5]", "programs[0]"),
        ("programs: {}", "programs"),
        ("[]", "programs"),
        ("a: [", None),
    ],
)
def test_a_yaml_that_cannot_be_used_is_refused_with_its_place(tmp_path, text, place):
    path = written(tmp_path, "x", "int f(void *ctx) { return 0; }", text)
    with pytest.raises(InputError) as refused:
        UserProgram(path, module=object())
    assert refused.value.field == place
    assert refused.value.file == str(path.with_suffix(".yaml"))


def test_when_nobody_takes_spans_the_last_line_says_so(start, tmp_path):
    with start(
        written(tmp_path, "lost", FLOOD),
        endpoint="http://127.0.0.1:9/v1/traces",
        environ={"OTEL_EXPORTER_OTLP_TIMEOUT": "1"},
    ) as agent:
        for _ in range(50):
            GETPPID()
        wait_for(lambda: counts(agent).get(("lost", "ok"), 0) >= 50)
        told = agent.stop()
    assert told["spans"]["received"] >= 50
    assert told["spans"]["ok"] == 0
    assert sum(told["spans"]["dropped"].values()) == told["spans"]["received"]
