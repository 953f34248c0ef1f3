"""Two runs side by side: the same perturbations, tested on the same experiments, with what differs in their settings.

The folders of two finished runs come in; differences of held-out AUROC, second minus first, go out, paired over
perturbations and, where both runs hold out the same experiments together, over folds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from phenoica import schema
from phenoica.errors import ScoreError
from phenoica.score.intervals import MIN_EXPERIMENTS, t_interval
from phenoica.score.rows import AUROC, POOLED
from phenoica.score.summary import MACRO, OVER_FOLDS, is_held_out, of_probe

COMPARE_COLUMNS = (
    "contrast", "perturbation", "view", "first", "second", "difference", "ci_low", "ci_high", "ci_kind",
    "n_perturbations", "n_folds", "n_experiments", "reason",
)  # fmt: skip
_PAIR = ["contrast", "perturbation", "view"]


@dataclass(frozen=True)
class Run:
    """What is read of a finished run.

    Attributes
    ----------
    config
        The resolved configuration.
    scores
        score/scores.parquet.
    folds
        Fold number -> its held-out experiments.
    """

    config: Mapping[str, Any]
    scores: pd.DataFrame
    folds: Mapping[int, frozenset[str]]


def read_run(folder: str | os.PathLike) -> Run:
    """Read a run's folder (results/<run>).

    Raises
    ------
    ScoreError
        If a file of a scored run is missing.
    """
    folder = Path(folder)
    names = "config.json", "score/scores.parquet", "plates/folds.csv"
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ScoreError(f"{folder}: {missing[0]} is missing; give the folder of a scored run (results/<run>)")
    folds = pd.read_csv(folder / names[2], dtype={schema.EXPERIMENT: str}, keep_default_na=False)
    return Run(
        json.loads((folder / names[0]).read_text(encoding="utf-8")), pd.read_parquet(folder / names[1]),
        {int(k): frozenset(g) for k, g in folds.groupby(schema.FOLD)[schema.EXPERIMENT]},
    )  # fmt: skip


def config_differences(first: Mapping[str, Any], second: Mapping[str, Any], path: str = "") -> list[str]:
    """Return the keys that differ, as "key: value of the first -> value of the second"; absent keys say so."""
    lines = []
    for key in dict.fromkeys([*first, *second]):
        a, b = first.get(key, "absent"), second.get(key, "absent")
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            lines += config_differences(a, b, f"{path}{key}.")
        elif a != b:
            lines.append(f"{path}{key}: {a} -> {b}")
    return lines


def compare(first: Run, second: Run, confidence: float) -> pd.DataFrame:
    """Return the differences of held-out AUROC, second run minus first.

    Parameters
    ----------
    first, second
        As from `read_run`.
    confidence
        Level of the intervals.

    Returns
    -------
    DataFrame
        `COMPARE_COLUMNS`: a row for every contrast, perturbation and view that both runs have a value of, and one for
        the macro average over those perturbations. Folds coincide where both runs hold out the same experiments
        together; only these enter differences with an interval (t over folds, as in the scores, from four experiments
        on). Where none coincides, values over folds are subtracted and the reason is folds_differ.
    """
    common = {
        a: b for a, experiments in first.folds.items() for b, others in second.folds.items() if experiments == others
    }  # fmt: skip
    if common:
        table = _auroc(first, common).merge(
            _auroc(second, {b: b for b in common.values()}), on=[*_PAIR, "fold"], suffixes=("", "_second")
        )
    else:
        one = {OVER_FOLDS: OVER_FOLDS}
        table = _auroc(first, one).merge(_auroc(second, one), on=[*_PAIR, "fold"], suffixes=("", "_second"))
    rows = []
    for (contrast, view), group in table.groupby(["contrast", "view"], sort=False):
        name = {"contrast": contrast, "view": view}
        rows.append({**name, "perturbation": MACRO, **_difference(group, bool(common), confidence)})
        for perturbation, part in group.groupby("perturbation", sort=False):
            rows.append({**name, "perturbation": perturbation, **_difference(part, bool(common), confidence)})
    return pd.DataFrame(rows, columns=list(COMPARE_COLUMNS))


def _auroc(run: Run, renamed: Mapping[int, int]) -> pd.DataFrame:
    """Return the held-out AUROC of single perturbations in some folds, under the other run's fold numbers."""
    rows = run.scores
    rows = rows[
        (rows["metric"] == AUROC) & of_probe(rows) & (rows["scope"] == POOLED) & rows["draw"].isna()
        & rows["view_minus"].isna() & (rows["perturbation"] != MACRO) & rows["fold"].isin(list(renamed))
        & rows["value"].notna() & is_held_out(rows)
    ]  # fmt: skip
    fold = rows["fold"].astype(int).map(renamed)
    pairs = rows["n_case"].astype(float) * rows["n_reference"].astype(float)
    return rows[[*_PAIR, "value", "n_experiments"]].assign(fold=fold, pairs=pairs)


