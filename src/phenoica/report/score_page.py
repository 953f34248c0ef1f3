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
from phenoica.report import figures, fit_tables, hit_tables, pages, row_words, view_tables
from phenoica.report.score_cells import by_order, cell, in_order, kind, reason_words, row_note, shared_notes
from phenoica.score.baselines import POSITION_TREES
from phenoica.score.contrasts import POSITIVE, QUERY
from phenoica.score.presets import titles as titles_of
from phenoica.score.printed import position_lines
from phenoica.score.rows import (
    AUROC,
    CONCENTRATION,
    CONCENTRATION_CONTRAST,
    HOYER,
    L1,
    L2_CONTRAST,
    L2_METRICS,
    MACRO,
    OVER_FOLDS,
    POOLED,
    ROTATION,
)
from phenoica.score.summary import COMPARED, TRAINING, is_held_out, training_rows

TRAINING_OVER = {QUERY: "Query perturbations", POSITIVE: "Positive controls"}
CONCENTRATION_HEADS = {
    "concentration_share": "Share in the top components",
    "concentration_corrected": "Share above chance",
    "purity": "Purity of the top components",
    "participation": "Participation number",
    "overlap": "Overlap with the batch-bound components",
}


def write(
    scores_parquet: str | os.PathLike,
    hits_csv: str | os.PathLike,
    fold_jsons: Sequence[str | os.PathLike],
    summary_txt: str | os.PathLike,
    disentangled_h5ad: str | os.PathLike,
    out_path: str | os.PathLike,
    config: Mapping[str, Any],
) -> None:
    """Write the score page.

    Parameters
    ----------
    scores_parquet
        `schema.SCORE_COLUMNS`, rows of folds and over folds.
    hits_csv
        The list of hits (`hits.HIT_COLUMNS`); the page links it.
    fold_jsons
        What the training side of each fold decided.
    summary_txt
        The printed summary.
    disentangled_h5ad
        The exploration fit: its component table and what it says of the encoder; its matrices are not read.
    out_path
        report/score.html; the run index is expected one folder up.
    config
        The complete configuration of the scores: titles of contrasts, levels of tests and intervals.

    Raises
    ------
    SchemaError
        If a table lacks columns or rows over folds, or holds a contrast that the configuration does not name.
    """
    import anndata

    scores = read_scores(scores_parquet)
    total = scores[scores["fold"] == OVER_FOLDS]
    titles = contrast_titles(total, config, scores_parquet)
    summary = Path(summary_txt).read_text(encoding="utf-8")
    decided = [json.loads(Path(p).read_text(encoding="utf-8")) for p in fold_jsons]
    adata = anndata.read_h5ad(disentangled_h5ad, backed="r")
    uns = dict(adata.uns)
    adata.file.close()
    alpha = config["score"]["alpha"]
    pages.write_page(
        "score.html",
        out_path,
        summary=summary,
        verdict=verdict(summary),
        alpha=f"{alpha:g}",
        level=f"{config['score']['confidence']:.0%}",
        figure=figures.svg(figures.scores_figure(panels(scores, titles))),
        hits=hit_tables.hit_section(hit_tables.read_hits(hits_csv), titles, alpha),
        hits_link=pages.link(hits_csv, out_path),
        absent=absent_baselines(decided),
        **_score_tables(total, titles),
        **_fit_values(decided, uns),
        run_link=pages.link(Path(out_path).parent.parent / "index.html", out_path),
        plates_link=pages.link(Path(out_path).parent / "plates" / "index.html", out_path),
        sentences=pages.encoder_sentences(uns[schema.UNS]),
    )


def _score_tables(total: pd.DataFrame, titles: Mapping[str, str]) -> dict[str, Any]:
    """Return what the page shows of the rows over folds."""
    tables = [t for t in (score_table(total, scope, titles) for scope in schema.SCOPES) if t["rows"]]
    comparators = comparator_table(total, titles)
    named = [row["view"] for table in [*tables, comparators or {"rows": []}] for row in table["rows"]]
    return {
        "tables": tables,
        "comparators": comparators,
        "row_words": row_words.explained(in_order(named)),
        "l2": l2_control(total),
        "differences": differences(total),
        "training": training(total),
        "shape": shape_table(total),
        "concentration_heads": [CONCENTRATION_HEADS[name] for name in CONCENTRATION],
        "chance": concentration_chance(total),
        "whole_views": view_tables.view_table(total),
        "deletion": view_tables.deletion_table(total),
        "perturbations": perturbation_tables(total, titles),
        "skipped": skipped(total, titles),
        "confounded": position_lines(total),
    }


