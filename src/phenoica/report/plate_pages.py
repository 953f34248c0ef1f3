"""One page a plate and an index of all plates.

The AnnData of embeddings and the tables of the qc stage come in; static pages come out, with maps of cell
count, focus and intensity over the plate, and the flagged wells in plain words. Missing wells are grey.
"""

from __future__ import annotations

import html
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from phenoica import files, schema
from phenoica.errors import SchemaError
from phenoica.plates.address import plate_shape, row_letters
from phenoica.qc import flags, plate_stats
from phenoica.report import figures, pages

COLOUR_PERCENTILES = (2, 98)  # one extreme well must not wash out the rest of the map
MAP_ENDS = "Colours end at the 2nd and 98th percentile of the plate; grey = no well. Point at a well for its value."


def write_experiment(
    embeddings_h5ad: str | os.PathLike,
    qc_wells: str | os.PathLike,
    qc_plates: str | os.PathLike,
    experiment: str,
    out_dir: str | os.PathLike,
    plotly_src: str | os.PathLike,
    *,
    plate_format: int = 1536,
    exclude_flagged: bool = False,
) -> None:
    """Write a page for every plate of an experiment: `<plate>.html` in `out_dir`, which is replaced as a whole.

    An experiment without an embedded well gets one page, index.html, that says so.

    Parameters
    ----------
    embeddings_h5ad
        Written by the embed stage; its matrix is not read.
    qc_wells, qc_plates
        Written by the qc stage.
    experiment
        Name of the experiment, and of the folder that `index.html` of the plates links to.
    out_dir
        report/plates/<experiment>.
    plotly_src
        Path of the shared script (`pages.plotly_script`); the pages link to it relatively.
    plate_format
        Wells a plate has room for: 96, 384 or 1536.
    exclude_flagged
        `qc.exclude_flagged` of the run, for the wording.

    Raises
    ------
    SchemaError
        If the name of the experiment or of a plate cannot be a file name.
    """
    import anndata

    pages.file_name(experiment, "experiment")
    adata = anndata.read_h5ad(embeddings_h5ad, backed="r")
    obs, measures, uns = adata.obs, adata.obsm.get(schema.IMAGE_MEASURES), dict(adata.uns[schema.UNS])
    adata.file.close()
    keep = (obs[schema.EXPERIMENT].astype(str) == experiment).to_numpy()
    if not keep.any():
        # the job list is older than the images: all wells of an experiment may turn out to be bad
        with files.atomic_dir(out_dir) as folder:
            pages.write_page(
                "empty_experiment.html",
                folder / "index.html",
                experiment=experiment,
                index_link=pages.link(Path(out_dir).parent / "index.html", Path(out_dir) / "index.html"),
                sentences=pages.encoder_sentences(uns),
            )
        return
    wells = pd.read_parquet(qc_wells).set_index(schema.WELL_ID)[[*schema.QC_COLUMNS, schema.CONTROL_DISTANCE]]
    obs, measures = obs[keep].join(wells, validate="1:1"), None if measures is None else measures[keep]
    if obs[schema.QC_PASS].isna().any():
        raise SchemaError(f"{qc_wells}: wells of {experiment!r} are missing; rerun the qc stage")
    plates = sorted_plates(pd.read_parquet(qc_plates))
    with files.atomic_dir(out_dir) as folder:
        for position in np.flatnonzero(plates[schema.EXPERIMENT] == experiment):
            row = plates.iloc[position]
            on_plate = (obs[schema.PLATE].astype(str) == row[schema.PLATE]).to_numpy()
            measured = None if measures is None else measures[on_plate]
            values = plate_values(obs[on_plate], measured, row, plate_format)
            page = f"{pages.file_name(row[schema.PLATE], 'plate')}.html"
            # links are worked out for the final folder: the temporary one stands beside it
            links = _plate_links(plates, int(position), Path(out_dir) / page, Path(plotly_src))
            pages.write_page(
                "plate.html",
                folder / page,
                links=links,
                excluded=exclude_flagged,
                sentences=pages.encoder_sentences(uns),
                **values,
            )


