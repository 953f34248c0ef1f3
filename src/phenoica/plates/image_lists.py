"""Which image files there are and what they show, from a csv of paths or from the files' names.

What comes in is a csv, or a folder and a pattern (a regular expression with named groups, or the name of a built-in
one); what goes out is a table with a row a file or page: experiment, plate, address, site, channel, plane, path, page.
No image is opened here.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pandas as pd

from phenoica.errors import AddressError, ImageImportError
from phenoica.plates.address import format_address, normalise_address
from phenoica.plates.image_files import SUFFIXES
from phenoica.plates.metadata import MAX_LISTED, read_table

EXPERIMENT, PLATE, ADDRESS, SITE = "experiment", "plate", "address", "site"
CHANNEL, PLANE, PATH, PAGE = "channel", "plane", "path", "page"
LIST_COLUMNS = (EXPERIMENT, PLATE, ADDRESS, SITE, CHANNEL, PLANE, PATH, PAGE)
WELL_KEYS = [EXPERIMENT, PLATE, ADDRESS]
WELL = "well"  # how a csv and a pattern call the address

_GUID = r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}"
_TIFF = r"\.(?i:tiff?)"
#: built-in patterns, each for the end of a path relative to the folder
PATTERNS = {
    # MetaXpress: Plate_B03_s2_w1<GUID>.tif; site, wavelength and GUID may be missing, z as _z3 or as folder ZStep_3
    "imagexpress": r"(?:ZStep_(?P<zstep>\d+)/)?(?:(?P<plate>[^/]+?)_)??(?P<well>[A-Z]{1,2}\d{2})(?:_s(?P<site>\d+))?"
    rf"(?:_w(?P<channel>\d+?))?(?:_z(?P<plane>\d+))?(?P<thumb>_thumb)?(?:{_GUID})?{_TIFF}",
    # Opera Phenix and Operetta, Harmony 4 and later: r02c03f04p01-ch1sk1fk1fl1.tiff
    "harmony": rf"r(?P<row>\d+)c(?P<column>\d+)f(?P<site>\d+)p(?P<plane>\d+)-ch(?P<channel>\d+)sk\d+fk\d+fl\d+{_TIFF}",
    # Operetta, older Harmony: the record (rc) is the channel: r02c03f04p01rc2-ch1sk1fk1fl1.tiff
    "harmony-record": r"r(?P<row>\d+)c(?P<column>\d+)f(?P<site>\d+)p(?P<plane>\d+)rc(?P<channel>\d+)-ch\d+"
    rf"sk\d+fk\d+fl\d+{_TIFF}",
    # Columbus export: row and column, field, then time, plane and channel: 002003-4-001001001.tif
    "columbus": r"(?P<row>\d{3})(?P<column>\d{3})-(?P<site>\d+)-\d{3}(?P<plane>\d{3})(?P<channel>\d{3})" + _TIFF,
    # RxRx: experiment/Plate1/AA02_s1_w1.png, and the published keys as file names
    "rxrx": r"(?:(?P<experiment>[^/]+)/)?Plate(?P<plate>[^/]+)/(?P<well>[A-Za-z]{1,2}\d{2})_s(?P<site>\d+)_w?"
    r"(?P<channel>\d+)\.(?i:png|jp2|j2k|tiff?)",
}
EXAMPLES = {
    "imagexpress": "Plate_B03_s2_w1E75611A2-A874-4065-BDAC-EE2467105EEB.tif",
    "harmony": "r02c03f04p01-ch1sk1fk1fl1.tiff",
    "harmony-record": "r02c03f04p01rc2-ch1sk1fk1fl1.tiff",
    "columbus": "002003-4-001001001.tif",
    "rxrx": "gene-001/Plate1/AA02_s1_w1.png",
}
#: group of a pattern to column; several names for one thing, as microscopes call it
GROUPS = {
    "experiment": EXPERIMENT, "plate": PLATE, "well": WELL, "row": "row", "col": "column", "column": "column",
    "site": SITE, "field": SITE, "channel": CHANNEL, "wavelength": CHANNEL, "plane": PLANE, "z": PLANE,
    "zstep": PLANE, "thumb": "thumb",
}  # fmt: skip


@dataclass(frozen=True)
class ImageList:
    """The images to import.

    Attributes
    ----------
    base
        The folder that paths are relative to.
    images
        A row a file or page: `LIST_COLUMNS`. experiment, plate, address, path: str; site: int64; channel: str, or None
        where the file must say; plane and page: Int64, null where not said.
    wells
        What the list says of the wells: experiment, plate, address and further columns, a row a well; None if nothing.
    notes
        Sentences to tell the user: what was left out, and how much.
    """

    base: Path
    images: pd.DataFrame
    wells: pd.DataFrame | None
    notes: tuple[str, ...] = ()


def choose_images(
    listed: str | os.PathLike | None,
    folder: str | os.PathLike | None,
    pattern: str | None,
    *,
    folders: str | None = None,
    **more: Any,
) -> ImageList:
    """Read a list or search a folder: exactly one of them must be given; `more` goes to either.

    Raises
    ------
    ImageImportError
        If both or none is given, or an option that the other one needs; else as `read_list` and `find_images` do.
    """
    if (listed is None) == (folder is None):
        raise ImageImportError("give the images as --list FILE, or as --folder DIR with --pattern")
    if listed is not None:
        if pattern is not None or folders is not None:
            raise ImageImportError("--pattern and --folders read names of files; a --list says itself what images show")
        return read_list(listed, **more)
    if pattern is None:
        raise ImageImportError(f"--folder needs --pattern: {', '.join(PATTERNS)}, or a regular expression")
    return find_images(folder, pattern, folders=folders, **more)


def read_list(
    path: str | os.PathLike, *, experiment: str | None = None, plate: str | None = None, plate_format: int = 1536
) -> ImageList:
    """Read a csv with a row an image.

    Parameters
    ----------
    path
        csv (or parquet) with the columns experiment, plate, well, path and, where they are needed, site (default 1),
        channel (default: the file says), page (of a TIFF, from 1) and plane (z, from 1). Paths are relative to the
        csv. Further columns (treatment, gene, concentration, ...) describe the well.
    experiment, plate
        Values for a csv without the column.
    plate_format
        Which addresses exist.

    Raises
    ------
    MetadataError
        If the file is no readable table.
    ImageImportError
        Listing every row that cannot be used, and the files that do not exist.
    """
    path = Path(path)
    table = read_table(path)
    if table.empty:
        raise ImageImportError(f"{path}: the list holds no images")
    for column, value in ((EXPERIMENT, experiment), (PLATE, plate)):
        if value is not None:
            if column in table.columns:
                raise ImageImportError(f"{path}: has a column {column}, and --{column} is given too; keep one of them")
            table[column] = value
    missing = [c for c in (EXPERIMENT, PLATE, WELL, PATH) if c not in table.columns]
    if missing:
        raise ImageImportError(
            f"{path}: columns {', '.join(missing)} are missing; present are {', '.join(table.columns)}"
            + (" (or give --experiment and --plate)" if {EXPERIMENT, PLATE} & set(missing) else "")
        )
    known = {EXPERIMENT, PLATE, WELL, SITE, CHANNEL, PLANE, PATH, PAGE}
    more = [c for c in table.columns if c not in known]
    rows = [f"row {i + 1}" for i in range(len(table))]
    images = _checked(table.rename(columns={WELL: ADDRESS}), rows, str(path), plate_format)
    _check_files(images[PATH], path.parent, str(path))
    wells = None
    if more:
        wells = _one_row_a_well(pd.concat([images[WELL_KEYS], table[more]], axis=1), more, rows, str(path))
    return ImageList(path.parent, images, wells)


def find_images(
    folder: str | os.PathLike,
    pattern: str,
    *,
    folders: str | None = None,
    experiment: str | None = None,
    plate: str | None = None,
    plate_format: int = 1536,
) -> ImageList:
    """Find the image files below a folder and read from their names what they show.

    Parameters
    ----------
    folder
        Searched with all folders below it.
    pattern
        A name of `PATTERNS`, or a regular expression for the end of the path below `folder` (with /), with the named
        groups experiment, plate, well (or row and column; letters or numbers), site (or field), channel (or
        wavelength) and plane (or z). A file that a group `thumb` matches is skipped.
    folders
        A regular expression for the end of the path without the file name, with the groups experiment and plate.
    experiment, plate
        What neither says. An option goes before `folders`, and `folders` before `pattern`.
    plate_format
        Which addresses exist.

    Raises
    ------
    ImageImportError
        If the pattern cannot be used or matches nothing, or a value is missing or impossible.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ImageImportError(f"{folder}: no such folder of images")
    expression = compile_pattern(pattern)
    above = None if folders is None else _compile(folders, "folders")
    paths = _image_paths(folder)
    found, others, thumbs = [], [], 0
    for path in paths:
        values = parse_name(path, expression, above)
        if values is None:
            others.append(path)
        elif values.pop("thumb", None):
            thumbs += 1
        else:
            found.append({**values, PATH: path})
    if not found:
        raise ImageImportError(_nothing_found(folder, pattern, paths, thumbs))
    table = pd.DataFrame(found).astype(object)
    for column, value in ((EXPERIMENT, experiment), (PLATE, plate)):
        if value is not None:
            table[column] = value
    images = _checked(table.rename(columns={WELL: ADDRESS}), table[PATH].tolist(), str(folder), plate_format)
    notes = [f"{thumbs} thumbnails are skipped"] if thumbs else []
    if others:
        notes.append(f"{len(others)} image files do not match the pattern and are left out (first: {others[0]})")
    return ImageList(folder, images, None, tuple(notes))


