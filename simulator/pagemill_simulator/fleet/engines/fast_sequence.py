"""A request on a fast pod: the counters of `pagemill_engine.scheduler.sequence`, without tokens."""

from __future__ import annotations

import math
from enum import IntEnum

import msgspec

from pagemill_protocol.request.sampling import is_low_priority
from pagemill_simulator.fleet.engines.fast_kv import Owner


class SequencePhase(IntEnum):
    WAITING = 0
    PREFILLING = 1
    DECODING = 2
    LEAVING = 3
    """The last step was launched and not read: the row holds its sequence slot and blocks."""
    GONE = 4


class FastSequence(msgspec.Struct, eq=False, gc=False):
    arrival_s: float
    num_prompt_tokens: int
    """Includes the part of an answer that was generated elsewhere."""
    num_output_tokens: int
    """Tokens to sample here."""
    session: int | None = None
    client: object = None
    """The sender's identifier of the request."""
    arrival: int = 0
    """Rank of arrival on its pod."""
    num_left: int = 0
    """Tokens still to be sampled, as of `as_of_step`."""
    priority: int = 0
    choice: int = 0
    """Used with `priority` by the ranks of `pagemill_engine.scheduler.order`."""
    num_tokens: int = 0
    """Known tokens and those known to come, as of `as_of_step`."""
    num_computed_tokens: int = 0
    """Computed tokens as of `as_of_step`."""
    num_unread_tokens: int = 0
    """Computed tokens of the latest step that had the row, as of `as_of_step`."""
    latest_step: int = 0
    """The latest step that computed more than one token of the row, or its prompt's last one, counted from 1."""
    as_of_step: int = 0
    """The pod's step since which a decoding row has decoded with every step."""
    num_blocks: int = 0
    """Blocks of a row that is not decoding; those of a decoding row follow from its tokens."""
    owner: Owner | None = None
    """The owner under which its blocks are found after a preemption, or by its session's next turn."""
    num_cached_tokens: int = 0
    """Tokens found in the cache when it first started."""
    num_preemptions: int = 0
    phase: SequencePhase = SequencePhase.WAITING
    started: bool = False
    num_delivered: int = 0
    """Tokens that the sender has received."""
    first_token_s: float = math.inf
    end_s: float = math.inf
    """End of the step that samples its last token."""

    @property
    def is_low_priority(self) -> bool:
        """Whether the row is low-priority, as in `pagemill_engine.scheduler.sequence.Sequence`."""
        return is_low_priority(self.priority)

    @property
    def num_due_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens
