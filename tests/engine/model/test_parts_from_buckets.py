"""Ranks of several nodes read their parts of a model from a bucket, and no more."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cut_weights import Uncut, same, stored_form
from family_gguf import write_family_gguf
from gguf_model import write_gguf
from s3_server import KEY, SECRET, CuttingProxy, S3Server, running_s3_server

from pagemill_engine.config import EngineConfig
from pagemill_execution.sizing.rank_parts import part_of
from pagemill_execution.sizing.sizing import weights_of
from pagemill_execution.weights.early_digest import EarlyDigest
from pagemill_execution.weights.errors import LoadError
from pagemill_execution.weights.opening import open_weights
from pagemill_models.sources import Opened, open_by_parts
from pagemill_models.sources.by_parts import has_parts
from pagemill_models.spec.model_files import load_model_spec

pytestmark = pytest.mark.slow

SAFETENSORS, GGUF, NAMED = "s3://models/m", "s3://models/g", "s3://models/several/below/large.gguf"
SPLIT = "s3://models/split"
WEIGHTS = (".safetensors", ".gguf")
LEAST_BYTES = 1000
KINDS = {"ffn_down": "Q6_K", "ffn_up": "Q4_K", "ffn_gate": "Q8_0", "attn_output": "Q5_K", "token_embd": "Q4_1"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return models by their sources: one in two files, whose heads do not divide evenly, and one in a GGUF file, whose
    ranks have a part of a quantized block."""
    torch.manual_seed(1)
    sizes: dict[str, Any] = {
        "hidden_size": 192,
        "intermediate_size": 424,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
    }
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=3, head_dim=32, vocab_size=301)
    folder, other = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("gguf")
    model: Any = transformers.LlamaForCausalLM(config).to(torch.bfloat16)  # type: ignore[arg-type]
    model.save_pretrained(folder, max_shard_size="2MB")
    assert len([*folder.glob("*.safetensors")]) == 2
    sizes |= {"hidden_size": 768, "intermediate_size": 512}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=3, vocab_size=301)
    write_gguf(other / "large.gguf", transformers.LlamaForCausalLM(config), KINDS, has_divisors=True)
    split, whole = tmp_path_factory.mktemp("split") / "model.gguf", tmp_path_factory.mktemp("whole")
    model.save_pretrained(whole)
    write_family_gguf(split, whole, "llama", parts=2)
    (first, *_) = sorted(split.parent.iterdir())
    return {SAFETENSORS: folder, GGUF: other / "large.gguf", NAMED: other / "large.gguf", SPLIT: first}


@pytest.fixture(scope="module")
def server(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    data = models[GGUF].read_bytes()
    with running_s3_server(tmp_path_factory.mktemp("s3")) as running:
        running.put("models", {f"m/{path.name}": path.read_bytes() for path in models[SAFETENSORS].iterdir()})
        running.put("models", {f"split/{each.name}": each.read_bytes() for each in models[SPLIT].parent.iterdir()})
        running.put("models", {"g/large.gguf": data, "several/below/large.gguf": data, "several/other.gguf": data[:64]})
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


def opened(least_bytes: int = LEAST_BYTES, source: str = SAFETENSORS) -> Opened:
    return open_by_parts(source, "model", least_bytes)


def files_of(path: Path) -> list[Path]:
    return (
        [*path.parent.glob("*.gguf")] if path.is_file() else [each for each in path.iterdir() if each.suffix in WEIGHTS]
    )


def weights(source: str, path: Path) -> Any:
    return weights_of(EngineConfig(model=source), path, load_model_spec(path), True)


@pytest.mark.parametrize(
    ("source", "tensor", "stages", "most"),
    [
        (SAFETENSORS, 2, 1, 0.75),
        (SAFETENSORS, 1, 2, 0.60),
        (GGUF, 2, 1, 0.75),
        (GGUF, 1, 2, 0.60),
        (SPLIT, 2, 1, 0.75),
        pytest.param(NAMED, 2, 1, 0.75, marks=pytest.mark.full),
    ],
)
def test_each_rank_reads_its_parts_and_they_are_those_of_the_files(
    source: str, tensor: int, stages: int, most: float, models: dict[str, Path], proxy: CuttingProxy
) -> None:
    """`most`: the share of all bytes that the server sends for one rank. Columns are cut out of whole rows."""
    here = models[source]
    spec, whole_bytes = load_model_spec(here), sum(each.stat().st_size for each in files_of(here))
    local: Any = weights(str(here), here)
    layers = [(0, 4)] if stages == 1 else [(0, 2), (2, 4)]
    found = opened(source=source)
    assert found.is_by_parts
    assert found.folder is not None
    assert load_model_spec(found.path) == spec
    for rank in range(2):
        remote = weights(source, found.path)
        part, before = part_of(spec, rank, 2, layers), proxy.sent_bytes
        own, expected = part.weights(remote, spec.decoder), part.weights(Uncut(local), spec.decoder)
        for name in part.spec.decoder.shapes():
            assert same(stored_form(own, name), stored_form(expected, name)), name
        assert 0.3 * whole_bytes < proxy.sent_bytes - before < most * whole_bytes + 200_000
    assert remote.digest() == local.digest()
    used = sum(each.stat().st_blocks * 512 for each in files_of(found.path))
    assert used < whole_bytes / 2, "weights were stored"


def test_the_early_digest_is_left_to_the_loader_where_weights_come_from_a_network(
    models: dict[str, Path], proxy: CuttingProxy
) -> None:
    found = opened(source=GGUF)
    early = EarlyDigest(lambda: found.path)
    assert early.of(found.path) is None
    assert open_weights(found.path, early).digest() == weights(GGUF, models[GGUF]).digest()


def test_small_models_and_models_in_the_cache_are_read_from_this_machine(proxy: CuttingProxy) -> None:
    whole = opened(10**9)
    assert not whole.is_by_parts
    assert not has_parts(whole.whole())
    asked = len(proxy.requests)
    again = opened()
    assert not again.is_by_parts
    assert not has_parts(again.whole())
    assert all(b"range" not in each.lower() for each in proxy.requests[asked:]), os.fsdecode(proxy.requests[-1])


@pytest.mark.parametrize(
    ("source", "key"), [(SAFETENSORS, "m/model-00001-of-00002.safetensors"), (GGUF, "g/large.gguf")]
)
def test_files_that_are_replaced_meanwhile_are_never_mixed(
    source: str, key: str, models: dict[str, Path], server: S3Server, proxy: CuttingProxy
) -> None:
    found = opened(source=source)
    remote = weights(source, found.path)
    here = models[source] if models[source].is_file() else models[source] / key.removeprefix("m/")
    server.put("models", {key: here.read_bytes()[:-1] + b"\x01"})
    try:
        with pytest.raises(LoadError) as error:
            remote.digest()
        assert error.value.reason == "SourceChanged"
    finally:
        server.put("models", {key: here.read_bytes()})
