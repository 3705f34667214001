"""Scaling decisions reach gateways: all that are kept at first, then each new one, whatever fails between."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from scaling_world import arrivals, engines
from waiting import eventually

from pagemill_operator.autoscaler.decision import Decision, Goal
from pagemill_operator.autoscaler.records import Record
from pagemill_operator.autoscaler.settings import ScalingSettings
from pagemill_operator.autoscaler.signals import Fleet, Signals
from pagemill_operator.load import decisions as decisions_module
from pagemill_operator.load.decisions import DecisionHistory, described, publishing
from pagemill_protocol.report.scaling import KEPT_DECISIONS
from pagemill_protocol.versions import PROTOCOL_HEADER

SETTINGS = ScalingSettings(mode="Advisory", min_replicas=1, max_replicas=4)


def record(number: int, **fields: Any) -> Record:
    signals = Signals(at_s=float(number), fleet=Fleet(1), engines=engines(1), arrivals=arrivals(1.0))
    decision = Decision(1, 2, "ScaledUp", f"decision {number}", **fields)
    time = f"2026-11-29T10:{number // 60:02}:{number % 60:02}Z"
    return Record("default/chat", time, SETTINGS, signals, None, decision)


class Listener:
    """A gateway's control port that takes decisions, or answers with these statuses first."""

    def __init__(self) -> None:
        self.url = ""
        self.statuses: list[int] = []
        self.num_asked = 0
        self.published: list[list[str]] = []

    async def handle(self, request: web.Request) -> web.Response:
        self.num_asked += 1
        assert request.headers["Authorization"] == "Bearer secret"
        assert PROTOCOL_HEADER in request.headers
        if self.statuses:
            return web.Response(status=self.statuses.pop(0))
        self.published.append([each["message"] for each in json.loads(await request.read())["decisions"]])
        return web.json_response({})

    @property
    def messages(self) -> list[str]:
        return [message for each in self.published for message in each]


@pytest.fixture
async def listener() -> AsyncIterator[Listener]:
    listener = Listener()
    app = web.Application()
    app.router.add_post("/internal/scaling", listener.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    listener.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield listener
    await runner.cleanup()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions_module, "RETRY_S", 0.01)
    monkeypatch.setattr(decisions_module, "COALESCED_S", 0.01)


@asynccontextmanager
async def published(listener: Listener, history: DecisionHistory) -> AsyncIterator[None]:
    async with aiohttp.ClientSession() as session, publishing(session, listener.url, "secret", history):
        yield


async def test_a_gateway_gets_what_is_kept_and_then_only_what_is_new(listener: Listener) -> None:
    history = DecisionHistory()
    history.note(record(1))
    history.note(record(2))
    async with published(listener, history):
        await eventually(lambda: listener.published == [["decision 1", "decision 2"]])
        history.note(record(3))
        await eventually(lambda: listener.published[1:] == [["decision 3"]])
    async with published(listener, history):
        await eventually(lambda: listener.published[2:] == [["decision 1", "decision 2", "decision 3"]])


@pytest.mark.parametrize("status", [401, 429, 500, 503])
async def test_what_a_gateway_could_not_take_is_sent_again(listener: Listener, status: int) -> None:
    listener.statuses = [status] * 3
    history = DecisionHistory()
    history.note(record(1))
    async with published(listener, history):
        await eventually(lambda: listener.messages == ["decision 1"])
    assert listener.num_asked == 4


async def test_a_gateway_that_does_not_listen_is_tried_again(listener: Listener) -> None:
    history = DecisionHistory()
    history.note(record(1))
    closed = Listener()
    closed.url = "http://127.0.0.1:9"
    async with published(closed, history), published(listener, history):
        await eventually(lambda: listener.messages == ["decision 1"])


async def test_a_gateway_of_an_earlier_version_is_asked_once(listener: Listener) -> None:
    listener.statuses = [404]
    history = DecisionHistory()
    history.note(record(1))
    async with published(listener, history):
        await eventually(lambda: listener.num_asked)
        history.note(record(2))
        await eventually(lambda: not any("_keep_publishing" in repr(each) for each in asyncio.all_tasks()))
    assert (listener.num_asked, listener.published) == (1, [])


async def test_only_the_latest_decisions_are_kept(listener: Listener) -> None:
    history = DecisionHistory()
    for number in range(KEPT_DECISIONS + 5):
        history.note(record(number))
    async with published(listener, history):
        await eventually(lambda: listener.published)
    assert listener.messages == [f"decision {number}" for number in range(5, KEPT_DECISIONS + 5)]


def test_a_decision_is_published_with_the_operators_words() -> None:
    goals = (
        Goal("slo", 2, reason="3.00 requests/s need 2 replicas", unreachable="raise the SLO"),
        Goal("queueDepth", missing="the arrivals are unknown"),
    )
    found = described(record(7, goals=goals))
    assert (found.key, found.time, found.mode) == ("default/chat", "2026-11-29T10:00:07Z", "Advisory")
    assert (found.replicas_before, found.replicas, found.reason, found.message) == (1, 2, "ScaledUp", "decision 7")
    assert [(each.name, each.needed, each.reason) for each in found.goals] == [
        ("slo", 2, "3.00 requests/s need 2 replicas; raise the SLO"),
        ("queueDepth", 0, "not known: the arrivals are unknown"),
    ]
