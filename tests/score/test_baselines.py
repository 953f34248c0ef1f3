import numpy as np
import pandas as pd
import pytest

from phenoica import schema
from phenoica.disentangle import view
from phenoica.errors import FitError, ScoreError
from phenoica.score import baselines


def test_position_is_one_hot_and_learns_its_places_in_training():
    obs = pd.DataFrame({schema.ROW: [1, 2, 1, 3], schema.COLUMN: [5, 5, 7, 9]})
    found = baselines.position_linear(obs, np.array([True, True, True, False]))
    assert found.tolist() == [[1, 0, 1, 0], [0, 1, 1, 0], [1, 0, 0, 1], [0, 0, 0, 0]]


def test_standardised_reads_training_wells_only():
    train = np.array([True, True, False])
    found = baselines.standardised(np.array([[1.0, 5.0], [3.0, 5.0], [1e9, 7.0]]), train)
    assert found[:2].tolist() == [[-1, 0], [1, 0]]
    assert found[2, 0] == pytest.approx(1e9 - 2) and found[2, 1] == 0
    missing = baselines.standardised(np.array([[1.0], [np.nan], [3.0]]), np.ones(3, bool))
    assert np.isnan(missing[1, 0]) and missing[0, 0] == -1
    with pytest.raises(FitError, match="column 0"):
        baselines.standardised(np.array([[np.nan], [1.0]]), np.array([True, False]))


def test_which_baselines_there_are(screen, truth):
    adata = screen(n_experiments=2, n_plates=1)
    train = (adata.obs[schema.EXPERIMENT] == "gene-000").to_numpy()
    measures = adata.obsm[schema.IMAGE_MEASURES]
    found = baselines.baseline_features(adata.obs, train, measures, truth(adata))
    assert [f.view for f in found] == ["position_linear", "cell_count", "true_cell_count", "image_measures"]
    assert all(f.test_data_used == "none" for f in found)
    np.testing.assert_allclose(found[3].values[train].std(axis=0), [1, 1, 0])
    untrained = np.random.default_rng(0).normal(5, 3, (adata.n_obs, 4)).astype(np.float32)
    *_, last = baselines.baseline_features(adata.obs, train, measures, None, untrained)
    assert last.view == "random_encoder" and last.view in baselines.BASELINES and last.test_data_used == "none"
    np.testing.assert_allclose(last.values[train].mean(axis=0), 0, atol=1e-9)
    np.testing.assert_allclose(last.values[train].std(axis=0), 1)
    assert abs(last.values[~train].mean(axis=0)).min() > 1e-6  # the other wells had no part in it
    bare = baselines.baseline_features(adata.obs.drop(columns=schema.CELL_COUNT), train, None, None)
    assert [f.view for f in bare] == ["position_linear"]


def test_truth_is_joined_on_the_well_id(screen, truth):
    obs = screen(n_experiments=2, n_plates=1).obs
    table = pd.DataFrame({schema.WELL_ID: obs.index, "true_cell_count": np.arange(len(obs))})
    shuffled = table.sample(frac=1, random_state=0)
    assert baselines.true_cell_count(obs, shuffled).tolist() == list(range(len(obs)))
    with pytest.raises(ScoreError, match=obs.index[0]):
        baselines.true_cell_count(obs, table.iloc[1:])
    with pytest.raises(ScoreError, match="more than once"):
        baselines.true_cell_count(obs, pd.concat([table, table.iloc[:1]]))
    with pytest.raises(ScoreError, match="true_cell_count"):
        baselines.true_cell_count(obs, table[[schema.WELL_ID]])


def test_permuting_keeps_the_cases_of_every_plate():
    rng = np.random.default_rng(0)
    plates, labels = np.repeat(np.arange(5), 20), rng.random(100) < 0.3
    found = baselines.permute_within(labels, plates, rng)
    assert (found != labels).any()
    for plate in range(5):
        assert found[plates == plate].sum() == labels[plates == plate].sum()


def test_features_of_a_view_are_made_when_read_and_given_back(screen):
    adata = screen(n_experiments=2, n_plates=1)
    whole = np.asarray(view("raw").fit(adata.X).transform(adata.X, dtype=np.float64))
    lazy = baselines.Features("raw", view("raw").fit(adata.X).rows(adata.X))
    wells = np.array([5, 0, 7])
    assert lazy.shape == whole.shape and lazy.width == whole.shape[1]
    np.testing.assert_allclose(lazy.at(wells), whole[wells], rtol=0, atol=1e-12)
    assert "values" not in vars(lazy)  # some wells do not make the others be held
    np.testing.assert_array_equal(lazy.values, whole)
    assert lazy.values is lazy.values
    lazy.release()
    assert "values" not in vars(lazy)


def test_features_are_grouped_by_what_they_hold_and_then_released(screen):
    adata = screen(n_experiments=2, n_plates=1)
    rows = view("raw").fit(adata.X).rows(adata.X)
    made = [baselines.Features(name, rows) for name in ("raw", "pca", "ica")]
    labels = baselines.Features("permuted", made[0])
    size = adata.n_obs * adata.n_vars
    seen = []
    for group in baselines.in_groups([*made, labels], 2 * size):
        assert labels not in group or labels.values is made[0].values
        assert sum("values" in vars(f) for f in made) == sum("values" in vars(f) for f in group if f in made)
        seen.append([f.values.shape and f.view for f in group])
    assert seen == [["raw", "permuted", "pca"], ["ica"]]
    assert not any("values" in vars(f) for f in [*made, labels])
    one_by_one = [[f.view for f in group] for group in baselines.in_groups([*made, labels], 1)]
    assert one_by_one == [["raw", "permuted"], ["pca"], ["ica"]]