def parse_name(path: str, pattern: re.Pattern, folders: re.Pattern | None = None) -> dict[str, str] | None:
    """Return what a path says, by column; `row` and `column` become `well`. None if the pattern does not match.

    Parameters
    ----------
    path
        Relative to the folder that is searched, with /.
    pattern, folders
        As `find_images` compiles them.
    """
    match = pattern.fullmatch(path)
    if match is None:
        return None
    values = _values(match)
    if folders is not None:
        above = folders.fullmatch(str(PurePosixPath(path).parent))
        if above is None:
            return None
        values |= _values(above)
    if "row" in values:
        values[WELL] = _well_of(values.pop("row"), values.pop("column", ""))
    return values


def compile_pattern(pattern: str) -> re.Pattern:
    """Compile a pattern for `parse_name`: a name of `PATTERNS` or a regular expression.

    Raises
    ------
    ImageImportError
        If it is no regular expression, has unknown groups or cannot name a well.
    """
    return _compile(PATTERNS.get(pattern, pattern), "pattern")


def _compile(text: str, option: str) -> re.Pattern:
    try:
        # lazy, so that optional groups for folders in front of the name take part
        compiled = re.compile(rf"(?:.*?/)??(?:{text})")
    except re.error as error:
        known = ", ".join(PATTERNS)
        raise ImageImportError(
            f"--{option} {text!r} is no regular expression ({error}); known names are {known}"
        ) from None
    groups = set(compiled.groupindex)
    allowed = set(GROUPS) if option == "pattern" else {EXPERIMENT, PLATE}
    if groups - allowed:
        raise ImageImportError(
            f"--{option}: unknown group {', '.join(sorted(groups - allowed))}; known are {', '.join(sorted(allowed))}"
        )
    if option == "folders" and not groups:
        raise ImageImportError("--folders has none of the groups (?P<experiment>...) and (?P<plate>...)")
    if option == "pattern" and WELL not in groups and not ("row" in groups and groups & {"col", "column"}):
        raise ImageImportError(
            f"--pattern {text!r} has no group for the well: (?P<well>...), or (?P<row>...) and (?P<column>...); "
            f"built-in patterns are {', '.join(PATTERNS)}"
        )
    return compiled


