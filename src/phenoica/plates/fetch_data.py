"""Fetch a published data set: which of its files, whether they fit on the disk, and where they go.

Comes in: the configuration (`hub.data`), the commit, and which shards are wanted, by number or by the experiments they
hold. Goes out: verified files below hub.data.folder under their own names, fetched by `phenoica.plates.fetch`. Which
experiments a shard holds is read from the statistics of its key column, some hundred kilobytes at the end of the remote
file.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from phenoica.errors import ConfigError, FetchError
from phenoica.plates.fetch import (
    CLIENT,
    FetchedFile,
    Source,
    blob_path,
    endpoint,
    fetch,
    is_placed,
    readable_errors,
    refuse,
)
from phenoica.plates.shards import KEY

RXRX3_CORE = "recursionpharma/rxrx3-core"
RXRX3_CORE_LICENCE = "RxRx3-core, under its owner's non-commercial licence"
SETTING = "hub.data.accept_licence"
SPACE_MARGIN = 0.05  # of what is to be fetched: other programs write too
REMOTE_BLOCK = 1 << 16  # bytes asked for at once: a footer, or the keys of a row group
_NOT_STATED = "not stated"  # the default of licences.images


@dataclass(frozen=True)
class DataFile:
    """A file of a data set that is wanted.

    Attributes
    ----------
    filename
        Its name in the repository.
    place
        Where it goes.
    size
        Bytes.
    digest
        The hash that the hub states: SHA-256 of a large file, git's hash of a small one.
    """

    filename: str
    place: Path
    size: int
    digest: str


@dataclass(frozen=True)
class Plan:
    """What a call of fetch-data fetches.

    Attributes
    ----------
    source
        The commit.
    files
        The wanted files: metadata first.
    licence
        One line on the terms.
    accepted
        Whether the user accepts them.
    """

    source: Source
    files: tuple[DataFile, ...]
    licence: str
    accepted: bool

    def missing(self, file: DataFile) -> int:
        """Return how many bytes of a file are still to be fetched; nothing is hashed."""
        blob = blob_path(self.source, file.digest)
        if is_placed(file.place, self.source, file.filename, file.size) or _size(blob) == file.size:
            return 0
        there = _size(blob.with_name(f"{blob.name}.incomplete"))
        return file.size - (there if there <= file.size else 0)


def data_licence(config: Mapping[str, Any]) -> str:
    """Return one line on the terms of the data set: licences.images if stated, else what is known."""
    stated = config["licences"]["images"]
    if stated != _NOT_STATED:
        return stated
    return RXRX3_CORE_LICENCE if config["hub"]["data"]["repo"] == RXRX3_CORE else "the terms stated on its page"


def plan_data(
    config: Mapping[str, Any],
    *,
    revision: str | None = None,
    shards: str | None = None,
    experiments: Sequence[str] = (),
    embeddings: bool = False,
    accept_licence: bool = False,
    dry_run: bool = False,
) -> Plan:
    """Ask the hub for the files of the commit and choose the wanted ones.

    Parameters
    ----------
    config
        The resolved configuration (`hub.data`, `licences.images`, `plates`).
    revision
        Instead of hub.data.revision: the commit, 40 hexadecimal digits.
    shards
        Numbers and ranges of shards, such as 0-3,7, counted from 0 in the order of their names. Default: all.
    experiments
        Patterns such as compound-*: the shards with at least one image of an experiment that one of them matches.
        With `shards`, only those are looked at.
    embeddings
        The published embeddings instead of image shards. The metadata file always comes along.
    accept_licence
        The user accepts the terms; hub.data.accept_licence says the same.
    dry_run
        Nothing will be fetched: sizes are asked for without accepted terms, keys of shards are not.

    Returns
    -------
    Plan
        Files and where they go.

    Raises
    ------
    ConfigError
        If no commit is named (the message says the newest one) or a choice is malformed or contradicts another.
    FetchError
        If the terms are not accepted, the server cannot be reached or refuses, a file is missing, or no shard holds
        the experiments.

    Warns
    -----
    UserWarning
        If the configuration looks for metadata or shards elsewhere than where they go.
    """
    hub = config["hub"]["data"]
    licence, accepted = data_licence(config), accept_licence or hub["accept_licence"]
    if embeddings and (shards or experiments):
        raise ConfigError("--embeddings takes no --shards and no --experiments: the file holds every well")
    named = revision or hub["revision"]
    Source(hub["repo"], named or "0" * 40, "dataset").check()
    source = Source(hub["repo"], named or "main", "dataset")
    if not accepted and not (dry_run and not experiments):
        refuse(source, licence, SETTING)
    if not named:
        raise ConfigError(_no_revision(source))
    listed = _list_files(source)
    chosen = [hub["metadata"]]
    if embeddings:
        chosen.append(hub["embeddings"])
    else:
        names = _numbered(_matching(listed, hub["shards"], source), shards)
        chosen += _shards_with(source, names, experiments) if experiments else names
    _check_listed(listed, chosen, source)
    folder = Path(hub["folder"])
    files = tuple(DataFile(name, folder / name, *listed[name]) for name in chosen)
    _warn_of_other_places(config, files, embeddings)
    return Plan(source, files, licence, accepted)


def fetch_data(plan: Plan) -> Iterator[FetchedFile]:
    """Fetch the files of a plan, one after the other, and yield each when it is verified and in its place.

    A file that is there already is verified and not fetched again; a broken transfer goes on in the next call.

    Raises
    ------
    FetchError
        If they do not fit on the disk (before the first byte); and as `phenoica.plates.fetch.fetch`.
    """
    if not plan.accepted:
        refuse(plan.source, plan.licence, SETTING)
    check_space(plan)
    for file in plan.files:
        yield from fetch(
            plan.source.repo_id, {file.filename: file.place}, revision=plan.source.revision, repo_type="dataset",
            licence=plan.licence, accepted=plan.accepted, setting=SETTING,
        )  # fmt: skip


def check_space(plan: Plan) -> None:
    """Compare what is still to be fetched with the free space of the file systems that receive it.

    The cache takes every byte; a place on the cache's own file system is a hard link and takes none, a place on
    another one is a copy.

    Raises
    ------
    FetchError
        With both numbers, if they and a margin of 5 % do not fit.
    """
    needed: dict[int, int] = {}
    folders: dict[int, Path] = {}
    for file in plan.files:
        cache, place = _existing(blob_path(plan.source, file.digest).parent), _existing(file.place.parent)
        disks = [(cache, plan.missing(file))]
        if place.stat().st_dev != cache.stat().st_dev and not is_placed(
            file.place, plan.source, file.filename, file.size
        ):
            disks.append((place, file.size))
        for folder, size in disks:
            device = folder.stat().st_dev
            needed[device] = needed.get(device, 0) + size
            folders.setdefault(device, folder)
    for device, size in needed.items():
        free, wanted = shutil.disk_usage(folders[device]).free, int(size * (1 + SPACE_MARGIN))
        if size and free < wanted:
            raise FetchError(
                f"{folders[device]}: {_gigabytes(wanted)} are needed ({_gigabytes(size)} to fetch and a margin of "
                f"{SPACE_MARGIN:.0%}) and {_gigabytes(free)} are free; make room, take fewer shards (--shards, "
                "--experiments), or set hub.data.folder and HF_HOME to folders on a larger disk"
            )


def _no_revision(source: Source) -> str:
    """Say that a commit must be named, and which one is the newest."""
    from huggingface_hub import HfApi

    with readable_errors(source, "the newest commit"):
        newest = HfApi(endpoint=endpoint(), **CLIENT).repo_info(source.repo_id, repo_type=source.repo_type).sha
    return (
        f"hub.data.revision is not set, so it is not said which state of {source.repo_id} to take. The newest commit "
        f"is now {newest} (see {source.page}/commits/main): write it into the configuration, or add --revision {newest}"
    )


def _list_files(source: Source) -> dict[str, tuple[int, str]]:
    """Return size and hash of every file of the commit, by name."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    with readable_errors(source, "the list of files"):
        api = HfApi(endpoint=endpoint(), **CLIENT)
        tree = api.list_repo_tree(source.repo_id, recursive=True, revision=source.revision, repo_type=source.repo_type)
        entries = [entry for entry in tree if isinstance(entry, RepoFile)]
    return {e.path: (e.size, e.lfs.sha256 if e.lfs else e.blob_id) for e in entries}


