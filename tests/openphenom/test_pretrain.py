"""Pre-training: exact resume, determinism, named experiments only, and that it learns what can be predicted."""

import csv
import dataclasses
import json

import imagecodecs
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from phenoica import files
from phenoica.errors import CheckpointError, ConfigError, FitError, TooManyBadImages
from phenoica.openphenom import OpenPhenom, OpenPhenomConfig
from phenoica.openphenom.decoder import DecoderConfig
from phenoica.openphenom.encoder import unpatch
from phenoica.openphenom.pretrain import Recipe, Trainer, new_auto_encoder, pretrain
from phenoica.openphenom.training_images import TrainingImages

ENCODER = OpenPhenomConfig(image_size=16, patch_size=8, dim=16, depth=1, heads=2, max_channels=2)
DECODER = DecoderConfig(dim=16, depth=1, heads=2, channels=2)
SHORT = Recipe(steps=8, batch_tiles=4, warmup_steps=2, validate_every=4, save_every=2, learning_rate=1e-3)


class Noise:
    """Tiles of noise whose second channel is the first one upside down in grey value."""

    def batch(self, step, size):
        first = np.random.default_rng([7, step]).integers(0, 256, (size, 1, 16, 16), np.uint8)
        # whole patches share a grey value, so that a patch is predictable from the other channel
        first = first[:, :, ::8, ::8].repeat(8, 2).repeat(8, 3)
        return np.concatenate([first, 255 - first], 1)

    def validation_tiles(self):
        return self.batch(10**6, 6)


def curve(folder):
    with open(folder / "log.csv") as handle:
        return list(csv.DictReader(handle))


def weights(folder):
    return OpenPhenom.from_checkpoint(folder / "encoder.safetensors").state_dict()


def test_a_killed_run_goes_on_with_the_same_curve_and_ends_with_the_same_bytes(tmp_path):
    pretrain(Noise(), ENCODER, DECODER, SHORT, tmp_path / "whole")
    pretrain(Noise(), ENCODER, DECODER, SHORT, tmp_path / "killed", stop_after=3)
    assert not (tmp_path / "killed/encoder.safetensors").exists()
    pretrain(Noise(), ENCODER, DECODER, SHORT, tmp_path / "killed", stop_after=2)
    pretrain(Noise(), ENCODER, DECODER, SHORT, tmp_path / "killed")
    assert curve(tmp_path / "whole") == curve(tmp_path / "killed")
    assert [row["step"] for row in curve(tmp_path / "whole")] == [str(i) for i in range(8)]
    names = ("encoder.safetensors", "log.csv", "recipe.json")
    assert all(files.sha256(tmp_path / "whole" / n) == files.sha256(tmp_path / "killed" / n) for n in names)
    assert not (tmp_path / "killed/state.pt").exists()


def test_the_optimizer_is_part_of_the_state(tmp_path):
    trainer = Trainer(new_auto_encoder(ENCODER, DECODER, 0), SHORT)
    for step in range(3):
        trainer.train_step(Noise().batch(step, 4))
    state = trainer.state()
    assert state["step"] == 3 and len(state["optimizer"]["state"]) > 10