def _values(match: re.Match) -> dict[str, str]:
    return {GROUPS[group]: value for group, value in match.groupdict().items() if value is not None}


def _well_of(row: str, column: str) -> str:
    """Return the address of a row (letters, or a number from 1) and a column; what is none is judged later."""
    try:
        return format_address(int(row), int(column)) if row.isdecimal() else f"{row}{column}"
    except (AddressError, ValueError):
        return f"row {row} column {column}"


def _image_paths(folder: Path) -> list[str]:
    """Return the paths of all files with a suffix of an image, relative to the folder, in the order of their names."""

    def refuse(error: OSError) -> None:
        raise ImageImportError(f"{error.filename}: cannot be read ({error.strerror}); mend its permissions")

    paths, seen = [], set()
    for root, below, names in os.walk(folder, followlinks=True, onerror=refuse):
        if (real := os.path.realpath(root)) in seen:  # a link to a folder that was searched already, or above this one
            below.clear()
            continue
        seen.add(real)
        below.sort()
        here = Path(root).relative_to(folder)
        paths += [(here / name).as_posix() for name in names if name.lower().endswith(SUFFIXES)]
    return sorted(paths)


def _nothing_found(folder: Path, pattern: str, paths: list[str], thumbs: int) -> str:
    if not paths:
        return f"{folder}: no file of {', '.join(SUFFIXES)} below this folder"
    if thumbs:
        return f"{folder}: all {thumbs} matching files are thumbnails"
    like = f" (names like {EXAMPLES[pattern]})" if pattern in EXAMPLES else ""
    shown = ", ".join(paths[:3])
    return (
        f"{folder}: none of {len(paths)} image files matches the pattern {pattern!r}{like} and --folders, if given; "
        f"they are called {shown}; built-in patterns are {', '.join(PATTERNS)}"
    )


