"""``pasta-otel run -- CMD``: become CMD, with instrumentation waiting in every Python that it starts."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from pasta_otel.errors import InputError

AUTOLOAD = str(Path(__file__).parent / "autoload")


def resolve(command: Sequence[str], path: str | None = None) -> list[str]:
    """Return what to execute: a program as it is, ``-m module`` and a ``.py`` file with this Python.

    Args:
        command: The user's words.
        path: Search path for programs; ``PATH`` by default.

    Raises:
        InputError: There is no such program.
    """
    first = command[0]
    if first.startswith("-"):
        return [sys.executable, *command]
    program = shutil.which(first, path=path)
    if program is not None:
        return [program, *command[1:]]
    if first.endswith(".py") and Path(first).is_file():
        return [sys.executable, *command]
    raise InputError(f"no such program or Python file: {first}", field="CMD")


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with our ``sitecustomize`` first on ``PYTHONPATH``."""
    rest = [folder for folder in environ.get("PYTHONPATH", "").split(os.pathsep) if folder and folder != AUTOLOAD]
    return {**environ, "PYTHONPATH": os.pathsep.join([AUTOLOAD, *rest])}


@click.command(
    "run",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    options_metavar="--",
)
@click.argument("command", metavar="CMD [ARGS]...", nargs=-1, required=True, type=click.UNPROCESSED)
def command(command: tuple[str, ...]) -> None:
    """Run a program with pasta-otel's instrumentation.

    CMD is a program (python, uvicorn, gunicorn, a shell script), a Python file, or -m MODULE. It takes this process'
    place, so that signals reach it and its exit code is its own. A program that cannot be instrumented runs as it is.
    """
    words = resolve(command)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    try:
        os.execve(words[0], words, environment(os.environ))  # noqa: S606 - starting the user's program is the purpose
    except OSError as error:
        raise InputError(f"cannot be executed: {error.strerror}", file=words[0], field="CMD") from error
