"""The gateway as a process: settings with which it refuses to start, and its shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, get_args

import aiohttp
import msgspec
import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from waiting import SOON_S, WAIT_LIMIT_S, eventually
from websockets.asyncio.client import connect

from pagemill_gateway import __main__ as gateway_main
from pagemill_gateway.config import GatewayConfig, SettingsError, load_config, open_keys_file
from pagemill_gateway.processes import __main__ as process_main
from pagemill_gateway.processes.child import Role, Setup
from pagemill_gateway.processes.server import _server, serve
from pagemill_servers.auth import is_loopback_address
from pagemill_servers.connection_limits import ConnectionLimits

TOKEN = "t0ken"
CONTROL = {"Authorization": f"Bearer {TOKEN}"}


class Process:
    def __init__(self, process: asyncio.subprocess.Process, url: str, control_url: str) -> None:
        self.process = process
        self.url = url
        self.control_url = control_url

    async def status(self, path: str, control: bool = True) -> int:
        async with (
            aiohttp.ClientSession() as session,
            session.get((self.control_url if control else self.url) + path) as response,
        ):
            return response.status

    async def takes_no_connections(self) -> bool:
        try:
            await self.status("/livez", control=False)
        except aiohttp.ClientConnectorError:
            return True
        return False

    async def unready(self) -> None:
        """Wait until the process has received the signal."""

        async def is_unready() -> bool:
            return await self.status("/readyz") != 200

        await eventually(is_unready)


async def run_to_end(settings: Path) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pagemill_gateway", "--settings", str(settings), stderr=asyncio.subprocess.PIPE
    )
    _, stderr = await asyncio.wait_for(process.communicate(), WAIT_LIMIT_S)
    return process.returncode or 0, stderr.decode()


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Callable]:
    """Return a function that starts gateway processes on free ports and ends them after the test."""
    async with contextlib.AsyncExitStack() as stack:

        async def launch(**settings) -> Process:
            path = tmp_path / "gateway.json"
            config = GatewayConfig(port=0, control_port=0, control_token=TOKEN, **settings)
            path.write_bytes(msgspec.json.encode(config))
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "pagemill_gateway", "--settings", str(path), stderr=asyncio.subprocess.PIPE
            )
            stack.push_async_callback(end, process)
            assert process.stderr is not None
            line = json.loads(await asyncio.wait_for(process.stderr.readline(), WAIT_LIMIT_S))
            assert line["event"] == "listening"
            return Process(process, line["url"], line["control_url"])

        yield launch


async def end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.communicate()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"host": "0.0.0.0"}, "api_keys"),
        ({"host": "::", "control_token": "t"}, "api_keys"),
        ({"control_host": "0.0.0.0"}, "control_token"),
        ({"api_keys": ["sk-plain"]}, "SHA-256"),
        ({"api_keys": [f"{'a' * 64} concurrency=0"]}, r"api_keys\[0\]: has concurrency='0'"),
        ({"redis": {}}, "exactly one of url and url_file"),
        ({"redis": {"url": "http://redis"}}, r"redis\.url"),
        ({"redis": {"url": "redis://r", "timeout_ms": 0}}, r"redis\.timeout_ms: 0"),
        ({"redis": {"url": "redis://r", "prefix": "a{b}"}}, r"redis\.prefix"),
        ({"redis": {"url": "redis://r", "expected_gateways": 0}}, r"redis\.expected_gateways: 0"),
        ({"redis": {"url": "redis://r", "keys": True}, "allow_anonymous": True}, "redis.keys"),
        ({"port": 70000}, "port"),
        ({"nonsense": 1}, "nonsense"),
        ({"max_requests": 0}, "max_requests"),
        ({"retry_share": 20}, "retry_share"),
        ({"journal_tokens": -1}, "journal_tokens"),
        ({"max_in_flight_body_bytes": 1000}, "max_in_flight_body_bytes"),
        ({"catalog": {"models": [{"deployment": "d", "name": ""}]}}, "catalog"),
    ],
)
async def test_unsafe_settings_are_refused_by_name(tmp_path: Path, settings, named) -> None:
    path = tmp_path / "gateway.json"
    path.write_text(json.dumps({"port": 0, "control_port": 0, **settings}))
    if "catalog" in settings:
        with pytest.raises(SettingsError, match=named):
            await serve(load_config(path))
        return
    with pytest.raises(SettingsError, match=named):
        load_config(path)


async def test_a_gateway_without_keys_beyond_loopback_does_not_start(tmp_path: Path) -> None:
    path = tmp_path / "gateway.json"
    path.write_text('{"host": "0.0.0.0", "port": 0, "control_port": 0}')
    code, stderr = await run_to_end(path)
    assert code == 1
    assert "api_keys is empty" in stderr
    assert "Traceback" not in stderr


def test_a_bad_line_among_api_keys_does_not_prevent_the_start(tmp_path: Path, caplog) -> None:
    (path := tmp_path / "keys").write_text(f"# team a\n{'a' * 64}\nmy-own-key\n")
    file = open_keys_file(str(path))
    assert file is not None
    assert file.lines() == ("a" * 64,)
    assert "line 3 is ignored" in caplog.text
    assert "my-own" not in caplog.text


@pytest.mark.parametrize(("text", "refused"), [("my-own-key\n", True), ("", False), ("# none yet\n", False)])
def test_api_keys_without_any_hash_are_refused_and_not_shown(tmp_path: Path, text, refused) -> None:
    (path := tmp_path / "keys").write_text(text)
    if not refused:
        file = open_keys_file(str(path))
        assert file is not None
        assert file.lines() == ()
        return
    with pytest.raises(SettingsError, match="SHA-256") as caught:
        open_keys_file(str(path))
    assert "my-own" not in str(caught.value)


def test_api_keys_in_the_settings_are_named_by_their_position_only() -> None:
    with pytest.raises(SettingsError, match=r"api_keys\[1\]") as caught:
        GatewayConfig(api_keys=["a" * 64, "my-own-key"]).checked()
    assert "my-own" not in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[]", '{"port": "x"}'])
def test_errors_in_unreadable_settings_name_their_place(tmp_path: Path, text: str) -> None:
    path = tmp_path / "gateway.json"
    path.write_text(text)
    with pytest.raises(SettingsError, match=r"gateway\.json"):
        load_config(path)
    with pytest.raises(SettingsError, match=r"missing\.json"):
        load_config(tmp_path / "missing.json")


@pytest.mark.parametrize("field", ["port", "control_port"])
async def test_a_port_in_use_is_named(field: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = {"port": 0, "control_port": 0, field: taken.getsockname()[1]}
        with pytest.raises(SettingsError, match=f"^`{field}` .*in use"):
            await serve(GatewayConfig(**ports))


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True),
     ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("example.org", False)],
)  # fmt: skip
def test_loopback_addresses_are_those_that_only_this_machine_reaches(host: str, expected: bool) -> None:
    assert is_loopback_address(host) is expected


async def test_after_sigkill_the_next_process_serves_the_first_request(engines, fake, start) -> None:
    """The first request arrives before any engine has reported."""
    before = await start(catalog=fake.catalog_of(*engines))
    before.process.kill()
    await before.process.communicate()
    draining = [engine.hold_state() for engine in engines]
    gateway = await start(catalog=fake.catalog_of(*engines))

    async def model() -> Any:
        async with session.get(gateway.control_url + "/status", headers=CONTROL) as response:
            (found,) = (await response.json())["models"]
            return found

    async with aiohttp.ClientSession() as session, asyncio.timeout(WAIT_LIMIT_S):
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        first = asyncio.create_task(session.post(gateway.url + "/v1/chat/completions", json=body))
        while not (await model())["queue"]["num_requests"]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for event in draining:
            event.set()
        async with await first as response:
            assert response.status == 200, await response.text()
        while {each["phase"] for each in (await model())["endpoints"]} != {"ready"}:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_sigterm_ends_readiness_first_and_lets_requests_finish(engines, fake, start) -> None:
    gateway = await start(catalog=fake.catalog_of(engines[0]), drain_timeout_s=300)
    gate = asyncio.Event()
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    async with aiohttp.ClientSession() as session, aiohttp.ClientSession() as other:
        await read_when_ready(other, gateway, body)
        engines[0].behaviours.append(fake.says("a", "b", gate=gate))
        async with post_when_ready(session, gateway, {**body, "stream": True}) as response:
            gateway.process.send_signal(signal.SIGTERM)
            await gateway.unready()
            assert await gateway.status("/livez") == 200
            async with other.post(gateway.url + "/v1/chat/completions", json=body) as late:
                assert (late.status, late.headers["connection"]) == (200, "close"), "the connection was open before"
            with pytest.raises(aiohttp.ClientConnectorError):
                await other.post(gateway.url + "/v1/chat/completions", json=body)
            gate.set()
            raw = await response.read()
    assert raw.endswith(b"data: [DONE]\n\n")
    assert await asyncio.wait_for(gateway.process.wait(), WAIT_LIMIT_S) == 0


async def test_a_stream_that_ends_in_the_drain_leaves_its_connection_open_for_one_more_request(
    engines, fake, start
) -> None:
    """The client was not asked to close the connection and sends the next request at once."""
    gateway = await start(catalog=fake.catalog_of(engines[0]), drain_delay_s=0.5, drain_timeout_s=300)
    gate = asyncio.Event()
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session:
        await read_when_ready(session, gateway, body)
        engines[0].behaviours.append(fake.says("a", "b", gate=gate))
        async with post_when_ready(session, gateway, {**body, "stream": True}) as stream:
            gateway.process.send_signal(signal.SIGTERM)
            await gateway.unready()
            await eventually(gateway.takes_no_connections)  # the delay has ended
            gate.set()
            assert (await stream.read()).endswith(b"data: [DONE]\n\n")
        async with session.post(gateway.url + "/v1/chat/completions", json=body) as response:
            assert (response.status, response.headers["connection"]) == (200, "close")
    assert await asyncio.wait_for(gateway.process.wait(), WAIT_LIMIT_S) == 0


@pytest.mark.parametrize("hurry", [False, True])
async def test_streams_that_outlast_the_drain_end_with_an_error_event(engines, fake, start, hurry) -> None:
    gateway = await start(catalog=fake.catalog_of(engines[0]), drain_timeout_s=300 if hurry else 0.2)
    engines[0].behaviour = fake.says("a", "b", gate=asyncio.Event())
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with aiohttp.ClientSession() as session, post_when_ready(session, gateway, body) as response:
        gateway.process.send_signal(signal.SIGTERM)
        if hurry:
            await gateway.unready()
            gateway.process.send_signal(signal.SIGINT)
        raw = await response.read()
    assert b'"a"' in raw
    assert b"shutting down" in raw.split(b"\n\n")[-2]
    assert b"[DONE]" not in raw
    assert await asyncio.wait_for(gateway.process.wait(), WAIT_LIMIT_S) == 0


async def test_a_second_signal_ends_a_gateway_at_once_even_if_clients_do_not_read(engines, fake, start) -> None:
    gateway = await start(catalog=fake.catalog_of(engines[0]), drain_delay_s=300, drain_timeout_s=300)
    engines[0].behaviour = fake.says("a", *["b" * 60_000] * 200, gate=None)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with aiohttp.ClientSession(read_bufsize=4096) as session, post_when_ready(session, gateway, body):
        gateway.process.send_signal(signal.SIGTERM)
        await gateway.unready()
        began_s = time.monotonic()
        gateway.process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(gateway.process.wait(), WAIT_LIMIT_S) == 0
        assert time.monotonic() - began_s < SOON_S, "not after the 300 s of the drain"


async def test_during_the_drain_delay_new_requests_are_still_served(engines, fake, start) -> None:
    gateway = await start(catalog=fake.catalog_of(engines[0]), drain_delay_s=300)
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    async with aiohttp.ClientSession() as session:
        await read_when_ready(session, gateway, body)
        gateway.process.send_signal(signal.SIGTERM)
        await gateway.unready()
        async with session.post(gateway.url + "/v1/chat/completions", json=body) as response:
            assert response.status == 200
            assert response.headers["connection"] == "close"
        gateway.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(gateway.process.wait(), WAIT_LIMIT_S) == 0


@contextlib.asynccontextmanager
async def post_when_ready(
    session: aiohttp.ClientSession, gateway: Process, body: dict
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Yield the first response that is not a refusal for want of readiness."""
    while True:
        async with session.post(gateway.url + "/v1/chat/completions", json=body) as response:
            if response.status == 200:
                yield response
                return
            await response.read()
        await asyncio.sleep(0.05)


