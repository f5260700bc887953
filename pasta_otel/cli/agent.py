"""``pasta-otel agent`` for click: help, and what is wrong with words. The options themselves: ``cli.agent_words``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from pasta_otel.cli.agent_words import OPTIONS, Option, options_of, run_agent

TYPES: dict[Any, click.ParamType[Any]] = {
    str: click.STRING,
    int: click.INT,
    float: click.FLOAT,
    Path: click.Path(path_type=Path),
}


def _parameter(option: Option) -> click.Option:
    names = f"{option.name}/{option.off}" if option.off else option.name
    kind: Any = click.Choice(option.choices) if option.choices else TYPES.get(option.read)
    return click.Option(
        [names, option.field],
        default=option.default or None if option.many else option.default,
        show_default=option.shown,
        type=kind,
        multiple=option.many,
        metavar=option.metavar or None,
        envvar=option.envvar or None,
        help=option.help,
    )


def _observe(**values: Any) -> None:
    run_agent(options_of(with_settings(click.get_current_context(), values), os.environ))


def with_settings(context: click.Context, values: dict[str, Any]) -> dict[str, Any]:
    """Return values with the YAML file's, where neither words nor variables say anything.

    Raises:
        InputError: The file that ``PASTA_CONFIG`` names cannot be used.
    """
    if not os.environ.get("PASTA_CONFIG"):
        return values
    from pasta_otel.config import load_settings  # noqa: PLC0415 - YAML, of which most agents need nothing

    settings = load_settings()
    said_nothing = (option for option in OPTIONS if _is_default(context, option) and option.envvar in settings)
    return {**values, **{option.field: settings[option.envvar] for option in said_nothing}}


def _is_default(context: click.Context, option: Option) -> bool:
    return context.get_parameter_source(option.field) is ParameterSource.DEFAULT


command = click.Command(
    "agent",
    params=[_parameter(option) for option in OPTIONS],
    callback=_observe,
    help="Observe the host by eBPF and files, link what happens to the spans of instrumented processes.",
)
