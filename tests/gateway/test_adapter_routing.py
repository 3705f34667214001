"""Requests for LoRA adapters: which engines get them, the cost of a load, and what clients see of adapters."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from hand_clock import Clock
from hypothesis import given
from hypothesis import strategies as st

from pagemill_gateway.discovery.catalog import check_catalog
from pagemill_protocol.catalog import Catalog, CatalogModel, Endpoint
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.frames import StateDecoder, encode_state
from pagemill_protocol.report.adapters import AdapterSlots, AdapterStatus
from pagemill_protocol.report.state import Digests, EngineLoad, StateFrame, StepTimeParams
from pagemill_routing.brain.brain import LocalBrain
from pagemill_routing.brain.endpoints.adapters import Adapters, AdapterUses
from pagemill_routing.brain.endpoints.dispatches import EXPIRY_S
from pagemill_routing.brain.interface import Assignment, RoutingRequest
from pagemill_routing.config import RoutingConfig
from pagemill_servers.auth import hash_key

NOTHING = frozenset[str]()
STEP_TIME = StepTimeParams(knots_tokens=[1, 101], knot_ms=[10.0, 110.0])
PRETTY, TERSE = "pretty", "terse"
KNOWN = {PRETTY: "p", TERSE: "t"}


def status(name: str, digest: str = "", state: Any = "known", **fields: Any) -> AdapterStatus:
    return AdapterStatus(name=name, source=f"s3://b/{name}", state=state, digest=digest, **fields)


def slots(
    *resident: str, loading: tuple[str, ...] = (), load_ms: float = 200.0, known: Mapping[str, str] = KNOWN
) -> AdapterSlots:
    statuses = [status(name, digest) for name, digest in known.items()]
    return AdapterSlots(num_slots=2, resident=list(resident), loading=list(loading), load_ms=load_ms, known=statuses)


def model(*endpoint_ids: str, **fields: Any) -> CatalogModel:
    endpoints = [
        Endpoint(id=each, data_url=f"http://{each}:1", control_url=f"http://{each}:2") for each in endpoint_ids
    ]
    known = {"deployment": "d", "name": "m", "adapters": [PRETTY, TERSE], "endpoints": endpoints}
    return CatalogModel(**{**known, **fields})


def frame(adapters: AdapterSlots | None = None, sequence: int = 1, **load: int) -> StateFrame:
    return StateFrame(
        sequence=sequence,
        snapshot=sequence == 1,
        max_model_len=4096,
        max_num_batched_tokens=100,
        digests=Digests(weights="w", tokenizer_bundle="t"),
        step_time=STEP_TIME,
        adapters=adapters or AdapterSlots(),
        load=EngineLoad(**load),
    )


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def brain(clock: Clock) -> LocalBrain:
    return LocalBrain(RoutingConfig(), clock=clock, rng=random.Random(1))


async def place(brain: LocalBrain, name: str) -> Assignment:
    target = brain.resolve(name)
    return await brain.choose(target, NOTHING, RoutingRequest(50, adapter_digest=target.adapter_digest))


def adapter_ms(brain: LocalBrain) -> dict[str, float]:
    """Return the adapter costs of the latest decision, by endpoint."""
    shown = brain.placement.decisions.latest(1)[0]
    return {row["endpoint"]: row["terms"]["adapter_ms"] for row in shown["candidates"]}


# -- the adapters of one pod


def test_adapter_loads_are_sequential_and_the_wait_decreases_with_time() -> None:
    pod = Adapters()
    pod.update(slots("a", loading=("b",)), 10.0, new_engine=True)
    waits = {digest: pod.wait_ms(digest, 10.0, believed=True) for digest in "abc"}
    assert waits == pytest.approx({"a": 0, "b": 200, "c": 400})
    assert pod.wait_ms("c", 10.15, believed=True) == pytest.approx(250)
    assert pod.wait_ms("b", 11.0, believed=True) == 0, "the load is due, and no other report has arrived"


def test_a_stale_report_makes_no_adapter_resident_and_an_unreported_load_time_costs_nothing() -> None:
    pod = Adapters()
    pod.update(slots("a"), 10.0, new_engine=True)
    assert pod.wait_ms("a", 10.0, believed=False) == pytest.approx(200)
    pod.update(slots(load_ms=0.0), 10.0, new_engine=False)
    assert pod.wait_ms("a", 10.0, believed=True) == 0


def test_a_decision_makes_its_adapter_expected_until_a_report_confirms_or_contradicts_it() -> None:
    pod = Adapters()
    pod.update(slots("a"), 10.0, new_engine=True)
    pod.expect(1, "b", 10.0)
    pod.update(slots("a"), 10.05, new_engine=False)
    assert pod.wait_ms("b", 10.05, believed=True) == pytest.approx(150), (
        "a request on its way must keep the adapter expected"
    )
    pod.update(slots("a", loading=("b",)), 10.1, new_engine=False)
    assert pod.wait_ms("b", 10.1, believed=True) == pytest.approx(100), "the load must be counted once"
    pod.update(slots("a", "b"), 10.2, new_engine=False)
    assert pod.wait_ms("b", 10.2, believed=True) == 0
    pod.update(slots("a"), 10.4, new_engine=False)
    assert pod.wait_ms("b", 10.4, believed=True) == pytest.approx(200), "the adapter was evicted"


def test_an_expected_adapter_is_dropped_with_the_last_request_that_expects_it() -> None:
    pod = Adapters()
    pod.update(slots(), 10.0, new_engine=True)
    pod.expect(1, "b", 10.0)
    pod.expect(2, "b", 10.1)
    assert pod.wait_ms("b", 10.1, believed=True) == pytest.approx(100)
    pod.drop(1, 10.1)
    assert pod.wait_ms("b", 10.1, believed=True) == pytest.approx(100)
    pod.drop(2, 10.1)
    assert pod.wait_ms("b", 10.1, believed=True) == pytest.approx(200)


def test_an_expectation_expires_after_the_first_token_and_with_the_engine() -> None:
    pod = Adapters()
    pod.update(slots(), 10.0, new_engine=True)
    pod.expect(1, "b", 10.0)
    pod.computed(1, 10.5)
    assert pod.wait_ms("b", 10.5, believed=True) == 0
    assert pod.wait_ms("b", 10.5 + EXPIRY_S, believed=True) == pytest.approx(200)
    pod.expect(2, "c", 20.0)
    pod.update(slots(), 20.1, new_engine=True)
    assert pod.wait_ms("c", 20.1, believed=True) == pytest.approx(200)


events = st.lists(
    st.tuples(st.sampled_from(["expect", "computed", "drop", "update"]), st.integers(1, 6), st.sampled_from("abc")),
    max_size=40,
)


@given(events)
def test_a_wait_never_exceeds_the_current_loads_and_finished_requests_leave_nothing(
    happened: list[tuple[str, int, str]],
) -> None:
    pod, now, under_way = Adapters(), 10.0, list[int]()
    pod.update(slots(), now, new_engine=True)
    for number, (what, place, digest) in enumerate(happened):
        now += 0.07
        match what:
            case "expect":
                pod.expect(number, digest, now)
                under_way.append(number)
            case "computed" if under_way:
                pod.computed(under_way[place % len(under_way)], now)
            case "drop" if under_way:
                pod.drop(under_way.pop(place % len(under_way)), now)
            case "update":
                pod.update(
                    slots(digest, loading=tuple(each for each in "ab"[:place] if each != digest)), now, new_engine=False
                )
        assert all(0 <= pod.wait_ms(each, now, believed=True) <= 3 * 200 for each in "abc")
    for number in under_way:
        pod.computed(number, now)
    pod.update(slots(), now, new_engine=False)
    assert pod.wait_ms("a", now + EXPIRY_S, believed=True) == 200
    assert not pod._loads
    assert not pod._decisions


def test_frames_carry_the_adapters_of_an_engine() -> None:
    update = frame(slots("p", loading=("t",)))
    assert StateDecoder().feed(encode_state(update)) == [update]


# -- the brain


async def test_a_request_goes_to_the_engine_with_its_adapter_while_that_costs_less_than_a_load(
    brain: LocalBrain,
) -> None:
    brain.observer.apply_catalog(Catalog(models=[model("a", "b")]))
    brain.observer.observe("a", frame(slots("p")))
    brain.observer.observe("b", frame(slots("t"), num_requests_waiting=1, num_tokens_waiting=60))
    assert (await place(brain, "terse")).endpoint_id == "b"
    assert adapter_ms(brain) == {"a": 200, "b": 0}
    brain.observer.observe("b", frame(slots("t"), 2, num_requests_waiting=9, num_tokens_waiting=900))
    choice = await place(brain, "terse")
    assert choice.endpoint_id == "a"
    assert choice.predicted_ttft_ms is not None
    assert choice.predicted_ttft_ms > 200
    assert (await place(brain, "m")).endpoint_id == "a"
    assert adapter_ms(brain) == {"a": 0, "b": 0}


async def test_an_expected_load_counts_at_once_and_until_its_decision_is_withdrawn(
    brain: LocalBrain, clock: Clock
) -> None:
    brain.observer.apply_catalog(Catalog(models=[model("a", "b")]))
    for name in "ab":
        brain.observer.observe(name, frame(slots()))
    first = await place(brain, "pretty")
    clock.now += 0.15
    assert (await place(brain, "pretty")).endpoint_id == first.endpoint_id
    other = ({"a", "b"} - {first.endpoint_id}).pop()
    assert adapter_ms(brain) == pytest.approx({first.endpoint_id: 50, other: 200})
    other_first = await place(brain, "terse")
    assert other_first.endpoint_id == other, "the request would wait behind a load on the first engine"
    brain.withdrawn(other_first)
    brain.finished(await place(brain, "terse"))
    assert adapter_ms(brain)[other] == pytest.approx(200)


LETTERS = "abcdefgh"


@pytest.mark.parametrize(("kept", "most"), [(2, 20), (0, 10**6)])
async def test_loads_are_dealt_among_engines_although_one_of_them_is_the_fastest(
    brain: LocalBrain, clock: Clock, kept: int, most: int
) -> None:
    """Eight adapters by Zipf's law at six places, one request after the other. Engines that do not report how many
    adapters they keep are compared without what a load drops: then nearly all loads are the fastest engine's."""
    brain.observer.apply_catalog(Catalog(models=[model("0", "1", "2", adapters=[*LETTERS])]))
    known = [status(each, each) for each in LETTERS]
    pods = {str(number): ["g", "h"] for number in range(3)}
    draw, loads = random.Random(3), dict.fromkeys(pods, 0)

    def report(endpoint: str, sequence: int) -> StateFrame:
        held = AdapterSlots(num_slots=2, num_kept=kept, resident=pods[endpoint], load_ms=87.0, known=known)
        step_time = StepTimeParams(knots_tokens=[1, 101], knot_ms=[10.0, 100.0 + 10 * int(endpoint)])
        return msgspec.structs.replace(frame(held, sequence), step_time=step_time)

    for number in range(60):
        for endpoint in pods:
            brain.observer.observe(endpoint, report(endpoint, number + 1))
        [name] = draw.choices(LETTERS, [1 / (place + 1) for place in range(8)])
        chosen = await place(brain, name)
        brain.finished(chosen)
        held = pods[chosen.endpoint_id]
        loads[chosen.endpoint_id] += name not in held
        pods[chosen.endpoint_id] = [*[each for each in held if each != name], name][-2:]
        clock.now += 1.0
    assert sum(loads.values()) <= most
    if not kept:
        assert max(loads.values()) >= 25, loads


