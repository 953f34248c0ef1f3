"""Well addresses: text such as AA02 to row and column and back, for 96-, 384- and 1536-well plates.

Rows are lettered A..Z, AA..AF and columns count from 1. The canonical text has two digits (A01, AF48).
"""

from __future__ import annotations

import re

from phenoica.errors import AddressError

#: plate format (number of wells) to (rows, columns)
PLATE_SHAPES: dict[int, tuple[int, int]] = {96: (8, 12), 384: (16, 24), 1536: (32, 48)}

_PATTERN = re.compile(r"\s*([A-Za-z]{1,2})0*([1-9][0-9]?)\s*")


def row_letters(row: int) -> str:
    """Return the letters of a row counted from 1: 1 is A, 26 is Z, 27 is AA, 32 is AF."""
    if not 1 <= row <= 52:
        raise AddressError(f"row {row} has no letters; rows count from 1 to 52")
    return chr(64 + row) if row <= 26 else "A" + chr(64 + row - 26)


def parse_address(address: str, plate_format: int = 1536) -> tuple[int, int]:
    """Return (row, column), both counted from 1, of a well address.

    Lower case and a missing or additional leading zero are accepted (a1 is A01).

    Raises
    ------
    AddressError
        If the text is no address or lies outside the plate.
    """
    rows, columns = plate_shape(plate_format)
    match = _PATTERN.fullmatch(address) if isinstance(address, str) else None
    if match is None:
        raise AddressError(f"{address!r} is no well address; expected one or two letters and a number, like AA02")
    letters = match[1].upper()
    if len(letters) == 2 and letters[0] != "A":
        raise AddressError(f"{address!r}: there is no row {letters}; after Z comes AA")
    row = ord(letters[-1]) - 64 + 26 * (len(letters) - 1)
    column = int(match[2])
    if row > rows or column > columns:
        raise AddressError(
            f"{address!r} lies outside a {plate_format}-well plate "
            f"(A01 to {format_address(rows, columns)}); check the address or plates.plate_format"
        )
    return row, column


def format_address(row: int, column: int) -> str:
    """Return the canonical text of a row and column counted from 1, like AA02."""
    if not 1 <= column <= 99:
        raise AddressError(f"column {column} does not exist; columns count from 1")
    return f"{row_letters(row)}{column:02d}"


def normalise_address(address: str, plate_format: int = 1536) -> str:
    """Return the canonical text of an address; raises AddressError as `parse_address` does."""
    return format_address(*parse_address(address, plate_format))


def edge_distance(row: int, column: int, plate_format: int = 1536) -> int:
    """Return how many wells lie between a well and the nearest edge; 0 is the outermost ring."""
    rows, columns = plate_shape(plate_format)
    return min(row - 1, rows - row, column - 1, columns - column)


def plate_shape(plate_format: int) -> tuple[int, int]:
    """Return (rows, columns) of a plate format."""
    if plate_format not in PLATE_SHAPES:
        raise AddressError(f"plate format {plate_format} is unknown; known are {', '.join(map(str, PLATE_SHAPES))}")
    return PLATE_SHAPES[plate_format]
