import contextlib
import gzip
import os
import re
import warnings

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from phenoica import files, schema
from phenoica.config import resolve
from phenoica.errors import MetadataError
from phenoica.plates import metadata as reading
from phenoica.plates.design import design_table
from phenoica.plates.metadata import (
    classify_controls,
    control_roles,
    read_metadata,
    read_table,
    warn_dates,
    wells_from_metadata,
)

HEADER = "well_id,experiment_name,plate,address,gene,treatment,SMILES,concentration,perturbation_type,cell_type"
PLATES = resolve({"run": "r", "source": "demo"})["plates"]


def read(tmp_path, *rows, header=HEADER):
    path = tmp_path / "metadata.csv"
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return read_metadata(path)


def test_genes_named_like_null_survive_and_empty_cells_are_null(tmp_path):
    frame = read(
        tmp_path,
        "e_1_A01,e,1,A01,NA,NA_guide_1,,,CRISPR,HUVEC",
        "e_1_A02,e,1,A02,NaN,NaN_guide_1,,,CRISPR,HUVEC",
        "e_1_A03,e,1,A03,None,None_guide_1,,,CRISPR,",
        'e_08_A04,e,08,A04,,"drug, ""x"" µ/🧪","C(=O),N |t:1|",0.25,COMPOUND,HUVEC',
    )
    assert frame["gene"].tolist() == ["NA", "NaN", "None", None]
    assert frame["cell_type"].tolist()[2] is None
    assert frame["plate"].tolist() == ["1", "1", "1", "08"]
    assert frame["treatment"].iloc[3] == 'drug, "x" µ/🧪'
    assert frame["SMILES"].iloc[3] == "C(=O),N |t:1|"
    assert frame["concentration"].iloc[3] == 0.25
    assert np.isnan(frame["concentration"].iloc[0])


def test_every_problem_is_listed_by_row(tmp_path):
    with pytest.raises(MetadataError) as error:
        read(
            tmp_path,
            "e_1_A01,e,1,A01,G,G_1,,,CRISPR,HUVEC",
            "e_1_A99,e,1,A99,G,G_1,,many,CRISPR,HUVEC",
            "e_1_A03,,1,A03,G,G_1,,,CRISPR,HUVEC",
            "e_1_A01,e,1,A01,G,,,,CRISPR,HUVEC",
        )
    text = str(error.value)
    assert "metadata.csv: 5 problems" in text
    for part in ("row 2, address: 'A99'", "row 2, concentration: 'many'", "row 3, experiment_name", "row 4, treatment"):
        assert part in text
    assert "row 4, well_id: 'e_1_A01': well id stands more than once" in text


def test_two_spellings_of_one_well_are_a_duplicate(tmp_path):
    with pytest.raises(MetadataError, match="row 2: well e_1_A01 stands more than once"):
        read(tmp_path, "e_1_A01,e,1,A01,G,G_1,,,CRISPR,H", "e_1_a1,e,1,a1,G,G_1,,,CRISPR,H")


def test_a_well_id_that_contradicts_its_parts(tmp_path):
    with pytest.raises(MetadataError, match="row 1: well_id is 'e_2_A01'.*'e_1_A01'"):
        read(tmp_path, "e_2_A01,e,1,A01,G,G_1,,,CRISPR,H")


def test_missing_columns_and_missing_file(tmp_path):
    with pytest.raises(MetadataError, match="columns gene, cell_type are missing"):
        read(
            tmp_path,
            "e_1_A01,e,1,A01,t,,,CRISPR",
            header="well_id,experiment_name,plate,address,treatment,SMILES,concentration,perturbation_type",
        )
    with pytest.raises(MetadataError, match="none.csv: no such file"):
        read_metadata(tmp_path / "none.csv")
    with pytest.raises(MetadataError, match="holds no wells"):
        read(tmp_path)


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x00\r\n"), min_size=1).filter(lambda t: t == t.strip())


