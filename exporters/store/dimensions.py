"""Numbers for what repeats: operations, resources, edges, modules and routes, each written once."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)

OTHER = "other"  # key that stands for all further ones once a dimension is full
LIMIT = 200_000  # of each dimension; a service that puts ids into span names must not exhaust memory


class Dimension(Generic[K]):
    """Keys by number, in the order in which they first came; writes what is new with the rows that use it."""

    def __init__(self, table: str, row: Callable[[K], Sequence[Any]], overflow: K, limit: int = LIMIT) -> None:
        self.table, self._row, self._overflow, self._limit = table, row, overflow, limit
        self._ids: dict[K, int] = {}
        self._keys: list[K] = []
        self._unwritten = 0

    def load(self, keys: Sequence[K]) -> None:
        """Take over the keys of an existing file, in the order of their numbers."""
        self._keys = list(keys)
        self._ids = {key: number for number, key in enumerate(self._keys)}
        self._unwritten = len(self._keys)

    def id_of(self, key: K) -> int:
        """Return the key's number, giving it one if it is new."""
        number = self._ids.get(key)
        if number is not None:
            return number
        if len(self._keys) >= self._limit and key != self._overflow:
            return self.id_of(self._overflow)
        number = len(self._keys)
        self._keys.append(key)
        self._ids[key] = number
        return number

    def keys(self) -> list[K]:
        """Return all keys; the position is the number. Safe beside the writer."""
        return self._keys[:]

    def key(self, number: int) -> K:
        """Return the key of a number."""
        return self._keys[number]

    def write_new(self, connection: Any) -> None:
        """Insert the keys that are not in the file yet; the caller holds the transaction and calls ``written``."""
        new = self._keys[self._unwritten :]
        if new:
            rows = [[self._unwritten + offset, *self._row(key)] for offset, key in enumerate(new)]
            marks = ", ".join("?" * len(rows[0]))
            connection.executemany(f"insert into {self.table} values ({marks})", rows)  # noqa: S608 - our own names

    def written(self) -> None:
        """Note that everything up to now is in the file."""
        self._unwritten = len(self._keys)


OperationId = tuple[str, str, int]
"""Service, operation, OTLP SpanKind."""


class Dimensions:
    """The store's dimensions; numbers are given by the writer's thread only, read by all."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.operations: Dimension[OperationId] = Dimension("operations", list, (OTHER, OTHER, 1))
        self.resources: Dimension[tuple[str, str]] = Dimension("resources", list, (OTHER, "{}"))
        self.edges: Dimension[tuple[str, str]] = Dimension("edges", list, (OTHER, OTHER))
        self.modules: Dimension[tuple[str, str]] = Dimension("modules", list, (OTHER, OTHER))
        self.routes: Dimension[frozenset[int]] = Dimension("routes", lambda ops: [sorted(ops)], frozenset())

    @property
    def all(self) -> tuple[Dimension[Any], ...]:
        """Return every dimension."""
        return (self.operations, self.resources, self.edges, self.modules, self.routes)

    def load(self, connection: Any) -> None:
        """Read the dimensions of an existing file."""
        for dimension in self.all:
            rows = connection.execute(f"select * from {dimension.table} order by 1").fetchall()  # noqa: S608
            if dimension is self.routes:
                dimension.load([frozenset(row[1]) for row in rows])
            else:
                dimension.load([tuple(row[1:]) for row in rows])

    def write_new(self, connection: Any) -> None:
        """Write what is new of every dimension."""
        for dimension in self.all:
            dimension.write_new(connection)

    def written(self) -> None:
        """Note that the transaction was committed."""
        for dimension in self.all:
            dimension.written()

    def routes_through(self, service: str, operation: str) -> list[int]:
        """Return the routes in which this operation took part as a server span; ``*`` is any operation."""
        servers = {
            number
            for number, (name, span_name, kind) in enumerate(self.operations.keys())
            if kind == 2 and name == service and operation in ("*", span_name)
        }
        return [number for number, ops in enumerate(self.routes.keys()) if servers & ops]


def resource_json(attributes: Any) -> str:
    """Return a resource's attributes as the text that is stored."""
    return json.dumps(attributes, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
