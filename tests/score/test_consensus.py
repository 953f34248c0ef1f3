"""Guides and perturbations against means taken by hand, and the concordance of guides against its null."""

import anndata
import numpy as np
import pandas as pd
import pytest
from scipy import stats
from sklearn.metrics.pairwise import cosine_similarity

from phenoica import schema
from phenoica.errors import ControlsError, ScoreError
from phenoica.score import consensus as module
from phenoica.score.consensus import concordance_table, consensus, guide_concordance, write_consensus


@pytest.fixture(scope="module")
def exploration(screen):
    """What disentangled.h5ad looks like, with X_pca alone, and a compound at two doses."""
    adata = screen(n_experiments=3, n_genes=3, effect=3.0)
    adata.obsm[schema.X_PCA] = np.asarray(adata.X[:, :5])
    dosed = np.flatnonzero(adata.obs[schema.PERTURBATION] == "GENE2")
    treatment, kind = (adata.obs.columns.get_loc(c) for c in (schema.TREATMENT, schema.PERTURBATION_TYPE))
    adata.obs.iloc[dosed, treatment] = "aspirin"
    adata.obs.iloc[dosed, adata.obs.columns.get_loc(schema.PERTURBATION)] = "aspirin"
    adata.obs.iloc[dosed, kind] = "COMPOUND"
    adata.obs.iloc[dosed, adata.obs.columns.get_loc(schema.CONCENTRATION)] = np.where(
        np.arange(len(dosed)) % 2, 1.0, 0.1
    )
    return adata


def test_wells_become_guides_and_guides_perturbations(exploration, settings):
    found, obs = consensus(exploration, settings()), exploration.obs
    assert found.obs_names.is_unique and found.obsm[schema.X_PCA].dtype == np.float32
    X = np.asarray(exploration.X, float)
    moved = X.copy()
    for e in obs[schema.EXPERIMENT].unique():
        own = (obs[schema.EXPERIMENT] == e).to_numpy()
        moved[own] -= X[own & (obs[schema.CONTROL_ROLE] == schema.FIT).to_numpy()].mean(axis=0)
    guides = {
        g: moved[(obs[schema.TREATMENT] == g).to_numpy()].mean(axis=0) for g in (f"PLK1_guide_{i}" for i in range(4))
    }
    row = found["guide: PLK1 / PLK1_guide_2"]
    np.testing.assert_allclose(row.X[0], guides["PLK1_guide_2"], atol=1e-5)
    assert row.obs[[schema.N_WELLS, schema.N_GUIDES, schema.N_EXPERIMENTS]].iloc[0].tolist() == [6, 1, 3]
    whole = found["perturbation: PLK1"]
    np.testing.assert_allclose(whole.X[0], np.mean(list(guides.values()), axis=0), atol=1e-5)
    assert whole.obs[[schema.N_WELLS, schema.N_GUIDES, schema.N_EXPERIMENTS]].iloc[0].tolist() == [24, 4, 3]
    assert "perturbation: SRC_guide_1" in found.obs_names  # a cutting control goes by its guide
    assert not found.obs[schema.PERTURBATION].str.contains("EMPTY").any()
    assert {"guide: aspirin / aspirin 0.1", "guide: aspirin / aspirin 1"} <= set(found.obs_names)
    assert found.uns[schema.UNS]["consensus_of"] == "exploration fit"


def test_files_are_written_and_read_back(exploration, settings, tmp_path):
    from phenoica.files import write_h5ad

    write_h5ad(tmp_path / "d.h5ad", exploration.copy())
    write_consensus(tmp_path / "d.h5ad", tmp_path / "c.h5ad", tmp_path / "g.csv", settings(score={"relabellings": 19}))
    found = anndata.read_h5ad(tmp_path / "c.h5ad")
    assert set(found.obs[schema.LEVEL]) == {schema.GUIDE, schema.PERTURBATION}
    table = pd.read_csv(tmp_path / "g.csv")
    assert tuple(table.columns) == module.CONCORDANCE_COLUMNS and set(table["view"]) == {"raw", "pca"}
    plk1 = table[(table["view"] == "raw") & (table["perturbation"] == "PLK1")].iloc[0]
    assert plk1["within"] > plk1["between"] and plk1["n_guides"] == 4
    aspirin = table[(table["view"] == "raw") & (table["perturbation"] == "aspirin")].iloc[0]
    assert aspirin["reason"] == "one_guide" and np.isnan(aspirin["p"])  # two doses are no two guides


