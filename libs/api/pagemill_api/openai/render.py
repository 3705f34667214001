"""Render answers in OpenAI's shapes: pure functions from values to JSON bytes and SSE events.

Chunks and bodies of both dialects, usage, the model list, vLLM's tokenize pair, errors. A chunk function returns JSON;
`sse` makes it an event. The caller (`pagemill_engine.output`) detokenizes, finds stop strings and orders events.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import orjson

from pagemill_protocol.errors import PagemillError, error_body
from pagemill_protocol.json_pieces import on_one_line
from pagemill_protocol.request.generate import FinishReason, GenerateRequest, Usage

SSE_CONTENT_TYPE = "text/event-stream; charset=utf-8"
SSE_DONE = b"data: [DONE]\n\n"

_CHOICES, _USAGE = b'"choices":[', b'],"usage":{'
_FIRST_INDEX = re.compile(rb'"choices":\[\{"index":(\d+)')

ToolReason = Literal["tool_calls"]
StopReason = str | int | None
"""vLLM's field: the stop string or stop token that ended a choice, or None."""
Logprobs = Mapping[str, Any]
"""Result of `openai.logprobs.chat` or `.completions`."""


class Head(NamedTuple):
    """Fields that every chunk and body of one response repeats."""

    id: str
    model: str
    created_unix_s: int
    system_fingerprint: str | None = None


class Choice(msgspec.Struct, frozen=True):
    """One finished choice of a body. `text` includes the echoed prompt, if any."""

    index: int
    text: str | orjson.Fragment
    finish_reason: FinishReason | ToolReason
    logprobs: Logprobs | None = None
    stop_reason: StopReason = None
    message: Mapping[str, Any] | None = None
    """The message of a chat, in place of `text`: content, reasoning and tool calls."""
    added: Mapping[str, Any] | None = None
    """Further fields of the choice: those of vLLM about tokens."""


class ModelCard(NamedTuple):
    """One entry of `/v1/models`."""

    id: str
    created_unix_s: int
    max_model_len: int | None = None
    root: str | None = None
    """The model's source; `None`: its id."""
    parent: str | None = None
    """The model that an adapter belongs to."""
    pools: bool = False
    """The model answers with vectors or scores, not with text."""


def head(request: GenerateRequest, system_fingerprint: str | None = None) -> Head:
    return Head(request.response_id or request.request_id, request.model, request.created_unix_s, system_fingerprint)


def fingerprint(weights_digest: str) -> str:
    """Return `system_fingerprint`, which is equal for engines with the same weights."""
    return f"fp_{weights_digest[:12]}" if weights_digest else "fp_unknown"


def choice_index(request: GenerateRequest, choice: int) -> int:
    """Return the client's index of one of `request`'s choices."""
    return request.prompt_index * request.sampling.n + choice


def sse(data: bytes) -> bytes:
    return b"data: " + on_one_line(data) + b"\n\n"


def sse_error(error: PagemillError) -> bytes:
    """Return the event that ends a broken stream; clients raise it. No `[DONE]` follows."""
    return sse(error_body(error))


def chat_chunk(
    head: Head,
    index: int,
    text: str | None,
    *,
    role: bool = False,
    finish_reason: FinishReason | ToolReason | None = None,
    logprobs: Logprobs | None = None,
    include_usage: bool = False,
    usage: Usage | None = None,
    added: Mapping[str, Any] | None = None,
    stop_reason: StopReason = None,
    token_ids: Sequence[int] | None = None,
    prompt: Mapping[str, Any] | None = None,
) -> bytes:
    """Return one chunk of a chat.

    `role`: the first chunk of its choice. `text` None: no text, as in a chunk that only finishes. `include_usage`: the
    chunk has `usage: null` unless there is a usage. `added`: reasoning or a tool call. `prompt`: fields about the
    prompt.
    """
    delta: dict[str, Any] = {}
    if role:
        delta["role"] = "assistant"
    if text is not None:
        delta["content"] = text
    delta.update(added or {})
    choice = {"index": index, "delta": delta, "logprobs": logprobs, **_end(finish_reason, stop_reason)}
    if token_ids is not None:
        choice["token_ids"] = token_ids
    return _chunk(head, "chat.completion.chunk", choice, include_usage, usage, prompt)


def completion_chunk(
    head: Head,
    index: int,
    text: str,
    *,
    finish_reason: FinishReason | None = None,
    logprobs: Logprobs | None = None,
    include_usage: bool = False,
    usage: Usage | None = None,
    added: Mapping[str, Any] | None = None,
    stop_reason: StopReason = None,
) -> bytes:
    """Return one chunk of a completion.

    `include_usage` and `usage` as in `chat_chunk`. `added`: further fields of the choice.
    """
    end = _end(finish_reason, stop_reason)
    choice = {"index": index, "text": text, "logprobs": logprobs, **end, **(added or {})}
    return _chunk(head, "text_completion", choice, include_usage, usage)


def usage_chunk(head: Head, chunk_object: str, usage: Usage) -> bytes:
    """Return the last chunk under `stream_options.include_usage`, which has no choices."""
    return orjson.dumps({**_envelope(head, chunk_object), "choices": [], "usage": usage_object(usage)})


