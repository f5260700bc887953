"""A user's own bcc program (``pasta-otel agent --probe FILE.c``): attached by bcc's naming rules, its events exported.

Functions named ``tracepoint__CATEGORY__EVENT`` or ``raw_tracepoint__EVENT`` attach themselves. What else is to be
attached stands in a YAML beside the file: ``programs: [{program: on_call, uprobe: /path/lib.so, symbol: name}, ...]``.
Everything submitted to a BPF_RINGBUF_OUTPUT or BPF_PERF_OUTPUT is an event; its fields are those of the C structure.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from pasta_otel.ebpf.loaders.bcc import compile_program, import_bcc, refusing
from pasta_otel.ebpf.ports import Refusal, RefusedError
from pasta_otel.ebpf.ring import HEADER
from pasta_otel.ebpf.start_reason import HELP, lockdown_reason, read_lockdown
from pasta_otel.ebpf.syscall import map_size
from pasta_otel.errors import InputError

QUEUE = 10_000
"""Most events that wait for the next poll; further ones are dropped and counted."""
READ_EVERY_S = 0.01
TIMES = ("start_ns", "end_ns", "time_ns", "ts")
"""Fields that are taken as CLOCK_MONOTONIC."""
FieldValue = int | float | str
log = logging.getLogger(__name__)
_KEYS = frozenset({"program", "tracepoint", "uprobe", "symbol", "return"})


class UserEvent(NamedTuple):
    """One event of a user's program.

    Attributes:
        program: File name without its suffix.
        table: The output it came through.
        fields: Its C structure's fields; arrays of char as text, other arrays left out.
    """

    program: str
    table: str
    fields: Mapping[str, FieldValue]


class UserProgram:
    """One loaded program, whose outputs a thread of its own reads from ``start`` on.

    Args:
        path: Its source.
        module: The module ``bcc``; imported when it is None.
        sys_root: ``/sys``.

    Raises:
        RefusedError: The kernel is locked down, or the program does not compile, load or attach.
        InputError: It, or the YAML beside it, cannot be used.
    """

    def __init__(self, path: Path, module: Any = None, sys_root: Path = Path("/sys")) -> None:
        self.name = path.name.partition(".")[0]
        self.counts: Counter[tuple[str, str]] = Counter()  # by table and outcome
        self._waiting: deque[UserEvent] = deque()
        self._rings: list[_RingLevel] = []
        self._perfs = False
        self._tables: list[Any] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        source, wanted = _source(path), _attachments(path.with_suffix(".yaml"))
        locked = lockdown_reason(read_lockdown(sys_root))
        if locked is not None:
            raise RefusedError(Refusal(locked, 0, HELP[locked]))
        module = module or import_bcc()
        with refusing(str(path)):
            self._bpf = compile_program(module, source)
        try:
            with refusing(str(path)):
                for item in wanted:
                    _attach(self._bpf, item)
                self._open(module)
        except RefusedError:
            self.close()
            raise

    def _open(self, module: Any) -> None:
        ring, perf = module.table.RingBuf, module.table.PerfEventArray
        for name, table in _outputs(module, self._bpf, (ring, perf)):
            self._tables.append(table)
            if isinstance(table, ring):
                level = _RingLevel(name, table.map_fd)
                self._rings.append(level)
                table.open_ring_buffer(self._taker(name, table, level))
            else:
                table.open_perf_buffer(self._taker(name, table), lost_cb=partial(self._lost, name))
                self._perfs = True

    def _taker(self, name: str, table: Any, level: _RingLevel | None = None) -> Callable[[Any, Any, int], None]:
        def take(_: Any, data: Any, size: int) -> None:
            if level is not None:
                level.largest = max(level.largest, size)
            if len(self._waiting) >= QUEUE:
                self.counts[name, "dropped"] += 1
                return
            self._waiting.append(UserEvent(self.name, name, _fields(table.event(data))))

        return take

    def _lost(self, name: str, count: int) -> None:
        self.counts[name, "lost"] += count

    def start(self) -> None:
        """Read the outputs every few milliseconds from now on: a user's ring is small, and says nothing of losses."""
        self._thread = threading.Thread(target=self._read_on, name=f"pasta-probe-{self.name}", daemon=True)
        self._thread.start()

    def _read_on(self) -> None:
        while not self._stop.wait(READ_EVERY_S):
            try:
                self._read()
            except Exception:
                log.exception("reading what %s submits, which ends", self.name)
                return

    def _read(self) -> None:
        full = [ring for ring in self._rings if ring.note()]
        if self._rings:
            self._bpf.ring_buffer_consume()
        if self._perfs:
            self._bpf.perf_buffer_poll(0)
        for ring in full:
            if ring.was_full():
                self.counts[ring.name, "full"] += 1

    def poll(self, monotonic_ns: Callable[[], int]) -> list[UserEvent]:
        """Return the events since the last poll; those with impossible times are counted and left out.

        Args:
            monotonic_ns: Tells the present, which no event can be later than.
        """
        waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
        now = monotonic_ns()
        events = []
        for event in waiting:
            good = all(_is_time(event.fields[name], now) for name in TIMES if name in event.fields)
            self.counts[event.table, "ok" if good else "invalid"] += 1
            if good:
                events.append(event)
        return events

    def stop(self) -> None:
        """Read once more what was submitted, and then no longer."""
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
            self._read()

    def close(self) -> None:
        """Detach and unload; bcc's own clean-up forgets perf buffers, and then fails on them."""
        self.stop()
        while self._rings:
            self._rings.pop().close()
        for table in self._tables:
            for key in [*getattr(table, "_open_key_fds", ())]:
                del table[key]
        self._bpf.cleanup()


