"""The doctor on fake machines, and on this one."""

import errno
import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from pasta_otel.cli.doctor import command, lines
from pasta_otel.cli.probes import PROBES, Capability, World, examine, load_minimal_program
from pasta_otel.exporters.otlp.config import OtlpConfig
from pasta_otel.exporters.otlp.transport import Reply
from tests.otlp_receiver import Answer, GrpcReceiver, HttpReceiver, Receiver


def bare(root: Path, **changes: object) -> World:
    """A machine with nothing at all."""
    fields: dict = {
        "proc": root / "proc",
        "sys": root / "sys",
        "cgroup": root / "cgroup",
        "environ": {},
        "machine": "x86_64",
        "library": lambda name: None,
        "version": lambda name: None,
        "packages": (),
        "load_program": lambda machine: errno.EPERM,
        "export": lambda config: Reply("retry", "connection"),
        "bind": lambda port: None,
    }
    return World(**(fields | changes))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def probe(name: str, world: World) -> Capability:
    found = PROBES[name](world)
    assert found.name == name
    return found


def test_a_bare_machine_gets_a_line_for_everything_and_no_crash(tmp_path: Path):
    found = examine(bare(tmp_path))
    assert [c.name for c in found] == list(PROBES)
    assert all(c.how for c in found if c.state == "missing")
    assert {c.name for c in found if c.state == "missing"} >= {"gpu", "cuda_driver", "btf", "tracefs", "cgroup", "psi"}
    assert len(lines(found)) == len(found)


def test_a_probe_that_fails_is_unknown_and_the_others_go_on(tmp_path: Path):
    def broken(name: str) -> str | None:
        raise RuntimeError("strange machine")

    found = {c.name: c for c in examine(bare(tmp_path, version=broken))}
    assert found["torch"].state == "unknown"
    assert "strange machine" in found["torch"].detail
    assert found["python"].state == "there"


@pytest.mark.parametrize(
    ("release", "state"),
    [
        ("6.6.0", "there"),
        ("6.18.44-fc", "there"),
        ("7.0.1", "there"),
        ("6.5.13", "missing"),
        ("5.15.0-1", "missing"),
        ("", "unknown"),
    ],
)
def test_uprobe_multi_needs_linux_6_6(tmp_path: Path, release: str, state: str):
    write(tmp_path / "proc" / "sys" / "kernel" / "osrelease", release + "\n")
    assert probe("uprobe_multi", bare(tmp_path)).state == state


@pytest.mark.parametrize(
    ("mask", "state"),
    [
        (1 << 39 | 1 << 38 | 1 << 19 | 1 << 2, "there"),
        (1 << 21 | 1 << 19 | 1 << 2, "there"),
        (1 << 39, "missing"),
        (0, "missing"),
    ],
)
def test_sys_admin_stands_for_bpf_and_perfmon(tmp_path: Path, mask: int, state: str):
    write(tmp_path / "proc" / "self" / "status", f"Name:\tx\nCapEff:\t{mask:016x}\n")
    assert probe("ebpf_capabilities", bare(tmp_path)).state == state


def test_a_missing_capability_is_named(tmp_path: Path):
    write(tmp_path / "proc" / "self" / "status", f"CapEff:\t{1 << 39 | 1 << 38 | 1 << 2:016x}\n")
    assert probe("ebpf_capabilities", bare(tmp_path)).detail == "lacks CAP_SYS_PTRACE"


def test_lockdown_in_confidentiality_mode_is_told_without_trying(tmp_path: Path):
    write(tmp_path / "sys" / "kernel" / "security" / "lockdown", "none integrity [confidentiality]\n")

    def never(machine: str) -> int:
        raise AssertionError("tried to load")

    assert probe("ebpf_load", bare(tmp_path, load_program=never)).detail == "kernel_lockdown_confidentiality"


def test_a_refused_program_says_which_capabilities_are_needed(tmp_path: Path):
    found = probe("ebpf_load", bare(tmp_path))
    assert found.state == "missing"
    assert found.detail.startswith("not_privileged")
    assert "CAP_BPF" in found.how


def test_an_architecture_without_probes_is_said(tmp_path: Path):
    assert probe("architecture", bare(tmp_path, machine="riscv64")).state == "missing"
    assert load_minimal_program("riscv64") == errno.ENOSYS


def test_tracefs_at_its_old_place_is_found(tmp_path: Path):
    (tmp_path / "sys" / "kernel" / "debug" / "tracing" / "events").mkdir(parents=True)
    assert probe("tracefs", bare(tmp_path)).detail.endswith("debug/tracing")


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is closed to root")
def test_tracefs_that_only_root_may_read_is_missing_and_says_so(tmp_path: Path):
    tracing = tmp_path / "sys" / "kernel" / "tracing"
    (tracing / "events").mkdir(parents=True)
    tracing.chmod(0)
    try:
        found = probe("tracefs", bare(tmp_path))
    finally:
        tracing.chmod(0o700)
    assert (found.state, found.detail) == ("missing", f"{tracing} is closed to this user")


