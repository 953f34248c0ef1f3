"""Reading and checking well metadata in the published RxRx3-core columns.

What comes in is a csv or parquet file; what goes out is a frame of the canonical obs columns with every well's control
status. Columns are read by name with explicit dtypes; an empty cell is null, but a gene called NA is a gene. The
reading itself, `read_table`, knows nothing of wells and serves any table that a user brings.
"""

from __future__ import annotations

import csv
import io
import os
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pandera.pandas as pa
import pyarrow
import pyarrow.compute
import pyarrow.csv
import pyarrow.parquet

from phenoica import files, schema
from phenoica.errors import AddressError, MetadataError
from phenoica.plates.address import edge_distance, normalise_address, parse_address

LABEL = "well_type_label"  # newer files only
PUBLISHED_COLUMNS = (
    "well_id", "experiment_name", "plate", "address", "gene", "treatment", "SMILES", "concentration",
    "perturbation_type", "cell_type", LABEL,
)  # fmt: skip
TEXT_COLUMNS = tuple(c for c in PUBLISHED_COLUMNS if c not in ("concentration", LABEL))
NO_NUMBER = ("NA", "N/A", "NaN", "nan", "null", "None")  # what programs write for an empty cell of a number column
MAX_LISTED = 20
# bytes of a csv file that are parsed at once; a row must fit into one. Where a block ends between the two characters of
# a Windows line end inside a quoted cell, Arrow keeps the first of them only
BLOCK = 1 << 24
SAVE_AS = "save it as comma-separated UTF-8 text (in Excel: CSV UTF-8)"

_MONTH = "(?:jan|feb|mar|apr|may|june?|july?|aug|sept?|oct|nov|dec)"
_DATE = re.compile(
    rf"\d{{1,2}}[-. /]{{1,2}}{_MONTH}(?:[-. /]{{1,2}}\d{{2,4}})?|{_MONTH}[-. /]\d{{1,4}}|"
    r"\d{4}-\d\d?-\d\d?(?: 00:00:00)?|\d\d?[/.]\d\d?[/.]\d{2,4}",
    re.IGNORECASE,
)


def read_table(
    path: str | os.PathLike, *, numbers: Callable[[str], bool] | None = None, columns: Sequence[str] | None = None
) -> pd.DataFrame:
    """Read a table as it is written: text stays text, and only an empty cell is null.

    Plate ids keep their spelling (08, 8.0, 123_456); NA, NaN, None and null are texts like any other. A csv file is
    comma-separated UTF-8, with or without a byte order mark, with the line ends of any system; quoted cells may hold
    commas, doubled quotes and line ends; blank lines are skipped; .gz, .bz2 and .zst are unpacked. A file that starts
    like parquet is read as parquet: null is null there, and a number in a text column becomes its text.

    Parameters
    ----------
    path
        The file.
    numbers
        Says of a column's name whether it holds numbers: those become float64, with NaN for a cell that is empty or
        says NA or NaN. Default: every column is text.
    columns
        Names of the columns to read; they must be there. Default: all, in the order of the file.

    Returns
    -------
    DataFrame
        The columns in the order asked for, names without surrounding spaces: str or None (object), or float64.

    Raises
    ------
    MetadataError
        If the file cannot be opened, is empty, is not UTF-8 (with the line and the byte), is separated by semicolons
        or tabs, names a column twice or not at all, has a row with more or fewer cells than the header, or a cell
        in a column of numbers that is none. Rows are counted from 1 below the header.
    """
    path = Path(path)
    try:
        with path.open("rb") as handle:
            start = handle.read(4)
    except FileNotFoundError:
        raise MetadataError(f"{path}: no such file; check the path") from None
    except OSError as error:
        raise MetadataError(f"{path}: cannot be opened: {error.strerror}; check its permissions") from None
    if not start:
        raise MetadataError(f"{path}: the file is empty; it must have a header and a row for each well")
    is_number = numbers or (lambda _: False)
    if start == b"PAR1" or path.suffix == ".parquet":
        return _read_parquet(path, is_number, columns)
    if start == b"PK\x03\x04":
        raise MetadataError(f"{path}: is a spreadsheet or a zip file, no text; {SAVE_AS}")
    return _read_csv(path, is_number, columns)


def csv_header(path: str | os.PathLike) -> list[str]:
    """Return the names of the columns of a csv file; raises MetadataError as `read_table` does."""
    return list(read_table(path, columns=()).columns)


