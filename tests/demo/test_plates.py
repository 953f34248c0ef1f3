import hashlib
import re
from pathlib import Path

import imagecodecs
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from phenoica.demo import layout, plates
from phenoica.errors import ConfigError

design = layout.design


def short_design(seed, part="main"):
    """Return 61 wells of two plates: more than a row group, and no multiple of the shards."""
    wells = design(seed, part)
    return wells.iloc[50:111].reset_index(drop=True) if part == "main" else wells.head(9)


def write(folder, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "design", short_design)
        plates.write_demo(folder, **{"size": 64, "workers": 1, "n_shards": 2} | options)
    return folder


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return write(tmp_path_factory.mktemp("one"))


def tree(folder):
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(Path(folder).rglob("*"))
        if p.is_file()
    }


def read(folder):
    return pd.concat(
        [pq.read_table(p).to_pandas() for p in sorted(Path(folder, "shards").glob("*"))], ignore_index=True
    )


def test_files(demo):
    assert list(tree(demo)) == [
        "metadata.csv", "pretrain/metadata.csv", "pretrain/shards/train-00000-of-00001.parquet",
        "pretrain/truth.parquet",
        "shards/train-00000-of-00002.parquet", "shards/train-00001-of-00002.parquet", "truth.parquet",
    ]  # fmt: skip


def test_same_bytes_with_two_processes_and_again(demo, tmp_path):
    assert tree(write(tmp_path / "two", workers=2)) == tree(demo)


def test_another_seed_gives_other_pixels(demo, tmp_path):
    other = read(write(tmp_path, seed=5))
    assert other["jp2"][0]["bytes"] != read(demo)["jp2"][0]["bytes"]


def test_shard_schema_row_groups_and_straddling(demo):
    files = [pq.ParquetFile(p) for p in sorted((demo / "shards").glob("*"))]
    expected = pa.schema(
        [("__key__", pa.string()), ("jp2", pa.struct([("bytes", pa.binary()), ("path", pa.string())]))]
    )
    for file in files:
        assert file.schema_arrow.equals(expected)
        groups = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        assert groups[:-1] == [100] * (len(groups) - 1) and groups[-1] <= 100
        assert len(groups) > 1
    assert files[0].metadata.num_rows % 6 != 0  # a well straddles the two shards
    last, first = files[0].read()["__key__"][-1].as_py(), files[1].read()["__key__"][0].as_py()
    assert last.rsplit("_", 1)[0] == first.rsplit("_", 1)[0]


@pytest.mark.parametrize("wells, shards", [(1728, 3), (1728, 1), (61, 2), (300, 7), (40, 5)])
def test_cuts_never_fall_between_wells(wells, shards):
    cuts = plates.shard_cuts(wells * 6, shards)
    assert len(cuts) == shards and cuts[-1] == wells * 6
    assert all(c % 6 for c in cuts[:-1]) and sorted(set(cuts)) == cuts


def test_keys_and_metadata_agree(demo):
    for folder in (demo, demo / "pretrain"):
        keys = read(folder)["__key__"]
        parts = keys.str.extract(r"^([\w-]+)/Plate(\d+)/([A-Z]{1,2}\d\d)_s1_([1-6])$")
        assert not parts.isna().any(axis=None)
        ids = parts[0] + "_" + parts[1] + "_" + parts[2]
        metadata = pd.read_csv(folder / "metadata.csv", dtype=str, keep_default_na=False)
        assert list(dict.fromkeys(ids)) == list(metadata["well_id"])
        assert parts.groupby(ids.to_numpy())[3].agg("".join).eq("123456").all()


def test_metadata_follows_the_published_conventions(demo):
    table = pd.read_csv(demo / "metadata.csv", dtype=str, keep_default_na=False)
    assert list(table) == [
        "well_id", "experiment_name", "plate", "address", "gene", "treatment", "SMILES", "concentration",
        "perturbation_type", "cell_type", "well_type_label",
    ]  # fmt: skip
    assert (table["well_id"] == table["experiment_name"] + "_" + table["plate"] + "_" + table["address"]).all()
    control = table["treatment"] == "EMPTY_control"
    assert control.any() and ((table["gene"] == "") == control).all()
    assert ((table["well_type_label"] == "negative_control") == control).all()
    assert (table["perturbation_type"] == "CRISPR").all()
    assert (table[["SMILES", "concentration"]] == "").all(axis=None)
    rest = table[~control]
    assert all(re.fullmatch(f"{g}_guide_[1-6]", t) for g, t in zip(rest["gene"], rest["treatment"], strict=True))
    assert set(table["well_type_label"]) <= {
        "query",
        "negative_control",
        "positive_control",
        "cutting_control",
    }


def test_truth_has_a_row_a_well_with_all_factors(demo):
    truth, table = pd.read_parquet(demo / "truth.parquet"), pd.read_csv(demo / "metadata.csv", dtype=str)
    assert list(truth["well_id"]) == list(table["well_id"])
    assert truth["true_cell_count"].between(0, 80).all() and truth["true_cell_count"].std() > 2
    assert {f"phenotype_{a}" for a in layout.AXES} <= set(truth)
    assert np.isfinite(truth.select_dtypes("number")).all(axis=None)
    assert not truth.columns.duplicated().any()


def test_images_decode_to_what_was_rendered(demo):
    image = imagecodecs.jpeg2k_decode(read(demo)["jp2"][7]["bytes"])
    assert image.shape == (64, 64) and image.dtype == np.uint8
    wells = short_design(20260)
    row = layout.factors(wells, 20260).iloc[1].to_dict()
    own = (20260, *(int(wells.loc[1, c]) for c in ("experiment_number", "plate", "row", "column")))
    from phenoica.demo.render import render_well

    drawn = render_well(row, 64, own)[0][1]
    error = np.sqrt(np.mean((image.astype(float) - drawn) ** 2))
    assert error < 6


def test_streams_are_about_one_and_a_half_kilobytes():
    wells = design(20260)
    factors = layout.factors(wells, 20260).to_dict("records")
    sizes = []
    for i in range(0, len(wells), 60):
        job = ([""] * 6, factors[i], 128, (20260, i))
        sizes += [len(b) for _, b in plates._render(job)[0]]
    assert 1200 < np.mean(sizes) < 2200


def test_pretrain_is_never_mixed_in(demo):
    main, extra = read(demo)["__key__"], read(demo / "pretrain")["__key__"]
    assert not main.str.startswith("pretrain").any()
    assert extra.str.startswith("pretrain-00").all()


def test_a_second_demo_replaces_the_first(tmp_path):
    write(tmp_path, n_shards=3)
    write(tmp_path, n_shards=2)
    assert len(list((tmp_path / "shards").glob("*"))) == 2


def test_a_broken_run_leaves_no_shards(tmp_path, monkeypatch):
    calls = []

    def broken(images):
        calls.append(1)
        if len(calls) > 30:
            raise KeyboardInterrupt
        return [b"x"] * 6

    monkeypatch.setattr(plates, "encode_well", broken)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path)
    assert not tree(tmp_path)


@pytest.mark.parametrize("option, message", [
    ({"size": 100}, "demo.size is 100"), ({"size": 32}, "demo.size is 32"), ({"seed": -1}, "demo.seed is -1"),
    ({"n_shards": 0}, "demo.shards is 0"), ({"workers": 0}, "workers is 0"),
])  # fmt: skip
def test_wrong_options_are_named(tmp_path, option, message):
    with pytest.raises(ConfigError, match=message):
        plates.write_demo(tmp_path, **option)
    assert not tree(tmp_path)
