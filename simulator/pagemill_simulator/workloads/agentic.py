"""Sessions of agents: successive calls whose prompts contain the whole session so far and something new.

A call is planned for when the previous answer is expected to have ended and the tool has run, or the user has thought;
fleets send no call before that answer has really ended.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import ClassVar

import msgspec

from pagemill_simulator.parameters import Count, Factor, NotNegative, ParameterError, Positive
from pagemill_simulator.workloads.arrivals import poisson
from pagemill_simulator.workloads.generator import MOST_REQUESTS, Generator
from pagemill_simulator.workloads.lengths import LogNormal
from pagemill_simulator.workloads.request import SimRequest

SIGMA = 0.8
"""Standard deviation of the logarithms of all lengths."""
LONGEST = 20.0
"""Longest length as a multiple of the mean."""


class Agentic(Generator, frozen=True, kw_only=True):
    """Sessions of agents: turns of a user, each a loop of calls whose prompts have everything before and a tool's
    result.

    Four turns of eight calls are the averages of coding agents in the wild (Liu et al., Agentic Coding in the Wild,
    arXiv 2608.00101: 3.95 turns, 7.83 calls a turn); prompts there are some ten times as long as by default here.
    """

    name: ClassVar[str] = "agentic"
    sessions_per_s: Positive = 0.1
    """Sessions that begin per second."""
    duration_s: Positive = 1800.0
    """Seconds of offered traffic."""
    turns: Factor = 4.0
    """Turns of a session, mean."""
    calls: Factor = 8.0
    """Calls of a turn, mean."""
    first_prompt_tokens: Positive = 3000.0
    """Tokens of a session's first prompt, mean: instructions, tools and the first question."""
    added_tokens: Positive = 400.0
    """Tokens that a tool or the user adds to the session so far, mean."""
    output_tokens: Positive = 200.0
    """Answer tokens of a call, mean."""
    longest_prompt: Count = 12_000
    """A session ends before a prompt that would be longer."""
    tool_s: NotNegative = 2.0
    """Seconds that a tool runs, mean."""
    think_s: NotNegative = 30.0
    """Seconds that a user takes between turns, mean."""
    token_s: NotNegative = 0.02
    """Expected seconds per token of an answer: the next call is planned by it, and waits if it takes longer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.first_prompt_tokens > self.longest_prompt:
            raise ParameterError(
                f"first_prompt_tokens: a mean of {self.first_prompt_tokens:g} with nothing longer than "
                f"{self.longest_prompt}; raise longest_prompt"
            )
        if self.sessions_per_s * self.duration_s * self.turns * self.calls > MOST_REQUESTS:
            raise ParameterError(
                f"more than {MOST_REQUESTS:,} requests; lower sessions_per_s, duration_s, turns or calls"
            )

    @property
    def length_s(self) -> float:
        return self.duration_s

    def intensity_at(self, at_s: float) -> float:
        return self.sessions_per_s

    def steady(self, intensity: float, duration_s: float) -> Agentic:
        return msgspec.structs.replace(self, sessions_per_s=intensity, duration_s=duration_s)

    def requests(self, seed: int) -> list[SimRequest]:
        """Return the requests by arrival, without those after the end of the workload."""
        rate = self.sessions_per_s
        starts = poisson(random.Random(f"arrivals {seed}"), lambda _: rate, most=rate, duration_s=self.duration_s)
        requests = [
            request
            for session, start_s in enumerate(starts)
            for request in self._session(session, start_s, random.Random(f"session {seed} {session}"))
            if request.arrival_s < self.duration_s
        ]
        return sorted(requests, key=lambda request: request.arrival_s)

    def _session(self, session: int, start_s: float, source: random.Random) -> Iterator[SimRequest]:
        first = LogNormal(self.first_prompt_tokens, SIGMA, self.longest_prompt)
        added = LogNormal(self.added_tokens, SIGMA, math.ceil(LONGEST * self.added_tokens))
        output = LogNormal(self.output_tokens, SIGMA, math.ceil(LONGEST * self.output_tokens))
        at_s, prompt = start_s, first.draw(source)
        for turn in range(_geometric(source, self.turns)):
            for call in range(_geometric(source, self.calls)):
                if turn or call:
                    at_s += _pause_s(source, self.tool_s if call else self.think_s)
                    prompt += added.draw(source)
                if prompt > self.longest_prompt:
                    return
                answer = output.draw(source)
                yield SimRequest(at_s, prompt, answer, session)
                at_s += answer * self.token_s
                prompt += answer


def _geometric(source: random.Random, mean: float) -> int:
    """Draw from a geometric distribution on 1, 2, ..."""
    count = 1
    while source.random() > 1 / mean:
        count += 1
    return count


def _pause_s(source: random.Random, mean_s: float) -> float:
    return source.expovariate(1 / mean_s) if mean_s else 0.0
