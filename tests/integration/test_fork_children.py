"""Children of a program lose nothing, however they were made: all their spans and module rows arrive, each once."""

from __future__ import annotations

import collections
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.otlp_receiver import HttpReceiver

PROGRAM = Path(__file__).with_name("fork_program.py")
EACH = {"request": 2, "Linear": 2}


def run(*words: str, **environ: str) -> tuple[list, str]:
    with HttpReceiver() as receiver:
        nowhere = {"OTEL_METRICS_EXPORTER": "none", "OTEL_BSP_SCHEDULE_DELAY": "60000", "PASTA_GPU_CAPTURE": "false"}
        endpoint = receiver.endpoint.removesuffix("/v1/traces")
        done = subprocess.run(
            [sys.executable, str(PROGRAM), *words],
            capture_output=True, text=True, timeout=120, check=False, cwd=PROGRAM.parents[2],
            env={**os.environ, **nowhere, "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, **environ},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return receiver.spans(), done.stdout


def by_process(spans: list) -> list[dict[str, int]]:
    found: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for resource, span in spans:
        found[resource["process.pid"]][span.name] += 1
    return [dict(names) for names in found.values()]


@pytest.mark.parametrize("how", ["process-fork", "process-forkserver", "process-spawn", "executor-fork", "late-fork"])
def test_children_of_multiprocessing_lose_nothing(how: str):
    spans, _ = run(how)
    if how == "late-fork":  # only the two children are instrumented
        assert by_process(spans) == [EACH, EACH]
        return
    if how == "executor-fork":  # one of the two workers may do both tasks
        total = sum((collections.Counter(names) for names in by_process(spans)), collections.Counter())
        assert total == {name: 3 * count for name, count in EACH.items()}
        return
    assert by_process(spans) == [EACH] * 3


@pytest.mark.parametrize("own", [(), ("own",)])
@pytest.mark.parametrize("how", ["bare-force_flush", "bare-shutdown"])
def test_a_forked_child_that_flushes_its_provider_sends_module_spans_too(how: str, own: tuple[str, ...]):
    spans, _ = run(how, *own)
    names = collections.Counter(span.name for _, span in spans)
    assert names == {name: 3 * count for name, count in EACH.items()}


def test_each_process_says_one_instance_id_in_all_its_spans():
    spans, _ = run("process-fork")
    ids = {(resource["process.pid"], resource["service.instance.id"]) for resource, _ in spans}
    assert len(ids) == len({pid for pid, _ in ids}) == len({instance for _, instance in ids}) == 3


@pytest.mark.parametrize("chosen", ["none", "zipkin"])
def test_no_exporter_sends_nothing(chosen: str):
    assert run("process-fork", OTEL_TRACES_EXPORTER=chosen) == ([], "")


def test_the_console_exporter_writes_spans_and_sends_nothing():
    spans, out = run("bare-force_flush", OTEL_TRACES_EXPORTER="console")
    assert spans == []
    assert out.count('"name": "request"') == 6


def test_several_exporters_are_used_together():
    spans, out = run("bare-force_flush", OTEL_TRACES_EXPORTER="otlp, console")
    assert len(spans) == 12
    assert out.count('"name": "request"') == 6


TAKES_THE_HOLE = """
import ctypes, mmap, os
from pasta_otel.publish import publication

taken = []
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
FIXED_NOREPLACE = 0x100000


def take():  # as the stack of a thread that an SDK's fork handler starts
    address = publication._current._context._address
    found = libc.mmap(address, 16384, mmap.PROT_READ | mmap.PROT_WRITE,
                      mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | FIXED_NOREPLACE, -1, 0)
    assert found == address, "the mapping of the parent is not gone"
    ctypes.memset(found, 7, 16384)
    taken.append(found)


os.register_at_fork(after_in_child=take)
publication.publish_context({"service.name": "a"})
pid = os.fork()
if pid == 0:
    assert ctypes.string_at(taken[0], 16384) == bytes([7]) * 16384
    publication.withdraw_context()
    os._exit(0)
raise SystemExit(abs(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
"""


def test_a_child_leaves_memory_alone_that_lies_where_its_parents_context_was():
    done = subprocess.run(
        [sys.executable, "-c", TAKES_THE_HOLE], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
