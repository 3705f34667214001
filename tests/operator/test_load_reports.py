"""Reports of several gateways on one deployment are shown as one load and merged into the autoscaler's signals."""

from __future__ import annotations

import math
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hand_clock import Clock
from killable_server import serve

from pagemill_operator.autoscaler.signals import Fleet, Signals, merge
from pagemill_operator.controller.watching.load_stream import display_wait_s
from pagemill_operator.load.store import LoadStore
from pagemill_operator.load.stream import follow_load
from pagemill_operator.status.load import summarize
from pagemill_protocol.frames import LOAD_CONTENT_TYPE, encode_load
from pagemill_protocol.report.histogram import histogram_of
from pagemill_protocol.report.load import (
    Arrivals,
    DeploymentLoad,
    EngineReport,
    EnginesLoad,
    EngineStart,
    Latencies,
    Lengths,
    LoadFrame,
    PodCounts,
    QueueLoad,
)
from pagemill_protocol.report.state import EngineLoad
from pagemill_protocol.versions import OLDEST_VERSION, PROTOCOL_HEADER, PROTOCOL_VERSION, UnsupportedProtocol

KEY = "default/chat"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def loads(clock: Clock) -> LoadStore:
    return LoadStore(clock)


def frame(running: int = 2, *, age_s: float = 0.0, ready: int = 1, queued: int = 0, **fields: Any) -> LoadFrame:
    engines = EnginesLoad(
        truth="value",
        age_s=age_s,
        num_reporting=ready,
        num_kv_bytes_total=100,
        num_kv_bytes_active=50,
        num_requests_running=running,
        num_requests_waiting=1,
    )
    known = {"engines": engines, "pods": PodCounts(ready=ready), "queue": QueueLoad(num_requests=queued)}
    return LoadFrame(sequence=1, deployments=[DeploymentLoad(namespace="default", name="chat", **(known | fields))])


def signals(loads: LoadStore, *, ready: int = 1, num_gateways: int = 1) -> Signals:
    return merge(loads.reports(KEY), Fleet(wanted=1, ready=ready), num_gateways=num_gateways, at_s=0.0)


def test_a_missing_report_is_not_zero(loads: LoadStore) -> None:
    assert loads.measured(KEY) is None
    loads.put("g1", LoadFrame(sequence=0))
    assert loads.measured(KEY) is None
    assert signals(loads).engines.truth == "unknown"
    assert not signals(loads).is_complete


def test_of_reports_on_the_same_engines_the_newest_counts(loads: LoadStore, clock: Clock) -> None:
    loads.put("g1", frame(7, age_s=0.1))
    loads.put("g2", frame(5, age_s=3.0))
    assert loads.measured(KEY) == EngineLoad(
        num_kv_bytes_total=100, num_kv_bytes_active=50, num_requests_running=7, num_requests_waiting=1
    )
    assert signals(loads, num_gateways=2).engines.num_requests_running == 7
    clock.now += 4
    loads.put("g2", frame(6))
    assert signals(loads, num_gateways=2).engines.num_requests_running == 6
    measured = loads.measured(KEY)
    assert measured is not None
    assert measured.num_requests_running == 6


def test_a_report_on_more_engines_takes_precedence_over_a_newer_one(loads: LoadStore) -> None:
    loads.put("g1", frame(9, age_s=1.0, ready=2))
    loads.put("g2", frame(4, age_s=0.0, ready=1))
    assert signals(loads, ready=2).engines.num_requests_running == 9


def test_ready_engines_without_reports_make_the_sums_stale(loads: LoadStore) -> None:
    loads.put("g1", frame(ready=2))
    assert signals(loads, ready=2).engines.truth == "value"
    assert signals(loads, ready=3).engines.truth == "stale"
    loads.put("g1", frame(engines=EnginesLoad(truth="value"), ready=0))
    assert signals(loads, ready=0).engines.truth == "value"
    assert signals(loads, ready=1).engines.truth == "unknown"


def test_for_each_engine_the_highest_reported_load_counts(loads: LoadStore) -> None:
    four, three = (EngineReport("a", EngineLoad(num_kv_bytes_active=count), 9 - count) for count in (4, 3))
    b, c = EngineReport("b", EngineLoad(num_kv_bytes_active=1)), EngineReport("c")
    loads.put("g1", frame(replicas=[four, b]))
    loads.put("g2", frame(replicas=[three, c]))
    assert loads.held(KEY) == {"a": four, "b": b, "c": c}
    loads.remove("g1")
    assert loads.held(KEY).keys() == {"a", "c"}
    assert loads.held("default/other") == {}


def test_start_times_may_come_from_any_gateway(loads: LoadStore) -> None:
    loads.put("g1", frame(starts=[EngineStart("a", {"load": 1.0})]))
    loads.put("g2", frame(starts=[EngineStart("a", {"load": 1.0}), EngineStart("b", {"load": 2.0})]))
    assert loads.starts(KEY) == {"a": EngineStart("a", {"load": 1.0}), "b": EngineStart("b", {"load": 2.0})}


def test_an_engine_that_any_gateway_reports_as_sleeping_is_not_awake(loads: LoadStore) -> None:
    loads.put("g1", frame(asleep=["a"]))
    loads.put("g2", frame(asleep=["b"]))
    assert loads.asleep(KEY) == {"a", "b"}
    loads.put("g1", frame())
    assert loads.asleep(KEY) == {"b"}
    assert loads.asleep("default/other") == frozenset()


