"""The page of an encoder whose folder is made up: a known loss curve and known reconstructions, read back."""

import base64
import json
import re

import anndata
import imagecodecs
import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from phenoica import schema
from phenoica.cli import app
from phenoica.config import RunPaths, resolve
from phenoica.errors import ConfigError, SchemaError
from phenoica.report import encoder_page, figures

CHANNELS, PATCH, SIDE, STEPS = [1, 2, 5], 8, 32, 1000
SHA256 = "ab" * 32
RECIPE = {
    "encoder": {"image_size": SIDE, "patch_size": PATCH, "dim": 192, "depth": 6, "heads": 3, "layer_scale": 1.0},
    "decoder": {"dim": 64, "depth": 1, "heads": 4, "channels": 3},
    "recipe": {
        "steps": STEPS, "batch_tiles": 64, "optimizer": "lion", "learning_rate": 3e-4, "warmup_steps": 20,
        "mask_ratio": 0.75, "fourier_weight": 0.01, "seed": 3,
    },
    "experiments": ["pretrain-1-001", "pretrain-1-002"], "training_wells": 640, "channels": CHANNELS,
    "mixed_precision": False, "threads": 2, "torch": "2.0", "sha256": SHA256,
}  # fmt: skip


def loss(step):
    """Return the made-up training loss: it falls from 2 towards .75."""
    return 0.75 + 1.25 * np.exp(-np.asarray(step) / 40)


