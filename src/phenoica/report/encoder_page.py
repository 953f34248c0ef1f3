"""The page of the encoder: what it was trained on and how, what it can fill in, and what its training adds.

The folder that pre-training wrote (recipe, loss curve, reconstructions), the AnnData of embeddings and, where the run
has one, the table of scores come in; one static page and the curve as SVG go out.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from phenoica import schema
from phenoica.embed.encoder import encoder_folder
from phenoica.errors import ConfigError, SchemaError
from phenoica.openphenom import LOG_FILE, PICTURES_FILE, RECIPE_FILE
from phenoica.report import figures, pages
from phenoica.report.run_index import flatten
from phenoica.report.score_page import read_scores, training
from phenoica.score.rows import OVER_FOLDS

CURVE_POINTS = 250  # of the smoothed curve; more would not be seen
GREY_PERCENTILES = (0.5, 99.5)  # of a channel of a tile: black and white
HIDDEN_COLOUR = (158, 168, 184)  # a blue-grey that no grey image holds
_RECIPE_KEYS = ("encoder", "decoder", "recipe", "experiments", "training_wells", "channels", "sha256")
_LOG_COLUMNS = ("step", "loss", "pixel_loss", "fourier_loss", "validation_loss")


def write(
    encoder_dir: str | os.PathLike,
    embeddings_h5ad: str | os.PathLike,
    scores_parquet: str | os.PathLike | None,
    out_path: str | os.PathLike,
) -> None:
    """Write the page of an encoder that phenoica trained.

    Parameters
    ----------
    encoder_dir
        Folder with recipe.json, log.csv and reconstructions.npz, as pre-training writes them.
    embeddings_h5ad
        Written by the embed stage with this encoder; its matrix is not read.
    scores_parquet
        The table of scores; None where nothing was scored.
    out_path
        report/encoder.html; the run index is expected one folder up.

    Raises
    ------
    SchemaError
        If a file is missing or of another shape, or the embeddings are of another encoder.
    """
    recipe = read_recipe(encoder_dir)
    log = read_log(encoder_dir)
    experiments, uns = _scored(embeddings_h5ad)
    if str(uns["checkpoint_sha256"]) != recipe["sha256"]:
        raise SchemaError(
            f"{Path(encoder_dir) / RECIPE_FILE} describes the encoder of sha256 {recipe['sha256'][:12]}, but "
            f"{embeddings_h5ad} was made with {str(uns['checkpoint_sha256'])[:12] or 'random weights'}; "
            "run `phenoica embed` again, or name the folder of the encoder that it used"
        )
    scores = None if scores_parquet is None else read_scores(scores_parquet)
    points = curve(log)
    pages.write_page(
        "encoder.html",
        out_path,
        recipe=recipe["recipe"],
        encoder=recipe["encoder"],
        n_patches=(recipe["encoder"]["image_size"] // recipe["encoder"]["patch_size"]) ** 2,
        channels=recipe["channels"],
        trained_on=[str(e) for e in recipe["experiments"]],
        training_wells=recipe["training_wells"],
        n_tiles=recipe["recipe"]["steps"] * recipe["recipe"]["batch_tiles"],
        n_scored=len(experiments),
        shared=sorted(experiments & set(map(str, recipe["experiments"]))),
        figure=figures.svg(figures.loss_figure(points)),
        curve=points,
        last_validation=points["validation_loss"][-1] if points["validation_loss"] else None,
        tiles=tiles(encoder_dir, recipe),
        training=[] if scores is None else training(scores[scores["fold"] == OVER_FOLDS]),
        scored=scores is not None,
        settings=list(flatten(recipe)),
        run_link=pages.link(Path(out_path).parent.parent / "index.html", out_path),
        score_link=pages.link(Path(out_path).parent / "score.html", out_path),
        plates_link=pages.link(Path(out_path).parent / "plates" / "index.html", out_path),
        sentences=pages.encoder_sentences(uns),
    )


def write_figure(encoder_dir: str | os.PathLike, out_path: str | os.PathLike) -> None:
    """Write the loss curve of a folder of pre-training as an SVG file that stands alone."""
    figures.write_svg(figures.loss_figure(curve(read_log(encoder_dir))), out_path)


def folder_of(config: Mapping[str, Any]) -> Path:
    """Return the folder of the encoder of a run.

    Raises
    ------
    ConfigError
        If phenoica did not train it.
    """
    folder = encoder_folder(config)
    if folder is None:
        raise ConfigError(
            f"embed.checkpoint is {config['embed']['checkpoint']!r}: phenoica did not train this encoder, so it has no "
            "page; name the folder of one that it trained with --encoder"
        )
    return folder


def _file(encoder_dir: str | os.PathLike, name: str) -> Path:
    path = Path(encoder_dir) / name
    if not path.is_file():
        raise SchemaError(f"{path}: no such file; name the folder that `phenoica pretrain` wrote")
    return path


def read_recipe(encoder_dir: str | os.PathLike) -> dict[str, Any]:
    """Return recipe.json of a folder of pre-training.

    Raises
    ------
    SchemaError
        If it is missing or lacks an entry.
    """
    path = _file(encoder_dir, RECIPE_FILE)
    recipe = json.loads(path.read_text(encoding="utf-8"))
    missing = [key for key in _RECIPE_KEYS if key not in recipe]
    if missing:
        raise SchemaError(f"{path}: {', '.join(missing)} missing; train with `phenoica pretrain`, which writes them")
    return recipe


def read_log(encoder_dir: str | os.PathLike) -> pd.DataFrame:
    """Return log.csv of a folder of pre-training: a row a step; the validation loss stands in some.

    Raises
    ------
    SchemaError
        If it is missing, empty, lacks a column or holds a step without a loss.
    """
    path = _file(encoder_dir, LOG_FILE)
    log = pd.read_csv(path)
    missing = [c for c in _LOG_COLUMNS if c not in log.columns]
    if missing or log.empty:
        what = f"columns {', '.join(missing)} are missing" if missing else "there is no step"
        raise SchemaError(f"{path}: {what}; name the folder that `phenoica pretrain` wrote")
    bad = log[["loss", "pixel_loss"]].isna().any(axis=1)
    if bad.any():
        raise SchemaError(f"{path}: step {log.loc[bad, 'step'].iloc[0]} has no loss; train again")
    return log


def _scored(embeddings_h5ad: str | os.PathLike) -> tuple[set[str], dict[str, Any]]:
    """Return the experiments of embeddings.h5ad and what it says of its encoder."""
    import anndata

    uns = pages.read_uns(embeddings_h5ad)
    adata = anndata.read_h5ad(embeddings_h5ad, backed="r")
    experiments = set(adata.obs[schema.EXPERIMENT].astype(str))
    adata.file.close()
    return experiments, uns


def curve(log: pd.DataFrame) -> dict[str, Any]:
    """Return what `figures.loss_figure` draws.

    Parameters
    ----------
    log
        As from `read_log`.

    Returns
    -------
    dict
        step, loss, pixel_loss: means over consecutive groups of `window` steps (of whole rows of the log, which may
        average over several), of which the last may be shorter;
        validation_step, validation_loss: as logged; last: the last step; fourier: whether the loss has a Fourier part;
        top: end of the axis of the loss, above everything but the first twentieth of the steps, which may start far
        off; cut: whether that leaves some of them out.
    """
    rows = max(1, len(log) // CURVE_POINTS)
    a_row = int(log["step"].iloc[0]) + 1  # steps count from 0, and a row bears its last one
    means = log[["step", "loss", "pixel_loss"]].groupby(np.arange(len(log)) // rows).mean()
    known = log[log["validation_loss"].notna()]
    late = means["loss"].iloc[len(means) // 20 :]
    top = 1.04 * max(1.05, late.max(), known["validation_loss"].max() if len(known) else 0.0)
    return {
        "window": rows * a_row,
        **{name: means[name].tolist() for name in means},
        "validation_step": known["step"].tolist(),
        "validation_loss": known["validation_loss"].tolist(),
        "last": int(log["step"].iloc[-1]),
        "fourier": bool(log["fourier_loss"].notna().any()),
        "top": float(top),
        "cut": bool(means["loss"].max() > top),
    }


def tiles(encoder_dir: str | os.PathLike, recipe: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the reconstructions of a folder of pre-training, as pictures for the page.

    Returns
    -------
    list of dict
        A tile each: rows (name; cells with src, a PNG as data URI, and alt), and errors: of each channel, the mean
        squared error over the pixels of hidden patches, in standardised units (None where no patch is hidden).

    Raises
    ------
    SchemaError
        If reconstructions.npz is missing or its arrays do not fit each other or the recipe.
    """
    path = _file(encoder_dir, PICTURES_FILE)
    with np.load(path) as stored:
        missing = [name for name in ("target", "predicted", "hidden") if name not in stored]
        if missing:
            raise SchemaError(f"{path}: arrays {', '.join(missing)} are missing; train again with `phenoica pretrain`")
        target, predicted = (stored[name].astype(np.float32) for name in ("target", "predicted"))
        hidden = stored["hidden"]
    channels, patch = recipe["channels"], recipe["encoder"]["patch_size"]
    whole = np.repeat(np.repeat(hidden, patch, axis=-2), patch, axis=-1)
    if target.shape != predicted.shape or target.shape != whole.shape or target.shape[1] != len(channels):
        raise SchemaError(
            f"{path}: target {target.shape}, predicted {predicted.shape} and hidden {hidden.shape} do not fit each "
            f"other, {len(channels)} channels and patches of {patch} px; train again with `phenoica pretrain`"
        )
    return [_tile(channels, *arrays) for arrays in zip(target, predicted, whole, strict=True)]


