"""Optimizations of decisions among many endpoints change no decision: each equals one that is computed directly."""

from __future__ import annotations

import asyncio
import random
from typing import Any
from unittest.mock import patch

from hand_clock import Clock
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from examples import num_examples
from pagemill_protocol.catalog import Catalog, CatalogModel, Endpoint
from pagemill_protocol.report.state import Digests, EngineLoad, StateFrame, StepTimeParams
from pagemill_protocol.report.step_time import StepTimeModel
from pagemill_routing.brain.brain import LocalBrain
from pagemill_routing.brain.endpoints.record import EndpointRecord
from pagemill_routing.brain.interface import Assignment, CompletedRequest, FailureKind, RoutingRequest
from pagemill_routing.brain.placement.candidates import candidate_of
from pagemill_routing.config import RoutingConfig
from pagemill_routing.policies.cost import NEAR_MS, NEAR_SHARE, CostPolicy
from pagemill_routing.policies.cost_table import LEAST_PODS, CostTable
from pagemill_routing.policies.cost_terms import HARM_SHARE, CostBasis, cost_basis_of, cost_terms
from pagemill_routing.policies.policy import Candidate, CandidateList, RequestView, least_busy
from pagemill_routing.policies.report import PodReport
from pagemill_routing.policies.step_time_snapshot import StepTimeSnapshot, take_snapshot

SESSION_MS = 50.0
CHUNK_TOKENS = 64
NOTHING = frozenset[str]()


def test_a_waiting_request_expects_answers_to_end_by_the_tokens_of_a_step() -> None:
    load = EngineLoad(num_requests_running=4, num_kv_bytes_total=100, num_kv_bytes_active=10)
    bases = []
    for sampled in (1.0, 2.0):
        step_time = replace(params(1.0), tokens_per_decode=sampled)
        snapshot = take_snapshot(StepTimeModel.from_params(step_time), 512, 4, 400)
        report = PodReport(load, 16, 512, 4, snapshot)
        bases.append(cost_basis_of(report, snapshot, 0, 0))
    (_, alone, _, _), (_, two, _, _) = cost_terms(bases, [0, 0], 10, 50.0)
    assert alone > 0
    assert abs(alone - 2 * two) < 1e-9
    # What is computed in vain makes steps longer: 15 tokens for 5 requests take as long as for 15 requests.
    model = StepTimeModel.from_params(replace(params(1.0), tokens_per_decode=2.0, computed_per_decode=3.0))
    assert take_snapshot(model, 512, 4, 400).decode_ms == model.predict_ms(15, 400) > model.predict_ms(5, 400)
    assert take_snapshot(model, 512, 4, 400).budget == 500
    drafting = StepTimeModel.from_params(replace(params(1.0), tokens_per_decode=2.0, draft_ms=3.0))
    assert take_snapshot(drafting, 512, 4, 400).decode_ms == model.predict_ms(5, 400) + 3.0


def params(factor: float) -> StepTimeParams:
    return StepTimeParams(
        knots_tokens=[1, 64, 512],
        knot_ms=[6.0 * factor, 8.0 * factor, 22.0 * factor],
        decode_context_ms=1e-4,
        chunk_context_ms=1e-6,
    )


MODELS = [StepTimeModel.from_params(params(1 + number / 50)) for number in range(4)] + [
    StepTimeModel.from_params(
        StepTimeParams(knots_tokens=knots, knot_ms=[5.0 + knot / 30 for knot in knots], decode_context_ms=1e-4)
    )
    for knots in ([1], [1, 8, 32, 128, 300])
]


