"""Puts the recorder's hooks into torch's global hook tables, and takes them out without leaving anything."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

from pasta_otel.gpu.torch.imports import ImportWatch

TORCH_MODULE = "torch.nn.modules.module"
DYNAMO_CALLBACKS = "torch._dynamo.callback"
DYNAMO_FRAMES = "torch._C._dynamo.eval_frame"


class Hooks(Protocol):
    """A pair of hooks of every module, and a number to be raised whenever they were away for a while."""

    before: Callable[[Any, Any], None]
    after: Callable[[Any, Any, Any], None]
    epoch: int


class HookSwitch:
    """Install and remove the hooks; hide them while torch compiles.

    A region that is compiled while hooks are installed would contain them, and would be compiled again without them. So
    dynamo's compilation callbacks take the hooks out for as long as anything compiles.

    Args:
        recorder: Has the hooks.
        modules: ``sys.modules``: torch is used when the program has imported it, and never imported from here.
    """

    def __init__(self, recorder: Hooks, modules: dict[str, ModuleType] | None = None) -> None:
        self._recorder = recorder
        self._modules = sys.modules if modules is None else modules
        self._lock = threading.Lock()
        self._wanted, self._compiling = False, 0
        self._undo: list[Callable[[], None]] = []
        self._warning_check: Any = None
        self._prepared = self._awaiting_dynamo = False
        self._dynamo_import = ImportWatch(DYNAMO_CALLBACKS, self._watch_compiler)
        if hasattr(os, "register_at_fork"):
            own = weakref.WeakMethod(self._after_fork)
            os.register_at_fork(after_in_child=lambda: (method := own()) and method())

    @property
    def installed(self) -> bool:
        """Whether the hooks are in torch's tables now."""
        return bool(self._undo)

    def activate(self) -> None:
        """Install the hooks if torch is there and nothing compiles."""
        with self._lock:
            self._wanted = True
            self._apply()

    def deactivate(self) -> None:
        """Remove the hooks."""
        with self._lock:
            self._wanted = False
            self._apply()

    def close(self) -> None:
        """Remove the hooks and everything that was set up for them."""
        self.deactivate()
        self._prepared = self._awaiting_dynamo = False
        self._dynamo_import.stop()
        torch_module = self._modules.get(TORCH_MODULE)
        if self._warning_check is not None and torch_module is not None:
            torch_module._has_any_global_hook = self._warning_check  # type: ignore[attr-defined]
            self._warning_check = None
        callbacks = self._modules.get(DYNAMO_CALLBACKS)
        handler = getattr(callbacks, "callback_handler", None)
        if handler is not None:
            _drop(handler.start_callbacks, self.compile_started)
            _drop(handler.end_callbacks, self.compile_ended)

    def compile_started(self, *_: object) -> None:
        """Take the hooks out: torch begins to compile (dynamo callback)."""
        with self._lock:
            self._compiling += 1
            self._apply()

    def compile_ended(self, *_: object) -> None:
        """Put the hooks back (dynamo callback)."""
        with self._lock:
            self._compiling = max(0, self._compiling - 1)
            self._apply()

    def _watch_compiler(self) -> None:
        """Ask dynamo to tell when it compiles; again each time, because ``torch._dynamo.reset()`` forgets it."""
        handler = getattr(self._modules.get(DYNAMO_CALLBACKS), "callback_handler", None)
        if handler is None:
            if not self._awaiting_dynamo:
                self._awaiting_dynamo = True
                self._dynamo_import.start()
        elif self.compile_started not in handler.start_callbacks:
            handler.register_start_callback(self.compile_started)
            handler.register_end_callback(self.compile_ended)

    def _apply(self) -> None:
        wanted = self._wanted and not self._compiling
        if self._wanted:
            self._watch_compiler()
        if wanted and not self._undo:
            self._install()
        elif not wanted and self._undo:
            self._recorder.epoch += 1
            while self._undo:
                self._undo.pop()()

    def _install(self) -> None:
        torch_module: Any = self._modules.get(TORCH_MODULE)
        if not hasattr(torch_module, "register_module_forward_hook") or not hasattr(torch_module, "Module"):
            return  # not imported, or being imported by another thread: the next trace will find it
        recorder = self._recorder
        if not self._prepared:
            self._prepared = True
            self._quieten(torch_module)
            _keep_from_dynamo(self._modules, recorder.before, recorder.after)
        if torch_module._global_forward_hooks:
            self._undo.append(_exchange(torch_module, recorder.after))
        else:
            self._undo.append(torch_module.register_module_forward_hook(recorder.after, always_call=True).remove)
        self._undo.append(torch_module.register_module_forward_pre_hook(recorder.before).remove)

    def _quieten(self, torch_module: Any) -> None:
        """Let torch's warning about global hooks on compiled modules speak of other people's hooks only."""
        original = getattr(torch_module, "_has_any_global_hook", None)
        if original is None:
            return
        self._warning_check = original

        def has_other_hooks() -> bool:
            return bool(original()) and not (self._undo and _only_ours(torch_module))

        torch_module._has_any_global_hook = has_other_hooks

    def _after_fork(self) -> None:
        self._lock = threading.Lock()
        self._compiling = 0


