import json
import subprocess
import sys
import zlib

import numpy as np
import pytest
import torch
from scipy import ndimage
from torch import nn

from phenoica.errors import ConfigError, ImageError
from phenoica.openphenom import OpenPhenom, OpenPhenomConfig, encoder, random_weights, tiling

TOLERANCE = 1e-5
SMALL = {"image_size": 32, "patch_size": 16, "dim": 32, "depth": 1, "heads": 2}


def output(model, kind, image, path="packed"):
    """Embed an image (kind pooled or channelwise) or return its tokens; plain: by timm's blocks."""
    if kind == "tokens" or path == "plain":
        return plain_output(model, kind, image)
    if image.ndim == 3:
        return model.embed_well(image, kind == "channelwise").numpy()
    return model.embed(image, kind == "channelwise").numpy()


@torch.inference_mode()
def plain_output(model, kind, image):
    if image.ndim == 3:
        cut = tiling.tiles(image, model.config.image_size)
        return plain_output(model, kind, cut).mean(0)
    tokens = model.tokens(image)
    if kind == "channelwise":
        return tokens[:, 1:].unflatten(1, (image.shape[1], -1)).mean(2).flatten(1).numpy()
    return (tokens if kind == "tokens" else tokens[:, 1:].mean(1)).numpy()


# ---- golden numbers


def test_formula_weights_are_those_of_the_golden_keys(tiny_keys, whole_tiny_weights):
    for entry in tiny_keys:
        assert entry["crc32"] == zlib.crc32(entry["key"].encode())
        if entry["kind"].startswith("sincos") and entry["key"].startswith("decoder"):
            continue
        value = whole_tiny_weights[entry["key"]]
        assert list(value.shape) == entry["shape"], entry["key"]
        np.testing.assert_allclose(value.flatten()[:3], entry["first"], rtol=0, atol=1e-7)
        np.testing.assert_allclose(value.double().sum(), entry["sum"], rtol=1e-7, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    ["pooled_tiny_x6", "channelwise_tiny_x6", "pooled_tiny_x3pat", "channelwise_tiny_x3pat"]
    + ["pooled_full_x3pat", "channelwise_full_x3pat", "pooled_full_x6pat", "pooled_full_x6const"]
    + ["pooled_full_x11", "pooled_well"],
)
@pytest.mark.parametrize("path", ["packed", "plain"])
def test_bundled_golden_embeddings(path, name, golden, image, tiny, full):
    kind, which = name.split("_", 1)
    if path == "plain" and which in ("full_x11", "full_x6const", "well"):
        pytest.skip("half a minute each, and the smaller images say as much of the plain path")
    got = output(tiny if which.startswith("tiny") else full, kind, image(which), path)
    assert got.dtype == np.float32 and got.shape == golden[name].shape
    np.testing.assert_allclose(got, golden[name], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("which", ["tiny_x6", "tiny_x3pat"])
def test_bundled_golden_tokens(which, golden, image, tiny):
    expected = golden[f"tokens_{which}"]
    got = output(tiny, "tokens", image(which)[: len(expected)])
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE)


def test_every_golden_array(shared_golden, image, tiny, full):
    with np.load(shared_golden / "openphenom_golden.npz") as file:
        expected = {k: v for k, v in file.items() if k.startswith(("pooled_", "channelwise_", "tokens_"))}
        np.testing.assert_array_equal(image("tiny_x6"), file["in_tiny_x6"])
    assert len(expected) == 15
    for name, value in expected.items():
        kind, which = name.split("_", 1)
        got = output(tiny if which.startswith("tiny") else full, kind, image(which))
        np.testing.assert_allclose(got, value, rtol=0, atol=TOLERANCE, err_msg=name)


def test_full_size_weights_are_those_of_the_golden_keys(shared_golden, full):
    from phenoica.openphenom import checkpoint

    keys = json.loads((shared_golden / "keys.json").read_text())["models"]["openphenom_s16"]
    published = checkpoint.unfold(full.state_dict(), full.config)
    entries = {e["key"].removeprefix(checkpoint.ENCODER_PREFIX): e for e in keys if e["key"].startswith("encoder.")}
    assert set(entries) == set(published)
    assert sum(v.numel() for v in published.values()) == 22_459_776
    for key, value in published.items():
        np.testing.assert_allclose(value.double().sum(), entries[key]["sum"], rtol=1e-7, atol=1e-4, err_msg=key)


