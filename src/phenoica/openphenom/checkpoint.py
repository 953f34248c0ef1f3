"""Reading and writing OpenPhenom checkpoints.

Comes in: the published `model.safetensors`, which may be a torch pickle wearing that name, of the encoder
alone or of the full auto-encoder. Goes out: the size of the encoder and its weights under the module's names,
or a readable list of what does not fit. The published key names start with `encoder.vit_backbone.`.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from phenoica.errors import CheckpointError, ConfigError
from phenoica.files import atomic_path
from phenoica.openphenom.decoder import DecoderConfig
from phenoica.openphenom.encoder import MAX_CHANNELS, OpenPhenom, OpenPhenomConfig

if TYPE_CHECKING:
    from safetensors import safe_open

ENCODER_PREFIX = "encoder.vit_backbone."
# the other parts of the auto-encoder, which an embedding does not need
DECODER_PREFIXES = ("decoder.", "decoder_pred.", "encoder_decoder_proj.")
# parts of the decoder module that are published beside `decoder.`, not below it
_BESIDE = ("decoder_pred.", "encoder_decoder_proj.")
# safetensors metadata: shapes do not tell the heads of the decoder's blocks
DECODER_HEADS = "decoder_heads"
WRAPPER_PREFIXES = ("module.", "model.")
SHOWN = 10
NOT_FINITE = "holds NaN or infinite weights; the file cannot be used"

Shape = tuple[int, ...]

# what torch.load raises on files that are damaged or no checkpoint, depending on where the reading ends
UNREADABLE = (
    pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError, KeyError, AttributeError,
    IndexError, TypeError,
)  # fmt: skip


class _Entry(NamedTuple):
    """One tensor of a checkpoint: its shape, and how to read it."""

    shape: Shape
    load: Callable[[], torch.Tensor]


def read(path: str | os.PathLike) -> tuple[OpenPhenomConfig, dict[str, torch.Tensor]]:
    """Read the encoder of a checkpoint.

    Parameters
    ----------
    path
        safetensors, or a torch file (also under the name model.safetensors) that holds the weights directly
        or below `state_dict`; prefixes `module.` and `model.` are taken off. Decoder weights are recognised
        and left out; a safetensors file is read tensor by tensor, so they are not even loaded.

    Returns
    -------
    config
        The size, inferred from the shapes: image size from the length of the positional code, heads from the
        width of the query norm.
    state
        float32 tensors for `OpenPhenom.load_state_dict`, with `mlp_bias` folded into the bias of the fused
        projection.

    Raises
    ------
    CheckpointError
        If the file cannot be read; listing missing, unexpected and mis-shaped keys; or naming weights that
        are no finite floating-point numbers.
    """
    path = Path(path)
    with _open(path) as (entries, _):
        return _extract(entries, path)


def read_decoder(
    path: str | os.PathLike, encoder: OpenPhenomConfig, *, heads: int | None = None
) -> tuple[DecoderConfig, dict[str, torch.Tensor]]:
    """Read the decoder of a checkpoint.

    Parameters
    ----------
    path
        The file, as for `read`.
    encoder
        The size of its encoder.
    heads
        Attention heads of a block, which shapes do not tell; None: those that the file's metadata states (files written
        by `save` do), or those of the published decoder of the same width.

    Returns
    -------
    config
        The size, inferred from the shapes.
    state
        float32 tensors for `Decoder.load_state_dict`.

    Raises
    ------
    CheckpointError
        As `read` does; and if the file holds no decoder, or one whose heads nobody knows.
    """
    path = Path(path)
    with _open(path) as (entries, metadata):
        found = {_module_name(key): entry for key, (_, entry) in _bared(entries, path).items() if _of_decoder(key)}
        if not found:
            raise CheckpointError(f"{path}: holds an encoder alone, no decoder; reconstructing needs the auto-encoder")
        config = _infer_decoder(found, metadata.get(DECODER_HEADS, "") if heads is None else str(heads), path)
        expected = published_decoder_shapes(config, encoder)
        given = {_published_name(key): entry for key, entry in found.items()}
        _compare(path, given, expected)
        return config, {key: _load(entry, _published_name(key), path) for key, entry in found.items()}


def has_decoder(path: str | os.PathLike) -> bool:
    """Return whether a checkpoint holds a decoder.

    Raises
    ------
    CheckpointError
        If the file cannot be read.
    """
    with _open(Path(path)) as (entries, _):
        return any(_of_decoder(_bare(key)) for key in entries)


@contextlib.contextmanager
def _open(path: Path) -> Iterator[tuple[dict[str, _Entry], dict[str, str]]]:
    """Yield the tensors of a file, not yet read, and its metadata."""
    if path.is_dir():
        raise CheckpointError(f"{path}: a folder; name the file with the weights in it, such as model.safetensors")
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; set embed.checkpoint to a checkpoint, or to `random`")
    with path.open("rb") as handle:
        head = handle.read(64)
    if not _is_safetensors(head, path.stat().st_size):
        yield _pickle_entries(path, head), {}
        return
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            yield _safetensors_entries(file), dict(file.metadata() or {})
    except SafetensorError as error:
        raise CheckpointError(f"{path}: damaged safetensors file ({error}); fetch it again") from error


def save(model: OpenPhenom, path: str | os.PathLike, *, dtype: torch.dtype = torch.float32) -> None:
    """Write a model as safetensors under the published key names, atomically; the decoder too, if it has one.

    Parameters
    ----------
    model
        The encoder or auto-encoder.
    path
        The file to write; `read` and `read_decoder` give the same weights back, in float32 bit for bit.
    dtype
        Type of the numbers in the file; float16 halves it and rounds the weights.

    Raises
    ------
    CheckpointError
        If the model has a bias where the published format has no room for one, or weights that are not finite (in
        `dtype`).
    """
    from safetensors.torch import save as to_bytes

    weights = model.state_dict()
    decoder = {key: weights.pop(key) for key in list(weights) if key.startswith("decoder.")}
    state = {ENCODER_PREFIX + key: value for key, value in unfold(weights, model.config).items()}
    state |= {_published_name(key.removeprefix("decoder.")): value for key, value in decoder.items()}
    published = {key: value.detach().to("cpu", dtype).contiguous() for key, value in state.items()}
    broken = [key for key, value in published.items() if not torch.isfinite(value).all()]
    if broken:
        raise CheckpointError(
            f"{path}: not written: {broken[0]} ({len(broken)} in all) holds weights that are not finite in {dtype}"
        )
    metadata = {"format": "pt"}
    if model.decoder is not None:
        metadata[DECODER_HEADS] = str(model.decoder.config.heads)
    content = _steady_header(to_bytes(published, metadata=metadata))
    with atomic_path(path) as temporary, temporary.open("wb") as handle:
        handle.writelines(content)


def _steady_header(data: bytes) -> tuple[bytes, bytes, memoryview]:
    """Return a safetensors file with its metadata in alphabetical order: the library writes it in any order."""
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight bytes
    return len(text).to_bytes(8, "little"), text, memoryview(data)[start:]


def fold(state: Mapping[str, torch.Tensor], config: OpenPhenomConfig) -> dict[str, torch.Tensor]:
    """Turn published names into module names: `mlp_bias` becomes `in_proj.bias` = (3 dim zeros, mlp_bias).

    The output of the fused projection is [mlp | q | k | v]. The timm that the weights were trained with laid
    the bias as (zeros for q, k and v, mlp_bias) over it, so that `mlp_bias` acts on the last 4 dim entries,
    not on the first; timm from 1.0.25 on adds it to the first. A bias over the whole projection says the same
    to both.
    """
    folded = {}
    for key, value in state.items():
        if key.endswith(".mlp_bias"):
            key = key.removesuffix("mlp_bias") + "in_proj.bias"
            value = torch.cat([value.new_zeros(3 * config.dim), value])
        folded[key] = value
    return folded


def unfold(state: Mapping[str, torch.Tensor], config: OpenPhenomConfig) -> dict[str, torch.Tensor]:
    """Undo `fold`: module names become published names."""
    published = {}
    for key, value in state.items():
        if key.endswith(".in_proj.bias"):
            if value[: 3 * config.dim].any():
                raise CheckpointError(
                    f"{key}: its first {3 * config.dim} entries are not 0, and the published format has no "
                    "place for them; keep them at 0 when training"
                )
            key = key.removesuffix("in_proj.bias") + "mlp_bias"
            value = value[3 * config.dim :].clone()
        published[key] = value
    return published


def published_shapes(config: OpenPhenomConfig) -> dict[str, Shape]:
    """Return the published name (without `encoder.vit_backbone.`) and shape of every weight of an encoder."""
    dim, head, mlp = config.dim, config.head_dim, config.mlp_dim
    shapes: dict[str, Shape] = {
        "cls_token": (1, 1, dim),
        "pos_embed": (1, 1 + config.max_channels * config.patches, dim),
        "patch_embed.proj.weight": (dim, 1, config.patch_size, config.patch_size),
        "patch_embed.proj.bias": (dim,),
        "fc_norm.weight": (dim,),
        "fc_norm.bias": (dim,),
    }
    block: dict[str, Shape] = {
        "in_norm.weight": (dim,),
        "in_norm.bias": (dim,),
        "in_proj.weight": (mlp + 3 * dim, dim),
        "mlp_bias": (mlp,),
        "q_norm.weight": (head,),
        "q_norm.bias": (head,),
        "k_norm.weight": (head,),
        "k_norm.bias": (head,),
        "attn_out_proj.weight": (dim, dim),
        "attn_out_proj.bias": (dim,),
        "mlp_out_proj.weight": (dim, mlp),
        "mlp_out_proj.bias": (dim,),
        "ls.gamma": (dim,),
    }
    shapes.update({f"blocks.{i}.{key}": shape for i in range(config.depth) for key, shape in block.items()})
    return shapes


def published_decoder_shapes(config: DecoderConfig, encoder: OpenPhenomConfig) -> dict[str, Shape]:
    """Return the published name and shape of every weight of a decoder."""
    dim, hidden, area = config.dim, 4 * config.dim, encoder.patch_size**2
    mlp: dict[str, Shape] = {
        "mlp.fc1.weight": (hidden, dim),
        "mlp.fc1.bias": (hidden,),
        "mlp.fc2.weight": (dim, hidden),
        "mlp.fc2.bias": (dim,),
    }
    block: dict[str, Shape] = {
        "norm1.weight": (dim,),
        "norm1.bias": (dim,),
        "attn.qkv.weight": (3 * dim, dim),
        "attn.qkv.bias": (3 * dim,),
        "attn.proj.weight": (dim, dim),
        "attn.proj.bias": (dim,),
        "norm2.weight": (dim,),
        "norm2.bias": (dim,),
        **mlp,
    }
    own: dict[str, Shape] = {
        "mask_token": (1, 1, dim),
        "placeholder": (1, 1, dim),
        "pos_embeddings": (1, 1 + config.channels * encoder.patches, dim),
        "cross_attention.q.weight": (dim, dim),
        "cross_attention.kv.weight": (2 * dim, dim),
        "cross_attention.proj.weight": (dim, dim),
        "cross_attention.proj.bias": (dim,),
        **mlp,
    }
    for norm in ("query_norm", "context_norm", "out_norm"):
        own |= {f"{norm}.weight": (dim,), f"{norm}.bias": (dim,)}
    for channel in range(config.channels):
        own[f"modality_tokens.{channel}"] = (1, 1, dim)
        for i in range(config.depth):
            own |= {f"decoders.{channel}.{i}.{key}": shape for key, shape in block.items()}
    return {f"decoder.{key}": shape for key, shape in own.items()} | {
        "decoder_pred.weight": (area, dim),
        "decoder_pred.bias": (area,),
        "encoder_decoder_proj.weight": (dim, encoder.dim),
        "encoder_decoder_proj.bias": (dim,),
    }


def _module_name(published: str) -> str:
    """Turn a published decoder key into the module's: what is beside `decoder.` lies inside it here."""
    return published.removeprefix("decoder.")


