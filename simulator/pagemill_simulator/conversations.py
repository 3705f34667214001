"""Traffic for several engines: conversations whose prompts share what real ones share, as token ids.

A conversation has some turns; the next one comes a while after the previous answer and repeats the whole conversation,
the answer included. Four kinds are drawn, each a question about a router: do chats return to their pod, do equal system
prompts meet, do short requests wait behind long ones, does one hot prefix overload one pod?
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

VOCAB_SIZE = 32000


class Turn(NamedTuple):
    token_ids: list[int]
    """Tokens that the user adds."""
    num_output_tokens: int
    pause_s: float
    """Seconds between the previous answer and this turn."""


class Conversation(NamedTuple):
    start_s: float
    prefix: list[int]
    """Tokens before the first turn: a system prompt, a document."""
    turns: list[Turn]
    prefix_is_system: bool = True
    """If False, the prefix is the beginning of the user's text."""
    adapter: str = ""
    """The adapter of the conversation; empty: the model alone."""

    @property
    def user_token_ids(self) -> list[int]:
        """Return the beginning of the user's text."""
        return self.turns[0].token_ids if self.prefix_is_system else self.prefix + self.turns[0].token_ids


def multi_turn_chat(seed: int) -> list[Conversation]:
    """Draw 60 chats of 3 to 6 turns with a common system prompt."""
    draw = random.Random(seed)
    system = _tokens(draw, 180)
    starts = _poisson(draw, 60, rate_per_s=9.0)
    return [
        Conversation(
            start,
            system,
            [_turn(draw, draw.randint(40, 600), pause_s=draw.uniform(0.3, 1.5)) for _ in range(draw.randint(3, 6))],
        )
        for start in starts
    ]


def shared_system_prompts(seed: int) -> list[Conversation]:
    """Draw single questions to 12 assistants of unequal popularity, whose system prompts are most of each prompt."""
    draw = random.Random(seed)
    systems = [_tokens(draw, draw.randint(800, 3000)) for _ in range(12)]
    weights = [1 / (rank + 1) for rank in range(len(systems))]
    return [
        Conversation(start, draw.choices(systems, weights)[0], [_turn(draw, draw.randint(30, 250))])
        for start in _poisson(draw, 240, rate_per_s=60.0)
    ]


def long_and_short(seed: int) -> list[Conversation]:
    """Draw prompts that share nothing: seven short ones to a long one."""
    draw = random.Random(seed)
    return [
        Conversation(
            start, [], [_turn(draw, draw.randint(3000, 7000) if draw.random() < 0.12 else draw.randint(30, 400))]
        )
        for start in _poisson(draw, 240, rate_per_s=60.0)
    ]


def hot_prefix(seed: int) -> list[Conversation]:
    """Draw requests of which two in three, some in bursts, are about the same long document."""
    draw = random.Random(seed)
    document = _tokens(draw, 4000)
    conversations = []
    for start in _poisson(draw, 120, rate_per_s=30.0):
        is_hot = draw.random() < 0.66
        for _ in range(draw.choice([1, 1, 1, 5])):
            prefix = document if is_hot else _tokens(draw, draw.randint(200, 1500))
            conversations.append(
                Conversation(start, prefix, [_turn(draw, draw.randint(30, 250))], prefix_is_system=False)
            )
    return conversations


TRAFFIC: dict[str, Callable[[int], list[Conversation]]] = {
    "multi-turn chat": multi_turn_chat,
    "shared system prompts": shared_system_prompts,
    "long and short": long_and_short,
    "hot prefix": hot_prefix,
}


def among_adapters(traffic: Sequence[Conversation], num_adapters: int, seed: int) -> list[Conversation]:
    """Return the same conversations, each for one of so many adapters of unequal popularity."""
    draw = random.Random(f"adapters {seed}")
    names = [f"adapter-{rank}" for rank in range(num_adapters)]
    weights = [1 / (rank + 1) for rank in range(num_adapters)]
    return [each._replace(adapter=draw.choices(names, weights)[0]) for each in traffic]


def at_rate(traffic: Sequence[Conversation], factor: float) -> list[Conversation]:
    """Return the same conversations, starting `factor` times as often."""
    return [each._replace(start_s=each.start_s / factor) for each in traffic]


def _turn(draw: random.Random, num_tokens: int, *, pause_s: float = 0.0) -> Turn:
    return Turn(_tokens(draw, num_tokens), min(200, 4 + int(draw.expovariate(1 / 28))), pause_s)


def _tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(VOCAB_SIZE) for _ in range(count)]


def _poisson(draw: random.Random, count: int, *, rate_per_s: float) -> list[float]:
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += draw.expovariate(rate_per_s)
    return times