def _matching(listed: Mapping[str, Any], pattern: str, source: Source) -> list[str]:
    names = sorted(name for name in listed if fnmatch.fnmatchcase(name, pattern))
    if not names:
        _check_listed(listed, [pattern], source)
    return names


def _check_listed(listed: Mapping[str, Any], names: Sequence[str], source: Source) -> None:
    absent = [name for name in names if name not in listed]
    if absent:
        there = sorted(listed)
        shown = ", ".join(there[:8]) + (f" and {len(there) - 8} more" if len(there) > 8 else "")
        raise FetchError(
            f"{source.repo_id} at {source.revision} has no file {absent[0]}; it has {shown or 'none'}. Mend hub.data, "
            "or take another commit"
        )


def _numbered(names: Sequence[str], numbers: str | None) -> list[str]:
    """Return the names that a text like 0-3,7 chooses, in their order."""
    if numbers is None:
        return list(names)
    chosen: set[int] = set()
    for part in numbers.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,6})(?:\s*-\s*([0-9]{1,6}))?\s*", part)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise ConfigError(f"--shards {numbers}: {part.strip()!r} is no number and no range; write it like 0-3,7")
        chosen.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    beyond = sorted(number for number in chosen if number >= len(names))
    if beyond:
        raise ConfigError(f"--shards {numbers}: there is no shard {beyond[0]}; they are numbered 0 to {len(names) - 1}")
    return [names[number] for number in sorted(chosen)]


