from urllib.parse import quote

import imagecodecs
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from phenoica.errors import ImageError, MetadataError, ShardError
from phenoica.plates.address import format_address
from phenoica.plates.images import decode_image
from phenoica.plates.run import AVAILABLE_CHANNELS, QUARANTINE_COLUMNS, inputs, locate, read_wells, run_plates
from phenoica.plates.shards import find_shards, index_frame, open_shard, parse_key, read_images


@given(
    st.from_regex(r"[A-Za-z0-9_.-]{1,12}", fullmatch=True), st.integers(1, 99), st.integers(1, 32), st.integers(1, 48),
    st.integers(1, 9), st.integers(1, 11),
)  # fmt: skip
def test_keys_come_back(experiment, plate, row, column, site, channel):
    address = format_address(row, column)
    key = f"{experiment}/Plate{plate}/{address}_s{site}_{channel}"
    assert parse_key(key) == (experiment, str(plate), address, site, channel)


@given(
    st.text(max_size=40)
    | st.from_regex(r"[^/]*/(Plate)?[^/]*/[A-Za-z]{1,3}\d{1,3}_s\d{1,12}_\d{1,12}\s?")
    | st.none() | st.integers() | st.binary(max_size=9) | st.floats()
)  # fmt: skip
@example("e/Plate1/A01_s1_1\n")
@example("e/Plate1/A01_s\u0661_1")
@example("e/Plate1/A01_s1_" + "9" * 5000)
@example("e/f/Plate1/A01_s1_1")
def test_any_key_is_parsed_whole_or_a_named_error(key):
    try:
        experiment, plate, address, site, channel = parse_key(key)
    except ShardError as error:
        assert repr(key) in str(error)
    else:
        again = f"{experiment}/Plate{plate}/{address}_s{site}_{channel}"
        assert parse_key(again) == (experiment, plate, address, site, channel)
        assert experiment and plate and "/" not in experiment + plate
        assert key.startswith(f"{experiment}/") and key.split("/")[1] in (plate, f"Plate{plate}")


@pytest.mark.parametrize(
    ("key", "plate", "address"),
    [
        ("e/Plate1/A01_s1_1", "1", "A01"),
        ("e/Plate10/A01_s1_1", "10", "A01"),
        ("e/Plate08/a1_s1_1", "08", "A01"),
        ("e/Plate123_456/AA2_s1_1", "123_456", "AA02"),
        ("e/8.0/AF48_s1_1", "8.0", "AF48"),
    ],
)
def test_plate_1_is_not_plate_10_and_ids_stay_text(key, plate, address):
    assert parse_key(key) == ("e", plate, address, 1, 1)


@pytest.mark.parametrize("address", ["AG01", "A49", "A00", "A001", "AAA1", "A", "01"])
def test_keys_whose_address_no_plate_has(address):
    with pytest.raises(ShardError, match=f"unparsable key 'e/Plate1/{address}_s1_1'"):
        parse_key(f"e/Plate1/{address}_s1_1")


@pytest.mark.parametrize(
    "key",
    ["/Plate1/A01_s1_1", "e/Plate1/A01_s1_1\n", "e/Plate1/A01_s1_1.jp2", " e/f/Plate1/A01_s1_1", "e//A01_s1_1", 7],
)
def test_keys_with_something_before_or_after(key):
    with pytest.raises(ShardError, match="unparsable key"):
        parse_key(key)


@pytest.mark.parametrize("key", ["", "gene-001/Plate1/AA02", "gene-001/AA02_s1_1", "gene-001/Plate1/A99_s1_1", None])
def test_unparsable_keys(key):
    with pytest.raises(ShardError, match="unparsable key"):
        parse_key(key)


def test_plate_folder_without_the_word_plate():
    assert parse_key("x/BR00117010-13/N09_s5_2", 384) == ("x", "BR00117010-13", "N09", 5, 2)