def _difference(group: pd.DataFrame, by_fold: bool, confidence: float) -> dict[str, Any]:
    """Average pairs of values: perturbations weigh alike, and folds of one perturbation by their pairs."""
    group = group.assign(change=group["value_second"] - group["value"])
    means = {
        name: group.groupby("perturbation")
        .apply(lambda part, name=name: np.average(part[name], weights=part["pairs"]), include_groups=False)
        .mean()
        for name in ("value", "value_second", "change")
    }
    folds = group.groupby("fold")["change"].mean()
    experiments = int(group.groupby("fold")["n_experiments"].max().sum())
    row = {
        "first": means["value"], "second": means["value_second"], "difference": means["change"],
        "n_perturbations": group["perturbation"].nunique(), "n_folds": len(folds) if by_fold else 0,
        "n_experiments": experiments,
    }  # fmt: skip
    if not by_fold:
        return {**row, "reason": "folds_differ"}
    if experiments < MIN_EXPERIMENTS:
        return {**row, "reason": "under_4_experiments"}
    found = t_interval(folds, np.ones(len(folds)), confidence, bounds=(-1.0, 1.0), centre=means["change"])
    return {**row, "ci_low": found.low, "ci_high": found.high, "ci_kind": found.kind, "reason": found.reason}


def compared(table: pd.DataFrame, first: Run, second: Run) -> str:
    """Return the comparison as text: what differs in the settings, then the macro averages and their difference."""
    names = [str(run.config.get("run", "?")) for run in (first, second)]
    changed = config_differences(first.config, second.config)
    same = set(first.folds.values()) & set(second.folds.values())
    lines = [f"first: {names[0]}, second: {names[1]}", f"settings that differ: {len(changed)}"]
    lines += [f"  {line}" for line in changed]
    lines.append(f"folds that hold out the same experiments: {len(same)} of {len(first.folds)} and {len(second.folds)}")
    if table.empty:
        return "\n".join([*lines, "no perturbation has a value in both runs, so nothing can be compared"]) + "\n"
    lines += ["", f"{'contrast':<26}{'view':<18}{'n':>4}{'first':>8}{'second':>8}  second minus first"]
    for row in table[table["perturbation"] == MACRO].to_dict("records"):
        bounded = not pd.isna(row["ci_low"])
        interval = f" [{row['ci_low']:+.3f}, {row['ci_high']:+.3f}]" if bounded else f" ({row['reason']})"
        lines.append(
            f"{row['contrast']:<26}{row['view']:<18}{row['n_perturbations']:>4}{row['first']:>8.3f}{row['second']:>8.3f}"
            f"  {row['difference']:+.3f}{interval}"
        )
    only = [sorted(_pairs(a) - _pairs(b)) for a, b in ((first, second), (second, first))]
    for name, missing in zip(names, only, strict=True):
        if missing:
            shown = ", ".join(" / ".join(m) for m in missing[:5]) + (" ..." if len(missing) > 5 else "")
            lines.append(f"only in {name}, not compared: {len(missing)} ({shown})")
    return "\n".join(lines) + "\n"


def _pairs(run: Run) -> set[tuple[str, ...]]:
    return set(_auroc(run, {OVER_FOLDS: OVER_FOLDS})[_PAIR].itertuples(index=False, name=None))
