"""A scientist's own images to shards in the published RxRx3-core layout.

What comes in is an `ImageList` (`phenoica.plates.image_lists`); what goes out is a folder: shards of 8-bit JPEG 2000,
metadata.csv in the published columns, scaling.json, images.csv (which file each image came from), quarantine.csv and
import.json (the options). The import can be killed at any moment: a shard is written whole or not at all, and the same
command goes on with the shards that are missing, to the same bytes.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from phenoica import files
from phenoica.errors import ImageError, ImageImportError, StorageError, TooManyBadImages
from phenoica.plates import image_files, image_scaling
from phenoica.plates.image_lists import PATH, ImageList
from phenoica.plates.image_plan import REJECTED_COLUMNS, ImportOptions, Plan, PlannedImage, plan_images, said_of
from phenoica.plates.image_scaling import LevelCounts, Scale
from phenoica.plates.import_metadata import metadata_table, say, write_metadata
from phenoica.plates.metadata import MAX_LISTED
from phenoica.plates.shards import JP2, KEY, ROWS_AT_A_TIME
from phenoica.progress import Progress

RECEIPT = b"phenoica_import"
FORMAT = 1  # of import.json and the receipts
AHEAD_PER_THREAD = 4  # images on their way a thread: enough to keep it busy while a row group is written

In = TypeVar("In")
Out = TypeVar("Out")


def import_images(
    found: ImageList,
    out: str | Path,
    options: ImportOptions,
    *,
    scaling: str | Path | None = None,
    platemap: pd.DataFrame | None = None,
    constants: Mapping[str, str] | None = None,
    max_bad_fraction: float = 0.01,
    threads: int = 2,
) -> Plan:
    """Write shards, metadata.csv, scaling.json, images.csv, quarantine.csv and import.json into `out`.

    Parameters
    ----------
    found
        The images.
    out
        A folder that is empty, missing, or holds an earlier, perhaps unfinished import with the same options.
    options
        What decides the bytes of the shards.
    scaling
        scaling.json of an earlier import whose scales are used; nothing is sampled then.
    platemap
        As from `phenoica.plates.image_lists.read_platemap`: joined to the wells on the columns it has.
    constants
        Published columns with one value for all wells, such as cell_type.
    max_bad_fraction
        The import stops when more than this share of images is bad.
    threads
        Threads that decode and encode.

    Returns
    -------
    Plan
        What was imported.

    Raises
    ------
    ImageImportError
        If list, options or folder cannot be used.
    TooManyBadImages
        As soon as more images are bad than allowed; quarantine.csv holds them.
    StorageError
        If a file cannot be written. Finished shards stay, and the same command goes on.
    """
    out = Path(out)
    if scaling is not None:
        read_scaling(scaling)  # an unusable file is refused before any work
    plan = plan_images(found, options)
    for note in plan.notes:
        say(note)
    described = metadata_table(plan.wells, found.wells, platemap, constants or {})
    images_csv = _sources_table(plan.table, found.base).to_csv(index=False)
    earlier = _earlier(out, options, images_csv, scaling)
    with ThreadPoolExecutor(threads) as pool:
        ahead = AHEAD_PER_THREAD * threads
        try:
            scales = _scales(plan, found.base, options, scaling, out, earlier, pool, ahead)
            if not earlier:
                files.write_text(out / "images.csv", images_csv)
                files.write_json(out / "import.json", _import_json(options, images_csv, out, scaling))
            _remove_leftovers(out)
            done = _write_shards(plan, found.base, options, scales, out, max_bad_fraction, pool, ahead)
            _finish(plan, done, described, out)
        except (OSError, StorageError) as error:
            raise StorageError(
                f"{out}: cannot be written ({getattr(error, 'strerror', None) or error}); then give the same command "
                "again: finished shards stay"
            ) from error
    return plan


def _sources_table(table: pd.DataFrame, base: Path) -> pd.DataFrame:
    """Return images.csv: which file each image came from, with its size and time, so that a change is seen."""
    stats = {path: (base / path).stat() for path in table[PATH].unique()}
    return table.assign(
        bytes=[stats[path].st_size for path in table[PATH]],
        modified_ns=[stats[path].st_mtime_ns for path in table[PATH]],
    )


def _import_json(options: ImportOptions, images_csv: str, out: Path, scaling: str | Path | None) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "options": json.loads(json.dumps(dataclasses.asdict(options))),
        "images_sha256": files.sha256_of_json(images_csv),
        "scaling_sha256": files.sha256(out / "scaling.json"),
        "scaling_from": None if scaling is None else files.sha256(scaling),
    }


def _earlier(out: Path, options: ImportOptions, images_csv: str, scaling: str | Path | None) -> bool:
    """Return whether an import was begun here, and refuse one that was begun with other options, images or scales."""
    path = out / "import.json"
    if not path.exists():
        if out.is_dir() and any(out.glob("train-*.parquet")):
            raise ImageImportError(f"{out}: holds shards that are not from an import; choose another folder")
        return False
    told = "choose another folder, delete this one, or give the command as before"
    try:
        begun = json.loads(path.read_text(encoding="utf-8"))
        options_then, images_then, from_then = begun["options"], begun["images_sha256"], begun["scaling_from"]
        scaling_then = begun["scaling_sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise ImageImportError(f"{path}: is damaged ({error}); delete {out} and import again") from None
    now = json.loads(json.dumps(dataclasses.asdict(options)))
    changed = [f"{k} was {options_then.get(k)!r} and is now {now[k]!r}" for k in now if now[k] != options_then.get(k)]
    if changed or begun.get("format") != FORMAT:
        raise ImageImportError(f"{out}: holds an import with other options: {'; '.join(changed) or 'format'}; {told}")
    if images_then != files.sha256_of_json(images_csv):
        raise ImageImportError(
            f"{out}: holds an import of other images: {_first_change(out / 'images.csv', images_csv)}; {told}"
        )
    if from_then != (None if scaling is None else files.sha256(scaling)):
        raise ImageImportError(f"{out}: holds an import with other scales than --scaling {scaling}; {told}")
    if not (out / "scaling.json").is_file() or files.sha256(out / "scaling.json") != scaling_then:
        raise ImageImportError(f"{out}/scaling.json: was changed since the import began; {told}")
    return True


def _first_change(path: Path, images_csv: str) -> str:
    then = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    now = images_csv.splitlines()
    for before, after in zip(then, now, strict=False):
        if before != after:
            return f"{before!r} is now {after!r}"
    return f"{max(len(then) - 1, 0)} files then, {len(now) - 1} now"


def _in_order(pool: Executor, work: Callable[[In], Out], items: Iterable[In], ahead: int) -> Iterator[Out]:
    """Yield the results of `work` in the order of the items, with at most `ahead` on their way."""
    on_the_way: deque[Future[Out]] = deque()
    try:
        for item in items:
            if len(on_the_way) == ahead:
                yield on_the_way.popleft().result()
            on_the_way.append(pool.submit(work, item))
        while on_the_way:
            yield on_the_way.popleft().result()
    finally:
        for future in on_the_way:
            future.cancel()


def read_image(image: PlannedImage, base: Path, size: int | None) -> tuple[np.ndarray, int]:
    """Return the pixels of an image, planes projected and averaged to `size` but not scaled, and their bits (8, 16).

    Raises
    ------
    ImageError
        With the reason why the image cannot be used.
    ImageImportError
        If it has several planes and the options do not say which.
    """
    stacks = [
        image_files.read_stack(base / s.path, page=s.page, channel=s.inner_channel) for s in image.sources
    ]  # fmt: skip
    if len(stacks) > 1 and any(len(stack) > 1 for stack in stacks):
        raise ImageError("z planes are in the names of the files and within them; name the page of each")
    try:
        pixels = image_scaling.project(stacks, image.planes)
    except ImageImportError as error:
        raise ImageImportError(f"{image.sources[0].path}: {error}") from None
    return (pixels if size is None else image_scaling.area_mean(pixels, size)), 8 * stacks[0].dtype.itemsize


def _scales(
    plan: Plan, base: Path, options: ImportOptions, given: str | Path | None, out: Path, earlier: bool,
    pool: Executor, ahead: int,
) -> dict[int, Scale]:  # fmt: skip
    """Return the scale of each channel: of the import that was begun here, of a given file, or measured now."""
    if earlier:
        return read_scaling(out / "scaling.json")
    if given is not None:
        scales = read_scaling(given)
        files.write_text(out / "scaling.json", Path(given).read_text(encoding="utf-8"))
        return scales
    scales = measure_scales(plan.images, base, options, pool, ahead)
    files.write_json(out / "scaling.json", {
        "percentiles": [options.low, options.high], "sample": options.sample, "seed": options.seed,
        "channels": {str(c): dataclasses.asdict(scale) for c, scale in sorted(scales.items())},
    })  # fmt: skip
    return scales


def read_scaling(path: str | Path) -> dict[int, Scale]:
    """Read scaling.json of an import.

    Raises
    ------
    ImageImportError
        If it is missing or no such file.
    """
    try:
        channels = json.loads(Path(path).read_text(encoding="utf-8"))["channels"]
        return {int(c): Scale(float(s["low"]), float(s["high"]), int(s["images"])) for c, s in channels.items()}
    except OSError as error:
        raise ImageImportError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ImageImportError(f"{path}: is no scaling.json of an import ({error!r})") from None


def sample_images(images: Sequence[PlannedImage], channel: int, n: int, seed: int) -> list[PlannedImage]:
    """Return up to `n` images of a channel, drawn in turn from every plate; the draw follows from seed and channel."""
    random = np.random.default_rng([seed, channel])
    by_plate: dict[str, list[PlannedImage]] = {}
    for image in images:
        if image.channel == channel:
            by_plate.setdefault(image.plate_id, []).append(image)
    plates = [[own[i] for i in random.permutation(len(own))] for own in by_plate.values()]
    plates = [plates[i] for i in random.permutation(len(plates))]
    rounds = range(max((len(own) for own in plates), default=0))
    return [own[i] for i in rounds for own in plates if i < len(own)][:n]


def measure_scales(
    images: Sequence[PlannedImage], base: Path, options: ImportOptions, pool: Executor, ahead: int
) -> dict[int, Scale]:
    """Measure the two percentiles of each channel on a sample of all plates.

    8-bit images are left out unless they are to be scaled; a channel of only such images gets no scale. Images that
    cannot be read are left out; they are quarantined when their shard is made.

    Raises
    ------
    ImageImportError
        If a channel is constant in the sample, or has images of 8 and 16 bits that are all to be scaled.
    """
    channels = sorted({image.channel for image in images})
    sample = [image for c in channels for image in sample_images(images, c, options.sample, options.seed)]
    counts: dict[int, LevelCounts] = {}
    bits_of: dict[int, set[int]] = {}

    def read(image: PlannedImage) -> tuple[PlannedImage, np.ndarray | None, int]:
        try:
            return image, *read_image(image, base, options.size)
        except ImageError:
            return image, None, 0

    with Progress(len(sample), "sample for the scale", "image") as progress:
        for image, pixels, bits in _in_order(pool, read, sample, ahead):
            progress.update()
            if pixels is not None and (bits == 16 or options.rescale_8bit):
                counts.setdefault(image.channel, LevelCounts()).add(pixels)
                bits_of.setdefault(image.channel, set()).add(bits)
    mixed = [c for c, bits in bits_of.items() if len(bits) > 1]
    if mixed:
        raise ImageImportError(
            f"channel {mixed[0]} has images of 8 and of 16 bits, which no one scale fits; import apart"
        )
    return {c: _measured(c, levels, options) for c, levels in counts.items()}


def _measured(channel: int, levels: LevelCounts, options: ImportOptions) -> Scale:
    low, high = levels.percentile(options.low), levels.percentile(options.high)
    if low >= high:
        raise ImageImportError(
            f"channel {channel}: percentiles {options.low:g} and {options.high:g} of {levels.images} sampled images "
            f"are both {low:g}; leave the channel out (--channels), or give other percentiles or --scaling"
        )
    return Scale(low, high, levels.images)


@dataclass(frozen=True)
class Converted:
    """An image ready for its shard, or the reason why there is none."""

    image: PlannedImage
    data: bytes | None
    bits: int
    reason: str | None


def convert(image: PlannedImage, base: Path, options: ImportOptions, scales: Mapping[int, Scale]) -> Converted:
    """Read, scale and encode one image; the work of a thread.

    An 8-bit JPEG 2000 file whose pixels stay as they are is taken over byte by byte, unless it is larger than
    `options.compression` allows.
    """
    try:
        pixels, bits = read_image(image, base, options.size)
        if bits == 16 or options.rescale_8bit:
            if image.channel not in scales:
                raise ImageImportError(
                    f"{image.sources[0].path}: has {bits} bits, but no image of channel {image.channel} in the sample "
                    "had, so there is no scale; delete the folder and import with a larger --sample, or give --scaling"
                )
            pixels = scales[image.channel].apply(pixels)
        elif options.size is not None:
            pixels = np.rint(pixels).astype(np.uint8)
        elif (data := _as_it_is(image, base, options.compression, pixels.nbytes)) is not None:
            return Converted(image, data, bits, None)
        return Converted(image, image_scaling.encode(pixels, options.compression), bits, None)
    except ImageError as error:
        return Converted(image, None, 0, str(error))


def _as_it_is(image: PlannedImage, base: Path, compression: float | None, n_bytes: int) -> bytes | None:
    path = base / image.sources[0].path
    if len(image.sources) > 1 or not image_files.is_jpeg2000(path):
        return None
    data = path.read_bytes()
    return data if compression is None or len(data) * compression <= n_bytes else None


class BadImages:
    """Collect rows of quarantine.csv and stop when they are too many."""

    def __init__(self, rows: Iterable[Mapping[str, Any]], n_images: int, max_fraction: float, out: Path):
        self.rows: list[Mapping[str, Any]] = []
        self.n_images, self.max_fraction, self.out = n_images, max_fraction, out
        for row in rows:
            self.add(row)

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a bad image.

        Raises
        ------
        TooManyBadImages
            If more than the allowed share is bad; quarantine.csv is written first.
        """
        self.rows.append(row)
        if len(self.rows) > self.max_fraction * self.n_images:
            self.write()
            listed = "".join(f"\n  {said_of(row)}" for row in self.rows[:MAX_LISTED])
            raise TooManyBadImages(
                f"{len(self.rows)} of {self.n_images} images are bad so far, more than --max-bad-fraction "
                f"{self.max_fraction:g} allows; mend or remove them, or allow more ({self.out}/quarantine.csv):{listed}"
            )

    def write(self) -> None:
        """Write quarantine.csv."""
        frame = pd.DataFrame(self.rows, columns=list(REJECTED_COLUMNS)).astype({"page": "Int64"})
        files.write_csv(self.out / "quarantine.csv", frame)


