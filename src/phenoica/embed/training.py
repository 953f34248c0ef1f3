"""Train the encoder of a run from its configuration: which images, which sizes, which recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from phenoica.config import RunPaths
from phenoica.embed.encoder import PRETRAIN
from phenoica.errors import ConfigError
from phenoica.plates.shards import find_shards

# keys of the section `pretrain` that are fields of a recipe; the rest says where images come from and what to train
RECIPE_KEYS = (
    "steps", "batch_tiles", "optimizer", "learning_rate", "weight_decay", "warmup_steps", "mask_ratio",
    "fourier_weight", "clip_norm", "validate_every", "save_every", "log_every", "seed",
)  # fmt: skip


def trains(config: Mapping[str, Any]) -> bool:
    """Return whether the configuration names images to train an encoder on.

    Raises
    ------
    ConfigError
        If it names none, but embeds with an encoder to be trained on them; or if the demo's own seed is among them.
    """
    demo = config["source"] == "demo"
    images = "demo_seeds" if demo else "experiments"
    named = bool(config["pretrain"][images])
    if config["embed"]["checkpoint"] == PRETRAIN and not named:
        raise ConfigError(f"embed.checkpoint is {PRETRAIN!r}, but pretrain.{images} is empty; name what to train on")
    if demo and config["demo"]["seed"] in config["pretrain"]["demo_seeds"]:
        raise ConfigError(
            f"pretrain.demo_seeds holds demo.seed ({config['demo']['seed']}); train on other seeds than the one scored"
        )
    return named


def training_shards(config: Mapping[str, Any]) -> list[Path]:
    """Return the shards with the images for pre-training; of the demo, those that `render_images` writes.

    Raises
    ------
    ConfigError
        If the demo names no seeds.
    ShardError
        If a pattern matches nothing.
    """
    section = config["pretrain"]
    if config["source"] == "demo":
        from phenoica.demo.plates import pretraining_shard

        if not section["demo_seeds"]:
            raise ConfigError("pretrain.demo_seeds is empty; name the seeds of the experiments to train on")
        return [pretraining_shard(RunPaths.of(config).pretrain_images, seed) for seed in section["demo_seeds"]]
    return find_shards(section["shards"] or config["plates"]["shards"])


def training_experiments(config: Mapping[str, Any]) -> list[str]:
    """Return the names of the experiments that may be trained on."""
    section = config["pretrain"]
    if config["source"] == "demo":
        from phenoica.demo.plates import pretraining_experiments

        return pretraining_experiments(section["demo_seeds"])
    return list(section["experiments"])


def render_images(config: Mapping[str, Any], out: Path, workers: int) -> None:
    """Render the demo's images for pre-training: a shard for each of `pretrain.demo_seeds`.

    Raises
    ------
    ConfigError
        If the source is not the demo; its images come with the data set.
    """
    from phenoica.demo.plates import write_pretraining

    if config["source"] != "demo":
        raise ConfigError("source is not 'demo': images for pre-training come from pretrain.shards, none is rendered")
    write_pretraining(out, size=config["demo"]["size"], seeds=config["pretrain"]["demo_seeds"], workers=workers)


def run_pretrain(shards: Sequence[Path], out: Path, config: Mapping[str, Any]) -> None:
    """Train the encoder of a configuration.

    Parameters
    ----------
    shards
        Shards with the images; experiments that are not named for pre-training are left aside.
    out
        Folder for encoder.safetensors, log.csv and recipe.json.
    config
        The resolved configuration: `pretrain`, `embed.model` (the size), `plates.channels`, `embed.device`.

    Raises
    ------
    ConfigError
        If sizes, recipe or experiments do not fit.
    """
    import torch

    from phenoica.openphenom.decoder import DecoderConfig
    from phenoica.openphenom.encoder import OpenPhenomConfig, choose_device
    from phenoica.openphenom.precision import choose_precision
    from phenoica.openphenom.pretrain import Recipe, pretrain
    from phenoica.openphenom.training_images import TrainingImages

    section, channels = config["pretrain"], config["plates"]["channels"]
    if section["threads"] is not None:
        torch.set_num_threads(section["threads"])
    encoder = OpenPhenomConfig(**config["embed"]["model"])
    decoder = DecoderConfig(**section["decoder"], channels=len(channels))
    recipe = Recipe(**{key: section[key] for key in RECIPE_KEYS})
    experiments = training_experiments(config)
    images = TrainingImages(
        shards, experiments, channels, tile=encoder.image_size, seed=section["seed"],
        plate_format=config["plates"]["plate_format"], validation_wells=section["validation_wells"],
        window_wells=section["window_wells"], max_bad_fraction=config["embed"]["max_bad_fraction"],
    )  # fmt: skip
    device = choose_device(config["embed"]["device"])
    precision = choose_precision(section["precision"], device)
    about = {
        "experiments": experiments, "training_wells": len(images.train), "channels": list(channels),
        "images": images.description(),
    }  # fmt: skip
    pretrain(
        images, encoder, decoder, recipe, out, device=device.type, mixed=precision.name == "bfloat16",
        stored_as=section["stored_as"], about=about,
    )  # fmt: skip
