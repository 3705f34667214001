"""State streams: how the gateway learns of engines, and what clients get while a state is unknown."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from waiting import WAIT_LIMIT_S

from pagemill_protocol.catalog import Catalog
from pagemill_protocol.report.state import EngineLoad
from pagemill_protocol.resource.served import QueueLimits
from pagemill_protocol.versions import OLDEST_VERSION, PROTOCOL_HEADER, PROTOCOL_VERSION

NEVER_TIRED = QueueLimits(max_requests=10, max_bytes=10**6, timeout_s=3600.0)


def ids_served(engines) -> list[int]:
    return [len(engine.requests) for engine in engines]


async def test_after_a_gap_the_gateway_reconnects_for_a_snapshot(engines, gateways, fake) -> None:
    gateway = await gateways(engines[0], reconnect_base_s=0.01)
    await engines[0].push_state()
    await engines[0].push_state(skip=3)
    await fake.until(lambda: engines[0].num_state_streams == 2)
    await fake.until(lambda: gateway.record(engines[0]).reports.connected)
    assert gateway.record(engines[0]).reports.num_gaps == 1
    status = (await gateway.get("/status", control=True)).json
    assert status["models"][0]["endpoints"][0]["state_gaps"] == 1
    assert (await gateway.chat()).status == 200


@pytest.mark.parametrize("garbage", [b"\xff" * 100, b"\x05\x00\x00\x00hello"])
async def test_after_garbage_in_a_state_stream_the_gateway_reconnects(engines, gateways, fake, garbage) -> None:
    gateway = await gateways(engines[0], reconnect_base_s=0.01)
    await engines[0].push_state(raw=garbage)
    await fake.until(lambda: engines[0].num_state_streams == 2)
    await fake.until(lambda: gateway.record(engines[0]).reports.connected)


async def test_a_silent_stream_is_reopened(engines, gateways, fake) -> None:
    engines[0].silent = True
    await gateways(engines[0], reconnect_base_s=0.01, state_idle_timeout_s=0.1)
    await fake.until(lambda: engines[0].num_state_streams >= 3)


async def test_a_stale_state_is_reported_and_routing_uses_own_counts(engines, gateways, fake) -> None:
    for engine in engines[:2]:
        engine.silent = True
    gateway = await gateways(*engines[:2], state_stale_after_s=2.0, state_idle_timeout_s=60)
    await asyncio.gather(gateway.chat(), gateway.chat())
    engines[0].load = EngineLoad(num_requests_waiting=100)
    for _ in range(5):
        await engines[0].push_state()
    await fake.until(lambda: gateway.gateway.control.brain.reader.load_elsewhere(gateway.record(engines[0])) == 100)
    await asyncio.gather(*(gateway.chat() for _ in range(4)))
    assert ids_served(engines) == [1, 5, 0], "load from other gateways counts while it is fresh"
    brain = gateway.gateway.control.brain
    await fake.until(lambda: all(brain.reader.phase(gateway.record(engine)) == "stale" for engine in engines[:2]))
    status = (await gateway.get("/status", control=True)).json
    assert [endpoint["phase"] for endpoint in status["models"][0]["endpoints"]] == ["stale", "stale"]
    assert (
        'endpoints{model="tiny",phase="stale",variant="default/d"} 2.0'
        in (await gateway.get("/metrics", control=True)).raw.decode()
    )
    before = ids_served(engines)
    for _ in range(6):
        assert (await gateway.chat()).status == 200
    assert [now - then for now, then in zip(ids_served(engines), before, strict=True)] == [3, 3, 0]


async def test_an_engine_older_than_the_previous_release_is_not_used_and_the_status_states_why(
    engines, gateways, fake
) -> None:
    engines[0].headers = {PROTOCOL_HEADER: str(OLDEST_VERSION - 1)}
    gateway = await gateways(*engines[:2], wait=False, reconnect_base_s=0.01)
    await fake.until(lambda: gateway.record(engines[1]).reports.connected)
    await fake.until(lambda: "Upgrade it by one minor version at a time" in gateway.record(engines[0]).detail)
    for _ in range(4):
        assert (await gateway.chat()).status == 200
    assert ids_served(engines) == [0, 4, 0]
    engines[0].headers = {PROTOCOL_HEADER: str(PROTOCOL_VERSION + 1)}
    await fake.until(lambda: gateway.record(engines[0]).reports.connected)


async def test_a_lost_state_stream_stops_no_request(engines, gateways, fake) -> None:
    gateway = await gateways(engines[0], reconnect_base_s=30, reconnect_max_s=30)
    await engines[0].push_state(raw=b"\xff" * 100)
    await fake.until(lambda: not gateway.record(engines[0]).reports.connected)
    assert (await gateway.chat()).status == 200


async def test_while_the_model_loads_the_refusal_says_so_with_retry_after(engines, gateways, fake) -> None:
    engine = engines[0]
    engine.max_model_len = 0
    engine.readyz = (503, {"phase": "loading", "detail": "weights 40 %"})
    gateway = await gateways(engine, wait=False)
    await fake.until(lambda: gateway.record(engine).phase == "loading")
    reply = await gateway.chat()
    assert (reply.status, reply.error["code"]) == (503, "model_not_ready")
    assert "loading: weights 40 %" in reply.error["message"]
    assert 1 <= int(reply.headers["retry-after"]) <= 120
    assert [model["id"] for model in (await gateway.get("/v1/models")).json["data"]] == ["tiny"]
    await engine.push_state(max_model_len=fake.MAX_MODEL_LEN)
    await gateway.know(engine)
    assert (await gateway.chat()).status == 200


async def test_the_tokenizer_is_fetched_before_the_engine_is_ready(engines, gateways, fake) -> None:
    engine = engines[0]
    engine.max_model_len = 0
    gateway = await gateways(engine, wait=False)
    await fake.until(lambda: engine.bundle_digest in gateway.gateway.control.bundles)
    assert not gateway.record(engine).usable
    engine.bundle_bytes = b"asked for too late"
    await engine.push_state(max_model_len=fake.MAX_MODEL_LEN)
    await gateway.know(engine)
    assert (await gateway.chat()).status == 200
    assert engine.num_bundles_asked == 1


async def test_the_tokenizer_of_an_engine_is_fetched_once_the_engine_names_it(engines, gateways, fake) -> None:
    engine, digest = engines[0], engines[0].bundle_digest
    engine.max_model_len, engine.bundle_digest = 0, ""
    gateway = await gateways(engine, wait=False)
    await fake.until(lambda: engine.num_state_streams == 1)
    await engine.push_state(max_model_len=fake.MAX_MODEL_LEN, bundle_digest=digest)
    await gateway.know(engine)
    assert (await gateway.chat()).status == 200


async def test_the_tokenizer_of_a_deployment_at_zero_is_kept_until_the_deployment_is_deleted(
    engines, gateways, fake
) -> None:
    engine, digest = engines[0], engines[0].bundle_digest
    gateway = await gateways(engine)
    head = gateway.gateway.control
    head.apply_catalog(fake.catalog_of())
    assert digest in head.bundles
    head.apply_catalog(fake.catalog_of(engine))
    await gateway.know(engine)
    assert (await gateway.chat()).status == 200
    assert engine.num_bundles_asked == 1
    head.apply_catalog(Catalog())
    assert digest not in head.bundles


async def test_the_log_names_once_an_engine_that_cannot_be_reached(
    engines, gateways, fake, monkeypatch, caplog
) -> None:
    monkeypatch.setattr("pagemill_gateway.discovery.state_streams.SILENT_S", 0.0)
    await engines[0].kill()
    gateway = await gateways(engines[0], reconnect_base_s=0.001, reconnect_max_s=0.001, wait=False)
    observer, phases = gateway.gateway.control.brain.observer, []
    monkeypatch.setattr(observer, "note_phase", lambda *phase: phases.append(phase))
    await fake.until(lambda: len(phases) > 3)
    found = [each.getMessage() for each in caplog.records if "waiting for engine" in each.getMessage()]
    assert len(found) == 1, caplog.text
    assert gateway.record(engines[0]).endpoint.control_url in found[0]
    assert "Connect call failed" in found[0]


async def test_an_engine_that_starts_later_is_found(engines, gateways, fake) -> None:
    engine = engines[0]
    await engine.kill()
    gateway = await gateways(engine, wait=False, reconnect_base_s=0.01, reconnect_max_s=0.05)
    reply = await gateway.chat()
    assert (reply.status, reply.error["code"]) == (503, "model_not_ready")
    assert "unreachable" in reply.error["message"]
    await engine.start()
    await gateway.know(engine)
    assert (await gateway.chat()).status == 200


@pytest.mark.layouts
async def test_requests_before_the_first_report_wait_for_it(engines, gateways, fake) -> None:
    """This happens after a restart: a gateway that knows the engines' addresses is usable at once."""
    draining = engines[0].hold_state()
    gateway = await gateways(engines[0], wait=False, outage_wait_s=30.0)
    early = [asyncio.create_task(gateway.chat(stream=stream)) for stream in (False, True)]
    brain = gateway.gateway.control.brain
    await fake.until(lambda: brain.queues.state("default/d").num_requests == 2)
    draining.set()
    assert [(await each).status for each in early] == [200, 200]


