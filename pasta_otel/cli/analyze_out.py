"""Where reports of ``pasta-otel analyze`` go: checked before CMD runs, so that nothing is lost after it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import click

from pasta_otel.cli.analyze_run import refuse_options
from pasta_otel.errors import InputError

Shown = Callable[[], Iterable[str]]
"""Makes a report in pieces, again at each call."""


@dataclass(frozen=True, slots=True)
class Targets:
    """What the user wants of the report.

    Attributes:
        as_json: JSON rather than text.
        output: File instead of stdout.
        html: File for the page.
    """

    as_json: bool = False
    output: Path | None = None
    html: Path | None = None

    def check(self) -> None:
        """Check that the files can be written, and are two.

        Raises:
            InputError: One cannot, or both are one; names it.
        """
        for target, option in ((self.output, "--output"), (self.html, "--html")):
            if target is not None:
                refuse_options(option, [target])
                _check(target, option)
        if self.output is not None and self.html is not None and _same(self.output, self.html):
            raise InputError("is --output too: one would overwrite the other", file=str(self.html), field="--html")

    def of_program(self) -> object:
        """Return where CMD's stdout goes: away from ours where that is one JSON document."""
        if not self.as_json or self.output is not None:
            return None
        return subprocess.DEVNULL if sys.stderr is None else sys.stderr

    @property
    def wanted_in_any_case(self) -> bool:
        """Return whether somebody looks for a report even where there is nothing to report."""
        return self.as_json or self.output is not None or self.html is not None

    def show(self, shown: Shown) -> str:
        """Write the report to its file, or where that fails or there is none to stdout; return what failed."""
        if self.output is None:
            return _print(shown)
        failed = self._written(self.output, shown, "--output", "; the report is on stdout instead")
        return f"{failed}{_print(shown)}" if failed else ""

    def show_page(self, page: Callable[[], str]) -> str:
        """Write the page if there is to be one, and return what failed."""
        return "" if self.html is None else self._written(self.html, lambda: [page()], "--html", "")

    def _written(self, target: Path, shown: Shown, option: str, instead: str) -> str:
        try:
            write(target, shown(), option)
        except InputError as error:
            click.echo(f"pasta-otel: {error}{instead}", err=True)
            return str(error)
        return ""


def _check(target: Path, option: str) -> None:
    try:
        special = target.exists() and not target.is_file()  # opening a pipe would wait for its reader
        if target.is_dir() or not special:
            new = not target.exists()
            target.open("ab").close()
            if new:
                target.resolve().unlink()  # behind a link that led nowhere; the link stays
        elif not os.access(target, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise InputError(error.strerror or str(error), file=str(target), field=option) from error


def _same(one: Path, other: Path) -> bool:
    """Return whether two paths lead to one file, be it there or not; devices and pipes take what comes from several."""
    if one.exists() and other.exists():
        return one.is_file() and one.samefile(other)
    return one.resolve() == other.resolve()


def _print(shown: Shown) -> str:
    if sys.stdout is None:
        click.echo("pasta-otel: stdout is closed: no report", err=True)
        return "stdout is closed"
    try:
        sys.stdout.writelines(shown())
        sys.stdout.flush()
    except OSError as error:
        drop_output()
        if isinstance(error, BrokenPipeError):  # whoever read it has seen enough, as head(1) has
            return ""
        click.echo(f"pasta-otel: stdout: {error.strerror}", err=True)
        return f"stdout: {error.strerror}"
    return ""


def drop_output() -> None:
    """Let what waits for stdout go nowhere, so that the interpreter's end does not fail on it again."""
    with contextlib.suppress(OSError, ValueError):  # no file behind it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def write(target: Path, text: Iterable[str], option: str) -> None:
    """Write a report in pieces.

    Raises:
        InputError: It cannot be written; names the file.
    """
    try:
        with target.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(text)
    except OSError as error:
        raise InputError(error.strerror or str(error), file=str(target), field=option) from error