def test_what_a_load_drops_is_the_pods_own_order_behind_the_loads_before_it() -> None:
    pod = Adapters()
    pinned = [status("first", "a", pinned=True), *(status(each, each) for each in "bcde")]
    full = AdapterSlots(num_slots=3, num_kept=3, resident=["a", "b", "c"], load_ms=200.0, known=pinned)
    pod.update(full, 10.0, new_engine=True)
    assert [pod.dropped_for(each) for each in "abd"] == [None, None, "b"]
    pod.expect(1, "d", 10.0)
    assert (pod.dropped_for("d"), pod.dropped_for("e")) == (None, "c"), "`b` is dropped for `d` already"
    pod.update(msgspec.structs.replace(full, resident=["a", "b"]), 10.1, new_engine=True)
    assert pod.dropped_for("d") is None, "there is room"
    uses = AdapterUses()
    for each in "abbb":
        uses.asked(each)
    assert (uses.again("b", 2), uses.again("a", 2), uses.again("z", 2)) == (1.0, 0.5, 0.0)


async def test_only_engines_that_serve_adapters_get_requests_for_them(brain: LocalBrain) -> None:
    brain.observer.apply_catalog(Catalog(models=[model("old", "new")]))
    brain.observer.observe("old", frame())
    brain.observer.observe("new", frame(slots(), num_requests_waiting=9, num_tokens_waiting=9000))
    assert {(await place(brain, "pretty")).endpoint_id for _ in range(4)} == {"new"}
    assert (await place(brain, "m")).endpoint_id == "old"
    brain.observer.observe("new", frame())
    with pytest.raises(PagemillError) as refusal:
        await place(brain, "pretty")
    assert (refusal.value.status, refusal.value.code) == (503, "model_not_ready")
    assert "The adapter `pretty` is not loaded yet" in refusal.value.message


