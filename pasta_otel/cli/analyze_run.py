"""What every ``pasta-otel analyze`` command does with CMD: prepare its environment, run it, hand its code on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pasta_otel.config import load_settings
from pasta_otel.errors import InputError, MissingError
from pasta_otel.gpu.memory.selection import MOST_BYTES

if TYPE_CHECKING:
    from pasta_otel.gpu.memory.selection import Selection

IMPOSSIBLE = 3
CONTEXT = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""Of commands that end with CMD: its options are its own."""
_CHOICES = {"name": "--kernel", "module": "--module"}
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Of those that end a process: what supervisors and batch schedulers send one process."""
_KEYS = (signal.SIGINT, signal.SIGQUIT)
"""What the terminal sends to the whole group, when somebody presses its keys."""
_MOST_MIB = MOST_BYTES >> 20
_LOOK_S = 1.0
"""How often the program is looked at where another thread has taken the signal of its end."""
_Command = TypeVar("_Command", bound=Callable[..., Any])


def selecting(function: _Command) -> _Command:
    """Add the options that choose launches."""
    for option in (
        click.option(
            "--regions", is_flag=True, help="Only launches inside `with pasta_otel.analyze()` blocks of the program."
        ),
        click.option(
            "--device-memory",
            default=64,
            show_default=True,
            help="MiB of device memory for results, a process and GPU.",
        ),
        click.option("--count", default=10_000, show_default=True, help="Analyse at most so many launches a process."),
        click.option("--every", default=1, show_default=True, help="Analyse every N-th launch of each GPU kernel."),
        click.option(
            "--module",
            "modules",
            multiple=True,
            metavar="PATTERN",
            help="Shell pattern of torch modules; repeats.",
        ),
        click.option(
            "--kernel", "names", multiple=True, metavar="PATTERN", help="Shell pattern of GPU kernel names; repeats."
        ),
    ):
        function = option(function)
    return function


def reporting(function: _Command) -> _Command:
    """Add the options that say where the report goes, and how."""
    for option in (
        click.option("--output", type=click.Path(path_type=Path), metavar="FILE", help="Write the report there."),
        click.option(
            "--json", "as_json", is_flag=True, help="Report as one JSON document; CMD's stdout goes to stderr."
        ),
    ):
        function = option(function)
    return function


@dataclass(frozen=True, slots=True)
class Request:
    """What a command wants analysed.

    Attributes:
        names: Shell patterns of GPU kernel names.
        every: Of the launches of one name, every how-many-th.
        count: Most launches of a process.
        device_memory: MiB for results, a process and GPU.
        modules: Shell patterns of torch module names.
        regions: Only inside ``with pasta_otel.analyze()``.
        tool: ``FILE.py:Class``; empty = memory accesses.
        code: The tool's device functions; None = those of memory accesses.
        options: Keyword arguments of the tool.
    """

    names: tuple[str, ...]
    every: int
    count: int
    device_memory: int
    modules: tuple[str, ...] = ()
    regions: bool = False
    tool: str = ""
    code: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def selection(self) -> Selection:
        """Return the launches that are wanted.

        Raises:
            InputError: They make no sense; names the option.
        """
        if not 1 <= self.device_memory <= _MOST_MIB:
            message = f"expected 1 to {_MOST_MIB:,} MiB, got {self.device_memory:,}"
            raise InputError(message, field="--device-memory")
        for option, patterns in (("--kernel", self.names), ("--module", self.modules)):
            refuse_options(option, patterns)
        from pasta_otel.gpu.memory.selection import Selection  # noqa: PLC0415 - only for the commands that analyse

        return Selection(self.names, self.every, self.count, self.device_memory << 20, self.modules)


def refuse_options(option: str, values: Iterable[object]) -> None:
    """Check that no value is the word that should have come after it: ``--html -- python x.py``.

    Raises:
        InputError: One is.
    """
    for value in map(str, values):
        if value.startswith("--"):
            raise InputError(f"expected a value, got {value!r}", field=option)


class _EndedError(BaseException):
    """A signal wants this process to end: no error that anybody handles on the way."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def workspace() -> Iterator[Path]:
    """Yield a folder for the processes' results, which is gone afterwards, also where a signal ends this process."""

    def end(number: int, frame: FrameType | None) -> None:
        del frame
        signal.pthread_sigmask(signal.SIG_BLOCK, ends)
        raise _EndedError(number)

    handlers = {number: signal.getsignal(number) for number in (*_FORWARDED, signal.SIGQUIT)}
    ends = [number for number, handler in handlers.items() if handler == signal.SIG_DFL]  # not those that nohup ignores
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        for number in ends:
            signal.signal(number, end)
        with tempfile.TemporaryDirectory(prefix="pasta-analyze-") as folder:
            try:
                yield Path(folder)
            finally:
                signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # the folder goes in one piece
    except _EndedError as error:
        signal.raise_signal(error.number)  # waits until it is let through
    finally:
        for number in ends:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def prepare(out: Path, request: Request) -> tuple[Mapping[str, str], str]:
    """Return the program's environment, and why it cannot be analysed.

    Args:
        out: Folder for the processes' results.
        request: What is wanted.
    """
    try:
        from pasta_otel.gpu.memory import child  # noqa: PLC0415 - numpy is an optional extra

        job = _job(out, request)
    except MissingError as error:
        return os.environ, str(error)
    except ImportError as error:
        return os.environ, f"{error.name} is not installed; pip install 'pasta-otel[gpu]'"
    return child.command_environment(os.environ, job), ""


