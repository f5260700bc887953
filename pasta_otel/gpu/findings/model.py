"""What a finding is, and what the code that looks for one is given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Protocol

import numpy as np
import yaml
from numpy.typing import NDArray

from pasta_otel.gpu.analysis.groups import class_codes
from pasta_otel.gpu.analysis.link import Links, link
from pasta_otel.gpu.analysis.timeline import STEP_PREFIX, OpKind, Timeline
from pasta_otel.gpu.cupti.rows import GPU_KERNELS, Rows, is_kind


@dataclass(frozen=True, slots=True)
class Threshold:
    """A number that decides, with its origin."""

    value: float
    unit: str
    source: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """One fact behind a finding.

    Attributes:
        name: What was measured.
        value: In ``unit``.
        unit: UCUM unit, as in OpenTelemetry.
        detail: Where: a call, a line, a GPU kernel.
    """

    name: str
    value: float
    unit: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something in a trace that costs time and can be changed.

    Attributes:
        kind: Stable word, e.g. ``sync_stall``.
        rank: The rank it was found on; None = between ranks.
        share: Share of the rank's window that is concerned, 0..1.
        title: One sentence.
        evidence: The facts.
        thresholds: The numbers that decided, by name.
        suggestion: What to change.
    """

    kind: str
    rank: int | None
    share: float
    title: str
    evidence: tuple[Evidence, ...]
    suggestion: str
    thresholds: Mapping[str, Threshold] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-compatible form."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class RankTrace:
    """One rank's trace with what most findings need.

    Attributes:
        timeline: The events.
        links: GPU work joined to launch calls and ops.
        codes: Class code of each piece of GPU work, an index into ``gpu.classes.CLASSES``.
    """

    timeline: Timeline
    links: Links
    codes: NDArray[np.int64]

    @property
    def work(self) -> Rows:
        """Return GPU kernels, copies and sets."""
        return self.links.work

    @property
    def is_kernel(self) -> NDArray[np.bool_]:
        """Return which pieces of work are GPU kernels."""
        return is_kind(self.work, GPU_KERNELS)

    @property
    def duration_ns(self) -> NDArray[np.int64]:
        """Return how long each piece of work ran."""
        duration: NDArray[np.int64] = (self.work["end"] - self.work["start"]).astype(np.int64)
        return duration

    @property
    def launched_alone(self) -> NDArray[np.bool_]:
        """Return which pieces of work have a launch call of their own: not those that a graph's replay began."""
        call = self.links.call
        shared = np.bincount(call[call >= 0], minlength=len(self.links.calls) + 1) > 1
        alone: NDArray[np.bool_] = (call >= 0) & ~shared[call] & (self.work["graph"] == 0)
        return alone

    @property
    def steps(self) -> list[tuple[int, int]]:
        """Return begin and end of each ``ProfilerStep``, ns; empty when the trace has none."""
        ops, names = self.timeline.ops, self.timeline.names
        chosen = ops[(ops["kind"] == OpKind.ANNOTATION) & ~ops["unfinished"]]
        steps = [op for op in chosen if names[op["name"]].startswith(STEP_PREFIX)]
        return sorted((int(op["start"]), int(op["end"])) for op in steps)

    @property
    def window_ns(self) -> int:
        """Return the time from the first start to the last end of GPU work."""
        return int(self.work["end"].max() - self.work["start"].min()) if len(self.work) else 0

    def name(self, row: np.void) -> str:
        """Return a row's name."""
        return self.timeline.row_name(row)


class Finder(Protocol):
    """What finds: a function over all ranks of a job. Other distributions add one by the entry point group."""

    def __call__(self, ranks: Sequence[RankTrace], /) -> Iterable[Finding]:
        """Yield what is found."""


def rank_trace(timeline: Timeline) -> RankTrace:
    """Prepare a timeline for the findings."""
    links = link(timeline)
    return RankTrace(timeline, links, class_codes(links.work, timeline.names))


@cache
def thresholds(kind: str) -> Mapping[str, Threshold]:
    """Return the thresholds of a finding from ``thresholds.yaml``."""
    table = yaml.safe_load(files("pasta_otel.gpu.findings").joinpath("thresholds.yaml").read_text(encoding="utf-8"))
    return {name: Threshold(**entry) for name, entry in table[kind].items()}
