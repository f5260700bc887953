"""``with pasta_otel.analyze() as analysis:`` analyse what a part of the program launches, or say why that cannot be."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from pasta_otel.errors import MissingError, PastaError, StateError
from pasta_otel.gpu.memory import child
from pasta_otel.gpu.memory.blocks import Part
from pasta_otel.gpu.memory.handlers import from_a_handler
from pasta_otel.gpu.memory.library import DRIVER
from pasta_otel.gpu.memory.selection import Selection
from pasta_otel.gpu.memory.tool import Tool
from pasta_otel.gpu.memory.tool_report import ToolReport

if TYPE_CHECKING:
    from pasta_otel.gpu.memory.report import MemoryReport
    from pasta_otel.gpu.memory.session import Session

NOT_INITIALIZED = 3
"""``CUDA_ERROR_NOT_INITIALIZED``."""
MEMORY = "memory"
START = "start the program by `pasta-otel analyze memory --regions -- CMD`"
_starting = threading.RLock()


class Analysis:
    """What the launches inside a block did to memory, as far as their streams have passed.

    It can be entered again, and then holds what all its blocks launched. Launches of every thread count while it is
    open: PyTorch's backward pass launches from threads of its own.

    Args:
        selection: Which launches.
        tool: What to count; None = what the process counts already, else memory accesses.
        hotness: Whether to count by 2 MiB range and by tensor too.
        settings: Returns what names the library and the patches; asked where this process begins to be analysed.
    """

    def __init__(
        self,
        selection: Selection,
        tool: Tool[Any] | None = None,
        *,
        hotness: bool = True,
        settings: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._selection, self._wanted, self._hotness, self._settings = selection, tool, hotness, settings
        self._part = Part(selection)
        self._session: Session | None = None
        self._entered: list[tuple[int, Session | None]] = []
        """The threads that are inside, and where their blocks are open."""
        self._problem = "not entered yet"

    def __enter__(self) -> Self:
        """Begin; where that cannot be, the block runs as if nothing were there."""
        opened: Session | None = None
        try:
            session = self._find()
            session.open(self._part)
            self._session, self._problem, opened = session, "", session
        except PastaError as error:
            self._problem = " ".join(str(error).split())
        except ImportError as error:
            self._problem = f"{error.name} is not installed; pip install 'pasta-otel[gpu]'"
        except Exception as error:  # the program's block runs
            if from_a_handler(error):
                raise
            self._problem = " ".join(f"{type(error).__name__}: {error}".split())
        self._entered.append((threading.get_ident(), opened))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End; exceptions of the block pass."""
        del kind, error, trace
        me = threading.get_ident()
        with _starting:
            own = [at for at, (thread, _) in enumerate(self._entered) if thread == me]
            _, opened = self._entered.pop(
                own[-1] if own else -1
            )  # a block may be left by another thread than entered it
        if opened is not None:
            opened.close(self._part)

    def _find(self) -> Session:
        """Return the analysis of this process, begun if need be.

        Raises:
            PastaError: There can be none; says why.
        """
        from pasta_otel.gpu.memory.session import inherited, running  # noqa: PLC0415 - numpy is an optional extra

        if inherited():
            raise StateError("not available in a process that was forked from an analysed one")
        with _starting:
            session = running() or self._begin()
        if self._wanted is not None and self._wanted.name != session.tool.name:
            raise StateError(f"this process is analysed with the tool {session.tool.name}, not {self._wanted.name}")
        return session

    def _begin(self) -> Session:
        """Begin to analyse this process, which then stays prepared for it."""
        refuse_if_busy(os.environ)
        from pasta_otel.gpu.memory import library  # noqa: PLC0415 - only in processes that can be analysed
        from pasta_otel.gpu.memory.session import MEMORY_TOOL, Job, Session  # noqa: PLC0415 - numpy

        environ = {**os.environ, **self._settings()}
        code = None if self._wanted is None else Path(self._wanted.source)
        found = library.find_library(environ), library.find_patch(environ, code)
        # every module is patched: a later block may want its GPU kernels
        everything = Selection((), 1, sys.maxsize, self._selection.device_bytes)
        job = Job(*found, everything, MEMORY_TOOL, {"hotness": self._hotness}, regions=True)
        session = Session(job, self._wanted, keep=False)
        try:
            session.start()
        except StateError as error:
            raise StateError(f"not available, {error}{_who_has_cupti()}") from error
        atexit.register(session.finish)
        return session

    @property
    def available(self) -> bool:
        """Return whether launches in the block are analysed."""
        return not self.problem

    @property
    def problem(self) -> str:
        """Return why nothing is analysed, in one line; empty = nothing is wrong."""
        if self._problem or self._session is None or self._part.launches or self.pending:
            return self._problem
        return "; ".join(self._session.collector.problems)

    @property
    def pending(self) -> int:
        """Return how many launches are not in yet: nothing has waited for their stream since."""
        if self._session is not None:
            self._session.settle()
        return self._part.pending

    def as_dict(self) -> dict[str, Any]:
        """Return what is known so far as JSON-compatible data."""
        return {"available": self.available, "pending": self.pending, **self._report().as_dict()}

    def text(self) -> str:
        """Return what is known so far as text."""
        if not self.available:
            return f"not analysed: {self.problem}"
        return "\n".join([*self._waiting(), self._text()])

    def html(self) -> str:
        """Return what is known so far as a page."""
        report = self._report()
        if isinstance(report, ToolReport):
            return report.as_html()
        from pasta_otel.gpu.memory.page import as_html  # noqa: PLC0415 - only where it is asked for

        return as_html(report)

    def _text(self) -> str:
        report = self._report()
        if isinstance(report, ToolReport):
            return report.as_text()
        from pasta_otel.gpu.memory.text import as_text  # noqa: PLC0415 - only where it is asked for

        return as_text(report)

    def _waiting(self) -> list[str]:
        if not self.pending:
            return []
        return [f"{self.pending:,} launches are not in yet: synchronise their streams first"]

    def _report(self) -> MemoryReport | ToolReport:
        document = _nothing(self._problem) if self._session is None else self._session.document(self._part)
        document = {**document, "problems": [*document["problems"], *self._waiting()]}
        tool = self._wanted if self._session is None else self._session.tool
        if tool is not None and tool.name != MEMORY:
            return ToolReport(tool, {os.getpid(): document})
        from pasta_otel.gpu.memory.report import MemoryReport  # noqa: PLC0415 - numpy is an optional extra
        from pasta_otel.gpu.memory.results import read_document  # noqa: PLC0415 - as above

        return MemoryReport([read_document(os.getpid(), document)])