def _job(out: Path, request: Request) -> dict[str, object]:
    from pasta_otel.gpu.memory import library  # noqa: PLC0415 - numpy is an optional extra
    from pasta_otel.gpu.memory.session import MEMORY_TOOL, Job  # noqa: PLC0415 - as above

    settings = load_settings()
    environ = {**os.environ, **{name: settings[name] for name in library.SETTINGS}}
    selection = request.selection()
    try:
        files = library.find_library(environ), library.find_patch(environ, request.code)
    except MissingError:
        if not environ.get("PASTA_SANITIZER_LIBRARY"):
            library.check_driver()  # where there is no driver either, that comes first
        raise
    job = Job(*files, selection, request.tool or MEMORY_TOOL, request.options, request.regions)
    return {"out": str(out), **job.to_json()}


def run(words: Sequence[str], environ: Mapping[str, str], stdout: object) -> int:
    """Run the program and return its code as a shell would: 128 and the signal's number where one ended it."""
    if sys.stdout is not None:  # None where we were started without one
        sys.stdout.flush()
    try:
        process = subprocess.Popen(words, env=environ, stdout=stdout)  # type: ignore[call-overload]  # a stream or None
    except OSError as error:
        raise InputError(f"cannot be executed: {error.strerror}", file=words[0], field="CMD") from error
    with _forwarding(process):
        code = _wait(process)
    return code if code >= 0 else 128 - code


@contextmanager
def _forwarding(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Hand signals that end us to the program; those of the terminal's keys are seen to by ``_wait``."""

    def forward(number: int, frame: FrameType | None) -> None:
        del frame
        process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in _FORWARDED}
    before |= {number: signal.signal(number, signal.SIG_IGN) for number in _KEYS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for the program, and hand it ``_KEYS`` where a process sent them: the terminal itself sends them to both."""
    awaited = {*_KEYS, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    try:
        while process.poll() is None:
            got = signal.sigtimedwait(awaited, _LOOK_S)
            # siginfo(5): SI_USER and its like are at most 0, the kernel's own codes above
            if got is not None and got.si_signo in _KEYS and got.si_code <= 0:
                process.send_signal(got.si_signo)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process.wait()


def why_nothing(
    processes: int, seen: int, skipped: Mapping[str, int], problems: Sequence[str], refused: Iterable[str] = ()
) -> str:
    """Return why no launch was analysed.

    Args:
        processes: Results that there are.
        seen: Launches in all of them.
        skipped: Launches by reason.
        problems: What the processes reported.
        refused: Some GPU kernels that no pattern fits.
    """
    if problems:
        return "; ".join(problems)
    if not processes:
        return (
            "no Python was reached (only Python programs are analysed, only those that heed PYTHONPATH: not with -I,"
            " -E or -S)"
        )
    if not seen:
        return (
            "the program launched no GPU kernel (processes that it forked are not analysed, only those that it started"
            " anew: multiprocessing's start method spawn)"
        )
    return f"none of {seen:,} launches {_unchosen(seen, skipped, refused)}"


def _unchosen(seen: int, skipped: Mapping[str, int], refused: Iterable[str]) -> str:
    reasons = {reason: count for reason, count in skipped.items() if count}
    if not reasons:
        return "left a result"
    if reasons.get("inactive") == seen:
        return "was inside a block of pasta_otel.analyze()"
    if set(reasons) <= {"name", "module", "inactive"}:
        from pasta_otel.gpu.memory.selection import candidates  # noqa: PLC0415 - only for this message

        how = " and ".join(option for reason, option in _CHOICES.items() if reason in reasons)
        named = candidates(refused)
        return f"was chosen by {how}{f'; {named}' if named else ''}"
    return f"was analysed: {', '.join(f'{count:,} ({reason})' for reason, count in reasons.items())}"


def unfinished(folder: Path) -> list[str]:
    """Return, as problems, which processes began to be analysed and left no result."""
    reasons = {
        "begun": "killed, ended by os._exit or exec, or still running",
        "unwritten": f"it could not be written below {folder}",
    }
    return [
        f"no result of {_processes(pids)}: {reason}"
        for suffix, reason in reasons.items()
        if (pids := sorted(int(path.stem) for path in folder.glob(f"*.{suffix}")))
    ]


def _processes(pids: Sequence[int]) -> str:
    return f"process {pids[0]}" if len(pids) == 1 else f"processes {', '.join(map(str, pids))}"
