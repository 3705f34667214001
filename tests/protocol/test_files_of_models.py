"""Every file of a model is a regular file inside its folder or its store, and is read with a limit."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from light_model import write_light_model
from waiting import SOON_S

from pagemill_execution.weights.errors import LoadError
from pagemill_execution.weights.files import WeightFiles
from pagemill_models.files import json_file
from pagemill_models.files.json_file import read_text
from pagemill_models.files.safetensors_header import SINGLE_FILE
from pagemill_models.sources import resolve_source
from pagemill_models.spec.model_files import load_model_spec
from pagemill_models.tokenizer_files.load_bundle import load_bundle
from pagemill_protocol.source_errors import SourceError, UnreadableModelError

SECRET = "the words of another file " * 20
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", SINGLE_FILE)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    write_light_model(model)
    (model / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "secret").write_text(SECRET)
    return model


def load(folder: Path) -> None:
    load_bundle(resolve_source(str(folder)))
    load_model_spec(resolve_source(str(folder)))


def replaced(path: Path, target: Path | str) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target)


@pytest.mark.parametrize("name", FILES)
def test_a_link_out_of_the_folder_is_refused_and_its_text_is_not_shown(name: str, folder: Path) -> None:
    replaced(folder / name, folder.parent / "secret")
    with pytest.raises(SourceError, match="a link to a file outside of the model's folder") as refused:
        load(folder)
    assert name in refused.value.message
    assert SECRET[:20] not in refused.value.message


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("target", ["/dev/zero", "pipe"])
def test_a_device_or_a_pipe_is_refused_at_once(target: str, name: str, folder: Path) -> None:
    if target == "pipe":
        (folder / name).unlink()
        os.mkfifo(folder / name)
    else:
        replaced(folder / name, target)
    began_s = time.monotonic()
    with pytest.raises(SourceError):
        load(folder)
    assert time.monotonic() - began_s < SOON_S


@pytest.mark.parametrize("name", FILES)
def test_a_link_to_itself_or_to_nothing_is_refused(name: str, folder: Path) -> None:
    for target in (name, "nothing"):
        replaced(folder / name, target)
        with pytest.raises(SourceError):
            load(folder)


def test_links_inside_the_folder_and_into_the_store_of_the_hubs_cache_are_followed(folder: Path) -> None:
    cache = folder.parent / "models--org--name"
    (cache / "blobs").mkdir(parents=True)
    snapshot = cache / "snapshots" / "revision"
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(cache / "blobs" / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    load(snapshot)
    (snapshot / "additional_chat_templates").mkdir()
    (snapshot / "additional_chat_templates" / "tool_use.jinja").symlink_to("../../../blobs/0")
    load(snapshot)
    replaced(snapshot / "chat_template.jinja", folder.parent / "secret")
    with pytest.raises(SourceError, match="outside of the model's folder"):
        load(snapshot)


@pytest.mark.parametrize("pooling", ["/etc", "../other", "1_Pooling/../../other"])
def test_a_module_outside_of_the_folder_is_refused(pooling: str, folder: Path) -> None:
    modules = [{"type": "x.Transformer", "path": ""}, {"type": "x.Pooling", "path": pooling}]
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(SourceError, match="outside of the model's folder"):
        load_model_spec(folder)


def test_a_file_is_read_up_to_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_file, "MAX_JSON_BYTES", 100)
    path = tmp_path / "config.json"
    path.write_text("x" * 100)
    assert len(read_text(path)) == 100
    path.write_text("x" * 101)
    with pytest.raises(UnreadableModelError, match="is larger than 100 bytes"):
        read_text(path)


def test_weights_are_read_from_regular_files_only(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / SINGLE_FILE)
    with pytest.raises(LoadError, match="is not a regular file"):
        WeightFiles([tmp_path / SINGLE_FILE])


@pytest.mark.parametrize("content", [b"[]", b"{", b'{"model.safetensors": "1"}'])
def test_a_list_of_arriving_files_that_a_publisher_wrote_is_refused(content: bytes, folder: Path) -> None:
    (folder / ".partial.json").write_bytes(content)
    with pytest.raises(SourceError, match="is not a list of sizes"):
        load_model_spec(folder)


def test_an_error_quotes_at_most_200_characters_of_a_file(folder: Path) -> None:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "x" * 70_000}))
    with pytest.raises(SourceError) as refused:
        load_model_spec(folder)
    assert "x" * 201 not in refused.value.message
    assert "x" * 100 in refused.value.message
