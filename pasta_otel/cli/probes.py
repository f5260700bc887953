"""What ``pasta-otel doctor`` looks at: one function a capability, each over a ``World`` that tests can fake."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import socket
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path
from typing import Any, Literal

from pasta_otel.ebpf.elf import NotElfError, function_offsets
from pasta_otel.ebpf.hostfiles import find_cgroup
from pasta_otel.ebpf.hostfiles.files import read_text
from pasta_otel.ebpf.probes import OBJECT_FOLDER
from pasta_otel.ebpf.processes import ProcessTable
from pasta_otel.ebpf.return_probes import return_probes_refusal
from pasta_otel.ebpf.start_reason import HELP, lockdown_reason, read_lockdown
from pasta_otel.errors import InputError, MissingError
from pasta_otel.exporters.otlp.config import OtlpConfig
from pasta_otel.exporters.otlp.refusal import help_for
from pasta_otel.exporters.otlp.transport import Reply, make_transport
from pasta_otel.gpu.device.amd import amd_source
from pasta_otel.gpu.device.model import DeviceReading, Snapshot
from pasta_otel.gpu.device.nvml import nvml_source
from pasta_otel.gpu.device.sampler import DeviceSampler
from pasta_otel.gpu.memory import library as sanitizer
from pasta_otel.semconv import HW_DRIVER_VERSION

DEVICE_LIMIT_S = 10.0  # the first call may have to wake a driver without persistence mode
DEVICE_HELP = {
    "version_mismatch": "the driver was updated: reload its kernel modules, or reboot; in a container restart it",
    "no_permission": "let this user open /dev/nvidia*",
    "timeout": "the driver hangs: see the kernel log for XID messages; the GPU may need a reset",
}
State = Literal["there", "missing", "unknown"]
PORTS = {4317: "OTLP gRPC", 4318: "OTLP HTTP", 4320: "API of sidecar and controller", 4321: "API of the agent"}
CONNECT_TIMEOUT_S = 2.0
# bit numbers: include/uapi/linux/capability.h
CAPABILITIES = {"CAP_DAC_READ_SEARCH": 2, "CAP_SYS_PTRACE": 19, "CAP_PERFMON": 38, "CAP_BPF": 39}
CAP_SYS_ADMIN = 21  # stands for CAP_BPF and CAP_PERFMON, which were split from it in Linux 5.8
BPF_SYSCALL = {"x86_64": 321, "aarch64": 280}
BPF_PROG_LOAD, BPF_PROG_TYPE_SOCKET_FILTER = 5, 1
ROOT_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO in include/linux/proc_ns.h
BCC_LIBRARY = "libbcc.so.0"
CUPTI_NAMES = ("libcupti.so.13", "libcupti.so.12", "libcupti.so")


@dataclass(frozen=True, slots=True)
class Capability:
    """One line of the report.

    Attributes:
        name: Stable word for scripts.
        state: ``there``, ``missing`` or ``unknown`` (the probe itself failed).
        detail: What was found.
        how: How to get it, when it is missing.
    """

    name: str
    state: State
    detail: str
    how: str = ""


def load_library(name: str) -> Any:
    """Return a shared library, or None when the loader does not find it."""
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def distribution_version(name: str) -> str | None:
    """Return an installed distribution's version, or None; the package is not imported."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class World:
    """What the probes may touch.

    Attributes:
        proc: ``/proc``.
        sys: ``/sys``.
        cgroup: ``/sys/fs/cgroup``.
        modules: ``/lib/modules``.
        environ: Environment variables.
        machine: Architecture as uname names it.
        library: Loads a shared library, or returns None.
        version: Version of an installed distribution, or None.
        packages: Folders where packages, and shared libraries within them, are looked for.
        load_program: Tries to load a minimal BPF program; returns an errno, 0 = loaded.
        export: Sends one OTLP request without spans and returns the answer.
        bind: Binds a loopback port and frees it; raises OSError.
    """

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    cgroup: Path = Path("/sys/fs/cgroup")
    modules: Path = Path("/lib/modules")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    machine: str = field(default_factory=platform.machine)
    library: Callable[[str], Any] = load_library
    version: Callable[[str], str | None] = distribution_version
    packages: tuple[Path, ...] = field(default_factory=lambda: tuple(map(Path, sys.path)))
    load_program: Callable[[str], int] = field(default_factory=lambda: load_minimal_program)
    export: Callable[[OtlpConfig], Reply] = field(default_factory=lambda: export_nothing)
    bind: Callable[[int], None] = field(default_factory=lambda: tcp_bind)

    @property
    def kernel(self) -> str:
        """Return the kernel release, or empty."""
        return (read_text(self.proc / "sys" / "kernel" / "osrelease") or "").strip()


