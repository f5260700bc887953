"""Which module made which node of a CUDA graph, noted while the graph is captured.

A GPU kernel of a replayed graph says ``graph id << 32 | node``. The node is the position at which it was added to the
captured graph, and instantiation keeps it: CUPTI documents neither, torch relies on the latter as well (its
``remap_to_exec_graph``), and ``tests/gpu`` asserts both by GPU kernel names on the machine it runs on. While a module
runs during capture, the graph grows by the nodes that the module adds: the driver's node count before and after tells
which.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from pasta_otel.gpu.torch.names import ModuleNames, ModuleNode

_log = logging.getLogger(__name__)

CAPTURE_ACTIVE = 1
"""``CU_STREAM_CAPTURE_STATUS_ACTIVE``."""


class GraphDriver(Protocol):
    """What is asked about the graph that a stream is capturing into."""

    def node_count(self, stream: int) -> int:
        """Return how many nodes the graph has so far; 0 when the stream is not capturing."""


class CudaDriver:
    """The CUDA driver library, asked by ctypes: captures are rare and short."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._info = library.cuStreamGetCaptureInfo_v2
        self._nodes = library.cuGraphGetNodes

    @classmethod
    def load(cls) -> CudaDriver | None:
        """Return the driver, or None where there is none, or one without these calls."""
        try:
            return cls(ctypes.CDLL("libcuda.so.1"))
        except (OSError, AttributeError):
            return None

    def node_count(self, stream: int) -> int:
        """Return how many nodes the graph has so far; 0 when the stream is not capturing."""
        status, graph, count = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_size_t()
        code = self._info(ctypes.c_void_p(stream), ctypes.byref(status), None, ctypes.byref(graph), None, None)
        if code != 0 or status.value != CAPTURE_ACTIVE or not graph.value:
            return 0
        if self._nodes(graph, None, ctypes.byref(count)) != 0:
            return 0
        return count.value


class _Recording(threading.local):
    """The capture under way on this thread."""

    def __init__(self) -> None:
        self.stream: Callable[[], int] | None = None
        self.nodes: dict[int, str] = {}
        self.stack: list[ModuleNode] = []
        self.seen = 0
        self.undo: list[Any] = []


class GraphRecorder:
    """Notes modules by node while ``torch.cuda.CUDAGraph`` captures.

    Args:
        driver: Counts nodes.
        hooks: ``torch.nn.modules.module``, for hooks that live only while a graph is captured.
        stream: The current CUDA stream's handle.
        names: Qualified names of modules.
    """

    def __init__(self, driver: GraphDriver, hooks: Any, stream: Callable[[], int], names: ModuleNames) -> None:
        self._driver, self._hooks, self._stream, self._names = driver, hooks, stream, names
        self._local = _Recording()
        self._graphs: weakref.WeakKeyDictionary[Any, Mapping[int, str]] = weakref.WeakKeyDictionary()

    def nodes_of(self, graph: Any) -> Mapping[int, str] | None:
        """Return module paths by node of a graph, or None when its capture was not seen."""
        return self._graphs.get(graph)

    def wrap_begin(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a ``capture_begin`` that also begins to note."""

        def capture_begin(graph: Any, *arguments: Any, **options: Any) -> Any:
            result = original(graph, *arguments, **options)
            _guarded(self._begin)
            return result

        return capture_begin

    def wrap_end(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a ``capture_end`` that also keeps what was noted."""

        def capture_end(graph: Any, *arguments: Any, **options: Any) -> Any:
            _guarded(self._boundary)
            noted = self._finish()
            result = original(graph, *arguments, **options)
            if noted:
                self._graphs[graph] = noted
            return result

        return capture_end

    def _begin(self) -> None:
        local = self._local
        self._finish()
        local.nodes, local.stack, local.seen = {}, [], 0
        before = self._hooks.register_module_forward_pre_hook(self._enter)
        after = self._hooks.register_module_forward_hook(self._leave, always_call=True)
        local.undo = [before, after]
        local.seen = self._driver.node_count(self._stream())

    def _finish(self) -> dict[int, str]:
        local = self._local
        while local.undo:
            local.undo.pop().remove()
        noted, local.nodes = local.nodes, {}
        return noted

    def _enter(self, module: Any, _arguments: Any) -> None:
        if self._local.undo:
            _guarded(self._boundary)
            stack = self._local.stack
            stack.append(_below(stack[-1], module) if stack else self._names.root(module))

    def _leave(self, _module: Any, _arguments: Any, _result: Any) -> None:
        if self._local.undo:
            _guarded(self._boundary)
            if self._local.stack:
                self._local.stack.pop()

    def _boundary(self) -> None:
        """Give the nodes added since the last boundary to the innermost module."""
        local = self._local
        if not local.undo:
            return
        count = self._driver.node_count(self._stream())
        if local.stack:
            for node in range(local.seen, count):
                local.nodes[node] = local.stack[-1].site.name
        local.seen = max(local.seen, count)


def _below(outer: ModuleNode, module: Any) -> ModuleNode:
    found = outer.children.get(id(module))
    return found if found is not None and found.module() is module else outer.add(module)


def _guarded(action: Callable[[], None]) -> None:
    try:
        action()
    except Exception:  # noqa: BLE001 - telemetry never breaks the model
        _log.debug("a CUDA graph's capture could not be noted", exc_info=True)
