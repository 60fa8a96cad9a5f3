"""A stand-in for the Hugging Face Hub: the parts of its HTTP interface that downloads of a model use.

The client, huggingface_hub, is the real one.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

_MODEL = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(/(?P<what>revision|tree)/(?P<revision>[^/]+))?")
_FILE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<name>.+)")


@dataclass
class Hub:
    """Repositories by name, each a list of commits: name → contents."""

    url: str = ""
    repos: dict[str, list[dict[str, bytes]]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    broken: str = ""  # requests whose path holds it fail with status 500

    def add(self, repo: str, folder: Path) -> None:
        """Commit the files of a folder."""
        self.repos.setdefault(repo, []).append({path.name: path.read_bytes() for path in folder.iterdir()})

    def commit(self, repo: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """The hash and the files of a revision: `main`, a hash, or v1, v2 … for the commits in their order."""
        commits = {f"v{i}": files for i, files in enumerate(self.repos.get(repo, []), start=1)}
        hashes = {name: hashlib.sha1(f"{repo} {name}".encode()).hexdigest() for name in commits}
        for name in reversed(commits):
            if revision in ("main", name, hashes[name]):
                return hashes[name], commits[name]
        return None

    def downloads(self) -> set[str]:
        """Names of the files that were fetched."""
        return {match["name"] for path in self.requests if (match := _FILE.match(path.removeprefix("GET ")))}


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def _answer(self, status: int, content: Any = b"", **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _handle(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        if self.hub.broken and self.hub.broken in path:
            self._answer(500, X_Error_Message="the disk is full")
        elif match := _MODEL.fullmatch(path):
            self._model(match)
        elif match := _FILE.fullmatch(path):
            self._file(match)
        else:
            self._answer(404)

    def _model(self, match: re.Match[str]) -> None:
        repo, what = match["repo"], match["what"]
        if repo not in self.hub.repos:
            self._answer(404, X_Error_Code="RepoNotFound")
            return
        if (commit := self.hub.commit(repo, match["revision"] or "main")) is None:
            self._answer(404, X_Error_Code="RevisionNotFound")
            return
        sha, files = commit
        if what == "tree":
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files.items()
            ]
            self._answer(200, entries)
        else:
            about = {"id": repo, "modelId": repo, "sha": sha, "private": False, "tags": []}
            self._answer(200, {**about, "siblings": [{"rfilename": name} for name in files]})

    def _file(self, match: re.Match[str]) -> None:
        commit = self.hub.commit(match["repo"], match["revision"])
        if commit is None or match["name"] not in commit[1]:
            self._answer(404, X_Error_Code="EntryNotFound")
            return
        data = commit[1][match["name"]]
        self._answer(200, data, ETag=f'"{hashlib.sha1(data).hexdigest()}"', X_Repo_Commit=commit[0])

    do_GET = do_HEAD = _handle

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def serving() -> Iterator[Hub]:
    """An empty hub."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def point_at(url: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Do what HF_ENDPOINT, HF_HUB_CACHE and HF_HUB_DISABLE_XET do when the client is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