def _published_name(key: str) -> str:
    return key if key.startswith(_BESIDE) else f"decoder.{key}"


def _is_safetensors(head: bytes, size: int) -> bool:
    # eight bytes with the length of a JSON header, then the header
    return len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size - 8


def _safetensors_entries(file: safe_open) -> dict[str, _Entry]:
    keys = list(file.keys())
    shapes = [tuple(file.get_slice(key).get_shape()) for key in keys]
    pairs = zip(keys, shapes, strict=True)
    return {key: _Entry(shape, partial(file.get_tensor, key)) for key, shape in pairs}


def _pickle_entries(path: Path, head: bytes) -> dict[str, _Entry]:
    if head.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{path}: a Git LFS pointer, not the weights; run `git lfs pull`")
    if not head.startswith((b"PK\x03\x04", b"\x80")):
        raise CheckpointError(
            f"{path}: neither safetensors nor a torch file (it starts with {head[:16]!r}); "
            "download model.safetensors again"
        )
    try:
        # On the open file: given a path, torch goes by the name and takes a pickle called .safetensors for
        # safetensors.
        with path.open("rb") as handle:
            content = torch.load(handle, map_location="cpu", weights_only=True)
    except UNREADABLE as error:
        raise CheckpointError(
            f"{path}: not a torch file of plain tensors, or damaged ({_reason(error)}); download it again, or save "
            "the model's state_dict alone"
        ) from error
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    # what lies beside the tensors (settings, counters) is no weight; a weight that is no tensor counts as missing
    tensors = (
        {str(k): v for k, v in content.items() if isinstance(v, torch.Tensor)} if isinstance(content, Mapping) else {}
    )
    if not tensors:
        raise CheckpointError(
            f"{path}: holds no named tensors, nor any below `state_dict`; save the model's state_dict"
        )
    return {k: _Entry(tuple(v.shape), lambda v=v: v) for k, v in tensors.items()}


