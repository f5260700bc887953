"""The analysis of this process: tool, Sanitizer and collector joined, from the first CUDA call to the document."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pasta_otel.errors import MissingError
from pasta_otel.gpu.memory.blocks import OpenBlocks, Part
from pasta_otel.gpu.memory.callers import Caller, caller, no_module
from pasta_otel.gpu.memory.collector import Collector
from pasta_otel.gpu.memory.follow import follow
from pasta_otel.gpu.memory.layers import Layers
from pasta_otel.gpu.memory.library import check_driver
from pasta_otel.gpu.memory.plain import Plain
from pasta_otel.gpu.memory.sanitizer import Sanitizer
from pasta_otel.gpu.memory.selection import Selection
from pasta_otel.gpu.memory.tensors import Tensors
from pasta_otel.gpu.memory.tool import Tool, load_tool

INJECTED = "CUDA_INJECTION64_PATH"
MEMORY_TOOL = "pasta_otel.gpu.memory.counters:MemoryTool"


@dataclass(frozen=True, slots=True)
class Job:
    """What is analysed, and with what.

    Attributes:
        library: File of the Sanitizer API.
        patch: File of the compiled device functions.
        selection: Which launches.
        tool: ``package.module:Class`` or ``FILE.py:Class``.
        options: Keyword arguments of the tool.
        regions: Whether only launches inside ``with pasta_otel.analyze()`` are analysed.
    """

    library: str
    patch: str
    selection: Selection = field(default_factory=Selection)
    tool: str = MEMORY_TOOL
    options: Mapping[str, Any] = field(default_factory=dict)
    regions: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-compatible form."""
        plain = {"library": self.library, "patch": self.patch, "tool": self.tool, "regions": self.regions}
        return {**plain, "options": dict(self.options), "selection": self.selection.to_json()}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Job:
        """Return what ``to_json`` wrote; other keys are left aside."""
        plain = (document["library"], document["patch"], Selection.from_json(document["selection"]))
        return cls(*plain, document["tool"], document["options"], document["regions"])


class Session:
    """The analysis of this process; there is one at most.

    Args:
        job: What to do.
        tool: Instead of the job's.
        keep: Whether launches are kept for the process as a whole, beside what blocks of it get.

    Raises:
        MissingError: The library cannot be used, or CUPTI is active.
        InputError: The tool is none.
    """

    def __init__(self, job: Job, tool: Tool[Any] | None = None, *, keep: bool = True) -> None:
        self.job = job
        self.tool: Tool[Any] = load_tool(job.tool, job.options) if tool is None else tool
        self._blocks, self._switch = OpenBlocks(required=job.regions, keep=keep), threading.RLock()
        self._tensors = Tensors()
        self._layers: Layers | None = None
        if self.tool.tensors is None:
            self.tool.tensors = self._tensors
        self._sanitizer = Sanitizer(job.library, self.tool.functions, self.tool.optional_functions)
        self.collector = Collector(
            self._sanitizer,
            job.selection,
            self.tool,
            who=self._who,
            blocks=self._blocks,
        )
        self.collector.active = self._blocks.active
        self._owner = os.getpid()
        self._finished = False

    def start(self, environ: Mapping[str, str] = os.environ) -> None:
        """Begin; must come before CUDA is initialised.

        Raises:
            MissingError: CUPTI is active, there is no CUDA driver, or our native part is missing.
            StateError: The Sanitizer refuses.
        """
        if environ.get(INJECTED):
            raise MissingError(f"not available, CUPTI is active: {INJECTED}={environ[INJECTED]}")
        # before anything of ours touches the driver
        self._sanitizer.subscribe(self.collector.on_call, self.job.patch, self.job.selection.texts)
        try:
            check_driver()
        except MissingError:
            self._sanitizer.cancel()
            raise
        os.register_at_fork(after_in_child=self._forked)
        self._tensors.raw = self._sanitizer.raw
        _started.append(self)
        self._layers = follow(self._tensors)

    def _forked(self) -> None:
        """Leave a forked child alone: what other threads had locked stays so there."""
        self._sanitizer.deafen()
        self._tensors.forked()

    @property
    def working(self) -> bool:
        """Return whether the calling thread is in the middle of the analysis, of which this interrupts it."""
        return self.collector.working

    def _who(self) -> Caller:
        return caller(no_module if self._layers is None else self._layers.current)

    @property
    def here(self) -> bool:
        """Return whether this process is the analysed one, and not a forked child of it."""
        return os.getpid() == self._owner

    @property
    def finished(self) -> bool:
        """Return whether it has ended."""
        return self._finished

    def settle(self) -> None:
        """Bring in the launches of streams that were synchronised."""
        if self.here and not self._finished:
            self.collector.settle()

    def open(self, part: Part) -> None:
        """Begin a block of the program that is analysed for itself."""
        with self._switch:
            self._blocks.open(part)
            self.collector.active = True

    def close(self, part: Part) -> None:
        """End a block; what it launched still comes in."""
        with self._switch:
            self._blocks.close(part)
            self.collector.active = self._blocks.active

    def finish(self) -> dict[str, Any] | None:
        """End, and return the results; None in a forked child, which has our handlers, but no CUDA."""
        if os.getpid() != self._owner:
            return None
        self.collector.active = False
        try:
            self.collector.finish()
        finally:
            self._sanitizer.stop()
            self._finished = True
        return self.document()

    @property
    def problems(self) -> list[str]:
        """Return what went wrong, each once."""
        lost = self._sanitizer.lost_notes()
        events = [f"{lost:,} events were lost: tensors may be missing, results may come late"] if lost else []
        return sorted({*self.collector.problems, *events, *(() if self._layers is None else self._layers.problems)})

    def document(self, part: Part | None = None) -> dict[str, Any]:
        """Return the results so far as JSON-compatible data.

        Args:
            part: Only what this block of the program got.
        """
        self.settle()
        collector = self.collector
        of = collector if part is None else part
        unknown = self._sanitizer.unknown_launches() if part is None else 0
        plain = Plain(self.tool)
        launches, tables = plain.launches(list(of.launches)), plain.tables()
        counts = {
            "tool": self.tool.name,
            "seen": of.seen + unknown,
            "waits": collector.waits,
            "unpatched": collector.unpatched,
            "skipped": dict(Counter(of.skipped) + Counter(not_json=plain.lost, unknown_call=unknown)),
            "of_name": dict(of.chooser.of_name),
            "refused": list(of.chooser.refused),
            "not_counted": sorted(self._sanitizer.unknown),
        }
        problems = sorted({*self.problems, *plain.problems})
        return {**counts, "problems": problems, "command": sys.argv[:1], "launches": launches, "tables": tables}


_started: list[Session] = []
"""At most one: the Sanitizer has one subscriber a process, and patched modules outlive every block."""


def running() -> Session | None:
    """Return the analysis of this process; None where there is none, in a forked child, and after the end."""
    return next((session for session in _started if session.here and not session.finished), None)


def inherited() -> bool:
    """Return whether this process was forked from one that is analysed: it has our handlers, but no CUDA."""
    return any(not session.here for session in _started)
