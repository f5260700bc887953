"""What the capture has to know from torch: its profiler begins, a backward pass changes threads, a graph is replayed.

Torch is never imported from here: its modules are taken from ``sys.modules`` once the program has imported them, and
the few functions that are replaced are put back by ``uninstall``.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from threading import get_ident
from types import ModuleType
from typing import Any

from pasta_otel.context import SpanIds, current_ids
from pasta_otel.gpu.cupti.capture import Capture
from pasta_otel.gpu.cupti.graphs import GraphRecorder
from pasta_otel.gpu.mapping import Region, Regions

_log = logging.getLogger(__name__)

PROFILER = "torch.profiler"
MAX_NODES = 3_000
"""Most nodes of an autograd graph to look at for where it changes devices: 6 ms, inside windows only."""


class TorchWatch:
    """Installs and removes what listens to torch.

    Args:
        capture: Stands back while torch.profiler records GPU activity.
        regions: Told about backward passes and graph replays.
        graphs: Records which module made which node of a CUDA graph; None = graph work has its span, and no module.
        modules: ``sys.modules``.
    """

    def __init__(
        self,
        capture: Capture,
        regions: Regions,
        graphs: GraphRecorder | None = None,
        modules: Mapping[str, ModuleType] = sys.modules,
    ) -> None:
        self._capture, self._regions, self._graphs, self._modules = capture, regions, graphs, modules
        self._ids = SpanIds()
        self._undo: list[Callable[[], None]] = []
        self._profiling = False

    def install(self) -> bool:
        """Listen to torch; False while the program has not imported it."""
        if self._undo:
            return True
        torch: Any = self._modules.get("torch")
        profiler: Any = self._modules.get("torch.autograd.profiler")
        if torch is None or profiler is None or not hasattr(profiler, "_enable_profiler"):
            return False
        self._watch_profiler(profiler)
        self._watch_backward(self._modules.get("torch.autograd"))
        graph_class = getattr(self._modules.get("torch.cuda.graphs"), "CUDAGraph", None)
        if graph_class is not None and hasattr(graph_class, "replay"):
            self._capture.graphs_in_use |= any(type(item) is graph_class for item in gc.get_objects())
            self._watch_graphs(graph_class)
        return True

    def uninstall(self) -> None:
        """Put everything back."""
        while self._undo:
            self._undo.pop()()

    def _replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = getattr(owner, name, None)
        if original is None:
            return
        own = name in vars(owner)
        replacement = make(original)
        setattr(owner, name, replacement)

        def undo() -> None:
            if getattr(owner, name, None) is not replacement:
                return  # somebody else has replaced ours since: leave it
            if own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)

        self._undo.append(undo)

    # -- torch.profiler: Kineto takes CUPTI's callbacks, and loses its records while our buffers are in use ------------

    def _watch_profiler(self, profiler: Any) -> None:
        def before(original: Callable[..., Any]) -> Callable[..., Any]:
            def begin(config: Any, activities: Any, *more: Any, **options: Any) -> Any:
                if any(getattr(activity, "name", "") == "CUDA" for activity in activities):
                    self._profiler_begins()
                return original(config, activities, *more, **options)

            return begin

        def after(original: Callable[..., Any]) -> Callable[..., Any]:
            def end(*arguments: Any, **options: Any) -> Any:
                try:
                    return original(*arguments, **options)
                finally:
                    self._profiler_ends()

            return end

        self._replace(profiler, "_prepare_profiler", before)
        self._replace(profiler, "_enable_profiler", before)
        self._replace(profiler, "_disable_profiler", after)

    def _profiler_begins(self) -> None:
        if not self._profiling:
            self._profiling = True
            self._capture.hold(PROFILER)

    def _profiler_ends(self) -> None:
        if self._profiling:
            self._profiling = False
            # Kineto keeps its subscription after the first session unless its teardown is on (default from CUDA 12.6
            # in builds of 2026): the subscription alone then says nothing about anybody recording.
            self._capture.release(PROFILER, idle_subscriber=True)

    # -- backward: autograd launches from threads of its own -----------------------------------------------------------

    def _watch_backward(self, autograd: Any) -> None:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def run_backward(outputs: Any, *arguments: Any, **options: Any) -> Any:
                handles, external_id = self._enter_backward(outputs)
                try:
                    return original(outputs, *arguments, **options)
                finally:
                    for handle in handles:
                        handle.remove()
                    if handles:
                        self._regions.end(external_id)

            return run_backward

        if autograd is not None:
            self._replace(autograd, "_engine_run_backward", make)

    def _enter_backward(self, outputs: Any) -> tuple[list[Any], int]:
        """Have a backward pass put the threads that it uses under the current span; returns what to take off."""
        ids = current_ids() if self._regions.recording else None
        if ids is None:
            return [], 0
        external_id, region, caller = self._ids(), Region(ids.trace_id, ids.span_id), get_ident()

        def first(_: object) -> None:
            if get_ident() != caller:  # the caller's own thread knows better: it stands in its own regions
                self._regions.take_over(external_id, region)

        handles: list[Any] = []
        try:
            nodes = (getattr(output, "grad_fn", None) or getattr(output, "node", None) for output in outputs)
            heads: list[Any] = [node for node in nodes if node is not None]
            if _on_several_devices(heads, self._modules.get("torch")):
                heads = first_by_device(heads)
            handles += [node.register_prehook(first) for node in heads]
        except (RuntimeError, TypeError, AttributeError):
            _log.debug("a backward pass could not be watched", exc_info=True)
        return handles, external_id

    # -- CUDA graphs ---------------------------------------------------------------------------------------------------

    def _watch_graphs(self, graph_class: Any) -> None:
        graphs = self._graphs

        def replay(original: Callable[..., Any]) -> Callable[..., Any]:
            def replayed(graph: Any) -> Any:
                ids = current_ids() if self._regions.recording else None
                if ids is None:
                    return original(graph)
                nodes = graphs.nodes_of(graph) if graphs is not None else None
                external_id = self._ids()
                self._regions.enter_as(external_id, Region(ids.trace_id, ids.span_id, None, nodes))
                try:
                    return original(graph)
                finally:
                    self._regions.leave(external_id)

            return replayed

        def begin(original: Callable[..., Any]) -> Callable[..., Any]:
            noted = original if graphs is None else graphs.wrap_begin(original)

            def capture_begin(graph: Any, *arguments: Any, **options: Any) -> Any:
                self._capture.graphs_in_use = True  # before the graph is: CUPTI must not be detached from now on
                return noted(graph, *arguments, **options)

            return capture_begin

        self._replace(graph_class, "replay", replay)
        self._replace(graph_class, "capture_begin", begin)
        if graphs is not None:
            self._replace(graph_class, "capture_end", graphs.wrap_end)


def _on_several_devices(heads: Iterable[Any], torch: Any) -> bool:
    """Return whether a backward pass can leave the thread that it begins on: autograd has one for each GPU."""
    used = getattr(getattr(torch, "_C", None), "_cuda_hasPrimaryContext", None)
    if used is None or not torch.cuda.is_initialized():
        return False
    if any(_device_of(node) is None for node in heads):  # a loss that was brought to the CPU
        return True
    return sum(map(bool, map(used, range(torch.cuda.device_count())))) > 1


def first_by_device(heads: Iterable[Any], limit: int = MAX_NODES) -> list[Any]:
    """Return the nodes with which a backward pass can begin on some device's thread.

    Autograd runs a node on the thread of its gradient's device; the first on a thread is where the graph begins, or a
    node whose gradient comes from another device.

    Args:
        heads: Where the backward pass begins.
        limit: Most nodes to look at; a walk costs about 2 us a node.
    """
    found = dict.fromkeys(heads)
    seen, waiting = set(found), deque(found)
    while waiting and len(seen) < limit:
        node = waiting.popleft()
        place = _device_of(node)
        for follower, _ in node.next_functions:
            if follower is None:
                continue
            if _device_of(follower) != place:
                found[follower] = None
            if follower not in seen:
                seen.add(follower)
                waiting.append(follower)
    return list(found)


def _device_of(node: Any) -> Any:
    inputs = getattr(node, "_input_metadata", None)  # torch 2.1; without it every node is taken to be on one device
    return next((item.device for item in inputs if item.device.type != "cpu"), None) if inputs else None
