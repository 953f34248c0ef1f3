"""The finished pieces of a shard: what a killed embed job leaves behind, and what the next one takes up.

Comes in: the rows of a few hundred wells at a time. Goes out: one parquet file a piece in a folder beside the part,
each renamed into place when it is whole, and in the end the part itself. A piece says what it was made from; pieces of
other settings, images or weights are not taken up.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from phenoica import __version__, files, schema
from phenoica.errors import EmbeddingError

# wells of a piece: a minute or so of a CPU, a second of a GPU; whole batches of either
WELLS_CPU, WELLS_GPU = 64, 1024
_MADE_FROM = b"made_from"
_QUARANTINE = b"quarantine"


def made_from(
    wells: pd.DataFrame, shards: Sequence[Path], config: Mapping[str, Any], description: Mapping[str, Any]
) -> str:
    """Return a hash of everything that the rows of a unit depend on, save threads.

    Parameters
    ----------
    wells
        The wells of the unit, with the places of their images.
    shards
        All shard files; size and time of change of those with images of the unit count, not every byte.
    config
        The resolved configuration.
    description
        What the encoder says of itself.
    """
    used = sorted({int(shard) for row in wells[schema.IMAGE_SHARD] for shard in row})
    stats = [(str(shards[s]), shards[s].stat().st_size, shards[s].stat().st_mtime_ns) for s in used]
    places = [[np.asarray(v).tolist() for v in wells[column]] for column in schema.IMAGE_LOCATION]
    # the limit only says when to stop: raising it must not cost what was finished
    embed = {key: value for key, value in config["embed"].items() if key != "max_bad_fraction"}
    plates = {key: config["plates"][key] for key in ("channels", "missing_channels")}
    return files.sha256_of_json({
        "version": __version__, "embed": embed, "plates": plates,
        "description": dict(description), "shards": stats, "wells": wells[schema.WELL_ID].tolist(), "places": places,
    })  # fmt: skip


class Pieces:
    """The pieces of one part.

    Parameters
    ----------
    part
        The part they end up in; they lie in a folder of its name that ends in `.pieces`.
    origin
        `made_from` of the unit. Pieces of another origin are deleted, and that is said.
    """

    def __init__(self, part: str | Path, origin: str):
        self.part, self.origin = Path(part), origin
        self.folder = self.part.with_suffix(".pieces")
        self.done = self._found()

    def _found(self) -> dict[int, Path]:
        found, foreign = {}, 0
        for path in sorted(self.folder.glob("piece-*.parquet")):
            try:
                said = pq.read_schema(path).metadata[_MADE_FROM].decode()
            except (pa.ArrowInvalid, OSError, KeyError):
                said = ""  # damaged, though it was renamed only when whole: a full or failing disk
            if said == self.origin:
                found[int(path.stem.removeprefix("piece-"))] = path
            else:
                path.unlink()
                foreign += 1
        if foreign:
            print(
                f"note: {foreign} finished pieces in {self.folder} were damaged or made from other settings or images; "
                "their wells are embedded again",
                file=sys.stderr,
            )
        return found

    def write(self, number: int, rows: pa.Table, quarantine: Sequence[Mapping[str, Any]]) -> None:
        """Write a piece: its rows, and what of its wells cannot be used."""
        metadata = {_MADE_FROM: self.origin.encode(), _QUARANTINE: json.dumps(list(quarantine)).encode()}
        path = self.folder / f"piece-{number:06d}.parquet"
        with files.atomic_path(path) as temporary:
            pq.write_table(rows.replace_schema_metadata(metadata), temporary, compression="zstd")
        self.done[number] = path

    def quarantine(self) -> list[dict[str, Any]]:
        """Return what the finished pieces could not use, piece by piece."""
        return [
            entry
            for _, path in sorted(self.done.items())
            for entry in json.loads(pq.read_schema(path).metadata[_QUARANTINE])
        ]

    def rows(self, n_pieces: int) -> pa.Table:
        """Return the rows of all pieces, in order.

        Raises
        ------
        EmbeddingError
            If a piece is missing.
        """
        missing = sorted(set(range(n_pieces)) - set(self.done))
        if missing:
            raise EmbeddingError(f"{self.folder}: piece {missing[0]} of {n_pieces} is missing; run embed again")
        tables = [pq.read_table(path).replace_schema_metadata(None) for _, path in sorted(self.done.items())]
        return pa.concat_tables(tables).combine_chunks()

    def remove(self) -> None:
        """Delete the pieces and their folder, once the part is written."""
        shutil.rmtree(self.folder, ignore_errors=True)
