"""A batched solver of L1 logistic regressions: many problems, each along a path of lambda, in torch.

Features, wells and labels of the problems come in, weights and duality gaps go out. A problem minimises
sum_i a_i log(1 + exp(-y_i (w'x_i + b))) + lambda |w|_1 with class-balanced a_i = 1 / (2 n_class) and a free intercept.
The method is proximal Newton (Lee, Sun and Saunders 2014) with working sets and warm starts from the larger lambda:
coordinate descent finds which weights are not zero, a Cholesky step on those makes the last digits cheap. Problems of
similar size are solved together, as batched products of small matrices. Curvature is computed in float32, which costs
at most a further step; objective, gradient and gap, which decide the result, are in float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from phenoica.errors import ScoreError
from phenoica.progress import track

if TYPE_CHECKING:
    import torch

TOLERANCE = 1e-8  # duality gap, relative to the objective, at which a problem is solved
MAX_ITERATIONS = 100  # Newton steps a lambda; a problem usually takes 4 to 8, more means that it is not converged
NO_DIFFERENCE = 1e-12  # lambda_max relative to the largest feature, at or below which class means differ by rounding

_SWEEPS = 6  # of coordinate descent a Newton step
_NEAR = 0.95  # of lambda: a zero weight whose gradient exceeds this enters the working set
_RIDGE = 1e-5  # relative to the curvature's diagonal, so that copies of a feature do not break Cholesky
_MAX_PROBLEMS = 256  # solved together
_MAX_ELEMENTS = 12 * 2**20  # of the features of problems solved together; a chunk takes about 40 bytes each
_PADDING = 0.75  # the smallest problem solved together with one of n wells has this times n
_COMPACT = 0.8  # solved problems leave a batch when at most this share is left


class Solution(NamedTuple):
    """The path of one problem at L lambdas.

    Attributes
    ----------
    lambda_max
        The smallest lambda at which every weight is zero.
    weights
        float64 (L, d).
    intercepts
        float64 (L,).
    gaps
        float64 (L,), duality gap relative to the objective: how far above the optimum it can be at most. The problem is
        solved where it is at most `TOLERANCE`.
    """

    lambda_max: float
    weights: np.ndarray
    intercepts: np.ndarray
    gaps: np.ndarray


class Problem(NamedTuple):
    """Cases against references in one feature matrix.

    Attributes
    ----------
    features
        float64 (n, d); problems may share it. Finite in the wells that are used.
    wells
        int (m,), its rows.
    labels
        bool (m,), true is a case; both classes are present.
    """

    features: np.ndarray
    wells: np.ndarray
    labels: np.ndarray


def solve_paths(
    problems: Sequence[Problem], fractions: Sequence[float], *, device: str = "cpu", title: str | None = None
) -> list[Solution]:
    """Solve every problem at lambda = fraction x its lambda_max for each fraction.

    Parameters
    ----------
    problems
        Of any sizes and widths; the more there are of one size and width, the less each costs.
    fractions
        L numbers in (0, 1), descending.
    device
        cpu or cuda. On a CPU the result is the same to the byte for any number of threads.
    title
        What the progress line says; None for no line.

    Returns
    -------
    list of Solution
        One a problem, in their order: all-zero weights and gap 0 where class means differ by rounding only.

    Raises
    ------
    ScoreError
        If the device is cuda and there is none.
    """
    import torch

    if device != "cpu" and not torch.cuda.is_available():
        raise ScoreError(f"score.device is {device}, and torch finds none; set it to cpu")
    chunks = _chunks(problems)
    found: list[Solution | None] = [None] * len(problems)

    def work(chunk: Sequence[int]) -> None:
        for i, solution in zip(
            chunk, _solve_chunk(_gather([problems[i] for i in chunk], device), fractions), strict=True
        ):
            found[i] = solution

    def shown(done: Iterable[None]) -> None:
        for _ in done if title is None else track(done, len(chunks), title, "chunk"):
            pass

    threads = torch.get_num_threads()
    if device != "cpu" or threads == 1 or len(chunks) == 1:
        shown(map(work, chunks))
        return found
    # small matrices gain little from threads inside an operation: let each thread have its own chunks
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            shown(pool.map(work, chunks))
    finally:
        torch.set_num_threads(threads)
    return found


def _chunks(problems: Sequence[Problem]) -> list[list[int]]:
    """Group problems (positions) of one width and similar size, the largest first."""
    shapes = [(problem.features.shape[1], len(problem.wells)) for problem in problems]
    chunks: list[list[int]] = []
    for i in sorted(range(len(shapes)), key=lambda i: (-shapes[i][0], -shapes[i][1])):
        width, size = shapes[i]
        if chunks:
            (same, largest), count = shapes[chunks[-1][0]], len(chunks[-1])
            fits = count < _MAX_PROBLEMS and (count + 1) * largest * width <= _MAX_ELEMENTS
            if width == same and size >= _PADDING * largest and fits:
                chunks[-1].append(i)
                continue
        chunks.append([i])
    return chunks


@dataclass
class _Batch:
    """B problems side by side, padded to n wells of weight 0. Features are centred and divided by one number each."""

    X: torch.Tensor  # float64 (B, n, d)
    X32: torch.Tensor  # float32 (B, n, d)
    sign: torch.Tensor  # (B, n) 1 for a case, -1 for a reference
    balance: torch.Tensor  # (B, n) a_i
    centre: torch.Tensor  # (B, d)
    scale: torch.Tensor  # (B,)

    def take(self, which: torch.Tensor) -> _Batch:
        return _Batch(*(getattr(self, field.name)[which] for field in fields(self)))


@dataclass
class _State:
    """Where the problems of a batch stand: weights (B, d), intercept (B,) and w'x of every well (B, n)."""

    weights: torch.Tensor
    intercept: torch.Tensor
    decision: torch.Tensor

    def take(self, which: torch.Tensor) -> _State:
        return _State(self.weights[which], self.intercept[which], self.decision[which])


