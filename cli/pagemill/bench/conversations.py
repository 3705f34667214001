"""What a benchmark sends: conversations of one or several turns, with their texts.

`datasets` reads them from files, `generated` draws them, and `sending` plays them: a turn is sent with everything that
was said before, the server's own answers included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple


class BenchError(Exception):
    """What prevents a measurement; the message names the option or file, its value and the remedy."""


class BenchTurn(NamedTuple):
    text: str
    output_tokens: int | None
    """Tokens to generate; `None`: until the model ends its answer."""
    not_before_s: float = 0.0
    """Earliest time to send it, in seconds since the conversation began; the answer before it must have ended too."""


class BenchConversation(NamedTuple):
    turns: Sequence[BenchTurn]
    system: str = ""
    at_s: float | None = None
    """When it begins, in seconds since the first one; `None` where a file has no times."""
    messages: Sequence[Mapping[str, object]] = ()
    """Messages before the first turn, as a file has them."""
    extra: Mapping[str, object] = MappingProxyType({})
    """Further fields of its requests, as a file has them."""


class BenchWorkload(NamedTuple):
    source: str
    """For the report: the file, or the generator with its parameters and seed."""
    conversations: Sequence[BenchConversation]

    @property
    def has_times(self) -> bool:
        return all(each.at_s is not None for each in self.conversations)

    @property
    def num_requests(self) -> int:
        return sum(len(each.turns) for each in self.conversations)


def first_requests(workload: BenchWorkload, limit: int) -> BenchWorkload:
    """Return the workload's first conversations, cut where they have `limit` turns together."""
    kept: list[BenchConversation] = []
    left = limit
    for each in workload.conversations:
        if not left:
            break
        kept.append(each._replace(turns=each.turns[:left]))
        left -= len(kept[-1].turns)
    return workload._replace(conversations=kept)


def rotated(workload: BenchWorkload, num_requests: int) -> BenchWorkload:
    """Return the workload begun after so many requests; what is before them follows at the end."""
    at, skipped = 0, 0
    total = max(1, workload.num_requests)
    while skipped < num_requests % total:
        skipped += len(workload.conversations[at].turns)
        at += 1
    return workload._replace(conversations=[*workload.conversations[at:], *workload.conversations[:at]])
