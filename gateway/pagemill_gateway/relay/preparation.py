"""Prepares engine requests from a client's body: parses, finds the deployment, renders, tokenizes and hashes.

Chat templates are rendered in another process. Long prompts are tokenized and hashed in threads; for short ones, a
thread would take longer than the work. A tokenizer that runs in a limited process has a thread of its own, so that no
other model's requests wait for it. The request id, the time and the seed are set here.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import msgspec

from pagemill_api.answers.registry import AUTO
from pagemill_api.dialects import base
from pagemill_api.dialects.base import Dialect, ParsedBody
from pagemill_api.dialects.preparing import preparation_now, prepared, sampling_for
from pagemill_api.dialects.transport import RequestInfo
from pagemill_api.openai.prepare import needs_check
from pagemill_api.openai.schemas import SamplingFields
from pagemill_api.text.tokenizer import Tokenizer
from pagemill_gateway.discovery.bundles import BundleError, Bundles
from pagemill_gateway.limits.refusals import check_model, visible_to
from pagemill_gateway.relay.keep_alive import Event, KeepAlive, Write
from pagemill_gateway.request_record import RequestRecord
from pagemill_protocol.errors import PagemillError, unavailable
from pagemill_protocol.request.answer_format import ControlTokenMode, HostedToolMode, ParserSettings
from pagemill_protocol.request.generate import GenerateRequest
from pagemill_protocol.request.sampling import MAX_ANSWER_VALUES, SamplingParams
from pagemill_routing.brain.interface import Brain, QueueTicket, RoutingRequest, Target
from pagemill_routing.policies.prefix_hash import PREFIX_CHARS
from pagemill_routing.prompt_hashes import PromptHashes
from pagemill_servers.keys.caller import Caller
from pagemill_servers.keys.scope import cache_salt
from pagemill_servers.preparation_threads import PreparationThreads

INLINE_BODY_BYTES = 4096
NUM_THREADS = 8

T = TypeVar("T")


HeaderOf = Callable[[str], str | None]
"""Returns the client's header with a name in lower case, or None."""
_KEY_BYTES = 16


def make_routing_request(
    request: GenerateRequest, target: Target, hashes: PromptHashes, prompt_key: bytes, session: bytes
) -> RoutingRequest:
    prefix_chunks: tuple[bytes, ...] = ()
    # For these requests, engines compute the whole prompt, whatever is cached.
    if request.num_prompt_logprobs is None and request.pooling is None:
        prefix_chunks = hashes.hashes(
            target.scheme, request.cache_salt, request.prompt_token_ids, adapter_digest=target.adapter_digest
        )
    return RoutingRequest(
        num_prompt_tokens=len(request.prompt_token_ids),
        prefix_chunks=prefix_chunks,
        prefix_chunk_tokens=target.scheme.prefix_chunk_tokens,
        prompt_key=prompt_key,
        session=session,
        adapter_digest=target.adapter_digest,
    )


def session_key(target: Target, key_hash: str | None, header_of: HeaderOf) -> bytes:
    """Return the hash of the client's session, different for each key; empty if there is none."""
    name = header_of(target.session_header) if target.session_header else None
    if not name:
        return b""
    return _key(f"{key_hash or ''}\0{name}")


def prompt_keys(body: ParsedBody) -> list[bytes]:
    """Return the hash of each prompt's beginning."""
    return [_key(text) for text in body.prompt_texts(PREFIX_CHARS)]


def _key(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_KEY_BYTES).digest()


class PreparedRequest(NamedTuple):
    target: Target
    requests: list[GenerateRequest]
    """The engine requests of the client request, one per prompt."""
    routing_requests: list[RoutingRequest]
    """The properties of each engine request for routing."""
    stream: bool
    unread_fields: list[str]
    """The client's fields that only chat templates read, and the model's does not."""


