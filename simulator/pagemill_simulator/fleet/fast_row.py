"""A request on a fast pod: counters, as `pagemill_engine.scheduler.sequence` has them, without any token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

from pagemill_protocol.sampling import gives_way
from pagemill_simulator.fleet.fast_kv import Owner


class Place(IntEnum):
    WAITING = 0
    PREFILLING = 1
    DECODING = 2
    LEAVING = 3
    """Its last step was launched and not read: it holds its seat and blocks."""
    GONE = 4


@dataclass(slots=True, eq=False)
class Row:
    arrival_s: float
    num_prompt_tokens: int
    """What of an answer was made elsewhere is part of it."""
    num_output_tokens: int
    """To sample here."""
    session: int | None = None
    client: object = None
    """Whatever its sender knows it by."""
    arrival: int = 0
    """Rank of arrival on its pod."""
    num_left: int = 0
    """Tokens it will still sample, as of `as_of_step`."""
    priority: int = 0
    choice: int = 0
    """With `priority`, for the ranks of `pagemill_engine.scheduler.policies`."""
    num_tokens: int = 0
    """Known and known to come, as of `as_of_step`."""
    num_computed_tokens: int = 0
    """As of `as_of_step`."""
    num_unread_tokens: int = 0
    """Of them, those of the latest step that had the row, as of `as_of_step`."""
    as_of_step: int = 0
    """Of the pod: since then it has decoded with every step, if it is decoding."""
    num_blocks: int = 0
    """Of a row that is not decoding; a decoding row's follow from its tokens."""
    owner: Owner | None = None
    """Under which its blocks are found again: after a preemption, or by its session's next turn."""
    num_cached_tokens: int = 0
    """Found when it first started."""
    num_preemptions: int = 0
    place: Place = Place.WAITING
    started: bool = False
    num_delivered: int = 0
    """Tokens that its sender has."""
    first_token_s: float = math.inf
    end_s: float = math.inf
    """Of the step that samples its last token."""

    @property
    def is_unhurried(self) -> bool:
        """As `pagemill_engine.scheduler.sequence.Sequence`."""
        return gives_way(self.priority)

    @property
    def num_due_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens
