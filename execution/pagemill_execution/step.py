"""The contract between scheduler and runner: what one step computes, and its result.

A decision is `{request_id: num_tokens}`. Besides it a plan carries only differences: sequences that enter, changes of
the block tables of each cache kind, sequences that left. The runner keeps a persistent batch row for each admitted
sequence and applies the differences to it. Neither side imports the other. Both are structs, so that another process
can follow a plan: `encode_plan` leaves out what only the process that samples needs.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pagemill_protocol.request.pooling import PoolingParams
from pagemill_protocol.request.sampling import SamplingParams


class HeldBlocks(msgspec.Struct, frozen=True, array_like=True):
    """The blocks of one cache kind that a sequence has."""

    first: int
    """Index of the first of them in the sequence's table: no later step reads what comes before."""
    block_ids: list[int]


class AdmittedSequence(msgspec.Struct, frozen=True, omit_defaults=True):
    """A sequence that starts, or restarts after preemption. The runner fills its batch row from the beginning."""

    request_id: str
    token_ids: list[int]
    """All known tokens: the prompt, then tokens generated before a preemption or migration."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Tokens whose KV is already in the blocks (prefix-cache hit or fork)."""
    tables: list[HeldBlocks]
    """By cache kind, the blocks for all tokens up to and including this step's."""
    sampling: SamplingParams
    choice: int
    """Index among the n choices of its prompt; it is part of the random counter."""
    seed: int
    pooling: PoolingParams | None = None
    """Set if the prompt is pooled into a vector or a score; the sequence then samples nothing."""
    eos_token_ids: list[int] = []
    """End-of-sequence tokens of the sequence (none with `ignore_eos`). Together with `sampling.stop_token_ids` they are
    masked until `min_tokens` tokens were generated."""
    adapter_digest: str = ""
    """The adapter that computes the sequence; empty: the model alone."""


class PromptTargets(msgspec.Struct, frozen=True, array_like=True):
    """Prompt tokens whose log probabilities a step reports; each follows a token that the step computes."""

    first: int
    """Index of the first target, counted from the prompt's second token."""
    offset: int
    """Index of the token that the first target follows, among the request's tokens of this step."""
    token_ids: list[int]
    num_top: int


class TableChanges(msgspec.Struct, omit_defaults=True):
    """The changes of one cache kind's block tables. Entries of sequences that are admitted are in their tables."""

    appended: dict[str, list[int]] = {}
    """Blocks appended to sequences that were already admitted."""
    placed: list[tuple[str, int, int]] = []
    """(request id, index in its block table, new block id): the entry after a copy-on-write."""
    dropped: list[tuple[str, int, int]] = []
    """(request id, first index, index behind the last): entries that no later step reads. Their blocks may have other
    content: the runner replaces them by its padding block. The request may be unknown to it by now."""
    copies: list[tuple[int, int]] = []
    """(source, destination) pairs, copied before the forward pass; the sources of all kinds are read before a
    destination is written."""


class StepPlan(msgspec.Struct, omit_defaults=True):
    """One step's work. The order of `num_scheduled_tokens` is the order of sequences in the batch.

    A sequence may be admitted with blocks that another sequence of the same step fills (a prefix hit on work in
    flight): the runner writes the KV of the whole batch before attention reads it, in every layer.
    """

    step: int
    num_scheduled_tokens: dict[str, int]
    """The decision: how many tokens the step computes for each request, with proposed ones. A request samples, or is
    pooled, exactly when the step catches up with all its tokens."""
    admitted: list[AdmittedSequence] = []
    tables: list[TableChanges] = []
    """By cache kind. Empty: no table changes."""
    released: list[str] = []
    """Sequences that were finished, aborted or preempted since the last step. The runner applies this first.

    A sequence may be released and admitted in one plan (it starts over). After a failed step a released sequence may be
    unknown to the runner.
    """
    samples: set[str] = set()
    """Requests that sample in this step, or whose prompt is pooled. The runner appends the sampled tokens to its
    sequence itself."""
    proposals: dict[str, list[int]] = {}
    """Tokens that may follow those of a sampling request, and are computed behind them: they count in
    `num_scheduled_tokens`. The request samples after the last of its own tokens, and after each proposed token as long
    as it sampled the one before: then the proposed tokens are its own. The runner takes back the others."""
    drafts: dict[str, int] = {}
    """Most tokens to draft behind the sampled ones of some requests, for a runner that drafts."""
    token_masks: dict[str, Any] = {}
    """Masks of the sampling requests that may not take every token: int32 arrays with one bit per token, or a
    `sampling.sampler.Masked`, whose mask the runner reads after the forward pass is under way and before `wait`
    returns. A request with proposed tokens has a list instead: an array, or None, for each token that it may sample.
    Only the names are encoded: the process that plans also samples."""
    prompt_targets: dict[str, PromptTargets] = {}
    """Prompt tokens to report, of requests that ask for log probabilities of their prompts."""
    decode_context_tokens: int = 0
    """Sum of the context tokens that the step's decodes read; for the step-time model."""
    chunk_context_products: int = 0
    """Sum over prefill chunks of chunk tokens x context tokens; for the step-time model."""

    @property
    def num_tokens(self) -> int:
        return sum(self.num_scheduled_tokens.values())


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities at one position: the chosen token first, then the most likely ones."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """Rank of the chosen token; 1 is the most likely."""


class StepResult(msgspec.Struct, omit_defaults=True):
    """The runner's result for a `StepPlan`."""

    token_ids: dict[str, list[int]] = {}
    """The sampled tokens of each request in `StepPlan.samples` that did not fail and is not pooled, in order: one, and
    one more for each proposed token that it sampled."""
    logprobs: dict[str, list[TokenLogprobs]] = {}
    """One entry for each token of the requests that ask for them."""
    prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
    """One entry for each token of `StepPlan.prompt_targets`."""
    drafted: dict[str, list[int]] = {}
    """What may follow the last sampled token of the requests in `StepPlan.drafts`."""
    draft_ms: float = 0.0
    """Milliseconds that drafting took: a step without drafts takes so much less."""
    failed: dict[str, str] = {}
    """Requests that failed in this step (non-finite logits and the like), with the reason; the others continue."""
    pooled: dict[str, bytes] = {}
    """The vector or the score of each request in `StepPlan.samples` that is pooled: float32, little-endian."""


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(StepPlan)


def encode_plan(plan: StepPlan) -> bytes:
    """Return the plan for processes that follow it and do not sample: of `token_masks` the names, each with None."""
    return _ENCODER.encode(msgspec.structs.replace(plan, token_masks=dict.fromkeys(plan.token_masks)))


def decode_plan(data: bytes) -> StepPlan:
    return _DECODER.decode(data)
