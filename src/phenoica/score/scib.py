"""A view through the eyes of scib-metrics: how well batches mix, and how well perturbations stay apart.

disentangled.h5ad and the name of a view come in, a small table of the metrics of scib-metrics (Luecken et al. 2022)
goes out. It is an optional extra, of the exploration fit only: these metrics know no held-out batch, no chance level
and no well position, so they are for comparison with other work and carry no claim here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from phenoica import schema
from phenoica.errors import ScoreError
from phenoica.export import RAW, VIEWS
from phenoica.files import write_csv

if TYPE_CHECKING:
    import anndata

COLUMNS = ("view", "metric", "value", "n_wells", "n_labels", "n_batches", "reason")
MIN_WELLS = 3  # of a label
NEIGHBORS = 15


def scib_table(adata: anndata.AnnData, view: str, config: Mapping[str, Any]) -> pd.DataFrame:
    """Return the metrics of scib-metrics for one view.

    Labels are perturbations with at least three wells in at least two batches; the batch is `plates.batch_key`.
    Negative controls, most wells of which would be one label, are left out.

    Parameters
    ----------
    adata
        disentangled.h5ad.
    view
        As of `phenoica export`.
    config
        A complete configuration.

    Returns
    -------
    DataFrame
        `COLUMNS`. metric: silhouette_label, silhouette_batch, isolated_labels, ilisi, clisi, nmi_kmeans, ari_kmeans,
        each scaled by scib-metrics so that 1 is best. A metric that is not finite has its reason and no value.

    Raises
    ------
    ScoreError
        If scib-metrics is not installed, the file does not hold the view, or its preconditions do not hold: two
        batches, two labels, finite values.
    """
    metrics = _scib()
    values, labels, batches = _wells(adata, view, config["plates"]["batch_key"])
    base = {"view": view, "n_wells": len(values), "n_labels": len(set(labels)), "n_batches": len(set(batches))}
    neighbours = metrics.nearest_neighbors.pynndescent(
        values, n_neighbors=min(NEIGHBORS, len(values) - 1), random_state=config["seed"], n_jobs=1
    )
    kmeans: dict[str, float] = {}

    def of_kmeans(name: str) -> float:
        if not kmeans:
            kmeans.update(metrics.nmi_ari_cluster_labels_kmeans(values, labels))
        return kmeans[name]

    computed: dict[str, Callable[[], float]] = {
        "silhouette_label": lambda: metrics.silhouette_label(values, labels),
        "silhouette_batch": lambda: metrics.silhouette_batch(values, labels, batches),
        "isolated_labels": lambda: metrics.isolated_labels(values, labels, batches),
        "ilisi": lambda: metrics.ilisi_knn(neighbours, batches),
        "clisi": lambda: metrics.clisi_knn(neighbours, labels),
        "nmi_kmeans": lambda: of_kmeans("nmi"),
        "ari_kmeans": lambda: of_kmeans("ari"),
    }
    rows = []
    for name, compute in computed.items():
        value = float(compute())
        known = bool(np.isfinite(value))
        rows.append({**base, "metric": name, "value": value if known else None,
                     "reason": None if known else "not_finite"})  # fmt: skip
    if not any(row["reason"] is None for row in rows):
        raise ScoreError(
            f"view {view}: scib-metrics gives no finite number for {len(values)} wells; nothing is written"
        )
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _scib() -> Any:
    try:
        import scib_metrics
    except ImportError as error:
        raise ScoreError(
            f"scib-metrics cannot be imported ({error}); install the extra: pip install 'phenoica[scib]'"
        ) from error
    return scib_metrics


def _wells(adata: anndata.AnnData, view: str, batch_key: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return values, labels and batches of the wells that enter."""
    if view not in VIEWS:
        raise ScoreError(f"unknown view {view!r}; known are {', '.join(VIEWS)}")
    key = VIEWS[view]
    if view != RAW and key not in adata.obsm:
        raise ScoreError(f"the file holds no view {view} (obsm {key}); fit it, or name another")
    values = np.asarray(adata.X if key is None else adata.obsm[key], dtype=np.float32)
    if not values.shape[1]:
        raise ScoreError(f"view {view} has no component: none carries that label; name another view")
    labels = adata.obs[schema.PERTURBATION].astype(str).to_numpy()
    batches = adata.obs[batch_key].astype(str).to_numpy()
    case = (adata.obs[schema.CONTROL].astype(str) != schema.NEGATIVE).to_numpy()
    table = pd.DataFrame({"label": labels[case], "batch": batches[case]}).groupby("label")["batch"]
    enough = table.size().ge(MIN_WELLS) & table.nunique().ge(2)
    kept = case & np.isin(labels, enough.index[enough])
    values, labels, batches = values[kept], labels[kept], batches[kept]
    if len(set(labels)) < 2 or len(set(batches)) < 2:
        raise ScoreError(
            f"scib-metrics needs two perturbations with {MIN_WELLS} wells in two batches ({batch_key}); there are "
            f"{len(set(labels))} in {len(set(batches))}"
        )
    if not np.isfinite(values).all():
        raise ScoreError(f"view {view} is not finite in {(~np.isfinite(values).all(axis=1)).sum()} wells; drop them")
    return values, labels, batches


def write_scib(
    disentangled_h5ad: str | os.PathLike, view: str, out_csv: str | os.PathLike, config: Mapping[str, Any]
) -> None:
    """Write `scib_table`."""
    import anndata

    adata = anndata.read_h5ad(disentangled_h5ad)
    schema.check(adata)
    write_csv(out_csv, scib_table(adata, view, config))
