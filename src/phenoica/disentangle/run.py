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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from phenoica import __version__, schema
from phenoica.config import fingerprint
from phenoica.disentangle.base_view import AUTO
from phenoica.disentangle.batch_controls import fit_control_rows
from phenoica.disentangle.blocks import Rows
from phenoica.disentangle.components import component_table, effects_table
from phenoica.disentangle.concentration import concentration, sentences
from phenoica.disentangle.permutation import ReferenceTests
from phenoica.disentangle.reproducibility import Reproducibility, measure
from phenoica.disentangle.views import Ica, Pca, View, load_view, view
from phenoica.disentangle.width import width_table
from phenoica.errors import ConfigError, FitError, SchemaError
from phenoica.files import atomic_dir, write_h5ad, write_json, write_parquet
from phenoica.progress import track

if TYPE_CHECKING:
    import anndata

COMPONENTS_FILE = "components.parquet"
CONCENTRATION_FILE = "concentration.parquet"
EFFECTS_FILE = "effects.parquet"
FIT_FILE = "fit.json"
WIDTHS_FILE = "widths.parquet"
REPRODUCIBILITY_FILE = "reproducibility.parquet"
ROTATION = "rotation"
ROTATED = ("varimax", ROTATION, "ica")  # composed onto the one pca fit


