"""The few lines of the table of scores that a person reads first, with the controls and a plain verdict.

Rows over folds and the records of the folds come in, plain text goes out; nothing is computed that is not in the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from phenoica.score import inference, intervals
from phenoica.score.baselines import BASELINES
from phenoica.score.contrasts import POSITIVE, POSITIVE_CUTTING, QUERY, REASONS
from phenoica.score.names import DELETION_GAIN
from phenoica.score.rows import AUROC, CONCENTRATION_CONTRAST, L1, L2_CONTRAST, L2_METRICS, POOLED, WITHIN
from phenoica.score.summary import (
    COMPARED,
    CONFOUNDED,
    GAP,
    MACRO,
    OVER_FOLDS,
    ROTATION,
    TRAINING,
    auroc_rows,
    is_held_out,
    position_overlap,
    training_rows,
)
from phenoica.score.view_scores import DELETION_CONTRAST

WITHIN_MARK = "*"  # in the printed table, on intervals within these experiments


def printed(scores: pd.DataFrame, decided: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> str:
    """Return the score table as plain text: what was held out, views as rows, the controls, and a plain verdict.

    Parameters
    ----------
    scores
        As from `over_folds`.
    decided
        The records of the folds.
    config
        A complete configuration.
    """
    total = scores[scores["fold"] == OVER_FOLDS]
    lines = [*_heading(total, decided, config), "", *_score_lines(total), "", *_control_lines(total)]
    lines += [
        *_concentration_lines(total, config),
        *_deletion_lines(total),
        *_training_lines(total),
        *position_lines(total),
    ]
    lines += [*_gap_lines(total), *_comparator_lines(total), "", *lines_of_tests(total, config)]
    lines += ["", *_verdict(total), "", *_footnotes(total, decided)]
    return "\n".join(lines) + "\n"


def _heading(total: pd.DataFrame, decided: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> list[str]:
    experiments = sum(len(record["test_experiments"]) for record in decided)
    encoder = decided[0]["encoder"]
    return [
        f"Held-out AUROC (.5 = no signal): L1 probe trained on other experiments, {len(decided)} folds over "
        f"{experiments} experiments,",
        f"{_interval_words(total, config['score']['confidence'])}. Encoder: {encoder['checkpoint']};",
        f"trained on images of the scored experiments: {encoder['encoder_saw_test_images']}.",
    ]


def _comparator_lines(total: pd.DataFrame) -> list[str]:
    """Return the macro AUROC of views that have read the test wells, apart from the held-out ones; often none."""
    rows = total[
        (total["metric"] == AUROC) & (total["probe"] == L1) & (total["scope"] == POOLED) & ~is_held_out(total)
        & (total["contrast"] == QUERY) & (total["perturbation"] == MACRO)
    ]  # fmt: skip
    if rows.empty:
        return []
    cells = [
        f"{row['view']} not testable" if pd.isna(row["value"]) else f"{row['view']} {row['value']:.3f}{_range(row)}"
        for _, row in rows.iterrows()
    ]
    return [f"Not held out (corrected with all test wells in view), queries: {', '.join(cells)}."]


def _interval_words(total: pd.DataFrame, confidence: float) -> str:
    """Say what the intervals of the printed table speak of."""
    auroc = auroc_rows(total)
    macro = (auroc["contrast"] == QUERY) & (auroc["perturbation"] == MACRO)
    positive = auroc["contrast"].isin([POSITIVE, POSITIVE_CUTTING]) & (auroc["perturbation"] != MACRO)
    kinds = set(auroc.loc[(macro | positive) & auroc["ci_low"].notna(), "ci_kind"])
    within = intervals.WITHIN_EXPERIMENTS
    words = {intervals.OVER_FOLDS: "over folds", within: f"{WITHIN_MARK} {within}"}
    named = [text for kind, text in words.items() if kind in kinds]
    return f"{confidence:.0%} intervals {', '.join(named)}" if named else "no intervals"


def _score_lines(total: pd.DataFrame) -> list[str]:
    auroc = auroc_rows(total)
    single = auroc[(auroc["contrast"] == QUERY) & (auroc["perturbation"] != MACRO) & auroc["value"].notna()]
    columns = [(f"query ({single['perturbation'].nunique()})", QUERY, MACRO)]
    positives = auroc.loc[(auroc["contrast"] == POSITIVE) & (auroc["perturbation"] != MACRO), "perturbation"]
    columns += [(name, POSITIVE, name) for name in dict.fromkeys(positives)]
    columns += [(f"{name} vs cutting", POSITIVE_CUTTING, name) for name in dict.fromkeys(positives)]
    lookup = auroc.set_index(["view", "contrast", "perturbation"])
    width = max(16, 1 + auroc["view"].str.len().max()) if len(auroc) else 16  # "centerscale + ica" is longer
    header = f"{'view':<{width}}{'reads of test':<15}" + "".join(f"{title:<20}" for title, _, _ in columns)
    lines = [header.rstrip(), "-" * len(header.rstrip())]
    scored = total[(total["metric"] == AUROC) & total["view_minus"].isna() & is_held_out(total)]
    reads = dict(zip(scored["view"], scored["test_data_used"], strict=True))
    for view in in_order(scored["view"]):
        used = reads[view]
        cells = [_cell(lookup, (view, contrast, name)) for _, contrast, name in columns]
        lines.append((f"{view:<{width}}{used:<15}" + "".join(f"{cell:<20}" for cell in cells)).rstrip())
    return lines


def in_order(names: Iterable[str]) -> list[str]:
    """Return each view once: views in order of appearance, then baselines in theirs."""
    known = list(dict.fromkeys(names))
    return [v for v in known if v not in BASELINES] + [v for v in BASELINES if v in known]


def _cell(lookup: pd.DataFrame, key: tuple[str, str, str]) -> str:
    if key not in lookup.index or pd.isna(lookup.loc[key, "value"]):
        return "not testable"
    row = lookup.loc[key]
    mark = WITHIN_MARK if row["ci_kind"] == intervals.WITHIN_EXPERIMENTS else ""
    return f"{row['value']:.3f}{_range(row)}{mark}"


def _range(row: pd.Series, form: str = ".2f") -> str:
    if pd.isna(row["ci_low"]):
        return " [no interval]"
    return f" [{row['ci_low']:{form}}, {row['ci_high']:{form}}]"


def _control_lines(total: pd.DataFrame) -> list[str]:
    rows = total[total["contrast"] == L2_CONTRAST].set_index("metric")
    if rows.empty or rows["value"].isna().any():
        return ["L2 control: not run (it needs two of pca, rotation, varimax, ica and a testable contrast)."]
    decision, auroc, holds = (float(rows.loc[name, "value"]) for name in L2_METRICS)
    state = "holds" if holds == 1 else "RED: the views are not rotations of each other, or a probe has not converged"
    return [
        f"L2 control ({rows['view'].iloc[0]}): {state} (largest difference of decisions {decision:.1e}, "
        f"of AUROC {auroc:.1e})."
    ]


def _concentration_lines(total: pd.DataFrame, config: Mapping[str, Any]) -> list[str]:
    rows = total[(total["contrast"] == CONCENTRATION_CONTRAST) & (total["metric"] == "concentration_share")]
    known = rows[rows["value"].notna()]
    if known.empty:
        return ["Concentration: not measurable (no component shows a held-out effect)."]
    means = known[known["draw"].isna()].set_index("view")
    draws = known.loc[known["draw"].notna(), "value"]
    parts = [f"{view} {means.loc[view, 'value']:.2f}" for view in means.index if view != ROTATION]
    if len(draws):
        spread = f"{draws.min():.2f} to {draws.max():.2f}"
        parts.append(f"chance {draws.mean():.2f} (mean of {len(draws)} rotations, {spread})")
    share = config["score"]["concentration_share"]
    return [f"Held-out effect in the top {share:.0%} of components, ranked in training: {', '.join(parts)}."]


def _deletion_lines(total: pd.DataFrame) -> list[str]:
    """Say whether dropping the most batch-bound components of ica keeps more of the phenotypes than of rotations."""
    rows = total[
        (total["contrast"] == DELETION_CONTRAST) & (total["metric"] == DELETION_GAIN) & (total["view"] == COMPARED)
        & (total["view_minus"] == ROTATION) & total["value"].notna()
    ]  # fmt: skip
    if rows.empty:
        return []
    row = rows.iloc[0]
    clear = not pd.isna(row["ci_low"]) and row["ci_low"] > 0
    words = "ica holds the batch apart better than chance" if clear else "no sign that ica holds the batch apart"
    return [
        f"Without the components most bound to the batch: phenotype minus batch kept, ica minus rotations "
        f"{row['value']:+.3f}{_range(row, '+.3f')}: {words}."
    ]


def _gap_lines(total: pd.DataFrame) -> list[str]:
    """Say what a new experiment costs the views, on query perturbations."""
    rows = total[
        (total["metric"] == GAP) & (total["contrast"] == QUERY) & (total["perturbation"] == MACRO)
        & total["value"].notna() & ~total["view"].isin(BASELINES)
    ]  # fmt: skip
    if rows.empty:
        return []
    parts = ", ".join(f"{row['view']} {row['value']:+.3f}{_range(row, '+.3f')}" for _, row in rows.iterrows())
    return [f"Trained inside the test experiments instead (other plates, fewer wells), AUROC changes by: {parts}."]


def _training_lines(total: pd.DataFrame) -> list[str]:
    rows = training_rows(total)
    shown = rows[(rows["contrast"] == QUERY) | (rows["perturbation"] != MACRO)]
    if shown.empty:
        return []
    parts = []
    for _, row in shown.iterrows():
        name = "queries" if row["contrast"] == QUERY else row["perturbation"]
        known = not pd.isna(row["value"])
        parts.append(f"{name} {row['value']:+.3f}{_range(row, '+.3f')}" if known else f"{name} not testable")
    return [f"Encoder: {' minus '.join(TRAINING)} (same size, random weights): {', '.join(parts)}."]


def position_lines(total: pd.DataFrame) -> list[str]:
    """Return the warning that position alone explains perturbations, as one line; empty where it explains none.

    Parameters
    ----------
    total
        Rows over folds; see `position_overlap`.
    """
    rows = position_overlap(total)
    rows = rows[(rows["contrast"] == QUERY) & (rows["scope"] == POOLED)]
    overlap = rows["overlap"].to_numpy(np.float64)
    names = rows["perturbation"][overlap < CONFOUNDED].tolist()
    if not names:
        return []
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return [
        f"CONFOUNDED WITH POSITION: {len(names)} of {len(rows)} query perturbations have position_overlap under "
        f"{CONFOUNDED} (median {np.median(overlap):.2f}), so their scores support no claim: {shown}."
    ]


def lines_of_tests(total: pd.DataFrame, config: Mapping[str, Any]) -> list[str]:
    """Return what the tests found, a line a contrast: how many, among how many, and the smallest p there could be.

    Parameters
    ----------
    total
        Rows over folds.
    config
        A complete configuration.
    """
    alpha, rows = config["score"]["alpha"], total[(total["probe"] == L1) & total["draw"].isna() & is_held_out(total)]
    q_rows = rows[rows["metric"] == inference.Q_VALUE]
    views = list(dict.fromkeys(q_rows["view"]))
    view = COMPARED if COMPARED in views else views[0] if views else None
    lines = []
    for contrast, group in q_rows[q_rows["view"] == view].groupby("contrast", sort=False):
        floors = rows[
            (rows["metric"] == inference.P_FLOOR) & (rows["view"] == view) & (rows["contrast"] == contrast)
        ]["value"]  # fmt: skip
        tested = group[group["value"].notna()]
        found = int((tested["value"] <= alpha).sum())
        text = f"  {contrast}: {found} of {len(tested)} at {alpha:g}"
        text += f" ({tested['ci_kind'].iloc[0]}; smallest possible p {floors.min():.1e})" if len(tested) else ""
        alone = int((floors > alpha / max(1, len(tested))).sum()) - (len(group) - len(tested))
        if alone > 0:
            text += f"; {alone} could pass only together with others"
        if len(group) > len(tested):
            text += f"; {len(group) - len(tested)} cannot be tested (floor {floors.max():.1e})"
        lines.append(text + ".")
    head = f"Tests of {view}, cases above references within plates (rank sum, one-sided, of the tested experiments):"
    return [head, *lines] if lines else []


def _verdict(total: pd.DataFrame) -> list[str]:
    order = {view: i for i, view in enumerate(in_order(total.loc[total["metric"] == AUROC, "view"]))}
    rows = total[
        (total["contrast"] == QUERY) & (total["perturbation"] == MACRO) & (total["scope"] == POOLED)
        & (total["metric"] == AUROC) & (total["view"] == COMPARED) & total["view_minus"].notna()
        & total["value"].notna()
    ]  # fmt: skip
    if rows.empty:
        return ["ICA cannot be judged: no query perturbation is testable, or ica is not among the views."]
    lines, groups = ["Query perturbations, AUROC of ica minus that of"], {"beats": [], "loses": [], "open": []}
    for _, row in rows.sort_values("view_minus", key=lambda names: names.map(order)).iterrows():
        low, high = row["ci_low"], row["ci_high"]
        outcome = "open" if pd.isna(low) or low <= 0 <= high else "beats" if low > 0 else "loses"
        groups[outcome].append(row["view_minus"])
        lines.append(f"  {row['view_minus']:<18}{row['value']:+.3f}{_range(row, '+.3f')}")
    return [*lines, f"Verdict: {_sentence(groups)}"]


def _sentence(groups: Mapping[str, Sequence[str]]) -> str:
    def named(names: Sequence[str]) -> str:
        return ", ".join(names)

    rivals = [v for v in (*groups["loses"], *groups["open"]) if v == ROTATION or v not in BASELINES]
    if not groups["loses"] and not groups["open"]:
        return f"ICA beats every other row ({named(groups['beats'])}) on held-out experiments."
    beaten = [v for v in groups["beats"] if v == ROTATION or v not in BASELINES]
    if not rivals:
        parts = ["ICA beats every other view on held-out experiments."]
    elif beaten:
        parts = [f"ICA does not beat {named(rivals)} on held-out experiments."]
    else:
        parts = ["ICA beats no other view on held-out experiments."]
    if groups["beats"]:
        parts.append(f"It is above {named(groups['beats'])}.")
    if groups["loses"]:
        parts.append(f"It is below {named(groups['loses'])}.")
    if groups["open"]:
        reason = "the interval of the difference contains 0, or there is none"
        parts.append(f"It cannot be told apart from {named(groups['open'])}: {reason}.")
    return " ".join(parts)


def _footnotes(total: pd.DataFrame, decided: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    auroc = total[(total["metric"] == AUROC) & (total["probe"] == L1) & (total["scope"] == POOLED)]
    missing = auroc[auroc["value"].isna() & (auroc["perturbation"] != MACRO) & auroc["view_minus"].isna()]
    missing = missing.drop_duplicates(["contrast", "perturbation", "reason"])
    for reason, group in missing.groupby("reason", sort=True):
        names = sorted(set(group["perturbation"]))
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        text = "; ".join(REASONS[r] for r in reason.split(";"))
        lines.append(f"Not testable, {len(names)}: {shown} ({text}).")
    absent = {name: why for record in decided for name, why in record.get("absent_baselines", {}).items()}
    lines += [f"No row {name}: {why}." for name, why in absent.items()]
    rules = sorted({record["fraction_rule"] for record in decided} - {"everywhere"})
    if rules:
        lines.append(
            f"No perturbation is in every training experiment of some folds; lambda was chosen by: {', '.join(rules)} "
            "(widespread: on those in most experiments; default: the middle candidate)."
        )
    probes = [p for record in decided for view in record["probes"].values() for p in view.values()]
    bad = sum(not p["converged"] for p in probes)
    if bad:
        lines.append(f"{bad} of {len(probes)} L1 probes have not converged; read their scores with care.")
    lines.append(f"AUROC {WITHIN}, sparsity and every single perturbation are in the table of scores.")
    return lines
