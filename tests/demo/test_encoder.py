"""The bundled encoder: that it is what its recipe says, that the demo's configuration makes it, and that it learned."""

import json
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import yaml

from phenoica import files
from phenoica.config import resolve
from phenoica.demo import layout
from phenoica.demo.plates import pretraining_experiments
from phenoica.demo.render import render_well
from phenoica.embed.encoder import load_encoder
from phenoica.embed.training import RECIPE_KEYS
from phenoica.openphenom import OpenPhenom, OpenPhenomConfig
from phenoica.openphenom.tiling import tiles

CONFIG = Path(__file__).parents[2] / "config/config.yaml"
UNSEEN = 987_654


@pytest.fixture(scope="module")
def folder():
    return Path(str(resources.files("phenoica.demo").joinpath("encoder")))


@pytest.fixture(scope="module")
def recipe(folder):
    return json.loads((folder / "recipe.json").read_text())


@pytest.fixture(scope="module")
def config():
    return resolve(yaml.safe_load(CONFIG.read_text()))


@pytest.fixture(scope="module")
def fresh_tiles():
    """Tiles of a few wells of a seed that nothing was trained on."""
    wells = layout.design(UNSEEN, "pretrain")
    factors = layout.factors(wells, UNSEEN, "pretrain").iloc[::60].to_dict("records")
    images = np.stack([render_well(f, 128, (UNSEEN, i))[0] for i, f in enumerate(factors)])
    return np.ascontiguousarray(tiles(images, 64).reshape(-1, 6, 64, 64))


def test_it_is_small_and_its_recipe_names_its_hash(folder, recipe):
    assert sum(f.stat().st_size for f in folder.iterdir()) <= 3_000_000
    assert recipe["sha256"] == files.sha256(folder / "encoder.safetensors")


def test_the_configuration_of_the_demo_makes_it(recipe, config):
    section = config["pretrain"]
    assert {key: section[key] for key in RECIPE_KEYS} == recipe["recipe"]
    assert recipe["experiments"] == pretraining_experiments(section["demo_seeds"])
    assert (recipe["threads"], recipe["stored_as"]) == (section["threads"], section["stored_as"])
    assert OpenPhenomConfig(**recipe["encoder"]) == OpenPhenomConfig(**config["embed"]["model"])
    assert {k: recipe["decoder"][k] for k in section["decoder"]} == section["decoder"]


def test_it_saw_no_demo_plate(recipe, config):
    assert config["demo"]["seed"] not in config["pretrain"]["demo_seeds"]
    demo = set(layout.design(config["demo"]["seed"])["experiment"])
    encoder = load_encoder(config, 6, experiments=demo)
    assert encoder.saw_test_images == "no"
    assert load_encoder(config, 6, experiments=recipe["experiments"][:1]).saw_test_images == "yes"
    assert f"{recipe['recipe']['steps']:,} steps" in encoder.sentence and "bundled" not in encoder.weights_licence


def test_the_random_baseline_has_its_size_and_a_layer_scale_of_1(config):
    encoder = load_encoder(config, 6)
    assert encoder.baseline.config == OpenPhenomConfig(**{**config["embed"]["model"], "layer_scale": 1.0})
    assert load_encoder({**config, "embed": {**config["embed"], "random_baseline": False}}, 6).baseline is None


def test_it_fills_in_hidden_patches_of_wells_it_never_saw(folder, fresh_tiles):
    model = OpenPhenom.from_checkpoint(folder / "encoder.safetensors")
    noise = np.random.default_rng(0).random((len(fresh_tiles), 6 * model.config.patches))
    loss = model.reconstruct(fresh_tiles, 0.75, noise).loss
    # the mean grey value of a tile has a loss of about 1
    assert loss < 0.85
    shuffled = np.ascontiguousarray(fresh_tiles[:, :, ::-1, ::-1])
    shuffled[:, 0] = fresh_tiles[:, 0]  # one channel no longer lies over the others
    assert model.reconstruct(shuffled, 0.75, noise).loss > loss + 0.02
