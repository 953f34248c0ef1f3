"""What the wells of a run of profiles are, and in which row of which file the vector of each is.

Tables that a user brings come in (`profiles` of the configuration): the files themselves, tables that are joined to
them, or published metadata that is joined on the well id. Out go metadata in the published columns, one row a well, and
what had to be left out. Features are not read here, only chosen.
"""

from __future__ import annotations

import glob
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from phenoica import schema
from phenoica.errors import AddressError, MetadataError
from phenoica.plates.address import normalise_address
from phenoica.plates.metadata import LABEL, MAX_LISTED, read_metadata, read_table, strip_spaces, warn_dates
from phenoica.plates.tables import CsvTable, Table, open_table

# our names in `profiles.columns` to the published columns of metadata
PUBLISHED = {
    "experiment": "experiment_name", "plate": "plate", "address": "address", "perturbation": "gene",
    "treatment": "treatment", "perturbation_type": "perturbation_type", "concentration": "concentration",
    "smiles": "SMILES", "cell_type": "cell_type", "well_type_label": LABEL, "cell_count": schema.CELL_COUNT,
}  # fmt: skip
NO_METADATA = "profile without metadata; add the well to the metadata"
NO_PROFILE = "metadata without a profile; no file holds the well"
DUPLICATE = "duplicated well id; the first row is used"
NO_TYPE = "not stated"
_LOCATION = [schema.PROFILE_FILE, schema.PROFILE_ROW]


def find_profiles(config: Mapping[str, Any]) -> list[Path]:
    """Return the files that `profiles.files` names, each once, in the order of their names.

    Raises
    ------
    MetadataError
        Naming the patterns that match nothing.
    """
    found: set[Path] = set()
    missing = []
    for pattern in config["profiles"]["files"]:
        matches = glob.glob(pattern) or ([pattern] if Path(pattern).is_file() else [])
        found.update(Path(m) for m in matches)
        missing += [repr(pattern)] * (not matches)
    if missing:
        raise MetadataError(f"profiles.files: {', '.join(missing)} matches no file; check the path")
    return sorted(found)


def joined_tables(config: Mapping[str, Any]) -> list[Path]:
    """Return the files of `profiles.tables`."""
    return [Path(table["file"]) for table in config["profiles"]["tables"]]


