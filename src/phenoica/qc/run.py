"""The qc stage: one AnnData of embeddings in, a table of flagged wells and a table of plates out.

Nothing is removed here; later stages leave out wells with an acquisition flag only if `qc.exclude_flagged`
says so.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from phenoica import files, schema
from phenoica.qc import flags, plate_stats


def run_qc(
    embeddings_h5ad: str | os.PathLike,
    wells_out: str | os.PathLike,
    plates_out: str | os.PathLike,
    config: Mapping[str, Any],
) -> None:
    """Write qc/wells.parquet and qc/plates.parquet.

    Parameters
    ----------
    embeddings_h5ad
        Written by the embed stage; read only.
    wells_out
        A row a well: well_id, qc_acquisition, qc_phenotype (flag names joined by ";"), qc_pass, control_distance (see
        `plate_stats.control_distance`; null where it is not known).
    plates_out
        A row a plate; the columns are those of `plate_table`.
    config
        The resolved configuration; reads the section `qc`.

    Raises
    ------
    SchemaError
        If the file is not one of embed's.
    """
    import anndata

    adata = anndata.read_h5ad(embeddings_h5ad)
    schema.check(adata)
    wells, plates = assess(adata.obs, adata.obsm.get(schema.IMAGE_MEASURES), np.asarray(adata.X), config)
    files.write_parquet(wells_out, wells)
    files.write_parquet(plates_out, plates)


def assess(
    obs: pd.DataFrame, measures: pd.DataFrame | None, X: np.ndarray, config: Mapping[str, Any]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the tables of wells and of plates.

    Parameters
    ----------
    obs
        n wells with the schema's columns, indexed by well_id. Without `cell_count` nothing is said of counts.
    measures
        n image measures, named c{channel}_{measure}; None for profiles, which have no images: no acquisition flag.
    X
        (n, d) embeddings.
    config
        The resolved configuration.
    """
    run = _Run(obs, measures, X)
    found = {name: _assess_plate(run, rows, config) for name, rows in run.plates.items()}
    flags.spare_replicated_failures(run.acquisition, run.phenotype, run.perturbation, run.experiment, run.control)
    _assess_layout(run, found, config)
    wells = pd.DataFrame(
        {
            schema.WELL_ID: obs.index.astype(str).to_numpy(),
            schema.QC_ACQUISITION: [flags.join(f, flags.ACQUISITION_WORDS) for f in run.acquisition],
            schema.QC_PHENOTYPE: [flags.join(f, flags.PHENOTYPE_WORDS) for f in run.phenotype],
            schema.QC_PASS: [not f for f in run.acquisition],
            schema.CONTROL_DISTANCE: pd.array(np.where(run.known, run.distance, np.nan), "Float64"),
        }
    )
    return wells, plate_table([_plate_row(run, name, found[name]) for name in run.plates])


class _Run:
    """The wells of a run as arrays aligned by position, and the flags collected so far."""

    def __init__(self, obs: pd.DataFrame, measures: pd.DataFrame | None, X: np.ndarray):
        self.obs, self.measures = obs, measures
        plate = obs[schema.PLATE_ID].astype(str).to_numpy()
        self.plates = {str(name): np.flatnonzero(plate == name) for name in pd.unique(plate)}
        self.control = obs[schema.CONTROL].astype(str).to_numpy()
        self.role = obs[schema.CONTROL_ROLE].astype(str).to_numpy()
        self.experiment = obs[schema.EXPERIMENT].astype(str).to_numpy()
        self.perturbation = obs[schema.PERTURBATION].astype(str).to_numpy()
        self.count = flags.cell_counts(obs)
        self.complete = np.ones(len(obs), bool) if measures is None else flags.complete_wells(obs, measures)
        self.counted = self.complete & np.isfinite(self.count)  # with images, every complete well
        self.not_measured = [flags.NO_MEASURES] * (measures is None)
        self.not_measured += [flags.NO_COUNTS] * (schema.CELL_COUNT not in obs.columns)
        self.fit = (self.role == schema.FIT) & self.complete
        self.negative = (self.control == schema.NEGATIVE) & self.complete
        self.positive = (self.control == schema.POSITIVE) & self.complete
        self.distance, self.known = plate_stats.control_distance(X, plate, self.fit)
        self.acquisition: list[set[str]] = [set() for _ in plate]
        self.phenotype: list[set[str]] = [set() for _ in plate]


