"""YAML that remembers where everything stands, so that an error can name file, line and field.

Numbers with a point become ``Decimal`` (a target of 0.999 is meant exactly), timestamps stay text as written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Literal

import yaml

from pasta_otel.errors import InputError
from pasta_otel.yamldepth import DEPTH_LIMIT, check_depth

NODE_LIMIT = 200_000
DIGITS_LIMIT = 20  # before and after the point: more can be neither counted nor written back
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same language; a megabyte takes a tenth of the time
Severity = Literal["error", "warning"]
_PLAIN_KEY = re.compile(r"^[A-Za-z0-9_-]+$")


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, or doubtful, and where it stands.

    Attributes:
        message: What, without the place.
        file: The file as the user named it.
        line: 1-based line; for a missing field, the line of what should hold it.
        field: Path in the user's own spelling, e.g. ``spec.objectives[0].target``.
        kind: Stable machine-readable word.
        severity: ``error`` refuses the document, ``warning`` does not.
    """

    message: str
    file: str
    line: int | None = None
    field: str = ""
    kind: str = "invalid"
    severity: Severity = "error"

    def __str__(self) -> str:
        """Return ``file:line: field: message``."""
        place = ":".join(str(part) for part in (self.file, self.line) if part is not None)
        return ": ".join(part for part in (place, self.field, self.message) if part)


class SpecError(InputError):
    """Report every problem of a set of files; the text is the first one and how many follow."""

    def __init__(self, problems: list[Problem]) -> None:
        first = problems[0]
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        super().__init__(
            first.message + more, file=first.file, line=first.line, field=first.field or None, kind=first.kind
        )
        self.problems = tuple(problems)


@dataclass(slots=True)
class Document:
    """One YAML document: plain values, and the line of every path."""

    file: str
    data: Any
    lines: dict[str, int]
    problems: list[Problem] = field(default_factory=list)

    @property
    def root(self) -> Cursor:
        """Return a cursor at the top."""
        return Cursor(self, self.data, "")

    @property
    def valid(self) -> bool:
        """Return whether no error has been found so far."""
        return not any(problem.severity == "error" for problem in self.problems)

    def line(self, path: str) -> int | None:
        """Return the line of a path, or of the nearest parent that stands in the file."""
        while path and path not in self.lines:
            path = parent_path(path)
        return self.lines.get(path)

    def report(self, path: str, message: str, *, kind: str = "invalid", severity: Severity = "error") -> None:
        """Record a problem at a path."""
        self.problems.append(Problem(message, self.file, self.line(path), path, kind, severity))


def parent_path(path: str) -> str:
    """Return the path one level up: ``a.b[0]`` -> ``a.b`` -> ``a`` -> empty."""
    if path.endswith("]"):
        return path[: path.rindex("[")]
    return path.rpartition(".")[0]


def child_path(path: str, key: str | int) -> str:
    """Return the path of a key or index below a path."""
    if isinstance(key, int):
        return f"{path}[{key}]"
    if not _PLAIN_KEY.match(key):
        return f"{path}['{key}']"
    return f"{path}.{key}" if path else key


