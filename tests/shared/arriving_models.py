"""A model of several files behind a slow connection, from a server of each kind of source.

Each context manager sets the variables that the kind needs, and yields the source with the connection to its server.
"""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from light_model import CONFIG, write_light_model
from oci_registry import PASSWORD, USER, TokenRegistry, artifact, push, token_registry
from s3_server import KEY, SECRET, CuttingProxy, running_s3_server
from safetensors.numpy import save_file
from support.hub import Handler, Hub

from pagemill_models.files.safetensors_header import INDEX_FILE
from pagemill_models.spec.decoders import decoder_from_config

LAYERS = 4
SHAPE = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": LAYERS, "tie_word_embeddings": False}
FILES = [f"model-{number:05}-of-{LAYERS + 1:05}.safetensors" for number in range(1, LAYERS + 2)]
SLOW = 50_000
"""Bytes per second of each connection: far fewer than an engine needs to reach the weights."""
REPOSITORY, HUB_TOKEN = "acme/tiny", "sesame"


class Origin(NamedTuple):
    source: str
    proxy: CuttingProxy
    cache: Path
    """The folder of the downloaded models."""
    server: Any


Serve = Callable[[Path, Path, pytest.MonkeyPatch], AbstractContextManager[Origin]]
"""A function of the model's folder and a folder for the server's own files."""


def write_sharded_model(folder: Path) -> None:
    """Write a model with a layer in each file and the head in the last one."""
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


def weight_bytes(folder: Path) -> int:
    return sum((folder / name).stat().st_size for name in FILES)


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


@contextmanager
def _behind_proxy(port: int) -> Iterator[CuttingProxy]:
    with contextlib.closing(CuttingProxy(port, bytes_per_s=SLOW)) as proxy:
        yield proxy


@contextmanager
def from_s3(model: Path, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Origin]:
    patch.setenv("PAGEMILL_MODEL_CACHE", str(folder / "models"))
    patch.setenv("AWS_ACCESS_KEY_ID", KEY)
    patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    with running_s3_server(folder) as server, _behind_proxy(server.port) as proxy:
        server.put("models", {f"tiny/{name}": content for name, content in content_of(model).items()})
        patch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield Origin("s3://models/tiny", proxy, folder / "models", server)


@contextmanager
def from_google(model: Path, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Origin]:
    patch.setenv("PAGEMILL_MODEL_CACHE", str(folder / "models"))
    with running_s3_server(folder) as server, _behind_proxy(server.port) as proxy:
        server.put("public", {f"tiny/{name}": content for name, content in content_of(model).items()})
        key = {"gcs_base_url": proxy.url, "disable_oauth": True, "client_email": "", "private_key": ""}
        patch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(key | {"private_key_id": ""}))
        yield Origin("gs://public/tiny", proxy, folder / "models", server)


@contextmanager
def from_hub(model: Path, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Origin]:
    """Serve the model by its bare name, into the cache that a machine has without settings."""
    patch.delenv("PAGEMILL_MODEL_CACHE", raising=False)
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    patch.setenv("HF_HOME", str(folder / "hub-cache"))
    patch.setenv("HF_TOKEN", HUB_TOKEN)
    hub = Hub(0, REPOSITORY, HUB_TOKEN, [path for path in sorted(model.iterdir()) if path.is_file()])
    hub.RequestHandlerClass = _QuietHandler
    hub.daemon_threads = True
    thread = threading.Thread(target=hub.serve_forever, args=(0.02,))
    thread.start()
    try:
        with _behind_proxy(hub.server_address[1]) as proxy:
            patch.setenv("HF_ENDPOINT", proxy.url)
            yield Origin(REPOSITORY, proxy, folder / "cache" / "pagemill" / "models", hub)
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()


class _QuietHandler(Handler):
    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@contextmanager
def from_registry(model: Path, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Origin]:
    patch.setenv("PAGEMILL_MODEL_CACHE", str(folder / "models"))
    with token_registry() as registry, _behind_proxy(int(registry.host.rpartition(":")[2])) as proxy:
        push(registry.url, "team/m", "v1", artifact(content_of(model)))
        host = proxy.url.removeprefix("http://")
        auth = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        patch.setenv("DOCKER_AUTH_CONFIG", json.dumps({"auths": {host: {"auth": auth}}}))
        yield Origin(f"oci://{host}/team/m:v1", proxy, folder / "models", registry)


def damage(registry: TokenRegistry, model: Path, name: str) -> Callable[[], None]:
    """Make the registry send other content with the same size and header; return a function that restores it."""
    content = (model / name).read_bytes()
    (digest,) = [digest for digest, each in registry.blobs.items() if each == content]
    registry.blobs[digest] = content[:-8] + bytes(8)
    return lambda: registry.blobs.update({digest: content})


ORIGINS: dict[str, Serve] = {"s3": from_s3, "gs": from_google, "hub": from_hub, "oci": from_registry}
