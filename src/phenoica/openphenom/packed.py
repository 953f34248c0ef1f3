"""The blocks of the encoder, packed for inference: the same function as the timm blocks, faster.

Comes in: the token stream in front of the first block. Goes out: the mean patch token of each channel after the last
one. A block is x + gamma (A(h) W_a + gelu(h W_m) W_o) with h = in_norm(x). What is affine is multiplied out beforehand
in float64: the weight and bias of in_norm go into the products of h, layer scale gamma into the two output products,
the scale of attention into the norm of q. Parameters are read by name, so timm's own forward pass plays no part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from phenoica.openphenom.encoder import OpenPhenom

# Queries whose scores against all keys are held at a time, so that they stay in the cache of a CPU core.
QUERY_BLOCK = 128


class PackedBlocks:
    """The blocks of an encoder in one arithmetic on one device.

    Parameters
    ----------
    model
        The encoder; its weights are copied.
    dtype
        float32 or bfloat16: the type of the factors of products and attention. The token stream, the statistics of
        norms and the final mean are float32 either way.

    Notes
    -----
    `is_current` tells whether the model still has the weights that were packed. It holds the parameters and notices a
    replaced tensor, another device or type, and every change that autograd would notice (optimizers, `copy_`,
    `load_state_dict`); only writing through `parameter.data` escapes it.
    """

    def __init__(self, model: OpenPhenom, dtype: torch.dtype):
        self.dtype = dtype
        self._sources = _sources(model)
        self._versions = _versions(self._sources)
        self.blocks = [_pack(block, dtype, last=block is model.blocks[-1]) for block in model.blocks]

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Copy and pickle as None: a copy of a model packs its own weights."""
        return type(None), ()

    def is_current(self, model: OpenPhenom, dtype: torch.dtype) -> bool:
        """Return whether these are the model's present weights in `dtype`."""
        sources = _sources(model)
        if dtype != self.dtype or self._versions is None or self._versions != _versions(sources):
            return False
        return all(a is b for a, b in zip(sources, self._sources, strict=True))

    def channel_means(self, x: torch.Tensor, channels: int) -> torch.Tensor:
        """Run the blocks and average each channel's patch tokens.

        Parameters
        ----------
        x
            float32 (N, 1 + C * L, dim): class token first, then the patch tokens channel by channel; overwritten.
        channels
            C.

        Returns
        -------
        torch.Tensor
            float32 (N, C, dim).
        """
        n, tokens, dim = x.shape
        x = x.reshape(n * tokens, dim)

        def mean(y: torch.Tensor) -> torch.Tensor:
            patches = y.view(n, tokens, -1)[:, 1:].unflatten(1, (channels, -1))
            return patches.mean(2, dtype=torch.float32)

        for block in self.blocks[:-1]:
            hidden, attended = block.branches(x, n)
            x += block.hidden_out(hidden)
            x += block.attention_out(attended)
        # the products behind the last block are linear, so they are taken of the means: N * C rows instead of all
        last = self.blocks[-1]
        hidden, attended = last.branches(x, n)
        return mean(x) + last.hidden_out(mean(hidden)) + last.attention_out(mean(attended))


