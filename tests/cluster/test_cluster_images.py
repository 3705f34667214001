"""The images that are rebuilt, and the parts of an image that are sent to the node."""

from __future__ import annotations

import hashlib
import io
import json
import re
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
    for name in (".dockerignore", "Dockerfile", "pyproject.toml", "uv.lock"):
        shutil.copy(ROOT / name, tmp_path / name)
    for package in ("gateway", "operator", "release"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_the_tag_depends_on_code_dockerfile_and_lock(module: Module, checkout: Path) -> None:
    digest = module("sources").digest
    seen = {digest(checkout)}
    for name in ("gateway/pagemill_gateway/app.py", "Dockerfile", "uv.lock", "operator/pyproject.toml"):
        with (checkout / name).open("a") as file:
            file.write("\n# changed\n")
        seen.add(digest(checkout))
    assert len(seen) == 5


def test_the_tag_ignores_files_outside_the_images(module: Module, checkout: Path) -> None:
    digest = module("sources").digest
    before = digest(checkout)
    (checkout / "gateway" / "pagemill_gateway" / "app.pyc").write_bytes(b"bytecode")
    (checkout / "README.md").write_text("words")
    assert digest(checkout) == before


def test_the_tag_covers_every_package_that_an_image_copies(module: Module) -> None:
    packages = module("sources").PACKAGES
    copied = re.findall(r"^COPY (\S+) \1$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert set(copied) == set(packages)


@pytest.fixture
def load(module: Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[set[str]], dict[str, bytes]]:
    """Return `load(present)`, which loads an image into a containerd with these blobs and returns the sent files."""
    loading, containers = module("loading"), module("containers")
    monkeypatch.setattr(loading, "LAYOUT", tmp_path / "layout")
    monkeypatch.setattr(loading, "BLOBS", tmp_path / "store")
    monkeypatch.setattr(containers, "argv", lambda *arguments: ["true"])
    monkeypatch.setattr(containers, "ctr", lambda *arguments: "")
    monkeypatch.setattr(loading, "_copy_to_layout", lambda image: _write_layout(tmp_path / "layout"))

    def run(present: set[str]) -> dict[str, bytes]:
        buffer = io.BytesIO()

        def collect(write: Callable[[tarfile.TarFile], None]) -> None:
            with tarfile.open(fileobj=buffer, mode="w") as archive:
                write(archive)

        monkeypatch.setattr(containers, "blob_digests", lambda: present)
        monkeypatch.setattr(loading, "_import", collect)
        loading.load("example/engine:1")
        buffer.seek(0)
        with tarfile.open(fileobj=buffer) as archive:
            return {each.name: archive.extractfile(each).read() for each in archive}  # type: ignore[union-attr]

    return run


Load = Callable[[set[str]], dict[str, bytes]]


def test_a_large_layer_is_linked_and_not_sent(load: Load, tmp_path: Path) -> None:
    sent = load(set())
    assert f"blobs/sha256/{BIG}" not in sent
    assert sent[f"blobs/sha256/{SMALL}"] == LAYERS[1]
    stored = tmp_path / "store" / BIG
    assert stored.samefile(tmp_path / "layout" / "blobs" / "sha256" / BIG)


def test_blobs_on_the_node_are_neither_sent_nor_linked(load: Load, tmp_path: Path) -> None:
    sent = load({f"sha256:{BIG}", f"sha256:{SMALL}"})
    assert {BIG, SMALL}.isdisjoint(name.rpartition("/")[2] for name in sent)
    assert not (tmp_path / "store").exists()


def test_the_archive_contains_the_name_of_the_image(load: Load) -> None:
    index = json.loads(load(set())["index.json"])
    assert index["manifests"][0]["annotations"] == {"io.containerd.image.name": "example/engine:1"}


def test_a_layer_that_the_node_lost_is_written_again(load: Load, tmp_path: Path) -> None:
    load(set())
    blob = tmp_path / "layout" / "blobs" / "sha256" / BIG
    blob.write_bytes(b"an old file")
    (tmp_path / "store" / BIG).unlink()
    load(set())
    assert (tmp_path / "store" / BIG).read_bytes() == LAYERS[0]


@pytest.mark.parametrize("num_lost", [1, 2, 3])
def test_a_layer_that_is_collected_before_it_is_kept_is_added_again(
    load: Load, module: Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_lost: int
) -> None:
    containers, stored, kept = module("containers"), tmp_path / "store" / BIG, []

    def collecting(*arguments: str) -> str:
        if arguments[-1].endswith("=import"):
            kept.append(stored.exists())
            if len(kept) <= num_lost:
                stored.unlink()
                raise containers.ContainerError("not found")
        return ""

    monkeypatch.setattr(containers, "ctr", collecting)
    if num_lost == 3:
        with pytest.raises(containers.ContainerError):
            load(set())
        return
    load(set())
    assert kept == [True] * (num_lost + 1)
    assert stored.exists()


class Programs:
    """buildah and ctr that record their arguments; commands with one of the words in `refused` fail."""

    def __init__(self, errors: tuple[type[Exception], type[Exception]], images: list[str]) -> None:
        self._errors, self._images = errors, images
        self.reported: list[str] = []
        self.refused: set[str] = set()

    def buildah(self, *argv: str) -> str:
        self._tell(self._errors[0], argv)
        return json.dumps([{"names": self._images}, {"names": None}]) if argv[1] == "images" else "working-1\n"

    def ctr(self, *argv: str) -> str:
        self._tell(self._errors[1], ("ctr", *argv))
        return "\n".join(self._images)

    def _tell(self, error: type[Exception], argv: tuple[str, ...]) -> None:
        self.reported.append(" ".join(argv))
        if self.refused & set(argv):
            raise error(f"{argv[-1]} is in use")


OLD, NEW = "docker.io/pagemill/engine:old", "docker.io/pagemill/engine:new"


@pytest.fixture
def programs(module: Module, monkeypatch: pytest.MonkeyPatch) -> Programs:
    images, containers, loading = module("images"), module("containers"), module("loading")
    recorded = Programs(
        (images.ImageError, containers.ContainerError), [OLD, NEW, "docker.io/library/debian:trixie-slim"]
    )
    monkeypatch.setattr(images, "_run", recorded.buildah)
    monkeypatch.setattr(containers, "ctr", recorded.ctr)
    monkeypatch.setattr(loading, "load", lambda image: recorded.reported.append(f"load {image}"))
    return recorded


def test_only_the_projects_images_of_other_sources_are_removed(module: Module, programs: Programs) -> None:
    assert module("images").forget_others("new") == []
    assert [each for each in programs.reported if " rm" in each] == [f"ctr images rm {OLD}", f"buildah rmi {OLD}"]


def test_an_image_in_use_is_reported_and_stops_nothing(module: Module, programs: Programs) -> None:
    programs.refused = {OLD}
    assert module("images").forget_others("new") == [f"{OLD} is in use"] * 2


def test_a_derived_image_leaves_no_working_container(module: Module, programs: Programs) -> None:
    module("images").derive(NEW, "docker.io/pagemill/engine:derived")
    assert programs.reported[-2:] == ["buildah rm working-1", "load docker.io/pagemill/engine:derived"]


def test_a_failed_derivation_leaves_no_working_container(module: Module, programs: Programs) -> None:
    programs.refused = {"commit"}
    with pytest.raises(module("images").ImageError, match="in use"):
        module("images").derive(NEW, "docker.io/pagemill/engine:derived")
    assert programs.reported[-1] == "buildah rm working-1"


LAYERS = (b"torch" * (1 << 19), b"code")
BIG, SMALL = (hashlib.sha256(layer).hexdigest() for layer in LAYERS)


def _write_layout(folder: Path) -> None:
    """Write a layout like skopeo, which keeps a blob whose file has the right name."""
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
