"""Pre-training of the masked auto-encoder (He et al. 2022; Kraus et al. 2024).

Comes in: tiles of the experiments named for pre-training, and a recipe. Goes out: a checkpoint under the published key
names, the loss curve and the recipe. Whatever is random at a step follows from the seed and the step's number, so a
run that was killed goes on from its last saved state with the same curve.
"""

from __future__ import annotations

import csv
import dataclasses
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from phenoica import files
from phenoica.errors import CheckpointError, ConfigError, FitError
from phenoica.openphenom import ENCODER_FILE, LOG_FILE, PICTURES_FILE, RECIPE_FILE, checkpoint
from phenoica.openphenom.decoder import Decoder, DecoderConfig, Mask, fourier_loss, pixel_loss, random_mask
from phenoica.openphenom.encoder import OpenPhenom, OpenPhenomConfig, unpatch
from phenoica.progress import Progress

OPTIMIZERS = {"lion": {"betas": (0.9, 0.95)}, "adamw": {"betas": (0.9, 0.95)}}
LOG_COLUMNS = (
    "step", "loss", "pixel_loss", "fourier_loss", "validation_loss", "learning_rate", "gradient_norm",
)  # fmt: skip
STATE_FILE = "state.pt"
PICTURES = 2  # tiles
_STREAM_MASK, _STREAM_VALIDATION = 1, 2
TOKEN_SD = 0.02  # of freshly drawn tokens, as in He et al. 2022


