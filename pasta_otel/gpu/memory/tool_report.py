"""What any tool found, as JSON, text and a page; the tool itself says what its records mean."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from html import escape
from typing import Any

from pasta_otel.errors import InputError
from pasta_otel.gpu.memory.plain import strict
from pasta_otel.gpu.memory.selection import candidates
from pasta_otel.gpu.memory.tool import Instruction, Tool, where

SCHEMA = 1


class ToolReport:
    """The processes' results of one tool.

    Args:
        tool: Reads them.
        documents: ``Session.document`` by process id.
    """

    def __init__(self, tool: Tool[Any], documents: Mapping[int, Mapping[str, Any]]) -> None:
        self._tool, self._documents = tool, documents
        self.seen = sum(document["seen"] for document in documents.values())
        self.problems = sorted({problem for document in documents.values() for problem in document["problems"]})
        self.tables = {pid: document["tables"] for pid, document in documents.items() if document.get("tables")}
        unknown = {number for document in documents.values() for number in document.get("not_counted", ())}
        self.not_counted = sorted(unknown)
        self.skipped: Counter[str] = Counter()
        for document in documents.values():
            self.skipped.update(document["skipped"])

    @cached_property
    def launches(self) -> list[dict[str, Any]]:
        """Return the analysed launches of all processes, each with its record as ``result``, by their number."""
        found = ({"pid": pid, **one} for pid, document in self._documents.items() for one in document["launches"])
        return sorted(found, key=lambda one: (one["pid"], one["number"]))

    def as_dict(self) -> dict[str, Any]:
        """Return one JSON document; what no number of JSON can say is a string (``plain.strict``)."""
        counts = {"seen": self.seen, "analysed": len(self.launches), "skipped": dict(self.skipped)}
        head = {"schema": SCHEMA, "tool": self._tool.name, "launches": counts, "problems": self.problems}
        tables = {str(pid): tables for pid, tables in self.tables.items()}
        found = {**head, "not_counted": self.not_counted, "tables": tables, "results": self.launches}
        plain: dict[str, Any] = strict(found)
        return plain

    def as_text(self) -> str:
        """Return the text for people.

        Raises:
            InputError: The tool's own report fails; names its line.
        """
        head = [f"{self._tool.name}: {len(self.launches):,} of {self.seen:,} launches of GPU kernels analysed"]
        if self.skipped:
            counts = ", ".join(f"{count:,} ({reason})" for reason, count in self.skipped.most_common())
            head.append(f"  not analysed: {counts}")
        if self.not_counted:
            names = ", ".join(map(_instruction, self.not_counted))
            head.append(f"  not counted: {names}, which this version of the Sanitizer cannot report")
        try:
            self._tool.process_tables = self.tables
            said: object = self._tool.report(self.launches)
        except (Exception, SystemExit) as error:  # a user's own code
            file, line = where(error)
            raise InputError(f"{type(error).__name__}: {error}", file=file, line=line, field="report") from error
        if not isinstance(said, str):
            message = f"{self._tool.name}: report() must return a string, got {type(said).__name__}"
            raise InputError(message, field="report")
        return "\n".join([*head, *self._candidates(), "", said])

    def _candidates(self) -> list[str]:
        """Return what there was to choose from, where nothing was chosen."""
        refused = {name for document in self._documents.values() for name in document.get("refused", ())}
        named = "" if self.launches else candidates(refused)
        return [f"  {named}"] if named else []

    def as_html(self) -> str:
        """Return the text as a page."""
        title = f"<title>{escape(self._tool.name)}</title>"
        head = f'<!doctype html><html lang="en"><head><meta charset="utf-8">{title}</head>'
        problems = "".join(f"<p><b>Problem:</b> {escape(problem)}</p>" for problem in self.problems)
        return f"{head}<body>{problems}<pre>{escape(self.as_text())}</pre></body></html>\n"


def _instruction(number: int) -> str:
    return Instruction(number).name if number in set(Instruction) else f"instruction {number}"
