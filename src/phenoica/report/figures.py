"""Static figures as SVG: an overview of plates, scores as dots with intervals, the loss of a training.

They stand in the pages, print, and go into `snakemake --report`, which shows one file alone. Colours are
told apart by people with any colour vision, and every group has a marker of its own.
"""

from __future__ import annotations

import io
import os
import textwrap
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from phenoica import files, schema

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, ORANGE, GREY, RED = "#0072b2", "#d55e00", "#666666", "#b00020"
PLATE_LABELS = 30  # with more experiments their names would overlap


def _figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Figure, np.ndarray]:
    """Return a figure without a window system (pyplot would start one) and its axes (rows, columns)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharex="col" if columns == 1 else False)
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(labelsize=10)
    return figure, axes


def svg(figure: Figure) -> str:
    """Return a figure as an svg element for a page: no XML header, no date, the same bytes each time."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "phenoica", "svg.fonttype": "path"}):
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    title = getattr(figure, "phenoica_title", "figure")
    element = text[text.index("<svg") :]
    return element.replace("<svg ", f'<svg class="static" role="img" aria-label="{title}" ', 1)


def write_svg(figure: Figure, out_path: str | os.PathLike) -> None:
    """Write a figure as an SVG file, atomically and with the same bytes each time."""
    files.write_text(out_path, '<?xml version="1.0" encoding="utf-8"?>\n' + svg(figure))


# rows of the overview: column of qc/plates.parquet, axis label, words; a run of profiles may lack the first two
PLATE_PANELS = (
    ("count_median", "cells,\nmedian well", "cells in the median well"),
    ("focus_shift", "sharpness, sd\n(− = blurrier)", "sharpness against the median plate of the same experiment, in "
     "robust standard deviations of single wells (negative = blurrier)"),
    ("n_wells", "wells", "wells with a profile"),
    ("share_phenotype", "unusual wells,\nshare", "share of wells with a phenotype flag"),
)  # fmt: skip


def plate_panels(plates: pd.DataFrame) -> list[tuple[str, str, str]]:
    """Return the two rows of the overview: cell count and sharpness, or what profiles have in their place."""
    absent = set("".join(plates["not_measured"].iloc[:1]).split(";"))
    unknown = {"count_median": schema.CELL_COUNT, "focus_shift": schema.IMAGE_MEASURES}
    return [panel for panel in PLATE_PANELS if unknown.get(panel[0]) not in absent][:2]


def plates_caption(plates: pd.DataFrame) -> str:
    """Return what `plates_figure` shows, in words."""
    top, bottom = (words for _, _, words in plate_panels(plates))
    return f"Each dot is a plate, in the order of the table. Top: {top}. Bottom: {bottom}. Red diamonds: flagged."


def plates_figure(plates: pd.DataFrame) -> Figure:
    """Return the overview of all plates: cell count above, sharpness against the sister plates below.

    Parameters
    ----------
    plates
        Rows of qc/plates.parquet in the order of the table. Where one of the two was not measured, see `plate_panels`.
    """
    figure, axes = _figure(10.5, 4.4, rows=2)
    panels = plate_panels(plates)
    figure.phenoica_title = "Two numbers of every plate: " + "; ".join(words for _, _, words in panels)
    x = np.arange(len(plates))
    flagged = (plates["flags"] != "").to_numpy()
    for ax, (column, label, _) in zip(axes[:, 0], panels, strict=True):
        y = plates[column].to_numpy(dtype=float, na_value=np.nan)
        for where, colour, marker, size in ((~flagged, BLUE, "o", 34), (flagged, RED, "D", 46)):
            ax.scatter(x[where], y[where], c=colour, marker=marker, s=size, zorder=3, clip_on=False)
        ax.set_ylabel(label, fontsize=10)
        ax.margins(y=0.12)
        ax.grid(axis="y", color="#e2e2e2")
        if column == "focus_shift":
            ax.axhline(0, color=GREY, lw=1)
        else:
            ax.set_ylim(bottom=0)
    _experiment_ticks(axes, plates[schema.EXPERIMENT].astype(str).to_numpy())
    return figure


def _experiment_ticks(axes: np.ndarray, experiment: np.ndarray) -> None:
    starts = np.flatnonzero(np.r_[True, experiment[1:] != experiment[:-1]])
    ends = np.r_[starts[1:], len(experiment)]
    for ax in axes.flat:
        for start in starts[1:]:
            ax.axvline(start - 0.5, color="#c9c9c9", lw=0.8)
        ax.set_xlim(-0.6, len(experiment) - 0.4)
    bottom = axes[-1, 0]
    if len(starts) <= PLATE_LABELS:
        bottom.set_xticks((starts + ends - 1) / 2, [_shortened(experiment[s]) for s in starts])
        bottom.tick_params(axis="x", length=0, rotation=0 if len(starts) <= 10 else 60)
    else:
        bottom.set_xticks([])
        bottom.set_xlabel(f"{len(experiment)} plates of {len(starts)} experiments", fontsize=10)


