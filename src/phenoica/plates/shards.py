"""Image shards in the published layout: parquet with `__key__` and `jp2`, read a row group at a time.

The index pass reads the key column only. No function here holds a whole shard in memory.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from phenoica.errors import AddressError, ShardError
from phenoica.plates.address import normalise_address

KEY = "__key__"
JP2 = "jp2"
ROWS_AT_A_TIME = 100
_KEY_PATTERN = re.compile(r"^([^/]+)/(?:Plate)?([^/]+)/([A-Za-z]{1,2}\d{1,2})_s(\d+)_(\d+)$")


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
    match = _KEY_PATTERN.match(key) if isinstance(key, str) else None
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


def index_keys(paths: Iterable[Path]) -> Iterator[tuple[str, int, int, int]]:
    """Yield (key, shard number, row group, row in the row group) of every image, reading the key column only."""
    for number, path in enumerate(paths):
        shard = open_shard(path)
        for group in range(shard.num_row_groups):
            keys = shard.read_row_group(group, columns=[KEY]).column(0).to_pylist()
            for row, key in enumerate(keys):
                yield key, number, group, row


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
    """Index all images of the shards.

    Returns
    -------
    (DataFrame, DataFrame)
        The good images (key, well_id, site, channel, shard, row_group, row) and the rejected ones (key, well_id,
        reason, shard, row_group, row): unparsable keys, and every further image of a well, site and channel.
    """
    good, bad = [], []
    seen: set[tuple[str, int, int]] = set()
    for key, number, group, row in index_keys(paths):
        try:
            experiment, plate, address, site, channel = parse_key(key, plate_format)
        except ShardError as error:
            bad.append((str(key), None, str(error), number, group, row))
            continue
        well = f"{experiment}_{plate}_{address}"
        if (well, site, channel) in seen:
            bad.append((key, well, "duplicate key; the first one is used", number, group, row))
            continue
        seen.add((well, site, channel))
        good.append((key, well, site, channel, number, group, row))
    columns = ["key", "well_id", "site", "channel", "shard", "row_group", "row"]
    return (
        pd.DataFrame(good, columns=columns),
        pd.DataFrame(bad, columns=["key", "well_id", "reason", "shard", "row_group", "row"]),
    )
