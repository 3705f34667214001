"""A sequence: one choice or beam of a client request, as counters.

A request of n choices has n sequences, a beam search one per beam. Everything that a step needs follows from
`num_computed_tokens` catching up with `num_tokens`. `kv.manager` changes the KV counters, `scheduler.scheduler` the
others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

from pagemill_engine.scheduler.beams import BeamSearch
from pagemill_engine.scheduler.prompt_report import PromptLogprobs
from pagemill_protocol.request.pooling import PoolingParams
from pagemill_protocol.request.sampling import SamplingParams, is_low_priority

if TYPE_CHECKING:
    from pagemill_engine.grammar.token_state import TokenState
    from pagemill_engine.proposing.base import Proposing
    from pagemill_engine.scheduler.restriction import Mask, Restriction


class SequenceState(IntEnum):
    WAITING_FOR_FORK = 0
    """A further choice that waits until the first one has computed their common prompt."""
    WAITING = 1
    RUNNING = 2
    FINISHED = 3
    REPORTED = 4
    """A beam that waits until the other beams of its search have reported their candidates."""


@dataclass(slots=True, eq=False)
class Sequence:
    request_id: str
    """Id that is unique in the engine: client request id and choice."""
    client_request_id: str
    choice: int
    """Index among all choices of the client request."""
    arrival: int
    """Order of arrival; the choices of one client request share it."""
    arrival_s: float
    priority: int
    token_ids: list[int]
    """Prompt tokens, followed by output tokens."""
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    max_total_tokens: int
    """The sequence ends with reason `length` at this many tokens."""
    stop_ids: frozenset[int]
    """End-of-sequence tokens (unless ignored) and the request's own stop tokens."""
    eos_token_ids: list[int]
    """End-of-sequence tokens, unless ignored."""
    cache_root: bytes
    adapter_digest: str = ""
    noise: int = 0
    """Index among the choices of its own prompt, which is part of the random counter: a prompt is answered as it would
    be alone, whatever other prompts its request has."""
    num_resumed_tokens: int = 0
    """Number of output tokens that another engine generated."""
    predicted_token_ids: list[int] = field(default_factory=list)
    """Tokens that the answer probably repeats, as the client said."""
    num_computed_tokens: int = 0
    """Number of tokens whose KV is in the cache once all launched steps have run."""
    num_pending_tokens: int = 0
    """Number of tokens that steps in flight sample; their values are not known yet."""
    block_hashes: list[bytes] = field(default_factory=list)
    reuse_points: tuple[int, ...] = ()
    """Token counts behind which other sequences are expected to resume."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when the sequence was first scheduled."""
    num_preemptions: int = 0
    state: SequenceState = SequenceState.WAITING
    aborted: bool = False
    """Whether it was aborted while a step was in flight; it ends with that step."""
    reported: bool = False
    """Whether its first output was queued for the client."""
    first_scheduled_s: float | None = None
    search: BeamSearch[Sequence] | None = None
    """The beam search that the sequence belongs to."""
    grammar: TokenState | None = None
    """State of the request's grammar: its form, and its budget of reasoning tokens."""
    restriction: Restriction | None = None
    """The request's `allowed_token_ids` and `bad_words`."""
    token_mask: Mask | TokenState | None = None
    """The tokens that may follow, by `grammar` and `restriction`; None: any token.

    A grammar state computes its mask later.
    """
    needs_last_token: bool = False
    """Whether the tokens that may follow depend on the output."""
    was_jumped: bool = False
    """Whether it has tokens that no step sampled and that the runner therefore does not know."""
    prompt_report: PromptLogprobs | None = None
    """Log probabilities of the client request's prompt, if it asked for them."""
    proposing: Proposing | None = None
    """What is known about proposed tokens of the sequence, once it was asked for some."""
    pooling: PoolingParams | None = None
    """Set if the prompt is pooled into a vector or a score instead of continued."""
    reads_all: bool = False
    """Whether every prompt token must be computed for it, whatever the prefix cache contains."""

    @property
    def is_low_priority(self) -> bool:
        """Whether every sequence of higher priority goes before it."""
        return is_low_priority(self.priority)

    @property
    def num_tokens(self) -> int:
        """Number of known and pending tokens."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_due_tokens(self) -> int:
        """Number of tokens that no step has computed so far: 1 while decoding."""
        return len(self.token_ids) + self.num_pending_tokens - self.num_computed_tokens
