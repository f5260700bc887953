"""Traces that are still arriving, and the times that are written when one settles or closes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from pasta_otel import semconv
from pasta_otel.correlate import SpanFlag
from pasta_otel.exporters.store.closing import Forest, resolve
from pasta_otel.exporters.store.columns import MAX_INT64, Columns, concatenate, texts
from pasta_otel.exporters.store.dimensions import Dimensions

ROLE_OPERATION, ROLE_EDGE, ROLE_MODULE = 1, 2, 3
_SERVER, _CLIENT, _PRODUCER = 2, 3, 4
_NOT_A_MODULE = -1
_ERROR = 2  # OTLP StatusCode
_LEARNED_LIMIT = 10_000
UNKNOWN_CALLEE = "unknown"
HELD_COLUMNS = (
    "trace_hi", "trace_lo", "span_id", "parent_span_id", "op_id", "raw_start_unix_nano", "end_unix_nano", "duration_ns",
    "status", "flags", "attributes",
)  # fmt: skip
"""What ``OpenTraces.add`` reads of the columns of ``spans``."""


@dataclass(frozen=True, slots=True)
class Closing:
    """When a trace's times are written; monotonic nanoseconds.

    Attributes:
        settle_quiet_ns: A complete trace is written after this long without a new span; should one come later, its rows
            are replaced. Complete: there is a root, no parent is missing (but that of a server span: its caller may not
            be traced), and no client span waits for a service that is known to send spans.
        root_grace_ns: A trace is written this long after its first root or server span, complete or not.
        close_quiet_ns: A trace without a new span for this long is written, complete or not, and forgotten.
        max_open_ns: A trace is closed this long after its first span, whatever still comes.
        max_open_spans: Beyond this many held spans the longest quiet traces are closed.
    """

    settle_quiet_ns: int = 300_000_000
    root_grace_ns: int = 2_000_000_000
    close_quiet_ns: int = 10_000_000_000
    max_open_ns: int = 300_000_000_000
    max_open_spans: int = 300_000


@dataclass(frozen=True, slots=True)
class Times:
    """Rows for ``span_times``, and the traces whose earlier rows they replace."""

    columns: Columns
    replaced: list[tuple[int, int]]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.columns["span_id"])


class _Slots:
    """State per open trace, in arrays that grow."""

    def __init__(self, capacity: int = 1024) -> None:
        self.of: dict[tuple[int, int], int] = {}
        self.key: list[tuple[int, int] | None] = []
        self.free: list[int] = []
        self.first, self.last, self.root = (np.zeros(capacity, dtype=np.int64) for _ in range(3))
        self.dirty, self.written, self.tried = (np.zeros(capacity, dtype=bool) for _ in range(3))

    def take(self, key: tuple[int, int], now_ns: int) -> int:
        slot = self.free.pop() if self.free else len(self.key)
        if slot == len(self.key):
            self.key.append(None)
            if slot == len(self.first):
                self._grow()
        self.of[key], self.key[slot] = slot, key
        self.first[slot], self.root[slot] = now_ns, 0
        self.written[slot] = False
        return slot

    def drop(self, slots: NDArray[np.int64]) -> None:
        for slot in slots.tolist():
            key = self.key[slot]
            if key is not None:
                del self.of[key]
                self.key[slot] = None
                self.free.append(slot)
        self.dirty[slots] = False

    def _grow(self) -> None:
        for name in ("first", "last", "root", "dirty", "written", "tried"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros_like(old)]))

    def live(self) -> NDArray[np.bool_]:
        mask = np.zeros(len(self.first), dtype=bool)
        mask[list(self.of.values())] = True
        return mask


class OpenTraces:
    """Hold spans by trace and say which rows are due; used by the writer's thread only."""

    def __init__(self, dimensions: Dimensions, closing: Closing) -> None:
        self._dimensions, self._closing = dimensions, closing
        self._slots = _Slots()
        self._chunks: list[Columns] = []
        self._edges = _EdgeNames()
        self.spans = 0

    def add(self, columns: Columns, now_ns: int) -> None:
        """Take a written batch, in the columns of ``spans``."""
        slots, index = self._slots, self._slots.of
        keys = zip(columns["trace_hi"].tolist(), columns["trace_lo"].tolist(), strict=True)
        slot = np.array(
            [found if (found := index.get(key)) is not None else slots.take(key, now_ns) for key in keys],
            dtype=np.int64,
        )
        slots.last[slot] = now_ns
        slots.dirty[slot] = True
        slots.tried[slot] = False
        held = self._held(columns, slot)
        entry = slot[(held["parent_span_id"] == 0) | (held["kind"] == _SERVER)]
        slots.root[entry] = np.where(slots.root[entry] == 0, now_ns, slots.root[entry])
        self._chunks.append(held)
        self.spans += len(slot)

    def due(self, now_ns: int, *, everything: bool = False) -> Times | None:
        """Return the rows that are due now, or None; forgets the traces that closed."""
        if not self._chunks:
            return None
        slots, limits = self._slots, self._closing
        live = slots.live()
        quiet = now_ns - slots.last
        closed = live & (
            (quiet >= limits.close_quiet_ns)
            | (now_ns - slots.first >= limits.max_open_ns)
            | np.full_like(live, everything)
        )
        closed |= self._over_limit(live, quiet)
        dirty = live & slots.dirty
        settled = dirty & (quiet >= limits.settle_quiet_ns)
        forced = (dirty & closed) | (settled & (slots.root > 0) & (now_ns - slots.root >= limits.root_grace_ns))
        candidates = settled & ~slots.tried
        if not (forced.any() or candidates.any() or closed.any()):
            return None
        times = self._times(forced, candidates)
        self._forget(closed)
        return times

    def _over_limit(self, live: NDArray[np.bool_], quiet: NDArray[np.int64]) -> NDArray[np.bool_]:
        if self.spans <= self._closing.max_open_spans:
            return np.zeros_like(live)
        return live & (quiet >= np.median(quiet[live]))

    def _forget(self, closed: NDArray[np.bool_]) -> None:
        if not closed.any():
            return
        held = concatenate(self._chunks)
        keep = ~closed[held["slot"]]
        self.spans = int(keep.sum())
        self._chunks = [{name: column[keep] for name, column in held.items()}] if self.spans else []
        self._slots.drop(np.flatnonzero(closed))

    def _times(self, forced: NDArray[np.bool_], candidates: NDArray[np.bool_]) -> Times | None:
        held = concatenate(self._chunks)
        self._chunks = [held]
        picked = (forced | candidates)[held["slot"]]
        if not picked.any():
            return None
        rows = {name: column[picked] for name, column in held.items()}
        forest = resolve(rows["slot"], rows["span_id"], rows["parent_span_id"], rows["start"], rows["end"])
        callee_op, server_ns = _served(rows, forest.parent)
        waiting = self._edges.waiting(rows, callee_op)
        write = forced | (candidates & _complete(rows, forest, waiting, len(forced)))
        slots = self._slots
        replaced = [key for slot in np.flatnonzero(write & slots.written) if (key := slots.key[slot]) is not None]
        slots.tried |= candidates
        slots.dirty &= ~write
        slots.written |= write
        return Times(self._rows(rows, forest, callee_op, server_ns, write), replaced)

    def _held(self, columns: Columns, slot: NDArray[np.int64]) -> Columns:
        operations, inverse = np.unique(columns["op_id"], return_inverse=True)
        kinds = [self._dimensions.operations.key(number)[2] for number in operations.tolist()]
        kind = np.array(kinds, dtype=np.uint8)[inverse]
        module, target = self._named(columns, kind)
        start = np.minimum(columns["raw_start_unix_nano"], MAX_INT64).astype(np.int64)
        return {
            "slot": slot,
            "kind": kind,
            "module": module,
            "target": target,
            "start": start,
            "end": np.maximum(start, columns["end_unix_nano"]),
            "duration_ns": columns["duration_ns"],
            "error": columns["status"] == _ERROR,
            **{
                name: columns[name]
                for name in ("op_id", "end_unix_nano", "flags", "span_id", "parent_span_id", "trace_hi", "trace_lo")
            },
        }

    def _named(self, columns: Columns, kind: NDArray[np.uint8]) -> tuple[NDArray[np.int32], NDArray[np.object_]]:
        """Return the module of module spans and the address that client spans called."""
        attributes, operations = columns["attributes"], self._dimensions.operations
        module = np.full(len(kind), _NOT_A_MODULE, dtype=np.int32)
        target = texts([None] * len(kind))
        marker = f'"{semconv.MODULE_PATH}":'
        for row in np.flatnonzero(kind == 1).tolist():
            if marker in attributes[row]:
                path = json.loads(attributes[row])[semconv.MODULE_PATH]
                service = operations.key(columns["op_id"][row])[0]
                module[row] = self._dimensions.modules.id_of((service, str(path)))
        for row in np.flatnonzero(kind == _CLIENT).tolist():
            target[row] = called(json.loads(attributes[row]))
        return module, target

    def _rows(
        self,
        rows: Columns,
        forest: Forest,
        callee_op: NDArray[np.int64],
        server_ns: NDArray[np.int64],
        write: NDArray[np.bool_],
    ) -> Columns:
        kind = rows["kind"]
        role = np.where(kind == _CLIENT, ROLE_EDGE, np.where(rows["module"] >= 0, ROLE_MODULE, ROLE_OPERATION))
        key = np.where(role == ROLE_MODULE, rows["module"], rows["op_id"]).astype(np.int32)
        finished = (rows["flags"] & int(SpanFlag.UNFINISHED)) == 0
        out = write[rows["slot"]] & finished & (kind != _PRODUCER)
        clients = np.flatnonzero(out & (role == ROLE_EDGE))
        key[clients] = self._edges.ids(self._dimensions, rows, callee_op, clients)
        columns = {
            "end_unix_nano": rows["end_unix_nano"],
            "role": role.astype(np.uint8),
            "key_id": key,
            "route_id": self._routes(rows),
            "self_ns": np.where(rows["flags"] & int(SpanFlag.CLOCK_ANOMALY), 0, forest.self_ns),
            "gap_ns": np.maximum(0, rows["duration_ns"] - server_ns),
            "duration_ns": rows["duration_ns"],
            "error": rows["error"],
            "flags": (rows["flags"] | forest.flags).astype(np.uint8),
            **{name: rows[name] for name in ("trace_hi", "trace_lo", "span_id")},
        }
        return {name: column[out] for name, column in columns.items()}

    def _routes(self, rows: Columns) -> NDArray[np.int32]:
        """Return, per row, the number of its trace's set of server operations."""
        number = self._dimensions.routes.id_of
        route = np.full(int(rows["slot"].max()) + 1, number(frozenset()), dtype=np.int32)
        servers = rows["kind"] == _SERVER
        pairs = np.unique(rows["slot"][servers] << 32 | rows["op_id"][servers])  # both are small numbers
        slots, first = np.unique(pairs >> 32, return_index=True)
        operations = np.split(pairs & 0xFFFFFFFF, first[1:])
        for slot, served in zip(slots.tolist(), operations, strict=False):
            route[slot] = number(frozenset(served.tolist()))
        return route[rows["slot"]]


