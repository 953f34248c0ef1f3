import numpy as np

from phenoica import schema
from phenoica.score import score
from phenoica.score.shift import SHIFT


def test_more_training_experiments_help_where_each_shows_only_a_part(screen, settings):
    """Cases of each experiment show the common direction under noise of that experiment, so one is not enough."""
    adata = screen(n_experiments=8, n_genes=2, effect=0.0)
    rng = np.random.default_rng(2)
    codes = adata.obs[schema.EXPERIMENT].str[-1].astype(int).to_numpy()
    adata.X = rng.standard_normal((adata.n_obs, 12)).astype(np.float32)
    plk1 = (adata.obs[schema.PERTURBATION] == "PLK1").to_numpy()
    own = 1.5 * rng.standard_normal((8, 12)).astype(np.float32)
    adata.X[plk1] += own[codes[plk1]] + np.eye(12, dtype=np.float32)[0] * 1.5
    config = settings(plates={"folds": 4}, disentangle={"views": ["raw", "pca"]},
                      score={"shift_draws": 6, "shift_views": ["raw"], "lambda_fractions": [0.2]})  # fmt: skip
    scores = score(adata, config)
    rows = scores[scores["metric"].str.startswith(SHIFT)]
    assert set(rows["view"]) == {"raw"} and not (rows["perturbation"] == "macro").any()
    assert set(rows["contrast"]) == {"positive_vs_reference", "cutting_vs_reference"}  # genes: in two experiments
    total = rows[(rows["fold"] == -1) & rows["draw"].isna() & (rows["perturbation"] == "PLK1")].set_index("metric")
    sizes = [f"{SHIFT}{n}" for n in (1, 2, 4, 6)]
    assert set(total.index) == set(sizes) and (total["ci_kind"] == "t over folds").all()
    assert total.loc[sizes[-1], "value"] > total.loc[sizes[0], "value"] + 0.05
    # all training experiments: one draw, the AUROC of the table itself
    full = scores[(scores["metric"] == "auroc") & (scores["scope"] == "pooled") & (scores["view"] == "raw")
                  & (scores["probe"] == "l1") & (scores["perturbation"] == "PLK1") & (scores["fold"] == 0)
                  & (scores["contrast"] == "positive_vs_reference") & scores["view_minus"].isna()]  # fmt: skip
    last = rows[(rows["metric"] == sizes[-1]) & (rows["fold"] == 0) & (rows["perturbation"] == "PLK1")]
    assert set(last["value"]) == {full["value"].item()} and set(last["draw"].dropna()) == {0}
    first = rows[(rows["metric"] == sizes[0]) & (rows["fold"] == 0) & (rows["perturbation"] == "PLK1")]
    assert set(first["draw"].dropna()) == set(range(6)) and first["value"].nunique() > 2


def test_no_draws_no_curve(screen, settings):
    scores = score(screen(n_experiments=6, n_genes=2), settings(disentangle={"views": ["raw"]}))
    assert not scores["metric"].str.startswith(SHIFT).any()
