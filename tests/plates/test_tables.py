"""Text as written and numbers in blocks, from the same table stored as csv, parquet and h5ad."""

import anndata
import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st

from phenoica.errors import MetadataError
from phenoica.plates import tables
from phenoica.plates.tables import open_table

PLATES = ["08", "8.0", "123_456", "8"]
X = np.array([[1.5, -2, 3], [4, 5.25, 6], [7, 8, 9], [0.125, 1e-3, 2]])


def write(path, kind):
    """Write the same four wells in a kind of file."""
    frame = pd.DataFrame({"plate": PLATES, "gene": ["NA", "NaN", "None", ""]})
    features = pd.DataFrame(X, columns=["f_0", "f_1", "f_2"])
    target = path / f"p.{kind}"
    if kind == "h5ad" or kind == "sparse.h5ad":
        values = X.astype(np.float32)
        adata = anndata.AnnData(
            scipy.sparse.csr_matrix(values) if kind != "h5ad" else values, obs=frame.set_index("plate")
        )
        adata.var_names = features.columns
        adata.write_h5ad(target)
    elif kind == "parquet":
        frame.assign(gene=frame["gene"].replace("", None)).join(features).to_parquet(target, row_group_size=3)
    else:
        frame.join(features).to_csv(target, index=False)
    return target


@pytest.mark.parametrize("kind", ["csv", "csv.gz", "csv.bz2", "parquet", "h5ad", "sparse.h5ad"])
def test_every_kind_gives_the_same_text_and_numbers(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(tables, "ROWS_AT_A_TIME", 3)
    table = open_table(write(tmp_path, kind))
    assert (
        table.numeric == ["f_0", "f_1", "f_2"] or kind.startswith("csv") and table.numeric[-3:] == ["f_0", "f_1", "f_2"]
    )
    text = table.text(["gene", "plate"])
    assert list(text.columns) == ["gene", "plate"]
    assert text["plate"].tolist() == PLATES
    assert text["gene"].tolist() == ["NA", "NaN", "None", None]
    blocks = list(table.numbers(["f_2", "f_0"]))
    assert [start for start, _ in blocks] == [0, 3]
    values = np.concatenate([block for _, block in blocks])
    assert values.dtype == np.float32
    assert np.array_equal(values, X[:, [2, 0]].astype(np.float32))


@given(st.lists(st.text(st.characters(blacklist_categories=["Cs", "Cc"]), min_size=1), min_size=1, max_size=8))
@settings(max_examples=40, deadline=None)
def test_any_text_survives_a_csv(tmp_path_factory, texts):
    path = tmp_path_factory.mktemp("t") / "p.csv"
    pd.DataFrame({"plate": texts, "f": range(len(texts))}).to_csv(path, index=False)
    assert open_table(path).text(["plate"])["plate"].tolist() == texts


def test_bom_windows_line_ends_and_missing_numbers(tmp_path):
    path = tmp_path / "p.csv"
    path.write_bytes("\ufeffplate,f\r\n08,1\r\n8.0,\r\nβ/🧪,NaN\r\nx,inf\r\n".encode())
    table = open_table(path)
    assert table.columns == ["plate", "f"]
    assert table.text(["plate"])["plate"].tolist() == ["08", "8.0", "β/🧪", "x"]
    values = next(table.numbers(["f"]))[1][:, 0]
    assert values[0] == 1 and np.isnan(values[1:3]).all() and np.isinf(values[3])


def test_latin_1_bytes_name_line_and_byte(tmp_path):
    path = tmp_path / "p.csv"
    path.write_bytes("plate,gene,f\n1,A,1\n1,\xb5-opioid,2\n".encode("latin-1"))
    with pytest.raises(MetadataError, match=r"p\.csv: is not UTF-8: line 3, byte 3 is 0xB5"):
        open_table(path).text(["gene"])


def test_a_column_of_numbers_and_text_names_its_row(tmp_path):
    path = tmp_path / "p.csv"
    path.write_text("plate,f,g\n1,1,2\n1,oops,3\n")
    table = open_table(path)
    assert table.numeric == ["plate", "g"] and table.mixed == {"f": "oops"}
    with pytest.raises(MetadataError, match="row 2, f: 'oops' is no number"):
        list(table.numbers(["f", "g"]))


def test_numbers_too_large_for_float32_are_inf_not_an_error(tmp_path):
    path = tmp_path / "p.csv"
    path.write_text("f\n1e39\n2\n")
    assert next(open_table(path).numbers(["f"]))[1][:, 0].tolist() == [np.inf, 2]


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("p.csv", b"", "the file is empty"),
        ("p.csv", b"a,a\n1,2\n", "column a stands twice"),
        ("p.csv", b"a;b\n1;2\n", "separated by semicolons"),
        ("p.parquet", b"no parquet", "not a readable parquet file"),
        ("p.h5ad", b"no hdf5", "not a readable h5ad file"),
        ("p.xlsx", b"PK\x03\x04", "unknown kind of file; known are .csv"),
    ],
)
def test_files_that_are_no_tables(tmp_path, name, data, words):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(MetadataError, match=words):
        open_table(tmp_path / name)


@pytest.mark.parametrize("name", ["p.csv", "p.parquet", "p.h5ad"])
def test_a_missing_file_is_named(tmp_path, name):
    with pytest.raises(MetadataError, match=f"{name}: no such file"):
        open_table(tmp_path / name)


def test_text_columns_of_parquet_are_no_features(tmp_path):
    pd.DataFrame({"f": [1.0], "g": ["x"]}).to_parquet(tmp_path / "p.parquet")
    with pytest.raises(MetadataError, match=r"columns g \(.*string\) hold no numbers"):
        list(open_table(tmp_path / "p.parquet").numbers(["f", "g"]))
