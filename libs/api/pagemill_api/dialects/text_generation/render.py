"""Render answers in TGI's shapes: an event for each token of a stream, one object for a complete answer, and errors.

The text of a stream's token is the text that it adds to the answer, so the joined texts are the answer. Where several
tokens arrive at once and their own texts differ from the added text, the last token has all of it. The token that ends
an answer without being part of its text is `special`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from pagemill_api.answers.events import Content, Event
from pagemill_api.dialects.base import AnswerRenderer, ChoiceEnd, FinishedChoice, Piece
from pagemill_api.openai.logprobs import PositionLogprobs, TokenLogprob
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.json_pieces import JsonPieces, JsonRows, array_pieces, on_one_line
from pagemill_protocol.request.generate import FinishReason, GenerateRequest, Usage

NO_TOKEN = PositionLogprobs(TokenLogprob("", b"", None, 0), [])
"""Placeholder where text is delivered after its last token, since an event needs a token."""
OVERLOADED = (429, 503)


class TgiRenderer(AnswerRenderer):
    def __init__(self, request: GenerateRequest) -> None:
        self._asked: dict[str, Any] = orjson.loads(request.client_fields or b"{}")
        self._prompt_tokens = len(request.prompt_token_ids)
        self._seed = request.sampling.seed if request.sampling.temperature else None
        self._text: list[str] = [self._asked.get("full_text", "")]

    def resume(self, choice: int, events: Sequence[Event], end: ChoiceEnd | None) -> None:
        self._text += [event.text for event in events if isinstance(event, Content)]

    def chunk(self, piece: Piece) -> bytes:
        self._text.append(piece.text)
        positions = piece.positions or [NO_TOKEN]
        tokens = _streamed(positions, piece)
        num_tokens = piece.usage.completion_tokens if piece.usage is not None else 0
        events: list[dict[str, Any]] = [
            {
                "index": num_tokens - len(tokens) + at,
                "token": token,
                **self._top(position),
                "generated_text": None,
                "details": None,
            }
            for at, (token, position) in enumerate(zip(tokens, positions, strict=True), 1)
        ]
        if piece.finish_reason is not None:
            events[-1]["generated_text"] = "".join(self._text)
            if self._asked.get("details"):
                events[-1]["details"] = {
                    **self._end(piece.finish_reason, piece.stop_reason, num_tokens),
                    "input_length": self._prompt_tokens,
                }
        return b"".join(_event(each) for each in events)

    def end(self, usage: Usage) -> bytes:
        return b""

    def collected_logprobs(self, of_prompt: bool) -> TgiTokens:
        return TgiTokens(of_prompt=of_prompt)

    def body(self, choices: Sequence[FinishedChoice], usage: Usage) -> list[bytes]:
        (choice,) = choices
        json = JsonPieces()
        answer: dict[str, Any] = {"generated_text": "".join([*self._text, choice.text])}
        if self._asked.get("details"):
            answer["details"] = self._details(choice, usage, json)
        return json.write([answer] if self._asked.get("in_list") else answer)

    def _details(self, choice: FinishedChoice, usage: Usage, json: JsonPieces) -> dict[str, Any]:
        generated, echoed = choice.logprobs, choice.prompt.echoed
        if not isinstance(generated, TgiTokens):
            generated = TgiTokens()
        generated.end(choice.text if _ended_by_token(choice.finish_reason, choice.stop_reason) else None)
        prefill = echoed.tokens if isinstance(echoed, TgiTokens) else None
        return {
            **self._end(choice.finish_reason, choice.stop_reason, usage.completion_tokens),
            "prefill": json.part(array_pieces(prefill)),
            "tokens": json.part(array_pieces(generated.tokens)),
            **({"top_tokens": json.part(array_pieces(generated.tops))} if self._asked.get("top") else {}),
        }

    def _top(self, position: PositionLogprobs) -> dict[str, Any]:
        return {"top_tokens": [_token(each) for each in position.top]} if self._asked.get("top") else {}

    def _end(self, reason: FinishReason, stop_reason: str | int | None, num_tokens: int) -> dict[str, Any]:
        named = "length" if reason != "stop" else "stop_sequence" if isinstance(stop_reason, str) else "eos_token"
        return {"finish_reason": named, "generated_tokens": num_tokens, "seed": self._seed}


class TgiTokens:
    """The tokens of a body's details, rendered as they come. The last one waits for the end of the answer."""

    def __init__(self, *, of_prompt: bool = False) -> None:
        self.tokens, self.tops = JsonRows(), JsonRows()
        self._of_prompt = of_prompt
        self._last: PositionLogprobs | None = None

    @property
    def num_bytes(self) -> int:
        return self.tokens.num_bytes + self.tops.num_bytes

    def add(self, positions: Sequence[PositionLogprobs]) -> None:
        for position in positions:
            if self._of_prompt:
                self.tokens.add(orjson.dumps(_input_token(position.chosen)))
                continue
            self._take_last(is_special=False)
            self._last = position

    def end(self, text: str | None) -> None:
        """Render the last token. `text`: that of the answer if a token ended it, which may not be part of it."""
        if self._last is not None:
            self._take_last(is_special=text is not None and not text.endswith(self._last.chosen.token))

    def _take_last(self, *, is_special: bool) -> None:
        last, self._last = self._last, None
        if last is not None:
            self.tokens.add(orjson.dumps({**_token(last.chosen), "special": is_special}))
            self.tops.add(orjson.dumps([_token(each) for each in last.top]))


def error_body(error: PagemillError) -> bytes:
    return orjson.dumps({"error": error.message, "error_type": _error_type(error)})


def error_event(error: PagemillError) -> bytes:
    return b"data:" + on_one_line(error_body(error)) + b"\n\n"


def _error_type(error: PagemillError) -> str:
    if error.status in OVERLOADED:
        return "overloaded"
    if error.status >= 500:
        return "generation"
    return "validation" if error.status in (400, 413, 415, 422) else error.code or error.type


def _streamed(positions: Sequence[PositionLogprobs], piece: Piece) -> list[dict[str, Any]]:
    tokens = [_token(each.chosen) for each in positions]
    own = [each.chosen.token for each in positions]
    if "".join(own) == piece.text:
        return tokens
    if _ended_by_token(piece.finish_reason, piece.stop_reason) and "".join(own[:-1]) == piece.text:
        tokens[-1]["special"] = True
        return tokens
    for token in tokens:
        token["text"] = ""
    tokens[-1]["text"] = piece.text
    return tokens


def _ended_by_token(reason: FinishReason | None, stop_reason: str | int | None) -> bool:
    return reason == "stop" and not isinstance(stop_reason, str)


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {"id": token.token_id, "text": token.token, "logprob": token.logprob, "special": False}


def _input_token(token: TokenLogprob) -> dict[str, Any]:
    return {"id": token.token_id, "text": token.token, "logprob": token.logprob}


def _event(fields: dict[str, Any]) -> bytes:
    return b"data:" + on_one_line(orjson.dumps(fields)) + b"\n\n"