def _reason(error: Exception) -> str:
    """Return the line of torch's long messages that says what is wrong; the others advise to load the file unsafely."""
    text = str(error).strip()
    told = re.search(r"WeightsUnpickler error: (.+)", text)
    if told is None and text.startswith("Weights only load failed"):
        return "it cannot be read as plain tensors"
    return (told[1] if told else (text.splitlines() or [type(error).__name__])[0])[:200]


def _extract(entries: Mapping[str, _Entry], path: Path) -> tuple[OpenPhenomConfig, dict[str, torch.Tensor]]:
    """Take the encoder out of a checkpoint, checked against the size that its shapes imply."""
    encoder: dict[str, _Entry] = {}
    unexpected = []
    for key, (full, entry) in _bared(entries, path).items():
        if key.startswith(ENCODER_PREFIX):
            encoder[key.removeprefix(ENCODER_PREFIX)] = entry
        elif not _of_decoder(key):
            unexpected.append(full)
    config = _infer(encoder, path)
    given = {ENCODER_PREFIX + k: entry for k, entry in encoder.items()}
    _compare(path, given, {ENCODER_PREFIX + k: shape for k, shape in published_shapes(config).items()}, unexpected)
    state = {k: _load(entry, ENCODER_PREFIX + k, path) for k, entry in encoder.items()}
    return config, fold(state, config)