async def test_an_adapters_name_resolves_to_its_deployment_and_digest(brain: LocalBrain) -> None:
    brain.observer.apply_catalog(Catalog(models=[model("a", aliases=["alias"])]))
    brain.observer.observe("a", frame(slots()))
    for name, digest in {"pretty": "p", "terse": "t", "alias": "", "m": ""}.items():
        assert brain.resolve(name).adapter_digest == digest
        assert brain.resolve(name).model == "m"
    served = {each.name: each.is_adapter for each in await brain.names()}
    assert served == {"m": False, "alias": False, "pretty": True, "terse": True}


@pytest.mark.parametrize(
    "adapters",
    [[PRETTY, PRETTY], ["m"], ["alias"], [""]],
)
def test_a_catalogue_with_an_ambiguous_adapter_name_is_refused(adapters: list[str]) -> None:
    check_catalog(Catalog(models=[model(aliases=["alias"])]))
    with pytest.raises(PagemillError, match="a name that nothing else here has"):
        check_catalog(Catalog(models=[model(aliases=["alias"], adapters=adapters)]))


async def test_candidates_are_the_engines_that_know_the_adapters_content(brain: LocalBrain) -> None:
    brain.observer.apply_catalog(Catalog(models=[model("a", "b", "c")]))
    brain.observer.observe("a", frame(slots(known={PRETTY: "p"})))
    brain.observer.observe("b", frame(slots(known={PRETTY: "old", TERSE: "t"})))
    brain.observer.observe("c", frame(slots(known={PRETTY: "p"}), num_requests_waiting=9, num_tokens_waiting=9000))
    assert brain.resolve("pretty").adapter_digest == "p", "most engines have this content"
    assert {(await place(brain, "pretty")).endpoint_id for _ in range(4)} == {"a"}
    assert {(await place(brain, "terse")).endpoint_id for _ in range(4)} == {"b"}
    retry = await brain.choose(brain.resolve("pretty"), frozenset("a"), RoutingRequest(50, adapter_digest="p"))
    assert retry.endpoint_id == "c", "a second attempt must go to an engine that knows the adapter"


