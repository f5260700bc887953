"""The command line, and the only place that turns errors into exit codes.

Words of ``agent`` that need no explanation are read without click, so that its probes are attached before anything else
is imported (``cli.agent_words``); click reads all others, and says what is wrong with them.
"""

from __future__ import annotations

import os
import sys

from pasta_otel.errors import PastaError


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    try:
        code = _run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        sys.stderr.write("pasta-otel: interrupted\n")
        code = 130
    except BrokenPipeError:  # whoever read our output has gone, as head(1) does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except PastaError as error:
        sys.stderr.write(f"pasta-otel: {error}\n")
        code = error.exit_code
    sys.exit(code)


def _run(words: list[str]) -> int:
    if words[:1] == ["agent"]:
        from pasta_otel.cli.agent_words import plain_options, run_agent  # noqa: PLC0415 - not for other commands

        options = plain_options(words[1:], os.environ)
        if options is not None:
            run_agent(options)
            return 0
    from pasta_otel.cli.group import run  # noqa: PLC0415 - click, of which an agent needs nothing

    return run([*words])
