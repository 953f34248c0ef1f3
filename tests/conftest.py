"""What several test folders share: tiny plates written in the published layout, in memory or in a temporary folder."""

from __future__ import annotations

import os
from pathlib import Path

import imagecodecs
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from phenoica.config import resolve

CHANNELS = (1, 2, 3, 4, 5, 6)


def shared_dir() -> Path | None:
    """Return the folder of shared real data: PHENOICA_SHARED, or ../shared beside the checkout; None if absent."""
    root = Path(__file__).resolve().parents[1]
    for candidate in (os.environ.get("PHENOICA_SHARED"), root.parent / "shared"):
        if candidate and Path(candidate).is_dir():
            return Path(candidate)
    return None


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared real data; the test skips, and says so, where it is absent."""
    folder = shared_dir()
    if folder is None:
        pytest.skip("SHARED REAL DATA ABSENT: set PHENOICA_SHARED to the folder with golden/ and data/")
    return folder


def encode(image: np.ndarray) -> bytes:
    """Return lossless JPEG 2000 bytes."""
    return imagecodecs.jpeg2k_encode(image, reversible=True, codecformat="jp2")


def well_images(seed: int, size: int = 64, n_channels: int = 6) -> np.ndarray:
    """Return uint8 (n_channels, size, size) images of a few bright discs on noise, by formula from a seed."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:size, :size]
    images = random.integers(5, 15, (n_channels, size, size)).astype(float)
    for cy, cx in random.integers(8, size - 8, (6, 2)):
        disc = np.exp(-((y - cy) ** 2 + (x - cx) ** 2) / 18.0)
        images += disc * random.uniform(60, 150, n_channels)[:, None, None]
    return np.clip(images, 0, 255).astype(np.uint8)


def write_shard(path: Path, images: dict[str, bytes | None], row_group_size: int = 100) -> None:
    """Write keys and JPEG 2000 bytes as one shard in the published layout."""
    cells = [{"bytes": data, "path": None} for data in images.values()]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({"__key__": pa.array(list(images), pa.string()), "jp2": pa.array(cells, kind)})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=row_group_size)


def metadata_row(experiment: str, plate: str, address: str, treatment: str, gene: str | None = None, **more) -> dict:
    """Return one row of published metadata columns."""
    row = {
        "well_id": f"{experiment}_{plate}_{address}", "experiment_name": experiment, "plate": plate,
        "address": address, "gene": gene, "treatment": treatment, "SMILES": None, "concentration": None,
        "perturbation_type": "CRISPR", "cell_type": "HUVEC",
    }  # fmt: skip
    return {**row, **more}


class TinyScreen:
    """A screen of 2 experiments x 1 plate x 8 wells, in two shards cut in the middle of a well."""

    def __init__(self, folder: Path):
        self.folder = folder
        treatments = ["EMPTY_control"] * 4 + ["PLK1_guide_1", "MTOR_guide_1", "NA_guide_1", "EIF3H_guide_1"]
        self.rows, self.images, self.raw = [], {}, {}
        for e, experiment in enumerate(("gene-001", "gene-002")):
            for i, treatment in enumerate(treatments):
                address = f"{'ABCD'[i % 4]}{i + 1:02d}"
                gene = None if treatment == "EMPTY_control" else treatment.split("_")[0]
                self.rows.append(metadata_row(experiment, "1", address, treatment, gene))
                images = well_images(100 * e + i)
                self.raw[f"{experiment}_1_{address}"] = images
                for channel, image in zip(CHANNELS, images, strict=True):
                    self.images[f"{experiment}/Plate1/{address}_s1_{channel}"] = encode(image)

    def write(self) -> dict:
        """Write shards and metadata; return a resolved configuration of a tiny model."""
        keys = list(self.images)
        cut = len(keys) // 2 + 2  # within a well
        for number, part in enumerate((keys[:cut], keys[cut:])):
            write_shard(
                self.folder / f"shards/train-{number}.parquet", {k: self.images[k] for k in part}, row_group_size=10
            )
        pd.DataFrame(self.rows).to_csv(self.folder / "metadata.csv", index=False)
        return self.config()

    write_shard = staticmethod(write_shard)

    def config(self, **embed) -> dict:
        """Return a resolved configuration of this screen."""
        model = {"image_size": 32, "patch_size": 16, "dim": 24, "depth": 1, "heads": 2}
        return resolve({
            "run": "tiny", "source": "shards", "results": str(self.folder / "results"),
            "plates": {
                "shards": [str(self.folder / "shards/*.parquet")], "metadata": str(self.folder / "metadata.csv"),
            },
            "embed": {"model": model, "batch_tiles": 7, "max_bad_fraction": 0.2, "precision": "float32", **embed},
        })  # fmt: skip


@pytest.fixture
def tiny_screen(tmp_path: Path) -> TinyScreen:
    """A small screen that a test may damage before it is written."""
    return TinyScreen(tmp_path)


class ProfileScreen:
    """A csv of profiles that a test may damage: 2 weeks x 2 plates x 16 wells x 6 features, 6 of them DMSO."""

    COLUMNS = {"plate": "Metadata_Plate", "address": "Metadata_Well", "perturbation": "gene", "treatment": "drug"}

    def __init__(self, folder: Path):
        self.folder = folder
        random = np.random.default_rng(0)
        rows = []
        for plate in ("W1_08", "W1_8.0", "W2_123_456", "W2_8"):
            for i in range(16):
                gene = "DMSO" if i < 6 else ("NA", "SEPT2")[i % 2]
                effect = {"DMSO": 0.0, "NA": 1.5, "SEPT2": -1.5}[gene]
                features = random.normal(effect, 1, 6) + int(plate[1])
                where = f"{'ABCD'[i % 4]}{i // 4 + 1:02d}"
                rows.append((plate, where, gene, gene if i < 6 else f"{gene}_{i % 3}", *features))
        self.frame = pd.DataFrame(
            rows, columns=["Metadata_Plate", "Metadata_Well", "gene", "drug", *(f"Cells_{j}" for j in range(6))]
        )

    def config(self, *, plates: dict | None = None, embed: dict | None = None, **profiles) -> dict:
        """Return a resolved configuration; keyword arguments are keys of the section `profiles`."""
        section = {
            "files": [str(self.folder / "profiles*")],
            "columns": self.COLUMNS,
            "batch": {"column": "Metadata_Plate", "pattern": "^(W[0-9])_"},
        }
        return resolve({
            "run": "profiles", "source": "profiles", "results": str(self.folder / "results"),
            "profiles": {**section, **profiles},
            "plates": {"plate_format": 96, "negative_controls": ["DMSO"], "positive_controls": [], **(plates or {})},
            "embed": embed or {}, "disentangle": {"n_components": 2, "min_fit_controls": 2, "rotation_draws": 2},
            "score": {"rotation_draws": 1, "min_wells": 2},
        })  # fmt: skip

    def write(self, frame: pd.DataFrame | None = None, name: str = "profiles.csv") -> Path:
        """Write the profiles, as csv or parquet."""
        frame, path = self.frame if frame is None else frame, self.folder / name
        frame.to_parquet(path, row_group_size=10) if path.suffix == ".parquet" else frame.to_csv(path, index=False)
        return path


@pytest.fixture
def profile_screen(tmp_path: Path) -> ProfileScreen:
    """Profiles that a test may damage before they are written."""
    return ProfileScreen(tmp_path)
