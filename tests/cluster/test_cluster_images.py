"""Which images are built again, and what of an image travels to the node."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Module = Callable[[str], ModuleType]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in (".dockerignore", "pyproject.toml", "uv.lock"):
        shutil.copy(ROOT / name, tmp_path / name)
    for package in ("gateway", "operator"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_the_tag_follows_code_dockerfile_and_lock(module: Module, checkout: Path) -> None:
    digest = module("sources").digest
    seen = {digest(checkout)}
    for name in ("gateway/pagemill_gateway/app.py", "operator/Dockerfile", "uv.lock", "operator/pyproject.toml"):
        with (checkout / name).open("a") as file:
            file.write("\n# changed\n")
        seen.add(digest(checkout))
    assert len(seen) == 5


def test_the_tag_ignores_what_no_image_holds(module: Module, checkout: Path) -> None:
    digest = module("sources").digest
    before = digest(checkout)
    (checkout / "gateway" / "pagemill_gateway" / "app.pyc").write_bytes(b"bytecode")
    (checkout / "README.md").write_text("words")
    assert digest(checkout) == before


def test_every_package_that_an_image_copies_is_in_the_tag(module: Module) -> None:
    packages = module("sources").PACKAGES
    for dockerfile in ROOT.glob("*/Dockerfile"):
        for line in dockerfile.read_text().splitlines():
            if line.startswith("COPY ") and "--from" not in line and line.split()[1] == line.split()[2]:
                assert line.split()[1] in packages, f"{dockerfile}: {line}"


@pytest.fixture
def sent(module: Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[set[str]], dict[str, bytes]]:
    """The files of the archive that containerd is sent, given the blobs that it has."""
    loading, containers = module("loading"), module("containers")
    monkeypatch.setattr(loading, "LAYOUT", tmp_path)

    def run(present: set[str]) -> dict[str, bytes]:
        archives: list[bytes] = []

        def collect(write: Callable[[tarfile.TarFile], None]) -> None:
            buffer = io.BytesIO()
            with tarfile.open(fileobj=buffer, mode="w") as archive:
                write(archive)
            archives.append(buffer.getvalue())

        monkeypatch.setattr(containers, "blob_digests", lambda: present)
        monkeypatch.setattr(loading, "_copy_to_layout", lambda image: _write_layout(tmp_path))
        monkeypatch.setattr(loading, "_import", collect)
        loading.load("example/engine:1")
        with tarfile.open(fileobj=io.BytesIO(archives[0])) as archive:
            return {each.name: archive.extractfile(each).read() for each in archive}  # type: ignore[union-attr]

    return run


def test_only_missing_layers_travel(sent: Callable[[set[str]], dict[str, bytes]]) -> None:
    first = sent(set())
    assert {BIG, SMALL} <= {name.rpartition("/")[2] for name in first}
    second = sent({f"sha256:{BIG}"})
    assert BIG not in {name.rpartition("/")[2] for name in second}
    assert SMALL in {name.rpartition("/")[2] for name in second}


def test_the_archive_names_the_image(sent: Callable[[set[str]], dict[str, bytes]]) -> None:
    index = json.loads(sent(set())["index.json"])
    assert index["manifests"][0]["annotations"] == {"io.containerd.image.name": "example/engine:1"}


def test_a_layer_that_the_node_has_takes_no_space_beside_it(
    sent: Callable[[set[str]], dict[str, bytes]], tmp_path: Path
) -> None:
    sent(set())
    blob = tmp_path / "blobs" / "sha256" / BIG
    assert blob.stat().st_size == len(LAYERS[0])
    assert blob.stat().st_blocks == 0


def test_a_layer_that_the_node_lost_is_written_again(
    sent: Callable[[set[str]], dict[str, bytes]], tmp_path: Path
) -> None:
    sent(set())
    again = sent(set())
    assert again[f"blobs/sha256/{BIG}"] == LAYERS[0]


LAYERS = (b"torch" * (1 << 19), b"code")
BIG, SMALL = (hashlib.sha256(layer).hexdigest() for layer in LAYERS)


def _write_layout(folder: Path) -> None:
    """What skopeo writes: it keeps a blob whose file has the right name."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True, exist_ok=True)

    def add(content: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(content).hexdigest()
        if not (blobs / digest).exists():
            (blobs / digest).write_bytes(content)
        return {"digest": f"sha256:{digest}", "size": len(content)}

    manifest = {"config": add(b"{}"), "layers": [add(layer) for layer in LAYERS]}
    index = {"manifests": [add(json.dumps(manifest).encode())]}
    (folder / "index.json").write_text(json.dumps(index))
