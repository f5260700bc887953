"""Tells when the program imports a module, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class ImportWatch:
    """Call back once, right after a module has been imported.

    Args:
        name: The module's full name.
        imported: Called after the module's own code has run.
    """

    def __init__(self, name: str, imported: Callable[[], None]) -> None:
        self._name, self._imported = name, imported

    def start(self) -> None:
        """Begin to watch."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """Stop watching."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Let the other finders find the module, and add the call to its loader (importlib's protocol)."""
        del path, target
        if name != self._name:
            return None
        self.stop()
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            self._add_call(spec.loader)
        return spec

    def _add_call(self, loader: Any) -> None:
        execute = loader.exec_module

        def execute_and_tell(module: ModuleType) -> None:
            execute(module)
            self._imported()

        loader.exec_module = execute_and_tell
