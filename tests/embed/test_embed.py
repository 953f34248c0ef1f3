import json

import anndata
import imagecodecs
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from phenoica import cli, files, schema
from phenoica.embed.assemble import assemble
from phenoica.embed.encoder import load_encoder
from phenoica.embed.image_measures import measure
from phenoica.embed.run import embed_shard
from phenoica.embed.wells import plan_reads
from phenoica.errors import CheckpointError, ConfigError, EmbeddingError, SchemaError, ShardError, TooManyBadImages
from phenoica.openphenom.encoder import OpenPhenom, OpenPhenomConfig
from phenoica.plates.run import inputs, read_wells, run_plates


def run(screen, config=None):
    """Run plates, embed and assemble; return the AnnData, the quarantine and the folder."""
    written = screen.write()
    config = config or written
    shards, metadata = inputs(config)
    out = screen.folder / "out"
    run_plates(shards, metadata, out, config)
    wells = read_wells(out / "wells.parquet")
    parts, lists = [], [out / "quarantine.csv"]
    for unit in sorted(wells["unit"].unique()):
        parts.append(out / f"shard-{unit}.parquet")
        lists.append(parts[-1].with_suffix(".quarantine.csv"))
        embed_shard(wells, unit, shards, lists[0], parts[-1], lists[-1], config)
    assemble(wells, parts, lists, out / "embeddings.h5ad", out / "all.csv", config)
    return anndata.read_h5ad(out / "embeddings.h5ad"), pd.read_csv(out / "all.csv"), out


def test_every_well_gets_the_embedding_of_its_own_images(tiny_screen):
    adata, quarantine, _ = run(tiny_screen)
    schema.check(adata)
    assert quarantine.empty
    assert set(adata.obs_names) == set(tiny_screen.raw)
    assert (adata.obs["n_tiles"] == 4).all()
    # an independent path: whole wells, no streaming, straight from the raw pixels
    model = OpenPhenom.random(OpenPhenomConfig(image_size=32, patch_size=16, dim=24, depth=1, heads=2), seed=0)
    for well, images in tiny_screen.raw.items():
        tiles = np.stack([images[:, r : r + 32, c : c + 32] for r in (0, 32) for c in (0, 32)])
        expected = model.embed(tiles).numpy().mean(axis=0)
        np.testing.assert_allclose(adata[well].X[0], expected, atol=1e-5)
        measures = measure(images, [1, 2, 3, 4, 5, 6], dna_channel=1, nucleus_diameter_px=10)
        assert adata[well].obs["cell_count"].iloc[0] == measures["cell_count"]
        row = adata[well].obsm["image_measures"].iloc[0]
        assert all(row[name] == value for name, value in measures.items() if name != "cell_count")


def test_the_file_says_what_the_encoder_was(tiny_screen):
    adata, _, _ = run(tiny_screen)
    uns = adata.uns["phenoica"]
    assert "random weights drawn from seed 0" in uns["checkpoint"]
    assert "not a trained model" in uns["checkpoint"]
    assert uns["encoder_saw_test_images"] == "no"
    assert "images: not stated" in uns["licences"]
    assert uns["precision"] == "float32"


def test_bad_images_are_quarantined_and_the_rest_is_kept(tiny_screen):
    keys = list(tiny_screen.images)
    tiny_screen.images[keys[0]] = tiny_screen.images[keys[0]][:50]  # truncated: well 0
    tiny_screen.images[keys[13]] = b""  # empty cell: well 2
    adata, quarantine, _ = run(tiny_screen)
    assert adata.n_obs == 14
    assert quarantine["file"].str.endswith("shards/train-0.parquet").all()
    lost = quarantine.set_index("key")["reason"]
    assert set(lost.index) == {keys[0], keys[13]}
    assert "truncated or damaged" in lost[keys[0]]
    assert lost[keys[13]] == "empty jp2 cell; fetch the shard again"
    clean, _, _ = run(type(tiny_screen)(tiny_screen.folder / "clean"))
    np.testing.assert_allclose(adata.X, clean[adata.obs_names].X, atol=1e-6)


def test_too_many_bad_images_stop_the_run(tiny_screen):
    for key in list(tiny_screen.images)[::3]:
        tiny_screen.images[key] = b""
    first = "A01_s1_1 .well gene-001_1_A01, in .*train-0.parquet"
    with pytest.raises(TooManyBadImages, match=f"max_bad_fraction.*empty jp2 cell.*{first}"):
        run(tiny_screen)