class _RingLevel:
    """How full a ring buffer is: the kernel neither counts nor tells what found no room in it.

    Room is freed by its reader alone. So what found none since the last reading, if anything, left it full.

    Args:
        name: The ring's name.
        fd: Its descriptor.
    """

    def __init__(self, name: str, fd: int) -> None:
        self.name, self.largest = name, 0
        self._size = map_size(fd)
        self._consumer = mmap.mmap(fd, mmap.PAGESIZE, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        self._producer = mmap.mmap(fd, mmap.PAGESIZE, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=mmap.PAGESIZE)
        self._free = self._size

    def note(self) -> bool:
        """Remember how much room there is; return whether there is anything to read."""
        used = int.from_bytes(self._producer[:8], "little") - int.from_bytes(self._consumer[:8], "little")
        self._free = self._size - used
        return used > 0

    def was_full(self) -> bool:
        """Return whether the largest record so far would have found no room."""
        return self._free < (self.largest + HEADER + 7) & ~7

    def close(self) -> None:
        """Unmap."""
        self._consumer.close()
        self._producer.close()


def _is_time(value: FieldValue, now_monotonic_ns: int) -> bool:
    return isinstance(value, int) and 0 <= value <= now_monotonic_ns


def _outputs(module: Any, bpf: Any, kinds: tuple[type, ...]) -> list[tuple[str, Any]]:
    library = module.libbcc.lib
    library.bpf_num_tables.argtypes = [ctypes.c_void_p]
    library.bpf_table_name.restype, library.bpf_table_name.argtypes = (
        ctypes.c_char_p,
        [ctypes.c_void_p, ctypes.c_size_t],
    )
    names = [library.bpf_table_name(bpf.module, place) for place in range(library.bpf_num_tables(bpf.module))]
    named = ((name.decode(), bpf[name]) for name in names)
    return [(name, table) for name, table in named if isinstance(table, kinds)]


def _source(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", file=str(path), field="--probe") from error


def _attachments(path: Path) -> list[Mapping[str, Any]]:
    """Return what the YAML beside a program asks for, checked."""
    if not path.exists():
        return []
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError("not valid YAML", file=str(path)) from error
    items = document.get("programs") if isinstance(document, dict) else None
    if not isinstance(items, list):
        raise InputError("expected a list of {program, tracepoint | uprobe, symbol}", file=str(path), field="programs")
    for place, item in enumerate(items):
        _check(item, str(path), f"programs[{place}]")
    return items


def _check(item: Any, file: str, field: str) -> None:
    if not isinstance(item, dict):
        raise InputError("expected {program, tracepoint | uprobe, symbol}", file=file, field=field)
    if unknown := sorted(str(key) for key in item.keys() - _KEYS):
        words = f"unknown; expected some of {', '.join(sorted(_KEYS))}"
        raise InputError(words, file=file, field=f"{field}.{unknown[0]}")
    needed = ("program", "tracepoint") if "tracepoint" in item else ("program", "uprobe", "symbol")
    for key in needed:
        if not isinstance(item.get(key), str) or not item[key]:
            raise InputError("expected a text", file=file, field=f"{field}.{key}")
    if ("tracepoint" in item) == ("uprobe" in item):
        raise InputError("expected either a tracepoint or a uprobe", file=file, field=field)
    if not isinstance(item.get("return", False), bool):
        raise InputError("expected true or false", file=file, field=f"{field}.return")


def _attach(bpf: Any, item: Mapping[str, str]) -> None:
    function = item["program"].encode()
    if "tracepoint" in item:
        bpf.attach_tracepoint(tp=item["tracepoint"].encode(), fn_name=function)
        return
    attach = bpf.attach_uretprobe if item.get("return") else bpf.attach_uprobe
    attach(name=item["uprobe"].encode(), sym=item["symbol"].encode(), fn_name=function)


def _fields(event: Any) -> dict[str, FieldValue]:
    found: dict[str, FieldValue] = {}
    for name, *_ in event._fields_:
        value = getattr(event, name)
        if isinstance(value, bytes):
            found[name] = value.decode("utf-8", "replace")
        elif isinstance(value, ctypes.Array):
            if value._type_ in {ctypes.c_ubyte, ctypes.c_char}:
                found[name] = bytes(value).hex()
        elif isinstance(value, (int, float)):
            found[name] = value
    return found
