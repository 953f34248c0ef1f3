"""The decoder of the masked auto-encoder: it predicts the hidden patches of every channel.

Comes in: the encoder's tokens of the visible patches. Goes out: standardised pixels of all patches. The layout follows
the multi-modal decoder of Bachmann et al. (MultiMAE, ECCV 2022), with channels for modalities: one cross attention that
all channels share, then a stack of blocks for each channel; which tokens go where was settled by the golden numbers.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from numbers import Real
from typing import NamedTuple

import numpy as np
import torch
from timm.layers import Mlp
from timm.models.vision_transformer import Block
from torch import nn
from torch.nn import functional

from phenoica.errors import ConfigError

DECODER_LAYER_NORM_EPS = 1e-5
CROSS_ATTENTION_HEADS = 8


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """The size of a decoder; the defaults are those of OpenPhenom-S/16.

    Parameters
    ----------
    dim
        Width of a token; a multiple of `heads`, of 8 (the heads of the cross attention) and of 4.
    depth
        Blocks of each channel.
    heads
        Attention heads of a block. A checkpoint's shapes do not tell them.
    channels
        Channels it can decode; each has weights of its own, so their order matters.

    Raises
    ------
    ConfigError
        Naming the value that does not fit.
    """

    dim: int = 512
    depth: int = 8
    heads: int = 16
    channels: int = 6

    def __post_init__(self) -> None:
        """Check the sizes against each other."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"decoder.{field.name} is {value!r}; it must be a whole number above 0")
        if self.dim % self.heads or self.dim % CROSS_ATTENTION_HEADS:
            raise ConfigError(
                f"decoder.dim {self.dim} must be a multiple of decoder.heads {self.heads} and of "
                f"{CROSS_ATTENTION_HEADS} (heads of the cross attention)"
            )