def test_wells_left_out_of_the_metadata_do_not_count_as_bad(tiny_screen):
    config = tiny_screen.config(max_bad_fraction=0.0)
    tiny_screen.rows = [r for r in tiny_screen.rows if r["treatment"] != "MTOR_guide_1"]
    adata, quarantine, _ = run(tiny_screen, config)
    assert adata.n_obs == 14
    assert len(quarantine) == 12
    assert quarantine["reason"].str.startswith("image of a well without metadata").all()


def test_missing_channels_stop_the_run_before_an_image_is_read(tiny_screen):
    for address in ("A01", "B02", "C03"):
        del tiny_screen.images[f"gene-001/Plate1/{address}_s1_4"]
    with pytest.raises(TooManyBadImages, match="15 of 93 images are bad.*missing channel 4"):
        run(tiny_screen, tiny_screen.config(max_bad_fraction=0.1))


def test_wells_that_lack_channels_are_embedded_by_the_others_where_that_is_asked_for(tiny_screen):
    keys = list(tiny_screen.images)
    del tiny_screen.images[keys[2]]  # well 0: channel 3
    tiny_screen.images[keys[6]] = b""  # well 1: channel 1, which counts the cells
    tiny_screen.images[keys[10]] = tiny_screen.images[keys[10]][:40]  # and channel 5
    for key in keys[12:18]:  # well 2: nothing is left
        tiny_screen.images[key] = b""
    config = tiny_screen.config()
    config["plates"]["missing_channels"] = "available_channels"
    adata, quarantine, _ = run(tiny_screen, config)
    schema.check(adata)
    ids = list(tiny_screen.raw)
    assert set(adata.obs_names) == set(ids) - {ids[2]}
    missing = adata.obs["missing_channels"].astype(str)
    assert (missing[ids[0]], missing[ids[1]]) == ("3", "1,5")
    assert (missing.drop([ids[0], ids[1]]) == "").all()
    model = OpenPhenom.random(OpenPhenomConfig(image_size=32, patch_size=16, dim=24, depth=1, heads=2), seed=0)
    for well, kept in ((ids[0], [0, 1, 3, 4, 5]), (ids[1], [1, 2, 3, 5]), (ids[3], range(6))):
        images = np.ascontiguousarray(tiny_screen.raw[well][list(kept)])
        expected = model.embed_well(images).numpy()
        np.testing.assert_allclose(adata[well].X[0], expected, atol=1e-5)
    measures = adata.obsm["image_measures"].loc[ids[1]]
    lost = measures.index.str.startswith(("c1_", "c5_"))
    assert measures[lost].isna().all() and measures[~lost].notna().all() and lost.sum() == 24
    assert np.isnan(adata.obs.loc[ids[1], "cell_count"]) and adata.obs["cell_count"].notna().sum() == 14
    reasons = quarantine.set_index("key")["reason"]
    assert reasons[keys[6]] == "empty jp2 cell; fetch the shard again; the well is embedded without channel 1, 5"
    assert reasons[keys[12]] == "empty jp2 cell; fetch the shard again"
    strict, _, _ = run(tiny_screen, tiny_screen.config())
    assert set(strict.obs_names) == set(ids[3:]) and (strict.obs["missing_channels"].astype(str) == "").all()


def test_image_smaller_than_the_tile_and_mixed_sizes(tiny_screen):
    keys = list(tiny_screen.images)
    small = imagecodecs.jpeg2k_encode(np.full((16, 16), 9, np.uint8), reversible=True)
    for key in keys[:6]:
        tiny_screen.images[key] = small
    tiny_screen.images[keys[6]] = imagecodecs.jpeg2k_encode(np.full((96, 64), 9, np.uint8), reversible=True)
    adata, quarantine, _ = run(tiny_screen)
    assert adata.n_obs == 14
    reasons = quarantine.set_index("key")["reason"]
    assert "smaller than the model's tile of 32" in reasons[keys[0]]
    assert "differ in size: [(64, 64), (96, 64)]" in reasons[keys[6]]


