"""The OpenPhenom channel-agnostic masked auto-encoder, written from its description."""

from __future__ import annotations

from typing import Any

# what pre-training leaves in its folder; named here because this module loads no torch
ENCODER_FILE, RECIPE_FILE = "encoder.safetensors", "recipe.json"
LOG_FILE, PICTURES_FILE = "log.csv", "reconstructions.npz"

__all__ = ["OpenPhenom", "OpenPhenomConfig"]


def __getattr__(name: str) -> Any:
    # torch is loaded when the model is asked for, not when the package is imported
    if name in __all__:
        from phenoica.openphenom import encoder

        return getattr(encoder, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
