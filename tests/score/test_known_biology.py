"""Recall and activity against hand-worked values, planted relations and random ones."""

import anndata
import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score

from phenoica import schema
from phenoica.errors import ConfigError, ScoreError
from phenoica.score import known_biology
from phenoica.score.consensus import cosines
from phenoica.score.known_biology import (
    compound_gene_scores,
    gene_gene_recall,
    known_biology_table,
    write_known_biology,
)


def symmetric(n, pairs):
    known = np.zeros((n, n), bool)
    for a, b in pairs:
        known[a, b] = known[b, a] = True
    return known


def test_recall_by_hand():
    # 7 genes, 21 pairs: similarities 0, .05, ..., 1; tails at the quantiles 5 % = .05 and 95 % = .95
    upper = np.triu_indices(7, 1)
    similarity = np.eye(7)
    similarity[upper] = np.arange(21) / 20
    similarity += np.triu(similarity, 1).T
    pairs = list(zip(*upper, strict=True))
    known = symmetric(7, [pairs[0], pairs[10], pairs[20], pairs[19]])
    found = gene_gene_recall(similarity, known, draws=50, seed=0)
    assert found["value"] == 0.75 and found["chance"] == pytest.approx(4 / 21) and found["n_known"] == 4
    # without the pairs of gene 0 (the first six) the 15 others have quantiles .335 and .965: one in each tail
    allowed = ~symmetric(7, pairs[:6])
    found = gene_gene_recall(similarity, known, allowed, draws=50, seed=0)
    assert (found["n"], found["n_known"], found["value"]) == (15, 3, pytest.approx(1 / 3))
    nothing = gene_gene_recall(similarity, known & False, draws=5, seed=0)
    assert nothing["value"] is None and nothing["reason"] == "no_known_pair"


def test_related_genes_are_found_and_random_relations_are_not():
    rng = np.random.default_rng(0)
    values = rng.standard_normal((40, 8))
    values[20:] = values[:20] + 0.3 * rng.standard_normal((20, 8))  # i and i + 20 are alike
    planted = symmetric(40, [(i, i + 20) for i in range(20)])
    found = gene_gene_recall(cosines(values), planted, draws=99, seed=0)
    assert found["value"] > 0.9 and found["p"] == 0.01 and found["chance"] == pytest.approx(0.1, abs=0.01)
    recalls, p = [], []
    for _ in range(40):
        noise = gene_gene_recall(cosines(rng.standard_normal((40, 8))), planted, draws=39, seed=1)
        recalls.append(noise["value"])
        p.append(noise["p"])
    assert abs(np.mean(recalls) - 0.1) < 3 * np.std(recalls, ddof=1) / np.sqrt(40)
    assert abs(np.mean(p) - 0.5) < 0.2


def test_neighbours_on_a_chromosome_arm_are_no_biology():
    """Cuts make genes of one arm look alike; known pairs on one arm then prove nothing."""
    rng = np.random.default_rng(1)
    arms = np.arange(40) % 20
    values = rng.standard_normal((40, 8)) + 3 * rng.standard_normal((20, 8))[arms]
    known = symmetric(40, [(i, i + 20) for i in range(8)])  # each on one arm
    other = symmetric(40, [(i, i + 1) for i in range(0, 39, 3)])  # none
    allowed = arms[:, None] != arms[None, :]
    everything = gene_gene_recall(cosines(values), known | other, draws=99, seed=0)
    kept = gene_gene_recall(cosines(values), known | other, allowed, draws=99, seed=0)
    assert everything["n_known"] == 21 and kept["n_known"] == 13
    assert everything["p"] <= 0.1 < kept["p"] and kept["value"] < everything["value"]


def test_activity_by_hand_and_its_negatives():
    rng = np.random.default_rng(2)
    similarity = rng.random((3, 60))
    active = np.zeros((3, 60), bool)
    active[0, :12], active[1, 5] = True, True
    candidates = ~active
    candidates[0, 20] = False  # between 1 and 10 uM: neither
    found = compound_gene_scores(similarity, active, candidates, draws=3, seed=7)
    expected = []
    for draw in range(3):
        chosen = np.random.default_rng([7, draw])
        for gene, n in ((0, 24), (1, 20)):  # max(2 n, 20)
            positive = np.flatnonzero(active[gene])
            negative = chosen.choice(np.flatnonzero(candidates[gene] & ~active[gene]), n, replace=False)
            assert 20 not in negative or gene != 0
            labels = [1] * len(positive) + [0] * n
            scores = similarity[gene, [*positive, *negative]]
            expected.append((average_precision_score(labels, scores), roc_auc_score(labels, scores)))
    for name, value in zip(
        (known_biology.PRECISION, known_biology.ACTIVITY_AUROC), np.mean(expected, axis=0), strict=True
    ):
        assert found[name]["value"] == pytest.approx(value) and (found[name]["n"], found[name]["n_known"]) == (2, 13)
    again = compound_gene_scores(similarity, active, candidates, draws=3, seed=7)
    assert again == found
    nothing = compound_gene_scores(similarity, active & False, candidates, draws=3, seed=7)
    assert {r["reason"] for r in nothing.values()} == {"no_active_compound"}


def test_random_similarities_are_at_chance():
    rng = np.random.default_rng(3)
    active = rng.random((30, 80)) < 0.05
    runs = [compound_gene_scores(rng.random((30, 80)), active, ~active, draws=5, seed=s) for s in range(30)]
    for name in (known_biology.PRECISION, known_biology.ACTIVITY_AUROC):
        gaps = [run[name]["value"] - run[name]["chance"] for run in runs]
        assert abs(np.mean(gaps)) < 3 * np.std(gaps, ddof=1) / np.sqrt(30)


