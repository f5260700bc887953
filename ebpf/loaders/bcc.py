"""The same sources through bcc: for nodes whose kernel has no BTF, or that have no prebuilt object.

bcc is the distribution's package (Debian: python3-bpfcc); it wants the headers of the running kernel and CAP_SYS_ADMIN.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from pasta_otel.ebpf.captured import Captured, captured_output
from pasta_otel.ebpf.loaders.core import sees_tracepoints
from pasta_otel.ebpf.ports import Link, Refusal, RefusedError, Site
from pasta_otel.ebpf.probes import OBJECT_FOLDER, Probe
from pasta_otel.ebpf.start_reason import StartReason, start_reason
from pasta_otel.ebpf.syscall import PERF_EVENTS
from pasta_otel.ebpf.uname import host_machine

DISTRIBUTION_PACKAGES = "/usr/lib/python3/dist-packages"
IN_KERNEL_HEADERS = "/sys/kernel/kheaders.tar.xz"
"""Where a kernel with CONFIG_IKHEADERS has its own headers."""
ATTACH_ARGUMENTS = 6
"""How many arguments bcc's Python hands to ``bpf_attach_uprobe``, which takes one more (iovisor/bcc#5269)."""
_SPELLED = (errno.EPERM, errno.EACCES, errno.ENOENT, errno.EINVAL, errno.EMFILE, errno.ENOMEM)


def import_bcc() -> Any:
    """Return the module ``bcc`` of the distribution, also from another Python.

    Raises:
        RefusedError: It is not installed, or a shared library that it needs is not.
    """
    try:
        return _completed(importlib.import_module("bcc"))
    except (ImportError, OSError):
        pass
    sys.path.append(DISTRIBUTION_PACKAGES)
    try:
        return _completed(importlib.import_module("bcc"))
    except ImportError as error:
        raise RefusedError(Refusal("bcc_missing", 0, str(error))) from error
    except OSError as error:  # a shared library: bcc's own, or libbpf, which it needs
        reason: StartReason = "libbpf_missing" if "libbpf" in str(error) else "bcc_missing"
        raise RefusedError(Refusal(reason, error.errno or 0, str(error))) from error
    finally:
        sys.path.remove(DISTRIBUTION_PACKAGES)


def _completed(module: Any) -> Any:
    """Hand over the argument that bcc leaves out: whatever lies in its place makes attaching fail now and then."""
    library = module.libbcc.lib
    attach = library.bpf_attach_uprobe
    if len(getattr(attach, "argtypes", None) or ()) == ATTACH_ARGUMENTS:
        attach.argtypes = [*attach.argtypes, ctypes.c_uint]
        library.bpf_attach_uprobe = lambda *arguments: attach(*arguments, 0)  # no reference counter
    return module


def expanded_source(probes: Sequence[Probe], folder: Path = OBJECT_FOLDER) -> str:
    """Return one program text for several probes: the shared part, each probe's own, one function per cookie.

    Raises:
        RefusedError: The expanded sources are not there.
    """
    try:
        parts = [
            (folder / f"{name}.bcc.c").read_text(encoding="utf-8") for name in ("pasta", *(p.name for p in probes))
        ]
    except OSError as error:
        raise RefusedError(
            Refusal("object_missing", error.errno or 0, f"{error.filename}: {error.strerror}")
        ) from error
    parts += [
        _wrapper(program, cookie) for probe in probes for program in probe.uprobe_programs for cookie in _cookies(probe)
    ]
    return "#include <uapi/linux/ptrace.h>\n" + "\n".join(parts)


def _cookies(probe: Probe) -> list[int]:
    return [api.cookie for api in probe.apis if api.symbols]


def _wrapper(program: str, cookie: int) -> str:
    return f"int {program}_{cookie}(struct pt_regs *ctx) {{ return {program}_body(ctx, {cookie}ULL); }}"


