"""The command line, and the only place that turns errors into exit codes.

Words of ``agent`` that need no explanation are read without click, so that its probes are attached before anything else
is imported (``cli.agent_words``); click reads all others, and says what is wrong with them.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys

from pasta_otel.errors import MissingError, PastaError

_FAILING = frozenset({"strict", "surrogateescape"})
"""Ways to encode that end in an error for some text; whoever set another one by PYTHONIOENCODING keeps it."""


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    _write_any_text()
    try:
        code = _run(sys.argv[1:] if argv is None else argv)
        if sys.stdout is not None:  # None where the program was started without one
            sys.stdout.flush()  # here, where an error still can be told
    except KeyboardInterrupt:
        code = _fail("interrupted", 130)
    except BrokenPipeError:  # whoever read our output has gone, as head(1) does
        _drop_output()
        code = 1
    except PastaError as error:
        code = _fail(str(error), error.exit_code)
    except OSError as error:  # a full disk behind stdout, or a file of the system that no check knew to be unusable
        _drop_output()
        code = _fail(str(error), MissingError.exit_code)
    sys.exit(code)


def _write_any_text() -> None:
    r"""Write ``\xf6`` for an ö that a terminal or pipe has no code for: names come from programs, and may hold any."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors in _FAILING:
            stream.reconfigure(errors="backslashreplace")


def _fail(text: str, code: int) -> int:
    """Say one line and return the exit code, also where nothing can be said."""
    with contextlib.suppress(OSError, AttributeError):  # full, or not there
        sys.stderr.write(f"pasta-otel: {text}\n")
    return code


def _drop_output() -> None:
    """Let what waits for stdout go nowhere, so that the interpreter's end does not fail on it again."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no file behind it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(words: list[str]) -> int:
    if words[:1] == ["agent"]:
        from pasta_otel.cli.agent_words import plain_options, run_agent  # noqa: PLC0415 - not for other commands

        options = plain_options(words[1:], os.environ)
        if options is not None:
            run_agent(options)
            return 0
    from pasta_otel.cli.group import run  # noqa: PLC0415 - click, of which an agent needs nothing

    return run([*words])
