"""Simulates several engines behind the gateway's real brain in virtual time, to compare routing policies.

Real are the brain with its registry, index, accounts and policies, the prompt hashes, and in every pod the scheduler
and KV manager. Simulated are time, the forward passes, and the network, which takes a millisecond each way. The same
traffic and seed give the same report, bit for bit.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from pagemill_engine.config import EngineConfig
from pagemill_engine.ipc.messages import StepOutputs
from pagemill_gateway.brain.brain import LocalBrain
from pagemill_gateway.brain.interface import Assignment, CompletedRequest, QueueTicket, RoutingRequest
from pagemill_gateway.config import GatewayConfig
from pagemill_gateway.relay.prompt_hashes import PromptHashes
from pagemill_gateway.routing.policies import PolicyName
from pagemill_protocol.catalog import Catalog, CatalogAdapter, CatalogModel, Endpoint, QueueLimits
from pagemill_protocol.generate import GenerateRequest
from pagemill_protocol.hashes import token_bytes
from pagemill_protocol.sampling import SamplingParams
from pagemill_simulator.adapters import AdapterSettings
from pagemill_simulator.conversations import Conversation
from pagemill_simulator.events import Events, EventsLoop
from pagemill_simulator.pod import NETWORK_S, RunningPod, SimulatedPod

KEY_TOKENS = 25
"""About a hundred characters, the length that `PrefixHash` uses."""
MODEL = "sim"
UNLIMITED_QUEUE = QueueLimits(max_requests=10**9, max_bytes=10**18, timeout_s=1e9)
"""Every request is served in the end; otherwise policies could look fast by refusing requests."""


class RoutingReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report of one policy under one traffic."""

    ttft_ms: list[float]
    """Milliseconds from arrival at the gateway to the first token there, of every request."""
    tpot_ms: list[float]
    """Mean milliseconds between the tokens of each answer."""
    num_prompt_tokens: int
    num_cached_tokens: int
    num_exact: int
    """Requests whose cached tokens were predicted exactly, in whole prefix chunks."""
    ttft_errors: list[float]
    """Relative errors of the predicted time to the first token, where there is one; negative: too short."""
    duration_s: float
    """Virtual seconds to the last token."""
    num_adapter_loads: int = 0

    @property
    def mean_ttft_ms(self) -> float:
        return sum(self.ttft_ms) / len(self.ttft_ms)


@dataclass(slots=True)
class _RequestState:
    """One request in flight."""

    conversation: Conversation
    turn: int
    token_ids: list[int]
    arrival_s: float
    sent_s: float
    choice: Assignment
    output: list[int] = field(default_factory=list)
    first_token_s: float = 0.0


