"""What is found again of known biology: related genes look alike, compounds look like the loss of their target.

consensus.h5ad (the exploration fit) and tables of known relations, given by path, come in; a tidy table of recall,
average precision and AUROC with their chance goes out. Rules as in METHODS 6: gene pairs in the 5 % tails of all pairs,
compound-gene pairs active up to 1 uM against seeded random negatives. Nothing is bundled.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from phenoica import schema
from phenoica.errors import ScoreError
from phenoica.files import write_csv
from phenoica.score.consensus import RAW, cosines
from phenoica.score.metrics import auroc, average_precision, chance_average_precision

if TYPE_CHECKING:
    import anndata

TAIL = 0.05  # of all pairs, on either side
ACTIVE_UM, INACTIVE_UM = 1.0, 10.0  # active up to the first, left out up to the second
MIN_NEGATIVES = 20
COLUMNS = ("view", "score", "setting", "value", "chance", "p", "sd", "n", "n_known", "reason")
RECALL, PRECISION, ACTIVITY_AUROC = "gene_gene_recall", "compound_gene_average_precision", "compound_gene_auroc"


def gene_gene_recall(
    similarity: np.ndarray, known: np.ndarray, allowed: np.ndarray | None = None, *, draws: int, seed: int
) -> dict[str, Any]:
    """Return the share of known pairs among the 5 % most similar and the 5 % most opposite pairs.

    Parameters
    ----------
    similarity
        float (g, g), cosine of genes; symmetric.
    known
        bool (g, g), symmetric: related genes. The diagonal is not read.
    allowed
        bool (g, g), symmetric: pairs that count at all; None for every pair.
    draws
        Random relabellings of the genes behind p.
    seed
        Their seed.

    Returns
    -------
    dict
        value; chance (0.1 up to ties); p, (1 + relabellings that reach the value) / (1 + draws): genes, not pairs,
        change places, because pairs of one gene are no independent evidence; n pairs; n_known pairs; reason
        (no_known_pair) where there is no value.
    """
    g = len(similarity)
    upper = np.triu_indices(g, 1)
    inside = np.ones(len(upper[0]), dtype=bool) if allowed is None else allowed[upper]
    n_known = int((known[upper] & inside).sum())
    base = {"n": int(inside.sum()), "n_known": n_known}
    if not n_known:
        return {**base, "value": None, "chance": None, "p": None, "reason": "no_known_pair"}
    low, high = np.quantile(similarity[upper][inside], [TAIL, 1 - TAIL])
    tail = (similarity <= low) | (similarity >= high)

    def recall(order: np.ndarray) -> float:
        moved = tail[np.ix_(order, order)][upper]
        return float(moved[known[upper] & inside].mean())

    value, rng = recall(np.arange(g)), np.random.default_rng(seed)
    null = np.array([recall(rng.permutation(g)) for _ in range(draws)])
    p = (1 + int((null >= value - 1e-12).sum())) / (1 + draws)
    return {**base, "value": value, "chance": float(tail[upper][inside].mean()), "p": p, "reason": None}


def compound_gene_scores(
    similarity: np.ndarray, active: np.ndarray, candidates: np.ndarray, *, draws: int, seed: int
) -> dict[str, dict[str, Any]]:
    """Return how well compounds that act on a gene are ranked before others that do not, by |cosine| with the gene.

    For every gene with n active compounds max(2 n, 20) negatives are drawn from the candidates (all, where there are
    fewer); genes weigh alike, then draws do.

    Parameters
    ----------
    similarity
        float (genes, compounds), |cosine|; compounds in the order of their sorted names. NaN: not measured.
    active
        bool (genes, compounds): known to act.
    candidates
        bool (genes, compounds): may be drawn as negatives.
    draws
        Sets of negatives.
    seed
        Of the draws; draw i has the seed (seed, i).

    Returns
    -------
    dict
        compound_gene_average_precision and compound_gene_auroc, each with value, chance, sd over draws, n (genes),
        n_known (active pairs), reason (no_active_compound).
    """
    measured = np.isfinite(similarity)
    active, candidates = active & measured, candidates & measured & ~active
    genes = np.flatnonzero(active.any(axis=1) & candidates.any(axis=1))
    base = {"n": len(genes), "n_known": int(active[genes].sum())}
    if not len(genes):
        nothing = {**base, "value": None, "chance": None, "sd": None, "reason": "no_active_compound"}
        return {PRECISION: nothing, ACTIVITY_AUROC: dict(nothing)}
    found, chance = np.empty((draws, len(genes), 2)), np.empty((draws, len(genes)))
    for draw in range(draws):
        rng = np.random.default_rng([seed, draw])
        for i, gene in enumerate(genes):
            positive, pool = np.flatnonzero(active[gene]), np.flatnonzero(candidates[gene])
            negative = rng.choice(pool, min(len(pool), max(2 * len(positive), MIN_NEGATIVES)), replace=False)
            labels = np.arange(len(positive) + len(negative)) < len(positive)
            scores = similarity[gene, np.r_[positive, negative]]
            found[draw, i] = average_precision(labels, scores), auroc(labels, scores)
            chance[draw, i] = chance_average_precision(len(positive), len(labels))
    by_draw = found.mean(axis=1)
    spread = by_draw.std(axis=0, ddof=1) if draws > 1 else [None, None]
    levels = {PRECISION: float(chance.mean()), ACTIVITY_AUROC: 0.5}
    return {
        name: {**base, "value": float(by_draw[:, j].mean()), "chance": levels[name],
               "sd": None if draws == 1 else float(spread[j]), "reason": None}
        for j, name in enumerate((PRECISION, ACTIVITY_AUROC))
    }  # fmt: skip


def known_biology_table(
    adata: anndata.AnnData, config: Mapping[str, Any], *, gene_pairs: pd.DataFrame | None = None,
    gene_positions: pd.DataFrame | None = None, compound_targets: pd.DataFrame | None = None,
) -> pd.DataFrame:  # fmt: skip
    """Compare the consensus of every view with what is known.

    Parameters
    ----------
    adata
        consensus.h5ad.
    config
        A complete configuration.
    gene_pairs
        Columns gene_a, gene_b: a row a relation; direction and repeats do not matter.
    gene_positions
        Columns gene, chromosome, arm: recall is given without pairs on one arm as well. Pairs with a gene of unknown
        arm are left out there.
    compound_targets
        Columns compound, gene, activity_um. Of several rows for one pair the strongest activity counts.

    Returns
    -------
    DataFrame
        `COLUMNS`: score gene_gene_recall (setting all_pairs, other_arms), compound_gene_average_precision and
        compound_gene_auroc (setting max_over_doses, and dose_<concentration> each).
    """
    draws, seed = config["known_biology"]["draws"], config["seed"]
    rows: list[dict[str, Any]] = []
    for view, values in _views(adata).items():
        if gene_pairs is not None:
            rows += [{"view": view, "score": RECALL, **row}
                     for row in _recalls(adata.obs, values, gene_pairs, gene_positions, draws, seed)]  # fmt: skip
        if compound_targets is not None:
            rows += [{"view": view, **row} for row in _activities(adata.obs, values, compound_targets, draws, seed)]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _views(adata: anndata.AnnData) -> dict[str, np.ndarray]:
    found = {RAW: adata.X, **{v: adata.obsm[k] for v, k in schema.VIEW_KEYS.items() if k in adata.obsm}}
    return {view: np.asarray(values, dtype=np.float64) for view, values in found.items()}


def _is_compound(obs: pd.DataFrame) -> np.ndarray:
    return (obs[schema.PERTURBATION_TYPE].astype(str).str.upper() == "COMPOUND").to_numpy()


def _genes(obs: pd.DataFrame) -> np.ndarray:
    """Return the rows of genes at the level of perturbations, without cutting controls."""
    cutting = (obs[schema.CONTROL].astype(str) == schema.CUTTING).to_numpy()
    return (obs[schema.LEVEL].astype(str) == schema.PERTURBATION).to_numpy() & ~_is_compound(obs) & ~cutting


def _recalls(
    obs: pd.DataFrame, values: np.ndarray, pairs: pd.DataFrame, positions: pd.DataFrame | None, draws: int, seed: int
) -> list[dict[str, Any]]:
    inside = _genes(obs)
    genes = obs.loc[inside, schema.PERTURBATION].astype(str).tolist()
    place = {gene: i for i, gene in enumerate(genes)}
    known = np.zeros((len(genes), len(genes)), dtype=bool)
    for a, b in zip(pairs["gene_a"].astype(str), pairs["gene_b"].astype(str), strict=True):
        if a in place and b in place and a != b:
            known[place[a], place[b]] = known[place[b], place[a]] = True
    similarity = cosines(values[inside])
    rows = [{"setting": "all_pairs", **gene_gene_recall(similarity, known, draws=draws, seed=seed)}]
    if positions is not None:
        arm_of = {
            str(row["gene"]): f"{row['chromosome']}{row['arm']}"
            for row in positions.dropna(subset=["chromosome", "arm"]).to_dict("records")
        }
        arms = np.array([arm_of.get(gene, "") for gene in genes], dtype=object)
        allowed = (arms[:, None] != arms[None, :]) & (arms != "")[:, None] & (arms != "")[None, :]
        rows.append({"setting": "other_arms", **gene_gene_recall(similarity, known, allowed, draws=draws, seed=seed)})
    return rows


def _activities(
    obs: pd.DataFrame, values: np.ndarray, targets: pd.DataFrame, draws: int, seed: int
) -> list[dict[str, Any]]:
    gene_rows = np.flatnonzero(_genes(obs))
    genes = obs[schema.PERTURBATION].astype(str).to_numpy()[gene_rows]
    guides = np.flatnonzero((obs[schema.LEVEL].astype(str) == schema.GUIDE).to_numpy() & _is_compound(obs))
    names = obs[schema.PERTURBATION].astype(str).to_numpy()[guides]
    compounds = sorted(set(names))
    doses = obs[schema.CONCENTRATION].to_numpy(np.float64)[guides]
    strongest = targets.assign(
        compound=targets["compound"].astype(str), gene=targets["gene"].astype(str)
    ).groupby(["gene", "compound"])["activity_um"].min()  # fmt: skip
    active = np.zeros((len(genes), len(compounds)), dtype=bool)
    candidates = np.ones_like(active)
    of_gene, of_compound = {g: i for i, g in enumerate(genes)}, {c: i for i, c in enumerate(compounds)}
    for (gene, compound), activity in strongest.items():
        if gene in of_gene and compound in of_compound:
            active[of_gene[gene], of_compound[compound]] = activity <= ACTIVE_UM
            candidates[of_gene[gene], of_compound[compound]] = activity > INACTIVE_UM
    length = np.linalg.norm(values, axis=1, keepdims=True)
    unit = np.divide(values, length, out=np.zeros_like(values), where=length > 0)
    alike = np.abs(unit[gene_rows] @ unit[guides].T)
    tables = {"max_over_doses": np.ones(len(guides), dtype=bool)}
    tables |= {f"dose_{dose:g}": doses == dose for dose in sorted(set(doses[np.isfinite(doses)]))}
    rows = []
    for setting, wells in tables.items():
        similarity = np.full(active.shape, np.nan)
        for i in np.flatnonzero(wells):
            column = of_compound[names[i]]
            similarity[:, column] = np.fmax(similarity[:, column], alike[:, i])
        found = compound_gene_scores(similarity, active, candidates, draws=draws, seed=seed)
        rows += [{"score": score, "setting": setting, "p": None, **row} for score, row in found.items()]
    return rows


def read_known(path: str | os.PathLike, columns: tuple[str, ...]) -> pd.DataFrame:
    """Return a table of what is known, text as text.

    Raises
    ------
    ScoreError
        If the file is missing, lacks a column, or an activity is no number of at least 0.
    """
    path = Path(path)
    if not path.is_file():
        raise ScoreError(f"{path}: no such table; mend known_biology in the config or set it to null")
    if path.suffix == ".parquet":
        table = pd.read_parquet(path)
    else:
        table = pd.read_csv(path, dtype=str, keep_default_na=False, na_values=[""])
    missing = [c for c in columns if c not in table.columns]
    if missing:
        raise ScoreError(f"{path}: columns {', '.join(missing)} are missing; it has {', '.join(table.columns)}")
    if "activity_um" in columns:
        numbers = pd.to_numeric(table["activity_um"], errors="coerce")
        bad = ~(numbers >= 0)
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            raise ScoreError(
                f"{path}: activity_um of row {row + 1} is {table['activity_um'].iloc[row]!r}, not a number of at least "
                "0; give it in micromolar, or leave the row out"
            )
        table = table.assign(activity_um=numbers)
    return table


_TABLES = {
    "gene_pairs": ("gene_a", "gene_b"),
    "gene_positions": ("gene", "chromosome", "arm"),
    "compound_targets": ("compound", "gene", "activity_um"),
}


def write_known_biology(
    consensus_h5ad: str | os.PathLike, out_csv: str | os.PathLike, config: Mapping[str, Any],
    **tables: str | os.PathLike | None,
) -> None:  # fmt: skip
    """Write `known_biology_table`.

    Parameters
    ----------
    consensus_h5ad
        Written by `consensus.write_consensus`.
    out_csv
        File to write.
    config
        A complete configuration.
    tables
        Paths gene_pairs, gene_positions, compound_targets, or None; at least one of the first and the last.

    Raises
    ------
    ScoreError
        If nothing known is given, or a table cannot be used.
    """
    import anndata

    known = {name: read_known(path, _TABLES[name]) for name, path in tables.items() if path}
    if not {"gene_pairs", "compound_targets"} & set(known):
        raise ScoreError("no known biology is given; name known_biology.gene_pairs or .compound_targets in the config")
    adata = anndata.read_h5ad(consensus_h5ad)
    write_csv(out_csv, known_biology_table(adata, config, **known))