class Tiles(Protocol):
    """Where tiles come from (`training_images.TrainingImages`)."""

    def batch(self, step: int, size: int) -> np.ndarray:
        """Return uint8 (size, C, tile, tile) of a step."""

    def validation_tiles(self) -> np.ndarray:
        """Return uint8 (n, C, tile, tile)."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How an encoder is trained.

    Parameters
    ----------
    steps
        Steps in all; training is budgeted in steps, never in seconds.
    batch_tiles
        Tiles a step.
    optimizer
        lion (Chen et al. 2023) or adamw, as timm builds them.
    learning_rate
        The highest one; it rises over `warmup_steps` from 0 and falls to 0 along a cosine.
    weight_decay
        Of matrices; biases, norms and tokens (class, mask, channel) have none.
    warmup_steps
        Steps of the rise.
    mask_ratio
        Share of hidden tokens.
    fourier_weight
        Weight w of the loss (1 - w) * pixel loss + w * Fourier loss; 0 leaves the transform out.
    clip_norm
        The gradient's norm is cut to this.
    validate_every
        Steps between two passes over the validation tiles.
    save_every
        Steps between two saved states.
    log_every
        Steps a row of the log averages over.
    seed
        Of weights and masks.

    Raises
    ------
    ConfigError
        Naming the value that does not fit.
    """

    steps: int
    batch_tiles: int = 64
    optimizer: str = "lion"
    learning_rate: float = 3e-4
    weight_decay: float = 0.05
    warmup_steps: int = 100
    mask_ratio: float = 0.75
    fourier_weight: float = 0.01
    clip_norm: float = 1.0
    validate_every: int = 250
    save_every: int = 500
    log_every: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the values."""
        if self.optimizer not in OPTIMIZERS:
            raise ConfigError(f"pretrain.optimizer is {self.optimizer!r}; it must be one of {', '.join(OPTIMIZERS)}")
        for name in ("steps", "batch_tiles", "validate_every", "save_every", "log_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"pretrain.{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.warmup_steps < self.steps:
            raise ConfigError(
                f"pretrain.warmup_steps is {self.warmup_steps}; it must be below pretrain.steps ({self.steps})"
            )
        if not 0 <= self.fourier_weight <= 1:
            raise ConfigError(f"pretrain.fourier_weight is {self.fourier_weight}; it must lie between 0 and 1")
        if not 0 < self.mask_ratio < 1:
            raise ConfigError(f"pretrain.mask_ratio is {self.mask_ratio}; it must lie between 0 and 1")
        for name in ("learning_rate", "clip_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"pretrain.{name} is {getattr(self, name)}; it must be a number above 0")
        for name in ("weight_decay", "seed"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"pretrain.{name} is {getattr(self, name)}; it must be a number from 0 on")


def new_auto_encoder(encoder: OpenPhenomConfig, decoder: DecoderConfig, seed: int, device: str = "cpu") -> OpenPhenom:
    """Return an untrained auto-encoder.

    The encoder starts from `OpenPhenom.random`; the decoder's matrices from the uniform distribution of Glorot and
    Bengio 2010, its tokens from a normal one of standard deviation 0.02, biases from 0 (as in He et al. 2022).
    """
    model = OpenPhenom.random(encoder, seed, device)
    module = model.add_decoder(decoder)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith(("token", "placeholder")) or "modality_tokens" in name:
                value = TOKEN_SD * torch.randn(parameter.shape, generator=generator)
            elif parameter.ndim == 1:
                value = torch.full(parameter.shape, float("norm" in name and name.endswith("weight")))
            else:
                bound = math.sqrt(6 / sum(parameter.shape))
                value = bound * (2 * torch.rand(parameter.shape, generator=generator) - 1)
            parameter.copy_(value)
    return model


class Trainer:
    """A model, its optimizer and its schedule.

    Parameters
    ----------
    model
        An auto-encoder (`new_auto_encoder`); it is trained in place.
    recipe
        How.
    mixed
        Matrix products in bfloat16, everything that is summed up in float32.
    """

    def __init__(self, model: OpenPhenom, recipe: Recipe, mixed: bool = False):
        from timm.optim import create_optimizer_v2
        from timm.scheduler import CosineLRScheduler

        self.model, self.recipe, self.mixed = model, recipe, mixed
        self.step = 0
        self.log: list[dict[str, float | int | None]] = []
        _freeze_unpublished_biases(model)
        self.optimizer = create_optimizer_v2(
            model, opt=recipe.optimizer, lr=recipe.learning_rate, weight_decay=recipe.weight_decay,
            **OPTIMIZERS[recipe.optimizer],
        )  # fmt: skip
        # steps are counted from 1 here, and the rate reaches 0 one step after the last
        self.schedule = CosineLRScheduler(
            self.optimizer, t_initial=recipe.steps + 1, lr_min=0.0, warmup_t=recipe.warmup_steps, warmup_lr_init=0.0,
            t_in_epochs=False,
        )  # fmt: skip

    def train_step(self, tiles: np.ndarray) -> dict[str, float]:
        """Take one step on uint8 (n, C, tile, tile); return its losses, learning rate and gradient norm.

        Raises
        ------
        FitError
            If the loss or the gradient is not finite; the weights are those of the step before.
        """
        recipe, model = self.recipe, self.model
        # the rate of step 0 is that of the first step of the rise, not 0
        self.schedule.step_update(self.step + 1)
        model.train()
        self.optimizer.zero_grad(set_to_none=True)
        loss, parts = self._loss(tiles, [recipe.seed, _STREAM_MASK, self.step])
        if not torch.isfinite(loss):
            raise FitError(
                f"pre-training: the loss at step {self.step} is {float(loss.detach())}; lower pretrain.learning_rate"
            )
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
        if not torch.isfinite(norm):
            raise FitError(
                f"pre-training: the gradient at step {self.step} is not finite; lower pretrain.learning_rate. The last "
                "saved state is whole"
            )
        self.optimizer.step()
        self.step += 1
        rate = self.optimizer.param_groups[0]["lr"]
        return {**parts, "learning_rate": rate, "gradient_norm": float(norm)}

    @torch.no_grad()
    def validate(self, tiles: np.ndarray) -> float:
        """Return the mean loss over tiles with masks that are the same at every call."""
        self.model.eval()
        size = self.recipe.batch_tiles
        parts = [(tiles[i : i + size], i) for i in range(0, len(tiles), size)]
        losses = [
            float(self._loss(part, [self.recipe.seed, _STREAM_VALIDATION, start])[0]) * len(part)
            for part, start in parts
        ]
        return sum(losses) / len(tiles)

    @torch.no_grad()
    def pictures(self, tiles: np.ndarray) -> dict[str, np.ndarray]:
        """Return reconstructions of tiles, under the masks of validation.

        Returns
        -------
        dict
            `target` and `predicted`, float16 (n, C, H, W) standardised pixels; `hidden`, bool (n, C, grid, grid).
        """
        self.model.eval()
        channels, grid = tiles.shape[1], self.model.config.grid
        _, predicted, patches, mask = self._pass(tiles, [self.recipe.seed, _STREAM_VALIDATION, 0])
        shape = (len(tiles), channels, grid, grid)
        return {
            "target": unpatch(patches, channels).cpu().numpy().astype(np.float16),
            "predicted": unpatch(predicted, channels).cpu().numpy().astype(np.float16),
            "hidden": mask.hidden.cpu().numpy().reshape(shape),
        }

    def _pass(self, tiles: np.ndarray, stream: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Mask]:
        """Return pixel loss, predicted pixels, true pixels and mask of tiles."""
        images = torch.from_numpy(np.ascontiguousarray(tiles)).to(self.model.device)
        patches = self.model.standardised_patches(images)
        noise = np.random.default_rng(list(stream)).random(patches.shape[:2], dtype=np.float32)
        mask = random_mask(torch.from_numpy(noise).to(self.model.device), self.recipe.mask_ratio)
        predicted = self._predict(patches, mask, images.shape[1])
        return pixel_loss(predicted, patches, mask.hidden), predicted, patches, mask

    def _loss(self, tiles: np.ndarray, stream: Sequence[int]) -> tuple[torch.Tensor, dict[str, float]]:
        recipe = self.recipe
        pixel, predicted, patches, mask = self._pass(tiles, stream)
        if recipe.fourier_weight == 0:
            return pixel, {"loss": float(pixel.detach()), "pixel_loss": float(pixel.detach()), "fourier_loss": None}
        fourier = fourier_loss(predicted, patches, mask.hidden)
        loss = (1 - recipe.fourier_weight) * pixel + recipe.fourier_weight * fourier
        values = torch.stack([loss, pixel, fourier]).tolist()
        return loss, dict(zip(("loss", "pixel_loss", "fourier_loss"), values, strict=True))

    def _predict(self, patches: torch.Tensor, mask: Mask, channels: int) -> torch.Tensor:
        decoder: Decoder = self.model.decoder
        with torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.mixed):
            latent = self.model.masked_pass(patches, mask)
            return decoder(latent, mask.order, channels).float()

    def state(self) -> dict[str, Any]:
        """Return everything that the next step depends on."""
        return {
            "step": self.step,
            "log": self.log,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a state of `state`."""
        self.step, self.log = state["step"], list(state["log"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def _freeze_unpublished_biases(model: OpenPhenom) -> None:
    """Keep the first 3 dim biases of each fused projection at 0: the published format has no place for them."""
    width = 3 * model.config.dim

    def published_part(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        gradient[:width] = 0
        return gradient

    for block in model.blocks:
        block.in_proj.bias.register_hook(published_part)


def pretrain(
    tiles: Tiles, encoder: OpenPhenomConfig, decoder: DecoderConfig, recipe: Recipe, out_dir: str | os.PathLike, *,
    device: str = "cpu", mixed: bool = False, stored_as: str = "float32", about: Mapping[str, Any] | None = None,
    stop_after: int | None = None,
) -> OpenPhenom:  # fmt: skip
    """Train an auto-encoder and write it with its curve and recipe.

    A state that an earlier, killed run of the same recipe left in `out_dir` is taken up. On a CPU the same seed and
    number of threads give the same weights.

    Parameters
    ----------
    tiles
        The images.
    encoder, decoder
        Sizes.
    recipe
        How to train.
    out_dir
        Folder; receives encoder.safetensors (published key names, decoder included), log.csv (`LOG_COLUMNS`; `step` is
        the last one of a row), reconstructions.npz (`Trainer.pictures` of validation tiles), recipe.json (sizes,
        recipe, `about`, threads, versions) and, while training, state.pt.
    device
        cpu or cuda.
    mixed
        Matrix products in bfloat16.
    stored_as
        float32 or float16: the numbers in encoder.safetensors; float16 halves the file and rounds the weights.
    about
        What else the recipe should say, such as the experiments.
    stop_after
        Stop, with a saved state, after this many steps of this call.

    Returns
    -------
    OpenPhenom
        The trained model in eval mode.

    Raises
    ------
    CheckpointError
        If the state in `out_dir` is of another recipe.
    FitError
        If the loss is not finite.
    """
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    description = {
        "encoder": dataclasses.asdict(encoder),
        "decoder": dataclasses.asdict(decoder),
        "recipe": dataclasses.asdict(recipe),
        "mixed_precision": mixed,
        "device": device,
        "stored_as": stored_as,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        **(about or {}),
    }
    trainer = Trainer(new_auto_encoder(encoder, decoder, recipe.seed, device), recipe, mixed)
    _resume(trainer, out_dir / STATE_FILE, description)
    validation = tiles.validation_tiles()
    last = recipe.steps if stop_after is None else min(recipe.steps, trainer.step + stop_after)
    with Progress(recipe.steps, "pre-training", "step") as progress:
        progress.update(trainer.step)
        while trainer.step < last:
            row: dict[str, Any] = {"step": trainer.step, "validation_loss": None}
            row |= trainer.train_step(tiles.batch(trainer.step, recipe.batch_tiles))
            if trainer.step % recipe.validate_every == 0 or trainer.step == recipe.steps:
                row["validation_loss"] = trainer.validate(validation)
            trainer.log.append(row)
            if trainer.step % recipe.save_every == 0 or trainer.step == last:
                _save_state(trainer, out_dir / STATE_FILE, description)
            progress.update()
    trainer.model.eval()
    if trainer.step == recipe.steps:
        _write_result(trainer, out_dir, description, validation)
    return trainer.model


def _resume(trainer: Trainer, path: Path, description: Mapping[str, Any]) -> None:
    if not path.is_file():
        return
    try:
        with path.open("rb") as handle:
            state = torch.load(handle, map_location=trainer.model.device, weights_only=True)
    except checkpoint.UNREADABLE as error:
        raise CheckpointError(f"{path}: damaged ({type(error).__name__}); delete it to start anew") from error
    if state["description"] != files.sha256_of_json(description):
        raise CheckpointError(
            f"{path}: the state of another recipe, another number of threads or other images; delete it to start anew, "
            "or go back to the recipe it was made with"
        )
    trainer.restore(state)
    print(f"pre-training goes on at step {trainer.step}", file=sys.stderr)


def _save_state(trainer: Trainer, path: Path, description: Mapping[str, Any]) -> None:
    with files.atomic_path(path) as temporary, temporary.open("wb") as handle:
        torch.save({**trainer.state(), "description": files.sha256_of_json(description)}, handle)


def _averaged(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the last step of some rows with the means of their numbers; a column without any number stays empty."""
    means = {}
    for column in LOG_COLUMNS[1:]:
        values = [row[column] for row in rows if row[column] is not None]
        means[column] = sum(values) / len(values) if values else None
    return {"step": rows[-1]["step"], **means}


def _write_result(trainer: Trainer, out_dir: Path, description: Mapping[str, Any], validation: np.ndarray) -> None:
    with files.atomic_path(out_dir / LOG_FILE) as temporary, temporary.open("w", newline="") as handle:
        writer = csv.DictWriter(handle, LOG_COLUMNS)
        writer.writeheader()
        for start in range(0, len(trainer.log), trainer.recipe.log_every):
            row = _averaged(trainer.log[start : start + trainer.recipe.log_every])
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
    checkpoint.save(trainer.model, out_dir / ENCODER_FILE, dtype=getattr(torch, description["stored_as"]))
    with files.atomic_path(out_dir / PICTURES_FILE) as temporary:
        np.savez_compressed(temporary, **trainer.pictures(validation[:PICTURES]))
    described = {**description, "sha256": files.sha256(out_dir / ENCODER_FILE)}
    files.write_json(out_dir / RECIPE_FILE, described)
    (out_dir / STATE_FILE).unlink(missing_ok=True)
