"""Ranks of several nodes read their parts of a model from a bucket, and no more."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from cut_weights import Uncut, same, stored_form
from s3_server import KEY, SECRET, CuttingProxy, S3Server, running_s3_server

from pagemill_engine.config import EngineConfig
from pagemill_engine.sizing.rank_parts import part_of
from pagemill_engine.sizing.sizing import weights_of
from pagemill_engine.weights.errors import LoadError
from pagemill_models.sources import Opened, open_by_parts
from pagemill_models.sources.by_parts import has_parts
from pagemill_models.spec.model_files import load_model_spec

SOURCE = "s3://models/m"
LEAST_BYTES = 1000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model in two files, whose heads do not divide evenly."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 192, "intermediate_size": 424, "num_hidden_layers": 4, "num_attention_heads": 6}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=3, head_dim=32, vocab_size=301)
    path = tmp_path_factory.mktemp("model")
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path, max_shard_size="2MB")
    assert len([*path.glob("*.safetensors")]) == 2
    return path


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with running_s3_server(tmp_path_factory.mktemp("s3")) as running:
        running.put("models", {f"m/{path.name}": path.read_bytes() for path in folder.iterdir()})
        yield running


@pytest.fixture
def proxy(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CuttingProxy]:
    proxy = CuttingProxy(server.port)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name, value in {
        "AWS_ENDPOINT_URL": proxy.url, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET,
        "PAGEMILL_MODEL_CACHE": str(tmp_path / "cache"),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    yield proxy
    proxy.close()


def opened(least_bytes: int = LEAST_BYTES) -> Opened:
    return open_by_parts(SOURCE, "model", least_bytes)


@pytest.mark.parametrize(("tensor", "stages", "most"), [(2, 1, 0.75), (1, 2, 0.60)])
def test_each_rank_reads_its_parts_and_they_are_those_of_the_files(
    tensor: int, stages: int, most: float, folder: Path, proxy: CuttingProxy
) -> None:
    """`most`: the share of all bytes that the server sends for one rank. Columns are cut out of whole rows."""
    spec, whole_bytes = load_model_spec(folder), sum(each.stat().st_size for each in folder.glob("*.safetensors"))
    local = weights_of(EngineConfig(model=str(folder)), folder, spec, True)
    layers = [(0, 4)] if stages == 1 else [(0, 2), (2, 4)]
    found = opened()
    assert found.is_by_parts
    assert found.folder is not None
    assert load_model_spec(found.path) == spec
    for rank in range(2):
        remote = weights_of(EngineConfig(model=SOURCE), found.path, spec, True)
        part, before = part_of(spec, rank, 2, layers), proxy.sent_bytes
        own, expected = part.weights(remote, spec.decoder), part.weights(Uncut(local), spec.decoder)  # type: ignore[arg-type]
        for name in part.spec.decoder.shapes():
            assert same(stored_form(own, name), stored_form(expected, name)), name
        assert 0.3 * whole_bytes < proxy.sent_bytes - before < most * whole_bytes + 200_000
    assert remote.digest() == local.digest()
    used = sum(each.stat().st_blocks * 512 for each in found.path.glob("*.safetensors"))
    assert used < whole_bytes / 2, "weights were stored"


def test_small_models_and_models_in_the_cache_are_read_from_this_machine(proxy: CuttingProxy) -> None:
    whole = opened(10**9)
    assert not whole.is_by_parts
    assert not has_parts(whole.whole())
    asked = len(proxy.requests)
    again = opened()
    assert not again.is_by_parts
    assert not has_parts(again.whole())
    assert all(b"range" not in each.lower() for each in proxy.requests[asked:]), os.fsdecode(proxy.requests[-1])


def test_files_that_are_replaced_meanwhile_are_never_mixed(folder: Path, server: S3Server, proxy: CuttingProxy) -> None:
    found, spec = opened(), load_model_spec(folder)
    weights = weights_of(EngineConfig(model=SOURCE), found.path, spec, True)
    name = "model-00001-of-00002.safetensors"
    server.put("models", {f"m/{name}": (folder / name).read_bytes()[:-1] + b"\x01"})
    try:
        with pytest.raises(LoadError) as error:
            weights.digest()
        assert error.value.reason == "SourceChanged"
    finally:
        server.put("models", {f"m/{name}": (folder / name).read_bytes()})
