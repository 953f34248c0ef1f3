"""Reading and checking well metadata in the published RxRx3-core columns.

What comes in is a csv or parquet file; what goes out is a frame of the canonical obs columns with every well's control
status. Columns are read by name with explicit dtypes; an empty cell is null, but a gene called NA is a gene.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pandera.pandas as pa

from phenoica import schema
from phenoica.errors import AddressError, MetadataError
from phenoica.plates.address import edge_distance, normalise_address, parse_address

TEXT_COLUMNS = (
    "well_id", "experiment_name", "plate", "address", "gene", "treatment", "SMILES", "perturbation_type", "cell_type",
)  # fmt: skip
LABEL = "well_type_label"  # newer files only
MAX_LISTED = 20


def read_metadata(path: str | os.PathLike, plate_format: int = 1536) -> pd.DataFrame:
    """Read and validate a metadata file.

    Parameters
    ----------
    path
        csv (optionally compressed) or parquet with the published columns; `well_type_label` may be absent.
    plate_format
        96, 384 or 1536: which addresses exist.

    Returns
    -------
    DataFrame
        The published columns: text as str or None, `concentration` as float64, `address` canonical (AA02), and
        `well_type_label` (None where the file has none).

    Raises
    ------
    MetadataError
        Listing every problem with its row (counted from 1 below the header).
    """
    path = Path(path)
    if not path.is_file():
        raise MetadataError(f"{path}: no such metadata file; set plates.metadata")
    frame = _read(path)
    missing = [c for c in (*TEXT_COLUMNS, "concentration") if c not in frame.columns]
    if missing:
        raise MetadataError(f"{path}: columns {', '.join(missing)} are missing; present are {', '.join(frame.columns)}")
    if frame.empty:
        raise MetadataError(f"{path}: the file holds no wells")
    if LABEL not in frame.columns:
        frame[LABEL] = None
    frame = frame[[*TEXT_COLUMNS, "concentration", LABEL]]
    _validate(frame, path, plate_format)
    as_written = frame["address"]
    frame["address"] = [normalise_address(a, plate_format) for a in frame["address"]]
    frame["concentration"] = pd.to_numeric(frame["concentration"]).astype(np.float64)
    _check_ids(frame, as_written, path)
    return frame


def _read(path: Path) -> pd.DataFrame:
    if path.suffix == ".parquet":
        frame = pd.read_parquet(path)
        texts = [c for c in (*TEXT_COLUMNS, LABEL) if c in frame.columns]
        for column in texts:
            values = frame[column]
            frame[column] = values.where(values.isna(), values.astype(str)).astype(object)
    else:
        try:
            # every cell as text and only the empty one as null: a gene named NA, NaN or None is a gene
            frame = pd.read_csv(path, dtype=str, keep_default_na=False, na_values=[""], encoding="utf-8-sig")
        except (UnicodeDecodeError, pd.errors.ParserError, pd.errors.EmptyDataError) as error:
            raise MetadataError(f"{path}: cannot be read as a UTF-8 csv file: {error}") from error
    return frame.astype(object).where(frame.notna(), None)


def _is_address(plate_format: int) -> Any:
    def holds(series: pd.Series) -> pd.Series:
        def good(value: str) -> bool:
            try:
                parse_address(value, plate_format)
            except AddressError:
                return False
            return True

        return series.map(good)

    return pa.Check(holds, error=f"not a well of a {plate_format}-well plate")


def _is_number() -> Any:
    return pa.Check(
        lambda s: np.isfinite(pd.to_numeric(s, errors="coerce")), error="not a finite number", ignore_na=True
    )


def _validate(frame: pd.DataFrame, path: Path, plate_format: int) -> None:
    required = {
        "well_id": pa.Column(object, unique=True, report_duplicates="exclude_first"),
        "experiment_name": pa.Column(object),
        "plate": pa.Column(object),
        "address": pa.Column(object, _is_address(plate_format)),
        "treatment": pa.Column(object),
        "perturbation_type": pa.Column(object),
        "cell_type": pa.Column(object, nullable=True),
        "gene": pa.Column(object, nullable=True),
        "SMILES": pa.Column(object, nullable=True),
        "concentration": pa.Column(object, _is_number(), nullable=True),
    }
    try:
        pa.DataFrameSchema(required).validate(frame, lazy=True)
    except pa.errors.SchemaErrors as error:
        cases = error.failure_cases.sort_values(["index", "column"], kind="stable")
        lines = [
            f"  row {int(case.index) + 1}, {case.column}: {case.failure_case!r}: {_reason(str(case.check))}"
            for case in cases.itertuples(index=False)
        ]
        more = f"\n  and {len(lines) - MAX_LISTED} more" if len(lines) > MAX_LISTED else ""
        raise MetadataError(
            f"{path}: {len(lines)} problem{'s' * (len(lines) > 1)}; mend these rows:\n"
            + "\n".join(lines[:MAX_LISTED])
            + more
        ) from None


def _reason(check: str) -> str:
    return {"not_nullable": "must not be empty", "field_uniqueness": "well id stands more than once"}.get(check, check)


def _check_ids(frame: pd.DataFrame, as_written: pd.Series, path: Path) -> None:
    """Refuse ids that contradict their parts, and two rows of one well (also under two spellings of an address)."""
    plate_id = frame["experiment_name"] + "_" + frame["plate"]
    expected = plate_id + "_" + frame["address"]
    other = (frame["well_id"] != expected) & (frame["well_id"] != plate_id + "_" + as_written)
    if other.any():
        at = int(np.flatnonzero(other)[0])
        raise MetadataError(
            f"{path}: row {at + 1}: well_id is {frame['well_id'].iloc[at]!r} but experiment, plate and address say "
            f"{expected.iloc[at]!r} ({int(other.sum())} such rows); make them agree"
        )
    doubled = expected.duplicated()
    if doubled.any():
        at = int(np.flatnonzero(doubled)[0])
        raise MetadataError(
            f"{path}: row {at + 1}: well {expected.iloc[at]} stands more than once; keep one row for each well"
        )


def wells_from_metadata(metadata: pd.DataFrame, plates_config: Mapping[str, Any], seed: int) -> pd.DataFrame:
    """Turn published metadata columns into obs columns with control and control_role.

    Parameters
    ----------
    metadata
        As from `read_metadata`.
    plates_config
        The `plates` section of the configuration.
    seed
        Seed of the split of negative controls into fit and reference.

    Returns
    -------
    DataFrame
        `schema.WELL_COLUMNS`, ordered by experiment, plate, row, column; well_id is
        `{experiment}_{plate}_{address}`.
    """
    plate_format = plates_config["plate_format"]
    positions = [parse_address(a, plate_format) for a in metadata["address"]]
    control, _ = classify_controls(metadata, plates_config)
    gene = metadata["gene"].where(metadata["gene"].notna(), metadata["treatment"])
    perturbation = gene.where(control != schema.NEGATIVE, metadata["treatment"])
    wells = pd.DataFrame({
        schema.WELL_ID: metadata["experiment_name"] + "_" + metadata["plate"] + "_" + metadata["address"],
        schema.EXPERIMENT: metadata["experiment_name"],
        schema.PLATE: metadata["plate"],
        schema.PLATE_ID: metadata["experiment_name"] + "_" + metadata["plate"],
        schema.ADDRESS: metadata["address"],
        schema.ROW: np.array([p[0] for p in positions], np.int16),
        schema.COLUMN: np.array([p[1] for p in positions], np.int16),
        schema.EDGE_DISTANCE: np.array([edge_distance(*p, plate_format) for p in positions], np.int16),
        schema.PERTURBATION: perturbation,
        schema.TREATMENT: metadata["treatment"],
        schema.PERTURBATION_TYPE: metadata["perturbation_type"],
        schema.CONCENTRATION: metadata["concentration"],
        schema.SMILES: metadata["SMILES"],
        schema.CELL_TYPE: metadata["cell_type"],
        schema.CONTROL: control,
    })  # fmt: skip
    wells = wells.sort_values(
        [schema.EXPERIMENT, schema.PLATE, schema.ROW, schema.COLUMN], kind="stable", ignore_index=True
    )
    wells[schema.CONTROL_ROLE] = control_roles(wells, plates_config["fit_control_share"], seed)
    return wells


def classify_controls(metadata: pd.DataFrame, plates_config: Mapping[str, Any]) -> tuple[pd.Series, pd.Series]:
    """Say which wells are controls, and whether that was read from well_type_label or inferred from the config.

    Where a file labels cutting controls (a `well_type_label` that contains "cutting"), only the label decides;
    otherwise `plates.cutting_controls` does, and the source is "inferred".

    Returns
    -------
    (Series, Series)
        `control` (none, negative, positive, cutting) and its source ("label", "config", "inferred" or "").
    """
    treatment, gene, kind = (metadata[c].fillna("") for c in ("treatment", "gene", "perturbation_type"))
    label = metadata[LABEL].fillna("").astype(str).str.lower()
    control = pd.Series(schema.NONE, index=metadata.index, dtype=object)
    source = pd.Series("", index=metadata.index, dtype=object)

    def mark(where: pd.Series, value: str, origin: str) -> None:
        control[where] = value
        source[where] = origin

    positives, negatives = plates_config["positive_controls"], plates_config["negative_controls"]
    mark(treatment.isin(positives) | gene.isin(positives), schema.POSITIVE, "config")
    labelled = label.str.contains("cutting")
    if labelled.any():
        mark(labelled, schema.CUTTING, "label")
    else:
        mark(treatment.isin(plates_config["cutting_controls"]), schema.CUTTING, "inferred")
    mark(treatment.isin(negatives) | gene.isin(negatives) | kind.isin(negatives), schema.NEGATIVE, "config")
    return control, source


def control_roles(wells: pd.DataFrame, fit_share: float, seed: int) -> np.ndarray:
    """Split each plate's negative controls into fit and reference wells, at random from the seed.

    The draw of a plate depends on the seed and the plate's own name only, so adding plates moves no other split.
    `fit_share` is rounded to whole wells; a plate of two or more controls keeps at least one in each role.
    """
    import zlib

    role = np.full(len(wells), schema.NONE, dtype=object)
    negative = wells[schema.CONTROL].to_numpy() == schema.NEGATIVE
    for plate_id, rows in wells[negative].groupby(schema.PLATE_ID, sort=True).indices.items():
        rows = np.flatnonzero(negative)[rows]
        n_fit = int(round(fit_share * len(rows)))
        if len(rows) >= 2:
            n_fit = min(max(n_fit, 1), len(rows) - 1)
        order = np.random.default_rng([seed, zlib.crc32(str(plate_id).encode())]).permutation(len(rows))
        role[rows] = schema.REFERENCE
        role[rows[order[:n_fit]]] = schema.FIT
    return role
