"""The options of ``pasta-otel agent``, in one table for two readers: this module's own, and click's in ``cli.agent``.

Our own reader knows only what click takes without question; on anything else it gives up, and click reads, explains and
refuses. So it decides nothing by itself: a test compares the two.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pasta_otel.app.agent_start import LOADER_CHOICES, AgentOptions, AgentStart, attach, stop_on_signals
from pasta_otel.cli.tokens import token_from
from pasta_otel.errors import InputError, MissingError

if TYPE_CHECKING:
    import threading


class Option(NamedTuple):
    """One option.

    Attributes:
        name: As it is typed.
        field: Of ``AgentOptions``, unless ``options_of`` makes that of it.
        read: From text to value; raises ValueError. ``bool`` = it takes no value.
        help: One line.
        metavar: What ``--help`` calls the value; empty = its type.
        choices: All values, where only some are possible.
        off: The name that says no, of one without a value.
        envvar: Variable that is read when the option is not given.
        many: It may be repeated.
        shown: ``--help`` tells the default.
    """

    name: str
    field: str
    read: Callable[[str], Any]
    help: str
    metavar: str = ""
    choices: tuple[str, ...] = ()
    off: str = ""
    envvar: str = ""
    many: bool = False
    shown: bool = True

    @property
    def default(self) -> Any:
        """Return the value when nothing is said."""
        return AgentOptions._field_defaults.get(self.field, "")


OPTIONS = (
    Option("--host", "host", str, "Address of /metrics and /healthz."),
    Option("--port", "port", int, "Their port; 0 takes a free one."),
    Option(
        "--loader",
        "loader",
        str,
        "How probes are loaded; auto tries core, then bcc, then goes on with files alone.",
        choices=LOADER_CHOICES,
    ),
    Option("--probes", "names", str, "Which of our probes, comma-separated.  [all]", "NAMES", shown=False),
    Option(
        "--probe",
        "programs",
        Path,
        "Load a bcc program of your own and export its events; may be repeated.",
        "FILE.c",
        many=True,
        shown=False,
    ),
    Option("--interval", "interval_seconds", float, "Time between two readings.", "SECONDS"),
    Option("--slow-ms", "slow_ms", float, "What lasts longer becomes a span of its own, ms."),
    Option(
        "--budget",
        "budget",
        float,
        "Share of time that launch probes may cost; 0 = never, 1 = always attached.",
        envvar="PASTA_OVERHEAD_BUDGET",
    ),
    Option(
        "--export", "exports", bool, "Send spans and metrics by OTLP (OTEL_* settings).", off="--no-export", shown=False
    ),
    Option(
        "--objects",
        "objects",
        Path,
        "Where built probes lie, if not in the package (python -m pasta_otel.ebpf.build DIR).",
        "DIR",
        shown=False,
    ),
    Option(
        "--token-env",
        "token_env",
        str,
        "Variable that holds the bearer token of /metrics.",
        "NAME",
        shown=False,
    ),
)


def options_of(values: Mapping[str, Any], environ: Mapping[str, str]) -> AgentOptions:
    """Return checked options from values by field.

    Raises:
        InputError: One of them cannot be used.
    """
    fields = dict(values)
    names, token_env = fields.pop("names", ""), fields.pop("token_env", "")
    probes = tuple(name for name in names.split(",") if name)
    return AgentOptions(**fields, probes=probes, token=token_from(token_env, environ)).checked()


def plain_options(words: Sequence[str], environ: Mapping[str, str]) -> AgentOptions | None:
    """Return the options that these words plainly say; None where click has something to say or to find out."""
    if environ.get("PASTA_CONFIG"):
        return None
    try:
        return options_of(_values(words, environ), environ)
    except (_NotPlainError, ValueError, InputError):
        return None


class _NotPlainError(Exception):
    """These words are click's."""


def _values(words: Sequence[str], environ: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for option, text in _pairs(words, environ):
        if option.read is bool:
            values[option.field] = text == option.name
        elif option.many:
            values[option.field] = (*values.get(option.field, ()), option.read(text))
        elif option.choices and text not in option.choices:
            raise _NotPlainError
        else:
            values[option.field] = option.read(text)
    return values


def _pairs(words: Sequence[str], environ: Mapping[str, str]) -> Iterator[tuple[Option, str]]:
    """Yield options with what was said about them; variables first, so that words count more."""
    for option in OPTIONS:
        if option.envvar in environ:
            yield option, _plain(environ[option.envvar])
    known = {name: option for option in OPTIONS for name in (option.name, option.off) if name}
    waiting = iter(words)
    for word in waiting:
        name, equals, text = word.partition("=")
        said = known.get(name)
        if said is None or (said.read is bool and equals):
            raise _NotPlainError
        if said.read is bool:
            yield said, name
        else:
            yield said, _plain(text if equals else next(waiting, ""))


def _plain(text: str) -> str:
    if not text or text.startswith("-"):
        raise _NotPlainError
    return text


def run_agent(options: AgentOptions) -> None:
    """Observe until SIGTERM; prints JSON lines: what is attached and refused, where /metrics is, that all was sent.

    Raises:
        MissingError: A package is not installed.
        PastaError: The agent cannot serve.
    """
    _fill_descriptors()
    start = attach(options)
    _say(start.document())
    stop = stop_on_signals()
    try:
        _observe_attached(start, stop)
    except ModuleNotFoundError as error:
        raise MissingError(f"the agent needs {error.name}", how="pip install 'pasta-otel[ebpf]'") from error


def _observe_attached(start: AgentStart, stop: threading.Event) -> None:
    import logging  # noqa: PLC0415 - after attaching: see app.agent_start

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    from pasta_otel.app.agent import Agent  # noqa: PLC0415 - as above

    Agent(start).run(stop, _say)


def _fill_descriptors() -> None:
    """Put the null device where a standard descriptor is closed: else the next thing opened would be our output."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - for all our life
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - as above


def _say(event: Mapping[str, Any]) -> None:
    try:
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or it would fail again at exit
        reason = f"cannot write to standard output: {error.strerror}"
        raise MissingError(reason, how="send it where there is room") from error
