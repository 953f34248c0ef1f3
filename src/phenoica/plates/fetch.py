"""Fetch published weights and files of data sets from the Hugging Face hub or a mirror of it.

Comes in: a repository, the commit to take, file names, and the user's word that the licence is accepted. Goes out:
verified files in huggingface's own cache and, where wanted, at a place of the user's, each with a receipt beside it.
A broken transfer goes on where it stopped, also in a later run; no file is seen under its name before its hash is
right. `HF_ENDPOINT` names a mirror, `HF_HOME` or `HF_HUB_CACHE` moves the cache, `HF_TOKEN` opens gated repositories.

huggingface_hub reads its settings when it is first imported, so it is imported inside the functions; `HF_ENDPOINT`
alone is read at every call. Large files are asked for by plain HTTP: the hub's other protocol (xet) cannot go on
with half a file of an earlier run.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn
from urllib.parse import urlsplit

from phenoica import __version__, files
from phenoica.errors import CheckpointError, ConfigError, FetchError

if TYPE_CHECKING:
    from huggingface_hub import HfFileMetadata

WEIGHTS = "model.safetensors"
MODEL_CONFIG = "config.json"
PUBLIC_ENDPOINT = "https://huggingface.co"
OPENPHENOM = "recursionpharma/OpenPhenom"
OPENPHENOM_LICENCE = "OpenPhenom-S/16, under its owner's non-commercial licence"
CHECKPOINT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_REPOSITORY = re.compile(r"(?!.*(?:--|\.\.))[A-Za-z0-9_][A-Za-z0-9_.-]*/[A-Za-z0-9_][A-Za-z0-9_.-]*")
_LONGEST_REPOSITORY = 96
CLIENT = {"library_name": "phenoica", "library_version": __version__}
_NOT_STATED = "not stated"  # the default of licences.weights

RepoType = Literal["model", "dataset"]


@dataclass(frozen=True)
class Source:
    """Which commit of which repository.

    Attributes
    ----------
    repo_id
        owner/name.
    revision
        The commit, 40 hexadecimal digits.
    repo_type
        model or dataset.
    """

    repo_id: str
    revision: str
    repo_type: RepoType = "model"

    @property
    def page(self) -> str:
        """The address a person opens to read about the repository."""
        return f"{endpoint()}/{'datasets/' if self.repo_type == 'dataset' else ''}{self.repo_id}"

    def check(self) -> None:
        """Refuse what is no repository or no commit, before anything is asked of a server.

        Raises
        ------
        ConfigError
            Saying which of the two is wrong.
        """
        if self.repo_type not in ("model", "dataset"):
            raise ConfigError(f"repository type {self.repo_type!r}; it must be model or dataset")
        if not _is_repository(self.repo_id):
            raise ConfigError(f"repository {self.repo_id!r}; it must be owner/name, such as {OPENPHENOM}")
        if not _COMMIT.fullmatch(self.revision):
            raise ConfigError(
                f"revision {self.revision!r} of {self.repo_id} is no commit; give its 40 hexadecimal digits "
                "(a branch or tag may move, and the same command would then fetch other files)"
            )


@dataclass(frozen=True)
class FetchedFile:
    """A file that was fetched and verified.

    Attributes
    ----------
    filename
        Its name in the repository.
    path
        Where it is: the wanted place, or huggingface's cache if none was wanted.
    sha256
        Of its content, hexadecimal.
    """

    filename: str
    path: Path
    sha256: str


def endpoint() -> str:
    """Return the address of the hub, or of the mirror that `HF_ENDPOINT` names.

    Raises
    ------
    ConfigError
        If `HF_ENDPOINT` is no address of a web server.
    """
    address = os.environ.get("HF_ENDPOINT") or PUBLIC_ENDPOINT
    if not re.match(r"https?://[^/\s]", address):
        raise ConfigError(f"HF_ENDPOINT is {address!r}; it must start with http:// or https:// and a host")
    return address.rstrip("/")


def fetch(
    repo_id: str,
    targets: Mapping[str, str | os.PathLike | None],
    *,
    revision: str,
    licence: str,
    accepted: bool,
    repo_type: RepoType = "model",
    sha256: Mapping[str, str] | None = None,
    optional: Collection[str] = (),
    setting: str = "hub.accept_licence",
) -> list[FetchedFile]:
    """Fetch files of one commit, verify them and put them where they are wanted.

    Parameters
    ----------
    repo_id
        owner/name.
    targets
        From the name of a file in the repository to the place it shall have; None leaves it in huggingface's
        cache alone. A placed file is a hard link to the cache where the file system allows it, else a copy.
    revision
        The commit, 40 hexadecimal digits. Branches and tags are refused.
    licence
        One line on the terms, for the receipt and for the refusal.
    accepted
        Whether the user accepted these terms; if not, nothing is asked of any server.
    repo_type
        model or dataset.
    sha256
        Pinned hashes by file name. Without one the hub's own word counts: the SHA-256 of a large file, the git
        hash of a small one.
    optional
        Names that may be missing from the repository.
    setting
        The key of the configuration that accepts the terms, for the refusal.

    Returns
    -------
    list of FetchedFile
        In the order of `targets`, without missing optional files.

    Raises
    ------
    ConfigError
        If the repository or the revision cannot be one.
    FetchError
        If the licence is not accepted, the server cannot be reached or refuses, the repository, commit or file
        does not exist, the disk is too small, a hash is wrong (the bad bytes are removed), or a target holds
        something that was not fetched from here.
    """
    source = Source(repo_id, revision, repo_type)
    source.check()
    if not accepted:
        refuse(source, licence, setting)
    pinned = dict(sha256 or {})
    fetched = []
    for filename, target in targets.items():
        place = None if target is None else Path(target)
        with readable_errors(source, filename):
            found = _in_place(place, source, filename, licence) or _cached(source, filename)
            if found is None:
                found = _from_hub(source, filename, place, pinned.get(filename), filename in optional)
            if found is None:
                continue
            digest = _digest(found)
            _check_pin(digest, pinned.get(filename), source, filename)
            if place is not None:
                _place(found, digest, place, source, filename, licence)
        fetched.append(FetchedFile(filename, place or found, digest))
    return fetched


def refuse(source: Source, licence: str, setting: str) -> NoReturn:
    """Raise FetchError: the terms of a repository are not accepted."""
    raise FetchError(
        f"{source.repo_id} has terms to accept: {licence}. Read them at {source.page}, then run again with "
        f"--accept-licence, or set {setting}: true in the configuration"
    )


def fetch_model(
    config: Mapping[str, Any],
    *,
    repo: str | None = None,
    revision: str | None = None,
    out: str | os.PathLike | None = None,
    accept_licence: bool = False,
) -> list[FetchedFile]:
    """Fetch the weights that a configuration names (`hub`), and the config.json that belongs to them.

    Parameters
    ----------
    config
        The resolved configuration (`hub`, `licences`, `embed.checkpoint`).
    repo, revision
        Instead of hub.repo and hub.revision. hub.sha256 is the hash of the configured pair and is left aside
        for another one.
    out
        Where the weights go; config.json goes beside them. Default: see `default_place`.
    accept_licence
        The user accepts the terms; hub.accept_licence says the same.

    Returns
    -------
    list of FetchedFile
        The weights first.

    Raises
    ------
    ConfigError
        If another repository is named without a commit of it; and as `fetch`.
    FetchError
        As `fetch`.
    """
    hub = config["hub"]
    if repo is not None and repo != hub["repo"] and revision is None:
        raise ConfigError(f"--repo {repo} needs --revision: the commit to take, 40 hexadecimal digits")
    repo, revision = repo or hub["repo"], revision or hub["revision"]
    place = Path(out) if out is not None else default_place(config, repo)
    if place.is_dir():
        raise ConfigError(f"{place} is a folder; name the file that the weights shall be, such as {place / WEIGHTS}")
    configured = (repo, revision) == (hub["repo"], hub["revision"])
    return fetch(
        repo, {WEIGHTS: place, MODEL_CONFIG: place.parent / MODEL_CONFIG}, revision=revision,
        licence=licence_line(config, repo), accepted=accept_licence or hub["accept_licence"],
        sha256={WEIGHTS: hub["sha256"]} if configured and hub["sha256"] else {}, optional=(MODEL_CONFIG,),
    )  # fmt: skip


def default_place(config: Mapping[str, Any], repo: str) -> Path:
    """Return where the weights go unless told otherwise.

    That is embed.checkpoint if it is the path of a checkpoint, so that a run of the same configuration finds them,
    else data/<name in lower case>/model.safetensors.
    """
    checkpoint = Path(config["embed"]["checkpoint"])
    if checkpoint.suffix in CHECKPOINT_SUFFIXES:
        return checkpoint
    return Path("data") / repo.rpartition("/")[2].lower() / WEIGHTS


def licence_line(config: Mapping[str, Any], repo: str) -> str:
    """Return one line on the terms of a repository's weights: licences.weights if stated, else what is known."""
    stated = config["licences"]["weights"]
    if stated != _NOT_STATED:
        return stated
    return OPENPHENOM_LICENCE if repo == OPENPHENOM else "the terms stated on its page"


