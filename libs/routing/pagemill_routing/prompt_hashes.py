"""Computes the prefix-chunk hashes of prompts with a cache, so that a growing conversation hashes only its new tokens.

The cache key of a chunk is the hash of the previous chunk and its token ids, so a beginning that prompts share, such as
a system prompt or earlier turns, is hashed once. The cache is limited (LRU). The hash function is
`pagemill_protocol.hashes`, the same as in the engines. Thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from pagemill_protocol.hashes import TOKEN_BYTES, prefix_chunk_hash, root_hash, token_bytes
from pagemill_routing.brain.interface import HashScheme

MAX_ROOTS = 4096


class PromptHashes:
    def __init__(self, max_prefix_chunks: int) -> None:
        self._chunk = lru_cache(maxsize=max_prefix_chunks)(prefix_chunk_hash)
        self._root = lru_cache(maxsize=MAX_ROOTS)(_root)

    @property
    def num_hashed(self) -> int:
        """The number of prefix chunks that were hashed, not found in the cache."""
        return self._chunk.cache_info().misses

    def hashes(
        self, scheme: HashScheme, salt: str, token_ids: Sequence[int], *, adapter_digest: str = ""
    ) -> tuple[bytes, ...]:
        """Return the hash of each full prefix chunk of the prompt; none if the engines' scheme is unknown."""
        prefix_chunk_tokens = scheme.prefix_chunk_tokens
        if not prefix_chunk_tokens:
            return ()
        num_chunks = len(token_ids) // prefix_chunk_tokens
        data = token_bytes(token_ids[: num_chunks * prefix_chunk_tokens])
        size, block_size, chunk = prefix_chunk_tokens * TOKEN_BYTES, scheme.block_size, self._chunk
        parent = self._root(scheme, salt, adapter_digest)
        hashes = []
        for start in range(0, len(data), size):
            parent = chunk(parent, data[start : start + size], block_size)
            hashes.append(parent)
        return tuple(hashes)


def _root(scheme: HashScheme, salt: str, adapter_digest: str) -> bytes:
    return root_hash(
        weights_digest=scheme.weights_digest,
        kv_dtype=scheme.kv_dtype,
        block_size=scheme.block_size,
        adapter_digest=adapter_digest,
        salt=salt,
    )
