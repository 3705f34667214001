"""Render log probabilities in the shapes of both dialects.

`position` turns one position's ids and values into token texts; `chat` and `completions` return the JSON of a chunk.
`ChatLogprobs` and `CompletionLogprobs` render those of a whole choice position by position, as they come: kept as
objects until the end, they would take several times the memory, and writing them would take seconds at once. Tokens
are shown with their special characters; `bytes` lets a client join split UTF-8.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import orjson

from pagemill_protocol.json_pieces import JsonPieces, JsonRows, array_pieces, joined_array

if TYPE_CHECKING:
    from pagemill_api.text.tokenizer import Tokenizer

LOWEST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot express, as in OpenAI's API."""


class TokenLogprob(NamedTuple):
    token: str
    token_bytes: bytes
    logprob: float | None
    """`None` for the prompt's first token, which has no predecessor."""
    token_id: int = -1


class PositionLogprobs(NamedTuple):
    """One generated token and its most likely alternatives."""

    chosen: TokenLogprob
    top: list[TokenLogprob]
    text_offset: int = 0
    """Number of characters before it in the choice's text, including an echoed prompt."""


class CollectedLogprobs(Protocol):
    """Log probabilities of one choice, or of the prompt, that are rendered as they come."""

    @property
    def num_bytes(self) -> int: ...
    def add(self, positions: Sequence[PositionLogprobs]) -> None: ...


def position(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[float], num_top: int, text_offset: int = 0
) -> PositionLogprobs:
    """Return a position from ids and values: the chosen token first, then the most likely ones, as engines send
    them."""
    entries = [
        TokenLogprob(tokenizer.token_text(token_id), tokenizer.token_bytes(token_id), _finite(logprob), token_id)
        for token_id, logprob in zip(token_ids[: num_top + 1], logprobs, strict=False)
    ]
    return PositionLogprobs(entries[0], entries[1:], text_offset)


def first_of_prompt(tokenizer: Tokenizer, token_id: int) -> PositionLogprobs:
    """Return the position of the prompt's first token, which has no log probability."""
    chosen = TokenLogprob(tokenizer.token_text(token_id), tokenizer.token_bytes(token_id), None, token_id)
    return PositionLogprobs(chosen, [])


class PromptOffsets:
    """Finds the places of a prompt's tokens in its text, which may leave out special tokens."""

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        self._tokenizer = tokenizer
        self._text = text
        self._detokenizer = tokenizer.detokenizer(skip_special_tokens=False)

    def next(self, token_id: int) -> int:
        """Return the number of characters before the prompt's next token."""
        place = min(self._detokenizer.start_of(token_id), len(self._text))
        is_special = token_id in self._tokenizer.special_ids
        if not is_special or self._text.startswith(self._tokenizer.token_text(token_id), place):
            self._detokenizer.push([token_id])
        return place


def by_token_id(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[float], rank: int, num_top: int
) -> dict[str, Any]:
    """Return one position of `prompt_logprobs` in vLLM's shape.

    Arguments as those of `position`; `rank`: rank of the first token.
    """
    entries = zip(token_ids[: num_top + 1], logprobs, range(num_top + 1), strict=False)
    found: dict[str, Any] = {}
    for token_id, logprob, place in entries:
        entry = {"logprob": _finite(logprob), "rank": place or rank, "decoded_token": tokenizer.token_text(token_id)}
        found.setdefault(str(token_id), entry)
    return found


def chat(positions: Sequence[PositionLogprobs]) -> dict[str, Any]:
    """Return `choices[].logprobs` of a chat chunk or body."""
    return {"content": [chat_position(at) for at in positions], "refusal": None}


class ChatLogprobs:
    """`choices[].logprobs` of a chat body."""

    def __init__(self) -> None:
        self._content = JsonRows()

    @property
    def num_bytes(self) -> int:
        return self._content.num_bytes

    def add(self, positions: Sequence[PositionLogprobs]) -> None:
        for at in positions:
            self._content.add(orjson.dumps(chat_position(at)))

    def value(self, json: JsonPieces) -> dict[str, Any]:
        return {"content": json.part(array_pieces(self._content)), "refusal": None}


class CompletionLogprobs:
    """`choices[].logprobs` of a completions body, or its beginning that reports the echoed prompt."""

    def __init__(self) -> None:
        self._has_top = False
        self._offsets, self._logprobs, self._tokens, self._tops = JsonRows(), JsonRows(), JsonRows(), JsonRows()

    @property
    def num_bytes(self) -> int:
        return sum(rows.num_bytes for rows in (self._offsets, self._logprobs, self._tokens, self._tops))

    def add(self, positions: Sequence[PositionLogprobs]) -> None:
        for at in positions:
            self._offsets.add(b"%d" % at.text_offset)
            self._logprobs.add(orjson.dumps(at.chosen.logprob))
            self._tokens.add(orjson.dumps(at.chosen.token))
            self._tops.add(orjson.dumps(_top_dict(at)))
            self._has_top = self._has_top or bool(at.top)

    def value(self, json: JsonPieces | None, echoed: CompletionLogprobs | None = None) -> dict[str, Any]:
        """Return the JSON value, with `echoed` before it. `json` None: for a chunk, which `orjson` writes whole."""

        def array(rows: JsonRows, before: JsonRows | None) -> orjson.Fragment:
            return joined_array(before, rows) if json is None else json.part(array_pieces(before, rows))

        first = echoed or CompletionLogprobs()
        has_top = self._has_top or first._has_top
        return {
            "text_offset": array(self._offsets, first._offsets),
            "token_logprobs": array(self._logprobs, first._logprobs),
            "tokens": array(self._tokens, first._tokens),
            "top_logprobs": array(self._tops, first._tops) if has_top else None,
        }


def completions(positions: Sequence[PositionLogprobs]) -> dict[str, Any]:
    """Return `choices[].logprobs` of a completions chunk.

    Without alternatives, `top_logprobs` is null; otherwise each entry also contains the chosen token.
    """
    tops = [_top_dict(at) for at in positions] if any(at.top for at in positions) else None
    return {
        "text_offset": [at.text_offset for at in positions],
        "token_logprobs": [at.chosen.logprob for at in positions],
        "tokens": [at.chosen.token for at in positions],
        "top_logprobs": tops,
    }


def chat_position(at: PositionLogprobs) -> dict[str, Any]:
    return {**_entry(at.chosen), "top_logprobs": [_entry(top) for top in at.top]}


def _entry(item: TokenLogprob) -> dict[str, Any]:
    return {"token": item.token, "logprob": item.logprob, "bytes": list(item.token_bytes)}


def _top_dict(at: PositionLogprobs) -> dict[str, float] | None:
    entries = {item.token: item.logprob for item in (*at.top, at.chosen) if item.logprob is not None}
    return entries or None


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB) if math.isfinite(logprob) else LOWEST_LOGPROB
