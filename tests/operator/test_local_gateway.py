"""Sending the gateway its catalogue: permanent refusals are reported once, others are retried with growing pauses."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from waiting import WAIT_LIMIT_S, eventually

from pagemill_gateway.config import load_config
from pagemill_operator.backends.base import Event
from pagemill_operator.backends.local import LocalSettings
from pagemill_operator.backends.local import gateway as gateway_module
from pagemill_operator.backends.local.gateway import LocalGateway
from pagemill_operator.backends.local.state_dir import StateDir
from pagemill_operator.backends.local.supervisor import Launch
from pagemill_protocol.catalog import Catalog, CatalogModel


class Control:
    """A gateway's control port that answers with `statuses` in turn, then with 200."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.asked_at_s: list[float] = []
        self.events: list[Event] = []
        self.asked = asyncio.Condition()

    @property
    def num_asked(self) -> int:
        return len(self.asked_at_s)

    async def put(self, request: web.Request) -> web.Response:
        async with self.asked:
            self.asked_at_s.append(time.monotonic())
            self.asked.notify_all()
        return web.Response(status=self.statuses.pop(0) if self.statuses else 200, text="words")

    async def until_asked(self, times: int) -> None:
        async with asyncio.timeout(WAIT_LIMIT_S), self.asked:
            await self.asked.wait_for(lambda: self.num_asked >= times)


@asynccontextmanager
async def telling(control: Control, folder: Path, **settings: int) -> AsyncIterator[LocalGateway]:
    app = web.Application()
    app.router.add_put("/catalog", control.put)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    state_dir = StateDir(folder)
    async with aiohttp.ClientSession() as session:
        gateway = LocalGateway(
            1,
            settings=LocalSettings(runtime_folder=folder, **settings),
            state_dir=state_dir,
            session=session,
            on_change=lambda: None,
            on_event=control.events.append,
        )
        gateway.supervisor.launch = Launch((), {}, url, url)
        try:
            yield gateway
        finally:
            await gateway.end(0)
            await runner.cleanup()
            state_dir.remove()


def catalog(name: str) -> Catalog:
    return Catalog([CatalogModel(deployment=name, name=name)])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_module, "RETRY_FIRST_S", 0.01)


async def test_a_permanent_refusal_of_a_catalogue_is_reported_once_and_the_next_one_again(tmp_path: Path) -> None:
    control = Control(400)
    async with telling(control, tmp_path) as gateway:
        gateway.want(catalog("a"))
        await control.until_asked(1)
        await eventually(lambda: control.events)
        assert not await gateway.informed(0.3)
        assert control.num_asked == 1
        (event,) = control.events
        assert event.warning
        assert event.message == "refused the new catalogue with 400 and serves the previous one: words"
        gateway.want(catalog("b"))
        assert await gateway.informed(WAIT_LIMIT_S)
        assert control.num_asked == 2


async def test_the_gateway_is_started_with_the_configured_workers(tmp_path: Path) -> None:
    async with telling(Control(), tmp_path, gateway_workers=3) as gateway:
        launch = gateway._prepare()
        assert load_config(Path(launch.command[-1])).workers == 3


async def test_the_control_address_stays_after_a_restart_unless_another_process_took_it(tmp_path: Path) -> None:
    async with telling(Control(), tmp_path) as gateway:
        first = gateway._prepare().control_url
        assert gateway._prepare().control_url == first
        with socket.create_server(("127.0.0.1", int(first.rpartition(":")[2]))):
            assert gateway._prepare().control_url != first


@pytest.mark.parametrize("status", [500, 503, 429])
async def test_a_temporary_refusal_is_retried_and_reported_once(tmp_path: Path, status: int) -> None:
    control = Control(status, status, status)
    async with telling(control, tmp_path) as gateway:
        gateway.want(catalog("a"))
        assert await gateway.informed(WAIT_LIMIT_S)
    assert control.num_asked == 4
    assert len(control.events) == 1


async def test_pauses_grow(tmp_path: Path) -> None:
    control = Control(500, 500, 500, 500)
    async with telling(control, tmp_path) as gateway:
        gateway.want(catalog("a"))
        assert await gateway.informed(WAIT_LIMIT_S)
    times_s = control.asked_at_s
    gaps_s = [later - earlier for earlier, later in itertools.pairwise(times_s)]
    assert all(gap_s >= 0.009 * 2**number for number, gap_s in enumerate(gaps_s)), gaps_s