def _tile(channels: list[int], target: np.ndarray, predicted: np.ndarray, hidden: np.ndarray) -> dict[str, Any]:
    """Return the pictures of one tile; all arrays (C, H, W)."""
    names = ("image", "what the encoder saw", "reconstruction")
    cells: dict[str, list[dict[str, str]]] = {name: [] for name in names}
    errors = []
    for channel, true, guess, mask in zip(channels, target, predicted, hidden, strict=True):
        low, high = np.percentile(true, GREY_PERCENTILES)
        shown = np.repeat(_grey(true, low, high)[..., None], 3, axis=-1)
        shown[mask] = HIDDEN_COLOUR
        pictures = _grey(true, low, high), shown, _grey(np.where(mask, guess, true), low, high)
        for name, picture in zip(names, pictures, strict=True):
            cells[name].append({"src": _png(picture), "alt": f"channel {channel}, {name}"})
        errors.append(float(np.square(guess - true)[mask].mean()) if mask.any() else None)
    return {"rows": [{"name": name, "cells": cells[name]} for name in names], "errors": errors}


def _grey(image: np.ndarray, low: float, high: float) -> np.ndarray:
    """Return uint8 grey values; a channel without contrast is black."""
    scaled = (image - low) / (high - low) if high > low else np.zeros_like(image)
    return np.round(255 * np.clip(scaled, 0, 1)).astype(np.uint8)


def _png(picture: np.ndarray) -> str:
    import imagecodecs

    return "data:image/png;base64," + base64.b64encode(imagecodecs.png_encode(picture)).decode("ascii")
