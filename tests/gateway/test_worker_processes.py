"""A gateway of several processes: one port, common metrics and limits, and the effect of killing one of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
import pytest
from hung_processes import hang
from waiting import SOON_S, START_LIMIT_S, WAIT_LIMIT_S, eventually, find_event

from pagemill_gateway.config import GatewayConfig
from pagemill_protocol.versions import protocol_headers
from pagemill_servers.auth import hash_key
from pagemill_servers.secrets.token_file import read_generated_token

pytestmark = pytest.mark.slow

CONTROL = {"authorization": "Bearer t0ken", **protocol_headers()}
KEY = {"authorization": "Bearer sk-one"}
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
HANG_TIMEOUT_S = 8.0
"""A timeout beyond any time in which a process of the gateway is idle on a busy test machine."""


class Family:
    """The supervisor and its child processes."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, control_url: str) -> None:
        self.process = process
        self.url, self.control_url = url, control_url
        self.session = aiohttp.ClientSession()

    def pid(self, name: str) -> int:
        """Return the process id of the current process of that name."""
        (pid,) = [each.pid for each in psutil.Process(self.process.pid).children() if _name(each) == name]
        return pid

    @property
    def pids(self) -> set[int]:
        return {each.pid for each in psutil.Process(self.process.pid).children(recursive=True)}

    async def status(self) -> Any:
        async with self.session.get(f"{self.control_url}/status", headers=CONTROL) as response:
            return await response.json()

    async def in_flight(self) -> int:
        (model,) = (await self.status())["models"]
        return sum(each["in_flight"] for each in model["endpoints"])

    async def metric(self, name: str) -> float:
        async with self.session.get(f"{self.control_url}/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    async def chat(self) -> int:
        """Send a chat over a new connection; return its status."""
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.url + CHAT, json=BODY, headers=KEY) as response,
        ):
            await response.read()
            return response.status

    async def refuses_connections(self) -> bool:
        try:
            async with aiohttp.ClientSession() as session, session.get(self.url + "/livez") as response:
                return response.status != 200
        except aiohttp.ClientConnectorError:
            return True

    async def is_ready(self) -> bool:
        async with self.session.get(f"{self.control_url}/readyz") as response:
            return response.status == 200

    async def ready(self) -> None:
        await until(lambda: self.chat(), lambda status: status == 200)


