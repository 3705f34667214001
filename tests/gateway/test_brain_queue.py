"""The brain's queue with a simulated clock: no request is lost or served twice, and engines never get too many."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from itertools import chain

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from queued_world import BLOCK, Pod, World, limits, served, settle, spawn

from examples import num_examples
from pagemill_protocol.catalog import Catalog, Endpoint
from pagemill_protocol.errors import PagemillError
from pagemill_routing.brain.interface import (
    Assignment,
    CompletedRequest,
    FailureKind,
    Probe,
    QueueTicket,
    RetryContext,
    RoutingRequest,
)
from pagemill_routing.brain.placement.requests import PlacementRequest, make_placement_request
from pagemill_routing.brain.queue.deployment_queue import UNKNOWN_WAIT_S


async def test_a_request_for_an_idle_deployment_is_placed_without_yielding() -> None:
    world = World(Pod("a", slots=4, blocks=1000))
    question = world.brain.choose(world.target, frozenset(), RoutingRequest(100))
    with pytest.raises(StopIteration) as answer:
        question.send(None)
    assert answer.value.value.queued_s == 0
    assert world.brain.queues._ticking is None


async def test_a_hundred_requests_on_one_stale_state_exceed_no_engines_slots() -> None:
    pods = [Pod(name, slots=16, blocks=10_000) for name in "abc"]
    world = World(*pods)
    tasks = [world.ask() for _ in range(100)]
    await settle()
    assert Counter(choice.endpoint_id for choice in served(tasks)) == dict.fromkeys("abc", 16)
    assert world.num_waiting == 100 - 48
    done: set[int] = set()
    while len(done) < 100:
        for choice in served(tasks):
            if choice.decision not in done:
                done.add(choice.decision)
                world.leave(choice)
                break
        await settle()
        assert all(world.brain.registry.endpoints[name].in_flight <= 16 for name in "abc")
    assert len({choice.decision for choice in served(tasks)}) == 100


async def test_blocks_are_not_reserved_twice_on_one_stale_state() -> None:
    world = World(Pod("a", slots=1000, blocks=100))
    need_blocks = -(-100 // BLOCK) + -(-20 // BLOCK)
    tasks = [world.ask() for _ in range(100)]
    await settle()
    assert len(served(tasks)) == 100 // need_blocks
    for task in tasks:
        task.cancel()


async def test_capacity_in_a_new_report_is_used_at_once() -> None:
    pod = Pod("a", slots=8, blocks=100)
    pod.inside[-1] = 100 * BLOCK  # another gateway's request
    world = World(pod)
    task = world.ask()
    await settle()
    assert not task.done()
    pod.inside.clear()
    world.report()
    assert (await task).queued_s == 0, "the clock did not advance"


async def test_a_silent_pod_is_used_by_this_gateways_own_counts() -> None:
    world = World(Pod("a", slots=8, blocks=1000))
    world.clock.now += 100
    tasks = [world.ask() for _ in range(20)]
    await settle()
    assert len(served(tasks)) == 8
    for task in tasks:
        task.cancel()


async def test_a_request_that_leaves_the_queue_frees_its_place_at_once() -> None:
    world = World(Pod("a", slots=1, blocks=1000), queue=limits(max_requests=1))
    running = await world.ask()
    waiting = world.ask()
    await settle()
    waiting.cancel()
    await settle()
    assert world.num_waiting == 0
    assert world.brain.queues.outcomes["default/d", "left"] == 1
    following = world.ask()
    await settle()
    world.leave(running)
    assert (await following).endpoint_id == "a"


async def test_a_slot_given_to_a_client_that_leaves_at_that_moment_is_returned() -> None:
    world = World(Pod("a", slots=1, blocks=1000))
    running = await world.ask()
    waiting, following = world.ask(), world.ask()
    await settle()
    world.leave(running)
    waiting.cancel()  # the slot is assigned, but the task has not run yet
    assert (await following).endpoint_id == "a"
    await settle()
    assert waiting.cancelled()
    assert world.brain.registry.endpoints["a"].in_flight == 1


async def test_a_request_beyond_the_queues_bound_is_refused_with_retry_after() -> None:
    world = World(Pod("a", slots=1, blocks=1000), queue=limits(max_requests=2))
    await world.ask()
    waiting = [world.ask(key="k"), world.ask(key="k")]
    await settle()
    with pytest.raises(PagemillError) as refusal:
        await world.ask(key="k")
    assert (refusal.value.status, refusal.value.code) == (429, "queue_full")
    assert refusal.value.retry_after_s == UNKNOWN_WAIT_S
    assert not any(task.done() for task in waiting)
    urgent = world.ask(key="k", priority=-1)
    await settle()
    assert (waiting[0].done(), waiting[1].done(), urgent.done()) == (False, True, False)
    with pytest.raises(PagemillError, match="requests wait already"):
        await waiting[1]
    assert world.brain.queues.outcomes["default/d", "shed"] == 1
    for task in (*waiting, urgent):
        task.cancel()


async def test_a_queue_of_length_zero_accepts_no_request() -> None:
    world = World(Pod("a", slots=1, blocks=1000), queue=limits(max_requests=0))
    await world.ask()
    with pytest.raises(PagemillError) as refusal:
        await world.ask()
    assert refusal.value.status == 429


async def test_a_wait_beyond_the_timeout_ends_with_503_and_counts_all_waits() -> None:
    world = World(Pod("a", slots=1, blocks=1000), queue=limits(timeout_s=10))
    await world.ask()
    first, retry = world.ask(), world.ask(waited_s=8.0)
    await settle()
    await world.pass_time(3)
    with pytest.raises(PagemillError) as refusal:
        await retry
    assert (refusal.value.status, refusal.value.code) == (503, "server_is_overloaded")
    assert refusal.value.retry_after_s is not None
    assert 1 <= refusal.value.retry_after_s <= 120
    assert not first.done()
    await world.pass_time(8)
    with pytest.raises(PagemillError):
        await first
    assert world.brain.queues.outcomes["default/d", "timeout"] == 2


async def test_a_request_that_cannot_meet_its_deadline_is_refused_at_once_with_retry_after() -> None:
    world = World(Pod("a", slots=1, blocks=1000))
    tasks = [world.ask() for _ in range(40)]
    await settle()
    for _ in range(10):  # one request per second
        await world.pass_time(1)
        world.leave(next(choice for choice in served(tasks) if choice.decision in world.brain._open))
        await settle()
    start = world.clock.now
    with pytest.raises(PagemillError) as refusal:
        await world.ask(deadline_at=start + 5)
    assert (refusal.value.status, refusal.value.code) == (503, "deadline_unreachable")
    assert refusal.value.retry_after_s is not None
    assert 15 <= refusal.value.retry_after_s <= 60
    patient, urgent = world.ask(deadline_at=start + 200), world.ask(deadline_at=start + 5, priority=-1)
    await settle()
    assert not patient.done()
    assert not urgent.done(), "no request is before this one"
    for task in (*tasks, patient, urgent):
        task.cancel()


async def test_a_deadline_that_passes_in_the_queue_is_a_504() -> None:
    world = World(Pod("a", slots=1, blocks=1000))
    await world.ask()
    task = world.ask(deadline_at=world.clock.now + 2)
    await settle()
    await world.pass_time(2.5)
    with pytest.raises(PagemillError) as refusal:
        await task
    assert refusal.value.status == 504


async def test_after_two_reroutes_a_request_waits_although_other_engines_report_capacity() -> None:
    world = World(*[Pod(name, slots=8, blocks=1000) for name in "abcde"])
    tried: frozenset[str] = frozenset()
    for num_refusals in range(3):
        ticket = QueueTicket(num_refusals=num_refusals, arrived_at=world.clock.now)
        question = spawn(world.brain.choose(world.target, tried, RoutingRequest(100), ticket=ticket))
        await settle()
        choice = await question
        assert choice.endpoint_id not in tried
        tried |= {choice.endpoint_id}
        world.brain.failed(choice, "refused")
    ticket = QueueTicket(num_refusals=3, paid=True, arrived_at=world.clock.now)
    waiting = spawn(world.brain.choose(world.target, tried, RoutingRequest(100), ticket=ticket))
    await settle()
    assert not waiting.done()
    world.report()
    assert (await waiting).endpoint_id not in tried


async def test_engines_that_refused_are_tried_by_one_request_at_a_time_until_one_accepts() -> None:
    world = World(Pod("a", slots=0, blocks=0))
    world.brain.failed(await world.ask(), "refused")
    tasks = [world.ask() for _ in range(5)]
    await settle()
    assert not served(tasks)
    await world.pass_time(1)
    (probe,) = served(tasks)
    world.brain.accepted(probe)
    world.report()
    await settle()
    assert len(served(tasks)) == 5


async def test_requests_wait_in_the_same_queue_while_the_only_pod_is_missing() -> None:
    world = World(Pod("a", slots=8, blocks=1000), queue=limits(max_requests=3), outage_wait_s=30.0)
    target = world.brain.resolve("m")
    world.brain.observer.unreachable("a")
    finding = asyncio.ensure_future(world.brain.find("m", QueueTicket(num_bytes=70, arrived_at=world.clock.now)))
    placing = spawn(
        world.brain.choose(
            target, frozenset(), RoutingRequest(10), ticket=QueueTicket(num_bytes=30, arrived_at=world.clock.now)
        )
    )
    await settle()
    world.clock.now += 4
    state = world.brain.queues.state("default/d")
    assert (state.num_requests, state.num_bytes, state.oldest_age_s) == (2, 100, 4.0)
    (load,) = world.brain.reader.load()
    queue = load.queue
    assert (queue.num_requests, queue.num_bytes, queue.oldest_s, load.pods.ready) == (2, 100, 4.0, 0)
    pod = world.pods["a"]
    world.brain.observer.observe("a", pod.frame(snapshot=True))
    found = await finding
    assert (found.bundle_digest, found.queued_s) == ("t", 4.0)
    assert (await placing).queued_s == 4.0
    assert world.num_waiting == 0


async def test_a_long_outage_ends_the_wait_of_all_requests() -> None:
    world = World(Pod("a", slots=8, blocks=1000), outage_wait_s=5.0)
    target = world.brain.resolve("m")
    world.brain.observer.unreachable("a")
    waiting = [spawn(world.brain.choose(target, frozenset(), RoutingRequest(10))) for _ in range(3)]
    await settle()
    await world.pass_time(4)
    assert not any(task.done() for task in waiting)
    await world.pass_time(2)
    for task in waiting:
        with pytest.raises(PagemillError, match="went away"):
            await task


async def test_an_outage_may_last_twice_the_usual_start_time() -> None:
    world = World(Pod("a", slots=8, blocks=1000), queue=limits(timeout_s=60.0), outage_wait_s=5.0)
    for took_s, longest_s in ((4.0, 5.0), (4.9, 8.0), (7.0, 8.9), (7.0, 9.8)):
        world.brain.observer.unreachable("a")
        lost_at = world.clock.now
        waiting = spawn(world.brain.choose(world.target, frozenset(), RoutingRequest(10)))
        await settle()
        assert world.brain._outages.wait_left_s(world.brain.registry.deployments["default/d"]) == pytest.approx(
            longest_s
        )
        await world.pass_time(took_s)
        world.brain.observer.observe("a", world.pods["a"].frame(snapshot=True))
        world.leave(await waiting)
        assert world.clock.now == lost_at + took_s


async def test_the_first_request_that_waits_is_reported_at_once() -> None:
    world = World(Pod("a", slots=1, blocks=1000))
    news = world.brain.queues.first_waiter()
    running = await world.ask()
    assert not news.done()
    waiting = world.ask()
    await settle()
    assert news.done()
    world.leave(running)
    await waiting


async def test_answers_longer_than_expected_delay_the_next_turns_of_their_key() -> None:
    world = World(Pod("a", slots=1, blocks=100_000))
    running = await world.ask()
    tasks = {key: [world.ask(key=key, max_tokens=4000) for _ in range(60)] for key in ("wordy", "frugal")}
    await settle()
    tokens: Counter[str] = Counter()
    world.leave(running, None)
    for _ in range(60):
        await settle()
        (key, choice), = [(key, choice) for key in tasks for choice in served(tasks[key])
                          if choice.decision in world.brain._open]  # fmt: skip
        length = 1500 if key == "wordy" else 100
        tokens[key] += 100 + length
        world.clock.now += 1
        world.leave(choice, length)
    assert tokens["wordy"] / tokens["frugal"] < 1.35
    for task in (*tasks["wordy"], *tasks["frugal"]):
        task.cancel()


@settings(max_examples=num_examples(40), deadline=None)
@given(data=st.data())
def test_no_request_is_lost_and_nothing_stays_reserved(data: st.DataObject) -> None:
    asyncio.run(live_through(data))


async def live_through(data: st.DataObject) -> None:
    pods = [Pod(name, slots=data.draw(st.integers(1, 3)), blocks=data.draw(st.integers(5, 40))) for name in "ab"]
    world = World(*pods, queue=limits(max_requests=data.draw(st.integers(0, 5)), timeout_s=20), outage_wait_s=10.0)
    brain, tasks = world.brain, list[asyncio.Task[Assignment]]()
    at_engines: dict[int, Assignment] = {}
    known: set[int] = set()

    async def look() -> None:
        await settle()
        for choice in served(tasks):
            if choice.decision not in known:
                known.add(choice.decision)
                at_engines[choice.decision] = choice
        for pod in pods:
            record = brain.registry.endpoints[pod.name]
            there = [each for each in at_engines.values() if each.endpoint_id == pod.name]
            assert record.in_flight == record.reserved.num_sequences == len(record.reserved) == len(there)
            assert record.dispatches.num_open == len(there)
            assert len(there) <= pod.slots
        assert len(brain._open) == len(at_engines)
        assert world.num_waiting == sum(not task.done() for task in tasks)
        queue = brain.queues._queues.get("default/d")
        assert queue is None or queue.waiting.find_inconsistencies() == []

    actions = ["ask", "ask", "ask", "begin", "finish", "finish", "refuse", "break", "cancel", "report", "time", "lose"]
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(actions))
        if action == "ask":
            deadline_s = data.draw(st.sampled_from([1e9, 1e9, 5.0]))
            tasks.append(
                world.ask(
                    data.draw(st.integers(1, 400)),
                    key=data.draw(st.sampled_from(["x", "y"])),
                    priority=data.draw(st.integers(0, 1)),
                    deadline_at=world.clock.now + deadline_s,
                    num_refusals=data.draw(st.sampled_from([0, 0, 0, 3])),
                )
            )
        elif action in ("begin", "finish", "refuse", "break") and at_engines:
            choice = at_engines[data.draw(st.sampled_from(sorted(at_engines)))]
            if action == "begin":
                world.arrive(choice, data.draw(st.integers(1, 400)))
            else:
                del at_engines[choice.decision]
                world.pods[choice.endpoint_id].inside.pop(choice.decision, None)
                if action == "finish":
                    brain.finished(choice, data.draw(st.none() | st.builds(CompletedRequest, st.integers(1, 500))))
                else:
                    brain.failed(choice, "refused" if action == "refuse" else "broken")
        elif action == "cancel" and tasks:
            data.draw(st.sampled_from(tasks)).cancel()
        elif action == "report":
            world.report()
        elif action == "time":
            world.clock.now += data.draw(st.sampled_from([0.1, 1.0, 6.0]))
            brain.queues.tick()
        elif action == "lose":
            brain.observer.unreachable(data.draw(st.sampled_from("ab")))
        await look()

    while at_engines or world.num_waiting:
        for choice in list(at_engines.values()):
            del at_engines[choice.decision]
            world.leave(choice)
        world.clock.now += 1.0
        world.report()
        brain.queues.tick()
        await look()
    assert all(task.done() for task in tasks)
    outcomes = [task.cancelled() or task.exception() is None or isinstance(task.exception(), PagemillError)
                for task in tasks]  # fmt: skip
    assert all(outcomes)
    for pod in pods:
        record = brain.registry.endpoints[pod.name]
        assert (record.in_flight, record.reserved.num_bytes, record.reserved.num_unreported_bytes) == (0, 0, 0)


# -- continued answers -------------------------------------------------------------------------------------------------


async def test_a_lost_answer_is_released_and_reserved_once_on_another_engine() -> None:
    world = World(*(Pod(name, slots=8, blocks=1000) for name in "ab"))
    choice = await world.ask(prompt=100)
    world.arrive(choice, 100)
    before = world.brain.registry.endpoints[choice.endpoint_id]
    num_bytes = before.reserved.num_bytes
    retry = world.kill(choice, num_tokens=7)
    assert (before.in_flight, len(before.reserved), before.reserved.num_bytes) == (0, 0, 0)
    second = await world.ask_again(retry)
    after = world.brain.registry.endpoints[second.endpoint_id]
    assert second.endpoint_id != choice.endpoint_id
    assert after.reserved.num_bytes == num_bytes, "prompt and whole answer count as before"
    assert after.dispatches.num_unreported_tokens == 107, "all of it is computed before the next token"
    world.arrive(second, 107)
    world.leave(second)
    for record in (before, after):
        assert (record.in_flight, record.reserved.num_bytes, record.reserved.num_sequences) == (0, 0, 0)
        assert record.dispatches.num_open == 0
    assert world.brain._open == {}


async def test_a_lost_answer_gets_the_next_slot_before_requests_that_have_not_begun() -> None:
    world = World(*(Pod(name, slots=1, blocks=1000) for name in "ab"))
    running = [await world.ask(key="busy") for _ in range(2)]
    for choice in running:
        world.arrive(choice, 100)
    crowd = [world.ask(key=key) for key in ("busy", "other") for _ in range(20)]
    await settle()
    lost, left = running
    continued = world.ask_again(world.kill(lost, 5), key="busy")
    await settle()
    assert not continued.done()
    world.leave(left)
    assert (await continued).endpoint_id == left.endpoint_id
    assert served(crowd) == []
    for task in crowd:
        task.cancel()


@pytest.mark.parametrize("kind", ["lost", "declined"])
async def test_a_lost_answer_waits_beyond_the_queues_bound_and_keeps_its_place(
    kind: FailureKind,
) -> None:
    """The same holds after an engine that is shutting down has refused to continue it."""
    for max_requests in (0, 1):
        world = World(*(Pod(name, slots=1, blocks=1000) for name in "ab"), queue=limits(max_requests=max_requests))
        lost, left = [await world.ask() for _ in range(2)]
        continued = world.ask_again(world.kill(lost, 5)._replace(kind=kind), priority=5)
        await settle()
        with pytest.raises(PagemillError, match="requests wait already"):
            await world.ask(priority=-1)
        assert not continued.done()
        world.leave(left)
        assert (await continued).endpoint_id == left.endpoint_id


async def test_all_waits_of_a_lost_answer_together_are_limited_by_the_queues_timeout() -> None:
    queue = limits(max_requests=0, timeout_s=10)
    world = World(*(Pod(name, slots=1, blocks=1000) for name in "ab"), queue=queue)
    lost, _ = [await world.ask() for _ in range(2)]
    continued = world.ask_again(world.kill(lost, 5), waited_s=7.0)
    await settle()
    await world.pass_time(2)
    assert not continued.done()
    await world.pass_time(2)
    with pytest.raises(PagemillError) as refusal:
        await continued
    assert (refusal.value.status, refusal.value.code) == (503, "server_is_overloaded")
    assert world.num_waiting == 0


async def test_a_key_with_ten_times_the_requests_gets_the_same_share_of_the_engines() -> None:
    """The lengths of the answers are not known in advance."""
    draw = random.Random(5)
    world = World(*(Pod(name, slots=3, blocks=100_000) for name in "ab"), queue=limits(max_requests=60))
    waiting = {"noisy": 30} | {f"quiet-{number}": 3 for number in range(4)}
    tasks: dict[str, list[asyncio.Task[Assignment]]] = {key: [] for key in waiting}
    tokens, prompts, open_ = (
        Counter[str](),
        dict[asyncio.Task[Assignment], int](),
        list[tuple[str, asyncio.Task[Assignment]]](),
    )
    for _ in range(600):
        for key, count in waiting.items():
            while len(tasks[key]) < count:
                num_tokens = draw.randint(10, 800)
                tasks[key].append(task := world.ask(num_tokens, key=key, max_tokens=400))
                prompts[task] = num_tokens
        await settle()
        for key in tasks:
            open_ += [(key, task) for task in tasks[key] if task.done()]
            tasks[key] = [task for task in tasks[key] if not task.done()]
        world.clock.now += 0.1
        key, task = open_.pop(draw.randrange(len(open_)))
        length = draw.randint(1, 400)
        tokens[key] += prompts[task] + length
        world.leave(task.result(), length)
    shares = list(tokens.values())
    assert sum(shares) ** 2 / (len(waiting) * sum(share**2 for share in shares)) >= 0.95, tokens
    for task in chain.from_iterable(tasks.values()):
        task.cancel()


async def test_a_request_that_waits_for_engines_of_its_weights_blocks_no_other() -> None:
    world = World(Pod("a", slots=1, blocks=1000, weights="old"), Pod("b", slots=1, blocks=1000, weights="old"))
    running = [await world.ask() for _ in range(2)]
    world.pods["c"] = Pod("c", slots=1, blocks=1000, weights="new")
    endpoints = [*world.endpoints, Endpoint(id="c", data_url="http://c:1", control_url="http://c:2")]
    world.brain.observer.apply_catalog(Catalog(models=[msgspec.structs.replace(world.model, endpoints=endpoints)]))
    continued = world.ask_again(world.kill(running[0], 5))
    await settle()
    fresh = world.ask()
    await settle()
    assert not continued.done()
    world.brain.observer.observe("c", world.pods["c"].frame())
    assert (await fresh).endpoint_id == "c"
    world.leave(running[1])
    assert (await continued).endpoint_id == running[1].endpoint_id


async def test_a_continuation_costs_its_key_nothing_and_its_engine_all_its_tokens() -> None:
    world = World(Pod("a", slots=1, blocks=1000))
    deployment = world.brain.registry.deployments["default/d"]
    ticket = QueueTicket(key="k", max_tokens=20)

    def order(retry: RetryContext | None, probe: Probe = "none") -> PlacementRequest:
        return make_placement_request(deployment, world.target, frozenset(), RoutingRequest(100), ticket, retry, probe)

    first, continued = order(None), order(RetryContext(1, "a", "lost", "w", 10))
    assert (first.work.num_prompt_tokens, continued.work.num_prompt_tokens) == (100, 110)
    assert first.need == continued.need, "the answer is as long as before"
    assert order(RetryContext(1, "a", "lost", "w", 300)).need.num_output_tokens == 301, (
        "the answer is longer than expected"
    )
    assert (first.queue_key, first.group) == ("k", "t")
    assert continued.queue_key != "k"
    assert order(RetryContext(1, "a", "crashed"), "shared").group not in (first.group, continued.group)
    assert order(RetryContext(1, "a", "refused")).queue_key == "k", "a refused request counts like any other"