@settings(deadline=None)  # files
@given(st.lists(TEXT, min_size=1, max_size=5))
def test_any_treatment_text_comes_back(tmp_path_factory, names):
    path = tmp_path_factory.mktemp("m") / "metadata.csv"
    rows = [
        {
            "well_id": f"e_1_A{i + 1:02d}", "experiment_name": "e", "plate": "1", "address": f"A{i + 1:02d}",
            "gene": name, "treatment": name, "SMILES": "", "concentration": "", "perturbation_type": "CRISPR",
            "cell_type": "H",
        }
        for i, name in enumerate(names)
    ]  # fmt: skip
    pd.DataFrame(rows).to_csv(path, index=False)
    assert read_metadata(path)["treatment"].tolist() == names


def labelled(label_column):
    rows = [
        ("EMPTY_control", None, None), ("PLK1_guide_1", "PLK1", "x"), ("SRC_guide_1", "SRC", label_column),
        ("HCK_guide_1", "HCK", None), ("TP53_guide_1", "TP53", None),
    ]  # fmt: skip
    return pd.DataFrame([
        {
            "well_id": f"e_1_A0{i + 1}", "experiment_name": "e", "plate": "1", "address": f"A0{i + 1}", "gene": g,
            "treatment": t, "SMILES": None, "concentration": None, "perturbation_type": "CRISPR", "cell_type": "H",
            "well_type_label": label,
        }
        for i, (t, g, label) in enumerate(rows)
    ])  # fmt: skip


def test_cutting_controls_come_from_the_label_else_are_inferred():
    control, source = classify_controls(labelled("cutting_control"), PLATES)
    assert control.tolist() == ["negative", "positive", "cutting", "none", "none"]
    assert source.tolist() == ["config", "config", "label", "", ""]
    control, source = classify_controls(labelled(None), PLATES)
    assert control.tolist() == ["negative", "positive", "cutting", "cutting", "none"]
    assert source.tolist() == ["config", "config", "inferred", "inferred", ""]
    table = design_table(labelled(None), PLATES).set_index("treatment")
    assert table.loc["SRC_guide_1", "control_source"] == "inferred"
    assert table.loc["SRC_guide_1", "top_address_share"] == 1.0


def test_obs_columns_of_a_screen(tmp_path):
    rows = [f"e_1_A{i:02d},e,1,A{i:02d},,EMPTY_control,,,CRISPR,H" for i in range(1, 17)]
    rows += ["e_1_B01,e,1,B01,TP53,TP53_guide_1,,,CRISPR,H", "e_1_C03,e,1,C03,,aspirin,CC,2.5,COMPOUND,H"]
    wells = wells_from_metadata(read(tmp_path, *rows), PLATES, seed=0)
    schema.check_obs(wells)
    assert wells["plate_id"].unique().tolist() == ["e_1"]
    by_id = wells.set_index("well_id")
    assert by_id.loc["e_1_B01", "perturbation"] == "TP53"
    assert by_id.loc["e_1_C03", "perturbation"] == "aspirin"
    assert by_id.loc["e_1_A01", "perturbation"] == "EMPTY_control"
    assert tuple(by_id.loc["e_1_C03", ["row", "column", "edge_distance"]]) == (3, 3, 2)
    assert wells["control_role"].value_counts().to_dict() == {"fit": 8, "reference": 8, "none": 2}


def test_control_split_of_a_plate_does_not_depend_on_other_plates():
    def plate(name, n):
        return pd.DataFrame({"plate_id": [name] * n, "control": ["negative"] * n})

    alone = control_roles(plate("a", 10), 0.5, seed=3)
    together = control_roles(pd.concat([plate("b", 7), plate("a", 10)], ignore_index=True), 0.5, seed=3)
    assert alone.tolist() == together[7:].tolist()
    assert (alone == "fit").sum() == 5
    assert control_roles(plate("a", 10), 0.5, seed=4).tolist() != alone.tolist()
    assert sorted(control_roles(plate("a", 2), 0.9, seed=0)) == ["fit", "reference"]


GOOD = "e_1_A01,e,1,A01,G,G_1,,,CRISPR,H"


def raw(tmp_path, content: bytes, name="metadata.csv"):
    path = tmp_path / name
    path.write_bytes(content)
    return path


def parquet(tmp_path, **columns):
    path = tmp_path / "metadata.parquet"
    n = len(next(iter(columns.values())))
    every = {c: [None] * n for c in HEADER.split(",")} | {
        "well_id": [f"e_1_A{i + 1:02d}" for i in range(n)], "experiment_name": ["e"] * n, "plate": ["1"] * n,
        "address": [f"A{i + 1:02d}" for i in range(n)], "treatment": ["t"] * n, "perturbation_type": ["CRISPR"] * n,
    }  # fmt: skip
    pq.write_table(pa.table({**every, **columns}), path)
    return path


