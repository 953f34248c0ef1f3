import pickle
from functools import partial

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from phenoica.errors import CheckpointError, ConfigError, PhenoicaError, StorageError
from phenoica.openphenom import OpenPhenom, OpenPhenomConfig, checkpoint

PREFIX = "encoder.vit_backbone."
SMALL = OpenPhenomConfig(image_size=32, patch_size=16, dim=32, depth=2, heads=2)


def as_safetensors(state, path):
    save_file(state, path)


def as_pickle(state, path):
    with open(path, "wb") as handle:
        torch.save(state, handle)


def as_old_pickle(state, path):
    with open(path, "wb") as handle:
        torch.save(state, handle, _use_new_zipfile_serialization=False)


def as_wrapped_pickle(state, path):
    as_pickle({"state_dict": state, "epoch": 3, "config": {"name": "x"}}, path)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


@pytest.fixture
def small():
    """Published names and weights of a small random encoder."""
    model = OpenPhenom.random(SMALL, 0)
    return {PREFIX + k: v for k, v in checkpoint.unfold(model.state_dict(), SMALL).items()}


@pytest.mark.parametrize("prefix", ["", "module.", "model.", "model.module."])
@pytest.mark.parametrize("write", [as_safetensors, as_pickle, as_old_pickle, as_wrapped_pickle])
def test_whole_auto_encoder_in_every_format(write, prefix, path, whole_tiny_weights, tiny, image, golden):
    write({prefix + k: v for k, v in whole_tiny_weights.items()}, path)
    model = OpenPhenom.from_checkpoint(path)
    assert model.config == tiny.config
    np.testing.assert_allclose(model.embed(image("tiny_x6")), golden["pooled_tiny_x6"], rtol=0, atol=1e-5)


def test_encoder_alone_in_half_precision(path, tiny_weights, tiny, image):
    save_file({k: v.to(torch.bfloat16) for k, v in tiny_weights.items()}, path)
    model = OpenPhenom.from_checkpoint(path)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    np.testing.assert_allclose(model.embed(image("tiny_x6")), tiny.embed(image("tiny_x6")), atol=0.1)


def test_decoder_weights_are_not_loaded(path, whole_tiny_weights, monkeypatch):
    save_file(whole_tiny_weights, path)
    read = []
    entries = checkpoint._safetensors_entries

    def watched(file):
        return {k: e._replace(load=partial(note, k, e.load)) for k, e in entries(file).items()}

    def note(key, load):
        read.append(key)
        return load()

    monkeypatch.setattr(checkpoint, "_safetensors_entries", watched)
    checkpoint.read(path)
    assert read and all(key.startswith(PREFIX) for key in read)


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        OpenPhenomConfig(image_size=64, patch_size=8, dim=48, depth=1, heads=4, max_channels=8, mlp_ratio=2),
        OpenPhenomConfig(image_size=64, patch_size=16, dim=24, depth=3, heads=3, max_channels=2),
        OpenPhenomConfig(image_size=48, patch_size=16, dim=24, depth=11, heads=1, max_channels=1),
        OpenPhenomConfig(image_size=16, patch_size=16, dim=24, depth=1, heads=3, max_channels=4),
    ],
)
def test_saving_and_reading_gives_the_same_model_bit_for_bit(config, path):
    model = OpenPhenom.random(config, 3)
    model.save(path)
    again = OpenPhenom.from_checkpoint(path)
    assert again.config == config
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)


def test_saved_keys_and_values_are_the_published_ones(path, tiny_weights, build, tiny):
    model = build(tiny.config, tiny_weights)
    model.save(path)
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == set(tiny_weights)
        assert all(torch.equal(file.get_tensor(k), v) for k, v in tiny_weights.items())
    model.blocks[1].in_proj.bias.data[5] = 1.0
    with pytest.raises(CheckpointError, match="blocks.1.in_proj.bias.*no place"):
        model.save(path)
    OpenPhenom.from_checkpoint(path)  # the file of before is still whole


# ---- wrong files


def test_missing_unexpected_and_mis_shaped_keys_are_listed(path, small):
    del small[PREFIX + "blocks.1.in_proj.weight"], small[PREFIX + "cls_token"]
    small["head.weight"] = torch.zeros(3)
    small[PREFIX + "blocks.0.attn.qkv.weight"] = torch.zeros(3)
    small[PREFIX + "fc_norm.bias"] = torch.zeros(7)
    save_file(small, path)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read(path)
    message = str(caught.value)
    assert str(path) in message
    assert "encoder.vit_backbone.cls_token" in message and "blocks.1.in_proj.weight" in message
    assert "2 unexpected" in message and "head.weight" in message and "blocks.0.attn.qkv.weight" in message
    assert "fc_norm.bias: (7,), expected (" in message


def test_one_mis_shaped_key_is_named_alone(path, small):
    small[PREFIX + "blocks.1.ls.gamma"] = torch.zeros(33)
    save_file(small, path)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read(path)
    assert "blocks.1.ls.gamma: (33,), expected (32,)" in str(caught.value)
    assert "missing" not in str(caught.value) and "unexpected" not in str(caught.value)


def test_a_checkpoint_of_another_model_lists_ten_keys_of_each_kind(path):
    save_file({f"layer{i}.weight": torch.zeros(2) for i in range(40)}, path)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read(path)
    message = str(caught.value)
    assert "40 unexpected" in message and "and 30 more" in message and message.count("layer") == 10
    assert f"{6 + 13 * 12} missing" in message and len(message.splitlines()) < 30


