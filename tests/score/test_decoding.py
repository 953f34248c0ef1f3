import numpy as np
import pytest
from sklearn.metrics import balanced_accuracy_score

from phenoica.score import decoding
from phenoica.score.decoding import SHRINKAGE, decode_batches
from phenoica.score.small_probes import discriminant


def controls(rng, *, batches=4, plates=3, wells=16, width=6, batch=0.0, plate=0.0):
    """Return reference controls with an offset of their batch and one of their plate."""
    names = np.repeat([f"b{i}" for i in range(batches)], plates * wells)
    plate_names = np.repeat([f"p{i}" for i in range(batches * plates)], wells)
    values = rng.standard_normal((len(names), width))
    values += batch * rng.standard_normal((batches, width))[np.unique(names, return_inverse=True)[1]]
    order = np.unique(plate_names, return_inverse=True)[1]
    values += plate * rng.standard_normal((batches * plates, width))[order]
    return values, names, plate_names


@pytest.mark.parametrize("wells", [16, 144])
@pytest.mark.parametrize("plate", [0.0, 2.0])
def test_without_a_batch_effect_it_is_at_chance(wells, plate):
    """Also where plates differ much: left-out plates cannot give their batch away."""
    rng = np.random.default_rng(wells)
    found = [decode_batches(*controls(rng, wells=wells, plate=plate)) for _ in range(50)]
    values = np.array([f.value for f in found])
    assert {f.chance for f in found} == {0.25}
    error = values.std(ddof=1) / np.sqrt(50)
    assert error > 0 and abs(values.mean() - 0.25) <= 3 * error


def test_a_batch_effect_is_decoded_and_its_size_is_balanced_accuracy():
    rng = np.random.default_rng(0)
    assert decode_batches(*controls(rng, batch=3.0)).value > 0.95
    values, names, plates = controls(rng, batches=2, plates=2, batch=0.8)
    keep = np.r_[np.arange(10), np.arange(16, 64)]  # one plate of the first batch is small
    values, names, plates = values[keep], names[keep], plates[keep]
    first, second = np.isin(plates, ["p0", "p2"]), np.isin(plates, ["p1", "p3"])
    predicted = np.empty_like(names)
    predicted[first] = discriminant(values[second], names[second], values[first], SHRINKAGE)
    predicted[second] = discriminant(values[first], names[first], values[second], SHRINKAGE)
    expected = balanced_accuracy_score(names, predicted)
    found = decode_batches(values, names, plates)
    assert found.value == pytest.approx(expected, abs=1e-12) and (found.n_batches, found.n_wells) == (2, 58)


def test_a_rotation_changes_nothing():
    rng = np.random.default_rng(1)
    values, names, plates = controls(rng, batch=0.6)
    rotation = np.linalg.qr(rng.standard_normal((6, 6)))[0]
    assert decode_batches(values @ rotation, names, plates).value == decode_batches(values, names, plates).value


def test_what_cannot_be_decoded_has_its_reason():
    rng = np.random.default_rng(2)
    values, names, plates = controls(rng)
    one = decode_batches(values[names == "b0"], names[names == "b0"], plates[names == "b0"])
    assert one.value is None and one.reason == "one_test_batch"
    single_plates = decode_batches(values, names, names)
    assert single_plates.reason == "one_test_batch"
    lost = values.copy()
    lost[3, 1] = np.nan
    assert decode_batches(lost, names, plates).reason == "missing_values"
    assert decode_batches(np.ones_like(values), names, plates).reason == "no_variance_in_references"
    two = [0, 16, 48, 64]  # two batches, two plates each, one well a plate
    assert decode_batches(values[two], names[two], plates[two]).reason == "few_references"
    assert decode_batches(values[:0], names[:0], plates[:0]).reason == "one_test_batch"


def test_every_reason_has_words():
    from phenoica.score.contrasts import REASONS

    assert {"one_test_batch", "missing_values", "no_variance_in_references", "few_references"} <= set(REASONS)
    assert decoding.MAX_SPLITS >= 2
