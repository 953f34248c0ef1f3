"""The packed path against golden numbers, against timm's blocks, and against weights that change."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.nn import functional

from phenoica.errors import ConfigError, EmbeddingError
from phenoica.openphenom import OpenPhenom, OpenPhenomConfig, cores, packed, precision

TOLERANCE = 1e-5
SMALL = OpenPhenomConfig(image_size=32, patch_size=8, dim=48, depth=3, heads=3)


def plain(model, images, channelwise=False):
    """Embed with timm's blocks, float32."""
    with torch.inference_mode():
        tokens = model.tokens(images)[:, 1:]
    return (tokens.unflatten(1, (images.shape[1], -1)).mean(2).flatten(1) if channelwise else tokens.mean(1)).numpy()


def drawn(config=SMALL, seed=0):
    """Return a model none of whose weights is trivial: norms off 1, biases off 0, layer scale off 1."""
    model = OpenPhenom(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            draw = torch.randn(value.shape, generator=generator)
            centre = 0.3 if name.endswith("gamma") else float("norm" in name and name.endswith("weight"))
            value.copy_(draw / np.sqrt(value[0].numel()) if value.ndim > 1 else centre + 0.2 * draw)
    return model


@pytest.fixture
def model():
    return drawn()


@pytest.fixture
def images():
    return np.random.default_rng(0).integers(0, 256, (5, 3, 32, 32)).astype(np.uint8)


# ---- the same numbers


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        OpenPhenomConfig(image_size=32, patch_size=16, dim=32, depth=1, heads=2, mlp_ratio=2),
        OpenPhenomConfig(image_size=48, patch_size=16, dim=40, depth=2, heads=1, max_channels=4, mlp_ratio=3),
    ],
)
@pytest.mark.parametrize("channels", [1, 4])
def test_packed_is_the_plain_model_in_float32(config, channels):
    model = drawn(config)
    images = np.random.default_rng(1).integers(0, 256, (3, channels, *2 * [config.image_size])).astype(np.uint8)
    np.testing.assert_allclose(model.embed(images), plain(model, images), atol=TOLERANCE)
    np.testing.assert_allclose(model.embed(images, True), plain(model, images, True), atol=TOLERANCE)


@pytest.mark.parametrize("name", ["channelwise_tiny_x6", "channelwise_tiny_x3pat", "channelwise_full_x3pat"])
def test_bfloat16_stays_near_the_golden_numbers(name, golden, image, tiny, full):
    model = tiny if "tiny" in name else full
    expected = golden[name].astype(np.float64)
    model.use_precision("bfloat16")
    try:
        got = model.embed(image(name.removeprefix("channelwise_")), True).numpy().astype(np.float64)
    finally:
        model.use_precision("float32")
    difference = np.abs(got - expected)
    assert 1e-4 < difference.max() <= 0.02  # the lower bound: it was bfloat16
    cosine = (got * expected).sum(1) / np.linalg.norm(got, axis=1) / np.linalg.norm(expected, axis=1)
    assert cosine.min() >= 0.99998


@pytest.mark.parametrize("tokens", [1, 5, packed.QUERY_BLOCK, 2 * packed.QUERY_BLOCK + 3])
def test_blocked_attention_is_attention(tokens):
    generator = torch.Generator().manual_seed(tokens)
    q, k, v = (0.5 * torch.randn(2, 3, tokens, 16, generator=generator) for _ in range(3))
    q, k, v = (tensor.to(torch.bfloat16) for tensor in (q, k, v))
    v = v.transpose(1, 2).contiguous().transpose(1, 2)  # as it comes out of the fused projection
    expected = functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=1.0)
    np.testing.assert_allclose(packed.attention(q, k, v).double(), expected, atol=0.01, rtol=0)


def test_large_scores_do_not_overflow():
    q = torch.full((1, 1, 3, 16), 30.0, dtype=torch.bfloat16)
    k = q * torch.tensor([1.0, -1.0, 0.5]).to(q.dtype)[:, None]
    v = torch.arange(3.0, dtype=torch.bfloat16)[:, None].expand(1, 1, 3, 16)
    assert torch.equal(packed.attention(q, k, v), torch.zeros_like(q))


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_an_embedding_does_not_depend_on_its_batch(name, model, images):
    model.use_precision(name)
    many = np.concatenate([images] * 2)[:8]
    alone = torch.cat([model.embed(many[i : i + 1]) for i in range(8)])
    for batch_tiles in (1, 3, 8):
        together = model.embed(many, batch_tiles=batch_tiles)
        np.testing.assert_allclose(together, alone, atol=TOLERANCE if name == "float32" else 0.02)