def test_lossless_image_comes_back_and_others_are_refused():
    image = (np.arange(32 * 32) % 251).astype(np.uint8).reshape(32, 32)
    data = imagecodecs.jpeg2k_encode(image, reversible=True)
    np.testing.assert_array_equal(decode_image(data), image)
    with pytest.raises(ImageError, match="16-bit pixels"):
        decode_image(imagecodecs.jpeg2k_encode(image.astype(np.uint16) * 100, reversible=True))
    with pytest.raises(ImageError, match="3 samples a pixel"):
        decode_image(imagecodecs.jpeg2k_encode(np.dstack([image] * 3), reversible=True))
    with pytest.raises(ImageError, match="truncated or damaged"):
        decode_image(data[: len(data) // 2])
    with pytest.raises(ImageError, match="empty jp2 cell"):
        decode_image(None)
    with pytest.raises(ImageError, match="not a JPEG 2000"):
        decode_image(imagecodecs.png_encode(image))


@given(st.integers(0, 2**32 - 1), st.integers(64, 400), st.floats(0.1, 0.8))
@settings(max_examples=30, deadline=None)
def test_a_zeroed_block_is_not_trusted_though_it_decodes(seed, length, place):
    rng = np.random.default_rng(seed)
    image = np.clip(np.add.outer(np.arange(96), rng.integers(0, 60, 96)), 0, 255).astype(np.uint8)
    data = imagecodecs.jpeg2k_encode(image, reversible=True, codecformat="jp2")
    start = int(place * len(data))
    broken = data[:start] + bytes(length) + data[start + length :]
    with pytest.raises(ImageError, match="a hole: a run of 64 or more zero bytes"):
        decode_image(broken)


@pytest.mark.parametrize("level", [0, 20, 40])
def test_dark_empty_and_sparse_images_hold_no_hole(level):
    sparse = np.zeros((512, 512), np.uint8)
    sparse[100:104, 300:310] = 250
    for image in (np.zeros((512, 512), np.uint8), np.full((64, 64), 255, np.uint8), sparse):
        for form in ("jp2", "j2k"):
            data = imagecodecs.jpeg2k_encode(image, level=level, reversible=not level, codecformat=form)
            assert decode_image(data).shape == image.shape


def test_keys_are_parsed_alike_one_by_one_and_all_at_once(tmp_path):
    keys = [
        "gene-001/Plate1/AA02_s1_1", "gene-001/Plate10/AA02_s1_1", "x/BR00117010-13/n9_s5_2", "x_y/PlateZ/a01_s12_3",
        "gène/Plate1/B02_s1_4", "🧬/Plate8.0/B2_s1_4", "", "gene-001/Plate1/AG01_s1_1", "gene-001/Plate1/A49_s1_1",
        "gene-001/Plate1/AA02_s1", "a/b/c/A01_s1_1", "gene-001/Plate1/A00_s1_1", "gene-001/Plate1/A01_s1_1234567890",
        "e/Plate08/A01_s1_1", "e/Plate123_456/A01_s1_1", "e/Plate1/A01_s1_1\n", None,
    ]  # fmt: skip
    pq.write_table(pa.table({"__key__": keys, "jp2": [b"0"] * len(keys)}), tmp_path / "s.parquet", row_group_size=4)
    good, bad = index_frame([tmp_path / "s.parquet"])
    found = {(g, r): (w, s, c) for w, s, c, g, r in good[["well_id", "site", "channel", "row_group", "row"]].to_numpy()}
    reasons = dict(zip(zip(bad["row_group"], bad["row"], strict=True), bad["reason"], strict=True))
    for i, key in enumerate(keys):
        try:
            experiment, plate, address, site, channel = parse_key(key)
        except ShardError as error:
            assert reasons.pop((i // 4, i % 4)) == str(error)
        else:
            assert found.pop((i // 4, i % 4)) == (f"{experiment}_{plate}_{address}", site, channel)
    assert not found and not reasons
    assert bad["key"].notna().all() and "(no key)" in set(bad["key"])  # an image without a key is a bad image too
    assert good["experiment"].tolist() == [str(k).split("/")[0] for k in good["key"]]


def test_available_channels_keeps_what_all_sites_of_a_well_have():
    wells = pd.DataFrame({"well_id": ["e_1_A01", "e_1_A02", "e_1_A03"]})
    present = {"e_1_A01": [(1, 1), (1, 2), (2, 2), (2, 3)], "e_1_A02": [(1, 1), (2, 2)], "e_1_A03": [(1, 3)]}
    rows = [(f"{w}{s}{c}", w, s, c, 0, 0, 10 * s + c) for w, pairs in present.items() for s, c in pairs]
    images = pd.DataFrame(rows, columns=["key", "well_id", "site", "channel", "shard", "row_group", "row"])
    located, quarantine = locate(wells, images, [1, 2, 3], AVAILABLE_CHANNELS)
    assert located["well_id"].tolist() == ["e_1_A01", "e_1_A03"]
    assert located["image_row"].tolist() == [[12, 22], [13]] and located["image_channel"].tolist() == [[2, 2], [3]]
    assert quarantine["well_id"].tolist() == ["e_1_A02"] * 2
    assert quarantine["reason"].iloc[0] == "missing channel 2, 3 at site 1; the well is left out"
    assert locate(wells, images, [1, 2, 3])[0].empty


def test_rows_of_a_row_group_and_plain_bytes(tmp_path):
    path = tmp_path / "s.parquet"
    pq.write_table(pa.table({"__key__": list("abcd"), "jp2": [b"0", b"1", None, b"3"]}), path, row_group_size=2)
    shard = open_shard(path)
    assert read_images(shard, 1, [1, 0]) == [("d", b"3"), ("c", None)]
    assert read_images(shard, 0, [0, 1]) == [("a", b"0"), ("b", b"1")]


def test_what_is_no_shard(tmp_path):
    (tmp_path / "text.parquet").write_text("hello")
    with pytest.raises(ShardError, match="not a readable parquet file"):
        open_shard(tmp_path / "text.parquet")
    pq.write_table(pa.table({"a": [1]}), tmp_path / "other.parquet")
    with pytest.raises(ShardError, match="expected columns __key__ and jp2"):
        open_shard(tmp_path / "other.parquet")
    pq.write_table(pa.table({"__key__": ["a"], "jp2": [1.5]}), tmp_path / "numbers.parquet")
    with pytest.raises(ShardError, match="column jp2 is double"):
        open_shard(tmp_path / "numbers.parquet")
    with pytest.raises(ShardError, match="matches no file"):
        find_shards(["nothing-*.parquet"], tmp_path)


def test_index_of_a_screen_cut_within_a_well(tiny_screen):
    tiny_screen.write()
    images, rejected = index_frame(find_shards(["shards/*.parquet"], tiny_screen.folder))
    assert rejected.empty
    assert images["key"].tolist() == list(tiny_screen.images)
    assert images.groupby("well_id")["shard"].nunique().max() == 2
    assert (images.groupby(["shard", "row_group"])["row"].max() < 10).all()


def run(screen):
    config = screen.write()
    out = screen.folder / "plates"
    run_plates(find_shards(["shards/*.parquet"], screen.folder), screen.folder / "metadata.csv", out, config)
    return read_wells(out / "wells.parquet"), pd.read_csv(out / "quarantine.csv"), out


def test_plates_stage_locates_every_image(tiny_screen):
    wells, quarantine, out = run(tiny_screen)
    assert quarantine.empty
    assert len(wells) == 16
    for _, well in wells.iterrows():
        assert well["image_channel"].tolist() == [1, 2, 3, 4, 5, 6]
        assert well["unit"] == well["image_shard"][0]
        where = zip(well["image_shard"], well["image_row_group"], well["image_row"], strict=True)
        for channel, (number, group, row) in enumerate(where):
            shard = open_shard(tiny_screen.folder / f"shards/train-{number}.parquet")
            image = decode_image(read_images(shard, group, [row])[0][1])
            np.testing.assert_array_equal(image, tiny_screen.raw[well["well_id"]][channel])
    units = pd.read_csv(out / "units.csv", dtype=str)
    assert units.groupby("kind")["name"].apply(list).to_dict() == {
        "shard": ["0", "1"], "experiment": ["gene-001", "gene-002"], "fold": ["0", "1"],
    }  # fmt: skip


def test_missing_channel_bad_key_orphans_and_duplicates_are_quarantined(tiny_screen, capsys):
    del tiny_screen.images["gene-001/Plate1/B02_s1_4"]
    tiny_screen.images["nonsense"] = b""
    tiny_screen.images["gene-001/Plate1/AF48_s1_1"] = b""  # no metadata
    tiny_screen.rows.append({**tiny_screen.rows[0], "well_id": "gene-001_1_H10", "address": "H10"})  # no images
    wells, quarantine, _ = run(tiny_screen)
    assert "gene-001_1_B02" not in set(wells["well_id"])
    assert len(wells) == 15
    reasons = quarantine.groupby("reason")["well_id"].agg(["size", "first"])
    assert tuple(reasons.loc["missing channel 4 at site 1; the well is left out"]) == (5, "gene-001_1_B02")
    assert reasons.loc["metadata without images; no shard holds the well", "first"] == "gene-001_1_H10"
    named = quarantine.set_index("well_id")["file"]
    assert named["gene-001_1_H10"].endswith("metadata.csv") and named["gene-001_1_AF48"].endswith("train-1.parquet")
    assert reasons.filter(like="image of a well without metadata", axis=0)["first"].tolist() == ["gene-001_1_AF48"]
    assert len(reasons.filter(like="unparsable key 'nonsense'", axis=0)) == 1
    assert "missing channel 4" in capsys.readouterr().err


def test_a_plate_without_controls_is_named(tiny_screen, capsys):
    for row in tiny_screen.rows:
        if row["experiment_name"] == "gene-002" and row["treatment"] == "EMPTY_control":
            row.update(treatment="TP53_guide_1", gene="TP53")
    wells, _, _ = run(tiny_screen)
    assert "1 plate(s) have fewer than 2 negative controls, first gene-002_1" in capsys.readouterr().err
    assert (wells.loc[wells["experiment"] == "gene-002", "control_role"] == "none").all()


def test_a_repeated_key_is_used_once(tmp_path):
    for number in (0, 1):
        pq.write_table(pa.table({"__key__": ["e/Plate1/A01_s1_1"], "jp2": [b"0"]}), tmp_path / f"{number}.parquet")
    images, rejected = index_frame(find_shards(["*.parquet"], tmp_path))
    assert images["shard"].tolist() == [0]
    assert rejected[["well_id", "shard"]].values.tolist() == [["e_1_A01", 1]]
    assert "duplicate key" in rejected["reason"].iloc[0]


def test_sites_are_kept_in_order_and_other_channels_left_aside():
    wells = pd.DataFrame({"well_id": ["e_1_A01"]})
    rows = [(f"k{s}{c}", "e_1_A01", s, c, 0, 0, 10 * s + c) for s, c in [(2, 1), (1, 3), (2, 3), (1, 1), (1, 9)]]
    images = pd.DataFrame(rows, columns=["key", "well_id", "site", "channel", "shard", "row_group", "row"])
    located, quarantine = locate(wells, images, [3, 1])
    assert located["image_row"].iloc[0] == [13, 11, 23, 21]
    assert quarantine.columns.tolist() == list(QUARANTINE_COLUMNS)
    assert quarantine.empty


def test_plate_1_and_plate_10_of_one_experiment_stay_apart(tmp_path):
    keys = [f"e/Plate{p}/{a}_s1_{c}" for p in ("1", "10", "123_456") for a in ("A01", "aa2") for c in (1, 2)]
    pq.write_table(pa.table({"__key__": keys, "jp2": [b"0"] * len(keys)}), tmp_path / "0.parquet")
    images, rejected = index_frame([tmp_path / "0.parquet"])
    assert rejected.empty
    counts = images.groupby("well_id").size().to_dict()
    assert counts == {f"e_{p}_{a}": 2 for p in ("1", "10", "123_456") for a in ("A01", "AA02")}


def test_odd_names_reach_wells_anndata_and_pages(tiny_screen):
    """From the csv over wells.parquet and the h5ad to the plate pages, their file names and the links to them."""
    import anndata

    from phenoica import files, schema
    from phenoica.embed.assemble import as_categories
    from phenoica.qc.run import run_qc
    from phenoica.report import plate_pages

    names = ['say "hi", twice', "NA", "None", "</script>", "anti-TNF/IL-6", "a_b_c", "β-catenin", "🧪 drug"]
    experiment, smiles = "β_screen 🧪", "C(=O),N |t:1,^1:2|"
    treated = [row for row in tiny_screen.rows if row["treatment"] != "EMPTY_control"]
    for row, name in zip(treated, names, strict=True):
        row.update(treatment=name, gene=name, SMILES=smiles)
    for row in tiny_screen.rows[8:]:
        row.update(experiment_name=experiment, plate="12_34", cell_type="nan")
        row["well_id"] = f"{experiment}_12_34_{row['address']}"
    renamed = {k.replace("gene-002/Plate1", f"{experiment}/Plate12_34"): v for k, v in tiny_screen.images.items()}
    tiny_screen.images = renamed
    wells, quarantine, out = run(tiny_screen)
    assert quarantine.empty and set(wells["plate_id"]) == {"gene-001_1", f"{experiment}_12_34"}
    assert set(wells["treatment"]) == {"EMPTY_control", *names}
    assert set(names) <= set(pd.read_csv(out / "design.csv", keep_default_na=False)["treatment"])

    obs = as_categories(wells[list(schema.WELL_COLUMNS)]).set_index(schema.WELL_ID)
    obs[schema.N_TILES], obs[schema.CELL_COUNT] = 4, 1.0 + np.arange(len(obs))
    measures = {"mean": 40.0, "sd": 20.0, "saturated": 0.001, "empty": 0.02, "focus": -2.4}
    adata = anndata.AnnData(np.eye(len(obs), 4, dtype=np.float32), obs=obs)
    adata.obsm[schema.IMAGE_MEASURES] = pd.DataFrame({f"c1_{m}": v for m, v in measures.items()}, obs.index)
    adata.uns[schema.UNS] = dict.fromkeys(schema.UNS_KEYS, "x")
    files.write_h5ad(out / "x.h5ad", adata)
    back = anndata.read_h5ad(out / "x.h5ad").obs
    assert back["treatment"].astype(str).to_dict() == wells.set_index("well_id")["treatment"].to_dict()
    assert set(back["smiles"].dropna()) == {smiles} and set(back["cell_type"]) == {"HUVEC", "nan"}

    run_qc(out / "x.h5ad", out / "qc.parquet", out / "plates.parquet", tiny_screen.config())
    pages, plotly = out / "report/plates", out / "report/plotly.min.js"
    plate_pages.write_experiment(
        out / "x.h5ad", out / "qc.parquet", out / "plates.parquet", experiment, pages / experiment, plotly
    )
    plate_pages.write_index(out / "plates.parquet", out / "x.h5ad", pages / "index.html")
    page = (pages / experiment / "12_34.html").read_text(encoding="utf-8")
    for name in names[4:]:
        assert name in page
    assert page.count("</script>") == page.count("<script")
    assert f"{quote(experiment)}/12_34.html" in (pages / "index.html").read_text(encoding="utf-8")


def test_orphans_stop_the_run_where_that_is_asked_for(tiny_screen):
    tiny_screen.images["gene-001/Plate1/AF48_s1_1"] = b""  # no metadata
    tiny_screen.images["gene-001/Plate1/AF48_s1_2"] = b""
    tiny_screen.rows.append({**tiny_screen.rows[0], "well_id": "gene-001_1_H10", "address": "H10"})  # no images
    config = tiny_screen.write()
    shards, metadata = inputs(config)
    config["plates"]["orphans"] = "error"
    both = (
        r"1 wells are not in .*metadata.csv: gene-001_1_AF48; 1 wells are not in .*train-0.parquet and 1 more: .*_H10"
    )
    with pytest.raises(MetadataError, match=both):
        run_plates(shards, metadata, tiny_screen.folder / "out", config)
    assert not (tiny_screen.folder / "out").exists()
