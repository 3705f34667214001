"""How the engines of a deployment hash their blocks, by their reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from pagemill_gateway.brain.interface import HashScheme
from pagemill_gateway.brain.registry import EndpointRecord
from pagemill_protocol.hashes import HASH_VERSION, blocks_per_granule
from pagemill_protocol.state import StateFrame

NO_SCHEME = HashScheme("", "", 0, 0)


def common_scheme(records: Iterable[EndpointRecord]) -> HashScheme:
    """That of most of them: during a rollout prompts are looked up among the others in vain, which is true there.

    Without tokens a granule: nobody has told how it hashes, or none the way we do.
    """
    counts = Counter(scheme for record in records if (scheme := _scheme(record.reports.latest)) is not None)
    return counts.most_common(1)[0][0] if counts else NO_SCHEME


def _scheme(frame: StateFrame | None) -> HashScheme | None:
    if frame is None or frame.block_size < 1 or not frame.digests.weights:
        return None
    if frame.digests.hash_version != HASH_VERSION:
        return None
    granule_blocks = frame.granule_blocks or blocks_per_granule(frame.block_size)
    return HashScheme(frame.digests.weights, frame.digests.kv_dtype, frame.block_size, granule_blocks)
