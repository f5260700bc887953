"""The analysis of this process: tool, Sanitizer and collector joined, from the first CUDA call to the document."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pasta_otel.errors import MissingError
from pasta_otel.gpu.memory.collector import Collector
from pasta_otel.gpu.memory.sanitizer import Sanitizer
from pasta_otel.gpu.memory.selection import Selection
from pasta_otel.gpu.memory.tool import LaunchInfo, Tool, load_tool

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

    Raises:
        MissingError: The library cannot be used, or CUPTI is active.
        InputError: The tool is none.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.tool: Tool[Any] = load_tool(job.tool, job.options)
        self._sanitizer = Sanitizer(job.library, self.tool.functions, self.tool.optional_functions)
        self.collector = Collector(self._sanitizer, job.patch, job.selection, self.tool)
        self.collector.active = not job.regions
        self._owner = os.getpid()

    def start(self, environ: Mapping[str, str] = os.environ) -> None:
        """Begin; must come before CUDA is initialised.

        Raises:
            MissingError: CUPTI is active.
            StateError: The Sanitizer refuses.
        """
        if environ.get(INJECTED):
            raise MissingError(f"not available, CUPTI is active: {INJECTED}={environ[INJECTED]}")
        self._sanitizer.subscribe(self.collector.on_event)

    def finish(self) -> dict[str, Any] | None:
        """End, and return the results; None in a forked child, which has our handlers, but no CUDA."""
        if os.getpid() != self._owner:
            return None
        try:
            self.collector.finish()
        finally:
            self._sanitizer.stop()
        return self.document()

    def document(self) -> dict[str, Any]:
        """Return the results so far as JSON-compatible data."""
        collector = self.collector
        counts = {
            "tool": self.tool.name,
            "seen": collector.seen,
            "waits": collector.waits,
            "unpatched": collector.unpatched,
            "skipped": dict(collector.skipped),
            "not_counted": sorted(self._sanitizer.unknown),
        }
        launches = [_launch(launch, self.tool.as_json(result)) for launch, result in list(collector.launches)]
        tables = self.tool.tables()
        return {**counts, "problems": collector.problems, "command": sys.argv[:1], "launches": launches, **tables}


def _launch(launch: LaunchInfo, result: Mapping[str, Any]) -> dict[str, Any]:
    head = {key: getattr(launch, key) for key in ("name", "grid", "block", "stream", "graph")}
    return {**head, **asdict(launch.caller), "result": result}
