"""The page of scores: every view beside every baseline, with intervals, controls, and what was not testable.

The tables and records of the score stage and the AnnData of the exploration fit come in, one static page
goes out. The page computes no score: it shows what the score stage wrote.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from phenoica import schema
from phenoica.errors import SchemaError
from phenoica.report import figures, pages, view_tables
from phenoica.score.baselines import BASELINES, PERMUTED, POSITION_TREES
from phenoica.score.contrasts import CONTRASTS, CUTTING, OF_FOLDS, POSITIVE, POSITIVE_CUTTING, QUERY, REASONS
from phenoica.score.intervals import WITHIN_EXPERIMENTS
from phenoica.score.printed import position_lines
from phenoica.score.rows import AUROC, CONCENTRATION, CONCENTRATION_CONTRAST, HOYER, L1, L2_CONTRAST, L2_METRICS
from phenoica.score.summary import COMPARED, MACRO, OVER_FOLDS, ROTATION, TRAINING, is_held_out, training_rows

POOLED = schema.SCOPES[0]
NULLS = (ROTATION, PERMUTED)
TITLES = {
    QUERY: "Query perturbations against reference controls",
    POSITIVE: "Positive controls against reference controls",
    CUTTING: "Cutting controls against reference controls",
    POSITIVE_CUTTING: "Positive controls against cutting controls",
}
CONCENTRATION_HEADS = {
    "concentration_share": "Share in the top components",
    "concentration_corrected": "Share above chance",
    "purity": "Purity of the top components",
    "participation": "Participation number",
    "overlap": "Overlap with the batch-bound components",
}


def write(
    scores_parquet: str | os.PathLike,
    fold_jsons: Sequence[str | os.PathLike],
    summary_txt: str | os.PathLike,
    disentangled_h5ad: str | os.PathLike,
    out_path: str | os.PathLike,
) -> None:
    """Write the score page.

    Parameters
    ----------
    scores_parquet
        `schema.SCORE_COLUMNS`, rows of folds and over folds.
    fold_jsons
        What the training side of each fold decided.
    summary_txt
        The printed summary.
    disentangled_h5ad
        The exploration fit: its component table and what it says of the encoder; its matrices are not read.
    out_path
        report/score.html; the run index is expected one folder up.

    Raises
    ------
    SchemaError
        If a table lacks columns or rows over folds.
    """
    import anndata

    scores = read_scores(scores_parquet)
    total = scores[scores["fold"] == OVER_FOLDS]
    summary = Path(summary_txt).read_text(encoding="utf-8")
    decided = [json.loads(Path(p).read_text(encoding="utf-8")) for p in fold_jsons]
    adata = anndata.read_h5ad(disentangled_h5ad, backed="r")
    uns = dict(adata.uns)
    adata.file.close()
    pages.write_page(
        "score.html",
        out_path,
        summary=summary,
        verdict=verdict(summary),
        l2=l2_control(total),
        figure=figures.svg(figures.scores_figure(panels(scores))),
        tables=[t for t in (score_table(total, scope) for scope in schema.SCOPES) if t["rows"]],
        comparators=comparator_table(total),
        differences=differences(total),
        training=training(total),
        shape=shape_table(total),
        whole_views=view_tables.view_table(total, _cell, in_order),
        deletion=view_tables.deletion_rows(total, _cell),
        concentration_heads=[CONCENTRATION_HEADS[name] for name in CONCENTRATION],
        chance=concentration_chance(total),
        perturbations=perturbation_table(total),
        skipped=skipped(total),
        absent=absent_baselines(decided),
        confounded=position_lines(total),
        folds=[fold_row(record) for record in decided],
        components=component_rows(uns.get(schema.UNS_COMPONENTS)),
        labels=label_counts(uns.get(schema.UNS_COMPONENTS)),
        spread=[str(sentence) for sentence in uns.get(schema.UNS_CONCENTRATION, ())],
        comes_back=str(uns.get(schema.UNS_REPRODUCIBILITY, {}).get("sentence", "")),
        ica=ica_state(uns.get(schema.UNS_ICA)),
        fit_experiments=[str(e) for e in uns[schema.UNS]["fit_experiments"]],
        run_link=pages.link(Path(out_path).parent.parent / "index.html", out_path),
        plates_link=pages.link(Path(out_path).parent / "plates" / "index.html", out_path),
        sentences=pages.encoder_sentences(uns[schema.UNS]),
    )


def read_scores(scores_parquet: str | os.PathLike) -> pd.DataFrame:
    """Return the table of scores.

    Raises
    ------
    SchemaError
        If it lacks columns or rows over folds.
    """
    scores = pd.read_parquet(scores_parquet)
    missing = [c for c in schema.SCORE_COLUMNS if c not in scores.columns]
    if missing or not (scores["fold"] == OVER_FOLDS).any():
        what = f"columns {', '.join(missing)}" if missing else "the rows over folds (fold -1)"
        raise SchemaError(f"{scores_parquet}: {what} are missing; run `phenoica summarise` again")
    return scores


def _held_out(total: pd.DataFrame, scope: str) -> pd.DataFrame:
    """Return the held-out AUROC rows of the L1 probe; rotation is the mean over its draws, differences are left out."""
    return _l1_rows(total[is_held_out(total)], scope)


def _l1_rows(total: pd.DataFrame, scope: str) -> pd.DataFrame:
    return total[
        (total["metric"] == AUROC)
        & ((total["probe"] == L1) | (total["view"] == POSITION_TREES))
        & (total["scope"] == scope)
        & total["draw"].isna()
        & total["view_minus"].isna()
    ]


def _or_none(value: Any) -> float | None:
    return None if pages.is_missing(value) else float(value)


def kind(view: str) -> str:
    """Return how a row of the table is drawn: view, baseline, or null (what chance alone gives)."""
    return "null" if view in NULLS else "baseline" if view in BASELINES else "view"


def in_order(views: Sequence[str]) -> list[str]:
    """Return rows in reading order: views, the random rotation after pca, then baselines, then permuted labels."""
    names = list(dict.fromkeys(views))
    rank = {"view": 0, "baseline": 1, "null": 2}
    ordered = sorted((v for v in names if v != ROTATION), key=lambda v: rank[kind(v)])
    if ROTATION in names:
        n_views = sum(kind(v) == "view" for v in ordered)
        ordered.insert(ordered.index("pca") + 1 if "pca" in ordered else n_views, ROTATION)
    return ordered


def _by_order(frame: pd.DataFrame, column: str = "view") -> list[dict[str, Any]]:
    order = in_order(frame[column])
    return sorted(frame.to_dict("records"), key=lambda row: order.index(row[column]))


def verdict(summary: str) -> str:
    """Return the sentence of the printed summary that says whether ica helps."""
    for line in summary.splitlines():
        if line.startswith(("Verdict: ", "ICA cannot be judged")):
            return line.removeprefix("Verdict: ")
    raise SchemaError("the printed summary has no verdict; run `phenoica summarise` again")


def panels(scores: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the macro AUROC of every contrast that has one, for `figures.scores_figure`.

    Parameters
    ----------
    scores
        score/scores.parquet.
    """
    rows = _held_out(scores[scores["fold"] == OVER_FOLDS], POOLED)
    result = []
    for contrast in CONTRASTS:
        inside = rows[(rows["contrast"] == contrast) & rows["value"].notna()]
        macro = inside[inside["perturbation"] == MACRO]
        if macro.empty:
            continue
        n = inside.loc[inside["perturbation"] != MACRO, "perturbation"].nunique()
        result.append(
            {
                "title": f"{TITLES[contrast]} (mean of {n})" if n > 1 else TITLES[contrast],
                "rows": [
                    {
                        "name": row["view"],
                        "kind": kind(row["view"]),
                        "value": float(row["value"]),
                        "low": _or_none(row["ci_low"]),
                        "high": _or_none(row["ci_high"]),
                    }
                    for row in _by_order(macro)
                ],
            }
        )
    return result