def _bare(key: str) -> str:
    while key.startswith(WRAPPER_PREFIXES):
        key = key.split(".", 1)[1]
    return key


def _bared(entries: Mapping[str, _Entry], path: Path) -> dict[str, tuple[str, _Entry]]:
    """Return the entries by their names without wrapper prefixes, each with its name in the file."""
    bared: dict[str, tuple[str, _Entry]] = {}
    for full, entry in entries.items():
        key = _bare(full)
        if key in bared:
            raise CheckpointError(
                f"{path}: holds {key} twice, as {bared[key][0]} and as {full}; keep the weights of one model"
            )
        bared[key] = full, entry
    return bared


def _of_decoder(key: str) -> bool:
    return key.startswith(DECODER_PREFIXES)


def _compare(
    path: Path, given: Mapping[str, _Entry], expected: Mapping[str, Shape], unexpected: Sequence[str] = ()
) -> None:
    """Refuse a checkpoint whose keys or shapes are not the expected ones."""
    missing = [key for key in expected if key not in given]
    wrong = [
        f"{key}: {entry.shape}, expected {expected[key]}"
        for key, entry in given.items()
        if key in expected and entry.shape != expected[key]
    ]
    _refuse(path, missing, [*unexpected, *(key for key in given if key not in expected)], wrong)


def _refuse(path: Path, missing: list[str], unexpected: list[str], wrong: list[str]) -> None:
    lines = []
    for what, keys in (("missing", missing), ("unexpected", unexpected), ("mis-shaped", wrong)):
        if keys:
            more = f"\n    ... and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
            lines.append(f"  {len(keys)} {what}:\n    " + "\n    ".join(keys[:SHOWN]) + more)
    if lines:
        raise CheckpointError(
            f"{path}: not an OpenPhenom checkpoint; it needs the published keys ({ENCODER_PREFIX}*; of an auto-encoder "
            "decoder* too)\n" + "\n".join(lines)
        )


def _load(entry: _Entry, key: str, path: Path) -> torch.Tensor:
    value = entry.load()
    if not value.is_floating_point():
        raise CheckpointError(f"{path}: {key} is {value.dtype}; weights must be floating-point numbers")
    if value.layout is not torch.strided or value.is_meta:
        raise CheckpointError(f"{path}: {key} is sparse or has no values; save plain tensors")
    value = value.to(torch.float32)
    if not torch.isfinite(value).all():
        raise CheckpointError(f"{path}: {key} {NOT_FINITE}")
    return value


