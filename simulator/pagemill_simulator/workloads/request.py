"""What arrives at a simulated fleet: lengths and times, no text. Readers and generators make it, fleets serve it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import msgspec


class SimRequest(NamedTuple):
    arrival_s: float
    """Since the workload's beginning."""
    num_prompt_tokens: int
    num_output_tokens: int
    session: int | None = None
    """Requests of one session are turns of one conversation: each prompt begins with the prompt and the answer before
    it, as far as both are that long, and none is sent before that answer has ended."""
    priority: int = 0
    """Smaller is served first (`pagemill_protocol.sampling`)."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    source: str
    """For the report: the file, or the generator with its parameters and seed."""
    requests: Sequence[SimRequest]
    """By arrival."""
    lines: Sequence[SimRequest] = ()
    """Of batches: they are started where capacity is left, in order, after their `arrival_s`."""
    duration_s: float
    """How long traffic is offered; requests still open then are served to their end."""


def computed_tokens(requests: Sequence[SimRequest]) -> list[int]:
    """Tokens of each prompt without what an earlier turn of its session has left in the cache."""
    said: dict[int, int] = defaultdict(int)
    computed = []
    for request in requests:
        if request.session is None:
            computed.append(request.num_prompt_tokens)
            continue
        computed.append(max(1, request.num_prompt_tokens - said[request.session]))
        said[request.session] = request.num_prompt_tokens + request.num_output_tokens
    return computed
