"""CO-RE objects through ``libbpf.so.1`` by ctypes: no compiler, no headers, 20 MB; the default."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pasta_otel.ebpf.ports import Link, Refusal, RefusedError, Site, refused
from pasta_otel.ebpf.probes import OBJECT_FOLDER, Probe
from pasta_otel.ebpf.start_reason import StartReason
from pasta_otel.ebpf.syscall import PERF_EVENTS, TRACE_UPROBE_MULTI, link_uprobes, online_cpus, open_perf_event
from pasta_otel.ebpf.uname import host_machine, linux_version

MULTI_SINCE = (6, 6)
LOG_SIZE = 1 << 16
TRACEFS = ("/sys/kernel/debug/tracing", "/sys/kernel/tracing")
"""Where libbpf looks, in its order: the first that exists."""
_POINTERS = (
    "bpf_object__open_file", "bpf_object__find_program_by_name", "bpf_object__next_program", "bpf_object__next_map",
    "bpf_object__find_map_by_name", "bpf_program__attach_uprobe_opts", "bpf_program__attach_trace",
    "bpf_program__attach_tracepoint", "bpf_program__attach", "bpf_program__attach_perf_event",
)  # fmt: skip


class _UprobeOptions(ctypes.Structure):
    """``struct bpf_uprobe_opts`` of libbpf 1.0."""

    _fields_ = (
        ("sz", ctypes.c_size_t),
        ("ref_ctr_offset", ctypes.c_size_t),
        ("bpf_cookie", ctypes.c_uint64),
        ("retprobe", ctypes.c_bool),
        ("func_name", ctypes.c_char_p),
    )


def load_libbpf() -> Any:
    """Return libbpf.

    Raises:
        OSError: It is not installed.
    """
    library = ctypes.CDLL("libbpf.so.1", use_errno=True)
    for name in _POINTERS:
        getattr(library, name).restype = ctypes.c_void_p
    library.bpf_object__name.restype = library.bpf_map__name.restype = library.bpf_program__name.restype = (
        ctypes.c_char_p
    )
    library.libbpf_set_print(None)  # it would write to stderr; errno and the verifier's log say what we need
    return library


class CoreLoader:
    """Load prebuilt objects.

    Args:
        folder: Where the objects lie.
        library: libbpf; found when it is None.
        multi: Attach uprobes by one ``uprobe_multi`` link (Linux 6.6), which needs no CAP_SYS_ADMIN.
    """

    name = "core"

    def __init__(self, folder: Path = OBJECT_FOLDER, library: Any = None, *, multi: bool | None = None) -> None:
        self._folder, self._library = folder, library
        self._multi = linux_version()[:2] >= MULTI_SINCE if multi is None else multi

    def load(self, probes: Sequence[Probe]) -> CoreLoaded:
        """Load the probes' programs."""
        try:
            library = self._library or load_libbpf()
        except OSError as error:
            raise RefusedError(Refusal("libbpf_missing", 0, str(error))) from error
        path = self._folder / f"pasta.{host_machine()}.bpf.o"
        if not path.exists():
            text = f"{path.name} was not built: this installation had no clang"
            raise RefusedError(Refusal("object_missing", errno.ENOENT, text))
        loaded = CoreLoaded(library, multi=self._multi)
        loaded.add(probes, path)
        return loaded