@dataclass
class _Point:
    """What a state is worth: objective and relative duality gap (B,), and what a Newton step needs."""

    objective: torch.Tensor
    gap: torch.Tensor
    gradient: torch.Tensor  # (B, d) of the loss
    curvature: torch.Tensor  # (B, n) of the loss in each decision

    def take(self, which: torch.Tensor) -> _Point:
        return _Point(*(getattr(self, field.name)[which] for field in fields(self)))


def _gather(problems: Sequence[Problem], device: str) -> _Batch:
    """Copy the problems' wells into one padded block."""
    import torch

    count, size = len(problems), max(len(problem.wells) for problem in problems)
    width = problems[0].features.shape[1]
    X, sign, balance = np.zeros((count, size, width)), np.ones((count, size)), np.zeros((count, size))
    centre, scale = np.zeros((count, width)), np.ones(count)
    for i, (features, wells, labels) in enumerate(problems):
        n, n_case = len(wells), int(labels.sum())
        block = X[i, :n]
        np.take(features, wells, axis=0, out=block)
        centre[i] = block.mean(axis=0)
        block -= centre[i]
        scale[i] = np.abs(block).max() or 1.0
        block /= scale[i]
        sign[i, :n] = np.where(labels, 1.0, -1.0)
        balance[i, :n] = np.where(labels, 0.5 / n_case, 0.5 / (n - n_case))
    X, sign, balance, centre, scale = (torch.from_numpy(a).to(device) for a in (X, sign, balance, centre, scale))
    return _Batch(X, X.float(), sign, balance, centre, scale)


def _solve_chunk(batch: _Batch, fractions: Sequence[float]) -> list[Solution]:
    """Follow the path of every problem of a batch."""
    import torch

    count, wells, width = batch.X.shape
    largest = 0.5 * _gradient(batch, batch.balance).abs().amax(1)  # at w = 0, b = 0 every probability is a half
    # features are in units of their largest one; undone, it is the largest one that a difference is relative to
    differ = largest * batch.scale > NO_DIFFERENCE * torch.maximum(
        batch.scale + batch.centre.abs().amax(1), torch.ones_like(batch.scale)
    )
    weights = torch.zeros(count, len(fractions), width, dtype=torch.float64, device=batch.X.device)
    intercepts, gaps = weights.new_zeros(count, len(fractions)), weights.new_zeros(count, len(fractions))
    which = differ.nonzero()[:, 0]
    if len(which):
        part, penalties = batch.take(which), largest[which]
        zeros = weights.new_zeros
        state = _State(zeros(len(which), width), zeros(len(which)), zeros(len(which), wells))
        for k, fraction in enumerate(fractions):
            gaps[which, k] = _newton(part, state, fraction * penalties)
            weights[which, k] = state.weights / part.scale[:, None]
            intercepts[which, k] = state.intercept - (weights[which, k] * part.centre).sum(1)
    parts = [a.cpu().numpy() for a in (largest * batch.scale, weights, intercepts, gaps)]
    return [Solution(float(parts[0][i]), *(part[i] for part in parts[1:])) for i in range(count)]