def test_same_seed_same_bytes_other_seed_other_weights(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        recipe = Recipe(steps=3, batch_tiles=4, warmup_steps=1, seed=seed)
        pretrain(Noise(), ENCODER, DECODER, recipe, tmp_path / name)
    a, b, c = (files.sha256(tmp_path / n / "encoder.safetensors") for n in "abc")
    assert a == b != c


def test_a_state_of_another_recipe_is_refused(tmp_path):
    pretrain(Noise(), ENCODER, DECODER, SHORT, tmp_path, stop_after=2)
    other = Recipe(steps=8, batch_tiles=4, warmup_steps=2, learning_rate=2e-3)
    with pytest.raises(CheckpointError, match=r"state.pt: the state of another recipe.*delete it"):
        pretrain(Noise(), ENCODER, DECODER, other, tmp_path)


@pytest.mark.parametrize("optimizer", ["lion", "adamw"])
def test_it_learns_what_the_other_channel_tells(optimizer):
    recipe = Recipe(
        steps=400, batch_tiles=32, learning_rate=3e-3 if optimizer == "adamw" else 1e-3, warmup_steps=20,
        optimizer=optimizer, mask_ratio=0.5, fourier_weight=0.0,
    )  # fmt: skip
    trainer = Trainer(new_auto_encoder(ENCODER, DECODER, 0), recipe)
    before = trainer.validate(Noise().batch(5000, 64))
    for step in range(recipe.steps):
        trainer.train_step(Noise().batch(step, 32))
    after = trainer.validate(Noise().batch(5000, 64))
    # a grey value that nobody can guess has variance 1; half of the hidden patches have their mirror in sight
    assert after < 0.8 < before


def test_biases_that_the_format_has_no_place_for_stay_0(tmp_path):
    model = pretrain(Noise(), ENCODER, DECODER, SHORT, tmp_path)
    bias = model.blocks[0].in_proj.bias
    assert not bias[: 3 * ENCODER.dim].any() and bias[3 * ENCODER.dim :].any()
    saved = weights(tmp_path)
    assert all(torch.equal(saved[k], v) for k, v in model.state_dict().items() if not k.startswith("decoder."))


def test_tokens_biases_and_norms_are_not_decayed():
    trainer = Trainer(new_auto_encoder(ENCODER, DECODER, 0), SHORT)
    names = {id(p): n for n, p in trainer.model.named_parameters()}
    decayed = {names[id(p)] for g in trainer.optimizer.param_groups if g["weight_decay"] for p in g["params"]}
    assert {"patch_embed.proj.weight", "blocks.0.in_proj.weight", "decoder.decoder_pred.weight"} <= decayed
    assert all(name.endswith("weight") and "norm" not in name for name in decayed)
    matrices = {name for name, p in trainer.model.named_parameters() if name.endswith("weight") and p.ndim > 1}
    assert decayed == matrices


def test_the_last_step_still_learns(tmp_path):
    pretrain(Noise(), ENCODER, DECODER, SHORT, tmp_path)
    assert float(curve(tmp_path)[-1]["learning_rate"]) > 0


def test_learning_rate_rises_and_falls_and_the_gradient_is_cut(tmp_path):
    recipe = Recipe(steps=40, batch_tiles=2, warmup_steps=10, learning_rate=1e-3, validate_every=10)
    pretrain(Noise(), ENCODER, DECODER, recipe, tmp_path)
    rates = [float(row["learning_rate"]) for row in curve(tmp_path)]
    assert max(rates) <= 1e-3 and max(rates) == pytest.approx(1e-3, rel=0.2)
    assert rates[:9] == sorted(rates[:9]) and rates[12:] == sorted(rates[12:], reverse=True)
    assert rates[0] > 0 and rates[-1] < 1e-5
    validated = [row["step"] for row in curve(tmp_path) if row["validation_loss"]]
    assert validated == ["9", "19", "29", "39"]


def test_loss_is_the_weighted_sum_of_its_parts(tmp_path):
    recipe = Recipe(steps=2, batch_tiles=4, warmup_steps=0, fourier_weight=0.25)
    trainer = Trainer(new_auto_encoder(ENCODER, DECODER, 0), recipe)
    row = trainer.train_step(Noise().batch(0, 4))
    assert row["loss"] == pytest.approx(0.75 * row["pixel_loss"] + 0.25 * row["fourier_loss"], rel=1e-5)


def test_mixed_precision_trains_too():
    trainer = Trainer(new_auto_encoder(ENCODER, DECODER, 0), SHORT, mixed=True)
    plain = Trainer(new_auto_encoder(ENCODER, DECODER, 0), SHORT)
    tiles = Noise().batch(0, 4)
    mixed, exact = trainer.train_step(tiles), plain.train_step(tiles)
    assert mixed["loss"] == pytest.approx(exact["loss"], rel=0.02)
    assert mixed["loss"] != exact["loss"]
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}


