"""The solver behind ICA: a quasi-Newton search over rotations that streams whitened data in blocks of rows.

Whitened data and a starting rotation come in, a rotation comes out at which the log-cosh likelihood is stationary. The
data are never copied: every evaluation reads them once, multiplies blocks of rows in float32 and sums in float64, so
memory beyond the data is a few blocks. The method is that of Picard-O (Ablin, Cardoso, Gramfort 2018): L-BFGS on the
orthogonal group, preconditioned by the curvature that independent components would have.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from phenoica.disentangle.ica import ADAPTIVE
from phenoica.disentangle.rotations import nearest_rotation
from phenoica.errors import ConfigError

if TYPE_CHECKING:
    import torch

_LOG_HALVINGS = 6
_BLOCK_VALUES = 1 << 19  # numbers in a block of rows on a CPU: the blocks of one evaluation stay in the cache
_GPU_BLOCK_VALUES = 1 << 26
_MEMORY = 10  # pairs of steps and gradient changes that L-BFGS keeps
_LEAST_CURVATURE = 0.01  # of the preconditioner: between two Gaussian components it is 0 but for noise
_LARGEST_ANGLE = 1.0  # radians that a step may turn in any plane
_SUFFICIENT_DECREASE = 1e-4  # of what the slope promises (Armijo)
_HALVINGS = 8  # of a step that does not lower the loss
_SUBSAMPLE_ROWS = 16384  # rows of the warm start, at least, ...
_SUBSAMPLE_ROWS_PER_COMPONENT = 256  # ... and for each component
_SUBSAMPLE_SHARE = 0.5  # with more than this share of the rows a warm start saves nothing
_SUBSAMPLE_TOLERANCE = 0.5  # of the warm start, in standard errors of a gradient entry on its rows
_LOSS_NOISE = 1e-7  # of the loss a component, from float32 products
_DOUBLE_BELOW = 1e-5  # tolerances that products in float32 cannot be trusted with
_MARGIN = 0.95  # stop this far below the tolerance, so that float32 does not decide


@dataclass(frozen=True)
class Evaluation:
    """The likelihood at one rotation.

    Attributes
    ----------
    log_cosh
        float64 (k,), E[log cosh y_i] + log 2.
    signs
        float64 (k,), s_i: +1 where the contrast seeks a super-, -1 where it seeks a sub-Gaussian component.
    gradient
        float64 (k, k), antisymmetric: of the loss under y -> y + E y with antisymmetric E.
    curvature
        float64 (k, k), of the loss along a turn in each plane if components were independent; at least
        0.01.
    """

    log_cosh: torch.Tensor
    signs: torch.Tensor
    gradient: torch.Tensor
    curvature: torch.Tensor

    def loss(self, signs: torch.Tensor) -> float:
        """sum_i s_i E[log cosh y_i] but for a constant; it falls as components become less Gaussian."""
        return float(signs @ self.log_cosh)

    @property
    def largest(self) -> float:
        """Largest entry of the gradient, what the stopping rule looks at."""
        return float(self.gradient.abs().max())


class Likelihood:
    """The log-cosh likelihood of whitened data as a function of the rotation.

    Parameters
    ----------
    Z
        float32 or float64 (n, k), zero mean and identity covariance; read in place.
    contrast
        "adaptive": s_i is +1 for super- and -1 for sub-Gaussian components, decided anew at every rotation.
        "logcosh": s_i is +1, which seeks super-Gaussian components only.
    device
        Where blocks are multiplied, "cpu" or "cuda". Data stay where they are and go there block by block.
    double
        Multiply in float64 instead of float32.
    """

    def __init__(self, Z: np.ndarray, contrast: str, device: str = "cpu", double: bool = False):
        import torch

        self.data = torch.from_numpy(np.ascontiguousarray(Z))
        self.contrast, self.device = contrast, torch.device(device)
        self.dtype = torch.float64 if double else torch.float32
        self.n, self.k = self.data.shape
        values = _BLOCK_VALUES if self.device.type == "cpu" else _GPU_BLOCK_VALUES
        self.rows = max(1, min(self.n, values // self.k))
        self._buffers = [torch.empty(self.rows, self.k, device=self.device, dtype=self.dtype) for _ in range(3)]
        self.evaluations = 0

    def subsample(self, rows: np.ndarray) -> Likelihood:
        """Return the likelihood of some rows (m,), as a copy of these."""
        import torch

        chosen = self.data[torch.from_numpy(rows)].numpy()
        return Likelihood(chosen, self.contrast, str(self.device), self.dtype == torch.float64)

    def __call__(self, rotation: torch.Tensor) -> Evaluation:
        """Evaluate at a float64 (k, k) rotation, with one pass over the data."""
        import torch

        turn = rotation.to(self.device, self.dtype)
        moments = torch.zeros(self.k, self.k, dtype=torch.float64, device=self.device)
        squares, log_cosh = torch.zeros(2, self.k, dtype=torch.float64, device=self.device)
        for start in range(0, self.n, self.rows):
            block = self.data[start : start + self.rows].to(self.device, self.dtype)
            y, psi, spare = (buffer[: len(block)] for buffer in self._buffers)
            torch.mm(block, turn, out=y)
            torch.tanh(y, out=psi)
            moments += (psi.T @ y).double()
            squares += torch.mul(psi, psi, out=spare).sum(dim=0).double()
            # log cosh y + log 2 = |y| + log(1 + exp(-2 |y|)), which cannot overflow
            log_cosh += torch.abs(y, out=y).sum(dim=0).double()
            log_cosh += _log_product(torch.mul(y, -2.0, out=spare).exp_().add_(1.0)).double()
        self.evaluations += 1
        return self._evaluation(*(total.cpu() / self.n for total in (moments, squares, log_cosh)))

    def _evaluation(self, moments: torch.Tensor, squares: torch.Tensor, log_cosh: torch.Tensor) -> Evaluation:
        import torch

        gain = 1.0 - squares - moments.diagonal()  # E[psi'] - E[psi y]: positive for super-Gaussian components
        signs = torch.ones_like(gain)
        if self.contrast == ADAPTIVE:
            signs[gain < 0] = -1.0
        signed = signs[:, None] * moments
        gain = signs * gain
        curvature = ((gain[:, None] + gain[None, :]) / 2).clamp(min=_LEAST_CURVATURE)
        return Evaluation(log_cosh, signs, (signed - signed.T) / 2, curvature)


def _log_product(factors: torch.Tensor) -> torch.Tensor:
    """Return the sum of the logarithms of each column of factors in (1, 2], which are overwritten.

    Rows are multiplied pairwise six times before the logarithm, by far the dearest step, is taken: 64 factors are at
    most 2^64, within float32.
    """
    rows = len(factors)
    for _ in range(_LOG_HALVINGS):
        half = rows // 2
        factors[:half].mul_(factors[rows - half : rows])
        rows -= half
    return factors[:rows].log().sum(dim=0)


@dataclass(frozen=True)
class Search:
    """What a search over rotations ended with.

    Attributes
    ----------
    rotation
        float64 (k, k), orthogonal; components = Z @ rotation.
    evaluations
        Passes over the data; a pass of the warm start counts as the share of rows it read.
    """

    rotation: np.ndarray
    evaluations: float


def search(
    Z: np.ndarray, start: np.ndarray, *, contrast: str, max_iter: int, tolerance: float, seed: int, device: str = "cpu"
) -> Search:
    """Find a rotation at which the gradient of the log-cosh likelihood is at most `tolerance`.

    The search first runs on a random subsample of rows, until its gradient is below what that subsample can
    tell from 0, and goes on from there with all rows.

    Parameters
    ----------
    Z
        float32 or float64 (n, k), whitened.
    start
        float64 (k, k), orthogonal.
    contrast
        One of `ica.CONTRASTS`.
    max_iter
        Largest number of evaluations on all rows, and of those on the subsample.
    tolerance
        Of the largest gradient entry.
    seed
        Of the rows of the subsample.
    device
        As for `ica.fit_rotation`.

    Returns
    -------
    Search
        The last rotation, converged or not; `ica.fit_rotation` judges it in float64.
    """
    import torch

    likelihood = Likelihood(Z, contrast, _device(device), tolerance < _DOUBLE_BELOW)
    rotation = torch.from_numpy(np.array(start, dtype=np.float64))
    n, spent = likelihood.n, 0.0
    m = max(_SUBSAMPLE_ROWS, _SUBSAMPLE_ROWS_PER_COMPONENT * likelihood.k)
    if m <= _SUBSAMPLE_SHARE * n:
        rows = np.sort(np.random.default_rng([seed, n]).choice(n, m, replace=False))
        small = likelihood.subsample(rows)
        rotation = descend(small, rotation, max_iter, max(tolerance, _SUBSAMPLE_TOLERANCE / np.sqrt(m)))
        spent = small.evaluations * m / n
        del small  # and its rows
    rotation = descend(likelihood, rotation, max_iter, tolerance)
    # products of many small rotations drift by rounding
    return Search(nearest_rotation(rotation.numpy()), likelihood.evaluations + spent)


def _device(name: str) -> str:
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("ica_device is cuda, but there is no GPU here; set disentangle.ica_device to cpu or auto")
    return "cuda" if name == "auto" and torch.cuda.is_available() else "cpu" if name == "auto" else name


def descend(likelihood: Likelihood, rotation: torch.Tensor, max_iter: int, tolerance: float) -> torch.Tensor:
    """Lower the loss by preconditioned L-BFGS on the orthogonal group until the gradient is at most `tolerance`.

    Every accepted step lowers the loss at the signs of its start. Where no length of the quasi-Newton step does,
    its memory is dropped and the preconditioned gradient is followed instead.
    """
    import torch

    here = likelihood(rotation)
    pairs: deque[tuple[torch.Tensor, torch.Tensor, float]] = deque(maxlen=_MEMORY)
    while here.largest > _MARGIN * tolerance and likelihood.evaluations < max_iter:
        direction = _direction(here, pairs)
        found = _shorten(likelihood, rotation, here, direction, max_iter)
        if found is None:
            if not pairs:  # not even the gradient leads down: the loss is flat to rounding
                break
            pairs.clear()
            continue
        step, rotation, there = found
        change = there.gradient - here.gradient
        product = float((step * change).sum())
        if product > 0 and torch.equal(there.signs, here.signs):
            pairs.append((step, change, product))
        here = there
    return rotation


def _shorten(
    likelihood: Likelihood, rotation: torch.Tensor, here: Evaluation, direction: torch.Tensor, max_iter: int
) -> tuple[torch.Tensor, torch.Tensor, Evaluation] | None:
    """Return the first of ever shorter steps that lowers the loss, with where it leads; None where none does."""
    import torch

    length = min(1.0, _LARGEST_ANGLE / float(direction.abs().max()))
    loss, slope = here.loss(here.signs), float((direction * here.gradient).sum())
    for _ in range(_HALVINGS):
        step = length * direction
        turned = rotation @ torch.linalg.matrix_exp(step).T
        there = likelihood(turned)
        gain = there.loss(here.signs) - loss
        # near the end the loss moves less than its rounding, but its slope along the step still says whether it was
        # too long (the approximate Wolfe condition of Hager and Zhang 2005)
        flatter = float((direction * there.gradient).sum()) <= (2 * _SUFFICIENT_DECREASE - 1) * slope
        if gain <= _SUFFICIENT_DECREASE * length * slope or (gain <= _LOSS_NOISE * likelihood.k and flatter):
            return step, turned, there
        if likelihood.evaluations >= max_iter:
            return None
        length /= 2
    return None


def _direction(here: Evaluation, pairs: deque[tuple[torch.Tensor, torch.Tensor, float]]) -> torch.Tensor:
    """Return the L-BFGS direction (two-loop recursion, Nocedal 1980), antisymmetric and leading down."""
    direction, weights = here.gradient.clone(), []
    for step, change, product in reversed(pairs):
        weights.append(float((step * direction).sum()) / product)
        direction -= weights[-1] * change
    direction /= here.curvature
    for (step, change, product), weight in zip(pairs, reversed(weights), strict=True):
        direction += step * (weight - float((change * direction).sum()) / product)
    if float((direction * here.gradient).sum()) <= 0:
        pairs.clear()
        direction = here.gradient / here.curvature
    return -direction