def test_reads_visit_each_row_group_once_own_shard_first():
    wells = pd.DataFrame({
        "image_shard": [np.array([1, 2]), np.array([1, 1])], "image_row_group": [np.array([9, 0]), np.array([2, 9])],
        "image_row": [np.array([5, 0]), np.array([1, 3])],
    })  # fmt: skip
    reads = plan_reads(wells, unit=1)
    assert [(r.shard, r.row_group, r.rows) for r in reads] == [(1, 2, [1]), (1, 9, [3, 5]), (2, 0, [0])]
    assert [(r.wells, r.images) for r in reads] == [([1], [0]), ([1, 0], [1, 0]), ([0], [1])]


def test_parts_of_two_encoders_do_not_mix(tiny_screen):
    _, _, out = run(tiny_screen)
    wells = read_wells(out / "wells.parquet")
    other = tiny_screen.config(seed=1)
    parts = [out / "shard-0.parquet", out / "shard-1.parquet"]
    shards, found = inputs(other)[0], out / "quarantine.csv"
    embed_shard(wells, 1, shards, found, parts[1], parts[1].with_suffix(".quarantine.csv"), other)
    lists = [out / "quarantine.csv", *(p.with_suffix(".quarantine.csv") for p in parts)]
    with pytest.raises(SchemaError, match="different encoders: checkpoint .*seed 0.* and .*seed 1"):
        assemble(wells, parts, lists, out / "e.h5ad", out / "q.csv", other)
    with pytest.raises(SchemaError, match="are in no part and not quarantined"):
        assemble(wells, parts[:1], lists, out / "e.h5ad", out / "q.csv", other)
    assert not (out / "e.h5ad").exists()


def test_legacy_strings_on_disk(tiny_screen):
    import h5py

    _, _, out = run(tiny_screen)
    with h5py.File(out / "embeddings.h5ad") as f:
        assert f["obs/well_id"].attrs["encoding-type"] == "string-array"
        assert f["obs/treatment/categories"].attrs["encoding-type"] == "string-array"
        assert f["X"].dtype == np.float32


def test_a_unit_whose_wells_are_all_bad_gives_an_empty_part(tiny_screen):
    keys = list(tiny_screen.images)
    config = tiny_screen.config(max_bad_fraction=1.0)
    for key in keys[:60]:
        tiny_screen.images[key] = b""
    adata, quarantine, out = run(tiny_screen, config)
    assert pq.read_table(out / "shard-0.parquet").num_rows == 0
    assert adata.n_obs == 16 - 10
    assert len(quarantine) == 60


def test_a_checkpoint_gives_the_same_embedding_as_the_weights_it_was_saved_from(tiny_screen):
    path = tiny_screen.folder / "model.safetensors"
    size = OpenPhenomConfig(image_size=32, patch_size=16, dim=24, depth=1, heads=2)
    OpenPhenom.random(size, seed=0).save(path)
    drawn, _, _ = run(tiny_screen)
    loaded, _, _ = run(tiny_screen, tiny_screen.config(checkpoint=str(path), saw_test_images="yes"))
    np.testing.assert_allclose(loaded.X, drawn.X, atol=1e-6)
    uns = loaded.uns["phenoica"]
    assert uns["checkpoint_sha256"] == files.sha256(path)
    assert uns["checkpoint"] == f"model.safetensors, sha256 {files.sha256(path)[:12]}"
    assert uns["encoder_saw_test_images"] == "yes"


def test_missing_checkpoint_and_too_many_channels(tiny_screen):
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        load_encoder(tiny_screen.config(checkpoint="nowhere.safetensors"), 6)
    with pytest.raises(CheckpointError, match="12 channels; the model takes at most 11"):
        load_encoder(tiny_screen.config(), 12)


def embed_unit(screen, unit, out, config):
    """Embed one unit of a screen whose plates stage has run; return the part."""
    part = out / f"shard-{unit}.parquet"
    wells, shards = read_wells(out / "wells.parquet"), inputs(config)[0]
    embed_shard(
        wells, unit, shards, out / "quarantine.csv", part, part.with_suffix(".quarantine.csv"), config, threads=1
    )
    return part


def join(out, config):
    """Assemble the two parts of a tiny screen."""
    parts = [out / f"shard-{unit}.parquet" for unit in (0, 1)]
    lists = [out / "quarantine.csv", *(p.with_suffix(".quarantine.csv") for p in parts)]
    assemble(read_wells(out / "wells.parquet"), parts, lists, out / "joined.h5ad", out / "joined.csv", config)
    return anndata.read_h5ad(out / "joined.h5ad")