def resolve_hub_id(text: str | os.PathLike) -> Path:
    """Return the file that a checkpoint's name stands for; nothing is downloaded.

    Parameters
    ----------
    text
        A path, given back as it is; or owner/name or owner/name@commit of a repository whose weights were fetched
        before. A file of that name comes first. Without a commit, the one that the default configuration pins is
        meant; for a repository that it does not name, the only one in the cache.

    Returns
    -------
    Path
        The path, or model.safetensors in huggingface's cache.

    Raises
    ------
    CheckpointError
        If the weights are not in the cache, the commit is none, or several commits are there and none is named.
    """
    path = Path(text)
    repo, _, revision = os.fspath(text).partition("@")
    if path.exists() or path.suffix in CHECKPOINT_SUFFIXES or not _is_repository(repo):
        return path
    if revision and not _COMMIT.fullmatch(revision):
        raise CheckpointError(f"{text}: {revision!r} is no commit; write {repo}@ and its 40 hexadecimal digits")
    from phenoica import config

    hub = config.schema()["properties"]["hub"]["properties"]
    pinned = hub["revision"]["default"] if repo == hub["repo"]["default"] else None
    cached = _cached_weights(repo)
    wanted = revision or pinned
    if wanted in cached:
        return cached[wanted]
    if wanted or not cached:
        option = f" --revision {revision}" if revision else "" if pinned else " --revision COMMIT"
        raise CheckpointError(
            f"{text}: no such file, and not in huggingface's cache; read the licence of {repo}, then run "
            f"`phenoica fetch-model --repo {repo}{option} --accept-licence` once"
        )
    if len(cached) > 1:
        choice = ", ".join(f"{repo}@{commit}" for commit in sorted(cached))
        raise CheckpointError(f"{text}: several commits are in huggingface's cache; say which: {choice}")
    return next(iter(cached.values()))


