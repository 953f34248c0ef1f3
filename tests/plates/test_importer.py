"""The import from files to shards, and from there into the plates stage; killed for real, and resumed."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import imagecodecs
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import tifffile
import yaml
from typer.testing import CliRunner

from phenoica.cli import app
from phenoica.config import resolve
from phenoica.errors import ImageImportError, StorageError, TooManyBadImages
from phenoica.plates.image_lists import find_images, read_list, read_platemap
from phenoica.plates.image_plan import ImportOptions, import_options, plan_images
from phenoica.plates.images import decode_image
from phenoica.plates.importer import import_images, read_receipt
from phenoica.plates.run import read_wells, run_plates
from phenoica.plates.shards import find_shards, index_frame, parse_key

ROOT = Path(__file__).resolve().parents[2]
runner = CliRunner()


def picture(seed: int, low: int = 200, high: int = 5000, side: int = 32) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, high, (side, side)).astype(np.uint16)


def write_tiff(path: Path, image: np.ndarray, **how) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    tifffile.imwrite(path, image, photometric="minisblack", **how)


def write_list(folder: Path, rows: list[dict]) -> Path:
    path = folder / "images.csv"
    pd.DataFrame(rows).to_csv(path, index=False)
    return path


def screen(folder: Path, wells: int = 4, channels: int = 2, sites: int = 1, side: int = 32, plates=("1",)) -> Path:
    """Write 16-bit TIFFs and their list; every image differs."""
    rows = []
    for plate in plates:
        for well in range(wells):
            for site in range(1, sites + 1):
                for channel in range(1, channels + 1):
                    name = f"img/{plate}_{well}_{site}_{channel}.tif"
                    write_tiff(folder / name, picture(len(rows), side=side))
                    rows.append({
                        "experiment": "e", "plate": plate, "well": f"{'ABCDEFGH'[well // 12]}{well % 12 + 1:02d}",
                        "site": site, "channel": channel, "path": name,
                        "treatment": "DMSO" if well < 2 else f"drug {well}", "perturbation_type": "COMPOUND",
                    })  # fmt: skip
    return write_list(folder, rows)


def run(source: Path, out: Path, threads: int = 2, max_bad_fraction: float = 0.01, **options) -> Path:
    import_images(read_list(source), out, ImportOptions(**options), threads=threads, max_bad_fraction=max_bad_fraction)
    return out


def images_of(out: Path) -> dict[str, np.ndarray]:
    """Return the pixels of all shards, by key, in the order of the shards."""
    rows = [row for path in sorted(out.glob("train-*.parquet")) for row in pq.read_table(path).to_pylist()]
    return {row["__key__"]: decode_image(row["jp2"]["bytes"]) for row in rows}


def bytes_of(out: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(out.iterdir())}


def expected(image: np.ndarray, low: float, high: float) -> np.ndarray:
    return np.clip(np.rint((image.astype(float) - low) * 255 / (high - low)), 0, 255)


def test_one_fixed_scale_a_channel_over_all_plates(tmp_path):
    dim, bright = picture(0, 1000, 2000), picture(1, 4000, 8000)
    write_tiff(tmp_path / "a.tif", dim)
    write_tiff(tmp_path / "b.tif", bright)
    write_tiff(tmp_path / "c.tif", picture(2, 0, 300))
    write_tiff(tmp_path / "d.tif", picture(3, 0, 600))
    base = {"experiment": "e", "well": "A01"}
    source = write_list(tmp_path, [
        {**base, "plate": "1", "channel": 1, "path": "a.tif"}, {**base, "plate": "1", "channel": 2, "path": "c.tif"},
        {**base, "plate": "2", "channel": 1, "path": "b.tif"}, {**base, "plate": "2", "channel": 2, "path": "d.tif"},
    ])  # fmt: skip
    out = run(source, tmp_path / "out", low=1, high=99)
    scale = json.loads((out / "scaling.json").read_text())
    low, high = np.percentile(np.stack([dim, bright]), [1, 99])
    assert (scale["percentiles"], scale["sample"], scale["seed"]) == ([1, 99], 100, 0)
    assert scale["channels"]["1"]["images"] == 2
    assert np.isclose(scale["channels"]["1"]["low"], low) and np.isclose(scale["channels"]["1"]["high"], high)
    images = images_of(out)
    for plate, raw in (("1", dim), ("2", bright)):
        image = images[f"e/Plate{plate}/A01_s1_1"].astype(float)
        assert np.abs(image - expected(raw, low, high)).max() <= 1e-9
    # brightness above `low` keeps its ratio, as no scale by image would
    means = [images[f"e/Plate{p}/A01_s1_1"].mean() for p in "12"]
    assert np.isclose(means[1] / means[0], (bright.mean() - low) / (dim.mean() - low), rtol=0.02)


def test_shards_are_sorted_in_groups_of_a_hundred_and_read_by_the_plates_stage(tmp_path):
    source = screen(tmp_path, wells=20, channels=3, sites=2, plates=("2", "10"), side=16)
    out = run(source, tmp_path / "out", images_per_shard=130)
    shards = sorted(out.glob("train-*.parquet"))
    assert [p.name for p in shards] == [f"train-0000{i}-of-00002.parquet" for i in range(2)]
    keys = [k for p in shards for k in pq.read_table(p, columns=["__key__"])["__key__"].to_pylist()]
    assert keys == sorted(keys) and len(keys) == 240
    groups = [[m.row_group(i).num_rows for i in range(m.num_row_groups)] for m in map(pq.read_metadata, shards)]
    assert groups == [[100, 30], [100, 10]]
    assert str(pq.read_schema(shards[0]).field("jp2").type) == "struct<bytes: binary, path: string>"
    assert "e/Plate10/A01_s2_3" in keys
    metadata = pd.read_csv(out / "metadata.csv", dtype=str)
    assert metadata.columns[:11].tolist() == [
        "well_id", "experiment_name", "plate", "address", "gene", "treatment", "SMILES", "concentration",
        "perturbation_type", "cell_type", "well_type_label",
    ]  # fmt: skip
    config = resolve({
        "run": "r", "source": "shards",
        "plates": {
            "shards": [f"{out}/train-*.parquet"], "metadata": f"{out}/metadata.csv", "plate_format": 96,
            "channels": [1, 2, 3], "negative_controls": ["DMSO"],
        },
    })  # fmt: skip
    run_plates(find_shards(config["plates"]["shards"]), out / "metadata.csv", tmp_path / "plates", config)
    wells = read_wells(tmp_path / "plates/wells.parquet")
    assert len(wells) == 40
    assert wells.loc[wells["well_id"] == "e_10_A03", "image_site"].iloc[0].tolist() == [1, 1, 1, 2, 2, 2]
    assert (wells["control"] == "negative").sum() == 4
    assert pd.read_csv(tmp_path / "plates/quarantine.csv").empty


def test_threads_change_no_byte_and_a_second_import_changes_nothing(tmp_path, capsys):
    source = screen(tmp_path)
    one, three = run(source, tmp_path / "one", threads=1), run(source, tmp_path / "three", threads=3)
    assert bytes_of(one) == bytes_of(three)
    before = {path: path.stat().st_mtime_ns for path in one.glob("train-*")}
    capsys.readouterr()
    run(source, one)
    assert "8 images of 4 wells in 1 shards (1 were already there), 0 quarantined" in capsys.readouterr().err
    assert before == {path: path.stat().st_mtime_ns for path in one.glob("train-*")}


def test_a_lost_and_a_damaged_shard_are_written_again(tmp_path, capsys):
    source = screen(tmp_path, wells=6)
    out = run(source, tmp_path / "out", images_per_shard=4)
    whole = bytes_of(out)
    (out / "train-00001-of-00003.parquet").unlink()
    (out / "train-00002-of-00003.parquet").write_bytes(b"PAR1 no more")
    (out / ".train-00000-of-00003.parquet.abc.parquet").write_bytes(b"half a file of a killed import")
    run(source, out, images_per_shard=4)
    assert bytes_of(out) == whole
    assert "train-00002-of-00003.parquet is damaged" in capsys.readouterr().err


def test_other_options_images_or_scales_are_refused(tmp_path):
    source = screen(tmp_path)
    out = run(source, tmp_path / "out", images_per_shard=4)
    (out / "train-00001-of-00002.parquet").unlink()  # as if killed
    whole = bytes_of(out)
    with pytest.raises(
        ImageImportError, match="with other options: size was None and is now 16; choose another folder"
    ):
        run(source, out, images_per_shard=4, size=16)
    with pytest.raises(ImageImportError, match="high was 99.9 and is now 99"):
        run(source, out, images_per_shard=4, high=99)
    with pytest.raises(ImageImportError, match="images_per_shard was 4 and is now 6000"):
        run(source, out)
    with pytest.raises(ImageImportError, match="with other scales than --scaling"):
        import_images(
            read_list(source), out, ImportOptions(images_per_shard=4), scaling=out / "scaling.json"
        )  # fmt: skip
    assert bytes_of(out) == whole
    write_tiff(tmp_path / "img/1_0_1_1.tif", picture(99))  # the same size, another time
    with pytest.raises(
        ImageImportError, match=r"of other images: 'e/Plate1/A01_s1_1,img/1_0_1_1.tif.* is now 'e/Plate1/A01"
    ):
        run(source, out, images_per_shard=4)
    strange = tmp_path / "strange"
    strange.mkdir()
    (strange / "train-00000-of-00001.parquet").write_bytes(b"x")
    with pytest.raises(ImageImportError, match="shards that are not from an import"):
        run(source, strange)
    (out / "import.json").write_text("{")
    with pytest.raises(ImageImportError, match=r"import.json: is damaged"):
        run(source, out, images_per_shard=4)


def test_a_changed_scale_is_refused(tmp_path):
    source = screen(tmp_path)
    out = run(source, tmp_path / "out")
    (out / "scaling.json").write_text((out / "scaling.json").read_text().replace('"low": ', '"low": 1'))
    with pytest.raises(ImageImportError, match=r"scaling.json: was changed since the import began"):
        run(source, out)


def test_the_scale_of_an_earlier_import_is_used_again(tmp_path):
    first = run(screen(tmp_path / "a"), tmp_path / "first", low=5, high=95)
    source = write_list(tmp_path, [{"experiment": "f", "plate": "1", "well": "A01", "channel": 1, "path": "x.tif"}])
    image = picture(7, 300, 9000)
    write_tiff(tmp_path / "x.tif", image)
    out = tmp_path / "second"
    import_images(read_list(source), out, ImportOptions(), scaling=first / "scaling.json")
    assert (out / "scaling.json").read_text() == (first / "scaling.json").read_text()
    scale = json.loads((out / "scaling.json").read_text())["channels"]["1"]
    np.testing.assert_array_equal(images_of(out)["f/Plate1/A01_s1_1"], expected(image, scale["low"], scale["high"]))
    for text, words in (("{}", "is no scaling.json"), ('{"channels": {"1": 5}}', "is no scaling.json")):
        (tmp_path / "s.json").write_text(text)
        with pytest.raises(ImageImportError, match=words):
            import_images(read_list(source), tmp_path / "third", ImportOptions(), scaling=tmp_path / "s.json")
    with pytest.raises(ImageImportError, match="cannot be read"):
        import_images(read_list(source), tmp_path / "third", ImportOptions(), scaling=tmp_path / "no.json")


def test_the_sample_is_spread_over_plates_and_follows_from_the_seed(tmp_path):
    from phenoica.plates.image_plan import PlannedImage
    from phenoica.plates.importer import sample_images

    images = [PlannedImage(f"{p}{i}", "w", p, c, (), None) for p in "abc" for i in range(20) for c in (1, 2)]
    chosen = sample_images(images, 1, 7, seed=3)
    assert len(set(chosen)) == 7 and {image.channel for image in chosen} == {1}
    assert sorted(pd.Series([image.plate_id for image in chosen]).value_counts()) == [2, 2, 3]
    assert chosen == sample_images(images, 1, 7, seed=3)
    assert chosen != sample_images(images, 1, 7, seed=4)
    assert len(sample_images(images, 2, 1000, seed=3)) == 60


def test_eight_bit_images_stay_as_they_are_unless_told(tmp_path):
    image = picture(0, 3, 90).astype(np.uint8)
    write_tiff(tmp_path / "a.tif", image)
    (tmp_path / "b.png").write_bytes(imagecodecs.png_encode(image.T.copy()))
    lossy = imagecodecs.jpeg2k_encode(image, 30, reversible=False, codecformat="jp2")
    (tmp_path / "c.jp2").write_bytes(lossy)
    base = {"experiment": "e", "plate": "1", "well": "A01"}
    names = ("a.tif", "b.png", "c.jp2")
    source = write_list(tmp_path, [{**base, "channel": i, "path": name} for i, name in enumerate(names, 1)])
    out = run(source, tmp_path / "out")
    images = images_of(out)
    np.testing.assert_array_equal(images["e/Plate1/A01_s1_1"], image)
    np.testing.assert_array_equal(images["e/Plate1/A01_s1_2"], image.T)
    stored = pq.read_table(next(out.glob("train-*.parquet"))).to_pylist()[2]["jp2"]["bytes"]
    assert stored == lossy  # what is JPEG 2000 already is taken over byte by byte
    assert json.loads((out / "scaling.json").read_text())["channels"] == {}
    told = run(source, tmp_path / "told", rescale_8bit=True, low=1, high=99)
    low, high = np.percentile(image, [1, 99])
    np.testing.assert_array_equal(images_of(told)["e/Plate1/A01_s1_1"], expected(image, low, high))
    smaller = run(source, tmp_path / "smaller", size=16)
    means = image.reshape(16, 2, 16, 2).mean(axis=(1, 3))
    np.testing.assert_array_equal(images_of(smaller)["e/Plate1/A01_s1_1"], np.rint(means))


def test_sixteen_bits_are_averaged_before_they_are_scaled(tmp_path):
    source = screen(tmp_path, wells=1, channels=1, side=48)
    out = run(source, tmp_path / "out", size=32, low=2, high=98)
    fine = np.repeat(np.repeat(picture(0, side=48).astype(float), 2, 0), 2, 1)
    means = fine.reshape(32, 3, 32, 3).mean(axis=(1, 3))
    scale = json.loads((out / "scaling.json").read_text())["channels"]["1"]
    assert np.isclose(scale["low"], np.percentile(np.rint(means), 2))
    np.testing.assert_array_equal(images_of(out)["e/Plate1/A01_s1_1"], expected(means, scale["low"], scale["high"]))


def test_compression_reaches_its_ratio(tmp_path):
    y, x = np.mgrid[:128, :128]
    write_tiff(
        tmp_path / "a.tif", (3000 + 2000 * np.sin(x / 11) * np.cos(y / 9) + picture(0, 0, 200, 128)).astype(np.uint16)
    )
    source = write_list(tmp_path, [{"experiment": "e", "plate": "1", "well": "A01", "channel": 1, "path": "a.tif"}])
    sizes = {}
    for ratio in (None, 20):
        out = run(source, tmp_path / str(ratio), compression=ratio)
        sizes[ratio] = len(pq.read_table(next(out.glob("train-*.parquet"))).to_pylist()[0]["jp2"]["bytes"])
    assert sizes[20] <= 128 * 128 / 20 < sizes[None]


def test_every_kind_of_bad_image_is_quarantined_with_its_reason(tmp_path, capsys):
    source = screen(tmp_path, wells=8, channels=1)
    rows = pd.read_csv(source, dtype=str)
    img = tmp_path / "img"
    tifffile.imwrite(
        img / "1_0_1_1.tif", picture(0, 0, 200, 32).astype(np.uint8).repeat(3).reshape(32, 32, 3), photometric="rgb"
    )
    write_tiff(img / "1_1_1_1.tif", np.ones((32, 32), np.float32))
    write_tiff(img / "1_2_1_1.tif", np.ones((32, 32), np.uint32))
    (img / "1_3_1_1.tif").write_bytes((img / "1_4_1_1.tif").read_bytes()[:900])
    (img / "1_5_1_1.tif").write_bytes(b"")
    write_tiff(img / "1_6_1_1.tif", picture(0, side=16))
    with pytest.raises(TooManyBadImages, match=r"1 of 8 images are bad so far.*\n  img/1_0_1_1.tif: 3 samples a pixel"):
        run(source, tmp_path / "strict", size=32)
    assert len(pd.read_csv(tmp_path / "strict/quarantine.csv")) == 1
    assert not list((tmp_path / "strict").glob("train-*"))
    out = run(source, tmp_path / "out", size=32, max_bad_fraction=0.75, images_per_shard=3)
    reasons = pd.read_csv(out / "quarantine.csv").set_index("path")["reason"]
    for name, words in {
        "1_0_1_1": "3 samples a pixel", "1_1_1_1": "float32 pixels", "1_2_1_1": "uint32 pixels",
        "1_3_1_1": "truncated or damaged TIFF", "1_5_1_1": "the file is empty", "1_6_1_1": "smaller than the wanted 32",
    }.items():  # fmt: skip
        assert words in reasons[f"img/{name}.tif"]
    assert len(reasons) == 6
    assert sorted(images_of(out)) == ["e/Plate1/A05_s1_1", "e/Plate1/A08_s1_1"]
    # a well without images has no metadata
    assert pd.read_csv(out / "metadata.csv")["address"].tolist() == ["A05", "A08"]
    assert rows["well"].nunique() == 8
    # a stricter limit changes no byte, so it is no option of the shards
    with pytest.raises(TooManyBadImages):
        run(source, out, size=32, images_per_shard=3)
    whole = {p.name: p.read_bytes() for p in out.glob("train-*")}
    (out / "train-00000-of-00003.parquet").unlink()
    run(source, out, size=32, max_bad_fraction=0.75, images_per_shard=3)
    assert {p.name: p.read_bytes() for p in out.glob("train-*")} == whole
    assert len(pd.read_csv(out / "quarantine.csv")) == 6


def test_nothing_usable(tmp_path):
    source = screen(tmp_path, wells=1, channels=1)
    (tmp_path / "img/1_0_1_1.tif").write_bytes(b"x")
    with pytest.raises(ImageImportError, match="no image could be imported"):
        run(source, tmp_path / "out", max_bad_fraction=1)


def plane_files(folder: Path) -> np.ndarray:
    stack = np.stack([picture(i) for i in range(3)])
    for plane, image in enumerate(stack, 1):
        write_tiff(folder / f"r01c01f01p{plane:02d}-ch1sk1fk1fl1.tiff", image)
    return stack


def harmony(folder: Path, out: Path, **options) -> np.ndarray:
    import_images(find_images(folder, "harmony", experiment="e", plate="1"), out, ImportOptions(**options))
    return images_of(out)["e/Plate1/A01_s1_1"]


def test_planes_in_names(tmp_path):
    stack = plane_files(tmp_path / "in")
    with pytest.raises(
        ImageImportError, match=r"1 images have several z planes .*A01, site 1, channel 1: 3 planes.*--planes"
    ):
        harmony(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    image = harmony(tmp_path / "in", tmp_path / "max", planes="max", low=0, high=100)
    top = stack.max(axis=0)
    np.testing.assert_array_equal(image, expected(top, top.min(), top.max()))
    image = harmony(tmp_path / "in", tmp_path / "two", planes=2, low=0, high=100)
    np.testing.assert_array_equal(image, expected(stack[1], stack[1].min(), stack[1].max()))
    with pytest.raises(ImageImportError, match=r"no image has plane 4; there are \[1, 2, 3\]"):
        harmony(tmp_path / "in", tmp_path / "four", planes=4)


def test_planes_within_a_file(tmp_path):
    stack = np.stack([picture(i) for i in range(3)])
    write_tiff(tmp_path / "a.tif", stack)
    source = write_list(tmp_path, [{"experiment": "e", "plate": "1", "well": "A01", "channel": 1, "path": "a.tif"}])
    with pytest.raises(ImageImportError, match=r"a.tif: 3 z planes; say --planes max"):
        run(source, tmp_path / "out")
    out = run(source, tmp_path / "out", planes="max", low=0, high=100)  # nothing was begun, so this is no change
    np.testing.assert_array_equal(
        images_of(out)["e/Plate1/A01_s1_1"], expected(stack.max(axis=0), stack.max(axis=0).min(), stack.max())
    )
    out = run(source, tmp_path / "three", planes=3, low=0, high=100)
    np.testing.assert_array_equal(
        images_of(out)["e/Plate1/A01_s1_1"], expected(stack[2], stack[2].min(), stack[2].max())
    )


def test_pages_and_axes_as_channels(tmp_path):
    channels = np.stack([picture(i) for i in range(3)])
    write_tiff(tmp_path / "ome.tif", channels, ome=True, metadata={"axes": "CYX"})
    write_tiff(tmp_path / "pages.tif", channels)
    base = {"experiment": "e", "plate": "1"}
    rows = [{**base, "well": "A01", "path": "ome.tif"}, {**base, "well": "A02", "path": "pages.tif"}]
    rows += [{**base, "well": "A03", "path": "pages.tif", "channel": c, "page": 4 - c} for c in (1, 2, 3)]
    frame = pd.DataFrame(rows).astype({"channel": "Int64", "page": "Int64"})
    frame.to_csv(tmp_path / "images.csv", index=False)
    out = run(tmp_path / "images.csv", tmp_path / "out", low=0, high=100)
    images = images_of(out)
    scales = json.loads((out / "scaling.json").read_text())["channels"]
    for well, order in (("A01", (1, 2, 3)), ("A02", (1, 2, 3)), ("A03", (3, 2, 1))):
        for channel, source in enumerate(order, 1):
            scale = scales[str(channel)]
            image = expected(channels[source - 1], scale["low"], scale["high"])
            np.testing.assert_array_equal(images[f"e/Plate1/{well}_s1_{channel}"], image)


def test_an_unreadable_file_whose_channels_nobody_knows(tmp_path):
    write_tiff(tmp_path / "good.tif", np.stack([picture(0), picture(1)]))
    (tmp_path / "bad.tif").write_bytes(b"II*\0nonsense")
    base = {"experiment": "e", "plate": "1"}
    rows = [{**base, "well": "A01", "path": "good.tif"}, {**base, "well": "A02", "path": "bad.tif"}]
    out = run(write_list(tmp_path, rows), tmp_path / "out", max_bad_fraction=0.5)
    bad = pd.read_csv(out / "quarantine.csv")
    assert bad["well_id"].tolist() == ["e_1_A02"] and bad["path"].tolist() == ["bad.tif"]
    assert len(images_of(out)) == 2


def test_channels_by_name_and_in_another_order(tmp_path, capsys):
    rows = []
    for i, name in enumerate(("AGP", "DNA", "ER")):
        write_tiff(tmp_path / f"{name}.tif", picture(i, 100 + 1000 * i, 900 + 1000 * i))
        rows.append({"experiment": "e", "plate": "1", "well": "A01", "channel": name, "path": f"{name}.tif"})
    source = write_list(tmp_path, rows)
    with pytest.raises(
        ImageImportError, match="channels AGP, DNA, ER are no numbers from 1 on; .*--channels AGP,DNA,ER"
    ):
        run(source, tmp_path / "out")
    out = run(source, tmp_path / "out", channels=("DNA", "AGP"))
    assert sorted(images_of(out)) == ["e/Plate1/A01_s1_1", "e/Plate1/A01_s1_2"]
    scales = json.loads((out / "scaling.json").read_text())["channels"]
    assert 1100 <= scales["1"]["low"] < scales["1"]["high"] < 1900
    said = capsys.readouterr().err
    assert "1 images of channels ER are left out (--channels)" in said
    assert "DNA becomes 1, AGP becomes 2" in said
    with pytest.raises(ImageImportError, match="no image has channel Mito; there are AGP, DNA, ER"):
        run(source, tmp_path / "no", channels=("DNA", "Mito"))
    with pytest.raises(ImageImportError, match="names a channel twice"):
        run(source, tmp_path / "no", channels=("DNA", "DNA"))


def test_missing_channels_are_counted_and_said(tmp_path, capsys):
    source = screen(tmp_path, wells=4, channels=3)
    rows = pd.read_csv(source, dtype=str)
    write_list(tmp_path, rows.drop(index=[1, 4, 5]).to_dict("records"))
    run(source, tmp_path / "out")
    assert "2 of 4 sites lack a channel (channel 2: 2, channel 3: 1), first e_1_A01 site 1" in capsys.readouterr().err


def test_files_that_claim_the_same_image_and_images_that_claim_the_same_file(tmp_path):
    for name in "ab":
        write_tiff(tmp_path / f"{name}.tif", picture(0))
    base = {"experiment": "e", "plate": "1", "channel": 1}
    twice = [{**base, "well": "A01", "path": "a.tif"}, {**base, "well": "a1", "path": "b.tif"}]
    with pytest.raises(
        ImageImportError, match="2 files claim the same image as another; first e/Plate1/A01_s1_1: a.tif, b.tif"
    ):
        run(write_list(tmp_path, twice), tmp_path / "out")
    shared = [{**base, "well": "A01", "path": "a.tif"}, {**base, "well": "A02", "path": "a.tif"}]
    with pytest.raises(ImageImportError, match="a.tif stands for e/Plate1/A01_s1_1 and for e/Plate1/A02_s1_1"):
        run(write_list(tmp_path, shared), tmp_path / "out")
    mixed = [{**base, "well": "A01", "path": "a.tif", "plane": 1}, {**base, "well": "A01", "path": "b.tif"}]
    with pytest.raises(ImageImportError, match="claim the same image"):
        run(write_list(tmp_path, mixed), tmp_path / "out", planes="max")


def test_two_plates_with_the_same_well_id(tmp_path):
    rows = []
    for experiment, plate in (("a_b", "c"), ("a", "b_c")):
        write_tiff(tmp_path / f"{experiment}.tif", picture(0))
        rows.append(
            {"experiment": experiment, "plate": plate, "well": "A01", "channel": 1, "path": f"{experiment}.tif"}
        )
    with pytest.raises(
        ImageImportError, match="well id a_b_c_A01 would stand for experiment 'a(_b)?', plate '(b_)?c' and for"
    ):
        run(write_list(tmp_path, rows), tmp_path / "out")


@pytest.mark.parametrize("name", ["a_b", "β-γ", "plate 7", "😀", "8.0", "08", "Plate1", "x.y", "123_456", "a,\"b'"])
def test_names_of_plates_that_work_to_the_wells(tmp_path, name):
    write_tiff(tmp_path / "a.tif", picture(0))
    rows = [{"experiment": name, "plate": name, "well": "AF48", "channel": 1, "path": "a.tif", "treatment": "β/x_y 😀"}]
    source = write_list(tmp_path, rows)
    out = tmp_path / "out"
    import_images(read_list(source), out, ImportOptions(), constants={"perturbation_type": "COMPOUND"})
    assert [parse_key(key) for key in images_of(out)] == [(name, name, "AF48", 1, 1)]
    config = resolve({
        "run": "r", "source": "shards",
        "plates": {"shards": [f"{out}/*.parquet"], "metadata": f"{out}/metadata.csv", "channels": [1]},
    })  # fmt: skip
    run_plates(find_shards(config["plates"]["shards"]), out / "metadata.csv", tmp_path / "plates", config)
    well = read_wells(tmp_path / "plates/wells.parquet").iloc[0]
    assert (well["experiment"], well["plate"], well["well_id"]) == (name, name, f"{name}_{name}_AF48")
    assert well["treatment"] == "β/x_y 😀"


def test_a_plate_map_describes_the_wells(tmp_path, capsys):
    source = screen(tmp_path, wells=3, channels=1, plates=("1", "2"))
    rows = pd.read_csv(source, dtype=str)[["experiment", "plate", "well", "channel", "path"]]
    write_list(tmp_path, rows.to_dict("records"))
    path = tmp_path / "map.csv"
    path.write_text("well,treatment,smiles,dose\nA01,DMSO,,0\na2,NA,C[C@H](N)C,1\nH12,x,,2\n")
    out = tmp_path / "out"
    import_images(
        read_list(source), out, ImportOptions(), platemap=read_platemap(path), constants={"cell_type": "U2OS"}
    )  # fmt: skip
    table = pd.read_csv(out / "metadata.csv", dtype=str, keep_default_na=False).set_index("well_id")
    assert table.loc["e_2_A02", ["treatment", "SMILES", "dose", "cell_type", "gene"]].tolist() == [
        "NA",
        "C[C@H](N)C",
        "1",
        "U2OS",
        "",
    ]
    assert table.loc["e_1_A03", "treatment"] == ""
    said = capsys.readouterr().err
    assert "2 of 6 wells are not in the plate map (first: e_1_A03)" in said
    assert "1 of 3 rows of the plate map have no images" in said
    assert "nothing is known of gene, concentration, perturbation_type, well_type_label" in said
    assert "treatment and perturbation_type must be filled in every row before a run" in said
    path.write_text("well,plate,treatment\nA01,8,DMSO\n")
    with pytest.raises(ImageImportError, match="describes none of the 6 wells .* joined on plate, address"):
        import_images(read_list(source), tmp_path / "no", ImportOptions(), platemap=read_platemap(path))


def test_a_column_said_twice(tmp_path):
    source = screen(tmp_path, wells=1, channels=1)
    (tmp_path / "map.csv").write_text("well,treatment,gene\nA01,x,y\n")
    with pytest.raises(ImageImportError, match="column treatment is in the list and in the plate map"):
        import_images(read_list(source), tmp_path / "o", ImportOptions(), platemap=read_platemap(tmp_path / "map.csv"))
    with pytest.raises(ImageImportError, match="perturbation_type is in the list, and --perturbation-type says it too"):
        import_images(read_list(source), tmp_path / "o", ImportOptions(), constants={"perturbation_type": "CRISPR"})
    (tmp_path / "map.csv").write_text("well,well_id\nA01,x\n")
    with pytest.raises(ImageImportError, match="the plate map has a column well_id, which the import makes itself"):
        import_images(read_list(source), tmp_path / "o", ImportOptions(), platemap=read_platemap(tmp_path / "map.csv"))


def test_a_metadata_file_that_the_user_filled_in_is_kept(tmp_path, capsys):
    source = screen(tmp_path)
    out = run(source, tmp_path / "out")
    text = (out / "metadata.csv").read_text().replace("drug 2", "aspirin")
    (out / "metadata.csv").write_text(text)
    run(source, out)
    assert (out / "metadata.csv").read_text() == text
    assert "is kept; delete it to have it written again" in capsys.readouterr().err


def test_scales_that_cannot_be_measured(tmp_path):
    source = screen(tmp_path, wells=2, channels=1)
    for name in ("1_0_1_1", "1_1_1_1"):
        write_tiff(tmp_path / f"img/{name}.tif", np.full((32, 32), 700, np.uint16))
    with pytest.raises(ImageImportError, match="channel 1: percentiles 0.1 and 99.9 of 2 sampled images are both 700"):
        run(source, tmp_path / "out")
    write_tiff(tmp_path / "img/1_0_1_1.tif", picture(0))
    write_tiff(tmp_path / "img/1_1_1_1.tif", picture(0, 0, 200).astype(np.uint8))
    with pytest.raises(ImageImportError, match="images of 8 and of 16 bits, which no one scale fits"):
        run(source, tmp_path / "out", rescale_8bit=True)
    for name in ("1_2_1_1", "1_3_1_1", "1_4_1_1"):
        write_tiff(tmp_path / f"img/{name}.tif", picture(0, 0, 200).astype(np.uint8))
    source = screen(tmp_path, wells=9, channels=1)
    for well in range(8):
        write_tiff(tmp_path / f"img/1_{well}_1_1.tif", picture(0, 0, 200).astype(np.uint8))
    with pytest.raises(ImageImportError, match="1_8_1_1.tif: has 16 bits, but no image of channel 1 in the sample"):
        run(source, tmp_path / "late", sample=1)


def test_eight_and_sixteen_bits_in_one_channel_are_said(tmp_path, capsys):
    source = screen(tmp_path, wells=3, channels=1)
    write_tiff(tmp_path / "img/1_0_1_1.tif", picture(0, 0, 200).astype(np.uint8))
    out = run(source, tmp_path / "out")
    for _ in range(2):  # also of shards that were there
        assert "channel 1 has 1 images of 8 bits, taken as they are, and 2 of 16 bits" in capsys.readouterr().err
        run(source, out)
    assert read_receipt(next(out.glob("train-*")))["bits"] == {"1": {"16": 2, "8": 1}}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"low": 5, "high": 5}, "percentiles 5, 5"), ({"high": 101}, "percentiles"), ({"sample": 0}, "sample of 0"),
        ({"seed": -1}, "seed -1"), ({"size": 4}, "size 4"), ({"compression": 1}, "compression 1"),
        ({"planes": "mean"}, "planes 'mean': use max or"), ({"images_per_shard": 0}, "0 images a shard"),
        ({"channels": "1,,2"}, "names an empty channel"),
        ({"scaling": "x", "low": 1, "seed": 2}, "--low, --seed and --scaling"),
    ],
)  # fmt: skip
def test_options_that_cannot_be_used(options, words):
    with pytest.raises(ImageImportError, match=words):
        import_options(**options)


def test_twelve_channels_are_too_many(tmp_path):
    with pytest.raises(ImageImportError, match="12 channels; at most 11"):
        plan_images(read_list(screen(tmp_path, wells=1, channels=12, side=16)), ImportOptions())


def test_a_file_that_cannot_be_written_is_said(tmp_path):
    """The limit on the size of a file stands for a disk that fills up."""
    source = screen(tmp_path, wells=8, channels=2, side=64)
    limited = (
        "import resource, sys, phenoica.cli; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)); "
        "sys.argv[0] = 'phenoica'; phenoica.cli.main()"
    )
    arguments = ["import", str(tmp_path / "out"), "--list", str(source)]
    result = subprocess.run([sys.executable, "-c", limited, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 1, result.stderr
    assert "cannot be written (" in result.stderr and "finished shards stay" in result.stderr
    assert "Traceback" not in result.stderr
    assert not list((tmp_path / "out").glob("train-*"))
    run(source, tmp_path / "out")  # with space again
    assert len(images_of(tmp_path / "out")) == 16


def test_a_folder_that_is_a_file(tmp_path):
    source = screen(tmp_path, wells=1, channels=1)
    (tmp_path / "out").write_text("x")
    with pytest.raises(StorageError, match="a part of the path is a file.*finished shards stay"):
        run(source, tmp_path / "out")


def test_kill_at_any_moment_and_resume_to_the_same_bytes(tmp_path):
    source = screen(tmp_path, wells=60, channels=2, side=256)
    arguments = ["--list", str(source), "--images-per-shard", "10", "--threads", "1"]
    command = [sys.executable, "-m", "phenoica.cli", "import"]
    whole = run(source, tmp_path / "whole", images_per_shard=10)
    out = tmp_path / "killed"
    moments = random.Random(0)
    alive_at_kill = 0
    for n_shards in (0, 0, 1, 3, 5, 8, 10):
        process = subprocess.Popen(
            [*command, str(out), *arguments], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        before = {path.name: path.read_bytes() for path in out.glob("train-*.parquet")} if out.exists() else {}
        while process.poll() is None and len(list(out.glob("train-*.parquet")) if out.exists() else ()) < max(
            n_shards, len(before)
        ):
            time.sleep(0.002)
        if n_shards == 0:
            while process.poll() is None and not out.exists():
                time.sleep(0.002)
        time.sleep(moments.uniform(0, 0.05))
        alive_at_kill += process.poll() is None
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        # whatever is there under its name is whole, and nothing finished was lost or changed
        for path in out.glob("train-*.parquet"):
            assert path.read_bytes() == (whole / path.name).read_bytes()
        for name, content in before.items():
            assert (out / name).read_bytes() == content
    assert alive_at_kill >= 5
    assert len(list(out.glob("train-*.parquet"))) < 12
    done = subprocess.run([*command, str(out), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert bytes_of(out) == bytes_of(whole)


def test_the_printed_configuration_runs_and_says_what_to_decide(tmp_path):
    source = screen(tmp_path, wells=13, channels=2)
    out = tmp_path / "my screen [1]"
    result = runner.invoke(app, ["import", str(out), "--list", str(source), "--threads", "1"])
    assert result.exit_code == 0, result.output
    config = resolve(yaml.safe_load(result.stdout))
    assert config["run"] == "my-screen--1-"
    assert config["plates"]["plate_format"] == 96 and "check it" in result.stdout
    assert config["plates"]["channels"] == [1, 2]
    (tmp_path / "c.yaml").write_text(result.stdout)
    command = ["plates", "--config", str(tmp_path / "c.yaml"), "--out", str(tmp_path / "plates")]
    assert runner.invoke(app, command).exit_code == 0
    wells = read_wells(tmp_path / "plates/wells.parquet")
    assert len(wells) == 13 and (wells["control"] == "negative").sum() == 2


def test_the_verb_by_names_of_files(tmp_path):
    plane_files(tmp_path / "in/BR1__2020/Images")
    out = tmp_path / "out"
    arguments = ["import", str(out), "--folder", str(tmp_path / "in"), "--pattern", "harmony", "--experiment", "e"]
    arguments += ["--folders", r"(?P<plate>[^/_]+)__[^/]*/Images", "--planes", "max", "--cell-type", "U2OS"]
    arguments += ["--plate-format", "384", "--channels", "01", "--compression", "2"]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert list(images_of(out)) == ["e/PlateBR1/A01_s1_1"]
    assert "plate_format: 384\n" in result.stdout
    assert pd.read_csv(out / "metadata.csv")["cell_type"].tolist() == ["U2OS"]


def readme_commands() -> list[str]:
    """Return the commands of the section "Your own images" of the README, in order."""
    text = (ROOT / "README.md").read_text().split("## Your own images")[1].split("\n## ")[0]
    return [block.split("```")[0].strip() for block in text.split("```bash\n")[1:]]


def test_the_examples_of_the_readme(tmp_path):
    by_name, run_it, by_list = readme_commands()
    env = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}

    def shell(command: str) -> str:
        result = subprocess.run(
            command,
            shell=True,
            executable="/bin/bash",
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    image = 0
    for well in range(1, 5):
        for channel in range(1, 6):
            for plane in (1, 2):
                name = f"r02c{well:02d}f01p{plane:02d}-ch{channel}sk1fk1fl1.tiff"
                write_tiff(tmp_path / "export/BR7__2020-11-08/Images" / name, picture(image, side=520))
                image += 1
    (tmp_path / "platemap.csv").write_text("well,treatment,concentration\nB01,DMSO,\nB02,DMSO,\nB03,a/β,1\nB04,a/β,2\n")
    shell(by_name.replace("/microscope/export", "export"))
    config = resolve(yaml.safe_load((tmp_path / "my-screen.yaml").read_text()))
    assert config["plates"]["channels"] == [1, 2, 3, 4, 5] and config["plates"]["plate_format"] == 384
    keys = list(images_of(tmp_path / "data/my-screen"))
    assert keys[0] == "week-1/PlateBR7/B01_s1_1" and len(keys) == 20
    shell(run_it.replace("snakemake", f"snakemake -n -s '{ROOT / 'Snakefile'}'"))
    shell("phenoica plates --config my-screen.yaml")
    wells = read_wells(tmp_path / "results/my-screen/plates/wells.parquet")
    assert wells["treatment"].tolist() == ["DMSO", "DMSO", "a/β", "a/β"]

    listing = (ROOT / "README.md").read_text().split("```csv\n")[1].split("```")[0]
    (tmp_path / "images.csv").write_text(listing)
    for i, name in enumerate(("b03_dapi", "b03_er")):
        write_tiff(tmp_path / f"img/{name}.tif", picture(i))
    shell("rm -r data; " + by_list)
    assert list(images_of(tmp_path / "data/my-screen")) == ["week-1/PlateP01/B03_s1_1", "week-1/PlateP01/B03_s1_2"]


@pytest.mark.parametrize("pattern", ["imagexpress", "harmony", "harmony-record", "columbus", "rxrx"])
def test_each_microscope_reaches_the_index(tmp_path, pattern):
    """Two channels of well B03, site 2, as each microscope names them."""
    name = {
        "imagexpress": "Plate_B03_s2_w{}E75611A2-A874-4065-BDAC-EE2467105EEB.tif",
        "harmony": "r02c03f02p01-ch{}sk1fk1fl1.tiff", "harmony-record": "r02c03f02p01rc{}-ch1sk1fk1fl1.tiff",
        "columbus": "002003-2-00100100{}.tif", "rxrx": "gene-001/Plate1/B03_s2_w{}.png",
    }[pattern]  # fmt: skip
    for channel in (1, 2):
        path = tmp_path / "in" / name.format(channel)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".png":
            path.write_bytes(imagecodecs.png_encode(picture(channel)))
        else:
            write_tiff(path, picture(channel))
    found = find_images(tmp_path / "in", pattern, experiment="e", plate="p")
    import_images(found, tmp_path / "out", ImportOptions())
    images, rejected = index_frame(sorted((tmp_path / "out").glob("train-*")))
    assert rejected.empty
    assert images[["well_id", "site", "channel"]].to_numpy().tolist() == [["e_p_B03", 2, 1], ["e_p_B03", 2, 2]]


def test_importing_the_importer_loads_no_torch():
    code = "import sys, phenoica.plates.importer; assert not {'torch', 'scanpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_real_fields_are_imported_pixel_by_pixel_and_reach_the_wells(shared, tmp_path):
    """60 JPEG 2000 images and a 16-bit TIFF of CPJUMP1, as files in a folder."""
    source = shared / "data/cpjump1_images"
    raw = {}
    for row in pq.read_table(source / "train-00000-of-00001.parquet").to_pylist():
        experiment, plate, address, site, channel = parse_key(row["__key__"], 384)
        path = tmp_path / f"in/{experiment}/Plate{plate}/{address}_s{site}_w{channel}.jp2"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(row["jp2"]["bytes"])
        raw[f"{experiment}/Plate{plate}/{address}_s{site}_{channel}"] = row["jp2"]["bytes"]
    assert len(raw) == 60
    compounds = pd.read_csv(source / "index.csv").drop_duplicates("well")[["well", "compound"]]
    compounds.rename(columns={"compound": "treatment"}).to_csv(tmp_path / "map.csv", index=False)
    out = tmp_path / "out"
    arguments = ["import", str(out), "--folder", str(tmp_path / "in"), "--pattern", "rxrx", "--plate-format", "384"]
    arguments += ["--platemap", str(tmp_path / "map.csv"), "--perturbation-type", "COMPOUND", "--cell-type", "U2OS"]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    images = images_of(out)
    assert list(images) == sorted(raw)
    for key, image in images.items():
        np.testing.assert_array_equal(image, decode_image(raw[key]))
    (tmp_path / "c.yaml").write_text(result.stdout)
    command = ["plates", "--config", str(tmp_path / "c.yaml"), "--out", str(tmp_path / "plates")]
    assert runner.invoke(app, command).exit_code == 0
    wells = read_wells(tmp_path / "plates/wells.parquet")
    assert len(wells) == 10
    assert wells.set_index("address").loc["D14", ["treatment", "control"]].tolist() == ["DMSO", "negative"]

    # the TIFF, by the scale and the size that the 8-bit image of the same field was made with
    scale = pd.read_csv(source / "scaling.csv").set_index("channel").loc[1]
    text = {"channels": {"1": {"low": scale["lo"], "high": scale["hi"], "images": 10}}}
    (tmp_path / "scaling.json").write_text(json.dumps(text))
    name = "cpjump1_DMSO_D14_s5_DNA_r04c14f05p01-ch5sk1fk1fl1.tiff"
    pattern = r"cpjump1_(?P<experiment>[^_]+)_(?P<well>[A-P]\d\d)_s(?P<site>\d+)_(?P<channel>[^_]+)_[^/]*\.tiff"
    arguments = ["import", str(tmp_path / "tiff"), "--folder", str(source), "--pattern", pattern, "--plate", "x"]
    arguments += ["--channels", "DNA", "--size", "512", "--scaling", str(tmp_path / "scaling.json")]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    image = images_of(tmp_path / "tiff")["DMSO/Platex/D14_s5_1"].astype(int)
    with tifffile.TiffFile(source / name) as tif:
        assert tif.pages[0].dtype == np.uint16
    lossy = next(decode_image(data) for key, data in raw.items() if key.endswith("D14_s5_1")).astype(int)
    assert image.shape == (512, 512)
    assert np.abs(image - lossy).mean() < 1.5  # the published-like file is compressed 20:1
