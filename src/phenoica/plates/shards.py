"""Image shards in the published layout: parquet with `__key__` and `jp2`, read a row group at a time.

The index pass reads the key column only. No function here holds a whole shard in memory.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from phenoica.errors import AddressError, ShardError
from phenoica.plates.address import normalise_address

KEY = "__key__"
JP2 = "jp2"
ROWS_AT_A_TIME = 100
# for `re` and for arrow's RE2 alike
_KEY_PATTERN = (
    r"^(?P<experiment>[^/]+)/(?:Plate)?(?P<plate>[^/]+)/(?P<address>[A-Za-z]{1,2}[0-9]{1,2})"
    r"_s(?P<site>[0-9]{1,9})_(?P<channel>[0-9]{1,9})$"
)


def find_shards(patterns: Sequence[str], base: str | os.PathLike = ".") -> list[Path]:
    """Return the shard files that the patterns name, each once, in the order of their names.

    Raises
    ------
    ShardError
        If a pattern matches nothing.
    """
    found: set[Path] = set()
    for pattern in patterns:
        matches = glob.glob(str(Path(base) / pattern))
        if not matches:
            raise ShardError(f"plates.shards: {pattern!r} matches no file; check the path")
        found.update(Path(m) for m in matches)
    return sorted(found)


def parse_key(key: str, plate_format: int = 1536) -> tuple[str, str, str, int, int]:
    """Return (experiment, plate, address, site, channel) of a key like `gene-001/Plate1/AA02_s1_1`.

    Raises
    ------
    ShardError
        If the key does not follow the layout.
    """
    match = re.fullmatch(_KEY_PATTERN, key) if isinstance(key, str) else None
    if match is None:
        raise ShardError(f"unparsable key {key!r}; expected experiment/PlateN/ADDRESS_sSITE_CHANNEL")
    experiment, plate, address, site, channel = match.groups()
    try:
        return experiment, plate, normalise_address(address, plate_format), int(site), int(channel)
    except AddressError as error:
        raise ShardError(f"unparsable key {key!r}: {error}") from None


def open_shard(path: str | os.PathLike) -> pq.ParquetFile:
    """Open a shard and check its columns.

    Raises
    ------
    ShardError
        If the file is missing, is no parquet file or lacks a column.
    """
    if not Path(path).is_file():
        raise ShardError(f"{path}: no such shard")
    try:
        shard = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise ShardError(f"{path}: not a readable parquet file ({error}); fetch it again") from None
    fields = {field.name: field.type for field in shard.schema_arrow}
    if KEY not in fields or JP2 not in fields:
        raise ShardError(f"{path}: expected columns {KEY} and {JP2}, found {', '.join(fields)}")
    kind = fields[JP2]
    is_struct = pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0
    if not (is_struct or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
        raise ShardError(f"{path}: column {JP2} is {kind}; expected bytes or a struct with bytes")
    return shard


def read_images(shard: pq.ParquetFile, row_group: int, rows: Sequence[int]) -> list[tuple[str, bytes | None]]:
    """Return the key and the JPEG 2000 bytes of the given rows of a row group; None for an empty cell."""
    table = shard.read_row_group(row_group, columns=[KEY, JP2]).take(pa.array(rows, pa.int64()))
    cells = (cell["bytes"] if isinstance(cell, dict) else cell for cell in table.column(JP2).to_pylist())
    return list(zip(table.column(KEY).to_pylist(), cells, strict=True))


def iter_images(shard: pq.ParquetFile, row_group: int, rows: Sequence[int]) -> Iterator[tuple[str, bytes | None]]:
    """Yield the key and the JPEG 2000 bytes of the given rows of a row group; None for an empty cell.

    The row group is read a hundred rows at a time, so a shard that is one large row group fits into memory too.

    Parameters
    ----------
    rows
        Row numbers within the row group, ascending.
    """
    wanted = np.asarray(rows, np.int64)
    start = 0
    for batch in shard.iter_batches(ROWS_AT_A_TIME, row_groups=[row_group], columns=[KEY, JP2]):
        here = wanted[(wanted >= start) & (wanted < start + len(batch))] - start
        start += len(batch)
        if len(here):
            chosen = batch.take(pa.array(here))
            cells = (cell["bytes"] if isinstance(cell, dict) else cell for cell in chosen.column(JP2).to_pylist())
            yield from zip(chosen.column(KEY).to_pylist(), cells, strict=True)


def index_frame(paths: Sequence[Path], plate_format: int = 1536) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Index all images of the shards, reading key columns only.

    Returns
    -------
    (DataFrame, DataFrame)
        The good images (key, experiment, well_id, site, channel, shard, row_group, row) and the rejected ones (key,
        well_id, reason, shard, row_group, row): unparsable keys, and every further image of a well, site and channel.
        Both are in the order of the shards; of the good ones, keys are arrow text, experiments and wells categories.
    """
    table = pa.concat_tables([_places(number, open_shard(path)) for number, path in enumerate(paths)])
    places = table.select(["shard", "row_group", "row"]).to_pandas()
    keys = table.column(KEY).combine_chunks()
    wells, parsed = _parse_keys(keys, plate_format)
    frame = pd.concat([pd.Series(pd.array(keys, dtype=pd.ArrowDtype(pa.string())), name="key"), wells, places], axis=1)
    again = wells.duplicated(["well_id", "site", "channel"]).to_numpy() & parsed
    bad = frame[["key", "well_id", *places]][~parsed | again].astype({"key": object, "well_id": object})
    bad = bad.where(bad.notna(), None)
    bad["reason"] = [
        "duplicate key; the first one is used" if repeated else _reason(key, plate_format)
        for key, repeated in zip(bad["key"], again[bad.index], strict=True)
    ]
    bad["key"] = bad["key"].fillna("(no key)")  # an image all the same: empty means a well without images
    good = frame[parsed & ~again].astype({"site": np.int64, "channel": np.int64})
    return good.reset_index(drop=True), bad[["key", "well_id", "reason", *places]].reset_index(drop=True)


