"""A sequence: one choice or beam of a client request, as counters. A request of n choices has n sequences, a beam
search one per beam.

Everything a step needs follows from `num_computed_tokens` catching up with `num_tokens`. `kv.manager` changes the KV
counters and `scheduler.scheduler` the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

from pagemill_engine.scheduler.beams import BeamSearch
from pagemill_engine.scheduler.prompt_report import PromptReport
from pagemill_protocol.pooling import PoolingParams
from pagemill_protocol.sampling import SamplingParams, gives_way

if TYPE_CHECKING:
    from pagemill_engine.grammar.token_state import TokenState
    from pagemill_engine.scheduler.restriction import Mask, Restriction


class SequenceState(IntEnum):
    HELD = 0
    """A further choice that waits until the first one has computed their common prompt."""
    WAITING = 1
    RUNNING = 2
    FINISHED = 3
    REPORTED = 4
    """A beam that waits until the other beams of its search have reported their candidates."""


@dataclass(slots=True, eq=False)
class Sequence:
    request_id: str
    """Unique in the engine: client request id and choice."""
    client_request_id: str
    choice: int
    """Index among all choices of the client request."""
    arrival: int
    """Order of arrival; the choices of one client request share it."""
    arrival_s: float
    priority: int
    token_ids: list[int]
    """Prompt, then output."""
    num_prompt_tokens: int
    sampling: SamplingParams
    seed: int
    max_total_tokens: int
    """The sequence ends with reason `length` at this many tokens."""
    stop_ids: frozenset[int]
    """End-of-sequence tokens (unless ignored) and the request's own stop tokens."""
    eos_token_ids: list[int]
    """End-of-sequence tokens that apply to the sequence."""
    cache_root: bytes
    num_resumed_tokens: int = 0
    """Output tokens that another engine generated before."""
    num_computed_tokens: int = 0
    """Tokens whose KV is in the cache once all launched steps have run."""
    num_pending_tokens: int = 0
    """Tokens that steps in flight sample: their values are not known yet."""
    block_hashes: list[bytes] = field(default_factory=list)
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at first scheduling."""
    num_preemptions: int = 0
    state: SequenceState = SequenceState.WAITING
    aborted: bool = False
    """Aborted while a step was in flight; it ends with that step."""
    reported: bool = False
    """Its first output was sent."""
    first_scheduled_s: float | None = None
    search: BeamSearch[Sequence] | None = None
    """The beam search that the sequence belongs to."""
    grammar: TokenState | None = None
    """Where it is in what its request prescribes: a form, a budget of reasoning."""
    restriction: Restriction | None = None
    """Which tokens its request allows beside that."""
    token_mask: Mask | TokenState | None = None
    """What may follow its known tokens, by both; the state alone computes its mask later. `None`: any token."""
    needs_last_token: bool = False
    """What may follow depends on tokens of the output."""
    was_jumped: bool = False
    """It has tokens that no step sampled, so that the runner does not know them."""
    prompt_report: PromptReport | None = None
    """What the client request reports of its prompt."""
    pooling: PoolingParams | None = None
    """It ends with its prompt, of which a vector or a score is made."""
    reads_all: bool = False
    """Every token of its prompt is computed for it, whatever the prefix cache holds."""

    @property
    def is_unhurried(self) -> bool:
        """It gives way to every sequence that is not."""
        return gives_way(self.priority)

    @property
    def num_tokens(self) -> int:
        """Known and pending tokens."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_due_tokens(self) -> int:
        """Tokens that no step has computed so far: 1 while decoding."""
        return len(self.token_ids) + self.num_pending_tokens - self.num_computed_tokens