def _cached_weights(repo: str) -> dict[str, Path]:
    """Return the weights of a repository in huggingface's cache, by commit."""
    found = (cache_folder(repo, "model") / "snapshots").glob(f"*/{WEIGHTS}")
    return {path.parent.name: path for path in found if path.is_file()}


def _is_repository(text: str) -> bool:
    return len(text) <= _LONGEST_REPOSITORY and _REPOSITORY.fullmatch(text) is not None


def cache_folder(repo_id: str, repo_type: RepoType) -> Path:
    """Return the folder of a repository in huggingface's cache; it need not exist."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo_id, repo_type=repo_type)


def blob_path(source: Source, digest: str) -> Path:
    """Return where huggingface's cache holds the content of a file of this hash, `.incomplete` added while it comes."""
    return cache_folder(source.repo_id, source.repo_type) / "blobs" / digest


def is_placed(target: Path, source: Source, filename: str, size: int) -> bool:
    """Say whether a file of this size stands at its place with a receipt of this commit; nothing is hashed."""
    known = {"repository": source.repo_id, "revision": source.revision, "file": filename}
    return target.is_file() and target.stat().st_size == size and known.items() <= _receipt(target).items()


def _in_place(target: Path | None, source: Source, filename: str, licence: str) -> Path | None:
    """Return the target if it is this file of a data set, by receipt and hash, also if the cache was emptied since.

    Weights are looked for in the cache first, because `owner/name` in a configuration means the file there.
    """
    if target is None or source.repo_type != "dataset" or not target.is_file():
        return None
    receipt = _receipt(target)
    known = _record(source, filename, receipt.get("sha256", ""), licence).items() <= receipt.items()
    return target if known and files.sha256(target) == receipt["sha256"] else None


def _digest(found: Path) -> str:
    """Return the SHA-256 of a verified file; the cache has hashed a large one just now and named it after that."""
    name = found.resolve().name if found.is_symlink() else ""
    return name if _SHA256.fullmatch(name) else files.sha256(found)


