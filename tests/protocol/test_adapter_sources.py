"""Adapters come from every source that models come from, and only their own files are fetched."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from arriving_models import from_hub
from huggingface_hub import constants
from oci_registry import PASSWORD, USER, artifact, image, push, token_registry
from s3_server import KEY, SECRET, S3Server, running_s3_server
from tiny_files import gguf_file, model_files, safetensors

from pagemill_models.sources import FetchError, SourceError, resolve_adapter, resolve_source
from pagemill_models.sources.base import RemoteFile
from pagemill_models.sources.selection import select_adapter_files

FILES = {
    "adapter_config.json": json.dumps({"peft_type": "LORA", "r": 8}).encode(),
    "adapter_model.safetensors": safetensors(4000),
}
GGUF = gguf_file(400)
OTHERS = {"README.md": b"# an adapter", "optimizer.pt": b"pickled", "checkpoint-1/adapter_config.json": b"{}"}


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PAGEMILL_MODEL_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with running_s3_server(tmp_path_factory.mktemp("s3")) as server:
        server.put("adapters", {f"one/{name}": content for name, content in {**FILES, **OTHERS}.items()})
        server.put("adapters", {f"both/{name}": content for name, content in {**FILES, **model_files()}.items()})
        server.put("adapters", {"converted/adapter.gguf": GGUF, "converted/README.md": b"# an adapter"})
        server.put("adapters", {"pickle/adapter_config.json": b"{}", "pickle/adapter_model.bin": b"pickled"})
        yield server


@pytest.fixture
def signed(monkeypatch: pytest.MonkeyPatch, bucket: S3Server) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL", bucket.url)


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


@pytest.mark.slow
def test_a_bucket_gives_an_adapters_files_only(signed: None) -> None:
    folder = resolve_adapter("s3://adapters/one", "source")
    assert content_of(folder) == FILES
    assert resolve_adapter("s3://adapters/one", "source") == folder


def test_one_place_may_hold_a_model_and_an_adapter(signed: None) -> None:
    adapter, model = resolve_adapter("s3://adapters/both", "source"), resolve_source("s3://adapters/both")
    assert content_of(adapter) == FILES
    assert content_of(model).keys() >= model_files().keys()


def test_a_bucket_gives_an_adapter_in_a_gguf_file(signed: None) -> None:
    folder = resolve_adapter("s3://adapters/converted", "source")
    assert content_of(folder).keys() == {"adapter.gguf"}
    assert resolve_adapter("s3://adapters/converted/adapter.gguf", "source").read_bytes() == GGUF


def test_a_pickle_is_refused_before_it_is_fetched(signed: None) -> None:
    with pytest.raises(FetchError, match="safe_serialization=True") as caught:
        resolve_adapter("s3://adapters/pickle", "source")
    assert (caught.value.reason, caught.value.field) == ("AdapterUnsupported", "source")


def test_a_registry_gives_artifacts_and_images(monkeypatch: pytest.MonkeyPatch) -> None:
    with token_registry() as registry:
        auth = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        monkeypatch.setenv("DOCKER_AUTH_CONFIG", json.dumps({"auths": {registry.host: {"auth": auth}}}))
        host, url = registry.host, registry.url
        push(url, "team/adapter", "v1", artifact({f"nested/{name}": content for name, content in FILES.items()}))
        push(url, "team/adapter", "image", image({f"models/it/{name}": content for name, content in FILES.items()}))
        assert content_of(resolve_adapter(f"oci://{host}/team/adapter:v1", "source")) == FILES
        assert content_of(resolve_adapter(f"oci://{host}/team/adapter:image", "source")) == FILES


def test_a_hub_gives_an_adapters_files_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    for name, content in {**FILES, "README.md": b"# an adapter", "optimizer.pt": b"pickled"}.items():
        (repository / name).write_bytes(content)
    with from_hub(repository, tmp_path, monkeypatch) as origin:
        origin.proxy.bytes_per_s = float("inf")
        monkeypatch.setattr(constants, "ENDPOINT", origin.proxy.url)
        template = origin.proxy.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        assert content_of(resolve_adapter(f"hf://{origin.source}", "source")) == FILES
        assert content_of(resolve_adapter(origin.source, "source")) == FILES


def test_what_is_no_adapter_is_named() -> None:
    with pytest.raises(FetchError, match=r"has no `adapter_config\.json`") as caught:
        select_adapter_files("`org/m`", None, [RemoteFile(name, 3) for name in model_files()])
    assert caught.value.reason == "AdapterNotFound"
    with pytest.raises(FetchError, match=r"Name one of its GGUF files after a slash: a\.gguf, b\.gguf"):
        select_adapter_files("`org/m`", None, [RemoteFile("a.gguf", 3), RemoteFile("b.gguf", 3)])
    with pytest.raises(FetchError, match=r"`adapter_model\.safetensors` is missing"):
        select_adapter_files("`org/m`", None, [RemoteFile("adapter_config.json", 3)])


def test_a_path_and_a_file_uri_name_the_folder_itself(tmp_path: Path) -> None:
    assert resolve_adapter(str(tmp_path), "source") == tmp_path
    assert resolve_adapter(f"file://{tmp_path}", "source") == tmp_path
    with pytest.raises(SourceError, match="volume of a cluster") as caught:
        resolve_adapter("pvc://claim/adapter", "lora_path")
    assert caught.value.field == "lora_path"
