"""How many components stand out of noise: parallel analysis (Horn 1965), and what each width would cost.

The variances of a pca fit and of its features come in. Noise is Gaussian data of as many wells whose features have the
same variances and no correlation; its covariance matrices are drawn directly (Wishart, Bartlett 1933), so that no such
data have to be made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from phenoica.disentangle.ica import WELLS_PER_SQUARED_COMPONENT, fit_rotation
from phenoica.errors import FitError

if TYPE_CHECKING:
    from phenoica.disentangle.blocks import Rows
    from phenoica.disentangle.linear_views import Pca

DRAWS = 40
QUANTILE = 0.95
ALL = "all"


def noise_variances(column_variance: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Return what the variance along each principal component is where features do not correlate.

    The 95th percentile, rank by rank, over 40 draws of Gaussian data (n, d).

    Parameters
    ----------
    column_variance
        (d,) population variances of the features.
    n
        Number of wells.
    seed
        Seed of the draws.

    Returns
    -------
    ndarray
        float64 (min(d, n - 1),), decreasing.
    """
    d, degrees = len(column_variance), n - 1
    rank, sd = min(d, degrees), np.sqrt(column_variance)
    rng = np.random.default_rng([seed, d, n])
    found = np.empty((DRAWS, rank))
    for draw in range(DRAWS):
        # the triangular factor of a Wishart matrix with n - 1 degrees of freedom; d rows, at most n - 1 columns
        factor = np.tril(rng.standard_normal((d, rank)), -1)
        factor[np.arange(rank), np.arange(rank)] = np.sqrt(rng.chisquare(degrees - np.arange(rank)))
        factor *= sd[:, None]
        gram = factor.T @ factor if rank < d else factor @ factor.T
        found[draw] = np.linalg.eigvalsh(gram)[::-1] / n
    return np.clip(np.quantile(found, QUANTILE, axis=0), 0.0, None)


def parallel_width(variance: np.ndarray, column_variance: np.ndarray, n: int, seed: int) -> tuple[int, tuple[str, ...]]:
    """Return the number of leading components whose variance is above that of noise, and what to say about it.

    Parameters
    ----------
    variance
        (r,) population variances along all principal components, decreasing.
    column_variance, n, seed
        As for `noise_variances`.

    Returns
    -------
    k : int
        Components before the first one that does not exceed `noise_variances`. Errs to too few, never to too many: the
        variance of strong components counts as noise in their features. It is not capped; under 10 k^2 wells a warning
        says so.
    said : tuple of str
        Warnings.

    Raises
    ------
    FitError
        If no component exceeds noise.
    """
    noise = noise_variances(column_variance, n, seed)[: len(variance)]
    above = variance[: len(noise)] > noise
    k = len(above) if above.all() else int(above.argmin())
    if not k:
        raise FitError(
            "n_components auto: no principal component of the training wells has more variance than noise of as many "
            "wells would show; set disentangle.n_components to a number, or look at features of different units "
            "('raw + pca' standardises them)"
        )
    if enough_wells(n, k):
        return k, ()
    return k, (
        f"n_components auto: parallel analysis gives {k}, and {n} wells are fewer than 10 k^2 = "
        f"{WELLS_PER_SQUARED_COMPONENT * k**2}; independent components may not be reproducible; set "
        "disentangle.n_components to a smaller number or add wells",
    )


def enough_wells(n: int, k: int) -> bool:
    """Return whether n wells are at least 10 k^2."""
    return n >= WELLS_PER_SQUARED_COMPONENT * k**2


def width_table(
    full: Pca, rows: Rows, widths: Sequence[int | str], *, seed: int, max_iter: int, tolerance: float
) -> pd.DataFrame:
    """Fit ICA at several widths of one pca and say what each width keeps, amplifies, and whether ICA converged.

    Parameters
    ----------
    full
        A pca view fitted on these wells with as many components as they allow.
    rows
        The training wells.
    widths
        Numbers of components, or "all".
    seed, max_iter, tolerance
        As of the ica view; seed is that of the parallel analysis as well.

    Returns
    -------
    DataFrame
        A row a width, sorted: width; asked (as in the configuration); n_wells; enough_wells (10 k^2 at most);
        explained_variance (share of the total); last_variance and noise_variance (of component `width` and of noise at
        that rank, in squared units of the features); last_over_noise (their ratio: under 1, whitening amplifies what
        noise would show as well); amplification (by how much more whitening multiplies the last component than the
        first); above_noise (components of this width that exceed noise); parallel_width (what auto takes, the same in
        every row; 0 where no component exceeds noise); ica_n_iter, ica_gradient, ica_converged.

    Raises
    ------
    FitError
        If a width exceeds what the wells allow; before any fit.
    """
    rank, n = full.n_components_, len(rows)
    wrong = [w for w in widths if w != ALL and w > rank]
    if wrong:
        raise FitError(
            f"disentangle.sweep asks for {wrong[0]} components, but {n} training wells with {full.n_features_in_} "
            f"features allow at most {rank}; lower it, or ask for all"
        )
    asked = {rank if w == ALL else int(w): w for w in widths}
    noise = noise_variances(full.column_variance_, n, seed)[:rank]
    above = full.variance_[: len(noise)] > noise
    leading = len(above) if above.all() else int(above.argmin())
    table = []
    for k in sorted(asked):
        pca = full.truncated(k)
        fit = fit_rotation(pca._mapped(rows, None).array(rows.dtype), seed=seed, max_iter=max_iter, tolerance=tolerance)
        table.append({
            "width": k, "asked": str(asked[k]), "n_wells": n, "enough_wells": enough_wells(n, k),
            "explained_variance": pca.variance_.sum() / full.column_variance_.sum(),
            "last_variance": pca.variance_[-1], "noise_variance": noise[k - 1],
            "last_over_noise": pca.variance_[-1] / noise[k - 1],
            "amplification": np.sqrt(pca.variance_[0] / pca.variance_[-1]),
            "above_noise": int(above[:k].sum()), "parallel_width": leading,
            "ica_n_iter": fit.n_iter, "ica_gradient": fit.gradient, "ica_converged": bool(fit.converged),
        })  # fmt: skip
    return pd.DataFrame(table)