def test_a_loss_that_is_no_number_stops_the_run():
    trainer = Trainer(new_auto_encoder(ENCODER, DECODER, 0), SHORT)
    with torch.no_grad():
        trainer.model.cls_token.fill_(float("nan"))
    with pytest.raises(FitError, match="step 0 is nan; lower pretrain.learning_rate"):
        trainer.train_step(Noise().batch(0, 4))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optimizer": "sgd"}, "optimizer"), ({"steps": 0}, "steps"), ({"warmup_steps": 8}, "warmup_steps"),
        ({"fourier_weight": 1.5}, "fourier_weight"), ({"batch_tiles": 0}, "batch_tiles"),
        ({"mask_ratio": 1.0}, "mask_ratio"), ({"learning_rate": float("nan")}, "learning_rate"),
        ({"clip_norm": 0}, "clip_norm"), ({"weight_decay": -0.1}, "weight_decay"), ({"seed": -1}, "seed"),
    ],
)  # fmt: skip
def test_impossible_recipes(values, message):
    with pytest.raises(ConfigError, match=f"pretrain.{message}"):
        Recipe(**{"steps": 8, "warmup_steps": 2, **values})


def test_pictures_show_targets_predictions_and_the_mask(tmp_path):
    model = pretrain(Noise(), ENCODER, DECODER, SHORT, tmp_path)
    with np.load(tmp_path / "reconstructions.npz") as file:
        pictures = dict(file)
    tiles = torch.from_numpy(Noise().validation_tiles()[:2])
    assert pictures["predicted"].shape == (2, 2, 16, 16) and pictures["hidden"].sum((1, 2, 3)).tolist() == [6, 6]
    patches = model.standardised_patches(tiles)
    np.testing.assert_allclose(pictures["target"], unpatch(patches, 2), atol=2e-3)
    # ordering noise by what was hidden gives the same masks, so the same reconstruction
    noise = pictures["hidden"].reshape(2, -1).astype(float)
    again = model.reconstruct(tiles, SHORT.mask_ratio, noise)
    assert torch.equal(again.hidden, torch.from_numpy(pictures["hidden"].reshape(2, -1)))
    np.testing.assert_allclose(pictures["predicted"], again.images(2), atol=1e-2)


def test_rows_of_the_log_average_over_steps(tmp_path):
    recipe = dataclasses.replace(SHORT, log_every=3)
    pretrain(Noise(), ENCODER, DECODER, SHORT, tmp_path / "each")
    pretrain(Noise(), ENCODER, DECODER, recipe, tmp_path / "three")
    each, three = curve(tmp_path / "each"), curve(tmp_path / "three")
    assert [row["step"] for row in three] == ["2", "5", "7"]
    assert float(three[1]["loss"]) == pytest.approx(np.mean([float(row["loss"]) for row in each[3:6]]), rel=1e-4)
    assert three[1]["validation_loss"] == each[3]["validation_loss"] and three[0]["validation_loss"] == ""


def test_weights_can_be_stored_in_half_the_space(tmp_path):
    pretrain(Noise(), ENCODER, DECODER, SHORT, tmp_path / "whole")
    pretrain(Noise(), ENCODER, DECODER, SHORT, tmp_path / "half", stored_as="float16")
    sizes = [(tmp_path / n / "encoder.safetensors").stat().st_size for n in ("half", "whole")]
    assert sizes[0] < 0.75 * sizes[1]
    whole = weights(tmp_path / "whole")
    assert all(torch.equal(v, whole[k].half().float()) for k, v in weights(tmp_path / "half").items())


def test_the_recipe_says_what_was_done(tmp_path):
    pretrain(Noise(), ENCODER, DECODER, SHORT, tmp_path, about={"experiments": ["one"]})
    recipe = json.loads((tmp_path / "recipe.json").read_text())
    assert recipe["experiments"] == ["one"] and recipe["recipe"]["steps"] == 8 and recipe["encoder"]["dim"] == 16
    assert recipe["sha256"] == files.sha256(tmp_path / "encoder.safetensors")


