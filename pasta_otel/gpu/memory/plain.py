"""What a tool returns, as JSON: whatever does not fit is left out and named, the rest is kept."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from pasta_otel.gpu.memory.tool import LaunchInfo, Tool, blame

_HEAD = ("number", "name", "grid", "block", "stream", "nodes")
"""What a document says of a launch, beside its caller and its result."""


class Plain:
    """Makes one document of one tool's results.

    Args:
        tool: Whose results.

    Attributes:
        lost: How many launches it had to leave out.
    """

    def __init__(self, tool: Tool[Any]) -> None:
        self._tool, self._problems = tool, set[str]()
        self.lost = 0

    @property
    def problems(self) -> list[str]:
        """Return what did not fit, each once."""
        return sorted(self._problems)

    def launches(self, launches: Iterable[tuple[LaunchInfo, Any]]) -> list[dict[str, Any]]:
        """Return launches with their results; one whose result does not fit is lost."""
        found = []
        for launch, record in launches:
            result, problem = self._fitting(self._tool.as_json, record)
            if problem:
                self.lost += 1
                continue
            head = {key: getattr(launch, key) for key in _HEAD}
            found.append({**head, **asdict(launch.caller), "result": result})
        return found

    def tables(self) -> dict[str, Any]:
        """Return what the tool says of the process as a whole; nothing where that does not fit."""
        found, problem = self._fitting(self._tool.tables)
        if not problem and not isinstance(found, Mapping):
            problem = f"{self._tool.name}: tables() must return a dictionary, got {type(found).__name__}"
            self._problems.add(problem)
        return {} if problem else dict(found)

    def _fitting(self, method: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
        """Return what a method returns, and why it is no JSON."""
        try:
            found = method(*arguments)
            json.dumps(found)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's own code: the rest of the results stays
            problem = blame(self._tool.name, error, method.__name__)
            self._problems.add(problem)
            return None, problem
        return found, ""


def strict(value: Any) -> Any:
    """Return JSON-compatible data without numbers that JSON does not know: ``"NaN"``, ``"Infinity"``, ``"-Infinity"``.

    Strings as in the JSON of Protocol Buffers (https://protobuf.dev/programming-guides/json/).
    """
    if isinstance(value, Mapping):
        return {strict_key(key): strict(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [strict(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return _word(value)
    return value


def strict_key(key: Any) -> Any:
    """Return a key; the JSON encoder would write a number that is none without complaint."""
    return _word(key) if isinstance(key, float) and not math.isfinite(key) else key


def _word(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
