"""The few commands of bpf(2) that both loaders need: maps by descriptor, uprobe_multi links, program statistics.

Layouts: ``union bpf_attr`` in include/uapi/linux/bpf.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterator, Sequence

from pasta_otel.ebpf.uname import host_machine

NUMBER = {"x86_64": 321, "aarch64": 280}
MAP_LOOKUP, MAP_UPDATE, MAP_DELETE, MAP_NEXT_KEY, INFO_BY_FD, MAP_LOOKUP_BATCH = 1, 2, 3, 4, 15, 24
LINK_CREATE, ENABLE_STATS = 28, 32
TRACE_UPROBE_MULTI = 48
UPROBE_MULTI_RETURN = 1
STATS_RUN_TIME = 0
BATCH = 1024
PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}
PERF_ATTR_SIZE, PERF_CLOSE_ON_EXEC = 112, 8
PERF_EVENTS = {"major_faults": (1, 6)}
"""Type and config of perf_event_open(2): PERF_TYPE_SOFTWARE and its counters."""
_PROG_INFO_RUN = 192  # offset of run_time_ns in struct bpf_prog_info; run_cnt follows
_MAP_INFO_MAX_ENTRIES = 16  # offset of max_entries in struct bpf_map_info

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_number = ctypes.c_long(NUMBER.get(host_machine(), -1))


def bpf(command: int, attribute: bytes | ctypes.Array[ctypes.c_char]) -> int:
    """Have the kernel carry out one BPF command.

    Raises:
        OSError: The kernel refused; with its errno.
    """
    buffer = (
        attribute if isinstance(attribute, ctypes.Array) else ctypes.create_string_buffer(attribute, len(attribute))
    )
    result = int(_libc.syscall(_number, ctypes.c_int(command), buffer, ctypes.c_uint(len(buffer))))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


class BpfMap:
    """A map by its descriptor, which its loader owns. Keys and values are bytes.

    Args:
        fd: The descriptor.
        key_size: Bytes of a key.
        value_size: Bytes of a value; per CPU for a per-CPU map.
        cpus: Possible CPUs for a per-CPU map, else 1.
    """

    def __init__(self, fd: int, key_size: int, value_size: int, cpus: int = 1) -> None:
        self.fd, self._cpus = fd, cpus
        self._stride = value_size if cpus == 1 else (value_size + 7) & ~7
        self._size = value_size
        self._key = ctypes.create_string_buffer(key_size)
        self._next = ctypes.create_string_buffer(key_size)
        self._value = ctypes.create_string_buffer(self._stride * cpus)

    def _command(self, command: int, value: ctypes.Array[ctypes.c_char] | None, flags: int = 0) -> int:
        address = ctypes.addressof(value) if value is not None else 0
        return bpf(command, struct.pack("<IIQQQ", self.fd, 0, ctypes.addressof(self._key), address, flags))

    def get(self, key: bytes) -> bytes | None:
        """Return the value, or None; of a per-CPU map all CPUs' values one after another."""
        self._key.raw = key
        try:
            self._command(MAP_LOOKUP, self._value)
        except FileNotFoundError:
            return None
        return self._value.raw

    def per_cpu(self, key: bytes) -> list[bytes]:
        """Return a per-CPU map's values, one a CPU."""
        raw = self.get(key) or b""
        return [raw[start : start + self._size] for start in range(0, len(raw), self._stride)]

    def put(self, key: bytes, value: bytes) -> None:
        """Set a value."""
        self._key.raw = key
        self._value.raw = value
        self._command(MAP_UPDATE, self._value)

    def delete(self, key: bytes) -> bool:
        """Remove a key; False when it was not there."""
        self._key.raw = key
        try:
            self._command(MAP_DELETE, None)
        except FileNotFoundError:
            return False
        return True

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield a hash map's entries, in batches where the kernel can (5.6), else one by one."""
        try:
            yield from self._batches()
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.ENOTSUPP if hasattr(errno, "ENOTSUPP") else 524}:
                raise
            yield from self._one_by_one()

    def _batches(self) -> Iterator[tuple[bytes, bytes]]:
        width, size = len(self._key), len(self._value)
        keys, values = ctypes.create_string_buffer(width * BATCH), ctypes.create_string_buffer(size * BATCH)
        cursors = (ctypes.create_string_buffer(max(width, 8)), ctypes.create_string_buffer(max(width, 8)))
        previous, done = 0, False
        while not done:
            attribute = ctypes.create_string_buffer(56)
            struct.pack_into(
                "<QQQQIIQQ", attribute, 0, previous, ctypes.addressof(cursors[0]),
                ctypes.addressof(keys), ctypes.addressof(values), BATCH, self.fd, 0, 0,
            )  # fmt: skip
            try:
                bpf(MAP_LOOKUP_BATCH, attribute)
            except FileNotFoundError:  # the end was reached; what came with it counts
                done = True
            found = struct.unpack_from("<I", attribute, 32)[0]
            raw_keys, raw_values = keys.raw, values.raw
            for place in range(found):
                yield raw_keys[place * width : (place + 1) * width], raw_values[place * size : (place + 1) * size]
            cursors = (cursors[1], cursors[0])
            previous = ctypes.addressof(cursors[1])

    def _one_by_one(self) -> Iterator[tuple[bytes, bytes]]:
        key: bytes | None = None
        while True:
            address = 0
            if key is not None:
                self._key.raw = key
                address = ctypes.addressof(self._key)
            try:
                bpf(MAP_NEXT_KEY, struct.pack("<IIQQ", self.fd, 0, address, ctypes.addressof(self._next)))
            except FileNotFoundError:
                return
            key = self._next.raw
            value = self.get(key)
            if value is not None:
                yield key, value


