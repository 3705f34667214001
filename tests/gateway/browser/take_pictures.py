"""Takes the pictures of the live page for README and docs, from engines that work meanwhile, and measures the page.

`make pictures` runs it and prints the figures for docs/benchmarks.md. It asserts no times: they depend on the machine.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import psutil
from real_cluster import Server
from waiting import eventually

from pagemill_gateway.config import BatchesConfig, GatewayConfig
from pagemill_protocol.catalog import Catalog, CatalogModel, Endpoint
from pagemill_protocol.report.state import EngineLoad

PICTURES = Path(__file__).parents[3] / "docs" / "pictures"
SIZE = {"width": 1120, "height": 620}
MAX_BYTES = 800 * 1024
LOAD_S = 40.0
MEASURED_S = 20.0
NUM_VIEWERS = 10
ROUNDS = 3
CLOCK = "() => performance.getEntriesByName('first-contentful-paint')[0].startTime"


async def test_pictures_of_engines_at_work(start_cluster, look) -> None:
    cluster = await asyncio.to_thread(start_cluster, 4, null_runner=True)
    looker = await look(viewport=SIZE, color_scheme="light")
    async with aiohttp.ClientSession() as session:
        senders = [asyncio.create_task(_send(session, cluster.url, number)) for number in range(12)]
        await looker.open(cluster.url)
        await looker.has_ready(4)
        await asyncio.sleep(LOAD_S)  # what the plots show
        await looker.page.screenshot(path=PICTURES / "fleet.png")
        await looker.page.get_by_role("link", name="Load").click()
        await looker.page.locator("canvas").first.wait_for()
        await looker.page.screenshot(path=PICTURES / "load.png")
        for each in senders:
            each.cancel()
        await asyncio.gather(*senders, return_exceptions=True)
    assert sum(path.stat().st_size for path in PICTURES.iterdir()) < MAX_BYTES


async def _send(session: aiohttp.ClientSession, url: str, number: int) -> None:
    """Send requests one after the other; some of them have long beginnings in common."""
    while True:
        content = f"{'These are the rules. ' * (10 + number % 3 * 15)}{number}"
        body = {"model": "smol", "messages": [{"role": "user", "content": content}], "max_tokens": 200}
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            await response.read()


async def test_figures_of_a_hundred_engines(engines, fake, look, tmp_path) -> None:
    hundred = [*engines, *[await fake.Engine(f"engine-{number}").start() for number in range(3, 100)]]
    gateway = Server("pagemill_gateway", _settings(hundred, fake.TOKEN, tmp_path), tmp_path, "gateway")
    try:
        url = (await asyncio.to_thread(gateway.event, "listening"))["url"]
        looker = await look()
        await looker.open(url)
        await looker.has_ready(100)
        await looker.page.reload()
        await looker.has_ready(100)
        print("\nfirst paint with 100 engines, ms:", round(await looker.page.evaluate(CLOCK)))
        print(
            "from an engine's report to the page, ms:", [await _update_ms(hundred, looker, each) for each in range(10)]
        )
        await looker.page.goto("about:blank")
        reporting = asyncio.create_task(_report(hundred))
        async with aiohttp.ClientSession() as session:
            for round_number in range(ROUNDS):
                alone = await _cpu_share(gateway)
                received: list[int] = []
                viewers = [asyncio.create_task(_view(session, url, received)) for _ in range(NUM_VIEWERS)]
                await asyncio.sleep(2)
                with_viewers = await _cpu_share(gateway)
                print(
                    f"{round_number}: CPU of the gateway's process {alone:.2%}; with {NUM_VIEWERS} viewers "
                    f"{with_viewers:.2%}, who received {sum(received):,} bytes"
                )
                for each in viewers:
                    each.cancel()
                await asyncio.gather(*viewers, return_exceptions=True)
        reporting.cancel()
        await asyncio.gather(reporting, return_exceptions=True)
    finally:
        await asyncio.to_thread(gateway.close)
        for engine in hundred[3:]:
            await engine.kill()


def _settings(engines: list[Any], token: str, folder: Path) -> bytes:
    """Return the settings of a gateway process in front of these engines."""
    endpoints = [Endpoint(id=each.name, data_url=each.url, control_url=each.url) for each in engines]
    catalog = Catalog(models=[CatalogModel(deployment="d", name="tiny", engine_token=token, endpoints=endpoints)])
    batches = BatchesConfig(directory=str(folder / "batches"))
    return msgspec.json.encode(GatewayConfig(port=0, control_port=0, catalog=catalog, batches=batches))


async def _update_ms(engines: list[Any], looker: Any, number: int) -> int:
    """Return the time from a report to its number on the page, by the test's clock."""
    start = time.monotonic()
    await engines[50].push_state(load=EngineLoad(num_requests_waiting=1000 + number))
    text = f"{1000 + number:,}"
    tile = looker.page.locator(".tile").nth(50)

    async def has_text() -> bool:
        return text in await tile.inner_text()

    await eventually(has_text)
    return round(1000 * (time.monotonic() - start))


async def _report(engines: list[Any]) -> None:
    """Let every engine report a change once a second."""
    number = 0
    while True:
        number += 1
        for each in engines:
            await each.push_state(load=EngineLoad(num_requests_running=number % 50, step_ms=20.0))
        await asyncio.sleep(1)


async def _cpu_share(server: Server) -> float:
    """Return the CPU time of a server's process as a share of the wall clock."""
    process = psutil.Process(server.process.pid)
    start, before = time.monotonic(), process.cpu_times()
    await asyncio.sleep(MEASURED_S)
    after = process.cpu_times()
    return (after.user + after.system - before.user - before.system) / (time.monotonic() - start)


async def _view(session: aiohttp.ClientSession, url: str, received: list[int]) -> None:
    async with session.get(f"{url}/ui/events") as response:
        while data := await response.content.readany():
            received.append(len(data))