def sorted_plates(plates: pd.DataFrame) -> pd.DataFrame:
    """Return the table of plates in reading order: experiment, then plate, numbers by value."""
    order = sorted(
        range(len(plates)),
        key=lambda i: [pages.natural_key(plates[c].iloc[i]) for c in (schema.EXPERIMENT, schema.PLATE)],
    )
    return plates.iloc[order].reset_index(drop=True)


def _plate_links(plates: pd.DataFrame, position: int, page: Path, plotly: Path) -> dict[str, str]:
    top = page.parent.parent

    def target(row: pd.Series) -> Path:
        return top / row[schema.EXPERIMENT] / f"{row[schema.PLATE]}.html"

    links = {
        "plotly": pages.link(plotly, page),
        "index": pages.link(top / "index.html", page),
        "run": pages.link(top.parent.parent / "index.html", page),
        "previous": "",
        "next": "",
    }
    for name, other in (("previous", position - 1), ("next", position + 1)):
        if 0 <= other < len(plates):
            row = plates.iloc[other]
            links[name] = pages.link(target(row), page)
            links[f"{name}_name"] = f"{row[schema.EXPERIMENT]}, plate {row[schema.PLATE]}"
    return links


def plate_values(
    obs: pd.DataFrame, measures: pd.DataFrame | None, row: pd.Series, plate_format: int = 1536
) -> dict[str, Any]:
    """Return what the template of a plate page shows.

    Parameters
    ----------
    obs
        The n wells of the plate with the columns of embed and qc.
    measures
        Their image measures; None for profiles.
    row
        The plate's row of qc/plates.parquet.
    plate_format
        96, 384 or 1536.
    """
    maps = plate_maps(obs, measures)
    n_rows, n_columns = plate_shape(plate_format)
    data = {
        "columns": n_columns,
        "row_names": [row_letters(r + 1) for r in range(n_rows)],
        "row_step": 2 if n_rows > 16 else 1,
        "column_step": 4 if n_columns > 24 else 1,
        "height": 90 + (17 if n_rows > 16 else 24) * n_rows,
        "wells": [_well_on_map(well) for _, well in obs.iterrows()],
        "maps": maps,
    }
    return {
        "experiment": row[schema.EXPERIMENT],
        "plate": row[schema.PLATE],
        "stats": row,
        "plate_flags": plate_sentences(row),
        "facts": plate_facts(row),
        "reasons": row["reasons"],
        "images": measures is not None,
        "not_measured": not_measured_sentence(row),
        "maps": maps,
        "flagged": flagged_wells(obs, measures, row),
        "data": pages.script_json(data),
    }


def _well_on_map(well: pd.Series) -> dict[str, Any]:
    found = [flags.ACQUISITION_WORDS[f] for f in flags.split(well[schema.QC_ACQUISITION])]
    found += [flags.PHENOTYPE_WORDS[f] for f in flags.split(well[schema.QC_PHENOTYPE])]
    control = str(well[schema.CONTROL])
    lines = [str(well[schema.ADDRESS]), str(well[schema.PERTURBATION])]
    if str(well[schema.TREATMENT]) != lines[1]:
        lines.append(str(well[schema.TREATMENT]))
    if control != schema.NONE:
        lines.append(f"{control} control")
    lines += found
    return {
        "row": int(well[schema.ROW]),
        "column": int(well[schema.COLUMN]),
        "control": control,
        "acquisition": bool(well[schema.QC_ACQUISITION]),
        # plotly reads a little HTML in its labels, so a name must not be HTML
        "hover": "<br>".join(html.escape(line) for line in lines),
    }


