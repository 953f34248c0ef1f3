"""The design of the demo plates and the true factors of every well, from a seed and nothing else.

`design` gives the strings and integers (who stands where), `factors` the floats (what each well is made of). The
design copies RxRx3-core: gene experiments of several 1536-well plates, EMPTY_control wells, PLK1 and MTOR with six
guides and four single cutting guides on every plate, query genes in two experiments. The module is frozen by a hash in
its test: it was fixed before phenoica scored anything on it, and is never tuned to a score.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from phenoica import schema
from phenoica.errors import ConfigError

N_CHANNELS = 6  # 1 DNA, 2 ER, 3 actin, 4 RNA, 5 mitochondria, 6 Golgi and plasma membrane
PLATE_ROWS, PLATE_COLUMNS = 32, 48
NEGATIVE_LABEL = "EMPTY_control"

# A unit on an axis is roughly a doubling or halving of what it names; 0 is the unperturbed cell.
AXES = (
    "density", "nuclear_size", "nuclear_irregularity", "cell_size", "chromatin_texture", "er_texture", "actin_fibres",
    "nucleoli", "rna", "mito_fragmentation", "golgi_spread",
)  # fmt: skip

# values of well_type_label and of the column effect_class of the truth
QUERY, NEGATIVE_CONTROL, POSITIVE_CONTROL, CUTTING_CONTROL = (
    "query", "negative_control", "positive_control", "cutting_control",
)  # fmt: skip
NULL, TEXTURE, COUNT, SHAPE = "null", "texture", "count", "shape"
POSITION_CONFOUNDED, BATCH_CONFOUNDED = "position_confounded", "batch_confounded"

CONTROL_EFFECTS: dict[str, tuple[str, str, int, dict[str, float]]] = {
    # gene: (well type, effect class, guides, effect). PLK1 is mostly nuclear shape, so that count alone does not win.
    "PLK1": (POSITIVE_CONTROL, SHAPE, 6, {
        "density": -0.30, "nuclear_size": 0.45, "nuclear_irregularity": 0.60, "chromatin_texture": 0.20}),
    "MTOR": (POSITIVE_CONTROL, SHAPE, 6, {"cell_size": -0.30, "nucleoli": -0.45, "rna": -0.35, "density": -0.08}),
    "EIF3H": (CUTTING_CONTROL, SHAPE, 1, {"rna": -0.14, "nucleoli": -0.12, "density": -0.05}),
    "SRC": (CUTTING_CONTROL, NULL, 1, {}),
    "HCK": (CUTTING_CONTROL, NULL, 1, {}),
    "CYP11B1": (CUTTING_CONTROL, TEXTURE, 1, {"er_texture": 0.16, "mito_fragmentation": 0.10}),
}  # fmt: skip

# One entry a query gene; the first PAIRED_GENES stand in two experiments, the last ones in one.
QUERY_EFFECTS: tuple[tuple[str, dict[str, float]], ...] = (
    (POSITION_CONFOUNDED, {}),
    (BATCH_CONFOUNDED, {}),
    (NULL, {}), (NULL, {}), (NULL, {}), (NULL, {}), (NULL, {}), (NULL, {}), (NULL, {}), (NULL, {}), (NULL, {}),
    (TEXTURE, {"er_texture": 0.80}),
    (TEXTURE, {"er_texture": 0.40}),
    (TEXTURE, {"er_texture": -0.60}),
    (TEXTURE, {"actin_fibres": 0.90}),
    (TEXTURE, {"actin_fibres": 0.45}),
    (TEXTURE, {"actin_fibres": -0.80}),
    (TEXTURE, {"mito_fragmentation": 0.90}),
    (TEXTURE, {"mito_fragmentation": 0.50}),
    (TEXTURE, {"mito_fragmentation": 0.20}),
    (TEXTURE, {"chromatin_texture": 0.90}),
    (TEXTURE, {"chromatin_texture": 0.50}),
    (TEXTURE, {"golgi_spread": 0.80}),
    (TEXTURE, {"golgi_spread": 0.40}),
    (COUNT, {"density": -0.90}),
    (COUNT, {"density": -0.60}),
    (COUNT, {"density": -0.35}),
    (COUNT, {"density": -0.50, "cell_size": 0.10}),
    (COUNT, {"density": -0.20}),
    (SHAPE, {"nuclear_size": 0.50, "density": -0.10}),
    (SHAPE, {"nuclear_size": -0.35}),
    (SHAPE, {"cell_size": 0.35, "actin_fibres": 0.20}),
    (SHAPE, {"cell_size": -0.20, "density": -0.10}),
    (SHAPE, {"nucleoli": 0.60}),
    (SHAPE, {"rna": -0.50, "nucleoli": -0.40}),
    (SHAPE, {"nuclear_irregularity": 0.70, "density": -0.15}),
    (SHAPE, {"rna": 0.40, "er_texture": 0.35}),
    (SHAPE, {"golgi_spread": 0.40, "cell_size": 0.15}),
    (TEXTURE, {"golgi_spread": -0.60}),
    (COUNT, {"density": -0.70}),
    (SHAPE, {"nuclear_size": 0.30, "nuclear_irregularity": 0.25}),
    (NULL, {}),
)  # fmt: skip
PAIRED_GENES = 38

PRETRAIN_EFFECTS: tuple[tuple[str, dict[str, float]], ...] = (
    (NULL, {}),
    (TEXTURE, {"er_texture": 0.50}),
    (TEXTURE, {"actin_fibres": 0.50}),
    (TEXTURE, {"mito_fragmentation": 0.50}),
    (TEXTURE, {"chromatin_texture": -0.40}),
    (TEXTURE, {"golgi_spread": 0.50}),
    (COUNT, {"density": -0.60}),
    (SHAPE, {"nuclear_size": 0.35}),
    (SHAPE, {"cell_size": 0.30}),
    (SHAPE, {"rna": 0.30, "nucleoli": 0.30}),
)

PARAMETERS: dict[str, float | int] = {
    "experiments": 8,
    "pretrain_experiments": 2,
    "plates": 3,
    "negative_wells": 16,
    "query_guides": 4,
    "cells_per_field": 29.0,
    # sd of the parts of a phenotype axis
    "well_sd": 0.08,
    "experiment_sd": 0.22,
    "plate_sd": 0.05,
    "experiment_density_sd": 0.25,
    "plate_density_sd": 0.10,
    # guides: efficacy drawn evenly from this range; one guide of a gene is weak
    "efficacy_low": 0.6,
    "efficacy_high": 1.0,
    "weak_efficacy": 0.3,
    # acquisition, per experiment: evenly spread over the experiments between the two ends
    "blur_low": 0.25,
    "blur_high": 1.15,
    "background_low": 0.03,
    "background_high": 0.11,
    "background_texture_low": 0.01,
    "background_texture_high": 0.06,
    "background_scale_low": 1.5,
    "background_scale_high": 5.0,
    "illumination_low": 0.03,
    "illumination_high": 0.25,
    "bleed_low": 0.0,
    "bleed_high": 0.13,
    "gamma_low": -0.20,
    "gamma_high": 0.20,
    # plate drift and wells
    "plate_blur_sd": 0.08,
    "plate_gamma_sd": 0.04,
    "plate_gain_sd": 0.12,
    "well_gain_sd": 0.05,
    "gradient_sd": 0.06,
    # position
    "edge_density": -0.30,
    "second_ring_density": -0.12,
    "edge_rna": 0.10,
    # planted accidents
    "blocked_experiment": 3,
    "blocked_plate": 2,
    "blocked_column": 17,
    "blocked_wells": 8,
    "blocked_density": -3.0,
    "out_of_focus_experiment": 6,
    "out_of_focus_plate": 1,
    "out_of_focus_blur": 2.2,
    "drifted_plate": 3,
    "drifted_blur": 0.6,
    "drifted_bleed": 0.07,
    "drifted_background_texture": 0.03,
}

# Columns of the design that are no obs columns of a run.
WELL_TYPE = "well_type_label"
EFFECT_CLASS = "effect_class"
BLOCKED = "blocked"
OUT_OF_FOCUS = "out_of_focus"
DRIFTED = "drifted_plate"
EXPERIMENT_NUMBER = "experiment_number"
EFFICACY = "efficacy"

_MAIN, _PRETRAIN = "main", "pretrain"
PARTS = (_MAIN, _PRETRAIN)
_STREAM_DESIGN, _STREAM_GUIDES, _STREAM_FACTORS = 1, 2, 3


def row_label(row: int) -> str:
    """Return the letters of a 1-based plate row: 1 -> A, 26 -> Z, 27 -> AA, 32 -> AF."""
    return chr(64 + row) if row <= 26 else "A" + chr(64 + row - 26)


def gene_names(part: str = _MAIN) -> list[str]:
    """Return the invented names of the query genes of a part; the two parts share none."""
    first, n = (1, len(QUERY_EFFECTS)) if part == _MAIN else (len(QUERY_EFFECTS) + 1, len(PRETRAIN_EFFECTS))
    return [f"DEMO{i:02d}" for i in range(first, first + n)]


def effects(part: str = _MAIN) -> dict[str, tuple[str, dict[str, float]]]:
    """Return gene -> (effect class, effect on the axes at efficacy 1), controls included."""
    table = QUERY_EFFECTS if part == _MAIN else PRETRAIN_EFFECTS
    found = {gene: (kind, effect) for gene, (_, kind, _, effect) in CONTROL_EFFECTS.items()}
    return found | dict(zip(gene_names(part), table, strict=True))


def experiments_of_genes(seed: int, part: str = _MAIN) -> dict[str, tuple[int, ...]]:
    """Return query gene -> numbers (1-based) of the experiments it stands in.

    A paired gene stands in one odd and one even experiment, so experiments fall into two groups that share no gene
    inside a group and any number of folds from two on can separate them. Every experiment holds ten genes.
    """
    genes = gene_names(part)
    if part == _PRETRAIN:
        return {gene: (1, 2) for gene in genes}
    paired = np.random.default_rng([seed, _STREAM_DESIGN]).permutation(PAIRED_GENES)
    half = PARAMETERS["experiments"] // 2
    where: dict[str, tuple[int, ...]] = {}
    load = dict.fromkeys(range(1, 2 * half + 1), 0)
    for slot, g in enumerate(paired):
        pair = (2 * (slot % half) + 1, 2 * ((slot + slot // half) % half) + 2)
        where[genes[g]] = pair
        for e in pair:
            load[e] += 1
    for gene in genes[PAIRED_GENES:]:
        emptiest = min(load, key=lambda e: (load[e], e))
        where[gene] = (emptiest,)
        load[emptiest] += 1
    return {gene: where[gene] for gene in genes}


def design(seed: int, part: str = _MAIN) -> pd.DataFrame:
    """Lay out every plate of a part.

    Parameters
    ----------
    seed
        Non-negative integer.
    part
        "main" (gene-001 ...) or "pretrain" (pretrain-001, pretrain-002: other query genes, never mixed with main).

    Returns
    -------
    pandas.DataFrame
        A row a well, ordered by experiment, plate, row and column: well_id, experiment, plate (text), address, row,
        column, edge_distance (int), perturbation (gene, or EMPTY_control), treatment (text), and well_type_label,
        effect_class (text), experiment_number (int; 101, 102 for pretrain), blocked, out_of_focus and drifted_plate
        (bool).

    Raises
    ------
    ConfigError
        For an unknown part or a negative seed.
    """
    if part not in PARTS:
        raise ConfigError(f"demo part {part!r} is unknown; use one of {', '.join(PARTS)}")
    if seed < 0:
        raise ConfigError(f"demo.seed is {seed}; it must be 0 or larger")
    where = experiments_of_genes(seed, part)
    first, n = (1, PARAMETERS["experiments"]) if part == _MAIN else (101, PARAMETERS["pretrain_experiments"])
    plates = [
        _plate(seed, part, number, plate, where)
        for number in range(first, first + n)
        for plate in range(1, PARAMETERS["plates"] + 1)
    ]
    return pd.concat(plates, ignore_index=True)


def _treatments(part: str, number: int, plate: int, where: dict[str, tuple[int, ...]]) -> pd.DataFrame:
    """Return what stands on a plate: a row a well, positions not yet drawn."""
    kinds = effects(part)
    wells = [(NEGATIVE_LABEL, NEGATIVE_LABEL, NEGATIVE_CONTROL, NULL)] * PARAMETERS["negative_wells"]
    for gene, (kind, effect_class, guides, _) in CONTROL_EFFECTS.items():
        wells += [(gene, f"{gene}_guide_{i + 1}", kind, effect_class) for i in range(guides)]
    for gene, numbers in where.items():
        if (number % 100) not in numbers:
            continue
        effect_class, copies = kinds[gene][0], 1
        if effect_class == BATCH_CONFOUNDED:
            # all its wells on the one drifted plate of its experiments: what shows is the plate, not the gene
            copies = PARAMETERS["plates"] if plate == PARAMETERS["drifted_plate"] else 0
        guides = [f"{gene}_guide_{i + 1}" for i in range(PARAMETERS["query_guides"])]
        wells += [(gene, guide, QUERY, effect_class) for guide in guides for _ in range(copies)]
    return pd.DataFrame(wells, columns=[schema.PERTURBATION, schema.TREATMENT, WELL_TYPE, EFFECT_CLASS])


def _plate(seed: int, part: str, number: int, plate: int, where: dict[str, tuple[int, ...]]) -> pd.DataFrame:
    """Draw the layout of one plate; positions are redrawn on every plate, so they do not go with the treatment."""
    rng = np.random.default_rng([seed, _STREAM_DESIGN, number, plate])
    wells = _treatments(part, number, plate, where)
    main = part == _MAIN
    here = main and (number, plate) == (PARAMETERS["blocked_experiment"], PARAMETERS["blocked_plate"])
    sites = _positions(rng, wells, blocked=here)
    row, column = sites // PLATE_COLUMNS + 1, sites % PLATE_COLUMNS + 1
    experiment = f"gene-{number:03d}" if main else f"pretrain-{number - 100:03d}"
    addresses = [f"{row_label(r)}{c:02d}" for r, c in zip(row, column, strict=True)]
    edge = np.minimum.reduce([row - 1, PLATE_ROWS - row, column - 1, PLATE_COLUMNS - column])
    focus = main and (number, plate) == (
        PARAMETERS["out_of_focus_experiment"],
        PARAMETERS["out_of_focus_plate"],
    )
    drifted = plate == PARAMETERS["drifted_plate"] and (wells[EFFECT_CLASS] == BATCH_CONFOUNDED).any()
    frame = pd.DataFrame({
        schema.WELL_ID: [f"{experiment}_{plate}_{a}" for a in addresses],
        schema.EXPERIMENT: experiment,
        schema.PLATE: str(plate),
        schema.ADDRESS: addresses,
        schema.ROW: row,
        schema.COLUMN: column,
        schema.EDGE_DISTANCE: edge,
        **{name: wells[name].to_numpy() for name in wells},
        EXPERIMENT_NUMBER: number,
        BLOCKED: (column == PARAMETERS["blocked_column"]) & here,
        OUT_OF_FOCUS: focus,
        DRIFTED: bool(drifted),
    })  # fmt: skip
    return frame.sort_values([schema.ROW, schema.COLUMN], ignore_index=True)


def _positions(rng: np.random.Generator, wells: pd.DataFrame, blocked: bool) -> np.ndarray:
    """Return a position 0..1535 for each well of a plate, none twice; int64 (wells,)."""
    sites = np.full(len(wells), -1)
    # the confounded gene always stands in the upper left corner: rows 1-2, columns 1-4
    corner = np.array([r * PLATE_COLUMNS + c for r in range(2) for c in range(4)])
    cornered = (wells[EFFECT_CLASS] == POSITION_CONFOUNDED).to_numpy()
    sites[cornered] = rng.choice(corner, cornered.sum(), replace=False)
    if blocked:
        # enough wells behind the blocked nozzle to see a column
        free = np.flatnonzero(~cornered)
        chosen = rng.choice(free, PARAMETERS["blocked_wells"], replace=False)
        rows = rng.choice(PLATE_ROWS, len(chosen), replace=False)
        sites[chosen] = rows * PLATE_COLUMNS + PARAMETERS["blocked_column"] - 1
    rest = np.setdiff1d(np.arange(PLATE_ROWS * PLATE_COLUMNS), sites)
    if blocked:
        rest = rest[rest % PLATE_COLUMNS != PARAMETERS["blocked_column"] - 1]
    sites[sites < 0] = rng.choice(rest, (sites < 0).sum(), replace=False)
    return sites


def guide_efficacies(seed: int, part: str = _MAIN) -> dict[str, float]:
    """Return treatment -> efficacy; every gene of several guides has one weak guide."""
    guides = {gene: n for gene, (_, _, n, _) in CONTROL_EFFECTS.items()}
    guides |= dict.fromkeys(gene_names(part), PARAMETERS["query_guides"])
    table = {NEGATIVE_LABEL: 0.0}
    for i, (gene, n) in enumerate(guides.items()):
        rng = np.random.default_rng([seed, _STREAM_GUIDES, 0 if gene in CONTROL_EFFECTS else PARTS.index(part), i])
        values = rng.uniform(PARAMETERS["efficacy_low"], PARAMETERS["efficacy_high"], n)
        if n > 1:
            values[rng.integers(n)] = PARAMETERS["weak_efficacy"]
        else:
            values[:] = 1.0
        table |= {f"{gene}_guide_{g + 1}": float(values[g]) for g in range(n)}
    return table


def factors(wells: pd.DataFrame, seed: int, part: str = _MAIN) -> pd.DataFrame:
    """Draw the true factors of every well of a design.

    Parameters
    ----------
    wells
        A frame of `design`.
    seed, part
        The ones the design was drawn with.

    Returns
    -------
    pandas.DataFrame
        float64 columns, rows as in `wells`: efficacy; effect_<axis> (what the perturbation does); batch_<axis>
        (experiment and plate shift); position_<axis> for density and rna; phenotype_<axis> (the sum with the well's own
        deviation and a blocked nozzle: what is rendered); blur (px at 128 px), background, background_texture,
        background_scale (px at 128 px), illumination, illumination_angle (rad), bleed_1 .. bleed_6 (share), gamma,
        gain_1 .. gain_6.
    """
    efficacy = wells[schema.TREATMENT].map(guide_efficacies(seed, part)).to_numpy(float)
    table = effects(part)
    strength = {gene: [effect.get(axis, 0.0) for axis in AXES] for gene, (_, effect) in table.items()}
    strength[NEGATIVE_LABEL] = [0.0] * len(AXES)
    effect = np.array([strength[gene] for gene in wells[schema.PERTURBATION]]) * efficacy[:, None]
    batch, acquisition, noise = _drawn(wells, seed)
    position = _position(wells, batch.pop("gradient").to_numpy())
    total = effect + batch.to_numpy() + noise
    for axis in position:
        total[:, AXES.index(axis)] += position[axis].to_numpy()
    total[wells[BLOCKED].to_numpy(), 0] += PARAMETERS["blocked_density"]
    return pd.concat(
        [
            pd.DataFrame({EFFICACY: efficacy}),
            pd.DataFrame(effect, columns=[f"effect_{a}" for a in AXES]),
            batch.add_prefix("batch_"),
            position.add_prefix("position_"),
            pd.DataFrame(total, columns=[f"phenotype_{a}" for a in AXES]),
            acquisition,
        ],
        axis=1,
    )


def _position(wells: pd.DataFrame, gradient: np.ndarray) -> pd.DataFrame:
    """Return what the place on the plate does: outer rings are thinner and stain brighter; a slope over columns."""
    ring = wells[schema.EDGE_DISTANCE].to_numpy()
    density = np.select([ring == 0, ring == 1], [PARAMETERS["edge_density"], PARAMETERS["second_ring_density"]], 0.0)
    slope = gradient * (2 * (wells[schema.COLUMN].to_numpy() - 1) / (PLATE_COLUMNS - 1) - 1)
    return pd.DataFrame({"density": density + slope, "rna": np.where(ring == 0, PARAMETERS["edge_rna"], 0.0)})


def _drawn(wells: pd.DataFrame, seed: int) -> tuple[pd.DataFrame, pd.DataFrame, np.ndarray]:
    """Draw experiment, plate and well parts: the shifts of the axes, the acquisition, and the wells' own deviations."""
    shifts, acquisitions, noises = [], [], []
    spread = _experiment_spread(seed)
    for (number, plate), group in wells.groupby([EXPERIMENT_NUMBER, schema.PLATE], sort=False):
        rng = np.random.default_rng([seed, _STREAM_FACTORS, number])
        sd = np.where(np.array(AXES) == "density", PARAMETERS["experiment_density_sd"], PARAMETERS["experiment_sd"])
        shift = rng.normal(size=len(AXES)) * sd
        common = {"illumination_angle": rng.uniform(0, 2 * np.pi)}
        bleed = rng.uniform(0.4, 1.0, N_CHANNELS) * spread[number]["bleed"]
        rng = np.random.default_rng([seed, _STREAM_FACTORS, number, int(plate)])
        sd = np.where(np.array(AXES) == "density", PARAMETERS["plate_density_sd"], PARAMETERS["plate_sd"])
        shift = shift + rng.normal(size=len(AXES)) * sd
        values = {k: v for k, v in spread[number].items() if k != "bleed"} | common
        values["blur"] = max(0.1, values["blur"] + PARAMETERS["plate_blur_sd"] * rng.normal())
        values["gamma"] += PARAMETERS["plate_gamma_sd"] * rng.normal()
        gain = PARAMETERS["plate_gain_sd"] * rng.normal(size=N_CHANNELS)
        gradient = PARAMETERS["gradient_sd"] * rng.normal()
        bleed = bleed + _accidents(group.iloc[0], values)
        n = len(group)
        noises.append(rng.normal(size=(n, len(AXES))) * PARAMETERS["well_sd"])
        gains = np.exp(gain + PARAMETERS["well_gain_sd"] * rng.normal(size=(n, N_CHANNELS)))
        shifts.append(
            pd.DataFrame({a: shift[i] for i, a in enumerate(AXES)} | {"gradient": gradient}, index=group.index)
        )
        values |= {f"bleed_{c + 1}": bleed[c] for c in range(N_CHANNELS)}
        acquisition = pd.DataFrame(values, index=group.index)
        acquisitions.append(acquisition.assign(**{f"gain_{c + 1}": gains[:, c] for c in range(N_CHANNELS)}))
    return pd.concat(shifts), pd.concat(acquisitions), np.concatenate(noises)