def cost(
    request: RequestView, candidate: Candidate, report: PodReport, snapshot: StepTimeSnapshot
) -> tuple[float, ...]:
    """Return step, wait, prefill, harm and first token of one candidate, computed term by term."""
    load, budget = report.load, snapshot.budget
    num_running = load.num_requests_running
    num_uncached = max(1, request.num_prompt_tokens - candidate.num_cached_tokens)
    num_ahead = load.num_tokens_waiting + candidate.num_unreported_tokens
    num_full, num_rest = divmod(num_ahead + num_uncached, budget)
    if not num_rest:
        num_full, num_rest = num_full - 1, budget
    products = num_uncached * (num_uncached / 2 + candidate.num_cached_tokens) + num_ahead * num_ahead / 2
    prefill_ms = num_full * snapshot.full_ms + snapshot.step_ms(num_rest, products)
    step_ms = 0.0
    if num_running or num_ahead:
        step_ms = snapshot.full_ms if num_ahead >= budget else snapshot.step_ms(num_ahead)
    wait_ms = 0.0
    num_before = num_running + load.num_requests_waiting + candidate.num_unreported
    answer_ms = request.num_output_tokens * snapshot.decode_ms
    if 0 < report.max_num_seqs <= num_before:
        wait_ms = (num_before + 1 - report.max_num_seqs) * answer_ms / report.max_num_seqs
    missing = (num_uncached + num_ahead) // report.block_size + 1 - (load.num_kv_bytes_total - load.num_kv_bytes_active)
    if num_before and load.num_kv_bytes_active and missing > 0:
        wait_ms = max(wait_ms, missing * answer_ms / load.num_kv_bytes_active)
    token_ms = max(0.0, snapshot.full_ms - snapshot.decode_ms) / budget
    harm_ms = HARM_SHARE * num_running * token_ms * (num_uncached + request.num_output_tokens)
    return step_ms, wait_ms, prefill_ms, harm_ms, step_ms + wait_ms + prefill_ms


def one_by_one(request: RequestView, candidates: list[Candidate]) -> tuple[Candidate, str, list[tuple[float, ...]]]:
    """Return the choice, its reason, and the costs of every candidate."""
    rows = []
    for each in candidates:
        assert each.report is not None
        assert each.report.step_time is not None
        terms = cost(request, each, each.report, each.report.step_time)
        affinity_ms = SESSION_MS if any(other.session for other in candidates) and not each.session else 0.0
        cost_ms = terms[4] + terms[3] + each.adapter_ms + each.eviction_ms + affinity_ms
        rows.append((*terms[:4], each.adapter_ms, terms[4] + each.adapter_ms, each.eviction_ms, affinity_ms, cost_ms))
    best = min(row[-1] for row in rows)
    limit = best + max(NEAR_MS, best * NEAR_SHARE)
    near = [each for each, row in zip(candidates, rows, strict=True) if row[-1] <= limit]
    stays = [each for each, row in zip(candidates, rows, strict=True) if each.session and row[-1] == best]
    near = stays or [each for each in near if not each.session]
    why = "smallest cost" if len(near) == 1 else f"{len(near)} costs nearly equal: fewest requests"
    return least_busy(near), why, rows


@st.composite
def candidates(draw: st.DrawFn) -> Candidate:
    num_running, num_tokens_running = draw(st.integers(0, 60)), draw(st.integers(0, 20000))
    snapshot = take_snapshot(draw(st.sampled_from(MODELS)), 512, num_running, num_tokens_running)
    active = draw(st.integers(0, 1000))
    load = EngineLoad(
        num_requests_running=num_running,
        num_requests_waiting=draw(st.integers(0, 3)),
        num_tokens_running=num_tokens_running,
        num_tokens_waiting=draw(st.sampled_from([0, 0, 0, 312, 412, 3000])),
        num_kv_bytes_total=draw(st.sampled_from([0, 7, 1000])) + active,
        num_kv_bytes_active=active,
    )
    report = PodReport(load, 16, 512, draw(st.sampled_from([0, 8, 64])), snapshot)
    num_unreported, num_tokens = draw(st.sampled_from([(0, 0), (1, 1), (2, 200), (9, 4000)]))
    kept = draw(st.booleans())
    return Candidate(
        "",
        draw(st.integers(0, 9)),
        draw(st.integers(0, 2)),
        draw(st.integers(0, 1000)),
        report,
        True,
        draw(st.sampled_from([0, 0, 0, 64, 512])),
        num_unreported,
        num_tokens,
        False,
        draw(st.sampled_from([0.0, 1.0, 250.0])),
        draw(st.sampled_from([0.0, 40.0])),
        cost_basis_of(report, snapshot, num_unreported, num_tokens) if kept else None,
    )


@settings(deadline=None)
@given(
    drawn=st.lists(candidates(), min_size=1, max_size=20),
    prompt=st.integers(1, 3000),
    output=st.floats(0.0, 500.0),
    session=st.none() | st.integers(0, 19),
    is_for_adapter=st.booleans(),
)
def test_the_choice_its_reason_and_all_costs_equal_those_computed_one_by_one(
    drawn: list[Candidate], prompt: int, output: float, session: int | None, is_for_adapter: bool
) -> None:
    request = RequestView(prompt, output, is_for_adapter=is_for_adapter)
    pods = [replace(each, endpoint_id=str(number), session=number == session) for number, each in enumerate(drawn)]
    if not is_for_adapter:
        pods = [replace(each, adapter_ms=0.0, eviction_ms=0.0) for each in pods]
    decision = CostPolicy(SESSION_MS).choose(request, pods)
    chosen, why, rows = one_by_one(request, pods)
    assert decision.chosen is chosen
    assert decision.why == why
    assert list(decision.rows) == rows