def _checked(table: pd.DataFrame, rows: list[str], where: str, plate_format: int) -> pd.DataFrame:
    """Return `LIST_COLUMNS` in their types, or list every row that cannot be used."""
    problems: list[str] = []
    columns = {
        EXPERIMENT: _texts(table, EXPERIMENT, rows, problems, check_name),
        PLATE: _texts(table, PLATE, rows, problems, check_name),
        ADDRESS: _texts(table, ADDRESS, rows, problems, lambda text: normalise_address(text, plate_format)),
        SITE: _numbers(table, SITE, rows, problems, 0),
        CHANNEL: [None if c is None else channel_name(c) for c in _column(table, CHANNEL)],
        PLANE: _numbers(table, PLANE, rows, problems, 0),
        PATH: _texts(table, PATH, rows, problems, _check_path),
        PAGE: _numbers(table, PAGE, rows, problems, 1),
    }
    for row, channel, page in zip(rows, columns[CHANNEL], columns[PAGE], strict=True):
        if page is not None and channel is None:
            problems.append(f"{row}, page: names a page but no channel; name the channel too")
    if problems:
        more = f"\n  and {len(problems) - MAX_LISTED} more" if len(problems) > MAX_LISTED else ""
        listed = "\n".join(f"  {problem}" for problem in problems[:MAX_LISTED])
        raise ImageImportError(f"{where}: {len(problems)} problem{'s' * (len(problems) > 1)}:\n{listed}{more}")
    frame = pd.DataFrame(columns).astype({SITE: "Int64", PLANE: "Int64", PAGE: "Int64"})
    frame[SITE] = frame[SITE].fillna(1).astype(np.int64)
    frame[CHANNEL] = frame[CHANNEL].astype(object)
    return frame


def _column(table: pd.DataFrame, column: str) -> list[str | None]:
    if column not in table.columns:
        return [None] * len(table)
    return [None if pd.isna(value) else str(value) for value in table[column]]


def _texts(
    table: pd.DataFrame, column: str, rows: list[str], problems: list[str], check: Callable[[str], str]
) -> list[str]:
    texts, judged = [], {}
    name = WELL if column == ADDRESS else column
    for row, text in zip(rows, _column(table, column), strict=True):
        if text not in judged:
            judged[text] = _judge(text, check)
        value, problem = judged[text]
        if problem:
            problems.append(f"{row}, {name}: {problem}" + _how_to_give(column) * (text is None))
        texts.append(value)
    return texts


def _judge(text: str | None, check: Callable[[str], str]) -> tuple[str, str | None]:
    if text is None:
        return "", "is not given"
    try:
        return check(text), None
    except (ImageImportError, AddressError) as error:
        return "", str(error)


def _how_to_give(column: str) -> str:
    return (
        f"; fill the column, or give --{column} or a group (?P<{column}>...)" if column in (EXPERIMENT, PLATE) else ""
    )


def _numbers(table: pd.DataFrame, column: str, rows: list[str], problems: list[str], least: int) -> list[int | None]:
    numbers = []
    for row, text in zip(rows, _column(table, column), strict=True):
        number = None if text is None else _whole_number(text)
        if text is not None and (number is None or number < least):
            problems.append(f"{row}, {column}: {text!r} is no whole number from {least} on")
        numbers.append(number)
    return numbers


def channel_name(text: str) -> str:
    """Return the canonical text of a channel: 01, 1.0 and 1 are the same channel."""
    number = _whole_number(text)
    return text if number is None else str(number)


