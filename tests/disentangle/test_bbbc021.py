"""Weeks of BBBC021 as batches: a real batch effect, and over how many components each view spreads it."""

import re

import numpy as np
import pandas as pd
import pytest

from phenoica.disentangle import view
from phenoica.disentangle.concentration import participation
from phenoica.disentangle.variance import omega2

K = 64
# (value, tolerance): of the week, on all 330 DMSO wells, features standardised. eta2 is not corrected for chance, so it
# counts a little batch in every component; its numbers are those the design expects
EXPECTED = {
    "omega2": {"ica": (21.0, 4.0), "pca": (37.0, 3.0), "rotation": (52.5, 3.0)},
    "eta2": {"ica": (27.0, 4.0), "pca": (41.0, 3.0), "rotation": (55.0, 3.0)},
}


def eta2(values, groups):
    """Share of the sum of squares that lies between groups, (k,)."""
    centred = values - values.mean(axis=0)
    means = pd.DataFrame(centred).groupby(groups).transform("mean").to_numpy()
    return (means**2).sum(axis=0) / (centred**2).sum(axis=0)


@pytest.fixture(scope="module")
def weeks(shared):
    """Return standardised features (632, 470), which wells are DMSO, and the week of every well."""
    folder = shared / "data" / "bbbc021_perwell"
    if not folder.is_dir():
        pytest.skip(f"SHARED REAL DATA ABSENT: no {folder}")
    wells = pd.read_csv(folder / "ljosa_jbiomolscreen_2013_per_well_mean.csv.gz")
    images = pd.read_csv(folder / "BBBC021_v1_image.csv.gz").drop_duplicates(
        ["Image_Metadata_Plate_DAPI", "Image_Metadata_Well_DAPI"]
    )
    plate, well = "Image_Metadata_Plate", "Image_Metadata_Well"
    wells = wells.merge(images, left_on=[plate, well], right_on=[f"{plate}_DAPI", f"{well}_DAPI"])
    features = [
        name for name in wells.columns
        if re.match("Cells_|Cytoplasm_|Nuclei_", name)
        and not re.search("Location|Center|Orientation|Number_Object", name)
    ]  # fmt: skip
    assert len(wells) == 632 and len(features) == 470
    control = (wells["Image_Metadata_Compound"] == "DMSO").to_numpy()
    assert control.sum() == 330
    return wells[features].to_numpy(float), control, wells[plate].str.split("_").str[0].to_numpy()


@pytest.mark.filterwarnings("ignore::phenoica.disentangle.ica.IcaWarning")  # 632 wells are fewer than 10 x 64^2
@pytest.mark.parametrize("share", [omega2, eta2])
def test_batch_is_spread_over_fewer_ica_components_than_pca_than_rotations(weeks, share):
    X, control, week = weeks
    X = view("raw").fit(X).transform(X, dtype=np.float64)
    pca = view("pca", n_components=K).fit(X)

    def spread(fitted):
        return participation(share(fitted.transform(X, dtype=np.float64)[control], week[control]))

    found = {"pca": [spread(pca)]}
    found["ica"] = [spread(view("ica", pca=pca, seed=seed).fit(X)) for seed in range(3)]
    found["rotation"] = [spread(view("rotation", pca=pca, draw=draw).fit(X)) for draw in range(20)]
    print(share.__name__, {name: np.round(values, 1) for name, values in found.items()})
    assert max(found["ica"]) < min(found["pca"]) and max(found["pca"]) < min(found["rotation"])
    for name, (value, tolerance) in EXPECTED[share.__name__].items():
        assert np.mean(found[name]) == pytest.approx(value, abs=tolerance)
