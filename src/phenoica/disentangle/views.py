"""Views: ways to look at one embedding, fitted on training wells only, by name, alone or one after the other.

The views themselves are in linear_views, batch_views and comparators; this module joins them to chains, makes them by
name and loads what they saved.
"""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path
from typing import Any

import pandas as pd

from phenoica.disentangle.base_view import META_FILE, STATE_FILE, STATE_FORMAT, View
from phenoica.disentangle.batch_views import BatchView, CenterScale, PcaCs, Tvn
from phenoica.disentangle.blocks import Rows
from phenoica.disentangle.comparators import Combat, Comparator, Harmony
from phenoica.disentangle.linear_views import Ica, Mad, Pca, Raw, Rotation, Spherize, Varimax
from phenoica.errors import ConfigError, FitError, SchemaError
from phenoica.files import write_json
from phenoica.schema import TEST_DATA_USED

__all__ = [
    "META_FILE", "STATE_FILE", "STATE_FORMAT", "VIEWS", "BatchView", "CenterScale", "Chain", "Combat", "Comparator",
    "Harmony", "Ica", "Mad", "Pca", "PcaCs", "Raw", "Rotation", "Spherize", "Tvn", "Varimax", "View",
    "load_view", "view",
]  # fmt: skip


class Chain(View):
    """Views one after the other, such as `centerscale + ica`; each is fitted on what the one before gives.

    Parameters
    ----------
    parts
        Unfitted views, two or more.
    """

    def __init__(self, parts: list[View]):
        self.parts = parts
        self.name = " + ".join(part.name for part in parts)
        self.unit_variance = parts[-1].unit_variance
        self.test_data_used = max((p.test_data_used for p in parts), key=TEST_DATA_USED.index)

    def options(self) -> dict[str, Any]:
        """Return no options: the parts have their own."""
        return {}

    def _fit(self, rows: Rows, obs: pd.DataFrame | None) -> None:
        for part in self.parts:
            rows = part._fit_rows(rows, obs)._mapped(rows, obs)
            self.warnings_.extend(part.warnings_)
        self.n_components_ = self.parts[-1].n_components_

    def _mapped(self, rows: Rows, obs: pd.DataFrame | None) -> Rows:
        for part in self.parts:
            rows = part._mapped(rows, obs)
        return rows

    def save(self, directory: str | os.PathLike) -> None:
        """Write `view.json` and one folder a part: `part_0`, `part_1`, ..."""
        if not hasattr(self, "n_components_"):
            raise FitError(f"view {self.name} is not fitted; there is nothing to save")
        for i, part in enumerate(self.parts):
            part.save(Path(directory) / f"part_{i}")
        write_json(Path(directory) / META_FILE, self._description())

    def _load(self, directory: Path, description: dict[str, Any]) -> None:
        self.parts = [load_view(directory / f"part_{i}") for i in range(len(self.parts))]
        self.n_features_in_, self.n_components_ = description["n_features_in"], description["n_components"]
        self.warnings_ = list(description["warnings"])


VIEWS: dict[str, type[View]] = {
    v.name: v for v in (Raw, CenterScale, Mad, Spherize, Pca, Rotation, Varimax, Ica, Tvn, PcaCs, Combat, Harmony)
}


def view(name: str, **options: Any) -> View:
    """Make an unfitted view.

    Parameters
    ----------
    name
        raw, centerscale, mad, spherize, pca, rotation, varimax, ica, tvn, pca_cs, combat, harmony, or several (but
        the last two) joined by `+`, such as "centerscale + ica".
    **options
        Options of the view's class. In a chain each option goes to every part that knows it.

    Returns
    -------
    View
        To be fitted.

    Raises
    ------
    ConfigError
        For an unknown view, an option that no part knows, or a wrong value.
    """
    names = [part.strip() for part in name.split("+")]
    unknown = [n for n in names if n not in VIEWS]
    if unknown:
        raise ConfigError(f"unknown view {unknown[0]!r}; known views: {', '.join(VIEWS)}, joined by +")
    known = {n: set(inspect.signature(VIEWS[n]).parameters) for n in names}
    every = sorted(set().union(*known.values()))
    wrong = sorted(set(options) - set(every))
    if wrong:
        raise ConfigError(f"view {name!r} has no option {wrong[0]!r}; known: {', '.join(every) or 'none'}")
    if len(names) > 1 and options.get("pca") is not None:
        raise ConfigError(f"view {name!r}: option pca cannot be given in a chain; write pca as a part or leave it out")
    transductive = [n for n in names if issubclass(VIEWS[n], Comparator)]
    if len(names) > 1 and transductive:
        raise ConfigError(f"view {name!r}: {transductive[0]} reads all wells at once and cannot be part of a chain")
    parts = [VIEWS[n](**{k: v for k, v in options.items() if k in known[n]}) for n in names]
    return parts[0] if len(parts) == 1 else Chain(parts)


def load_view(directory: str | os.PathLike) -> View:
    """Load a fitted view from the folder that `save` wrote.

    Raises
    ------
    SchemaError
        If the folder holds no view, or one of another format.
    """
    directory = Path(directory)
    try:
        description = json.loads((directory / META_FILE).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise SchemaError(f"{directory / META_FILE}: not a saved view ({error}); fit the view again") from error
    if description.get("format") != STATE_FORMAT:
        raise SchemaError(
            f"{directory / META_FILE}: format {description.get('format')!r}, this version reads "
            f"{STATE_FORMAT}; fit the view again"
        )
    try:
        loaded = view(description["name"], **description["options"])
        loaded._load(directory, description)
    except KeyError as error:
        raise SchemaError(f"{directory / META_FILE}: key {error} is missing; fit the view again") from error
    return loaded
