"""The model's shape, apart from the model so that nobody needs torch to name a layer."""

from __future__ import annotations

VOCABULARY = 256  # bytes
TOKENS = 192
WIDTH = 96
HEADS = 4
LAYERS = 6


def layer_paths() -> list[str]:
    """Return the qualified module path of every encoder layer, as it stands on module spans."""
    return [f"encoder.layers.{index}" for index in range(LAYERS)]
