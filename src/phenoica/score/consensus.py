"""One vector a guide and one a perturbation, and whether the guides of a gene agree.

disentangled.h5ad comes in; consensus.h5ad (wells averaged to guides, guides to perturbations) and a table of guide
concordance go out. The vectors are of the exploration fit, which has seen all experiments: they are for exploring and
for the comparison with known biology, and no held-out claim rests on them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from phenoica import schema
from phenoica.errors import ControlsError, ScoreError
from phenoica.files import write_csv, write_h5ad
from phenoica.score.replicates import centred

if TYPE_CHECKING:
    import anndata

RAW, ALL = "raw", "all"
CONCORDANCE_COLUMNS = ("view", "perturbation", "n_guides", "n_experiments", "within", "between", "p", "reason")
_KEYS = [schema.PERTURBATION, schema.TREATMENT, schema.CONCENTRATION]


def consensus(adata: anndata.AnnData, config: Mapping[str, Any]) -> anndata.AnnData:
    """Average wells to guides and guides to perturbations.

    Every well minus the mean of its batch's fit controls; a guide (a treatment at one concentration) is the mean of its
    wells, a perturbation the mean of its guides, each weighing alike. Negative controls are the origin and have no row.
    A cutting control goes by its guide, as its gene may be a query too.

    Parameters
    ----------
    adata
        disentangled.h5ad.
    config
        A complete configuration; with `qc.exclude_flagged` wells that did not pass are left out.

    Returns
    -------
    AnnData
        obs: level (guide or perturbation), perturbation, treatment, concentration, perturbation_type, control, n_wells,
        n_guides, n_experiments; X and obsm (X_pca, X_ica, X_tvn, X_pca_cs as far as fitted) float32. uns phenoica as
        in disentangled.h5ad plus `consensus_of` and `consensus_origin`.

    Raises
    ------
    ControlsError
        If a batch has no fit control and `disentangle.missing_controls` is "error".
    ScoreError
        If there is no well but negative controls.
    """
    import anndata as ad

    obs = _labelled(adata.obs)
    kept = (obs[schema.CONTROL] != schema.NEGATIVE).to_numpy()
    if config["qc"]["exclude_flagged"]:
        kept &= obs[schema.QC_PASS].astype(bool).to_numpy()
    if not kept.any():
        raise ScoreError("there is no perturbation to average: all wells are negative controls, or none passed qc")
    batch_key = config["plates"]["batch_key"]
    guides, codes = _guides(obs[kept])
    perturbations, of = _perturbations(guides, obs[kept], codes)
    frame = pd.concat([guides, perturbations], ignore_index=True)
    frame.index = pd.Index(_names(frame), name="consensus")
    matrices = {RAW: adata.X, **{k: adata.obsm[k] for k in schema.VIEW_KEYS.values() if k in adata.obsm}}
    found = {}
    for key, values in matrices.items():
        origin = _origin(np.asarray(values, dtype=np.float64), obs, batch_key, config)[kept]
        guide = _means(origin, codes, len(guides))
        found[key] = np.vstack([guide, _means(guide, of, len(perturbations))]).astype(np.float32)
    result = ad.AnnData(found.pop(RAW), obs=frame, var=pd.DataFrame(index=adata.var_names), obsm=found)
    result.uns[schema.UNS] = {
        **adata.uns[schema.UNS], "consensus_of": "exploration fit",
        "consensus_origin": f"mean of the fit controls of each {batch_key}",
    }  # fmt: skip
    return result


def _labelled(obs: pd.DataFrame) -> pd.DataFrame:
    obs = obs.copy()
    for name in (schema.PERTURBATION, schema.TREATMENT, schema.PERTURBATION_TYPE, schema.CONTROL, schema.EXPERIMENT):
        obs[name] = obs[name].astype(str)
    cutting = obs[schema.CONTROL] == schema.CUTTING
    obs[schema.PERTURBATION] = obs[schema.PERTURBATION].where(~cutting, obs[schema.TREATMENT])
    return obs


def _guides(obs: pd.DataFrame) -> tuple[pd.DataFrame, np.ndarray]:
    """Return a row a guide and the guide of each well."""
    groups = obs.groupby(_KEYS, sort=True, dropna=False, observed=True)
    codes = groups.ngroup().to_numpy()
    table = groups.agg(**{
        schema.PERTURBATION_TYPE: (schema.PERTURBATION_TYPE, "first"), schema.CONTROL: (schema.CONTROL, "first"),
        schema.N_WELLS: (schema.CONTROL, "size"), schema.N_EXPERIMENTS: (schema.EXPERIMENT, "nunique"),
    }).reset_index()  # fmt: skip
    return table.assign(**{schema.LEVEL: schema.GUIDE, schema.N_GUIDES: 1}), codes


def _perturbations(guides: pd.DataFrame, obs: pd.DataFrame, codes: np.ndarray) -> tuple[pd.DataFrame, np.ndarray]:
    """Return a row a perturbation and the perturbation of each guide."""
    groups = guides.groupby(schema.PERTURBATION, sort=True)
    of = groups.ngroup().to_numpy()
    table = groups.agg(**{
        schema.PERTURBATION_TYPE: (schema.PERTURBATION_TYPE, "first"), schema.CONTROL: (schema.CONTROL, "first"),
        schema.N_WELLS: (schema.N_WELLS, "sum"), schema.N_GUIDES: (schema.N_WELLS, "size"),
    }).reset_index()  # fmt: skip
    experiments = obs.groupby(of[codes])[schema.EXPERIMENT].nunique()
    return table.assign(**{
        schema.LEVEL: schema.PERTURBATION, schema.TREATMENT: "", schema.CONCENTRATION: np.nan,
        schema.N_EXPERIMENTS: experiments.reindex(range(len(table))).to_numpy(),
    }), of  # fmt: skip


def _names(frame: pd.DataFrame) -> list[str]:
    """Return unique row names: the perturbation; for guides with treatment and, where there is one, concentration."""
    names = []
    for row in frame.to_dict("records"):
        dose = "" if pd.isna(row[schema.CONCENTRATION]) else f" {row[schema.CONCENTRATION]:g}"
        guide = row[schema.LEVEL] == schema.GUIDE
        names.append(f"guide: {row[schema.PERTURBATION]} / {row[schema.TREATMENT]}{dose}" if guide
                     else f"perturbation: {row[schema.PERTURBATION]}")  # fmt: skip
    return names


def _origin(values: np.ndarray, obs: pd.DataFrame, batch_key: str, config: Mapping[str, Any]) -> np.ndarray:
    moved = centred(values, obs, batch_key)
    lost = np.isnan(moved).all(axis=1)
    if not lost.any():
        return moved
    fit = (obs[schema.CONTROL_ROLE].astype(str) == schema.FIT).to_numpy()
    if config["disentangle"]["missing_controls"] == "error" or not fit.any():
        batches = sorted(set(obs.loc[lost, batch_key].astype(str)))
        raise ControlsError(
            f"no fit control in {batch_key} {', '.join(batches[:10])}: a consensus needs an origin; set "
            "disentangle.missing_controls to pooled to take the fit controls of all batches"
        )
    moved[lost] = values[lost] - values[fit].mean(axis=0)
    return moved


def _means(values: np.ndarray, codes: np.ndarray, n: int) -> np.ndarray:
    total = np.zeros((n, values.shape[1]))
    np.add.at(total, codes, values)
    return total / np.bincount(codes, minlength=n)[:, None]


def cosines(values: np.ndarray) -> np.ndarray:
    """Return the cosine of every pair of rows, float64 (n, n); a row of length 0 has cosine 0 with all others."""
    values = np.asarray(values, dtype=np.float64)
    length = np.linalg.norm(values, axis=1, keepdims=True)
    unit = np.divide(values, length, out=np.zeros_like(values), where=length > 0)
    return np.clip(unit @ unit.T, -1.0, 1.0)


def guide_concordance(
    values: np.ndarray, genes: np.ndarray, experiments: list[frozenset[str]], *, draws: int, seed: int
) -> list[dict[str, Any]]:
    """Say for every gene whether its guides look more alike than guides of different genes.

    Parameters
    ----------
    values
        float (g, d), a row a guide, origin at the controls.
    genes
        (g,) the gene of each guide.
    experiments
        The experiments of each guide.
    draws
        Random sets behind the p values.
    seed
        Their seed.

    Returns
    -------
    list of dict
        `CONCORDANCE_COLUMNS` without view. within: mean cosine over pairs of guides of the gene; between: mean over the
        random sets. A random set has as many guides, each of another gene that shares an experiment with this one, so a
        common batch is in both; p = (1 + sets that reach the gene's cosine) / (1 + draws). Row "all": the mean of
        within over genes, against the means of the same draws. Genes of one guide, and genes for which there are too
        few others, have a reason.
    """
    table, rng = cosines(values), np.random.default_rng(seed)
    names, code_of = np.unique(genes, return_inverse=True)
    rows, within, null = [], [], []
    for number, gene in enumerate(names):
        own = np.flatnonzero(code_of == number)
        where = frozenset().union(*(experiments[i] for i in own))
        base = {"perturbation": str(gene), "n_guides": len(own), "n_experiments": len(where)}
        nothing = {"within": None, "between": None, "p": None}
        if len(own) < 2:
            rows.append({**base, **nothing, "reason": "one_guide"})
            continue
        value = float(table[np.ix_(own, own)][np.triu_indices(len(own), 1)].mean())
        others = [i for i in np.flatnonzero(code_of != number) if experiments[i] & where]
        by_gene = pd.Series(others, dtype=np.int64).groupby(code_of[others]).apply(list).tolist() if others else []
        if len(by_gene) < len(own):
            rows.append({**base, **nothing, "within": value, "reason": "few_other_genes"})
            continue
        found = _random_sets(table, by_gene, len(own), draws, rng)
        within.append(value)
        null.append(found)
        rows.append({**base, "within": value, "between": float(found.mean()), "p": _reached(found, value),
                     "reason": None})  # fmt: skip
    base = {"perturbation": ALL, "n_guides": len(genes), "n_experiments": len(frozenset().union(*experiments))}
    if not within:
        return [{**base, "within": None, "between": None, "p": None, "reason": "one_guide"}, *rows]
    mean, means = float(np.mean(within)), np.mean(null, axis=0)
    return [{**base, "within": mean, "between": float(means.mean()), "p": _reached(means, mean), "reason": None}, *rows]


def _random_sets(
    table: np.ndarray, by_gene: list[list[int]], n: int, draws: int, rng: np.random.Generator
) -> np.ndarray:
    """Return the mean cosine of `draws` sets of `n` guides of different genes, (draws,)."""
    counts = np.array([len(own) for own in by_gene])
    padded = np.array([[*own, *[0] * (counts.max() - len(own))] for own in by_gene])
    chosen = rng.random((draws, len(by_gene))).argsort(axis=1)[:, :n]
    guides = padded[chosen, (rng.random(chosen.shape) * counts[chosen]).astype(np.int64)]
    first, second = np.triu_indices(n, 1)
    return table[guides[:, first], guides[:, second]].mean(axis=1)


def _reached(null: np.ndarray, value: float) -> float:
    return (1 + int((null >= value - 1e-12).sum())) / (1 + len(null))


def concordance_table(adata: anndata.AnnData, config: Mapping[str, Any]) -> pd.DataFrame:
    """Return `guide_concordance` of every view of the exploration fit.

    Doses of one treatment are averaged first: they are no guides of one gene. Guides are those of query perturbations
    and positive controls.

    Parameters
    ----------
    adata
        disentangled.h5ad.
    config
        A complete configuration.

    Returns
    -------
    DataFrame
        `CONCORDANCE_COLUMNS`; view raw, pca, ica, tvn, pca_cs as far as fitted.
    """
    obs = _labelled(adata.obs)
    kept = obs[schema.CONTROL].isin([schema.NONE, schema.POSITIVE]).to_numpy()
    if config["qc"]["exclude_flagged"]:
        kept &= obs[schema.QC_PASS].astype(bool).to_numpy()
    groups = obs[kept].groupby([schema.PERTURBATION, schema.TREATMENT], sort=True)
    codes, genes = groups.ngroup().to_numpy(), np.array([key[0] for key in groups.groups], dtype=object)
    experiments = [frozenset(e) for e in groups[schema.EXPERIMENT].unique()]
    matrices = {RAW: adata.X, **{v: adata.obsm[k] for v, k in schema.VIEW_KEYS.items() if k in adata.obsm}}
    rows = []
    for view, values in matrices.items() if len(genes) else ():
        moved = _origin(np.asarray(values, dtype=np.float64), obs, config["plates"]["batch_key"], config)[kept]
        found = guide_concordance(
            _means(moved, codes, len(genes)), genes, experiments, draws=config["score"]["relabellings"],
            seed=config["seed"],
        )  # fmt: skip
        rows += [{"view": view, **row} for row in found]
    return pd.DataFrame(rows, columns=list(CONCORDANCE_COLUMNS))


def write_consensus(
    disentangled_h5ad: str | os.PathLike,
    out_h5ad: str | os.PathLike,
    out_concordance: str | os.PathLike,
    config: Mapping[str, Any],
) -> None:
    """Write consensus.h5ad and the concordance of guides; see `consensus` and `concordance_table`."""
    import anndata

    adata = anndata.read_h5ad(disentangled_h5ad)
    schema.check(adata)
    write_h5ad(out_h5ad, consensus(adata, config))
    write_csv(out_concordance, concordance_table(adata, config))
