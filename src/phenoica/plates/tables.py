"""Tables of profiles, whatever they are stored as: some columns as text, others as numbers in blocks of rows.

A csv, parquet or h5ad file comes in. Text goes out as it is written (`phenoica.plates.metadata.read_table`), numbers go
out as float32 blocks, so that a file of any size passes through the memory of one block (csv: of its numbers).
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from phenoica.errors import MetadataError
from phenoica.plates.metadata import csv_header, read_table

if TYPE_CHECKING:
    import anndata

ROWS_AT_A_TIME = 8192
SAMPLED_ROWS = 1000  # of a csv file, to see which columns hold numbers
CSV_SUFFIXES = (".csv", ".csv.gz", ".csv.bz2", ".csv.zst")


class Table(ABC):
    """One file of profiles.

    Attributes
    ----------
    path
        The file.
    columns
        Names of the columns that can be read as text.
    numeric
        Names of the columns that hold numbers, in the order of the file. For csv: see `CsvTable`.
    """

    path: Path
    columns: list[str]
    numeric: list[str]

    @abstractmethod
    def text(self, columns: Sequence[str]) -> pd.DataFrame:
        """Return the named columns of all rows as str or None."""

    @abstractmethod
    def numbers(self, names: Sequence[str]) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (first row, float32 (rows, names)) of blocks of rows; a missing number is NaN.

        Raises
        ------
        MetadataError
            If a column holds something else than numbers.
        """


class CsvTable(Table):
    """A comma-separated file, packed or not.

    Its numeric columns are those that hold at least one number in the first 1,000 rows, and nothing else than numbers
    and empty cells; a column that holds both numbers and text there is in `mixed`.

    Attributes
    ----------
    mixed
        Column to an example of its text.
    """

    def __init__(self, path: Path):
        self.path = path
        self.columns = csv_header(path)
        self._types: tuple[list[str], dict[str, str]] | None = None

    @property
    def numeric(self) -> list[str]:
        """Names of the columns that hold numbers."""
        return self._sample()[0]

    @property
    def mixed(self) -> dict[str, str]:
        """Columns that hold numbers and text, each with an example of its text."""
        return self._sample()[1]

    def _sample(self) -> tuple[list[str], dict[str, str]]:
        if self._types is None:
            try:
                frame = pd.read_csv(
                    self.path, nrows=SAMPLED_ROWS, dtype=str, index_col=False, keep_default_na=False,
                    encoding="utf-8-sig",
                )  # fmt: skip
            except (UnicodeDecodeError, pd.errors.ParserError):
                frame = read_table(self.path)  # which says what is wrong, and where
            frame.columns = self.columns
            numeric, mixed = [], {}
            for name in self.columns:
                values = frame[name].fillna("")
                filled = values[~values.isin(("", "NA", "NaN", "nan", "null", "N/A", "#N/A"))]
                is_number = pd.to_numeric(filled, errors="coerce").notna()
                if len(filled) and is_number.all():
                    numeric.append(name)
                elif is_number.any():
                    mixed[name] = filled[~is_number].iloc[0]
            self._types = numeric, mixed
        return self._types

    def text(self, columns: Sequence[str]) -> pd.DataFrame:
        """Return the named columns as str or None."""
        return read_table(self.path, columns=columns)

    def numbers(self, names: Sequence[str]) -> Iterator[tuple[int, np.ndarray]]:
        """Yield blocks of rows of the named columns as float32."""
        frame = read_table(self.path, numbers=lambda _: True, columns=names)
        for start in range(0, len(frame), ROWS_AT_A_TIME):
            yield start, _float32(frame.iloc[start : start + ROWS_AT_A_TIME].to_numpy())


