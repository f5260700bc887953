"""Slots and results of memory analysis, made by hand for tests."""

from __future__ import annotations

from typing import Any

from pasta_otel.gpu.memory.slots import CONTENTION, GLOBAL, OTHER, SHARED, STRIDES, WORDS, WORST

_GROUPS = {"global": GLOBAL, "shared": SHARED, "contention": CONTENTION, "strides": STRIDES}
IRREGULAR = 0xFFFFFFFF


def words(**counters: Any) -> tuple[int, ...]:
    """Return a slot.

    ``global_load=(requests, lanes, sectors, bytes)``, ``shared_load_4=...``, ``strides_global=...``, ``other_blocks=1``,
    ``worst_shared=(transactions, width, stride)``.
    """
    filled = [0] * WORDS
    for name, values in counters.items():
        group, kind = name.split("_", 1)
        if group == "worst":
            transactions, width, stride = values
            filled[WORST[kind]] = transactions << 48 | width << 32 | stride
        elif group == "other":
            filled[OTHER[kind]] = values
        else:
            at = _GROUPS[group][kind]
            filled[at : at + len(values)] = values
    return tuple(filled)


def launch(name: str, slot: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """Return a launch as a process' document has it; ``result_*`` goes into its result."""
    result = {"words": list(slot), "begin_ns": 0, "end_ns": 0, "working_set": None, "tensors": [], "ranges": []}
    head = {"name": name, "grid": [1, 1, 1], "block": [32, 1, 1], "stream": 0, "time_unix_nano": 0, "graph": False}
    head |= {"source": "", "span": "", "module": ""}
    for key, value in more.items():
        (result if key.startswith("result_") else head)[key.removeprefix("result_")] = value
    return {**head, "result": result}


def tensor(number: int, **more: Any) -> dict[str, Any]:
    """Return a tensor as a process' document has it."""
    plain = {"number": number, "address": number << 21, "bytes": 1 << 20, "name": "", "module": "", "source": ""}
    return {**plain, "allocated_unix_nano": 0, "freed_unix_nano": 0, **more}


def document(
    launches: list[dict[str, Any]], tensors: list[dict[str, Any]] | None = None, **more: Any
) -> dict[str, Any]:
    """Return a process' document."""
    counts = {"tool": "memory", "seen": len(launches), "skipped": {}, "waits": 0, "unpatched": 0, "not_counted": []}
    return {
        **counts,
        "problems": [],
        "command": ["train.py"],
        "launches": launches,
        "tables": {"tensors": tensors or []},
        **more,
    }
