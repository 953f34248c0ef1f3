"""Put wells that a fit has never seen into its saved views; nothing is refitted.

An AnnData of new wells and a folder of states come in: one view's folder, or all of a fit (fold-<k>/, exploration/).
The same AnnData with an obsm slot a view goes out, with the hash of each state and what it read of the new batch, and
with the labels that the ica components got at the fit.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from phenoica import __version__, schema
from phenoica.disentangle.base_view import META_FILE
from phenoica.disentangle.comparators import Comparator
from phenoica.disentangle.fitting import ROTATION
from phenoica.disentangle.run import (
    COMPONENTS_FILE,
    DESCRIBED_OBSM,
    DESCRIBED_UNS,
    FIT_FILE,
    ICA,
    PCA,
    describe_components,
    hide_flagged_controls,
    load_components,
    load_fit,
)
from phenoica.disentangle.views import View, load_view
from phenoica.errors import ControlsError, FitError, SchemaError
from phenoica.files import sha256, sha256_of_json, write_h5ad

if TYPE_CHECKING:
    import anndata
    import pandas as pd


@dataclass(frozen=True)
class States:
    """Fitted views to be applied.

    Attributes
    ----------
    folder
        Where they were loaded from.
    views
        Fitted views by key.
    hashes
        `state_sha256` by key.
    record
        fit.json of the fit they belong to; empty for a view that was saved by itself.
    left_out
        Key -> why it is not applied.
    components
        What the fit says of its ica components (`run.load_components`); None without ica, or for an ica that was saved
        by itself.
    components_sha256
        SHA-256 of that table's file; empty where there is none.
    """

    folder: Path
    views: Mapping[str, View]
    hashes: Mapping[str, str]
    record: Mapping[str, Any]
    left_out: Mapping[str, str]
    components: pd.DataFrame | None = None
    components_sha256: str = ""


def state_sha256(directory: str | os.PathLike) -> str:
    """Return one SHA-256 for the folder of a saved view: that of its files' names and SHA-256."""
    directory = Path(directory)
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return sha256_of_json({str(path.relative_to(directory)): sha256(path) for path in files})


def load_states(directory: str | os.PathLike) -> States:
    """Load one view's folder, or all views of a folder that `phenoica disentangle` wrote.

    Of a whole fit, random rotations and comparators are left out: the first are a null and no result, the second
    correct all wells together and have nothing to apply.

    Raises
    ------
    SchemaError
        If the folder holds neither, or a damaged state, or lacks the labels of the ica components that it fitted.
    FitError
        If nothing in it can be applied.
    """
    directory = Path(directory)
    if (directory / META_FILE).is_file():
        key, views, record = directory.name, {directory.name: load_view(directory)}, _record_of(directory)
        if isinstance(views[key], Comparator):
            raise FitError(f"{directory}: {views[key].name} {_WHY[Comparator]}; apply another view")
        return States(
            directory, views, {key: state_sha256(directory)}, record, {},
            *_labels_of(directory.resolve().parent, views, record),
        )  # fmt: skip
    if not (directory / FIT_FILE).is_file():
        raise SchemaError(
            f"{directory}: neither a saved view ({META_FILE}) nor a fit ({FIT_FILE}); name disentangle/exploration, "
            "disentangle/fold-<k>, or the folder of one view in it"
        )
    found, record = load_fit(directory)
    left_out = {key: _WHY[Comparator] for key, v in found.items() if isinstance(v, Comparator)}
    left_out |= {key: _WHY[ROTATION] for key, v in found.items() if v.name == ROTATION}
    views = {key: v for key, v in found.items() if key not in left_out}
    if not views:
        raise FitError(f"{directory}: none of its views can be applied: {', '.join(found)}")
    return States(
        directory, views, {key: state_sha256(directory / key) for key in views}, record, left_out,
        *_labels_of(directory, views, record),
    )  # fmt: skip


def _labels_of(
    fit_folder: Path, views: Mapping[str, View], record: Mapping[str, Any]
) -> tuple[pd.DataFrame | None, str]:
    """Return what a fit says of its ica components and the hash of that, where ica is applied as a part of a fit."""
    if not _holds(views, ICA) or not record:
        return None, ""
    return load_components(fit_folder, record), sha256(fit_folder / COMPONENTS_FILE)


_WHY = {
    Comparator: "corrects all wells together and cannot be applied to a new batch alone",
    ROTATION: "is a random draw, the null of ica",
}


def _record_of(view_folder: Path) -> Mapping[str, Any]:
    """Return fit.json of the fit that a view's folder lies in, if it does."""
    path = view_folder.resolve().parent / FIT_FILE
    if not path.is_file():
        return {}
    record = json.loads(path.read_text(encoding="utf-8"))
    return record if view_folder.resolve().name in record.get("views", {}) else {}