# ---- images


@pytest.fixture
def shard(tmp_path):
    """Two experiments of 40 wells and two channels; grey value = number of the well."""

    def image(value, size=24):
        grey = np.full((size, size), value, np.uint8)
        grey[0, 0] = 255 - value
        return grey

    def make(bad=(), small=()):
        images = {}
        for experiment in ("train-1", "score-1"):
            for well in range(40):
                for channel in (1, 2):
                    key = f"{experiment}/Plate1/A{well + 1:02d}_s1_{channel}"
                    value = well if experiment == "train-1" else 200
                    broken = well in bad and experiment == "train-1"
                    images[key] = b"broken" if broken else encoded(image(value, 8 if well in small else 24))
        cells = {"__key__": list(images), "jp2": [{"bytes": data, "path": None} for data in images.values()]}
        pq.write_table(pa.table(cells), tmp_path / "shard.parquet", row_group_size=10)
        return tmp_path / "shard.parquet"

    return make


def encoded(image):
    return imagecodecs.jpeg2k_encode(image, level=0, codecformat="jp2", reversible=True)


def images_of(path, **options):
    options = {"tile": 16, "seed": 0, "validation_wells": 8, **options}
    return TrainingImages([path], ["train-1"], [1, 2], **options)


def values_of(batch):
    return np.median(batch, axis=(1, 2, 3)).astype(int).tolist()


def test_only_named_experiments_are_seen_each_well_once_an_epoch(shard):
    images = images_of(shard())
    seen = [v for step in range(4) for v in values_of(images.batch(step, 8))]
    kept = values_of(images.validation_tiles())
    assert len(kept) == 8 and sorted(seen + kept) == list(range(40))
    again = [v for step in range(4, 8) for v in values_of(images.batch(step, 8))]
    assert sorted(again) == sorted(seen) and again != seen


def test_batches_depend_on_seed_and_step_alone(shard):
    path = shard()
    one, two = images_of(path), images_of(path, window_wells=32)
    later = one.batch(5, 8)
    for step in range(5):
        two.batch(step, 8)
    assert np.array_equal(two.batch(5, 8), later)
    assert not np.array_equal(images_of(path, seed=1).batch(5, 8), later)


def test_memory_is_bounded_by_the_window(shard, monkeypatch):
    monkeypatch.setattr("phenoica.openphenom.training_images.CHUNK_WELLS", 4)
    images = images_of(shard(), window_wells=8)
    for step in range(30):
        images.batch(step, 4)
        assert len(images._decoded) <= 4
    assert sorted(v for step in range(8) for v in values_of(images.batch(step, 4))) == sorted(
        set(range(40)) - set(values_of(images.validation_tiles()))
    )


def test_tiles_are_turned_and_flipped_and_cut_anywhere(shard, monkeypatch):
    images = images_of(shard())
    pattern = np.arange(2 * 24 * 24).reshape(2, 24, 24).astype(np.int64)
    monkeypatch.setattr(images, "_image", lambda position: pattern)
    tiles = [images.batch(step, 1)[0, 0] for step in range(400)]
    corners = {int(t.min()) for t in tiles}
    assert len(corners) > 60  # of 81 places
    steps = {(int(t[0, 1] - t[0, 0]), int(t[1, 0] - t[0, 0])) for t in tiles}
    assert steps == {(a, b) for x, y in [(1, 24), (24, 1)] for a in (x, -x) for b in (y, -y)}


def test_the_description_of_images_changes_with_them(shard):
    path = shard()
    whole = images_of(path).description()
    assert images_of(path).description() == whole
    assert whole["validation_wells"] == 8 and whole["window_wells"] == 4096
    for options in ({"window_wells": 32}, {"validation_wells": 9}, {"plate_format": 384}):
        assert images_of(path, **options).description() != whole
    assert images_of(shard(small=(9,))).description()["sha256"] != whole["sha256"]  # same wells, other images