@pytest.mark.parametrize(
    "change",
    [
        lambda text: b"\xef\xbb\xbf" + text,
        lambda text: text.replace(b"\n", b"\r\n"),
        lambda text: b"\xef\xbb\xbf" + text.replace(b"\n", b"\r\n"),
        lambda text: text.replace(b"\n", b"\r"),
        lambda text: text.rstrip(b"\n"),
        lambda text: text.replace(b"\n", b"\n\n"),
    ],
    ids=["bom", "windows", "bom-windows", "old-mac", "no-last-line-end", "blank-lines"],
)
def test_byte_order_mark_and_line_ends_do_not_matter(tmp_path, change):
    text = f"{HEADER}\n{GOOD}\n".encode() + 'e_1_A02,e,1,A02,,"µ, ""β""/🧪","C,N |t:1|",0.5,COMPOUND,H\n'.encode()
    expected = read_metadata(raw(tmp_path, text, "plain.csv"))
    assert expected["treatment"].tolist() == ["G_1", 'µ, "β"/🧪'] and expected["SMILES"].tolist() == [None, "C,N |t:1|"]
    pd.testing.assert_frame_equal(read_metadata(raw(tmp_path, change(text))), expected)
    packed = raw(tmp_path, gzip.compress(change(text)), "metadata.csv.gz")
    pd.testing.assert_frame_equal(read_metadata(packed), expected)


def test_one_row_is_a_table(tmp_path):
    frame = read(tmp_path, GOOD)
    assert frame["treatment"].tolist() == ["G_1"]
    wells = wells_from_metadata(frame, PLATES, seed=0)
    assert wells["well_id"].tolist() == ["e_1_A01"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "metadata.csv: the file is empty"),
        (b"\n\n", "metadata.csv: the file is empty"),
        (HEADER.encode(), "holds no rows"),
        (HEADER.encode() + b"\n", "holds no wells"),
        (
            f"{HEADER}\n{GOOD}\n".replace(",", ";").encode(),
            "is separated by semicolons, not by commas; save it as comma",
        ),
        (f"{HEADER}\n{GOOD}\n".replace(",", "\t").encode(), "is separated by tabs, not by commas; save it as comma"),
        (f"{HEADER},gene,plate\n{GOOD},x,y\n".encode(), "column gene, plate stands twice in the header"),
        (f"{HEADER},,x\n{GOOD},1,2\n".encode(), "column 11 of 12 has no name"),
        (f"{HEADER}\n{GOOD}\n{GOOD},H\n".encode(), "row 2 has 11 cells and the header 10"),
        (
            f"{HEADER}\n{GOOD}\ne_1_A02,e,1,A0".encode(),
            "row 2 has 4 cells and the header 10: 'e_1_A02,e,1,A0'.* cut off",
        ),
        (f"{HEADER}\n{GOOD.replace('G_1', chr(34) + 'G_1')}\n".encode(), "row 1 has 6 cells .* close every quote"),
        (f"{HEADER}\n{GOOD}\n".encode("utf-16"), "is UTF-16 text, not UTF-8; save it as"),
        (f"{HEADER}\n{GOOD}\n".encode("utf-16-le"), "line 1, byte 2 is zero|has no name|stands twice"),
        (b"PK\x03\x04 and so on", "is a spreadsheet or a zip file"),
        (
            f"{HEADER}\n{GOOD.replace('G_1', 'G' + chr(0))}\n".encode(),
            "line 2, byte 20 is zero, so it is no UTF-8 text",
        ),
    ],
)
def test_what_is_no_table_is_said_in_one_line(tmp_path, content, message):
    with pytest.raises(MetadataError, match=message) as error:
        read_metadata(raw(tmp_path, content))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_latin_1_is_named_with_line_and_byte(tmp_path, end):
    rows = [HEADER, GOOD, "e_1_A02,e,1,A02,,10 µM aspirin,,10,COMPOUND,H"]
    with pytest.raises(
        MetadataError, match=r"line 3, byte 21 is 0xB5 \('µ' if the file is Latin-1\); save it as .*UTF-8"
    ):
        read_metadata(raw(tmp_path, end.join(rows).encode("latin-1")))
    with pytest.raises(MetadataError, match="line 1, byte 1 is 0xB5"):
        read_metadata(raw(tmp_path, b"\xb5" + end.join(rows[:2]).encode()))
    late = [HEADER] + [f"e_{i}_A01,e,{i},A01,G,G_1,,,CRISPR,H" for i in range(50_000)] + ["µ"]
    with pytest.raises(MetadataError, match="line 50002, byte 1 is 0xB5"):  # beyond any block that is read at first
        read_metadata(raw(tmp_path, end.join(late).encode("latin-1")))


