"""Prefix hash: consistent hashing with bounded loads over a hash of the prompt's first characters, as KubeAI does.

Every endpoint has 256 points on a ring. From the point of the request's key on, the policy chooses the first endpoint
whose requests, with this one, are at most 1.25 times the mean; if there is none, the first endpoint. Caches are not
considered: prompts with the same beginning are sent to the same endpoint (Mirrokni et al., SODA 2018).
KubeAI hashes with xxhash, and this policy with blake2b: keys map to other endpoints, with the same distribution.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

from pagemill_routing.policies.policy import Candidate, RequestView, RoutingDecision, RoutingPolicy

LOAD_FACTOR = 1.25
REPLICAS = 256
PREFIX_CHARS = 100
"""The number of hashed characters of the first user message or the prompt."""


class PrefixHash(RoutingPolicy):
    name = "PrefixHash"

    def choose(self, request: RequestView, candidates: Sequence[Candidate]) -> RoutingDecision:
        by_id = {each.endpoint_id: each for each in candidates}
        points, owners = ring(tuple(sorted(by_id)))
        start = bisect_left(points, ring_hash(request.prompt_key))
        total = sum(each.in_flight for each in candidates)
        rows = [(float(each.in_flight),) for each in candidates]
        passed: dict[str, None] = {}
        for step in range(len(owners)):
            owner = owners[(start + step) % len(owners)]
            if owner in passed:
                continue
            if within_load_bound(by_id[owner].in_flight, total, len(candidates)):
                why = f"first on the ring within the load bound, {len(passed)} passed"
                return RoutingDecision(by_id[owner], why, ("requests",), rows)
            passed[owner] = None
        first = by_id[next(iter(passed))]
        return RoutingDecision(first, "first on the ring, none is within the load bound", ("requests",), rows)


def within_load_bound(load: int, total: int, count: int, factor: float = LOAD_FACTOR) -> bool:
    """Whether the endpoint with another request stays within `factor` times the mean; true if there are no requests."""
    return total == 0 or load + 1 <= (total + 1) / count * factor


def ring_hash(key: bytes) -> int:
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big")


@lru_cache(maxsize=64)
def ring(endpoint_ids: tuple[str, ...]) -> tuple[list[int], list[str]]:
    """Return the sorted points and the endpoint at each."""
    stands = sorted(
        (ring_hash(f"{endpoint_id}{replica}".encode()), endpoint_id)
        for endpoint_id in endpoint_ids
        for replica in range(REPLICAS)
    )
    return [point for point, _ in stands], [endpoint_id for _, endpoint_id in stands]
