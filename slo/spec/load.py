"""From files and directories to SLOs: read every document, resolve references across them, collect every problem."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pasta_otel.errors import InputError
from pasta_otel.slo.spec import openslo_v1, openslo_v1alpha, sloth
from pasta_otel.slo.spec.document import Cursor, Document, Problem, SpecError, read_documents
from pasta_otel.slo.spec.model import SLO, Read, SpecObject
from pasta_otel.slo.spec.resolve import Placed, resolve

SUFFIXES = (".yaml", ".yml", ".json")
READERS: dict[str, Callable[[Cursor], list[Read]]] = {
    openslo_v1.API_VERSION: openslo_v1.read_objects,
    openslo_v1alpha.API_VERSION: openslo_v1alpha.read_objects,
    sloth.VERSION: sloth.read_objects,
    sloth.API_VERSION: sloth.read_custom_resource,
}


@dataclass(frozen=True, slots=True)
class SpecSet:
    """What a set of files says.

    Attributes:
        slos: Every objective that can be evaluated, resolved.
        objects: Every object that was read without an error.
        problems: Errors and warnings, in the order of the files.
    """

    slos: tuple[SLO, ...]
    objects: tuple[SpecObject, ...]
    problems: tuple[Problem, ...]

    @property
    def errors(self) -> tuple[Problem, ...]:
        """Return the problems that refuse a document."""
        return tuple(problem for problem in self.problems if problem.severity == "error")


def check(paths: Iterable[Path | str]) -> SpecSet:
    """Read files and directories, and return everything that is right and everything that is wrong.

    Raises:
        InputError: A file cannot be read (kind ``unreadable``) or a path holds no specification.
    """
    placed: list[Placed] = []
    problems: list[Problem] = []
    for file in _files(paths):
        try:
            documents = read_documents(file)
        except InputError as error:
            if error.kind == "unreadable":
                raise
            problems.append(Problem(error.message, str(file), error.line, "", error.kind))
            continue
        for document in documents:
            placed.extend(_read(document))
            problems.extend(document.problems)
        if not documents:
            problems.append(Problem("holds no YAML document", str(file), None, "", "empty"))
    slos, unresolved = resolve(placed)
    return SpecSet(slos, tuple(item.object for item in placed), (*problems, *unresolved))


def load(paths: Iterable[Path | str]) -> SpecSet:
    """Read files and directories for evaluation.

    Raises:
        SpecError: Something is wrong; the error lists every problem.
        InputError: A file cannot be read.
    """
    found = check(paths)
    if found.errors:
        raise SpecError(list(found.errors))
    return found


def _files(paths: Iterable[Path | str]) -> Iterator[Path]:
    for path in map(Path, paths):
        if not path.is_dir():
            yield path
            continue
        files = sorted(file for file in path.rglob("*") if file.is_file() and _wanted(file.relative_to(path)))
        if not files:
            raise InputError("holds no .yaml, .yml or .json file", file=str(path), kind="unreadable")
        yield from files


def _wanted(inside: Path) -> bool:
    """Hidden files and folders hold no specifications: a mounted ConfigMap has each file in a ``..date`` folder too."""
    return inside.suffix in SUFFIXES and not any(part.startswith(".") for part in inside.parts)


def _read(document: Document) -> Iterator[Placed]:
    root = document.root
    for item in root.entries() if isinstance(document.data, list) else (root,):
        before = len(document.problems)
        reads = _read_object(item)
        wrong = [problem.field for problem in document.problems[before:] if problem.severity == "error"]
        for read in reads:
            others = [other.scope for other in reads if other.scope != read.scope]
            if all(any(_below(field, scope) for scope in others) for field in wrong):
                yield Placed(read.object, document, item.path, read.name_field)


def _below(field: str, scope: str) -> bool:
    return field == scope or field.startswith((f"{scope}.", f"{scope}["))


def _read_object(item: Cursor) -> list[Read]:
    item.mapping()
    if not isinstance(item.value, dict):
        return []
    key = "version" if item.has("version") and not item.has("apiVersion") else "apiVersion"
    version = item.text(key, required=True)
    reader = READERS.get(version)
    if reader is not None:
        return reader(item)
    if version:
        item.document.report(
            f"{item.path}.{key}".lstrip("."),
            f"{version!r} is not supported; supported are {', '.join(sorted(READERS))}",
            kind="api_version",
        )
    return []
