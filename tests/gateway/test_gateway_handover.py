"""Engines that stop and engines that start: a request always finds an engine."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest
from waiting import WAIT_LIMIT_S

from pagemill_protocol.catalog import Catalog, CatalogModel, Endpoint
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.report.state import StateFrame
from pagemill_routing.brain.brain import LocalBrain
from pagemill_routing.brain.endpoints.registry import ChangeNotifier
from pagemill_routing.brain.interface import RoutingRequest
from pagemill_routing.config import RoutingConfig


def num_served(engines) -> list[int]:
    return [len(engine.requests) for engine in engines]


async def test_a_drain_is_acknowledged_when_no_request_goes_to_the_engine_any_more(engines, gateways, fake) -> None:
    gateway = await gateways(*engines[:2], handover_timeout_s=30.0)
    await engines[0].push_state(draining=True)
    await fake.until(lambda: engines[0].num_drained == 1)
    assert [len(set(engine.gateways)) for engine in engines[:1]] == [1], (
        "the state stream and the acknowledgement must come from one gateway"
    )
    assert gateway.record(engines[0]).draining
    await engines[0].push_state()
    await engines[0].push_state()
    for _ in range(4):
        assert (await gateway.chat()).status == 200
    assert num_served(engines) == [0, 4, 0]
    assert engines[0].num_drained == 1


async def test_the_acknowledgement_carries_the_current_token_not_the_streams(engines, gateways, fake) -> None:
    gateway = await gateways(*engines[:2], handover_timeout_s=30.0)
    gateway.gateway.control.apply_catalog(fake.catalog_of(*engines[:2], engine_token="turned"))
    await engines[0].push_state(draining=True, token="turned")
    await fake.until(lambda: engines[0].num_drained == 1)
    assert engines[0].num_unauthorized == 0


async def test_an_acknowledgement_that_is_refused_is_sent_again(engines, gateways, fake) -> None:
    gateway = await gateways(*engines[:2], handover_timeout_s=30.0)
    await engines[0].push_state(draining=True, token="turned")
    await fake.until(lambda: engines[0].num_unauthorized == 1)
    assert not gateway.record(engines[0]).drain_acknowledged
    gateway.gateway.control.apply_catalog(fake.catalog_of(*engines[:2], engine_token="turned"))
    await fake.until(lambda: engines[0].num_drained == 1)
    await fake.until(lambda: gateway.record(engines[0]).drain_acknowledged)


async def test_the_last_engine_stays_in_use_until_another_one_can_replace_it(engines, gateways, fake) -> None:
    gateway = await gateways(engines[0], handover_timeout_s=30.0)
    await engines[0].push_state(draining=True)
    await fake.until(lambda: gateway.record(engines[0]).leaving)
    assert (await gateway.chat()).status == 200
    assert engines[0].num_drained == 0
    gateway.gateway.control.apply_catalog(fake.catalog_of(*engines[:2]))
    await fake.until(lambda: engines[0].num_drained == 1)
    assert (await gateway.chat()).status == 200
    assert num_served(engines) == [1, 1, 0]


async def test_an_engine_that_is_not_replaced_is_draining_after_the_timeout(engines, gateways, fake) -> None:
    gateway = await gateways(engines[0], handover_timeout_s=0.05)
    await engines[0].push_state(draining=True)
    await fake.until(lambda: engines[0].num_drained == 1)
    reply = await gateway.chat()
    assert (reply.status, reply.error["code"]) == (503, "model_not_ready")


async def test_deleting_a_deployment_closes_the_state_streams_of_its_engines(engines, gateways, fake) -> None:
    gateway = await gateways(engines[0], handover_timeout_s=30.0)
    await engines[0].push_state(draining=True)
    await fake.until(lambda: gateway.record(engines[0]).leaving)
    gateway.gateway.control.apply_catalog(Catalog())
    await fake.until(lambda: not engines[0]._streams)


async def test_a_terminating_endpoint_of_a_static_catalogue_is_draining_at_once(engines, gateways, fake) -> None:
    gateway = await gateways(engines[0], handover_timeout_s=30.0)
    catalog = fake.catalog_of(engines[0])
    catalog.models[0].endpoints[0] = msgspec.structs.replace(engines[0].endpoint, terminating=True)
    gateway.gateway.control.apply_catalog(catalog)
    assert (await gateway.chat()).status == 503
    await engines[0].push_state(draining=True)
    await fake.until(lambda: engines[0].num_drained == 1)


@pytest.mark.parametrize("code", ["draining", "not_ready"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_accepts_no_requests_costs_no_attempt(engines, gateways, fake, code, stream) -> None:
    gateway = await gateways(*engines, max_attempts=1)
    for engine in engines[:2]:
        engine.behaviour = fake.refuses(503, code=code, message="not here")
    for _ in range(3):
        assert (await gateway.chat(stream=stream)).status == 200
    assert num_served(engines)[2] == 3
    assert max(num_served(engines)[:2]) <= 1, "one refusal must suffice"
    assert gateway.gateway.control.brain.recovery.ejection(gateway.record(engines[0])).num_failures == 0


async def test_an_engine_that_restarts_is_used_again(engines, gateways, fake) -> None:
    gateway = await gateways(engines[0], reconnect_base_s=0.01, reconnect_max_s=0.05, outage_wait_s=10.0)
    engines[0].behaviours.append(fake.refuses(503, code="draining", message="going"))
    reply = asyncio.create_task(gateway.chat())
    await fake.until(lambda: gateway.record(engines[0]).draining)
    await engines[0].kill()
    await engines[0].start()
    assert (await reply).status == 200


async def test_an_engine_that_restarts_during_its_handover_is_used_again(engines, gateways, fake) -> None:
    gateway = await gateways(engines[0], reconnect_base_s=0.01, reconnect_max_s=0.05, handover_timeout_s=30.0)
    handovers = gateway.gateway.control._streams._drain_acknowledgements
    await engines[0].push_state(draining=True)
    await fake.until(lambda: handovers._under_way)
    await engines[0].kill()
    engines[0].draining = False
    await engines[0].start()
    await fake.until(lambda: not handovers._under_way)
    assert not gateway.record(engines[0]).draining
    assert (await gateway.chat()).status == 200
    assert engines[0].num_drained == 0


@pytest.mark.layouts
async def test_requests_wait_for_the_only_engine_to_return(engines, gateways, fake) -> None:
    gateway = await gateways(engines[0], reconnect_base_s=0.01, reconnect_max_s=0.05, outage_wait_s=10.0)
    await engines[0].kill()
    await fake.until(lambda: gateway.record(engines[0]).unreachable)
    waiting = [asyncio.create_task(gateway.chat(stream=stream)) for stream in (False, True)]
    await asyncio.sleep(0.1)
    assert not any(task.done() for task in waiting)
    await engines[0].start()
    assert [(await task).status for task in waiting] == [200, 200]


async def test_a_long_outage_is_a_503_at_once(engines, gateways, fake) -> None:
    gateway = await gateways(engines[0], reconnect_base_s=0.01, outage_wait_s=0.2)
    await engines[0].kill()
    await fake.until(lambda: gateway.record(engines[0]).unreachable)
    assert (await gateway.chat()).status == 503
    took_s = []
    for _ in range(10):
        asked_at = time.monotonic()
        assert (await gateway.chat()).status == 503
        took_s.append(time.monotonic() - asked_at)
    assert min(took_s) < 0.15, "the refusal must come at once"


async def test_requests_wait_for_an_engine_that_its_platform_reports_as_ready(engines, gateways, fake) -> None:
    release = engines[0].hold_state()
    catalog = fake.catalog_of(engines[0])
    catalog.models[0].endpoints[0] = msgspec.structs.replace(engines[0].endpoint, probed_ready=True)
    gateway = await gateways(engines[0], wait=False, catalog=catalog, outage_wait_s=10.0)
    reply = asyncio.create_task(gateway.chat())
    await asyncio.sleep(0.1)
    assert not reply.done()
    release.set()
    assert (await reply).status == 200


async def test_a_pod_that_its_platform_reports_as_ready_is_contacted_without_delay(engines, gateways, fake) -> None:
    await engines[0].kill()
    gateway = await gateways(engines[0], wait=False, reconnect_base_s=30.0, reconnect_max_s=60.0)
    await fake.until(lambda: gateway.record(engines[0]).unreachable)
    await engines[0].start()
    catalog = fake.catalog_of(engines[0])
    catalog.models[0].endpoints[0] = msgspec.structs.replace(engines[0].endpoint, probed_ready=True)
    gateway.gateway.control.apply_catalog(catalog)
    await gateway.know(engines[0])


# -- the brain in a cluster --------------------------------------------------------------------------------------------


def cluster_brain(**fields: bool) -> LocalBrain:
    endpoints = [Endpoint(id="a", data_url="http://a:1", control_url="http://a:2", **fields)]
    brain = LocalBrain(RoutingConfig(outage_wait_s=0.0), keeps_terminating=True)
    brain.observer.apply_catalog(Catalog(models=[CatalogModel(deployment="d", name="m", endpoints=endpoints)]))
    return brain


async def test_a_terminating_pod_is_the_last_resort_until_it_is_draining() -> None:
    brain = cluster_brain(terminating=True)
    brain.observer.observe("a", StateFrame(sequence=1, snapshot=True, max_model_len=100))
    assert (await brain.choose(await brain.find("m"), frozenset(), RoutingRequest(1))).endpoint_id == "a"
    brain.observer.drain("a")
    with pytest.raises(PagemillError):
        await brain.find("m")


async def test_no_queue_for_a_deployment_without_weight() -> None:
    endpoints = [Endpoint(id="a", data_url="http://a:1", control_url="http://a:2")]
    brain = LocalBrain(RoutingConfig(outage_wait_s=3600.0))
    brain.observer.apply_catalog(
        Catalog(models=[CatalogModel(deployment="d", name="m", weight=0, endpoints=endpoints)])
    )
    brain.observer.observe("a", StateFrame(sequence=1, snapshot=True, max_model_len=100))
    async with asyncio.timeout(WAIT_LIMIT_S):
        with pytest.raises(PagemillError, match="routing weight is 0"):
            await brain.find("m")


async def test_a_request_that_waits_for_a_deleted_deployment_is_refused_at_once() -> None:
    endpoints = [Endpoint(id="a", data_url="http://a:1", control_url="http://a:2", probed_ready=True)]
    brain = LocalBrain(RoutingConfig(outage_wait_s=3600.0))
    brain.observer.apply_catalog(Catalog(models=[CatalogModel(deployment="d", name="m", endpoints=endpoints)]))
    waiting = asyncio.create_task(brain.find("m"))
    await asyncio.sleep(0)
    brain.observer.apply_catalog(Catalog())
    async with asyncio.timeout(WAIT_LIMIT_S):
        with pytest.raises(PagemillError) as refusal:
            await waiting
    assert refusal.value.status == 404


async def test_a_terminating_pod_without_reports_is_not_used() -> None:
    brain = cluster_brain(terminating=True)
    brain.observer.observe("a", StateFrame(sequence=1, snapshot=True, max_model_len=100))
    brain.observer.stream_lost("a")
    with pytest.raises(PagemillError):
        await brain.find("m")


async def test_a_change_wakes_all_waiting_requests() -> None:
    changes, state = ChangeNotifier(), []
    waiting = [asyncio.create_task(changes.wait_until(lambda: bool(state), 5)) for _ in range(3)]
    await asyncio.sleep(0)
    changes.publish()
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    state.append(1)
    changes.publish()
    assert [await task for task in waiting] == [True] * 3
    assert not await ChangeNotifier().wait_until(lambda: False, 0.01)


async def test_a_request_whose_engine_does_not_listen_waits_for_the_next_report() -> None:
    """A container that restarts costs each of its requests one attempt, not all attempts within a moment."""
    clock = [0.0]
    endpoints = [Endpoint(id="a", data_url="http://a:1", control_url="http://a:2")]
    brain = LocalBrain(RoutingConfig(outage_wait_s=3600.0), clock=lambda: clock[0])
    brain.observer.apply_catalog(Catalog(models=[CatalogModel(deployment="d", name="m", endpoints=endpoints)]))
    brain.observer.observe("a", StateFrame(sequence=1, snapshot=True, max_model_len=100))
    target = await brain.find("m")
    brain.failed(await brain.choose(target, frozenset(), RoutingRequest(1)), "unreachable")
    retry = asyncio.create_task(brain.choose(target, frozenset({"a"}), RoutingRequest(1)))
    await asyncio.sleep(0)
    assert not retry.done()
    brain.observer.observe("a", StateFrame(sequence=1, snapshot=True, max_model_len=100))
    assert (await retry).endpoint_id == "a"


async def test_requests_wait_for_an_engine_that_stopped_before_its_first_report() -> None:
    endpoints = [Endpoint(id="a", data_url="http://a:1", control_url="http://a:2", probed_ready=True)]
    brain = LocalBrain(RoutingConfig(outage_wait_s=3600.0))
    brain.observer.apply_catalog(Catalog(models=[CatalogModel(deployment="d", name="m", endpoints=endpoints)]))
    brain.observer.unreachable("a")
    waiting = asyncio.create_task(brain.find("m"))
    await asyncio.sleep(0)
    assert not waiting.done()
    brain.observer.observe("a", StateFrame(sequence=1, snapshot=True, max_model_len=100))
    assert (await waiting).model == "m"
