"""`phenoica fetch-data` with the real client of the Hugging Face hub, against a small hub on loopback."""

from __future__ import annotations

import errno
import fnmatch
import io
import json
import shutil
import warnings
from collections import namedtuple
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from phenoica.config import resolve
from phenoica.errors import ConfigError, FetchError
from phenoica.plates import fetch_data as fetching
from phenoica.plates.fetch import receipt_path
from phenoica.plates.fetch_data import check_space, fetch_data, holds_experiment, plan_data
from phenoica.plates.metadata import read_metadata
from phenoica.plates.shards import find_shards

REPO, COMMIT, OTHER = "cells/plates", "ab" * 20, "cd" * 20
ROOT = Path(__file__).resolve().parents[2]
METADATA, EMBEDDINGS = "metadata_rxrx3_core.csv", "OpenPhenom_rxrx3-core_embeddings.parquet"
Usage = namedtuple("Usage", "total used free")


def keys_of(experiment: str, wells: int = 40) -> list[str]:
    return [f"{experiment}/Plate1/A{well:02d}_s1_{c}" for well in range(1, wells + 1) for c in (1, 2)]


def shard_bytes(keys: list[str], rows: int = 10, image: int = 4000, **options) -> bytes:
    """Return a shard whose images are bytes by formula that do not compress."""
    numbers = [(b"%d" % i).rjust(8, b"0") for i in range(image // 8)]
    images = [{"bytes": b"".join(numbers[i % 7 :]) + key.encode(), "path": None} for i, key in enumerate(keys)]
    file = io.BytesIO()
    table = pa.table({"__key__": keys, "jp2": images})
    pq.write_table(table, file, row_group_size=rows, compression="none", **options)
    return file.getvalue()


def names(n: int = 3) -> list[str]:
    return [f"data/train-{i:05d}-of-{n:05d}.parquet" for i in range(n)]


@pytest.fixture
def data(client):
    """A data set of a compound shard, a gene shard and one whose boundary lies within a row group."""
    mixed = keys_of("compound-004", 3) + keys_of("gene-001", 37)
    content = [shard_bytes(k) for k in (keys_of("compound-001"), keys_of("gene-002"), mixed)]
    client.content = dict(zip(names(), content, strict=True))
    client.content |= {METADATA: b"well_id,gene\n" * 20, EMBEDDINGS: shard_bytes(keys_of("x", 2)), "README.md": b"read"}
    for name, value in client.content.items():
        client.add(name, value, repo=f"datasets/{REPO}")
    return client


def configured(tmp_path, **changes):
    section = {"repo": REPO, "revision": COMMIT, "folder": str(tmp_path / "out")} | changes
    return resolve(
        {"run": "r", "source": "demo", "hub": {"data": section}, "licences": {"images": "look, do not sell"}}
    )


def plan(tmp_path, config=None, **options):
    return plan_data(config or configured(tmp_path), **{"accept_licence": True, **options})


def get(tmp_path, **options):
    return list(fetch_data(plan(tmp_path, **options)))


def contents(hub) -> list:
    """Return the requests for the content of a file: not for its name, size, hash, or the list of files."""
    return [r for r in hub.gets() if not r.path.startswith("api/")]


def test_the_whole_data_set_lands_where_the_configuration_says_and_is_fetched_once(data, tmp_path):
    fetched = get(tmp_path)
    assert [f.filename for f in fetched] == [METADATA, *names()]
    for file in fetched:
        assert file.path == tmp_path / "out" / file.filename
        assert file.path.read_bytes() == data.content[file.filename]
        receipt = json.loads(receipt_path(file.path).read_text())
        assert receipt["repository"] == REPO and receipt["repository_type"] == "dataset"
        assert (receipt["revision"], receipt["sha256"]) == (COMMIT, file.sha256)
        assert receipt["licence"] == "look, do not sell" and receipt["licence_accepted"].startswith("20")
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert len(before) == 8
    for cache in ("kept", "emptied"):
        if cache == "emptied":
            shutil.rmtree(tmp_path / "cache")
        data.requests.clear()
        again = plan(tmp_path)
        assert [again.missing(file) for file in again.files] == [0] * 4
        assert list(fetch_data(again)) == fetched and contents(data) == []
        assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*") if p.is_file()}


def test_shards_by_number_and_the_embeddings_alone(data, tmp_path):
    for text, chosen in (("0", [0]), ("1-2", [1, 2]), (" 2, 0-0 ,2", [0, 2])):
        assert [f.filename for f in plan(tmp_path, shards=text).files] == [METADATA, *[names()[i] for i in chosen]]
    get(tmp_path, shards="1")
    assert sorted(p.name for p in (tmp_path / "out/data").glob("*.parquet")) == ["train-00001-of-00003.parquet"]
    assert [f.filename for f in get(tmp_path, embeddings=True)] == [METADATA, EMBEDDINGS]
    assert (tmp_path / "out" / EMBEDDINGS).read_bytes() == data.content[EMBEDDINGS]
    for text in ("", "a", "1-", "2-1", "-1", "1;2", "0x1", "٣"):
        with pytest.raises(ConfigError, match="is no number and no range; write it like 0-3,7"):
            plan(tmp_path, shards=text)
    with pytest.raises(ConfigError, match="there is no shard 3; they are numbered 0 to 2"):
        plan(tmp_path, shards="0,3-9")
    with pytest.raises(ConfigError, match="--embeddings takes no --shards"):
        plan(tmp_path, shards="0", embeddings=True)


def test_shards_by_experiment_from_a_few_remote_bytes(data, tmp_path):
    for patterns, chosen in (
        (["compound-*"], [0, 2]), (["gene-001"], [2]), (["gene-*"], [1, 2]), (["compound-001", "gene-002"], [0, 1]),
        (["*"], [0, 1, 2]),
    ):  # fmt: skip
        data.requests.clear()
        found = plan(tmp_path, experiments=patterns)
        assert [f.filename for f in found.files] == [METADATA, *[names()[i] for i in chosen]], patterns
        ranges = [r.range.removeprefix("bytes=").split("-") for r in contents(data) if r.path.startswith("cdn/")]
        assert ranges and sum(int(last) - int(first) + 1 for first, last in ranges) <= 10 * 65_536
        assert min(len(c) for n, c in data.content.items() if "train" in n) > 300_000
    assert not (tmp_path / "out").exists() and not (tmp_path / "cache").exists()
    assert [f.filename for f in plan(tmp_path, experiments=["gene-*"], shards="0-1").files] == [METADATA, names()[1]]
    with pytest.raises(
        FetchError, match="none of 3 shards holds an experiment like Gene-001; .* compound-001, compound-0"
    ):
        plan(tmp_path, experiments=["Gene-001"])


@pytest.mark.parametrize("content", [b"no parquet" * 100, shard_bytes(["k"]).replace(b"__key__", b"__kex__")])
def test_keys_that_cannot_be_read_from_afar(client, tmp_path, content):
    client.add(METADATA, b"x", repo=f"datasets/{REPO}")
    client.add("data/train-0.parquet", content, repo=f"datasets/{REPO}")
    with pytest.raises(FetchError, match="train-0.parquet of .* keys cannot be read from afar .*; choose by --shards"):
        plan(tmp_path, experiments=["*"])


GROUP = st.lists(st.sampled_from(["a-1", "a-10", "a-2", "b-1", "c"]), min_size=1, max_size=4)


@settings(deadline=None)
@given(
    st.lists(GROUP, min_size=1, max_size=5), st.sampled_from(["a-*", "a-1", "b*", "c", "d", "*"]), st.booleans()
)  # fmt: skip
def test_the_statistics_say_what_the_keys_say(groups, pattern, statistics):
    file = io.BytesIO()
    kind = pa.schema([("__key__", pa.string()), ("jp2", pa.binary())])
    with pq.ParquetWriter(file, kind, write_statistics=statistics) as writer:
        for group in groups:
            keys = [f"{experiment}/Plate1/A01_s1_{i + 1}" for i, experiment in enumerate(group)]
            writer.write_table(pa.table({"__key__": keys, "jp2": [b""] * len(keys)}, kind))
    holds, seen = holds_experiment(pq.ParquetFile(io.BytesIO(file.getvalue())), [pattern])
    assert holds == any(fnmatch.fnmatchcase(e, pattern) for group in groups for e in group)
    assert seen <= {e for group in groups for e in group} and (holds or seen == {e for g in groups for e in g})


def test_a_broken_transfer_goes_on_in_the_next_call(data, tmp_path):
    first, content = names()[0], data.content[names()[0]]
    get(tmp_path, shards="1")
    data.cut = [200_000] + [0] * 20
    with pytest.raises(FetchError, match="goes on where it stopped"):
        get(tmp_path)
    assert not (tmp_path / "out" / first).exists()
    data.cut, data.requests = [], []
    rest = plan(tmp_path)
    missing = {f.filename: rest.missing(f) for f in rest.files}
    assert 0 < len(content) - missing[first] <= 200_000 and missing[names()[1]] == missing[METADATA] == 0
    list(fetch_data(rest))
    ranges = [r.range for r in contents(data) if r.path.startswith("cdn/")]
    assert ranges == [f"bytes={len(content) - missing[first]}-", None]  # the first goes on; the third begins
    assert {n: (tmp_path / "out" / n).read_bytes() for n in names()} == {n: data.content[n] for n in names()}


def test_corrupted_files_are_fetched_again_or_refused(data, tmp_path):
    data.spoil = True
    with pytest.raises(FetchError, match="does not have the hash .* it was removed"):
        get(tmp_path, shards="0")
    assert not [p for p in tmp_path.rglob("*") if p.is_file() and p.stat().st_size > 1000]
    data.spoil = False
    get(tmp_path, shards="0")
    place = tmp_path / "out" / names()[0]
    damaged = b"\0" * 8 + data.content[names()[0]][8:]
    place.unlink()  # the place shares its bytes with the cache
    place.write_bytes(damaged)
    with pytest.raises(
        FetchError, match="train-00000.*is not what phenoica put there, or was changed since.*Move it away"
    ):
        get(tmp_path, shards="0")
    assert place.read_bytes() == damaged
    place.unlink()
    (cached,) = [p for p in (tmp_path / "cache").glob("*/blobs/*") if p.stat().st_size == len(damaged)]
    cached.write_bytes(damaged)
    data.requests.clear()
    get(tmp_path, shards="0")
    assert place.read_bytes() == data.content[names()[0]] and len(contents(data)) == 2  # the hub, and where it points


def test_the_licence_comes_before_any_request(data, tmp_path):
    refusal = f"{REPO} has terms to accept: look, do not sell. Read them at {data.address}/datasets/{REPO}, then run "
    for options in ({}, {"shards": "0"}, {"embeddings": True}, {"dry_run": True, "experiments": ["gene-*"]}):
        with pytest.raises(FetchError, match=refusal + ".*--accept-licence, or set hub.data.accept_licence: true"):
            plan(tmp_path, accept_licence=False, **options)
    assert data.requests == []
    listed = plan(tmp_path, accept_licence=False, dry_run=True)  # sizes are no data
    assert len(listed.files) == 4 and contents(data) == []
    with pytest.raises(FetchError, match=refusal):
        next(fetch_data(listed))
    assert contents(data) == [] and not (tmp_path / "out").exists()
    assert plan(tmp_path, configured(tmp_path, accept_licence=True), accept_licence=False).accepted


def test_free_space_is_compared_before_the_first_byte(data, tmp_path, monkeypatch):
    total = sum(len(data.content[n]) for n in (METADATA, *names()))
    wanted = int(total * 1.05)
    monkeypatch.setattr(fetching.shutil, "disk_usage", lambda _: Usage(9 * total, 0, wanted - 1))
    monkeypatch.setattr(fetching, "_gigabytes", lambda size: f"{size} B")
    with pytest.raises(FetchError) as error:
        get(tmp_path)
    assert f"{wanted} B are needed ({total} B to fetch and a margin of 5%) and {wanted - 1} B are free" in str(
        error.value
    )
    assert "make room, take fewer shards" in str(error.value) and contents(data) == []
    assert not (tmp_path / "out").exists() and not (tmp_path / "cache").exists()
    get(tmp_path, shards="0")
    get(tmp_path)  # what is there needs no room
    monkeypatch.setattr(fetching.shutil, "disk_usage", lambda _: Usage(9 * total, 9 * total, 0))
    assert len(get(tmp_path)) == 4


def test_a_place_on_another_disk_needs_room_too(data, tmp_path, monkeypatch):
    other = tmp_path / "out"
    other.mkdir()
    real = Path.stat

    def stat(path, **options):
        found = real(path, **options)
        return namedtuple("Stat", "st_dev st_mode st_size")(7, found.st_mode, found.st_size) if path == other else found

    found = plan(tmp_path, shards="0")
    size = sum(file.size for file in found.files)
    monkeypatch.setattr(Path, "stat", stat)
    free = {other: int(size * 1.05) - 1}
    monkeypatch.setattr(fetching.shutil, "disk_usage", lambda folder: Usage(0, 0, free.get(folder, 10 * size)))
    with pytest.raises(FetchError, match=f"{other}: .* are needed"):
        check_space(found)
    free[other] += 1
    check_space(found)


def test_a_commit_must_be_named_and_the_newest_is_told(data, tmp_path):
    config = configured(tmp_path, revision=None)
    with pytest.raises(
        ConfigError, match=f"hub.data.revision is not set.*The newest commit is now {COMMIT}.*--revision {COMMIT}"
    ):
        plan(tmp_path, config)
    assert contents(data) == []
    assert plan(tmp_path, config, revision=COMMIT).source.revision == COMMIT
    with pytest.raises(ConfigError, match="'main' of cells/plates is no commit"):
        plan(tmp_path, config, revision="main")
    with pytest.raises(FetchError, match=f"{REPO} has no commit {OTHER}"):
        plan(tmp_path, config, revision=OTHER)
    with pytest.raises(ConfigError, match="it must be owner/name"):
        plan(tmp_path, configured(tmp_path, repo="plates"))


def test_files_that_the_commit_does_not_have(data, tmp_path):
    with pytest.raises(
        FetchError, match="has no file wells.csv; it has OpenPhenom_rxrx3-core_embeddings.parquet, README.md"
    ):
        plan(tmp_path, configured(tmp_path, metadata="wells.csv"))
    with pytest.raises(FetchError, match=r"has no file images/\*.parquet; it has"):
        plan(tmp_path, configured(tmp_path, shards="images/*.parquet"))
    with pytest.raises(FetchError, match="has no file e.parquet"):
        plan(tmp_path, configured(tmp_path, embeddings="e.parquet"), embeddings=True)


def test_a_run_that_would_not_find_the_files_is_warned_of(data, tmp_path):
    config = configured(tmp_path)
    out = tmp_path / "out"
    config["plates"] |= {"metadata": str(out / "." / METADATA), "shards": [str(out / "data" / "train-*.parquet")]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan(tmp_path, config)
    config["plates"] |= {"metadata": "elsewhere.csv", "shards": ["elsewhere/*.parquet"]}
    with pytest.warns(UserWarning) as caught:
        plan(tmp_path, config)
    assert [str(w.message).partition(" ")[0] for w in caught] == ["plates.metadata", "plates.shards"]


def test_the_command_fetches_what_a_run_of_the_shipped_configuration_reads(hub, command, tiny_screen):
    """A line that breaks, HF_ENDPOINT and HF_HOME from the environment, then the plates step on what was fetched."""
    shipped = ROOT / "config/rxrx3-core.yaml"
    tiny_screen.write()
    folder, repo = tiny_screen.folder, resolve(yaml.safe_load(shipped.read_text()))["hub"]["data"]["repo"]
    content = {f"data/train-0000{i}-of-00002.parquet": folder / f"shards/train-{i}.parquet" for i in range(2)}
    content[METADATA] = folder / "metadata.csv"
    for name, path in content.items():
        hub.add(name, path.read_bytes(), repo=f"datasets/{repo}")

    refused = command("fetch-data", "--config", shipped)
    assert refused.returncode == 1 and hub.requests == []
    assert refused.stdout == f"licence of {repo}: RxRx3-core, under its owner's non-commercial licence\n"
    assert refused.stderr.startswith(f"error: {repo} has terms to accept") and refused.stderr.count("\n") == 1
    unnamed = command("fetch-data", "--config", shipped, "--accept-licence")
    assert unnamed.returncode == 1 and f"add --revision {COMMIT}" in unnamed.stderr
    assert unnamed.stderr.count("\n") == 1

    listed = command("fetch-data", "--config", shipped, "--revision", COMMIT, "--dry-run")
    assert listed.returncode == 0, listed.stderr
    assert "3 files, 0.00 GB; still to fetch 0.00 GB" in listed.stdout
    assert f"data/rxrx3-core/{METADATA}  0.000 GB" in listed.stdout and contents(hub) == []

    hub.cut = [None, 20_000]
    options = ("--config", shipped, "--revision", COMMIT, "--accept-licence")
    done = command("fetch-data", *options, "--experiments", "gene-002")
    assert done.returncode == 0, done.stderr
    assert "3/3  data/rxrx3-core/data/train-00001-of-00002.parquet  sha256 " in done.stdout
    hub.requests.clear()
    again = command("fetch-data", *options)
    assert again.returncode == 0 and contents(hub) == [] and "still to fetch 0.00 GB" in again.stdout

    assert len(find_shards(["data/rxrx3-core/data/train-*.parquet"], folder)) == 2
    assert len(read_metadata(folder / "data/rxrx3-core" / METADATA)) == 16
    wells = command("plates", "--config", shipped)
    assert wells.returncode == 0, wells.stderr
    assert len(pd.read_parquet(folder / "results/rxrx3-core/plates/wells.parquet")) == 16


def test_the_example_of_the_readme_is_complete(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "config/README.md").read_text(encoding="utf-8").partition("## A published data set")[2]
    config = resolve(yaml.safe_load(text.partition("```yaml")[2].partition("```")[0]))
    commit = config["hub"]["data"]["revision"]
    for name, value in data.content.items():
        data.add(name, value, commit=commit, repo=f"datasets/{config['hub']['data']['repo']}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for options in ({}, {"shards": "0-1,2"}, {"experiments": ["compound-*"]}, {"embeddings": True}):
            assert list(fetch_data(plan(tmp_path, config, **options)))
    assert len(find_shards(config["plates"]["shards"])) == 3 and Path(config["plates"]["metadata"]).is_file()


def test_a_disk_that_fills_up_meanwhile_is_said(data, tmp_path, monkeypatch):
    from huggingface_hub import file_download

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(file_download, "http_get", full)
    with pytest.raises(FetchError, match=f"the disk is full while fetching {METADATA}; make room, then run the same"):
        get(tmp_path)
    assert not (tmp_path / "out").exists()
