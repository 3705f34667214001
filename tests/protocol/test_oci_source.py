"""`oci://`: artifacts and images of a registry that requires tokens, by tag and digest, and refusals."""

from __future__ import annotations

import base64
import gzip
import json
import tarfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from oci_registry import (
    IMAGE_LAYER,
    PASSWORD,
    USER,
    Layer,
    TokenRegistry,
    artifact,
    crane_registry,
    digest_of,
    image,
    push,
    token_registry,
)
from tiny_files import model_files, safetensors

from pagemill_models.files.safetensors_header import read_index
from pagemill_models.sources import FetchError, find_kind, resolve_source
from pagemill_models.sources.base import ReadsRanges
from pagemill_models.sources.headers import FIRST_BYTES, can_read_header, fetch_header
from pagemill_models.sources.store import archive, fetch
from pagemill_models.sources.store.cache import ModelCache

FILES = model_files()
Load = Callable[[str], Path]


def login(registry: TokenRegistry, password: str = PASSWORD) -> str:
    auth = base64.b64encode(f"{USER}:{password}".encode()).decode()
    return json.dumps({"auths": {registry.host: {"auth": auth}}})


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[TokenRegistry]:
    monkeypatch.setenv("HOME", str(tmp_path))
    with token_registry() as registry:
        monkeypatch.setenv("DOCKER_AUTH_CONFIG", login(registry))
        push(registry.url, "team/m", "v1", artifact(FILES))
        yield registry


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def fetch(source: str) -> Path:
        return ModelCache(tmp_path / "models").fetch(find_kind(source), source, lambda **_: None)

    return fetch


def fault(load: Load, source: str) -> FetchError:
    with pytest.raises(FetchError) as caught:
        load(source)
    return caught.value


def assert_is_whole(folder: Path) -> None:
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES


def test_an_artifact_of_files_is_downloaded_by_tag(load: Load, registry: TokenRegistry) -> None:
    assert_is_whole(load(f"oci://{registry.host}/team/m:v1"))


def test_a_digest_always_names_the_same_content(load: Load, registry: TokenRegistry) -> None:
    digest = push(registry.url, "team/m", "v2", artifact(FILES))
    push(registry.url, "team/m", "v2", artifact({"config.json": b"{}"}))
    assert_is_whole(load(f"oci://{registry.host}/team/m:v2@{digest}"))


def test_the_header_of_an_artifact_is_read_without_its_weights(registry: TokenRegistry, tmp_path: Path) -> None:
    content = {"config.json": FILES["config.json"], "model.safetensors": safetensors(900_000)}
    push(registry.url, "team/m", "one", artifact(content))
    source = f"oci://{registry.host}/team/m:one"
    assert can_read_header(source)
    registry.asked.clear()
    folder = tmp_path / "header"
    folder.mkdir()
    fetch_header(source, folder)
    assert read_index(folder).num_bytes == 900_000
    blob = f"/v2/team/m/blobs/{digest_of(content['model.safetensors'])}"
    assert {range_ for path, range_ in registry.asked if path == blob} == {f"bytes=0-{FIRST_BYTES - 1}"}


def test_blobs_of_a_registry_without_ranges_are_read_from_the_beginning(load: Load, registry: TokenRegistry) -> None:
    registry.knows_ranges = False
    source = f"oci://{registry.host}/team/m:v1"
    with closing(find_kind(source).open(source)) as repository:
        assert isinstance(repository, ReadsRanges)
        (file,) = [each for each in repository.list_files().files if each.path == "model-1.safetensors"]
        content = FILES[file.path]
        assert repository.read_range(file, "", 70_000, 100) == content[70_000:70_100]
        assert repository.read_range(file, "", len(content) - 5, 100) == content[-5:]
        assert repository.read_range(file, "", len(content), 100) == b""


def test_the_header_of_a_model_in_an_image_is_not_read(registry: TokenRegistry, tmp_path: Path) -> None:
    push(registry.url, "team/m", "image", image({f"models/{name}": text for name, text in FILES.items()}))
    with pytest.raises(FetchError, match="an image whose layers are archives") as refused:
        fetch_header(f"oci://{registry.host}/team/m:image", tmp_path)
    assert refused.value.reason == "SourceUnsupported"


def test_titles_may_contain_a_folder(load: Load, registry: TokenRegistry) -> None:
    push(registry.url, "team/m", "deep", artifact({f"models/tiny/{name}": text for name, text in FILES.items()}))
    assert_is_whole(load(f"oci://{registry.host}/team/m:deep"))


def test_an_image_with_the_model_in_a_folder_is_unpacked(load: Load, registry: TokenRegistry) -> None:
    system = {"etc/passwd": b"root", "usr/share/x.json": b"{}", "models/config.json": b"stale"}
    layers = image(system, {f"models/{name}": text for name, text in FILES.items()})
    push(registry.url, "team/m", "image", layers)
    folder = load(f"oci://{registry.host}/team/m:image")
    assert_is_whole(folder)
    assert {path.name for path in folder.iterdir() if not path.name.startswith(".")} == set(FILES)


def test_serve_finds_a_model_in_a_subfolder(registry: TokenRegistry) -> None:
    push(registry.url, "team/m", "sub", image({f"models/tiny/{name}": text for name, text in FILES.items()}))
    assert_is_whole(resolve_source(f"oci://{registry.host}/team/m:sub"))


def test_an_image_cannot_write_outside_the_folder(load: Load, registry: TokenRegistry, tmp_path: Path) -> None:
    escaping = {"models/../../../escape.json": b"{}", "/abs.json": b"{}", "models/config.json": FILES["config.json"]}
    push(registry.url, "team/m", "bad", image(escaping))
    load(f"oci://{registry.host}/team/m:bad")
    assert not list(tmp_path.rglob("escape.json"))
    assert not Path("/abs.json").exists()


