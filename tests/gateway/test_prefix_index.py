"""The index of cached prefixes always equals the engines' own sets; expected prefixes are kept separately."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import num_examples
from pagemill_engine.ipc.messages import PrefixEvents
from pagemill_engine.kv.manager import CacheManager
from pagemill_engine.kv.prefix_cache import PrefixCache
from pagemill_engine.server.phases.state_stream import StatePublisher
from pagemill_protocol import hashes
from pagemill_protocol.catalog import Catalog, CatalogModel, Endpoint
from pagemill_protocol.frames import StateDecoder
from pagemill_protocol.report.cache_kinds import CacheKind, chunk_blocks, further_chunk_blocks, longest_match
from pagemill_protocol.report.state import Digests, EngineLoad, StateFrame
from pagemill_routing.brain.brain import LocalBrain
from pagemill_routing.brain.endpoints.dispatches import EXPIRY_S, Dispatch, Dispatches
from pagemill_routing.brain.endpoints.reports import StateGap
from pagemill_routing.brain.interface import RoutingRequest
from pagemill_routing.brain.placement.predictions import Predictions
from pagemill_routing.brain.placement.prefix_index import PrefixIndex
from pagemill_routing.config import RoutingConfig

PODS = ("a", "b", "c")
BLOCK_SIZE = 4
ROOT = b"r" * 16


class Row:
    """A request as the KV manager sees it."""

    def __init__(self, name: str, token_ids: list[int]) -> None:
        self.request_id = name
        self.token_ids = token_ids
        self.num_computed_tokens = 0
        self.cache_root = ROOT
        self.block_hashes: list[bytes] = []
        self.num_pending_tokens = 0


class Pod:
    """The real KV manager and the real publisher of frames, without a process around them. A window of 0 stands for
    states."""

    def __init__(self, num_blocks: int, windows: tuple[int | None, ...] = (None,)) -> None:
        self.kinds = [CacheKind("a kind", window or None, state=window == 0) for window in windows]
        self.kv = CacheManager([num_blocks] * len(windows), BLOCK_SIZE, kinds=self.kinds)
        self.publisher = StatePublisher(["m"])
        self.rows: list[Row] = []
        self._num_rows = 0
        self._subscription = self.publisher.subscribe()
        self._decoder = StateDecoder()

    def serve(self, token_ids: list[int]) -> None:
        """Compute a prompt as the scheduler would; its blocks stay until they are freed or evicted."""
        self._num_rows += 1
        row = Row(f"r{self._num_rows}", token_ids)
        nothing = [0] * len(self.kinds)
        while not self.kv.has_room(self.kv.needs_to_start(row, self.kv.match(row), len(token_ids)), nothing, None):
            if not self.rows:
                return
            self.evict(0)
        self.kv.start(row, self.kv.match(row), (len(token_ids) // 2, 12))
        due = len(token_ids) - row.num_computed_tokens
        assert self.kv.allocate(row, due) is not None
        self.kv.launch([row.request_id])
        self.kv.commit(row, due)
        self.rows.append(row)

    def evict(self, index: int) -> None:
        if self.rows:
            self.kv.free(self.rows.pop(index % len(self.rows)))

    def fail(self, index: int) -> None:
        """Fail a step of the row, which withdraws its blocks."""
        if self.rows:
            row = self.rows.pop(index % len(self.rows))
            self.kv.invalidate(row)
            self.kv.free(row)

    def frames(self, *, connect: bool = False) -> list[StateFrame]:
        """Return the frames that the stream carries now, in the real encoding; `connect` starts the stream again."""
        added, removed = self.kv.drain_events()
        self.publisher.report(EngineLoad(num_requests_running=len(self.rows)), None, PrefixEvents(added, removed))
        self.publisher._publish()
        if connect:
            self._decoder = StateDecoder()
            self.publisher.unsubscribe(self._subscription)
            self._subscription = self.publisher.subscribe()
            return self._decoder.feed(self._first())
        queued = list(self._subscription._frames)
        self._subscription._frames.clear()
        return [frame for data in queued for frame in self._decoder.feed(data)]

    def _first(self) -> bytes:
        self._subscription._needs_snapshot = False
        return self.publisher.snapshot()

    @property
    def prefix_chunks(self) -> set[bytes]:
        return set(self.kv.snapshot())


def make_brain(*names: str) -> LocalBrain:
    brain = LocalBrain(RoutingConfig(), clock=lambda: 0.0, rng=random.Random(1))
    endpoints = [Endpoint(id=name, data_url=f"http://{name}:1", control_url=f"http://{name}:2") for name in names]
    brain.observer.apply_catalog(Catalog(models=[CatalogModel(deployment="d", name="m", endpoints=endpoints)]))
    return brain


prompts = st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(0, 3)).map(
    lambda parts: [parts[0]] * 12 + [9] * parts[1] + [parts[2]] * 9
)
events = st.one_of(
    st.tuples(st.just("serve"), st.sampled_from(PODS), prompts),
    st.tuples(st.sampled_from(["evict", "fail"]), st.sampled_from(PODS), st.integers(0, 9)),
    st.tuples(st.sampled_from(["report", "connect", "lose", "leave"]), st.sampled_from(PODS), st.just(0)),
)


@settings(deadline=None, max_examples=num_examples(60))
@given(st.lists(events, max_size=60))
def test_after_evictions_losses_and_departures_the_index_equals_the_engines_own_sets(
    steps: list[tuple[str, str, list[int] | int]],
) -> None:
    brain, pods = make_brain(*PODS), {name: Pod(24) for name in PODS}
    for name, pod in pods.items():
        feed(brain, name, pod.frames(connect=True))
    for what, name, argument in steps:
        pod = pods[name]
        if what == "serve" and isinstance(argument, list):
            pod.serve(argument)
        elif what == "report":
            feed(brain, name, pod.frames())
        elif what == "connect":
            feed(brain, name, pod.frames(connect=True))
        elif what == "lose":
            pod.frames()
        elif what == "leave":
            brain.observer.apply_catalog(Catalog())
            brain.observer.apply_catalog(make_brain_catalog())
            for each, other in pods.items():
                feed(brain, each, other.frames(connect=True))
        elif isinstance(argument, int):
            getattr(pod, what)(argument)
    for name, pod in pods.items():
        feed(brain, name, pod.frames())
        feed(brain, name, [])
        if not brain.registry.endpoints[name].reports.connected:
            feed(brain, name, pod.frames(connect=True))
        assert brain.placement.index.prefix_chunks_of(name) == pod.prefix_chunks


def make_brain_catalog() -> Catalog:
    endpoints = [Endpoint(id=name, data_url=f"http://{name}:1", control_url=f"http://{name}:2") for name in PODS]
    return Catalog(models=[CatalogModel(deployment="d", name="m", endpoints=endpoints)])


def feed(brain: LocalBrain, name: str, frames: Sequence[StateFrame]) -> None:
    for frame in frames:
        try:
            brain.observer.observe(name, msgspec.structs.replace(frame, max_model_len=100))
        except StateGap:
            return


table = st.dictionaries(st.sampled_from(PODS), st.sets(st.integers(0, 30)), min_size=1)


@given(st.lists(table, min_size=1, max_size=6), st.lists(st.integers(0, 30), max_size=12))
def test_depth_is_the_number_of_leading_prefix_chunks_that_a_pod_has(
    states: list[dict[str, set[int]]], prompt: list[int]
) -> None:
    index = PrefixIndex()
    truth: dict[str, set[int]] = {}
    for state in states:
        for name, prefix_chunks in state.items():
            truth[name] = prefix_chunks
            index.snapshot(name, [bytes([each]) for each in prefix_chunks])
    bits = {name: index.bit(name) for name in truth}
    found = index.depths([bytes([each]) for each in prompt], sum(bits.values()), {})
    for name, prefix_chunks in truth.items():
        depth = next((place for place, each in enumerate(prompt) if each not in prefix_chunks), len(prompt))
        assert found.get(bits[name], 0) == depth


def test_the_slots_of_removed_pods_are_cleared_and_reused() -> None:
    index = PrefixIndex()
    index.snapshot("stays", [b"s"])
    for turn in range(200):
        index.snapshot(f"pod-{turn}", [f"{turn}-{each}".encode() for each in range(50)])
        index.forget(f"pod-{turn}")
    for _ in range(20):
        index.add("stays", [])
    assert len(index) == 1
    index.snapshot("new", [b"s"])
    assert index.bit("new") < 2**20
    assert index.prefix_chunks_of("stays") == index.prefix_chunks_of("new") == {b"s"}


def test_a_hundred_pods_of_8192_prefix_chunks_need_about_a_hundred_bytes_per_chunk() -> None:
    """Measured with ten pods: the keys and the table. The sets of single pods are shared integers."""
    index = PrefixIndex()
    for pod in range(10):
        own = [(pod * 8192 + each).to_bytes(16, "big") for each in range(8192)]
        index.snapshot(f"pod-{pod}", own)
    assert len(index) == 10 * 8192
    keys = sum(map(sys.getsizeof, index._pods))
    sets = sum(map(sys.getsizeof, {id(mask): mask for mask in index._pods.values()}.values()))
    assert (sys.getsizeof(index._pods) + keys + sets) / len(index) < 120


def test_predictions_are_tagged_dropped_with_their_request_and_replaced_by_reports() -> None:
    predictions = Predictions()
    predictions.expect(1, 1, [b"x", b"y"])
    predictions.expect(2, 1, [b"y", b"z"])
    predictions.expect(3, 2, [b"x"])
    assert predictions.pods == {b"x": 3, b"y": 1, b"z": 1}
    predictions.drop(1)
    assert predictions.pods == {b"x": 2, b"z": 1}
    predictions.reported(1, [b"z", b"unknown"])
    assert predictions.pods == {b"x": 2}
    predictions.computed(3, 10.0)
    predictions.expire(10.0 + EXPIRY_S - 0.01)
    assert predictions.pods == {b"x": 2}
    predictions.expire(10.0 + EXPIRY_S)
    assert not predictions.pods
    predictions.drop(2)
    assert not predictions._decisions


def test_only_the_requests_that_a_report_does_not_include_are_added_to_it() -> None:
    dispatches = Dispatches()
    for number in range(1, 6):
        dispatches.sent(number, Dispatch(10**number))
    dispatches.reported(2)
    assert (dispatches.num_unreported, dispatches.num_unreported_tokens) == (2, 110_000)
    dispatches.sent(6, Dispatch(7))
    assert dispatches.num_unreported_tokens == 110_007
    dispatches.computed(5)
    dispatches.ended(1)
    assert (dispatches.num_unreported, dispatches.num_unreported_tokens) == (2, 10_007)
    dispatches.reported(-1)
    assert (dispatches.num_unreported, dispatches.num_unreported_tokens) == (0, 0)
    for number in range(1, 7):
        dispatches.ended(number)
    assert (dispatches.num_open, dispatches.num_uncomputed, dispatches.num_uncomputed_tokens) == (0, 0, 0)


async def test_a_dispatched_prefix_counts_as_cached_on_its_engine_until_the_request_fails() -> None:
    brain = make_brain(*PODS)
    for name in PODS:
        brain.observer.observe(
            name, StateFrame(sequence=1, snapshot=True, max_model_len=4096, digests=Digests(weights="w"))
        )
    token_ids = list(range(640))
    prefix_chunks = tuple(hashes.block_hashes(ROOT, token_ids, 64))
    routing_request = RoutingRequest(640, prefix_chunks, 64)
    first = await brain.choose(brain.resolve("m"), frozenset(), routing_request)
    assert first.predicted_cached_tokens == 0
    choices = [await brain.choose(brain.resolve("m"), frozenset(), routing_request) for _ in range(5)]
    retry = [each for each in choices if each.endpoint_id == first.endpoint_id]
    # The prefix chunk of the last token is never reused.
    assert retry
    assert {each.predicted_cached_tokens for each in retry} == {576}
    index, predictions = brain.placement.index, brain.placement.predictions
    assert len(index) == 0, "only frames may change the index"
    brain.failed(first, "broken")
    assert not any(mask & index.bit(first.endpoint_id) for mask in predictions.pods.values())


def test_a_request_is_computed_from_its_first_token_to_its_end() -> None:
    dispatches = Dispatches()
    dispatches.sent(1, Dispatch(10, num_sequences=3))
    assert not dispatches.is_computed(1)
    dispatches.computed(1)
    assert dispatches.is_computed(1)
    dispatches.ended(1)
    assert not dispatches.is_computed(1)


@pytest.mark.parametrize(
    "windows", [(None, 9), (None, 17, 5), (13,), (6, 1), (None, 0), (None, 9, 0), (5, 0), (0,)], ids=str
)
def test_the_index_finds_behind_windows_and_states_what_the_engine_finds(windows: tuple[int | None, ...]) -> None:
    for seed in range(30):
        found = predictions_and_hits(seed, windows, ["serve", "serve", "serve", "evict", "fail"])
        assert all(predicted == hit for predicted, hit in found)


@pytest.fixture
def large_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first kind be reported as that of a large cache is: two blocks in one chunk."""
    monkeypatch.setattr(hashes, "MAX_FINE_BLOCKS", 0)
    monkeypatch.setattr(hashes, "PREFIX_CHUNK_TOKENS", 2 * BLOCK_SIZE)