class ParquetTable(Table):
    """A parquet file, read a block of rows at a time."""

    def __init__(self, path: Path):
        self.path = path
        try:
            schema = pq.read_schema(path)
        except FileNotFoundError:
            raise MetadataError(f"{path}: no such file; check the path") from None
        except (pa.ArrowInvalid, OSError) as error:
            raise MetadataError(f"{path}: not a readable parquet file ({error}); write or fetch it again") from error
        self.columns = list(schema.names)
        self.numeric = [field.name for field in schema if _is_number(field.type)]
        self._types = {field.name: field.type for field in schema}

    def text(self, columns: Sequence[str]) -> pd.DataFrame:
        """Return the named columns as str or None."""
        return read_table(self.path, columns=columns)

    def numbers(self, names: Sequence[str]) -> Iterator[tuple[int, np.ndarray]]:
        """Yield blocks of rows of the named columns as float32."""
        wrong = [f"{name} ({self._types[name]})" for name in names if not _is_number(self._types[name])]
        if wrong:
            raise MetadataError(
                f"{self.path}: columns {_shown(wrong)} hold no numbers; leave them out (profiles.features.exclude)"
            )
        start = 0
        with pq.ParquetFile(self.path) as file:
            for batch in file.iter_batches(ROWS_AT_A_TIME, columns=list(names), use_threads=False):
                block = np.empty((len(batch), len(names)), np.float32)
                for j, name in enumerate(names):
                    block[:, j] = _float32(batch.column(name).to_numpy(zero_copy_only=False))
                yield start, block
                start += len(batch)


class H5adTable(Table):
    """An AnnData file: its obs (and their index) are text, its X numbers."""

    INDEX = "index"

    def __init__(self, path: Path):
        self.path = path
        with self._open() as adata:
            self._index = str(adata.obs.index.name or self.INDEX)
            self.columns = [self._index, *(str(c) for c in adata.obs.columns if str(c) != self._index)]
            self.numeric = [str(name) for name in adata.var_names]
            if adata.X is None:
                raise MetadataError(f"{path}: holds no X; write the profiles there")

    @contextlib.contextmanager
    def _open(self) -> Iterator[anndata.AnnData]:
        import anndata

        if not self.path.is_file():
            raise MetadataError(f"{self.path}: no such file; check the path")
        try:
            adata = anndata.read_h5ad(self.path, backed="r")
        except (OSError, KeyError, ValueError) as error:
            raise MetadataError(f"{self.path}: not a readable h5ad file ({error}); write it again") from error
        try:
            yield adata
        finally:
            adata.file.close()

    def text(self, columns: Sequence[str]) -> pd.DataFrame:
        """Return the named columns of obs as str or None."""
        with self._open() as adata:
            obs, index = adata.obs, adata.obs_names
        found = {name: pd.Series(index, dtype=object) if name == self._index else obs[name] for name in columns}
        return pd.DataFrame(
            {
                name: pd.Series([None if pd.isna(v) or str(v) == "" else str(v) for v in values], dtype=object)
                for name, values in found.items()
            },
            columns=list(columns),
        )

    def numbers(self, names: Sequence[str]) -> Iterator[tuple[int, np.ndarray]]:
        """Yield blocks of rows of the named variables as float32."""
        with self._open() as adata:
            at = pd.Index(adata.var_names.astype(str)).get_indexer(list(names))
            for start in range(0, adata.n_obs, ROWS_AT_A_TIME):
                block = adata.X[start : start + ROWS_AT_A_TIME]
                yield start, _float32((block if isinstance(block, np.ndarray) else block.toarray())[:, at])


def open_table(path: str | os.PathLike) -> Table:
    """Return the table in a file, by its suffix.

    Raises
    ------
    MetadataError
        If the file is missing, unreadable or of another kind, or names a column twice.
    """
    path = Path(path)
    if path.suffix == ".parquet":
        table: Table = ParquetTable(path)
    elif path.suffix == ".h5ad":
        table = H5adTable(path)
    elif path.name.endswith(CSV_SUFFIXES):
        table = CsvTable(path)
    else:
        raise MetadataError(f"{path}: unknown kind of file; known are {', '.join(CSV_SUFFIXES)}, .parquet and .h5ad")
    for names in (table.columns, table.numeric):
        doubled = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        if doubled:
            raise MetadataError(f"{path}: column {_shown(doubled)} stands twice; keep one of them")
    return table


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_decimal(kind)


def _float32(values: np.ndarray) -> np.ndarray:
    # a number too large for float32 becomes inf, which counts as missing and is said
    with np.errstate(over="ignore"):
        return np.asarray(values, dtype=np.float64 if values.dtype == object else None).astype(np.float32)


def _shown(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
