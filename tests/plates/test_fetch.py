"""The real client of the Hugging Face hub against a small hub on loopback; nothing here reaches any other machine."""

from __future__ import annotations

import hashlib
import json
import re
import socket
from collections import namedtuple
from pathlib import Path

import pytest
import yaml

from phenoica.config import resolve
from phenoica.errors import CheckpointError, ConfigError, FetchError
from phenoica.plates import fetch as fetching
from phenoica.plates.fetch import fetch, fetch_model, receipt_path, resolve_hub_id

REPO = "cells/encoder"
COMMIT, OTHER = "ab" * 20, "cd" * 20
LICENCE = "for looking at, not for selling"
ROOT = Path(__file__).resolve().parents[2]


def numbered(n: int, start: int = 0) -> bytes:
    """Return `n` bytes in which every block of 8 says where it is, so that a shifted resume cannot go unseen."""
    return b"".join(i.to_bytes(8, "big") for i in range(start, start + n // 8))


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def get(target: Path | None, name: str = "model.safetensors", **changes):
    options = {"revision": COMMIT, "licence": LICENCE, "accepted": True} | changes
    return fetch(options.pop("repo", REPO), {name: target}, **options)


def tree(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder that is no lock and no mark of the cache."""
    found = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    return {k: p.read_bytes() for k, p in found.items() if not k.endswith((".lock", "CACHEDIR.TAG", ".gitignore"))}


def test_a_file_lands_in_the_cache_and_at_its_place_with_a_receipt_and_is_not_asked_for_again(client, tmp_path):
    weights, small = numbered(20_000), b'{"a": 1}'
    client.add("model.safetensors", weights)
    client.add("config.json", small)
    targets = {n: tmp_path / "out" / n for n in ("model.safetensors", "config.json", "absent.json")}
    arguments = {"revision": COMMIT, "licence": LICENCE, "accepted": True, "optional": ("absent.json",)}
    result = fetch(REPO, targets, **arguments)
    assert [(f.filename, f.path.read_bytes(), f.sha256) for f in result] == [
        ("model.safetensors", weights, sha256(weights)),
        ("config.json", small, sha256(small)),
    ]
    receipt = json.loads((tmp_path / "out/model.safetensors.receipt.json").read_text())
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", receipt.pop("licence_accepted"))
    receipt.pop("phenoica")
    assert receipt == {
        "repository": REPO, "repository_type": "model", "revision": COMMIT, "file": "model.safetensors",
        "sha256": sha256(weights), "licence": LICENCE,
    }  # fmt: skip
    snapshot = tmp_path / "cache/models--cells--encoder/snapshots" / COMMIT
    assert tree(snapshot) == {"model.safetensors": weights, "config.json": small}
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in (tmp_path / "out").iterdir()}
    assert len(before) == 4
    client.requests.clear()
    del targets["absent.json"]
    fetch(REPO, targets, **arguments)
    assert client.requests == []
    assert before == {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in (tmp_path / "out").iterdir()}


def test_a_data_set_comes_from_its_own_addresses_and_may_stay_in_the_cache(client, tmp_path):
    client.add("data/train-0.parquet", numbered(800), repo=f"datasets/{REPO}")
    (found,) = get(None, "data/train-0.parquet", repo_type="dataset")
    assert found.path.read_bytes() == numbered(800)
    assert found.path.is_relative_to(tmp_path / "cache/datasets--cells--encoder/snapshots")


def test_a_line_that_breaks_is_taken_up_where_it_broke(client, tmp_path):
    weights = numbered(64_000)
    client.add("model.safetensors", weights)
    client.cut = [32_000]
    get(tmp_path / "w.safetensors")
    assert (tmp_path / "w.safetensors").read_bytes() == weights
    ranges = [r.range for r in client.gets() if r.path.startswith("cdn/")]
    assert ranges == [None, "bytes=28672-"]  # whole chunks of 4096 that had arrived


def test_a_later_run_goes_on_with_what_an_earlier_one_left(client, tmp_path):
    weights, out = numbered(64_000), tmp_path / "w.safetensors"
    client.add("model.safetensors", weights)
    client.cut = [40_000] + [0] * 20
    with pytest.raises(FetchError, match="goes on where it stopped"):
        get(out)
    assert not out.exists() and not receipt_path(out).exists()
    (part,) = tree(tmp_path / "cache")
    assert part.endswith(f"{sha256(weights)}.incomplete")
    client.cut, client.requests = [], []
    get(out)
    assert out.read_bytes() == weights
    assert [r.range for r in client.gets() if r.path.startswith("cdn/")] == ["bytes=36864-"]
    assert not any(name.endswith(".incomplete") for name in tree(tmp_path / "cache"))


def test_leftovers_that_are_not_of_this_file_do_not_survive(client, tmp_path):
    weights, out = numbered(8_000), tmp_path / "w.safetensors"
    client.add("model.safetensors", weights)
    part = tmp_path / "cache/models--cells--encoder/blobs" / f"{sha256(weights)}.incomplete"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"longer than the whole file" * 1000)
    get(out)
    assert out.read_bytes() == weights
    for left in (b"no beginning of it", b"x" * len(weights)):
        (tmp_path / "cache").rename(tmp_path / f"used-{len(left)}")
        part.parent.mkdir(parents=True)
        part.write_bytes(left)
        with pytest.raises(FetchError, match="does not have the hash"):
            get(out)
        assert tree(tmp_path / "cache") == {}
    get(out)


def test_wrong_bytes_are_removed_and_the_good_file_of_before_stays(client, tmp_path):
    good, out = numbered(8_000), tmp_path / "out/w.safetensors"
    client.add("model.safetensors", good)
    client.add("model.safetensors", numbered(8_000, start=7), commit=OTHER)
    get(out)
    before, cache = tree(tmp_path / "out"), tree(tmp_path / "cache")
    client.spoil = True
    with pytest.raises(FetchError, match="does not have the hash") as error:
        get(out, revision=OTHER)
    assert "\n" not in str(error.value) and sha256(numbered(8_000, start=7)) in str(error.value)
    assert tree(tmp_path / "out") == before and tree(tmp_path / "cache") == cache
    client.spoil = False
    get(out, revision=OTHER)
    assert out.read_bytes() == numbered(8_000, start=7)
    assert json.loads(receipt_path(out).read_text())["revision"] == OTHER
    client.add("config.json", b"{}" * 50)
    client.spoil = True
    with pytest.raises(FetchError, match="does not have the hash"):  # small files carry git's hash
        get(tmp_path / "config.json", "config.json")


def test_a_pinned_hash_is_compared_before_the_transfer(client, tmp_path):
    client.add("model.safetensors", numbered(8_000))
    client.add("config.json", b"{}")
    out = tmp_path / "w.safetensors"
    with pytest.raises(FetchError, match="not the pinned 0000"):
        get(out, sha256={"model.safetensors": "0" * 64})
    assert client.gets() == [] and not out.exists()
    get(out, sha256={"model.safetensors": sha256(numbered(8_000))})
    with pytest.raises(FetchError, match="not the pinned 0000"):  # from the cache as well
        get(tmp_path / "v.safetensors", sha256={"model.safetensors": "0" * 64})
    assert not (tmp_path / "v.safetensors").exists() and out.read_bytes() == numbered(8_000)
    with pytest.raises(FetchError, match="not the pinned 0000"):
        get(tmp_path / "c.json", "config.json", sha256={"config.json": "0" * 64})
    assert not (tmp_path / "c.json").exists()


def test_a_damaged_file_in_the_cache_is_fetched_again(client, tmp_path):
    client.add("model.safetensors", numbered(8_000))
    (found,) = get(None)
    found.path.resolve().write_bytes(numbered(8_000, start=1))
    client.requests.clear()
    (again,) = get(None)
    assert again.path.read_bytes() == numbered(8_000) and client.gets()


def test_a_file_of_somebody_else_is_not_replaced(client, tmp_path):
    client.add("model.safetensors", numbered(8_000))
    out = tmp_path / "w.safetensors"
    out.write_bytes(b"months of training")
    for transfers in (0, 1):  # without and with the file in the cache
        with pytest.raises(FetchError, match="left as it is"):
            get(out)
        assert out.read_bytes() == b"months of training" and not receipt_path(out).exists()
        assert sum(r.path.startswith("cdn/") for r in client.gets()) == transfers
        get(None)
    out.unlink()
    get(out)
    out.unlink()  # it shares its bytes with the cache
    out.write_bytes(b"months of training")
    receipt_path(out).write_text("{")
    with pytest.raises(FetchError, match="left as it is"):
        get(out)


@pytest.mark.parametrize(
    ("answer", "changes", "message"),
    [
        (None, {"revision": OTHER}, f"{REPO} has no commit {OTHER}"),
        (None, {"name": "other.safetensors"}, "has no file other.safetensors"),
        ((401, {"X-Error-Code": "RepoNotFound"}), {}, f"has no model {REPO}, or hides it"),
        ((401, {}), {}, "answered 401 .* set HF_TOKEN"),
        ((403, {"X-Error-Code": "GatedRepo"}), {}, f"{REPO} is gated: ask for access at"),
        ((403, {}), {}, "answered 403 .* set HF_TOKEN"),
        ((404, {}), {}, "answered 404 .* check HF_ENDPOINT"),
        ((500, {}), {}, "answered 500 .* run the same command again"),
        ((200, {}), {}, "answered with no commit; check that HF_ENDPOINT"),
        ((200, {"X-Repo-Commit": OTHER}), {}, f"answered with {OTHER}"),
        ((200, {"X-Repo-Commit": COMMIT, "ETag": '"1-2"'}), {}, "does not state hash and size"),
    ],
)
def test_what_the_server_refuses_is_one_line_that_says_what_to_do(client, tmp_path, answer, changes, message):
    client.add("model.safetensors", numbered(800))
    client.answer = answer
    with pytest.raises(FetchError, match=message) as error:
        get(tmp_path / "out/w.safetensors", **changes)
    assert "\n" not in str(error.value)
    assert client.gets() == [] and not (tmp_path / "out").exists()


def test_no_network_and_no_room(client, tmp_path, monkeypatch):
    client.add("model.safetensors", numbered(800))
    with socket.socket() as idle:  # a port that is bound and listens not
        idle.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{idle.getsockname()[1]}/")
        with pytest.raises(FetchError, match="cannot get model.safetensors .* check network and HF_ENDPOINT") as error:
            get(None)
        assert "\n" not in str(error.value)
    monkeypatch.setenv("HF_ENDPOINT", client.address + "/")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(fetching.shutil, "disk_usage", lambda _: usage(1000, 201, 799))
    with pytest.raises(FetchError, match="make room, or set HF_HOME"):
        get(None)
    monkeypatch.setattr(fetching.shutil, "disk_usage", lambda _: usage(1000, 200, 800))
    get(None)
    monkeypatch.setenv("HF_ENDPOINT", "mirror.example")
    with pytest.raises(ConfigError, match="HF_ENDPOINT is 'mirror.example'; it must start with http"):
        get(None, revision=OTHER)


def test_nothing_is_asked_before_the_licence_is_accepted_and_the_commit_named(client, tmp_path):
    client.add("model.safetensors", numbered(800))
    with pytest.raises(FetchError, match=f"{LICENCE}. Read them at {client.address}/{REPO}, .*--accept-licence"):
        get(tmp_path / "w.safetensors", accepted=False)
    for revision in ("main", "v1", COMMIT[:12], COMMIT.upper(), ""):
        with pytest.raises(ConfigError, match="is no commit"):
            get(tmp_path / "w.safetensors", revision=revision)
    for repo in ("encoder", "a/b/c", "a/../b", "/a", "a--b/c", f"a/{'b' * 100}"):
        with pytest.raises(ConfigError, match="it must be owner/name"):
            get(None, repo=repo)
    assert client.requests == []


def test_a_token_goes_to_the_hub_and_not_to_where_it_redirects(client, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    client.add("model.safetensors", numbered(800))
    get(None)
    assert {r.authorization for r in client.requests if "resolve" in r.path} == {"Bearer hf_secret"}
    assert [r.authorization for r in client.requests if r.path.startswith("cdn/")] == [None]


def test_the_configuration_says_what_to_fetch_and_where_it_goes(client, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hub = {"repo": REPO, "revision": COMMIT, "sha256": sha256(numbered(800))}
    config = resolve({"run": "r", "source": "demo", "hub": hub})
    client.add("model.safetensors", numbered(800))
    client.add("model.safetensors", numbered(1600), commit=OTHER)
    with pytest.raises(FetchError, match="terms to accept: the terms stated on its page"):
        fetch_model(config)
    assert client.requests == []
    (found,) = fetch_model(config, accept_licence=True)  # there is no config.json
    assert found.path == Path("data/encoder/model.safetensors") and found.path.read_bytes() == numbered(800)
    config["hub"]["accept_licence"] = True
    config["licences"]["weights"] = LICENCE
    (found,) = fetch_model(config, revision=OTHER)  # the pin is of the configured commit
    assert found.path.read_bytes() == numbered(1600)
    assert json.loads(receipt_path(found.path).read_text())["licence"] == LICENCE
    config["embed"]["checkpoint"] = "weights/own.pt"
    (found,) = fetch_model(config)
    assert found.path == Path("weights/own.pt")
    config["hub"]["sha256"] = "0" * 64
    with pytest.raises(FetchError, match="not the pinned 0000"):
        fetch_model(config, out="elsewhere.safetensors")
    with pytest.raises(ConfigError, match="--repo a/b needs --revision"):
        fetch_model(config, repo="a/b")
    with pytest.raises(ConfigError, match="is a folder; name the file"):
        fetch_model(config, out="weights")


def test_a_hub_id_stands_for_the_weights_in_the_cache(client, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    default = resolve({"run": "r", "source": "demo"})["hub"]
    for text in ("model.safetensors", "weights/model.safetensors", "/a/b/c", tmp_path):
        assert resolve_hub_id(text) == Path(text)
    with pytest.raises(CheckpointError, match=f"phenoica fetch-model --repo {default['repo']} --accept-licence"):
        resolve_hub_id(default["repo"])
    with pytest.raises(CheckpointError, match=f"--repo {REPO} --revision COMMIT --accept-licence"):
        resolve_hub_id(REPO)
    for i, commit in enumerate((COMMIT, OTHER)):
        client.add("model.safetensors", numbered(800, start=i), commit=commit)
    get(None)
    client.requests.clear()
    assert resolve_hub_id(REPO).read_bytes() == resolve_hub_id(f"{REPO}@{COMMIT}").read_bytes() == numbered(800)
    with pytest.raises(CheckpointError, match=f"--repo {REPO} --revision {OTHER} --accept-licence"):
        resolve_hub_id(f"{REPO}@{OTHER}")
    with pytest.raises(CheckpointError, match="'main' is no commit"):
        resolve_hub_id(f"{REPO}@main")
    assert client.requests == []
    get(None, revision=OTHER)
    with pytest.raises(CheckpointError, match=f"say which: {REPO}@{COMMIT}, {REPO}@{OTHER}"):
        resolve_hub_id(REPO)
    assert resolve_hub_id(f"{REPO}@{OTHER}").read_bytes() == numbered(800, start=1)
    for i, commit in enumerate((COMMIT, default["revision"])):
        with pytest.raises(CheckpointError, match="not in huggingface's cache"):  # another commit is no stand-in
            resolve_hub_id(default["repo"])
        client.add("model.safetensors", numbered(800, start=i), commit=commit, repo=default["repo"])
        get(None, repo=default["repo"], revision=commit)
    assert resolve_hub_id(default["repo"]).read_bytes() == numbered(800, start=1)  # the pinned one
    (tmp_path / "cells").mkdir()
    (tmp_path / REPO).write_bytes(b"a file of that name")
    assert resolve_hub_id(REPO) == Path(REPO)


def test_the_command_fetches_what_the_shipped_configuration_looks_for(hub, command, tmp_path):
    """Real chunks of 10 MB, a line that breaks, HF_ENDPOINT and HF_HOME from the environment."""
    shipped = ROOT / "config/rxrx3-core.yaml"
    value = yaml.safe_load(shipped.read_text())
    default = resolve(value)["hub"]
    weights = numbered(24_000_000)
    for name, content in (("model.safetensors", weights), ("config.json", b"{}")):
        hub.add(name, content, commit=default["revision"], repo=default["repo"])

    refused = command("fetch-model", "--config", shipped)
    assert refused.returncode == 1 and hub.requests == []
    assert refused.stdout == f"licence of {default['repo']}: {value['licences']['weights']}\n"
    assert refused.stderr.startswith(f"error: {default['repo']} has terms to accept")
    assert refused.stderr.count("\n") == 1

    pinned = command("fetch-model", "--config", shipped, "--accept-licence")
    assert pinned.returncode == 1 and hub.gets() == []
    assert f"not the pinned {default['sha256']}" in pinned.stderr and "Traceback" not in pinned.stderr

    own = tmp_path / "own.yaml"
    own.write_text(yaml.safe_dump(value | {"hub": {"sha256": None, "accept_licence": True}}))
    hub.cut = [12_000_000]
    done = command("fetch-model", "--config", own)
    assert done.returncode == 0, done.stderr
    place = tmp_path / value["embed"]["checkpoint"]
    assert place.read_bytes() == weights and (place.parent / "config.json").read_bytes() == b"{}"
    assert f"{value['embed']['checkpoint']}  sha256 {sha256(weights)}" in done.stdout
    assert json.loads(receipt_path(place).read_text())["licence"] == value["licences"]["weights"]
    assert [r.range for r in hub.gets() if r.path.startswith("cdn/")] == [None, "bytes=10485760-"]
    folder = tmp_path / f"home/hub/models--{default['repo'].replace('/', '--')}/snapshots/{default['revision']}"
    assert (folder / "model.safetensors").read_bytes() == weights


def test_the_command_says_in_one_line_what_is_missing(hub, command, tmp_path):
    hub.add("model.safetensors", numbered(800))
    gone = command("fetch-model", "--repo", REPO, "--revision", OTHER, "--accept-licence", "--out", "w.safetensors")
    assert gone.returncode == 1 and not (tmp_path / "w.safetensors").exists()
    assert gone.stderr == f"error: {REPO} has no commit {OTHER}; see {hub.address}/{REPO}\n"
    done = command("fetch-model", "--repo", REPO, "--revision", COMMIT, "--accept-licence", "--out", "w.safetensors")
    assert done.returncode == 0 and (tmp_path / "w.safetensors").read_bytes() == numbered(800)
