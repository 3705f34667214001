"""A cache's memory is divided among the kinds of a model's layers, and never exceeded."""

from __future__ import annotations

import random

import pytest

from pagemill_execution.config import StepLimits
from pagemill_execution.sizing.kv_sizes import CacheBlocks, bytes_beside, divide, longest_request
from pagemill_execution.weights.errors import LoadError
from pagemill_protocol.report.cache_kinds import CacheKind, most_held, sequence_bytes

KIB, MIB = 1024, 1024**2
STEP = StepLimits(64, 512)
HYBRID = [
    CacheKind("full", block_bytes=16 * 32 * KIB, layers=(3,)),
    CacheKind("state", block_bytes=48 * MIB, state=True, row_bytes=9 * MIB, layers=(0, 1, 2)),
]
"""32 KiB for each token, and a state as large as the keys and values of 1,536 tokens."""


def test_rows_padding_and_spare_states_come_off_before_sequences_get_blocks() -> None:
    total = 4096 * MIB
    cache = divide(HYBRID, total, 32_768, STEP, 16)
    assert cache.kinds == tuple(HYBRID)
    beside = 64 * 9 * MIB + 16 * 32 * KIB + 48 * MIB
    assert bytes_beside(HYBRID, 64) == beside
    num_full, num_states = cache.counts
    spares = 1 + 64 // 16
    per_sequence = sequence_bytes(HYBRID, 4096, 1, 16)
    fitting = (total - beside - spares * 48 * MIB) / per_sequence
    assert num_full == int(256 * fitting)
    assert num_states == spares + int(fitting)
    assert total - 49 * MIB < cache.num_bytes + beside <= total


def test_the_bytes_of_all_kinds_and_rows_never_exceed_the_budget() -> None:
    draw = random.Random(3)
    num_divided = 0
    for _ in range(2000):
        kinds = [
            CacheKind("full", block_bytes=draw.randint(1, 9000), layers=(0,)),
            *(
                CacheKind(f"window-{size}", size, (size,), draw.randint(1, 9000))
                for size in draw.sample([9, 70, 900], 2)
            ),
            CacheKind("state", None, (1,), draw.randint(1, 900_000), state=True, row_bytes=draw.randint(0, 9000)),
        ]
        kinds = [kind for kind in kinds if draw.random() < 0.7] or kinds[:1]
        total, step = draw.randint(1, 40_000_000), StepLimits(draw.randint(1, 90), draw.randint(90, 900))
        longest = draw.randint(900, 9000)
        try:
            cache = divide(kinds, total, longest, step, 16)
        except LoadError:
            least = divide(kinds, 2 * total + 600 * 9000 * 90, longest, step, 16)
            assert least.num_bytes > 0
            continue
        alone = len(cache.kinds) == 1 and cache.kinds[0].keeps_all
        assert cache.num_bytes + (0 if alone else bytes_beside(cache.kinds, step.max_num_seqs)) <= total
        assert all(count >= 1 for count, kind in zip(cache.counts, cache.kinds, strict=True) if kind.state)
        num_divided += 1
        if not cache.counts[0]:
            continue
        most, _ = longest_request(cache, step.max_num_batched_tokens, 16)
        for num_tokens in {1, min(most, longest)}:
            for kind, count in zip(cache.kinds, cache.counts, strict=True):
                assert most_held(kind, 0, num_tokens, step.max_num_batched_tokens, 16) <= count
    assert num_divided > 500


def test_states_are_no_reason_to_free_nothing_behind_windows() -> None:
    window = CacheKind("window-1024", 1024, (4, 5), 16 * 64 * KIB)
    kinds = [HYBRID[0], window, HYBRID[1]]
    cache = divide(kinds, 8192 * MIB, 32_768, STEP, 16)
    assert cache.kinds == tuple(kinds)
    small = divide(kinds, 1024 * MIB, 32_768, STEP, 16)
    assert [kind.name for kind in small.kinds] == ["full", "state"], "the window's blocks would cost context"
    assert small.kinds[0].block_bytes == HYBRID[0].block_bytes + window.block_bytes


def test_a_cache_without_room_for_a_state_is_refused_by_the_name_of_the_kind() -> None:
    with pytest.raises(
        LoadError, match=r"`state` alone takes .* Lower maxNumSeqs to 39 or raise kvCacheMemory"
    ) as refusal:
        divide(HYBRID, 600 * MIB, 32_768, STEP, 16)
    assert refusal.value.reason == "KVCacheTooSmall"
    assert divide(HYBRID, 600 * MIB, 32_768, StepLimits(4, 512), 16).counts[1] >= 2


def test_the_longest_request_is_that_of_the_kind_with_the_fewest_tokens() -> None:
    full, state = HYBRID
    window = CacheKind("window-64", 64, (1,), 16 * KIB)
    assert longest_request(CacheBlocks((full, state), (100, 1)), 512, 16) == (1600, 0)
    assert longest_request(CacheBlocks((full, state), (100, 0)), 512, 16) == (15, 1)
    assert longest_request(CacheBlocks((full, window), (100, 37)), 512, 16) == (1600, 0)
    assert longest_request(CacheBlocks((full, window), (100, 36)), 512, 16) == (576, 1)