def export_nothing(config: OtlpConfig) -> Reply:
    """Send one OTLP request without spans, as the exporters would send it."""
    transport = make_transport(config)
    try:
        return transport.post(b"", time.monotonic() + CONNECT_TIMEOUT_S)
    finally:
        transport.close()


def tcp_bind(port: int) -> None:
    """Bind a loopback port and free it."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))


def load_minimal_program(machine: str) -> int:
    """Load ``r0 = 0; exit`` as a socket filter and close it; return the errno, 0 = loaded.

    The attribute's first fields are those of ``union bpf_attr`` for BPF_PROG_LOAD: prog_type, insn_cnt, insns, license.
    """
    if machine not in BPF_SYSCALL:
        return errno.ENOSYS
    code = (ctypes.c_uint64 * 2)(0x00000000000000B7, 0x0000000000000095)
    licence = ctypes.create_string_buffer(b"GPL")
    attribute = (ctypes.c_uint64 * 16)()
    attribute[0] = BPF_PROG_TYPE_SOCKET_FILTER | (len(code) << 32)
    attribute[1], attribute[2] = ctypes.addressof(code), ctypes.addressof(licence)
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.syscall(BPF_SYSCALL[machine], BPF_PROG_LOAD, ctypes.byref(attribute), ctypes.sizeof(attribute))
    if descriptor < 0:
        return ctypes.get_errno()
    os.close(descriptor)
    return 0


def there(name: str, detail: str) -> Capability:
    """Return a capability that is there."""
    return Capability(name, "there", detail)


def missing(name: str, detail: str, how: str) -> Capability:
    """Return a capability that is missing."""
    return Capability(name, "missing", detail, how)


def python(world: World) -> Capability:
    """Python's version, and whether it runs without the GIL."""
    del world
    build = " free-threaded" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
    enabled = getattr(sys, "_is_gil_enabled", lambda: True)()
    note = "" if not build else (" with the GIL on" if enabled else " with the GIL off")
    return there("python", f"{platform.python_implementation()} {platform.python_version()}{build}{note}")


def torch(world: World) -> Capability:
    """PyTorch, without importing it."""
    version = world.version("torch")
    if version is None:
        return missing("torch", "not installed", "pip install 'pasta-otel[torch]'; module spans need it")
    return there("torch", version)


def gpu(world: World) -> Capability:
    """GPUs, as NVML or amdsmi sees them, within a time limit: the driver of a dying GPU may never answer."""
    if world.version("amdsmi") is not None and world.library("libnvidia-ml.so.1") is None:
        return describe_devices(DeviceSampler(amd_source(), limit_s=DEVICE_LIMIT_S).sample())
    if util.find_spec("pynvml") is None:
        return missing("gpu", "the NVML binding is not installed", "pip install 'pasta-otel[gpu]'")
    if world.library("libnvidia-ml.so.1") is None:
        return missing(
            "gpu", "no NVIDIA driver on this machine", "install the NVIDIA driver; without a GPU ignore this"
        )
    return describe_devices(DeviceSampler(nvml_source(), limit_s=DEVICE_LIMIT_S).sample())


