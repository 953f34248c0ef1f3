"""What an import will write, before any image is decoded.

What comes in is an `ImageList` and the options; what goes out is a `Plan`: the images in the order of their keys, each
with the files or pages that hold its z planes. Everything that contradicts itself is refused here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from phenoica.errors import ImageError, ImageImportError
from phenoica.plates.image_files import count_channels
from phenoica.plates.image_lists import (
    ADDRESS,
    CHANNEL,
    EXPERIMENT,
    PAGE,
    PATH,
    PLANE,
    PLATE,
    SITE,
    WELL_KEYS,
    ImageList,
    channel_name,
)  # fmt: skip

REJECTED_COLUMNS = ("key", "well_id", "path", "page", "reason")
MAX_CHANNELS = 11  # what the encoder takes
INNER = "inner_channel"  # the channel's number within its file, where the file says which channel it is


@dataclass(frozen=True)
class ImportOptions:
    """What decides the bytes of the shards, besides the images.

    Attributes
    ----------
    channels
        Names or numbers of the channels to take, in order: they become 1, 2, ... None: the numbers that are found.
    planes
        "max", or the number of a z plane; None: there is one plane.
    size
        Side in pixels to which images are averaged; None keeps their size.
    compression
        Ratio of irreversible JPEG 2000; None is lossless.
    low, high
        Percentiles that become 0 and 255.
    sample
        Images a channel that the percentiles are measured on, spread over all plates.
    seed
        Of the sample.
    rescale_8bit
        Scale 8-bit images too; otherwise their levels stay as they are.
    images_per_shard
        Images of each shard but the last.
    """

    channels: tuple[str, ...] | None = None
    planes: int | str | None = None
    size: int | None = None
    compression: float | None = None
    low: float = 0.1
    high: float = 99.9
    sample: int = 100
    seed: int = 0
    rescale_8bit: bool = False
    images_per_shard: int = 6000

    def __post_init__(self) -> None:
        """Refuse values that cannot be used."""
        checks = (
            (0 <= self.low < self.high <= 100, f"percentiles {self.low:g}, {self.high:g}: use 0 <= low < high <= 100"),
            (self.sample >= 1, f"sample of {self.sample} images: use 1 or more"),
            (self.seed >= 0, f"seed {self.seed}: use 0 or more"),
            (self.images_per_shard >= 1, f"{self.images_per_shard} images a shard: use 1 or more"),
            (self.size is None or self.size >= 16, f"size {self.size}: use 16 or more pixels"),
            (self.compression is None or self.compression > 1, f"compression {self.compression}: use more than 1"),
            (
                self.planes in (None, "max") or (isinstance(self.planes, int) and self.planes >= 0),
                f"planes {self.planes!r}: use max or the number of a plane",
            ),
        )  # fmt: skip
        for good, problem in checks:
            if not good:
                raise ImageImportError(problem)


def import_options(
    *, channels: str | None = None, planes: str | None = None, scaling: object = None, **more: Any
) -> ImportOptions:
    """Return the options as a command line gives them: None takes the default.

    Parameters
    ----------
    channels
        Names separated by commas.
    planes
        max or a number.
    scaling
        A file of scales, if there is one: nothing is sampled then.
    more
        The other fields of `ImportOptions`.

    Raises
    ------
    ImageImportError
        If a value cannot be used, or says how to sample where nothing is sampled.
    """
    given = {name: value for name, value in more.items() if value is not None}
    useless = [f"--{name}" for name in ("low", "high", "sample", "seed") if name in given and scaling is not None]
    if useless:
        raise ImageImportError(
            f"{', '.join(useless)} and --scaling exclude each other: nothing is sampled with --scaling"
        )
    names = None if channels is None else tuple(channel_name(name.strip()) for name in channels.split(","))
    if names is not None and "" in names:
        raise ImageImportError(f"--channels {channels!r} names an empty channel; write them as 1,2,3 or DNA,ER,AGP")
    number = int(planes) if planes is not None and planes.isdecimal() else planes
    return ImportOptions(channels=names, planes=number, **given)


@dataclass(frozen=True, slots=True)
class Source:
    """Where one file or page of an image is."""

    path: str
    page: int | None
    inner_channel: int | None


@dataclass(frozen=True, slots=True)
class PlannedImage:
    """One image of a shard, from one file, or from several that hold its z planes."""

    key: str
    well_id: str
    plate_id: str
    channel: int
    sources: tuple[Source, ...]
    planes: int | str | None

    def rejected(self, reason: str) -> dict[str, Any]:
        """Return a row of quarantine.csv."""
        first = self.sources[0]
        return dict(zip(REJECTED_COLUMNS, (self.key, self.well_id, first.path, first.page, reason), strict=True))


@dataclass(frozen=True)
class Plan:
    """All images, in the order of their keys, and what was found wrong without decoding.

    Attributes
    ----------
    images
        Sorted by key.
    wells
        experiment, plate, address, well_id of each well.
    table
        images.csv: key, path, page, plane, inner_channel, a row a file or page.
    channels
        Channel numbers.
    rejected
        Rows of quarantine.csv.
    notes
        Sentences to tell the user.
    """

    images: list[PlannedImage]
    wells: pd.DataFrame
    table: pd.DataFrame
    channels: list[int]
    rejected: list[dict[str, Any]]
    notes: list[str]


def plan_images(found: ImageList, options: ImportOptions) -> Plan:
    """Give channels their numbers and images their keys, and group z planes; nothing is decoded.

    Raises
    ------
    ImageImportError
        If two files claim the same image, a file serves two images, two wells have the same id, channels have no
        numbers, or several planes are found and `options.planes` does not say which.
    """
    notes = list(found.notes)
    table, rejected = _with_inner_channels(found)
    table, channels = _numbered_channels(table, options.channels, notes)
    table = _chosen_planes(table, options.planes, notes)
    table["well_id"] = table[EXPERIMENT] + "_" + table[PLATE] + "_" + table[ADDRESS]
    table["key"] = [
        f"{experiment}/Plate{plate}/{address}_s{site}_{channel}"
        for experiment, plate, address, site, channel in zip(
            *(table[c] for c in (*WELL_KEYS, SITE, CHANNEL)), strict=True
        )
    ]
    table = table.sort_values(["key", PLANE], kind="stable", ignore_index=True)
    _check_unique(table)
    wells = table.drop_duplicates(WELL_KEYS)[[*WELL_KEYS, "well_id"]].reset_index(drop=True)
    _check_well_ids(wells)
    notes += _missing_channels(table, channels)
    columns = ["key", PATH, PAGE, PLANE, INNER]
    return Plan(_grouped(table, options.planes), wells, table[columns], channels, rejected, notes)


def _with_inner_channels(found: ImageList) -> tuple[pd.DataFrame, list[dict[str, Any]]]:
    """Give every channel within a file a row of its own, where neither list nor name says the channel."""
    table = found.images.copy()
    table[INNER] = pd.array([pd.NA] * len(table), dtype="Int64")
    unknown = table[CHANNEL].isna()
    if not unknown.any():
        return table, []
    rejected, rows = [], []
    for row in table[unknown].to_dict("records"):
        try:
            n = count_channels(found.base / row[PATH])
        except ImageError as error:
            well_id = f"{row[EXPERIMENT]}_{row[PLATE]}_{row[ADDRESS]}"
            rejected.append(dict(zip(REJECTED_COLUMNS, (None, well_id, row[PATH], None, str(error)), strict=True)))
            continue
        rows += [{**row, CHANNEL: str(i), INNER: i} for i in range(1, n + 1)]
    more = pd.DataFrame(rows, columns=table.columns).astype(table.dtypes.to_dict())
    whole = pd.concat([frame for frame in (table[~unknown], more) if len(frame)] or [more], ignore_index=True)
    if whole.empty:
        raise ImageImportError(f"none of the {len(table)} files can be read; first {said_of(rejected[0])}")
    return whole, rejected


def said_of(entry: Mapping[str, Any]) -> str:
    """Return one line for a row of quarantine.csv."""
    return f"{entry['path']}: {entry['reason']}"


def _numbered_channels(
    table: pd.DataFrame, wanted: Sequence[str] | None, notes: list[str]
) -> tuple[pd.DataFrame, list[int]]:
    names = table[CHANNEL]
    present = sorted(
        names.unique(), key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name)
    )
    if wanted is None:
        unusable = [name for name in present if not (name.isdecimal() and name.isascii()) or int(name) < 1]
        if unusable:
            raise ImageImportError(
                f"channels {', '.join(unusable)} are no numbers from 1 on; name all in their order, such as "
                f"--channels {','.join(present)}: they become 1, 2, ..."
            )
        numbers = {name: int(name) for name in present}
    else:
        if len(set(wanted)) < len(wanted):
            raise ImageImportError(f"--channels {','.join(wanted)} names a channel twice")
        absent = [name for name in wanted if name not in present]
        if absent:
            raise ImageImportError(f"no image has channel {', '.join(absent)}; there are {', '.join(present)}")
        numbers = {name: i for i, name in enumerate(wanted, 1)}
        left_out = ~names.isin(numbers)
        if left_out.any():
            others = ", ".join(name for name in present if name not in numbers)
            notes.append(f"{left_out.sum()} images of channels {others} are left out (--channels)")
        notes.append("channels: " + ", ".join(f"{name} becomes {i}" for name, i in numbers.items()))
        table = table[~left_out]
    if len(numbers) > MAX_CHANNELS:
        raise ImageImportError(f"{len(numbers)} channels; at most {MAX_CHANNELS} can be used, choose with --channels")
    table = table.assign(**{CHANNEL: table[CHANNEL].map(numbers).astype(np.int64)}).reset_index(drop=True)
    return table, sorted(numbers.values())


def _chosen_planes(table: pd.DataFrame, planes: int | str | None, notes: list[str]) -> pd.DataFrame:
    """Return the rows of the wanted z plane, where names or list number the planes."""
    numbered = table[PLANE].notna()
    if isinstance(planes, int):
        keep = (~numbered | (table[PLANE] == planes)).astype(bool)
        if not keep.any():
            raise ImageImportError(
                f"no image has plane {planes}; there are {sorted(map(int, table[PLANE].dropna().unique()))}"
            )
        before = len(table.drop_duplicates([*WELL_KEYS, SITE, CHANNEL]))
        table = table[keep].reset_index(drop=True)
        lacking = before - len(table.drop_duplicates([*WELL_KEYS, SITE, CHANNEL]))
        if lacking:
            notes.append(f"{lacking} images have no plane {planes} and are left out")
        return table
    several = table[numbered].groupby([*WELL_KEYS, SITE, CHANNEL])[PLANE].nunique()
    several = several[several > 1]
    if planes is None and len(several):
        experiment, plate, address, site, channel = several.index[0]
        raise ImageImportError(
            f"{len(several)} images have several z planes (first: {experiment}, plate {plate}, {address}, site {site}, "
            f"channel {channel}: {several.iloc[0]} planes); say --planes max (maximum projection) or --planes NUMBER"
        )
    return table


def _check_unique(table: pd.DataFrame) -> None:
    # an image has one file, or files that all have numbers of their planes, each once
    by_key = table["key"].duplicated(keep=False)
    numbered = table[PLANE].notna()
    twice = table.duplicated(["key", PLANE], keep=False)
    doubled = twice | (by_key & table["key"].isin(table.loc[by_key & ~numbered, "key"]))
    if doubled.any():
        first = table[doubled].iloc[:2]
        raise ImageImportError(
            f"{doubled.sum()} files claim the same image as another; first {first['key'].iloc[0]}: "
            f"{', '.join(first[PATH])}; keep one of each (of time points, choose one by the pattern or the list)"
        )
    shared = table.duplicated([PATH, PAGE, INNER], keep=False)
    if shared.any():
        first = table[shared].sort_values([PATH, "key"], kind="stable").iloc[:2]
        raise ImageImportError(
            f"{first[PATH].iloc[0]} stands for {first['key'].iloc[0]} and for {first['key'].iloc[1]} "
            f"({shared.sum()} such rows); correct the list, or name the page of each"
        )


def _check_well_ids(wells: pd.DataFrame) -> None:
    doubled = wells[wells.duplicated("well_id", keep=False)].sort_values("well_id", kind="stable")
    if len(doubled):
        (e1, p1), (e2, p2) = doubled[[EXPERIMENT, PLATE]].iloc[:2].to_numpy()
        raise ImageImportError(
            f"well id {doubled['well_id'].iloc[0]} would stand for experiment {e1!r}, plate {p1!r} and for experiment "
            f"{e2!r}, plate {p2!r}; rename one of them"
        )


def _missing_channels(table: pd.DataFrame, channels: Sequence[int]) -> list[str]:
    """Say how many sites lack which channel."""
    images = table.drop_duplicates("key")
    sites = images.groupby([*WELL_KEYS, SITE], sort=True)[CHANNEL]
    short = sites.transform("size") < len(channels)
    if not short.any():
        return []
    lacking = images[short].groupby([*WELL_KEYS, SITE], sort=True)[CHANNEL].agg(set)
    counts = {c: sum(c not in present for present in lacking) for c in channels}
    shown = ", ".join(f"channel {c}: {n}" for c, n in counts.items() if n)
    experiment, plate, address, site = lacking.index[0]
    return [
        f"{len(lacking)} of {sites.ngroups} sites lack a channel ({shown}), first {experiment}_{plate}_{address} site "
        f"{site}; what becomes of such wells is decided by the run"
    ]


def _grouped(table: pd.DataFrame, planes: int | str | None) -> list[PlannedImage]:
    """Return an image for each key; `table` is sorted by key and plane."""
    images: list[PlannedImage] = []
    starts = np.flatnonzero(~table["key"].duplicated().to_numpy())
    records = table[["key", "well_id", EXPERIMENT, PLATE, CHANNEL, PATH, PAGE, INNER, PLANE]].astype(object)
    rows = list(records.where(records.notna(), None).itertuples(index=False, name=None))
    for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True):
        key, well_id, experiment, plate, channel, *_, plane = rows[start]
        sources = tuple(Source(path, page, inner) for *_, path, page, inner, _ in rows[start:stop])
        # a plane that the name says is already chosen
        chosen = None if plane is not None and planes != "max" else planes
        images.append(PlannedImage(key, well_id, f"{experiment}_{plate}", channel, sources, chosen))
    return images