def _places(number: int, shard: pq.ParquetFile) -> pa.Table:
    """Return key, shard, row group and row of every image of a shard."""
    sizes = [shard.metadata.row_group(i).num_rows for i in range(shard.num_row_groups)]
    rows = np.concatenate([np.arange(n, dtype=np.int32) for n in sizes] or [np.empty(0, np.int32)])
    return pa.table({
        KEY: shard.read(columns=[KEY]).column(0).cast(pa.string()),
        "shard": np.full(len(rows), number, np.int32),
        "row_group": np.repeat(np.arange(len(sizes), dtype=np.int32), sizes),
        "row": rows,
    })  # fmt: skip


def _parse_keys(keys: pa.Array, plate_format: int) -> tuple[pd.DataFrame, np.ndarray]:
    """Parse keys as `parse_key` does, all at once.

    Returns
    -------
    (DataFrame, ndarray)
        experiment, well_id (categories), site and channel of every key, null where it cannot be parsed; and which can
        be, bool (n,).
    """
    experiment, plate, address, site, channel = pc.extract_regex(keys, _KEY_PATTERN).flatten()
    written = address.dictionary_encode()  # an address stands in many keys and is read once
    canonical = pa.array([_canonical(a, plate_format) for a in written.dictionary.to_pylist()], pa.string())
    well = pc.binary_join_element_wise(experiment, plate, canonical.take(written.indices), "_")
    columns = {
        "experiment": experiment.dictionary_encode(), "well_id": well.dictionary_encode(),
        "site": site.cast(pa.int32()), "channel": channel.cast(pa.int32()),
    }  # fmt: skip
    return pa.table(columns).to_pandas(), well.is_valid().to_numpy(zero_copy_only=False)


def _canonical(address: str, plate_format: int) -> str | None:
    try:
        return normalise_address(address, plate_format)
    except AddressError:
        return None


def _reason(key: str, plate_format: int) -> str:
    try:
        parse_key(key, plate_format)
    except ShardError as error:
        return str(error)
    raise AssertionError(f"{key!r} can be parsed")  # the two ways of parsing share their pattern