class Cursor:
    """A value with its place; reading from it records what is wrong instead of raising."""

    __slots__ = ("document", "path", "value")

    def __init__(self, document: Document, value: Any, path: str) -> None:
        self.document, self.value, self.path = document, value, path

    def problem(self, message: str, *, kind: str = "invalid", severity: Severity = "error") -> None:
        """Record a problem here."""
        self.document.report(self.path, message, kind=kind, severity=severity)

    def missing(self, key: str, message: str = "required") -> None:
        """Record that a field is missing below here."""
        self.document.report(child_path(self.path, key), message, kind="required")

    def mapping(self, allowed: frozenset[str] | None = None, *, unknown: Severity = "error") -> Mapping[str, Any]:
        """Return the mapping that stands here, or an empty one with a problem; unknown fields are problems too."""
        if not isinstance(self.value, dict):
            self.problem(f"expected a mapping, got {describe(self.value)}", kind="type")
            return {}
        for key in self.value:
            if allowed is not None and key not in allowed:
                text = "unknown field" if unknown == "error" else "unknown field, ignored"
                self.document.report(child_path(self.path, key), text, kind="unknown_field", severity=unknown)
        return self.value

    def has(self, key: str) -> bool:
        """Return whether a field is there and not null."""
        return isinstance(self.value, dict) and self.value.get(key) is not None

    def get(self, key: str) -> Cursor | None:
        """Return the cursor of a field, or None when it is absent or null."""
        return Cursor(self.document, self.value[key], child_path(self.path, key)) if self.has(key) else None

    def need(self, key: str) -> Cursor | None:
        """Return the cursor of a field; its absence is a problem."""
        found = self.get(key)
        if found is None and isinstance(self.value, dict):
            self.missing(key)
        return found

    def items(self, key: str) -> list[Cursor]:
        """Return cursors of a list field's entries; absent = none."""
        found = self.get(key)
        if found is None:
            return []
        if not isinstance(found.value, list):
            found.problem(f"expected a list, got {describe(found.value)}", kind="type")
            return []
        return list(found.entries())

    def entries(self) -> Iterator[Cursor]:
        """Yield a cursor for every entry of the list that stands here."""
        for index, value in enumerate(self.value):
            yield Cursor(self.document, value, child_path(self.path, index))

    def text(self, key: str, *, required: bool = False, default: str = "") -> str:
        """Return a text field."""
        found = self.need(key) if required else self.get(key)
        if found is None:
            return default
        if not isinstance(found.value, str):
            found.problem(f"expected text, got {describe(found.value)}", kind="type")
            return default
        if required and not found.value.strip():
            found.problem("must not be empty", kind="required")
        return found.value

    def number(self, key: str) -> Decimal | None:
        """Return a number field exactly as written."""
        found = self.get(key)
        return None if found is None else found.as_number()

    def as_number(self) -> Decimal | None:
        """Return the number that stands here."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, (int, Decimal)):
            self.problem(f"expected a number, got {describe(value)}", kind="type")
            return None
        number = Decimal(value)
        if not number.is_finite():
            self.problem(f"expected a finite number, got {value}", kind="type")
            return None
        exponent = number.as_tuple().exponent
        if number.adjusted() > DIGITS_LIMIT or (isinstance(exponent, int) and exponent < -DIGITS_LIMIT):
            self.problem(f"more than {DIGITS_LIMIT} digits before or after the point", kind="range")
            return None
        return number

    def flag(self, key: str) -> bool | None:
        """Return a boolean field."""
        found = self.get(key)
        if found is None:
            return None
        if not isinstance(found.value, bool):
            found.problem(f"expected true or false, got {describe(found.value)}", kind="type")
            return None
        return found.value

    def choice(self, key: str, options: tuple[str, ...], *, required: bool = False) -> str:
        """Return a text field that must be one of the options."""
        value = self.text(key, required=required)
        if value and value not in options:
            self.document.report(
                child_path(self.path, key), f"expected one of {', '.join(options)}, got {value!r}", kind="choice"
            )
        return value


def describe(value: Any) -> str:
    """Return a value's kind in the words of YAML."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return f"the boolean {str(value).lower()}"
    if isinstance(value, (int, Decimal)):
        return f"the number {value}"
    if isinstance(value, str):
        return f"the text {value[:40]!r}"
    return "a mapping" if isinstance(value, dict) else "a list"


def read_documents(path: Path | str) -> list[Document]:
    """Return the YAML documents of a file; empty ones are left out.

    Raises:
        InputError: The file cannot be read, is not UTF-8 or is not YAML.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(error.strerror or str(error), file=str(path), kind="unreadable") from error
    except UnicodeDecodeError as error:
        raise InputError("not UTF-8 text", file=str(path), kind="unreadable") from error
    return parse_documents(text, str(path))


def parse_documents(text: str, file: str) -> list[Document]:
    """Return the YAML documents of a text; empty ones are left out.

    Raises:
        InputError: The text is not YAML.
    """
    documents = []
    loader = None
    try:
        check_depth(text, _Loader)
        loader = _Loader(text)
        while loader.check_node():
            node = loader.get_node()
            if node is None:
                continue
            document = Document(file, None, {})
            document.data = _Converter(loader, document).convert(node, "", 0)
            if document.data is not None:
                documents.append(document)
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", None) or str(error)
        raise InputError(
            f"not valid YAML: {reason}", file=file, line=mark.line + 1 if mark else None, kind="yaml"
        ) from error
    finally:
        if loader is not None:
            loader.dispose()
    return documents


class _Converter:
    """Turn YAML nodes into plain values, noting lines; aliases may not blow the document up."""

    def __init__(self, loader: yaml.SafeLoader, document: Document) -> None:
        self._loader, self._document, self._count = loader, document, 0

    def convert(self, node: yaml.Node, path: str, depth: int) -> Any:
        self._count += 1
        if self._count > NODE_LIMIT or depth > DEPTH_LIMIT:
            msg = f"larger than {NODE_LIMIT} values or {DEPTH_LIMIT} levels"
            raise yaml.MarkedYAMLError(problem=msg, problem_mark=node.start_mark)
        self._document.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, depth)
        if isinstance(node, yaml.SequenceNode):
            return [self.convert(child, child_path(path, index), depth + 1) for index, child in enumerate(node.value)]
        return self._scalar(node)

    def _mapping(self, node: yaml.MappingNode, path: str, depth: int) -> dict[str, Any]:
        written = [key.value for key, _ in node.value if key.value != "<<"]
        self._loader.flatten_mapping(node)
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            here = child_path(path, key)
            self._document.lines[here] = key_node.start_mark.line + 1
            result[key] = self.convert(value_node, here, depth + 1)
        for key in {key for key in written if written.count(key) > 1}:
            self._document.report(child_path(path, str(key)), "given twice", kind="duplicate_key")
        return result

    def _scalar(self, node: yaml.Node) -> Any:
        tag = node.tag.rpartition(":")[2]
        if tag == "float":
            return _decimal(node.value)
        if tag in {"int", "bool", "null"}:
            return self._loader.construct_object(node)
        return node.value


def _decimal(text: str) -> Decimal | str:
    try:
        return Decimal(text.replace("_", "").replace(".inf", "Infinity").replace(".nan", "NaN"))
    except InvalidOperation:
        return text