def test_a_gap_in_the_blocks_is_missing_keys(path, small):
    save_file({k.replace("blocks.1.", "blocks.2."): v for k, v in small.items()}, path)
    with pytest.raises(CheckpointError, match=r"(?s)13 missing:.*blocks\.1\."):
        checkpoint.read(path)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(bad, path, small):
    small[PREFIX + "blocks.1.in_norm.weight"][3] = bad
    save_file(small, path)
    with pytest.raises(CheckpointError, match="blocks.1.in_norm.weight holds NaN or infinite"):
        checkpoint.read(path)


def test_a_positional_code_of_no_numbers_is_called_that(path, small):
    small[PREFIX + "pos_embed"][0, 3, 5] = float("nan")
    save_file(small, path)
    with pytest.raises(CheckpointError, match="pos_embed holds NaN or infinite"):
        checkpoint.read(path)


def test_weights_beyond_half_precision_are_not_written(path):
    small_model = OpenPhenom.random(SMALL, 0)
    with torch.no_grad():
        small_model.patch_embed["proj"].weight[0, 0, 0, 0] = 1e6
    with pytest.raises(CheckpointError, match="patch_embed.proj.weight .1 in all. .* not finite in torch.float16"):
        checkpoint.save(small_model, path, dtype=torch.float16)
    assert not path.exists()


def test_more_channels_than_a_checkpoint_can_tell_are_refused():
    with pytest.raises(ConfigError, match="max_channels is 12; it must be at most 11"):
        OpenPhenomConfig(max_channels=12)


def test_whole_numbers_are_refused(path, small):
    small[PREFIX + "fc_norm.bias"] = torch.zeros(32, dtype=torch.int64)
    save_file(small, path)
    with pytest.raises(CheckpointError, match="fc_norm.bias is torch.int64"):
        checkpoint.read(path)


@pytest.mark.parametrize("shape", [(1, 1, 32), (1, 56, 32), (1, 45, 32), (2, 45, 32), (45, 32)])
def test_a_positional_code_without_equal_square_blocks_is_refused(shape, path, small):
    small[PREFIX + "pos_embed"] = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    save_file(small, path)
    with pytest.raises(CheckpointError, match="pos_embed has the shape .* same square block"):
        checkpoint.read(path)


def test_shapes_that_contradict_each_other_are_refused(path, small):
    for part in ("q_norm.weight", "q_norm.bias", "k_norm.weight", "k_norm.bias"):
        for block in (0, 1):
            small[f"{PREFIX}blocks.{block}.{part}"] = torch.ones(7)
    save_file(small, path)
    with pytest.raises(CheckpointError, match="contradict each other"):
        checkpoint.read(path)


class Evil:
    def __reduce__(self):
        return (print, ("this must not run",))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "neither safetensors nor a torch file"),
        (b"<!doctype html><html>login</html>", "neither safetensors nor a torch file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "Git LFS pointer"),
        (b"PK\x03\x04 and then nothing of use", "damaged"),
        (b"\x80\x02 neither", "damaged"),
        (pickle.dumps(Evil()), "plain tensors"),
        (pickle.dumps({"state_dict": 3}), "damaged|no named tensors"),
    ],
)
def test_other_files_are_refused(content, message, path, capsys):
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        checkpoint.read(path)
    assert str(path) in str(caught.value)
    assert "must not run" not in capsys.readouterr().out


@pytest.mark.parametrize("write", [as_safetensors, as_pickle])
@pytest.mark.parametrize("share", [0.2, 0.9])
def test_a_truncated_file_is_refused(write, share, path, small):
    write(small, path)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.read(path)


@pytest.mark.parametrize("content", [[torch.zeros(2)], {"state_dict": {"a": 3}}, {"weights": "none"}])
def test_a_torch_file_without_named_tensors_is_refused(content, path):
    as_pickle(content, path)
    with pytest.raises(CheckpointError, match="no named tensors"):
        checkpoint.read(path)


def test_settings_beside_the_tensors_of_a_torch_file_are_tolerated(path, small):
    as_pickle({**small, "config": {"_target_": "some.Model"}, "step": 3}, path)
    assert OpenPhenom.from_checkpoint(path).config == SMALL
    as_pickle({**small, f"{PREFIX}cls_token": None}, path)
    with pytest.raises(CheckpointError, match=rf"1 missing:\n    {PREFIX}cls_token$"):
        checkpoint.read(path)


def test_weights_of_two_models_in_one_file_are_refused(path, small):
    save_file({**small, f"module.{PREFIX}cls_token": torch.ones(1, 1, 32)}, path)
    with pytest.raises(CheckpointError, match=rf"{PREFIX}cls_token twice, as .*module.{PREFIX}cls_token"):
        checkpoint.read(path)


@pytest.mark.parametrize("odd", [torch.ones(32).to_sparse(), torch.ones(32, device="meta")])
def test_weights_that_are_no_plain_tensors_are_refused(odd, path, small):
    as_pickle({**small, f"{PREFIX}fc_norm.weight": odd}, path)
    with pytest.raises(CheckpointError, match="fc_norm.weight is sparse or has no values"):
        checkpoint.read(path)


def test_an_unsafe_pickle_is_refused_with_its_reason_and_no_advice_to_load_it(path):
    path.write_bytes(pickle.dumps(Evil(), 2))
    with pytest.raises(CheckpointError, match="Unsupported global") as caught:
        checkpoint.read(path)
    assert "weights_only" not in str(caught.value)


def test_a_folder_is_called_one(tmp_path, small):
    with pytest.raises(CheckpointError, match="a folder; name the file"):
        OpenPhenom.from_checkpoint(tmp_path)
    with pytest.raises(StorageError, match="it is a folder; name a file"):
        OpenPhenom.random(SMALL, 0).save(tmp_path)
    assert not list(tmp_path.parent.glob(f".{tmp_path.name}*"))


def test_a_missing_file_is_named(path):
    with pytest.raises(PhenoicaError, match="no such file"):
        OpenPhenom.from_checkpoint(path)
