"""What the demo's encoder sees: trained minus random weights, and image measures, on finished runs of demo plates.

    snakemake --cores all --configfile unseen.yaml -- scores   # config/config.yaml with another demo.seed and run
    python benchmarks/demo_encoder.py results/unseen [results/unseen-too ...] [--beside results/unseen-float32]

Pooled AUROC of the L1 probe on held-out experiments, averaged over PLK1, MTOR and the texture genes (effect_class of
the true factors); differences perturbation by perturbation and fold by fold, with the t interval over folds of the
score table. Runs of several demo seeds are independent screens: over them stands the t interval of their differences,
which needs no allowance for folds that share training data. `--beside` names a run of the first one's wells in another
precision (embed.precision): the largest and the mean difference of AUROC over perturbations. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import t

from phenoica.demo import layout
from phenoica.score.intervals import t_interval

POSITIVES = ("PLK1", "MTOR")
VIEWS = ("raw", "pca", "ica", "random_encoder", "image_measures")


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


def of_run(run: Path) -> dict[str, object]:
    """Return the AUROCs and differences of one run, printing them."""
    scores = pd.read_parquet(run / "score/scores.parquet")
    truth = pd.read_parquet(run / "demo/truth.parquet")
    present = [v for v in VIEWS if (scores["view"] == v).any()]
    views = {v: pooled(scores, v) for v in present}
    classes = truth.groupby("perturbation")["effect_class"].first()
    tested = set(views["raw"].index)
    genes = classes.index[classes == layout.TEXTURE]
    texture = sorted(g for g in genes if g in tested and g not in layout.CONTROL_EFFECTS)
    names = [*POSITIVES, *texture]
    result: dict[str, object] = {"texture_genes": len(texture)}
    print(run)
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
    return result | {"trained_minus_random": trained, "behind_image_measures": behind}


def over_runs(results: list[dict[str, object]]) -> dict[str, dict[str, float]]:
    """Return mean and 95 % t interval, over independent runs, of each difference."""
    columns = {
        "trained_minus_random": [r["trained_minus_random"]["difference"] for r in results],
        **{f"{p} behind image measures": [r["behind_image_measures"][p] for r in results] for p in POSITIVES},
    }
    found = {}
    for name, values in columns.items():
        half = t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values))
        found[name] = {"mean": float(np.mean(values)), "low": np.mean(values) - half, "high": np.mean(values) + half}
        print(f"over {len(values)} seeds, {name}: {np.mean(values):+.3f} [{found[name]['low']:+.3f}, "
              f"{found[name]['high']:+.3f}]")  # fmt: skip
    return found


def main() -> None:
    """Print the tables and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="results folders, one a demo seed")
    parser.add_argument("--beside", type=Path, help="the first run's wells in another precision")
    arguments = parser.parse_args()
    result: dict[str, object] = {run.name: of_run(run) for run in arguments.runs}
    if len(arguments.runs) > 1:
        result["over_runs"] = over_runs(list(result.values()))
    if arguments.beside:
        result["between_runs"] = between_runs(arguments.runs[0], arguments.beside)
        print("AUROC (raw) of the two runs: " + ", ".join(f"{k} {v:.4f}" for k, v in result["between_runs"].items()))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
