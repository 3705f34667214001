"""The messages between gateway and engine for one request: `GenerateRequest` out, frames back.

The gateway validates, renders and tokenizes; the engine receives token ids and returns frames
(`pagemill_protocol.frames`). A frame has meta (what a gateway needs to account, resume or finish the request) and
payload (bytes that are forwarded to the client unparsed: complete SSE events when streaming, else the JSON body in the
last frame). The engine's own routes use the same messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from pagemill_protocol.errors import invalid_field
from pagemill_protocol.request.answer_format import AnswerFormat
from pagemill_protocol.request.pooling import PoolingParams
from pagemill_protocol.request.sampling import MAX_ANSWER_VALUES, MAX_PROMPT_LOGPROBS, SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]
MAX_ECHO_BYTES = 192 * 1024 * 1024
"""Limit for the echoed prompts of one answer, which each choice repeats. A frame takes a quarter more."""
MAX_REUSE_POINTS = 4
KEPT_VALUE_COPIES = 50
"""How many values of an answer that is not streamed one value counts for that a stream keeps until its end, where
several events repeat it at once."""
MOST_JSON_BYTES = 6
"""Bytes of a character in a JSON string at most."""


class ChoiceResume(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of one choice when its stream broke: the next engine continues from it."""

    index: int
    token_ids: list[int]
    num_text_chars: int
    """Characters of the choice's text that were delivered; 0 if the answer is not streamed."""
    finished: bool = False
    finish_reason: FinishReason | None = None
    num_events: int = 0
    """Events of the stream that were delivered, for dialects that number them."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One prompt with its sampling parameters, as tokens. Sent as msgpack over a link."""

    request_id: str
    """Id assigned by the gateway, or by the engine's own routes; also the client's response id, for example
    `chatcmpl-...`."""
    response_id: str = ""
    """The client's response id where it differs from `request_id`: for one of several prompts of a completions
    request."""
    model: str
    """The model name that the client sent; repeated in the response."""
    prompt_token_ids: list[int]
    sampling: SamplingParams
    predicted_token_ids: list[int] = []
    """Tokens that the answer probably repeats, by the client's own words. They change no answer."""
    reuse_points: list[int] = []
    """Numbers of leading prompt tokens behind which other prompts are likely to go on differently; the first
    `MAX_REUSE_POINTS` count. Models with recurrent layers keep a state there."""
    pooling: PoolingParams | None = None
    """If set, the model returns a vector or a score of the prompt and generates no token; the rest of `sampling` is
    ignored."""
    dialect: str = "chat"
    """Name of the client's dialect (`pagemill_api.dialects`), in which the engine renders the answer."""
    client_fields: str = ""
    """Fields of the client's body that the dialect repeats in its answer, as JSON; most dialects repeat none."""
    answer_format: AnswerFormat | None = None
    """How reasoning and tool calls are parsed from the text; `None`: the answer is plain text."""
    created_unix_s: int = 0
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    priority: int = 0
    """Smaller is served first; 32 bits."""
    prompt_text: str | None = None
    """Set only for `echo` in the completions dialect."""
    prompt_only: bool = False
    """The answer is the echo alone, without the one token that an engine generates."""
    return_token_ids: bool = False
    """The answer includes the ids of the prompt's and of its own tokens."""
    keeps_logprobs: bool = False
    """The last events of a stream repeat all its log probabilities, so they are kept until then."""
    prompt_index: int = 0
    """Index of this prompt in a completions request of several; choice indices start at prompt_index * n."""
    cache_salt: str = ""
    """Root salt of the prefix cache, derived by the gateway from `prefixCaching.scope`; clients never send it."""
    adapter_digest: str = ""
    """Digest of the adapter to use; empty: the model alone. An engine that serves no adapters refuses it."""
    token_allowance: int | None = None
    """Tokens of each sequence, including those of `resume`, that the caller's limits allow so far. A sequence that
    reaches the number ends with `length`, unless a larger one came before (`link`). `None`: no limit but the request's
    own."""
    resume: list[ChoiceResume] = []
    weights_digest: str = ""
    cached_tokens: int | None = None
    """With `resume`: cached tokens that the first engine found."""
    predicted_cached_tokens: int = 0
    """Cached tokens that the gateway predicted; reported until the scheduler has looked them up."""

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The number of most likely tokens reported beside each prompt token, or None for no report on the prompt."""
        return max(self.prompt_lists, default=None)

    @property
    def prompt_lists(self) -> list[int]:
        """`num_prompt_logprobs` of each list about the prompt in the answer: one for `prompt_logprobs`, one for `echo`
        with `logprobs`."""
        asked = (self.sampling.prompt_logprobs, None if self.prompt_text is None else self.sampling.logprobs)
        return [each for each in asked if each is not None]

    @property
    def values_per_token(self) -> int:
        """The number of log probabilities and ids that each generated token adds to an answer that is not streamed.

        0: its tokens are only text. The values of a stream do not count, since they leave as they come, unless they are
        kept.
        """
        if (self.stream and not self.keeps_logprobs) or self.pooling is not None:
            return 0
        num_alternatives = self.sampling.num_alternatives
        num_values = (0 if num_alternatives is None else num_alternatives + 1) + self.return_token_ids
        return num_values * KEPT_VALUE_COPIES if self.stream else num_values


def most_tokens_of_values(request: GenerateRequest, most_values: int, num_prompts: int = 1) -> int | None:
    """Return how many tokens each sequence may have so that the answer has at most `most_values`; None: any number."""
    per_token = request.values_per_token
    return most_values // (per_token * request.sampling.num_sequences * num_prompts) if per_token else None


def check_answer(
    requests: Sequence[GenerateRequest], most_values: int = MAX_ANSWER_VALUES, limit_param: str = "max_tokens"
) -> None:
    """Raise `PagemillError` (400) if the answer to the prompts of one body could become larger than allowed.

    `most_values`: log probabilities and token ids of an answer that is not streamed. `limit_param`: the client's field
    for the most tokens.
    """
    _check_prompt_logprobs(requests)
    _check_echo(requests)
    num_values = sum(
        request.values_per_token * request.sampling.num_sequences * request.sampling.max_tokens
        for request in requests
        if request.sampling.max_tokens is not None
    )
    if num_values <= most_values:
        return
    request, sampling = requests[0], requests[0].sampling
    width, asked = ("n", sampling.n) if sampling.best_of is None else ("best_of", sampling.best_of)
    listing = "logprob_token_ids" if sampling.logprob_token_ids is not None else _logprobs_field(request)
    prompts = f"{len(requests)} prompts x " if len(requests) > 1 else ""
    fits = most_tokens_of_values(request, most_values, len(requests)) or 0
    raise invalid_field(
        limit_param,
        f"The answer could hold {num_values} log probabilities and token ids: {prompts}`{width}` ({asked}) x "
        f"`{limit_param}` ({sampling.max_tokens}) x {request.values_per_token} for each token (`{listing}`). At most "
        f"{most_values} are allowed in an answer that is kept until its end (max_answer_values). "
        + (f"Send `{limit_param}` of at most {fits}, or lower" if fits else "Lower")
        + f" `{width}` or `{listing}`"
        + ("." if request.stream or request.dialect == "responses" else ", or send `stream: true`."),
    )


def _logprobs_field(request: GenerateRequest) -> str:
    if request.sampling.num_alternatives is None:
        return "return_token_ids"
    return "top_logprobs" if request.dialect in ("chat", "responses") else "logprobs"


def _check_echo(requests: Sequence[GenerateRequest]) -> None:
    num_bytes = sum(
        len(request.prompt_text) * request.sampling.n for request in requests if request.prompt_text is not None
    )
    if num_bytes * MOST_JSON_BYTES <= MAX_ECHO_BYTES:  # no need to render
        return
    num_bytes = sum(
        len(msgspec.json.encode(request.prompt_text)) * request.sampling.n
        for request in requests
        if request.prompt_text is not None
    )
    if num_bytes > MAX_ECHO_BYTES:
        raise invalid_field(
            "echo",
            f"`echo` would repeat {num_bytes} bytes of prompts, once for each of `n` ({requests[0].sampling.n}) "
            f"choices; at most {MAX_ECHO_BYTES} are allowed in one answer. Lower `n`, or send no `echo`.",
        )


def _check_prompt_logprobs(requests: Sequence[GenerateRequest]) -> None:
    """Raise `PagemillError` (400) if the prompts of one body have more log probabilities than an answer may contain."""
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


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose KV was found in the prefix cache."""
    reasoning_tokens: int | None = None
    """The part of `completion_tokens` in reasoning; `None`: reasoning is not separated from text."""
    accepted_prediction_tokens: int | None = None
    """Tokens that were proposed and generated; `None`: the client predicted nothing."""
    rejected_prediction_tokens: int | None = None
    """Tokens that were proposed and not generated."""
    proposed_tokens: int = 0
    """Tokens that were proposed and verified, whether the client predicted something or not."""
    accepted_tokens: int = 0
    """Those of them that were generated."""


class FrameMeta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The part of a frame that the gateway reads. The default of every field means "nothing new"."""

    choice: int = 0
    token_ids: list[int] = []
    """Tokens that this frame delivers."""
    num_text_chars: int = 0
    """Characters of text of this choice delivered so far, including this frame."""
    position: int = 0
    """Sampler position: tokens of this choice generated so far."""
    num_events: int = 0
    """Events of the stream so far, including this frame, for dialects that number them."""
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache; on the first frame of the request's first choice."""
    usage: Usage | None = None
    queue_s: float = 0.0
    """Seconds from the request's arrival in the engine to its first scheduling; on the last frame."""
    last: bool = False
    """No frame follows; `usage` is set."""
    error: str | None = None
    """The request failed; the payload is a complete error body, or the event that ends the stream."""
    error_status: int = 0
    error_type: str = ""
    """The error's other fields are `error_type`, `error_param` and `error_code`."""
    error_param: str | None = None
    error_code: str | None = None
