"""Join the parts of all shards into embeddings.h5ad, one part in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from phenoica import __version__, config, files, schema
from phenoica.embed.image_measures import measure_names
from phenoica.embed.run import CHANNELWISE, EMBEDDING, UNTRAINED, bad_images, check_bad_fraction
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
        `image_measures`; uns `phenoica`. With `embed.channelwise` also obsm `X_channelwise` (wells, channels * dim)
        float32, whose mean over channels is X, and uns `X_channelwise_channels`, their numbers in order. With
        `embed.random_baseline` obsm `X_random_encoder` (wells, dim) float32.
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
    filled = _wells_of_parts(wells, parts)
    lost = ~filled & ~wells[schema.WELL_ID].isin(quarantine[schema.WELL_ID]).to_numpy()
    if lost.any():
        first = wells[schema.WELL_ID][lost].iloc[0]
        raise SchemaError(f"{lost.sum()} wells are in no part and not quarantined, first {first}; run embed again")
    if not filled.any():
        raise SchemaError("no well was embedded: all are quarantined; see quarantine.csv")
    obs = wells.loc[filled, list(schema.WELL_COLUMNS)].reset_index(drop=True)
    joined = _join_parts(pd.Index(obs[schema.WELL_ID]), parts, description)

    obs[schema.N_TILES] = joined.n_tiles
    obs[schema.MISSING_CHANNELS] = joined.missing_channels
    obs[schema.CELL_COUNT] = joined.measures.pop(schema.CELL_COUNT).to_numpy()
    obs = as_categories(obs).set_index(schema.WELL_ID)
    obsm = {schema.IMAGE_MEASURES: joined.measures.set_index(obs.index)}
    if joined.by_channel is not None:
        obsm[schema.X_CHANNELWISE] = joined.by_channel
    if joined.by_random is not None:
        obsm[schema.RANDOM_ENCODER] = joined.by_random
    var = pd.DataFrame(index=schema.var_names(joined.embedding.shape[1]))
    adata = anndata.AnnData(joined.embedding, obs=obs, var=var, obsm=obsm)
    if joined.by_channel is not None:
        adata.uns[schema.UNS_CHANNELS] = np.array(description["channels"])
    adata.uns[schema.UNS] = {
        "version": __version__,
        "config_fingerprint": config.fingerprint(cfg, "source", "demo", "plates", "embed", "licences"),
        "checkpoint": description["checkpoint"],
        "checkpoint_sha256": description["checkpoint_sha256"],
        "precision": description["precision"],
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
    """Return what all parts say of their encoder; refuse parts that say different things, and say what differs."""
    first: dict[str, Any] = {}
    for part in parts:
        description = json.loads(pq.read_schema(part).metadata[schema.UNS.encode()])
        first = first or description
        # why a machine took a precision may differ between machines; which one may not
        keys = [k for k in first if k != "precision_reason" and description.get(k) != first[k]]
        if keys:
            differences = "; ".join(f"{key} {first[key]!r} and {description.get(key)!r}" for key in keys)
            raise SchemaError(
                f"{parts[0]} and {part} come from different encoders: {differences}. Delete the parts of one of them "
                "and run embed again with one configuration (what `auto` chooses depends on the machine)"
            )
    return first


def _wells_of_parts(wells: pd.DataFrame, parts: Sequence[Path]) -> np.ndarray:
    """Return which wells have a row in a part, bool (wells,); only the column of ids is read."""
    position = pd.Index(wells[schema.WELL_ID])
    filled = np.zeros(len(wells), bool)
    for part in parts:
        at = position.get_indexer(pq.read_table(part, columns=[schema.WELL_ID]).column(0).to_pylist())
        if (at < 0).any() or filled[at].any():
            raise SchemaError(f"{part}: holds wells that are unknown or in another part; delete embed/parts, run again")
        filled[at] = True
    return filled


@dataclass
class _Joined:
    """What the parts hold, in the order of the result."""

    embedding: np.ndarray  # (wells, width) float32
    by_channel: np.ndarray | None  # (wells, channels * dim) float32
    by_random: np.ndarray | None  # (wells, width) float32
    n_tiles: np.ndarray
    missing_channels: np.ndarray  # text
    measures: pd.DataFrame


def _join_parts(well_ids: pd.Index, parts: Sequence[Path], description: Mapping[str, Any]) -> _Joined:
    """Read the parts one after the other into tables of their final size."""
    n, width = len(well_ids), int(description["width"])
    wide = int(description["dim"]) * len(description["channels"])
    names = [schema.CELL_COUNT, *measure_names(description["channels"])]
    embedding, n_tiles, measures = np.empty((n, width), np.float32), np.empty(n, np.int64), np.empty((n, len(names)))
    missing = np.full(n, "", dtype=object)
    by_channel = np.empty((n, wide), np.float32) if description[CHANNELWISE] else None
    by_random = np.empty((n, width), np.float32) if description["random_baseline"] else None
    for part in parts:
        table = pq.read_table(part)
        at = well_ids.get_indexer(table.column(schema.WELL_ID).to_pylist())
        embedding[at] = _rows(table, EMBEDDING, width)
        if by_channel is not None:
            by_channel[at] = _rows(table, CHANNELWISE, wide)
        if by_random is not None:
            by_random[at] = _rows(table, UNTRAINED, width)
        n_tiles[at] = np.asarray(table.column(schema.N_TILES))
        missing[at] = table.column(schema.MISSING_CHANNELS).to_pylist()
        measures[at] = table.select(names).to_pandas().to_numpy()
    return _Joined(embedding, by_channel, by_random, n_tiles, missing, pd.DataFrame(measures, columns=names))


def _rows(table: pa.Table, column: str, width: int) -> np.ndarray:
    """Return a column of fixed-size lists as (rows, width)."""
    return np.asarray(table.column(column).combine_chunks().flatten()).reshape(-1, width)
