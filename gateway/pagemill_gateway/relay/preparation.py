"""From a client's body to engine requests: parsed, given to a deployment, rendered, tokenized, hashed.

Rendering is a process's. Tokenizing and hashing a long prompt take milliseconds and happen in threads; a short one
takes less than to hand it over and to share the interpreter meanwhile. The request id, the time and the seed are given
here.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec
from pydantic import BaseModel

from pagemill_gateway.brain.interface import Ask, Brain, Claim, Target
from pagemill_gateway.discovery.bundles import BundleError, Bundles
from pagemill_gateway.limits.caller import Caller
from pagemill_gateway.limits.refusals import check_model, told_to
from pagemill_gateway.limits.scope import cache_salt
from pagemill_gateway.relay.asks import HeaderOf, make_ask, prompt_keys, session_key
from pagemill_gateway.relay.keep_alive import KeepAlive, Write
from pagemill_gateway.relay.prompt_hashes import PromptHashes
from pagemill_protocol.errors import PagemillError, unavailable
from pagemill_protocol.generate import Dialect, GenerateRequest
from pagemill_protocol.openai.parse import parse_body
from pagemill_protocol.openai.prepare import (
    new_request_id,
    prepare_chat,
    prepare_completions,
    render_soon,
    sampling_of,
    within_vocabulary,
)
from pagemill_protocol.openai.schemas import ChatCompletionRequest, CompletionRequest
from pagemill_protocol.preparation_threads import PreparationThreads
from pagemill_protocol.sampling import SamplingParams
from pagemill_protocol.text.tokenizer import Tokenizer

INLINE_BODY_BYTES = 4096
NUM_THREADS = 8

Model = TypeVar("Model", bound=BaseModel)
T = TypeVar("T")


class Prepared(NamedTuple):
    target: Target
    requests: list[GenerateRequest]
    """One per prompt, all of the same client request."""
    asks: list[Ask]
    """What routing may know of each."""
    stream: bool


class Preparation:
    def __init__(self, brain: Brain, bundles: Bundles, keep_alive: KeepAlive, max_granules: int) -> None:
        self._brain = brain
        self._keep_alive = keep_alive
        self._bundles = bundles
        self.hashes = PromptHashes(max_granules)
        self._threads = PreparationThreads(NUM_THREADS)

    def close(self) -> None:
        self._threads.close()

    async def parse(self, raw: bytes, schema: type[Model]) -> Model:
        """The body as `schema`. Raises `PagemillError` 400."""
        if len(raw) <= INLINE_BODY_BYTES:
            return parse_body(raw, schema)
        return await self.in_thread(lambda: parse_body(raw, schema), len(raw))

    async def in_thread(self, work: Callable[[], T], body_bytes: int) -> T:
        """What `work` returns, which deals with a body of that size."""
        return await self._threads.run(work, body_bytes)

    async def tokenizer(self, target: Target) -> Tokenizer:
        try:
            return await self._bundles.tokenizer(target.bundle_digest, target.chat_template)
        except BundleError as error:
            raise unavailable(f"The model's tokenizer cannot be used: {error}", code="model_not_ready") from error

    async def prepare(
        self, raw: bytes, dialect: Dialect, caller: Caller, header_of: HeaderOf, claim: Claim, write: Write
    ) -> Prepared:
        """Everything the engines need. Raises `PagemillError` for a body nobody can serve.

        `write`: for comments, when the client streams and has to wait for an engine. Nothing waits, nor wakes an
        engine, nor is rendered, with a sampling value that will be refused.
        """
        if dialect == "chat":
            chat = await self.parse(raw, ChatCompletionRequest)
            sampling = sampling_of(chat, seed=_new_seed())
            target = await self._find(chat, caller, claim, write)
            return await self._chat(chat, sampling, target, len(raw), caller, header_of)
        body = await self.parse(raw, CompletionRequest)
        sampling = sampling_of(body)
        target = await self._find(body, caller, claim, write)
        return await self._completions(body, sampling, target, len(raw), caller, header_of)

    async def _find(
        self, body: ChatCompletionRequest | CompletionRequest, caller: Caller, claim: Claim, write: Write
    ) -> Target:
        """The deployment, if `caller` may use it. Raises `PagemillError` as if it were not there otherwise."""
        check_model(caller, body.model)
        claim = claim._replace(priority=caller.priority(body.priority))
        expected = partial(self._brain.expected_s, body.model, claim)
        try:
            question = self._brain.find(body.model, claim)
            return await self._keep_alive.during(question, write if body.stream else None, expected)
        except PagemillError as error:
            raise told_to(caller, error, body.model) from error

    async def _chat(
        self,
        body: ChatCompletionRequest,
        sampling: SamplingParams,
        target: Target,
        size: int,
        caller: Caller,
        header_of: HeaderOf,
    ) -> Prepared:
        tokenizer = await self.tokenizer(target)
        sampling = within_vocabulary(sampling, tokenizer)
        prepare = partial(
            prepare_chat,
            body,
            tokenizer,
            max_model_len=target.max_model_len,
            request_id=new_request_id("chat"),
            created_unix_s=int(time.time()),
            cache_salt=cache_salt(target.prefix_scope, target.deployment, caller),
            sampling=sampling,
        )
        keys, session = prompt_keys(body), session_key(target, caller.key_hash, header_of)

        def job(text: str | None = None) -> Prepared:
            return self._prepared(target, [_prioritized(prepare(text=text), caller)], keys, session)

        text = await render_soon(body, tokenizer) if size <= INLINE_BODY_BYTES else None
        if text is not None and len(text) <= INLINE_BODY_BYTES:
            return job(text)
        return await self.in_thread(partial(job, text), size)

    async def _completions(
        self,
        body: CompletionRequest,
        sampling: SamplingParams,
        target: Target,
        size: int,
        caller: Caller,
        header_of: HeaderOf,
    ) -> Prepared:
        tokenizer = await self.tokenizer(target)
        prepare = partial(
            prepare_completions,
            body,
            tokenizer,
            max_model_len=target.max_model_len,
            request_id=new_request_id("completions"),
            created_unix_s=int(time.time()),
            cache_salt=cache_salt(target.prefix_scope, target.deployment, caller),
            sampling=within_vocabulary(sampling, tokenizer),
        )
        keys, session = prompt_keys(body), session_key(target, caller.key_hash, header_of)

        def job() -> Prepared:
            return self._prepared(
                target, [_prioritized(_seeded(request), caller) for request in prepare()], keys, session
            )

        return job() if size <= INLINE_BODY_BYTES else await self.in_thread(job, size)

    def _prepared(self, target: Target, requests: list[GenerateRequest], keys: list[bytes], session: bytes) -> Prepared:
        if target.adapter_digest:
            requests = [msgspec.structs.replace(each, adapter_digest=target.adapter_digest) for each in requests]
        asks = [
            make_ask(request, target, self.hashes, key, session) for request, key in zip(requests, keys, strict=True)
        ]
        return Prepared(target, requests, asks, requests[0].stream)


def _seeded(request: GenerateRequest) -> GenerateRequest:
    """Each prompt of a request without a seed gets one of its own, else equal prompts would get equal answers."""
    if request.sampling.seed is not None:
        return request
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, seed=_new_seed()))


def _prioritized(request: GenerateRequest, caller: Caller) -> GenerateRequest:
    """A key's class decides; what its client asked for moves the request inside the class."""
    priority = caller.priority(request.priority)
    return request if priority == request.priority else msgspec.structs.replace(request, priority=priority)


def _new_seed() -> int:
    return random.getrandbits(63)