def _shards_with(source: Source, names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Return the shards that hold an image of an experiment that one of the patterns matches."""
    from huggingface_hub import HfFileSystem

    hub = HfFileSystem(endpoint=endpoint(), skip_instance_cache=True)
    chosen, seen = [], set()
    for name in names:
        with readable_errors(source, f"the keys of {name}"):
            path = f"datasets/{source.repo_id}@{source.revision}/{name}"
            with hub.open(path, "rb", block_size=REMOTE_BLOCK) as remote:
                try:
                    holds, experiments = holds_experiment(pq.ParquetFile(remote), patterns)
                except (pa.ArrowInvalid, KeyError) as error:
                    raise FetchError(
                        f"{name} of {source.repo_id}: its keys cannot be read from afar ({error}); choose by --shards"
                    ) from error
        seen |= experiments
        if holds:
            chosen.append(name)
    if not chosen:
        there = sorted(seen)
        raise FetchError(
            f"none of {len(names)} shards holds an experiment like {', '.join(patterns)}; there are for instance "
            f"{', '.join(there[:5] + there[-2:] if len(there) > 7 else there)}"
        )
    return chosen


def holds_experiment(shard: pq.ParquetFile, patterns: Sequence[str]) -> tuple[bool, set[str]]:
    """Say whether a shard has an image of an experiment that one of the patterns matches.

    The least and the greatest key of a row group (statistics in the footer) are keys of images, so where one of them
    matches, the answer is yes. Only row groups whose ends differ, or that have no statistics, are read, and of them
    only the key column, until one matches.

    Parameters
    ----------
    shard
        A shard, on disk or remote.
    patterns
        Shell patterns of experiments, such as compound-*; case counts.

    Returns
    -------
    (bool, set of str)
        The answer, and the experiments that were seen on the way to it.

    Raises
    ------
    KeyError
        If there is no key column.
    """
    seen: set[str] = set()

    def matches(keys: Iterator[str] | Sequence[str]) -> bool:
        experiments = {str(key).partition("/")[0] for key in keys}
        seen.update(experiments)
        return any(fnmatch.fnmatchcase(e, pattern) for e in experiments for pattern in patterns)

    schema = shard.metadata.schema
    columns = [i for i in range(len(schema)) if schema.column(i).path == KEY]
    if not columns:
        raise KeyError(f"no column {KEY}")
    unclear = []
    for group in range(shard.num_row_groups):
        statistics = shard.metadata.row_group(group).column(columns[0]).statistics
        ends = [statistics.min, statistics.max] if statistics is not None and statistics.has_min_max else []
        if matches(ends):
            return True, seen
        if len({str(key).partition("/")[0] for key in ends}) != 1:
            unclear.append(group)
    return any(matches(shard.read_row_group(g, columns=[KEY]).column(0).to_pylist()) for g in unclear), seen


def _warn_of_other_places(config: Mapping[str, Any], files: Sequence[DataFile], embeddings: bool) -> None:
    """Warn where a run of this configuration would not find what is fetched."""
    plates, places = config["plates"], [os.path.normpath(file.place) for file in files]
    metadata = plates["metadata"]
    if metadata and os.path.normpath(metadata) != places[0]:
        warnings.warn(f"plates.metadata is {metadata}, but the metadata goes to {places[0]}; set it", stacklevel=3)
    patterns = [os.path.normpath(pattern) for pattern in plates["shards"]]
    unseen = [p for p in places[1:] if not any(fnmatch.fnmatchcase(p, pattern) for pattern in patterns)]
    if patterns and unseen and not embeddings:
        warnings.warn(f"plates.shards does not name {unseen[0]}, which is fetched; add it", stacklevel=3)


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    folder = folder.absolute()
    return next(parent for parent in (folder, *folder.parents) if parent.is_dir())


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