@dataclass
class _Found:
    """What is known of one plate besides the flags of its wells."""

    reasons: list[str]
    flags: set[str] = field(default_factory=set)
    focus_shift: float | None = None
    blocked: list[int] = field(default_factory=list)


def _assess_plate(run: _Run, rows: np.ndarray, config: Mapping[str, Any]) -> _Found:
    """Flag the wells of one plate by its own controls; return why any limit is missing."""
    obs, complete = run.obs.iloc[rows], run.complete[rows]
    acquisition, why = [set() for _ in rows], []
    if run.measures is not None:
        acquisition, why = flags.acquisition_flags(obs, run.measures.iloc[rows], complete, config)
    phenotype, also = flags.phenotype_flags(obs, complete, run.distance[rows], run.known[rows], config)
    for i, a, p in zip(rows, acquisition, phenotype, strict=True):
        run.acquisition[i], run.phenotype[i] = a, p
    reasons = why + also
    return _Found(reasons, {flags.NO_LIMITS} if reasons else set())


def _assess_layout(run: _Run, found: Mapping[str, _Found], config: Mapping[str, Any]) -> None:
    """Find plates out of focus and blocked columns, and pass both on to their wells."""
    column = run.obs[schema.COLUMN].to_numpy()
    shifts, why = _focus_shifts(run)
    for (name, rows), shift, reason in zip(run.plates.items(), shifts, why, strict=True):
        plate, usable = found[name], rows[run.counted[rows]]
        plate.focus_shift = shift
        plate.blocked = plate_stats.blocked_columns(
            run.count[usable], column[usable], run.perturbation[usable], run.negative[usable]
        )
        if reason:
            plate.reasons.append(f"focus not compared between plates: {reason}")
        if shift is not None and shift < -config["qc"]["limit_mads"]:
            plate.flags.add(flags.PLATE_FOCUS)
            for i in rows:
                run.acquisition[i].add(flags.PLATE_FOCUS)
        if plate.blocked:
            plate.flags.add(flags.DISPENSER)
            for i in rows[np.isin(column[rows], plate.blocked)]:
                run.acquisition[i].add(flags.DISPENSER)


def _focus_shifts(run: _Run) -> tuple[list[float | None], list[str]]:
    """Compare the focus of the plates of each experiment; without images there is nothing to compare, nor a reason."""
    if run.measures is None:
        return [None] * len(run.plates), [""] * len(run.plates)
    focus = flags.measure(run.measures, "focus")
    experiment = np.array([run.experiment[rows[0]] for rows in run.plates.values()])
    return plate_stats.plate_focus_shift([focus[rows[run.negative[rows]]] for rows in run.plates.values()], experiment)