def test_channelwise_embeddings_reach_the_file_and_average_to_x(tiny_screen):
    plain, _, _ = run(tiny_screen)
    adata, _, out = run(tiny_screen, tiny_screen.config(channelwise=True))
    schema.check(adata)
    assert "X_channelwise" not in plain.obsm
    np.testing.assert_allclose(adata.X, plain.X, atol=1e-6)
    by_channel = adata.obsm["X_channelwise"]
    assert by_channel.dtype == np.float32
    assert list(adata.uns["X_channelwise_channels"]) == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(by_channel.reshape(-1, 6, 24).mean(1), adata.X, atol=1e-6)
    model = OpenPhenom.random(OpenPhenomConfig(image_size=32, patch_size=16, dim=24, depth=1, heads=2), seed=0)
    for well, images in tiny_screen.raw.items():
        expected = model.embed_well(images, channelwise=True).numpy()
        np.testing.assert_allclose(by_channel[adata.obs_names.get_loc(well)], expected, atol=1e-5)
    column = pq.read_schema(out / "shard-0.parquet").field("channelwise")
    assert (str(column.type.value_type), column.type.list_size) == ("float", 6 * 24)


def test_channelwise_embeddings_of_another_shape_are_refused(tiny_screen):
    adata, _, _ = run(tiny_screen, tiny_screen.config(channelwise=True))
    bad = adata.copy()
    bad.obsm["X_channelwise"][3, 5] = np.nan
    with pytest.raises(SchemaError, match=f"not finite in 1 wells, first {bad.obs_names[3]}"):
        schema.check(bad)
    bad.obsm["X_channelwise"] = adata.obsm["X_channelwise"][:, :-24]
    with pytest.raises(SchemaError, match=r"float32 \(16, 120\); it must be float32 \(16, 6 \* 24\)"):
        schema.check(bad)


def test_parts_join_whatever_their_batches_but_not_with_other_contents(tiny_screen):
    adata, _, out = run(tiny_screen)
    embed_unit(tiny_screen, 1, out, tiny_screen.config(batch_tiles="auto"))
    np.testing.assert_allclose(join(out, tiny_screen.config()).X, adata.X, atol=1e-6)
    embed_unit(tiny_screen, 1, out, tiny_screen.config(channelwise=True))
    with pytest.raises(SchemaError, match="shard-0.parquet and .*shard-1.parquet .*: channelwise False and True"):
        join(out, tiny_screen.config())


def test_parts_of_two_precisions_do_not_mix(tiny_screen):
    _, _, out = run(tiny_screen)
    part = out / "shard-1.parquet"
    table = pq.read_table(part)
    metadata = json.loads(table.schema.metadata[b"phenoica"])
    assert metadata["precision"] == "float32"

    def rewrite(**changed):
        text = json.dumps({**metadata, **changed})
        pq.write_table(table.replace_schema_metadata({"phenoica": text}), part)

    rewrite(precision_reason="another machine has another reason")
    assert join(out, tiny_screen.config()).n_obs == 16
    rewrite(precision="bfloat16")
    with pytest.raises(SchemaError, match="precision 'float32' and 'bfloat16'.*depends on the machine"):
        join(out, tiny_screen.config())


def test_images_that_are_no_multiple_of_the_tile_lose_their_margins_and_that_is_said(tiny_screen, capsys):
    raw = np.random.default_rng(0).integers(0, 256, (6, 79, 102)).astype(np.uint8)
    for key, image in zip(list(tiny_screen.images)[:6], raw, strict=True):
        tiny_screen.images[key] = imagecodecs.jpeg2k_encode(image, reversible=True)
    adata, _, _ = run(tiny_screen)
    well = adata["gene-001_1_A01"]
    assert well.obs["n_tiles"].iloc[0] == 6
    assert adata.obs["n_tiles"].drop(well.obs_names).eq(4).all()
    model = OpenPhenom.random(OpenPhenomConfig(image_size=32, patch_size=16, dim=24, depth=1, heads=2), seed=0)
    cut = np.stack([raw[:, r : r + 32, c : c + 32] for r in (7, 39) for c in (3, 35, 67)])
    np.testing.assert_allclose(well.X[0], model.embed(cut).numpy().mean(axis=0), atol=1e-5)
    said = capsys.readouterr().err
    assert said.count("note: images of 79 x 102 px are no multiple of the 32 px tile: the central 64 x 96 px") == 1
    assert "images of 64 x 64" not in said


