"""What a configuration trains an encoder on."""

import pytest

from phenoica.config import resolve
from phenoica.embed.training import training_experiments, trains
from phenoica.errors import ConfigError


def demo(**pretrain):
    return resolve({"run": "r", "source": "demo", "pretrain": pretrain})


def test_it_trains_where_images_are_named_for_it():
    assert trains(demo(demo_seeds=[1, 2]))
    assert not trains(demo(experiments=["gene-001"]))  # of a data set, not of the demo
    assert {name.rsplit("-", 1)[0] for name in training_experiments(demo(demo_seeds=[1, 2]))} == {
        "pretrain-1", "pretrain-2",
    }  # fmt: skip


def test_the_plates_that_are_scored_are_never_trained_on():
    config = demo(demo_seeds=[5, 6])
    config["demo"]["seed"] = 6
    with pytest.raises(ConfigError, match=r"demo_seeds holds demo.seed \(6\)"):
        trains(config)


def test_an_encoder_to_be_trained_needs_images():
    with pytest.raises(ConfigError, match="checkpoint is 'pretrain', but pretrain.demo_seeds is empty"):
        trains({**demo(), "embed": {"checkpoint": "pretrain"}})