def _plate_row(run: _Run, name: str, found: _Found) -> dict[str, Any]:
    """Return the numbers of one plate; None where there is no number, with the reason in `reasons`."""
    rows = run.plates[name]
    first = run.obs.iloc[rows[0]]
    negative = rows[run.negative[rows]]
    counted = negative[run.counted[negative]]
    counts = plate_stats.spread(run.count[counted], "negative controls")
    flagged = {kind: [bool(getattr(run, kind)[i]) for i in rows] for kind in ("acquisition", "phenotype")}
    row = {
        schema.PLATE_ID: name,
        schema.EXPERIMENT: str(first[schema.EXPERIMENT]),
        schema.PLATE: str(first[schema.PLATE]),
        "n_wells": len(rows),
        "n_negative": int((run.control[rows] == schema.NEGATIVE).sum()),
        "n_fit": int((run.role[rows] == schema.FIT).sum()),
        "n_reference": int((run.role[rows] == schema.REFERENCE).sum()),
        "n_positive": int((run.control[rows] == schema.POSITIVE).sum()),
        "n_cutting": int((run.control[rows] == schema.CUTTING).sum()),
        "count_median": _median(run.count[rows[run.counted[rows]]]),
        "count_control_median": _median(run.count[counted]),
        "count_control_sd": counts.sd,
        "focus_shift": found.focus_shift,
    }
    reasons = [*found.reasons, *_add_effects(row, run, rows)]
    for kind, values in flagged.items():
        row[f"n_{kind}"], row[f"share_{kind}"] = sum(values), float(np.mean(values))
    row["blocked_columns"] = flags.SEPARATOR.join(map(str, found.blocked))
    row["flags"] = flags.join(found.flags, flags.PLATE_WORDS)
    row["reasons"] = "; ".join(reasons)
    row["not_measured"] = flags.SEPARATOR.join(run.not_measured)
    for measure in ("focus", "mean") if run.measures is not None else ():
        values = flags.measure(run.measures, measure)[negative]
        for j, channel in enumerate(flags.channels(run.measures)):
            row[f"c{channel}_{measure}_control_median"] = _median(values[:, j])
    return row


def _add_effects(row: dict[str, Any], run: _Run, rows: np.ndarray) -> list[str]:
    """Add Z' factors and the edge effect to the row of a plate; return why any is missing."""
    negative, positive = rows[run.negative[rows]], rows[run.positive[rows]]
    complete = rows[run.counted[rows]]
    counted = positive[run.counted[positive]]
    row["zprime_count"], row["zprime_count_control"], why_count = plate_stats.best_zprime(
        run.count[counted], run.perturbation[counted], run.count[negative[run.counted[negative]]]
    )
    # fit controls leave themselves out of the centre, so all negative controls are a fair null for the
    # positives
    row["zprime_distance"], row["zprime_distance_control"], why_distance = plate_stats.best_zprime(
        run.distance[positive[run.known[positive]]],
        run.perturbation[positive[run.known[positive]]],
        run.distance[negative[run.known[negative]]],
    )
    row["edge_effect_percent"], why_edge = plate_stats.edge_effect(
        run.count[complete], run.obs[schema.EDGE_DISTANCE].to_numpy()[complete]
    )
    missing = {"Z' on distance": why_distance}
    if flags.NO_COUNTS not in run.not_measured:
        missing = {"Z' on cell count": why_count, **missing, "edge effect": why_edge}
    return [f"no {what}: {why}" for what, why in missing.items() if why]


def _median(values: np.ndarray) -> float | None:
    return float(np.median(values)) if len(values) else None


def plate_table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Return the rows of plates as a table whose missing numbers are nulls (`Float64`), never NaN.

    Columns: plate_id, experiment, plate; n_wells, n_negative, n_fit, n_reference, n_positive, n_cutting;
    count_median (all complete wells), count_control_median, count_control_sd (negative controls, robust);
    focus_shift (robust sd, negative = blurrier than the sister plates); zprime_count, zprime_distance and
    the positive control that gives each; edge_effect_percent; n_ and share_ of wells with an acquisition or
    phenotype flag; blocked_columns and flags (names joined by ";"); reasons (why a number or limit is
    missing); not_measured (names of `flags.NOT_MEASURED_WORDS`, joined by ";": what no plate of the run has, "" for
    images); c{channel}_focus_control_median, c{channel}_mean_control_median.
    """
    table = pd.DataFrame(rows)
    optional = ["count_median", "count_control_median", "count_control_sd", "focus_shift", "zprime_count"]
    optional += ["zprime_distance", "edge_effect_percent"]
    optional += [c for c in table.columns if c.endswith("_control_median") and c not in optional]
    return table.astype(dict.fromkeys(optional, "Float64"))
