"""What layers keep becomes cache kinds: layers of one rule are one kind, and bytes follow from their shapes."""

from __future__ import annotations

from pagemill_models.declaration.caches import LayerCacheSpec, StateSpec, VectorsSpec
from pagemill_models.spec.model_spec import kinds_of_caches
from pagemill_protocol.report.cache_kinds import (
    CacheKind,
    blocks_at,
    chunk_blocks,
    first_needed,
    further_chunk_blocks,
    mean_bytes,
    needed_bytes,
    sequence_bytes,
)

DELTA = StateSpec(parts=((4, 8, 8),), inputs_per_token=4 * 17, channels=96, width=4)
CONVOLUTION = StateSpec(channels=32, width=3)


def _kinds(caches: list[LayerCacheSpec], longest: int = 4096, most_proposed: int = 0) -> list[CacheKind]:
    return kinds_of_caches(enumerate(caches), 16, lambda size: 2 * size, longest, most_proposed)


def test_all_recurrent_layers_are_one_kind_behind_those_of_vectors() -> None:
    kinds = _kinds([DELTA, VectorsSpec(4, 8, 100), DELTA, VectorsSpec(4, 8), CONVOLUTION])
    assert [(kind.name, kind.layers, kind.state) for kind in kinds] == [
        ("full", (3,), False),
        ("window-100", (1,), False),
        ("state", (0, 2, 4), True),
    ]
    assert kinds[2].block_bytes == 4 * (2 * (4 * 8 * 8 + 3 * 96) + 2 * 32)
    assert kinds[2].row_bytes == 4 * (2 * (16 * 4 * 17 + 3 * 96) + 2 * 32)
    proposing = _kinds([DELTA], most_proposed=8)[0]
    assert proposing.row_bytes == 4 * ((16 + 8) * 4 * 17 + (3 + 8) * 96)
    assert proposing.block_bytes == 4 * (4 * 8 * 8 + 3 * 96), "proposed tokens are in no state"


def test_a_sequence_has_one_state_however_long_it_is() -> None:
    full, state = _kinds([VectorsSpec(2, 64), DELTA])
    assert [first_needed(state, num_tokens, 16) for num_tokens in (0, 15, 16, 31, 32, 1000)] == [0, 0, 0, 0, 1, 61]
    for num_tokens, num_states in [(15, 0), (16, 1), (4096, 1)]:
        held = -(-num_tokens // 16) * full.block_bytes + num_states * state.block_bytes
        assert sequence_bytes([full, state], num_tokens, 512, 16) == held
    assert blocks_at([full, state], [100, 3], 320, 16) == 60, "three sequences have states"
    assert blocks_at([full, state], [100, 9], 320, 16) == 100
    assert needed_bytes([full, state], 20, 2, 320, 16) == 20 * full.block_bytes + 2 * state.block_bytes
    held = [9 * full.block_bytes, state.block_bytes]
    assert needed_bytes([full, state], 20, 2, 320, 16, held) == 20 * full.block_bytes + state.block_bytes


def test_what_one_sequence_needs_and_holds_on_average_agree_with_its_largest_size() -> None:
    kinds = _kinds([DELTA, VectorsSpec(4, 8, 100), VectorsSpec(4, 8)])
    sizes = range(160, 4000, 7)
    for num_tokens in sizes:
        at_end = sequence_bytes(kinds, num_tokens, 1, 16)
        assert needed_bytes(kinds, -(-num_tokens // 16), 1, num_tokens, 16) == at_end
        assert abs(mean_bytes(kinds, num_tokens, 16) - at_end) <= sum(kind.block_bytes for kind in kinds)
    averages = [mean_bytes(kinds[:1], num_tokens, 16) for num_tokens in range(160, 176)]
    blocks = [-(-num_tokens // 16) for num_tokens in range(160, 176)]
    assert abs(sum(averages) / sum(blocks) / kinds[0].block_bytes - 1) < 0.01


def test_every_block_is_published_of_kinds_that_keep_a_few() -> None:
    full, state = _kinds([VectorsSpec(2, 64), DELTA])
    assert chunk_blocks([full, state], 100_000, 16) == 4
    assert further_chunk_blocks([full, state], 4) == 1
    assert further_chunk_blocks([full, state], 1) == further_chunk_blocks([full], 4) == 0, "no report changes"
    assert chunk_blocks([state], 100_000, 16) == 1
    assert chunk_blocks([full], 100_000, 16) == 4
    assert chunk_blocks([full], 100, 16) == 1
