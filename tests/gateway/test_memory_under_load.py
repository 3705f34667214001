"""Equal loads after each other leave a gateway with equally many objects: what a request takes ends with it."""

from __future__ import annotations

import gc
import sys
from itertools import pairwise
from typing import Any

import pytest

from pagemill_api.text import segments
from pagemill_servers.auth import hash_key

pytestmark = pytest.mark.slow

NUM_REQUESTS = 150
KEY = {"Authorization": "Bearer sk-one"}


@pytest.mark.parametrize("stream", [False, True])
async def test_an_equal_load_of_new_prompts_leaves_no_more_objects(engines, gateways, monkeypatch, stream) -> None:
    """Caches are full after the first load. A process that kept an object a request would have `NUM_REQUESTS` more."""
    monkeypatch.setattr(segments, "MAX_KEPT_TOKENS", 2048)
    entries = [f"{hash_key('sk-one')} tenant=a requests_per_minute=100000 tokens_per_minute=100000000 concurrency=9"]
    gateway = await gateways(engines[0], api_keys=entries, remembered_prefix_chunks=16, decision_log_size=16)
    numbers = iter(range(10**6))

    async def num_objects_after_a_load() -> int:
        for _ in range(NUM_REQUESTS):
            messages: Any = [{"role": "user", "content": f"{next(numbers):06} a question that was not asked before"}]
            reply = await gateway.chat(messages=messages, stream=stream, headers=KEY)
            assert reply.status == 200
        engines[0].requests.clear()
        engines[0].request_ids.clear()
        gc.collect()
        return sys.getallocatedblocks()

    await num_objects_after_a_load()
    counts = [await num_objects_after_a_load() for _ in range(4)]
    # What is made once, for example by a timer that ends within a load, adds to one of them.
    assert min(after - before for before, after in pairwise(counts)) < NUM_REQUESTS, counts