def _accidents(well: pd.Series, values: dict[str, float]) -> float:
    """Add what went wrong on a plate to its acquisition values; return what it adds to the bleed-through."""
    if well[OUT_OF_FOCUS]:
        values["blur"] += PARAMETERS["out_of_focus_blur"]
    if not well[DRIFTED]:
        return 0.0
    values["blur"] += PARAMETERS["drifted_blur"]
    values["background_texture"] += PARAMETERS["drifted_background_texture"]
    return PARAMETERS["drifted_bleed"]


def _experiment_spread(seed: int) -> dict[int, dict[str, float]]:
    """Spread each acquisition factor evenly over the experiments, each in its own order, so that they stay apart."""
    names = ("blur", "background", "background_texture", "background_scale", "illumination", "bleed", "gamma")
    spread: dict[int, dict[str, float]] = {}
    for first, n in ((1, PARAMETERS["experiments"]), (101, PARAMETERS["pretrain_experiments"])):
        rng = np.random.default_rng([seed, _STREAM_FACTORS, 0, first])
        numbers = range(first, first + n)
        for name in names:
            low, high = PARAMETERS[f"{name}_low"], PARAMETERS[f"{name}_high"]
            places = (rng.permutation(n) + rng.uniform(0.2, 0.8, n)) / n
            for number, place in zip(numbers, places, strict=True):
                spread.setdefault(number, {})[name] = float(low + (high - low) * place)
    return spread
