"""Block hashes: the content address of a prompt's KV blocks, equal in engine and gateway.

A block's hash is blake2b-128 (RFC 7693) over its parent's hash and its own token ids, so equal hashes mean equal whole
prefixes, not just equal blocks. The chain starts at a root that mixes everything else a KV value depends on: weights,
adapter, KV type, block size, the version of this scheme, and the salt that separates tenants. Collisions would serve
one prompt's KV to another, hence a cryptographic hash; 128 bits keep an index of 10**9 blocks below 10**-20.

Only full blocks have a hash. The cache itself is in `pagemill_engine.kv`, the gateway's index in
`pagemill_routing.brain`; neither may compute hashes another way.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

HASH_VERSION = 1
"""Changes whenever equal inputs would hash differently. Hashes of different versions are never compared."""
NO_HASHES = 0
"""Published in place of a version by an engine without a prefix cache."""
HASH_BYTES = 16
PREFIX_CHUNK_TOKENS = 64
"""Prefixes of large caches are published in chunks of at least this many tokens."""
MAX_FINE_BLOCKS = 8192
"""Caches of up to this many blocks publish every block, so that gateways know every prefix exactly."""

_BLOCK_PERSON = b"pagemill-block"
_ROOT_PERSON = b"pagemill-root"
TOKEN_BYTES = 4


def root_hash(
    *, weights_digest: str, kv_dtype: str, block_size: int, adapter_digest: str = "", salt: str = ""
) -> bytes:
    """Return the parent hash of every first block (16 bytes).

    Fields are length-prefixed, so that two different sets of fields never result in the same bytes.
    """
    state = blake2b(digest_size=HASH_BYTES, person=_ROOT_PERSON)
    for field in (str(HASH_VERSION), weights_digest, adapter_digest, kv_dtype, str(block_size), salt):
        encoded = field.encode("utf-8", "surrogatepass")
        state.update(len(encoded).to_bytes(8, "little"))
        state.update(encoded)
    return state.digest()


def block_hash(parent: bytes, token_ids: Sequence[int], extra: bytes = b"") -> bytes:
    """Return the hash of one full block: blake2b-128 over `parent`, then the ids as little-endian int32.

    `extra`: whatever else distinguishes the block's KV from that of equal tokens, such as the digest of an image whose
    placeholders they are; it is appended with a length, so that no tokens look like it. Raises `OverflowError` for an
    id that does not fit int32.
    """
    tokens = token_bytes(token_ids)
    return _chain(parent, tokens + extra + len(extra).to_bytes(8, "little") if extra else tokens)


def block_hashes(root: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Return the hashes of all full blocks of `token_ids`, first block first; a partial last block has none."""
    return extend([], root, token_ids, block_size)


def extend(hashes: list[bytes], root: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Append to `hashes`, in place, the missing full blocks of `token_ids`, and return it.

    `hashes` must be the block hashes of a prefix of `token_ids` under the same `root`. Only new tokens are hashed, so a
    conversation that grows turn by turn is hashed once in total.
    """
    num_hashed_tokens = len(hashes) * block_size
    num_full_tokens = len(token_ids) - len(token_ids) % block_size
    if num_full_tokens <= num_hashed_tokens:
        return hashes
    data = memoryview(token_bytes(token_ids[num_hashed_tokens:num_full_tokens]))
    parent = hashes[-1] if hashes else root
    for block in _split(data, block_size * TOKEN_BYTES):
        parent = _chain(parent, block)
        hashes.append(parent)
    return hashes


def blocks_per_prefix_chunk(block_size: int) -> int:
    """Return the smallest number of blocks with at least `PREFIX_CHUNK_TOKENS` tokens."""
    return -(-PREFIX_CHUNK_TOKENS // block_size)


def prefix_chunk_blocks(block_size: int, num_blocks: int) -> int:
    """Return the blocks per prefix chunk for a cache of `num_blocks`: a compromise between short and exact reports."""
    return 1 if num_blocks <= MAX_FINE_BLOCKS else blocks_per_prefix_chunk(block_size)


def prefix_chunk_hash(parent: bytes, prefix_chunk: bytes, block_size: int) -> bytes:
    """Return the hash of the last block of one prefix chunk.

    `parent`: hash of the chunk before. `prefix_chunk`: the chunk's tokens as `token_bytes`.
    """
    for block in _split(memoryview(prefix_chunk), block_size * TOKEN_BYTES):
        parent = _chain(parent, block)
    return parent


def key_of_kind(kind: int, prefix_chunk: bytes) -> bytes:
    """Return the name under which a cache kind, by its number, publishes a prefix chunk. The first kind's are plain."""
    return prefix_chunk + kind.to_bytes(1, "little") if kind else prefix_chunk


def _chain(parent: bytes, tokens: bytes | memoryview) -> bytes:
    state = blake2b(parent, digest_size=HASH_BYTES, person=_BLOCK_PERSON)
    state.update(tokens)
    return state.digest()


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Return the ids as they are hashed: little-endian int32. Raises `OverflowError` for an id that does not fit."""
    ids = array("i", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def _split(data: memoryview, size: int) -> Iterator[memoryview]:
    for start in range(0, len(data), size):
        yield data[start : start + size]
