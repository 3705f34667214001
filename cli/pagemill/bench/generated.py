"""Draws conversations: of given lengths, with shared prefixes and turns, or of the simulator's workloads.

`datasets` makes conversations of recorded lengths with the same texts.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from pagemill.bench.conversations import BenchConversation, BenchError, BenchTurn, BenchWorkload
from pagemill.bench.texts import TextLengths, words
from pagemill_simulator.parameters import ParameterError, split_choice
from pagemill_simulator.workloads.generators import make_generator
from pagemill_simulator.workloads.lengths import LogNormal
from pagemill_simulator.workloads.request import SimRequest

LONGEST = 20
"""The longest drawn length as a multiple of the mean."""


class DrawnLengths(NamedTuple):
    """The options of generated conversations."""

    prompt_tokens: int
    output_tokens: int
    sigma: float
    """Standard deviation of the logarithm of both lengths; 0: all are equal."""
    turns: int
    prefix_groups: int
    """Numbers of different prefixes, of which each conversation begins with one; 0: none."""
    prefix_tokens: int


def drawn(lengths: DrawnLengths, num_requests: int, seed: int, sizes: TextLengths) -> BenchWorkload:
    """Return conversations that have so many turns together."""
    source = random.Random(f"lengths {seed}")
    prompt, output = (
        LogNormal(mean, lengths.sigma, mean * LONGEST) for mean in (lengths.prompt_tokens, lengths.output_tokens)
    )
    conversations = []
    for number in range(0, num_requests, lengths.turns):
        group = source.randrange(lengths.prefix_groups) if lengths.prefix_groups else None
        turns = [
            BenchTurn(words(f"{seed}:{each}", sizes.num_words(prompt.draw(source))), output.draw(source))
            for each in range(number, min(number + lengths.turns, num_requests))
        ]
        system = "" if group is None else words(f"{seed}:prefix {group}", sizes.num_words(lengths.prefix_tokens))
        conversations.append(BenchConversation(turns, system))
    shown = ", ".join(f"{name}={value:g}" for name, value in lengths._asdict().items() if value)
    return BenchWorkload(f"generated({shown}), seed {seed}", conversations)


def of_generator(choice: str, seed: int, sizes: TextLengths) -> BenchWorkload:
    """Return the conversations of one of the simulator's workloads, such as `agentic:turns=2`. Raises `BenchError`."""
    try:
        name, parameters = split_choice(choice)
        workload = make_generator(name, parameters).workload(seed)
    except ParameterError as error:
        raise BenchError(f"--workload {error}") from None
    return BenchWorkload(workload.source, of_requests(workload.requests, seed, sizes))


def of_requests(requests: Iterable[SimRequest], seed: int, sizes: TextLengths) -> list[BenchConversation]:
    """Return conversations of these lengths and times: one for each session, and for each request without one."""
    sessions: dict[int, list[SimRequest]] = {}
    for number, request in enumerate(requests):
        sessions.setdefault(-1 - number if request.session is None else request.session, []).append(request)
    return [_conversation(f"{seed}:{number}", each, sizes) for number, each in enumerate(sessions.values())]


def _conversation(name: str, requests: Sequence[SimRequest], sizes: TextLengths) -> BenchConversation:
    first = requests[0]
    added = [first.num_prompt_tokens]
    for before, after in pairwise(requests):
        added.append(after.num_prompt_tokens - before.num_prompt_tokens - before.num_output_tokens)
    turns = [
        BenchTurn(
            words(f"{name} {number}", sizes.num_words(tokens)),
            request.num_output_tokens,
            request.arrival_s - first.arrival_s,
        )
        for number, (request, tokens) in enumerate(zip(requests, added, strict=True))
    ]
    return BenchConversation(turns, at_s=first.arrival_s)
