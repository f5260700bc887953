"""What there is to attach: the YAML beside each BPF source.

Here and in all that attaching needs, values are named tuples: the module ``dataclasses`` costs 6 ms, and each of its
classes half a millisecond, before anything is attached.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

Kind = Literal["uprobes", "tracepoints"]
LoaderName = Literal["core", "bcc"]
BPF_FOLDER = Path(__file__).resolve().parent / "bpf"  # importlib.resources would cost 15 ms before attaching
OBJECT_FOLDER = BPF_FOLDER.parent / "objects"
BUILT = "probes.json"


class Api(NamedTuple):
    """One thing that a probe counts.

    Attributes:
        number: Its number in records; see ``layout``.
        name: As people know it: a driver function, or what happened.
        kind: ``launch``, ``graph_launch``, ``copy``, ``memset``, ``allocation``, ``free``, ``sync``, ``off_cpu``, ...
        symbols: Functions to probe, for uprobes.
        cookie: What its entry probe is told.
    """

    number: int
    name: str
    kind: str
    symbols: tuple[str, ...] = ()
    cookie: int = 0


class EventProgram(NamedTuple):
    """A program and the event it belongs on.

    Attributes:
        program: Its name.
        event: A tracepoint as ``category:event``, or the name of a perf event.
        perf: Whether it is one of perf.
        loaders: Which loaders can carry it.
    """

    program: str
    event: str
    perf: bool = False
    loaders: tuple[LoaderName, ...] = ("core", "bcc")


class Probe(NamedTuple):
    """One BPF source.

    Attributes:
        name: Name of source, object and YAML.
        loaders: Which loaders can carry it.
        apis: What it counts.
        library: Start of the library's file name, for uprobes.
        entry: Program on function entry, paired with ``returning``.
        returning: Program on function return.
        counting: Program on function entry that stands alone.
        programs: Programs on tracepoints and perf events.
    """

    name: str
    loaders: tuple[LoaderName, ...]
    apis: tuple[Api, ...]
    library: str = ""
    entry: str = ""
    returning: str = ""
    counting: str = ""
    programs: tuple[EventProgram, ...] = ()

    @property
    def source(self) -> Path:
        """Return the BPF source."""
        return BPF_FOLDER / f"{self.name}.bpf.c"

    @property
    def program_names(self) -> tuple[str, ...]:
        """Return all programs."""
        returning = (self.returning,) if self.returning else ()
        return (*self.uprobe_programs, *returning, *(item.program for item in self.programs))

    @property
    def uprobe_programs(self) -> tuple[str, ...]:
        """Return the programs that take a cookie."""
        return tuple(name for name in (self.entry, self.counting) if name)


def probe_of(document: dict[str, Any]) -> Probe:
    """Return the probe that a YAML's document describes."""
    functions = [_function(item) for item in document.get("functions", ())]
    named = [Api(item["api"], item["name"], item["kind"]) for item in document.get("apis", ())]
    programs = tuple(_program(item) for item in document.get("programs", ()))
    return Probe(
        name=document["name"],
        loaders=tuple(document["loaders"]),
        apis=(*functions, *named),
        library=document.get("library", ""),
        entry=document.get("entry", ""),
        returning=document.get("return", ""),
        counting=document.get("count", ""),
        programs=programs,
    )


def _program(item: dict[str, Any]) -> EventProgram:
    return EventProgram(
        item["program"],
        item.get("tracepoint") or item["perf"],
        "perf" in item,
        tuple(item.get("loaders", ("core", "bcc"))),
    )


def _function(item: dict[str, Any]) -> Api:
    cookie = item["api"] | item.get("size", 0) << 16 | item.get("scale", 0) << 20
    return Api(item["api"], item["name"], item["kind"], (item["name"], *item.get("also", ())), cookie)


def load_probes(folder: Path = BPF_FOLDER) -> tuple[Probe, ...]:
    """Read every YAML, by name."""
    import yaml  # noqa: PLC0415 - see load_built_probes

    return tuple(probe_of(yaml.safe_load(path.read_text(encoding="utf-8"))) for path in sorted(folder.glob("*.yaml")))


def load_built_probes(folder: Path = OBJECT_FOLDER) -> tuple[Probe, ...]:
    """Return what the objects in a folder were built from; JSON costs 15 ms less than YAML before attaching."""
    try:
        documents = json.loads((folder / BUILT).read_text(encoding="utf-8"))
    except OSError:
        return load_probes()
    return tuple(map(probe_of, documents))