def test_without_prepacked_products_the_numbers_are_the_same(model, images, monkeypatch):
    expected = model.use_precision("bfloat16").embed(images)
    model.train().eval()
    monkeypatch.setattr(packed, "_has_prepacked_products", lambda: False)
    np.testing.assert_allclose(model.embed(images), expected, atol=0.02)
    assert not model._packed.blocks[0].qkv.prepacked


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gelu_behind_a_product_is_the_exact_one(dtype):
    x = torch.linspace(-4, 4, 64).to(dtype)[None]
    product = packed._Product(torch.eye(64), torch.zeros(64), dtype, gelu=True)
    expected = functional.gelu(x.double())
    assert (functional.gelu(x.double(), approximate="tanh") - expected).abs().max() > 4e-4
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 1e-6
    np.testing.assert_allclose(product(x).double(), expected, rtol=rounding, atol=2e-5)


# ---- weights that change


def _optimizer_step(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model.tokens(np.zeros((1, 1, 32, 32), np.uint8)).square().mean().backward()
    optimizer.step()


def _new_state(model):
    model.load_state_dict(drawn(seed=9).state_dict())


def _assigned_state(model):
    model.load_state_dict(drawn(seed=9).state_dict(), assign=True)


def _in_place(model):
    with torch.no_grad():
        model.blocks[1].ls.gamma.mul_(3)


def _new_storage(model):
    model.blocks[0].in_proj.weight.data = model.blocks[0].in_proj.weight.data.flip(0)


def _new_block(model):
    model.blocks[2] = drawn(seed=9).blocks[2]


def _inside_inference_mode(model):
    with torch.inference_mode():
        model.blocks[1].ls.gamma = torch.nn.Parameter(torch.ones(48), requires_grad=False)
        model.embed(np.zeros((1, 1, 32, 32), np.uint8))
        model.blocks[1].ls.gamma.mul_(3)  # torch does not count the changes of such a tensor


def _in_training_mode_through_data(model):
    model.train()
    model.blocks[1].ls.gamma.data.mul_(3)
    model.eval()


def _same_memory_and_count(model):
    old = model.blocks[1].ls.gamma
    new = model.blocks[1].ls.gamma = torch.nn.Parameter(old.data)
    assert new._version < old._version
    with torch.no_grad():
        while new._version < old._version:
            new.mul_(3)


CHANGES = [
    _same_memory_and_count, _optimizer_step, _new_state, _assigned_state, _in_place, _new_storage, _new_block,
    _inside_inference_mode, _in_training_mode_through_data,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_packed_weights_follow_the_weights(change, model, images):
    before = model.embed(images).numpy()
    change(model)
    after = model.embed(images).numpy()
    assert np.abs(after - before).max() > 1e-3
    np.testing.assert_allclose(after, plain(model, images), atol=TOLERANCE)


def test_weights_are_packed_once_and_again_for_another_precision(model, images, monkeypatch):
    packs = []
    pack = packed._pack
    monkeypatch.setattr(packed, "_pack", lambda block, dtype, last: packs.append(dtype) or pack(block, dtype, last))
    for _ in range(3):
        model.embed(images)
    assert packs == 3 * [torch.float32]
    rounded = model.use_precision("bfloat16").embed(images)
    model.embed(images)
    assert packs[3:] == 3 * [torch.bfloat16]
    assert 1e-4 < (rounded - model.use_precision("float32").embed(images)).abs().max() < 0.05


def test_training_and_double_precision_are_not_in_the_way(model, images):
    expected = model.embed(images)
    assert model.train()._packed is None
    np.testing.assert_allclose(model.embed(images), expected, atol=1e-6)
    assert model.training and all(p.requires_grad for p in model.parameters())
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copied_model_packs_its_own_weights(again, model, images):
    expected = model.use_precision("bfloat16").embed(images)
    copied = again(model)
    assert torch.equal(copied.embed(images), expected)
    _in_place(copied)
    assert not torch.equal(copied.embed(images), expected)
    assert torch.equal(model.embed(images), expected)


# ---- cores


def threads_of_a_new_thread():
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.get_num_threads).result()


def test_images_are_spread_over_threads_and_torch_keeps_its_number(model, images, monkeypatch):
    expected = model.embed(images)
    used = []
    channel_means = packed.PackedBlocks.channel_means

    def watched(self, x, channels):
        used.append((threading.get_ident(), torch.get_num_threads(), len(x)))
        return channel_means(self, x, channels)

    monkeypatch.setattr(packed.PackedBlocks, "channel_means", watched)
    torch.set_num_threads(4)
    try:
        spread = model.embed(images)
        assert torch.get_num_threads() == threads_of_a_new_thread() == 4
        one = model.embed(images[:1])
    finally:
        torch.set_num_threads(1)
    np.testing.assert_allclose(spread, expected, atol=1e-6)
    np.testing.assert_allclose(one, expected[:1], atol=1e-6)
    *many, last = used
    assert sum(n for *_, n in many) == 5
    assert threading.get_ident() not in {thread for thread, *_ in many} and {threads for _, threads, _ in many} == {1}
    assert last == (threading.get_ident(), 4, 1)


def test_an_error_in_a_thread_is_raised_and_torch_keeps_its_number():
    torch.set_num_threads(2)
    try:
        with pytest.raises(ZeroDivisionError):
            cores.map_on_cores(lambda x: 1 / x, [1, 0, 2])
        assert torch.get_num_threads() == threads_of_a_new_thread() == 2
    finally:
        torch.set_num_threads(1)


def test_passes_are_small_and_leave_no_core_without_work():
    torch.set_num_threads(1)
    assert cores.tiles_a_pass(16, 1537) == 2
    assert cores.tiles_a_pass(16, 97) == 16
    assert cores.tiles_a_pass(16, 10_000) == 1
    torch.set_num_threads(4)
    try:
        assert cores.tiles_a_pass(16, 97) == 4
        assert cores.tiles_a_pass(3, 97) == 1
    finally:
        torch.set_num_threads(1)


# ---- bad numbers, precision


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_embeddings_that_are_not_finite_are_refused_and_named(name, model, images):
    with torch.no_grad():
        model.patch_embed["proj"].weight.fill_(3e38)
    images[[0, 2, 4]] = 0  # black images stay zeros, which no weight can make overflow
    model.use_precision(name)
    with pytest.raises(EmbeddingError, match=rf"2 of 5 tiles \(index 1, 3\) is not finite in {name}.*set embed.prec"):
        model.embed(images)


@pytest.mark.parametrize(
    ("has", "expected"),
    [
        ({"amx_tile", "avx512_bf16"}, "bfloat16 (AMX)"),
        ({"avx512_bf16"}, "bfloat16 (AVX512-BF16)"),
        (set(), "float32 (no bfloat16 units)"),
    ],
)
def test_auto_goes_by_the_units_of_the_cpu(has, expected, monkeypatch):
    for feature in ("amx_tile", "avx512_bf16"):
        monkeypatch.setattr(torch.cpu, f"_is_{feature}_supported", lambda f=feature: f in has, raising=False)
    cpu = torch.device("cpu")
    assert str(precision.choose_precision("auto", cpu)) == expected
    assert precision.choose_precision("float32", cpu).name == "float32"
    assert precision.choose_precision("bfloat16", cpu).dtype == torch.bfloat16


def test_auto_is_float32_where_torch_cannot_tell(monkeypatch):
    for feature in ("amx_tile", "avx512_bf16"):
        monkeypatch.delattr(torch.cpu, f"_is_{feature}_supported", raising=False)
    assert precision.choose_precision("auto", torch.device("cpu")).name == "float32"


@pytest.mark.parametrize(("capability", "expected"), [((9, 0), "bfloat16"), ((8, 0), "bfloat16"), ((7, 5), "float32")])
def test_auto_goes_by_the_generation_of_the_gpu(capability, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    chosen = precision.choose_precision("auto", torch.device("cuda"))
    assert chosen.name == expected and "{}.{}".format(*capability) in chosen.reason


def test_another_precision_is_refused(model):
    with pytest.raises(ConfigError, match="embed.precision is 'float16'; it must be one of auto, float32, bfloat16"):
        model.use_precision("float16")
    with pytest.raises(ConfigError, match="embed.precision"):
        OpenPhenom.random(SMALL, 0, precision="half")


def test_precision_comes_with_the_checkpoint(tmp_path):
    path = tmp_path / "model.safetensors"
    OpenPhenom.random(SMALL, 0).save(path)
    assert OpenPhenom.from_checkpoint(path).precision.name == "float32"
    assert OpenPhenom.from_checkpoint(path, precision="bfloat16").precision.dtype == torch.bfloat16