# ---- each known mistake moves the numbers by more than the tolerance, so the tests above would notice it


def _bias_on_the_hidden_layer(model):
    for block in model.blocks:
        bias = block.in_proj.bias
        bias.data = bias.data.roll(-3 * model.config.dim)


def _no_query_key_norm(model):
    for block in model.blocks:
        block.q_norm = block.k_norm = nn.Identity()


def _columns_first(model):
    model.pos_embed = model.pos_embed.roll(model.config.dim // 2, dims=-1)


def _tanh_gelu(model):
    for block in model.blocks:
        block.mlp_act = nn.GELU("tanh")


MISTAKES = [_bias_on_the_hidden_layer, _no_query_key_norm, _columns_first, _tanh_gelu]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_the_blocks_are_noticed(mistake, build, tiny_weights, tiny, image, golden):
    model = build(tiny.config, {k: v.clone() for k, v in tiny_weights.items()})
    mistake(model)
    got = output(model, "pooled", image("tiny_x6"), "plain")
    assert np.abs(got - golden["pooled_tiny_x6"]).max() > 5 * TOLERANCE


def test_mistakes_in_pooling_are_noticed(tiny, image, golden):
    with torch.inference_mode():
        tokens = tiny.tokens(image("tiny_x6"))
        wrong = {
            "class token": tokens[:, 0],
            "class token inside the mean": tokens.mean(1),
            "final norm": tiny.fc_norm(tokens[:, 1:].mean(1)),
            "norm before pooling": tiny.fc_norm(tokens)[:, 1:].mean(1),
        }
    for name, value in wrong.items():
        assert np.abs(value.numpy() - golden["pooled_tiny_x6"]).max() > 5 * TOLERANCE, name


def test_normalisation_constants(tiny, image, golden, monkeypatch):
    norms = [m for m in tiny.modules() if isinstance(m, nn.LayerNorm)]
    assert len(norms) == 3 * tiny.config.depth + 1
    assert {m.eps for m in norms} == {1e-6}
    monkeypatch.setattr(encoder, "INSTANCE_NORM_EPS", 1e-6)
    assert np.abs(output(tiny, "pooled", image("tiny_x6")) - golden["pooled_tiny_x6"]).max() > TOLERANCE


def test_positional_code_by_hand():
    table = encoder.positional_code(OpenPhenomConfig(**{**SMALL, "dim": 8}, max_channels=2))
    assert table.shape == (1, 1 + 2 * 4, 8)
    assert not table[0, 0].any()
    w = np.array([1, 0.01])  # 10000^(-i/2)
    row0, row1 = np.r_[np.sin(0 * w), np.cos(0 * w)], np.r_[np.sin(w), np.cos(w)]
    np.testing.assert_allclose(table[0, 2], np.r_[row0, row1], atol=1e-7)  # row 0, column 1
    np.testing.assert_allclose(table[0, 3], np.r_[row1, row0], atol=1e-7)  # row 1, column 0
    np.testing.assert_array_equal(table[0, 1:5], table[0, 5:9])


# ---- properties


def test_channel_order_permutes_channelwise_blocks_and_leaves_the_pooled_embedding(tiny, image):
    images, order = image("tiny_x6"), [4, 0, 5, 2, 1, 3]
    straight = tiny.embed(images, True).reshape(3, 6, -1)
    permuted = tiny.embed(images[:, order], True).reshape(3, 6, -1)
    np.testing.assert_allclose(permuted, straight[:, order], atol=TOLERANCE)
    assert (permuted - straight).abs().max() > 1e-2
    np.testing.assert_allclose(tiny.embed(images[:, order]), tiny.embed(images), atol=TOLERANCE)


def test_pooled_is_the_mean_of_channelwise(tiny, image):
    images = image("tiny_x3pat")
    mean = tiny.embed(images, True).reshape(2, 3, -1).mean(1)
    np.testing.assert_allclose(tiny.embed(images), mean, atol=1e-6)


def test_an_embedding_does_not_depend_on_its_batch(tiny, image):
    images = image("tiny_x6")
    alone = torch.cat([tiny.embed(images[i : i + 1]) for i in range(3)])
    for batch_tiles in (1, 2, 16):
        np.testing.assert_allclose(tiny.embed(images, batch_tiles=batch_tiles), alone, atol=2e-6)


def test_brightness_and_contrast_are_standardised_away(tiny):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 100, (1, 2, 64, 64)).astype(np.uint8)
    np.testing.assert_allclose(tiny.embed(2 * images + 20), tiny.embed(images), atol=2e-3)


