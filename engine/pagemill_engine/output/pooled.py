"""The answer to a request whose prompt is pooled: one frame, with the body that its dialect renders.

`output.processor` is the counterpart for text; `processor_of` chooses between them.
"""

from __future__ import annotations

from pagemill_api.dialects.base import FinishedChoice
from pagemill_api.dialects.registry import dialect_of
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_engine.ipc.messages import TokensOut
from pagemill_engine.output.processor import (
    Frame,
    OutputProcessor,
    Processor,
    Progress,
    body_frame,
    engine_error,
    failure_meta,
)
from pagemill_protocol.errors import PagemillError
from pagemill_protocol.request.generate import FrameMeta, GenerateRequest, Usage


def processor_of(request: GenerateRequest, tokenizer: Tokenizer, system_fingerprint: str | None) -> Processor:
    if request.pooling is not None:
        return PooledProcessor(request, system_fingerprint)
    return OutputProcessor(request, tokenizer, system_fingerprint)


class PooledProcessor:
    complete = False
    num_new_tokens = 0
    num_held_bytes = 0

    def __init__(self, request: GenerateRequest, system_fingerprint: str | None = None) -> None:
        self.request = request
        self._dialect = dialect_of(request.dialect)
        self._renderer = self._dialect.renderer(request, system_fingerprint)
        self._num_cached_tokens = 0
        self._queue_s = 0.0
        self._pooled = b""
        self.finish_reasons = ["abort"]

    @property
    def usage(self) -> Usage:
        return Usage(len(self.request.prompt_token_ids), cached_tokens=self._num_cached_tokens)

    def push(self, out: TokensOut) -> Progress:
        if out.error is not None:
            return Progress(error=engine_error(out))
        self._num_cached_tokens, self._queue_s = out.num_cached_tokens, out.queue_s
        self._pooled, self.finish_reasons = out.pooled, [out.finish_reason or "abort"]
        if not out.pooled:  # aborted because the client disconnected
            return Progress(done=True)
        return Progress(frames=[self.last_frame()], done=True)

    def failure(self, error: PagemillError) -> Frame:
        return Frame(failure_meta(error, self.usage), self._dialect.error_body(error))

    def last_frame(self) -> Frame:
        answer = FinishedChoice(self.request.prompt_index, "", "stop", pooled=self._pooled)
        meta = FrameMeta(last=True, usage=self.usage, queue_s=self._queue_s, finish_reason="stop")
        return body_frame(meta, self._renderer.body([answer], self.usage))