def test_images_of_another_type_are_quarantined(tiny_screen):
    keys = list(tiny_screen.images)
    tiny_screen.images[keys[0]] = imagecodecs.jpeg2k_encode(np.full((64, 64), 900, np.uint16), reversible=True)
    tiny_screen.images[keys[6]] = imagecodecs.jpeg2k_encode(np.zeros((64, 64, 3), np.uint8), reversible=True)
    adata, quarantine, _ = run(tiny_screen)
    assert adata.n_obs == 14
    reasons = quarantine.set_index("key")["reason"]
    assert reasons[keys[0]].startswith("16-bit pixels; expected 8-bit")
    assert reasons[keys[6]].startswith("3 samples a pixel")


def test_a_unit_without_wells_and_shards_that_do_not_fit_are_named(tiny_screen):
    config = tiny_screen.write()
    shards, metadata = inputs(config)
    out = tiny_screen.folder / "out"
    run_plates(shards, metadata, out, config)
    wells = read_wells(out / "wells.parquet")

    def embed(unit, shards):
        embed_shard(wells, unit, shards, out / "quarantine.csv", out / "shard.parquet", out / "bad.csv", config)

    with pytest.raises(ConfigError, match="unit 7: no well is of it; wells.parquet has the units 0, 1"):
        embed(7, shards)
    with pytest.raises(ShardError, match="has images in shard 1, and 1 shards are given"):
        embed(1, shards[:1])
    with pytest.raises(ShardError, match="gone.parquet: no such shard; unit 0 has images in it"):
        embed(0, [tiny_screen.folder / "gone.parquet", *shards[1:]])
    assert not list(out.glob("shard*"))


def test_the_option_channelwise_is_held_to_what_configurations_are(tiny_screen):
    config = tiny_screen.write()
    config["embed"]["features"] = "channelwise"
    options = ["embed", "--config", json.dumps(config), "--unit", "0", "--channelwise"]
    result = CliRunner().invoke(cli.app, options)
    assert isinstance(result.exception, ConfigError)
    assert "--channelwise: embed.channelwise is set, but with embed.features channelwise" in str(result.exception)


def test_a_checkpoint_for_larger_tiles_stops_and_leaves_no_part(tiny_screen):
    path = tiny_screen.folder / "large.safetensors"
    OpenPhenom.random(OpenPhenomConfig(image_size=128, patch_size=16, dim=24, depth=1, heads=2), seed=0).save(path)
    with pytest.raises(TooManyBadImages, match=r"\(64, 64\) pixels is smaller than the model's tile of 128"):
        run(tiny_screen, tiny_screen.config(checkpoint=str(path)))
    assert not list((tiny_screen.folder / "out").glob("*shard*"))


def test_embeddings_that_are_not_finite_stop_and_leave_no_part(tiny_screen):
    import torch

    path = tiny_screen.folder / "overflowing.safetensors"
    model = OpenPhenom.random(OpenPhenomConfig(image_size=32, patch_size=16, dim=24, depth=1, heads=2), seed=0)
    with torch.no_grad():
        model.patch_embed["proj"].weight.fill_(3e38)
    model.save(path)
    with pytest.raises(EmbeddingError, match="not finite.*set embed.precision to float32"):
        run(tiny_screen, tiny_screen.config(checkpoint=str(path)))
    assert not list((tiny_screen.folder / "out").glob("*shard*"))


def test_features_of_the_channels_side_by_side_average_to_the_pooled_ones(tiny_screen):
    config = tiny_screen.write()
    pooled = run(tiny_screen, config)[0]
    config["embed"] |= {"features": "channelwise", "random_baseline": True}
    wide = run(tiny_screen, config)[0]
    schema.check(wide)
    assert wide.shape == (pooled.n_obs, 6 * pooled.n_vars)
    np.testing.assert_allclose(wide.X.reshape(wide.n_obs, 6, -1).mean(1), pooled.X, atol=1e-5)
    assert wide.obsm["X_random_encoder"].shape == wide.shape
    assert "X_channelwise" not in wide.obsm