def test_wells_without_a_channel_are_left_out_and_named(shard, capsys):
    path = shard()
    table = pq.read_table(path)
    lacking = [key == "train-1/Plate1/A07_s1_2" for key in table["__key__"].to_pylist()]
    pq.write_table(table.filter(~np.array(lacking)), path, row_group_size=10)
    images = images_of(path)
    assert len(images.train) + len(images.validation) == 39
    assert "1 of 40 wells for pre-training lack one of the channels [1, 2]" in (said := capsys.readouterr().err)
    assert "train-1_1_A07" in said


def test_bad_wells_are_left_out_and_too_many_stop_it(shard, capsys):
    images = images_of(shard(bad=(3, 4), small=(9,)), max_bad_fraction=0.2)
    seen = {v for step in range(10) for v in values_of(images.batch(step, 8))}
    assert seen | set(values_of(images.validation_tiles())) == set(range(40)) - {3, 4, 9}
    assert "A04_s1_1: not a JPEG 2000 image" in capsys.readouterr().err
    with pytest.raises(TooManyBadImages, match="max_bad_fraction"):
        for step in range(10):
            images_of(shard(bad=range(20))).batch(step, 8)


def test_experiments_must_be_named_and_there(shard):
    with pytest.raises(ConfigError, match="pretrain.experiments is empty"):
        TrainingImages([shard()], [], [1, 2], tile=16, seed=0)
    with pytest.raises(ConfigError, match="train-9 not found.*score-1, train-1"):
        TrainingImages([shard()], ["train-1", "train-9"], [1, 2], tile=16, seed=0)
    with pytest.raises(ConfigError, match="40 whole wells.*validation_wells"):
        images_of(shard(), validation_wells=40)


def test_bad_images_in_every_well_stop_it_instead_of_searching_for_ever(tmp_path, shard):
    images = images_of(shard(bad=range(40)), max_bad_fraction=1.0)
    with pytest.raises(TooManyBadImages, match=r"no well .* can be used; the latest: \S+: "):
        images.batch(0, 4)
    with pytest.raises(TooManyBadImages, match=r"no validation well can be used; the latest: \S+: "):
        images.validation_tiles()


def test_a_gradient_that_is_no_number_is_not_written_into_the_weights():
    trainer = Trainer(new_auto_encoder(ENCODER, DECODER, 0), SHORT)
    trainer.model.cls_token.register_hook(lambda gradient: gradient * float("inf"))
    before = {k: v.clone() for k, v in trainer.model.state_dict().items()}
    with pytest.raises(FitError, match="gradient at step 0"):
        trainer.train_step(Noise().batch(0, 4))
    assert all(torch.equal(v, before[k]) for k, v in trainer.model.state_dict().items())


@pytest.mark.parametrize("size", [0, 100, -10])
def test_a_damaged_state_is_one_clear_error(tmp_path, size):
    pretrain(Noise(), ENCODER, DECODER, SHORT, tmp_path, stop_after=2)
    state = (tmp_path / "state.pt").read_bytes()
    (tmp_path / "state.pt").write_bytes(state[:size])
    with pytest.raises(CheckpointError, match="state.pt: damaged.*delete it to start anew"):
        pretrain(Noise(), ENCODER, DECODER, SHORT, tmp_path)


def test_a_model_read_from_a_file_is_saved_with_its_decoder(tmp_path):
    pretrain(Noise(), ENCODER, DECODER, SHORT, tmp_path)
    OpenPhenom.from_checkpoint(tmp_path / "encoder.safetensors").save(tmp_path / "again.safetensors")
    assert files.sha256(tmp_path / "again.safetensors") == files.sha256(tmp_path / "encoder.safetensors")


def test_a_decoder_read_from_a_file_can_be_trained_on(tmp_path):
    pretrain(Noise(), ENCODER, DECODER, SHORT, tmp_path)
    model = OpenPhenom.from_checkpoint(tmp_path / "encoder.safetensors")
    model.reconstruct(Noise().validation_tiles(), 0.5)
    model.load_state_dict(model.state_dict())
    assert Trainer(model, SHORT).train_step(Noise().batch(0, 4))["loss"] > 0