@pytest.mark.parametrize("is_up", [True, False])
async def test_a_request_that_waits_for_the_first_report_is_refused_as_soon_as_it_arrives(
    engines, gateways, fake, is_up: bool
) -> None:
    engine = engines[0]
    engine.max_model_len = 0
    engine.readyz = (503, {"phase": "loading", "detail": "weights 40 %"})
    draining = engine.hold_state()
    if not is_up:
        await engine.kill()
    gateway = await gateways(engine, wait=False, outage_wait_s=3600.0, queue=NEVER_TIRED)
    early = asyncio.create_task(gateway.chat())
    if is_up:
        await fake.until(lambda: gateway.gateway.control.brain.queues.state("default/d").num_requests == 1)
        draining.set()
    reply = await asyncio.wait_for(early, WAIT_LIMIT_S)
    assert (reply.status, reply.error["code"]) == (503, "model_not_ready")
    assert ("loading: weights 40 %" if is_up else "unreachable") in reply.error["message"]


async def test_a_draining_engine_gets_no_new_requests_and_finishes_its_own(engines, gateways, fake) -> None:
    gateway = await gateways(*engines[:2])
    gate = asyncio.Event()
    engines[0].behaviour = fake.says("a", "b", gate=gate)
    engines[1].behaviour = fake.says("a", "b")
    running = [asyncio.create_task(gateway.chat(stream=True)) for _ in range(2)]
    await fake.until(lambda: ids_served(engines) == [1, 1, 0])
    await engines[0].push_state(draining=True)
    await fake.until(lambda: gateway.record(engines[0]).leaving)
    for _ in range(5):
        await gateway.chat()
    assert ids_served(engines) == [1, 6, 0]
    gate.set()
    assert [(await task).streamed_text for task in running] == ["ab", "ab"]