def test_a_damaged_archive_and_a_parquet_that_is_none(tmp_path):
    packed = gzip.compress(f"{HEADER}\n{GOOD}\n".encode() * 100)
    with pytest.raises(MetadataError, match="metadata.csv.gz: cannot be read"):
        read_metadata(raw(tmp_path, packed[:40], "metadata.csv.gz"))
    with pytest.raises(MetadataError, match="metadata.csv.gz: cannot be read|is not UTF-8"):
        read_metadata(raw(tmp_path, b"no gzip", "metadata.csv.gz"))
    for content in (b"hello", b"PAR1 and no more"):
        with pytest.raises(MetadataError, match="not a readable parquet file"):
            read_metadata(raw(tmp_path, content, "metadata.parquet"))


def test_parquet_is_known_by_its_content_and_null_is_not_the_text(tmp_path):
    genes = ["NA", "NaN", "None", "null", "nan", None, "", "TP53"]
    path = parquet(tmp_path, gene=genes, concentration=[None, 0.1, 1e-5, None, None, None, None, 10.0])
    assert path.rename(tmp_path / "metadata.csv").is_file()
    frame = read_metadata(tmp_path / "metadata.csv")
    assert frame["gene"].tolist() == ["NA", "NaN", "None", "null", "nan", None, None, "TP53"]
    np.testing.assert_array_equal(frame["concentration"], [np.nan, 0.1, 1e-5, np.nan, np.nan, np.nan, np.nan, 10.0])
    assert frame["cell_type"].tolist() == [None] * 8
    text = "\n".join(f"e_1_A{i + 1:02d},e,1,A{i + 1:02d},{g or ''},t,,,CRISPR," for i, g in enumerate(genes))
    same = read_metadata(raw(tmp_path, f"{HEADER}\n{text}\n".encode()))
    assert same["gene"].tolist() == frame["gene"].tolist()


def test_a_line_end_in_a_cell_may_lie_anywhere_in_a_large_file(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "BLOCK", 4096)
    rows = [(f"w{i}", "x" * (i % 37) + "\ny" * (i % 5)) for i in range(2000)]
    text = "a,b\n" + "\n".join(f'{name},"{cell}"' for name, cell in rows)
    frame = read_table(raw(tmp_path, text.encode()))
    assert list(frame.itertuples(index=False, name=None)) == [(name, cell or None) for name, cell in rows]


def test_numbers_in_text_columns_become_their_text(tmp_path):
    path = parquet(tmp_path, plate=pa.array([1, 1], pa.int64()), gene=pd.Categorical([7, 8]), treatment=[0.5, 2.0])
    frame = read_metadata(path)
    assert frame["plate"].tolist() == ["1", "1"] and frame["gene"].tolist() == ["7", "8"]
    assert frame["treatment"].tolist() == ["0.5", "2.0"]
    frame = read_metadata(parquet(tmp_path, gene=pa.array([float("nan"), 7.5]), SMILES=pa.nulls(2, pa.float64())))
    assert frame["gene"].tolist() == [None, "7.5"] and frame["SMILES"].tolist() == [None, None]
    mixed = read(tmp_path, "e_1_A01,e,1,A01,7,1e3,,1,CRISPR,1", "e_1_A02,e,1,A02,TP53,x,,1.50,CRISPR,True")
    assert mixed["gene"].tolist() == ["7", "TP53"] and mixed["treatment"].tolist() == ["1e3", "x"]
    assert mixed["cell_type"].tolist() == ["1", "True"] and mixed["concentration"].tolist() == [1.0, 1.5]