def _cached(source: Source, filename: str) -> Path | None:
    """Return the file in the cache if its hash is right, without asking a server; a damaged one is removed."""
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(source.repo_id, filename, revision=source.revision, repo_type=source.repo_type)
    if not isinstance(path, str) or not os.path.islink(path):
        return None  # a cache without links does not know the hash: the server does
    pointer = Path(path)
    blob = pointer.parent / os.readlink(pointer)  # one step and no further: the name of that file is the hash
    if _hash_is(blob, blob.name):
        return pointer
    pointer.unlink()
    blob.unlink()
    return None


def _from_hub(source: Source, filename: str, place: Path | None, pinned: str | None, optional: bool) -> Path | None:
    """Download one file into the cache and return it there; None if it is missing and may be."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError
    from huggingface_hub.utils import WeakFileLock

    where: dict[str, Any] = {
        "repo_id": source.repo_id, "filename": filename, "revision": source.revision, "repo_type": source.repo_type,
        "endpoint": endpoint(),
    }  # fmt: skip
    url = hf_hub_url(**where)
    try:
        metadata = get_hf_file_metadata(url, endpoint=endpoint(), **CLIENT)
    except EntryNotFoundError:
        if optional:
            return None
        raise
    digest = _announced_hash(metadata, source, filename)
    if _SHA256.fullmatch(digest):
        _check_pin(digest, pinned, source, filename)  # before hours of transfer, not after
    if place is not None:
        _check_target(place, digest)
    folder, blob = cache_folder(source.repo_id, source.repo_type), blob_path(source, digest)
    lock = folder.parent / ".locks" / folder.name / f"{digest}.lock"
    blob.parent.mkdir(parents=True, exist_ok=True)
    lock.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):  # the hub's own lock: its programs wait for us, and we for them
        if not blob.exists() or not _hash_is(blob, digest):
            _download(url, blob, metadata.size, source, filename)
    return Path(hf_hub_download(**where, **CLIENT))  # the content is there: this only links it into the snapshot


def _announced_hash(metadata: HfFileMetadata, source: Source, filename: str) -> str:
    """Return the hash that the server states: SHA-256 of a large file, git hash of a small one."""
    if metadata.commit_hash != source.revision:
        raise FetchError(
            f"{endpoint()}: was asked for {source.repo_id} at {source.revision} and answered with "
            f"{metadata.commit_hash or 'no commit'}; check that HF_ENDPOINT names a mirror of the hub"
        )
    digest = (metadata.etag or "").lower()
    if not (_SHA256.fullmatch(digest) or _COMMIT.fullmatch(digest)) or metadata.size is None:
        raise FetchError(
            f"{endpoint()}: does not state hash and size of {filename} in {source.repo_id}, so it cannot be verified; "
            "check that HF_ENDPOINT names a mirror of the hub"
        )
    return digest


def _download(url: str, blob: Path, size: int, source: Source, filename: str) -> None:
    """Write `blob` from `url`, going on with what an earlier run left; it appears only if its hash is right."""
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    part = blob.with_name(f"{blob.name}.incomplete")
    done = part.stat().st_size if part.exists() else 0
    if done > size:
        done = 0
    free = shutil.disk_usage(part.parent).free
    if free < size - done:
        raise FetchError(
            f"{part.parent}: {filename} needs {(size - done) / 1e9:.2f} GB more and {free / 1e9:.2f} GB are free; "
            "make room, or set HF_HOME to a folder on a larger disk"
        )
    headers = build_hf_headers(**CLIENT)
    headers["Accept-Encoding"] = "identity"  # a byte range of a compressed stream would be another range
    with part.open("r+b" if done else "wb") as handle:
        handle.seek(done)
        http_get(url, handle, resume_size=done, headers=headers, expected_size=size, displayed_filename=filename)
    if not _hash_is(part, blob.name):
        part.unlink()
        raise FetchError(
            f"{filename} of {source.repo_id} at {source.revision}: what arrived does not have the hash {blob.name} "
            f"that {endpoint()} states; it was removed. Run again; if that does not help, the server is at fault"
        )
    os.replace(part, blob)


def _check_pin(digest: str, pinned: str | None, source: Source, filename: str) -> None:
    if pinned is not None and digest != pinned:
        raise FetchError(
            f"{filename} of {source.repo_id} at {source.revision} has the SHA-256 {digest}, not the pinned {pinned}; "
            "it is not used. If the pin (hub.sha256) belongs to another commit, set it to null"
        )


def _hash_is(path: Path, digest: str) -> bool:
    """Say whether a file has the given SHA-256 (64 digits) or git hash (40 digits)."""
    if _SHA256.fullmatch(digest):
        return files.sha256(path) == digest
    # git's name of a blob: SHA-1 of `blob <size>`, a zero byte and the content; its files are small
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest() == digest


def receipt_path(target: str | os.PathLike) -> Path:
    """Return where the receipt of a fetched file is: beside it."""
    target = Path(target)
    return target.with_name(f"{target.name}.receipt.json")


def _receipt(target: Path) -> dict[str, Any]:
    """Return what the receipt of a file says; nothing if there is none or it is damaged."""
    path = receipt_path(target)
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
    except (ValueError, TypeError):
        return {}


def _check_target(target: Path, digest: str) -> None:
    """Refuse to replace a file that has neither this content nor a receipt that knows it."""
    if not target.exists() or _hash_is(target, digest):
        return
    if _receipt(target).get("sha256") != files.sha256(target):
        raise FetchError(
            f"{target} exists and is not what phenoica put there, or was changed since; it is left as it is. "
            "Move it away, or name another place (--out; hub.data.folder for a data set)"
        )


def _place(found: Path, digest: str, target: Path, source: Source, filename: str, licence: str) -> None:
    """Link or copy a verified file to its place and write the receipt."""
    if not (target.exists() and target.samefile(found)):  # a hard link of the cache is the verified file itself
        _check_target(target, digest)
        if not target.exists() or not _hash_is(target, digest):
            with files.atomic_path(target) as temporary:
                _link_or_copy(found.resolve(), temporary)
    record = _record(source, filename, digest, licence)
    if not record.items() <= _receipt(target).items():  # an older receipt of the same file keeps its date
        now = datetime.now(UTC).isoformat(timespec="seconds")
        files.write_json(receipt_path(target), {**record, "licence_accepted": now, "phenoica": __version__})


def _record(source: Source, filename: str, digest: str, licence: str) -> dict[str, str]:
    """Return what a receipt says of a file, without the date."""
    return {
        "repository": source.repo_id,
        "repository_type": source.repo_type,
        "revision": source.revision,
        "file": filename,
        "sha256": digest,
        "licence": licence,
    }


def _link_or_copy(source: Path, temporary: Path) -> None:
    temporary.unlink()
    try:
        os.link(source, temporary)
    except OSError:  # another disk, or a file system without links
        shutil.copyfile(source, temporary)


@contextlib.contextmanager
def readable_errors(source: Source, filename: str) -> Iterator[None]:
    """Turn what the hub's client raises into one line that says what to do."""
    from huggingface_hub import errors

    name, server = f"{source.repo_id} at {source.revision}", urlsplit(endpoint()).netloc
    access = f"ask for access at {source.page} and set HF_TOKEN to a token of that account"
    again = "run the same command again: it goes on where it stopped"
    try:
        yield
    except errors.GatedRepoError as error:
        raise FetchError(f"{source.repo_id} is gated: {access}") from error
    except errors.RepositoryNotFoundError as error:
        raise FetchError(
            f"{server} has no {source.repo_type} {source.repo_id}, or hides it: check the name, or {access}"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise FetchError(f"{source.repo_id} has no commit {source.revision}; see {source.page}") from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise FetchError(f"{filename} of {name} is not in the cache and {server} is out of reach: {error}") from error
    except errors.EntryNotFoundError as error:
        raise FetchError(f"{name} has no file {filename}; its files are at {source.page}") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        advice = access if status in (401, 403) else again if status >= 500 else "check HF_ENDPOINT"
        raise FetchError(f"{server} answered {status} to a request for {filename} of {name}; {advice}") from error
    except errors.HTTPError as error:  # the client's base of all failed connections
        raise FetchError(
            f"cannot get {filename} of {name} from {server}: {error}; check network and HF_ENDPOINT, then {again}"
        ) from error
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise FetchError(f"the disk is full while fetching {filename}; make room, then {again}") from error
        raise FetchError(f"cannot get {filename} of {name}: {str(error).splitlines()[0]}; {again}") from error
