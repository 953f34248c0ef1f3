"""Fit the views of one fold, and assemble the AnnData of the exploration fit.

`fit_fold` reads embeddings, quality flags and folds, keeps the wells of training experiments and nothing
else before any step is fitted, and writes one folder of state a view with the component table. `assemble`
puts all wells into the exploration fit and writes `disentangled.h5ad`.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from phenoica import __version__, schema
from phenoica.config import fingerprint
from phenoica.disentangle.components import effects_table
from phenoica.disentangle.concentration import concentration, sentences
from phenoica.disentangle.fitting import (
    ROTATION,
    components_of,
    fit_views,
    reference_tests,
    reproducibility_of,
    sweep,
    width_of,
    with_reproducibility,
)
from phenoica.disentangle.permutation import ReferenceTests
from phenoica.disentangle.views import Ica, View, load_view
from phenoica.errors import FitError, SchemaError
from phenoica.files import atomic_dir, write_h5ad, write_json, write_parquet

if TYPE_CHECKING:
    import anndata

COMPONENTS_FILE = "components.parquet"
CONCENTRATION_FILE = "concentration.parquet"
EFFECTS_FILE = "effects.parquet"
FIT_FILE = "fit.json"
WIDTHS_FILE = "widths.parquet"
REPRODUCIBILITY_FILE = "reproducibility.parquet"

PCA, ICA = "pca", "ica"  # keys of the views whose components have loadings in varm
# what `describe_components` sets
DESCRIBED_OBSM = (schema.X_BIOLOGY, schema.X_BATCH)
DESCRIBED_UNS = (
    schema.UNS_BIOLOGY_NAMES, schema.UNS_BATCH_NAMES, schema.UNS_COMPONENTS, schema.UNS_ICA, schema.UNS_REPRODUCIBILITY,
)  # fmt: skip


def join_qc(obs: pd.DataFrame, qc_wells: str | os.PathLike) -> pd.DataFrame:
    """Return obs with the columns of `qc/wells.parquet`, joined on the well id.

    Raises
    ------
    SchemaError
        If a well has no row there, or the table lacks a column.
    """
    qc = pd.read_parquet(qc_wells)
    missing = [c for c in (schema.WELL_ID, *schema.QC_COLUMNS) if c not in qc.columns]
    if missing:
        raise SchemaError(f"{qc_wells}: columns {', '.join(missing)} are missing; make the table with `phenoica qc`")
    qc = qc.set_index(schema.WELL_ID)
    if qc.index.has_duplicates:
        raise SchemaError(f"{qc_wells}: well {qc.index[qc.index.duplicated()][0]} stands more than once")
    absent = obs.index.difference(qc.index)
    if len(absent):
        raise SchemaError(f"{qc_wells}: {len(absent)} wells have no row, first {absent[0]}; run `phenoica qc` again")
    joined = obs.drop(columns=[c for c in schema.QC_COLUMNS if c in obs.columns])
    for name in schema.QC_COLUMNS:
        joined[name] = qc[name].reindex(obs.index).to_numpy()
    joined[schema.QC_PASS] = joined[schema.QC_PASS].astype(bool)
    return joined


def training_experiments(folds_csv: str | os.PathLike, fold: int | None) -> list[str]:
    """Return the experiments a fold trains on, sorted; None = every experiment that is in a fold.

    Raises
    ------
    SchemaError
        If the table lacks a column or has no experiment.
    FitError
        If the fold does not exist or leaves no experiment to train on.
    """
    folds = pd.read_csv(folds_csv, dtype={schema.EXPERIMENT: str}, keep_default_na=False)
    missing = [c for c in (schema.EXPERIMENT, schema.FOLD) if c not in folds.columns]
    if missing or folds.empty:
        raise SchemaError(
            f"{folds_csv}: needs columns experiment and fold with a row an experiment; run `phenoica plates`"
        )
    number = folds[schema.FOLD].astype(int)
    if fold is None:
        return sorted(folds[schema.EXPERIMENT])
    if fold not in set(number):
        raise FitError(f"{folds_csv}: there is no fold {fold}; folds are {sorted(set(number))}")
    training = sorted(folds.loc[number != fold, schema.EXPERIMENT])
    if not training:
        raise FitError(f"{folds_csv}: fold {fold} holds every experiment; at least two folds are needed (plates.folds)")
    return training


def fit_fold(
    embeddings_h5ad: str | os.PathLike,
    qc_wells: str | os.PathLike,
    folds_csv: str | os.PathLike,
    fold: int | None,
    out_dir: str | os.PathLike,
    config: Mapping[str, Any],
) -> None:
    """Fit all views on the training experiments of a fold and write their states.

    Only rows of training experiments enter; with `qc.exclude_flagged` wells that did not pass are left out
    as well. `out_dir` is replaced as a whole by: a folder a view (`raw`, `pca`, `ica`, `rotation_00`, ...:
    state.npz and view.json), `components.parquet` (see `components_of`), `concentration.parquet` (see
    `phenoica.disentangle.concentration`), `fit.json` and, where they apply, `effects.parquet` (of ica: see
    `effects_table`), `reproducibility.parquet` (of ica: see `Reproducibility.table`) and `widths.parquet` (of the
    exploration fit where `disentangle.sweep` names widths: see `sweep`). The same training rows give the same bytes.

    Parameters
    ----------
    embeddings_h5ad, qc_wells, folds_csv
        Written by the stages embed, qc and plates.
    fold
        The held-out fold, or None for the exploration fit on all experiments that are in a fold.
    out_dir
        Folder to write.
    config
        A complete configuration.

    Raises
    ------
    SchemaError, FitError, ControlsError
        Naming what the data lack.
    """
    import anndata

    experiments = training_experiments(folds_csv, fold)
    adata = anndata.read_h5ad(embeddings_h5ad)
    train = adata[adata.obs[schema.EXPERIMENT].astype(str).isin(experiments).to_numpy()].copy()
    absent = sorted(set(experiments) - set(train.obs[schema.EXPERIMENT].astype(str)))
    if absent:
        # assemble has checked that a well is embedded or quarantined, so these are quarantined whole
        warnings.warn(f"experiments {', '.join(absent)} have no embedded well (quarantine.csv); left out", stacklevel=2)
        experiments = [e for e in experiments if e not in absent]
    if not experiments:
        raise SchemaError(f"{embeddings_h5ad}: none of the training experiments of {folds_csv} has a well")
    schema.check(train)
    obs = join_qc(train.obs, qc_wells)
    keep = obs[schema.QC_PASS].to_numpy() if config["qc"]["exclude_flagged"] else np.ones(len(obs), dtype=bool)
    X, obs = train.X[keep], obs[keep]
    if not len(X):
        raise FitError(f"fold {fold}: no training well passed qc; set qc.exclude_flagged to false or widen its limits")

    views = fit_views(X, obs, config)
    found = reproducibility_of(views, X, obs, config)
    tests = reference_tests(obs, config)
    table = with_reproducibility(components_of(views, X, obs, config, tests), found)
    widths = sweep(X, obs, config) if fold is None and config["disentangle"]["sweep"] else None
    record = _fit_record(views, obs, fold, experiments, int((~keep).sum()), config, tests)
    record["features"] = [str(name) for name in train.var_names]
    record["reproducibility"] = None if found is None else found.record()
    record["warnings"] += [] if found is None else list(found.said)
    record["concentration"] = sentences(table)
    with atomic_dir(out_dir) as folder:
        for key, fitted in views.items():
            fitted.save(folder / key)
        write_parquet(folder / COMPONENTS_FILE, table)
        write_parquet(folder / CONCENTRATION_FILE, concentration(table))
        if "ica" in views:
            effects = effects_table(views["ica"].transform(X, obs, dtype=np.float64), obs, view="ica")
            write_parquet(folder / EFFECTS_FILE, effects)
        if found is not None:
            write_parquet(folder / REPRODUCIBILITY_FILE, found.table)
        if widths is not None:
            write_parquet(folder / WIDTHS_FILE, widths)
        write_json(folder / FIT_FILE, record)
    for sentence in [*record["concentration"], *([] if found is None else [found.sentence()])]:
        print(sentence, file=sys.stderr)


def _fit_record(
    views: Mapping[str, View], obs: pd.DataFrame, fold: int | None, experiments: list[str], n_excluded: int,
    config: Mapping[str, Any], tests: ReferenceTests,
) -> dict[str, Any]:  # fmt: skip
    first = next(iter(views.values()))
    said = list(dict.fromkeys(message for fitted in views.values() for message in fitted.warnings_))
    batch_key = config["plates"]["batch_key"]
    if obs[batch_key].nunique() < 2:
        said.append(f"components: one {batch_key} in training, so batch omega2 cannot be measured and is given as 0")
    ica = views.get("ica")
    return {
        "fold": fold,
        "training_experiments": experiments,
        "n_wells": len(obs),
        "n_excluded": n_excluded,
        "n_features": first.n_features_in_,
        "n_components": width_of(views, config),
        "n_components_asked": config["disentangle"]["n_components"],
        "batch_key": batch_key,
        "exclude_flagged": config["qc"]["exclude_flagged"],
        "seed": config["seed"],
        "rotation_draws": sum(fitted.name == ROTATION for fitted in views.values()),
        "views": {key: {"name": v.name, "n_components": v.n_components_, "test_data_used": v.test_data_used}
                  for key, v in views.items()},
        "ica": ica_record(ica) if isinstance(ica, Ica) else None,
        "label_tests": tests.record(),
        "effect_replicates": "wells",
        "warnings": said,
    }  # fmt: skip


def ica_record(ica: Ica) -> dict[str, Any]:
    """Return how an ica view was fitted: converged, n_iter, gradient, tolerance, seeds, n_wells."""
    return {
        "converged": ica.converged_,
        "n_iter": ica.n_iter_,
        "gradient": ica.gradient_,
        "tolerance": ica.tolerance,
        "seeds": [ica.seed],
        "n_wells": ica.n_wells_,
    }


def load_fit(fold_dir: str | os.PathLike) -> tuple[dict[str, View], dict[str, Any]]:
    """Return the views of a folder that `fit_fold` wrote, keyed and ordered as by `fit_views`, and fit.json.

    Raises
    ------
    SchemaError
        If the folder was not written by `fit_fold`.
    """
    path = Path(fold_dir) / FIT_FILE
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        keys = list(record["views"])
    except (OSError, KeyError, json.JSONDecodeError) as error:
        raise SchemaError(f"{path}: not a fitted fold ({error}); run `phenoica disentangle` again") from error
    return {key: load_view(Path(fold_dir) / key) for key in keys}, record


def hide_flagged_controls(obs: pd.DataFrame) -> pd.DataFrame:
    """Return obs in which wells that did not pass qc are no fit or reference controls.

    With `qc.exclude_flagged` a flagged control of a new batch must not centre it either, though the well
    itself is still transformed.
    """
    role = obs[schema.CONTROL_ROLE].astype(str).where(obs[schema.QC_PASS].astype(bool), schema.NONE)
    return obs.assign(**{schema.CONTROL_ROLE: role})


def assemble(
    embeddings_h5ad: str | os.PathLike,
    qc_wells: str | os.PathLike,
    exploration_dir: str | os.PathLike,
    out_h5ad: str | os.PathLike,
    config: Mapping[str, Any],
) -> None:
    """Write `disentangled.h5ad`: all wells in the views of the exploration fit.

    Slots beside those of embeddings.h5ad: obs `qc_acquisition`, `qc_phenotype`, `qc_pass`; obsm float32
    `X_pca`, `X_varimax`, `X_ica`, `X_tvn`, `X_pca_cs`, `X_mad`, `X_spherize`, `X_centerscale_ica` and other chains
    (those that were fitted), `X_biology` and `X_batch` (the ica
    columns of that label, (n, 0) if none); varm float64 `PCs`, `ICs` (d, k), so that X_pca = (X - mean of
    the fit wells) @ PCs; uns `phenoica` with `fit_experiments`, `components` (a row an ica component), `ica`
    (converged, n_iter, gradient, seeds, ...), `X_biology_names` and `X_batch_names`, `concentration` (sentences)
    and `reproducibility` (see `Reproducibility.record`).

    Parameters
    ----------
    embeddings_h5ad, qc_wells
        Written by embed and qc.
    exploration_dir
        Written by `fit_fold` with fold None.
    out_h5ad
        File to write.
    config
        A complete configuration.

    Raises
    ------
    SchemaError
        If an input or the result does not follow the schema.
    ControlsError
        If an experiment outside the fit lacks fit controls and `disentangle.missing_controls` is "error".
    """
    import anndata

    adata = anndata.read_h5ad(embeddings_h5ad)
    schema.check(adata)
    views, record = load_fit(exploration_dir)
    adata.obs = join_qc(adata.obs, qc_wells)
    obs = hide_flagged_controls(adata.obs) if config["qc"]["exclude_flagged"] else adata.obs
    for name, fitted in views.items():
        if name in schema.VIEW_KEYS or "+" in name:
            adata.obsm[schema.view_key(name)] = fitted.transform(adata.X, obs)
    for name, key in ((PCA, schema.VARM_PCS), (ICA, schema.VARM_ICS)):
        if name in views:
            adata.varm[key] = views[name].components_
    if ICA in views:
        describe_components(adata, load_components(exploration_dir, record), record)
    adata.uns[schema.UNS_CONCENTRATION] = np.array(record["concentration"], dtype=object)
    adata.uns[schema.UNS] = {
        **adata.uns[schema.UNS],
        "version": __version__,
        "config_fingerprint": fingerprint(
            config, "source", "demo", "plates", "profiles", "embed", "licences", "qc", "disentangle"
        ),
        "fit_experiments": np.array(record["training_experiments"], object),
    }
    schema.check(adata)
    write_h5ad(out_h5ad, adata)


def load_components(fold_dir: str | os.PathLike, record: Mapping[str, Any]) -> pd.DataFrame:
    """Return what a fit knows of its ica components: their rows of `components.parquet`.

    Parameters
    ----------
    fold_dir
        Written by `fit_fold`, with ica among its views.
    record
        Its fit.json.

    Returns
    -------
    DataFrame
        A row an ica component, in order; see `component_table` and `with_reproducibility` for the columns.

    Raises
    ------
    SchemaError
        If the table is missing or damaged, or is not one of this fit: without it no component has a label.
    """
    path = Path(fold_dir) / COMPONENTS_FILE
    again = "so its components have no labels; run `phenoica disentangle` again"
    absent = [key for key in ("ica", "reproducibility") if key not in record]
    if absent:
        raise SchemaError(f"{Path(fold_dir) / FIT_FILE}: says nothing of {', '.join(absent)}, {again}")
    try:
        table = pd.read_parquet(path)
    except (OSError, ValueError) as error:  # pyarrow's complaints about damage are ValueErrors
        raise SchemaError(f"{path}: cannot be read ({error}), {again}") from error
    missing = [name for name in ("view", "draw", "component", "label") if name not in table.columns]
    if missing:
        raise SchemaError(f"{path}: columns {', '.join(missing)} are missing, {again}")
    table = table[table["view"] == ICA]
    expected = schema.component_names(record["views"][ICA]["n_components"])
    if list(table["component"]) != expected:
        raise SchemaError(f"{path}: does not list {expected[0]} to {expected[-1]} of this fit, {again}")
    unknown = sorted(set(table["label"].astype(str)) - set(schema.COMPONENT_LABELS))
    if unknown:
        raise SchemaError(f"{path}: unknown labels {unknown[:5]}, {again}")
    return table


def describe_components(adata: anndata.AnnData, table: pd.DataFrame, record: Mapping[str, Any]) -> None:
    """Set `DESCRIBED_OBSM` and `DESCRIBED_UNS`: what is known of the ica components, from the fit alone.

    Parameters
    ----------
    adata
        obsm has `X_ica` (n, k). It gets float32 obsm `X_biology` and `X_batch`, the columns of `X_ica` with that label
        in order, (n, 0) if none; uns `X_biology_names` and `X_batch_names`, `components` (a frame with a row a
        component), `ica` (converged, n_iter, gradient, seeds, ...) and, where it was measured, `reproducibility`.
    table
        As from `load_components`: labels and all numbers are of the wells of the fit.
    record
        fit.json.
    """
    labels = table["label"].to_numpy()
    for key, names_key, label in (
        (schema.X_BIOLOGY, schema.UNS_BIOLOGY_NAMES, schema.BIOLOGY),
        (schema.X_BATCH, schema.UNS_BATCH_NAMES, schema.BATCH),
    ):
        adata.obsm[key] = adata.obsm[schema.X_ICA][:, labels == label]
        adata.uns[names_key] = table.loc[labels == label, "component"].to_numpy(dtype=object)
    known = table.drop(columns=["view", "draw"]).set_index("component").dropna(axis=1, how="all")
    if "identifiable" in known:
        known["identifiable"] = known["identifiable"].astype(bool)
    adata.uns[schema.UNS_COMPONENTS] = known
    adata.uns[schema.UNS_ICA] = {k: np.array(v) if k == "seeds" else v for k, v in record["ica"].items()}
    if record["reproducibility"] is not None:
        measured = {k: v for k, v in record["reproducibility"].items() if v is not None}
        adata.uns[schema.UNS_REPRODUCIBILITY] = measured