def _newton(batch: _Batch, state: _State, penalty: torch.Tensor) -> torch.Tensor:
    """Bring `state`, in place, to the optimum for `penalty` (B,); return the relative duality gaps (B,)."""
    import torch

    gaps = torch.full_like(penalty, torch.inf)
    left = torch.arange(len(penalty), device=penalty.device)  # problems of the batch that `now` holds
    now = state.take(left)
    for iteration in range(MAX_ITERATIONS + 1):
        point = _evaluate(batch, now, penalty)
        better = point.gap < gaps[left]
        for name in (field.name for field in fields(_State)):
            getattr(state, name)[left[better]] = getattr(now, name)[better]
        gaps[left[better]] = point.gap[better]
        open_ = gaps[left] > TOLERANCE
        if iteration == MAX_ITERATIONS or not bool(open_.any()):
            break
        if int(open_.sum()) <= _COMPACT * len(left):
            which = open_.nonzero()[:, 0]
            batch, now, point = batch.take(which), now.take(which), point.take(which)
            penalty, left = penalty[which], left[which]
        now = _line_search(batch, now, point, penalty, *_direction(batch, now, point, penalty))
    return gaps


def _gradient(batch: _Batch, pull: torch.Tensor) -> torch.Tensor:
    """Return the gradient (B, d) of the loss in the weights, given each well's -d loss / d margin (B, n)."""
    import torch

    return -torch.bmm(batch.X.transpose(1, 2), (batch.sign * pull)[:, :, None])[:, :, 0]