def _whole_number(text: str) -> int | None:
    """Return a whole number, also from 2.0, as a table with gaps is often written; None for any other text."""
    match = re.fullmatch(r"([0-9]+)(?:\.0+)?", text)
    return None if match is None else int(match[1])


def check_name(text: str) -> str:
    """Return the name of an experiment or plate unchanged, if it can be part of a key.

    Any text works, also with `_`, spaces within, Greek letters or emoji, but for what would break a key or a path.

    Raises
    ------
    ImageImportError
        If it holds `/` or a control character, has spaces around it, or is `.` or `..`.
    """
    if "/" in text:
        raise ImageImportError(f"{text!r} holds '/', which separates the parts of a key; write it in another way")
    if any(unicodedata.category(character) in ("Cc", "Zl", "Zp", "Cs") for character in text):
        raise ImageImportError(f"{text!r} holds a control character or a line end; remove it")
    if text != text.strip() or text in ("", ".", ".."):
        raise ImageImportError(f"{text!r} is no name: it is empty, a path, or has spaces around it")
    return text


def _check_path(text: str) -> str:
    if not text.isascii() and any(unicodedata.category(character) == "Cs" for character in text):
        raise ImageImportError(f"{text!r} is not UTF-8; rename the file")
    return text


def _check_files(paths: pd.Series, base: Path, where: str) -> None:
    missing = [path for path in paths.unique() if not (base / path).is_file()]
    if missing:
        listed = "".join(f"\n  {path}" for path in missing[:MAX_LISTED])
        more = f"\n  and {len(missing) - MAX_LISTED} more" if len(missing) > MAX_LISTED else ""
        slash = "; write paths with / instead of \\" if any("\\" in path for path in missing) else ""
        raise ImageImportError(
            f"{where}: {len(missing)} of {paths.nunique()} files do not exist (paths are relative to {base}){slash}:"
            f"{listed}{more}"
        )


def _one_row_a_well(table: pd.DataFrame, columns: list[str], rows: list[str], where: str) -> pd.DataFrame:
    """Return a row a well, or name a well whose rows contradict each other."""
    wells = table.drop_duplicates([*WELL_KEYS, *columns])
    doubled = wells.duplicated(WELL_KEYS, keep=False)
    if doubled.any():
        first = wells[doubled].sort_values(WELL_KEYS, kind="stable").iloc[:2]
        column = next(c for c in columns if first[c].iloc[0] != first[c].iloc[1])
        experiment, plate, address = first[WELL_KEYS].iloc[0]
        raise ImageImportError(
            f"{where}: {rows[first.index[0]]} and {rows[first.index[1]]}: well {address} of plate {plate}, experiment "
            f"{experiment}, has {column} {first[column].iloc[0]!r} and {first[column].iloc[1]!r}; a well has one"
        )
    return wells.reset_index(drop=True)


def read_platemap(path: str | os.PathLike, plate_format: int = 1536) -> pd.DataFrame:
    """Read a plate map: a csv with the column well, optionally plate and experiment, and what is in the wells.

    Returns
    -------
    DataFrame
        address, experiment and plate (where given), and the further columns, as text; a row a well.

    Raises
    ------
    MetadataError, ImageImportError
        If it is no table, has no column well or no further one, an impossible address, or a well twice.
    """
    path = Path(path)
    table = read_table(path)
    if WELL not in table.columns or len(table.columns) < 2:
        raise ImageImportError(
            f"{path}: expected a column well and what is in the wells; present are {', '.join(table.columns)}"
        )
    rows = [f"row {i + 1}" for i in range(len(table))]
    table = table.rename(columns={WELL: ADDRESS})
    problems: list[str] = []
    table[ADDRESS] = _texts(table, ADDRESS, rows, problems, lambda text: normalise_address(text, plate_format))
    if problems:
        raise ImageImportError(f"{path}:\n" + "\n".join(f"  {problem}" for problem in problems[:MAX_LISTED]))
    keys = [c for c in WELL_KEYS if c in table.columns]
    doubled = table.duplicated(keys)
    if doubled.any():
        at = int(np.flatnonzero(doubled)[0])
        raise ImageImportError(f"{path}: row {at + 1}: well {table[ADDRESS].iloc[at]} stands more than once")
    return table
