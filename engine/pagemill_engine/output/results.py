"""Return types of the offline API, with vLLM's field names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pagemill_protocol.request.generate import FinishReason


@dataclass(slots=True, frozen=True)
class Logprob:
    """One token at one position."""

    logprob: float
    rank: int | None
    """Rank by probability, from 1. Only the chosen token's rank is exact; alternatives are counted in order."""
    decoded_token: str


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, in seconds since 1970 like `time.time()`."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float = 0.0
    finished_time: float | None = None
    time_in_queue: float | None = None
    """Seconds."""
    first_token_latency: float = 0.0
    """Seconds from arrival to the first token."""
    num_generation_tokens: int = 0
    num_proposed_tokens: int = 0
    """Tokens that were proposed, to verify several in a step."""
    num_accepted_tokens: int = 0
    """Those of them that were generated."""


@dataclass(slots=True)
class CompletionOutput:
    """One choice."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    """Sum of the log probabilities of `token_ids`, if they were asked for."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each position: the chosen token first, then the most likely ones."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token that ended the choice; the message when `finish_reason` is "error"."""
    lora_request: None = None
    """Always None: engines serve no adapters."""
    routed_experts: None = None
    """Always None."""

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class BeamSearchSequence:
    """One answer of a beam search."""

    tokens: list[int]
    """Prompt and output tokens."""
    logprobs: list[dict[int, Logprob]]
    """For each output position: the chosen token first, then the most likely ones."""
    cum_logprob: float
    """Sum over the output tokens, before any length penalty."""
    text: str
    """Text of prompt and output."""
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """All beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class RequestOutput:
    """One prompt and its choices."""

    request_id: str
    prompt: str | None
    """The prompt's text; None when token ids were given."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    """Number of prompt tokens found in the prefix cache."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """If asked for: None for the first token, then entries like `CompletionOutput.logprobs`."""
    finished: bool = False
    """Whether every choice is complete."""
    metrics: RequestMetrics | None = None
    lora_request: None = None
    encoder_prompt: None = None
    encoder_prompt_token_ids: None = None
    multi_modal_placeholders: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None


@dataclass(slots=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """Result of `LLM.embed` for one prompt."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass(slots=True)
class ScoringOutput:
    score: float


@dataclass(slots=True)
class ScoringRequestOutput:
    """Result of `LLM.score` for one pair."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    """Tokens of the pair; of the second text if the score is a cosine."""
    finished: bool = True
