"""``/proc/PID/net/netstat``: kernels insert columns, so values are found by header name and never by position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pasta_otel.ebpf.hostfiles.files import read_text
from pasta_otel.errors import InputError

Protocols = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class Netstat:
    """Socket counters of one network namespace.

    Attributes:
        namespace: Which one, as the link ``/proc/PID/ns/net`` names it, or empty if that cannot be read.
        listen_overflows: Connections refused because the accept queue was full; None = the kernel does not say.
        listen_drops: All connections dropped at a listening socket; None = the kernel does not say.
        inode: Of the file, which each network namespace has its own of.
    """

    namespace: str
    listen_overflows: int | None
    listen_drops: int | None
    inode: int = 0


def parse_netstat(text: str, *, file: str | None = None) -> Protocols:
    """Return protocol -> counter name -> value.

    Raises:
        InputError: A header and its values differ in number or protocol (kind ``field_count_mismatch``), or a value is
            no number; nothing is then to be trusted.
    """
    lines = [line.split() for line in text.splitlines() if line.strip()]
    found: dict[str, dict[str, int]] = {}
    for number in range(0, len(lines), 2):
        header, values = lines[number], lines[number + 1] if number + 1 < len(lines) else []
        name = header[0].removesuffix(":")
        if header[:1] != values[:1] or len(header) != len(values):
            message = f"{name}: {len(header) - 1} names but {max(len(values) - 1, 0)} values"
            raise InputError(message, file=file, line=number + 1, field=name, kind="field_count_mismatch")
        found[name] = _numbers(header[1:], values[1:], name, file)
    return found


def _numbers(names: list[str], values: list[str], protocol: str, file: str | None) -> dict[str, int]:
    try:
        return dict(zip(names, map(int, values), strict=True))
    except ValueError as error:
        raise InputError("a value is not a number", file=file, field=protocol, kind="not_a_number") from error


def read_netstat(proc_root: Path, pid: int) -> Netstat | None:
    """Return the socket counters of a process's network namespace, or None when they cannot be read.

    Raises:
        InputError: The file contradicts itself.
    """
    path = proc_root / str(pid) / "net" / "netstat"
    text = read_text(path)
    if text is None:
        return None
    tcp = parse_netstat(text, file=str(path)).get("TcpExt", {})
    return Netstat(_namespace(proc_root, pid), tcp.get("ListenOverflows"), tcp.get("ListenDrops"), _inode(path))


def _namespace(proc_root: Path, pid: int) -> str:
    try:
        return str((proc_root / str(pid) / "ns" / "net").readlink())
    except OSError:
        return ""


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:  # its process has ended since
        return 0
