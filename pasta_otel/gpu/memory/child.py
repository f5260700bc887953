"""What ``pasta-otel analyze memory`` does inside each Python that it starts, before the program's first line."""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from pasta_otel.errors import PastaError

JOB = "PASTA_ANALYZE_JOB"
"""Environment variable: the job as JSON, written by ``command_environment``."""
DRAIN_TIMEOUT_S = 5.0
"""Half of the shortest time between SIGTERM and SIGKILL that is usual (docker stop: 10 s)."""
AGAIN_S = 0.02
BEGUN = ".begun"
"""Suffix of a file that a process leaves until its result is there: killed processes keep it."""
FOLDER = str(Path(__file__).parent / "inject")
UNWRITTEN = ".unwritten"
"""Suffix of that file where the result could not be written: a name needs no room on the disk."""
NOTHING: Mapping[str, Any] = {"seen": 0, "skipped": {}, "waits": 0, "unpatched": 0, "launches": []}
"""The document of a process that could not be analysed."""
problem = ""
"""Why this process, although it was started to be analysed, is not."""


def command_environment(environ: Mapping[str, str], job: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment of the program to be analysed.

    Args:
        environ: Ours.
        job: ``session.Job`` as JSON, and ``out``: the folder for results.
    """
    rest = [folder for folder in environ.get("PYTHONPATH", "").split(os.pathsep) if folder and folder != FOLDER]
    ours = {"PYTHONPATH": os.pathsep.join([FOLDER, *rest]), JOB: json.dumps(dict(job))}
    # a process has one of CUPTI and the Sanitizer: our own capture stands back
    return {**environ, **ours, "PASTA_GPU_CAPTURE": "false"}


def start(environ: Mapping[str, str] = os.environ) -> None:
    """Begin to analyse this process if it was started for it; the outcome goes into the job's folder."""
    if JOB not in environ:
        return
    global problem  # noqa: PLW0603 - one process, one start
    job = json.loads(environ[JOB])
    target = Path(job["out"]) / f"{os.getpid()}.json"
    try:
        _begin(job, environ, target)
    except PastaError as error:
        problem = str(error)
    except ImportError as error:
        problem = f"{error.name} is not installed; pip install 'pasta-otel[gpu]'"
    if problem:
        _write(target, {**NOTHING, "problems": [problem]})


def _begin(job: Mapping[str, Any], environ: Mapping[str, str], target: Path) -> None:
    from pasta_otel.gpu.memory.session import Job, Session  # noqa: PLC0415 - numpy may be missing: that is reported

    session = Session(Job.from_json(job))
    session.start(environ)
    target.with_suffix(BEGUN).touch()

    def finish() -> None:
        document = session.finish()
        if document is not None:
            _write(target, document)

    atexit.register(finish)
    _finish_on_sigterm(finish, lambda: session.working)


def _finish_on_sigterm(finish: Callable[[], None], working: Callable[[], bool]) -> None:
    """Write the result before SIGTERM ends a program that has no handler; it still ends by the signal.

    Where it interrupted our own work it comes again a moment later: a lock is held there that the end needs.
    """
    until = math.inf
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return

    def terminate(number: int, frame: FrameType | None) -> None:
        del frame
        nonlocal until
        until = min(until, time.monotonic() + DRAIN_TIMEOUT_S)
        if working() and time.monotonic() < until:
            threading.Timer(AGAIN_S, os.kill, (os.getpid(), number)).start()
            return
        signal.signal(number, signal.SIG_DFL)
        # in a thread of its own: the signal may have interrupted one of our callbacks, which holds a lock
        worker = threading.Thread(target=finish, daemon=True)
        worker.start()
        worker.join(DRAIN_TIMEOUT_S)
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, terminate)


def _write(target: Path, content: Mapping[str, Any]) -> None:
    part, begun = target.with_suffix(".part"), target.with_suffix(BEGUN)
    try:
        part.write_text(json.dumps(content), encoding="utf-8")
        part.replace(target)
        begun.unlink(missing_ok=True)
    except (
        OSError
    ) as error:  # a full disk, or the command has ended, and the folder with it: the program's end stays its own
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
            begun.replace(target.with_suffix(UNWRITTEN))
        if sys.stderr is not None:
            sys.stderr.write(f"pasta-otel: no result of process {os.getpid()}: {error.strerror}: {target.parent}\n")