def _served(rows: Columns, parent: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return, per client span, the operation that served it (-1 = none) and the time its server spans took."""
    kind = rows["kind"]
    server_ns = np.zeros(len(kind), dtype=np.int64)
    callee_op = np.full(len(kind), -1, dtype=np.int64)
    servers = np.flatnonzero((kind == _SERVER) & (parent >= 0))
    servers = servers[kind[parent[servers]] == _CLIENT]
    np.add.at(server_ns, parent[servers], rows["duration_ns"][servers])
    callee_op[parent[servers[::-1]]] = rows["op_id"][servers[::-1]]
    return callee_op, server_ns


def _complete(rows: Columns, forest: Forest, waiting: NDArray[np.bool_], slots: int) -> NDArray[np.bool_]:
    """Say per trace whether a root is there, no parent is missing and no client span waits for its server span."""
    complete = np.zeros(slots, dtype=bool)
    orphan = (forest.flags & int(SpanFlag.ORPHAN)) != 0
    server = rows["kind"] == _SERVER
    complete[rows["slot"][(rows["parent_span_id"] == 0) | (orphan & server)]] = True
    complete[rows["slot"][(orphan & ~server) | waiting]] = False
    return complete


Target = tuple[str | None, str | None, int | None]
"""peer.service, address, port."""


def called(attributes: dict[str, Any]) -> Target:
    """Return whom a client span says it called; older HTTP conventions are read too."""
    peer = attributes.get(semconv.PEER_SERVICE)
    address = attributes.get(semconv.SERVER_ADDRESS) or attributes.get("net.peer.name")
    port = attributes.get("server.port") or attributes.get("net.peer.port")
    url = attributes.get("url.full") or attributes.get("http.url")
    if isinstance(url, str) and not (address and port):
        try:
            parts = urlsplit(url)
            address, port = address or parts.hostname, port or parts.port
        except ValueError:
            pass
    return (
        str(peer) if peer else None,
        str(address) if address else None,
        port if isinstance(port, int) else None,
    )


class _EdgeNames:
    """Name the callee: the server span's service, else peer.service, else what this address was before, else it."""

    def __init__(self) -> None:
        self._learned: dict[tuple[str, int | None], str] = {}

    def ids(
        self, dimensions: Dimensions, rows: Columns, callee_op: NDArray[np.int64], clients: NDArray[np.int64]
    ) -> Sequence[int]:
        operation, number = dimensions.operations.key, dimensions.edges.id_of
        columns = (rows["op_id"][clients], callee_op[clients], rows["target"][clients])
        calls = list(zip(*(column.tolist() for column in columns), strict=True))
        known: dict[tuple[int, int, Target], int] = {}
        for call in dict.fromkeys(calls):
            client_op, server_op, target = call
            served_by = operation(server_op)[0] if server_op >= 0 else None
            known[call] = number((operation(client_op)[0], self._callee(served_by, target)))
        return [known[call] for call in calls]

    def waiting(self, rows: Columns, callee_op: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Say which client spans have no server span although what they called is known to send spans."""
        waiting = np.zeros(len(callee_op), dtype=bool)
        for row in np.flatnonzero((rows["kind"] == _CLIENT) & (callee_op < 0)).tolist():
            waiting[row] = rows["target"][row][1:] in self._learned
        return waiting

    def _callee(self, served_by: str | None, target: Target) -> str:
        peer, address, port = target
        if served_by is not None:
            if address and len(self._learned) < _LEARNED_LIMIT:
                self._learned[address, port] = served_by
            return served_by
        if peer or not address:
            return peer or UNKNOWN_CALLEE
        return self._learned.get((address, port), address)
