"""Wells back to a plain table, in the column names of pycytominer.

embeddings.h5ad or disentangled.h5ad and the name of a view come in; a parquet or csv table goes out, metadata first
(`Metadata_` and the name of the obs column), then a column a feature or component. It can be read back with
`source: profiles`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from phenoica import files, schema
from phenoica.errors import SchemaError

if TYPE_CHECKING:
    import anndata

METADATA = "Metadata_"
RAW = "raw"
# obs columns whose name in the field is another one
FIELD_NAMES = {schema.PLATE: "Plate", schema.ADDRESS: "Well"}
NAMES_OF = {schema.X_BIOLOGY: schema.UNS_BIOLOGY_NAMES, schema.X_BATCH: schema.UNS_BATCH_NAMES}
VIEWS = {RAW: None, **schema.VIEW_KEYS, schema.BIOLOGY: schema.X_BIOLOGY, schema.BATCH: schema.X_BATCH}


def pycytominer_table(adata: anndata.AnnData, view: str = RAW) -> pd.DataFrame:
    """Return the wells as a table.

    Parameters
    ----------
    adata
        An AnnData written by phenoica.
    view
        raw (the matrix X), pca, ica, tvn, pca_cs, biology or batch (the ica components of that label).

    Returns
    -------
    DataFrame
        A row a well: Metadata_Plate, Metadata_Well, then `Metadata_` and every other obs column and the well id, then
        float32 features: the names of var, or components such as ica_000.

    Raises
    ------
    SchemaError
        If the view is unknown, or the file does not hold it.
    """
    if view not in VIEWS:
        raise SchemaError(f"unknown view {view!r}; known are {', '.join(VIEWS)}")
    key = VIEWS[view]
    if key is not None and key not in adata.obsm:
        raise SchemaError(f"the file holds no view {view} (obsm {key}); export disentangled.h5ad, or fit this view")
    values = np.asarray(adata.X if key is None else adata.obsm[key], dtype=np.float32)
    if not values.shape[1]:
        raise SchemaError(f"view {view} has no component: none carries that label; export ica instead")
    names = list(adata.var_names) if key is None else _component_names(adata, key, view, values.shape[1])
    obs = adata.obs.reset_index(names=schema.WELL_ID)
    first = list(FIELD_NAMES)
    frame = obs[[*first, *(c for c in obs.columns if c not in first)]]
    frame = frame.rename(columns=lambda c: METADATA + FIELD_NAMES.get(c, str(c)))
    for column in frame.columns:
        if isinstance(frame[column].dtype, pd.CategoricalDtype):
            frame[column] = frame[column].astype(object).where(frame[column].notna(), None)
    return pd.concat([frame, pd.DataFrame(values, columns=names)], axis=1)


def _component_names(adata: anndata.AnnData, key: str, view: str, n: int) -> list[str]:
    if key in NAMES_OF:
        return [str(name) for name in adata.uns[NAMES_OF[key]]]
    return schema.component_names(n, view)


def export_pycytominer(h5ad: str | os.PathLike, out: str | os.PathLike, view: str = RAW) -> None:
    """Write the wells of an h5ad file as a table (see `pycytominer_table`), atomically.

    Parameters
    ----------
    h5ad
        embeddings.h5ad or disentangled.h5ad.
    out
        .parquet, .csv or .csv.gz. Text stays text in parquet; csv has no types, so read plates as text there.
    view
        See `pycytominer_table`.

    Raises
    ------
    SchemaError
        If the suffix is another one, or the file does not hold the view.
    """
    import anndata

    out = Path(out)
    if not out.name.endswith((".parquet", ".csv", ".csv.gz")):
        raise SchemaError(f"{out}: unknown kind of table; known are .parquet, .csv and .csv.gz")
    if not Path(h5ad).is_file():
        raise SchemaError(f"{h5ad}: no such file; run the workflow first, or name another with --h5ad")
    adata = anndata.read_h5ad(h5ad)
    schema.check(adata)
    frame = pycytominer_table(adata, view)
    if out.suffix == ".parquet":
        files.write_parquet(out, frame)
    else:
        files.write_csv(out, frame)
