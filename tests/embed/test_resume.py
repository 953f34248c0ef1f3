"""Embedding that is killed and goes on: what is finished is kept, and the part does not tell."""

import json
import os
import subprocess
import sys

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from phenoica import files
from phenoica.embed import run as embed_run
from phenoica.embed.pieces import Pieces
from phenoica.embed.wells import reading_order
from phenoica.errors import EmbeddingError, TooManyBadImages
from phenoica.plates.run import inputs, read_wells, run_plates


@pytest.fixture
def screen(tiny_screen, monkeypatch):
    """A tiny screen whose plates stage has run, embedded in pieces of two wells."""
    monkeypatch.setattr(embed_run, "WELLS_CPU", 2)
    tiny_screen.images[list(tiny_screen.images)[14]] = b""  # a bad well among the first
    tiny_screen.loaded = tiny_screen.write()
    shards, metadata = inputs(tiny_screen.loaded)
    run_plates(shards, metadata, tiny_screen.folder / "out", tiny_screen.loaded)
    return tiny_screen


def embed(screen, name="part", config=None):
    """Embed the first unit; return its part."""
    out = screen.folder / "out"
    part = out / f"{name}.parquet"
    config = config or screen.loaded
    wells, shards = read_wells(out / "wells.parquet"), inputs(config)[0]
    embed_run.embed_shard(
        wells, 0, shards, out / "quarantine.csv", part, part.with_suffix(".quarantine.csv"), config, threads=1
    )
    return part


def stop_after(monkeypatch, n):
    """Let the n-th written piece be the last thing that happens."""
    write, left = Pieces.write, [n]

    def stopping(self, *arguments):
        write(self, *arguments)
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    monkeypatch.setattr(Pieces, "write", stopping)


def pieces_of(part):
    return sorted(p.name for p in part.with_suffix(".pieces").glob("piece-*.parquet"))


def test_a_part_of_resumed_pieces_has_the_bytes_of_an_unbroken_run(screen, monkeypatch, capsys):
    whole = embed(screen, "whole")
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            embed(screen)
    assert pieces_of(screen.folder / "out/part.parquet") == [f"piece-00000{i}.parquet" for i in range(3)]
    decoded = []
    prepare = embed_run.WellReader._whole_wells
    monkeypatch.setattr(
        embed_run.WellReader, "_whole_wells", lambda self: (decoded.append(w[0]) or w for w in prepare(self))
    )
    part = embed(screen)
    assert len(decoded) == 9 - 3 * 2
    assert "goes on after 3 finished pieces of shard 0" in capsys.readouterr().err
    assert files.sha256(part) == files.sha256(whole)
    lists = [p.with_suffix(".quarantine.csv").read_text() for p in (part, whole)]
    assert lists[0] == lists[1] and "empty jp2 cell" in lists[0]
    assert not part.with_suffix(".pieces").exists() and pq.read_table(part).num_rows == 8


def test_rows_stand_in_the_order_of_the_wells(screen):
    wells = read_wells(screen.folder / "out/wells.parquet")
    order = [w for w in wells["well_id"] if w in set(pq.read_table(embed(screen))["well_id"].to_pylist())]
    assert pq.read_table(screen.folder / "out/part.parquet")["well_id"].to_pylist() == order


def test_pieces_of_other_settings_images_or_weights_are_not_taken_up(screen, monkeypatch, capsys):
    for change in ("seed", "image"):
        with monkeypatch.context() as patch:
            stop_after(patch, 2)
            with pytest.raises(KeyboardInterrupt):
                embed(screen)
        config = screen.loaded
        if change == "seed":
            config = screen.config(seed=1)
        else:
            key = list(screen.images)[0]
            screen.images[key] = screen.images[list(screen.images)[6]]
            screen.write()
        embed(screen, config=config)
        assert "2 finished pieces in" in (said := capsys.readouterr().err) and "are embedded again" in said
        assert files.sha256(embed(screen, "fresh", config)) == files.sha256(screen.folder / "out/part.parquet")


def test_a_damaged_piece_is_made_again(screen, monkeypatch):
    whole = embed(screen, "whole")
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            embed(screen)
    piece = screen.folder / "out/part.pieces/piece-000001.parquet"
    piece.write_bytes(piece.read_bytes()[:-200])
    assert files.sha256(embed(screen)) == files.sha256(whole)


