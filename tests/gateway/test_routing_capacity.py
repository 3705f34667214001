"""Routing with the queue: cached tokens need no capacity and cost nothing, and each decision counts once."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import msgspec
import pytest
from hand_clock import Clock

from pagemill_protocol import hashes
from pagemill_protocol.catalog import Catalog, CatalogModel, Endpoint
from pagemill_protocol.report.state import Digests, EngineLoad, StateFrame, StepTimeParams
from pagemill_routing.admission.output_tokens import PRIOR_TOKENS
from pagemill_routing.brain.brain import LocalBrain
from pagemill_routing.brain.interface import Assignment, CompletedRequest, QueueTicket, RoutingRequest
from pagemill_routing.config import RoutingConfig

BLOCK, CHUNK = 16, 64
FAST = StepTimeParams(knots_tokens=[1, 64, 512], knot_ms=[6.0, 8.0, 22.0])
SLOW = StepTimeParams(knots_tokens=[1, 64, 512], knot_ms=[600.0, 800.0, 2200.0])


def ask_of(name: int, num_tokens: int = 640) -> RoutingRequest:
    token_ids = [name] * num_tokens
    return RoutingRequest(num_tokens, tuple(hashes.block_hashes(b"r" * 16, token_ids, CHUNK)), CHUNK)


def frame(
    sequence: int = 1,
    *,
    active: int = 0,
    slots: int = 100,
    fast: bool = True,
    cached: tuple[RoutingRequest, ...] = (),
    **fields: Any,
) -> StateFrame:
    load = EngineLoad(
        num_kv_bytes_total=60,
        num_kv_bytes_active=active,
        num_requests_running=1 if active else 0,
        num_tokens_running=active * BLOCK,
    )
    known: dict[str, Any] = {"digests": Digests(weights="w", tokenizer_bundle="t")}
    return StateFrame(
        sequence=sequence,
        snapshot=sequence == 1,
        load=load,
        block_size=BLOCK,
        max_model_len=4096,
        max_num_seqs=slots,
        step_time=FAST if fast else SLOW,
        prefixes_added=[chunk for each in cached for chunk in each.prefix_chunks],
        **known | fields,
    )


class World:
    def __init__(self, **pods: StateFrame) -> None:
        self.clock = Clock()
        self.brain = LocalBrain(RoutingConfig(), clock=self.clock, rng=random.Random(1))
        endpoints = [Endpoint(id=each, data_url=f"http://{each}:1", control_url=f"http://{each}:2") for each in pods]
        self.brain.observer.apply_catalog(Catalog(models=[CatalogModel(deployment="d", name="m", endpoints=endpoints)]))
        for name, first in pods.items():
            self.brain.observer.observe(name, first)

    def choose(self, routing_request: RoutingRequest, **ticket: Any) -> asyncio.Task[Assignment]:
        wanted = QueueTicket(**{"max_tokens": 20, "arrived_at": self.clock.now} | ticket)
        question = self.brain.choose(self.brain.resolve("m"), frozenset(), routing_request, ticket=wanted)
        return asyncio.ensure_future(question)

    def record(self, name: str):
        return self.brain.registry.endpoints[name]


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_only_blocks_that_are_not_cached_need_capacity_and_are_reserved() -> None:
    routing_request = ask_of(1)
    world = World(cold=frame(active=45), warm=frame(active=45, cached=(routing_request,)))
    choice = await world.choose(routing_request)
    assert (choice.endpoint_id, choice.predicted_cached_tokens) == ("warm", 576)
    # One prefix chunk of the prompt is computed because its last token always is; 20 output tokens need two blocks.
    assert world.record("warm").reserved.num_bytes == CHUNK // BLOCK + 2
    other = world.choose(ask_of(2))
    await settle()
    assert not other.done(), "42 blocks must not fit on any engine"
    other.cancel()


async def test_the_policy_chooses_among_engines_with_capacity() -> None:
    routing_request = ask_of(1)
    world = World(a=frame(fast=False), b=frame(fast=False), full=frame(active=1, slots=1, cached=(routing_request,)))
    choice = await world.choose(routing_request)
    assert choice.endpoint_id in "ab", "without the check, the policy would choose the full engine"
    assert (choice.policy, choice.predicted_cached_tokens) == ("Cost", 0)
    (decision,) = world.brain.placement.decisions.latest(1)
    assert {each["endpoint"] for each in decision["candidates"]} == {"a", "b"}


async def test_every_account_counts_a_decision_once_and_releases_it() -> None:
    for end in ("finished", "failed"):
        world = World(a=frame())
        choice = await world.choose(ask_of(1), num_sequences=3)
        record, predictions = world.record("a"), world.brain.placement.predictions
        assert (record.in_flight, len(record.reserved), record.dispatches.num_open) == (1, 1, 1)
        assert (record.reserved.num_sequences, record.dispatches.num_unreported_tokens) == (3, 640)
        assert len(predictions) == 10
        if end == "finished":
            world.brain.finished(choice, CompletedRequest(60))
        else:
            world.brain.failed(choice, "broken")
            assert len(predictions) == 0
        world.brain.finished(choice, CompletedRequest(60))
        assert (record.in_flight, len(record.reserved), record.dispatches.num_open) == (0, 0, 0)
        assert (record.reserved.num_bytes, record.dispatches.num_unreported_tokens) == (0, 0)


async def test_no_prefix_is_expected_from_a_slot_given_to_a_client_that_left() -> None:
    world = World(a=frame(slots=1))
    running = await world.choose(ask_of(1))
    waiting = world.choose(ask_of(2))
    await settle()
    world.brain.finished(running)
    waiting.cancel()  # the slot is assigned, but the task has not run yet
    await settle()
    assert waiting.cancelled()
    assert not any(each in world.brain.placement.predictions.pods for each in ask_of(2).prefix_chunks)


@pytest.mark.parametrize(("has_token", "num_left"), [(False, 0), (True, 10)])
async def test_no_prefix_is_expected_from_a_client_that_left_before_its_first_token(
    has_token: bool, num_left: int
) -> None:
    world = World(a=frame())
    choice = await world.choose(ask_of(1))
    world.brain.accepted(choice)
    if has_token:
        world.brain.started(choice)
    world.brain.finished(choice)
    assert len(world.brain.placement.predictions) == num_left, "a report will contain the computed prefix"


async def test_no_prefix_is_expected_on_engines_without_a_prefix_cache() -> None:
    """Another engine keeps prefixes, and the prompt is hashed by its scheme."""
    forgets = Digests(weights="w", tokenizer_bundle="t", hash_version=hashes.NO_HASHES)
    world = World(forgetful=frame(digests=forgets), caching=frame(fast=False))
    choices = [await world.choose(ask_of(1, 320)) for _ in range(2)]
    assert [each.endpoint_id for each in choices] == ["forgetful", "forgetful"], (
        "the engine without a prefix cache is faster"
    )
    assert [each.predicted_cached_tokens for each in choices] == [0, 0]
    assert len(world.brain.placement.predictions) == 0


async def test_the_next_request_reserves_the_learned_length() -> None:
    world = World(a=frame())
    blocks = []
    for number in range(12):
        choice = await world.choose(ask_of(number, 64), max_tokens=None)
        blocks.append(world.record("a").reserved.num_bytes)
        world.brain.finished(choice, CompletedRequest(BLOCK))
    assert blocks[0] == 4 + PRIOR_TOKENS // BLOCK
    assert blocks[-1] == 4 + 1


async def test_an_expected_prefix_without_a_report_expires() -> None:
    world, routing_request = World(a=frame()), ask_of(1, 320)
    first = await world.choose(routing_request)
    world.brain.started(first)
    found = []
    for _ in range(2):
        world.clock.now += 1.2
        choice = await world.choose(routing_request)
        found.append((choice.predicted_cached_tokens, choice.believed))
        world.brain.finished(choice, CompletedRequest(1))
    assert found == [(256, True), (0, True)]


async def test_on_silent_pods_neither_old_load_nor_old_prefixes_count() -> None:
    routing_request = ask_of(1, 128)
    load = EngineLoad(num_requests_waiting=50, num_tokens_waiting=50_000, num_kv_bytes_total=60)
    world = World(loaded=msgspec.structs.replace(frame(cached=(routing_request,)), load=load), idle=frame())
    received = [await world.choose(ask_of(2, 128)) for _ in range(2)]
    assert {each.endpoint_id for each in received} == {"idle"}
    for each in received:
        world.brain.finished(each, CompletedRequest(20))
    world.clock.now += 100
    unheard = [await world.choose(routing_request) for _ in range(6)]
    assert Counter(each.endpoint_id for each in unheard) == {"loaded": 3, "idle": 3}, (
        "only this gateway's own requests count"
    )
    assert {(each.policy, each.believed, each.predicted_cached_tokens) for each in unheard} == {("Cost", False, 0)}


async def test_keys_are_charged_for_the_computed_tokens() -> None:
    """Of two keys with equal requests, the one whose prompts are cached gets more turns in proportion."""
    asks = {"cached": ask_of(1), "cold": ask_of(2)}
    world = World(a=frame(slots=1, cached=(asks["cached"],)))
    running = await world.choose(ask_of(3))
    tasks = {key: [world.choose(routing_request, key=key) for _ in range(60)] for key, routing_request in asks.items()}
    await settle()
    turns, known = {"cached": 0, "cold": 0}, set[int]()
    for sequence in range(2, 52):
        world.brain.finished(running, CompletedRequest(20))
        # The engine has evicted the blocks without users.
        world.brain.observer.observe("a", frame(sequence, slots=1, prefixes_removed=list(asks["cold"].prefix_chunks)))
        await settle()
        ((key, running),) = (
            (key, task.result())
            for key in asks
            for task in tasks[key]
            if task.done() and task.result().decision not in known
        )
        known.add(running.decision)
        turns[key] += 1
    # A turn costs 84 tokens or 660, as long as no part of the cold prompt is expected in the cache.
    assert turns["cached"] >= 3 * turns["cold"] > 0
    for task in (*tasks["cached"], *tasks["cold"]):
        task.cancel()


async def test_a_report_counts_each_sequence_of_a_request() -> None:
    world = World(a=frame())
    await world.choose(ask_of(1, 100), num_sequences=4)
    await world.choose(ask_of(2, 100))
    record = world.record("a")
    world.brain.observer.observe("a", frame(2, active=1))
    assert record.dispatches.num_unreported == 2, "one sequence of five has arrived: both requests may be on their way"
    load = EngineLoad(num_requests_running=4, num_kv_bytes_total=60)
    world.brain.observer.observe("a", msgspec.structs.replace(frame(3), load=load))
    assert (record.dispatches.num_unreported, record.dispatches.num_unreported_tokens) == (1, 100)
