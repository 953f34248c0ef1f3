"""Which recipe for the demo's encoder: one change at a time, the same steps for all, several seeds.

    python benchmarks/pretrain_recipe.py --steps 3000 --seeds 0 1 2 --work scratch

Trains on the rendered images of `pretrain.demo_seeds` of config/config.yaml and scores on demo plates of another seed,
which neither a training image nor the demo's own seed shares: the AUROC, within held-out experiments, of a linear
discriminant on the raw embedding (odd experiments train, even ones test, and the reverse), averaged over PLK1, MTOR
and the texture genes; the embedding holds the means of the channels side by side, as in the demo, and their mean is
scored beside it. One JSON line a run goes to results.jsonl below --work, which a second call takes up, and so do two
calls side by side with different --seeds or --settings. The last line printed is one JSON object: setting -> mean and
standard deviation over seeds, and the same for the random weights that each setting starts from (layer scale 1).

Rank settings at the length that is meant: over 1,200 steps layer scale 1 was ahead of 0.3 in all three seeds, yet
after 15,000 steps it was behind what 0.3 had reached after 9,000 (one seed each), in loss and in AUROC. The table of a
whole comparison stands in src/phenoica/demo/encoder/README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import yaml
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.metrics import roc_auc_score

from phenoica import schema
from phenoica.config import resolve
from phenoica.demo import layout
from phenoica.demo.plates import (
    image_keys,
    pretraining_experiments,
    pretraining_shard,
    write_demo,
    write_pretraining,
)
from phenoica.embed.training import RECIPE_KEYS
from phenoica.openphenom.decoder import DecoderConfig
from phenoica.openphenom.encoder import OpenPhenom, OpenPhenomConfig
from phenoica.openphenom.pretrain import Recipe, pretrain
from phenoica.openphenom.tiling import tiles
from phenoica.openphenom.training_images import TrainingImages
from phenoica.plates.images import decode_image
from phenoica.plates.shards import open_shard, read_images

CONFIG = Path(__file__).parents[1] / "config/config.yaml"
SELECTION_SEED = 4711
POSITIVES = ("PLK1", "MTOR")
# name -> changes of the encoder and of the recipe
SETTINGS: dict[str, tuple[dict[str, float], dict[str, float]]] = {
    "base": ({}, {}),
    "patch 8": ({"patch_size": 8}, {}),
    "learning rate / 3": ({}, {"learning_rate": 1e-3}),
    "layer scale 1": ({"layer_scale": 1.0}, {}),
    "layer scale .1": ({"layer_scale": 0.1}, {}),
    "depth 2": ({"depth": 2}, {}),
    "depth 6": ({"depth": 6}, {}),
    "fourier weight .01": ({}, {"fourier_weight": 0.01}),
}


class Selection:
    """The wells that recipes are compared on: controls, PLK1, MTOR and texture genes of demo plates."""

    def __init__(self, folder: Path):
        truth = pd.read_parquet(folder / "truth.parquet")
        classes = truth.groupby(schema.PERTURBATION)[layout.EFFECT_CLASS].first()
        n_experiments = truth.groupby(schema.PERTURBATION)[schema.EXPERIMENT].nunique()
        texture = classes.index[(classes == layout.TEXTURE) & (n_experiments > 1)]
        self.texture = [g for g in texture if g not in layout.CONTROL_EFFECTS]
        keep = truth[schema.PERTURBATION].isin([*self.texture, *POSITIVES, layout.NEGATIVE_LABEL])
        self.wells = truth[keep].reset_index(drop=True)
        self.images = _images(folder, self.wells)

    def score(self, model: OpenPhenom) -> dict[str, float]:
        """Return the AUROC of PLK1 and MTOR, its mean over texture genes, the mean over all, and that of the pooled."""
        size, parts = model.config.image_size, []
        for start in range(0, len(self.images), 32):
            cut = tiles(self.images[start : start + 32], size)
            flat = np.ascontiguousarray(cut.reshape(-1, *cut.shape[2:]))
            parts.append(model.embed(flat, channelwise=True, batch_tiles=64).reshape(*cut.shape[:2], -1).mean(1))
        Z = torch.cat(parts).numpy().astype(np.float64)
        pooled = Z.reshape(len(Z), self.images.shape[1], -1).mean(1)
        genes = (*POSITIVES, *self.texture)
        values = {gene: self._auroc(Z, gene) for gene in genes}
        return {
            **{gene: values[gene] for gene in POSITIVES},
            "texture": float(np.mean([values[gene] for gene in self.texture])),
            "macro": float(np.mean(list(values.values()))),
            "macro_pooled": float(np.mean([self._auroc(pooled, gene) for gene in genes])),
        }

    def _auroc(self, Z: np.ndarray, gene: str) -> float:
        case = (self.wells[schema.PERTURBATION] == gene).to_numpy()
        reference = (self.wells[schema.PERTURBATION] == layout.NEGATIVE_LABEL).to_numpy()
        number = self.wells[layout.EXPERIMENT_NUMBER].to_numpy()
        values, weights = [], []
        for side in (0, 1):
            train = (number % 2 != side) & (case | reference)
            scaled = (Z - Z[train].mean(0)) / Z[train].std(0)
            probe = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=0.3, priors=[0.5, 0.5])
            decision = scaled @ probe.fit(scaled[train], case[train]).coef_[0]
            for experiment in np.unique(number[(number % 2 == side) & case]):
                test = (number == experiment) & (case | reference)
                values.append(roc_auc_score(case[test], decision[test]))
                weights.append(case[test].sum())
        return float(np.average(values, weights=weights))


def _images(folder: Path, wells: pd.DataFrame) -> np.ndarray:
    found = {}
    for path in sorted((folder / "shards").glob("*.parquet")):
        shard = open_shard(path)
        for group in range(shard.num_row_groups):
            rows = list(range(shard.metadata.row_group(group).num_rows))
            found |= dict(read_images(shard, group, rows))
    names = zip(wells[schema.EXPERIMENT], wells[schema.PLATE], wells[schema.ADDRESS], strict=True)
    return np.stack([np.stack([decode_image(found[key]) for key in image_keys(*name)]) for name in names])


def run(name: str, seed: int, steps: int, config: dict, work: Path, selection: Selection) -> dict[str, object]:
    """Train one setting with one seed and score it beside random weights."""
    of_encoder, of_recipe = SETTINGS[name]
    section = config["pretrain"]
    encoder = OpenPhenomConfig(**{**config["embed"]["model"], **of_encoder})
    values = {key: section[key] for key in RECIPE_KEYS} | {"steps": steps, "seed": seed} | of_recipe
    shards = [pretraining_shard(work / "images", s) for s in section["demo_seeds"]]
    images = TrainingImages(
        shards, pretraining_experiments(section["demo_seeds"]), config["plates"]["channels"],
        tile=encoder.image_size, seed=seed,
    )  # fmt: skip
    out = work / f"{name.replace(' ', '-').replace('/', 'over')}-{seed}"
    decoder = DecoderConfig(**section["decoder"], channels=len(config["plates"]["channels"]))
    model = pretrain(images, encoder, decoder, Recipe(**values), out)
    untrained = OpenPhenom.random(dataclasses.replace(encoder, layer_scale=1.0), seed)
    return {
        "setting": name, "seed": seed, "steps": steps, "trained": selection.score(model),
        "random": selection.score(untrained),
    }  # fmt: skip


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--work", type=Path, required=True, help="Folder for images, encoders and results.")
    parser.add_argument("--workers", type=int, default=2, help="Processes that render.")
    options = parser.parse_args()
    config = resolve(yaml.safe_load(CONFIG.read_text()))
    torch.set_num_threads(config["pretrain"]["threads"])
    images = options.work / "images"
    missing = [s for s in config["pretrain"]["demo_seeds"] if not pretraining_shard(images, s).exists()]
    if missing:
        write_pretraining(images, seeds=missing, workers=options.workers)
    if not (options.work / "selection/truth.parquet").exists():
        write_demo(options.work / "selection", seed=SELECTION_SEED, workers=options.workers)
    selection = Selection(options.work / "selection")
    results = options.work / "results.jsonl"
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    for seed in options.seeds:
        for name in options.settings:
            if not any((r["setting"], r["seed"], r["steps"]) == (name, seed, options.steps) for r in lines):
                lines.append(run(name, seed, options.steps, config, options.work, selection))
                with results.open("a") as handle:
                    handle.write(json.dumps(lines[-1]) + "\n")
                print(json.dumps(lines[-1]), flush=True)
    table = {}
    for name in options.settings:
        wanted = [(name, seed, options.steps) for seed in options.seeds]
        chosen = [r for r in lines if (r["setting"], r["seed"], r["steps"]) in wanted]
        for kind in ("trained", "random"):
            values = {k: [r[kind][k] for r in chosen] for k in chosen[0][kind]}
            table[f"{name}, {kind}"] = {k: [float(np.mean(v)), float(np.std(v, ddof=1))] for k, v in values.items()}
            cells = "  ".join(f"{k} {m:.3f} ({s:.3f})" for k, (m, s) in table[f"{name}, {kind}"].items())
            print(f"{name:<20}{kind:<9}{cells}")
    print(json.dumps(table))


if __name__ == "__main__":
    main()