def view_options(name: str, config: Mapping[str, Any], n_components: int | str | None = None) -> dict[str, Any]:
    """Return the options of `phenoica.disentangle.view(name)` that a configuration asks for.

    Parameters
    ----------
    name
        A single view, or a chain: the options of all its parts.
    config
        A complete configuration, see `phenoica.config.resolve`.
    n_components
        Width in place of `disentangle.n_components`, where that is auto.
    """
    section = config["disentangle"]
    width = {"n_components": section["n_components"] if n_components is None else n_components}
    seed = {"seed": config["seed"]}
    batch_key = {"batch_key": config["plates"]["batch_key"]}
    enough = {"min_fit_controls": section["min_fit_controls"]}
    batch = {**batch_key, **enough, "missing_controls": section["missing_controls"]}
    known: dict[str, dict[str, Any]] = {
        "raw": {},
        "centerscale": batch,
        "mad": {},
        "spherize": {**enough, "regularisation": float(section["spherize_regularisation"])},
        "pca": {**width, **seed},
        ROTATION: {**width, **seed},
        "varimax": {**width, **seed},
        "ica": {
            **width, **seed, "max_iter": section["ica_max_iter"], "tolerance": float(section["ica_tolerance"]),
            "solver": section["ica_solver"], "contrast": section["ica_contrast"], "device": section["ica_device"],
        },
        "tvn": {**width, **batch},
        "pca_cs": {**width, **batch},
        "combat": batch_key,
        "harmony": {**width, **seed, **batch_key},
    }  # fmt: skip
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
        Fitted views by key, in the order of the configuration. The key is the name of the view, of a chain without
        its spaces ("centerscale+ica"); random rotations are rotation_00, rotation_01, ...
        (`disentangle.rotation_draws` of them). varimax, rotation and ica are composed onto the one pca fit, also where
        pca itself is not asked for. With n_components auto that fit decides the width of all views. Comparators hold
        what they keep of the training wells and correct nothing yet.

    Raises
    ------
    FitError, ControlsError, SchemaError
        If the data do not allow a view.
    """
    names, asked = config["disentangle"]["views"], config["disentangle"]["n_components"]
    pca = None
    if asked == AUTO or {"pca", *ROTATED} & set(names):
        pca = _shared_pca(X, obs, names, config)
    fitted: dict[str, View] = {}
    for name in track(names, len(names), "fit", "view"):
        options = view_options(name, config, pca.n_components_ if asked == AUTO else None)
        if name == "pca":
            fitted[name] = pca
        elif name == ROTATION:
            for draw in range(config["disentangle"]["rotation_draws"]):
                fitted[f"{ROTATION}_{draw:02d}"] = view(name, draw=draw, pca=pca, **options).fit(X, obs)
        else:
            if name in ROTATED:
                options["pca"] = pca
            fitted[name.replace(" ", "")] = view(name, **options).fit(X, obs)
    if pca is not None and not {"pca", *ROTATED} & set(names):
        next(iter(fitted.values())).warnings_.extend(pca.warnings_)  # of the width that this fit decided
    return fitted


def _shared_pca(X: np.ndarray, obs: pd.DataFrame, names: Sequence[str], config: Mapping[str, Any]) -> Pca:
    """Fit the pca that varimax, rotation and ica share; with n_components auto it is as wide as every view can be."""
    pca = Pca(n_components=config["disentangle"]["n_components"], seed=config["seed"]).fit(X, obs)
    on_controls = {"tvn", "pca_cs"} & {part.strip() for name in names for part in name.split("+")}
    if config["disentangle"]["n_components"] != AUTO or not on_controls:
        return pca
    most = int(fit_control_rows(obs).sum()) - 1
    if not 0 < most < pca.n_components_:
        return pca
    narrow = pca.truncated(most)
    narrow.warnings_.append(
        f"n_components auto: {most} instead of {pca.n_components_}, as {' and '.join(sorted(on_controls))} have their "
        f"components from {most + 1} fit controls and views are compared at one width"
    )
    return narrow


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
            _in_training_units(fitted, fitted.transform(X, obs, dtype=np.float64)), obs,
            view=fitted.name, draw=getattr(fitted, "draw", None),
            alpha=config["disentangle"]["label_alpha"], min_omega2=config["disentangle"]["label_min_omega2"],
            tests=tests,
        )
        for fitted in views.values()
    ]  # fmt: skip
    return pd.concat(tables, ignore_index=True)


def _in_training_units(fitted: View, Z: np.ndarray) -> np.ndarray:
    """Return columns of unit variance on these training wells, as the thresholds of the component table need them."""
    if fitted.unit_variance:
        return Z
    sd = Z.std(axis=0)
    return Z / np.where(sd > 0, sd, 1.0)


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
    found = _reproducibility(views, X, obs, config)
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


def _reproducibility(
    views: Mapping[str, View], X: np.ndarray, obs: pd.DataFrame, config: Mapping[str, Any]
) -> Reproducibility | None:
    """Measure how well the ica components come back and put the most reproducible ones first."""
    section, ica = config["disentangle"], views.get("ica")
    if not isinstance(ica, Ica) or not section["reproducibility_draws"]:
        return None
    found = measure(
        X, obs, ica.pca, ica, draws=section["reproducibility_draws"], seed=config["seed"], alpha=section["label_alpha"]
    )
    if found is None:
        ica.warnings_.append("reproducibility was not measured: one training experiment cannot be resampled")
        return None
    order = found.order()
    ica.reorder(order)
    return found.reordered(order)


def with_reproducibility(table: pd.DataFrame, found: Reproducibility | None) -> pd.DataFrame:
    """Add to a component table what is known of the reproducibility of the ica components.

    Columns: reproducibility and reproducibility_sd (mean and sd of matched |r| over bootstraps of training
    experiments), seed_stability (mean |r| over fits of the same wells from other seeds), reproducibility_null (the
    level that components of Gaussian data rarely reach) and identifiable (whether reproducibility is above it,
    nullable). Missing for other views, and where it was not measured.
    """
    columns = ("reproducibility", "reproducibility_sd", "seed_stability", "reproducibility_null")
    table = table.assign(**dict.fromkeys(columns, np.nan), identifiable=pd.array([pd.NA] * len(table), dtype="boolean"))
    if found is None:
        return table
    rows = table["view"] == "ica"
    for name, values in zip(columns, (found.mean, found.sd, found.seed_mean, found.null), strict=True):
        table.loc[rows, name] = values
    table.loc[rows, "identifiable"] = found.identifiable
    return table


def sweep(X: np.ndarray, obs: pd.DataFrame, config: Mapping[str, Any]) -> pd.DataFrame:
    """Return what each width of `disentangle.sweep` keeps and amplifies; see `width.width_table` for the columns.

    Parameters
    ----------
    X, obs
        Training wells, as for `fit_views`.
    config
        A complete configuration.
    """
    section = config["disentangle"]
    full = Pca(seed=config["seed"]).fit(X, obs)
    return width_table(
        full, Rows(X), section["sweep"], seed=config["seed"], max_iter=section["ica_max_iter"],
        tolerance=float(section["ica_tolerance"]),
    )  # fmt: skip


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
        "n_components": _width(views, config),
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


def _width(views: Mapping[str, View], config: Mapping[str, Any]) -> int | None:
    """Return the number of components of the fit; None where it was left to the data and no view has any."""
    asked = config["disentangle"]["n_components"]
    widths = [v.n_components_ for key, v in views.items() if key in ("pca", *ROTATED, "tvn", "pca_cs", "harmony")]
    return asked if asked != AUTO else next(iter(widths), None)


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
    known = table.drop(columns=["view", "draw"]).set_index("component").dropna(axis=1, how="all")
    if "identifiable" in known:
        known["identifiable"] = known["identifiable"].astype(bool)
    adata.uns[schema.UNS_COMPONENTS] = known
    adata.uns[schema.UNS_ICA] = {k: np.array(v) if k == "seeds" else v for k, v in record["ica"].items()}
    if record["reproducibility"] is not None:
        measured = {k: v for k, v in record["reproducibility"].items() if v is not None}
        adata.uns[schema.UNS_REPRODUCIBILITY] = measured
