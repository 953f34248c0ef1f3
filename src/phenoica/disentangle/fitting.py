"""Which views a configuration asks for, fitted to training wells, and the tables that describe their components.

A matrix of training wells and their metadata come in; fitted views, component tables, the reproducibility of the ica
components and a table of widths go out. Nothing here knows of files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from phenoica.disentangle.base_view import AUTO
from phenoica.disentangle.batch_controls import fit_control_rows
from phenoica.disentangle.blocks import Rows
from phenoica.disentangle.components import component_table
from phenoica.disentangle.permutation import ReferenceTests
from phenoica.disentangle.reproducibility import Reproducibility, measure
from phenoica.disentangle.views import Ica, Pca, View, view
from phenoica.disentangle.width import width_table
from phenoica.errors import ConfigError
from phenoica.progress import track

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


def reproducibility_of(
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


def width_of(views: Mapping[str, View], config: Mapping[str, Any]) -> int | None:
    """Return the number of components of the fit; None where it was left to the data and no view has any."""
    asked = config["disentangle"]["n_components"]
    widths = [v.n_components_ for key, v in views.items() if key in ("pca", *ROTATED, "tvn", "pca_cs", "harmony")]
    return asked if asked != AUTO else next(iter(widths), None)
