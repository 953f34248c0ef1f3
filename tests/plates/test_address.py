import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from phenoica.errors import AddressError
from phenoica.plates.address import (
    PLATE_SHAPES,
    edge_distance,
    format_address,
    normalise_address,
    parse_address,
    row_letters,
)


@st.composite
def positions(draw):
    plate_format = draw(st.sampled_from(sorted(PLATE_SHAPES)))
    rows, columns = PLATE_SHAPES[plate_format]
    return plate_format, draw(st.integers(1, rows)), draw(st.integers(1, columns))


@given(positions())
def test_parse_inverts_format(position):
    plate_format, row, column = position
    assert parse_address(format_address(row, column), plate_format) == (row, column)


@given(positions())
def test_spelling_does_not_matter(position):
    plate_format, row, column = position
    sloppy = f" {row_letters(row).lower()}{column} "
    assert normalise_address(sloppy, plate_format) == format_address(row, column)


@given(st.text(max_size=8) | st.from_regex(r"\s*[A-Za-z]{1,3}\d{1,3}\s*"), st.sampled_from(sorted(PLATE_SHAPES)))
@example("A01\n", 96)
@example("A\u0661", 96)  # a digit of another script
@example("A" + "0" * 5000 + "1", 96)
@example("A" + "9" * 5000, 96)
def test_any_text_is_an_address_or_a_named_error(text, plate_format):
    try:
        row, column = parse_address(text, plate_format)
    except AddressError as error:
        assert repr(text) in str(error)
    else:
        rows, columns = PLATE_SHAPES[plate_format]
        assert 1 <= row <= rows and 1 <= column <= columns and text.isascii()
        assert normalise_address(text) == format_address(row, column)
        assert parse_address(format_address(row, column), plate_format) == (row, column)


@pytest.mark.parametrize(
    ("text", "expected"), [("A01", (1, 1)), ("Z48", (26, 48)), ("AA02", (27, 2)), ("AF48", (32, 48)), ("a1", (1, 1))]
)
def test_known_addresses(text, expected):
    assert parse_address(text, 1536) == expected


@pytest.mark.parametrize(
    ("text", "plate_format"),
    [
        ("AG01", 1536),
        ("A49", 1536),
        ("BA01", 1536),
        ("A00", 1536),
        ("Q01", 384),
        ("A13", 96),
        ("I01", 96),
        ("", 96),
        ("A01x", 96),
        ("A01 B", 96),
        ("A1.5", 96),
        ("xA01", 96),
        ("A-1", 96),
    ],
)
def test_addresses_outside_the_plate(text, plate_format):
    with pytest.raises(AddressError):
        parse_address(text, plate_format)


@pytest.mark.parametrize("value", [None, 1, 1.5, b"A01", ["A01"], float("nan")])
def test_what_is_no_text_is_no_address(value):
    with pytest.raises(AddressError, match="is no well address"):
        parse_address(value)


@given(st.integers(), st.integers())
def test_every_row_and_column_has_a_text_or_a_named_error(row, column):
    try:
        text = format_address(row, column)
    except AddressError as error:
        assert not (1 <= row <= 52 and 1 <= column <= 99) and "count from 1" in str(error)
    else:
        assert 3 <= len(text) <= 4 and (row > 32 or column > 48 or parse_address(text) == (row, column))


def test_unknown_plate_format():
    with pytest.raises(AddressError, match="plate format 97"):
        parse_address("A01", 97)


def test_edge_distance():
    assert edge_distance(1, 20, 1536) == 0
    assert edge_distance(32, 48, 1536) == 0
    assert edge_distance(16, 24, 1536) == 15
    assert edge_distance(4, 6, 96) == 3