def chat_body(head: Head, choices: Iterable[Choice], usage: Usage, prompt: Mapping[str, Any] | None = None) -> bytes:
    return orjson.dumps(chat_answer(head, choices, usage, prompt))


def chat_answer(
    head: Head, choices: Iterable[Choice], usage: Usage, prompt: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the body of a chat, whose fields may contain parts of `JsonPieces`."""
    rendered = [
        {
            "index": choice.index,
            "message": {"role": "assistant", "refusal": None, **(choice.message or {"content": choice.text})},
            "logprobs": choice.logprobs,
            **_end(choice.finish_reason, choice.stop_reason),
            **(choice.added or {}),
        }
        for choice in choices
    ]
    return {**_envelope(head, "chat.completion"), "choices": rendered, "usage": usage_object(usage), **(prompt or {})}


def completion_body(head: Head, choices: Iterable[Choice], usage: Usage) -> bytes:
    return orjson.dumps(completion_answer(head, choices, usage))


def completion_answer(head: Head, choices: Iterable[Choice], usage: Usage) -> dict[str, Any]:
    """Return the body of a completion, whose fields may contain parts of `JsonPieces`."""
    rendered = [
        {
            "index": choice.index,
            "text": choice.text,
            "logprobs": choice.logprobs,
            **_end(choice.finish_reason, choice.stop_reason),
            **(choice.added or {}),
        }
        for choice in choices
    ]
    return {**_envelope(head, "text_completion"), "choices": rendered, "usage": usage_object(usage)}


def merge_completion_bodies(bodies: Sequence[bytes]) -> Iterator[bytes]:
    """Yield the pieces of one body made of the bodies of several prompts: choices by index, usage summed, the rest as
    in the first.

    Choices are not parsed. `completion_answer` writes them between `_CHOICES` and `_USAGE`, neither of which can stand
    inside a JSON string, where a quote is escaped.
    """
    found = sorted((_first_index(body), place) for place, body in enumerate(bodies))
    usages: list[Usage] = []
    for _, place in found:
        body = bodies[place]
        begin, end = body.index(_CHOICES) + len(_CHOICES), body.rindex(_USAGE)
        usages.append(_parse_usage(orjson.loads(body[end + len(_USAGE) - 1 : -1])))
        yield b"," if len(usages) > 1 else bodies[0][: bodies[0].index(_CHOICES) + len(_CHOICES)]
        yield body[begin:end]
    yield _USAGE[:-1] + orjson.dumps(usage_object(add_usage(*usages))) + b"}"


def _first_index(body: bytes) -> int:
    found = _FIRST_INDEX.search(body)
    assert found is not None, "not the body of a completion"
    return int(found[1])


def add_usage(*usages: Usage) -> Usage:
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
    )


_COMPLETION_DETAILS = ("reasoning_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens")


def usage_object(usage: Usage) -> dict[str, Any]:
    details: dict[str, Any] = {"prompt_tokens_details": {"cached_tokens": usage.cached_tokens}}
    counts = {name: count for name in _COMPLETION_DETAILS if (count := getattr(usage, name)) is not None}
    if counts:
        details["completion_tokens_details"] = counts
    return {**_token_counts(usage), **details}


def models_body(models: Iterable[ModelCard]) -> bytes:
    """Return the body of `GET /v1/models`."""
    return orjson.dumps({"object": "list", "data": [_model(card) for card in models]})


def model_body(card: ModelCard) -> bytes:
    """Return the body of `GET /v1/models/{id}`."""
    return orjson.dumps(_model(card))


def tokenize_body(token_ids: Sequence[int], max_model_len: int, token_strs: Sequence[str] | None = None) -> bytes:
    """Return the body of `POST /tokenize`."""
    return orjson.dumps(
        {
            "count": len(token_ids),
            "max_model_len": max_model_len,
            "tokens": list(token_ids),
            "token_strs": list(token_strs) if token_strs is not None else None,
        }
    )


def detokenize_body(text: str) -> bytes:
    """Return the body of `POST /detokenize`."""
    return orjson.dumps({"prompt": text})


def _end(finish_reason: FinishReason | ToolReason | None, stop_reason: StopReason) -> dict[str, Any]:
    if finish_reason is None:
        return {"finish_reason": None}
    return {"finish_reason": finish_reason, "stop_reason": stop_reason}


def _chunk(
    head: Head,
    kind: str,
    choice: dict[str, Any],
    include_usage: bool,
    usage: Usage | None,
    added: Mapping[str, Any] | None = None,
) -> bytes:
    chunk = _envelope(head, kind)
    chunk["choices"] = [choice]
    chunk.update(added or {})
    if usage is not None or include_usage:
        chunk["usage"] = _token_counts(usage) if usage is not None else None
    return orjson.dumps(chunk)


def _token_counts(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _envelope(head: Head, kind: str) -> dict[str, Any]:
    return {
        "id": head.id,
        "object": kind,
        "created": head.created_unix_s,
        "model": head.model,
        "system_fingerprint": head.system_fingerprint,
    }


def _parse_usage(usage: Mapping[str, Any]) -> Usage:
    return Usage(
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
    )


def _model(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.id,
        "object": "model",
        "created": card.created_unix_s,
        "owned_by": "pagemill",
        "root": card.root or card.id,
        "parent": card.parent,
        "max_model_len": card.max_model_len,
    }