def test_embedding_leaves_no_gradient_and_sits_on_the_cpu(tiny, image):
    embedding = tiny.embed(torch.from_numpy(image("tiny_x6")))
    assert embedding.device.type == "cpu" and embedding.dtype == torch.float32 and not embedding.requires_grad


def test_well_is_the_mean_of_its_tiles_each_standardised_alone(tiny):
    rng = np.random.default_rng(1)
    image = rng.integers(0, 60, (2, 133, 140)).astype(np.uint8)
    image[:, 60:, 60:] += 150
    middle = image[:, 2:130, 6:134]
    parts = np.stack([middle[:, r : r + 64, c : c + 64] for r in (0, 64) for c in (0, 64)])
    expected = np.mean([tiny.embed(part[None]).numpy()[0] for part in parts], axis=0)
    np.testing.assert_allclose(tiny.embed_well(image), expected, atol=1e-6)
    by_channel = tiny.embed_well(image, channelwise=True, batch_tiles=3)
    np.testing.assert_allclose(by_channel.reshape(2, -1).mean(0), expected, atol=1e-6)


def test_read_only_and_strided_images_are_accepted_silently(tiny, image, recwarn):
    images = image("tiny_x6")
    expected = tiny.embed(images)
    images.flags.writeable = False
    np.testing.assert_array_equal(tiny.embed(images), expected)
    np.testing.assert_allclose(tiny.embed(images[::-1]).flip(0), expected, atol=2e-6)
    assert not recwarn.list


# ---- random weights


def test_random_weights_follow_the_seed_alone():
    config = OpenPhenomConfig(**SMALL)
    images = np.random.default_rng(0).integers(0, 256, (4, 3, 32, 32)).astype(np.uint8)
    torch.manual_seed(1)
    first = OpenPhenom.random(config, 5).embed(images)
    torch.manual_seed(2)
    again, other = OpenPhenom.random(config, 5).embed(images), OpenPhenom.random(config, 6).embed(images)
    assert torch.equal(first, again)
    assert (first - other).abs().max() > 0.1


def test_random_weights_have_the_layer_scale_and_variance_that_is_promised():
    model = OpenPhenom.random(OpenPhenomConfig(64, 16, 128, 2, 4, layer_scale=0.5), 0)
    for block in model.blocks:
        assert torch.all(block.ls.gamma == 0.5)
        assert not block.in_proj.bias.any()
        assert block.in_proj.weight.std().item() == pytest.approx(128**-0.5, rel=0.02)
        assert block.mlp_out_proj.weight.std().item() == pytest.approx(512**-0.5, rel=0.02)
        assert torch.all(block.q_norm.weight == 1)
    filters = model.patch_embed["proj"].weight[:, 0]
    assert filters.mean(dim=(1, 2)).abs().max() < 1e-6  # blind to the mean of a patch


def test_random_weights_see_texture():
    """Fine and coarse textures of one mean and variance are told apart on draws that set no threshold."""
    rng = np.random.default_rng(0)

    def texture(sigma):
        noise = ndimage.gaussian_filter(rng.standard_normal((40, 1, 64, 64)), (0, 0, sigma, sigma), mode="wrap")
        noise /= noise.std(axis=(2, 3), keepdims=True)
        return np.clip(128 + 40 * noise, 0, 255).astype(np.uint8)

    model = OpenPhenom.random(OpenPhenomConfig(64, 16, 128, 4, 4), 0)
    fine, coarse = model.embed(texture(1.5)).numpy(), model.embed(texture(2.5)).numpy()
    axis = (fine[:20].mean(0) - coarse[:20].mean(0)) / (fine[:20].var(0) + coarse[:20].var(0))
    wins = (fine[20:] @ axis)[:, None] > (coarse[20:] @ axis)[None]
    assert wins.mean() > 0.5 + 3 * np.sqrt(41 / (12 * 20 * 20))  # 3 standard errors of a rank-sum at chance