def test_plate_ids_keep_their_spelling_and_underscores(tmp_path):
    plates = ["08", "8", "8.0", "123_456", "1", "10"]
    frame = read(tmp_path, *[f"e_{p}_A01,e,{p},A01,G,G_1,,,CRISPR,H" for p in plates])
    assert frame["plate"].tolist() == plates
    wells = wells_from_metadata(frame, PLATES, seed=0)
    assert sorted(wells["plate_id"]) == sorted(f"e_{p}" for p in plates)
    assert wells["well_id"].is_unique
    files.write_parquet(tmp_path / "wells.parquet", wells)
    assert sorted(pd.read_parquet(tmp_path / "wells.parquet")["plate"]) == sorted(plates)


def test_a_plate_id_of_two_meanings_is_refused(tmp_path):
    """Plate 123_456 of e and plate 456 of e_123 are one plate to whoever reads the id."""
    with pytest.raises(MetadataError) as error:
        read(tmp_path, "e_123_456_A01,e,123_456,A01,G,G_1,,,CRISPR,H", "e_123_456_A02,e_123,456,A02,G,G_1,,,CRISPR,H")
    assert "rows 1 and 2: plate '123_456' of experiment 'e' and plate '456' of experiment 'e_123'" in str(error.value)
    assert "one and the same id 'e_123_456'; rename one" in str(error.value)


@pytest.mark.parametrize(("column", "value"), [("experiment_name", "a/b"), ("plate", "1/2"), ("experiment_name", ".e")])
def test_names_of_experiments_and_plates_name_pages(tmp_path, column, value):
    row = {"experiment_name": "e", "plate": "1"} | {column: value}
    well = f"{row['experiment_name']}_{row['plate']}_A01,{row['experiment_name']},{row['plate']},A01"
    with pytest.raises(MetadataError, match=f"row 1, {column}: '{re.escape(value)}': cannot name a page"):
        read(tmp_path, f"{well},G,G_1,,,CRISPR,H")


@pytest.mark.parametrize("address", ["AG01", "A49", "A00", "BA01", "1A", "A", "A1B"])
def test_addresses_that_no_plate_has_are_named_by_row(tmp_path, address):
    with pytest.raises(MetadataError, match=f"row 2, address: '{address}': not a well of a 1536-well plate"):
        read(tmp_path, GOOD, f"e_1_{address},e,1,{address},G,G_1,,,CRISPR,H")


def test_other_spellings_of_an_address_are_made_canonical(tmp_path):
    frame = read(tmp_path, "e_1_a1,e,1,a1,G,G_1,,,CRISPR,H", "e_1_AA02,e,1,AA2,G,G_1,,,CRISPR,H")
    assert frame["address"].tolist() == ["A01", "AA02"]


@pytest.mark.parametrize("value", ["10 uM", '"0,5"', "inf", "1e999", "ten"])
def test_a_concentration_with_a_unit_is_named_by_row(tmp_path, value):
    shown = re.escape(repr(value.strip('"')))
    with pytest.raises(
        MetadataError, match=f"row 2, concentration: {shown}: not a finite number; write the number alone"
    ):
        read(tmp_path, GOOD, f"e_1_A02,e,1,A02,,aspirin,,{value},COMPOUND,H")


def test_what_programs_write_for_no_number_is_null_in_concentration_alone(tmp_path):
    words = ["NA", "NaN", "nan", "null", "None", "N/A"]
    frame = read(tmp_path, *[f"e_1_A0{i},e,1,A0{i},{w},{w},,{w},CRISPR,H" for i, w in enumerate(words, 1)])
    assert frame["gene"].tolist() == frame["treatment"].tolist() == words
    assert frame["concentration"].isna().all()


def test_spaces_around_labels_are_removed_and_said(tmp_path):
    with pytest.warns(
        UserWarning, match=r"spaces around 3 labels were removed \(row 2, treatment: 'DMSO ', row 3, gene:"
    ):
        frame = read(
            tmp_path, "e_1_A01,e,1,A01,,DMSO,,,COMPOUND,H", "e_1_A02,e,1,A02,,DMSO ,,,COMPOUND,H",
            "e_1_A03,e,1,A03,  ,\u00a0a b,,,COMPOUND,H", header=HEADER.replace("gene", " gene "),
        )  # fmt: skip
    assert frame["treatment"].tolist() == ["DMSO", "DMSO", "a b"]
    assert frame["gene"].tolist() == [None, None, None]