def not_measured_sentence(row: Mapping[str, Any]) -> str:
    """Return what was not measured in this run, in words; "" where everything was."""
    words = [flags.NOT_MEASURED_WORDS[name] for name in flags.split(row["not_measured"])]
    return f"Not measured in this run: {'; '.join(words)}." if words else ""


def plate_maps(obs: pd.DataFrame, measures: pd.DataFrame | None) -> list[dict[str, Any]]:
    """Return the maps of a plate, each with one or more measures: cell count, focus and intensity.

    A measure has one value and one text a well; a value that was not measured is None and its text says so. Profiles
    have no focus and no intensity, and a cell count only if they bring one; the layout and the distance from the
    controls, where it is known, stand in their place.
    """
    maps = []
    if schema.CELL_COUNT in obs.columns:
        maps.append({
            "id": "map-count", "title": "Cell count", "colorscale": "Viridis",
            "caption": f"{'Nuclei counted' if measures is not None else 'Cells, as the profiles give them,'} in each "
            f"well. {MAP_ENDS}",
            "measures": [_measure("cells", "cells", obs[schema.CELL_COUNT].to_numpy(dtype=np.float64))],
        })  # fmt: skip
    if measures is not None:
        return maps + _image_maps(obs, measures)
    present = {**_measure("profile", "", np.ones(len(obs))), "text": ["yes"] * len(obs)}
    maps.append({
        "id": "map-layout", "title": "Layout", "colorscale": "Cividis",
        "caption": "Where the wells with a profile are; grey = no well. Point at a well for its treatment.",
        "measures": [present],
    })  # fmt: skip
    distance = obs[schema.CONTROL_DISTANCE].to_numpy(dtype=np.float64, na_value=np.nan)
    if np.isfinite(distance).any():
        maps.append({
            "id": "map-distance", "title": "Distance from the controls", "colorscale": "Viridis",
            "caption": "How far the embedding of a well is from the median fit control of this plate, in robust sd of "
            f"single controls (root mean square over features). {MAP_ENDS}",
            "measures": [_measure("distance", "sd", distance)],
        })  # fmt: skip
    return maps


