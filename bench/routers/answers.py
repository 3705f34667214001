"""The answers of simulated pods, rendered once: the events of our engine, as OpenAI's stream and as frames.

Answers to two requests differ only in id and creation time, so each event is kept in the pieces around these. Every
router forwards the same events; our gateway gets them as the payload of frames, as from a real engine.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from pagemill_api.openai import render
from pagemill_protocol.frames import encode_frame
from pagemill_protocol.request.generate import FinishReason, FrameMeta, GenerateRequest, Usage

ID = "chatcmpl-simulated"
CREATED_UNIX_S = 1_999_999_999
TEXT = " word"
END_OF_BODY = b"0\r\n\r\n"
_FRAME_HEADER = struct.Struct("<II")
_ID_MARK = f'"{ID}"'.encode()
_CREATED_MARK = str(CREATED_UNIX_S).encode()


class _Event(NamedTuple):
    """One event, split at the id and at the creation time."""

    start: bytes
    middle: bytes
    end: bytes

    @classmethod
    def of(cls, chunk: bytes) -> _Event:
        start, rest = render.sse(chunk).split(_ID_MARK)
        middle, end = rest.split(_CREATED_MARK)
        return cls(start, middle, end)

    def render(self, request_id: str, created_unix_s: int) -> bytes:
        return b'%b"%b"%b%d%b' % (self.start, request_id.encode(), self.middle, created_unix_s, self.end)


class Answer:
    """The answer to every streamed request of one dialect: the same `num_tokens` tokens, one event each."""

    def __init__(self, model: str, dialect: str, num_tokens: int) -> None:
        self._head = render.Head(ID, model, CREATED_UNIX_S, render.fingerprint("simulated"))
        self._dialect = dialect
        self._chunk_object = "chat.completion.chunk" if dialect == "chat" else "text_completion"
        self.num_tokens = num_tokens
        self._events = [_Event.of(self._chunk(number)) for number in range(num_tokens)]
        self._metas = [self._meta(number) for number in range(num_tokens)]
        self.stream = [http_chunk(event.render(ID, CREATED_UNIX_S)) for event in self._events]
        """OpenAI's stream, one HTTP chunk per token."""
        self.stream_end = http_chunk(render.SSE_DONE) + END_OF_BODY

    def frame(self, number: int, request: GenerateRequest) -> bytes:
        """Return the frame of one token, for a gateway."""
        payload = self._events[number].render(request.response_id or request.request_id, request.created_unix_s)
        meta = self._metas[number]
        return b"".join((_FRAME_HEADER.pack(len(meta), len(payload)), meta, payload))

    def frame_end(self, request: GenerateRequest, cached_tokens: int) -> bytes:
        """Return the last frame."""
        usage = Usage(len(request.prompt_token_ids), self.num_tokens, cached_tokens)
        payload = render.SSE_DONE
        if request.include_usage:
            head = render.head(request, render.fingerprint("simulated"))
            payload = render.sse(render.usage_chunk(head, self._chunk_object, usage)) + payload
        return encode_frame(FrameMeta(last=True, usage=usage), payload)

    def body(self) -> bytes:
        """Return the complete answer to a request that does not stream."""
        choice = render.Choice(0, TEXT * self.num_tokens, "length")
        rendered = render.chat_body if self._dialect == "chat" else render.completion_body
        return rendered(self._head, [choice], Usage(1, self.num_tokens))

    def _chunk(self, number: int) -> bytes:
        finish: FinishReason | None = "length" if number == self.num_tokens - 1 else None
        if self._dialect == "chat":
            return render.chat_chunk(self._head, 0, TEXT, role=number == 0, finish_reason=finish)
        return render.completion_chunk(self._head, 0, TEXT, finish_reason=finish)

    def _meta(self, number: int) -> bytes:
        last = number == self.num_tokens - 1
        meta = FrameMeta(
            token_ids=[1],
            num_text_chars=len(TEXT) * (number + 1),
            position=number + 1,
            finish_reason="length" if last else None,
        )
        return encode_frame(meta)[_FRAME_HEADER.size :]


def http_chunk(data: bytes) -> bytes:
    """Return one chunk of a chunked HTTP body."""
    return b"%x\r\n%b\r\n" % (len(data), data)
