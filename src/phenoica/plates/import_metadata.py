"""What an import says of its wells: metadata.csv in the published columns, and a configuration that uses it.

What comes in are the planned wells and what the list, a plate map or an option says of them; nothing is guessed, and
what nobody said stays empty and is named.
"""

from __future__ import annotations

import glob
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pandas as pd

from phenoica import files
from phenoica.errors import ImageImportError
from phenoica.plates.address import PLATE_SHAPES, parse_address
from phenoica.plates.image_lists import ADDRESS, EXPERIMENT, WELL_KEYS
from phenoica.plates.image_plan import Plan
from phenoica.plates.metadata import PUBLISHED_COLUMNS

MUST_BE_FILLED = ("treatment", "perturbation_type")  # `phenoica plates` refuses a row without


def say(text: str) -> None:
    """Tell the user something that is no error."""
    print(f"note: {text}", file=sys.stderr)


def metadata_table(
    wells: pd.DataFrame, listed: pd.DataFrame | None, platemap: pd.DataFrame | None, constants: Mapping[str, str]
) -> pd.DataFrame:
    """Return the published columns for the wells, further columns after them; what is not known is null.

    Parameters
    ----------
    wells
        experiment, plate, address, well_id.
    listed
        Further columns of the list, a row a well; or None.
    platemap
        Further columns by address, or by plate (and experiment) and address; or None.
    constants
        One value for all wells.

    Raises
    ------
    ImageImportError
        If two of these say the same column, or one of them says what the import itself says.
    """
    table, origins = wells, {}
    for name, more, keys in (
        ("the list", listed, WELL_KEYS),
        ("the plate map", platemap, [c for c in WELL_KEYS if platemap is not None and c in platemap.columns]),
    ):
        if more is None:
            continue
        more = more.rename(columns=_published_names(more.columns, keys))
        for column in more.columns.difference(keys):
            if column in (*PUBLISHED_COLUMNS[:4], *WELL_KEYS):
                raise ImageImportError(
                    f"{name} has a column {column}, which the import makes itself; rename or drop it"
                )
            if origins.setdefault(column, name) != name:
                raise ImageImportError(f"column {column} is in the list and in the plate map; keep one of them")
        joined = table.merge(more, on=keys, how="left", indicator="_found", validate="m:1")
        table = joined.drop(columns="_found").astype(object).where(joined.notna(), None)
        _say_unmatched(name, joined, more, keys)
    for column, value in constants.items():
        if column in origins:
            raise ImageImportError(
                f"column {column} is in {origins[column]}, and --{column.replace('_', '-')} says it too"
            )
        table = table.assign(**{column: value})
    table = table.rename(columns={EXPERIMENT: "experiment_name"})
    table = table.assign(**{c: None for c in PUBLISHED_COLUMNS if c not in table.columns})
    return table[[*PUBLISHED_COLUMNS, *(c for c in table.columns if c not in PUBLISHED_COLUMNS)]]


def _published_names(columns: Iterable[str], keys: Sequence[str]) -> dict[str, str]:
    published = {name.lower(): name for name in PUBLISHED_COLUMNS}
    return {c: published[c.lower()] for c in columns if c.lower() in published and c not in keys}


def _say_unmatched(name: str, joined: pd.DataFrame, more: pd.DataFrame, keys: Sequence[str]) -> None:
    if name == "the list":
        return
    bare = joined.loc[joined["_found"] == "left_only", "well_id"]
    if len(bare) == len(joined):
        raise ImageImportError(
            f"the plate map describes none of the {len(joined)} wells (first {bare.iloc[0]}); it is joined on "
            f"{', '.join(keys)}: check how it spells them"
        )
    if len(bare):
        say(f"{len(bare)} of {len(joined)} wells are not in the plate map (first: {bare.iloc[0]}); they stay empty")
    unused = len(more) - len(more.merge(joined[list(keys)].drop_duplicates(), on=list(keys)))
    if unused:
        say(f"{unused} of {len(more)} rows of the plate map have no images")


def write_metadata(described: pd.DataFrame, path: Path) -> None:
    """Write metadata.csv unless the user changed it, and say what must be filled in.

    Parameters
    ----------
    described
        As from `metadata_table`.
    path
        The file.
    """
    text = described.to_csv(index=False)
    if path.exists() and path.read_text(encoding="utf-8") != text:
        say(f"{path} differs from what this import would write and is kept; delete it to have it written again")
        return
    files.write_text(path, text)
    empty = [c for c in PUBLISHED_COLUMNS if described[c].isna().all()]
    needed = [c for c in MUST_BE_FILLED if described[c].isna().any()]
    if empty:
        say(f"{path}: nothing is known of {', '.join(empty)}; fill in what you have")
    if needed:
        print(
            f"warning: {path}: {' and '.join(needed)} must be filled in every row before a run (treatment: what is in "
            "the well, also for controls; perturbation_type: COMPOUND or CRISPR), or import with --platemap",
            file=sys.stderr,
        )


def smallest_plate(addresses: Iterable[str]) -> int:
    """Return the smallest plate format (96, 384, 1536) that has all these addresses."""
    positions = [parse_address(address) for address in set(addresses)]
    rows, columns = (max(p[i] for p in positions) for i in (0, 1))
    return next(n for n, (r, c) in sorted(PLATE_SHAPES.items()) if rows <= r and columns <= c)


def config_text(plan: Plan, out: str | Path, plate_format: int | None = None) -> str:
    """Return a configuration (YAML) that runs on the imported images, with what the user must decide in comments."""
    out = Path(out)
    guessed = plate_format is None
    name = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in out.name).lstrip("._-")
    section = {
        "shards": [f"{glob.escape(str(out))}/train-*.parquet"],
        "metadata": str(out / "metadata.csv"),
        "plate_format": smallest_plate(plan.wells[ADDRESS]) if guessed else plate_format,
        "channels": plan.channels,
    }
    lines = [f"run: {json.dumps(name or 'imported')}", "source: shards", "plates:"]
    for key, value in section.items():
        text = f"{key}: {json.dumps(value, ensure_ascii=False)}"  # JSON is YAML
        lines.append(
            f"  {text}" + "  # the smallest that fits the wells: check it" * (guessed and key == "plate_format")
        )
    return "\n".join([
        *lines,
        "  negative_controls: [DMSO]  # treatments of your negative controls",
        "  positive_controls: []",
        "  cutting_controls: []",
        "embed:",
        "  checkpoint: random  # path of your weights; random weights are no trained model",
        f"  dna_channel: {plan.channels[0]}  # number of the nuclear stain",
        "",
    ])  # fmt: skip
