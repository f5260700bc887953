"""``pasta-otel import``, the command: reports, exit codes, a store file, and rotel as a server that is not ours."""

from __future__ import annotations

import gzip
import json
import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import duckdb
import pytest

from pasta_otel.cli import main
from pasta_otel.gpu.imports.spans import timeline_spans
from pasta_otel.gpu.kineto import read_trace
from tests.otlp_receiver import HttpReceiver, attributes
from tests.support import free_port, wait_for
from tests.telemetry import rotel

FIXTURES = Path(__file__).parents[1] / "fixtures"
SAMPLES, CASES = FIXTURES / "samples", FIXTURES / "cases"
HTA = SAMPLES / "facebookresearch+HolisticTraceAnalysis"
ALEXNET = HTA / "benchmark_result_2869224_1695835535_trace.json.gz"
JAEGER = next((SAMPLES / "jaegertracing+jaeger").rglob("otlp2jaeger-out.json"))
OTLP = SAMPLES / "open-telemetry+opentelemetry-proto" / "examples" / "trace.json"
CRISP = SAMPLES / "uber-research+CRISP" / "test_cases" / "10.json"


def imported(capsys, *arguments) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["import", *map(str, arguments)])
    out, err = capsys.readouterr()
    return stop.value.code, out, err


def report(capsys, *arguments):
    code, out, _ = imported(capsys, *arguments)
    assert code == 0
    return json.loads(out)


# ---- a report


def test_all_ranks_of_a_job_are_analysed_in_one_call(capsys):
    found = report(capsys, HTA / "sampled_rank-1.json.gz", HTA / "sampled_rank-0.json.gz")
    assert [rank["rank"] for rank in found["profile"]["ranks"]] == [0, 1]
    assert "load_imbalance" in {finding["kind"] for finding in found["findings"]}
    assert [rank["events"] for rank in found["import"]["ranks"]] == [4855, 4720]


def test_formats_may_be_mixed_and_request_traces_get_their_critical_path(capsys):
    found = report(capsys, ALEXNET, OTLP, CRISP)
    assert [entry["format"] for entry in found["files"]] == ["kineto", "otlp-json", "jaeger"]
    (longest, crisp) = found["traces"]["traces"]
    assert longest["critical_path"] == [{"name": "my.service: I'm a server span", "own_ns": 1_000_000_000}]
    assert {part["name"]: part["own_ns"] for part in crisp["critical_path"]}["S1: O1"] == 400_000


def test_a_folder_is_all_its_traces(capsys):
    found = report(capsys, CASES / "K06" / "dir")
    assert [rank["rank"] for rank in found["profile"]["ranks"]] == [3, 5]
    assert len(found["import"]["warnings"]) == 2


def test_a_bad_jaeger_span_is_left_out_and_named_unless_strict(tmp_path, capsys):
    document = json.loads(CRISP.read_text())
    document["data"][0]["spans"][1]["duration"] = "long"
    path = tmp_path / "t.json"
    path.write_text(json.dumps(document))
    found = report(capsys, path)
    assert found["left_out"][0]["field"] == "data[0].spans[1].duration"
    assert found["traces"]["spans"] == 3
    code, _, err = imported(capsys, path, "--strict")
    assert code == 2
    assert "data[0].spans[1].duration" in err


def test_a_trace_without_gpu_work_says_so_and_where_the_hosts_time_went(tmp_path, capsys):
    cpu_only = HTA / "rank_not_found.json.gz"
    found = report(capsys, cpu_only)
    assert sum("no GPU work in this trace" in line for line in found["import"]["warnings"]) == 1
    assert [entry["name"] for entry in found["profile"]["ranks"][0]["host"]["ops"]][1] == "aten::copy_"
    _, out, _ = imported(capsys, cpu_only, "--to", "store", "--store", tmp_path / "s.duckdb")
    assert "no GPU work in this trace" in out