@pytest.fixture(scope="module")
def consensus_of(settings):
    """Genes A to H; compound c1 looks like A at 1 uM, c2 to c40 like nothing; inhibitors point the other way."""
    rng = np.random.default_rng(4)
    rows, vectors = [], []
    directions = rng.standard_normal((8, 20))
    for i, gene in enumerate("ABCDEFGH"):
        rows.append((gene, "", np.nan, "CRISPR", schema.PERTURBATION))
        vectors.append(directions[i])
    for c in range(1, 41):
        for dose in (0.1, 1.0):
            rows.append((f"c{c}", f"c{c}", dose, "COMPOUND", schema.GUIDE))
            strong = c == 1 and dose == 1.0
            vectors.append(-directions[0] if strong else rng.standard_normal(20))
    obs = pd.DataFrame(rows, columns=[
        schema.PERTURBATION, schema.TREATMENT, schema.CONCENTRATION, schema.PERTURBATION_TYPE, schema.LEVEL
    ])  # fmt: skip
    obs[schema.CONTROL], obs.index = schema.NONE, [f"r{i}" for i in range(len(obs))]
    return anndata.AnnData(np.array(vectors, np.float32), obs=obs)


TARGETS = pd.DataFrame({"compound": ["c1", "c1", "c2", "c3", "zz"], "gene": ["A", "A", "A", "A", "A"],
                        "activity_um": [30.0, 0.5, 5.0, 20.0, 0.1]})  # fmt: skip


def test_the_table_has_doses_and_the_maximum(consensus_of, settings):
    config = settings(known_biology={"draws": 20})
    pairs = pd.DataFrame({"gene_a": ["A", "B", "A", "X"], "gene_b": ["B", "A", "A", "A"]})
    positions = pd.DataFrame({"gene": list("ABC"), "chromosome": ["1", "1", "2"], "arm": ["p", "p", None]})
    found = known_biology_table(
        consensus_of, config, gene_pairs=pairs, gene_positions=positions, compound_targets=TARGETS
    )
    assert tuple(found.columns) == known_biology.COLUMNS and set(found["view"]) == {"raw"}
    recall = found[found["score"] == known_biology.RECALL].set_index("setting")
    assert recall.loc["all_pairs", "n_known"] == 1  # both directions, itself and an unknown gene: one pair
    assert recall.loc["all_pairs", "n"] == 28
    assert recall.loc["other_arms", "n"] == 0 and recall.loc["other_arms", "reason"] == "no_known_pair"
    auroc = found[found["score"] == known_biology.ACTIVITY_AUROC].set_index("setting")
    assert set(auroc.index) == {"max_over_doses", "dose_0.1", "dose_1"}
    # the strongest activity counts; opposite directions count as alike
    assert auroc.loc["dose_1", "value"] == auroc.loc["max_over_doses", "value"] == 1
    assert auroc.loc["dose_0.1", "value"] < 1 and (auroc["n_known"] == 1).all()


def test_weak_actions_are_neither_active_nor_negative(consensus_of, settings, monkeypatch):
    """0.5 uM is active, 5 uM is left out, 20 uM and unknown ones may be drawn as negatives."""
    seen = {}

    def record(similarity, active, candidates, **_):
        seen.update(active=active.copy(), candidates=candidates.copy())
        return {}

    monkeypatch.setattr(known_biology, "compound_gene_scores", record)
    known_biology_table(consensus_of, settings(), compound_targets=TARGETS)
    place = {name: i for i, name in enumerate(sorted(f"c{c}" for c in range(1, 41)))}
    assert np.flatnonzero(seen["active"][0]).tolist() == [place["c1"]] and seen["active"].sum() == 1
    assert sorted(np.flatnonzero(~seen["candidates"][0])) == sorted([place["c1"], place["c2"]])
    assert seen["candidates"][0, place["c3"]] and seen["candidates"][1:].all()


def test_files(consensus_of, settings, tmp_path):
    consensus_of.write_h5ad(tmp_path / "c.h5ad")
    TARGETS.to_csv(tmp_path / "t.csv", index=False)
    config = settings(known_biology={"draws": 3})
    write_known_biology(tmp_path / "c.h5ad", tmp_path / "k.csv", config, compound_targets=tmp_path / "t.csv")
    assert set(pd.read_csv(tmp_path / "k.csv")["score"]) == {known_biology.PRECISION, known_biology.ACTIVITY_AUROC}
    with pytest.raises(ScoreError, match="no known biology"):
        write_known_biology(tmp_path / "c.h5ad", tmp_path / "k.csv", config, gene_pairs=None)
    with pytest.raises(ScoreError, match="no such table"):
        known_biology.read_known(tmp_path / "x.csv", ("a",))
    with pytest.raises(ScoreError, match="columns gene_a are missing"):
        known_biology.read_known(tmp_path / "t.csv", ("gene_a",))
    TARGETS.assign(activity_um=["1", "2", "weak", "3", "4"]).to_csv(tmp_path / "t.csv", index=False)
    with pytest.raises(ScoreError, match="row 3 is 'weak'"):
        known_biology.read_known(tmp_path / "t.csv", ("compound", "gene", "activity_um"))


def test_positions_without_pairs_are_refused(settings):
    with pytest.raises(ConfigError, match="gene_positions is set without gene_pairs"):
        settings(known_biology={"gene_positions": "x.csv"})