def profile_metadata(
    files: Sequence[Path], config: Mapping[str, Any], metadata_path: str | Path | None = None
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Say what each row of the files is.

    Parameters
    ----------
    files
        The files of profiles, in the order of their numbers.
    config
        The resolved configuration (`profiles`, `plates`).
    metadata_path
        Published metadata, joined on the well id; None where the files say themselves what their wells are.

    Returns
    -------
    (DataFrame, DataFrame)
        Published metadata columns (see `phenoica.plates.metadata.read_metadata`) with `profile_file`, `profile_row`
        and, where it is known, `cell_count` (float64, NaN = not given), one row a well; and the rows left out: well_id,
        reason, profile_file, profile_row (-1 where there is no row).

    Raises
    ------
    MetadataError
        Listing every problem with its file and row (counted from 1 below the header).
    """
    tables = [open_table(path) for path in files]
    if metadata_path is not None:
        return _joined_on_ids(tables, config, metadata_path)
    wanted = _wanted_columns(config["profiles"])
    rows = _read_rows(tables, wanted)
    for table in config["profiles"]["tables"]:
        rows = _join(rows, table, wanted, config["profiles"]["columns"]["concentration"])
    unknown = [c for c in wanted if c not in rows.columns]
    if unknown:
        raise MetadataError(
            f"{listed(files)}: columns {', '.join(map(repr, unknown))} of profiles.columns or profiles.batch are "
            f"in no file and no joined table; present are {', '.join(rows.columns.drop(_LOCATION)[:30])}"
        )
    metadata = _published(rows, config["profiles"], files)
    metadata = _checked(metadata, config["plates"]["plate_format"], files)
    return _first_of_each(metadata, files)


def _wanted_columns(profiles: Mapping[str, Any]) -> list[str]:
    """Return the columns of files and tables that have a use, each once."""
    names = [c for c in profiles["columns"].values() if c]
    names += [profiles["batch"]["column"]] if profiles["batch"]["column"] else []
    for table in profiles["tables"]:
        names += list(table["by"])
    return list(dict.fromkeys(names))


def used_columns(config: Mapping[str, Any]) -> list[str]:
    """Return the columns that say what a well is, and are therefore no features."""
    names = _wanted_columns(config["profiles"])
    return [*names, config["profiles"]["columns"]["well_id"] or schema.WELL_ID]


def _read_rows(tables: Sequence[Table], wanted: Sequence[str]) -> pd.DataFrame:
    """Return the wanted columns of all files, with the place of each row; the files must agree on which they have."""
    here = [c for c in wanted if any(c in table.columns for table in tables)]
    problems = [
        f"  {table.path}: lacks {', '.join(absent)}"
        for table in tables if (absent := [c for c in here if c not in table.columns])
    ]  # fmt: skip
    if problems:
        raise MetadataError("the files of profiles.files do not have the same columns:\n" + "\n".join(problems))
    frames = []
    for number, table in enumerate(tables):
        frame = table.text(here)
        if not len(frame):
            raise MetadataError(f"{table.path}: the file holds no wells")
        frames.append(frame.assign(**{schema.PROFILE_FILE: number, schema.PROFILE_ROW: np.arange(len(frame))}))
    return pd.concat(frames, ignore_index=True)


def _join(
    rows: pd.DataFrame, table: Mapping[str, Any], wanted: Sequence[str], concentration: str | None
) -> pd.DataFrame:
    """Add to the rows what a table says and the run uses; say what has no partner on either side."""
    name, left, right = table["file"], list(table["by"]), list(table["by"].values())
    columns = open_table(name).columns
    for keys, present, where in ((right, columns, "it"), (left, rows.columns, "neither the files nor a table before")):
        absent = [k for k in keys if k not in present]
        if absent:
            raise MetadataError(
                f"{name}: is joined on {', '.join(absent)} (profiles.tables), which {where} does not hold; present are "
                f"{', '.join(present[:30])}"
            )
    used = [c for c in wanted if c in columns and c not in rows.columns]
    if not used:
        raise MetadataError(f"{name}: holds no column that profiles.columns or profiles.batch names; do not join it")
    frame = read_table(name, columns=list(dict.fromkeys([*right, *used])))
    as_number = [c == concentration for c in left]
    ours, theirs = _keys(rows, left, as_number), _keys(frame, right, as_number)
    frame = _one_row_a_key(frame[used].assign(key=theirs).drop_duplicates(), used, name)
    at = pd.Index(frame.index, tupleize_cols=False).get_indexer(pd.Index(ours, tupleize_cols=False))
    for column in used:
        values = frame[column].to_numpy(dtype=object)
        rows[column] = [values[i] if i >= 0 else None for i in at]
    _say_lonely(at, ours, frame.index, name)
    return rows


def _one_row_a_key(frame: pd.DataFrame, used: Sequence[str], name: str) -> pd.DataFrame:
    """Return a table indexed by its keys; refuse one that says two things of a key."""
    twice = frame["key"].duplicated(keep=False)
    if twice.any():
        key = frame["key"][twice].iloc[0]
        values = frame[frame["key"] == key][used]
        varying = next(c for c in used if values[c].nunique(dropna=False) > 1)
        raise MetadataError(
            f"{name}: {int(frame['key'][twice].nunique())} keys stand on several rows that disagree, first "
            f"{_key_text(key)} ({varying}: {', '.join(map(str, values[varying].head(3)))}); keep one row a key, or "
            "join on more columns (profiles.tables, by)"
        )
    return frame.set_index("key")


def _say_lonely(at: np.ndarray, ours: Sequence[tuple], theirs: pd.Index, name: str) -> None:
    """Count the keys without a partner on the other side; refuse a join in which nothing meets."""
    lonely, unused = np.flatnonzero(at < 0), len(theirs) - len(set(at[at >= 0]))
    if len(lonely) == len(ours):
        raise MetadataError(
            f"{name}: no profile has a row here; its first key is {_key_text(theirs[0])}, that of the profiles "
            f"{_key_text(ours[0])}; check profiles.tables, by"
        )
    if len(lonely):
        first = _key_text(ours[lonely[0]])
        print(f"warning: {len(lonely)} of {len(ours)} profiles have no row in {name}, first {first}", file=sys.stderr)
    if unused:
        print(f"note: {unused} of {len(theirs)} keys of {name} belong to no profile", file=sys.stderr)


def _key_text(key: tuple) -> str:
    return " / ".join(map(str, key))


def _keys(frame: pd.DataFrame, columns: Sequence[str], as_number: Sequence[bool]) -> list[tuple]:
    """Return the keys of the rows: text as written, a concentration as a number (0.3 is 0.300000)."""
    parts = []
    for column, number in zip(columns, as_number, strict=True):
        values = frame[column]
        if number:
            parsed = pd.to_numeric(values, errors="coerce")
            values = parsed.astype(object).where(parsed.notna(), values)
        parts.append(values.astype(object).where(values.notna(), None))
    return list(zip(*parts, strict=True))


def _published(rows: pd.DataFrame, profiles: Mapping[str, Any], files: Sequence[Path]) -> pd.DataFrame:
    """Return the rows under the names of published metadata; the experiment may come from an expression."""
    frame = rows[_LOCATION].copy()
    for ours, published in PUBLISHED.items():
        column = profiles["columns"][ours]
        if column is not None:
            frame[published] = rows[column]
        elif ours != "cell_count":
            frame[published] = None
    batch = profiles["batch"]
    if batch["column"] is not None:
        pattern = re.compile(batch["pattern"])
        found = rows[batch["column"]].map(lambda text: (m := pattern.search(text)) and m[1], na_action="ignore")
        frame["experiment_name"] = found.astype(object).where(found.notna() & (found != ""), None)
        lost = np.flatnonzero(frame["experiment_name"].isna())
        if len(lost):
            value = rows[batch["column"]].iloc[lost[0]]
            raise MetadataError(
                f"{_place(frame, lost[0], files)}: profiles.batch.pattern {batch['pattern']!r} finds no experiment in "
                f"{batch['column']} = {value!r} ({len(lost)} such rows); mend the pattern"
            )
    texts = [c for c in PUBLISHED.values() if c in frame.columns]
    strip_spaces(frame, texts, listed(files))
    frame["gene"] = frame["gene"].where(frame["gene"].notna(), frame["treatment"])
    frame["treatment"] = frame["treatment"].where(frame["treatment"].notna(), frame["gene"])
    frame["perturbation_type"] = frame["perturbation_type"].where(frame["perturbation_type"].notna(), NO_TYPE)
    warn_dates(frame, ["gene", "treatment"], listed(files))
    return frame


def _checked(frame: pd.DataFrame, plate_format: int, files: Sequence[Path]) -> pd.DataFrame:
    """Return the rows with canonical addresses and numbers as numbers, or list what is wrong."""
    problems: list[tuple[int, str]] = []
    for column, what in (
        ("experiment_name", "experiment"), ("plate", "plate"), ("address", "address"), ("treatment", "perturbation"),
    ):  # fmt: skip
        problems += [(row, f"{what} is empty") for row in np.flatnonzero(frame[column].isna())]
    canonical: dict[str, str] = {}
    for address in frame["address"].dropna().unique():
        try:
            canonical[address] = normalise_address(address, plate_format)
        except AddressError as error:
            problems += [(row, str(error)) for row in np.flatnonzero(frame["address"] == address)]
    for column in ("concentration", schema.CELL_COUNT):
        if column in frame.columns:
            written = frame[column]
            numbers = pd.to_numeric(written, errors="coerce")
            bad = written.notna() & ~np.isfinite(numbers)
            problems += [(row, f"{column} {written.iloc[row]!r} is no finite number") for row in np.flatnonzero(bad)]
            frame[column] = numbers.astype(np.float64)
    if problems:
        problems.sort()
        lines = [f"  {_place(frame, row, files)}: {text}" for row, text in problems[:MAX_LISTED]]
        more = f"\n  and {len(problems) - MAX_LISTED} more" if len(problems) > MAX_LISTED else ""
        plural = "s" * (len(problems) > 1)
        raise MetadataError(f"{len(problems)} problem{plural} in the profiles; mend them:\n" + "\n".join(lines) + more)
    frame["address"] = frame["address"].map(canonical)
    frame[schema.WELL_ID] = frame["experiment_name"] + "_" + frame["plate"] + "_" + frame["address"]
    return frame


def _first_of_each(frame: pd.DataFrame, files: Sequence[Path]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Keep the first row of each well id; return the others as left out."""
    doubled = frame[schema.WELL_ID].duplicated()
    if doubled.sum() > (~doubled).sum():
        first = frame[schema.WELL_ID][doubled].iloc[0]
        raise MetadataError(
            f"{listed(files)}: {len(frame)} rows are of {int((~doubled).sum())} wells only, first {first}: more rows "
            "than one a well (sites, cells, or a plate column that does not tell the plates apart?). Average the rows "
            "of a well first, or mend profiles.columns"
        )
    columns = [schema.WELL_ID, *_LOCATION]
    return frame[~doubled].reset_index(drop=True), frame.loc[doubled, columns].assign(reason=DUPLICATE)


def _joined_on_ids(
    tables: Sequence[Table], config: Mapping[str, Any], metadata_path: str | Path
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Join the rows of the files with published metadata on the well id."""
    columns, files = config["profiles"]["columns"], [table.path for table in tables]
    key, count = columns["well_id"] or schema.WELL_ID, columns["cell_count"]
    rows = _read_rows(tables, [key, count] if count else [key])
    absent = [c for c in (key, count) if c and c not in rows.columns]
    if absent:
        raise MetadataError(
            f"{listed(files)}: column {', '.join(absent)} is missing; set profiles.columns, or leave out "
            f"plates.metadata if the files themselves say what their wells are; present are "
            f"{', '.join(tables[0].columns[:20])}"
        )
    empty = np.flatnonzero(rows[key].isna())
    if len(empty):
        raise MetadataError(f"{_place(rows, empty[0], files)}: {key} is empty ({len(empty)} such rows); mend them")
    metadata = read_metadata(metadata_path, config["plates"]["plate_format"])
    warn_dates(metadata, ["gene", "treatment"], metadata_path)
    canonical = metadata["experiment_name"] + "_" + metadata["plate"] + "_" + metadata["address"]
    # an id may be spelled as in the metadata, or with the canonical address
    position = pd.Series(np.arange(len(metadata)), index=canonical)
    spelled = pd.Series(np.arange(len(metadata)), index=metadata[schema.WELL_ID])
    position = pd.concat([position, spelled[~spelled.index.isin(position.index)]])
    at = position.index.get_indexer(rows[key])
    at = np.where(at >= 0, position.to_numpy()[at], -1)
    rows[schema.WELL_ID] = np.where(at >= 0, canonical.to_numpy()[at], rows[key])
    rows["at"] = at
    rows, left_out = _first_of_each(rows, files)
    unknown = rows["at"] < 0
    left_out = [left_out, rows.loc[unknown, [schema.WELL_ID, *_LOCATION]].assign(reason=NO_METADATA)]
    rows = rows[~unknown]
    bare = ~np.isin(np.arange(len(metadata)), rows["at"])
    lost = pd.DataFrame({schema.WELL_ID: canonical[bare], schema.PROFILE_FILE: -1, schema.PROFILE_ROW: -1})
    left_out.append(lost.assign(reason=NO_PROFILE))
    found = metadata.iloc[rows["at"]].reset_index(drop=True)
    found[_LOCATION] = rows[_LOCATION].to_numpy()
    if count:
        numbers = pd.to_numeric(rows[count], errors="coerce")
        bad = np.flatnonzero(rows[count].notna() & ~np.isfinite(numbers))
        if len(bad):
            raise MetadataError(
                f"{_place(rows, bad[0], files)}: {count} {rows[count].iloc[bad[0]]!r} is no finite number"
            )
        found[schema.CELL_COUNT] = numbers.to_numpy(np.float64)
    found[schema.WELL_ID] = canonical.iloc[rows["at"]].to_numpy()
    return found, pd.concat([f for f in left_out if len(f)] or left_out[:1], ignore_index=True)


def choose_features(tables: Sequence[Table], config: Mapping[str, Any]) -> list[str]:
    """Return the names of the features in the files, in the order of the first file.

    Those of `profiles.features.columns` and those that start with one of `prefix`; where neither is given, every
    numeric column that has no other use. None in whose name a pattern of `exclude` is found.

    Raises
    ------
    MetadataError
        If a named column is missing, nothing is chosen, a column holds numbers and text, or the files disagree.
    """
    section, used = config["profiles"]["features"], set(used_columns(config))
    excluded = [re.compile(pattern) for pattern in section["exclude"]]
    chosen = [_chosen_of(table, section, used, excluded) for table in tables]
    everything = list(dict.fromkeys(name for names in chosen for name in names))
    if not everything:
        raise MetadataError(
            f"{listed([t.path for t in tables])}: profiles.features chooses no column; its names start with "
            f"{', '.join(tables[0].columns[:5])}"
        )
    problems = []
    for table, names in zip(tables, chosen, strict=True):
        absent = [name for name in everything if name not in set(names)]
        if absent:
            problems.append(f"  {table.path}: lacks {len(absent)}, first {', '.join(absent[:3])}")
    if problems:
        raise MetadataError(
            "the files of profiles.files do not have the same features (exclude the ones that are not in all of them, "
            "profiles.features):\n" + "\n".join(problems)
        )
    return everything


def _chosen_of(
    table: Table, section: Mapping[str, Any], used: set[str], excluded: Sequence[re.Pattern[str]]
) -> list[str]:
    named, prefixes = section["columns"], tuple(section["prefix"])
    names = table.columns if isinstance(table, CsvTable) and (named or prefixes) else table.numeric
    absent = [name for name in named if name not in names]
    if absent:
        raise MetadataError(f"{table.path}: columns {', '.join(absent[:10])} of profiles.features.columns are missing")

    def is_feature(name: str) -> bool:
        if name in used or any(pattern.search(name) for pattern in excluded):
            return False
        return name in set(named) or name.startswith(prefixes) if named or prefixes else True

    mixed = {} if named or prefixes or not isinstance(table, CsvTable) else table.mixed
    mixed = {name: text for name, text in mixed.items() if is_feature(name)}
    if mixed:
        name, text = next(iter(mixed.items()))
        raise MetadataError(
            f"{table.path}: {len(mixed)} columns hold numbers and text, first {name} ({text!r}); mend them, or leave "
            "them out (profiles.features.exclude)"
        )
    return [name for name in names if is_feature(name)]


def feature_names(names: Sequence[str], config: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the features in their final order, and what they are called.

    Without `profiles.features.name` both are `names`. With it, features are ordered by the number at the end of their
    names (feature_2 before feature_10) and called NAME_000, NAME_001, ...

    Raises
    ------
    MetadataError
        If a name has no number at its end, or two have the same.
    """
    called = config["profiles"]["features"]["name"]
    if called is None:
        return list(names), list(names)
    numbers = [(int(match[1]) if (match := re.search(r"(\d+)$", name)) else None) for name in names]
    if None in numbers or len(set(numbers)) < len(numbers):
        raise MetadataError(
            "profiles.features.name is set, but the features are not told apart by a number at the end of their names, "
            f"such as {names[numbers.index(None)] if None in numbers else names[0]}; leave it out"
        )
    order = np.argsort(numbers, kind="stable")
    return [names[i] for i in order], [f"{called}_{i:03d}" for i in range(len(names))]


def _place(frame: pd.DataFrame, row: int, files: Sequence[Path]) -> str:
    """Return where a row stands, for a message."""
    at = frame.iloc[int(row)]
    return f"{files[int(at[schema.PROFILE_FILE])]}, row {int(at[schema.PROFILE_ROW]) + 1}"


def listed(files: Sequence[Path]) -> str:
    """Return the first of some files and how many more there are, for a message."""
    return str(files[0]) + (f" and {len(files) - 1} more" if len(files) > 1 else "")
