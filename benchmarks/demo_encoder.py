"""What the demo's encoder sees: trained minus random weights, and image measures, on a finished run of demo plates.

    snakemake --cores all --configfile unseen.yaml -- scores   # config/config.yaml with another demo.seed and run
    python benchmarks/demo_encoder.py results/unseen

A second run of the same wells in another precision (embed.precision), named after the first, is compared with it: the
largest and the mean difference of AUROC over perturbations.

Pooled AUROC of the L1 probe on held-out experiments, averaged over PLK1, MTOR and the texture genes (effect_class of
the true factors); differences perturbation by perturbation and fold by fold, with the t interval over folds of the
score table. The last line is one JSON object.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pandas as pd

from phenoica.demo import layout
from phenoica.score.intervals import t_interval

POSITIVES = ("PLK1", "MTOR")


def pooled(scores: pd.DataFrame, view: str) -> pd.DataFrame:
    """Return the held-out AUROC of a view by perturbation (index) and fold (columns; -1 = over folds, by pairs)."""
    rows = scores[
        (scores["view"] == view) & (scores["metric"] == "auroc") & (scores["probe"] == "l1")
        & (scores["scope"] == "pooled") & scores["view_minus"].isna() & (scores["perturbation"] != "macro")
        & scores["contrast"].isin(["query_vs_reference", "positive_vs_reference"]) & scores["draw"].isna()
    ]  # fmt: skip
    return rows.pivot_table(index="perturbation", columns="fold", values="value")


def difference(first: pd.DataFrame, second: pd.DataFrame, names: list[str]) -> dict[str, float]:
    """Return the mean difference over perturbations, each weighing alike, with its interval over folds."""
    values = (first - second).loc[names]
    by_fold = values.drop(columns=-1).mean(axis=0).dropna()
    centre = float(values[-1].mean())
    interval = t_interval(by_fold.to_numpy(), np.ones(len(by_fold)), 0.95, bounds=(-1.0, 1.0), centre=centre)
    return {"difference": centre, "low": interval.low, "high": interval.high}


def between_runs(first: Path, second: Path) -> dict[str, float | str]:
    """Return how far the AUROCs of two runs of the same wells are apart: raw view, single perturbations."""
    tables = [pooled(pd.read_parquet(run / "score/scores.parquet"), "raw") for run in (first, second)]
    apart = (tables[0] - tables[1]).abs()[-1]
    means = [float(table[-1].mean()) for table in tables]
    return {"largest": float(apart.max()), "mean": float(apart.mean()), "macro": means[0] - means[1]}


def main() -> None:
    """Print the table and the JSON line."""
    run = Path(sys.argv[1])
    scores = pd.read_parquet(run / "score/scores.parquet")
    truth = pd.read_parquet(run / "demo/truth.parquet")
    classes = truth.groupby("perturbation")["effect_class"].first()
    views = {v: pooled(scores, v) for v in ("raw", "pca", "ica", "random_encoder", "image_measures")}
    tested = set(views["raw"].index)
    genes = classes.index[classes == layout.TEXTURE]
    texture = sorted(g for g in genes if g in tested and g not in layout.CONTROL_EFFECTS)
    names = [*POSITIVES, *texture]
    result: dict[str, object] = {"texture_genes": len(texture)}
    for view, table in views.items():
        values = table.loc[names, -1]
        cells = {"macro": values.mean(), "texture": values[texture].mean(), **values[list(POSITIVES)]}
        result[view] = {k: round(float(v), 4) for k, v in cells.items()}
        print(f"{view:<16}" + "  ".join(f"{k} {v:.3f}" for k, v in cells.items()))
    trained = difference(views["raw"], views["random_encoder"], names)
    behind = {p: float(views["image_measures"].loc[p, -1] - views["raw"].loc[p, -1]) for p in POSITIVES}
    print(
        f"trained minus random weights, macro over {len(names)}: {trained['difference']:+.3f} "
        f"[{trained['low']:+.3f}, {trained['high']:+.3f}]; behind image measures: "
        + ", ".join(f"{p} {v:+.3f}" for p, v in behind.items())
    )
    result |= {"trained_minus_random": trained, "behind_image_measures": behind}
    if len(sys.argv) > 2:
        result["between_runs"] = between_runs(run, Path(sys.argv[2]))
        print("AUROC (raw) of the two runs: " + ", ".join(f"{k} {v:.4f}" for k, v in result["between_runs"].items()))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