async def test_a_request_for_a_wanted_adapter_waits_for_the_first_engine_that_knows_it(brain: LocalBrain) -> None:
    brain.observer.apply_catalog(Catalog(models=[model("a")]))
    brain.observer.observe("a", frame(slots(known={TERSE: "t"})))
    waiting = asyncio.create_task(brain.find("pretty"))
    await asyncio.sleep(0)
    fetching = AdapterSlots(num_slots=2, known=[status(PRETTY, state="fetching")])
    brain.observer.observe("a", frame(fetching, 2))
    await asyncio.sleep(0)
    assert not waiting.done()
    brain.observer.observe("a", frame(slots(), 3))
    assert (await waiting).adapter_digest == "p"
    assert brain.registry.deployments["default/d"].starts.usual_s(from_zero=False) is None, "no engine was started"


async def test_an_adapter_that_all_engines_refuse_fails_at_once_with_the_reason(brain: LocalBrain) -> None:
    brain.observer.apply_catalog(Catalog(models=[model("a")]))
    refused = AdapterSlots(num_slots=2, known=[status(PRETTY, state="refused", reason="AdapterTooLarge")])
    brain.observer.observe("a", frame(refused))
    with pytest.raises(PagemillError, match="AdapterTooLarge") as refusal:
        await brain.find("pretty")
    assert (refusal.value.status, refusal.value.code) == (503, "adapter_refused")
    kept = AdapterSlots(num_slots=2, known=[status(PRETTY, "p", "refused", reason="AdapterTooLarge")])
    brain.observer.observe("a", frame(kept, 2))
    assert (await brain.find("pretty")).adapter_digest == "p", "the content before the refused one is still served"


