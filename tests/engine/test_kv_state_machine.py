"""Random sequences of operations keep the cache manager consistent, with every mix of cache kinds."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from kv_machine import KVMachine, walk

from examples import num_examples
from pagemill_protocol.report.cache_kinds import FULL, CacheKind, first_needed, longest_match, most_held

STATE = CacheKind("state", state=True)

KVMachine.TestCase.settings = settings(
    max_examples=num_examples(1000), stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
test_kv_bookkeeping = KVMachine.TestCase


@pytest.mark.slow
def test_random_walks_keep_tables_and_content_consistent() -> None:
    for seed in range(num_examples(200)):
        walk(seed)


def test_the_longest_match_is_that_of_a_search_over_all_boundaries() -> None:
    draw = random.Random(5)
    for _ in range(2000):
        kinds = draw.choice(
            [
                [FULL],
                [FULL, CacheKind("w", 5)],
                [CacheKind("w", 9), CacheKind("v", 3)],
                [CacheKind("w", 1)],
                [FULL, STATE],
                [FULL, CacheKind("w", 5), STATE],
                [CacheKind("w", 7), STATE],
                [STATE],
            ]
        )
        num_blocks = draw.randint(0, 9)
        cached = [[draw.random() < 0.8 for _ in range(num_blocks)] for _ in kinds]
        for kind, have in zip(kinds, cached, strict=True):
            assert first_needed(kind, 0, 4) == 0
            if kind.state:
                have[:] = [draw.random() < 0.3 for _ in have]
        resumable = [
            boundary
            for boundary in range(num_blocks + 1)
            if all(
                all(have[first_needed(kind, 4 * boundary, 4) : boundary])
                for kind, have in zip(kinds, cached, strict=True)
            )
        ]

        def has(number: int, index: int, have: list[list[bool]] = cached) -> bool:
            return have[number][index]

        found = longest_match(kinds, num_blocks, 4, has)
        assert found == max(resumable)


def test_the_most_blocks_held_are_those_of_a_walk_through_all_steps() -> None:
    draw = random.Random(6)
    for _ in range(2000):
        kind = draw.choice([FULL, CacheKind("w", draw.randint(1, 40)), STATE])
        if kind.state:
            assert [most_held(kind, 0, end, 5, 4) for end in (0, 3, 4, 80)] == [0, 0, 1, 1]
            continue
        start, step = draw.randint(0, 60), draw.randint(1, 20)
        end = start + draw.randint(0, 80)
        position, held = start, -(-start // 4) - first_needed(kind, start, 4)
        while position < end:
            after = min(end, position + step)
            held = max(held, -(-after // 4) - first_needed(kind, position, 4))
            position = after
        assert held <= most_held(kind, start, end, step, 4) <= held + 2
