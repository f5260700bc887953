"""A user's own bcc program (``pasta-otel agent --probe FILE.c``): attached by bcc's naming rules, its events exported.

Functions named ``tracepoint__CATEGORY__EVENT`` or ``raw_tracepoint__EVENT`` attach themselves. What else is to be
attached stands in a YAML beside the file: ``programs: [{program: on_call, uprobe: /path/lib.so, symbol: name}, ...]``.
Everything submitted to a BPF_RINGBUF_OUTPUT or BPF_PERF_OUTPUT is an event; its fields are those of the C structure.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from pasta_otel.ebpf.loaders.bcc import compile_program, import_bcc
from pasta_otel.ebpf.ports import Refusal, RefusedError
from pasta_otel.ebpf.start_reason import start_reason
from pasta_otel.errors import InputError

QUEUE = 10_000
"""Most events that wait for the next poll; further ones are dropped and counted."""
FieldValue = int | float | str


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
    """One loaded program.

    Args:
        path: Its source.
        module: The module ``bcc``; imported when it is None.

    Raises:
        RefusedError: It does not compile, load or attach.
        InputError: The YAML beside it cannot be used.
    """

    def __init__(self, path: Path, module: Any = None) -> None:
        self.name = path.name.partition(".")[0]
        self._waiting: list[UserEvent] = []
        self.counts: Counter[tuple[str, str]] = Counter()  # by table and outcome: ok, lost, dropped
        wanted = _attachments(path.with_suffix(".yaml"))
        module = module or import_bcc()
        try:
            self._bpf = compile_program(module, path.read_bytes())
            for attach in (partial(_attach, self._bpf, item) for item in wanted):
                attach()
            self._open(module)
        except RefusedError:
            raise
        except Exception as error:
            text = f"{path}: {str(error).strip()[-500:]}"
            raise RefusedError(Refusal(start_reason(str(error)), 0, text)) from error

    def _open(self, module: Any) -> None:
        ring, perf = module.table.RingBuf, module.table.PerfEventArray
        self._rings = self._perfs = False
        self._tables: list[Any] = []
        for name, table in _outputs(module, self._bpf, (ring, perf)):
            take = self._taker(name, table)
            self._tables.append(table)
            if isinstance(table, ring):
                table.open_ring_buffer(take)
                self._rings = True
            else:
                table.open_perf_buffer(take, lost_cb=partial(self._lost, name))
                self._perfs = True

    def _taker(self, name: str, table: Any) -> Callable[[Any, Any, int], None]:
        def take(_: Any, data: Any, _size: int) -> None:
            if len(self._waiting) >= QUEUE:
                self.counts[name, "dropped"] += 1
                return
            self.counts[name, "ok"] += 1
            self._waiting.append(UserEvent(self.name, name, _fields(table.event(data))))

        return take

    def _lost(self, name: str, count: int) -> None:
        self.counts[name, "lost"] += count

    def poll(self) -> list[UserEvent]:
        """Return the events since the last poll."""
        if self._rings:
            self._bpf.ring_buffer_consume()
        if self._perfs:
            self._bpf.perf_buffer_poll(0)
        events, self._waiting = self._waiting, []
        return events

    def close(self) -> None:
        """Detach and unload; bcc's own clean-up forgets perf buffers, and then fails on them."""
        for table in self._tables:
            for key in [*getattr(table, "_open_key_fds", ())]:
                del table[key]
        self._bpf.cleanup()


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


def _attachments(path: Path) -> list[Mapping[str, str]]:
    if not path.exists():
        return []
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise InputError("not valid YAML", file=str(path)) from error
    items = document.get("programs") if isinstance(document, dict) else None
    if not isinstance(items, list) or not all(isinstance(item, dict) and "program" in item for item in items):
        raise InputError("expected a list of {program, tracepoint | uprobe, symbol}", file=str(path), field="programs")
    return items


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