def _objective(batch: _Batch, decision: torch.Tensor, weights: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    import torch

    loss = torch.nn.functional.softplus(-batch.sign * decision)
    return (batch.balance * loss).sum(1) + penalty * weights.abs().sum(1)


def _evaluate(batch: _Batch, state: _State, penalty: torch.Tensor) -> _Point:
    """Improve the intercept of `state`, in place, by two Newton steps, and measure how far from the optimum it is.

    Any pulls u_i in [0, a_i] with sum_i y_i u_i = 0 and |sum_i y_i u_i x_i| <= lambda bound the optimum from below by
    sum_i a_i H(u_i / a_i), H the entropy (Koh, Kim and Boyd 2007). Those of the state are scaled to be such.
    """
    import torch

    for _ in range(2):
        wrong = torch.sigmoid(-batch.sign * (state.decision + state.intercept[:, None]))
        pull = batch.balance * wrong
        curvature = (pull * (1 - wrong)).sum(1).clamp_min(1e-300)
        state.intercept += ((batch.sign * pull).sum(1) / curvature).clamp(-2, 2)
    decision = state.decision + state.intercept[:, None]
    wrong = torch.sigmoid(-batch.sign * decision)
    pull = batch.balance * wrong
    case = batch.sign > 0
    sides = [torch.where(side, pull, 0.0).sum(1).clamp_min(1e-300) for side in (case, ~case)]
    least = torch.minimum(*sides)
    even = torch.where(case, (least / sides[0])[:, None], (least / sides[1])[:, None])
    gradient = _gradient(batch, pull * even)
    shrink = (penalty / gradient.abs().amax(1).clamp_min(1e-300)).clamp_max(1.0)
    share = wrong * even * shrink[:, None]
    bound = -(batch.balance * (torch.special.xlogy(share, share) + torch.special.xlogy(1 - share, 1 - share))).sum(1)
    objective = _objective(batch, decision, state.weights, penalty)
    return _Point(objective, (objective - bound) / objective, gradient, pull * (1 - wrong))


def _direction(
    batch: _Batch, state: _State, point: _Point, penalty: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the change of weights (B, d), intercept (B,) and decisions (B, n) that one Newton step asks for."""
    import torch

    wanted = (state.weights != 0) | (point.gradient.abs() > _NEAR * penalty[:, None])
    width = min(-(-max(1, int(wanted.sum(1).max())) // 8) * 8, wanted.shape[1])
    # the wanted ones first, in their order; the rest of the smaller sets is padding that stays at zero
    columns = torch.argsort(wanted.byte(), dim=1, descending=True, stable=True)[:, :width]
    free = torch.gather(wanted, 1, columns)
    part = torch.gather(batch.X32, 2, columns[:, None, :].expand(-1, batch.X32.shape[1], -1))
    curvature = point.curvature.float()
    weighted = part * curvature[:, :, None]
    hessian = torch.bmm(part.transpose(1, 2), weighted).double()
    mixed, of_intercept = weighted.sum(1).double(), curvature.sum(1).double().clamp_min(1e-30)
    hessian -= mixed[:, :, None] * (mixed / of_intercept[:, None])[:, None, :]  # the intercept follows freely
    diagonal = torch.diagonal(hessian, dim1=1, dim2=2)
    diagonal *= 1 + _RIDGE
    diagonal += 1e-30
    start = torch.gather(state.weights, 1, columns)
    found = _quadratic(hessian, torch.gather(point.gradient, 1, columns), start, penalty, free)
    change = torch.zeros_like(state.weights).scatter(1, columns, found - start)
    return (
        change,
        -(mixed * (found - start)).sum(1) / of_intercept,
        torch.bmm(batch.X, change[:, :, None])[:, :, 0],
    )


def _quadratic(
    hessian: torch.Tensor, gradient: torch.Tensor, start: torch.Tensor, penalty: torch.Tensor, free: torch.Tensor
) -> torch.Tensor:
    """Approximately minimise g'(z - s) + (z - s)'H(z - s) / 2 + lambda |z|_1 over z (B, k), from s = `start`.

    Coordinates that are not `free` (B, k) stay at zero. Every step lowers the value.
    """
    import torch

    # coordinate descent with the batch last, so that a step is a few operations on contiguous memory
    rows = hessian.permute(1, 2, 0).contiguous()
    slope, z = (a.T.clone(memory_format=torch.contiguous_format) for a in (gradient, start))  # copies: changed below
    inverse = torch.where(free, 1 / torch.diagonal(hessian, dim1=1, dim2=2), 0.0).T.contiguous()
    limit = penalty * inverse
    coordinates = list(zip(*(a.unbind(0) for a in (rows, z, slope, inverse, limit, -limit)), strict=True))
    for _ in range(_SWEEPS):
        for row, at, its_slope, its_inverse, high, low in coordinates:
            target = torch.addcmul(at, its_slope, its_inverse, value=-1)
            target -= torch.clamp(target, low, high)
            slope.addcmul_(row, target - at)
            at.copy_(target)
    z, slope = z.T.contiguous(), slope.T.contiguous()
    # then the exact minimum with these signs, or as far towards it as the first weight that reaches zero
    active, signs = z != 0, torch.sign(z)
    masked = hessian * active[:, :, None] * active[:, None, :]
    torch.diagonal(masked, dim1=1, dim2=2).add_((~active).double())
    factor, failed = torch.linalg.cholesky_ex(masked)
    right = torch.where(active, -(slope + penalty[:, None] * signs), 0.0)
    step = torch.cholesky_solve(right[:, :, None], factor)[:, :, 0]
    step = torch.where((failed == 0)[:, None] & torch.isfinite(step), step, 0.0)
    reach = torch.where(active & (step * signs < 0), -z / step, torch.inf)
    share = reach.amin(1, keepdim=True).clamp_max(1.0)
    return torch.where(reach <= share, 0.0, z + share * step)


def _line_search(
    batch: _Batch, state: _State, point: _Point, penalty: torch.Tensor,
    change: torch.Tensor, intercept: torch.Tensor, decision: torch.Tensor,
) -> _State:  # fmt: skip
    """Return the state after the largest of the steps 1, 1/2, 1/4, ... that lowers the objective enough (Armijo)."""
    import torch

    weights = state.weights
    slope = (point.gradient * change).sum(1) + penalty * ((weights + change).abs().sum(1) - weights.abs().sum(1))
    size = torch.ones_like(penalty)
    for _ in range(30):
        new = _State(
            weights + size[:, None] * change,
            state.intercept + size * intercept,
            state.decision + size[:, None] * decision,
        )
        value = _objective(batch, new.decision + new.intercept[:, None], new.weights, penalty)
        enough = value <= point.objective * (1 + 1e-14) + 1e-4 * size * slope.clamp_max(0)
        if bool(enough.all()):
            break
        size = torch.where(enough, size, 0.5 * size)
    return new
