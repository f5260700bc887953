"""How deep YAML may nest, decided before anything recurses into it."""

from __future__ import annotations

from typing import Any

import yaml

DEPTH_LIMIT = 64


def check_depth(text: str, loader: type = yaml.SafeLoader) -> None:
    """Refuse a text that nests deeper than DEPTH_LIMIT levels.

    Args:
        text: YAML.
        loader: The loader that will read it: parsers name different lines for the same mistake.

    Raises:
        yaml.MarkedYAMLError: It does, or it is not YAML; with the line.
    """
    depth = 0
    for event in yaml.parse(text, Loader=loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEPTH_LIMIT:
            mark: Any = event.start_mark
            raise yaml.MarkedYAMLError(problem=f"nested deeper than {DEPTH_LIMIT} levels", problem_mark=mark)