def describe_devices(snapshot: Snapshot) -> Capability:
    """Say which devices answer, and what is wrong with those that do not."""
    if snapshot.down:
        how = DEVICE_HELP.get(snapshot.down, "check nvidia-smi or amd-smi on this machine")
        return missing("gpu", f"{snapshot.source}: {snapshot.down} ({snapshot.detail})", how)
    if not snapshot.devices:
        return missing("gpu", "a driver but no device", "check which devices the container gets")
    words = [_device_words(read) for read in snapshot.devices]
    drivers = {value for read in snapshot.devices for name, value in read.device.info if name == HW_DRIVER_VERSION}
    detail = ", ".join(words) + "".join(f"; driver {driver}" for driver in sorted(map(str, drivers)))
    if all(read.down for read in snapshot.devices):
        return missing("gpu", detail, "see the kernel log for XID messages; a lost GPU needs a reset or a reboot")
    return there("gpu", detail)


def _device_words(read: DeviceReading) -> str:
    trouble = read.down or (read.state if read.state not in {None, "ok"} else "")
    return f"{read.device.name or read.device.id}" + (f" ({trouble})" if trouble else "")


def cuda_driver(world: World) -> Capability:
    """The CUDA driver library and the CUDA version it supports."""
    library = world.library("libcuda.so.1")
    version = ctypes.c_int(0)
    if library is None or library.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return missing(
            "cuda_driver", "libcuda.so.1 does not load", "install the NVIDIA driver (containers: the toolkit)"
        )
    return there("cuda_driver", f"supports CUDA {version.value // 1000}.{version.value % 1000 // 10}")


def cupti(world: World) -> Capability:
    """The CUPTI library: as set, on the loader's path, in CUDA_HOME, or inside an installed package."""
    chosen = world.environ.get("PASTA_CUPTI_LIBRARY")
    if chosen and world.library(chosen) is None:
        return missing("cupti", f"PASTA_CUPTI_LIBRARY={chosen} does not load", "name libcupti's file, or unset it")
    for name in (*filter(None, [chosen]), *CUPTI_NAMES):
        if world.library(name) is not None:
            return there("cupti", name)
    found = next(_cupti_files(world), None)
    if found is None:
        return missing(
            "cupti", "libcupti is nowhere", "pip install nvidia-cuda-cupti (CUDA 13) or nvidia-cuda-cupti-cu12"
        )
    return there("cupti", str(found))


def _cupti_files(world: World) -> Iterator[Path]:
    home = world.environ.get("CUDA_HOME") or world.environ.get("CUDA_PATH")
    if home:
        yield from sorted(Path(home).glob("extras/CUPTI/lib64/libcupti.so.1*"))
    for folder in world.packages:
        yield from sorted((folder / "nvidia").glob("*/lib/libcupti.so.1*"))


def memory_analysis(world: World) -> Capability:
    """What `analyze memory` needs: the Sanitizer's library, patches or nvcc, a free profiler, and the CUDA driver."""
    name = "memory_analysis"
    if injected := world.environ.get("CUDA_INJECTION64_PATH"):
        return missing(
            name, f"CUPTI is active: CUDA_INJECTION64_PATH={injected}", "unset it to analyse memory accesses"
        )
    try:
        found = sanitizer.find_library(world.environ, map(str, world.packages))
        patch = sanitizer.ready_patch(world.environ, sanitizer.source())
        compiler = "" if patch.is_file() else sanitizer.find_nvcc(world.environ)
    except MissingError as error:
        return missing(name, error.message, error.how or "name a file that exists, or nothing")
    if not hasattr(world.library(found), sanitizer.ENTRY):
        return missing(name, f"{found} does not load, or is no {sanitizer.LIBRARY}", "set PASTA_SANITIZER_LIBRARY")
    if world.library(sanitizer.DRIVER) is None:
        return missing(name, f"no NVIDIA driver: {sanitizer.DRIVER} does not load", sanitizer.NO_DRIVER)
    return there(name, f"{found}, patches {f'to be compiled by {compiler}' if compiler else f'in {patch}'}")


def btf(world: World) -> Capability:
    """Type information of the running kernel, which the CO-RE loader needs."""
    path = world.sys / "kernel" / "btf" / "vmlinux"
    if not path.exists():
        return missing("btf", f"no {path}", "use a kernel with CONFIG_DEBUG_INFO_BTF=y, or bcc with kernel headers")
    return there("btf", str(path))