def test_values_of_each_gateways_own_requests_are_added(loads: LoadStore) -> None:
    for number, gateway in enumerate(("g1", "g2"), start=1):
        fields = {
            "queue": QueueLoad(num_requests=3, num_tokens=30, oldest_s=float(number)),
            "arrivals": Arrivals(
                truth="value", window_s=60.0 * number, requests_per_s=2.0, burst_requests_per_s=1.0, idle_s=9.0 * number
            ),
            "latencies": Latencies(truth="value", ttft_ms=histogram_of([10.0 * number])),
            "lengths": Lengths(truth="value", prompt=histogram_of([100.0])),
        }
        assert loads.put(gateway, frame(**fields)) == {KEY}
    seen = signals(loads, num_gateways=2)
    assert (seen.queue.num_requests, seen.queue.num_tokens, seen.queue.oldest_s) == (6, 60, 2.0)
    assert (seen.arrivals.requests_per_s, seen.arrivals.idle_s, seen.arrivals.window_s) == (4.0, 9.0, 60.0)
    assert (seen.latencies.ttft_ms.total, seen.lengths.prompt.total) == (2, 2)
    assert (seen.num_waiting, seen.num_requests) == (1 + 6, 2 + 1 + 6)
    measured = loads.measured(KEY)
    assert measured is not None
    assert measured.num_requests_waiting == 1 + 6
    assert seen.is_complete
    loads.remove("g2")
    assert not signals(loads, num_gateways=2).is_complete
    assert signals(loads).queue.num_requests == 3


@pytest.mark.parametrize(
    "arrivals",
    [
        Arrivals(),
        Arrivals(truth="value", requests_per_s=math.nan),
        Arrivals(truth="value", idle_s=math.inf),
        Arrivals(truth="value", burst_requests_per_s=-1.0),
    ],
)
def test_a_rate_that_one_gateway_does_not_know_is_unknown(loads: LoadStore, arrivals: Arrivals) -> None:
    loads.put("g1", frame(arrivals=Arrivals(truth="value", requests_per_s=1.0)))
    loads.put("g2", frame(arrivals=arrivals))
    assert signals(loads).arrivals.truth == "unknown"


@pytest.mark.parametrize("fields", [{"num_kv_bytes_active": -1}, {"num_requests_running": -5}, {"age_s": math.nan}])
def test_impossible_counts_are_unknown(loads: LoadStore, fields: dict[str, Any]) -> None:
    loads.put("g1", frame(engines=EnginesLoad(truth="value", num_reporting=1, **fields)))
    assert signals(loads).engines.truth in ("unknown", "value")
    assert signals(loads).num_requests >= 0
    if "age_s" not in fields:
        assert signals(loads).engines.truth == "unknown"


def test_reports_of_a_lost_gateway_are_dropped(loads: LoadStore) -> None:
    loads.put("g1", frame(7))
    loads.remove("g1")
    assert loads.measured(KEY) is None


def test_only_changes_are_published(loads: LoadStore) -> None:
    assert loads.put("g1", frame(7)) == {KEY}
    assert loads.put("g1", frame(7, age_s=1.0)) == set()
    assert loads.put("g1", frame(8)) == {KEY}


def test_a_deployment_that_needs_an_engine_is_known(loads: LoadStore) -> None:
    loads.put("g1", frame())
    assert not loads.needs_engine(KEY)
    loads.put("g2", frame(queue=QueueLoad(num_requests=1, needs_engine=True)))
    assert loads.needs_engine(KEY)


@pytest.mark.parametrize(("active", "shown"), [(150, 100), (-10, 0), (50, 50)])
def test_shares_are_between_zero_and_one(loads: LoadStore, active: int, shown: int) -> None:
    loads.put("g1", frame(engines=EnginesLoad(truth="value", num_kv_bytes_total=100, num_kv_bytes_active=active)))
    measured = loads.measured(KEY)
    assert measured is not None
    assert summarize(measured, "2026-01-01T00:00:00Z").kv_cache_usage_percent == shown


@pytest.mark.parametrize(
    ("shown_at", "wait_s"),
    [(None, 5.0), ("2026-01-01T00:00:00Z", 30.0), ("2026-01-01T00:00:50Z", 30.0), ("2025-12-31T23:59:40Z", 10.0)],
)
def test_a_shown_load_stays_for_half_a_minute(shown_at: str | None, wait_s: float) -> None:
    status = {"load": {"lastUpdateTime": shown_at}} if shown_at else {}
    assert display_wait_s(status, datetime(2026, 1, 1, tzinfo=UTC)) == wait_s


@pytest.mark.parametrize("version", [OLDEST_VERSION - 1, PROTOCOL_VERSION + 1])
async def test_a_gateway_older_than_the_previous_release_is_not_followed(version: int) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        headers = {"Content-Type": LOAD_CONTENT_TYPE, PROTOCOL_HEADER: str(version)}
        return web.Response(body=encode_load(LoadFrame(sequence=7)), headers=headers)

    app = web.Application()
    app.router.add_get("/internal/load", handle)
    runner, port = await serve(app, 0)
    frames: list[LoadFrame] = []
    is_older = version < OLDEST_VERSION
    try:
        async with aiohttp.ClientSession() as session:
            with pytest.raises(UnsupportedProtocol, match="The gateway speaks") if is_older else nullcontext():
                await follow_load(session, f"http://127.0.0.1:{port}", "t", frames.append)
    finally:
        await runner.cleanup()
    assert [frame.sequence for frame in frames] == ([] if is_older else [7])
