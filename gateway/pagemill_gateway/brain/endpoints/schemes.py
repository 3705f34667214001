"""How the engines of a deployment hash their blocks, by their reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pagemill_gateway.brain.interface import HashScheme
from pagemill_protocol.hashes import HASH_VERSION, blocks_per_granule
from pagemill_protocol.state import StateFrame

NO_SCHEME = HashScheme("", "", 0, 0)


def common_scheme(schemes: Iterable[HashScheme]) -> HashScheme:
    """That of most of them: during a rollout prompts are looked up among the others in vain, which is true there.

    Without tokens a granule: nobody has told how it hashes, or none the way we do.
    """
    counts = Counter(schemes)
    del counts[NO_SCHEME]
    return max(counts, key=counts.__getitem__) if counts else NO_SCHEME


def scheme_of(frame: StateFrame) -> HashScheme:
    """`NO_SCHEME`: it does not say, or hashes another way than we do."""
    if frame.block_size < 1 or not frame.digests.weights or frame.digests.hash_version != HASH_VERSION:
        return NO_SCHEME
    granule_blocks = frame.granule_blocks or blocks_per_granule(frame.block_size)
    return HashScheme(frame.digests.weights, frame.digests.kv_dtype, frame.block_size, granule_blocks)