def _read_csv(path: Path, is_number: Callable[[str], bool], columns: Sequence[str] | None) -> pd.DataFrame:
    header: list[str] = []
    try:
        with pyarrow.input_stream(path, compression="detect") as stream:
            records = csv.reader(io.TextIOWrapper(stream, encoding="utf-8-sig", newline=""))
            header = next((record for record in records if record), [])
        names = _column_names(header, path)
        if columns is not None and not len(columns):
            return pd.DataFrame(columns=names)  # pyarrow would take an empty list for all columns
        raw = dict(zip(names, header, strict=True))
        names = names if columns is None else list(columns)
        types = {raw[name]: pyarrow.float64() if is_number(name) else pyarrow.string() for name in names}
        with pyarrow.input_stream(path, compression="detect") as stream:
            table = pyarrow.csv.read_csv(
                stream,
                read_options=pyarrow.csv.ReadOptions(use_threads=False, block_size=BLOCK),  # so errors name the row
                parse_options=pyarrow.csv.ParseOptions(newlines_in_values=True),
                convert_options=pyarrow.csv.ConvertOptions(
                    column_types=types, strings_can_be_null=False, include_columns=list(types)
                ),
            )
    except (UnicodeDecodeError, csv.Error, pyarrow.ArrowInvalid, OSError) as error:
        raise MetadataError(f"{path}: {_no_text(path) or _no_csv(str(error), header)}") from error
    texts = [name for name in names if not is_number(name)]
    table = table.rename_columns(names)
    if any(pyarrow.compute.any(pyarrow.compute.match_substring(table[name], "\0")).as_py() for name in texts):
        raise MetadataError(f"{path}: {_no_text(path)}")
    frame = table.to_pandas()
    for name in texts:
        frame[name] = frame[name].astype(object).mask(frame[name] == "", None)
    return frame


def _read_parquet(path: Path, is_number: Callable[[str], bool], wanted: Sequence[str] | None) -> pd.DataFrame:
    try:
        table = pyarrow.parquet.read_table(path, columns=None if wanted is None else list(wanted))
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise MetadataError(f"{path}: not a readable parquet file ({error}); write or fetch it again") from error
    names = _column_names(table.column_names, path)
    columns = {}
    for name, column in zip(names, table.columns, strict=True):
        if is_number(name):
            try:
                columns[name] = column.cast(pyarrow.float64()).to_pandas()
            except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError) as error:
                raise MetadataError(f"{path}: column {name} holds {column.type}, not numbers: {error}") from error
        else:
            # a float column has NaN where pandas had nothing; text of such a cell would be a gene named nan
            values = (None if v is None or v != v else v for v in column.to_pylist())
            columns[name] = pd.Series([v if v is None else str(v) or None for v in values], dtype=object)
    return pd.DataFrame(columns)


def _column_names(header: list[str], path: Path) -> list[str]:
    """Return the names of the columns without surrounding spaces, or say what is wrong with the header."""
    names = [name.strip() for name in header]
    for separator, word in ((";", "semicolons"), ("\t", "tabs")):
        if len(names) == 1 and separator in names[0]:
            raise MetadataError(f"{path}: is separated by {word}, not by commas; {SAVE_AS}")
    doubled = sorted({name for name in names if names.count(name) > 1 and name})
    if doubled:
        raise MetadataError(f"{path}: column {', '.join(doubled)} stands twice in the header; keep one of them")
    if "" in names:
        raise MetadataError(
            f"{path}: column {names.index('') + 1} of {len(names)} has no name in the header; name or remove it"
        )
    return names


def _no_text(path: Path) -> str | None:
    """Say where a csv file stops being UTF-8 text, or has a zero byte, which h5ad cannot store; None if it does not."""
    try:
        with pyarrow.input_stream(path, compression="detect") as stream:
            for number, line in enumerate(io.BufferedReader(stream), 1):
                if number == 1 and line[:2] in (b"\xff\xfe", b"\xfe\xff"):
                    return f"is UTF-16 text, not UTF-8; {SAVE_AS}"
                if b"\0" in line:
                    return f"line {number}, byte {line.index(0) + 1} is zero, so it is no UTF-8 text; {SAVE_AS}"
                try:
                    line.decode("utf-8")
                except UnicodeDecodeError as error:
                    byte = line[error.start : error.start + 1]
                    return (
                        f"is not UTF-8: line {number}, byte {error.start + 1} is 0x{byte.hex().upper()} "
                        f"({byte.decode('latin-1')!r} if the file is Latin-1); {SAVE_AS}"
                    )
    except OSError:  # not unpacked to the end: the caller has the reason
        return None
    return None


def _no_csv(reason: str, header: list[str]) -> str:
    """Turn what the csv reader says into the row, the column and what to do."""
    if match := re.search(r"Row #(\d+): Expected (\d+) columns, got (\d+): (.*)", reason, re.DOTALL):
        row, expected, found, text = match.groups()
        shown = text if len(text) <= 80 else text[:80] + "..."
        return (
            f"row {int(row) - 1} has {found} cells and the header {expected}: {shown!r}; quote cells that hold commas "
            "and close every quote; if it is the last row, the file may be cut off"
        )
    if match := re.search(r"In CSV column #(\d+): Row #(\d+): .* invalid value (.*)", reason, re.DOTALL):
        column, row, value = match.groups()
        return f"row {int(row) - 1}, {header[int(column)]}: {value} is no number"
    if "Empty CSV file" in reason:
        return "the file holds no rows" if header else "the file is empty"
    return f"cannot be read as a csv file: {reason}"


