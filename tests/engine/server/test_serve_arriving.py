"""A server whose model comes from a bucket in several files: it loads what is there while the rest is fetched, answers
as it would from a folder, and ends with the fetch's own error where the rest does not come."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from light_model import CONFIG, write_light_model
from s3_server import KEY, SECRET, CuttingProxy, S3Server, running_s3_server
from safetensors.numpy import save_file
from waiting import wait_until

from pagemill_protocol.models.decoders import decoder_from_config
from pagemill_protocol.safetensors_header import INDEX_FILE

LAYERS = 4
SHAPE = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": LAYERS, "tie_word_embeddings": False}
SLOW = 50_000
"""Bytes a second of each connection: far fewer than an engine needs to reach the weights."""
FILES = [f"model-{number:05}-of-{LAYERS + 1:05}.safetensors" for number in range(1, LAYERS + 2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layer in each file, and the head in the last one."""
    folder = tmp_path_factory.mktemp("model")
    write_light_model(folder)
    (folder / "model.safetensors").unlink()
    config = CONFIG | SHAPE
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(0)
    shards: list[dict[str, Any]] = [{} for _ in FILES]
    for name, shape in decoder_from_config(config, folder / "config.json").shapes().items():
        layer = int(name.split(".")[2]) if ".layers." in name else (LAYERS if "head" in name else 0)
        shards[layer][name] = random.standard_normal(shape, np.float32) * 0.2
    for file, tensors in zip(FILES, shards, strict=True):
        save_file(tensors, folder / file)
    held = {name: file for file, tensors in zip(FILES, shards, strict=True) for name in tensors}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": held}))
    return folder


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[S3Server]:
    with running_s3_server(tmp_path_factory.mktemp("s3")) as server:
        for prefix in ("whole", "cut"):
            server.put("models", {f"{prefix}/{path.name}": path.read_bytes() for path in folder.iterdir()})
        yield server


@pytest.fixture
def proxy(bucket: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[CuttingProxy]:
    proxy = CuttingProxy(bucket.port, bytes_per_s=SLOW)
    monkeypatch.setenv("PAGEMILL_MODEL_CACHE", str(tmp_path / "models"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    yield proxy
    proxy.close()


def engine(model: str) -> dict[str, Any]:
    return {"model": model, "null_runner": False, "max_model_len": 64, "num_kv_blocks": 16, "dtype": "float32"}


def answer(server: Any) -> Any:
    server.wait_for("ready")
    body = {"model": "SmolLM2-135M-Instruct", "prompt": "hello there", "max_tokens": 12, "temperature": 0}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["choices"][0]


def weights_are_planned(server: Any) -> None:
    """The engine process has read all headers, and begins with the weights."""
    server.wait_until(lambda said: "parameters" in str(said.get("detail")), "its weights")


def test_an_engine_loads_while_its_model_is_fetched(
    start_server: Callable[..., Any], proxy: CuttingProxy, folder: Path, tmp_path: Path
) -> None:
    server = start_server(engine=engine("s3://models/whole"))
    weights_are_planned(server)
    assert proxy.sent_bytes < sum((folder / name).stat().st_size for name in FILES)
    proxy.bytes_per_s = float("inf")
    served = answer(server)
    assert not list((tmp_path / "models" / ".arriving").iterdir())
    wait_until(
        lambda: bool(list((tmp_path / "models").glob("[!.]*/config.json")))
    )  # it is published, to be found again
    server.stop()
    assert served == answer(start_server(engine=engine(str(folder))))
    proxy.close()
    assert served == answer(start_server(engine=engine("s3://models/whole"))), "it is there now"


def test_a_fetch_that_fails_ends_the_server_with_its_own_error(
    start_server: Callable[..., Any], proxy: CuttingProxy, bucket: S3Server
) -> None:
    server = start_server(engine=engine("s3://models/cut"))
    weights_are_planned(server)
    bucket.delete("models", f"cut/{FILES[-1]}")
    proxy.bytes_per_s = float("inf")
    assert server.wait_exit() == 1
    lines = server.stderr().strip().splitlines()
    message = json.loads(lines[-1])
    assert message["reason"] == "ModelNotFound", message
    assert f"`{FILES[-1]}`" in message["message"]
    assert not any("Traceback" in line for line in lines)
