"""The encoder of OpenPhenom-S/16, a channel-agnostic masked auto-encoder (Kraus et al., CVPR 2024).

Comes in: 8-bit images of 1 to 11 channels. Goes out: one vector an image, the mean of the patch tokens after
the last block. The blocks are the parallel blocks of Dehghani et al. 2023 (arXiv 2302.05442) as timm builds
them; what is done before and after them is written from the model's description.
"""

from __future__ import annotations

import dataclasses
import math
import os
import zlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from timm.models.vision_transformer import ParallelScalingBlock
from torch import nn
from torch.nn import functional

from phenoica.errors import CheckpointError, ConfigError, EmbeddingError, ImageError
from phenoica.openphenom.cores import map_on_cores, tiles_a_pass
from phenoica.openphenom.packed import PackedBlocks
from phenoica.openphenom.precision import Precision, choose_precision
from phenoica.openphenom.random_weights import draw
from phenoica.openphenom.tiling import tile_grid, tiles

if TYPE_CHECKING:
    from phenoica.openphenom.decoder import Decoder, DecoderConfig, Mask

MAX_CHANNELS = 11  # of an image; a checkpoint's positional code is read on this premise
LAYER_NORM_EPS = 1e-6
INSTANCE_NORM_EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class OpenPhenomConfig:
    """The size of an encoder; the defaults are those of OpenPhenom-S/16.

    Parameters
    ----------
    image_size
        Side of a tile in pixels, a multiple of `patch_size`.
    patch_size
        Side of a patch in pixels.
    dim
        Width of a token; a multiple of `heads`, and of 4 for the positional code.
    depth
        Number of blocks.
    heads
        Attention heads of a block.
    max_channels
        Most channels that an image may have, at most 11.
    mlp_ratio
        Width of a block's hidden layer over `dim`.
    layer_scale
        Initial layer scale (a checkpoint brings its own).

    Raises
    ------
    ConfigError
        Naming the value that does not fit.
    """

    image_size: int = 256
    patch_size: int = 16
    dim: int = 384
    depth: int = 12
    heads: int = 6
    max_channels: int = MAX_CHANNELS
    mlp_ratio: int = 4
    layer_scale: float = 1.0

    def __post_init__(self) -> None:
        """Check the sizes against each other."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            whole = field.name != "layer_scale"
            known = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
            if not known or not 0 < value < math.inf:
                kind = "a whole number above 0" if whole else "a number above 0"
                raise ConfigError(f"model.{field.name} is {value!r}; it must be {kind}")
        if self.max_channels > MAX_CHANNELS:
            raise ConfigError(f"model.max_channels is {self.max_channels}; it must be at most {MAX_CHANNELS}")
        if self.image_size % self.patch_size:
            raise ConfigError(
                f"model.image_size {self.image_size} is no multiple of model.patch_size {self.patch_size}; "
                "patches must fill a tile exactly"
            )
        if self.dim % self.heads or self.dim % 4:
            raise ConfigError(f"model.dim {self.dim} must be a multiple of 4 and of model.heads {self.heads}")

    @property
    def grid(self) -> int:
        """Patches along one side of a tile."""
        return self.image_size // self.patch_size

    @property
    def patches(self) -> int:
        """Patch tokens of one channel (L)."""
        return self.grid**2

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads

    @property
    def mlp_dim(self) -> int:
        """Width of a block's hidden layer."""
        return self.mlp_ratio * self.dim