class Stream:
    """A running stream on a connection of its own."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._session = aiohttp.ClientSession()

    async def begin(self) -> Stream:
        self._response = await self._session.post(self._family.url + CHAT, json={**BODY, "stream": True}, headers=KEY)
        assert self._response.status == 200, await self._response.read()
        self._read = await self._response.content.readuntil(b"\n\n")
        return self

    @property
    def worker(self) -> str:
        """Return the name of the worker that serves the connection."""
        transport = self._response.connection.transport  # type: ignore[union-attr]
        port = transport.get_extra_info("sockname")[1]
        for process in psutil.Process(self._family.process.pid).children():
            if any(each.raddr and each.raddr.port == port for each in process.net_connections("tcp")):
                return _name(process)
        raise AssertionError(f"no worker has the connection from port {port}")

    async def raw(self) -> bytes:
        """Return the rest of the stream; raise `aiohttp.ClientError` if the connection broke."""
        async with self._session, self._response:
            return self._read + await self._response.read()

    async def text(self) -> str:
        """Return the whole text; raise errors like `raw`."""
        raw = await self.raw()
        assert raw.endswith(b"data: [DONE]\n\n")
        chunks = [json.loads(event[6:]) for event in raw.split(b"\n\n")[:-2]]
        return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])


CHAT = "/v1/chat/completions"


def _name(process: psutil.Process) -> str:
    return process.cmdline()[-1]


async def until(ask: Callable[[], Any], holds: Callable[[Any], bool] = bool) -> None:
    """Repeat the question until the answer satisfies the condition."""

    async def is_right() -> bool:
        with contextlib.suppress(aiohttp.ClientError):
            return holds(await ask())
        return False

    await eventually(is_right)


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Callable]:
    async with contextlib.AsyncExitStack() as stack:

        async def launch(**settings: Any) -> Family:
            path = tmp_path / "gateway.json"
            config = GatewayConfig(**{"control_token": "t0ken", **settings}, port=0, control_port=0, workers=2)
            path.write_bytes(msgspec.json.encode(config))
            log = stack.enter_context((tmp_path / "log").open("wb"))
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "pagemill_gateway", "--settings", str(path), stderr=log
            )
            stack.push_async_callback(end, process)
            line = await listening(tmp_path / "log", process)
            family = Family(process, line["url"], line["control_url"])
            stack.push_async_callback(family.session.close)
            return family

        yield launch


async def listening(log: Path, process: asyncio.subprocess.Process) -> Any:
    def look() -> Any:
        assert process.returncode is None, f"see {log}"
        return find_event(log, "listening")

    return await eventually(look, limit_s=START_LIMIT_S)


async def end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


async def streams_on_both(family: Family) -> dict[str, list[Stream]]:
    """Open at least two streams on each worker."""
    by_worker: dict[str, list[Stream]] = {"worker-0": [], "worker-1": []}
    async with asyncio.timeout(WAIT_LIMIT_S):
        while min(map(len, by_worker.values())) < 2:
            for stream in await asyncio.gather(*(Stream(family).begin() for _ in range(8))):
                by_worker[stream.worker].append(stream)
    return by_worker


async def test_two_workers_serve_one_port_with_common_counts_and_finish_their_requests(engines, fake, start) -> None:
    family = await start(catalog=fake.catalog_of(*engines[:2]), drain_timeout_s=300)
    await family.ready()
    gate = asyncio.Event()
    for engine in engines:
        engine.behaviour = fake.says("a", "b", gate=gate)
    by_worker = await streams_on_both(family)
    num_streams = sum(map(len, by_worker.values()))
    # The end of the first request may be counted a moment after its client has read the answer.
    await until(family.status, lambda status: (status["num_requests"], status["workers"]) == (num_streams, 2))
    await until(family.in_flight, lambda count: count == num_streams)
    await until(lambda: family.metric("pagemill_gateway_in_flight_requests{"), lambda found: found == num_streams)
    family.process.send_signal(signal.SIGTERM)
    await until(family.is_ready, lambda ready: not ready)
    await until(family.refuses_connections)
    assert await family.metric("pagemill_gateway_requests_total{") >= 1, (
        "the remaining worker's metrics must still count for all"
    )
    gate.set()
    texts = await asyncio.gather(*(stream.text() for streams in by_worker.values() for stream in streams))
    assert set(texts) == {"ab"}
    assert await asyncio.wait_for(family.process.wait(), WAIT_LIMIT_S) == 0


async def test_a_key_is_revoked_and_added_at_all_workers(engines, fake, start, tmp_path: Path) -> None:
    (path := tmp_path / "keys").write_text(f"{hash_key('sk-one')} requests_per_minute=1000\n")
    family = await start(catalog=fake.catalog_of(engines[0]), api_keys_file=str(path))
    await family.ready()
    path.write_text(f"{hash_key('sk-other')}\n")
    # Connections spread over both workers; the chance that all of them reach one worker is one in a million.
    await until(lambda: statuses(family, 21), lambda found: set(found) == {401})
    path.write_text(f"{hash_key('sk-one')}\n")
    await until(lambda: statuses(family, 21), lambda found: set(found) == {200})


async def statuses(family: Family, count: int) -> list[int]:
    return await asyncio.gather(*(family.chat() for _ in range(count)))


async def test_a_killed_worker_fails_only_its_own_requests(engines, fake, start) -> None:
    family = await start(catalog=fake.catalog_of(*engines[:2]))
    await family.ready()
    gate = asyncio.Event()
    for engine in engines:
        engine.behaviour = fake.says("a", "b", gate=gate)
    by_worker = await streams_on_both(family)
    lost, kept = by_worker["worker-0"], by_worker["worker-1"]
    os.kill(family.pid("worker-0"), signal.SIGKILL)
    for stream in lost:
        with pytest.raises(aiohttp.ClientError):
            await stream.text()
    await until(family.in_flight, lambda count: count == len(kept))
    await fake.until(lambda: sum(engine.num_inside for engine in engines) == len(kept))
    gate.set()
    assert {await stream.text() for stream in kept} == {"ab"}
    await until(family.in_flight, lambda count: count == 0)
    assert await family.metric("pagemill_gateway_time_to_first_token_seconds_count") == len(kept)
    # The control process counts it when its connection ends, and the supervisor starts the next one.
    await until(lambda: family.metric("pagemill_gateway_workers_lost_total"), lambda lost: lost == 1)
    await until(family.status, lambda status: status["workers"] == 2)
    assert await family.chat() == 200


async def test_a_worker_that_hangs_is_replaced_and_fails_only_its_own_requests(engines, fake, start) -> None:
    family = await start(catalog=fake.catalog_of(*engines[:2]), hang_timeout_s=HANG_TIMEOUT_S)
    await family.ready()
    gate = asyncio.Event()
    for engine in engines:
        engine.behaviour = fake.says("a", "b", gate=gate)
    by_worker = await streams_on_both(family)
    hung = family.pid("worker-0")
    hang(hung)
    for stream in by_worker["worker-0"]:
        with pytest.raises(aiohttp.ClientError):
            await stream.text()
    await fake.until(lambda: not psutil.pid_exists(hung))
    gate.set()
    assert {await stream.text() for stream in by_worker["worker-1"]} == {"ab"}
    await until(family.status, lambda status: status["workers"] == 2)
    assert await family.chat() == 200
    assert await family.metric("pagemill_gateway_workers_lost_total") == 1


async def test_a_brain_that_hangs_is_replaced_and_streams_continue(engines, fake, start) -> None:
    family = await start(catalog=fake.catalog_of(engines[0]), hang_timeout_s=HANG_TIMEOUT_S)
    await family.ready()
    gate = asyncio.Event()
    engines[0].behaviours.append(fake.says("a", "b", gate=gate))
    stream = await Stream(family).begin()
    hang(family.pid("control"))
    assert await family.chat() == 200, "the request must wait for the next brain"
    gate.set()
    assert await stream.text() == "ab"
    assert await family.metric("pagemill_gateway_control_process_restarts_total") == 1


async def test_a_new_brain_requires_the_token_that_was_created_at_the_start(
    engines, fake, start, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    family = await start(control_token="", catalog=fake.catalog_of(engines[0]))
    headers = {"Authorization": f"Bearer {read_generated_token(family.control_url)}"}

    async def status() -> int:
        async with family.session.get(f"{family.control_url}/status", headers=headers) as response:
            return response.status

    assert await status() == 200
    old = family.pid("control")
    os.kill(old, signal.SIGKILL)
    await until(status, lambda answered: answered == 200)
    assert family.pid("control") != old


async def test_a_key_for_one_answer_at_once_gets_one_after_the_other_whichever_workers_serve_them(
    engines, fake, start
) -> None:
    family = await start(api_keys=[f"{hash_key('sk-one')} concurrency=1"], catalog=fake.catalog_of(engines[0]))
    await family.ready()
    for _ in range(20):
        assert await family.chat() == 200
        assert (await (await Stream(family).begin()).text()) == "hello world"


async def test_when_the_brain_is_killed_streams_continue_and_requests_wait_for_the_next_one(
    engines, fake, start
) -> None:
    """The next brain serves the last catalogue and knows the reservations of keys."""
    family = await start(api_keys=[f"{hash_key('sk-one')} concurrency=1"])
    catalog = msgspec.json.encode(fake.catalog_of(engines[0]))
    async with family.session.put(f"{family.control_url}/catalog", data=catalog, headers=CONTROL) as response:
        assert response.status == 200
    await family.ready()
    gate = asyncio.Event()
    engines[0].behaviours.append(fake.says("a", "b", gate=gate))
    stream = await Stream(family).begin()
    old = family.pid("control")
    os.kill(old, signal.SIGKILL)
    at_once = await asyncio.gather(*(family.chat() for _ in range(6)))
    assert set(at_once) == {429}, (
        "requests waited for the next brain, which reserved nothing before both workers had reported"
    )
    assert family.pid("control") != old
    gate.set()
    assert await stream.text() == "ab"
    await family.ready()
    assert await family.metric("pagemill_gateway_control_process_restarts_total") == 1
    assert await family.metric("pagemill_gateway_requests_total{") >= 4, "workers must still know their reservations"
    await until(family.in_flight, lambda count: count == 0)


async def test_a_second_signal_reaches_all_processes_and_ends_streams_with_an_error(engines, fake, start) -> None:
    # The engines run in this process and may be delayed, so their streams are not to be continued.
    patient = {"silence_timeout_s": 300.0, "state_stale_after_s": 300.0}
    family = await start(catalog=fake.catalog_of(*engines[:2]), drain_delay_s=300, drain_timeout_s=300, **patient)
    await family.ready()
    engines[0].behaviour = engines[1].behaviour = fake.says("a", "b", gate=asyncio.Event())
    by_worker = await streams_on_both(family)
    engines[0].behaviour = engines[1].behaviour = fake.says("a")
    family.process.send_signal(signal.SIGTERM)
    await until(family.is_ready, lambda ready: not ready)
    assert await family.chat() == 200, "new requests must be served during the delay"
    began_s = time.monotonic()
    family.process.send_signal(signal.SIGTERM)
    for stream in [each for streams in by_worker.values() for each in streams]:
        raw = await stream.raw()
        assert b"shutting down" in raw
        assert b"[DONE]" not in raw
    assert await asyncio.wait_for(family.process.wait(), WAIT_LIMIT_S) == 0
    assert time.monotonic() - began_s < SOON_S, "not after the 300 s of the drain"


async def test_no_process_outlives_the_supervisor(start) -> None:
    family = await start()
    pids = family.pids
    assert len(pids) == 3
    folders = {each for pid in pids for each in _folders(pid)}
    family.process.kill()
    await until_gone(pids)
    assert folders
    assert not any(folder.exists() for folder in folders)


async def until_gone(pids: set[int]) -> None:
    await eventually(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def _folders(pid: int) -> set[Path]:
    """Return the folders of the Unix sockets that the process listens on."""
    paths = {Path(each.laddr) for each in psutil.Process(pid).net_connections("unix") if each.laddr}
    return {path.parent for path in paths if path.name == "control.sock"}


async def test_a_process_that_cannot_start_is_reported_by_name_and_ends_all(tmp_path: Path) -> None:
    path = tmp_path / "gateway.json"
    settings = {"workers": 2, "port": 0, "control_port": 0, "api_keys_file": str(tmp_path / "none")}
    path.write_text(json.dumps(settings))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pagemill_gateway", "--settings", str(path), stderr=asyncio.subprocess.PIPE
    )
    _, stderr = await asyncio.wait_for(process.communicate(), WAIT_LIMIT_S)
    assert process.returncode == 1
    assert b"pagemill gateway: api_keys_file: cannot read" in stderr
    assert b"Traceback" not in stderr
