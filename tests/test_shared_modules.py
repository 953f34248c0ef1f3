import os
import subprocess
import sys

import anndata
import numpy as np
import pandas as pd
import pytest

from phenoica import files, schema
from phenoica.errors import SchemaError, StorageError
from phenoica.progress import Progress, track


def test_a_failed_write_leaves_the_old_file_and_no_debris(tmp_path):
    target = tmp_path / "a.txt"
    files.write_text(target, "old")
    with pytest.raises(RuntimeError), files.atomic_path(target) as path:
        path.write_text("half")
        raise RuntimeError
    assert target.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_a_failed_folder_leaves_the_old_folder(tmp_path):
    target = tmp_path / "d"
    for text in ("one", "two"):
        with files.atomic_dir(target) as folder:
            (folder / f"{text}.txt").write_text(text)
    assert [p.name for p in target.iterdir()] == ["two.txt"]
    with pytest.raises(RuntimeError), files.atomic_dir(target):
        raise RuntimeError
    assert [p.name for p in target.iterdir()] == ["two.txt"]
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


@pytest.fixture
def full_disk(tmp_path):
    """A file system of 64 kB; needs the right to mount one."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("NO RIGHT TO MOUNT A SMALL FILE SYSTEM: what a full disk does was not tested")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_an_h5ad_holds_what_anndata_itself_would_write(tmp_path):
    import h5py

    def contents(path):
        found = {}
        with h5py.File(path) as file:
            file.visititems(lambda name, item: found.update({name: (dict(item.attrs), getattr(item, "dtype", None))}))
            return {name: ({k: str(v) for k, v in attrs.items()}, kind) for name, (attrs, kind) in found.items()}

    obs = pd.DataFrame({"a": ["x", "y", "x"], "b": [1.0, np.nan, 2.0]}, index=["p", "q", "r"])
    adata = anndata.AnnData(np.eye(3, dtype=np.float32), obs=obs, obsm={"m": pd.DataFrame({"c": [1, 2, 3]}, obs.index)})
    adata.uns["u"] = {"text": "t", "list": np.array(["k", "l"], dtype=object), "empty": np.array([], dtype=object)}
    files.write_h5ad(tmp_path / "ours.h5ad", adata)
    with anndata.settings.override(allow_write_nullable_strings=False):
        adata.write_h5ad(tmp_path / "theirs.h5ad", compression="gzip")
    assert contents(tmp_path / "ours.h5ad") == contents(tmp_path / "theirs.h5ad")


def test_a_process_ends_in_order_after_an_h5ad_met_a_full_disk(full_disk):
    lines = [
        "import anndata, numpy", "from phenoica import files",
        "adata = anndata.AnnData(numpy.random.default_rng(0).random((300, 300)))",
        f"files.write_h5ad({str(full_disk / 'a.h5ad')!r}, adata)",
    ]  # fmt: skip
    code = "\n".join(lines)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "a.h5ad: cannot be written: the disk is full" in done.stderr
    assert not list(full_disk.iterdir())


def test_a_full_disk_is_one_clear_error_and_leaves_the_old_file_alone(full_disk):
    numbers = pd.DataFrame(np.random.default_rng(0).random((300, 100)))
    writers = {
        "a.csv": lambda path: files.write_csv(path, numbers),
        "a.parquet": lambda path: files.write_parquet(path, numbers.rename(columns=str)),
        "a.h5ad": lambda path: files.write_h5ad(path, anndata.AnnData(numbers.to_numpy())),
        "a.json": lambda path: files.write_json(path, numbers.to_numpy().tolist()),
    }
    for name, write in writers.items():
        (full_disk / name).write_text("old")
        with pytest.raises(StorageError, match=f"{name}: cannot be written: the disk is full; free some space"):
            write(full_disk / name)
        assert (full_disk / name).read_text() == "old"
    assert sorted(p.name for p in full_disk.iterdir()) == sorted(writers)
    with pytest.raises(StorageError, match="the disk is full"), files.atomic_dir(full_disk / "pages") as folder:
        (folder / "page.html").write_text("x" * 100_000)
    assert not (full_disk / "pages").exists()


def test_a_folder_that_may_not_be_written_to_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="a.json: cannot be written: a part of the path is a file"):
        files.write_json(tmp_path / "file/a.json", {})
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    root = os.geteuid() == 0  # whom no folder stops
    lines = ["import os", "from phenoica import files", "os.seteuid(65534)" if root else ""]
    code = "\n".join([*lines, f"files.write_json({str(closed / 'a.json')!r}, {{}})"])
    for parent in [tmp_path, tmp_path.parent, tmp_path.parent.parent] if root else []:
        os.chmod(parent, 0o755)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "closed/a.json: cannot be written: no permission to write there; change it" in done.stderr


def test_other_errors_of_a_block_stay_what_they_are(tmp_path):
    with pytest.raises(FileNotFoundError), files.atomic_path(tmp_path / "a"):
        (tmp_path / "nothing").read_text()


def test_sha256_of_a_file(tmp_path):
    (tmp_path / "abc").write_bytes(b"abc")
    assert files.sha256(tmp_path / "abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_json_refuses_nan(tmp_path):
    with pytest.raises(ValueError, match="Out of range float"):
        files.write_json(tmp_path / "a.json", {"x": float("nan")})


def test_importing_the_light_stages_loads_neither_torch_nor_scanpy():
    modules = "phenoica.cli, phenoica.plates.run, phenoica.qc.run, phenoica.disentangle.views, phenoica.score.run"
    modules += ", phenoica.report.plate_pages, phenoica.report.score_page, phenoica.report.run_index"
    modules += ", phenoica.report.encoder_page"
    code = f"import sys, phenoica, {modules}; assert not {{'torch', 'scanpy'}} & set(sys.modules), 'heavy import'"
    subprocess.run([sys.executable, "-c", code], check=True)


def adata():
    n = 3
    obs = pd.DataFrame({c: ["x"] * n for c in schema.WELL_COLUMNS if c != schema.WELL_ID})
    obs.index = pd.Index([f"w{i}" for i in range(n)], name=schema.WELL_ID)
    obs[schema.CONTROL] = obs[schema.CONTROL_ROLE] = "none"
    result = anndata.AnnData(np.zeros((n, 2), np.float32), obs=obs)
    result.uns[schema.UNS] = dict.fromkeys(schema.UNS_KEYS, "")
    return result


def test_schema_check_names_what_is_wrong():
    schema.check(adata())
    broken = adata()
    broken.obs["control"] = "positve"
    with pytest.raises(SchemaError, match="control holds \\['positve'\\]"):
        schema.check(broken)
    broken = adata()
    del broken.obs["row"]
    with pytest.raises(SchemaError, match="columns row are missing"):
        schema.check(broken)
    broken = adata()
    broken.X[1, 0] = np.nan
    with pytest.raises(SchemaError, match="not finite in 1 wells, first w1"):
        schema.check(broken)
    broken = adata()
    broken.X = broken.X.astype(np.float64)
    with pytest.raises(SchemaError, match="float32"):
        schema.check(broken)
    broken = adata()
    del broken.uns[schema.UNS]["checkpoint"]
    with pytest.raises(SchemaError, match="lacks checkpoint"):
        schema.check(broken)
    broken = adata()
    broken.obs.index = pd.Index(["a", "a", "b"], name=schema.WELL_ID)
    with pytest.raises(SchemaError, match="'a' stands more than once"):
        schema.check(broken)


def test_the_random_encoder_is_optional_and_checked():
    good = adata()
    good.obsm[schema.RANDOM_ENCODER] = np.ones((3, 2), np.float32)
    schema.check(good)
    for values, words in (
        (np.ones((3, 2)), "float64 \\(3, 2\\); it must be float32 \\(3, 2\\)"),
        (np.ones((3, 5), np.float32), "as wide as X"),
        (np.array([[1, 1], [1, np.inf], [1, 1]], np.float32), "not finite in 1 wells, first w1"),
    ):  # fmt: skip
        broken = adata()
        broken.obsm[schema.RANDOM_ENCODER] = values
        with pytest.raises(SchemaError, match=words):
            schema.check(broken)


def test_progress_prints_plain_lines_outside_a_terminal(capsys):
    with Progress(4, "embed", every_s=0.0) as progress:
        for _ in range(4):
            progress.update()
    lines = capsys.readouterr().err.splitlines()
    assert lines[1].startswith("embed: 2/4 wells, ") and lines[1].endswith("s left")
    assert lines[-1].startswith("embed: 4/4 wells, ") and "left" not in lines[-1]
    assert list(track(iter("ab"), 2, "x")) == ["a", "b"]
