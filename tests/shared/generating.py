"""Answers of fake engines: given words, or single tokens up to the limits of request and allowance."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from aiohttp import web

from pagemill_api.dialects.base import FinishedChoice, Piece
from pagemill_api.dialects.registry import dialect_of
from pagemill_api.openai import render
from pagemill_protocol.frames import encode_frame
from pagemill_protocol.request.continuing import PROGRESS_TOKENS, can_be_continued
from pagemill_protocol.request.generate import FinishReason, FrameMeta, GenerateRequest, Usage

CHUNK_OBJECTS = {"chat": "chat.completion.chunk", "completions": "text_completion"}


class Engine(Protocol):
    max_model_len: int
    allowances: dict[str, int]
    """The allowances of the requests being answered, if they have any."""
    num_generated: int


Behaviour = Callable[[Any, GenerateRequest, web.StreamResponse, web.Request], Awaitable[None]]


def answer_frames(request: GenerateRequest, pieces: tuple[str, ...]) -> list[bytes]:
    """Return the frames of an answer in which every choice is `pieces`, continued from a `resume`."""
    head = render.head(request)
    usage = Usage(len(request.prompt_token_ids), len(pieces) * request.sampling.n)
    if request.dialect == "messages":
        return _messages_frames(request, pieces, usage)
    frames: list[bytes] = []
    indices = [render.choice_index(request, choice) for choice in range(request.sampling.n)]
    if not request.stream:
        choices = [render.Choice(index, "".join(pieces), "stop") for index in indices]
        body = render.chat_body if request.dialect == "chat" else render.completion_body
        return [encode_frame(FrameMeta(last=True, usage=usage, finish_reason="stop"), body(head, choices, usage))]
    delivered = {resume.index: len(resume.token_ids) for resume in request.resume}
    for number, piece in enumerate(pieces):
        finish = "stop" if number == len(pieces) - 1 else None
        for index in indices:
            if number < delivered.get(index, 0):
                continue
            text_chars = sum(map(len, pieces[: number + 1]))
            meta = FrameMeta(
                choice=index, token_ids=[1], num_text_chars=text_chars, position=number + 1, finish_reason=finish
            )
            frames.append(encode_frame(meta, render.sse(answer_chunk(request, head, index, piece, number, finish))))
    closing = render.SSE_DONE
    if request.include_usage:
        closing = render.sse(render.usage_chunk(head, CHUNK_OBJECTS[request.dialect], usage)) + closing
    return [*frames, encode_frame(FrameMeta(last=True, usage=usage), closing)]


def _messages_frames(request: GenerateRequest, pieces: tuple[str, ...], usage: Usage) -> list[bytes]:
    renderer = dialect_of(request.dialect).renderer(request, None)
    if not request.stream:
        body = renderer.body([FinishedChoice(0, "".join(pieces), "stop")], usage)
        assert isinstance(body, bytes)
        return [encode_frame(FrameMeta(last=True, usage=usage, finish_reason="stop"), body)]
    frames: list[bytes] = []
    for number, piece in enumerate(pieces):
        finish: FinishReason | None = "stop" if number == len(pieces) - 1 else None
        chars = sum(map(len, pieces[: number + 1]))
        meta = FrameMeta(token_ids=[1], num_text_chars=chars, position=number + 1, finish_reason=finish)
        chunk = renderer.chunk(Piece(0, piece, number == 0, finish, None, None))
        frames.append(encode_frame(meta, chunk))
    return [*frames, encode_frame(FrameMeta(last=True, usage=usage), renderer.end(usage))]


def generates(length: int = 10**6, *, gate: asyncio.Event | None = None, step_s: float = 0.0) -> Behaviour:
    """Generate like an engine, one token per step for each sequence, up to `length` and the request's limits.

    With `gate`, only one step runs before it opens.
    """

    async def behave(engine: Engine, request: GenerateRequest, response: web.StreamResponse, http: web.Request) -> None:
        await response.prepare(http)
        sequences = _Sequences(engine, request, length)
        while not sequences.over:
            for frame in sequences.step():
                await response.write(frame)
            await (gate.wait() if gate is not None else asyncio.sleep(step_s))
        await response.write(sequences.last_frame())
        await response.write_eof()

    return behave


class _Sequences:
    """The sequences of one request that `generates` answers."""

    def __init__(self, engine: Engine, request: GenerateRequest, length: int) -> None:
        self._engine, self._request = engine, request
        self._first = request.prompt_index * request.sampling.num_sequences
        resumed = {each.index: each for each in request.resume}
        choices = range(self._first, self._first + request.sampling.num_sequences)
        self._counts = {choice: len(resumed[choice].token_ids) if choice in resumed else 0 for choice in choices}
        self._reported = dict(self._counts)
        self._reasons = {choice: each.finish_reason for choice, each in resumed.items() if each.finished}
        context = engine.max_model_len - len(request.prompt_token_ids)
        self._most = min(length, request.sampling.max_tokens or length, context)
        self._length = length

    @property
    def over(self) -> bool:
        return len(self._reasons) == len(self._counts)

    def step(self) -> list[bytes]:
        return [frame for choice in self._counts.keys() - self._reasons.keys() for frame in self._advance(choice)]

    def _advance(self, choice: int) -> list[bytes]:
        request = self._request
        allowance = self._engine.allowances.get(request.request_id, 10**6)
        if self._counts[choice] < allowance:
            self._counts[choice] += 1
            self._engine.num_generated += 1
        reason: Any = None
        if self._counts[choice] >= min(self._most, allowance):
            reason = self._reasons[choice] = "stop" if self._counts[choice] == self._length else "length"
        count = self._counts[choice] - self._reported[choice]
        due = request.stream or ((count >= PROGRESS_TOKENS or reason) and not self.over)
        if not can_be_continued(request) or not due:
            return []
        self._reported[choice] = self._counts[choice]
        meta = FrameMeta(
            choice=choice,
            token_ids=[1] * count,
            num_text_chars=self._counts[choice] if request.stream else 0,
            position=self._counts[choice],
            finish_reason=reason,
        )
        if not request.stream:
            return [encode_frame(meta, b"")]
        chunk = answer_chunk(request, render.head(request), choice, "x" * count, self._counts[choice] - 1, reason)
        return [encode_frame(meta, render.sse(chunk))]

    def last_frame(self) -> bytes:
        request, head = self._request, render.head(self._request)
        usage = Usage(len(request.prompt_token_ids), sum(self._counts.values()))
        if request.stream:
            closing = render.SSE_DONE
            if request.include_usage:
                closing = render.sse(render.usage_chunk(head, CHUNK_OBJECTS[request.dialect], usage)) + closing
            return encode_frame(FrameMeta(last=True, usage=usage), closing)
        given = list(self._counts.items())[: request.sampling.n]
        choices = [render.Choice(index, "x" * count, self._reasons[index]) for index, count in given]
        body = render.chat_body if request.dialect == "chat" else render.completion_body
        reason = self._reasons[self._first]
        return encode_frame(FrameMeta(last=True, usage=usage, finish_reason=reason), body(head, choices, usage))


def answer_chunk(
    request: GenerateRequest, head: render.Head, index: int, piece: str, number: int, finish: Any
) -> bytes:
    """Return the chunk with which a choice reaches `number` + 1 tokens."""
    usage = Usage(len(request.prompt_token_ids), number + 1) if request.continuous_usage else None
    options: dict[str, Any] = {"finish_reason": finish, "include_usage": request.include_usage, "usage": usage}
    if request.dialect == "chat":
        return render.chat_chunk(head, index, piece, role=number == 0, **options)
    return render.completion_chunk(head, index, piece, **options)