def score_table(total: pd.DataFrame, scope: str) -> dict[str, Any]:
    """Return the table of macro AUROC on held-out experiments: a row a view or baseline, a column a contrast."""
    return _macro_table(_held_out(total, scope), scope)


def comparator_table(total: pd.DataFrame) -> dict[str, Any] | None:
    """Return the same table of views that have read all test wells (pooled); None where there are none."""
    rows = _l1_rows(total[~is_held_out(total)], POOLED)
    return None if rows.empty else _macro_table(rows, POOLED)


def _macro_table(rows: pd.DataFrame, scope: str) -> dict[str, Any]:
    macro = rows[rows["perturbation"] == MACRO]
    present = list(dict.fromkeys(macro["contrast"]))
    contrasts = [c for c in CONTRASTS if c in present] + [c for c in present if c not in CONTRASTS]
    cells = {(r["view"], r["contrast"]): r for r in macro.to_dict("records")}
    reads = dict(zip(macro["view"], macro["test_data_used"], strict=True))
    table = [
        {
            "view": view,
            "kind": kind(view),
            "reads": reads[view],
            "cells": [_cell(cells.get((view, c))) for c in contrasts],
        }
        for view in in_order(macro["view"])
    ]
    heads = [_title(c) for c in contrasts]
    return {"scope": scope, "heads": heads, "rows": table, "notes": view_tables.shared_notes(heads, table)}