def test_low_coverage_is_marked_in_the_report(capsys):
    found = report(capsys, CASES / "K08" / "trace.json")["profile"]["ranks"][0]["coverage"]
    assert found["attribution_incomplete"] is True
    assert found["by_duration"] == pytest.approx(0.6)


# ---- errors


@pytest.mark.case("K06")
@pytest.mark.parametrize(("folder", "words"), [("clash", "rank 1 twice"), ("ambiguous", "distributedInfo.rank")])
def test_ranks_that_are_not_certain_are_one_line_and_exit_2(capsys, folder, words):
    code, out, err = imported(capsys, *sorted((CASES / "K06" / folder).glob("*.json")))
    assert (code, out) == (2, "")
    assert words in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (HTA / "benchmark_simple_add_et.json.gz", "execution trace"),
        (HTA / "memory_timeline.raw.gz", "memory timeline"),
        (CASES / "K12" / "empty.json", "empty file"),
        (Path("no/such/file.json"), "No such file"),
    ],
)
def test_what_is_no_trace_is_refused_by_name_and_exit_2(capsys, file, words):
    code, out, err = imported(capsys, file)
    assert (code, out) == (2, "")
    assert words in err
    assert file.name in err


@pytest.mark.parametrize("options", [(), ("--format", "kineto"), ("--format", "otlp-json"), ("--format", "jaeger")])
@pytest.mark.parametrize("what", ["a pipe", "a device", "standard input", "a socket"])
def test_what_can_be_read_but_once_is_refused_at_once_and_by_name(tmp_path, monkeypatch, capsys, what, options):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo.json")  # without a writer: opening it would wait for one
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket.json")
        name = {"a pipe": "fifo.json", "a device": "/dev/zero", "standard input": "-", "a socket": "socket.json"}[what]
        code, out, err = imported(capsys, name, *options)
    assert (code, out) == (2, "")
    assert err == f"pasta-otel: {name}: {what} cannot be imported; write it to a file first\n"