class CrossAttention(nn.Module):
    """Attention of queries over a context; no bias on queries, keys and values.

    Parameters
    ----------
    dim
        Width of a token.
    """

    def __init__(self, dim: int):
        super().__init__()
        self.q = nn.Linear(dim, dim, bias=False)
        self.kv = nn.Linear(dim, 2 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)

    def forward(self, queries: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """Attend; (N, Q, dim) and (N, K, dim) -> (N, Q, dim)."""
        heads = (CROSS_ATTENTION_HEADS, -1)
        q = self.q(queries).unflatten(-1, heads).transpose(1, 2)
        k, v = (part.unflatten(-1, heads).transpose(1, 2) for part in self.kv(context).chunk(2, dim=-1))
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return self.proj(mixed.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """Predict the standardised pixels of every patch from the tokens of the visible ones.

    The encoder's class token is left out. Visible tokens and mask tokens are put into place; position and channel
    tokens are added to both; queries (the tokens of one channel) attend to the tokens of all channels without a
    residual; a residual MLP and the channel's own blocks follow.

    Parameters
    ----------
    config
        Its size.
    encoder_dim
        Width of the encoder's tokens.
    patch_size
        Side of a patch in pixels.
    positions
        float32 (1, 1 + channels * L, dim): fixed sine-cosine positions, the first row (class token) unused.

    Notes
    -----
    `placeholder` takes part in no computation; published checkpoints carry it, so it is kept for saving.
    """

    def __init__(self, config: DecoderConfig, encoder_dim: int, patch_size: int, positions: np.ndarray):
        super().__init__()
        self.config = config
        dim = config.dim
        norm = partial(nn.LayerNorm, eps=DECODER_LAYER_NORM_EPS)
        self.encoder_decoder_proj = nn.Linear(encoder_dim, dim)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.placeholder = nn.Parameter(torch.zeros(1, 1, dim), requires_grad=False)
        self.modality_tokens = nn.ParameterList(nn.Parameter(torch.zeros(1, 1, dim)) for _ in range(config.channels))
        self.register_buffer("pos_embeddings", torch.from_numpy(positions))
        self.query_norm, self.context_norm, self.out_norm = norm(dim), norm(dim), norm(dim)
        self.cross_attention = CrossAttention(dim)
        self.mlp = Mlp(dim, hidden_features=4 * dim)
        self.decoders = nn.ModuleList(
            nn.Sequential(
                *(Block(dim, config.heads, mlp_ratio=4, qkv_bias=True, norm_layer=norm) for _ in range(config.depth))
            )
            for _ in range(config.channels)
        )
        self.decoder_pred = nn.Linear(dim, patch_size**2)

    def forward(self, latent: torch.Tensor, order: torch.Tensor, channels: int) -> torch.Tensor:
        """Decode.

        Parameters
        ----------
        latent
            (N, 1 + visible, encoder_dim): the class token and the visible tokens in the order of `order`.
        order
            int64 (N, channels * L): the shuffle; its first entries are the visible tokens.
        channels
            Channels of the images.

        Returns
        -------
        torch.Tensor
            (N, channels * L, patch_size ** 2) standardised pixels.
        """
        tokens = self.encoder_decoder_proj(latent)[:, 1:]
        n, visible, dim = tokens.shape
        hidden = self.mask_token.to(tokens.dtype).expand(n, order.shape[1] - visible, dim)
        placed = torch.cat([tokens, hidden], dim=1)
        placed = placed.gather(1, order.argsort(1)[..., None].expand(-1, -1, dim))
        length = order.shape[1] // channels
        channel_tokens = torch.cat([token.expand(1, length, dim) for token in self.modality_tokens[:channels]], dim=1)
        placed = placed + self.pos_embeddings[:, 1 : 1 + order.shape[1]] + channel_tokens
        # every channel asks the same context with the same weights, so one pass serves all
        x = self.cross_attention(self.query_norm(placed), self.context_norm(placed))
        x = x + self.mlp(self.out_norm(x))
        decoded = [
            blocks(part) for blocks, part in zip(self.decoders[:channels], x.chunk(channels, dim=1), strict=True)
        ]
        return self.decoder_pred(torch.cat(decoded, dim=1))


class Mask(NamedTuple):
    """Which tokens of each image are hidden."""

    order: torch.Tensor  # int64 (N, T): tokens in the order of their noise; the first `visible` survive
    visible: int
    hidden: torch.Tensor  # bool (N, T)


def random_mask(noise: torch.Tensor, mask_ratio: float) -> Mask:
    """Hide tokens at random: those with the lowest noise survive (He et al., MAE, CVPR 2022).

    Parameters
    ----------
    noise
        (N, T), one number a token of every channel.
    mask_ratio
        Share of hidden tokens; int(T * (1 - mask_ratio)) survive.

    Raises
    ------
    ConfigError
        If no token or every token survives.
    """
    if isinstance(mask_ratio, bool) or not isinstance(mask_ratio, Real) or not 0 < mask_ratio < 1:
        raise ConfigError(f"mask_ratio is {mask_ratio!r}; it must be a number between 0 and 1")
    visible = int(noise.shape[1] * (1 - mask_ratio))
    if not 0 < visible < noise.shape[1]:
        raise ConfigError(
            f"mask_ratio is {mask_ratio}: {visible} of {noise.shape[1]} tokens stay visible; choose it so that "
            "some are visible and some hidden"
        )
    order = noise.argsort(dim=1)
    hidden = torch.ones_like(noise, dtype=torch.bool).scatter(1, order[:, :visible], False)
    return Mask(order, visible, hidden)


def pixel_loss(predicted: torch.Tensor, target: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error over the pixels of hidden patches.

    Parameters
    ----------
    predicted, target
        (N, T, P) standardised pixels.
    hidden
        bool (N, T).
    """
    return (predicted - target).square().mean(-1)[hidden].mean()


def fourier_loss(predicted: torch.Tensor, target: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Return the mean absolute difference of the amplitude spectra of hidden patches.

    Amplitudes are those of the unnormalised two-dimensional Fourier transform of each patch. They do not depend on
    where in the patch a structure lies, so a texture whose details cannot be predicted still has something to learn
    (after Xie et al. 2022, arXiv 2206.07706, and Kraus et al. 2024, who weigh it with 0.01; the exact form is
    inferred).

    Parameters
    ----------
    predicted, target
        (N, T, P) standardised pixels; P is a square number.
    hidden
        bool (N, T).
    """
    side = round(predicted.shape[-1] ** 0.5)
    ours, theirs = (
        torch.fft.rfft2(pixels[hidden].float().unflatten(-1, (side, side))) for pixels in (predicted, target)
    )
    # a small constant keeps the gradient finite where an amplitude is 0
    amplitudes = ((part.real.square() + part.imag.square() + 1e-6).sqrt() for part in (ours, theirs))
    first, second = amplitudes
    return (first - second).abs().mean()
