"""The one place that names obs columns and obsm, varm and uns keys, and checks them.

Every other module imports these constants instead of spelling a name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phenoica.errors import SchemaError

if TYPE_CHECKING:
    import anndata
    import pandas as pd

# obs: what is known of a well from the metadata alone
WELL_ID = "well_id"
EXPERIMENT = "experiment"
PLATE = "plate"
PLATE_ID = "plate_id"
ADDRESS = "address"
ROW = "row"
COLUMN = "column"
EDGE_DISTANCE = "edge_distance"
PERTURBATION = "perturbation"
TREATMENT = "treatment"
PERTURBATION_TYPE = "perturbation_type"
CONCENTRATION = "concentration"
SMILES = "smiles"
CELL_TYPE = "cell_type"
CONTROL = "control"
CONTROL_ROLE = "control_role"
WELL_COLUMNS = (
    WELL_ID, EXPERIMENT, PLATE, PLATE_ID, ADDRESS, ROW, COLUMN, EDGE_DISTANCE, PERTURBATION, TREATMENT,
    PERTURBATION_TYPE, CONCENTRATION, SMILES, CELL_TYPE, CONTROL, CONTROL_ROLE,
)  # fmt: skip

# values of `control` and `control_role`
NONE, NEGATIVE, POSITIVE, CUTTING = "none", "negative", "positive", "cutting"
CONTROL_VALUES = (NONE, NEGATIVE, POSITIVE, CUTTING)
FIT, REFERENCE = "fit", "reference"
CONTROL_ROLE_VALUES = (NONE, FIT, REFERENCE)

# wells.parquet: where the images of a well are; parallel lists, one entry an image, ordered by site and channel
IMAGE_SITE = "image_site"
IMAGE_CHANNEL = "image_channel"
IMAGE_SHARD = "image_shard"
IMAGE_ROW_GROUP = "image_row_group"
IMAGE_ROW = "image_row"
IMAGE_COLUMNS = (IMAGE_SITE, IMAGE_CHANNEL, IMAGE_SHARD, IMAGE_ROW_GROUP, IMAGE_ROW)
IMAGE_LOCATION = (IMAGE_SHARD, IMAGE_ROW_GROUP, IMAGE_ROW)  # which say where an image is
UNIT = "unit"  # the shard whose embed job takes the well: the shard of its first image

# wells.parquet of profiles: where the vector of a well is
PROFILE_FILE = "profile_file"  # number of the file, in the order of their names
PROFILE_ROW = "profile_row"  # from 0

# folds.csv
FOLD = "fold"
BATCH_KEY_DEFAULT = EXPERIMENT

# obs: what embed and qc add
N_TILES = "n_tiles"
MISSING_CHANNELS = "missing_channels"  # channel numbers that a well's embedding does without, "2,5"; empty: none
CELL_COUNT = "cell_count"
QC_ACQUISITION = "qc_acquisition"
QC_PHENOTYPE = "qc_phenotype"
QC_PASS = "qc_pass"
CONTROL_DISTANCE = "control_distance"  # qc/wells.parquet only
QC_COLUMNS = (QC_ACQUISITION, QC_PHENOTYPE, QC_PASS)

# obsm, varm
X_CHANNELWISE = "X_channelwise"  # (wells, channels * dim): the embedding of each channel; their mean is X
RANDOM_ENCODER = "X_random_encoder"  # (wells, dim): the same wells, by a network of the same size with random weights
X_PCA = "X_pca"
X_ICA = "X_ica"
X_VARIMAX = "X_varimax"
X_MAD = "X_mad"
X_SPHERIZE = "X_spherize"
X_TVN = "X_tvn"
X_PCA_CS = "X_pca_cs"
X_BIOLOGY = "X_biology"
X_BATCH = "X_batch"
IMAGE_MEASURES = "image_measures"
VARM_PCS = "PCs"
VARM_ICS = "ICs"
VIEW_KEYS = {
    "pca": X_PCA, "varimax": X_VARIMAX, "ica": X_ICA, "tvn": X_TVN, "pca_cs": X_PCA_CS, "mad": X_MAD,
    "spherize": X_SPHERIZE,
}  # fmt: skip

# uns
UNS = "phenoica"
UNS_CHANNELS = "X_channelwise_channels"  # channel numbers, in the order of X_channelwise
UNS_COMPONENTS = "components"
UNS_ICA = "ica"
UNS_BIOLOGY_NAMES = "X_biology_names"
UNS_BATCH_NAMES = "X_batch_names"
UNS_REPRODUCIBILITY = "reproducibility"  # how many ica components come back on other experiments
UNS_TRANSFORM = "phenoica_transform"  # which fitted states `phenoica transform` applied
UNS_CONCENTRATION = "concentration"  # sentences: over how many components batch, position and biology are spread
UNS_KEYS = (
    "version", "config_fingerprint", "checkpoint", "checkpoint_sha256", "precision", "licences", "fit_experiments",
    "encoder_saw_test_images",
)  # fmt: skip

# consensus.h5ad: obs beside perturbation, treatment, concentration, perturbation_type and control
LEVEL = "level"  # guide or perturbation
GUIDE = "guide"
N_WELLS, N_GUIDES, N_EXPERIMENTS = "n_wells", "n_guides", "n_experiments"

# labels of a component
BIOLOGY, BATCH, POSITION, MIXED, UNEXPLAINED = "biology", "batch", "position", "mixed", "unexplained"
COMPONENT_LABELS = (BIOLOGY, BATCH, POSITION, MIXED, UNEXPLAINED)

# scores.parquet
SCORE_COLUMNS = (
    "contrast", "perturbation", "view", "test_data_used", "probe", "metric", "scope", "n_components", "draw",
    "view_minus", "value", "ci_low", "ci_high", "ci_kind", "n_case", "n_reference", "n_experiments", "fold", "reason",
)  # fmt: skip
TEST_DATA_USED = ("none", "controls", "all")
SCOPES = ("pooled", "within_experiment", "in_distribution")


def view_key(view: str) -> str:
    """Return the obsm key of a view or of a chain of views: X_ica, X_centerscale_ica."""
    return VIEW_KEYS.get(view, "X_" + "_".join(part.strip() for part in view.split("+")))


def var_names(n: int) -> list[str]:
    """Return the names of `n` raw embedding features: openphenom_000, openphenom_001, ..."""
    return [f"openphenom_{i:03d}" for i in range(n)]


def component_names(n: int, view: str = "ica") -> list[str]:
    """Return the names of `n` components of a view: ica_000, ica_001, ..."""
    return [f"{view}_{i:03d}" for i in range(n)]


def check_obs(obs: pd.DataFrame, where: str = "obs") -> None:
    """Check that a table of wells has every well column, known control values and unique ids.

    Raises
    ------
    SchemaError
        Naming the missing columns, the unknown values or the duplicated ids.
    """
    columns = set(obs.columns) | {obs.index.name}
    missing = [c for c in WELL_COLUMNS if c not in columns]
    if missing:
        raise SchemaError(f"{where}: columns {', '.join(missing)} are missing; make the table with `phenoica plates`")
    for column, allowed in ((CONTROL, CONTROL_VALUES), (CONTROL_ROLE, CONTROL_ROLE_VALUES)):
        unknown = sorted(set(obs[column].astype(str)) - set(allowed))
        if unknown:
            raise SchemaError(f"{where}: {column} holds {unknown[:5]}; allowed are {', '.join(allowed)}")
    ids = obs.index if obs.index.name == WELL_ID else obs[WELL_ID]
    if ids.duplicated().any():
        raise SchemaError(f"{where}: well id {ids[ids.duplicated()][0]!r} stands more than once; ids must be unique")


def check(adata: anndata.AnnData) -> None:
    """Check an AnnData written by phenoica against the schema.

    Parameters
    ----------
    adata
        `X` float32 (wells, features); obs index = well_id.

    Raises
    ------
    SchemaError
        Naming what is missing or wrong.
    """
    import numpy as np

    if adata.obs.index.name != WELL_ID:
        raise SchemaError(f"obs index is named {adata.obs.index.name!r}; it must be {WELL_ID!r}")
    check_obs(adata.obs)
    if adata.X is None or adata.X.dtype != np.float32:
        raise SchemaError("X must be the raw embedding in float32")
    bad = ~np.isfinite(adata.X).all(axis=1)
    if bad.any():
        raise SchemaError(f"X is not finite in {bad.sum()} wells, first {adata.obs_names[bad][0]}; drop these wells")
    if X_CHANNELWISE in adata.obsm:
        _check_channelwise(adata)
    if RANDOM_ENCODER in adata.obsm:
        _check_random_encoder(adata)
    if UNS not in adata.uns:
        raise SchemaError(f"uns[{UNS!r}] is missing; the file was not written by phenoica")
    missing = [k for k in UNS_KEYS if k not in adata.uns[UNS]]
    if missing:
        raise SchemaError(f"uns[{UNS!r}] lacks {', '.join(missing)}")


def _check_channelwise(adata: anndata.AnnData) -> None:
    import numpy as np

    values, n_channels = adata.obsm[X_CHANNELWISE], len(adata.uns.get(UNS_CHANNELS, ()))
    if values.dtype != np.float32 or values.shape != (adata.n_obs, n_channels * adata.n_vars):
        raise SchemaError(
            f"obsm[{X_CHANNELWISE!r}] is {values.dtype} {values.shape}; it must be float32 ({adata.n_obs}, "
            f"{n_channels} * {adata.n_vars}), {adata.n_vars} numbers for each channel in uns[{UNS_CHANNELS!r}]"
        )
    _check_finite(adata, X_CHANNELWISE)


def _check_random_encoder(adata: anndata.AnnData) -> None:
    import numpy as np

    values = adata.obsm[RANDOM_ENCODER]
    if values.dtype != np.float32 or values.shape != adata.shape:
        raise SchemaError(
            f"obsm[{RANDOM_ENCODER!r}] is {values.dtype} {values.shape}; it must be float32 {adata.shape}, as wide as X"
        )
    _check_finite(adata, RANDOM_ENCODER)


def _check_finite(adata: anndata.AnnData, key: str) -> None:
    import numpy as np

    bad = ~np.isfinite(adata.obsm[key]).all(axis=1)
    if bad.any():
        raise SchemaError(
            f"obsm[{key!r}] is not finite in {bad.sum()} wells, first {adata.obs_names[bad][0]}; drop them"
        )