def test_a_pipe_from_another_program_is_no_empty_file():
    trace = (CASES / "K01" / "trace.json").read_bytes()
    command = [sys.executable, "-m", "pasta_otel", "import", "/dev/stdin"]
    done = subprocess.run(command, input=trace, capture_output=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.decode() == "pasta-otel: /dev/stdin: a pipe cannot be imported; write it to a file first\n"


def test_a_file_on_standard_input_is_a_file():
    command = [sys.executable, "-m", "pasta_otel", "import", "/dev/stdin"]
    with (CASES / "K01" / "trace.json").open("rb") as trace:
        done = subprocess.run(command, stdin=trace, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["import"]["ranks"][0]["events"] == 2


def test_strict_refuses_a_damaged_trace_with_its_line(capsys):
    path = CASES / "K02" / "a_raw_quotes.json"
    code, _, err = imported(capsys, path, "--strict")
    assert code == 2
    assert f"{path}:3:" in err
    assert report(capsys, path)["import"]["ranks"][0]["skipped"] == 1


def test_more_events_than_asked_for_are_refused(capsys):
    code, _, err = imported(capsys, ALEXNET, "--max-events", 100)
    assert code == 2
    assert "more than 100 events" in err


# ---- a store


def stored(path):
    with duckdb.connect(str(path), read_only=True) as connection:
        return connection.execute("SELECT * FROM spans").fetchall(), [c[0] for c in connection.description]


def test_a_store_file_holds_every_span_once_it_is_imported(tmp_path, capsys):
    store = tmp_path / "s.duckdb"
    code, out, err = imported(capsys, ALEXNET, JAEGER, OTLP, "--to", "store", "--store", store)
    assert code == 0, err
    trace = read_trace(ALEXNET).timeline
    expected = 1 + len(trace.ops) + len(trace.calls) + len(trace.work) + 2 + 1
    assert f"{expected - 1} of {expected} spans imported, 1 dropped (duplicate)" in out  # the Jaeger file has one twice
    rows, _ = stored(store)
    assert len(rows) == expected - 1


def test_python_frames_become_spans_only_when_asked_for(tmp_path, capsys):
    path = SAMPLES / "AMD-AGI+TraceLens" / "h100-bert-small.json.gz"
    counts = []
    for arguments in ([], ["--python-frames"]):
        store = tmp_path / f"{len(arguments)}.duckdb"
        _, out, _ = imported(capsys, path, "--to", "store", "--store", store, "--json", *arguments)
        counts.append(json.loads(out)["delivered"]["ok"])
    assert counts[1] - counts[0] == 1385


# ---- spans


def test_importing_twice_gives_the_same_ids_and_none_twice():
    batches = [[*timeline_spans(read_trace(ALEXNET).timeline)] for _ in range(2)]
    ids = [[row.tobytes() for columns in batch for row in columns.span_id] for batch in batches]
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == len(ids[0])


def test_every_parent_is_a_span_of_the_trace_and_surrounds_its_host_children():
    columns = [*timeline_spans(read_trace(ALEXNET).timeline)]
    by_id = {}
    for part in columns:
        times = zip(part.start_time_unix_nano.tolist(), part.end_time_unix_nano.tolist(), strict=True)
        by_id |= {row.tobytes(): time for row, time in zip(part.span_id, times, strict=True)}
    roots = 0
    for part in columns:
        on_gpu = "gpu.cuda.stream.id" in part.attributes
        for row, parent in zip(part.span_id, part.parent_span_id, strict=True):
            if not parent.any():
                roots += 1
                continue
            (start, end), (low, high) = by_id[row.tobytes()], by_id[parent.tobytes()]
            assert start <= end
            assert on_gpu or low <= start <= high
    assert roots == 1


@pytest.mark.case("K04")
def test_an_unfinished_op_becomes_no_span():
    sites = [
        site.name for part in timeline_spans(read_trace(CASES / "K04" / "trace.json").timeline) for site in part.sites
    ]
    assert Counter(sites) == {"pytorch profile": 1, "tiny": 1}


@pytest.mark.case("K01")
def test_nothing_non_finite_leaves(tmp_path, capsys):
    found = report(capsys, CASES / "K01" / "trace.json")
    assert "NaN" not in json.dumps(found)
    for part in timeline_spans(read_trace(CASES / "K01" / "trace.json").timeline):
        assert all(getattr(getattr(values, "dtype", None), "kind", "") != "f" for values in part.attributes.values())


# ---- rotel


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_imported_traces_arrive_at_rotel_and_beyond(tmp_path, monkeypatch, capsys, protocol):
    with HttpReceiver() as upstream:
        endpoint = upstream.endpoint.removesuffix("/v1/traces")
        to_us = ("--exporter", "otlp", "--otlp-exporter-endpoint", endpoint, "--otlp-exporter-protocol", "http")
        with rotel(tmp_path, *to_us) as peer:
            port = peer.grpc_port if protocol == "grpc" else peer.http_port
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
            code, out, err = imported(capsys, ALEXNET, JAEGER, OTLP, "--to", "otlp", "--json", "--service", "alexnet")
            assert code == 0, err
            done = json.loads(out)["delivered"]
            assert done["ok"] == done["spans"]
            wait_for(lambda: len(upstream.spans()) == done["ok"])
        received = upstream.spans()
    services = Counter(resource["service.name"] for resource, _ in received)
    assert services == {"alexnet": done["ok"] - 3, "telemetrygen": 2, "my.service": 1}
    kernels = [attributes(span.attributes) for _, span in received if span.name.startswith("ampere_sgemm")]
    assert kernels
    assert all(kernel["gpu.kernel.class"] == "gemm" and kernel["pasta.link.method"] == "time" for kernel in kernels)


def test_a_server_that_is_not_there_is_said_in_one_line(monkeypatch, capsys):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    code, out, err = imported(capsys, OTLP, "--to", "otlp")
    assert (code, out) == (3, "")
    assert "nothing reached 127.0.0.1" in err


# ---- people


def test_progress_is_shown_on_a_terminal_and_only_there(tmp_path):
    path = tmp_path / "t.json"
    path.write_bytes(gzip.decompress(ALEXNET.read_bytes()))
    command = [sys.executable, "-m", "pasta_otel", "import", str(path)]
    plain = subprocess.run(command, capture_output=True, text=True, check=True)
    assert plain.stderr == ""
    json.loads(plain.stdout)
    leader, follower = os.openpty()
    shown = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=follower, env={**os.environ, "TERM": "xterm"})
    os.close(follower)
    text = b""
    while piece := _read(leader):
        text += piece
    assert shown.wait(30) == 0
    assert b"import" in text
    os.close(leader)


def _read(descriptor) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except OSError:  # the other side is closed
        return b""


# ---- what is nearly a trace, and options that do not fit


def jaeger_file(path: Path, number: str) -> Path:
    span = '{"traceID": "1", "spanID": "2", "operationName": "a", "startTime": 1, "duration": 2, "tags": [%s]}'
    tag = '{"key": "share", "type": "float64", "value": ' + number + "}"
    path.write_text('{"data": [{"traceID": "1", "spans": [' + span.replace("%s", tag) + '], "processes": {}}]}')
    return path


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400"])
@pytest.mark.parametrize("one_a_line", [False, True])
def test_a_number_that_json_does_not_have_costs_only_itself(tmp_path, capsys, number, one_a_line):
    path = jaeger_file(tmp_path / "j.json", number)
    if one_a_line:
        path.write_text(path.read_text() + "\n" + jaeger_file(tmp_path / "k.json", "0.5").read_text() + "\n")
    found = report(capsys, path)
    assert found["traces"]["spans"] == (2 if one_a_line else 1)
    code, _, err = imported(capsys, path, "--strict")
    assert code == 2
    assert "j.json" in err


def test_a_jaeger_answer_without_a_hit_holds_no_spans(tmp_path, capsys):
    (path := tmp_path / "none.json").write_text('{"data": [], "total": 0, "limit": 0, "offset": 0, "errors": null}')
    code, out, err = imported(capsys, path, "--to", "store", "--store", tmp_path / "s.duckdb")
    assert (code, err) == (0, "")
    assert "0 of 0 spans imported" in out


def test_a_file_of_a_folder_that_is_no_trace_does_not_cost_the_others(tmp_path, capsys):
    jaeger_file(tmp_path / "good.json", "0.5")
    (tmp_path / "empty.json").write_text("")
    (tmp_path / "other.json").write_text('{"a": 1}')
    code, out, err = imported(capsys, tmp_path)
    found = json.loads(out)
    assert code == 0
    assert found["traces"]["spans"] == 1
    assert [Path(entry["file"]).name for entry in found["unread"]] == ["empty.json", "other.json"]
    assert "empty file; not imported" in err
    assert imported(capsys, tmp_path, "--strict")[0] == 2
    assert imported(capsys, tmp_path / "empty.json")[0] == 2


def test_a_folder_without_any_trace_is_refused(tmp_path, capsys):
    (tmp_path / "empty.json").write_text("")
    code, _, err = imported(capsys, tmp_path)
    assert code == 2
    assert "no trace in this folder; the first file: empty file" in err


@pytest.mark.parametrize("number", ["-1", "0", "x"])
def test_a_number_of_events_below_one_is_refused_by_the_option(capsys, number):
    code, _, err = imported(capsys, JAEGER, "--max-events", number)
    assert code == 2
    assert "--max-events" in err


def test_the_limits_error_names_its_option(capsys):
    code, _, err = imported(capsys, ALEXNET, "--max-events", "100")
    assert code == 2
    assert "more than 100 events (--max-events)" in err


@pytest.mark.parametrize("to", [(), ("--to", "otlp"), ("--to", "json")])
def test_a_store_that_would_not_be_used_is_refused(capsys, tmp_path, to):
    code, _, err = imported(capsys, JAEGER, "--store", tmp_path / "s.duckdb", *to)
    assert code == 2
    assert "--store FILE needs --to store" in err