def test_cupti_inside_a_package_is_found(tmp_path: Path):
    write(tmp_path / "site" / "nvidia" / "cu13" / "lib" / "libcupti.so.13", "")
    assert probe("cupti", bare(tmp_path, packages=(tmp_path / "site",))).state == "there"


def test_memory_analysis_names_the_library_and_where_its_patches_come_from(tmp_path: Path):
    library, patch = tmp_path / "libsanitizer-public.so", tmp_path / "memory.fatbin"
    library.touch()
    patch.touch()
    environ = {"PASTA_SANITIZER_LIBRARY": str(library), "PASTA_SANITIZER_PATCH": str(patch)}
    loads = {"library": {str(library): SimpleNamespace(sanitizerSubscribe=1), "libcuda.so.1": SimpleNamespace()}.get}
    found = probe("memory_analysis", bare(tmp_path, environ=environ, **loads))
    assert (found.state, found.detail) == ("there", f"{library}, patches in {patch}")
    found = probe("memory_analysis", bare(tmp_path, environ={**environ, "PASTA_SANITIZER_PATCH": "/nonexistent"}))
    assert (found.state, found.detail) == ("missing", "/nonexistent (PASTA_SANITIZER_PATCH) does not exist")
    toolkit = tmp_path / "toolkit"
    write(toolkit / "bin" / "nvcc", "")
    (toolkit / "bin" / "nvcc").chmod(0o755)
    own = {"PASTA_SANITIZER_LIBRARY": str(library), "CUDA_HOME": str(toolkit), "XDG_CACHE_HOME": str(tmp_path)}
    found = probe("memory_analysis", bare(tmp_path, environ=own, **loads))
    assert found.state == "there"
    assert found.detail.startswith(f"{library}, patches ")


def test_memory_analysis_is_missing_where_another_profiler_has_the_process_or_there_is_no_library(tmp_path: Path):
    found = probe("memory_analysis", bare(tmp_path, environ={"CUDA_INJECTION64_PATH": "/nsys.so"}))
    assert (found.state, found.detail) == ("missing", "CUPTI is active: CUDA_INJECTION64_PATH=/nsys.so")
    found = probe("memory_analysis", bare(tmp_path, environ={"PASTA_SANITIZER_LIBRARY": "/nonexistent.so"}))
    assert found.state == "missing"
    assert "PASTA_SANITIZER_LIBRARY" in found.how


@pytest.mark.parametrize(
    ("loads", "detail"),
    [
        ({"libcuda.so.1": SimpleNamespace()}, "{library} does not load, or is no libsanitizer-public.so"),
        (
            {"{library}": SimpleNamespace(), "libcuda.so.1": 1},
            "{library} does not load, or is no libsanitizer-public.so",
        ),
        ({"{library}": SimpleNamespace(sanitizerSubscribe=1)}, "no NVIDIA driver: libcuda.so.1 does not load"),
    ],
)
def test_memory_analysis_is_missing_where_its_library_is_another_or_there_is_no_driver(tmp_path: Path, loads, detail):
    library = tmp_path / "libm.so.6"
    library.touch()
    environ = {"PASTA_SANITIZER_LIBRARY": str(library), "PASTA_SANITIZER_PATCH": str(library)}
    there = {name.format(library=library): loaded for name, loaded in loads.items()}
    found = probe("memory_analysis", bare(tmp_path, environ=environ, library=there.get))
    assert (found.state, found.detail) == ("missing", detail.format(library=library))
    assert found.how


def test_the_cuda_driver_says_its_version(tmp_path: Path):
    def version(pointer) -> int:
        pointer._obj.value = 13000
        return 0

    library = SimpleNamespace(cuDriverGetVersion=version)
    found = probe("cuda_driver", bare(tmp_path, library=lambda name: library))
    assert found.detail == "supports CUDA 13.0"


def test_a_v2_cgroup_is_described(tmp_path: Path):
    write(tmp_path / "proc" / "1" / "cgroup", "0::/app\n")
    write(tmp_path / "proc" / "self" / "mountinfo", "30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    (tmp_path / "cgroup" / "app").mkdir(parents=True)
    assert probe("cgroup", bare(tmp_path)).detail.startswith(f"v2 at {tmp_path / 'cgroup' / 'app'}")


def test_no_collector_is_contacted_when_none_is_configured(tmp_path: Path):
    def never(config: object) -> None:
        raise AssertionError("connected")

    found = probe("collector", bare(tmp_path, export=never))
    assert (found.state, found.detail) == ("missing", "none is configured")


def ask_collector(tmp_path: Path, endpoint: str, **variables: str) -> Capability:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint} | {f"OTEL_EXPORTER_OTLP_{k}": v for k, v in variables.items()}
    return probe("collector", bare(tmp_path, environ=environ, export=World().export))


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_collector_that_does_not_answer_is_named_without_its_password(tmp_path: Path):
    found = ask_collector(tmp_path, f"http://user:secret@127.0.0.1:{(port := closed_port())}")
    assert found.state == "missing"
    assert found.detail.startswith(f"127.0.0.1:{port} by http/protobuf does not answer: ")
    assert "secret" not in str(found)