def transform(adata: anndata.AnnData, states: States) -> None:
    """Add the fitted views of new wells to their AnnData.

    Parameters
    ----------
    adata
        X (n, d) embeddings of the same encoder, d as at the fit; obs index = unique well ids. Views that read controls
        need obs `control_role` and the batch column, and a batch that the fit has not seen whole; a fit without flagged
        wells (qc.exclude_flagged) needs `qc_pass` too. Features are taken by name where the fit knows their names.
        obsm gets a float32 (n, k) array a view, `X_ica`, ... (`schema.view_key`), varm `PCs` and `ICs` the loadings of
        pca and ica (d, k) in the order of var. Ica that is part of a fit adds what
        `run.describe_components` does, as in disentangled.h5ad: obsm `X_biology`, `X_batch`, uns `X_biology_names`,
        `X_batch_names`, `components`, `ica`, `reproducibility`. Labels and all that `components` says are of the wells
        of the fit; new wells are never used to label. What stood in these slots is replaced. uns gets
        `phenoica_transform`: version, folder, fold, fit_experiments, seen_batches (batches of these wells that the fit
        trained on: they keep its statistics), components_sha256 (of the table of labels, empty without), and views:
        key -> obsm, state_sha256, test_data_used, n_components.
    states
        As from `load_states`.

    Raises
    ------
    SchemaError
        If ids repeat, X is not finite or of another width, or columns or features are missing.
    ControlsError
        If a new batch lacks fit controls and the fit was told to stop at that.

    Warns
    -----
    UserWarning
        Of slots that are replaced or removed, views left out, an ica that has no labels, and batches that the fit
        trained on.
    """
    X = _features(adata, states)
    obs = _obs(adata.obs, states)
    slots = {key: schema.view_key(key) for key in states.views}
    results = {key: view.transform(X, obs) for key, view in states.views.items()}
    _clear_slots(adata, states, slots)
    for why in dict.fromkeys(states.left_out.values()):
        names = [key for key, reason in states.left_out.items() if reason == why]
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        _say(f"left out: {shown}, which {why}")
    for key, Z in results.items():
        adata.obsm[slots[key]] = Z
    for key, slot in _loadings(states).items():
        adata.varm[slot] = _by_feature(adata, states, states.views[key].components_)
    if states.components is not None:
        describe_components(adata, states.components, states.record)
    elif _holds(states.views, ICA):
        _say(
            f"{states.folder} is an ica that was saved by itself and has no labels: no {' or '.join(DESCRIBED_OBSM)}; "
            "name the folder of a fit that `phenoica disentangle` wrote to have them"
        )
    adata.uns[schema.UNS_TRANSFORM] = {
        "version": __version__,
        "folder": str(states.folder),
        "fold": "not stated" if "fold" not in states.record else str(states.record["fold"]),
        "fit_experiments": np.array(states.record.get("training_experiments", []), dtype=object),
        "seen_batches": np.array(_seen(obs, states), dtype=object),
        "components_sha256": states.components_sha256,
        "views": {
            key: {
                "obsm": slots[key], "state_sha256": states.hashes[key], "test_data_used": view.test_data_used,
                "n_components": view.n_components_,
            } for key, view in states.views.items()
        },
    }  # fmt: skip


def transform_file(new_h5ad: str | os.PathLike, state_dir: str | os.PathLike, out_h5ad: str | os.PathLike) -> None:
    """Apply saved views to a file of new wells; see `transform` for what is checked and added.

    Parameters
    ----------
    new_h5ad
        embeddings.h5ad of another run, or any AnnData with embeddings in X.
    state_dir
        See `load_states`.
    out_h5ad
        Another file, written atomically.

    Raises
    ------
    SchemaError, FitError, ControlsError
        Naming the file and what it lacks; nothing is written then.
    """
    import anndata

    if Path(out_h5ad).resolve() == Path(new_h5ad).resolve():
        raise SchemaError(f"{out_h5ad}: is the input; name another file, inputs are never changed")
    if not Path(new_h5ad).is_file():
        raise SchemaError(f"{new_h5ad}: no such file")
    states = load_states(state_dir)
    try:
        adata = anndata.read_h5ad(new_h5ad)
    except OSError as error:
        raise SchemaError(f"{new_h5ad}: cannot be read as h5ad ({error})") from error
    try:
        transform(adata, states)
    except (SchemaError, FitError, ControlsError) as error:
        raise type(error)(f"{new_h5ad}: {error}") from error
    write_h5ad(out_h5ad, adata)


