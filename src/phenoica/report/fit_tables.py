"""What the score page shows of the fits: what each fold decided in training, and the components of the exploration fit.

Records of folds and the component table come in, cells go out. Nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from phenoica import schema
from phenoica.report import pages
from phenoica.report.score_cells import kind
from phenoica.score.rows import ROTATION


def fold_row(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what one fold's training side decided, for the table of folds."""
    probes = [p for view in record["probes"].values() for p in view.values()]
    unfinished = sum(not p["converged"] for p in probes)
    warnings = list(record.get("fit", {}).get("warnings", []))
    if unfinished:
        warnings.append(f"{unfinished} of {pages.counted(len(probes), 'L1 probe')} did not converge")
    return {
        "fold": record["fold"],
        "test": ", ".join(record["test_experiments"]),
        "n_train": len(record["training_experiments"]),
        "fractions": ", ".join(
            f"{view} {f['fraction']:g}" for view, f in record["fractions"].items() if kind(view) == "view"
            and not view.startswith(ROTATION)
        ),
        "warnings": "; ".join(map(str, warnings)) or "none",
    }  # fmt: skip


def component_rows(table: pd.DataFrame | None) -> list[dict[str, Any]]:
    """Return the component table of the exploration fit, texts and numbers; empty without ica."""
    if table is None:
        return []
    rows = []
    for name, row in table.iterrows():
        row = row.to_dict()
        rows.append(
            {
                "component": str(name),
                "label": str(row["label"]),
                "numbers": [
                    (row["biology"], pages.fixed(row["biology"])),
                    (row["batch_omega2"], pages.fixed(row["batch_omega2"])),
                    (row["row_omega2"], pages.fixed(row["row_omega2"])),
                    (row["column_omega2"], pages.fixed(row["column_omega2"])),
                    (row["kurtosis"], pages.fixed(row["kurtosis"], 1)),
                    *((row[name], pages.fixed(row[name])) for name in ("reproducibility",) if name in row),
                ],
                "identifiable": bool(row.get("identifiable", True)),
                "top": str(row["top_perturbation"]),
                "effect": (row["top_effect"], pages.fixed(row["top_effect"], 2, sign=True)),
            }
        )
    return rows


def label_counts(table: pd.DataFrame | None) -> list[str]:
    """Return how many components carry each label, in words."""
    if table is None:
        return []
    counts = table["label"].astype(str).value_counts()
    return [f"{counts.get(label, 0)} {label}" for label in schema.COMPONENT_LABELS]


def ica_state(ica: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return whether the ICA of the exploration fit converged; None without ica."""
    if ica is None:
        return None
    return {
        "converged": bool(ica["converged"]),
        "n_iter": int(ica["n_iter"]),
        "gradient": f"{float(ica['gradient']):.1e}",
    }