async def test_names_of_models_and_of_older_deployments_adapters_are_not_given_away(brain: LocalBrain) -> None:
    younger = model("b", deployment="e", name="pretty", adapters=[TERSE, "m", "own"])
    brain.observer.apply_catalog(Catalog(models=[model("a"), younger]))
    found = {name: [each.key for each in brain.registry.named(name)] for name in brain.registry.names()}
    assert found == {
        "m": ["default/d"], "pretty": ["default/e"], "terse": ["default/d"], "own": ["default/e"],
    }  # fmt: skip
    shared = [model("a", weight=1), model("b", deployment="e", weight=1)]
    brain.observer.apply_catalog(Catalog(models=shared))
    assert [each.key for each in brain.registry.named("terse")] == ["default/d", "default/e"]


async def test_adapters_of_engines_without_an_operator_are_found_by_their_reports(brain: LocalBrain) -> None:
    brain.observer.apply_catalog(Catalog(models=[model("a", "b", adapters=[], takes_names=True)]))
    brain.observer.observe("a", frame(slots(known={PRETTY: "p"})))
    brain.observer.observe("b", frame(slots(known={TERSE: "t"})))
    assert {(await place(brain, name)).endpoint_id: name for name in (PRETTY, TERSE)} == {"a": PRETTY, "b": TERSE}
    brain.observer.observe("a", frame(slots(known={}), 2))
    with pytest.raises(PagemillError) as refusal:
        brain.resolve("pretty")
    assert refusal.value.status == 404


# -- clients


@pytest.mark.layouts
async def test_clients_request_an_adapter_like_a_model(engines, gateways, fake) -> None:
    for engine, resident in zip(engines[:2], ("p", "t"), strict=True):
        engine.adapters = slots(resident)
    catalog = fake.catalog_of(*engines[:2], adapters=[PRETTY, TERSE])
    gateway = await gateways(*engines[:2], catalog=catalog)
    cards = {card["id"]: card for card in (await gateway.get("/v1/models")).json["data"]}
    assert {name: card["parent"] for name, card in cards.items()} == {
        fake.MODEL: None, "pretty": fake.MODEL, "terse": fake.MODEL,
    }  # fmt: skip
    assert (await gateway.get("/v1/models/terse")).json["root"] == "s3://b/terse"
    assert (await gateway.chat(model="terse")).json["model"] == "terse"
    assert [each.adapter_digest for engine in engines for each in engine.requests] == ["t"]
    assert (await gateway.complete(model=fake.MODEL, prompt="a")).status == 200
    assert [each.adapter_digest for engine in engines for each in engine.requests if each.model == fake.MODEL] == [""]


async def test_metrics_count_requests_and_tokens_of_each_adapter(engines, gateways, fake) -> None:
    engines[0].adapters = slots("p", "t")
    gateway = await gateways(engines[0], catalog=fake.catalog_of(engines[0], adapters=[PRETTY, TERSE]))
    for name in ("pretty", "pretty", "terse", fake.MODEL):
        assert (await gateway.chat(model=name)).status == 200

    async def counted(metric: str) -> list[str]:
        text = (await gateway.get("/metrics", control=True)).raw.decode()
        lines = [line for line in text.splitlines() if line.startswith(metric) and not line.endswith(" 0.0")]
        return sorted(line.removeprefix(metric) for line in lines)

    requests = await counted("pagemill_gateway_adapter_requests_total")
    assert requests == [
        f'{{adapter="{name}",model="{fake.MODEL}",outcome="completed"}} {number}'
        for name, number in (("pretty", 2.0), ("terse", 1.0))
    ]
    tokens = await counted("pagemill_gateway_adapter_tokens_total")
    assert {line.split('"')[1] for line in tokens} == {"pretty", "terse"}


