"""What is decoded of one trace event: the few fields that anything is computed from; the rest is skipped unbuilt."""

from __future__ import annotations

from typing import Any

import msgspec

Number = int | float | str | None
Text = str | int | float | None


class Args(msgspec.Struct, gc=False):
    """``args`` of an event, over all dialects (2021 wrote ``external id``; ROCm writes ``size`` and ``kind``)."""

    external_id: Number = msgspec.field(default=None, name="External id")
    external_id_2021: Number = msgspec.field(default=None, name="external id")
    correlation: Number = None
    device: Number = None
    stream: Number = None
    context: Number = None
    bytes: Number = None
    size: Number = None
    graph: Number = msgspec.field(default=None, name="graph id")
    node: Number = msgspec.field(default=None, name="graph node id")
    module: Text = msgspec.field(default=None, name="Module Hierarchy")
    call_stack: Text = msgspec.field(default=None, name="Call stack")
    sequence: Number = msgspec.field(default=None, name="Sequence number")
    forward_thread: Number = msgspec.field(default=None, name="Fwd thread id")
    input_type: Any = msgspec.field(default=None, name="Input type")


class Event(msgspec.Struct, gc=False):
    """One event. Only complete events (``ph`` X) become rows.

    Times are microseconds; a float holds them to the nanosecond below 2**42 us, see ``columns.EXACT_BELOW_US``.
    """

    ph: Text = None
    cat: Text = None
    name: Text = None
    pid: Text = None
    tid: Text = None
    ts: float | str | None = None
    dur: float | str | None = None
    args: Args | None = None


class ExactTimes(msgspec.Struct, gc=False):
    """The times of an event as they are written, for files whose microseconds exceed a float's precision."""

    ts: msgspec.Raw = msgspec.Raw(b"null")
    dur: msgspec.Raw = msgspec.Raw(b"null")


EVENTS = msgspec.json.Decoder(list[Event])
EVENT = msgspec.json.Decoder(Event)
EXACT_TIMES = msgspec.json.Decoder(list[ExactTimes])
EXACT_TIME = msgspec.json.Decoder(ExactTimes)
