"""Writing files atomically and hashing them.

A file is written beside its target and renamed, so a killed run leaves no half file that looks whole.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phenoica.errors import StorageError

if TYPE_CHECKING:
    import anndata
    import pandas as pd


# what a disk or a folder refuses -> what to do; other errors are not about writing
_REFUSALS = {
    errno.ENOSPC: "the disk is full; free some space, or write to another one",
    errno.EDQUOT: "the quota is used up; free some space, or write to another disk",
    errno.EACCES: "no permission to write there; change it, or write to another folder",
    errno.EPERM: "no permission to write there; change it, or write to another folder",
    errno.EROFS: "the file system is read-only; write to another folder",
    errno.EISDIR: "it is a folder; name a file",
    errno.EEXIST: "a part of the path is a file; write to another folder",
    errno.ENOTDIR: "a part of the path is a file; write to another folder",
}


@contextlib.contextmanager
def _clear_refusals(target: Path) -> Iterator[None]:
    """Turn what a disk or folder refuses into one clear error; the old file, if any, is untouched."""
    try:
        yield
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        raise StorageError(f"{target}: cannot be written: {_REFUSALS[error.errno]}") from error


@contextlib.contextmanager
def atomic_path(target: str | os.PathLike) -> Iterator[Path]:
    """Yield a temporary path beside `target`; rename it onto `target` if the block succeeds, else remove it.

    Raises
    ------
    StorageError
        If the disk is full or the folder cannot be written to.
    """
    target = Path(target)
    with _clear_refusals(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=target.suffix, dir=target.parent)
        os.close(handle)
        temporary = Path(name)
        try:
            yield temporary
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_dir(target: str | os.PathLike) -> Iterator[Path]:
    """Yield a temporary folder beside `target`; let it replace `target` if the block succeeds, else remove it.

    Raises
    ------
    StorageError
        If the disk is full or the folder cannot be written to.
    """
    target = Path(target)
    with _clear_refusals(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            yield temporary
            os.chmod(temporary, 0o777 & ~_umask())
            if target.exists():
                shutil.rmtree(target)
            os.replace(temporary, target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_text(target: str | os.PathLike, text: str) -> None:
    """Write `text` as UTF-8, atomically."""
    with atomic_path(target) as path:
        path.write_text(text, encoding="utf-8")


def write_json(target: str | os.PathLike, value: Any) -> None:
    """Write `value` as indented JSON, atomically; NaN is refused."""
    write_text(target, json.dumps(value, indent=2, allow_nan=False) + "\n")


def write_parquet(target: str | os.PathLike, frame: pd.DataFrame) -> None:
    """Write a frame without its index as parquet (zstd), atomically."""
    with atomic_path(target) as path:
        frame.to_parquet(path, index=False, compression="zstd")


def write_csv(target: str | os.PathLike, frame: pd.DataFrame) -> None:
    """Write a frame without its index as csv, atomically."""
    with atomic_path(target) as path:
        frame.to_csv(path, index=False)


def write_h5ad(target: str | os.PathLike, adata: anndata.AnnData) -> None:
    """Write AnnData as gzip-compressed h5ad in the legacy string encoding, atomically.

    The legacy encoding (no nullable strings) is what R and older Python readers open.
    """
    import anndata
    import h5py

    adata.strings_to_categoricals()
    legacy = anndata.settings.override(allow_write_nullable_strings=False)
    with atomic_path(target) as path, legacy, _LateFailure(path, "w+") as handle:
        with h5py.File(handle, "w") as file:
            anndata.io.write_elem(file, "/", adata, dataset_kwargs={"compression": "gzip"})
            if adata.raw is None:
                del file["raw"]  # "nothing" in an encoding that older readers do not know; `write_h5ad` leaves it out
        if handle.error is not None:
            raise handle.error


class _LateFailure(io.FileIO):
    """A file that keeps the first error of writing for later, and from then on takes everything and writes nothing.

    HDF5 cannot close a file that it cannot write to: the process would end in a segmentation fault.
    """

    error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write all bytes of `data`."""
        rest = memoryview(data).cast("B")
        while len(rest) and self.error is None:
            try:
                rest = rest[super().write(rest) :]
            except OSError as error:
                self.error = error
        return memoryview(data).nbytes

    def truncate(self, size: int | None = None) -> int:
        """Cut or extend the file."""
        return super().truncate(size) if self.error is None else (size or 0)


def is_file_name(text: str) -> bool:
    """Say whether a label can name a file or folder, so that it does not leave the folder it is put into."""
    return bool(text) and not text.startswith(".") and not set(text) & set("/\\:\0")


def sha256(path: str | os.PathLike) -> str:
    """Return the hexadecimal SHA-256 of a file, read in chunks."""
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while chunk := handle.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def sha256_of_json(value: Any) -> str:
    """Return the hexadecimal SHA-256 of a JSON-able value, keys sorted."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()