class CoreLoaded:
    """The object in the kernel."""

    loader = "core"

    def __init__(self, library: Any, *, multi: bool) -> None:
        self._bpf, self._multi = library, multi
        self._object: ctypes.c_void_p | None = None
        self.refusals: dict[str, Refusal] = {}
        self._programs: dict[str, ctypes.c_void_p] = {}
        self._links: list[_Attachment] = []

    # -- loading -------------------------------------------------------------------------------------------------------

    def add(self, probes: Sequence[Probe], path: Path) -> None:
        """Load the probes' programs; without those that the kernel refuses, if it takes others.

        Raises:
            RefusedError: It takes none.
        """
        wanted = {f"{probe.name}/{name}": name for probe in probes for name in probe.program_names}
        try:
            loaded = self._load(path, [*wanted.values()])
        except RefusedError as error:
            if len(wanted) == 1 or error.refusal.reason == "not_privileged":
                raise
            wanted = {key: name for key, name in wanted.items() if self._loads_alone(key, path, name)}
            if not wanted:
                raise
            loaded = self._load(path, [*wanted.values()])
        self._object = loaded
        find = self._bpf.bpf_object__find_program_by_name
        self._programs = {key: ctypes.c_void_p(find(loaded, name.encode())) for key, name in wanted.items()}

    def _loads_alone(self, key: str, path: Path, program: str) -> bool:
        try:
            self._bpf.bpf_object__close(self._load(path, [program]))
        except RefusedError as error:
            self.refusals[key] = error.refusal
            return False
        return True

    def _load(self, path: Path, wanted: Sequence[str]) -> ctypes.c_void_p:
        opened = ctypes.c_void_p(self._bpf.bpf_object__open_file(os.fsencode(path), None))
        if not opened:
            raise _error(path.name)
        logs = self._prepare(opened, wanted)
        if self._bpf.bpf_object__load(opened):
            number = ctypes.get_errno()
            self._bpf.bpf_object__close(opened)
            text = b"".join(log.value for log in logs).decode(errors="replace")
            raise refused(OSError(number, os.strerror(number)), f"loading {path.name}", text)
        return opened

    def _prepare(self, opened: ctypes.c_void_p, wanted: Sequence[str]) -> list[ctypes.Array[ctypes.c_char]]:
        """Choose programs, and ask for the verifier's log."""
        logs = []
        program = ctypes.c_void_p(self._bpf.bpf_object__next_program(opened, None))
        while program:
            name = self._bpf.bpf_program__name(program).decode()
            self._bpf.bpf_program__set_autoload(program, name in wanted)
            if self._multi and name.startswith("call_"):
                self._bpf.bpf_program__set_expected_attach_type(program, TRACE_UPROBE_MULTI)
            log = ctypes.create_string_buffer(LOG_SIZE)
            self._bpf.bpf_program__set_log_buf(program, log, ctypes.c_size_t(LOG_SIZE))
            logs.append(log)
            program = ctypes.c_void_p(self._bpf.bpf_object__next_program(opened, program))
        self._logs = logs  # libbpf writes into them while loading
        return logs

    # -- what is there -------------------------------------------------------------------------------------------------

    def map_fd(self, name: str) -> int:
        """Return a map's descriptor."""
        return int(self._bpf.bpf_object__find_map_fd_by_name(self._object, name.encode()))

    def program_fds(self) -> Mapping[str, int]:
        """Return the loaded programs' descriptors."""
        return {name: self._bpf.bpf_program__fd(program) for name, program in self._programs.items()}

    # -- attaching -----------------------------------------------------------------------------------------------------

    def attach_uprobes(self, probe: str, program: str, path: str, sites: Sequence[Site]) -> Link:
        """Attach an entry program; one link for all places where the kernel can."""
        return self._attach_sites(f"{probe}/{program}", path, sites, returning=False)

    def attach_uretprobes(self, probe: str, program: str, path: str, sites: Sequence[Site]) -> Link:
        """Attach a return program."""
        return self._attach_sites(f"{probe}/{program}", path, sites, returning=True)

    def _attach_sites(self, name: str, path: str, sites: Sequence[Site], *, returning: bool) -> Link:
        program = self._program(name)
        if self._multi:
            offsets, cookies = [site.offset for site in sites], [site.cookie for site in sites]
            try:
                fd = link_uprobes(self._bpf.bpf_program__fd(program), path, offsets, cookies, returning=returning)
            except OSError as error:
                raise refused(error, f"attaching {name} to {path}") from error
            return self._attached(lambda: os.close(fd))
        links: list[Link] = []
        try:
            links.extend(self._attach_site(program, name, path, site, returning=returning) for site in sites)
        except RefusedError:
            _close_all(links)
            raise
        return self._attached(lambda: _close_all(links))

    def _attach_site(self, program: ctypes.c_void_p, name: str, path: str, site: Site, *, returning: bool) -> Link:
        options = _UprobeOptions(sz=ctypes.sizeof(_UprobeOptions), bpf_cookie=site.cookie, retprobe=returning)
        attach = self._bpf.bpf_program__attach_uprobe_opts
        pointer = attach(program, -1, os.fsencode(path), ctypes.c_size_t(site.offset), ctypes.byref(options))
        return self._link(pointer, f"attaching {name} to {site.symbol} in {path}")

    def attach_tracepoint(self, probe: str, program: str, tracepoint: str) -> Link:
        """Attach a program where its own section says."""
        what = f"attaching {probe}/{program} to {tracepoint}"
        pointer = self._bpf.bpf_program__attach(self._program(f"{probe}/{program}"))
        number = ctypes.get_errno()
        if not pointer and number in {errno.ENOENT, errno.EACCES}:  # its id is read from tracefs
            reason: StartReason = "tracepoint_missing" if sees_tracepoints() else "tracefs_missing"
            raise RefusedError(Refusal(reason, number, f"{what}: tracefs: {os.strerror(number)}"))
        return self._link(pointer, what)

    def attach_perf(self, probe: str, program: str, event: str) -> Link:
        """Attach to a software event of perf, on every CPU."""
        links: list[Link] = []
        try:
            for cpu in online_cpus():
                links.append(self._attach_perf(f"{probe}/{program}", event, cpu))  # noqa: PERF401 - kept on error
        except RefusedError:
            _close_all(links)
            raise
        return self._attached(lambda: _close_all(links))

    def _attach_perf(self, name: str, event: str, cpu: int) -> Link:
        program = self._program(name)
        try:
            fd = open_perf_event(*PERF_EVENTS[event], cpu)
        except OSError as error:
            raise refused(error, f"opening the perf event {event}") from error
        pointer = self._bpf.bpf_program__attach_perf_event(program, fd)
        if not pointer:
            refusal = _error(f"attaching {name} to {event}")
            os.close(fd)
            raise refusal
        return self._link(pointer, name)  # which closes fd with itself

    def _program(self, name: str) -> ctypes.c_void_p:
        if name not in self._programs:
            refusal = self.refusals.get(name) or self.refusals.get(name.partition("/")[0])
            raise RefusedError(refusal or Refusal("unknown", 0, f"{name} is not loaded"))
        return self._programs[name]

    def _link(self, pointer: int | None, what: str) -> Link:
        if not pointer:
            raise _error(what)
        return self._attached(lambda: self._bpf.bpf_link__destroy(ctypes.c_void_p(pointer)))

    def _attached(self, detach: Callable[[], object]) -> Link:
        link = _Attachment(detach)
        self._links.append(link)
        return link

    def close(self) -> None:
        """Detach and unload."""
        _close_all(self._links)
        self._links.clear()
        if self._object is not None:
            self._bpf.bpf_object__close(self._object)
            self._object = None
        self._programs.clear()


class _Attachment:
    """A link that is closed once."""

    def __init__(self, detach: Callable[[], object]) -> None:
        self._detach: Callable[[], object] | None = detach

    def close(self) -> None:
        detach, self._detach = self._detach, None
        if detach is not None:
            detach()


def _close_all(links: Sequence[Link]) -> None:
    for link in links:
        link.close()


def sees_tracepoints() -> bool:
    """Return whether tracefs is mounted and open to us where libbpf and bcc look tracepoints' ids up."""
    found = next((path for path in TRACEFS if os.path.exists(path)), TRACEFS[-1])  # noqa: PTH110 - see probes.py
    return os.access(f"{found}/events/sched", os.R_OK | os.X_OK)


def _error(what: str) -> RefusedError:
    number = ctypes.get_errno()
    return refused(OSError(number, os.strerror(number)), what)