class Reconstruction(NamedTuple):
    """What a masked pass gives; T = C * L tokens, channel by channel, row-major within a channel."""

    pixels: torch.Tensor  # (N, T, patch_size ** 2) predicted standardised pixels
    target: torch.Tensor  # (N, T, patch_size ** 2) the standardised pixels themselves
    hidden: torch.Tensor  # bool (N, T)
    latent: torch.Tensor  # (N, 1 + visible, dim) encoder tokens
    loss: float  # mean squared error over the hidden patches

    def images(self, channels: int) -> torch.Tensor:
        """Return the predicted patches put together, (N, channels, H, W).

        Raises
        ------
        ImageError
            If the images had another number of channels.
        """
        tokens = self.pixels.shape[1]
        if channels < 1 or tokens % channels or math.isqrt(tokens // channels) ** 2 != tokens // channels:
            raise ImageError(f"{tokens} patches are no square image in each of {channels} channels")
        return unpatch(self.pixels, channels)


def unpatch(pixels: torch.Tensor, channels: int) -> torch.Tensor:
    """Put patches together; (N, channels * L, P) -> (N, channels, H, W)."""
    n, tokens, area = pixels.shape
    grid, patch = math.isqrt(tokens // channels), math.isqrt(area)
    cut = pixels.view(n, channels, grid, grid, patch, patch).permute(0, 1, 2, 4, 3, 5)
    return cut.reshape(n, channels, grid * patch, grid * patch)


def positional_code(config: OpenPhenomConfig, dim: int | None = None, channels: int | None = None) -> np.ndarray:
    """Return the fixed sine-cosine positions, as wide as the encoder and for all its channels unless told otherwise.

    With q = dim / 4 and w_i = 10000^(-i/q), a patch in row r and column c has [sin(r w) | cos(r w) | sin(c w)
    | cos(c w)]; the block of L patches (row-major) is repeated for every channel; the class token has zeros.

    Returns
    -------
    numpy.ndarray
        (1, 1 + channels * L, dim), float32.
    """
    dim = config.dim if dim is None else dim
    channels = config.max_channels if channels is None else channels
    quarter = dim // 4
    frequency = 10000.0 ** (-np.arange(quarter) / quarter)
    angle = np.arange(config.grid)[:, None] * frequency
    code = np.concatenate([np.sin(angle), np.cos(angle)], axis=1)
    rows, columns = np.repeat(code, config.grid, axis=0), np.tile(code, (config.grid, 1))
    block = np.concatenate([rows, columns], axis=1)
    table = np.concatenate([np.zeros((1, dim)), np.tile(block, (channels, 1))])
    return table[None].astype(np.float32)


def choose_device(name: str) -> torch.device:
    """Return the device for `auto` (a GPU when there is one), `cpu` or `cuda`.

    Raises
    ------
    ConfigError
        For another name, or for `cuda` on a machine without a usable GPU.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"embed.device is {name!r}; it must be auto, cpu or cuda")
    if name == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if name == "cuda":
        raise ConfigError("embed.device is cuda, but torch sees no GPU; set it to auto or cpu")
    return torch.device("cpu")


class OpenPhenom(nn.Module):
    """The encoder: 8-bit images in, one float32 vector an image out.

    Every channel goes through one shared patch projection, so any number of channels up to `max_channels`
    works and their order changes a pooled embedding by rounding alone. Numbers do not depend on what else is
    in a batch, beyond float32 rounding.

    Parameters
    ----------
    config
        The size of the model. Its weights are timm's defaults until they are loaded or drawn: use
        `OpenPhenom.random` or `OpenPhenom.from_checkpoint`.

    Notes
    -----
    `fc_norm` is part of every published checkpoint and is kept for saving; an embedding never passes through
    it.
    """

    def __init__(self, config: OpenPhenomConfig):
        super().__init__()
        self.config = config
        norm = partial(nn.LayerNorm, eps=LAYER_NORM_EPS)
        patch = config.patch_size
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(1, config.dim, kernel_size=patch, stride=patch)})
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.dim))
        self.register_buffer("pos_embed", torch.from_numpy(positional_code(config)))
        # With qkv_bias=True old and new timm agree on one bias over the whole fused projection; without it
        # they add the published `mlp_bias` to different slices (see checkpoint.fold).
        self.blocks = nn.ModuleList(
            ParallelScalingBlock(
                config.dim,
                config.heads,
                mlp_ratio=config.mlp_ratio,
                qkv_bias=True,
                qk_norm=True,
                init_values=config.layer_scale,
                norm_layer=norm,
            )
            for _ in range(config.depth)
        )
        self.fc_norm = norm(config.dim)
        # Embedding needs no decoder: it is left on disk until `reconstruct` asks for it, or added to train.
        self.decoder: Decoder | None = None
        self._source: Path | None = None
        self._decoder_heads: int | None = None
        self._precision = "float32"
        self._packed: PackedBlocks | None = None
        self.eval()

    @classmethod
    def from_checkpoint(
        cls, path_or_hub_id: str | os.PathLike, *, precision: str = "float32", device: str = "cpu",
        decoder_heads: int | None = None,
    ) -> OpenPhenom:  # fmt: skip
        """Load `model.safetensors` (real safetensors, or a torch pickle of that name).

        Parameters
        ----------
        path_or_hub_id
            The file, or the name of a repository whose weights `phenoica fetch-model` fetched before; nothing is
            downloaded. A full auto-encoder works, its decoder is left out.
        precision
            float32, bfloat16 or auto (see `precision.choose_precision`): what `embed` computes in.
        device
            auto, cpu or cuda.
        decoder_heads
            Attention heads of a decoder that is neither as wide as the published one nor says it itself; shapes do not
            tell. Used when the decoder is read: to reconstruct, and to save.

        Raises
        ------
        CheckpointError
            If the file cannot be read or does not hold this model.
        ConfigError
            For another device or precision.
        """
        from phenoica.openphenom import checkpoint
        from phenoica.plates.fetch import resolve_hub_id

        path = resolve_hub_id(path_or_hub_id)
        config, state = checkpoint.read(path)
        model = cls(config)
        model.load_state_dict(state)
        model._source, model._decoder_heads = Path(path), decoder_heads
        return model.to(choose_device(device)).use_precision(precision)

    @classmethod
    def random(
        cls, config: OpenPhenomConfig, seed: int, device: str = "cpu", *, precision: str = "float32"
    ) -> OpenPhenom:
        """Draw weights from a seed: a fair untrained network, not a trained model.

        Every matrix keeps the variance of its input (standard normal over sqrt(fan-in)). Patch filters are
        random band-pass filters, each with its own centre frequency (log-uniform over the patch) and a gain
        in proportion to it, which undoes the 1/f amplitude of natural images: white filters would all answer
        to the same few low frequencies. Biases are 0, norms 1, layer scale as in `config`.

        Parameters
        ----------
        config
            The size of the model.
        seed
            Non-negative; the same seed gives the same weights on every machine.
        device
            auto, cpu or cuda.
        precision
            float32, bfloat16 or auto: what `embed` computes in.
        """
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
            raise ConfigError(f"embed.seed is {seed!r}; it must be a whole number from 0 on")
        model = cls(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                rng = np.random.default_rng([int(seed), zlib.crc32(name.encode())])
                parameter.copy_(torch.from_numpy(draw(name, tuple(parameter.shape), config, rng)))
        return model.to(choose_device(device)).use_precision(precision)

    def save(self, path: str | os.PathLike) -> None:
        """Write the weights as safetensors under the published key names (see `checkpoint.save`).

        A model that came from the checkpoint of an auto-encoder is written with its decoder.
        """
        from phenoica.openphenom import checkpoint

        if self.decoder is None and self._source is not None and checkpoint.has_decoder(self._source):
            self._read_decoder()
        checkpoint.save(self, path)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.cls_token.device

    @property
    def precision(self) -> Precision:
        """What `embed` computes in on the present device, and why."""
        return choose_precision(self._precision, self.device)

    def use_precision(self, name: str) -> OpenPhenom:
        """Set what `embed` computes in (float32, bfloat16 or auto) and return the model; its weights stay float32.

        Raises
        ------
        ConfigError
            For another name.
        """
        choose_precision(name, self.device)
        self._precision = name
        return self

    def train(self, mode: bool = True) -> OpenPhenom:
        """Switch between training and evaluation, as every torch module; packed weights are dropped."""
        self._packed = None
        return super().train(mode)

    def no_weight_decay(self) -> set[str]:
        """Return the names of the tokens, which timm's optimizers then decay as little as biases and norms."""
        return {name for name, _ in self.named_parameters() if "token" in name}

    def tokens(self, images: np.ndarray | torch.Tensor) -> torch.Tensor:
        """Return all tokens after the last block, block by block in float32: the plain form of what `embed` packs.

        Parameters
        ----------
        images
            uint8 (N, C, image_size, image_size).

        Returns
        -------
        torch.Tensor
            float32 (N, 1 + C * L, dim) on the model's device: the class token, then the patch tokens channel
            by channel, row-major within a channel.

        Raises
        ------
        ImageError
            If the images have another type or shape.
        """
        images = _as_tensor(images)
        self._check(images)
        x = self._embed_patches(images.to(self.device))
        for block in self.blocks:
            x = block(x)
        return x

    @torch.inference_mode()
    def embed(
        self, images: np.ndarray | torch.Tensor, channelwise: bool = False, *, batch_tiles: int = 16
    ) -> torch.Tensor:
        """Embed images of the model's size: the mean of the patch tokens; no final norm, no class token.

        Parameters
        ----------
        images
            uint8 (N, C, image_size, image_size).
        channelwise
            Average each channel's tokens apart.
        batch_tiles
            Most images a forward pass; on a CPU it takes fewer where that is faster.

        Returns
        -------
        torch.Tensor
            float32 on the CPU: (N, dim), or (N, C * dim) channel by channel if `channelwise`.

        Raises
        ------
        ImageError
            If the images have another type or shape, or there is none.
        EmbeddingError
            If an embedding is not finite.
        """
        if isinstance(batch_tiles, bool) or not isinstance(batch_tiles, (int, np.integer)) or batch_tiles < 1:
            raise ConfigError(f"batch_tiles is {batch_tiles!r}; it must be a whole number from 1 on")
        images = _as_tensor(images)
        self._check(images)
        packed, channels = self._pack(), images.shape[1]

        def channel_means(batch: torch.Tensor) -> torch.Tensor:
            return packed.channel_means(self._embed_patches(batch.to(self.device, non_blocking=True)), channels)

        if self.device.type == "cpu":
            per_pass = min(batch_tiles, tiles_a_pass(len(images), 1 + channels * self.config.patches))
            embedded = torch.cat(map_on_cores(channel_means, images.split(per_pass)))
        else:
            embedded = torch.cat([channel_means(batch) for batch in images.split(batch_tiles)])
        embedded = (embedded.flatten(1) if channelwise else embedded.mean(1)).cpu()
        _check_finite(embedded, self.precision)
        return embedded

    def embed_well(
        self, image: np.ndarray | torch.Tensor, channelwise: bool = False, *, batch_tiles: int = 16
    ) -> torch.Tensor:
        """Embed one image of any size: the mean over its non-overlapping tiles.

        Parameters
        ----------
        image
            uint8 (C, H, W), at least one tile large; what remains beyond whole tiles is left out in equal
            margins.
        channelwise
            Average each channel's tokens apart.
        batch_tiles
            Tiles a forward pass.

        Returns
        -------
        torch.Tensor
            float32 on the CPU: (dim,), or (C * dim,) if `channelwise`.

        Raises
        ------
        ImageError
            If the image has another type or shape, or is smaller than a tile.
        """
        if isinstance(image, torch.Tensor):
            image = image.cpu().numpy()
        if np.ndim(image) != 3:
            raise ImageError(f"expected the axes channel, row, column; found the shape {np.shape(image)}")
        cut = tiles(image, self.config.image_size)
        return self.embed(cut, channelwise, batch_tiles=batch_tiles).mean(0)

    def add_decoder(self, config: DecoderConfig) -> Decoder:
        """Give the encoder a decoder of its own patch size, with timm's default weights; return it."""
        from phenoica.openphenom.decoder import Decoder

        positions = positional_code(self.config, dim=config.dim, channels=config.channels)
        self.decoder = Decoder(config, self.config.dim, self.config.patch_size, positions).to(self.device)
        self.decoder.train(self.training)
        return self.decoder

    def masked_pass(self, patches: torch.Tensor, mask: Mask) -> torch.Tensor:
        """Encode the visible patches alone.

        Parameters
        ----------
        patches
            float32 (N, C * L, patch_size ** 2) of `standardised_patches`.
        mask
            Which tokens are hidden (`decoder.random_mask`).

        Returns
        -------
        torch.Tensor
            (N, 1 + visible, dim): the class token, then visible tokens in the mask's order; no final norm.
        """
        keep = mask.order[:, : mask.visible, None]
        visible = patches.gather(1, keep.expand(-1, -1, patches.shape[2]))
        positions = self.pos_embed[:, 1 : 1 + patches.shape[1]].expand(len(patches), -1, -1)
        x = self._project(visible) + positions.gather(1, keep.expand(-1, -1, self.config.dim))
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)
        for block in self.blocks:
            x = block(x)
        return x

    @torch.inference_mode()
    def reconstruct(
        self, images: np.ndarray | torch.Tensor, mask_ratio: float, noise: np.ndarray | torch.Tensor | None = None
    ) -> Reconstruction:
        """Hide patches at random and predict them.

        The decoder of a model loaded with `from_checkpoint` is read from its file at the first call.

        Parameters
        ----------
        images
            uint8 (N, C, image_size, image_size).
        mask_ratio
            Share of hidden patches, over all channels.
        noise
            (N, C * L): the tokens of lowest noise survive. Drawn anew at each call if None.

        Returns
        -------
        Reconstruction
            All float32 on the CPU.

        Raises
        ------
        ImageError
            If the images or the noise have another type or shape.
        ConfigError
            If the mask leaves nothing to see or nothing to predict.
        CheckpointError
            If there is no decoder, or none for so many channels.
        """
        from phenoica.openphenom.decoder import pixel_loss, random_mask

        images = _as_tensor(images)
        self._check(images)
        decoder = self._usable_decoder(images.shape[1])
        patches = self.standardised_patches(images.to(self.device))
        noise = torch.rand(patches.shape[:2]) if noise is None else torch.as_tensor(noise)
        if noise.shape != patches.shape[:2]:
            raise ImageError(f"noise has the shape {tuple(noise.shape)}; expected {tuple(patches.shape[:2])}")
        if noise.isnan().any():
            raise ImageError("noise holds NaN, which has no order; give a number a token")
        mask = random_mask(noise.to(self.device), mask_ratio)
        latent = self.masked_pass(patches, mask)
        predicted = decoder(latent, mask.order, images.shape[1])
        loss = pixel_loss(predicted, patches, mask.hidden)
        return Reconstruction(predicted.cpu(), patches.cpu(), mask.hidden.cpu(), latent.cpu(), float(loss))

    def _read_decoder(self) -> Decoder:
        from phenoica.openphenom import checkpoint

        if self._source is None:
            raise CheckpointError("this model has no decoder; load an auto-encoder, or train one")
        config, state = checkpoint.read_decoder(self._source, self.config, heads=self._decoder_heads)
        with torch.inference_mode(False):  # weights made in inference mode could never be trained or replaced
            decoder = self.add_decoder(config)
            decoder.load_state_dict(state)
        return decoder

    def _usable_decoder(self, channels: int) -> Decoder:
        decoder = self._read_decoder() if self.decoder is None else self.decoder
        if channels > decoder.config.channels:
            raise CheckpointError(
                f"images have {channels} channels; the decoder has weights for {decoder.config.channels}"
            )
        return decoder

    def _pack(self) -> PackedBlocks:
        """Return the blocks packed for the present weights, device and precision; they are kept until one changes."""
        dtype = self.precision.dtype
        if self._packed is None or not self._packed.is_current(self, dtype):
            self._packed = None  # frees the old weights first
            self._packed = PackedBlocks(self, dtype)
        return self._packed

    def _check(self, images: torch.Tensor) -> None:
        size, most = self.config.image_size, self.config.max_channels
        if images.dtype != torch.uint8:
            raise _wrong_type(images.dtype)
        if images.ndim != 4:
            raise ImageError(
                f"expected the axes image, channel, row, column; found the shape {tuple(images.shape)}"
                + (" (images[None] makes a batch of one image)" if images.ndim == 3 else "")
            )
        if not images.shape[0]:
            raise ImageError("there is no image in the batch; leave empty batches out")
        if not 1 <= images.shape[1] <= most:
            last = images.shape[1] > most and images.shape[3] <= most
            raise ImageError(
                f"images have {images.shape[1]} channels; the model takes 1 to {most}"
                + ("; channels come before rows and columns, not last" if last else "")
            )
        tile_grid(*images.shape[2:], size)  # refuses an image smaller than a tile
        if tuple(images.shape[2:]) != (size, size):
            raise ImageError(
                f"images are {images.shape[2]} x {images.shape[3]} px, the model takes {size} x {size} px; "
                "embed_well cuts larger images into tiles"
            )

    def standardised_patches(self, images: torch.Tensor) -> torch.Tensor:
        """Standardise each channel of each image and cut patches; uint8 (N, C, H, W) -> float32 (N, C * L, P)."""
        n, channels, _, _ = images.shape
        pixels = images.to(torch.float32) / 255
        pixels = functional.instance_norm(pixels, eps=INSTANCE_NORM_EPS)
        patch, grid = self.config.patch_size, self.config.grid
        pixels = pixels.view(n, channels, grid, patch, grid, patch).permute(0, 1, 2, 4, 3, 5)
        return pixels.reshape(n, channels * self.config.patches, patch * patch)

    def _project(self, patches: torch.Tensor) -> torch.Tensor:
        # The projection of non-overlapping patches is one matrix product, which (unlike a cuDNN convolution)
        # stays in full float32 on a GPU.
        projection = self.patch_embed["proj"]
        return functional.linear(patches, projection.weight.flatten(1), projection.bias)

    def _embed_patches(self, images: torch.Tensor) -> torch.Tensor:
        """Standardise, project and place the patches; uint8 (N, C, H, W) -> float32 (N, 1 + C * L, dim)."""
        x = self._project(self.standardised_patches(images))
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)
        return x + self.pos_embed[:, : x.shape[1]]


def _as_tensor(images: np.ndarray | torch.Tensor) -> torch.Tensor:
    if isinstance(images, torch.Tensor):
        return images
    array = np.asarray(images)
    if array.dtype != np.uint8:
        raise _wrong_type(array.dtype)
    return torch.tensor(np.ascontiguousarray(array))  # a copy: torch warns of arrays that it may not write to


def _wrong_type(dtype: np.dtype | torch.dtype) -> ImageError:
    return ImageError(f"images have the type {dtype}; the model takes 8-bit grey values (uint8), unscaled")


def _check_finite(embedded: torch.Tensor, precision: Precision) -> None:
    bad = torch.nonzero(~torch.isfinite(embedded).all(1)).flatten().tolist()
    if bad:
        shown = ", ".join(str(i) for i in bad[:10]) + (", ..." if len(bad) > 10 else "")
        raise EmbeddingError(
            f"the embedding of {len(bad)} of {len(embedded)} tiles (index {shown}) is not finite in {precision}: the "
            "weights do not fit these images or the precision; set embed.precision to float32, or use other weights"
        )
