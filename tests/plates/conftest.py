"""A small hub of the Hugging Face kind on loopback, and the real client set to it; nothing reaches another machine."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections import namedtuple
from pathlib import Path

import pytest

REPO, COMMIT = "cells/encoder", "ab" * 20
LARGE = (".safetensors", ".parquet")  # kept apart by the hub, with the SHA-256 of their content
Request = namedtuple("Request", "method path range authorization")


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class Hub(http.server.ThreadingHTTPServer):
    """A hub: large files (*.safetensors, *.parquet) redirect to a CDN under another host name, small ones do not."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.cdn = f"http://localhost:{self.server_port}"
        self.files: dict[str, bytes] = {}  # by path: owner/name/resolve/commit/file
        self.requests: list[Request] = []
        self.cut: list[int | None] = []  # how many bytes each of the next transfers sends before the line breaks
        self.spoil = False  # flip a byte of what is sent
        self.answer: tuple[int, dict[str, str]] | None = None  # instead of any file
        self.headers: dict[str, str] = {}  # on every answer, over what is right

    def handle_error(self, request, client_address):
        """A client that hangs up is no error of the server."""

    def api(self, path: str, commit: str = COMMIT) -> object:
        """Answer what the client asks of the hub's API: the state of a data set, and the list of its files."""
        match = re.fullmatch("api/(datasets/[^/]+/[^/]+)(?:/(.*))?", path)
        if match is None:
            return None
        repo, rest = match.groups()
        known = {name.partition("/resolve/") for name in self.files if name.startswith(f"{repo}/resolve/")}
        commits = {tail.partition("/")[0]: repo for _, _, tail in known}
        if not commits:
            return None
        if not rest or rest.startswith("revision/"):
            wanted = rest.partition("/")[2] if rest else commit
            return {"id": repo[9:], "sha": wanted, "siblings": [], "private": False} if wanted in commits else None
        wanted = rest.split("/")[1]
        folders, entries = set(), []
        for _, _, tail in sorted(known):
            at, _, name = tail.partition("/")
            content = self.files[f"{repo}/resolve/{tail}"]
            if at == wanted:
                lfs = {"oid": sha256(content), "size": len(content), "pointerSize": 134}
                oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
                entry = {"type": "file", "path": name, "size": len(content), "oid": oid}
                entries.append(entry | ({"lfs": lfs} if name.endswith(LARGE) else {}))
                folders |= {str(parent) for parent in Path(name).parents} - {"."}
        entries += [{"type": "directory", "path": folder, "oid": "0" * 40} for folder in sorted(folders)]
        return entries if wanted in commits else None

    def add(self, name: str, content: bytes, commit: str = COMMIT, repo: str = REPO) -> None:
        self.files[f"{repo}/resolve/{commit}/{name}"] = content

    def gets(self) -> list[Request]:
        return [r for r in self.requests if r.method == "GET"]


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        """Keep quiet."""

    def do_HEAD(self):
        self.reply(body=False)

    def do_GET(self):
        self.reply(body=True)

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in (headers | self.server.headers).items():
            self.send_header(key, value)
        self.end_headers()

    def reply(self, body: bool) -> None:
        hub, path = self.server, self.path.lstrip("/").partition("?")[0]
        hub.requests.append(Request(self.command, path, self.headers["Range"], self.headers["Authorization"]))
        if hub.answer:
            return self.head(hub.answer[0], {"Content-Length": "0", **hub.answer[1]})
        if path.startswith("api/"):
            return self.send_json(hub.api(path))
        if path.startswith("cdn/"):
            content = next(c for c in hub.files.values() if sha256(c) == path[4:])
            return self.send(content, sha256(content), body)
        commit = (re.search("/resolve/([^/]*)/", path) or [None, None])[1]
        if path not in hub.files:
            known = any(f"/resolve/{commit}/" in name for name in hub.files)
            code = "EntryNotFound" if known else "RevisionNotFound"
            return self.head(404, {"Content-Length": "0", "X-Error-Code": code})
        content = hub.files[path]
        if path.endswith(LARGE):
            linked = {"X-Linked-Etag": f'"{sha256(content)}"', "X-Linked-Size": str(len(content)), "ETag": '"x"'}
            where = {"Location": f"{hub.cdn}/cdn/{sha256(content)}", "Content-Length": "0", "X-Repo-Commit": commit}
            return self.head(302, linked | where)
        git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        return self.send(content, git, body, {"X-Repo-Commit": commit})

    def send_json(self, value: object) -> None:
        if value is None:
            return self.head(404, {"Content-Length": "0", "X-Error-Code": "RevisionNotFound"})
        content = json.dumps(value).encode()
        self.head(200, {"Content-Length": str(len(content)), "Content-Type": "application/json"})
        self.wfile.write(content)

    def send(self, content: bytes, etag: str, body: bool, more: dict[str, str] | None = None) -> None:
        first, last = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["Range"] or "bytes=0-").groups()
        first, last = int(first), int(last or len(content) - 1)
        rest = content[first : last + 1]
        headers = {"Content-Length": str(len(rest)), "ETag": f'"{etag}"', **(more or {})}
        if self.headers["Range"]:
            headers["Content-Range"] = f"bytes {first}-{first + len(rest) - 1}/{len(content)}"
        self.head(206 if self.headers["Range"] else 200, headers)
        if not body:
            return
        if self.server.spoil:
            rest = bytes([rest[0] ^ 1]) + rest[1:]
        cut = self.server.cut.pop(0) if self.server.cut else None
        cut = len(rest) if cut is None else cut
        self.wfile.write(rest[:cut])
        if cut < len(rest):
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def hub():
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def client(hub, tmp_path, monkeypatch):
    """The client in this process: cache in tmp_path, loopback only, chunks of 4 kB, no waiting between tries."""
    import huggingface_hub
    from huggingface_hub import constants, file_download

    lookup = socket.getaddrinfo

    def loopback_only(host, *arguments, **options):
        assert host in ("127.0.0.1", "localhost"), f"a test went out to {host}"
        return lookup(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", loopback_only)
    for name in [n for n in os.environ if n.lower().endswith("_proxy") or n.startswith(("HF_", "HUGGING"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_ENDPOINT", hub.address)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 4096)
    monkeypatch.setattr(file_download.time, "sleep", lambda _: None)
    huggingface_hub.close_session()
    yield hub
    huggingface_hub.close_session()


@pytest.fixture
def command(hub, tmp_path):
    """Run the command line in a process of its own, whose only open address is the hub on loopback."""
    import phenoica

    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    environment |= {
        "HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_TELEMETRY": "1",
        "HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "127.0.0.1,localhost",
        "PYTHONPATH": str(Path(phenoica.__file__).parents[1]),
    }  # fmt: skip

    def run(*arguments):
        call = [sys.executable, "-m", "phenoica.cli", *map(str, arguments)]
        return subprocess.run(call, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)

    return run