def strip_spaces(frame: pd.DataFrame, columns: Collection[str], path: str | os.PathLike) -> None:
    """Remove spaces around the texts of the given columns, in place, and warn once with examples.

    A control named "DMSO " would otherwise be no control. A cell of spaces alone becomes null.
    """
    touched = []
    for column in columns:
        stripped = frame[column].str.strip()
        differs = frame[column].notna() & (stripped != frame[column])
        touched += [(int(row) + 1, column, frame[column].iloc[row]) for row in np.flatnonzero(differs)]
        frame[column] = stripped.astype(object).mask(stripped.isna() | (stripped == ""), None)
    if touched:
        touched.sort(key=lambda found: found[0])
        shown = ", ".join(f"row {row}, {column}: {value!r}" for row, column, value in touched[:3])
        more = ", ..." * (len(touched) > 3)
        warnings.warn(f"{path}: spaces around {len(touched)} labels were removed ({shown}{more})", stacklevel=2)


def warn_dates(frame: pd.DataFrame, columns: Collection[str], path: str | os.PathLike) -> None:
    """Warn once, with examples, of labels that look like dates: a spreadsheet writes 2-Sep for the gene SEPT2."""
    found = {}
    for column in columns:
        labels = frame[column].dropna()
        for value in labels[labels.map(lambda text: _DATE.fullmatch(text) is not None)].unique():
            found.setdefault(value, (int(np.flatnonzero(frame[column] == value)[0]) + 1, column))
    if found:
        shown = ", ".join(f"{value} (row {row}, {column})" for value, (row, column) in list(found.items())[:5])
        more = ", ..." * (len(found) > 5)
        warnings.warn(
            f"{path}: {len(found)} labels look like dates: {shown}{more}; a spreadsheet makes 2-Sep of the gene SEPT2 "
            "and 1-Mar of MARCH1. They are used as they are; mend them if they are genes",
            stacklevel=2,
        )


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
        As `read_table`; else listing every problem with its row (counted from 1 below the header).

    Warns
    -----
    UserWarning
        If spaces around labels were removed, or genes or treatments look like dates.
    """
    path = Path(path)
    frame = read_table(path)
    missing = [c for c in (*TEXT_COLUMNS, "concentration") if c not in frame.columns]
    if missing:
        raise MetadataError(f"{path}: columns {', '.join(missing)} are missing; present are {', '.join(frame.columns)}")
    if frame.empty:
        raise MetadataError(f"{path}: the file holds no wells")
    if LABEL not in frame.columns:
        frame[LABEL] = None
    frame = frame[[*TEXT_COLUMNS, "concentration", LABEL]]
    strip_spaces(frame, frame.columns, path)
    warn_dates(frame, ("gene", "treatment"), path)
    frame["concentration"] = frame["concentration"].mask(frame["concentration"].isin(NO_NUMBER), None)
    _validate(frame, path, plate_format)
    as_written = frame["address"]
    frame["address"] = [normalise_address(a, plate_format) for a in frame["address"]]
    frame["concentration"] = pd.to_numeric(frame["concentration"]).astype(np.float64)
    _check_ids(frame, as_written, path)
    return frame


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
        lambda s: np.isfinite(pd.to_numeric(s, errors="coerce")),
        error="not a finite number; write the number alone, in the same unit in every row",
        ignore_na=True,
    )


def _names_a_file() -> Any:
    return pa.Check(lambda s: s.map(files.is_file_name), error="cannot name a page; use no / \\ : and no leading dot")


def _validate(frame: pd.DataFrame, path: Path, plate_format: int) -> None:
    required = {
        "well_id": pa.Column(object, unique=True, report_duplicates="exclude_first"),
        "experiment_name": pa.Column(object, _names_a_file()),
        "plate": pa.Column(object, _names_a_file()),
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
    """Refuse ids that contradict their parts or have two meanings, and two rows of one well.

    Two rows are of one well also under two spellings of its address.
    """
    plate_id = frame["experiment_name"] + "_" + frame["plate"]
    _check_plate_ids(frame, plate_id, path)
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


def _check_plate_ids(frame: pd.DataFrame, plate_id: pd.Series, path: Path) -> None:
    """Refuse two plates of one id: plate 123_456 of experiment e would be taken for plate 456 of experiment e_123."""
    plates = pd.DataFrame({"id": plate_id, "experiment": frame["experiment_name"], "plate": frame["plate"]})
    plates = plates.drop_duplicates()
    doubled = plates[plates["id"].duplicated(keep=False)]
    if len(doubled):
        name = doubled["id"].iloc[0]
        one, other = doubled.index[doubled["id"] == name][:2]
        raise MetadataError(
            f"{path}: rows {one + 1} and {other + 1}: plate {frame['plate'][one]!r} of experiment "
            f"{frame['experiment_name'][one]!r} and plate {frame['plate'][other]!r} of experiment "
            f"{frame['experiment_name'][other]!r} have one and the same id {name!r}; rename one of them"
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
