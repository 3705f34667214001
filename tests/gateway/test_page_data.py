"""What the page `/ui` reads besides its event stream: scaling decisions, predictions, and the use of limits."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import msgspec
import pytest
from waiting import eventually

from pagemill_gateway.limits.memory import MemoryStore
from pagemill_gateway.limits.store import ReservationRequest, Use
from pagemill_gateway.ports import WhatIf
from pagemill_gateway.ui.scaling import ScalingDecisions
from pagemill_gateway.ui.what_if import measured
from pagemill_protocol.report.histogram import histogram_of
from pagemill_protocol.report.load import Arrivals, DeploymentLoad, Lengths, PodCounts
from pagemill_protocol.report.prediction import OfferedLoad, Predictor
from pagemill_protocol.report.scaling import KEPT_DECISIONS, ScalingDecision, ScalingGoal, ScalingReport
from pagemill_protocol.report.shape import Shape
from pagemill_protocol.report.state import EngineLoad, StepTimeParams
from pagemill_protocol.versions import protocol_headers
from pagemill_servers.auth import hash_key
from pagemill_servers.keys.caller import Limits

TOKEN = "control-secret"
ADMIN = {"Authorization": "Bearer admin-key"}
STEP_TIME = StepTimeParams([1, 64, 2048], [10.0, 15.0, 400.0], num_steps_observed=100)


def decided(second: int, **fields: Any) -> ScalingDecision:
    defaults = {
        "key": "default/d",
        "time": f"2026-11-29T10:{second // 60:02}:{second % 60:02}Z",
        "replicas_before": 1,
        "replicas": 2,
        "reason": "ScaledUp",
        "message": "the load needs 2 replicas",
    }
    return ScalingDecision(**{**defaults, **fields})


async def report(gateway: Any, *decisions: ScalingDecision, token: str = TOKEN, raw: bytes = b"") -> tuple[int, Any]:
    body = raw or msgspec.json.encode(ScalingReport(decisions=[*decisions]))
    headers = {"Authorization": f"Bearer {token}", **protocol_headers()}
    async with gateway.session.post(f"{gateway.control_url}/internal/scaling", data=body, headers=headers) as response:
        return response.status, json.loads(await response.read())


async def shown(gateway: Any, query: str = "") -> Any:
    return (await gateway.get(f"/ui/scaling{query}")).json["decisions"]


@pytest.mark.layouts
async def test_reported_decisions_are_shown_newest_first_and_once(gateways) -> None:
    gateway = await gateways(wait=False, control_token=TOKEN)
    assert await shown(gateway) == []
    goals = [ScalingGoal(name="slo", needed=2, reason="3.00 requests/s need 2 replicas")]
    first, second = decided(1, goals=goals), decided(2, replicas_before=2, replicas=1, reason="ScaledDown")
    assert (await report(gateway, first))[0] == 200
    assert (await report(gateway, first, second))[0] == 200, "an operator that connects again reports all it has"
    newest, oldest = await shown(gateway)
    assert (newest["reason"], newest["replicas_before"], newest["replicas"]) == ("ScaledDown", 2, 1)
    assert oldest["message"] == "the load needs 2 replicas"
    assert oldest["goals"] == [{"name": "slo", "needed": 2, "reason": "3.00 requests/s need 2 replicas"}]
    assert [each["reason"] for each in await shown(gateway, "?limit=1")] == ["ScaledDown"]


async def test_reports_that_cannot_be_kept_are_refused_with_the_remedy(gateways) -> None:
    gateway = await gateways(wait=False, control_token=TOKEN)
    assert (await report(gateway, decided(1), token="wrong"))[0] == 401
    for raw, said in (
        (b"{", "cannot be read"),
        (b'{"decisions": [{"key": 1, "time": "t"}]}', "decisions[0].key"),
        (b'{"decisions": [{"key": "a/b"}]}', "time"),
    ):
        status, body = await report(gateway, raw=raw)
        assert status == 400
        assert said in body["error"]["message"]
    status, body = await report(gateway, *map(decided, range(KEPT_DECISIONS + 1)))
    assert (status, body["error"]["param"]) == (400, "decisions")
    assert str(KEPT_DECISIONS) in body["error"]["message"]
    async with gateway.session.post(
        f"{gateway.control_url}/internal/scaling", data=b"{}", headers={"Authorization": f"Bearer {TOKEN}"}
    ) as response:
        assert response.status == 426, "without a version of the protocol"
    assert await shown(gateway) == []
    for limit in ("0", str(KEPT_DECISIONS + 1), "x"):
        assert (await gateway.get(f"/ui/scaling?limit={limit}")).status == 400


def test_the_latest_decisions_are_kept_in_the_order_of_their_times() -> None:
    kept = ScalingDecisions()
    kept.add([decided(second) for second in range(100, 100 + KEPT_DECISIONS)])
    kept.add([decided(99), decided(150, message="another one of that second"), decided(101)])
    decisions = json.loads(kept.latest(KEPT_DECISIONS))["decisions"]
    times = [each["time"] for each in decisions]
    assert len(times) == KEPT_DECISIONS
    assert times == sorted(times, reverse=True)
    assert times[-1] == decided(101).time, "the two oldest ones have made room"
    assert [each["message"] for each in decisions if each["time"] == decided(150).time] == [
        "another one of that second",
        "the load needs 2 replicas",
    ]


# -- predictions


@pytest.fixture
async def measured_gateway(engines, gateways) -> Any:
    """A gateway whose engines have reported their size and their step times."""
    gateway = await gateways(*engines)
    for engine in engines:
        await engine.push_state(step_time=STEP_TIME, load=EngineLoad(num_kv_bytes_total=4096))

    async def is_known() -> bool:
        return bool((await gateway.get("/ui/what-if?deployment=default/d")).json["rows"])

    await eventually(is_known)
    return gateway


@pytest.mark.layouts
async def test_the_prediction_is_the_autoscalers(measured_gateway, engines) -> None:
    query = "replicas=4&requests_per_s=5&prompt_tokens=300&cached_tokens=100&output_tokens=50&percentile=90"
    answer = (await measured_gateway.get(f"/ui/what-if?deployment=default/d&{query}")).json
    state = engines[0]._frame()
    shape = Shape(4096, state.block_size, state.max_num_seqs, state.max_num_batched_tokens, STEP_TIME)
    predictor = Predictor(shape, 0.9)
    assert [row["replicas"] for row in answer["rows"]] == [3, 4, 5, 6]
    for row in answer["rows"]:
        expected = predictor.predict(OfferedLoad(5.0, 300, 200, 200, 50), row["replicas"])
        is_served = math.isfinite(expected.ttft_ms)
        assert row["ttft_ms"] == (pytest.approx(expected.ttft_ms, abs=0.1) if is_served else None)
        assert row["tpot_ms"] == (pytest.approx(expected.tpot_ms, abs=0.01) if is_served else None)
        assert row["limit"] == expected.limit
        assert row["most_requests_per_s"] > 0
    rates = [row["most_requests_per_s"] for row in answer["rows"]]
    assert rates == sorted(rates)
    assert answer["asked"] == {
        "deployment": "default/d",
        "replicas": 4,
        "requests_per_s": 5.0,
        "prompt_tokens": 300,
        "cached_tokens": 100,
        "output_tokens": 50,
        "percentile": 90.0,
    }


async def test_a_load_beyond_the_replicas_has_no_bound_and_names_what_runs_out(measured_gateway) -> None:
    query = "replicas=1&requests_per_s=100000&prompt_tokens=300&output_tokens=50"
    (first, *_) = (await measured_gateway.get(f"/ui/what-if?deployment=default/d&{query}")).json["rows"]
    assert (first["ttft_ms"], first["tpot_ms"]) == (None, None)
    assert first["limit"]
    assert first["most_requests_per_s"] < 100_000


async def test_what_is_not_asked_is_as_it_was_measured(measured_gateway) -> None:
    answer = (await measured_gateway.get("/ui/what-if?deployment=default/d&requests_per_s=&percentile=50")).json
    assert answer["now"]["replicas"] == 3
    assert answer["asked"] == {**answer["now"], "percentile": 50.0}
    assert [row["replicas"] for row in answer["rows"]] == [2, 3, 4, 5]


def test_measured_lengths_and_arrivals_are_the_start_of_a_question() -> None:
    lengths = Lengths(
        truth="value",
        prompt=histogram_of([1000.0] * 9),
        computed=histogram_of([250.0] * 9),
        output=histogram_of([60.0] * 9),
    )
    arrivals = Arrivals(truth="value", requests_per_s=2.5)
    found = measured(
        DeploymentLoad(namespace="a", name="b", lengths=lengths, arrivals=arrivals, pods=PodCounts(ready=3))
    )
    assert (found.deployment, found.replicas, found.requests_per_s) == ("a/b", 3, 2.5)
    for number, exact in ((found.prompt_tokens, 1000), (found.cached_tokens, 750), (found.output_tokens, 60)):
        assert number == pytest.approx(exact, rel=0.1), "bins of histograms are not exact"
    assert measured(DeploymentLoad(namespace="a", name="b")) == WhatIf("a/b", 1, 1.0, 512, 0, 128)


async def test_engines_without_step_times_give_no_prediction_and_say_so(engines, gateways) -> None:
    gateway = await gateways(*engines)
    answer = (await gateway.get("/ui/what-if?deployment=default/d")).json
    assert answer["rows"] == []
    assert "engine" in answer["unknown"]


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("", "deployment"),
        ("deployment=default/d&replicas=0", "replicas"),
        ("deployment=default/d&replicas=1.5", "replicas"),
        ("deployment=default/d&replicas=%D9%A3", "replicas"),
        ("deployment=default/d&requests_per_s=0", "requests_per_s"),
        ("deployment=default/d&requests_per_s=nan", "requests_per_s"),
        ("deployment=default/d&requests_per_s=1e999", "requests_per_s"),
        ("deployment=default/d&prompt_tokens=-1", "prompt_tokens"),
        ("deployment=default/d&prompt_tokens=5000", "prompt_tokens"),
        ("deployment=default/d&prompt_tokens=10&cached_tokens=10", "cached_tokens"),
        ("deployment=default/d&output_tokens=x", "output_tokens"),
        ("deployment=default/d&percentile=100", "percentile"),
        ("deployment=default/other", "deployment"),
    ],
)
async def test_a_question_without_an_answer_names_field_value_and_remedy(engines, gateways, query, field) -> None:
    gateway = await gateways(*engines)
    answer = await gateway.get(f"/ui/what-if?{query}")
    assert answer.status == (404 if query.endswith("other") else 400)
    assert answer.error["param"] == field
    assert field in answer.error["message"]


# -- limits


@pytest.mark.layouts
async def test_keys_show_what_they_have_used_of_each_limit(engines, gateways) -> None:
    limits = "requests_per_minute=10 tokens_per_minute=5000 concurrency=4 tokens_per_day=90000 tokens_per_month=900000"
    keys = [
        f"{hash_key('admin-key')} role=admin",
        f"{hash_key('user')} tenant=acme {limits} tokens_per_day@tiny=700",
        f"{hash_key('other')} tenant=beta requests_per_minute=3",
    ]
    gateway = await gateways(*engines, api_keys=keys)
    used = [(await gateway.chat(headers={"Authorization": "Bearer user"})).json["usage"] for _ in range(2)]
    tokens = sum(each["total_tokens"] for each in used)
    assert tokens

    async def use() -> dict[str, Any]:
        async with gateway.session.get(gateway.url + "/ui/keys", headers=ADMIN) as response:
            body = await response.json()
        assert body["is_shared"]
        return {each["account"]: each["limits"] for each in body["keys"]}

    async def is_settled() -> bool:
        return any(each["used"] == tokens for each in (await use())["acme"])

    await eventually(is_settled)
    found = await use()
    assert {(each["name"], each["model"]): (each["used"], each["value"]) for each in found["acme"]} == {
        ("requests_per_minute", ""): (2, 10),
        ("tokens_per_minute", ""): (tokens, 5000),
        ("concurrency", ""): (0, 4),
        ("tokens_per_day", ""): (tokens, 90_000),
        ("tokens_per_month", ""): (tokens, 900_000),
        ("tokens_per_day", "tiny"): (tokens, 700),
    }
    assert [each["used"] for each in found["beta"]] == [0], "another tenant's requests do not count"


async def test_a_running_request_counts_with_what_it_has_reserved(engines, gateways, fake) -> None:
    gate = asyncio.Event()
    for engine in engines:
        engine.behaviour = fake.says("a", "b", gate=gate)
    keys = [f"{hash_key('admin-key')} role=admin", f"{hash_key('user')} tenant=acme concurrency=4 tokens_per_day=9999"]
    gateway = await gateways(*engines, api_keys=keys)
    running = asyncio.create_task(gateway.chat(headers={"Authorization": "Bearer user"}))

    async def use() -> dict[str, int]:
        async with gateway.session.get(gateway.url + "/ui/keys", headers=ADMIN) as response:
            keys = (await response.json())["keys"]
        return {each["name"]: each["used"] for key in keys for each in key["limits"]}

    async def is_running() -> bool:
        return (await use())["concurrency"] == 1

    await eventually(is_running)
    reserved = (await use())["tokens_per_day"]
    gate.set()
    assert (await running).status == 200

    async def has_ended() -> bool:
        return (await use())["concurrency"] == 0

    await eventually(has_ended)
    assert 0 < (await use())["tokens_per_day"] < reserved


async def test_asking_for_use_changes_nothing_and_knows_no_strangers() -> None:
    store = MemoryStore(lambda: 1_000_000, lambda: 1_795_391_000.0)
    limits = Limits(tokens_per_minute=100)
    await store.reserve(ReservationRequest("a", "lease", 30, limits))
    before = await store.use(["a", "stranger"])
    assert before.accounts == [Use(1, 30, 1, 30, 30), Use()]
    assert await store.use(["a", "stranger"]) == before
    assert len(store._accounts) == 1