def test_raising_the_limit_of_bad_images_keeps_what_is_finished(screen, monkeypatch, capsys):
    for i in range(30, 54, 6):
        screen.images[list(screen.images)[i]] = b""
    screen.write()
    with pytest.raises(TooManyBadImages):
        embed(screen, config=screen.config(max_bad_fraction=0.03))
    finished = pieces_of(screen.folder / "out/part.parquet")
    assert finished
    embed(screen, config=screen.config(max_bad_fraction=0.5))
    assert f"goes on after {len(finished)} finished" in capsys.readouterr().err


def test_a_missing_piece_is_named(tmp_path, screen, monkeypatch):
    stop_after(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        embed(screen)
    part = screen.folder / "out/part.parquet"
    origin = pq.read_schema(part.with_suffix(".pieces") / "piece-000000.parquet").metadata[b"made_from"].decode()
    with pytest.raises(EmbeddingError, match="piece 2 of 5 is missing"):
        Pieces(part, origin).rows(5)


def test_wells_are_in_the_order_of_their_last_image():
    wells = pd.DataFrame({
        "image_shard": [np.array([1, 2]), np.array([1, 1]), np.array([1, 1])],
        "image_row_group": [np.array([0, 0]), np.array([0, 9]), np.array([3, 3])],
        "image_row": [np.array([0, 0]), np.array([1, 0]), np.array([1, 3])],
    })  # fmt: skip
    assert reading_order(wells, 1).tolist() == [2, 1, 0]


# Forks children that embed and kills them at random moments, until 20 were killed; each part that is finished on the
# way is hashed and deleted, so that the next one starts from nothing.
_KILLER = """
import json, os, random, shutil, signal, sys, time
from pathlib import Path
import phenoica.embed.run as embed_run
from phenoica import files
from phenoica.plates.run import inputs, read_wells
import timm.models.vision_transformer, phenoica.openphenom.encoder, phenoica.embed.image_measures

embed_run.WELLS_CPU = 1
config, out = json.loads(sys.argv[1]), Path(sys.argv[2])
part, moments, killed, finished, pieces = out / "part.parquet", random.Random(0), 0, [], [0]
duration = None  # of a child that nobody kills: the first
while killed < 20:
    start = time.monotonic()
    child = os.fork()
    if not child:
        sys.stderr = open(os.devnull, "w")
        wells, shards = read_wells(out / "wells.parquet"), inputs(config)[0]
        lists = (out / "quarantine.csv", part, part.with_suffix(".quarantine.csv"))
        embed_run.embed_shard(wells, 0, shards, *lists, config, threads=1)
        os._exit(0)
    if duration is not None:
        time.sleep(moments.uniform(0.0, duration))
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    duration = duration or time.monotonic() - start
    pieces.append(len(list(part.with_suffix(".pieces").glob("piece-*.parquet"))))
    killed += os.WIFSIGNALED(status)
    results = (part, part.with_suffix(".quarantine.csv"))
    if all(path.exists() for path in results):  # killed or not: the pieces are no longer needed
        finished.append([files.sha256(path) for path in results])
        for path in results:
            path.unlink()
        shutil.rmtree(part.with_suffix(".pieces"), ignore_errors=True)
        pieces.append(0)
    else:
        assert pieces[-1] >= pieces[-2], pieces
print(json.dumps({"killed": killed, "finished": finished, "pieces": pieces}))
"""


def test_killed_at_20_random_moments_it_ends_with_the_bytes_of_an_unbroken_run(screen, monkeypatch):
    monkeypatch.setattr(embed_run, "WELLS_CPU", 1)
    whole = embed(screen, "whole")
    said = subprocess.run(
        [sys.executable, "-c", _KILLER, json.dumps(screen.loaded), str(screen.folder / "out")],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    result = json.loads(said.stdout)
    assert result["killed"] == 20 and len(result["finished"]) > 1
    assert len(set(result["pieces"])) > 3  # some were killed in the middle
    expected = [files.sha256(path) for path in (whole, whole.with_suffix(".quarantine.csv"))]
    assert all(hashes == expected for hashes in result["finished"])
