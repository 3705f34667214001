"""The wire between gateway and engine for one request: `GenerateRequest` out, frames back.

The gateway validates, renders and tokenizes; the engine gets ids and returns frames (`pagemill_protocol.frames`). Each
is meta (what a gateway must know to account, resume or finish the request) and payload (bytes the client may get
unparsed: complete SSE events when streaming, else the JSON body in the last frame). The engine's own routes use it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from pagemill_protocol.answers.events import AnswerFormat
from pagemill_protocol.errors import invalid_field
from pagemill_protocol.pooling import PoolingParams
from pagemill_protocol.sampling import MAX_PROMPT_LOGPROBS, SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class ChoiceResume(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of one choice when its stream broke: the next engine continues from here."""

    index: int
    token_ids: list[int]
    num_text_chars: int
    """Characters of its text that were delivered; 0 if the answer is not streamed."""
    finished: bool = False
    finish_reason: FinishReason | None = None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One prompt with its sampling, as tokens. Sent as msgpack to `POST /internal/generate`."""

    request_id: str
    """Assigned by the gateway, or by the engine's own routes; also the client's response id, for example
    `chatcmpl-...`."""
    response_id: str = ""
    """The client's response id if it is not `request_id`: one of several prompts of a completions request."""
    model: str
    """The name the client used; echoed in the response."""
    prompt_token_ids: list[int]
    sampling: SamplingParams
    pooling: PoolingParams | None = None
    """A vector or a score is made of the prompt, and no token is generated; the rest of `sampling` is not looked at."""
    dialect: str = "chat"
    """Name of the client's dialect (`pagemill_protocol.dialects`): the engine renders the client's bytes in it."""
    client_fields: str = ""
    """What the dialect repeats of the client's body in its answer, as JSON; most repeat nothing."""
    answer_format: AnswerFormat | None = None
    """How reasoning and tool calls are read from the text; `None`: the answer is text."""
    created_unix_s: int = 0
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    priority: int = 0
    """Smaller is served first; 32 bits."""
    prompt_text: str | None = None
    """Only for `echo` in the completions dialect."""
    prompt_only: bool = False
    """The answer is the echo alone: the one token that an engine generates is not part of it."""
    return_token_ids: bool = False
    """The answer has the ids of the prompt's and of its own tokens."""
    prompt_index: int = 0
    """Index of this prompt in a completions request of several; choice indices start at prompt_index * n."""
    cache_salt: str = ""
    """Root salt of the prefix cache, derived by the gateway from `prefixCaching.scope`; clients never send it."""
    adapter_digest: str = ""
    """Digest of the adapter to use; empty: the model alone. An engine that serves no adapters refuses it."""
    token_allowance: int | None = None
    """Tokens of each sequence that the caller's limits allow so far, those of a `resume` included: at this many it ends
    by `length`, unless an `AllowanceRaise` came before. `None`: no limit but the request's own."""
    resume: list[ChoiceResume] = []
    weights_digest: str = ""
    cached_tokens: int | None = None
    """With `resume`: the cache hits at the first engine."""
    predicted_cached_tokens: int = 0
    """The cached tokens that the gateway predicted, reported until the scheduler has looked them up."""

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Most likely tokens whose log probabilities the engine reports beside each prompt token's; `None`: nothing
        about the prompt."""
        return max(self.prompt_lists, default=None)

    @property
    def prompt_lists(self) -> list[int]:
        """As `num_prompt_logprobs`, for each list about the prompt in the answer: one if it was asked for by name, one
        for `echo` with `logprobs`."""
        asked = (self.sampling.prompt_logprobs, None if self.prompt_text is None else self.sampling.logprobs)
        return [each for each in asked if each is not None]


def check_prompt_logprobs(requests: Sequence[GenerateRequest]) -> None:
    """Raise `PagemillError` (400) where the prompts of one body have more log probabilities than an answer may hold."""
    num_all = sum(
        len(request.prompt_token_ids) * (num_top + 1) * request.sampling.n
        for request in requests
        for num_top in request.prompt_lists
    )
    if num_all > MAX_PROMPT_LOGPROBS:
        field = "logprobs" if requests[0].sampling.prompt_logprobs is None else "prompt_logprobs"
        raise invalid_field(
            field,
            f"The answer would hold {num_all} log probabilities of prompt tokens; at most {MAX_PROMPT_LOGPROBS} are "
            f"reported. Lower {field} or n, or send fewer or shorter prompts at once.",
        )


class AllowanceRaise(msgspec.Struct, frozen=True):
    """More tokens for a request that is being answered. Sent as msgpack to `POST /internal/allowance`."""

    request_id: str
    token_allowance: int
    """In place of the request's; a smaller one changes nothing."""


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose KV was found in the prefix cache."""
    reasoning_tokens: int | None = None
    """The part of the completion tokens; `None`: reasoning is not separated from text."""


class FrameMeta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the gateway keeps of one frame. The default of every field means "nothing new"."""

    choice: int = 0
    token_ids: list[int] = []
    """Tokens this frame delivers."""
    num_text_chars: int = 0
    """Characters of text of this choice delivered so far, this frame included."""
    position: int = 0
    """Sampler position: tokens of this choice generated so far."""
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache; on the first frame of the request's first choice."""
    usage: Usage | None = None
    queue_s: float = 0.0
    """From the request's arrival in the engine to its first scheduling; on the last frame."""
    last: bool = False
    """No frame follows; `usage` is set."""
    error: str | None = None
    """The request failed; the payload is a complete error body, or the event that ends the stream."""
    error_status: int = 0
    error_type: str = ""
    """Together with the next ones, the error's other fields; empty: an engine of an earlier version."""
    error_param: str | None = None
    error_code: str | None = None