class BccLoader:
    """Compile and load through bcc.

    Args:
        folder: Where the expanded sources lie.
        module: The module ``bcc``; imported when it is None.
        tracefs: Where tracepoints have their formats, from which bcc makes their arguments.
    """

    name = "bcc"

    def __init__(
        self, folder: Path = OBJECT_FOLDER, module: Any = None, tracefs: Path = Path("/sys/kernel/tracing")
    ) -> None:
        self._folder, self._module, self._tracefs = folder, module, tracefs

    def load(self, probes: Sequence[Probe]) -> BccLoaded:
        """Compile all probes as one program; functions load when they are attached."""
        mine = [probe for probe in probes if "bcc" in probe.loaders]
        module = self._module or import_bcc()
        refusals = {probe.name: _for_core(probe.name) for probe in probes if probe not in mine}
        for probe in mine:
            names = [item.program for item in probe.programs if "bcc" not in item.loaders]
            refusals |= {f"{probe.name}/{name}": _for_core(name) for name in names}
        if not os.access(self._tracefs / "events" / "sched", os.R_OK | os.X_OK):
            text = f"{self._tracefs} cannot be read"
            refusals |= {p.name: Refusal("tracefs_missing", errno.EACCES, text) for p in mine if _tracepoints(p)}
            mine = [probe for probe in mine if not _tracepoints(probe)]
        return BccLoaded(module, self._compile_what_compiles(module, mine, refusals), refusals)

    def _compile_what_compiles(self, module: Any, probes: Sequence[Probe], refusals: dict[str, Refusal]) -> Any:
        """Compile all probes, or, when that fails, those that compile alone."""
        try:
            return _compile(module, expanded_source(probes, self._folder))
        except RefusedError as error:
            if len(probes) == 1 or error.refusal.reason not in {"unknown", "compile_failed", "verifier_or_version"}:
                raise
        good = []
        for probe in probes:
            try:
                _compile(module, expanded_source([probe], self._folder)).cleanup()
            except RefusedError as error:
                refusals[probe.name] = error.refusal
            else:
                good.append(probe)
        if not good:
            raise RefusedError(refusals[probes[0].name])
        return _compile(module, expanded_source(good, self._folder))


def _tracepoints(probe: Probe) -> bool:
    return any(not item.perf for item in probe.programs)


def _for_core(name: str) -> Refusal:
    return Refusal("loader_cannot", 0, f"{name} is for the core loader only")


def _compile(module: Any, text: str) -> Any:
    popped = 8 if host_machine() == "x86_64" else 0  # by a return, off the stack
    with refusing("compiling our probes"):
        return compile_program(module, text.encode(), f"-DPASTA_RETURN_ADDRESS={popped}")


def compile_program(module: Any, text: bytes, *flags: str) -> Any:
    """Return a compiled program; call it within ``refusing``.

    Raises:
        RefusedError: There are no kernel headers.
        Exception: Whatever bcc raises.
    """
    build = f"/lib/modules/{os.uname().release}/build"
    if not any(map(os.path.exists, (build, IN_KERNEL_HEADERS))) and "BCC_KERNEL_SOURCE" not in os.environ:
        raise RefusedError(Refusal("kernel_headers_missing", errno.ENOENT, f"no {build}"))
    return module.BPF(text=text, cflags=["-w", *flags])


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn what bcc raises into a refusal: its exceptions say little, what it writes meanwhile says why.

    Raises:
        RefusedError: The body raised something.
    """
    said: Captured | None = None
    try:
        with captured_output() as said:
            yield
    except RefusedError:
        raise
    except Exception as error:
        raise RefusedError(_refusal(what, error, said.text if said is not None else "")) from error


def _refusal(what: str, error: Exception, said: str) -> Refusal:
    text = f"{said}\n{error}"
    reason = start_reason(text)
    if reason == "tracepoint_missing" and not sees_tracepoints():
        reason = "tracefs_missing"
    words = "; ".join(line.strip() for line in said.splitlines() if line.strip())
    number = error.errno if isinstance(error, OSError) else None
    return Refusal(reason, number or _errno_in(text), f"{what}: {error}: {words[-500:]}".strip(": "))


def _errno_in(text: str) -> int:
    """Return the error number that a text spells out: bcc's exceptions have none."""
    return next((number for number in _SPELLED if os.strerror(number) in text), 0)