def ebpf_load(world: World) -> Capability:
    """Whether this process may load a BPF program, tried with a minimal one."""
    reason = lockdown_reason(read_lockdown(world.sys))
    if reason is not None:
        return missing("ebpf_load", reason, HELP[reason])
    error = world.load_program(world.machine)
    if error == 0:
        return there("ebpf_load", "a minimal program loads")
    reason = "not_privileged" if error in {errno.EPERM, errno.EACCES} else "unknown"
    return missing("ebpf_load", f"{reason}: {os.strerror(error)}", HELP["not_privileged"])


def ebpf_capabilities(world: World) -> Capability:
    """The capabilities that the agent needs."""
    match = re.search(r"^CapEff:\s*([0-9a-f]+)", read_text(world.proc / "self" / "status") or "", re.MULTILINE)
    if match is None:
        return Capability("ebpf_capabilities", "unknown", "no CapEff in /proc/self/status")
    effective = int(match[1], 16)
    admin = {"CAP_BPF", "CAP_PERFMON"} if effective >> CAP_SYS_ADMIN & 1 else set()
    lacking = [name for name, bit in CAPABILITIES.items() if not effective >> bit & 1 and name not in admin]
    if lacking:
        return missing("ebpf_capabilities", f"lacks {', '.join(lacking)}", f"add {', '.join(lacking)} to the agent")
    return there("ebpf_capabilities", ", ".join(CAPABILITIES))


def tracefs(world: World) -> Capability:
    """The tracing file system, where tracepoints have their ids."""
    for path in (world.sys / "kernel" / "tracing", world.sys / "kernel" / "debug" / "tracing"):
        try:
            if (path / "events").is_dir():
                return there("tracefs", str(path))
        except PermissionError:  # mounted, and closed to all but root, which is how distributions mount it
            return missing(
                "tracefs", f"{path} is closed to this user", "run the agent as root or with CAP_DAC_READ_SEARCH"
            )
    return missing("tracefs", "not mounted, or not readable", "mount -t tracefs tracefs /sys/kernel/tracing (as root)")


def uprobe_multi(world: World) -> Capability:
    """Many uprobes in one attach: Linux 6.6 (bpf_link_create with BPF_TRACE_UPROBE_MULTI)."""
    match = re.match(r"(\d+)\.(\d+)", world.kernel)
    if match is None:
        return Capability("uprobe_multi", "unknown", f"kernel release {world.kernel!r}")
    if (int(match[1]), int(match[2])) < (6, 6):
        return missing(
            "uprobe_multi", f"Linux {world.kernel}", "Linux 6.6 or newer; until then probes attach one by one"
        )
    return there("uprobe_multi", f"Linux {world.kernel}")


def architecture(world: World) -> Capability:
    """The machine's architecture: the thread key that host probes read differs by it."""
    if world.machine in BPF_SYSCALL:
        return there("architecture", world.machine)
    return missing("architecture", world.machine, "host probes are built for x86_64 and aarch64; all else works")


def cgroup(world: World) -> Capability:
    """The cgroup of this process for the cpu controller: version, place and whether quotas can be written."""
    found = find_cgroup(world.proc, world.cgroup, os.getpid() if world.proc == Path("/proc") else 1)
    if found is None:
        how = "mount cgroup v2, or give the container its cgroup mount; throttling evidence needs it"
        return missing("cgroup", "the cpu controller's cgroup of this process cannot be seen", how)
    writable = os.access(found.path, os.W_OK)
    quota = (found.path / "cpu.cfs_quota_us").exists() or found.version == 2
    able = "quotas can be written" if writable and quota else "read only"
    return there("cgroup", f"v{found.version} at {found.path}, {able}")


def psi(world: World) -> Capability:
    """Pressure stall information."""
    if read_text(world.proc / "pressure" / "cpu") is None:
        return missing("psi", "no /proc/pressure", "boot with psi=1 on a kernel with CONFIG_PSI=y")
    return there("psi", "/proc/pressure")


