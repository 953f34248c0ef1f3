"""Real Cell Painting fields through the full-size OpenPhenom-S/16, by the workflow as a user would run it.

The published weights cannot be shipped, so they are drawn from a seed; everything else is as in a real run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import anndata
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import yaml

from phenoica import schema
from phenoica.plates.images import decode_image

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENT, PLATE = "cpjump1-u2os48h", "BR00117010-13"
STAINS = {"DNA": 1, "ER": 2, "AGP": 3, "RNA": 4, "Mito": 5, "brightfield": 6}


def write_inputs(source: Path, folder: Path) -> Path:
    """Make published metadata columns from the data set's own tables, and a configuration."""
    wells = pd.read_csv(source / "index.csv").drop_duplicates("well")[["well", "compound"]]
    compounds = pd.read_csv(source / "JUMP-Target-1_compound_metadata.tsv", sep="\t")
    smiles = compounds.drop_duplicates("pert_iname").set_index("pert_iname")["smiles"]
    metadata = pd.DataFrame({
        "well_id": EXPERIMENT + "_" + PLATE + "_" + wells["well"], "experiment_name": EXPERIMENT, "plate": PLATE,
        "address": wells["well"], "gene": "", "treatment": wells["compound"],
        "SMILES": wells["compound"].map(smiles).fillna(""), "concentration": "", "perturbation_type": "COMPOUND",
        "cell_type": "U2OS",
    })  # fmt: skip
    metadata.to_csv(folder / "metadata.csv", index=False)
    config = {
        "run": "cpjump1",
        "source": "shards",
        "licences": {"images": "CPJUMP1, CC0 1.0"},
        "plates": {
            "shards": [str(source / "train-00000-of-00001.parquet")],
            "metadata": str(folder / "metadata.csv"),
            "plate_format": 384,
            "negative_controls": ["DMSO"],
            "positive_controls": ["AMG900", "NVS-PAK1-1", "TC-S-7004"],
            "cutting_controls": [],
        },
        "embed": {"checkpoint": "random", "nucleus_diameter_px": 18, "batch_tiles": 4},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def test_real_fields_reach_anndata_measures_and_a_plate_page(shared, tmp_path):
    source = shared / "data/cpjump1_images"
    config = write_inputs(source, tmp_path)
    env = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    command = [sys.executable, "-m", "snakemake", "-s", str(ROOT / "Snakefile"), "-d", str(tmp_path)]
    result = subprocess.run(
        [*command, "--cores", "all", "--configfile", str(config)], env=env, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    root = tmp_path / "results/cpjump1"

    adata = anndata.read_h5ad(root / "embed/embeddings.h5ad")
    schema.check(adata)
    assert adata.shape == (10, 384)
    assert (adata.obs["n_tiles"] == 4).all()
    assert "not a trained model" in adata.uns["phenoica"]["checkpoint"]
    assert adata.obs.loc[f"{EXPERIMENT}_{PLATE}_D14", "control"] == "negative"
    # ten fields of ten treatments: the encoder must tell them apart
    assert np.ptp(adata.X, axis=0).max() > 1e-3
    assert len(np.unique(adata.X.round(6), axis=0)) == 10

    table = pq.read_table(source / "train-00000-of-00001.parquet").to_pylist()
    raw = {row["__key__"]: decode_image(row["jp2"]["bytes"]) for row in table}
    measures = adata.obsm["image_measures"]
    for well in adata.obs["address"]:
        for channel in STAINS.values():
            image = raw[f"{EXPERIMENT}/{PLATE}/{well}_s5_{channel}"]
            row = measures.loc[f"{EXPERIMENT}_{PLATE}_{well}"]
            assert np.isclose(row[f"c{channel}_mean"], image.mean())
            assert np.isclose(row[f"c{channel}_saturated"], (image == 255).mean())
    # a U2OS field at this magnification holds tens of nuclei
    assert adata.obs["cell_count"].between(5, 500).all()

    page = (root / f"report/plates/{EXPERIMENT}/{PLATE}.html").read_text()
    assert "not a trained model" in page
    assert "AMG900" in page
    assert "CC0" in (root / "index.html").read_text()
