"""OCI registries for tests: one in this process that requires tokens and can misbehave, and that of `crane` if built.

Both accept what `push` uploads through the protocol. `crane`'s registry (Go module `github.com/google/
go-containerregistry`) is used if the program is on the path.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import io
import json
import platform
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx2
import pytest
from waiting import wait_until

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
IMAGE_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
USER, PASSWORD, TOKEN = "robot", "secret", "a-token-for-this-repository"


class Layer:
    """A layer; `diff_id` is the digest of a container layer without compression."""

    def __init__(self, content: bytes, kind: str, title: str | None = None, diff_id: str | None = None) -> None:
        self.content = content
        self.diff_id = diff_id
        self.digest = digest_of(content)
        notes = {"annotations": {"org.opencontainers.image.title": title}} if title else {}
        self.descriptor = {"mediaType": kind, "digest": self.digest, "size": len(content), **notes}


def artifact(files: dict[str, bytes]) -> list[Layer]:
    """Return layers as ORAS pushes files: each file is a layer, whatever its type."""
    return [Layer(content, "application/vnd.oci.image.layer.v1.tar", name) for name, content in files.items()]


def image(*layers: dict[str, bytes]) -> list[Layer]:
    """Return layers as an image builder makes them."""
    archives = [_tar(files) for files in layers]
    return [Layer(gzip.compress(each, 1), IMAGE_LAYER, diff_id=digest_of(each)) for each in archives]


def push(url: str, repository: str, tag: str, layers: list[Layer], **headers: str) -> str:
    """Upload a manifest and its blobs; return the manifest's digest."""
    config = _config(layers)
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": config.descriptor,
        "layers": [layer.descriptor for layer in layers],
    }
    body = json.dumps(manifest).encode()
    with httpx2.Client(base_url=f"{url}/v2/{repository}", headers=headers) as client:
        for layer in (config, *layers):
            place = client.post("/blobs/uploads/").raise_for_status().headers["Location"]
            address = httpx2.URL(url).join(place).copy_merge_params({"digest": layer.digest})
            client.put(str(address), content=layer.content).raise_for_status()
        sent = client.put(f"/manifests/{tag}", content=body, headers={"Content-Type": MANIFEST})
        sent.raise_for_status()
    return digest_of(body)


def _config(layers: list[Layer]) -> Layer:
    """Return the config with which container runtimes compare what they unpack; for an artifact it is empty."""
    diff_ids = [layer.diff_id for layer in layers]
    if None in diff_ids:
        return Layer(b"{}", "application/vnd.oci.empty.v1+json")
    about = {"os": "linux", "architecture": ARCHITECTURES[platform.machine()]}
    content = {**about, "config": {}, "rootfs": {"type": "layers", "diff_ids": diff_ids}}
    return Layer(json.dumps(content).encode(), "application/vnd.oci.image.config.v1+json")


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


class TokenRegistry(ThreadingHTTPServer):
    """A registry whose pulls require a token, which the right password gives; pushes require none."""

    daemon_threads = True

    def __init__(self, address: str) -> None:
        super().__init__((address, 0), _Handler)
        self.host = f"{address}:{self.server_address[1]}"
        self.url = f"http://{self.host}"
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, bytes] = {}
        self.asked: list[tuple[str, str | None]] = []
        """Path and range of each request."""
        self.cuts: list[int] = []
        """The numbers of bytes after which the next answers with blobs end."""
        self.token_expires = False
        self.knows_ranges = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of clients that close connections."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: TokenRegistry

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/token":  # container runtimes try OAuth first
            return self._answer(404, b"{}", {})
        return self._answer(202, b"", {"Location": f"{self.path}1"})

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        path = urlsplit(self.path)
        if "/manifests/" in path.path:
            self.server.manifests[path.path.rsplit("/", 1)[1]] = body
            self.server.manifests[digest_of(body)] = body
        else:
            self.server.blobs[parse_qs(path.query)["digest"][0]] = body
        self._answer(201, b"", {})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        name = path.rsplit("/", 1)[1]
        self.server.asked.append((path, self.headers.get("Range")))
        if path == "/token":
            return self._token()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}" or self.server.token_expires:
            realm = f'Bearer realm="{self.server.url}/token",service="test",scope="repository:team/m:pull"'
            return self._answer(401, b"{}", {"WWW-Authenticate": realm})
        content = (self.server.manifests if "/manifests/" in path else self.server.blobs).get(name)
        if content is None:
            return self._answer(404, b"{}", {})
        return self._content(content, is_blob="/blobs/" in path)

    def _token(self) -> None:
        login = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        if self.headers.get("Authorization") != f"Basic {login}":
            return self._answer(401, b"{}", {})
        return self._answer(200, json.dumps({"token": TOKEN}).encode(), {})

    def _content(self, content: bytes, *, is_blob: bool) -> None:
        asked = self.headers.get("Range") if self.server.knows_ranges else None
        first, _, last = (asked or "bytes=0-").removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last) + 1, len(content)) if last else len(content)
        self.send_response(206 if asked else 200)
        self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
        self.send_header("Content-Type", "application/octet-stream" if is_blob else MANIFEST)
        self.send_header("Docker-Content-Digest", digest_of(content))
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        cuts = self.server.cuts
        cut = cuts.pop(0) if is_blob and cuts and end - start > cuts[0] else end - start
        self.wfile.write(content[start : start + cut])
        if start + cut < end:
            self.close_connection = True

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@contextlib.contextmanager
def token_registry(address: str = "127.0.0.1") -> Iterator[TokenRegistry]:
    registry = TokenRegistry(address)
    thread = Thread(target=registry.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield registry
    finally:
        registry.shutdown()
        thread.join()
        registry.server_close()


@contextlib.contextmanager
def crane_registry() -> Iterator[str]:
    """Run a registry that other tools use as well; yield its host."""
    program = shutil.which("crane")
    if program is None:
        pytest.skip("crane is not on the path: go install github.com/google/go-containerregistry/cmd/crane")
    command = [program, "registry", "serve", "--address", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            host = ""
            while not host:
                line = process.stderr.readline()
                assert line, "the registry exited"
                host = f"127.0.0.1:{line.split()[-1]}" if "serving on" in line else ""
            wait_until(lambda: httpx2.get(f"http://{host}/v2/").status_code == 200)
            yield host
        finally:
            process.kill()


def _tar(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()