async def read_when_ready(session: aiohttp.ClientSession, gateway: Process, body: dict) -> None:
    async with post_when_ready(session, gateway, body) as response:
        await response.read()


# -- the event loop and the HTTP parser --------------------------------------------------------------------------------


async def no_application(*_: object) -> None:
    raise AssertionError("no app is asked")


async def reported_of_the_loop(*_: object) -> None:
    raise SettingsError(type(asyncio.get_running_loop()).__module__)


def test_single_process_brain_and_worker_all_run_on_uvloop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagemill_gateway.logs.configure", lambda **_: None)
    monkeypatch.setattr("pagemill_gateway.processes.__main__.send_heartbeats", asyncio.Event().wait)
    for name in ("processes.server.serve", "processes.serving.serve_control", "processes.serving.serve_data"):
        monkeypatch.setattr(f"pagemill_gateway.{name}", reported_of_the_loop)
    config = GatewayConfig()
    with pytest.raises(SettingsError, match="uvloop"):
        gateway_main.run(config)
    for role in get_args(Role):
        with pytest.raises(SettingsError, match="uvloop"):
            process_main._run(Setup(role=role, name=role, config=config, folder="", listener=-1))


def test_httptools_parses_client_requests() -> None:
    """`test_engine_connection` covers the answers of engines."""
    protocol = _server(no_application, GatewayConfig(), ConnectionLimits(1), None).config.http
    assert isinstance(protocol, type)
    assert issubclass(protocol, HttpToolsProtocol)
    assert protocol.max_header_bytes == GatewayConfig().max_header_bytes


async def test_an_idle_connection_is_closed_after_the_time_of_the_setting(start) -> None:
    gateway = await start(idle_connection_timeout_s=1)
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    async with asyncio.timeout(WAIT_LIMIT_S):  # 75 s without the setting
        await reader.read()
    writer.close()


async def test_a_websocket_is_closed_when_the_process_ends(start) -> None:
    gateway = await start()
    async with connect(f"{gateway.url.replace('http', 'ws', 1)}/v1/responses") as opened:
        gateway.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(WAIT_LIMIT_S):
            await opened.wait_closed()
            assert opened.close_code == 1001
            assert await gateway.process.wait() == 0


def test_an_idle_time_of_nothing_is_refused() -> None:
    with pytest.raises(SettingsError, match="idle_connection_timeout_s: 0 must be at least 1"):
        GatewayConfig(idle_connection_timeout_s=0).checked()