def basis_of(candidate: Candidate) -> CostBasis:
    report = candidate.report
    assert report is not None
    assert report.step_time is not None
    return cost_basis_of(report, report.step_time, candidate.num_unreported, candidate.num_unreported_tokens)


@settings(deadline=None)
@given(
    drawn=st.lists(st.tuples(candidates(), candidates()), min_size=1, max_size=20),
    changed=st.sets(st.integers(0, 19)),
    prompt=st.integers(1, 3000),
    output=st.floats(0.0, 500.0),
    session=st.none() | st.integers(0, 19),
    is_plain=st.booleans(),
)
def test_a_table_of_costs_decides_like_a_call_for_each_pod(
    drawn: list[tuple[Candidate, Candidate]],
    changed: set[int],
    prompt: int,
    output: float,
    session: int | None,
    is_plain: bool,
) -> None:
    """The same holds if pods have changed since their first row was written, and for models of more or fewer pieces."""
    pods, table = [], CostTable(len(drawn))
    assert not table.is_complete
    for place, (before, _) in enumerate(drawn):
        table.update(place, replace(before, derived=basis_of(before)))
    for place, pair in enumerate(drawn):
        pod = replace(pair[place in changed], endpoint_id=str(place), session=place == session and not is_plain)
        pod = replace(pod, derived=basis_of(pod), adapter_ms=0.0, eviction_ms=0.0)
        pods.append(replace(pod, num_cached_tokens=0) if is_plain else pod)
        table.update(place, pod)
    assert table.is_complete
    request, listed = RequestView(prompt, output), CandidateList(pods, table)
    listed.is_plain = is_plain
    decision, expected = (CostPolicy(SESSION_MS).choose(request, each) for each in (listed, pods))
    assert decision.chosen is expected.chosen
    assert decision.why == expected.why
    assert list(decision.rows) == list(expected.rows)
    cached = None if is_plain else [each.num_cached_tokens for each in pods]
    assert table.costs(prompt, output, cached) == [sum(row[:3]) + row[3] for row in expected.rows]
    table.update(0, replace(pods[0], derived=None))
    assert not table.is_complete


NUM_ENDPOINTS = 5
FAILURES: list[FailureKind] = ["unreachable", "declined", "lost", "broken", "request"]
PREFIX = tuple(bytes([number]) * 16 for number in range(4))