def _title(contrast: str) -> str:
    """Return the name of a contrast in words; one of the user's own is shown with its name."""
    return TITLES.get(contrast, contrast.replace("_", " ").capitalize())


def _cell(row: Mapping[str, Any] | None, decimals: int = 3, sign: bool = False) -> dict[str, str]:
    """Return a score as text: its value, its interval, and why either is missing."""
    if row is None or pages.is_missing(row["value"]):
        return {"value": "–", "range": "", "note": reason_words(row["reason"]) if row else "", "sort": ""}
    interval, note = "", reason_words(row["reason"], has_value=True)
    if not pages.is_missing(row["ci_low"]):
        interval = f"{pages.fixed(row['ci_low'], 2, sign)} to {pages.fixed(row['ci_high'], 2, sign)}"
        if row["ci_kind"] == WITHIN_EXPERIMENTS:
            interval += f", {WITHIN_EXPERIMENTS}"
    return {
        "value": pages.fixed(row["value"], decimals, sign),
        "range": interval,
        "note": note,
        "sort": str(row["value"]),
    }


def reason_words(reason: Any, has_value: bool = False) -> str:
    """Return the reasons of a row in words; a reason without words is shown as it is.

    A row over folds may have a value and yet leave out folds: `has_value` says so of the reasons that only folds have.
    """
    if pages.is_missing(reason):
        return ""
    return "; ".join(
        f"without some folds: {REASONS[r]}" if has_value and r in OF_FOLDS else REASONS.get(r, r)
        for r in str(reason).split(";")
    )


def differences(total: pd.DataFrame) -> list[dict[str, Any]]:
    """Return ica minus every other row on query perturbations, each with its interval."""
    rows = total[
        (total["contrast"] == QUERY)
        & (total["perturbation"] == MACRO)
        & (total["metric"] == AUROC)
        & (total["scope"] == POOLED)
        & (total["view"] == COMPARED)
        & total["view_minus"].notna()
    ]
    result = []
    for row in _by_order(rows, "view_minus"):
        result.append({"minus": row["view_minus"], "outcome": _outcome(row, "ica"), **_cell(row, sign=True)})
    return result


def _outcome(row: Mapping[str, Any], name: str) -> str:
    """Return what the interval of a difference says of the view that is called `name`."""
    low, high = _or_none(row["ci_low"]), _or_none(row["ci_high"])
    if low is None or low <= 0 <= high:
        return "not decided"
    return f"{name} is higher" if low > 0 else f"{name} is lower"


def training(total: pd.DataFrame) -> list[dict[str, Any]]:
    """Return what the encoder's training adds: AUROC of the trained one minus one with random weights.

    Returns
    -------
    list of dict
        A row for the average over query perturbations, one for that over positive controls, then one for each of these
        where there are several: over (what is averaged), trained and untrained (cells of AUROC), outcome, and the
        difference as a cell. Empty where the untrained encoder was not scored.
    """
    held_out = _held_out(total, POOLED).set_index(["view", "contrast", "perturbation"])
    rows = training_rows(total)
    single = (rows["contrast"] == POSITIVE) & (rows["perturbation"] != MACRO)
    if single.sum() == 1:
        rows = rows[~single]  # the average is that one
    result = []
    for row in rows.to_dict("records"):
        trained, untrained = (
            _cell(held_out.loc[(view, row["contrast"], row["perturbation"])].to_dict()) for view in TRAINING
        )
        average = row["perturbation"] == MACRO
        result.append({
            "over": TITLES[row["contrast"]] if average else row["perturbation"], "average": average,
            "trained": trained, "untrained": untrained, "outcome": _outcome(row, "trained"),
            **_cell(row, sign=True),
        })  # fmt: skip
    return result


