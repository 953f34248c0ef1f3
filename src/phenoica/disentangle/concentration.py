"""On how few components biology, batch and position lie: ica beside pca and random rotations of the same fit.

The component tables of one fit come in, a tidy table and sentences go out. Ranking and measuring use the same (the
fitted) wells, and random rotations get the same treatment, so they are the chance level; concentration on held-out
wells is the score stage's.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from phenoica.schema import BATCH, BIOLOGY, POSITION

TOP_SHARE = 0.25
PARTICIPATION, TOP_QUARTER = "participation", "top_quarter_share"
METRICS = (PARTICIPATION, TOP_QUARTER)
ICA, PCA, ROTATION = "ica", "pca", "rotation"
ROTATED = (ICA, PCA, "varimax", ROTATION)  # views of one fit that differ by an orthogonal matrix


def participation(effects: np.ndarray) -> float | None:
    """Return (sum e)^2 / sum e^2: between 1 (one component) and n (all alike); None when every effect is zero.

    Parameters
    ----------
    effects
        (n,) float, finite and at least 0.
    """
    largest = effects.max()
    if largest == 0:
        return None
    effects = effects / largest  # so that squares of tiny effects do not underflow
    return float(effects.sum() ** 2 / (effects**2).sum())


def top_count(n: int, share: float) -> int:
    """Return how many of `n` components the top `share` holds: rounded, at least one."""
    return max(1, int(np.floor(n * share + 0.5)))


def top_share(effects: np.ndarray, share: float = TOP_SHARE) -> float | None:
    """Return the part of the summed effects (n,) that the largest `share` of them holds; None when all are zero."""
    total = effects.sum()
    return float(np.sort(effects)[::-1][: top_count(len(effects), share)].sum() / total) if total > 0 else None


def effects_of(table: pd.DataFrame) -> dict[str, np.ndarray]:
    """Return how much each component of a table carries: of biology, of batch, and of row plus column.

    Parameters
    ----------
    table
        Rows of one view from `phenoica.disentangle.components.component_table`.
    """
    return {
        BIOLOGY: table["biology"].to_numpy(),
        BATCH: table["batch_omega2"].to_numpy(),
        POSITION: (table["row_omega2"] + table["column_omega2"]).to_numpy(),
    }


def concentration(table: pd.DataFrame) -> pd.DataFrame:
    """Measure the concentration of every view that is a rotation of the same fit.

    Parameters
    ----------
    table
        Component tables of several views, one below the other.

    Returns
    -------
    DataFrame
        A row a view, rotation draw, quantity (biology, batch, position) and metric (participation,
        top_quarter_share): view, draw (nullable), quantity, metric, value (nullable: missing where no component
        carries any of the quantity).
    """
    rows = []
    chosen = table[table["view"].isin(ROTATED)]
    for (view, draw), part in chosen.groupby(["view", "draw"], dropna=False, sort=False):
        for quantity, effects in effects_of(part).items():
            for metric, value in zip(METRICS, (participation(effects), top_share(effects)), strict=True):
                rows.append((view, draw, quantity, metric, value))
    frame = pd.DataFrame(rows, columns=["view", "draw", "quantity", "metric", "value"])
    return frame.astype({"view": object, "draw": "Int64", "value": "Float64"})


def sentences(table: pd.DataFrame) -> list[str]:
    """Say in words over how many components batch, position and biology are spread, and whether ica helps.

    ica counts as more concentrated than random rotations if its participation number is below that of every draw, which
    happens by chance once in (draws + 1) times. Nothing is claimed of views that were not fitted.

    Parameters
    ----------
    table
        Component tables of several views, one below the other.

    Returns
    -------
    list of str
        A sentence a quantity; empty where none of the views is there.
    """
    numbers = concentration(table)
    numbers = numbers[numbers["metric"] == PARTICIPATION]
    if numbers.empty:
        return []
    n = int(table.loc[table["view"].isin(ROTATED), "index"].max()) + 1
    return [_sentence(numbers[numbers["quantity"] == q], q, n) for q in (BATCH, POSITION, BIOLOGY)]


def _sentence(numbers: pd.DataFrame, quantity: str, n: int) -> str:
    values = {view: part["value"].dropna().to_numpy(dtype=float) for view, part in numbers.groupby("view")}
    name = quantity.capitalize()
    there = [view for view in ROTATED if len(values.get(view, ()))]
    if not there:
        return f"{name}: no component carries any, so over how many it is spread cannot be said."
    places = []
    for view in there:
        of = f" of {n} {view} components (participation number)" if view == there[0] else f" of {view}"
        drawn = values[view]
        if view == ROTATION:
            of = f"{of if view == there[0] else ' of random rotations'} (mean of {len(drawn)}, {_range(drawn, n)})"
        places.append(f"{_number(drawn.mean(), n)}{of}")
    verdict = _verdict(values) if ICA in values else ""
    return f"{name} is spread over {', '.join(places)}, on the wells of the fit{verdict}."


def _verdict(values: dict[str, np.ndarray]) -> str:
    """Return what the numbers say of ica: beside rotations first, because pca may by chance be worse than they."""
    if not len(values[ICA]):
        return ": no ica component carries any"
    own = values[ICA][0]
    pca, drawn = (values.get(view, np.empty(0)) for view in (PCA, ROTATION))
    below_pca, below_drawn = bool(len(pca)) and own < pca[0], bool(len(drawn)) and own < drawn.min()
    rotations = f"all {len(drawn)} rotations"
    if not len(drawn):
        beside_pca = f"ica is {'' if below_pca else 'NOT '}more concentrated than pca, " if len(pca) else ""
        return f": {beside_pca}there is no rotation to compare ica with"
    if below_drawn and below_pca:
        return f": ica is more concentrated than pca and {rotations}"
    if below_drawn:
        return f": ica is more concentrated than {rotations}" + (", but NOT than pca" if len(pca) else "")
    few = f"{(drawn <= own).sum()} of {len(drawn)} are at least as concentrated"
    also = "pca or " if len(pca) and not below_pca else ""
    return f": ica is NOT more concentrated than {also}random rotations ({few})"


def _number(value: float, n: int) -> str:
    return f"{value:.0f}" if n >= 20 else f"{value:.1f}"


def _range(values: np.ndarray, n: int) -> str:
    return f"{_number(values.min(), n)} to {_number(values.max(), n)}"
