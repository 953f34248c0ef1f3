"""Lists and names of image files: what each built-in pattern reads, and every row that cannot be used."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from phenoica.errors import ImageImportError, MetadataError
from phenoica.plates.address import format_address, row_letters
from phenoica.plates.image_lists import (
    EXAMPLES,
    PATTERNS,
    choose_images,
    compile_pattern,
    find_images,
    parse_name,
    read_list,
    read_platemap,
)

GUID = "E75611A2-A874-4065-BDAC-EE2467105EEB"
#: pattern, name, and what it says: experiment, plate, well, site, channel, plane
NAMES = [
    ("imagexpress", f"Plate_B03_s2_w1{GUID}.tif", (None, "Plate", "B03", "2", "1", None)),
    ("imagexpress", f"val screen_B02_s1_w3{GUID}.tif", (None, "val screen", "B02", "1", "3", None)),
    # the digits of a GUID are no part of the wavelength, and w12 is no well
    ("imagexpress", f"P_1_C04_s1_w112345678{GUID[8:]}.tif", (None, "P_1", "C04", "1", "1", None)),
    ("imagexpress", "A01_s1_w12.TIF", (None, None, "A01", "1", "12", None)),
    ("imagexpress", "A01_s1_w1_z3.tif", (None, None, "A01", "1", "1", "3")),
    ("imagexpress", f"TimePoint_1/ZStep_2/x_A01_w1{GUID}.tif", (None, "x", "A01", None, "1", "2")),
    ("imagexpress", "Plate_B03.tif", (None, "Plate", "B03", None, None, None)),
    ("harmony", "r02c03f04p01-ch5sk1fk1fl1.tiff", (None, None, "B03", "04", "5", "01")),
    ("harmony", "x/Images/r16c24f09p02-ch1sk1fk1fl1.tiff", (None, None, "P24", "09", "1", "02")),
    ("harmony-record", "r02c07f01p01rc3-ch1sk1fk1fl1.tiff", (None, None, "B07", "01", "3", "01")),
    ("columbus", "002003-4-001002005.tif", (None, None, "B03", "4", "005", "002")),
    ("rxrx", "gene-001/Plate1/AA02_s1_w1.png", ("gene-001", "1", "AA02", "1", "1", None)),
    ("rxrx", "rxrx3/images/gene-001/Plate12/B02_s1_6.jp2", ("gene-001", "12", "B02", "1", "6", None)),
]


@pytest.mark.parametrize(("pattern", "name", "expected"), NAMES)
def test_built_in_patterns(pattern, name, expected):
    columns = ("experiment", "plate", "well", "site", "channel", "plane")
    said = {column: value for column, value in zip(columns, expected, strict=True) if value is not None}
    assert parse_name(name, compile_pattern(pattern)) == said


@pytest.mark.parametrize("pattern", PATTERNS)
def test_each_pattern_reads_its_example_and_no_other_microscope(pattern):
    for other, name in EXAMPLES.items():
        assert (parse_name(name, compile_pattern(pattern)) is not None) == (other == pattern)


@given(
    st.text(st.characters(exclude_characters="/", exclude_categories=["C", "Z"]), min_size=1, max_size=12),
    st.integers(1, 32), st.integers(1, 48), st.integers(1, 99), st.integers(1, 12), st.integers(1, 30), st.uuids(),
)  # fmt: skip
def test_what_a_microscope_writes_into_a_name_comes_back(plate, row, column, site, channel, plane, guid):
    well = format_address(row, column)

    def parsed(pattern: str, name: str) -> dict:
        values = parse_name(name, compile_pattern(pattern))
        assert values is not None, name
        return {k: v if k in ("plate", "well", "experiment") else int(v) for k, v in values.items()}

    whole = {"well": well, "site": site, "channel": channel}
    name = f"{plate}_{well}_s{site}_w{channel}{str(guid).upper()}.tif"
    assert parsed("imagexpress", name) == {**whole, "plate": plate}
    harmony = f"r{row:02d}c{column:02d}f{site:02d}p{plane:02d}"
    assert parsed("harmony", f"{harmony}-ch{channel}sk1fk1fl1.tiff") == {**whole, "plane": plane}
    assert parsed("harmony-record", f"{harmony}rc{channel}-ch1sk1fk1fl1.tiff") == {**whole, "plane": plane}
    columbus = f"{row:03d}{column:03d}-{site}-001{plane:03d}{channel:03d}.tif"
    assert parsed("columbus", columbus) == {**whole, "plane": plane}
    rxrx = f"e/Plate{plate}/{well}_s{site}_w{channel}.png"
    assert parsed("rxrx", rxrx) == {**whole, "plate": plate, "experiment": "e"}


@given(st.integers(1, 32), st.integers(1, 48), st.integers(1, 9))
def test_an_own_pattern_with_letters_and_other_words(row, column, channel):
    pattern = (
        r"(?P<experiment>[^/]+)/(?P<plate>[^/]+)/(?P<row>[A-Z]+)-(?P<col>\d+)_f(?P<field>\d)_(?P<wavelength>\w+)\.png"
    )
    values = parse_name(f"e/p/{row_letters(row)}-{column}_f3_{channel}.png", compile_pattern(pattern))
    assert values == {
        "experiment": "e",
        "plate": "p",
        "well": f"{row_letters(row)}{column}",
        "site": "3",
        "channel": str(channel),
    }


def touch(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    return folder


def test_a_folder_of_plates_with_thumbs_and_strangers(tmp_path):
    touch(
        tmp_path, f"week1/PlateA/TimePoint_1/s_B03_s1_w1{GUID}.tif",
        f"week1/PlateA/TimePoint_1/s_B03_s1_w1_thumb{GUID}.tif",
        "week2/PlateB/TimePoint_1/s_B4_s1_w1.tif", "week2/PlateB/TimePoint_1/s_B04_s1_w1.tif",
        "week2/PlateB/TimePoint_1/notes.txt",
    )  # fmt: skip
    found = find_images(tmp_path, "imagexpress", folders=r"(?P<experiment>week\d)/Plate(?P<plate>[^/]+)/TimePoint_1")
    rows = found.images.set_index("path")
    row = rows.loc[f"week1/PlateA/TimePoint_1/s_B03_s1_w1{GUID}.tif"]
    assert (row["experiment"], row["plate"], row["address"], row["site"], row["channel"]) == (
        "week1",
        "A",
        "B03",
        1,
        "1",
    )
    assert rows.loc["week2/PlateB/TimePoint_1/s_B04_s1_w1.tif", "address"] == "B04"
    assert found.notes[0] == "1 thumbnails are skipped"
    assert found.notes[1].startswith("1 image files do not match the pattern and are left out (first: week2/PlateB")
    named = find_images(tmp_path, "imagexpress", experiment="e", plate="p")
    assert set(named.images["experiment"]) == {"e"} and set(named.images["plate"]) == {"p"}


def test_patterns_that_cannot_be_used(tmp_path):
    touch(tmp_path, "r02c03f04p01-ch1sk1fk1fl1.tiff")
    for pattern, words in {
        "(?P<well>": "is no regular expression",
        r"(?P<wel>\w+)\.tiff": "unknown group wel",
        r"(?P<row>\w)\.tiff": "has no group for the well",
        r"(?P<well>\w+)\.png": "none of 1 image files matches the pattern",
    }.items():
        with pytest.raises(ImageImportError, match=words):
            find_images(tmp_path, pattern, experiment="e", plate="p")
    with pytest.raises(ImageImportError, match="Plate_B03_s2_w1"):  # what such names look like
        find_images(tmp_path, "imagexpress", experiment="e", plate="p")
    with pytest.raises(ImageImportError, match="has none of the groups"):
        find_images(tmp_path, "harmony", folders="x", experiment="e")
    with pytest.raises(ImageImportError, match=r"plate: is not given; fill the column, or give --plate or a group"):
        find_images(tmp_path, "harmony", experiment="e")
    with pytest.raises(ImageImportError, match="no such folder"):
        find_images(tmp_path / "no", "harmony")
    with pytest.raises(ImageImportError, match="no file of .tif"):
        find_images(touch(tmp_path / "empty", "a.txt"), "harmony", experiment="e")
    touch(tmp_path / "thumbs", "A01_s1_w1_thumb.tif")
    with pytest.raises(ImageImportError, match="all 1 matching files are thumbnails"):
        find_images(tmp_path / "thumbs", "imagexpress", experiment="e", plate="p")


def test_a_row_beyond_the_plate(tmp_path):
    touch(tmp_path, "r17c03f04p01-ch1sk1fk1fl1.tiff", "r53c03f04p01-ch1sk1fk1fl1.tiff")
    with pytest.raises(ImageImportError) as error:
        find_images(tmp_path, "harmony", experiment="e", plate="p", plate_format=384)
    assert "r17c03f04p01-ch1sk1fk1fl1.tiff, well: 'Q03' lies outside a 384-well plate" in str(error.value)
    assert "r53c03f04p01-ch1sk1fk1fl1.tiff, well: 'row 53 column 03' is no well address" in str(error.value)


def test_either_a_list_or_a_folder(tmp_path):
    for arguments, words in (
        ((None, None, None), "--list FILE, or as --folder DIR"),
        (("a.csv", "b", "harmony"), "--list FILE, or as --folder DIR"),
        (("a.csv", None, "harmony"), "--pattern and --folders read names"),
        ((None, "b", None), "--folder needs --pattern: imagexpress, harmony"),
    ):
        with pytest.raises(ImageImportError, match=words):
            choose_images(*arguments)


def write_list(folder: Path, text: str | bytes, *names: str) -> Path:
    touch(folder, *names)
    path = folder / "images.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_list_with_bom_windows_lines_and_odd_wells(tmp_path):
    text = (
        b"\xef\xbb\xbfexperiment,plate,well,site,channel,path,treatment,gene\r\n"
        b"e,08,a1,,1,img/a.tif,NA,NA\r\n"
        b'e,8.0,AA2,2,02,img/b.tif,"C[C@H](N)C(=O)O, ""x""",\r\n'
    )
    found = read_list(write_list(tmp_path, text, "img/a.tif", "img/b.tif"))
    assert found.images["plate"].tolist() == ["08", "8.0"]
    assert found.images["address"].tolist() == ["A01", "AA02"]
    assert found.images["site"].tolist() == [1, 2]
    assert found.images["channel"].tolist() == ["1", "2"]
    assert found.wells["treatment"].tolist() == ["NA", 'C[C@H](N)C(=O)O, "x"']
    assert found.wells["gene"].tolist() == ["NA", None]
    assert found.base == tmp_path