def shard_paths(out: Path, n_images: int, images_per_shard: int) -> list[Path]:
    """Return the paths of all shards of an import: train-00000-of-000NN.parquet, ..."""
    n = -(-n_images // images_per_shard)
    return [out / f"train-{i:05d}-of-{n:05d}.parquet" for i in range(n)]


def _remove_leftovers(out: Path) -> None:
    """Remove half files of a killed import."""
    for leftover in out.glob(".train-*.parquet"):
        leftover.unlink()


@dataclass
class Done:
    """What all shards together hold."""

    bad: BadImages
    bits: dict[int, dict[int, int]]
    n_shards: int = 0
    n_found: int = 0


def _write_shards(
    plan: Plan, base: Path, options: ImportOptions, scales: Mapping[int, Scale], out: Path, max_bad_fraction: float,
    pool: Executor, ahead: int,
) -> Done:  # fmt: skip
    """Write the shards that are missing; take from the others what they say of their images."""
    paths = shard_paths(out, len(plan.images), options.images_per_shard)
    n_images = len(plan.images) + len(plan.rejected)
    done = Done(BadImages(plan.rejected, n_images, max_bad_fraction, out), {}, len(paths))
    with Progress(len(plan.images), "import", "image") as progress:
        for number, path in enumerate(paths):
            start = number * options.images_per_shard
            images = plan.images[start : start + options.images_per_shard]
            receipt = _receipt(images, options, scales)
            said = read_receipt(path)
            if said is not None and said["receipt"] == receipt:
                done.n_found += 1
                for row in said["rejected"]:
                    done.bad.add(row)
                progress.update(len(images))
            else:
                work = _in_order(pool, lambda image: convert(image, base, options, scales), images, ahead)
                said = _write_shard(path, work, receipt, done.bad, progress)
            for channel, counts in said["bits"].items():
                own = done.bits.setdefault(int(channel), {})
                for bits, n in counts.items():
                    own[int(bits)] = own.get(int(bits), 0) + n
    return done


def _receipt(images: Sequence[PlannedImage], options: ImportOptions, scales: Mapping[int, Scale]) -> str:
    """Return the hash of what a shard follows from, but for the pixels: its file list, scales and options."""
    listed = [(image.key, [(s.path, s.page, s.inner_channel) for s in image.sources], image.planes) for image in images]
    scale = {str(c): (s.low, s.high) for c, s in scales.items()}
    choices = (options.size, options.compression, options.rescale_8bit)
    return files.sha256_of_json([FORMAT, listed, scale, choices])


def read_receipt(path: Path) -> dict[str, Any] | None:
    """Return what a shard of an import says of itself, from its footer: receipt, rejected, bits; None without one."""
    if not path.is_file():
        return None
    try:
        stored = pq.read_metadata(path).metadata or {}
        return json.loads(stored[RECEIPT]) if RECEIPT in stored else None
    except (pa.ArrowInvalid, OSError, ValueError) as error:
        say(f"{path} is damaged ({error}) and is written again")
        return None


def _write_shard(
    path: Path, converted: Iterator[Converted], receipt: str, bad: BadImages, progress: Progress
) -> dict[str, Any]:
    """Write one shard; rejected images are left out and named in its footer."""
    cell = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns = pa.schema([(KEY, pa.string()), (JP2, cell)])
    said: dict[str, Any] = {"receipt": receipt, "rejected": [], "bits": {}}
    good = _good(converted, said, bad, progress)
    with files.atomic_path(path) as temporary, pq.ParquetWriter(temporary, columns, compression="none") as writer:
        while rows := list(itertools.islice(good, ROWS_AT_A_TIME)):
            cells = [{"bytes": one.data, "path": None} for one in rows]
            table = pa.table({KEY: [one.image.key for one in rows], JP2: cells}, schema=columns)
            writer.write_table(table, row_group_size=ROWS_AT_A_TIME)
        writer.add_key_value_metadata({RECEIPT: json.dumps(said, sort_keys=True)})
    return said


def _good(
    converted: Iterator[Converted], said: dict[str, Any], bad: BadImages, progress: Progress
) -> Iterator[Converted]:
    """Yield the images that can be used; note the others, and how many bits each channel's images had."""
    for one in converted:
        progress.update()
        if one.reason is None:
            counts = said["bits"].setdefault(str(one.image.channel), {})
            counts[str(one.bits)] = counts.get(str(one.bits), 0) + 1
            yield one
        else:
            said["rejected"].append(one.image.rejected(one.reason))
            bad.add(said["rejected"][-1])


def _finish(plan: Plan, done: Done, described: pd.DataFrame, out: Path) -> None:
    """Write quarantine.csv and metadata.csv and say what became of the images."""
    done.bad.write()
    lost = {row["key"] for row in done.bad.rows}
    wells = {image.well_id for image in plan.images if image.key not in lost}
    if not wells:
        raise ImageImportError(f"{out}: no image could be imported; see quarantine.csv")
    described = described[described["well_id"].isin(wells)]
    n_good = len(plan.images) - sum(key is not None for key in lost)
    print(
        f"{n_good} images of {len(wells)} wells in {done.n_shards} shards ({done.n_found} were already there), "
        f"{len(done.bad.rows)} quarantined: {out}",
        file=sys.stderr,
    )
    for channel, counts in sorted(done.bits.items()):
        if len(counts) > 1:
            print(
                f"warning: channel {channel} has {counts[8]} images of 8 bits, taken as they are, and {counts[16]} of "
                "16 bits, scaled; their brightness is not comparable",
                file=sys.stderr,
            )
    write_metadata(described, out / "metadata.csv")