def pictures():
    """Return a disc a channel; half of the patches are hidden, and the guess of hidden pixels is off by .5."""
    y, x = np.mgrid[:SIDE, :SIDE]
    rng = np.random.default_rng(0)
    centres = rng.integers(8, SIDE - 8, (2, len(CHANNELS), 2))
    target = np.array([[2 * np.exp(-((y - a) ** 2 + (x - b) ** 2) / 30) for a, b in tile] for tile in centres])
    hidden = np.zeros((2, len(CHANNELS), SIDE // PATCH, SIDE // PATCH), bool)
    hidden[..., ::2] = True
    hidden[1, 2] = False
    return {"target": target.astype(np.float16), "predicted": (target + 0.5).astype(np.float16), "hidden": hidden}


def write_folder(folder, *, recipe=RECIPE, arrays=None, **columns):
    folder.mkdir(exist_ok=True)
    (folder / "recipe.json").write_text(json.dumps(recipe))
    step = np.arange(STEPS)
    validation = np.full(STEPS, np.nan)
    validation[99::100] = loss(step[99::100]) + 0.02
    log = pd.DataFrame({
        "step": step, "loss": loss(step), "pixel_loss": loss(step) - 0.05, "fourier_loss": 6.0,
        "validation_loss": validation, "learning_rate": 1e-4, "gradient_norm": 1.0, **columns,
    })  # fmt: skip
    log.to_csv(folder / "log.csv", index=False)
    np.savez_compressed(folder / "reconstructions.npz", **(arrays or pictures()))
    return folder


def write_embeddings(path, experiments=("gene-001", "gene-002"), sha256=SHA256):
    obs = pd.DataFrame({schema.EXPERIMENT: experiments}, index=pd.Index(list("ab"), name=schema.WELL_ID))
    adata = anndata.AnnData(np.zeros((2, 2), np.float32), obs=obs)
    adata.uns[schema.UNS] = dict.fromkeys(schema.UNS_KEYS, "x") | {
        "checkpoint": "encoder.safetensors", "checkpoint_sha256": sha256, "encoder_saw_test_images": "no",
    }  # fmt: skip
    adata.write_h5ad(path)
    return path


def score_rows(query, positive):
    """Return rows over folds of raw, random_encoder and their difference, whose interval is the value +- .05."""
    rows = []
    for contrast, names, difference in (
        ("query_vs_reference", ["macro"], query), ("positive_vs_reference", ["macro", "PLK1", "MTOR"], positive),
    ):  # fmt: skip
        for name in names:
            for view, minus, value in (
                ("raw", None, 0.6 + difference), ("random_encoder", None, 0.6), ("raw", "random_encoder", difference),
            ):  # fmt: skip
                rows.append(dict.fromkeys(schema.SCORE_COLUMNS) | {
                    "contrast": contrast, "perturbation": name, "view": view, "view_minus": minus, "probe": "l1",
                    "metric": "auroc", "scope": "pooled", "test_data_used": "none", "value": value,
                    "ci_low": value - 0.05, "ci_high": value + 0.05, "ci_kind": "t over folds", "fold": -1,
                })  # fmt: skip
    return pd.DataFrame(rows)


@pytest.fixture
def page(tmp_path):
    """Write a page of the made-up folder, changed as asked, and return its HTML."""

    def make(scores=None, experiments=("gene-001", "gene-002"), sha256=SHA256, **folder):
        directory = write_folder(tmp_path / "encoder", **folder)
        embeddings = write_embeddings(tmp_path / "embeddings.h5ad", experiments, sha256)
        if scores is not None:
            scores.to_parquet(tmp_path / "scores.parquet")
        out = tmp_path / "report" / "encoder.html"
        encoder_page.write(directory, embeddings, None if scores is None else tmp_path / "scores.parquet", out)
        return out.read_text(encoding="utf-8")

    return make


def plain(html):
    """Return the text of a page with single blanks."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))


def test_the_curve_is_the_mean_of_consecutive_steps(tmp_path):
    log = encoder_page.read_log(write_folder(tmp_path / "encoder"))
    curve = encoder_page.curve(log)
    assert curve["window"] == 4 and len(curve["step"]) == 250 and curve["last"] == 999
    np.testing.assert_allclose(curve["step"][:2], [1.5, 5.5])
    np.testing.assert_allclose(curve["loss"], loss(np.arange(STEPS)).reshape(-1, 4).mean(axis=1), rtol=1e-6)
    np.testing.assert_allclose(curve["pixel_loss"], np.array(curve["loss"]) - 0.05, rtol=1e-6)
    assert curve["validation_step"] == list(range(99, 1000, 100))
    np.testing.assert_allclose(curve["validation_loss"], loss(np.arange(99, 1000, 100)) + 0.02, rtol=1e-6)
    assert curve["fourier"] and curve["cut"]
    assert 1.05 < curve["top"] < 2 and curve["top"] >= max(curve["loss"][12:])


def test_rows_that_already_average_are_counted_in_steps(tmp_path):
    folder = write_folder(tmp_path / "encoder")
    log = pd.read_csv(folder / "log.csv")
    log.iloc[9::10].to_csv(folder / "log.csv", index=False)
    curve = encoder_page.curve(encoder_page.read_log(folder))
    assert curve["window"] == 10 and len(curve["step"]) == 100


def test_a_flat_curve_shows_the_line_at_one_and_is_not_cut(tmp_path):
    folder = write_folder(tmp_path / "encoder", loss=0.5, pixel_loss=0.5, fourier_loss=np.nan, validation_loss=np.nan)
    curve = encoder_page.curve(encoder_page.read_log(folder))
    assert not curve["cut"] and not curve["fourier"] and curve["top"] > 1 and curve["validation_loss"] == []


def test_the_figure_draws_the_curve_and_the_line_of_the_mean_grey_value(tmp_path):
    curve = encoder_page.curve(encoder_page.read_log(write_folder(tmp_path / "encoder")))
    (ax,) = figures.loss_figure(curve).axes
    lines = {line.get_label(): line for line in ax.lines}
    np.testing.assert_array_equal(lines["training, mean of 4 steps"].get_ydata(), curve["loss"])
    np.testing.assert_array_equal(lines["validation, other wells"].get_xdata(), curve["validation_step"])
    assert any(list(line.get_ydata()) == [1, 1] for line in ax.lines)
    assert ax.get_xlabel() == "step" and "loss" in ax.get_ylabel()
    encoder_page.write_figure(tmp_path / "encoder", tmp_path / "a.svg")
    encoder_page.write_figure(tmp_path / "encoder", tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert "<svg" in (tmp_path / "a.svg").read_text()


def decoded(cell):
    return imagecodecs.png_decode(base64.b64decode(cell["src"].removeprefix("data:image/png;base64,")))


def test_pictures_hide_what_was_hidden_and_keep_what_was_seen(tmp_path):
    tiles = encoder_page.tiles(write_folder(tmp_path / "encoder"), RECIPE)
    assert len(tiles) == 2
    image, seen, reconstruction = ([decoded(c) for c in row["cells"]] for row in tiles[0]["rows"])
    assert [row["name"] for row in tiles[0]["rows"]] == ["image", "what the encoder saw", "reconstruction"]
    hidden = np.tile(np.arange(SIDE) // PATCH % 2 == 0, (SIDE, 1))
    for true, shown, guess in zip(image, seen, reconstruction, strict=True):
        assert true.shape == guess.shape == (SIDE, SIDE) and true.min() == 0 and true.max() == 255
        assert (shown[hidden] == encoder_page.HIDDEN_COLOUR).all()
        assert (shown[~hidden] == true[~hidden][:, None]).all() and (guess[~hidden] == true[~hidden]).all()
        assert (guess[hidden] > true[hidden]).mean() > 0.8  # the guess is .5 brighter
    np.testing.assert_allclose(tiles[0]["errors"], 0.25, rtol=0.01)
    assert tiles[1]["errors"][2] is None  # nothing hidden, nothing predicted


def test_the_page_says_what_went_into_the_encoder(page):
    html = page()
    text = plain(html)
    assert "Steps 1,000 of 64 tiles with lion: 64,000 tiles in all" in text
    assert "640 wells of 2 pre-training experiments, each with 3 channels" in text
    assert "16 patches of 8 × 8 px" in text and "6 blocks 192 wide, 3 attention heads" in text
    assert "75 % of the patches" in text
    assert "None of the 2 experiments it was trained on is among the 2 experiments of this run" in text
    assert "Validation loss 0.77 at the last step, Fourier part included; the pixel part alone is 0.70" in text
    assert "the Fourier amplitudes of patches, comes on top with the weight 0.01" in text
    assert html.count("data:image/png;base64,") == 2 * 3 * 3 and "<svg" in html
    assert SHA256 in text and "recipe.seed" in text
    assert "it has no scores" in text
    assert "http://" not in re.sub(r"http://(www\.w3|purl|creativecommons)\.org", "", html)


def test_without_a_fourier_part_the_page_speaks_of_none(page):
    text = plain(page(fourier_loss=np.nan))
    assert "Validation loss 0.77 at the last step Does" in text and "Fourier amplitudes" not in text


def test_training_on_scored_experiments_is_an_alarm(page):
    html = page(experiments=("gene-001", "pretrain-1-002"))
    assert 'role="alert">TRAINED ON SCORED EXPERIMENTS' in html and "pretrain-1-002" in html
    assert "None of the" not in html


@pytest.mark.parametrize(
    ("query", "shown", "outcome"),
    [(0.12, "+0.120 +0.07 to +0.17", "trained is higher"), (-0.12, "−0.120 −0.17 to −0.07",
     "trained is lower"), (0.03, "+0.030 −0.02 to +0.08", "not decided")],
)  # fmt: skip
def test_trained_minus_random_is_shown_whatever_its_sign(page, query, shown, outcome):
    text = plain(page(score_rows(query, 0.2)))
    assert f"Query perturbations (average) {0.6 + query:.3f}" in text
    assert f"{shown} {outcome}" in text
    assert "PLK1 0.800" in text and "+0.200 +0.15 to +0.25 trained is higher" in text


def test_without_the_baseline_the_page_says_how_to_get_it(page):
    rows = score_rows(0.1, 0.1)
    text = plain(page(rows[rows["view"].eq("raw") & rows["view_minus"].isna()]))
    assert "embed.random_baseline" in text and "Trained minus random" not in text


def test_a_folder_of_another_encoder_is_refused(page):
    with pytest.raises(SchemaError, match="abababababab.*was made with cdcdcd"):
        page(sha256="cd" * 32)
    with pytest.raises(SchemaError, match="random weights"):
        page(sha256="")


def test_damaged_folders_are_named(page, tmp_path):
    with pytest.raises(SchemaError, match="recipe.json: channels missing"):
        page(recipe={k: v for k, v in RECIPE.items() if k != "channels"})
    with pytest.raises(SchemaError, match="step 0 has no loss"):
        page(loss=np.nan)
    with pytest.raises(SchemaError, match="do not fit"):
        page(arrays=pictures() | {"hidden": np.zeros((2, 3, 2, 2), bool)})
    with pytest.raises(SchemaError, match="arrays predicted are missing"):
        page(arrays={k: v for k, v in pictures().items() if k != "predicted"})
    with pytest.raises(SchemaError, match="nowhere/recipe.json: no such file"):
        encoder_page.read_recipe(tmp_path / "nowhere")
    assert not (tmp_path / "report").exists()


def test_the_verb_finds_the_files_of_a_run(tmp_path):
    """Without options it takes the run's own encoder, embeddings and scores; scores only of a run with folds."""
    config = resolve({
        "run": "r", "source": "demo", "results": str(tmp_path), "embed": {"checkpoint": "pretrain"},
        "pretrain": {"demo_seeds": [1]},
    })  # fmt: skip
    paths = RunPaths.of(config)
    for folder in (paths.pretrain("log.csv").parent, paths.embeddings.parent, paths.scores("txt").parent):
        folder.mkdir(parents=True)
    write_folder(paths.pretrain("log.csv").parent)
    write_embeddings(paths.embeddings)
    score_rows(0.12, 0.2).to_parquet(paths.scores("parquet"))
    paths.scores("txt").touch()
    paths.plates("units.csv").parent.mkdir()
    for units, shown in (("kind,name\nfold,0\n", True), ("kind,name\nexperiment,e\n", False)):
        paths.plates("units.csv").write_text(units)
        result = CliRunner().invoke(app, ["report-encoder", "--config", json.dumps(config)])
        assert result.exit_code == 0, (result.output, result.exception)
        assert ("+0.120" in paths.report("encoder.html").read_text()) == shown
    assert "<svg" in paths.report("encoder.svg").read_text()
    config["embed"]["checkpoint"] = "random"
    with pytest.raises(ConfigError, match="'random': phenoica did not train this encoder"):
        encoder_page.folder_of(config)