class BccLoaded:
    """One compiled module."""

    loader = "bcc"

    def __init__(self, module: Any, bpf: Any, refusals: dict[str, Refusal]) -> None:
        self._module, self._bpf, self.refusals = module, bpf, refusals
        self._functions: dict[str, Any] = {}

    def map_fd(self, name: str) -> int:
        """Return a map's descriptor."""
        return int(self._module.libbcc.lib.bpf_table_fd(self._bpf.module, name.encode()))

    def program_fds(self) -> Mapping[str, int]:
        """Return the descriptors of functions that are loaded so far."""
        return {name: function.fd for name, function in self._functions.items()}

    def attach_uprobes(self, probe: str, program: str, path: str, sites: Sequence[Site]) -> Link:
        """Attach one function per cookie, one by one."""
        places = [(site, f"{program}_{site.cookie}") for site in sites]
        return self._attach_each(probe, path, places, self._bpf.attach_uprobe, self._bpf.detach_uprobe)

    def attach_uretprobes(self, probe: str, program: str, path: str, sites: Sequence[Site]) -> Link:
        """Attach the return function, one by one."""
        places = [(site, program) for site in sites]
        return self._attach_each(probe, path, places, self._bpf.attach_uretprobe, self._bpf.detach_uretprobe)

    def _attach_each(
        self,
        probe: str,
        path: str,
        places: Sequence[tuple[Site, str]],
        attach: Callable[..., Any],
        detach: Callable[..., Any],
    ) -> Link:
        link = _BccLink()
        try:
            for site, function in places:
                self._load_function(probe, function, self._module.BPF.KPROBE)
                place = {"name": path.encode(), "addr": site.offset}
                _attempt(partial(attach, **place, fn_name=function.encode()), path)
                link.add(partial(detach, **place))
        except RefusedError:
            link.close()
            raise
        return link

    def attach_tracepoint(self, probe: str, program: str, tracepoint: str) -> Link:
        """Attach to a tracepoint, by its id in tracefs."""
        self._load_function(probe, program, self._module.BPF.TRACEPOINT)
        _attempt(lambda: self._bpf.attach_tracepoint(tp=tracepoint.encode(), fn_name=program.encode()), tracepoint)
        link = _BccLink()
        link.add(lambda: self._bpf.detach_tracepoint(tracepoint.encode()))
        return link

    def attach_perf(self, probe: str, program: str, event: str) -> Link:
        """Attach to a software event of perf, on every CPU."""
        self._load_function(probe, program, self._module.BPF.PERF_EVENT)
        event_type, config = PERF_EVENTS[event]
        _attempt(
            partial(
                self._bpf.attach_perf_event,
                ev_type=event_type,
                ev_config=config,
                fn_name=program.encode(),
                sample_period=1,
            ),
            event,
        )
        link = _BccLink()
        link.add(partial(self._bpf.detach_perf_event, event_type, config))
        return link

    def _load_function(self, probe: str, function: str, kind: int) -> None:
        with refusing(f"loading {probe}/{function}"):
            self._functions[f"{probe}/{function}"] = self._bpf.load_func(function.encode(), kind)

    def close(self) -> None:
        """Detach and unload; ``BPF.close`` alone would not detach."""
        self._bpf.cleanup()


class _BccLink:
    """Several attachments that end together."""

    def __init__(self) -> None:
        self._detach: list[Callable[[], Any]] = []

    def add(self, detach: Callable[[], Any]) -> None:
        self._detach.append(detach)

    def close(self) -> None:
        while self._detach:
            self._detach.pop()()


def _attempt(attach: Callable[[], Any], what: str) -> None:
    with refusing(f"attaching to {what}"):
        attach()
