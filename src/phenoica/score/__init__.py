"""Scores on held-out batches, beside the baselines that could explain them away."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import anndata
    import pandas as pd

__all__ = ["score"]


def score(
    adata: anndata.AnnData, config: Mapping[str, Any], truth: str | os.PathLike | pd.DataFrame | None = None
) -> pd.DataFrame:
    """Fit the views of every fold in memory and score them on held-out experiments; see `phenoica.score.run.score`."""
    from phenoica.score import run

    return run.score(adata, config, truth)