class _Block(NamedTuple):
    """One packed block."""

    hidden_in: _Product
    qkv: _Product
    query_norm: tuple[torch.Tensor, torch.Tensor]
    key_norm: tuple[torch.Tensor, torch.Tensor]
    hidden_out: _Product
    attention_out: _Product
    heads: int
    eps: float
    head_eps: float
    dtype: torch.dtype

    def branches(self, x: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the hidden layer (rows, mlp_dim) and the attention (rows, dim) of the tokens of n images."""
        h = functional.layer_norm(x, x.shape[1:], eps=self.eps).to(self.dtype)
        qkv = self.qkv(h).view(n, -1, 3, self.heads, x.shape[1] // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (n, heads, tokens, head_dim)
        q = functional.layer_norm(q, q.shape[-1:], *self.query_norm, eps=self.head_eps)
        k = functional.layer_norm(k, k.shape[-1:], *self.key_norm, eps=self.head_eps)
        attended = attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return self.hidden_in(h), attended


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return softmax(q k^T) v, all (N, heads, tokens, head_dim); q is scaled already.

    torch's own kernels are the fastest on a GPU and in float32. Its bfloat16 kernel for CPUs spends as long outside the
    products as inside: blocks of queries with plain products and softmax take two thirds of its time.
    """
    if q.dtype != torch.bfloat16 or q.device.type != "cpu":
        return functional.scaled_dot_product_attention(q, k, v, scale=1.0)
    n, heads, tokens, _ = q.shape
    out = torch.empty_like(q)
    scores, weights = q.new_empty(2, heads * min(QUERY_BLOCK, tokens) * tokens)
    for i in range(n):
        keys, values = k[i].transpose(1, 2), v[i].contiguous()
        for queries, target in zip(q[i].split(QUERY_BLOCK, 1), out[i].split(QUERY_BLOCK, 1), strict=True):
            shape = (heads, queries.shape[1], tokens)
            s, w = (buffer[: heads * shape[1] * tokens].view(shape) for buffer in (scores, weights))
            torch.bmm(queries, keys, out=s)
            torch.softmax(s, -1, out=w)
            target.copy_(torch.bmm(w, values))
    return out


class _Product:
    """x W^T + b, and the exact GELU of it if wanted.

    oneDNN lays a bfloat16 weight out anew at every call and knows GELU as the end of a product: laying it out once and
    ending the product so saves a quarter of the time of these products. Both are what torch's own compiler emits
    (torch.ops.mkldnn); a torch without them takes the plain functions.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, dtype: torch.dtype, gelu: bool = False):
        self.weight, self.bias = weight.to(dtype).contiguous(), bias.to(dtype)
        self.gelu = gelu
        self.prepacked = dtype == torch.bfloat16 and weight.device.type == "cpu" and _has_prepacked_products()
        if self.prepacked:
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.prepacked:
            end = ("gelu", [], "none") if self.gelu else ("none", [], "")  # "none": erf, not tanh
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, *end)
        y = functional.linear(x, self.weight, self.bias)
        return functional.gelu(y) if self.gelu else y


def _has_prepacked_products() -> bool:
    names = ("_reorder_linear_weight", "_linear_pointwise")
    return torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in names)


def _pack(block: nn.Module, dtype: torch.dtype, last: bool) -> _Block:
    """Multiply out what is affine in a block; the outputs of the last one stay float32, for their few rows."""
    weights = {name: value.detach().double() for name, value in block.named_parameters()}
    into, norm = weights["in_proj.weight"], weights["in_norm.weight"]
    bias = weights["in_proj.bias"] + into @ weights["in_norm.bias"]
    into = into * norm
    hidden = block.mlp_out_proj.in_features  # the rows of the fused projection are [mlp | q | k | v]
    scale = weights["ls.gamma"]
    out_bias = scale * (weights["mlp_out_proj.bias"] + weights["attn_out_proj.bias"])
    attention_scale = block.q_norm.normalized_shape[0] ** -0.5
    out_dtype = torch.float32 if last else dtype
    return _Block(
        hidden_in=_Product(into[:hidden], bias[:hidden], dtype, gelu=True),
        qkv=_Product(into[hidden:], bias[hidden:], dtype),
        query_norm=tuple((attention_scale * weights[f"q_norm.{name}"]).to(dtype) for name in ("weight", "bias")),
        key_norm=tuple(weights[f"k_norm.{name}"].to(dtype) for name in ("weight", "bias")),
        hidden_out=_Product(scale[:, None] * weights["mlp_out_proj.weight"], out_bias, out_dtype),
        attention_out=_Product(scale[:, None] * weights["attn_out_proj.weight"], torch.zeros_like(out_bias), out_dtype),
        heads=block.num_heads,
        eps=block.in_norm.eps,
        head_eps=block.q_norm.eps,
        dtype=dtype,
    )


def _sources(model: OpenPhenom) -> list[torch.Tensor]:
    return list(model.blocks.parameters())


def _versions(tensors: list[torch.Tensor]) -> list[tuple[int, int]] | None:
    """Return where each tensor's values are and how often they changed; None if torch does not count changes."""
    if any(tensor.is_inference() for tensor in tensors):
        return None
    return [(tensor.data_ptr(), tensor._version) for tensor in tensors]
