"""Shutdown: unready at once, serving until the gateways know, and the program that a pod's preStop hook runs."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from waiting import WAIT_LIMIT_S, wait_until

from pagemill_engine import drain as drain_program
from pagemill_engine.server.phases.draining import Draining
from pagemill_engine.server.phases.lifecycle import Lifecycle
from pagemill_engine.server.phases.state_stream import StatePublisher
from pagemill_protocol.frames import StateDecoder

BODY = {"model": "SmolLM2-135M-Instruct", "prompt": "hi", "max_tokens": 2}


class Reader:
    """A gateway that follows the state stream in the background and acknowledges on demand."""

    def __init__(self, server: Any, name: str) -> None:
        self.draining = threading.Event()
        self._connected = threading.Event()
        self._closed = threading.Event()
        self._headers = {**server.auth, "x-pagemill-gateway": name}
        self._url = server.control_url
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._connected.wait(WAIT_LIMIT_S)

    def acknowledge(self) -> None:
        assert (
            httpx.post(f"{self._url}/internal/drained", headers=self._headers, timeout=WAIT_LIMIT_S).status_code == 204
        )

    def close(self) -> None:
        self._closed.set()
        self._thread.join(WAIT_LIMIT_S)

    def _run(self) -> None:
        decoder = StateDecoder()
        with httpx.stream(
            "GET", f"{self._url}/internal/state", headers=self._headers, timeout=WAIT_LIMIT_S
        ) as response:
            for data in response.iter_bytes():
                for frame in decoder.feed(data):
                    self._connected.set()
                    if frame.draining:
                        self.draining.set()
                if self._closed.is_set():  # the stream sends a frame every second
                    return


def test_requests_are_served_until_every_gateway_has_acknowledged(start_server: Callable[..., Any]) -> None:
    server = start_server()
    server.wait_for("ready")
    readers = [Reader(server, "one"), Reader(server, "two")]
    answers: list[Any] = []

    def drain() -> None:
        answers.append(
            httpx.post(f"{server.control_url}/internal/drain?wait_s=60", headers=server.auth, timeout=2 * WAIT_LIMIT_S)
        )

    draining = threading.Thread(target=drain)
    draining.start()
    assert all(reader.draining.wait(WAIT_LIMIT_S) for reader in readers)
    assert httpx.get(f"{server.control_url}/readyz", timeout=WAIT_LIMIT_S).status_code == 503
    readers[0].acknowledge()
    assert httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=WAIT_LIMIT_S).status_code == 200
    readers[1].acknowledge()
    draining.join(30)  # half of the timeout without an acknowledgement
    assert not draining.is_alive()
    assert answers[0].json() == {"draining": True, "num_requests": 0, "connected": 2, "acknowledged": 2}
    refused = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=WAIT_LIMIT_S)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    for reader in readers:
        reader.close()


class Scene:
    def __init__(self) -> None:
        self.lifecycle = Lifecycle()
        self.lifecycle.enter("ready")
        self.draining = Draining(self.lifecycle, StatePublisher(["m"]))


async def test_the_server_is_unready_at_once_and_refuses_only_after_the_last_acknowledgement() -> None:
    scene = Scene()
    scene.draining.reader_connected("a")
    scene.draining.reader_connected("b")
    scene.draining.announce(0)
    assert not scene.lifecycle.ready
    settled = asyncio.create_task(scene.draining.settle(300))
    scene.draining.acknowledge("a")
    await asyncio.sleep(0)
    assert scene.lifecycle.accepts_requests
    assert scene.draining.gateways == (2, 1)
    scene.draining.acknowledge("b")
    await asyncio.wait_for(settled, WAIT_LIMIT_S)
    assert not scene.lifecycle.accepts_requests


async def test_a_reader_that_disconnects_is_not_waited_for() -> None:
    scene = Scene()
    scene.draining.reader_connected("a")
    scene.draining.reader_connected("a")  # reconnected before the old stream was found to be closed
    scene.draining.announce(0)
    settled = asyncio.create_task(scene.draining.settle(300))
    scene.draining.reader_disconnected("a")
    await asyncio.sleep(0)
    assert not settled.done()
    scene.draining.reader_disconnected("a")
    await asyncio.wait_for(settled, WAIT_LIMIT_S)


async def test_a_gateway_that_never_acknowledges_costs_no_more_than_the_timeout() -> None:
    scene = Scene()
    scene.draining.reader_connected("old version")
    scene.draining.announce(0)
    await asyncio.wait_for(scene.draining.settle(0.05), WAIT_LIMIT_S)
    assert not scene.lifecycle.accepts_requests


async def test_an_acknowledgement_before_the_drain_has_no_effect() -> None:
    scene = Scene()
    scene.draining.reader_connected("a")
    scene.draining.acknowledge("a")
    scene.draining.announce(0)
    assert scene.draining.gateways == (1, 0)


async def test_a_server_that_was_never_ready_refuses_requests_while_it_drains() -> None:
    lifecycle = Lifecycle()
    Draining(lifecycle, StatePublisher(["m"])).announce(0)
    assert not lifecycle.accepts_requests
    lifecycle.enter("ready")
    assert not lifecycle.accepts_requests


# -- the preStop program -----------------------------------------------------------------------------------------------


@contextmanager
def settings_file(folder: Path, server: dict[str, Any]) -> Iterator[Path]:
    path = folder / "drain-settings.json"
    path.write_text(json.dumps({"engine": {"model": "m"}, "server": server}))
    yield path


def test_the_program_drains_with_the_newest_token_of_the_file(
    start_server: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("newest\nolder\n")
    server = start_server(
        server={"internal_token": "", "internal_tokens_file": str(tokens), "host": "::", "control_host": "::"}
    )
    server.wait_for("ready")
    control_port = int(server.control_url.rsplit(":", 1)[1])
    unguarded = httpx.post(f"{server.control_url}/internal/drain", timeout=WAIT_LIMIT_S)
    assert unguarded.status_code == 401
    older = httpx.get(
        f"{server.control_url}/internal/bundle", headers={"Authorization": "Bearer older"}, timeout=WAIT_LIMIT_S
    )
    assert older.status_code == 200
    guard = {"control_host": "::", "control_port": control_port, "internal_tokens_file": str(tokens)}
    with settings_file(tmp_path, guard) as path:
        assert drain_program.main(["--settings", str(path), "--wait-s", "1"]) == 0
    assert '"draining":true' in capsys.readouterr().err
    assert httpx.get(f"{server.control_url}/readyz", timeout=WAIT_LIMIT_S).json()["phase"] == "draining"


def test_rotated_tokens_are_accepted_without_a_restart(start_server: Callable[..., Any], tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("one\n")
    server = start_server(server={"internal_token": "", "internal_tokens_file": str(tokens)})
    url = f"{server.control_url}/internal/drained"

    def status() -> int:
        return httpx.post(url, headers={"Authorization": "Bearer two"}, timeout=WAIT_LIMIT_S).status_code

    assert status() == 401
    tokens.write_text("two\none\n")
    wait_until(lambda: status() != 401)
    tokens.write_text("")
    wait_until(lambda: status() == 401)  # with an empty file, no client may be accepted, not even on this machine


def test_the_program_finds_the_token_that_the_server_created(
    start_server: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    server = start_server(server={"internal_token": "", "control_host": "::"})
    server.wait_for("ready")
    guard = {"control_host": "::", "control_port": int(server.control_url.rsplit(":", 1)[1])}
    assert httpx.post(f"{server.control_url}/internal/drain").status_code == 401
    with settings_file(tmp_path, guard) as path:
        assert drain_program.main(["--settings", str(path), "--wait-s", "1"]) == 0
    assert httpx.get(f"{server.control_url}/readyz").json()["phase"] == "draining"


def test_without_a_listening_server_there_is_nothing_to_drain(tmp_path: Path) -> None:
    with settings_file(tmp_path, {"control_port": 9}) as path:
        assert drain_program.main(["--settings", str(path)]) == 0


def test_unreadable_settings_are_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert drain_program.main(["--settings", str(tmp_path / "none.json")]) == 1
    assert "none.json" in capsys.readouterr().err


def test_the_program_imports_few_modules() -> None:
    """The program runs while the pod's processors are busy with requests."""
    code = (
        "import sys; before = set(sys.modules); import pagemill_engine.drain\n"
        "heavy = {'asyncio', 'msgspec', 'http', 'email', 'ssl', 'uvicorn', 'numpy', 'torch', 'pagemill_protocol'}\n"
        "print(sorted(heavy & (set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