class World:
    """A brain with a few endpoints, and the values that a reader of its records would derive."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = Clock()
        self.brain = LocalBrain(RoutingConfig(routing_session_ms=SESSION_MS), clock=self.clock, rng=random.Random(1))
        self.sequences: dict[str, int] = {}
        self.choices: list[Assignment] = []
        self.names = [f"e{number}" for number in range(NUM_ENDPOINTS)]
        endpoints = [
            Endpoint(id=name, data_url=f"http://{name}:1", control_url=f"http://{name}:2") for name in self.names
        ]
        self.brain.observer.apply_catalog(Catalog(models=[CatalogModel(deployment="d", name="m", endpoints=endpoints)]))
        for name in self.names:
            self.report(name)

    def report(self, name: str, **fields: Any) -> None:
        rng, record = self.rng, self.brain.registry.endpoints[name]
        snapshot = not record.reports.connected
        sequence = self.sequences[name] = 1 if snapshot else self.sequences[name] + 1
        running, waiting = rng.randrange(6), rng.randrange(2)
        load = EngineLoad(
            num_requests_running=running,
            num_requests_waiting=waiting,
            num_tokens_running=running * 200,
            num_tokens_waiting=waiting * rng.randrange(1, 900),
            num_kv_bytes_total=100_000,  # no request waits for room
            num_kv_bytes_evictable=100_000 - running * 13 - rng.choice([5, 500]),
            num_kv_bytes_active=running * 13,
        )
        frame = StateFrame(
            sequence=sequence,
            snapshot=snapshot,
            load=load,
            step_time=params(1 + self.names.index(name) / 50),
            prefixes_added=list(PREFIX[: rng.randrange(5)]),
            **{"max_model_len": 8192, "block_size": 16, "max_num_batched_tokens": 512, **fields},
            digests=Digests(tokenizer_bundle="t"),
        )
        self.brain.observer.observe(name, frame)

    def change_something(self) -> None:
        """Change a randomly chosen endpoint or request."""
        rng, brain, name = self.rng, self.brain, self.rng.choice(self.names)
        match rng.randrange(10):
            case 0:
                self.report(name, draining=rng.random() < 0.1, max_model_len=rng.choice([8192, 8192, 4096]))
            case 1 | 2:
                self.report(name)
            case 3:
                self.clock.now += rng.choice([0.01, 0.5, 2.0])
            case 4:
                brain.observer.stream_lost(name)
            case 5 if self.choices:
                brain.accepted(rng.choice(self.choices))
            case 6 if self.choices:
                brain.started(rng.choice(self.choices), 20.0)
            case 7 if self.choices:
                brain.finished(self.choices.pop(rng.randrange(len(self.choices))), CompletedRequest(10, 8.0))
            case 8 if self.choices and rng.random() < 0.3:
                brain.failed(self.choices.pop(rng.randrange(len(self.choices))), rng.choice(FAILURES))
            case 9:
                rng.choice([brain.observer.unreachable, brain.observer.drain])(name)

    def ask(self) -> RoutingRequest:
        prefix_chunks = PREFIX[: self.rng.randrange(5)]
        session = self.rng.choice([b"", b"", b"s"])
        return RoutingRequest(self.rng.choice([10, 257, 900]), prefix_chunks, CHUNK_TOKENS, b"", session)

    def seen_anew(self, record: EndpointRecord, routing_request: RoutingRequest) -> Candidate:
        placement = self.brain.placement
        fresh, session = record.reports.fresh(self.clock.now), False
        if routing_request.session:
            session = placement._sessions.endpoint("default/d", routing_request.session) == record.endpoint.id
        bit, depth = placement.index.bit(record.endpoint.id), 0
        findable = routing_request.prefix_chunks[: (routing_request.num_prompt_tokens - 1) // CHUNK_TOKENS]
        while fresh and depth < len(findable):
            chunk = findable[depth]
            if not (placement.index.has(chunk, bit) or placement.predictions.pods.get(chunk, 0) & bit):
                break
            depth += 1
        record.seen.clear()
        return candidate_of(
            CostPolicy(SESSION_MS), record, self.clock.now, depth * CHUNK_TOKENS if fresh else 0, session
        )


@settings(deadline=None, max_examples=num_examples(60))
@given(seed=st.integers(0, 2**32), least_pods=st.sampled_from([1, LEAST_PODS]))
def test_cached_state_of_endpoints_equals_recomputed_state(seed: int, least_pods: int) -> None:
    """The second brain has the same history and clears its caches before each decision."""
    world, twin = World(seed), World(seed)
    with patch.object(CostPolicy, "least_for_table", least_pods):
        compare(world, twin)


def compare(world: World, twin: World) -> None:
    for _ in range(80):
        world.change_something()
        twin.change_something()
        for deployment in twin.brain.registry.deployments.values():
            deployment.changed()
        usable = [name for name, record in twin.brain.registry.endpoints.items() if record.usable]
        if not usable:
            continue
        routing_request, same = world.ask(), twin.ask()
        assert routing_request == same
        target = world.brain.resolve("m")
        assert target == twin.brain.resolve("m")
        twin.brain.placement.predictions.expire(twin.clock.now)
        among = [twin.brain.registry.endpoints[name] for name in usable]
        expected = [twin.seen_anew(record, routing_request) for record in among]
        choices = [asyncio.run(each.brain.choose(target, NOTHING, routing_request)) for each in (world, twin)]
        assert choices[0] == choices[1]
        for each, choice in zip((world, twin), choices, strict=True):
            each.choices.append(choice)
        shown = world.brain.placement.decisions.latest(1)[0]
        assert shown["why"] == twin.brain.placement.decisions.latest(1)[0]["why"]
        known = {each.endpoint_id: each for each in expected}
        for row in shown["candidates"]:
            candidate = known[row["endpoint"]]
            assert (row["in_flight"], row["elsewhere"], row["cached_tokens"], row["session"]) == (
                candidate.in_flight,
                candidate.external,
                candidate.num_cached_tokens,
                candidate.session,
            )
