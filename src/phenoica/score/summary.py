"""From the rows of single folds to the table of scores, and to the few lines a person reads first.

Fold tables and fold records come in. Scores of different fold models are never ranked together: values of folds are
averaged, by the number of case-reference pairs, with the interval that the number of experiments allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from phenoica import schema
from phenoica.score import intervals, names
from phenoica.score.baselines import BASELINES, POSITION_LINEAR, POSITION_TREES, RANDOM_ENCODER
from phenoica.score.contrasts import POSITIVE, POSITIVE_CUTTING, QUERY, REASONS
from phenoica.score.fold import (
    AUROC,
    CONCENTRATION_CONTRAST,
    L1,
    L2_CONTRAST,
    L2_METRICS,
    PAIRS,
    POOLED,
    VARIANCE,
    WITHIN,
    table,
)  # fmt: skip
from phenoica.score.intervals import Interval, delong_interval, t_interval, weighted_mean
from phenoica.score.names import MACRO_AVERAGED, PREVALENCE

MACRO = "macro"
OVER_FOLDS = -1
COMPARED = "ica"  # the view that the verdict is about; every other one is subtracted from it
TRAINING = ("raw", RANDOM_ENCODER)  # the pair whose difference says what the encoder's training adds
ROTATION = "rotation"
CONFOUNDED = 0.5  # position_overlap under which the well's position alone explains a perturbation
WITHIN_MARK = "*"  # in the printed table, on intervals within these experiments
_UNBOUNDED = ("participation",)
# what identifies one score across folds
_SCORE = ["contrast", "perturbation", "view", "test_data_used", "probe", "metric", "scope", "draw"]


def over_folds(
    folds: Sequence[pd.DataFrame], decided: Sequence[Mapping[str, Any]], config: Mapping[str, Any]
) -> pd.DataFrame:
    """Return the table of scores.

    Parameters
    ----------
    folds
        Rows of each fold (`fold.FOLD_COLUMNS`).
    decided
        The record of each fold, in the same order.
    config
        A complete configuration.

    Returns
    -------
    DataFrame
        `schema.SCORE_COLUMNS`. Beside the rows of the folds: rotation with draw null is the mean over the probed (or,
        for concentration, all) draws; perturbation "macro" is the mean over perturbations, each weighing alike;
        view_minus is filled in rows that hold the difference of ica and another view, or of the pair `TRAINING`, for
        macro averages (of the differences of single perturbations, where both views have a value) and positive
        controls; fold -1 is over folds, with the interval (t over folds from four test experiments on, else "within
        these experiments"); beside a value its reason tells why there is no interval or why folds are left out.
    """
    rows = pd.concat([_with_rotation_mean(frame) for frame in folds], ignore_index=True)
    rows = pd.concat([rows, table(_differences(rows), rows.columns)], ignore_index=True)
    held_out = {int(record["fold"]): len(record["test_experiments"]) for record in decided}
    macros = table(_macro_rows(rows, held_out), rows.columns)
    kept = rows["view_minus"].isna() | rows["contrast"].isin([POSITIVE, POSITIVE_CUTTING])
    by_fold = pd.concat([rows[kept], macros], ignore_index=True)
    joined = _join(by_fold, _macro_centres(rows), config["score"]["confidence"])
    scores = pd.concat([by_fold, table(joined, rows.columns)], ignore_index=True)
    return table(scores[list(schema.SCORE_COLUMNS)].to_dict("records"), schema.SCORE_COLUMNS)


def _groups(frame: pd.DataFrame, columns: Sequence[str]) -> Iterator[tuple[dict[str, Any], pd.DataFrame]]:
    """Yield each group in order of appearance, with its key as a dict; null keys are keys like any other."""
    for key, group in frame.groupby(list(columns), sort=False, dropna=False):
        key = key if isinstance(key, tuple) else (key,)
        yield {c: None if pd.isna(v) else v for c, v in zip(columns, key, strict=True)}, group


def _reasons(group: pd.DataFrame) -> str | None:
    """Return the reasons of a group's null values, joined; None when it has none."""
    reasons = sorted(set(group.loc[group["reason"].notna(), "reason"]))
    return ";".join(reasons) if reasons else None


def _with_rotation_mean(frame: pd.DataFrame) -> pd.DataFrame:
    draws = frame[(frame["view"] == ROTATION) & frame["draw"].notna()]
    rows = []
    for _, group in _groups(draws, [c for c in _SCORE if c != "draw"]):
        known = group[group["value"].notna()]
        row = group.iloc[0].to_dict()
        row.update({
            "draw": None, "value": known["value"].mean() if len(known) else None,
            # the mean of dependent draws varies at most as much as one of them does on average
            VARIANCE: known[VARIANCE].mean() if len(known) and known[VARIANCE].notna().all() else None,
            "reason": None if len(known) else _reasons(group),
        })  # fmt: skip
        rows.append(row)
    return pd.concat([frame, table(rows, frame.columns)], ignore_index=True) if rows else frame


def _of_probe(rows: pd.DataFrame) -> pd.Series:
    """Say which rows are of the L1 probe, or of the trees that stand beside it for the well's position."""
    return (rows["probe"] == L1) | (rows["view"] == POSITION_TREES)


def _macro_rows(rows: pd.DataFrame, held_out: Mapping[int, int]) -> list[dict[str, Any]]:
    """Average each contrast, also the differences of two views, over its perturbations, in every fold."""
    single = rows[rows["metric"].isin(MACRO_AVERAGED)]
    result = []
    for key, group in _groups(single, [c for c in _SCORE if c != "perturbation"] + ["view_minus", "fold"]):
        known = group[group["value"].notna()]
        result.append({
            **key, "perturbation": MACRO, "n_components": group["n_components"].iloc[0],
            "value": known["value"].mean() if len(known) else None,
            "n_case": known["n_case"].sum(), "n_reference": known["n_reference"].max() if len(known) else 0,
            "n_experiments": held_out[key["fold"]] if len(known) else 0,
            PAIRS: known[PAIRS].sum(), "reason": None if len(known) else _reasons(group),
        })  # fmt: skip
    return result


def _differences(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Subtract held-out AUROC, perturbation by perturbation and fold by fold: ica and every other view, and `TRAINING`.

    Averages are taken of these differences, so both views are averaged over the same perturbations and folds.
    """
    single = rows["draw"].isna()  # rotation: the mean over draws
    rows = rows[single & (rows["metric"] == AUROC) & _of_probe(rows)]
    by_view: dict[str, dict[tuple, dict[str, Any]]] = {}
    for row in rows.to_dict("records"):
        key = tuple(row[c] for c in ("contrast", "perturbation", "scope", "fold"))
        by_view.setdefault(row["view"], {})[key] = row
    pairs = [(COMPARED, view) for view in by_view if view != COMPARED] + [TRAINING]
    return [
        _difference(by_view[first][key], row)
        for first, second in pairs for key, row in by_view.get(second, {}).items() if key in by_view.get(first, {})
    ]  # fmt: skip


def _difference(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of the first view's value minus the second's; without one of them, its reason."""
    known = not (pd.isna(first["value"]) or pd.isna(second["value"]))
    return {
        **second, "view": first["view"], "view_minus": second["view"], "n_components": first["n_components"],
        "test_data_used": _widest(first["test_data_used"], second["test_data_used"]),
        "value": first["value"] - second["value"] if known else None, VARIANCE: None,
        "reason": None if known else first["reason"] if pd.isna(first["value"]) else second["reason"],
    }  # fmt: skip


def _widest(*used: str) -> str:
    return max(used, key=schema.TEST_DATA_USED.index)


def _join(by_fold: pd.DataFrame, centres: Mapping[tuple, float], confidence: float) -> list[dict[str, Any]]:
    """Return the rows over folds (fold -1); a fold without a value leaves its reason in the row."""
    rows = []
    for key, group in _groups(by_fold, [*_SCORE, "view_minus"]):
        known = group[group["value"].notna()]
        row = {
            **key, "n_components": group["n_components"].iloc[0], "fold": OVER_FOLDS,
            "n_case": known["n_case"].sum(), "n_reference": known["n_reference"].sum(),
            "n_experiments": known["n_experiments"].sum(), "reason": _reasons(group),
        }  # fmt: skip
        if key["contrast"] == L2_CONTRAST and len(known):
            worst = known["value"].min() if key["metric"] == L2_METRICS[-1] else known["value"].max()
            row["value"] = worst  # one fold in which the control fails is enough
        elif len(known):
            centre = centres.get(tuple(key[c] for c in _CENTRE))
            interval = _interval(key, known, confidence, centre)
            row.update({
                "value": interval.value, "ci_low": interval.low, "ci_high": interval.high, "ci_kind": interval.kind,
                "reason": ";".join(filter(None, [row["reason"], interval.reason])) or None,
            })  # fmt: skip
        rows.append(row)
    return rows


_CENTRE = ["contrast", "view", "probe", "metric", "scope", "draw", "view_minus"]


def _macro_centres(rows: pd.DataFrame) -> dict[tuple, float]:
    """Return each macro average over folds: perturbations weigh alike, whatever number of folds and pairs they have."""
    single = rows[rows["metric"].isin(MACRO_AVERAGED) & rows["value"].notna()]
    values: dict[tuple, list[float]] = {}
    for key, group in _groups(single, [*_CENTRE, "perturbation"]):
        found = weighted_mean(group["value"], _weights(key, group))
        values.setdefault(tuple(key[c] for c in _CENTRE), []).append(found)
    return {key: float(np.mean(found)) for key, found in values.items()}


def _weights(key: Mapping[str, Any], group: pd.DataFrame) -> np.ndarray:
    """Return the weight of each fold: the pairs behind an AUROC; other metrics weigh folds alike."""
    return group[PAIRS].to_numpy(np.float64) if key["metric"] == AUROC else np.ones(len(group))


def _interval(key: Mapping[str, Any], known: pd.DataFrame, confidence: float, centre: float | None) -> Interval:
    values, weights = known["value"].to_numpy(), _weights(key, known)
    macro = key.get("perturbation") == MACRO
    centre = centre if macro else None
    if key["metric"] == PREVALENCE:  # a chance level: it has no error
        return Interval(weighted_mean(values, weights) if centre is None else centre)
    if int(known["n_experiments"].sum()) >= intervals.MIN_EXPERIMENTS:
        bounds = names.bounds(key["metric"], difference=key["view_minus"] is not None)
        if key["metric"] in _UNBOUNDED:
            bounds = (1.0, float(known["n_components"].max()))
        elif key["metric"] == "concentration_corrected":
            bounds = (-1.0, 1.0)  # below 0 when the top holds less than its share
        return t_interval(values, weights, confidence, bounds=bounds, centre=centre)
    if key["metric"] == AUROC and not macro and key["view_minus"] is None:
        variances = [None if pd.isna(v) else float(v) for v in known[VARIANCE]]
        return delong_interval(values, variances, weights, confidence)
    # wells of two perturbations, or of two views, share references: no simple interval within experiments is right
    return Interval(weighted_mean(values, weights) if centre is None else centre, reason="under_4_experiments")


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
    lines += [*_concentration_lines(total, config), *_training_lines(total), *position_lines(total)]
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


def _auroc_rows(total: pd.DataFrame) -> pd.DataFrame:
    return total[
        (total["metric"] == AUROC) & _of_probe(total) & (total["scope"] == POOLED) & total["view_minus"].isna()
        & total["draw"].isna()
    ]  # fmt: skip


def _interval_words(total: pd.DataFrame, confidence: float) -> str:
    """Say what the intervals of the printed table speak of."""
    auroc = _auroc_rows(total)
    macro = (auroc["contrast"] == QUERY) & (auroc["perturbation"] == MACRO)
    positive = auroc["contrast"].isin([POSITIVE, POSITIVE_CUTTING]) & (auroc["perturbation"] != MACRO)
    kinds = set(auroc.loc[(macro | positive) & auroc["ci_low"].notna(), "ci_kind"])
    within = intervals.WITHIN_EXPERIMENTS
    words = {intervals.OVER_FOLDS: "over folds", within: f"{WITHIN_MARK} {within}"}
    named = [text for kind, text in words.items() if kind in kinds]
    return f"{confidence:.0%} intervals {', '.join(named)}" if named else "no intervals"


def _score_lines(total: pd.DataFrame) -> list[str]:
    auroc = _auroc_rows(total)
    single = auroc[(auroc["contrast"] == QUERY) & (auroc["perturbation"] != MACRO) & auroc["value"].notna()]
    columns = [(f"query ({single['perturbation'].nunique()})", QUERY, MACRO)]
    positives = auroc.loc[(auroc["contrast"] == POSITIVE) & (auroc["perturbation"] != MACRO), "perturbation"]
    columns += [(name, POSITIVE, name) for name in dict.fromkeys(positives)]
    columns += [(f"{name} vs cutting", POSITIVE_CUTTING, name) for name in dict.fromkeys(positives)]
    lookup = auroc.set_index(["view", "contrast", "perturbation"])
    header = f"{'view':<16}{'reads of test':<15}" + "".join(f"{title:<20}" for title, _, _ in columns)
    lines = [header.rstrip(), "-" * len(header.rstrip())]
    order = total.loc[(total["metric"] == AUROC) & total["view_minus"].isna(), ["view", "test_data_used"]]
    for view, used in order.drop_duplicates().itertuples(index=False):
        cells = [_cell(lookup, (view, contrast, name)) for _, contrast, name in columns]
        lines.append((f"{view:<16}{used:<15}" + "".join(f"{cell:<20}" for cell in cells)).rstrip())
    return lines


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
        return ["L2 control: not run (it needs two of pca, rotation, ica and a testable contrast)."]
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


def training_rows(total: pd.DataFrame) -> pd.DataFrame:
    """Return what the encoder's training adds: the rows over folds with the difference of the pair `TRAINING`.

    Pooled AUROC of the L1 probe: the macro average over query perturbations, that over positive controls, and single
    positive controls. Empty where the pair was not scored.
    """
    rows = total[
        (total["metric"] == AUROC) & (total["probe"] == L1) & (total["scope"] == POOLED)
        & (total["view"] == TRAINING[0]) & (total["view_minus"] == TRAINING[1])
    ]  # fmt: skip
    query = (rows["contrast"] == QUERY) & (rows["perturbation"] == MACRO)
    positive = rows["contrast"] == POSITIVE
    macro = rows["perturbation"] == MACRO
    return pd.concat([rows[query], rows[positive & macro], rows[positive & ~macro]])


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

    position_overlap of a perturbation is min(1, 2 (1 - A)), A the held-out AUROC of a model that sees the well's
    position only (here the linear one); under `CONFOUNDED` its wells and the references sit apart.

    Parameters
    ----------
    total
        Rows over folds.
    """
    rows = _auroc_rows(total)
    rows = rows[
        (rows["contrast"] == QUERY) & (rows["perturbation"] != MACRO) & (rows["view"] == POSITION_LINEAR)
        & rows["value"].notna()
    ]  # fmt: skip
    overlap = np.minimum(1.0, 2.0 * (1.0 - rows["value"].to_numpy(np.float64)))
    names = rows["perturbation"][overlap < CONFOUNDED].tolist()
    if not names:
        return []
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return [
        f"CONFOUNDED WITH POSITION: {len(names)} of {len(rows)} query perturbations have position_overlap under "
        f"{CONFOUNDED} (median {np.median(overlap):.2f}), so their scores support no claim: {shown}."
    ]


def _verdict(total: pd.DataFrame) -> list[str]:
    order = {view: i for i, view in enumerate(dict.fromkeys(total.loc[total["metric"] == AUROC, "view"]))}
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
        lines.append(f"  {row['view_minus']:<16}{row['value']:+.3f}{_range(row, '+.3f')}")
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