def test_patch_filters_answer_with_unit_variance_to_natural_images():
    rng = np.random.default_rng(0)
    frequency = np.hypot(np.fft.fftfreq(512)[:, None], np.fft.fftfreq(512)[None])
    amplitude = np.where(frequency > 1 / 256, 1 / np.maximum(frequency, 1 / 512), 0)
    image = np.fft.ifft2(np.fft.fft2(rng.standard_normal((512, 512))) * amplitude).real
    image /= image.std()
    filters = random_weights.band_pass_filters(64, 16, rng)
    patches = image.reshape(32, 16, 32, 16).swapaxes(1, 2).reshape(-1, 256)
    sd = (patches @ filters.reshape(64, -1).T).std(0)
    assert 0.6 < np.median(sd) < 1.4 and sd.max() < 3 and sd.min() > 0.3


# ---- bad input


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.zeros((1, 3, 64, 64), np.float32), "type float32.*uint8"),
        (np.zeros((1, 3, 64, 64), np.uint16), "type uint16"),
        (torch.zeros((1, 3, 64, 64)), "torch.float32"),
        (np.zeros((3, 64, 64), np.uint8), r"axes image, channel, row, column.*images\[None\]"),
        (np.zeros((1, 64, 64, 3), np.uint8), "64 channels.*channels come before rows and columns, not last"),
        (np.zeros((0, 3, 64, 64), np.uint8), "no image in the batch"),
        (np.zeros((1, 12, 64, 64), np.uint8), "12 channels; the model takes 1 to 11"),
        (np.zeros((1, 0, 64, 64), np.uint8), "0 channels"),
        (np.zeros((1, 3, 63, 64), np.uint8), "63 x 64 px is smaller than the model's tile of 64 px"),
        (np.zeros((1, 3, 128, 128), np.uint8), "embed_well cuts larger images"),
    ],
)
def test_bad_images_are_refused(tiny, images, message):
    with pytest.raises(ImageError, match=message):
        tiny.embed(images)
    with pytest.raises(ImageError, match=message):
        tiny.tokens(images)


def test_bad_wells_are_refused(tiny):
    with pytest.raises(ImageError, match="smaller than the model's tile"):
        tiny.embed_well(np.zeros((3, 40, 200), np.uint8))
    with pytest.raises(ImageError, match="expected the axes channel, row, column"):
        tiny.embed_well(np.zeros((1, 3, 64, 64), np.uint8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_size": 250}, "no multiple of model.patch_size"),
        ({"heads": 5}, "model.dim"),
        ({"dim": 6, "heads": 3}, "multiple of 4"),
        ({"depth": 0}, "model.depth is 0"),
        ({"depth": True}, "model.depth is True"),
        ({"dim": 384.0}, "whole number"),
        ({"layer_scale": float("nan")}, "model.layer_scale"),
        ({"layer_scale": float("inf")}, "model.layer_scale"),
        ({"max_channels": -1}, "model.max_channels"),
    ],
)
def test_bad_sizes_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        OpenPhenomConfig(**change)


def test_bad_seed_batch_and_device_are_refused(tiny, image):
    with pytest.raises(ConfigError, match="embed.seed"):
        OpenPhenom.random(OpenPhenomConfig(**SMALL), -1)
    for batch_tiles in (0, 1.5, "auto", True, None):
        with pytest.raises(ConfigError, match="batch_tiles is"):
            tiny.embed(image("tiny_x6"), batch_tiles=batch_tiles)
    with pytest.raises(ConfigError, match="auto, cpu or cuda"):
        encoder.choose_device("gpu")
    if not torch.cuda.is_available():
        assert encoder.choose_device("auto").type == "cpu"
        with pytest.raises(ConfigError, match="sees no GPU"):
            encoder.choose_device("cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NO GPU: the same numbers on a GPU are not checked")
def test_same_numbers_on_a_gpu(build, tiny_weights, tiny, image, golden):
    model = build(tiny.config, tiny_weights).to("cuda")
    np.testing.assert_allclose(model.embed(image("tiny_x6")), golden["pooled_tiny_x6"], atol=TOLERANCE)


def test_the_package_loads_torch_only_when_the_model_is_asked_for():
    code = (
        "import sys, phenoica.openphenom, phenoica.openphenom.tiling\n"
        "assert 'torch' not in sys.modules\n"
        "phenoica.openphenom.OpenPhenom\n"
        "assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