async def test_a_terminating_endpoint_gets_no_new_requests(engines, gateways, fake) -> None:
    gateway = await gateways(*engines[:2])
    catalog = fake.catalog_of(*engines[:2])
    endpoints = catalog.models[0].endpoints
    endpoints[0] = msgspec.structs.replace(endpoints[0], terminating=True)
    assert (await gateway.put_catalog(msgspec.json.encode(catalog))).status == 200
    for _ in range(5):
        assert (await gateway.chat()).status == 200
    assert ids_served(engines) == [0, 5, 0]


async def test_if_all_engines_are_draining_the_503_says_so(engines, gateways, fake) -> None:
    gateway = await gateways(engines[0])
    await engines[0].push_state(draining=True)
    await fake.until(lambda: gateway.record(engines[0]).draining)
    reply = await gateway.chat()
    assert (reply.status, reply.error["code"]) == (503, "model_not_ready")
    assert "shutting down" in reply.error["message"]


async def test_a_tokenizer_with_a_wrong_digest_is_never_used(engines, gateways, fake) -> None:
    engines[0].bundle_bytes, engines[0].bundle_digest = b"something else", "1" * 64
    engines[1].bundle_digest = "0" * 64
    gateway = await gateways(*engines, wait=False)
    await gateway.know(engines[2])
    await fake.until(lambda: "digest" in gateway.record(engines[1]).detail)
    for _ in range(6):
        assert (await gateway.chat()).status == 200
    assert ids_served(engines) == [0, 0, 6]


async def test_a_chat_template_of_the_deployment_replaces_the_models_own(engines, gateways, fake) -> None:
    catalog = fake.catalog_of(engines[0], chat_template="X{{ messages[0]['content'] }}")
    gateway = await gateways(engines[0], catalog=catalog)
    await gateway.chat()
    assert len(engines[0].requests[0].prompt_token_ids) == len("Xhi")


async def test_a_broken_chat_template_is_an_error_of_the_deployment_not_of_the_client(engines, gateways, fake) -> None:
    gateway = await gateways(engines[0], catalog=fake.catalog_of(engines[0], chat_template="{% if %}"))
    reply = await gateway.chat()
    assert (reply.status, reply.error["code"]) == (503, "model_not_ready")
    assert "template" in reply.error["message"]


async def test_the_state_stream_of_an_engine_outside_the_catalogue_is_closed(engines, gateways, fake) -> None:
    gateway = await gateways(*engines[:2])
    gateway.gateway.control.apply_catalog(fake.catalog_of(engines[1]))
    await fake.until(lambda: not engines[0]._streams)
    assert (await gateway.chat()).status == 200
    text = (await gateway.get("/metrics", control=True)).raw.decode()
    assert 'endpoint="engine-1"' in text
    assert 'endpoint="engine-0"' not in text
