"""Block hashes are equal for equal prefixes on every machine, differ for any other, and are computed incrementally."""

from __future__ import annotations

import hashlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill_protocol import hashes

ROOT = hashes.root_hash(weights_digest="w", kv_dtype="float32", block_size=16)
token_lists = st.lists(st.integers(0, 2**31 - 1), max_size=200)


def test_root_depends_on_every_field() -> None:
    base = {"weights_digest": "w", "kv_dtype": "float32", "block_size": 16, "adapter_digest": "a", "salt": "s"}
    variants = [
        base,
        {**base, "weights_digest": "w2"},
        {**base, "kv_dtype": "bfloat16"},
        {**base, "block_size": 32},
        {**base, "adapter_digest": ""},
        {**base, "salt": "t"},
    ]
    roots = {hashes.root_hash(**variant) for variant in variants}
    assert len(roots) == len(variants)
    assert all(len(root) == hashes.HASH_BYTES for root in roots)


def test_adjacent_fields_of_the_root_are_separated() -> None:
    one = hashes.root_hash(weights_digest="ab", adapter_digest="c", kv_dtype="f", block_size=16)
    other = hashes.root_hash(weights_digest="a", adapter_digest="bc", kv_dtype="f", block_size=16)
    assert one != other


def test_block_hash_is_blake2b_of_parent_and_little_endian_int32_ids() -> None:
    ids = [1, 256, 2**31 - 1]
    expected = hashlib.blake2b(ROOT + struct.pack("<3i", *ids), digest_size=16, person=b"pagemill-block").digest()
    assert hashes.block_hash(ROOT, ids) == expected


def test_hashes_of_version_one_never_change() -> None:
    assert hashes.HASH_VERSION == 1
    assert ROOT.hex() == "5e7ef5f20b75d6e88406cab508994af0"
    assert hashes.block_hashes(ROOT, list(range(32)), 16)[1].hex() == "0fcdc6c14b93be8ab18d25fe05281054"


@given(token_lists, st.integers(1, 40))
def test_only_full_blocks_are_hashed_and_they_chain(ids: list[int], block_size: int) -> None:
    found = hashes.block_hashes(ROOT, ids, block_size)
    assert len(found) == len(ids) // block_size
    parent = ROOT
    for index, block in enumerate(found):
        parent = hashes.block_hash(parent, ids[index * block_size : (index + 1) * block_size])
        assert block == parent


@given(token_lists, token_lists, st.integers(1, 40))
def test_extending_equals_hashing_from_scratch(first: list[int], more: list[int], block_size: int) -> None:
    known = hashes.block_hashes(ROOT, first, block_size)
    grown = hashes.extend(known, ROOT, first + more, block_size)
    assert grown is known
    assert grown == hashes.block_hashes(ROOT, first + more, block_size)


def test_extending_reads_only_the_new_tokens() -> None:
    class Counting(list[int]):
        read = 0

        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            got = super().__getitem__(index)
            Counting.read += len(got) if isinstance(index, slice) else 1
            return got

    ids = Counting(range(10_000))
    known = hashes.block_hashes(ROOT, list(range(9_984)), 16)
    hashes.extend(known, ROOT, ids, 16)
    assert Counting.read == 16
    assert len(known) == 625


@given(st.lists(st.integers(0, 9), min_size=32, max_size=64), st.integers(0, 31))
def test_a_changed_token_changes_the_hash_of_its_block_and_all_later_ones(ids: list[int], position: int) -> None:
    changed = list(ids)
    changed[position] += 1
    before, after = hashes.block_hashes(ROOT, ids, 16), hashes.block_hashes(ROOT, changed, 16)
    block = position // 16
    assert before[:block] == after[:block]
    assert all(old != new for old, new in zip(before[block:], after[block:], strict=True))


def test_token_ids_beyond_int32_are_refused() -> None:
    with pytest.raises(OverflowError):
        hashes.block_hash(ROOT, [2**31])


@pytest.mark.parametrize(("block_size", "blocks"), [(1, 64), (16, 4), (24, 3), (64, 1), (128, 1)])
def test_a_prefix_chunk_has_the_fewest_blocks_with_64_tokens(block_size: int, blocks: int) -> None:
    assert hashes.blocks_per_prefix_chunk(block_size) == blocks


def test_what_is_not_in_the_tokens_separates_equal_ones() -> None:
    ids = list(range(16))
    image, other = bytes(range(16)), bytes(range(1, 17))
    found = {hashes.block_hash(ROOT, ids, extra) for extra in (b"", image, other, b"\0", b"\0\0\0\0")}
    assert len(found) == 5
    assert hashes.block_hash(ROOT, ids) in found, "without more the hash is that of the tokens"
    appended = b"\1\0\0\0"
    assert hashes.block_hash(ROOT, [*ids, 1]) != hashes.block_hash(ROOT, ids, appended)
