"""The contract between scheduler and runner: what one step computes, and its result.

A decision is `{request_id: num_tokens}`. Besides it a plan carries only differences: sequences that enter, appended
block ids, blocks to copy before the forward pass, sequences that left. The runner keeps a persistent batch row for each
admitted sequence and applies the differences to it. Neither side imports the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pagemill_protocol.request.pooling import PoolingParams
from pagemill_protocol.request.sampling import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pagemill_engine.grammar.token_state import TokenState


@dataclass(slots=True, frozen=True)
class AdmittedSequence:
    """A sequence that starts, or restarts after preemption. The runner fills its batch row from the beginning."""

    request_id: str
    token_ids: list[int]
    """All known tokens: the prompt, then tokens generated before a preemption or migration."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Tokens whose KV is already in `block_ids` (prefix-cache hit or fork)."""
    block_ids: list[int]
    """Blocks for all tokens up to and including this step's."""
    sampling: SamplingParams
    choice: int
    """Index among the n choices of its prompt; it is part of the random counter."""
    seed: int
    pooling: PoolingParams | None = None
    """Set if the prompt is pooled into a vector or a score; the sequence then samples nothing."""
    eos_token_ids: list[int] = field(default_factory=list)
    """End-of-sequence tokens of the sequence (none with `ignore_eos`). Together with `sampling.stop_token_ids` they are
    masked until `min_tokens` tokens were generated."""


@dataclass(slots=True, frozen=True)
class PromptTargets:
    """Prompt tokens whose log probabilities a step reports; each follows a token that the step computes."""

    first: int
    """Index of the first target, counted from the prompt's second token."""
    offset: int
    """Index of the token that the first target follows, among the request's tokens of this step."""
    token_ids: list[int]
    num_top: int


@dataclass(slots=True)
class StepPlan:
    """One step's work. The order of `num_scheduled_tokens` is the order of sequences in the batch.

    A sequence may be admitted with blocks that another sequence of the same step fills (a prefix hit on work in
    flight): the runner writes the KV of the whole batch before attention reads it, in every layer.
    """

    step: int
    num_scheduled_tokens: dict[str, int]
    """The decision. A request samples a token, or is pooled, exactly when the step catches up with all its tokens."""
    admitted: list[AdmittedSequence] = field(default_factory=list)
    new_block_ids: dict[str, list[int]] = field(default_factory=dict)
    """Blocks appended to sequences that were already admitted."""
    replaced_blocks: list[tuple[str, int, int]] = field(default_factory=list)
    """(request id, index in its block table, new block id): the entry after a copy-on-write. An admitted sequence's
    `block_ids` contain the new block already."""
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    """(source, destination) pairs, copied before the forward pass; all sources are read before a destination is
    written."""
    released: list[str] = field(default_factory=list)
    """Sequences that were finished, aborted or preempted since the last step. The runner applies this first.

    A sequence may be released and admitted in one plan (it starts over). After a failed step a released sequence may be
    unknown to the runner.
    """
    samples: set[str] = field(default_factory=set)
    """Requests that sample a token in this step, or whose prompt is pooled. The runner appends the sampled token to its
    sequence itself."""
    token_masks: dict[str, NDArray[np.int32] | TokenState] = field(default_factory=dict)
    """Masks of the sampling requests that may not take every token: one bit per token, 32 per word, or a grammar state.
    The runner reads a grammar state's mask after the forward pass is under way and before `wait` returns."""
    prompt_targets: dict[str, PromptTargets] = field(default_factory=dict)
    """Prompt tokens to report, of requests that ask for log probabilities of their prompts."""
    decode_context_tokens: int = 0
    """Sum of the context tokens that the step's decodes read; for the step-time model."""
    chunk_context_products: int = 0
    """Sum over prefill chunks of chunk tokens x context tokens; for the step-time model."""

    @property
    def num_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


@dataclass(slots=True, frozen=True)
class TokenLogprobs:
    """Log probabilities at one position: the chosen token first, then the most likely ones."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """Rank of the chosen token; 1 is the most likely."""


@dataclass(slots=True)
class StepResult:
    """The runner's result for a `StepPlan`."""

    token_ids: dict[str, int] = field(default_factory=dict)
    """One sampled token for each request in `StepPlan.samples` that did not fail and is not pooled."""
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    """One entry for each token of `StepPlan.prompt_targets`."""
    failed: dict[str, str] = field(default_factory=dict)
    """Requests that failed in this step (non-finite logits and the like), with the reason; the others continue."""
    pooled: dict[str, bytes] = field(default_factory=dict)
    """The vector or the score of each request in `StepPlan.samples` that is pooled: float32, little-endian."""
