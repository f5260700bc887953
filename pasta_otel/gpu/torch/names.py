"""Qualified names of torch modules, by where a module is called from; kept only as long as the module lives."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

from pasta_otel import semconv
from pasta_otel.model import AttributeValue, SpanSite

# Wrappers that add a name of their own between a model and its parts: class name -> the attribute that holds the model.
WRAPPERS = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
}
_WRAPPED_NAMES = frozenset(WRAPPERS.values()) - {"module"}
_COMPILED = "OptimizedModule"
MAX_REFRESHES = 16
"""How often a module's parts are listed again for one that is not among them (added later, or made in every call)."""


class ModuleNode:
    """One module at one place of the call tree.

    Attributes:
        path: Qualified path below the root; empty for the root itself unless the root was given a name.
        site: What all rows of this place share.
        has_code: Whether user code may run inside: a leaf of ``torch.nn`` starts no spans and calls no modules.
        recorded: False for the module inside a compiled wrapper: the wrapper's row is the compiled region's only one.
    """

    __slots__ = (
        "children", "has_code", "module", "names", "parent", "path", "recorded", "refreshes", "searches", "site",
    )  # fmt: skip

    def __init__(self, module: Any, path: str, parent: ModuleNode | None, forget: Callable[[Any], object]) -> None:
        self.module: weakref.ref[Any] = weakref.ref(module, forget)
        self.path, self.parent = path, parent
        self.site = _site(module, path)
        self.has_code = bool(module._modules) or not type(module).__module__.startswith("torch.nn.modules.")
        self.recorded = parent is None or not parent.compiled_wrapper_of(module)
        self.children: dict[int, ModuleNode] = {}
        self.names: dict[int, tuple[weakref.ref[Any], str]] = {}
        self.refreshes = self.searches = 0

    def add(self, module: Any) -> ModuleNode:
        """Return a new node for a module that is called inside this one; ``children`` has it from then on."""
        key, children = id(module), self.children
        node = ModuleNode(module, self._path_of(module), self, lambda _: children.pop(key, None))
        children[key] = node
        return node

    def _path_of(self, module: Any) -> str:
        """Look in this module, then in those that enclose it: a module may be passed in as an argument."""
        node: ModuleNode | None = self
        while node is not None:
            relative = node.relative_name(module)
            if relative is not None:
                return ".".join(part for part in (node.path, relative) if part)
            node = node.parent
        return ".".join(part for part in (self.path, f"<{_class_name(module)}>") if part)

    def relative_name(self, module: Any) -> str | None:
        """Return the module's name below this one, without wrapper parts; None if it is not below."""
        known = self._known(module)
        if known is None and self.refreshes < MAX_REFRESHES:
            self.refreshes += 1
            self.list_names()
            known = self._known(module)
        return known

    def list_names(self) -> None:
        """Take down what is below the module now."""
        owner = self.module()
        self.names = {} if owner is None else _names_below(owner)

    def find(self, module: Any) -> str | None:
        """Return as ``relative_name`` does, for modules that are called elsewhere: most of them are not below."""
        if self._known(module) is None and self.searches < MAX_REFRESHES:
            self.searches += 1
            self.list_names()
        return self._known(module)

    def _known(self, module: Any) -> str | None:
        reference, name = self.names.get(id(module), (None, None))
        return name if reference is not None and reference() is module else None

    def compiled_wrapper_of(self, module: Any) -> bool:
        """Return whether this node is what ``torch.compile(module)`` returned."""
        wrapper = self.module()
        return type(wrapper).__name__ == _COMPILED and wrapper._modules.get("_orig_mod") is module  # type: ignore[union-attr]


class ModuleNames:
    """Root modules by identity, weakly held.

    ``name(module, "ranker")`` gives a root its own name; its parts are then ``ranker.encoder.layers.3``.
    """

    def __init__(self) -> None:
        self._roots: dict[int, ModuleNode] = {}
        self._given: dict[int, tuple[weakref.ref[Any], str]] = {}

    def name(self, module: Any, name: str) -> None:
        """Give a root module its own name."""
        key, given = id(module), self._given
        given[key] = (weakref.ref(module, lambda _: given.pop(key, None)), name)
        self._roots.pop(key, None)
        self._make(module, name)

    def root(self, module: Any) -> ModuleNode:
        """Return the node of a module that no recorded module encloses: a whole model, or a part called by itself.

        A part of a root that is known has the name that it has inside it.
        """
        found = self._roots.get(id(module))
        if found is not None and found.module() is module:
            return found
        reference, name = self._given.get(id(module), (None, ""))
        is_given = reference is not None and reference() is module
        return self._make(module, name if is_given else self._path_in_others(module))

    def _path_in_others(self, module: Any) -> str:
        for other in list(self._roots.values()):
            relative = other.find(module)
            if relative is not None:
                return ".".join(part for part in (other.path, relative) if part)
        return ""

    def _make(self, module: Any, path: str) -> ModuleNode:
        """Add a root; what were roots and are parts of it get their names anew, by where they are in it."""
        key, roots = id(module), self._roots
        node = ModuleNode(module, path, None, lambda _: roots.pop(key, None))
        if roots:
            node.list_names()
        for other in list(roots):
            if other not in self._given and other in node.names:
                roots.pop(other, None)
        roots[key] = node
        return node


def _names_below(owner: Any) -> dict[int, tuple[weakref.ref[Any], str]]:
    """Return names by identity; the first name wins for a module that stands in several places."""
    names: dict[int, tuple[weakref.ref[Any], str]] = {}
    _walk(owner, "", names)
    return names


def _walk(module: Any, prefix: str, names: dict[int, tuple[weakref.ref[Any], str]]) -> None:
    inner = WRAPPERS.get(type(module).__name__)
    for name, part in list(module._modules.items()):
        if part is None or id(part) in names:
            continue
        shown = "" if name == inner or name in _WRAPPED_NAMES else name
        path = ".".join(word for word in (prefix, shown) if word)
        names[id(part)] = (weakref.ref(part), path)
        _walk(part, path, names)


def _class_name(module: Any) -> str:
    original = getattr(module, "original_name", None)  # a ScriptModule's class before scripting
    return original if isinstance(original, str) else type(module).__name__


def _site(module: Any, path: str) -> SpanSite:
    if type(module).__name__ == _COMPILED:
        module = module._modules["_orig_mod"]
    kind = _class_name(module)
    attributes: list[tuple[str, AttributeValue]] = [
        (semconv.MODULE_PATH, path or kind),
        (semconv.MODULE_CLASS, kind),
    ]
    return SpanSite(path or kind, attributes=(*attributes, *_code_of(module)))


def _code_of(module: Any) -> list[tuple[str, AttributeValue]]:
    """Return where the module's forward is written; nothing for compiled or scripted ones."""
    forward = vars(module).get("forward") or getattr(type(module), "forward", None)
    try:
        function = inspect.unwrap(getattr(forward, "__func__", forward))  # type: ignore[arg-type]
        code = function.__code__
    except (AttributeError, TypeError, ValueError):
        return []
    name = f"{function.__module__}.{function.__qualname__}"
    return [
        (semconv.CODE_FILE_PATH, code.co_filename),
        (semconv.CODE_FUNCTION_NAME, name),
        (semconv.CODE_LINE_NUMBER, code.co_firstlineno),
    ]