class ClusterSimulation:
    def __init__(
        self,
        traffic: Sequence[Conversation],
        engines: Sequence[EngineConfig],
        policy: PolicyName,
        *,
        seed: int = 0,
        adapters: AdapterSettings | None = None,
    ) -> None:
        """`adapters` are each pod's adapter settings; None: pods serve no adapters."""
        self._adapters = adapters
        self._events = Events()
        self._loop = EventsLoop(self._events)
        self._requests: dict[str, _RequestState] = {}
        self._hashes = PromptHashes(1_000_000)
        self._names = itertools.count()
        self._report = RoutingReport(
            ttft_ms=[],
            tpot_ms=[],
            num_prompt_tokens=0,
            num_cached_tokens=0,
            num_exact=0,
            ttft_errors=[],
            duration_s=0.0,
        )
        self._totals = [0, 0, 0]
        config = GatewayConfig(routing_policy=policy, queue=UNLIMITED_QUEUE)
        self.brain = LocalBrain(config, clock=self._events.now, rng=random.Random(seed))
        self._pods = {f"pod-{number}": self._pod(f"pod-{number}", each) for number, each in enumerate(engines)}
        endpoints = [
            Endpoint(id=each, data_url=f"http://{each}:1", control_url=f"http://{each}:2") for each in self._pods
        ]
        served = [CatalogAdapter(name=each, digest=each) for each in sorted({one.adapter for one in traffic} - {""})]
        model = CatalogModel(deployment=MODEL, name=MODEL, adapters=served, endpoints=endpoints)
        self.brain.apply_catalog(Catalog(models=[model]))
        for name, running in self._pods.items():
            self.brain.observe(name, running.pod.frame(snapshot=True))
        for conversation in traffic:
            self._events.at(conversation.start_s, partial(self._arrive, conversation, 0, list(conversation.prefix)))
        self._num_open = len(traffic)

    def run(self) -> RoutingReport:
        """Run to the last token of the last turn; return the report."""
        try:
            while self._num_open:
                self._events.step()
                self._loop.run_ready()
        finally:
            self._loop.close()
        for running in self._pods.values():
            running.pod.core.check_integrity()
        prompt, cached, exact = self._totals
        return msgspec.structs.replace(
            self._report,
            num_prompt_tokens=prompt,
            num_cached_tokens=cached,
            num_exact=exact,
            duration_s=self._events.now_s,
            num_adapter_loads=sum(running.num_adapter_loads for running in self._pods.values()),
        )

    def _pod(self, name: str, config: EngineConfig) -> RunningPod:
        observe = partial(self.brain.observe, name)
        pod = SimulatedPod(name, config, serves_adapters=self._adapters is not None)
        return RunningPod(pod, self._events, observe=observe, deliver=self._deliver, adapters=self._adapters)

    def _arrive(self, conversation: Conversation, turn: int, history: list[int]) -> None:
        self._loop.spawn(self._route(conversation, turn, history + conversation.turns[turn].token_ids))

    async def _route(self, conversation: Conversation, turn: int, token_ids: list[int]) -> None:
        arrival_s = self._events.now_s
        target = self.brain.resolve(conversation.adapter or MODEL)
        prefix_chunks = self._hashes.hashes(target.scheme, "", token_ids, adapter_digest=target.adapter_digest)
        key = token_bytes(conversation.user_token_ids[:KEY_TOKENS])
        routing_request = RoutingRequest(
            len(token_ids), prefix_chunks, target.scheme.prefix_chunk_tokens, key, adapter_digest=target.adapter_digest
        )
        ticket = QueueTicket(arrived_at=arrival_s, max_tokens=conversation.turns[turn].num_output_tokens)
        choice = await self.brain.choose(target, frozenset(), routing_request, ticket=ticket)
        self._send(choice, conversation, turn, token_ids, arrival_s)

    def _send(
        self, choice: Assignment, conversation: Conversation, turn: int, token_ids: list[int], arrival_s: float
    ) -> None:
        name = f"sim-{next(self._names)}"
        self._requests[name] = _RequestState(conversation, turn, token_ids, arrival_s, self._events.now_s, choice)
        request = GenerateRequest(
            request_id=name,
            model=MODEL,
            prompt_token_ids=token_ids,
            adapter_digest=conversation.adapter,
            sampling=SamplingParams(
                max_tokens=conversation.turns[turn].num_output_tokens, ignore_eos=True, seed=len(self._requests)
            ),
        )
        self._events.after(NETWORK_S, partial(self._pods[choice.endpoint_id].enter, request))
        self._events.after(2 * NETWORK_S, partial(self.brain.accepted, choice))

    def _deliver(self, outputs: StepOutputs) -> None:
        for output in outputs.outputs:
            state = self._requests[output.request_id]
            if not state.output:
                self._first_token(state, output.num_cached_tokens)
            state.output += output.token_ids
            if output.finish_reason is not None:
                self._finish(self._requests.pop(output.request_id))

    def _first_token(self, state: _RequestState, num_cached_tokens: int) -> None:
        state.first_token_s = self._events.now_s
        since_sent_ms = (self._events.now_s - state.sent_s) * 1000
        self.brain.started(state.choice, since_sent_ms)
        ttft_ms = (self._events.now_s - state.arrival_s) * 1000
        self._report.ttft_ms.append(ttft_ms)
        if state.choice.predicted_ttft_ms is not None:
            self._report.ttft_errors.append(state.choice.predicted_ttft_ms / since_sent_ms - 1)
        self._totals[0] += len(state.token_ids)
        self._totals[1] += num_cached_tokens
        missed = num_cached_tokens - state.choice.predicted_cached_tokens
        self._totals[2] += 0 <= missed < state.choice.prefix_chunk_tokens

    def _finish(self, state: _RequestState) -> None:
        self.brain.finished(state.choice, CompletedRequest(len(state.output)))
        if len(state.output) > 1:
            self._report.tpot_ms.append((self._events.now_s - state.first_token_s) * 1000 / (len(state.output) - 1))
        following = state.turn + 1
        if following == len(state.conversation.turns):
            self._num_open -= 1
            return
        pause_s = state.conversation.turns[following].pause_s
        history = state.token_ids + state.output
        self._events.after(pause_s, partial(self._arrive, state.conversation, following, history))


def simulate_routing(
    traffic: Sequence[Conversation],
    engines: Sequence[EngineConfig],
    policy: PolicyName,
    *,
    seed: int = 0,
    adapters: AdapterSettings | None = None,
) -> RoutingReport:
    """Serve `traffic` on one pod for each of `engines`, routed by `policy`."""
    return ClusterSimulation(traffic, engines, policy, seed=seed, adapters=adapters).run()
