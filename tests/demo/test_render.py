import numpy as np
import pytest
from scipy import ndimage, stats

from phenoica.demo import layout, render

SEED = 20260


@pytest.fixture(scope="module")
def wells():
    return layout.design(SEED)


@pytest.fixture(scope="module")
def rows(wells):
    return layout.factors(wells, SEED).to_dict("records")


def draw(wells, rows, index, size=128):
    well = wells.iloc[index]
    own = (SEED, int(well["experiment_number"]), int(well["plate"]), int(well["row"]), int(well["column"]))
    return render.render_well(rows[index], size, own)


def neutral(**changes):
    """Return the factors of an unperturbed well under a clean microscope."""
    factors = {f"phenotype_{a}": 0.0 for a in layout.AXES}
    factors |= {f"bleed_{c}": 0.0 for c in range(1, 7)} | {f"gain_{c}": 1.0 for c in range(1, 7)}
    factors |= {
        "blur": 0.4, "background": 0.05, "background_texture": 0.0, "background_scale": 2.0, "illumination": 0.0,
        "illumination_angle": 0.0, "gamma": 0.0,
    }  # fmt: skip
    return factors | changes


def nuclei(dna):
    """Segment nuclei with a two-class mean threshold (ISODATA); return the label image and the areas in pixels."""
    smooth = ndimage.gaussian_filter(dna.astype(float), 0.7)
    threshold = smooth.mean()
    for _ in range(50):
        threshold = (smooth[smooth > threshold].mean() + smooth[smooth <= threshold].mean()) / 2
    labels, n = ndimage.label(smooth > max(threshold, 35))
    areas = ndimage.sum_labels(np.ones_like(smooth), labels, np.arange(1, n + 1))
    return labels, areas[areas > 12]


def sharpness(image):
    """Return the share of variance that a blur of 1.5 px removes."""
    image = image.astype(float)
    return (image - ndimage.gaussian_filter(image, 1.5)).var() / image.var()


def elongation(image):
    """Return the mean ratio of the axes of the brightest objects (top tenth of the pixels, 6 pixels or more)."""
    labels, n = ndimage.label(image > np.percentile(image, 90))
    ratios = []
    for i in range(1, n + 1):
        points = np.argwhere(labels == i)
        if len(points) >= 6:
            low, high = np.linalg.eigvalsh(np.cov(points.T) + np.eye(2) / 12)
            ratios.append(np.sqrt(high / low))
    return np.mean(ratios)


def pick(wells, n=10, **where):
    mask = np.logical_and.reduce([wells[k] == v for k, v in where.items()])
    return np.flatnonzero(mask)[:n]


def many(changes, n=8):
    return [render.render_well(neutral(**changes), 128, (7, i))[0] for i in range(n)]


def test_shape_dtype_and_determinism():
    images, count = render.render_well(neutral(), 128, (1, 2))
    again, same = render.render_well(neutral(), 128, (1, 2))
    other, _ = render.render_well(neutral(), 128, (1, 3))
    assert images.shape == (6, 128, 128) and images.dtype == np.uint8
    assert np.array_equal(images, again) and count == same
    assert not np.array_equal(images, other)


def test_true_count_agrees_with_an_independent_count():
    density = np.linspace(-1.2, 0.3, 16)
    true, found = [], []
    for i, d in enumerate(density):
        images, count = render.render_well(neutral(phenotype_density=d), 128, (3, i))
        true.append(count)
        found.append(len(nuclei(images[0])[1]))
    assert np.corrcoef(true, found)[0, 1] > 0.9
    assert abs(np.mean(np.array(found) - true)) < 3  # cells cut by the border count here, not there


def test_usual_field_holds_25_to_30_cells():
    counts = [render.place_cells(neutral(), np.random.default_rng(i)).count for i in range(60)]
    assert 25 <= np.mean(counts) <= 30


def test_full_size_shows_the_same_cells():
    small, n_small = render.render_well(neutral(), 128, (5, 5))
    large, n_large = render.render_well(neutral(), 512, (5, 5))
    assert n_small == n_large
    pooled = large.reshape(6, 128, 4, 128, 4).mean(axis=(2, 4))
    assert np.corrcoef(small[0].ravel(), pooled[0].ravel())[0, 1] > 0.95  # nuclei have no drawn noise but their grain
    a, b = nuclei(small[0])[1], nuclei(pooled[0])[1]
    assert np.median(b) == pytest.approx(np.median(a), rel=0.15)


def test_empty_well_is_drawn():
    images, count = render.render_well(neutral(phenotype_density=-12.0), 128, (1, 1))
    assert count == 0 and images.max() < 40


@pytest.mark.parametrize("axis, channel", [("er_texture", 1), ("actin_fibres", 2), ("chromatin_texture", 0)])
def test_texture_axes_change_their_stain_not_the_count(axis, channel):
    low, high = many({f"phenotype_{axis}": -0.4}), many({f"phenotype_{axis}": 0.4})
    fine = [np.mean([sharpness(im[channel]) for im in set_]) for set_ in (low, high)]
    assert fine[1] > 1.1 * fine[0]
    for i in range(8):
        assert render.render_well(neutral(**{f"phenotype_{axis}": 0.4}), 128, (7, i))[1] == render.render_well(
            neutral(), 128, (7, i))[1]  # fmt: skip