def _infer(encoder: Mapping[str, _Entry], path: Path) -> OpenPhenomConfig:
    """Read the size of the encoder from the shapes; OpenPhenom-S/16 stands in where a key is missing.

    The stand-ins only serve the list of missing keys, which `_extract` raises next.
    """
    default = OpenPhenomConfig()
    dim = _size(encoder, default.dim, ("cls_token", -1), ("patch_embed.proj.bias", 0), ("fc_norm.weight", 0))
    patch = _size(encoder, default.patch_size, ("patch_embed.proj.weight", -1))
    hidden = (("blocks.0.mlp_bias", 0), ("blocks.0.mlp_out_proj.weight", -1))
    mlp = _size(encoder, default.mlp_ratio * dim, *hidden)
    head = _size(encoder, default.head_dim, ("blocks.0.q_norm.weight", 0), ("blocks.0.k_norm.weight", 0))
    numbers = [int(m.group(1)) for key in encoder if (m := re.match(r"blocks\.(\d{1,3})\.", key))]
    if dim % head or mlp % dim:
        raise CheckpointError(
            f"{path}: the shapes contradict each other: tokens {dim} wide, attention heads {head}, "
            f"hidden layer {mlp}; the file is of another model"
        )
    grid, channels = default.grid, default.max_channels
    if "pos_embed" in encoder:
        grid, channels = _position_layout(encoder["pos_embed"].load(), path)
    try:
        return OpenPhenomConfig(
            image_size=grid * patch,
            patch_size=patch,
            dim=dim,
            depth=max(numbers) + 1 if numbers else default.depth,
            heads=dim // head,
            max_channels=channels,
            mlp_ratio=mlp // dim,
        )
    except ConfigError as error:
        raise CheckpointError(f"{path}: the shapes are of no possible model: {error}") from error


def _infer_decoder(found: Mapping[str, _Entry], heads: str, path: Path) -> DecoderConfig:
    """Read the size of a decoder from its shapes; the published one stands in where a key is missing."""
    default = DecoderConfig()
    dim = _size(found, default.dim, ("mask_token", -1), ("decoder_pred.weight", -1))
    numbers = [(int(m[1]), int(m[2])) for key in found if (m := re.match(r"decoders\.(\d{1,3})\.(\d{1,3})\.", key))]
    heads = heads or (str(default.heads) if dim == default.dim else "")
    if not heads.isdigit():
        raise CheckpointError(
            f"{path}: does not say how many attention heads its decoder has, and shapes cannot tell; give "
            "decoder_heads to OpenPhenom.from_checkpoint (a file that the model then saves says it)"
        )
    try:
        return DecoderConfig(
            dim=dim,
            depth=1 + max((block for _, block in numbers), default=default.depth - 1),
            heads=int(heads),
            channels=1 + max((channel for channel, _ in numbers), default=default.channels - 1),
        )
    except ConfigError as error:
        raise CheckpointError(f"{path}: the shapes are of no possible decoder: {error}") from error


def _size(encoder: Mapping[str, _Entry], default: int, *sources: tuple[str, int]) -> int:
    """Return the length of an axis of the first of several weights that is there."""
    for key, axis in sources:
        if key in encoder and encoder[key].shape:
            return max(encoder[key].shape[axis], 1)
    return default


def _position_layout(table: torch.Tensor, path: Path) -> tuple[int, int]:
    """Return (patches along a side, channels) of a positional code: one square block, repeated.

    A length alone can be read in several ways, so the largest number of equal blocks decides.
    """
    if table.ndim == 3 and table.shape[0] == 1 and table.shape[1] > 1:
        if not torch.isfinite(table).all():
            raise CheckpointError(f"{path}: {ENCODER_PREFIX}pos_embed {NOT_FINITE}")
        rows = table[0, 1:]
        for channels in range(MAX_CHANNELS, 0, -1):
            side = round((len(rows) / channels) ** 0.5)
            if side and channels * side**2 == len(rows):
                blocks = rows.reshape(channels, side**2, -1)
                if torch.equal(blocks, blocks[:1].expand_as(blocks)):
                    return side, channels
    raise CheckpointError(
        f"{path}: {ENCODER_PREFIX}pos_embed has the shape {tuple(table.shape)}; expected (1, 1 + channels x "
        f"patches, dim) with the same square block of patches for up to {MAX_CHANNELS} channels"
    )
