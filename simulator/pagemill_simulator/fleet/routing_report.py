"""Compares routing policies: a fixed fleet serves conversations, and the report says how well the requests were placed.

`fleet` simulates; this module gives it the conversations as a workload and summarizes what it observed.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pagemill_protocol.resource.served import QueueLimits
from pagemill_simulator.conversations import Conversation
from pagemill_simulator.fleet.fleet import simulate_fleet
from pagemill_simulator.fleet.outcome import FirstToken
from pagemill_simulator.fleet.settings import FleetSettings
from pagemill_simulator.scaling.fixed import FixedReplicas
from pagemill_simulator.scaling.simulated import rival
from pagemill_simulator.workloads.request import SimRequest, Workload

UNLIMITED_QUEUE = QueueLimits(max_requests=10**9, max_bytes=10**18, timeout_s=1e9)
"""Every request is served in the end; otherwise policies could look fast by refusing requests."""


BEGIN_S = 1.0
"""When the traffic begins: the gateway has a report of every pod by then, so that no pod gets the first burst alone."""


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
    """Virtual seconds from the beginning of the traffic to the last token."""
    num_adapter_loads: int

    @property
    def mean_ttft_ms(self) -> float:
        return sum(self.ttft_ms) / len(self.ttft_ms)


def report_routing(traffic: Sequence[Conversation], settings: FleetSettings) -> RoutingReport:
    """Serve `traffic` on as many replicas as the settings have at first; return the report of their routing policy.

    Raise `RuntimeError` if a request was refused or lost.
    """
    first_tokens: list[FirstToken] = []
    settings = msgspec.structs.replace(settings, queue=UNLIMITED_QUEUE)
    policy = rival(FixedReplicas(), settings.bounds)
    outcome = simulate_fleet(workload_of(traffic), settings, policy, on_first_token=first_tokens.append)
    if unserved := [each for each in outcome.requests if each.ending != "served"]:
        raise RuntimeError(f"{len(unserved)} of {len(outcome.requests)} requests were not served: {unserved[0]}")
    return RoutingReport(
        ttft_ms=[each.ttft_ms for each in outcome.requests if each.ttft_ms is not None],
        tpot_ms=[each.tpot_ms for each in outcome.requests if each.tpot_ms is not None],
        num_prompt_tokens=sum(each.num_prompt_tokens for each in first_tokens),
        num_cached_tokens=sum(each.num_cached_tokens for each in first_tokens),
        num_exact=sum(_is_exact(each) for each in first_tokens),
        ttft_errors=[
            each.predicted_ttft_ms / each.ttft_ms - 1 for each in first_tokens if each.predicted_ttft_ms is not None
        ],
        duration_s=outcome.duration_s - BEGIN_S,
        num_adapter_loads=outcome.num_adapter_loads,
    )


def workload_of(traffic: Sequence[Conversation]) -> Workload:
    """Return the conversations as sessions whose turns wait for the answers before them."""
    requests = []
    for session, conversation in enumerate(traffic):
        num_said = 0
        for place, turn in enumerate(conversation.turns):
            token_ids = turn.token_ids if place else conversation.prefix + turn.token_ids
            num_prompt_tokens = num_said + len(token_ids)
            num_said = num_prompt_tokens + turn.num_output_tokens
            request = SimRequest(
                BEGIN_S + conversation.start_s,
                num_prompt_tokens,
                turn.num_output_tokens,
                session,
                pause_s=turn.pause_s,
                token_ids=token_ids,
                num_system_tokens=len(conversation.prefix) if conversation.prefix_is_system else 0,
                adapter=conversation.adapter,
            )
            requests.append(request)
    requests.sort(key=lambda each: each.arrival_s)
    source = f"{len(traffic)} conversations"
    return Workload(name="conversations", source=source, requests=requests, duration_s=requests[-1].arrival_s)


def _is_exact(each: FirstToken) -> bool:
    return 0 <= each.num_cached_tokens - each.predicted_cached_tokens < each.prefix_chunk_tokens
