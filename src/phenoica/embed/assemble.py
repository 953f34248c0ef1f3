"""Join the parts of all shards into embeddings.h5ad, one part in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from phenoica import __version__, config, files, schema
from phenoica.embed.run import EMBEDDING, bad_images, check_bad_fraction
from phenoica.errors import SchemaError


def assemble(
    wells: pd.DataFrame,
    parts: Sequence[Path],
    quarantines: Sequence[Path],
    out_h5ad: str | Path,
    out_quarantine: str | Path,
    cfg: Mapping[str, Any],
) -> None:
    """Write embeddings.h5ad and the joined quarantine.csv.

    Parameters
    ----------
    wells
        All wells of the run; their order is the order of the result.
    parts
        The part of each shard.
    quarantines
        quarantine.csv of the plates stage first, then that of each shard.
    out_h5ad
        AnnData: `X` (wells, dim) float32 raw embedding; obs = well columns, n_tiles, cell_count; obsm
        `image_measures`; uns `phenoica`.
    out_quarantine
        csv of every image and well that was left out, with the reason.
    cfg
        The resolved configuration.

    Raises
    ------
    SchemaError
        If parts come from different encoders, or a well is in none or in two.
    TooManyBadImages
        If more than `embed.max_bad_fraction` of all images is bad.
    """
    import anndata

    quarantine = pd.concat([pd.read_csv(q) for q in quarantines], ignore_index=True)
    n_images = sum(len(rows) for rows in wells[schema.IMAGE_ROW]) + len(bad_images(pd.read_csv(quarantines[0])))
    check_bad_fraction(bad_images(quarantine), n_images, cfg["embed"]["max_bad_fraction"])

    description = _common_description(parts)
    X, n_tiles, measures, filled = _read_parts(wells, parts, int(description["dim"]))
    lost = ~filled & ~wells[schema.WELL_ID].isin(quarantine[schema.WELL_ID]).to_numpy()
    if lost.any():
        first = wells[schema.WELL_ID][lost].iloc[0]
        raise SchemaError(f"{lost.sum()} wells are in no part and not quarantined, first {first}; run embed again")
    if not filled.any():
        raise SchemaError("no well was embedded: all are quarantined; see quarantine.csv")

    obs = wells.loc[filled, list(schema.WELL_COLUMNS)].reset_index(drop=True)
    obs[schema.N_TILES] = n_tiles[filled]
    obs[schema.CELL_COUNT] = measures.loc[filled, schema.CELL_COUNT].to_numpy()
    obs = as_categories(obs).set_index(schema.WELL_ID)
    measures = measures.loc[filled].drop(columns=schema.CELL_COUNT).set_index(obs.index)
    adata = anndata.AnnData(
        X[filled], obs=obs, var=pd.DataFrame(index=schema.var_names(X.shape[1])), obsm={schema.IMAGE_MEASURES: measures}
    )
    adata.uns[schema.UNS] = {
        "version": __version__,
        "config_fingerprint": config.fingerprint(cfg, "source", "demo", "plates", "embed", "licences"),
        "checkpoint": description["checkpoint"],
        "checkpoint_sha256": description["checkpoint_sha256"],
        "licences": f"images: {cfg['licences']['images']}; weights: {description['weights_licence']}",
        "encoder_saw_test_images": description["encoder_saw_test_images"],
        "fit_experiments": np.array([], dtype=object),
        "seed": int(cfg["seed"]),
    }
    schema.check(adata)
    files.write_h5ad(out_h5ad, adata)
    files.write_csv(out_quarantine, quarantine)


def as_categories(obs: pd.DataFrame) -> pd.DataFrame:
    """Return the frame with its text columns as categories (the well id stays text), as h5ad stores them best."""
    text = [c for c in obs.columns if obs[c].dtype == object and c != schema.WELL_ID]
    return obs.assign(**{c: obs[c].astype("category") for c in text})


def _common_description(parts: Sequence[Path]) -> dict[str, Any]:
    texts = {pq.read_schema(p).metadata[schema.UNS.encode()].decode() for p in parts}
    if len(texts) != 1:
        raise SchemaError(
            f"the {len(parts)} parts come from {len(texts)} different encoders; delete embed/parts and run again"
        )
    return json.loads(texts.pop())


def _read_parts(
    wells: pd.DataFrame, parts: Sequence[Path], dim: int
) -> tuple[np.ndarray, np.ndarray, pd.DataFrame, np.ndarray]:
    """Return X (wells, dim) float32, n_tiles, measures and which wells a part filled."""
    X = np.zeros((len(wells), dim), np.float32)
    n_tiles = np.zeros(len(wells), np.int64)
    filled = np.zeros(len(wells), bool)
    position = pd.Index(wells[schema.WELL_ID])
    measures = None
    for part in parts:
        table = pq.read_table(part)
        at = position.get_indexer(table.column(schema.WELL_ID).to_pylist())
        if (at < 0).any() or filled[at].any():
            raise SchemaError(f"{part}: holds wells that are unknown or in another part; delete embed/parts, run again")
        X[at] = np.asarray(table.column(EMBEDDING).combine_chunks().flatten()).reshape(-1, dim)
        n_tiles[at] = np.asarray(table.column(schema.N_TILES))
        filled[at] = True
        frame = table.drop_columns([schema.WELL_ID, schema.N_TILES, EMBEDDING]).to_pandas()
        if measures is None:
            measures = pd.DataFrame(np.nan, index=wells.index, columns=frame.columns)
        measures.iloc[at] = frame.to_numpy()
    return X, n_tiles, measures, filled
