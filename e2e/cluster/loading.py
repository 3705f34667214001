"""Loads images into the node's containerd, copying only the layers that it does not have yet.

An image is sent as an archive without the layers that containerd has: after the first time, six gigabytes of torch are
not copied again, and a change of code takes seconds. The module builds no image: `images` does.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import binaries
import containers
from layout import HOME, IMAGES, PAUSE_IMAGE

LAYOUT = HOME / "layout"
"""The OCI image layout to which skopeo writes; skopeo skips the layers that the layout has."""
BLOBS = IMAGES / "io.containerd.content.v1.content" / "blobs" / "sha256"
"""containerd's own files, on the same file system as the layout."""
LARGE_BYTES = 1 << 20
NUM_ADOPTIONS = 3
KEEP = "containerd.io/gc.root"
"""The label by which containerd keeps a layer that no image references yet."""
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


class LoadError(Exception):
    """Raised if the image did not reach containerd; the message says why."""


def load(image: str) -> None:
    """Copy an image from buildah's store into containerd under the same name."""
    LAYOUT.mkdir(parents=True, exist_ok=True)
    present = containers.blob_digests()
    _forget_blobs_but(present)
    (LAYOUT / "index.json").unlink(missing_ok=True)  # otherwise the layout would list every image ever loaded
    _copy_to_layout(image)
    entry = json.loads((LAYOUT / "index.json").read_text())["manifests"][-1]
    new = [blob for blob in _blobs_of(entry) if _digest_of(blob) not in present]
    large = [blob for blob in new if blob.stat().st_size >= LARGE_BYTES]
    for blob in large:
        _adopt(blob)

    def write(archive: tarfile.TarFile) -> None:
        _add_index(archive, entry, image)
        for blob in new:
            if blob not in large:
                archive.add(blob, f"blobs/sha256/{blob.name}")

    _import(write)
    for blob in large:
        containers.ctr("content", "label", _digest_of(blob), f"{KEEP}=")  # from now on, the image references the layer


def load_pause() -> None:
    """Build and load the image of the pause container, which holds a pod's namespaces: a single program."""
    if PAUSE_IMAGE in containers.image_names():
        return
    layer_file = io.BytesIO()
    with tarfile.open(fileobj=layer_file, mode="w") as archive:
        archive.add(binaries.bin_dir() / "pause", "pause")
    layer = layer_file.getvalue()
    config = _json(
        {
            "architecture": ARCHITECTURES[platform.machine()],
            "os": "linux",
            "config": {"Entrypoint": ["/pause"], "User": "65532:65532"},
            "rootfs": {"type": "layers", "diff_ids": [_descriptor(LAYER, layer)["digest"]]},
        }
    )
    parts = {"config": _descriptor(CONFIG, config), "layers": [_descriptor(LAYER, layer)]}
    manifest = _json({"schemaVersion": 2, "mediaType": MANIFEST, **parts})

    def write(archive: tarfile.TarFile) -> None:
        _add_index(archive, _descriptor(MANIFEST, manifest), PAUSE_IMAGE)
        for blob in (layer, config, manifest):
            _add(archive, f"blobs/sha256/{hashlib.sha256(blob).hexdigest()}", blob)

    _import(write)


def _copy_to_layout(image: str) -> None:
    """Copy the image uncompressed, because compression takes minutes; Debian's buildah cannot, skopeo can."""
    argv = ["skopeo", "copy", "--quiet", "--dest-oci-accept-uncompressed-layers"]
    argv += [f"containers-storage:{image}", f"oci:{LAYOUT}:{image}"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise LoadError("`skopeo` is not on PATH. On Debian: apt-get install skopeo") from error
    if done.returncode != 0:
        raise LoadError(f"`{' '.join(argv)}` failed:\n{done.stderr[-2000:]}")


def _import(write: Callable[[tarfile.TarFile], None]) -> None:
    """Stream an OCI archive into containerd, which unpacks it."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            containers.argv("images", "import", "-"), stdin=subprocess.PIPE, stdout=output, stderr=output
        )
        assert process.stdin is not None
        try:
            with process.stdin, tarfile.open(fileobj=process.stdin, mode="w|", bufsize=1 << 20) as archive:
                write(archive)
        except BrokenPipeError:
            pass  # containerd's own output contains the cause.
        if process.wait() != 0:
            output.seek(0)
            raise LoadError(f"containerd refused the image: {output.read().decode(errors='replace')[-2000:]}")


def _blobs_of(entry: dict[str, Any]) -> list[Path]:
    """Return the files of a manifest: the config, the layers, and the manifest itself."""
    manifest = json.loads(_blob(entry["digest"]).read_text())
    digests = [manifest["config"]["digest"], *(layer["digest"] for layer in manifest["layers"]), entry["digest"]]
    return [_blob(digest) for digest in dict.fromkeys(digests)]


def _blob(digest: str) -> Path:
    return LAYOUT / "blobs" / "sha256" / digest.removeprefix("sha256:")


def _adopt(blob: Path) -> None:
    """Give containerd a layer with a label that keeps it: containerd may collect unreferenced layers."""
    for _ in range(NUM_ADOPTIONS - 1):
        _ingest(blob)
        with suppress(containers.ContainerError):
            _keep(blob)
            return
    _ingest(blob)
    _keep(blob)


def _keep(blob: Path) -> None:
    containers.ctr("content", "label", _digest_of(blob), f"{KEEP}=import")


def _ingest(blob: Path) -> None:
    """Add a layer without copying it: link it into containerd's store, then register it."""
    target = BLOBS / blob.name
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        os.link(blob, target)
    digest, size = _digest_of(blob), str(blob.stat().st_size)
    with blob.open("rb") as content:
        argv = ["content", "ingest", "--expected-digest", digest, "--expected-size", size, digest]
        done = subprocess.run(containers.argv(*argv), stdin=content, capture_output=True, text=True)
    if done.returncode != 0:
        raise LoadError(f"containerd refused the layer {digest}: {done.stderr[-2000:]}")


def _forget_blobs_but(present: set[str]) -> None:
    """Remove layers that containerd has dropped; the others cost no space, because their files are linked."""
    for blob in (LAYOUT / "blobs" / "sha256").glob("*"):
        if _digest_of(blob) not in present:
            blob.unlink()


def _digest_of(blob: Path) -> str:
    return f"sha256:{blob.name}"


def _add_index(archive: tarfile.TarFile, entry: dict[str, Any], image: str) -> None:
    named = {**entry, "annotations": {"io.containerd.image.name": image}}
    _add(archive, "oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
    _add(archive, "index.json", _json({"schemaVersion": 2, "manifests": [named]}))


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def _descriptor(media_type: str, content: bytes) -> dict[str, Any]:
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    return {"mediaType": media_type, "digest": digest, "size": len(content)}


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content).encode()
