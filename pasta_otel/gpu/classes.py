"""From a GPU kernel's name to its class: a bounded word for metric labels, where names themselves have no bound."""

from __future__ import annotations

import ctypes
import ctypes.util
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from typing import Final

import yaml

from pasta_otel.errors import InputError

CLASSES: Final = (
    "attention",
    "gemm",
    "conv",
    "norm",
    "softmax",
    "elementwise",
    "reduction",
    "collective",
    "sampling",
    "kvcache",
    "memcpy",
    "memset",
    "other",
)
"""``gpu.kernel.class``; memcpy and memset are said by the activity, not by a name."""
OTHER: Final = "other"
TABLE: Final = "kernel_classes.yaml"


@dataclass(frozen=True, slots=True)
class ClassRule:
    """One line of the table: names that match belong to the class."""

    name: str
    pattern: re.Pattern[str]
    source: str


def load_rules(text: str | None = None, file: str = TABLE) -> tuple[ClassRule, ...]:
    """Read a table of classes; without text, the one that comes with the package.

    Raises:
        InputError: The table is not right; names the entry.
    """
    if text is None:
        text = files("pasta_otel.gpu").joinpath(TABLE).read_text(encoding="utf-8")
    document = yaml.safe_load(text)
    if not isinstance(document, list):
        raise InputError("expected a list of classes", file=file)
    return tuple(_rule(entry, f"[{index}]", file) for index, entry in enumerate(document))


@cache
def _shipped_rules() -> tuple[ClassRule, ...]:
    """Return the package's own table, read once: reading takes as long as the analysis of a small trace."""
    return load_rules()


def _rule(entry: object, field: str, file: str) -> ClassRule:
    if not isinstance(entry, Mapping) or not {"class", "source", "patterns"} <= set(entry):
        raise InputError("a class needs class, source and patterns", file=file, field=field)
    if entry["class"] not in CLASSES:
        raise InputError(f"unknown class {entry['class']!r}", file=file, field=f"{field}.class")
    try:
        pattern = re.compile("|".join(f"(?:{part})" for part in entry["patterns"]), re.IGNORECASE)
    except re.error as error:
        raise InputError(f"not a regular expression: {error}", file=file, field=f"{field}.patterns") from error
    return ClassRule(entry["class"], pattern, entry["source"])


class KernelClasses:
    """Answers by name, remembers every answer.

    Args:
        rules: First match wins.
    """

    def __init__(self, rules: Iterable[ClassRule] | None = None) -> None:
        self._rules = _shipped_rules() if rules is None else tuple(rules)
        self._known: dict[str, str] = {}

    def __call__(self, name: str) -> str:
        """Return the class of a GPU kernel's name, mangled or not."""
        found = self._known.get(name)
        if found is None:
            found = self._known[name] = self._find(name)
        return found

    def _find(self, name: str) -> str:
        readable = template_head(demangle(name))
        return next((rule.name for rule in self._rules if rule.pattern.search(readable)), OTHER)


def template_head(name: str) -> str:
    """Return a demangled name up to its parameter list: what is called, and what its functor does, not its types.

    ``void at::native::vectorized_elementwise_kernel<4, AddFunctor<float>>(int, ...)`` keeps everything before the last
    parenthesised list, so that a parameter's type says nothing about the class.
    """
    if not name.endswith(")"):
        return name
    depth = 0
    for index in range(len(name) - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(name[index], 0)
        if depth == 0:
            return name[:index] or name
    return name


@cache
def demangler() -> Callable[[str], str] | None:
    """Return the C++ run-time library's demangler, or None where there is none."""
    try:
        library = ctypes.CDLL(ctypes.util.find_library("stdc++") or "libstdc++.so.6")
        function = library["__cxa_demangle"]
        free = ctypes.CDLL(None).free
    except (OSError, AttributeError):
        return None
    function.restype, free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    function.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]

    def demangled(name: str) -> str:
        status = ctypes.c_int()
        pointer = function(name.encode(), None, None, ctypes.byref(status))
        if not pointer:
            return name
        text = ctypes.string_at(pointer).decode(errors="replace")
        free(pointer)
        return text

    return demangled


def demangle(name: str) -> str:
    """Return the readable form of a mangled C++ name; any other name as it is."""
    function = demangler() if name.startswith("_Z") else None
    return name if function is None else function(name)


def short_name(name: str, limit: int = 80) -> str:
    """Return a span name: what is called, without namespaces' template arguments and return type.

    A span name must group equal things (OpenTelemetry: low cardinality), so that arguments are cut, not abbreviated.
    """
    text = template_head(demangle(name))
    text = text.removeprefix("void ")
    cut = re.split(r"<", text, maxsplit=1)[0] if not text.startswith("<") else text
    return cut.strip()[-limit:] or name[:limit]


def full_name(name: str) -> str:
    """Return what is called, with all template arguments: no return type, parameters or anonymous namespaces."""
    text = template_head(demangle(name)).removeprefix("void ")
    return text.replace("(anonymous namespace)::", "").strip() or name


def report_name(name: str) -> str:
    """Return a name for reports, where a span name says too little: what is called, and its functors, without types.

    ``at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>, ...>`` is
    ``at::native::vectorized_elementwise_kernel<AddFunctor>``. A name of any length is whole.
    """
    head, arguments = _split_template(full_name(name))
    functors = _functors(arguments)
    return f"{head}<{', '.join(functors)}>" if functors else head


@lru_cache(4096)
def spellings(name: str) -> frozenset[str]:
    """Return the forms in which people know a GPU kernel: as the driver has it, readable in full and in short."""
    full = full_name(name)
    head = _split_template(full)[0]
    return frozenset({name, demangle(name), full, report_name(name), head, head.rpartition("::")[2]})


_NO_FUNCTOR = re.compile(
    r"[-(]|\d|(?:const|unsigned|signed|volatile)\b|(?:bool|char|short|int|long|float|double|void|true|false)\b"
    r"|(?:\w+::)*(?:array|Array|tuple|integral_constant|Half|BFloat16|TrivialOffsetCalculator|OffsetCalculator)\b|__"
)
"""Beginnings of template arguments that say on what a functor works, and not what it does."""


def _functors(arguments: Sequence[str]) -> list[str]:
    found = []
    for argument in arguments:
        text = argument.strip()
        if text and not _NO_FUNCTOR.match(text):
            head, inner = _split_template(text)
            of_it = _functors(inner)
            # a function that holds a lambda is what the lambda does
            word = head.partition("(")[0].rpartition("::")[2]
            found.append(f"{word}<{', '.join(of_it)}>" if of_it else word)
    return [word for word in found if word]


def _split_template(text: str) -> tuple[str, list[str]]:
    """Return what stands before the first template arguments, and these."""
    begin = text.find("<")
    if begin <= 0 or text.startswith("operator", max(0, text.rfind("::", 0, begin) + 2)):
        return text, []
    parts, depth, start = list[str](), 0, begin + 1
    for at in range(begin, len(text)):
        depth += {"<": 1, "(": 1, "{": 1, ">": -1, ")": -1, "}": -1}.get(text[at], 0)
        if text[at] == "," and depth == 1:
            parts.append(text[start:at])
            start = at + 1
        elif depth == 0:
            return text[:begin], [*parts, text[start:at]]
    return text, []
