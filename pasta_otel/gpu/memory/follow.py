"""Follow the program's tensors and modules from its first line on: one call, before that line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

from pasta_otel.gpu.memory.callers import calling_line
from pasta_otel.gpu.memory.follow_cupy import FollowCupy
from pasta_otel.gpu.memory.follow_torch import FollowTorch
from pasta_otel.gpu.memory.handlers import from_a_handler
from pasta_otel.gpu.memory.layers import TORCH, Layers
from pasta_otel.gpu.memory.tensors import Tensors
from pasta_otel.gpu.torch.imports import ImportWatch
from pasta_otel.gpu.torch.switch import HookSwitch

CUPY = "cupy"


def follow(tensors: Tensors, modules: dict[str, ModuleType] | None = None) -> Layers:
    """Have tensors told of what PyTorch and CuPy allocate, and hook torch's modules, once the program imports them.

    Args:
        tensors: Is told.
        modules: ``sys.modules``.

    Returns:
        Says which module a thread works for (``current``), and what could not be followed (``problems``).
    """
    modules = sys.modules if modules is None else modules
    layers = Layers(tensors, modules=modules)
    place = _place(layers)
    torch = FollowTorch(tensors, place, layers.report, modules)
    cupy = FollowCupy(tensors, place, layers.report, modules)
    switch = HookSwitch(layers, modules)

    def hook_modules() -> None:
        layers.bind(modules[TORCH])
        switch.activate()

    _once_there(TORCH, modules, hook_modules, layers)
    _once_there(TORCH, modules, torch.start, layers)
    _once_there(CUPY, modules, cupy.start, layers)
    return layers


def _place(layers: Layers) -> Callable[[], tuple[str, str]]:
    def place() -> tuple[str, str]:
        return calling_line(), layers.current()

    return place


def _once_there(name: str, modules: dict[str, ModuleType], start: Callable[[], object], layers: Layers) -> None:
    def imported() -> None:
        try:
            start()
        except Exception as error:  # the program's import goes on
            if from_a_handler(error):
                raise
            layers.report(error)

    if name in modules:
        imported()
    else:
        ImportWatch(name, imported).start()