def test_labels_that_a_spreadsheet_made_dates_are_warned_of_once(tmp_path):
    dates = ["2-Sep", "1-Mar", "Dec-01", "2021-09-02", "9/2/2021", "2. Sept"]
    genes = [*dates, "2-Sep", "SEPT2", "MARCH1", "DEC1", "NOV", "HLA-A", "OCT4", "1-2"]
    rows = [f"e_1_A{i:02d},e,1,A{i:02d},{g},{g}_guide_1,,,CRISPR,H" for i, g in enumerate(genes, 1)]
    with pytest.warns(UserWarning) as caught:
        frame = read(tmp_path, *rows)
    assert frame["gene"].tolist() == genes
    (warning,) = caught
    assert "6 labels look like dates: 2-Sep (row 1, gene), 1-Mar (row 2, gene), Dec-01" in str(warning.message)
    assert "SEPT2" in str(warning.message) and str(warning.message).count(", ...") == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_dates(pd.DataFrame({"gene": genes[7:] + [None]}), ["gene"], "x")


@contextlib.contextmanager
def nobody():
    """Be a user who owns nothing, if we are root, whom no permission stops."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_a_file_that_may_not_be_read(tmp_path):
    path = raw(tmp_path, f"{HEADER}\n{GOOD}\n".encode())
    path.chmod(0)
    with (
        nobody(),
        pytest.raises(MetadataError, match="metadata.csv: cannot be opened: Permission denied; check its perm"),
    ):
        read_metadata(path)
    with pytest.raises(MetadataError, match="cannot be opened: Is a directory"):
        read_metadata(tmp_path)


def test_columns_of_numbers_and_text_in_one_table(tmp_path):
    path = raw(tmp_path, b"Plate,f1,f2,Well\n08,1,NaN,A01\n8.0,-2.5e-3,,NA\n")
    frame = read_table(path, numbers=lambda name: name.startswith("f"))
    assert frame["Plate"].tolist() == ["08", "8.0"] and frame["Well"].tolist() == ["A01", "NA"]
    np.testing.assert_array_equal(frame[["f1", "f2"]].to_numpy(), [[1, np.nan], [-0.0025, np.nan]])
    with pytest.raises(MetadataError, match="row 2, f2: 'many' is no number"):
        read_table(raw(tmp_path, b"a,f2\n1,1\n1,many\n"), numbers=lambda name: name == "f2")
    pq.write_table(pa.table({"f": [1, 2], "p": ["1", None]}), tmp_path / "t.parquet")
    frame = read_table(tmp_path / "t.parquet", numbers=lambda name: name == "f")
    assert frame["f"].dtype == np.float64 and frame["p"].tolist() == ["1", None]
    with pytest.raises(MetadataError, match="column p holds string, not numbers"):
        pq.write_table(pa.table({"p": ["x"]}), tmp_path / "t.parquet")
        read_table(tmp_path / "t.parquet", numbers=lambda name: True)


CELL = st.none() | st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=12)


@settings(deadline=None)
@given(st.lists(st.tuples(CELL, CELL), min_size=1, max_size=6))
@example([("NA", "null"), ("", None), ('"', ","), ("a\r\nb", "\r"), ("\ufeff", "\x1a")])
def test_any_text_survives_the_table(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("t") / "t.csv"
    quoted = [",".join('"' + (v or "").replace('"', '""') + '"' for v in row) for row in rows]
    path.write_bytes(("a,b\r\n" + "\r\n".join(quoted)).encode())
    frame = read_table(path)
    assert list(frame.itertuples(index=False, name=None)) == [tuple(v or None for v in row) for row in rows]


@settings(deadline=None)
@given(st.binary(max_size=60))
@example(b"PAR1")
@example(b'a,b\n"')
@example(b"a\n\xff")
@example(b"\xef\xbb\xbf")
@example(b"\xef\xbb\xbf;")
def test_any_bytes_are_a_table_or_a_named_error(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("b") / "t.csv"
    path.write_bytes(content)
    try:
        frame = read_table(path)
    except MetadataError as error:
        assert str(path) in str(error)
    else:
        assert frame.columns.is_unique
