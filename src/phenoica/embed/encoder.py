"""Which encoder a run uses, and how it is described to the reader of the results."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phenoica import files
from phenoica.config import RunPaths
from phenoica.errors import CheckpointError
from phenoica.openphenom import ENCODER_FILE, RECIPE_FILE
from phenoica.plates.fetch import resolve_hub_id

if TYPE_CHECKING:
    from phenoica.openphenom.encoder import OpenPhenom, OpenPhenomConfig

# values of embed.checkpoint that are no file
RANDOM, BUNDLED, PRETRAIN = "random", "bundled", "pretrain"


@dataclass(frozen=True)
class Encoder:
    """A loaded encoder with its description."""

    model: OpenPhenom
    sentence: str
    sha256: str
    weights_licence: str
    saw_test_images: str
    baseline: OpenPhenom | None = None  # the same size with random weights, to see what training adds

    @property
    def tile_size(self) -> int:
        """Side of a tile in pixels."""
        return self.model.config.image_size

    def describe(self) -> dict[str, Any]:
        """Return what a part and the AnnData record of the encoder: `precision_reason` says what `auto` went by."""
        return {
            "checkpoint": self.sentence,
            "checkpoint_sha256": self.sha256,
            "weights_licence": self.weights_licence,
            "encoder_saw_test_images": self.saw_test_images,
            "precision": self.model.precision.name,
            "precision_reason": self.model.precision.reason,
            "random_baseline": self.baseline is not None,
            "dim": self.model.config.dim,
            "tile_size": self.tile_size,
        }


def encoder_folder(config: Mapping[str, Any]) -> Path | None:
    """Return the folder of an encoder that phenoica trained, with its recipe and curve; None for another checkpoint."""
    chosen = config["embed"]["checkpoint"]
    if chosen == BUNDLED:
        return Path(str(resources.files("phenoica.demo").joinpath("encoder")))
    return RunPaths.of(config).pretrain(ENCODER_FILE).parent if chosen == PRETRAIN else None


def checkpoint_path(config: Mapping[str, Any]) -> Path | None:
    """Return the checkpoint file, or None for random weights. The one that `pretrain` writes may not be there yet.

    Raises
    ------
    CheckpointError
        If the file does not exist, or the repository was not fetched.
    """
    chosen = config["embed"]["checkpoint"]
    if chosen == RANDOM:
        return None
    folder = encoder_folder(config)
    if folder is not None:
        return folder / ENCODER_FILE
    path = Path(resolve_hub_id(chosen))
    if not path.is_file():
        raise CheckpointError(
            f"{path}: no such checkpoint; set embed.checkpoint to model.safetensors, the name of a repository that "
            f"`phenoica fetch-model` fetched, {BUNDLED!r}, {PRETRAIN!r} or {RANDOM!r}"
        )
    return path


def load_encoder(config: Mapping[str, Any], n_channels: int, experiments: Iterable[str] = ()) -> Encoder:
    """Load the configured encoder onto the configured device.

    Parameters
    ----------
    config
        The resolved configuration (`embed`, `licences`).
    n_channels
        Channels of a well.
    experiments
        The experiments of the run: whether an encoder that phenoica trained saw their images is known from its recipe.

    Raises
    ------
    CheckpointError
        If the checkpoint is missing or wrong, or takes fewer channels.
    ConfigError
        If the configured device is not there.
    """
    from phenoica.openphenom.encoder import OpenPhenom, OpenPhenomConfig, choose_device

    embed = config["embed"]
    path, folder = checkpoint_path(config), encoder_folder(config)
    if path is None:
        size = OpenPhenomConfig(**embed["model"])
        model = OpenPhenom.random(size, seed=embed["seed"])
        sentence = (
            f"random weights drawn from seed {embed['seed']}, layer scale {size.layer_scale:g} (not a trained model): "
            f"{_size(size)}"
        )
        digest, licence, saw = "", "none (random weights)", "no"
    else:
        model = OpenPhenom.from_checkpoint(path)
        digest = files.sha256(path)
        sentence = f"{path.name}, sha256 {digest[:12]}"
        licence, saw = config["licences"]["weights"], embed["saw_test_images"]
    if folder is not None:
        recipe = _recipe(folder, digest)
        sentence = (
            f"pre-trained by phenoica for {recipe['recipe']['steps']:,} steps on "
            f"{_counted(len(recipe['experiments']), 'experiment')} ({_size(model.config)}), sha256 {digest[:12]}"
        )
        licence = "trained by phenoica"
        saw = "yes" if set(recipe["experiments"]) & set(experiments) else "no"
    if n_channels > model.config.max_channels:
        raise CheckpointError(
            f"plates.channels lists {n_channels} channels; the model takes at most {model.config.max_channels}"
        )

    def placed(model: OpenPhenom) -> OpenPhenom:
        return model.to(choose_device(embed["device"])).use_precision(embed["precision"])

    # of the same size, with the layer scale that a fair random network has
    untrained = dataclasses.replace(model.config, layer_scale=1.0)
    baseline = placed(OpenPhenom.random(untrained, seed=embed["seed"])) if embed["random_baseline"] else None
    return Encoder(placed(model), sentence, digest, licence, saw, baseline)


def _recipe(folder: Path, digest: str) -> dict[str, Any]:
    """Return the recipe that lies beside an encoder; it must be of these very weights."""
    path = folder / RECIPE_FILE
    if not path.is_file():
        raise CheckpointError(f"{path}: missing; `phenoica pretrain` writes it beside the encoder, run it again")
    recipe = json.loads(path.read_text(encoding="utf-8"))
    if recipe.get("sha256") != digest:
        raise CheckpointError(
            f"{path}: the recipe of another encoder than {ENCODER_FILE} beside it; run `phenoica pretrain` again"
        )
    return recipe


def _size(config: OpenPhenomConfig) -> str:
    blocks = _counted(config.depth, "block")
    return f"{config.dim} wide, {blocks}, {config.patch_size} px patches in {config.image_size} px tiles"


def _counted(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
