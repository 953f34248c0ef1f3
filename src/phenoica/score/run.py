"""The score stage: one job a fold, then one that puts the folds together.

Embeddings, quality flags, folds and the fold's saved views come in; `score/fold-<k>.parquet` and `.json`, then
`score/scores.parquet`, `scores.csv` and a printable table go out. Views are loaded, never refitted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from phenoica import schema
from phenoica.disentangle.fitting import fit_views
from phenoica.disentangle.run import join_qc, load_fit
from phenoica.errors import SchemaError, ScoreError
from phenoica.files import write_csv, write_json, write_parquet, write_text
from phenoica.score import deletion, view_scores
from phenoica.score.baselines import PERMUTED, Features, absent_baselines, baseline_features
from phenoica.score.fold import FoldScorer
from phenoica.score.hits import hits
from phenoica.score.printed import printed
from phenoica.score.probe_rows import rotation_spread_rows
from phenoica.score.rows import FOLD_COLUMNS, table
from phenoica.score.summary import over_folds

if TYPE_CHECKING:
    import anndata

    from phenoica.disentangle.views import View

_PERMUTED_OF = ("ica", "pca")  # the view whose features the permuted row takes; else the first one


def score_fold(
    embeddings_h5ad: str | os.PathLike,
    qc_wells: str | os.PathLike,
    folds_csv: str | os.PathLike,
    fold_dir: str | os.PathLike,
    fold: int,
    out_parquet: str | os.PathLike,
    out_json: str | os.PathLike,
    config: Mapping[str, Any],
    truth: str | os.PathLike | pd.DataFrame | None = None,
) -> None:
    """Score one fold and write its rows and what its training side decided.

    Parameters
    ----------
    embeddings_h5ad, qc_wells, folds_csv
        Written by the stages embed, qc and plates.
    fold_dir
        `disentangle/fold-<k>/`: the views fitted on the fold's training experiments.
    fold
        The fold that is held out.
    out_parquet
        Rows with `schema.SCORE_COLUMNS` plus `pairs` (int) and `variance` (of an AUROC within plates, null elsewhere).
    out_json
        What no held-out well has touched (of combat and harmony, which correct all wells together, it is what training
        labels decided): fold, training_experiments, test_experiments, absent_baselines (baseline ->
        why it has no row), fraction_rule (everywhere,
        widespread, default), fraction_perturbations, fractions (view -> fraction, sparse_fraction, rule, path),
        probes (view -> contrast/perturbation -> lambda, lambda_max, non_zero, converged, path of fraction and
        non_zero), ranking (view -> biology,
        batch: component indices from most to least, empty where all are 0 or cannot be measured), permuted_view,
        encoder (checkpoint and encoder_saw_test_images of the AnnData), fit (a copy of the fit's warnings).
    config
        A complete configuration.
    truth
        Table of true factors (path or frame with well_id, true_cell_count); None takes `config["truth"]`.

    Raises
    ------
    SchemaError
        If a file lacks a column, or the views were fitted on other experiments than the fold trains on.
    ScoreError
        If nothing can be scored.
    """
    wells, views, record = _fold_inputs(embeddings_h5ad, qc_wells, folds_csv, fold_dir, fold, config)
    rows, decided = wells.score(fold, views, _read_truth(truth if truth is not None else config["truth"]))
    decided["fit"] = {"warnings": record.get("warnings", [])}
    write_parquet(out_parquet, rows)
    write_json(out_json, decided)


def _fold_inputs(
    embeddings_h5ad: str | os.PathLike, qc_wells: str | os.PathLike, folds_csv: str | os.PathLike,
    fold_dir: str | os.PathLike, fold: int, config: Mapping[str, Any],
) -> tuple[_Wells, dict[str, View], dict[str, Any]]:  # fmt: skip
    """Return the wells of a run, the fold's views and the record of their fit."""
    import anndata

    adata = anndata.read_h5ad(embeddings_h5ad)
    schema.check(adata)
    adata.obs = join_qc(adata.obs, qc_wells)
    views, record = load_fit(fold_dir)
    wells = _Wells(adata, _read_folds(folds_csv), config)
    training = sorted(set(wells.experiments[wells.folds != fold]))
    foreign = sorted(set(record["training_experiments"]) - set(training))
    if foreign:
        raise SchemaError(
            f"{fold_dir}: its views were fitted on {', '.join(foreign[:5])}, which fold {fold} does not train on; "
            "run `phenoica disentangle` for this fold again"
        )
    return wells, views, record


def score_views(
    embeddings_h5ad: str | os.PathLike,
    qc_wells: str | os.PathLike,
    folds_csv: str | os.PathLike,
    fold_dir: str | os.PathLike,
    fold: int,
    out_parquet: str | os.PathLike,
    out_deletion: str | os.PathLike,
    out_json: str | os.PathLike,
    config: Mapping[str, Any],
) -> None:
    """Score the views of one fold as wholes: replicates, decodability, best components, deletion curve.

    Parameters
    ----------
    embeddings_h5ad, qc_wells, folds_csv, fold_dir, fold
        As for `score_fold`.
    out_parquet
        Rows with `schema.SCORE_COLUMNS`.
    out_deletion
        Points and areas of the deletion curve, `deletion.COLUMNS`.
    out_json
        What no held-out well has touched: fold, best_components (view -> contrast/perturbation -> component indices,
        most telling first), deletion (order: view -> component indices, most batch-bound first; contrasts: those the
        curve averages).
    config
        A complete configuration.

    Raises
    ------
    SchemaError, ScoreError
        As `score_fold`.
    """
    wells, views, _ = _fold_inputs(embeddings_h5ad, qc_wells, folds_csv, fold_dir, fold, config)
    rows, points, decided = wells.score_views(fold, views)
    write_parquet(out_parquet, rows)
    write_parquet(out_deletion, points)
    write_json(out_json, decided)


def summarise(
    fold_parquets: Sequence[str | os.PathLike],
    fold_jsons: Sequence[str | os.PathLike],
    out_parquet: str | os.PathLike,
    out_csv: str | os.PathLike,
    out_txt: str | os.PathLike,
    config: Mapping[str, Any],
    *,
    view_parquets: Sequence[str | os.PathLike] = (),
    out_hits: str | os.PathLike | None = None,
) -> None:
    """Put the folds together: the tidy table of scores and a short printable one.

    Parameters
    ----------
    fold_parquets, fold_jsons
        Written by `score_fold`, one each a fold, in one order.
    out_parquet, out_csv
        The rows of all folds, then those over folds (fold -1), with exactly `schema.SCORE_COLUMNS`; see
        `summary.over_folds`.
    out_txt
        See `printed.printed`.
    config
        A complete configuration.
    view_parquets
        Written by `score_views`, one a fold; without them the table holds the probes alone.
    out_hits
        The list of hits (csv), see `hits.hits`; None writes none.

    Raises
    ------
    ScoreError
        If there is no fold, the two lists do not belong together, or a table of views is not there.
    """
    if not fold_parquets or len(fold_parquets) != len(fold_jsons):
        raise ScoreError(
            f"{len(fold_parquets)} fold tables and {len(fold_jsons)} fold records; give one of each for every fold"
        )
    rows = [table(pd.read_parquet(p).to_dict("records"), FOLD_COLUMNS) for p in fold_parquets]
    decided = [json.loads(Path(p).read_text(encoding="utf-8")) for p in fold_jsons]
    for path, frame, record in zip(fold_jsons, rows, decided, strict=True):
        if set(frame["fold"]) != {record["fold"]}:
            raise ScoreError(f"{path}: fold {record['fold']} is not that of its table; give both lists in one order")
    absent = [str(p) for p in view_parquets if not Path(p).is_file()]
    if absent:
        raise ScoreError(f"{absent[0]}: no such table; run `phenoica score-views` for every fold first")
    of_views = [table(pd.read_parquet(p).to_dict("records"), schema.SCORE_COLUMNS) for p in view_parquets]
    scores = _whole_table(over_folds(rows, decided, config), of_views, config)
    write_parquet(out_parquet, scores)
    write_csv(out_csv, scores)
    write_text(out_txt, printed(scores, decided, config))
    if out_hits is not None:
        write_csv(out_hits, hits(scores, config))


def summarise_deletion(
    fold_parquets: Sequence[str | os.PathLike], out_parquet: str | os.PathLike, config: Mapping[str, Any]
) -> None:
    """Put the deletion curves of the folds together; see `deletion.over_folds`.

    Raises
    ------
    ScoreError
        If there is no fold.
    """
    if not fold_parquets:
        raise ScoreError("no deletion curve of a fold is given; run `phenoica score-views` for every fold first")
    folds = [deletion.table(pd.read_parquet(p).to_dict("records")) for p in fold_parquets]
    write_parquet(out_parquet, deletion.over_folds(folds, config["score"]["confidence"]))


def _whole_table(probed: pd.DataFrame, of_views: Sequence[pd.DataFrame], config: Mapping[str, Any]) -> pd.DataFrame:
    """Join the rows of probes, the spread of the rotations, and the rows of whole views."""
    rows = [*probed.to_dict("records"), *rotation_spread_rows(probed)]
    if of_views:
        rows += view_scores.over_folds(of_views, config["score"]["confidence"]).to_dict("records")
    return table(rows, schema.SCORE_COLUMNS)


def score(
    adata: anndata.AnnData, config: Mapping[str, Any], truth: str | os.PathLike | pd.DataFrame | None = None
) -> pd.DataFrame:
    """Fit the views of every fold in memory and score them on its held-out experiments.

    Parameters
    ----------
    adata
        X float32 (n, d) embeddings; obs with the schema's well columns, indexed by well id. `cell_count`, `qc_pass`,
        obsm["image_measures"] and obsm["X_random_encoder"] are used where they are.
    config
        A complete configuration.
    truth
        Table of true factors; None takes `config["truth"]`.

    Returns
    -------
    DataFrame
        `schema.SCORE_COLUMNS`, as `summarise` writes it. `adata` is not changed.

    Raises
    ------
    PhenoicaError
        Naming what the data lack.
    """
    from phenoica.plates.folds import assign_folds

    schema.check_obs(adata.obs)
    X = np.asarray(adata.X, dtype=np.float64)
    if not np.isfinite(X).all():
        raise SchemaError(f"X is not finite in well {adata.obs_names[~np.isfinite(X).all(axis=1)][0]}; drop such wells")
    wells = _Wells(adata, assign_folds(adata.obs, config), config)
    truth = _read_truth(truth if truth is not None else config["truth"])
    rows, decided, of_views = [], [], []
    for fold in np.unique(wells.folds).tolist():
        train = wells.folds != fold
        if not train.any():
            raise ScoreError("all wells are in one fold; scores need at least two experiments")
        views = fit_views(wells.X[train], wells.obs[train], config)
        frame, record = wells.score(fold, views, truth)
        rows.append(frame)
        decided.append(record)
        of_views.append(wells.score_views(fold, views)[0])
    return _whole_table(over_folds(rows, decided, config), of_views, config)


class _Wells:
    """The wells that are scored: those of experiments in a fold, without flagged ones where the config says so."""

    def __init__(self, adata: anndata.AnnData, folds: pd.DataFrame, config: Mapping[str, Any]):
        self.config = config
        uns = adata.uns.get(schema.UNS, {})
        self.encoder = {k: str(uns.get(k, "not stated")) for k in ("checkpoint", "encoder_saw_test_images")}
        batch_key = config["plates"]["batch_key"]
        if batch_key not in adata.obs.columns:
            raise SchemaError(f"obs has no column {batch_key!r}, which plates.batch_key names as the batch")
        fold_of = dict(zip(folds[schema.EXPERIMENT].astype(str), folds[schema.FOLD].astype(int), strict=True))
        experiments = adata.obs[schema.EXPERIMENT].astype(str)
        keep = experiments.isin(fold_of).to_numpy()
        if config["qc"]["exclude_flagged"]:
            if schema.QC_PASS not in adata.obs.columns:
                raise SchemaError(f"qc.exclude_flagged needs the obs column {schema.QC_PASS}; run `phenoica qc`")
            keep &= adata.obs[schema.QC_PASS].astype(bool).to_numpy()
        if not keep.any():
            raise ScoreError("no well is left to score: none is in a fold and passes qc")
        self.X = np.asarray(adata.X[keep])  # views read float32 as the fit jobs do
        self.obs = _plain_text(adata.obs[keep])
        self.experiments = experiments.to_numpy()[keep]
        self.folds = np.array([fold_of[e] for e in self.experiments])
        measures = adata.obsm.get(schema.IMAGE_MEASURES)
        self.measures = None if measures is None else pd.DataFrame(measures)[keep]
        untrained = adata.obsm.get(schema.RANDOM_ENCODER)
        self.random_encoder = None if untrained is None else np.asarray(untrained, dtype=np.float64)[keep]

    def score(
        self, fold: int, views: Mapping[str, View], truth: pd.DataFrame | None
    ) -> tuple[pd.DataFrame, dict[str, Any]]:
        scorer = FoldScorer(self.obs, self.folds, fold, self.config)
        features = view_features(views, self.X, self.obs)
        keys = {f.key: f for f in features}
        base = next((keys[name] for name in _PERMUTED_OF if name in keys), features[0])
        baselines = baseline_features(self.obs, self.folds != fold, self.measures, truth, self.random_encoder)
        features += baselines
        features.append(Features(PERMUTED, base, base.test_data_used))
        rows, decided = scorer.score(features)
        decided["permuted_view"] = base.key
        decided["encoder"] = self.encoder
        decided["absent_baselines"] = absent_baselines(baselines, self.obs, self.measures)
        return rows, decided

    def score_views(self, fold: int, views: Mapping[str, View]) -> tuple[pd.DataFrame, pd.DataFrame, dict[str, Any]]:
        scorer = FoldScorer(self.obs, self.folds, fold, self.config)
        return view_scores.ViewScorer(scorer, view_features(views, self.X, self.obs)).score()


def view_features(views: Mapping[str, View], X: np.ndarray, obs: pd.DataFrame) -> list[Features]:
    """Put all wells into fitted views, in float64, each when it is read.

    Parameters
    ----------
    views
        Fitted views by key, as from `phenoica.disentangle.run.fit_views` or `load_fit`.
    X
        (n, d) embeddings.
    obs
        (n,) their metadata; batches that the fit has not seen are whole.

    Raises
    ------
    ScoreError
        If there is no view.
    """
    if not views:
        raise ScoreError("there is no view to score; name some in disentangle.views")
    return [Features(v.name, v.rows(X, obs), v.test_data_used, getattr(v, "draw", None)) for v in views.values()]


def _plain_text(obs: pd.DataFrame) -> pd.DataFrame:
    """Return obs with text instead of categories, so that comparing a column with a name is one pass."""
    obs = obs.copy()
    for name in obs.columns:
        if isinstance(obs[name].dtype, pd.CategoricalDtype):
            obs[name] = obs[name].astype(object)
    return obs


def _read_folds(path: str | os.PathLike) -> pd.DataFrame:
    folds = pd.read_csv(path, dtype={schema.EXPERIMENT: str}, keep_default_na=False)
    missing = [c for c in (schema.EXPERIMENT, schema.FOLD) if c not in folds.columns]
    if missing or folds.empty:
        raise SchemaError(f"{path}: needs columns experiment and fold with a row an experiment; run `phenoica plates`")
    return folds


def _read_truth(truth: str | os.PathLike | pd.DataFrame | None) -> pd.DataFrame | None:
    if truth is None or isinstance(truth, pd.DataFrame):
        return truth
    path = Path(truth)
    if not path.is_file():
        raise ScoreError(f"{path}: no such table of true factors; mend `truth` in the config or set it to null")
    if path.suffix == ".parquet":
        return pd.read_parquet(path)
    return pd.read_csv(path, dtype={schema.WELL_ID: str}, keep_default_na=False, na_values=[""])
