"""The store's tables, their version, and opening a file that may belong to somebody else."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

from pasta_otel.errors import InputError, MissingError

SCHEMA_VERSION = 1
MEMORY = ":memory:"

# Times are nanoseconds since the epoch. `end_unix_nano` is the event's time: the raw end, within int64; 0 = unfinished.
# Ids are two's halves of the wire form, big endian. Rows refer to operations, resources, edges, modules and routes by
# number, so that grouping never touches text.
_TABLES = """
create table meta (key varchar primary key, value varchar);
create table operations (op_id integer, service varchar, operation varchar, kind utinyint);
create table resources (resource_id integer, service varchar, attributes varchar);
create table edges (edge_id integer, caller varchar, callee varchar);
create table modules (module_id integer, service varchar, module varchar);
create table routes (route_id integer, op_ids integer[]);
create table spans (
  end_unix_nano bigint, op_id integer, duration_ns bigint, status utinyint, flags utinyint, weight double,
  lateness_ns bigint, resource_id integer, trace_hi ubigint, trace_lo ubigint, span_id ubigint, parent_span_id ubigint,
  raw_start_unix_nano ubigint, raw_end_unix_nano ubigint, scope varchar, status_message varchar, trace_state varchar,
  attributes varchar, events varchar, links varchar
);
create table span_times (
  end_unix_nano bigint, role utinyint, key_id integer, route_id integer, self_ns bigint, gap_ns bigint,
  duration_ns bigint, error boolean, flags utinyint, trace_hi ubigint, trace_lo ubigint, span_id ubigint
);
create table host_samples (time_unix_nano bigint, service varchar, pid integer, metric varchar, value double);
"""
# from version N to N + 1: statements; empty as long as there is one version
MIGRATIONS: dict[int, str] = {}


def connect(path: str, *, memory_limit_bytes: int, threads: int) -> Any:
    """Open a store file, creating or migrating it.

    Raises:
        MissingError: DuckDB is not installed, or another process holds the file; names its pid.
        InputError: The file is not a store, or is of a version that cannot be migrated.
    """
    try:
        import duckdb  # noqa: PLC0415 - an optional extra, needed only here
    except ImportError as error:
        raise MissingError("the span store needs DuckDB", how="pip install 'pasta-otel[sidecar]'") from error
    config = {
        "threads": threads,
        "memory_limit": f"{memory_limit_bytes // 1024}KiB",
        "autoinstall_known_extensions": False,  # a store must not fetch code from the network
    }
    try:
        connection = duckdb.connect(path, config=config)
    except duckdb.Error as error:
        raise _cannot_open(path, str(error)) from error
    try:
        _prepare(connection, path)
    except duckdb.Error as error:
        connection.close()
        raise damaged(path, error) from error
    except BaseException:
        connection.close()
        raise
    return connection


def damaged(path: str, error: Exception) -> InputError:
    """Return what to say of a file that opens but cannot be read."""
    why = (str(error).splitlines() or [type(error).__name__])[0]
    return InputError(f"is damaged ({why}); move it away to start anew, or restore it", file=path, kind="store")


def _cannot_open(path: str, why: str) -> InputError | MissingError:
    holder = re.search(r"PID (\d+)", why)
    if holder:
        how = "ask it by HTTP (--server), or stop it first"
        return MissingError(f"{path} is held by process {holder.group(1)}", how=how)
    if "lock" in why.lower():
        return MissingError(f"{path} is held by another process", how="ask it by HTTP (--server), or stop it first")
    if not Path(path).parent.is_dir():
        return InputError("its folder does not exist", file=path, kind="store")
    return InputError(f"cannot be opened as a span store ({why.splitlines()[0]})", file=path, kind="store")


def _prepare(connection: Any, path: str) -> None:
    tables = {row[0] for row in connection.execute("select table_name from duckdb_tables()").fetchall()}
    if not tables:
        with_transaction(connection, _create)
        return
    if "meta" not in tables:
        raise InputError("is a DuckDB file, but not a span store", file=path, kind="store")
    rows = connection.execute("select value from meta where key = 'schema_version'").fetchall()
    version = int(rows[0][0]) if rows and str(rows[0][0]).isdecimal() else -1
    while version in MIGRATIONS:
        statements, version = MIGRATIONS[version], version + 1
        with_transaction(connection, lambda target, text=statements, to=version: _migrate(target, text, to))
    if version != SCHEMA_VERSION:
        raise InputError(
            f"has schema version {version}; this program reads {SCHEMA_VERSION}", file=path, kind="store_version"
        )


def _create(connection: Any) -> None:
    connection.execute(_TABLES)
    facts = {"schema_version": SCHEMA_VERSION, "created_unix_nano": time.time_ns()}
    connection.executemany("insert into meta values (?, ?)", [[key, str(value)] for key, value in facts.items()])


def _migrate(connection: Any, statements: str, version: int) -> None:
    connection.execute(statements)
    connection.execute("update meta set value = ? where key = 'schema_version'", [str(version)])


def with_transaction(connection: Any, work: Any) -> None:
    """Run ``work(connection)`` whole or not at all."""
    connection.begin()
    try:
        work(connection)
    except BaseException:
        connection.rollback()
        raise
    connection.commit()
