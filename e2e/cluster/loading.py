"""Puts images into the node's containerd, moving only the layers that it does not have yet.

An image travels as an archive without what containerd already holds: after the first time, six gigabytes of torch stay
where they are, and a change of code is a matter of seconds. Builds nothing: `images` does.
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
from pathlib import Path
from typing import Any

import binaries
import containers
from layout import HOME, PAUSE_IMAGE

LAYOUT = HOME / "layout"
"""An OCI image layout that skopeo writes to; it skips the layers that lie there already."""
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


class LoadError(Exception):
    """The image did not reach containerd; the message says why."""


def load(image: str) -> None:
    """Copy an image of buildah's store into containerd under the same name."""
    LAYOUT.mkdir(parents=True, exist_ok=True)
    present = containers.blob_digests()
    _drop_emptied_blobs(present)
    (LAYOUT / "index.json").unlink(missing_ok=True)  # it would go on listing every image ever loaded
    _copy_to_layout(image)
    entry = json.loads((LAYOUT / "index.json").read_text())["manifests"][-1]
    new = [blob for blob in _blobs_of(entry) if f"sha256:{blob.name}" not in present]

    def write(archive: tarfile.TarFile) -> None:
        _add_index(archive, entry, image)
        for blob in new:
            archive.add(blob, f"blobs/sha256/{blob.name}")

    _import(write)
    for blob in new:
        _empty(blob)


def load_pause() -> None:
    """The image that holds a pod's namespaces: one program, put together here."""
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
    """Uncompressed, because packing six gigabytes takes minutes; skopeo can, Debian's buildah cannot."""
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
            pass  # containerd's own words say more
        if process.wait() != 0:
            output.seek(0)
            raise LoadError(f"containerd refused the image: {output.read().decode(errors='replace')[-2000:]}")


def _blobs_of(entry: dict[str, Any]) -> list[Path]:
    """The files of a manifest: config, layers, and the manifest itself."""
    manifest = json.loads(_blob(entry["digest"]).read_text())
    digests = [manifest["config"]["digest"], *(layer["digest"] for layer in manifest["layers"]), entry["digest"]]
    return [_blob(digest) for digest in dict.fromkeys(digests)]


def _blob(digest: str) -> Path:
    return LAYOUT / "blobs" / "sha256" / digest.removeprefix("sha256:")


def _empty(blob: Path) -> None:
    """containerd has it now: keep name and size, by which skopeo skips it, and give the disk space back."""
    size = blob.stat().st_size
    if size < 1 << 20:
        return
    os.truncate(blob, 0)
    os.truncate(blob, size)


def _drop_emptied_blobs(present: set[str]) -> None:
    """Where containerd has lost a layer (its store was removed), skopeo must write it again."""
    for blob in (LAYOUT / "blobs" / "sha256").glob("*"):
        status = blob.stat()
        if f"sha256:{blob.name}" not in present and status.st_size > 0 and status.st_blocks == 0:
            blob.unlink()


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
