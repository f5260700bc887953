"""Which torch module a thread is in, by global forward hooks; and the names of modules' parameters and buffers.

Autograd launches the backward pass from threads of its own, where no module runs. It numbers the nodes of its graph, in
each thread by itself, as the forward pass makes them: a node belongs to the module that its thread was in when that
number was given.
"""

from __future__ import annotations

import sys
import threading
import weakref
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator
from operator import attrgetter
from types import FrameType, ModuleType
from typing import Any, Protocol

from pasta_otel.gpu.memory.handlers import from_a_handler
from pasta_otel.gpu.torch.frames import running_modules
from pasta_otel.gpu.torch.names import ModuleNames, ModuleNode

TORCH = "torch"
MOST_STEPS = 100_000
"""Changes of module that are remembered for each thread; a forward pass of 150 modules makes 300."""
MOST_THREADS = 64
"""Threads whose changes are remembered."""

_Call = tuple[Any, ModuleNode, int]  # module, its node, epoch


class Naming(Protocol):
    """Takes the names of tensors."""

    def name(self, address: int, name: str, /) -> None:
        """Name the tensor that holds an address."""


class _Steps:
    """One thread's changes of module, by the number of the next node that autograd makes there."""

    __slots__ = ("last", "names", "numbers")

    def __init__(self) -> None:
        self.numbers, self.names = array("Q"), [""]  # names[0]: before the first change
        self.last = -1

    def add(self, number: int, name: str) -> None:
        """Note that from this number on, which is greater than ``last``, the thread is in another module."""
        self.last = number
        self.numbers.append(number)
        self.names.append(name)
        if len(self.numbers) > MOST_STEPS:
            del self.numbers[: MOST_STEPS // 2], self.names[: MOST_STEPS // 2]
            self.names[0] = ""

    def at(self, number: int) -> str | None:
        """Return the module of a node with this number; None if the thread has surely not made it."""
        if number >= self.last:
            return None
        return self.names[bisect_right(self.numbers, number)]


class _Thread:
    """A thread's open module calls, innermost last, and its changes; None before the first."""

    __slots__ = ("stack", "steps")

    def __init__(self) -> None:
        self.stack: list[_Call] = []
        self.steps: _Steps | None = None


class _Local(threading.local):
    """This thread's state: one slow look-up for all of it."""

    def __init__(self) -> None:
        self.thread = _Thread()


class Layers:
    """The pair of hooks and what they find out.

    Args:
        tensors: Takes the names of parameters and buffers.
        names: Qualified names of modules.
        device_type: Of the parameters that are named.
        modules: ``sys.modules``: torch is used when the program has imported it, and never imported from here.

    Attributes:
        before: Forward pre-hook of all modules.
        after: Forward hook of all modules, called in any case.
        epoch: Raised whenever the hooks were away for a while.
        problems: What went wrong, each once.
    """

    def __init__(
        self,
        tensors: Naming,
        names: ModuleNames | None = None,
        device_type: str = "cuda",
        modules: dict[str, ModuleType] | None = None,
    ) -> None:
        self._names, self._modules = names or ModuleNames(), sys.modules if modules is None else modules
        self._parameters = Parameters(tensors, device_type)
        self._local, self._threads, self._forgotten = _Local(), list[_Steps](), 0
        self._places: weakref.WeakKeyDictionary[Any, ModuleNode] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self.epoch = 0
        self.problems: set[str] = set()
        self._next_number: Callable[[], int] = _zero
        self.before, self.after = _hooks(self, _never)

    def bind(self, torch: Any) -> None:
        """Take autograd's numbers from this torch, and make the hooks anew: its compiler sees nothing in them."""
        self._next_number = getattr(torch.autograd, "_get_sequence_nr", _zero)
        compiling = getattr(getattr(torch, "compiler", None), "is_compiling", None)
        self.before, self.after = _hooks(self, compiling or _never)

    def current(self) -> str:
        """Return the qualified name of the module that this thread works for; empty where there is none.

        In the backward pass that is the module whose forward pass made the node of autograd's graph; empty where
        several threads may have made it.
        """
        try:
            thread = self._local.thread
            stack = thread.stack
            if stack and stack[-1][2] != self.epoch:
                self._prune(thread, sys._getframe(1))
            return stack[-1][1].site.name if stack else self._of_backward()
        except Exception as error:
            if from_a_handler(error):
                raise
            self.report(error)
            return ""

    def report(self, problem: object) -> None:
        """Note what went wrong; exceptions by their type and text."""
        words = f"{type(problem).__name__}: {problem}" if isinstance(problem, Exception) else str(problem)
        self.problems.add(words)

    def enter(self, module: Any) -> None:
        """Note that a module's call begins in this thread."""
        thread = self._local.thread
        stack = thread.stack
        if stack and stack[-1][2] != self.epoch:
            self._prune(thread, sys._getframe(2).f_back)  # without the call that begins
        if stack:
            outside = stack[-1][1]
            found = outside.children.get(id(module))
            node = found if found is not None and found.module() is module else self._add(outside, module)
        else:
            node = self._places.get(module) or self._names.root(module)
            self._parameters.name(module, node)
        stack.append((module, node, self.epoch))
        self._step(thread, node.site.name)

    def _add(self, outside: ModuleNode, module: Any) -> ModuleNode:
        """Return a new node, whose name holds where the module is called by itself too (recomputed activations)."""
        node = outside.add(module)
        self._places.setdefault(module, node)
        return node

    def leave(self, module: Any) -> None:
        """Note that a module's call ends in this thread; calls inside it that did not, have ended too."""
        thread = self._local.thread
        stack = thread.stack
        for at in range(len(stack) - 1, -1, -1):
            if stack[at][0] is module:
                del stack[at:]
                self._step(thread, stack[-1][1].site.name if stack else "")
                return

    def _step(self, thread: _Thread, name: str) -> None:
        steps = thread.steps
        if steps is None:
            steps = thread.steps = _Steps()
            self._remember(steps)
        number = self._next_number()
        if number == steps.last:
            steps.names[-1] = name
        else:
            steps.add(number, name)

    def _remember(self, steps: _Steps) -> None:
        with self._lock:
            self._threads.append(steps)
            if len(self._threads) > MOST_THREADS:
                gone = self._threads.pop(0)
                self._forgotten = max(self._forgotten, gone.last)

    def _prune(self, thread: _Thread, frame: FrameType | None) -> None:
        """Drop calls that ended while the hooks were away: those that no frame of this thread is running any more."""
        stack = thread.stack
        kept: list[_Call] = []
        for module in running_modules(frame):
            if len(kept) < len(stack) and stack[len(kept)][0] is module:
                kept.append((*stack[len(kept)][:2], self.epoch))
        stack[:] = kept
        self._step(thread, kept[-1][1].site.name if kept else "")

    def _of_backward(self) -> str:
        torch: Any = self._modules.get(TORCH)
        current = getattr(getattr(torch, "_C", None), "_current_autograd_node", None)
        node = None if current is None else current()
        if node is None:
            return ""
        if type(node).__name__ == "AccumulateGrad":  # belongs to a parameter, and has no number
            return self._parameters.module_of(node.variable)
        number = node._sequence_nr()
        found = {steps.at(number) for steps in tuple(self._threads)} - {None}
        return found.pop() or "" if len(found) == 1 and number >= self._forgotten else ""


def _never() -> bool:
    return False


def _zero() -> int:
    return 0


def _hooks(
    layers: Layers, compiling: Callable[[], bool]
) -> tuple[Callable[[Any, Any], None], Callable[[Any, Any, Any], None]]:
    # HookSwitch takes them out while torch compiles, unless ``torch._dynamo.reset()`` has just forgotten its callbacks;
    # then dynamo reads them, as they are, into the graph: the first line ends them there.
    def before(module: Any, _arguments: Any) -> None:
        if compiling():
            return
        try:
            layers.enter(module)
        except Exception as error:
            if from_a_handler(error):
                raise
            layers.report(error)

    def after(module: Any, _arguments: Any, _result: Any) -> None:
        if compiling():
            return
        try:
            layers.leave(module)
        except Exception as error:
            if from_a_handler(error):
                raise
            layers.report(error)

    return before, after


_Watched = list[tuple["weakref.ref[Any]", int]]  # a parameter, where it was when it was named; 0 = not on the device


class Parameters:
    """Gives tensors the qualified names of parameters and buffers, anew when one has moved.

    Args:
        tensors: Takes the names.
        device_type: Of the parameters that are named: ``cuda``, ``cpu``.
    """

    def __init__(self, tensors: Naming, device_type: str) -> None:
        self._tensors, self._on_device = tensors, attrgetter(f"is_{device_type}")
        self._roots: dict[int, tuple[weakref.ref[Any], _Watched]] = {}
        self._owners: dict[int, tuple[weakref.ref[Any], str]] = {}

    def name(self, root: Any, node: ModuleNode) -> None:
        """Name what a module holds that no other module encloses, unless it was named where it still is."""
        key, roots = id(root), self._roots
        reference, watched = roots.get(key, (None, []))
        known = reference is not None and reference() is root
        if known and all(self._address(held()) == address for held, address in watched):
            return
        watched = []
        roots[key] = (weakref.ref(root, lambda _: roots.pop(key, None)), watched)
        for tensor, owner, name in _held(root, node):
            address = self._address(tensor)
            watched.append((weakref.ref(tensor), address or 0))
            self._own(tensor, owner)
            if address:
                self._tensors.name(address, name)

    def module_of(self, tensor: Any) -> str:
        """Return the qualified name of the module that holds a parameter."""
        reference, owner = self._owners.get(id(tensor), (None, ""))
        return owner if reference is not None and reference() is tensor else ""

    def _own(self, tensor: Any, owner: str) -> None:
        key, owners = id(tensor), self._owners
        if not self.module_of(tensor):
            owners[key] = (weakref.ref(tensor, lambda _: owners.pop(key, None)), owner)

    def _address(self, tensor: Any) -> int | None:
        """Return where a tensor lies; 0 if not on the device, None if it is gone."""
        if tensor is None:
            return None
        try:
            return tensor.data_ptr() if self._on_device(tensor) else 0
        except (RuntimeError, NotImplementedError, ValueError):  # no storage: lazy, functional or wrapped tensors
            return 0


def _held(root: Any, node: ModuleNode) -> Iterator[tuple[Any, str, str]]:
    """Yield the parameters and buffers below a module: tensor, name of the module that holds it, its own name."""
    for module in list(root.modules()):
        below = "" if module is root else node.relative_name(module) or ""
        owner = ".".join(part for part in (node.path, below) if part)
        for table in (module._parameters, module._buffers):
            for name, tensor in list(table.items()):
                if tensor is not None:
                    yield tensor, owner or node.site.name, f"{owner}.{name}" if owner else name