def _holds(views: Mapping[str, View], name: str) -> bool:
    """Say whether the view of that name is among these; a view saved by itself may lie in a folder of any name."""
    return name in views and views[name].name == name


def _loadings(states: States) -> dict[str, str]:
    """Return key -> varm slot of the views whose loadings have one."""
    return {key: slot for key, slot in ((PCA, schema.VARM_PCS), (ICA, schema.VARM_ICS)) if _holds(states.views, key)}


def _clear_slots(adata: anndata.AnnData, states: States, slots: Mapping[str, str]) -> None:
    """Remove what the views will replace, and what the file says of components that are replaced, and say so."""
    obsm, uns = list(slots.values()), []
    if ICA in states.views:  # X_ica is replaced, whatever lies in a folder of that name
        obsm += DESCRIBED_OBSM
        uns += [*DESCRIBED_UNS, schema.UNS_CONCENTRATION]
    stood = {
        name: [slot for slot in keys if slot in getattr(adata, name)]
        for name, keys in (("obsm", obsm), ("varm", _loadings(states).values()), ("uns", uns))
    }
    for name, found in stood.items():
        for slot in found:
            del getattr(adata, name)[slot]
    if any(stood.values()):
        shown = "; ".join(f"{name} {', '.join(found)}" for name, found in stood.items() if found)
        _say(f"{shown} stood in the file: replaced, or removed where this state has nothing in its place")


def _by_feature(adata: anndata.AnnData, states: States, loadings: np.ndarray) -> np.ndarray:
    """Return loadings (d, k) of the features of the fit in the order of var, which names the same features."""
    names = states.record.get("features")
    return loadings if names is None else loadings[np.argsort(adata.var_names.get_indexer(names))]


def _features(adata: anndata.AnnData, states: States) -> np.ndarray:
    """Return X in the order of the features of the fit, checked."""
    if not adata.obs_names.is_unique:
        twice = adata.obs_names[adata.obs_names.duplicated()][0]
        raise SchemaError(f"well id {twice!r} stands more than once; ids must be unique")
    if not adata.n_obs:
        raise SchemaError("there is no well")
    X = adata.X
    if X is None:
        raise SchemaError("X is empty; it must hold the embeddings")
    X = np.asarray(X.toarray() if hasattr(X, "toarray") else X)
    width = next(iter(states.views.values())).n_features_in_
    if X.shape[1] != width:
        raise SchemaError(
            f"X has {X.shape[1]} features, {states.folder} was fitted on {width}; use the encoder of the fit"
        )
    names = states.record.get("features")
    if names is None or list(adata.var_names) == names:
        return X
    missing = [name for name in names if name not in set(adata.var_names)]
    if missing or not adata.var_names.is_unique:
        what = f"lacks {len(missing)} of its features, first {missing[0]!r}" if missing else "names features twice"
        raise SchemaError(f"var {what}; {states.folder} was fitted on {names[0]!r} to {names[-1]!r}: rename var_names")
    return X[:, adata.var_names.get_indexer(names)]


def _obs(obs: pd.DataFrame, states: States) -> pd.DataFrame:
    """Return obs as the views read it: without flagged controls where the fit left flagged wells out."""
    if schema.CONTROL_ROLE in obs.columns:
        unknown = sorted(set(obs[schema.CONTROL_ROLE].astype(str)) - set(schema.CONTROL_ROLE_VALUES))
        if unknown:
            allowed = ", ".join(schema.CONTROL_ROLE_VALUES)
            raise SchemaError(f"obs: {schema.CONTROL_ROLE} holds {unknown[:5]}; allowed are {allowed}")
    reads_controls = any(view.test_data_used != "none" for view in states.views.values())
    if not states.record.get("exclude_flagged") or not reads_controls:
        return obs
    if schema.QC_PASS not in obs.columns:
        raise SchemaError(
            f"obs: column {schema.QC_PASS} is missing; the fit left flagged wells out (qc.exclude_flagged), so flagged "
            "controls must not centre a new batch either; run `phenoica qc`, or set the column to True"
        )
    return hide_flagged_controls(obs)


def _seen(obs: pd.DataFrame, states: States) -> list[str]:
    """Return the batches of these wells that the fit trained on, and say so."""
    key = states.record.get("batch_key", schema.BATCH_KEY_DEFAULT)
    known: set[str] = set(states.record.get("training_experiments", []))
    for view in states.views.values():
        known |= set(getattr(view, "batches_", []))
    if key not in obs.columns:
        return []
    seen = sorted(set(obs[key].astype(str)) & known)
    if seen:
        _say(f"the fit trained on {key} {', '.join(seen[:5])}: these wells are not new to it, and keep its statistics")
    return seen


def _say(message: str) -> None:
    warnings.warn(message, stacklevel=3)
