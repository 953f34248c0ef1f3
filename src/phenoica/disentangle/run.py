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
from phenoica.disentangle.components import component_table, effects_table
from phenoica.disentangle.concentration import concentration, sentences
from phenoica.disentangle.permutation import ReferenceTests
from phenoica.disentangle.views import Ica, Pca, View, load_view, view
from phenoica.errors import ConfigError, FitError, SchemaError
from phenoica.files import atomic_dir, write_h5ad, write_json, write_parquet
from phenoica.progress import track

if TYPE_CHECKING:
    import anndata

COMPONENTS_FILE = "components.parquet"
CONCENTRATION_FILE = "concentration.parquet"
EFFECTS_FILE = "effects.parquet"
FIT_FILE = "fit.json"
ROTATION = "rotation"


def view_options(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `phenoica.disentangle.view(name)` that a configuration asks for.

    Parameters
    ----------
    name
        A single view, or a chain: the options of all its parts.
    config
        A complete configuration, see `phenoica.config.resolve`.
    """
    section = config["disentangle"]
    width = {"n_components": section["n_components"]}
    batch = {
        "batch_key": config["plates"]["batch_key"],
        "min_fit_controls": section["min_fit_controls"],
        "missing_controls": section["missing_controls"],
    }
    known: dict[str, dict[str, Any]] = {
        "raw": {},
        "centerscale": batch,
        "pca": width,
        "rotation": {**width, "seed": config["seed"]},
        "ica": {
            **width,
            "seed": config["seed"],
            "max_iter": section["ica_max_iter"],
            "tolerance": float(section["ica_tolerance"]),
        },
        "tvn": {**width, **batch},
        "pca_cs": {**width, **batch},
    }
    options: dict[str, Any] = {}
    for part in name.split("+"):
        if part.strip() not in known:
            raise ConfigError(f"disentangle.views: unknown view {part.strip()!r}; known: {', '.join(known)}")
        options.update(known[part.strip()])
    return options


def fit_views(X: np.ndarray, obs: pd.DataFrame, config: Mapping[str, Any]) -> dict[str, View]:
    """Fit the views of `disentangle.views` to training wells.

    Parameters
    ----------
    X
        (n, d) embeddings of training wells and of no others.
    obs
        Their metadata, aligned by position.
    config
        A complete configuration.

    Returns
    -------
    dict
        Fitted views by key, in the order of the configuration. The key is the name of the view; random
        rotations are rotation_00, rotation_01, ... (`disentangle.rotation_draws` of them). rotation and ica
        are composed onto the one pca fit, also where pca itself is not asked for.

    Raises
    ------
    FitError, ControlsError, SchemaError
        If the data do not allow a view.
    """
    names = config["disentangle"]["views"]
    pca = None
    if {"pca", "ica", ROTATION} & set(names):
        pca = Pca(n_components=config["disentangle"]["n_components"]).fit(X, obs)
    fitted: dict[str, View] = {}
    for name in track(names, len(names), "fit", "view"):
        options = view_options(name, config)
        if name == "pca":
            fitted[name] = pca
        elif name == ROTATION:
            for draw in range(config["disentangle"]["rotation_draws"]):
                fitted[f"{ROTATION}_{draw:02d}"] = view(name, draw=draw, pca=pca, **options).fit(X, obs)
        else:
            if name == "ica":
                options["pca"] = pca
            fitted[name] = view(name, **options).fit(X, obs)
    return fitted


def components_of(
    views: Mapping[str, View], X: np.ndarray, obs: pd.DataFrame, config: Mapping[str, Any],
    tests: ReferenceTests | None = None,
) -> pd.DataFrame:  # fmt: skip
    """Return the component tables of all views on training wells, one below the other.

    See `phenoica.disentangle.components.component_table` for the columns; rotations share the view name
    `rotation` and differ in `draw`. All views share `tests`, which None makes (`reference_tests`).
    """
    tests = reference_tests(obs, config) if tests is None else tests
    tables = [
        component_table(
            fitted.transform(X, obs, dtype=np.float64), obs,
            view=fitted.name, draw=getattr(fitted, "draw", None),
            alpha=config["disentangle"]["label_alpha"], min_omega2=config["disentangle"]["label_min_omega2"],
            tests=tests,
        )
        for fitted in views.values()
    ]  # fmt: skip
    return pd.concat(tables, ignore_index=True)


def reference_tests(obs: pd.DataFrame, config: Mapping[str, Any]) -> ReferenceTests:
    """Return the permutation tests of batch and position on training wells that a configuration asks for."""
    return ReferenceTests(
        obs, batch_key=config["plates"]["batch_key"],
        permutations=config["disentangle"]["label_permutations"], seed=config["seed"],
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
    `phenoica.disentangle.concentration`), `effects.parquet` (of ica, where it was fitted: see `effects_table`) and
    `fit.json`. The same training rows give the same bytes.

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
    X, obs = np.asarray(train.X[keep], dtype=np.float64), obs[keep]
    if not len(X):
        raise FitError(f"fold {fold}: no training well passed qc; set qc.exclude_flagged to false or widen its limits")

    views = fit_views(X, obs, config)
    tests = reference_tests(obs, config)
    table = components_of(views, X, obs, config, tests)
    record = _fit_record(views, obs, fold, experiments, int((~keep).sum()), config, tests)
    record["concentration"] = sentences(table)
    with atomic_dir(out_dir) as folder:
        for key, fitted in views.items():
            fitted.save(folder / key)
        write_parquet(folder / COMPONENTS_FILE, table)
        write_parquet(folder / CONCENTRATION_FILE, concentration(table))
        if "ica" in views:
            effects = effects_table(views["ica"].transform(X, obs, dtype=np.float64), obs, view="ica")
            write_parquet(folder / EFFECTS_FILE, effects)
        write_json(folder / FIT_FILE, record)
    for sentence in record["concentration"]:
        print(sentence, file=sys.stderr)


def _fit_record(
    views: Mapping[str, View], obs: pd.DataFrame, fold: int | None, experiments: list[str], n_excluded: int,
    config: Mapping[str, Any], tests: ReferenceTests,
) -> dict[str, Any]:  # fmt: skip
    first = next(iter(views.values()))
    said = [message for fitted in views.values() for message in fitted.warnings_]
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
        "n_components": config["disentangle"]["n_components"],
        "batch_key": batch_key,
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
    `X_pca`, `X_ica`, `X_tvn`, `X_pca_cs` (those that were fitted), `X_biology` and `X_batch` (the ica
    columns of that label, (n, 0) if none); varm float64 `PCs`, `ICs` (d, k), so that X_pca = (X - mean of
    the fit wells) @ PCs; uns `phenoica` with `fit_experiments`, `components` (a row an ica component), `ica`
    (converged, n_iter, gradient, seeds, ...), `X_biology_names` and `X_batch_names`, and `concentration` (sentences).

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
    for name, key in schema.VIEW_KEYS.items():
        if name in views:
            adata.obsm[key] = views[name].transform(adata.X, obs)
    if "pca" in views:
        adata.varm[schema.VARM_PCS] = views["pca"].components_
    if "ica" in views:
        table = pd.read_parquet(Path(exploration_dir) / COMPONENTS_FILE)
        _add_components(adata, views["ica"], table[table["view"] == "ica"], record)
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


def _add_components(adata: anndata.AnnData, ica: View, table: pd.DataFrame, record: Mapping[str, Any]) -> None:
    """Set what `disentangled.h5ad` says of the ica components."""
    adata.varm[schema.VARM_ICS] = ica.components_
    labels = table["label"].to_numpy()
    for key, names_key, label in (
        (schema.X_BIOLOGY, schema.UNS_BIOLOGY_NAMES, schema.BIOLOGY),
        (schema.X_BATCH, schema.UNS_BATCH_NAMES, schema.BATCH),
    ):
        adata.obsm[key] = adata.obsm[schema.X_ICA][:, labels == label]
        adata.uns[names_key] = table.loc[labels == label, "component"].to_numpy(dtype=object)
    adata.uns[schema.UNS_COMPONENTS] = table.drop(columns=["view", "draw"]).set_index("component")
    adata.uns[schema.UNS_ICA] = {k: np.array(v) if k == "seeds" else v for k, v in record["ica"].items()}