async def test_clients_of_a_gateway_load_no_adapters(engines, gateways, fake) -> None:
    gateway = await gateways(engines[0])
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert (await gateway.post(path, {"lora_name": "a", "lora_path": "/b"})).status == 404


async def test_a_key_may_use_the_adapters_that_it_names(engines, gateways, fake) -> None:
    engines[0].adapters = slots("p")
    catalog = fake.catalog_of(engines[0], adapters=[PRETTY, TERSE])
    key, headers = f"{hash_key('sk-one')} models=pretty", {"Authorization": "Bearer sk-one"}
    gateway = await gateways(engines[0], catalog=catalog, api_keys=[key])
    assert (await gateway.chat(model="pretty", headers=headers)).status == 200
    for name in ("terse", fake.MODEL):
        assert (await gateway.chat(model=name, headers=headers)).error["code"] == "model_not_found"


async def test_a_limit_of_one_adapter_counts_its_requests_only(engines, gateways, fake) -> None:
    engines[0].adapters = slots("p", "t")
    catalog = fake.catalog_of(engines[0], adapters=[PRETTY, TERSE], aliases=["alias"])
    limits = f"requests_per_minute=5 requests_per_minute@pretty=1 tokens_per_minute@{fake.MODEL}=300"
    headers = {"Authorization": "Bearer sk-one"}
    gateway = await gateways(engines[0], catalog=catalog, api_keys=[f"{hash_key('sk-one')} tenant=a {limits}"])
    first = await gateway.chat(model="pretty", headers=headers)
    assert (first.status, first.headers["x-ratelimit-limit-requests"]) == (200, "1")
    refused = await gateway.chat(model="pretty", headers=headers)
    assert refused.status == 429
    assert "Rate limit reached on requests per minute for `pretty`. Limit 1." in refused.error["message"]
    second = await gateway.chat(model="terse", headers=headers)
    assert (second.status, second.headers["x-ratelimit-remaining-requests"]) == (200, "3"), "a refusal costs nothing"
    assert "x-ratelimit-limit-tokens" not in second.headers
    of_model = [await gateway.chat(model=name, headers=headers, max_tokens=100) for name in (fake.MODEL, "alias")]
    assert {each.headers["x-ratelimit-limit-tokens"] for each in of_model} == {"300"}
    left = [int(each.headers["x-ratelimit-remaining-tokens"]) for each in of_model]
    assert left[0] > left[1], "an alias is the model"
    counted = await gateway.post("/tokenize", {"model": "pretty", "prompt": "a"}, headers=headers)
    assert (counted.status, counted.headers["x-ratelimit-remaining-requests"]) == (429, "0")
    text = (await gateway.get("/metrics", control=True)).raw.decode()
    assert 'pagemill_gateway_limited_total{model="pretty",reason="requests",tenant="a"} 2.0' in text
    assert 'pagemill_gateway_limited_total{model="-",reason="requests",tenant="a"} 0.0' in text


@pytest.mark.parametrize("digest", ["p", "p trained again"])
async def test_a_broken_stream_is_continued_with_the_same_content_only(engines, gateways, fake, digest) -> None:
    """The second engine has an adapter of that name, whatever its content."""
    first, second = engines[:2]
    first.adapters = slots("p")
    catalog = fake.catalog_of(first, second, adapters=[PRETTY, TERSE])
    gateway = await gateways(first, second, catalog=catalog)
    gate = asyncio.Event()
    first.behaviour = fake.says("a", "b", "c", gate=gate)
    second.behaviour = fake.says("a", "b", "c")
    task = asyncio.create_task(gateway.chat(stream=True, model=PRETTY))
    await fake.until(lambda: gateway.gateway.worker.relay.journal_capacity.num_tokens >= 1)
    second.adapters = slots(digest, known={PRETTY: digest})
    await second.push_state()
    await fake.until(lambda: gateway.record(second).adapters.knows(digest))
    await first.kill()
    reply = await task
    if digest == "p":
        assert (reply.streamed_text, reply.events[-1]) == ("abc", "[DONE]")
        assert [each.adapter_digest for each in second.requests] == ["p"]
    else:
        assert reply.streamed_text == "a"
        assert "error" in reply.events[-1]
        assert second.requests == []