@pytest.mark.parametrize("windows", [(None, 9), (None, 17, 5), (None, 0)], ids=str)
def test_large_caches_report_a_part_of_their_blocks_and_are_predicted_as_well(
    windows: tuple[int | None, ...], large_chunks: None
) -> None:
    """Up to chunks of which a block before the last one was evicted alone: its request computed it a second time."""
    found = [each for seed in range(30) for each in predictions_and_hits(seed, windows, ["serve", "serve", "evict"])]
    wrong = sum(predicted != hit for predicted, hit in found)
    assert wrong < 0.003 * len(found)


def test_a_block_that_only_a_window_has_is_not_reported(large_chunks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that rule the test above fails: the end of a full kind's chain is evicted before the window's."""
    monkeypatch.setattr(PrefixCache, "show_blocks_in", lambda self, further: None)
    found = [each for seed in range(30) for each in predictions_and_hits(seed, (None, 9), ["serve", "serve", "evict"])]
    assert sum(predicted != hit for predicted, hit in found) > 0.01 * len(found)


def predictions_and_hits(seed: int, windows: tuple[int | None, ...], actions: list[str]) -> list[tuple[int, int]]:
    """Return the predicted and the found tokens of prompts at a pod that takes random actions."""
    draw = random.Random(seed)
    pod, index = Pod(draw.randint(16, 40), windows), PrefixIndex()
    index.snapshot("pod", [])
    first_chunks = chunk_blocks(pod.kinds, pod.kv.caches[0].pool.num_blocks, BLOCK_SIZE)
    prompts = [[draw.randint(0, 1)] * draw.randint(4, 20) + [2 + number] * draw.randint(1, 30) for number in range(8)]
    found = []
    for _ in range(40):
        action = draw.choice(actions)
        if action == "serve":
            pod.serve(draw.choice(prompts))
        else:
            getattr(pod, action)(draw.randint(0, 9))
        if draw.random() < 0.5:
            continue
        added, removed = pod.kv.drain_events()
        index.remove("pod", removed)
        index.add("pod", added)
        assert index.prefix_chunks_of("pod") == pod.prefix_chunks
        for tokens in prompts:
            chunks = hashes.block_hashes(ROOT, tokens[: (len(tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE], BLOCK_SIZE)
            bit = index.bit("pod")
            depths = index.depths_of_kinds(chunks, bit, {}, pod.kinds, BLOCK_SIZE, first_chunks)
            found.append((depths.get(bit, 0) * BLOCK_SIZE, pod.kv.match(Row("asks", tokens)).num_tokens))
    assert sum(hit > 0 for _, hit in found) > 5
    return found


def test_pods_with_and_without_windows_are_compared_by_their_own_rules() -> None:
    """A window's chunks were evicted at one pod, the beginning of a full kind at another."""
    kinds = [CacheKind("full"), CacheKind("window", 2 * BLOCK_SIZE + 1)]
    chunks = hashes.block_hashes(ROOT, list(range(6 * BLOCK_SIZE)), BLOCK_SIZE)
    windowed = [hashes.key_of_kind(1, chunk) for chunk in chunks]
    index = PrefixIndex()
    index.snapshot("all", [*chunks, *windowed])
    index.snapshot("window evicted", [*chunks, *windowed[:3]])
    index.snapshot("only the end of the window", [*chunks, *windowed[4:]])
    index.snapshot("beginning evicted", [*chunks[1:], *windowed])
    found = index.depths_of_kinds(chunks, 15, {}, kinds, BLOCK_SIZE)
    names = ("all", "window evicted", "only the end of the window", "beginning evicted")
    assert [found.get(index.bit(name), 0) for name in names] == [6, 3, 6, 0]


@settings(max_examples=num_examples(600), deadline=None)
@given(draw=st.randoms(use_true_random=False), windows=st.lists(st.integers(0, 40), max_size=2), has_full=st.booleans())
def test_the_depth_of_each_pod_is_its_longest_match(draw: random.Random, windows: list[int], has_full: bool) -> None:
    """Whatever is missing at which pod, reported or expected; a window of 0 stands for states."""
    kinds = [CacheKind("full")] * (has_full or not windows)
    kinds += [CacheKind("a kind", window or None, state=window == 0) for window in windows]
    first_chunks = draw.choice([1, 2, 4]) if kinds[0].keeps_all else 1
    chunks = [bytes([place] * 16) for place in range(draw.randint(0, 40))]
    pods, having = 2 ** draw.randint(1, 6) - 1, draw.choice([0.5, 0.9, 0.98])
    index = PrefixIndex()
    for pod in range(6):
        keys = [hashes.key_of_kind(number, chunk) for number in range(len(kinds)) for chunk in chunks]
        index.snapshot(f"pod {pod}", [key for key in keys if draw.random() < having])
    expected = {chunk: draw.getrandbits(6) for chunk in chunks if draw.random() < 0.05}
    found = index.depths_of_kinds(chunks, pods, expected, kinds, BLOCK_SIZE, first_chunks)
    for bit in (index.bit(f"pod {pod}") for pod in range(6)):

        def cached(number: int, place: int, bit: int = bit) -> bool:
            if number == 0 and (place + 1) % first_chunks:
                return True
            key = hashes.key_of_kind(number, chunks[place])
            return index.has(key, bit) or expected.get(chunks[place], 0) & bit != 0

        depth = longest_match(kinds, len(chunks), BLOCK_SIZE, cached) if pods & bit else 0
        assert found.get(bit, 0) == depth


async def test_a_gateway_hashes_prompts_by_the_block_where_windows_are_reported_so(large_chunks: None) -> None:
    pod, brain = Pod(40, (None, 17)), make_brain("a")
    pod.serve(list(range(30)))  # seven blocks: the first kind has three chunks and a block behind them
    await predicts(brain, pod, snapshot=True, expected=0)
    pod.evict(0)
    await predicts(brain, pod, snapshot=False, expected=28)
    assert pod.kv.match(Row("asks", [*range(28), 1, 2])).num_tokens == 28


async def predicts(brain: LocalBrain, pod: Pod, *, snapshot: bool, expected: int) -> None:
    """Let a frame arrive, the first without what is cached, and place a request with the tokens that the pod computes:
    what the first placement expects ends with the second frame."""
    first = chunk_blocks(pod.kinds, 40, BLOCK_SIZE)
    frame = StateFrame(
        sequence=1 if snapshot else 2,
        snapshot=snapshot,
        block_size=BLOCK_SIZE,
        max_model_len=100,
        digests=Digests(weights="w"),
        kinds=pod.kinds,
        prefix_chunk_blocks=first,
        further_chunk_blocks=further_chunk_blocks(pod.kinds, first),
        prefixes_added=[] if snapshot else pod.kv.snapshot(),
    )
    brain.observer.observe("a", frame)
    target = brain.resolve("m")
    assert target.scheme.prefix_chunk_tokens == BLOCK_SIZE < first * BLOCK_SIZE
    prompt = [*range(28), 1, 2]
    chunks = tuple(hashes.block_hashes(ROOT, prompt, BLOCK_SIZE))
    placed = await brain.choose(target, frozenset(), RoutingRequest(len(prompt), chunks, BLOCK_SIZE))
    assert placed.predicted_cached_tokens == expected
    if not snapshot:
        brain.failed(placed, "its predictions end")
        assert not brain.placement.predictions.pods, "all that is cached was reported"
