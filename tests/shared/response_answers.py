"""Answers of fake engines to `/v1/responses`, rendered as real engines render them."""

from __future__ import annotations

import asyncio
from typing import Any

from pagemill_api.answers.events import Content
from pagemill_api.dialects.base import FinishedChoice, Piece
from pagemill_api.dialects.openai_responses.responses import ResponsesDialect
from pagemill_protocol.frames import encode_frame
from pagemill_protocol.request.generate import FrameMeta, GenerateRequest, Usage


def answers(text: str, gate: asyncio.Event | None = None) -> Any:
    """Return a behaviour that answers with this text as an engine does, once `gate` is set."""

    async def behave(_: Any, request: GenerateRequest, response: Any, http: Any) -> None:
        renderer, usage = ResponsesDialect().renderer(request, None), Usage(3, 2, 1)
        await response.prepare(http)
        if gate is not None:
            await gate.wait()
        meta = FrameMeta(token_ids=[1], position=1, num_text_chars=len(text), finish_reason="stop")
        last = FrameMeta(last=True, usage=usage, finish_reason="stop")
        if request.stream:
            piece = Piece(0, text, True, "stop", None, None, [Content(text)])
            await response.write(encode_frame(meta, renderer.chunk(piece)))
            await response.write(encode_frame(last, renderer.end(usage)))
        else:
            body = renderer.body([FinishedChoice(0, text, "stop", None, [Content(text)])], usage)
            await response.write(encode_frame(last, body))
        await response.write_eof()

    return behave


def prompt_of(engine: Any) -> str:
    """Return the engine's last prompt; the tokenizer numbers printable characters."""
    return "".join(chr(ord("!") + token_id) for token_id in engine.requests[-1].prompt_token_ids)
