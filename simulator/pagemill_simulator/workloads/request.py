"""A simulated fleet's requests: lengths and times, and tokens where it matters what prompts share; no text.

Readers and generators create them, fleets serve them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import msgspec


class SimRequest(NamedTuple):
    arrival_s: float
    """Seconds since the workload's beginning."""
    num_prompt_tokens: int
    num_output_tokens: int
    session: int | None = None
    """Requests of one session are turns of one conversation: each prompt begins with the previous prompt and answer, as
    far as both are that long, and no turn is sent before that answer has ended.
    """
    priority: int = 0
    """Smaller is served first (`pagemill_protocol.request.sampling`)."""
    pause_s: float = 0.0
    """Seconds after the answer for which the turn waits."""
    token_ids: Sequence[int] = ()
    """The prompt's last tokens, after the conversation so far; empty: tokens that no other prompt begins with."""
    num_system_tokens: int = 0
    """Tokens of a system prompt at the prompt's beginning; the user's text follows."""
    adapter: str = ""
    """The adapter that the request names; empty: the model alone."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    source: str
    """For the report: the file, or the generator with its parameters and seed."""
    requests: Sequence[SimRequest]
    """Sorted by arrival."""
    lines: Sequence[SimRequest] = ()
    """Lines of batches, which start in order when capacity is idle, after their `arrival_s`."""
    duration_s: float
    """Seconds for which traffic is offered; requests that are open then are served to their end."""


def computed_tokens(requests: Sequence[SimRequest]) -> list[int]:
    """Return the tokens of each prompt without those that an earlier turn of its session has left in the cache."""
    said: dict[int, int] = defaultdict(int)
    computed = []
    for request in requests:
        if request.session is None:
            computed.append(request.num_prompt_tokens)
            continue
        computed.append(max(1, request.num_prompt_tokens - said[request.session]))
        said[request.session] = request.num_prompt_tokens + request.num_output_tokens
    return computed