def possible_cpus(text: str | None = None) -> int:
    """Return how many values a per-CPU map has, from the text of ``/sys/devices/system/cpu/possible``."""
    if text is None:
        with open("/sys/devices/system/cpu/possible", encoding="ascii") as file:  # noqa: PTH123 - pathlib costs start time
            text = file.read()
    return 1 + max(int(part.split("-")[-1]) for part in text.strip().split(","))


def online_cpus(text: str | None = None) -> list[int]:
    """Return the CPUs that run, from the text of ``/sys/devices/system/cpu/online``."""
    if text is None:
        with open("/sys/devices/system/cpu/online", encoding="ascii") as file:  # noqa: PTH123 - as above
            text = file.read()
    ends = [[int(end) for end in part.split("-")] for part in text.strip().split(",")]
    return [cpu for pair in ends for cpu in range(pair[0], pair[-1] + 1)]


def open_perf_event(kind: int, config: int, cpu: int) -> int:
    """Open an event of perf that fires every time, for all processes on one CPU.

    Raises:
        OSError: The kernel refused.
    """
    attribute = ctypes.create_string_buffer(struct.pack("<IIQQ", kind, PERF_ATTR_SIZE, config, 1), PERF_ATTR_SIZE)
    number = ctypes.c_long(PERF_EVENT_OPEN.get(host_machine(), -1))
    fd = int(
        _libc.syscall(
            number, attribute, ctypes.c_int(-1), ctypes.c_int(cpu), ctypes.c_int(-1), ctypes.c_ulong(PERF_CLOSE_ON_EXEC)
        )
    )
    if fd < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return fd


def link_uprobes(program_fd: int, path: str, offsets: Sequence[int], cookies: Sequence[int], *, returning: bool) -> int:
    """Attach a program to many places of one file, for all processes; return the link's descriptor.

    Needs Linux 6.6, and only CAP_BPF and CAP_PERFMON.

    Raises:
        OSError: The kernel refused.
    """
    name = ctypes.create_string_buffer(os.fsencode(path))
    places = (ctypes.c_uint64 * len(offsets))(*offsets)
    marks = (ctypes.c_uint64 * len(cookies))(*cookies)
    attribute = struct.pack(
        "<IIIIQQQQIIII", program_fd, 0, TRACE_UPROBE_MULTI, 0, ctypes.addressof(name), ctypes.addressof(places), 0,
        ctypes.addressof(marks), len(offsets), UPROBE_MULTI_RETURN if returning else 0, 0, 0,
    )  # fmt: skip
    return bpf(LINK_CREATE, attribute)


def enable_run_time() -> int:
    """Make the kernel measure the run time of BPF programs while the returned descriptor is open (Linux 5.8)."""
    return bpf(ENABLE_STATS, struct.pack("<II", STATS_RUN_TIME, 0))


def run_time(program_fd: int) -> tuple[int, int]:
    """Return a program's run time in nanoseconds and its number of runs, as far as statistics were enabled."""
    info = ctypes.create_string_buffer(256)
    bpf(INFO_BY_FD, struct.pack("<IIQ", program_fd, len(info), ctypes.addressof(info)))
    nanoseconds, runs = struct.unpack_from("<QQ", info, _PROG_INFO_RUN)
    return nanoseconds, runs


def map_size(map_fd: int) -> int:
    """Return a map's ``max_entries``: of a ring buffer, its bytes."""
    info = ctypes.create_string_buffer(256)
    bpf(INFO_BY_FD, struct.pack("<IIQ", map_fd, len(info), ctypes.addressof(info)))
    return int(struct.unpack_from("<I", info, _MAP_INFO_MAX_ENTRIES)[0])