def _shortened(text: str, most: int = 16) -> str:
    # matplotlib reads text between two dollar signs as mathematics
    return (text if len(text) <= most else text[: most - 1] + "…").replace("$", r"\$")


def _wrapped(title: str, most: int = 52) -> str:
    """Return a title in lines that a panel is wide enough for."""
    return _shortened("\n".join(textwrap.wrap(title, most)), 3 * most)


def scores_figure(panels: list[dict]) -> Figure:
    """Return macro AUROC of views and baselines as dots with intervals, one panel a contrast.

    Parameters
    ----------
    panels
        As from `score_page.panels`: title, and rows with name, kind (view, baseline, null), value, low,
        high.
    """
    names = list(dict.fromkeys(row["name"] for panel in panels for row in panel["rows"]))
    if not panels:
        figure, axes = _figure(8, 1.2)
        axes[0, 0].axis("off")
        axes[0, 0].text(0.5, 0.5, "No contrast could be scored; the page says why.", ha="center", fontsize=12)
        return figure
    columns = min(2, len(panels))
    n_rows = -(-len(panels) // columns)
    lines = max(_wrapped(panel["title"]).count("\n") + 1 for panel in panels)
    figure, axes = _figure(5.6 * columns, n_rows * (0.7 + 0.2 * lines + 0.31 * len(names)), n_rows, columns)
    figure.phenoica_title = "Held-out AUROC of every view and baseline with intervals; the numbers are in the table"
    rows = [row for panel in panels for row in panel["rows"]]
    low = min(0.4, *(row["value"] if row["low"] is None else row["low"] for row in rows), 0.5)
    for ax, panel in zip(axes.flat, panels, strict=False):
        for row in panel["rows"]:
            y, (colour, marker) = names.index(row["name"]), STYLES[row["kind"]]
            if row["low"] is not None:
                ax.plot([row["low"], row["high"]], [y, y], color=colour, lw=2, solid_capstyle="butt", alpha=0.75)
            face = colour if row["low"] is not None else "white"
            ax.plot(row["value"], y, marker, color=colour, mfc=face, ms=8, mew=1.6, clip_on=False)
        ax.axvline(0.5, color="black", lw=1, ls=(0, (4, 3)), zorder=0)
        ax.set_xlim(max(low - 0.02, 0.0), 1.0)
        ax.set_ylim(len(names) - 0.4, -0.6)
        ax.set_yticks(range(len(names)), [_shortened(n, 24) for n in names])
        ax.grid(axis="x", color="#e2e2e2")
        ax.set_title(_wrapped(panel["title"]), fontsize=11, loc="left")
        ax.set_xlabel("AUROC (0.5 = no signal)", fontsize=10)
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    return figure


def loss_figure(curve: dict) -> Figure:
    """Return the loss of a training over its steps: training smoothed, validation as dots.

    Parameters
    ----------
    curve
        As from `encoder_page.curve`: step, loss, pixel_loss (means over `window` steps), validation_step,
        validation_loss, fourier (whether the loss has that part), top (of the axis).
    """
    figure, axes = _figure(8.6, 3.9)
    figure.phenoica_title = "Loss in training and validation over the steps; the last values are in the text"
    ax, smoothed = axes[0, 0], f", mean of {curve['window']} steps" if curve["window"] > 1 else ""
    marker = "." if len(curve["step"]) == 1 else None  # a line needs two points
    ax.plot(curve["step"], curve["loss"], marker=marker, color=BLUE, lw=1.8, label=f"training{smoothed}")
    if curve["fourier"]:
        ax.plot(
            curve["step"], curve["pixel_loss"], marker=marker, color=GREY, lw=1,
            label=f"training, pixel part{smoothed}",
        )  # fmt: skip
    validation = curve["validation_step"], curve["validation_loss"]
    ax.plot(*validation, "D-", color=ORANGE, ms=4.5, lw=1, label="validation, other wells")
    ax.axhline(1, color="black", lw=1, ls=(0, (4, 3)), zorder=0, label="pixel part of predicting the mean grey value")
    ax.set_xlim(0, curve["last"] + 1)
    ax.set_ylim(top=curve["top"])
    ax.set_xlabel("step", fontsize=10)
    ax.set_ylabel("loss on hidden patches", fontsize=10)
    ax.grid(axis="y", color="#e2e2e2")
    ax.legend(fontsize=9, frameon=False, loc="upper right")
    return figure


STYLES = {"view": (BLUE, "o"), "baseline": (ORANGE, "s"), "null": (GREY, "D")}