def test_every_bad_row_of_a_list_is_named(tmp_path):
    text = (
        "experiment,plate,well,site,channel,path,page\na/b,1,A01,1,1,a.tif,\ne,,A49,x,1,a.tif,0\ne,1,AG01,1,,a.tif,2\n"
    )
    with pytest.raises(ImageImportError) as error:
        read_list(write_list(tmp_path, text, "a.tif"))
    for words in (
        "7 problems", "row 1, experiment: 'a/b' holds '/'", "row 2, plate: is not given",
        "row 2, well: 'A49' lies outside", "row 2, site: 'x' is no whole number from 0 on",
        "row 2, page: '0' is no whole number from 1 on",
        "row 3, well: 'AG01' lies outside",
    ):  # fmt: skip
        assert words in str(error.value)
    assert "row 3, page: names a page but no channel" in str(error.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a/b", "holds '/'"), ("a\tb", "control character"), ("a\u2028b", "control character"), (" a", "spaces around"),
        (".", "is no name"), ("..", "is no name"),
    ],
)  # fmt: skip
def test_names_that_would_break_a_key_or_a_path(tmp_path, name, words):
    with pytest.raises(ImageImportError, match=words):
        read_list(write_list(tmp_path, "well,path\nA01,a.tif\n", "a.tif"), experiment="e", plate=name)