def l2_control(total: pd.DataFrame) -> dict[str, Any]:
    """Return the state of the L2 control: holds, fails or not_run, with its numbers."""
    rows = total[total["contrast"] == L2_CONTRAST].set_index("metric")
    if any(name not in rows.index or pages.is_missing(rows.loc[name, "value"]) for name in L2_METRICS):
        return {"state": "not_run"}
    decision, auroc, holds = (float(rows.loc[name, "value"]) for name in L2_METRICS)
    return {
        "state": "holds" if holds == 1 else "fails",
        "views": str(rows["view"].iloc[0]).replace("+", ", "),
        "decision": f"{decision:.1e}",
        "auroc": f"{auroc:.1e}",
    }


def shape_table(total: pd.DataFrame) -> list[dict[str, Any]]:
    """Return sparsity and concentration of the views of one fit: a row a view, rotation being chance."""
    single = total[total["draw"].isna() & total["view_minus"].isna() & is_held_out(total)]
    effects = single[single["contrast"] == CONCENTRATION_CONTRAST]
    sparsity = single[
        (single["metric"] == HOYER) & (single["contrast"] == QUERY) & (single["perturbation"] == MACRO)
    ].set_index("view")
    result = []
    for view in in_order([*effects["view"], *sparsity.index]):
        values = effects[effects["view"] == view].set_index("metric")
        cells = [sparsity.loc[view].to_dict() if view in sparsity.index else None]
        cells += [values.loc[name].to_dict() if name in values.index else None for name in CONCENTRATION]
        result.append({"view": view, "kind": kind(view), "cells": [_cell(c, 2) for c in cells]})
    return result


def concentration_chance(total: pd.DataFrame) -> dict[str, Any] | None:
    """Return the concentration of single random rotations: how far chance spreads; None without rotations."""
    draws = total[
        (total["contrast"] == CONCENTRATION_CONTRAST)
        & (total["metric"] == CONCENTRATION[0])
        & (total["view"] == ROTATION)
        & total["draw"].notna()
        & total["value"].notna()
    ]["value"]
    if draws.empty:
        return None
    return {"n": len(draws), "mean": pages.fixed(draws.mean()), "low": pages.fixed(draws.min()),
            "high": pages.fixed(draws.max())}  # fmt: skip


def perturbation_table(total: pd.DataFrame) -> dict[str, Any]:
    """Return the pooled AUROC of single perturbations: a row a perturbation and contrast, a column a view."""
    rows = _held_out(total, POOLED)
    rows = rows[(rows["perturbation"] != MACRO) & rows["value"].notna()]
    views = in_order(rows["view"])
    table = []
    for (contrast, perturbation), group in rows.groupby(["contrast", "perturbation"], sort=False):
        values = group.drop_duplicates("view").set_index("view")
        table.append(
            {
                "contrast": contrast.replace("_", " "),
                "perturbation": perturbation,
                "n_case": int(group["n_case"].max()),
                "n_experiments": int(group["n_experiments"].max()),
                "cells": [_cell(values.loc[v].to_dict() if v in values.index else None) for v in views],
            }
        )
    return {"views": views, "rows": table}


def skipped(total: pd.DataFrame) -> list[dict[str, str]]:
    """Return the contrasts without a value, each once, with the reason in words."""
    rows = _held_out(total, POOLED)
    rows = rows[rows["value"].isna() & (rows["perturbation"] != MACRO)]
    found: dict[tuple[str, str, str], list[str]] = {}
    for row in rows.to_dict("records"):
        found.setdefault((row["contrast"], row["perturbation"], reason_words(row["reason"])), []).append(row["view"])
    everything = _held_out(total, POOLED).groupby(["contrast", "perturbation"])["view"].nunique()
    return [
        {
            "contrast": TITLES.get(contrast, contrast),
            "perturbation": perturbation,
            "views": "all"
            if len(set(views)) == everything[contrast, perturbation]
            else ", ".join(dict.fromkeys(views)),
            "reason": reason,
        }
        for (contrast, perturbation, reason), views in found.items()
    ]


def absent_baselines(decided: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the baselines that no fold could score, each with the reason, as sentences."""
    found = {name: why for record in decided for name, why in record.get("absent_baselines", {}).items()}
    return [f"There is no row {name}: {why}." for name, why in found.items()]


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


def write_figure(scores_parquet: str | os.PathLike, out_path: str | os.PathLike) -> None:
    """Write the figure of macro AUROC (score/scores.parquet) as an SVG file that stands alone."""
    figures.write_svg(figures.scores_figure(panels(pd.read_parquet(scores_parquet))), out_path)
