"""The masked pass against golden numbers, and the losses against hand-worked values."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from phenoica.errors import CheckpointError, ConfigError, ImageError
from phenoica.openphenom import OpenPhenom, OpenPhenomConfig, checkpoint
from phenoica.openphenom.decoder import DecoderConfig, fourier_loss, pixel_loss, random_mask

FIXTURES = Path(__file__).parents[1] / "fixtures"
SMALL = OpenPhenomConfig(image_size=32, patch_size=8, dim=32, depth=2, heads=2)


@pytest.fixture(scope="module")
def auto_encoder(tmp_path_factory, whole_tiny_weights):
    path = tmp_path_factory.mktemp("golden") / "model.safetensors"
    save_file(whole_tiny_weights, path, metadata={"decoder_heads": "4"})
    return OpenPhenom.from_checkpoint(path)


@pytest.fixture(scope="module")
def masked():
    with np.load(FIXTURES / "openphenom_golden_masked.npz") as file:
        return dict(file)


@pytest.fixture
def small():
    model = OpenPhenom.random(SMALL, 1)
    model.add_decoder(DecoderConfig(dim=16, depth=2, heads=2, channels=3))
    return model


def test_masked_pass_is_golden(auto_encoder, image, masked):
    result = auto_encoder.reconstruct(image("tiny_x6"), 0.75, noise=masked["noise"])
    np.testing.assert_array_equal(result.hidden.numpy(), masked["mask"].astype(bool))
    np.testing.assert_allclose(result.latent[:, ::2], masked["latent_every_2nd"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(result.pixels[:, ::5], masked["reconstruction_every_5th"], rtol=0, atol=5e-5)
    assert abs(result.loss - float(masked["loss"])) < 1e-5


def test_every_golden_array_of_the_masked_pass(auto_encoder, image, shared_golden):
    golden = np.load(shared_golden / "openphenom_golden.npz")
    result = auto_encoder.reconstruct(image("tiny_x6"), 0.75, noise=golden["noise_tiny"])
    np.testing.assert_array_equal(result.hidden.numpy(), golden["mask_tiny"].astype(bool))
    np.testing.assert_allclose(result.latent, golden["latent_tiny"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(result.pixels, golden["reconstruction_tiny"], rtol=0, atol=5e-5)
    assert abs(result.loss - float(golden["loss_tiny"])) < 1e-6


def test_target_pixels_are_standardised_and_put_together_again(small, rng):
    images = rng.integers(0, 256, (2, 3, 32, 32), np.uint8)
    result = small.reconstruct(images, 0.5)
    whole = small.reconstruct(images, 0.5)._replace(pixels=result.target).images(3).numpy()
    pixels = images / 255.0
    mean, var = pixels.mean((2, 3), keepdims=True), pixels.var((2, 3), keepdims=True)
    np.testing.assert_allclose(whole, (pixels - mean) / np.sqrt(var + 1e-5), atol=1e-5)
    assert result.hidden.sum(1).tolist() == [24, 24]
    assert result.pixels.dtype == torch.float32 and result.images(3).shape == (2, 3, 32, 32)


def test_a_visible_patch_changes_what_is_predicted_and_a_hidden_one_does_not(small, rng):
    images = rng.integers(0, 256, (1, 3, 32, 32), np.uint8)
    noise = np.linspace(0, 1, 48)[None]  # the first 24 tokens survive: channel 0 and the upper half of channel 1
    before = small.reconstruct(images, 0.5, noise).pixels
    # two pixels change places inside a patch, so that the channel's mean and variance stay
    hidden, visible = images.copy(), images.copy()
    hidden[0, 2, 8:16, 8:16] = hidden[0, 2, 8:16, 8:16][::-1]
    visible[0, 0, 8:16, 8:16] = visible[0, 0, 8:16, 8:16][::-1]
    assert torch.allclose(small.reconstruct(hidden, 0.5, noise).pixels, before, atol=1e-6)
    assert not torch.allclose(small.reconstruct(visible, 0.5, noise).pixels, before, atol=1e-3)


def test_noise_decides_the_mask_and_order_does_not_matter_to_a_pixel(small, rng):
    images = rng.integers(0, 256, (2, 3, 32, 32), np.uint8)
    noise = rng.random((2, 48))
    first = small.reconstruct(images, 0.75, noise)
    # another order of the same survivors
    swapped = np.where(first.hidden.numpy(), noise, 1 - noise) + first.hidden.numpy()
    again = small.reconstruct(images, 0.75, swapped)
    assert torch.equal(first.hidden, again.hidden)
    assert torch.allclose(first.pixels, again.pixels, atol=1e-5)
    assert not torch.equal(small.reconstruct(images, 0.75).hidden, small.reconstruct(images, 0.75).hidden)


def test_fewer_channels_than_the_decoder_has(small, rng):
    images = rng.integers(0, 256, (1, 2, 32, 32), np.uint8)
    assert small.reconstruct(images, 0.5).pixels.shape == (1, 32, 64)


def test_random_mask_by_hand():
    mask = random_mask(torch.tensor([[0.9, 0.1, 0.5, 0.3]]), 0.5)
    assert mask.order.tolist() == [[1, 3, 2, 0]] and mask.visible == 2
    assert mask.hidden.tolist() == [[True, False, True, False]]


@pytest.mark.parametrize("ratio", [0.0, 1.0, 0.999, -0.5, 1.5, float("nan"), "0.75", True, None])
def test_a_mask_of_nothing_or_everything_is_refused(ratio):
    with pytest.raises(ConfigError, match="mask_ratio"):
        random_mask(torch.rand(1, 16), ratio)


def test_pixel_loss_by_hand():
    predicted = torch.tensor([[[1.0, 1.0], [5.0, 5.0], [0.0, 2.0]]])
    target = torch.zeros(1, 3, 2)
    assert float(pixel_loss(predicted, target, torch.tensor([[True, False, True]]))) == pytest.approx(1.5)


def test_fourier_loss_is_blind_to_a_shift_and_sees_an_amplitude():
    y, x = np.mgrid[:8, :8]
    wave = torch.tensor(np.sin(2 * np.pi * 2 * x / 8)).float().reshape(1, 1, 64)
    moved = torch.tensor(np.cos(2 * np.pi * 2 * x / 8)).float().reshape(1, 1, 64)
    hidden = torch.ones(1, 1, dtype=torch.bool)
    assert float(fourier_loss(moved, wave, hidden)) == pytest.approx(0, abs=1e-4)
    # the wave has one non-zero coefficient of 40 in the half spectrum, of amplitude 32
    assert float(fourier_loss(2 * wave, wave, hidden)) == pytest.approx(32 / 40, abs=1e-3)
    flat = torch.zeros(1, 1, 64, requires_grad=True)
    fourier_loss(flat, wave, hidden).backward()
    assert torch.isfinite(flat.grad).all()


# ---- files


def test_auto_encoder_is_saved_and_read_bit_for_bit(small, tmp_path, rng):
    path = tmp_path / "model.safetensors"
    small.save(path)
    again = OpenPhenom.from_checkpoint(path)
    assert again.decoder is None  # not read until it is needed
    images, noise = rng.integers(0, 256, (1, 3, 32, 32), np.uint8), rng.random((1, 48))
    assert torch.equal(again.reconstruct(images, 0.5, noise).pixels, small.reconstruct(images, 0.5, noise).pixels)
    before, after = small.state_dict(), again.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)


def test_the_same_model_is_saved_with_the_same_bytes_each_time(small, tmp_path):
    for i in range(12):
        small.save(tmp_path / f"{i}.safetensors")
    assert len({(tmp_path / f"{i}.safetensors").read_bytes() for i in range(12)}) == 1


def test_half_precision_rounds_the_weights_and_halves_the_file(small, tmp_path):
    small.save(tmp_path / "whole.safetensors")
    checkpoint.save(small, tmp_path / "half.safetensors", dtype=torch.float16)
    sizes = [(tmp_path / f"{n}.safetensors").stat().st_size for n in ("half", "whole")]
    assert sizes[0] < 0.7 * sizes[1]
    half, whole = OpenPhenom.from_checkpoint(tmp_path / "half.safetensors").state_dict(), small.state_dict()
    assert all(torch.equal(half[k], whole[k].half().float()) for k in half if not k.startswith("decoder."))


def test_saved_names_are_the_published_ones(auto_encoder, image, tmp_path, whole_tiny_weights):
    auto_encoder.reconstruct(image("tiny_x6"), 0.75)
    auto_encoder.save(tmp_path / "again.safetensors")
    with safe_open(tmp_path / "again.safetensors", "pt") as file:
        assert set(file.keys()) == set(whole_tiny_weights)
        assert all(torch.equal(file.get_tensor(k), v) for k, v in whole_tiny_weights.items())


def test_heads_that_nobody_knows_are_asked_for(whole_tiny_weights, image, tmp_path):
    save_file(whole_tiny_weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="attention heads.*decoder_heads"):
        OpenPhenom.from_checkpoint(tmp_path / "model.safetensors").reconstruct(image("tiny_x6"), 0.75)


def test_heads_may_be_told_and_are_then_saved(whole_tiny_weights, auto_encoder, image, tmp_path):
    torch.save(whole_tiny_weights, tmp_path / "model.bin")
    noise = np.random.default_rng(0).random((3, 96))
    expected = auto_encoder.reconstruct(image("tiny_x6"), 0.75, noise).pixels
    told = OpenPhenom.from_checkpoint(tmp_path / "model.bin", decoder_heads=4)
    assert torch.equal(told.reconstruct(image("tiny_x6"), 0.75, noise).pixels, expected)
    told.save(tmp_path / "again.safetensors")
    again = OpenPhenom.from_checkpoint(tmp_path / "again.safetensors")
    assert torch.equal(again.reconstruct(image("tiny_x6"), 0.75, noise).pixels, expected)
    with pytest.raises(CheckpointError, match="no possible decoder: .*decoder.heads 5"):
        OpenPhenom.from_checkpoint(tmp_path / "model.bin", decoder_heads=5).reconstruct(image("tiny_x6"), 0.75)


def test_published_size_is_the_default():
    shapes = checkpoint.published_decoder_shapes(DecoderConfig(), OpenPhenomConfig())
    encoder = checkpoint.published_shapes(OpenPhenomConfig())
    count = sum(int(np.prod(s)) for s in [*shapes.values(), *encoder.values()])
    assert len(shapes) + len(encoder) == 765 and count == 178_045_568


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("decoder.mask_token"), r"1 missing:\s+decoder.mask_token"),
        (lambda s: s.update({"decoder.extra": torch.zeros(2)}), r"1 unexpected:\s+decoder.extra"),
        (lambda s: s.update({"decoder_pred.bias": torch.zeros(3)}), r"decoder_pred.bias: \(3,\), expected \(256,\)"),
        (lambda s: s["decoder.mlp.fc1.bias"].fill_(float("nan")), "decoder.mlp.fc1.bias holds NaN"),
    ],
)
def test_damaged_decoders_are_refused_when_asked_for(change, message, whole_tiny_weights, image, tmp_path):
    state = {k: v.clone() for k, v in whole_tiny_weights.items()}
    change(state)
    save_file(state, tmp_path / "m.safetensors", metadata={"decoder_heads": "4"})
    model = OpenPhenom.from_checkpoint(tmp_path / "m.safetensors")  # the encoder is whole
    with pytest.raises(CheckpointError, match=message):
        model.reconstruct(image("tiny_x6"), 0.75)


def test_reconstructing_without_a_decoder(tmp_path, image, auto_encoder, rng):
    with pytest.raises(CheckpointError, match="no decoder"):
        OpenPhenom.random(SMALL, 0).reconstruct(np.zeros((1, 1, 32, 32), np.uint8), 0.5)
    OpenPhenom.random(SMALL, 0).save(tmp_path / "encoder.safetensors")
    with pytest.raises(CheckpointError, match="an encoder alone"):
        OpenPhenom.from_checkpoint(tmp_path / "encoder.safetensors").reconstruct(
            np.zeros((1, 1, 32, 32), np.uint8), 0.5
        )
    with pytest.raises(CheckpointError, match="7 channels; the decoder has weights for 6"):
        auto_encoder.reconstruct(rng.integers(0, 255, (1, 7, 64, 64), np.uint8), 0.5)
    with pytest.raises(ImageError, match="noise has the shape"):
        auto_encoder.reconstruct(image("tiny_x6"), 0.5, np.zeros((3, 95)))
    with pytest.raises(ImageError, match="noise holds NaN"):
        auto_encoder.reconstruct(image("tiny_x6"), 0.5, np.full((3, 96), np.nan))
    result = auto_encoder.reconstruct(image("tiny_x6"), np.float32(0.5))
    for channels in (0, 5, 3):
        with pytest.raises(ImageError, match=f"96 patches are no square image in each of {channels} channels"):
            result.images(channels)


@pytest.mark.parametrize(
    "sizes", [{"dim": 20, "heads": 4}, {"dim": 64, "heads": 3}, {"depth": 0}, {"channels": 1.5}, {"heads": True}]
)
def test_impossible_decoders(sizes):
    with pytest.raises(ConfigError, match="decoder."):
        DecoderConfig(**sizes)


def test_shared_golden_is_the_fixture(masked, shared_golden):
    golden = np.load(shared_golden / "openphenom_golden.npz")
    np.testing.assert_array_equal(masked["reconstruction_every_5th"], golden["reconstruction_tiny"][:, ::5])
    np.testing.assert_array_equal(masked["latent_every_2nd"], golden["latent_tiny"][:, ::2])
