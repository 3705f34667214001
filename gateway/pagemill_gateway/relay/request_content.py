"""The hash of what a request asks an engine to compute, by which a poison request is known again."""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from pagemill_protocol.request.generate import GenerateRequest


def content_of(request: GenerateRequest, deployment: str, account: str) -> bytes:
    """Return the hash of token ids and parameters, for one account. What gateways assign, such as the seed, is not in
    it."""
    sampling = msgspec.structs.replace(request.sampling, seed=None)
    computed = (account, deployment, request.adapter_digest, request.prompt_token_ids, sampling, request.pooling)
    return blake2b(msgspec.msgpack.encode(computed), digest_size=16).digest()