def test_a_batch_without_fit_controls_is_named_or_takes_those_of_all(exploration, settings):
    adata = exploration.copy()
    lost = ((adata.obs[schema.EXPERIMENT] == "gene-001") & (adata.obs[schema.CONTROL_ROLE] == schema.FIT)).to_numpy()
    adata.obs.loc[lost, schema.CONTROL_ROLE] = schema.NONE
    with pytest.raises(ControlsError, match="gene-001"):
        consensus(adata, settings())
    pooled = consensus(adata, settings(disentangle={"missing_controls": "pooled"}))
    assert np.isfinite(pooled.X).all()
    with pytest.raises(ScoreError, match="negative controls"):
        consensus(adata[adata.obs[schema.CONTROL] == schema.NEGATIVE].copy(), settings())


def test_flagged_wells_leave_when_asked(exploration, settings):
    adata = exploration.copy()
    adata.obs.loc[(adata.obs[schema.TREATMENT] == "PLK1_guide_0").to_numpy(), schema.QC_PASS] = False
    assert "guide: PLK1 / PLK1_guide_0" in consensus(adata, settings()).obs_names
    strict = settings(qc={"exclude_flagged": True}, score={"relabellings": 19})
    assert "guide: PLK1 / PLK1_guide_0" not in consensus(adata, strict).obs_names
    table = concordance_table(adata, strict)
    assert set(table.loc[table["perturbation"] == "PLK1", "n_guides"]) == {3}


def guides_of(rng, genes=12, per_gene=3, width=6):
    names = np.repeat([f"g{i:02d}" for i in range(genes)], per_gene)
    return rng.standard_normal((len(names), width)), names, [frozenset({"e"})] * len(names)


def test_concordance_is_the_mean_cosine_within_and_between():
    rng = np.random.default_rng(0)
    values, names, where = guides_of(rng)
    rows = {r["perturbation"]: r for r in guide_concordance(values, names, where, draws=400, seed=0)}
    pairs = cosine_similarity(values)
    own = names == "g03"
    inside = pairs[np.ix_(own, own)][np.triu_indices(3, 1)].mean()
    assert rows["g03"]["within"] == pytest.approx(inside)
    other = pairs[(names[:, None] != names[None, :]) & ~own[:, None] & ~own[None, :]].mean()
    assert rows["g03"]["between"] == pytest.approx(other, abs=0.05)
    assert rows["all"]["within"] == pytest.approx(np.mean([r["within"] for n, r in rows.items() if n != "all"]))


def test_planted_guides_agree_and_random_ones_have_uniform_p():
    rng, p = np.random.default_rng(1), []
    for draw in range(60):
        values, names, where = guides_of(rng)
        rows = guide_concordance(values, names, where, draws=99, seed=draw)
        p.append(rows[0]["p"])
        values += 2 * rng.standard_normal((12, 6))[np.unique(names, return_inverse=True)[1]]
        assert guide_concordance(values, names, where, draws=99, seed=draw)[0]["p"] <= 0.02
    assert stats.kstest(np.array(p) - rng.random(60) / 100, "uniform").pvalue > 0.01


def test_guides_of_one_batch_are_compared_with_guides_of_that_batch():
    """Each gene in a batch of its own look: guides agree because of the batch, and the null has it too."""
    rng = np.random.default_rng(2)
    values, names, _ = guides_of(rng, genes=16)
    batch = np.unique(names, return_inverse=True)[1] % 2
    values += 3 * rng.standard_normal((2, 6))[batch]
    where = [frozenset({f"e{b}"}) for b in batch]
    matched = guide_concordance(values, names, where, draws=199, seed=0)[0]
    loose = guide_concordance(values, names, [frozenset({"e"})] * len(names), draws=199, seed=0)[0]
    assert loose["p"] <= 0.01 and matched["p"] > 0.05


def test_what_has_no_null_has_a_reason():
    rng = np.random.default_rng(3)
    values, names, where = guides_of(rng, genes=2)
    rows = {r["perturbation"]: r for r in guide_concordance(values, names, where, draws=9, seed=0)}
    assert rows["g00"]["reason"] == "few_other_genes" and rows["all"]["p"] is None
    single = guide_concordance(values[:1], names[:1], where[:1], draws=9, seed=0)
    assert single[1]["reason"] == "one_guide"