def libbpf(world: World) -> Capability:
    """The library of the CO-RE loader."""
    library = world.library("libbpf.so.1")
    if library is None:
        return missing("libbpf", "libbpf.so.1 does not load", "Debian, Ubuntu: apt-get install libbpf1")
    library.libbpf_version_string.restype = ctypes.c_char_p
    return there("libbpf", (library.libbpf_version_string() or b"").decode())


def bcc(world: World) -> Capability:
    """The bcc compiler's Python binding."""
    for folder in (*world.packages, Path("/usr/lib/python3/dist-packages")):
        if (folder / "bcc" / "libbcc.py").exists():
            if world.library(BCC_LIBRARY) is None:  # itself, or libbpf, which it needs
                return missing("bcc", f"{folder / 'bcc'}: {BCC_LIBRARY} does not load", HELP["bcc_missing"])
            return there("bcc", str(folder / "bcc"))
    how = "Debian, Ubuntu: apt-get install python3-bpfcc (PyPI's bcc is something else); not needed where libbpf is"
    return missing("bcc", "no Python binding", how)


def ebpf_objects(world: World) -> Capability:
    """The compiled host probes, for this architecture."""
    path = OBJECT_FOLDER / f"pasta.{world.machine}.bpf.o"
    if not path.exists():
        return missing("ebpf_objects", f"no {path.name} in this installation", HELP["object_missing"])
    return there("ebpf_objects", path.name)


def kernel_headers(world: World) -> Capability:
    """The kernel headers that bcc compiles with, and whether they are the running kernel's."""
    folder = world.modules / world.kernel / "build"
    text = read_text(folder / "include" / "generated" / "utsrelease.h")
    found = re.search(r'UTS_RELEASE "([^"]+)"', text or "")
    if found is None:
        return missing("kernel_headers", f"none at {folder}", HELP["kernel_headers_missing"])
    if found[1] != world.kernel:
        detail = f"of Linux {found[1]}, but Linux {world.kernel} runs"
        how = "our probes read no kernel structure through bcc, so they work; a program of your own must not either"
        return missing("kernel_headers", detail, how)
    return there("kernel_headers", found[1])


def return_probes(world: World) -> Capability:
    """Whether return probes are safe here."""
    refusal = return_probes_refusal(world.kernel, world.machine)
    if refusal is not None:
        return missing("return_probes", refusal.text, HELP[refusal.reason])
    return there("return_probes", f"Linux {world.kernel}")


def pid_namespace(world: World) -> Capability:
    """Whether this process sees process ids as the kernel does, which the agent must."""
    try:
        link = (world.proc / "self" / "ns" / "pid").readlink().name
    except OSError as error:
        return Capability("pid_namespace", "unknown", f"cannot be read: {error.strerror}")
    if link != ROOT_PID_NAMESPACE:
        return missing("pid_namespace", f"{link} is not the host's", "run the agent with hostPID: true")
    return there("pid_namespace", "the host's")


def driver_functions(world: World) -> Capability:
    """Whether the CUDA driver libraries that processes map export what is probed.

    A statically linked CUDA runtime does not matter: it calls the driver library, too.
    """
    table = ProcessTable(world.proc, "libcuda.so")
    table.scan()
    libraries = {lib.key: lib for process in table.processes.values() for lib in process.libraries}
    stripped = [lib.shown for lib in libraries.values() if not _exports(lib.path, "cuLaunchKernel")]
    if stripped:
        return missing("driver_functions", f"none in {', '.join(stripped)}", HELP["library_stripped"])
    if not libraries:
        return missing("driver_functions", "no process maps libcuda.so", "start the GPU program, then ask again")
    shown = ", ".join(sorted(lib.shown for lib in libraries.values()))
    return there("driver_functions", f"{shown}; a statically linked CUDA runtime calls it, too")


def _exports(path: str, function: str) -> bool:
    try:
        return bool(function_offsets(path, [function]))
    except (OSError, NotElfError):
        return False


