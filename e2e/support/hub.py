"""A small Hugging Face hub that runs as a pod of a case: one repository with files of a folder or package.

It has the routes that `huggingface_hub` uses: the list of files at a revision, and the files themselves, whole or by
range, with their commit, size and digest in the headers. Each requires a token. It uses the standard library only, so
that it runs in any image with Python.

    python hub.py PORT ORG/NAME TOKEN FILE...        a FILE is a path, or package:path inside an installed package
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import ssl
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = hashlib.sha1(b"the only commit").hexdigest()
CHUNK_BYTES = 1 << 20
CERTIFICATE = Path("/tls/tls.crt")
"""With its key beside it; the hub uses HTTPS if it exists."""


class Hub(ThreadingHTTPServer):
    """The HTTP server with its one repository, at every address of both families."""

    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET

    def __init__(self, port: int, repository: str, token: str, paths: list[Path]) -> None:
        super().__init__(("", port), Handler)
        self.repository = repository
        self.token = token
        self.files = {path.name: path for path in paths}
        self.digests = {name: _sha256(path) for name, path in self.files.items()}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        hub = self.server
        if self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self._text(401, "Invalid credentials", {"X-Error-Message": "Invalid credentials"}, body=body)
        if path.startswith(f"api/models/{hub.repository}"):
            return self._api(path.removeprefix(f"api/models/{hub.repository}"), body=body)
        prefix = f"{hub.repository}/resolve/"
        if path.startswith(prefix):
            _revision, _, name = path.removeprefix(prefix).partition("/")
            if name in hub.files:
                return self._file(name, body=body)
            return self._text(404, "Entry not found", {"X-Error-Code": "EntryNotFound"}, body=body)
        return self._text(404, "Repository not found", {"X-Error-Code": "RepoNotFound"}, body=body)

    def _api(self, route: str, *, body: bool) -> None:
        hub = self.server
        if route.startswith("/tree/"):
            return self._json(
                [{"type": "file", "path": name, **_blob(hub, name, "oid")} for name in hub.files], body=body
            )
        siblings = [{"rfilename": name, **_blob(hub, name, "sha256")} for name in hub.files]
        return self._json({"id": hub.repository, "sha": COMMIT, "siblings": siblings, "private": True}, body=body)

    def _file(self, name: str, *, body: bool) -> None:
        path, digest = self.server.files[name], self.server.digests[name]
        size = path.stat().st_size
        start, end = _range(self.headers.get("Range", ""), size)
        self.send_response(206 if "Range" in self.headers else 200)
        self.send_header("ETag", f'"{digest}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("X-Linked-ETag", f'"{digest}"')
        self.send_header("X-Linked-Size", str(size))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        if body:
            self._copy(path, start, end)

    def _copy(self, path: Path, start: int, end: int) -> None:
        with path.open("rb") as source:
            source.seek(start)
            while start < end:
                chunk = source.read(min(CHUNK_BYTES, end - start))
                self.wfile.write(chunk)
                start += len(chunk)

    def _json(self, value: object, *, body: bool) -> None:
        self._text(200, json.dumps(value), {"Content-Type": "application/json", "X-Repo-Commit": COMMIT}, body=body)

    def _text(self, status: int, text: str, headers: dict[str, str], *, body: bool) -> None:
        data = text.encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)


def _blob(hub: Hub, name: str, digest: str) -> dict[str, Any]:
    """Return size and digest of a file, in the form that both lists of files use."""
    size = hub.files[name].stat().st_size
    return {"oid": COMMIT, "size": size, "lfs": {digest: hub.digests[name], "size": size, "pointerSize": 134}}


def _located(name: str) -> Path:
    """Return the path of a file; a package is not imported, because its dependencies may not be installed."""
    package, _, path = name.rpartition(":")
    if not package:
        return Path(path)
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"no package {package} is installed here")
    return Path(spec.submodule_search_locations[0]) / path


def _range(header: str, size: int) -> tuple[int, int]:
    """Return the first byte and the byte after the last one, for `bytes=FIRST-[LAST]` or for the whole file."""
    first, _, last = header.removeprefix("bytes=").partition("-")
    return int(first or 0), int(last) + 1 if last else size


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as source:
        while chunk := source.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


if __name__ == "__main__":
    # A container's first process ignores the signal without an explicit handler.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    hub = Hub(int(sys.argv[1]), sys.argv[2], sys.argv[3], [_located(name) for name in sys.argv[4:]])
    if CERTIFICATE.exists():
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(CERTIFICATE, CERTIFICATE.with_suffix(".key"))
        hub.socket = context.wrap_socket(hub.socket, server_side=True)
    hub.serve_forever()
