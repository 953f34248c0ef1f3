"""Wells read a block of rows at a time, in float64, through the steps of the views before.

A matrix of wells in any dtype comes in; blocks of rows, their moments and single columns go out, each computed in
float64, so that no view has to copy the whole matrix. Moments of blocks are joined as by Chan, Golub, LeVeque (1983).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

_BLOCK_NUMBERS = 2**21  # float64 numbers in a block: 16 MiB, which two cores multiply at full speed
_RELATIVE_ZERO = 1e-9  # a spread below this share of the largest value is rounding, not variance

Where = slice | np.ndarray
Step = Callable[[np.ndarray, Where], np.ndarray]


class Rows:
    """Rows of a matrix, each passed through steps when it is read; nothing is stored but the matrix.

    Parameters
    ----------
    X
        (n, d) numbers of any dtype.

    Attributes
    ----------
    shape
        Number of rows, and their width after all steps.
    dtype
        float32 if X is float32, else float64: what a result of the same precision needs.
    """

    def __init__(self, X: np.ndarray):
        self._X, self._index, self._steps = X, None, ()
        self.shape = X.shape
        self.dtype = np.dtype(np.float32 if X.dtype == np.float32 else np.float64)

    def __len__(self) -> int:
        """Return the number of rows."""
        return self.shape[0]

    def then(self, step: Step, width: int) -> Rows:
        """Return the same rows with one more step.

        Parameters
        ----------
        step
            Takes a float64 block (m, d), which it leaves as it is, and the places of its rows in the matrix (a slice
            or an array of integers); returns a float64 (m, width) block.
        width
            Width after the step.
        """
        return self._copy(self._index, (*self._steps, step), (len(self), width))

    def where(self, rows: np.ndarray) -> Rows:
        """Return some of the rows of the matrix, given as a bool mask or as integers."""
        index = np.flatnonzero(rows) if rows.dtype == bool else rows
        index = index if self._index is None else self._index[index]
        return self._copy(index, self._steps, (len(index), self.shape[1]))

    def _copy(self, index: np.ndarray | None, steps: tuple[Step, ...], shape: tuple[int, int]) -> Rows:
        rows = Rows(self._X)
        rows._index, rows._steps, rows.shape = index, steps, shape
        return rows

    def blocks(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield float64 blocks in order, each with its place among these rows."""
        size = max(256, _BLOCK_NUMBERS // max(1, self._X.shape[1], self.shape[1]))
        for start in range(0, len(self), size):
            place = slice(start, min(start + size, len(self)))
            where = place if self._index is None else self._index[place]
            block = np.asarray(self._X[where], dtype=np.float64)
            for step in self._steps:
                block = step(block, where)
            yield place, block

    def array(self, dtype: Any = np.float64) -> np.ndarray:
        """Return all rows as one matrix."""
        out = np.empty(self.shape, dtype=dtype)
        for place, block in self.blocks():
            out[place] = block
        return out

    def columns(self) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield float64 (n, c) columns in order, a few at a time: an eighth of the width, each in one pass over it."""
        width = self.shape[1]
        size = -(-width // 8)
        for start in range(0, width, size):
            chosen = slice(start, min(start + size, width))
            out = np.empty((len(self), chosen.stop - start))
            for place, block in self.blocks():
                out[place] = block[:, chosen]
            yield chosen, out


@dataclass(frozen=True)
class FirstTwoMoments:
    """First and second moments of rows, float64.

    Attributes
    ----------
    n
        Number of rows.
    mean
        (d,).
    squares
        (d,) sums of squared deviations from the mean.
    scatter
        (d, d) sums of products of deviations, or None where not asked for.
    largest
        (d,) largest absolute value.
    """

    n: int
    mean: np.ndarray
    squares: np.ndarray
    scatter: np.ndarray | None
    largest: np.ndarray

    def reciprocal_sd(self, ddof: int = 0) -> np.ndarray:
        """Return 1 / sd of every column, (d,), and 0 for one without variance.

        Multiplying with it gives unit variance, and sets to 0 what cannot be scaled.

        Parameters
        ----------
        ddof
            0 = population, 1 = sample standard deviation.
        """
        sd = np.sqrt(self.squares / (self.n - ddof))
        constant = sd <= _RELATIVE_ZERO * self.largest
        return np.where(constant, 0.0, 1.0 / np.where(constant, 1.0, sd))


def first_two_moments(rows: Rows, scatter: bool = False) -> FirstTwoMoments:
    """Return the moments of rows in one pass; `scatter` asks for all products of columns."""
    width = rows.shape[1]
    n, mean, largest = 0, np.zeros(width), np.zeros(width)
    total = np.zeros((width, width) if scatter else width)
    for _, block in rows.blocks():
        m = len(block)
        centre = block.mean(axis=0)
        largest = np.maximum(largest, np.maximum(block.max(axis=0), -block.min(axis=0)))
        away = block - centre
        shift = centre - mean
        if scatter:
            total += away.T @ away + np.outer(shift, shift) * (n * m / (n + m))
        else:
            total += np.einsum("ij,ij->j", away, away) + shift**2 * (n * m / (n + m))
        mean = mean + shift * (m / (n + m))
        n += m
    return FirstTwoMoments(n, mean, np.diag(total).copy() if scatter else total, total if scatter else None, largest)
