"""What the capture has to know from torch: its profiler begins, a backward pass changes threads, a graph is replayed.

Torch is never imported from here: its modules are taken from ``sys.modules`` once the program has imported them, and
the few functions that are replaced are put back by ``uninstall``.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from pasta_otel.context import SpanIds, current_ids
from pasta_otel.gpu.cupti.capture import Capture
from pasta_otel.gpu.cupti.graphs import GraphRecorder
from pasta_otel.gpu.mapping import Region, Regions

_log = logging.getLogger(__name__)

PROFILER = "torch.profiler"


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
        """Have the first node of the backward pass put its thread under the current span; returns what to take off."""
        if not self._capture.is_open:
            return [], 0
        ids = current_ids()
        if ids is None:
            return [], 0
        external_id, region = self._ids(), Region(ids.trace_id, ids.span_id)

        def first(_: object) -> None:
            self._regions.take_over(external_id, region)

        handles = []
        try:
            for output in outputs:
                node = getattr(output, "grad_fn", None) or getattr(output, "node", None)
                if node is not None:
                    handles.append(node.register_prehook(first))
        except (RuntimeError, TypeError, AttributeError):
            _log.debug("a backward pass could not be watched", exc_info=True)
        return handles, external_id

    # -- CUDA graphs ---------------------------------------------------------------------------------------------------

    def _watch_graphs(self, graph_class: Any) -> None:
        graphs = self._graphs

        def replay(original: Callable[..., Any]) -> Callable[..., Any]:
            def replayed(graph: Any) -> Any:
                ids = current_ids() if self._capture.is_open else None
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