def test_an_interrupted_download_of_a_blob_is_resumed(load: Load, registry: TokenRegistry) -> None:
    registry.cuts = [100_000] * 3
    assert_is_whole(load(f"oci://{registry.host}/team/m:v1"))
    assert registry.cuts == []
    assert len({range_ for _, range_ in registry.asked if range_}) >= 2


def test_content_with_a_wrong_digest_is_refused(load: Load, registry: TokenRegistry) -> None:
    digest = digest_of(FILES["model-1.safetensors"])
    registry.blobs[digest] = bytes(len(FILES["model-1.safetensors"]))
    error = fault(load, f"oci://{registry.host}/team/m:v1")
    assert error.reason == "ModelCorrupt"
    assert "`model-1.safetensors` arrived damaged" in error.message


def test_a_manifest_with_a_wrong_digest_is_refused(load: Load, registry: TokenRegistry) -> None:
    wanted = "sha256:" + "0" * 64
    registry.manifests[wanted] = b'{"layers": []}'
    error = fault(load, f"oci://{registry.host}/team/m@{wanted}")
    assert error.reason == "ModelCorrupt"
    assert "Do not trust that registry" in error.message


def test_a_blob_shorter_than_its_manifest_declares_is_refused(
    load: Load, registry: TokenRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "FIRST_PAUSE_S", 0.01)
    layers = artifact(FILES)
    layers[0].descriptor["size"] = len(layers[0].content) + 50
    push(registry.url, "team/m", "short", layers)
    error = fault(load, f"oci://{registry.host}/team/m:short")
    assert error.reason == "SourceUnreachable"
    size = len(FILES["config.json"])
    assert f"`config.json` ended after {size} of {size + 50} bytes" in error.message


def test_an_artifact_that_is_no_model_is_refused(load: Load, registry: TokenRegistry) -> None:
    push(registry.url, "team/m", "text", artifact({"README.md": b"hello"}))
    assert fault(load, f"oci://{registry.host}/team/m:text").reason == "ModelUnreadable"
    push(registry.url, "team/m", "os", image({"etc/passwd": b"root"}))
    assert "neither `config.json` nor" in fault(load, f"oci://{registry.host}/team/m:os").message


def test_a_layer_that_is_no_archive_is_refused(load: Load, registry: TokenRegistry) -> None:
    push(registry.url, "team/m", "torn", [Layer(b"no tar at all", IMAGE_LAYER)])
    assert "cannot be unpacked" in fault(load, f"oci://{registry.host}/team/m:torn").message


@pytest.mark.parametrize("member_type", [tarfile.REGTYPE, tarfile.XHDTYPE])
def test_a_layer_that_unpacks_to_more_than_its_limit_is_refused(
    member_type: bytes, load: Load, registry: TokenRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where only a header claims the size, which tarfile would read into memory."""
    monkeypatch.setattr(archive, "MIN_LIMIT_BYTES", 2**20)
    large = tarfile.TarInfo("usr/lib/large")
    large.type, large.size = member_type, 2**32
    packed = gzip.compress(large.tobuf() + bytes(2**24))
    push(registry.url, "team/m", "bomb", [Layer(packed, IMAGE_LAYER)])
    message = fault(load, f"oci://{registry.host}/team/m:bomb").message
    assert "cannot be unpacked" in message
    assert str(2**32) in message


def test_a_layer_of_many_compressed_bytes_is_refused_before_they_are_written(
    load: Load, registry: TokenRegistry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(archive, "MIN_LIMIT_BYTES", 2**20)
    members = {f"models/part-{number}.safetensors": bytes(2**20) for number in range(4)}
    push(registry.url, "team/m", "zeros", image(members))
    assert "it unpacks to more than 1048576 bytes" in fault(load, f"oci://{registry.host}/team/m:zeros").message


@pytest.mark.parametrize("layer", [5, {"size": "5"}, {"size": -1}, {"size": 1, "annotations": [1]}])
def test_a_layer_of_another_form_is_refused(layer: Any, load: Load, registry: TokenRegistry) -> None:
    registry.manifests["odd"] = json.dumps({"layers": [layer]}).encode()
    assert fault(load, f"oci://{registry.host}/team/m:odd").reason == "ModelUnreadable"


def test_an_unknown_tag_is_reported(load: Load, registry: TokenRegistry) -> None:
    error = fault(load, f"oci://{registry.host}/team/m:none")
    assert error.reason == "ModelNotFound"
    assert "Check the name and the tag" in error.message


@pytest.mark.parametrize("case", ["wrong", "absent", "expired"])
def test_wrong_credentials_are_reported(
    load: Load, registry: TokenRegistry, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    if case == "expired":
        registry.token_expires = True
    else:
        monkeypatch.setenv("DOCKER_AUTH_CONFIG", login(registry, "wrong-one") if case == "wrong" else "")
    error = fault(load, f"oci://{registry.host}/team/m:v1")
    assert error.reason == "Unauthorized"
    assert "spec.model.credentialsSecretRef" in error.message
    assert "wrong-one" not in error.message


def test_an_unreachable_registry_is_reported(load: Load, tmp_path: Path) -> None:
    assert fault(load, "oci://127.0.0.1:9/team/m").reason == "SourceUnreachable"


def test_the_default_registry_is_that_of_other_tools(load: Load) -> None:
    with crane_registry() as host:
        push(f"http://{host}", "team/m", "v1", artifact(FILES))
        assert_is_whole(load(f"oci://{host}/team/m:v1"))
        digest = push(f"http://{host}", "team/m", "image", image({f"models/{name}": FILES[name] for name in FILES}))
        assert_is_whole(load(f"oci://{host}/team/m@{digest}"))