def _nothing(problem: str) -> dict[str, Any]:
    return {"tool": "", **child.NOTHING, "problems": [problem], "command": sys.argv[:1]}


def refuse_if_busy(environ: Mapping[str, str]) -> None:
    """Check that this process can still be analysed.

    Raises:
        MissingError: Its profiler is in use.
        StateError: It is too late.
    """
    if child.JOB in environ:
        raise StateError(child.problem or "the analysis of this process has ended")
    if holder := _cupti_holder(environ):
        raise MissingError(f"not available, CUPTI is active: {holder}")
    if driver_is_initialized():
        raise StateError(f"CUDA was initialised before: {START}")


def _cupti_holder(environ: Mapping[str, str]) -> str:
    """Return who uses CUPTI, as far as that can be known without a call to CUPTI, which would attach it."""
    if injected := environ.get("CUDA_INJECTION64_PATH"):
        return f"CUDA_INJECTION64_PATH={injected}"
    if getattr(sys.modules.get("pasta_otel.gpu.cupti.start"), "running", ()):
        return "pasta_otel.instrument() captures GPU kernels; PASTA_GPU_CAPTURE=false turns that off"
    enabled = getattr(sys.modules.get("torch.autograd"), "_profiler_enabled", None)
    return "torch.profiler is running" if enabled is not None and enabled() else ""


def driver_is_initialized(name: str = DRIVER) -> bool:
    """Return whether this process has used CUDA; a driver that is not loaded is not loaded by this."""
    try:
        driver = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return False
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != NOT_INITIALIZED)


def _who_has_cupti() -> str:
    """Return who holds CUPTI, for a message: asking attaches CUPTI, so only once there is nothing left to lose."""
    try:
        from pasta_otel._native import _cupti  # noqa: PLC0415 - the extension may not be built
        from pasta_otel.gpu.cupti.library import loaded_libraries  # noqa: PLC0415 - as above

        loaded = loaded_libraries()
        if not loaded:
            return ""
        _cupti.load(loaded[0])
        code, who, _ = _cupti.probe()
    except (ImportError, OSError, RuntimeError):
        return ""
    return f" (CUPTI is active: {who or 'another client in this process'})" if code else ""
