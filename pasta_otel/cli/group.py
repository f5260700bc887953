"""All commands, each in a module that is loaded when it runs."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

import click

import pasta_otel

# name -> (module, attribute, one line for --help); the module is imported when the command runs
COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("pasta_otel.cli.run", "Run a program with pasta-otel's instrumentation."),
    "agent": ("pasta_otel.cli.agent", "Link what the host does to the spans of this node's processes."),
    "sidecar": ("pasta_otel.cli.sidecar", "Receive OTLP, store spans, watch SLOs and act, for one pod."),
    "controller": ("pasta_otel.cli.controller", "Watch SLOs over Prometheus servers, without receiver and store."),
    "slo": ("pasta_otel.cli.slo", "Validate SLO files and show their state."),
    "import": ("pasta_otel.cli.import_", "Import profiler traces, OTLP JSON and Jaeger JSON."),
    "attribute": ("pasta_otel.cli.attribute", "Say why an SLO burns, from a store."),
    "analyze": ("pasta_otel.cli.analyze", "Analyse a program's GPU kernels while it runs."),
    "doctor": ("pasta_otel.cli.doctor", "Say what this machine can do for pasta-otel."),
}
PLUGIN_GROUP = "pasta_otel.commands"


def _plugins(name: str | None = None) -> Any:
    from importlib.metadata import entry_points  # noqa: PLC0415 - 50 ms, only for help and unknown commands

    return entry_points(group=PLUGIN_GROUP) if name is None else entry_points(group=PLUGIN_GROUP, name=name)


class LazyGroup(click.Group):
    """Load a subcommand's module only when it is asked for; other distributions add commands by entry point."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return every command's name."""
        del ctx
        return sorted({*COMMANDS, *(point.name for point in _plugins())})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command, importing its module."""
        del ctx
        if cmd_name in COMMANDS:
            command: click.Command = import_module(COMMANDS[cmd_name][0]).command
            return command
        for point in _plugins(name=cmd_name):
            plugin: click.Command = point.load()
            return plugin
        return None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the command list without importing what our own table already describes."""
        rows = [
            (name, COMMANDS[name][1]) if name in COMMANDS else (name, self._plugin_help(ctx, name))
            for name in self.list_commands(ctx)
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def _plugin_help(self, ctx: click.Context, name: str) -> str:
        command = self.get_command(ctx, name)
        return command.get_short_help_str(80) if command else ""


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(pasta_otel.__version__, prog_name="pasta-otel")
def cli() -> None:
    """Say which GPU kernel, line of model code, host event or dependency made an SLO burn, and degrade what may be."""


def run(words: list[str]) -> int:
    """Run a command; return its exit code.

    Raises:
        PastaError: The command failed on purpose.
    """
    # warnings of our own parts, such as what an OTLP server says, where a command sets no logging up
    logging.lastResort = said = logging.StreamHandler()
    said.setLevel(logging.WARNING)
    said.setFormatter(logging.Formatter("pasta-otel: %(message)s"))
    try:
        code = cli.main(args=words, prog_name="pasta-otel", standalone_mode=False)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.Abort as abort:
        raise KeyboardInterrupt from abort
    except click.ClickException as error:
        error.show()
        return 2
    return code if isinstance(code, int) else 0
