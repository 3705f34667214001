"""Makes routing requests: hashes and numbers of a request's tokens, text and headers."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

from pagemill_gateway.brain.interface import RoutingRequest, Target
from pagemill_gateway.relay.prompt_hashes import PromptHashes
from pagemill_gateway.routing.prefix_hash import PREFIX_CHARS
from pagemill_protocol.dialects.base import ParsedBody
from pagemill_protocol.generate import GenerateRequest

HeaderOf = Callable[[str], str | None]
"""Returns the client's header of that name (lower case)."""
_KEY_BYTES = 16


def make_routing_request(
    request: GenerateRequest, target: Target, hashes: PromptHashes, prompt_key: bytes, session: bytes
) -> RoutingRequest:
    prefix_chunks: tuple[bytes, ...] = ()
    # Otherwise an engine computes all of the prompt, whatever it has cached.
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
    """Hash of the session that the client names, different for each key; empty when it names none."""
    name = header_of(target.session_header) if target.session_header else None
    if not name:
        return b""
    return _key(f"{key_hash or ''}\0{name}")


def prompt_keys(body: ParsedBody) -> list[bytes]:
    """One per prompt, of its beginning."""
    return [_key(text) for text in body.prompt_texts(PREFIX_CHARS)]


def _key(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_KEY_BYTES).digest()