def sidecar(world: World) -> Capability:
    """The packages of the sidecar."""
    versions = {name: world.version(name) for name in ("duckdb", "grpcio", "starlette", "uvicorn")}
    lacking = [name for name, version in versions.items() if version is None]
    if lacking:
        return missing("sidecar", f"lacks {', '.join(lacking)}", "pip install 'pasta-otel[sidecar]'")
    return there("sidecar", ", ".join(f"{name} {version}" for name, version in versions.items()))


def collector(world: World) -> Capability:
    """The configured collector, by one empty OTLP request; nothing is connected when none is configured."""
    name = "OTEL_EXPORTER_OTLP_ENDPOINT"
    named = next((key for key in ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", name) if world.environ.get(key)), "")
    if not named:
        how = f"set {name}; without it apps send to a sidecar on 127.0.0.1, and the sidecar keeps what it gets"
        return missing("collector", "none is configured", how)
    try:
        config = OtlpConfig.from_env(world.environ)
        reply = world.export(config)
    except InputError as error:
        return missing("collector", str(error), "correct it: telemetry is sent nowhere as it is")
    except MissingError as error:
        return missing("collector", error.message, error.how)
    except (OSError, ValueError) as error:  # files for TLS; ssl.SSLError is an OSError
        why = getattr(error, "strerror", None) or type(error).__name__
        return missing(
            "collector", f"TLS cannot be set up: {why}", "correct OTEL_EXPORTER_OTLP_CERTIFICATE and its like"
        )
    return _collector_words(config, reply, named)


def _collector_words(config: OtlpConfig, reply: Reply, named: str) -> Capability:
    where = f"{config.target} by {config.protocol}"  # never the URL itself: it may hold a password
    if reply.kind == "ok":
        return there("collector", f"{where} takes telemetry")
    if reply.reason in {"connection", "timeout", "tls"}:
        detail = f"{where} does not answer: {reply.message or reply.reason}"
        return missing("collector", detail, f"start it, or correct {named} and OTEL_EXPORTER_OTLP_PROTOCOL")
    if reply.reason == "http_400":  # some refuse a request without spans
        return there("collector", f"{where} answers")
    return missing("collector", f"{where} answers {reply.reason}", help_for(reply.reason, named))


def ports(world: World) -> Capability:
    """The loopback ports that pasta-otel listens on."""
    busy = [f"{port} ({use})" for port, use in PORTS.items() if not _free(world, port)]
    if busy:
        how = "stop what listens there, or choose other ports; a running sidecar or agent of ours is fine"
        return missing("ports", f"in use: {', '.join(busy)}", how)
    return there("ports", ", ".join(map(str, PORTS)) + " are free")


def _free(world: World, port: int) -> bool:
    try:
        world.bind(port)
    except OSError:
        return False
    return True


PROBES: Mapping[str, Callable[[World], Capability]] = {
    "python": python,
    "architecture": architecture,
    "torch": torch,
    "gpu": gpu,
    "cuda_driver": cuda_driver,
    "cupti": cupti,
    "memory_analysis": memory_analysis,
    "btf": btf,
    "ebpf_load": ebpf_load,
    "ebpf_capabilities": ebpf_capabilities,
    "tracefs": tracefs,
    "uprobe_multi": uprobe_multi,
    "libbpf": libbpf,
    "bcc": bcc,
    "kernel_headers": kernel_headers,
    "ebpf_objects": ebpf_objects,
    "return_probes": return_probes,
    "pid_namespace": pid_namespace,
    "driver_functions": driver_functions,
    "cgroup": cgroup,
    "psi": psi,
    "sidecar": sidecar,
    "collector": collector,
    "ports": ports,
}


def examine(world: World) -> list[Capability]:
    """Return every capability; a probe that fails itself is ``unknown``, and says why."""
    return [_safely(name, probe, world) for name, probe in PROBES.items()]


def _safely(name: str, probe: Callable[[World], Capability], world: World) -> Capability:
    try:
        return probe(world)
    except MissingError as error:
        return missing(name, error.message, error.how)
    except Exception as error:  # noqa: BLE001 - whatever a strange machine does, the other lines are still worth having
        return Capability(name, "unknown", f"the probe failed: {type(error).__name__}: {error}")