def test_mitochondria_break_and_golgi_spreads():
    threads, grains = (many({"phenotype_mito_fragmentation": level}, 16) for level in (-0.4, 0.9))
    test = stats.ttest_ind([elongation(im[4]) for im in grains], [elongation(im[4]) for im in threads])
    assert test.statistic < 0 and test.pvalue < 1e-4
    compact, spread = many({}), many({"phenotype_golgi_spread": 0.7})
    peak = [np.mean([np.percentile(im[5], 99.7) for im in s]) for s in (compact, spread)]
    assert peak[1] < 0.8 * peak[0]


def test_nucleoli_and_rna():
    base, big = many({}), many({"phenotype_nucleoli": 0.6})
    lit = [np.mean([(im[3] > 170).mean() for im in s]) for s in (base, big)]
    assert lit[1] > 1.5 * lit[0]
    poor = many({"phenotype_rna": -0.5})
    assert np.mean([im[3].mean() for im in poor]) < 0.85 * np.mean([im[3].mean() for im in base])


def test_plk1_nuclei_are_larger_and_fewer_only_a_little(wells, rows):
    sharp = wells[~wells["out_of_focus"] & ~wells["blocked"]]
    guides = {k: v for k, v in layout.guide_efficacies(SEED).items() if k.startswith("PLK1") and v > 0.5}
    plk1 = sharp.index[sharp["treatment"].isin(guides)][:40]
    here = sharp["experiment"].isin(wells.loc[plk1, "experiment"])
    control = sharp.index[here & (sharp["perturbation"] == "EMPTY_control")][:40]
    area, count = {}, {}
    for name, chosen in {"plk1": plk1, "control": control}.items():
        drawn = [draw(wells, rows, i) for i in chosen]
        area[name] = np.median(np.concatenate([nuclei(im[0])[1] for im, _ in drawn]))
        count[name] = np.mean([c for _, c in drawn])
    assert area["plk1"] > 1.15 * area["control"]
    assert 0.55 * count["control"] < count["plk1"] < count["control"]


def test_mtor_cells_are_smaller(wells, rows):
    share = {}
    for name, shift in {"control": 0.0, "mtor": -0.3}.items():
        drawn = [im for im in many({"phenotype_cell_size": shift, "phenotype_density": -0.4})]
        share[name] = np.mean([(im[1] > 30).mean() for im in drawn])
    assert share["mtor"] < 0.85 * share["control"]


def test_blocked_column_has_few_cells(wells, rows):
    blocked = np.flatnonzero(wells["blocked"])
    plate = wells.loc[blocked[0], ["experiment", "plate"]]
    others = pick(wells, 12, experiment=plate["experiment"], plate=plate["plate"], blocked=False)
    few = [len(nuclei(draw(wells, rows, i)[0][0])[1]) for i in blocked]
    usual = [len(nuclei(draw(wells, rows, i)[0][0])[1]) for i in others]
    assert np.median(few) < 0.25 * np.median(usual)


def test_out_of_focus_plate_is_blurred(wells, rows):
    bad = wells[wells["out_of_focus"]].iloc[0]
    control = {"experiment": bad["experiment"], "perturbation": "EMPTY_control"}
    plates = {p: pick(wells, 6, plate=p, **control) for p in ("1", "2", "3")}
    focus = {p: np.mean([sharpness(draw(wells, rows, i)[0][2]) for i in chosen]) for p, chosen in plates.items()}
    blurred = focus.pop(bad["plate"])
    assert blurred < 0.4 * min(focus.values())


def test_outer_ring_is_thinner_in_true_counts(wells, rows):
    counts = np.array([
        render.place_cells(row, np.random.default_rng([*own, 1])).count
        for row, own in zip(
            rows,
            wells.assign(seed=SEED)[["seed", "experiment_number", "plate", "row", "column"]].astype(int).to_numpy(),
            strict=True,
        )
    ])  # fmt: skip
    control = ((wells["perturbation"] == "EMPTY_control") & ~wells["blocked"]).to_numpy()
    relative = (
        counts / wells.assign(n=counts)[control].groupby(["experiment"])["n"].mean()[wells["experiment"]].to_numpy()
    )
    ring = control & (wells["edge_distance"] == 0).to_numpy()
    centre = control & (wells["edge_distance"] > 3).to_numpy()
    assert relative[ring].mean() < 0.9 * relative[centre].mean()


@pytest.mark.parametrize("changes", [{"blur": 1.3}, {"bleed_4": 0.13}, {"illumination": 0.25}, {"gamma": 0.2}, {
    "background_texture": 0.06}])  # fmt: skip
def test_acquisition_effects_survive_standardising_a_tile(changes):
    def standard(im):
        im = im.astype(float)
        return (im - im.mean(axis=(1, 2), keepdims=True)) / im.std(axis=(1, 2), keepdims=True)

    clean = standard(render.render_well(neutral(), 128, (9, 9))[0])
    changed = standard(render.render_well(neutral(**changes), 128, (9, 9))[0])
    gain_only = standard(render.render_well(neutral(gain_4=1.1), 128, (9, 9))[0])
    differs = np.sqrt(np.mean((changed - clean) ** 2, axis=(1, 2))).max()
    assert differs > 2 * np.sqrt(np.mean((gain_only[3] - clean[3]) ** 2))


def test_few_pixels_saturate(wells, rows):
    chosen = np.linspace(0, len(wells) - 1, 60).astype(int)
    share = np.array([(draw(wells, rows, i)[0] == 255).mean(axis=(1, 2)) for i in chosen])
    assert share.mean(axis=0).max() < 0.004
    assert share.max() < 0.04