@given(st.text(min_size=1, max_size=20))
def test_a_name_is_refused_or_makes_a_key_that_comes_back(name):
    from phenoica.plates.image_lists import check_name
    from phenoica.plates.shards import parse_key

    try:
        assert check_name(name) == name
    except ImageImportError:
        assume(False)
    assert parse_key(f"{name}/Plate{name}/A01_s1_2") == (name, name, "A01", 1, 2)


def test_missing_files_are_all_named_before_any_work(tmp_path):
    lines = "".join(f"A01,{i},no{i:02d}.tif\n" for i in range(1, 26))
    path = write_list(tmp_path, "well,channel,path\nA02,1,a.tif\n" + lines, "a.tif")
    with pytest.raises(ImageImportError) as error:
        read_list(path, experiment="e", plate="p")
    assert "25 of 26 files do not exist" in str(error.value)
    assert "\n  no01.tif\n  no02.tif\n" in str(error.value)
    assert str(error.value).endswith("\n  no20.tif\n  and 5 more")
    path = write_list(tmp_path, "well,channel,path\nA02,1,img\\a.tif\n")
    with pytest.raises(ImageImportError, match="write paths with / instead of"):
        read_list(path, experiment="e", plate="p")


def test_lists_that_are_none(tmp_path):
    for text, words in (
        (b"", "the file is empty"),
        ("experiment,plate,well,path\né,1,A01,a.tif\n".encode("latin-1"), "is not UTF-8: line 2"),
        (b"experiment;plate;well;path\n", "separated by semicolons"),
    ):
        with pytest.raises(MetadataError, match=words):
            read_list(write_list(tmp_path, text))
    with pytest.raises(ImageImportError, match="the list holds no images"):
        read_list(write_list(tmp_path, "experiment,plate,well,path\n"))
    with pytest.raises(ImageImportError, match=r"columns plate, path are missing; .* \(or give --experiment"):
        read_list(write_list(tmp_path, "experiment,well\ne,A01\n"))
    with pytest.raises(ImageImportError, match="has a column plate, and --plate is given too"):
        read_list(write_list(tmp_path, "experiment,plate,well,path\ne,1,A01,a.tif\n"), plate="2")