class RequestPreparation:
    def __init__(
        self,
        brain: Brain,
        bundles: Bundles,
        keep_alive: KeepAlive,
        max_prefix_chunks: int,
        max_answer_values: int = MAX_ANSWER_VALUES,
        control_tokens: ControlTokenMode = "text",
        hosted_tools: HostedToolMode = "ignore",
    ) -> None:
        self._control_tokens = control_tokens
        self._hosted_tools = hosted_tools
        self._max_answer_values = max_answer_values
        self._brain = brain
        self._keep_alive = keep_alive
        self._bundles = bundles
        self.hashes = PromptHashes(max_prefix_chunks)
        self._threads = PreparationThreads(NUM_THREADS)
        self._limited_threads: WeakKeyDictionary[Tokenizer, PreparationThreads] = WeakKeyDictionary()

    def close(self) -> None:
        for threads in (self._threads, *self._limited_threads.values()):
            threads.close()

    async def parse(self, raw: bytes, parse: Callable[[bytes], T]) -> T:
        """Return the body, parsed by `parse`. Raises `PagemillError` 400."""
        return await self._inline_or_in_thread(partial(parse, raw), len(raw))

    async def in_thread(self, work: Callable[[], T], body_bytes: int, tokenizer: Tokenizer | None = None) -> T:
        """Run `work` in a thread, and return its result. `body_bytes` is the size of the body that it processes.

        `tokenizer`: the one that it uses.
        """
        threads = self._threads
        if tokenizer is not None and tokenizer.limited_because:
            threads = self._limited_threads.get(tokenizer) or PreparationThreads(1)
            self._limited_threads[tokenizer] = threads
        return await threads.run(work, body_bytes)

    def parsers(self, target: Target, tokenizer: Tokenizer) -> ParserSettings:
        """Return the parsers of the catalogue, or where it names none, those of the engines."""
        named, bundle = target.parsers, tokenizer.bundle
        return ParserSettings(
            bundle.tool_call_parser if named.tools == AUTO else named.tools,
            bundle.reasoning_parser if named.reasoning == AUTO else named.reasoning,
            self._control_tokens,
            self._hosted_tools,
        )

    async def tokenizer(self, target: Target) -> Tokenizer:
        try:
            return await self._bundles.tokenizer(target.bundle_digest, target.chat_template)
        except BundleError as error:
            raise unavailable(f"The model's tokenizer cannot be used: {error}", code="model_not_ready") from error

    async def prepare(
        self, raw: bytes, dialect: Dialect, caller: Caller, info: RequestInfo, record: RequestRecord, write: Write
    ) -> PreparedRequest:
        """Return the engine requests for a body. Raises `PagemillError` for a body that no engine can serve.

        `write` is for events while a streaming client waits for an engine. Sampling parameters are checked first, so
        that an invalid request neither waits nor wakes an engine.
        """
        body = await self._inline_or_in_thread(partial(base.parsed, dialect, raw, info), len(raw))
        sampling = body.sampling()
        if needs_check(body.fields):
            await self.in_thread(body.check_form, len(raw))
        record.asked_model, record.stream = body.fields.model, bool(body.fields.stream)
        waits = (write if body.fields.stream else None), dialect.transport.waiting
        target = await self._find(body.fields, caller, record.ticket, *waits)
        tokenizer = await self.tokenizer(target)
        is_limited = bool(tokenizer.limited_because)
        check = partial(sampling_for, body, tokenizer, sampling)
        sampling = await self.in_thread(check, len(raw), tokenizer) if is_limited else check()
        salt = cache_salt(target.prefix_scope, target.deployment, caller)
        parsers = self.parsers(target, tokenizer)
        preparation = preparation_now(dialect, target.max_model_len, salt, parsers, self._max_answer_values)
        session = session_key(target, caller.key_hash, info.header)
        text = await body.render_inline(tokenizer, parsers) if len(raw) <= INLINE_BODY_BYTES else None

        job = partial(self._prepared, body, tokenizer, preparation, sampling, text, target, caller, session)
        if is_limited or (body.renders and text is None):
            return await self.in_thread(job, len(raw), tokenizer)
        return await self._inline_or_in_thread(job, max(len(raw), len(text or "")))

    async def _inline_or_in_thread(self, work: Callable[[], T], num_bytes: int) -> T:
        """Run short work here, because a thread would take longer, and other work in a thread."""
        return work() if num_bytes <= INLINE_BODY_BYTES else await self.in_thread(work, num_bytes)

    async def _find(
        self, body: SamplingFields, caller: Caller, ticket: QueueTicket, write: Write | None, event: Event | None
    ) -> Target:
        """Return the target. If the caller may not use the model, raises `PagemillError` as if it did not exist."""
        check_model(caller, body.model)
        ticket = msgspec.structs.replace(ticket, priority=caller.priority(body.priority))
        expected = partial(self._brain.expected_s, body.model, ticket)
        try:
            question = self._brain.find(body.model, ticket)
            return await self._keep_alive.during(question, write, expected, event)
        except PagemillError as error:
            raise visible_to(caller, error, body.model) from error

    def _prepared(
        self,
        body: ParsedBody,
        tokenizer: Tokenizer,
        preparation: base.Preparation,
        sampling: SamplingParams,
        text: str | None,
        target: Target,
        caller: Caller,
        session: bytes,
    ) -> PreparedRequest:
        requests, unread = prepared(body, tokenizer, preparation, sampling, text, _new_seed)
        adapter = target.adapter_digest
        for at, request in enumerate(requests):
            priority = caller.priority(request.priority)  # the key's class, refined by the client's priority
            if priority != request.priority or adapter:
                requests[at] = msgspec.structs.replace(request, priority=priority, adapter_digest=adapter)
        routing_requests = [
            make_routing_request(request, target, self.hashes, key, session)
            for request, key in zip(requests, prompt_keys(body), strict=True)
        ]
        return PreparedRequest(target, requests, routing_requests, requests[0].stream, unread)


def _new_seed() -> int:
    return random.getrandbits(63)