def _exchange(torch_module: Any, hook: Any) -> Callable[[], None]:
    """Put a table with everybody's hooks and ours in the place of torch's; returns what undoes it.

    Torch walks that table in Python while it handles an error of a model. If it has several hooks, and another thread
    changes it meanwhile, the model's error becomes a RuntimeError; so it is exchanged instead of changed. Compiled code
    checks the table's type and nothing else of it, so it must be a plain OrderedDict.
    """
    table = torch_module._global_forward_hooks
    always = torch_module._global_forward_hooks_always_called
    key = torch_module.RemovableHandle(table).id
    own: OrderedDict[int, Any] = OrderedDict((k, _while_there(table, k)) for k in table)
    own[key] = hook
    always[key] = True
    known = len(own)
    torch_module._global_forward_hooks = own

    def undo() -> None:
        if torch_module._global_forward_hooks is own:
            if (
                len(own) > known
            ):  # somebody registered a hook meanwhile, and holds a handle to this very table: leave it
                del own[key]
            else:
                torch_module._global_forward_hooks = table
        always.pop(key, None)

    return undo


def _while_there(table: OrderedDict[int, Any], key: int) -> Callable[..., Any]:
    """Return a hook that calls another one until its owner removes it from the table that the owner's handle knows."""

    def call(*arguments: Any) -> Any:
        hook = table.get(key)
        return None if hook is None else hook(*arguments)

    return call


def _keep_from_dynamo(modules: dict[str, ModuleType], *hooks: Any) -> None:
    """Let dynamo run our hooks, and all that they call, as plain Python: it compiles frames, and hooks are frames too.

    Around a compiled module torch runs the hooks itself, but already under dynamo's frame evaluation.
    """
    frames: Any = modules.get(DYNAMO_FRAMES)
    for hook in hooks:
        if hasattr(frames, "set_code_exec_strategy"):
            skip = frames._FrameAction.SKIP
            frames.set_code_exec_strategy(hook.__code__, frames._FrameExecStrategy(skip, skip))
        elif hasattr(frames, "skip_code"):  # torch 2.4 to 2.6
            frames.skip_code(hook.__code__)


def _only_ours(torch_module: Any) -> bool:
    tables = (
        torch_module._global_forward_pre_hooks,
        torch_module._global_forward_hooks,
    )
    others = (torch_module._global_backward_pre_hooks, torch_module._global_backward_hooks)
    return all(len(table) == 1 for table in tables) and not any(others)


def _drop(callbacks: list[Any], callback: Any) -> None:
    while callback in callbacks:
        callbacks.remove(callback)
