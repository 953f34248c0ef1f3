"""Which encoder a run uses, and how it is described to the reader of the results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phenoica import files
from phenoica.errors import CheckpointError

if TYPE_CHECKING:
    from phenoica.openphenom.encoder import OpenPhenom

RANDOM = "random"


@dataclass(frozen=True)
class Encoder:
    """A loaded encoder with its description."""

    model: OpenPhenom
    sentence: str
    sha256: str
    weights_licence: str
    saw_test_images: str

    @property
    def tile_size(self) -> int:
        """Side of a tile in pixels."""
        return self.model.config.image_size

    def describe(self) -> dict[str, Any]:
        """Return what a part and the AnnData record of the encoder."""
        return {
            "checkpoint": self.sentence,
            "checkpoint_sha256": self.sha256,
            "weights_licence": self.weights_licence,
            "encoder_saw_test_images": self.saw_test_images,
            "dim": self.model.config.dim,
            "tile_size": self.tile_size,
        }


def checkpoint_path(config: Mapping[str, Any]) -> Path | None:
    """Return the user's checkpoint file, or None for random weights.

    Raises
    ------
    CheckpointError
        If the file does not exist.
    """
    if config["embed"]["checkpoint"] == RANDOM:
        return None
    path = Path(config["embed"]["checkpoint"])
    if not path.is_file():
        raise CheckpointError(f"{path}: no such checkpoint; set embed.checkpoint to model.safetensors or 'random'")
    return path


def load_encoder(config: Mapping[str, Any], n_channels: int) -> Encoder:
    """Load the configured encoder onto the configured device.

    Parameters
    ----------
    config
        The resolved configuration (`embed`, `licences`).
    n_channels
        Channels of a well.

    Raises
    ------
    CheckpointError
        If the checkpoint is missing or wrong, or takes fewer channels.
    """
    from phenoica.openphenom.encoder import OpenPhenom, OpenPhenomConfig, choose_device

    embed = config["embed"]
    path = checkpoint_path(config)
    if path is None:
        size = OpenPhenomConfig(**embed["model"])
        model = OpenPhenom.random(size, seed=embed["seed"])
        sentence = (
            f"random weights drawn from seed {embed['seed']}, layer scale {size.layer_scale:g} (not a trained model): "
            f"{size.dim} wide, {size.depth} blocks, {size.image_size} px tiles"
        )
        digest, licence, saw = "", "none (random weights)", "no"
    else:
        model = OpenPhenom.from_checkpoint(path)
        digest = files.sha256(path)
        sentence = f"{path.name}, sha256 {digest[:12]}"
        licence, saw = config["licences"]["weights"], embed["saw_test_images"]
    if n_channels > model.config.max_channels:
        raise CheckpointError(
            f"plates.channels lists {n_channels} channels; the model takes at most {model.config.max_channels}"
        )
    return Encoder(model.to(choose_device(embed["device"])), sentence, digest, licence, saw)

