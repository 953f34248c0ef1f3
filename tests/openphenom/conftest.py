"""Golden weights and inputs, filled by formula, and where the expected outputs are."""

import json
import os
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from phenoica.openphenom import checkpoint
from phenoica.openphenom.encoder import OpenPhenom, OpenPhenomConfig, positional_code

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
TINY = OpenPhenomConfig(image_size=64, patch_size=16, dim=96, depth=2, heads=3)
FULL = OpenPhenomConfig()


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def kind_of(key):
    if key.endswith("ls.gamma"):
        return "0.3+0.05z"
    if "norm" in key and key.endswith(".weight"):
        return "1+0.1z"
    if key.endswith(("bias", "token", "placeholder")) or "modality_tokens" in key:
        return "0.2z"
    return "sincos (as computed)" if "pos_embed" in key else "z/sqrt(fan_in)"


def weight(key, shape):
    """Fill one weight by the formula, float32."""
    z = np.random.RandomState(zlib.crc32(key.encode())).standard_normal(shape)
    filled = {
        "1+0.1z": lambda: 1 + 0.1 * z,
        "0.3+0.05z": lambda: 0.3 + 0.05 * z,
        "0.2z": lambda: 0.2 * z,
        "sincos (as computed)": lambda: z,  # replaced by the computed code
        "z/sqrt(fan_in)": lambda: z / np.sqrt(np.prod(shape[1:])),
    }[kind_of(key)]()
    return torch.from_numpy(np.asarray(filled, np.float32))


def encoder_weights(config):
    """Return the golden encoder weights of a model under their published names."""
    state = {}
    for key, shape in checkpoint.published_shapes(config).items():
        full = checkpoint.ENCODER_PREFIX + key
        position = key == "pos_embed"
        state[full] = torch.from_numpy(positional_code(config)) if position else weight(full, shape)
    return state


def remembering(model):
    """Let a model keep the tokens and embeddings of images it has seen: a full-size pass takes seconds."""
    seen = {}

    def remember(name):
        compute = getattr(model, name)

        def look_up(images, *options, **batching):
            key = (name, np.asarray(images).tobytes(), options, model.precision.name)
            if key not in seen:
                seen[key] = compute(images, *options, **batching)
            return seen[key]

        setattr(model, name, look_up)

    remember("tokens")
    remember("embed")
    return model


def model_of(config, weights):
    bare = {key.removeprefix(checkpoint.ENCODER_PREFIX): value for key, value in weights.items()}
    model = OpenPhenom(config)
    model.load_state_dict(checkpoint.fold(bare, config))
    return model


def pattern(n, channels, size):
    y, x = np.mgrid[:size, :size]
    images = np.zeros((n, channels, size, size), np.uint8)
    for i in range(n):
        for j in range(channels):
            a = (x * (3 + j) + y * (5 + 2 * i)) % 97
            b = ((x - size // 2) ** 2 + (y - size // 3 - 7 * j) ** 2) // (size // 4 + 3 * i + 1)
            images[i, j] = (2 * a + b) % 256
    return images


def image_of(name):
    """Return a golden input by name; `well` is (6, 512, 512), the others (N, C, H, W)."""
    if name == "tiny_x6":
        return np.random.RandomState(7).randint(0, 256, (3, 6, 64, 64)).astype(np.uint8)
    if name == "full_x11":
        return np.random.RandomState(20250611).randint(0, 256, (1, 11, 256, 256)).astype(np.uint8)
    if name == "well":
        noise = np.random.RandomState(512).randint(0, 40, (6, 512, 512))
        return np.clip(pattern(1, 6, 512)[0] + noise, 0, 255).astype(np.uint8)
    if name == "full_x6const":
        images = pattern(1, 6, 256)
        images[:, 2], images[:, 4] = 0, 17
        return images
    return {"tiny_x3pat": (2, 3, 64), "full_x6pat": (1, 6, 256), "full_x3pat": (1, 3, 256)}[name]


@pytest.fixture(scope="session")
def image():
    def get(name):
        value = image_of(name)
        return pattern(*value) if isinstance(value, tuple) else value

    return get


@pytest.fixture(scope="session")
def tiny_keys():
    return json.loads((FIXTURES / "openphenom_tiny_keys.json").read_text())


@pytest.fixture(scope="session")
def tiny_weights():
    return encoder_weights(TINY)


@pytest.fixture(scope="session")
def whole_tiny_weights(tiny_keys, tiny_weights):
    """Encoder and decoder, as a checkpoint of the full auto-encoder holds them."""
    state = {e["key"]: weight(e["key"], tuple(e["shape"])) for e in tiny_keys if e["key"] not in tiny_weights}
    state["decoder.pos_embeddings"] = torch.from_numpy(positional_code(TINY, dim=64, channels=6))
    return tiny_weights | state


@pytest.fixture(scope="session")
def build():
    return model_of


@pytest.fixture(scope="session")
def tiny(tiny_weights):
    return model_of(TINY, tiny_weights)


@pytest.fixture(scope="session")
def full():
    return remembering(model_of(FULL, encoder_weights(FULL)))


@pytest.fixture(scope="session")
def golden():
    with np.load(FIXTURES / "openphenom_golden.npz") as file:
        return dict(file)


@pytest.fixture(scope="session")
def shared_golden():
    """The folder of all golden numbers: below PHENOICA_SHARED, or in ../shared beside the repository."""
    folder = Path(os.environ.get("PHENOICA_SHARED", ROOT.parent / "shared")) / "golden"
    if not (folder / "openphenom_golden.npz").is_file():
        pytest.skip(f"NO FULL PARITY CHECK: no {folder}; set PHENOICA_SHARED (the bundled cut ran)")
    return folder


@pytest.fixture
def rng():
    return np.random.default_rng(0)
