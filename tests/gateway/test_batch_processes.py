"""Batches of gateway processes that are killed, ended by a line, or out of disk: each line is answered exactly once.

`test_batch_crashes` has all moments of a death, without processes.
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from batch_client import Client, line
from server_processes import HttpServer, start_http_server
from waiting import eventually

from pagemill_protocol.request.generate import GenerateRequest

pytestmark = pytest.mark.usefixtures("reporting_engines")

NUM_LINES = 24


class Gateways:
    """Gateway processes with one directory, one after the other."""

    def __init__(self, engine: Any, token: str, folder: Path, session: aiohttp.ClientSession) -> None:
        self.batches = folder / "batches"
        self._folder = folder
        self._session = session
        self._num_started = 0
        endpoint = {"id": "engine-0", "data_url": engine.url, "control_url": engine.url}
        model = {"deployment": "d", "name": "tiny", "engine_token": token, "endpoints": [endpoint]}
        self._values = {
            "port": 0,
            "control_port": 0,
            "control_token": "t",
            "catalog": {"models": [model]},
            "batches": {"directory": str(self.batches), "max_concurrency": 8},
        }
        self.server: HttpServer

    async def start(self) -> Client:
        name = f"gateway-{self._num_started}"
        self._num_started += 1
        (self._folder / name).mkdir()
        self.server = await asyncio.to_thread(
            start_http_server, name, "pagemill_gateway", self._folder / name, self._values
        )
        return Client(self.server.url, self._session)

    async def kill(self) -> None:
        self.server.process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(self.server.stop)

    async def check_clean(self) -> None:
        """Check that nothing but the files that clients see is left, soon after clients have seen a batch's end."""
        await eventually(lambda: not any((self.batches / "leases").iterdir()))
        assert [each for each in self.batches.glob("running/*/*") if each.is_file()] == []
        known = {each.name for each in self.batches.glob("files/*/*")}
        assert {each.name for each in (self.batches / "content").iterdir()} == known


@pytest.fixture
async def started(engines, fake, tmp_path) -> AsyncIterator[Gateways]:
    engines[0].max_num_seqs = 64
    async with aiohttp.ClientSession() as session:
        started = Gateways(engines[0], fake.TOKEN, tmp_path, session)
        yield started
        await asyncio.to_thread(started.server.stop)


async def results_of(client: Client, batch: Any) -> dict[str, Any]:
    """Return the results of both files by `custom_id`; fail if a line has two."""
    found: dict[str, Any] = {}
    for kind in ("output_file_id", "error_file_id"):
        for each in await client.results(batch[kind]) if batch[kind] else []:
            assert each["custom_id"] not in found, each
            found[each["custom_id"]] = each
    return found


@pytest.mark.slow
async def test_each_line_is_answered_once_though_gateways_are_killed(engines, started, fake) -> None:
    engine, draw = engines[0], random.Random(54)

    async def answers_late(engine: Any, request: GenerateRequest, response: Any, http: Any) -> None:
        await asyncio.sleep(draw.uniform(0.0, 0.1))
        await fake.says("x" * 40_000)(engine, request, response, http)

    client = await started.start()
    engine.behaviour = answers_late
    batch = await client.create([line(number) for number in range(NUM_LINES)])
    for _ in range(2):
        moment = len(engine.requests) + draw.randint(3, 8)
        await eventually(lambda moment=moment: len(engine.requests) >= moment)  # type: ignore[misc]
        await asyncio.sleep(draw.uniform(0.0, 0.05))  # at any moment of the requests that run now
        await started.kill()
        client = await started.start()
    batch = await client.ended(batch)
    results = await results_of(client, batch)
    assert results.keys() == {f"c{number}" for number in range(NUM_LINES)}
    assert batch["request_counts"]["total"] == NUM_LINES
    codes = {each["error"]["code"] for each in results.values() if each["error"]}
    assert codes <= {"gateway_died"}
    assert sum(each["response"] is not None for each in results.values()) >= NUM_LINES - 8
    await started.check_clean()


async def test_a_line_that_ends_its_gateway_is_failed_and_the_others_are_answered(engines, started, fake) -> None:
    engine, may_end = engines[0], asyncio.Event()

    async def ends_the_gateway(engine: Any, request: GenerateRequest, response: Any, http: Any) -> None:
        if request.sampling.n == 2:
            await may_end.wait()
            os.kill(started.server.process.pid, signal.SIGKILL)
            await asyncio.Event().wait()
        await fake.says("done")(engine, request, response, http)

    client = await started.start()
    engine.behaviour = fake.hangs
    batch = await client.create([line(1), line(2), line(3, n=2), line(4), line(5)])
    await eventually(lambda: engine.num_inside == 5)
    await started.kill()
    engine.behaviour = ends_the_gateway
    await started.start()
    may_end.set()
    await eventually(lambda: started.server.process.poll() is not None)
    await started.kill()  # frees what the test holds of it
    client = await started.start()
    batch = await client.ended(batch)
    assert (batch["status"], batch["request_counts"]) == ("completed", {"total": 5, "completed": 4, "failed": 1})
    results = await results_of(client, batch)
    assert results["c3"]["error"]["code"] == "gateway_died"
    assert {name for name, each in results.items() if each["response"]} == {"c1", "c2", "c4", "c5"}
    await started.check_clean()


@pytest.mark.slow
async def test_a_batch_continues_when_the_disk_has_space_again(engines, started, fake) -> None:
    client = await started.start()
    process = started.server.process.pid
    most = 300_000
    engines[0].behaviour = fake.says("x" * 50_000)
    unlimited = resource.RLIM_INFINITY
    resource.prlimit(process, resource.RLIMIT_FSIZE, (most, unlimited))
    batch = await client.create([line(number) for number in range(20)])
    await eventually(lambda: b"is left for later" in started.server.log.read_bytes())
    sizes = [each.stat().st_size for each in (started.batches / "content").iterdir()]
    assert max(sizes) == most, "the last result does not fit"
    assert (await client.batch(batch))["status"] == "in_progress"
    num_before = len(engines[0].requests)
    resource.prlimit(process, resource.RLIMIT_FSIZE, (unlimited, unlimited))
    batch = await client.ended(batch)
    assert (batch["status"], batch["request_counts"]) == ("completed", {"total": 20, "completed": 20, "failed": 0})
    results = await results_of(client, batch)
    assert len(results) == 20
    assert num_before - 1 <= 20 + 3 * 8, "a full disk must not make the engine work for ever"
    await started.check_clean()
