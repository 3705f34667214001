"""A server loads a model of several files during its download, and ends with the error of a failed download.

Its answers equal those of a model in a folder.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from arriving_models import (
    FILES,
    ORIGINS,
    damage,
    from_registry,
    from_s3,
    weight_bytes,
    write_sharded_model,
)
from waiting import wait_until

pytestmark = pytest.mark.slow

NAME = "m"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_sharded_model(folder)
    return folder


def engine(model: str) -> dict[str, Any]:
    settings = {"null_runner": False, "max_model_len": 64, "num_kv_blocks": 16, "dtype": "float32"}
    return {"model": model, "served_names": [NAME], **settings}


def answer(server: Any) -> Any:
    server.wait_for("ready")
    body = {"model": NAME, "prompt": "hello there", "max_tokens": 12, "temperature": 0}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)["choices"][0]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{error.code}: {error.read().decode()}") from None


def weights_are_planned(server: Any) -> None:
    """Wait until the engine process has read all headers and starts to load the weights."""
    server.wait_until(lambda said: "parameters" in str(said.get("detail")), "its weights")


@pytest.mark.sample("hub")
@pytest.mark.parametrize("origin", ORIGINS.values(), ids=ORIGINS.keys())
def test_an_engine_loads_while_its_model_is_downloaded(
    start_server: Callable[..., Any], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: Any
) -> None:
    with origin(folder, tmp_path, monkeypatch) as (source, proxy, cache, _):
        server = start_server(engine=engine(source))
        weights_are_planned(server)
        assert proxy.sent_bytes < weight_bytes(folder)
        proxy.bytes_per_s = float("inf")
        served = answer(server)
        assert not list((cache / ".partial").iterdir())
        # Once the model is published, it can be found again.
        wait_until(lambda: bool(list(cache.glob("[!.]*/config.json"))))
        server.stop()
        proxy.close()
        assert served == answer(start_server(engine=engine(source))), "the model must be published now"
    assert served == answer(start_server(engine=engine(str(folder))))


def fault(server: Any) -> Any:
    assert server.wait_exit() == 1
    lines = server.stderr().strip().splitlines()
    assert not any("Traceback" in line for line in lines)
    return json.loads(lines[-1])


def test_a_failed_download_ends_the_server_with_its_error(
    start_server: Callable[..., Any], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with from_s3(folder, tmp_path, monkeypatch) as (source, proxy, _, bucket):
        server = start_server(engine=engine(source))
        weights_are_planned(server)
        bucket.delete("models", f"tiny/{FILES[-1]}")
        proxy.bytes_per_s = float("inf")
        message = fault(server)
    assert message["reason"] == "ModelNotFound", message
    assert f"`{FILES[-1]}`" in message["message"]


def test_a_wrong_digest_ends_the_server_before_it_is_ready(
    start_server: Callable[..., Any], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with from_registry(folder, tmp_path, monkeypatch) as (source, proxy, _, registry):
        damage(registry, folder, FILES[2])
        server = start_server(engine=engine(source))
        weights_are_planned(server)
        proxy.bytes_per_s = float("inf")
        message = fault(server)
    assert message["reason"] == "ModelCorrupt", message
    assert f"`{FILES[2]}` arrived damaged" in message["message"]
    assert not any(said["event"] == "ready" for said in server.events)
