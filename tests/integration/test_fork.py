"""Case D01: real forks, a real receiver; 30 spans, three instances, nothing twice, nobody hangs."""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.otlp_receiver import Answer, GrpcReceiver, HttpReceiver
from tests.support import case

SCENARIO = Path(__file__).with_name("fork_scenario.py")


def run_scenario(kind, protocol, mode, script=()):
    with (HttpReceiver if protocol == "http/protobuf" else GrpcReceiver)(script) as receiver:
        done = subprocess.run(
            [sys.executable, str(SCENARIO), kind, protocol, receiver.endpoint, mode],
            capture_output=True, text=True, timeout=60, check=False,
            env=os.environ | {"OTEL_BSP_MAX_QUEUE_SIZE": "50000", "OTEL_BSP_SCHEDULE_DELAY": "200"},
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), receiver.spans(), done.stderr


@pytest.mark.case("D01")
@pytest.mark.parametrize("mode", ["quiet", "busy", "locked"])
@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
@pytest.mark.parametrize("kind", ["rows", "sdk"])
def test_forked_children_export_their_own_spans_and_only_those(kind, protocol, mode):
    check(*run_scenario(kind, protocol, mode))


@pytest.mark.case("D01")
def test_a_fork_while_the_worker_reads_an_answer_leaves_the_child_free():
    check(*run_scenario("rows", "http/protobuf", "inflight", [Answer(body={}, slow_body_s=1.5)]))


def check(report, everything, errors):
    expected = case("D01", "expected.json")
    spans = [(resource, span) for resource, span in everything if not span.name.startswith("busy-")]
    assert report["states"] == [0, 0], errors
    assert report["stopped"], errors
    assert len(spans) == expected["spans"], errors
    parent, *children = report["pids"]
    assert collections.Counter(span.name for _, span in spans) == {
        str(parent): 10,
        **{str(pid): 10 for pid in children},
    }
    assert len({span.span_id for _, span in everything}) == len(everything) == expected["spans"] + report["busy"]
    assert all(str(resource["process.pid"]) == span.name.removeprefix("busy-") for resource, span in everything)
    instances = {(resource["process.pid"], resource["service.instance.id"]) for resource, _ in everything}
    assert len(instances) == len({instance for _, instance in instances}) == expected["resources"]