def _image_maps(obs: pd.DataFrame, measures: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the maps of focus and intensity."""
    channels = flags.channels(measures)
    focus, mean = flags.measure(measures, "focus"), flags.measure(measures, "mean")
    by_channel = [f"channel {c}" for c in channels]
    focus_measures = [_measure(name, "focus", values) for name, values in zip(by_channel, focus.T, strict=True)]
    finite = np.isfinite(focus).all(axis=1)
    control = (obs[schema.CONTROL].astype(str) == schema.NEGATIVE).to_numpy() & finite
    z, _ = plate_stats.channel_z(np.where(finite[:, None], focus, 0.0), control)
    if z is not None:
        typical = np.where(finite, np.median(z, axis=1), np.nan)
        focus_measures.insert(0, _measure("all channels", "sd from controls", typical))
    return [
        {
            "id": "map-focus",
            "title": "Focus",
            "colorscale": "Cividis",
            "caption": "Sharpness: the slope of the log power spectrum; lower (darker) = blurrier. “All channels” is "
            "the median over channels of the distance to the median control well, in robust standard deviations; wells "
            f"far below 0 are flagged. {MAP_ENDS}",
            "measures": focus_measures,
        },
        {
            "id": "map-intensity",
            "title": "Intensity",
            "colorscale": "Viridis",
            "caption": f"Mean grey level of the images of a well, 0 (black) to 255 (brightest). {MAP_ENDS}",
            "measures": [_measure(name, "grey level", values) for name, values in zip(by_channel, mean.T, strict=True)],
        },
    ]


def _measure(label: str, unit: str, values: np.ndarray) -> dict[str, Any]:
    finite = values[np.isfinite(values)]
    low, high = np.percentile(finite, COLOUR_PERCENTILES) if len(finite) else (0.0, 1.0)
    if low == high:
        low, high = low - 0.5, high + 0.5
    return {
        "label": label,
        "unit": unit,
        "low": float(low),
        "high": float(high),
        "values": [float(f"{v:.5g}") if np.isfinite(v) else None for v in values],
        "text": [pages.number(v) if np.isfinite(v) else "not measured" for v in values],
    }


def plate_sentences(row: Mapping[str, Any]) -> list[str]:
    """Return the flags of a plate in words."""
    sentences = []
    for flag in flags.split(row["flags"]):
        words = flags.PLATE_WORDS[flag]
        if flag == flags.PLATE_FOCUS:
            words += f" (by {pages.fixed(-row['focus_shift'], 1)} robust sd of single wells)"
        if flag == flags.DISPENSER:
            blocked = flags.split(row["blocked_columns"])
            names = "column " + blocked[0] if len(blocked) == 1 else "columns " + ", ".join(blocked)
            low = "most of its wells hold less than half of the plate's median cell count"
            words = f"nothing seems to be dispensed in {names}: {low}"
        sentences.append(words[0].upper() + words[1:])
    return sentences


def zprime_text(value: Any) -> str:
    """Return a Z' factor as text; how far below -3 it lies says nothing but that the medians are close."""
    if pages.is_missing(value):
        return "–"
    return "below −3" if value < -3 else pages.fixed(value)


def plate_facts(row: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return the key numbers of a plate, each with what it means."""

    def shown(key: str, decimals: int, unit: str = "", sign: bool = False) -> str:
        value = row[key]
        return "not available" if pages.is_missing(value) else pages.fixed(value, decimals, sign) + unit

    controls = "no control wells to compare with"
    if not pages.is_missing(row["count_control_median"]):
        controls = f"median negative control: {pages.number(row['count_control_median'])}"
        if not pages.is_missing(row["count_control_sd"]):
            controls += f", robust sd {pages.fixed(row['count_control_sd'], 1)}"
    best = {
        key: f"best positive control, {row[f'{key}_control']}; " if row[f"{key}_control"] else ""
        for key in ("zprime_count", "zprime_distance")
    }
    scale = "1 = perfect, above 0.5 = wide gap to the negative controls, below 0 = they overlap"
    absent = flags.split(row["not_measured"])
    facts = [
        {"name": "Cells in the median well", "value": pages.number(row["count_median"]), "note": controls},
        {
            "name": "Sharpness of the plate",
            "value": shown("focus_shift", 1, " sd", sign=True),
            "note": "against the other plates of the experiment; negative = blurrier",
        },
        {"name": "Z′ on cell count", "value": zprime_text(row["zprime_count"]), "note": best["zprime_count"] + scale},
        {
            "name": "Z′ on embedding distance",
            "value": zprime_text(row["zprime_distance"]),
            "note": best["zprime_distance"] + "same scale",
        },
        {
            "name": "Edge effect",
            "value": shown("edge_effect_percent", 0, " %", sign=True),
            "note": "cells in the outermost ring against the wells inside",
        },
    ]
    of_counts = {"Cells in the median well", "Z′ on cell count", "Edge effect"} if flags.NO_COUNTS in absent else set()
    of_images = {"Sharpness of the plate"} if flags.NO_MEASURES in absent else set()
    return [fact for fact in facts if fact["name"] not in of_counts | of_images]


def flagged_wells(obs: pd.DataFrame, measures: pd.DataFrame | None, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the flagged wells of a plate, acquisition flags first, with the reasons in words."""
    saturated, most, counts = pd.DataFrame(index=range(len(obs))), 0, flags.cell_counts(obs)
    if measures is not None:  # else no well has a flag that speaks of them
        saturated = pd.DataFrame(flags.measure(measures, "saturated"), columns=flags.channels(measures))
        most = int(obs[schema.N_TILES].max())
    wells = []
    for i, (_, well) in enumerate(obs.iterrows()):
        acquisition, phenotype = (flags.split(well[c]) for c in (schema.QC_ACQUISITION, schema.QC_PHENOTYPE))
        if not acquisition and not phenotype:
            continue
        control, count = str(well[schema.CONTROL]), counts[i]
        words = [_flag_words(flag, well, row, saturated.iloc[i], most) for flag in acquisition + phenotype]
        wells.append(
            {
                "address": str(well[schema.ADDRESS]),
                "perturbation": str(well[schema.PERTURBATION]),
                "treatment": str(well[schema.TREATMENT]),
                "control": "" if control == schema.NONE else control,
                "cells": pages.number(count) if np.isfinite(count) else "not measured",
                "acquisition": bool(acquisition),
                "kind": " and ".join(["acquisition"] * bool(acquisition) + ["phenotype"] * bool(phenotype)),
                "why": "; ".join(words),
            }
        )
    return sorted(wells, key=lambda w: (not w["acquisition"], pages.natural_key(w["address"])))


def _flag_words(flag: str, well: pd.Series, plate: Mapping[str, Any], saturated: pd.Series, most_tiles: int) -> str:
    """Return the words of one flag, with the numbers of the well where they say more."""
    if flag == flags.SATURATION:
        share = pages.number(100 * saturated.max(), 2)
        return f"saturated: {share} % of the pixels of channel {saturated.idxmax()} are at the brightest value"
    if flag == flags.MISSING and well[schema.N_TILES] < most_tiles:
        return f"incomplete: {well[schema.N_TILES]} of {most_tiles} tiles"
    if flag == flags.COUNT:
        count, median = well[schema.CELL_COUNT], plate["count_control_median"]
        word = "fewer" if count < median else "more"
        numbers = f"{pages.number(count)}; their median is {pages.number(median)}"
        return f"{word} cells than the control wells of this plate ({numbers})"
    return (flags.ACQUISITION_WORDS | flags.PHENOTYPE_WORDS)[flag]


def write_index(qc_plates: str | os.PathLike, embeddings_h5ad: str | os.PathLike, out_path: str | os.PathLike) -> None:
    """Write the page of all plates: an overview figure and a sortable table that links to every plate page.

    Parameters
    ----------
    qc_plates
        qc/plates.parquet.
    embeddings_h5ad
        Written by the embed stage, for what every page says of the encoder; its matrix is not read.
    out_path
        report/plates/index.html; the plate pages are expected in folders beside it.
    """
    plates = sorted_plates(pd.read_parquet(qc_plates))
    page = Path(out_path)
    rows = []
    for _, row in plates.iterrows():
        rows.append(
            {
                "stats": row,
                "link": pages.link(page.parent / row[schema.EXPERIMENT] / f"{row[schema.PLATE]}.html", page),
                "flags": "; ".join(plate_sentences(row)),
                "zprime": [(row[key], zprime_text(row[key])) for key in ("zprime_count", "zprime_distance")],
            }
        )
    pages.write_page(
        "plates.html",
        out_path,
        rows=rows,
        n_wells=int(plates["n_wells"].sum()),
        n_flagged=int((plates["flags"] != "").sum()),
        n_acquisition=int(plates["n_acquisition"].sum()),
        not_measured=not_measured_sentence(plates.iloc[0]),
        caption=figures.plates_caption(plates),
        run_link=pages.link(page.parent.parent.parent / "index.html", page),
        figure=figures.svg(figures.plates_figure(plates)),
        sentences=pages.encoder_sentences(pages.read_uns(embeddings_h5ad)),
    )


def write_figure(qc_plates: str | os.PathLike, out_path: str | os.PathLike) -> None:
    """Write the overview of all plates (qc/plates.parquet) as an SVG file that stands alone."""
    figures.write_svg(figures.plates_figure(sorted_plates(pd.read_parquet(qc_plates))), out_path)