def test_rows_of_a_well_that_contradict_each_other(tmp_path):
    text = "experiment,plate,well,channel,path,treatment\ne,1,A01,1,a.tif,DMSO\ne,1,a1,2,b.tif,aspirin\n"
    words = "row 1 and row 2: well A01 of plate 1, experiment e, has treatment 'DMSO' and 'aspirin'"
    with pytest.raises(ImageImportError, match=re.escape(words)):
        read_list(write_list(tmp_path, text, "a.tif", "b.tif"))


def test_plate_maps(tmp_path):
    path = tmp_path / "map.csv"
    path.write_text("well,plate,treatment,concentration\na1,1,β-estradiol 😀/x_y,0.5\nA01,2,DMSO,\n")
    table = read_platemap(path)
    pd.testing.assert_frame_equal(
        table,
        pd.DataFrame({
            "address": ["A01", "A01"], "plate": ["1", "2"], "treatment": ["β-estradiol 😀/x_y", "DMSO"],
            "concentration": ["0.5", None],
        }),
    )  # fmt: skip
    for text, words in (
        ("well\nA01\n", "what is in the wells"),
        ("well,treatment\nA01,x\na1,y\n", "row 2: well A01 stands more than once"),
        ("well,treatment\nA49,x\n", "row 1, well: 'A49' lies outside"),
    ):
        path.write_text(text)
        with pytest.raises(ImageImportError, match=words):
            read_platemap(path)


def test_links_to_folders_are_followed_once(tmp_path):
    touch(tmp_path / "in/a", "r01c01f01p01-ch1sk1fk1fl1.tiff")
    touch(tmp_path / "elsewhere", "r01c02f01p01-ch1sk1fk1fl1.tiff")
    (tmp_path / "in/b").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in/a/up").symlink_to(tmp_path / "in")
    (tmp_path / "in/c").symlink_to(tmp_path / "in/a")
    found = find_images(tmp_path / "in", "harmony", experiment="e", plate="p")
    assert found.images["address"].tolist() == ["A01", "A02"]


def test_a_name_that_is_no_text(tmp_path):
    (tmp_path / "A01_s1_w1.tif").touch()
    os.rename(tmp_path / "A01_s1_w1.tif", os.fsencode(tmp_path) + b"/\xe9_A01_s1_w1.tif")
    with pytest.raises(ImageImportError, match="is not UTF-8; rename the file"):
        find_images(tmp_path, "imagexpress", experiment="e", plate="p")