def _fit_values(decided: Sequence[Mapping[str, Any]], uns: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the page shows of the folds and of the exploration fit."""
    return {
        "folds": [fit_tables.fold_row(record) for record in decided],
        "components": fit_tables.component_rows(uns.get(schema.UNS_COMPONENTS)),
        "labels": fit_tables.label_counts(uns.get(schema.UNS_COMPONENTS)),
        "spread": [str(sentence) for sentence in uns.get(schema.UNS_CONCENTRATION, ())],
        "comes_back": str(uns.get(schema.UNS_REPRODUCIBILITY, {}).get("sentence", "")),
        "ica": fit_tables.ica_state(uns.get(schema.UNS_ICA)),
        "fit_experiments": [str(e) for e in uns[schema.UNS]["fit_experiments"]],
    }


def contrast_titles(
    total: pd.DataFrame, config: Mapping[str, Any], scores_parquet: str | os.PathLike
) -> dict[str, str]:
    """Return the titles of the contrasts of a configuration, which must know all those that are scored.

    Raises
    ------
    SchemaError
        Naming a contrast that it does not know.
    """
    titles = titles_of(config["score"]["contrasts"])
    strange = [c for c in dict.fromkeys(total.loc[total["metric"] == AUROC, "contrast"]) if c not in titles]
    if strange:
        raise SchemaError(
            f"{scores_parquet}: contrast {strange[0]!r} is not in score.contrasts; take the configuration of its run"
        )
    return titles


def read_scores(scores_parquet: str | os.PathLike) -> pd.DataFrame:
    """Return the table of scores.

    Raises
    ------
    SchemaError
        If there is no such file, or it lacks columns or rows over folds.
    """
    if not Path(scores_parquet).is_file():
        raise SchemaError(f"{scores_parquet}: no such file; run `phenoica summarise`")
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


def verdict(summary: str) -> str:
    """Return the sentence of the printed summary that says whether ica helps."""
    for line in summary.splitlines():
        if line.startswith(("Verdict: ", "ICA cannot be judged")):
            return line.removeprefix("Verdict: ")
    raise SchemaError("the printed summary has no verdict; run `phenoica summarise` again")


def panels(scores: pd.DataFrame, titles: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the macro AUROC of every contrast that has one, for `figures.scores_figure`.

    Parameters
    ----------
    scores
        score/scores.parquet.
    titles
        Of contrasts, in the order of the configuration.
    """
    rows = _held_out(scores[scores["fold"] == OVER_FOLDS], POOLED)
    result = []
    for contrast in titles:
        inside = rows[(rows["contrast"] == contrast) & rows["value"].notna()]
        macro = inside[inside["perturbation"] == MACRO]
        if macro.empty:
            continue
        n = inside.loc[inside["perturbation"] != MACRO, "perturbation"].nunique()
        result.append(
            {
                "title": f"{titles[contrast]} (mean\N{NO-BREAK SPACE}of\N{NO-BREAK SPACE}{n})"
                if n > 1
                else titles[contrast],
                "rows": [
                    {
                        "name": row["view"],
                        "kind": kind(row["view"]),
                        "value": float(row["value"]),
                        "low": _or_none(row["ci_low"]),
                        "high": _or_none(row["ci_high"]),
                    }
                    for row in by_order(macro)
                ],
            }
        )
    return result


def score_table(total: pd.DataFrame, scope: str, titles: Mapping[str, str]) -> dict[str, Any]:
    """Return the table of macro AUROC on held-out experiments: a row a view or baseline, a column a contrast."""
    return _macro_table(_held_out(total, scope), scope, titles)


def comparator_table(total: pd.DataFrame, titles: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the same table of views that have read all test wells (pooled); None where there are none."""
    rows = _l1_rows(total[~is_held_out(total)], POOLED)
    return None if rows.empty else _macro_table(rows, POOLED, titles)


def _macro_table(rows: pd.DataFrame, scope: str, titles: Mapping[str, str]) -> dict[str, Any]:
    macro = rows[rows["perturbation"] == MACRO]
    contrasts = [c for c in titles if (macro["contrast"] == c).any()]
    cells = {(r["view"], r["contrast"]): r for r in macro.to_dict("records")}
    reads = dict(zip(macro["view"], macro["test_data_used"], strict=True))
    table = [
        {
            "view": view,
            "kind": kind(view),
            "reads": reads[view],
            "cells": [cell(cells.get((view, c))) for c in contrasts],
        }
        for view in in_order(macro["view"])
    ]
    heads = [titles[c] for c in contrasts]
    return {"scope": scope, "heads": heads, "rows": table, "notes": shared_notes(heads, table)}


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
    for row in by_order(rows, "view_minus"):
        result.append({"minus": row["view_minus"], "outcome": _outcome(row, "ica"), **cell(row, sign=True)})
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
            cell(held_out.loc[(view, row["contrast"], row["perturbation"])].to_dict()) for view in TRAINING
        )
        average = row["perturbation"] == MACRO
        result.append({
            "over": TRAINING_OVER[row["contrast"]] if average else row["perturbation"], "average": average,
            "trained": trained, "untrained": untrained, "outcome": _outcome(row, "trained"),
            **cell(row, sign=True),
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
        "decision": pages.number(decision, 2),
        "auroc": pages.number(auroc, 2),
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
        result.append({"view": view, "kind": kind(view), "cells": [cell(c, 2) for c in cells]})
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


def perturbation_tables(total: pd.DataFrame, titles: Mapping[str, str]) -> dict[str, Any]:
    """Return the pooled AUROC of single perturbations.

    Returns
    -------
    dict
        views: heads of the columns; tables: one a contrast, with a row a perturbation. A note that all cells of a row
        share stands once in the row, one that all rows share once in the table.
    """
    rows = _held_out(total, POOLED)
    rows = rows[(rows["perturbation"] != MACRO) & rows["value"].notna()]
    views = in_order(rows["view"])
    tables = []
    for contrast in [c for c in titles if (rows["contrast"] == c).any()]:
        inside = rows[rows["contrast"] == contrast]
        found = [_perturbation_row(*named, views) for named in inside.groupby("perturbation", sort=False)]
        notes = {row["note"] for row in found}
        note = notes.pop() if len(notes) == 1 else ""
        tables.append({"title": titles[contrast], "rows": found, "has_notes": bool(notes), "note": note})
    return {"views": views, "tables": tables}


def _perturbation_row(perturbation: str, group: pd.DataFrame, views: Sequence[str]) -> dict[str, Any]:
    values = group.drop_duplicates("view").set_index("view")
    cells = [cell(values.loc[v].to_dict() if v in values.index else None) for v in views]
    return {
        "perturbation": perturbation,
        "n_case": int(group["n_case"].max()),
        "n_experiments": int(group["n_experiments"].max()),
        "note": row_note(cells),
        "cells": cells,
    }


def skipped(total: pd.DataFrame, titles: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the contrasts without a value, each once, with the reason in words."""
    rows = _held_out(total, POOLED)
    rows = rows[rows["value"].isna() & (rows["perturbation"] != MACRO)]
    found: dict[tuple[str, str, str], list[str]] = {}
    for row in rows.to_dict("records"):
        found.setdefault((row["contrast"], row["perturbation"], reason_words(row["reason"])), []).append(row["view"])
    everything = _held_out(total, POOLED).groupby(["contrast", "perturbation"])["view"].nunique()
    return [
        {
            "contrast": titles[contrast],
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


def write_figure(scores_parquet: str | os.PathLike, out_path: str | os.PathLike, config: Mapping[str, Any]) -> None:
    """Write the figure of macro AUROC (score/scores.parquet) as an SVG file that stands alone."""
    scores = read_scores(scores_parquet)
    titles = contrast_titles(scores[scores["fold"] == OVER_FOLDS], config, scores_parquet)
    figures.write_svg(figures.scores_figure(panels(scores, titles)), out_path)
