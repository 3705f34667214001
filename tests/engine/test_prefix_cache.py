"""The prefix cache finds blocks by content and publishes its contents as prefix chunks."""

from __future__ import annotations

import pytest

from pagemill_engine.kv.block_pool import Block, KVCacheError
from pagemill_engine.kv.prefix_cache import PrefixCache


def make_chain(cache: PrefixCache, name: str, num_blocks: int) -> list[Block]:
    blocks = [Block(index) for index in range(num_blocks)]
    for index, block in enumerate(blocks):
        cache.insert(block, f"{name}-{index}".encode(), index)
    return blocks


def test_a_block_is_found_by_its_hash_until_it_is_removed() -> None:
    cache = PrefixCache(16)
    block = make_chain(cache, "a", 1)[0]
    assert cache.get(b"a-0") is block
    cache.remove(block)
    assert cache.get(b"a-0") is None
    assert block.block_hash is None


def test_equal_content_is_cached_once() -> None:
    cache = PrefixCache(16)
    first, second = Block(0), Block(1)
    assert cache.insert(first, b"same", 0)
    assert not cache.insert(second, b"same", 0)
    assert cache.get(b"same") is first
    assert second.block_hash is None


def test_a_block_has_only_one_content() -> None:
    cache = PrefixCache(16)
    block = make_chain(cache, "a", 1)[0]
    with pytest.raises(KVCacheError, match="already stands"):
        cache.insert(block, b"other", 0)


def test_removing_a_block_that_is_not_cached_is_an_error() -> None:
    with pytest.raises(KVCacheError, match="not the cached block"):
        PrefixCache(16).remove(Block(0))


@pytest.mark.parametrize(
    ("block_size", "num_blocks", "prefix_chunks"), [(16, 9, [3, 7]), (64, 3, [0, 1, 2]), (48, 4, [1, 3])]
)
def test_prefix_chunks_cover_at_least_64_tokens(block_size: int, num_blocks: int, prefix_chunks: list[int]) -> None:
    cache = PrefixCache(block_size)
    make_chain(cache, "a", num_blocks)
    assert cache.snapshot() == [f"a-{index}".encode() for index in prefix_chunks]


def test_events_are_the_net_change_since_the_last_read() -> None:
    cache = PrefixCache(16)
    kept, gone = make_chain(cache, "kept", 4), make_chain(cache, "gone", 4)
    cache.remove(gone[3])
    assert cache.drain_events() == ([b"kept-3"], [])
    assert cache.drain_events() == ([], [])
    cache.remove(kept[3])
    cache.insert(kept[3], b"kept-3", 3)
    assert cache.drain_events() == ([], [])
    cache.remove(kept[3])
    assert cache.drain_events() == ([], [b"kept-3"])


def test_events_add_up_to_the_snapshot() -> None:
    cache = PrefixCache(16)
    known: set[bytes] = set()
    chains = {name: make_chain(cache, name, 8) for name in "abc"}
    for block in (chains["a"][7], chains["b"][3], chains["b"][7]):
        added, removed = cache.drain_events()
        known = (known | set(added)) - set(removed)
        cache.remove(block)
    added, removed = cache.drain_events()
    assert (known | set(added)) - set(removed) == set(cache.snapshot()) == {b"a-3", b"c-3", b"c-7"}