@pytest.mark.parametrize("kind", [HttpReceiver, GrpcReceiver])
def test_a_collector_that_takes_telemetry_is_there(tmp_path: Path, kind: type[Receiver]):
    protocol = "grpc" if kind is GrpcReceiver else "http/protobuf"
    with kind() as receiver:
        endpoint = receiver.endpoint.removesuffix("/v1/traces")
        found = ask_collector(tmp_path, endpoint, PROTOCOL=protocol)
        assert found == Capability("collector", "there", f"{endpoint[7:]} by {protocol} takes telemetry")


@pytest.mark.parametrize(
    ("endpoint", "protocol"),
    [
        ("127.0.0.1:{port}", "http/protobuf"),
        ("grpc://127.0.0.1:{port}", "http/protobuf"),
        ("grpc://127.0.0.1:{port}", "grpc"),
        ("http://", "http/protobuf"),
        ("http://u@x:notaport", "http/protobuf"),
        ("http://u@x:notaport", "grpc"),
    ],
)
def test_an_endpoint_that_the_exporters_refuse_is_no_collector(tmp_path: Path, endpoint: str, protocol: str):
    with HttpReceiver() as receiver:
        found = ask_collector(tmp_path, endpoint.format(port=receiver.server.server_port), PROTOCOL=protocol)
    assert found.state == "missing"
    assert found.detail.startswith("OTEL_EXPORTER_OTLP_ENDPOINT: ")


def test_tls_to_a_port_without_it_is_no_collector(tmp_path: Path):
    with HttpReceiver() as receiver:
        found = ask_collector(tmp_path, f"https://127.0.0.1:{receiver.server.server_port}")
    assert found.state == "missing"


def test_a_ca_file_that_is_not_there_is_said(tmp_path: Path):
    found = ask_collector(tmp_path, "https://127.0.0.1:1", CERTIFICATE=str(tmp_path / "ca.pem"))
    assert (found.state, found.detail) == ("missing", "TLS cannot be set up: No such file or directory")


@pytest.mark.parametrize(("status", "word"), [(401, "OTEL_EXPORTER_OTLP_HEADERS"), (404, "its path"), (500, "its log")])
def test_a_collector_that_refuses_is_told_with_what_to_do(tmp_path: Path, status: int, word: str):
    with HttpReceiver([Answer(status)]) as receiver:
        found = ask_collector(tmp_path, receiver.endpoint.removesuffix("/v1/traces"))
    assert found.state == "missing"
    assert f"answers http_{status}" in found.detail
    assert word in found.how


def test_the_port_of_an_endpoint_without_one_is_the_exporters(tmp_path: Path):
    asked: list[OtlpConfig] = []

    def export(config: OtlpConfig) -> Reply:
        asked.append(config)
        return Reply("retry", "connection")

    for endpoint, protocol in (("http://h", "http/protobuf"), ("https://h", "http/protobuf"), ("h", "grpc")):
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": protocol}
        probe("collector", bare(tmp_path, environ=environ, export=export))
    assert [config.target for config in asked] == ["h:80", "h:443", "h:443"]


def test_a_cupti_library_that_is_named_and_does_not_load_is_missing(tmp_path: Path):
    write(tmp_path / "site" / "nvidia" / "cu13" / "lib" / "libcupti.so.13", "")
    environ = {"PASTA_CUPTI_LIBRARY": "/nonexist"}
    found = probe("cupti", bare(tmp_path, packages=(tmp_path / "site",), environ=environ))
    assert (found.state, found.detail) == ("missing", "PASTA_CUPTI_LIBRARY=/nonexist does not load")


def test_busy_ports_are_named(tmp_path: Path):
    def bind(port: int) -> None:
        if port == 4318:
            raise OSError(errno.EADDRINUSE, "in use")

    assert probe("ports", bare(tmp_path, bind=bind)).detail == "in use: 4318 (OTLP HTTP)"


def test_lacking_sidecar_packages_are_named(tmp_path: Path):
    found = probe("sidecar", bare(tmp_path, version=lambda name: None if name == "duckdb" else "1"))
    assert found.detail == "lacks duckdb"


def test_json_has_every_capability_of_this_machine_and_exits_0():
    result = CliRunner().invoke(command, ["--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["capabilities"]
    assert [c["name"] for c in found] == list(PROBES)
    assert {c["state"] for c in found} <= {"there", "missing", "unknown"}
    assert not [c for c in found if "probe failed" in c["detail"]]


def test_the_text_has_one_line_a_capability():
    result = CliRunner().invoke(command)
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == len(PROBES)
